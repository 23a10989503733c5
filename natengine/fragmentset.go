package natengine

import (
	"encoding/binary"
	"slices"

	"github.com/isthmus-net/isthmus/packet"
)

type fragmentSet struct {
	key     fragmentKey // before translation
	after   fragmentKey // after translation, once decided
	host    *fragmentHost
	born    tick
	decided bool   // outbound; inbound only for a dropped datagram
	to      addr   // our end, written to every fragment
	drop    Drop   // or why every fragment is dropped
	first   uint64 // first 8 octets behind the IP header: ports and, except for TCP, the checksum
	held    [][]byte
	seen    []span // octets that arrived, in order, not adjacent
	total   int    // octets of the whole datagram, 0 while the last fragment is missing
	links   [2]links
}

// span is a part of a datagram, in units of 8 octets.
type span struct{ from, to uint16 }

// contradicts reports whether v, which ends at end, cannot belong to the datagram of the earlier
// fragments.
func (set *fragmentSet) contradicts(v *packet.View, end int, more bool) bool {
	reached := 0
	if n := len(set.seen); n > 0 {
		reached = int(set.seen[n-1].to) * 8
	}
	switch off, _, _, _ := v.Fragment(); {
	case more && set.total != 0 && end >= set.total, // continues beyond the end
		!more && set.total != 0 && end != set.total, // two ends
		!more && set.total == 0 && end <= reached:   // ends before octets that arrived
		return true
	case off == 0 && len(set.seen) > 0 && set.seen[0].from == 0:
		return set.first != firstOctets(v)
	}
	return false
}

// firstOctets distinguishes the first fragments of two datagrams.
func firstOctets(v *packet.View) uint64 {
	var b [8]byte
	copy(b[:], v.Bytes()[v.TransportOffset():])
	return binary.BigEndian.Uint64(b[:])
}

type placement uint8

const (
	fresh placement = iota
	duplicate
	contradiction
)

// fitting is the position of a fragment in its datagram.
type fitting struct {
	span
	at   int // in fragmentSet.seen
	end  int // octets
	last bool
	kind placement
}

// fit finds the position of v among the earlier fragments in set.
func (set *fragmentSet) fit(v *packet.View) fitting {
	off, more, _, _ := v.Fragment()
	end := off + v.FragmentLen()
	f := fitting{span: span{uint16(off / 8), uint16((end + 7) / 8)}, end: end, last: !more}
	if set.drop == DropFragment {
		f.kind = duplicate // of a datagram that has ended
		return f
	}
	if f.at, f.kind = set.place(f.span); set.contradicts(v, end, more) {
		f.kind = contradiction
	}
	return f
}

// enter records that v arrived, which must be fresh.
func (set *fragmentSet) enter(v *packet.View, f fitting) {
	set.cover(f.at, f.span)
	if f.from == 0 {
		set.first = firstOctets(v)
	}
	if f.last {
		set.total = f.end
	}
}

// completes reports whether a fresh fragment fills the only gap.
func (set *fragmentSet) completes(f fitting) bool {
	total := set.total
	if f.last {
		total = f.end
	}
	if total == 0 {
		return false
	}
	all := span{0, uint16((total + 7) / 8)}
	switch len(set.seen) {
	case 1:
		one := set.seen[0]
		return one.from == all.from && one.to == f.from && f.to == all.to || f.from == all.from && f.to == one.from && one.to == all.to
	case 2:
		return set.seen[0].from == all.from && set.seen[0].to == f.from && f.to == set.seen[1].from && set.seen[1].to == all.to
	}
	return false
}

// place finds the position of part among the octets that arrived.
func (set *fragmentSet) place(part span) (at int, kind placement) {
	for at < len(set.seen) && set.seen[at].to <= part.from {
		at++
	}
	switch {
	case at == len(set.seen) || part.to <= set.seen[at].from:
		return at, fresh
	case set.seen[at].from <= part.from && part.to <= set.seen[at].to:
		return at, duplicate
	}
	return at, contradiction
}

// cover records that part arrived, which place has found to be fresh.
func (set *fragmentSet) cover(at int, part span) {
	left := at > 0 && set.seen[at-1].to == part.from
	right := at < len(set.seen) && set.seen[at].from == part.to
	switch {
	case left && right:
		set.seen[at-1].to = set.seen[at].to
		set.seen = slices.Delete(set.seen, at, at+1)
	case left:
		set.seen[at-1].to = part.to
	case right:
		set.seen[at].from = part.from
	default:
		set.seen = slices.Insert(set.seen, at, part)
	}
}
