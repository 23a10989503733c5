package manager

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestKindCountsAsRemovedOnlyAfterSeveralChecks(t *testing.T) {
	with, without := optionalKinds{foreignClusters: true, serviceCIDRs: true}, optionalKinds{serviceCIDRs: true}
	for name, tc := range map[string]struct {
		had   optionalKinds
		looks []optionalKinds // the last one is repeated
		after int             // number of checks until changed is called
	}{
		"gone for good":       {with, []optionalKinds{without}, absenceChecks},
		"back in between":     {with, []optionalKinds{without, without, without, with, without}, 4 + absenceChecks},
		"an error in between": {with, []optionalKinds{without, {}, without}, 1 + absenceChecks},
		"there at last":       {without, []optionalKinds{without, with}, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			n, began := 0, time.Now()
			changed := false
			watchKinds(t.Context(), func(context.Context) (optionalKinds, error) {
				p := tc.looks[min(n, len(tc.looks)-1)]
				if n++; p == (optionalKinds{}) {
					return p, errors.New("no answer")
				}
				return p, nil
			}, tc.had, time.Second, func() { changed = true })
			if looked := int(time.Since(began) / time.Second); !changed || looked != tc.after {
				t.Errorf("%s: after %d looks, want %d", name, looked, tc.after)
			}
		})
	}
}

// owned is a reader with one TunnelEndpoint, whose owner is an object of the given kind.
type owned struct {
	client.Reader
	kind string
}

func (o owned) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*metav1.PartialObjectMetadataList).Items = []metav1.PartialObjectMetadata{{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "te",
		OwnerReferences: []metav1.OwnerReference{{Kind: "NetworkConfig"}, {Kind: o.kind}}}}}
	return nil
}

func TestStartingManagerChecksRepeatedlyThatForeignClustersAreRemoved(t *testing.T) {
	for n := 1; n <= absenceChecks; n++ {
		if err := checkAbsence(t.Context(), owned{kind: "ForeignCluster"}, n); (err == nil) != (n == absenceChecks) {
			t.Errorf("look %d: %v", n, err)
		}
	}
	if err := checkAbsence(t.Context(), owned{kind: "Peering"}, 1); err != nil {
		t.Errorf("no ForeignCluster has a tunnel: %v", err)
	}
}
