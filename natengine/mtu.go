package natengine

import (
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// path is what the engine knows about the way to one peer: how large a packet may be, and whether
// another error about one that is too large may be sent now.
type path struct {
	mtu  atomic.Int32
	next atomic.Int64 // time.Duration: when the errors sent so far would be paid for

	told, silent, fragmented atomic.Uint64
}

// MTU is the largest IP packet in octets that may go to the peer: Peer.MTU of the rules in force, 0
// for no bound. The caller compares, because it knows the size of segments too; see TooBig.
func (p *PeerState) MTU() int { return int(p.path.mtu.Load()) }

// CountFragmented counts a packet that the caller has cut into fragments because it was too big.
func (p *PeerState) CountFragmented() { p.path.fragmented.Add(1) }

// errorBurst is how many errors may follow each other at once.
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

// TooBig makes the error for the sender of v, a packet that Outbound has translated and that is
// larger than mtu, the bound for its peer: fragmentation needed or packet too big, with mtu as
// next-hop MTU. It is written to buf, which holds packet.MaxTooBig octets, and is as the sender has
// to see it: it quotes the packet with the source and port that it was sent with, and comes from
// the packet's destination, since that is an address which every filter on the way back expects.
// Forward means that it goes to the link, Deliver to the in-process endpoint, Discard that there is
// none: about this packet none may be sent (see packet.View.TooBig), there are more than
// Config.MaxErrorsPerSecond, or nobody can be told, which is the case for a fragment without ports
// behind the NAPT address. v is not changed; counting its drop is the caller's business.
//
// The error is made as the peer would make it, about the packet as it is in the tunnel, and then
// translated like any error that comes in, so it opens, refreshes and ends no flow.
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
	c := crossing{e: e, v: &w, r: r, dir: Inbound, now: tickOf(now), near: destination(&w), far: source(&w), tr: &Trace{}} // traced, so that it counts nothing
	verdict := c.inboundError()
	if verdict.Action == Discard {
		return nil, Discard
	}
	r.peer.path.told.Add(1)
	return w.Bytes(), verdict.Action
}
