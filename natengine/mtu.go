package natengine

import (
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// path holds, for the path to one peer, the size of the largest packet and the allowance for ICMP
// errors about larger packets.
type path struct {
	mtu  atomic.Int32
	next atomic.Int64 // time at which the allowance is full again, as a time.Duration

	errorsSent, errorsLimited, fragmented atomic.Uint64
}

// MTU returns the size in octets of the largest IP packet that may be sent to the peer: Peer.MTU of
// the rules in force, or 0 for no bound. The engine does not enforce it, because only the caller
// has the size of segments; see TooBig.
func (p *PeerState) MTU() int { return int(p.path.mtu.Load()) }

// CountFragmented counts a packet that the caller has cut into fragments because it was too big.
func (p *PeerState) CountFragmented() { p.path.fragmented.Add(1) }

// errorBurst is the maximum number of errors that may be sent at once.
const errorBurst = 100

// allowError reports whether one more error may be sent, and if so, subtracts it from the peer's
// allowance (RFC 1812, section 4.3.2.8; RFC 4443, section 2.4f). The allowance is a token bucket of
// size errorBurst. Its state is the time at which the bucket is full again.
func (p *path) allowError(now, interval time.Duration) bool {
	for {
		old := p.next.Load()
		next := max(time.Duration(old), now) + interval
		if next-now > errorBurst*interval {
			p.errorsLimited.Add(1)
			return false
		}
		if p.next.CompareAndSwap(old, int64(next)) {
			return true
		}
	}
}

// TooBig makes the ICMP error for the sender of v: fragmentation needed or packet too big, with mtu
// as next-hop MTU. Outbound has translated v, and v is larger than mtu, the MTU of its peer. The
// error is written to buf, which has room for packet.MaxTooBig octets. It quotes the packet with
// the source and port that the sender used. The source of the error is the destination of the
// packet, because every filter on the path back expects packets from there.
//
// The action is Forward for an error to send to the link, and Deliver for one to the in-process
// endpoint. The action is Discard, without an error, in three cases: no error may be sent about
// this packet (see packet.View.TooBig), Config.MaxErrorsPerSecond is reached, or the sender is
// unknown. The sender is unknown, for example, if v is a later fragment, which has no ports, from
// the NAPT address. v is not changed, and the caller counts the drop of v.
//
// TooBig first makes the error that the peer would send about the packet in the tunnel. It then
// translates that error like any inbound one, so the error opens, refreshes and ends no flow.
func (e *Engine) TooBig(v *packet.View, mtu int, buf []byte, now time.Duration) ([]byte, Action) {
	n := v.TooBig(buf, mtu)
	if n == 0 {
		return nil, Discard
	}
	r := e.rules.Load().remote(v.Dst())
	if r == nil || !r.peer.path.allowError(now, time.Second/time.Duration(e.config.MaxErrorsPerSecond)) {
		return nil, Discard
	}
	var w packet.View
	if w.Parse(buf[:n], packet.ChecksumComplete) != nil {
		return nil, Discard
	}
	// The Trace keeps inboundError from counting anything.
	c := translation{e: e, v: &w, r: r, dir: Inbound, now: tickOf(now), near: destination(&w), far: source(&w), tr: &Trace{}}
	verdict := c.inboundError()
	if verdict.Action == Discard {
		return nil, Discard
	}
	r.peer.path.errorsSent.Add(1)
	return w.Bytes(), verdict.Action
}
