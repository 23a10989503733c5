package control

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

var update = flag.Bool("update", false, "write the golden files anew")

const liqoKey = "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA="

// TestIsthmusPeersWithImitatedLiqo peers with a cluster of Liqo v0.9.4. The type liqo simulates
// that cluster on an API server with Liqo's CRDs. Its PodCIDR is one half of ours. First our
// cluster has only Isthmus, with a Peering and an identity in Liqo's form. Then our cluster has
// Liqo's control plane too, in which Isthmus replaces the network-manager: there are
// ForeignClusters, and Liqo's crd-replicator replicates for Isthmus.
func TestIsthmusPeersWithImitatedLiqo(t *testing.T) {
	t.Parallel()
	sites := planSites(t, "10.244.0.0/16")
	a := sites[0]
	a.services = true
	startSites(t, sites)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
	err := a.client.Create(t.Context(), node)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.51.100.10"}}
	if err = errors.Join(err, a.client.Status().Update(t.Context(), node)); err != nil {
		t.Fatal(err)
	}
	b := newLiqoSite(t)
	refusedByCommands(t, a, b)
	introduce(t, a, b)
	introduce(t, b, a)
	manager := &liqoManager{granted: map[string][2]string{}, config: liqoSpec{
		PodCIDR: b.podCIDR, ExternalCIDR: "10.129.0.0/17", EndpointIP: "203.0.113.2", BackendType: "wireguard",
		BackendConfig: map[string]string{"publicKey": liqoKey, "port": "5871"},
	}}
	manager.remap(map[string]string{"10.244.0.0/16": "10.64.0.0/16", "10.245.0.0/16": "10.65.0.0/16"})
	theirs := &liqo{id: b.id, client: b.client, manager: manager}
	play(t, theirs)
	a.startManager("--services", "--external-cidr", "10.245.0.0/16") // Liqo too chooses an ExternalCIDR of the PodCIDR's length

	steps := func(t *testing.T, golden string, join, part func(), under func(t *testing.T)) {
		foreign(t, b, a, "Established")
		join()
		waitAgreedWithLiqo(a, b, manager)
		sameObjects(t, a, b, golden)
		if under != nil {
			under(t)
		}
		testLiqoChanges(a, b, manager)
		testLiqoLeaves(a, b)
		waitAgreedWithLiqo(a, b, manager)

		part()
		a.eventually("nothing of ours, and Liqo's copy let go", func() (string, bool) {
			all := a.leftovers()
			copied := a.networkConfig(a.tenant(b), a)
			return strings.Join(all, "\n"), len(all) == 1 && copied != nil && len(copied.Finalizers) == 0
		})
		if te := b.tunnelEndpoint(a); te == nil {
			t.Error("Liqo has forgotten its TunnelEndpoint although only we have left")
		}
		foreign(t, b, a, "None")
		b.eventually("no NetworkConfig at Liqo", func() (string, bool) {
			all, err := listOf(t.Context(), b.client, configKind)
			return fmt.Sprint(len(all), err), err == nil && len(all) == 0
		})
		a.waitClean()
		if all := theirs.complaints(); len(all) > 0 {
			t.Errorf("Liqo complains:\n%s", strings.Join(all, "\n"))
		}
	}
	t.Run("Isthmus alone", func(t *testing.T) {
		reportTo(t, a, b)
		steps(t, "liqo-peering.yaml", func() {
			a.join(b, isthmus.Overrides{})
			a.waitReady(b)
		}, func() { a.part(b) }, func(t *testing.T) {
			testLiqoTakesNoServices(a, b)
			testIPAM(t, a, b)
			testLiqoRemembers(a, b, manager)
		})
	})
	t.Run("Isthmus under Liqo", func(t *testing.T) {
		reportTo(t, a, b)
		a.stopManager()
		if err := applyFile(t.Context(), a.client, "../../manager/testdata/liqo/foreignclusters.yaml"); err != nil {
			t.Fatal(err)
		}
		manager.remap(nil)
		ours := &liqo{id: a.id, client: a.client}
		play(t, ours)
		a.restartManager()
		steps(t, "liqo-foreigncluster.yaml", func() { foreign(t, a, b, "Established") }, func() { foreign(t, a, b, "None") }, nil)
		if all := ours.complaints(); len(all) > 0 {
			t.Errorf("our Liqo complains:\n%s", strings.Join(all, "\n"))
		}
	})
}

// testLiqoTakesNoServices shares services with a Liqo cluster, which has neither the kind
// PeerServices nor permission to use it. The Peering reports this, and everything else keeps
// working.
func testLiqoTakesNoServices(a, b *site) {
	a.t.Helper()
	if err := a.client.Create(a.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}); err != nil {
		a.t.Fatal(err)
	}
	serve(a, "shop", "10.244.1.5")
	share := func(namespaces string) {
		patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"services":{"export":%[1]s,"import":%[1]s}}}`, namespaces))
		if err := a.client.Patch(a.t.Context(), a.peering(b), patch); err != nil {
			a.t.Fatal(err)
		}
	}
	share(`["prod"]`)
	c := a.waitCondition(b, isthmus.ConditionServicesShared, metav1.ConditionFalse, isthmus.ReasonNotSupported)
	if !strings.Contains(c.Message, "does not share services") {
		a.t.Errorf("the reason is not told: %s", c.Message)
	}
	a.waitReady(b)
	share("[]")
}

// newLiqoSite starts a cluster without Isthmus, with Liqo's CRDs.
func newLiqoSite(t *testing.T) *site {
	t.Helper()
	s := &site{t: t, name: "liqo", id: "11110000-1111-4222-8333-000000000000", podCIDR: "10.244.0.0/17", dir: t.TempDir()}
	t.Cleanup(s.end)
	var err error
	if s.server, err = kubetest.Start(t.Context(), kubetest.Options{Name: s.name, Dir: kube, Controllers: true}); err != nil {
		t.Fatal(err)
	}
	if s.config, err = s.server.Config(); err != nil {
		t.Fatal(err)
	}
	if s.client, err = s.server.Client(); err != nil {
		t.Fatal(err)
	}
	crds, err := filepath.Glob("../../internal/kubetest/liqo/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(crds, "../../manager/testdata/liqo/foreignclusters.yaml") {
		if err := applyFile(t.Context(), s.client, file); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// refusedByCommands runs commands of Isthmus with a Liqo cluster as the peer. No command may
// install anything there, or advise to install Isthmus.
func refusedByCommands(t *testing.T, a, liqo *site) {
	t.Helper()
	kubeconfig := filepath.Join(liqo.dir, "admin.kubeconfig")
	if err := os.WriteFile(kubeconfig, liqo.server.Kubeconfig(), 0o600); err != nil {
		t.Fatal(err)
	}
	everything := func() string {
		var all []string
		for _, kind := range []schema.GroupVersionKind{
			{Version: "v1", Kind: "Namespace"}, {Version: "v1", Kind: "Secret"}, {Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRole"},
			{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "RoleBinding"}, {Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"},
		} {
			list, err := listOf(t.Context(), liqo.client, kind)
			if err != nil {
				t.Fatal(err)
			}
			for i := range list {
				all = append(all, kind.Kind+" "+list[i].GetNamespace()+"/"+list[i].GetName())
			}
		}
		return strings.Join(all, "\n")
	}
	liqo.eventually("the namespaces of every cluster", func() (string, bool) { // Liqo's controllers, which make these namespaces, have just started
		was := everything()
		time.Sleep(2 * time.Second)
		return was, was == everything()
	})
	before := everything()
	for _, args := range [][]string{
		{"peer", "--kubeconfig", a.kubeconfig, "--remote-kubeconfig", kubeconfig},
		{"peer", "--kubeconfig", kubeconfig, "--remote-kubeconfig", a.kubeconfig},
		{"unpeer", "--kubeconfig", a.kubeconfig, "--remote-kubeconfig", kubeconfig},
		{"peer", "alpha", "--kubeconfig", kubeconfig, "--consent", "10.244.0.0/16,10.245.0.0/16"},
		{"status", "--kubeconfig", kubeconfig},
		{"diagnose", "--kubeconfig", kubeconfig},
		{"diagnose", "--kubeconfig", a.kubeconfig, "--remote-kubeconfig", kubeconfig},
		{"verify", "--kubeconfig", a.kubeconfig, "--remote-kubeconfig", kubeconfig},
	} {
		out, err := a.isthmus(args...)
		if err == nil || !strings.Contains(out, "cluster has Liqo but not Isthmus") || !strings.Contains(out, "docs/liqo.md") || strings.Contains(out, "isthmus install") {
			t.Errorf("isthmus %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	if after := everything(); after != before {
		t.Errorf("the Liqo has\n%s\nand had\n%s", after, before)
	}
	a.waitClean()
}

// applyFile creates CRDs and waits until they are served.
func applyFile(ctx context.Context, c client.Client, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for _, one := range bytes.Split(text, []byte("\n---\n")) {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(one, &u.Object); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if err := c.Create(ctx, u); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		kind, _, _ := unstructured.NestedString(u.Object, "spec", "names", "kind")
		group, _, _ := unstructured.NestedString(u.Object, "spec", "group")
		served := configKind.GroupVersion().WithKind(kind)
		served.Group = group
		for {
			if _, err = listOf(ctx, c, served); err == nil {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s is not served: %w", kind, err)
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}

// introduce acts as Liqo's control plane before two clusters are joined: it creates a
// tenant namespace at s for the peer, the peer's permissions in it, and the identity of s at the
// peer.
func introduce(t *testing.T, s, peer *site) {
	t.Helper()
	const role = "liqo-remote-peering-outgoing"
	tenant := s.tenant(peer)
	cert, key, err := peer.server.ClientCert(s.id, "liqo.io")
	if err != nil {
		t.Fatal(err)
	}
	everything := []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant, Labels: map[string]string{
			"discovery.liqo.io/cluster-id": peer.id, "discovery.liqo.io/tenant-namespace": "true"}}},
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: role, Labels: map[string]string{"auth.liqo.io/remote-peering-permissions": "outgoing"}},
			Rules: []rbacv1.PolicyRule{{APIGroups: []string{"net.liqo.io"}, Resources: []string{"networkconfigs", "networkconfigs/status"}, Verbs: everything}}},
		&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "liqo-binding-" + role},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: peer.id}}},
		&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: isthmus.DefaultIdentitySecret,
				Labels: map[string]string{"discovery.liqo.io/local-identity": "true", "discovery.liqo.io/cluster-id": peer.id,
					"discovery.liqo.io/certificate-available": "true"},
				Annotations: map[string]string{"discovery.liqo.io/certificate-expire-time": fmt.Sprint(time.Now().Add(time.Hour).Unix())}},
			Data: map[string][]byte{"private-key": key, "certificate": cert, "apiServerUrl": []byte(peer.server.URL()),
				"apiServerCa": peer.server.CA(), "namespace": []byte(peer.tenant(s))}},
		// For a Peering with Liqo, the administrator must permit the manager to read the identity.
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "identity"}, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{isthmus.DefaultIdentitySecret}, Verbs: []string{"get", "list", "watch"}}}},
		&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "identity"},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "identity"},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: installed, Name: "isthmus-manager"}}},
	} {
		if err := s.client.Create(t.Context(), o); err != nil {
			t.Fatalf("%s: %T %s: %v", s.name, o, o.GetName(), err)
		}
	}
}

// play runs a liqo until the test ends.
func play(t *testing.T, l *liqo) {
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { l.run(ctx) })
	t.Cleanup(func() { cancel(); group.Wait() })
}

// foreign creates or updates the ForeignCluster of s for the peer, with the given phase.
func foreign(t *testing.T, s, peer *site, phase string) {
	t.Helper()
	s.eventually("ForeignCluster of "+peer.name, func() (string, bool) {
		fc := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
			"clusterIdentity": map[string]any{"clusterID": peer.id, "clusterName": peer.name},
			"foreignAuthUrl":  "https://192.0.2.9", "peeringType": "OutOfBand",
		}}}
		fc.SetGroupVersionKind(foreignKind)
		fc.SetName(peer.name)
		fc.SetLabels(map[string]string{"discovery.liqo.io/cluster-id": peer.id})
		err := s.client.Get(t.Context(), client.ObjectKeyFromObject(fc), fc)
		if client.IgnoreNotFound(err) == nil && err != nil {
			err = s.client.Create(t.Context(), fc)
		}
		if err != nil {
			return err.Error(), false
		}
		fc.Object["status"] = map[string]any{
			"tenantNamespace": map[string]any{"local": s.tenant(peer), "remote": peer.tenant(s)},
			"peeringConditions": []any{
				map[string]any{"type": "OutgoingPeering", "status": phase},
				map[string]any{"type": "IncomingPeering", "status": "None"},
			},
		}
		err = s.client.Status().Update(t.Context(), fc) // may conflict with a write of the replicator's finalizer
		return fmt.Sprint(err), err == nil
	})
}

// waitAgreedWithLiqo waits until the TunnelEndpoints of both sides are mirror images and match the
// published values.
func waitAgreedWithLiqo(a, b *site, m *liqoManager) {
	a.t.Helper()
	m.mu.Lock()
	published := m.config
	m.mu.Unlock()
	a.eventually("TunnelEndpoints that mirror each other", func() (string, bool) {
		x, y := a.tunnelEndpoint(b), b.tunnelEndpoint(a)
		if x == nil || y == nil {
			return fmt.Sprintf("TunnelEndpoints: %t here, %t at Liqo", x != nil, y != nil), false
		}
		s, m := x.Spec, y.Spec
		mirrored := s
		mirrored.LocalPodCIDR, mirrored.LocalNATPodCIDR = m.RemotePodCIDR, m.RemoteNATPodCIDR
		mirrored.LocalExternalCIDR, mirrored.LocalNATExternalCIDR = m.RemoteExternalCIDR, m.RemoteNATExternalCIDR
		mirrored.RemotePodCIDR, mirrored.RemoteNATPodCIDR = m.LocalPodCIDR, m.LocalNATPodCIDR
		mirrored.RemoteExternalCIDR, mirrored.RemoteNATExternalCIDR = m.LocalExternalCIDR, m.LocalNATExternalCIDR
		mirrored.EndpointIP, mirrored.BackendConfig = published.EndpointIP, published.BackendConfig
		return fmt.Sprintf("here\n\t%+v\nat Liqo\n\t%+v", s, m), equality.Semantic.DeepEqual(s, mirrored) && s.RemotePodCIDR == published.PodCIDR &&
			x.Status.Connection.Status == v1alpha1.Connected
	})
}

// testLiqoChanges changes the published values of each side.
func testLiqoChanges(a, b *site, m *liqoManager) {
	a.t.Helper()
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: installed, Name: "isthmus-gateway"}}
	override := func(address string) {
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"liqo.io/override-address":%s}}}`, address)
		if err := a.client.Patch(a.t.Context(), service, client.RawPatch(types.MergePatchType, patch)); err != nil {
			a.t.Fatal(err)
		}
	}
	for _, change := range []struct{ patch, want string }{{`"gateway.a.example"`, "gateway.a.example"}, {"null", "203.0.113.1"}} {
		override(change.patch)
		b.eventually("our gateway at Liqo", func() (string, bool) {
			te := b.tunnelEndpoint(a)
			return fmt.Sprintf("%+v", te), te != nil && te.Spec.EndpointIP == change.want
		})
	}
	for _, change := range []struct{ address, port string }{{"gateway.liqo.example", "30871"}, {"203.0.113.2", "5871"}} {
		m.publish(func(s *liqoSpec) {
			s.EndpointIP, s.BackendConfig = change.address, map[string]string{"publicKey": liqoKey, "port": change.port}
		})
		waitAgreedWithLiqo(a, b, m)
	}
	// The sender overwrites an edit of its copy at a.
	copied := types.NamespacedName{Namespace: a.tenant(b), Name: a.cluster().UniqueName()}
	if err := a.edit(&v1alpha1.NetworkConfig{}, copied, false, func(o client.Object) {
		o.(*v1alpha1.NetworkConfig).Spec.EndpointIP = "198.51.100.66"
	}); err != nil {
		a.t.Fatal(err)
	}
	a.eventually("what Liqo says", func() (string, bool) {
		nc := a.networkConfig(a.tenant(b), a)
		return fmt.Sprintf("%+v", nc), nc != nil && nc.Spec.EndpointIP == "203.0.113.2"
	})
	waitAgreedWithLiqo(a, b, m)
}

// testLiqoRemembers changes our PodCIDR. Liqo then repeats its answer to the previous PodCIDR. If
// the new PodCIDR has the same length, that answer fits. If it has another length, our cluster does
// not apply the answer, and the Peering reports the reason.
func testLiqoRemembers(a, b *site, m *liqoManager) {
	a.t.Helper()
	a.reconfigure("10.222.0.0/16")
	a.eventually("a TunnelEndpoint with the other network", func() (string, bool) {
		te := a.tunnelEndpoint(b)
		return fmt.Sprintf("%+v", te), te != nil && te.Spec.LocalPodCIDR == "10.222.0.0/16" && te.Spec.LocalNATPodCIDR == "10.64.0.0/16"
	})
	waitAgreedWithLiqo(a, b, m)
	a.waitReady(b)
	before := a.tunnelEndpoint(b)
	a.reconfigure("10.220.0.0/15")
	a.eventually("a Peering that complains", func() (string, bool) {
		c := a.conditionOf(b, isthmus.ConditionAnswered)
		return fmt.Sprintf("%+v", c), c.Reason == isthmus.ReasonInvalid && strings.Contains(c.Message, "podCIDRNAT must have the address family and prefix length")
	})
	if te := a.tunnelEndpoint(b); te == nil || te.UID != before.UID || te.Generation != before.Generation {
		a.t.Errorf("the TunnelEndpoint was %+v, is %+v", before, te)
	}
	a.reconfigure("10.244.0.0/16")
	waitAgreedWithLiqo(a, b, m)
	a.waitReady(b)
}

// testLiqoLeaves makes Liqo withdraw and return, while our Peering stays.
func testLiqoLeaves(a, b *site) {
	a.t.Helper()
	before := a.tunnelEndpoint(b).Spec
	foreign(a.t, b, a, "None")
	a.eventually("an end of the TunnelEndpoints", func() (string, bool) {
		x, y, copied := a.tunnelEndpoint(b), b.tunnelEndpoint(a), a.networkConfig(a.tenant(b), a)
		return fmt.Sprintf("here %t, at Liqo %t, copy here %t", x != nil, y != nil, copied != nil), x == nil && y == nil && copied == nil
	})
	if a.peering(b) != nil {
		a.waitCondition(b, isthmus.ConditionPeerConfig, metav1.ConditionFalse, isthmus.ReasonPeerWithdrew)
	}
	foreign(a.t, b, a, "Established")
	a.eventually("the TunnelEndpoint as before", func() (string, bool) {
		te := a.tunnelEndpoint(b)
		return fmt.Sprintf("%+v", te), te != nil && equality.Semantic.DeepEqual(te.Spec, before)
	})
}

// sameObjects compares all objects of the fabric on both API servers with a golden file.
func sameObjects(t *testing.T, a, b *site, golden string) {
	t.Helper()
	path := filepath.Join("testdata", golden)
	want, err := os.ReadFile(path)
	if err != nil && !*update {
		t.Fatal(err)
	}
	if *update {
		time.Sleep(2 * time.Second) // pending changes may still arrive
		if err := os.WriteFile(path, []byte(objects(t, a, b)), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	a.eventually("the objects of "+path, func() (string, bool) {
		have := objects(t, a, b)
		return have, have == string(want)
	})
}

// objects returns the objects of the fabric in both clusters as text, without values that differ
// between runs.
func objects(t *testing.T, a, b *site) string {
	t.Helper()
	secret := &corev1.Secret{}
	if err := a.client.Get(t.Context(), types.NamespacedName{Namespace: installed, Name: "wireguard-pubkey"}, secret); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, s := range []*site{a, b} {
		kinds := []string{"NetworkConfig", "TunnelEndpoint"}
		if s == a {
			kinds = append(kinds, "NatMapping", "IpamStorage")
		}
		for _, kind := range kinds {
			all, err := listOf(t.Context(), s.client, configKind.GroupVersion().WithKind(kind))
			if err != nil {
				t.Fatal(err)
			}
			slices.SortFunc(all, func(x, y unstructured.Unstructured) int { return strings.Compare(x.GetName(), y.GetName()) })
			for i := range all {
				text, err := yaml.Marshal(masked(all[i].Object))
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&out, "--- # in cluster %s\n%s", s.name, text)
			}
		}
	}
	proofs := regexp.MustCompile(`(keyProof): \S+`).ReplaceAllString(out.String(), "$1: KEY-PROOF")
	return strings.ReplaceAll(proofs, string(secret.Data["publicKey"]), "PUBLIC-KEY-OF-A")
}

// masked removes or replaces values that differ between runs.
func masked(o map[string]any) map[string]any {
	m := o["metadata"].(map[string]any)
	for _, field := range []string{"uid", "resourceVersion", "creationTimestamp", "managedFields", "generation"} {
		delete(m, field)
	}
	if prefix, ok := m["generateName"].(string); ok {
		m["name"] = prefix + "XXXXX"
	}
	if owners, ok := m["ownerReferences"].([]any); ok {
		for _, owner := range owners {
			owner.(map[string]any)["uid"] = "UID"
		}
	}
	if finalizers, ok := m["finalizers"].([]any); ok {
		slices.SortFunc(finalizers, func(x, y any) int { return strings.Compare(x.(string), y.(string)) })
	}
	conditions, _, _ := unstructured.NestedSlice(o, "status", "conditions")
	for _, c := range conditions {
		c := c.(map[string]any)
		c["lastTransitionTime"], c["observedGeneration"] = "TIME", "N"
	}
	if len(conditions) > 0 {
		o["status"].(map[string]any)["conditions"] = conditions
	}
	return o
}

// A kubelet is a client of the gRPC service ipam, like the one in Liqo's virtual kubelet. It
// encodes messages by hand.
type kubelet struct {
	t    *testing.T
	conn *grpc.ClientConn
}

func newKubelet(t *testing.T, address string) *kubelet { return newKubeletAt(t, address, "127.0.0.1") }

// newKubeletAt returns a kubelet that connects from the given address of this machine. The plain
// IPAM identifies it by that address.
func newKubeletAt(t *testing.T, address, from string) *kubelet {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &kubelet{t, conn}
}

// call sends strings as the fields 1, 2, ... and returns field 1 of the answer: the bytes of a
// string or a number.
func (k *kubelet) call(method string, fields ...string) (string, error) {
	var request, response []byte
	for i, f := range fields {
		request = append(append(request, byte(i+1)<<3|2, byte(len(f))), f...) // all fields are shorter than 128 bytes
	}
	ctx, cancel := context.WithTimeout(k.t.Context(), patience)
	defer cancel()
	err := k.conn.Invoke(ctx, "/ipam/"+method, &request, &response, grpc.ForceCodec(raw{}), grpc.WaitForReady(true))
	switch {
	case err != nil || len(response) == 0:
		return "", err
	case response[0] == 1<<3: // a varint
		return fmt.Sprint(response[1]), nil
	case response[0] == 1<<3|2 && len(response) == int(response[1])+2:
		return string(response[2:]), nil
	}
	return "", fmt.Errorf("%s answers % x", method, response)
}

// check calls a method and compares the answer. It repeats the call after errors that end with "try
// again".
func (k *kubelet) check(want, method string, fields ...string) {
	k.t.Helper()
	got, err := k.call(method, fields...)
	for end := time.Now().Add(patience); err != nil && strings.HasSuffix(err.Error(), "try again") && time.Now().Before(end); got, err = k.call(method, fields...) {
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil || got != want {
		k.t.Errorf("%s%q is %q, error %v; want %q", method, fields, got, err, want)
	}
}

// raw is a codec for messages that are already encoded.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v any) error { *v.(*[]byte) = bytes.Clone(data); return nil }
func (raw) Name() string                       { return "proto" }

// testIPAM plays the virtual kubelet. At Liqo, our pods are in 10.64.0.0/16 and our ExternalCIDR is
// 10.65.0.0/16.
func testIPAM(t *testing.T, a, b *site) {
	k := newKubelet(t, a.ipam)
	home := a.tunnelEndpoint(b).Spec.RemoteNATPodCIDR
	answers := func(k *kubelet) {
		t.Helper()
		k.check("10.64.3.4", "MapEndpointIP", b.id, "10.244.3.4") // a pod
		k.check("10.65.0.2", "MapEndpointIP", b.id, "192.0.2.10") // an endpoint outside of the cluster
		k.check("10.65.0.3", "MapEndpointIP", b.id, "10.130.5.6") // a pod of a third cluster
		k.check("10.65.0.4", "MapEndpointIP", b.id, "10.96.0.1")  // the API server's ClusterIP
		k.check("10.65.0.2", "MapEndpointIP", b.id, "192.0.2.10") // the same endpoint again
		k.check(strings.TrimSuffix(home, "0.0/17")+"7.8", "GetHomePodIP", b.id, "10.244.7.8")
		k.check("1", "BelongsToPodCIDR", "10.244.200.1")
		k.check("", "BelongsToPodCIDR", "10.64.3.4")
	}
	mapped := func(want v1alpha1.EndpointMap) {
		t.Helper()
		a.eventually("endpoints in the NatMapping", func() (string, bool) {
			nm := a.natMapping(b)
			return fmt.Sprintf("%+v", nm), nm != nil && equality.Semantic.DeepEqual(nm.Spec.ClusterMappings, want)
		})
	}
	all := v1alpha1.EndpointMap{"169.254.0.1": "10.65.0.1", "192.0.2.10": "10.65.0.2", "10.130.5.6": "10.65.0.3", "10.96.0.1": "10.65.0.4"}
	answers(k)
	mapped(all)
	a.killManager()
	a.restartManager()
	// After a kill, the manager must still know which client requested which address.
	if _, err := newKubeletAt(t, a.ipam, "127.0.0.77").call("UnmapEndpointIP", b.id, "192.0.2.10"); err == nil || !strings.Contains(err.Error(), "another caller") {
		t.Errorf("another caller unmaps: %v", err)
	}
	k = newKubelet(t, a.ipam)
	answers(k)
	mapped(all)
	for _, wrong := range [][]string{
		{"MapEndpointIP", b.id, "10.244.3"}, {"MapEndpointIP", "", "192.0.2.10"}, {"MapEndpointIP", "nobody", "192.0.2.10"}, {"GetHomePodIP", "nobody", "10.244.7.8"},
	} {
		if got, err := k.call(wrong[0], wrong[1:]...); err == nil {
			t.Errorf("%q is answered with %q", wrong, got)
		}
	}
	for _, ip := range []string{"192.0.2.10", "192.0.2.10", "198.51.100.1", "10.96.0.1"} {
		k.check("", "UnmapEndpointIP", b.id, ip)
	}
	k.check("10.65.0.2", "MapEndpointIP", b.id, "192.0.2.77") // the address is free, and is allocated again
	mapped(v1alpha1.EndpointMap{"169.254.0.1": "10.65.0.1", "192.0.2.77": "10.65.0.2", "10.130.5.6": "10.65.0.3"})
	for _, ip := range []string{"192.0.2.77", "10.130.5.6"} {
		k.check("", "UnmapEndpointIP", b.id, ip)
	}
	mapped(v1alpha1.EndpointMap{"169.254.0.1": "10.65.0.1"})
}
