package peerings

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

var bravo = v1alpha1.ClusterIdentity{ClusterID: "bbbbbbbb-2222-4222-8222-222222222222", ClusterName: "bravo"}

// agreedState returns the state of a peering in which all conditions are True. Our pods have a /16,
// the peer's pods a /18, and both sides remap.
func agreedState(t *testing.T) peeringState {
	t.Helper()
	original := &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: bravo.UniqueName()},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: bravo, PodCIDR: "10.244.0.0/16", ExternalCIDR: "10.245.0.0/16",
			EndpointIP: "192.0.2.1", BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPort: "5871", v1alpha1.ConfigPublicKey: managertest.SomeKey},
		},
		Status: v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: "10.70.0.0/16", ExternalCIDRNAT: v1alpha1.None},
	}
	theirs := v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: "alpha-111111"},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: v1alpha1.ClusterIdentity{ClusterID: "aaaaaaaa", ClusterName: "alpha"},
			PodCIDR:       "10.244.64.0/18", ExternalCIDR: "10.60.0.0/18",
			EndpointIP: "gw.example.org", BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPort: "31000", v1alpha1.ConfigPublicKey: managertest.AnotherKey},
		},
		Status: v1alpha1.NetworkConfigStatus{
			Processed: true, PodCIDRNAT: "10.246.0.0/18", ExternalCIDRNAT: v1alpha1.None,
			Conditions: []metav1.Condition{{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAnswered}},
		},
	}
	spec, problems := fabric.TunnelEndpointFor(original, &theirs, bravo)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	te := &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: bravo.UniqueName()}, Spec: spec}
	te.Status.Connection = v1alpha1.Connection{Status: v1alpha1.Connected, Latency: v1alpha1.ConnectionLatency{Value: "7ms"}}
	return peeringState{
		peering: &isthmus.Peering{
			ObjectMeta: metav1.ObjectMeta{Name: "bravo", Generation: 3},
			Spec: isthmus.PeeringSpec{
				Cluster:         bravo,
				TenantNamespace: isthmus.TenantNamespace{Local: "tenant", Remote: "tenant-a"},
			},
		},
		identity: yes(isthmus.ReasonIdentityAccepted, "https://b accepts us"), published: yes(isthmus.ReasonUpToDate, "https://b has it"),
		original: original, copies: []v1alpha1.NetworkConfig{theirs}, endpoint: te,
	}
}

func TestPeeringConditionsReportTheFirstProblem(t *testing.T) {
	deleted := metav1.NewTime(time.Unix(1, 0))
	refusal := []metav1.Condition{{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonKeyConflict,
		Message: "spec.backend_config.publicKey: is ours\x1b[2J; want another"}}
	remembered := func(reason string) []metav1.Condition {
		return []metav1.Condition{{Type: isthmus.ConditionPeerConfig, Status: metav1.ConditionTrue, Reason: reason}}
	}
	for _, c := range []struct {
		name    string
		change  func(*peeringState)
		which   string // the condition to check, besides Ready
		reason  string // expected reason of that condition
		ready   string // expected reason of Ready
		message string // part of the expected message of Ready
	}{
		{"all is well", func(*peeringState) {}, isthmus.ConditionConnected, isthmus.ReasonConnected, isthmus.ReasonConnected, "traffic can flow"},
		{"nothing is known", func(s *peeringState) {
			*s = peeringState{peering: s.peering, identity: unknown, published: unknown}
		}, isthmus.ConditionIdentity, isthmus.ReasonUnknown, isthmus.ReasonUnknown, "IdentityReady: not checked yet"},
		{"our side lacks something and nothing is published", func(s *peeringState) {
			s.lacking, s.original, s.endpoint = []string{"Secret x: not there"}, nil, nil
		}, isthmus.ConditionPublished, isthmus.ReasonPublishing, isthmus.ReasonLocalSetup, "Secret x: not there"},
		{"our side lacks something and all is published", func(s *peeringState) { s.lacking = []string{"Secret x: gone"} },
			isthmus.ConditionPublished, isthmus.ReasonUpToDate, isthmus.ReasonConnected, "traffic can flow"},
		{"identity revoked", func(s *peeringState) { s.identity = no(isthmus.ReasonUnauthorized, "https://b: Unauthorized") },
			isthmus.ConditionIdentity, isthmus.ReasonUnauthorized, isthmus.ReasonUnauthorized, "IdentityReady: https://b: Unauthorized"},
		{"the identity is looked at again, and traffic flows", func(s *peeringState) {
			s.identity, s.published = unknown, unknown
			s.peering.Status.Conditions = []metav1.Condition{{Type: isthmus.ConditionReady, Status: metav1.ConditionTrue, LastTransitionTime: deleted}}
		}, isthmus.ConditionIdentity, isthmus.ReasonUnknown, isthmus.ReasonConnected, "traffic can flow"},
		{"the peer's API server is away, and traffic flows", func(s *peeringState) {
			s.identity, s.published = no(isthmus.ReasonUnreachable, "https://b does not answer"), no(isthmus.ReasonPublishing, "not done yet")
		}, isthmus.ConditionIdentity, isthmus.ReasonUnreachable, isthmus.ReasonUnreachable, "traffic flows, but the clusters cannot exchange changes: https://b does not answer"},
		{"the peer's API server is away, and no traffic flows", func(s *peeringState) {
			s.identity = no(isthmus.ReasonUnreachable, "https://b does not answer")
			s.endpoint.Status.Connection = v1alpha1.Connection{Status: v1alpha1.ConnectionError, StatusMessage: "silence"}
		}, isthmus.ConditionConnected, isthmus.ReasonLost, isthmus.ReasonUnreachable, "IdentityReady: https://b does not answer"},
		{"not published", func(s *peeringState) { s.published = no(isthmus.ReasonForbidden, "https://b: forbidden") },
			isthmus.ConditionPublished, isthmus.ReasonForbidden, isthmus.ReasonForbidden, "Published: https://b: forbidden"},
		{"not answered", func(s *peeringState) { s.original.Status = v1alpha1.NetworkConfigStatus{} },
			isthmus.ConditionAnswered, isthmus.ReasonWaitingAnswer, isthmus.ReasonWaitingAnswer, "has not answered"},
		{"the peer refuses us, in words that may be hostile", func(s *peeringState) { s.original.Status.Conditions = refusal },
			isthmus.ConditionAnswered, v1alpha1.ReasonKeyConflict, v1alpha1.ReasonKeyConflict, "publicKey: is ours [2J; want another"},
		{"the peer has not come", func(s *peeringState) { s.copies, s.endpoint = nil, nil },
			isthmus.ConditionPeerConfig, isthmus.ReasonWaitingPeer, isthmus.ReasonWaitingPeer, "has not published"},
		{"the peer's is being deleted", func(s *peeringState) { s.copies[0].DeletionTimestamp = &deleted },
			isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew, isthmus.ReasonPeerWithdrew, "deleted its NetworkConfig"},
		{"the peer's was here and is gone", func(s *peeringState) {
			s.copies, s.endpoint, s.peering.Status.Conditions = nil, nil, remembered(isthmus.ReasonAnswered)
		}, isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew, isthmus.ReasonPeerWithdrew, "deleted its NetworkConfig"},
		{"the peer's was here, and our tenant namespace is gone", func(s *peeringState) {
			s.copies, s.original, s.endpoint, s.peering.Status.Conditions = nil, nil, nil, remembered(isthmus.ReasonAnswered)
			s.tenant, s.lacking = "tenant namespace tenant: not there", []string{"tenant namespace tenant: not there"}
		}, isthmus.ConditionPeerConfig, isthmus.ReasonWaitingPeer, isthmus.ReasonLocalSetup, "tenant namespace tenant: not there"},
		{"the peer's has been gone for long", func(s *peeringState) {
			s.copies, s.endpoint, s.peering.Status.Conditions = nil, nil, remembered(isthmus.ReasonPeerWithdrew)
		}, isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew, isthmus.ReasonPeerWithdrew, "deleted its NetworkConfig"},
		{"we refuse the peer", func(s *peeringState) { s.copies[0].Status.Conditions = refusal },
			isthmus.ConditionPeerConfig, v1alpha1.ReasonKeyConflict, v1alpha1.ReasonKeyConflict, "requests in NetworkConfig tenant/alpha-111111: "},
		{"we have not looked at the peer's", func(s *peeringState) { s.copies[0].Status = v1alpha1.NetworkConfigStatus{} },
			isthmus.ConditionPeerConfig, isthmus.ReasonWaitingAnswer, isthmus.ReasonWaitingAnswer, "not answered yet"},
		{"what the peer claims has changed, and the answer is to what it claimed before", func(s *peeringState) { s.copies[0].Generation = 2 },
			isthmus.ConditionPeerConfig, isthmus.ReasonWaitingAnswer, isthmus.ReasonWaitingAnswer, "has changed; the new version is not answered yet"},
		{"the peer has moved, and has the networks that it had", func(s *peeringState) {
			s.copies[0].Generation = 2
			s.allocation.Pod, s.allocation.External, _ = fabric.SeenBy(&s.copies[0])
		}, isthmus.ConditionPeerConfig, isthmus.ReasonAnswered, isthmus.ReasonConnected, "traffic can flow"},
		{"conditions are not stored, and the answer is in force", func(s *peeringState) {
			s.copies[0].Status.Conditions = nil
			s.unstored = &metav1.Condition{Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAnswered}
		}, isthmus.ConditionPeerConfig, isthmus.ReasonAnswered, isthmus.ReasonConnected, "traffic can flow"},
		{"conditions are not stored, and we refuse the peer", func(s *peeringState) {
			s.copies[0].Status.Conditions = nil
			s.unstored = &refusal[0]
		}, isthmus.ConditionPeerConfig, v1alpha1.ReasonKeyConflict, v1alpha1.ReasonKeyConflict, "requests in NetworkConfig tenant/alpha-111111: "},
		{"the peer has two", func(s *peeringState) { s.copies = append(s.copies, s.copies[0]) },
			isthmus.ConditionPeerConfig, isthmus.ReasonAmbiguous, isthmus.ReasonAmbiguous, "more than one"},
		{"answers that do not fit", func(s *peeringState) { s.original.Status.PodCIDRNAT = "10.70.0.0/20" },
			isthmus.ConditionTunnelEndpoint, isthmus.ReasonInvalid, isthmus.ReasonInvalid, "podCIDRNAT"},
		{"no TunnelEndpoint yet", func(s *peeringState) { s.endpoint = nil },
			isthmus.ConditionTunnelEndpoint, isthmus.ReasonWaiting, isthmus.ReasonWaiting, "not written yet"},
		{"a TunnelEndpoint that is behind", func(s *peeringState) { s.endpoint.Spec.RemoteNATPodCIDR = "10.99.0.0/18" },
			isthmus.ConditionTunnelEndpoint, isthmus.ReasonWaiting, isthmus.ReasonWaiting, "the agreed networks yet"},
		{"no gateway", func(s *peeringState) { s.endpoint.Status = v1alpha1.TunnelEndpointStatus{} },
			isthmus.ConditionConnected, isthmus.ReasonNoGateway, isthmus.ReasonNoGateway, "no gateway"},
		{"no gateway any more, whatever was written", func(s *peeringState) { s.silent = "no gateway is active: since noon" },
			isthmus.ConditionConnected, isthmus.ReasonGatewaySilent, isthmus.ReasonGatewaySilent, "since noon"},
		{"connecting", func(s *peeringState) { s.endpoint.Status.Connection.Status = v1alpha1.Connecting },
			isthmus.ConditionConnected, isthmus.ReasonConnecting, isthmus.ReasonConnecting, "gw.example.org:31000"},
		{"lost", func(s *peeringState) {
			s.endpoint.Status.Connection.Status, s.endpoint.Status.Connection.StatusMessage = v1alpha1.ConnectionError, "no answer"
		}, isthmus.ConditionConnected, isthmus.ReasonLost, isthmus.ReasonLost, "no answer"},
		{"lost, and the gateway knows why", func(s *peeringState) {
			s.endpoint.Status.Connection = v1alpha1.Connection{Status: v1alpha1.ConnectionError, StatusMessage: "handshakes come from another key"}
			s.endpoint.Status.Conditions = append(s.endpoint.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionConnected, Status: metav1.ConditionFalse,
				Reason: v1alpha1.CauseWrongKey, Message: "handshakes come from another key"})
		}, isthmus.ConditionConnected, v1alpha1.CauseWrongKey, v1alpha1.CauseWrongKey, "handshakes come from another key"},
		{"lost, as an older gateway says, which leaves the reason of a newer one", func(s *peeringState) {
			s.endpoint.Status.Connection = v1alpha1.Connection{Status: v1alpha1.ConnectionError, StatusMessage: "no answer"}
			s.endpoint.Status.Conditions = append(s.endpoint.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionConnected, Status: metav1.ConditionFalse,
				Reason: v1alpha1.CauseWrongKey, Message: "handshakes come from another key"})
		}, isthmus.ConditionConnected, isthmus.ReasonLost, isthmus.ReasonLost, "no answer"},
		{"connected, as an older gateway says, which leaves the reason of a newer one", func(s *peeringState) {
			s.endpoint.Status.Connection.StatusMessage = v1alpha1.ConnectedMessage
			s.endpoint.Status.Conditions = append(s.endpoint.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionConnected, Status: metav1.ConditionFalse,
				Reason: v1alpha1.CauseNotApplied, Message: "no such device"})
		}, isthmus.ConditionConnected, isthmus.ReasonConnected, isthmus.ReasonConnected, "traffic can flow"},
		{"connected, and the gateway's machine lacks something", func(s *peeringState) {
			s.endpoint.Status.Connection.StatusMessage = "no such device"
			s.endpoint.Status.Conditions = append(s.endpoint.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionConnected, Status: metav1.ConditionFalse,
				Reason: v1alpha1.CauseNotApplied, Message: "no such device"})
		}, isthmus.ConditionConnected, v1alpha1.CauseNotApplied, v1alpha1.CauseNotApplied, "no such device"},
		{"connected by a narrow path", func(s *peeringState) {
			s.endpoint.Status.Connection.StatusMessage = "1232 octets at most"
			s.endpoint.Status.Conditions = append(s.endpoint.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionConnected, Status: metav1.ConditionTrue,
				Reason: v1alpha1.CauseNarrowPath, Message: "1232 octets at most"})
		}, isthmus.ConditionConnected, v1alpha1.CauseNarrowPath, v1alpha1.CauseNarrowPath, "1232 octets at most"},
		{"lost, for a reason that nobody knows", func(s *peeringState) {
			s.endpoint.Status.Connection = v1alpha1.Connection{Status: v1alpha1.ConnectionError, StatusMessage: "no answer"}
			s.endpoint.Status.Conditions = append(s.endpoint.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionConnected, Status: metav1.ConditionFalse,
				Reason: "Weather", Message: "rain"})
		}, isthmus.ConditionConnected, isthmus.ReasonLost, isthmus.ReasonLost, "no answer"},
		{"a node came to lie in a network of the peer", func(s *peeringState) { s.overlaps = []string{"PodCIDR of peer x overlaps a node"} },
			isthmus.ConditionConnected, isthmus.ReasonConnected, isthmus.ReasonOverlap, "overlaps a node; in force: its podCIDR 10.244.64.0/18 as 10.246.0.0/18"},
		{"another Peering is older", func(s *peeringState) { s.conflict = "Peering x is older" },
			isthmus.ConditionConnected, isthmus.ReasonConflict, isthmus.ReasonConflict, "Peering x is older"},
		{"being deleted", func(s *peeringState) { s.peering.DeletionTimestamp, s.waiting = &deleted, "the copy" },
			isthmus.ConditionConnected, isthmus.ReasonConnected, isthmus.ReasonUnpeering, "waiting for the copy"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := agreedState(t)
			c.change(&s)
			status := statusFor(s)
			if len(status.Conditions) != 7 || status.ObservedGeneration != 3 {
				t.Errorf("want 7 conditions and generation 3: %+v", status)
			}
			answered := meta.FindStatusCondition(status.Conditions, isthmus.ConditionAnswered)
			if c.reason == isthmus.ReasonPeerWithdrew && (answered.Status != metav1.ConditionUnknown || !strings.Contains(answered.Message, "before it un-peered")) {
				t.Errorf("the peer has withdrawn, and Answered is %+v", answered)
			}
			for _, condition := range status.Conditions {
				if condition.Reason == "" || condition.Message == "" || condition.ObservedGeneration != 3 || condition.LastTransitionTime.IsZero() {
					t.Errorf("incomplete: %+v", condition)
				}
			}
			if got := meta.FindStatusCondition(status.Conditions, c.which); got == nil || got.Reason != c.reason {
				t.Errorf("%s is %+v, want reason %s", c.which, got, c.reason)
			}
			ready := meta.FindStatusCondition(status.Conditions, isthmus.ConditionReady)
			if ready.Reason != c.ready || !strings.Contains(ready.Message, c.message) {
				t.Errorf("Ready is %+v, want reason %s and %q", ready, c.ready, c.message)
			}
			if (ready.Status == metav1.ConditionTrue) != (v1alpha1.Carries(c.ready) || strings.HasPrefix(c.message, "traffic flows")) {
				t.Errorf("Ready is %s with reason %s", ready.Status, ready.Reason)
			}
		})
	}
}

func TestStatusShowsEachNetworkAsBothSidesSeeIt(t *testing.T) {
	status := statusFor(agreedState(t))
	want := isthmus.PeeringStatus{
		Local:    isthmus.Networks{PodCIDR: "10.244.0.0/16", PodCIDRSeen: "10.70.0.0/16", ExternalCIDR: "10.245.0.0/16", ExternalCIDRSeen: "10.245.0.0/16"},
		Remote:   isthmus.Networks{PodCIDR: "10.244.64.0/18", PodCIDRSeen: "10.246.0.0/18", ExternalCIDR: "10.60.0.0/18", ExternalCIDRSeen: "10.60.0.0/18"},
		Endpoint: "gw.example.org:31000", Latency: "7ms",
	}
	if status.Local != want.Local || status.Remote != want.Remote || status.Endpoint != want.Endpoint || status.Latency != want.Latency {
		t.Errorf("got %+v\nwant %+v", status, want)
	}
}

func TestStatusIsUnchangedWithoutAChange(t *testing.T) {
	s := agreedState(t)
	s.peering.Status = statusFor(s)
	for i := range s.peering.Status.Conditions {
		s.peering.Status.Conditions[i].LastTransitionTime = metav1.NewTime(time.Unix(1000, 0))
	}
	again := statusFor(s)
	for _, c := range again.Conditions {
		if c.LastTransitionTime.Unix() != 1000 {
			t.Errorf("%s has a new transition time without a transition", c.Type)
		}
	}
}

func TestTextOfAPeerIsTruncatedAndEscaped(t *testing.T) {
	if got := plain(strings.Repeat("ä\n", 10_000)); len([]rune(got)) > 510 || strings.ContainsAny(got, "\n\x1b") {
		t.Errorf("%d runes: %.40q", len([]rune(got)), got)
	}
	if got := plain("\xff\xfe"); got != "?" {
		t.Errorf("got %q", got)
	}
}

// A failed key exchange is reported even while sessions use an earlier key. Traffic continues then.
func TestFailedKeyExchangeIsReportedWhileTrafficContinues(t *testing.T) {
	for progress, words := range map[postquantum.Progress]string{
		postquantum.Agreed:    "",
		postquantum.Waiting:   "",
		postquantum.NotOffers: "",
		postquantum.Other:     "",
		postquantum.Changed:   "",
		postquantum.Malformed: "neither an ML-KEM key nor an answer to one",
		postquantum.Altered:   "has a wrong tag",
	} {
		s := agreedState(t)
		s.key = keyState{use: "first", progress: progress}
		s.endpoint.Status.Connection.PeerConfiguration = map[string]string{v1alpha1.ConfigPreshared: "first"}
		got, connected := s.postQuantum(), connectedCondition(s)
		if got.Key != isthmus.KeyMLKEM || connected.status != metav1.ConditionTrue {
			t.Errorf("%s: %+v and %+v; want the key of before, and traffic", progress, got, connected)
		}
		for what, text := range map[string]string{"status.postQuantum.why": got.Why, "Connected": connected.message} {
			if mentioned := strings.Contains(text, "no new preshared key: "); mentioned != (words != "") || !strings.Contains(text, words) {
				t.Errorf("%s: %s is %q; want %q", progress, what, text, words)
			}
		}

		s.endpoint.Status.Connection.PeerConfiguration = nil
		s.key.use = ""
		if got := s.postQuantum(); got.Key != isthmus.KeyNone || got.Why == "" || !strings.Contains(got.Why, words) {
			t.Errorf("%s, and no key in use: %+v; want %q", progress, got, words)
		}
	}
}
