package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

func prefixes(texts string) (all []netip.Prefix) {
	for text := range strings.FieldsSeq(texts) {
		all = append(all, pfx(text))
	}
	return all
}

func TestNodeReportContainsReachableNetworksOutsideTheCluster(t *testing.T) {
	own := prefixes("10.244.0.0/16 10.96.0.0/12")
	for name, tc := range map[string]struct{ have, want, problems string }{
		"addresses, links, static routes":                {"192.0.2.7/32 192.0.2.0/25 192.168.32.0/22 10.9.0.0/21", "10.9.0.0/21 192.0.2.0/25 192.168.32.0/22", ""},
		"default routes":                                 {"0.0.0.0/0 ::/0 192.0.2.0/25", "192.0.2.0/25", ""},
		"our pods and Services":                          {"10.244.3.0/24 10.244.3.7/32 10.96.0.10/32 10.244.0.0/16", "", ""},
		"a network that contains our pods":               {"10.240.0.0/12", "10.240.0.0/12", ""},
		"loopback, link-local, multicast":                {"127.0.0.1/32 127.0.0.0/8 169.254.20.10/32 224.0.0.0/4 ::1/128 fe80::/64 fe80::1/128 ff00::/8", "", ""},
		"IPv6":                                           {"2001:db8:7::/64 2001:db8:7::1/128 fd00:5::/48", "2001:db8:7::/64 fd00:5::/48", ""},
		"two halves of a network":                        {"192.168.32.0/23 192.168.34.0/23 192.168.36.0/24", "192.168.32.0/22 192.168.36.0/24", ""},
		"two halves of a network that would be too wide": {"10.0.0.0/8 11.0.0.0/8", "10.0.0.0/8 11.0.0.0/8", ""},
		"one inside another":                             {"172.16.0.0/12 172.18.3.0/24 172.16.0.0/12", "172.16.0.0/12", ""},
		"a default route in disguise": {"0.0.0.0/1 128.0.0.0/1 192.0.2.0/25", "192.0.2.0/25",
			"Node n1: its route to 0.0.0.0/1 is wider than a /8, so it is ignored like a default route, and peers may get overlapping networks\n" +
				"Node n1: its route to 128.0.0.0/1 is wider than a /8, so it is ignored like a default route, and peers may get overlapping networks"},
		"a default route in disguise, IPv6": {"2000::/3 fd00::/8", "fd00::/8", "Node n1: its route to 2000::/3 is wider than a /8, so it is ignored like a default route, and peers may get overlapping networks"},
	} {
		got, problems := NodeNetworksOf("n1", prefixes(tc.have), own, nil)
		var texts []string
		for _, p := range problems {
			texts = append(texts, p.Error())
		}
		if fmt.Sprint(got.Networks) != fmt.Sprint(prefixes(tc.want)) || strings.Join(texts, "\n") != tc.problems {
			t.Errorf("%s: %v, %q\nwant %s, %q", name, got.Networks, texts, tc.want, tc.problems)
		}
	}
	var resolvers []netip.Addr
	for _, text := range strings.Fields("192.0.2.53 127.0.0.53 10.96.0.10 2001:db8::53 192.0.2.53 192.0.2.9") {
		resolvers = append(resolvers, ip(text))
	}
	got, _ := NodeNetworksOf("n1", nil, own, resolvers)
	if text := fmt.Sprint(got.Resolvers); text != "[192.0.2.9 192.0.2.53 2001:db8::53]" {
		t.Errorf("resolvers %s", text)
	}
}

// A report covers all routes, however many there are, and merges no more of them than necessary.
func TestAReportIsBoundedAndCoversEveryRoute(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 12))
	for round := range 36 {
		var have []netip.Prefix
		n := []int{3, 200, 256, 257, 1000, 3000}[round%6]
		for len(have) < n {
			var p netip.Prefix
			if rng.IntN(3) > 0 {
				p = netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(10 + rng.IntN(30)), byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())}), 8+rng.IntN(25)).Masked()
			} else {
				a := [16]byte{0xfd, byte(rng.IntN(4))}
				for i := 2; i < 16; i++ {
					a[i] = byte(rng.Uint32())
				}
				p = netip.PrefixFrom(netip.AddrFrom16(a), 9+rng.IntN(120)).Masked()
			}
			if p.Bits() > 20 || len(have) < n/100 { // only a few short prefixes, because they would cover all others
				have = append(have, p)
			}
		}
		got, problems := NodeNetworksOf("n1", have, nil, nil)
		v4 := 0
		for i, p := range got.Networks {
			if p.Addr().Is4() {
				v4++
			}
			if i > 0 && (got.Networks[i-1].Overlaps(p) || got.Networks[i-1].Compare(p) >= 0) || p.Bits() < 8 {
				t.Fatalf("%v after %v", p, got.Networks[i-1])
			}
			// Each reported network contains an input network. Up to 256 networks are reported
			// exactly.
			inside := func(q netip.Prefix) bool { return p.Contains(q.Addr()) && p.Bits() <= q.Bits() }
			if !slices.ContainsFunc(have, inside) {
				t.Fatalf("%v contains no network of the input", p)
			}
			if n <= 256 && !covered(p, have) {
				t.Fatalf("%v is not covered by the input", p)
			}
		}
		if v4 > 256 || len(got.Networks)-v4 > 256 || len(problems) > 0 {
			t.Fatalf("%d networks, %d of them IPv4, %v", len(got.Networks), v4, problems)
		}
		for _, p := range have {
			if !slices.ContainsFunc(got.Networks, func(n netip.Prefix) bool { return n.Contains(p.Addr()) && n.Bits() <= p.Bits() }) {
				t.Fatalf("%v is left out", p)
			}
		}
		slices.Reverse(have)
		if again, _ := NodeNetworksOf("n1", have, nil, nil); !again.Equal(got) {
			t.Fatal("the order of routes shows")
		}
	}
}

// covered is a slow check that every address of p is in one of the networks.
func covered(p netip.Prefix, networks []netip.Prefix) bool {
	overlaps := false
	for _, n := range networks {
		if n.Bits() <= p.Bits() && n.Contains(p.Addr()) {
			return true
		}
		overlaps = overlaps || n.Overlaps(p)
	}
	if !overlaps || p.IsSingleIP() {
		return false
	}
	low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	b := p.Addr().AsSlice()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	high, _ := netip.AddrFromSlice(b)
	return covered(low, networks) && covered(netip.PrefixFrom(high, p.Bits()+1), networks)
}

// A node may write anything into its own report.
func TestInvalidAndTooWideNetworksOfAReportAreIgnored(t *testing.T) {
	report := &isthmus.NodeNetworks{ObjectMeta: metav1.ObjectMeta{Namespace: "isthmus-system", Name: "n1"}, Spec: isthmus.NodeNetworksSpec{
		Networks:  []string{"0.0.0.0/0", "128.0.0.0/1", "10.0.0.0/7", "::/0", "fc00::/7", "x", "", "10.0.0.0/8", "192.0.2.7/24", "fd00::/8"},
		Resolvers: []string{"192.0.2.53", "none", "fe80::1%eth0", "::ffff:192.0.2.54"},
	}}
	got, problems := NodeNetworksFrom(report)
	if text := fmt.Sprint(got.Networks, got.Resolvers); text != "[10.0.0.0/8 192.0.2.0/24 fd00::/8] [192.0.2.53 fe80::1 192.0.2.54]" {
		t.Error(text)
	}
	wantTexts(t, problems, `NodeNetworks isthmus-system/n1: spec.networks: node "n1" reports "0.0.0.0/0" and 6 more that are not networks of length /8 or longer; `+
		`they are ignored, and peers may get overlapping networks`)
	whole, problems := NodeNetworksFrom(&isthmus.NodeNetworks{Spec: got.Spec()})
	if wantTexts(t, problems); !whole.Equal(got) {
		t.Errorf("after writing and reading, the report is %v", whole)
	}
}

func TestOverlaySourcesAreNodeAddressesInPodNetworks(t *testing.T) {
	pods := []netip.Prefix{pfx("10.244.0.0/16")}
	got := OverlaySourcesOf([]netip.Addr{ip("172.30.1.11"), ip("10.244.9.64"), ip("127.0.0.1"), ip("10.96.0.1"), ip("10.244.1.1"), ip("10.244.9.64"), ip("fd00::1")}, pods)
	if want := []netip.Addr{ip("10.244.1.1"), ip("10.244.9.64")}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	n := NodeNetworks{Sources: got, Problems: []kernel.Limit{{Reason: "Refused", Message: strings.Repeat("ö", 600)}}}
	spec := n.Spec()
	if back := OverlaySourcesFrom(&isthmus.NodeNetworks{Spec: spec}); !slices.Equal(back, got) {
		t.Errorf("read back as %v", back)
	}
	if p := spec.Problems; len(p) != 1 || len([]rune(p[0].Message)) != 512 {
		t.Errorf("%v", p)
	}
	if n.Equal(NodeNetworks{Sources: got}) || n.Equal(NodeNetworks{Problems: n.Problems}) || !n.Equal(NodeNetworks{Sources: got, Problems: n.Problems}) {
		t.Error("a different report is equal")
	}
}

func TestRoutesThroughNodesAreReportedEvenAboveTheLimit(t *testing.T) {
	router, node, another := ip("172.30.0.1"), ip("172.30.1.12"), ip("172.30.1.99")
	have := []kernel.Route{{Prefix: pfx("0.0.0.0/0"), Via: router}}
	for i := range 300 {
		have = append(have, kernel.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24), Via: router})
	}
	for i := range 100 {
		have = append(have, kernel.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, byte(i), 0}), 24), Via: another})
	}
	last := NodeRoute{pfx("203.0.113.0/24"), node}
	have = append(have, kernel.Route{Prefix: last.Network, Via: last.Via})
	got := NodeRoutesOf(have, nil, nil)
	by := func(a netip.Addr) (n int) {
		for _, r := range got {
			if r.Via == a {
				n++
			}
		}
		return n
	}
	if len(got) != maxNodeRoutes || by(another) != 100 || !slices.Contains(got, last) {
		t.Errorf("%d routes, %d by a host that is no router", len(got), by(another))
	}
	for i := range 100 {
		have = append(have, kernel.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{9, 18, byte(i), 0}), 24), Via: another})
	}
	if got = NodeRoutesOf(have, nil, []netip.Addr{node}); len(got) != maxNodeRoutes || got[len(got)-1] != last {
		t.Errorf("the one by a node is not among %d", len(got))
	}
	if got = NodeRoutesOf(have, nil, []netip.Addr{router}); by(router) != maxNodeRoutes {
		t.Errorf("a node that is the router has %d", by(router))
	}
}
