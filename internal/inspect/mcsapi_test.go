package inspect

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
	"github.com/isthmus-net/isthmus/internal/coredns"
	"github.com/isthmus-net/isthmus/internal/corefile"
	"github.com/isthmus-net/isthmus/internal/install"
	"github.com/isthmus-net/isthmus/internal/uninstall"
)

// A nameServer is a cluster on an API server of its own, with CoreDNS as kubeadm configures it.
type nameServer struct {
	*cluster.Cluster
	t        *testing.T
	corefile string // the Corefile that kubeadm writes
	reported clustertest.Lines
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	text, err := os.ReadFile("../corefile/testdata/kubeadm.in")
	must(t, err)
	c, _ := clustertest.NewCluster(t, "named")
	n := &nameServer{Cluster: c, t: t, corefile: string(text)}
	system := metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "coredns", Labels: map[string]string{"k8s-app": "kube-dns"}}
	config := corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "coredns"}}}
	for _, o := range []client.Object{
		&corev1.ConfigMap{ObjectMeta: system, Data: map[string]string{coredns.KeyCorefile: n.corefile}},
		&appsv1.Deployment{ObjectMeta: system, Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: system.Labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: system.Labels}, Spec: corev1.PodSpec{
				ServiceAccountName: "names", Containers: []corev1.Container{{Name: "coredns", Image: "registry.k8s.io/coredns/coredns:v1.13.1"}},
				Volumes: []corev1.Volume{{Name: "config-volume", VolumeSource: config}},
			}},
		}},
	} {
		must(t, c.Client.Create(t.Context(), o))
	}
	return n
}

func (n *nameServer) install(o install.Options) error {
	n.reported = nil
	o.Identity, o.Report = v1alpha1.ClusterIdentity{ClusterName: "named"}, n.reported.Report
	o.Values = chart.Merge(clustertest.WithoutWorkloads, o.Values)
	return install.Run(n.t.Context(), n.Cluster, o)
}

func (n *nameServer) uninstall() {
	n.t.Helper()
	n.reported = nil
	must(n.t, uninstall.Run(n.t.Context(), n.Cluster, uninstall.Options{Timeout: clustertest.Patient, Report: n.reported.Report}))
}

// setCorefile writes another Corefile, as a person would.
func (n *nameServer) setCorefile(text string) {
	n.t.Helper()
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "coredns"}}
	must(n.t, n.Client.Get(n.t.Context(), client.ObjectKeyFromObject(m), m))
	m.Data[coredns.KeyCorefile] = text
	must(n.t, n.Client.Update(n.t.Context(), m))
}

// setImage changes the image of CoreDNS, as a person would.
func (n *nameServer) setImage(image string) {
	n.t.Helper()
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "coredns"}}
	must(n.t, n.Client.Patch(n.t.Context(), d, client.RawPatch(types.StrategicMergePatchType,
		[]byte(`{"spec":{"template":{"spec":{"containers":[{"name":"coredns","image":"`+image+`"}]}}}}`))))
}

// requireState fails the test unless the Corefile is text and three objects exist, or do not exist,
// as exist requires: the definition of exports, the definition of imports, and the right of
// CoreDNS.
func (n *nameServer) requireState(what, text string, exist ...bool) {
	n.t.Helper()
	var m corev1.ConfigMap
	must(n.t, n.Client.Get(n.t.Context(), client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "coredns"}, &m))
	if m.Data[coredns.KeyCorefile] != text {
		n.t.Errorf("%s: the Corefile is\n%s", what, m.Data[coredns.KeyCorefile])
	}
	deadline := time.Now().Add(clustertest.Patient)
	for i, name := range []string{"serviceexports.multicluster.x-k8s.io", "serviceimports.multicluster.x-k8s.io", "isthmus-coredns"} {
		var o client.Object = &rbacv1.ClusterRoleBinding{}
		if i < 2 {
			u := &unstructured.Unstructured{}
			u.SetGroupVersionKind(install.DefinitionKind)
			o = u
		}
		for clustertest.Deleted(n.t, n.Cluster, o, name) == exist[i] || o.GetDeletionTimestamp() != nil {
			if exist[i] || time.Now().After(deadline) {
				n.t.Fatalf("%s: %s is there: %v\n%+v\n%s", what, name, !exist[i], o, strings.Join(n.reported, "\n"))
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
}

var (
	servicesOn  = chart.Values{"services": chart.Values{"enabled": true}}
	servicesOff = chart.Values{"services": chart.Values{"enabled": false}}
)

func TestServiceNamesResolveUntilTheFeatureIsDisabled(t *testing.T) {
	t.Parallel()
	n := newNameServer(t)
	with, err := corefile.Add(n.corefile)
	must(t, err)

	// Without --configure-dns, a person must edit the Corefile; with it, install does.
	must(t, n.install(install.Options{Values: servicesOn}))
	n.requireState("without --configure-dns", n.corefile, true, true, true)
	if h, _, err := namesHop(t.Context(), n.Cluster); err != nil || h.State != health.Broken || h.Reason != reasonNoZone || !strings.Contains(h.Text, "--configure-dns") {
		t.Errorf("%+v, %v", h, err)
	}
	if !n.reported.Has(corefile.Lines) || !strings.Contains(corefile.Lines, "disable denial") {
		t.Errorf("it does not say what to add: %v", n.reported)
	}
	var binding rbacv1.ClusterRoleBinding
	must(t, n.Client.Get(t.Context(), client.ObjectKey{Name: "isthmus-coredns"}, &binding))
	if s := binding.Subjects; len(s) != 1 || s[0].Name != "names" || s[0].Namespace != metav1.NamespaceSystem {
		t.Errorf("the right is of %v", s)
	}
	must(t, n.install(install.Options{ConfigureDNS: new(true)}))
	n.requireState("with --configure-dns", with, true, true, true)
	if !n.reported.Has("added to Corefile in ConfigMap kube-system/coredns; CoreDNS reads it within two minutes") {
		t.Errorf("it says %v", n.reported)
	}

	if h, notAsked, err := namesHop(t.Context(), n.Cluster); err != nil || h.State != health.Works || !strings.HasSuffix(h.Text, "answers were not checked") || !strings.Contains(notAsked, "none of its Pods is ready") {
		t.Errorf("%+v, %q, %v", h, notAsked, err)
	}

	// Later runs keep the choices about services and --configure-dns.
	for _, o := range []install.Options{{}, {ConfigureDNS: new(true)}} {
		must(t, n.install(o))
		n.requireState("the second time", with, true, true, true)
		for _, line := range n.reported {
			if !strings.HasSuffix(line, " unchanged") && !strings.Contains(line, "as before; --without-workloads") {
				t.Errorf("the second time: %s", line)
			}
		}
	}
	must(t, n.install(install.Options{ConfigureDNS: new(false)}))
	n.requireState("with --configure-dns=false", n.corefile, true, true, true)

	must(t, n.install(install.Options{ConfigureDNS: new(true)}))
	must(t, n.install(install.Options{Values: servicesOff}))
	n.requireState("switched off", n.corefile, false, false, false)
	if err := n.install(install.Options{ConfigureDNS: new(true)}); err == nil || !strings.Contains(err.Error(), "needs --services") {
		t.Errorf("--configure-dns alone: %v", err)
	}
	must(t, n.install(install.Options{Values: servicesOn, ConfigureDNS: new(true)}))
	n.requireState("again", with, true, true, true)
	n.uninstall()
	n.requireState("uninstalled", n.corefile, false, false, false)

	// If a person has added the zone by hand but not changed the cache, --configure-dns changes the
	// cache.
	zone := strings.Replace(strings.ReplaceAll(with, " # added by isthmus install, with the zone", ""), "denial cluster.local clusterset.local", "denial cluster.local", 1)
	n.setCorefile(zone)
	must(t, n.install(install.Options{Values: servicesOn}))
	if n.requireState("by hand", zone, true, true, true); n.reported.Has("CoreDNS does not answer") {
		t.Errorf("it says %v", n.reported)
	}
	must(t, n.install(install.Options{ConfigureDNS: new(true)}))
	n.requireState("cache", strings.Replace(zone, "denial cluster.local", "denial cluster.local clusterset.local # added by isthmus install, with the zone", 1), true, true, true)
	n.uninstall()
	n.requireState("cache, uninstalled", zone, false, true, true)
}

// Objects and changes of other clients are kept, and so is everything that they need.
func TestUninstallKeepsForeignObjects(t *testing.T) {
	t.Parallel()
	n := newNameServer(t)
	must(t, n.install(install.Options{Values: servicesOn, ConfigureDNS: new(true)}))
	export := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "multicluster.x-k8s.io/v1beta1", "kind": "ServiceExport", "metadata": map[string]any{"namespace": "default", "name": "shop"}}}
	must(t, n.Client.Create(t.Context(), export))
	n.uninstall()
	n.requireState("with an export", n.corefile, true, false, false)
	if !n.reported.Has("serviceexports.multicluster.x-k8s.io stays: it has ServiceExports that Isthmus did not create: default/shop") {
		t.Errorf("it says %v", n.reported)
	}
	must(t, n.Client.Delete(t.Context(), export))

	// The manager's objects are removed, and another implementation's import stays.
	must(t, n.install(install.Options{Values: servicesOn}))
	mine := map[string]string{isthmus.LabelService: "shop"}
	imports := func(name string, labels map[string]string) *unstructured.Unstructured {
		u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "multicluster.x-k8s.io/v1beta1", "kind": "ServiceImport",
			"spec": map[string]any{"type": "ClusterSetIP", "ports": []any{}}}}
		u.SetNamespace("default")
		u.SetName(name)
		u.SetLabels(labels)
		return u
	}
	derived := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "derived-x", Labels: mine}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	theirs := imports("theirs", nil)
	for _, o := range []client.Object{imports("shop", mine), derived, theirs} {
		must(t, n.Client.Create(t.Context(), o))
	}
	n.uninstall()
	n.requireState("with two imports", n.corefile, false, true, false)
	if !n.reported.Has("stays: it has ServiceImports that Isthmus did not create: default/theirs;") {
		t.Errorf("it says %v", n.reported)
	}
	if err := n.Client.Get(t.Context(), client.ObjectKeyFromObject(derived), derived); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the derived Service stays: %v", err)
	}
	must(t, n.Client.Delete(t.Context(), theirs))

	// A zone that was added by hand is not removed. CoreDNS then still needs its right and the
	// definition.
	byHand, err := corefile.Add(n.corefile)
	must(t, err)
	byHand = strings.ReplaceAll(byHand, " # added by isthmus install, with the zone", "")
	must(t, n.install(install.Options{Values: servicesOn}))
	n.setCorefile(byHand)
	n.uninstall()
	n.requireState("by hand", byHand, false, true, true)
	if !n.reported.Has("ClusterRoleBinding isthmus-coredns stays: the Corefile in ConfigMap kube-system/coredns has the option multicluster") {
		t.Errorf("it says %v", n.reported)
	}
	n.setCorefile(n.corefile)
	must(t, n.install(install.Options{Values: servicesOn}))
	n.uninstall()
	n.requireState("no more", n.corefile, false, false, false)

	// Another client also applies the definition.
	must(t, n.install(install.Options{Values: servicesOn}))
	definitions, err := install.ServiceDefinitions()
	must(t, err)
	must(t, n.Client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(definitions[1].DeepCopy()), client.FieldOwner("another"), client.ForceOwnership))
	n.uninstall()
	n.requireState("applied by two", n.corefile, false, true, false)
	if !n.reported.Has("serviceimports.multicluster.x-k8s.io stays: another manages fields of it as well") {
		t.Errorf("it says %v", n.reported)
	}
}

func TestForeignServiceDefinitionsAreKept(t *testing.T) {
	t.Parallel()
	n := newNameServer(t)
	definitions, err := install.ServiceDefinitions()
	must(t, err)
	theirs := definitions[1].DeepCopy()
	theirs.SetLabels(nil)
	must(t, n.Client.Create(t.Context(), theirs))
	must(t, n.install(install.Options{Values: servicesOn}))
	if !n.reported.Has("serviceimports.multicluster.x-k8s.io already exists and stays unchanged") {
		t.Errorf("it says %v", n.reported)
	}
	n.uninstall()
	n.requireState("uninstalled", n.corefile, false, true, false)

	// A definition that is too old is an error, before anything is changed.
	must(t, n.Client.Get(t.Context(), client.ObjectKeyFromObject(theirs), theirs))
	versions, _, err := unstructured.NestedSlice(theirs.Object, "spec", "versions")
	must(t, err)
	for _, v := range versions {
		if v := v.(map[string]any); v["name"] == "v1beta1" {
			v["served"] = false
		}
	}
	must(t, unstructured.SetNestedSlice(theirs.Object, versions, "spec", "versions"))
	must(t, n.Client.Update(t.Context(), theirs))
	if err := n.install(install.Options{Values: servicesOn}); err == nil || !strings.Contains(err.Error(), "does not serve v1beta1") {
		t.Errorf("too old: %v", err)
	}
	n.requireState("too old", n.corefile, false, true, false)
}

// If CoreDNS would reject the zone, its Corefile is not changed.
func TestConfigureDNSRefusesUnsafeCorefiles(t *testing.T) {
	t.Parallel()
	n := newNameServer(t)
	strange := strings.Replace(n.corefile, "cluster.local in-addr.arpa ip6.arpa", "", 1)
	for i, why := range []struct{ image, text, want string }{
		{"coredns/coredns:1.11.3", n.corefile, "CoreDNS 1.11.3 is too old for clusterset.local: want 1.12.2 or later"},
		{"eks/coredns:v1.11.4-eksbuild.2", n.corefile, "CoreDNS 1.11.4 is too old"},
		{"localhost:5000/coredns@sha256:" + strings.Repeat("a", 64), n.corefile, "does not show the version of CoreDNS"},
		{"rancher/mirrored-coredns-coredns:1.12.3", strange, "names no zones"},
	} {
		n.setImage(why.image)
		n.setCorefile(why.text)
		err := n.install(install.Options{Values: servicesOn, ConfigureDNS: new(true)})
		if err == nil || !strings.Contains(err.Error(), why.want) || !strings.Contains(err.Error(), "nothing was changed") || !clustertest.Deleted(t, n.Cluster, &corev1.Namespace{}, n.Namespace) {
			t.Errorf("%d: %v; want %q", i, err, why.want)
		}
		n.requireState(fmt.Sprint(i), why.text, false, false, false)
		if h, _, err := namesHop(t.Context(), n.Cluster); err != nil || (h.Reason == reasonDNSTooOld) != (why.text == n.corefile) || h.State == health.Works || sharesServices(t.Context(), n.Cluster) {
			t.Errorf("%d: %+v, %v", i, h, err)
		}
	}
	must(t, n.install(install.Options{Values: servicesOn}))
	if !n.reported.Has("CoreDNS does not answer for clusterset.local: Corefile in ConfigMap kube-system/coredns: line 7: plugin kubernetes names no zones") {
		t.Errorf("it says %v", n.reported)
	}
	n.requireState("without --configure-dns", strange, true, true, true)

	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "coredns"}}
	must(t, n.Client.Delete(t.Context(), d))
	if err := n.install(install.Options{ConfigureDNS: new(true)}); err == nil || !strings.Contains(err.Error(), "k8s-app=kube-dns") {
		t.Errorf("without CoreDNS: %v", err)
	}
	if h, _, err := namesHop(t.Context(), n.Cluster); err != nil || h.State != health.Unknown || !sharesServices(t.Context(), n.Cluster) {
		t.Errorf("%+v, %v", h, err)
	}
	must(t, n.install(install.Options{}))
	if !n.reported.Has("names in clusterset.local need CoreDNS 1.12.2 or later") {
		t.Errorf("it says %v", n.reported)
	}
	n.uninstall()
	n.requireState("uninstalled", strange, false, false, false)
}
