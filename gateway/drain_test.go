package gateway

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// A gateway that ends keeps running while nodes or peers still send to it.
func TestDrainWaitsUntilNodesAndPeersSendNothing(t *testing.T) {
	for _, direction := range []natengine.Direction{natengine.Outbound, natengine.Inbound} {
		synctest.Test(t, func(t *testing.T) {
			g := &gateway{engine: natengine.New(natengine.Config{Self4: netip.MustParseAddr("169.254.0.1")})}
			if err := g.engine.SetPeers([]natengine.Peer{{ID: "b", RemotePods: []netip.Prefix{netip.MustParsePrefix("10.71.0.0/16")}}}); err != nil {
				t.Fatal(err)
			}
			peer := g.engine.Peer("b")
			begin := time.Now()
			go func() {
				for range 10 {
					time.Sleep(100 * time.Millisecond)
					peer.CountTraffic(direction, 1, 100)
				}
			}()
			g.drain()
			if took := time.Since(begin); took < time.Second+drainQuiet || took > time.Second+drainQuiet+2*drainLook {
				t.Errorf("%v: it ended after %v; want it a quarter of a second after the last packet, at 1 s", direction, took)
			}
		})
	}
}
