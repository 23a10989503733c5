package gateway

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/diff"
)

// Everything the gateway owns in the kernel. Anything else is foreign and is
// never read for a decision, changed or removed. None of these is Liqo's, so
// both can run on one node during a migration.
const (
	TunName     = "isthmus0"     // TUN device of the first tunnel, gateway namespace
	VethHost    = "isthmus.host" // veth end in the host's namespace
	VethGateway = "isthmus.gw"   // veth end in the gateway's namespace

	RouteTable    = 4200 // host's table with the remote prefixes
	RulePriority  = 4200 // policy rules that lead to it
	RouteProtocol = 71   // RTA_PROTOCOL and FRA_PROTOCOL of everything we add

	mainTable = 254
	// unreachableMetric is worse than every route with a device. The routes
	// without a device outlive a killed gateway, whose veth takes its routes
	// along: traffic for a peer is then refused instead of leaving by the
	// default route in the clear.
	unreachableMetric = 420000
	metric4           = 0
	metric6           = 1024 // what IPv6 makes of an unset metric
)

// The next hops of the veth pair. There is no ARP on it: both hardware
// addresses are fixed and the neighbours permanent, so nothing can expire.
var (
	hopGateway4 = netip.MustParseAddr("169.254.100.1") // the host's way into the gateway
	hopHost4    = netip.MustParseAddr("169.254.100.2") // the gateway's way back
	hopGateway6 = netip.MustParseAddr("fe80::a9fe:6401")
	hopHost6    = netip.MustParseAddr("fe80::a9fe:6402")

	// router6 is what hopGateway4 is besides: the source of ICMP errors, for which no
	// link-local address will do. Like fabric.GatewayAddr6 it is in the discard-only prefix.
	router6 = netip.MustParseAddr("100::a9fe:6401")
)

const (
	macHost    = "02:69:73:74:68:02"
	macGateway = "02:69:73:74:68:01"
)

// tunPrefix and the number of a tunnel are the name of its TUN device.
const tunPrefix = "isthmus"

func tunName(tunnel int) string { return tunPrefix + strconv.Itoa(tunnel) }

// isTun reports whether a link is one of our TUN devices, which go with their file descriptors.
func isTun(name string) bool { return name != VethHost && name != VethGateway }

// side is one of the two network namespaces.
type side uint8

const (
	hostSide    side = iota // where the process, its UDP socket and the nodes' routes are
	gatewaySide             // the unnamed namespace with the TUN
)

// The kinds of kernel objects. Each is a comparable value, so "the same" is ==.
type (
	link struct {
		side side
		name string
		mtu  int
		mac  string // empty: as it is
		up   bool
	}
	// veth is the pair as such; there is at most one.
	veth struct{}

	sysctl struct {
		side  side
		path  string // below /proc/sys
		value string
	}
	address struct {
		side   side
		link   string
		prefix netip.Prefix
	}
	neighbor struct {
		side side
		link string
		addr netip.Addr
		mac  string
	}
	route struct {
		side        side
		prefix      netip.Prefix
		unreachable bool       // no link then
		via         netip.Addr // zero: on the link itself
		link        string
		more        tunnelSet // of whose TUNs each takes its share of the flows, beside link
		table       int
		metric      int
	}
	rule struct {
		family   string // "ip" or "ip -6", as the command wants it
		priority int
		table    int
	}
)

// shared is the devices that share the traffic of a route; none when there is only one.
func (r route) shared() (names []string) {
	if r.more == 0 {
		return nil
	}
	names = []string{r.link}
	for i := range fabric.MaxTunnels {
		if r.more.has(i) {
			names = append(names, tunName(i))
		}
	}
	return names
}

// share adds one of the devices that share the traffic.
func (r *route) share(name string) {
	if i, err := strconv.Atoi(strings.TrimPrefix(name, tunPrefix)); err == nil && i > 0 && i < fabric.MaxTunnels {
		r.more = r.more.with(i)
		return
	}
	r.link = name
}

// A hostState is what there is, or should be, in both namespaces, as far as it
// is ours.
type hostState struct {
	veth      []veth
	links     []link
	sysctls   []sysctl
	addresses []address
	neighbors []neighbor
	routes    []route
	rules     []rule
}

// tunnelSet is a set of further tunnels, bit i for tunnel i. That of the first is never set.
type tunnelSet uint16

func (s tunnelSet) has(tunnel int) bool       { return s>>tunnel&1 != 0 }
func (s tunnelSet) with(tunnel int) tunnelSet { return s | 1<<tunnel }

// remote is a network behind the tunnels.
type remote struct {
	prefix netip.Prefix
	more   tunnelSet // beside the first tunnel
}

// hopTun6 is the next hop out of a TUN, where one is needed: the kernel shares out IPv6 among gateways only
// (fib6_qualifies_for_ecmp in include/net/ip6_fib.h). A TUN asks nobody for it.
var hopTun6 = netip.MustParseAddr("fe80::1")

// wantHost says what both namespaces should hold so that packets for the remote
// prefixes reach the TUNs and everything else that leaves a TUN reaches the
// host. There are that many tunnels. The order of remotes does not matter; each occurs once.
//
// Where several tunnels lead to a peer, the kernel of the gateway's namespace
// picks one by the hash of addresses and ports, so that a flow stays in its
// tunnel. Fragments are without ports, and stay together.
//
// The veth has the MTU of the tunnel at both ends. A pod's packet that is too
// big is then refused by the host, whose answer (fragmentation needed, packet
// too big) reaches the pod from an address it knows; a superpacket passes, since
// the kernel asks for the size of its segments. One that fits this MTU, which is
// the largest of all peers, but not its own peer's, is answered by the engine. A
// packet from a peer with a larger tunnel is answered by the gateway's namespace
// like one from a pod, so that the sender learns the smaller of the two.
func wantHost(remotes []remote, mtu, tunnels int) hostState {
	remotes = slices.Clone(remotes)
	slices.SortFunc(remotes, func(a, b remote) int { return comparePrefix(a.prefix, b.prefix) })
	six := slices.ContainsFunc(remotes, func(r remote) bool { return r.prefix.Addr().Is6() })

	s := hostState{
		veth: []veth{{}},
		links: []link{
			{side: hostSide, name: VethHost, mtu: mtu, mac: macHost, up: true},
			{side: gatewaySide, name: VethGateway, mtu: mtu, mac: macGateway, up: true},
		},
		// A source for the ICMP errors of the gateway's kernel. It is not
		// GatewayAddr: that one lives inside the engine.
		addresses: []address{{gatewaySide, VethGateway, netip.PrefixFrom(hopGateway4, 32)}},
		neighbors: []neighbor{
			{hostSide, VethHost, hopGateway4, macGateway},
			{gatewaySide, VethGateway, hopHost4, macHost},
		},
		routes: []route{
			{side: hostSide, prefix: netip.PrefixFrom(hopGateway4, 32), link: VethHost, table: RouteTable},
			{side: gatewaySide, prefix: netip.MustParsePrefix("0.0.0.0/0"), via: hopHost4, link: VethGateway, table: mainTable},
		},
		rules: []rule{{"ip", RulePriority, RouteTable}},
	}
	for i := range tunnels {
		s.links = append(s.links, link{side: gatewaySide, name: tunName(i), mtu: mtu, up: true})
	}
	if six {
		s.neighbors = append(s.neighbors,
			neighbor{hostSide, VethHost, hopGateway6, macGateway},
			neighbor{gatewaySide, VethGateway, hopHost6, macHost})
		s.routes = append(s.routes, route{side: gatewaySide, prefix: netip.MustParsePrefix("::/0"),
			via: hopHost6, link: VethGateway, table: mainTable, metric: metric6})
		s.rules = append(s.rules, rule{"ip -6", RulePriority, RouteTable})
		s.addresses = append(s.addresses, address{gatewaySide, VethGateway, netip.PrefixFrom(router6, 128)})
	}
	for _, r := range remotes {
		p, hop, metric := r.prefix, hopGateway4, metric4
		if p.Addr().Is6() {
			hop, metric = hopGateway6, metric6
		}
		// Inside first: a moment with the host's route alone would be a loop.
		s.routes = append(s.routes,
			route{side: gatewaySide, prefix: p, link: TunName, more: r.more, table: mainTable, metric: metric},
			route{side: hostSide, prefix: p, via: hop, link: VethHost, table: RouteTable, metric: metric},
			route{side: hostSide, prefix: p, unreachable: true, table: RouteTable, metric: unreachableMetric})
	}
	s.sysctls = wantSysctls(six, tunnels)
	return s
}

// wantSysctls: the gateway's namespace forwards, believes the engine about
// sources (reverse path filtering would drop a peer's packet for another peer's
// mapped endpoint), and never tells a peer of a better way (a packet may leave
// by the TUN it came from). The devices themselves say nothing over IPv6 that
// nobody asked for, because the tunnel would count it as dropped. Several tunnels
// are chosen among by addresses and ports, not by addresses alone.
func wantSysctls(six bool, tunnels int) []sysctl {
	s := []sysctl{{gatewaySide, "net/ipv4/ip_forward", "1"}}
	if tunnels > 1 {
		s = append(s, sysctl{gatewaySide, "net/ipv4/fib_multipath_hash_policy", "1"})
	}
	devices := []string{VethGateway}
	for i := range tunnels {
		devices = append(devices, tunName(i))
	}
	for _, name := range append([]string{"all"}, devices...) {
		s = append(s,
			sysctl{gatewaySide, "net/ipv4/conf/" + name + "/rp_filter", "0"},
			sysctl{gatewaySide, "net/ipv4/conf/" + name + "/send_redirects", "0"})
	}
	for _, name := range devices {
		s = append(s, sysctl{gatewaySide, "net/ipv6/conf/" + name + "/addr_gen_mode", "1"})
	}
	if six {
		s = append(s, sysctl{gatewaySide, "net/ipv6/conf/all/forwarding", "1"})
		if tunnels > 1 {
			s = append(s, sysctl{gatewaySide, "net/ipv6/fib_multipath_hash_policy", "1"})
		}
	}
	return append(s,
		sysctl{hostSide, "net/ipv4/conf/" + VethHost + "/forwarding", "1"},
		sysctl{hostSide, "net/ipv6/conf/" + VethHost + "/addr_gen_mode", "1"})
}

type verb string

const (
	add    verb = "add"
	change verb = "replace"
	remove verb = "del"
)

// An op is one change of the kernel's state. It prints as the command an
// operator could type; nsPath is put where the command needs the namespace.
type op struct {
	verb   verb
	object any // one of the kinds above
}

// A plan is a list of changes in the order in which to make them.
type plan []op

// planHost compares. Links come first, because the rest hangs on them, and come
// up when their sysctls are set; then additions before removals, and removals in
// the opposite order: a moment with two routes is harmless, a moment with none is
// an outage.
func planHost(have, want hostState) plan {
	var adds, removes plan

	// A half of a pair, or a pair with a foreign other end (what a killed run
	// leaves for a moment), is of no use: replace it, and with it everything
	// that hung on it.
	if len(want.veth) > 0 && len(have.veth) == 0 {
		for _, l := range have.links {
			if !isTun(l.name) {
				adds = append(adds, op{remove, l})
				have = have.without(l.side, l.name)
			}
		}
		adds = append(adds, op{add, veth{}})
		for _, l := range want.links {
			if !isTun(l.name) {
				have.links = append(have.links, link{side: l.side, name: l.name, mtu: l.mtu, mac: l.mac})
			}
		}
	}
	if len(want.veth) == 0 && len(have.veth) > 0 {
		removes = append(removes, op{remove, link{side: hostSide, name: VethHost}})
		have = have.without(hostSide, VethHost).without(gatewaySide, VethGateway)
	}

	planKind(&adds, &removes, have.sysctls, want.sysctls, func(s sysctl) [2]any { return [2]any{s.side, s.path} })
	planKind(&adds, &removes, have.links, want.links, func(l link) [2]any { return [2]any{l.side, l.name} })
	planKind(&adds, &removes, have.addresses, want.addresses, func(a address) address { return a })
	planKind(&adds, &removes, have.neighbors, want.neighbors, func(n neighbor) [3]any { return [3]any{n.side, n.link, n.addr} })
	planKind(&adds, &removes, have.routes, want.routes, func(r route) [4]any { return [4]any{r.side, r.table, r.prefix, r.metric} })
	planKind(&adds, &removes, have.rules, want.rules, func(r rule) rule { return r })
	slices.Reverse(removes)
	return append(adds, removes...)
}

func planKind[K, V comparable](adds, removes *plan, have, want []V, key func(V) K) {
	added, replaced, removed := diff.Of(have, want, key)
	for _, v := range added {
		*adds = append(*adds, op{add, v})
	}
	for _, v := range replaced {
		*adds = append(*adds, op{change, v})
	}
	for _, v := range removed {
		switch v := any(v).(type) {
		case sysctl: // a value has no absence
		case link:
			if !isTun(v.name) {
				*removes = append(*removes, op{remove, v})
			}
		default:
			*removes = append(*removes, op{remove, v})
		}
	}
}

// without is s after the kernel lost a link: what hung on it is gone too.
func (s hostState) without(where side, name string) hostState {
	gone := func(in side, link string) bool { return in == where && link == name }
	s.links = deleted(s.links, func(l link) bool { return gone(l.side, l.name) })
	s.addresses = deleted(s.addresses, func(a address) bool { return gone(a.side, a.link) })
	s.neighbors = deleted(s.neighbors, func(n neighbor) bool { return gone(n.side, n.link) })
	s.routes = deleted(s.routes, func(r route) bool { return gone(r.side, r.link) })
	s.sysctls = deleted(s.sysctls, func(c sysctl) bool { return c.side == where && strings.Contains(c.path, "/"+name+"/") })
	return s
}

func deleted[T any](list []T, is func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(list), is)
}

// Commands prints the plan, one command a line. namespace is a path for
// `nsenter --net=`.
func (p plan) Commands(namespace string) string {
	var b strings.Builder
	for _, o := range p {
		b.WriteString(o.command(namespace))
		b.WriteByte('\n')
	}
	return b.String()
}

func (o op) command(namespace string) string {
	in := func(s side) string {
		if s == gatewaySide {
			return "nsenter --net=" + namespace + " "
		}
		return ""
	}
	switch v := o.object.(type) {
	case veth:
		return fmt.Sprintf("ip link add %s address %s type veth peer name %s address %s netns %s",
			VethHost, macHost, VethGateway, macGateway, namespace)
	case link:
		if o.verb == remove {
			return fmt.Sprintf("%sip link del %s", in(v.side), v.name)
		}
		cmd := fmt.Sprintf("%sip link set %s mtu %d", in(v.side), v.name, v.mtu)
		if v.mac != "" {
			cmd += " address " + v.mac
		}
		if v.up {
			cmd += " up"
		}
		return cmd
	case sysctl:
		return fmt.Sprintf("%ssysctl -w %s=%s", in(v.side), v.path, v.value)
	case address:
		return fmt.Sprintf("%s%s addr %s %s dev %s", in(v.side), ipCommand(v.prefix.Addr()), o.verb, v.prefix, v.link)
	case neighbor:
		return fmt.Sprintf("%s%s neigh %s %s lladdr %s dev %s nud permanent",
			in(v.side), ipCommand(v.addr), o.idempotent(), v.addr, v.mac, v.link)
	case route:
		cmd := fmt.Sprintf("%s%s route %s ", in(v.side), ipCommand(v.prefix.Addr()), o.idempotent())
		if v.unreachable {
			cmd += "unreachable "
		}
		cmd += v.prefix.String()
		if v.via.IsValid() {
			cmd += " via " + v.via.String()
		}
		if v.link != "" && v.more == 0 {
			cmd += " dev " + v.link
		}
		if v.via.Is4() {
			cmd += " onlink"
		}
		if v.table != mainTable {
			cmd += fmt.Sprintf(" table %d", v.table)
		}
		if v.metric != 0 {
			cmd += fmt.Sprintf(" metric %d", v.metric)
		}
		cmd += fmt.Sprintf(" proto %d", RouteProtocol)
		for _, name := range v.shared() {
			cmd += " nexthop"
			if v.prefix.Addr().Is6() {
				cmd += " via " + hopTun6.String()
			}
			cmd += " dev " + name
		}
		return cmd
	case rule:
		return fmt.Sprintf("%s rule %s priority %d lookup %d protocol %d", v.family, o.verb, v.priority, v.table, RouteProtocol)
	}
	return fmt.Sprintf("# %s %v", o.verb, o.object)
}

// idempotent: an addition that finds the object already there has succeeded.
func (o op) idempotent() verb {
	if o.verb == remove {
		return remove
	}
	return change
}

func ipCommand(a netip.Addr) string {
	if a.Is6() {
		return "ip -6"
	}
	return "ip"
}

func comparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}
