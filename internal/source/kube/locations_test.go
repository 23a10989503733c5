package kube

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/fabric"
)

// After any sequence of added, changed and deleted nodes, site returns the addresses of all
// present nodes. A Site returned earlier does not change. Every change of the result is
// reported. The old version in an event, which may be wrong, does not matter.
func TestSiteHasTheAddressesOfAllNodes(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	texts := []string{"192.0.2.1", "192.0.2.2", "::ffff:192.0.2.1", "fd00::1", "fe80::1%eth0", "a-host-name", "198.51.100.7"}
	var p locations
	nodes := map[string]*corev1.Node{}
	was, given, copied := p.site(), p.site(), p.site()
	for step := range 3000 {
		name := fmt.Sprint("n", rng.IntN(4))
		before, after := nodes[name], (*corev1.Node)(nil)
		if before != nil && rng.IntN(3) == 0 { // the cache has missed a version
			before = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
				Addresses: []corev1.NodeAddress{{Type: corev1.NodeExternalIP, Address: texts[rng.IntN(len(texts))]}}}}
		}
		if rng.IntN(3) > 0 {
			after = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
			for range rng.IntN(3) {
				after.Status.Addresses = append(after.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: texts[rng.IntN(len(texts))]})
			}
		}
		var changed bool
		switch {
		case before == nil && after == nil:
			continue
		case after == nil:
			changed = p.set(before, nil)
			delete(nodes, name)
		case before == nil:
			changed = p.set(nil, after)
			nodes[name] = after
		default:
			changed = p.set(before, after)
			nodes[name] = after
		}
		var addrs []netip.Addr
		for _, n := range nodes {
			addrs = append(addrs, nodeAddrs(n)...)
		}
		want := nodesSite(addrs)
		if !changed && !reflect.DeepEqual(want, was) {
			t.Fatalf("step %d: a change was not reported: %v, now %v", step, was, want)
		}
		if was = want; rng.IntN(2) == 0 {
			continue
		}
		got := p.site()
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("step %d: %v; want %v", step, got, want)
		}
		if !reflect.DeepEqual(given, copied) {
			t.Fatalf("step %d: what was told has changed to %v", step, given)
		}
		given, copied = got, fabric.Site{Addrs: maps.Clone(got.Addrs), Relays: maps.Clone(got.Relays)}
	}
}

// A host-network gateway tracks only the addresses of nodes. It ignores their other changes,
// and knows no owners of addresses.
func TestOnlyAPodGatewayTracksAddressOwners(t *testing.T) {
	for _, self := range []string{"", "n1"} {
		var p locations
		p.known.Self = self
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}}}
		if !p.set(nil, n) || len(p.site().Addrs) != 1 {
			t.Errorf("%q: a node that came was not reported, or is nowhere: %v", self, p.site())
		}
		other := n.DeepCopy()
		other.Spec.PodCIDRs = []string{"10.244.0.0/24"}
		if p.set(n, other) != (self != "") {
			t.Errorf("%q: of a change of PodCIDRs it thinks otherwise", self)
		}
		if named := p.owner(netip.MustParseAddr("192.0.2.1")) != (fabric.Owner{}); named != (self != "") {
			t.Errorf("%q: the node's address has a name: %v", self, named)
		}
	}
}
