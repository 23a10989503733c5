package fabric

import (
	"net/netip"
	"slices"
)

// A prefixIndex finds the networks that contain an address. This takes one map lookup for each
// prefix length in use. Each network has a number that the caller chooses, such as the index of its
// owner.
type prefixIndex struct {
	lengths [2][]int // prefix lengths in use, of IPv4 and IPv6, ascending
	in      map[netip.Prefix][]int
}

// newPrefixIndex numbers each network by its position in the list.
func newPrefixIndex(all []netip.Prefix) *prefixIndex {
	x := &prefixIndex{in: make(map[netip.Prefix][]int, len(all))}
	for i, p := range all {
		x.add(p, i)
	}
	return x
}

func (x *prefixIndex) add(p netip.Prefix, number int) {
	if !p.IsValid() {
		return
	}
	if x.in == nil {
		x.in = make(map[netip.Prefix][]int)
	}
	p = p.Masked()
	family := p.Addr().BitLen() / 128
	if at, has := slices.BinarySearch(x.lengths[family], p.Bits()); !has {
		x.lengths[family] = slices.Insert(x.lengths[family], at, p.Bits())
	}
	x.in[p] = append(x.in[p], number)
}

// find returns the number of the widest network that contains addr, or -1. If accept is not nil,
// find considers only numbers for which accept returns true.
func (x *prefixIndex) find(addr netip.Addr, accept func(number int) bool) int {
	if !addr.IsValid() {
		return -1
	}
	for _, bits := range x.lengths[addr.BitLen()/128] {
		p, err := addr.WithZone("").Prefix(bits)
		if err != nil {
			continue
		}
		for _, number := range x.in[p] {
			if accept == nil || accept(number) {
				return number
			}
		}
	}
	return -1
}
