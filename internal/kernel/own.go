package kernel

// Names and numbers of everything that Isthmus owns in a kernel. All other objects are foreign, and
// Isthmus does not change or remove them. None of these values is one of Liqo's (liqo.vxlan, 18952,
// 4879), so that both can run on one node during a migration.
const (
	OverlayDevice = "isthmus.vxlan" // VXLAN between the nodes of one cluster
	OverlayID     = 4200            // VNI of OverlayDevice
	OverlayPort   = 4800            // UDP port of OverlayDevice

	VethHost    = "isthmus.host" // the veth's end in the host's namespace
	VethGateway = "isthmus.gw"   // the veth's end in the gateway's namespace
	TunPrefix   = "isthmus"      // prefix of a TUN in the gateway's namespace; the tunnel's number follows

	MainTable    = 254  // the kernel's table; in the host's namespace it also has foreign routes
	GatewayTable = 4200 // the gateway's routes to remote networks
	NodeTable    = 4201 // the route agent's routes to remote networks and to pods on other nodes
	RefuseTable  = 4202 // refuses packets for which the tables above have no route
	GuardTable   = 4203 // refuses everything; see GuardRulePriority

	GatewayProtocol = 71 // RTA_PROTOCOL and FRA_PROTOCOL of everything that a gateway adds
	NodeProtocol    = 72 // RTA_PROTOCOL and FRA_PROTOCOL of everything that a route agent adds

	// Priorities of rules. Some CNIs have rules for all packets of pods before the main table, such
	// as AWS's VPC CNI at 512, 1024 and 1536. These would send packets for peers in the clear, so
	// our rules come before them. Our rules come after Cilium's rules, whose priorities go up to
	// 111. Cilium also moves the lookup of local addresses from 0 to 100.
	//
	// Packets from the overlay go into the gateway, if one is on our node, and never back into the
	// overlay. Otherwise two nodes that briefly disagree about the gateway's location could send
	// packets to and fro.
	OverlayRulePriority = 418
	// The agent's rules come before the gateway's, because a gateway that was killed leaves
	// refusing routes behind. Once another gateway is active on another node, these routes must not
	// be consulted.
	NodeRulePriority    = 419
	GatewayRulePriority = 420
	// The agent may not have noticed yet that a gateway is on our node. Until it has, packets that
	// this gateway received from a peer are refused.
	GuardRulePriority = 421
	// If the tables above have no route for a packet to a peer, it is refused before the main table
	// is consulted.
	RefuseRulePriority = 422

	// UnreachableMetric is higher than the metric of every route with a device. Unreachable routes
	// remain when the device disappears. Traffic for a peer is then refused instead of leaving by
	// the default route in the clear.
	UnreachableMetric = 420000
)

// An Owner describes the objects of one of the two programs that have objects in a kernel.
type Owner struct {
	Name     string // for messages
	Lock     string // name of the nftables table that is the lock: only one process per network namespace can have it
	Protocol int    // protocol number of all its routes and rules
	Filter   bool   // the program has a Filter
	NAT      bool   // the program has a SourceNAT, Accepts and a Bridge
	Devices  []Place
	Tables   [2][]int // tables with its routes, by Namespace
}

// A Place identifies a device by namespace and name, whether it exists or not.
type Place struct {
	In   Namespace
	Name string
}

// The owners. The gateway's Devices do not include the TUNs, which disappear when their file
// descriptors are closed.
var (
	RouteAgent = Owner{"route agent", "isthmus_route_agent", NodeProtocol, true, true,
		[]Place{{Host, OverlayDevice}}, [2][]int{Host: {MainTable, NodeTable, RefuseTable, GuardTable}}}
	// Gateway is a gateway on the host network. GatewayPod is a gateway in the network namespace of
	// its Pod.
	Gateway = Owner{"gateway", "isthmus_gateway", GatewayProtocol, false, false,
		[]Place{{Host, VethHost}, {Inner, VethGateway}}, [2][]int{Host: {GatewayTable}, Inner: {MainTable}}}
	GatewayPod = Owner{"gateway", "isthmus_gateway", GatewayProtocol, true, false,
		[]Place{{Host, OverlayDevice}}, [2][]int{Host: {GatewayTable, NodeTable, RefuseTable}}}
)

// OwnsDevice reports whether a device name in the host's namespace is ours.
func OwnsDevice(name string) bool {
	return name == OverlayDevice || name == VethHost
}
