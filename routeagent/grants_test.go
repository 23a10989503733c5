package routeagent

import (
	"encoding/json"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// A network of a peer goes with books of a higher edition that lack it, and with nothing else.
func TestANetworkGoesWhenTheManagerTakesItBackAndNotBefore(t *testing.T) {
	a, b := netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.250.16.0/20")
	type books struct {
		named   []netip.Prefix
		edition int64
	}
	both, none := []netip.Prefix{a, b}, []netip.Prefix{}
	for name, tc := range map[string]struct {
		left    []netip.Prefix // by an agent before, of that edition
		edition int64
		read    []books
		want    []netip.Prefix
		told    bool // that books lack something
	}{
		"taken back":                                      {read: []books{{both, 7}, {both[:1], 8}}, want: both[:1]},
		"edited out":                                      {read: []books{{both, 7}, {both[:1], 7}}, want: both, told: true},
		"emptied":                                         {read: []books{{both, 7}, {none, 7}}, want: both, told: true},
		"emptied with the edition":                        {read: []books{{both, 7}, {none, 0}}, want: both, told: true},
		"deleted":                                         {read: []books{{both, 7}, {nil, 0}}, want: both},
		"deleted and made anew by hand":                   {read: []books{{both, 7}, {nil, 0}, {none, 0}}, want: both, told: true},
		"an older backup":                                 {read: []books{{both, 7}, {none, 3}}, want: both, told: true},
		"an older backup, then back":                      {read: []books{{both, 7}, {none, 3}, {both, 7}}, want: both},
		"edited out, then all are taken back":             {read: []books{{both, 7}, {both[:1], 7}, {none, 8}}},
		"taken back and given again":                      {read: []books{{both, 7}, {none, 8}, {both, 8}, {none, 8}}, want: both, told: true},
		"granted":                                         {read: []books{{none, 7}, {both, 7}}, want: both},
		"left, and taken back since":                      {left: both, edition: 7, read: []books{{none, 8}}},
		"left, and edited out since":                      {left: both, edition: 7, read: []books{{both[1:], 7}}, want: both, told: true},
		"left, nobody knows when":                         {left: both, edition: unknownEdition, read: []books{{both[1:], 7}}, want: both, told: true},
		"left, nobody knows when, and taken back":         {left: both, edition: unknownEdition, read: []books{{both[1:], 7}, {both[1:], 8}}, want: both[1:]},
		"left, nobody knows when, and there are no books": {left: both, edition: unknownEdition, read: []books{{nil, 0}}, want: both},
		"a manager without editions":                      {read: []books{{both, 0}, {both[:1], 0}}, want: both[:1]},
		"left, and a manager without editions":            {left: both, edition: unknownEdition, read: []books{{both[1:], 0}}, want: both[1:]},
		"an older manager than before":                    {read: []books{{both, 7}, {both, 0}, {both[:1], 0}}, want: both, told: true},
		"no books ever":                                   {read: []books{{nil, 0}}},
	} {
		var g grants
		if tc.left != nil {
			g.hold(tc.left, tc.edition)
		}
		told := false
		for range 2 { // reading the same again changes nothing
			for i, r := range tc.read {
				told = len(g.read(r.named, r.edition)) > 0
				if again := len(g.read(r.named, r.edition)) > 0; again != told {
					t.Errorf("%s: reading %d again says another thing", name, i)
				}
			}
			tc.read = tc.read[max(len(tc.read)-1, 0):]
		}
		if !slices.Equal(g.networks, tc.want) || told != tc.told {
			t.Errorf("%s: %v, told %v; want %v, told %v", name, g.networks, told, tc.want, tc.told)
		}
	}
}

// What the kernel refuses and the snapshot does not explain is of any age.
func TestTheEditionOfASnapshotIsThatOfWhatItExplains(t *testing.T) {
	a, b := netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.250.16.0/20")
	for name, tc := range map[string]struct {
		saved snapshot
		left  []netip.Prefix
		want  int64
	}{
		"a reboot":                    {snapshot{Refused: []netip.Prefix{a, b}, Edition: 7}, nil, 7},
		"a restart":                   {snapshot{Refused: []netip.Prefix{a, b}, Edition: 7}, []netip.Prefix{b, a}, 7},
		"the kernel has more":         {snapshot{Refused: []netip.Prefix{a}, Edition: 7}, []netip.Prefix{a, b}, unknownEdition},
		"the snapshot is empty":       {snapshot{Edition: 7}, []netip.Prefix{b}, unknownEdition},
		"an older agent's":            {snapshot{Refused: []netip.Prefix{a}}, nil, unknownEdition},
		"an older agent's, and empty": {snapshot{}, nil, 0},
		"far ahead of the clock":      {snapshot{Refused: []netip.Prefix{a}, Edition: 1<<62 - 1}, []netip.Prefix{a}, unknownEdition},
	} {
		if got := tc.saved.edition(tc.left, time.Now()); got != tc.want {
			t.Errorf("%s: %d, want %d", name, got, tc.want)
		}
	}
}

func TestASnapshotIsTheJSONOfItsNetworks(t *testing.T) {
	for _, list := range [][]netip.Prefix{nil, {netip.MustParsePrefix("10.0.0.0/8")}, {netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/48")}} {
		want, err := json.Marshal(append([]netip.Prefix{}, list...))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := json.Marshal(networks(list)); err != nil || string(got) != string(want) {
			t.Errorf("%s, %v; want %s", got, err, want)
		}
	}
}
