package health

import (
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func TestEveryTunnelReasonIsRanked(t *testing.T) {
	for _, reason := range v1alpha1.Causes {
		if !v1alpha1.Carries(reason) && reason != v1alpha1.CauseConnecting && specificity(reason) < 0 {
			t.Errorf("%s has no place among the reasons", reason)
		}
	}
}
