package peerings

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

func TestStatusReportsTheKeysOfTheSessions(t *testing.T) {
	text := func(n byte) v1alpha1.ConfigValue { return v1alpha1.ConfigValue(keyring.Text(managertest.Key(n))) }
	first, second := metav1.NewTime(time.Unix(1000, 0)), metav1.NewTime(time.Unix(2000, 0))
	s := peeringState{}
	if got := s.keys(isthmus.KeysStatus{Ours: "x"}, first); got != (isthmus.KeysStatus{}) {
		t.Errorf("without a tunnel: %+v", got)
	}
	s.endpoint, s.original = new(v1alpha1.TunnelEndpoint), new(v1alpha1.NetworkConfig)
	s.endpoint.Spec.BackendConfig = v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: text(2)}
	s.original.Spec.BackendConfig = v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: text(1)}
	k := s.keys(isthmus.KeysStatus{}, first)
	if k.Ours != "" || k.Lags || k.OursSince != nil || k.Theirs != keyring.Fingerprint(managertest.Key(2)) {
		t.Errorf("without a session: %+v", k)
	}
	s.endpoint.Status.Connection.PeerConfiguration = v1alpha1.PeerConfiguration{v1alpha1.ConfigOwnKey: text(1)}
	k = s.keys(k, second)
	if k.Ours != keyring.Fingerprint(managertest.Key(1)) || k.Lags || !k.OursSince.Equal(&second) || !k.TheirsSince.Equal(&first) {
		t.Errorf("with a session: %+v", k)
	}
	s.original.Spec.BackendConfig[v1alpha1.ConfigPublicKey] = text(3)
	if k = s.keys(k, first); !k.Lags || !k.OursSince.Equal(&second) {
		t.Errorf("while it rotates: %+v", k)
	}
}

// A peer that missed a rotation is reported until it has a session with the new key.
func TestPeerThatMissedAKeyRotationIsReported(t *testing.T) {
	text := func(n byte) v1alpha1.ConfigValue { return v1alpha1.ConfigValue(keyring.Text(managertest.Key(n))) }
	s := peeringState{peering: new(isthmus.Peering), original: new(v1alpha1.NetworkConfig), endpoint: new(v1alpha1.TunnelEndpoint)}
	s.peering.Spec.Cluster.ClusterName = "bravo"
	s.original.Spec.BackendConfig = v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: text(3)}
	look := func(own byte, status v1alpha1.ConnectionStatus, rotates bool) (missed bool) {
		t.Helper()
		s.rotates, s.endpoint.Status.Connection = rotates, v1alpha1.Connection{Status: status}
		if own != 0 {
			s.endpoint.Status.Connection.PeerConfiguration = v1alpha1.PeerConfiguration{v1alpha1.ConfigOwnKey: text(own)}
		}
		v := connectedCondition(s)
		s.peering.Status.Keys = s.keys(s.peering.Status.Keys, metav1.Now())
		if missed = v.reason == isthmus.ReasonKeyMissed; missed && (v.status != metav1.ConditionFalse || !strings.Contains(v.message, "bravo")) {
			t.Errorf("%+v", v)
		}
		return missed
	}
	for _, step := range []struct {
		what    string
		own     byte
		status  v1alpha1.ConnectionStatus
		rotates bool
		missed  bool
	}{
		{"a peer that was never connected", 0, v1alpha1.Connecting, false, false},
		{"a rotation while it is away", 0, v1alpha1.ConnectionError, true, false},
		{"the end of the rotation", 0, v1alpha1.ConnectionError, false, true},
		{"its return", 3, v1alpha1.Connected, false, false},
		{"a loss after that", 0, v1alpha1.ConnectionError, false, false},
		{"a rotation that it does not follow", 1, v1alpha1.Connected, true, false},
		{"the end of that one", 0, v1alpha1.ConnectionError, false, true},
		{"the next rotation, which tells it again", 0, v1alpha1.ConnectionError, true, false},
		{"its return then", 3, v1alpha1.Connected, true, false},
		{"a loss after it moved", 0, v1alpha1.ConnectionError, true, false},
		{"the end of the last one", 0, v1alpha1.ConnectionError, false, false},
	} {
		if missed := look(step.own, step.status, step.rotates); missed != step.missed {
			t.Errorf("%s: missed %v, want %v", step.what, missed, step.missed)
		}
	}
}

// The missed rotation is not reported if the peer has our NetworkConfig, or if the gateway reports
// a more specific cause.
func TestMoreSpecificCausesAreReportedInsteadOfAMissedKeyRotation(t *testing.T) {
	for _, c := range []struct {
		cause     string
		published metav1.ConditionStatus
		want      string
	}{
		{v1alpha1.CauseNoAnswer, metav1.ConditionFalse, isthmus.ReasonKeyMissed},
		{v1alpha1.CausePeerSilent, metav1.ConditionUnknown, isthmus.ReasonKeyMissed},
		{v1alpha1.CauseNoAnswer, metav1.ConditionTrue, v1alpha1.CauseNoAnswer},
		{v1alpha1.CauseEndpointName, metav1.ConditionFalse, v1alpha1.CauseEndpointName},
		{v1alpha1.CauseSendError, metav1.ConditionFalse, v1alpha1.CauseSendError},
		{v1alpha1.CauseWrongKey, metav1.ConditionFalse, v1alpha1.CauseWrongKey},
		{v1alpha1.CauseWrongKey, metav1.ConditionTrue, v1alpha1.CauseWrongKey},
	} {
		s := agreedState(t)
		s.published.status, s.peering.Status.Keys.Lags = c.published, true
		s.endpoint.Status.Connection = v1alpha1.Connection{Status: v1alpha1.ConnectionError, StatusMessage: "the cause"}
		s.endpoint.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionConnected, Status: metav1.ConditionFalse, Reason: c.cause, Message: "the cause"}}
		v := connectedCondition(s)
		if v.reason != c.want || v.status != metav1.ConditionFalse {
			t.Errorf("%+v: %+v", c, v)
		}
		if mentioned := strings.Contains(v.message, "the key of our gateway rotated"); mentioned != (c.want == isthmus.ReasonKeyMissed || c.want == v1alpha1.CauseWrongKey) {
			t.Errorf("%+v: %s", c, v.message)
		}
	}
}
