package exchange

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/queue"
)

// refusalGap is the delay after a node's report. Reports within this time are read together.
const refusalGap = 20 * time.Millisecond

// reasonNotRefused is the reason of the Event about a node that does not refuse allocated networks
// in time.
const reasonNotRefused = "NotRefused"

// A RefusalGate is the convergence gate: it withholds allocated networks from the peers until all
// nodes refuse them. A node refuses a network if it rejects those packets to the network that would
// not go through a tunnel. Otherwise the node would send these packets in the clear.
//
//	IPAM state ─► NetworkAllocation ─► route agent refuses it ─► NodeNetworks.spec.refusedResourceVersion ─► RefusalGate ─► answer, TunnelEndpoint
//
// An agent that reports a resourceVersion refuses the networks of all objects up to that version.
// The gate does not wait for a node that has never reported a resourceVersion, because such a node
// has no agent. If a node did not refuse a network within Patience, the gate ignores that node
// until it reports another version.
//
// Its methods may be called concurrently.
type RefusalGate struct {
	Cache     client.Reader // reads NodeNetworks
	Namespace string        // namespace of the installation
	Events    events.EventRecorder
	Log       *slog.Logger
	// Patience is the maximum time for which an allocated network is withheld because a node does
	// not refuse it yet.
	Patience time.Duration

	mu          sync.Mutex
	allocations map[string]observedAllocation
	reported    map[string]int64            // resourceVersion that each node has reported: the node refuses the networks of all objects up to that version
	late        map[string]int64            // nodes that the gate ignores, each with the resourceVersion that it had reported when Patience was over
	waiting     map[reconcile.Request]await // requests that wait for nodes
}

// observedAllocation is the allocation of a peer in the latest State that was passed to Observe.
type observedAllocation struct {
	allocation ipam.Allocation
	version    int64     // resourceVersion of the peer's NetworkAllocation
	observed   time.Time // when Observe was first called with the allocation
}

type await struct {
	id    string // cluster ID of the peer
	queue *queue.Queue
}

// Observe replaces the allocations by those of a new version of the IPAM state. It is an
// ipamstore.Observer.
func (w *RefusalGate) Observe(state ipam.State, version func(id string) int64) {
	now := make(map[string]observedAllocation)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting == nil {
		w.reported, w.late, w.waiting = make(map[string]int64), make(map[string]int64), make(map[reconcile.Request]await)
	}
	for _, id := range state.Peers() {
		g, ok := state.AllocationOf(id)
		if !ok {
			continue
		}
		now[id] = observedAllocation{g, version(id), time.Now()}
		if had, ok := w.allocations[id]; ok && had.allocation == g && had.version == now[id].version && had.version != ipamstore.NotWritten {
			now[id] = had
		}
	}
	w.allocations = now
	w.wake()
}

// refused reports whether the networks of a peer may be published, because all nodes refuse them or
// Patience is over. If not, it adds the request to q once they may be published.
func (w *RefusalGate) refused(id string, q *queue.Queue, request reconcile.Request) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, ok := w.allocations[id]
	if g.version == ipamstore.NotWritten {
		w.waiting[request] = await{id, q}
		return false // the Store calls Observe once the allocation is written
	}
	if !ok || w.pendingNodes(g) == nil {
		delete(w.waiting, request)
		return true
	}
	if rest := w.Patience - time.Since(g.observed); rest > 0 {
		w.waiting[request] = await{id, q}
		q.Add(request, rest)
		return false
	}
	for _, node := range w.pendingNodes(g) {
		w.late[node] = w.reported[node]
		w.Log.Warn("publishing networks that a node does not refuse yet: its pods may send to them in the clear; check the node's route agent",
			"node", node, "peer", id, "podCIDR", g.allocation.Pod, "externalCIDR", g.allocation.External)
		w.Events.Eventf(&corev1.ObjectReference{APIVersion: isthmus.GroupVersion.String(), Kind: "NodeNetworks", Namespace: w.Namespace, Name: node},
			nil, corev1.EventTypeWarning, reasonNotRefused, "AwaitRefusal",
			"node %s: did not confirm within %v that it refuses the networks of a new peer, which are published anyway; check the node's route agent", node, w.Patience)
	}
	delete(w.waiting, request)
	return true
}

// pendingNodes returns the nodes that do not refuse the networks in g yet. It leaves out nodes that
// the gate ignores. The caller holds w.mu.
func (w *RefusalGate) pendingNodes(g observedAllocation) (nodes []string) {
	for node, version := range w.reported {
		if _, late := w.late[node]; !late && version < g.version {
			nodes = append(nodes, node)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// Late returns the number of nodes that the gate ignores.
func (w *RefusalGate) Late() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.late)
}

// SetupWithManager makes mgr call Reconcile soon after a node reports another resourceVersion.
func (w *RefusalGate) SetupWithManager(mgr ctrl.Manager) error {
	soon := func(q requestQueue) { q.AddAfter(controllers.RequestFor("refused"), refusalGap) }
	return ctrl.NewControllerManagedBy(mgr).Named("refusalgate").
		Watches(&isthmus.NodeNetworks{}, handler.Funcs{
			CreateFunc: func(_ context.Context, _ event.CreateEvent, q requestQueue) { soon(q) },
			UpdateFunc: func(_ context.Context, _ event.UpdateEvent, q requestQueue) { soon(q) },
			DeleteFunc: func(_ context.Context, _ event.DeleteEvent, q requestQueue) { soon(q) },
		}, builder.WithPredicates(predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
			return e.ObjectOld.(*isthmus.NodeNetworks).Spec.RefusedResourceVersion != e.ObjectNew.(*isthmus.NodeNetworks).Spec.RefusedResourceVersion
		}})).
		Complete(controllers.Noted("refusalgate", w))
}

// A requestQueue is the queue of a controller.
type requestQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// Reconcile reads the nodes' reports, and queues the requests that waited for them.
func (w *RefusalGate) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	var reports isthmus.NodeNetworksList
	if err := w.Cache.List(ctx, &reports, client.InNamespace(w.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return ctrl.Result{}, fmt.Errorf("reports of the refused networks: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reported = make(map[string]int64, len(reports.Items))
	for i := range reports.Items {
		if r := &reports.Items[i]; r.Spec.RefusedResourceVersion > 0 {
			w.reported[strings.Clone(r.Name)] = r.Spec.RefusedResourceVersion
		}
	}
	for node, version := range w.late {
		if w.reported[node] != version {
			delete(w.late, node)
		}
	}
	w.wake()
	return ctrl.Result{}, nil
}

// wake queues the requests that no longer need to wait. The caller holds w.mu.
func (w *RefusalGate) wake() {
	least := int64(ipamstore.NotWritten - 1)
	for node, version := range w.reported {
		if _, late := w.late[node]; !late {
			least = min(least, version)
		}
	}
	for request, a := range w.waiting {
		if w.allocations[a.id].version <= least {
			delete(w.waiting, request)
			a.queue.Add(request, 0)
		}
	}
}
