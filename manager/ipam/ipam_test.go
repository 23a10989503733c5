package ipam

import (
	"net/netip"
	"testing"
)

func pfx(s string) netip.Prefix {
	if s == "" {
		return netip.Prefix{}
	}
	return netip.MustParsePrefix(s)
}

func liqoDefaults() Config { return Config{PodCIDR: pfx("10.244.0.0/16"), ServiceCIDR: pfx("10.96.0.0/12")} }

// The sequences of the Liqo facts, section 5.
func TestGrantFollowsTheSequencesSeenWithLiqo(t *testing.T) {
	for _, tc := range []struct {
		config Config
		claims [][2]string
		want   []string // ExternalCIDR, then pod and external network of each peer
	}{
		{liqoDefaults(), [][2]string{{"10.244.0.0/16", "10.245.0.0/16"}, {"10.244.0.0/16", "10.245.0.0/16"}},
			[]string{"10.245.0.0/16", "10.246.0.0/16", "10.247.0.0/16", "10.240.0.0/16", "10.241.0.0/16"}},
		{Config{PodCIDR: pfx("10.200.0.0/16"), ServiceCIDR: pfx("10.96.0.0/12")}, [][2]string{{"10.200.0.0/16", "10.201.0.0/16"}},
			[]string{"10.201.0.0/16", "10.202.0.0/16", "10.203.0.0/16"}},
		// Nothing overlaps: used as they are, in a pool and outside of all.
		{liqoDefaults(), [][2]string{{"10.50.0.0/16", "10.51.0.0/16"}, {"100.64.0.0/18", "192.0.2.0/24"}},
			[]string{"10.245.0.0/16", "10.50.0.0/16", "10.51.0.0/16", "100.64.0.0/18", "192.0.2.0/24"}},
		// A whole pool is remapped if possible, otherwise used whole.
		{liqoDefaults(), [][2]string{{"192.168.0.0/16", "10.0.0.0/8"}}, []string{"10.245.0.0/16"}},
		{liqoDefaults(), [][2]string{{"192.168.0.0/16", "172.16.0.0/12"}}, []string{"10.245.0.0/16", "10.246.0.0/16", "10.112.0.0/12"}},
	} {
		b, conflicts := Book{}.Configure(tc.config)
		if len(conflicts) > 0 {
			t.Errorf("%v: conflicts %v", tc.config, conflicts)
		}
		got := []string{b.Own().ExternalCIDR.String()}
		for i, c := range tc.claims {
			next, g, err := b.Grant(Claim{ID: string(rune('a' + i)), Pod: pfx(c[0]), External: pfx(c[1])})
			if err != nil {
				t.Log(err)
				continue
			}
			b, got = next, append(got, g.Pod.String(), g.External.String())
		}
		if len(got) != len(tc.want) {
			t.Errorf("claims %v: got %v, want %v", tc.claims, got, tc.want)
			continue
		}
		for i := range got {
			if got[i] != tc.want[i] {
				t.Errorf("claims %v: got %v, want %v", tc.claims, got, tc.want)
				break
			}
		}
	}
}
