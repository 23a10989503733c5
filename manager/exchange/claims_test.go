package exchange

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// An accepted peer edits its NetworkConfig. Its networks and its TunnelEndpoint stay unchanged
// until an administrator consents to exactly the new claim.
func TestChangedClaimWaitsForConsent(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.50.0.0/18", "10.60.0.0/20").publish().answer("None", "None")
	p.untilAccepted("None None")
	before := p.joined()
	had, _ := a.store.State().AllocationOf(p.Cluster.ClusterID)

	const consentNeeded = "ConsentNeeded: spec.podCIDR: is now %s; the receiver still uses 10.50.0.0/18 for the previous network, and needs consent to use %s: want " +
		"podCIDR %s and externalCIDR 10.60.0.0/20 in spec.claims.consent of the receiver's Peering"
	needsConsent := func(claim, use string) string {
		return strings.NewReplacer("now %s", "now "+claim, "use %s", "use "+use, "podCIDR %s and", "podCIDR "+claim+" and").Replace(consentNeeded)
	}
	unchanged := func(after string) {
		t.Helper()
		if now, _ := a.store.State().AllocationOf(p.Cluster.ClusterID); now != had {
			t.Errorf("%s the peer has %v", after, now)
		}
		if te := p.Endpoint(); te.ResourceVersion != before.ResourceVersion {
			t.Errorf("%s the TunnelEndpoint is %+v", after, te.Spec)
		}
	}
	claim := func(pod string) {
		t.Helper()
		edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.PodCIDR = pod })
	}
	consent := func(pod string) {
		t.Helper()
		edit(a, p.Peering, func(peering *isthmus.Peering) {
			peering.Spec.Claims.Consent = &isthmus.Consent{PodCIDR: pod, ExternalCIDR: "10.60.0.0/20"}
		})
	}
	claim("192.168.32.0/22")
	p.untilAccepted(needsConsent("192.168.32.0/22", "192.168.32.0/22"))
	unchanged("after it claimed an on-prem network")
	consent("192.168.0.0/22") // consent to another claim does not count
	claim("8.8.8.0/24")
	p.untilAccepted(needsConsent("8.8.8.0/24", "10.60.16.0/24"))
	unchanged("after it claimed a resolver in the Internet")
	claim("10.50.0.0/18") // the previous claim again
	p.untilAccepted("None None")
	unchanged("after it took its change back")

	claim("10.48.0.0/14")
	p.untilAccepted(needsConsent("10.48.0.0/14", "10.48.0.0/14"))
	consent("10.48.0.0/14")
	p.untilAccepted("None None")
	a.Until("the TunnelEndpoint follows", func() bool { return p.Endpoint().Spec.RemotePodCIDR == "10.48.0.0/14" })
}

func TestAPublicNetworkIsRemappedUnlessThePeeringAllowsIt(t *testing.T) {
	a := newAnswering(t)
	remapped := func(p *partner) (pod, external bool) {
		s := p.copied().Status
		return s.Processed && s.PodCIDRNAT != "None", s.Processed && s.ExternalCIDRNAT != "None"
	}
	for i, pod := range []string{"8.8.8.0/24", "100.100.0.0/17", "172.0.0.0/11"} {
		p := a.partner(fmt.Sprint("moved", i), byte(10+i)).claims(pod, fmt.Sprintf("192.168.%d.0/24", i))
		a.Until(pod+" is remapped", func() bool { pod, external := remapped(p); return pod && !external })
	}
	a.partner("allowed", 4, func(p *isthmus.Peering) { p.Spec.Claims.Allowed = []string{"203.0.112.0/20"} }).
		claims("203.0.113.0/24", "192.168.201.0/24").untilAccepted("None None")
	always := a.partner("always", 6, func(p *isthmus.Peering) { p.Spec.Claims.AlwaysRemap = true }).claims("192.168.32.0/22", "192.168.202.0/24")
	a.Until("the one that is always remapped is", func() bool { pod, external := remapped(always); return pod && external })
	// If an administrator sets alwaysRemap later, the new networks need no further consent.
	later := a.partner("later", 7).claims("192.168.64.0/22", "192.168.203.0/24")
	later.untilAccepted("None None")
	edit(a, later.Peering, func(p *isthmus.Peering) { p.Spec.Claims.AlwaysRemap = true })
	a.Until("it is remapped, too", func() bool { pod, external := remapped(later); return pod && external })
}

func TestConsentAppliesToOneClaimOnly(t *testing.T) {
	claim := fabric.Claim{Pod: netip.MustParsePrefix("10.50.0.0/18"), External: netip.MustParsePrefix("10.60.0.0/20")}
	for consent, want := range map[isthmus.Consent]bool{
		{PodCIDR: "10.50.0.0/18", ExternalCIDR: "10.60.0.0/20"}: true,
		{PodCIDR: "10.50.0.0/16", ExternalCIDR: "10.60.0.0/20"}: false,
		{PodCIDR: "10.50.0.0/18", ExternalCIDR: "10.60.0.0/18"}: false,
	} {
		r, wrong := requestFrom(peers.Peer{Claims: isthmus.Claims{Consent: &consent, Allowed: []string{"8.0.0.0/8"}}}, claim)
		if wrong != nil || r.Consented != want || len(r.Allowed) != 1 {
			t.Errorf("%+v: %+v, %v", consent, r, wrong)
		}
	}
	if _, wrong := requestFrom(peers.Peer{Claims: isthmus.Claims{Allowed: []string{"8.0.0.0"}}}, claim); wrong == nil || wrong.Field != "spec.claims.allowed" {
		t.Errorf("no network: %v", wrong)
	}
}
