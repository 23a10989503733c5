package kube

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	toolscache "k8s.io/client-go/tools/cache"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// locations tracks the addresses of the Nodes and Pods of a cluster, and the agents' reports. It
// updates them with each event, because reading a hundred thousand Pods after each change would
// take most of a second. Its methods may be called concurrently.
type locations struct {
	mu     sync.Mutex
	known  fabric.PodPlaces        // the nodes and pods; empty for a host-network gateway, which does not deliver packets
	has    map[string][]netip.Addr // node → the addresses of the node that are included in the counts of addrs
	addrs  map[netip.Addr]int      // address of any type → number of nodes that have it
	nodes  fabric.Site             // Site made from addrs; must not be modified while shared is set
	shared bool                    // site has returned the value of nodes, so the next change must copy it first

	agents map[string]string // namespace/name of route agents' Pods → their node
}

// handler returns an event handler that calls notify after a change that may affect site or
// network.
func (p *locations) handler(notify func()) toolscache.ResourceEventHandler {
	set := func(before, after any) {
		if p.set(before, after) {
			notify()
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { set(nil, o) },
		UpdateFunc: set,
		DeleteFunc: func(o any) {
			if tombstone, missed := o.(toolscache.DeletedFinalStateUnknown); missed {
				o = tombstone.Obj
			}
			set(o, nil)
		},
	}
}

// set applies a change of one object from oldObject to newObject. A nil value means that the object
// does not exist. It reports whether site or network may return a different result now.
func (p *locations) set(oldObject, newObject any) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch now := newObject.(type) {
	case *corev1.Node:
		moved := p.move(now.Name, nodeAddrs(now))
		return p.known.Self != "" && p.known.SetNode(nodeFrom(now)) || moved
	case *corev1.Pod:
		was := ""
		if b, ok := oldObject.(*corev1.Pod); ok {
			was = b.Spec.NodeName
		}
		moved := p.setAgent(now)
		return p.known.SetPod(now.Namespace+"/"+now.Name, was, now.Spec.NodeName, podsFrom(now)) || moved
	case *isthmus.NodeNetworks:
		moved := p.known.SetSources(now.Name, fabric.OverlaySourcesFrom(now))
		return p.known.SetRoutes(now.Name, fabric.NodeRoutesFrom(now)) || moved
	}
	switch was := oldObject.(type) {
	case *corev1.Node:
		moved := p.move(was.Name, nil)
		return p.known.RemoveNode(was.Name) || moved
	case *corev1.Pod:
		_, agent := p.agents[was.Namespace+"/"+was.Name]
		delete(p.agents, was.Namespace+"/"+was.Name)
		return p.known.SetPod(was.Namespace+"/"+was.Name, was.Spec.NodeName, "", nil) || agent
	case *isthmus.NodeNetworks:
		moved := p.known.SetSources(was.Name, nil)
		return p.known.SetRoutes(was.Name, nil) || moved
	}
	return false
}

// setAgent records the node of a route agent's Pod. It returns false if the same node was recorded
// before, or if the Pod is not a route agent's.
func (p *locations) setAgent(pod *corev1.Pod) bool {
	id := pod.Namespace + "/" + pod.Name
	if pod.Labels[labelName] != agentName || pod.Spec.NodeName == "" || p.agents[id] == pod.Spec.NodeName {
		return false
	}
	if p.agents == nil {
		p.agents = make(map[string]string)
	}
	p.agents[id] = pod.Spec.NodeName
	return true
}

// withAgents returns the nodes with a route agent's Pod in a namespace. ok is false if there
// are no such Pods: route agents may run without a DaemonSet.
func (p *locations) withAgents(namespace string) (nodes map[string]bool, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	nodes = make(map[string]bool)
	for id, node := range p.agents {
		if strings.HasPrefix(id, namespace+"/") {
			nodes[node] = true
		}
	}
	return nodes, len(nodes) > 0
}

// move replaces the addresses of a node by the list addrs, which may be nil. It reports whether the
// set of all nodes' addresses changed. It compares addrs with the counted addresses, and not with
// the old object in the event, because earlier events may be missing.
func (p *locations) move(node string, addrs []netip.Addr) (moved bool) {
	old := p.has[node]
	if slices.Equal(old, addrs) {
		return false
	}
	if p.addrs == nil {
		p.has, p.addrs, p.nodes = make(map[string][]netip.Addr), make(map[netip.Addr]int), nodesSite(nil)
	}
	if p.has[node] = addrs; len(addrs) == 0 {
		delete(p.has, node)
	}
	if p.shared {
		p.nodes, p.shared = fabric.Site{Addrs: maps.Clone(p.nodes.Addrs), Relays: maps.Clone(p.nodes.Relays)}, false
	}
	for _, a := range addrs {
		a = a.Unmap().WithZone("")
		if p.addrs[a]++; p.addrs[a] == 1 {
			p.nodes.Addrs[a], p.nodes.Relays[a], moved = ownNode, true, true
		}
	}
	for _, a := range old {
		a = a.Unmap().WithZone("")
		if p.addrs[a]--; p.addrs[a] == 0 {
			delete(p.addrs, a)
			delete(p.nodes.Addrs, a)
			delete(p.nodes.Relays, a)
			moved = true
		}
	}
	return moved
}

// site returns a Site with the addresses of the nodes.
func (p *locations) site() fabric.Site {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.addrs == nil {
		return nodesSite(nil)
	}
	p.shared = true
	return p.nodes
}

func (p *locations) owner(addr netip.Addr) fabric.Owner {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known.Owner(addr)
}

func (p *locations) network(pod netip.Addr) fabric.PodNetwork {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known.Network(pod)
}
