package ipamstore

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// copies returns what agents read: the networks in all GrantedNetworks, what the books say of them, and
// whether that is so.
func copies(t *testing.T) (granted []netip.Prefix, digest fabric.BooksDigest, current bool) {
	t.Helper()
	var all isthmus.GrantedNetworksList
	var books v1alpha1.IpamStorageList
	for _, list := range []client.ObjectList{&all, &books} {
		if err := testClient.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
	}
	granted, problems := fabric.GrantedInShares(all.Items)
	if len(books.Items) != 1 || len(problems) > 0 {
		t.Fatalf("%d books, %v", len(books.Items), problems)
	}
	digest, ok := fabric.BooksDigestFrom(books.Items[0].Annotations[isthmus.AnnotationGranted])
	return granted, digest, ok && digest.Generation == books.Items[0].Generation && digest.Granted == fabric.GrantsID(granted)
}

func want(t *testing.T, when string, networks ...string) {
	t.Helper()
	granted, digest, current := copies(t)
	got := make([]string, len(granted))
	for i, p := range granted {
		got[i] = p.String()
	}
	slices.Sort(got)
	slices.Sort(networks)
	if !current || !slices.Equal(got, networks) {
		t.Errorf("%s: agents read %v of %+v (current: %v); want %v", when, got, digest, current, networks)
	}
}

func grant(t *testing.T, s *Store, id, pod, external string) {
	t.Helper()
	if _, err := s.Update(t.Context(), func(b ipam.Book) (ipam.Book, error) {
		b, _, err := b.Grant(claim(id, pod, external))
		return b, err
	}); err != nil {
		t.Fatal(err)
	}
}

func TestGrantedNetworksAreACopyOfTheBooks(t *testing.T) {
	h := fresh(t)
	want(t, "empty books")
	if _, err := h.Update(t.Context(), func(b ipam.Book) (ipam.Book, error) { b, _ = b.Configure(ours); return b, nil }); err != nil {
		t.Fatal(err)
	}
	if _, d, _ := copies(t); d.PodCIDR != ours.PodCIDR.String() || d.ServiceCIDR != ours.ServiceCIDR.String() {
		t.Errorf("the books say %+v of our own networks", d)
	}
	grant(t, h.Store, "b", "10.64.0.0/16", "10.65.0.0/20")
	want(t, "one peer", "10.64.0.0/16", "10.65.0.0/20")
	grant(t, h.Store, "c", "10.66.0.0/16", "10.67.0.0/20")
	want(t, "two", "10.64.0.0/16", "10.65.0.0/20", "10.66.0.0/16", "10.67.0.0/20")
	if _, err := h.Update(t.Context(), func(b ipam.Book) (ipam.Book, error) { return b.Release("b"), nil }); err != nil {
		t.Fatal(err)
	}
	want(t, "one has left", "10.66.0.0/16", "10.67.0.0/20")

	// Whoever deletes or edits a copy, or makes another one: it is written again.
	name := fabric.ShareOf("c")
	if err := testClient.Delete(t.Context(), &isthmus.GrantedNetworks{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		t.Fatal(err)
	}
	if err := h.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, "a share was deleted", "10.66.0.0/16", "10.67.0.0/20")
	for _, patch := range []string{`{"spec":{"peers":{"c":null}}}`, `{"spec":{"peers":{"c":["10.66.0.0/16"],"b":["10.99.0.0/16"],"x":["10.98.0.0/16"]}}}`} {
		if err := testClient.Patch(t.Context(), &isthmus.GrantedNetworks{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
			t.Fatal(err)
		}
		if err := h.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		want(t, patch, "10.66.0.0/16", "10.67.0.0/20")
	}
	h.sent()
	if err := h.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if methods, _, _ := h.sent(); slices.Contains(methods, http.MethodPatch) {
		t.Errorf("nothing has changed, and it sends %v", methods)
	}

	// A manager of before writes the books alone, and the next one finds out.
	var books v1alpha1.IpamStorageList
	if err := testClient.List(t.Context(), &books); err != nil {
		t.Fatal(err)
	}
	old := &books.Items[0]
	old.Spec.ClusterSubnets["d"] = v1alpha1.Subnets{RemotePodCIDR: "10.68.0.0/16", RemoteExternalCIDR: "10.69.0.0/20"}
	if err := testClient.Update(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	if _, _, current := copies(t); current {
		t.Error("the books have a peer more, and agents would go by the copy")
	}
	loaded(t)
	want(t, "after a manager of before", "10.66.0.0/16", "10.67.0.0/20", "10.68.0.0/16", "10.69.0.0/20")

	// The first manager still believes to lead: what it writes is about what there is now.
	grant(t, h.Store, "e", "10.70.0.0/16", "10.71.0.0/20")
	want(t, "after another manager", "10.66.0.0/16", "10.67.0.0/20", "10.68.0.0/16", "10.69.0.0/20", "10.70.0.0/16", "10.71.0.0/20")
}

// stopping is a client whose writes of one kind fail, which is what a manager that is killed leaves.
type stopping struct {
	client.Client
	at string // part of the Go type
}

func (s *stopping) fails(o client.Object) error {
	if s.at != "" && strings.Contains(fmt.Sprintf("%T", o), s.at) {
		return fmt.Errorf("stopped")
	}
	return nil
}

func (s *stopping) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	if err := s.fails(o); err != nil {
		return err
	}
	return s.Client.Create(ctx, o, opts...)
}

func (s *stopping) Patch(ctx context.Context, o client.Object, p client.Patch, opts ...client.PatchOption) error {
	if err := s.fails(o); err != nil {
		return err
	}
	return s.Client.Patch(ctx, o, p, opts...)
}

// What is granted is in the copy before it is in the books, and what is taken back leaves the books
// first: wherever a manager is stopped, all that the books have is in the copy.
func TestTheCopyLacksNothingOfTheBooksAtAnyMoment(t *testing.T) {
	h := fresh(t)
	s := &stopping{Client: h.client}
	h.client = s
	if _, err := h.Update(t.Context(), func(b ipam.Book) (ipam.Book, error) { b, _ = b.Configure(ours); return b, nil }); err != nil {
		t.Fatal(err)
	}
	whole := func(when string) {
		t.Helper()
		granted, _, _ := copies(t)
		var books v1alpha1.IpamStorageList
		if err := testClient.List(t.Context(), &books); err != nil {
			t.Fatal(err)
		}
		for _, id := range slices.Sorted(maps.Keys(books.Items[0].Spec.ClusterSubnets)) {
			if p := pfx(books.Items[0].Spec.ClusterSubnets[id].RemotePodCIDR); !slices.Contains(granted, p) {
				t.Errorf("%s: the books give %v to %s, and the copy has %v", when, p, id, granted)
			}
		}
	}
	change := func(f func(ipam.Book) (ipam.Book, error)) {
		t.Helper()
		for _, at := range []string{"GrantedNetworks", "PartialObjectMetadata"} {
			s.at = at
			if _, err := h.Update(t.Context(), f); err == nil && at == "PartialObjectMetadata" {
				t.Error("written all the same")
			}
			whole("stopped at " + at)
		}
		s.at = ""
		if _, err := h.Update(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		whole("done")
	}
	change(func(b ipam.Book) (ipam.Book, error) {
		b, _, err := b.Grant(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
		return b, err
	})
	want(t, "granted", "10.64.0.0/16", "10.65.0.0/20")
	change(func(b ipam.Book) (ipam.Book, error) { // another network in the place of the first
		b, _, err := b.Release("b").Grant(ipam.Request{ID: "b", Pod: pfx("10.80.0.0/16"), External: pfx("10.81.0.0/20"), WantPod: pfx("10.80.0.0/16"), WantExternal: pfx("10.81.0.0/20")})
		return b, err
	})
	want(t, "another network", "10.80.0.0/16", "10.81.0.0/20")
	s.at = "GrantedNetworks" // taken out of the books, and not of the copy
	if _, err := h.Update(t.Context(), func(b ipam.Book) (ipam.Book, error) { return b.Release("b"), nil }); err != nil {
		t.Fatal(err)
	}
	if _, _, current := copies(t); current {
		t.Error("the copy has what the books have not, and agents would go by it")
	}
	if err := h.Refresh(t.Context()); err == nil {
		t.Error("a refresh that cannot write the copy is content, and nobody tries again")
	}
	s.at = ""
	if err := h.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, "after a refresh")
}

// Somebody who may write a share fills it: what is granted has a place, and the rest goes.
func TestAFullShareKeepsNobodyOut(t *testing.T) {
	h := fresh(t)
	grant(t, h.Store, "b", "10.244.0.0/16", "10.245.0.0/16")
	granted, _, _ := copies(t)
	full := isthmus.GrantedNetworks{}
	if err := testClient.Get(t.Context(), client.ObjectKey{Name: fabric.ShareOf("b")}, &full); err != nil {
		t.Fatal(err)
	}
	full.Spec.Peers = make(map[string]isthmus.PeerNetworks)
	for i := 0; len(full.Spec.Peers) < 4096; i++ {
		if id := fmt.Sprintf("x%d", i); fabric.ShareOf(id) == full.Name {
			full.Spec.Peers[id] = isthmus.PeerNetworks{"10.99.0.0/24"}
		}
	}
	if err := testClient.Update(t.Context(), &full); err != nil {
		t.Fatal(err)
	}
	another := newStore(t)
	for name, do := range map[string]func(context.Context) error{"a look": h.Refresh, "another manager": another.Load} {
		if err := do(t.Context()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if now, _, current := copies(t); !current || !slices.Equal(now, granted) {
		t.Errorf("agents read %v (current: %v); want %v", now, current, granted)
	}
}
