package health

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
)

func TestGatewayHealthIncludesItsPods(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	pod := func(name, role, problem string) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/name": "gateway"}}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
		if role != "" {
			p.Labels[v1alpha1.LabelGateway] = role
		}
		if problem != "" {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse, Message: problem}}
		}
		return p
	}
	held := Holder{Name: "g1", Since: &metav1.Time{Time: now.Add(-time.Minute)}}
	one := []string{"isthmus-gateway"}
	crashing := pod("g1", "", "")
	crashing.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
		LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: "{\"msg\":\"starts\"}\nisthmus: /dev/net/tun: no such file\n"}}}}
	for _, tc := range []struct {
		name   string
		hop    HopState
		holder Holder
		found  Components
		state  HopState
		reason string
		want   string
	}{
		{"well", Works, held, Components{Pods: []corev1.Pod{pod("g1", "active", ""), pod("g2", "standby", "")}, Services: one}, Works, "", ""},
		{"Services may not be listed", Works, held, Components{Pods: []corev1.Pod{pod("g1", "active", "")}}, Works, "", ""},
		{"two marked", Works, held, Components{Pods: []corev1.Pod{pod("g1", "active", ""), pod("g2", "active", "")}, Services: one}, Broken, reasonSeveralActive, "2 Pods, g1, g2"},
		{"none marked", Works, held, Components{Pods: []corev1.Pod{pod("g1", "", "")}, Services: one}, Broken, reasonNoneMarked, "no Pod"},
		{"none marked yet", Works, Holder{Name: "g1", Since: &metav1.Time{Time: now}}, Components{Pods: []corev1.Pod{pod("g1", "", "")}, Services: one}, Works, "", ""},
		{"no Service", Works, held, Components{Pods: []corev1.Pod{pod("g1", "active", "")}, Services: []string{}}, Broken, reasonServices, "0 Services"},
		{"two Services", Works, held, Components{Pods: []corev1.Pod{pod("g1", "active", "")}, Services: []string{"a", "b"}}, Broken, reasonServices, "a, b"},
		{"nobody at work", Broken, Holder{}, Components{Pods: []corev1.Pod{pod("g1", "", "not ready")}, Events: map[string]string{"g1": "Failed: no TUN"}}, Broken, "", "its last Event: Failed: no TUN"},
		{"nobody at work, and it crashes", Broken, Holder{}, Components{Pods: []corev1.Pod{crashing}}, Broken, "", "CrashLoopBackOff, after exit code 1: isthmus: /dev/net/tun: no such file"},
		{"nobody at work, and no Pods", Broken, Holder{}, Components{}, Broken, "", "there are no gateway Pods in the namespace"},
		{"no Lease, and Pods", Unknown, Holder{Absent: true}, Components{Pods: []corev1.Pod{pod("g1", "", "")}}, Broken, "", ""},
		{"no Lease, and no Pods", Unknown, Holder{Absent: true}, Components{}, Unknown, "", ""},
	} {
		hop := Hop{Name: HopGateway, State: tc.hop, Text: "said"}
		tc.found.CheckGateway(&hop, tc.holder, now)
		if hop.State != tc.state || hop.Reason != tc.reason || !strings.Contains(hop.Text, tc.want) {
			t.Errorf("%s: %s %s: %s; want %s %s: ...%s...", tc.name, hop.State, hop.Reason, hop.Text, tc.state, tc.reason, tc.want)
		}
	}
}

func TestAGatewayWithoutAStandbyIsReported(t *testing.T) {
	pod := func(name string, phase corev1.PodPhase, change func(*corev1.PodStatus)) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/name": "gateway"}}, Status: corev1.PodStatus{Phase: phase}}
		if change != nil {
			change(&p.Status)
		}
		return p
	}
	waits := func(reason, message string) func(*corev1.PodStatus) {
		return func(s *corev1.PodStatus) {
			s.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}}
			s.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
		}
	}
	unschedulable := func(s *corev1.PodStatus) {
		s.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/2 nodes are available"}}
	}
	active := pod("g1", corev1.PodRunning, nil)
	leaving := pod("g2", corev1.PodRunning, nil)
	leaving.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	pulled := pod("g2", corev1.PodPending, waits("ErrImagePull", "no such image"))
	for _, tc := range []struct {
		name   string
		wanted int
		pods   []corev1.Pod
		want   string // expected text; "": no hop
	}{
		{"there is one", 2, []corev1.Pod{active, pod("g2", corev1.PodRunning, nil)}, ""},
		{"there is one, beside one that cannot start", 2, []corev1.Pod{active, pulled, pod("g3", corev1.PodRunning, nil)}, ""},
		{"none is wanted", 1, []corev1.Pod{active}, ""},
		{"none is wanted, and the next one starts", 1, []corev1.Pod{active, pulled}, ""},
		{"nobody tells, and there is one Pod", -1, []corev1.Pod{active}, ""},
		{"no image", 2, []corev1.Pod{active, pulled}, "if Pod g1 or its node fails, no pod reaches any peer until another gateway starts: Pod g2 is Pending: ErrImagePull: no such image"},
		{"no image, and nobody tells", -1, []corev1.Pod{active, pulled}, "Pod g2 is Pending: ErrImagePull: no such image"},
		{"no image since it ran", 2, []corev1.Pod{active, pod("g2", corev1.PodRunning, waits("ImagePullBackOff", "Back-off"))}, "Pod g2 waits: ImagePullBackOff: Back-off"},
		{"no node", 2, []corev1.Pod{active, pod("g2", corev1.PodPending, unschedulable)}, "Pod g2 is Pending: Unschedulable: 0/2 nodes are available"},
		{"no Pod", 2, []corev1.Pod{active}, "the Deployment wants 2 Pods, but there is no second one"},
		{"only one that is being deleted", 2, []corev1.Pod{active, leaving}, "Pod g2 is being deleted"},
	} {
		got := Components{Pods: tc.pods}.NoStandby("g1", tc.wanted)
		if !strings.Contains(got, tc.want) || (got == "") != (tc.want == "") {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

// After an outage between the clusters, reports that agents wrote during the outage must not
// blame the overlay.
func TestTheOverlayIsBlamedOnlyIfPeersStayConnected(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	for _, tc := range []struct {
		status metav1.ConditionStatus
		ago    time.Duration
		want   bool
	}{
		{metav1.ConditionTrue, time.Hour, true}, {metav1.ConditionTrue, AgentsLag / 2, false}, {metav1.ConditionFalse, time.Hour, false},
	} {
		p := &isthmus.Peering{Status: isthmus.PeeringStatus{Conditions: []metav1.Condition{
			{Type: isthmus.ConditionConnected, Status: tc.status, LastTransitionTime: metav1.NewTime(now.Add(-tc.ago))}}}}
		if got := ConnectedBefore(p, now.Add(-AgentsLag)); got != tc.want {
			t.Errorf("Connected is %s since %v: %v", tc.status, tc.ago, got)
		}
	}
}

func TestOutdatedWarningsAreHidden(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	event := func(ago time.Duration, by, message string) corev1.Event {
		return corev1.Event{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(now.Add(-ago))}, EventTime: metav1.NewMicroTime(now.Add(-ago)), InvolvedObject: corev1.ObjectReference{Name: "agent"}, ReportingController: by, Reason: "R", Message: message}
	}
	notReadySince := func(ago time.Duration) []corev1.Pod {
		return []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "agent"}, Status: corev1.PodStatus{
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(now.Add(-ago))}}}}}
	}
	disk, kubelet := event(5*time.Minute, "isthmus.net/route-agent", "no space left"), event(4*time.Minute, "kubelet", "Back-off")
	// The API server's clock determines the age of an Event; the writer's clock does not.
	taken := func(e corev1.Event, ago time.Duration) corev1.Event {
		at := metav1.NewTime(now.Add(-ago))
		e.CreationTimestamp, e.ManagedFields = metav1.Time{Time: at.Add(-time.Hour)}, []metav1.ManagedFieldsEntry{{Time: &at}}
		return e
	}
	unrelatedEvent := event(time.Minute, "kubelet", "kubelet does not have ClusterDNS IP configured")
	unrelatedEvent.Reason = "MissingClusterDNS"
	repeated := disk
	repeated.Series = &corev1.EventSeries{LastObservedTime: metav1.NewMicroTime(now.Add(-time.Minute))}
	for _, tc := range []struct {
		name     string
		warnings []corev1.Event
		over     []corev1.Event
		pods     []corev1.Pod
		want     string
	}{
		{"one", []corev1.Event{disk}, nil, nil, "R: no space left"},
		{"the latest", []corev1.Event{kubelet, event(3*time.Minute, "kubelet", "Unhealthy")}, nil, nil, "R: Unhealthy"},
		{"ours before a kubelet's", []corev1.Event{kubelet, disk}, nil, nil, "R: no space left"},
		{"ours before a kubelet's, in another order", []corev1.Event{disk, kubelet}, nil, nil, "R: no space left"},
		{"one about something else", []corev1.Event{unrelatedEvent}, nil, nil, ""},
		{"of long ago", []corev1.Event{event(time.Hour, "kubelet", "x")}, nil, nil, ""},
		{"of long ago, by a clock that is an hour ahead", []corev1.Event{taken(event(0, "kubelet", "x"), time.Hour)}, nil, nil, ""},
		{"of now, by a clock that is an hour behind", []corev1.Event{taken(event(time.Hour, "kubelet", "x"), time.Minute)}, nil, nil, "R: x"},
		{"taken back", []corev1.Event{disk}, []corev1.Event{event(3*time.Minute, "isthmus.net/route-agent", "well")}, nil, ""},
		{"taken back before", []corev1.Event{disk}, []corev1.Event{event(6*time.Minute, "isthmus.net/route-agent", "well")}, nil, "R: no space left"},
		{"told again since", []corev1.Event{repeated}, []corev1.Event{event(3*time.Minute, "isthmus.net/route-agent", "well")}, nil, "R: no space left"},
		{"taken back by somebody else", []corev1.Event{kubelet}, []corev1.Event{event(time.Minute, "isthmus.net/route-agent", "well")}, nil, "R: Back-off"},
		{"the Pod has been ready since", []corev1.Event{disk}, nil, notReadySince(time.Minute), ""},
		{"it is why the Pod is not", []corev1.Event{disk}, nil, notReadySince(4 * time.Minute), "R: no space left"},
	} {
		if got := LastWarnings(tc.warnings, tc.over, tc.pods, now)["agent"]; got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestReasonOfAnUnreadyPodOrNodeIsShown(t *testing.T) {
	for _, tc := range []struct{ reason, message, pod, node string }{
		{"ContainersNotReady", "containers with unready status: [gateway]", "is not ready: containers with unready status: [gateway]", "containers with unready status: [gateway]"},
		{"ContainersNotReady", "", "is not ready: ContainersNotReady", "ContainersNotReady"},
	} {
		p := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: tc.reason, Message: tc.message}}}}
		if got := PodProblem(p); got != tc.pod {
			t.Errorf("a Pod with reason %s and message %q: %q, want %q", tc.reason, tc.message, got, tc.pod)
		}
		n := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
			{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: tc.reason, Message: tc.message}}}}
		if got := notReady(n); got != tc.node {
			t.Errorf("a Node with reason %s and message %q: %q, want %q", tc.reason, tc.message, got, tc.node)
		}
	}
}

func TestMixedVersionsAreReported(t *testing.T) {
	pod := func(account, image string) corev1.Pod {
		return corev1.Pod{Spec: corev1.PodSpec{ServiceAccountName: account, Containers: []corev1.Container{{Image: image}}}}
	}
	f := Components{Pods: []corev1.Pod{pod("isthmus-manager", "isthmus:2"), pod("isthmus-gateway", "isthmus:2"), pod("isthmus-route-agent", "isthmus:2"), pod("other", "x")}}
	if got := f.versions(); got != "" {
		t.Errorf("one version: %q", got)
	}
	f.Pods = append(f.Pods, pod("isthmus-route-agent", "isthmus:1"))
	if got, want := f.versions(), "isthmus:1 (1 route agent), isthmus:2 (1 gateway, 1 manager, 1 route agent)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A right that only another version requires is no fault, unless a component that lacks it is
// broken.
func TestMissingRightOfAnotherVersionIsNoFault(t *testing.T) {
	pod := func(account, version string) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{labelVersion: version}}, Spec: corev1.PodSpec{ServiceAccountName: account}}
	}
	lacking := []string{"isthmus-route-agent"}
	for _, tc := range []struct {
		name  string
		pods  []corev1.Pod
		hops  []Hop
		state HopState
	}{
		{"this version", []corev1.Pod{pod("isthmus-route-agent", "2")}, nil, Broken},
		{"a version that nobody says", []corev1.Pod{pod("isthmus-route-agent", "")}, nil, Broken},
		{"another program's", []corev1.Pod{pod("isthmus-route-agent", "2"), pod("web", "1")}, nil, Broken},
		{"an older one", []corev1.Pod{pod("isthmus-route-agent", "1")}, []Hop{{Name: HopAgents, State: Works}}, Limited},
		{"in the middle of an upgrade", []corev1.Pod{pod("isthmus-manager", "2"), pod("isthmus-route-agent", "1")}, nil, Limited},
		{"an older one that has all rights and is broken", []corev1.Pod{pod("isthmus-gateway", "1")}, []Hop{{Name: HopGateway, State: Broken}}, Limited},
		{"an older one that is broken for it", []corev1.Pod{pod("isthmus-route-agent", "1")}, []Hop{{Name: HopAgents, State: Broken}}, Broken},
	} {
		rights := Hop{Name: HopRights, State: Broken, Text: "why"}
		Components{Pods: tc.pods}.ExcuseRights(&rights, tc.hops, lacking, "2")
		if rights.State != tc.state || strings.Contains(rights.Text, "the installed version, 1,") != (tc.state == Limited) {
			t.Errorf("%s: %s: %s; want %s", tc.name, rights.State, rights.Text, tc.state)
		}
	}
	works := Hop{Name: HopRights, State: Works}
	Components{Pods: []corev1.Pod{pod("isthmus-gateway", "1")}}.ExcuseRights(&works, nil, nil, "2")
	if works.State != Works {
		t.Errorf("nothing is missing, and it is %s", works.State)
	}
}

// The node controller marks the Pods of a node that it does not hear as not ready, without a
// message.
func TestHopsNameUnreadyPodsOfUnreadyNodes(t *testing.T) {
	pod := func(name, account string) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{NodeName: "n1", ServiceAccountName: account},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}}}}
	}
	found := Components{
		Pods: []corev1.Pod{pod("m-2", deploy.ManagerServiceAccount), pod("m-1", deploy.ManagerServiceAccount), pod("g-1", deploy.GatewayServiceAccount),
			pod("a-1", deploy.RouteAgentServiceAccount)},
		Events: map[string]string{"m-1": "NodeNotReady: Node is not ready"},
	}
	manager, gateway := Hop{State: Broken, Text: "no manager is active"}, Hop{State: Broken, Text: "no gateway is active"}
	found.ExplainManager(&manager)
	found.CheckGateway(&gateway, Holder{}, time.Now())
	if want := "no manager is active: Pod m-1 is not ready; its last Event: NodeNotReady: Node is not ready; Pod m-2 is not ready"; manager.Text != want {
		t.Errorf("manager: %q, want %q", manager.Text, want)
	}
	if want := "no gateway is active: Pod g-1 is not ready"; gateway.Text != want {
		t.Errorf("gateway: %q, want %q", gateway.Text, want)
	}
	node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}}}
	hops := AgentHops("a", "", found, AgentsOf([]corev1.Node{node}, found, nil))
	if agents := hops[len(hops)-1]; agents.State != Unknown {
		t.Errorf("agents of nodes that are not ready: %s, %q; want %s", agents.State, agents.Text, Unknown)
	}
	works := Hop{State: Works, Text: "m-1 is active"}
	if found.ExplainManager(&works); works.Text != "m-1 is active" {
		t.Errorf("an active manager: %q", works.Text)
	}
}
