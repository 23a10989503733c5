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

	// padding is what WireGuard pads a packet to, but never beyond the MTU of the device. So a
	// packet for a peer with a smaller MTU must not be padded beyond that one: it is a multiple.
	padding = 16

	// defaultMTU is for a way that is not known yet: Ethernet.
	defaultMTU = 1500 - overhead4
	// minAutoMTU fits into 1280 octets under either outer header, and minAutoMTU6 is what IPv6 asks
	// of a link (RFC 8200, section 5). Both are multiples of padding. Who claims that less passes is
	// mostly somebody who forged an ICMP error; on such an underlay routers cut the outer packets,
	// see bind.IgnorePath.
	minAutoMTU  = 1280 - overhead6
	minAutoMTU6 = 1280
	// maxAutoMTU is for jumbo frames. More is found on loopback and on virtual links only, whose
	// size says nothing about the path behind them.
	maxAutoMTU = 9000 - overhead4
)

// underlay is the way to one peer.
type underlay struct {
	addr netip.Addr
	mtu  int  // of the way; 0: not known
	last int  // what it gave the peer for an MTU in the tunnel, 0: nothing yet
	six  bool // IPv6 goes through the tunnel
}

// leastMTU is what every path to a peer should take.
func leastMTU(p *fabric.GatewayPeer) int {
	if inner6(p) {
		return minAutoMTU6
	}
	return minAutoMTU
}

// inner6 says whether IPv6 goes through the tunnel to a peer.
func inner6(p *fabric.GatewayPeer) bool {
	return p.AllowedIPs[0].Addr().Is6() || p.AllowedIPs[1].Addr().Is6()
}

// autoMTUs gives each peer the largest packet that fits into one outer packet on the way to it, and
// the device the largest of these, or last when no way is known. A way that is not known any more
// is taken for what it was, and one that never was for Ethernet.
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

// inner is what fits into one outer packet, 0 when the way never was known.
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

// rulesFor are the rules for a peer to which packets of an MTU may go.
func rulesFor(p *fabric.GatewayPeer, mtu int) natengine.Peer {
	r := p.Rules
	r.MTU, r.MSS = uint16(mtu), mssFor(mtu)
	return r
}

// checkMTU says what is wrong with an MTU that is asked for, 0 for none: IPv6 has no link below
// 1280 octets, and Linux takes it away from a device that has less.
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

// measure finds the MTU of the tunnel and towards each of peers. Where c leaves it to us, that is what
// the kernel says about the way to every peer whose address is known: where it is, else where it is
// configured to be. That includes what routers on the way have said; the kernel remembers it for ten
// minutes, and tells nobody of it. It is asked about peers that are somewhere else now, and with all
// about each. Either is lowered to what the path takes.
func (g *gateway) measure(c Config, peers []peer, all bool) (tunnel int) {
	if tunnel = c.MTU; tunnel != 0 {
		for i := range peers {
			peers[i].way, peers[i].asked = tunnel, netip.Addr{}
		}
	} else {
		tunnel = g.measureWays(peers, all)
	}
	narrow := g.ends[0].checker.narrowPaths()
	for i := range peers {
		p := &peers[i]
		p.mtu = p.way
		if mtu, is := narrow[p.ID]; is {
			p.mtu = min(mtu, p.way)
		}
	}
	return tunnel
}

func (g *gateway) measureWays(peers []peer, all bool) (tunnel int) {
	ways, links, asked := make([]underlay, len(peers)), make(map[int]int), 0
	for i := range peers {
		p := &peers[i]
		at := p.at
		if e := p.session.stats.Endpoint; e.IsValid() {
			at = e // it may have roamed, or never have had a name
		}
		if addr := at.Addr(); addr.IsValid() && (all || addr != p.asked) {
			if asked++; asked%32 == 0 { // a millisecond or so, which packets wait for where there is one processor
				time.Sleep(time.Millisecond)
			}
			mtu, err := g.mtuTo(addr, links)
			if err != nil {
				g.log.Debug("no way to the peer", "peer", p.ID, "error", err) // nothing to be too large for
			}
			p.asked, p.kernel = addr, mtu
		} else if !addr.IsValid() {
			p.asked, p.kernel = netip.Addr{}, 0
		}
		ways[i] = underlay{addr: p.asked, mtu: p.kernel, last: p.way, six: inner6(p.GatewayPeer)}
	}
	ignore := slices.ContainsFunc(ways, func(w underlay) bool { return w.addr.Is4() && w.mtu != 0 && w.mtu < w.inner()+overhead4 })
	for _, e := range g.ends {
		if err := e.wire.IgnorePath(ignore); err != nil {
			g.log.Warn("cannot change how the socket handles the path MTU", "ignored", ignore, "error", err)
		}
	}
	tunnel, each := autoMTUs(ways, g.now.mtu)
	for i := range peers {
		peers[i].way = each[i]
	}
	return tunnel
}
