package natengine

import "github.com/isthmus-net/isthmus/packet"

// State bits of a flow. For TCP a direction counts as seen when it had a segment with ACK, so that
// both mean an established connection; for everything else any packet counts.
const (
	stateLive     = 1 << iota // the entry is in use
	stateEndpoint             // endpointFlow, else naptFlow
	stateSeenOut
	stateSeenIn
	stateFinOut
	stateFinIn
	stateRst
	stateQueued // the entry is in the queues of half-open flows; changed under the table's mutex

	stateSeen = stateSeenOut | stateSeenIn
	stateFin  = stateFinOut | stateFinIn
	stateTCP  = stateSeen | stateFin | stateRst
)

// halfOpen reports whether a flow is not, or no longer, established. Such flows may be evicted. A
// TCP connection with one FIN is still in use. A RST may be an off-path forgery: the connection has
// until the transitory timeout to show that (RFC 6146, section 3.5.2.2; RFC 7857, section 2).
func halfOpen(word uint64) bool {
	if word&stateSeen != stateSeen {
		return true
	}
	return word&stateRst != 0 || word&stateFin == stateFin
}

// after returns the word of a flow after this packet.
func after(word uint64, dir Direction, v *packet.View) uint64 {
	if protoOf(word) != packet.TCP {
		return word | stateSeenOut<<dir
	}
	flags := v.TCPFlags()
	switch {
	case flags&packet.TCPRst != 0:
		return word | stateRst
	case flags&packet.TCPSyn != 0 && flags&packet.TCPAck == 0 && halfOpen(word):
		return word &^ stateTCP // a new flow, or one reopened after a close: all state begins anew
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

// touch records a packet of the flow: its state, and that it was seen. Packets of both directions
// refresh the flow. RFC 4787, REQ-6 demands that outbound and allows it inbound, where only packets
// of an authenticated peer match the exact tuple; conntrack at real Liqo peers does the same. A RST
// refreshes nothing (RFC 7857, section 2), except one that ends an established connection: it
// starts the transitory timeout (RFC 6146, section 3.5.2.2).
func (t *flowTable) touch(m *match, v *packet.View, dir Direction, now tick) {
	word := m.word
	refresh := v.TCPFlags()&packet.TCPRst == 0 || !halfOpen(word)
	for {
		next := after(word, dir, v)
		if next == word {
			break
		}
		if m.entry.word.CompareAndSwap(word, next) {
			t.changed(m.index) // its timeout may be shorter now, and halfOpen may have changed
			break
		}
		if word = m.entry.word.Load(); (word^m.word)&^0xff != 0 || word&stateLive == 0 {
			return // it ended in the meantime
		}
	}
	if refresh && now.since(tick(m.seen.Load())) > 0 {
		m.seen.Store(uint32(now))
	}
}
