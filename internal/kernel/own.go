package kernel

// Everything that Isthmus owns in a kernel. Anything else is foreign: no decision reads it, nothing
// changes or removes it. None of these is Liqo's (liqo.vxlan, 18952, 4879), so that both can run on
// one node during a migration.
const (
	OverlayDevice = "isthmus.vxlan" // VXLAN between the nodes of one cluster
	OverlayID     = 4200            // its VNI
	OverlayPort   = 4800            // its UDP port

	VethHost    = "isthmus.host" // the veth's end in the host's namespace
	VethGateway = "isthmus.gw"   // its end in the gateway's namespace
	TunPrefix   = "isthmus"      // with the number of a tunnel, its TUN in the gateway's namespace

	MainTable    = 254  // in the host's namespace among foreign routes
	GatewayTable = 4200 // the gateway's routes to remote networks
	NodeTable    = 4201 // the route agent's, or its routes to pods on other nodes
	RefuseTable  = 4202 // what no packet may leave for but by the tables above
	GuardTable   = 4203 // refuses everything, see GuardRulePriority

	GatewayProtocol = 71 // RTA_PROTOCOL and FRA_PROTOCOL of everything that a gateway adds
	NodeProtocol    = 72 // and that a route agent adds

	// Priorities of rules. CNIs have some that decide for all that pods send, before the main table:
	// AWS's VPC CNI 512, 1024 and 1536. What they send to peers would leave by them in the clear, so
	// that ours come before; and after those up to 111 of Cilium, which moves the look at the
	// node's own addresses from 0 to 100.
	//
	// What comes out of the overlay goes into the gateway, if there is one here, and never back
	// into the overlay: two nodes that disagree for a moment about where the gateway is do not play
	// ping-pong.
	OverlayRulePriority = 418
	// The agent's rules come before the gateway's, because a gateway that was killed leaves routes
	// behind that refuse traffic. They are right until another gateway is active on another node;
	// from then on they must not be asked.
	NodeRulePriority    = 419
	GatewayRulePriority = 420
	// What comes from a peer out of a gateway on our node is refused while the agent does not know
	// that the gateway is here.
	GuardRulePriority = 421
	// Whatever is in none of these tables is refused before the main table is asked.
	RefuseRulePriority = 422

	// UnreachableMetric is worse than that of every route with a device. Routes without one outlive
	// the device: traffic for a peer is then refused instead of leaving by the default route in the
	// clear.
	UnreachableMetric = 420000
)

// An Owner is one of the two programs that have objects in a kernel.
type Owner struct {
	Name     string // for people
	Lock     string // a table of nftables that one process of the kind has per network namespace
	Protocol int    // of all its routes and rules
	Filter   bool   // whether it has one
	NAT      bool   // whether it has a SourceNAT, Accepts and a Bridge
	Devices  []Place
	Tables   [2][]int // where it has routes, by Namespace
}

// A Place is where a device is, or may be.
type Place struct {
	In   Namespace
	Name string
}

// The owners. The TUNs are not among the gateway's devices, since they go with their file
// descriptors.
var (
	RouteAgent = Owner{"route agent", "isthmus_route_agent", NodeProtocol, true, true,
		[]Place{{Host, OverlayDevice}}, [2][]int{Host: {MainTable, NodeTable, RefuseTable, GuardTable}}}
	// Gateway shares the network of its host, GatewayPod has that of its Pod and nothing else.
	Gateway = Owner{"gateway", "isthmus_gateway", GatewayProtocol, false, false,
		[]Place{{Host, VethHost}, {Inner, VethGateway}}, [2][]int{Host: {GatewayTable}, Inner: {MainTable}}}
	GatewayPod = Owner{"gateway", "isthmus_gateway", GatewayProtocol, true, false,
		[]Place{{Host, OverlayDevice}}, [2][]int{Host: {GatewayTable, NodeTable, RefuseTable}}}
)

// OwnsDevice reports whether a device of the host's namespace is one of ours, by its name.
func OwnsDevice(name string) bool {
	return name == OverlayDevice || name == VethHost
}
