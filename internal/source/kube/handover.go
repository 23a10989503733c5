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

// handOverMost is how long a replica that ends waits for another one to take over: a standby that sees
// no change of the Lease reads it every retryPeriod.
const (
	handOverMost = 4 * time.Second
	handOverLook = 10 * time.Millisecond
)

// handOver returns when another replica has taken over what this one carries, or when there is nobody
// to wait for. Until then this one goes on to carry it.
func (g *Gateway) handOver(ended <-chan struct{}) {
	for begin := time.Now(); time.Since(begin) < handOverMost; {
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
		case <-time.After(handOverLook):
		}
	}
}

// successor is the Pod of another gateway that holds the Lease and to which the Service leads the nodes: what the Service alone
// names may be the gateway before this one, when it could not be written since, or anything. Without one, waiting
// says whether there is a gateway that could become it. Gateways that have their nodes' networks do not
// wait: the nodes ask the TunnelEndpoints where these are.
func (g *Gateway) successor() (pod string, waiting bool) {
	if g.o.Node == "" || !g.reading.Load() {
		return "", false
	}
	ctx := context.Background() // these are in memory
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
		waiting = waiting || p.Status.Phase == corev1.PodRunning // a container that has died is seen late; it costs a while of waiting
		for _, s := range services.Items {
			if p.Name == holder && p.Status.PodIP != "" && s.Annotations[isthmus.AnnotationGateways] == p.Status.PodIP {
				return p.Name, true
			}
		}
	}
	return "", waiting
}

// holder is who has the Lease by the watch, which may be late; empty: nobody, or not known, as before everything
// has been read once.
func (g *Gateway) holder(ctx context.Context) string {
	if !g.reading.Load() { // then objects may not be there, and is being written
		return ""
	}
	var lease coordinationv1.Lease
	if g.objects.Get(ctx, client.ObjectKey{Namespace: g.o.Namespace, Name: isthmus.LeaseGateway}, &lease) != nil {
		return ""
	}
	return holderOf(&lease)
}

// meet lets e follow the Pods of the other gateways.
func (g *Gateway) meet(e *election) toolscache.ResourceEventHandler {
	set := func(o any) {
		p, ok := o.(*corev1.Pod)
		if !ok || !isGateway(p, g.o.Namespace) || p.Name == g.o.Pod {
			return
		}
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			e.unsee(p.Name)
			return
		}
		addr, _ := netip.ParseAddr(p.Status.PodIP) // invalid: it has none yet
		e.see(p.Name, addr, !p.DeletionTimestamp.IsZero())
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    set,
		UpdateFunc: func(_, after any) { set(after) },
		DeleteFunc: func(o any) {
			if gone, missed := o.(toolscache.DeletedFinalStateUnknown); missed {
				o = gone.Obj
			}
			if p, ok := o.(*corev1.Pod); ok && isGateway(p, g.o.Namespace) {
				e.unsee(p.Name)
			}
		},
	}
}
