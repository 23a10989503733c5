package managertest

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
)

// A Remote simulates a peer cluster: it writes the objects that the peer, its replicator, our
// answering controller and our gateway would write.
type Remote struct {
	W       *World
	Cluster v1alpha1.ClusterIdentity
	Peering *isthmus.Peering
	NS      string
}

// Peer creates a Peering with a cluster, and the tenant namespace.
func (w *World) Peer(name string) *Remote {
	w.T.Helper()
	r := w.Describe(name)
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.NS}})
	w.Create(r.Peering)
	return r
}

// Describe returns the peer that Peer would create, without creating objects.
func (w *World) Describe(name string) *Remote {
	c := v1alpha1.ClusterIdentity{ClusterID: w.Prefix + "." + name, ClusterName: w.Prefix + "-" + name}
	ns := w.Prefix + "-tenant-" + name
	return &Remote{W: w, Cluster: c, NS: ns, Peering: &isthmus.Peering{
		ObjectMeta: metav1.ObjectMeta{Name: w.Prefix + "-" + name},
		Spec:       isthmus.PeeringSpec{Cluster: c, TenantNamespace: isthmus.TenantNamespace{Local: ns, Remote: "tenant-at-" + name}},
	}}
}

// Status returns the present status of the Peering.
func (r *Remote) Status() isthmus.PeeringStatus {
	var p isthmus.Peering
	if err := r.W.API().Get(r.W.Ctx, client.ObjectKeyFromObject(r.Peering), &p); err != nil {
		return isthmus.PeeringStatus{}
	}
	return p.Status
}

// HasReason reports whether the Peering's condition has the reason.
func (r *Remote) HasReason(condition, reason string) bool {
	c := meta.FindStatusCondition(r.Status().Conditions, condition)
	return c != nil && c.Reason == reason
}

// WaitForReason waits until the Peering's condition has the reason.
func (r *Remote) WaitForReason(condition, reason string) {
	r.W.T.Helper()
	defer func() {
		if r.W.T.Failed() {
			r.W.T.Logf("%+v", r.Status())
		}
	}()
	r.W.Until(condition+" is "+reason, func() bool { return r.HasReason(condition, reason) })
}

// Message returns the message of a condition of the Peering.
func (r *Remote) Message(condition string) string {
	if c := meta.FindStatusCondition(r.Status().Conditions, condition); c != nil {
		return c.Message
	}
	return ""
}

// Key returns the namespace and name of our NetworkConfig and our TunnelEndpoint for the peer.
func (r *Remote) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: r.NS, Name: r.Cluster.UniqueName()}
}

// Original returns our NetworkConfig for the peer, or nil.
func (r *Remote) Original() *v1alpha1.NetworkConfig {
	r.W.T.Helper()
	nc, err := controllers.Found(r.W.Ctx, r.W.API(), r.Key(), new(v1alpha1.NetworkConfig))
	r.W.OK(err)
	return nc
}

// Endpoint returns the TunnelEndpoint for the peer, or nil.
func (r *Remote) Endpoint() *v1alpha1.TunnelEndpoint {
	r.W.T.Helper()
	te, err := controllers.Found(r.W.Ctx, r.W.API(), r.Key(), new(v1alpha1.TunnelEndpoint))
	r.W.OK(err)
	return te
}

// UntilPublished waits for our NetworkConfig and returns it.
func (r *Remote) UntilPublished() *v1alpha1.NetworkConfig {
	r.W.T.Helper()
	r.W.Until("our NetworkConfig is there", func() bool { return r.Original() != nil })
	return r.Original()
}

// Theirs returns the peer's NetworkConfig. Its PodCIDR is a /18 that overlaps ours.
func (r *Remote) Theirs() *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.NS, Name: r.W.Self.UniqueName(), Labels: map[string]string{
			v1alpha1.LabelReplication: "false", v1alpha1.LabelReplicated: "true",
			v1alpha1.LabelOriginID: r.Cluster.ClusterID, v1alpha1.LabelRemoteID: r.W.Self.ClusterID,
		}},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: r.W.Self, PodCIDR: "10.244.64.0/18", ExternalCIDR: "10.60.0.0/18",
			EndpointIP: "198.51.100.2", BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPort: "31000", v1alpha1.ConfigPublicKey: AnotherKey},
		},
	}
}

// Delete deletes the Peering.
func (r *Remote) Delete() {
	r.W.T.Helper()
	r.W.OK(r.W.API().Delete(r.W.Ctx, r.Peering))
}

// Deleted reports whether the Peering no longer exists.
func (r *Remote) Deleted() bool {
	p, err := controllers.Found(r.W.Ctx, r.W.API(), types.NamespacedName{Name: r.Peering.Name}, new(isthmus.Peering))
	r.W.OK(err)
	return p == nil
}

// RemoveFinalizer removes the replicator's finalizer, as the replicator does once our NetworkConfig
// no longer exists at the peer.
func (r *Remote) RemoveFinalizer() {
	r.W.T.Helper()
	nc := r.Original()
	controllerutil.RemoveFinalizer(nc, v1alpha1.FinalizerReplicator)
	r.W.OK(r.W.API().Update(r.W.Ctx, nc))
}
