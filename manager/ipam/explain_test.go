package ipam

import (
	"net/netip"
	"testing"
)

func TestExplainReturnsAReasonForEachNetwork(t *testing.T) {
	c := ours()
	c.Nodes = []netip.Addr{addr("192.168.77.4")}
	b := configured(t, c)
	b, _ = allocate(t, b, claim("other", "172.20.0.0/20", "172.21.0.0/22"))
	for name, tc := range map[string]struct {
		change func(*Request)
		want   string // "network here: reason" for the pods' network
	}{
		"private":       {func(r *Request) {}, "10.50.0.0/18: it is in private space (RFC 1918), and overlaps nothing here"},
		"shared":        {func(r *Request) { r.Pod = pfx("100.80.0.0/18") }, "100.80.0.0/18: it is in private space (RFC 6598), and overlaps nothing here"},
		"unique local":  {func(r *Request) { r.Pod, r.External = pfx("fd02::/64"), pfx("fd03::/64") }, "fd02::/64: it is in private space (RFC 4193), and overlaps nothing here"},
		"allowed":       {func(r *Request) { r.Pod, r.Allowed = pfx("203.0.113.0/24"), []netip.Prefix{pfx("203.0.112.0/20")} }, "203.0.113.0/24: it is in 203.0.112.0/20 of spec.claims.allowed, and overlaps nothing here"},
		"the Internet":  {func(r *Request) { r.Pod = pfx("8.8.8.0/24") }, "10.246.0.0/24: it is neither in private space (RFC 1918, 6598 and 4193) nor among spec.claims.allowed"},
		"our pods":      {func(r *Request) { r.Pod = pfx("10.244.64.0/18") }, "10.246.0.0/18: it overlaps our PodCIDR, 10.244.0.0/16"},
		"a node":        {func(r *Request) { r.Pod = pfx("192.168.76.0/22") }, "10.246.0.0/22: it overlaps the address of a node or an API server, 192.168.77.4/32"},
		"another peer":  {func(r *Request) { r.Pod = pfx("172.20.8.0/21") }, "10.246.0.0/21: it overlaps the network used for the pods of peer other, 172.20.0.0/20"},
		"always":        {func(r *Request) { r.AlwaysRemap = true }, "10.50.64.0/18: spec.claims.alwaysRemap of the Peering is true"},
		"wanted":        {func(r *Request) { r.WantPod = pfx("10.9.0.0/18") }, "10.9.0.0/18: spec.overrides.podCIDR of the Peering sets it"},
		"a whole pool":  {func(r *Request) { r.Pod = pfx("192.168.0.0/16") }, "10.246.0.0/16: it overlaps the address of a node or an API server, 192.168.77.4/32"},
		"a cloud's own": {func(r *Request) { r.Pod = pfx("100.100.0.0/17") }, "10.246.0.0/17: it overlaps 100.100.100.200/32, which clouds use for metadata services"},
	} {
		r := Request{ID: "b", Pod: pfx("10.50.0.0/18"), External: pfx("10.60.0.0/20")}
		tc.change(&r)
		both, err := b.Explain(r)
		if got := both[0].Here.String() + ": " + both[0].Why; err != nil || got != tc.want {
			t.Errorf("%s: %s (%v), want %s", name, got, err, tc.want)
		}
		if _, ok := b.AllocationOf("b"); ok {
			t.Fatal("something was given out")
		}
		// Allocate returns the explained networks, and afterwards Explain returns the same.
		next, g := allocate(t, b, r)
		if again, err := next.Explain(r); err != nil || again != both || g != (Allocation{both[0].Here, both[1].Here}) {
			t.Errorf("%s: given %v; explained before %v, after %v (%v)", name, g, both, again, err)
		}
	}
	both, err := b.Explain(Request{ID: "b", Pod: pfx("10.244.0.0/17"), External: pfx("10.246.0.0/16")}) // the network that its pods get here
	if err != nil || both[1].Why != "it overlaps 10.246.0.0/17, which is used for its podCIDR here" {
		t.Errorf("%+v %v", both, err)
	}
	if _, err := b.Explain(Request{ID: "b", Pod: pfx("2a00:1450::/48"), External: pfx("fd01::/64")}); err == nil {
		t.Error("what is refused is explained")
	}
}

func TestExplainReturnsAReasonForNetworksAllocatedEarlier(t *testing.T) {
	b := configured(t, ours())
	r := Request{ID: "b", Pod: pfx("10.50.0.0/18"), External: pfx("203.0.113.0/24"), Allowed: []netip.Prefix{pfx("203.0.113.0/24")}}
	b, _ = allocate(t, b, r)
	own := b.Own()
	own.Nodes = []netip.Addr{addr("10.50.0.9")}
	b, _ = b.Configure(own)
	r.Allowed = nil
	both, err := b.Explain(r)
	if err != nil || both[0].Why != "it was allocated earlier; now it overlaps the address of a node or an API server, 10.50.0.9/32" || both[1].Why != "it was allocated earlier" {
		t.Errorf("%+v %v", both, err)
	}
	r.Pod = pfx("10.70.0.0/18") // of the same length, so the network here stays
	if both, err = b.Explain(r); err != nil || both[0].Here != pfx("10.50.0.0/18") || both[0].Why != "another network was allocated earlier" {
		t.Errorf("%+v %v", both, err)
	}
}
