package natengine

import (
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"
)

// remotes6 finds the remote of an IPv6 address. Each of the most common prefix lengths has a hash
// table with its networks. A lookup in a hash table takes one or two loads, while a lookup in a
// trie takes several. All other networks are in a trie. The trie stays small, because clusters
// usually use few prefix lengths. A hostile peer may use many. Remote prefixes never overlap, so no
// longest-prefix match is needed.
type remotes6 struct {
	lengths []length6
	rest    *bart.Fast[*remote] // nil when every length has a table
}

// maxLengths6 is the maximum number of tables that a lookup reads before the trie.
const maxLengths6 = 4

// length6 is the hash table of one prefix length. It uses open addressing, and is at most a quarter
// full.
type length6 struct {
	mask  addr
	seed  addr // random: if peers knew it, they could choose networks that collide
	shift uint
	slots []slot6
}

type slot6 struct {
	net addr
	r   *remote // nil: the slot is free
}

// remote6 is a network and its remote, for newRemotes6.
type remote6 struct {
	net netip.Prefix
	r   *remote
}

func newRemotes6(all []remote6) (t remotes6) {
	var count [129]int
	for _, p := range all {
		count[p.net.Bits()]++
	}
	var lengths []int
	for n, c := range count {
		if c > 0 {
			lengths = append(lengths, n)
		}
	}
	slices.SortStableFunc(lengths, func(a, b int) int { return count[b] - count[a] })
	if len(lengths) > maxLengths6 {
		t.rest = &bart.Fast[*remote]{}
	}
	for i, n := range lengths {
		if i < maxLengths6 {
			size := bits.Len(uint(4*count[n] - 1)) // log2 of the number of slots
			l := length6{seed: addr{rand.Uint64(), rand.Uint64()}, shift: uint(64 - size), slots: make([]slot6, 1<<size)}
			for _, p := range all {
				if p.net.Bits() == n {
					net := prefixOf(p.net)
					l.mask = net.mask
					*l.slot(net.net) = slot6{net.net, p.r}
				}
			}
			t.lengths = append(t.lengths, l)
			continue
		}
		for _, p := range all {
			if p.net.Bits() == n {
				t.rest.Insert(p.net, p.r)
			}
		}
	}
	return t
}

// slot returns the slot with the network net, or the free slot into which to insert it.
func (l *length6) slot(net addr) *slot6 {
	// The hash is that of wyhash. It needs two products, because after one product consecutive
	// networks could be in adjacent slots.
	hi, lo := bits.Mul64(net.hi^l.seed.hi, net.lo^l.seed.lo)
	hi, lo = bits.Mul64(hi^lo^l.seed.hi, 0x9e3779b97f4a7c15)
	for i := (hi ^ lo) >> l.shift; ; i++ {
		s := &l.slots[i&uint64(len(l.slots)-1)]
		if s.net == net || s.r == nil {
			return s
		}
	}
}

// lookup returns the remote of an address, or nil if no peer has it.
func (t *remotes6) lookup(a addr) *remote {
	for i := range t.lengths {
		l := &t.lengths[i]
		if s := l.slot(addr{a.hi & l.mask.hi, a.lo & l.mask.lo}); s.r != nil {
			return s.r
		}
	}
	if t.rest == nil {
		return nil
	}
	r, _ := t.rest.Lookup(a.netip())
	return r
}
