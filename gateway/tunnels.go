package gateway

import (
	"encoding/base64"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/inline"
	"github.com/isthmus-net/isthmus/gateway/tun"
)

// A peer that knows several tunnels has its flows shared out among them. Each is a whole way of its own, so that packets
// of different flows meet nowhere but in the NAT engine, which has no lock that they share:
//
//	              ┌─ TUN isthmus0 ─ path ─ transport, key 0 ─ UDP 5871 ══ tunnel 0 of the peer
//	kernel's hash ┤
//	of the flow   └─ TUN isthmus1 ─ path ─ transport, key 1 ─ UDP 5872 ══ tunnel 1 of the peer
//
// The first is used in any case. A further one is used while it is known to work, which each side finds out for itself:
// the two need not learn of it at the same moment, nor open their firewalls for it.
const (
	// furtherKeepalive is how often a further tunnel is made to say something. What the first one has the connection check
	// for, to open a session and to notice its end, these have keepalives for.
	furtherKeepalive = 5 * time.Second
	// furtherSilence is without a message for how long a further tunnel is left.
	furtherSilence = 3*furtherKeepalive + time.Second
)

// tunnelEnd is our end of one tunnel to each peer.
type tunnelEnd struct {
	*tunnel
	path   *datapath.Device
	inline *inline.Transport // nil: everything goes through the tunnel's device
}

// openEnds makes the TUNs and what is behind them, which listens to nobody yet. The first path carries the in-process
// endpoint. What was made when there is an error, close closes.
func (g *gateway) openEnds(o Options, tunnels, mtu int, local *datapath.Local) error {
	g.host.tunnels = tunnels
	for i := range tunnels {
		var link *tun.Device
		err := g.host.inside(func() (err error) {
			link, err = tun.Open(tunName(i), mtu, tun.Options{USO: o.UDPOffload})
			return err
		})
		if err != nil {
			return err
		}
		e := new(tunnelEnd)
		if i == 0 {
			e.path = datapath.New(link, g.engine, local, datapath.Options{CoalesceUDP: link.Offloads().USO4})
		} else {
			e.path = g.ends[0].path.Beside(link)
		}
		tunSide, socketSide, inline := openTransport(o.Transport, e.path, g.engine, o.Log)
		e.tunnel, e.inline = newTunnel(tunSide, socketSide, o.Log), inline
		if inline != nil {
			inline.Attach(e.dev)
		}
		g.ends = append(g.ends, e)
	}
	return nil
}

// startEnds opens the sockets.
func (g *gateway) startEnds(c Config) error {
	for i, e := range g.ends {
		if err := e.start(fabric.TunnelKey(c.PrivateKey, i), c.ListenPort+uint16(i)); err != nil {
			return err
		}
	}
	return nil
}

// closeEnds closes the first last, since the in-process endpoint goes with it.
func (g *gateway) closeEnds() {
	for _, e := range slices.Backward(g.ends) {
		e.close()
	}
}

// watchEnds says on the channel when a TUN is gone, and which.
func (g *gateway) watchEnds() <-chan string {
	gone := make(chan string, len(g.ends))
	for i, e := range g.ends {
		go func() { // ends with the device
			<-e.dev.Wait()
			gone <- tunName(i)
		}()
	}
	return gone
}

// wantEnd is what WireGuard should be at our end i.
func (g *gateway) wantEnd(i int, c Config, peers []fabric.GatewayPeer) wgConfig {
	want := wgConfig{privateKey: fabric.TunnelKey(c.PrivateKey, i), listenPort: c.ListenPort + uint16(i)}
	for _, p := range peers {
		theirs, ok := theirEnd(p, i)
		if !ok {
			continue
		}
		at, _ := g.resolver.endpoint(p.ID) // the resolver has logged its error
		if at.IsValid() {
			at = netip.AddrPortFrom(at.Addr(), theirs.Port)
		}
		want.peers = append(want.peers, wgPeerFor(theirs.PublicKey, at, p.AllowedIPs))
	}
	return want
}

// theirEnd is a peer's end of tunnel i.
func theirEnd(p fabric.GatewayPeer, i int) (fabric.TunnelEnd, bool) {
	if i == 0 {
		return fabric.TunnelEnd{PublicKey: p.PublicKey, Port: p.Port}, true
	}
	if i > len(p.Tunnels) {
		return fabric.TunnelEnd{}, false
	}
	return p.Tunnels[i-1], true
}

// applyEnds makes WireGuard at all our ends what it should be, and tells the transports.
func (g *gateway) applyEnds(c Config, peers []fabric.GatewayPeer) (errs []error) {
	for i, e := range g.ends {
		if err := e.apply(g.wantEnd(i, c, peers)); err != nil {
			errs = append(errs, err)
		}
		if e.inline != nil {
			e.inline.SetPeers(g.transportPeers(i, peers))
		}
	}
	return errs
}

// transportPeers says whose key each peer of the engine has in tunnel i.
func (g *gateway) transportPeers(i int, peers []fabric.GatewayPeer) (list []inline.Peer) {
	keys := make(map[string][32]byte, len(peers))
	for _, p := range peers {
		if theirs, ok := theirEnd(p, i); ok {
			keys[p.ID] = theirs.PublicKey
		}
	}
	for _, state := range g.engine.Peers() {
		if key, ok := keys[state.ID()]; ok {
			list = append(list, inline.Peer{State: state, Key: key})
		}
	}
	return list
}

// further is what is known of a further tunnel to a peer. It is never modified after it is published in current.
type further struct {
	key   [32]byte
	stats wgStats
	rxAt  time.Time // when stats.rx last grew
	asked time.Time // when it was last made to say something
	inUse bool
}

// after is the same a moment later.
func (f further) after(stats wgStats, now time.Time) further {
	if stats.rx != f.stats.rx {
		f.rxAt = now
	}
	f.stats = stats
	f.inUse = !stats.handshake.IsZero() && now.Sub(f.rxAt) < furtherSilence
	return f
}

func (f further) status(tunnel int, now time.Time) TunnelStatus {
	s := TunnelStatus{Tunnel: tunnel, InUse: f.inUse, PublicKey: base64.StdEncoding.EncodeToString(f.key[:]),
		Receive: f.stats.rx, Transmit: f.stats.tx}
	if f.stats.endpoint.IsValid() {
		s.Endpoint = f.stats.endpoint.String()
	}
	if !f.stats.handshake.IsZero() {
		s.HandshakeAge = now.Sub(f.stats.handshake).Seconds()
	}
	return s
}

// tickFurther looks after the further tunnels, once a second, and says whether others are in use now.
func (g *gateway) tickFurther(now time.Time) (changed bool) {
	if len(g.ends) == 1 {
		return false
	}
	all := make(map[string][]further)
	for i, e := range g.ends[1:] {
		stats, err := e.stats()
		if err != nil {
			g.log.Error("peers not read", "tunnel", i+1, "error", err)
			continue
		}
		for _, p := range g.now.gateway.Peers {
			if i >= len(p.Tunnels) {
				continue
			}
			var f further
			if old := g.now.further[p.ID]; i < len(old) && old[i].key == p.Tunnels[i].PublicKey {
				f = old[i]
			}
			f.key = p.Tunnels[i].PublicKey
			next := f.after(stats[f.key], now)
			if dev := e.dev.LookupPeer(device.NoisePublicKey(f.key)); dev != nil && now.Sub(f.asked) >= furtherKeepalive {
				next.asked = now
				dev.SendKeepalive() // without a session it begins a handshake
			}
			if next.inUse != f.inUse {
				changed = true
				g.log.Info("further tunnel to peer", "peer", p.ID, "tunnel", i+1, "inUse", next.inUse)
			}
			all[p.ID] = append(all[p.ID], next)
		}
	}
	g.mu.Lock()
	g.now.further = all
	g.mu.Unlock()
	return changed
}

// inUse is the set of further tunnels that work.
func inUse(tunnels []further) (set tunnelSet) {
	for i, f := range tunnels {
		if f.inUse {
			set = set.with(i + 1)
		}
	}
	return set
}

// remotes are the networks behind the tunnels, and by which further ones each is reached.
func remotes(peers []fabric.GatewayPeer, known map[string][]further) (all []remote) {
	for _, p := range peers {
		more := inUse(known[p.ID])
		for _, prefix := range p.AllowedIPs {
			all = append(all, remote{prefix, more})
		}
	}
	return all
}

// wireGuardStats are those of all tunnels to each peer, by the key of its first one: octets of all of them, everything else of the
// first.
func (g *gateway) wireGuardStats(peers []fabric.GatewayPeer) (map[[32]byte]wgStats, error) {
	all, err := g.ends[0].stats()
	if err != nil {
		return nil, err
	}
	for i, e := range g.ends[1:] {
		more, err := e.stats()
		if err != nil {
			return nil, err
		}
		for _, p := range peers {
			if i < len(p.Tunnels) {
				sum, s := all[p.PublicKey], more[p.Tunnels[i].PublicKey]
				sum.rx, sum.tx = sum.rx+s.rx, sum.tx+s.tx
				all[p.PublicKey] = sum
			}
		}
	}
	return all, nil
}

// cutTunnels leaves each peer those further tunnels that we have an end for.
func (g *gateway) cutTunnels(peers []fabric.GatewayPeer) []fabric.GatewayPeer {
	peers = slices.Clone(peers)
	for i := range peers {
		peers[i].Tunnels = peers[i].Tunnels[:min(len(peers[i].Tunnels), len(g.ends)-1)]
	}
	return peers
}
