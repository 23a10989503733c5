package cni

import (
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// kindnet imitates kindnet: the device and the route of the ptp plugin for each pod, routes via the
// nodes' addresses, and KIND-MASQ-AGENT, which masquerades packets that leave the pods' networks
// (kubernetes-sigs/kind: images/kindnetd/cmd/kindnetd/masq.go, cni.go).
var kindnet = ptp("kindnet")

// twoNetworks is a cluster that has grown: the podCIDR of the last node is in a second network.
// kube-controller-manager allows one --cluster-cidr per family, but a MultiCIDRRangeAllocator and
// several clouds allow more. Peers know only one PodCIDR of a cluster, so for them pods in the
// second network are like nodes.
var twoNetworks = func() *shape {
	s := ptp("kindnet, pods in two networks")
	s.form = "as kindnet; the other node's podCIDR is in " + secondNetwork.String() + ", outside the installation's PodCIDR"
	s.set = "a PodCIDR of the installation that contains all pods (`--pod-cidr`), if one exists; Isthmus reports each node outside of it"
	s.address = func(c *lab.Cluster) {
		n := c.Nodes[len(c.Nodes)-1]
		n.PodCIDR = netip.PrefixFrom(secondNetwork.Addr(), 24)
		for i, p := range podsOn(c, n) {
			p.Addr = plus(n.PodCIDR.Addr(), 10+i)
		}
	}
	return s
}()

var secondNetwork = netip.MustParsePrefix("10.77.0.0/16")

func ptp(name string) *shape {
	return &shape{
		name:       name,
		source:     "kubernetes-sigs/kind: images/kindnetd/cmd/kindnetd; containernetworking/plugins: ptp",
		form:       "a device and a route for each pod, routes by the nodes' addresses, KIND-MASQ-AGENT masquerades all that leaves the cluster",
		translates: true,
		open:       true,
		node: func(c *lab.Cluster, i int) nodeSetup {
			n := c.Nodes[i]
			gateway := n.PodCIDR.Addr().Next()
			d := nodeSetup{pods: map[*lab.Pod][]string{}}
			for _, p := range podsOn(c, n) {
				name := veth("veth", p)
				d.ip = append(d.ip, toPod(name, p, 1500,
					fmt.Sprintf("addr add %v/32 dev %s", gateway, name),
					fmt.Sprintf("route add %v dev %s scope link", p.Addr, name))...)
				d.pods[p] = []string{
					"link set eth0 up",
					fmt.Sprintf("addr add %v/%d dev eth0 noprefixroute", p.Addr, n.PodCIDR.Bits()),
					fmt.Sprintf("route add %v dev eth0 scope link", gateway),
					fmt.Sprintf("route add default via %v dev eth0", gateway),
				}
			}
			d.ip = append(d.ip, byNodes(c, i)...)
			d.tables = masqueradeAgent("KIND-MASQ-AGENT", c.PodCIDR.String(), secondNetwork.String())
			return d
		},
	}
}

// weave imitates Weave Net: one layer 2 network over all nodes, with a bridge and a bridge address
// on each node. Weave allocates the addresses itself and ignores podCIDRs. Its chain WEAVE
// masquerades packets that leave that network, and packets that enter it (weaveworks/weave:
// net/ipam, net/expose.go, net/bridge.go). Weave's data path is Open vSwitch with VXLAN on port
// 6784; here a VXLAN device of the kernel is a port of the bridge, with MTU 1376 as in Weave.
var weave = &shape{
	name:   "Weave Net",
	source: "weaveworks/weave: net/bridge.go, net/expose.go, ipam; weave.works, \"Fast Datapath\"",
	form:   "one bridge over all nodes by VXLAN, addresses that are not the nodes' podCIDRs, WEAVE masquerades what leaves or enters, MTU 1376",
	address: func(c *lab.Cluster) {
		for i, n := range c.Nodes {
			for j, p := range podsOn(c, n) { // each node owns a part of the ring, the last node the first part
				p.Addr = plus(c.PodCIDR.Addr(), (len(c.Nodes)-i)*1000+2+j)
			}
		}
	},
	node: func(c *lab.Cluster, i int) nodeSetup {
		n := c.Nodes[i]
		at := plus(c.PodCIDR.Addr(), (len(c.Nodes)-i)*1000+1)
		d := nodeSetup{pods: map[*lab.Pod][]string{}}
		d.ip = []string{
			"link add weave mtu 1376 type bridge",
			fmt.Sprintf("addr add %v/%d brd + dev weave", at, c.PodCIDR.Bits()),
			"link set weave up",
			fmt.Sprintf("link add vxlan-6784 mtu 1376 type vxlan id 6784 dev eth0 local %v dstport 6784", n.Addr),
			"link set vxlan-6784 master weave",
			"link set vxlan-6784 up",
		}
		for j, other := range c.Nodes {
			if j != i {
				d.bridge = append(d.bridge, fmt.Sprintf("fdb append 00:00:00:00:00:00 dev vxlan-6784 dst %v self permanent", other.Addr))
			}
		}
		for _, p := range podsOn(c, n) {
			name := veth("vethwepl", p)
			d.ip = append(d.ip, toPod(name, p, 1376, fmt.Sprintf("link set %s master weave", name))...)
			d.bridge = append(d.bridge, fmt.Sprintf("link set dev %s hairpin on", name))
			d.pods[p] = bridgedPod(p, c.PodCIDR, at)
		}
		d.tables = fmt.Sprintf(`*nat
:WEAVE -
-A POSTROUTING -j WEAVE
-A WEAVE -s %[1]v -d 224.0.0.0/4 -j RETURN
-A WEAVE ! -s %[1]v -d %[1]v -j MASQUERADE
-A WEAVE -s %[1]v ! -d %[1]v -j MASQUERADE
COMMIT
*filter
:WEAVE-NPC -
:WEAVE-EXPOSE -
-A FORWARD -o weave -m comment --comment "NOTE: this must go before '-j KUBE-FORWARD'" -j WEAVE-NPC
-A FORWARD -i weave ! -o weave -j ACCEPT
-A FORWARD -o weave -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -o weave -j WEAVE-EXPOSE
-A WEAVE-EXPOSE -d %[1]v -j ACCEPT
-A WEAVE-NPC -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`, c.PodCIDR)
		return d
	},
}

// cilium imitates Cilium with tunnels, kube-proxy, and masquerading by iptables:
//   - a device lxc for each pod, which accepts only the pod's own address (bpf/bpf_lxc.c; here by a
//     netdev hook),
//   - cilium_host with the node's address in the pods' network, and cilium_vxlan on port 8472,
//   - CILIUM_POST_nat, which masquerades packets that leave the pods' networks by a device that is not
//     Cilium's (pkg/datapath/iptables/iptables.go).
//
// The shape cannot imitate eBPF host routing and masquerading in eBPF, because they bypass the
// host's tables.
var cilium = &shape{
	name:   "Cilium, tunnel",
	source: "cilium/cilium: pkg/datapath/iptables/iptables.go, bpf/bpf_lxc.c; docs.cilium.io, \"Routing\", \"Masquerading\"",
	form:   "a device for each pod that accepts only the address of the pod as source, cilium_host and VXLAN, CILIUM_POST_nat masquerades by destination; no eBPF",
	node: func(c *lab.Cluster, i int) nodeSetup {
		n := c.Nodes[i]
		at := func(i int) netip.Addr { return plus(c.Nodes[i].PodCIDR.Addr(), 200) } // address of cilium_host
		d := nodeSetup{pods: map[*lab.Pod][]string{}, later: map[string]string{}}
		d.settings = map[string]string{"ipv4/conf/all/rp_filter": "0", "ipv4/conf/default/rp_filter": "0"} // 99-zzz-override_cilium.conf
		d.ip = []string{
			"link add cilium_host mtu 1500 type veth peer name cilium_net mtu 1500",
			fmt.Sprintf("addr add %v/32 dev cilium_host", at(i)),
			"link set cilium_host up",
			"link set cilium_net up",
			fmt.Sprintf("link add cilium_vxlan address %s mtu 1450 type vxlan id 2 dev eth0 local %v dstport 8472 nolearning", mac(i), n.Addr),
			fmt.Sprintf("addr add %v/32 dev cilium_vxlan", at(i)), // gives cilium_vxlan a source for masquerading; Cilium uses the address of cilium_host for it
			"link set cilium_vxlan up",
		}
		for j, other := range c.Nodes {
			if j != i { // in Cilium, an eBPF program behind cilium_host does this
				d.ip = append(d.ip,
					fmt.Sprintf("neigh add %v lladdr %s dev cilium_vxlan nud permanent", at(j), mac(j)),
					fmt.Sprintf("route add %v via %v dev cilium_vxlan onlink src %v", other.PodCIDR, at(j), at(i)))
				d.bridge = append(d.bridge, fmt.Sprintf("fdb append %s dev cilium_vxlan dst %v self permanent", mac(j), other.Addr))
			}
		}
		for _, p := range podsOn(c, n) {
			name := veth("lxc", p)
			d.ip = append(d.ip, toPod(name, p, 1450, fmt.Sprintf("route add %v dev %s scope link", p.Addr, name))...)
			d.later["ipv4/conf/"+name+"/proxy_arp"] = "1"
			d.later["ipv4/neigh/"+name+"/proxy_delay"] = "0"
			d.pods[p] = []string{
				"link set eth0 up",
				fmt.Sprintf("addr add %v/32 dev eth0", p.Addr),
				fmt.Sprintf("route add %v dev eth0 scope link", at(i)),
				fmt.Sprintf("route add default via %v dev eth0", at(i)),
			}
			d.nft += fmt.Sprintf("table netdev %[1]s { chain from-container { type filter hook ingress device \"%[1]s\" priority 0; ip saddr != %[2]v drop; }\n}\n", name, p.Addr)
		}
		d.tables = fmt.Sprintf(`*nat
:CILIUM_POST_nat -
-I POSTROUTING -m comment --comment "cilium-feeder: CILIUM_POST_nat" -j CILIUM_POST_nat
-A CILIUM_POST_nat -s %[2]v ! -d %[2]v ! -o cilium_+ -m comment --comment "cilium masquerade non-cluster" -j MASQUERADE --random-fully
-A CILIUM_POST_nat -m mark --mark 0xa00/0xe00 -m comment --comment "exclude proxy return traffic from masquerade" -j ACCEPT
-A CILIUM_POST_nat ! -s %[3]v ! -d %[3]v -o cilium_vxlan -m comment --comment "cilium host->cluster masquerade" -j SNAT --to-source %[1]v
COMMIT
*filter
:CILIUM_FORWARD -
-I FORWARD -m comment --comment "cilium-feeder: CILIUM_FORWARD" -j CILIUM_FORWARD
-A CILIUM_FORWARD -o cilium_host -j ACCEPT
-A CILIUM_FORWARD -i cilium_host -j ACCEPT
-A CILIUM_FORWARD -i lxc+ -j ACCEPT
-A CILIUM_FORWARD -o lxc+ -j ACCEPT
-A CILIUM_FORWARD -i cilium_net -j ACCEPT
COMMIT
`, at(i), c.PodCIDR, n.PodCIDR)
		return d
	},
}

// ovnKubernetes imitates OVN-Kubernetes with local gateways. Pods are on a logical switch of the
// node. Packets that leave the cluster reach the host by ovn-k8s-mp0 and are masqueraded there. The
// host reaches all pods, of its own node and of others, through that device
// (ovn-org/ovn-kubernetes: go-controller/pkg/node, docs/design/local-gateway...).
//
// The shape does not use Open vSwitch. A namespace with a bridge, and with VXLAN instead of GENEVE,
// replaces the logical router and switches. ovn-k8s-mp0 is an internal port of Open vSwitch, a
// separate kind of device. Here it is a macvlan, which is enough, because its kind must only differ
// from that of pods' devices. The shape cannot imitate shared gateways, with which pods' packets
// never reach the host's tables.
var ovnKubernetes = &shape{
	name:   "OVN-Kubernetes, local gateways",
	source: "ovn-org/ovn-kubernetes: go-controller/pkg/node/management-port_linux.go, gateway_localnet.go; ovn-kubernetes.io, \"Gateway modes\"",
	form:   "pods behind a logical router, ovn-k8s-mp0 to it, its pods' packets that leave the cluster masqueraded on the host; no Open vSwitch",
	open:   true,
	node: func(c *lab.Cluster, i int) nodeSetup {
		n := c.Nodes[i]
		gateway, port := plus(n.PodCIDR.Addr(), 1), plus(n.PodCIDR.Addr(), 2) // addresses of the router, and of ovn-k8s-mp0
		join := func(i int) netip.Addr { return plus(netip.MustParseAddr("100.88.0.1"), i) }
		d := nodeSetup{pods: map[*lab.Pod][]string{}, router: n.Netns() + "-ovn"}
		d.before = []string{ // the socket of the tunnel stays in the node's namespace when the device moves
			"netns add " + d.router,
			fmt.Sprintf("link add genev_sys_6081 address %s mtu 1400 type vxlan id 0x10 dev eth0 local %v dstport 6081 nolearning", mac(i), n.Addr),
			"link set genev_sys_6081 netns " + d.router,
		}
		d.ip = []string{
			fmt.Sprintf("addr add %v/%d dev ovn-k8s-mp0", port, n.PodCIDR.Bits()),
			"link set ovn-k8s-mp0 up",
			fmt.Sprintf("route add %v via %v dev ovn-k8s-mp0", c.PodCIDR, gateway),
		}
		d.inRouter = []string{
			"link set lo up", "link set genev_sys_6081 up",
			"link add mp0 mtu 1400 type veth peer name mp0up mtu 1400", "link set mp0 up", "link set mp0up up",
			"link add link mp0up name ovn-k8s-mp0 netns " + n.Netns() + " type macvlan mode passthru",
			"link add switch mtu 1400 type bridge", "link set switch up", "link set mp0 master switch",
			fmt.Sprintf("addr add %v/%d dev switch", gateway, n.PodCIDR.Bits()),
			fmt.Sprintf("addr add %v/24 dev genev_sys_6081", join(i)),
			fmt.Sprintf("route add default via %v", port),
		}
		for j, other := range c.Nodes {
			if j != i {
				d.inRouter = append(d.inRouter,
					fmt.Sprintf("neigh add %v lladdr %s dev genev_sys_6081 nud permanent", join(j), mac(j)),
					fmt.Sprintf("route add %v via %v", other.PodCIDR, join(j)))
				d.bridgeInRouter = append(d.bridgeInRouter, fmt.Sprintf("fdb append %s dev genev_sys_6081 dst %v self permanent", mac(j), other.Addr))
			}
		}
		for _, p := range podsOn(c, n) {
			name := veth("ovn", p)
			d.inRouter = append(d.inRouter, toPod(name, p, 1400, fmt.Sprintf("link set %s master switch", name))...)
			d.pods[p] = bridgedPod(p, n.PodCIDR, gateway)
		}
		d.tables = fmt.Sprintf(`*nat
-A POSTROUTING -s %v -j MASQUERADE
COMMIT
*filter
-A FORWARD -i ovn-k8s-mp0 -m comment --comment "from OVN to localhost" -j ACCEPT
-A FORWARD -o ovn-k8s-mp0 -m comment --comment "from localhost to OVN" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`, n.PodCIDR)
		return d
	},
}
