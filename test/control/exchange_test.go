package control

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// TestPeeringCreatesTheExpectedObjects tests the exchange of NetworkConfigs on real API
// servers. It checks every object on each side, for clusters with many combinations of networks.
func TestPeeringCreatesTheExpectedObjects(t *testing.T) {
	t.Parallel()
	sites := newSites(t, "10.244.0.0/16", "10.128.0.0/14", "172.20.0.0/20")
	a, b, c := sites[0], sites[1], sites[2]
	for _, s := range sites {
		s.startManager()
	}

	podsOfA, podsOfB := a.podCIDR, b.podCIDR
	t.Run("identical clusters choose identical networks", func(t *testing.T) {
		reportTo(t, sites...)
		for _, s := range []*site{a, b} {
			s.reconfigure("10.244.0.0/16", "--external-cidr", "10.245.0.0/20") // neither has IPAM state of the other yet
		}
		peer(t, a, b)
		waitAgreed(t, a, b)
		x, y := a.tunnelEndpoint(b).Spec, b.tunnelEndpoint(a).Spec
		if x.RemoteNATPodCIDR != y.RemoteNATPodCIDR || x.RemoteNATExternalCIDR != y.RemoteNATExternalCIDR {
			t.Errorf("a chose %s and %s, b %s and %s", x.RemoteNATPodCIDR, x.RemoteNATExternalCIDR, y.RemoteNATPodCIDR, y.RemoteNATExternalCIDR)
		}
		forgetEachOther(a, b)

		wish := isthmus.Overrides{PodCIDR: new("10.246.0.0/16"), ExternalCIDR: new("10.247.0.0/20")}
		a.join(b, wish)
		b.join(a, wish)
		waitAgreed(t, a, b)
		for _, te := range []*v1alpha1.TunnelEndpoint{a.tunnelEndpoint(b), b.tunnelEndpoint(a)} {
			s := te.Spec
			if s.LocalNATPodCIDR != "10.246.0.0/16" || s.RemoteNATPodCIDR != "10.246.0.0/16" || s.LocalNATExternalCIDR != "10.247.0.0/20" ||
				s.RemoteNATExternalCIDR != "10.247.0.0/20" {
				t.Errorf("what the Peerings demand is not in force: %+v", s)
			}
		}
		forgetEachOther(a, b)
		a.reconfigure(podsOfA)
		b.reconfigure(podsOfB)
	})
	t.Run("different networks and masks", func(t *testing.T) {
		reportTo(t, sites...)
		peer(t, a, b)
		peer(t, b, c)
		peer(t, c, a)
		waitAgreed(t, sites...)
		for _, s := range sites {
			for _, other := range sites {
				if te := s.tunnelEndpoint(other); s != other && te.Spec.RemoteNATPodCIDR != v1alpha1.None {
					t.Errorf("%s remaps the pods of %s, %s, to %s: nothing here overlaps them", s.name, other.name, other.podCIDR, te.Spec.RemoteNATPodCIDR)
				}
			}
		}
	})
	t.Run("changes reach the peers", func(t *testing.T) {
		reportTo(t, sites...)
		testChanges(t, a, b, c)
	})
	forgetEachOther(sites...)
	for _, s := range sites {
		s.waitClean()
	}

	t.Run("three clusters with the same PodCIDR", func(t *testing.T) {
		reportTo(t, sites...)
		for _, s := range sites {
			s.reconfigure("10.244.0.0/16")
		}
		rejoin(sites...)
		waitAgreed(t, sites...)
		for _, s := range sites {
			for _, other := range sites {
				if s != other && s.tunnelEndpoint(other).Spec.RemoteNATPodCIDR == v1alpha1.None {
					t.Errorf("%s uses the pods of %s under their own addresses", s.name, other.name)
				}
			}
		}
		forgetEachOther(sites...)
		for _, s := range sites {
			s.waitClean()
		}
	})
	for _, test := range []struct {
		name         string
		podA, podB   string
		flagsA       []string
		flagsB       []string
		forA, forB   isthmus.Overrides
		remapA       bool   // whether a's pods are remapped at b
		remapB       bool   // whether b's pods are remapped at a
		wantA, wantB string // how the other side sees the pods; "": not checked
	}{
		{name: "neither is remapped", podA: "10.244.0.0/16", podB: "10.128.0.0/14",
			flagsA: []string{"--external-cidr", "10.9.0.0/16"}, flagsB: []string{"--external-cidr", "10.12.0.0/14"},
			wantA: "10.244.0.0/16", wantB: "10.128.0.0/14"},
		{name: "one is remapped, inside the Services of the other", podA: "172.21.16.0/20", podB: "10.128.0.0/14",
			flagsB: []string{"--service-cidr", "172.21.0.0/16"}, remapA: true, wantB: "10.128.0.0/14"},
		{name: "one is remapped by an override", podA: "172.20.0.0/20", podB: "10.128.0.0/14",
			forA: isthmus.Overrides{PodCIDR: new("10.60.0.0/14")}, remapB: true, wantA: "172.20.0.0/20", wantB: "10.60.0.0/14"},
		{name: "both are remapped, one inside the other", podA: "10.244.0.0/16", podB: "10.244.128.0/20", remapA: true, remapB: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			reportTo(t, sites...)
			a.reconfigure(test.podA, test.flagsA...)
			b.reconfigure(test.podB, test.flagsB...)
			a.join(b, test.forA)
			b.join(a, test.forB)
			waitAgreed(t, a, b)
			for _, one := range []struct {
				at, of *site
				remap  bool
				want   string
			}{{b, a, test.remapA, test.wantA}, {a, b, test.remapB, test.wantB}} {
				spec := one.at.tunnelEndpoint(one.of).Spec
				if (spec.RemoteNATPodCIDR != v1alpha1.None) != one.remap {
					t.Errorf("%s sees the pods of %s, %s, as %s", one.at.name, one.of.name, spec.RemotePodCIDR, spec.RemoteNATPodCIDR)
				}
				if got := seenAs(spec.RemoteNATPodCIDR, spec.RemotePodCIDR); one.want != "" && got != one.want {
					t.Errorf("%s sees the pods of %s as %s; want %s", one.at.name, one.of.name, got, one.want)
				}
			}
			forgetEachOther(a, b)
			a.waitClean()
			b.waitClean()
		})
	}
}

// testChanges changes values that a publishes, and logs the time until the peers' TunnelEndpoints
// have them.
func testChanges(t *testing.T, a *site, peers ...*site) {
	service := func(change func(*corev1.Service)) func() error {
		return func() error {
			s := &corev1.Service{}
			if err := a.client.Get(t.Context(), types.NamespacedName{Namespace: installed, Name: "isthmus-gateway"}, s); err != nil {
				return err
			}
			before := s.DeepCopy()
			change(s)
			if !equality.Semantic.DeepEqual(s.Status, before.Status) {
				return a.client.Status().Patch(t.Context(), s, client.MergeFrom(before))
			}
			return a.client.Patch(t.Context(), s, client.MergeFrom(before))
		}
	}
	const key = "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA="
	for _, test := range []struct {
		name   string
		change func() error
		is     func(v1alpha1.TunnelEndpointSpec) bool
	}{
		{"address of the load balancer", service(func(s *corev1.Service) { s.Status.LoadBalancer.Ingress[0].IP = "203.0.113.77" }),
			func(s v1alpha1.TunnelEndpointSpec) bool { return s.EndpointIP == "203.0.113.77" }},
		{"name of the load balancer", service(func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "gateway.a.example"}}
		}), func(s v1alpha1.TunnelEndpointSpec) bool { return s.EndpointIP == "gateway.a.example" }},
		{"annotated address", service(func(s *corev1.Service) {
			s.Annotations = map[string]string{v1alpha1.AnnotationOverrideAddress: "198.51.100.9"}
		}), func(s v1alpha1.TunnelEndpointSpec) bool { return s.EndpointIP == "198.51.100.9" }},
		{"annotated port", service(func(s *corev1.Service) { s.Annotations[v1alpha1.AnnotationOverridePort] = "4500" }),
			func(s v1alpha1.TunnelEndpointSpec) bool { return s.BackendConfig[v1alpha1.ConfigPort] == "4500" }},
		{"key", func() error {
			patch, err := json.Marshal(map[string]any{"data": map[string][]byte{"publicKey": []byte(key)}})
			if err != nil {
				return err
			}
			secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: installed, Name: "wireguard-pubkey"}}
			return a.client.Patch(t.Context(), secret, client.RawPatch(types.MergePatchType, patch))
		}, func(s v1alpha1.TunnelEndpointSpec) bool { return s.BackendConfig[v1alpha1.ConfigPublicKey] == key }},
		{"back to the Service", service(func(s *corev1.Service) {
			s.Annotations = nil
		}), func(s v1alpha1.TunnelEndpointSpec) bool {
			return s.EndpointIP == "gateway.a.example" && s.BackendConfig[v1alpha1.ConfigPort] == "5871"
		}},
	} {
		if err := test.change(); err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		changed := time.Now()
		for _, other := range peers {
			other.eventually(test.name+" of a at "+other.name, func() (string, bool) {
				te := other.tunnelEndpoint(a)
				return fmt.Sprintf("%+v", te), te != nil && test.is(te.Spec)
			})
		}
		took := time.Since(changed).Round(time.Millisecond)
		t.Logf("%s: at the TunnelEndpoints of the peers after %v", test.name, took)
		if took > prompt {
			t.Errorf("%s: took %v", test.name, took)
		}
	}
	if err := service(func(s *corev1.Service) {
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}
	})(); err != nil {
		t.Fatal(err)
	}
	waitAgreed(t, append(peers, a)...)
}

// publish changes the gateway's address, and waits until the other cluster's TunnelEndpoint has it.
func (s *site) publish(address string, other *site) {
	s.t.Helper()
	service := &corev1.Service{}
	key := types.NamespacedName{Namespace: installed, Name: "isthmus-gateway"}
	if err := s.edit(service, key, true, func(client.Object) {
		service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
	}); err != nil {
		s.t.Fatal(err)
	}
	other.eventually("address of "+s.name+" at "+other.name, func() (string, bool) {
		te := other.tunnelEndpoint(s)
		return fmt.Sprintf("%+v", te), te != nil && te.Spec.EndpointIP == address
	})
}

// waitAgreed waits until the Peerings between all of the sites are Ready. Then it compares all
// objects with the expected result of the exchange.
func waitAgreed(t *testing.T, sites ...*site) {
	t.Helper()
	for _, s := range sites {
		for _, other := range sites {
			if s != other {
				s.waitReady(other)
			}
		}
	}
	// Some writes may follow after Ready, such as that of a finalizer.
	var wrong []string
	sites[0].eventually("agreement", func() (string, bool) {
		wrong = nil
		for _, s := range sites {
			inUse := map[string]netip.Prefix{}
			ipamStorage := s.ipamStorage()
			inUse["own pods"], inUse["own Services"], inUse["own ExternalCIDR"] = prefix(ipamStorage.PodCIDR), prefix(ipamStorage.ServiceCIDR), prefix(ipamStorage.ExternalCIDR)
			for _, other := range sites {
				if s == other {
					continue
				}
				wrong = append(wrong, s.wrong(other)...)
				inUse["pods of "+other.name] = prefix(ipamStorage.ClusterSubnets[other.id].RemotePodCIDR)
				inUse["ExternalCIDR of "+other.name] = prefix(ipamStorage.ClusterSubnets[other.id].RemoteExternalCIDR)
			}
			names := slices.Sorted(maps.Keys(inUse))
			for i, x := range names {
				for _, y := range names[i+1:] {
					if inUse[x].Overlaps(inUse[y]) {
						wrong = append(wrong, fmt.Sprintf("%s: %s, %v, overlaps %s, %v", s.name, x, inUse[x], y, inUse[y]))
					}
				}
			}
			n, held := 0, s.released() // IDs of peers that have left
			for id := range ipamStorage.ClusterSubnets {
				if !slices.Contains(held, id) {
					n++
				}
			}
			if n != len(sites)-1 {
				wrong = append(wrong, fmt.Sprintf("%s: IpamStorage of %d peers", s.name, n))
			}
		}
		return strings.Join(wrong, "\n"), len(wrong) == 0
	})
}

// wrong compares all objects of s for its peering with another cluster, and returns the differences
// from the expected state.
func (s *site) wrong(other *site) (all []string) {
	complain := func(format string, args ...any) {
		all = append(all, s.name+" about "+other.name+": "+fmt.Sprintf(format, args...))
	}
	same := func(what string, got, want any) {
		if !equality.Semantic.DeepEqual(got, want) {
			complain("%s is\n\t%+v\nwant\n\t%+v", what, got, want)
		}
	}
	peering := s.peering(other)
	if peering == nil {
		complain("no Peering")
		return all
	}
	owner := func(name string, refs []metav1.OwnerReference) {
		i := slices.IndexFunc(refs, func(r metav1.OwnerReference) bool { return r.Controller != nil && *r.Controller })
		if i < 0 || refs[i].Kind != "Peering" || refs[i].UID != peering.UID {
			complain("%s is not owned by the Peering: %+v", name, refs)
		}
	}

	// Both NetworkConfigs, each in the cluster that publishes it and in the cluster that gets the
	// copy.
	original, sent := s.networkConfig(s.tenant(other), other), other.networkConfig(other.tenant(s), other)
	answered, received := other.networkConfig(other.tenant(s), s), s.networkConfig(s.tenant(other), s)
	if original == nil || sent == nil || answered == nil || received == nil {
		complain("NetworkConfigs: original %t, its copy %t, the peer's %t, its copy here %t", original != nil, sent != nil, answered != nil, received != nil)
		return all
	}
	for _, o := range []*v1alpha1.NetworkConfig{original, sent, answered, received} { // otherwise the deletion of an object may not have been handled yet
		if o.DeletionTimestamp != nil {
			complain("NetworkConfig %s/%s is being deleted", o.Namespace, o.Name)
		}
	}
	ipamStorage := s.ipamStorage()
	same("labels of the original", original.Labels, map[string]string{
		"liqo.io/replication": "true", "liqo.io/remoteID": other.id, "liqo.io/ownership": "netcfgCreator",
	})
	same("finalizers of the original", sorted(original.Finalizers), []string{"crdReplicator.liqo.io", "tunnelendpointcreator.net.liqo.io"})
	owner("the original", original.OwnerReferences)
	secret := &corev1.Secret{}
	s.get(types.NamespacedName{Namespace: installed, Name: "wireguard-pubkey"}, secret)
	same("spec of the original", withoutKeyExchange(original.Spec), v1alpha1.NetworkConfigSpec{
		RemoteCluster: other.cluster(), PodCIDR: s.podCIDR, ExternalCIDR: ipamStorage.ExternalCIDR,
		EndpointIP: fmt.Sprintf("203.0.113.%d", s.name[0]-'a'+1), BackendType: "wireguard",
		BackendConfig: v1alpha1.BackendConfig{"port": "5871", "publicKey": string(secret.Data["publicKey"])},
	})
	same("labels of the copy", sent.Labels, map[string]string{
		"liqo.io/replication": "false", "liqo.io/replicated": "true", "liqo.io/originID": s.id, "liqo.io/remoteID": other.id,
	})
	same("finalizers of the copy", sent.Finalizers, []string{"tunnelendpointcreator.net.liqo.io"})
	if len(sent.OwnerReferences) > 0 {
		complain("the copy has owners: %+v", sent.OwnerReferences)
	}
	same("spec of the copy", sent.Spec, original.Spec)
	same("answer, brought back", original.Status, sent.Status)
	if !sent.Status.Processed || !meta.IsStatusConditionTrue(sent.Status.Conditions, v1alpha1.ConditionAccepted) {
		complain("the copy is not answered: %+v", sent.Status)
	}
	for _, one := range []struct{ what, network, as string }{
		{"PodCIDR", sent.Spec.PodCIDR, sent.Status.PodCIDRNAT}, {"ExternalCIDR", sent.Spec.ExternalCIDR, sent.Status.ExternalCIDRNAT},
	} {
		if one.as != v1alpha1.None && (prefix(one.as).Bits() != prefix(one.network).Bits() || one.as == one.network) {
			complain("%s %s is answered with %s", one.what, one.network, one.as)
		}
	}

	// The TunnelEndpoint joins both NetworkConfigs. The peer's TunnelEndpoint is its mirror image.
	te, mirror := s.tunnelEndpoint(other), other.tunnelEndpoint(s)
	if te == nil || mirror == nil {
		complain("TunnelEndpoints: %t here, %t there", te != nil, mirror != nil)
		return all
	}
	if te.DeletionTimestamp != nil || peering.DeletionTimestamp != nil {
		complain("being deleted: TunnelEndpoint %t, Peering %t", te.DeletionTimestamp != nil, peering.DeletionTimestamp != nil)
	}
	same("TunnelEndpoint", te.Spec, v1alpha1.TunnelEndpointSpec{
		ClusterIdentity: other.cluster(),
		LocalPodCIDR:    original.Spec.PodCIDR, LocalNATPodCIDR: original.Status.PodCIDRNAT,
		LocalExternalCIDR: original.Spec.ExternalCIDR, LocalNATExternalCIDR: original.Status.ExternalCIDRNAT,
		RemotePodCIDR: answered.Spec.PodCIDR, RemoteNATPodCIDR: answered.Status.PodCIDRNAT,
		RemoteExternalCIDR: answered.Spec.ExternalCIDR, RemoteNATExternalCIDR: answered.Status.ExternalCIDRNAT,
		EndpointIP: answered.Spec.EndpointIP, BackendType: "wireguard", BackendConfig: withoutKeyExchange(answered.Spec).BackendConfig,
	})
	same("own half of the TunnelEndpoint in the peer's",
		[]string{te.Spec.LocalPodCIDR, te.Spec.LocalNATPodCIDR, te.Spec.LocalExternalCIDR, te.Spec.LocalNATExternalCIDR},
		[]string{mirror.Spec.RemotePodCIDR, mirror.Spec.RemoteNATPodCIDR, mirror.Spec.RemoteExternalCIDR, mirror.Spec.RemoteNATExternalCIDR})
	same("labels of the TunnelEndpoint", te.Labels, map[string]string{"clusterID": other.id})
	owner("the TunnelEndpoint", te.OwnerReferences)
	if !slices.ContainsFunc(te.OwnerReferences, func(r metav1.OwnerReference) bool { return r.Kind == "NetworkConfig" && r.UID == original.UID }) {
		complain("the TunnelEndpoint is not owned by the original: %+v", te.OwnerReferences)
	}

	// The networks under which each cluster reaches the other.
	podSeen, externalSeen := seenAs(original.Status.PodCIDRNAT, s.podCIDR), seenAs(original.Status.ExternalCIDRNAT, ipamStorage.ExternalCIDR)
	podHere, externalHere := seenAs(answered.Status.PodCIDRNAT, other.podCIDR), seenAs(answered.Status.ExternalCIDRNAT, answered.Spec.ExternalCIDR)
	same("IpamStorage about the peer", ipamStorage.ClusterSubnets[other.id], v1alpha1.Subnets{
		RemotePodCIDR: podHere, RemoteExternalCIDR: externalHere,
		LocalNATPodCIDR: original.Status.PodCIDRNAT, LocalNATExternalCIDR: original.Status.ExternalCIDRNAT,
	})
	first := prefix(externalSeen).Addr().Next().String()
	mapped := ipamStorage.EndpointMappings["169.254.0.1"]
	same("own address of the tunnel", mapped.ExternalCIDROriginalIP, prefix(ipamStorage.ExternalCIDR).Addr().Next().String())
	same("address of the tunnel for the peer", mapped.ClusterMappings[other.id].ExternalCIDRNattedIP, first)
	if _, ok := ipamStorage.NatMappingsConfigured[other.id]; !ok {
		complain("natMappingsConfigured lacks it")
	}
	same("opaque part of the IPAM state", len(ipamStorage.Prefixes), 0)
	mapping := s.natMapping(other)
	if mapping == nil {
		complain("not one NatMapping")
		return all
	}
	same("NatMapping", mapping.Spec, v1alpha1.NatMappingSpec{
		ClusterID: other.id, PodCIDR: podHere, ExternalCIDR: externalSeen, ClusterMappings: v1alpha1.EndpointMap{"169.254.0.1": first},
	})
	same("labels of the NatMapping", mapping.Labels, map[string]string{"clusterID": other.id, "net.liqo.io/natmapping": "true"})

	// The Peering must report each step of the exchange as done.
	for _, step := range []string{
		isthmus.ConditionReady, isthmus.ConditionIdentity, isthmus.ConditionPublished, isthmus.ConditionAnswered,
		isthmus.ConditionPeerConfig, isthmus.ConditionTunnelEndpoint, isthmus.ConditionConnected,
	} {
		if c := meta.FindStatusCondition(peering.Status.Conditions, step); c == nil || c.Status != metav1.ConditionTrue || c.ObservedGeneration != peering.Generation {
			complain("condition %s of generation %d: %+v", step, peering.Generation, c)
		}
	}
	same("local networks of the Peering", peering.Status.Local, isthmus.Networks{
		PodCIDR: s.podCIDR, PodCIDRSeen: podSeen, ExternalCIDR: ipamStorage.ExternalCIDR, ExternalCIDRSeen: externalSeen,
	})
	remote := peering.Status.Remote
	if remote.PodCIDRWhy == "" || remote.ExternalCIDRWhy == "" {
		complain("the Peering does not say why the networks of the peer are what they are: %+v", remote)
	}
	remote.PodCIDRWhy, remote.ExternalCIDRWhy = "", ""
	same("remote networks of the Peering", remote, isthmus.Networks{
		PodCIDR: other.podCIDR, PodCIDRSeen: podHere, ExternalCIDR: answered.Spec.ExternalCIDR, ExternalCIDRSeen: externalHere,
	})
	same("endpoint of the Peering", peering.Status.Endpoint, answered.Spec.EndpointIP+":"+answered.Spec.BackendConfig["port"])
	same("latency of the Peering", peering.Status.Latency, "1ms")
	for _, list := range []client.ObjectList{&v1alpha1.NetworkConfigList{}, &v1alpha1.TunnelEndpointList{}} {
		s.list(list, client.InNamespace(s.tenant(other)))
		want := 1
		if _, ok := list.(*v1alpha1.NetworkConfigList); ok {
			want = 2
		}
		same(fmt.Sprintf("number of objects in %T", list), meta.LenList(list), want)
	}
	return all
}

// networkConfig returns the NetworkConfig for the receiver in a namespace here, or nil.
func (s *site) networkConfig(namespace string, receiver *site) *v1alpha1.NetworkConfig {
	s.t.Helper()
	nc := &v1alpha1.NetworkConfig{}
	if !s.get(types.NamespacedName{Namespace: namespace, Name: receiver.cluster().UniqueName()}, nc) {
		return nil
	}
	return nc
}

// natMapping returns the NatMapping for another cluster, or nil unless there is exactly one.
func (s *site) natMapping(other *site) *v1alpha1.NatMapping {
	s.t.Helper()
	var list v1alpha1.NatMappingList
	s.list(&list)
	all := slices.DeleteFunc(list.Items, func(nm v1alpha1.NatMapping) bool { return nm.Spec.ClusterID != other.id })
	if len(all) != 1 {
		return nil
	}
	return &all[0]
}

// prefix parses a network. It returns the zero value for any other text.
func prefix(s string) netip.Prefix {
	p, _ := netip.ParsePrefix(s)
	return p
}

// seenAs returns the network in a NAT field, or the original network if the field is None.
func seenAs(nat, network string) string {
	if nat == v1alpha1.None {
		return network
	}
	return nat
}

func sorted[T cmp.Ordered](all []T) []T { return slices.Sorted(slices.Values(all)) }

// withoutKeyExchange removes the fields for the exchange of a preshared key from a spec.
func withoutKeyExchange(spec v1alpha1.NetworkConfigSpec) v1alpha1.NetworkConfigSpec {
	spec.BackendConfig = spec.BackendConfig.DeepCopy()
	maps.DeleteFunc(spec.BackendConfig, func(name, _ string) bool {
		return strings.HasPrefix(name, "kem") || name == v1alpha1.ConfigKeyProof
	})
	return spec
}
