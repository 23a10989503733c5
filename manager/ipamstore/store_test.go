package ipamstore

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }

var ours = ipam.Config{PodCIDR: pfx("10.244.0.0/16"), ServiceCIDR: pfx("10.96.0.0/12"), ExternalCIDR: pfx("10.245.0.0/16"),
	Nodes: []netip.Addr{netip.MustParseAddr("10.240.0.9")}}

func claim(id, pod, external string) ipam.Request {
	return ipam.Request{ID: id, Pod: pfx(pod), External: pfx(external)}
}

// A harness is a Store with its log, its events and its requests.
type harness struct {
	*Store
	t        *testing.T
	mu       sync.Mutex
	log      bytes.Buffer
	requests []string // HTTP methods of the requests
	sizes    []int    // lengths of the requests' bodies
	answers  []int64  // lengths of the responses' bodies
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (h *harness) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.log.Write(p)
}

func (h *harness) logged() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.log.String()
}

// sent returns the methods of all requests since the last call, and the lengths of request and
// response bodies.
func (h *harness) sent() ([]string, []int, []int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	methods, sizes, answers := h.requests, h.sizes, h.answers
	h.requests, h.sizes, h.answers = nil, nil, nil
	return methods, sizes, answers
}

// newStore returns a Store without shared memory, like that of another process.
func newStore(t *testing.T) *harness {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	h := &harness{t: t}
	config := rest.CopyConfig(testConfig)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			size := 0
			if r.Body != nil {
				body, err := io.ReadAll(r.Body)
				if err != nil {
					return nil, err
				}
				size, r.Body = len(body), io.NopCloser(bytes.NewReader(body))
			}
			answer, err := next.RoundTrip(r)
			var length int64
			if err == nil {
				body, err := io.ReadAll(answer.Body)
				if err != nil {
					return nil, err
				}
				answer.Body.Close()
				length, answer.Body = int64(len(body)), io.NopCloser(bytes.NewReader(body))
			}
			if strings.Contains(r.URL.Path, "/ipamstorages") {
				h.mu.Lock()
				defer h.mu.Unlock()
				h.requests, h.sizes, h.answers = append(h.requests, r.Method), append(h.sizes, size), append(h.answers, length)
			}
			return answer, err
		})
	})
	c, err := client.NewWithWatch(config, client.Options{Scheme: testScheme})
	if err != nil {
		t.Fatal(err)
	}
	h.Store = New(c, c, "us", slog.New(slog.NewTextHandler(h, nil)))
	return h
}

func loaded(t *testing.T) *harness {
	t.Helper()
	h := newStore(t)
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	return h
}

// fresh returns a Store in a cluster without any IPAM state.
func fresh(t *testing.T) *harness {
	t.Helper()
	h := newStore(t)
	clean := func(ctx context.Context) {
		for _, kind := range []client.Object{&v1alpha1.IpamStorage{}, &v1alpha1.NatMapping{}, &isthmus.NetworkAllocation{}} {
			if err := testClient.DeleteAllOf(ctx, kind); err != nil {
				t.Error(err)
			}
		}
	}
	clean(t.Context())
	t.Cleanup(func() { clean(context.Background()) })
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.update(func(b ipam.State) ipam.State { b, _ = b.Configure(ours); return b })
	return h
}

func (h *harness) update(f func(ipam.State) ipam.State) ipam.State {
	h.t.Helper()
	b, err := h.Update(h.t.Context(), func(b ipam.State) (ipam.State, error) { return f(b), nil })
	if err != nil {
		h.t.Fatal(err)
	}
	return b
}

func (h *harness) allocate(c ipam.Request) (g ipam.Allocation) {
	h.t.Helper()
	_, err := h.Update(h.t.Context(), func(b ipam.State) (next ipam.State, err error) {
		next, g, err = b.Allocate(c)
		return next, err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return g
}

func (h *harness) answered(id, pod, external string) {
	h.t.Helper()
	h.update(func(b ipam.State) ipam.State { return b.Answered(id, pfx(pod), pfx(external)) })
}

func (h *harness) mapEndpoint(id, ip string) (seen netip.Addr) {
	h.t.Helper()
	_, err := h.Update(h.t.Context(), func(b ipam.State) (next ipam.State, err error) {
		next, seen, err = b.MapEndpoint(id, netip.MustParseAddr(ip))
		return next, err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return seen
}

// object returns the only IpamStorage.
func object(t *testing.T) *v1alpha1.IpamStorage {
	t.Helper()
	var list v1alpha1.IpamStorageList
	if err := testClient.List(t.Context(), &list); err != nil || len(list.Items) != 1 {
		t.Fatalf("%d IpamStorages, %v", len(list.Items), err)
	}
	return &list.Items[0]
}

// agree checks that the IpamStorage equals the State, and returns it.
func (h *harness) agree() *v1alpha1.IpamStorage {
	h.t.Helper()
	o := object(h.t)
	if got, want := o.Spec, h.State().Spec(); !reflect.DeepEqual(got, want) {
		h.t.Errorf("the object says\n%+v\nthe State\n%+v", got, want)
	}
	return o
}

// versions returns the resourceVersions of the NetworkAllocations.
func versions(t *testing.T) (all []string) {
	t.Helper()
	var list isthmus.NetworkAllocationList
	if err := testClient.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		all = append(all, list.Items[i].Name+" "+list.Items[i].ResourceVersion)
	}
	return all
}

func edit(t *testing.T, change func(*v1alpha1.IpamStorage)) {
	t.Helper()
	o := object(t)
	change(o)
	if err := testClient.Update(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func TestIpamStorageHasLiqosNameAndLabel(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("bbbbbbbb-2222", "10.244.0.0/16", "10.245.0.0/16"))
	h.answered("bbbbbbbb-2222", "10.246.0.0/16", "10.247.0.0/16")
	h.mapEndpoint("bbbbbbbb-2222", "198.51.100.7")
	o := h.agree()
	if !strings.HasPrefix(o.Name, "ipamstorage-") || o.Labels["net.liqo.io/ipamstorage"] != "true" {
		t.Errorf("name %s, labels %v", o.Name, o.Labels)
	}
	text, err := yaml.Marshal(o.Spec)
	if err != nil || len(o.Spec.Prefixes) > 0 {
		t.Error(err, o.Spec.Prefixes)
	}
	t.Logf("\n%s", text)
}

func TestRestartReadsTheWholeStateAndChangesNoObject(t *testing.T) {
	h := fresh(t)
	g := h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	h.mapEndpoint("b", "198.51.100.7")
	h.agree()
	before := versions(t)

	again := loaded(t)
	if got := again.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16")); got != g {
		t.Errorf("another network: %v, was %v", got, g)
	}
	again.update(func(b ipam.State) ipam.State { b, _ = b.Configure(ours); return b })
	if got := again.mapEndpoint("b", "198.51.100.7"); got != netip.MustParseAddr("10.247.0.2") {
		t.Errorf("another address: %v", got)
	}
	if err := again.Refresh(t.Context()); err != nil {
		t.Error(err)
	}
	if methods, sizes, _ := again.sent(); !slices.Equal(methods, []string{"GET", "PATCH", "GET"}) || sizes[1] > 300 {
		t.Errorf("a restart sends %v of %v octets, and not only that it takes over", methods, sizes)
	}
	if again.agree(); !slices.Equal(versions(t), before) {
		t.Errorf("a restart writes: %v; were %v", versions(t), before)
	}
}

// request maps an endpoint and records caller as its requester.
func (h *harness) request(id, ip, caller, kind string) {
	h.t.Helper()
	if _, err := h.Update(h.t.Context(), func(b ipam.State) (ipam.State, error) {
		b, _, err := b.MapEndpoint(id, netip.MustParseAddr(ip))
		if err != nil {
			return b, err
		}
		return b.AddRequester(id, netip.MustParseAddr(ip), caller, kind)
	}); err != nil {
		h.t.Error(err)
	}
}

func TestRequestersOfAMappingSurviveARestart(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	h.request("b", "198.51.100.7", "certificate CN=one", "pod")
	h.request("b", "198.51.100.7", "certificate CN=another", "")
	want := []isthmus.MappedEndpoint{{IP: "198.51.100.7", Address: "10.245.0.2", Requesters: []string{"certificate CN=another", "certificate CN=one"}, Target: "pod"}}
	if got := allocationOf(t, "b").Spec.Endpoints; !reflect.DeepEqual(got, want) {
		t.Errorf("the object says %+v", got)
	}

	h.sent()
	again := loaded(t)
	if got := again.State().Allocation("b").Endpoints; !reflect.DeepEqual(got, want) {
		t.Errorf("after a restart: %+v", got)
	}
	if methods, _, _ := again.sent(); !slices.Equal(methods, []string{"GET", "PATCH"}) {
		t.Errorf("a restart sends %v", methods)
	}
	// Both processes write, and each keeps the requesters that the other one recorded.
	h.request("b", "198.51.100.8", "certificate CN=one", "")
	again.request("b", "198.51.100.9", "certificate CN=another", "")
	if by := again.State().Requesters("b", netip.MustParseAddr("198.51.100.8")); !slices.Equal(by, []string{"certificate CN=one"}) {
		t.Errorf("what the other process noted: %v", by)
	}
	again.update(func(b ipam.State) ipam.State { return b.Release("b") })
	if got := allocationOf(t, "b").Spec.Endpoints; len(got) > 0 {
		t.Errorf("nothing is mapped any more, but noted: %+v", got)
	}
}

func TestAnUpdateIsOneSmallPatchForAnyNumberOfPeers(t *testing.T) {
	h := fresh(t)
	h.update(func(b ipam.State) ipam.State {
		for i := range 500 {
			b, _, _ = b.Allocate(claim(fmt.Sprint("peer-", i), "10.244.0.0/20", "10.245.0.0/20"))
			b = b.Answered(fmt.Sprint("peer-", i), ours.PodCIDR, b.Own().ExternalCIDR)
		}
		return b
	})
	h.sent()
	for name, f := range map[string]func(ipam.State) (ipam.State, error){
		"an allocation": func(b ipam.State) (ipam.State, error) {
			b, _, err := b.Allocate(claim("one-more", "10.244.0.0/20", "10.245.0.0/20"))
			return b, err
		},
		"a release": func(b ipam.State) (ipam.State, error) { return b.Release("peer-77"), nil },
		"an answer": func(b ipam.State) (ipam.State, error) {
			return b.Answered("peer-78", pfx("10.1.0.0/16"), pfx("10.2.0.0/16")), nil
		},
		"an endpoint": func(b ipam.State) (ipam.State, error) {
			b, _, err := b.MapEndpoint("peer-79", netip.MustParseAddr("198.51.100.7"))
			return b, err
		},
	} {
		if _, err := h.Update(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		methods, sizes, answers := h.sent()
		if !slices.Equal(methods, []string{"PATCH"}) || sizes[0] > 600 || answers[0] > 2000 {
			t.Errorf("%s: %v with %v bytes, answered by %v", name, methods, sizes, answers)
		}
		t.Logf("%s: %v bytes, answered by %v", name, sizes, answers)
	}
	h.agree()
	h.sent()
	h.update(func(b ipam.State) ipam.State { b, _ = b.Configure(ours); return b })
	h.update(func(b ipam.State) ipam.State { return b.Release("nobody") })
	if methods, _, _ := h.sent(); len(methods) > 0 {
		t.Errorf("nothing changed, but %v", methods)
	}
}

func TestConcurrentUpdatesAreWrittenTogether(t *testing.T) {
	h := fresh(t)
	h.sent()
	const number = 40
	refused, cancelledIndex := errors.New("no"), number-1
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	errs, allocations := make([]error, number), make([]ipam.Allocation, number)
	var group sync.WaitGroup
	h.Store.mu.Lock()
	for i := range number {
		group.Go(func() {
			ctx := t.Context()
			if i == cancelledIndex {
				ctx = cancelled
			}
			_, errs[i] = h.Update(ctx, func(b ipam.State) (_ ipam.State, err error) {
				if i == 0 {
					return b.Release("nobody"), refused
				}
				b, allocations[i], err = b.Allocate(claim(fmt.Sprint("peer-", i), "10.244.0.0/20", "10.245.0.0/20"))
				return b, err
			})
		})
	}
	for waiting := 0; waiting < number; time.Sleep(time.Millisecond) {
		h.queueMu.Lock()
		waiting = len(h.queue)
		h.queueMu.Unlock()
	}
	h.Store.mu.Unlock()
	group.Wait()
	for i, err := range errs {
		have, ok := h.State().AllocationOf(fmt.Sprint("peer-", i))
		switch {
		case i == 0 && (err != refused || ok): //nolint:errorlint // it has to be that very error
			t.Errorf("the update that has an error returned %v; the State has %v", err, have)
		case i == cancelledIndex: // its caller gave up; another caller may have written its update
		case i > 0 && (err != nil || have != allocations[i]):
			t.Errorf("peer-%d: %v, was told %v, the State has %v", i, err, allocations[i], have)
		}
	}
	if methods, _, _ := h.sent(); len(methods) > 2 {
		t.Errorf("%d updates at once were sent as %v", number, methods)
	}
	if len(h.queue) > 0 {
		t.Errorf("%d updates are still waiting", len(h.queue))
	}
	h.agree()
}

func TestFailedUpdateWritesNothing(t *testing.T) {
	h := fresh(t)
	h.sent()
	want := errors.New("no")
	before := h.State()
	got, err := h.Update(t.Context(), func(b ipam.State) (ipam.State, error) { return b.Release("b"), want })
	if err != want || len(got.Changed(before)) > 0 || len(h.State().Changed(before)) > 0 { //nolint:errorlint // it has to be that very error
		t.Errorf("got %v", err)
	}
	if methods, _, _ := h.sent(); len(methods) > 0 {
		t.Errorf("sent %v", methods)
	}
	if _, err := newStore(t).Update(t.Context(), nil); !errors.Is(err, errNotLoaded) {
		t.Errorf("before Load: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.Update(ctx, func(b ipam.State) (ipam.State, error) {
		return b.Answered("b", ours.PodCIDR, b.Own().ExternalCIDR), nil
	}); err == nil {
		t.Error("a write that was never made is taken for done")
	}
	if len(h.State().Peers()) > 0 {
		t.Error("the State has what the object does not")
	}
}

func TestConcurrentStoresLoseNoUpdateAndAllocateNoNetworkTwice(t *testing.T) {
	a := fresh(t)
	b := loaded(t)
	const each = 25
	var wg sync.WaitGroup
	for i, h := range []*harness{a, b, a, b} {
		wg.Go(func() {
			for j := range each {
				id := fmt.Sprintf("peer-%d-%d", i, j)
				_, err := h.Update(t.Context(), func(b ipam.State) (ipam.State, error) {
					b, _, err := b.Allocate(claim(id, "10.244.0.0/20", "10.245.0.0/24"))
					if err != nil {
						return b, err
					}
					b, _, err = b.Answered(id, ours.PodCIDR, b.Own().ExternalCIDR).MapEndpoint(id, netip.AddrFrom4([4]byte{198, 18, byte(i), byte(j)}))
					return b, err
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	o := object(t)
	if n := len(o.Spec.ClusterSubnets); n != 4*each {
		t.Errorf("%d peers, want %d", n, 4*each)
	}
	if n := len(o.Spec.EndpointMappings); n != 4*each+1 {
		t.Errorf("%d endpoints, want %d", n, 4*each+1)
	}
	if _, err := ipam.Read(&o.Spec); err != nil { // Read refuses overlaps and addresses that are used twice
		t.Error(err)
	}
	for _, h := range []*harness{a, b} {
		if err := h.Refresh(t.Context()); err != nil {
			t.Error(err)
		}
		h.agree()
		if nodes := h.State().Own().Nodes; h == a && !slices.Equal(nodes, ours.Nodes) {
			t.Errorf("the nodes were forgotten: %v", nodes)
		}
	}
}

// The Store does not use the content of the IpamStorage. It writes the object again after any edit.
func TestEditsOfTheIpamStorageAreReverted(t *testing.T) {
	subnets := func(s *v1alpha1.IpamStorageSpec, f func(*v1alpha1.Subnets)) {
		v := s.ClusterSubnets["b"]
		f(&v)
		s.ClusterSubnets["b"] = v
	}
	for _, tc := range []struct {
		name string
		edit func(*v1alpha1.IpamStorageSpec)
	}{
		{"a deleted entry", func(s *v1alpha1.IpamStorageSpec) {
			delete(s.ClusterSubnets, "b")
			delete(s.EndpointMappings, "198.51.100.7")
		}},
		{"another network", func(s *v1alpha1.IpamStorageSpec) {
			subnets(s, func(v *v1alpha1.Subnets) { v.RemotePodCIDR = "10.66.0.0/16" })
		}},
		{"an overlap", func(s *v1alpha1.IpamStorageSpec) {
			subnets(s, func(v *v1alpha1.Subnets) { v.RemotePodCIDR = "10.247.4.0/24" })
		}},
		{"another peer", func(s *v1alpha1.IpamStorageSpec) {
			s.ClusterSubnets["d"] = v1alpha1.Subnets{RemotePodCIDR: "10.66.0.0/16", RemoteExternalCIDR: "10.67.0.0/20"}
		}},
		{"an endpoint of an unknown peer", func(s *v1alpha1.IpamStorageSpec) {
			s.EndpointMappings["198.51.100.7"].ClusterMappings["who"] = v1alpha1.ClusterMapping{ExternalCIDRNattedIP: "10.1.1.1"}
		}},
		{"an empty object", func(s *v1alpha1.IpamStorageSpec) { *s = ipam.State{}.Spec() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := fresh(t)
			h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
			h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
			h.mapEndpoint("b", "198.51.100.7")
			for when, notice := range map[string]func() *harness{
				"an update": func() *harness { // its write of the edited object conflicts
					h.allocate(claim("c", "10.50.0.0/16", "10.51.0.0/16"))
					return h
				},
				"a refresh": func() *harness { refresh(t, h); return h },
				"a restart": func() *harness { return loaded(t) },
			} {
				h.update(func(b ipam.State) ipam.State { return b.Release("c") })
				edit(t, func(o *v1alpha1.IpamStorage) { tc.edit(&o.Spec) })
				now := notice()
				if g, _ := now.State().AllocationOf("b"); g.Pod != pfx("10.246.0.0/16") || !now.State().Mapped("b", netip.MustParseAddr("198.51.100.7")) || len(now.State().NetworksOf("d")) > 0 {
					t.Errorf("%s: b has %v, %v; d %v", when, g, now.State().Allocation("b"), now.State().NetworksOf("d"))
				}
				if now.agree(); now == h && !strings.Contains(h.logged(), "another client has changed or deleted the IpamStorage") {
					t.Errorf("%s: log: %s", when, h.logged())
				}
			}
		})
	}
}

// If a person or a restored backup changes a NetworkAllocation, the Store overwrites the change,
// even if the IpamStorage was changed as well.
func TestEditsOfANetworkAllocationAreReverted(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	h.request("b", "198.51.100.7", "one", "pod")
	was, own := allocationOf(t, "b").Spec, allocationOf(t, "us").Spec
	for _, both := range []bool{false, true} {
		patched(t, "b", `{"spec":{"seen":{"podCIDR":"10.99.0.0/16"},"endpoints":null,"unusedSince":"2026-11-25T12:00:00Z"}}`)
		patched(t, "us", `{"spec":{"own":{"pools":null,"externalCIDR":"10.77.0.0/16"}}}`)
		if both {
			edit(t, func(o *v1alpha1.IpamStorage) { o.Spec.EndpointMappings = map[string]v1alpha1.EndpointMapping{} })
		}
		refresh(t, h)
		h.agree()
		now, us := allocationOf(t, "b").Spec, allocationOf(t, "us").Spec
		now.Session, us.Revision, us.Session, us.NetworksSince = was.Session, own.Revision, own.Session, own.NetworksSince
		if !reflect.DeepEqual(now, was) || !reflect.DeepEqual(us, own) {
			t.Errorf("also the IpamStorage: %v\n%+v, was\n%+v\n%+v, was\n%+v", both, now, was, us.Own, own.Own)
		}
	}
}

// An earlier Liqo installation left an IpamStorage, which is read once.
func TestIpamStorageOfEarlierLiqoIsImportedOnce(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	h.mapEndpoint("b", "198.51.100.7")
	want := h.agree().Spec
	if err := testClient.DeleteAllOf(t.Context(), &isthmus.NetworkAllocation{}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		again := loaded(t)
		if got := again.agree().Spec; !reflect.DeepEqual(got, want) {
			t.Errorf("imported %+v\nwant %+v", got, want)
		}
		if o := allocationOf(t, "b").Spec; len(o.Networks) != 2 || o.Seen == nil || len(o.Endpoints) != 1 {
			t.Errorf("b has %+v", o)
		}
		edit(t, func(o *v1alpha1.IpamStorage) {
			delete(o.Spec.ClusterSubnets, "b")
			o.Spec.EndpointMappings = map[string]v1alpha1.EndpointMapping{}
		})
	}
	// Our own cluster's object is lost. The objects of the other clusters count, and the IpamStorage
	// does not.
	if err := testClient.Delete(t.Context(), &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "us"}}); err != nil {
		t.Fatal(err)
	}
	if got := loaded(t).agree().Spec; !reflect.DeepEqual(got, want) {
		t.Errorf("without our own object %+v\nwant %+v", got, want)
	}
}

// Managers were stopped between two writes, or an older object was restored. If two objects have
// the same network or address, the later object counts.
func TestLaterOfTwoConflictingNetworkAllocationsWins(t *testing.T) {
	h := fresh(t)
	for _, id := range []string{"b", "c"} {
		h.allocate(claim(id, "10.244.0.0/16", "10.245.0.0/16"))
		h.answered(id, "10.244.0.0/16", "10.245.0.0/16")
		h.mapEndpoint(id, map[string]string{"b": "198.51.100.7", "c": "198.51.100.8"}[id])
	}
	b, c := allocationOf(t, "b"), allocationOf(t, "c")
	b.Spec.Networks, b.Spec.Endpoints[0].Address = c.Spec.Networks, c.Spec.Endpoints[0].Address
	if err := testClient.Update(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	again := loaded(t)
	if g, _ := again.State().AllocationOf("c"); g.Pod.String() != c.Spec.Networks[0] || !again.State().Mapped("c", netip.MustParseAddr("198.51.100.8")) {
		t.Errorf("c has %+v", again.State().Allocation("c"))
	}
	if has := again.State().NetworksOf("b"); len(has) > 0 || !strings.Contains(again.logged(), "is invalid") {
		t.Errorf("b has %v; log: %s", has, again.logged())
	}
	again.agree()
	want(t, "afterwards", c.Spec.Networks...)
}

// The previous leader allocates networks while another manager starts. The new leader keeps the
// allocation.
func TestAllocationMadeWhileAnotherManagerStartsIsKept(t *testing.T) {
	before := fresh(t)
	before.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	edit(t, func(o *v1alpha1.IpamStorage) { o.Spec.Pools = []string{} }) // so that the starting manager has something to write
	late := sync.OnceFunc(func() {
		if err := before.Refresh(t.Context()); err != nil {
			t.Error(err)
		}
		before.allocate(claim("c", "10.244.0.0/17", "10.245.0.0/17"))
	})
	plain := newStore(t)
	c := interceptor.NewClient(plain.client.(client.WithWatch), interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, options ...client.PatchOption) error {
			late()
			return c.Patch(ctx, o, p, options...)
		},
	})
	s := New(c, c, "us", slog.New(slog.DiscardHandler))
	if err := s.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, allocated := s.State().AllocationOf("c"); !allocated || len(object(t).Spec.ClusterSubnets) != 2 {
		t.Error("what was granted meanwhile is gone")
	}
	if named := allocations(t).Named; len(named) != 4 {
		t.Errorf("named: %v", named)
	}
	if freed := allocations(t).Freed; len(freed) > 0 {
		t.Errorf("freed: %v", freed)
	}
}

// While no manager ran, somebody edited, restored or deleted a NetworkAllocation.
func TestLostAllocationIsRestoredFromItsTunnelEndpoint(t *testing.T) {
	h := fresh(t)
	for i, id := range []string{"a-0000", "b-0001"} { // only b has a TunnelEndpoint
		h.allocate(claim(id, "10.244.0.0/16", "10.245.0.0/16"))
		h.answered(id, fmt.Sprintf("10.%d.0.0/16", 70+i), fmt.Sprintf("10.%d.0.0/16", 80+i))
		h.mapEndpoint(id, "198.51.100.7")
	}
	makeTraces(t, h.State(), "b-0001")
	want := h.agree()
	for name, change := range map[string]func(o *isthmus.NetworkAllocation) error{
		"deleted": func(o *isthmus.NetworkAllocation) error { return testClient.Delete(t.Context(), o) },
		"without all": func(o *isthmus.NetworkAllocation) error {
			o.Spec = isthmus.NetworkAllocationSpec{ClusterID: o.Name, Revision: 1, Session: 1}
			return testClient.Update(t.Context(), o)
		},
		"other networks": func(o *isthmus.NetworkAllocation) error {
			o.Spec.Networks = []string{"10.99.0.0/16", o.Spec.Networks[1]}
			return testClient.Update(t.Context(), o)
		},
		"another's networks": func(o *isthmus.NetworkAllocation) error {
			o.Spec.Networks, o.Spec.Session = allocationOf(t, "a-0000").Spec.Networks, 1
			return testClient.Update(t.Context(), o)
		},
	} {
		o := allocationOf(t, "b-0001")
		if err := change(&o); err != nil {
			t.Fatal(err)
		}
		again := loaded(t)
		if got := again.agree(); !reflect.DeepEqual(got.Spec.ClusterSubnets, want.Spec.ClusterSubnets) || !reflect.DeepEqual(got.Spec.EndpointMappings, want.Spec.EndpointMappings) {
			t.Errorf("%s: have %v, %v; want %v", name, got.Spec.ClusterSubnets, got.Spec.EndpointMappings, want.Spec)
		}
		if !strings.Contains(again.logged(), "b-0001") {
			t.Errorf("%s: log: %s", name, again.logged())
		}
	}
}

func TestDeletedIpamStorageIsRecreatedFromMemory(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	for _, notice := range []func(){
		func() { h.allocate(claim("c", "10.50.0.0/16", "10.51.0.0/16")) },
		func() {
			if err := h.Refresh(t.Context()); err != nil {
				t.Error(err)
			}
		},
	} {
		if err := testClient.Delete(t.Context(), object(t)); err != nil {
			t.Fatal(err)
		}
		notice()
		if got := slices.Sorted(maps.Keys(h.agree().Spec.ClusterSubnets)); !slices.Equal(got, []string{"b", "c"}) {
			t.Errorf("peers %v", got)
		}
	}
}

func TestOldestOfSeveralIpamStoragesIsUsed(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	other := &v1alpha1.IpamStorage{ObjectMeta: metav1.ObjectMeta{Name: "a-younger-one", UID: "", Labels: map[string]string{v1alpha1.LabelIpamStorage: "true"}}}
	other.Spec = ipam.State{}.Spec()
	if err := testClient.Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	again := newStore(t)
	first, err := again.find(t.Context())
	if err != nil || !strings.Contains(again.logged(), "more than one IpamStorage") {
		t.Errorf("%v, log: %s", err, again.logged())
	}
	if first.CreationTimestamp.After(other.CreationTimestamp.Time) {
		t.Errorf("took %s of %v rather than %s of %v", first.Name, first.CreationTimestamp, other.Name, other.CreationTimestamp)
	}
}

func TestLostStateIsRebuiltFromTunnelEndpointsAndNetworkConfigs(t *testing.T) {
	h := fresh(t)
	for i, id := range []string{"b-0001", "c-0002"} {
		h.allocate(claim(id, "10.244.0.0/16", "10.245.0.0/16"))
		h.answered(id, fmt.Sprintf("10.%d.0.0/16", 70+i), fmt.Sprintf("10.%d.0.0/16", 80+i))
	}
	h.allocate(claim("d-0003", "100.64.0.0/18", "192.0.2.0/24"))
	h.mapEndpoint("b-0001", "198.51.100.1")
	h.mapEndpoint("b-0001", "198.51.100.2")
	h.mapEndpoint("c-0002", "198.51.100.2")
	h.update(func(b ipam.State) ipam.State { return b.UnmapEndpoint("b-0001", netip.MustParseAddr("198.51.100.1")) })
	want := h.agree().Spec

	for _, id := range []string{"b-0001", "c-0002", "d-0003"} {
		makeTraces(t, h.State(), id)
	}
	// A hostile peer claims another peer's network in its own tenant namespace, and writes a
	// NetworkConfig of another cluster.
	evil := namespace(t, "evil-0004")
	create(t, networkConfig(evil, "evil-0004", "evil-0004", "10.244.0.0/16", "10.246.0.0/16"))
	create(t, networkConfig(evil, "b-0001", "b-0001", "10.244.0.0/16", "10.66.0.0/16"))
	create(t, networkConfig(namespace(t, ""), "nobody", "nobody", "10.244.0.0/16", "10.67.0.0/16"))

	for _, lose := range []func(*v1alpha1.IpamStorage){ // at the same time all NetworkAllocations are deleted
		func(o *v1alpha1.IpamStorage) { o.Spec = ipam.State{}.Spec() },
		func(o *v1alpha1.IpamStorage) {
			o.Spec.ClusterSubnets["b-0001"] = v1alpha1.Subnets{RemotePodCIDR: "10.0.0.0/7"}
		},
		nil,
	} {
		if err := testClient.DeleteAllOf(t.Context(), &isthmus.NetworkAllocation{}); err != nil {
			t.Fatal(err)
		}
		if lose == nil {
			if err := testClient.Delete(t.Context(), object(t)); err != nil {
				t.Fatal(err)
			}
		} else {
			edit(t, lose)
		}
		again := loaded(t)
		again.update(func(b ipam.State) ipam.State { b, _ = b.Configure(ours); return b })
		if got := again.agree().Spec; !reflect.DeepEqual(got, want) {
			t.Errorf("rebuilt\n%+v\nwant\n%+v\nlog: %s", got, want, again.logged())
		}
		if !strings.Contains(again.logged(), "evil-0004") {
			t.Errorf("log: %s", again.logged())
		}
	}
}

// makeTraces creates the objects that follow from the State for one peer. d, which has not
// answered, gets only the copy of its NetworkConfig.
func makeTraces(t *testing.T, b ipam.State, id string) {
	t.Helper()
	ns := namespace(t, id)
	g, _ := b.AllocationOf(id)
	s, own := b.Spec().ClusterSubnets[id], b.Own()
	backend := v1alpha1.BackendConfig{"publicKey": strings.Repeat("B", 42) + "A=", "port": "5871"}
	nm, answered := b.NatMapping(id)
	if answered && id == "b-0001" {
		create(t, &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: id}, Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: id, ClusterName: id},
			LocalPodCIDR:    own.PodCIDR.String(), LocalNATPodCIDR: s.LocalNATPodCIDR,
			LocalExternalCIDR: own.ExternalCIDR.String(), LocalNATExternalCIDR: s.LocalNATExternalCIDR,
			RemotePodCIDR: "10.244.0.0/16", RemoteNATPodCIDR: g.Pod.String(),
			RemoteExternalCIDR: "10.245.0.0/16", RemoteNATExternalCIDR: g.External.String(),
			EndpointIP: "203.0.113.1", BackendType: "wireguard", BackendConfig: backend,
		}})
	} else {
		copied := networkConfig(ns, "copy", id, "10.244.0.0/16", g.Pod.String())
		copied.Status.ExternalCIDRNAT = g.External.String()
		if id == "d-0003" {
			copied.Spec.PodCIDR, copied.Spec.ExternalCIDR = g.Pod.String(), g.External.String()
			copied.Status.PodCIDRNAT, copied.Status.ExternalCIDRNAT = v1alpha1.None, v1alpha1.None
		}
		create(t, copied)
		if answered {
			original := networkConfig(ns, "original", "", own.PodCIDR.String(), s.LocalNATPodCIDR)
			original.Labels = map[string]string{v1alpha1.LabelReplication: "true", v1alpha1.LabelRemoteID: id}
			original.Spec.RemoteCluster.ClusterID, original.Status.ExternalCIDRNAT = id, s.LocalNATExternalCIDR
			create(t, original)
		}
	}
	if answered {
		create(t, &v1alpha1.NatMapping{ObjectMeta: metav1.ObjectMeta{Name: id}, Spec: nm})
	}
}

// networkConfig returns the copy of a peer's NetworkConfig, answered with a network for its pods.
func networkConfig(ns, name, origin, pod, podNAT string) *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{v1alpha1.LabelReplication: "false", v1alpha1.LabelOriginID: origin}},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: v1alpha1.ClusterIdentity{ClusterID: "ours", ClusterName: "ours"}, PodCIDR: pod, ExternalCIDR: "10.245.0.0/16",
			EndpointIP: "203.0.113.2", BackendType: "wireguard", BackendConfig: v1alpha1.BackendConfig{"publicKey": strings.Repeat("B", 42) + "A=", "port": "5871"},
		},
		Status: v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: podNAT, ExternalCIDRNAT: "10.68.0.0/16"},
	}
}

var namespaces int

// namespace creates the tenant namespace of a peer, or of no peer if id is empty. At the end the
// test deletes the objects in it, because no controller deletes namespaces here.
func namespace(t *testing.T, id string) string {
	t.Helper()
	namespaces++
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("liqo-tenant-", namespaces)}}
	if id != "" {
		ns.Labels = map[string]string{v1alpha1.LabelTenantClusterID: id, v1alpha1.LabelTenantNamespace: "true"}
	}
	create(t, ns)
	t.Cleanup(func() {
		for _, kind := range []client.Object{&v1alpha1.NetworkConfig{}, &v1alpha1.TunnelEndpoint{}} {
			if err := testClient.DeleteAllOf(context.Background(), kind, client.InNamespace(ns.Name)); err != nil {
				t.Error(err)
			}
		}
	})
	return ns.Name
}

// create creates the object, including its status.
func create(t *testing.T, o client.Object) {
	t.Helper()
	wanted := o.DeepCopyObject().(client.Object)
	if err := testClient.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if nc, ok := wanted.(*v1alpha1.NetworkConfig); ok {
		nc.ResourceVersion = o.GetResourceVersion()
		if err := testClient.Status().Update(t.Context(), nc); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSubscribersGetEventsWithoutBlockingTheStore(t *testing.T) {
	h := fresh(t)
	lazy, lively := h.Subscribe(), h.Subscribe()
	names := func(ch <-chan event.GenericEvent) (all []string) {
		for {
			select {
			case e := <-ch:
				all = append(all, e.Object.GetName())
			default:
				return all
			}
		}
	}
	h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	if got := names(lively); !slices.Equal(got, []string{"b"}) {
		t.Errorf("heard %v", got)
	}
	h.allocate(claim("c", "10.244.0.0/16", "10.245.0.0/16"))
	h.answered("b", "10.70.0.0/16", "10.71.0.0/16")
	if got := names(lively); !slices.Equal(got, []string{"b", "c"}) {
		t.Errorf("heard %v", got)
	}
	if got := names(lazy); !slices.Equal(got, []string{"b", "c"}) {
		t.Errorf("one who slept heard %v", got)
	}
	c := ours
	c.Reserved = []netip.Prefix{pfx("10.9.0.0/16")}
	h.answered("b", "10.72.0.0/16", "10.71.0.0/16")
	h.update(func(b ipam.State) ipam.State { b, _ = b.Configure(c); return b })
	if got := names(lively); !slices.Equal(got, []string{""}) {
		t.Errorf("our own networks changed, heard %v", got)
	}
}

// Each patch is applied as RFC 7386 demands, and then turns one spec into the other.
func TestMergePatchTurnsOneSpecIntoTheOther(t *testing.T) {
	base, _ := ipam.State{}.Configure(ours)
	join := func(b ipam.State, ids ...string) ipam.State {
		for _, id := range ids {
			b, _, _ = b.Allocate(claim(id, "10.244.0.0/16", "10.245.0.0/16"))
			b = b.Answered(id, pfx("10.7.0.0/16"), pfx("10.8.0.0/16"))
			b, _, _ = b.MapEndpoint(id, netip.MustParseAddr("198.51.100.1"))
			b, _, _ = b.MapEndpoint(id, netip.AddrFrom4([4]byte{198, 51, 100, id[0]}))
		}
		return b
	}
	other, _ := join(base, "b").Configure(ipam.Config{PodCIDR: pfx("10.200.0.0/18"), ExternalCIDR: pfx("172.20.0.0/16")})
	states := map[string]ipam.State{"zero": {}, "base": base, "b": join(base, "b"), "bc": join(base, "b", "c"), "bcd": join(base, "b", "c", "d"),
		"cd": join(base, "b", "c", "d").Release("b"), "other": other,
		"unmapped": join(base, "b", "c").UnmapEndpoint("b", netip.MustParseAddr("198.51.100.1"))}
	for from, a := range states {
		for to, b := range states {
			whole, want := a.Spec(), b.Spec()
			have, part := ipam.Delta(a, b)
			for name, patch := range map[string][]byte{"whole": patchOf("1", diff(&whole, &want)), "delta": patchOf("1", diff(&have, &part))} {
				if (patch == nil) != reflect.DeepEqual(whole, want) {
					t.Errorf("%s of %s to %s: %s", name, from, to, patch)
				}
				var got v1alpha1.IpamStorage
				merged, err := json.Marshal(merge(tree(t, v1alpha1.IpamStorage{Spec: whole}), tree(t, json.RawMessage(cmpOr(patch, []byte("{}"))))))
				if err == nil {
					err = json.Unmarshal(merged, &got)
				}
				if err != nil || !reflect.DeepEqual(got.Spec, want) {
					t.Errorf("%s of %s to %s: %v\n%s\n got %+v\nwant %+v", name, from, to, err, patch, got.Spec, want)
				}
			}
		}
	}
}

func cmpOr(a, b []byte) []byte {
	if a == nil {
		return b
	}
	return a
}

func tree(t *testing.T, v any) (out any) {
	t.Helper()
	text, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// merge implements the algorithm of RFC 7386, section 2.
func merge(target, patch any) any {
	p, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	m, ok := target.(map[string]any)
	if !ok {
		m = make(map[string]any)
	}
	for k, v := range p {
		if v == nil {
			delete(m, k)
		} else {
			m[k] = merge(m[k], v)
		}
	}
	return m
}

func TestNetworksOfRemovedPeersSurviveARestart(t *testing.T) {
	h := fresh(t)
	had := h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	h.update(func(b ipam.State) ipam.State { return b.Release("b") })
	if got := allocationOf(t, "b").Spec.Previous; got == nil || *got != (isthmus.NetworkPair{PodCIDR: had.Pod.String(), ExternalCIDR: had.External.String()}) {
		t.Errorf("the object says %v", got)
	}
	again := loaded(t)
	if methods, _, _ := again.sent(); !slices.Equal(methods, []string{"GET", "PATCH"}) {
		t.Errorf("a restart sends %v", methods)
	}
	if c := again.allocate(claim("c", "10.244.0.0/16", "10.245.0.0/16")); c.Pod == had.Pod || c.External == had.External {
		t.Errorf("c has %v of what b had, %v", c, had)
	}
	if got := again.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16")); got != had {
		t.Errorf("b has %v, before it left %v", got, had)
	}
	if got := allocationOf(t, "b").Spec.Previous; got != nil {
		t.Errorf("all are here, but remembered: %v", got)
	}

	// If somebody deletes the object of a peer that has left, the next manager does not know the peer.
	again.update(func(b ipam.State) ipam.State { return b.Release("b") })
	if err := testClient.Delete(t.Context(), &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "b"}}); err != nil {
		t.Fatal(err)
	}
	refresh(t, again)
	if _, known := loaded(t).State().PreviousOf("b"); known {
		t.Error("b is remembered")
	}
}

// No object stores the networks that nodes reach. So the Store must keep them when it reads the
// writes of another manager.
func TestReachedNetworksAreKeptWhenAnotherManagerWrites(t *testing.T) {
	h := fresh(t)
	reached := ours
	reached.Reached = []ipam.Reached{{Prefix: pfx("10.70.0.0/16"), Node: "n1"}}
	reached.Services = []netip.Prefix{pfx("172.29.0.0/24")}
	h.update(func(b ipam.State) ipam.State { b, _ = b.Configure(reached); return b })
	loaded(t).update(func(b ipam.State) ipam.State {
		c := ours
		c.Reserved = []netip.Prefix{pfx("10.80.0.0/16")}
		b, _ = b.Configure(c)
		return b
	})
	refresh(t, h)
	own := h.State().Own()
	if !slices.Equal(own.Reached, reached.Reached) || !slices.Equal(own.Nodes, reached.Nodes) || !slices.Equal(own.Services, reached.Services) || len(own.Reserved) != 1 {
		t.Errorf("nodes %v reach %v, reserved are %v", own.Nodes, own.Reached, own.Reserved)
	}
	if g := h.allocate(claim("b", "10.70.0.0/16", "10.71.0.0/20")); g.Pod.Overlaps(pfx("10.70.0.0/16")) {
		t.Errorf("b has %v as it is, which a node reaches", g.Pod)
	}
}
