// Package v1alpha1 holds the kinds of the API group isthmus.net/v1alpha1, which Liqo does not have:
// Peering, NodeNetworks, NetworkAllocation and PeerServices. The manager also writes PeerServices
// to other clusters. Objects of the other three kinds never leave their cluster.
//
// +kubebuilder:object:generate=true
// +groupName=isthmus.net
package v1alpha1

//go:generate go -C ../../.. tool -modfile=internal/tools/go.mod controller-gen object crd paths=./apis/isthmus/v1alpha1 output:crd:dir=deploy/crds
