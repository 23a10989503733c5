package natengine

import "github.com/isthmus-net/isthmus/packet"

// State bits of a flow. A packet sets stateSeenOut or stateSeenIn, by its direction. A TCP segment
// sets a bit only if it has an ACK. So if both bits are set, the connection is established.
const (
	stateLive     = 1 << iota // the entry is in use
	stateEndpoint             // the kind is endpointFlow, otherwise naptFlow
	stateSeenOut
	stateSeenIn
	stateFinOut
	stateFinIn
	stateRst
	stateQueued // the entry is in the queues of half-open flows; changes only under the table's mutex

	stateSeen = stateSeenOut | stateSeenIn
	stateFin  = stateFinOut | stateFinIn
	stateTCP  = stateSeen | stateFin | stateRst
)

// halfOpen reports whether a flow is not, or no longer, established. A half-open flow may be
// evicted. A TCP connection with one FIN is still in use, so it counts as established. A RST may be
// an off-path forgery, so it does not remove the connection. The connection becomes half-open, and
// the next segment without RST makes it established again (RFC 6146, section 3.5.2.2; RFC 7857,
// section 2).
func halfOpen(word uint64) bool {
	if word&stateSeen != stateSeen {
		return true
	}
	return word&stateRst != 0 || word&stateFin == stateFin
}

// nextWord returns the word of a flow after packet v.
func nextWord(word uint64, dir Direction, v *packet.View) uint64 {
	if protoOf(word) != packet.TCP {
		return word | stateSeenOut<<dir
	}
	flags := v.TCPFlags()
	switch {
	case flags&packet.TCPRst != 0:
		return word | stateRst
	case flags&packet.TCPSyn != 0 && flags&packet.TCPAck == 0 && halfOpen(word):
		return word &^ stateTCP // a new connection, or one that is opened again after a close
	}
	word &^= stateRst
	if flags&packet.TCPAck != 0 {
		word |= stateSeenOut << dir
	}
	if flags&packet.TCPFin != 0 {
		word |= stateFinOut << dir
	}
	return word
}

// lifetimes holds the timeouts in ticks.
type lifetimes struct{ udp, established, transitory, closing, icmp, generic, fragment int32 }

func (l *lifetimes) of(word uint64) int32 {
	switch protoOf(word) {
	case packet.TCP:
		switch {
		case !halfOpen(word):
			return l.established
		case word&(stateFin|stateRst) != 0:
			return l.closing
		}
		return l.transitory
	case packet.UDP:
		return l.udp
	case packet.ICMP, packet.ICMPv6:
		return l.icmp
	}
	return l.generic
}

// touch updates a flow's state and the time of its last packet. Packets of both directions refresh
// the flow. RFC 4787, REQ-6 requires that outbound packets refresh a flow, and allows it for
// inbound packets. Inbound packets may safely refresh a flow, because only packets of an
// authenticated peer match the tuple. Linux conntrack, which Liqo's gateways use, also lets packets
// of both directions refresh a flow. A RST does not refresh a flow (RFC 7857, section 2), with one
// exception: a RST in an established connection starts the transitory timeout (RFC 6146, section
// 3.5.2.2).
func (t *flowTable) touch(m *match, v *packet.View, dir Direction, now tick) {
	word := m.word
	refresh := v.TCPFlags()&packet.TCPRst == 0 || !halfOpen(word)
	for {
		next := nextWord(word, dir, v)
		if next == word {
			break
		}
		if m.entry.word.CompareAndSwap(word, next) {
			t.changed(m.index) // the timeout may be shorter now, and the flow may have become half-open
			break
		}
		if word = m.entry.word.Load(); (word^m.word)&^0xff != 0 || word&stateLive == 0 {
			return // another goroutine has ended the flow
		}
	}
	if refresh && now.since(tick(m.seen.Load())) > 0 {
		m.seen.Store(uint32(now))
	}
}
