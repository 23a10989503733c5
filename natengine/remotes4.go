package natengine

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// remotes4 finds the remote of an IPv4 address in one to three loads. The first load uses the first
// 16 bits of the address. If prefixes longer than /16 begin with these bits, a second load uses the
// next 8 bits. If prefixes longer than /24 begin with these 24 bits, a third load uses the last 8
// bits. Outbound is a third faster with remotes4 than with a trie of package bart. Remote prefixes
// never overlap, so no longest-prefix match is needed.
type remotes4 struct {
	root    [1 << 16]uint16 // by the first 16 bits: index in remotes, 0 for none; or deeper | index in nodes
	nodes   [][256]uint16
	remotes []*remote // the first is nil
	free    []uint16  // indexes in remotes that are no longer in use; insert takes the last
	removed int       // number of networks removed since the table was compiled; their nodes may be empty
}

const deeper = 1 << 15 // flag in an element: the other 15 bits are an index in nodes, not in remotes; so there are at most 32,767 remotes and 32,768 nodes

func (t *remotes4) lookup(a uint32) *remote { return t.remotes[t.number(a)] }

func (t *remotes4) number(a uint32) uint16 {
	x := t.root[a>>16]
	if x&deeper != 0 {
		if x = t.nodes[x&^deeper][uint8(a>>8)]; x&deeper != 0 {
			x = t.nodes[x&^deeper][uint8(a)]
		}
	}
	return x
}

// t is a shallow copy of another table. unshare copies the shared memory, so that the caller can
// insert the given number of networks into t. It returns false and copies nothing if the networks
// might need too many nodes, or if most nodes belong to removed networks. The caller must then
// compile a new table.
func (t *remotes4) unshare(networks int) bool {
	if t.removed > len(t.remotes) || len(t.nodes)+2*networks >= deeper {
		return false
	}
	t.nodes, t.remotes, t.free = slices.Clone(t.nodes), slices.Clone(t.remotes), slices.Clone(t.free)
	return true
}

func (t *remotes4) insert(p netip.Prefix, r *remote) {
	x := uint16(len(t.remotes))
	if last := len(t.free) - 1; last >= 0 {
		x, t.free = t.free[last], t.free[:last]
		t.remotes[x] = r
	} else {
		t.remotes = append(t.remotes, r)
	}
	t.fill(p, x)
}

// remove deletes a network, which must be in the table.
func (t *remotes4) remove(p netip.Prefix) {
	a4 := p.Addr().As4()
	x := t.number(binary.BigEndian.Uint32(a4[:]))
	t.remotes[x], t.free = nil, append(t.free, x)
	t.removed++
	t.fill(p, 0)
}

// fill stores index x for all addresses of a network.
func (t *remotes4) fill(p netip.Prefix, x uint16) {
	a4 := p.Addr().As4()
	fill := func(level []uint16, at uint8, bits int) {
		for i := range 1 << (8 - bits) {
			level[int(at)+i] = x
		}
	}
	switch first := int(a4[0])<<8 | int(a4[1]); {
	case p.Bits() <= 16:
		for i := range 1 << (16 - p.Bits()) {
			t.root[first+i] = x
		}
	case p.Bits() <= 24:
		fill(t.nodes[t.node(t.root[:], first)][:], a4[2], p.Bits()-16)
	default:
		mid := t.node(t.root[:], first)
		low := t.node(t.nodes[mid][:], int(a4[2]))
		fill(t.nodes[low][:], a4[3], p.Bits()-24)
	}
}

// node returns the index of the node below level[i], and makes the node if necessary.
func (t *remotes4) node(level []uint16, i int) int {
	if level[i]&deeper == 0 {
		level[i] = deeper | uint16(len(t.nodes))
		t.nodes = append(t.nodes, [256]uint16{})
	}
	return int(level[i] &^ deeper)
}
