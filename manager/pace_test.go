package manager

import (
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

func TestAPeerChangesAFewTimesAtOnceAndThenOnceAMinute(t *testing.T) {
	var p pace
	now := time.Now()
	for i := range changesAtOnce {
		if wait, last := p.wait("b", now); wait != 0 || last != (i == changesAtOnce-1) {
			t.Errorf("change %d waits for %v, is the last one: %v", i, wait, last)
		}
	}
	for range 100 { // being refused costs nothing
		if wait, last := p.wait("b", now); wait <= 0 || wait > changeEvery || last {
			t.Fatalf("one too many waits for %v, %v", wait, last)
		}
	}
	if wait, _ := p.wait("c", now); wait != 0 {
		t.Errorf("another peer waits for %v", wait)
	}
	done := 0
	for range 600 { // seconds
		now = now.Add(time.Second)
		if wait, _ := p.wait("b", now); wait == 0 {
			done++
		}
	}
	if done != 10 {
		t.Errorf("%d changes in ten minutes; want 10", done)
	}
}

// Every node reads a peer's NetworkAllocation whenever it changes.
func TestAPeerThatFlipsItsAnswerSoonChangesNothing(t *testing.T) {
	a := newAnswering(t)
	b := a.partner("b", 2).claims("10.64.0.0/16", "10.65.0.0/20").publish().answer("None", "None")
	b.joined()
	allocation := func() int64 {
		var o isthmus.NetworkAllocation
		a.ok(testClient.Get(a.ctx, client.ObjectKey{Name: fabric.AllocationName(b.cluster.ClusterID)}, &o))
		return o.Generation
	}
	before := allocation()
	seen := []string{"10.80.0.0/16", "10.81.0.0/16"}
	for i := range 4 * changesAtOnce {
		b.answer(seen[i%2], "None")
		if i < changesAtOnce {
			a.until("it is followed", func() bool { return b.endpoint().Spec.LocalNATPodCIDR == seen[i%2] })
		}
	}
	a.always("it is not followed any more", func() bool { return allocation() == before+changesAtOnce })
}
