// Package kernel has values for everything that Isthmus keeps in the network namespaces of a node.
// It defines the objects and the commands that make and remove them, the names and numbers by which
// we recognise our objects, and the plan that turns one State into another. It does no I/O, and its
// functions may be called concurrently. Package fabric computes wanted States; the route agent and
// the gateway apply them through package rtnl.
//
//	fabric.NodeFor, fabric.GatewayHostFor ─► State ─┐
//	fabric.GatewayPodFor ───────────────────────────┤
//	                                                ├─ PlanFor ─► Plan ─► rtnl, one operation after another
//	rtnl reads our existing objects ───────► State ─┘
package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Namespace is one of the two network namespaces that a program manages.
type Namespace uint8

// The namespaces.
const (
	Host  Namespace = iota // the namespace of the process
	Inner                  // the gateway's own namespace, which has no name
)

// State is the actual or the desired state of one owner's objects. Objects that are missing from a
// wanted State are removed. The order of the fields is the order of additions.
type State struct {
	Bridges   []Bridge    // none or one
	Filters   []Filter    // none or one
	SourceNAT []SourceNAT // none or one
	Accepts   []Accept    // wanted: none, or one without a Chain for all chains that need it
	Devices   []Device
	Settings  []Setting
	Links     []Link
	Addresses []Address
	FDB       []FDBEntry
	Neighbors []Neighbor
	Routes    []Route
	Rules     []Rule
}

// Closed returns the routes and rules of a node's state that refuse all packets to and from peers.
// It gives the rules a priority before all our other rules.
func (s State) Closed() (closed State) {
	for _, r := range s.Routes {
		if r.Table == RefuseTable || r.Table == GuardTable {
			closed.Routes = append(closed.Routes, r)
		}
	}
	for _, r := range s.Rules {
		if r.Table == RefuseTable {
			r.Priority = OverlayRulePriority
			closed.Rules = append(closed.Rules, r)
			closed.Rules = append(closed.Rules, Rule{V6: r.V6, Priority: OverlayRulePriority, Iif: VethHost, Table: GuardTable, Protocol: r.Protocol})
		}
	}
	return closed
}

// The kinds of objects. Each is a comparable value, so == compares objects.
type (
	// Device is one of our devices, with its immutable properties. If neither Peer nor VXLAN is
	// set, it is a device of another kind with one of our names.
	Device struct {
		In    Namespace
		Name  string
		Peer  string // the other end of a veth pair, in the Inner namespace
		VXLAN VXLAN
	}
	// Setting is a value below /proc/sys.
	Setting struct {
		In          Namespace
		Path, Value string
		Optional    bool // an error of writing it is ignored if /proc/sys is read-only
	}
	// Link has the mutable properties of a device.
	Link struct {
		In   Namespace
		Name string
		MAC  MAC // zero: the device has no MAC address
		MTU  int
		Up   bool
	}
	// Address is an address of a device.
	Address struct {
		In     Namespace
		Dev    string
		Prefix netip.Prefix
	}
	// FDBEntry maps a MAC address to the underlay address to which a VXLAN device sends.
	FDBEntry struct {
		In  Namespace
		Dev string
		MAC MAC
		Dst netip.Addr
	}
	// Neighbor maps an address on a device to its MAC address, permanently.
	Neighbor struct {
		In   Namespace
		Dev  string
		Addr netip.Addr
		MAC  MAC
	}
	// Route is a route in a table.
	Route struct {
		In       Namespace
		Prefix   netip.Prefix
		Type     RouteType
		Via      netip.Addr // zero: the destination is on the device's link
		Src      netip.Addr // source of the node's own packets that are not bound to an address; zero: the kernel chooses
		Dev      string     // name of the device, or the result of Devs; only for Unicast
		Table    int
		Metric   int
		Protocol int
	}
	// Rule is a policy rule. Zero fields match everything.
	Rule struct {
		V6       bool
		Priority int
		Iif      string // incoming device
		From, To netip.Prefix
		Table    int
		Protocol int
	}
)

// VXLAN has the properties that distinguish one VXLAN device from another.
type VXLAN struct {
	ID       uint32
	Port     uint16
	Local    netip.Addr
	Learning bool
	// UDPChecksum is true if outer packets have a checksum. They need none (RFC 7348, section 5).
	// If a CNI translates outer packets whose inner checksum is not computed yet, Linux corrupts
	// the outer one.
	UDPChecksum bool
}

// MAC is an Ethernet address.
type MAC [6]byte

// String returns six hexadecimal octets with colons.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// RouteType is the way in which a Route handles a packet.
type RouteType uint8

// The types of routes.
const (
	Unicast     RouteType = iota // the packet leaves by Dev
	Unreachable                  // the kernel drops the packet and sends an ICMP error
	Throw                        // the next rule of policy routing decides
)

// Devs returns the value of Route.Dev for a multipath route over several devices. The kernel
// distributes flows over these devices.
func Devs(names ...string) string {
	return strings.Join(slices.Sorted(slices.Values(names)), " ")
}

// An Object is one of the kinds above. It prints as the command that makes or removes it. inner is
// the path of the Inner namespace for nsenter(1).
type Object interface {
	command(remove bool, inner string) string
}

// String prints the state as commands, one per line, in the order of execution.
func (s State) String() string { return PlanFor(State{}, s).Commands("") }

func (d Device) command(remove bool, inner string) string {
	switch {
	case remove:
		return d.In.enter(inner) + "ip link del " + d.Name
	case d.Peer != "":
		return fmt.Sprintf("ip link add %s type veth peer name %s netns %s", d.Name, d.Peer, inner)
	}
	learning := "nolearning"
	if d.VXLAN.Learning {
		learning = "learning"
	}
	checksum := "noudpcsum"
	if d.VXLAN.UDPChecksum {
		checksum = "udpcsum"
	}
	return fmt.Sprintf("%sip link add %s type vxlan id %d local %v dstport %d %s %s",
		d.In.enter(inner), d.Name, d.VXLAN.ID, d.VXLAN.Local, d.VXLAN.Port, learning, checksum)
}

func (s Setting) command(_ bool, inner string) string {
	return s.In.enter(inner) + "sysctl -w " + s.Path + "=" + s.Value
}

func (l Link) command(_ bool, inner string) string {
	c := l.In.enter(inner) + "ip link set " + l.Name
	if l.MAC != (MAC{}) {
		c += " address " + l.MAC.String()
	}
	state := "down"
	if l.Up {
		state = "up"
	}
	return fmt.Sprintf("%s mtu %d %s", c, l.MTU, state)
}

func (a Address) command(remove bool, inner string) string {
	c := fmt.Sprintf("%s%s addr %s %v dev %s", a.In.enter(inner), ip(a.Prefix.Addr().Is6()), verb(remove), a.Prefix, a.Dev)
	if !remove {
		c += " noprefixroute" // the plan adds the route to the network itself, with our protocol number
	}
	return c
}

func (f FDBEntry) command(remove bool, inner string) string {
	c := fmt.Sprintf("%sbridge fdb %s %v dev %s dst %v self", f.In.enter(inner), verb(remove), f.MAC, f.Dev, f.Dst)
	if !remove {
		c += " permanent"
	}
	return c
}

func (n Neighbor) command(remove bool, inner string) string {
	c := fmt.Sprintf("%s%s neigh %s %v", n.In.enter(inner), ip(n.Addr.Is6()), verb(remove), n.Addr)
	if remove {
		return c + " dev " + n.Dev
	}
	return fmt.Sprintf("%s lladdr %v dev %s nud permanent", c, n.MAC, n.Dev)
}

func (r Route) command(remove bool, inner string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s%s route %s ", r.In.enter(inner), ip(r.Prefix.Addr().Is6()), verb(remove))
	b.WriteString([...]string{Unicast: "", Unreachable: "unreachable ", Throw: "throw "}[r.Type])
	b.WriteString(r.Prefix.String())
	hop := ""
	if r.Via.IsValid() {
		hop = " via " + r.Via.String()
	}
	devs := strings.Fields(r.Dev)
	if len(devs) == 1 {
		b.WriteString(hop + " dev " + r.Dev)
		if r.Via.Is4() {
			b.WriteString(" onlink")
		}
	}
	if r.Src.IsValid() {
		b.WriteString(" src " + r.Src.String())
	}
	if r.Table != MainTable {
		fmt.Fprintf(&b, " table %d", r.Table)
	}
	if r.Metric != 0 {
		fmt.Fprintf(&b, " metric %d", r.Metric)
	}
	fmt.Fprintf(&b, " proto %d", r.Protocol)
	if len(devs) > 1 {
		for _, dev := range devs {
			b.WriteString(" nexthop" + hop + " dev " + dev)
		}
	}
	return b.String()
}

func (r Rule) command(remove bool, _ string) string {
	verb := "add"
	if remove {
		verb = "del"
	}
	c := fmt.Sprintf("%s rule %s priority %d", ip(r.V6), verb, r.Priority)
	if r.From.IsValid() {
		c += fmt.Sprintf(" from %v", r.From)
	}
	if r.To.IsValid() {
		c += fmt.Sprintf(" to %v", r.To)
	}
	if r.Iif != "" {
		c += " iif " + r.Iif
	}
	return c + fmt.Sprintf(" lookup %d protocol %d", r.Table, r.Protocol)
}

func (n Namespace) enter(inner string) string {
	if n == Inner {
		return "nsenter --net=" + inner + " "
	}
	return ""
}

func ip(v6 bool) string {
	if v6 {
		return "ip -6"
	}
	return "ip"
}

// verb returns the verb of ip(8). An addition succeeds if the object exists already.
func verb(remove bool) string {
	if remove {
		return "del"
	}
	return "replace"
}
