package fleet

import (
	"net/netip"
	"reflect"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func TestNetworksOfPeersAreKeptUntilUnpeeringEnds(t *testing.T) {
	storages := func(subnets map[string]v1alpha1.Subnets) []v1alpha1.IpamStorage {
		return []v1alpha1.IpamStorage{{Spec: v1alpha1.IpamStorageSpec{ClusterSubnets: subnets}}}
	}
	peering := func(id string, leaves bool) isthmus.Peering {
		p := isthmus.Peering{Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: id}}}
		if leaves {
			now := metav1.Now()
			p.DeletionTimestamp = &now
		}
		return p
	}
	networks := func(texts ...string) (all []netip.Prefix) {
		for _, text := range texts {
			all = append(all, netip.MustParsePrefix(text))
		}
		return all
	}
	b := v1alpha1.Subnets{RemotePodCIDR: "10.246.0.0/16", RemoteExternalCIDR: "10.99.0.0/18"}
	had := map[string][]netip.Prefix{"b": networks("10.246.0.0/16", "10.99.0.0/18")}
	none := map[string][]netip.Prefix{}
	for name, tc := range map[string]struct {
		known    map[string][]netip.Prefix
		storages []v1alpha1.IpamStorage
		peerings []isthmus.Peering
		want     map[string][]netip.Prefix
	}{
		"no IpamStorage yet":                      {none, nil, []isthmus.Peering{peering("b", false)}, none},
		"granted":                                 {none, storages(map[string]v1alpha1.Subnets{"b": b}), nil, had},
		"half of it":                              {none, storages(map[string]v1alpha1.Subnets{"b": {RemotePodCIDR: "10.246.0.0/16"}}), nil, map[string][]netip.Prefix{"b": networks("10.246.0.0/16")}},
		"the IPAM state is deleted":               {had, nil, nil, had},
		"the peer is missing in the IPAM state":   {had, storages(nil), []isthmus.Peering{peering("b", false)}, had},
		"another advertised network":              {had, storages(map[string]v1alpha1.Subnets{"b": {RemotePodCIDR: "10.50.0.0/20"}}), []isthmus.Peering{peering("b", false)}, map[string][]netip.Prefix{"b": networks("10.50.0.0/20")}},
		"being un-peered":                         {had, storages(map[string]v1alpha1.Subnets{"b": b}), []isthmus.Peering{peering("b", true)}, had},
		"un-peered, but the Peering still exists": {had, storages(nil), []isthmus.Peering{peering("b", true)}, none},
		"un-peered":                               {had, storages(nil), []isthmus.Peering{peering("c", false)}, none},
	} {
		if got := remember(tc.known, tc.storages, tc.peerings); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %v; want %v", name, got, tc.want)
		}
	}
}
