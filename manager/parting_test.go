package manager

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/replication"
)

// ofPeer is a finalizer that nobody here ever removes.
const ofPeer = "example.com/of-the-peer"

// keep puts a finalizer onto a NetworkConfig, between those that are there.
func (r *remote) keep(nc *v1alpha1.NetworkConfig, finalizer string) {
	r.w.t.Helper()
	before := nc.DeepCopy()
	controllerutil.AddFinalizer(nc, finalizer)
	r.w.ok(r.w.api().Patch(r.w.ctx, nc, client.MergeFrom(before)))
}

func TestAFinalizerOfThePeerDoesNotHoldUpUnpeering(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	p.keep(p.original(), ofPeer)
	w.until("the peer's finalizer is gone from our NetworkConfig, and ours is not", func() bool {
		nc := p.original()
		return !controllerutil.ContainsFinalizer(nc, ofPeer) && controllerutil.ContainsFinalizer(nc, v1alpha1.FinalizerReplicator)
	})

	// It comes a moment before the end, and the peer does not answer.
	w.stub.say(p.cluster.ClusterID, replication.State{
		Identity: replication.Condition{Status: metav1.ConditionFalse, Reason: isthmus.ReasonUnreachable, Message: "https://b:6443 does not answer"}})
	p.untilIs(isthmus.ConditionIdentity, isthmus.ReasonUnreachable)
	p.keep(p.original(), ofPeer)
	w.ok(w.api().Patch(w.ctx, p.peering.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+isthmus.AnnotationForce+`":"true"}}}`))))
	p.delete()
	w.until("the Peering is gone", p.gone)
	if nc := p.original(); nc != nil {
		t.Errorf("our NetworkConfig has stayed: %v", nc.Finalizers)
	}
}

func TestACopyThatThePeerWantsToKeepGoesWhenItIsDeleted(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	theirs := p.theirs()
	w.ok(w.api().Get(w.ctx, client.ObjectKeyFromObject(theirs), theirs))
	p.keep(theirs, ofPeer)
	w.always("while it lives it is the peer's", func() bool {
		return w.api().Get(w.ctx, client.ObjectKeyFromObject(theirs), theirs) == nil && controllerutil.ContainsFinalizer(theirs, ofPeer)
	})
	w.ok(w.api().Delete(w.ctx, theirs))
	w.until("the copy is gone", func() bool {
		nc, err := controllers.Found(w.ctx, w.api(), client.ObjectKeyFromObject(theirs), new(v1alpha1.NetworkConfig))
		w.ok(err)
		return nc == nil
	})
}

func TestATenantNamespaceThatSomebodyDeletesFinishes(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	w.ok(w.api().Delete(w.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.ns}}))
	w.until("the namespace is gone", func() bool {
		ns, err := controllers.Found(w.ctx, w.api(), types.NamespacedName{Name: p.ns}, new(corev1.Namespace))
		w.ok(err)
		return ns == nil
	})
	p.untilIs(isthmus.ConditionReady, isthmus.ReasonLocalSetup)
	var last string
	for len(w.events.Events) > 0 {
		if e := <-w.events.Events; strings.Contains(e, reasonLeftBehind) {
			last = e
		}
	}
	for _, want := range []string{"namespace " + p.ns + " is being deleted", "tenant-at-b/" + p.cluster.UniqueName(), p.cluster.ClusterID} {
		if !strings.Contains(last, want) {
			t.Errorf("the event %q does not say %q", last, want)
		}
	}
}

// `isthmus install` starts a manager where our finalizers alone hold definitions that are being deleted.
func TestAManagerThatStartsLetsGoWhatHoldsDeletedDefinitions(t *testing.T) {
	a, b := twoSides(t)
	ready(a, b)
	b.stop()
	definitions := make([]*apiextensions.CustomResourceDefinition, 2)
	for i, name := range []string{"peerings.isthmus.net", "networkconfigs.net.liqo.io"} {
		definitions[i] = &apiextensions.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: name}}
		b.ok(b.api().Delete(b.ctx, definitions[i]))
	}
	b.until("the Peering is being deleted", func() bool {
		var p isthmus.Peering
		b.ok(b.api().Get(b.ctx, client.ObjectKeyFromObject(b.peer.peering), &p))
		return !p.DeletionTimestamp.IsZero()
	})
	b.manage()
	for _, d := range definitions {
		b.until(d.Name+" is gone", func() bool {
			crd, err := controllers.Found(b.ctx, b.api(), client.ObjectKeyFromObject(d), new(apiextensions.CustomResourceDefinition))
			b.ok(err)
			return crd == nil
		})
	}
	b.stop()
	part(a)
}
