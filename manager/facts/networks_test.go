package facts

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestOutsideReturnsExactlyTheAddressesOutsideOfInner(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	prefix := func() netip.Prefix { // all in 10.0.0.0/24, so that many overlap
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

// A podReader is a reader of Pods. It returns them in pages, and counts the calls of List.
type podReader struct {
	client.Reader
	items []corev1.Pod
	lists int
}

func (p *podReader) List(_ context.Context, list client.ObjectList, options ...client.ListOption) error {
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

func TestPodCIDRThatContainsNoPodIsReported(t *testing.T) {
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
		reader := &podReader{items: tc.pods}
		own := &Keeper{Direct: reader}
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
