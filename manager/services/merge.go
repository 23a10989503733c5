package services

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// Merged has the objects that a cluster needs for one service, without owner references.
type Merged struct {
	Import  *mcs.ServiceImport          // without spec.ips; without spec.ipFamilies unless headless
	Service *corev1.Service             // nil: the service is headless
	Slices  []discoveryv1.EndpointSlice // sorted by name
	// Conflicts lists the properties in which the exports differ, sorted by reason.
	Conflicts []Conflict
}

// A Conflict is a property that differs between exports of the same service. The oldest export
// wins. Of exports with the same age, the one with the smaller cluster ID wins.
type Conflict struct {
	Reason  mcs.ServiceExportConditionReason
	What    string // the property, or the list of ports
	Message string // a sentence with the names of the clusters
}

// conflictReasons are the possible reasons of a Conflict.
var conflictReasons = []string{
	string(mcs.ServiceExportReasonTypeConflict), string(mcs.ServiceExportReasonPortConflict),
	string(mcs.ServiceExportReasonSessionAffinityConflict), string(mcs.ServiceExportReasonSessionAffinityConfigConflict),
	string(mcs.ServiceExportReasonInternalTrafficPolicyConflict), string(mcs.ServiceExportReasonTrafficDistributionConflict),
	string(mcs.ServiceExportReasonLabelsConflict), string(mcs.ServiceExportReasonAnnotationsConflict),
}

// Merge merges the exports of one service. There must be at least one export, and at most one for
// each cluster. The order of exports does not matter.
func Merge(key Key, exports []Export) Merged {
	byAge := slices.Clone(exports)
	slices.SortFunc(byAge, func(a, b Export) int { return cmp.Or(strings.Compare(a.Since, b.Since), strings.Compare(a.ID, b.ID)) })
	first := byAge[0].Service
	var m Merged
	differ := func(reason mcs.ServiceExportConditionReason, what string, same func(isthmus.ExportedService) bool) {
		var clusters []string
		for _, x := range byAge[1:] {
			if !same(x.Service) {
				clusters = append(clusters, x.Cluster)
			}
		}
		if len(clusters) > 0 {
			m.Conflicts = append(m.Conflicts, Conflict{reason, what, fmt.Sprintf("%s of cluster %s is used; it differs in %s", what, byAge[0].Cluster, strings.Join(clusters, ", "))})
		}
	}
	kind := importType(first)
	differ(mcs.ServiceExportReasonTypeConflict, "type", func(s isthmus.ExportedService) bool { return importType(s) == kind })
	ports, conflict := mergePorts(byAge)
	if conflict != nil {
		m.Conflicts = append(m.Conflicts, *conflict)
	}
	affinity := func(s isthmus.ExportedService) string {
		return cmp.Or(s.SessionAffinity, string(corev1.ServiceAffinityNone))
	}
	if kind == mcs.ClusterSetIP {
		differ(mcs.ServiceExportReasonSessionAffinityConflict, "session affinity", func(s isthmus.ExportedService) bool { return affinity(s) == affinity(first) })
		differ(mcs.ServiceExportReasonSessionAffinityConfigConflict, "timeout of the session affinity", func(s isthmus.ExportedService) bool {
			return s.SessionAffinitySeconds == first.SessionAffinitySeconds
		})
		policy := func(s isthmus.ExportedService) string {
			return cmp.Or(s.InternalTrafficPolicy, string(corev1.ServiceInternalTrafficPolicyCluster))
		}
		differ(mcs.ServiceExportReasonInternalTrafficPolicyConflict, "internalTrafficPolicy", func(s isthmus.ExportedService) bool { return policy(s) == policy(first) })
		differ(mcs.ServiceExportReasonTrafficDistributionConflict, "trafficDistribution", func(s isthmus.ExportedService) bool { return s.TrafficDistribution == first.TrafficDistribution })
	}
	differ(mcs.ServiceExportReasonLabelsConflict, "exportedLabels", func(s isthmus.ExportedService) bool { return maps.Equal(s.Labels, first.Labels) })
	differ(mcs.ServiceExportReasonAnnotationsConflict, "exportedAnnotations", func(s isthmus.ExportedService) bool { return maps.Equal(s.Annotations, first.Annotations) })
	slices.SortFunc(m.Conflicts, func(a, b Conflict) int { return strings.Compare(string(a.Reason), string(b.Reason)) })

	m.Import = importFor(key, byAge, ports)
	if kind == mcs.ClusterSetIP {
		m.Service = derivedService(key, m.Import)
	}
	for _, x := range byAge {
		withdrawn, ports := x.Down && replaced(x, byAge, ports), ports
		if kind == mcs.Headless && portless(x) {
			ports = nil // otherwise the export would get no slices, and DNS would omit its addresses
		}
		m.Slices = append(m.Slices, slicesOf(key, x, ports, withdrawn)...)
	}
	slices.SortFunc(m.Slices, func(a, b discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	if kind == mcs.Headless { // for other types, the addresses of the derived Service decide
		m.Import.Spec.IPFamilies = familiesOf(m.Slices)
	}
	return m
}

// familiesOf returns the families of the endpoints' addresses, IPv4 first.
func familiesOf(all []discoveryv1.EndpointSlice) (families []corev1.IPFamily) {
	for _, s := range all {
		if f := corev1.IPFamily(s.AddressType); !slices.Contains(families, f) {
			families = append(families, f)
		}
	}
	slices.Sort(families)
	return families
}

// mergePorts returns the union of the ports of all exports. It omits a port that has the name or
// number of a different port in an older export. conflict is nil if all exports have the same
// ports.
func mergePorts(byAge []Export) (ports []isthmus.ExportedPort, conflict *Conflict) {
	contradicts := func(p, q isthmus.ExportedPort) bool {
		// A Service with more than one port needs a name for each of them.
		return q.Name == p.Name || q.Protocol == p.Protocol && q.Port == p.Port || q.Name == "" || p.Name == ""
	}
	var owners, names, texts []string
	for _, x := range byAge {
		for _, p := range x.Service.Ports {
			switch {
			case slices.ContainsFunc(ports, func(q isthmus.ExportedPort) bool { return contradicts(p, q) }):
			case len(ports) < maxPorts:
				ports, owners = append(ports, p), append(owners, x.Cluster)
			default:
				names = append(names, portText(p))
				texts = append(texts, fmt.Sprintf("port %s of cluster %s is left out: there are %d already", portText(p), x.Cluster, maxPorts))
			}
		}
	}
	for i, q := range ports {
		var differs, lacks []string
		for _, x := range byAge {
			switch {
			case slices.Contains(x.Service.Ports, q):
			case slices.ContainsFunc(x.Service.Ports, func(p isthmus.ExportedPort) bool { return contradicts(p, q) }):
				differs = append(differs, x.Cluster)
			default:
				lacks = append(lacks, x.Cluster)
			}
		}
		if len(differs)+len(lacks) == 0 {
			continue
		}
		text := fmt.Sprintf("port %s of cluster %s is used", portText(q), owners[i])
		if len(differs) > 0 {
			text += "; it differs in " + strings.Join(differs, ", ")
		}
		if len(lacks) > 0 {
			text += "; it is missing in " + strings.Join(lacks, ", ")
		}
		names, texts = append(names, portText(q)), append(texts, text)
	}
	if len(texts) > 0 {
		conflict = &Conflict{mcs.ServiceExportReasonPortConflict, "port " + strings.Join(names, ", "), strings.Join(texts, "; ")}
	}
	return ports, conflict
}

// portText formats a port for people.
func portText(p isthmus.ExportedPort) string {
	return strings.TrimSpace(fmt.Sprintf("%s %s/%d", p.Name, p.Protocol, p.Port))
}

func importFor(key Key, byAge []Export, ports []isthmus.ExportedPort) *mcs.ServiceImport {
	first := byAge[0].Service
	i := &mcs.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name, Labels: plainMetadata(first.Labels), Annotations: plainMetadata(first.Annotations)},
		Spec:       mcs.ServiceImportSpec{Type: importType(first), Ports: []mcs.ServicePort{}},
		Status:     mcs.ServiceImportStatus{EndpointSliceObjects: mcs.EndpointSliceObjectsPresent},
	}
	i.Labels[LabelService] = key.Name
	for _, p := range ports {
		port := mcs.ServicePort{Name: p.Name, Protocol: corev1.Protocol(p.Protocol), Port: p.Port}
		if p.AppProtocol != "" {
			port.AppProtocol = ptr.To(p.AppProtocol)
		}
		i.Spec.Ports = append(i.Spec.Ports, port)
	}
	if i.Spec.Type == mcs.ClusterSetIP {
		i.Annotations[AnnotationDerived] = DerivedName(key)
		i.Spec.SessionAffinity = corev1.ServiceAffinity(cmp.Or(first.SessionAffinity, string(corev1.ServiceAffinityNone)))
		if seconds := first.SessionAffinitySeconds; i.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && seconds > 0 {
			i.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(seconds)}}
		}
		if policy := corev1.ServiceInternalTrafficPolicy(first.InternalTrafficPolicy); policy != "" {
			i.Spec.InternalTrafficPolicy = &policy
		}
		if first.TrafficDistribution != "" {
			i.Spec.TrafficDistribution = ptr.To(first.TrafficDistribution)
		}
	}
	for _, x := range byAge {
		i.Status.Clusters = append(i.Status.Clusters, mcs.ClusterStatus{Cluster: x.Cluster})
	}
	slices.SortFunc(i.Status.Clusters, func(a, b mcs.ClusterStatus) int { return strings.Compare(a.Cluster, b.Cluster) })
	return i
}

func plainMetadata(m map[string]isthmus.MetadataValue) map[string]string {
	all := make(map[string]string, len(m)+1)
	for k, v := range m {
		all[k] = string(v)
	}
	return all
}

// derivedService returns the Service that represents the multi-cluster service in this cluster. It
// has no selector, because its endpoints are our slices.
func derivedService(key Key, i *mcs.ServiceImport) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: DerivedName(key), Labels: map[string]string{LabelService: key.Name}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, SessionAffinity: i.Spec.SessionAffinity, SessionAffinityConfig: i.Spec.SessionAffinityConfig,
			InternalTrafficPolicy: i.Spec.InternalTrafficPolicy,
			// Endpoints are IPv4, even where the cluster prefers IPv6 for Services.
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicySingleStack),
		},
	}
	// PreferSameZone is a synonym of PreferClose that older API servers do not accept.
	// PreferSameNode needs hints, which our slices do not have.
	switch ptr.Deref(i.Spec.TrafficDistribution, "") {
	case corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone:
		s.Spec.TrafficDistribution = ptr.To(corev1.ServiceTrafficDistributionPreferClose)
	}
	for _, p := range i.Spec.Ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{
			Name: p.Name, Protocol: p.Protocol, Port: p.Port, AppProtocol: p.AppProtocol, TargetPort: intstr.FromInt32(p.Port),
		})
	}
	return s
}

// portless reports whether an export has only addresses. A headless export may have no ports.
func portless(x Export) bool {
	return importType(x.Service) == mcs.Headless && len(x.Service.Ports) == 0
}

// servedPorts returns the ports of a subset that are unchanged in the merged service. kube-proxy
// matches the ports of a slice only by name, so a slice must not contain a port with another
// number.
func servedPorts(x Export, subset isthmus.EndpointSubset, merged []isthmus.ExportedPort) (all []discoveryv1.EndpointPort) {
	for _, p := range x.Service.Ports {
		if !slices.ContainsFunc(merged, func(q isthmus.ExportedPort) bool {
			return q.Name == p.Name && q.Protocol == p.Protocol && q.Port == p.Port
		}) {
			continue
		}
		for _, t := range subset.Targets {
			if t.Name != p.Name {
				continue
			}
			port := discoveryv1.EndpointPort{Name: ptr.To(p.Name), Protocol: ptr.To(corev1.Protocol(p.Protocol)), Port: ptr.To(t.Port)}
			if p.AppProtocol != "" {
				port.AppProtocol = ptr.To(p.AppProtocol)
			}
			all = append(all, port)
		}
	}
	return all
}

// replaced reports whether clusters with a working tunnel serve every port of an export whose
// tunnel is down. If they do not, the endpoints of that export stay, because they may still work.
func replaced(x Export, all []Export, merged []isthmus.ExportedPort) bool {
	const anyPort = " " // not a valid port name
	names := func(x Export, readyOnly bool) map[string]bool {
		have := make(map[string]bool)
		for _, subset := range x.Service.Subsets {
			if readyOnly && !slices.ContainsFunc(subset.Endpoints, func(e isthmus.ExportedEndpoint) bool {
				_, usable := x.Addresses[e.Address]
				return usable && e.Ready
			}) {
				continue
			}
			ports := servedPorts(x, subset, merged)
			for _, p := range ports {
				have[*p.Name] = true
			}
			if len(ports) > 0 || portless(x) {
				have[anyPort] = true
			}
		}
		return have
	}
	others := make(map[string]bool)
	for _, o := range all {
		if !o.Down {
			maps.Copy(others, names(o, true))
		}
	}
	for name := range names(x, false) {
		if !others[name] {
			return false
		}
	}
	return true
}

// maxSlice is the maximum number of endpoints that an API server accepts in an EndpointSlice.
const maxSlice = 1000

// sliceSize is the maximum average number of endpoints in our EndpointSlices. It equals Kubernetes'
// default for the endpoints in one slice.
const sliceSize = 100

// slicesOf returns the EndpointSlices for one export. The hash of an endpoint's address determines
// its slice, so that a new or removed endpoint usually changes only one slice.
func slicesOf(key Key, x Export, ports []isthmus.ExportedPort, withdrawn bool) (all []discoveryv1.EndpointSlice) {
	derived := DerivedName(key)
	made := make(map[string]*discoveryv1.EndpointSlice)
	type place struct {
		address, ports string
	}
	seen := make(map[place]bool) // each endpoint is in only one slice
	for _, subset := range x.Service.Subsets {
		listen := servedPorts(x, subset, ports)
		if len(listen) == 0 && len(ports) > 0 {
			continue // a slice without ports would stand for all ports
		}
		slots := uint32(1)
		for int(slots)*sliceSize < len(subset.Endpoints) {
			slots *= 2
		}
		text := portsText(listen)
		type slot struct {
			family discoveryv1.AddressType
			number uint32
			full   int
		}
		names := make(map[slot]string)
		for _, e := range subset.Endpoints {
			addr, usable := x.Addresses[e.Address]
			if !usable || seen[place{e.Address, text}] {
				continue
			}
			seen[place{e.Address, text}] = true
			family := discoveryv1.AddressTypeIPv4
			if addr.Is6() {
				family = discoveryv1.AddressTypeIPv6
			}
			h := fnv.New32a()
			_, _ = h.Write([]byte(e.Address))
			var name string
			var slice *discoveryv1.EndpointSlice
			for full := 0; ; full++ { // an exporter may choose addresses with equal hashes, so a slice may become full
				at := slot{family, h.Sum32() % slots, full}
				if name = names[at]; name == "" {
					name = derived + "-" + digest(16, x.ID, text, string(family), fmt.Sprint(at.number, slots, full))
					names[at] = name
				}
				if slice = made[name]; slice == nil || len(slice.Endpoints) < maxSlice {
					break
				}
			}
			if slice == nil {
				slice = &discoveryv1.EndpointSlice{
					ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: name, Labels: map[string]string{
						LabelService:                 key.Name,
						discoveryv1.LabelServiceName: derived,
						discoveryv1.LabelManagedBy:   ManagedBy,
						mcs.LabelServiceName:         key.Name,
						mcs.LabelSourceCluster:       x.Cluster,
					}},
					AddressType: family, Ports: listen,
				}
				made[name] = slice
			}
			slice.Endpoints = append(slice.Endpoints, endpointFor(e, addr, x.Nodes[e.Address], withdrawn))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(made)) {
		all = append(all, *made[name])
	}
	return all
}

func endpointFor(e isthmus.ExportedEndpoint, here netip.Addr, node string, withdrawn bool) discoveryv1.Endpoint {
	made := discoveryv1.Endpoint{
		Addresses: []string{here.String()},
		Conditions: discoveryv1.EndpointConditions{
			Ready: ptr.To(e.Ready && !withdrawn), Serving: ptr.To(e.Serving && !withdrawn), Terminating: ptr.To(e.Terminating),
		},
		Hostname: ptr.To(e.Hostname),
	}
	if e.Hostname == "" {
		if addr, err := netip.ParseAddr(e.Address); err == nil {
			made.Hostname = ptr.To(hostnameOf(addr))
		}
	}
	if e.Zone != "" {
		made.Zone = ptr.To(e.Zone)
	}
	if node != "" {
		made.NodeName = ptr.To(node)
	}
	return made
}

func portsText(ports []discoveryv1.EndpointPort) string {
	var b strings.Builder
	for _, p := range ports {
		fmt.Fprintf(&b, "%s/%s/%d ", *p.Name, *p.Protocol, *p.Port)
	}
	return b.String()
}

// clusterNames returns the name of each cluster in DNS and in labels. This is its clusterName if
// that is a DNS label and no earlier cluster in the list has the same name. Otherwise it is the
// clusterID or a digest of the clusterID.
func clusterNames(clusters []net.ClusterIdentity) map[string]string {
	names, taken := make(map[string]string, len(clusters)), make(map[string]bool, len(clusters))
	for _, c := range clusters {
		name := c.ClusterName
		if !dnsLabel(name) || taken[name] {
			name = c.ClusterID
		}
		if !dnsLabel(name) || taken[name] {
			name = "cluster-" + digest(10, c.ClusterID)
		}
		names[c.ClusterID], taken[name] = name, true
	}
	return names
}
