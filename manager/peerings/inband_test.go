package peerings

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// If the tunnel is down, the change that would repair it cannot be replicated through it.
func TestIdentityConditionReportsAnUnusableInBandTunnel(t *testing.T) {
	for _, c := range []struct {
		name    string
		edit    func(*peeringState)
		reason  string
		message string // part of the expected message
	}{
		{"the tunnel is down", func(*peeringState) {}, isthmus.ReasonTunnelDown, "if a gateway's address or key has changed since"},
		{"and the peer lacks news of ours", func(s *peeringState) {
			s.published = no(isthmus.ReasonPublishing, "it is not up to date yet")
		}, isthmus.ReasonTunnelDown, "our NetworkConfig has changed"},
		{"the peer was un-peered alone", func(s *peeringState) {
			s.endpoint, s.copies = nil, nil
			s.peering.Status.Conditions = []metav1.Condition{{Type: isthmus.ConditionPeerConfig, Reason: isthmus.ReasonAnswered}}
		}, isthmus.ReasonTunnelDown, "the peer has un-peered, which closed the tunnel to its API server; run isthmus unpeer"},
		{"spec.inBand was set by hand, and no manager gets through to say so", func(s *peeringState) {
			delete(s.copies[0].Spec.BackendConfig, v1alpha1.ConfigInBand)
			s.endpoint.Status.Connection.Status = v1alpha1.Connected
		}, isthmus.ReasonUnreachable, "does not confirm that its Peering has spec.inBand"},
		{"the peer says so, and its TunnelEndpoint is from before", func(s *peeringState) {
			s.endpoint.Annotations = nil
		}, isthmus.ReasonTunnelDown, "if a gateway's address or key has changed since"},
		{"the tunnel works", func(s *peeringState) { s.endpoint.Status.Connection.Status = v1alpha1.Connected }, isthmus.ReasonUnreachable, "no answer"},
		{"no tunnel is needed", func(s *peeringState) { s.peering.Spec.InBand = false }, isthmus.ReasonUnreachable, "no answer"},
		{"the peer refuses us", func(s *peeringState) { s.identity.reason = isthmus.ReasonUnauthorized }, isthmus.ReasonUnauthorized, "no answer"},
	} {
		s := agreedState(t)
		s.peering.Spec.InBand = true
		s.identity = no(isthmus.ReasonUnreachable, "no answer")
		s.endpoint.Status.Connection = v1alpha1.Connection{Status: v1alpha1.ConnectionError, StatusMessage: "nothing is heard"}
		s.endpoint.Annotations = map[string]string{isthmus.AnnotationInBand: "true"}
		s.copies[0].Spec.BackendConfig[v1alpha1.ConfigInBand] = "true"
		c.edit(&s)
		v := conditionsFor(s)[isthmus.ConditionIdentity]
		if v.status != metav1.ConditionFalse || v.reason != c.reason || !strings.Contains(v.message, c.message) {
			t.Errorf("%s: %+v, want %s: %s", c.name, v, c.reason, c.message)
		}
		if again := strings.Contains(v.message, "isthmus peer --in-band"); again != (v.message != "no answer") {
			t.Errorf("%s: says what to do: %t", c.name, again)
		}
	}
}

// If both Peerings are deleted, neither gateway forwards the other manager's requests.
func TestInBandUnpeeringWaitsWhileTheTunnelExists(t *testing.T) {
	left := metav1.NewTime(time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC))
	ends := left.Add(peers.InBandPatience)
	for _, c := range []struct {
		name string
		edit func(*isthmus.Peering)
		now  time.Time
		want bool
	}{
		{"the tunnel is there", func(*isthmus.Peering) {}, ends.Add(-time.Second), false},
		{"it has ended", func(*isthmus.Peering) {}, ends, true},
		{"not through the tunnel", func(p *isthmus.Peering) { p.Spec.InBand = false }, ends, false},
		{"not left", func(p *isthmus.Peering) { p.DeletionTimestamp = nil }, ends, false},
		{"forced", func(p *isthmus.Peering) { p.Annotations = map[string]string{isthmus.AnnotationForce: "true"} }, left.Time, true},
	} {
		s := agreedState(t)
		s.peering.Spec.InBand, s.peering.DeletionTimestamp = true, &left
		s.endpoint, s.original, s.services.left = nil, nil, true
		c.edit(s.peering)
		if got := peers.From(s.peering).Abandoned(c.now); got != c.want {
			t.Errorf("%s: abandoned %t", c.name, got)
		}
		if waits := waitingFor(s, c.now); (waits == "") != c.want {
			t.Errorf("%s: waits for %q", c.name, waits)
		}
	}
}

func TestInBandUnpeeringReportsItsDeadlineAndRemainingObjects(t *testing.T) {
	left := metav1.NewTime(time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC))
	s := agreedState(t)
	s.peering.Spec.InBand, s.peering.DeletionTimestamp, s.endpoint = true, &left, nil
	s.original = s.original.DeepCopy()
	s.original.Finalizers = []string{v1alpha1.FinalizerReplicator}
	got := waitingFor(s, left.Time)
	for _, want := range []string{"NetworkConfig " + s.peering.Spec.TenantNamespace.Remote + "/" + s.original.Name, isthmus.AnnotationForce, "when the tunnel is closed, at 12:00:30Z"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
}
