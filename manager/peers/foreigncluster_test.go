package peers

import (
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func TestForeignClusterIsAPeerOnlyWithIdentityAndNamespace(t *testing.T) {
	for _, change := range []func(*ForeignCluster){
		func(f *ForeignCluster) { f.Spec.ClusterIdentity.ClusterID = "" },
		func(f *ForeignCluster) { f.Status.TenantNamespace.Local = "" },
	} {
		var f ForeignCluster
		f.Spec.ClusterIdentity, f.Status.TenantNamespace.Local = v1alpha1.ClusterIdentity{ClusterID: "b", ClusterName: "bravo"}, "tenant"
		f.Status.PeeringConditions = []PeeringCondition{{"IncomingPeering", "Established"}}
		if _, ok := peerFromForeign(&f); !ok {
			t.Fatal("the sound one is no peer")
		}
		change(&f)
		if _, ok := peerFromForeign(&f); ok {
			t.Errorf("%+v is a peer", f)
		}
	}
}
