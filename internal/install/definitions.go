package install

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/cluster"
)

// annotationHurried is when a definition that is being deleted was changed last; see hurry.
const annotationHurried = "isthmus.net/hurried"

// hurriedAfter is how long an API server may take for a definition without objects.
const hurriedAfter = 3 * time.Second

// Hurry changes a definition that has been going for a while. The API server's own controller of definitions gives up
// when another one has written a definition at the same time, and goes on with the next change of it or after five
// minutes (apiextensions-apiserver, pkg/controller/finalizer; seen in Kubernetes 1.31.0).
func Hurry(ctx context.Context, c *cluster.Cluster, going *unstructured.Unstructured) error {
	if since := going.GetDeletionTimestamp(); since == nil || time.Since(since.Time) < hurriedAfter {
		return nil
	}
	if last, err := time.Parse(time.RFC3339, going.GetAnnotations()[annotationHurried]); err == nil && time.Since(last) < hurriedAfter {
		return nil
	}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, annotationHurried, time.Now().UTC().Format(time.RFC3339))
	return c.Explain("change "+cluster.Describe(going), client.IgnoreNotFound(c.Client.Patch(ctx, going, client.RawPatch("application/merge-patch+json", patch))))
}

// untilNoneGoes waits until none of the definitions among some objects is being deleted any more: one that is applied
// before goes all the same, with all objects of its kind.
func untilNoneGoes(ctx context.Context, c *cluster.Cluster, objects []*unstructured.Unstructured) error {
	for _, o := range objects {
		if o.GetKind() != DefinitionKind.Kind {
			continue
		}
		if _, err := untilGone(ctx, c, o.GetName()); err != nil {
			return err
		}
		have, err := c.Get(ctx, DefinitionKind, "", o.GetName())
		if err != nil {
			return err
		}
		if have != nil && have.GetDeletionTimestamp() != nil {
			return fmt.Errorf("%s: %s is being deleted since %s and is not gone after a minute, perhaps because an object of its kind has a finalizer (kubectl get %s -A); want it gone, then this again: nothing was changed",
				c, cluster.Describe(have), have.GetDeletionTimestamp().UTC().Format(time.RFC3339), have.GetName())
		}
	}
	return nil
}

// untilGone waits until the definition of a name is not being deleted any more, for a minute at most. gone is true
// when there is none.
func untilGone(ctx context.Context, c *cluster.Cluster, name string) (gone bool, err error) {
	for deadline := time.Now().Add(time.Minute); ; {
		have, err := c.Get(ctx, DefinitionKind, "", name)
		if err != nil || have == nil || have.GetDeletionTimestamp() == nil {
			return have == nil, err
		}
		if time.Now().After(deadline) {
			return false, nil
		}
		if err := Hurry(ctx, c, have); err != nil {
			return false, err
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}
