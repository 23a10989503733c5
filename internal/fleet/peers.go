package fleet

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/manager/ipamrpc"
)

// electionTimeout is the time for which ActiveGateway waits for an active gateway.
const electionTimeout = 30 * time.Second

// ActiveGateway returns the index, from 0, of the node whose gateway is active. It waits for an
// election in progress.
func (c *Cluster) ActiveGateway(ctx context.Context) (int, error) {
	pod, err := c.ActivePod(ctx, electionTimeout)
	if err != nil {
		return 0, err
	}
	if i := slices.IndexFunc(c.Nodes, func(n *lab.Node) bool { return n.Name == pod.Spec.NodeName }); i >= 0 {
		return i, nil
	}
	return 0, fmt.Errorf("cluster %s: the active gateway is on %q, which is not a node of this cluster", c.Name, pod.Spec.NodeName)
}

// RemotePod returns a pod of the cluster on a node whose gateway is not the active one.
func (c *Cluster) RemotePod(ctx context.Context) (*lab.Pod, error) {
	active, err := c.ActiveGateway(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range c.Pods {
		if p.Node != c.Nodes[active] {
			return p, nil
		}
	}
	return nil, fmt.Errorf("cluster %s has no pod on a node other than that of the gateway", c.Name)
}

// Metrics returns the response of the active gateway at /metrics.
func (c *Cluster) Metrics(ctx context.Context) (string, error) {
	active, err := c.ActiveGateway(ctx)
	if err != nil {
		return "", err
	}
	return c.Scrape(ctx, Gateway(active))
}

// Scrape returns the response of a component at /metrics.
func (c *Cluster) Scrape(ctx context.Context, name string) (string, error) {
	p := c.processes[name]
	if p == nil {
		return "", fmt.Errorf("cluster %s has no %s", c.Name, name)
	}
	return p.host.Get(ctx, p.metrics)
}

// Metric returns the sum of all series of a metric of the active gateway that have all the given
// labels, each written as in the exposition format (`direction="inbound"`).
func (c *Cluster) Metric(ctx context.Context, name string, labels ...string) (float64, error) {
	text, err := c.Metrics(ctx)
	if err != nil {
		return 0, err
	}
	return lab.SumMetric(text, name, labels)
}

// MapEndpoint returns the address under which another cluster reaches an endpoint of c that is
// not a pod. It requests the mapping from the manager of c, as a virtual kubelet does.
func (c *Cluster) MapEndpoint(ctx context.Context, endpoint netip.Addr, peer *Cluster) (netip.Addr, error) {
	conn, err := grpc.NewClient(fmt.Sprintf("passthrough:///127.0.0.1:%d", ipamPort), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return c.Control.Dial(ctx, "tcp", address)
		}))
	if err != nil {
		return netip.Addr{}, err
	}
	defer func() { _ = conn.Close() }() // fails only if the connection is closed already
	var answer ipamrpc.MapResponse
	if err := conn.Invoke(ctx, "/ipam/MapEndpointIP", &ipamrpc.MapRequest{ClusterID: peer.ID, Ip: endpoint.String()}, &answer); err != nil {
		return netip.Addr{}, fmt.Errorf("manager of cluster %s: map %v for %s: %w", c.Name, endpoint, peer.Name, err)
	}
	return netip.ParseAddr(answer.GetIp())
}
