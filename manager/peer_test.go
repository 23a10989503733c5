package manager

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
)

// peeringList is a reader of Peerings with the indexes of addIndexes.
type peeringList []isthmus.Peering

func (peeringList) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.ErrUnsupported
}

func (l peeringList) List(_ context.Context, into client.ObjectList, opts ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(opts)
	list := into.(*isthmus.PeeringList)
	for _, p := range l {
		id, byID := indexed(o, indexClusterID)
		ns, byNamespace := indexed(o, indexTenantNamespace)
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

func TestEveryWayToFindAPeerFindsTheSameOne(t *testing.T) {
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
		chosen := make(map[string]bool) // by name of the Peering
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
			conflict, err := peers.conflict(t.Context(), p)
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
