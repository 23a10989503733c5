package control

import (
	"testing"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// TestPeeringSurvivesAPIServerOutages freezes and restarts the API server of each side: at rest,
// while two clusters are being peered, and while they un-peer.
func TestPeeringSurvivesAPIServerOutages(t *testing.T) {
	t.Parallel()
	sites := newSites(t, "10.244.0.0/16", "10.244.128.0/20")
	a, b := sites[0], sites[1]
	a.startManager()
	b.startManager()
	peer(t, a, b)
	waitAgreed(t, a, b)

	freeze := 20 * time.Second // the manager loses its Lease after ten seconds
	if *long {
		freeze = time.Minute
	}
	frozen := func(s *site) {
		if err := s.server.Freeze(); err != nil {
			t.Error(err)
		}
		time.Sleep(freeze)
		if err := s.server.Thaw(); err != nil {
			t.Error(err)
		}
	}
	restarted := func(s *site) {
		if err := s.server.RestartAPIServer(t.Context()); err != nil {
			t.Error(err)
		}
	}
	copied := joining[4]  // the middle of a peering: b has a's NetworkConfig and is about to answer
	leaving := parting[3] // the middle of un-peering
	for _, test := range []struct {
		name         string
		away         func(*site)
		who          *site
		rest, middle bool // whether the case also runs without -long, at rest and in the middle of a peering
	}{
		{"a restarts", restarted, a, true, false},
		{"b restarts", restarted, b, false, true},
		{"a is frozen", frozen, a, false, true},
		{"b is frozen", frozen, b, false, false},
	} {
		t.Run(test.name+" at rest", func(t *testing.T) {
			if !test.rest && !*long {
				t.Skip("with -long")
			}
			reportTo(t, sites...)
			before := map[*site]string{a: a.tunnelEndpoint(b).ResourceVersion, b: b.tunnelEndpoint(a).ResourceVersion}
			test.away(test.who)
			began := time.Now()
			waitAgreed(t, a, b)
			if a.tunnelEndpoint(b).ResourceVersion != before[a] || b.tunnelEndpoint(a).ResourceVersion != before[b] {
				t.Error("a TunnelEndpoint was written, though nothing changed")
			}
			// Afterwards, changes of each side still reach the other one.
			a.publish("203.0.113.88", b)
			b.publish("203.0.113.99", a)
			t.Logf("changes arrive again %v after it is back", time.Since(began).Round(time.Millisecond))
			a.publish("203.0.113.1", b)
			b.publish("203.0.113.2", a)
			waitAgreed(t, a, b)
		})
		t.Run(test.name+" in the middle", func(t *testing.T) {
			if !test.middle && !*long {
				t.Skip("with -long")
			}
			reportTo(t, sites...)
			disjoin(a, b)
			a.waitClean()
			b.waitClean()
			came := copied.await(t, a, b, func() { test.away(test.who) })
			a.join(b, isthmus.Overrides{})
			b.join(a, isthmus.Overrides{})
			if !came() {
				t.Fatal(copied.name + " did not come")
			}
			began := time.Now()
			waitAgreed(t, a, b)
			t.Logf("joined %v after it is back", time.Since(began).Round(time.Millisecond))
			came = leaving.await(t, a, b, func() { test.away(test.who) })
			a.part(b)
			b.part(a)
			if !came() {
				t.Fatal(leaving.name + " did not come")
			}
			began = time.Now()
			disjoin(a, b)
			a.waitClean()
			b.waitClean()
			t.Logf("parted %v after it is back", time.Since(began).Round(time.Millisecond))
			rejoin(a, b)
			waitAgreed(t, a, b)
		})
		if t.Failed() {
			return
		}
	}
}
