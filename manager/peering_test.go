package manager

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/replication"
)

func (r *remote) delete() {
	r.w.t.Helper()
	r.w.ok(r.w.api().Delete(r.w.ctx, r.peering))
}

func (r *remote) gone() bool {
	p, err := controllers.Found(r.w.ctx, r.w.api(), types.NamespacedName{Name: r.peering.Name}, new(isthmus.Peering))
	r.w.ok(err)
	return p == nil
}

// copyGone does what the replicator does when the copy is gone.
func (r *remote) copyGone() {
	r.w.t.Helper()
	nc := r.original()
	controllerutil.RemoveFinalizer(nc, v1alpha1.FinalizerReplicator)
	r.w.ok(r.w.api().Update(r.w.ctx, nc))
}

func TestPeeringTellsItsStoryStepByStep(t *testing.T) {
	w := newWorld(t, false)
	p := w.describe("b")
	w.create(p.peering)
	p.untilIs(isthmus.ConditionReady, isthmus.ReasonLocalSetup)
	if m := p.message(isthmus.ConditionReady); !strings.Contains(m, "tenant namespace "+p.ns+": not there") || !strings.Contains(m, "wireguard-pubkey") {
		t.Errorf("Ready says %q", m)
	}
	if n := len(p.status().Conditions); n != 7 {
		t.Errorf("%d conditions, want all 7 from the start", n)
	}
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.ns}})
	w.until("the namespace is not missed any more", func() bool { return !strings.Contains(p.message(isthmus.ConditionReady), p.ns) })
	w.gateway("192.0.2.1")
	p.untilPublished()
	w.until("Ready has another reason", func() bool { return !p.is(isthmus.ConditionReady, isthmus.ReasonLocalSetup) })
	w.until("the replicator knows the peer", func() bool { return w.stub.has(p.cluster.ClusterID) })

	w.stub.say(p.cluster.ClusterID, replication.State{Identity: replication.Condition{
		Status: metav1.ConditionFalse, Reason: isthmus.ReasonSecretMissing, Message: "Secret " + p.ns + "/isthmus-identity: not there"}})
	p.untilIs(isthmus.ConditionIdentity, isthmus.ReasonSecretMissing)
	if m := p.message(isthmus.ConditionReady); !strings.Contains(m, "IdentityReady: "+p.cluster.ClusterName+" ("+p.cluster.ClusterID+"): Secret "+p.ns) {
		t.Errorf("Ready says %q", m)
	}
	p.join()
	status := p.status()
	if status.Local.PodCIDRSeen != "10.70.0.0/16" || status.Remote.PodCIDRSeen != "10.246.0.0/18" || status.Latency != "7ms" || status.Endpoint != "198.51.100.2:31000" {
		t.Errorf("status is %+v", status)
	}

	te := p.endpoint()
	te.Status.Connection.Status = v1alpha1.ConnectionError
	te.Status.Connection.StatusMessage = "No network connectivity towards remote cluster"
	w.ok(w.api().Status().Update(w.ctx, te))
	p.untilIs(isthmus.ConditionConnected, isthmus.ReasonLost)
	p.untilIs(isthmus.ConditionReady, isthmus.ReasonLost)

	var told []string
	w.until("both are told", func() bool { // after they are in the status
		for len(w.events.Events) > 0 {
			told = append(told, <-w.events.Events)
		}
		text := strings.Join(told, "\n")
		return strings.Contains(text, "Normal Connected traffic can flow") && strings.Contains(text, "Warning ConnectionLost Connected:")
	})
	if len(told) > 6 {
		t.Errorf("%d events are not only transitions:\n%s", len(told), strings.Join(told, "\n"))
	}
}

func TestPeeringIsTakenDownInOrder(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	_, err := w.ipam.Update(w.ctx, func(b ipam.State) (ipam.State, error) {
		b, _, err := b.Grant(ipam.Request{ID: p.cluster.ClusterID, Pod: netip.MustParsePrefix("10.244.64.0/18"), External: netip.MustParsePrefix("10.60.0.0/18")})
		return b, err
	})
	w.ok(err)
	granted := func() bool { _, ok := w.ipam.State().GrantOf(p.cluster.ClusterID); return ok }
	p.delete()
	p.untilIs(isthmus.ConditionReady, isthmus.ReasonUnpeering)
	w.until("the TunnelEndpoint is gone at once", func() bool { return p.endpoint() == nil })
	w.until("our NetworkConfig is being deleted", func() bool { return !p.original().DeletionTimestamp.IsZero() })
	w.stub.say(p.cluster.ClusterID, replication.State{
		Identity:  replication.Condition{Status: metav1.ConditionFalse, Reason: isthmus.ReasonUnreachable, Message: "https://b: connection refused"},
		Published: replicated.Published,
	})
	w.until("Ready says for what it waits", func() bool {
		m := p.message(isthmus.ConditionReady)
		return strings.Contains(m, "tenant-at-b/"+p.cluster.UniqueName()) && strings.Contains(m, "connection refused") && strings.Contains(m, isthmus.AnnotationForce)
	})
	w.always("the Peering waits, and so do the IPAM state", func() bool { return !p.gone() && granted() })
	if !w.stub.has(p.cluster.ClusterID) {
		t.Error("the replicator must keep the peer until the copy is gone")
	}
	p.copyGone()
	w.until("the Peering is gone", p.gone)
	if granted() || w.ipam.State().ReleasedAt(p.cluster.ClusterID).IsZero() {
		t.Error("the networks of the peer were not released, or are not held")
	}
	w.until("the replicator has let go", func() bool { return !w.stub.has(p.cluster.ClusterID) })
}

func TestForcedUnpeeringWaitsForNobodyAndSaysWhatStays(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	w.stub.say(p.cluster.ClusterID, replication.State{
		Identity: replication.Condition{Status: metav1.ConditionFalse, Reason: isthmus.ReasonUnreachable, Message: "https://b:6443 does not answer"}})
	p.untilIs(isthmus.ConditionIdentity, isthmus.ReasonUnreachable)
	force := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+isthmus.AnnotationForce+`":"true"}}}`))
	w.ok(w.api().Patch(w.ctx, p.peering.DeepCopy(), force))
	w.always("without a deletion it means nothing", func() bool { return p.original().DeletionTimestamp.IsZero() })
	p.delete()
	w.until("the Peering is gone", p.gone)
	var last string
	for len(w.events.Events) > 0 {
		if e := <-w.events.Events; strings.Contains(e, reasonLeftBehind) {
			last = e
		}
	}
	for _, want := range []string{"tenant-at-b/" + p.cluster.UniqueName(), p.cluster.ClusterID, "https://b:6443 does not answer"} {
		if !strings.Contains(last, want) {
			t.Errorf("the event %q does not say %q", last, want)
		}
	}
}

func TestPeeringDeletedBeforeAnythingWasMadeIsGoneAtOnce(t *testing.T) {
	w := newWorld(t, false)
	p := w.describe("b")
	w.create(p.peering)
	p.untilIs(isthmus.ConditionReady, isthmus.ReasonLocalSetup)
	p.delete()
	w.until("the Peering is gone", p.gone)
}

func TestPeerThatWithdrawsIsToldFromOneThatNeverCame(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	p := w.peer("b")
	p.untilIs(isthmus.ConditionPeerConfig, isthmus.ReasonWaitingPeer)
	p.join()
	theirs := p.theirs()
	w.ok(w.api().Delete(w.ctx, theirs))
	p.untilIs(isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew)
	w.ok(w.api().Delete(w.ctx, p.endpoint())) // as the other half of the manager does
	p.untilIs(isthmus.ConditionTunnelEndpoint, isthmus.ReasonWaiting)
	if !p.is(isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew) {
		t.Errorf("forgotten: %s", p.message(isthmus.ConditionPeerConfig))
	}
	w.create(p.theirs())
	p.untilIs(isthmus.ConditionPeerConfig, isthmus.ReasonWaitingAnswer)
}

func TestOfTwoPeeringsForOneClusterTheOlderOneCounts(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	p := w.peer("b")
	p.untilPublished()
	time.Sleep(time.Second) // creation times are whole seconds

	rival := w.describe("b")
	rival.peering.Name += "-again"
	rival.ns += "-2"
	rival.peering.Spec.TenantNamespace.Local = rival.ns
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: rival.ns}})
	w.create(rival.peering)
	rival.untilIs(isthmus.ConditionReady, isthmus.ReasonConflict)
	if m := rival.message(isthmus.ConditionReady); !strings.Contains(m, p.peering.Name) {
		t.Errorf("Ready says %q", m)
	}
	squatter := w.describe("c") // another cluster, the same namespace
	squatter.peering.Spec.TenantNamespace.Local = p.ns
	w.create(squatter.peering)
	squatter.untilIs(isthmus.ConditionReady, isthmus.ReasonConflict)
	self := w.describe("d")
	self.peering.Spec.Cluster = w.self
	w.create(self.peering)
	self.untilIs(isthmus.ConditionReady, isthmus.ReasonConflict)

	w.always("the loser makes nothing", func() bool { return rival.original() == nil })
	squatter.delete()
	w.until("a loser goes without touching the other's", squatter.gone)
	if p.original() == nil || !p.original().DeletionTimestamp.IsZero() {
		t.Error("the winner has lost its NetworkConfig")
	}
	p.delete()
	w.until("the winner is gone", p.gone)
	rival.untilPublished()
	rival.untilIs(isthmus.ConditionReady, isthmus.ReasonUnknown) // its replicator says nothing here
}

func TestAReplicatorThatHasNotLookedYetIsNoNews(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	w.stub.forget(p.cluster.ClusterID)
	w.always("the Peering stays Ready", func() bool {
		c := meta.FindStatusCondition(p.status().Conditions, isthmus.ConditionReady)
		return c.Status == metav1.ConditionTrue
	})
	w.stub.say(p.cluster.ClusterID, replication.State{Identity: replication.Condition{
		Status: metav1.ConditionFalse, Reason: isthmus.ReasonUnreachable, Message: "https://b: connection refused"}})
	p.untilIs(isthmus.ConditionIdentity, isthmus.ReasonUnreachable)
}

func TestNothingIsWrittenAtRest(t *testing.T) {
	w := newWorld(t, false)
	w.gateway("192.0.2.1")
	peers := []*remote{w.peer("b"), w.peer("c")}
	for _, p := range peers {
		p.join()
	}
	versions := func() string {
		var all []string
		for _, p := range peers {
			var peering isthmus.Peering
			w.ok(w.api().Get(w.ctx, client.ObjectKeyFromObject(p.peering), &peering))
			all = append(all, peering.ResourceVersion, p.original().ResourceVersion, p.endpoint().ResourceVersion)
		}
		return strings.Join(all, " ")
	}
	time.Sleep(300 * time.Millisecond)
	before := versions()
	for range 5 { // events without a change
		for _, p := range peers {
			w.stub.say(p.cluster.ClusterID, replicated)
		}
		time.Sleep(300 * time.Millisecond)
	}
	if after := versions(); after != before {
		t.Errorf("resource versions were %s and are %s", before, after)
	}
}

func TestTheNamespacesOfAPeeringAreSetOnce(t *testing.T) {
	w := bare(t)
	for field, change := range map[string]func(*isthmus.TenantNamespace){
		"local":  func(n *isthmus.TenantNamespace) { n.Local = w.prefix + "-y" },
		"remote": func(n *isthmus.TenantNamespace) { n.Remote = w.prefix + "-y" },
	} {
		p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: w.prefix + "-" + field}, Spec: isthmus.PeeringSpec{
			Cluster:         v1alpha1.ClusterIdentity{ClusterID: w.prefix + "-" + field, ClusterName: "n"},
			TenantNamespace: isthmus.TenantNamespace{Local: w.prefix + "-" + field, Remote: w.prefix + "-x"}}}
		w.create(p)
		change(&p.Spec.TenantNamespace)
		if err := w.api().Update(w.ctx, p); err == nil || !strings.Contains(err.Error(), "tenantNamespace."+field+" is immutable") {
			t.Errorf("%s: %v", field, err)
		}
		w.ok(w.api().Delete(w.ctx, p))
	}
}
