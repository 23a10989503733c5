// Package fabric says what should be: it turns a complete snapshot of wishes (Intent) into what the
// gateway has to make true (Gateway). Everything in it is a function of its arguments; nothing does
// I/O, reads a clock or logs, and the input order never matters.
//
//	TunnelEndpoint ─ PeerFrom ─┐
//	                           ├─ Attach ─► Intent ─ GatewayFor ─► Gateway
//	NatMapping ─ MappingsFrom ─┘               │                     ├─ Peers: WireGuard peer, NAT rules, probe
//	                                           └► []Problem          └─ RoutePrefixes
//
// Liqo's JSON ends in liqo.go: the literal "None", the map of strings called backend_config and
// addresses in text form are read and written there only. Inside, addresses are netip values and
// the zero netip.Prefix means absent.
//
// The notation in comments is that of Liqo's fabric, seen from our cluster A with a peer B: Pa and
// Xa are our PodCIDR and ExternalCIDR, Pa@B and Xa@B the same two as B sees them, Pb@A and Xb@A
// those of B as we see them.
//
// Whatever is refused is a Problem that names the object, the field, what was found and what is
// wanted. A refused peer or mapping never stops the others.
//
// All functions may be called concurrently. Arguments are only read; results share no memory with
// them.
package fabric
