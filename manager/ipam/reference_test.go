package ipam

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// unit is the prefix length of the smallest network that the reference supports.
const unit = 18

// reference is a slow and simple allocator with one flag for each unit of IPv4. It shares no code
// with the tree.
type reference struct {
	pools []netip.Prefix
	taken []netip.Prefix
	sums  []int32 // sums[n] is the number of units taken among the first n
}

func newReference(pools, taken []netip.Prefix) *reference {
	r := &reference{pools: pools, taken: taken, sums: make([]int32, 1<<unit+1)}
	full := make([]bool, 1<<unit)
	for _, p := range taken {
		for i := range 1 << (unit - p.Bits()) {
			full[index(p)+i] = true
		}
	}
	for i, f := range full {
		r.sums[i+1] = r.sums[i]
		if f {
			r.sums[i+1]++
		}
	}
	return r
}

func index(p netip.Prefix) int {
	a := p.Addr().As4()
	return (int(a[0])<<24 | int(a[1])<<16 | int(a[2])<<8 | int(a[3])) >> (32 - unit)
}

func (r *reference) free(first, bits int) bool { return r.sums[first+1<<(unit-bits)] == r.sums[first] }

// place returns the network to allocate for p; zero if there is none.
func (r *reference) place(p netip.Prefix) netip.Prefix {
	covers := false
	for _, pool := range r.pools {
		covers = covers || pool.Overlaps(p) && p.Bits() <= pool.Bits()
	}
	isFree := r.free(index(p), p.Bits())
	if isFree && !covers {
		return p
	}
	for _, pool := range r.pools {
		for length := p.Bits(); length >= pool.Bits(); length-- { // smallest block first
			step := 1 << (unit - length)
			for first := index(pool); first < index(pool)+1<<(unit-pool.Bits()); first += step {
				parent := first &^ step
				whole := length > pool.Bits() && r.free(parent, length-1) // the free block is larger than a network of this length
				if r.free(first, length) && !whole {
					return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(first >> (unit - 8)), byte(first << (24 - unit) >> 8), byte(first << (24 - unit))}), p.Bits())
				}
			}
		}
	}
	if isFree {
		return p
	}
	return netip.Prefix{}
}

func TestAllocateEqualsTheSlowReference(t *testing.T) {
	if testing.Short() {
		t.Skip("slow on purpose")
	}
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 1))
		c := randConfig(rng, unit)
		c.ExternalCIDR = randNetwork(rng, unit)
		b, _ := State{}.Configure(c)
		ids := []string{}
		for step := range 40 {
			if len(ids) > 0 && rng.IntN(4) == 0 { // free some networks, so that best fit has a choice
				i := rng.IntN(len(ids))
				b = b.Release(ids[i])
				b.departed = nil // the reference does not avoid networks of former peers
				ids = append(ids[:i], ids[i+1:]...)
			}
			c := Request{ID: string(rune('a'+step/26)) + string(rune('a'+step%26)), Pod: randNetwork(rng, unit), External: randNetwork(rng, unit), Allowed: everywhere, Consented: true}
			services := func(m netip.Prefix) bool { return m.Overlaps(c.Pod) || m.Overlaps(c.External) }
			if c.Pod.Overlaps(c.External) || slices.ContainsFunc(metadata, services) { // the reference does not avoid metadata services
				continue
			}
			taken := takenBy(b)
			want := Allocation{Pod: newReference(b.own.Pools, taken).place(c.Pod)}
			if want.Pod.IsValid() {
				want.External = newReference(b.own.Pools, append(taken, want.Pod)).place(c.External)
			}
			next, got, err := b.Allocate(c)
			if ok := want.Pod.IsValid() && want.External.IsValid(); ok != (err == nil) || ok && got != want {
				t.Fatalf("seed %d: %+v beside %v\n got: %v %v\nwant: %v", seed, c, taken, got, err, want)
			}
			if err == nil {
				b, ids = next, append(ids, c.ID)
			}
		}
	}
}

// takenBy returns all taken networks, from the State's data instead of its tree.
func takenBy(b State) []netip.Prefix {
	taken := append([]netip.Prefix{b.own.PodCIDR, b.own.ServiceCIDR, b.own.ExternalCIDR}, b.own.Reserved...)
	for _, s := range []string{"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.192.0/18"} {
		taken = append(taken, pfx(s))
	}
	for _, p := range b.peers {
		taken = append(taken, p.Pod, p.External)
	}
	return slices.DeleteFunc(taken, func(p netip.Prefix) bool { return !p.IsValid() })
}

func randConfig(rng *rand.Rand, longest int) Config {
	c := Config{PodCIDR: randNetwork(rng, longest), ServiceCIDR: randNetwork(rng, longest)}
	c.Reserved = []netip.Prefix{randNetwork(rng, longest), randNetwork(rng, longest)}
	c.Pools = defaultPools()[:3]
	if rng.IntN(2) == 0 { // the upper half contains a metadata service
		c.Pools = append(c.Pools, pfx("100.64.0.0/11"))
	}
	return c
}

// randNetwork returns a random network near ranges that are common in practice, so that many
// overlap.
func randNetwork(rng *rand.Rand, longest int) netip.Prefix {
	starts := []string{"10.0.0.0", "10.96.0.0", "10.244.0.0", "172.16.0.0", "172.30.0.0", "192.168.0.0", "100.64.0.0", "203.0.113.0", "44.0.0.0"}
	addr := netip.MustParseAddr(starts[rng.IntN(len(starts))]).As4()
	addr[1] += byte(rng.IntN(4))
	bits := []int{9, 11, 12, 14, 15, 16, 16, 16, 18, 20, 22, 24}[rng.IntN(12)]
	return netip.PrefixFrom(netip.AddrFrom4(addr), min(bits, longest)).Masked()
}
