package datapath

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
)

// budget identifies a budget: for handshakes from the address of a peer, from a source that
// returned a cookie, or, as the zero value, from all other sources; or for cookies that are sent or
// received.
type budget struct {
	addr   netip.Addr
	source string // behind a relay: address and port
	proven bool
	cookie bool // of the cookies that we send; with proven: of those to addresses of peers

	replies *device.Peer // cookie replies to handshakes with this peer
}

// budgets stores for each budget when it is full again (GCRA). A full budget uses no memory. The
// zero value is ready.
type budgets struct {
	spent map[budget]time.Time
	swept time.Time // when full budgets were last removed
}

// spend takes one token from a budget that gains one per interval every and holds at most burst. It
// reports false when the budget is empty.
func (b *budgets) spend(k budget, now time.Time, every time.Duration, burst int) bool {
	at, ok := b.spent[k]
	if at.Before(now) {
		at = now
	}
	if at.Sub(now) > every*time.Duration(burst-1) {
		return false
	}
	if !ok && now.Sub(b.swept) > time.Second {
		maps.DeleteFunc(b.spent, func(_ budget, until time.Time) bool { return until.Before(now) })
		b.swept = now
	}
	if !ok && k.proven && !k.cookie && len(b.spent) >= maxBudgets {
		return false
	}
	if b.spent == nil {
		b.spent = make(map[budget]time.Time)
	}
	b.spent[k] = at.Add(every)
	return true
}

// peersAt returns the number of peers at an address: those last heard from there, or else one that
// is configured there. Anybody may send from the address of a relay, so there it returns the number
// of peers last heard from that address and port.
func (t *Tunnel) peersAt(at netip.AddrPort) (n int) {
	if n = t.heard.at(at.Addr()); n == 0 && t.peers.Load().byAddr[at.Addr()] != nil {
		n = 1
	}
	if n > 0 && t.relay(at.Addr()) {
		return t.heard.exactly(at)
	}
	return n
}

// remoteOf returns the remote address and port of an endpoint.
func remoteOf(e conn.Endpoint) netip.AddrPort {
	var port uint16
	if at, ok := e.(interface{ AddrPort() netip.AddrPort }); ok {
		port = at.AddrPort().Port()
	}
	return netip.AddrPortFrom(e.DstIP().Unmap(), port)
}

// relay reports whether our Services relay messages from an address.
func (t *Tunnel) relay(addr netip.Addr) bool {
	relays := t.relays.Load()
	return relays != nil && (*relays)(addr)
}

// heard holds the addresses from which peers last sent authentic messages. Methods may be called
// concurrently.
type heard struct {
	mu     sync.RWMutex
	byAddr map[netip.Addr]int     // number of peers at an address
	byPort map[netip.AddrPort]int // number of peers at an address and port
}

// whereabouts is the address and port of a peer, and since when the peer counts there.
type whereabouts struct {
	at    netip.AddrPort
	since time.Time
}

// note records the address and port of a peer. A peer that moves counts at its new place only
// movePause after its last move, because the budget there may be full. For an unchanged place, note
// costs one comparison.
func (h *heard) note(p *peer, from conn.Endpoint, now time.Time) {
	at := remoteOf(from)
	if was := p.heardAt.Load(); was == nil || was.at != at && now.Sub(was.since) >= movePause {
		h.move(p, &whereabouts{at, now})
	}
}

// move records a new place of a peer; nil removes the peer, and later calls have no effect.
func (h *heard) move(p *peer, to *whereabouts) {
	h.mu.Lock()
	defer h.mu.Unlock()
	was := p.heardAt.Load()
	if p.gone {
		return
	}
	if was != nil {
		add(&h.byAddr, was.at.Addr(), -1)
		add(&h.byPort, was.at, -1)
	}
	p.heardAt.Store(to)
	if p.gone = to == nil; p.gone {
		return
	}
	add(&h.byAddr, to.at.Addr(), 1)
	add(&h.byPort, to.at, 1)
}

// add changes a counter. A counter of zero uses no memory.
func add[K comparable](counters *map[K]int, k K, n int) {
	if *counters == nil {
		*counters = make(map[K]int)
	}
	if (*counters)[k] += n; (*counters)[k] == 0 {
		delete(*counters, k)
	}
}

// at returns the number of peers at an address.
func (h *heard) at(addr netip.Addr) int {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.byAddr[addr]
}

// exactly returns the number of peers at an address and port.
func (h *heard) exactly(at netip.AddrPort) int {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.byPort[at]
}
