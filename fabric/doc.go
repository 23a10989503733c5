// Package fabric decides what the other packages apply. It turns complete snapshots of Kubernetes
// objects into the desired state of a gateway or a node, and two NetworkConfigs into a
// TunnelEndpoint. It does no I/O, reads no clock and writes no log, and the order of its input does
// not matter.
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
// The notation in comments is that of Liqo's fabric, seen from our cluster A with a peer B: Pa and
// Xa are our PodCIDR and ExternalCIDR, Pa@B and Xa@B the same two as B sees them, Pb@A and Xb@A
// those of B as we see them.
//
// A refusal is a Problem that names the object, the field, the value found and the value expected.
// A refused peer or mapping never affects the others.
//
// Functions may be called concurrently. Results may share memory with arguments, so callers modify
// neither. Functions and methods that work in place say so. GatewayDecider, Decider, PodDecider and
// PodPlaces keep state between calls and are not safe for concurrent use.
package fabric
