package peerings

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

func TestNetworksOfLaterServiceCIDRsAreReserved(t *testing.T) {
	w := newWorld(t, false)
	if !managertest.ServesServiceCIDRs {
		t.Skip("this API server has no ServiceCIDRs")
	}
	serviceCIDR := func(name, cidr string) *networkingv1.ServiceCIDR {
		return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: w.Prefix + name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{cidr}}}
	}
	inside, later := serviceCIDR("-inside", "10.111.0.0/16"), serviceCIDR("-later", "172.29.0.0/24") // our ServiceCIDR is 10.96.0.0/12
	drop := func(o *networkingv1.ServiceCIDR) {
		w.OK(client.IgnoreNotFound(w.API().Delete(context.Background(), o)))
		w.OK(client.IgnoreNotFound(w.API().Patch(context.Background(), o, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))))
	}
	reserved := func() bool {
		return slices.Contains(w.ipam.State().Own().Reserved, netip.MustParsePrefix("172.29.0.0/24"))
	}
	guarded := func() string { return w.ipam.State().Guarded(netip.MustParseAddr("172.29.0.7")) }
	if reserved() {
		t.Fatal("reserved before it is there")
	}
	for _, o := range []*networkingv1.ServiceCIDR{inside, later} {
		w.Create(o)
		t.Cleanup(func() { drop(o) })
	}
	w.Until("it is reserved", reserved)
	if got := guarded(); got != "is a Service, in 172.29.0.0/24" {
		t.Errorf("what peers get only where a person says so: %q", got)
	}
	for _, c := range w.ipam.State().Conflicts() {
		t.Errorf("conflict: %v", c)
	}
	drop(later)
	w.Until("it is free again", func() bool { return !reserved() && guarded() == "" })
}

// A node reaches a network that a peer already has. The network stays in force. A condition and an
// Event name the node and the network until the node or the peer is gone.
func TestPeerNetworkThatANodeReachesLaterIsKeptAndReported(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	_, err := w.ipam.Update(w.Ctx, func(b ipam.State) (ipam.State, error) {
		b, _, err := b.Allocate(ipam.Request{ID: p.Cluster.ClusterID, Pod: netip.MustParsePrefix("10.244.64.0/18"), External: netip.MustParsePrefix("10.60.0.0/18")})
		return b, err
	})
	w.OK(err)
	had, _ := w.ipam.State().AllocationOf(p.Cluster.ClusterID)
	before := p.Endpoint()

	r := w.Report("n1", []string{"10.60.32.0/24"})
	p.WaitForReason(isthmus.ConditionReady, isthmus.ReasonOverlap)
	want := "ExternalCIDR of peer " + p.Cluster.ClusterID + ", 10.60.0.0/18 here, overlaps a network of node n1, 10.60.32.0/24"
	if m := p.Message(isthmus.ConditionReady); !strings.Contains(m, want) {
		t.Errorf("Ready says %q, want %q", m, want)
	}
	recorded := ""
	w.Until("an Event says so", func() bool {
		for len(w.events.Events) > 0 {
			recorded += <-w.events.Events + "\n"
		}
		return strings.Contains(recorded, "Warning Overlap Ready: ") && strings.Contains(recorded, want)
	})
	if now, _ := w.ipam.State().AllocationOf(p.Cluster.ClusterID); now != had {
		t.Errorf("the peer has %v, had %v", now, had)
	}
	if now := p.Endpoint(); now.Generation != before.Generation {
		t.Errorf("the TunnelEndpoint is %+v", now.Spec)
	}
	w.OK(w.API().Delete(w.Ctx, r))
	p.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConnected)
}
