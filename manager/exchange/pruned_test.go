package exchange

import (
	"context"
	"log/slog"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// pruning is an API server that stores the status of one NetworkConfig without its conditions.
type pruning struct {
	client.Client
	stored  v1alpha1.NetworkConfigStatus
	patches int
}

func (p *pruning) Status() client.SubResourceWriter { return pruningStatus{p: p} }

type pruningStatus struct {
	client.SubResourceWriter
	p *pruning
}

func (s pruningStatus) Patch(_ context.Context, o client.Object, _ client.Patch, _ ...client.SubResourcePatchOption) error {
	nc := o.(*v1alpha1.NetworkConfig)
	nc.Status.Conditions = nil
	s.p.stored = nc.Status
	s.p.patches++
	return nil
}

// If the API server drops conditions, an unchanged status is not written again, even if the
// condition would change.
func TestUnchangedStatusIsNotWrittenAgainIfConditionsAreDropped(t *testing.T) {
	api := new(pruning)
	var r *answerReconciler
	restart := func() { r = &answerReconciler{Client: api, Log: slog.New(slog.DiscardHandler)} }
	restart()
	for _, step := range []struct {
		name    string
		answer  v1alpha1.NetworkConfigStatus
		reason  string
		restart bool
		patches int // expected number of patches for three calls of write
	}{
		{"answered", v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: v1alpha1.None, ExternalCIDRNAT: v1alpha1.None}, v1alpha1.ReasonAnswered, false, 1},
		{"another manager finds out", v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: v1alpha1.None, ExternalCIDRNAT: v1alpha1.None}, v1alpha1.ReasonAnswered, true, 1},
		{"another reason", v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: v1alpha1.None, ExternalCIDRNAT: v1alpha1.None}, v1alpha1.ReasonKeyConflict, false, 0},
		{"another answer", v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: "10.70.0.0/16", ExternalCIDRNAT: v1alpha1.None}, v1alpha1.ReasonAnswered, false, 1},
		{"none any more", v1alpha1.NetworkConfigStatus{}, v1alpha1.ReasonConsent, false, 1},
	} {
		if step.restart {
			restart()
		}
		api.patches = 0
		for i := range 3 {
			nc := &v1alpha1.NetworkConfig{Status: api.stored}
			nc.Generation = int64(i)
			status := metav1.ConditionFalse
			if step.reason == v1alpha1.ReasonAnswered {
				status = metav1.ConditionTrue
			}
			if err := r.write(t.Context(), nc, step.answer, metav1.Condition{Status: status, Reason: step.reason}); err != nil {
				t.Fatal(err)
			}
		}
		if api.patches != step.patches {
			t.Errorf("%s: %d patches; want %d", step.name, api.patches, step.patches)
		}
	}
}
