// Package deploy holds the manifests of an installation: the custom resource definitions, the
// rights of each component, and what the API server admits from peers and gateways beyond that.
// `isthmus install` applies them.
package deploy

import "embed"

// Files has admission/*.yaml, crds/*.yaml and rbac/*.yaml. The manifests say Namespace wherever the
// namespace of the installation belongs.
//
//go:embed admission/*.yaml crds/*.yaml rbac/*.yaml
var Files embed.FS

// Optional has optional/*.yaml, which only those need who want what is in them. The manifests say
// Namespace like those of Files.
//
//go:embed optional/*.yaml
var Optional embed.FS

// Namespace is the namespace of an installation, unless another one is chosen.
const Namespace = "isthmus-system"

// PeerObjectsPolicy and PeerTokensPolicy are the admission policies without which no peer gets an
// identity. PeerPriority is the priority level of its requests.
const (
	PeerObjectsPolicy = "isthmus-peer-objects"
	PeerTokensPolicy  = "isthmus-peer-tokens"
	PeerPriority      = "isthmus-peers"
)

// The ServiceAccounts of the components.
const (
	ManagerServiceAccount    = "isthmus-manager"
	GatewayServiceAccount    = "isthmus-gateway"
	RouteAgentServiceAccount = "isthmus-route-agent"
)
