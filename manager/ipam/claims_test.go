package ipam

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

func TestOnlyPrivateOrAllowedNetworksAreNotRemapped(t *testing.T) {
	c := ours()
	c.Nodes = []netip.Addr{addr("192.168.77.4")}
	b := configured(t, c)
	for name, tc := range map[string]struct {
		pod     string
		allowed []netip.Prefix
		always  bool
		as      bool
	}{
		"RFC 1918":                              {"192.168.64.0/21", nil, false, true},
		"RFC 6598":                              {"100.65.0.0/20", nil, false, true},
		"a resolver in the Internet":            {"8.8.8.0/24", nil, false, false},
		"a network for documents":               {"203.0.113.0/25", nil, false, false},
		"half private":                          {"172.0.0.0/10", nil, false, false},
		"allowed":                               {"8.8.8.0/24", []netip.Prefix{pfx("1.0.0.0/8"), pfx("8.8.0.0/16")}, false, true},
		"more than is allowed":                  {"8.8.0.0/16", []netip.Prefix{pfx("8.8.8.0/24")}, false, false},
		"a network with a node":                 {"192.168.77.0/24", nil, false, false},
		"allowed, with a node":                  {"192.168.77.0/24", []netip.Prefix{pfx("192.168.0.0/16")}, false, false},
		"our services":                          {"10.97.0.0/16", nil, false, false},
		"allowed, our services":                 {"10.97.0.0/16", []netip.Prefix{pfx("10.0.0.0/8")}, false, false},
		"a metadata service":                    {"100.100.100.0/24", nil, false, false},
		"allowed, a metadata service":           {"168.63.128.0/20", []netip.Prefix{pfx("168.0.0.0/8")}, false, false},
		"always remapped":                       {"192.168.64.0/21", nil, true, false},
		"always remapped, in the first free":    {"10.0.0.0/16", nil, true, false},
		"always remapped, though it is allowed": {"8.8.8.0/24", []netip.Prefix{pfx("8.0.0.0/8")}, true, false},
	} {
		r := Request{ID: "b", Pod: pfx(tc.pod), External: pfx("192.168.200.0/22"), Allowed: tc.allowed, AlwaysRemap: tc.always}
		_, g := allocate(t, b, r)
		if as := g.Pod == r.Pod; as != tc.as {
			t.Errorf("%s: %v is %v", name, r.Pod, g.Pod)
		}
		if !tc.as && !within(g.Pod, defaultPools()) || b.taken.overlaps(g.Pod) || b.nodes.overlaps(g.Pod) {
			t.Errorf("%s: %v is %v, which is not free", name, r.Pod, g.Pod)
		}
		if as := g.External == r.External; as == tc.always {
			t.Errorf("%s: ExternalCIDR is %v", name, g.External)
		}
	}
	// The claim has the networks that the allocator would choose, but AlwaysRemap forbids them.
	_, g := allocate(t, b, Request{ID: "b", Pod: pfx("192.168.64.0/21"), External: pfx("192.168.200.0/22"), AlwaysRemap: true})
	r := Request{ID: "b", Pod: g.Pod, External: g.External, AlwaysRemap: true}
	if _, again := allocate(t, b, r); again.Pod == g.Pod || again.External == g.External {
		t.Errorf("always remapped: %v is %v", g, again)
	}
	// A claim outside of private space is refused if no pool has room to remap it.
	_, g, err := b.Allocate(Request{ID: "b", Pod: pfx("2a00:1450::/48"), External: pfx("fd01::/64")})
	var refusal *fabric.Refusal
	if !errors.As(err, &refusal) || refusal.Reason != v1alpha1.ReasonExhausted || refusal.Field != "spec.podCIDR" || g != (Allocation{}) {
		t.Errorf("a network in the IPv6 Internet: %v %v", g, err)
	}
	if _, g := allocate(t, b, Request{ID: "b", Pod: pfx("fd02::/48"), External: pfx("fd01::/64")}); g.Pod != pfx("fd02::/48") {
		t.Errorf("RFC 4193: %v", g)
	}
	if _, g, err := b.Allocate(Request{ID: "b", Pod: pfx("fd00:ec2::/48"), External: pfx("fd01::/64")}); err == nil {
		t.Errorf("a metadata service of IPv6: %v", g)
	}
}

func within(p netip.Prefix, networks []netip.Prefix) bool {
	for _, n := range networks {
		if contains(n, p) {
			return true
		}
	}
	return false
}

func TestNewNetworksWaitForConsentWhileOldOnesStay(t *testing.T) {
	b := configured(t, ours())
	first := Request{ID: "b", Pod: pfx("10.50.0.0/16"), External: pfx("10.60.0.0/20")}
	b, had := allocate(t, b, first)
	for name, tc := range map[string]struct {
		change func(*Request)
		needs  bool
	}{
		"the same":                      {func(*Request) {}, false},
		"other pods, which stay here":   {func(r *Request) { r.Pod = pfx("10.70.0.0/16") }, false},
		"a smaller part of what it has": {func(r *Request) { r.Pod = pfx("10.50.16.0/20") }, false},
		"more":                          {func(r *Request) { r.Pod = pfx("10.50.0.0/15") }, true},
		"another small one":             {func(r *Request) { r.Pod = pfx("192.168.4.0/24") }, true},
		"more for its endpoints":        {func(r *Request) { r.External = pfx("10.60.0.0/19") }, true},
		"one that has to be remapped":   {func(r *Request) { r.Pod = pfx("8.8.8.0/24") }, true},
		"where we want it":              {func(r *Request) { r.Pod, r.WantPod = pfx("192.168.4.0/24"), pfx("10.9.9.0/24") }, false},
		"remapped because we want it":   {func(r *Request) { r.AlwaysRemap = true }, false},
		"changed while we remap it":     {func(r *Request) { r.AlwaysRemap, r.Pod = true, pfx("10.50.0.0/15") }, true},
	} {
		r := first
		tc.change(&r)
		next, got, err := b.Allocate(r)
		var refusal *fabric.Refusal
		if errors.As(err, &refusal) != tc.needs || tc.needs && (refusal.Reason != v1alpha1.ReasonConsent || got != (Allocation{})) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		if tc.needs {
			if stays, _ := next.AllocationOf("b"); stays != had || len(next.Changed(b)) > 0 {
				t.Errorf("%s: without consent it has %v", name, stays)
			}
		}
		r.Consented = true
		if _, _, err := b.Allocate(r); err != nil {
			t.Errorf("%s, with consent: %v", name, err)
		}
	}
}

// No sequence of claims without consent gives a peer an address here outside of the networks that
// its first claim got.
func TestRepeatedClaimChangesGetNoNewNetworks(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		b, _ := State{}.Configure(randConfig(rng, 24))
		next, first, err := b.Allocate(Request{ID: "b", Pod: randNetwork(rng, 24), External: randNetwork(rng, 24)})
		if err != nil {
			continue
		}
		for b = next; rng.IntN(30) > 0; {
			next, got, err := b.Allocate(Request{ID: "b", Pod: randNetwork(rng, 24), External: randNetwork(rng, 24)})
			if err != nil {
				continue
			}
			if b = next; !contains(first.Pod, got.Pod) || !contains(first.External, got.External) {
				t.Fatalf("first %v, then %v", first, got)
			}
		}
	}
}

// The peer's network here overlaps one of ours, because somebody edited the IPAM state or our
// networks have changed.
func TestPeerNetworkThatOverlapsOursIsReplacedWithoutConsent(t *testing.T) {
	b := configured(t, ours())
	b, _ = allocate(t, b, Request{ID: "b", Pod: pfx("10.50.0.0/16"), External: pfx("10.60.0.0/20")})
	b, _ = b.Configure(Config{PodCIDR: pfx("10.244.0.0/16"), ServiceCIDR: pfx("10.48.0.0/13"), ExternalCIDR: b.Own().ExternalCIDR})
	r := Request{ID: "b", Pod: pfx("10.50.0.0/18"), External: pfx("10.60.0.0/20")}
	if _, g := allocate(t, b, r); g.Pod.Overlaps(pfx("10.48.0.0/13")) {
		t.Errorf("it has %v", g)
	}
}
