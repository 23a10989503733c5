package gateway

import (
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// Limits of the time for which a gateway in a Pod continues to run after SIGTERM.
const (
	drainMost = 3 * time.Second // upper limit
	// drainQuiet ends the wait early: if no packet has come from nodes or peers for this long, they
	// already use another gateway.
	drainQuiet = 250 * time.Millisecond
	drainLook  = 50 * time.Millisecond
)

// After yield, the gateway no longer encrypts packets for peers. It relays them to the gateway that
// becomes active. When yield returns, no packet is on its way to a peer.
func (g *gateway) yield() {
	if g.keeper == nil {
		return
	}
	g.yielding.Do(func() {
		for i, e := range g.tunnels {
			e.Divert(func(p []byte) {
				g.relayed.Add(1)
				if !g.keeper.Relay(i, p) {
					g.engine.Count(nil, natengine.Outbound, natengine.DropNoMandate)
				}
			})
		}
	})
}

// drain waits until no more packets come from nodes and peers (drainQuiet), or until drainMost
// has passed.
func (g *gateway) drain() {
	begin := time.Now()
	sent, since := uint64(0), begin
	for time.Since(begin) < drainMost && time.Since(since) < drainQuiet {
		now := g.relayed.Load()
		for _, p := range g.engine.Peers() {
			out, _ := p.Traffic(natengine.Outbound)
			in, _ := p.Traffic(natengine.Inbound)
			now += out + in
		}
		if now != sent {
			sent, since = now, time.Now()
		}
		time.Sleep(drainLook)
	}
}
