package natengine

import (
	"hash/maphash"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/isthmus-net/isthmus/packet"
)

// tick is the clock of flows: 2^27 ns, about 134 ms, so that a flow is marked as seen at most that often and its time
// fits into 32 bits (they wrap after 18 years; differences are taken as signed).
type tick uint32

const tickShift = 27

func tickOf(now time.Duration) tick { return tick(now >> tickShift) }

func ticks(d time.Duration) int32 { return int32(min(d>>tickShift+1, 1<<30)) }

// since is the time from an earlier tick; negative when batches of two goroutines overtook each other.
func (t tick) since(earlier tick) int32 { return int32(t - earlier) }

func duration(ticks int32) time.Duration { return time.Duration(ticks) << tickShift }

// flowKind says what opened a flow.
type flowKind uint8

const (
	naptFlow     flowKind = iota // one of ours that is no pod, outbound, behind the NAPT address
	endpointFlow                 // a packet of a remote pod to a mapped endpoint; its replies leave as Endpoint.Seen
)

// A flow has three ends and so two tuples:
//
//	outbound  local  ─► remote   becomes  mapped ─► remote
//	inbound   remote ─► mapped   becomes  remote ─► local
//
// In each direction one of our two ends is matched and the other is written. entry.near[dir] is the one that is matched,
// entry.near[1-dir] the one that is written, and the code is the same for both directions.
//
// An entry is one cache line. Its words are written only under the table's mutex, inside an odd seq, and read without
// lock; only the state bits and seen change in between, by whichever direction sees a packet.
type entry struct {
	near   [directions][2]atomic.Uint64 // local address, mapped address
	remote [2]atomic.Uint64
	word   atomic.Uint64
	seq    atomic.Uint32 // odd while the entry is written
	seen   atomic.Uint32 // tick of the last packet that counts
}

// The word of an entry: local port, mapped port, remote port, protocol, state; 16, 16, 16, 8 and 8 bits from the top. The
// port of an ICMP query is its identifier on our side and 0 on the remote one; other protocols have 0.
const (
	protoShift  = 8
	remoteShift = 16
)

var (
	nearShift = [directions]uint{Outbound: 48, Inbound: 32}
	matchMask = [directions]uint64{Outbound: 0xffff_0000_ffff_ff00, Inbound: 0x0000_ffff_ffff_ff00}
)

// State bits of a flow. For TCP a direction counts as seen when it had a segment with ACK, so that both mean an
// established connection; for everything else any packet counts.
const (
	stateLive     = 1 << iota // the entry is in use
	stateEndpoint             // endpointFlow, else naptFlow
	stateSeenOut
	stateSeenIn
	stateFinOut
	stateFinIn
	stateRst

	stateSeen = stateSeenOut | stateSeenIn
	stateFin  = stateFinOut | stateFinIn
	stateTCP  = stateSeen | stateFin | stateRst
)

func protoOf(word uint64) uint8 { return uint8(word >> protoShift) }

func kindOf(word uint64) flowKind {
	if word&stateEndpoint != 0 {
		return endpointFlow
	}
	return naptFlow
}

// halfOpen reports whether a flow is not, or no longer, established. Such flows may be evicted. A TCP connection with one
// FIN is still in use; with a RST it may have been an off-path forgery and has until the transitory timeout to show that
// (RFC 6146, section 3.5.2.2; RFC 7857, section 2).
func halfOpen(word uint64) bool {
	if word&stateSeen != stateSeen {
		return true
	}
	return word&stateRst != 0 || word&stateFin == stateFin
}

// after is the word of a flow after a packet.
func after(word uint64, dir Direction, v *packet.View) uint64 {
	if protoOf(word) != packet.TCP {
		return word | stateSeenOut<<dir
	}
	flags := v.TCPFlags()
	switch {
	case flags&packet.TCPRst != 0:
		return word | stateRst
	case flags&packet.TCPSyn != 0 && flags&packet.TCPAck == 0 && halfOpen(word):
		return word &^ stateTCP // opened, or after a close reopened, from the start
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
type lifetimes struct{ udp, established, transitory, icmp, generic, fragment int32 }

func (l *lifetimes) of(word uint64) int32 {
	switch protoOf(word) {
	case packet.TCP:
		if halfOpen(word) {
			return l.transitory
		}
		return l.established
	case packet.UDP:
		return l.udp
	case packet.ICMP, packet.ICMPv6:
		return l.icmp
	}
	return l.generic
}

// key is one tuple of a flow as it is matched in one direction: our end, the remote end, and the ports and protocol in
// the places where the entry's word has them for that direction.
type key struct {
	near, remote addr
	word         uint64
}

// keyOf makes the key of near and remote. The ports are 0 for protocols that have none.
func keyOf(dir Direction, near, remote addr, proto uint8, nearPort, remotePort uint16) key {
	return key{near, remote, uint64(nearPort)<<nearShift[dir] | uint64(remotePort)<<remoteShift | uint64(proto)<<protoShift}
}

// packetKey is the key of a packet whose addresses are already known.
func packetKey(v *packet.View, dir Direction, near, remote addr) key {
	var nearPort, remotePort uint16
	if v.HasPorts() {
		nearPort, remotePort = v.SrcPort(), v.DstPort()
		if dir == Inbound {
			nearPort, remotePort = remotePort, nearPort
		}
	} else {
		nearPort = v.ICMPID()
	}
	return keyOf(dir, near, remote, v.Proto(), nearPort, remotePort)
}

func (k *key) nearPort(dir Direction) uint16 { return uint16(k.word >> nearShift[dir]) }
func (k *key) remotePort() uint16            { return uint16(k.word >> remoteShift) }

// hash is keyed with a random seed, so that nobody can choose tuples that collide.
func (k *key) hash(seed maphash.Seed) uint64 {
	return maphash.Bytes(seed, unsafe.Slice((*byte)(unsafe.Pointer(k)), unsafe.Sizeof(*k)))
}

// match is a flow that was found: a consistent copy of what a packet needs.
type match struct {
	*entry
	index uint32
	word  uint64
	other addr // the end to write: mapped outbound, local inbound
}

func (m *match) kind() flowKind { return kindOf(m.word) }

// otherPort is the port to write for a packet of direction dir.
func (m *match) otherPort(dir Direction) uint16 { return uint16(m.word >> nearShift[1-dir]) }

// expired reports whether the flow has been idle for too long. It is then as good as gone; Sweep will take it away.
func (m *match) expired(l *lifetimes, now tick) bool {
	return now.since(tick(m.seen.Load())) > l.of(m.word)
}

// touch records a packet of the flow: its state, and that it was seen. Both directions refresh: outbound as RFC 4787,
// REQ-6 demands, inbound as it allows, because peers are authenticated and only the exact tuple matches, and because
// conntrack at real Liqo peers does so too. A RST refreshes nothing (RFC 7857, section 2), but for the one that ends an
// established connection: with it the transitory timeout begins (RFC 6146, section 3.5.2.2).
func (m *match) touch(v *packet.View, dir Direction, now tick) {
	word := m.word
	refresh := v.TCPFlags()&packet.TCPRst == 0 || !halfOpen(word)
	for {
		next := after(word, dir, v)
		if next == word || m.entry.word.CompareAndSwap(word, next) {
			break
		}
		if word = m.entry.word.Load(); (word^m.word)&^0xff != 0 || word&stateLive == 0 {
			return // it ended under way
		}
	}
	if refresh && now.since(tick(m.seen.Load())) > 0 {
		m.seen.Store(uint32(now))
	}
}
