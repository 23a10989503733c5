package health

import (
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

func TestNodesWithoutAWorkingAgentAreListed(t *testing.T) {
	node := func(name string, change ...func(*corev1.Node)) corev1.Node {
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		for _, f := range change {
			f(&n)
		}
		return n
	}
	agent := func(name, on string, change ...func(*corev1.Pod)) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{NodeName: on, ServiceAccountName: deploy.RouteAgentServiceAccount,
			Containers: []corev1.Container{{Image: "isthmus:1"}}}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
		for _, f := range change {
			f(&p)
		}
		return p
	}
	unready := func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse, Message: "no netlink"}}
	}
	nodes := []corev1.Node{node("n1"), node("n2"), node("n3"), node("n4"), node("n5"),
		node("n6", func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Message: "the kubelet is silent"}}
		}),
		node("liqo-b", func(n *corev1.Node) { n.Labels = map[string]string{"liqo.io/type": "virtual-node"} })}
	pods := []corev1.Pod{
		agent("a1", "n1"), agent("a2", "n2", unready),
		agent("a3-old", "n3", func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.Now()) }),
		agent("a3", "n3", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "isthmus:2" }),
		agent("a4", "n4", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "other" }),
		agent("a5", "n5", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }), agent("a6", "n6"),
	}
	set := func(wants, has int32, change ...func(*appsv1.DaemonSet)) []appsv1.DaemonSet {
		s := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Status: appsv1.DaemonSetStatus{ObservedGeneration: 2, DesiredNumberScheduled: wants, CurrentNumberScheduled: has}}
		s.Spec.Template.Spec.ServiceAccountName = deploy.RouteAgentServiceAccount
		for _, f := range change {
			f(&s)
		}
		return []appsv1.DaemonSet{{Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 99}}, s} // the first one is a foreign DaemonSet
	}
	labelled := func(key, value string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Labels = map[string]string{key: value} }
	}
	without := []corev1.Node{node("n1"), node("n7", labelled(corev1.LabelOSStable, "linux")), node("n8")}
	const none = " has no Pod of ServiceAccount isthmus-route-agent; check the DaemonSet and the node's taints"
	reports := []isthmus.NodeNetworks{{ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Spec: isthmus.NodeNetworksSpec{
		BrokenOverlay: &isthmus.BrokenOverlay{Gateway: "10.0.0.9", Since: "2026-11-22T12:00:00Z"}}}, {ObjectMeta: metav1.ObjectMeta{Name: "n5"}}}
	reports = append(reports, *reports[0].DeepCopy())
	reports[2].Name, reports[2].Spec.BrokenOverlay.Back = "n3", true
	broken := []string{"Node n2: Pod a2 is not ready: no netlink, and reports that it reaches the gateway at 10.0.0.9 over the underlay, but not over the overlay (noticed at 2026-11-22T12:00:00Z); " +
		"allow UDP 4800 between nodes",
		"Node n3: Pod a3 reports that its packets reach the gateway at 10.0.0.9 over the overlay, but no packets come back (noticed at 2026-11-22T12:00:00Z); " +
			"allow UDP 4800 between nodes, in both directions", "Node n5: Pod a5 is Pending"}
	for _, tc := range []struct {
		name  string
		nodes []corev1.Node
		sets  []appsv1.DaemonSet
		want  Agents
	}{
		{"nobody says where one is wanted", nodes, nil, Agents{Nodes: 5, lacking: 4, Unreached: 2, Missing: append(slices.Clone(broken), "Node n4"+none), Unready: []string{"Node n6: the kubelet is silent"}}},
		{"the DaemonSet wants one on each", nodes, set(6, 5), Agents{Nodes: 5, lacking: 4, Unreached: 2, Missing: append(slices.Clone(broken), "Node n4"+none), Unready: []string{"Node n6: the kubelet is silent"}}},
		{"the DaemonSet wants none there", nodes, set(5, 5), Agents{Nodes: 4, lacking: 3, Unreached: 2, Missing: broken, Unready: []string{"Node n6: the kubelet is silent"}, unwanted: []string{"n4"}}},
		{"nodes that no agent can run on", []corev1.Node{node("n1"), node("w", labelled(corev1.LabelOSStable, "windows")),
			node("v", labelled("type", "virtual-kubelet")), node("f", labelled("eks.amazonaws.com/compute-type", "fargate"))}, nil, Agents{Nodes: 1}},
		{"one of two", without, set(2, 1), Agents{Nodes: 2, lacking: 1, Missing: []string{"1 of the Nodes n7, n8 have no Pod of ServiceAccount isthmus-route-agent; check the DaemonSet and the node's taints"}}},
		{"the DaemonSet wants them on no node at all", without[1:], set(0, 0), Agents{Nodes: 2, lacking: 2, Missing: []string{"Node n7" + none, "Node n8" + none}}},
		{"what the DaemonSet says is old", without[1:2], set(1, 1, func(s *appsv1.DaemonSet) { s.Generation++ }), Agents{Nodes: 1, lacking: 1, Missing: []string{"Node n7" + none}}},
	} {
		tc.want.versions = []string{"isthmus:1", "isthmus:2"}
		found := Components{Pods: pods, Broken: map[string]*isthmus.BrokenOverlay{}}
		for _, r := range reports {
			found.Broken[r.Name] = r.Spec.BrokenOverlay
		}
		if got := AgentsOf(tc.nodes, found, tc.sets); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s:\n%+v; want\n%+v", tc.name, got, tc.want)
		}
	}
}

// Agents notice a new gateway only after some seconds, and their kubelets even later.
func TestRunningAgentsAreNotBlamedWhileTheGatewayIsNew(t *testing.T) {
	now := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	agent := func(state corev1.ContainerState) corev1.Pod {
		return corev1.Pod{Spec: corev1.PodSpec{NodeName: "n1", ServiceAccountName: deploy.RouteAgentServiceAccount}, Status: corev1.PodStatus{Phase: corev1.PodRunning,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}}, ContainerStatuses: []corev1.ContainerStatus{{State: state}}}}
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	killed := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}
	crashes := corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
	for _, tc := range []struct {
		name    string
		agent   corev1.ContainerState
		gateway HopState
		age     time.Duration // time since the gateway became active
		want    HopState
	}{
		{"no gateway", running, Broken, time.Hour, Waits},
		{"a new gateway", running, Works, AgentsLag - 1, Unknown},
		{"an old gateway", running, Works, AgentsLag, Broken},
		{"a killed agent beside a new gateway", killed, Works, 0, Broken},
		{"a crashing agent without a gateway", crashes, Broken, 0, Broken},
	} {
		found := Components{Pods: []corev1.Pod{agent(tc.agent)}}
		hops := AgentHops("a", "", found, AgentsOf([]corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}}, found, nil))
		ExcuseByGateway(hops, &Hop{Name: HopGateway, State: tc.gateway, Since: &metav1.Time{Time: now.Add(-tc.age)}}, now)
		if h := hops[0]; h.State != tc.want || tc.want == Waits && !strings.HasPrefix(h.Text, "no active gateway can be reached; last known: ") || tc.want == Unknown && !strings.HasPrefix(h.Text, "a gateway has been active only since 2026-11-29T11:59:40Z") {
			t.Errorf("%s: %s: %s; want %s", tc.name, h.State, h.Text, tc.want)
		}
	}
}

func TestMissingNodeFeaturesAreListedWithTheNodes(t *testing.T) {
	report := func(node string, problems ...isthmus.NodeProblem) isthmus.NodeNetworks {
		return isthmus.NodeNetworks{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: isthmus.NodeNetworksSpec{Problems: problems}}
	}
	masqueraded := isthmus.NodeProblem{Reason: kernel.LimitMasqueraded, Message: "no NAT"}
	refused := isthmus.NodeProblem{Reason: kernel.LimitForwarding, Message: "FORWARD\x1b drops"}
	nodes := []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, {ObjectMeta: metav1.ObjectMeta{Name: "n2"}}}
	for _, tc := range []struct {
		reports []isthmus.NodeNetworks
		state   HopState
		text    string
	}{
		{[]isthmus.NodeNetworks{report("n1"), report("n2"), report("gone", refused)}, Limited, ""},
		{[]isthmus.NodeNetworks{report("n2", masqueraded), report("n1", masqueraded)}, Limited, "PodsMasqueraded on n1, n2: no NAT"},
		{[]isthmus.NodeNetworks{report("n1", masqueraded, refused), report("n2")}, Broken, `ForwardingRefused on n1: FORWARD\u001b drops; PodsMasqueraded on n1: no NAT`},
	} {
		if state, text := CheckKernels(tc.reports, nodes); text != tc.text || text != "" && state != tc.state {
			t.Errorf("%v %q, want %v %q", state, text, tc.state, tc.text)
		}
	}
	ovn := func(mode string) []corev1.Node {
		return []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1", Annotations: map[string]string{"k8s.ovn.org/l3-gateway-config": `{"default":{"mode":"` + mode + `","next-hops":["192.168.126.1"]}}`}}}}
	}
	if state, text := CheckKernels(nil, ovn("shared")); state != Broken || !strings.HasPrefix(text, "PodsPassBy on n1: ") {
		t.Errorf("shared gateways: %v %q", state, text)
	}
	if _, text := CheckKernels(nil, ovn("local")); text != "" {
		t.Errorf("local gateways: %q", text)
	}
	// A limited hop counts as working, so that no other hop waits for it, but is still
	// reported.
	d := Diagnosis{Hops: []Hop{{Cluster: "a", Name: HopKernels, State: Limited, Text: "PodsMasqueraded on n1: no NAT"}}}
	var b strings.Builder
	if err := d.Print(&b); err != nil || !strings.Contains(b.String(), "with limits: a: node problems: PodsMasqueraded on n1: no NAT") || !d.Fine() {
		t.Errorf("%v %s", err, b.String())
	}
}

// On the path, the hops of both clusters alternate. In the output, each cluster has one block.
func TestADiagnosisHasOneBlockForEachCluster(t *testing.T) {
	d := Diagnosis{Hops: []Hop{{Cluster: "a", Name: "manager", State: Works}, {Cluster: "b", Name: "manager", State: Works},
		{Cluster: "a", Peering: "b-1", Name: "tunnel", State: Works}, {Cluster: "a", Name: "gateway", State: Works}}}
	var b strings.Builder
	if err := d.Print(&b); err != nil {
		t.Fatal(err)
	}
	got := regexp.MustCompile(`(?m)^(\S.*|  \S+)`).FindAllString(b.String(), -1)
	want := []string{"a", "  manager", "  gateway", "b", "  manager", "a, b-1", "  tunnel", "all checked hops work"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
