package gateway

import (
	"crypto/ecdh"
	"encoding/base64"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/natengine"
)

// Status is the response of /status. Sizes are in octets and times in seconds. Unknown values are
// left out.
type Status struct {
	Version     string `json:"version"`
	ClusterID   string `json:"clusterID"`
	ClusterName string `json:"clusterName,omitempty"`
	PublicKey   string `json:"publicKey"`
	// NextPublicKey is set while the key rotates, once all tunnels also accept the next key. It is
	// the public key of NextKey.
	NextPublicKey string    `json:"nextPublicKey,omitempty"`
	NextKey       Key       `json:"-"` // the next private key; zero: none
	ListenPort    uint16    `json:"listenPort"`
	Started       time.Time `json:"started"`
	// Mandate has the time when this gateway became active, and the reason. It is nil if the
	// gateway is configured by files.
	Mandate *isthmus.Mandate `json:"mandate,omitempty"`
	Ready   bool             `json:"ready"`

	// Namespace is the path of the gateway's network namespace, for `nsenter --net=`. It is empty
	// if the gateway uses its Pod's namespace.
	Namespace string    `json:"namespace"`
	Host      HostRoute `json:"host"`
	TUN       string    `json:"tun"`
	MTU       int       `json:"mtu"`
	MTUAuto   bool      `json:"mtuAuto"` // the MTU is derived from the paths to the peers
	// UDPOffload reports whether UDP superpackets cross the TUN, which requires Options.UDPOffload
	// and support by the kernel.
	UDPOffload bool `json:"udpOffload"`

	Config   ConfigStatus   `json:"config"`
	Sessions SessionsStatus `json:"sessions"`
	Peers    []PeerStatus   `json:"peers"`
	Drops    []DropStatus   `json:"drops,omitempty"` // packets that belong to no peer
	Waiting  []string       `json:"waiting,omitempty"`
	Check    CheckStatus    `json:"check"`

	// Flows is set only in the response of /status?flows=N.
	Flows []FlowStatus `json:"flows,omitempty"`
}

// HostRoute is the interface by which nodes reach the gateway: its host's veth, or the overlay if
// the gateway runs in a Pod.
type HostRoute struct {
	Interface string     `json:"interface"`
	Index     int        `json:"index"` // of the interface; 0 while it does not exist
	NextHop   netip.Addr `json:"nextHop"`
}

// ConfigStatus describes the configuration in force.
type ConfigStatus struct {
	Generation int       `json:"generation"`
	Since      time.Time `json:"since"`
	Errors     []string  `json:"errors,omitempty"`   // reasons why the newest configuration is not in force
	Problems   []string  `json:"problems,omitempty"` // parts that could not be applied; retried
	Refused    []string  `json:"refused,omitempty"`  // parts left out as invalid, with object and field
}

// SessionsStatus is the state of the NAT engine, summed over all peers.
type SessionsStatus struct {
	Flows  int `json:"flows"`
	Limit  int `json:"limit"`
	Memory int `json:"memoryBytes"`
}

// CheckStatus is the state of the connection check, summed over all peers.
type CheckStatus struct {
	Answered uint64            `json:"answered"` // number of PINGs from peers that were answered
	Rejected map[string]uint64 `json:"rejected,omitempty"`
}

// PeerStatus is the status of one peer.
type PeerStatus struct {
	ID      string      `json:"id"`
	Name    string      `json:"name,omitempty"`
	State   check.State `json:"state"`          // result of the connection check: Connected, Connecting or Error
	Reason  string      `json:"reason"`         // reason of State, a word of v1alpha1.Causes
	Message string      `json:"message"`        // the reason as a sentence, with a remedy
	Since   time.Time   `json:"since"`          // when State last changed
	Down    bool        `json:"down,omitempty"` // no WireGuard session for some time: packets to the peer are dropped
	Problem string      `json:"problem,omitempty"`

	Endpoint   string         `json:"endpoint,omitempty"` // address and port to which packets are sent now
	Configured string         `json:"configuredEndpoint"`
	Hidden     bool           `json:"sourceHidden,omitempty"`    // Endpoint is the address of a node that forwards messages for our Service, so the peer's own address is hidden
	Resolved   netip.AddrPort `json:"resolvedEndpoint,omitzero"` // address of the configured endpoint
	PublicKey  string         `json:"publicKey"`
	OwnKey     string         `json:"ownPublicKey,omitempty"`      // our public key in the present session
	Lags       bool           `json:"lagsBehindKey,omitempty"`     // a session with the peer does not use our next key yet, or there is no session
	Preshared  string         `json:"presharedExchange,omitempty"` // ID of the exchange that made the preshared key of all sessions

	LastHeard     *time.Time `json:"lastHeard,omitempty"` // when an authenticated message last came
	LastHandshake *time.Time `json:"lastHandshake,omitempty"`
	HandshakeAge  float64    `json:"handshakeAgeSeconds,omitempty"`
	RTT           float64    `json:"rttSeconds,omitempty"`
	Loss          float64    `json:"lossRatio"`
	Probe         string     `json:"probe"`

	Receive   TrafficStatus `json:"receive"`
	Transmit  TrafficStatus `json:"transmit"`
	WireGuard struct {
		Receive  uint64 `json:"receiveBytes"`
		Transmit uint64 `json:"transmitBytes"`
	} `json:"wireguard"`

	// Tunnels lists all tunnels to the peer, if there are several. Then the fields above describe
	// the first tunnel that carries flows, except that WireGuard counts the octets of all tunnels.
	Tunnels []TunnelStatus `json:"tunnels,omitempty"`

	MTU      int           `json:"mtu"` // size of the largest packet to the peer
	PathMTU  check.PathMTU `json:"pathMTU"`
	Rules    RulesStatus   `json:"rules"`
	Sessions int           `json:"sessions"`
	Drops    []DropStatus  `json:"drops,omitempty"`
}

// TunnelStatus is the status of one tunnel to a peer that has several.
type TunnelStatus struct {
	Tunnel       int         `json:"tunnel"` // number of the tunnel, from 0
	State        check.State `json:"state"`  // result of this tunnel's connection check: Connected, Connecting or Error
	InUse        bool        `json:"inUse"`  // carries a share of the flows, because it is connected
	Endpoint     string      `json:"endpoint,omitempty"`
	PublicKey    string      `json:"publicKey"`
	HandshakeAge float64     `json:"handshakeAgeSeconds,omitempty"`
	RTT          float64     `json:"rttSeconds,omitempty"`
	Loss         float64     `json:"lossRatio"`
	Receive      uint64      `json:"receiveBytes"` // octets of WireGuard messages
	Transmit     uint64      `json:"transmitBytes"`
}

// TrafficStatus counts IP packets inside the tunnel.
type TrafficStatus struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// RulesStatus lists the address translations for one peer.
type RulesStatus struct {
	RemotePods     netip.Prefix     `json:"remotePodCIDR"`      // as the peer itself uses it
	RemotePodsHere netip.Prefix     `json:"remotePodCIDRHere"`  // as this cluster sees it
	RemoteExternal netip.Prefix     `json:"remoteExternalHere"` // as this cluster sees it
	LocalPods      netip.Prefix     `json:"localPodCIDR"`       // as this cluster itself uses it
	LocalPodsThere netip.Prefix     `json:"localPodCIDRThere"`  // as the peer sees it
	LocalExternal  netip.Prefix     `json:"localExternalThere"` // as the peer sees it
	NAPT           netip.Addr       `json:"naptAddress"`        // source address, as the peer sees it, of packets that do not come from pods
	Endpoints      []EndpointStatus `json:"endpoints,omitempty"`
	MSS            uint16           `json:"mss,omitempty"`
}

// EndpointStatus is one mapped external endpoint: Real is its address in this cluster, Seen its
// address at the peer.
type EndpointStatus struct {
	Real netip.Addr `json:"real"`
	Seen netip.Addr `json:"seen"`
}

// DropStatus is one drop counter that is not 0.
type DropStatus struct {
	Direction string     `json:"direction"`
	Reason    string     `json:"reason"`
	Packets   uint64     `json:"packets"`
	Text      string     `json:"text"`
	LastSeen  *time.Time `json:"lastSeen,omitempty"` // when the counter last increased, accurate to a second
}

// FlowStatus is one NAT flow.
type FlowStatus struct {
	Peer     string         `json:"peer"`
	Kind     string         `json:"kind"`
	Protocol string         `json:"protocol"`
	Local    netip.AddrPort `json:"local"`
	Mapped   netip.AddrPort `json:"mapped"`
	Remote   netip.AddrPort `json:"remote"`
	State    string         `json:"state"`
	Idle     float64        `json:"idleSeconds"`
	Expires  float64        `json:"expiresSeconds"` // time until the flow expires without further packets
}

// current returns a copy of the state that the loop last published. The values that it points to
// are immutable.
func (g *gateway) current() current { return *g.published.Load() }

// failures returns the errors that may keep a peer's packets from being delivered. These are the
// parts of the configuration that could not be applied and, in a Pod, the reason why the gateway
// cannot reach the peer's networks or its own node.
func (c *current) failures(peer fabric.Origin) error {
	err := c.applyErr
	for _, p := range c.undelivered {
		if p.Origin == peer || p.Origin == (fabric.Origin{Kind: "Node", Name: c.config.PodNetwork.Node}) {
			err = errors.Join(err, p)
		}
	}
	return err
}

// nextKey returns the next private key if all tunnels accept it, and otherwise the zero Key.
func (g *gateway) nextKey(c Config) Key {
	if c.NextKey == (Key{}) {
		return Key{}
	}
	for i, e := range g.tunnels {
		if e.NextKey() != fabric.TunnelKey(c.NextKey, i) {
			return Key{}
		}
	}
	return c.NextKey
}

// status returns the gateway's status. flows is the maximum number of NAT flows in it.
func (g *gateway) status(flows int) Status {
	now := g.current()
	checker := g.tunnels[0].checker
	stats := g.engine.Stats()
	s := Status{
		Version:     g.version,
		ClusterID:   now.config.Gateway.ClusterID,
		ClusterName: now.config.Gateway.ClusterName,
		PublicKey:   base64.StdEncoding.EncodeToString(publicKey(now.config.PrivateKey)),
		ListenPort:  now.config.ListenPort,
		Started:     g.started,
		Ready:       g.unready() == nil && (g.ready == nil || g.ready() == nil),
		Namespace:   g.host.Path(),
		Host:        HostRoute{Interface: kernel.VethHost, NextHop: fabric.HopGateway4},
		TUN:         fabric.TunName(0),
		MTU:         now.mtu,
		MTUAuto:     now.config.MTU == 0,
		UDPOffload:  g.udpOffload,
		Config: ConfigStatus{
			Generation: now.generation,
			Since:      now.reloaded,
			Errors:     texts(now.configErr),
			Problems:   texts(now.applyErr),
		},
		Sessions: SessionsStatus{stats.Flows, stats.MaxFlows, stats.Bytes},
		Check:    CheckStatus{Answered: checker.Answered()},
	}
	if g.mandate != nil {
		s.Mandate = g.mandate()
	}
	for _, p := range now.config.Refused {
		s.Config.Refused = append(s.Config.Refused, p.Error())
	}
	if g.podNetwork {
		s.Host = HostRoute{Interface: kernel.OverlayDevice, NextHop: now.config.PodNetwork.Pod}
		for _, p := range now.undelivered {
			s.Config.Refused = append(s.Config.Refused, p.Error())
		}
	}
	if link, err := net.InterfaceByName(s.Host.Interface); err == nil {
		s.Host.Index = link.Index
	}
	for _, d := range directions {
		s.Drops = g.appendDrops(s.Drops, nil, d, func(r natengine.Drop) uint64 { return noPeerDrops(stats, d, r) })
	}
	for reason, n := range checker.Rejected() {
		if n > 0 {
			if s.Check.Rejected == nil {
				s.Check.Rejected = make(map[string]uint64)
			}
			s.Check.Rejected[reason] = n
		}
	}
	for _, w := range now.config.Gateway.Waiting {
		s.Waiting = append(s.Waiting, w.Origin.String())
	}

	at := time.Now()
	views := g.views(now, stats)
	var next [][32]byte
	if s.NextKey = g.nextKey(now.config); s.NextKey != (Key{}) {
		next = fabric.PublicKeys(s.NextKey, len(g.tunnels))
		s.NextPublicKey = base64.StdEncoding.EncodeToString(next[0][:])
	}
	s.Peers = make([]PeerStatus, 0, len(views)) // allocate once, because a PeerStatus is nearly 1 KiB
	for i := range views {
		s.Peers = append(s.Peers, g.peerStatus(&views[i], &now, next, at))
	}
	if flows > 0 {
		for _, f := range g.engine.Flows(flows) {
			s.Flows = append(s.Flows, FlowStatus{f.Peer, f.Kind, protocolName(f.Proto), f.Local, f.Mapped, f.Remote,
				f.State, f.Idle.Seconds(), f.Left.Seconds()})
		}
	}
	return s
}

// peerStatus returns the status of a peer. next holds our next public key for each tunnel; it is
// nil while no key rotates.
func (g *gateway) peerStatus(p *view, now *current, next [][32]byte, at time.Time) PeerStatus {
	first, cause := p.primary(), g.causeOf(p, now.failures(p.Origin), at)
	ps := PeerStatus{
		ID: p.ID, Name: p.Name,
		State: first.check.State, Reason: cause.Reason, Message: cause.Text, Since: first.check.Since,
		Configured: hostPort(p.Endpoint, p.Port), Resolved: p.resolved,
		PublicKey: base64.StdEncoding.EncodeToString(p.PublicKey[:]),
		RTT:       first.check.RTT.Seconds(), Loss: first.check.Loss, Probe: p.Probe.String(),
		Rules: RulesStatus{
			RemotePods: p.Remote.Pod, RemotePodsHere: p.Remote.PodSeen, RemoteExternal: p.Remote.ExternalSeen,
			LocalPods: p.Local.Pod, LocalPodsThere: p.Local.PodSeen, LocalExternal: p.Local.ExternalSeen,
			NAPT: p.Local.PodSeen.Addr(), MSS: mssFor(p.mtu),
		},
		MTU:      p.nat.MTU,
		PathMTU:  p.tunnels[0].check.Path,
		Sessions: p.nat.Flows,
	}
	for _, e := range p.Rules.Endpoints {
		ps.Rules.Endpoints = append(ps.Rules.Endpoints, EndpointStatus{e.Real, e.Seen})
	}
	if first.stats.Endpoint.IsValid() {
		ps.Endpoint, ps.Hidden = first.stats.Endpoint.String(), g.hidden(first.stats.Endpoint)
	}
	if p.unresolved != nil {
		ps.Problem = p.unresolved.Error()
	}
	if heard := p.lastHeard(); !heard.IsZero() {
		ps.LastHeard = &heard
	}
	if h := first.stats.Handshake; !h.IsZero() {
		ps.LastHandshake, ps.HandshakeAge = &h, at.Sub(h).Seconds()
	}
	ps.WireGuard.Receive, ps.WireGuard.Transmit = p.octets()
	ps.Preshared = p.presharedID()
	ps.Lags = next != nil && p.lags(next)
	if own := p.tunnels[0].stats.Own; own != ([32]byte{}) {
		ps.OwnKey = base64.StdEncoding.EncodeToString(own[:])
	}
	if len(p.tunnels) > 1 {
		for i, e := range p.tunnels {
			ps.Tunnels = append(ps.Tunnels, e.status(i, at))
		}
	}
	if state := p.state; state != nil {
		ps.Down = state.Down()
		ps.Receive.Packets, ps.Receive.Bytes = state.Traffic(natengine.Inbound)
		ps.Transmit.Packets, ps.Transmit.Bytes = state.Traffic(natengine.Outbound)
		for _, d := range directions {
			ps.Drops = g.appendDrops(ps.Drops, state, d, func(r natengine.Drop) uint64 { return state.Drops(d, r) })
		}
	}
	return ps
}

func (g *gateway) appendDrops(list []DropStatus, peer *natengine.PeerState, d natengine.Direction, count func(natengine.Drop) uint64) []DropStatus {
	for _, r := range natengine.Drops() {
		n := count(r)
		if n == 0 {
			continue
		}
		at := g.drops.increaseTime(peer, d, r, n, time.Now())
		list = append(list, DropStatus{Direction: d.String(), Reason: r.String(), Packets: n, Text: r.Explain(), LastSeen: &at})
	}
	return list
}

func texts(err error) []string {
	if err == nil {
		return nil
	}
	var all []string
	for _, e := range unjoin(err) {
		all = append(all, e.Error())
	}
	return all
}

func publicKey(private Key) []byte {
	k, err := ecdh.X25519().NewPrivateKey(private[:])
	if err != nil {
		return nil // impossible for a key of 32 octets
	}
	return k.PublicKey().Bytes()
}

// Healthy reports whether the newest configuration is in force and applied, and every peer
// answers. If not, it also returns a sentence about each problem.
func (s Status) Healthy() (bool, []string) {
	var wrong []string
	wrong = append(wrong, s.Config.Errors...)
	wrong = append(wrong, s.Config.Problems...)
	wrong = append(wrong, s.Config.Refused...)
	peers := make(map[string]string)
	for _, p := range s.Peers {
		if p.State != check.Connected {
			peers[p.ID] = "peer " + p.ID + ": " + p.Message
		}
	}
	for _, id := range slices.Sorted(maps.Keys(peers)) {
		wrong = append(wrong, peers[id])
	}
	return len(wrong) == 0, wrong
}
