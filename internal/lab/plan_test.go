package lab

import (
	"net/netip"
	"strings"
	"testing"
)

func TestAllocateChoosesLikeLiqo(t *testing.T) {
	// The wanted networks are the observed sequence of Liqo v0.9.4 with PodCIDR 10.244.0.0/16 and
	// ServiceCIDR 10.96.0.0/12, continued by Liqo's rule: fill the smallest gap first, then the
	// lowest.
	taken := reservedNetworks(netip.MustParsePrefix("10.244.0.0/16"))
	for _, want := range []string{"10.245.0.0/16", "10.246.0.0/16", "10.247.0.0/16", "10.240.0.0/16", "10.241.0.0/16"} {
		got, err := allocate(taken, 16)
		if err != nil || got != netip.MustParsePrefix(want) {
			t.Fatalf("with %v taken: %v, %v; want %s", taken, got, err, want)
		}
		taken = append(taken, got)
	}
	taken = reservedNetworks(netip.MustParsePrefix("10.200.0.0/16"))
	for _, want := range []string{"10.201.0.0/16", "10.202.0.0/16", "10.203.0.0/16"} {
		got, err := allocate(taken, 16)
		if err != nil || got != netip.MustParsePrefix(want) {
			t.Fatalf("with %v taken: %v, %v; want %s", taken, got, err, want)
		}
		taken = append(taken, got)
	}
}

func TestAllocateReportsFullPools(t *testing.T) {
	if got, err := allocate(pools, 24); err == nil {
		t.Fatalf("allocated %v out of full pools", got)
	}
}

func TestRemapKeepsANetworkWithoutConflict(t *testing.T) {
	taken := reservedNetworks(netip.MustParsePrefix("10.244.0.0/16"))
	for in, want := range map[string]string{
		"10.50.0.0/16":   "10.50.0.0/16",
		"100.64.0.0/10":  "100.64.0.0/10",
		"10.244.16.0/20": "10.245.0.0/20",
		"10.240.0.0/12":  "10.112.0.0/12",
	} {
		if got, err := remap(taken, netip.MustParsePrefix(in)); err != nil || got != netip.MustParsePrefix(want) {
			t.Errorf("remap(%s) = %v, %v; want %s", in, got, err, want)
		}
	}
}

func TestSpecDefaultsAreThreeEqualClusters(t *testing.T) {
	s, err := Spec{Clusters: Clusters(3)}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]bool{}
	for i, c := range s.Clusters {
		if c.Name != string(rune('a'+i)) || c.PodCIDR != defaultPodCIDR || c.ExternalCIDR.String() != "10.245.0.0/16" ||
			c.Nodes != 1 || c.PodsPerNode != 2 {
			t.Errorf("cluster %d: %+v", i, c)
		}
		ids[c.ID] = true
	}
	if len(ids) != 3 {
		t.Errorf("cluster IDs are not unique: %v", ids)
	}
	if s.MTU != 1500 || s.Name != "lab" || s.RPFilter != RPFilterLoose {
		t.Errorf("defaults: %+v", s)
	}
}

func TestSpecErrorsNameEachMistake(t *testing.T) {
	p := netip.MustParsePrefix
	for want, s := range map[string]Spec{
		"0 clusters":                          {},
		`lab name "Lab.1"`:                    {Name: "Lab.1", Clusters: Clusters(1)},
		"mtu 100":                             {MTU: 100, Clusters: Clusters(1)},
		"rp_filter":                           {RPFilter: "sometimes", Clusters: Clusters(1)},
		`cluster name "toolonganame"`:         {Clusters: []ClusterSpec{{Name: "toolonganame"}}},
		`two clusters have the name "x"`:      {Clusters: []ClusterSpec{{Name: "x"}, {Name: "x"}}},
		"has host bits set; want 10.1.0.0/16": {Clusters: []ClusterSpec{{PodCIDR: p("10.1.2.0/16")}}},
		"overlaps 172.30.0.0/16":              {Clusters: []ClusterSpec{{PodCIDR: p("172.30.0.0/20")}}},
		"IPv4 only":                           {Clusters: []ClusterSpec{{PodCIDR: p("fd00::/64")}}},
		"no room for 1 nodes with 6 pods":     {Clusters: []ClusterSpec{{PodCIDR: p("10.1.0.0/29"), PodsPerNode: 6}}},
		"overlaps PodCIDR":                    {Clusters: []ClusterSpec{{PodCIDR: p("10.1.0.0/16"), ExternalCIDR: p("10.1.0.0/16")}}},
		"101 nodes":                           {Clusters: []ClusterSpec{{Nodes: 101}}},
	} {
		if _, err := s.withDefaults(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v; want one with %q", s, err, want)
		}
	}
}

func TestPodAddressesAreDistinctAndInsideTheirSlice(t *testing.T) {
	for _, c := range []struct {
		podCIDR     string
		nodes, pods int
		first       string
	}{
		{"10.244.0.0/16", 3, 2, "10.244.0.11"},
		{"10.0.0.0/8", 99, 5, "10.0.0.11"},
		{"10.1.2.0/24", 4, 10, "10.1.2.11"},
		{"10.1.2.0/28", 2, 5, "10.1.2.2"},
		{"10.1.2.0/29", 1, 5, "10.1.2.2"},
		{"10.1.2.4/30", 1, 1, "10.1.2.6"},
	} {
		podCIDR := netip.MustParsePrefix(c.podCIDR)
		if err := checkRoom(podCIDR, c.nodes, c.pods); err != nil {
			t.Error(err)
			continue
		}
		if got := podAddr(nodeSlice(podCIDR, c.nodes, 0), c.pods, 0); got.String() != c.first {
			t.Errorf("%s: first pod %v, want %s", c.podCIDR, got, c.first)
		}
		seen := map[netip.Addr]bool{}
		for i := range c.nodes {
			slice := nodeSlice(podCIDR, c.nodes, i)
			if slice.Masked() != slice || !podCIDR.Contains(slice.Addr()) {
				t.Errorf("%s: slice %d is %v", c.podCIDR, i, slice)
			}
			last := offset(slice.Addr(), 1<<(32-slice.Bits())-1)
			for j := range c.pods {
				a := podAddr(slice, c.pods, j)
				if seen[a] || !slice.Contains(a) || a == slice.Addr() || a == slice.Addr().Next() || a == last {
					t.Errorf("%s: pod %d of node %d has address %v", c.podCIDR, j, i, a)
				}
				seen[a] = true
			}
		}
	}
}

func TestMoveKeepsHostBits(t *testing.T) {
	p := netip.MustParsePrefix
	got := Move(netip.MustParseAddr("10.244.3.7"), p("10.244.0.0/16"), p("10.246.0.0/16"))
	if got.String() != "10.246.3.7" {
		t.Error(got)
	}
	got = Move(netip.MustParseAddr("10.255.255.255"), p("10.128.0.0/9"), p("100.0.0.0/9"))
	if got.String() != "100.127.255.255" {
		t.Error(got)
	}
}
