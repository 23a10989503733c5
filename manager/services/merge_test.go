package services

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

var (
	epoch = time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
	shop  = Key{Namespace: "prod", Name: "shop"}
	moved = Remap{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.246.0.0/16")}
)

// open implements Namespaces. It reserves kube-system. All namespaces except "missing" exist.
type open struct{}

func (open) Reserved(name string) bool { return name == "kube-system" }
func (open) Exists(name string) bool   { return name != "missing" }

// service returns an export of shop with one port and the given endpoints.
func service(age time.Duration, addresses ...string) isthmus.ExportedService {
	s := isthmus.ExportedService{
		Namespace: shop.Namespace, Name: shop.Name, Since: isthmus.UTCTimeOf(epoch.Add(-age)), Type: "ClusterSetIP",
		Ports: []isthmus.ExportedPort{{Name: "http", Protocol: "TCP", Port: 80}},
	}
	subset := isthmus.EndpointSubset{Targets: []isthmus.TargetPort{{Name: "http", Port: 8080}}}
	for _, a := range addresses {
		subset.Endpoints = append(subset.Endpoints, isthmus.ExportedEndpoint{Address: a, Ready: true, Serving: true})
	}
	s.Subsets = []isthmus.EndpointSubset{subset}
	return s
}

// from returns the export of a peer, and fails the test if it is refused.
func from(t *testing.T, id string, s isthmus.ExportedService) Export {
	t.Helper()
	x, refusals, ok := Peer{ID: id, Cluster: id, Import: []string{"*"}, Pods: moved}.Accept(ShardOf(Key{Namespace: s.Namespace, Name: s.Name}), s, open{}, epoch)
	if !ok || len(refusals) > 0 {
		t.Fatalf("refused: %v", refusals)
	}
	return x
}

// endpoints returns the endpoints of a cluster, or of all clusters if cluster is empty. The form is
// address:port, with ! if the endpoint is not ready.
func endpoints(m Merged, cluster string) (all []string) {
	for _, s := range m.Slices {
		if cluster != "" && s.Labels[mcs.LabelSourceCluster] != cluster {
			continue
		}
		for _, e := range s.Endpoints {
			for _, p := range s.Ports {
				text := fmt.Sprintf("%s:%d", e.Addresses[0], *p.Port)
				if !*e.Conditions.Ready {
					text += "!"
				}
				all = append(all, text)
			}
		}
	}
	slices.Sort(all)
	return all
}

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s\n got %v\nwant %v", what, got, want)
	}
}

func TestMergeTranslatesEndpointsIntoThePeersNetwork(t *testing.T) {
	own := ownExport("a", "a", Own{Service: service(0, "10.244.0.5")})
	m := Merge(shop, []Export{own, from(t, "b", service(time.Hour, "10.244.0.5", "10.244.9.9"))})
	same(t, "own endpoints", endpoints(m, "a"), []string{"10.244.0.5:8080"})
	same(t, "the peer's endpoints", endpoints(m, "b"), []string{"10.246.0.5:8080", "10.246.9.9:8080"})
	for _, s := range m.Slices {
		if s.Labels[discoveryv1.LabelServiceName] != m.Service.Name || s.Labels[mcs.LabelServiceName] != "shop" || s.Labels[discoveryv1.LabelManagedBy] != ManagedBy {
			t.Errorf("labels of a slice: %v", s.Labels)
		}
	}
	if m.Import.Annotations[AnnotationDerived] != m.Service.Name || m.Service.Spec.Selector != nil {
		t.Errorf("import %v, Service %v", m.Import.ObjectMeta, m.Service.Spec)
	}
	same(t, "clusters", m.Import.Status.Clusters, []mcs.ClusterStatus{{Cluster: "a"}, {Cluster: "b"}})
	same(t, "conflicts", len(m.Conflicts), 0)
}

func TestHostnameIsMadeFromTheAddressInTheExportingCluster(t *testing.T) {
	s := service(0, "10.244.0.5")
	s.Type = "Headless"
	s.Subsets[0].Endpoints = append(s.Subsets[0].Endpoints, isthmus.ExportedEndpoint{Address: "10.244.0.6", Hostname: "web-0", Ready: true})
	m := Merge(shop, []Export{from(t, "b", s)})
	if m.Service != nil || m.Import.Spec.Type != mcs.Headless {
		t.Errorf("a headless service has a derived one: %v", m.Service)
	}
	names := make(map[string]string)
	for _, e := range m.Slices[0].Endpoints {
		names[e.Addresses[0]] = *e.Hostname
	}
	same(t, "families", m.Import.Spec.IPFamilies, []corev1.IPFamily{corev1.IPv4Protocol})
	same(t, "hostnames", names, map[string]string{"10.246.0.5": "10-244-0-5", "10.246.0.6": "web-0"})
}

// A port with the same name but another number must not be served: kube-proxy would send clients of
// the older cluster's port to it.
func TestConflictingPortIsServedOnlyByTheOldestCluster(t *testing.T) {
	younger := service(time.Hour, "10.244.0.7")
	younger.Ports = []isthmus.ExportedPort{{Name: "http", Protocol: "TCP", Port: 81}, {Name: "dns", Protocol: "UDP", Port: 53}}
	younger.Subsets[0].Targets = append(younger.Subsets[0].Targets, isthmus.TargetPort{Name: "dns", Port: 5353})
	m := Merge(shop, []Export{from(t, "b", younger), from(t, "c", service(2*time.Hour, "10.244.0.8"))})
	same(t, "ports", len(m.Import.Spec.Ports), 2)
	same(t, "endpoints of b", endpoints(m, "b"), []string{"10.246.0.7:5353"})
	same(t, "endpoints of c", endpoints(m, "c"), []string{"10.246.0.8:8080"})
	same(t, "conflicts", m.Conflicts, []Conflict{{mcs.ServiceExportReasonPortConflict, "port http TCP/80, dns UDP/53",
		"port http TCP/80 of cluster c is used; it differs in b; port dns UDP/53 of cluster b is used; it is missing in c"}})
}

func TestPortsBeyondTheLimitAreAConflict(t *testing.T) {
	older, younger := service(2*time.Hour), service(time.Hour)
	for i := range int32(maxPorts) {
		older.Ports = append(older.Ports[:i:i], isthmus.ExportedPort{Name: fmt.Sprint("p", i), Protocol: "TCP", Port: 1000 + i})
	}
	younger.Ports = []isthmus.ExportedPort{older.Ports[0], {Name: "more", Protocol: "TCP", Port: 80}}
	m := Merge(shop, []Export{from(t, "b", younger), from(t, "c", older)})
	same(t, "ports", len(m.Import.Spec.Ports), maxPorts)
	if c := m.Conflicts[0]; !strings.HasPrefix(c.Message, "port more TCP/80 of cluster b is left out: there are 64 already; port p1 TCP/1001 of cluster c is used; it is missing in b; ") {
		t.Errorf("%+v", c)
	}
}

func TestOldestExportWinsAConflictThenTheSmallerClusterID(t *testing.T) {
	b, c := service(time.Hour), service(time.Hour)
	b.SessionAffinity, b.SessionAffinitySeconds, c.Type = "ClientIP", 60, "Headless"
	for _, order := range [][]Export{{from(t, "b", b), from(t, "c", c)}, {from(t, "c", c), from(t, "b", b)}} {
		m := Merge(shop, order)
		if m.Import.Spec.Type != mcs.ClusterSetIP || m.Import.Spec.SessionAffinity != "ClientIP" || *m.Service.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds != 60 {
			t.Errorf("spec: %+v", m.Import.Spec)
		}
		same(t, "conflicts", m.Conflicts, []Conflict{
			{"SessionAffinityConfigConflict", "timeout of the session affinity", "timeout of the session affinity of cluster b is used; it differs in c"},
			{"SessionAffinityConflict", "session affinity", "session affinity of cluster b is used; it differs in c"},
			{"TypeConflict", "type", "type of cluster b is used; it differs in c"},
		})
	}
	future := service(-time.Hour) // the export begins in the future, so it is younger than any other
	future.SessionAffinity = "ClientIP"
	m := Merge(shop, []Export{from(t, "b", future), from(t, "c", service(time.Minute))})
	same(t, "affinity", string(m.Service.Spec.SessionAffinity), "None")
}

func TestEndpointsOfADownClusterStayUnlessAnotherClusterServes(t *testing.T) {
	b, c := from(t, "b", service(time.Hour, "10.244.0.7")), from(t, "c", service(0, "10.244.0.8"))
	b.Down = true
	same(t, "alone", endpoints(Merge(shop, []Export{b}), "b"), []string{"10.246.0.7:8080"})
	same(t, "with another", endpoints(Merge(shop, []Export{b, c}), ""), []string{"10.246.0.7:8080!", "10.246.0.8:8080"})
	c.Down = true
	same(t, "both down", endpoints(Merge(shop, []Export{b, c}), ""), []string{"10.246.0.7:8080", "10.246.0.8:8080"})
	c.Down, c.Service.Subsets[0].Endpoints[0].Ready = false, false
	same(t, "the other is not ready", endpoints(Merge(shop, []Export{b, c}), "b"), []string{"10.246.0.7:8080"})
}

func TestHeadlessExportsMayDifferInPorts(t *testing.T) {
	older, younger := service(time.Hour, "10.244.1.5"), service(time.Minute, "10.244.2.5")
	older.Type, younger.Type = "Headless", "Headless"
	older.Ports, older.Subsets[0].Targets = nil, nil
	ours, theirs := ownExport("a", "a", Own{Service: older}), from(t, "b", younger)
	addresses := func(m Merged) (all []string) {
		for _, s := range m.Slices {
			for _, e := range s.Endpoints {
				all = append(all, fmt.Sprintf("%s %d ports, ready %v", e.Addresses[0], len(s.Ports), *e.Conditions.Ready))
			}
		}
		slices.Sort(all)
		return all
	}
	same(t, "both", addresses(Merge(shop, []Export{ours, theirs})), []string{"10.244.1.5 0 ports, ready true", "10.246.2.5 1 ports, ready true"})
	theirs.Down = true // no other cluster serves its port
	same(t, "the one with a port is down", addresses(Merge(shop, []Export{ours, theirs})), []string{"10.244.1.5 0 ports, ready true", "10.246.2.5 1 ports, ready true"})
	ours, theirs = ownExport("a", "a", Own{Service: younger}), from(t, "b", older)
	theirs.Down = true // another cluster serves the name with other addresses
	same(t, "the one without is down", addresses(Merge(shop, []Export{ours, theirs})), []string{"10.244.2.5 1 ports, ready true", "10.246.1.5 0 ports, ready false"})
	younger.Type = "ClusterSetIP" // this export is younger; a slice without ports would mean all ports
	m := Merge(shop, []Export{ownExport("a", "a", Own{Service: older}), from(t, "b", younger)})
	same(t, "type of the older", m.Import.Spec.Type, mcs.Headless)
	older.Since, younger.Since = younger.Since, older.Since
	same(t, "as ClusterSetIP", addresses(Merge(shop, []Export{ownExport("a", "a", Own{Service: older}), from(t, "b", younger)})), []string{"10.246.2.5 1 ports, ready true"})
}

func TestAcceptRefusesInvalidServicesAndAddresses(t *testing.T) {
	peer := Peer{ID: "b", Cluster: "b", Import: []string{"prod", "kube-system", "missing"}, Pods: moved}
	for name, tc := range map[string]struct {
		edit   func(*isthmus.ExportedService)
		reason string
		served bool
	}{
		"an address of ours":            {func(s *isthmus.ExportedService) { s.Subsets[0].Endpoints[0].Address = "10.246.0.9" }, RefusedAddress, true},
		"an address of a third peer":    {func(s *isthmus.ExportedService) { s.Subsets[0].Endpoints[0].Address = "10.250.0.9" }, RefusedAddress, true},
		"IPv4 in IPv6":                  {func(s *isthmus.ExportedService) { s.Subsets[0].Endpoints[0].Address = "::ffff:10.244.0.9" }, RefusedAddress, true},
		"a zone":                        {func(s *isthmus.ExportedService) { s.Subsets[0].Endpoints[0].Address = "fe80::1%eth0" }, RefusedAddress, true},
		"no address":                    {func(s *isthmus.ExportedService) { s.Subsets[0].Endpoints[0].Address = "shop.example" }, RefusedAddress, true},
		"a name with dots":              {func(s *isthmus.ExportedService) { s.Name = "a.b" }, RefusedInvalid, false},
		"a namespace of Kubernetes":     {func(s *isthmus.ExportedService) { s.Namespace = "kube-system" }, RefusedReserved, false},
		"a namespace that is not there": {func(s *isthmus.ExportedService) { s.Namespace = "missing" }, RefusedNamespace, false},
		"a namespace without consent":   {func(s *isthmus.ExportedService) { s.Namespace = "secret" }, RefusedConsent, false},
		"a port of 0":                   {func(s *isthmus.ExportedService) { s.Ports[0].Port = 0 }, RefusedInvalid, false},
		"no ports":                      {func(s *isthmus.ExportedService) { s.Ports = nil }, RefusedInvalid, false},
		"a hostname with dots":          {func(s *isthmus.ExportedService) { s.Subsets[0].Endpoints[0].Hostname = "a.b" }, RefusedInvalid, false},
		"our label":                     {func(s *isthmus.ExportedService) { s.Labels = map[string]isthmus.MetadataValue{LabelService: "x"} }, RefusedMetadata, true},
		"our annotation": {func(s *isthmus.ExportedService) {
			s.Annotations = map[string]isthmus.MetadataValue{AnnotationDerived: "x"}
		}, RefusedMetadata, true},
	} {
		s := service(0, "10.244.0.5")
		tc.edit(&s)
		x, refusals, ok := peer.Accept(ShardOf(Key{Namespace: s.Namespace, Name: s.Name}), s, open{}, epoch)
		if ok != tc.served || len(refusals) != 1 || refusals[0].Reason != tc.reason {
			t.Errorf("%s: served %v, refusals %v", name, ok, refusals)
		}
		if ok && tc.reason == RefusedAddress && len(endpoints(Merge(shop, []Export{x}), "")) > 0 {
			t.Errorf("%s: is served", name)
		}
	}
	if _, refusals, ok := peer.Accept("services-99", service(0), open{}, epoch); ok || refusals[0].Reason != RefusedShard {
		t.Errorf("wrong shard: %v", refusals)
	}
	peer.Pods = Remap{}
	if _, refusals, ok := peer.Accept(ShardOf(shop), service(0), open{}, epoch); ok || len(refusals) != 1 || refusals[0].Reason != RefusedNetworks {
		t.Errorf("without a network: %v %v", ok, refusals)
	}
}

// reference finds the ports and endpoints of a service by trying all of them. It shares no code
// with Merge.
func reference(exports []Export) (ports map[string]bool, ends map[string]bool) {
	ports, ends = make(map[string]bool), make(map[string]bool)
	rank := slices.Clone(exports)
	for i := range rank { // the oldest export first
		for j := i + 1; j < len(rank); j++ {
			if rank[j].Since < rank[i].Since || rank[j].Since == rank[i].Since && rank[j].ID < rank[i].ID {
				rank[i], rank[j] = rank[j], rank[i]
			}
		}
	}
	names, numbers := make(map[string]bool), make(map[string]bool)
	for _, x := range rank {
		for _, p := range x.Service.Ports {
			number := fmt.Sprint(p.Protocol, p.Port)
			if names[p.Name] || numbers[number] || names[""] || p.Name == "" && len(names) > 0 {
				continue
			}
			names[p.Name], numbers[number] = true, true
			ports[p.Name+number] = true
		}
	}
	for _, x := range rank {
		for _, subset := range x.Service.Subsets {
			for _, e := range subset.Endpoints {
				octets := strings.Split(e.Address, ".")
				if len(octets) != 4 || octets[0] != "10" || octets[1] != "244" {
					continue
				}
				for _, p := range x.Service.Ports {
					for _, target := range subset.Targets {
						if target.Name == p.Name && ports[p.Name+fmt.Sprint(p.Protocol, p.Port)] {
							ends[fmt.Sprintf("%s 10.246.%s.%s:%d %s", x.Cluster, octets[2], octets[3], target.Port, p.Name)] = true
						}
					}
				}
			}
		}
	}
	return ports, ends
}

func TestMergeEqualsTheSlowReference(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 3000 {
		var exports []Export
		for _, id := range []string{"b", "c", "d"}[:1+rng.IntN(3)] {
			s := service(time.Duration(rng.IntN(3)) * time.Hour)
			s.Type = []string{"ClusterSetIP", "Headless"}[rng.IntN(2)]
			s.Ports, s.Subsets = nil, nil
			for _, name := range []string{"http", "dns", "grpc"} {
				if rng.IntN(2) == 0 {
					s.Ports = append(s.Ports, isthmus.ExportedPort{Name: name, Protocol: "TCP", Port: int32(1 + rng.IntN(4))})
				}
			}
			if len(s.Ports) == 0 {
				s.Ports = []isthmus.ExportedPort{{Protocol: "UDP", Port: int32(1 + rng.IntN(4))}}
			}
			used := make(map[int]bool)
			for range 1 + rng.IntN(2) {
				var subset isthmus.EndpointSubset
				for _, p := range s.Ports {
					subset.Targets = append(subset.Targets, isthmus.TargetPort{Name: p.Name, Port: int32(1 + rng.IntN(9))})
				}
				for range rng.IntN(150) {
					n := rng.IntN(1000)
					if !used[n] {
						subset.Endpoints = append(subset.Endpoints, isthmus.ExportedEndpoint{Address: fmt.Sprintf("10.%d.%d.%d", 244+rng.IntN(2), n/250, n%250), Ready: true})
					}
					used[n] = true
				}
				s.Subsets = append(s.Subsets, subset)
			}
			x, _, ok := Peer{ID: id, Cluster: id, Import: []string{"*"}, Pods: moved}.Accept(ShardOf(shop), s, open{}, epoch)
			if !ok { // two ports have the same number
				continue
			}
			exports = append(exports, x)
		}
		if len(exports) == 0 {
			continue
		}
		m := Merge(shop, exports)
		ports, ends := reference(exports)
		gotPorts, gotEnds := make(map[string]bool), make(map[string]bool)
		for _, p := range m.Import.Spec.Ports {
			gotPorts[p.Name+fmt.Sprint(p.Protocol, p.Port)] = true
		}
		for _, s := range m.Slices {
			for _, e := range s.Endpoints {
				for _, p := range s.Ports {
					gotEnds[fmt.Sprintf("%s %s:%d %s", s.Labels[mcs.LabelSourceCluster], e.Addresses[0], *p.Port, *p.Name)] = true
				}
			}
		}
		if !maps.Equal(ports, gotPorts) || !maps.Equal(ends, gotEnds) {
			t.Fatalf("round %d: ports %v, want %v; endpoints\n%v\nwant\n%v", round, gotPorts, ports, gotEnds, ends)
		}
		rng.Shuffle(len(exports), func(i, j int) { exports[i], exports[j] = exports[j], exports[i] })
		if again := Merge(shop, exports); !reflect.DeepEqual(again, m) {
			t.Fatalf("round %d: the order of the exports matters", round)
		}
	}
}

// Adding or removing an endpoint changes only one slice, and no slice has more endpoints than the
// API server accepts.
func TestRemovingAnEndpointChangesOnlyOneSlice(t *testing.T) {
	var all []string
	for i := range 1000 {
		all = append(all, fmt.Sprintf("10.244.%d.%d", i/250, i%250))
	}
	before := Merge(shop, []Export{from(t, "b", service(0, all...))})
	after := Merge(shop, []Export{from(t, "b", service(0, all[:999]...))})
	changed := 0
	for i := range before.Slices {
		if !reflect.DeepEqual(before.Slices[i], after.Slices[i]) {
			changed++
		}
	}
	if changed != 1 || len(before.Slices) != 16 {
		t.Errorf("%d of %d slices changed", changed, len(before.Slices))
	}
}

func TestRemapKeepsHostBits(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 10_000 {
		bits := 8 + rng.IntN(23)
		var a, b, host [4]byte
		for i := range 4 {
			a[i], b[i], host[i] = byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())
		}
		r := Remap{netip.PrefixFrom(netip.AddrFrom4(a), bits).Masked(), netip.PrefixFrom(netip.AddrFrom4(b), bits).Masked()}
		in, inside := Remap{netip.PrefixFrom(netip.AddrFrom4(host), bits).Masked(), r.From}.Map(netip.AddrFrom4(host))
		out, ok := r.Map(in)
		back, _ := Remap{r.To, r.From}.Map(out)
		if !inside || !ok || !r.From.Contains(in) || !r.To.Contains(out) || back != in {
			t.Fatalf("%v: %v -> %v -> %v", r, in, out, back)
		}
	}
}

func TestEachExportIsInAShardOrReportedAsOmitted(t *testing.T) {
	var exports []isthmus.ExportedService
	for i := range 3000 {
		s := service(time.Duration(i)*time.Second, "10.244.0.1")
		s.Name = fmt.Sprint("s", i)
		exports = append(exports, s)
	}
	shards, omitted := shardsOf(exports)
	n := 0
	for name, spec := range shards {
		n += len(spec.Services)
		if len(spec.Services) > isthmus.MaxExportedServices {
			t.Errorf("%s has %d services", name, len(spec.Services))
		}
		for _, s := range spec.Services {
			if ShardOf(Key{Namespace: s.Namespace, Name: s.Name}) != name {
				t.Errorf("%s is in %s", s.Name, name)
			}
		}
	}
	if n+len(omitted) != len(exports) || len(shards) != isthmus.PeerServicesShards || n < 16*isthmus.MaxExportedServices {
		t.Errorf("%d in %d shards, %d omitted", n, len(shards), len(omitted))
	}
}

func TestExportsOfOneNamespaceLeaveRoomForOthers(t *testing.T) {
	addresses := make([]string, isthmus.MaxExportedEndpoints)
	for i := range addresses {
		addresses[i] = fmt.Sprintf("10.244.%d.%d", i/250, i%250)
	}
	var exports []isthmus.ExportedService
	for i := range 400 {
		large := service(2*time.Hour, addresses...)
		large.Namespace, large.Name = "greedy", fmt.Sprint("large-", i)
		small := service(time.Hour, "10.244.0.1")
		small.Namespace, small.Name = "greedy", fmt.Sprint("small-", i)
		younger := service(time.Minute, "10.244.0.1")
		younger.Namespace, younger.Name = "modest", fmt.Sprint("x", i)
		exports = append(exports, large, small, younger)
	}
	shards, omitted := shardsOf(exports)
	if len(shards) != isthmus.PeerServicesShards {
		t.Errorf("%d shards", len(shards))
	}
	if i := slices.IndexFunc(omitted, func(k Key) bool { return k.Namespace == "modest" }); i >= 0 {
		t.Errorf("%s is left out", omitted[i])
	}
}

// etcd accepts requests of 1.5 MiB. Labels and endpoints of the maximum size must leave some room.
func TestShardsFitIntoEtcd(t *testing.T) {
	var exports []isthmus.ExportedService
	for i := range 5000 {
		s := service(time.Duration(i) * time.Second)
		s.Name, s.Labels = fmt.Sprint("s", i), map[string]isthmus.MetadataValue{}
		for j := range 16 {
			s.Labels[fmt.Sprint(strings.Repeat("\x01", 300), j)] = isthmus.MetadataValue(strings.Repeat("<", 512))
		}
		if i%100 == 0 {
			s.Labels = nil
			var list []isthmus.ExportedEndpoint
			for range 1200 {
				list = append(list, isthmus.ExportedEndpoint{Address: "2001:db8:1111:2222:3333:4444:5555:6666", Hostname: strings.Repeat("h", 63), Zone: strings.Repeat("\x01", 63), Terminating: true})
			}
			s.Subsets = []isthmus.EndpointSubset{{Endpoints: list}}
		}
		exports = append(exports, s)
	}
	shards, omitted := shardsOf(exports)
	if len(omitted) == 0 {
		t.Error("all fit")
	}
	for name, spec := range shards {
		text, err := json.Marshal(spec)
		if err != nil || len(text) > 1<<20 || len(text) < 1<<18 {
			t.Errorf("%s has %d octets, %v", name, len(text), err)
		}
	}
}

func TestClusterNamesAreUniqueDNSLabels(t *testing.T) {
	long := strings.Repeat("x", 64)
	names := clusterNames([]net.ClusterIdentity{
		{ClusterID: "id-1", ClusterName: "alpha"}, {ClusterID: "id-2", ClusterName: "alpha"}, {ClusterID: "ID.3", ClusterName: "b.c"}, {ClusterID: "id-4", ClusterName: long},
	})
	seen := make(map[string]bool)
	for _, n := range names {
		if !dnsLabel(n) || seen[n] {
			t.Errorf("names: %v", names)
		}
		seen[n] = true
	}
	same(t, "the first and the second", []string{names["id-1"], names["id-2"]}, []string{"alpha", "id-2"})
}

// FuzzAccept reads hostile bytes as a service. It checks that a served service has only addresses
// of the peer's pods.
func FuzzAccept(f *testing.F) {
	f.Add("prod", "shop", "ClusterSetIP", "http", "TCP", int32(80), int32(8080), "10.244.0.5", "web-0", "z", "team", "blue", "1970-01-01T00:00:00Z", true)
	f.Add("kube-system", "a.b", "Headless", "", "SCTP", int32(-1), int32(0), "::ffff:10.244.0.5", "-", "/", "isthmus.net/service", "\x00", "9999-12-31T23:59:59Z", false)
	f.Add("prod", "shop", "Headless", "", "UDP", int32(53), int32(53), "10.246.0.0", "", "", "multicluster.kubernetes.io/derived-service", "kubernetes", "2026-01-01t00:00:00z", true)
	f.Fuzz(func(t *testing.T, namespace, name, kind, port, protocol string, number, target int32, address, hostname, zone, key, value, since string, ready bool) {
		s := isthmus.ExportedService{
			Namespace: namespace, Name: name, Type: kind, Since: since,
			Ports:       []isthmus.ExportedPort{{Name: port, Protocol: protocol, Port: number}},
			Labels:      map[string]isthmus.MetadataValue{key: isthmus.MetadataValue(value)},
			Annotations: map[string]isthmus.MetadataValue{key: isthmus.MetadataValue(value)},
			Subsets: []isthmus.EndpointSubset{{
				Targets:   []isthmus.TargetPort{{Name: port, Port: target}},
				Endpoints: []isthmus.ExportedEndpoint{{Address: address, Hostname: hostname, Zone: zone, Ready: ready}, {Address: "10.244.255.255", Ready: ready}},
			}},
		}
		k := Key{Namespace: namespace, Name: name}
		x, refusals, ok := Peer{ID: "b", Cluster: "b", Import: []string{"*"}, Pods: moved}.Accept(ShardOf(k), s, open{}, epoch)
		if !ok {
			if len(refusals) == 0 {
				t.Fatal("refused without a reason")
			}
			return
		}
		if x.Since > isthmus.UTCTimeOf(epoch) || namespace == "kube-system" {
			t.Fatalf("accepted: %+v", x)
		}
		m := Merge(k, []Export{x, ownExport("a", "a", Own{Service: service(0, "192.0.2.1")})})
		if m.Import.Labels[LabelService] != name || !dnsLabel(name) {
			t.Fatalf("labels %v", m.Import.Labels)
		}
		if derived := m.Import.Annotations[AnnotationDerived]; derived != "" && derived != DerivedName(k) {
			t.Fatalf("annotations %v", m.Import.Annotations)
		}
		for _, slice := range m.Slices {
			for _, e := range slice.Endpoints {
				addr := netip.MustParseAddr(e.Addresses[0])
				if b := slice.Labels[mcs.LabelSourceCluster] == "b"; b && !moved.To.Contains(addr) || !b && addr != netip.MustParseAddr("192.0.2.1") {
					t.Fatalf("slice of %s has %v", slice.Labels[mcs.LabelSourceCluster], addr)
				}
				if !dnsLabel(*e.Hostname) || len(cmp.Or(zone, "")) > 63 && e.Zone != nil {
					t.Fatalf("endpoint %+v", e)
				}
			}
			for _, p := range slice.Ports {
				if *p.Port < 1 || *p.Port > 65535 {
					t.Fatalf("port %d", *p.Port)
				}
			}
		}
	})
}
