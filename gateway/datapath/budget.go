package datapath

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
)

// budget identifies the budget of a handshake: the address of a peer, a source that returned a cookie or,
// as the zero value, all other sources. Or it is that of cookies, sent or received.
type budget struct {
	addr   netip.Addr
	source string // behind a relay: address and port
	proven bool
	cookie bool // of the cookies that we send; with proven: to addresses of peers

	replies *device.Peer // cookie replies to handshakes with this peer
}

// budgets holds the time at which each budget is full again (GCRA). A full budget uses no memory. The zero
// value is ready.
type budgets struct {
	spent map[budget]time.Time
	swept time.Time // when full budgets were last removed
}

// spend takes one token from a budget that gains one per every and holds at most burst. It reports false
// when the budget is empty.
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

// peersAt is how many peers are at an address: as many as were heard from there last, or one that is
// configured there. Addresses of relays are nobody's.
func (t *Tunnel) peersAt(addr netip.Addr) (n int) {
	addr = addr.Unmap()
	if n = t.heard.at(addr); n == 0 && t.peers.Load().byAddr[addr] != nil {
		n = 1
	}
	if n > 0 && t.relay(addr) {
		return 0
	}
	return n
}

// relay reports whether our Services relay messages from an address.
func (t *Tunnel) relay(addr netip.Addr) bool {
	relays := t.relays.Load()
	return relays != nil && (*relays)(addr)
}

// heard holds the addresses at which peers were last heard by authentic messages. Methods may be called
// concurrently.
type heard struct {
	mu    sync.RWMutex
	peers map[netip.Addr]int // number of peers at an address
}

// whereabouts is the address of a peer, and since when it counts.
type whereabouts struct {
	addr  netip.Addr
	since time.Time
}

// note records the address of a peer. A peer that has moved counts at its new address not before movePause after
// its last move: the budget there may be full. It costs one comparison while the peer stays there.
func (h *heard) note(p *peer, from conn.Endpoint, now time.Time) {
	addr := from.DstIP()
	if was := p.heardAt.Load(); was == nil || was.addr != addr && now.Sub(was.since) >= movePause {
		h.move(p, &whereabouts{addr, now})
	}
}

// move records a new address of a peer; nil: the peer is removed, and later calls have no effect.
func (h *heard) move(p *peer, to *whereabouts) {
	h.mu.Lock()
	defer h.mu.Unlock()
	was := p.heardAt.Load()
	if p.gone {
		return
	}
	if was != nil {
		if h.peers[was.addr.Unmap()]--; h.peers[was.addr.Unmap()] == 0 {
			delete(h.peers, was.addr.Unmap())
		}
	}
	p.heardAt.Store(to)
	if p.gone = to == nil; p.gone {
		return
	}
	if h.peers == nil {
		h.peers = make(map[netip.Addr]int)
	}
	h.peers[to.addr.Unmap()]++
}

// at is how many peers are at an address.
func (h *heard) at(addr netip.Addr) int {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.peers[addr]
}
