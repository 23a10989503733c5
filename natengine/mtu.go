package natengine

import (
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// path is what the engine knows about the path to one peer: how large a packet may be, and whether
// another error about a larger one may be sent now.
type path struct {
	mtu  atomic.Int32
	next atomic.Int64 // time.Duration: when the allowance is full again

	told, silent, fragmented atomic.Uint64
}

// MTU is the largest IP packet in octets that may go to the peer: Peer.MTU of the rules in force, 0
// for no bound. The engine does not enforce it: the caller knows the size of segments too; see
// TooBig.
func (p *PeerState) MTU() int { return int(p.path.mtu.Load()) }

// CountFragmented counts a packet that the caller has cut into fragments because it was too big.
func (p *PeerState) CountFragmented() { p.path.fragmented.Add(1) }

// errorBurst is how many errors may be sent in one burst.
const errorBurst = 100

// mayTell takes one error from the peer's allowance (RFC 1812, section 4.3.2.8; RFC 4443, section
// 2.4f): a token bucket of errorBurst, kept as the time until which it is spent.
func (p *path) mayTell(now, interval time.Duration) bool {
	for {
		old := p.next.Load()
		next := max(time.Duration(old), now) + interval
		if next-now > errorBurst*interval {
			p.silent.Add(1)
			return false
		}
		if p.next.CompareAndSwap(old, int64(next)) {
			return true
		}
	}
}

// TooBig makes the ICMP error for the sender of v, a packet that Outbound has translated and that
// exceeds mtu, the MTU of its peer: fragmentation needed or packet too big, with mtu as next-hop
// MTU. It is written to buf, which has room for packet.MaxTooBig octets. It quotes the packet with
// the source and port that its sender used, and its source is the packet's destination, an address
// that every filter on the path back expects. The result is Forward for an error to send to the
// link, and Deliver for one to the in-process endpoint. It is Discard if there is no error: none
// may be sent about this packet (see packet.View.TooBig), Config.MaxErrorsPerSecond is reached, or
// its sender is unknown, as for a fragment without ports behind the NAPT address. v is not changed;
// the caller counts its drop.
//
// The error is made as the peer would make it, about the packet in the tunnel, and then translated
// like any inbound error, so it opens, refreshes and ends no flow.
func (e *Engine) TooBig(v *packet.View, mtu int, buf []byte, now time.Duration) ([]byte, Action) {
	n := v.TooBig(buf, mtu)
	if n == 0 {
		return nil, Discard
	}
	r := e.rules.Load().remote(v.Dst())
	if r == nil || !r.peer.path.mayTell(now, time.Second/time.Duration(e.config.MaxErrorsPerSecond)) {
		return nil, Discard
	}
	var w packet.View
	if w.Parse(buf[:n], packet.ChecksumComplete) != nil {
		return nil, Discard
	}
	c := translation{e: e, v: &w, r: r, dir: Inbound, now: tickOf(now), near: destination(&w), far: source(&w), tr: &Trace{}} // traced, so that it counts nothing
	verdict := c.inboundError()
	if verdict.Action == Discard {
		return nil, Discard
	}
	r.peer.path.told.Add(1)
	return w.Bytes(), verdict.Action
}
