package v1alpha1

import (
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Bounds of the services that one cluster exports to another.
const (
	// PeerServicesShards is the number of PeerServices in a tenant namespace. A hash of a service's
	// namespace and name selects its PeerServices.
	PeerServicesShards = 16
	// MaxExportedServices is the maximum number of services in one PeerServices.
	MaxExportedServices = 128
	// MaxExportedEndpoints is the maximum number of endpoints in one PeerServices.
	MaxExportedEndpoints = 2500
	// MaxSubsets is the maximum number of subsets of a service.
	MaxSubsets = 8
)

// DNSLabel is one label of a DNS name (RFC 1123).
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:Pattern=`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`
type DNSLabel = string

// UTCTime is a time in UTC, such as 2026-11-27T12:00:00Z. Strings sort in the order of the times.
// It is not a metav1.Time, because an API server accepts values of the format date-time that Go
// cannot parse. With one such value, no program could list the objects of this kind.
// +kubebuilder:validation:Format=date-time
// +kubebuilder:validation:Pattern=`^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$`
type UTCTime = string

// UTCTimeOf returns t without fractions of a second.
func UTCTimeOf(t time.Time) UTCTime { return t.UTC().Format(time.RFC3339) }

// EndpointAddress is the IP address of one endpoint. A pattern checks it, because there may be too
// many addresses for a CEL rule. The importer parses it.
// +kubebuilder:validation:MaxLength=39
// +kubebuilder:validation:Pattern=`^([0-9]{1,3}([.][0-9]{1,3}){3}|[0-9a-f]*:[0-9a-f:]*)$`
type EndpointAddress = string

// MetadataValue is the value of an exported label or annotation.
// +kubebuilder:validation:MaxLength=512
type MetadataValue string

// PeerServicesSpec lists exported services. The exporter's manager writes it.
type PeerServicesSpec struct {
	// Services are the exported services in this object, which is one shard of all exports.
	// +kubebuilder:validation:MaxItems=128
	// +listType=map
	// +listMapKey=namespace
	// +listMapKey=name
	// +optional
	Services []ExportedService `json:"services,omitempty"`
}

// ExportedService describes a Service that has a ServiceExport, with its ports and addresses in the
// exporting cluster. It is atomic: otherwise metadata.managedFields would make a full object larger
// than the limit for a peer.
// +structType=atomic
type ExportedService struct {
	// Namespace of the Service.
	Namespace DNSLabel `json:"namespace"`
	// Name of the Service.
	Name DNSLabel `json:"name"`
	// Since is the creation time of the service's ServiceExport. If two clusters export the same
	// service with different properties, the properties of the oldest ServiceExport apply.
	Since UTCTime `json:"since"`
	// Type is ClusterSetIP or Headless.
	// +kubebuilder:validation:Enum=ClusterSetIP;Headless
	Type string `json:"type"`
	// Ports are the ports of the Service.
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	// +optional
	Ports []ExportedPort `json:"ports,omitempty"`
	// SessionAffinity is the spec.sessionAffinity of the Service.
	// +kubebuilder:validation:Enum=None;ClientIP
	// +optional
	SessionAffinity string `json:"sessionAffinity,omitempty"`
	// SessionAffinitySeconds is the session affinity timeout of the Service
	// (spec.sessionAffinityConfig.clientIP.timeoutSeconds). 0 means the default of Kubernetes,
	// three hours.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=86400
	// +optional
	SessionAffinitySeconds int32 `json:"sessionAffinitySeconds,omitempty"`
	// InternalTrafficPolicy is the spec.internalTrafficPolicy of the Service.
	// +kubebuilder:validation:Enum=Cluster;Local
	// +optional
	InternalTrafficPolicy string `json:"internalTrafficPolicy,omitempty"`
	// TrafficDistribution is the spec.trafficDistribution of the Service.
	// +kubebuilder:validation:Enum=PreferClose;PreferSameZone;PreferSameNode
	// +optional
	TrafficDistribution string `json:"trafficDistribution,omitempty"`
	// Labels are the exportedLabels of the ServiceExport.
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.size() <= 317)",message="keys have at most 317 characters",reason=FieldValueInvalid
	// +optional
	Labels map[string]MetadataValue `json:"labels,omitempty"`
	// Annotations are the exportedAnnotations of the ServiceExport.
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.size() <= 317)",message="keys have at most 317 characters",reason=FieldValueInvalid
	// +optional
	Annotations map[string]MetadataValue `json:"annotations,omitempty"`
	// Subsets are the endpoints, grouped by the ports on which they listen.
	// +kubebuilder:validation:MaxItems=8
	// +listType=atomic
	// +optional
	Subsets []EndpointSubset `json:"subsets,omitempty"`
}

// Equal reports whether all fields of s and o are equal. reflect.DeepEqual would take 20 ms with
// 20,000 endpoints.
func (s *ExportedService) Equal(o *ExportedService) bool {
	return s.Namespace == o.Namespace && s.Name == o.Name && s.Since == o.Since && s.Type == o.Type &&
		s.SessionAffinity == o.SessionAffinity && s.SessionAffinitySeconds == o.SessionAffinitySeconds &&
		s.InternalTrafficPolicy == o.InternalTrafficPolicy && s.TrafficDistribution == o.TrafficDistribution &&
		slices.Equal(s.Ports, o.Ports) && maps.Equal(s.Labels, o.Labels) && maps.Equal(s.Annotations, o.Annotations) &&
		slices.EqualFunc(s.Subsets, o.Subsets, func(a, b EndpointSubset) bool {
			return slices.Equal(a.Targets, b.Targets) && slices.Equal(a.Endpoints, b.Endpoints)
		})
}

// Equal reports whether s and o have the same services in the same order.
func (s PeerServicesSpec) Equal(o PeerServicesSpec) bool {
	return slices.EqualFunc(s.Services, o.Services, func(a, b ExportedService) bool { return a.Equal(&b) })
}

// ExportedPort is a port of a Service.
type ExportedPort struct {
	// Name of the port. A Service with one port may leave it out.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$`
	// +optional
	Name string `json:"name,omitempty"`
	// Protocol is TCP, UDP or SCTP.
	// +kubebuilder:validation:Enum=TCP;UDP;SCTP
	Protocol string `json:"protocol"`
	// Port is the port to which clients of the Service connect.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
	// AppProtocol is the application protocol.
	// +kubebuilder:validation:MaxLength=317
	// +optional
	AppProtocol string `json:"appProtocol,omitempty"`
}

// EndpointSubset has endpoints that listen on the same ports.
type EndpointSubset struct {
	// Targets are the ports on which the endpoints listen, with the names of the Service's ports.
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	// +optional
	Targets []TargetPort `json:"targets,omitempty"`
	// Endpoints are sorted by address.
	// +kubebuilder:validation:MaxItems=2500
	// +listType=atomic
	// +optional
	Endpoints []ExportedEndpoint `json:"endpoints,omitempty"`
}

// TargetPort is the port on which endpoints listen for one port of their Service.
type TargetPort struct {
	// Name is the name of the Service's port.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$`
	// +optional
	Name string `json:"name,omitempty"`
	// Port is the port on which the endpoints listen.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
}

// ExportedEndpoint is a pod behind an exported Service.
type ExportedEndpoint struct {
	// Address is the pod's address in its own cluster. It lies in the PodCIDR that the exporter
	// advertised. The importer translates it.
	Address EndpointAddress `json:"address"`
	// Hostname is the hostname of the endpoint in its EndpointSlice.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$`
	// +optional
	Hostname string `json:"hostname,omitempty"`
	// Zone is the zone of the pod's node.
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Zone string `json:"zone,omitempty"`
	// Ready is the condition ready of the endpoint in its EndpointSlice.
	Ready bool `json:"ready"`
	// Serving is the condition serving of the endpoint in its EndpointSlice.
	Serving bool `json:"serving"`
	// Terminating is the condition terminating of the endpoint in its EndpointSlice.
	Terminating bool `json:"terminating,omitempty"`
}

// PeerServicesStatus is the importer's answer. The importer's manager writes it.
type PeerServicesStatus struct {
	// ObservedGeneration is the metadata.generation to which the rest of the status refers.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Refused are services that the importer does not serve, or serves only in part.
	// +kubebuilder:validation:MaxItems=128
	// +listType=map
	// +listMapKey=namespace
	// +listMapKey=name
	// +optional
	Refused []RefusedService `json:"refused,omitempty"`
}

// RefusedService is a service that the importer does not serve, or serves only in part. It has the
// reason. It is atomic, like ExportedService.
// +structType=atomic
type RefusedService struct {
	// Namespace of the Service.
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// Name of the Service.
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// Reason is one word in CamelCase, or several separated by commas.
	// +kubebuilder:validation:MaxLength=256
	Reason string `json:"reason"`
	// Message explains the reason to users.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	Message string `json:"message,omitempty"`
}

// PeerServices lists services that a peer exports to this cluster. The peer's manager writes it
// into the tenant namespace of the peering. A namespace has at most 16 PeerServices: services-0 to
// services-15.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=peerservices,singular=peerservices,scope=Namespaced,categories=isthmus
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="!has(self.spec.services) || self.spec.services.map(s, has(s.subsets) ? s.subsets.map(e, has(e.endpoints) ? e.endpoints.size() : 0).sum() : 0).sum() <= 2500",message="all services together have at most 2500 endpoints",reason=FieldValueInvalid
type PeerServices struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by the exporter's manager.
	Spec PeerServicesSpec `json:"spec"`
	// Status is written by the importer's manager.
	// +optional
	Status PeerServicesStatus `json:"status,omitzero"`
}

// PeerServicesList is a list of PeerServices.
//
// +kubebuilder:object:root=true
type PeerServicesList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PeerServices `json:"items"`
}
