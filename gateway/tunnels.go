package gateway

import (
	"bytes"
	"encoding/base64"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/bind"
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
// The first is used in any case. A further one is used while its own connection check is answered, which each side finds
// out for itself: the two need not learn of it at the same moment, nor open their firewalls for it.

// furtherThreshold is less than Liqo's for the first tunnel, since flows have another way to go.
const furtherThreshold = 2

// tunnelEnd is our end of one tunnel to each peer.
type tunnelEnd struct {
	*tunnel
	path    *datapath.Device
	inline  *inline.Transport // nil: everything goes through the tunnel's device
	checker *checker
}

// openEnds makes the TUNs and what is behind them, which listens to nobody yet. What was made when there is an error,
// closeEnds closes.
func (g *gateway) openEnds(o Options, tunnels, mtu int) error {
	g.host.tunnels = tunnels
	for i := range tunnels {
		e, err := g.openEnd(o, i, mtu)
		if err != nil {
			return err
		}
		g.ends = append(g.ends, e)
	}
	return nil
}

func (g *gateway) openEnd(o Options, i, mtu int) (_ *tunnelEnd, err error) {
	local, err := datapath.NewLocal(fabric.GatewayAddr, fabric.GatewayAddr6, mtu)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			local.Close()
		}
	}()
	socket, err := local.ListenUDP(fabric.ProbePort)
	if err != nil {
		return nil, err
	}
	var link *tun.Device
	err = g.host.inside(func() (err error) {
		link, err = tun.Open(tunName(i), mtu, tun.Options{USO: o.UDPOffload})
		return err
	})
	if err != nil {
		return nil, err
	}
	e := new(tunnelEnd)
	log, observe := o.Log, g.metrics.observeRTT
	if i == 0 {
		g.udpOffload = link.Offloads().USO4
		e.path = datapath.New(link, g.engine, local, datapath.Options{CoalesceUDP: g.udpOffload})
	} else {
		e.path = g.ends[0].path.Beside(link, local)
		log, observe = log.With("tunnel", i), func(string, time.Duration) {}
	}
	wire := bind.New()
	makeInline := func() (*inline.Transport, error) { return newInline(e.path, wire, g.engine) }
	tunSide, socketSide, short := openTransport(o.Transport, e.path, wire, makeInline, log)
	e.tunnel, e.inline = newTunnel(tunSide, socketSide, log), short
	if short != nil {
		short.Attach(e.dev)
	}
	e.checker = newChecker(socket, log, observe)
	return e, nil
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

// closeEnds closes the devices, and with them TUNs and in-process endpoints.
func (g *gateway) closeEnds() {
	for _, e := range g.ends {
		e.checker.close()
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

// applyEnds makes WireGuard at all our ends what it should be, and tells transports and then connection checks: the first
// PING goes out at once, and would be lost on a device that does not know its peer yet.
func (g *gateway) applyEnds(c Config, peers []fabric.GatewayPeer) (errs []error) {
	for i, e := range g.ends {
		if err := e.apply(g.wantEnd(i, c, peers)); err != nil {
			errs = append(errs, err)
		}
		if e.inline != nil {
			e.inline.SetPeers(g.transportPeers(i, peers))
		}
		e.checker.set(checkPeers(i, c, peers))
	}
	return errs
}

// checkPeers are the peers that have tunnel i, for its connection check.
func checkPeers(i int, c Config, peers []fabric.GatewayPeer) (all []checkPeer) {
	own := publicKey(fabric.TunnelKey(c.PrivateKey, i))
	for _, p := range peers {
		if theirs, ok := theirEnd(p, i); ok {
			second := bytes.Compare(own, theirs.PublicKey[:]) > 0 // the peer decides the other way round
			check := checkPeer{id: p.ID, probe: p.Probe, allowed: p.AllowedIPs, key: theirs.PublicKey,
				endpoint: p.Endpoint, port: theirs.Port, second: second}
			if i > 0 {
				check.threshold = furtherThreshold
			}
			all = append(all, check)
		}
	}
	return all
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

// further is what is known of a further tunnel to a peer.
type further struct {
	key   [32]byte
	check CheckResult
	stats wgStats
	inUse bool // the kernel gives it its share of the flows
}

func (f further) status(tunnel int, now time.Time) TunnelStatus {
	s := TunnelStatus{Tunnel: tunnel, State: f.check.State, InUse: f.inUse, PublicKey: base64.StdEncoding.EncodeToString(f.key[:]),
		RTT: f.check.RTT.Seconds(), Loss: f.check.Loss, Receive: f.stats.rx, Transmit: f.stats.tx}
	if f.stats.endpoint.IsValid() {
		s.Endpoint = f.stats.endpoint.String()
	}
	if !f.stats.handshake.IsZero() {
		s.HandshakeAge = now.Sub(f.stats.handshake).Seconds()
	}
	return s
}

// furtherTunnels is what is known of the further tunnels to each peer, by ID, tunnel 1 first.
func (g *gateway) furtherTunnels(now current) (map[string][]further, error) {
	all := make(map[string][]further)
	for i, e := range g.ends[1:] {
		stats, err := e.stats()
		if err != nil {
			return nil, err
		}
		checks := e.checker.results()
		for _, p := range now.gateway.Peers {
			if i < len(p.Tunnels) {
				key := p.Tunnels[i].PublicKey
				all[p.ID] = append(all[p.ID], further{key, checks[p.ID], stats[key], now.inUse[p.ID].has(i + 1)})
			}
		}
	}
	return all, nil
}

// working are the further tunnels that work, by peer.
func (g *gateway) working() map[string]tunnelSet {
	sets := make(map[string]tunnelSet)
	for i, e := range g.ends[1:] {
		for id, r := range e.checker.results() {
			if r.State == Connected {
				sets[id] = sets[id].with(i + 1)
			}
		}
	}
	return sets
}

// remotes are the networks behind the tunnels, and by which further ones each is reached.
func remotes(peers []fabric.GatewayPeer, inUse map[string]tunnelSet) (all []remote) {
	for _, p := range peers {
		for _, prefix := range p.AllowedIPs {
			all = append(all, remote{prefix, inUse[p.ID]})
		}
	}
	return all
}

// cutTunnels leaves each peer those further tunnels that we have an end for.
func (g *gateway) cutTunnels(peers []fabric.GatewayPeer) []fabric.GatewayPeer {
	peers = slices.Clone(peers)
	for i := range peers {
		peers[i].Tunnels = peers[i].Tunnels[:min(len(peers[i].Tunnels), len(g.ends)-1)]
	}
	return peers
}
