package cni

import (
	"fmt"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// flannelVXLAN imitates flannel's VXLAN backend (pkg/backend/vxlan): a device flannel.1 with VNI 1,
// whose address is that of the node's network with the prefix length 32, and for each other node a
// permanent neighbour, an FDB entry and an "onlink" route via that node's flannel.1. The bridge
// plugin, which flannel's plugin calls, makes cni0 with the first address, and attaches the pods to
// it. The iptables rules are those of pkg/trafficmngr/iptables since v0.22.
var flannelVXLAN = &shape{
	name:   "flannel, VXLAN",
	source: "flannel-io/flannel: pkg/backend/vxlan, pkg/trafficmngr/iptables/iptables.go; containernetworking/plugins: bridge",
	form:   "bridge cni0, flannel.1, FLANNEL-POSTRTG masquerades its pods' packets that leave the cluster, FLANNEL-FWD",
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := bridgedNode(c, i, "cni0", 1450)
		d.ip = append(d.ip, flannelDevice(c, i)...)
		for j := range c.Nodes {
			if j != i {
				d.bridge = append(d.bridge, fmt.Sprintf("fdb append %s dev flannel.1 dst %v self permanent", mac(j), c.Nodes[j].Addr))
			}
		}
		d.tables = flannelTables(c, i)
		return d
	},
}

// flannelHostGW imitates flannel's host-gw backend (pkg/backend/hostgw): a route to each other
// node's network via that node's address.
var flannelHostGW = &shape{
	name:   "flannel, host-gw",
	source: "flannel-io/flannel: pkg/backend/hostgw, pkg/backend/route_network.go",
	form:   "bridge cni0, routes by the nodes' addresses, the same rules",
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := bridgedNode(c, i, "cni0", 1500)
		d.ip = append(d.ip, byNodes(c, i)...)
		d.tables = flannelTables(c, i)
		return d
	},
}

// canal imitates Canal, which is flannel's VXLAN with Calico's devices and policy: it has no
// bridge, but a route for each pod.
var canal = &shape{
	name:   "Canal",
	source: "projectcalico/canal and docs.tigera.io, \"Install Calico for policy and flannel for networking\"; as flannel and Calico",
	form:   "flannel.1 and FLANNEL-POSTRTG, a cali device and a route for each pod, RPF for workloads",
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := routedNode(c, i, "cali", 1450)
		d.ip = append(d.ip, flannelDevice(c, i)...)
		for j := range c.Nodes {
			if j != i {
				d.bridge = append(d.bridge, fmt.Sprintf("fdb append %s dev flannel.1 dst %v self permanent", mac(j), c.Nodes[j].Addr))
			}
		}
		d.tables = flannelTables(c, i) + calicoPolicy("cali+")
		return d
	},
}

// bridgedNode returns the setup of a node whose pods are on a bridge with the first address of the
// node's network.
func bridgedNode(c *lab.Cluster, i int, bridge string, mtu int) (d nodeSetup) {
	n := c.Nodes[i]
	gateway := n.PodCIDR.Addr().Next()
	d.ip = []string{
		fmt.Sprintf("link add %s mtu %d type bridge", bridge, mtu),
		fmt.Sprintf("addr add %v/%d brd + dev %s", gateway, n.PodCIDR.Bits(), bridge),
		fmt.Sprintf("link set %s up", bridge),
	}
	d.pods = map[*lab.Pod][]string{}
	for _, p := range podsOn(c, n) {
		name := veth("veth", p)
		d.ip = append(d.ip, toPod(name, p, mtu, fmt.Sprintf("link set %s master %s", name, bridge))...)
		d.bridge = append(d.bridge, fmt.Sprintf("link set dev %s hairpin on", name)) // hairpinMode
		d.pods[p] = bridgedPod(p, n.PodCIDR, gateway)
	}
	return d
}

// byNodes returns a route to each other node's network, via that node's address in the underlay.
func byNodes(c *lab.Cluster, i int) (lines []string) {
	for j, n := range c.Nodes {
		if j != i {
			lines = append(lines, fmt.Sprintf("route add %v via %v dev eth0", n.PodCIDR, n.Addr))
		}
	}
	return lines
}

func flannelDevice(c *lab.Cluster, i int) []string {
	n := c.Nodes[i]
	lines := []string{
		fmt.Sprintf("link add flannel.1 address %s mtu 1450 type vxlan id 1 dev eth0 local %v dstport 8472 nolearning", mac(i), n.Addr),
		fmt.Sprintf("addr add %v/32 dev flannel.1", n.PodCIDR.Addr()),
		"link set flannel.1 up",
	}
	for j, other := range c.Nodes {
		if j != i {
			lines = append(lines,
				fmt.Sprintf("neigh add %v lladdr %s dev flannel.1 nud permanent", other.PodCIDR.Addr(), mac(j)),
				fmt.Sprintf("route add %v via %v dev flannel.1 onlink", other.PodCIDR, other.PodCIDR.Addr()))
		}
	}
	return lines
}

func flannelTables(c *lab.Cluster, i int) string {
	return fmt.Sprintf(`*nat
:FLANNEL-POSTRTG -
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s %[2]v -d %[1]v -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s %[1]v -d %[2]v -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s %[1]v -d %[2]v -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s %[1]v ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s %[1]v -d %[1]v -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
COMMIT
*filter
:FLANNEL-FWD -
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s %[1]v -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d %[1]v -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
`, c.PodCIDR, c.Nodes[i].PodCIDR)
}
