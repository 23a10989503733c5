package peerings

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

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/managertest"
	"github.com/isthmus-net/isthmus/manager/replication"
)

func TestPeeringStatusReportsEachStep(t *testing.T) {
	w := newWorld(t, false)
	p := w.describe("b")
	w.Create(p.Peering)
	p.WaitForReason(isthmus.ConditionReady, isthmus.ReasonLocalSetup)
	if m := p.Message(isthmus.ConditionReady); !strings.Contains(m, "tenant namespace "+p.NS+": not found") || !strings.Contains(m, "wireguard-pubkey") {
		t.Errorf("Ready says %q", m)
	}
	if n := len(p.Status().Conditions); n != 7 {
		t.Errorf("%d conditions, want all 7 from the start", n)
	}
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.NS}})
	w.Until("the namespace is not missed any more", func() bool { return !strings.Contains(p.Message(isthmus.ConditionReady), p.NS) })
	w.Gateway("192.0.2.1")
	p.UntilPublished()
	w.Until("Ready has another reason", func() bool { return !p.HasReason(isthmus.ConditionReady, isthmus.ReasonLocalSetup) })
	w.Until("the replicator knows the peer", func() bool { return w.stub.has(p.Cluster.ClusterID) })

	w.stub.report(p.Cluster.ClusterID, replication.State{Identity: replication.Condition{
		Status: metav1.ConditionFalse, Reason: isthmus.ReasonSecretMissing, Message: "Secret " + p.NS + "/isthmus-identity: not there"}})
	p.WaitForReason(isthmus.ConditionIdentity, isthmus.ReasonSecretMissing)
	if m := p.Message(isthmus.ConditionReady); !strings.Contains(m, "IdentityReady: "+p.Cluster.ClusterName+" ("+p.Cluster.ClusterID+"): Secret "+p.NS) {
		t.Errorf("Ready says %q", m)
	}
	p.join()
	status := p.Status()
	if status.Local.PodCIDRSeen != "10.70.0.0/16" || status.Remote.PodCIDRSeen != "10.246.0.0/18" || status.Latency != "7ms" || status.Endpoint != "198.51.100.2:31000" {
		t.Errorf("status is %+v", status)
	}

	te := p.Endpoint()
	te.Status.Connection.Status = v1alpha1.ConnectionError
	te.Status.Connection.StatusMessage = "No network connectivity towards remote cluster"
	w.OK(w.API().Status().Update(w.Ctx, te))
	p.WaitForReason(isthmus.ConditionConnected, isthmus.ReasonLost)
	p.WaitForReason(isthmus.ConditionReady, isthmus.ReasonLost)

	var recorded []string
	w.Until("both are told", func() bool { // Events are sent after the status is written
		for len(w.events.Events) > 0 {
			recorded = append(recorded, <-w.events.Events)
		}
		text := strings.Join(recorded, "\n")
		return strings.Contains(text, "Normal Connected traffic can flow") && strings.Contains(text, "Warning ConnectionLost Connected:")
	})
	if len(recorded) > 6 {
		t.Errorf("%d events are not only transitions:\n%s", len(recorded), strings.Join(recorded, "\n"))
	}
}

func TestDeletedPeeringRemovesItsObjectsInOrder(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	_, err := w.ipam.Update(w.Ctx, func(b ipam.State) (ipam.State, error) {
		b, _, err := b.Allocate(ipam.Request{ID: p.Cluster.ClusterID, Pod: netip.MustParsePrefix("10.244.64.0/18"), External: netip.MustParsePrefix("10.60.0.0/18")})
		return b, err
	})
	w.OK(err)
	allocated := func() bool { _, ok := w.ipam.State().AllocationOf(p.Cluster.ClusterID); return ok }
	p.Delete()
	p.WaitForReason(isthmus.ConditionReady, isthmus.ReasonUnpeering)
	w.Until("the TunnelEndpoint is gone at once", func() bool { return p.Endpoint() == nil })
	w.Until("our NetworkConfig is being deleted", func() bool { return !p.Original().DeletionTimestamp.IsZero() })
	w.stub.report(p.Cluster.ClusterID, replication.State{
		Identity:  replication.Condition{Status: metav1.ConditionFalse, Reason: isthmus.ReasonUnreachable, Message: "https://b: connection refused"},
		Published: replicated.Published,
	})
	w.Until("Ready says for what it waits", func() bool {
		m := p.Message(isthmus.ConditionReady)
		return strings.Contains(m, "tenant-at-b/"+p.Cluster.UniqueName()) && strings.Contains(m, "connection refused") && strings.Contains(m, isthmus.AnnotationForce)
	})
	w.Always("the Peering waits, and so do the IPAM state", func() bool { return !p.Deleted() && allocated() })
	if !w.stub.has(p.Cluster.ClusterID) {
		t.Error("the replicator must keep the peer until the copy is gone")
	}
	p.RemoveFinalizer()
	w.Until("the Peering is gone", p.Deleted)
	if allocated() || w.ipam.State().ReleasedAt(p.Cluster.ClusterID).IsZero() {
		t.Error("the networks of the peer were not released, or are not held")
	}
	w.Until("the replicator has let go", func() bool { return !w.stub.has(p.Cluster.ClusterID) })
}

func TestForcedUnpeeringDoesNotWaitAndReportsLeftoverObjects(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	w.stub.report(p.Cluster.ClusterID, replication.State{
		Identity: replication.Condition{Status: metav1.ConditionFalse, Reason: isthmus.ReasonUnreachable, Message: "https://b:6443 does not answer"}})
	p.WaitForReason(isthmus.ConditionIdentity, isthmus.ReasonUnreachable)
	force := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+isthmus.AnnotationForce+`":"true"}}}`))
	w.OK(w.API().Patch(w.Ctx, p.Peering.DeepCopy(), force))
	w.Always("without a deletion it means nothing", func() bool { return p.Original().DeletionTimestamp.IsZero() })
	p.Delete()
	w.Until("the Peering is gone", p.Deleted)
	var last string
	for len(w.events.Events) > 0 {
		if e := <-w.events.Events; strings.Contains(e, reasonLeftBehind) {
			last = e
		}
	}
	for _, want := range []string{"tenant-at-b/" + p.Cluster.UniqueName(), p.Cluster.ClusterID, "https://b:6443 does not answer"} {
		if !strings.Contains(last, want) {
			t.Errorf("the event %q does not say %q", last, want)
		}
	}
}

func TestPeeringWithoutObjectsIsDeletedAtOnce(t *testing.T) {
	w := newWorld(t, false)
	p := w.describe("b")
	w.Create(p.Peering)
	p.WaitForReason(isthmus.ConditionReady, isthmus.ReasonLocalSetup)
	p.Delete()
	w.Until("the Peering is gone", p.Deleted)
}

func TestWithdrawnNetworkConfigIsReportedDifferentlyFromAMissingOne(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.WaitForReason(isthmus.ConditionPeerConfig, isthmus.ReasonWaitingPeer)
	p.join()
	theirs := p.Theirs()
	w.OK(w.API().Delete(w.Ctx, theirs))
	p.WaitForReason(isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew)
	w.OK(w.API().Delete(w.Ctx, p.Endpoint())) // as package exchange would do
	p.WaitForReason(isthmus.ConditionTunnelEndpoint, isthmus.ReasonWaiting)
	if !p.HasReason(isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew) {
		t.Errorf("forgotten: %s", p.Message(isthmus.ConditionPeerConfig))
	}
	w.Create(p.Theirs())
	p.WaitForReason(isthmus.ConditionPeerConfig, isthmus.ReasonWaitingAnswer)
}

func TestOlderOfTwoPeeringsForOneClusterIsUsed(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.UntilPublished()
	time.Sleep(time.Second) // creation times have a resolution of one second

	rival := w.describe("b")
	rival.Peering.Name += "-again"
	rival.NS += "-2"
	rival.Peering.Spec.TenantNamespace.Local = rival.NS
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: rival.NS}})
	w.Create(rival.Peering)
	rival.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConflict)
	if m := rival.Message(isthmus.ConditionReady); !strings.Contains(m, p.Peering.Name) {
		t.Errorf("Ready says %q", m)
	}
	squatter := w.describe("c") // a Peering for another cluster with the same tenant namespace
	squatter.Peering.Spec.TenantNamespace.Local = p.NS
	w.Create(squatter.Peering)
	squatter.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConflict)
	self := w.describe("d")
	self.Peering.Spec.Cluster = w.Self
	w.Create(self.Peering)
	self.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConflict)

	w.Always("the loser makes nothing", func() bool { return rival.Original() == nil })
	squatter.Delete()
	w.Until("a loser goes without touching the other's", squatter.Deleted)
	if p.Original() == nil || !p.Original().DeletionTimestamp.IsZero() {
		t.Error("the winner has lost its NetworkConfig")
	}
	p.Delete()
	w.Until("the winner is gone", p.Deleted)
	rival.UntilPublished()
	rival.WaitForReason(isthmus.ConditionReady, isthmus.ReasonUnknown) // its replicator reports nothing in this test
}

func TestPeeringStaysReadyUntilThePeerIsChecked(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	w.stub.forget(p.Cluster.ClusterID)
	w.Always("the Peering stays Ready", func() bool {
		c := meta.FindStatusCondition(p.Status().Conditions, isthmus.ConditionReady)
		return c.Status == metav1.ConditionTrue
	})
	w.stub.report(p.Cluster.ClusterID, replication.State{Identity: replication.Condition{
		Status: metav1.ConditionFalse, Reason: isthmus.ReasonUnreachable, Message: "https://b: connection refused"}})
	p.WaitForReason(isthmus.ConditionIdentity, isthmus.ReasonUnreachable)
}

func TestEventsWithoutAChangeCauseNoWrites(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	peers := []*remote{w.peer("b"), w.peer("c")}
	for _, p := range peers {
		p.join()
	}
	versions := func() string {
		var all []string
		for _, p := range peers {
			var peering isthmus.Peering
			w.OK(w.API().Get(w.Ctx, client.ObjectKeyFromObject(p.Peering), &peering))
			all = append(all, peering.ResourceVersion, p.Original().ResourceVersion, p.Endpoint().ResourceVersion)
		}
		return strings.Join(all, " ")
	}
	time.Sleep(300 * time.Millisecond)
	before := versions()
	for range 5 { // five events without a change
		for _, p := range peers {
			w.stub.report(p.Cluster.ClusterID, replicated)
		}
		time.Sleep(300 * time.Millisecond)
	}
	if after := versions(); after != before {
		t.Errorf("resource versions were %s and are %s", before, after)
	}
}

func TestTenantNamespacesOfAPeeringAreImmutable(t *testing.T) {
	w := managertest.New(t)
	for field, change := range map[string]func(*isthmus.TenantNamespace){
		"local":  func(n *isthmus.TenantNamespace) { n.Local = w.Prefix + "-y" },
		"remote": func(n *isthmus.TenantNamespace) { n.Remote = w.Prefix + "-y" },
	} {
		p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: w.Prefix + "-" + field}, Spec: isthmus.PeeringSpec{
			Cluster:         v1alpha1.ClusterIdentity{ClusterID: w.Prefix + "-" + field, ClusterName: "n"},
			TenantNamespace: isthmus.TenantNamespace{Local: w.Prefix + "-" + field, Remote: w.Prefix + "-x"}}}
		w.Create(p)
		change(&p.Spec.TenantNamespace)
		if err := w.API().Update(w.Ctx, p); err == nil || !strings.Contains(err.Error(), "tenantNamespace."+field+" is immutable") {
			t.Errorf("%s: %v", field, err)
		}
		w.OK(w.API().Delete(w.Ctx, p))
	}
}

func TestEventReportsThatAClaimNeedsConsent(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	var copies v1alpha1.NetworkConfigList
	w.OK(w.API().List(w.Ctx, &copies))
	for i := range copies.Items {
		nc := &copies.Items[i]
		if nc.Namespace != p.NS || nc.Labels[v1alpha1.LabelOriginID] != p.Cluster.ClusterID {
			continue
		}
		meta.SetStatusCondition(&nc.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse,
			Reason: v1alpha1.ReasonConsent, Message: "spec.podCIDR: is 192.168.32.0/22 now"})
		w.OK(w.API().Status().Update(w.Ctx, nc))
	}
	p.WaitForReason(isthmus.ConditionPeerConfig, v1alpha1.ReasonConsent)
	recorded := ""
	w.Until("an Event says so", func() bool {
		for len(w.events.Events) > 0 {
			recorded += <-w.events.Events + "\n"
		}
		return strings.Contains(recorded, "Warning ConsentNeeded PeerConfigAccepted: "+p.Cluster.ClusterName+" ("+p.Cluster.ClusterID+") requests in NetworkConfig ") &&
			strings.Contains(recorded, "to agree: isthmus peer "+p.Peering.Name+" --consent 10.244.64.0/18,10.60.0.0/18")
	})
	// A changed claim needs consent again.
	theirs := p.Theirs()
	w.OK(w.API().Get(w.Ctx, client.ObjectKeyFromObject(theirs), theirs))
	theirs.Spec.PodCIDR = "192.168.32.0/22"
	w.OK(w.API().Update(w.Ctx, theirs))
	recorded = ""
	w.Until("an Event says so again", func() bool {
		for len(w.events.Events) > 0 {
			recorded += <-w.events.Events + "\n"
		}
		return strings.Contains(recorded, "--consent 192.168.32.0/22,10.60.0.0/18")
	})
}
