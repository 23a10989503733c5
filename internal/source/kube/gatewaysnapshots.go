package kube

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"reflect"

	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

// A Snapshot is the complete configuration of the gateway according to the objects.
type Snapshot struct {
	Gateway    fabric.Gateway
	Problems   []fabric.Problem // problems of objects that were left out; other objects are not affected
	Keys       keyring.Ring
	PodNetwork fabric.PodNetwork       // nodes and pods to which a replica with its own network namespace delivers
	Preshared  map[string]PresharedKey // cluster ID → key; never modified
}

// desired is the last Snapshot, with its origin and the reason why it may be out of date.
type desired struct {
	snapshot   Snapshot
	err        error // reason why snapshot is out of date; nil: it is up to date
	valid      bool
	remembered error // if snapshot comes from the state directory: why, and since when; nil: it comes from the API server
}

// setDesired replaces g.desired. The caller holds g.mu.
func (g *Gateway) setDesired(next desired) {
	g.desired = next
	if next.valid {
		g.shared = next.snapshot.Keys.Gateways
	}
	close(g.replaced)
	g.replaced = make(chan struct{})
}

// Snapshots calls deliver with the current Snapshot and with each later one that differs, until ctx
// ends. If deliver gets an error, it is the reason why the Snapshot is out of date; the Snapshot
// stays in force.
func (g *Gateway) Snapshots(ctx context.Context, deliver func(Snapshot, error)) {
	var last desired
	for {
		g.mu.Lock()
		w, replaced := g.desired, g.replaced
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
		case <-replaced:
		}
	}
}

// SharedKey returns keyring.Ring.Gateways, or zero if that key is unknown. After a restart, the key
// may come from the state directory, before the API server answers.
func (g *Gateway) SharedKey() [32]byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shared
}

// DialAPIServer connects to the API server that this gateway uses.
func (g *Gateway) DialAPIServer(ctx context.Context) (net.Conn, error) {
	server, _, err := rest.DefaultServerUrlFor(g.o.Config)
	if err != nil {
		return nil, err
	}
	return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(server.Hostname(), cmp.Or(server.Port(), "443")))
}

// Others returns the addresses of the installation's other gateways; the value is true for the
// active one.
func (g *Gateway) Others() map[netip.Addr]bool {
	g.mu.Lock()
	e := g.started
	g.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.neighbours()
}

// Active returns the name of the active replica's Pod, or "" if it is unknown. self reports whether
// this replica is the active one.
func (g *Gateway) Active() (pod string, self bool) {
	g.mu.Lock()
	e := g.election
	g.mu.Unlock()
	if e == nil {
		return "", false
	}
	return e.holder(), e.active()
}
