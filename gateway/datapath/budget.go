package datapath

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
)

// A budget is the key of a rate limit. If neither cookie nor replies is set, the limit applies to
// handshakes. The zero value limits handshakes from all sources without a peer.
type budget struct {
	addr   netip.Addr // source of the handshakes; zero: all sources
	source string     // address and port of a source that is a relay (see Tunnel.relay); otherwise empty
	proven bool       // limits only sources that returned a cookie; for cookies, see below
	cookie bool       // limits the cookies that we send: to addresses of peers if proven is true, otherwise to all other addresses

	replies *device.Peer // limits cookie replies to our handshakes with this peer
}

// budgets stores, for each budget, the time when it will be full again (GCRA). A full budget uses
// no memory. The zero value is ready for use.
type budgets struct {
	spent map[budget]time.Time
	swept time.Time // when full budgets were last removed
}

// spend takes one token from the budget k, or returns false if the budget is empty. The budget
// gains one token per interval, and holds at most burst tokens.
func (b *budgets) spend(k budget, now time.Time, interval time.Duration, burst int) bool {
	full, ok := b.spent[k]
	if full.Before(now) {
		full = now
	}
	if full.Sub(now) > interval*time.Duration(burst-1) {
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
	b.spent[k] = full.Add(interval)
	return true
}

// peersAt returns the number of peers whose last authentic message came from an address. If there
// is none, but the address is the configured endpoint of a peer, the result is 1. Messages of any
// sender can come from the address of a relay. So for a relay the result is the number of peers
// whose last message came from the same address and port.
func (t *Tunnel) peersAt(source netip.AddrPort) (n int) {
	if n = t.locations.atAddr(source.Addr()); n == 0 && t.peers.Load().byAddr[source.Addr()] != nil {
		n = 1
	}
	if n > 0 && t.relay(source.Addr()) {
		return t.locations.atAddrPort(source)
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

// relay reports whether an address belongs to a relay. A relay is a node of this cluster that
// forwards messages for the gateway's Service, and replaces their source by its own address.
func (t *Tunnel) relay(addr netip.Addr) bool {
	relays := t.relays.Load()
	return relays != nil && (*relays)(addr)
}

// locationCounts counts peers by the address from which their last authentic message came. Methods
// may be called concurrently.
type locationCounts struct {
	mu     sync.RWMutex
	byAddr map[netip.Addr]int     // number of peers at an address
	byPort map[netip.AddrPort]int // number of peers at an address and port
}

// location is the address and port at which a peer is counted, and the time when it was first
// counted there.
type location struct {
	addr  netip.AddrPort
	since time.Time
}

// note records the address and port from which a peer has sent. For movePause after a move, it
// ignores further moves. Otherwise a peer could use the budgets of many addresses. If the address
// is unchanged, note costs one comparison.
func (h *locationCounts) note(p *peer, from conn.Endpoint, now time.Time) {
	addr := remoteOf(from)
	if was := p.location.Load(); was == nil || was.addr != addr && now.Sub(was.since) >= movePause {
		h.move(p, &location{addr, now})
	}
}

// move changes the address at which a peer is counted. If to is nil, move removes the peer, and
// later calls have no effect.
func (h *locationCounts) move(p *peer, to *location) {
	h.mu.Lock()
	defer h.mu.Unlock()
	was := p.location.Load()
	if p.removed {
		return
	}
	if was != nil {
		add(&h.byAddr, was.addr.Addr(), -1)
		add(&h.byPort, was.addr, -1)
	}
	p.location.Store(to)
	if p.removed = to == nil; p.removed {
		return
	}
	add(&h.byAddr, to.addr.Addr(), 1)
	add(&h.byPort, to.addr, 1)
}

// add adds n to a counter, and deletes a counter that becomes zero.
func add[K comparable](counters *map[K]int, k K, n int) {
	if *counters == nil {
		*counters = make(map[K]int)
	}
	if (*counters)[k] += n; (*counters)[k] == 0 {
		delete(*counters, k)
	}
}

// atAddr returns the number of peers whose last message came from an address.
func (h *locationCounts) atAddr(addr netip.Addr) int {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.byAddr[addr]
}

// atAddrPort returns the number of peers whose last message came from an address and port.
func (h *locationCounts) atAddrPort(addr netip.AddrPort) int {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.byPort[addr]
}
