package install

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// waitRolledOut waits until the applied components run. It reports the reason for waiting whenever
// the reason changes. When the time has run out, it returns an error that includes state, a
// description of the installation.
func waitRolledOut(ctx context.Context, c *cluster.Cluster, objects []*unstructured.Unstructured, o Options, state string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Wait, cluster.ErrNotReady)
	defer cancel()
	for _, u := range objects {
		reported := ""
		for {
			wait, warning, err := waitsFor(ctx, c, u)
			switch {
			case ctx.Err() != nil && !errors.Is(context.Cause(ctx), cluster.ErrNotReady):
				return fmt.Errorf("interrupted: %s; run the same command again to continue waiting", state)
			case ctx.Err() != nil:
				if reported == "" {
					reported = fmt.Sprintf("%s: %s", c, cluster.Describe(u))
				}
				return fmt.Errorf("%w: the components do not run after %v; %s; run the same command again to continue waiting\n%s", cluster.ErrNotReady, o.Wait, state, reported)
			case errors.Is(err, cluster.ErrUnreachable): // the API server may become reachable again
				wait = safetext.Of(err.Error())
			case err != nil:
				return err
			}
			if wait == "" {
				if warning != "" {
					o.Report(fmt.Sprintf("%s: warning: %s: %s", c, cluster.Describe(u), warning))
				}
				break
			}
			if now := fmt.Sprintf("%s: waiting for %s: %s", c, cluster.Describe(u), wait); now != reported {
				reported = now
				o.Report(reported)
			}
			select {
			case <-ctx.Done():
			case <-time.After(cluster.PollInterval):
			}
		}
		if reported != "" {
			o.Report(fmt.Sprintf("%s: %s runs", c, cluster.Describe(u)))
		}
	}
	return nil
}

// waitsFor returns the reason why not all Pods of a Deployment or DaemonSet are ready. It returns
// "" if they are, or if u has another kind. If only Pods for which no node has room are missing in
// a Deployment, and one Pod is ready, it returns a warning instead of a reason.
func waitsFor(ctx context.Context, c *cluster.Cluster, u *unstructured.Unstructured) (wait, warning string, err error) {
	var selector *metav1.LabelSelector
	var want, updated, available int32
	var seen, one bool
	why := ""
	switch u.GetKind() {
	case "Deployment":
		var d appsv1.Deployment
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(u), &d); err != nil {
			return "", "", c.Explain(cluster.Describe(u), err)
		}
		selector, want, updated, available = d.Spec.Selector, *d.Spec.Replicas, d.Status.UpdatedReplicas, d.Status.AvailableReplicas
		seen, one = d.Status.ObservedGeneration >= d.Generation && d.Status.Replicas == want, true
		for _, condition := range d.Status.Conditions {
			if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
				why = safetext.Of(condition.Message) // for example because of a quota, or of an admission policy that rejects Pods
			}
		}
	case "DaemonSet":
		var d appsv1.DaemonSet
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(u), &d); err != nil {
			return "", "", c.Explain(cluster.Describe(u), err)
		}
		selector, want, updated, available = d.Spec.Selector, d.Status.DesiredNumberScheduled, d.Status.UpdatedNumberScheduled, d.Status.NumberAvailable
		seen = d.Status.ObservedGeneration >= d.Generation
	default:
		return "", "", nil
	}
	if seen && updated == want && available == want {
		return "", "", nil
	}
	text := fmt.Sprintf("%d of %d ready", min(updated, available), want)
	pending, unscheduled := whyNot(ctx, c, u.GetNamespace(), selector)
	if one && seen && updated == want && available > 0 && available+unscheduled == want {
		return "", text + "; " + pending, nil
	}
	if why = cmp.Or(pending, why); why != "" {
		text += "; " + why
	}
	return text, "", nil
}

// whyNot returns the problem of the first Pod that is not ready. It also returns the number of Pods
// for which the scheduler finds no node. While a Pod is being deleted, this number is 0, because a
// node will have room.
func whyNot(ctx context.Context, c *cluster.Cluster, namespace string, selector *metav1.LabelSelector) (why string, unscheduled int32) {
	var pods corev1.PodList
	if err := c.Client.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabels(selector.MatchLabels)); err != nil {
		return "", 0 // an error is ignored, because only the explanation is missing then
	}
	leaving := false
	for i := range pods.Items {
		p := &pods.Items[i]
		leaving = leaving || p.DeletionTimestamp != nil
		problem := ""
		for _, s := range p.Status.ContainerStatuses {
			if w := s.State.Waiting; w != nil && w.Reason != "ContainerCreating" {
				problem = fmt.Sprintf("Pod %s on %s: %s: %s", p.Name, p.Spec.NodeName, safetext.Of(w.Reason), safetext.Of(w.Message))
			} else if last := s.LastTerminationState.Terminated; last != nil && !s.Ready {
				problem = fmt.Sprintf("Pod %s on %s ended with %d: %s", p.Name, p.Spec.NodeName, last.ExitCode, safetext.Of(last.Message))
			}
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
				problem = fmt.Sprintf("Pod %s: %s", p.Name, safetext.Of(condition.Message))
				unscheduled++
			}
		}
		why = cmp.Or(why, problem)
	}
	if leaving {
		unscheduled = 0
	}
	return why, unscheduled
}
