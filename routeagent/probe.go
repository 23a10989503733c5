package routeagent

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/overlay"
)

// Intervals between the agent's probes. Only tests change them.
var (
	probeInterval = overlay.Interval
	probeAgain    = overlay.RetryInterval
)

// OverlayStatus is the result of probing the path to a gateway through the overlay; see package
// overlay. The probe is a datagram to a peer's network with a TTL of one hop. It takes the same
// path as all packets for peers, and expires at the gateway, before the tunnel.
type OverlayStatus struct {
	Gateway netip.Addr `json:"gateway"`
	overlay.State
	// Back is the path from the gateway to the node.
	Back overlay.State `json:"back,omitzero"`
}

// fails reports whether the path is broken in at least one direction, and since when.
func (s OverlayStatus) fails() (since time.Time, broken bool) {
	switch {
	case s.Broken:
		return s.Since, true
	case s.Back.Broken:
		return s.Back.Since, true
	}
	return time.Time{}, false
}

// problem describes the failure in a sentence for users.
func (s OverlayStatus) problem() string {
	if !s.Broken {
		return fmt.Sprintf("packets of this node's pods reach the gateway at %v over the overlay, but no packets come back (noticed at %s): if peers are connected, the network from the gateway's node to this node drops VXLAN; allow UDP %d between nodes",
			s.Gateway, s.Back.Since.UTC().Format("15:04:05 UTC"), kernel.OverlayPort)
	}
	return fmt.Sprintf("this node reaches the gateway at %v over the underlay, but not over the overlay (noticed at %s): the network between this node and the gateway's node drops VXLAN; allow UDP %d between nodes",
		s.Gateway, s.Since.UTC().Format("15:04:05 UTC"), kernel.OverlayPort)
}

// probeTarget returns the gateway to probe, and an IPv4 address of the nth peer behind that
// gateway.
func probeTarget(in *fabric.NodeIntent, nth int) (gateway, remote netip.Addr, ok bool) {
	var remotes []netip.Addr
	if gateway = in.Gateway; gateway.Is4() {
		for _, n := range in.Named {
			if n.Network.Addr().Is4() {
				remotes = append(remotes, n.Network.Addr().Next())
			}
		}
	} else {
		for _, t := range in.Tunnels {
			remote := t.Peer.Remote.PodSeen.Addr().Next()
			if !t.Gateway.Is4() || !remote.Is4() || len(remotes) > 0 && t.Gateway != gateway {
				continue
			}
			gateway, remotes = t.Gateway, append(remotes, remote)
		}
	}
	if len(remotes) == 0 {
		return netip.Addr{}, netip.Addr{}, false
	}
	return gateway, remotes[nth%len(remotes)], true
}

// A backProbe detects whether packets from the gateway reach the node.
type backProbe struct {
	received, sent uint64 // packet counters of the overlay device at the last call of suspects
	own            uint64 // number of our own datagrams since that call

	// answering has addresses of peers whose gateways have answered, the most recent last. If
	// another peer does not answer, this proves nothing, because Liqo's gateway need not answer.
	// Several peers are probed, because one may be offline.
	answering []netip.Addr
}

// backPeers is the maximum number of peers in answering, and so in one round of probes.
const backPeers = 8

// targets returns the peers to probe. If suspected is true, these are the peers that have answered
// before. Otherwise targets returns only the peer at the address remote, or no peer if that one has
// answered before.
func (p *backProbe) targets(suspected bool, remote netip.Addr) []netip.Addr {
	switch {
	case suspected:
		return p.answering
	case slices.Contains(p.answering, remote):
		return nil
	}
	return []netip.Addr{remote}
}

// answered records that a peer has answered.
func (p *backProbe) answered(remote netip.Addr) {
	p.answering = append(slices.DeleteFunc(p.answering, func(a netip.Addr) bool { return a == remote }), remote)
	p.answering = p.answering[max(0, len(p.answering)-backPeers):]
}

// suspects returns true if, since its last call, pods have sent packets through the overlay but
// none has come back, although packets came back earlier. The cause is one-way traffic or a fault.
func (p *backProbe) suspects(received, sent uint64) bool {
	silent := received == p.received && received > 0 && sent > p.sent+p.own
	p.received, p.sent, p.own = received, sent, 0
	return silent
}

// probe sends each peer two datagrams, with TTL 2 and TTL 3. If our gateway is a Pod, it is one
// hop, and the datagram with TTL 2 expires at the peer's gateway. If our gateway uses the host
// network, it is two hops, and the datagram with TTL 3 expires there. probe reports whether any
// answer came through the overlay.
func (p *backProbe) probe(ctx context.Context, remotes []netip.Addr, device int) (answered bool) {
	all := slices.Clone(remotes)
	byPeer := make([]bool, len(all))
	var group sync.WaitGroup
	for i, remote := range all {
		group.Go(func() {
			near, far := overlay.Round(ctx, overlay.Datagram{To: remote, TTL: 2, By: device}, overlay.Datagram{To: remote, TTL: 3, By: device})
			byPeer[i] = near != overlay.NoAnswer || far
		})
	}
	group.Wait()
	p.own += 2 * uint64(len(all))
	for i, remote := range all {
		if byPeer[i] {
			p.answered(remote)
			answered = true
		}
	}
	return answered
}

// probeOverlay regularly probes whether packets reach the gateway, and whether packets come back
// from it, until ctx ends.
func (a *agent) probeOverlay(ctx context.Context) {
	var p OverlayStatus
	var back backProbe
	nth := 0 // number of the next peer to probe
	for wait := rand.N(probeAgain); sleep(ctx, wait); {
		wait = probeInterval/2 + rand.N(probeInterval)
		var gateway, remote netip.Addr
		a.mu.Lock()
		ok := a.intent != nil && a.state.err == nil && a.state.revision != 0
		if ok {
			gateway, remote, ok = probeTarget(a.intent, nth)
		}
		a.mu.Unlock()
		if gateway != p.Gateway {
			p = OverlayStatus{Gateway: gateway}
		}
		if ok {
			_, was := p.fails()
			began := time.Now()
			answer, control := overlay.Round(ctx, overlay.Datagram{To: remote, TTL: 1}, overlay.Datagram{To: gateway})
			p.Take(began, answer != overlay.NoAnswer, control)
			back.own++
			arrives := true
			// Any other answer shows that our gateway has no tunnel to that peer. The peer could
			// then not answer.
			if index, received, sent, err := rtnl.Counters(kernel.OverlayDevice); err == nil && answer == overlay.Expired {
				more := received != back.received
				suspected := back.suspects(received, sent) || p.Back.Doubted() && !more
				targets := back.targets(suspected, remote)
				switch answered := back.probe(ctx, targets, index); {
				case answered, p.Back.Doubted() && more:
					p.Back.Take(began, true, true)
				case suspected && len(targets) > 0:
					arrives = false
					p.Back.Take(began, false, true)
				}
			}
			switch _, broken := p.fails(); {
			case broken && !was:
				a.log.Error("cannot reach the gateway through the overlay", "problem", p.problem())
			case was && !broken:
				a.log.Info("gateway is reachable through the overlay again", "gateway", gateway)
			}
			if answer == overlay.NoAnswer || !arrives {
				wait = probeAgain
			} else {
				nth++
			}
		}
		a.mu.Lock()
		_, was := a.overlay.fails()
		_, broken := p.fails()
		changed := was != broken || a.overlay.Broken != p.Broken
		a.overlay = p
		a.mu.Unlock()
		if changed {
			set(a.moved) // the node's report contains the state of the overlay
		}
	}
}
