package peerings

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/managertest"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// foreign creates a ForeignCluster for a peer as Liqo's controllers write it.
func (r *remote) foreign(peeringType, incoming, outgoing string) {
	r.w.T.Helper()
	fc := r.foreignObject(peeringType, incoming, outgoing)
	status := fc.Object["status"]
	r.w.Create(fc)
	fc.Object["status"] = status
	r.w.OK(r.w.API().Status().Update(r.w.Ctx, fc))
	r.w.T.Cleanup(func() { r.w.Drop(fc) })
}

func (r *remote) foreignObject(peeringType, incoming, outgoing string) *unstructured.Unstructured {
	fc := &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": r.Cluster.ClusterName, "labels": map[string]any{"discovery.liqo.io/cluster-id": r.Cluster.ClusterID}},
		"spec": map[string]any{
			"clusterIdentity": map[string]any{"clusterID": r.Cluster.ClusterID, "clusterName": r.Cluster.ClusterName},
			"foreignAuthUrl":  "https://192.0.2.9", "peeringType": peeringType,
		},
		"status": map[string]any{
			"tenantNamespace": map[string]any{"local": r.NS, "remote": "liqo-tenant-us"},
			"peeringConditions": []any{
				map[string]any{"type": "IncomingPeering", "status": incoming},
				map[string]any{"type": "OutgoingPeering", "status": outgoing},
				map[string]any{"type": "NetworkStatus", "status": "External"},
			},
		},
	}}
	fc.SetGroupVersionKind(peers.ForeignClusterVersion.WithKind("ForeignCluster"))
	return fc
}

func TestNetworkConfigsArePublishedForForeignClusters(t *testing.T) {
	managertest.InstallLiqo(t)
	w := newWorld(t, true)
	w.Gateway("192.0.2.1")
	peer := func(name, peeringType, incoming, outgoing string) *remote {
		r := w.describe(name)
		w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.NS}})
		r.foreign(peeringType, incoming, outgoing)
		return r
	}
	incoming, outgoing := peer("in", "OutOfBand", "Established", "None"), peer("out", "OutOfBand", "None", "Established")
	pending, inBand := peer("pending", "OutOfBand", "None", "Pending"), peer("inband", "InBand", "Established", "Established")
	for _, r := range []*remote{incoming, outgoing} {
		nc := r.UntilPublished()
		if owner := metav1.GetControllerOf(nc); owner == nil || owner.Kind != "ForeignCluster" || owner.Name != r.Cluster.ClusterName || owner.APIVersion != "discovery.liqo.io/v1alpha1" {
			t.Errorf("controlled by %+v", owner)
		}
		if nc.Labels[v1alpha1.LabelRemoteID] != r.Cluster.ClusterID || nc.Name != r.Cluster.UniqueName() {
			t.Errorf("%s with labels %v", nc.Name, nc.Labels)
		}
	}
	w.Always("nothing for those that are not peered, or peered by Liqo's CLI", func() bool { return pending.Original() == nil && inBand.Original() == nil })
	if w.stub.has(incoming.Cluster.ClusterID) {
		t.Error("Liqo's crd-replicator replicates for ForeignClusters, not we")
	}

	// Liqo's replicator copies back any answer that it finds at the peer. So after a change of
	// networks we create a new NetworkConfig, and its answer is for the new networks.
	nc := incoming.Original()
	edited := nc.DeepCopy()
	edited.Spec.PodCIDR = "10.200.0.0/16"
	w.OK(w.API().Patch(w.Ctx, edited, client.MergeFrom(nc)))
	w.Until("our NetworkConfig is another one", func() bool {
		now := incoming.Original()
		return now != nil && now.UID != nc.UID && now.Spec.PodCIDR == nc.Spec.PodCIDR
	})

	fc := outgoing.foreignObject("OutOfBand", "None", "None")
	w.OK(w.API().Status().Patch(w.Ctx, fc, client.RawPatch(types.MergePatchType,
		[]byte(`{"status":{"peeringConditions":[{"type":"OutgoingPeering","status":"None"}]}}`))))
	w.Until("what was made goes when the peering ends", func() bool { return outgoing.Original() == nil })

	// A Peering for the same cluster replaces the ForeignCluster.
	w.Create(incoming.Peering)
	w.Until("the Peering owns it", func() bool {
		owner := metav1.GetControllerOf(incoming.Original())
		return owner != nil && owner.Kind == "Peering"
	})
	w.Until("we replicate now", func() bool { return w.stub.has(incoming.Cluster.ClusterID) })
}
