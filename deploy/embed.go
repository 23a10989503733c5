// Package deploy holds the manifests of an installation: the custom resource
// definitions and the rights of each component. `isthmus install` applies them.
package deploy

import "embed"

// Files has crds/*.yaml and rbac/*.yaml. The manifests of rbac say Namespace
// wherever the namespace of the installation belongs.
//
//go:embed crds/*.yaml rbac/*.yaml
var Files embed.FS

// Namespace is the namespace of an installation, unless another one is chosen.
const Namespace = "isthmus-system"

// The ServiceAccounts of the components.
const (
	ManagerServiceAccount    = "isthmus-manager"
	GatewayServiceAccount    = "isthmus-gateway"
	RouteAgentServiceAccount = "isthmus-route-agent"
)
