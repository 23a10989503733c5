package verify

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/corefile"
	"github.com/isthmus-net/isthmus/natengine"
)

// maxFound is the maximum number of targets of each kind, in each direction.
const maxFound = 16

// tunnelEndpoint is an endpoint that every peer maps: the gateway itself.
const tunnelEndpoint = "169.254.0.1"

// agreed has the networks that one cluster uses for the networks of another cluster, according to
// its Peering.
type agreed struct {
	pods     natengine.Remap // maps the other cluster's own pod addresses to those used here
	external netip.Prefix    // network of mapped addresses; invalid: none
}

// agreedBy returns the networks that one cluster (local) uses for the networks of another (peer).
func agreedBy(ctx context.Context, local, peer *cluster.Cluster) (a agreed, err error) {
	var list isthmus.PeeringList
	if err := local.Client.List(ctx, &list); err != nil {
		return a, fmt.Errorf("%s: Peerings: %w", local, err)
	}
	for _, p := range list.Items {
		if p.Spec.Cluster.ClusterID != peer.Identity.ClusterID {
			continue
		}
		from, err1 := netip.ParsePrefix(p.Status.Remote.PodCIDR)
		to, err2 := netip.ParsePrefix(p.Status.Remote.PodCIDRSeen)
		if err1 != nil || err2 != nil {
			return a, fmt.Errorf("%s has not agreed with %s on networks yet; `isthmus diagnose` shows why", local, peer)
		}
		a.pods = natengine.Remap{From: from, To: to}
		a.external, _ = netip.ParsePrefix(p.Status.Remote.ExternalCIDRSeen) // if the network is invalid, mapped addresses are not checked
		return a, nil
	}
	return a, fmt.Errorf("%s has no Peering with %s: %w; `isthmus peer` joins them", local, peer, ErrNotPeered)
}

// localAddr returns the address by which this cluster reaches a pod of the other cluster.
func (a agreed) localAddr(pod netip.Addr) (netip.Addr, error) {
	seen, ok := a.pods.Map(pod)
	if !ok {
		return seen, fmt.Errorf("its address %v is outside the PodCIDR of its cluster, %v", pod, a.pods.From)
	}
	return seen, nil
}

// A Target is a destination other than the Pods of a run.
type Target struct {
	Host string // HOST for a ping, or HOST:PORT for a connection
	What string // description of a target that discover found; empty: the user named the target
	Own  string // the target's address in its own cluster, or that of one of its endpoints; empty: unknown
}

// discover finds targets for senders in the first cluster, in addition to the Pods of this run. The
// targets are in the second cluster. A mapped address is a target for a ping. A TCP port of a
// Service with endpoints in the second cluster, imported or not, is a target for connections, by
// address and by name. discover reports and leaves out all objects that it has no right to read.
func discover(ctx context.Context, local, peer *cluster.Cluster, a agreed, report func(string)) (all []Target) {
	some := func(what string, targets []Target, err error) {
		if err != nil {
			report(fmt.Sprintf("%s of %s are not tested from %s: %v", what, peer, local, err))
		}
		if more := len(targets) - maxFound; more > 0 {
			targets = targets[:maxFound]
			report(fmt.Sprintf("%s of %s: %d are tested from %s, %d are not; test these with --to", what, peer, maxFound, local, more))
		}
		all = append(all, targets...)
	}
	var mappings v1alpha1.NatMappingList
	err := peer.Client.List(ctx, &mappings)
	mapped := mappedIn(mappings.Items, local.Identity.ClusterID, a.external)
	var pings []Target
	for _, seen := range slices.SortedFunc(maps.Keys(mapped), netip.Addr.Compare) {
		pings = append(pings, Target{Host: seen.String(), Own: mapped[seen].String(), What: "mapped address"})
	}
	some("mapped addresses", pings, err)

	var endpoints discoveryv1.EndpointSliceList
	var services corev1.ServiceList
	if err = local.Client.List(ctx, &endpoints); err == nil {
		err = local.Client.List(ctx, &services)
	}
	remote := func(addr netip.Addr) (own netip.Addr, known bool) {
		if own, known = a.pods.Reverse().Map(addr); !known {
			own, known = mapped[addr]
		}
		return own, known
	}
	some("endpoints of Services", servicesIn(endpoints.Items, services.Items, remote), err)
	names, targets := importsIn(endpoints.Items, services.Items, remote)
	some("names of imported Services", names, nil)
	some("endpoints of imported Services", targets, nil)
	return all
}

// mappedIn returns the addresses that a cluster has mapped for a peer, each with the endpoint
// behind it. It leaves out the tunnel's own endpoint, and addresses outside of external, the
// network that the peer uses for mapped addresses.
func mappedIn(all []v1alpha1.NatMapping, peer v1alpha1.ClusterID, external netip.Prefix) map[netip.Addr]netip.Addr {
	mapped := map[netip.Addr]netip.Addr{}
	for _, m := range all {
		if m.Spec.ClusterID != peer {
			continue
		}
		for endpoint, as := range m.Spec.ClusterMappings {
			own, err1 := netip.ParseAddr(endpoint)
			seen, err2 := netip.ParseAddr(as)
			if err1 == nil && err2 == nil && endpoint != tunnelEndpoint && external.Contains(seen) {
				mapped[seen] = own
			}
		}
	}
	return mapped
}

// servicesIn returns the TCP ports of Services with endpoints in the other cluster: one target for
// each ready endpoint, and one for the name of the Service. remote returns an endpoint's own
// address in the other cluster. known is false if the endpoint is not in the other cluster.
func servicesIn(endpoints []discoveryv1.EndpointSlice, services []corev1.Service, remote func(netip.Addr) (own netip.Addr, known bool)) (all []Target) {
	for i := range endpoints {
		s := &endpoints[i]
		if s.Labels[isthmus.LabelService] != "" { // importsIn handles these
			continue
		}
		i := slices.IndexFunc(services, func(service corev1.Service) bool {
			return service.Namespace == s.Namespace && service.Name == s.Labels[discoveryv1.LabelServiceName]
		})
		if i < 0 {
			continue
		}
		service := &services[i]
		name := service.Namespace + "/" + service.Name
		for _, p := range s.Ports {
			if p.Port == nil || p.Protocol != nil && *p.Protocol != corev1.ProtocolTCP {
				continue
			}
			port := uint16(*p.Port) //nolint:gosec // the API server accepts no other value
			home := ""              // own address of one of the endpoints
			for _, e := range s.Endpoints {
				for _, text := range e.Addresses {
					addr, err := netip.ParseAddr(text)
					if err != nil || e.Conditions.Ready != nil && !*e.Conditions.Ready {
						continue
					}
					if own, known := remote(addr); known {
						home = netip.AddrPortFrom(own, port).String()
						all = append(all, Target{Host: netip.AddrPortFrom(addr, port).String(), What: "endpoint of Service " + name, Own: home})
					}
				}
			}
			for _, servicePort := range service.Spec.Ports {
				if home != "" && p.Name != nil && servicePort.Name == *p.Name && servicePort.Protocol == corev1.ProtocolTCP {
					if service.Spec.ClusterIP != corev1.ClusterIPNone {
						port = uint16(servicePort.Port) //nolint:gosec // the API server accepts no other value
					}
					all = append(all, Target{Host: net.JoinHostPort(service.Name+"."+service.Namespace+".svc", strconv.Itoa(int(port))), What: "Service " + name, Own: home})
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b Target) int { return cmp.Or(strings.Compare(a.What, b.What), strings.Compare(a.Host, b.Host)) })
	return slices.Compact(all)
}

// importsIn returns the Services that a cluster imports from another cluster and that are ready
// there. Each Service gives two targets at its first TCP port: its name, which may resolve to
// any exporter, and an endpoint of the other cluster.
func importsIn(endpoints []discoveryv1.EndpointSlice, services []corev1.Service, remote func(netip.Addr) (own netip.Addr, known bool)) (names, addresses []Target) {
	type pair struct{ name, end Target }
	found := map[string]pair{} // the targets of each Service
	for i := range endpoints {
		s := &endpoints[i]
		name := s.Labels[isthmus.LabelService]
		first := slices.IndexFunc(s.Ports, func(p discoveryv1.EndpointPort) bool {
			return p.Port != nil && p.Name != nil && (p.Protocol == nil || *p.Protocol == corev1.ProtocolTCP)
		})
		if name == "" || first < 0 {
			continue
		}
		behind := uint16(*s.Ports[first].Port) //nolint:gosec // the API server accepts no other value
		port := behind
		for _, service := range services { // a headless Service is not in services
			for _, p := range service.Spec.Ports {
				if service.Namespace == s.Namespace && service.Name == s.Labels[discoveryv1.LabelServiceName] && p.Name == *s.Ports[first].Name {
					port = uint16(p.Port) //nolint:gosec // the API server accepts no other value
				}
			}
		}
		what := "imported Service " + s.Namespace + "/" + name
		host := net.JoinHostPort(name+"."+s.Namespace+".svc."+corefile.Zone, strconv.Itoa(int(port)))
		for _, e := range s.Endpoints {
			for _, text := range e.Addresses {
				addr, err := netip.ParseAddr(text)
				if err != nil || e.Conditions.Ready != nil && !*e.Conditions.Ready {
					continue
				}
				own, inPeer := remote(addr)
				home, here := netip.AddrPortFrom(own, behind).String(), netip.AddrPortFrom(addr, behind).String()
				if was, known := found[what]; inPeer && (!known || here < was.end.Host) {
					found[what] = pair{Target{Host: host, What: what, Own: home}, Target{Host: here, What: "endpoint of " + what, Own: home}}
				}
			}
		}
	}
	for _, what := range slices.Sorted(maps.Keys(found)) {
		names, addresses = append(names, found[what].name), append(addresses, found[what].end)
	}
	return names, addresses
}

// control repeats failed checks of discovered targets from within the targets' own cluster. If a
// target does not answer there either, its failure shows nothing about the path between the
// clusters.
func control(ctx context.Context, own *site, results []Result) {
	var which []int
	var checks []Check
	for i, r := range results {
		if r.Error != "" && r.own != "" && r.From.Cluster != own.pods[0].Cluster {
			which = append(which, i)
			checks = append(checks, Check{From: own.pods[0].End, Target: r.own, Protocol: r.Protocol, Size: r.Size})
		}
	}
	if len(checks) == 0 {
		return
	}
	for i, repeated := range own.pods[0].send(ctx, checks, false) {
		r := &results[which[i]]
		if repeated.Error != "" {
			r.Unknown = fmt.Sprintf("%s does not answer in its own cluster either: %s", r.own, repeated.Error)
			r.Error = ""
		}
	}
}
