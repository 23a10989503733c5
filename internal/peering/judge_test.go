package peering

import (
	"encoding/base64"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

func TestAnAgentIsMissedOnEveryNodeThatHasNoneAtWork(t *testing.T) {
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
		return []appsv1.DaemonSet{{Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 99}}, s} // and somebody else's
	}
	labelled := func(key, value string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Labels = map[string]string{key: value} }
	}
	without := []corev1.Node{node("n1"), node("n7", labelled(corev1.LabelOSStable, "linux")), node("n8")}
	const none = " has no Pod of ServiceAccount isthmus-route-agent: see the DaemonSet, and the node's taints"
	reports := []isthmus.NodeNetworks{{ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Spec: isthmus.NodeNetworksSpec{
		BrokenOverlay: &isthmus.BrokenOverlay{Gateway: "10.0.0.9", Since: "2026-11-22T12:00:00Z"}}}, {ObjectMeta: metav1.ObjectMeta{Name: "n5"}}}
	reports = append(reports, *reports[0].DeepCopy())
	reports[2].Name = "n3"
	broken := []string{"Node n2: Pod a2 is not ready: no netlink, and says that the gateway at 10.0.0.9 is not reached through the overlay since 2026-11-22T12:00:00Z, " +
		"but is by the underlay: let UDP 4800 pass between nodes",
		"Node n3: Pod a3 says that the gateway at 10.0.0.9 is not reached through the overlay since 2026-11-22T12:00:00Z, but is by the underlay: let UDP 4800 pass between nodes", "Node n5: Pod a5 is Pending"}
	for _, tc := range []struct {
		name  string
		nodes []corev1.Node
		sets  []appsv1.DaemonSet
		want  agents
	}{
		{"nobody says where one is wanted", nodes, nil, agents{nodes: 5, lacking: 4, unreached: 2, missing: append(slices.Clone(broken), "Node n4"+none), unready: []string{"Node n6: the kubelet is silent"}}},
		{"the DaemonSet wants one on each", nodes, set(6, 5), agents{nodes: 5, lacking: 4, unreached: 2, missing: append(slices.Clone(broken), "Node n4"+none), unready: []string{"Node n6: the kubelet is silent"}}},
		{"the DaemonSet wants none there", nodes, set(5, 5), agents{nodes: 4, lacking: 3, unreached: 2, missing: broken, unready: []string{"Node n6: the kubelet is silent"}, unwanted: []string{"n4"}}},
		{"nodes that no agent can run on", []corev1.Node{node("n1"), node("w", labelled(corev1.LabelOSStable, "windows")),
			node("v", labelled("type", "virtual-kubelet")), node("f", labelled("eks.amazonaws.com/compute-type", "fargate"))}, nil, agents{nodes: 1}},
		{"one of two", without, set(2, 1), agents{nodes: 2, lacking: 1, missing: []string{"1 of the Nodes n7, n8 have no Pod of ServiceAccount isthmus-route-agent: see the DaemonSet, and the node's taints"}}},
		{"the DaemonSet wants them on no node at all", without[1:], set(0, 0), agents{nodes: 2, lacking: 2, missing: []string{"Node n7" + none, "Node n8" + none}}},
		{"what the DaemonSet says is old", without[1:2], set(1, 1, func(s *appsv1.DaemonSet) { s.Generation++ }), agents{nodes: 1, lacking: 1, missing: []string{"Node n7" + none}}},
	} {
		tc.want.versions = []string{"isthmus:1", "isthmus:2"}
		found := components{pods: pods, broken: map[string]*isthmus.BrokenOverlay{}}
		for _, r := range reports {
			found.broken[r.Name] = r.Spec.BrokenOverlay
		}
		if got := agentsOf(tc.nodes, found, tc.sets); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s:\n%+v; want\n%+v", tc.name, got, tc.want)
		}
	}
}

// named is a Peering with these conditions, as in conditions.
func named(name string, ready string, others ...string) *isthmus.Peering {
	return &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1}, Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: name}},
		Status: isthmus.PeeringStatus{Conditions: conditions(ready, others...)}}
}

func states(hops []Hop) string {
	var all []string
	for _, h := range hops {
		if h.State != Works {
			all = append(all, fmt.Sprintf("%s/%s=%s", h.Cluster, h.Name, h.State))
		}
	}
	return strings.Join(all, " ")
}

func TestWhatIsBrokenIsBlamedAndNothingThatFollowsFromIt(t *testing.T) {
	own := func(c string, broken ...string) (hops []Hop) {
		for _, name := range []string{hopManager, hopGateway, hopNodes, hopAgents} {
			h := Hop{Cluster: c, Name: name, State: Works}
			if slices.Contains(broken, name) {
				h.State = Broken
			}
			hops = append(hops, h)
		}
		return hops
	}
	const alpha, bravo = "a", "b"
	lost := func(reason string) []string {
		return []string{"False(" + reason + ") Connected: x", "Connected=False(" + reason + ") x"}
	}
	side := func(c string, broken []string, ready string, others ...string) *examination {
		e := &examination{cluster: c, own: own(c, broken...)}
		if ready != "" {
			e.peerings = [][]Hop{peeringHops(c, named("p", ready, others...), e.own)}
		}
		return e
	}
	for _, tc := range []struct {
		name  string
		a, b  *examination // b nil: not asked
		first string       // cluster/hop, with the reason
		all   string
	}{
		{"all is well", side(alpha, nil, "True"), side(bravo, nil, "True"), "", ""},
		{"a dead manager makes the rest a memory", side(alpha, []string{hopManager}, "True"), nil, "a/manager",
			"a/manager=broken a/identity=unknown a/publishing=unknown a/answer=unknown a/peer's networks=unknown a/agreement=unknown a/tunnel=unknown a/peering=unknown"},
		{"dead gateways make the tunnel wait", side(alpha, []string{hopGateway}, "Unknown(GatewaySilent) x", "Connected=Unknown(GatewaySilent) x"), nil, "a/gateway",
			"a/gateway=broken a/tunnel=waits a/peering=waits"},
		{"an agent that is missing is all that is wrong", side(alpha, []string{hopAgents}, "True"), nil, "a/route agents", "a/route agents=broken"},
		{"an agent that is missing beside a tunnel that is broken", side(alpha, []string{hopAgents, hopNodes}, lost(v1alpha1.CauseWrongKey)[0], lost(v1alpha1.CauseWrongKey)[1]), nil,
			"a/tunnel WrongKey", "a/nodes=broken a/route agents=broken a/tunnel=broken"},
		{"an agent that is missing on either side beside what only Ready knows", side(alpha, []string{hopAgents}, "False(Overlap) a node"), side(bravo, []string{hopAgents}, "True"),
			"a/peering Overlap", "a/route agents=broken b/route agents=broken a/peering=broken"},
		{"what waits for the first is not to blame", side(alpha, nil, "False(Unauthorized) IdentityReady: x", "IdentityReady=False(Unauthorized) x",
			"Published=False(Publishing) x", "Answered=False(WaitingForAnswer) x"), nil, "a/identity Unauthorized",
			"a/identity=broken a/publishing=waits a/answer=waits"},
		{"the other side's manager", side(alpha, nil, "False(WaitingForAnswer) Answered: x", "Answered=False(WaitingForAnswer) x", "TunnelEndpointReady=False(Waiting) x", "Connected=False(Waiting) x"),
			side(bravo, []string{hopManager}, "True"), "b/manager",
			"b/manager=broken b/identity=unknown b/publishing=unknown a/answer=waits b/answer=unknown b/peer's networks=unknown a/agreement=waits b/agreement=unknown a/tunnel=waits b/tunnel=unknown b/peering=unknown"},
		{"the other side's gateway", side(alpha, nil, lost(v1alpha1.CausePeerSilent)[0], lost(v1alpha1.CausePeerSilent)[1]),
			side(bravo, []string{hopGateway}, "Unknown(GatewaySilent) x", "Connected=Unknown(GatewaySilent) x"), "b/gateway", "b/gateway=broken a/tunnel=waits b/tunnel=waits b/peering=waits"},
		{"the side that knows more", side(alpha, nil, lost(v1alpha1.CauseNoAnswer)[0], lost(v1alpha1.CauseNoAnswer)[1]),
			side(bravo, nil, lost(v1alpha1.CauseAnswersLost)[0], lost(v1alpha1.CauseAnswersLost)[1]), "b/tunnel AnswersLost", "a/tunnel=waits b/tunnel=broken"},
		{"both sides know as much", side(alpha, nil, lost(v1alpha1.CauseNoAnswer)[0], lost(v1alpha1.CauseNoAnswer)[1]),
			side(bravo, nil, lost(v1alpha1.CauseNoAnswer)[0], lost(v1alpha1.CauseNoAnswer)[1]), "a/tunnel NoAnswer", "a/tunnel=broken b/tunnel=waits"},
		{"only Ready knows", side(alpha, nil, "False(Overlap) a node"), nil, "a/peering Overlap", "a/peering=broken"},
		{"only one side has a Peering", side(alpha, nil, "False(WaitingForPeer) x", "PeerConfigAccepted=False(WaitingForPeer) x"), side(bravo, nil, ""), "b/peering",
			"b/peering=broken a/peer's networks=waits"},
	} {
		hops := tc.a.hops()
		if tc.b != nil {
			hops = between(tc.a, tc.b)
		}
		first := ""
		if b := FirstBroken(hops); b != nil {
			first = strings.TrimSpace(fmt.Sprintf("%s/%s %s", b.Cluster, b.Name, b.Reason))
		}
		if first != tc.first || states(hops) != tc.all {
			t.Errorf("%s: first %q, want %q; all\n%s\nwant\n%s", tc.name, first, tc.first, states(hops), tc.all)
		}
	}
}

func TestWhatTheManagerKnowsOfTheGatewaysIsHeeded(t *testing.T) {
	silent := named("p", "Unknown(GatewaySilent) x", "Connected=Unknown(GatewaySilent) no gateway is at work")
	own := []Hop{{Cluster: "a", Name: hopManager, State: Works}, {Cluster: "a", Name: hopGateway, State: Works},
		{Cluster: "a", Name: hopAgents, State: Broken, followsGateway: true}, {Cluster: "a", Name: hopNodes, State: Broken}}
	heed(own, named("q", "True"))
	if own[1].State != Works {
		t.Error("broken, though a gateway is at work")
	}
	own[0].State = Broken
	if heed(own, silent); own[1].State != Works {
		t.Error("broken by what is a memory")
	}
	own[0].State = Works
	if heed(own, silent); own[1].State != Broken || own[1].Reason != isthmus.ReasonGatewaySilent || own[1].Text != "no gateway is at work" {
		t.Errorf("%+v", own[1])
	}
	if own[2].State != Waits || own[3].State != Broken {
		t.Errorf("agents that only lack the gateway: %s; want %s. Nodes: %s", own[2].State, Waits, own[3].State)
	}
}

func TestEveryReasonOfATunnelSaysSoMuch(t *testing.T) {
	for _, reason := range v1alpha1.Causes {
		if !v1alpha1.Carries(reason) && reason != v1alpha1.CauseConnecting && telling(reason) < 0 {
			t.Errorf("%s has no place among the reasons", reason)
		}
	}
}

func TestADiagnosisIsPrintedWithoutSurprises(t *testing.T) {
	at := metav1.Time{Time: time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)}
	d := &Diagnosis{Hops: []Hop{{Cluster: "a", Name: hopManager, State: Works, Text: "m-1 is at work", Since: &at},
		{Cluster: "a", Peering: "b-1a2b3c\x1b", Name: "tunnel", State: Broken, Reason: "WrongKey", Text: "another key", Since: &at}}, NotAsked: []string{"the other side"}}
	d.Broken = FirstBroken(d.Hops)
	var b strings.Builder
	must(t, d.Print(&b))
	const want = `a
  manager          works    m-1 is at work
a, b-1a2b3c\u001b
  tunnel           broken   WrongKey: another key (since 2026-11-22T12:00:00Z)
not asked: the other side

broken: a: tunnel: WrongKey: another key
`
	if b.String() != want || d.Fine() {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	d.Hops[1].State, d.Broken = Unknown, nil
	must(t, d.Print(&b))
	contains(t, b.String(), "nothing is known to be broken; not known: a: tunnel\n")
	b.Reset()
	if d.Hops[1].State = Works; !d.Fine() {
		t.Error("it is fine")
	}
	must(t, d.Print(&b))
	contains(t, b.String(), "everything works that was looked at\n")
}

func TestTheEndOfATokenIsInIt(t *testing.T) {
	jwt := func(claims string) string { return "x." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".y" }
	if at, ok := tokenExpiry(jwt(`{"exp": 1795348800}`)); !ok || at.Unix() != 1795348800 {
		t.Errorf("%v, %v", at, ok)
	}
	for _, token := range []string{"", "opaque", jwt(`{}`), jwt(`{"exp": -1}`), jwt(`{"exp": "soon"}`), jwt(`x`), "a.%%%.b"} {
		if at, ok := tokenExpiry(token); ok {
			t.Errorf("%q: %v", token, at)
		}
	}
}

func TestForbiddenMeansThatNothingElseIsWrong(t *testing.T) {
	no := apierrors.NewForbidden(schema.GroupResource{}, "x", nil)
	for _, tc := range []struct {
		err  error
		want bool
	}{{nil, false}, {no, true}, {errors.Join(no, no), true}, {errors.Join(no, errors.New("x")), false}, {errors.New("x"), false}, {fmt.Errorf("x: %w", no), true}} {
		if got := forbidden(tc.err); got != tc.want {
			t.Errorf("%v: %v", tc.err, got)
		}
	}
}

// The same against an API server, with somebody who renews the Leases.
func TestDiagnoseAsksBothSides(t *testing.T) {
	t.Parallel()
	p := newPair(t, "diagnose")
	for _, c := range []*Cluster{p.a, p.b} { // whose components would lack rights, as the pair was not installed
		must(t, c.client.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:serviceaccounts:" + c.Namespace}}}))
	}
	d, err := Diagnose(t.Context(), p.a, p.b, "")
	must(t, err)
	if d.Broken == nil || d.Broken.Name != "peering" || !strings.Contains(d.Broken.Text, "there is no Peering with diagnose-b") {
		t.Errorf("before they are peered: %+v", d.Broken)
	}
	if now, known := p.a.now(); !known || time.Since(now).Abs() > secondsOff {
		t.Errorf("the API server's clock shows %v (known: %v), and is this machine's", now, known)
	}
	if _, err := Diagnose(t.Context(), p.a, nil, "nobody"); !errors.Is(err, ErrNoPeering) {
		t.Errorf("nobody: %v", err)
	}
	if _, err := Diagnose(t.Context(), p.a, p.b, "diagnose-b"); err != nil {
		t.Errorf("by the name that it calls itself: %v", err)
	}
	if _, err := Diagnose(t.Context(), p.a, p.b, "diagnose-c"); !errors.Is(err, ErrOtherPeer) || !strings.Contains(err.Error(), "there is no Peering with it here") {
		t.Errorf("another one, before they are peered: %v", err)
	}
	for name, with := range map[string]v1alpha1.ClusterIdentity{
		"diagnose-to-b": {ClusterID: p.b.Identity.ClusterID, ClusterName: "diagnose-oslo"},
		"diagnose-to-c": {ClusterID: "diagnose-C-0000", ClusterName: "diagnose-c"},
	} {
		must(t, p.a.client.Create(t.Context(), &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: isthmus.PeeringSpec{Cluster: with, TenantNamespace: isthmus.TenantNamespace{Local: name, Remote: "x"}}}))
	}
	for _, name := range []string{"", "diagnose-to-b", "diagnose-oslo", "diagnose-b"} {
		d, err := Diagnose(t.Context(), p.a, p.b, name)
		must(t, err)
		if !slices.ContainsFunc(d.Hops, func(h Hop) bool { return h.Peering == "diagnose-to-b" }) ||
			slices.ContainsFunc(d.Hops, func(h Hop) bool { return h.Peering == "diagnose-to-c" }) || d.Broken == nil || d.Broken.Cluster != "diagnose-b" {
			t.Errorf("%q with the other side: broken %+v of %+v; want the Peering diagnose-to-b, and that the other side has none", name, d.Broken, d.Hops)
		}
	}
	for _, name := range []string{"diagnose-to-c", "diagnose-c", "nobody"} {
		if _, err := Diagnose(t.Context(), p.a, p.b, name); !errors.Is(err, ErrOtherPeer) || !strings.Contains(err.Error(), "its Peering here is diagnose-to-b") {
			t.Errorf("%s, which is not where the other side is: %v", name, err)
		}
	}
	if _, err := Diagnose(t.Context(), p.a, p.a, ""); err == nil || !strings.Contains(err.Error(), "the same cluster") {
		t.Errorf("itself: %v", err)
	}
}

func TestWhatNodesLackIsNamedWithTheNodes(t *testing.T) {
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
		if state, text := judgeKernels(tc.reports, nodes); text != tc.text || text != "" && state != tc.state {
			t.Errorf("%v %q, want %v %q", state, text, tc.state, tc.text)
		}
	}
	ovn := func(mode string) []corev1.Node {
		return []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1", Annotations: map[string]string{"k8s.ovn.org/l3-gateway-config": `{"default":{"mode":"` + mode + `","next-hops":["192.168.126.1"]}}`}}}}
	}
	if state, text := judgeKernels(nil, ovn("shared")); state != Broken || !strings.HasPrefix(text, "PodsPassBy on n1: ") {
		t.Errorf("shared gateways: %v %q", state, text)
	}
	if _, text := judgeKernels(nil, ovn("local")); text != "" {
		t.Errorf("local gateways: %q", text)
	}
	// It works, so that nothing else waits for it, and is said all the same.
	d := Diagnosis{Hops: []Hop{{Cluster: "a", Name: hopKernels, State: Limited, Text: "PodsMasqueraded on n1: no NAT"}}}
	var b strings.Builder
	if err := d.Print(&b); err != nil || !strings.Contains(b.String(), "less than it should: a: node problems: PodsMasqueraded on n1: no NAT") || !d.Fine() {
		t.Errorf("%v %s", err, b.String())
	}
}
