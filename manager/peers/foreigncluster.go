package peers

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
)

// ForeignClusterVersion is the API version of Liqo's control plane.
var ForeignClusterVersion = schema.GroupVersion{Group: "discovery.liqo.io", Version: "v1alpha1"}

// A ForeignCluster has the fields of Liqo's ForeignCluster that networking needs. It must only be
// read: a write would lose all other fields.
type ForeignCluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec struct {
		ClusterIdentity v1alpha1.ClusterIdentity `json:"clusterIdentity"`
		// PeeringType is OutOfBand or InBand. The default is OutOfBand. With InBand, Liqo's CLI
		// exchanges the NetworkConfigs.
		PeeringType string `json:"peeringType,omitempty"`
	} `json:"spec"`
	Status struct {
		TenantNamespace struct {
			Local  string `json:"local,omitempty"`
			Remote string `json:"remote,omitempty"`
		} `json:"tenantNamespace"`
		PeeringConditions []PeeringCondition `json:"peeringConditions,omitempty"`
	} `json:"status"`
}

// A PeeringCondition is a condition of Liqo's ForeignCluster, such as type IncomingPeering with
// status Established.
type PeeringCondition struct {
	Type   string `json:"type"`
	Status string `json:"status"`
}

// ForeignClusterList is a list of ForeignClusters.
type ForeignClusterList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ForeignCluster `json:"items"`
}

// DeepCopyObject returns a copy that shares nothing with f.
func (f *ForeignCluster) DeepCopyObject() runtime.Object {
	c := *f
	f.ObjectMeta.DeepCopyInto(&c.ObjectMeta)
	c.Status.PeeringConditions = slices.Clone(f.Status.PeeringConditions)
	return &c
}

// DeepCopyObject returns a copy that shares nothing with l.
func (l *ForeignClusterList) DeepCopyObject() runtime.Object {
	c := *l
	l.ListMeta.DeepCopyInto(&c.ListMeta)
	c.Items = make([]ForeignCluster, len(l.Items))
	for i := range l.Items {
		c.Items[i] = *l.Items[i].DeepCopyObject().(*ForeignCluster)
	}
	return &c
}

// AddForeignClusters adds the kind ForeignCluster to a scheme.
func AddForeignClusters(scheme *runtime.Scheme) {
	scheme.AddKnownTypes(ForeignClusterVersion, &ForeignCluster{}, &ForeignClusterList{})
	metav1.AddToGroupVersion(scheme, ForeignClusterVersion)
}

// peerFromForeign returns the peer of a ForeignCluster. It returns false for a ForeignCluster
// without identity or tenant namespace, and for in-band peerings. A ForeignCluster without an
// established peering is a leaving peer, so that its objects are removed.
func peerFromForeign(f *ForeignCluster) (Peer, bool) {
	tenant := f.Status.TenantNamespace
	if f.Spec.ClusterIdentity.ClusterID == "" || tenant.Local == "" || f.Spec.PeeringType != "" && f.Spec.PeeringType != "OutOfBand" {
		return Peer{}, false
	}
	established := slices.ContainsFunc(f.Status.PeeringConditions, func(c PeeringCondition) bool {
		return (c.Type == "IncomingPeering" || c.Type == "OutgoingPeering") && c.Status == "Established"
	})
	return Peer{
		Cluster:         f.Spec.ClusterIdentity,
		LocalNamespace:  tenant.Local,
		RemoteNamespace: tenant.Remote,
		Leaving:         !established || !f.DeletionTimestamp.IsZero(),
		Owner:           f,
	}, true
}

// findForeign finds a peer among the ForeignClusters by the value of an index. The caller has
// checked that no Peering has that value.
func (p Peers) findForeign(ctx context.Context, index, value string) (Peer, error) {
	none := fmt.Errorf("%q: %w", value, ErrNoPeer)
	var list ForeignClusterList
	if err := p.Reader.List(ctx, &list, client.MatchingFields{index: value}); err != nil {
		return Peer{}, fmt.Errorf("foreign clusters with %s %q: %w", index, value, err)
	}
	if len(list.Items) == 0 {
		return Peer{}, none
	}
	first := slices.MinFunc(list.Items, func(a, b ForeignCluster) int { return controllers.CompareAge(&a, &b) })
	peer, ok := peerFromForeign(&first)
	if !ok || peer.Cluster.ClusterID == p.Self {
		return Peer{}, none
	}
	for index, value := range map[string]string{IndexClusterID: peer.Cluster.ClusterID, IndexTenantNamespace: peer.LocalNamespace} {
		var peerings isthmus.PeeringList
		if err := p.Reader.List(ctx, &peerings, client.MatchingFields{index: value}); err != nil {
			return Peer{}, fmt.Errorf("peerings with %s %q: %w", index, value, err)
		}
		if len(peerings.Items) > 0 {
			return Peer{}, none
		}
	}
	return peer, nil
}
