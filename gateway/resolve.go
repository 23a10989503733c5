package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
)

// A peer's name is looked up every lookupInterval while messages come from the peer, and every
// lookupRetry while none come.
const (
	lookupInterval = time.Minute
	lookupRetry    = 10 * time.Second
	lookupTimeout  = 5 * time.Second
	// silence is the time without messages after which a peer counts as silent, and its name is
	// looked up again. A peer that is online answers our PING every two seconds.
	silence = 15 * time.Second
)

// A resolver determines the address of each peer's gateway. It looks up names and prefers IPv4. It
// keeps the previous address while that is among the answers (docs/liqo-v0.md, section 6.2). While
// messages come from a peer, a new answer is only stored, because WireGuard already has the peer's
// address, even if the peer roams. Methods may be called concurrently.
//
// fabric.Site checks literal addresses and every answer. A refused answer never replaces the
// address in use, so that a forged answer cannot cut off a peer. The resolver gives up the address
// in use only if a new Site refuses it.
type resolver struct {
	lookup  func(ctx context.Context, host string) ([]netip.Addr, error)
	changed func() // called from any goroutine after an endpoint has changed
	log     *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu    sync.Mutex
	peers map[string]*location
	last  []*fabric.GatewayPeer // argument of the last call of set
	round uint64                // number of calls of set that changed something
	site  fabric.Site
	index *fabric.SiteIndex // made from site

	// The method set stores new sources, and allowed reads them. A stored value is never modified.
	sources atomic.Pointer[sources]
}

// sources are the addresses from which messages of peers may come: addresses that a peer's gateway
// can have, addresses of relays (see relaysFrom), and the addresses in the field exempt.
type sources struct {
	index  *fabric.SiteIndex
	exempt map[netip.Addr]bool // literal endpoints of peers, and addresses that the resolver gave up
}

// A location is the resolver's state of one peer.
type location struct {
	host string
	port uint16

	literal   bool
	addr      netip.Addr // the address in use; zero: not known yet, or given up
	was       netip.Addr // the address that was last given up
	latest    netip.Addr // last answer; replaces addr when the peer is silent
	err       error      // error of the last lookup, or the reason why addr was given up
	abandoned bool       // the address in use was given up, and no other one is known

	silent bool
	next   time.Time // time of the next lookup
	busy   bool      // a lookup is running

	round uint64 // resolver.round at the last call of set that included this peer
}

func newResolver(lookup func(context.Context, string) ([]netip.Addr, error), changed func(), log *slog.Logger) *resolver {
	r := &resolver{lookup: lookup, changed: changed, log: log, peers: make(map[string]*location), index: fabric.Site{}.Index()}
	r.sources.Store(&sources{index: r.index})
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// close ends all lookups and waits for them.
func (r *resolver) close() {
	r.cancel()
	r.done.Wait()
}

// set replaces the peers and the Site, and reports whether anything has changed. A peer whose
// configured endpoint stays the same keeps its address, unless the new Site refuses that address.
func (r *resolver) set(peers []*fabric.GatewayPeer, site fabric.Site) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	same := site.Equal(r.site)
	if !same {
		r.site, r.index = site, site.Index()
	}
	if same && slices.Equal(peers, r.last) { // compares pointers
		return false
	}
	r.last = peers
	changed = !same
	r.round++
	for _, p := range peers {
		l := r.peers[p.ID]
		renamed := l == nil || l.host != p.Endpoint
		if renamed { // use a new location, because a lookup of the old name may still write to the old one
			changed = true
			_, err := netip.ParseAddr(p.Endpoint)
			l = &location{host: p.Endpoint, literal: err == nil}
			r.peers[p.ID] = l
		}
		l.port, l.round = p.Port, r.round
		if renamed || !same {
			r.recheck(p.ID, l)
		}
	}
	if len(r.peers) > len(peers) {
		changed = true
		maps.DeleteFunc(r.peers, func(_ string, l *location) bool { return l.round != r.round })
	}
	if changed {
		all := &sources{r.index, make(map[netip.Addr]bool, len(peers))}
		for _, l := range r.peers {
			if literal, err := netip.ParseAddr(l.host); l.literal && err == nil {
				all.exempt[literal.Unmap()] = true
			}
			all.exempt[l.was] = true
		}
		delete(all.exempt, netip.Addr{})
		r.sources.Store(all)
	}
	return changed
}

// allowed reports whether a message from a peer may come from an address. It accepts the addresses
// that the Site allows. It also accepts literal endpoints and addresses that the resolver gave up,
// even if the Site now refuses them. A Site refuses an address, for example, because a Node has it.
// The gateway sends to such an address only after the peer has sent from it.
//
// allowed is called for each message whose source differs from that of the previous message, so
// it takes no lock and reads no list.
func (r *resolver) allowed(addr netip.Addr) bool {
	s := r.sources.Load()
	return s.index.CheckSource(addr) == "" || s.exempt[addr.Unmap()]
}

// relaysFrom reports whether an address is that of a relay: a node of this cluster that forwards
// messages for the gateway's Service, and replaces their source by its own address.
func (r *resolver) relaysFrom(addr netip.Addr) bool { return r.sources.Load().index.RelaysFrom(addr) }

// recheck checks a location against the Site: it gives up an address in use that the Site refuses,
// and starts to use a literal address that the Site allows.
func (r *resolver) recheck(id string, l *location) {
	if l.latest.IsValid() && r.index.CheckEndpoint(l.latest) != "" {
		l.latest = netip.Addr{}
	}
	addr := l.addr
	if l.literal {
		addr, _ = netip.ParseAddr(l.host)
		addr = addr.Unmap()
	}
	switch wrong := r.index.CheckEndpoint(addr); {
	case !addr.IsValid(): // the name has not been looked up yet
	case wrong == "":
		if l.addr = addr; l.literal {
			l.err, l.abandoned = nil, false
		}
	default:
		err := fmt.Errorf("endpoint %s: %s", l.host, wrong)
		if l.err == nil || l.err.Error() != err.Error() {
			r.log.Warn("endpoint refused", "peer", id, "error", err)
		}
		if l.addr.IsValid() {
			l.abandoned, l.was = true, l.addr
		}
		l.addr, l.err, l.next = netip.Addr{}, err, time.Time{}
	}
}

// endpoint returns the address to which packets for the peer are sent. It is zero if the name was
// never resolved, or if the Site refuses the address. The error is that of the last lookup or the
// reason of the refusal. A valid address may come with an error, too.
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

// locate sets peer.at and peer.refused of each peer.
func (r *resolver) locate(peers []peer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range peers {
		p := &peers[i]
		l := r.peers[p.ID]
		if p.at, p.refused = (netip.AddrPort{}), false; l == nil {
			continue
		}
		if p.refused = l.abandoned; l.addr.IsValid() {
			p.at = netip.AddrPortFrom(l.addr, l.port)
		}
	}
}

// setHeard records whether messages came from the peer lately.
func (r *resolver) setHeard(id string, heard bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.peers[id]
	if l == nil {
		return
	}
	if !heard && !l.silent {
		l.next = time.Time{} // look it up at once
	}
	if l.silent = !heard; l.silent && l.useLatest() {
		go r.changed()
	}
}

// useLatest starts to use the latest answer, and reports whether the address has changed.
func (l *location) useLatest() bool {
	if !l.latest.IsValid() || l.latest == l.addr {
		return false
	}
	l.addr, l.abandoned = l.latest, false
	return true
}

// tick starts the lookups that are due. It should be called about once a second.
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
		answer, err = choose(addrs, l.addr, r.index)
	}
	first := l.err == nil || err != nil && err.Error() != l.err.Error()
	if l.busy = false; err != nil {
		l.err = fmt.Errorf("resolving %s: %w", l.host, err)
		err = l.err
	} else {
		l.err, l.latest = nil, answer
	}
	changed := (!l.addr.IsValid() || l.silent) && l.useLatest()
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

// choose returns one of the answers: current if it is among them, else the first IPv4 address,
// else the first address. It ignores answers that the Site refuses.
func choose(addrs []netip.Addr, current netip.Addr, site *fabric.SiteIndex) (netip.Addr, error) {
	var usable []netip.Addr
	err := errors.New("no address")
	for _, a := range addrs {
		a = a.Unmap()
		if wrong := site.CheckEndpoint(a); wrong != "" {
			err = errors.New(wrong)
			continue
		}
		usable = append(usable, a)
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
