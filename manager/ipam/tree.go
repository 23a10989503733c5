package ipam

import (
	"iter"
	"math"
	"net/netip"
)

// A tree is a persistent set of networks of one family or both. It may contain a network several
// times, and networks inside each other. A change copies the nodes on one path and leaves older
// trees intact.
type tree struct{ v4, v6 *node }

// A node represents one network: the path from the root spells its bits. All addresses below a nil
// node are free.
type node struct {
	child [2]*node
	count int     // how often the tree contains exactly this network
	free  lengths // lengths of the largest free blocks below
}

// lengths is a set of prefix lengths from 1 to 128; bit n-1 stands for length n. Length 0, the
// whole family, is stored as 1: no pool is that large.
type lengths [2]uint64

func (l lengths) has(bits int) bool     { i := max(bits, 1) - 1; return l[i/64]>>(i%64)&1 != 0 }
func (l *lengths) add(bits int)         { i := max(bits, 1) - 1; l[i/64] |= 1 << (i % 64) }
func (l *lengths) addAll(other lengths) { l[0] |= other[0]; l[1] |= other[1] }

// with returns the tree with p added once.
func (t tree) with(p netip.Prefix) tree { return t.change(p, +1) }

// without returns the tree with p removed once. The tree must contain p.
func (t tree) without(p netip.Prefix) tree { return t.change(p, -1) }

func (t tree) change(p netip.Prefix, delta int) tree {
	switch {
	case !p.IsValid():
	case p.Addr().Is4():
		t.v4 = change(t.v4, p, 0, delta)
	default:
		t.v6 = change(t.v6, p, 0, delta)
	}
	return t
}

func change(old *node, p netip.Prefix, depth, delta int) *node {
	var n node
	if old != nil {
		n = *old
	}
	if depth == p.Bits() {
		n.count += delta
	} else {
		b := bit(p.Addr(), depth)
		n.child[b] = change(n.child[b], p, depth+1, delta)
	}
	if n.count == 0 && n.child == [2]*node{} {
		return nil
	}
	n.free = lengths{}
	if n.count == 0 {
		for _, c := range n.child {
			if c == nil {
				n.free.add(depth + 1)
			} else {
				n.free.addAll(c.free)
			}
		}
	}
	return &n
}

// lookup returns the node of p. If a network in the tree covers p, lookup returns that network's
// node and true.
func (t tree) lookup(p netip.Prefix) (n *node, covered bool) {
	n = t.v6
	if p.Addr().Is4() {
		n = t.v4
	}
	for depth := range p.Bits() {
		if n == nil || n.count > 0 {
			return n, n != nil
		}
		n = n.child[bit(p.Addr(), depth)]
	}
	return n, n != nil && n.count > 0
}

// overlaps reports whether a network of the tree has an address in common with p.
func (t tree) overlaps(p netip.Prefix) bool {
	n, _ := t.lookup(p)
	return n != nil
}

// alone reports whether p, which is in the tree, overlaps nothing else in it.
func (t tree) alone(p netip.Prefix) bool {
	n := t.v6
	if p.Addr().Is4() {
		n = t.v4
	}
	for depth := range p.Bits() {
		if n.count > 0 {
			return false
		}
		n = n.child[bit(p.Addr(), depth)]
	}
	return n.count == 1 && n.child == [2]*node{}
}

// fit finds a free network of the given length in the pool as Liqo's allocator does: in the
// smallest sufficient free block, and there the lowest one. The result does not overlap networks in
// avoid. These networks do not matter for the size of a free block.
func (t tree) fit(pool netip.Prefix, bits int, avoid tree) (netip.Prefix, bool) {
	n, covered := t.lookup(pool)
	if covered || bits < pool.Bits() {
		return netip.Prefix{}, false
	}
	for length := bits; length >= pool.Bits(); length-- {
		if n != nil && !n.free.has(length) || n == nil && length != pool.Bits() {
			continue
		}
		for block := range n.blocks(pool, length) {
			around, _ := avoid.lookup(block)
			if found, ok := around.firstEmpty(block, bits); ok {
				return found, true
			}
		}
	}
	return netip.Prefix{}, false
}

// room returns how many disjoint networks of the given length are free in the pool. Networks in
// avoid are not free.
func (t tree) room(pool netip.Prefix, bits int, avoid tree) float64 {
	n, covered := t.lookup(pool)
	a, avoided := avoid.lookup(pool)
	if covered || avoided || bits < pool.Bits() {
		return 0
	}
	return room(n, a, bits-pool.Bits())
}

// room returns the number of networks that are free in both n and avoid, and whose prefixes are
// longer than the prefix of n by depth bits. n and avoid are the nodes of the same network in two
// trees.
func room(n, avoid *node, depth int) float64 {
	switch {
	case n == nil && avoid == nil:
		return math.Ldexp(1, depth)
	case depth == 0 || n != nil && n.count > 0 || avoid != nil && avoid.count > 0:
		return 0
	}
	sum := 0.0
	for b := range 2 {
		var below [2]*node
		for i, parent := range []*node{n, avoid} {
			if parent != nil {
				below[i] = parent.child[b]
			}
		}
		sum += room(below[0], below[1], depth-1)
	}
	return sum
}

// blocks yields the maximal free blocks of the given length in ascending order; p is the network of
// n.
func (n *node) blocks(p netip.Prefix, length int) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) { n.eachBlock(p, length, yield) }
}

func (n *node) eachBlock(p netip.Prefix, length int, yield func(netip.Prefix) bool) bool {
	if n == nil {
		return p.Bits() != length || yield(p)
	}
	if !n.free.has(length) {
		return true
	}
	return n.child[0].eachBlock(half(p, 0), length, yield) && n.child[1].eachBlock(half(p, 1), length, yield)
}

// firstEmpty returns the lowest empty network of the given length in p, which is the network of n.
func (n *node) firstEmpty(p netip.Prefix, bits int) (netip.Prefix, bool) {
	switch {
	case n == nil:
		return netip.PrefixFrom(p.Addr(), bits), true
	case n.count > 0 || p.Bits() >= bits:
		return netip.Prefix{}, false
	}
	if found, ok := n.child[0].firstEmpty(half(p, 0), bits); ok {
		return found, true
	}
	return n.child[1].firstEmpty(half(p, 1), bits)
}

// lowest returns the lowest address of p that is not in the tree.
func (t tree) lowest(p netip.Prefix) (netip.Addr, bool) {
	n, _ := t.lookup(p)
	for n != nil {
		b := 0
		switch {
		case n.free == lengths{}:
			return netip.Addr{}, false
		case n.child[0] != nil && n.child[0].free == lengths{}:
			b = 1
		}
		n, p = n.child[b], half(p, b)
	}
	return p.Addr(), true
}

// used returns how many addresses of p are in the tree.
func (t tree) used(p netip.Prefix) float64 {
	n, covered := t.lookup(p)
	if covered {
		return size(p)
	}
	return n.used(p)
}

func (n *node) used(p netip.Prefix) float64 {
	switch {
	case n == nil:
		return 0
	case n.count > 0:
		return size(p)
	}
	return n.child[0].used(half(p, 0)) + n.child[1].used(half(p, 1))
}

// size returns the number of addresses in p, exact up to 2^53.
func size(p netip.Prefix) float64 {
	n := 1.0
	for range p.Addr().BitLen() - p.Bits() {
		n *= 2
	}
	return n
}

// bit returns bit i of the address, counted from the most significant one.
func bit(a netip.Addr, i int) int {
	if a.Is4() {
		b := a.As4()
		return int(b[i/8]>>(7-i%8)) & 1
	}
	b := a.As16()
	return int(b[i/8]>>(7-i%8)) & 1
}

// half returns the lower (0) or upper (1) half of p.
func half(p netip.Prefix, b int) netip.Prefix {
	i := p.Bits()
	if p.Addr().Is4() {
		a := p.Addr().As4()
		a[i/8] |= byte(b << (7 - i%8))
		return netip.PrefixFrom(netip.AddrFrom4(a), i+1)
	}
	a := p.Addr().As16()
	a[i/8] |= byte(b << (7 - i%8))
	return netip.PrefixFrom(netip.AddrFrom16(a), i+1)
}

// move returns the address in the network to that has the same host bits as the address a. Both
// have the same family.
func move(a netip.Addr, to netip.Prefix) netip.Addr {
	host, network := a.AsSlice(), to.Addr().AsSlice()
	for i := range host {
		keep := min(max(to.Bits()-8*i, 0), 8) // bits of this byte that belong to the network
		mask := byte(uint(0xff00) >> keep)
		host[i] = network[i]&mask | host[i]&^mask
	}
	moved, _ := netip.AddrFromSlice(host)
	return moved
}
