package fabric

import (
	"net/netip"
	"slices"
	"strconv"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// The next hops of the veth between host and gateway. The veth needs no ARP: both hardware
// addresses are fixed and the neighbours are permanent, so no entry can expire.
var (
	HopGateway4 = netip.MustParseAddr("169.254.100.1") // from the host into the gateway
	hopHost4    = netip.MustParseAddr("169.254.100.2") // from the gateway back to the host
	hopGateway6 = netip.MustParseAddr("fe80::a9fe:6401")
	hopHost6    = netip.MustParseAddr("fe80::a9fe:6402")

	// Router6 is the source address of the gateway's ICMPv6 errors. For ICMP errors over IPv4, the
	// source address is HopGateway4. A link-local address would be unsuitable, because it is valid
	// only on its link. Like GatewayAddr6, it is in the discard-only prefix.
	Router6 = netip.MustParseAddr("100::a9fe:6401")

	// hopTun6 is the next hop of IPv6 routes to several TUNs. The kernel balances IPv6 packets only
	// among routes with a next hop (fib6_qualifies_for_ecmp in include/net/ip6_fib.h). No host
	// needs to have this address, because the kernel does not resolve neighbours on a TUN.
	hopTun6 = netip.MustParseAddr("fe80::1")

	macHost    = kernel.MAC{2, 'i', 's', 't', 'h', 2}
	macGateway = kernel.MAC{2, 'i', 's', 't', 'h', 1}
)

// If an IPv6 route has no metric, the kernel uses metric6.
const metric6 = 1024

// TunName returns the name of the TUN of a tunnel in the gateway's namespace.
func TunName(tunnel int) string { return kernel.TunPrefix + strconv.Itoa(tunnel) }

// TunnelSet holds the tunnels that carry the flows to a peer, bit i for tunnel i. The empty set
// means the first tunnel.
type TunnelSet uint16

// Has reports whether the tunnel is in the set.
func (s TunnelSet) Has(tunnel int) bool { return s>>tunnel&1 != 0 }

// With returns the set with tunnel added.
func (s TunnelSet) With(tunnel int) TunnelSet { return s | 1<<tunnel }

// devs returns the TUNs over which the kernel distributes the flows to a peer.
func (s TunnelSet) devs() string {
	var names []string
	for i := range MaxTunnels {
		if s.Has(i) {
			names = append(names, TunName(i))
		}
	}
	if names == nil {
		names = []string{TunName(0)}
	}
	return kernel.Devs(names...)
}

// GatewayHostFor computes the kernel state of the gateway's namespace and of its host: packets for
// peers reach the TUNs, and all other packets that leave a TUN reach the host. tunnels is the
// number of TUNs. inUse holds the tunnels that carry flows, by peer ID. For a peer without an
// entry, only tunnel 0 carries flows.
//
// If several tunnels lead to a peer, the kernel chooses one by the hash of addresses and ports, so
// that a flow stays in its tunnel. Fragments have no ports. The kernel hashes only their addresses,
// so all fragments of a packet take the same tunnel.
//
// mtu is the largest MTU of all peers' tunnels. Both ends of the veth have this MTU. If a pod sends
// a packet larger than mtu, the host refuses the packet and sends the ICMP error. A superpacket
// passes, because the kernel compares the size of its segments with mtu. If a packet is smaller
// than mtu but exceeds the MTU of its peer's tunnel, the engine sends the ICMP error. If a packet
// from a peer exceeds mtu, the gateway's namespace sends the ICMP error.
func GatewayHostFor(peers []*GatewayPeer, inUse map[string]TunnelSet, mtu, tunnels int) kernel.State {
	type remote struct {
		prefix netip.Prefix
		devs   string
	}
	remotes := make([]remote, 0, 2*len(peers))
	six, first := false, TunnelSet(0).devs()
	for _, p := range peers {
		devs := first
		if set := inUse[p.ID]; set != 0 {
			devs = set.devs()
		}
		for _, prefix := range p.AllowedIPs {
			remotes, six = append(remotes, remote{prefix, devs}), six || prefix.Addr().Is6()
		}
	}
	slices.SortFunc(remotes, func(a, b remote) int { return a.prefix.Compare(b.prefix) })

	s := kernel.State{
		Devices:  []kernel.Device{{Name: kernel.VethHost, Peer: kernel.VethGateway}},
		Settings: gatewaySettings(six, tunnels),
		Links: []kernel.Link{
			{Name: kernel.VethHost, MTU: mtu, MAC: macHost, Up: true},
			{In: kernel.Inner, Name: kernel.VethGateway, MTU: mtu, MAC: macGateway, Up: true},
		},
	}
	s.Routes = make([]kernel.Route, 0, 3*len(remotes)+3) // three routes for each network, and three for the veth
	for i := range tunnels {
		s.Links = append(s.Links, kernel.Link{In: kernel.Inner, Name: TunName(i), MTU: mtu, Up: true})
	}
	route := func(r kernel.Route) {
		r.Protocol = kernel.GatewayProtocol
		if r.Prefix.Addr().Is6() && r.Metric == 0 {
			r.Metric = metric6
		}
		s.Routes = append(s.Routes, r)
	}
	// family connects the two ends of the veth in one address family. router is the source address
	// of ICMP errors that the namespace sends. It cannot be GatewayAddr, which belongs to the
	// engine.
	family := func(hopGateway, hopHost, router netip.Addr) {
		s.Addresses = append(s.Addresses, kernel.Address{In: kernel.Inner, Dev: kernel.VethGateway, Prefix: netip.PrefixFrom(router, router.BitLen())})
		s.Neighbors = append(s.Neighbors,
			kernel.Neighbor{Dev: kernel.VethHost, Addr: hopGateway, MAC: macGateway},
			kernel.Neighbor{In: kernel.Inner, Dev: kernel.VethGateway, Addr: hopHost, MAC: macHost})
		everywhere, _ := hopHost.Prefix(0)
		route(kernel.Route{In: kernel.Inner, Prefix: everywhere, Via: hopHost, Dev: kernel.VethGateway, Table: kernel.MainTable})
		s.Rules = append(s.Rules, kernel.Rule{V6: hopHost.Is6(), Priority: kernel.GatewayRulePriority, Table: kernel.GatewayTable, Protocol: kernel.GatewayProtocol})
	}
	route(kernel.Route{Prefix: netip.PrefixFrom(HopGateway4, 32), Dev: kernel.VethHost, Table: kernel.GatewayTable})
	family(HopGateway4, hopHost4, HopGateway4)
	if six {
		family(hopGateway6, hopHost6, Router6)
	}
	for _, r := range remotes {
		inside := kernel.Route{In: kernel.Inner, Prefix: r.prefix, Dev: r.devs, Table: kernel.MainTable}
		hop := HopGateway4
		if r.prefix.Addr().Is6() {
			hop = hopGateway6
			if r.devs != TunName(0) {
				inside.Via = hopTun6
			}
		}
		route(inside) // add this route first: with only the host's route, packets would loop
		route(kernel.Route{Prefix: r.prefix, Via: hop, Dev: kernel.VethHost, Table: kernel.GatewayTable})
		route(kernel.Route{Prefix: r.prefix, Type: kernel.Unreachable, Table: kernel.GatewayTable, Metric: kernel.UnreachableMetric})
	}
	return s
}

// GatewayHostLeft returns the kernel state that a gateway leaves on its host when it stops or is
// killed. It has only the routes that refuse packets for the gateway's peers. Without them, these
// packets would leave unencrypted.
func GatewayHostLeft(peers []*GatewayPeer) (left kernel.State) {
	s := GatewayHostFor(peers, nil, 0, 0)
	for _, r := range s.Routes {
		if r.Type == kernel.Unreachable {
			left.Routes = append(left.Routes, r)
		}
	}
	if len(left.Routes) > 0 {
		left.Rules = s.Rules
	}
	return left
}

// gatewaySettings returns the sysctls of the gateway's namespace, and of the veth on the host:
//   - The namespace forwards. IPv4 forwarding is set for each device by netlink, because ip_forward
//     would need /proc/sys, which is read-only in a container.
//   - Reverse path filtering is off: the engine checks sources, and the filter would drop a peer's
//     packet for another peer's mapped endpoint.
//   - Redirects are off, because a packet may leave by the TUN through which it came.
//   - Devices get no IPv6 link-local address. The kernel would send unsolicited packets from such
//     an address, and the tunnel would count these packets as dropped.
//   - The hash that chooses among several tunnels includes ports.
func gatewaySettings(six bool, tunnels int) (all []kernel.Setting) {
	inner := func(path, value string) {
		all = append(all, kernel.Setting{In: kernel.Inner, Path: "net/" + path, Value: value})
	}
	if tunnels > 1 {
		inner("ipv4/fib_multipath_hash_policy", "1")
	}
	devices := []string{kernel.VethGateway}
	for i := range tunnels {
		devices = append(devices, TunName(i))
	}
	for _, name := range append([]string{"all"}, devices...) {
		inner("ipv4/conf/"+name+"/rp_filter", "0")
		inner("ipv4/conf/"+name+"/send_redirects", "0")
	}
	for _, name := range devices {
		inner("ipv4/conf/"+name+"/forwarding", "1")
		inner("ipv6/conf/"+name+"/addr_gen_mode", "1")
	}
	if six {
		inner("ipv6/conf/all/forwarding", "1")
		if tunnels > 1 {
			inner("ipv6/fib_multipath_hash_policy", "1")
		}
	}
	return append(all,
		kernel.Setting{Path: "net/ipv4/conf/" + kernel.VethHost + "/forwarding", Value: "1"},
		kernel.Setting{Path: "net/ipv6/conf/" + kernel.VethHost + "/addr_gen_mode", Value: "1"})
}
