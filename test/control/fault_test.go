package control

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// TestPeeringRecoversFromFaults causes faults between two peered clusters, such as edits, revoked
// identities and one-sided un-peering. At last, one API server disappears for ever.
func TestPeeringRecoversFromFaults(t *testing.T) {
	t.Parallel()
	sites := planSites(t, "10.244.0.0/16", "10.244.0.0/18")
	a, b := sites[0], sites[1]
	b.apiArgs = []string{"--service-account-max-token-expiration=1h"} // see testCapped
	startSites(t, sites)
	a.startManager()
	b.startManager()
	peer(t, a, b)
	waitAgreed(t, a, b)

	for _, test := range []struct {
		name string
		run  func(t *testing.T, a, b *site)
	}{
		{"edited objects are restored", testEdits},
		{"isthmus peer replaces a revoked identity", testRevoked},
		{"isthmus peer replaces an expired token", testCapped},
		{"the peer un-peers and peers again", func(t *testing.T, a, b *site) { testOneLeaves(t, a, b); testOneLeaves(t, b, a) }},
		{"the peer un-peers by the command line", testOneLeavesByCommand},
		{"the peer disappears for ever", testGone},
	} {
		t.Run(test.name, func(t *testing.T) {
			reportTo(t, sites...)
			test.run(t, a, b)
		})
		if t.Failed() {
			return
		}
	}
}

// testEdits edits all kinds of objects on both sides of the exchange.
func testEdits(t *testing.T, a, b *site) {
	key := func(namespace string, of *site) types.NamespacedName {
		return types.NamespacedName{Namespace: namespace, Name: of.cluster().UniqueName()}
	}
	config := func(change func(*v1alpha1.NetworkConfig)) func(client.Object) {
		return func(o client.Object) { change(o.(*v1alpha1.NetworkConfig)) }
	}
	endpoint := func(change func(*v1alpha1.TunnelEndpoint)) func(client.Object) {
		return func(o client.Object) { change(o.(*v1alpha1.TunnelEndpoint)) }
	}
	mapping := func(change func(*v1alpha1.NatMapping)) func(client.Object) {
		return func(o client.Object) { change(o.(*v1alpha1.NatMapping)) }
	}
	ipamStorage := func(change func(*v1alpha1.IpamStorageSpec)) func(client.Object) {
		return func(o client.Object) { change(&o.(*v1alpha1.IpamStorage).Spec) }
	}
	original, copied := key(a.tenant(b), b), key(b.tenant(a), b)
	var storage v1alpha1.IpamStorageList
	if err := a.client.List(t.Context(), &storage); err != nil {
		t.Fatal(err)
	}
	type edit struct {
		name   string
		at     *site
		object client.Object
		key    types.NamespacedName
		status bool
		edit   func(client.Object) // nil: delete the object
		moves  bool                // whether the networks may change
	}
	edits := []edit{
		{name: "spec of the original", at: a, object: &v1alpha1.NetworkConfig{}, key: original, edit: config(func(nc *v1alpha1.NetworkConfig) {
			nc.Spec.PodCIDR, nc.Spec.EndpointIP = "10.10.0.0/16", "192.0.2.99"
		})},
		{name: "labels of the original removed", at: a, object: &v1alpha1.NetworkConfig{}, key: original,
			edit: func(o client.Object) { o.SetLabels(nil) }},
		{name: "receiver of the original", at: a, object: &v1alpha1.NetworkConfig{}, key: original,
			edit: func(o client.Object) { o.GetLabels()[v1alpha1.LabelRemoteID] = "somebody-else" }},
		{name: "owner of the original removed", at: a, object: &v1alpha1.NetworkConfig{}, key: original,
			edit: func(o client.Object) { o.SetOwnerReferences(nil) }},
		{name: "finalizers of the original removed", at: a, object: &v1alpha1.NetworkConfig{}, key: original,
			edit: func(o client.Object) { o.SetFinalizers(nil) }},
		{name: "answer in the original", at: a, object: &v1alpha1.NetworkConfig{}, key: original, status: true,
			edit: config(func(nc *v1alpha1.NetworkConfig) { nc.Status.PodCIDRNAT = "10.66.0.0/16" })},
		{name: "original deleted", at: a, object: &v1alpha1.NetworkConfig{}, key: original},
		{name: "spec of the copy", at: b, object: &v1alpha1.NetworkConfig{}, key: copied, edit: config(func(nc *v1alpha1.NetworkConfig) {
			nc.Spec.EndpointIP = "192.0.2.99"
		})},
		{name: "finalizers of the copy removed", at: b, object: &v1alpha1.NetworkConfig{}, key: copied,
			edit: func(o client.Object) { o.SetFinalizers(nil) }},
		{name: "labels of the copy removed", at: b, object: &v1alpha1.NetworkConfig{}, key: copied,
			edit: func(o client.Object) { o.SetLabels(nil) }},
		{name: "sender of the copy", at: b, object: &v1alpha1.NetworkConfig{}, key: copied,
			edit: func(o client.Object) { o.GetLabels()[v1alpha1.LabelOriginID] = "somebody-else" }},
		{name: "copy says that it is an original", at: b, object: &v1alpha1.NetworkConfig{}, key: copied,
			edit: func(o client.Object) { o.GetLabels()[v1alpha1.LabelReplication] = "true" }},
		{name: "answer in the copy", at: b, object: &v1alpha1.NetworkConfig{}, key: copied, status: true,
			edit: config(func(nc *v1alpha1.NetworkConfig) { nc.Status.PodCIDRNAT = "10.66.0.0/16" })},
		{name: "answer in the copy removed", at: b, object: &v1alpha1.NetworkConfig{}, key: copied, status: true,
			edit: config(func(nc *v1alpha1.NetworkConfig) { nc.Status = v1alpha1.NetworkConfigStatus{} })},
		{name: "copy deleted", at: b, object: &v1alpha1.NetworkConfig{}, key: copied},
		{name: "TunnelEndpoint", at: a, object: &v1alpha1.TunnelEndpoint{}, key: original, edit: endpoint(func(te *v1alpha1.TunnelEndpoint) {
			te.Spec.RemoteNATPodCIDR, te.Spec.EndpointIP = "10.77.0.0/18", "192.0.2.99"
		})},
		{name: "labels and owners of the TunnelEndpoint", at: a, object: &v1alpha1.TunnelEndpoint{}, key: original,
			edit: func(o client.Object) { o.SetLabels(nil); o.SetOwnerReferences(nil) }},
		{name: "TunnelEndpoint deleted", at: a, object: &v1alpha1.TunnelEndpoint{}, key: original},
		{name: "NatMapping", at: a, object: &v1alpha1.NatMapping{}, key: types.NamespacedName{Name: a.natMapping(b).Name},
			edit: mapping(func(nm *v1alpha1.NatMapping) {
				nm.Spec.PodCIDR, nm.Spec.ClusterMappings["192.0.2.5"] = "10.99.0.0/18", nm.Spec.ClusterMappings["169.254.0.1"]
			})},
		{name: "labels of the NatMapping removed", at: a, object: &v1alpha1.NatMapping{}, key: types.NamespacedName{Name: a.natMapping(b).Name},
			edit: func(o client.Object) { o.SetLabels(nil) }},
		{name: "NatMapping deleted", at: a, object: &v1alpha1.NatMapping{}, key: types.NamespacedName{Name: a.natMapping(b).Name}},
		{name: "IpamStorage emptied", at: a, object: &v1alpha1.IpamStorage{}, key: types.NamespacedName{Name: storage.Items[0].Name},
			edit: ipamStorage(func(s *v1alpha1.IpamStorageSpec) {
				*s = v1alpha1.IpamStorageSpec{Prefixes: map[string][]byte{}, Pools: []string{}, ReservedSubnets: []string{},
					ClusterSubnets: map[string]v1alpha1.Subnets{}, EndpointMappings: map[string]v1alpha1.EndpointMapping{},
					NatMappingsConfigured: map[string]v1alpha1.ConfiguredCluster{}}
			})},
		{name: "nonsense in the IPAM state", at: a, object: &v1alpha1.IpamStorage{}, key: types.NamespacedName{Name: storage.Items[0].Name},
			edit: ipamStorage(func(s *v1alpha1.IpamStorageSpec) {
				entry := s.ClusterSubnets[b.id]
				entry.RemotePodCIDR = s.PodCIDR
				s.ClusterSubnets[b.id] = entry
			}), moves: true},
		{name: "entry in the IPAM state removed", at: a, object: &v1alpha1.IpamStorage{}, key: types.NamespacedName{Name: storage.Items[0].Name},
			edit: ipamStorage(func(s *v1alpha1.IpamStorageSpec) { delete(s.ClusterSubnets, b.id) })},
		{name: "other network in the IPAM state", at: a, object: &v1alpha1.IpamStorage{}, key: types.NamespacedName{Name: storage.Items[0].Name},
			edit: ipamStorage(func(s *v1alpha1.IpamStorageSpec) {
				entry := s.ClusterSubnets[b.id]
				entry.RemotePodCIDR = "10.200.64.0/18"
				s.ClusterSubnets[b.id] = entry
			})},
		{name: "IpamStorage deleted", at: a, object: &v1alpha1.IpamStorage{}, key: types.NamespacedName{Name: storage.Items[0].Name}},
	}
	for _, e := range edits {
		specs := func() [2]v1alpha1.TunnelEndpointSpec {
			return [2]v1alpha1.TunnelEndpointSpec{a.tunnelEndpoint(b).Spec, b.tunnelEndpoint(a).Spec}
		}
		t.Run(e.name, func(t *testing.T) {
			reportTo(t, a, b)
			before := specs()
			if err := e.at.edit(e.object, e.key, e.status, e.edit); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			waitAgreed(t, a, b)
			if after := specs(); !e.moves && !equality.Semantic.DeepEqual(before, after) {
				t.Errorf("TunnelEndpoints before:\n%+v\nafter:\n%+v", before, after)
			}
			t.Logf("put right within %v", time.Since(began).Round(10*time.Millisecond))
		})
		if t.Failed() {
			return
		}
	}
}

// edit changes an object. If change is nil, it deletes the object.
func (s *site) edit(o client.Object, key types.NamespacedName, status bool, change func(client.Object)) error {
	o.SetNamespace(key.Namespace)
	o.SetName(key.Name)
	if change == nil {
		return s.client.Delete(s.t.Context(), o)
	}
	if err := s.client.Get(s.t.Context(), key, o); err != nil {
		return err
	}
	before := o.DeepCopyObject().(client.Object)
	change(o)
	if status {
		return s.client.Status().Patch(s.t.Context(), o, client.MergeFrom(before))
	}
	return s.client.Patch(s.t.Context(), o, client.MergeFrom(before))
}

// testRevoked revokes a's identity at b.
func testRevoked(t *testing.T, a, b *site) {
	before := [2]*v1alpha1.TunnelEndpoint{a.tunnelEndpoint(b), b.tunnelEndpoint(a)}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: b.tenant(a), Name: "isthmus-peer"}}
	if err := b.client.Delete(t.Context(), account); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if !*long { // after ten seconds the API server rejects a write with the token; without a write, only the next watch would fail, up to 45 s later
		time.Sleep(11 * time.Second)
		change := func(o client.Object) {
			o.(*corev1.Service).Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.66"}}
		}
		if err := a.edit(&corev1.Service{}, types.NamespacedName{Namespace: installed, Name: "isthmus-gateway"}, true, change); err != nil {
			t.Fatal(err)
		}
	}
	a.within(3*time.Minute, "IdentityReady=False/Unauthorized", func() (string, bool) {
		c := a.conditionOf(b, isthmus.ConditionIdentity)
		return fmt.Sprintf("%+v", c), c.Status == metav1.ConditionFalse && c.Reason == isthmus.ReasonUnauthorized
	})
	t.Logf("noticed after %v", time.Since(began).Round(time.Millisecond))
	a.waitCondition(b, isthmus.ConditionReady, metav1.ConditionFalse, isthmus.ReasonUnauthorized)
	for _, kind := range []string{isthmus.ConditionAnswered, isthmus.ConditionPeerConfig, isthmus.ConditionTunnelEndpoint, isthmus.ConditionConnected} {
		if c := a.conditionOf(b, kind); c.Status != metav1.ConditionTrue {
			t.Errorf("%+v", c)
		}
	}
	b.waitReady(a)
	for i, now := range []*v1alpha1.TunnelEndpoint{a.tunnelEndpoint(b), b.tunnelEndpoint(a)} {
		if now == nil || now.ResourceVersion != before[i].ResourceVersion {
			t.Errorf("TunnelEndpoint before:\n%+v\nafter:\n%+v", before[i], now)
		}
	}
	peer(t, a, b)
	a.publish("203.0.113.1", b)
	waitAgreed(t, a, b)
}

// testCapped lets a's token at b expire. b's API server issues tokens for at most one hour,
// although a requests 90 days.
func testCapped(t *testing.T, a, b *site) {
	secret := &corev1.Secret{}
	key := types.NamespacedName{Namespace: a.tenant(b), Name: a.peering(b).Spec.IdentitySecretName}
	var life time.Duration
	if err := a.edit(secret, key, false, func(client.Object) {
		config, err := clientcmd.Load(secret.Data[isthmus.SecretKubeconfig])
		if err != nil {
			t.Fatal(err)
		}
		for _, user := range config.AuthInfos {
			var claims struct{ Iat, Exp int64 }
			payload, err := base64.RawURLEncoding.DecodeString(strings.Split(user.Token, ".")[1])
			if err = errors.Join(err, json.Unmarshal(payload, &claims)); err != nil {
				t.Fatal(err)
			}
			life = time.Duration(claims.Exp-claims.Iat) * time.Second
			if user.Token, err = b.server.DatedToken(user.Token, claims.Iat-2*int64(life.Seconds()), claims.Exp-2*int64(life.Seconds())); err != nil {
				t.Fatal(err)
			}
		}
		if secret.Data[isthmus.SecretKubeconfig], err = clientcmd.Write(*config); err != nil {
			t.Fatal(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if life != time.Hour {
		t.Errorf("b granted a token for %v", life)
	}
	c := a.waitCondition(b, isthmus.ConditionIdentity, metav1.ConditionFalse, isthmus.ReasonUnauthorized)
	for _, part := range []string{"isthmus peer", "the peer's API server limits tokens to 60m,"} {
		if !strings.Contains(c.Message, part) {
			t.Errorf("%q is missing in %q", part, c.Message)
		}
	}
	peer(t, a, b)
	waitAgreed(t, a, b)
}

// testOneLeaves deletes the Peering of one side, and creates it again.
func testOneLeaves(t *testing.T, a, b *site) {
	before := a.tunnelEndpoint(b).Spec
	b.part(a)
	c := a.waitCondition(b, isthmus.ConditionPeerConfig, metav1.ConditionFalse, isthmus.ReasonPeerWithdrew)
	t.Logf("%s says: %s", a.name, c.Message)
	a.eventually("no TunnelEndpoint at "+a.name, func() (string, bool) { te := a.tunnelEndpoint(b); return fmt.Sprint(te), te == nil })
	b.eventually("nothing of a at "+b.name, func() (string, bool) {
		// Only the copy of a's NetworkConfig stays, because a still wants to be peered.
		all := slices.DeleteFunc(b.leftovers(), func(s string) bool {
			return strings.Contains(s, "NetworkConfig "+b.tenant(a)+"/"+b.cluster().UniqueName())
		})
		return strings.Join(all, "\n"), len(all) == 0
	})
	c = a.waitCondition(b, isthmus.ConditionAnswered, metav1.ConditionFalse, v1alpha1.ReasonNotPeered)
	t.Logf("%s says: %s", a.name, c.Message)
	b.join(a, isthmus.Overrides{})
	waitAgreed(t, a, b)
	if after := a.tunnelEndpoint(b).Spec; after.RemoteNATPodCIDR != before.RemoteNATPodCIDR || after.RemoteNATExternalCIDR != before.RemoteNATExternalCIDR {
		t.Errorf("networks before:\n%+v\nafter:\n%+v", before, after)
	}
}

// testOneLeavesByCommand un-peers b by the command line, which removes a's permissions. Then it
// un-peers a.
func testOneLeavesByCommand(t *testing.T, a, b *site) {
	if out, err := b.isthmus("unpeer", "--kubeconfig", b.kubeconfig, a.name); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	a.waitCondition(b, isthmus.ConditionPeerConfig, metav1.ConditionFalse, isthmus.ReasonPeerWithdrew)
	b.waitClean()
	b.eventually("no tenant namespace", func() (string, bool) {
		err := b.client.Get(t.Context(), types.NamespacedName{Name: b.tenant(a)}, &corev1.Namespace{})
		return fmt.Sprint(err), client.IgnoreNotFound(err) == nil && err != nil
	})
	// a has no permissions at b any more, so it cannot check that none of its objects is left
	// there.
	if out, err := a.isthmus("unpeer", "--kubeconfig", a.kubeconfig, "--timeout", "10s", b.name); err == nil || !strings.Contains(out, "--force does not wait for the other cluster") {
		t.Fatalf("un-peering without rights at the peer: %v\n%s", err, out)
	}
	if out, err := a.isthmus("unpeer", "--kubeconfig", a.kubeconfig, "--force", b.name); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	a.waitClean()
	peer(t, a, b)
	waitAgreed(t, a, b)
}

// testGone stops b's API server for ever.
func testGone(t *testing.T, a, b *site) {
	b.killManager()
	if err := b.server.Stop(); err != nil {
		t.Fatal(err)
	}
	a.waitCondition(b, isthmus.ConditionIdentity, metav1.ConditionFalse, isthmus.ReasonUnreachable)
	if te := a.tunnelEndpoint(b); te == nil {
		t.Error("the TunnelEndpoint is gone, though gateways need no API server")
	}
	out, err := a.isthmus("unpeer", "--kubeconfig", a.kubeconfig, "--timeout", "10s", b.name)
	if err == nil || !strings.Contains(out, "--force does not wait for the other cluster") {
		t.Fatalf("un-peering without the peer: %v\n%s", err, out)
	}
	a.waitCondition(b, isthmus.ConditionReady, metav1.ConditionFalse, isthmus.ReasonUnpeering)
	a.eventually("an end of the TunnelEndpoint", func() (string, bool) { te := a.tunnelEndpoint(b); return fmt.Sprintf("%+v", te), te == nil })
	out, err = a.isthmus("unpeer", "--kubeconfig", a.kubeconfig, "--force", b.name)
	if err != nil || !strings.Contains(out, b.tenant(a)) {
		t.Fatalf("un-peering by force: %v\n%s", err, out)
	}
	a.waitClean()
	a.eventually("an Event about what is left behind", func() (string, bool) {
		var list eventsv1.EventList
		if err := a.client.List(context.Background(), &list); err != nil {
			return err.Error(), false
		}
		return fmt.Sprint(len(list.Items), " Events"), slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Reason == "LeftBehind" && strings.Contains(e.Note, b.tenant(a)+"/"+b.cluster().UniqueName())
		})
	})
}
