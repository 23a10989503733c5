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
	decided bool   // outbound: there is a decision; inbound: only for a dropped datagram
	to      addr   // the decision: our end, written to every fragment
	drop    Drop   // or the reason to drop every fragment
	first   uint64 // first 8 octets after the IP header: ports and, except for TCP, the checksum
	held    [][]byte
	seen    []span // parts that have arrived, in order and not adjacent
	total   int    // octets of the whole datagram, 0 while the last fragment is missing
	links   [2]links
}

// span is a part of a datagram, in units of 8 octets. to is exclusive.
type span struct{ from, to uint16 }

// contradicts reports whether v cannot belong to the same datagram as the earlier fragments. v
// ends at offset end, in octets, and more is its flag "more fragments".
func (set *fragmentSet) contradicts(v *packet.View, end int, more bool) bool {
	reached := 0
	if n := len(set.seen); n > 0 {
		reached = int(set.seen[n-1].to) * 8
	}
	switch off, _, _, _ := v.Fragment(); {
	case more && set.total != 0 && end >= set.total, // v continues beyond the end of the datagram
		!more && set.total != 0 && end != set.total, // v ends the datagram elsewhere than an earlier fragment
		!more && set.total == 0 && end <= reached:   // v ends the datagram before octets that have arrived
		return true
	case off == 0 && len(set.seen) > 0 && set.seen[0].from == 0:
		return set.first != firstOctets(v)
	}
	return false
}

// firstOctets returns the first octets after the IP header. They distinguish the first
// fragments of two datagrams.
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
	at   int // index in fragmentSet.seen
	end  int // offset of the fragment's end, in octets
	last bool
	kind placement
}

// fit finds the position of v among the fragments that have arrived.
func (set *fragmentSet) fit(v *packet.View) fitting {
	off, more, _, _ := v.Fragment()
	end := off + v.FragmentLen()
	f := fitting{span: span{uint16(off / 8), uint16((end + 7) / 8)}, end: end, last: !more}
	if set.drop == DropFragment {
		f.kind = duplicate // its datagram was dropped
		return f
	}
	if f.at, f.kind = set.place(f.span); set.contradicts(v, end, more) {
		f.kind = contradiction
	}
	return f
}

// enter records the arrival of v, which must be fresh.
func (set *fragmentSet) enter(v *packet.View, f fitting) {
	set.cover(f.at, f.span)
	if f.from == 0 {
		set.first = firstOctets(v)
	}
	if f.last {
		set.total = f.end
	}
}

// completes reports whether fresh fragment f fills the only gap in the datagram.
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

// place returns the index of part in set.seen and its placement among the parts that have
// arrived.
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

// cover records the arrival of part, which place found to be fresh at index at.
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
