package natengine

import (
	"hash/maphash"
	"math/bits"
	"math/rand/v2"
	"unsafe"

	"github.com/isthmus-net/isthmus/packet"
)

// portClass is a port space at the NAPT address: that of protocols whose ports or identifiers NAPT
// may change.
type portClass uint8

const (
	tcpPorts portClass = iota
	udpPorts
	icmpIDs
	noPorts // any other protocol: distinguished only by the remote address
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
// 4787, REQ-1; RFC 5382, REQ-1; RFC 5508, REQ-1): one inside address and port has one outside port
// towards all addresses of the peer, for as long as any of its flows lives. No two mappings share a
// port of a class (REQ-3). Used with the table's mutex.
type napt struct {
	seed     maphash.Seed
	mappings pool[mapping]
	chains   chains
	live     int
	free     uint32
	random   bool                 // Config.RandomPorts
	ports    [2][noPorts]*portSet // by family and class, made when first needed
}

// A mapping is the port that an inside host and port have at the NAPT address.
type mapping struct {
	host         uint32 // in flowTable.hosts; it has a flow as long as the mapping has one
	port, mapped uint16
	use          uint32 // number of flows that use it << 2 | class
	next         uint32 // in its chain, or in the free list
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

// find returns the number of the mapping of an inside end, 0 when there is none.
func (n *napt) find(host uint32, port uint16, class portClass) uint32 {
	i := n.chains.first(n.hashOf(host, port, class))
	for i != 0 {
		m := n.mappings.at(i)
		if m.host == host && m.port == port && m.class() == class {
			break
		}
		i = m.next
	}
	return i
}

// hold returns the port of an inside end at the NAPT address, and maps one if it has none. One more
// flow uses it from now on. ok is false when no port is free.
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

// holdAt is hold for the given port at the NAPT address. It does nothing and reports false if the
// inside end has another port, or another end has this one.
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

// add maps a free port to an inside end that has none, with one flow.
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

// preview is hold without effect. If it picked a random port, hold will pick another one.
func (n *napt) preview(host uint32, port uint16, class portClass, family int) (mapped uint16, ok bool) {
	if i := n.find(host, port, class); i != 0 {
		return n.mappings.at(i).mapped, true
	}
	return n.set(family, class).choose(port, class, n.random)
}

// release ends one flow's use of a mapping; with the last the port is free again.
func (n *napt) release(host uint32, port uint16, class portClass, family int) {
	number := n.find(host, port, class)
	m := n.mappings.at(number)
	if m.use -= oneFlow; m.use >= oneFlow {
		return
	}
	n.set(family, class).give(m.mapped)
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

// portSet is a bit for each port in use, and their number by range and parity.
type portSet struct {
	taken [1 << 16 / 64]uint64
	used  [2][2]uint32
}

// portRange is a range of ports. A mapped port stays in the range of the inside port if it can.
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

func (s *portSet) give(p uint16) {
	s.taken[p/64] &^= 1 << (p % 64)
	s.used[rangeOf(p)][p%2]--
}

// inUse is the number of ports in use.
func (s *portSet) inUse() int {
	if s == nil {
		return 0
	}
	return int(s.used[wellKnown][0] + s.used[wellKnown][1] + s.used[user][0] + s.used[user][1])
}

// limit is the number of ports that a class has: port 0 of TCP and UDP is not given out.
func (c portClass) limit() int {
	if c == icmpIDs {
		return 1 << 16
	}
	return 1<<16 - 1
}

// choose picks a free port: the same if it is free and random does not forbid it, else a random one
// of the same range, 0-1023 or 1024-65535, and of the same parity if there is one (RFC 4787,
// REQ-3a, 3b and 4; RFC 6056; RFC 7857, section 9). When the well-known range is full, a well-known
// port gets a user port. The reverse never happens: some servers take a well-known source port for
// a sign of a privileged process. Identifiers of ICMP queries have neither range nor parity.
func (s *portSet) choose(want uint16, class portClass, random bool) (port uint16, ok bool) {
	if !random && !s.has(want) && (want != 0 || class == icmpIDs) {
		return want, true
	}
	if class == icmpIDs {
		return s.random(0, 1<<16-1, allPorts)
	}
	if rangeOf(want) == wellKnown {
		if port, ok = s.inRange(wellKnown, want%2); ok {
			return port, true
		}
	}
	return s.inRange(user, want%2)
}

// portCount is the number of ports in each range that TCP and UDP may have, even and odd ones.
var portCount = [2][2]uint32{{511, 512}, {32256, 32256}}

// inRange picks a random free port of a range, of the wanted parity if there is one. It scans only
// if the counts show a free port, so a flood of new flows costs little when all ports are taken.
func (s *portSet) inRange(r portRange, parity uint16) (port uint16, ok bool) {
	first, last := uint32(1), uint32(firstUserPort-1)
	if r == user {
		first, last = firstUserPort, 1<<16-1
	}
	for _, p := range [2]uint16{parity, 1 - parity} {
		if s.used[r][p] < portCount[r][p] {
			return s.random(first, last, evenPorts<<p)
		}
	}
	return 0, false
}

// Masks of the ports that are looked for among 64 whose first is even.
const (
	evenPorts uint64 = 0x5555_5555_5555_5555
	allPorts  uint64 = 1<<64 - 1
)

// random returns the first free port of mask at or after a random place in [first, last], and goes
// on from first if there is none.
func (s *portSet) random(first, last uint32, mask uint64) (uint16, bool) {
	start := first + rand.Uint32N(last-first+1)
	if p, ok := s.scan(start, last, mask); ok {
		return p, true
	}
	if start == first {
		return 0, false
	}
	return s.scan(first, start-1, mask)
}

// scan returns the first free port of mask in [first, last].
func (s *portSet) scan(first, last uint32, mask uint64) (uint16, bool) {
	for at := first; at <= last; at = at&^63 + 64 {
		if free := (^s.taken[at/64] & mask) >> (at % 64); free != 0 {
			p := at + uint32(bits.TrailingZeros64(free))
			return uint16(p), p <= last
		}
	}
	return 0, false
}
