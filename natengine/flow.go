package natengine

import (
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// tick is a time in units of 2^27 ns, about 134 ms. The time of a flow's last packet is stored
// in ticks, so it is written at most once per unit and fits into 32 bits. Ticks wrap after 18
// years; differences are signed.
type tick uint32

const tickShift = 27

func tickOf(now time.Duration) tick { return tick(now >> tickShift) }

func ticks(d time.Duration) int32 { return int32(min(d>>tickShift+1, 1<<30)) }

// since returns the ticks from earlier to t. The result may be negative, because each goroutine
// reads the clock once per batch.
func (t tick) since(earlier tick) int32 { return int32(t - earlier) }

func duration(ticks int32) time.Duration { return time.Duration(ticks) << tickShift }

// flowKind distinguishes flows by the side that opened them.
type flowKind uint8

const (
	naptFlow     flowKind = iota // opened outbound by a host that is not a pod; its packets leave with the NAPT address as source
	endpointFlow                 // opened by a remote pod to a mapped endpoint; replies leave with Endpoint.Seen as source
)

// A flow has three addresses and therefore two tuples:
//
//	outbound  local  ─► remote   becomes  mapped ─► remote
//	inbound   remote ─► mapped   becomes  remote ─► local
//
// In direction dir, a packet matches the flow by entry.near[dir], and entry.near[1-dir] replaces
// that address. So the code is the same for both directions.
//
// An entry is one cache line. Readers take no lock. Writers hold the table's mutex and make seq odd
// while they write. Two values change without the mutex: each packet of the flow may update the
// state bits in word, and the field seen.
type entry struct {
	near   [directions][2]atomic.Uint64 // local address, mapped address
	remote [2]atomic.Uint64
	word   atomic.Uint64
	seq    atomic.Uint32 // sequence lock: odd while a writer changes the entry
	seen   atomic.Uint32 // tick of the last packet that refreshed the flow
}

// The word of an entry contains, from the highest bit: local port (16 bits), mapped port (16),
// remote port (16), protocol (8), state (8). For an ICMP query, our ports are its identifier and
// the remote port is queryPort. For other protocols the ports are 0.
const (
	protoShift  = 8
	remoteShift = 16

	farMask = 0xffff<<remoteShift | 0xff<<protoShift // the bits that both tuples have in common
)

var (
	nearShift = [directions]uint{Outbound: 48, Inbound: 32}
	matchMask = [directions]uint64{Outbound: 0xffff_0000_ffff_ff00, Inbound: 0x0000_ffff_ffff_ff00}
)

func protoOf(word uint64) uint8 { return uint8(word >> protoShift) }

func kindOf(word uint64) flowKind {
	if word&stateEndpoint != 0 {
		return endpointFlow
	}
	return naptFlow
}

// key is the tuple by which the packets of one direction find a flow: our address, the remote
// address, and the ports and the protocol. word has the ports and the protocol at the same bits as
// entry.word.
type key struct {
	near, remote addr
	word         uint64
}

// keyOf returns the key of near and remote. The ports are 0 for protocols without ports.
func keyOf(dir Direction, near, remote addr, proto uint8, nearPort, remotePort uint16) key {
	return key{near, remote, wordOf(dir, proto, nearPort, remotePort)}
}

func wordOf(dir Direction, proto uint8, nearPort, remotePort uint16) uint64 {
	return uint64(nearPort)<<nearShift[dir] | uint64(remotePort)<<remoteShift | uint64(proto)<<protoShift
}

// kind is the type of an ICMP query. query returns the type of the query's request, and whether
// kind is the type of a request. Queries are the requests and replies of echo and, in IPv4, of
// timestamp, information and address mask. For any other type the result has no meaning.
func query(kind uint8) (request uint8, isRequest bool) {
	switch kind {
	case 0: // echo reply
		return 8, false
	case 14, 16, 18, 129:
		return kind - 1, false
	}
	return kind, true
}

// queryPort returns the value that replaces the remote port in the key of an ICMP query. It
// consists of the request's type and the request's direction. Therefore a reply finds only the
// flow of its own request, and a request finds no flow that the other side opened (RFC 5508,
// REQ-1).
func queryPort(kind uint8, dir Direction) uint16 {
	request, isRequest := query(kind)
	if !isRequest {
		dir = 1 - dir
	}
	return uint16(dir)<<8 | uint16(request)
}

func (k *key) nearPort(dir Direction) uint16 { return uint16(k.word >> nearShift[dir]) }
func (k *key) remotePort() uint16            { return uint16(k.word >> remoteShift) }

// hashKeys are random, so that the hash of a tuple is unpredictable. Each table has its own
// keys. Neither keys nor hashes leave the process.
type hashKeys [6]uint64

func newHashKeys() (keys hashKeys) {
	for i := range keys {
		keys[i] = rand.Uint64()
	}
	return keys
}

// hash multiplies words as wyhash does, which Go's own maps use on processors without AES
// instructions. Both factors of each product depend on secret keys, so nobody without the keys can
// choose tuples that collide. hash is faster than maphash because all values stay in registers.
func (keys *hashKeys) hash(nearHi, nearLo, remoteHi, remoteLo, word uint64) uint64 {
	near := mix(nearHi^keys[0], nearLo^keys[1])
	remote := mix(remoteHi^keys[2], remoteLo^keys[3])
	ports := mix(word^keys[4], keys[5]) // sequential ports need two rounds of mixing; this one runs in parallel to the others
	return mix(near^ports, remote)
}

func (k *key) hash(keys *hashKeys) uint64 {
	return keys.hash(k.near.hi, k.near.lo, k.remote.hi, k.remote.lo, k.word)
}

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// match is the result of a flow lookup: a consistent copy of the fields that a packet needs.
type match struct {
	*entry
	index uint32
	word  uint64
	other addr // the address to write: the mapped one outbound, the local one inbound
}

func (m *match) kind() flowKind { return kindOf(m.word) }

// otherPort returns the port to write into a packet of direction dir.
func (m *match) otherPort(dir Direction) uint16 { return uint16(m.word >> nearShift[1-dir]) }

// expired reports whether the flow has been idle for too long. An expired flow counts as
// ended, and Sweep will remove it.
func (m *match) expired(l *lifetimes, now tick) bool {
	return now.since(tick(m.seen.Load())) > l.of(m.word)
}
