package peering

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// ReleaseOptions are the choices of ReleaseGateway.
type ReleaseOptions struct {
	Timeout time.Duration
	Report  func(string) // called with a line for each change
}

// ReleaseGateway makes the active gateway hand over to a standby, and returns once the standby is
// active. It evicts the Pod of the active gateway, which then hands over as it does when its node
// is drained. The Deployment creates a replacement, which becomes a standby. Without a ready
// standby, ReleaseGateway changes nothing. The eviction fails if the PodDisruptionBudget forbids
// it, for example because the standby has just become unready.
func ReleaseGateway(ctx context.Context, c *cluster.Cluster, o ReleaseOptions) error {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, cluster.ErrNotReady)
	defer cancel()
	before, err := cluster.HolderOf(ctx, c, isthmus.LeaseGateway, true)
	if err != nil {
		return err
	}
	if before.Name == "" {
		return fmt.Errorf("%s: no gateway is active: %s", c, before.Problem)
	}
	var pods corev1.PodList
	if err := c.Client.List(ctx, &pods, client.InNamespace(c.Namespace)); err != nil {
		return c.Explain("Pods in "+c.Namespace, err)
	}
	active, err := releasable(before.Name, pods.Items)
	if err != nil {
		return fmt.Errorf("%s: %w", c, err)
	}
	begin := time.Now()
	eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: active.Namespace, Name: active.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &active.UID}}}
	switch err := c.Client.SubResource("eviction").Create(ctx, active, eviction); {
	case apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause):
		return fmt.Errorf("%s: the gateway stays on Pod %s: %w", c, safetext.Of(active.Name), err)
	case err != nil:
		if err = c.Explain("eviction of Pod "+active.Name, err); !unserved(err) {
			return err
		}
		o.Report(fmt.Sprintf("unknown whether the API server has executed the eviction: %v", err))
	default:
		o.Report(fmt.Sprintf("Pod %s on node %s is evicted, and hands over", safetext.Of(active.Name), safetext.OrDash(active.Spec.NodeName)))
	}
	var unread error // error of the last attempt to read the Lease
	for {
		now, err := cluster.HolderOf(ctx, c, isthmus.LeaseGateway, true)
		switch {
		case err == nil && now.Name != "" && now.Name != before.Name:
			o.Report(fmt.Sprintf("Pod %s on node %s is active after %.1f s, epoch %d", safetext.Of(now.Name), nodeOf(now.Name, pods.Items), time.Since(begin).Seconds(), now.Epoch))
			return nil
		case ctx.Err() == nil && err != nil && !unserved(err):
			return err
		case ctx.Err() == nil:
			unread = err // the API server may answer again
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: no other gateway became active: %w", c, errors.Join(context.Cause(ctx), unread))
		case <-time.After(cluster.PollInterval):
		}
	}
}

// unserved reports whether the API server did not answer a request, or answered with a server error
// (5xx). The API server may have executed the request nevertheless.
func unserved(err error) bool {
	var status apierrors.APIStatus
	return errors.Is(err, cluster.ErrUnreachable) || errors.As(err, &status) && status.Status().Code >= http.StatusInternalServerError
}

// releasable returns the Pod of the active gateway. It returns an error unless another gateway
// is ready to take over.
func releasable(active string, pods []corev1.Pod) (*corev1.Pod, error) {
	gateways := health.Components{Pods: pods}.Gateways()
	i := slices.IndexFunc(gateways, func(p *corev1.Pod) bool { return p.Name == active })
	if i < 0 {
		return nil, fmt.Errorf("the active gateway is %s, which is not a Pod of the installation", safetext.Of(active))
	}
	if !gateways[i].DeletionTimestamp.IsZero() {
		return nil, fmt.Errorf("the active gateway, Pod %s, is already being deleted", safetext.Of(active))
	}
	var others []string
	for _, p := range gateways {
		why := health.PodProblem(p)
		switch {
		case p.Name == active:
		case why == "" && cluster.PodReady(p):
			return gateways[i], nil
		case why == "":
			others = append(others, fmt.Sprintf("Pod %s is not ready", safetext.Of(p.Name)))
		default:
			others = append(others, fmt.Sprintf("Pod %s %s", safetext.Of(p.Name), why))
		}
	}
	if len(others) == 0 {
		others = []string{"there is no other gateway Pod"}
	}
	return nil, fmt.Errorf("the gateway stays on Pod %s, because no standby is ready: %s", safetext.Of(active), strings.Join(others, "; "))
}

// nodeOf returns the name of a Pod's node, or a dash.
func nodeOf(name string, pods []corev1.Pod) string {
	for i := range pods {
		if pods[i].Name == name {
			return safetext.OrDash(pods[i].Spec.NodeName)
		}
	}
	return "-"
}
