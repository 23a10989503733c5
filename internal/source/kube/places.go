package kube

import (
	"net/netip"
	"sync"

	corev1 "k8s.io/api/core/v1"
	toolscache "k8s.io/client-go/tools/cache"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// places follows the Nodes and Pods of a cluster, and what agents say of Nodes, one change after the other: to list and compare
// a hundred thousand Pods for each that comes or goes takes most of a second.
type places struct {
	mu    sync.Mutex
	known fabric.PodPlaces
}

// handler calls notify for a change after which network may be another.
func (p *places) handler(notify func()) toolscache.ResourceEventHandler {
	set := func(before, after any) {
		if p.set(before, after) {
			notify()
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { set(nil, o) },
		UpdateFunc: set,
		DeleteFunc: func(o any) {
			if gone, missed := o.(toolscache.DeletedFinalStateUnknown); missed {
				o = gone.Obj
			}
			set(o, nil)
		},
	}
}

// set takes a change of one object; nil: it is not there.
func (p *places) set(before, after any) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch now := after.(type) {
	case *corev1.Node:
		return p.known.SetNode(nodeFrom(now))
	case *corev1.Pod:
		was := ""
		if b, ok := before.(*corev1.Pod); ok {
			was = b.Spec.NodeName
		}
		return p.known.SetPod(now.Namespace+"/"+now.Name, was, now.Spec.NodeName, podsFrom(now))
	case *isthmus.NodeNetworks:
		return p.known.SetSources(now.Name, fabric.OverlaySourcesFrom(now))
	}
	switch was := before.(type) {
	case *corev1.Node:
		return p.known.RemoveNode(was.Name)
	case *corev1.Pod:
		return p.known.SetPod(was.Namespace+"/"+was.Name, was.Spec.NodeName, "", nil)
	case *isthmus.NodeNetworks:
		return p.known.SetSources(was.Name, nil)
	}
	return false
}

func (p *places) owner(addr netip.Addr) fabric.Owner {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known.Owner(addr)
}

func (p *places) network(pod netip.Addr) fabric.PodNetwork {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known.Network(pod)
}
