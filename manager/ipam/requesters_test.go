package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// requested maps an endpoint for peer b and records caller as its requester.
func requested(t *testing.T, b State, ip, caller, kind string) State {
	t.Helper()
	b, _, err := b.MapEndpoint("b", addr(ip))
	if err == nil {
		b, err = b.AddRequester("b", addr(ip), caller, kind)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// requests returns the recorded requesters of b's mappings, in the order of b's NetworkAllocation.
func requests(b State) string {
	var text []string
	for _, e := range b.Allocation("b").Endpoints {
		text = append(text, fmt.Sprintf("%s %v %s", e.IP, e.Requesters, e.Target))
	}
	return strings.Join(text, "; ")
}

func TestAllocationsRecordTheRequesters(t *testing.T) {
	empty := joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16")
	b := requested(t, empty, "198.51.100.7", "one", "pod")
	b = requested(t, b, "198.51.100.7", "another", "")
	b = requested(t, b, "198.51.100.6", "one", "")
	b = requested(t, b, "10.244.3.4", "one", "") // a pod: no mapping is needed, and no requester recorded
	const want = "198.51.100.6 [one] ; 198.51.100.7 [another one] pod"
	if got := requests(b); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if again := requested(t, b, "198.51.100.7", "one", "node"); len(again.Changed(b)) > 0 || requests(again) != want {
		t.Errorf("asking again changes %s", requests(again))
	}
	if changed := b.Changed(empty); !slices.Equal(changed, []string{"b"}) {
		t.Errorf("changed: %v", changed)
	}
	read := restarted(t, b)
	if got := read.Requesters("b", addr("198.51.100.7")); !slices.Equal(got, []string{"another", "one"}) || requests(read) != want {
		t.Errorf("after a restart: %v, %s", got, requests(read))
	}
	// A new ExternalCIDR of the same length keeps the mappings and their requesters.
	c := ours()
	c.ExternalCIDR = pfx("172.20.0.0/16")
	if moved, _ := read.Configure(c); requests(moved) != want {
		t.Errorf("after a new ExternalCIDR: %s", requests(moved))
	}
	if released := read.Release("b"); requests(released) != "" {
		t.Errorf("of a peer that has left: %s", requests(released))
	}
}

func TestOnlyRequestersMayWithdrawAMapping(t *testing.T) {
	ip, is := addr("198.51.100.7"), func(b State) bool { return b.Mapped("b", addr("198.51.100.7")) }
	b := requested(t, joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16"), "198.51.100.7", "one", "")
	if next, err := b.Withdraw("b", ip, "another", nil); !errors.Is(err, errAnothers) || !is(next) {
		t.Errorf("by another one: %v", err)
	}
	if next, err := b.Withdraw("b", ip, "another", []string{"one"}); err != nil || is(next) {
		t.Errorf("of one who is gone: %v", err)
	}
	both := requested(t, b, "198.51.100.7", "another", "")
	next, err := both.Withdraw("b", ip, "one", nil)
	if err != nil || !is(next) || !slices.Equal(next.Requesters("b", ip), []string{"another"}) {
		t.Errorf("what another one has, too: %v, %v", err, next.Requesters("b", ip))
	}
	if next, err := next.Withdraw("b", ip, "one", nil); !errors.Is(err, errAnothers) || !is(next) {
		t.Errorf("twice: %v", err)
	}
	if next, err := next.Withdraw("b", ip, "another", nil); err != nil || is(next) {
		t.Errorf("by the last one: %v", err)
	}
	if next, err := b.Withdraw("nobody", ip, "another", nil); err != nil || len(next.Changed(b)) > 0 {
		t.Errorf("for a stranger: %v", err)
	}
	unknown := mapped(t, joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16"), "b", "198.51.100.7", "10.247.0.2")
	if next, err := unknown.Withdraw("b", ip, "another", nil); err != nil || is(next) {
		t.Errorf("of nobody: %v", err)
	}
}

func TestRecordedRequestersAreBounded(t *testing.T) {
	b := joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16")
	if _, err := mapped(t, b, "b", "198.51.100.7", "10.247.0.2").AddRequester("b", addr("198.51.100.7"), strings.Repeat("x", maxCaller+1), ""); err == nil {
		t.Error("a name without end")
	}
	full := b.Allocation("b")
	ip := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}) }
	for i := range MaxMappingsPerCaller + 1 {
		x := [2]byte{byte((i + 2) >> 8), byte(i + 2)}
		e := isthmus.MappedEndpoint{IP: ip(i).String(), Address: netip.AddrFrom4([4]byte{10, 245, x[0], x[1]}).String()}
		if i < MaxMappingsPerCaller {
			e.Requesters = []string{"one"}
		}
		full.Endpoints = append(full.Endpoints, e)
	}
	b, wrong := FromAllocations(b.own, []isthmus.NetworkAllocationSpec{full})
	if wrong != nil {
		t.Fatal(wrong)
	}
	if _, err := b.AddRequester("b", ip(MaxMappingsPerCaller), "one", ""); err == nil || !strings.Contains(err.Error(), "4096") {
		t.Errorf("one more than the bound: %v", err)
	}
	if _, err := b.AddRequester("b", ip(7), "one", ""); err != nil {
		t.Errorf("one that it has: %v", err)
	}
	var err error
	more := b
	for i := 0; err == nil && i < 1<<10; i++ { // long names use up the space for requesters
		more, err = more.AddRequester("b", ip(i), fmt.Sprintf("%0250d", i), "")
	}
	if err == nil || !strings.Contains(err.Error(), "list of callers") || more.peers["b"].noted() > MaxNotes {
		t.Errorf("%d bytes, %v", more.peers["b"].noted(), err)
	}
}

func TestExpireRemovesAnEndpointFromAllPeers(t *testing.T) {
	b := requested(t, joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16"), "198.51.100.7", "one", "pod")
	b, _ = allocate(t, b, claim("c", "10.244.0.0/16", "10.245.0.0/16"))
	b = b.Answered("c", pfx("10.244.0.0/16"), pfx("10.245.0.0/16"))
	b = mapped(t, b, "c", "198.51.100.7", "10.245.0.2")
	b = requested(t, b, "198.51.100.8", "one", "")
	known := b.Known()
	if len(known) != 1 || known[0].IP != addr("198.51.100.7") || known[0].Kind != "pod" || !slices.Equal(known[0].For, []string{"b", "c"}) {
		t.Fatalf("known: %+v", known)
	}
	next := b.Expire(known[0])
	if next.Mapped("b", addr("198.51.100.7")) || next.Mapped("c", addr("198.51.100.7")) || !next.Mapped("b", addr("198.51.100.8")) {
		t.Errorf("mapped: %v", next.Spec().EndpointMappings)
	}
	if next := b.Expire(Endpoint{IP: addr("198.51.100.7"), Kind: "node"}); len(next.Changed(b)) > 0 {
		t.Error("what is something else meanwhile")
	}
	if next := b.Expire(Endpoint{IP: addr("198.51.100.9"), Kind: "pod"}); len(next.Changed(b)) > 0 {
		t.Error("what is not mapped")
	}
}

// A manager may stop after it has written a change of our networks into only some of the objects.
func TestFromAllocationsUpdatesObjectsWithOurPreviousNetworks(t *testing.T) {
	b := requested(t, joined(t, ours(), "10.200.0.0/16", "10.247.0.0/16"), "198.51.100.7", "one", "pod")
	old := b.Allocation("b")
	for name, change := range map[string]func(*Config){
		"another ExternalCIDR": func(c *Config) { c.ExternalCIDR = pfx("172.20.0.0/16") },
		"a shorter one":        func(c *Config) { c.ExternalCIDR = pfx("172.20.0.0/17") },
		"one of IPv6":          func(c *Config) { c.ExternalCIDR = pfx("fd00:20::/64") },
		"another PodCIDR":      func(c *Config) { c.PodCIDR = pfx("172.24.0.0/16") },
		"both":                 func(c *Config) { c.ExternalCIDR, c.PodCIDR = pfx("172.20.0.0/16"), pfx("172.24.0.0/16") },
		"none":                 func(*Config) {},
	} {
		c := ours()
		change(&c)
		want, _ := b.Configure(c)
		got, wrong := FromAllocations(want.Own(), []isthmus.NetworkAllocationSpec{old})
		if got, want := got.Allocation("b"), want.Allocation("b"); !reflect.DeepEqual(got, want) || len(wrong) > 0 {
			t.Errorf("%s: got\n%+v, %v\nwant\n%+v", name, got, wrong, want)
		}
	}
	old.Local = nil // as in an object that was edited by hand
	if got, wrong := FromAllocations(b.Own(), []isthmus.NetworkAllocationSpec{old}); requests(got) != requests(b) || len(wrong) > 0 {
		t.Errorf("without its networks: %s, %v", requests(got), wrong)
	}
}
