package kube

import (
	"context"
	"net/netip"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// handOverTimeout is how long an ending replica waits for another replica to take over. A standby
// that misses a change of the Lease reads it again after retryPeriod. Every handOverInterval, the
// ending replica checks whether another replica has taken over.
const (
	handOverTimeout  = 4 * time.Second
	handOverInterval = 10 * time.Millisecond
)

// handOver returns once another replica has taken over the traffic, or if there is no other
// replica. Until then this replica continues to carry the traffic.
func (g *Gateway) handOver(ended <-chan struct{}) {
	for begin := time.Now(); time.Since(begin) < handOverTimeout; {
		next, waiting := g.successor()
		if next != "" {
			g.log.Info("handed over to another gateway", "pod", next, "after", time.Since(begin).Round(time.Millisecond).String())
		}
		if next != "" || !waiting {
			return
		}
		select {
		case <-ended:
			return
		case <-time.After(handOverInterval):
		}
	}
}

// successor returns the Pod of another gateway that holds the Lease and is named by the Service.
// Only both together prove the takeover, because the Service may still name an earlier gateway.
// Without a successor, waiting reports whether another gateway is running and may become the
// successor. Host-network gateways do not wait, because the nodes find them through the
// TunnelEndpoints.
func (g *Gateway) successor() (pod string, waiting bool) {
	if g.o.Node == "" || !g.reading.Load() {
		return "", false
	}
	ctx := context.Background() // these reads come from the cache
	var pods corev1.PodList
	var services corev1.ServiceList
	if g.objects.List(ctx, &pods, client.InNamespace(g.o.Namespace), client.MatchingLabels(podLabels)) != nil || g.objects.List(ctx, &services) != nil {
		return "", false
	}
	holder := g.holder(ctx)
	for _, p := range pods.Items {
		if p.Name == g.o.Pod || !p.DeletionTimestamp.IsZero() {
			continue
		}
		waiting = waiting || p.Status.Phase == corev1.PodRunning // a dead container may still count as running, which only makes the wait longer
		for _, s := range services.Items {
			if p.Name == holder && p.Status.PodIP != "" && s.Annotations[isthmus.AnnotationGateways] == p.Status.PodIP {
				return p.Name, true
			}
		}
	}
	return "", waiting
}

// holder returns the holder of the Lease from the cache, which may be stale. It returns "" if there
// is no holder, or if the watched objects have not been read yet.
func (g *Gateway) holder(ctx context.Context) string {
	if !g.reading.Load() { // before all objects have been read, the cache is not usable
		return ""
	}
	var lease coordinationv1.Lease
	if g.objects.Get(ctx, client.ObjectKey{Namespace: g.o.Namespace, Name: isthmus.LeaseGateway}, &lease) != nil {
		return ""
	}
	return holderOf(&lease)
}

// podHandler returns a handler that passes the Pods of the other gateways to e.
func (g *Gateway) podHandler(e *election) toolscache.ResourceEventHandler {
	set := func(o any) {
		p, ok := o.(*corev1.Pod)
		if !ok || !isGateway(p, g.o.Namespace) || p.Name == g.o.Pod {
			return
		}
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			e.removeListed(p.Name)
			return
		}
		addr, _ := netip.ParseAddr(p.Status.PodIP) // invalid: the Pod has no address yet
		e.addListed(p.Name, addr, !p.DeletionTimestamp.IsZero())
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    set,
		UpdateFunc: func(_, after any) { set(after) },
		DeleteFunc: func(o any) {
			if tombstone, missed := o.(toolscache.DeletedFinalStateUnknown); missed {
				o = tombstone.Obj
			}
			if p, ok := o.(*corev1.Pod); ok && isGateway(p, g.o.Namespace) {
				e.removeListed(p.Name)
			}
		},
	}
}
