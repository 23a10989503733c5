// Package fabric computes the desired state: it turns a complete snapshot of the objects (Intent)
// into the state that the gateway has to apply (Gateway). All its functions are pure: they do no
// I/O, read no clock, write no log, and do not depend on the order of their input.
//
//	TunnelEndpoint ─ PeerFrom ─┐
//	                           ├─ Attach ─► Intent ─ GatewayFor ─► Gateway
//	NatMapping ─ MappingsFrom ─┘               │                     ├─ Peers: WireGuard peer, NAT rules, probe
//	                                           └► []Problem          └─ RoutePrefixes
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
// All functions may be called concurrently. Arguments are only read; results share no memory with
// them.
package fabric
