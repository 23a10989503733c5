package natengine

import (
	"encoding/binary"
	"slices"

	"github.com/isthmus-net/isthmus/packet"
)

type fragmentSet struct {
	key     fragmentKey // before translation
	after   fragmentKey // key after translation; set only with a decision
	host    *fragmentHost
	born    tick
	decided bool   // outbound: there is a decision; inbound: the datagram is dropped
	to      addr   // if the decision is to forward: the new address of our end
	drop    Drop   // if the decision is to drop: the reason
	first   uint64 // first 8 octets after the IP header: ports and, except for TCP, the checksum
	held    [][]byte
	seen    []span // parts of the datagram that have arrived, in order; adjacent parts are merged
	total   int    // octets of the whole datagram, 0 while the last fragment is missing
	links   [2]links
}

// span is a part of a datagram, in units of 8 octets. to is exclusive.
type span struct{ from, to uint16 }

// contradicts returns true if v and the earlier fragments cannot belong to the same datagram. end
// is the offset at which v ends, in octets; more is v's flag "more fragments".
func (set *fragmentSet) contradicts(v *packet.View, end int, more bool) bool {
	reached := 0
	if n := len(set.seen); n > 0 {
		reached = int(set.seen[n-1].to) * 8
	}
	switch off, _, _, _ := v.Fragment(); {
	case more && set.total != 0 && end >= set.total, // v continues beyond the end of the datagram
		!more && set.total != 0 && end != set.total, // v and an earlier fragment end the datagram at different offsets
		!more && set.total == 0 && end <= reached:   // v ends the datagram before octets that have arrived
		return true
	case off == 0 && len(set.seen) > 0 && set.seen[0].from == 0:
		return set.first != firstOctets(v)
	}
	return false
}

// firstOctets returns the first octets after the IP header. If they differ, two first fragments
// belong to different datagrams.
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
	index int // index in fragmentSet.seen
	end   int // offset of the fragment's end, in octets
	last  bool
	kind  placement
}

// fit finds the position of v among the fragments that have arrived.
func (set *fragmentSet) fit(v *packet.View) fitting {
	off, more, _, _ := v.Fragment()
	end := off + v.FragmentLen()
	f := fitting{span: span{uint16(off / 8), uint16((end + 7) / 8)}, end: end, last: !more}
	if set.drop == DropFragment {
		f.kind = duplicate // treated as a duplicate, because the datagram was dropped
		return f
	}
	if f.index, f.kind = set.place(f.span); set.contradicts(v, end, more) {
		f.kind = contradiction
	}
	return f
}

// enter records the arrival of v, whose placement must be fresh.
func (set *fragmentSet) enter(v *packet.View, f fitting) {
	set.cover(f.index, f.span)
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
func (set *fragmentSet) place(part span) (index int, kind placement) {
	for index < len(set.seen) && set.seen[index].to <= part.from {
		index++
	}
	switch {
	case index == len(set.seen) || part.to <= set.seen[index].from:
		return index, fresh
	case set.seen[index].from <= part.from && part.to <= set.seen[index].to:
		return index, duplicate
	}
	return index, contradiction
}

// cover records the arrival of part, for which place has returned index and the placement fresh.
func (set *fragmentSet) cover(index int, part span) {
	left := index > 0 && set.seen[index-1].to == part.from
	right := index < len(set.seen) && set.seen[index].from == part.to
	switch {
	case left && right:
		set.seen[index-1].to = set.seen[index].to
		set.seen = slices.Delete(set.seen, index, index+1)
	case left:
		set.seen[index-1].to = part.to
	case right:
		set.seen[index].from = part.from
	default:
		set.seen = slices.Insert(set.seen, index, part)
	}
}
