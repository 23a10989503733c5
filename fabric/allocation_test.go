package fabric

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

func TestAllocationsFromCombinesAllObjects(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	object := func(name string, revision int64, networks ...string) (o isthmus.NetworkAllocation) {
		o.Name, o.Spec = name, isthmus.NetworkAllocationSpec{ClusterID: name, Revision: revision, Networks: networks}
		return o
	}
	b, c := object("b", 7, "10.246.0.0/16", "10.247.0.0/20"), object("c", 9, "fd00::1/48", "10.246.0.0/16", "None", "0.0.0.0/0")
	b.Spec.Freed = []isthmus.FreedNetwork{{Network: "10.9.0.0/16", Revision: 3}, {Network: "10.9.0.0/16", Revision: 11}, {Network: "x", Revision: 6}}
	own, older := object("us", 4), object("who we were", 2)
	own.Spec.Own = &isthmus.OwnNetworks{PodCIDR: "10.244.0.0/16", ServiceCIDR: "10.96.0.0/12", ExternalCIDR: "10.245.0.0/16"}
	older.Spec.Own = &isthmus.OwnNetworks{PodCIDR: "10.1.0.0/16"}
	ahead := object("ahead", now.Add(48*time.Hour).UnixMilli(), "10.8.0.0/16")
	own.ResourceVersion, b.ResourceVersion, c.ResourceVersion = "9", "102", "x"
	got, problems := AllocationsFrom([]isthmus.NetworkAllocation{c, own, ahead, older, b}, now)
	wantTexts(t, SortProblems(problems), `NetworkAllocation b: spec.freed: "x" is not a network; want CIDR notation`,
		`NetworkAllocation c: spec.networks: "0.0.0.0/0" is not a network; want CIDR notation`, `NetworkAllocation c: spec.networks: "None" is not a network; want CIDR notation`)
	want := Allocations{
		Named:    []Allocation{{"ahead", pfx("10.8.0.0/16"), 0}, {"b", pfx("10.246.0.0/16"), 7}, {"c", pfx("10.246.0.0/16"), 9}, {"b", pfx("10.247.0.0/20"), 7}, {"c", pfx("fd00::/48"), 9}},
		Freed:    []Allocation{{"b", pfx("10.9.0.0/16"), 11}},
		Revision: 11, Version: 102,
		Own: []netip.Prefix{pfx("10.244.0.0/16"), pfx("10.96.0.0/12")}, OwnPods: []netip.Prefix{pfx("10.244.0.0/16")},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant\n%+v", got, want)
	}
	if none, problems := AllocationsFrom(nil, now); !reflect.DeepEqual(none, Allocations{}) || problems != nil {
		t.Errorf("of no objects: %+v, %v", none, problems)
	}
}

// If a cluster ID is no valid object name, its NetworkAllocation gets a name that is no other
// cluster's ID.
func TestEachClusterHasADistinctObjectName(t *testing.T) {
	seen := []string{}
	for _, id := range []string{"b", "a.b-c", "B", "a_b", "a.-b", strings.Repeat("x", 63), "9a8b7c6d-0000-4000-8000-000000000000"} {
		name := AllocationName(id)
		if slices.Contains(seen, name) || name != id && CheckClusterID(name) == "" {
			t.Errorf("%s is called %s, of %v", id, name, seen)
		}
		seen = append(seen, name)
	}
	if seen[0] != "b" || seen[6] != "9a8b7c6d-0000-4000-8000-000000000000" {
		t.Error(seen)
	}
}

func TestARevisionFarInTheFutureIsIgnored(t *testing.T) {
	now := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	for n, want := range map[int64]int64{0: 0, 7: 7, -1: 0, now.UnixMilli(): now.UnixMilli(), now.Add(23 * time.Hour).UnixMilli(): now.Add(23 * time.Hour).UnixMilli(),
		now.Add(25 * time.Hour).UnixMilli(): 0, 1<<63 - 1: 0} {
		if got := Revision(n, now); got != want {
			t.Errorf("%d: %d; want %d", n, got, want)
		}
	}
}
