package main

import (
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/health"
)

func TestAPathEndsAtTheFirstBrokenHop(t *testing.T) {
	hop := func(name string, state health.HopState, reason string) pathHop {
		return pathHop{Hop: health.Hop{Cluster: "paris", Name: name, State: state, Reason: reason, Text: "why"}}
	}
	for _, tc := range []struct {
		name    string
		path    tracePath
		arrives bool
		leaves  bool
		verdict string
	}{
		{"all works", tracePath{Direction: "out", Hops: []pathHop{hop("node", health.Works, ""), hop("tunnel", health.Works, "Connected")}}, true, false, "it arrives"},
		{"the answer", tracePath{Direction: "in", Hops: []pathHop{hop("tunnel", health.Works, "")}}, true, false, "the answer arrives"},
		{"from no Pod", tracePath{Direction: "out", Hops: []pathHop{hop("node", health.Unknown, ""), hop("tunnel", health.Works, "")}}, true, false, "it arrives"},
		{"the other side was not asked", tracePath{Direction: "out", Hops: []pathHop{hop("tunnel", health.Works, ""), hop(hopOtherSide, health.Unknown, "")}}, false, true,
			"it leaves for paris; its path in that cluster was not checked"},
		{"it does not leave for the other side", tracePath{Direction: "out", Hops: []pathHop{hop("tunnel", health.Broken, "PeerSilent"), hop(hopOtherSide, health.Unknown, "")}}, false, false,
			"the peer is down: PeerSilent: why"},
		{"the peer is down", tracePath{Hops: []pathHop{hop("node", health.Works, ""), hop("tunnel", health.Broken, "PeerSilent")}}, false, false, "the peer is down: PeerSilent: why"},
		{"no route agent, and the peer is down", tracePath{Hops: []pathHop{hop("node", health.Broken, ""), hop("tunnel", health.Broken, "PeerSilent")}}, false, false, "it ends at paris, node: why"},
		{"dropped", tracePath{Hops: []pathHop{hop("NAT", health.Broken, "source")}}, false, false, "it ends at paris, NAT: source: why"},
		{"by a narrow path", tracePath{Direction: "out", Hops: []pathHop{hop("tunnel", health.Limited, "NarrowPath")}}, true, false, "it arrives"},
		{"no gateway that would know", tracePath{Hops: []pathHop{hop("tunnel", health.Waits, "")}}, false, false, "unknown at paris, tunnel: why"},
	} {
		if got := tc.path.finish(); got.Arrives != tc.arrives || got.Leaves != tc.leaves || got.Verdict != tc.verdict {
			t.Errorf("%s: arrives %v, leaves %v, %q; want %v, %v, %q", tc.name, got.Arrives, got.Leaves, got.Verdict, tc.arrives, tc.leaves, tc.verdict)
		}
	}
}

func TestRequestTimeoutsAreParsedAsInKubectl(t *testing.T) {
	for text, want := range map[string]string{"30s": "30s", "5": "5s", "1m": "1m0s", "0": ""} {
		var d requestTimeout
		if err := d.Set(text); err != nil || d.String() != want {
			t.Errorf("%q: %v, %v; want %s", text, d.String(), err, want)
		}
	}
	for _, text := range []string{"", "soon", "-3s", "-1"} {
		var d requestTimeout
		if err := d.Set(text); err == nil {
			t.Errorf("%q: accepted as %v", text, d.String())
		}
	}
	_, errs, code := isthmus("", "status", "--request-timeout", "soon")
	if code != 2 || !strings.Contains(errs, `--request-timeout "soon": want a duration such as 30s`) {
		t.Errorf("code %d: %s", code, errs)
	}
}
