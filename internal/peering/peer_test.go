package peering

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

func TestPeerReportsEachStepAndIsIdempotent(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "story")
	must(t, peerUp(t, p))
	reported := p.Reported()
	t.Log("\n" + reported)
	clustertest.Contains(t, reported,
		"story-a: namespace liqo-tenant-story-b-", " created, with the rights of story-b in it",
		"story-a: got a new identity at story-b, valid until ", " days), because it had none",
		"story-b: Peering story-a-", " created",
		"story-a: identity accepted by story-b", "story-b sees story-a's pods 10.244.0.0/16 as 10.246.0.0/16",
		"story-b: connected to story-a, 700µs", "story-a and story-b are peered, after ")

	before := objectVersions(t, p)
	if len(before) != 18 {
		t.Errorf("want 9 objects on each side: %v", before)
	}
	must(t, peerUp(t, p))
	const again = `story-a: uses the podCIDR of story-b, 10.60.0.0/20, unchanged: it is in private space
story-b: uses the podCIDR of story-a, 10.60.0.0/20, unchanged: it is in private space
story-a and story-b are peered already, nothing changed`
	if reported := p.Reported(); reported != again {
		t.Errorf("the second time it says\n%s", reported)
	}
	if changed := diff(before, objectVersions(t, p)); changed != nil {
		t.Errorf("the second time it changed %v", changed)
	}
}

func TestPeerCommandRepairsABrokenPeering(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "repair")
	must(t, peerUp(t, p))
	p.Reported()
	inA, inB := p.B.Identity.TenantNamespace(), p.A.Identity.TenantNamespace()
	object := func(o client.Object, namespace, name string) client.Object {
		o.SetNamespace(namespace)
		o.SetName(name)
		return o
	}
	for _, tc := range []struct {
		name    string
		breakIt func() error
		problem string
		changes []string
	}{
		{"a binding is gone", func() error { return p.A.Client.Delete(t.Context(), object(&rbacv1.RoleBinding{}, inA, peerAccount)) },
			"RoleBinding isthmus-peer", []string{"repair-a: *v1.RoleBinding isthmus-peer"}},
		{"the peer was given more than it should have", func() error {
			var role rbacv1.Role
			if err := p.B.Client.Get(t.Context(), client.ObjectKey{Namespace: inB, Name: peerAccount}, &role); err != nil {
				return err
			}
			role.Rules = append(role.Rules, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}})
			return p.B.Client.Update(t.Context(), &role)
		}, "repair-b: in namespace " + inB + " repaired for repair-a: Role isthmus-peer", []string{"repair-b: *v1.Role isthmus-peer"}},
		{"the identity is revoked", func() error {
			return p.B.Client.Delete(t.Context(), object(&corev1.ServiceAccount{}, inB, peerAccount))
		},
			"repair-a: got a new identity at repair-b, valid until ", []string{"repair-a: *v1.Secret isthmus-identity", "repair-b: *v1.ServiceAccount isthmus-peer"}},
		{"the Secret is broken", func() error {
			return p.B.Client.Patch(t.Context(), object(&corev1.Secret{}, inB, isthmus.DefaultIdentitySecret),
				client.RawPatch("application/merge-patch+json", []byte(`{"data":{"kubeconfig":"e30="}}`)))
		}, "the old one could not be read", []string{"repair-b: *v1.Secret isthmus-identity"}},
		{"the Secret is for elsewhere", func() error {
			there := *p.A
			there.Server = "https://192.0.2.1:6443"
			text, err := kubeconfigFor(&there, "token", inA)
			if err != nil {
				return err
			}
			s := &corev1.Secret{Data: map[string][]byte{"kubeconfig": text}}
			return p.B.Client.Update(t.Context(), object(s, inB, isthmus.DefaultIdentitySecret))
		}, "the old one was for another server", []string{"repair-b: *v1.Secret isthmus-identity"}},
		{"the peer's requests have no bound", func() error { return p.A.Client.Delete(t.Context(), object(&flowcontrolv1.FlowSchema{}, "", inA)) },
			"repair-a: in namespace " + inA + " repaired for repair-b: FlowSchema " + inA, []string{"repair-a: *v1.FlowSchema " + inA}},
		{"the peer may not renew its token", func() error {
			return p.A.Client.Patch(t.Context(), object(&corev1.Namespace{}, "", inA),
				client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"isthmus.net/token-audiences":null}}}`)))
		}, "repair-a: repair-b may renew its token for https://", []string{"repair-a: *v1.Namespace " + inA}},
	} {
		before := objectVersions(t, p)
		must(t, tc.breakIt())
		if err := peerUp(t, p); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		reported := p.Reported()
		if !strings.Contains(reported, tc.problem) {
			t.Errorf("%s: no %q in\n%s", tc.name, tc.problem, reported)
		}
		after := objectVersions(t, p)
		var changed []string
		for _, k := range diff(before, after) {
			if !strings.Contains(k, "Peering") { // the status of a Peering may have changed and changed back
				changed = append(changed, k)
			}
		}
		if strings.Join(changed, ";") != strings.Join(tc.changes, ";") {
			t.Errorf("%s: changed %q, want %q", tc.name, changed, tc.changes)
		}
	}
}

func TestPeerNamesTheMissingConditionAndSide(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "late")
	p.Managers[1].Set(isthmus.ConditionPeerConfig, "spec.podCIDR: \x1b[31mevil\u202e and\nlong "+strings.Repeat("x", 1000))
	p.Managers[1].Set(isthmus.ConditionConnected, "cannot be")
	missing := []string{"late-a: identity accepted", "late-a: connected to late-b", "late-b: identity accepted", "late-b: agreed, "}
	ctx := clustertest.NewDeadline(t)
	_, err := Peer(ctx, p.A, p.B, PeerOptions{Timeout: clustertest.Patient, Report: func(line string) {
		p.Report(line)
		before := len(missing)
		missing = slices.DeleteFunc(missing, func(m string) bool { return strings.HasPrefix(line, m) })
		if before > 0 && len(missing) == 0 {
			close(ctx.Up)
		}
	}})
	if !errors.Is(err, cluster.ErrNotReady) || len(missing) > 0 {
		t.Fatal(err, missing)
	}
	clustertest.Contains(t, err.Error(), "not peered within 2m0s", `late-b: PeerConfigAccepted is False (Broken): spec.podCIDR: \u001b[31mevil\u202e and\u000along xxx`)
	if strings.Contains(err.Error(), "late-a") || len(err.Error()) > 1300 {
		t.Errorf("%v", err)
	}
	clustertest.Contains(t, p.Reported(), "late-a: connected to late-b")

	p.Managers[1].Set(isthmus.ConditionPeerConfig, "")
	p.Managers[1].Set(isthmus.ConditionConnected, "")
	must(t, peerUp(t, p))
}

func TestInterruptedPeerCommandCanBeRepeated(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "stop")
	p.Managers[0].Set(isthmus.ConditionAnswered, "later")
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Peer(ctx, p.A, p.B, PeerOptions{Timeout: clustertest.Patient, Report: func(line string) {
		if strings.Contains(line, "identity accepted") {
			cancel()
		}
	}})
	if err == nil || !strings.Contains(err.Error(), "interrupted; run the same command again") {
		t.Fatal(err)
	}
	p.Managers[0].Set(isthmus.ConditionAnswered, "")
	must(t, peerUp(t, p))
}

func TestPeerChecksEverythingBeforeItWrites(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "no")
	again := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A, Namespace: p.A.Namespace})
	twin := func() *cluster.Cluster { // cluster a's ID on the API server of b
		const namespace = "install-no-twin"
		must(t, p.B.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}))
		must(t, p.B.Client.Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "who", Labels: map[string]string{cluster.LabelName: cluster.IdentityLabelValue}},
			Data:       map[string]string{cluster.KeyClusterID: p.A.Identity.ClusterID, cluster.KeyClusterName: "other"},
		}))
		return clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: namespace})
	}()
	dead, err := cluster.Connect(cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: p.B.Namespace})
	must(t, err)
	dead.Config.Host = "https://127.0.0.1:1"
	dead.Client, err = client.New(dead.Config, client.Options{Scheme: p.B.Client.Scheme(), Mapper: p.B.Client.RESTMapper()})
	must(t, err)
	mine, theirs := p.B.Identity.TenantNamespace(), p.A.Identity.TenantNamespace()

	refused := func(name string, a, b *cluster.Cluster, o PeerOptions, wants ...string) error {
		t.Helper()
		o.Report = func(line string) {
			if !strings.Contains(line, "waiting for a manager") {
				t.Errorf("%s: does something: %s", name, line)
			}
		}
		if o.Timeout == 0 {
			o.Timeout = time.Second
		}
		_, err := Peer(t.Context(), a, b, o)
		if err == nil {
			t.Errorf("%s: accepted", name)
			return nil
		}
		t.Logf("%s: %v", name, err)
		clustertest.Contains(t, err.Error(), wants...)
		if !clustertest.Deleted(t, p.A, &corev1.Namespace{}, mine) {
			t.Errorf("%s: namespace %s was made", name, mine)
		}
		return err
	}
	refused("same cluster", p.A, again, PeerOptions{}, "are the same cluster")
	refused("same ID", p.A, twin, PeerOptions{}, "have the same cluster ID no-A-0000", "--cluster-id")
	refused("not installed", p.A, clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: "nowhere"}), PeerOptions{}, "run `isthmus install --context b")
	if err := refused("unreachable", p.A, dead, PeerOptions{}, "unreachable: API server https://127.0.0.1:1 does not answer: connection refused"); !errors.Is(err, cluster.ErrUnreachable) {
		t.Error(err)
	}
	here := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: p.B.Namespace})
	here.ServerChosen = false
	refused("at a loopback address", p.A, here, PeerOptions{}, "no-b: the kubeconfig has the API server at 127.0.0.1:", "want --remote-server, a URL")
	refused("at a loopback address", here, p.A, PeerOptions{}, "want --server, a URL")
	must(t, p.A.Client.Create(t.Context(), New("taken", v1alpha1.ClusterIdentity{ClusterID: "other", ClusterName: "other"}, "x", "y")))
	refused("a name that is taken", p.A, p.B, PeerOptions{Name: "taken"}, "Peering taken is for the cluster")
	p.Managers[1].Release(t)
	refused("manager away", p.A, p.B, PeerOptions{}, "no-b: no manager is active: Lease install-no/isthmus-manager has no holder")
	p.Managers[1].Renew(t)
	must(t, p.B.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: theirs, Labels: map[string]string{v1alpha1.LabelTenantClusterID: "x"}}}))
	refused("foreign namespace", p.A, p.B, PeerOptions{}, "Namespace "+theirs+" belongs to the cluster x")
	must(t, p.B.Client.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: theirs}}))

	// A person who has all read permissions and no others.
	must(t, p.B.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "no-viewer"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "viewer"}}}))
	must(t, p.B.Client.Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "no-viewer"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"isthmus.net"}, Resources: []string{"peerings"}, Verbs: []string{"get", "list"}},
		{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get"}}}}))
	must(t, p.B.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "no-viewer-2"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "no-viewer"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "viewer"}}}))
	viewer := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: p.B.Namespace})
	viewer.Config.Impersonate.UserName = "viewer"
	viewer.Client, err = client.New(viewer.Config, client.Options{Scheme: p.B.Client.Scheme(), Mapper: p.B.Client.RESTMapper()})
	must(t, err)
	// The new bindings take a moment to become effective, and the namespace a moment to be
	// deleted.
	for begin := time.Now(); !clustertest.Deleted(t, p.B, &corev1.Namespace{}, theirs) || viewer.Client.List(t.Context(), &isthmus.PeeringList{}) != nil; {
		if time.Since(begin) > clustertest.Patient {
			t.Fatal("the namespace is still there, or the viewer may not look")
		}
		time.Sleep(50 * time.Millisecond)
	}
	refused("missing rights", p.A, viewer, PeerOptions{}, "no-b: you are not allowed to create namespaces, patch namespaces", "create peerings", "create secrets", "create serviceaccounts/token")
}

func TestLoopbackAPIServerAddressIsRefusedForPeers(t *testing.T) {
	for server, right := range map[string]bool{
		"https://127.0.0.1:6443": false, "https://127.8.9.1": false, "https://localhost:6443": false, "https://[::1]:6443": false, "https://[::ffff:127.0.0.1]:6443": false,
		"https://0.0.0.0:41234": false, "https://[::]:6443": false, "https://[::ffff:0.0.0.0]:6443": false,
		"https://192.0.2.1:6443": true, "https://[2001:db8::1]:6443": true, "https://api.example.org": true,
	} {
		c := &cluster.Cluster{Context: "c", Server: server, Config: &rest.Config{}}
		if err := reachable(c, "--server"); (err == nil) != right {
			t.Errorf("%s: %v", server, err)
		}
		if c.ServerChosen = true; reachable(c, "--server") != nil {
			t.Errorf("%s: refused though a person has chosen it", server)
		}
	}
}

// The peer's manager uses the proxy of the person's kubeconfig, unless only this machine or
// only this person can use the proxy.
func TestThePeerUsesTheProxyOfTheKubeconfig(t *testing.T) {
	const server = "https://192.0.2.1:6443"
	file := filepath.Join(t.TempDir(), "kubeconfig")
	for proxy, want := range map[string]struct{ given, refused string }{
		"http://192.0.2.9:3128":          {given: "http://192.0.2.9:3128"},
		"socks5://proxy.example.org":     {given: "socks5://proxy.example.org"},
		"socks5://localhost:1080":        {refused: "a proxy at localhost:1080 (proxy-url), an address that only this machine reaches; want --server"},
		"http://[::1]:3128":              {refused: "only this machine"},
		"http://anna:geheim@192.0.2.9:1": {refused: "a user or password, which the other cluster would get"},
	} {
		config := clientcmdapi.NewConfig()
		config.Clusters["c"] = &clientcmdapi.Cluster{Server: server, ProxyURL: proxy}
		config.Contexts["c"], config.CurrentContext = &clientcmdapi.Context{Cluster: "c"}, "c"
		must(t, clientcmd.WriteToFile(*config, file))
		for _, chosen := range []bool{false, true} {
			a := cluster.Access{Kubeconfig: file}
			if chosen {
				a.Server, want.given, want.refused = server, "", ""
			}
			c, err := cluster.Connect(a)
			must(t, err)
			err = reachable(c, "--server")
			if (err == nil) != (want.refused == "") || err != nil && (!strings.Contains(err.Error(), want.refused) || strings.Contains(err.Error(), "geheim")) {
				t.Errorf("%s, chosen %v: %v; want %q", proxy, chosen, err, want.refused)
			}
			if err != nil {
				continue
			}
			text, err := kubeconfigFor(c, "token", "namespace")
			must(t, err)
			given, err := clientcmd.Load(text)
			must(t, err)
			if got := given.Clusters[given.Contexts[given.CurrentContext].Cluster]; got.ProxyURL != want.given || got.Server != server {
				t.Errorf("%s, chosen %v: the peer gets %s through %q; want %q", proxy, chosen, got.Server, got.ProxyURL, want.given)
			}
		}
	}
}
