package kube

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"reflect"
	"strings"

	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

// A Snapshot is what the objects ask of the gateway, complete.
type Snapshot struct {
	Gateway    fabric.Gateway
	Problems   []fabric.Problem // of the objects that were left out: one that is broken concerns no other
	Keys       keyring.Ring
	PodNetwork fabric.PodNetwork       // where a replica delivers that has a network of its own
	Preshared  map[string]PresharedKey // by cluster ID; never modified
}

// wish is the last Snapshot, and whether it is what is wanted now.
type wish struct {
	snapshot   Snapshot
	err        error // why snapshot is an old one
	valid      bool
	remembered error // it is of the state directory, since when and why; nil: of the API server
}

// publish makes a Snapshot of the API server's the wish.
func (g *Gateway) publish(s Snapshot) {
	texts := make([]string, len(s.Problems))
	for i, p := range s.Problems {
		texts[i] = p.Error()
	}
	if all := strings.Join(texts, "\n"); all != g.logged { // only refresh calls this
		g.logged = all
		for _, p := range s.Problems {
			g.log.Warn("ignored an invalid object", "object", p.Origin.String(), "field", p.Field, "problem", p.Message)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.wishLocked(wish{snapshot: s, valid: true})
}

// wishLocked replaces the wish; g.mu is held.
func (g *Gateway) wishLocked(next wish) {
	g.wish = next
	if next.valid {
		g.shared = next.snapshot.Keys.Gateways
	}
	close(g.wished)
	g.wished = make(chan struct{})
}

// Snapshots calls deliver with the present Snapshot and with each that differs from the one before,
// until ctx ends. An error says why the Snapshot before it is not what is wanted now; it stays in
// force.
func (g *Gateway) Snapshots(ctx context.Context, deliver func(Snapshot, error)) {
	var last wish
	for {
		g.mu.Lock()
		w, wished := g.wish, g.wished
		g.mu.Unlock()
		repaired := last.err != nil && w.err == nil
		if w.valid && (repaired || !last.valid || !reflect.DeepEqual(w.snapshot, last.snapshot)) {
			deliver(w.snapshot, nil)
		}
		if w.valid && w.err != nil && (last.err == nil || last.err.Error() != w.err.Error()) {
			deliver(w.snapshot, w.err)
		}
		if w.valid {
			last = w
		}
		select {
		case <-ctx.Done():
			return
		case <-wished:
		}
	}
}

// SharedKey is keyring.Ring.Gateways; zero: it is not known yet. A replica that restarts knows it by its state
// directory, before the API server answers.
func (g *Gateway) SharedKey() [32]byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shared
}

// DialAPIServer connects to the API server that this gateway reads from.
func (g *Gateway) DialAPIServer(ctx context.Context) (net.Conn, error) {
	server, _, err := rest.DefaultServerUrlFor(g.o.Config)
	if err != nil {
		return nil, err
	}
	return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(server.Hostname(), cmp.Or(server.Port(), "443")))
}

// Others are the addresses of the other gateways of the installation; true: of the active one.
func (g *Gateway) Others() map[netip.Addr]bool {
	g.mu.Lock()
	e := g.started
	g.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.neighbours()
}

// Active returns the name of the active replica's Pod, empty while it is not known, and whether
// this is it.
func (g *Gateway) Active() (pod string, self bool) {
	g.mu.Lock()
	e := g.election
	g.mu.Unlock()
	if e == nil {
		return "", false
	}
	return e.holder(), e.active()
}
