package gateway

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/natengine"
)

const (
	// What WireGuard and the outer headers add to a packet: message header and tag 32, UDP 8, and
	// 20 for IPv4 or 40 for IPv6.
	overhead4 = 60
	overhead6 = 80

	// WireGuard pads a packet to a multiple of padding, but never beyond the MTU of the device. A
	// smaller MTU of a peer must therefore be a multiple of padding, or a padded packet would
	// exceed it.
	padding = 16

	// defaultMTU is for a path that is not known yet: Ethernet.
	defaultMTU = 1500 - overhead4
	// minAutoMTU fits into 1280 octets under either outer header, and minAutoMTU6 is what IPv6
	// requires of a link (RFC 8200, section 5). Both are multiples of padding. A report of a
	// smaller path MTU is mostly a forged ICMP error; if it is true, routers fragment the outer
	// packets, see bind.IgnorePath.
	minAutoMTU  = 1280 - overhead6
	minAutoMTU6 = 1280
	// maxAutoMTU is for jumbo frames. Only loopback and virtual links have more, and their MTU says
	// nothing about the path behind them.
	maxAutoMTU = 9000 - overhead4
)

// An underlay is the path to one peer.
type underlay struct {
	addr netip.Addr
	mtu  int  // of the path; 0: unknown
	last int  // MTU in the tunnel that this path gave last; 0: none yet
	six  bool // IPv6 goes through the tunnel
}

// leastMTU returns the size of packets that every path to a peer should carry.
func leastMTU(p *fabric.GatewayPeer) int {
	if inner6(p) {
		return minAutoMTU6
	}
	return minAutoMTU
}

// inner6 reports whether IPv6 goes through the tunnel to a peer.
func inner6(p *fabric.GatewayPeer) bool {
	return p.AllowedIPs[0].Addr().Is6() || p.AllowedIPs[1].Addr().Is6()
}

// autoMTUs returns for each peer the size of the largest packet that fits into one outer packet on
// the path to it. For the device it returns the largest of these, or last if no path is known. A
// path that is no longer known keeps its last value, and one that never was counts as Ethernet.
func autoMTUs(ways []underlay, last int) (tunnel int, each []int) {
	each = make([]int, len(ways))
	for i := range ways {
		tunnel = max(tunnel, ways[i].inner())
	}
	tunnel = cmp.Or(tunnel, last, defaultMTU)
	for i := range ways {
		mtu := min(cmp.Or(ways[i].inner(), defaultMTU), tunnel)
		if mtu < tunnel {
			mtu -= mtu % padding
		}
		each[i] = mtu
	}
	return tunnel, each
}

// inner returns the size of packets that fit into one outer packet, or 0 if the path was never
// known.
func (w *underlay) inner() int {
	if w.mtu == 0 {
		return w.last
	}
	least := minAutoMTU
	if w.six {
		least = minAutoMTU6
	}
	return min(max(w.mtu-overheadTo(w.addr), least), maxAutoMTU)
}

func overheadTo(outer netip.Addr) int {
	if outer.Is6() {
		return overhead6
	}
	return overhead4
}

// mssFor is the TCP segment size for IPv4 that fits the MTU: 20 octets of IP header, 20 of TCP
// header. The engine takes 20 more off for IPv6.
func mssFor(mtu int) uint16 { return uint16(mtu - 40) }

// rulesFor returns the rules for a peer, with the MTU towards it.
func rulesFor(p *fabric.GatewayPeer, mtu int) natengine.Peer {
	r := p.Rules
	r.MTU, r.MSS = uint16(mtu), mssFor(mtu)
	return r
}

// checkMTU returns an error if a configured MTU is invalid; 0 means that none is configured. IPv6
// has no link below 1280 octets, and Linux disables it on a device with less.
func checkMTU(mtu int, peers []*fabric.GatewayPeer) error {
	if mtu == 0 || mtu >= minAutoMTU6 {
		return nil
	}
	for _, p := range peers {
		if p.AllowedIPs[0].Addr().Is6() {
			return fmt.Errorf("mtu: is %d; want at least %d, because the networks of cluster %s are IPv6 (%s)",
				mtu, minAutoMTU6, p.ID, p.Origin)
		}
	}
	return nil
}

// measure finds the MTU of the tunnel and towards each of peers. If c sets none, it derives them
// from the MTU that the kernel knows for the path to a peer: to its current address, or else to the
// configured one. That includes what routers on the path have reported, which the kernel remembers
// for ten minutes without an event. It asks the kernel only about peers whose address has changed,
// or, with all, about every peer. A peer whose path drops packets of that size gets a smaller MTU,
// see narrowPaths.
func (l *loop) measure(c Config, peers []peer, all bool) (tunnel int) {
	if tunnel = c.MTU; tunnel != 0 {
		for i := range peers {
			peers[i].way, peers[i].asked = tunnel, netip.Addr{}
		}
	} else {
		tunnel = l.measureWays(peers, all)
	}
	narrow := l.ends[0].checker.NarrowPaths()
	for i := range peers {
		p := &peers[i]
		p.mtu = p.way
		if mtu, is := narrow[p.ID]; is {
			p.mtu = min(mtu, p.way)
		}
	}
	return tunnel
}

func (l *loop) measureWays(peers []peer, all bool) (tunnel int) {
	ways, links, asked := make([]underlay, len(peers)), make(map[int]int), 0
	for i := range peers {
		p := &peers[i]
		at := p.at
		if e := p.session.stats.Endpoint; e.IsValid() {
			at = e // the peer may have roamed, or its name was never resolved
		}
		if addr := at.Addr(); addr.IsValid() && (all || addr != p.asked) {
			if asked++; asked%32 == 0 { // about every millisecond, let packets through
				time.Sleep(time.Millisecond)
			}
			mtu, err := l.mtuTo(addr, links)
			if err != nil {
				// Without a path to the peer, no packet is too large.
				l.log.Debug("no route to the peer", "peer", p.ID, "error", err)
			}
			p.asked, p.kernel = addr, mtu
		} else if !addr.IsValid() {
			p.asked, p.kernel = netip.Addr{}, 0
		}
		ways[i] = underlay{addr: p.asked, mtu: p.kernel, last: p.way, six: inner6(p.GatewayPeer)}
	}
	ignore := slices.ContainsFunc(ways, func(w underlay) bool { return w.addr.Is4() && w.mtu != 0 && w.mtu < w.inner()+overhead4 })
	for _, e := range l.ends {
		if err := e.wire.IgnorePath(ignore); err != nil {
			l.log.Warn("cannot change how the socket handles the path MTU", "ignored", ignore, "error", err)
		}
	}
	tunnel, each := autoMTUs(ways, l.now.mtu)
	for i := range peers {
		peers[i].way = each[i]
	}
	return tunnel
}
