package ipam

import (
	"net/netip"
	"testing"
)

// The gateway does not set up a peer whose network here overlaps a previous network of ours that
// another peer still uses.
func TestOurPreviousNetworksInUseAreNotReallocated(t *testing.T) {
	was := ours()
	b, _ := allocate(t, configured(t, was), claim("b", "10.50.0.0/16", "10.51.0.0/16"))
	c := was
	c.PodCIDR, c.ExternalCIDR = pfx("10.200.0.0/16"), netip.Prefix{}
	c.Agreed = []netip.Prefix{was.PodCIDR, was.ExternalCIDR, was.PodCIDR} // named by the TunnelEndpoints of b and of another peer
	b, conflicts := b.Configure(c)
	if own := b.Own(); own.ExternalCIDR != was.ExternalCIDR || len(own.Agreed) != 1 || len(conflicts) > 0 {
		t.Errorf("ExternalCIDR %v, agreed %v, conflicts %v", own.ExternalCIDR, own.Agreed, conflicts)
	}
	d := claim("d", "10.244.128.0/17", "10.60.0.0/16")
	_, g := allocate(t, b, d)
	if g.Pod.Overlaps(was.PodCIDR) || g.External != pfx("10.60.0.0/16") {
		t.Errorf("d gets %v and %v", g.Pod, g.External)
	}
	if both, err := b.Explain(d); err != nil || both[0].Why != "it overlaps a previous network of this cluster that a peer still uses, 10.244.0.0/16" {
		t.Errorf("%v, %v", both, err)
	}

	c.Agreed = []netip.Prefix{c.PodCIDR, was.ExternalCIDR} // b uses the new PodCIDR
	b, _ = b.Configure(c)
	if _, g := allocate(t, b, d); g.Pod != pfx("10.244.128.0/17") {
		t.Errorf("d gets %v after b has switched", g.Pod)
	}
}

// All peers have left, but a TunnelEndpoint still exists. An ExternalCIDR that we chose stays, and
// a new PodCIDR may overlap the previous one.
func TestOurPreviousNetworksAreNotReportedAsConflicts(t *testing.T) {
	c := ours()
	c.ExternalCIDR = netip.Prefix{}
	b := configured(t, c)
	was := b.Own()
	c.PodCIDR, c.Agreed = pfx("10.244.0.0/17"), []netip.Prefix{was.PodCIDR, was.ExternalCIDR}
	b, conflicts := b.Configure(c)
	if own := b.Own(); own.ExternalCIDR != was.ExternalCIDR || len(conflicts) > 0 {
		t.Errorf("ExternalCIDR %v, before %v, conflicts %v", own.ExternalCIDR, was.ExternalCIDR, conflicts)
	}
	if again, _ := b.Configure(c); len(again.Own().Agreed) != 1 || !again.Own().Equal(b.Own()) {
		t.Errorf("another Config after the same: %v", again.Own())
	}
}
