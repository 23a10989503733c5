package facts

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// endpointOf returns the host and ports at which peers reach the gateway, by Liqo's rules. ports[i]
// is the port of tunnel i. If host or ports are unknown, missing has the reason as a sentence.
// Unlike Liqo, endpointOf prefers a node's ExternalIP.
func endpointOf(namespace string, services []corev1.Service, nodes []corev1.Node) (host string, ports []uint16, missing string) {
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
	host, ports, noHost, noPort = serviceEndpoint(s, nodes)
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

// servicePorts returns the UDP ports of a Service for tunnels 0, 1 and so on. It stops at the first
// tunnel without a UDP port; missing is then a sentence about that tunnel. If a Service has only
// one port, the port may have any name.
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

// serviceEndpoint returns the endpoint in the Service's own spec and status. If the host or the
// port is missing, noHost or noPort is a sentence with the reason. ports[i] is the port of tunnel
// i.
func serviceEndpoint(s *corev1.Service, nodes []corev1.Node) (host string, ports []uint16, noHost, noPort string) {
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
		host = outerAddress(host, s.Spec.IPFamilies, nodes)
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
			break // not allocated yet
		}
		ports = append(ports, uint16(number(p)))
	}
	if len(ports) == 0 && noPort == "" {
		noPort = "port " + v1alpha1.TunnelPortName(0) + " has no number yet"
	}
	return host, ports, noHost, noPort
}

// outerAddress returns the address at which peers reach the node that has the address inner. It
// takes the first of the Service's families in which the node has an address, and prefers an
// ExternalIP to an InternalIP. It returns inner if the node is unknown or has no address in these
// families.
func outerAddress(inner string, families []corev1.IPFamily, nodes []corev1.Node) string {
	given, err := netip.ParseAddr(inner)
	if err != nil {
		return inner
	}
	if len(families) == 0 {
		families = []corev1.IPFamily{corev1.IPv4Protocol}
		if given.Is6() {
			families[0] = corev1.IPv6Protocol
		}
	}
	at := slices.IndexFunc(nodes, func(n corev1.Node) bool {
		return slices.ContainsFunc(n.Status.Addresses, func(a corev1.NodeAddress) bool { return a.Address == inner })
	})
	if at < 0 {
		return inner
	}
	for _, family := range families { // the primary family comes first, because nodes are not always reachable by the other family
		for _, kind := range []corev1.NodeAddressType{corev1.NodeExternalIP, corev1.NodeInternalIP} {
			for _, a := range nodes[at].Status.Addresses {
				if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == kind && addr.Is4() == (family == corev1.IPv4Protocol) {
					return addr.String()
				}
			}
		}
	}
	return inner
}

// tunnelsOf pairs the keys of the gateway's further tunnels with the ports of its Service. If a
// tunnel lacks a key or port, problem is the reason. field is the name of the Secret's field with
// the keys. firstKey is the key of tunnel 0.
func tunnelsOf(secret *corev1.Secret, field string, firstKey [32]byte, ports []uint16) (further []fabric.TunnelEnd, problem string) {
	text := strings.TrimSpace(string(secret.Data[field]))
	if text == "" {
		return nil, ""
	}
	have := [][32]byte{firstKey}
	for keyText := range strings.SplitSeq(text, ",") {
		i := len(have)
		key, err := fabric.ParseKey(keyText)
		switch {
		case i == fabric.MaxTunnels:
			err = fmt.Errorf("exceeds the limit; want at most %d", fabric.MaxTunnels-1)
		case err == nil && slices.Contains(have, key):
			err = errors.New("is listed twice")
		}
		if err != nil {
			return further, fmt.Sprintf("Secret %s/%s: data.%s: key %d %v", secret.Namespace, secret.Name, field, i, err)
		}
		if i > len(ports) {
			return further, fmt.Sprintf("the gateway's Service has no UDP port for tunnel %d, such as one named %s", i, v1alpha1.TunnelPortName(i))
		}
		have, further = append(have, key), append(further, fabric.TunnelEnd{PublicKey: key, Port: ports[i-1]})
	}
	return further, ""
}

// portsFrom returns up to n consecutive ports, beginning with first.
func portsFrom(first uint16, n int) []uint16 {
	ports := make([]uint16, min(n, 1<<16-int(first)))
	for i := range ports {
		ports[i] = first + uint16(i)
	}
	return ports
}

// TunnelsAt returns our gateway's further tunnels for a peer whose Peering overrides the port. The
// tunnels have the ports after the overriding port. If port is zero, the Peering overrides nothing.
func (f Facts) TunnelsAt(port uint16) []fabric.TunnelEnd {
	if port == 0 {
		return f.Tunnels
	}
	further := slices.Clone(f.Tunnels)
	ports := portsFrom(port, 1+len(further))
	for i := range ports[1:] {
		further[i].Port = ports[1+i]
	}
	return further[:len(ports)-1]
}
