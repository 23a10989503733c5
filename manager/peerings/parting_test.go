package peerings

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/replication"
)

// peerFinalizer is a finalizer that no controller here removes.
const peerFinalizer = "example.com/of-the-peer"

// keep inserts a finalizer between the present finalizers of a NetworkConfig.
func (r *remote) keep(nc *v1alpha1.NetworkConfig, finalizer string) {
	r.w.T.Helper()
	before := nc.DeepCopy()
	controllerutil.AddFinalizer(nc, finalizer)
	r.w.OK(r.w.API().Patch(r.w.Ctx, nc, client.MergeFrom(before)))
}

func TestForeignFinalizerOnOurNetworkConfigDoesNotBlockUnpeering(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	p.keep(p.Original(), peerFinalizer)
	w.Until("the peer's finalizer is gone from our NetworkConfig, and ours is not", func() bool {
		nc := p.Original()
		return !controllerutil.ContainsFinalizer(nc, peerFinalizer) && controllerutil.ContainsFinalizer(nc, v1alpha1.FinalizerReplicator)
	})

	// The peer's finalizer is added again just before the Peering is deleted, and the peer's API
	// server does not answer.
	w.stub.report(p.Cluster.ClusterID, replication.State{
		Identity: replication.Condition{Status: metav1.ConditionFalse, Reason: isthmus.ReasonUnreachable, Message: "https://b:6443 does not answer"}})
	p.WaitForReason(isthmus.ConditionIdentity, isthmus.ReasonUnreachable)
	p.keep(p.Original(), peerFinalizer)
	w.OK(w.API().Patch(w.Ctx, p.Peering.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+isthmus.AnnotationForce+`":"true"}}}`))))
	p.Delete()
	w.Until("the Peering is gone", p.Deleted)
	if nc := p.Original(); nc != nil {
		t.Errorf("our NetworkConfig has stayed: %v", nc.Finalizers)
	}
}

func TestDeletedCopyIsRemovedDespiteAForeignFinalizer(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	theirs := p.Theirs()
	w.OK(w.API().Get(w.Ctx, client.ObjectKeyFromObject(theirs), theirs))
	p.keep(theirs, peerFinalizer)
	w.Always("while it lives it is the peer's", func() bool {
		return w.API().Get(w.Ctx, client.ObjectKeyFromObject(theirs), theirs) == nil && controllerutil.ContainsFinalizer(theirs, peerFinalizer)
	})
	w.OK(w.API().Delete(w.Ctx, theirs))
	w.Until("the copy is gone", func() bool {
		nc, err := controllers.Found(w.Ctx, w.API(), client.ObjectKeyFromObject(theirs), new(v1alpha1.NetworkConfig))
		w.OK(err)
		return nc == nil
	})
}

func TestDeletionOfTheTenantNamespaceCompletes(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	w.OK(w.API().Delete(w.Ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.NS}}))
	w.Until("the namespace is gone", func() bool {
		ns, err := controllers.Found(w.Ctx, w.API(), types.NamespacedName{Name: p.NS}, new(corev1.Namespace))
		w.OK(err)
		return ns == nil
	})
	p.WaitForReason(isthmus.ConditionReady, isthmus.ReasonLocalSetup)
	var last string
	for len(w.events.Events) > 0 {
		if e := <-w.events.Events; strings.Contains(e, reasonLeftBehind) {
			last = e
		}
	}
	for _, want := range []string{"namespace " + p.NS + " is being deleted", "tenant-at-b/" + p.Cluster.UniqueName(), p.Cluster.ClusterID} {
		if !strings.Contains(last, want) {
			t.Errorf("the event %q does not say %q", last, want)
		}
	}
}
