package install

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/expect"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

var must = expect.NoError

// The API server validates every object that the chart can create, and adds its defaults.
func TestInstallingTwiceChangesNothing(t *testing.T) {
	t.Parallel()
	c, kubeconfig := clustertest.NewCluster(t, "twice")
	options := Options{
		Identity: v1alpha1.ClusterIdentity{ClusterName: "twice"}, Version: "v1",
		Values: chart.Values{
			"networks": chart.Values{"podCIDR": "10.9.0.0/16"}, "networkPolicy": chart.Values{"enabled": true},
			"gateway": chart.Values{"replicas": 3.0, "port": 7000.0, "tunnels": 4.0, "service": chart.Values{"type": "LoadBalancer", "externalTrafficPolicy": "Local"}},
		},
	}
	options.Values = clustertest.WithServiceNetwork(t, c, options.Values)
	var first, second clustertest.Lines
	options.Report = first.Report

	// In a cluster with Liqo, nothing is written.
	foreign := foreignClusterDefinition()
	must(t, c.Client.Create(t.Context(), foreign))
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if is, err := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: kubeconfig}).IsLiqo(); err == nil && is {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatal("the API server does not serve ForeignClusters")
		}
	}
	c = clustertest.ConnectTo(t, cluster.Access{Kubeconfig: kubeconfig, Namespace: "twice"}) // a client reads the list of kinds only once
	if err := Run(t.Context(), c, options); !errors.Is(err, cluster.ErrLiqo) || !strings.Contains(err.Error(), "--set crds.liqo=false") || !clustertest.Deleted(t, c, &corev1.Namespace{}, "twice") {
		t.Errorf("over a Liqo: %v", err)
	}
	for _, key := range []string{"install", "liqo"} {
		must(t, keepLiqo(c, chart.Values{"crds": chart.Values{key: false}}))
	}
	must(t, c.Client.Delete(t.Context(), foreign))
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		c = clustertest.ConnectTo(t, cluster.Access{Kubeconfig: kubeconfig, Namespace: "twice"})
		if is, err := c.IsLiqo(); err == nil && !is {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatal("the API server still serves ForeignClusters")
		}
	}

	refusesBeforeItWrites(t, c, options)
	must(t, Run(t.Context(), c, options))
	for _, want := range []string{"Namespace twice created", "Deployment twice/isthmus-manager created", "DaemonSet twice/isthmus-route-agent created", "PodDisruptionBudget twice/isthmus-gateway created"} {
		if !first.Has(want) {
			t.Errorf("no %q in\n%s", want, strings.Join(first, "\n"))
		}
	}
	// Chosen values are remembered.
	options.Values, options.Identity, options.Report = nil, v1alpha1.ClusterIdentity{}, second.Report
	must(t, Run(t.Context(), c, options))
	for _, line := range second {
		if !strings.HasSuffix(line, " unchanged") && !strings.Contains(line, ", from ") {
			t.Errorf("the second time: %s", line)
		}
	}
	var gateway appsv1.Deployment
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: "isthmus-gateway"}, &gateway))
	if *gateway.Spec.Replicas != 3 {
		t.Errorf("%d gateways; want the 3 of the first time", *gateway.Spec.Replicas)
	}
	// Values that the chart or the API server rejects are not remembered.
	for nodePort, want := range map[float64]string{99999: "value gateway.service.nodePort: want a number from 0 to 65535", 20000: "nodePort"} {
		options.Values = chart.Values{"gateway": chart.Values{"service": chart.Values{"nodePort": nodePort}}}
		if err := Run(t.Context(), c, options); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("nodePort %v: %v", nodePort, err)
		}
	}
	options.Values = nil
	must(t, Run(t.Context(), c, options))

	// A remembered value under a former name keeps its meaning.
	remembered := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "twice", Name: ConfigMap}}
	must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(remembered), remembered))
	remembered.Data[keyValues] += "routeAgent: {maxUnavailable: 3}\n"
	must(t, c.Client.Update(t.Context(), remembered))
	must(t, Run(t.Context(), c, options))
	var agents appsv1.DaemonSet
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: "isthmus-route-agent"}, &agents))
	if surge := agents.Spec.UpdateStrategy.RollingUpdate.MaxSurge; surge.IntValue() != 3 {
		t.Errorf("on %v nodes at a time; want the 3 of before", surge)
	}
	// No component runs here, and Run reports that.
	options.Wait, options.Version = time.Second, "v2"
	err := Run(t.Context(), c, options)
	if !errors.Is(err, cluster.ErrNotReady) || !strings.Contains(err.Error(), "everything is applied") || !strings.Contains(err.Error(), "twice/isthmus-") {
		t.Errorf("without nodes: %v", err)
	}
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: "isthmus-gateway"}, &gateway))
	if got := gateway.Spec.Template.Spec.Containers[0].Image; got != "ghcr.io/isthmus-net/isthmus:v2" {
		t.Errorf("after an upgrade the image is %s", got)
	}

	// Gateways leave the networks of their nodes only when all agents are new, which never
	// happens here.
	onHost := func(want bool) {
		t.Helper()
		must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(&gateway), &gateway))
		if gateway.Spec.Template.Spec.HostNetwork != want {
			t.Errorf("gateways in the networks of their nodes: %v", !want)
		}
	}
	for _, tc := range []struct {
		chosen, want bool
		wait         time.Duration
	}{{true, true, 0}, {false, true, time.Second}, {false, false, 0}} {
		options.Wait, options.Values = tc.wait, chart.Values{"gateway": chart.Values{"hostNetwork": tc.chosen}}
		err := Run(t.Context(), c, options)
		if tc.wait == 0 && err != nil || tc.wait > 0 && (err == nil || !strings.Contains(err.Error(), "the gateways stay on the host network until each node has the new route agent")) {
			t.Errorf("hostNetwork=%v: %v", tc.chosen, err)
		}
		onHost(tc.want)
	}

	// A second installation would remove the rights of this one.
	reported := clustertest.Lines{}
	other := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: kubeconfig, Namespace: "elsewhere"})
	err = Run(t.Context(), other, Options{Identity: v1alpha1.ClusterIdentity{ClusterName: "x"}, Values: clustertest.WithoutWorkloads, Report: reported.Report})
	if err == nil || !strings.Contains(err.Error(), "already installed in namespace twice") || len(reported) > 0 {
		t.Errorf("in another namespace: %v\n%s", err, strings.Join(reported, "\n"))
	}

	// If an installation does not remember its values, a new run still finds them.
	service := func() *corev1.Service {
		t.Helper()
		var s corev1.Service
		must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: "isthmus-gateway"}, &s))
		return &s
	}
	forget := func() {
		t.Helper()
		must(t, c.Client.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "twice", Name: ConfigMap}}))
	}
	install := func(values chart.Values) error {
		t.Helper()
		reported = nil
		return Run(t.Context(), c, Options{Version: "v2", Values: values, Report: reported.Report})
	}
	before := service()
	forget()
	must(t, install(clustertest.WithServiceNetwork(t, c, chart.Values{"networks": chart.Values{"podCIDR": "10.9.0.0/16"}})))
	if after := service(); !clustertest.SameJSON(before.Spec, after.Spec) || !reported.Has("stays LoadBalancer with 4 UDP ports from 7000 up") {
		t.Errorf("the Service was\n%+v\nand is\n%+v\n%s", before.Spec, after.Spec, strings.Join(reported, "\n"))
	}
	must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(&gateway), &gateway))
	if args := gateway.Spec.Template.Spec.Containers[0].Args; *gateway.Spec.Replicas != 3 || !slices.Contains(args, "--port=7000") || !slices.Contains(args, "--tunnels=4") {
		t.Errorf("%d gateways with %v", *gateway.Spec.Replicas, args)
	}

	// Run reports objects that it cannot replace before it writes anything.
	refused := func(want string) {
		t.Helper()
		if err := install(nil); err == nil || !strings.Contains(err.Error(), want) || reported.Has("changed") || reported.Has("created") {
			t.Errorf("%v; want %s\n%s", err, want, strings.Join(reported, "\n"))
		}
	}
	labelled := service().DeepCopy()
	labelled.ObjectMeta = metav1.ObjectMeta{Namespace: "twice", Name: "by-hand", Labels: labelled.Labels}
	labelled.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, Ports: []corev1.ServicePort{{Port: 5871, Protocol: corev1.ProtocolUDP}}}
	must(t, c.Client.Create(t.Context(), labelled))
	refused("Service twice/by-hand already has the label net.liqo.io/gateway")
	must(t, c.Client.Delete(t.Context(), labelled))
	must(t, c.Client.Delete(t.Context(), &gateway))
	byHand := gateway.DeepCopy()
	byHand.ObjectMeta = metav1.ObjectMeta{Namespace: "twice", Name: "mine"}
	must(t, c.Client.Create(t.Context(), byHand))
	refused("Deployment twice/mine already runs with ServiceAccount isthmus-gateway")
	must(t, c.Client.Delete(t.Context(), byHand))
	byHand.ObjectMeta = metav1.ObjectMeta{Namespace: "twice", Name: "isthmus-gateway"}
	byHand.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"mine": "yes"}}
	byHand.Spec.Template.Labels = byHand.Spec.Selector.MatchLabels
	must(t, c.Client.Create(t.Context(), byHand))
	refused("Deployment twice/isthmus-gateway: the immutable spec.selector is map[matchLabels:map[mine:yes]]")

	// If an installation has no workloads, later runs create none.
	must(t, c.Client.Delete(t.Context(), byHand))
	must(t, c.Client.Delete(t.Context(), &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "twice", Name: "isthmus-manager"}}))
	must(t, c.Client.Delete(t.Context(), &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "twice", Name: "isthmus-route-agent"}}))
	forget()
	for range 2 {
		must(t, install(nil))
		if reported.Has("Deployment") || reported.Has("DaemonSet") || !reported.Has("without the components, as before") || !reported.Has("Service twice/isthmus-gateway unchanged") {
			t.Errorf("it was without components:\n%s", strings.Join(reported, "\n"))
		}
	}
}

// foreignClusterDefinition returns the definition by which Liqo is recognized.
func foreignClusterDefinition() *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": "foreignclusters.discovery.liqo.io"},
		"spec": map[string]any{
			"group": cluster.ForeignClusters.Group, "scope": "Cluster", "names": map[string]any{"kind": cluster.ForeignClusters.Kind, "plural": "foreignclusters"},
			"versions": []any{map[string]any{"name": "v1alpha1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}}},
		},
	}}
}

// With one running gateway the installation works. If there is no node for the second gateway,
// that is only a warning. A gateway that fails is an error.
func TestAGatewayWithoutASuitableNodeCausesAWarning(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: "one-node"})
	must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	labels := map[string]string{"app": "g"}
	container := []corev1.Container{{Name: "g", Image: "none"}}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "g"}, Spec: appsv1.DeploymentSpec{
		Replicas: new(int32(2)), Paused: true, Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: container}}}}
	must(t, c.Client.Create(t.Context(), d))
	d.Status = appsv1.DeploymentStatus{ObservedGeneration: 99, Replicas: 2, UpdatedReplicas: 2, ReadyReplicas: 1, AvailableReplicas: 1}
	must(t, c.Client.Status().Update(t.Context(), d))
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "g-2", Labels: labels},
		Spec: corev1.PodSpec{Containers: container, AutomountServiceAccountToken: new(false), ServiceAccountName: "default"}}
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) { // the ServiceAccount is created a moment after its namespace
		err := c.Client.Create(t.Context(), p)
		if err == nil {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatal(err)
		}
	}
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("Deployment"))
	u.SetNamespace(c.Namespace)
	u.SetName("g")
	wait, warning, err := waitsFor(t.Context(), c, u)
	if err != nil || warning != "" || wait != "1 of 2 ready" {
		t.Errorf("while the second starts: waits for %q, warns of %q, %v", wait, warning, err)
	}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/1 nodes are available"}}
	must(t, c.Client.Status().Update(t.Context(), p))
	wait, warning, err = waitsFor(t.Context(), c, u)
	if err != nil || wait != "" || warning != "1 of 2 ready; Pod g-2: 0/1 nodes are available" {
		t.Errorf("when no node has room: waits for %q, warns of %q, %v", wait, warning, err)
	}
}

// Not parallel, because all tests share the definitions.
func TestAnOlderProgramDoesNotReplaceNewerDefinitions(t *testing.T) {
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B})
	crd := &unstructured.Unstructured{}
	crd.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	crd.SetName("peerings.isthmus.net")
	annotate := func(value string) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%s}}}`, annotationSchema, value)
		must(t, c.Client.Patch(t.Context(), crd, client.RawPatch(types.MergePatchType, patch)))
	}
	for _, tc := range []struct {
		existing string
		want     string
	}{
		{`"999999"`, "peerings.isthmus.net belongs to a newer release (schema 999999, not "},
		{`"0"`, "peerings.isthmus.net changed"},
		{`null`, "peerings.isthmus.net changed"}, // a definition of an old release, which has no number
	} {
		annotate(tc.existing)
		var reported clustertest.Lines
		must(t, Run(t.Context(), c, Options{Report: reported.Report}))
		if !reported.Has(tc.want) {
			t.Errorf("schema %s: no %q in\n%s", tc.existing, tc.want, strings.Join(reported, "\n"))
		}
	}
}

func TestInstallRemovesDisabledParts(t *testing.T) {
	t.Parallel()
	c, _ := clustertest.NewCluster(t, "twice")
	options := Options{Identity: v1alpha1.ClusterIdentity{ClusterName: "twice"}, Version: "v1", Values: chart.Values{
		"networks": chart.Values{"podCIDR": "10.9.0.0/16"}, "networkPolicy": chart.Values{"enabled": true},
		"metrics": chart.Values{"enabled": true, "dashboard": chart.Values{"enabled": true}},
	}}
	options.Values = clustertest.WithServiceNetwork(t, c, options.Values)
	var reported clustertest.Lines
	options.Report = func(line string) { reported.Report(line) }
	install := func(port float64) string {
		t.Helper()
		reported = nil
		options.Values = chart.Merge(options.Values, chart.Values{"ipam": chart.Values{"port": port}})
		must(t, Run(t.Context(), c, options))
		var deleted []string
		for _, line := range reported {
			if strings.HasSuffix(line, " deleted") {
				deleted = append(deleted, strings.TrimSuffix(strings.TrimPrefix(line, c.String()+": "), " deleted"))
			}
		}
		slices.Sort(deleted)
		return strings.Join(deleted, ", ")
	}
	if did := install(6000); did != "" {
		t.Errorf("the first time it deletes %s", did)
	}
	if did := install(7000); did != "" {
		t.Errorf("for another port it deletes %s", did)
	}
	const want = "EndpointSlice twice/isthmus-ipam, NetworkPolicy twice/isthmus-ipam, Role twice/isthmus-ipam, RoleBinding twice/isthmus-ipam, " +
		"Service twice/isthmus-ipam, ValidatingAdmissionPolicy isthmus-ipam, ValidatingAdmissionPolicyBinding isthmus-ipam"
	if did := install(0); did != want {
		t.Errorf("without the IPAM's Service it deletes %s\nwant %s", did, want)
	}
	if did := install(0); did != "" {
		t.Errorf("again it deletes %s", did)
	}
	if did := install(6000); did != "NetworkPolicy twice/isthmus-manager" {
		t.Errorf("with it again it deletes %s", did)
	}
	off := chart.Values{"enabled": false}
	options.Values = chart.Merge(options.Values, chart.Values{"networkPolicy": off, "metrics": chart.Values{"enabled": false, "dashboard": off}})
	const without = "ClusterRole isthmus-metrics-auth, ClusterRole isthmus-metrics-reader, ClusterRoleBinding isthmus-metrics-auth, " +
		"ConfigMap twice/isthmus-dashboard, NetworkPolicy twice/isthmus-gateway, NetworkPolicy twice/isthmus-ipam"
	if did := install(6000); did != without {
		t.Errorf("without metrics and NetworkPolicies it deletes %s\nwant %s", did, without)
	}
	// Other clients may have created objects with our names, from our manifests.
	foreign := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "isthmus-metrics-reader"}}
	must(t, c.Client.Create(t.Context(), foreign))
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "isthmus-ipam"}}
	must(t, c.Client.Create(t.Context(), policy, client.FieldOwner(cluster.FieldManager))) // a policy is not ours just because it has the same name
	if did := install(0); did != strings.Replace(want, "NetworkPolicy twice/isthmus-ipam, ", "", 1) {
		t.Errorf("beside what others made it deletes %s", did)
	}
	for _, o := range []client.Object{foreign, policy} {
		must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o))
	}
	// The installation succeeds even if the person may not read such objects.
	c.Client = mayNotGet{c.Client, "NetworkPolicy"}
	if did := install(0); did != "" {
		t.Errorf("without the right to get NetworkPolicies it deletes %s", did)
	}
	if last := reported[len(reported)-1]; !strings.Contains(last, "you are not allowed to get") || !strings.Contains(last, "NetworkPolicy twice/isthmus-ipam") {
		t.Errorf("without the right to get NetworkPolicies it says last: %s", last)
	}
}

// mayNotGet is a client that may get all objects except those of one kind.
type mayNotGet struct {
	client.Client
	kind string
}

func (m mayNotGet) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if o.GetObjectKind().GroupVersionKind().Kind == m.kind {
		return apierrors.NewForbidden(schema.GroupResource{Resource: m.kind}, key.Name, nil)
	}
	return m.Client.Get(ctx, key, o, opts...)
}

// Prune and Uninstall look for every object that the values can turn on.
func TestPruneCoversEveryOptionalPart(t *testing.T) {
	defaults, err := chart.Defaults()
	must(t, err)
	var allOn func(chart.Values)
	allOn = func(values chart.Values) {
		for key, value := range values {
			if more, is := value.(chart.Values); is {
				allOn(more)
			} else if key == "enabled" {
				values[key] = true
			}
		}
	}
	allOn(defaults)
	options := chart.Options{Namespace: "x", Values: defaults}
	chart.Set(defaults, "x", "cluster", "name")
	c := &cluster.Cluster{}
	all, err := WithEveryPart(c, func(on chart.Values) chart.Options {
		return chart.Options{Namespace: "x", Values: chart.Merge(chart.Values{"cluster": chart.Values{"name": "x"}}, on)}
	})
	must(t, err)
	for _, port := range []float64{0, 7000} {
		chart.Set(defaults, port, "ipam", "port")
		some, err := chart.Objects(options)
		must(t, err)
		for _, u := range some {
			if !slices.ContainsFunc(all, func(o *unstructured.Unstructured) bool { return cluster.Describe(o) == cluster.Describe(u) }) {
				t.Errorf("nobody looks for %s, which the chart can make", cluster.Describe(u))
			}
		}
	}
}

func TestInstallRefusesToChangeAHelmRelease(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: "of-helm"})
	must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	must(t, c.Client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{
		Namespace: c.Namespace, Name: "isthmus-manager", Annotations: map[string]string{"meta.helm.sh/release-name": "mine"}}}))
	var reported clustertest.Lines
	err := Run(t.Context(), c, Options{Identity: v1alpha1.ClusterIdentity{ClusterName: "h"}, Report: reported.Report})
	if err == nil || !strings.Contains(err.Error(), "`helm upgrade mine`") || len(reported) > 0 {
		t.Errorf("%v; said %v", err, reported)
	}
}

// The ConfigMap of a Helm release has no ID unless somebody chose one.
func TestTheDefaultClusterIDIsTheUIDOfKubeSystem(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: "no-id"})
	must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	must(t, c.Client.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: cluster.IdentityConfigMap, Labels: map[string]string{cluster.LabelName: cluster.IdentityLabelValue}},
		Data:       map[string]string{cluster.KeyClusterName: "no-id"}}))
	must(t, c.Identify(t.Context()))
	if c.Identity.ClusterID != c.UID || c.UID == "" {
		t.Errorf("it is %v; the UID is %q", c.Identity, c.UID)
	}
}

func TestPodCIDRIsReadFromTheCluster(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A})
	nodes := []corev1.Node{
		{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: corev1.NodeSpec{PodCIDR: "10.50.1.0/24", PodCIDRs: []string{"10.50.1.0/24", "fd00:1::/64"}}},
		{ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Spec: corev1.NodeSpec{PodCIDR: "10.50.9.0/24"}},
	}
	_, _, err := podCIDR(t.Context(), c, nodes, nil)
	if err == nil || !strings.Contains(err.Error(), "repeat with --pod-cidr NETWORK") || !strings.Contains(err.Error(), "the network of all pods may be 10.50.0.0/16") {
		t.Errorf("when nothing says it: %v", err)
	}
	must(t, client.IgnoreAlreadyExists(c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "kube-flannel"}})))
	must(t, c.Client.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-flannel", Name: "kube-flannel-cfg"},
		Data: map[string]string{"net-conf.json": `{"Network": "10.50.0.0/16", "Backend": {"Type": "vxlan"}}`}}))
	pods := []address{{"x/in", netip.MustParseAddr("10.50.1.7")}}
	p, source, err := podCIDR(t.Context(), c, nodes, pods)
	must(t, err)
	if p != netip.MustParsePrefix("10.50.0.0/16") || !strings.Contains(source, "kube-flannel-cfg") {
		t.Errorf("%v from %s", p, source)
	}
	// The CNI need not use the network with which the cluster was created. A CNI with its own
	// IPAM does not use the podCIDRs of Nodes.
	must(t, c.Client.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kubeadm-config"},
		Data: map[string]string{"ClusterConfiguration": "networking: {podSubnet: 10.0.0.0/8}"}}))
	must(t, c.Client.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "cilium-config"},
		Data: map[string]string{"ipam": "cluster-pool", "cluster-pool-ipv4-cidr": "10.77.0.0/16"}}))
	for network, pod := range map[string]string{"10.77.0.0/16": "10.77.3.4", "10.50.0.0/16": "10.50.1.7", "10.0.0.0/8": "10.99.0.1"} {
		p, source, err := podCIDR(t.Context(), c, nodes, []address{{"x/y", netip.MustParseAddr(pod)}})
		must(t, err)
		if p.String() != network {
			t.Errorf("with a Pod at %s: %v from %s, want %s", pod, p, source, network)
		}
	}
	for _, name := range []string{"kubeadm-config", "cilium-config"} {
		must(t, c.Client.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name}}))
	}
	// A network that does not contain all Pods and nodes is rejected.
	outside := []address{pods[0], {"x/out", netip.MustParseAddr("10.7.1.7")}}
	if _, _, err = podCIDR(t.Context(), c, nodes, outside); err == nil || !strings.Contains(err.Error(), ": 10.50.0.0/16 does not contain 10.7.1.7 of Pod x/out") || !strings.Contains(err.Error(), "repeat with --pod-cidr NETWORK") {
		t.Errorf("when a Pod is elsewhere: %v", err)
	}
	nodes[1].Spec.PodCIDR = "10.51.9.0/24"
	if _, _, err = podCIDR(t.Context(), c, nodes, pods); err == nil || !strings.Contains(err.Error(), ": 10.50.0.0/16 does not contain 10.51.9.0/24 of a node") {
		t.Errorf("when a node is elsewhere: %v", err)
	}
}

// refusesBeforeItWrites checks that an installation changes nothing in the cluster if it cannot
// work, or cannot work with the chosen values.
func refusesBeforeItWrites(t *testing.T, c *cluster.Cluster, o Options) {
	t.Helper()
	var reported clustertest.Lines
	o.Report = reported.Report
	for _, tc := range []struct {
		networks []string
		want     string
	}{
		{[]string{"fd00:1::/64"}, "only IPv6 addresses"},
		{[]string{"10.50.1.0/24", "fd00:1::/64"}, "PodCIDR 10.9.0.0/16: no Pod has an address in it, and every node's podCIDR lies outside, such as 10.50.1.0/24; correct --pod-cidr, or use it anyway with --force"},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: corev1.NodeSpec{PodCIDR: tc.networks[0], PodCIDRs: tc.networks}}
		must(t, c.Client.Create(t.Context(), node))
		if err := Run(t.Context(), c, o); err == nil || !strings.Contains(err.Error(), tc.want) || !clustertest.Deleted(t, c, &corev1.Namespace{}, c.Namespace) {
			t.Errorf("%v: %v", tc.networks, err)
		}
		if len(tc.networks) > 1 {
			o.Force = true
			if _, err := detect(t.Context(), c, o.Values, o); err != nil || !reported.Has("only IPv4 is joined") {
				t.Errorf("forced: %v; said %v", err, reported)
			}
		}
		must(t, c.Client.Delete(t.Context(), node))
	}

	// Without the kind ServiceCIDR, the network of the Services must come from another source.
	old := *c
	old.Client = withoutServiceCIDRs{c.Client}
	if _, err := serviceNetwork(t.Context(), &old, nil, nil, reported.Report); err == nil || !strings.Contains(err.Error(), "want --set networks.serviceCIDR=NETWORK") {
		t.Errorf("without any: %v", err)
	}
	kubeadm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "kubeadm-config"},
		Data: map[string]string{"ClusterConfiguration": "networking: {serviceSubnet: 'fd00:2::/112,10.97.0.0/16'}"}}
	must(t, c.Client.Create(t.Context(), kubeadm))
	if p, err := serviceNetwork(t.Context(), &old, nil, nil, reported.Report); err != nil || p != "10.97.0.0/16" {
		t.Errorf("of kubeadm: %q, %v", p, err)
	}
	must(t, c.Client.Delete(t.Context(), kubeadm))
	nodes := []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"k3s.io/node-args": `["server"]`}}}}
	if p, err := serviceNetwork(t.Context(), &old, nil, nodes, reported.Report); err != nil || p != "10.43.0.0/16" {
		t.Errorf("of k3s: %q, %v", p, err)
	}
	if p, err := serviceNetwork(t.Context(), c, nil, nodes, reported.Report); clustertest.ServesServiceCIDRs(t, c) && (err != nil || p != "") {
		t.Errorf("with the kind the manager finds it: %q, %v", p, err)
	}
}

// withoutServiceCIDRs is a client of an API server before Kubernetes 1.33.
type withoutServiceCIDRs struct{ client.Client }

func (w withoutServiceCIDRs) Get(ctx context.Context, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
	if _, is := o.(*networkingv1.ServiceCIDR); is {
		return &meta.NoKindMatchError{GroupKind: networkingv1.SchemeGroupVersion.WithKind("ServiceCIDR").GroupKind()}
	}
	return w.Client.Get(ctx, key, o, options...)
}

func TestPodCIDRThatContainsNodesOrPodsIsAccepted(t *testing.T) {
	network, pod := netip.MustParsePrefix, address{"x/y", netip.MustParseAddr("10.9.3.4")}
	for name, tc := range map[string]struct {
		nodes []netip.Prefix
		pods  []address
		taken bool
	}{
		"nodes have no networks":           {nil, nil, true},
		"one node inside":                  {[]netip.Prefix{network("10.8.1.0/24"), network("10.9.1.0/24")}, nil, true},
		"a Pod of a CNI with its own IPAM": {[]netip.Prefix{network("10.8.1.0/24")}, []address{pod}, true},
		"nothing":                          {[]netip.Prefix{network("10.8.1.0/24")}, []address{{"x/z", netip.MustParseAddr("10.8.1.4")}}, false},
	} {
		if wrong := nothingIn("10.9.0.0/16", tc.nodes, tc.pods); (wrong == "") != tc.taken {
			t.Errorf("%s: %q", name, wrong)
		}
	}
}

func TestCalicoPoolsAreReadAsPodNetworks(t *testing.T) {
	pool := func(spec map[string]any) unstructured.Unstructured {
		return unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	}
	got := calicoNetworks([]unstructured.Unstructured{
		pool(map[string]any{"cidr": "10.1.0.0/16"}), pool(map[string]any{"cidr": "10.2.0.0/16", "disabled": true}),
		pool(map[string]any{"cidr": "10.3.0.0/16", "allowedUses": []any{"Tunnel"}}), pool(map[string]any{"cidr": "10.4.0.0/16", "allowedUses": []any{"Workload", "Tunnel"}}),
	})
	if got != "10.1.0.0/16,10.4.0.0/16" {
		t.Errorf("got %s", got)
	}
}

func TestNetworkThatContainsAllOthersIsChosen(t *testing.T) {
	for text, want := range map[string]string{
		"10.1.0.0/16": "10.1.0.0/16", "10.1.0.0/16,fd00::/64": "10.1.0.0/16", "10.1.0.0/24 10.1.0.0/16,10.1.7.0/24": "10.1.0.0/16",
		"10.1.0.0/16,10.2.0.0/16": "", "fd00::/64": "", "": "",
	} {
		got := ""
		if p, ok := enclosing(ipv4Networks(text)); ok {
			got = p.String()
		}
		if got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// The network with which the cluster was created is rejected if it does not contain every pool
// of the CNI, even a pool that no Pod has used yet.
func TestPodCIDRMustContainEachPoolOfTheCNI(t *testing.T) {
	sourceOf := func(what string, own bool, text string) podSource {
		return podSource{what, own, func(context.Context, *cluster.Cluster) (string, error) { return text, nil }}
	}
	c := &cluster.Cluster{Context: "c"}
	pools := sourceOf("IPPools", true, "10.1.0.0/16,10.9.0.0/16")
	p, source, err := podCIDRFrom(t.Context(), c, []podSource{pools, sourceOf("kubeadm", false, "10.1.0.0/16"), sourceOf("flags", false, "10.0.0.0/12")}, nil, nil)
	if err != nil || p.String() != "10.0.0.0/12" || source != "flags" {
		t.Errorf("%v from %s: %v", p, source, err)
	}
	_, _, err = podCIDRFrom(t.Context(), c, []podSource{pools, sourceOf("kubeadm", false, "10.1.0.0/16")}, nil, nil)
	if err == nil || !strings.Contains(err.Error(), "IPPools: more than one network, 10.1.0.0/16,10.9.0.0/16; kubeadm: 10.1.0.0/16 does not contain 10.9.0.0/16") {
		t.Errorf("nothing holds both: %v", err)
	}
}

func TestPodCIDROfK3sIsReadFromItsArguments(t *testing.T) {
	node := func(key, text string) corev1.Node {
		return corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{key: text}}}
	}
	for _, tc := range []struct {
		nodes []corev1.Node
		want  string
	}{
		{[]corev1.Node{node("x", "y")}, ""},
		{[]corev1.Node{node("k3s.io/node-args", `["agent"]`)}, "10.42.0.0/16"},
		{[]corev1.Node{node("x", ""), node("k3s.io/node-args", `["server","--cluster-cidr","10.7.0.0/16"]`)}, "10.7.0.0/16"},
		{[]corev1.Node{node("rke2.io/node-args", `["server","--cluster-cidr=10.8.0.0/16"]`)}, "10.8.0.0/16"},
		{[]corev1.Node{node("k3s.io/node-args", `{`)}, "10.42.0.0/16"},
	} {
		if got := k3s(tc.nodes, "--cluster-cidr", "10.42.0.0/16"); got != tc.want {
			t.Errorf("%v: %q, want %q", tc.nodes[0].Annotations, got, tc.want)
		}
	}
}

func TestClusterWithOneNodeGetsOneGateway(t *testing.T) {
	taint := func(key string, effect corev1.TaintEffect) corev1.Node {
		return corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: key, Effect: effect}}}}
	}
	nodes := []corev1.Node{
		taint("node-role.kubernetes.io/control-plane", corev1.TaintEffectNoSchedule), {Spec: corev1.NodeSpec{Unschedulable: true}},
		taint("node.kubernetes.io/not-ready", corev1.TaintEffectNoSchedule), // a temporary taint
	}
	if n := schedulable(nodes); n != 1 {
		t.Errorf("%d nodes take Pods, want the one that is not ready yet", n)
	}
	if n := schedulable(append(nodes, corev1.Node{})); n != 2 {
		t.Errorf("%d nodes take Pods, want 2", n)
	}
}
