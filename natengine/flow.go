package natengine

import (
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// tick is the time of flows in units of 2^27 ns, about 134 ms. So a flow is marked as seen at most
// that often, and its time fits into 32 bits. They wrap after 18 years; differences are taken as
// signed.
type tick uint32

const tickShift = 27

func tickOf(now time.Duration) tick { return tick(now >> tickShift) }

func ticks(d time.Duration) int32 { return int32(min(d>>tickShift+1, 1<<30)) }

// since is the time from an earlier tick; negative when batches of two goroutines overtook each
// other.
func (t tick) since(earlier tick) int32 { return int32(t - earlier) }

func duration(ticks int32) time.Duration { return time.Duration(ticks) << tickShift }

// flowKind says what opened a flow.
type flowKind uint8

const (
	naptFlow     flowKind = iota // outbound from an address that is no pod, behind the NAPT address
	endpointFlow                 // opened by a remote pod to a mapped endpoint; its replies leave as Endpoint.Seen
)

// A flow has three ends and so two tuples:
//
//	outbound  local  ─► remote   becomes  mapped ─► remote
//	inbound   remote ─► mapped   becomes  remote ─► local
//
// In each direction one of our two ends is matched and the other is written. entry.near[dir] is the
// one that is matched, entry.near[1-dir] the one that is written, and the code is the same for both
// directions.
//
// An entry is one cache line. Its words are written only under the table's mutex, inside an odd
// seq, and read without lock; only the state bits and seen change in between, by whichever
// direction sees a packet.
type entry struct {
	near   [directions][2]atomic.Uint64 // local address, mapped address
	remote [2]atomic.Uint64
	word   atomic.Uint64
	seq    atomic.Uint32 // odd while the entry is written
	seen   atomic.Uint32 // tick of the last packet that counts
}

// The word of an entry: local port, mapped port, remote port, protocol, state; 16, 16, 16, 8 and 8
// bits from the top. The port of an ICMP query is its identifier on our side and queryPort on the
// remote one; other protocols have 0.
const (
	protoShift  = 8
	remoteShift = 16

	farMask = 0xffff<<remoteShift | 0xff<<protoShift // the bits that are the same in both tuples
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

// key is one tuple of a flow as it is matched in one direction: our end, the remote end, and the
// ports and protocol in the places where the entry's word has them for that direction.
type key struct {
	near, remote addr
	word         uint64
}

// keyOf makes the key of near and remote. The ports are 0 for protocols that have none.
func keyOf(dir Direction, near, remote addr, proto uint8, nearPort, remotePort uint16) key {
	return key{near, remote, wordOf(dir, proto, nearPort, remotePort)}
}

func wordOf(dir Direction, proto uint8, nearPort, remotePort uint16) uint64 {
	return uint64(nearPort)<<nearShift[dir] | uint64(remotePort)<<remoteShift | uint64(proto)<<protoShift
}

// query returns the type of the request that an ICMP query of type kind belongs to, and whether the
// message is that request: echo, in IPv4 also timestamp, information and address mask.
func query(kind uint8) (request uint8, asks bool) {
	switch kind {
	case 0: // echo reply
		return 8, false
	case 14, 16, 18, 129:
		return kind - 1, false
	}
	return kind, true
}

// queryPort is what a key has in place of the remote port for an ICMP query in direction dir: the
// type of the request and the side that asks. So a reply finds only the flow of its own request,
// and a request finds no flow that the other side opened (RFC 5508, REQ-1).
func queryPort(kind uint8, dir Direction) uint16 {
	request, asks := query(kind)
	if !asks {
		dir = 1 - dir
	}
	return uint16(dir)<<8 | uint16(request)
}

func (k *key) nearPort(dir Direction) uint16 { return uint16(k.word >> nearShift[dir]) }
func (k *key) remotePort() uint16            { return uint16(k.word >> remoteShift) }

// hashKeys make the hash of tuples unpredictable. Each table has its own; neither keys nor hashes
// leave the process.
type hashKeys [6]uint64

func newHashKeys() (keys hashKeys) {
	for i := range keys {
		keys[i] = rand.Uint64()
	}
	return keys
}

// hash mixes by multiplications whose factors are both secret: the construction of wyhash, which
// Go's own maps use where there are no AES instructions. Whoever does not know the keys cannot
// choose tuples that collide. It is quicker than maphash because it never leaves the registers.
func (keys *hashKeys) hash(nearHi, nearLo, remoteHi, remoteLo, word uint64) uint64 {
	near := mix(nearHi^keys[0], nearLo^keys[1])
	remote := mix(remoteHi^keys[2], remoteLo^keys[3])
	ports := mix(word^keys[4], keys[5]) // ports in sequence need two rounds; this one runs beside the others
	return mix(near^ports, remote)
}

func (k *key) hash(keys *hashKeys) uint64 {
	return keys.hash(k.near.hi, k.near.lo, k.remote.hi, k.remote.lo, k.word)
}

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
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

// expired reports whether the flow has been idle for too long. It then counts as ended, and Sweep
// will remove it.
func (m *match) expired(l *lifetimes, now tick) bool {
	return now.since(tick(m.seen.Load())) > l.of(m.word)
}
