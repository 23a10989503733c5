package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// WatchNode watches what the route agent of the node called self has to know: its Node and the Pods
// on it, the Pods of the gateway, TunnelEndpoints and the books of the IPAM; and as long as a gateway has its node's
// network, or none was seen yet, all Nodes and Pods. It calls deliver with everything when each kind
// has been read once, and again after every change that says something new, never twice at a time.
// Self and UnderlayMTU of the intent are empty. A TunnelEndpoint that is broken is left out and is
// among the problems.
//
// Gateways are Pods with the gateway's labels in namespace, that of the installation.
//
// It only reads, and returns when ctx ends. While the API server is away it delivers nothing, so
// that what is known stays in force.
func WatchNode(ctx context.Context, config *rest.Config, namespace, self string, log *slog.Logger, deliver func(fabric.NodeIntent, []fabric.Problem)) error {
	config = rest.CopyConfig(config)
	config.QPS = -1 // few and long requests
	look, urgent, said := newSignal(), newSignal(), ""
	w := &nodeWatch{config: config, namespace: namespace, log: log, look: look}
	waiting := func(err error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if text := err.Error(); text != said {
			said = text
			log.Warn("waiting for the API server", "error", err)
		}
	}
	w.waiting = waiting
	ctx, cancel := context.WithCancel(ctx)
	defer w.group.Wait()
	defer cancel()
	var err error
	w.few, err = w.open(ctx, map[client.Object]cache.ByObject{
		&v1alpha1.TunnelEndpoint{}: {},
		&v1alpha1.IpamStorage{}:    {Transform: slimBooks},
		&corev1.Node{}:             {Transform: slimNode, Field: fields.OneTermEqualSelector("metadata.name", self)},
		&corev1.Pod{}: {Transform: slimPod, Label: labels.SelectorFromSet(podLabels), Field: notEnded(),
			Namespaces: map[string]cache.Config{namespace: {}}},
	})
	if err != nil {
		return nil // ctx has ended
	}
	if err := w.few.watch(ctx, look.set, waiting, &corev1.Node{}, &corev1.Pod{}); err != nil {
		return nil // ctx has ended
	}
	mine := reachablePods()
	mine.Field = fields.AndSelectors(mine.Field, fields.OneTermEqualSelector("spec.nodeName", self))
	if w.mine, err = w.open(ctx, map[client.Object]cache.ByObject{&corev1.Pod{}: mine}); err != nil {
		return nil // ctx has ended
	}
	if err := w.mine.watch(ctx, look.set, waiting, &corev1.Pod{}); err != nil {
		return nil // ctx has ended
	}
	// Until it has seen these, a node lets packets for a peer, or from one, take other ways.
	if err := w.few.watch(ctx, urgent.set, waiting, &v1alpha1.TunnelEndpoint{}, &v1alpha1.IpamStorage{}); err != nil {
		return nil // ctx has ended
	}
	var last *nodeSnapshot
	see := func() {
		now, whole, err := w.see(ctx)
		if err != nil {
			if ctx.Err() == nil {
				log.Error("objects in the cache", "error", err) // a kind that is not watched
			}
			return
		}
		if last == nil && !whole {
			return // an agent that has just begun would take away what another one made
		}
		if last == nil || !reflect.DeepEqual(now, last) {
			last = now
			deliver(now.intent, now.problems)
		}
	}
	see()
	look.coalesce(ctx, urgent, see)
	return nil
}

// nodeWatch is one WatchNode.
type nodeWatch struct {
	config    *rest.Config
	namespace string
	log       *slog.Logger
	look      signal
	waiting   func(error)
	group     sync.WaitGroup

	few  *objects           // what is watched in any case
	mine *objects           // the Pods of our node
	only bool               // what see saw last; its own
	stop context.CancelFunc // ends all; nil: it is not wanted. see's own

	mu  sync.Mutex
	all *objects // all Nodes and Pods; nil: they are not known
}

// open makes a cache that ends with ctx.
func (w *nodeWatch) open(ctx context.Context, kinds map[client.Object]cache.ByObject) (o *objects, err error) {
	err = retry(ctx, w.waiting, func() (err error) { // it asks the API server whether it has the kinds
		o, err = newObjects(w.config, kinds, w.log)
		return err
	})
	if err == nil {
		w.group.Go(func() { _ = o.Start(ctx) }) // it only ends with ctx
	}
	return o, err
}

// see looks at all that is known; whole says whether that is all that is wanted.
func (w *nodeWatch) see(ctx context.Context) (now *nodeSnapshot, whole bool, err error) {
	var pods corev1.PodList
	if err := w.few.List(ctx, &pods, client.UnsafeDisableDeepCopy); err != nil {
		return nil, false, err
	}
	hosts := slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.HostNetwork })
	w.only = !hosts && (w.only || len(pods.Items) > 0) // where all are gone, the next one is like them
	switch {
	case w.only && w.stop != nil:
		w.stop()
		w.stop = nil
		w.mu.Lock()
		w.all = nil
		w.mu.Unlock()
	case !w.only && w.stop == nil:
		var watching context.Context
		watching, w.stop = context.WithCancel(ctx)
		w.group.Go(func() { w.watchAll(watching) })
	}
	w.mu.Lock()
	all := w.all
	w.mu.Unlock()
	now, err = w.snapshot(ctx, all, pods.Items)
	return now, w.only || all != nil, err
}

// watchAll watches all Nodes and Pods until ctx ends.
func (w *nodeWatch) watchAll(ctx context.Context) {
	all, err := w.open(ctx, map[client.Object]cache.ByObject{&corev1.Node{}: {Transform: slimNode}, &corev1.Pod{}: reachablePods()})
	if err != nil || all.watch(ctx, w.look.set, w.waiting, &corev1.Node{}, &corev1.Pod{}) != nil {
		return // ctx has ended
	}
	w.mu.Lock()
	if ctx.Err() == nil {
		w.all = all
	}
	w.mu.Unlock()
	w.look.set()
}

// reachablePods are those that may have an address.
func reachablePods() cache.ByObject {
	visible, err := labels.NewRequirement(v1alpha1.LabelShadowPod, selection.NotEquals, []string{"true"})
	if err != nil {
		panic(err) // constants
	}
	return cache.ByObject{
		Transform: slimPod,
		Label:     labels.NewSelector().Add(*visible), // a shadow Pod has an address in another cluster
		Field:     notEnded(),
	}
}

// notEnded: a Pod that has ended has no address any more.
func notEnded() fields.Selector {
	return fields.AndSelectors(
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)))
}

type nodeSnapshot struct {
	intent   fabric.NodeIntent
	problems []fabric.Problem
}

// snapshot is of what is in the caches; all may be nil. A cache lists in no particular order, so that
// everything is sorted.
func (w *nodeWatch) snapshot(ctx context.Context, all *objects, gateways []corev1.Pod) (*nodeSnapshot, error) {
	var (
		nodes     corev1.NodeList
		pods      corev1.PodList
		endpoints v1alpha1.TunnelEndpointList
		books     v1alpha1.IpamStorageList
		s         nodeSnapshot
	)
	lists := map[*objects][]client.ObjectList{w.few: {&nodes, &endpoints, &books}, w.mine: {&pods}}
	if all != nil {
		lists = map[*objects][]client.ObjectList{w.few: {&endpoints, &books}, all: {&nodes, &pods}}
	}
	for o, kinds := range lists {
		for _, list := range kinds {
			if err := o.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
				return nil, fmt.Errorf("list %T: %w", list, err)
			}
		}
	}
	s.intent.OnlyPods = w.only
	for i := range nodes.Items {
		s.intent.Nodes = append(s.intent.Nodes, nodeFrom(&nodes.Items[i]))
	}
	for i := range pods.Items {
		s.intent.Pods = append(s.intent.Pods, podsFrom(&pods.Items[i])...)
	}
	for i := range gateways {
		s.intent.Gateways = append(s.intent.Gateways, gatewayFrom(&gateways[i])...)
	}
	for i := range endpoints.Items {
		e := &endpoints.Items[i]
		tunnel, problems := fabric.TunnelFrom(e, fabric.Origin{Kind: "TunnelEndpoint", Namespace: e.Namespace, Name: e.Name})
		if s.problems = append(s.problems, problems...); len(problems) == 0 {
			s.intent.Tunnels = append(s.intent.Tunnels, tunnel)
		}
	}
	if len(books.Items) > 0 {
		s.intent.Granted = []netip.Prefix{} // there are books
	}
	for i := range books.Items {
		granted, problems := fabric.GrantedIn(&books.Items[i])
		s.intent.Granted = append(s.intent.Granted, granted...)
		s.problems = append(s.problems, problems...)
		s.intent.Own = append(s.intent.Own, fabric.OwnIn(&books.Items[i])...)
	}
	s.intent.Sort()
	fabric.SortProblems(s.problems)
	return &s, nil
}

func nodeFrom(n *corev1.Node) fabric.ClusterNode {
	node := fabric.ClusterNode{Name: n.Name, Created: n.CreationTimestamp.Unix()}
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
			node.Addrs = append(node.Addrs, addr)
		}
	}
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 && n.Spec.PodCIDR != "" {
		cidrs = []string{n.Spec.PodCIDR}
	}
	for _, s := range cidrs {
		if p, err := netip.ParsePrefix(s); err == nil {
			node.PodCIDRs = append(node.PodCIDRs, p)
		}
	}
	return node
}

func podsFrom(p *corev1.Pod) (pods []fabric.NodePod) {
	if p.Spec.HostNetwork || p.Spec.NodeName == "" {
		return nil
	}
	for _, s := range p.Status.PodIPs {
		if addr, err := netip.ParseAddr(s.IP); err == nil {
			pods = append(pods, fabric.NodePod{Name: p.Namespace + "/" + p.Name, Addr: addr, Node: p.Spec.NodeName, Created: p.CreationTimestamp.Unix()})
		}
	}
	return pods
}

// gatewayFrom are the addresses of a replica of the gateway.
func gatewayFrom(p *corev1.Pod) (all []fabric.GatewayPod) {
	host, _ := netip.ParseAddr(p.Status.HostIP)
	for _, s := range p.Status.PodIPs {
		if addr, err := netip.ParseAddr(s.IP); err == nil {
			all = append(all, fabric.GatewayPod{Addr: addr, Host: host, HostNetwork: p.Spec.HostNetwork})
		}
	}
	return all
}

// slimNode, slimPod and slimBooks keep what is read of an object: on a large cluster every agent
// has every Pod in memory.
func slimBooks(o any) (any, error) {
	if b, ok := o.(*v1alpha1.IpamStorage); ok {
		return &v1alpha1.IpamStorage{ObjectMeta: slimMeta(b.ObjectMeta), Spec: v1alpha1.IpamStorageSpec{
			ClusterSubnets: b.Spec.ClusterSubnets, PodCIDR: b.Spec.PodCIDR, ServiceCIDR: b.Spec.ServiceCIDR}}, nil
	}
	return o, nil
}

func slimNode(o any) (any, error) {
	if n, ok := o.(*corev1.Node); ok {
		return &corev1.Node{ObjectMeta: slimMeta(n.ObjectMeta), Spec: corev1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs},
			Status: corev1.NodeStatus{Addresses: n.Status.Addresses}}, nil
	}
	return o, nil
}

func slimPod(o any) (any, error) {
	if p, ok := o.(*corev1.Pod); ok {
		slim := &corev1.Pod{ObjectMeta: slimMeta(p.ObjectMeta), Spec: corev1.PodSpec{NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork},
			Status: corev1.PodStatus{PodIPs: p.Status.PodIPs}}
		if isGateway(p, p.Namespace) {
			slim.Labels, slim.Status.HostIP = podLabels, p.Status.HostIP
		}
		return slim, nil
	}
	return o, nil
}

func slimMeta(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion, CreationTimestamp: m.CreationTimestamp}
}
