package kube

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// podEventsAreSentOnce is called by TestGatewayAgainstAnAPIServer.
func podEventsAreSentOnce(t *testing.T, s *apiServer) {
	s.namespace(t, "events")
	e, err := NewPodEvents(s.config, "gateway", "events", "gateway-1", "uid-1")
	if err != nil {
		t.Fatal(err)
	}
	scheme := newScheme()
	if err := eventsv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	api, err := client.New(s.config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	list := func() (all []string) {
		t.Helper()
		var l eventsv1.EventList
		must(api.List(t.Context(), &l, client.InNamespace("events")))
		for _, e := range l.Items {
			if e.Regarding.Name != "gateway-1" || e.Regarding.UID != "uid-1" || e.Regarding.Kind != "Pod" {
				t.Errorf("it is about %+v", e.Regarding)
			}
			text := e.Type + " " + e.Reason
			if e.Series != nil {
				text += " again"
			}
			all = append(all, text)
		}
		return all
	}
	must(e.Mended(t.Context(), "nothing was wrong"))
	if got := list(); len(got) != 0 {
		t.Fatalf("without a fault: %v", got)
	}
	must(e.Warn(t.Context(), "NotApplied", "no such device"))
	must(e.Warn(t.Context(), "NotApplied", "no such device"))
	if got := list(); len(got) != 1 || got[0] != corev1.EventTypeWarning+" NotApplied" {
		t.Fatalf("one fault, told twice: %v", got)
	}
	must(e.Mended(t.Context(), "all is there"))
	must(e.Mended(t.Context(), "all is there"))
	if got := list(); len(got) != 2 {
		t.Fatalf("mended: %v", got)
	}
	must(e.Warn(t.Context(), "NotApplied", "no such device")) // the first problem again
	if got := strings.Join(list(), ", "); !strings.Contains(got, "NotApplied again") {
		t.Fatalf("the same fault again: %v", got)
	}
	must(e.Mended(t.Context(), "all is there"))
	before := len(list())
	must(e.Note(t.Context(), "Active", "epoch 7"))
	must(e.Mended(t.Context(), "all is there")) // a note is not a problem, so nothing has ended
	if got := list(); len(got) != before+1 || !slices.Contains(got, corev1.EventTypeNormal+" Active") {
		t.Fatalf("a note: %v", got)
	}
	must(e.Warn(t.Context(), "NotApplied", strings.Repeat("ü", 5000)))
	var nobody *PodEvents
	must(nobody.Warn(t.Context(), "x", "y"))
	must(nobody.Mended(t.Context(), "y"))
	must(nobody.Note(t.Context(), "x", "y"))
}

// Components call Warn at each attempt, once a second. An Event whose cause lasts is repeated,
// because the API server deletes old Events.
func TestALastingWarningIsRepeatedEveryTenMinutes(t *testing.T) {
	var e PodEvents
	var sent []time.Duration
	begin := time.Now()
	for after := time.Duration(0); after < 25*time.Minute; after += time.Second {
		if e.due("the same", begin.Add(after)) {
			sent = append(sent, after)
		}
	}
	if want := []time.Duration{0, repeatInterval, 2 * repeatInterval}; !slices.Equal(sent, want) {
		t.Errorf("told after %v, want %v", sent, want)
	}
}
