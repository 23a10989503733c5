package control

import "testing"

func TestTwoClustersPeer(t *testing.T) {
	sites := newSites(t, "10.244.0.0/16", "10.128.0.0/14")
	for _, s := range sites {
		s.startManager()
	}
	peer(t, sites[0], sites[1])
	unpeer(t, sites[0], sites[1])
}
