package install

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

// annotationHurried has the time at which Hurry last changed a definition. Such a definition is
// being deleted.
const annotationHurried = "isthmus.net/hurried"

// hurryAfter is how long Hurry waits for the API server before it changes a definition.
const hurryAfter = 3 * time.Second

// Hurry changes a definition whose deletion takes long, so that the API server's controller
// continues the deletion. The controller stops after a conflict with another writer. It continues
// at the next change of the definition, or after five minutes (apiextensions-apiserver,
// pkg/controller/finalizer; seen in Kubernetes 1.31.0).
func Hurry(ctx context.Context, c *cluster.Cluster, going *unstructured.Unstructured) error {
	if since := going.GetDeletionTimestamp(); since == nil || time.Since(since.Time) < hurryAfter {
		return nil
	}
	if last, err := time.Parse(time.RFC3339, going.GetAnnotations()[annotationHurried]); err == nil && time.Since(last) < hurryAfter {
		return nil
	}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, annotationHurried, time.Now().UTC().Format(time.RFC3339))
	return c.Explain("change "+cluster.Describe(going), client.IgnoreNotFound(c.Client.Patch(ctx, going, client.RawPatch("application/merge-patch+json", patch))))
}

// untilNoneTerminates waits until no definition in objects is being deleted. To apply such a
// definition would not stop its deletion, nor the deletion of all objects of its kind. Only the
// components can complete the deletion if their finalizers delay it. If installs is set, the caller
// starts the components later, so untilNoneTerminates returns such definitions as held instead of
// waiting.
func untilNoneTerminates(ctx context.Context, c *cluster.Cluster, objects []*unstructured.Unstructured, installs bool) (held []*unstructured.Unstructured, err error) {
	for _, o := range objects {
		if o.GetKind() != DefinitionKind.Kind {
			continue
		}
		if installs {
			have, err := c.Get(ctx, DefinitionKind, "", o.GetName())
			if err != nil {
				return nil, err
			}
			ours, err := heldByUs(ctx, c, have)
			if err != nil {
				return nil, err
			}
			if ours {
				held = append(held, o)
				continue
			}
		}
		if err := waitTerminated(ctx, c, o.GetName(), deletionTimeout, "nothing was changed"); err != nil {
			return nil, err
		}
	}
	return held, nil
}

// finalizers are the finalizers that our components remove when an object is being deleted.
var finalizers = []string{isthmus.FinalizerPeering, v1alpha1.FinalizerReplicator, v1alpha1.FinalizerTunnelEndpointCreator, v1alpha1.FinalizerGateway}

// heldByUs reports whether a definition is being deleted, only finalizers of our components delay
// the deletion, and no manager is active.
func heldByUs(ctx context.Context, c *cluster.Cluster, definition *unstructured.Unstructured) (bool, error) {
	if definition == nil || definition.GetDeletionTimestamp() == nil {
		return false, nil
	}
	manager, err := cluster.HolderOf(ctx, c, cluster.ManagerLease, false)
	if err != nil || manager.Name != "" {
		return false, err
	}
	some := false
	for _, kind := range servedKinds(definition) {
		var objects unstructured.UnstructuredList
		objects.SetGroupVersionKind(kind)
		err := c.Client.List(ctx, &objects)
		if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
			continue // the API server no longer serves this kind
		}
		if err != nil {
			return false, c.Explain("objects of "+cluster.Describe(definition), err)
		}
		for i := range objects.Items {
			for _, f := range objects.Items[i].GetFinalizers() {
				if some = true; !slices.Contains(finalizers, f) {
					return false, nil
				}
			}
		}
	}
	return some, nil
}

// defineAgain applies each held definition again once the components have removed their finalizers.
// It handles all definitions concurrently, because a starting manager needs all of them.
func defineAgain(ctx context.Context, c *cluster.Cluster, held []*unstructured.Unstructured, o Options) error {
	var group sync.WaitGroup
	var reporting sync.Mutex
	report := func(format string, args ...any) {
		reporting.Lock()
		defer reporting.Unlock()
		o.Report(fmt.Sprintf(format, args...))
	}
	errs := make([]error, len(held))
	for i, u := range held {
		group.Go(func() {
			report("%s: %[2]s is being deleted; waiting until the manager has removed its objects, to create %[2]s again", c, cluster.Describe(u))
			if errs[i] = waitTerminated(ctx, c, u.GetName(), max(deletionTimeout, o.Wait), "everything else is applied"); errs[i] != nil {
				return
			}
			var outcome cluster.Outcome
			if outcome, errs[i] = applyManifest(ctx, c, u); errs[i] == nil {
				report("%s: %s %s", c, cluster.Describe(u), outcome)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// waitTerminated waits until a definition is no longer being deleted, but at most for patience.
// Then it returns an error, which includes state, a description of the installation.
func waitTerminated(ctx context.Context, c *cluster.Cluster, name string, patience time.Duration, state string) error {
	if _, err := untilDeleted(ctx, c, name, patience); err != nil {
		return err
	}
	have, err := c.Get(ctx, DefinitionKind, "", name)
	if err != nil || have == nil || have.GetDeletionTimestamp() == nil {
		return err
	}
	return fmt.Errorf("%s: %s has been terminating since %s, and still exists after %v, perhaps because of an object of its kind with a finalizer (kubectl get %s -A); %s; once it is gone, run this command again",
		c, cluster.Describe(have), have.GetDeletionTimestamp().UTC().Format(time.RFC3339), patience, have.GetName(), state)
}

// deletionTimeout is the time that the deletion of a definition may take.
const deletionTimeout = time.Minute

// untilDeleted waits until a definition is no longer being deleted, but at most for patience.
// deleted is true if it does not exist.
func untilDeleted(ctx context.Context, c *cluster.Cluster, name string, patience time.Duration) (deleted bool, err error) {
	for deadline := time.Now().Add(patience); ; {
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
