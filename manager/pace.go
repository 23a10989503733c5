package manager

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// How often one peer changes its answer. Its networks it cannot flip: a wider one needs consent.
const (
	changesAtOnce = 8
	changeEvery   = time.Minute
)

// A pace bounds how often each peer changes its answer, since each change of a NetworkAllocation is an event for
// every node.
// Its zero value is ready for use. Its methods may be called concurrently.
type pace struct {
	mu    sync.Mutex
	peers map[string]*rate.Limiter // of all peers that ever changed something; one has 100 octets
}

// wait counts a change and returns 0, or returns how long the peer has to wait with it. last reports whether the
// next one has to wait, if it came now.
func (p *pace) wait(id string, now time.Time) (wait time.Duration, last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peers == nil {
		p.peers = make(map[string]*rate.Limiter)
	}
	if p.peers[id] == nil {
		p.peers[id] = rate.NewLimiter(rate.Every(changeEvery), changesAtOnce)
	}
	r := p.peers[id].ReserveN(now, 1)
	if wait = r.DelayFrom(now); wait > 0 {
		r.CancelAt(now)
		return wait, false
	}
	return 0, p.peers[id].TokensAt(now) < 1
}

// tooSoon returns how long the peer's former answer stays in force because it has changed too often; 0: not at all.
func (r *TunnelEndpointReconciler) tooSoon(id string, original *v1alpha1.NetworkConfig) time.Duration {
	state := r.Store.State()
	pod, external, ok := fabric.SeenBy(original)
	was := state.AnswerOf(id)
	if !ok || was == (ipam.Grant{}) || state.Answered(id, pod, external).AnswerOf(id) == was {
		return 0
	}
	wait, last := r.answers.wait(id, time.Now())
	if last {
		r.Log.Warn("peer changes its answer too often; processing one change a minute", "peer", id, "answer", was)
	}
	return wait
}
