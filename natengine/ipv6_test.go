package natengine

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// peerSix returns peerB with IPv6 in addition: the peer sees our fd44::/56 as fd46::/56.
func peerSix() Peer {
	p := peerB()
	p.RemotePods = append(p.RemotePods, pfx("fd71::/48"))
	p.RemoteExternal = append(p.RemoteExternal, pfx("fd72::/112"))
	p.Pods = append(p.Pods, Remap{pfx("fd44::/56"), pfx("fd46::/56")})
	p.External = append(p.External, pfx("fd47::/112"))
	p.Endpoints = append(p.Endpoints, Endpoint{ip("fd01::7"), ip("fd47::7")})
	return p
}

// lastAddr returns the last address of a prefix.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

func TestIPv6PrefixMapsOfAnyLengthCoverTheWholePrefix(t *testing.T) {
	for _, c := range []struct{ from, to, remote string }{
		{"fd44::/56", "fd46::/56", "fd71::/48"},
		{"fd44:1:2::/48", "fd46:f:f::/48", "fd71::/64"},
		{"fd44:0:0:ff00::/64", "fd46:0:0:aa::/64", "fd71::/56"},
		{"fd44::1:0:0/96", "fd46::ffff:0:0:0/96", "fd71::8/127"},
		{"fd44::fff0/124", "fd46::10/124", "fd71::9/128"},
		{"fd44::2/127", "fd46::fe/127", "fd71::/16"},
		{"fd00::/8", "fc00::/8", "2001:db8::/32"},
		{"2001:db8:8000::/33", "2001:db8::/33", "fd71::/63"},
	} {
		m := Remap{pfx(c.from), pfx(c.to)}
		remote := pfx(c.remote)
		e := newEngine(t, Config{}, Peer{ID: "b", RemotePods: []netip.Prefix{remote}, Pods: []Remap{m}})
		for _, pod := range []netip.Addr{m.From.Addr().Next(), lastAddr(m.From)} {
			for _, far := range []netip.Addr{remote.Addr(), lastAddr(remote)} {
				seen, ok := m.Map(pod)
				if !ok || !m.To.Contains(seen) {
					t.Fatalf("%v: %v becomes %v", m, pod, seen)
				}
				here, there := netip.AddrPortFrom(pod, 1), netip.AddrPortFrom(far, 2)
				src, _ := out(t, e, udp(here.String(), there.String()), 0)
				wantEnd(t, src, netip.AddrPortFrom(seen, 1).String())
				_, dst := in(t, e, udp(there.String(), src.String()), 0)
				wantEnd(t, dst, here.String())
			}
		}
		if n := e.Stats().Flows; n != 0 {
			t.Errorf("%v: %d flows", m, n)
		}
		// The network address is not a pod. Outbound it is translated by NAPT, and inbound it
		// needs a flow.
		far := netip.AddrPortFrom(remote.Addr(), 2)
		refused(t, e, Inbound, udp(far.String(), netip.AddrPortFrom(m.To.Addr(), 1).String()), 0, DropNoFlow)
		src, _ := out(t, e, udp(netip.AddrPortFrom(m.From.Addr(), 1).String(), far.String()), 0)
		wantEnd(t, src, netip.AddrPortFrom(m.To.Addr(), 1).String())
		// Addresses next to the prefix must not be reachable.
		if beside := lastAddr(m.To).Next(); beside.IsValid() {
			refused(t, e, Inbound, udp(far.String(), netip.AddrPortFrom(beside, 1).String()), 0, DropDestination)
		}
		stranger := netip.AddrPortFrom(lastAddr(remote).Next(), 2).String()
		refused(t, e, Inbound, udp(stranger, netip.AddrPortFrom(lastAddr(m.To), 1).String()), 0, DropNoPeer)
	}
}

// The addresses of metadata services must be unreachable both as pods of a wide prefix and as
// mapped endpoints.
func TestMetadataServicesAreUnreachable(t *testing.T) {
	wide := Peer{ID: "b", RemotePods: pfxs("2001:db8::/32"), Pods: []Remap{{pfx("fd00::/8"), pfx("fc00::/8")}}, External: pfxs("fe00::/16")}
	e := newEngine(t, Config{}, wide)
	for _, real := range []string{"fd00:ec2::254", "fd00:ec2::253", "fd20:ce::254"} {
		seen, _ := wide.Pods[0].Map(ip(real))
		refused(t, e, Inbound, udp("[2001:db8::1]:5", netip.AddrPortFrom(seen, 80).String()), 0, DropDestination)
		mapped := wide
		mapped.Endpoints = []Endpoint{{ip(real), ip("fe00::7")}}
		if err := e.SetPeers([]Peer{mapped}); err == nil {
			t.Errorf("%s was mapped", real)
		}
	}
	_, dst := in(t, e, udp("[2001:db8::1]:5", "[fc20:ce::255]:80"), 0)
	wantEnd(t, dst, "[fd20:ce::255]:80")
}

// Lookups must agree with a linear search. This includes rounds with more prefix lengths than
// tables, and addresses next to the edges of networks.
func TestIPv6RemoteLookupAgreesWithALinearSearch(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	tries := 0
	for round := range 200 {
		var all []remote6
		lengths := []int{56, 112, 64, 48, 128, 33, 127, 96, 3}[:1+rng.IntN(9)]
		for range 1 + rng.IntN(100) {
			b := [16]byte{0xfd, byte(rng.IntN(4)), 5: byte(rng.IntN(4)), 6: byte(rng.IntN(256)), 13: byte(rng.IntN(256)), 15: byte(rng.IntN(4))}
			p, _ := netip.AddrFrom16(b).Prefix(lengths[rng.IntN(len(lengths))])
			if !slices.ContainsFunc(all, func(r remote6) bool { return r.net.Overlaps(p) }) {
				all = append(all, remote6{p, &remote{}})
			}
		}
		table := newRemotes6(all)
		check := func(a netip.Addr) {
			tries++
			var want *remote
			for _, r := range all {
				if r.net.Contains(a) {
					want = r.r
				}
			}
			if got := table.lookup(addrOf(a)); got != want {
				t.Fatalf("round %d: the table returns the wrong network for %v, of %v", round, a, all)
			}
		}
		for _, r := range all {
			check(r.net.Addr())
			check(r.net.Addr().Prev())
			check(lastAddr(r.net))
			check(lastAddr(r.net).Next())
		}
		check(netip.IPv6Unspecified())
	}
	if tries < 10_000 {
		t.Errorf("only %d addresses", tries)
	}
}

// The two words of a network are hashed separately, so that a difference in one word cannot
// compensate for a difference in the other.
func TestAdversarialIPv6NetworksDoNotCollideMoreOften(t *testing.T) {
	for name, of := range map[string]func(i uint64) (hi, lo uint64){
		"in a row":            func(i uint64) (hi, lo uint64) { return 0xfd<<56 | i<<8, 0 },
		"with equal sums":     func(i uint64) (hi, lo uint64) { return 0xfd<<56 + i<<16, -i << 16 },
		"swapped":             func(i uint64) (hi, lo uint64) { return 0xfd<<56 | i<<16, i << 48 },
		"in the highest bits": func(i uint64) (hi, lo uint64) { return 0xfd<<56 | i<<46, i << 54 },
	} {
		var all []remote6
		for i := range uint64(1000) {
			hi, lo := of(i)
			all = append(all, remote6{netip.PrefixFrom(addr{hi, lo}.netip(), 112), &remote{}})
		}
		table := newRemotes6(all)
		l := &table.lengths[0]
		full, longest, run := 0, 0, 0
		for i := range l.slots {
			if run++; l.slots[i].r == nil {
				run = 0
			} else {
				full++
			}
			longest = max(longest, run)
		}
		if full != len(all) || longest > 100 { // usually 5 to 10
			t.Errorf("%s: %d networks, up to %d of them side by side", name, full, longest)
		}
	}
}

func TestIPv4AndIPv6OfOnePeerAreIndependent(t *testing.T) {
	e := newEngine(t, Config{}, peerSix())
	// Both NAPT addresses have the same port, and neither may match packets of the other.
	four, _ := out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	six, _ := out(t, e, udp("[fd01::1]:4000", "[fd71::5]:53"), 0)
	wantEnd(t, four, "10.246.0.0:4000")
	wantEnd(t, six, "[fd46::]:4000")
	_, dst := in(t, e, udp("[fd71::5]:53", "[fd46::]:4000"), 0)
	wantEnd(t, dst, "[fd01::1]:4000")
	_, dst = in(t, e, udp("10.71.0.5:53", "10.246.0.0:4000"), 0)
	wantEnd(t, dst, "192.168.1.1:4000")
	// An IPv4 address in IPv6 notation must not reach the IPv4 map.
	refused(t, e, Inbound, udp("[::ffff:10.71.0.5]:53", "[fd46::5]:4000"), 0, DropNoPeer)
	refused(t, e, Inbound, udp("[fd71::5]:53", "[::ffff:10.246.0.5]:4000"), 0, DropDestination)
	refused(t, e, Outbound, udp("[::ffff:10.244.0.5]:53", "[fd71::5]:4000"), 0, DropSource)

	// If the map of one family is removed, its flows must end and no packet of that family may
	// pass. The other family must not be affected.
	without := peerSix()
	without.Pods = without.Pods[:1]
	if err := e.SetPeers([]Peer{without}); err != nil {
		t.Fatal(err)
	}
	refused(t, e, Outbound, udp("[fd01::1]:4000", "[fd71::5]:53"), 0, DropSource)
	refused(t, e, Inbound, udp("[fd71::5]:53", "[fd46::9]:4000"), 0, DropDestination)
	_, dst = in(t, e, udp("10.71.0.5:53", "10.246.0.0:4000"), 0)
	wantEnd(t, dst, "192.168.1.1:4000")
	if n := e.Stats().Flows; n != 1 {
		t.Errorf("%d flows, want the one of IPv4", n)
	}
}

// A message with addresses of a link in its body must not pass from any source. An echo has an
// identifier, so it passes through NAPT too. Any other message passes only between pods, where just
// its addresses change.
func TestPermittedICMPv6MessagesPass(t *testing.T) {
	e := newEngine(t, Config{}, peerSix())
	message := func(kind byte, src, dst string) []byte {
		h := packettest.IP{Src: ip(src), Dst: ip(dst), TTL: 255}
		return packettest.Build(h, packettest.ICMPError{Type: kind, Rest: 0x00070001, Quote: make([]byte, 24)})
	}
	for kind := 128; kind < 256; kind++ {
		link := kind >= 130 && kind <= 137 || kind >= 141 && kind <= 143 || kind == 148 || kind == 149 || kind >= 151 && kind <= 153
		pod, node := message(byte(kind), "fd44::9", "fd71::5"), message(byte(kind), "fd01::1", "fd71::5")
		reply := message(byte(kind), "fd71::5", "fd46::9")
		switch {
		case link:
			refused(t, e, Outbound, pod, 0, DropProtocol)
			refused(t, e, Outbound, node, 0, DropProtocol)
			refused(t, e, Inbound, reply, 0, DropProtocol)
			continue
		case kind == 128:
			src, _ := out(t, e, node, 0)
			wantEnd(t, src, "[fd46::]:0")
		case kind == 129: // a reply without a request
			refused(t, e, Outbound, message(byte(kind), "fd01::2", "fd71::5"), 0, DropNoFlow)
		default:
			refused(t, e, Outbound, node, 0, DropProtocol)
		}
		src, _ := out(t, e, pod, 0)
		wantEnd(t, src, "[fd46::9]:0")
		_, dst := in(t, e, reply, 0)
		wantEnd(t, dst, "[fd44::9]:0")
	}
}

func TestIPv6FastPathClampsTheSegmentSize(t *testing.T) {
	p := peerSix()
	p.MSS = 1300
	e := newEngine(t, Config{}, p)
	for _, extensions := range [][]packettest.Extension{nil, {{Kind: 60, Data: []byte{1, 4, 0, 0, 0, 0}}}} {
		syn := packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.SYN, Options: []byte{2, 4, 0x05, 0xb4}}
		for _, src := range []string{"fd44::9", "fd01::1"} { // by the 1:1 map, then by NAPT
			got, v := send(t, e, Outbound, packettest.Build(packettest.IP{Src: ip(src), Dst: ip("fd71::5"), Extensions: extensions}, syn), 0)
			if v.Action != Forward {
				t.Fatal(v.Drop)
			}
			packettest.Check(t, got, packettest.ValidChecksums())
			if o := packettest.MustDecode(got).TCPOptions; o[2] != 0x05 || o[3] != 0x00 { // 20 less than 1300
				t.Errorf("%s: options % x", src, o)
			}
		}
	}
}

func TestIPv6PathsDoNotAllocate(t *testing.T) {
	e := newEngine(t, Config{}, peerSix())
	out(t, e, udp("[fd01::1]:4000", "[fd71::5]:53"), 0)
	for _, c := range []struct {
		name    string
		dir     Direction
		b       []byte
		prepare func(i int, v *packet.View)
	}{
		{"prefix map out", Outbound, udp("[fd44::9]:1", "[fd71::5]:2"), nil},
		{"prefix map in", Inbound, udp("[fd71::5]:2", "[fd46::9]:1"), nil},
		{"NAPT hit out", Outbound, udp("[fd01::1]:4000", "[fd71::5]:53"), nil},
		{"NAPT hit in", Inbound, udp("[fd71::5]:53", "[fd46::]:4000"), nil},
		{"NAPT insert", Outbound, udp("[fd01::1]:4000", "[fd71::5]:53"), func(i int, v *packet.View) { v.SetDstPort(uint16(i)) }},
		{"endpoint insert", Inbound, udp("[fd71::5]:53", "[fd47::7]:80"), func(i int, v *packet.View) { v.SetSrcPort(uint16(5000 + i)) }},
		{"ICMPv6 error", Inbound, fault("fd71::1", "fd46::", udp("[fd46::]:4000", "[fd71::5]:53"), 48), nil},
		{"no peer", Inbound, udp("[fd99::5]:53", "[fd46::]:9"), nil},
	} {
		work := slices.Clone(c.b)
		var v packet.View
		parse(t, &v, work)
		i := 0
		n := testing.AllocsPerRun(1000, func() {
			copy(work, c.b)
			if c.prepare != nil {
				c.prepare(i, &v)
			}
			i++
			if c.dir == Outbound {
				e.Outbound(&v, 0)
			} else {
				e.Inbound(&v, 0)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", c.name, n)
		}
	}
}
