package kube

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// A refresher derives the gateway's configuration from the objects. Only one goroutine may use
// it.
type refresher struct {
	*Gateway
	cluster    v1alpha1.ClusterIdentity
	preshared  *presharedKeys
	requested  requested
	decider    fabric.GatewayDecider
	lastLogged string    // problems as last logged
	keyTries   time.Time // earliest time to create the Secret again

	// State of syncTunnels.
	writtenKey   [32]byte  // private key for which data.tunnels was last written or found correct
	tunnelsRetry time.Time // earliest time for the next write
	tunnelsErr   error     // error of the last attempt
}

// refresh reads the objects, evaluates them and publishes a Snapshot. If only Nodes or Pods have
// changed, which is frequent in a large cluster, it does not read the peers' objects again.
func (r *refresher) refresh(ctx context.Context) {
	r.mu.Lock()
	inUse := r.desired.snapshot.Keys
	r.mu.Unlock()
	ring, mismatch, err := r.key(ctx, inUse)
	site, unknown := r.site(ctx)
	network, unreachable := r.podNetwork()
	if err = errors.Join(err, unknown, unreachable, r.evaluate(ctx, ring)); err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		next := r.desired
		next.err = errors.Join(next.remembered, err)
		r.setDesired(next)
		return
	}
	problems := slices.Concat(mismatch, r.requested.problems, r.keeper.problems())
	if r.o.StateDirectory != "" {
		saved := r.requested.saved
		saved.locations.Site, saved.locations.PodNetwork = site, network
		r.keeper.put(saved, ring)
	}
	if r.candidate != nil {
		nodes := make(map[string]netip.Addr)
		for _, n := range network.Nodes {
			if addr := n.Underlay(); addr.IsValid() {
				nodes[n.Name] = addr
			}
		}
		r.candidate.SetNodes(nodes)
		if agents, ok := r.locations.withAgents(r.o.Namespace); ok {
			r.agents.Store(&agents)
		}
	}
	r.publish(Snapshot{Gateway: r.requested.atSite(site), Problems: problems, Keys: ring, PodNetwork: network, Preshared: r.requested.preshared})
}

// publish sets a Snapshot that was made from the API server's objects.
func (r *refresher) publish(s Snapshot) {
	texts := make([]string, len(s.Problems))
	for i, p := range s.Problems {
		texts[i] = p.Error()
	}
	if all := strings.Join(texts, "\n"); all != r.lastLogged {
		r.lastLogged = all
		for _, p := range s.Problems {
			r.log.Warn("ignored an invalid object", "object", p.Origin.String(), "field", p.Field, "problem", p.Message)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setDesired(desired{snapshot: s, valid: true})
}
