package gateway

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// A TraceQuery describes the packet to trace. If a port is 0, Trace chooses one. For ICMP, a port
// is the identifier of an echo request.
type TraceQuery struct {
	Src, Dst  netip.AddrPort
	Protocol  string // "tcp", "udp" or "icmp"
	Direction string // "out", "in", or "" for the directions in which the addresses make sense, possibly both
}

// A TraceStep is the engine's treatment of the packet in one direction.
type TraceStep struct {
	Direction string `json:"direction"` // "outbound": from here into the tunnel; "inbound": from the tunnel
	Protocol  string `json:"protocol"`
	Src       string `json:"src"`
	Dst       string `json:"dst"`

	Peer     string `json:"peer,omitempty"`
	PeerName string `json:"peerName,omitempty"`
	Rule     string `json:"rule,omitempty"`
	Flow     string `json:"flow,omitempty"` // "", "known" or "new"
	NewSrc   string `json:"newSrc,omitempty"`
	NewDst   string `json:"newDst,omitempty"`
	Action   string `json:"action"` // "forward", "deliver", "hold" or "discard"
	Drop     string `json:"drop,omitempty"`
	Text     string `json:"text,omitempty"` // explains Drop to people
	// PeerDown is set if a forwarded packet will not arrive, because the peer has no session. It
	// explains that to people.
	PeerDown string `json:"peerDown,omitempty"`
}

// The ports and the ICMP identifier of a packet if the query has none.
const (
	traceSrcPort = 40000
	traceDstPort = 80
	traceID      = 1
)

// ParseTraceAddr parses an address with an optional port: "10.0.0.1", "10.0.0.1:80", "fd00::1" or
// "[fd00::1]:80". Without a port, the result has port 0.
func ParseTraceAddr(s string) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
	}
	bare, bracket := strings.CutPrefix(s, "[")
	if bracket {
		bare, bracket = strings.CutSuffix(bare, "]")
	}
	a, err := netip.ParseAddr(bare)
	if err != nil || a.Zone() != "" || (bare != s && !(bracket && a.Is6())) {
		return netip.AddrPort{}, fmt.Errorf("%q is not an address; want one such as 10.0.0.1, 10.0.0.1:80 or [fd00::1]:80", s)
	}
	return netip.AddrPortFrom(a.Unmap(), 0), nil
}

// Trace returns the engine's treatment of a packet, without sending it or changing any state. now
// is the engine's time.
func Trace(e *natengine.Engine, q TraceQuery, now time.Duration) ([]TraceStep, error) {
	b, err := q.packet()
	if err != nil {
		return nil, err
	}
	step := func(d natengine.Direction) (TraceStep, error) {
		var v packet.View
		if err := v.Parse(append([]byte(nil), b...), packet.ChecksumComplete); err != nil {
			return TraceStep{}, fmt.Errorf("the packet to trace: %w", err)
		}
		trace := e.Trace(&v, d, now)
		if trace.Drop == natengine.DropNone && d == natengine.Outbound {
			for _, p := range e.Peers() {
				if p.ID() == trace.Peer && p.Down() { // the datapath drops these packets, after the engine has passed them
					trace.Action, trace.Drop = natengine.Discard, natengine.DropPeerDown
				}
			}
		}
		return stepOf(trace, q.Protocol), nil
	}
	switch q.Direction {
	case "out", "in":
		d := natengine.Outbound
		if q.Direction == "in" {
			d = natengine.Inbound
		}
		s, err := step(d)
		return []TraceStep{s}, err
	case "":
	default:
		return nil, fmt.Errorf("direction %q; want out or in", q.Direction)
	}
	out, err := step(natengine.Outbound)
	if err != nil {
		return nil, err
	}
	in, err := step(natengine.Inbound)
	if err != nil {
		return nil, err
	}
	// Both directions can be possible for the same addresses, if the two clusters see each other
	// under the same range.
	switch noPeer := natengine.DropNoPeer.String(); {
	case out.Drop == noPeer && in.Drop != noPeer:
		return []TraceStep{in}, nil
	case in.Drop == "":
		if out.Drop == "" {
			return []TraceStep{out, in}, nil
		}
		return []TraceStep{in, out}, nil
	}
	return []TraceStep{out}, nil
}

func stepOf(t natengine.Trace, protocol string) TraceStep {
	s := TraceStep{
		Direction: t.Direction.String(), Protocol: protocol,
		Src: end(t.Before.Src), Dst: end(t.Before.Dst),
		Peer: t.Peer, Rule: t.Rule, Flow: t.Flow, Action: t.Action.String(),
	}
	if t.Action == natengine.Forward || t.Action == natengine.Deliver {
		s.NewSrc, s.NewDst = end(t.After.Src), end(t.After.Dst)
	}
	if t.Drop != natengine.DropNone {
		s.Drop, s.Text = t.Drop.String(), t.Drop.Explain()
	}
	return s
}

func end(ap netip.AddrPort) string {
	if ap.Port() == 0 {
		return ap.Addr().String()
	}
	return ap.String()
}

// packet returns an IP packet that may begin a flow: a TCP SYN, a UDP datagram without data, or
// an ICMP echo request.
func (q TraceQuery) packet() ([]byte, error) {
	src, dst := q.Src.Addr(), q.Dst.Addr()
	if !src.IsValid() || !dst.IsValid() {
		return nil, fmt.Errorf("want a source and a destination")
	}
	if src.Is4() != dst.Is4() {
		return nil, fmt.Errorf("%s and %s are of different families", src, dst)
	}
	sport, dport := q.Src.Port(), q.Dst.Port()
	var proto uint8
	var t []byte
	switch q.Protocol {
	case "tcp", "udp":
		if sport == 0 {
			sport = traceSrcPort
		}
		if dport == 0 {
			dport = traceDstPort
		}
		if proto, t = packet.UDP, make([]byte, 8); q.Protocol == "tcp" {
			proto, t = packet.TCP, make([]byte, 20)
			t[12], t[13] = 5<<4, 0x02 // data offset, SYN
			binary.BigEndian.PutUint16(t[14:], 65535)
		} else {
			binary.BigEndian.PutUint16(t[4:], uint16(len(t)))
		}
		binary.BigEndian.PutUint16(t[0:], sport)
		binary.BigEndian.PutUint16(t[2:], dport)
	case "icmp":
		proto, t = packet.ICMP, make([]byte, 8)
		if t[0] = 8; src.Is6() {
			proto, t[0] = packet.ICMPv6, 128
		}
		id := max(sport, dport)
		if id == 0 {
			id = traceID
		}
		binary.BigEndian.PutUint16(t[4:], id)
	default:
		return nil, fmt.Errorf("protocol %q; want tcp, udp or icmp", q.Protocol)
	}

	var b []byte
	if src.Is4() {
		b = make([]byte, 20, 20+len(t))
		b[0], b[8], b[9] = 0x45, 64, proto
		binary.BigEndian.PutUint16(b[2:], uint16(20+len(t)))
		copy(b[12:], src.AsSlice())
		copy(b[16:], dst.AsSlice())
		binary.BigEndian.PutUint16(b[10:], ^onesSum(b))
	} else {
		b = make([]byte, 40, 40+len(t))
		b[0], b[6], b[7] = 0x60, proto, 64
		binary.BigEndian.PutUint16(b[4:], uint16(len(t)))
		copy(b[8:], src.AsSlice())
		copy(b[24:], dst.AsSlice())
	}
	var pseudo []byte // pseudo-header: RFC 9293 section 3.1, RFC 8200 section 8.1
	if proto != packet.ICMP {
		pseudo = append(append(src.AsSlice(), dst.AsSlice()...), 0, proto, 0, byte(len(t)))
	}
	sum := ^onesSum(append(pseudo, t...))
	if proto == packet.UDP && sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(t[map[uint8]int{packet.TCP: 16, packet.UDP: 6, packet.ICMP: 2, packet.ICMPv6: 2}[proto]:], sum)
	return append(b, t...), nil
}

// onesSum returns the ones'-complement sum of an even number of octets (RFC 1071).
func onesSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// TraceOffline traces a packet with a new engine, made from a configuration. That engine has no
// flows.
func TraceOffline(c Config, q TraceQuery) ([]TraceStep, error) {
	mtu := c.MTU
	if mtu == 0 {
		mtu = defaultMTU
	}
	e := natengine.New(engineConfig(c))
	var rules []natengine.Peer
	for _, p := range c.Gateway.Peers {
		rules = append(rules, rulesFor(p, mtu))
	}
	if err := e.SetPeers(rules); err != nil {
		return nil, err
	}
	steps, err := Trace(e, q, 0)
	addNames(steps, c.Gateway.Peers, func(p *fabric.GatewayPeer) (string, string) { return p.ID, p.Name })
	return steps, err
}

// addNames adds the names of the peers to the steps. identify returns the ID and name of a peer.
func addNames[P any](steps []TraceStep, peers []P, identify func(P) (id, name string)) {
	for i := range steps {
		for _, p := range peers {
			if id, name := identify(p); id == steps[i].Peer {
				steps[i].PeerName = name
			}
		}
	}
}

func protocolName(proto uint8) string {
	switch proto {
	case packet.ICMP:
		return "icmp"
	case packet.ICMPv6:
		return "icmpv6"
	case packet.TCP:
		return "tcp"
	case packet.UDP:
		return "udp"
	}
	return strconv.Itoa(int(proto))
}

func hostPort(host string, port uint16) string {
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}
