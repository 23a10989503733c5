package gateway

import (
	"encoding/base64"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/tun"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// The flows of a peer with several tunnels are spread over them. Each tunnel is a complete data
// path. Packets of different flows meet only in the NAT engine, where they share no lock:
//
//	              ┌─ TUN isthmus0 ─ datapath.Tunnel, key 0 ─ UDP 5871 ══ tunnel 0 of the peer
//	kernel's hash ┤
//	of the flow   └─ TUN isthmus1 ─ datapath.Tunnel, key 1 ─ UDP 5872 ══ tunnel 1 of the peer
//
// A tunnel carries flows while its own connection check is answered. Each side decides
// independently which tunnels carry flows. So the two sides need not configure a tunnel, or open a
// firewall for it, at the same moment. While no tunnel's check is answered, the first tunnel
// carries all flows.

// severalThreshold is the number of intervals without an answer after which a tunnel carries no
// flows, if the peer has several tunnels. It is less than the five intervals for a single tunnel,
// because the flows can use another tunnel.
const severalThreshold = 2

// tunnelEnd is our end of one tunnel, to all peers.
type tunnelEnd struct {
	*datapath.Tunnel
	local   *datapath.Local
	checker *check.Monitor
	observe func(id string) check.Result // is checker.Observe, except in tests
	wire    *bind.Bind
	link    *tun.Device
}

// openTunnels creates the TUNs and the tunnels behind them. The tunnels do not listen yet. After an
// error, closeTunnels closes those that were created.
func (g *gateway) openTunnels(o Options, tunnels, mtu int) error {
	for i := range tunnels {
		e, err := g.openEnd(o, i, mtu)
		if err != nil {
			return err
		}
		g.tunnels = append(g.tunnels, e)
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
	port, err := local.Listen(fabric.ProbePort, check.MaxMessage+1)
	if err != nil {
		return nil, err
	}
	var link *tun.Device
	err = g.host.Inside(func() (err error) {
		link, err = tun.Open(fabric.TunName(i), mtu, tun.Options{USO: o.UDPOffload})
		return err
	})
	if err != nil {
		return nil, err
	}
	wire := bind.New()
	wire.Gate = o.Gate
	if i == 0 {
		g.udpOffload = link.Offloads().USO4
		t := datapath.New(link, wire, g.engine, local, datapath.Options{CoalesceUDP: g.udpOffload, Logger: wgLogger(o.Log)})
		return newTunnelEnd(t, local, port, check.Options{Log: o.Log, RTT: g.metrics.observeRTT, Hold: o.Calls, PathChanged: g.compareSoon}, wire, link), nil
	}
	log := o.Log.With("tunnel", i)
	t := g.tunnels[0].Beside(link, wire, local, wgLogger(log))
	return newTunnelEnd(t, local, port, check.Options{Log: log, Hold: o.Calls}, wire, link), nil
}

func newTunnelEnd(t *datapath.Tunnel, local *datapath.Local, port *datapath.Port, o check.Options, wire *bind.Bind, link *tun.Device) *tunnelEnd {
	o.Handshake = t.HandshakeNow
	c := check.Start(port, o)
	t.OnUnknownSession(c.TestSession)
	return &tunnelEnd{t, local, c, c.Observe, wire, link}
}

// startTunnels opens the UDP sockets of all tunnels.
func (g *gateway) startTunnels(c Config) error {
	for i, e := range g.tunnels {
		port := c.ListenPort + uint16(i)
		if err := e.Up(fabric.TunnelKey(c.PrivateKey, i), port); err != nil {
			return portError(err, port)
		}
	}
	return nil
}

// discard drops the packets that wait in the TUNs of a standby gateway, so that it sends no old
// packets when it becomes active.
func (g *gateway) discard() {
	const limit = 1000 // the queue of a TUN holds 500
	b := make([]byte, packet.VirtioHeaderLen+1<<16)
	for _, e := range g.tunnels {
		for range limit {
			if _, err := e.link.Read(b, false); err != nil {
				break
			}
			g.engine.Count(nil, natengine.Outbound, natengine.DropNoMandate)
		}
	}
}

// closeTunnels closes the tunnels, with their TUNs and in-process endpoints.
func (g *gateway) closeTunnels() {
	for _, e := range g.tunnels {
		e.checker.Close()
		_ = e.Close() // even after an error it is closed
	}
}

// watchTunnels returns a channel that receives the name of each TUN that has disappeared.
func (g *gateway) watchTunnels() <-chan string {
	ended := make(chan string, len(g.tunnels))
	for i, e := range g.tunnels {
		go func() { // returns when the tunnel is closed
			<-e.Wait()
			ended <- fabric.TunName(i)
		}()
	}
	return ended
}

// moveTunnels makes the tunnels listen on consecutive ports from port upwards. If a port is not
// available, that tunnel keeps its old port.
func (g *gateway) moveTunnels(port uint16) (errs []error) {
	for i, e := range g.tunnels {
		if err := e.listen(port + uint16(i)); err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// apply brings our end of tunnel i to its desired state.
func (g *gateway) apply(i int, c Config, s *survey) error {
	e := g.tunnels[i]
	var next [32]byte
	if c.NextKey != (Key{}) {
		next = fabric.TunnelKey(c.NextKey, i)
	}
	errs := []error{e.SetKeys(fabric.TunnelKey(c.PrivateKey, i), next)}
	if s.all {
		errs = append(errs, e.SetPeers(tunnelPeers(i, s.peers, s.other)))
	} else {
		removed := make([]*natengine.PeerState, len(s.removed))
		for j := range s.removed {
			removed[j] = s.removed[j].state
		}
		for _, at := range s.other {
			if p := &s.peers[at]; i > len(p.Tunnels) {
				removed = append(removed, p.state) // peers that no longer have this tunnel
			}
		}
		errs = append(errs, e.Change(tunnelPeers(i, s.peers, s.other), removed))
	}
	return errors.Join(errs...)
}

// listen moves our end of a tunnel to another UDP port.
func (e *tunnelEnd) listen(port uint16) error {
	if e.Port() == port {
		return nil
	}
	// Test the new port first, because the tunnel closes its old socket before it opens the new
	// one.
	err := portFree(port)
	if err == nil {
		err = e.SetPort(port)
	}
	if err != nil {
		return portError(err, port)
	}
	return nil
}

// tunnelPeers returns the peers that have tunnel i, among those with the given indexes.
func tunnelPeers(i int, peers []peer, indexes []int) (list []datapath.Peer) {
	for _, j := range indexes {
		p := &peers[j]
		theirs, ok := theirEnd(p.GatewayPeer, i)
		if !ok || p.state == nil {
			continue
		}
		at := p.at
		if at.IsValid() {
			at = netip.AddrPortFrom(at.Addr(), theirs.Port)
		}
		list = append(list, datapath.Peer{State: p.state, Key: theirs.PublicKey, Endpoint: at, Refused: p.refused,
			Gateway: gatewayOf(p.GatewayPeer), Streams: p.InBand && i == 0, Preshared: p.preshared})
	}
	return list
}

// gatewayOf returns the addresses of a peer's gateway inside the tunnel. Its PINGs come from the
// network address of the peer's PodCIDR, like all its packets that do not come from pods
// (docs/liqo-v0.md, section 7.2). Its PONGs come from the address to which we send PINGs.
func gatewayOf(p *fabric.GatewayPeer) [2]netip.Addr {
	return [2]netip.Addr{p.AllowedIPs[0].Addr(), p.Probe.Addr()}
}

// theirEnd returns a peer's end of tunnel i, if the peer has that tunnel.
func theirEnd(p *fabric.GatewayPeer, i int) (fabric.TunnelEnd, bool) {
	if i == 0 {
		return fabric.TunnelEnd{PublicKey: p.PublicKey, Port: p.Port}, true
	}
	if i > len(p.Tunnels) {
		return fabric.TunnelEnd{}, false
	}
	return p.Tunnels[i-1], true
}

// applyTunnels brings our ends of all tunnels to their desired state, except for their ports. It
// updates the connection checks last: they ping a new peer at once, so the tunnel must have the
// peer before.
func (g *gateway) applyTunnels(c Config, s *survey) (errs []error) {
	for i, e := range g.tunnels {
		if err := g.apply(i, c, s); err != nil {
			errs = append(errs, err)
		}
		checks, absent := checkPeers(i, s.peers, s.other)
		if s.all {
			e.checker.Set(checks)
		} else {
			for j := range s.removed {
				absent = append(absent, s.removed[j].ID)
			}
			e.checker.Change(checks, absent)
		}
	}
	return errs
}

// Of the peers with the given indexes, checkPeers returns the connection-check settings of those
// that have tunnel i, and the IDs of the others.
func checkPeers(i int, peers []peer, indexes []int) (all []check.Peer, absent []string) {
	for _, j := range indexes {
		p := &peers[j]
		theirs, ok := theirEnd(p.GatewayPeer, i)
		if !ok {
			absent = append(absent, p.ID)
			continue
		}
		to := check.Peer{ID: p.ID, Probe: p.Probe, Allowed: p.AllowedIPs, Key: theirs.PublicKey, Endpoint: p.Endpoint, Port: theirs.Port}
		if i > 0 {
			to.Threshold = severalThreshold
		} else {
			to.BaseMTU, to.MaxMTU = leastMTU(p.GatewayPeer), p.pathInner
		}
		all = append(all, to)
	}
	return all, absent
}

// status returns the status of one of several tunnels to a peer.
func (e tunnelView) status(tunnel int, now time.Time) TunnelStatus {
	s := TunnelStatus{Tunnel: tunnel, State: e.check.State, InUse: e.inUse, PublicKey: base64.StdEncoding.EncodeToString(e.key[:]),
		RTT: e.check.RTT.Seconds(), Loss: e.check.Loss, Receive: e.stats.Received, Transmit: e.stats.Sent}
	if e.stats.Endpoint.IsValid() {
		s.Endpoint = e.stats.Endpoint.String()
	}
	if !e.stats.Handshake.IsZero() {
		s.HandshakeAge = now.Sub(e.stats.Handshake).Seconds()
	}
	return s
}

// workingTunnels returns the set of tunnels that carry the flows of a peer. The empty set means the
// first tunnel. For a peer with a single tunnel, the set is always empty.
func (g *gateway) workingTunnels(id string, now time.Time) (set fabric.TunnelSet) {
	for i, e := range g.tunnels[1:] {
		if e.observe(id).State == check.Connected {
			set = set.With(i + 1)
		}
	}
	if set == 0 {
		return 0
	}
	if r := g.tunnels[0].observe(id); r.State == check.Connected && !r.Late(now, severalThreshold) {
		set = set.With(0)
	}
	return set
}

// cutTunnels removes from each peer the additional tunnels for which we have no end. For a peer
// that has not changed, the result contains the pointer from old, so that later comparisons of
// pointers are enough. Both lists are sorted by ID.
func (g *gateway) cutTunnels(peers []*fabric.GatewayPeer, old []peer) []*fabric.GatewayPeer {
	peers = slices.Clone(peers)
	j := 0
	for i, p := range peers {
		if most := len(g.tunnels) - 1; len(p.Tunnels) > most {
			cut := *p
			cut.Tunnels = p.Tunnels[:most]
			p = &cut
		}
		for j < len(old) && old[j].ID < p.ID {
			j++
		}
		if j < len(old) && old[j].ID == p.ID && samePeer(old[j].GatewayPeer, p) {
			p = old[j].GatewayPeer
		}
		peers[i] = p
	}
	return peers
}

// samePeer reports whether two peers have the same content.
func samePeer(a, b *fabric.GatewayPeer) bool { return a == b || reflect.DeepEqual(a, b) }
