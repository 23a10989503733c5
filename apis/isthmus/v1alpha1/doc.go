// Package v1alpha1 holds the kinds of the API group isthmus.net/v1alpha1, which are ours alone:
// Peering, NodeNetworks, NetworkAllocation and PeerServices. Of what travels between clusters only
// PeerServices are here, the rest is in net.liqo.io.
//
// +kubebuilder:object:generate=true
// +groupName=isthmus.net
package v1alpha1

//go:generate go -C ../../.. tool -modfile=internal/tools/go.mod controller-gen object crd paths=./apis/isthmus/v1alpha1 output:crd:dir=deploy/crds
