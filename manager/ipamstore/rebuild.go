package ipamstore

import (
	"cmp"
	"context"
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

// rebuild makes a Book out of the objects that were made from the lost one. TunnelEndpoints and
// NatMappings are ours and come first; the NetworkConfigs of a peer count only for that peer and in
// its own tenant namespace, and only where they contradict nothing, because it may write there.
func (s *Store) rebuild(ctx context.Context) (ipam.Book, error) {
	var (
		endpoints  v1alpha1.TunnelEndpointList
		configs    v1alpha1.NetworkConfigList
		mappings   v1alpha1.NatMappingList
		namespaces metav1.PartialObjectMetadataList
	)
	namespaces.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "NamespaceList"})
	for list, opts := range map[client.ObjectList]client.ListOptions{
		&endpoints: {}, &configs: {}, &mappings: {}, &namespaces: {},
	} {
		if err := s.reader.List(ctx, list, &opts); err != nil {
			return ipam.Book{}, err
		}
	}
	tenants := make(map[string]string) // clusterID by tenant namespace
	for i := range namespaces.Items {
		if id := namespaces.Items[i].Labels[v1alpha1.LabelTenantClusterID]; id != "" {
			tenants[namespaces.Items[i].Name] = id
		}
	}

	traces := tracesOf(endpoints.Items, configs.Items, tenants)
	if len(traces) == 0 {
		return ipam.Book{}, nil
	}
	var own ipam.Config
	for _, t := range traces {
		own.PodCIDR = cmp.Or(own.PodCIDR, t.pod)
		own.ExternalCIDR = cmp.Or(own.ExternalCIDR, t.external)
	}
	book, _ := ipam.Book{}.Configure(own)
	for _, t := range traces {
		if claim := t.grant; claim.Pod.IsValid() && claim.External.IsValid() {
			next, _, err := book.Grant(ipam.Request{ID: t.id, Pod: claim.Pod, External: claim.External, WantPod: claim.Pod, WantExternal: claim.External})
			if had, ok := book.GrantOf(t.id); ok && had != claim {
				s.log.Warn("rebuilding the IPAM's books: two objects disagree about a peer", "object", t.object, "clusterID", t.id, "kept", had, "ignored", claim)
			} else if err != nil {
				s.log.Warn("rebuilding the IPAM's books: an object cannot be right", "object", t.object, "clusterID", t.id, "err", err)
			} else {
				book = next
			}
		}
		book = book.Answered(t.id, t.podSeen, t.externalSeen)
	}
	for i := range mappings.Items {
		spec := &mappings.Items[i].Spec
		for _, real := range slices.Sorted(maps.Keys(spec.ClusterMappings)) {
			ip, err1 := netip.ParseAddr(real)
			seen, err2 := netip.ParseAddr(spec.ClusterMappings[real])
			if err1 == nil && err2 == nil {
				book = book.RestoreEndpoint(spec.ClusterID, ip, seen)
			}
		}
	}
	s.log.Info("rebuilt the IPAM's books from the objects of the peerings", "peers", len(book.Peers()), "externalCIDR", book.Own().ExternalCIDR)
	return book, nil
}

// withTunnels gives peers what their TunnelEndpoints name, where a Book says something else: somebody
// edited the books, or restored older ones, while no manager ran. A change of ours that had not got to
// the TunnelEndpoint is made again. NetworkConfigs do not count here, because under Liqo's rights a
// peer without networks may answer itself.
func (s *Store) withTunnels(ctx context.Context, book ipam.Book) (ipam.Book, error) {
	var endpoints v1alpha1.TunnelEndpointList
	if err := s.reader.List(ctx, &endpoints); err != nil {
		return book, err
	}
	known := make(map[string]bool)
	for _, t := range tracesOf(endpoints.Items, nil, nil) {
		had, has := book.GrantOf(t.id)
		if known[t.id] || has && had == t.grant || !t.grant.Pod.IsValid() || !t.grant.External.IsValid() {
			continue
		}
		known[t.id] = true
		next, _, err := book.Grant(ipam.Request{ID: t.id, Pod: t.grant.Pod, External: t.grant.External, WantPod: t.grant.Pod, WantExternal: t.grant.External})
		if err != nil {
			s.log.Error("the IPAM's books lack what a peer has by its tunnel, and cannot give it", "object", t.object, "clusterID", t.id, "err", err)
			continue
		}
		if book = next; !has {
			book = book.Answered(t.id, t.podSeen, t.externalSeen)
		}
		s.log.Warn("the IPAM's books lack what a peer has by its tunnel, and give it again", "object", t.object, "clusterID", t.id, "lacked", t.grant, "had", had)
	}
	return book, nil
}

// withAllocations holds the networks that only NetworkAllocations name: nodes refuse them, and the time of
// their release is unknown. The Book has lost them, or a manager was stopped before it freed them.
func (s *Store) withAllocations(ctx context.Context, book ipam.Book) (ipam.Book, error) {
	now, err := s.Now(ctx)
	if err != nil {
		return book, err
	}
	for _, name := range slices.Sorted(maps.Keys(s.allocations)) {
		spec := s.allocations[name].spec
		var lost []netip.Prefix
		for _, text := range spec.Networks {
			if p := parse(text); !slices.Contains(book.NetworksOf(spec.ClusterID), p) {
				lost = append(lost, p)
			}
		}
		if len(lost) == 0 || spec.ClusterID == s.self || fabric.AllocationName(spec.ClusterID) != name {
			continue
		}
		next, left := book.Regain(spec.ClusterID, lost, now)
		if len(left) > 0 {
			s.log.Warn("nodes refused networks for a peer that cannot be held for it, and need not any more", "object", "NetworkAllocation "+name, "clusterID", spec.ClusterID, "networks", left)
		}
		book = next
	}
	return book, nil
}

// A trace is what one object says about a lost Book.
type trace struct {
	object, id            string
	pod, external         netip.Prefix // ours
	podSeen, externalSeen netip.Prefix
	grant                 ipam.Grant
}

// tracesOf reads the objects, the most trustworthy first.
func tracesOf(endpoints []v1alpha1.TunnelEndpoint, configs []v1alpha1.NetworkConfig, tenants map[string]string) []trace {
	var traces []trace
	slices.SortFunc(endpoints, func(a, b v1alpha1.TunnelEndpoint) int { return older(&a, &b) })
	for i := range endpoints {
		spec := &endpoints[i].Spec
		t := trace{
			object:   "TunnelEndpoint " + endpoints[i].Namespace + "/" + endpoints[i].Name,
			id:       spec.ClusterIdentity.ClusterID,
			pod:      parse(spec.LocalPodCIDR),
			external: parse(spec.LocalExternalCIDR),
			grant:    ipam.Grant{Pod: seen(spec.RemoteNATPodCIDR, spec.RemotePodCIDR), External: seen(spec.RemoteNATExternalCIDR, spec.RemoteExternalCIDR)},
		}
		t.podSeen, t.externalSeen = seen(spec.LocalNATPodCIDR, spec.LocalPodCIDR), seen(spec.LocalNATExternalCIDR, spec.LocalExternalCIDR)
		traces = append(traces, t)
	}
	slices.SortFunc(configs, func(a, b v1alpha1.NetworkConfig) int { return older(&a, &b) })
	for i := range configs {
		nc := &configs[i]
		peer, labels := tenants[nc.Namespace], nc.Labels
		t := trace{object: "NetworkConfig " + nc.Namespace + "/" + nc.Name, id: peer}
		podSeen, externalSeen := seen(nc.Status.PodCIDRNAT, nc.Spec.PodCIDR), seen(nc.Status.ExternalCIDRNAT, nc.Spec.ExternalCIDR)
		switch {
		case peer == "":
			continue
		case labels[v1alpha1.LabelReplication] == "true" && nc.Spec.RemoteCluster.ClusterID == peer:
			t.pod, t.external = parse(nc.Spec.PodCIDR), parse(nc.Spec.ExternalCIDR)
			if nc.Status.Processed && nc.Annotations[isthmus.AnnotationUnanswered] == "" {
				t.podSeen, t.externalSeen = podSeen, externalSeen
			}
		case labels[v1alpha1.LabelOriginID] == peer && nc.Status.Processed:
			t.grant = ipam.Grant{Pod: podSeen, External: externalSeen}
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

// seen reads a NAT field together with the network it is about.
func seen(nat, own string) netip.Prefix {
	if nat == v1alpha1.None {
		nat = own
	}
	return parse(nat)
}

// parse returns the zero prefix for anything that is not a prefix.
func parse(s string) netip.Prefix {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
