package fabric

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// podIntent is nodeIntent with the active gateway in a Pod on n1, and a standby on n2.
func podIntent(t testing.TB, self string) NodeIntent {
	in := nodeIntent(t, self)
	in.Tunnels[0].Gateway, in.OnlyPods = ip("10.244.1.254"), true
	in.Gateways = []GatewayPod{{Addr: ip("10.244.1.254"), Host: ip("172.30.1.11")}, {Addr: ip("10.244.2.254"), Host: ip("172.30.1.12")}}
	return in
}

// bothGateways has the addresses of podIntent's gateways, in the form of a filter's set.
const bothGateways = "10.244.1.254 10.244.2.254"

// sorted returns n in the form of PodPlaces.Network: with sorted lists, and without the pods inside
// their node's podCIDRs. It modifies the lists of n.
func sorted(n PodNetwork) PodNetwork {
	all := make(map[string][]netip.Prefix, len(n.Nodes))
	for _, node := range n.Nodes {
		all[node.Name] = node.PodCIDRs
	}
	n.Trusted = n.Trusted || podCIDRsHold(n.Nodes, n.Node, n.Pods)
	n.Pods = slices.DeleteFunc(n.Pods, func(p NodePod) bool {
		return slices.ContainsFunc(all[p.Node], func(c netip.Prefix) bool { return c.Contains(p.Addr) })
	})
	in := NodeIntent{Nodes: n.Nodes, Pods: n.Pods}
	in.Sort()
	return n
}

func podNetwork(t testing.TB) PodNetwork {
	in := podIntent(t, "")
	return sorted(PodNetwork{Pod: ip("10.244.1.254"), Node: "n1", Nodes: in.Nodes, Pods: in.Pods})
}

func gatewayPeers(t *testing.T) []*GatewayPeer {
	gw, problems := GatewayFor(Intent{Peers: []Peer{peer(t, idB, nil)}})
	wantTexts(t, problems)
	return gw.Peers
}

func TestEveryNodeRoutesPeerTrafficOnlyToTheGatewayPod(t *testing.T) {
	for _, self := range []string{"n1", "n2"} {
		in := podIntent(t, self)
		n, problems := NodeFor(in)
		wantTexts(t, problems)
		_, text, _ := strings.Cut(n.String(), "up\n") // skip the overlay device, which does not change
		own := in.Nodes[slices.IndexFunc(in.Nodes, func(n ClusterNode) bool { return n.Name == self })].Underlay()
		want := strings.ReplaceAll(`bridge fdb replace MAC dev isthmus.vxlan dst 10.244.1.254 self permanent
ip neigh replace 10.244.1.254 lladdr MAC dev isthmus.vxlan nud permanent
ip route replace 10.246.0.0/16 via 10.244.1.254 dev isthmus.vxlan onlink src OWN table 4201 proto 72
ip route replace unreachable 10.246.0.0/16 table 4201 metric 420000 proto 72
ip route replace 10.247.0.0/16 via 10.244.1.254 dev isthmus.vxlan onlink src OWN table 4201 proto 72
ip route replace unreachable 10.247.0.0/16 table 4201 metric 420000 proto 72
ip route replace unreachable 10.246.0.0/16 table 4202 metric 420000 proto 72
ip route replace unreachable 10.247.0.0/16 table 4202 metric 420000 proto 72
ip route replace unreachable 0.0.0.0/0 table 4203 metric 420000 proto 72
ip rule add priority 418 iif isthmus.vxlan lookup 4202 protocol 72
ip rule add priority 419 lookup 4201 protocol 72
ip rule add priority 421 iif isthmus.host lookup 4203 protocol 72
ip rule add priority 422 lookup 4202 protocol 72
`, "MAC", GatewayMAC(ip("10.244.1.254")).String())
		if want = strings.ReplaceAll(want, "OWN", own.String()); text != want {
			t.Errorf("%s: got\n%s\nwant\n%s", self, text, want)
		}
		f := n.Filters[0]
		host := "172.30.1.11" // address of the node with the other gateway; the filter needs no entry for our own address
		if self == "n1" {
			host = "172.30.1.12"
		}
		if f.Nodes != bothGateways+" "+host || f.Gateways != bothGateways {
			t.Errorf("%s takes the overlay from %q and forwards it for %q", self, f.Nodes, f.Gateways)
		}

		in.Nodes = slices.DeleteFunc(in.Nodes, func(n ClusterNode) bool { return n.Name != self })
		in.Pods = slices.DeleteFunc(in.Pods, func(p NodePod) bool { return p.Node != self })
		if less, problems := NodeFor(in); len(problems) > 0 || !reflect.DeepEqual(less, n) && !sameButPods(less, n) {
			t.Errorf("%s: other nodes or pods matter: %v\n%s", self, problems, kernel.PlanFor(n, less).Commands(""))
		}
	}
}

// oneGateway is podIntent with a gateway that reports once for all peers that it is active. The
// IPAM state names the networks.
func oneGateway(t testing.TB, self, gateway string) NodeIntent {
	in := podIntent(t, self)
	in.Tunnels, in.Gateway = nil, ip(gateway)
	in.Allocated = []netip.Prefix{pfx("10.246.0.0/16"), pfx("10.247.0.0/16")}
	in.OwnPods = []netip.Prefix{pfx("10.244.0.0/16")}
	in.Nodes = slices.DeleteFunc(in.Nodes, func(n ClusterNode) bool { return n.Name != self })
	in.Trust(self)
	return in
}

// A node forwards and refuses the same packets whether TunnelEndpoints name the gateway, or the
// gateway reports itself. Only the next hop differs.
func TestSelfReportedGatewayGetsTheSameRules(t *testing.T) {
	for _, self := range []string{"n1", "n2"} {
		in := oneGateway(t, self, "10.244.1.254")
		n, problems := NodeFor(in)
		wantTexts(t, problems)
		want, _ := NodeFor(podIntent(t, self))
		got, expected := n.String(), want.String()
		expected = strings.ReplaceAll(expected, "neigh replace 10.244.1.254", "neigh replace 192.0.0.8")
		expected = strings.ReplaceAll(expected, "via 10.244.1.254", "via 192.0.0.8")
		for _, network := range []string{"10.246.0.0/16", "10.247.0.0/16"} { // table 4202 refuses, and is looked up last
			expected = strings.ReplaceAll(expected, "ip route replace unreachable "+network+" table 4201 metric 420000 proto 72\n", "")
		}
		if got != expected {
			t.Errorf("%s: got\n%s\nwant\n%s", self, got, expected)
		}
	}
}

// A failover changes only the MAC address of one next hop. It changes no route, however many
// networks there are. The filter accepts both gateways before and after it.
func TestGatewayFailoverChangesNoRoute(t *testing.T) {
	before, after := oneGateway(t, "n3", "10.244.1.254"), oneGateway(t, "n3", "10.244.2.254")
	for i := range 100 {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64, byte(i), 0}), 24)
		before.Allocated, after.Allocated = append(before.Allocated, p), append(after.Allocated, p)
	}
	was, _ := NodeFor(before)
	is, problems := NodeFor(after)
	wantTexts(t, problems)
	mac := func(a string) string { return GatewayMAC(ip(a)).String() }
	want := "bridge fdb replace " + mac("10.244.2.254") + " dev isthmus.vxlan dst 10.244.2.254 self permanent\n" +
		"ip neigh replace 192.0.0.8 lladdr " + mac("10.244.2.254") + " dev isthmus.vxlan nud permanent\n" +
		"bridge fdb del " + mac("10.244.1.254") + " dev isthmus.vxlan dst 10.244.1.254 self\n"
	if got := kernel.PlanFor(was, is).Commands(""); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// Without the gateway's Pod, or if the Pod has an address in a network of a peer, a node refuses
// all packets for peers.
func TestOnlyOurOwnPodsMayClaimToBeTheActiveGateway(t *testing.T) {
	for _, bad := range []string{"10.244.3.5", "172.30.1.11", "198.51.100.1", "10.246.0.9"} {
		in := oneGateway(t, "n3", bad)
		if bad == "10.246.0.9" {
			in.Gateways[0].Addr = ip(bad)
		}
		n, problems := NodeFor(in)
		if text := problems[len(problems)-1].Error(); text != "Service of the gateway: metadata.annotations: "+bad+" is not the address of a gateway Pod; want that of the active one" {
			t.Errorf("%s: %s", bad, text)
		}
		refused := 0
		for _, r := range n.Routes {
			if r.Type == kernel.Unicast {
				t.Errorf("%s: %s", bad, kernel.State{Routes: []kernel.Route{r}})
			}
			if r.Table == kernel.RefuseTable {
				refused++
			}
		}
		pods := bothGateways
		if bad == "10.246.0.9" {
			pods = "10.244.2.254"
		}
		if f := n.Filters[0]; f.Gateways != pods || refused != 2 {
			t.Errorf("%s: the filter lets in %q; %d networks are refused", bad, f.Gateways, refused)
		}
	}
}

// sameButPods reports whether the plan from a to b is empty.
func sameButPods(a, b kernel.State) bool { return len(kernel.PlanFor(a, b)) == 0 }

func TestGatewayAddressThatIsNoGatewayPodIsRefused(t *testing.T) {
	in := podIntent(t, "n3")
	for _, bad := range []string{"10.244.3.5", "172.30.1.11", "198.51.100.1"} { // a pod, a node, and an unknown host
		in.Tunnels[0].Gateway = ip(bad)
		n, problems := NodeFor(in)
		wantTexts(t, problems, "TunnelEndpoint tenant/b: status.gatewayIP: "+bad+" is not the address of a gateway Pod; want that of the active one")
		for _, r := range n.Routes {
			if r.Type == kernel.Unicast {
				t.Errorf("%s: %s", bad, kernel.State{Routes: []kernel.Route{r}})
			}
		}
		if f := n.Filters[0]; f.Nodes != bothGateways+" 172.30.1.11 172.30.1.12" || f.Gateways != bothGateways {
			t.Errorf("%s: the filter lets in %q and %q", bad, f.Nodes, f.Gateways)
		}
	}
	in.Gateways[0].Addr, in.Tunnels[0].Gateway = ip("10.246.0.9"), ip("10.246.0.9")
	_, problems := NodeFor(in)
	if text := problems[0].Error(); !strings.Contains(text, "10.246.0.9 is in 10.246.0.0/16, a network of a peer") {
		t.Error(text)
	}
}

// A node accepts forwarded outer packets of its own gateway Pods, and the flows that they
// replicate, even if foreign filters would drop them. On a node without a gateway Pod, the other
// gateways do not matter.
func TestANodeAcceptsTrafficForwardedForItsOwnGateways(t *testing.T) {
	for node, want := range map[string]kernel.Accept{
		"n1": {Gateways: "10.244.1.254", Elsewhere: "10.244.2.254"}, "n2": {Gateways: "10.244.2.254", Elsewhere: "10.244.1.254"}, "n3": {},
	} {
		in := podIntent(t, node)
		n, _ := NodeFor(in)
		if len(n.Accepts) != 1 || n.Accepts[0] != want {
			t.Errorf("%s: %+v, want %+v", node, n.Accepts, want)
		}
		in.Gateways[0].HostNetwork, in.Gateways[1].HostNetwork = true, true
		if n, _ := NodeFor(in); len(n.Accepts) > 0 && n.Accepts[0] != (kernel.Accept{}) {
			t.Errorf("%s: %+v for gateways on the host's network", node, n.Accepts)
		}
	}
}

// For a moment after a gateway's Pod is deleted, all tunnels still name it.
func TestMissingGatewayCausesOneProblemAndNoRule(t *testing.T) {
	in := podIntent(t, "n3")
	other := in.Tunnels[0]
	other.Peer = peer(t, idC, remotes("10.248.0.0/16", "10.249.0.0/16"))
	in.Tunnels, in.Gateways = append(in.Tunnels, other), in.Gateways[1:]
	n, problems := NodeFor(in)
	if len(problems) != 1 {
		t.Error(problems)
	}
	refused := 0
	for _, r := range n.Routes {
		if r.Table == kernel.NodeTable {
			t.Errorf("a route of a gateway: %+v", r)
		}
		if r.Table == kernel.RefuseTable {
			refused++
		}
	}
	if refused != 4 || slices.ContainsFunc(n.Rules, func(r kernel.Rule) bool { return r.Priority == kernel.NodeRulePriority }) {
		t.Errorf("%d networks are refused, want 4 and no rule for each:\n%s", refused, n)
	}
}

// While gateways move from hosts to Pods or back, a node has the routes of both forms.
func TestNodeRoutesToHostAndPodGatewaysAtTheSameTime(t *testing.T) {
	in := podIntent(t, "n3")
	in.OnlyPods = false
	in.Gateways[1] = GatewayPod{Addr: ip("172.30.1.12"), Host: ip("172.30.1.12"), HostNetwork: true}
	n, problems := NodeFor(in)
	wantTexts(t, problems)
	if text := n.String(); !strings.Contains(text, "ip rule add priority 419 to 10.246.0.0/16 lookup 4201") || !strings.Contains(text, "10.246.0.0/16 via 10.244.1.254") {
		t.Error(text)
	}
	in.Tunnels[0].Gateway = ip("172.30.1.12")
	n, problems = NodeFor(in)
	wantTexts(t, problems)
	if text := n.String(); !strings.Contains(text, "10.246.0.0/16 via 240.30.1.12") {
		t.Error(text)
	}
}

func TestGatewayPodDeliversToNodesThroughTheOverlay(t *testing.T) {
	s, problems := GatewayPodFor(gatewayPeers(t), nil, 1340, 1, 1400, podNetwork(t))
	wantTexts(t, problems)
	f := s.Filters[0]
	s.Filters = nil
	want := `ip link add isthmus.vxlan type vxlan id 4200 local 10.244.1.254 dstport 4800 nolearning noudpcsum
sysctl -w net/ipv4/conf/isthmus.vxlan/forwarding=1
sysctl -w net/ipv4/conf/isthmus.vxlan/rp_filter=2
sysctl -w net/ipv4/conf/isthmus.vxlan/send_redirects=0
sysctl -w net/ipv6/conf/isthmus.vxlan/addr_gen_mode=1
sysctl -w net/ipv4/conf/isthmus0/forwarding=1
sysctl -w net/ipv4/conf/isthmus0/rp_filter=2
sysctl -w net/ipv4/conf/isthmus0/send_redirects=0
sysctl -w net/ipv6/conf/isthmus0/addr_gen_mode=1
ip link set isthmus.vxlan address ` + GatewayMAC(ip("10.244.1.254")).String() + ` mtu 1350 up
ip link set isthmus0 mtu 1340 up
bridge fdb replace 66:41:a8:85:d7:fe dev isthmus.vxlan dst 172.30.1.11 self permanent
bridge fdb replace 66:63:0d:94:68:4e dev isthmus.vxlan dst 172.30.1.12 self permanent
bridge fdb replace 66:98:5d:57:51:75 dev isthmus.vxlan dst 172.30.1.13 self permanent
ip neigh replace 172.30.1.11 lladdr 66:41:a8:85:d7:fe dev isthmus.vxlan nud permanent
ip neigh replace 172.30.1.12 lladdr 66:63:0d:94:68:4e dev isthmus.vxlan nud permanent
ip neigh replace 172.30.1.13 lladdr 66:98:5d:57:51:75 dev isthmus.vxlan nud permanent
ip route replace unreachable 0.0.0.0/0 table 4200 metric 420000 proto 71
ip route replace 10.246.0.0/16 dev isthmus0 table 4200 proto 71
ip route replace 10.247.0.0/16 dev isthmus0 table 4200 proto 71
ip route replace 0.0.0.0/0 via 172.30.1.11 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace unreachable 0.0.0.0/0 table 4201 metric 420000 proto 71
ip route replace unreachable 10.244.0.0/16 table 4201 metric 420000 proto 71
ip route replace 10.244.1.0/24 via 172.30.1.11 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace unreachable 10.244.1.0/24 table 4201 metric 420000 proto 71
ip route replace 10.244.2.0/24 via 172.30.1.12 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace unreachable 10.244.2.0/24 table 4201 metric 420000 proto 71
ip route replace 10.244.2.99/32 via 172.30.1.13 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace 10.244.3.0/24 via 172.30.1.13 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace unreachable 10.244.3.0/24 table 4201 metric 420000 proto 71
ip route replace 10.244.3.99/32 via 172.30.1.11 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace 10.244.77.7/32 via 172.30.1.13 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace 10.244.96.1/32 via 172.30.1.12 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace 10.244.99.1/32 via 172.30.1.11 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace unreachable 10.246.0.0/16 table 4201 metric 420000 proto 71
ip route replace unreachable 10.247.0.0/16 table 4201 metric 420000 proto 71
ip route replace 172.30.1.11/32 via 172.30.1.11 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace 172.30.1.12/32 via 172.30.1.12 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace 172.30.1.13/32 via 172.30.1.13 dev isthmus.vxlan onlink table 4201 proto 71
ip route replace unreachable 10.246.0.0/16 table 4202 metric 420000 proto 71
ip route replace unreachable 10.247.0.0/16 table 4202 metric 420000 proto 71
ip rule add priority 418 iif isthmus.vxlan lookup 4200 protocol 71
ip rule add priority 419 iif isthmus0 lookup 4201 protocol 71
ip rule add priority 422 lookup 4202 protocol 71
`
	if got := s.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if want := "172.30.1.11 172.30.1.12 172.30.1.13"; f.Nodes != want {
		t.Errorf("the filter accepts %s; want %s", f.Nodes, want)
	}
	in := podNetwork(t) // pods are inside podCIDRs, and CNIs masquerade nodes behind the first addresses of the podCIDRs
	in.Trusted = true
	s, _ = GatewayPodFor(gatewayPeers(t), nil, 1340, 1, 1400, in)
	f = s.Filters[0]
	for _, a := range []string{"172.30.1.11", "172.30.1.13", "10.244.2.0", "10.244.2.1"} {
		if !slices.Contains(strings.Fields(f.Nodes), a) {
			t.Errorf("the filter does not accept %s, which is a node's: %s", a, f.Nodes)
		}
	}
	if got := len(strings.Fields(f.Nodes)); got != 9 {
		t.Errorf("the filter accepts %d addresses: %s", got, f.Nodes)
	}
}

func TestGatewayPodDistributesFlowsOverTunnels(t *testing.T) {
	peers := gatewayPeers(t)
	s, _ := GatewayPodFor(peers, map[string]TunnelSet{peers[0].ID: TunnelSet(0).With(0).With(1)}, 1340, 2, 0, podNetwork(t))
	text := s.String()
	for _, want := range []string{
		"ip route replace 10.246.0.0/16 table 4200 proto 71 nexthop dev isthmus0 nexthop dev isthmus1\n",
		"ip rule add priority 419 iif isthmus1 lookup 4201 protocol 71\n", "sysctl -w net/ipv4/fib_multipath_hash_policy=1\n", "isthmus.vxlan address " + GatewayMAC(ip("10.244.1.254")).String() + " mtu 1450 up\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// Whatever nodes and pods report, packets from a TUN leave only through the overlay, and no two
// routes conflict.
func TestGatewayPodDeliversOnlyThroughTheOverlay(t *testing.T) {
	random := rand.New(rand.NewPCG(13, 1))
	addr := func() netip.Addr {
		return netip.AddrFrom4([4]byte{10, byte(244 + random.IntN(3)), byte(random.IntN(4)), byte(random.IntN(4))})
	}
	names := []string{"n1", "n2", "n3", "n4", ""}
	for range 2000 {
		in := PodNetwork{Pod: addr(), Node: names[random.IntN(5)]}
		for i := range random.IntN(5) {
			n := ClusterNode{Name: names[i], Created: int64(random.IntN(3))}
			for range random.IntN(3) {
				n.Addrs = append(n.Addrs, addr())
			}
			for range random.IntN(3) {
				n.PodCIDRs = append(n.PodCIDRs, netip.PrefixFrom(addr(), 22+random.IntN(11)))
			}
			in.Nodes = append(in.Nodes, n)
		}
		for range random.IntN(6) {
			in.Pods = append(in.Pods, NodePod{Addr: addr(), Node: names[random.IntN(5)], Created: int64(random.IntN(3))})
		}
		s, _ := GatewayPodFor(gatewayPeers(t), nil, 1400, 1, 1500, in)
		type key struct {
			prefix        netip.Prefix
			table, metric int
		}
		seen := map[key]kernel.Route{}
		for _, r := range s.Routes {
			k := key{r.Prefix, r.Table, r.Metric}
			if other, twice := seen[k]; twice {
				t.Fatalf("%+v and %+v in\n%+v", other, r, in)
			}
			seen[k] = r
			if r.Table == kernel.NodeTable && (r.Type == kernel.Throw || r.Type == kernel.Unicast && r.Dev != kernel.OverlayDevice) || r.Table == kernel.MainTable {
				t.Fatalf("%+v in\n%+v", r, in)
			}
		}
		if len(kernel.PlanFor(s, s)) > 0 {
			t.Fatalf("the existing state differs from the wanted one:\n%s", s)
		}
	}
}

func TestStoppedGatewayPodLeavesOnlyUnreachableRoutes(t *testing.T) {
	left := GatewayPodLeft(gatewayPeers(t))
	const want = `ip route replace unreachable 10.246.0.0/16 table 4202 metric 420000 proto 71
ip route replace unreachable 10.247.0.0/16 table 4202 metric 420000 proto 71
ip rule add priority 422 lookup 4202 protocol 71
`
	if got := left.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// The Pods of one node cannot get packets of peers for another node's pods. A gateway in a Pod
// checks this as a node does.
func TestAGatewayPodTrustsOnlyPodAddressesOfTheirNode(t *testing.T) {
	in := podNetwork(t)
	in.Trusted = false
	in.Pods = []NodePod{
		{Name: "default/one", Addr: ip("10.244.1.5"), Node: "n1", Created: 1}, {Name: "default/two", Addr: ip("10.244.2.5"), Node: "n2", Created: 1},
		{Name: "default/thief", Addr: ip("10.244.2.5"), Node: "n3", Created: 9},
	}
	in = sorted(in)
	in = sorted(in) // again: the first call removed the pods that show that podCIDRs hold
	s, problems := GatewayPodFor(gatewayPeers(t), nil, 1400, 1, 1500, in)
	wantTexts(t, problems, "Pod default/thief: status.podIPs: is 10.244.2.5 on Node n3, but that address is in the podCIDRs of Node n2, so it is ignored; want an address of its own Node")
	if slices.ContainsFunc(s.Routes, func(r kernel.Route) bool { return r.Prefix == pfx("10.244.2.5/32") }) {
		t.Errorf("%v", s.Routes)
	}
}

// A node that knows no other nodes refuses a packet for a peer if its pod has forged the address of
// another node's pod.
func TestANodeThatKnowsOnlyItselfRefusesForeignSources(t *testing.T) {
	in := podIntent(t, "n2")
	in.Nodes = slices.DeleteFunc(in.Nodes, func(n ClusterNode) bool { return n.Name != "n2" })
	in.Nodes[0].PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.64.0/18")}
	in.Pods = []NodePod{{Name: "default/p", Addr: ip("10.244.65.7"), Node: "n2"}}
	n, problems := NodeFor(in)
	wantTexts(t, problems)
	if got, want := n.Filters[0].Elsewhere, "10.244.0.0/18 10.244.128.0/17"; got != want {
		t.Errorf("elsewhere is %q; want %q", got, want)
	}
	in.Pods[0].Addr = ip("10.244.1.7") // a CNI that ignores podCIDRs
	if n, _ = NodeFor(in); n.Filters[0].Elsewhere != "" {
		t.Errorf("elsewhere is %q although podCIDRs mean nothing", n.Filters[0].Elsewhere)
	}
}

func TestNodeCannotClaimTheAddressOfAPod(t *testing.T) {
	in := podNetwork(t)
	in.Trusted, in.Pods = true, nil
	in.Nodes = slices.Clone(in.Nodes)
	in.Nodes[2].Addrs = append(slices.Clone(in.Nodes[2].Addrs), ip("10.244.2.5"), in.Pod)
	s, problems := GatewayPodFor(gatewayPeers(t), nil, 1340, 1, 1400, in)
	wantTexts(t, problems, "Node n3: status.addresses: 10.244.1.254 is the address of the gateway's Pod; want another address",
		"Node n3: status.addresses: 10.244.2.5 is in the pods' network of Node n2; want an address outside")
	if text := s.String(); strings.Contains(text, "10.244.2.5") || strings.Contains(text, "10.244.1.254/32") {
		t.Error(text)
	}
	in.Trusted = false // another pod may then have the first addresses of the podCIDR
	s, _ = GatewayPodFor(gatewayPeers(t), nil, 1340, 1, 1400, in)
	if f := s.Filters[0].Nodes; strings.Contains(f, "10.244.1.1 ") {
		t.Error(f)
	}
}

// A CNI may replace the source of a node's packets by one of its own addresses. The agent's report
// of that address must not let the node use addresses of other nodes.
func TestGatewayPodAcceptsReportedCNIAddressesOfNodes(t *testing.T) {
	n := podNetwork(t)
	n.Pods, n.Trusted = []NodePod{{Addr: ip("10.244.200.9"), Node: "n3"}}, false // as with Calico, which ignores podCIDRs
	n.Nodes[1].Sources = []netip.Addr{ip("10.244.200.64"),
		ip("10.244.200.9"), ip("10.244.1.254"), ip("172.30.1.13"), ip("10.246.0.9")} // a pod, the gateway, a node, and a remote pod
	s, _ := GatewayPodFor(gatewayPeers(t), nil, 1400, 1, 1500, n)
	if got, want := s.Filters[0].Nodes, "10.244.200.64 172.30.1.11 172.30.1.12 172.30.1.13"; got != want {
		t.Errorf("the filter accepts %q, want %q", got, want)
	}
	n.Trusted = true
	n.Nodes[1].Sources = []netip.Addr{ip("10.244.3.7"), ip("10.244.2.200")} // among another node's pods, and among our own
	s, _ = GatewayPodFor(gatewayPeers(t), nil, 1400, 1, 1500, n)
	if got := s.Filters[0].Nodes; strings.Contains(got, "10.244.3.7") || !strings.Contains(got, "10.244.2.200") {
		t.Errorf("the filter accepts %q", got)
	}
}

// If the gateway's node routes an endpoint's network via another node, the gateway sends packets
// through the overlay to that node, on the path of the answers. It ignores routes into networks of
// pods, nodes or peers.
func TestGatewayPodRoutesEndpointsViaTheirNodeThroughTheOverlay(t *testing.T) {
	n := podNetwork(t)
	n.Nodes[0].Routes = []NodeRoute{{pfx("198.18.7.0/24"), ip("172.30.1.12")},
		{pfx("198.18.8.0/24"), ip("172.30.1.99")}, // via a host that is no known node
		{pfx("10.246.9.0/24"), ip("172.30.1.12")}, {pfx("10.0.0.0/8"), ip("172.30.1.12")}, {pfx("10.244.3.0/24"), ip("172.30.1.12")}}
	n.Nodes[1].Routes = []NodeRoute{{pfx("198.18.9.0/24"), ip("172.30.1.13")}} // ignored: this is not the gateway's node
	before, _ := GatewayPodFor(gatewayPeers(t), nil, 1400, 1, 1500, podNetwork(t))
	s, problems := GatewayPodFor(gatewayPeers(t), nil, 1400, 1, 1500, n)
	wantTexts(t, problems)
	more := slices.DeleteFunc(slices.Clone(s.Routes), func(r kernel.Route) bool { return slices.Contains(before.Routes, r) })
	want := kernel.Route{Prefix: pfx("198.18.7.0/24"), Via: ip("172.30.1.12"), Dev: kernel.OverlayDevice, Table: kernel.NodeTable, Protocol: kernel.GatewayProtocol}
	if len(more) != 1 || more[0] != want || len(s.Routes) != len(before.Routes)+1 {
		t.Errorf("%v", more)
	}
}
