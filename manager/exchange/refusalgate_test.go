package exchange

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/queue"
)

// refuses writes the report of a node: if all is true, the node refuses all allocated networks;
// otherwise it refuses none yet.
func (a *answering) refuses(node string, all bool) {
	a.T.Helper()
	revision := int64(1)
	if all {
		var list isthmus.NetworkAllocationList
		a.OK(a.API().List(a.Ctx, &list))
		now, problems := fabric.AllocationsFrom(list.Items, time.Now())
		if len(problems) > 0 {
			a.T.Fatal(problems)
		}
		revision = max(revision, now.Version)
	}
	r := &isthmus.NodeNetworks{ObjectMeta: metav1.ObjectMeta{Namespace: a.System, Name: node}, Spec: isthmus.NodeNetworksSpec{RefusedResourceVersion: revision}}
	err := a.API().Create(a.Ctx, r)
	if apierrors.IsAlreadyExists(err) {
		err = a.API().Patch(a.Ctx, r, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"refusedResourceVersion":%d}}`, revision)))
	}
	a.OK(err)
}

// awaited waits until the RefusalGate has the reports of n nodes.
func (a *answering) awaited(n int) {
	a.T.Helper()
	a.Until("the reports are read", func() bool {
		a.nodes.mu.Lock()
		defer a.nodes.mu.Unlock()
		return len(a.nodes.reported) == n
	})
}

func TestNetworkIsPublishedOnlyAfterAllNodesRefuseIt(t *testing.T) {
	a := newAnswering(t)
	a.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: a.System}})
	a.refuses("n1", false)
	a.refuses("n2", false)
	a.Create(&isthmus.NodeNetworks{ObjectMeta: metav1.ObjectMeta{Namespace: a.System, Name: "older"}}) // an older agent, which reports no version
	a.awaited(2)

	b := a.partner("b", 2).claims("10.50.0.0/18", "10.60.0.0/20")
	a.Until("its networks are in the IPAM state", b.allocated)
	a.Always("it is not answered", func() bool { return !b.answered() })
	a.refuses("n1", true)
	a.Always("it is not answered for one node", func() bool { return !b.answered() })
	a.refuses("n2", true)
	b.untilAccepted("None None")

	// A node's report counts for the version that it names, but not for later allocations.
	c := a.partner("c", 3).claims("10.51.0.0/18", "10.61.0.0/20")
	a.Until("its networks are in the IPAM state", c.allocated)
	a.refuses("n1", true)
	d := a.partner("d", 4).claims("10.52.0.0/18", "10.62.0.0/20")
	a.Until("its networks are in the IPAM state", d.allocated)
	a.Always("neither is answered", func() bool { return !c.answered() && !d.answered() })
	a.refuses("n2", true)
	c.untilAccepted("None None")
	a.Always("one node is behind", func() bool { return !d.answered() })
	a.refuses("n1", true)
	d.untilAccepted("None None")
}

// If a node's agent does not respond, allocations wait for it only once, until it reports again.
func TestUnresponsiveNodeIsReportedAndSkipped(t *testing.T) {
	a := newAnswering(t)
	a.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: a.System}})
	a.nodes.Patience = time.Millisecond
	a.refuses("n1", false)
	a.awaited(1)
	b := a.partner("b", 2).claims("10.50.0.0/18", "10.60.0.0/20")
	b.untilAccepted("None None")
	event := <-a.events.Events
	if !strings.Contains(event, "Warning NotRefused node n1: did not confirm within 1ms that it refuses the networks of a new peer") {
		t.Error(event)
	}
	if late := a.nodes.Late(); late != 1 {
		t.Errorf("%d nodes are late", late)
	}
	a.nodes.mu.Lock()
	a.nodes.Patience = time.Hour
	a.nodes.mu.Unlock()
	c := a.partner("c", 3).claims("10.51.0.0/18", "10.61.0.0/20")
	c.untilAccepted("None None")

	a.refuses("n1", true) // the agent responds again
	a.Until("the report is read", func() bool { return a.nodes.Late() == 0 })
	d := a.partner("d", 4).claims("10.52.0.0/18", "10.62.0.0/20")
	a.Until("its networks are in the IPAM state", d.allocated)
	a.Always("it is waited for again", func() bool { return !d.answered() })
	a.refuses("n1", true)
	d.untilAccepted("None None")
}

// A network is in the IPAM state before its NetworkAllocation is written. It must not be published
// before then, even after Patience.
func TestNetworkIsNotPublishedBeforeItsNetworkAllocationIsWritten(t *testing.T) {
	state, _ := ipam.State{}.Configure(ipam.Config{PodCIDR: netip.MustParsePrefix("10.64.0.0/14"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12")})
	state, _, err := state.Allocate(ipam.Request{ID: "b", Pod: netip.MustParsePrefix("10.50.0.0/18"), External: netip.MustParsePrefix("10.60.0.0/20")})
	if err != nil {
		t.Fatal(err)
	}
	w := &RefusalGate{Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	for _, step := range []struct {
		version int64
		ready   bool
	}{{ipamstore.NotWritten, false}, {7, true}, {9, false}, {9, false}, {7, true}, {ipamstore.NotWritten, false}, {ipamstore.NotWritten, false}} {
		w.Observe(state, func(string) int64 { return step.version })
		if w.reported["n1"], w.Patience = 8, time.Hour; step.version == ipamstore.NotWritten { // Patience applies only to nodes
			w.Patience = 0
			delete(w.reported, "n1")
		}
		var q queue.Queue
		if ready := w.refused("b", &q, controllers.RequestFor("b")); ready != step.ready || (len(w.waiting) == 0) != step.ready {
			t.Errorf("version %d: told %v, %d wait", step.version, ready, len(w.waiting))
		}
	}
	w.reported["n1"] = 8
	w.Observe(state, func(string) int64 { return 8 })
	if len(w.waiting) > 0 {
		t.Error("it is written and refused, and nobody is woken")
	}
}
