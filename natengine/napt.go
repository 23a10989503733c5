package natengine

import (
	"hash/maphash"
	"math/bits"
	"math/rand/v2"
	"unsafe"

	"github.com/isthmus-net/isthmus/packet"
)

// portClass is a space of ports at the NAPT address: what has ports or identifiers that NAPT may change.
type portClass uint8

const (
	tcpPorts portClass = iota
	udpPorts
	icmpIDs
	noPorts // any other protocol: told apart by the remote address alone
)

func classOf(proto uint8, is4 bool) portClass {
	switch {
	case proto == packet.TCP:
		return tcpPorts
	case proto == packet.UDP:
		return udpPorts
	case proto == packet.ICMP && is4, proto == packet.ICMPv6 && !is4:
		return icmpIDs
	}
	return noPorts
}

// napt allocates ports at the NAPT addresses of one peer. The mapping is endpoint-independent (RFC 4787, REQ-1; RFC
// 5382, REQ-1; RFC 5508, REQ-1): one inside address and port has one outside port towards all addresses of the peer,
// for as long as any of its flows lives. No two mappings share a port of a class (REQ-3). Used with the table's mutex.
type napt struct {
	seed     maphash.Seed
	mappings []mapping
	heads    []uint32 // hash chains of mappings
	live     int
	free     uint32
	ports    [2][noPorts]*portSet // by family and class, made when first needed
}

// mapping numbers are one more than the index, 0 is none.
type mapping struct {
	inside       addr
	port, mapped uint16
	class        portClass
	refs         uint32 // flows that use it
	next         uint32 // in its chain, or in the free list
}

func (n *napt) head(inside addr, port uint16, class portClass) *uint32 {
	k := [3]uint64{inside.hi, inside.lo, uint64(port)<<8 | uint64(class)}
	h := maphash.Bytes(n.seed, unsafe.Slice((*byte)(unsafe.Pointer(&k)), unsafe.Sizeof(k)))
	return &n.heads[h&uint64(len(n.heads)-1)]
}

// find returns the number of the mapping of an inside end, 0 when there is none.
func (n *napt) find(inside addr, port uint16, class portClass) uint32 {
	if n.live == 0 {
		return 0
	}
	for i := *n.head(inside, port, class); i != 0; i = n.mappings[i-1].next {
		if m := &n.mappings[i-1]; m.inside == inside && m.port == port && m.class == class {
			return i
		}
	}
	return 0
}

// hold returns the mapping of an inside end, made if need be, with one more flow that uses it. ok is false when no port
// is free.
func (n *napt) hold(inside addr, port uint16, class portClass) (number uint32, mapped uint16, ok bool) {
	if i := n.find(inside, port, class); i != 0 {
		m := &n.mappings[i-1]
		m.refs++
		return i, m.mapped, true
	}
	set := n.set(inside.family(), class)
	mapped, ok = set.choose(port, class)
	if !ok {
		return 0, 0, false
	}
	set.take(mapped)
	i := n.free
	if i != 0 {
		n.free = n.mappings[i-1].next
	} else {
		n.mappings = append(n.mappings, mapping{})
		i = uint32(len(n.mappings))
	}
	n.live++
	n.grow()
	head := n.head(inside, port, class)
	n.mappings[i-1] = mapping{inside: inside, port: port, mapped: mapped, class: class, refs: 1, next: *head}
	*head = i
	return i, mapped, true
}

// preview is hold without effect: the port would be mapped, or some other one when the same is taken.
func (n *napt) preview(inside addr, port uint16, class portClass) (mapped uint16, ok bool) {
	if i := n.find(inside, port, class); i != 0 {
		return n.mappings[i-1].mapped, true
	}
	return n.set(inside.family(), class).choose(port, class)
}

// grow keeps chains short. A mapping in n.free is in no chain, so all chains together are the live ones.
func (n *napt) grow() {
	if n.live <= len(n.heads) {
		return
	}
	old := n.heads
	n.heads = make([]uint32, max(64, 2*len(old)))
	for _, i := range old {
		for i != 0 {
			m := &n.mappings[i-1]
			next := m.next
			head := n.head(m.inside, m.port, m.class)
			m.next, *head = *head, i
			i = next
		}
	}
}

// release ends one flow's use of a mapping; with the last the port is free again.
func (n *napt) release(number uint32) {
	m := &n.mappings[number-1]
	if m.refs--; m.refs > 0 {
		return
	}
	at := n.head(m.inside, m.port, m.class)
	for *at != number {
		at = &n.mappings[*at-1].next
	}
	*at = m.next
	n.set(m.inside.family(), m.class).give(m.mapped)
	*m = mapping{next: n.free}
	n.free = number
	n.live--
}

func (n *napt) set(family int, class portClass) *portSet {
	s := &n.ports[family][class]
	if *s == nil {
		*s = new(portSet)
	}
	return *s
}

func (n *napt) bytes() int {
	size := cap(n.mappings)*int(unsafe.Sizeof(mapping{})) + cap(n.heads)*4
	for _, family := range n.ports {
		for _, set := range family {
			if set != nil {
				size += int(unsafe.Sizeof(*set))
			}
		}
	}
	return size
}

// portSet is a bit for each port in use.
type portSet [1 << 16 / 64]uint64

func (s *portSet) has(p uint16) bool { return s[p/64]>>(p%64)&1 != 0 }
func (s *portSet) take(p uint16)     { s[p/64] |= 1 << (p % 64) }
func (s *portSet) give(p uint16)     { s[p/64] &^= 1 << (p % 64) }

const firstUserPort = 1024

// choose picks a free port: the same if it can be had, else a random one of the same range, 0-1023 or 1024-65535 (RFC
// 4787, REQ-3a and 3b; RFC 6056). A well-known port that finds its range full takes a user port, never the reverse: a
// well-known source port may mean a privileged process to somebody. Port 0 of TCP and UDP is not given out.
func (s *portSet) choose(want uint16, class portClass) (port uint16, ok bool) {
	if !s.has(want) && (want != 0 || class == icmpIDs) {
		return want, true
	}
	if class == icmpIDs {
		return s.random(0, 1<<16-1) // no range means anything
	}
	if want < firstUserPort {
		if port, ok = s.random(1, firstUserPort-1); ok {
			return port, true
		}
	}
	return s.random(firstUserPort, 1<<16-1)
}

// random returns the first free port at or after a random place in [first, last], or before it.
func (s *portSet) random(first, last uint32) (uint16, bool) {
	start := first + rand.Uint32N(last-first+1)
	if p, ok := s.scan(start, last); ok {
		return p, true
	}
	if start == first {
		return 0, false
	}
	return s.scan(first, start-1)
}

// scan returns the first free port of [first, last].
func (s *portSet) scan(first, last uint32) (uint16, bool) {
	for at := first; at <= last; at = at&^63 + 64 {
		if free := ^s[at/64] >> (at % 64); free != 0 {
			p := at + uint32(bits.TrailingZeros64(free))
			return uint16(p), p <= last
		}
	}
	return 0, false
}
