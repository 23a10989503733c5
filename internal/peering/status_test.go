package peering

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
)

// conditions makes those of a Peering: "Type=Status(Reason) message", the rest True.
func conditions(ready string, others ...string) []metav1.Condition {
	set := map[string]string{isthmus.ConditionReady: ready}
	for _, o := range others {
		name, rest, _ := strings.Cut(o, "=")
		set[name] = rest
	}
	var all []metav1.Condition
	for _, t := range append([]string{isthmus.ConditionReady}, health.Steps...) {
		c := metav1.Condition{Type: t, Status: metav1.ConditionTrue, Reason: "Fine", ObservedGeneration: 1}
		if text, ok := set[t]; ok && text != "True" {
			status, rest, _ := strings.Cut(text, "(")
			reason, message, _ := strings.Cut(rest, ") ")
			c.Status, c.Reason, c.Message = metav1.ConditionStatus(status), strings.TrimSuffix(reason, ")"), message
		}
		all = append(all, c)
	}
	return all
}

func TestTheFirstProblemIsTheOneToActOn(t *testing.T) {
	for _, tc := range []struct {
		name       string
		generation int64
		conditions []metav1.Condition
		want       string // "" none
	}{
		{"all is well", 1, conditions("True"), ""},
		{"not looked at yet", 1, nil, "Ready is Unknown (Unknown): the manager has not looked at it yet"},
		{"of an older generation", 2, conditions("True"), "Ready is Unknown (Unknown): the manager has not looked at it yet, as it is now"},
		{"the earliest step counts", 1, conditions("False(NotReady) x", "Connected=Unknown(Unknown)", "Published=False(Forbidden) quota"), "Published is False (Forbidden): quota"},
		{"Ready knows better", 1, conditions("False(Conflict) another Peering", "IdentityReady=Unknown(Unknown)"), "Ready is False (Conflict): another Peering"},
		{"only Ready", 1, conditions("False(LocalSetup) no key"), "Ready is False (LocalSetup): no key"},
	} {
		p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Generation: tc.generation}, Status: isthmus.PeeringStatus{Conditions: tc.conditions}}
		got := ""
		if c := FirstProblem(p); c != nil {
			got = problem(c)
		}
		if got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

// Traffic decides whether a Peering is ready; what does not work beside it is a problem all the same.
func TestAReadyPeeringShowsItsProblems(t *testing.T) {
	p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Generation: 1}, Status: isthmus.PeeringStatus{
		Conditions: conditions("True(Unreachable) traffic flows", "IdentityReady=False(Unreachable) https://b does not answer")}}
	row := rowOf(p)
	if want := "IdentityReady is False (Unreachable): https://b does not answer"; !row.Ready || row.Reason != isthmus.ReasonUnreachable || row.Problem != want {
		t.Errorf("ready %v, reason %s, problem %q; want ready, %s, %q", row.Ready, row.Reason, row.Problem, isthmus.ReasonUnreachable, want)
	}
}

func TestStatusIsATableWithoutSurprises(t *testing.T) {
	peerings := []isthmus.Peering{
		{ObjectMeta: metav1.ObjectMeta{Name: "b-1a2b3c", Generation: 1}, Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: "B", ClusterName: "b"},
			TenantNamespace: isthmus.TenantNamespace{Local: "liqo-tenant-b-1a2b3c"}},
			Status: isthmus.PeeringStatus{Conditions: conditions("True"), Local: isthmus.Networks{PodCIDRSeen: "10.246.0.0/16", ExternalCIDRSeen: "10.247.0.0/16"},
				Remote: isthmus.Networks{PodCIDRSeen: "10.60.0.0/20", ExternalCIDRSeen: "10.61.0.0/20"}, Endpoint: "192.0.2.2:5871", Latency: "700µs",
				PostQuantum: isthmus.PostQuantumStatus{Key: "none", Why: "waiting for the peer"}}},
		{ObjectMeta: metav1.ObjectMeta{Name: "c-4d5e6f", Generation: 1}, Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: "C", ClusterName: "c"}},
			Status: isthmus.PeeringStatus{Conditions: conditions("False(NotReady) see there", "Answered=False(Invalid) \x1b]0;title\a\n\u202edesrever",
				"PeerConfigAccepted=False(KeyConflict) c (C) asks by NetworkConfig x/y: spec.backend_config.publicKey: no",
				"TunnelEndpointReady=False(Waiting) for the exchange"),
				Endpoint: "evil\tcell\u009b1m"}},
	}
	s := Status{Cluster: v1alpha1.ClusterIdentity{ClusterID: "A", ClusterName: "a"}, Manager: health.Holder{Name: "m-1"}, Gateway: health.Holder{Name: "gateway-1"},
		Gateways: []GatewayPod{{Pod: "gateway-1", Node: "a-node1"}}, At: time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC),
		Hops: []health.Hop{{Name: health.HopAgents, State: health.Works, Text: "on all 3 nodes, isthmus:1"}}}
	peerings[0].Status.Conditions[0].LastTransitionTime = metav1.Time{Time: s.At.Add(-90 * time.Second)}
	for i := range peerings {
		s.Peerings = append(s.Peerings, rowOf(&peerings[i]))
	}
	var b strings.Builder
	must(t, s.Print(&b, false))
	const want = `cluster a (A)
manager m-1
gateway gateway-1 on node a-node1
route agents on all 3 nodes, isthmus:1

PEERING   CLUSTER  READY  SINCE  THEIR PODS HERE  OUR PODS THERE  ENDPOINT                LATENCY  REASON
b-1a2b3c  b        yes    90s    10.60.0.0/20     10.246.0.0/16   192.0.2.2:5871          700µs    Fine
c-4d5e6f  c        no     -      -                -               evil\u0009cell\u009b1m  -        NotReady

c-4d5e6f, cluster c (C):
  Answered is False (Invalid): \u001b]0;title\u0007\u000a\u202edesrever
  PeerConfigAccepted is False (KeyConflict): c (C) asks by NetworkConfig x/y: spec.backend_config.publicKey: no
`
	if got := b.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	b.Reset()
	since := metav1.NewTime(s.At.Add(-3 * time.Hour))
	s.Peerings[0].Keys = isthmus.KeysStatus{Ours: "abcdefgh1234", OursSince: &since, Lags: true}
	must(t, s.Print(&b, true))
	contains(t, b.String(), "IDENTITY UNTIL  OUR KEY                     THEIR KEY  POST-QUANTUM\n",
		"liqo-tenant-b-1a2b3c  10.61.0.0/20         10.247.0.0/16       -               abcdefgh1234 (3h), rotates  -          none: waiting for the peer\n")
	if s.Ready() {
		t.Error("c is not ready")
	}
	if s.Peerings = s.Peerings[:1]; !s.Ready() {
		t.Error("b is")
	}
	b.Reset()
	s.Gateway = health.Holder{Problem: "Lease x/y is held by nobody"}
	s.doubt()
	must(t, s.Print(&b, false))
	contains(t, b.String(), "gateway none: Lease x/y is held by nobody", "b        unknown", "GatewaySilent", "no gateway is at work")
	if s.Ready() {
		t.Error("b is ready without a gateway")
	}
	s.Gateway, s.Peerings[0].Ready = health.Holder{Name: "gateway-1"}, true
	if s.Hops[0].State = health.Broken; s.Ready() {
		t.Error("all is well where pods of a node are not joined")
	}
	if !(Status{Hops: s.Hops}).Ready() {
		t.Error("something is missing that nobody needs")
	}
	b.Reset()
	must(t, Status{}.Print(&b, false))
	contains(t, b.String(), "no peerings")
}

// What is only shown goes by the API server's clock, and never by a moment after the question. What is done
// because nobody is at work needs both clocks to say so.
func TestALeaseIsOverForWhoeverActsWhenBothClocksSaySo(t *testing.T) {
	for _, tc := range []struct {
		name         string
		ago, took    time.Duration // by our clock: the renewal before the question, and the answer
		low          time.Duration // of the API server's clock, how far it is ahead at least
		unknown      bool
		sharp, acted bool // it is held
	}{
		{"renewed just now", time.Second, 0, 0, false, true, true},
		{"the answer took its time", 16 * time.Second, 5 * time.Second, 0, false, true, true},
		{"over", 18 * time.Second, 0, 0, false, false, true},
		{"over for half a minute", 46 * time.Second, 0, 0, false, false, false},
		{"over for half a minute, and no answer has a time", 46 * time.Second, 0, 0, true, false, false},
		{"over, and no answer has a time", 18 * time.Second, 0, 0, true, true, true},
		{"a proxy whose clock is an hour ahead", time.Second, 0, time.Hour, false, false, true},
		{"our clock is an hour ahead", time.Hour, 0, -time.Hour, false, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for sharp, want := range map[bool]bool{true: tc.sharp, false: tc.acted} {
					at := metav1.NewTime(time.Now().Add(-tc.ago))
					lease := coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{HolderIdentity: new("m"), LeaseDurationSeconds: new(int32(15)), RenewTime: &metav1.MicroTime{Time: at.Time}}}
					lease.ManagedFields = []metav1.ManagedFieldsEntry{{Time: &at, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:renewTime":{}}}`)}}
					c := &Cluster{Client: leaseAfter{lease: lease, took: tc.took}, clock: &serverClock{known: !tc.unknown, low: tc.low, high: tc.low + time.Second}}
					h, err := HolderOf(t.Context(), c, managerLease, sharp)
					must(t, err)
					if (h.Name != "") != want {
						t.Errorf("sharp %v: %+v; want it held: %v", sharp, h, want)
					}
				}
			})
		})
	}
}

// leaseAfter is a client that gets one Lease, after a while.
type leaseAfter struct {
	client.Client
	lease coordinationv1.Lease
	took  time.Duration
}

func (l leaseAfter) Get(_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	time.Sleep(l.took)
	l.lease.DeepCopyInto(o.(*coordinationv1.Lease))
	return nil
}

// Whatever the two clocks show, each answer narrows their difference, and one that contradicts the others
// is of a clock that was set.
func TestTheAPIServersTimeIsLearntFromItsAnswers(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	base := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	var c serverClock
	if _, known := c.ahead(); known {
		t.Error("known before an answer")
	}
	for _, ahead := range []time.Duration{0, 300 * time.Millisecond, -time.Hour, 10*time.Second + 999*time.Millisecond} {
		for i := range 200 {
			sent := base.Add(time.Duration(rng.Int64N(int64(time.Minute))))
			answered := sent.Add(time.Duration(rng.Int64N(int64(2 * time.Second))))
			received := answered.Add(time.Duration(rng.Int64N(int64(2 * time.Second))))
			c.heard(answered.Add(ahead).Truncate(time.Second), sent, received)
			got, known := c.ahead()
			if off := (got - ahead).Abs(); !known || off > 5*time.Second || i > 100 && off > time.Second || got.Abs() > ahead.Abs() {
				t.Fatalf("after %d answers: %v ahead (known: %v), it is %v", i+1, got, known, ahead)
			}
		}
	}
}

// What the manager says is dated by its clock, and shown by the API server's.
func TestAgesAreByTheAPIServersClock(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	for _, tc := range []struct {
		ahead, written time.Duration // from now
		want           string
	}{
		{0, -time.Minute, "60s"},
		{time.Second, -time.Minute, "60s"}, // no more than is uncertain
		{time.Hour, 59 * time.Minute, "60s"},
		{-time.Hour, -61 * time.Minute, "60s"},
		{0, time.Second, "0s"},
		{0, time.Hour, ""}, // of a clock that was set back since
	} {
		p := isthmus.Peering{Status: isthmus.PeeringStatus{Conditions: []metav1.Condition{{Type: isthmus.ConditionReady, LastTransitionTime: metav1.NewTime(now.Add(tc.written))}}}}
		list := []isthmus.Peering{p}
		health.DateByServer(list, health.Holder{Ahead: tc.ahead}, now)
		if got := ago(rowOf(&list[0]).Since, now); got != tc.want {
			t.Errorf("written %v from now by a clock that is %v ahead: %q, want %q", tc.written, tc.ahead, got, tc.want)
		}
	}
}

func TestAnIdentityIsChosenOnceAndForEver(t *testing.T) {
	id := func(id, name string) v1alpha1.ClusterIdentity {
		return v1alpha1.ClusterIdentity{ClusterID: id, ClusterName: name}
	}
	have := id("X", "x")
	for _, tc := range []struct {
		have       *v1alpha1.ClusterIdentity
		wish, want v1alpha1.ClusterIdentity
		err        string
	}{
		{nil, id("", "a"), id("uid", "a"), ""},
		{nil, id("me", "a"), id("me", "a"), ""},
		{nil, id("me", ""), id("", ""), "want --cluster-name"},
		{nil, id("me", "Größe"), id("", ""), "cluster name Größe: want lower case letters"},
		{nil, id("me", "a.b"), id("", ""), "want lower case letters"},
		{nil, id("me", strings.Repeat("a", 45)), id("", ""), "at most 44"},
		{nil, id("me and you", "a"), id("", ""), "cluster ID me and you: want"},
		{&have, id("", ""), have, ""},
		{&have, id("X", ""), have, ""},
		{&have, id("", "y"), id("", ""), "it is x (X) already, not y (X)"},
	} {
		got, err := chooseIdentity(tc.have, tc.wish, "uid")
		if tc.err == "" && (err != nil || got != tc.want) || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
			t.Errorf("%v, %v: %v, %v", tc.have, tc.wish, got, err)
		}
	}
	if longest := id("X", strings.Repeat("a", 44)).TenantNamespace(); len(longest) > 63 {
		t.Errorf("%s is no namespace", longest)
	}
}

func TestInstallIsIdempotentAndKeepsTheIdentity(t *testing.T) {
	t.Parallel()
	c := connectTo(t, Access{Kubeconfig: files.a})
	var said []string
	o := InstallOptions{Report: func(line string) { said = append(said, line) }}
	must(t, Install(t.Context(), c, o))
	if len(said) == 0 || !strings.Contains(said[0], "without the components, as before") {
		t.Errorf("that it was without workloads is not remembered, or not said:\n%s", strings.Join(said, "\n"))
	}
	for _, line := range said[min(1, len(said)):] {
		if !strings.HasSuffix(line, " unchanged") {
			t.Error(line)
		}
	}
	if c.Identity.ClusterName != "a" || c.Identity.ClusterID != c.UID {
		t.Errorf("it is %v", c.Identity)
	}
	said = nil
	o.Identity.ClusterID = "another"
	if err := Install(t.Context(), c, o); err == nil || !strings.Contains(err.Error(), "already") || said != nil {
		t.Errorf("%v, %v", err, said)
	}
}

// A gateway that carries on without an API server is not ready, and the kubelet's first report when
// that is back must not take it out of the Service. Services of older installations are told so.
func TestTheServiceLeadsToTheActiveGatewayReadyOrNot(t *testing.T) {
	t.Parallel()
	c := connectTo(t, Access{Kubeconfig: files.b, Namespace: "ready-or-not"})
	must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	want := gatewayService(t, c.Namespace, 6873, 1)
	older := want.DeepCopy()
	must(t, unstructured.SetNestedField(older.Object, false, "spec", "publishNotReadyAddresses"))
	for _, s := range []*unstructured.Unstructured{older, want} {
		_, err := c.Apply(t.Context(), s)
		must(t, err)
	}
	var service corev1.Service
	must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(want), &service))
	if !service.Spec.PublishNotReadyAddresses || !maps.Equal(service.Spec.Selector, map[string]string{v1alpha1.LabelGateway: v1alpha1.GatewayActive}) {
		t.Errorf("%+v; want it to lead to whoever is labelled as active", service.Spec)
	}
}

func TestInstallChangesTheNumberOfTunnelsOfTheService(t *testing.T) {
	t.Parallel()
	c := connectTo(t, Access{Kubeconfig: files.b, Namespace: "tunnels"})
	must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	nodePort := map[string]int32{}
	for _, tunnels := range []int{1, 3, 2, 2} {
		outcome, err := c.Apply(t.Context(), gatewayService(t, c.Namespace, 6871, tunnels))
		must(t, err)
		var service corev1.Service
		must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: "isthmus-gateway"}, &service))
		var got []string
		for i, p := range service.Spec.Ports {
			got = append(got, p.Name)
			if p.Port != 6871+int32(i) || p.TargetPort.IntValue() != int(p.Port) || p.Protocol != corev1.ProtocolUDP || p.NodePort == 0 {
				t.Errorf("with %d tunnels: port %+v", tunnels, p)
			}
			if was := nodePort[p.Name]; was != 0 && was != p.NodePort {
				t.Errorf("with %d tunnels the port %s is published as %d, before as %d", tunnels, p.Name, p.NodePort, was)
			}
			nodePort[p.Name] = p.NodePort
		}
		if want := []string{"wireguard", "wireguard-1", "wireguard-2"}[:tunnels]; !slices.Equal(got, want) {
			t.Errorf("with %d tunnels: %v (%s)", tunnels, got, outcome)
		}
	}
}

// gatewayService is the Service of the chart.
func gatewayService(t *testing.T, namespace string, port, tunnels int) *unstructured.Unstructured {
	t.Helper()
	values := chart.Merge(nodePortService(port, tunnels), chart.Values{"cluster": chart.Values{"name": "x"}})
	all, err := chart.Objects(chart.Options{Namespace: namespace, Values: values})
	must(t, err)
	i := slices.IndexFunc(all, func(u *unstructured.Unstructured) bool { return u.GetKind() == "Service" })
	return all[i]
}
