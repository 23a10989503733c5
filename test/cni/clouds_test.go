package cni

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// awsVPC imitates Amazon's VPC CNI. Pods have secondary addresses of their node's interfaces, in
// the nodes' subnet. The node reaches a pod by rule 512 and a route in the main table. Rule 1024
// sends marked packets to the main table. Two kinds are marked: packets that arrive at eth0 for the
// node's own address, and packets of pods to addresses outside of the VPC
// (pkg/networkutils/network.go). Rule 1536 sends the packets of a pod on a second interface to that
// interface's table (cmd/routed-eni-cni-plugin/driver). Pods have a permanent neighbour entry for
// 169.254.1.1. AWS-SNAT-CHAIN-0 translates the source of packets that leave the VPC. The VPC drops
// packets whose source is not an address of the interface that sends them (docs.aws.amazon.com,
// "source/destination checks").
var awsVPC = &shape{
	name:       "AWS VPC CNI",
	source:     "aws/amazon-vpc-cni-k8s: pkg/networkutils/network.go, cmd/routed-eni-cni-plugin/driver, docs/cni-proposal.md; source/destination checks of EC2",
	translates: true,
	open:       true,
	form:       "addresses of the nodes' subnet, rules 512, 1024 and 1536, a second interface for the last pod of each node, AWS-SNAT-CHAIN, an underlay that drops foreign sources",
	vpc:        true,
	address:    withoutPodCIDRs,
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := vpcNode(c, i, "eni", 1500, mac(10*i+7))
		n := c.Nodes[i]
		pods := podsOn(c, n)
		second := plainPods(c, n)
		last := second[len(second)-1]
		// The second interface is another device at the same port of the underlay.
		d.ip = append(d.ip,
			"link add eth1 link eth0 type macvlan mode bridge",
			"link set eth1 up",
			fmt.Sprintf("route add %v dev eth1 scope link table 2", router(c)),
			fmt.Sprintf("route add default via %v dev eth1 table 2", router(c)),
			"rule add priority 1024 fwmark 0x80/0x80 lookup main",
			fmt.Sprintf("rule add priority 1536 from %v lookup 2", last.Addr))
		for _, p := range pods {
			d.ip = append(d.ip, fmt.Sprintf("rule add priority 512 to %v lookup main", p.Addr))
		}
		d.settings = map[string]string{"ipv4/conf/eth0/rp_filter": "2"} // as setupHostNetwork sets it
		d.tables = fmt.Sprintf(`*mangle
-A PREROUTING -i eth0 -m comment --comment "AWS, primary ENI" -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80
-A PREROUTING -i eni+ -m comment --comment "AWS, primary ENI" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
COMMIT
*nat
:AWS-SNAT-CHAIN-0 -
:AWS-CONNMARK-CHAIN-0 -
-A PREROUTING -i eni+ -m comment --comment "AWS, outbound connections" -j AWS-CONNMARK-CHAIN-0
-A PREROUTING -m comment --comment "AWS, CONNMARK" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
-A POSTROUTING -m comment --comment "AWS SNAT CHAIN" -j AWS-SNAT-CHAIN-0
-A AWS-CONNMARK-CHAIN-0 -d %[1]v -m comment --comment "AWS CONNMARK CHAIN, VPC CIDR" -j RETURN
-A AWS-CONNMARK-CHAIN-0 -m comment --comment "AWS, CONNMARK" -j CONNMARK --set-xmark 0x80/0x80
-A AWS-SNAT-CHAIN-0 -d %[1]v -m comment --comment "AWS SNAT CHAIN" -j RETURN
-A AWS-SNAT-CHAIN-0 ! -o vlan+ -m comment --comment "AWS, SNAT" -m addrtype ! --dst-type LOCAL -j SNAT --to-source %[2]v --random-fully
COMMIT
`, subnet(c), n.Addr)
		return d
	},
}

// azureCNI imitates Azure CNI in transparent mode: addresses of the nodes' subnet, a route for each
// pod through a device azv, proxy ARP (Azure/azure-container-networking:
// network/transparent_endpointclient_linux.go), and ip-masq-agent, which masquerades packets that
// leave the virtual network.
var azureCNI = &shape{
	name:       "Azure CNI",
	source:     "Azure/azure-container-networking: network/transparent_endpointclient_linux.go, docs/network.md; kubernetes-sigs/ip-masq-agent",
	translates: true,
	open:       true,
	form:       "addresses of the nodes' subnet, a route and proxy ARP for each pod, ip-masq-agent, an underlay that drops foreign sources",
	vpc:        true,
	address:    withoutPodCIDRs,
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := vpcNode(c, i, "azv", 1500, "")
		d.tables = masqueradeAgent("IP-MASQ-AGENT", subnet(c).String())
		return d
	},
}

// kubenetAKS imitates AKS with kubenet: a bridge cbr0, and a route table of the virtual network
// that leads to the nodes' networks. Packets that leave 10.0.0.0/8 are masqueraded (kubelet's
// former --non-masquerade-cidr).
var kubenetAKS = &shape{
	name:       "kubenet (AKS)",
	source:     "kubernetes/kubernetes v1.23: pkg/kubelet/dockershim/network/kubenet/kubenet_linux.go; learn.microsoft.com, \"Use kubenet networking\"",
	translates: true,
	open:       true,
	form:       "bridge cbr0, routes in the underlay, masquerading of what leaves 10.0.0.0/8, MTU 1400",
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := bridgedNode(c, i, "cbr0", 1400)
		d.underlay = []string{fmt.Sprintf("route add %v via %v", c.Nodes[i].PodCIDR, c.Nodes[i].Addr)}
		d.tables = `*nat
-A POSTROUTING ! -d 10.0.0.0/8 -m comment --comment "kubenet: SNAT for outbound traffic from cluster" -m addrtype ! --dst-type LOCAL -j MASQUERADE
COMMIT
`
		return d
	},
}

// gkeNative imitates VPC-native GKE. The node's address has the prefix length 32, so the node sends
// all packets to the router, which knows the alias range of each node. Each pod has a device gke
// and a route, and ip-masq-agent does not translate packets to private networks (cloud.google.com,
// "VPC-native clusters", "IP masquerade agent").
var gkeNative = &shape{
	name:   "GKE VPC-native",
	source: "cloud.google.com: \"VPC-native clusters\", \"IP masquerade agent\", \"Alias IP ranges\"; kubernetes-sigs/ip-masq-agent",
	form:   "a device and a route for each pod, alias ranges in the underlay, ip-masq-agent with the private networks, MTU 1460, an underlay that drops foreign sources",
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := routedNode(c, i, "gke", 1460)
		n := c.Nodes[i]
		d.ip = append(d.ip, "link set eth0 mtu 1460",
			fmt.Sprintf("route add %v dev eth0 scope link src %v", router(c), n.Addr))
		d.ip = append(d.ip, viaRouter(c, i)...)
		d.underlay = []string{fmt.Sprintf("route add %v via %v", n.PodCIDR, n.Addr),
			fmt.Sprintf("link set %s mtu 1460", n), fmt.Sprintf("link set br-%s mtu 1460", c)}
		d.fabric = sourceCheck(n, n.PodCIDR.String())
		d.tables = "*filter\n-A FORWARD -p tcp -j ACCEPT\n-A FORWARD -p udp -j ACCEPT\n-A FORWARD -p icmp -j ACCEPT\nCOMMIT\n" + // COS has the policy DROP and adds these rules
			masqueradeAgent("GKE-IP-MASQ", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "240.0.0.0/4", "192.0.2.0/24", "198.18.0.0/15", "100.64.0.0/10")
		return d
	},
}

// viaRouter returns the routes of node i to the pods of other nodes, via the router of the
// underlay.
func viaRouter(c *lab.Cluster, i int) (lines []string) {
	for j, n := range c.Nodes {
		if j != i {
			lines = append(lines, fmt.Sprintf("route add %v via %v dev eth0", n.PodCIDR, router(c)))
		}
	}
	return lines
}

// subnet returns the subnet of a cluster's nodes.
func subnet(c *lab.Cluster) netip.Prefix { return netip.PrefixFrom(c.Nodes[0].Addr, 24).Masked() }

// withoutPodCIDRs removes the podCIDRs of nodes, because the cloud has no controller that assigns
// them.
func withoutPodCIDRs(c *lab.Cluster) {
	for _, n := range c.Nodes {
		n.PodCIDR = netip.Prefix{}
	}
}

// plainPods returns the pods of a node except the gateway's.
func plainPods(c *lab.Cluster, n *lab.Node) (all []*lab.Pod) {
	for _, p := range c.Pods {
		if p.Node == n {
			all = append(all, p)
		}
	}
	return all
}

// vpcNode returns the setup of a node whose pods have addresses in the node's subnet. In the cloud,
// the network fabric knows the location of pods; here the node answers ARP for them. If gateway is
// a MAC address, pods have a permanent neighbour entry with it. If gateway is empty, pods find it
// by proxy ARP.
func vpcNode(c *lab.Cluster, i int, prefix string, mtu int, gateway string) nodeSetup {
	n := c.Nodes[i]
	d := nodeSetup{pods: map[*lab.Pod][]string{}, later: map[string]string{"ipv4/neigh/eth0/proxy_delay": "0"}}
	var known []string
	for _, p := range podsOn(c, n) {
		name := veth(prefix, p)
		d.ip = append(d.ip, toPod(name, p, mtu, fmt.Sprintf("route add %v dev %s scope link", p.Addr, name),
			fmt.Sprintf("neigh add proxy %v dev eth0", p.Addr))...)
		d.pods[p] = routedPod(p)
		if gateway == "" {
			d.later["ipv4/conf/"+name+"/proxy_arp"] = "1"
			d.later["ipv4/neigh/"+name+"/proxy_delay"] = "0"
		} else {
			d.ip = append(d.ip, fmt.Sprintf("link set %s address %s", name, gateway))
			d.pods[p] = append(d.pods[p], fmt.Sprintf("neigh add 169.254.1.1 lladdr %s dev eth0 nud permanent", gateway))
		}
		known = append(known, p.Addr.String())
	}
	d.fabric = sourceCheck(n, known...)
	return d
}

// sourceCheck returns the rules of a cloud's underlay: a node can send packets only from its own
// addresses, and receives packets only for them.
func sourceCheck(n *lab.Node, known ...string) string {
	name := strings.ReplaceAll(n.Name, "-", "_")
	return fmt.Sprintf(`table netdev cloud_%[1]s {
	chain from { type filter hook ingress device "%[2]s" priority 0; ip saddr != { %[3]v, %[4]s } counter drop; }
	chain to { type filter hook egress device "%[2]s" priority 0; ip daddr != { %[3]v, %[4]s } counter drop; }
}
`, name, n.Name, n.Addr, strings.Join(known, ", "))
}

// masqueradeAgent returns the chain of ip-masq-agent, which masquerades packets to destinations
// outside of the given networks.
func masqueradeAgent(chain string, networks ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*nat\n:%[1]s -\n-A POSTROUTING -m comment --comment \"ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom chain\" -m addrtype ! --dst-type LOCAL -j %[1]s\n", chain)
	for _, n := range networks {
		fmt.Fprintf(&b, "-A %s -d %s -j RETURN\n", chain, n)
	}
	fmt.Fprintf(&b, "-A %s -j MASQUERADE --random-fully\nCOMMIT\n", chain)
	return b.String()
}
