package ipamstore

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// Agents read the copies, or the IPAM state where the copies disagree with it. Both name held networks
// until the manager ends the hold with a higher edition.
func TestAgentsReadHeldNetworksUntilTheManagerEndsTheHold(t *testing.T) {
	noon := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	h := fresh(t)
	had := h.grant(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	shorter := claim("c", "10.66.0.0/16", "10.67.0.0/20")
	h.grant(shorter)
	shorter.Pod, shorter.Now = pfx("10.66.0.0/17"), noon
	h.grant(shorter)
	edition := h.agree().Annotations[isthmus.AnnotationEdition]
	h.sent()
	h.update(func(b ipam.Book) ipam.Book { return b.Part("b", noon) })
	if methods, _, _ := h.sent(); !slices.Equal(methods, []string{"PATCH"}) {
		t.Errorf("sent %v, want one patch", methods)
	}
	const noted = `{"released":{"2026-11-25T12:00:00Z":["b"]},"replaced":{"2026-11-25T12:00:00Z":{"c":["10.66.0.0/16"]}}}`
	o := h.agree()
	if got := o.Annotations[isthmus.AnnotationReleased]; got != noted || o.Annotations[isthmus.AnnotationEdition] != edition {
		t.Errorf("the annotation is %s; want %s; edition %s was %s", got, noted, o.Annotations[isthmus.AnnotationEdition], edition)
	}
	all := []string{"10.64.0.0/16", "10.65.0.0/20", "10.66.0.0/17", "10.67.0.0/20", "10.66.0.0/16"}
	agents := func(when string) {
		t.Helper()
		want(t, when, slices.Clone(all)...)
		granted, problems := fabric.GrantedIn(object(t))
		shares, _, _ := copies(t)
		if fabric.GrantsID(granted) != fabric.GrantsID(shares) || len(problems) > 0 {
			t.Errorf("%s: agents read %v in the IPAM state and %v in the copies; %v", when, granted, shares, problems)
		}
	}
	agents("released")
	again := loaded(t) // and the manager is started again
	if methods, _, _ := again.sent(); !slices.Equal(methods, []string{"GET"}) {
		t.Errorf("a restart sends %v", methods)
	}
	agents("after a restart")
	age := func(now time.Time) {
		t.Helper()
		again.update(func(b ipam.Book) ipam.Book { b, _ = b.Age(now, func(string) bool { return true }); return b })
	}
	age(noon.Add(fabric.ReleaseHold - time.Second))
	agents("before the end")
	if got := again.agree().Annotations[isthmus.AnnotationEdition]; got != edition {
		t.Errorf("edition %s was %s, and nothing was taken back", got, edition)
	}

	// Somebody takes the note out: the networks stay.
	edit(t, func(o *v1alpha1.IpamStorage) { delete(o.Annotations, isthmus.AnnotationReleased) })
	another := loaded(t)
	if got := another.Book().NetworksOf("b"); !slices.Equal(got, []netip.Prefix{had.Pod, had.External}) {
		t.Errorf("without the note: %v", got)
	}
	edit(t, func(o *v1alpha1.IpamStorage) { o.Annotations[isthmus.AnnotationReleased] = noted })
	if err := again.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}

	age(noon.Add(fabric.ReleaseHold))
	all = []string{"10.66.0.0/17", "10.67.0.0/20"}
	agents("after a day")
	o = again.agree()
	if _, there := o.Annotations[isthmus.AnnotationReleased]; there || o.Annotations[isthmus.AnnotationEdition] <= edition {
		t.Errorf("after a day the annotations are %v; edition was %s", o.Annotations, edition)
	}
}

// All definitions and objects are deleted, and a manager starts without any state. Agents keep refusing
// what they know, because no IPAM state of a higher edition lacks it.
func TestAnIPAMStateMadeAnewTakesNothingBack(t *testing.T) {
	h := fresh(t)
	h.grant(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	h.update(func(b ipam.Book) ipam.Book { return b.Release("b") })
	before := fabric.EditionOf(h.agree().Annotations, time.Now())
	for _, kind := range []client.Object{&v1alpha1.IpamStorage{}, &isthmus.GrantedNetworks{}} {
		if err := testClient.DeleteAllOf(t.Context(), kind); err != nil {
			t.Fatal(err)
		}
	}
	again := loaded(t)
	if now := fabric.EditionOf(again.agree().Annotations, time.Now()); now == 0 || now > before {
		t.Errorf("edition %d after %d; want one that is not higher", now, before)
	}
	again.grant(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	again.update(func(b ipam.Book) ipam.Book { return b.Release("b") })
	if now := fabric.EditionOf(again.agree().Annotations, time.Now()); now <= before {
		t.Errorf("edition %d after %d, and a network was taken back", now, before)
	}
}

// Without the IPAM state the copies still name the networks that nodes refuse.
func TestHeldNetworksOutliveTheIPAMState(t *testing.T) {
	h := fresh(t)
	had := h.grant(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	h.update(func(b ipam.Book) ipam.Book { return b.Part("b", time.Now()) })
	if err := testClient.DeleteAllOf(t.Context(), &v1alpha1.IpamStorage{}); err != nil {
		t.Fatal(err)
	}
	again := loaded(t)
	want(t, "rebuilt", "10.64.0.0/16", "10.65.0.0/20")
	if again.Book().ReleasedAt("b").IsZero() {
		t.Error("the networks are not held")
	}
	again.update(func(b ipam.Book) ipam.Book { b, _ = b.Configure(ours); return b })
	if g := again.grant(claim("c", "10.64.0.0/16", "10.67.0.0/20")); g.Pod.Overlaps(had.Pod) {
		t.Errorf("c has %v of %v", g, had)
	}
	if g := again.grant(claim("b", "10.64.0.0/16", "10.65.0.0/20")); g != had {
		t.Errorf("b has %v, had %v", g, had)
	}
}

func TestAStoreTakesTheTimeFromItsClock(t *testing.T) {
	s := New(nil, nil, nil)
	if now, err := s.Now(t.Context()); err != nil || time.Since(now).Abs() > time.Hour {
		t.Errorf("%v, %v", now, err)
	}
	noon := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	s.WithClock(func(context.Context) (time.Time, error) { return noon, nil })
	if now, err := s.Now(t.Context()); err != nil || now != noon {
		t.Errorf("%v, %v", now, err)
	}
}
