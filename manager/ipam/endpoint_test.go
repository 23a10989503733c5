package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// joined returns a State with the peer b, which sees our networks as the two given ones.
func joined(t *testing.T, c Config, pod, external string) State {
	t.Helper()
	b, _ := allocate(t, configured(t, c), claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	b = b.Answered("b", pfx(pod), pfx(external))
	return b
}

func mapped(t *testing.T, b State, id, ip, want string) State {
	t.Helper()
	b, got, err := b.MapEndpoint(id, addr(ip))
	if err != nil || got != addr(want) {
		t.Fatalf("%s for %s: %v %v, want %s", ip, id, got, err, want)
	}
	return b
}

func TestMapEndpointReturnsTheSameAddressesAsLiqo(t *testing.T) {
	b := joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16")
	if pod := mapped(t, b, "b", "10.244.3.4", "10.200.3.4"); len(pod.Changed(b)) > 0 {
		t.Error("a pod's address is remembered")
	}
	mapped(t, b, "b", "169.254.0.1", "10.247.0.1")
	b = mapped(t, b, "b", "198.51.100.7", "10.247.0.2")
	b = mapped(t, b, "b", "10.246.9.9", "10.247.0.3") // in a peer's network here: a pod of a third cluster
	if again := mapped(t, b, "b", "198.51.100.7", "10.247.0.2"); len(again.Changed(b)) > 0 {
		t.Error("mapping again changes something")
	}

	// Another peer sees the same address of ours in its own network.
	b, _ = allocate(t, b, claim("c", "10.244.0.0/16", "10.245.0.0/16"))
	if _, _, err := b.MapEndpoint("c", addr("198.51.100.7")); !errors.Is(err, errNoConfiguration) {
		t.Errorf("mapped for a peer that has not answered: %v", err)
	}
	b = b.Answered("c", pfx("10.244.0.0/16"), pfx("10.245.0.0/16"))
	mapped(t, b, "c", "10.244.3.4", "10.244.3.4")
	b = mapped(t, b, "c", "198.51.100.7", "10.245.0.2")

	nm, ok := b.NatMapping("b")
	want := v1alpha1.NatMappingSpec{ClusterID: "b", PodCIDR: "10.246.0.0/16", ExternalCIDR: "10.247.0.0/16", ClusterMappings: v1alpha1.EndpointMap{
		"169.254.0.1": "10.247.0.1", "198.51.100.7": "10.247.0.2", "10.246.9.9": "10.247.0.3"}}
	if !ok || !reflect.DeepEqual(nm, want) {
		t.Errorf("NatMapping %+v, want %+v", nm, want)
	}

	// The address is free once no peer uses it, and is allocated again at once.
	b = b.UnmapEndpoint("b", addr("198.51.100.7")).UnmapEndpoint("b", addr("198.51.100.7")).UnmapEndpoint("b", addr("169.254.0.1"))
	mapped(t, b, "b", "198.51.100.8", "10.247.0.4")
	b = b.UnmapEndpoint("c", addr("198.51.100.7")).UnmapEndpoint("nobody", addr("198.51.100.7"))
	b = mapped(t, b, "b", "198.51.100.8", "10.247.0.2")
	mapped(t, b, "b", "169.254.0.1", "10.247.0.1")

	// Release removes the peer's mappings.
	b = b.Release("b")
	if len(b.endpoints) > 0 {
		t.Errorf("left over: %v", b.Spec().EndpointMappings)
	}
	if _, ok := b.NatMapping("b"); ok {
		t.Error("a NatMapping for a peer that is gone")
	}
}

func TestMapEndpointRefusesUnreachableAddresses(t *testing.T) {
	b := joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16")
	for _, ip := range []netip.Addr{{}, addr("127.0.0.1"), addr("0.0.0.0"), addr("169.254.169.254"), addr("224.0.0.5"), addr("255.255.255.255"), addr("100.100.100.200"),
		addr("::1"), addr("fe80::1"), addr("fe80::1%eth0"), addr("::ffff:10.0.0.1"), addr("fd00::1"), addr("10.245.0.9")} {
		if next, got, err := b.MapEndpoint("b", ip); err == nil || len(next.Changed(b)) > 0 {
			t.Errorf("%v: mapped to %v", ip, got)
		}
	}
	if _, _, err := b.MapEndpoint("nobody", addr("198.51.100.7")); !errors.Is(err, errNoConfiguration) || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("a stranger: %v", err)
	}
}

func TestExhaustedExternalCIDRHasRoomAfterAnUnmap(t *testing.T) {
	c := ours()
	c.ExternalCIDR = pfx("192.0.2.0/28") // .0, .1 and .15 are not available to endpoints
	b := joined(t, c, "10.200.0.0/16", "203.0.113.16/28")
	for i := range 13 {
		b = mapped(t, b, "b", fmt.Sprint("198.51.100.", i), fmt.Sprint("203.0.113.", 18+i))
	}
	if _, _, err := b.MapEndpoint("b", addr("198.51.100.13")); !exhausted(err) {
		t.Errorf("got %v", err)
	}
	b = b.UnmapEndpoint("b", addr("198.51.100.4"))
	mapped(t, b, "b", "198.51.100.13", "203.0.113.22")
}

// The endpoints are bounded per peer, because one object names all endpoints of a peer, and in
// total. The largest object fits into etcd.
func TestNumberOfEndpointsIsBoundedPerPeerAndInTotal(t *testing.T) {
	c := ours()
	c.PodCIDR, c.ServiceCIDR, c.ExternalCIDR = pfx("fd00:1::/112"), pfx("fd00:2::/112"), pfx("fd00:aaaa:bbbb:cccc:dddd:eeee:ffff::/112")
	c.ExternalCIDR = c.ExternalCIDR.Masked()
	seen := &isthmus.NetworkPair{PodCIDR: "fd00:3::/112", ExternalCIDR: "fd00:4::/112"}
	addrIn := func(network netip.Prefix, i int) string {
		a := network.Addr().As16()
		a[14], a[15] = byte(i>>8), byte(i)
		return netip.AddrFrom16(a).String()
	}
	var all []isthmus.NetworkAllocationSpec
	for p := range 5 {
		spec := isthmus.NetworkAllocationSpec{ClusterID: fmt.Sprint("peer-", p), Seen: seen}
		for i := range MaxEndpointsPerPeer - 2*(p/3) {
			n := 2 + p*MaxEndpointsPerPeer + i
			if p < 4 || i == 0 {
				spec.Endpoints = append(spec.Endpoints, isthmus.MappedEndpoint{IP: addrIn(pfx("2001:db8:aaaa:bbbb:cccc:dddd:eeee::/112").Masked(), n), Address: addrIn(c.ExternalCIDR, n)})
			}
		}
		all = append(all, spec)
	}
	b, wrong := FromAllocations(c, all[:4])
	if wrong != nil {
		t.Fatal(wrong[0])
	}
	if n := len(b.endpoints); n != MaxEndpoints-2 {
		t.Fatalf("%d endpoints", n)
	}
	more := func(id, ip string) (err error) {
		_, _, err = b.MapEndpoint(id, addr(ip))
		return err
	}
	if err := more("peer-0", "2001:db8::1"); !exhausted(err) || !strings.Contains(err.Error(), "4096 endpoints are already mapped for cluster \"peer-0\"") {
		t.Errorf("of one peer: %v", err)
	}
	if err := more("peer-0", all[0].Endpoints[7].IP); err != nil {
		t.Errorf("one that it has: %v", err)
	}
	b, _, err := b.MapEndpoint("peer-3", addr("2001:db8::1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := more("peer-3", "2001:db8::2"); !exhausted(err) || !strings.Contains(err.Error(), "16384") {
		t.Errorf("of all: %v", err)
	}
	checkState(t, b)
	largest := b.Allocation("peer-0")
	for i := range largest.Endpoints { // requesters as long as MaxNotes permits
		largest.Endpoints[i].Requesters, largest.Endpoints[i].Target = []string{strings.Repeat("x", MaxNotes/MaxEndpointsPerPeer-3)}, "service"
	}
	if text, err := json.Marshal(largest); err != nil || len(text) > 1<<20 {
		t.Errorf("%d octets (%v); want at most 1 MiB", len(text), err)
	}
}

func TestMappingsAreUpdatedWhenOurNetworksOrAnswersChange(t *testing.T) {
	b := mapped(t, joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16"), "b", "198.51.100.7", "10.247.0.2")
	b = mapped(t, b, "b", "192.0.2.7", "10.247.0.3")
	b = mapped(t, b.Answered("b", netip.Prefix{}, pfx("10.77.0.0/16")), "b", "198.51.100.7", "10.77.0.2")
	if got := b.Answered("b", pfx("10.200.0.0/20"), pfx("127.0.0.0/16")); !same(got, b) {
		t.Error("an answer that does not fit was taken")
	}

	c := ours()
	c.ExternalCIDR = pfx("172.20.0.0/16")
	moved, _ := b.Configure(c) // the peer has not answered for the new network yet
	mapped(t, moved, "b", "192.0.2.7", "10.77.0.3")
	if got := moved.Spec().EndpointMappings["192.0.2.7"].ExternalCIDROriginalIP; got != "172.20.0.3" {
		t.Errorf("host bits are not kept: %s", got)
	}
	c.ExternalCIDR = pfx("192.0.2.0/24")
	shorter, _ := b.Configure(c)
	if _, ok := shorter.NatMapping("b"); ok {
		t.Error("an answer for another length still counts")
	}
	c.ExternalCIDR = pfx("198.51.0.0/16") // contains a mapped endpoint, which would then be translated to itself
	around, _ := b.Configure(c)
	if nm, ok := around.NatMapping("b"); !ok || nm.ClusterMappings["198.51.100.7"] != "" || nm.ClusterMappings["192.0.2.7"] != "10.77.0.3" {
		t.Errorf("mappings %v", nm.ClusterMappings)
	}
	checkState(t, moved)
	checkState(t, shorter)
	checkState(t, around)
}

func TestHomePodIPKeepsHostBits(t *testing.T) {
	b := joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16")
	if got, err := b.HomePodIP("b", addr("10.244.3.4")); err != nil || got != addr("10.246.3.4") {
		t.Errorf("got %v %v", got, err)
	}
	for _, ip := range []netip.Addr{{}, addr("fd00::1"), addr("::ffff:10.0.0.1")} {
		if got, err := b.HomePodIP("b", ip); err == nil {
			t.Errorf("%v: %v", ip, got)
		}
	}
	if _, err := b.HomePodIP("nobody", addr("10.244.3.4")); !errors.Is(err, errNoConfiguration) {
		t.Errorf("a stranger: %v", err)
	}
}

func TestRestoreEndpointKeepsAddressesOfLostMappings(t *testing.T) {
	b := joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16")
	want := b
	for i, ip := range []string{"198.51.100.1", "198.51.100.2", "198.51.100.3"} {
		want = mapped(t, want, "b", ip, fmt.Sprint("10.247.0.", i+2))
	}
	want = want.UnmapEndpoint("b", addr("198.51.100.1"))
	nm, _ := want.NatMapping("b")
	for ip, seen := range nm.ClusterMappings {
		b = b.RestoreEndpoint("b", addr(ip), addr(seen))
	}
	if !same(b, want) {
		t.Errorf("got %+v, want %+v", b.Spec(), want.Spec())
	}
	for ip, seen := range map[string]string{"198.51.100.9": "10.247.0.3", "198.51.100.2": "10.247.0.9", "198.51.100.8": "10.1.1.1", "127.0.0.1": "10.247.0.9"} {
		if got := b.RestoreEndpoint("b", addr(ip), addr(seen)); !same(got, b) {
			t.Errorf("restored %s at %s", ip, seen)
		}
	}
}

// Until the peer answers for our new PodCIDR, it uses addresses that stand for the previous
// PodCIDR.
func TestPodsAreNotMappedUntilANewPodCIDRIsAnswered(t *testing.T) {
	b := joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16")
	b = mapped(t, b, "b", "198.51.100.7", "10.247.0.2")
	other := ours()
	other.PodCIDR = pfx("10.250.0.0/16")
	b, _ = b.Configure(other)
	for range 2 {
		if _, got, err := b.MapEndpoint("b", addr("10.250.3.4")); !errors.Is(err, errNoConfiguration) {
			t.Errorf("a pod is mapped to %v, %v", got, err)
		}
		mapped(t, b, "b", "198.51.100.7", "10.247.0.2") // an endpoint that is not a pod keeps its address
		spec := b.Spec()
		var err error
		if b, err = Read(&spec); err != nil { // restart
			t.Fatal(err)
		}
		b, _ = b.Configure(other)
	}
	b = b.Answered("b", pfx("10.201.0.0/16"), pfx("10.247.0.0/16"))
	mapped(t, b, "b", "10.250.3.4", "10.201.3.4")
}
