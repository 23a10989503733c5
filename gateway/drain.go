package gateway

import (
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// How long a gateway in a Pod goes on at its end.
const (
	drainMost  = 3 * time.Second        // whatever comes
	drainQuiet = 250 * time.Millisecond // when neither nodes nor peers have sent anything for so long: they have followed another gateway
	drainLook  = 50 * time.Millisecond
)

// yield relays what nodes send to peers to the gateway that is active next, instead of sending it. When yield returns, nothing
// is under way to a peer.
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

// drain carries on until nodes and peers have followed another gateway, or send nothing anyway.
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
