// Package v1alpha1 holds the kinds of the API group net.liqo.io/v1alpha1: NetworkConfig,
// TunnelEndpoint, NatMapping and IpamStorage.
//
// The group belongs to Liqo. Names, JSON fields, defaults and printer columns are those of Liqo
// v0.9.4. Liqo v0.6 to v0.10 exchange the same NetworkConfig. Therefore a cluster with Liqo and a
// cluster with Isthmus can be peered, and each accepts the output of `kubectl get -o yaml` from the
// other. The oddities stay in this package: the literal "None" where a network is not remapped,
// decimal ports in strings, and "backend_config" in snake case. Package fabric turns them into
// typed values.
//
//	NetworkConfig (ours) ──replicated──► peer     peer answers in the status
//	NetworkConfig (peer's) ◄─replicated── peer    we answer in the status
//	        └── both, answered ──► TunnelEndpoint ──► gateway, route agents
//	                               NatMapping     ──► gateway
//	IpamStorage: all allocated networks
//
// Our schemas refuse values that no gateway could apply, because a peer writes the NetworkConfig.
// Liqo's schemas only demand that fields are present. Everything that a real Liqo writes is valid
// here. IPv6 is valid too, although Liqo's own networks are IPv4. The kinds that have a status also
// have status.conditions, which Liqo lacks; it is omitted when empty.
//
// The rules use the IP and CIDR functions of CEL, which API servers have since Kubernetes 1.31.
// They check the form of a value. Package fabric and the manager check whether the value conflicts
// with the networks of this cluster and of other peers. A program that reads these objects from
// files has to check the form itself, because no API server has checked them.
// +kubebuilder:object:generate=true
// +groupName=net.liqo.io
package v1alpha1

//go:generate go -C ../../.. tool -modfile=internal/tools/go.mod controller-gen object crd paths=./apis/net/v1alpha1 output:crd:dir=deploy/crds
