package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// Labels of the gateway's Pods and Service, as in Liqo.
var (
	podLabels     = map[string]string{labelName: "gateway", "app.kubernetes.io/component": "networking"}
	serviceLabels = map[string]string{v1alpha1.LabelGateway: "true"}
	agentLabels   = map[string]string{labelName: agentName} // labels of the route agents' Pods, as in the chart
)

const (
	labelName = "app.kubernetes.io/name"
	agentName = "route-agent"
)

// writeInterval is the time after which Write checks the objects even without an event.
const writeInterval = time.Second

// Write updates the API objects while this replica is the active one: the label of the active
// Pod, the annotations of the Service, and the status of each TunnelEndpoint. About once a
// second it calls report for the state of the running gateway. It calls placed after each
// attempt to write the Service. It returns when ctx ends or another replica takes over, and
// then leaves all objects unchanged.
//
// Write begins after the first complete read from the API server, so a replica that runs from its
// saved snapshot writes nothing yet. Write sends only differences. Each object has its own retries,
// so a failing write delays no other object.
func (g *Gateway) Write(ctx context.Context, placed func(), report func() (Report, error)) {
	g.writing.Lock()
	defer g.writing.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	group.Go(func() {
		defer cancel()
		select {
		case <-ctx.Done():
		case <-g.leaving:
		}
	})
	select {
	case <-ctx.Done():
		return
	case <-g.prepared:
	}
	w := &writer{Gateway: g, memory: make(map[types.UID]*memory)}
	tick := time.NewTicker(writeInterval)
	defer tick.Stop()
	for {
		w.markActive(ctx, placed)
		if r, err := report(); err != nil {
			w.log.Error("cannot read the state of the gateway", "error", err)
		} else {
			w.statuses(ctx, r)
			w.rotate(ctx, r)
		}
		w.forget()
		g.mu.Lock()
		replaced := g.replaced
		g.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-replaced: // an object has changed
			select {
			case <-ctx.Done():
				return
			case <-time.After(coalesceLimit): // gives the gateway time to apply the change
			}
		}
	}
}

// writer is the state of one Write.
type writer struct {
	*Gateway
	memory     map[types.UID]*memory
	lastLogged string // last logged problem with Pods and Service

	nextKey  [32]byte  // next private key of the rotation, as of the last round
	lagEnded time.Time // since when all peers have had a session with the next key
	offer    offer
}

// memory is the state of one written object.
type memory struct {
	version      string    // resourceVersion before the last patch by this replica; a cached object that still has this version is stale
	written      time.Time // time of the last successful write
	retries      retries
	cost         retries       // retries of the pod deletion cost's own patch, which an admission policy may reject separately
	rtt          time.Duration // smoothed round-trip time
	statusInputs statusInputs  // inputs from which the stored status was made; zero: unknown
	pruned       bool          // the API server drops the conditions of the object's status
	used         bool          // memoryOf was called in the current round
}

// retries delays the next attempt after a failed write.
type retries struct {
	next     time.Time // earliest time of the next attempt
	failures int
}

func (w *writer) memoryOf(o client.Object) *memory {
	m := w.memory[o.GetUID()]
	if m == nil {
		m = new(memory)
		w.memory[o.GetUID()] = m
	}
	m.used = true
	return m
}

// due reports whether an object may be written now.
func (m *memory) due(o client.Object, now time.Time) bool { return m.dueFor(o, &m.retries, now) }

func (m *memory) dueFor(o client.Object, r *retries, now time.Time) bool {
	return o.GetResourceVersion() != m.version && !now.Before(r.next)
}

// patch writes the difference between have and want, unless another client has changed the object
// since it was read. If the API server accepts the patch, patch returns true and sets want to the
// stored object.
func (w *writer) patch(ctx context.Context, kind string, have, want client.Object, status bool) bool {
	return w.patchFor(ctx, kind, have, want, status, &w.memoryOf(have).retries)
}

// patchFor is like patch, but counts failures in r, so that some fields of the object can be
// retried separately.
func (w *writer) patchFor(ctx context.Context, kind string, have, want client.Object, status bool, r *retries) bool {
	m := w.memoryOf(have)
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	patch := client.MergeFromWithOptions(have, client.MergeFromWithOptimisticLock{})
	var err error
	if status {
		err = w.client.Status().Patch(ctx, want, patch)
	} else {
		err = w.client.Patch(ctx, want, patch)
	}
	now := time.Now()
	switch {
	case err == nil:
		m.version, m.written, *r = have.GetResourceVersion(), now, retries{}
		w.metrics.writes.WithLabelValues(kind, "success").Inc()
	case errors.Is(ctx.Err(), context.Canceled):
	default:
		r.next = now.Add(min(time.Second<<min(r.failures, 5), 30*time.Second))
		r.failures++
		w.metrics.writes.WithLabelValues(kind, "error").Inc()
		if r.failures == 1 {
			w.log.Warn("cannot write the object; retrying", "object", kind+" "+client.ObjectKeyFromObject(have).String(), "error", err)
		}
	}
	return err == nil
}

// forget ends a round. It drops the memory of objects that the round did not use, because they no
// longer exist.
func (w *writer) forget() {
	for uid, m := range w.memory {
		if !m.used {
			delete(w.memory, uid)
		}
		m.used = false
	}
}

// markActive marks the active gateway in the Pods and the Service.
func (w *writer) markActive(ctx context.Context, placed func()) {
	var pods corev1.PodList
	var services corev1.ServiceList
	if err := errors.Join(w.objects.List(ctx, &pods, client.InNamespace(w.o.Namespace), client.MatchingLabels(podLabels)), w.objects.List(ctx, &services)); err != nil {
		w.logProblem(err.Error())
		return
	}
	node := w.nodeAddr(ctx)
	trouble := ""
	if !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Name == w.o.Pod }) {
		trouble = fmt.Sprintf("Pod %s/%s does not exist or lacks the labels %s, so the Service does not select the active gateway", w.o.Namespace, w.o.Pod, text(podLabels))
	}
	if n := len(services.Items); n != 1 {
		trouble = cmp.Or(trouble, fmt.Sprintf("namespace %s has %d Services labelled %s; want one, by which peers reach the gateway", w.o.Namespace, n, text(serviceLabels)))
	}
	w.logProblem(trouble)

	now := time.Now()
	if len(services.Items) == 1 && node.IsValid() {
		w.markService(ctx, &services.Items[0], node, now) // first, because the nodes follow the Service
	}
	placed()
	// Write the active Pod first: until it has the label, the Service has no endpoint for
	// peers.
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int { return cmp.Compare(rank(a, w.o.Pod), rank(b, w.o.Pod)) })
	for i := range pods.Items {
		have := &pods.Items[i]
		role := v1alpha1.GatewayStandby
		if have.Name == w.o.Pod {
			role = v1alpha1.GatewayActive
		}
		if m := w.memoryOf(have); have.Labels[v1alpha1.LabelGateway] == role || !m.due(have, now) {
			continue
		}
		want := have.DeepCopy()
		want.Labels[v1alpha1.LabelGateway] = role
		w.patch(ctx, "Pod", have, want, false)
	}
	// The deletion cost has its own patch and retries: older RBAC rules forbid this patch, and its
	// failure must not delay the label.
	for i := range pods.Items {
		have, cost := &pods.Items[i], ""
		if have.Name == w.o.Pod {
			cost = activeDeletionCost
		}
		m := w.memoryOf(have)
		if have.Annotations[corev1.PodDeletionCost] == cost || !m.dueFor(have, &m.cost, now) {
			continue
		}
		want := have.DeepCopy()
		if cost == "" {
			delete(want.Annotations, corev1.PodDeletionCost)
		} else if want.Annotations == nil {
			want.Annotations = map[string]string{corev1.PodDeletionCost: cost}
		} else {
			want.Annotations[corev1.PodDeletionCost] = cost
		}
		w.patchFor(ctx, "Pod", have, want, false, &m.cost)
	}
}

// activeDeletionCost is the pod deletion cost of the active gateway. Because of this cost, a Deployment
// ends standbys first, so an update of all replicas moves the active gateway only once.
const activeDeletionCost = "1"

// markService annotates the Service, so that the nodes find this replica.
func (w *writer) markService(ctx context.Context, have *corev1.Service, node netip.Addr, now time.Time) {
	marks := map[string]string{v1alpha1.AnnotationGatewayNodeIP: node.String()}
	if w.o.Node != "" { // a gateway in a Pod; agents find a host-network gateway by the TunnelEndpoints instead
		marks[isthmus.AnnotationGateways] = w.o.PodIP.String()
	}
	if v := w.votes(); v.wanted || have.Annotations[isthmus.AnnotationVotes] != "" {
		marks[isthmus.AnnotationVotes] = v.String()
	}
	want := have.DeepCopy()
	if want.Annotations == nil {
		want.Annotations = make(map[string]string)
	}
	maps.Copy(want.Annotations, marks)
	if m := w.memoryOf(have); maps.Equal(have.Annotations, want.Annotations) || !m.due(have, now) {
		return
	}
	w.patch(ctx, "Service", have, want, false)
}

// nodeAddr returns the address of our node, or zero while the address is unknown.
func (w *writer) nodeAddr(ctx context.Context) netip.Addr {
	if w.o.Node == "" {
		return w.o.PodIP
	}
	var node corev1.Node
	if err := w.objects.Get(ctx, client.ObjectKey{Name: w.o.Node}, &node); err != nil {
		return netip.Addr{}
	}
	if n := nodeFrom(&node); len(n.Addrs) > 0 {
		return n.Addrs[0]
	}
	return netip.Addr{}
}

// isGateway reports whether a Pod is a replica of the gateway in a namespace.
func isGateway(p *corev1.Pod, namespace string) bool {
	return p.Namespace == namespace && labels.SelectorFromSet(podLabels).Matches(labels.Set(p.Labels))
}

func rank(p corev1.Pod, self string) int {
	if p.Name == self {
		return 0
	}
	return 1
}

// logProblem logs a new problem that prevents marking the Pods or the Service.
func (w *writer) logProblem(trouble string) {
	if trouble != w.lastLogged && trouble != "" {
		w.log.Warn("cannot mark the active gateway; peers may not reach it", "problem", trouble)
	}
	w.lastLogged = trouble
}

func text(labels map[string]string) string {
	b, err := json.Marshal(labels)
	if err != nil {
		panic(err) // strings can be marshalled
	}
	return string(b)
}
