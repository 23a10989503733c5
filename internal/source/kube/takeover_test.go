package kube

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// storedLease is an API server that stores at most one Lease.
type storedLease struct {
	coordination.LeaseInterface
	lease   *coordinationv1.Lease
	version int
}

func (l *storedLease) Get(context.Context, string, metav1.GetOptions) (*coordinationv1.Lease, error) {
	if l.lease == nil {
		return nil, apierrors.NewNotFound(leaseResource, isthmus.LeaseGateway)
	}
	return l.lease.DeepCopy(), nil
}

func (l *storedLease) Create(_ context.Context, lease *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return l.put(lease), nil
}

func (l *storedLease) Update(_ context.Context, lease *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return l.put(lease), nil
}

func (l *storedLease) put(lease *coordinationv1.Lease) *coordinationv1.Lease {
	l.version++
	l.lease = lease.DeepCopy()
	l.lease.ResourceVersion = fmt.Sprint(l.version)
	return l.lease.DeepCopy()
}

func TestLeaseRecordsWhyItsHolderIsActive(t *testing.T) {
	for _, tc := range []struct {
		name           string
		held, released bool // whether another gateway held the Lease, and released it, before the test starts
		want           isthmus.Takeover
		text           string
	}{
		{"none was active", false, false, isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverNoneActive}, "no gateway was active"},
		{"released", true, true, isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverReleased, Previous: "you"}, "Pod you handed over"},
		{"expired", true, false, isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverExpired, Previous: "you"}, "Pod you did not renew the Lease"},
	} {
		synctest.Test(t, func(t *testing.T) {
			api := new(storedLease)
			epoch := int32(1)
			if tc.held {
				api.put(withHolder(nil, "you", time.Now()))
				epoch = 2
			}
			e := electionWith(api, "me", nil, quiet)
			if tc.held {
				e.step(t.Context())
			}
			if tc.released {
				lease := api.lease
				lease.Spec.HolderIdentity = new(string)
				api.put(lease)
			}
			for range 10 {
				e.step(t.Context())
				m, active := e.mandate()
				if holderOf(api.lease) != "me" && active {
					t.Fatalf("%s: it is active before it has the Lease", tc.name)
				}
				if active {
					if m.Takeover != tc.want || m.String() != tc.text || !m.Since.Equal(time.Now()) || m.Epoch != epoch || takeoverOf(api.lease).Takeover != tc.want {
						t.Errorf("%s: %+v: %s; the Lease has %v", tc.name, m.Takeover, m, api.lease.Annotations)
					}
					return
				}
				time.Sleep(retryPeriod)
			}
			t.Errorf("%s: it does not become active", tc.name)
		})
	}
}

// While nodes vote, the Lease is updated after the election.
func TestLeaseRecordsWhyTheNodesElectedItsHolder(t *testing.T) {
	for _, tc := range []struct {
		previous string
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
		e.name, e.transition = tc.previous, 8
		holder, transitions := "you", int32(8)
		e.lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseTransitions: &transitions}}
		elected := time.Now().Truncate(time.Microsecond)
		view := voting.View{Holds: true, Epoch: 9, List: 5, Heard: []string{"a", "b", "c"}, Released: tc.released}
		e.mu.Lock()
		e.reevaluateVotesLocked(view, elected)
		e.mu.Unlock()
		lease := e.stepVotes(view, elected.Add(time.Minute)) // the API server answers only now
		got := takeoverOf(lease)
		if want := (isthmus.Takeover{Pod: "me", Reason: tc.want, Previous: tc.previous}); got.Takeover != want || !got.since.Equal(elected) || *lease.Spec.LeaseTransitions != 9 {
			t.Errorf("after %+v: %+v", tc, got)
		}
		if m, active := e.mandate(); !active || m.Takeover != got.Takeover || m.Epoch != 9 || !m.Since.Equal(elected) {
			t.Errorf("after %+v it says of itself: %v, %+v", tc, active, m)
		}
	}
}
