package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmusv1alpha1 "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

// noCluster removes every kubeconfig from the environment.
func noCluster(t *testing.T) {
	t.Helper()
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
}

// unreachableCluster returns a kubeconfig with an API server that does not exist.
func unreachableCluster(t *testing.T) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "kubeconfig")
	const text = `{apiVersion: v1, kind: Config, current-context: gone, contexts: [{name: gone, context: {cluster: c}}],
		clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestClusterCommandsExplainAMissingContext(t *testing.T) {
	noCluster(t)
	unreachable := unreachableCluster(t)
	text, err := os.ReadFile(unreachable)
	if err != nil {
		t.Fatal(err)
	}
	without := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(without, bytes.Replace(text, []byte("current-context: gone, "), nil, 1), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"peer"}, "want --remote-context"},
		{[]string{"peer", "--remote-context", "b", "--timeout", "-1s"}, "--timeout -1s: want a duration"},
		{[]string{"peer", "--remote-context", "b", "-o", "wide"}, "want json or yaml"},
		{[]string{"peer", "b", "c"}, "arguments \"b\" \"c\": want isthmus "},
		{[]string{"peer", "b", "--remote-context", "b"}, `"b": want either the NAME of a Peering`},
		{[]string{"peer", "b", "--replace"}, "--replace is only for joining two clusters"},
		{[]string{"peer", "b", "--consent", "10.48.0.0/14"}, `--consent "10.48.0.0/14": want PODCIDR,EXTERNALCIDR`},
		{[]string{"peer", "b", "--consent", "10.48.0.1/14,10.60.0.0/20"}, "10.48.0.1/14 is not a network"},
		{[]string{"peer", "b", "--allow-claim", "8.8.8.8"}, "--allow-claim: 8.8.8.8 is not a network"},
		{[]string{"peer", "--kubeconfig", unreachable, "b"}, "unreachable"},
		{[]string{"peer", "--remote-context", "b"}, "no kubeconfig: want --kubeconfig"},
		{[]string{"peer", "--kubeconfig", unreachable, "--remote-context", "nope"}, "no context nope"},
		{[]string{"peer", "--kubeconfig", "/no/such/file", "--remote-context", "b"}, "kubeconfig /no/such/file: no such file"},
		{[]string{"peer", "--kubeconfig", unreachable, "--remote-context", "gone"}, "gone: namespace kube-system: unreachable"},
		{[]string{"peer", "--kubeconfig", unreachable, "--remote-context", "gone", "--server", "http://192.0.2.1"}, "API server http://192.0.2.1: want a URL"},
		{[]string{"unpeer"}, "want the NAME of a Peering, or --remote-context"},
		{[]string{"unpeer", "b", "--timeout", "0s"}, "--timeout 0s: want a duration"},
		{[]string{"unpeer", "b", "c"}, "arguments \"b\" \"c\": want isthmus "},
		{[]string{"unpeer", "--kubeconfig", unreachable, "b"}, "unreachable"},
		{[]string{"install", "--gateway-service", "ClusterIP"}, "want none, NodePort or LoadBalancer"},
		{[]string{"install", "--gateway-port", "70000"}, "--gateway-port 70000: want 1 to 65535"},
		{[]string{"install", "--tunnels", "0"}, "--tunnels 0: want 1 to 16"},
		{[]string{"install", "--gateway-port", "65535", "--tunnels", "2"}, "--tunnels 2: want 1 to 16, on UDP ports from --gateway-port up to 65535"},
		{[]string{"install", "--kubeconfig", unreachable, "--cluster-name", "a"}, "unreachable"},
		{[]string{"install", "--pod-cidr", "10.1.2.3/16"}, "--pod-cidr \"10.1.2.3/16\": has host bits set"},
		{[]string{"install", "--image", "example.org:5000/isthmus"}, "--image \"example.org:5000/isthmus\": want a name with a tag or a digest"},
		{[]string{"install", "--set", "gateway.replicas"}, "--set \"gateway.replicas\": want a value such as"},
		{[]string{"install", "--values", "/no/such/file"}, "--values: open /no/such/file"},
		{[]string{"status", "--kubeconfig", unreachable}, "unreachable"},
		{[]string{"status", "--context", "x"}, "no context x"},
		{[]string{"status", "--kubeconfig", without}, "no current context; want --context with one of gone"},
	} {
		out, errs, code := isthmus("", tc.args...)
		if code != 2 || !strings.Contains(errs, tc.want) || out != "" {
			t.Errorf("%q: code %d, stderr %q, stdout %q", tc.args, code, errs, out)
		}
	}
}

// Client libraries log through klog, whose default is standard error.
func TestLogsOfClientLibrariesAreNotPrinted(t *testing.T) {
	noCluster(t)
	var text bytes.Buffer
	klog.LogToStderr(false)
	klog.SetOutput(&text)
	defer klog.LogToStderr(true)
	klog.ClearLogger()
	isthmus("", "status", "--kubeconfig", unreachableCluster(t))
	klog.ErrorS(nil, "Failed to watch")
	klog.Flush()
	if text.Len() > 0 {
		t.Errorf("printed: %s", text.String())
	}
}

func TestInstallPrintsManifestsWithoutACluster(t *testing.T) {
	print := func(args ...string) string {
		t.Helper()
		out, errs, code := isthmus("", append([]string{"install", "--print", "--cluster-name", "paris"}, args...)...)
		if code != 0 || errs != "" {
			t.Fatalf("%q: code %d\n%s", args, code, errs)
		}
		return out
	}
	for _, tc := range []struct {
		args        []string
		has, hasNot string
	}{
		{nil, "CLUSTER_NAME: \"paris\"", "hostNetwork: true\n      dnsPolicy: ClusterFirstWithHostNet"},
		{[]string{"--host-network"}, "hostNetwork: true\n      dnsPolicy: ClusterFirstWithHostNet", "<no value>"},
		{[]string{"--image", "example.org:5000/isthmus:x"}, "image: \"example.org:5000/isthmus:x\"", "ghcr.io"},
		{[]string{"--gateway-service", "none"}, "kind: Deployment", "kind: Service\n"},
		{[]string{"--without-workloads"}, "kind: ServiceAccount\n", "kind: Deployment"},
		{[]string{"--without-workloads"}, "kind: ServiceAccount\n", "kind: Service\n"},
		{[]string{"--without-workloads", "--gateway-service", "NodePort"}, "kind: Service\n", "kind: Deployment"},
		{[]string{"--set", "workloads=false", "--set", "namespace.create=false", "--set", "cluster.configMap=false"}, "kind: ServiceAccount\n", "kind: Deployment"},
		{[]string{"--set", "namespace.create=false"}, "kind: Deployment", "kind: Namespace\n"},
		{[]string{"--set", "cluster.configMap=false"}, "kind: Deployment", "CLUSTER_NAME"},
		{[]string{"--set", "image.pullPolicy=Always", "--set", "image.pullSecrets=[s]", "--image", "a/b:c"}, "imagePullPolicy: Always", "IfNotPresent"},
		{[]string{"--set", "image.pullSecrets=[s]", "--image", "a/b:c"}, "- name: \"s\"", "ghcr.io"},
		{[]string{"--set", "routeAgent.maxSurge=1"}, "{maxSurge: 1", "10%"},
		{[]string{"--set", "gateway.replicas=5", "--pod-cidr", "10.9.0.0/16"}, "replicas: 5", "<no value>"},
		{[]string{"--pod-cidr", "10.9.0.0/16"}, "- --pod-cidr=10.9.0.0/16", "<no value>"},
	} {
		if out := print(tc.args...); !strings.Contains(out, tc.has) || strings.Contains(out, tc.hasNot) {
			t.Errorf("%q: want %q (%v) and not %q (%v) in %d octets", tc.args, tc.has, strings.Contains(out, tc.has), tc.hasNot, strings.Contains(out, tc.hasNot), len(out))
		}
	}
	if out, errs, code := isthmus("", "install", "--print"); code != 1 || !strings.Contains(errs, "cluster.name: want how peers are to call this cluster") || out != "" {
		t.Errorf("without a name: code %d, %s%s", code, out, errs)
	}
	if out, errs, code := isthmus("", "install", "--print", "--cluster-name", "a", "--set", "gatway.replicas=5"); code != 1 || !strings.Contains(errs, "value gatway: the chart has no such value") || out != "" {
		t.Errorf("with a typing error: code %d, %s%s", code, out, errs)
	}
}

func TestStatusReportsTheClusterIfThereIsOne(t *testing.T) {
	noCluster(t)
	diagnose := func(want string, args ...string) {
		t.Helper()
		if _, errs, code := isthmus("", append([]string{"status"}, args...)...); code != 2 || !strings.Contains(errs, want) {
			t.Errorf("%q: code %d, %s", args, code, errs)
		}
	}
	const gateway = "gateway at 127.0.0.1:"
	diagnose(gateway)
	t.Setenv("KUBECONFIG", unreachableCluster(t))
	diagnose("gone: namespace kube-system: unreachable")
	diagnose(gateway, "--gateway")
	diagnose(gateway, "--address", "127.0.0.1:1")
	diagnose(gateway, "--flows", "3")
}

func TestCommandsPeerTwoClusters(t *testing.T) {
	if testing.Short() {
		t.Skip("starts two API servers")
	}
	config := twoClusters(t)
	t.Setenv("KUBECONFIG", config)
	contexts, err := clientcmd.LoadFromFile(config)
	if err != nil {
		t.Fatal(err)
	}
	peer := func(from, to string, more ...string) []string { // peer refuses loopback addresses unless a flag sets them
		args := []string{"peer", "--context", from, "--remote-context", to}
		for flag, name := range map[string]string{"--server": from, "--remote-server": to} {
			args = append(args, flag, contexts.Clusters[contexts.Contexts[name].Cluster].Server)
		}
		return append(args, more...)
	}
	run := func(code int, wants string, args ...string) string {
		t.Helper()
		out, errs, got := isthmus("", args...)
		if got != code {
			t.Fatalf("%q: code %d, want %d\n%s%s", args, got, code, out, errs)
		}
		for want := range strings.SplitSeq(wants, "|") {
			if !strings.Contains(out+errs, want) {
				t.Errorf("%q: no %q in\n%s%s", args, want, out, errs)
			}
		}
		return out
	}
	run(1, "a: namespace isthmus-system has no ConfigMap|run `isthmus install --context a --cluster-name NAME`", "peer", "--context", "a", "--remote-context", "b")
	run(1, "want --cluster-name", "install", "--without-workloads", "--context", "a")
	run(0, "a: Namespace isthmus-system created|CustomResourceDefinition peerings.isthmus.net created|Service isthmus-system/isthmus-gateway created|"+
		"a: installed; peer it with another cluster: isthmus peer --context a --remote-context OTHER",
		"install", "--without-workloads", "--context", "a", "--cluster-name", "a", "--gateway-service", "NodePort")
	run(0, "b: Role isthmus-system/isthmus-gateway created", "install", "--without-workloads", "--context", "b", "--cluster-name", "b", "--cluster-id", "bbbb")
	if out := run(0, "a: applied, without waiting for the components; check them with isthmus status", "install", "--without-workloads", "--context", "a", "--timeout", "0"); strings.Contains(out, "created") || strings.Contains(out, "changed\n") && !strings.Contains(out, "unchanged\n") {
		t.Errorf("the second time:\n%s", out)
	}
	run(1, "a: waiting for a manager|a: no manager is active: Lease isthmus-system/isthmus-manager not found|b: no manager", peer("a", "b", "--timeout", "1s")...)
	run(0, "cluster a (|manager none|no peerings", "status", "--context", "a")

	a, b := clientOf(t, config, "a"), clientOf(t, config, "b")
	for _, c := range []client.Client{a, b} {
		if err := c.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: "isthmus-manager"},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: new("m"), LeaseDurationSeconds: new(int32(3600)), RenewTime: &metav1.MicroTime{Time: time.Now()}}}); err != nil {
			t.Fatal(err)
		}
	}
	run(1, "a: Peering b-|got a new identity at b, valid until|not peered within 300ms|a: Ready is Unknown (Unknown): the manager has not checked it yet|b: Ready",
		peer("a", "b", "--timeout", "300ms")...)
	run(1, "PEERING|b-|manager m\n|the manager has not checked it yet", "status", "--context", "a")

	for _, c := range []client.Client{a, b} {
		var list isthmusv1alpha1.PeeringList
		if err := c.List(t.Context(), &list); err != nil || len(list.Items) != 1 {
			t.Fatal(err, list)
		}
		p := list.Items[0]
		p.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Connected", ObservedGeneration: p.Generation, LastTransitionTime: metav1.Now()}}
		p.Status.Latency = "0.7ms"
		if err := c.Status().Update(t.Context(), &p); err != nil {
			t.Fatal(err)
		}
	}
	run(0, "a and b are peered", peer("a", "b")...)
	out, _, code := isthmus("", peer("b", "a", "-o", "json")...)
	var both map[string]isthmusv1alpha1.Peering
	if err := json.Unmarshal([]byte(out), &both); err != nil || code != 0 || both["remote"].Spec.Cluster.ClusterName != "b" {
		t.Errorf("code %d, %v:\n%s", code, err, out)
	}
	run(0, "yes|0.7ms", "status", "--context", "a")
	run(0, "latency: 0.7ms|ready: true|clusterName: b", "status", "--context", "a", "-o", "yaml")
	run(0, "CLUSTER ID|bbbb", "status", "--context", "a", "-o", "wide")
	if out := run(0, "", "__complete", "unpeer", "--context", "a", ""); !strings.HasPrefix(out, "b\nb-") {
		t.Errorf("names to un-peer:\n%s", out)
	}
	run(0, "a: Peering b-|deleted|a and b are no longer peered", "unpeer", "--context", "a", "--remote-context", "b")
	run(0, "nothing to do", "unpeer", "--context", "a", "--remote-context", "b")
	run(1, "no such peering", "unpeer", "--context", "a", "b")
	run(0, "no peerings", "status", "--context", "b")
}

// twoClusters starts two API servers and returns a kubeconfig with contexts a and b.
func twoClusters(t *testing.T) (path string) {
	t.Helper()
	kube, err := kubetest.Build(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "kubeconfig")
	servers, errs := [2]*kubetest.Server{}, [2]error{}
	var group sync.WaitGroup
	for i, name := range []string{"a", "b"} {
		group.Go(func() {
			servers[i], errs[i] = kubetest.Start(context.Background(), kubetest.Options{Name: name, Dir: kube, Controllers: true})
		})
	}
	group.Wait()
	for i, s := range servers {
		if errs[i] != nil {
			t.Fatal(errs[i])
		}
		t.Cleanup(func() { _ = s.Stop() })
	}
	all, err := clientcmd.Load(servers[0].Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	other, err := clientcmd.Load(servers[1].Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	all.Clusters["b"], all.AuthInfos["b"], all.Contexts["b"] = other.Clusters["b"], other.AuthInfos["b"], other.Contexts["b"]
	if err := clientcmd.WriteToFile(*all, path); err != nil {
		t.Fatal(err)
	}
	return path
}

func clientOf(t *testing.T, path, context string) client.Client {
	t.Helper()
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: path},
		&clientcmd.ConfigOverrides{CurrentContext: context}).ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(config, client.Options{Scheme: kubetest.NewScheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}
