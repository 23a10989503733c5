package fleet

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/manager/ipamrpc"
)

// Peering returns cluster c's Peering with another cluster; an error when there is none.
func (c *Cluster) Peering(ctx context.Context, with *Cluster) (*isthmus.Peering, error) {
	p, err := FindPeering(ctx, c.Client, with.ID)
	if err != nil {
		return nil, fmt.Errorf("cluster %s with %s: %w", c.Name, with.Name, err)
	}
	return p, nil
}

// Seen is the address under which c reaches a pod's address of another cluster, by what the two
// agreed upon.
func (c *Cluster) Seen(ctx context.Context, of *Cluster, addr netip.Addr) (netip.Addr, error) {
	if of == c {
		return addr, nil
	}
	p, err := c.Peering(ctx, of)
	if err != nil {
		return netip.Addr{}, err
	}
	seen, err := netip.ParsePrefix(p.Status.Remote.PodCIDRSeen)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("cluster %s has not agreed with %s on networks yet", c.Name, of.Name)
	}
	return lab.Move(addr, of.PodCIDR, seen), nil
}

// electionTimeout is how long ActiveGateway waits for a gateway that is marked as the active one.
const electionTimeout = 30 * time.Second

// ActiveGateway returns the number of the node, counted from 0, whose gateway is the active one. It
// waits for an election that is going on: a gateway carries traffic before its mark is written.
func (c *Cluster) ActiveGateway(ctx context.Context) (int, error) {
	active, last := -1, error(nil)
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, electionTimeout, true, func(ctx context.Context) (bool, error) {
		var err error
		if active, err = c.markedActive(ctx); err != nil {
			last = err
		}
		return err == nil, nil
	})
	if err != nil {
		return 0, fmt.Errorf("cluster %s: %w", c.Name, last)
	}
	return active, nil
}

// markedActive returns the number of the one node whose gateway's Pod is marked as the active one.
func (c *Cluster) markedActive(ctx context.Context) (int, error) {
	var pods corev1.PodList
	err := c.Client.List(ctx, &pods, client.InNamespace(Namespace), client.MatchingLabels{v1alpha1.LabelGateway: v1alpha1.GatewayActive})
	if err != nil {
		return 0, err
	}
	var names []string
	for _, p := range pods.Items {
		names = append(names, p.Spec.NodeName)
	}
	if len(names) == 1 {
		if i := slices.IndexFunc(c.Nodes, func(n *lab.Node) bool { return n.Name == names[0] }); i >= 0 {
			return i, nil
		}
	}
	return 0, fmt.Errorf("active gateways on [%s]; want exactly one", strings.Join(names, " "))
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

// WaitReady waits until cluster c's Peering with another one is Ready. The error says what it
// lacked.
func (c *Cluster) WaitReady(ctx context.Context, with *Cluster, atMost time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	if err := WaitReady(ctx, c.Client, with.ID); err != nil {
		return fmt.Errorf("cluster %s is not ready for %s after %v: %w", c.Name, with.Name, atMost, err)
	}
	return nil
}

// Metrics returns what the active gateway answers at /metrics.
func (c *Cluster) Metrics(ctx context.Context) (string, error) {
	active, err := c.ActiveGateway(ctx)
	if err != nil {
		return "", err
	}
	return c.Scrape(ctx, Gateway(active))
}

// Scrape returns what a component answers at /metrics.
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

// MapEndpoint asks the manager of c, as a virtual kubelet does, for the address under which another
// cluster reaches an endpoint of c that is no pod.
func (c *Cluster) MapEndpoint(ctx context.Context, endpoint netip.Addr, peer *Cluster) (netip.Addr, error) {
	conn, err := grpc.NewClient(fmt.Sprintf("passthrough:///127.0.0.1:%d", ipamPort), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return c.Control.Dial(ctx, "tcp", address)
		}))
	if err != nil {
		return netip.Addr{}, err
	}
	defer func() { _ = conn.Close() }() // fails only when it is closed already
	var answer ipamrpc.MapResponse
	if err := conn.Invoke(ctx, "/ipam/MapEndpointIP", &ipamrpc.MapRequest{ClusterID: peer.ID, Ip: endpoint.String()}, &answer); err != nil {
		return netip.Addr{}, fmt.Errorf("manager of cluster %s: map %v for %s: %w", c.Name, endpoint, peer.Name, err)
	}
	return netip.ParseAddr(answer.GetIp())
}
