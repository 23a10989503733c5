package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
)

// How often a name is looked up: seldom while its peer is heard, soon while it is not.
const (
	lookupInterval = time.Minute
	lookupRetry    = 10 * time.Second
	lookupTimeout  = 5 * time.Second
	// silence is how long a peer may send nothing before its address is doubted. A peer that is
	// there answers our probe every two seconds.
	silence = 15 * time.Second
)

// resolver says where each peer's gateway is. Literal addresses are answers by themselves; names
// are looked up, preferring IPv4, and the previous answer is kept while it is still among the
// results (docs/liqo-v0.md, section 6.2). A new answer for a peer that can be heard waits until it
// cannot, because WireGuard has found the peer where it is, roaming included. Methods may be called
// concurrently.
type resolver struct {
	lookup  func(ctx context.Context, host string) ([]netip.Addr, error)
	changed func() // an endpoint is another one now; called from any goroutine
	log     *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	peers   map[string]*location
	remotes []netip.Prefix // addresses inside the tunnel can be no endpoint
}

// location is where one peer is.
type location struct {
	host string
	port uint16

	literal bool
	addr    netip.Addr // in use; zero: not known yet
	latest  netip.Addr // last answer, taken over when the peer is silent
	err     error      // of the last lookup

	silent bool
	next   time.Time // of the next lookup
	busy   bool      // one is under way
}

func newResolver(lookup func(context.Context, string) ([]netip.Addr, error), changed func(), log *slog.Logger) *resolver {
	r := &resolver{lookup: lookup, changed: changed, log: log, peers: make(map[string]*location)}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// close ends all lookups and waits for them.
func (r *resolver) close() {
	r.cancel()
	r.done.Wait()
}

// set replaces the peers. One whose name stays keeps its answer.
func (r *resolver) set(peers []fabric.GatewayPeer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.peers
	r.peers = make(map[string]*location, len(peers))
	r.remotes = r.remotes[:0]
	for _, p := range peers {
		r.remotes = append(r.remotes, p.AllowedIPs[:]...)
		if l := old[p.ID]; l != nil && l.host == p.Endpoint {
			l.port = p.Port
			r.peers[p.ID] = l
			continue
		}
		l := &location{host: p.Endpoint, port: p.Port}
		if addr, err := netip.ParseAddr(p.Endpoint); err == nil {
			l.literal, l.addr = true, addr.Unmap()
		}
		r.peers[p.ID] = l
	}
}

// endpoint is where to send packets for the peer; zero when its name has never been resolved, err
// says why.
func (r *resolver) endpoint(id string) (netip.AddrPort, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.peers[id]
	if l == nil {
		return netip.AddrPort{}, nil
	}
	if !l.addr.IsValid() {
		return netip.AddrPort{}, l.err
	}
	return netip.AddrPortFrom(l.addr, l.port), l.err
}

// heard says whether the peer sent something lately.
func (r *resolver) heard(id string, heard bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.peers[id]
	if l == nil {
		return
	}
	if !heard && !l.silent {
		l.next = time.Time{} // look it up at once
	}
	if l.silent = !heard; l.silent && l.take() {
		go r.changed()
	}
}

// take makes the last answer the one in use; true when that is another.
func (l *location) take() bool {
	if !l.latest.IsValid() || l.latest == l.addr {
		return false
	}
	l.addr = l.latest
	return true
}

// tick starts the lookups that are due. Call it about once a second.
func (r *resolver) tick(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, l := range r.peers {
		if l.literal || l.busy || now.Before(l.next) {
			continue
		}
		l.busy = true
		r.done.Go(func() { r.resolve(id, l) })
	}
}

func (r *resolver) resolve(id string, l *location) {
	ctx, cancel := context.WithTimeout(r.ctx, lookupTimeout)
	defer cancel()
	addrs, err := r.lookup(ctx, l.host)

	r.mu.Lock()
	var answer netip.Addr
	if err == nil {
		answer, err = choose(addrs, l.addr, r.remotes)
	}
	first := l.err == nil || err != nil && err.Error() != l.err.Error()
	if l.busy = false; err != nil {
		l.err = fmt.Errorf("resolving %s: %w", l.host, err)
		err = l.err
	} else {
		l.err, l.latest = nil, answer
	}
	changed := (!l.addr.IsValid() || l.silent) && l.take()
	if l.next = time.Now().Add(lookupInterval); l.silent || l.err != nil {
		l.next = time.Now().Add(lookupRetry)
	}
	r.mu.Unlock()

	if err != nil && first && r.ctx.Err() == nil {
		r.log.Warn("endpoint not resolved", "peer", id, "error", err)
	}
	if changed {
		r.log.Info("endpoint resolved", "peer", id, "host", l.host, "address", answer)
		r.changed()
	}
}

// choose picks the address to use out of the answers.
func choose(addrs []netip.Addr, current netip.Addr, remotes []netip.Prefix) (netip.Addr, error) {
	var usable []netip.Addr
	err := errors.New("no address")
	for _, a := range addrs {
		a = a.Unmap()
		inside := slices.IndexFunc(remotes, func(p netip.Prefix) bool { return p.Contains(a) })
		switch {
		case a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast() || a.IsLoopback():
			err = fmt.Errorf("%s is no address of a gateway", a)
		case inside >= 0: // the tunnel's own packets would go into the tunnel
			err = fmt.Errorf("%s is inside %s, which is reached through the tunnel itself", a, remotes[inside])
		default:
			usable = append(usable, a)
		}
	}
	if slices.Contains(usable, current) {
		return current, nil
	}
	if i := slices.IndexFunc(usable, netip.Addr.Is4); i >= 0 {
		return usable[i], nil
	}
	if len(usable) > 0 {
		return usable[0], nil
	}
	return netip.Addr{}, err
}
