package natengine

import (
	"errors"

	"github.com/isthmus-net/isthmus/packet"
)

// The packet that an ICMP error quotes determines the translation of the error. An inbound error
// quotes a packet that we sent, in the form that the peer saw. The engine restores our original
// address in the quote. An outbound error quotes a packet of the peer after translation. The engine
// changes our address in the quote to the one that the peer used. In both cases it translates the
// outer header to match the quote. An error opens, refreshes and ends no flow (RFC 4787, REQ-12;
// RFC 5508, REQ-4 to 6). Its type and code do not change.
//
//	inbound    peer's router ─► mapped   quoting  mapped ─► remote      mapped becomes local, in both headers
//	outbound   our router ─► remote      quoting  remote ─► local       local becomes mapped; our router: see outboundError

// quote parses and checks the quoted packet. It drops a redirect, as Linux does
// (nf_nat_icmp_reply_translation), because a redirect names a gateway by an address that is not
// valid on the other side.
func quote(v *packet.View, q *packet.Quote) Drop {
	switch err := v.Quote(q); {
	case errors.Is(err, packet.ErrICMPChecksum), errors.Is(err, packet.ErrHeaderChecksum):
		return DropBadChecksum
	case err != nil, q.IsICMPError(), v.Is4() && v.ICMPType() == 5:
		return DropICMPError
	}
	return DropNone
}

// quoteKey returns the key with which a packet of direction dir finds the flow of the quoted
// packet. ok is false if the quote ends before the ports, without which no flow can be identified.
func quoteKey(q *packet.Quote, dir Direction, near, remote addr) (k key, ok bool) {
	var nearPort, remotePort uint16
	switch class := classOf(q.Proto(), q.Is4()); {
	case q.LaterFragment():
		return key{}, false
	case class == icmpIDs:
		if !q.IsICMPQuery() {
			return key{}, false
		}
		nearPort, remotePort = q.ICMPID(), queryPort(q.ICMPType(), 1-dir) // the quoted packet went the other way
	case class != noPorts:
		if !q.HasPorts() {
			return key{}, false
		}
		nearPort, remotePort = q.SrcPort(), q.DstPort()
		if dir == Outbound { // the quoted packet was inbound: its destination is our end
			nearPort, remotePort = remotePort, nearPort
		}
	}
	return keyOf(dir, near, remote, q.Proto(), nearPort, remotePort), true
}

// quotedFlow returns the flow of the quoted packet. ourEnd and peerEnd are the ends of that packet.
func (c *translation) quotedFlow(q *packet.Quote, ourEnd, peerEnd addr) (match, bool) {
	k, ok := quoteKey(q, c.dir, ourEnd, peerEnd)
	if !ok {
		return match{}, false
	}
	return c.find(&k)
}

// inboundError translates an error about a packet that we sent. The outer source is an address of
// the peer, so it does not change.
func (c *translation) inboundError() Verdict {
	v, r := c.v, c.r
	var q packet.Quote
	if drop := quote(v, &q); drop != DropNone {
		return c.refuse(drop)
	}
	near, to := addrOf(q.Src()), addrOf(q.Dst())
	// The error must go to the sender of the quoted packet, and that packet must have gone to this
	// peer.
	if known, _ := r.rule.isRemote(to); near != c.near || !known {
		return c.refuse(DropICMPError)
	}
	m := &r.rule.pods[near.family()]
	local, pod := m.mapIn(near)
	port := samePort
	if !pod || m.single {
		switch f, ok := c.quotedFlow(&q, near, to); {
		case ok:
			c.tr.known(&f)
			local, port = f.other, int(f.otherPort(Inbound))
		case pod && c.e.offLimits(local, v.Is4()):
			return c.refuse(DropDestination)
		case pod:
			c.tr.prefixMapIn(r.rule, near.family())
		case r.rule.seen[near] != (addr{}), m.ok && near == m.natAddr():
			return c.refuse(DropICMPError)
		case r.rule.isExternal(near):
			return c.refuse(DropNoMapping)
		default:
			return c.refuse(DropDestination)
		}
	} else if c.tr.prefixMapIn(r.rule, near.family()); c.e.offLimits(local, v.Is4()) {
		return c.refuse(DropDestination)
	}
	q.SetSrc(local.netip())
	if port != samePort {
		q.SetSrcPort(uint16(port))
		q.SetICMPID(uint16(port))
	}
	return c.forward(local, samePort)
}

// outboundError translates an error about a packet that the peer sent. The new outer source depends
// on the host that sent the error. Our end of the flow gets the address that the peer used for it.
// Another pod gets its address as the peer sees it. The gateway gets the address of the in-process
// endpoint as the peer sees it. Any other host gets the NAPT address. None of these addresses needs
// a flow, and a traceroute can distinguish them.
func (c *translation) outboundError() Verdict {
	r, src := c.r, c.near
	var q packet.Quote
	if drop := quote(c.v, &q); drop != DropNone {
		return c.refuse(drop)
	}
	near, from := addrOf(q.Dst()), addrOf(q.Src())
	if from != c.far {
		return c.refuse(DropICMPError)
	}
	m := &r.rule.pods[near.family()]
	mapped, pod := m.mapOut(near)
	port := samePort
	if !pod || m.single || r.rule.isEndpoint(near) {
		switch f, ok := c.quotedFlow(&q, near, from); {
		case ok:
			c.tr.known(&f)
			mapped, port = f.other, int(f.otherPort(Outbound))
		case pod:
			c.tr.prefixMap(r.rule, near.family())
		default:
			return c.refuse(DropICMPError)
		}
	} else {
		c.tr.prefixMap(r.rule, near.family())
	}
	outer, isPod := m.mapOut(src)
	switch {
	case src == near:
		outer = mapped
	case isPod && src != c.e.self[src.family()]:
	case src == c.e.router[src.family()] && r.rule.gateway[src.family()] != (addr{}):
		outer = r.rule.gateway[src.family()]
	case m.ok:
		outer = m.natAddr()
	default:
		return c.refuse(DropSource)
	}
	q.SetDst(mapped.netip())
	if port != samePort {
		q.SetDstPort(uint16(port))
		q.SetICMPID(uint16(port))
	}
	return c.forward(outer, samePort)
}
