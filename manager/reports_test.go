package manager

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// report makes what the agent of a node writes, for as long as the test lasts.
func (w *world) report(node string, networks []string, resolvers ...string) *isthmus.NodeNetworks {
	w.T.Helper()
	r := &isthmus.NodeNetworks{ObjectMeta: metav1.ObjectMeta{Namespace: w.System, Name: node},
		Spec: isthmus.NodeNetworksSpec{Networks: networks, Resolvers: resolvers}}
	w.Create(r)
	w.T.Cleanup(func() { w.Drop(r) })
	return r
}

// keeper is one whose Reconcile the test calls, in a cluster on 10.244.0.0/16.
func (w *world) keeper() (*FactsKeeper, *stubStore, *events.FakeRecorder) {
	store, told := new(stubStore), events.NewFakeRecorder(100)
	return &FactsKeeper{
		Cache: w.API(), Direct: w.API(), Store: store, Cluster: w.Self, Namespace: w.System, Events: told, Log: slog.New(slog.DiscardHandler),
		Plan: AddressPlan{PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
			ExternalCIDR: netip.MustParsePrefix("10.245.0.0/16")},
	}, store, told
}

// A peer that claims what any node reaches gets other networks, and those are clear of it as well.
func TestWhatANodeReachesIsNoPeers(t *testing.T) {
	w := bare(t)
	w.report("n1", []string{"172.30.1.0/24", "192.168.77.0/24"}, "192.168.79.53", "2001:db8::53")
	w.report("n2", []string{"172.30.1.0/24", "10.0.0.0/11", "192.168.32.0/22", "100.64.7.0/24", "fd00:5::/48"})
	keeper, store, told := w.keeper()
	_, err := keeper.Reconcile(w.Ctx, ctrl.Request{})
	w.OK(err)
	reached := []string{"172.30.1.0/24", "192.168.77.0/24", "192.168.79.53/32", "10.0.0.0/11", "192.168.32.0/22", "100.64.7.0/24", "fd00:5::/48"}
	for pod, as := range map[string]bool{
		"172.30.1.0/24":   false, // on-link
		"172.30.0.0/16":   false, // around that
		"172.30.2.0/24":   true,
		"192.168.77.0/26": false, // a part of a link of one node
		"192.168.33.0/24": false, // a static route of one node
		"192.168.36.0/22": true,
		"100.64.0.0/20":   false,
		"192.168.79.0/24": false, // a DNS server
		"192.168.78.0/24": true,
		"10.9.0.0/16":     false,
		"10.40.0.0/16":    true,
		"fd00:6::/48":     true,
	} {
		external := "172.20.0.0/20"
		if strings.HasPrefix(pod, "fd") {
			external = "fd00:7::/64"
		}
		_, g, err := store.State().Grant(ipam.Request{ID: "b", Pod: netip.MustParsePrefix(pod), External: netip.MustParsePrefix(external)})
		if w.OK(err); (g.Pod.String() == pod) != as {
			t.Errorf("%s is %v", pod, g.Pod)
		}
		for _, r := range append(reached, store.State().Own().ExternalCIDR.String()) {
			if g.Pod.Overlaps(netip.MustParsePrefix(r)) || g.External.Overlaps(netip.MustParsePrefix(r)) {
				t.Errorf("%s is %v, and a node reaches %s", pod, g, r)
			}
		}
	}
	// Without room in the pools the peer is refused, and does not learn who our nodes are.
	_, _, err = store.State().Grant(ipam.Request{ID: "b", Pod: netip.MustParsePrefix("fd00:5::/56"), External: netip.MustParsePrefix("fd00:7::/64")})
	if err == nil || !strings.Contains(err.Error(), "fd00:5::/56 overlaps a network of a node, fd00:5::/48") {
		t.Errorf("an IPv6 network of node n2: %v", err)
	}
	if n := len(told.Events); n > 0 {
		t.Errorf("%d Events, such as %s", n, <-told.Events)
	}
}

// A node that wants all peers refused is named, and refuses none by that.
func TestAReportOfEverythingIsIgnoredAndNamesTheNode(t *testing.T) {
	w := bare(t)
	r := w.report("n3", []string{"0.0.0.0/0", "128.0.0.0/1", "10.0.0.0/7", "::/0", "192.168.32.0/22"})
	keeper, store, told := w.keeper()
	for range 2 { // and says so once
		_, err := keeper.Reconcile(w.Ctx, ctrl.Request{})
		w.OK(err)
	}
	for pod, as := range map[string]bool{"192.168.96.0/22": true, "10.50.0.0/18": true, "192.168.32.0/24": false} {
		_, g, err := store.State().Grant(ipam.Request{ID: "b", Pod: netip.MustParsePrefix(pod), External: netip.MustParsePrefix("172.20.0.0/20")})
		if w.OK(err); (g.Pod.String() == pod) != as {
			t.Errorf("%s is %v", pod, g.Pod)
		}
	}
	if n := len(told.Events); n != 1 {
		t.Fatalf("%d Events", n)
	}
	if text := <-told.Events; !strings.Contains(text, `Warning Ignored spec.networks: node "n3" says that it has "0.0.0.0/0" and 3 more`) {
		t.Error(text)
	}
	facts, err := keeper.Facts(w.Ctx)
	w.OK(err)
	if len(facts.Reached) != 1 || len(facts.Ignored) != 1 || facts.Ignored[0].Origin.Name != r.Name {
		t.Errorf("%+v", facts)
	}
}

// What comes later breaks nothing that is in force: it is a condition and an Event that name the
// node and the network, until one of them is gone.
func TestANetworkInForceThatANodeReachesLaterIsNamedAndStays(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	_, err := w.ipam.Update(w.Ctx, func(b ipam.State) (ipam.State, error) {
		b, _, err := b.Grant(ipam.Request{ID: p.Cluster.ClusterID, Pod: netip.MustParsePrefix("10.244.64.0/18"), External: netip.MustParsePrefix("10.60.0.0/18")})
		return b, err
	})
	w.OK(err)
	had, _ := w.ipam.State().GrantOf(p.Cluster.ClusterID)
	before := p.Endpoint()

	r := w.report("n1", []string{"10.60.32.0/24"})
	p.UntilIs(isthmus.ConditionReady, isthmus.ReasonOverlap)
	want := "ExternalCIDR of peer " + p.Cluster.ClusterID + ", 10.60.0.0/18 here, overlaps a network of node n1, 10.60.32.0/24"
	if m := p.Message(isthmus.ConditionReady); !strings.Contains(m, want) {
		t.Errorf("Ready says %q, want %q", m, want)
	}
	told := ""
	w.Until("an Event says so", func() bool {
		for len(w.events.Events) > 0 {
			told += <-w.events.Events + "\n"
		}
		return strings.Contains(told, "Warning Overlap Ready: ") && strings.Contains(told, want)
	})
	if now, _ := w.ipam.State().GrantOf(p.Cluster.ClusterID); now != had {
		t.Errorf("the peer has %v, had %v", now, had)
	}
	if now := p.Endpoint(); now.Generation != before.Generation {
		t.Errorf("the TunnelEndpoint is %+v", now.Spec)
	}
	w.OK(w.API().Delete(w.Ctx, r))
	p.UntilIs(isthmus.ConditionReady, isthmus.ReasonConnected)
}

func TestAPeerWithoutNetworksWaitsForTheReportsOfTheNodes(t *testing.T) {
	a := newAnswering(t)
	early := a.partner("early", 2).claims("10.50.0.0/18", "10.60.0.0/20")
	early.untilAccepted("None None")
	a.facts.change(func(f *Facts) { f.Awaiting = true })
	late := a.partner("late", 3).claims("192.168.32.0/22", "10.62.0.0/20")
	edit(a, early.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "192.0.2.99" })
	early.untilAccepted("None None") // whoever has networks is answered
	a.Always("it is not answered, and gets nothing", func() bool { return accepted(late.copied()) == "no answer" && !late.granted() })
	a.facts.change(func(f *Facts) { f.Awaiting = false })
	late.untilAccepted("None None")
}

func TestTheReportsOfNodesAreAwaitedForAWhile(t *testing.T) {
	w := bare(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.Prefix + "-n1"}}
	w.Create(node)
	t.Cleanup(func() { w.OK(w.API().Delete(context.Background(), node)) })
	keeper, _, _ := w.keeper()
	awaits := func() bool {
		t.Helper()
		result, err := keeper.Reconcile(w.Ctx, ctrl.Request{})
		w.OK(err)
		facts, err := keeper.Facts(w.Ctx)
		w.OK(err)
		if facts.Awaiting && result.RequeueAfter > time.Second {
			t.Errorf("it looks again after %v", result.RequeueAfter)
		}
		return facts.Awaiting
	}
	keeper.began = time.Now().Add(time.Hour) // so that the machine's pace does not matter
	if !awaits() {
		t.Error("a node has not reported, and nobody waits")
	}
	keeper.began = time.Now().Add(-reportPatience)
	if awaits() {
		t.Error("a node never reports, and all wait for ever")
	}
	keeper.began = time.Now().Add(time.Hour)
	w.report(node.Name, nil)
	if awaits() {
		t.Error("all nodes have reported, and somebody waits")
	}
}
