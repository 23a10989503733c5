package ipamstore

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// readAll builds the initial State from the NetworkAllocations. If our own cluster has none,
// readAll first imports the IpamStorage of an earlier Liqo installation: its entries fill in for
// missing NetworkAllocations.
func (s *Store) readAll(ctx context.Context) (state ipam.State, err error) {
	if err := s.readAllocations(ctx); err != nil {
		return state, err
	}
	var own ipam.Config
	found, kept := false, make(map[string]isthmus.NetworkAllocationSpec)
	for name, a := range s.allocations {
		if fabric.AllocationName(a.spec.ClusterID) != name || a.spec.Session == 0 {
			continue
		}
		if kept[a.spec.ClusterID] = a.spec; a.spec.ClusterID == s.self && a.spec.Own != nil {
			if own, err = ipam.ConfigFrom(a.spec.Own); err != nil {
				s.log.Error("NetworkAllocation of this cluster is invalid", "name", name, "error", err)
			}
			found = err == nil
		}
	}
	all := latestFirst(kept)
	if !found && s.object != nil && !blank(&s.object.Spec) {
		imported, err := ipam.Read(&s.object.Spec)
		if err == nil {
			found, own = true, imported.Own()
			for _, id := range imported.Clusters() {
				if _, has := kept[id]; !has {
					all = append(all, imported.Allocation(id))
				}
			}
			s.log.Info("imported the IpamStorage", "name", s.object.Name, "peers", len(imported.Peers()))
		} else {
			s.log.Error("IpamStorage is invalid; rebuilding the IPAM state from the peerings", "name", s.object.Name, "error", err)
		}
	}
	if state, err = s.withTraces(ctx, own, all, !found); err != nil {
		return state, fmt.Errorf("compare the IPAM state with the objects of the peerings: %w", err)
	}
	return s.withAllocations(ctx, state)
}

// withTraces restores allocations from TunnelEndpoints. The NetworkAllocations differ from the
// TunnelEndpoints if somebody edited, deleted or restored a NetworkAllocation while no manager ran.
// It also reverts an allocation that is not in the TunnelEndpoint yet; that allocation is then made
// again.
//
// Peers may write NetworkConfigs. So a NetworkConfig counts only if all NetworkAllocations are
// lost, only for the peer of its tenant namespace, and only if it contradicts no other object.
func (s *Store) withTraces(ctx context.Context, own ipam.Config, all []isthmus.NetworkAllocationSpec, lost bool) (state ipam.State, err error) {
	var (
		endpoints  v1alpha1.TunnelEndpointList
		configs    v1alpha1.NetworkConfigList
		mappings   v1alpha1.NatMappingList
		namespaces metav1.PartialObjectMetadataList
	)
	lists := []client.ObjectList{&endpoints, &mappings}
	if namespaces.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "NamespaceList"}); lost {
		lists = append(lists, &configs, &namespaces)
	}
	for _, list := range lists {
		if err := s.reader.List(ctx, list); err != nil {
			return state, err
		}
	}
	tenants := make(map[string]string) // tenant namespace → cluster ID
	for i := range namespaces.Items {
		if id := namespaces.Items[i].Labels[v1alpha1.LabelTenantClusterID]; id != "" {
			tenants[namespaces.Items[i].Name] = id
		}
	}
	traces := tracesOf(endpoints.Items, configs.Items, tenants)
	if lost && len(traces) > 0 {
		for _, t := range traces {
			own.PodCIDR = cmp.Or(own.PodCIDR, t.pod)
			own.ExternalCIDR = cmp.Or(own.ExternalCIDR, t.external)
		}
		configured, _ := ipam.State{}.Configure(own)
		own = configured.Own()
	}
	state = s.stateOf(own, all)
	settled, restored := make(map[string]bool), make(map[string]bool) // settled: the peer has the networks of a trace; restored: it got them from the trace
	for _, t := range traces {
		had, has := state.AllocationOf(t.id)
		switch {
		case has && had == t.allocation:
			settled[t.id] = true
		case !t.allocation.Pod.IsValid() || !t.allocation.External.IsValid():
		case has && (settled[t.id] || !t.tunnel):
			s.log.Warn("two objects name different networks of a peer", "object", t.object, "clusterID", t.id, "kept", had, "ignored", t.allocation)
		default:
			next, _, err := state.Allocate(ipam.Request{ID: t.id, Pod: t.allocation.Pod, External: t.allocation.External, WantPod: t.allocation.Pod, WantExternal: t.allocation.External})
			if err != nil {
				s.log.Error("cannot restore an allocation that the IPAM state lacks", "object", t.object, "clusterID", t.id, "lacked", t.allocation, "error", err)
				continue
			}
			state, settled[t.id], restored[t.id] = next, true, true
			s.log.Warn("restored an allocation that the IPAM state lacked", "object", t.object, "clusterID", t.id, "lacked", t.allocation, "had", had)
		}
		if lost || !has {
			state = state.Answered(t.id, t.podSeen, t.externalSeen)
		}
	}
	for i := range mappings.Items {
		spec := &mappings.Items[i].Spec
		if !lost && !restored[spec.ClusterID] {
			continue
		}
		for _, real := range slices.Sorted(maps.Keys(spec.ClusterMappings)) {
			ip, err1 := netip.ParseAddr(real)
			seen, err2 := netip.ParseAddr(spec.ClusterMappings[real])
			if err1 == nil && err2 == nil {
				state = state.RestoreEndpoint(spec.ClusterID, ip, seen)
			}
		}
	}
	return state, nil
}

// withAllocations handles networks that NetworkAllocations list but the State lacks. It holds them,
// because nodes refuse them. Either the State has lost these networks, or a manager was stopped
// before it freed them.
func (s *Store) withAllocations(ctx context.Context, state ipam.State) (ipam.State, error) {
	now, err := s.Now(ctx)
	if err != nil {
		return state, err
	}
	for _, name := range slices.Sorted(maps.Keys(s.allocations)) {
		spec := s.allocations[name].spec
		var lost []netip.Prefix
		for _, text := range spec.Networks {
			if p := parse(text); !slices.Contains(state.NetworksOf(spec.ClusterID), p) {
				lost = append(lost, p)
			}
		}
		if len(lost) == 0 || spec.ClusterID == s.self || fabric.AllocationName(spec.ClusterID) != name {
			continue
		}
		next, left := state.Regain(spec.ClusterID, lost, now)
		if len(left) > 0 {
			s.log.Warn("freed networks that nodes refused, because they cannot be held for the peer", "object", "NetworkAllocation "+name, "clusterID", spec.ClusterID, "networks", left)
		}
		state = next
	}
	return state, nil
}

// A trace is the part of a lost State that can be read from one object.
type trace struct {
	object, id            string
	tunnel                bool         // from a TunnelEndpoint, which only we write
	pod, external         netip.Prefix // our own networks, as far as the object has them
	podSeen, externalSeen netip.Prefix
	allocation            ipam.Allocation
}

// tracesOf returns the traces in the objects, the most trustworthy first.
func tracesOf(endpoints []v1alpha1.TunnelEndpoint, configs []v1alpha1.NetworkConfig, tenants map[string]string) []trace {
	var traces []trace
	slices.SortFunc(endpoints, func(a, b v1alpha1.TunnelEndpoint) int { return older(&a, &b) })
	for i := range endpoints {
		spec := &endpoints[i].Spec
		t := trace{
			tunnel:     true,
			object:     "TunnelEndpoint " + endpoints[i].Namespace + "/" + endpoints[i].Name,
			id:         spec.ClusterIdentity.ClusterID,
			pod:        parse(spec.LocalPodCIDR),
			external:   parse(spec.LocalExternalCIDR),
			allocation: ipam.Allocation{Pod: natNetwork(spec.RemoteNATPodCIDR, spec.RemotePodCIDR), External: natNetwork(spec.RemoteNATExternalCIDR, spec.RemoteExternalCIDR)},
		}
		t.podSeen, t.externalSeen = natNetwork(spec.LocalNATPodCIDR, spec.LocalPodCIDR), natNetwork(spec.LocalNATExternalCIDR, spec.LocalExternalCIDR)
		traces = append(traces, t)
	}
	slices.SortFunc(configs, func(a, b v1alpha1.NetworkConfig) int { return older(&a, &b) })
	for i := range configs {
		nc := &configs[i]
		peer, labels := tenants[nc.Namespace], nc.Labels
		t := trace{object: "NetworkConfig " + nc.Namespace + "/" + nc.Name, id: peer}
		podSeen, externalSeen := natNetwork(nc.Status.PodCIDRNAT, nc.Spec.PodCIDR), natNetwork(nc.Status.ExternalCIDRNAT, nc.Spec.ExternalCIDR)
		switch {
		case peer == "":
			continue
		case labels[v1alpha1.LabelReplication] == "true" && nc.Spec.RemoteCluster.ClusterID == peer:
			t.pod, t.external = parse(nc.Spec.PodCIDR), parse(nc.Spec.ExternalCIDR)
			if nc.Status.Processed && nc.Annotations[isthmus.AnnotationUnanswered] == "" {
				t.podSeen, t.externalSeen = podSeen, externalSeen
			}
		case labels[v1alpha1.LabelOriginID] == peer && nc.Status.Processed:
			t.allocation = ipam.Allocation{Pod: podSeen, External: externalSeen}
		default:
			continue
		}
		traces = append(traces, t)
	}
	return traces
}

func older(a, b client.Object) int {
	return cmp.Or(a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time), cmp.Compare(a.GetUID(), b.GetUID()))
}

// natNetwork parses the NAT field nat. The literal None stands for the original network.
func natNetwork(nat, original string) netip.Prefix {
	if nat == v1alpha1.None {
		nat = original
	}
	return parse(nat)
}

// parse parses a prefix. It returns the zero value for any other text.
func parse(s string) netip.Prefix {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
