package capture

import (
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// Defaults and maximums of the bounds of a capture.
const (
	DefaultPackets  = 100_000
	DefaultBytes    = 64 << 20
	DefaultDuration = time.Minute
	MaxPackets      = 100_000_000
	MaxBytes        = 16 << 30
	MaxDuration     = time.Hour
	MaxSnap         = 65535
)

// Options select the packets of a capture and bound it. Start with DefaultOptions.
type Options struct {
	Places     []Place               // nil: all
	Directions []natengine.Direction // nil: both
	Peer       string                // cluster ID or name of the peer; empty: all peers
	Drops      []natengine.Drop      // only packets dropped for one of these reasons; nil: no restriction
	Dropped    bool                  // only dropped packets, for any reason
	Proto      uint8                 // upper-layer protocol; 0: all. packet.ICMP includes ICMPv6
	Ends       [2]netip.AddrPort     // both ends of the flow, in either order; the zero Addr matches all addresses, port 0 all ports

	// Snap is the maximum number of octets that the file keeps of each packet. 0 means only the
	// headers, without any data of a pod.
	Snap int

	Packets  int           // maximum number of packets
	Bytes    int64         // maximum size of the file in octets
	Duration time.Duration // maximum duration of the capture
}

// DefaultOptions select all packets, only their headers, within the default bounds.
func DefaultOptions() Options {
	return Options{Packets: DefaultPackets, Bytes: DefaultBytes, Duration: DefaultDuration}
}

// Protocols lists the names that the parameter "protocol" accepts.
var Protocols = []string{"tcp", "udp", "icmp"}

var protocols = map[string]uint8{"tcp": packet.TCP, "udp": packet.UDP, "icmp": packet.ICMP}

// Query returns the options as URL parameters. Parse does the reverse.
func (o Options) Query() url.Values {
	q := url.Values{}
	for _, p := range o.Places {
		q.Add("place", p.String())
	}
	for _, d := range o.Directions {
		q.Add("direction", map[natengine.Direction]string{natengine.Outbound: "out", natengine.Inbound: "in"}[d])
	}
	for _, d := range o.Drops {
		q.Add("drop", d.String())
	}
	if o.Dropped {
		q.Set("dropped", "true")
	}
	if o.Peer != "" {
		q.Set("peer", o.Peer)
	}
	for name, proto := range protocols {
		if proto == o.Proto {
			q.Set("protocol", name)
		}
	}
	if o.Ends != [2]netip.AddrPort{} {
		for _, e := range o.Ends {
			q.Add("end", endText(e))
		}
	}
	q.Set("snap", strconv.Itoa(o.Snap))
	q.Set("packets", strconv.Itoa(o.Packets))
	q.Set("bytes", strconv.FormatInt(o.Bytes, 10))
	q.Set("duration", o.Duration.String())
	return q
}

// Any is the text of an end that matches all addresses and ports.
const Any = "any"

func endText(e netip.AddrPort) string {
	switch {
	case !e.Addr().IsValid() && e.Port() == 0:
		return Any
	case !e.Addr().IsValid():
		return ":" + strconv.Itoa(int(e.Port()))
	case e.Port() == 0:
		return e.Addr().String()
	}
	return e.String()
}

// parseEnd parses "10.0.0.1", "10.0.0.1:80", "[fd00::1]:80", "fd00::1", ":80" or "any".
func parseEnd(s string) (netip.AddrPort, error) {
	wrong := fmt.Errorf("%q is not a valid end of a filter; want an address such as 10.0.0.1, 10.0.0.1:80, fd00::1 or [fd00::1]:80, a port such as :80, or %s", s, Any)
	if s == Any {
		return netip.AddrPort{}, nil
	}
	if port, ok := strings.CutPrefix(s, ":"); ok && !strings.Contains(port, ":") {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return netip.AddrPort{}, wrong
		}
		return netip.AddrPortFrom(netip.Addr{}, uint16(n)), nil
	}
	addr, err := netip.ParseAddrPort(s)
	if err != nil {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return netip.AddrPort{}, wrong
		}
		addr = netip.AddrPortFrom(a, 0)
	}
	if addr.Addr().Zone() != "" {
		return netip.AddrPort{}, wrong
	}
	return netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port()), nil
}

// Parse reads the options from URL parameters, all of which are optional.
func Parse(q url.Values) (Options, error) {
	o := DefaultOptions()
	for name, values := range q {
		switch name {
		case "place":
			for _, s := range values {
				i := slices.Index(placeNames[:], s)
				if i < 0 {
					return o, fmt.Errorf("place %q: want one of %s", s, strings.Join(placeNames[:], ", "))
				}
				o.Places = append(o.Places, Place(i))
			}
		case "direction":
			for _, s := range values {
				i := slices.Index([]string{"out", "in"}, s)
				if i < 0 {
					return o, fmt.Errorf("direction %q: want out or in", s)
				}
				o.Directions = append(o.Directions, natengine.Direction(i))
			}
		case "drop":
			for _, s := range values {
				all := natengine.Drops()
				i := slices.IndexFunc(all, func(d natengine.Drop) bool { return d.String() == s })
				if i < 0 {
					return o, fmt.Errorf("drop %q: want one of %s", s, strings.Join(DropNames(), ", "))
				}
				o.Drops = append(o.Drops, all[i])
			}
		case "end":
			if len(values) > len(o.Ends) {
				return o, fmt.Errorf("end: %d values; want at most two", len(values))
			}
			for i, s := range values {
				e, err := parseEnd(s)
				if err != nil {
					return o, fmt.Errorf("end: %w", err)
				}
				o.Ends[i] = e
			}
		default:
			if len(values) != 1 {
				return o, fmt.Errorf("%s: %d values; want one", name, len(values))
			}
			if err := o.parse(name, values[0]); err != nil {
				return o, err
			}
		}
	}
	if a, b := o.Ends[0].Addr(), o.Ends[1].Addr(); a.IsValid() && b.IsValid() && a.Is4() != b.Is4() {
		return o, fmt.Errorf("end: %s and %s are of different families", a, b)
	}
	return o, nil
}

func (o *Options) parse(name, value string) error {
	number := func(least, most int64) (int64, error) {
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("%s %q: want a number from %d to %d", name, value, least, most)
		}
		return n, nil
	}
	var n int64
	var err error
	switch name {
	case "peer":
		o.Peer = value
	case "dropped":
		if o.Dropped = value == "true"; !o.Dropped && value != "false" {
			return fmt.Errorf("dropped %q: want true or false", value)
		}
	case "protocol":
		var ok bool
		if o.Proto, ok = protocols[value]; !ok {
			return fmt.Errorf("protocol %q: want %s", value, strings.Join(Protocols, ", "))
		}
	case "snap":
		n, err = number(0, MaxSnap)
		o.Snap = int(n)
	case "packets":
		n, err = number(1, MaxPackets)
		o.Packets = int(n)
	case "bytes":
		o.Bytes, err = number(1, MaxBytes)
	case "duration":
		d, wrong := time.ParseDuration(value)
		if wrong != nil || d <= 0 || d > MaxDuration {
			return fmt.Errorf("duration %q: want one such as 30s or 5m, at most %v", value, MaxDuration)
		}
		o.Duration = d
	default:
		return fmt.Errorf("%q is not known; want place, direction, peer, drop, dropped, protocol, end, snap, packets, bytes or duration", name)
	}
	return err
}

// DropNames returns the names of all reasons to drop, which the parameter "drop" accepts.
func DropNames() (names []string) {
	for _, d := range natengine.Drops() {
		names = append(names, d.String())
	}
	return names
}

// wants reports whether the options select packets at this place and in this direction.
func (o *Options) wants(p Place, dir natengine.Direction) bool {
	return (len(o.Places) == 0 || slices.Contains(o.Places, p)) && (len(o.Directions) == 0 || slices.Contains(o.Directions, dir))
}

// WantsDrop reports whether the options select packets that were dropped for the reason d. For
// natengine.DropNone, it reports whether they select packets that were not dropped.
func (o *Options) WantsDrop(d natengine.Drop) bool {
	switch {
	case len(o.Drops) > 0:
		return slices.Contains(o.Drops, d)
	case o.Dropped:
		return d != natengine.DropNone
	}
	return true
}

// WantsPeer reports whether the options select packets of peer p; nil means that the peer is
// unknown.
func (o *Options) WantsPeer(p *natengine.PeerState) bool {
	return o.Peer == "" || p != nil && p.ID() == o.Peer
}

// Narrow reports whether the options restrict the ends or the protocol.
func (o *Options) Narrow() bool { return o.Proto != 0 || o.Ends != [2]netip.AddrPort{} }

// WantsEnds reports whether the options select a packet with this protocol and these ends.
func (o *Options) WantsEnds(t natengine.Tuple) bool {
	a, b := o.Ends[0], o.Ends[1]
	return o.wantsProto(t.Proto) && (matches(a, t.Src) && matches(b, t.Dst) || matches(a, t.Dst) && matches(b, t.Src))
}

// WantsRemote reports whether the options select a packet with this protocol and remote end for at
// least one local end. NAT does not change the remote end.
func (o *Options) WantsRemote(proto uint8, remote netip.AddrPort) bool {
	return o.wantsProto(proto) && (matches(o.Ends[0], remote) || matches(o.Ends[1], remote))
}

func (o *Options) wantsProto(proto uint8) bool {
	return o.Proto == 0 || o.Proto == proto || o.Proto == packet.ICMP && proto == packet.ICMPv6
}

// matches reports whether an end of a packet (have) matches an end in the options (want).
func matches(want, have netip.AddrPort) bool {
	return (!want.Addr().IsValid() || want.Addr() == have.Addr()) && (want.Port() == 0 || want.Port() == have.Port())
}
