package kube

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// WatchNode watches the objects that the route agent of node self needs: its Node and the Pods
// on it, the Pods of the gateway, the NetworkAllocations, and the gateway's Service, which
// names the active gateway. If these are not sufficient, it watches more, for as long as
// needed:
//
//   - TunnelEndpoints, if the NetworkAllocations do not name our own networks, or the Service does
//     not name a Pod of the gateway;
//   - all Nodes, Pods and TunnelEndpoints, if a gateway uses the host network, or no gateway has
//     been seen yet.
//
// WatchNode calls deliver once everything has been read, and again after every relevant change.
// Calls of deliver never overlap. Self and UnderlayMTU of the intent are empty. An invalid
// TunnelEndpoint is left out and reported as a problem.
//
// Gateways are the Pods with the gateway's labels in namespace, the namespace of the
// installation.
//
// WatchNode returns when ctx ends. While the API server is unavailable, it delivers nothing, so the
// last intent stays in force.
//
// If voter is not nil, WatchNode passes it the data for its votes. The voter reports which gateway
// the nodes have elected, even while the API server is unavailable.
func WatchNode(ctx context.Context, config *rest.Config, namespace, self string, voter *voting.Voter, log *slog.Logger, deliver func(fabric.NodeIntent, []fabric.Problem)) error {
	config = rest.CopyConfig(config)
	config.QPS = -1 // few and long requests
	look, urgent, elected := newSignal(), newSignal(), newSignal()
	waiting := onceEach(func(err error) { log.Warn("waiting for the API server", "error", err) })
	w := &nodeWatch{caches: &caches{config: config, log: log, look: look, waiting: waiting}, self: self}
	if voter != nil {
		w.voter, w.directory = voter, voter.Directory
		voter.OnHolder(func() { urgent.set(); elected.set() })
	}
	ctx, cancel := context.WithCancel(ctx)
	defer w.group.Wait()
	defer cancel()
	recalled := w.recall(ctx, elected, deliver)
	defer recalled()
	here := map[string]cache.Config{namespace: {}}
	w.place = w.optional(map[client.Object]cache.ByObject{
		&corev1.Service{}: {Transform: slimService, Label: labels.SelectorFromSet(serviceLabels), Namespaces: here}}, urgent)
	w.allocations = w.optional(map[client.Object]cache.ByObject{&isthmus.NetworkAllocation{}: {Transform: slimAllocation}}, urgent)
	w.tunnels = w.optional(map[client.Object]cache.ByObject{&v1alpha1.TunnelEndpoint{}: {Transform: slimEndpoint}}, urgent)
	w.all = w.optional(map[client.Object]cache.ByObject{&corev1.Node{}: {Transform: slimNode}, &corev1.Pod{}: reachablePods()}, look)
	var err error
	w.few, err = w.open(ctx, map[client.Object]cache.ByObject{
		&corev1.Node{}: {Transform: slimNode, Field: fields.OneTermEqualSelector("metadata.name", self)},
		&corev1.Pod{}:  {Transform: slimPod, Label: labels.SelectorFromSet(podLabels), Field: notEnded(), Namespaces: here},
	}, waiting)
	if err != nil {
		return nil // ctx has ended
	}
	w.place.want(ctx, true)
	w.allocations.want(ctx, true)
	if err := w.few.watch(ctx, look.set, waiting, &corev1.Node{}, &corev1.Pod{}); err != nil {
		return nil // ctx has ended
	}
	mine := reachablePods()
	mine.Field = fields.AndSelectors(mine.Field, fields.OneTermEqualSelector("spec.nodeName", self))
	if w.mine, err = w.open(ctx, map[client.Object]cache.ByObject{&corev1.Pod{}: mine}, waiting); err != nil {
		return nil // ctx has ended
	}
	if err := w.mine.watch(ctx, look.set, waiting, &corev1.Pod{}); err != nil {
		return nil // ctx has ended
	}
	see := func() {
		now, complete, err := w.readObjects(ctx)
		if err != nil {
			if ctx.Err() == nil {
				log.Error("cannot read objects from the cache", "error", err) // fails only for a kind that is not watched
			}
			return
		}
		if w.last == nil && !complete {
			return // with an incomplete intent, a new agent would remove the routes of the previous agent
		}
		if w.last == nil || !reflect.DeepEqual(now, w.last) {
			recalled()
			w.last = now
			deliver(now.intent, now.problems)
			w.remember(now.intent)
		} else if w.epoch != w.remembers { // the nodes have begun or stopped voting
			w.remember(now.intent)
		}
	}
	see()
	look.coalesce(ctx, urgent, see)
	return nil
}

// onceEach returns a function that calls f unless the error equals the previous one. The
// function may be called concurrently.
func onceEach(f func(error)) func(error) {
	var mu sync.Mutex
	var last string
	return func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if text := err.Error(); text != last {
			last = text
			f(err)
		}
	}
}

// nodeWatch is the state of one WatchNode call. Only one goroutine may use it.
type nodeWatch struct {
	*caches
	self      string
	voter     voter  // nil: the node does not vote
	directory string // directory of the saved intent; empty: the intent is not saved

	few  *objects // objects that are always watched
	mine *objects // the Pods on our node

	place       *optionalObjects // the gateway's Service
	allocations *optionalObjects // NetworkAllocations
	tunnels     *optionalObjects // TunnelEndpoints
	all         *optionalObjects // all Nodes and Pods

	podGateways bool          // all gateways are Pods with their own network namespace
	last        *nodeSnapshot // last delivered
	read        readAllocations
	epoch       uint64 // epoch of the active gateway if nodes vote, else 0
	remembers   uint64 // epoch in the saved intent
}

// voter is the part of voting.Voter that this package uses.
type voter interface {
	Set(ed25519.PublicKey)
	At(netip.Addr)
	Expect(map[netip.Addr]bool)
	Holder() voting.Holder
}

// readAllocations caches the parsed NetworkAllocations. With a thousand peers, parsing takes a
// millisecond, which is too long to repeat for every new Pod.
type readAllocations struct {
	versions map[types.UID]string
	parsed   fabric.Allocations
	problems []fabric.Problem
}

// parse returns the parsed content of the objects. It returns the same slices until an object
// changes.
func (r *readAllocations) parse(all []isthmus.NetworkAllocation) (fabric.Allocations, []fabric.Problem) {
	changed := func(o isthmus.NetworkAllocation) bool { return r.versions[o.UID] != o.ResourceVersion }
	if len(all) != len(r.versions) || slices.ContainsFunc(all, changed) {
		r.versions = make(map[types.UID]string, len(all))
		for i := range all {
			r.versions[all[i].UID] = all[i].ResourceVersion
		}
		was := r.parsed
		if r.parsed, r.problems = fabric.AllocationsFrom(all, time.Now()); len(r.parsed.Own) == 0 { // the object with our own networks was deleted: keep the networks, because the manager recreates the object
			r.parsed.Own, r.parsed.OwnPods = was.Own, was.OwnPods
		}
	}
	return r.parsed, slices.Clone(r.problems)
}

// readObjects makes a snapshot from the objects that have been read. complete reports whether all
// needed objects have been read.
func (w *nodeWatch) readObjects(ctx context.Context) (now *nodeSnapshot, complete bool, err error) {
	var pods corev1.PodList
	if err := w.few.List(ctx, &pods, client.UnsafeDisableDeepCopy); err != nil {
		return nil, false, err
	}
	hosts := slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.HostNetwork })
	w.podGateways = !hosts && (w.podGateways || len(pods.Items) > 0) // if all gateways were deleted, assume that the new ones have their own network namespaces, too
	now = &nodeSnapshot{}
	in := &now.intent
	in.OnlyPods = w.podGateways
	for i := range pods.Items {
		in.Gateways = append(in.Gateways, gatewayFrom(&pods.Items[i])...)
	}
	allocations, _ := w.allocations.known()
	if allocations != nil {
		var list isthmus.NetworkAllocationList
		if err := allocations.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, false, err
		}
		in.Allocations, now.problems = w.read.parse(list.Items)
	}
	place, refused := w.place.known()
	if place != nil && w.podGateways && len(in.OwnPods) > 0 {
		var services corev1.ServiceList
		if err := place.List(ctx, &services, client.UnsafeDisableDeepCopy); err != nil {
			return nil, false, err
		}
		in.Gateway = w.active(services.Items, in.Gateways)
	}
	undecided := place == nil && !refused || allocations == nil // the objects that show whether TunnelEndpoints are needed have not been read yet
	w.all.want(ctx, !w.podGateways)
	w.tunnels.want(ctx, !in.Gateway.IsValid() && !undecided)
	all, _ := w.all.known()
	tunnels, _ := w.tunnels.known()
	complete = allocations != nil && (w.podGateways || all != nil) && (in.Gateway.IsValid() || tunnels != nil)
	err = w.snapshot(ctx, now, all, tunnels)
	if w.last != nil && !in.Gateway.IsValid() && tunnels == nil { // until TunnelEndpoints are read, the last known gateways stay in force
		in.Gateway, in.Tunnels = w.last.intent.Gateway, w.last.intent.Tunnels
	}
	return now, complete, err
}

// active returns the gateway that the nodes elected, or the gateway that the Service names,
// whichever is newer.
func (w *nodeWatch) active(services []corev1.Service, gateways []fabric.GatewayPod) netip.Addr {
	named := activeGateway(services, gateways)
	if w.voter == nil || len(services) != 1 {
		return named
	}
	votes := votesOf(services[0].Annotations[isthmus.AnnotationVotes])
	if votes.Key != nil { // a recreated Service without a key must not remove the voter's key
		w.voter.Set(votes.Key)
	}
	addrs := make(map[netip.Addr]bool)
	for _, g := range gateways {
		addrs[g.Addr] = true
	}
	w.voter.Expect(addrs)
	h := w.voter.Holder()
	if w.epoch = 0; votes.Voting {
		w.epoch = uint64(votes.Epoch)
	}
	if !votes.Voting || h.Epoch <= uint64(votes.Epoch) || !slices.ContainsFunc(gateways, func(g fabric.GatewayPod) bool { return g.Addr == h.Addr && !g.HostNetwork }) {
		return named
	}
	w.epoch = h.Epoch
	return h.Addr
}

// activeGateway returns the address of the active gateway that the gateway's Service names. The
// Service names an address and a node. Both must belong to the same Pod in gateways, because a
// host-network gateway that takes over changes only the node and leaves an old address. The result
// is zero if no Pod matches, or if there is not exactly one Service.
func activeGateway(services []corev1.Service, gateways []fabric.GatewayPod) netip.Addr {
	if len(services) != 1 {
		return netip.Addr{}
	}
	addr, _ := netip.ParseAddr(services[0].Annotations[isthmus.AnnotationGateways])
	host, _ := netip.ParseAddr(services[0].Annotations[v1alpha1.AnnotationGatewayNodeIP])
	if !slices.ContainsFunc(gateways, func(g fabric.GatewayPod) bool { return g.Addr == addr && g.Host == host && !g.HostNetwork }) {
		return netip.Addr{}
	}
	return addr
}

// reachablePods selects the Pods that may have an address in this cluster.
func reachablePods() cache.ByObject {
	visible, err := labels.NewRequirement(v1alpha1.LabelShadowPod, selection.NotEquals, []string{"true"})
	if err != nil {
		panic(err) // only invalid constants could cause an error
	}
	return cache.ByObject{
		Transform: slimPod,
		Label:     labels.NewSelector().Add(*visible), // a shadow Pod has its address in another cluster
		Field:     notEnded(),
	}
}

// notEnded selects Pods that have not ended. A Pod that has ended has released its address.
func notEnded() fields.Selector {
	return fields.AndSelectors(
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)))
}

type nodeSnapshot struct {
	intent   fabric.NodeIntent
	problems []fabric.Problem
}

// snapshot adds the objects in the caches to s. The caches all and tunnels may be nil. It sorts
// everything, because caches list in random order.
func (w *nodeWatch) snapshot(ctx context.Context, s *nodeSnapshot, all, tunnels *objects) error {
	var nodes corev1.NodeList
	var pods corev1.PodList
	var endpoints v1alpha1.TunnelEndpointList
	from := map[client.ObjectList]*objects{&nodes: w.few, &pods: w.mine}
	if all != nil {
		from[&nodes], from[&pods] = all, all
	}
	if tunnels != nil && !s.intent.Gateway.IsValid() {
		from[&endpoints] = tunnels
	}
	for list, o := range from {
		if err := o.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return fmt.Errorf("list %T: %w", list, err)
		}
	}
	if w.voter != nil && !slices.ContainsFunc(nodes.Items, func(n corev1.Node) bool { return n.Name == w.self }) {
		w.voter.At(netip.Addr{}) // a deleted Node has no vote
	}
	for i := range nodes.Items {
		n := nodeFrom(&nodes.Items[i])
		s.intent.Nodes = append(s.intent.Nodes, n)
		if n.Name == w.self && w.voter != nil {
			w.voter.At(n.Underlay())
		}
	}
	for i := range pods.Items {
		s.intent.Pods = append(s.intent.Pods, podsFrom(&pods.Items[i])...)
	}
	for i := range endpoints.Items {
		e := &endpoints.Items[i]
		tunnel, problems := fabric.TunnelFrom(e, fabric.Origin{Kind: "TunnelEndpoint", Namespace: e.Namespace, Name: e.Name})
		if s.problems = append(s.problems, problems...); len(problems) == 0 {
			s.intent.Tunnels = append(s.intent.Tunnels, tunnel)
		}
	}
	if w.podGateways {
		s.intent.Trust(w.self)
	}
	s.intent.Sort()
	fabric.SortProblems(s.problems)
	return nil
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

// gatewayFrom returns one GatewayPod for each address of a gateway's Pod.
func gatewayFrom(p *corev1.Pod) (all []fabric.GatewayPod) {
	host, _ := netip.ParseAddr(p.Status.HostIP)
	for _, s := range p.Status.PodIPs {
		if addr, err := netip.ParseAddr(s.IP); err == nil {
			all = append(all, fabric.GatewayPod{Addr: addr, Host: host, HostNetwork: p.Spec.HostNetwork})
		}
	}
	return all
}

// The slim functions drop the fields that this package does not read, because an agent may have all
// Pods of a large cluster in memory.
func slimAllocation(o any) (any, error) {
	if n, ok := o.(*isthmus.NetworkAllocation); ok {
		since := isthmus.NetworksSince{ResourceVersion: fabric.NamedSince(string(n.UID), n.ResourceVersion, &n.Spec), Revision: n.Spec.Revision, UID: string(n.UID)}
		spec := isthmus.NetworkAllocationSpec{Revision: n.Spec.Revision, Networks: n.Spec.Networks, Freed: n.Spec.Freed, Own: n.Spec.Own, NetworksSince: &since}
		return &isthmus.NetworkAllocation{ObjectMeta: slimMeta(n.ObjectMeta), Spec: spec}, nil
	}
	return o, nil
}

func slimEndpoint(o any) (any, error) {
	if e, ok := o.(*v1alpha1.TunnelEndpoint); ok {
		return &v1alpha1.TunnelEndpoint{ObjectMeta: slimMeta(e.ObjectMeta), Spec: e.Spec, Status: v1alpha1.TunnelEndpointStatus{GatewayIP: e.Status.GatewayIP}}, nil
	}
	return o, nil
}

func slimService(o any) (any, error) {
	if s, ok := o.(*corev1.Service); ok {
		slim := &corev1.Service{ObjectMeta: slimMeta(s.ObjectMeta)}
		slim.Annotations = make(map[string]string)
		for _, k := range []string{isthmus.AnnotationGateways, isthmus.AnnotationVotes, v1alpha1.AnnotationGatewayNodeIP} {
			slim.Annotations[k] = s.Annotations[k]
		}
		return slim, nil
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
		if p.Spec.HostNetwork && p.Labels[labelName] == agentName {
			slim.Labels = agentLabels
		}
		return slim, nil
	}
	return o, nil
}

// slimReport drops the fields of a node's report that a gateway does not read.
func slimReport(o any) (any, error) {
	if n, ok := o.(*isthmus.NodeNetworks); ok {
		return &isthmus.NodeNetworks{ObjectMeta: slimMeta(n.ObjectMeta), Spec: isthmus.NodeNetworksSpec{OverlaySources: n.Spec.OverlaySources, Routes: n.Spec.Routes}}, nil
	}
	return o, nil
}

func slimMeta(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion, CreationTimestamp: m.CreationTimestamp}
}
