package ipamstore

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// diff returns the spec of a JSON merge patch that turns have into want. The patch has only the
// differing fields.
func diff(have, want *v1alpha1.IpamStorageSpec) map[string]any {
	spec := make(map[string]any)
	set := func(field string, differs bool, value any) {
		if differs {
			spec[field] = value
		}
	}
	sub := func(field string, value map[string]any, absent bool) { set(field, len(value) > 0 || absent, value) }
	set("pools", !slices.Equal(have.Pools, want.Pools), want.Pools)
	set("reservedSubnets", !slices.Equal(have.ReservedSubnets, want.ReservedSubnets), want.ReservedSubnets)
	set("podCIDR", have.PodCIDR != want.PodCIDR, want.PodCIDR)
	set("serviceCIDR", have.ServiceCIDR != want.ServiceCIDR, want.ServiceCIDR)
	set("externalCIDR", have.ExternalCIDR != want.ExternalCIDR, want.ExternalCIDR)
	sub("prefixes", entries(have.Prefixes, want.Prefixes), have.Prefixes == nil)
	sub("clusterSubnets", entries(have.ClusterSubnets, want.ClusterSubnets), have.ClusterSubnets == nil)
	sub("natMappingsConfigured", entries(have.NatMappingsConfigured, want.NatMappingsConfigured), have.NatMappingsConfigured == nil)

	mappings := make(map[string]any)
	for ip, w := range want.EndpointMappings {
		h, ok := have.EndpointMappings[ip]
		switch {
		case !ok:
			mappings[ip] = w
			continue
		case maps.Equal(h.ClusterMappings, w.ClusterMappings) && h.ExternalCIDROriginalIP == w.ExternalCIDROriginalIP:
			continue
		}
		mapping := map[string]any{"clusterMappings": entries(h.ClusterMappings, w.ClusterMappings)}
		if h.ExternalCIDROriginalIP != w.ExternalCIDROriginalIP {
			mapping["ExternalCIDROriginalIP"] = w.ExternalCIDROriginalIP
		}
		mappings[ip] = mapping
	}
	for ip := range have.EndpointMappings {
		if _, ok := want.EndpointMappings[ip]; !ok {
			mappings[ip] = nil
		}
	}
	sub("endpointMappings", mappings, have.EndpointMappings == nil)
	return spec
}

// patchOf returns the merge patch for an object with the given patch of its spec. It returns nil if
// spec is empty. The patch contains the resourceVersion, so that it cannot undo another write.
func patchOf(version string, spec map[string]any) []byte {
	if len(spec) == 0 {
		return nil
	}
	// One empty entry removes managedFields, which are useless, because the object has one writer.
	// They would be longer than all the rest of the object, cost the API server more than the write
	// itself, and be part of every response.
	metadata := map[string]any{"resourceVersion": version, "managedFields": []any{map[string]any{}},
		"annotations": map[string]any{isthmus.AnnotationTakenOver: nil}} // this write changes the version, so the annotation is obsolete
	patch, err := json.Marshal(map[string]any{"metadata": metadata, "spec": spec})
	if err != nil {
		panic(err) // maps of strings can always be marshalled
	}
	return patch
}

// fields returns the JSON fields of a value.
func fields(v any) (m map[string]any) {
	text, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err != nil {
		panic(err) // our own structs can always be marshalled
	}
	return m
}

// mergePatch returns the JSON merge patch that turns have into want.
func mergePatch(have, want map[string]any) map[string]any {
	patch := entries(have, want)
	for key, value := range patch {
		was, both := have[key].(map[string]any)
		if is, object := value.(map[string]any); both && object {
			patch[key] = mergePatch(was, is)
		}
	}
	return patch
}

// entries returns the merge patch of one map: new and changed entries, and null for removed ones.
func entries[V any](have, want map[string]V) map[string]any {
	patch := make(map[string]any)
	for key, w := range want {
		if h, ok := have[key]; !ok || !reflect.DeepEqual(h, w) {
			patch[key] = w
		}
	}
	for key := range have {
		if _, ok := want[key]; !ok {
			patch[key] = nil
		}
	}
	return patch
}
