// Package place finds the Pod behind a name or an address, including names of imported
// Services, for `isthmus trace`.
package place

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// A Place is one end of a packet's path.
type Place struct {
	Addr netip.AddrPort // the port may be 0
	Pod  string         // NAMESPACE/NAME of the Pod with this address; empty: no Pod in this cluster has it
	Node string         // node of the Pod
	By   string         // the imported Service whose name was resolved, with the clusters of its endpoints; empty: none
}

// String formats the place for people.
func (p Place) String() string {
	text := p.Addr.String()
	if p.Addr.Port() == 0 {
		text = p.Addr.Addr().String()
	}
	if p.Pod != "" {
		text += " (Pod " + safetext.Of(p.Pod) + ")"
	}
	if p.By != "" {
		text += " (" + p.By + ")"
	}
	return text
}

// ErrNone is returned for a name that does not exist or has no ready endpoint.
var ErrNone = errors.New("not found")

// At returns the Place of an address. It has the Pod with that address, if the Pod is in this
// cluster.
func At(ctx context.Context, c *cluster.Cluster, addr netip.AddrPort) (Place, error) {
	p := Place{Addr: addr}
	var pods corev1.PodList
	if err := c.Client.List(ctx, &pods, client.MatchingFields{"status.podIP": addr.Addr().String()}); err != nil {
		return p, c.Explain("Pods", err)
	}
	for i := range pods.Items {
		if pod := &pods.Items[i]; !pod.Spec.HostNetwork && pod.Status.Phase == corev1.PodRunning {
			p.Pod, p.Node = pod.Namespace+"/"+pod.Name, pod.Spec.NodeName
		}
	}
	return p, nil
}

// Find resolves NAMESPACE/POD to the Pod, and svc/NAME or svc/NAMESPACE/NAME to the first ready
// endpoint of the Service. Each form may end in :PORT. If there is no namespace, it is default.
func Find(ctx context.Context, c *cluster.Cluster, name string) (Place, error) {
	bare, port, err := splitPort(name)
	if err != nil {
		return Place{}, err
	}
	parts := strings.Split(bare, "/")
	switch {
	case len(parts) > 1 && slices.Contains([]string{"svc", "service", "services"}, parts[0]) && len(parts) <= 3:
		namespace := "default"
		if len(parts) == 3 {
			namespace = parts[1]
		}
		return endpointOf(ctx, c, namespace, parts[len(parts)-1], port)
	case len(parts) == 2:
		return podPlace(ctx, c, parts[0], parts[1], port)
	}
	return Place{}, fmt.Errorf("%s: want an address, NAMESPACE/POD, svc/NAME or svc/NAMESPACE/NAME", safetext.Of(name))
}

func splitPort(name string) (bare string, port uint16, err error) {
	bare, text, ok := strings.Cut(name, ":")
	if !ok {
		return bare, 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("%s: port %s: want 1 to 65535", safetext.Of(name), safetext.Of(text))
	}
	return bare, uint16(n), nil
}

func podPlace(ctx context.Context, c *cluster.Cluster, namespace, name string, port uint16) (Place, error) {
	var pod corev1.Pod
	what := fmt.Sprintf("Pod %s/%s", safetext.Of(namespace), safetext.Of(name))
	if err := c.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &pod); err != nil {
		if client.IgnoreNotFound(err) == nil {
			return Place{}, fmt.Errorf("%s: %s: %w", c, what, ErrNone)
		}
		return Place{}, c.Explain(what, err)
	}
	addr, err := netip.ParseAddr(pod.Status.PodIP)
	if err != nil {
		return Place{}, fmt.Errorf("%s: %s has no address yet: it is %s", c, what, safetext.Of(string(pod.Status.Phase)))
	}
	p := Place{Addr: netip.AddrPortFrom(addr, port), Node: pod.Spec.NodeName}
	if !pod.Spec.HostNetwork {
		p.Pod = namespace + "/" + name
	}
	return p, nil
}

// endpointOf returns the first ready endpoint of a Service, with the target port that belongs to
// port.
func endpointOf(ctx context.Context, c *cluster.Cluster, namespace, name string, port uint16) (Place, error) {
	what := fmt.Sprintf("Service %s/%s", safetext.Of(namespace), safetext.Of(name))
	var service corev1.Service
	if err := c.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &service); err != nil {
		if client.IgnoreNotFound(err) == nil {
			return Place{}, fmt.Errorf("%s: %s: %w", c, what, ErrNone)
		}
		return Place{}, c.Explain(what, err)
	}
	wanted := -1
	for i, p := range service.Spec.Ports {
		if port == 0 && len(service.Spec.Ports) == 1 || p.Port == int32(port) {
			wanted = i
		}
	}
	if wanted < 0 && port != 0 {
		return Place{}, fmt.Errorf("%s: %s has no port %d", c, what, port)
	}
	var list discoveryv1.EndpointSliceList
	if err := c.Client.List(ctx, &list, client.InNamespace(namespace), client.MatchingLabels{discoveryv1.LabelServiceName: name}); err != nil {
		return Place{}, c.Explain("EndpointSlices of "+what, err)
	}
	var named *string
	if wanted >= 0 {
		named = &service.Spec.Ports[wanted].Name
	}
	found := slices.DeleteFunc(endpointsIn(list.Items, named, port), func(e endpoint) bool { return !e.ready })
	if len(found) == 0 {
		return Place{}, fmt.Errorf("%s: %s has no ready endpoint", c, what)
	}
	first := slices.MinFunc(found, func(a, b endpoint) int { return a.addr.Compare(b.addr) })
	return At(ctx, c, first.addr)
}

type endpoint struct {
	addr          netip.AddrPort
	ready         bool
	host, cluster string // only for an imported Service
}

// endpointsIn returns the endpoints in EndpointSlices. It looks up their ports in the slices by
// portName. If portName is nil, or a slice has no port with this name, it uses port.
func endpointsIn(list []discoveryv1.EndpointSlice, portName *string, port uint16) (all []endpoint) {
	for i := range list {
		slice := &list[i]
		behind := port
		for _, p := range slice.Ports {
			if portName != nil && p.Port != nil && (p.Name == nil || *p.Name == *portName) {
				behind = uint16(*p.Port)
			}
		}
		for _, e := range slice.Endpoints {
			for _, text := range e.Addresses {
				if addr, err := netip.ParseAddr(text); err == nil {
					all = append(all, endpoint{netip.AddrPortFrom(addr, behind), ptr.Deref(e.Conditions.Ready, true), ptr.Deref(e.Hostname, ""), slice.Labels[mcs.LabelSourceCluster]})
				}
			}
		}
	}
	return all
}

// maxCompletions is the maximum number of Pods to offer to a shell.
const maxCompletions = 500

// Pods returns the names of Pods in the form that Find accepts, for shell completion.
func Pods(ctx context.Context, c *cluster.Cluster) (names []string, err error) {
	var list corev1.PodList
	if err := c.Client.List(ctx, &list, client.Limit(maxCompletions)); err != nil {
		return nil, err
	}
	for _, p := range list.Items {
		if !p.Spec.HostNetwork {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	return names, nil
}
