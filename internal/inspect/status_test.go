package inspect

import (
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/expect"

	"github.com/isthmus-net/isthmus/internal/health"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

var must = expect.NoError

// conditions returns the conditions of a Peering. ready and others are of the form
// "Type=Status(Reason) message"; all other conditions are True.
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

func TestFirstProblemIsTheEarliestFailedCondition(t *testing.T) {
	for _, tc := range []struct {
		name       string
		generation int64
		conditions []metav1.Condition
		want       string // text of the first problem; "": none
	}{
		{"all is well", 1, conditions("True"), ""},
		{"not looked at yet", 1, nil, "Ready is Unknown (Unknown): the manager has not checked it yet"},
		{"of an older generation", 2, conditions("True"), "Ready is Unknown (Unknown): the manager has not checked the newest version of the Peering yet"},
		{"the earliest step counts", 1, conditions("False(NotReady) x", "Connected=Unknown(Unknown)", "Published=False(Forbidden) quota"), "Published is False (Forbidden): quota"},
		{"Ready knows better", 1, conditions("False(Conflict) another Peering", "IdentityReady=Unknown(Unknown)"), "Ready is False (Conflict): another Peering"},
		{"only Ready", 1, conditions("False(LocalSetup) no key"), "Ready is False (LocalSetup): no key"},
	} {
		p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Generation: tc.generation}, Status: isthmus.PeeringStatus{Conditions: tc.conditions}}
		got := ""
		if c := health.FirstProblem(p); c != nil {
			got = health.Sentence(c)
		}
		if got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

// Traffic alone decides whether a Peering is ready. Other faults are still listed as problems.
func TestAReadyPeeringShowsItsProblems(t *testing.T) {
	p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Generation: 1}, Status: isthmus.PeeringStatus{
		Conditions: conditions("True(Unreachable) traffic flows", "IdentityReady=False(Unreachable) https://b does not answer")}}
	row := rowOf(p)
	if want := "IdentityReady is False (Unreachable): https://b does not answer"; !row.Ready || row.Reason != isthmus.ReasonUnreachable || row.Problem != want {
		t.Errorf("ready %v, reason %s, problem %q; want ready, %s, %q", row.Ready, row.Reason, row.Problem, isthmus.ReasonUnreachable, want)
	}
}

func TestStatusPrintsTheExpectedText(t *testing.T) {
	peerings := []isthmus.Peering{
		{ObjectMeta: metav1.ObjectMeta{Name: "b-1a2b3c", Generation: 1}, Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: "B", ClusterName: "b"},
			TenantNamespace: isthmus.TenantNamespace{Local: "liqo-tenant-b-1a2b3c"}},
			Status: isthmus.PeeringStatus{Conditions: conditions("True"), Local: isthmus.Networks{PodCIDRSeen: "10.246.0.0/16", ExternalCIDRSeen: "10.247.0.0/16"},
				Remote: isthmus.Networks{PodCIDRSeen: "10.60.0.0/20", ExternalCIDRSeen: "10.61.0.0/20"}, Endpoint: "192.0.2.2:5871", Latency: "700µs",
				PostQuantum: isthmus.PostQuantumStatus{Key: "none", Why: "waiting for the peer"}}},
		{ObjectMeta: metav1.ObjectMeta{Name: "c-4d5e6f", Generation: 1}, Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: "C", ClusterName: "c"}},
			Status: isthmus.PeeringStatus{Conditions: conditions("False(NotReady) see there", "Answered=False(Invalid) \x1b]0;title\a\n\u202edesrever",
				"PeerConfigAccepted=False(KeyConflict) c (C) requests in NetworkConfig x/y: spec.backend_config.publicKey: no",
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
  PeerConfigAccepted is False (KeyConflict): c (C) requests in NetworkConfig x/y: spec.backend_config.publicKey: no
`
	if got := b.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	b.Reset()
	since := metav1.NewTime(s.At.Add(-3 * time.Hour))
	s.Gateway = health.Holder{Name: "gateway-1", Epoch: 7, Since: &since, Takeover: &isthmus.Takeover{Pod: "gateway-1", Reason: isthmus.TakeoverReleased, Previous: "gateway-2\x1b"}}
	must(t, s.Print(&b, false))
	clustertest.Contains(t, b.String(), "\ngateway gateway-1 on node a-node1, active for 3h, epoch 7: Pod gateway-2\\u001b handed over\n")
	b.Reset()
	s.Peerings[0].Keys = isthmus.KeysStatus{Ours: "abcdefgh1234", OursSince: &since, Lags: true}
	must(t, s.Print(&b, true))
	clustertest.Contains(t, b.String(), "IDENTITY UNTIL  OUR KEY                     THEIR KEY  POST-QUANTUM\n",
		"liqo-tenant-b-1a2b3c  10.61.0.0/20         10.247.0.0/16       -               abcdefgh1234 (3h), rotates  -          none: waiting for the peer\n")
	if s.Ready() {
		t.Error("c is not ready")
	}
	if s.Peerings = s.Peerings[:1]; !s.Ready() {
		t.Error("b is")
	}
	b.Reset()
	s.Gateway = health.Holder{Problem: "Lease x/y has no holder"}
	s.markStale()
	must(t, s.Print(&b, false))
	clustertest.Contains(t, b.String(), "gateway none: Lease x/y has no holder", "b        unknown", "GatewaySilent", "no gateway is active")
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
	clustertest.Contains(t, b.String(), "no peerings")
}

// The manager writes times by its own clock. The status shows these times by the API server's
// clock.
func TestAgesUseTheAPIServerClock(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	for _, tc := range []struct {
		ahead, written time.Duration // relative to now
		want           string
	}{
		{0, -time.Minute, "60s"},
		{time.Second, -time.Minute, "60s"}, // within the uncertainty of the difference
		{time.Hour, 59 * time.Minute, "60s"},
		{-time.Hour, -61 * time.Minute, "60s"},
		{0, time.Second, "0s"},
		{0, time.Hour, ""}, // the manager's clock was set back after it wrote
	} {
		p := isthmus.Peering{Status: isthmus.PeeringStatus{Conditions: []metav1.Condition{{Type: isthmus.ConditionReady, LastTransitionTime: metav1.NewTime(now.Add(tc.written))}}}}
		list := []isthmus.Peering{p}
		health.DateByServer(list, health.Holder{Ahead: tc.ahead}, now)
		if got := ago(rowOf(&list[0]).Since, now); got != tc.want {
			t.Errorf("written %v from now by a clock that is %v ahead: %q, want %q", tc.written, tc.ahead, got, tc.want)
		}
	}
}
