package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
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

// WatchNode watches what the route agent of any node has to know: Nodes, Pods, TunnelEndpoints and
// the books of the IPAM, all of the cluster. It calls deliver with everything when each kind has
// been read once, and again after every change that says something new, never twice at a time. Self
// and UnderlayMTU of the intent are empty. A TunnelEndpoint that is broken is left out and is among
// the problems.
//
// Gateways are Pods with the gateway's labels in namespace, that of the installation.
//
// It only reads, and returns when ctx ends. While the API server is away it delivers nothing, so
// that what is known stays in force.
func WatchNode(ctx context.Context, config *rest.Config, namespace string, log *slog.Logger, deliver func(fabric.NodeIntent, []fabric.Problem)) error {
	config = rest.CopyConfig(config)
	config.QPS = -1 // few and long requests
	kinds := map[client.Object]cache.ByObject{
		&v1alpha1.TunnelEndpoint{}: {},
		&v1alpha1.IpamStorage{}:    {Transform: slimBooks},
		&corev1.Node{}:             {Transform: slimNode},
		&corev1.Pod{}:              reachablePods(),
	}
	look, urgent, said := newSignal(), newSignal(), ""
	waiting := func(err error) {
		if text := err.Error(); text != said {
			said = text
			log.Warn("waiting for the API server", "error", err)
		}
	}
	var objects *objects
	err := retry(ctx, waiting, func() (err error) { // it asks the API server whether it has the kinds
		objects, err = newObjects(config, kinds, log)
		return err
	})
	if err != nil {
		return nil // ctx has ended
	}
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	group.Go(func() { _ = objects.Start(ctx) }) // it only ends with ctx

	if err := objects.watch(ctx, look.set, waiting, &corev1.Node{}, &corev1.Pod{}); err != nil {
		return nil // ctx has ended
	}
	// Until it has seen these, a node lets packets for a peer, or from one, take other ways.
	if err := objects.watch(ctx, urgent.set, waiting, &v1alpha1.TunnelEndpoint{}, &v1alpha1.IpamStorage{}); err != nil {
		return nil // ctx has ended
	}
	var last *nodeSnapshot
	see := func() {
		now, err := objects.node(ctx, namespace)
		if err != nil {
			if ctx.Err() == nil {
				log.Error("objects in the cache", "error", err) // a kind that is not watched
			}
			return
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

// reachablePods are those that may have an address.
func reachablePods() cache.ByObject {
	visible, err := labels.NewRequirement(v1alpha1.LabelShadowPod, selection.NotEquals, []string{"true"})
	if err != nil {
		panic(err) // constants
	}
	return cache.ByObject{
		Transform: slimPod,
		Label:     labels.NewSelector().Add(*visible), // a shadow Pod has an address in another cluster
		Field: fields.AndSelectors( // one that has ended has none any more
			fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
			fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed))),
	}
}

type nodeSnapshot struct {
	intent   fabric.NodeIntent
	problems []fabric.Problem
}

// node makes a snapshot of what is in the cache. The cache lists in no particular order, so that
// everything is sorted.
func (o *objects) node(ctx context.Context, namespace string) (*nodeSnapshot, error) {
	var (
		nodes     corev1.NodeList
		pods      corev1.PodList
		endpoints v1alpha1.TunnelEndpointList
		books     v1alpha1.IpamStorageList
		s         nodeSnapshot
	)
	for _, list := range []client.ObjectList{&nodes, &pods, &endpoints, &books} {
		if err := o.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("list %T: %w", list, err)
		}
	}
	for i := range nodes.Items {
		s.intent.Nodes = append(s.intent.Nodes, nodeFrom(&nodes.Items[i]))
	}
	for i := range pods.Items {
		s.intent.Pods = append(s.intent.Pods, podsFrom(&pods.Items[i])...)
		if p := &pods.Items[i]; isGateway(p, namespace) {
			s.intent.Gateways = append(s.intent.Gateways, gatewayFrom(p)...)
		}
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
