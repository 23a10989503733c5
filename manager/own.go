package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

const (
	keySecret  = "wireguard-pubkey" // Liqo's name for it; the gateway makes it
	keyInData  = "publicKey"
	keysInData = "tunnels" // the keys of tunnels 1, 2 and so on, separated by commas; Liqo has none
	retryFacts = 30 * time.Second
)

// Networks are what a person said about the networks of this cluster. The zero
// prefix means: find out.
type Networks struct {
	PodCIDR, ServiceCIDR, ExternalCIDR netip.Prefix
	Pools, Reserved                    []netip.Prefix
}

// A bookkeeper is the part of ipamstore.Store that our own side needs.
type bookkeeper interface {
	Book() ipam.Book
	Update(context.Context, func(ipam.Book) (ipam.Book, error)) (ipam.Book, error)
}

// Own keeps the Facts of this cluster: it gathers them whenever what they come
// from changes, gives the IPAM the networks among them, and tells subscribers.
// Its methods may be called concurrently.
type Own struct {
	Cache     client.Reader // Services, Secrets and Nodes
	Direct    client.Reader // the API server itself, for what is read once
	Store     bookkeeper
	Cluster   v1alpha1.ClusterIdentity
	Namespace string // of the gateway's Service and Secret
	Networks  Networks
	// BooksChanged gets the events of the Store.
	BooksChanged <-chan event.GenericEvent
	Log          *slog.Logger

	mu          sync.Mutex
	facts       Facts
	known       bool
	detected    detected
	conflicts   []ipam.Conflict
	subscribers []chan event.GenericEvent
}

// detected are the networks found in the cluster's own configuration. They never
// change in the life of a cluster, so that what was found is not read again.
type detected struct{ pods, services []netip.Prefix }

// Facts returns what was gathered last.
func (o *Own) Facts(context.Context) (Facts, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.known {
		return Facts{}, errors.New("the facts of this cluster have not been gathered yet")
	}
	return o.facts, nil
}

// Subscribe returns a channel that gets a value after every change of the Facts;
// several changes may be one value.
func (o *Own) Subscribe() <-chan event.GenericEvent {
	o.mu.Lock()
	defer o.mu.Unlock()
	c := make(chan event.GenericEvent, 1)
	o.subscribers = append(o.subscribers, c)
	return c
}

// SetupWithManager makes mgr call Reconcile after every change.
func (o *Own) SetupWithManager(mgr ctrl.Manager) error {
	something := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{requestFor("own")}
	})
	return ctrl.NewControllerManagedBy(mgr).Named("own").
		Watches(&corev1.Service{}, something).
		Watches(&corev1.Secret{}, something).
		Watches(&corev1.Node{}, something).
		WatchesRawSource(source.Channel(o.BooksChanged, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, peer client.Object) []reconcile.Request {
			if peer.GetName() != "" {
				return nil // a peer's entry and not ours
			}
			return []reconcile.Request{requestFor("own")}
		}))).
		Complete(o)
}

// Reconcile gathers the Facts.
func (o *Own) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	facts, err := o.gather(ctx)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("facts of this cluster: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.known && reflect.DeepEqual(o.facts, facts) {
		return o.again(), nil
	}
	if facts.FewerTunnels != "" && (!o.known || o.facts.FewerTunnels != facts.FewerTunnels) {
		o.Log.Warn("peers are told of fewer tunnels than the gateway has", "told", 1+len(facts.Tunnels), "why", facts.FewerTunnels)
	}
	if !o.known || !slices.Equal(o.facts.Missing, facts.Missing) || o.facts.NoEndpoint != facts.NoEndpoint {
		for _, missing := range slices.Concat(facts.Missing, nonEmpty(facts.NoEndpoint)) {
			o.Log.Warn("our own side is not complete", "missing", missing)
		}
	}
	o.facts, o.known = facts, true
	o.Log.Info("facts of this cluster", "podCIDR", facts.PodCIDR, "serviceCIDR", facts.ServiceCIDR, "externalCIDR", facts.ExternalCIDR,
		"endpoint", facts.Endpoint, "port", facts.Port, "tunnels", 1+len(facts.Tunnels), "nodes", len(facts.Nodes))
	for _, c := range o.subscribers {
		select {
		case c <- event.GenericEvent{}:
		default: // the value in it will be read after now
		}
	}
	return o.again(), nil
}

// again says when to look again for what nobody tells us about.
func (o *Own) again() ctrl.Result {
	if o.facts.PodCIDR.IsValid() && o.facts.ServiceCIDR.IsValid() {
		return ctrl.Result{}
	}
	return ctrl.Result{RequeueAfter: retryFacts}
}

func (o *Own) gather(ctx context.Context) (Facts, error) {
	f := Facts{Cluster: o.Cluster}
	if err := o.networks(ctx, &f); err != nil {
		return f, err
	}
	var services corev1.ServiceList
	if err := o.Cache.List(ctx, &services, client.InNamespace(o.Namespace), client.MatchingLabels{v1alpha1.LabelGateway: "true"}); err != nil {
		return f, fmt.Errorf("services of the gateway: %w", err)
	}
	var nodes corev1.NodeList
	if err := o.Cache.List(ctx, &nodes); err != nil {
		return f, fmt.Errorf("nodes: %w", err)
	}
	f.Nodes = nodeAddresses(nodes.Items)
	var ports []uint16
	if f.Endpoint, ports, f.NoEndpoint = endpointOf(o.Namespace, services.Items); len(ports) > 0 {
		f.Port = ports[0]
	}

	var secret corev1.Secret
	name := types.NamespacedName{Namespace: o.Namespace, Name: keySecret}
	switch err := o.Cache.Get(ctx, name, &secret); {
	case apierrors.IsNotFound(err):
		f.Missing = append(f.Missing, fmt.Sprintf("Secret %s: not there yet; the gateway makes it", name))
	case err != nil:
		return f, fmt.Errorf("key of the gateway: %w", err)
	default:
		key, err := fabric.ParseKey(strings.TrimSpace(string(secret.Data[keyInData])))
		if err != nil {
			f.Missing = append(f.Missing, fmt.Sprintf("Secret %s: data.%s %v", name, keyInData, err))
		}
		f.PublicKey = key
		if f.Port != 0 && err == nil {
			f.Tunnels, f.FewerTunnels = tunnelsOf(&secret, key, ports[1:])
		}
	}
	return f, o.configure(ctx, &f)
}

// networks finds PodCIDR and ServiceCIDR: what a person said, else what the
// cluster's configuration says. The pod networks of nodes say nothing: the
// smallest network around them may be too small for the next node, or too large.
func (o *Own) networks(ctx context.Context, f *Facts) error {
	if f.PodCIDR = o.Networks.PodCIDR; !f.PodCIDR.IsValid() {
		if err := o.readKubeadm(ctx); err != nil {
			return err
		}
		if len(o.detected.pods) == 0 {
			f.Missing = append(f.Missing, "PodCIDR: ConfigMap kube-system/kubeadm-config does not say it; set --pod-cidr")
			return nil
		}
		f.PodCIDR = o.detected.pods[0]
	}
	if f.ServiceCIDR = o.Networks.ServiceCIDR; !f.ServiceCIDR.IsValid() {
		if err := o.readServiceCIDR(ctx); err != nil {
			return err
		}
		i := slices.IndexFunc(o.detected.services, func(p netip.Prefix) bool { return p.Addr().Is4() == f.PodCIDR.Addr().Is4() })
		if i < 0 {
			f.Missing = append(f.Missing, fmt.Sprintf("ServiceCIDR: ServiceCIDR kubernetes names none of the family of the PodCIDR, %v; set --service-cidr", f.PodCIDR))
			return nil
		}
		f.ServiceCIDR = o.detected.services[i]
	}
	if f.PodCIDR.Overlaps(f.ServiceCIDR) {
		f.Missing = append(f.Missing, fmt.Sprintf("PodCIDR %v overlaps ServiceCIDR %v; correct --pod-cidr or --service-cidr", f.PodCIDR, f.ServiceCIDR))
	}
	return nil
}

// configure gives the IPAM our networks and learns the ExternalCIDR.
func (o *Own) configure(ctx context.Context, f *Facts) error {
	if !f.PodCIDR.IsValid() || !f.ServiceCIDR.IsValid() || f.PodCIDR.Overlaps(f.ServiceCIDR) {
		return nil // an answer on the ground of half of it would be wrong
	}
	n := o.Networks
	config := ipam.Config{
		PodCIDR: f.PodCIDR, ServiceCIDR: f.ServiceCIDR, ExternalCIDR: n.ExternalCIDR,
		Pools: n.Pools, Reserved: n.Reserved, Nodes: f.Nodes,
	}
	var conflicts []ipam.Conflict
	book, err := o.Store.Update(ctx, func(b ipam.Book) (ipam.Book, error) {
		b, conflicts = b.Configure(config)
		return b, nil
	})
	if err != nil {
		return fmt.Errorf("configure the IPAM: %w", err)
	}
	if !slices.Equal(conflicts, o.conflicts) {
		for _, c := range conflicts {
			o.Log.Warn("networks overlap; what was given out stays as it is until the peering is made anew", "conflict", c.String())
		}
		o.conflicts = conflicts
	}
	if f.ExternalCIDR = book.Own().ExternalCIDR; !f.ExternalCIDR.IsValid() {
		f.Missing = append(f.Missing, fmt.Sprintf("ExternalCIDR: the pools have no free network of the length of the PodCIDR, /%d; set --pools or --external-cidr", f.PodCIDR.Bits()))
	}
	return nil
}

// readKubeadm reads the networks that kubeadm was given. Not being permitted to
// is the same as not finding it.
func (o *Own) readKubeadm(ctx context.Context) error {
	if len(o.detected.pods) > 0 {
		return nil
	}
	var cm corev1.ConfigMap
	if err := o.Direct.Get(ctx, types.NamespacedName{Namespace: "kube-system", Name: "kubeadm-config"}, &cm); err != nil {
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			return nil
		}
		return fmt.Errorf("configuration of kubeadm: %w", err)
	}
	o.detected.pods = kubeadmPodSubnets(cm.Data["ClusterConfiguration"])
	return nil
}

func (o *Own) readServiceCIDR(ctx context.Context) error {
	if len(o.detected.services) > 0 {
		return nil
	}
	var cidr networkingv1.ServiceCIDR
	if err := o.Direct.Get(ctx, types.NamespacedName{Name: "kubernetes"}, &cidr); err != nil {
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			return nil
		}
		return fmt.Errorf("network of the services: %w", err)
	}
	o.detected.services = prefixes(cidr.Spec.CIDRs)
	return nil
}

// kubeadmPodSubnets returns networking.podSubnet, one network per family, the
// main one first.
func kubeadmPodSubnets(clusterConfiguration string) []netip.Prefix {
	var config struct {
		Networking struct {
			PodSubnet string `json:"podSubnet"`
		} `json:"networking"`
	}
	if err := yaml.Unmarshal([]byte(clusterConfiguration), &config); err != nil || config.Networking.PodSubnet == "" {
		return nil
	}
	return prefixes(strings.Split(config.Networking.PodSubnet, ","))
}

func prefixes(texts []string) (all []netip.Prefix) {
	for _, text := range texts {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return nil // half of a list is not what was meant
		}
		all = append(all, p.Masked())
	}
	return all
}

// nodeAddresses returns the IP addresses of all nodes, sorted.
func nodeAddresses(nodes []corev1.Node) (all []netip.Addr) {
	for i := range nodes {
		for _, a := range nodes[i].Status.Addresses {
			if addr, err := netip.ParseAddr(a.Address); err == nil { // host names are not
				all = append(all, addr.Unmap())
			}
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// tunnelsOf joins the keys of the gateway's further tunnels with the ports that its
// Service has for them, or for as many as have both; fewer says why not for all.
// first is the key of tunnel 0.
func tunnelsOf(secret *corev1.Secret, first [32]byte, ports []uint16) (further []fabric.TunnelEnd, fewer string) {
	text := strings.TrimSpace(string(secret.Data[keysInData]))
	if text == "" {
		return nil, ""
	}
	have := [][32]byte{first}
	for keyText := range strings.SplitSeq(text, ",") {
		i := len(have)
		key, err := fabric.ParseKey(keyText)
		switch {
		case i == fabric.MaxTunnels:
			err = fmt.Errorf("is one too many; want at most %d", fabric.MaxTunnels-1)
		case err == nil && slices.Contains(have, key):
			err = errors.New("is one that is there already")
		}
		if err != nil {
			return further, fmt.Sprintf("Secret %s/%s: data.%s: key %d %v", secret.Namespace, secret.Name, keysInData, i, err)
		}
		if i > len(ports) {
			return further, fmt.Sprintf("the gateway's Service has no UDP port for tunnel %d, such as one named %s", i, v1alpha1.TunnelPortName(i))
		}
		have, further = append(have, key), append(further, fabric.TunnelEnd{PublicKey: key, Port: ports[i-1]})
	}
	return further, ""
}

// portsFrom returns up to n consecutive ports.
func portsFrom(first uint16, n int) []uint16 {
	ports := make([]uint16, min(n, 1<<16-int(first)))
	for i := range ports {
		ports[i] = first + uint16(i)
	}
	return ports
}

// endpointOf returns where peers reach the gateway, by the rules of Liqo, or a
// sentence that says why that is not known. Of the ports, the first is the gateway's,
// and those that follow are of further tunnels.
func endpointOf(namespace string, services []corev1.Service) (host string, ports []uint16, missing string) {
	const label = v1alpha1.LabelGateway + "=true"
	if len(services) != 1 {
		if len(services) == 0 {
			return "", nil, fmt.Sprintf("namespace %s: no Service with label %s", namespace, label)
		}
		names := make([]string, len(services))
		for i := range services {
			names[i] = services[i].Name
		}
		slices.Sort(names)
		return "", nil, fmt.Sprintf("namespace %s: Services %s have label %s; want exactly one", namespace, strings.Join(names, ", "), label)
	}
	s := &services[0]
	wrong := func(format string, args ...any) string {
		return fmt.Sprintf("Service %s/%s: ", s.Namespace, s.Name) + fmt.Sprintf(format, args...)
	}
	var noHost, noPort string
	host, ports, noHost, noPort = exposed(s)
	if override, ok := s.Annotations[v1alpha1.AnnotationOverrideAddress]; ok {
		host, noHost = strings.TrimSpace(override), ""
		if host == "" {
			noHost = fmt.Sprintf("annotation %s is empty; want an IP address or DNS name", v1alpha1.AnnotationOverrideAddress)
		}
	}
	if override, ok := s.Annotations[v1alpha1.AnnotationOverridePort]; ok {
		n, err := strconv.ParseUint(override, 10, 16)
		tunnels, _ := servicePorts(s)
		ports, noPort = portsFrom(uint16(n), max(1, len(tunnels))), ""
		if err != nil || n == 0 {
			ports, noPort = nil, fmt.Sprintf("annotation %s is %q; want a UDP port from 1 to 65535", v1alpha1.AnnotationOverridePort, override)
		}
	}
	if problem := cmp.Or(noHost, noPort); problem != "" {
		return host, ports, wrong("%s", problem)
	}
	return host, ports, ""
}

// servicePorts returns the ports of a Service for the tunnels in their order, up to
// the first that it does not have over UDP, and what is missing there. That of tunnel 0
// may have any name when it is the only one.
func servicePorts(s *corev1.Service) (ports []corev1.ServicePort, missing string) {
	for i := range fabric.MaxTunnels {
		name := v1alpha1.TunnelPortName(i)
		at := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Name == name })
		if at < 0 && i == 0 && len(s.Spec.Ports) == 1 {
			at = 0
		}
		switch {
		case at < 0:
			return ports, "has no port named " + name
		case s.Spec.Ports[at].Protocol != corev1.ProtocolUDP:
			return ports, "port " + name + " is not UDP"
		}
		ports = append(ports, s.Spec.Ports[at])
	}
	return ports, ""
}

// exposed returns what the Service itself says, and what it does not. The ports are as
// in endpointOf.
func exposed(s *corev1.Service) (host string, ports []uint16, noHost, noPort string) {
	all, missing := servicePorts(s)
	if len(all) == 0 {
		noPort = missing
	}
	var number func(corev1.ServicePort) int32
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		number = func(p corev1.ServicePort) int32 { return p.NodePort }
		if host = s.Annotations[v1alpha1.AnnotationGatewayNodeIP]; host == "" {
			noHost = "no annotation " + v1alpha1.AnnotationGatewayNodeIP + " yet; the active gateway sets it"
		}
	case corev1.ServiceTypeLoadBalancer:
		number = func(p corev1.ServicePort) int32 { return p.Port }
		if ingress := s.Status.LoadBalancer.Ingress; len(ingress) > 0 {
			host = cmp.Or(ingress[0].IP, ingress[0].Hostname)
		}
		if host == "" {
			noHost = "the load balancer has no address yet"
		}
	default:
		noHost = fmt.Sprintf("is of type %s; want LoadBalancer or NodePort, or the annotations %s and %s",
			s.Spec.Type, v1alpha1.AnnotationOverrideAddress, v1alpha1.AnnotationOverridePort)
		all, noPort = nil, noHost
	}
	for _, p := range all {
		if number(p) == 0 {
			break // not given out yet
		}
		ports = append(ports, uint16(number(p)))
	}
	if len(ports) == 0 && noPort == "" {
		noPort = "port " + v1alpha1.TunnelPortName(0) + " has no number yet"
	}
	return host, ports, noHost, noPort
}

func nonEmpty(s string) []string {
	if s == "" {
		return nil
	}
	return []string{s}
}
