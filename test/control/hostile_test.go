package control

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

// TestHostilePeerAffectsNoOtherPeer lets cluster b attack cluster a in two ways. First, b writes to
// a's API server. It has the permissions that Liqo would grant, which are more than those of
// `isthmus peer`. Second, b writes arbitrary answers into its own cluster, where a reads them.
// Cluster c, another peer of a, must not be affected. testdata/hostile.txt lists the result of each
// input.
func TestHostilePeerAffectsNoOtherPeer(t *testing.T) {
	t.Parallel()
	sites := newSites(t, "10.244.0.0/16", "10.128.0.0/14")
	a, b := sites[0], sites[1]
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
	if err := a.client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.51.100.10"}, {Type: corev1.NodeInternalIP, Address: "10.200.1.5"}}
	if err := a.client.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	a.startManager("--external-cidr", "10.245.0.0/16")
	b.startManager("--external-cidr", "10.132.0.0/14")
	peer(t, a, b)
	waitAgreed(t, a, b)
	c := honest(t, a)
	b.killManager()

	f := &foe{a: a, b: b, c: c, name: a.cluster().UniqueName(), namespace: a.tenant(b), client: liqoRights(t, a, b)}
	f.good, f.agreed, f.mapping, f.subnets = f.configOfB().Spec, a.tunnelEndpoint(b).Spec, a.natMapping(b).Spec, a.ipamStorage().ClusterSubnets[b.id]
	var table []string
	for _, part := range []struct {
		name string
		run  func(*testing.T) []string
	}{
		{"claims", f.testClaims},
		{"labels and names", f.testObjects},
		{"answers", f.testAnswers},
	} {
		t.Run(part.name, func(t *testing.T) {
			reportTo(t, a, b)
			table = append(table, part.run(t)...)
			f.restoreConfig()
		})
		if t.Failed() {
			return
		}
	}
	goldenTable(t, "testdata/hostile.txt", slices.Concat([]string{"# input, what refuses it (form: the API server; meaning: the manager), reason, message"}, table))
	for _, part := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"largest objects", f.testGreat},
		{"continuous updates", f.testUpdates},
		{"repeated deletion and creation", f.testRecreation},
		{"hundreds of objects", f.testMany},
	} {
		t.Run(part.name, func(t *testing.T) {
			reportTo(t, a, b)
			part.run(t)
			f.restoreConfig()
		})
		if t.Failed() {
			return
		}
	}
}

// A foe is b, the hostile peer, with its view of a.
type foe struct {
	a, b, c         *site
	namespace, name string        // namespace and name of b's NetworkConfig at a
	client          client.Client // with b's identity at a
	good            v1alpha1.NetworkConfigSpec
	agreed          v1alpha1.TunnelEndpointSpec // a's TunnelEndpoint for the valid NetworkConfig
	mapping         v1alpha1.NatMappingSpec
	subnets         v1alpha1.Subnets
}

// identityOf returns a client of other's API server, with the identity that s has there.
func identityOf(t *testing.T, s, other *site) client.Client {
	t.Helper()
	secret := &corev1.Secret{}
	if err := s.client.Get(t.Context(), types.NamespacedName{Namespace: s.tenant(other), Name: isthmus.DefaultIdentitySecret}, secret); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(secret.Data[isthmus.SecretKubeconfig])
	if err != nil {
		t.Fatal(err)
	}
	config.QPS = -1
	c, err := client.New(config, client.Options{Scheme: kubetest.NewScheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// liqoRights returns a client of a's API server with the permissions that Liqo grants a peer, here
// b: it may write every NetworkConfig in the tenant namespace, and no admission policy checks these
// writes.
func liqoRights(t *testing.T, a, b *site) client.Client {
	t.Helper()
	name := metav1.ObjectMeta{Namespace: a.tenant(b), Name: "liqo"}
	for _, o := range []client.Object{
		&corev1.ServiceAccount{ObjectMeta: name},
		&rbacv1.Role{ObjectMeta: name, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"net.liqo.io"}, Resources: []string{"networkconfigs"},
			Verbs: []string{"get", "list", "watch", "create", "update", "patch", "delete"}}}},
		&rbacv1.RoleBinding{ObjectMeta: name, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: name.Namespace, Name: name.Name}}},
	} {
		if err := a.client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	token := &authenticationv1.TokenRequest{}
	if err := a.client.SubResource("token").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: name}, token); err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(a.config)
	config.BearerToken, config.QPS = token.Status.Token, -1
	c, err := client.New(config, client.Options{Scheme: kubetest.NewScheme()})
	if err != nil {
		t.Fatal(err)
	}
	a.eventually("rights of b", func() (string, bool) { // the authorizer applies new permissions with a delay
		err := c.List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(name.Namespace))
		return fmt.Sprint(err), err == nil
	})
	return c
}

// honest adds another peer, c, to cluster a. c has no API server, so the test itself writes c's
// NetworkConfig and c's answer.
func honest(t *testing.T, a *site) *site {
	t.Helper()
	c := &site{t: t, name: "c", id: "cccc0000-1111-4222-8333-000000000002", podCIDR: "10.160.0.0/16"}
	tenant := a.tenant(c)
	if err := a.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}); err != nil {
		t.Fatal(err)
	}
	a.join(c, isthmus.Overrides{})
	nc := &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: a.cluster().UniqueName(), Labels: map[string]string{
			"liqo.io/replication": "false", "liqo.io/replicated": "true", "liqo.io/originID": c.id, "liqo.io/remoteID": a.id}},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: a.cluster(), PodCIDR: c.podCIDR, ExternalCIDR: "10.161.0.0/16", EndpointIP: "203.0.113.3", BackendType: "wireguard",
			BackendConfig: v1alpha1.BackendConfig{"port": "5871", "publicKey": liqoKey},
		},
	}
	if err := a.client.Create(t.Context(), nc); err != nil {
		t.Fatal(err)
	}
	a.eventually("an answer of c", func() (string, bool) {
		original := a.networkConfig(tenant, c)
		if original == nil {
			return "no NetworkConfig for it", false
		}
		original.Status = v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: "None", ExternalCIDRNAT: "None"}
		err := a.client.Status().Update(t.Context(), original)
		return fmt.Sprint(err), err == nil
	})
	a.eventually("a TunnelEndpoint with c", func() (string, bool) {
		te := a.tunnelEndpoint(c)
		return fmt.Sprintf("%+v", te), te != nil && te.Status.Connection.Status == v1alpha1.Connected
	})
	return c
}

// configOfB returns b's NetworkConfig at a.
func (f *foe) configOfB() *v1alpha1.NetworkConfig {
	f.a.t.Helper()
	nc := &v1alpha1.NetworkConfig{}
	if err := f.client.Get(f.a.t.Context(), types.NamespacedName{Namespace: f.namespace, Name: f.name}, nc); err != nil {
		f.a.t.Fatal(err)
	}
	return nc
}

// claim changes b's valid NetworkConfig and writes it to a.
func (f *foe) claim(change func(*v1alpha1.NetworkConfigSpec)) error {
	f.a.t.Helper()
	return f.edit(f.configOfB, func(nc *v1alpha1.NetworkConfig) {
		f.good.DeepCopyInto(&nc.Spec)
		if change != nil {
			change(&nc.Spec)
		}
	})
}

// edit changes the NetworkConfig that read returns. It tries again after conflicts, because a's
// manager writes finalizers and status.
func (f *foe) edit(read func() *v1alpha1.NetworkConfig, change func(*v1alpha1.NetworkConfig)) error {
	f.a.t.Helper()
	for {
		nc := read()
		change(nc)
		if err := f.client.Update(f.a.t.Context(), nc); !apierrors.IsConflict(err) {
			return err
		}
	}
}

// applied returns the versions of all objects at a that a hostile NetworkConfig must not change.
func (f *foe) applied() map[string]string {
	f.a.t.Helper()
	versions := make(map[string]string)
	for _, l := range []struct {
		list    client.ObjectList
		options []client.ListOption
	}{
		{&v1alpha1.TunnelEndpointList{}, nil}, {&v1alpha1.NatMappingList{}, nil}, {&v1alpha1.IpamStorageList{}, nil},
		{&v1alpha1.NetworkConfigList{}, []client.ListOption{client.InNamespace(f.a.tenant(f.c))}},
	} {
		f.a.list(l.list, l.options...)
		_ = meta.EachListItem(l.list, func(o runtime.Object) error {
			u := o.(client.Object)
			versions[fmt.Sprintf("%T %s/%s", o, u.GetNamespace(), u.GetName())] = string(u.GetUID()) + " " + u.GetResourceVersion()
			return nil
		})
	}
	return versions
}

// checkUnmoved fails the test if an object no longer has its version in versions.
func (f *foe) checkUnmoved(what string, versions map[string]string) {
	f.a.t.Helper()
	time.Sleep(100 * time.Millisecond) // time for changes that might follow the refusal
	after := f.applied()
	for _, name := range slices.Sorted(maps.Keys(versions)) {
		if after[name] != versions[name] {
			f.a.t.Errorf("%s: %s was %q, is %q", what, name, versions[name], after[name])
		}
	}
	if len(after) != len(versions) {
		f.a.t.Errorf("%s: there were %d objects, there are %d: %v", what, len(versions), len(after), after)
	}
}

// restoreConfig restores b's valid NetworkConfig, and waits until all objects at a are as agreed.
func (f *foe) restoreConfig() {
	f.a.t.Helper()
	if err := f.claim(nil); err != nil {
		f.a.t.Fatal(err)
	}
	f.waitSettled()
}

// waitSettled waits until all objects at a are as agreed at the beginning.
func (f *foe) waitSettled() {
	f.a.t.Helper()
	f.a.eventually("the TunnelEndpoints as they were", func() (string, bool) {
		te, c, nc := f.a.tunnelEndpoint(f.b), f.a.tunnelEndpoint(f.c), f.a.networkConfig(f.a.tenant(f.c), f.a)
		mapping, subnets := f.a.natMapping(f.b), f.a.ipamStorage().ClusterSubnets[f.b.id]
		return fmt.Sprintf("with b %+v\nwith c %+v\nNatMapping %+v\nbooks %+v", te, c, mapping, subnets), te != nil &&
			equality.Semantic.DeepEqual(te.Spec, f.agreed) && mapping != nil && equality.Semantic.DeepEqual(mapping.Spec, f.mapping) &&
			subnets == f.subnets && c != nil && c.Spec.EndpointIP == nc.Spec.EndpointIP && c.Spec.RemoteNATPodCIDR == v1alpha1.None
	})
	f.a.waitReady(f.b)
	f.checkHarmless("at the end")
}

// row returns a line of the golden table.
func (f *foe) row(input, outcome, reason, message string) string {
	return tableRow(input, outcome, reason, strings.ReplaceAll(message, f.good.BackendConfig["publicKey"], "KEY-OF-B"))
}

func tableRow(input, outcome, reason, message string) string {
	message = strings.Join(strings.Fields(message), " ")
	if len(message) > 400 {
		message = message[:400] + "..."
	}
	return fmt.Sprintf("%-44s %-9s %-12s %s", input, outcome, reason, message)
}

// waitDecision waits until a has decided about the present generation of a NetworkConfig, and
// returns the condition Accepted.
func (f *foe) waitDecision(name string) metav1.Condition {
	f.a.t.Helper()
	var accepted metav1.Condition
	f.a.eventually("a verdict on "+name, func() (string, bool) {
		nc := &v1alpha1.NetworkConfig{}
		if err := f.client.Get(f.a.t.Context(), types.NamespacedName{Namespace: f.namespace, Name: name}, nc); err != nil {
			return err.Error(), false
		}
		c := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted)
		if c == nil || c.ObservedGeneration != nc.Generation {
			return fmt.Sprintf("generation %d: %+v", nc.Generation, c), false
		}
		accepted = *c
		return "", true
	})
	return accepted
}

func (f *foe) testClaims(t *testing.T) (table []string) {
	secret := &corev1.Secret{}
	if err := f.a.client.Get(t.Context(), types.NamespacedName{Namespace: installed, Name: "wireguard-pubkey"}, secret); err != nil {
		t.Fatal(err)
	}
	type spec = v1alpha1.NetworkConfigSpec
	pod := func(s string) func(*spec) { return func(n *spec) { n.PodCIDR = s } }
	endpoint := func(s string) func(*spec) { return func(n *spec) { n.EndpointIP = s } }
	config := func(key, value string) func(*spec) {
		return func(n *spec) { n.BackendConfig[key] = value }
	}
	zero := base64.StdEncoding.EncodeToString(make([]byte, 32))
	low := base64.StdEncoding.EncodeToString(append([]byte{1}, make([]byte, 31)...))
	further := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{9}, 32))
	for _, test := range []struct {
		name    string
		outcome string // "form": the API server refuses the input; "meaning": a's manager refuses it; "taken": it is accepted and harmless
		field   string // the field that the refusal must name
		change  func(*spec)
	}{
		{"podCIDR 0.0.0.0/0", "form", "spec.podCIDR", pod("0.0.0.0/0")},
		{"podCIDR ::/0", "form", "spec.podCIDR", pod("::/0")},
		{"podCIDR with host bits", "form", "spec.podCIDR", pod("10.128.0.1/14")},
		{"podCIDR loopback", "form", "spec.podCIDR", pod("127.0.0.0/16")},
		{"podCIDR link-local", "form", "spec.podCIDR", pod("169.254.0.0/16")},
		{"podCIDR multicast", "form", "spec.podCIDR", pod("224.0.0.0/8")},
		{"podCIDR /31", "form", "spec.podCIDR", pod("10.128.0.0/31")},
		{"podCIDR IPv4 in IPv6", "form", "spec.podCIDR", pod("::ffff:10.128.0.0/112")},
		{"podCIDR that contains 0.0.0.0", "form", "spec.podCIDR", pod("0.0.0.0/8")},
		{"podCIDR no network", "form", "spec.podCIDR", pod("10.128.0.0")},
		{"podCIDR empty", "form", "spec.podCIDR", pod("")},
		{"podCIDR None", "form", "spec.podCIDR", pod("None")},
		{"podCIDR of another family", "meaning", "spec.externalCIDR", pod("fd00:128::/64")},
		{"podCIDR = externalCIDR", "form", "spec.externalCIDR", func(n *spec) { n.ExternalCIDR = n.PodCIDR }},
		{"externalCIDR inside podCIDR", "form", "spec.externalCIDR", func(n *spec) { n.ExternalCIDR = "10.129.0.0/16" }},
		{"podCIDR our Services", "taken", "", pod("10.96.0.0/14")},
		{"podCIDR our pods", "taken", "", pod("10.244.0.0/14")},
		{"podCIDR our nodes", "taken", "", pod("10.200.0.0/14")},
		{"podCIDR what c has here", "taken", "", pod("10.160.0.0/14")},
		{"podCIDR of another length, what c has here", "meaning", "spec.claims.consent", pod("10.160.0.0/16")},
		{"podCIDR in the Internet", "meaning", "spec.claims.consent", pod("8.8.8.0/24")},
		{"podCIDR on-prem", "meaning", "spec.claims.consent", pod("192.168.0.0/20")},

		{"endpointIP our gateway", "meaning", "spec.endpointIP", endpoint("203.0.113.1")},
		{"endpointIP our node", "meaning", "spec.endpointIP", endpoint("198.51.100.10")},
		{"endpointIP inside our pods", "meaning", "spec.endpointIP", endpoint("10.244.9.9")},
		{"endpointIP our API server's Service", "meaning", "spec.endpointIP", endpoint("10.96.0.1")},
		{"endpointIP inside our ExternalCIDR", "meaning", "spec.endpointIP", endpoint("10.245.1.1")},
		{"endpointIP inside c's pods", "meaning", "spec.endpointIP", endpoint("10.160.1.1")},
		{"endpointIP inside its own pods", "meaning", "spec.endpointIP", endpoint("10.129.1.1")},
		{"endpointIP 127.0.0.1", "form", "spec.endpointIP", endpoint("127.0.0.1")},
		{"endpointIP ::1", "form", "spec.endpointIP", endpoint("::1")},
		{"endpointIP 0.0.0.0", "form", "spec.endpointIP", endpoint("0.0.0.0")},
		{"endpointIP metadata service", "form", "spec.endpointIP", endpoint("169.254.169.254")},
		{"endpointIP 127.1", "form", "spec.endpointIP", endpoint("127.1")},
		{"endpointIP 2130706433", "form", "spec.endpointIP", endpoint("2130706433")},
		{"endpointIP localhost", "form", "spec.endpointIP", endpoint("localhost")},
		{"endpointIP x.LOCALHOST.", "form", "spec.endpointIP", endpoint("x.LOCALHOST.")},
		{"endpointIP a URL", "form", "spec.endpointIP", endpoint("http://x")},
		{"endpointIP of 300 characters", "form", "spec.endpointIP", endpoint(strings.Repeat("x.", 150))},
		{"endpointIP two lines", "form", "spec.endpointIP", endpoint("203.0.113.2\nPostUp=reboot")},
		{"port 0", "form", "spec.backend_config", config("port", "0")},
		{"port 65536", "form", "spec.backend_config", config("port", "65536")},
		{"port -1", "form", "spec.backend_config", config("port", "-1")},
		{"port 0x16ef", "form", "spec.backend_config", config("port", "0x16ef")},
		{"no port", "form", "spec.backend_config", func(n *spec) { delete(n.BackendConfig, "port") }},
		{"publicKey ours", "meaning", "spec.backend_config.publicKey", config("publicKey", string(secret.Data["publicKey"]))},
		{"publicKey of c", "meaning", "spec.backend_config.publicKey", config("publicKey", liqoKey)},
		{"publicKey of low order", "meaning", "spec.backend_config.publicKey", config("publicKey", low)},
		{"publicKey all zero", "form", "spec.backend_config", config("publicKey", zero)},
		{"publicKey bad base64", "form", "spec.backend_config", config("publicKey", strings.Repeat("!", 43)+"=")},
		{"publicKey too short", "form", "spec.backend_config", config("publicKey", "AAAA")},
		{"no publicKey", "form", "spec.backend_config", func(n *spec) { delete(n.BackendConfig, "publicKey") }},
		{"tunnels empty", "form", "spec.backend_config", config("tunnels", "")},
		{"tunnels with port 0", "form", "spec.backend_config", config("tunnels", "0:"+further)},
		{"tunnels with two lines", "form", "spec.backend_config", config("tunnels", "5872:"+further+"\nPostUp=reboot")},
		{"tunnels, 16 of them", "form", "spec.backend_config", config("tunnels", strings.Repeat("5872:"+further+",", 15)+"5872:"+further)},
		{"tunnels on one port", "meaning", "spec.backend_config.tunnels", config("tunnels", "5871:"+further)},
		{"tunnels with one key", "meaning", "spec.backend_config.tunnels", config("tunnels", "5872:"+further+",5873:"+further)},
		{"tunnels with our key", "meaning", "spec.backend_config.tunnels", config("tunnels", "5872:"+further+",5873:"+string(secret.Data["publicKey"]))},
		{"tunnels with the key of c", "meaning", "spec.backend_config.tunnels", config("tunnels", "5872:"+further+",5873:"+liqoKey)},
		{"tunnels", "taken", "", config("tunnels", "5872:"+further)},
		{"backend_config of a megabyte", "form", "spec.backend_config", config("x", strings.Repeat("x", 1<<20))},
		{"backend_config with 17 keys", "form", "spec.backend_config", func(n *spec) {
			*n = withoutKeyExchange(*n)
			for i := range 15 {
				n.BackendConfig[fmt.Sprint(i)] = ""
			}
		}},
		{"backend_config with more keys", "taken", "", config("presharedKey", "x\nPostUp=reboot")},
		{"backendType", "form", "spec.backendType", func(n *spec) { n.BackendType = "gre" }},
		{"addressed to c", "meaning", "spec.cluster.clusterID", func(n *spec) { n.RemoteCluster = f.c.cluster() }},
		{"addressed to itself", "meaning", "spec.cluster.clusterID", func(n *spec) { n.RemoteCluster = f.b.cluster() }},
		{"addressed to nobody", "form", "spec.cluster.clusterID", func(n *spec) { n.RemoteCluster.ClusterID = "" }},
		{"clusterName that is no name", "form", "spec.cluster.clusterName", func(n *spec) { n.RemoteCluster.ClusterName = "../x" }},
	} {
		before := f.applied()
		err := f.claim(test.change)
		if test.outcome == "form" {
			if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), test.field) {
				t.Errorf("%s: %v; want Invalid and %s", test.name, err, test.field)
				continue
			}
			f.checkUnmoved(test.name, before)
			_, message, _ := strings.Cut(err.Error(), "is invalid: ")
			table = append(table, f.row(test.name, "form", "Invalid", message))
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		c := f.waitDecision(f.name)
		table = append(table, f.row(test.name, test.outcome, c.Reason, c.Message))
		if test.outcome == "meaning" {
			if c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, test.field) {
				t.Errorf("%s: %+v; want a refusal that names %s", test.name, c, test.field)
			}
			f.checkUnmoved(test.name, before)
			continue
		}
		if c.Status != metav1.ConditionTrue {
			t.Errorf("%s: %+v", test.name, c)
			continue
		}
		f.checkHarmless(test.name)
		f.restoreConfig() // restore the agreed state before the next input
	}
	return table
}

// checkHarmless fails the test if networks in use at a overlap.
func (f *foe) checkHarmless(what string) {
	f.a.t.Helper()
	ipamStorage := f.a.ipamStorage()
	inUse := map[string]string{"our pods": ipamStorage.PodCIDR, "our Services": ipamStorage.ServiceCIDR, "our ExternalCIDR": ipamStorage.ExternalCIDR,
		"node 1": "198.51.100.10/32", "node 2": "10.200.1.5/32"}
	for id, s := range ipamStorage.ClusterSubnets {
		inUse["pods of "+id], inUse["ExternalCIDR of "+id] = s.RemotePodCIDR, s.RemoteExternalCIDR
	}
	names := slices.Sorted(maps.Keys(inUse))
	for i, x := range names {
		for _, y := range names[i+1:] {
			if prefix(inUse[x]).Overlaps(prefix(inUse[y])) {
				f.a.t.Errorf("%s: %s, %s, overlaps %s, %s", what, x, inUse[x], y, inUse[y])
			}
		}
	}
}

// secondConfig returns a second NetworkConfig with a valid spec.
func (f *foe) secondConfig(name string, labels map[string]string) *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name, Labels: labels}, Spec: *f.good.DeepCopy()}
}

// sender returns the labels of a copy from the cluster id.
func (f *foe) sender(id string) map[string]string {
	return map[string]string{"liqo.io/replication": "false", "liqo.io/replicated": "true", "liqo.io/originID": id, "liqo.io/remoteID": f.a.id}
}

func (f *foe) testObjects(t *testing.T) (table []string) {
	for _, test := range []struct {
		name   string
		labels map[string]string
		reason string // expected reason of the refusal; empty: the object is ignored
	}{
		{"no labels", nil, ""},
		{"labelled as from c", f.sender(f.c.id), v1alpha1.ReasonWrongOrigin},
		{"labelled as from ourselves", f.sender(f.a.id), v1alpha1.ReasonWrongOrigin},
		{"labelled as from nobody known", f.sender("nobody"), v1alpha1.ReasonWrongOrigin},
		{"a second one of its own", f.sender(f.b.id), v1alpha1.ReasonAmbiguous},
		{"a second original of ours", map[string]string{"liqo.io/replication": "true", "liqo.io/remoteID": f.b.id, "liqo.io/ownership": "netcfgCreator"}, ""},
		{"an original of ours for c", map[string]string{"liqo.io/replication": "true", "liqo.io/remoteID": f.c.id}, ""},
	} {
		before := f.applied()
		nc := f.secondConfig("another", test.labels)
		nc.Finalizers = []string{"example.com/of-b"} // the object stays until b removes this finalizer
		if err := f.client.Create(t.Context(), nc); err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		if test.reason != "" {
			c := f.waitDecision(nc.Name)
			if c.Status != metav1.ConditionFalse || c.Reason != test.reason {
				t.Errorf("%s: %+v; want %s", test.name, c, test.reason)
			}
			table = append(table, f.row(test.name, "meaning", c.Reason, c.Message))
		} else {
			table = append(table, f.row(test.name, "ignored", "-", ""))
		}
		f.checkUnmoved(test.name, before)
		if err := f.client.Delete(t.Context(), nc); err != nil {
			t.Fatal(err)
		}
		f.checkUnmoved(test.name+", on its way out", before)
		f.drop(nc)
	}

	before := f.applied()
	peering := f.a.peering(f.b)
	if err := f.edit(f.configOfB, func(nc *v1alpha1.NetworkConfig) {
		nc.OwnerReferences = []metav1.OwnerReference{{APIVersion: "isthmus.net/v1alpha1", Kind: "Peering", Name: peering.Name, UID: peering.UID, BlockOwnerDeletion: new(true)}}
	}); err != nil {
		t.Fatal(err)
	}
	f.checkUnmoved("owner reference to our Peering", before)
	table = append(table, f.row("owner reference to our Peering", "ignored", "-", ""))
	if err := f.edit(f.configOfB, func(nc *v1alpha1.NetworkConfig) { nc.OwnerReferences = nil }); err != nil {
		t.Fatal(err)
	}

	// Liqo's permissions let b write our NetworkConfig, too. a must undo these changes.
	for _, test := range []struct {
		name string
		do   func(original func() *v1alpha1.NetworkConfig) error
	}{
		{"our original edited", func(original func() *v1alpha1.NetworkConfig) error {
			return f.edit(original, func(nc *v1alpha1.NetworkConfig) {
				nc.Spec.PodCIDR, nc.Spec.EndpointIP, nc.Labels, nc.Finalizers = "10.99.0.0/16", "203.0.113.66", f.sender(f.b.id), nil
			})
		}},
		{"our original deleted", func(original func() *v1alpha1.NetworkConfig) error { return f.client.Delete(t.Context(), original()) }},
	} {
		if err := test.do(func() *v1alpha1.NetworkConfig { return f.a.networkConfig(f.namespace, f.b) }); err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		f.a.eventually("our original as it was: "+test.name, func() (string, bool) {
			nc := f.a.networkConfig(f.namespace, f.b)
			if nc == nil || nc.DeletionTimestamp != nil {
				return fmt.Sprintf("%+v", nc), false
			}
			return fmt.Sprintf("%+v", nc), nc.Spec.PodCIDR == f.a.podCIDR && nc.Labels["liqo.io/replication"] == "true" && len(nc.Finalizers) == 2
		})
		// The test must answer the new NetworkConfig itself, because b has no manager any more.
		f.answer(f.agreed.LocalNATPodCIDR, f.agreed.LocalNATExternalCIDR)
		f.waitSettled()
		table = append(table, f.row(test.name, "undone", "-", ""))
	}

	// A copy that is being deleted counts as deleted, even if a finalizer keeps it.
	if err := f.edit(f.configOfB, func(nc *v1alpha1.NetworkConfig) { nc.Finalizers = append(nc.Finalizers, "example.com/of-b") }); err != nil {
		t.Fatal(err)
	}
	nc := f.configOfB()
	if err := f.client.Delete(t.Context(), nc); err != nil {
		t.Fatal(err)
	}
	c := f.a.waitCondition(f.b, isthmus.ConditionPeerConfig, metav1.ConditionFalse, isthmus.ReasonPeerWithdrew)
	f.a.eventually("no TunnelEndpoint", func() (string, bool) { te := f.a.tunnelEndpoint(f.b); return fmt.Sprintf("%+v", te), te == nil })
	table = append(table, f.row("deleted, but for a finalizer", "meaning", c.Reason, c.Message))
	f.drop(nc)
	f.publish()
	return table
}

// drop removes all finalizers of an object that is being deleted, and waits until it is gone.
func (f *foe) drop(o client.Object) {
	f.a.t.Helper()
	f.a.eventually("an end of "+o.GetName(), func() (string, bool) {
		err := f.client.Patch(f.a.t.Context(), o, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))
		return fmt.Sprint(err), apierrors.IsNotFound(err)
	})
}

// publish creates b's NetworkConfig as it was at the beginning.
func (f *foe) publish() {
	f.a.t.Helper()
	if err := f.client.Create(f.a.t.Context(), f.secondConfig(f.name, f.sender(f.b.id))); err != nil {
		f.a.t.Fatal(err)
	}
}

// answer writes the status of our NetworkConfig at b, as b's administrator could.
func (f *foe) answer(pod, external string) {
	f.a.t.Helper()
	key := types.NamespacedName{Namespace: f.b.tenant(f.a), Name: f.b.cluster().UniqueName()}
	f.b.eventually("our NetworkConfig at b", func() (string, bool) {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(configKind)
		if err := f.b.client.Get(f.b.t.Context(), key, u); err != nil {
			return err.Error(), false
		}
		if u.GetDeletionTimestamp() != nil { // b has no manager that would remove the finalizers
			err := f.b.client.Patch(f.b.t.Context(), u, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))
			return fmt.Sprint(err), false
		}
		if spec, _, _ := unstructured.NestedString(u.Object, "spec", "podCIDR"); spec != f.a.podCIDR {
			return spec, false
		}
		u.Object["status"] = map[string]any{"processed": true, "podCIDRNAT": pod, "externalCIDRNAT": external}
		err := f.b.client.Status().Update(f.b.t.Context(), u)
		return fmt.Sprint(err), err == nil
	})
}

// testAnswers writes arbitrary answers at b, after a replacement of b's CRD by one that accepts
// them.
func (f *foe) testAnswers(t *testing.T) (table []string) {
	crd := &apiextensions.CustomResourceDefinition{}
	text, err := os.ReadFile("../../internal/kubetest/liqo/net.liqo.io_networkconfigs.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, crd); err != nil {
		t.Fatal(err)
	}
	f.loosenCRD(crd)
	for _, test := range []struct{ name, pod, external, field string }{ // no field: a accepts the answer
		{"answer of another length", "10.64.0.0/20", "None", "status.podCIDRNAT"},
		{"answer empty", "", "None", "podCIDRNAT"},
		{"answer none", "none", "None", "status.podCIDRNAT"},
		{"answer loopback", "127.0.0.0/16", "None", "status.podCIDRNAT"},
		{"answer link-local", "None", "169.254.0.0/16", "status.externalCIDRNAT"},
		{"answer with host bits", "10.64.0.1/16", "None", "status.podCIDRNAT"},
		{"answer 0.0.0.0/0", "0.0.0.0/0", "None", "status.podCIDRNAT"},
		{"answer of another family", "fd00:64::/112", "None", "status.podCIDRNAT"},
		{"answer of a megabyte", strings.Repeat("x", 1<<20), "None", "status.podCIDRNAT"},
		{"answer twice the same", "10.64.0.0/16", "10.64.0.0/16", "externalCIDRNAT"},
		{"answer what c has here", "10.160.0.0/16", "None", ""},
		{"answer what b has here", "10.128.0.0/16", "None", ""},
		{"answer our Services", "10.96.0.0/16", "None", ""},
	} {
		before := f.applied()
		generation := f.a.tunnelEndpoint(f.b).Generation
		f.answer(test.pod, test.external)
		if test.field == "" {
			f.a.eventually(test.name, func() (string, bool) {
				te := f.a.tunnelEndpoint(f.b)
				return fmt.Sprintf("%+v", te), te.Spec.LocalNATPodCIDR == test.pod
			})
			f.checkHarmless(test.name)
			f.a.waitReady(f.b)
			table = append(table, f.row(test.name, "taken", "-", ""))
		} else {
			var condition metav1.Condition
			f.a.eventually("a Peering that complains: "+test.name, func() (string, bool) {
				p := f.a.peering(f.b)
				for _, kind := range []string{isthmus.ConditionAnswered, isthmus.ConditionTunnelEndpoint} {
					if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil && c.Status == metav1.ConditionFalse && strings.Contains(c.Message, test.field) {
						condition = *c
						return "", true
					}
				}
				return fmt.Sprintf("%+v", p.Status.Conditions), false
			})
			f.checkUnmoved(test.name, before)
			if now := f.a.tunnelEndpoint(f.b).Generation; now != generation {
				t.Errorf("%s: the TunnelEndpoint has changed", test.name)
			}
			table = append(table, f.row(test.name, "meaning", condition.Type+"/"+condition.Reason, condition.Message))
		}
		f.answer(f.agreed.LocalNATPodCIDR, f.agreed.LocalNATExternalCIDR)
		f.waitSettled()
	}
	return table
}

// loosenCRD replaces the CRD at b by one that accepts any answer.
func (f *foe) loosenCRD(crd *apiextensions.CustomResourceDefinition) {
	f.a.t.Helper()
	there := &unstructured.Unstructured{}
	there.SetAPIVersion("apiextensions.k8s.io/v1")
	there.SetKind("CustomResourceDefinition")
	f.b.eventually("a CRD at b that accepts everything", func() (string, bool) {
		if err := f.b.client.Get(f.b.t.Context(), types.NamespacedName{Name: crd.Name}, there); err != nil {
			return err.Error(), false
		}
		spec, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&crd.Spec)
		if err != nil {
			return err.Error(), false
		}
		there.Object["spec"] = spec
		err = f.b.client.Update(f.b.t.Context(), there)
		return fmt.Sprint(err), err == nil
	})
	time.Sleep(time.Second) // until the new CRD is served
}

// testGreat writes the largest objects that the API server accepts.
func (f *foe) testGreat(t *testing.T) {
	before := f.applied()
	memory := f.memory()
	for i := range 50 {
		nc := f.configOfB()
		nc.Annotations = map[string]string{"example.com/x": strings.Repeat("x", 250<<10), "example.com/i": strconv.Itoa(i)}
		if err := f.client.Update(t.Context(), nc); err != nil && !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
	}
	took := f.change()
	t.Logf("50 updates with 250 KiB of annotations: memory %d MiB before, %d MiB after; a change of c is applied after %v", memory>>20, f.memory()>>20, took)
	if grown := f.memory() - memory; grown > 100<<20 {
		t.Errorf("memory grew by %d MiB", grown>>20)
	}
	now := f.applied()
	for name, version := range before {
		if !strings.Contains(name, f.a.tenant(f.c)) && now[name] != version {
			t.Errorf("%s has changed", name)
		}
	}
	if err := f.edit(f.configOfB, func(nc *v1alpha1.NetworkConfig) { nc.Annotations = nil }); err != nil {
		t.Fatal(err)
	}
}

// testUpdates changes the gateway's address ten times a second.
func (f *foe) testUpdates(t *testing.T) {
	duration := 3 * time.Second
	if *long {
		duration = 20 * time.Second
	}
	before, events := f.writes(), f.events()
	updates := 0
	begin := time.Now()
	for ; time.Since(begin) < duration; time.Sleep(100 * time.Millisecond) {
		updates++
		if err := f.claim(func(s *v1alpha1.NetworkConfigSpec) {
			s.EndpointIP = []string{"203.0.113.50", "10.244.0.9"}[updates%2]
		}); err != nil {
			t.Fatal(err)
		}
	}
	took := f.change()
	if err := f.claim(nil); err != nil {
		t.Fatal(err)
	}
	f.a.waitReady(f.b)
	done := f.writes()
	t.Logf("%d updates in %v: %d writes of the manager; a change of c is applied after %v", updates, duration, done-before, took)
	if most := 8*updates + 20 + leases(begin); done-before > most {
		t.Errorf("%d writes; want at most %d", done-before, most)
	}
	if n := f.events() - events; n > 10 {
		t.Errorf("%d new Events", n)
	}
	f.checkQuiet()
}

// events returns the number of Events at a.
func (f *foe) events() int {
	f.a.t.Helper()
	var list eventsv1.EventList
	if err := f.a.client.List(f.a.t.Context(), &list); err != nil {
		f.a.t.Fatal(err)
	}
	return len(list.Items)
}

// testRecreation repeatedly deletes and creates the NetworkConfig.
func (f *foe) testRecreation(t *testing.T) {
	ipamStorage := f.a.ipamStorage().ClusterSubnets[f.b.id]
	for range 15 {
		nc := f.configOfB()
		if err := f.client.Delete(t.Context(), nc); err != nil {
			t.Fatal(err)
		}
		f.drop(nc)
		f.publish()
	}
	f.a.waitReady(f.b)
	f.a.eventually(fmt.Sprintf("the networks that were, %+v", ipamStorage), func() (string, bool) {
		now := f.a.ipamStorage().ClusterSubnets[f.b.id]
		return fmt.Sprintf("%+v", now), now == ipamStorage
	})
}

// testMany creates many NetworkConfigs, first with Liqo's permissions and then with those of
// `isthmus peer`.
func (f *foe) testMany(t *testing.T) {
	number := 300
	if *long {
		number = 10_000
	}
	began := time.Now()
	memory, writes, alone := f.memory(), f.writes(), f.change()
	create := func(from, to int) {
		for i := from; i < to; i++ {
			labels := f.sender([]string{f.b.id, f.c.id, f.a.id, fmt.Sprint("nobody-", i)}[i%4])
			maps.Copy(labels, many)
			if err := f.client.Create(t.Context(), f.secondConfig(fmt.Sprintf("one-of-many-%d", i), labels)); err != nil {
				t.Fatal(err)
			}
		}
	}
	create(0, number/2)
	meanwhile := f.change()
	create(number/2, number)
	created := time.Since(began)
	after := f.change()
	t.Logf("%d NetworkConfigs in %v: memory %d MiB before, %d MiB after; %d writes of the manager; a change of c is applied after %v alone, %v meanwhile, %v at the end",
		number, created.Round(time.Millisecond), memory>>20, f.memory()>>20, f.writes()-writes, alone, meanwhile, after)
	if grown := f.memory() - memory; grown > 100<<20+number*40<<10 {
		t.Errorf("memory grew by %d MiB", grown>>20)
	}
	if n := f.writes() - writes; n > 200+leases(began) {
		t.Errorf("%d writes", n)
	}
	if slowest := max(meanwhile, after); slowest > prompt {
		t.Errorf("a change of c took %v", slowest)
	}
	f.checkQuiet()
	if err := f.a.client.DeleteAllOf(t.Context(), &v1alpha1.NetworkConfig{}, client.InNamespace(f.namespace), many); err != nil {
		t.Fatal(err)
	}
	f.a.waitReady(f.b)

	peer := identityOf(t, f.b, f.a)
	for i := range 20 {
		name := fmt.Sprintf("one-of-many-%d", i)
		if err := peer.Create(t.Context(), f.secondConfig(name, f.sender(f.b.id))); !apierrors.IsForbidden(err) {
			t.Errorf("NetworkConfig %s: %v", name, err)
		}
	}
}

// many marks the objects that testMany creates.
var many = client.MatchingLabels{"example.com/many": "true"}

// memory returns the resident memory of a's manager.
func (f *foe) memory() int {
	f.a.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", f.a.manager.Process.Pid))
	if err != nil {
		f.a.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		f.a.t.Fatal(err)
	}
	return kib << 10
}

// writes returns the number of writing requests of a's manager, including those for its Lease.
func (f *foe) writes() (n int) {
	f.a.t.Helper()
	resp, err := http.Get("http://" + f.a.metrics + "/metrics")
	if err != nil {
		f.a.t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		line := lines.Text()
		if !strings.HasPrefix(line, "rest_client_requests_total{") || strings.Contains(line, `method="GET"`) {
			continue
		}
		v, err := strconv.ParseFloat(line[strings.LastIndex(line, " ")+1:], 64)
		if err != nil {
			f.a.t.Fatal(err)
		}
		n += int(v)
	}
	return n
}

// checkQuiet fails the test unless a's manager stops writing, except for renewals of its Lease.
func (f *foe) checkQuiet() {
	f.a.t.Helper()
	f.a.eventually("rest of the manager of a", func() (string, bool) {
		began, before := time.Now(), f.writes()
		time.Sleep(4 * time.Second)
		n, most := f.writes()-before, leases(began)+1
		return fmt.Sprintf("%d writes in %v", n, time.Since(began)), n <= most
	})
}

// leases returns the maximum number of Lease renewals by a manager since a time, at one in two
// seconds.
func leases(since time.Time) int { return int(time.Since(since)/(2*time.Second)) + 1 }

// change changes c's NetworkConfig, and returns the time until the change is applied.
func (f *foe) change() time.Duration {
	f.a.t.Helper()
	nc := f.a.networkConfig(f.a.tenant(f.c), f.a)
	address := "203.0.113.30"
	if nc.Spec.EndpointIP == address {
		address = "203.0.113.31"
	}
	began := time.Now()
	if err := f.a.client.Patch(f.a.t.Context(), nc, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"endpointIP":%q}}`, address))); err != nil {
		f.a.t.Fatal(err)
	}
	f.a.eventually("a change of c", func() (string, bool) {
		te := f.a.tunnelEndpoint(f.c)
		return fmt.Sprintf("%+v", te), te != nil && te.Spec.EndpointIP == address
	})
	return time.Since(began).Round(time.Millisecond)
}

// goldenTable compares a table with a golden file.
func goldenTable(t *testing.T, path string, table []string) {
	t.Helper()
	for i, line := range table {
		table[i] = strings.TrimRight(line, " ")
	}
	have := strings.Join(table, "\n") + "\n"
	if *update {
		if err := os.WriteFile(path, []byte(have), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// After the name of the field, an API server of 1.31 writes another text, without the value.
	same := func(line string) string { return line }
	if strings.Contains(have, `Invalid value: "string"`) || strings.Contains(have, `Invalid value: "null"`) {
		words := regexp.MustCompile(`(Invalid value|Too long): .*`)
		same = func(line string) string { return words.ReplaceAllString(line, "") }
	}
	for i, line := range strings.Split(string(want), "\n") {
		if got := strings.Split(have, "\n"); i >= len(got) || same(got[i]) != same(line) {
			t.Errorf("line %d of %s is\n%s\nhave\n%s", i+1, path, line, strings.Join(got[min(i, len(got)):min(i+1, len(got))], ""))
		}
	}
}
