package inspect

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/safetext"
	"github.com/isthmus-net/isthmus/natengine"
)

// NodeHop checks the path between a Pod's node and the gateway: the rules and the overlay of that
// node's route agent. An empty node means that no Pod has the address. If nothing but the
// connection to the gateway is broken, the hop's state is Waits while no gateway is active, and
// Unknown while the gateway is new.
func NodeHop(ctx context.Context, c *cluster.Cluster, node string) (health.Hop, error) {
	hop := health.Hop{Cluster: c.String(), Name: "node", State: health.Works, Source: "Nodes, Pods in " + c.Namespace}
	if node == "" {
		hop.State, hop.Text = health.Unknown, "no Pod of this cluster has the address, so it must belong to a node or another machine"
		return hop, nil
	}
	now, _ := c.Now()
	found, err := components(ctx, c, now)
	if err != nil {
		return hop, c.Explain("Pods in "+c.Namespace, err)
	}
	var n corev1.Node
	if err := c.Client.Get(ctx, client.ObjectKey{Name: node}, &n); err != nil {
		return hop, c.Explain("Node "+node, err)
	}
	a := health.AgentsOf([]corev1.Node{n}, found, nil)
	switch problems := slices.Concat(a.Unready, a.Missing); {
	case len(problems) > 0:
		hop.State, hop.Text, hop.FollowsGateway = health.Broken, strings.Join(problems, "; "), len(problems) == a.Unreached
	case a.Nodes == 0:
		hop.State, hop.Text = health.Broken, fmt.Sprintf("Node %s runs no route agent, because it is virtual or not Linux", safetext.Of(node))
	case found.Refuses[node] != "":
		hop.State, hop.Text = health.Broken, fmt.Sprintf("Node %s: %s", safetext.Of(node), found.Refuses[node])
	default:
		hop.Text = fmt.Sprintf("Node %s: its route agent is ready, so packets reach the gateway and return", safetext.Of(node))
	}
	if !hop.FollowsGateway {
		return hop, nil
	}
	gateway, err := GatewayHop(ctx, c)
	if err != nil {
		return hop, err
	}
	path := []health.Hop{hop}
	health.ExcuseByGateway(path, &gateway, now)
	return path[0], nil
}

// VacantHop returns a hop for an address that is in the PodCIDR of a node but belongs to no running
// Pod. vacant reports whether addr is such an address. According to the hop, nothing answers at the
// address unless the node itself has it, for example on its bridge.
func VacantHop(ctx context.Context, c *cluster.Cluster, addr netip.Addr) (hop health.Hop, vacant bool, err error) {
	var nodes corev1.NodeList
	switch err := c.Client.List(ctx, &nodes); {
	case kubeerr.Forbidden(err): // the user may not list Nodes: handle the address as one of another machine
		return hop, false, nil
	case err != nil:
		return hop, false, c.Explain("Nodes", err)
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		for _, text := range append(slices.Clone(n.Spec.PodCIDRs), n.Spec.PodCIDR) {
			if prefix, err := netip.ParsePrefix(text); err == nil && prefix.Contains(addr) {
				return health.Hop{Cluster: c.String(), Name: "pod", State: health.Unknown, Source: "Pods, Nodes",
					Text: fmt.Sprintf("no running Pod has %s, which is in the PodCIDR %s of Node %s; nothing answers there unless the node itself has the address", addr, prefix, safetext.Of(n.Name))}, true, nil
			}
		}
	}
	return hop, false, nil
}

// GatewayHop checks whether a gateway is active. The overlay ends at that gateway's Pod, which the
// hop names.
func GatewayHop(ctx context.Context, c *cluster.Cluster) (health.Hop, error) {
	hops, _, _, err := clusterHops(ctx, c)
	if err != nil {
		return health.Hop{}, err
	}
	var list isthmus.PeeringList
	if err := c.Client.List(ctx, &list); err != nil {
		return health.Hop{}, c.Explain("Peerings", err)
	}
	for i := range list.Items {
		health.UpdateGateway(hops, &list.Items[i])
	}
	i := slices.IndexFunc(hops, func(h health.Hop) bool { return h.Name == health.HopGateway })
	return hops[i], nil
}

// TunnelHop checks whether packets go both ways between the gateways of this cluster and of a
// peer.
func TunnelHop(ctx context.Context, c *cluster.Cluster, peer string) (health.Hop, error) {
	e, err := examine(ctx, c, func(p *isthmus.Peering) bool { return p.Spec.Cluster.ClusterID == peer })
	if err != nil {
		return health.Hop{}, err
	}
	hop := health.Hop{Cluster: c.String(), Name: health.StepNames[isthmus.ConditionConnected], State: health.Unknown, Text: "there is no Peering with cluster " + safetext.Of(peer), Source: "Peerings"}
	for _, hops := range e.Peerings {
		for _, h := range hops {
			if h.Name == hop.Name {
				return h, nil
			}
		}
	}
	return hop, nil
}

// SeenFrom returns the address at which this cluster reaches a Pod of a peer, according to the
// networks that both clusters use for each other.
func SeenFrom(ctx context.Context, c *cluster.Cluster, peer string, endpoint netip.AddrPort) (netip.AddrPort, error) {
	var list isthmus.PeeringList
	if err := c.Client.List(ctx, &list); err != nil {
		return netip.AddrPort{}, c.Explain("Peerings", err)
	}
	for i := range list.Items {
		p := &list.Items[i]
		own, err1 := netip.ParsePrefix(p.Status.Remote.PodCIDR)
		seen, err2 := netip.ParsePrefix(p.Status.Remote.PodCIDRSeen)
		if p.Spec.Cluster.ClusterID != peer || cmp.Or(err1, err2) != nil {
			continue
		}
		if addr, ok := (natengine.Remap{From: own, To: seen}).Map(endpoint.Addr()); ok {
			return netip.AddrPortFrom(addr, endpoint.Port()), nil
		}
		return netip.AddrPort{}, fmt.Errorf("%s: %v is outside the peer's PodCIDR, %v", c, endpoint.Addr(), own)
	}
	return netip.AddrPort{}, fmt.Errorf("%s: no networks are agreed with cluster %s yet", c, safetext.Of(peer))
}
