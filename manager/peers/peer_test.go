package peers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// peeringList is a client.Reader of Peerings, with the indexes of AddIndexes.
type peeringList []isthmus.Peering

func (peeringList) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.ErrUnsupported
}

func (l peeringList) List(_ context.Context, into client.ObjectList, opts ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(opts)
	list := into.(*isthmus.PeeringList)
	for _, p := range l {
		id, byID := indexed(o, IndexClusterID)
		ns, byNamespace := indexed(o, IndexTenantNamespace)
		if (!byID || p.Spec.Cluster.ClusterID == id) && (!byNamespace || p.Spec.TenantNamespace.Local == ns) {
			list.Items = append(list.Items, *p.DeepCopy())
		}
	}
	return nil
}

func indexed(o client.ListOptions, index string) (string, bool) {
	if o.FieldSelector == nil {
		return "", false
	}
	return o.FieldSelector.RequiresExactMatch(index)
}

func TestAllLookupsFindTheSamePeer(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const self = "id0"
	for range 300 {
		var all peeringList
		for i := range rng.IntN(12) {
			var p isthmus.Peering
			p.Name, p.UID = fmt.Sprintf("p%d", i), types.UID(fmt.Sprintf("%08x", rng.Uint32()))
			p.CreationTimestamp = metav1.NewTime(time.Unix(int64(rng.IntN(4)), 0))
			p.Spec.Cluster.ClusterID = fmt.Sprintf("id%d", rng.IntN(5))
			p.Spec.TenantNamespace.Local = fmt.Sprintf("ns%d", rng.IntN(5))
			all = append(all, p)
		}
		peers := Peers{Reader: all, Self: self}
		list, err := peers.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		chosen := make(map[string]bool) // keyed by the name of the Peering
		ids, namespaces := make(map[string]bool), make(map[string]bool)
		for _, p := range list {
			id, ns := p.Cluster.ClusterID, p.LocalNamespace
			if ids[id] || namespaces[ns] || id == self {
				t.Fatalf("%s in %s is not alone, or is this cluster", id, ns)
			}
			ids[id], namespaces[ns], chosen[p.Owner.GetName()] = true, true, true
			byID, err := peers.ByID(t.Context(), id)
			if err != nil || byID.Owner.GetName() != p.Owner.GetName() {
				t.Fatalf("by ID %s: %v, %v; want %s", id, byID.Owner, err, p.Owner.GetName())
			}
			byNamespace, err := peers.ByNamespace(t.Context(), ns)
			if err != nil || byNamespace.Owner.GetName() != p.Owner.GetName() {
				t.Fatalf("by namespace %s: %v, %v; want %s", ns, byNamespace.Owner, err, p.Owner.GetName())
			}
		}
		for i := range all {
			p := &all[i]
			conflict, err := peers.Conflict(t.Context(), p)
			if err != nil || (conflict == "") != chosen[p.Name] {
				t.Fatalf("%s is chosen: %t, and its conflict is %q (%v)", p.Name, chosen[p.Name], conflict, err)
			}
			if peer, err := peers.ByID(t.Context(), p.Spec.Cluster.ClusterID); err == nil && !chosen[peer.Owner.GetName()] {
				t.Fatalf("by ID %s: %s, which is not in the list", p.Spec.Cluster.ClusterID, peer.Owner.GetName())
			} else if err != nil && !errors.Is(err, ErrNoPeer) {
				t.Fatal(err)
			}
		}
	}
}

func TestOnlyPeeringsThatShareServicesAreDrained(t *testing.T) {
	now := metav1.Now()
	is := func(want bool, change func(*isthmus.Peering)) {
		t.Helper()
		p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now, Annotations: map[string]string{}}}
		p.Spec.Services.Import = []isthmus.ServiceNamespace{"prod"}
		change(p)
		if peer := From(p); peer.Draining != want || peer.Leaving == p.DeletionTimestamp.IsZero() || peer.Begun() && peer.Leaving {
			t.Errorf("%+v: draining %v, leaving %v; want %v", p, peer.Draining, peer.Leaving, want)
		}
	}
	is(true, func(*isthmus.Peering) {})
	is(false, func(p *isthmus.Peering) { p.DeletionTimestamp = nil })
	is(false, func(p *isthmus.Peering) { p.Spec.Services = isthmus.Services{} })
	is(false, func(p *isthmus.Peering) { p.Annotations[isthmus.AnnotationDrained] = "true" })
	is(false, func(p *isthmus.Peering) { p.Annotations[isthmus.AnnotationForce] = "true" })
}

func TestTunnelStaysUntilOurNetworkConfigAtThePeerIsDeleted(t *testing.T) {
	left := time.Unix(1000, 0)
	held := &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Finalizers: []string{v1alpha1.FinalizerReplicator}}}
	for _, c := range []struct {
		name     string
		peer     Peer
		original *v1alpha1.NetworkConfig
		want     time.Duration
	}{
		{"still there", Peer{InBand: true, Leaving: true, Left: left}, held, InBandPatience - 10*time.Second},
		{"the peer refuses for ever", Peer{InBand: true, Leaving: true, Left: left.Add(-InBandPatience)}, held, 0},
		{"the API server's clock is ahead", Peer{InBand: true, Leaving: true, Left: left.Add(time.Hour)}, held, InBandPatience},
		{"deleted", Peer{InBand: true, Leaving: true, Left: left}, &v1alpha1.NetworkConfig{}, 0},
		{"never made", Peer{InBand: true, Leaving: true, Left: left}, nil, 0},
		{"not waited for", Peer{InBand: true, Leaving: true, Left: left, Forced: true}, held, 0},
		{"not through the tunnel", Peer{Leaving: true, Left: left}, held, 0},
		{"not leaving", Peer{InBand: true}, held, 0},
	} {
		if got := c.peer.NeedsTunnel(c.original, left.Add(10*time.Second)); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
