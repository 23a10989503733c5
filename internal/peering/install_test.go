package peering

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
)

// lines keeps what Install reports.
type lines []string

func (l *lines) report(line string) { *l = append(*l, line) }

func (l *lines) has(text string) bool {
	return slices.ContainsFunc(*l, func(line string) bool { return strings.Contains(line, text) })
}

// The API server judges every object that the chart can make, and defaults what it leaves out.
func TestInstallingTwiceChangesNothing(t *testing.T) {
	t.Parallel()
	c := connectTo(t, Access{Kubeconfig: files.b, Namespace: "twice"})
	options := InstallOptions{
		Identity: v1alpha1.ClusterIdentity{ClusterName: "twice"}, Workloads: true, Version: "v1",
		Values: chart.Values{
			// What is cluster-wide belongs to the installation that all tests share.
			"crds": chart.Values{"install": false}, "networks": chart.Values{"podCIDR": "10.9.0.0/16"}, "gateway": chart.Values{"replicas": 3.0},
			"networkPolicy": chart.Values{"enabled": true},
		},
	}
	var first, second lines
	options.Report = first.report
	must(t, c.Install(t.Context(), options))
	for _, want := range []string{"Namespace twice created", "Deployment twice/isthmus-manager created", "DaemonSet twice/isthmus-route-agent created", "PodDisruptionBudget twice/isthmus-gateway created"} {
		if !first.has(want) {
			t.Errorf("no %q in\n%s", want, strings.Join(first, "\n"))
		}
	}
	// What was chosen is remembered.
	options.Values, options.Identity, options.Report = nil, v1alpha1.ClusterIdentity{}, second.report
	must(t, c.Install(t.Context(), options))
	for _, line := range second {
		if !strings.HasSuffix(line, " unchanged") && !strings.Contains(line, ", from ") {
			t.Errorf("the second time: %s", line)
		}
	}
	var gateway appsv1.Deployment
	must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: "isthmus-gateway"}, &gateway))
	if *gateway.Spec.Replicas != 3 {
		t.Errorf("%d gateways; want the 3 of the first time", *gateway.Spec.Replicas)
	}
	// Nothing runs here, and that is said.
	options.Wait, options.Version = time.Second, "v2"
	err := c.Install(t.Context(), options)
	if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "Deployment twice/isthmus-gateway") {
		t.Errorf("without nodes: %v", err)
	}
	must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: "isthmus-gateway"}, &gateway))
	if got := gateway.Spec.Template.Spec.Containers[0].Image; got != "ghcr.io/isthmus-net/isthmus:v2" {
		t.Errorf("after an upgrade the image is %s", got)
	}
}

// Not parallel: the definitions are of all tests.
func TestAnOlderProgramDoesNotReplaceNewerDefinitions(t *testing.T) {
	c := connectTo(t, Access{Kubeconfig: files.b})
	crd := &unstructured.Unstructured{}
	crd.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	crd.SetName("peerings.isthmus.net")
	annotate := func(value string) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%s}}}`, annotationSchema, value)
		must(t, c.client.Patch(t.Context(), crd, client.RawPatch(types.MergePatchType, patch)))
	}
	for _, tc := range []struct {
		there string
		want  string
	}{
		{`"999999"`, "peerings.isthmus.net is of a newer release (schema 999999, here "},
		{`"0"`, "peerings.isthmus.net changed"},
		{`null`, "peerings.isthmus.net changed"}, // of the time before it had a number
	} {
		annotate(tc.there)
		var said lines
		must(t, c.Install(t.Context(), InstallOptions{Report: said.report}))
		if !said.has(tc.want) {
			t.Errorf("schema %s: no %q in\n%s", tc.there, tc.want, strings.Join(said, "\n"))
		}
	}
}

func TestInstallLeavesARelaseOfHelmAlone(t *testing.T) {
	t.Parallel()
	c := connectTo(t, Access{Kubeconfig: files.b, Namespace: "of-helm"})
	must(t, c.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	must(t, c.client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{
		Namespace: c.Namespace, Name: "isthmus-manager", Annotations: map[string]string{"meta.helm.sh/release-name": "mine"}}}))
	var said lines
	err := c.Install(t.Context(), InstallOptions{Identity: v1alpha1.ClusterIdentity{ClusterName: "h"}, Report: said.report})
	if err == nil || !strings.Contains(err.Error(), "`helm upgrade mine`") || len(said) > 0 {
		t.Errorf("%v; said %v", err, said)
	}
}

// The ConfigMap of a Helm release has no ID where nobody chose one.
func TestAClusterWithoutAChosenIDIsKnownByTheUIDOfKubeSystem(t *testing.T) {
	t.Parallel()
	c := connectTo(t, Access{Kubeconfig: files.b, Namespace: "no-id"})
	must(t, c.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	must(t, c.client.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: identityConfigMap, Labels: map[string]string{labelName: identityLabelValue}},
		Data:       map[string]string{keyClusterName: "no-id"}}))
	must(t, c.Identify(t.Context()))
	if c.Identity.ClusterID != c.uid || c.uid == "" {
		t.Errorf("it is %v; the UID is %q", c.Identity, c.uid)
	}
}

func TestPodCIDRIsFoundWhereTheClusterSaysIt(t *testing.T) {
	t.Parallel()
	c := connectTo(t, Access{Kubeconfig: files.a})
	nodes := []corev1.Node{
		{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: corev1.NodeSpec{PodCIDR: "10.50.1.0/24", PodCIDRs: []string{"10.50.1.0/24", "fd00:1::/64"}}},
		{ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Spec: corev1.NodeSpec{PodCIDR: "10.50.9.0/24"}},
	}
	_, _, err := c.podCIDR(t.Context(), nodes)
	if err == nil || !strings.Contains(err.Error(), "want --pod-cidr") || !strings.Contains(err.Error(), "perhaps it is 10.50.0.0/16") {
		t.Errorf("when nothing says it: %v", err)
	}
	must(t, client.IgnoreAlreadyExists(c.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "kube-flannel"}})))
	must(t, c.client.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-flannel", Name: "kube-flannel-cfg"},
		Data: map[string]string{"net-conf.json": `{"Network": "10.50.0.0/16", "Backend": {"Type": "vxlan"}}`}}))
	p, source, err := c.podCIDR(t.Context(), nodes)
	must(t, err)
	if p != netip.MustParsePrefix("10.50.0.0/16") || !strings.Contains(source, "kube-flannel-cfg") {
		t.Errorf("%v from %s", p, source)
	}
	// What a node contradicts is not believed.
	nodes[1].Spec.PodCIDR = "10.51.9.0/24"
	if _, _, err = c.podCIDR(t.Context(), nodes); err == nil || !strings.Contains(err.Error(), "say 10.50.0.0/16, yet a node has 10.51.9.0/24") {
		t.Errorf("when a node is elsewhere: %v", err)
	}
}

func TestPodCIDROfK3sIsThatOfItsArguments(t *testing.T) {
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
		if got := k3s(tc.nodes); got != tc.want {
			t.Errorf("%v: %q, want %q", tc.nodes[0].Annotations, got, tc.want)
		}
	}
}

func TestOneNodeGetsOneGateway(t *testing.T) {
	taint := func(key string, effect corev1.TaintEffect) corev1.Node {
		return corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: key, Effect: effect}}}}
	}
	nodes := []corev1.Node{
		taint("node-role.kubernetes.io/control-plane", corev1.TaintEffectNoSchedule), {Spec: corev1.NodeSpec{Unschedulable: true}},
		taint("node.kubernetes.io/not-ready", corev1.TaintEffectNoSchedule), // of a while
	}
	if n := schedulable(nodes); n != 1 {
		t.Errorf("%d nodes take Pods, want the one that is not ready yet", n)
	}
	if n := schedulable(append(nodes, corev1.Node{})); n != 2 {
		t.Errorf("%d nodes take Pods, want 2", n)
	}
}
