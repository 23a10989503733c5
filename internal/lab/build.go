package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"

	"github.com/isthmus-net/isthmus/fabric"
)

// build creates the kernel objects of the lab.
func (l *Lab) build(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Join(l.Dir, logDir), 0o755); err != nil {
		return err
	}
	underlay, err := newKernel(l.Underlay, map[string]string{"ipv4/ip_forward": "1"})
	if err != nil {
		return err
	}
	defer underlay.close()
	for i, c := range l.Clusters {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := l.buildCluster(underlay, c, underlayOf(i)); err != nil {
			return fmt.Errorf("cluster %s: %w", c.Name, err)
		}
	}
	return nil
}

func (l *Lab) buildCluster(underlay *kernel, c *Cluster, network netip.Prefix) error {
	if err := os.MkdirAll(c.ConfigDir, 0o755); err != nil {
		return err
	}
	mtu, bridge, router := l.Spec.MTU, "br-"+c.Name, network.Addr().Next()
	if err := underlay.bridge(bridge, mtu); err != nil {
		return err
	}
	if err := underlay.address(bridge, netip.PrefixFrom(router, network.Bits())); err != nil {
		return err
	}
	filter, err := l.Spec.RPFilter.sysctl()
	if err != nil {
		return err
	}
	end := map[string]string{"ipv4/conf/all/rp_filter": filter, "ipv4/conf/default/rp_filter": filter}
	forward := map[string]string{"ipv4/ip_forward": "1"}
	for name, value := range end {
		forward[name] = value
	}

	if c.Control != nil {
		if err := l.buildControl(underlay, bridge, c, network, end); err != nil {
			return err
		}
	}
	pods, podsPerNode, bare := c.Pods, len(c.Pods)/len(c.Nodes), c.bare
	for i, n := range c.Nodes {
		node, err := newKernel(n.Host, forward)
		if err != nil {
			return err
		}
		defer node.close()
		// Create eth0 first: the kernel uses the address of the oldest device as a packet's source
		// address if it finds no better one.
		if err := underlay.veth(n.Name, mtu, node); err != nil {
			return err
		}
		if err := errors.Join(
			underlay.setMaster(n.Name, bridge),
			node.address(uplink, netip.PrefixFrom(n.Addr, network.Bits())),
			node.route(everywhere, router, uplink),
		); err != nil {
			return err
		}
		for j, other := range c.Nodes {
			if j == i || bare {
				continue
			}
			if err := node.route(other.PodCIDR, other.Addr, uplink); err != nil {
				return err
			}
		}
		if i > 0 {
			if err := node.route(onPremNetwork, c.Nodes[0].Addr, uplink); err != nil {
				return err
			}
		} else if err := l.buildServer(node, c, end); err != nil {
			return err
		}
		for p := range podsPerNode {
			if err := l.buildPod(node, n, pods[p], "pod"+strconv.Itoa(p+1), end, bare); err != nil {
				return err
			}
		}
		pods = pods[podsPerNode:]
		if i < len(c.GatewayPods) {
			if err := l.buildGatewayPod(node, c, c.GatewayPods[i], end); err != nil {
				return err
			}
		}
	}
	return nil
}

// buildControl creates the host of the control plane, beside the nodes in the underlay. Pods
// cannot reach it.
func (l *Lab) buildControl(underlay *kernel, bridge string, c *Cluster, network netip.Prefix, settings map[string]string) error {
	control, err := newKernel(c.Control.Host, settings)
	if err != nil {
		return err
	}
	defer control.close()
	if err := underlay.veth(c.Control.Name, l.Spec.MTU, control); err != nil {
		return err
	}
	return errors.Join(
		underlay.setMaster(c.Control.Name, bridge),
		control.address(uplink, netip.PrefixFrom(c.Control.Addr, network.Bits())),
		control.route(everywhere, network.Addr().Next(), uplink),
	)
}

// buildPod creates a pod as the ptp CNI plugin does. kind uses that plugin, and Calico works
// similarly.
func (l *Lab) buildPod(node *kernel, n *Node, p *Pod, dev string, settings map[string]string, bare bool) error {
	pod, err := newKernel(p.Host, settings)
	if err != nil {
		return err
	}
	defer pod.close()
	if bare {
		return nil
	}
	if err := node.veth(dev, l.Spec.MTU, pod); err != nil {
		return err
	}
	gateway := n.PodCIDR.Addr().Next()
	return errors.Join(
		node.address(dev, netip.PrefixFrom(gateway, 32)),
		node.route(netip.PrefixFrom(p.Addr, 32), netip.Addr{}, dev),
		pod.address(uplink, netip.PrefixFrom(p.Addr, 32)),
		pod.route(netip.PrefixFrom(gateway, 32), netip.Addr{}, uplink),
		pod.route(everywhere, gateway, uplink),
	)
}

// buildGatewayPod creates a pod for a gateway. As CNI plugins do, it makes the pod's node
// masquerade packets from the pod to destinations outside the pod network. It also makes the node
// forward the WireGuard ports of its own address to the pod (hostPort).
func (l *Lab) buildGatewayPod(node *kernel, c *Cluster, p *Pod, settings map[string]string) error {
	const dev = "gateway"
	if err := l.buildPod(node, p.Node, p, dev, settings, c.bare); err != nil || c.bare {
		return err
	}
	return p.Node.Do(func() error { return publish(p.Addr, c.PodCIDR, wireGuardPort, fabric.MaxTunnels) })
}

// buildServer creates the server outside the cluster. The server is on a network that only node 1
// reaches.
func (l *Lab) buildServer(node *kernel, c *Cluster, settings map[string]string) error {
	server, err := newKernel(c.OnPrem.Host, settings)
	if err != nil {
		return err
	}
	defer server.close()
	if err := node.veth("lan", l.Spec.MTU, server); err != nil {
		return err
	}
	return errors.Join(
		node.address("lan", netip.PrefixFrom(onPremGateway, onPremNetwork.Bits())),
		server.address(uplink, netip.PrefixFrom(c.OnPrem.Addr, onPremNetwork.Bits())),
		server.route(everywhere, onPremGateway, uplink),
	)
}
