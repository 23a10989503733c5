package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ours "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/install"
	own "github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Whatever somebody edits in the IpamStorage and the NetworkAllocation, no packet may leave in the
// clear, as the sniffer checks. The edits also happen while no manager runs and agents are killed.
// Nodes must continue to work, and the manager must restore the IPAM state. Only un-peering may
// remove the peer from the IPAM state.
func TestIPAMStateEditsLeakNoPlaintext(t *testing.T) {
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{inPods(clusterSpec("10.244.0.0/16", 2)), inPods(clusterSpec("10.244.64.0/19", 2))}})
	a, b := f.Clusters[0], f.Clusters[1]
	ipamStorage := func() *v1alpha1.IpamStorage {
		t.Helper()
		var list v1alpha1.IpamStorageList
		must(t, a.Client.List(t.Context(), &list))
		if len(list.Items) != 1 {
			t.Fatalf("%d IpamStorage", len(list.Items))
		}
		return &list.Items[0]
	}
	eventually(t, "the first IpamStorage", func() error {
		var list v1alpha1.IpamStorageList
		if err := a.Client.List(t.Context(), &list); err != nil || len(list.Items) == 0 {
			return fmt.Errorf("%d of them (%w)", len(list.Items), err)
		}
		return nil
	})
	before := ipamStorage()
	peer(t, f, a, b)
	podsToPods(t, a, b)
	from, to := podOn(t, a, 1), seen(t, a, b, podOn(t, b, 0).Addr)
	granted := ipamStorage()
	id := ""
	for id = range granted.Spec.ClusterSubnets {
	}
	allocation := func() *ours.NetworkAllocation {
		t.Helper()
		o := &ours.NetworkAllocation{}
		must(t, a.Client.Get(t.Context(), client.ObjectKey{Name: id}, o))
		return o
	}
	allocated := allocation()
	change := func(change func(*ours.NetworkAllocationSpec)) func() {
		return func() {
			t.Helper()
			eventually(t, "an edit", func() error { o := allocation(); change(&o.Spec); return a.Client.Update(t.Context(), o) })
		}
	}
	edit := func(change func(*v1alpha1.IpamStorage)) func() {
		return func() {
			t.Helper()
			eventually(t, "an edit", func() error { o := ipamStorage(); change(o); return a.Client.Update(t.Context(), o) })
		}
	}
	for _, e := range []struct {
		name string
		do   func()
	}{
		{"an entry removed", edit(func(o *v1alpha1.IpamStorage) { delete(o.Spec.ClusterSubnets, id) })},
		{"another network in its place", edit(func(o *v1alpha1.IpamStorage) {
			o.Spec.ClusterSubnets[id] = v1alpha1.Subnets{RemotePodCIDR: "10.77.0.0/19", RemoteExternalCIDR: "10.78.0.0/19"}
		})},
		{"emptied", edit(func(o *v1alpha1.IpamStorage) {
			o.Spec = v1alpha1.IpamStorageSpec{Prefixes: map[string][]byte{}, Pools: []string{}, ReservedSubnets: []string{},
				ClusterSubnets: map[string]v1alpha1.Subnets{}, EndpointMappings: map[string]v1alpha1.EndpointMapping{}, NatMappingsConfigured: map[string]v1alpha1.ConfiguredCluster{}}
		})},
		{"the state from before the peering", edit(func(o *v1alpha1.IpamStorage) { o.Spec = before.Spec })},
		{"deleted", func() { must(t, a.Client.Delete(t.Context(), ipamStorage())) }},
		{"deleted and recreated with an older state", func() {
			must(t, a.Client.Delete(t.Context(), ipamStorage()))
			o := before.DeepCopy()
			o.ObjectMeta = metav1.ObjectMeta{Name: o.Name, Labels: o.Labels}
			must(t, a.Client.Create(t.Context(), o))
		}},
		{"a NetworkAllocation without networks", change(func(s *ours.NetworkAllocationSpec) { s.Networks = nil })},
		{"an older NetworkAllocation that releases networks", change(func(s *ours.NetworkAllocationSpec) {
			s.Networks, s.Revision = nil, 1
			for _, n := range allocated.Spec.Networks {
				s.Freed = append(s.Freed, ours.FreedNetwork{Network: n, Revision: 1})
			}
		})},
		{"a NetworkAllocation deleted", func() { must(t, a.Client.Delete(t.Context(), allocation())) }},
		{"all deleted", func() {
			must(t, a.Client.DeleteAllOf(t.Context(), &ours.NetworkAllocation{}))
			must(t, a.Client.Delete(t.Context(), ipamStorage()))
		}},
	} {
		for _, running := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, the manager runs: %v", e.name, running), func(t *testing.T) {
				during := startTraffic(t, a, b)
				if !running {
					must(t, a.Kill(fleet.Manager))
				}
				e.do()
				if !running {
					must(t, a.Kill(fleet.Agent(1)))
					must(t, a.Start(t.Context(), fleet.Agent(1)))
					if _, err := firstPing(t.Context(), from.Host, func() (netip.Addr, error) { return to, nil }); err != nil {
						t.Errorf("while the IPAM state is wrong: %v", err)
					}
					must(t, a.Start(t.Context(), fleet.Manager))
				}
				eventually(t, "the former IPAM state", func() error {
					var list v1alpha1.IpamStorageList
					must(t, a.Client.List(t.Context(), &list))
					if len(list.Items) != 1 || list.Items[0].Spec.ClusterSubnets[id] != granted.Spec.ClusterSubnets[id] {
						return fmt.Errorf("%+v", list.Items)
					}
					o := &ours.NetworkAllocation{}
					if err := a.Client.Get(t.Context(), client.ObjectKey{Name: id}, o); err != nil || !slices.Equal(o.Spec.Networks, allocated.Spec.Networks) {
						return fmt.Errorf("%+v (%w)", o.Spec, err)
					}
					return nil
				})
				waitReady(t, a, b)
				during.endWithoutLoss(t)
			})
		}
	}
	if leaks := f.Sniffer.Report(); leaks.Leaked > 0 {
		t.Errorf("in the clear: %v", leaks)
	}

	// After un-peering, packets of pods to the former peer must not leave in the clear. Nodes
	// refuse the peer's networks until the manager releases these.
	allocated = allocation()
	whilePinging(t, from.Host, to, func() { isthmus(t, f, "unpeer", "--context", a.Name, "--remote-context", b.Name) })
	if held, o := ipamStorage(), allocation(); held.Spec.ClusterSubnets[id].RemotePodCIDR != granted.Spec.ClusterSubnets[id].RemotePodCIDR ||
		o.Spec.Revision != allocated.Spec.Revision || !slices.Equal(o.Spec.Networks, allocated.Spec.Networks) {
		t.Errorf("after un-peering: %+v, %+v", held.Spec.ClusterSubnets, o.Spec)
	}
	refusing := func(do func(func() error) error) (left []netlink.Route, err error) {
		err = do(func() (err error) {
			left, err = netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: own.RefuseTable}, netlink.RT_FILTER_TABLE)
			return err
		})
		return left, err
	}
	refused := func(after string) {
		t.Helper()
		for _, n := range a.Nodes {
			if left, err := refusing(n.Do); err != nil || len(left) == 0 {
				t.Errorf("%s refuses nothing after %s (%v)", n.Name, after, err)
			}
		}
		if leaks := f.Sniffer.Report(); leaks.Leaked > 0 {
			t.Errorf("in the clear after %s: %v", after, leaks)
		}
	}
	refused("un-peering")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := firstPing(ctx, from.Host, func() (netip.Addr, error) { return to, nil }); err == nil {
		t.Error("the former peer answers")
	}
	endHolds(t, a)
	for _, n := range a.Nodes {
		eventually(t, n.Name+" that refuses nothing any more", func() error {
			left, err := refusing(n.Do)
			if err == nil && len(left) > 0 {
				err = fmt.Errorf("%v", left)
			}
			return err
		})
	}
	eventually(t, "the IPAM state without it", func() error { // nodes follow the NetworkAllocation, which is checked below
		if o := ipamStorage(); len(o.Spec.ClusterSubnets) > 0 {
			return fmt.Errorf("%+v", o.Spec.ClusterSubnets)
		}
		return nil
	})
	if o := allocation(); len(o.Spec.Networks) > 0 || o.Spec.Revision <= allocated.Spec.Revision {
		t.Errorf("released: %+v", o.Spec)
	}

	// Deleting the CRD of Peerings must un-peer, too.
	peer(t, f, a, b)
	podsToPods(t, a, b)
	whilePinging(t, from.Host, seen(t, a, b, podOn(t, b, 0).Addr), func() {
		crd := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "peerings." + ours.GroupVersion.Group}}
		crd.SetGroupVersionKind(install.DefinitionKind)
		must(t, a.Client.Delete(t.Context(), crd))
		eventually(t, "no TunnelEndpoint", func() error {
			var list v1alpha1.TunnelEndpointList
			if err := a.Client.List(t.Context(), &list); err != nil || len(list.Items) > 0 {
				return fmt.Errorf("%d of them (%w)", len(list.Items), err)
			}
			return nil
		})
	})
	refused("the deletion of the Peerings' definition")
}

// whilePinging calls do while a pod sends pings to an address, and continues the pings for two
// seconds.
func whilePinging(t *testing.T, from *lab.Host, to netip.Addr, do func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var pinging sync.WaitGroup
	pinging.Go(func() {
		for ctx.Err() == nil {
			_, _ = from.PingWith(ctx, to, lab.PingOptions{Wait: 50 * time.Millisecond})
			time.Sleep(20 * time.Millisecond)
		}
	})
	do()
	time.Sleep(2 * time.Second)
	cancel()
	pinging.Wait()
}
