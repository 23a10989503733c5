package natengine

import (
	"hash/maphash"
	"math/bits"
	"math/rand/v2"
	"unsafe"

	"github.com/isthmus-net/isthmus/packet"
)

// portClass is a port space at the NAPT address. TCP ports, UDP ports and ICMP identifiers are
// allocated independently of each other.
type portClass uint8

const (
	tcpPorts portClass = iota
	udpPorts
	icmpIDs
	noPorts // any other protocol; its flows differ only in the remote address
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

// napt allocates ports at the NAPT addresses of one peer. The mapping is endpoint-independent (RFC
// 4787, REQ-1; RFC 5382, REQ-1; RFC 5508, REQ-1): all flows of an inside address and port have the
// same outside port, whichever address of the peer they go to. No two mappings of a class share a
// port (RFC 4787, REQ-3). The table's mutex guards all fields.
type napt struct {
	seed     maphash.Seed
	mappings pool[mapping]
	chains   chains
	live     int
	free     uint32
	random   bool                 // Config.RandomPorts
	ports    [2][noPorts]*portSet // by family and class; allocated on first use
}

// A mapping is the port at the NAPT address that belongs to one inside host and port.
type mapping struct {
	host         uint32 // number in flowTable.hosts; stays valid, because the host has a flow as long as the mapping has one
	port, mapped uint16
	use          uint32 // (number of flows that use the mapping) << 2 | class
	next         uint32 // next number in the chain or in the free list
}

func (m *mapping) class() portClass { return portClass(m.use & 3) }

const oneFlow = 1 << 2

func (n *napt) hashOf(host uint32, port uint16, class portClass) uint64 {
	k := uint64(host)<<32 | uint64(port)<<8 | uint64(class)
	return maphash.Bytes(n.seed, unsafe.Slice((*byte)(unsafe.Pointer(&k)), unsafe.Sizeof(k)))
}

func (n *napt) hash(number uint32) uint64 {
	m := n.mappings.at(number)
	return n.hashOf(m.host, m.port, m.class())
}

func (n *napt) next(number uint32) *uint32 { return &n.mappings.at(number).next }

// find returns the number of the mapping of an inside host and port, or 0 if there is none.
func (n *napt) find(host uint32, port uint16, class portClass) uint32 {
	i := n.chains.firstNumber(n.hashOf(host, port, class))
	for i != 0 {
		m := n.mappings.at(i)
		if m.host == host && m.port == port && m.class() == class {
			break
		}
		i = m.next
	}
	return i
}

// hold adds a flow to the mapping of an inside host and port, and returns the mapped port. If there
// is no mapping, hold makes one. ok is false if no port is free.
func (n *napt) hold(host uint32, port uint16, class portClass, family int) (mapped uint16, ok bool) {
	if i := n.find(host, port, class); i != 0 {
		m := n.mappings.at(i)
		m.use += oneFlow
		return m.mapped, true
	}
	if mapped, ok = n.set(family, class).choose(port, class, n.random); ok {
		n.add(host, port, class, family, mapped)
	}
	return mapped, ok
}

// holdAt is like hold, but mapped is the port to use at the NAPT address. It does nothing and
// returns false if the inside host and port have another mapped port, or if another mapping has the
// port mapped.
func (n *napt) holdAt(host uint32, port uint16, class portClass, family int, mapped uint16) bool {
	if i := n.find(host, port, class); i != 0 {
		m := n.mappings.at(i)
		if m.mapped != mapped {
			return false
		}
		m.use += oneFlow
		return true
	}
	if n.set(family, class).has(mapped) {
		return false
	}
	n.add(host, port, class, family, mapped)
	return true
}

// add makes the mapping of an inside host and port to a free port. The mapping starts with one
// flow.
func (n *napt) add(host uint32, port uint16, class portClass, family int, mapped uint16) {
	n.set(family, class).take(mapped)
	i := n.free
	if i != 0 {
		n.free = n.mappings.at(i).next
	} else {
		i = n.mappings.add()
	}
	*n.mappings.at(i) = mapping{host: host, port: port, mapped: mapped, use: oneFlow | uint32(class)}
	n.chains.insert(n, i, n.hash(i))
	n.live++
}

// preview returns the port that hold would return, but changes nothing. If hold would choose a
// random port, the port that preview returns is only an example.
func (n *napt) preview(host uint32, port uint16, class portClass, family int) (mapped uint16, ok bool) {
	if i := n.find(host, port, class); i != 0 {
		return n.mappings.at(i).mapped, true
	}
	return n.set(family, class).choose(port, class, n.random)
}

// release removes one flow from a mapping. When the last flow is removed, the port becomes
// free.
func (n *napt) release(host uint32, port uint16, class portClass, family int) {
	number := n.find(host, port, class)
	m := n.mappings.at(number)
	if m.use -= oneFlow; m.use >= oneFlow {
		return
	}
	n.set(family, class).put(m.mapped)
	n.chains.remove(n, number, n.hash(number))
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
	size := n.mappings.bytes() + n.chains.bytes()
	for _, family := range n.ports {
		for _, set := range family {
			if set != nil {
				size += int(unsafe.Sizeof(*set))
			}
		}
	}
	return size
}

// portSet is a bitmap of the ports in use. used counts these ports by range and parity.
type portSet struct {
	taken [1 << 16 / 64]uint64
	used  [2][2]uint32
}

// portRange is a range of ports. A mapped port stays in the range of the inside port if
// possible.
type portRange uint8

const (
	wellKnown portRange = iota // 0-1023
	user                       // 1024-65535
)

const firstUserPort = 1024

func rangeOf(port uint16) portRange {
	if port < firstUserPort {
		return wellKnown
	}
	return user
}

func (s *portSet) has(p uint16) bool { return s.taken[p/64]>>(p%64)&1 != 0 }

func (s *portSet) take(p uint16) {
	s.taken[p/64] |= 1 << (p % 64)
	s.used[rangeOf(p)][p%2]++
}

func (s *portSet) put(p uint16) {
	s.taken[p/64] &^= 1 << (p % 64)
	s.used[rangeOf(p)][p%2]--
}

// inUse returns the number of ports in use.
func (s *portSet) inUse() int {
	if s == nil {
		return 0
	}
	return int(s.used[wellKnown][0] + s.used[wellKnown][1] + s.used[user][0] + s.used[user][1])
}

// limit returns the number of ports that a class has. Port 0 of TCP and UDP is never
// allocated.
func (c portClass) limit() int {
	if c == icmpIDs {
		return 1 << 16
	}
	return 1<<16 - 1
}

// choose picks a free port. If the port want is free and random is false, choose returns want.
// Otherwise it returns a random port of the same range, 0-1023 or 1024-65535, and if possible of
// the same parity (RFC 4787, REQ-3a, 3b and 4; RFC 6056; RFC 7857, section 9). If the well-known
// range is full, a well-known port gets a user port. A user port never gets a well-known port,
// because some servers trust a well-known source port: they assume that a privileged process has
// sent the packet. Identifiers of ICMP queries have neither range nor parity.
func (s *portSet) choose(want uint16, class portClass, random bool) (port uint16, ok bool) {
	if !random && !s.has(want) && (want != 0 || class == icmpIDs) {
		return want, true
	}
	if class == icmpIDs {
		return s.randomFree(0, 1<<16-1, allPorts)
	}
	if rangeOf(want) == wellKnown {
		if port, ok = s.inRange(wellKnown, want%2); ok {
			return port, true
		}
	}
	return s.inRange(user, want%2)
}

// portCount is the number of ports that TCP and UDP may use, by range and by parity (even,
// odd).
var portCount = [2][2]uint32{{511, 512}, {32256, 32256}}

// inRange picks a random free port of a range, of the wanted parity if possible. It searches the
// bitmap only if the counts show a free port. So a flood of new flows takes little time when all
// ports are in use.
func (s *portSet) inRange(r portRange, parity uint16) (port uint16, ok bool) {
	first, last := uint32(1), uint32(firstUserPort-1)
	if r == user {
		first, last = firstUserPort, 1<<16-1
	}
	for _, p := range [2]uint16{parity, 1 - parity} {
		if s.used[r][p] < portCount[r][p] {
			return s.randomFree(first, last, evenPorts<<p)
		}
	}
	return 0, false
}

// Masks that select ports in a word of 64 ports. The first port of a word is even.
const (
	evenPorts uint64 = 0x5555_5555_5555_5555
	allPorts  uint64 = 1<<64 - 1
)

// randomFree returns a free port in [low, high] that mask selects: the first one at or after a
// randomly chosen port. The search wraps around from high to low.
func (s *portSet) randomFree(low, high uint32, mask uint64) (uint16, bool) {
	start := low + rand.Uint32N(high-low+1)
	if p, ok := s.scan(start, high, mask); ok {
		return p, true
	}
	if start == low {
		return 0, false
	}
	return s.scan(low, start-1, mask)
}

// scan returns the first free port in [low, high] that mask selects.
func (s *portSet) scan(low, high uint32, mask uint64) (uint16, bool) {
	for at := low; at <= high; at = at&^63 + 64 {
		if free := (^s.taken[at/64] & mask) >> (at % 64); free != 0 {
			p := at + uint32(bits.TrailingZeros64(free))
			return uint16(p), p <= high
		}
	}
	return 0, false
}
