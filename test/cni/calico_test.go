package cni

import (
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// calicoVXLAN imitates Calico with a VXLAN pool and natOutgoing. Calico allocates blocks of 64
// addresses to nodes on demand and ignores node.spec.podCIDR. The shape has:
//   - vxlan.calico with VNI 4096 on port 4789,
//   - a route for each pod, whose next hop 169.254.1.1 is answered by proxy ARP, and a blackhole for
//     the rest of a block (felix/dataplane/linux/vxlan_mgr.go, routetable),
//   - masquerading of packets from pools to addresses outside of all pools, and of the node's own
//     packets into the tunnel (felix/rules/nat.go),
//   - a strict reverse path filter for workloads (felix/rules/static.go: cali-PREROUTING in raw).
var calicoVXLAN = &shape{
	name:    "Calico, VXLAN",
	source:  "projectcalico/calico: felix/rules/static.go, felix/rules/nat.go, felix/dataplane/linux; docs.tigera.io, \"Overlay networking\", \"Calico IPAM\"",
	form:    "no bridge, a route and proxy ARP for each pod, vxlan.calico, /26 blocks that are not the nodes' podCIDRs, natOutgoing, RPF for workloads",
	address: calicoBlocks,
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := routedNode(c, i, "cali", 1450)
		n := c.Nodes[i]
		vtep := func(i int) netip.Addr { return calicoBlock(c, i).Addr() }
		d.ip = append(d.ip,
			fmt.Sprintf("link add vxlan.calico address %s mtu 1450 type vxlan id 4096 dev eth0 local %v dstport 4789 nolearning", mac(i), n.Addr),
			fmt.Sprintf("addr add %v/32 dev vxlan.calico", vtep(i)),
			"link set vxlan.calico up",
			fmt.Sprintf("route add blackhole %v proto 80", calicoBlock(c, i)))
		for j, other := range c.Nodes {
			if j == i {
				continue
			}
			d.ip = append(d.ip,
				fmt.Sprintf("neigh add %v lladdr %s dev vxlan.calico nud permanent", vtep(j), mac(j)),
				fmt.Sprintf("route add %v via %v dev vxlan.calico onlink proto 80", calicoBlock(c, j), vtep(j)))
			d.bridge = append(d.bridge, fmt.Sprintf("fdb append %s dev vxlan.calico dst %v self permanent", mac(j), other.Addr))
		}
		d.tables = calicoNAT(c) + calicoPolicy("cali+")
		return d
	},
}

// calicoBGP imitates Calico with BGP and without encapsulation: bird adds routes to the blocks of
// other nodes via the nodes' addresses (confd/etc/calico/confd/templates/bird.cfg.template).
var calicoBGP = &shape{
	name:    "Calico, no encapsulation",
	source:  "as Calico, VXLAN; docs.tigera.io, \"Configure BGP peering\"",
	form:    "the same with routes by the nodes' addresses (proto bird)",
	address: calicoBlocks,
	node: func(c *lab.Cluster, i int) nodeSetup {
		d := routedNode(c, i, "cali", 1500)
		d.ip = append(d.ip, fmt.Sprintf("route add blackhole %v proto bird", calicoBlock(c, i)))
		for j, other := range c.Nodes {
			if j != i {
				d.ip = append(d.ip, fmt.Sprintf("route add %v via %v dev eth0 proto bird", calicoBlock(c, j), other.Addr))
			}
		}
		d.tables = calicoNAT(c) + calicoPolicy("cali+")
		return d
	},
}

// calicoBlock returns the block of node i. The last node has the first block of the pool, all
// others have blocks in its middle.
func calicoBlock(c *lab.Cluster, i int) netip.Prefix {
	middle := plus(c.PodCIDR.Addr(), 1<<(31-c.PodCIDR.Bits()))
	return netip.PrefixFrom(plus(middle, 64*(len(c.Nodes)-1-i)), 26)
}

// calicoBlocks gives pods addresses of their node's block. Nodes keep the podCIDRs of
// kube-controller-manager, which Calico ignores.
func calicoBlocks(c *lab.Cluster) {
	for i, n := range c.Nodes {
		for j, p := range podsOn(c, n) {
			p.Addr = plus(calicoBlock(c, i).Addr(), 5+j)
		}
	}
}

func routedNode(c *lab.Cluster, i int, prefix string, mtu int) (d nodeSetup) {
	d.pods = map[*lab.Pod][]string{}
	d.later = map[string]string{}
	for _, p := range podsOn(c, c.Nodes[i]) {
		name := veth(prefix, p)
		d.ip = append(d.ip, toPod(name, p, mtu,
			fmt.Sprintf("link set %s address ee:ee:ee:ee:ee:ee", name),
			fmt.Sprintf("route add %v dev %s scope link", p.Addr, name))...)
		d.later["ipv4/conf/"+name+"/rp_filter"] = "1"
		d.later["ipv4/conf/"+name+"/proxy_arp"] = "1"
		d.later["ipv4/neigh/"+name+"/proxy_delay"] = "0"
		d.pods[p] = routedPod(p)
	}
	return d
}

func calicoNAT(c *lab.Cluster) string {
	return fmt.Sprintf(`*nat
:cali-POSTROUTING -
:cali-nat-outgoing -
-I POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
-A cali-POSTROUTING -j cali-nat-outgoing
-A cali-nat-outgoing -s %[1]v ! -d %[1]v -j MASQUERADE --random-fully
-A cali-POSTROUTING -o vxlan.calico -m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL -j MASQUERADE --random-fully
COMMIT
`, c.PodCIDR)
}

// calicoPolicy returns the rules that Felix writes for a workload that no policy selects: its
// profile allows everything.
func calicoPolicy(workloads string) string {
	return fmt.Sprintf(`*raw
:cali-PREROUTING -
-I PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i %[1]s -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
COMMIT
*filter
:cali-FORWARD -
:cali-from-wl-dispatch -
:cali-to-wl-dispatch -
-I FORWARD -j cali-FORWARD
-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
-A cali-FORWARD -i %[1]s -j cali-from-wl-dispatch
-A cali-FORWARD -o %[1]s -j cali-to-wl-dispatch
-A cali-from-wl-dispatch -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-from-wl-dispatch -m conntrack --ctstate INVALID -j DROP
-A cali-from-wl-dispatch -p udp -m multiport --dports 4789 -j DROP
-A cali-from-wl-dispatch -j MARK --set-xmark 0x10000/0x10000
-A cali-to-wl-dispatch -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-to-wl-dispatch -m conntrack --ctstate INVALID -j DROP
-A cali-to-wl-dispatch -j MARK --set-xmark 0x10000/0x10000
COMMIT
`, workloads)
}
