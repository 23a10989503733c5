package exchange

import (
	"maps"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// A peer can change its answer, endpoint and keys as often as it likes. We apply changesAtOnce
// changes at once, and then one per interval. Changes of the peer's networks need no such limit: a
// claim that would give the peer additional addresses needs consent.
const (
	changesAtOnce   = 8
	answerInterval  = time.Minute // each new answer is an event for every node
	gatewayInterval = time.Second // a new endpoint or key is an event for the gateways only
)

// A pace limits the rate of one kind of change for each peer. Its methods may be called
// concurrently.
type pace struct {
	interval time.Duration

	mu    sync.Mutex
	peers map[string]*rate.Limiter // by cluster ID; only peers that have changed something
}

// delay returns how long a change that arrives now has to wait. It does not count the change.
func (p *pace) delay(id string, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.peers[id]
	if l == nil {
		return 0
	}
	return max(0, time.Duration((1-l.TokensAt(now))*float64(p.interval)))
}

// record counts a change that was written. It reports whether the next change has to wait.
func (p *pace) record(id string, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peers == nil {
		p.peers = make(map[string]*rate.Limiter)
	}
	if p.peers[id] == nil {
		p.peers[id] = rate.NewLimiter(rate.Every(p.interval), changesAtOnce)
	}
	return p.peers[id].AllowN(now, 1) && p.peers[id].TokensAt(now) < 1
}

// forget drops the state of a peer that has left.
func (p *pace) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.peers, id)
}

// paced returns our NetworkConfig with the answer to use. If the peer changes its answer too often,
// that is the previous answer, and paced also returns the time for which the new answer has to
// wait.
func (r *tunnelEndpointReconciler) paced(id string, original *v1alpha1.NetworkConfig) (*v1alpha1.NetworkConfig, time.Duration) {
	state := r.Store.State()
	was := state.AnswerOf(id)
	pod, external, ok := fabric.SeenBy(original)
	if !ok || !complete(was) || state.Answered(id, pod, external).AnswerOf(id) == was {
		return original, 0
	}
	wait := r.answers.delay(id, time.Now())
	if wait > 0 {
		original = original.DeepCopy()
		original.Status.PodCIDRNAT, original.Status.ExternalCIDRNAT = was.Pod.String(), was.External.String()
	}
	return original, wait
}

// complete reports whether an answer covers both of our networks. Only changes of a complete answer
// are paced.
func complete(answer ipam.Allocation) bool { return answer.Pod.IsValid() && answer.External.IsValid() }

// sameGateway reports whether both specs describe the peer's gateway by the same endpoint and keys.
func sameGateway(a, b v1alpha1.TunnelEndpointSpec) bool {
	return a.EndpointIP == b.EndpointIP && a.BackendType == b.BackendType && maps.Equal(a.BackendConfig, b.BackendConfig)
}
