// Package fabric computes the desired state that the other packages apply. From complete snapshots
// of Kubernetes objects, it computes the state of a gateway or a node. From two NetworkConfigs, it
// computes a TunnelEndpoint. It does no I/O, reads no clock and writes no log. The order of its
// input does not matter.
//
//	TunnelEndpoint ─ PeerFrom ─┐
//	                           ├─ Attach ─► Intent ─ GatewayFor ─► Gateway
//	NatMapping ─ MappingsFrom ─┘               │                     └─ Peers: WireGuard peer, networks, NAT rules, probe
//	                                           └► []Problem
//
//	Gateway.Peers ─ GatewayHostFor, or GatewayPodFor in a Pod ─► kernel.State of the gateway
//	NodeIntent ─ NodeFor ─► kernel.State of a node
//	two NetworkConfigs ─ TunnelEndpointFor ─► TunnelEndpoint
//
// Only liqo.go reads and writes the oddities of Liqo's JSON: the literal "None", the map of strings
// backend_config, and addresses as text. Elsewhere addresses are netip values, and the zero
// netip.Prefix means absent.
//
// An ExternalCIDR is a network whose addresses stand for endpoints that are not pods. Comments use
// Liqo's notation for our cluster A and a peer B. Pa and Xa are the PodCIDR and the ExternalCIDR of
// A. Pa@B and Xa@B are the networks that B uses for Pa and Xa. Pb, Xb, Pb@A and Xb@A are the same
// with A and B exchanged.
//
// A refusal is a Problem that names the object, the field, the value found and the value expected.
// A refused peer or mapping never affects the others.
//
// Functions may be called concurrently. Results may share memory with arguments, so callers must
// modify neither. If a function modifies its argument, its comment states this. GatewayDecider,
// Decider, PodDecider and PodPlaces keep state between calls and are not safe for concurrent use.
package fabric
