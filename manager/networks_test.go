package manager

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/manager/managertest"
)

func TestNetworksOutsideOfOneHaveEveryAddressOutsideOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	prefix := func() netip.Prefix { // in 10.0.0.0/24, so that they meet
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.Uint32())}), 24+rng.IntN(9)).Masked()
	}
	in := func(all []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for range 2000 {
		all, inner := []netip.Prefix{prefix(), prefix()}, prefix()
		rest := outside(all, inner)
		for i := range 256 {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
			if want := in(all, a) && !inner.Contains(a); in(rest, a) != want {
				t.Fatalf("%v without %v: %v has %v: %v", all, inner, rest, a, !want)
			}
		}
	}
	six := []netip.Prefix{netip.MustParsePrefix("fd00:10::/64")}
	if got := outside(six, netip.MustParsePrefix("10.96.0.0/12")); !slices.Equal(got, six) {
		t.Errorf("of another family: %v", got)
	}
}

func TestServicesOfALaterServiceCIDRAreReserved(t *testing.T) {
	w := newWorld(t, false)
	if !managertest.ServesServiceCIDRs {
		t.Skip("this API server has no ServiceCIDRs")
	}
	serviceCIDR := func(name, cidr string) *networkingv1.ServiceCIDR {
		return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: w.Prefix + name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{cidr}}}
	}
	inside, later := serviceCIDR("-inside", "10.111.0.0/16"), serviceCIDR("-later", "172.29.0.0/24") // ours is 10.96.0.0/12
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

// A pods is a reader that has Pods, of which it gives a page at a time, and counts how often they are listed.
type pods struct {
	client.Reader
	items []corev1.Pod
	lists int
}

func (p *pods) List(_ context.Context, list client.ObjectList, options ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(options)
	from, _ := strconv.Atoi(o.Continue)
	to := min(from+int(o.Limit), len(p.items))
	page := list.(*corev1.PodList)
	if page.Items = p.items[from:to]; to < len(p.items) {
		page.Continue = strconv.Itoa(to)
	}
	p.lists++
	return nil
}

func TestPodCIDRInWhichNothingIsCountsAsMissing(t *testing.T) {
	node := func(podCIDRs ...string) corev1.Node {
		return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n" + podCIDRs[0]}, Spec: corev1.NodeSpec{PodCIDRs: podCIDRs}}
	}
	pod := func(ip string) corev1.Pod { return corev1.Pod{Status: corev1.PodStatus{PodIP: ip}} }
	for name, tc := range map[string]struct {
		nodes   []corev1.Node
		pods    []corev1.Pod
		missing string
	}{
		"one node inside":                   {[]corev1.Node{node("10.246.1.0/24"), node("10.244.1.0/24")}, nil, ""},
		"a node with more than all":         {[]corev1.Node{node("10.244.0.0/15")}, nil, ""},
		"no node has a podCIDR":             {[]corev1.Node{node("")}, []corev1.Pod{pod("10.1.2.3")}, ""},
		"another family":                    {[]corev1.Node{node("fd00::/64")}, nil, ""},
		"all outside, and no Pod":           {[]corev1.Node{node("fd00::/64", "10.246.1.0/24"), node("10.247.1.0/24")}, nil, "such as 10.246.1.0/24 of node nfd00::/64"},
		"all outside, Pods as well":         {[]corev1.Node{node("10.246.1.0/24")}, []corev1.Pod{pod("10.246.1.7"), pod("")}, "correct --pod-cidr"},
		"a CNI that gives addresses itself": {[]corev1.Node{node("10.246.1.0/24")}, []corev1.Pod{pod("10.1.1.1"), pod("10.244.3.4")}, ""},
		"Pods of hundreds of others first":  {[]corev1.Node{node("10.246.1.0/24")}, append(slices.Repeat([]corev1.Pod{pod("10.1.1.1")}, 1200), pod("10.244.3.4")), ""},
		"hundreds of Pods, all outside":     {[]corev1.Node{node("10.246.1.0/24")}, slices.Repeat([]corev1.Pod{pod("10.1.1.1")}, 1000), "correct --pod-cidr"},
	} {
		reader := &pods{items: tc.pods}
		own := &FactsKeeper{Direct: reader}
		for range 2 {
			f := Facts{PodCIDR: netip.MustParsePrefix("10.244.0.0/16")}
			if err := own.checkPodCIDR(t.Context(), &f, tc.nodes); err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(f.Missing, "\n"); (got == "") != (tc.missing == "") || !strings.Contains(got, tc.missing) {
				t.Errorf("%s: missing %q", name, got)
			}
		}
		if tc.missing == "" && reader.lists > 1+len(tc.pods)/500 {
			t.Errorf("%s: Pods are listed again after one was found", name)
		}
	}
}

func TestAKindIsGoneWhenSeveralLooksInARowMissIt(t *testing.T) {
	with, without := present{foreignClusters: true, serviceCIDRs: true}, present{serviceCIDRs: true}
	for name, tc := range map[string]struct {
		had   present
		looks []present // the last one again and again
		after int       // looks
	}{
		"gone for good":       {with, []present{without}, looksForAbsence},
		"back in between":     {with, []present{without, without, without, with, without}, 4 + looksForAbsence},
		"an error in between": {with, []present{without, {}, without}, 1 + looksForAbsence},
		"there at last":       {without, []present{without, with}, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			n, began := 0, time.Now()
			changed := false
			watchKinds(t.Context(), func(context.Context) (present, error) {
				p := tc.looks[min(n, len(tc.looks)-1)]
				if n++; p == (present{}) {
					return p, errors.New("no answer")
				}
				return p, nil
			}, tc.had, time.Second, func() { changed = true })
			if looked := int(time.Since(began) / time.Second); !changed || looked != tc.after {
				t.Errorf("%s: after %d looks, want %d", name, looked, tc.after)
			}
		})
	}
}

// owned is a reader that has one TunnelEndpoint.
type owned struct {
	client.Reader
	by string
}

func (o owned) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*metav1.PartialObjectMetadataList).Items = []metav1.PartialObjectMetadata{{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "te",
		OwnerReferences: []metav1.OwnerReference{{Kind: "NetworkConfig"}, {Kind: o.by}}}}}
	return nil
}

func TestAManagerThatStartsDoubtsThatForeignClustersWithTunnelsAreGone(t *testing.T) {
	for n := 1; n <= looksForAbsence; n++ {
		if err := doubtAbsence(t.Context(), owned{by: "ForeignCluster"}, n); (err == nil) != (n == looksForAbsence) {
			t.Errorf("look %d: %v", n, err)
		}
	}
	if err := doubtAbsence(t.Context(), owned{by: "Peering"}, 1); err != nil {
		t.Errorf("no ForeignCluster has a tunnel: %v", err)
	}
}
