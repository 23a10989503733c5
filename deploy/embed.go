// Package deploy holds the manifests of an installation: the custom resource definitions, the
// rights of each component, the admission policies for peers and gateways, and the chart that
// combines them with the components. Helm reads the chart's folder, in which files/ has symbolic
// links to the other folders. `isthmus install` renders the embedded files (internal/chart).
package deploy

import "embed"

//go:generate ../internal/tools/schema.sh

// Files has admission/*.yaml, crds/*.yaml and rbac/*.yaml. The manifests use the namespace
// isthmus-system. Templates of the chart replace it by the namespace of the installation.
// crds/SCHEMA has two lines: a number that grows with each change of the definitions, and their
// digest.
//
//go:embed admission/*.yaml crds/*.yaml crds/SCHEMA rbac/*.yaml
var Files embed.FS

// Chart has chart/isthmus without the links in files/.
//
//go:embed chart/isthmus/*.yaml chart/isthmus/*.json all:chart/isthmus/templates
var Chart embed.FS

// ChartValues is chart/isthmus/values.yaml.
//
//go:embed chart/isthmus/values.yaml
var ChartValues string

// Optional has optional/*.yaml and networkpolicy/*.yaml, which only installations with certain
// features need. Like those in Files, they use the namespace isthmus-system.
//
//go:embed optional/*.yaml networkpolicy/*.yaml
var Optional embed.FS

// Monitoring has monitoring/alerts.yaml, rules for Prometheus, and monitoring/dashboard.json, a
// dashboard for Grafana.
//
//go:embed monitoring/alerts.yaml monitoring/dashboard.json
var Monitoring embed.FS

// Namespace is the default namespace of an installation.
const Namespace = "isthmus-system"

// A peer gets an identity only if the admission policies PeerObjectsPolicy and PeerTokensPolicy
// exist. PeerPriority is the priority level of peers' requests.
const (
	PeerObjectsPolicy = "isthmus-peer-objects"
	PeerTokensPolicy  = "isthmus-peer-tokens"
	// ManagerServicesPolicy exists only if services are shared.
	ManagerServicesPolicy = "isthmus-manager-services"
	PeerPriority          = "isthmus-peers"
)

// The ServiceAccounts of the components.
const (
	ManagerServiceAccount    = "isthmus-manager"
	GatewayServiceAccount    = "isthmus-gateway"
	RouteAgentServiceAccount = "isthmus-route-agent"
)
