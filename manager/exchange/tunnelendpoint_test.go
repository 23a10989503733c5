package exchange

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/managertest"
	"github.com/isthmus-net/isthmus/manager/peers"
)

func holds(nc *v1alpha1.NetworkConfig) bool {
	return controllerutil.ContainsFinalizer(nc, v1alpha1.FinalizerTunnelEndpointCreator)
}

func TestTunnelEndpointCombinesTheNetworkConfigsOfBothSides(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2)
	p.claims("10.244.0.0/18", "10.130.0.0/20").untilAccepted("10.246.0.0/18 None")
	p.publish()
	a.Always("there is no TunnelEndpoint before the peer has answered", func() bool { return p.Endpoint() == nil })
	p.answer("172.16.0.0/16", "None")
	te := p.joined()
	want := v1alpha1.TunnelEndpointSpec{
		ClusterIdentity: p.Cluster,
		LocalPodCIDR:    "10.244.0.0/16", LocalNATPodCIDR: "172.16.0.0/16",
		LocalExternalCIDR: "10.245.0.0/16", LocalNATExternalCIDR: "None",
		RemotePodCIDR: "10.244.0.0/18", RemoteNATPodCIDR: "10.246.0.0/18",
		RemoteExternalCIDR: "10.130.0.0/20", RemoteNATExternalCIDR: "None",
		EndpointIP: "192.0.2.2", BackendType: "wireguard",
		BackendConfig: v1alpha1.BackendConfig{"publicKey": managertest.KeyText(2), "port": "5871"},
	}
	if !reflect.DeepEqual(te.Spec, want) {
		t.Errorf("got  %+v\nwant %+v", te.Spec, want)
	}
	if te.Labels[v1alpha1.LabelClusterID] != p.Cluster.ClusterID {
		t.Errorf("labels are %v", te.Labels)
	}
	var peering isthmus.Peering
	a.OK(managertest.Client.Get(a.Ctx, client.ObjectKeyFromObject(p.Peering), &peering))
	if owners := te.OwnerReferences; len(owners) != 2 || owners[0].UID != p.Original().UID || owners[0].Controller != nil || !metav1.IsControlledBy(te, &peering) {
		t.Errorf("owners are %+v", owners)
	}
	if !holds(p.Original()) || !holds(p.copied()) {
		t.Error("the finalizer is not on both NetworkConfigs")
	}
	mappings := p.mappings()
	if len(mappings) != 1 || mappings[0].CreationTimestamp.After(te.CreationTimestamp.Time) {
		t.Fatalf("NatMappings are %+v", mappings)
	}
	if spec := mappings[0].Spec; spec.PodCIDR != "10.246.0.0/18" || spec.ExternalCIDR != "10.245.0.0/16" ||
		!maps.Equal(spec.ClusterMappings, v1alpha1.EndpointMap{"169.254.0.1": "10.245.0.1"}) {
		t.Errorf("the NatMapping is %+v", spec)
	}
	before := a.versions()
	a.facts.change(func(*facts.Facts) {})
	a.Always("nothing is written at rest", func() bool { return maps.Equal(a.versions(), before) })
}

// The peer can answer anything, and may write both NetworkConfigs.
func TestInvalidAnswersDoNotChangeTheTunnelEndpoint(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish()
	p.untilAccepted("10.246.0.0/18 None")
	for _, answer := range [][2]string{
		{"172.16.0.0/16", "172.16.0.0/16"}, // the same network twice
		{"240.0.0.0/8", "None"},            // the API server refuses a network of another length
		{"fd00::/16", "None"},
	} {
		nc := p.Original()
		nc.Status = v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: answer[0], ExternalCIDRNAT: answer[1]}
		_ = managertest.Client.Status().Update(a.Ctx, nc)
		a.Always(fmt.Sprintf("no TunnelEndpoint out of %v", answer), func() bool { return p.Endpoint() == nil && len(p.mappings()) == 0 })
	}
	p.answer("172.16.0.0/16", "None")
	before := p.joined()

	stays := func() bool { return p.Endpoint().ResourceVersion == before.ResourceVersion }
	p.answer("172.16.0.0/16", "172.16.0.0/16")
	a.Always("what was agreed upon stays", stays)
	p.answer("172.16.0.0/16", "None")
	edit(a, p.Original(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.PodCIDR = "10.77.0.0/16" })
	a.Always("it stays, too, when somebody edits what we say", stays)
	edit(a, p.Original(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.PodCIDR = "10.244.0.0/16" })
	p.answer("172.17.0.0/16", "172.18.0.0/16")
	a.Until("the TunnelEndpoint follows", func() bool { return p.Endpoint().Spec.LocalNATExternalCIDR == "172.18.0.0/16" })
	if mappings := p.mappings(); len(mappings) != 1 || mappings[0].Spec.ClusterMappings["169.254.0.1"] != "172.18.0.1" {
		t.Errorf("NatMappings are %+v", mappings)
	}
	if uid := p.Endpoint().UID; uid != before.UID {
		t.Error("the TunnelEndpoint is another one")
	}
}

// While a refusal is only about networks, the tunnel keeps its networks but gets the peer's new
// endpoint and keys.
func TestTunnelGetsNewEndpointAndKeyWhileNetworksAreRefused(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None")
	p.untilAccepted("10.246.0.0/18 None")
	before := p.joined()
	taken := "10.244.64.0/18" // inside our PodCIDR
	edit(a, p.Peering, func(peering *isthmus.Peering) { peering.Spec.Overrides.PodCIDR = &taken })
	refused := func() bool {
		nc := p.copied()
		c := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted)
		return c != nil && c.Status == metav1.ConditionFalse && c.ObservedGeneration == nc.Generation
	}
	a.Until("the override is refused", refused)
	edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) {
		nc.Spec.EndpointIP, nc.Spec.BackendConfig["publicKey"] = "192.0.2.77", managertest.KeyText(77)
	})
	a.Until("the TunnelEndpoint has the new endpoint and key", func() bool {
		spec := p.Endpoint().Spec
		return spec.EndpointIP == "192.0.2.77" && spec.BackendConfig["publicKey"] == managertest.KeyText(77) && spec.RemoteNATPodCIDR == before.Spec.RemoteNATPodCIDR
	})
	now := p.Endpoint()
	for name, change := range map[string]func(*v1alpha1.NetworkConfigSpec){
		"another network":                  func(s *v1alpha1.NetworkConfigSpec) { s.PodCIDR, s.EndpointIP = "10.50.0.0/18", "192.0.2.78" },
		"an endpoint that it would tunnel": func(s *v1alpha1.NetworkConfigSpec) { s.EndpointIP = "10.246.0.9" },
		"our own key":                      func(s *v1alpha1.NetworkConfigSpec) { s.BackendConfig["publicKey"] = managertest.KeyText(1) },
	} {
		was := p.copied().DeepCopy().Spec
		edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) { change(&nc.Spec) })
		a.Until(name+" is refused", refused)
		a.Always(name+" is not followed", func() bool { return p.Endpoint().ResourceVersion == now.ResourceVersion })
		edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec = was })
	}
}

func TestEditedTunnelEndpointIsRestoredExceptItsStatus(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None")
	spec := p.joined().Spec
	editStatus(a, p.Endpoint(), func(te *v1alpha1.TunnelEndpoint) { te.Status.GatewayIP = "172.30.0.1" })
	edit(a, p.Endpoint(), func(te *v1alpha1.TunnelEndpoint) {
		te.Spec.EndpointIP, te.Spec.RemoteNATPodCIDR, te.OwnerReferences, te.Labels = "203.0.113.1", "None", nil, nil
		te.Spec.RemotePodCIDR = "10.9.0.0/18"
	})
	a.Until("it is as it was", func() bool {
		te := p.Endpoint()
		return reflect.DeepEqual(te.Spec, spec) && len(te.OwnerReferences) == 2 && te.Labels[v1alpha1.LabelClusterID] == p.Cluster.ClusterID
	})
	if ip := p.Endpoint().Status.GatewayIP; ip != "172.30.0.1" {
		t.Errorf("gatewayIP is %q", ip)
	}
	uid := p.Endpoint().UID
	a.OK(managertest.Client.Delete(a.Ctx, p.Endpoint()))
	a.Until("it is made again", func() bool { te := p.Endpoint(); return te != nil && te.UID != uid })
}

func TestPeersWithdrawalDeletesTheTunnelEndpointButKeepsNetworks(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None")
	te := p.joined()
	edit(a, te, func(te *v1alpha1.TunnelEndpoint) { controllerutil.AddFinalizer(te, v1alpha1.FinalizerGateway) })
	a.OK(managertest.Client.Delete(a.Ctx, p.copied()))
	a.Until("the NetworkConfig does not wait for the gateway", func() bool { return p.copied() == nil })
	a.Until("the TunnelEndpoint is deleted", func() bool { return !p.Endpoint().DeletionTimestamp.IsZero() })
	if !p.allocated() || !holds(p.Original()) || len(p.mappings()) != 1 {
		t.Error("more went than the TunnelEndpoint")
	}
	// The peer returns before the gateway has removed its finalizer.
	p.claims("10.244.0.0/18", "10.130.0.0/20").untilAccepted("10.246.0.0/18 None")
	a.Always("the old one is still there", func() bool { return p.Endpoint().UID == te.UID })
	edit(a, p.Endpoint(), func(te *v1alpha1.TunnelEndpoint) { te.Finalizers = nil })
	a.Until("there is a new one", func() bool { now := p.Endpoint(); return now != nil && now.UID != te.UID })
}

func TestNetworksAreKeptWhenOurNetworkConfigIsDeletedByHand(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None")
	p.joined()
	a.OK(managertest.Client.Delete(a.Ctx, p.Original()))
	a.Until("ours is gone, and what was made of it", func() bool { return p.Original() == nil && p.Endpoint() == nil })
	if !p.allocated() {
		t.Error("the networks are free, and the Peering is still there")
	}
	p.publish().answer("None", "None").joined()
	p.untilAccepted("10.246.0.0/18 None")
}

// Un-peering first deletes the TunnelEndpoint. Once the gateway has removed its finalizer, the
// NatMapping is deleted and the networks are released. Our NetworkConfig is deleted last.
func TestUnpeeringDeletesObjectsInOrder(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None")
	edit(a, p.joined(), func(te *v1alpha1.TunnelEndpoint) { controllerutil.AddFinalizer(te, v1alpha1.FinalizerGateway) })
	a.OK(managertest.Client.Delete(a.Ctx, p.Peering)) // package peerings would handle the Peering's finalizer
	a.Until("the TunnelEndpoint is deleted", func() bool { return !p.Endpoint().DeletionTimestamp.IsZero() })
	a.OK(managertest.Client.Delete(a.Ctx, p.Original()))
	a.Always("all waits for the gateway", func() bool {
		return p.Original() != nil && holds(p.Original()) && p.allocated() && len(p.mappings()) == 1
	})
	a.Until("the peer is not held up", func() bool { return !holds(p.copied()) })
	edit(a, p.Endpoint(), func(te *v1alpha1.TunnelEndpoint) { te.Finalizers = nil })
	a.Until("ours is gone", func() bool { return p.Original() == nil })
	if p.allocated() || len(p.mappings()) != 0 {
		t.Error("networks or NatMapping are still there")
	}
	p.held("10.246.0.0/18", "10.130.0.0/20")
	p.untilAccepted("NotPeered: metadata.labels[liqo.io/originID]: the peering with cluster " + p.Cluster.ClusterID + " is being taken down here")
}

// held checks that nodes still refuse the networks of a partner that has left.
func (p *partner) held(networks ...string) {
	p.a.T.Helper()
	var allocation isthmus.NetworkAllocation
	p.a.OK(managertest.Client.Get(p.a.Ctx, client.ObjectKey{Name: fabric.AllocationName(p.Cluster.ClusterID)}, &allocation))
	if at := p.a.store.State().ReleasedAt(p.Cluster.ClusterID); at.IsZero() || !slices.Equal(allocation.Spec.Networks, networks) || allocation.Spec.ReleasedAt == "" {
		p.a.T.Errorf("released at %v, nodes refuse %+v; want %v", at, allocation.Spec, networks)
	}
}

// Our finalizer is neither on ForeignClusters of Liqo nor on a Peering whose CRD was deleted. Such
// an object may disappear before the other objects of the peering.
func TestLeftoversOfARemovedPeerAreDeleted(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None")
	p.joined()
	edit(a, p.Original(), func(nc *v1alpha1.NetworkConfig) { nc.OwnerReferences = nil })
	edit(a, p.Peering, func(p *isthmus.Peering) { p.Finalizers = nil })
	a.OK(managertest.Client.Delete(a.Ctx, p.Peering))
	a.Until("the TunnelEndpoint is gone", func() bool { return p.Endpoint() == nil })
	a.OK(managertest.Client.Delete(a.Ctx, p.Original()))
	a.Until("all is gone", func() bool {
		return p.Original() == nil && !p.allocated() && len(p.mappings()) == 0 && !holds(p.copied())
	})
	p.held("10.246.0.0/18", "10.130.0.0/20")
}

func TestRepeatedPeeringLeavesNothingBehind(t *testing.T) {
	a := newAnswering(t)
	rounds := 12
	var goroutines int
	for i := range rounds {
		p := &partner{Remote: a.Describe("bravo"), a: a, key: 2}
		if i == 0 {
			p = a.partner("bravo", 2)
		} else {
			p.Peering.Finalizers = []string{isthmus.FinalizerPeering}
			a.Create(p.Peering)
		}
		p.claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None").joined()
		p.untilAccepted("10.246.0.0/18 None") // repeated peerings get the same networks
		a.OK(managertest.Client.Delete(a.Ctx, p.Peering))
		a.OK(managertest.Client.Delete(a.Ctx, p.Original()))
		a.OK(managertest.Client.Delete(a.Ctx, p.copied()))
		a.Until("all is gone", func() bool { return p.Original() == nil && p.copied() == nil && p.Endpoint() == nil })
		if p.allocated() || len(p.mappings()) != 0 || len(a.store.State().Peers()) != 1 { // the networks are held
			t.Fatalf("round %d: %v are left", i, a.store.State().Peers())
		}
		edit(a, p.Peering, func(p *isthmus.Peering) { p.Finalizers = nil })
		a.Until("the Peering is gone", func() bool {
			return apierrors.IsNotFound(managertest.Client.Get(a.Ctx, client.ObjectKeyFromObject(p.Peering), p.Peering))
		})
		if i == 0 {
			goroutines = runtime.NumGoroutine()
		}
	}
	a.Until(fmt.Sprintf("there are no more goroutines than after the first round, %d", goroutines), func() bool {
		return runtime.NumGoroutine() <= goroutines+5 // some goroutines may still handle the last events
	})
}

func TestNetworksAroundReturnsAllPrefixesThatContainTheAddress(t *testing.T) {
	all := networksAround("10.246.7.9")
	for _, want := range []string{"10.0.0.0/8", "10.246.0.0/16", "10.246.7.8/30"} {
		if !slices.Contains(all, want) {
			t.Errorf("%s is not among %v", want, all)
		}
	}
	if len(all) != 23 || networksAround("gw.example") != nil {
		t.Errorf("%d networks, %v for a name", len(all), networksAround("gw.example"))
	}
	if six := networksAround("2001:db8::1"); !slices.Contains(six, "2001:db8::/32") {
		t.Errorf("IPv6: %v", six)
	}
}

func TestInBandControlRequiresBothSides(t *testing.T) {
	facts := facts.Facts{PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ExternalCIDR: netip.MustParsePrefix("10.245.0.0/16"), Endpoint: "192.0.2.1", Port: 5871, PublicKey: managertest.Key(1)}
	for _, ours := range []bool{false, true} {
		for _, theirs := range []bool{false, true} {
			spec, problems := NetworkConfigFor(facts, peers.Peer{Cluster: v1alpha1.ClusterIdentity{ClusterID: "b", ClusterName: "b"}, InBand: theirs})
			if len(problems) > 0 {
				t.Fatal(problems)
			}
			if got := inBand(peers.Peer{InBand: ours}, &v1alpha1.NetworkConfig{Spec: spec}); got != (ours && theirs) {
				t.Errorf("ours %t, theirs %t: %t", ours, theirs, got)
			}
		}
	}
}
