package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// ErrNoPeering says that a cluster has no Peering with another one.
var ErrNoPeering = errors.New("there is no Peering")

// FindPeering returns a cluster's Peering with another one.
func FindPeering(ctx context.Context, at client.Reader, with v1alpha1.ClusterID) (*isthmus.Peering, error) {
	var list isthmus.PeeringList
	if err := at.List(ctx, &list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		if list.Items[i].Spec.Cluster.ClusterID == with {
			return &list.Items[i], nil
		}
	}
	return nil, ErrNoPeering
}

// WaitReady waits until a cluster's Peering with another one is Ready, or ctx ends. The error says what
// it lacked.
func WaitReady(ctx context.Context, at client.Reader, with v1alpha1.ClusterID) error {
	last := ErrNoPeering
	err := wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		p, err := FindPeering(ctx, at, with)
		if err != nil {
			return false, nil //nolint:nilerr // not there yet, or the API server is away: the wait goes on
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == isthmus.ConditionReady {
				last = fmt.Errorf("%s: %s", condition.Reason, condition.Message)
				return condition.Status == "True", nil
			}
		}
		return false, nil
	})
	if err != nil {
		return last
	}
	return nil
}
