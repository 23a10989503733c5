package routeagent

import (
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
)

// A network of a peer is refused until no object names it and each object that named it has freed
// it with a higher revision.
func TestNetworkIsRefusedUntilEveryObjectHasFreedIt(t *testing.T) {
	a, b := netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.250.16.0/20")
	type list = []fabric.Allocation
	by := func(object string, revision int64, all ...netip.Prefix) (l list) {
		for _, p := range all {
			l = append(l, fabric.Allocation{Object: object, Network: p, Revision: revision})
		}
		return l
	}
	of := func(revision int64, all ...netip.Prefix) list { return by("q", revision, all...) }
	says := func(named, freed list) (now fabric.Allocations) {
		for _, n := range slices.Concat(named, freed) {
			now.Revision = max(now.Revision, n.Revision)
		}
		now.Named, now.Freed = fabric.Latest(named), fabric.Latest(freed)
		return now
	}
	both := []netip.Prefix{a, b}
	for name, tc := range map[string]struct {
		left     list // networks that a previous agent refused
		read     []fabric.Allocations
		want     []netip.Prefix
		reported bool // a Problem reports that networks are neither named nor freed
	}{
		"freed":                       {read: []fabric.Allocations{says(of(7, both...), nil), says(of(7, a), of(8, b))}, want: both[:1]},
		"freed, and named by another": {read: []fabric.Allocations{says(of(7, both...), nil), says(slices.Concat(of(9, a), by("p", 9, b)), of(8, b))}, want: both},
		"freed, and the other object that names it is deleted":    {read: []fabric.Allocations{says(slices.Concat(of(7, both...), by("p", 6, b)), nil), says(by("p", 6, b), of(8, both...)), says(nil, of(8, both...))}, want: both[1:], reported: true},
		"another object frees it":                                 {read: []fabric.Allocations{says(of(7, both...), by("p", 8, b)), says(of(7, a), by("p", 8, b))}, want: both, reported: true},
		"two objects, and both have freed it":                     {read: []fabric.Allocations{says(slices.Concat(of(7, b), by("p", 9, b)), nil), says(by("p", 9, b), of(8, b)), says(nil, slices.Concat(of(8, b), by("p", 10, b)))}},
		"freed before another object named it":                    {read: []fabric.Allocations{says(of(9, both...), of(8, b)), says(of(9, a), of(8, b))}, want: both, reported: true},
		"deleted from its object by hand":                         {read: []fabric.Allocations{says(of(7, both...), nil), says(of(7, a), nil)}, want: both, reported: true},
		"deleted from its object by hand, with a higher revision": {read: []fabric.Allocations{says(of(7, both...), nil), says(of(9, a), nil)}, want: both, reported: true},
		"all deleted":                                               {read: []fabric.Allocations{says(of(7, both...), nil), says(nil, nil)}, want: both, reported: true},
		"an older backup":                                           {read: []fabric.Allocations{says(of(7, both...), nil), says(nil, of(3, both...))}, want: both, reported: true},
		"an older backup that names it":                             {read: []fabric.Allocations{says(of(7, both...), nil), says(of(3, both...), nil), says(nil, of(5, both...))}, want: both, reported: true},
		"an older backup, then the newer object again":              {read: []fabric.Allocations{says(of(7, both...), nil), says(nil, of(3, both...)), says(of(7, both...), nil)}, want: both},
		"deleted by hand, then freed":                               {read: []fabric.Allocations{says(of(7, both...), nil), says(of(7, a), nil), says(nil, of(8, both...))}},
		"freed and allocated again":                                 {read: []fabric.Allocations{says(of(7, both...), nil), says(nil, of(8, both...)), says(of(9, both...), nil), says(nil, of(8, both...))}, want: both, reported: true},
		"freed with the revision that named it":                     {read: []fabric.Allocations{says(of(7, both...), nil), says(of(7, a), of(7, b))}, want: both, reported: true},
		"allocated":                                                 {read: []fabric.Allocations{says(nil, nil), says(of(7, both...), nil)}, want: both},
		"refused by a previous agent, and freed since":              {left: of(7, both...), read: []fabric.Allocations{says(nil, of(8, both...))}},
		"refused by a previous agent, and deleted by hand since":    {left: of(7, both...), read: []fabric.Allocations{says(of(7, b), nil)}, want: both, reported: true},
		"refused by a previous agent, and freed before":             {left: of(7, both...), read: []fabric.Allocations{says(nil, of(6, both...))}, want: both, reported: true},
		"refused by a previous agent, unknown revision":             {left: by("", unknownRevision, both...), read: []fabric.Allocations{says(of(9, b), of(8, a))}, want: both, reported: true},
		"refused by a previous agent, unknown revision, freed":      {left: by("", unknownRevision, both...), read: []fabric.Allocations{says(of(7, b), of(6, a)), says(of(7, b), by("p", 8, a))}, want: both[1:]},
		"refused by a previous agent, freed by an earlier revision": {left: by("", unknownRevision, a), read: []fabric.Allocations{says(of(7, b), of(9, b)), says(of(7, b), of(8, a))}, want: both, reported: true},
		"refused by a previous agent, no objects":                   {left: by("", unknownRevision, both...), read: []fabric.Allocations{says(nil, nil)}, want: both, reported: true},
		"no objects at any time":                                    {read: []fabric.Allocations{says(nil, nil)}},
	} {
		var g allocations
		g.hold(tc.left)
		reported := false
		for range 2 { // reading the same objects again changes nothing
			for i, r := range tc.read {
				reported = len(g.read(r)) > 0
				if again := len(g.read(r)) > 0; again != reported {
					t.Errorf("%s: reading %d again says another thing", name, i)
				}
			}
			tc.read = tc.read[max(len(tc.read)-1, 0):]
		}
		if !slices.Equal(g.networks, tc.want) || reported != tc.reported {
			t.Errorf("%s: %v, reported %v; want %v, reported %v", name, g.networks, reported, tc.want, tc.reported)
		}
	}
}

func TestASnapshotRoundTrips(t *testing.T) {
	for _, list := range [][]fabric.Allocation{nil, {{Object: "b", Network: netip.MustParsePrefix("10.0.0.0/8"), Revision: 7}},
		{{Network: netip.MustParsePrefix("10.0.0.0/8"), Revision: 1764288000000}, {Object: "b", Network: netip.MustParsePrefix("10.0.0.0/8"), Revision: 3}, {Object: "c", Network: netip.MustParsePrefix("fd00::/48")}}} {
		text, err := json.Marshal(snapshot{snapshotVersion, list})
		if err != nil {
			t.Fatal(err)
		}
		var got snapshot
		if err := json.Unmarshal(text, &got); err != nil || !slices.Equal(got.Refused, list) {
			t.Errorf("%s: %v, %v; want %v", text, got, err, list)
		}
	}
}

// An agent that cannot read the refused networks from the kernel must not compare: it would stop
// refusing the networks that no object names.
func TestAgentEndsIfItCannotReadRefusedNetworks(t *testing.T) {
	l, p := &loop{}, netip.MustParsePrefix("10.200.0.0/16")
	if err := l.restore(func() ([]netip.Prefix, error) { return []netip.Prefix{p}, nil }); err != nil || !slices.Equal(l.allocations.known, unexplained([]netip.Prefix{p})) {
		t.Errorf("%v, %v", l.allocations.known, err)
	}
	if err := l.restore(func() ([]netip.Prefix, error) { return nil, errors.New("interrupted") }); err == nil || err.Error() != "networks that an earlier agent refused: interrupted" {
		t.Error(err)
	}
	l.allocations = allocations{}
	l.allocations.hold([]fabric.Allocation{{Object: "b", Network: p, Revision: 7}}) // as from the snapshot
	if err := l.restore(func() ([]netip.Prefix, error) { return []netip.Prefix{p}, nil }); err != nil || len(l.allocations.known) != 1 {
		t.Errorf("explained: %v, %v", l.allocations.known, err)
	}
}
