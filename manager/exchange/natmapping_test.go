package exchange

import (
	"maps"
	"net/netip"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

func TestNatMappingsAreUpdatedWhenTheIPAMStateChanges(t *testing.T) {
	a := newAnswering(t)
	bravo := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "172.18.0.0/16")
	charlie := a.partner("charlie", 3).claims("10.131.0.0/24", "10.132.0.0/20").publish().answer("None", "None")
	bravo.joined()
	charlie.joined()
	untouched := charlie.mappings()[0].ResourceVersion

	_, err := a.store.Update(a.Ctx, func(b ipam.State) (ipam.State, error) {
		b, _, err := b.MapEndpoint(bravo.Cluster.ClusterID, netip.MustParseAddr("203.0.113.7"))
		return b, err
	})
	a.OK(err)
	a.Until("the endpoint is mapped", func() bool { return bravo.mappings()[0].Spec.ClusterMappings["203.0.113.7"] == "172.18.0.2" })
	spec := bravo.mappings()[0].Spec
	if charlie.mappings()[0].ResourceVersion != untouched {
		t.Error("the NatMapping of another peer was written")
	}

	nm := bravo.mappings()[0]
	if nm.Labels[v1alpha1.LabelNatMapping] != "true" || nm.Labels[v1alpha1.LabelClusterID] != bravo.Cluster.ClusterID {
		t.Errorf("labels are %v", nm.Labels)
	}
	edit(a, &nm, func(nm *v1alpha1.NatMapping) {
		nm.Spec.ClusterMappings, nm.Labels = v1alpha1.EndpointMap{"203.0.113.9": "172.18.0.9"}, nil
	})
	a.Until("the edit is undone", func() bool {
		now := bravo.mappings()[0]
		return maps.Equal(now.Spec.ClusterMappings, spec.ClusterMappings) && now.Labels[v1alpha1.LabelClusterID] == bravo.Cluster.ClusterID &&
			now.Labels[v1alpha1.LabelNatMapping] == "true"
	})
	uid := nm.UID
	a.OK(managertest.Client.Delete(a.Ctx, &nm))
	a.Until("it is made again", func() bool { all := bravo.mappings(); return len(all) == 1 && all[0].UID != uid })

	_, err = a.store.Update(a.Ctx, func(b ipam.State) (ipam.State, error) {
		return b.UnmapEndpoint(bravo.Cluster.ClusterID, netip.MustParseAddr("203.0.113.7")), nil
	})
	a.OK(err)
	a.Until("the endpoint is not mapped any more", func() bool {
		return maps.Equal(bravo.mappings()[0].Spec.ClusterMappings, v1alpha1.EndpointMap{"169.254.0.1": "172.18.0.1"})
	})
}

func TestEachPeerHasOneNatMapping(t *testing.T) {
	a := newAnswering(t)
	bravo := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None")
	bravo.joined()
	first := bravo.mappings()[0]
	stray := func(id string) *v1alpha1.NatMapping {
		return &v1alpha1.NatMapping{
			ObjectMeta: metav1.ObjectMeta{GenerateName: natMappingPrefix, Labels: map[string]string{v1alpha1.LabelClusterID: id, v1alpha1.LabelNatMapping: "true"}},
			Spec: v1alpha1.NatMappingSpec{ClusterID: id, PodCIDR: "10.7.0.0/16", ExternalCIDR: "10.8.0.0/16",
				ClusterMappings: v1alpha1.EndpointMap{"169.254.0.1": "10.8.0.1"}},
		}
	}
	second, leftover := stray(bravo.Cluster.ClusterID), stray(a.Prefix+".nobody")
	a.Create(second)
	a.Create(leftover)
	nobody := &partner{Remote: a.Describe("nobody"), a: a}
	a.Until("there is one for the peer and none for nobody", func() bool {
		all := bravo.mappings()
		return len(all) == 1 && all[0].UID == first.UID && len(nobody.mappings()) == 0
	})
	// Somebody edits the NatMapping of one peer so that it belongs to another. Afterwards each peer
	// has its own.
	charlie := a.partner("charlie", 3).claims("10.131.0.0/24", "10.132.0.0/20").publish().answer("None", "None")
	charlie.joined()
	edit(a, &first, func(nm *v1alpha1.NatMapping) { nm.Spec.ClusterID = charlie.Cluster.ClusterID })
	a.Until("each has one", func() bool {
		b, c := bravo.mappings(), charlie.mappings()
		return len(b) == 1 && len(c) == 1 && b[0].Spec.PodCIDR == "10.246.0.0/18" && c[0].Spec.PodCIDR == "10.131.0.0/24"
	})
}

// The changes happened before this manager started, so no event reports them. The manager must
// still create the missing NatMappings.
func TestNatMappingsAreCreatedAfterARestart(t *testing.T) {
	a := newAnswering(t)
	bravo := a.partner("bravo", 2).claims("10.244.0.0/18", "10.130.0.0/20").publish().answer("None", "None")
	bravo.joined()
	a.Stop()
	nm := bravo.mappings()[0]
	a.OK(managertest.Client.Delete(a.Ctx, &nm))
	a.OK(managertest.Client.Delete(a.Ctx, bravo.Endpoint()))
	a.start()
	a.Until("the NatMapping is there", func() bool { return len(bravo.mappings()) == 1 })
	bravo.joined()
}
