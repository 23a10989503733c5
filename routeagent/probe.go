package routeagent

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/overlay"
)

// How often. Only tests change it.
var (
	probeInterval = overlay.Interval
	probeAgain    = overlay.Again
)

// OverlayStatus is what is known of the way to a gateway through the overlay, see package overlay. The
// datagram by the overlay is for a network of a peer and lives for one hop: it takes the way of all
// packets for peers, rules and routes included, and ends where the overlay does, in the gateway's
// network. Nothing of it reaches a tunnel.
type OverlayStatus struct {
	Gateway netip.Addr `json:"gateway"`
	overlay.State
}

// problem is a sentence for people.
func (s OverlayStatus) problem() string {
	return fmt.Sprintf("the gateway at %v is not reached through the overlay since %s, but is by the underlay: something between this node and that of the gateway drops VXLAN; let UDP 4800 pass between nodes",
		s.Gateway, s.Since.UTC().Format("15:04:05 UTC"))
}

// probeTarget is the gateway to probe and an address of a peer behind it, in IPv4.
func probeTarget(in *fabric.NodeIntent) (gateway, remote netip.Addr, ok bool) {
	if in.Gateway.Is4() {
		for _, p := range in.Granted {
			if p.Addr().Is4() {
				return in.Gateway, p.Addr().Next(), true
			}
		}
		return gateway, remote, false
	}
	for _, t := range in.Tunnels {
		if remote = t.Peer.Remote.PodSeen.Addr().Next(); t.Gateway.Is4() && remote.Is4() {
			return t.Gateway, remote, true
		}
	}
	return gateway, remote, false
}

// probeOverlay looks from time to time whether the gateway is reached, until ctx ends.
func (a *agent) probeOverlay(ctx context.Context) {
	var p OverlayStatus
	for wait := rand.N(probeAgain); sleep(ctx, wait); {
		wait = probeInterval/2 + rand.N(probeInterval)
		var gateway, remote netip.Addr
		a.mu.Lock()
		ok := a.intent != nil && a.state.err == nil && a.state.revision != 0
		if ok {
			gateway, remote, ok = probeTarget(a.intent)
		}
		a.mu.Unlock()
		if gateway != p.Gateway {
			p = OverlayStatus{Gateway: gateway}
		}
		if ok {
			was, began := p.Broken, time.Now()
			answered, control := overlay.Round(ctx, overlay.Datagram{To: remote, TTL: 1}, overlay.Datagram{To: gateway})
			p.Take(began, answered, control)
			switch {
			case p.Broken && !was:
				a.log.Error("overlay", "problem", p.problem())
			case was && !p.Broken:
				a.log.Info("the gateway is reached through the overlay again", "gateway", gateway)
			}
			if !answered {
				wait = probeAgain
			}
		}
		a.mu.Lock()
		news := a.overlay.Broken != p.Broken
		a.overlay = p
		a.mu.Unlock()
		if news {
			set(a.moved) // the manager is told
		}
	}
}
