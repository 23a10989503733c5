package peering

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

func TestConsentCoversOnlyTheCurrentClaim(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "consent")
	must(t, peerUp(t, p))
	p.Reported()
	claim := Claim{netip.MustParsePrefix("10.48.0.0/14"), netip.MustParsePrefix("10.60.0.0/20")}
	agree := func(name string, c Claim) error {
		t.Helper()
		_, err := Review(t.Context(), p.A, name, PeerOptions{Timeout: clustertest.Patient, Report: p.Report, Claims: Claims{Consent: &c}})
		return err
	}
	refused := func(err error, wants ...string) {
		t.Helper()
		if err == nil {
			t.Fatal("agreed")
		}
		clustertest.Contains(t, err.Error(), wants...)
		if peering := peeringOf(t, p); peering.Spec.Claims.Consent != nil || p.Reported() != "" {
			t.Errorf("refused, and yet there is %+v", peering.Spec.Claims.Consent)
		}
	}
	refused(agree("nobody", claim), "consent-a: no such peering: no Peering and no peer is called nobody")
	refused(agree("consent-b", claim), "consent-a: consent-b has no NetworkConfig in namespace "+p.B.Identity.TenantNamespace(), "there are no networks to agree to")
	_, err := Peer(t.Context(), p.A, clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B}), PeerOptions{Timeout: clustertest.Patient, Report: p.Report, Claims: Claims{Consent: &claim}})
	refused(err, "there is no Peering with b yet, so there are no networks to agree to")

	nc := &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.B.Identity.TenantNamespace(), Name: p.A.Identity.UniqueName(),
			Labels: map[string]string{v1alpha1.LabelOriginID: p.B.Identity.ClusterID}},
		Spec: v1alpha1.NetworkConfigSpec{RemoteCluster: p.A.Identity, PodCIDR: "10.48.0.0/14", ExternalCIDR: "10.61.0.0/20", EndpointIP: "192.0.2.2",
			BackendType: v1alpha1.BackendWireGuard, BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPort: "5871", v1alpha1.ConfigPublicKey: "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA="}},
	}
	must(t, p.A.Client.Create(t.Context(), nc))
	refused(agree("consent-b", claim), "--consent names 10.48.0.0/14,10.60.0.0/20, but consent-b now advertises 10.48.0.0/14,10.61.0.0/20; nothing was agreed to",
		"`isthmus peer "+p.B.Identity.UniqueName()+"` shows")

	claim.External = netip.MustParsePrefix("10.61.0.0/20")
	must(t, agree(p.B.Identity.UniqueName(), claim))
	clustertest.Contains(t, p.Reported(), `spec.claims.consent is {"podCIDR":"10.48.0.0/14","externalCIDR":"10.61.0.0/20"}`, "consent-a: uses the podCIDR of consent-b, 10.60.0.0/20, unchanged")
	before := peeringOf(t, p)
	if before.Spec.Claims.Consent == nil || *before.Spec.Claims.Consent != (isthmus.Consent{PodCIDR: "10.48.0.0/14", ExternalCIDR: "10.61.0.0/20"}) {
		t.Errorf("the Peering has %+v", before.Spec.Claims.Consent)
	}
	must(t, agree("consent-b", claim))
	if after := peeringOf(t, p); after.Generation != before.Generation {
		t.Errorf("once more changes %+v", after.Spec)
	}

	// Neither repeating `isthmus peer` nor a review without choices agrees to a claim. Both
	// report that consent is needed.
	p.Managers[0].Set(isthmus.ConditionPeerConfig, v1alpha1.ReasonConsent+" it asks for more")
	nc.Spec.PodCIDR = "10.48.0.0/13"
	must(t, p.A.Client.Update(t.Context(), nc))
	for begin := time.Now(); !errors.Is(err, errConsent); err = peerUp(t, p) { // the manager may take longer
		if time.Since(begin) > clustertest.Patient {
			t.Fatalf("peer: %v", err)
		}
	}
	clustertest.Contains(t, err.Error(), "consent-a: consent is needed (add --context a to the command): ", "it asks for more")
	if _, err = Review(t.Context(), p.A, "consent-b", PeerOptions{Report: p.Report}); !errors.Is(err, errConsent) {
		t.Errorf("review: %v", err)
	}
	if after := peeringOf(t, p); after.Generation != before.Generation {
		t.Errorf("looking changes %+v", after.Spec)
	}
}

// peeringOf returns the Peering in cluster a.
func peeringOf(t *testing.T, p *clustertest.Pair) *isthmus.Peering {
	t.Helper()
	var peering isthmus.Peering
	must(t, p.A.Client.Get(t.Context(), client.ObjectKey{Name: p.B.Identity.UniqueName()}, &peering))
	return &peering
}

func TestChosenClaimsAreMergedIntoThePeering(t *testing.T) {
	yes, no := true, false
	allowed := []netip.Prefix{netip.MustParsePrefix("203.0.112.0/20"), netip.MustParsePrefix("8.0.0.0/12")}
	have := isthmus.Claims{Allowed: []string{"8.0.0.0/12"}, AlwaysRemap: true}
	for name, c := range map[string]struct {
		choice  Claims
		want    isthmus.Claims
		changes []string
	}{
		"nothing":      {Claims{}, have, nil},
		"one more":     {Claims{Allowed: allowed}, isthmus.Claims{Allowed: []string{"8.0.0.0/12", "203.0.112.0/20"}, AlwaysRemap: true}, []string{"allowed"}},
		"as it is":     {Claims{Allowed: allowed[1:], AlwaysRemap: &yes}, have, nil},
		"not any more": {Claims{AlwaysRemap: &no}, isthmus.Claims{Allowed: have.Allowed}, []string{"alwaysRemap"}},
	} {
		got, changes := c.choice.applyTo(have)
		if !reflect.DeepEqual(got, c.want) || len(changes) != len(c.changes) {
			t.Errorf("%s: %+v, changes %v", name, got, changes)
		}
		for _, field := range c.changes {
			if changes[field] == nil {
				t.Errorf("%s: %s is not changed", name, field)
			}
		}
	}
	if !reflect.DeepEqual(have.Allowed, []string{"8.0.0.0/12"}) {
		t.Errorf("what was there is %v now", have.Allowed)
	}
	for _, text := range []string{"", "10.48.0.0/14", "10.48.0.0/14,", ",10.48.0.0/14", "10.48.1.0/14,10.60.0.0/20", "a,b", "10.48.0.0/14,10.60.0.0/20,"} {
		if claim, err := ParseClaim(text); err == nil {
			t.Errorf("%q is %v", text, claim)
		}
	}
	if claim, err := ParseClaim("10.48.0.0/14,10.60.0.0/20"); err != nil || claim.String() != "10.48.0.0/14,10.60.0.0/20" {
		t.Errorf("%v, %v", claim, err)
	}
}
