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

// What a peer can flip as often as it likes is followed changesAtOnce times, and then once in a while. Its networks
// it cannot flip: a wider one needs consent.
const (
	changesAtOnce = 8
	answerEvery   = time.Minute // each change of an answer is an event for every node,
	gatewayEvery  = time.Second // of an endpoint or a key one for the gateways
)

// A pace bounds how often each peer changes something. Its methods may be called concurrently.
type pace struct {
	every time.Duration

	mu    sync.Mutex
	peers map[string]*rate.Limiter // of the peers that have changed it
}

// wait returns how long a peer has to wait with a change that comes now. Asking costs nothing.
func (p *pace) wait(id string, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.peers[id]
	if l == nil {
		return 0
	}
	return max(0, time.Duration((1-l.TokensAt(now))*float64(p.every)))
}

// count counts a change that was written. last reports whether the next one has to wait, if it came now.
func (p *pace) count(id string, now time.Time) (last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peers == nil {
		p.peers = make(map[string]*rate.Limiter)
	}
	if p.peers[id] == nil {
		p.peers[id] = rate.NewLimiter(rate.Every(p.every), changesAtOnce)
	}
	return p.peers[id].AllowN(now, 1) && p.peers[id].TokensAt(now) < 1
}

// forget forgets a peer that has left.
func (p *pace) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.peers, id)
}

// paced returns our NetworkConfig with the answer to follow, and how long the peer's present one has to wait: the former
// one is followed meanwhile.
func (r *tunnelEndpointReconciler) paced(id string, original *v1alpha1.NetworkConfig) (*v1alpha1.NetworkConfig, time.Duration) {
	state := r.Store.State()
	was := state.AnswerOf(id)
	pod, external, ok := fabric.SeenBy(original)
	if !ok || !complete(was) || state.Answered(id, pod, external).AnswerOf(id) == was {
		return original, 0
	}
	wait := r.answers.wait(id, time.Now())
	if wait > 0 {
		original = original.DeepCopy()
		original.Status.PodCIDRNAT, original.Status.ExternalCIDRNAT = was.Pod.String(), was.External.String()
	}
	return original, wait
}

// complete reports whether a peer has answered both our networks. It does so for nothing when it has before.
func complete(answer ipam.Grant) bool { return answer.Pod.IsValid() && answer.External.IsValid() }

// sameGateway reports whether two have the same gateway of the peer: its endpoint and its keys.
func sameGateway(a, b v1alpha1.TunnelEndpointSpec) bool {
	return a.EndpointIP == b.EndpointIP && a.BackendType == b.BackendType && maps.Equal(a.BackendConfig, b.BackendConfig)
}
