package uninstall

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/expect"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
	"github.com/isthmus-net/isthmus/internal/install"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/peering"
	"github.com/isthmus-net/isthmus/internal/postquantum"
)

var must = expect.NoError

func TestMain(m *testing.M) { os.Exit(kubetest.Rounds(m.Run)) }

// inventory returns the names of all objects of a cluster, except those that the API server and
// its controllers maintain.
func inventory(t *testing.T, c *cluster.Cluster) map[string]bool {
	t.Helper()
	lists, err := discovery.NewDiscoveryClientForConfigOrDie(c.Config).ServerPreferredResources()
	must(t, err)
	objects := metadata.NewForConfigOrDie(c.Config)
	all := map[string]bool{}
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		must(t, err)
		for _, r := range list.APIResources {
			if !slices.Contains(r.Verbs, "list") || r.Kind == "Event" || r.Kind == "Lease" && version.Group == "coordination.k8s.io" {
				continue
			}
			found, err := objects.Resource(version.WithResource(r.Name)).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				continue // a kind that was just removed
			}
			for _, o := range found.Items {
				all[r.Kind+" "+o.Namespace+"/"+o.Name] = true
			}
		}
	}
	return all
}

func difference(before, after map[string]bool) (all []string) {
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if !before[name] {
			all = append(all, "left: "+name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if !after[name] {
			all = append(all, "taken away: "+name)
		}
	}
	return all
}

// kubelets imitates kubelets for the Pods that clean nodes: the Pods succeed, except on nodes
// that are away. It records in cleaned which nodes were cleaned.
func kubelets(ctx context.Context, c *cluster.Cluster, away func(node string) bool, cleaned map[string]string) {
	for ctx.Err() == nil {
		var pods corev1.PodList
		if c.Client.List(ctx, &pods, client.InNamespace(c.Namespace), client.HasLabels{labelCleans}) == nil {
			for i := range pods.Items {
				p := &pods.Items[i]
				if away(p.Spec.NodeName) {
					continue
				}
				if p.DeletionTimestamp != nil {
					c.Client.Delete(ctx, p, client.GracePeriodSeconds(0))
					continue
				}
				if p.Status.Phase != corev1.PodSucceeded {
					cleaned[p.Spec.NodeName] = p.Spec.Containers[0].Image + " " + strings.Join(p.Spec.Containers[0].Args, " ") + fmt.Sprint(len(p.Spec.Containers))
					p.Status.Phase = corev1.PodSucceeded
					c.Client.Status().Update(ctx, p)
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// After `isthmus install` and `isthmus uninstall`, the list of objects is the same as before,
// regardless of which object was deleted first.
func TestUninstallLeavesNothing(t *testing.T) {
	server, err := kubetest.Start(t.Context(), kubetest.Options{Name: "u", Controllers: true})
	must(t, err)
	defer server.Stop()
	file := t.TempDir() + "/kubeconfig"
	must(t, server.WriteKubeconfig(file))
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: file})
	for _, name := range []string{"n1", "n2"} {
		must(t, c.Client.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	}
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) { // controllers create objects in a new cluster
		var namespaces corev1.NamespaceList
		var accounts corev1.ServiceAccountList
		must(t, c.Client.List(t.Context(), &namespaces))
		must(t, c.Client.List(t.Context(), &accounts))
		if len(namespaces.Items) >= 4 && len(accounts.Items) == len(namespaces.Items) {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatal("the controllers do nothing")
		}
	}
	before := inventory(t, c)
	var reported clustertest.Lines
	install := func(values chart.Values) {
		t.Helper()
		values = chart.Merge(chart.Values{"networks": chart.Values{"podCIDR": "10.9.0.0/16"}}, values)
		must(t, install.Run(t.Context(), c, install.Options{Identity: v1alpha1.ClusterIdentity{ClusterName: "u"}, Version: "v1", Values: clustertest.WithServiceNetwork(t, c, values), Report: func(string) {}}))
		must(t, client.IgnoreAlreadyExists(c.Client.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{ // the Secret that a gateway creates
			Namespace: c.Namespace, Name: keysSecret, Labels: map[string]string{"app.kubernetes.io/managed-by": "isthmus"}}})))
	}
	peer := func() { // the objects of `isthmus peer`, with a manager that no longer runs
		t.Helper()
		tenant := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-p", Labels: map[string]string{
			v1alpha1.LabelTenantNamespace: "true", v1alpha1.LabelTenantClusterID: "P", cluster.LabelManagedBy: cluster.ManagedBy}}}
		must(t, c.Client.Create(t.Context(), tenant))
		p := peering.New("p", v1alpha1.ClusterIdentity{ClusterID: "P", ClusterName: "p"}, tenant.Name, "liqo-tenant-u")
		controllerutil.AddFinalizer(p, isthmus.FinalizerPeering)
		must(t, c.Client.Create(t.Context(), p))
	}
	// uninstall lets Run time out when Run reports a line that contains waitLine. If waitLine is
	// empty, Run never times out.
	uninstall := func(o Options, away func(string) bool, waitLine string) (map[string]string, error) {
		t.Helper()
		reported = nil
		up := clustertest.NewDeadline(t)
		o.Timeout, o.Report = clustertest.Patient, func(line string) {
			reported.Report(line)
			if waitLine != "" && strings.Contains(line, waitLine) {
				close(up.Up)
				waitLine = ""
			}
		}
		ctx, stop := context.WithCancel(t.Context())
		cleaned, ended := map[string]string{}, make(chan struct{})
		go func() { defer close(ended); kubelets(ctx, c, away, cleaned) }()
		err := Run(up, c, o)
		stop()
		<-ended
		return cleaned, err
	}
	nobody := func(string) bool { return false }
	same := func(what string) {
		t.Helper()
		if d := difference(before, inventory(t, c)); len(d) > 0 {
			t.Errorf("%s:\n%s", what, strings.Join(d, "\n"))
		}
	}

	install(chart.Values{"metrics": chart.Values{"enabled": true}, "image": chart.Values{"repository": "r", "tag": "t"}, "gateway": chart.Values{"hostNetwork": true}})
	// A second installation in another namespace would remove the rights of this one.
	other := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: file, Namespace: "elsewhere"})
	if err := Run(t.Context(), other, Options{Timeout: clustertest.Patient, Report: reported.Report}); err == nil || !strings.Contains(err.Error(), "already installed in namespace "+c.Namespace) || len(reported) > 0 {
		t.Errorf("in another namespace: %v\n%s", err, strings.Join(reported, "\n"))
	}
	peer()
	// A run that was interrupted after it removed the gateways.
	_, err = howToClean(t.Context(), c, Options{})
	must(t, err)
	must(t, c.Client.Delete(t.Context(), &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: deploy.GatewayServiceAccount}}))
	// While a node is away, Run cleans the other nodes and then fails. It finishes when the
	// node is back.
	cleaned, err := uninstall(Options{}, func(node string) bool { return node == "n2" }, "waiting until nodes are clean: n2")
	if first := reported[0]; !strings.Contains(first, "follow the default route") { // before any change
		t.Errorf("it begins with %q", first)
	}
	if !errors.Is(err, cluster.ErrNotReady) || cleaned["n1"] == "" || !strings.Contains(err.Error(), "n2") {
		t.Fatalf("with a node away: %v; cleaned %v\n%s", err, cleaned, strings.Join(reported, "\n"))
	}
	cleaned, err = uninstall(Options{}, nobody, "")
	if err != nil || !strings.HasPrefix(cleaned["n2"], "r:t route-agent --cleanup") || !strings.HasSuffix(cleaned["n2"], "2") { // it cleans up after a gateway, too
		t.Fatalf("when it is back: %v; cleaned %v\n%s", err, cleaned, strings.Join(reported, "\n"))
	}
	same("after an uninstallation in two runs")

	// The namespace is deleted first, while a peering exists.
	install(nil)
	peer()
	must(t, c.Client.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	for begin := time.Now(); !clustertest.Deleted(t, c, &corev1.Namespace{}, c.Namespace); time.Sleep(100 * time.Millisecond) {
		if time.Since(begin) > clustertest.Patient {
			t.Fatal("the namespace stays")
		}
	}
	cleaned, err = uninstall(Options{Image: "x:y"}, nobody, "")
	if err != nil || len(cleaned) != 2 || !strings.HasPrefix(cleaned["n1"], "x:y route-agent --cleanup") {
		t.Fatalf("after the namespace: %v; cleaned %v\n%s", err, cleaned, strings.Join(reported, "\n"))
	}
	same("after the namespace went first")

	if cleaned, err = uninstall(Options{}, nobody, ""); err != nil || len(cleaned) > 0 || !reported.Has("nothing to do") {
		t.Errorf("without an installation: %v; cleaned %v; %v", err, cleaned, reported)
	}

	// A namespace that Isthmus did not create stays unchanged. Our own namespace stays while a
	// foreign Pod is in it.
	for name, marks := range map[string]map[string]string{"foreign": nil, "ours with a foreign Pod": {cluster.LabelName: cluster.ManagedBy}} {
		must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace, Labels: marks}}))
		key := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: keysSecret, Labels: map[string]string{v1alpha1.LabelKey: "wireguard"}}}
		if marks == nil { // objects of a Liqo
			must(t, c.Client.Create(t.Context(), key))
		}
		install(nil)
		preshared := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: postquantum.SecretName, Labels: map[string]string{cluster.LabelManagedBy: cluster.ManagedBy}}}
		must(t, c.Client.Create(t.Context(), preshared))
		var theirs corev1.Namespace
		must(t, c.Client.Get(t.Context(), client.ObjectKey{Name: c.Namespace}, &theirs))
		if theirs.Labels[cluster.LabelName] != marks[cluster.LabelName] {
			t.Errorf("%s: install marks it: %v", name, theirs.Labels)
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "theirs"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		if marks != nil {
			must(t, c.Client.Create(t.Context(), pod))
		}
		if _, err = uninstall(Options{}, nobody, ""); err != nil || !reported.Has("stays, because") {
			t.Errorf("%s: %v; %v", name, err, reported)
		}
		err = c.Client.Get(t.Context(), client.ObjectKeyFromObject(key), &corev1.Secret{})
		must(t, client.IgnoreNotFound(err))
		if kept := err == nil; marks == nil && !kept || marks == nil != reported.Has("Secret "+c.Namespace+"/"+keysSecret+" stays") {
			t.Errorf("%s: the Secret with the key stays: %v; %v", name, kept, reported)
		}
		if err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(preshared), preshared); !apierrors.IsNotFound(err) {
			t.Errorf("%s: the preshared keys stay: %v", name, err)
		}
		must(t, c.Client.Get(t.Context(), client.ObjectKey{Name: c.Namespace}, &theirs))
		if theirs.DeletionTimestamp != nil {
			t.Errorf("%s: uninstall deletes it", name)
		}
		must(t, client.IgnoreNotFound(c.Client.Delete(t.Context(), pod, client.GracePeriodSeconds(0))))
		must(t, c.Client.Delete(t.Context(), &theirs))
		for begin := time.Now(); !clustertest.Deleted(t, c, &corev1.Namespace{}, c.Namespace); time.Sleep(100 * time.Millisecond) {
			if time.Since(begin) > clustertest.Patient {
				t.Fatalf("%s: the namespace is not deleted", name)
			}
		}
	}

	// Helm deletes the objects that it installed; everything else is removed before.
	install(nil)
	peer()
	manager := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: deploy.ManagerServiceAccount}}
	must(t, c.Client.Patch(t.Context(), manager, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"meta.helm.sh/release-name":"r"}}}`))))
	if _, err = uninstall(Options{}, nobody, ""); err == nil || !strings.Contains(err.Error(), "helm uninstall r") {
		t.Errorf("a release of Helm: %v", err)
	}
	if cleaned, err = uninstall(Options{BeforeHelm: true}, nobody, ""); err == nil || !strings.Contains(err.Error(), "nothing was changed") || len(cleaned) > 0 {
		t.Fatalf("the hook without Helm: %v; cleaned %v", err, cleaned)
	}
	release := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "sh.helm.release.v1.r.v1", Labels: map[string]string{"owner": "helm", "status": "uninstalling"}}}
	must(t, c.Client.Create(t.Context(), release))
	if cleaned, err = uninstall(Options{BeforeHelm: true}, nobody, ""); err != nil || len(cleaned) != 2 {
		t.Fatalf("before Helm: %v; cleaned %v\n%s", err, cleaned, strings.Join(reported, "\n"))
	}
	helms, err := chart.Objects(chart.Options{Namespace: c.Namespace, Values: chart.Values{"cluster": chart.Values{"name": "u"}, "namespace": chart.Values{"create": true}}})
	must(t, err)
	left := inventory(t, c)
	for _, kept := range []string{"CustomResourceDefinition /peerings.isthmus.net", "ServiceAccount " + c.Namespace + "/" + deploy.ManagerServiceAccount} {
		if !left[kept] {
			t.Errorf("%s is gone before Helm deletes it", kept)
		}
	}
	for _, u := range helms {
		must(t, client.IgnoreNotFound(c.Client.Delete(t.Context(), u)))
	}
	for begin := time.Now(); !clustertest.Deleted(t, c, &corev1.Namespace{}, c.Namespace) || len(difference(before, inventory(t, c))) > 0; time.Sleep(100 * time.Millisecond) {
		if time.Since(begin) > clustertest.Patient {
			break
		}
	}
	same("after Helm")
}
