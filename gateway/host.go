package gateway

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/internal/diff"
)

// Everything the gateway owns in the kernel. Anything else is foreign and is
// never read for a decision, changed or removed. None of these is Liqo's, so
// both can run on one node during a migration.
const (
	TunName     = "isthmus0"     // TUN device, gateway namespace
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
		table       int
		metric      int
	}
	rule struct {
		family   string // "ip" or "ip -6", as the command wants it
		priority int
		table    int
	}
)

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

// wantHost says what both namespaces should hold so that packets for the remote
// prefixes reach the TUN and everything else that leaves the TUN reaches the
// host. The order of remote does not matter; each occurs once.
//
// The veth has the MTU of the tunnel at both ends. A pod's packet that is too
// big is then refused by the host, whose answer (fragmentation needed, packet
// too big) reaches the pod from an address it knows; a superpacket passes, since
// the kernel asks for the size of its segments. One that fits this MTU, which is
// the largest of all peers, but not its own peer's, is answered by the engine. A
// packet from a peer with a larger tunnel is answered by the gateway's namespace
// like one from a pod, so that the sender learns the smaller of the two.
func wantHost(remote []netip.Prefix, mtu int) hostState {
	remote = slices.Clone(remote)
	slices.SortFunc(remote, comparePrefix)
	six := slices.ContainsFunc(remote, func(p netip.Prefix) bool { return p.Addr().Is6() })

	s := hostState{
		veth: []veth{{}},
		links: []link{
			{side: hostSide, name: VethHost, mtu: mtu, mac: macHost, up: true},
			{side: gatewaySide, name: VethGateway, mtu: mtu, mac: macGateway, up: true},
			{side: gatewaySide, name: TunName, mtu: mtu, up: true},
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
	if six {
		s.neighbors = append(s.neighbors,
			neighbor{hostSide, VethHost, hopGateway6, macGateway},
			neighbor{gatewaySide, VethGateway, hopHost6, macHost})
		s.routes = append(s.routes, route{side: gatewaySide, prefix: netip.MustParsePrefix("::/0"),
			via: hopHost6, link: VethGateway, table: mainTable, metric: metric6})
		s.rules = append(s.rules, rule{"ip -6", RulePriority, RouteTable})
		s.addresses = append(s.addresses, address{gatewaySide, VethGateway, netip.PrefixFrom(router6, 128)})
	}
	for _, p := range remote {
		hop, metric := hopGateway4, metric4
		if p.Addr().Is6() {
			hop, metric = hopGateway6, metric6
		}
		// Inside first: a moment with the host's route alone would be a loop.
		s.routes = append(s.routes,
			route{side: gatewaySide, prefix: p, link: TunName, table: mainTable, metric: metric},
			route{side: hostSide, prefix: p, via: hop, link: VethHost, table: RouteTable, metric: metric},
			route{side: hostSide, prefix: p, unreachable: true, table: RouteTable, metric: unreachableMetric})
	}
	s.sysctls = wantSysctls(six)
	return s
}

// wantSysctls: the gateway's namespace forwards, believes the engine about
// sources (reverse path filtering would drop a peer's packet for another peer's
// mapped endpoint), and never tells a peer of a better way (a packet may leave
// by the TUN it came from). The devices themselves say nothing over IPv6 that
// nobody asked for, because the tunnel would count it as dropped.
func wantSysctls(six bool) []sysctl {
	s := []sysctl{{gatewaySide, "net/ipv4/ip_forward", "1"}}
	for _, name := range []string{"all", VethGateway, TunName} {
		s = append(s,
			sysctl{gatewaySide, "net/ipv4/conf/" + name + "/rp_filter", "0"},
			sysctl{gatewaySide, "net/ipv4/conf/" + name + "/send_redirects", "0"})
	}
	for _, name := range []string{VethGateway, TunName} {
		s = append(s, sysctl{gatewaySide, "net/ipv6/conf/" + name + "/addr_gen_mode", "1"})
	}
	if six {
		s = append(s, sysctl{gatewaySide, "net/ipv6/conf/all/forwarding", "1"})
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
			if l.name != TunName {
				adds = append(adds, op{remove, l})
				have = have.without(l.side, l.name)
			}
		}
		adds = append(adds, op{add, veth{}})
		for _, l := range want.links {
			if l.name != TunName {
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
			if v.name != TunName { // goes with its file descriptor
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
		if v.link != "" {
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
		return cmd + fmt.Sprintf(" proto %d", RouteProtocol)
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
