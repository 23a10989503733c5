package exchange

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/managertest"
	"github.com/isthmus-net/isthmus/manager/peers"
)

func TestRateOfPeerChangesIsLimitedAfterABurst(t *testing.T) {
	p := pace{interval: time.Minute}
	now := time.Now()
	for i := range changesAtOnce {
		if wait := p.delay("b", now); wait != 0 {
			t.Errorf("change %d waits for %v", i, wait)
		}
		if last := p.record("b", now); last != (i == changesAtOnce-1) {
			t.Errorf("change %d is the last one: %v", i, last)
		}
	}
	for range 100 { // delay does not count a change
		if wait := p.delay("b", now); wait <= 0 || wait > time.Minute {
			t.Fatalf("one too many waits for %v", wait)
		}
	}
	if wait := p.delay("c", now); wait != 0 {
		t.Errorf("another peer waits for %v", wait)
	}
	done := 0
	for range 600 { // seconds
		now = now.Add(time.Second)
		if p.delay("b", now) == 0 {
			p.record("b", now)
			done++
		}
	}
	if done != 10 {
		t.Errorf("%d changes in ten minutes; want 10", done)
	}
}

// Every change of a peer's NetworkAllocation is an event for all nodes. A new endpoint or key is
// not.
func TestFrequentAnswerChangesAreDelayedButEndpointChangesAreNot(t *testing.T) {
	a := newAnswering(t)
	b := a.partner("b", 2).claims("10.64.0.0/16", "10.65.0.0/20").publish().answer("None", "None")
	b.joined()
	allocation := func() int64 {
		var o isthmus.NetworkAllocation
		a.OK(managertest.Client.Get(a.Ctx, client.ObjectKey{Name: fabric.AllocationName(b.Cluster.ClusterID)}, &o))
		return o.Generation
	}
	before := allocation()
	seen := []string{"10.80.0.0/16", "10.81.0.0/16"}
	for i := range 2 * changesAtOnce {
		b.answer(seen[i%2], "None")
		if i < changesAtOnce {
			a.Until("it is followed", func() bool { return b.Endpoint().Spec.LocalNATPodCIDR == seen[i%2] })
		}
	}
	followed := seen[(changesAtOnce-1)%2]
	b.answer("10.82.0.0/16", "None")
	edit(a, b.copied(), func(nc *v1alpha1.NetworkConfig) {
		nc.Spec.EndpointIP, nc.Spec.BackendConfig[v1alpha1.ConfigPublicKey] = "192.0.2.99", managertest.KeyText(9)
	})
	a.Until("a new endpoint and a new key are followed", func() bool {
		spec := b.Endpoint().Spec
		return spec.EndpointIP == "192.0.2.99" && spec.BackendConfig[v1alpha1.ConfigPublicKey] == managertest.KeyText(9)
	})
	a.Always("the answer is not followed any more", func() bool {
		return allocation() == before+changesAtOnce && b.Endpoint().Spec.LocalNATPodCIDR == followed
	})
}

func TestFrequentEndpointChangesAreAppliedOnceASecond(t *testing.T) {
	a := newAnswering(t)
	b := a.partner("b", 2).claims("10.64.0.0/16", "10.65.0.0/20").publish().answer("None", "None")
	before, began := b.joined().Generation, time.Now()
	last := ""
	for i := range 6 * changesAtOnce {
		last = fmt.Sprintf("192.0.2.%d", 100+i)
		edit(a, b.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = last })
		a.Until("it is accepted", func() bool { return accepted(b.copied()) == "None None" })
	}
	a.Until("the last one is followed", func() bool { return b.Endpoint().Spec.EndpointIP == last })
	if changes, most := b.Endpoint().Generation-before, changesAtOnce+int64(time.Since(began)/gatewayInterval); changes > most {
		t.Errorf("%d changes in %v; want at most %d", changes, time.Since(began), most)
	}
}

// pacing returns a reconciler for the test to call.
func (a *answering) pacing() *tunnelEndpointReconciler {
	return &tunnelEndpointReconciler{
		Client: a.mgr.GetClient(), Peers: peers.Peers{Reader: a.mgr.GetCache(), Self: a.Self.ClusterID}, Store: a.store, Log: slog.New(slog.DiscardHandler),
		answers: pace{interval: answerInterval}, gateways: pace{interval: gatewayInterval},
	}
}

// recordingQueue is a queue that records delayed requests.
type recordingQueue struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request] // nil: all other methods panic
	after                                                   map[reconcile.Request]time.Duration
}

func (l recordingQueue) AddAfter(r reconcile.Request, after time.Duration) { l.after[r] = after }

// While an answer has to wait, nothing may change in the API. So the reconciler must schedule its
// next try itself.
func TestDelayedAnswerIsScheduledForARetry(t *testing.T) {
	a := newAnswering(t)
	b := a.partner("b", 2).claims("10.64.0.0/16", "10.65.0.0/20").publish().answer("None", "None")
	b.joined()
	r, id := a.pacing(), b.Cluster.ClusterID
	r.Facts = &stubFacts{} // our networks differ from those in the NetworkConfig, so nothing is written
	queue := recordingQueue{after: make(map[reconcile.Request]time.Duration)}
	a.OK(r.queue.Source().Start(a.Ctx, queue))
	for range changesAtOnce {
		r.answers.record(id, time.Now())
	}
	x, err := r.gather(a.Ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: b.NS, Name: id}})
	a.OK(err)
	x.originals[0].Status.PodCIDRNAT = "10.80.0.0/16"
	a.OK(r.join(a.Ctx, x))
	if wait := queue.after[exchangeWith(x.peer)]; wait <= 0 || wait > answerInterval {
		t.Errorf("it is looked at again after %v", wait)
	}
}

func TestFailedWriteDoesNotCountAgainstTheRateLimit(t *testing.T) {
	a := newAnswering(t)
	b := a.partner("b", 2).claims("10.64.0.0/16", "10.65.0.0/20").publish().answer("None", "None")
	b.joined()
	r, id := a.pacing(), b.Cluster.ClusterID
	original := b.Original()
	ended, end := context.WithCancel(a.Ctx)
	end()
	for i := range 2 * changesAtOnce {
		original.Status.PodCIDRNAT = fmt.Sprintf("10.%d.0.0/16", 80+i)
		if _, err := r.mapped(ended, id, original); err == nil {
			t.Fatal("it was written")
		}
	}
	if wait := r.answers.delay(id, time.Now()); wait != 0 {
		t.Errorf("the next answer waits for %v", wait)
	}
	for i := range changesAtOnce {
		original.Status.PodCIDRNAT = fmt.Sprintf("10.%d.0.0/16", 80+i)
		_, err := r.mapped(a.Ctx, id, original)
		a.OK(err)
	}
	if wait := r.answers.delay(id, time.Now()); wait == 0 {
		t.Error("what was written costs nothing")
	}
}

// A NetworkConfig that names another peer must not reset that peer's rate limit.
func TestRateLimitOfAPeerIsRemovedWhenItLeaves(t *testing.T) {
	a := newAnswering(t)
	r, now := a.pacing(), time.Now()
	left := a.Prefix + "-left"
	for range changesAtOnce {
		r.answers.record(left, now)
		r.gateways.record(left, now)
	}
	a.OK(r.end(a.Ctx, &exchange{id: left, elsewhere: true}))
	if r.answers.delay(left, now) == 0 || r.gateways.delay(left, now) == 0 {
		t.Error("the pace of a peer with another namespace is forgotten")
	}
	a.OK(r.end(a.Ctx, &exchange{id: left}))
	if len(r.answers.peers)+len(r.gateways.peers) > 0 {
		t.Error("the pace of a peer that has left stays")
	}
}
