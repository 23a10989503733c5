// Package deploy holds the manifests of an installation: the custom resource definitions, the
// rights of each component, what the API server admits from peers and gateways beyond that, and the
// chart that puts them together with the components. Helm reads the chart's folder, in which files/
// leads to the other folders by symbolic links; `isthmus install` renders what is embedded here
// (internal/chart).
package deploy

import "embed"

//go:generate ../internal/tools/schema.sh

// Files has admission/*.yaml, crds/*.yaml and rbac/*.yaml. The manifests say Namespace wherever the
// namespace of the installation belongs. crds/SCHEMA is a number that grows with each change of the
// definitions, and their digest.
//
//go:embed admission/*.yaml crds/*.yaml crds/SCHEMA rbac/*.yaml
var Files embed.FS

// Chart has chart/isthmus, but for the links in its files/.
//
//go:embed chart/isthmus/*.yaml chart/isthmus/*.json all:chart/isthmus/templates
var Chart embed.FS

// ChartValues is chart/isthmus/values.yaml.
//
//go:embed chart/isthmus/values.yaml
var ChartValues string

// Optional has optional/*.yaml and networkpolicy/*.yaml, which only those need who want what is in
// them. The manifests say Namespace like those of Files.
//
//go:embed optional/*.yaml networkpolicy/*.yaml
var Optional embed.FS

// Monitoring has monitoring/alerts.yaml, the rules of a Prometheus, and monitoring/dashboard.json, of a
// Grafana.
//
//go:embed monitoring/alerts.yaml monitoring/dashboard.json
var Monitoring embed.FS

// Namespace is the namespace of an installation, unless another one is chosen.
const Namespace = "isthmus-system"

// PeerObjectsPolicy and PeerTokensPolicy are the admission policies without which no peer gets an
// identity. PeerPriority is the priority level of its requests.
const (
	PeerObjectsPolicy = "isthmus-peer-objects"
	PeerTokensPolicy  = "isthmus-peer-tokens"
	// ManagerServicesPolicy is there only where services are shared.
	ManagerServicesPolicy = "isthmus-manager-services"
	PeerPriority          = "isthmus-peers"
)

// The ServiceAccounts of the components.
const (
	ManagerServiceAccount    = "isthmus-manager"
	GatewayServiceAccount    = "isthmus-gateway"
	RouteAgentServiceAccount = "isthmus-route-agent"
)
