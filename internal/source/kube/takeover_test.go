package kube

import (
	"net/netip"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// What a gateway writes into a Lease that it takes is what it then says of itself.
func TestTheLeaseSaysWhyItsHolderIsActive(t *testing.T) {
	for _, tc := range []struct {
		name, holder string // of the Lease before; "none": there is no Lease
		want         isthmus.Takeover
		text         string
	}{
		{"first", "none", isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverNoneActive}, "no gateway was active"},
		{"released", "", isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverReleased, Former: "you"}, "Pod you handed over"},
		{"expired", "you", isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverExpired, Former: "you"}, "Pod you did not renew the Lease"},
	} {
		e := electionWith(nil, "me", nil, quiet)
		now := time.Now().Truncate(time.Microsecond)
		if tc.holder != "none" {
			e.name = "you"
			e.lease = &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{HolderIdentity: &tc.holder}}
		}
		want := take(e.lease, "me", now)
		e.takes(now).mark(want)
		if _, active := e.mandate(); active {
			t.Errorf("%s: it is active before it has the Lease", tc.name)
		}
		e.observe(want, now)
		m, active := e.mandate()
		if !active || m.Takeover != tc.want || m.String() != tc.text || !m.Since.Equal(now) || m.Epoch != 1 {
			t.Errorf("%s: active is %v, by %+v: %s", tc.name, active, m, m)
		}
	}
}

// Where nodes vote, the Lease follows later.
func TestTheLeaseSaysWhyTheNodesElectedItsHolder(t *testing.T) {
	for _, tc := range []struct {
		former   string
		released bool
		want     string
	}{
		{"", false, isthmus.TakeoverNoneActive},
		{"you", true, isthmus.TakeoverReleased},
		{"you", false, isthmus.TakeoverNotHeard},
	} {
		voters := map[string]netip.Addr{"a": netip.MustParseAddr("192.0.2.1"), "b": netip.MustParseAddr("192.0.2.2"), "c": netip.MustParseAddr("192.0.2.3")}
		candidate := voting.NewCandidate("me", netip.Addr{}, func() [32]byte { return [32]byte{} }, quiet)
		candidate.SetNodes(voters)
		e := electionWith(nil, "me", nil, quiet)
		e.votes, e.list = &ballot{Candidate: candidate, wanted: true, agents: func() *map[string]bool { return nil }}, voting.List{Version: 5, Voters: voters}
		e.name, e.transition = tc.former, 8
		holder, transitions := "you", int32(8)
		e.lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseTransitions: &transitions}}
		elected := time.Now().Truncate(time.Microsecond)
		view := voting.View{Holds: true, Epoch: 9, List: 5, Heard: []string{"a", "b", "c"}, Released: tc.released}
		e.mu.Lock()
		e.judgeVotesLocked(view, elected)
		e.mu.Unlock()
		lease := e.stepVotes(view, elected.Add(time.Minute)) // when the API server answers again
		got := takeoverOf(lease)
		if want := (isthmus.Takeover{Pod: "me", Reason: tc.want, Former: tc.former}); got.Takeover != want || !got.since.Equal(elected) || *lease.Spec.LeaseTransitions != 9 {
			t.Errorf("after %+v: %+v", tc, got)
		}
		if m, active := e.mandate(); !active || m.Takeover != got.Takeover || m.Epoch != 9 || !m.Since.Equal(elected) {
			t.Errorf("after %+v it says of itself: %v, %+v", tc, active, m)
		}
	}
}
