package crd

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apimachinery/pkg/runtime"
)

// A change sets one value of an object. path has one key per element, because keys may contain
// dots. The value absent removes the key.
type change struct {
	path  []string
	value any
}

type absentValue struct{}

var absent absentValue

func set(value any, path ...string) change { return change{path, value} }

// splitPath splits a path whose keys have no dots.
func splitPath(path string) []string { return strings.Split(path, ".") }

// withChanges returns a copy of obj with the changes made.
func withChanges(obj object, changes ...change) object {
	obj = runtime.DeepCopyJSON(obj)
	for _, c := range changes {
		m := obj
		last := len(c.path) - 1
		for _, key := range c.path[:last] {
			child, ok := m[key].(object)
			if !ok {
				child = object{}
				m[key] = child
			}
			m = child
		}
		if c.value == absent {
			delete(m, c.path[last])
		} else {
			m[c.path[last]] = c.value
		}
	}
	return obj
}

// get returns the value at a path whose keys have no dots, or nil.
func get(obj object, path string) any {
	var v any = obj
	for _, key := range splitPath(path) {
		m, _ := v.(object)
		v = m[key]
	}
	return v
}

// A rule is one x-kubernetes-validations entry of a CRD. path is the field that its error names,
// without keys of maps and indices of lists.
type rule struct{ kind, path, message string }

var subscript = regexp.MustCompile(`\[[^\]]*\]`)

// rules lists the rules of a CRD.
func rules(s *server) []rule {
	var all []rule
	walk(s.structural, "", func(path string, n *structuralschema.Structural) {
		for _, v := range n.XValidations {
			all = append(all, rule{s.crd.Spec.Names.Kind, strings.TrimPrefix(subscript.ReplaceAllString(path, "")+v.FieldPath, "."), v.Message})
		}
	})
	return all
}

// walk calls visit for a schema and all schemas below it.
func walk(s *structuralschema.Structural, path string, visit func(path string, s *structuralschema.Structural)) {
	visit(path, s)
	for name, child := range s.Properties {
		walk(&child, path+"."+name, visit)
	}
	if s.AdditionalProperties != nil && s.AdditionalProperties.Structural != nil {
		walk(s.AdditionalProperties.Structural, path+"[]", visit)
	}
	if s.Items != nil {
		walk(s.Items, path+"[]", visit)
	}
}

// Without these bounds, only etcd would limit the size of an object and the cost of its rules. Two
// fields are exempt: the gobs of Liqo's allocator, and the keys in each of 16,384 endpoints. Only a
// manager writes them, and rules about them would exceed the cost budget.
func TestEveryStringListAndMapIsBounded(t *testing.T) {
	all := servers(t)
	for _, s := range ours(t) {
		all[s.crd.Spec.Names.Kind] = s
	}
	exempt := map[string]bool{"IpamStorage.spec.prefixes[]": true, "IpamStorage.spec.endpointMappings[].clusterMappings": true}
	for kind, s := range all {
		walk(s.structural, "", func(path string, n *structuralschema.Structural) {
			v := n.ValueValidation
			if v == nil {
				v = &structuralschema.ValueValidation{}
			}
			aboutKeys := slices.ContainsFunc(n.XValidations, func(r apiextensionsv1.ValidationRule) bool { return strings.HasPrefix(r.Rule, "self.all(") })
			switch {
			case path == ".apiVersion" || path == ".kind" || path == ".metadata": // the API server handles these
			case n.Type == "string" && v.MaxLength == nil && len(v.Enum) == 0 && v.Format != "date-time",
				n.Type == "array" && v.MaxItems == nil,
				n.AdditionalProperties != nil && v.MaxProperties == nil,
				n.AdditionalProperties != nil && !aboutKeys,
				n.XPreserveUnknownFields:
				if !exempt[kind+path] {
					t.Errorf("%s%s has no bound", kind, path)
				}
				delete(exempt, kind+path)
			}
		})
	}
	for path := range exempt {
		t.Errorf("%s is bounded: no exemption is needed", path)
	}
}

// Clients show the same names and columns as for Liqo's CRDs.
func TestNamesAndColumnsEqualThoseOfLiqo(t *testing.T) {
	want := map[string]string{
		"NetworkConfig": `networkconfigs networkconfig NetworkConfigList Namespaced [liqo] [] status=true
Peering Cluster|string|0|.spec.cluster.clusterName
Endpoint IP|string|1|.spec.endpointIP
VPN Backend|string|1|.spec.backendType
Processed|string|0|.status.processed
Local|string|0|.metadata.labels.liqo\.io/replication
Age|date|0|.metadata.creationTimestamp
`,
		"TunnelEndpoint": `tunnelendpoints tunnelendpoint TunnelEndpointList Namespaced [liqo] [] status=true
Peering Cluster|string|0|.spec.clusterIdentity.clusterName
Endpoint IP|string|1|.spec.endpointIP
Backend type|string|0|.spec.backendType
Latency|string|1|.status.connection.latency.value
Connection status|string|0|.status.connection.status
Age|date|0|.metadata.creationTimestamp
`,
		// If a kind has no columns, clients show its age.
		"NatMapping": `natmappings natmapping NatMappingList Cluster [liqo] [] status=true
`,
		"IpamStorage": `ipamstorages ipamstorage IpamStorageList Cluster [liqo] [] status=false
`,
	}
	for kind, s := range servers(t) {
		if have := table(s); have != want[kind] {
			t.Errorf("%s: have\n%swant\n%s", kind, have, want[kind])
		}
		if v := s.crd.Spec.Versions; len(v) != 1 || v[0].Name != "v1alpha1" || !v[0].Served || !v[0].Storage || s.crd.Spec.Group != "net.liqo.io" {
			t.Errorf("%s: want net.liqo.io/v1alpha1 served and stored, have %v", kind, v)
		}
	}
}

// The required and optional fields are the same as Liqo's. Liqo does not have the field
// status.conditions.
func TestRequiredFieldsAndDefaultsEqualThoseOfLiqo(t *testing.T) {
	want := map[string]map[string]string{
		"NetworkConfig": {
			"spec":         "backendType backend_config cluster endpointIP externalCIDR podCIDR",
			"spec.cluster": "clusterID clusterName",
			"status":       "processed",
		},
		"TunnelEndpoint": {
			"spec":                 "backendType backend_config clusterIdentity endpointIP localExternalCIDR localPodCIDR remoteExternalCIDR remotePodCIDR",
			"spec.clusterIdentity": "clusterID clusterName",
		},
		"NatMapping": {"spec": "clusterID clusterMappings externalCIDR podCIDR"},
		"IpamStorage": {
			"spec":                    "clusterSubnets endpointMappings externalCIDR natMappingsConfigured podCIDR pools prefixes reservedSubnets serviceCIDR",
			"spec.clusterSubnets[]":   "localNATExternalCIDR localNATPodCIDR remoteExternalCIDR remotePodCIDR",
			"spec.endpointMappings[]": "ExternalCIDROriginalIP clusterMappings",
			"spec.endpointMappings[].clusterMappings[]": "ExternalCIDRNattedIP",
		},
	}
	defaults := map[string]any{
		"NetworkConfig status.processed":            false,
		"TunnelEndpoint spec.localNATPodCIDR":       "None",
		"TunnelEndpoint spec.localNATExternalCIDR":  "None",
		"TunnelEndpoint spec.remoteNATPodCIDR":      "None",
		"TunnelEndpoint spec.remoteNATExternalCIDR": "None",
	}
	for kind, s := range servers(t) {
		walk(s.structural, "", func(path string, n *structuralschema.Structural) {
			path = strings.TrimPrefix(path, ".")
			if path != "" && path != "status.conditions[]" && n.ValueValidation != nil {
				if have := strings.Join(n.ValueValidation.Required, " "); have != want[kind][path] {
					t.Errorf("%s %s requires %q, want %q", kind, path, have, want[kind][path])
				}
				delete(want[kind], path)
			}
			if d, ok := defaults[kind+" "+path]; n.Default.Object != nil || ok {
				if n.Default.Object != d {
					t.Errorf("%s %s: the default is %v, want %v", kind, path, n.Default.Object, d)
				}
				delete(defaults, kind+" "+path)
			}
		})
		if len(want[kind]) > 0 {
			t.Errorf("%s: no such fields: %v", kind, want[kind])
		}
	}
	if len(defaults) > 0 {
		t.Errorf("no such fields: %v", defaults)
	}
}
