package gateway

import (
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// How long a gateway in a Pod goes on after it was asked to end.
const (
	drainMost = 3 * time.Second // in any case
	// without packets from nodes and peers: they have followed another gateway
	drainQuiet = 250 * time.Millisecond
	drainLook  = 50 * time.Millisecond
)

// yield relays packets for peers to the gateway that becomes active, instead of sending them. When
// yield returns, no packet is on its way to a peer.
func (g *gateway) yield() {
	if g.keeper == nil {
		return
	}
	g.yielding.Do(func() {
		for i, e := range g.ends {
			e.Divert(func(p []byte) {
				g.relayed.Add(1)
				if !g.keeper.Relay(i, p) {
					g.engine.Count(nil, natengine.Outbound, natengine.DropNoMandate)
				}
			})
		}
	})
}

// drain delays the end until nodes and peers follow another gateway, or send nothing.
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
