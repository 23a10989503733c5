package ipam

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// readable is the text that kubectl prints: one peer is remapped and has not answered about our
// pods, the other is not remapped.
const readable = `clusterSubnets:
  11111111-aaaa:
    localNATExternalCIDR: 10.70.0.0/16
    localNATPodCIDR: ""
    remoteExternalCIDR: 10.247.0.0/16
    remotePodCIDR: 10.246.0.0/16
  22222222-bbbb:
    localNATExternalCIDR: None
    localNATPodCIDR: 10.80.0.0/16
    remoteExternalCIDR: 192.0.2.0/24
    remotePodCIDR: 100.64.0.0/18
endpointMappings:
  169.254.0.1:
    ExternalCIDROriginalIP: 10.245.0.1
    clusterMappings:
      11111111-aaaa:
        ExternalCIDRNattedIP: 10.70.0.1
      22222222-bbbb:
        ExternalCIDRNattedIP: 10.245.0.1
  198.51.100.7:
    ExternalCIDROriginalIP: 10.245.0.2
    clusterMappings:
      22222222-bbbb:
        ExternalCIDRNattedIP: 10.245.0.2
externalCIDR: 10.245.0.0/16
natMappingsConfigured:
  11111111-aaaa: {}
  22222222-bbbb: {}
podCIDR: 10.244.0.0/16
pools:
- 10.0.0.0/8
- 192.168.0.0/16
- 172.16.0.0/12
- 100.64.0.0/10
prefixes: {}
reservedSubnets:
- 172.30.0.0/16
serviceCIDR: 10.96.0.0/12
`

func TestSpecIsReadableYAMLWithAllFields(t *testing.T) {
	c := ours()
	c.Reserved = append(c.Reserved, pfx("172.30.0.0/16"))
	b := configured(t, c)
	b, _ = allocate(t, b, claim("11111111-aaaa", "10.244.0.0/16", "10.245.0.0/16"))
	b, _ = allocate(t, b, claim("22222222-bbbb", "100.64.0.0/18", "192.0.2.0/24"))
	b = b.Answered("11111111-aaaa", pfx(""), pfx("10.70.0.0/16"))
	b = b.Answered("22222222-bbbb", pfx("10.80.0.0/16"), pfx("10.245.0.0/16"))
	b = mapped(t, b, "22222222-bbbb", "198.51.100.7", "10.245.0.2")
	text, err := yaml.Marshal(b.Spec())
	if err != nil || string(text) != readable {
		t.Errorf("got %v\n%s", err, text)
	}
	var zero State
	if text, err = yaml.Marshal(zero.Spec()); err != nil || strings.Contains(string(text), "null") {
		t.Errorf("the zero State: %v\n%s", err, text)
	}
}

// Liqo's object also has the state of Liqo's allocator, and an entry that a former peer left
// behind.
func TestReadAcceptsIpamStorageWrittenByLiqo(t *testing.T) {
	spec := readSpec(t, readable)
	want, err := Read(&spec)
	if err != nil {
		t.Fatal(err)
	}
	spec.Prefixes = map[string][]byte{"10.0.0.0/8": {0xff, 0x81, 3}}
	spec.NatMappingsConfigured["33333333-gone"] = v1alpha1.ConfiguredCluster{}
	got, err := Read(&spec)
	if err != nil || !same(got, want) {
		t.Errorf("got %v\n%+v", err, got.Spec())
	}
}

func TestReadNamesTheInvalidField(t *testing.T) {
	peer := func(change func(*v1alpha1.Subnets)) func(*v1alpha1.IpamStorageSpec) {
		return func(s *v1alpha1.IpamStorageSpec) {
			subnets := s.ClusterSubnets["22222222-bbbb"]
			change(&subnets)
			s.ClusterSubnets["22222222-bbbb"] = subnets
		}
	}
	endpoint := func(ip, addr, natted string) func(*v1alpha1.IpamStorageSpec) {
		return func(s *v1alpha1.IpamStorageSpec) {
			s.EndpointMappings[ip] = v1alpha1.EndpointMapping{ExternalCIDROriginalIP: addr,
				ClusterMappings: map[string]v1alpha1.ClusterMapping{"22222222-bbbb": {ExternalCIDRNattedIP: natted}}}
		}
	}
	const b, e = `spec.clusterSubnets["22222222-bbbb"]`, `spec.endpointMappings["198.51.100.9"]`
	for _, tc := range []struct {
		edit func(*v1alpha1.IpamStorageSpec)
		want string
	}{
		{func(s *v1alpha1.IpamStorageSpec) { s.PodCIDR = "10.244.0.1/16" }, "spec.podCIDR: "},
		{func(s *v1alpha1.IpamStorageSpec) { s.PodCIDR = "" }, b + ".localNATPodCIDR: "},
		{func(s *v1alpha1.IpamStorageSpec) { s.ServiceCIDR = "all" }, "spec.serviceCIDR: "},
		{func(s *v1alpha1.IpamStorageSpec) { s.ExternalCIDR = strings.Repeat("1", 1<<20) }, "spec.externalCIDR: "},
		{func(s *v1alpha1.IpamStorageSpec) { s.ExternalCIDR = "" }, `spec.clusterSubnets["11111111-aaaa"].localNATExternalCIDR: `},
		{func(s *v1alpha1.IpamStorageSpec) { s.Pools[1] = "" }, "spec.pools[1]: "},
		{func(s *v1alpha1.IpamStorageSpec) { s.ReservedSubnets[0] = "10.0.0.0" }, "spec.reservedSubnets[0]: "},
		{peer(func(s *v1alpha1.Subnets) { s.RemotePodCIDR = "None" }), b + ".remotePodCIDR: "},
		{peer(func(s *v1alpha1.Subnets) { s.RemotePodCIDR = "" }), b + ".remoteExternalCIDR: "},
		{peer(func(s *v1alpha1.Subnets) { s.RemotePodCIDR = "0.0.0.0/0" }), b + ".remotePodCIDR: "},
		{peer(func(s *v1alpha1.Subnets) { s.RemotePodCIDR = "10.247.3.0/24" }), b + ".remotePodCIDR: 10.247.3.0/24 overlaps"},
		{peer(func(s *v1alpha1.Subnets) { s.RemoteExternalCIDR = "100.64.1.0/24" }), b + ".remoteExternalCIDR: 100.64.1.0/24 overlaps"},
		{peer(func(s *v1alpha1.Subnets) { s.LocalNATPodCIDR = "10.80.0.0/17" }), b + ".localNATPodCIDR: "},
		{peer(func(s *v1alpha1.Subnets) { s.LocalNATExternalCIDR = "fd00::/16" }), b + ".localNATExternalCIDR: "},
		{peer(func(s *v1alpha1.Subnets) { s.LocalNATExternalCIDR = "" }), `spec.endpointMappings["198.51.100.7"].clusterMappings["22222222-bbbb"]: `},
		{func(s *v1alpha1.IpamStorageSpec) { s.ClusterSubnets["/etc"] = v1alpha1.Subnets{} }, `spec.clusterSubnets["/etc"]: `},
		{func(s *v1alpha1.IpamStorageSpec) { delete(s.ClusterSubnets, "22222222-bbbb") }, `spec.endpointMappings["198.51.100.7"].clusterMappings["22222222-bbbb"]: `},
		{endpoint("198.51.100.9", "10.245.0.2", "10.245.0.2"), e + ".ExternalCIDROriginalIP: 10.245.0.2 is already the address of endpoint 198.51.100.7"},
		{endpoint("198.51.100.9", "10.246.0.2", "10.245.0.2"), e + ".ExternalCIDROriginalIP: "},
		{endpoint("198.51.100.9", "10.245.0.1", "10.245.0.1"), e + ".ExternalCIDROriginalIP: "},
		{endpoint("198.51.100.9", "10.245.0.9", "10.245.0.8"), e + `.clusterMappings["22222222-bbbb"].ExternalCIDRNattedIP: `},
		{endpoint("127.0.0.1", "10.245.0.9", "10.245.0.9"), `spec.endpointMappings["127.0.0.1"]: `},
		{endpoint("10.245.0.77", "10.245.0.9", "10.245.0.9"), `spec.endpointMappings["10.245.0.77"]: `},
		{endpoint("fd00::1", "10.245.0.9", "10.245.0.9"), `spec.endpointMappings["fd00::1"]: `},
		{endpoint("::ffff:198.51.100.9", "10.245.0.9", "10.245.0.9"), `spec.endpointMappings["::ffff:198.51.100.9"]: `},
		{endpoint("169.254.0.1", "10.245.0.9", "10.245.0.9"), `spec.endpointMappings["169.254.0.1"].ExternalCIDROriginalIP: `},
		{func(s *v1alpha1.IpamStorageSpec) {
			for i := range MaxPeers {
				s.ClusterSubnets[fmt.Sprint("peer-", i)] = v1alpha1.Subnets{}
			}
		}, fmt.Sprintf("spec.clusterSubnets: has %d peers", MaxPeers+2)},
	} {
		spec := readSpec(t, readable)
		tc.edit(&spec)
		b, err := Read(&spec)
		if err == nil || !strings.HasPrefix(err.Error(), tc.want) || len(err.Error()) > 500 {
			t.Errorf("got %v, want %s...", err, tc.want)
		}
		if !reflect.DeepEqual(b, State{}) {
			t.Errorf("%v: half a State", err)
		}
	}
}

func readSpec(t testing.TB, text string) (spec v1alpha1.IpamStorageSpec) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(text), &spec); err != nil {
		t.Fatal(err)
	}
	return spec
}

// Read either refuses an arbitrary object or returns a valid State.
func FuzzRead(f *testing.F) {
	f.Add(readable)
	f.Add(strings.ReplaceAll(readable, "10.24", "fd00::10.24"))
	f.Add("externalCIDR: fd00::/64\npodCIDR: fd01::/64\nclusterSubnets: {x: {localNATExternalCIDR: None}}\nendpointMappings: {\"fd02::1\": {ExternalCIDROriginalIP: \"fd00::2\"}}")
	f.Add("externalCIDR: 10.0.0.1/32\nendpointMappings: {\"1.1.1.1\": {ExternalCIDROriginalIP: 10.0.0.1}}")
	f.Add("pools: [\"0.0.0.0/0\", \"::/0\"]\nreservedSubnets: [\"0.0.0.0/0\"]")
	f.Fuzz(func(t *testing.T, text string) {
		var spec v1alpha1.IpamStorageSpec
		if yaml.Unmarshal([]byte(text), &spec) != nil {
			return
		}
		b, err := Read(&spec)
		if err != nil {
			return
		}
		checkState(t, b)
		for _, id := range b.Peers() {
			b.MapEndpoint(id, addr("198.51.100.1"))
		}
		next, _ := b.Configure(ours())
		checkState(t, next)
		if next, _, err = next.Allocate(claim("fuzz", "10.244.0.0/16", "10.245.0.0/16")); err == nil {
			checkState(t, next)
		}
	})
}
