package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// nodeIntent returns an intent with three nodes of cluster A. The gateway is on n1, and the
// networks of peer B are 10.246.0.0/16 and 10.247.0.0/16.
func nodeIntent(t testing.TB, self string) NodeIntent {
	node := func(name, addr, pods string) ClusterNode {
		return ClusterNode{Name: name, Addrs: []netip.Addr{ip(addr)}, PodCIDRs: []netip.Prefix{pfx(pods)}, Created: 1}
	}
	return NodeIntent{
		Self:        self,
		UnderlayMTU: 1400,
		Nodes:       []ClusterNode{node("n1", "172.30.1.11", "10.244.1.0/24"), node("n2", "172.30.1.12", "10.244.2.0/24"), node("n3", "172.30.1.13", "10.244.3.0/24")},
		Pods: []NodePod{
			{Addr: ip("10.244.1.5"), Node: "n1", Created: 1}, {Addr: ip("10.244.2.5"), Node: "n2", Created: 1}, {Addr: ip("10.244.3.5"), Node: "n3", Created: 1},
			{Addr: ip("10.244.77.7"), Node: "n3", Created: 1},   // outside of all nodes' networks
			{Addr: ip("10.244.2.99"), Node: "n3", Created: 1},   // in the network of another node
			{Addr: ip("10.244.3.99"), Node: "n1", Created: 1},   // on the gateway's node, but in the network of another node
			{Addr: ip("10.244.99.1"), Node: "n1", Created: 1},   // on the gateway's node, outside of all nodes' networks
			{Addr: ip("172.30.1.12"), Node: "n2", Created: 1},   // a node's address
			{Addr: ip("10.244.98.1"), Node: "", Created: 1},     // not scheduled yet
			{Addr: ip("10.244.97.1"), Node: "n9", Created: 1},   // on a deleted node
			{Addr: ip("fd00::5"), Node: "n2", Created: 1},       // IPv6
			{Addr: ip("10.244.96.1"), Node: "n2", Created: 100}, // reuses the address of a deleted pod on n3
			{Addr: ip("10.244.96.1"), Node: "n3", Created: 99},
		},
		Tunnels: []Tunnel{{peer(t, idB, nil), ip("172.30.1.11")}},
	}
}

const overlayOnN1 = `ip link add isthmus.vxlan type vxlan id 4200 local 172.30.1.11 dstport 4800 nolearning noudpcsum
sysctl -w net/ipv4/conf/isthmus.vxlan/forwarding=1
sysctl -w net/ipv4/conf/isthmus.vxlan/rp_filter=2
ip link set isthmus.vxlan address 66:41:a8:85:d7:fe mtu 1350 up
ip addr replace 240.30.1.11/8 dev isthmus.vxlan noprefixroute
bridge fdb replace 66:63:0d:94:68:4e dev isthmus.vxlan dst 172.30.1.12 self permanent
bridge fdb replace 66:98:5d:57:51:75 dev isthmus.vxlan dst 172.30.1.13 self permanent
ip neigh replace 240.30.1.12 lladdr 66:63:0d:94:68:4e dev isthmus.vxlan nud permanent
ip neigh replace 240.30.1.13 lladdr 66:98:5d:57:51:75 dev isthmus.vxlan nud permanent
ip route replace 240.0.0.0/8 dev isthmus.vxlan proto 72
`

func TestNodeWithTheGatewayRoutesRemoteSourcesThroughTheOverlay(t *testing.T) {
	n, problems := NodeFor(nodeIntent(t, "n1"))
	wantTexts(t, problems)
	n.Filters, n.SourceNAT, n.Accepts = nil, nil, nil
	const want = overlayOnN1 + `ip route replace unreachable 10.244.0.0/16 table 4201 metric 420000 proto 72
ip route replace throw 10.244.1.0/24 table 4201 proto 72
ip route replace 10.244.2.0/24 via 240.30.1.12 dev isthmus.vxlan onlink table 4201 proto 72
ip route replace unreachable 10.244.2.0/24 table 4201 metric 420000 proto 72
ip route replace 10.244.2.99/32 via 240.30.1.13 dev isthmus.vxlan onlink table 4201 proto 72
ip route replace 10.244.3.0/24 via 240.30.1.13 dev isthmus.vxlan onlink table 4201 proto 72
ip route replace unreachable 10.244.3.0/24 table 4201 metric 420000 proto 72
ip route replace throw 10.244.3.99/32 table 4201 proto 72
ip route replace 10.244.77.7/32 via 240.30.1.13 dev isthmus.vxlan onlink table 4201 proto 72
ip route replace 10.244.96.1/32 via 240.30.1.12 dev isthmus.vxlan onlink table 4201 proto 72
ip route replace throw 10.244.99.1/32 table 4201 proto 72
ip route replace 172.30.1.12/32 via 240.30.1.12 dev isthmus.vxlan onlink table 4201 proto 72
ip route replace 172.30.1.13/32 via 240.30.1.13 dev isthmus.vxlan onlink table 4201 proto 72
ip route replace unreachable 10.246.0.0/16 table 4202 metric 420000 proto 72
ip route replace unreachable 10.247.0.0/16 table 4202 metric 420000 proto 72
ip route replace unreachable 0.0.0.0/0 table 4203 metric 420000 proto 72
ip rule add priority 418 iif isthmus.vxlan lookup 4200 protocol 72
ip rule add priority 419 from 10.246.0.0/16 lookup 4201 protocol 72
ip rule add priority 419 from 10.247.0.0/16 lookup 4201 protocol 72
ip rule add priority 422 lookup 4202 protocol 72
`
	if got := n.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestNodeWithoutTheGatewayRoutesRemoteNetworksThroughTheOverlay(t *testing.T) {
	n, problems := NodeFor(nodeIntent(t, "n2"))
	wantTexts(t, problems)
	const want = `ip route replace 10.246.0.0/16 via 240.30.1.11 dev isthmus.vxlan onlink src 172.30.1.12 table 4201 proto 72
ip route replace unreachable 10.246.0.0/16 table 4201 metric 420000 proto 72
ip route replace 10.247.0.0/16 via 240.30.1.11 dev isthmus.vxlan onlink src 172.30.1.12 table 4201 proto 72
ip route replace unreachable 10.247.0.0/16 table 4201 metric 420000 proto 72
ip route replace unreachable 10.246.0.0/16 table 4202 metric 420000 proto 72
ip route replace unreachable 10.247.0.0/16 table 4202 metric 420000 proto 72
ip route replace unreachable 0.0.0.0/0 table 4203 metric 420000 proto 72
ip rule add priority 418 iif isthmus.vxlan lookup 4200 protocol 72
ip rule add priority 419 to 10.246.0.0/16 lookup 4201 protocol 72
ip rule add priority 419 to 10.247.0.0/16 lookup 4201 protocol 72
ip rule add priority 421 iif isthmus.host lookup 4203 protocol 72
ip rule add priority 422 lookup 4202 protocol 72
`
	if got := n.String(); !strings.HasSuffix(got, "proto 72\n"+want) {
		t.Errorf("got\n%s\nwant at the end\n%s", got, want)
	}
}

func TestNodeRefusesPeerNetworksUntilThereIsAGateway(t *testing.T) {
	in := nodeIntent(t, "n1")
	in.Tunnels[0].Gateway = netip.Addr{}
	n, problems := NodeFor(in)
	wantTexts(t, problems)
	n.Filters, n.SourceNAT, n.Accepts = nil, nil, nil
	const want = overlayOnN1 + `ip route replace unreachable 10.246.0.0/16 table 4202 metric 420000 proto 72
ip route replace unreachable 10.247.0.0/16 table 4202 metric 420000 proto 72
ip route replace unreachable 0.0.0.0/0 table 4203 metric 420000 proto 72
ip rule add priority 418 iif isthmus.vxlan lookup 4200 protocol 72
ip rule add priority 421 iif isthmus.host lookup 4203 protocol 72
ip rule add priority 422 lookup 4202 protocol 72
`
	if got := n.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// Pods of the node keep their addresses towards peers. The state lists the node's podCIDRs if its
// pods are inside them, and otherwise the address of each pod.
func TestNodeKeepsPodAddressesTowardsPeers(t *testing.T) {
	in := nodeIntent(t, "n2")
	in.UnderlayDevices = []string{"eth1"}
	n, _ := NodeFor(in)
	want := kernel.SourceNAT{Local: "10.244.2.5/32 10.244.96.1/32", Pods: "10.244.0.0/16", Remote: "10.246.0.0/16 10.247.0.0/16", Underlay: "eth1", Self: ip("172.30.1.12")}
	if len(n.SourceNAT) != 1 || n.SourceNAT[0] != want {
		t.Errorf("%+v, want %+v", n.SourceNAT, want)
	}
	in.Pods = in.Pods[:3]
	in.Nodes[1].PodCIDRs = append(in.Nodes[1].PodCIDRs, pfx("10.9.2.0/24"), pfx("fd00:2::/64")) // in addition to the PodCIDR that peers know
	n, _ = NodeFor(in)
	want.Local, want.Pods = "10.9.2.0/24 10.244.2.0/24", "10.9.2.0/24 10.244.0.0/16"
	if len(n.SourceNAT) != 1 || n.SourceNAT[0] != want {
		t.Errorf("%+v, want %+v", n.SourceNAT, want)
	}
	in.Nodes[1].Addrs = nil // without an overlay no packet leaves for a peer
	if n, _ = NodeFor(in); len(n.SourceNAT) != 0 {
		t.Errorf("without an overlay %+v", n.SourceNAT)
	}
}

func TestPodsOutsideThePodCIDRAreReported(t *testing.T) {
	in := nodeIntent(t, "n2")
	in.Pods = append(in.Pods, NodePod{Name: "default/web", Addr: ip("192.168.7.9"), Node: "n2"}, NodePod{Name: "default/a", Addr: ip("192.168.7.8"), Node: "n2"},
		NodePod{Name: "default/other", Addr: ip("192.168.7.7"), Node: "n3"}) // a pod of another node, whose own agent reports it
	_, problems := NodeFor(in)
	if len(problems) != 1 || problems[0].Origin.Name != "n2" || !strings.Contains(problems[0].Message, "outside 10.244.0.0/16") || !strings.Contains(problems[0].Message, "default/a with 192.168.7.8") {
		t.Errorf("%v", problems)
	}
	in.Tunnels = nil
	if _, problems = NodeFor(in); len(problems) > 0 {
		t.Errorf("without peers: %v", problems)
	}
}

func TestRemotePodAddrIsOutsideOurNodesPodCIDRs(t *testing.T) {
	in := podIntent(t, "n1")
	in.OwnPods = []netip.Prefix{pfx("fd00::/48"), pfx("10.244.0.0/16")}
	if got := in.RemotePodAddr(); got != ip("10.244.0.254") {
		t.Errorf("%v", got)
	}
	in.Nodes[0].PodCIDRs = []netip.Prefix{pfx("10.0.0.0/8")}
	if got := in.RemotePodAddr(); got.IsValid() {
		t.Errorf("%v although all pods are here", got)
	}
	in.OnlyPods, in.Nodes[0].PodCIDRs = false, nil
	if got := in.RemotePodAddr(); got.IsValid() {
		t.Errorf("%v although the gateway is no Pod", got)
	}
}

func TestCarriersReturnsTheDestinationsOfOuterPackets(t *testing.T) {
	for _, tc := range []struct {
		in           NodeIntent
		outer, nodes string
	}{
		{nodeIntent(t, "n1"), "[172.30.1.12 172.30.1.13]", "[172.30.1.12 172.30.1.13]"}, // the gateway's node
		{nodeIntent(t, "n2"), "[172.30.1.11]", "[172.30.1.11]"},
		{podIntent(t, "n1"), "[10.244.1.254]", "[172.30.1.12]"},
		{podIntent(t, "n2"), "[10.244.1.254]", "[172.30.1.11]"},
		{podIntent(t, "n3"), "[10.244.1.254]", "[172.30.1.11 172.30.1.12]"},
		{NodeIntent{Self: "nobody"}, "[]", "[]"},
	} {
		outer, nodes := tc.in.Carriers()
		if fmt.Sprint(outer) != tc.outer || fmt.Sprint(nodes) != tc.nodes {
			t.Errorf("%s: %v and %v, want %s and %s", tc.in.Self, outer, nodes, tc.outer, tc.nodes)
		}
	}
}

// A gateway delivers packets from a peer before the agent knows that the gateway is on its node.
func TestNodeRefusesTrafficFromALocalGatewayNotYetKnown(t *testing.T) {
	guards := func(in NodeIntent) (all []string) {
		n, _ := NodeFor(in)
		for _, r := range n.Rules {
			if r.Table == kernel.GuardTable {
				if r.Iif != kernel.VethHost || r.Priority <= kernel.NodeRulePriority {
					t.Errorf("%+v", r)
				}
				all = append(all, fmt.Sprint(r.V6, " ", r.From))
			}
		}
		if !slices.ContainsFunc(n.Routes, func(r kernel.Route) bool {
			return r.Table == kernel.GuardTable && r.Prefix.Bits() == 0 && r.Type == kernel.Unreachable
		}) {
			t.Error("nothing is refused by the table")
		}
		return all
	}
	in := nodeIntent(t, "n1") // the gateway's node
	in.Allocated = []netip.Prefix{pfx("10.80.0.0/20"), pfx("fd80::/64")}
	if got := guards(in); !slices.Equal(got, []string{"false 10.80.0.0/20", "true fd80::/64"}) {
		t.Errorf("with the gateway of another peer here: %v", got)
	}
	in.Self = "n2"
	if got := guards(in); !slices.Equal(got, []string{"false invalid Prefix", "true invalid Prefix"}) {
		t.Errorf("without a gateway: %v", got)
	}
}

// refuses is a slow and obvious evaluation of rules and tables for a packet from a pod of the node.
func refuses(n kernel.State, to netip.Addr) bool {
	for _, rule := range n.Rules {
		if rule.V6 != to.Is6() || rule.Iif != "" || rule.From.IsValid() || rule.To.IsValid() && !rule.To.Contains(to) {
			continue
		}
		best := kernel.Route{}
		for _, r := range n.Routes {
			if r.Table == rule.Table && r.Prefix.Contains(to) && (!best.Prefix.IsValid() || r.Prefix.Bits() > best.Prefix.Bits() ||
				r.Prefix.Bits() == best.Prefix.Bits() && r.Metric < best.Metric) {
				best = r
			}
		}
		if best.Prefix.IsValid() && best.Type != kernel.Throw {
			return best.Type == kernel.Unreachable || best.Dev == kernel.OverlayDevice
		}
	}
	return false
}

// No input other than the NetworkAllocations can make packets for an allocated network leave by the
// default route.
func TestPacketsForAllocatedNetworksNeverLeaveInTheClear(t *testing.T) {
	allocated := []netip.Prefix{pfx("10.246.0.0/16"), pfx("10.247.0.0/16"), pfx("10.99.0.0/20"), pfx("fd00:246::/48")}
	for name, change := range map[string]func(*NodeIntent){
		"valid intent":               func(*NodeIntent) {},
		"no TunnelEndpoint":          func(in *NodeIntent) { in.Tunnels = nil },
		"no gateway":                 func(in *NodeIntent) { in.Tunnels[0].Gateway = netip.Addr{} },
		"an unknown gateway address": func(in *NodeIntent) { in.Tunnels[0].Gateway = ip("192.0.2.9") },
		"no Nodes":                   func(in *NodeIntent) { in.Nodes = nil },
		"no other Nodes":             func(in *NodeIntent) { in.Nodes = in.Nodes[1:2] },
		"no Pods":                    func(in *NodeIntent) { in.Pods = nil },
		"a node has a second address in the peer's network":       func(in *NodeIntent) { in.Nodes[2].Addrs = append(in.Nodes[2].Addrs, ip("10.246.0.9")) },
		"a node's only address is in the peer's network":          func(in *NodeIntent) { in.Nodes[2].Addrs = []netip.Addr{ip("10.246.0.9")} },
		"the gateway's node has an address in the peer's network": func(in *NodeIntent) { in.Nodes[0].Addrs = []netip.Addr{ip("10.247.0.9")} },
		"a node's podCIDR is the peer's network":                  func(in *NodeIntent) { in.Nodes[2].PodCIDRs = []netip.Prefix{pfx("10.246.0.0/16")} },
		"a pod has an address in the peer's network": func(in *NodeIntent) {
			in.Pods = append(in.Pods, NodePod{Addr: ip("10.246.0.9"), Node: "n3", Created: 9})
		},
		"two peers have the same networks":    func(in *NodeIntent) { in.Tunnels = append(in.Tunnels, in.Tunnels[0]) },
		"our node has no address":             func(in *NodeIntent) { in.Nodes[1].Addrs = nil },
		"the peer's network is the overlay's": func(in *NodeIntent) { in.Tunnels[0].Peer.Remote.PodSeen = pfx("240.0.0.0/8") },
	} {
		in := nodeIntent(t, "n2")
		in.Allocated = allocated
		change(&in)
		n, _ := NodeFor(in)
		for _, to := range []string{"10.246.0.9", "10.247.255.255", "10.99.1.1", "fd00:246::9"} {
			if !refuses(n, ip(to)) {
				t.Errorf("%s: %s leaves\n%s", name, to, n)
			}
		}
		if refuses(n, ip("192.0.2.1")) || refuses(n, ip("10.244.2.5")) {
			t.Errorf("%s: refuses packets that are not for a peer\n%s", name, n)
		}
	}
}

// Any missing part of the path to a gateway makes the node refuse the traffic for the peer.
func TestNodeRefusesTrafficWithoutARouteToTheGateway(t *testing.T) {
	for name, tc := range map[string]struct {
		change   func(*NodeIntent)
		problems []string
	}{
		"the gateway's node is gone": {
			func(in *NodeIntent) { in.Nodes = in.Nodes[1:] },
			[]string{"TunnelEndpoint tenant/b: status.gatewayIP: 172.30.1.11 is not the InternalIP of a node; want that of the node with the active gateway"},
		},
		"the gateway's node has no IPv4": {
			func(in *NodeIntent) {
				in.Nodes[0].Addrs = []netip.Addr{ip("fd00::11")}
				in.Tunnels[0].Gateway = ip("fd00::11")
			},
			[]string{"Node n1: status.addresses: has no IPv4 InternalIP; want one, because the overlay between nodes runs over IPv4"},
		},
		"our node has no IPv4": {
			func(in *NodeIntent) { in.Nodes[1].Addrs = nil },
			[]string{"Node n2: status.addresses: has no IPv4 InternalIP; want one, because the overlay between nodes runs over IPv4"},
		},
		"our node has the overlay address of an older node": {
			func(in *NodeIntent) { in.Nodes[1].Addrs, in.Nodes[1].Created = []netip.Addr{ip("10.30.1.13")}, 2 },
			[]string{"Node n2: status.addresses: 10.30.1.13 and 172.30.1.13 of Node n3 map to the same overlay address, 240.30.1.13; want addresses that differ in the last three octets"},
		},
		"our node cannot have an overlay address": {
			func(in *NodeIntent) { in.Nodes[1].Addrs = []netip.Addr{ip("11.0.0.0")} },
			[]string{"Node n2: status.addresses: 11.0.0.0 maps to the overlay address 240.0.0.0, which is not a valid address of a host; want another InternalIP"},
		},
	} {
		in := nodeIntent(t, "n2")
		tc.change(&in)
		n, problems := NodeFor(in)
		if got := texts(problems); !slices.Equal(got, tc.problems) {
			t.Errorf("%s: problems %q", name, got)
		}
		const refused = "ip route replace unreachable 10.246.0.0/16 table 4201"
		if s := n.String(); !strings.Contains(s, refused) || strings.Contains(s, "10.246.0.0/16 via") || !strings.Contains(s, "to 10.246.0.0/16 lookup 4201") {
			t.Errorf("%s:\n%s", name, s)
		}
	}
}

func TestNodeReportsAndLeavesOutPeersThatTheOverlayCannotCarry(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*NodeIntent)
		want   string
	}{
		"a remote network inside the overlay's network": {
			func(in *NodeIntent) {
				in.Tunnels[0].Peer.Remote.External, in.Tunnels[0].Peer.Remote.ExternalSeen = pfx("240.9.0.0/16"), pfx("240.9.0.0/16")
			},
			"TunnelEndpoint tenant/b: spec.remoteExternalCIDR: 240.9.0.0/16 overlaps 240.0.0.0/8, the overlay between the nodes; want a network outside",
		},
		"a second peer with the networks of the first": {
			func(in *NodeIntent) {
				in.Tunnels = append(in.Tunnels, in.Tunnels[0])
				in.Tunnels[0].Peer = peer(t, idC, func(p *Peer) { remotes("10.246.0.0/16", "10.249.0.0/16")(p); p.Created = 2 })
				in.Tunnels[1].Peer.Created = 1
			},
			"TunnelEndpoint tenant/c: spec.remoteNATPodCIDR: 10.246.0.0/16 overlaps 10.246.0.0/16 of cluster \"" + idB +
				"\" (TunnelEndpoint tenant/b: spec.remoteNATPodCIDR); want a network that no other peer has here",
		},
	} {
		in := nodeIntent(t, "n2")
		tc.change(&in)
		n, problems := NodeFor(in)
		if got := texts(problems); !slices.Equal(got, []string{tc.want}) {
			t.Errorf("%s: problems\n%q\nwant\n%q", name, got, tc.want)
		}
		to := 0
		for _, r := range n.Rules {
			if r.To.IsValid() {
				to++
			}
		}
		if want := 2 * (len(in.Tunnels) - 1); to != want {
			t.Errorf("%s: %d rules to remote networks, want %d\n%s", name, to, want, n)
		}
	}
}

// If pods have addresses of their nodes' networks, a Pod with an address of another node's network
// is ignored, and no pod can send to peers with the address of a pod on another node. The Pods of
// one node cannot disable this check.
func TestNodeTrustsOnlyPodAddressesOfTheirNode(t *testing.T) {
	in := nodeIntent(t, "n1")
	in.Pods = []NodePod{
		{Name: "default/one", Addr: ip("10.244.1.5"), Node: "n1", Created: 1}, {Name: "default/two", Addr: ip("10.244.2.5"), Node: "n2", Created: 1},
		{Name: "default/thief", Addr: ip("10.244.2.5"), Node: "n3", Created: 9}, // younger than the pod whose address it has
	}
	n, problems := NodeFor(in)
	wantTexts(t, problems, "Pod default/thief: status.podIPs: is 10.244.2.5 on Node n3, but that address is in the podCIDRs of Node n2, so it is ignored; want an address of its own Node")
	for _, r := range n.Routes {
		if r.Prefix == pfx("10.244.2.5/32") {
			t.Errorf("%+v", r)
		}
	}
	if f := n.Filters[0]; f.Elsewhere != "10.244.2.0/24 10.244.3.0/24" {
		t.Errorf("%+v", f)
	}

	// podCIDRs are ignored if pods of our own node, or of most nodes, have addresses outside of
	// them.
	in.Pods[0].Addr = ip("10.244.3.77")
	n, problems = NodeFor(in)
	wantTexts(t, problems)
	if f := n.Filters[0]; f.Elsewhere != "" || !slices.ContainsFunc(n.Routes, func(r kernel.Route) bool { return r.Prefix == pfx("10.244.2.5/32") }) {
		t.Errorf("%+v, %v", f, n.Routes)
	}
	in.Pods[0].Addr, in.Pods[1].Addr = ip("10.244.1.5"), ip("10.244.3.6")
	n, problems = NodeFor(in)
	wantTexts(t, problems)
	if f := n.Filters[0]; f.Elsewhere != "" {
		t.Errorf("%+v", f)
	}
}

func TestNodeTrustsOnlyOverlayPacketsOfOtherNodes(t *testing.T) {
	in := nodeIntent(t, "n1")
	in.Nodes[0].Addrs = append(in.Nodes[0].Addrs, ip("10.244.9.9"), ip("192.0.2.7"), ip("fd00::11")) // the first is in a pod network
	in.Nodes[2].Addrs = append(in.Nodes[2].Addrs, ip("192.0.2.9"))                                   // the overlay uses only a node's first address
	in.Nodes = append(in.Nodes, ClusterNode{Name: "n4", Addrs: []netip.Addr{ip("10.246.0.9")}})      // in the peer's network
	in.Allocated = []netip.Prefix{pfx("10.99.0.0/16"), pfx("10.246.8.0/24"), pfx("fd00:246::/48")}
	in.UnderlayDevices = []string{"eth0"}
	n, _ := NodeFor(in)
	want := kernel.Filter{Nodes: "172.30.1.12 172.30.1.13", Own: "172.30.1.11 192.0.2.7", Pods: "10.244.0.0/16", Underlay: "eth0",
		Remote: kernel.Remote{Networks: "10.99.0.0/16 10.246.0.0/16 10.247.0.0/16", Networks6: "fd00:246::/48", Around: "10.99.0.0 10.246.0.0 10.247.0.0"}}
	if len(n.Filters) != 1 || n.Filters[0] != want {
		t.Errorf("%+v, want %+v", n.Filters, want)
	}
}

// Write access to the status of one Node must not divert packets of other nodes around the tunnel.
func TestNodeRefusesANodeAddressInsideAPeersNetwork(t *testing.T) {
	in := nodeIntent(t, "n2")
	in.Nodes[2].Addrs = []netip.Addr{ip("10.246.0.9"), ip("172.30.1.13")}
	n, problems := NodeFor(in)
	wantTexts(t, problems, "Node n3: status.addresses: 10.246.0.9 is in 10.246.0.0/16, a network of a peer; want an address outside")
	want, _ := NodeFor(nodeIntent(t, "n2"))
	if n.String() != want.String() {
		t.Errorf("got\n%s\nwant\n%s", n, want)
	}
}

func TestNodeReportsOverlappingPodCIDRsOfTwoNodes(t *testing.T) {
	in := nodeIntent(t, "n1")
	in.Nodes[2].PodCIDRs = []netip.Prefix{pfx("10.244.2.0/25")}
	n, problems := NodeFor(in)
	wantTexts(t, problems, "Node n3: spec.podCIDRs: 10.244.2.0/25 overlaps a network of Node n2; want networks that do not overlap")
	for _, want := range []string{"10.244.2.0/24 via 240.30.1.12", "10.244.3.5/32 via 240.30.1.13", "10.244.2.99/32 via 240.30.1.13"} {
		if !strings.Contains(n.String(), want) {
			t.Errorf("no %s in\n%s", want, n)
		}
	}
}

func TestNodeWithoutANodeObjectRefusesPeerTraffic(t *testing.T) {
	n, problems := NodeFor(nodeIntent(t, "n7"))
	wantTexts(t, problems, "Node n7: does not exist; want the name of the Node on which the agent runs")
	if got, want := n.String(), RefusingState([]netip.Prefix{pfx("10.246.0.0/16"), pfx("10.247.0.0/16")}).String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestNodeDoesNotDependOnTheOrderOfItsInput(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, self := range []string{"n1", "n2"} {
		in := nodeIntent(t, self)
		in.Nodes = append(in.Nodes, ClusterNode{Name: "n4", Addrs: []netip.Addr{ip("10.30.1.13")}, Created: 7, PodCIDRs: []netip.Prefix{pfx("10.244.0.0/22")}})
		in.Tunnels = append(in.Tunnels, Tunnel{peer(t, idC, remotes("10.248.0.0/16", "10.249.0.0/16")), ip("172.30.1.12")})
		want, wantProblems := NodeFor(in)
		for range 50 {
			rng.Shuffle(len(in.Nodes), func(i, j int) { in.Nodes[i], in.Nodes[j] = in.Nodes[j], in.Nodes[i] })
			rng.Shuffle(len(in.Pods), func(i, j int) { in.Pods[i], in.Pods[j] = in.Pods[j], in.Pods[i] })
			rng.Shuffle(len(in.Tunnels), func(i, j int) { in.Tunnels[i], in.Tunnels[j] = in.Tunnels[j], in.Tunnels[i] })
			if got, problems := NodeFor(in); !reflect.DeepEqual(got, want) || !reflect.DeepEqual(problems, wantProblems) {
				t.Fatalf("%v\n%v\nwant\n%v\n%v", got, problems, want, wantProblems)
			}
		}
	}
}

// Packets to a pod and the pod's answers take the same path for all kinds of node networks.
func TestGatewayNodeRoutesEachPodToThePodsNode(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	names := []string{"n1", "n2", "n3"}
	for range 2000 {
		in := nodeIntent(t, "n1")
		for i := range in.Nodes {
			in.Nodes[i].PodCIDRs = nil
			if rng.IntN(4) > 0 {
				in.Nodes[i].PodCIDRs = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(rng.IntN(4)), 0}), 22+rng.IntN(4)).Masked()}
			}
		}
		in.Pods = nil
		for i := range rng.IntN(12) {
			in.Pods = append(in.Pods, NodePod{
				Name: fmt.Sprintf("default/p%d", i), Addr: netip.AddrFrom4([4]byte{10, 244, byte(rng.IntN(4)), byte(i)}), Node: names[rng.IntN(3)], Created: 1})
		}
		n, problems := NodeFor(in)
		for _, p := range in.Pods {
			if slices.ContainsFunc(problems, func(q Problem) bool { return q.Origin.Kind == "Pod" && q.Origin.Namespace+"/"+q.Origin.Name == p.Name }) {
				for _, node := range in.Nodes { // a Pod may be ignored only if its address is in another node's podCIDRs
					if inside := slices.ContainsFunc(node.PodCIDRs, func(c netip.Prefix) bool { return c.Contains(p.Addr) }); node.Name == p.Node && inside || p.Node == "n1" {
						t.Fatalf("pod %v on %s is ignored: %v", p.Addr, p.Node, in.Nodes)
					}
				}
				continue
			}
			best, found := kernel.Route{}, false // slow and obvious longest-prefix match
			for _, r := range n.Routes {
				if r.Table == kernel.NodeTable && r.Metric == 0 && r.Prefix.Contains(p.Addr) && (!found || r.Prefix.Bits() > best.Prefix.Bits()) {
					best, found = r, true
				}
			}
			leaves := found && best.Type == kernel.Unicast
			if leaves != (p.Node != "n1") || leaves && best.Via != map[string]netip.Addr{"n2": ip("240.30.1.12"), "n3": ip("240.30.1.13")}[p.Node] {
				t.Fatalf("pod %v on %s: %+v\nnodes %v\n%s", p.Addr, p.Node, best, in.Nodes, n)
			}
		}
	}
}

// A packet of a peer to an unused address of the PodCIDR does not leave by the default route. If
// nodes have addresses in pod networks, the packet goes through the overlay, where the node's
// filter checks it.
func TestNodeWithTheGatewayRefusesUnusedClusterAddresses(t *testing.T) {
	in := nodeIntent(t, "n1")
	among := ip("10.244.96.77")
	in.Nodes[2].Addrs = append(in.Nodes[2].Addrs, among)
	own := NodePod{Addr: ip("10.244.50.5"), Node: "n1", Created: 1} // a pod of a CNI that ignores podCIDRs
	in.Pods = append(in.Pods, own)
	n, _ := NodeFor(in)
	for addr, want := range map[netip.Addr]kernel.Route{
		ip("10.244.200.9"): {Type: kernel.Unreachable},
		ip("10.244.1.200"): {Type: kernel.Throw},
		own.Addr:           {Type: kernel.Throw},
		among:              {Via: ip("240.30.1.13")},
	} {
		var best kernel.Route
		for _, r := range n.Routes {
			if r.Table == kernel.NodeTable && r.Prefix.Contains(addr) && (!best.Prefix.IsValid() || r.Prefix.Bits() > best.Prefix.Bits() ||
				r.Prefix.Bits() == best.Prefix.Bits() && r.Metric < best.Metric) {
				best = r
			}
		}
		if best.Type != want.Type || best.Via != want.Via {
			t.Errorf("%v: %+v; want %+v", addr, best, want)
		}
	}
}

func TestTunnelFromRefusesAnInvalidGatewayAddress(t *testing.T) {
	te := endpointB()
	te.Status.GatewayIP = "172.30.1.11"
	got, problems := TunnelFrom(te, Origin{Kind: "TunnelEndpoint", Name: "b"})
	wantTexts(t, problems)
	if got.Gateway != ip("172.30.1.11") || got.Peer.ID != idB {
		t.Error(got)
	}
	for _, bad := range []string{"gateway", "0.0.0.0", "fe80::1%eth0", "::ffff:10.0.0.1"} {
		te.Status.GatewayIP = bad
		got, problems := TunnelFrom(te, Origin{Kind: "TunnelEndpoint", Name: "b"})
		wantTexts(t, problems, `TunnelEndpoint b: status.gatewayIP: "`+bad+`" is not an address; want that of the active gateway`)
		if !reflect.DeepEqual(got, Tunnel{}) {
			t.Error(got)
		}
	}
}

func TestOverlayMACIsALocalUnicastAddress(t *testing.T) {
	for _, name := range []string{"", "n1", "node-with-a-long-name.example.com"} {
		if m := OverlayMAC(name); m[0]&1 != 0 || m[0]&2 == 0 {
			t.Errorf("%s: %v", name, m)
		}
	}
}

// The overlay MTU is never smaller than the MTU that a WireGuard tunnel over the same underlay
// needs.
func TestOverlayMTUFitsPacketsOfTheTunnel(t *testing.T) {
	for underlay, want := range map[int]int{0: 1450, 1500: 1450, 1400: 1350, 9001: 8951, 65536: 65485, 500: 576} {
		in := nodeIntent(t, "n1")
		in.UnderlayMTU = underlay
		n, _ := NodeFor(in)
		if got := n.Links[0].MTU; got != want {
			t.Errorf("underlay %d: %d, want %d", underlay, got, want)
		}
	}
}

func TestPrefixesWithHostBitsAreNotInOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	all := []netip.Prefix{{}, netip.PrefixFrom(netip.IPv4Unspecified(), 40)}
	for range 10_000 {
		addr := netip.AddrFrom4([4]byte{byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32() & 0xf0), byte(rng.IntN(2) << 7)})
		all = append(all, netip.PrefixFrom(addr, rng.IntN(33)), netip.PrefixFrom(netip.AddrFrom16(netip.MustParseAddr("fd00::").As16()), rng.IntN(129)), netip.PrefixFrom(addr, 33))
	}
	for _, p := range all {
		if got := inOrder([]netip.Prefix{p}); got != (p == p.Masked()) {
			t.Errorf("%v: %v", p, got)
		}
	}
}

func TestGatewayNodeRoutesEndpointsViaTheirNodeThroughTheOverlay(t *testing.T) {
	for self, want := range map[string]bool{"n1": true, "n2": false} { // the gateway is on n1
		in := nodeIntent(t, self)
		before, _ := NodeFor(in)
		in.Routes = []NodeRoute{{pfx("198.18.7.0/24"), ip("172.30.1.13")}, {pfx("198.18.8.0/24"), ip("172.30.1.99")}, {pfx("10.246.9.0/24"), ip("172.30.1.13")}}
		n, problems := NodeFor(in)
		wantTexts(t, problems)
		more := slices.DeleteFunc(slices.Clone(n.Routes), func(r kernel.Route) bool { return slices.Contains(before.Routes, r) })
		if want != (len(more) == 1 && more[0].Prefix == pfx("198.18.7.0/24") && more[0].Via == ip("240.30.1.13")) || !want && len(more) > 0 {
			t.Errorf("%s: %v", self, more)
		}
	}
}
