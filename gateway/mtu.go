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
	id   string
	addr netip.Addr
	mtu  int  // of the way; 0: not known
	last int  // what it gave the peer for an MTU in the tunnel, 0: nothing yet
	six  bool // IPv6 goes through the tunnel
}

// mtus are the largest packets in octets: of the device, and towards each peer.
type mtus struct {
	tunnel int
	peers  map[string]int // by ID, by what the kernel knows
	narrow map[string]int // and of those whose path takes less, see pathSearch
}

// sameMTU is one MTU for all.
func sameMTU(mtu int) mtus { return mtus{tunnel: mtu} }

// way is the MTU towards a peer by what the kernel knows.
func (m mtus) way(id string) int {
	if mtu, ok := m.peers[id]; ok {
		return mtu
	}
	return m.tunnel
}

// of is the MTU towards a peer.
func (m mtus) of(id string) int {
	if mtu, ok := m.narrow[id]; ok {
		return min(mtu, m.way(id))
	}
	return m.way(id)
}

// leastMTU is what every path to a peer should take.
func leastMTU(p fabric.GatewayPeer) int {
	if inner6(p) {
		return minAutoMTU6
	}
	return minAutoMTU
}

// inner6 says whether IPv6 goes through the tunnel to a peer.
func inner6(p fabric.GatewayPeer) bool {
	return slices.ContainsFunc(p.AllowedIPs[:], func(n netip.Prefix) bool { return n.Addr().Is6() })
}

// autoMTUs gives each peer the largest packet that fits into one outer packet on the way to it, and
// the device the largest of these, or last when no way is known. A way that is not known any more
// is taken for what it was, and one that never was for Ethernet.
func autoMTUs(ways []underlay, last int) mtus {
	m := mtus{peers: make(map[string]int, len(ways))}
	for _, w := range ways {
		m.tunnel = max(m.tunnel, w.inner())
	}
	m.tunnel = cmp.Or(m.tunnel, last, defaultMTU)
	for _, w := range ways {
		mtu := min(cmp.Or(w.inner(), defaultMTU), m.tunnel)
		if mtu < m.tunnel {
			mtu -= mtu % padding
		}
		m.peers[w.id] = mtu
	}
	return m
}

// inner is what fits into one outer packet, 0 when the way never was known.
func (w underlay) inner() int {
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

// rulesFor sets MTU and MSS in peers, which the caller owns, and returns their rules.
func rulesFor(peers []fabric.GatewayPeer, m mtus) []natengine.Peer {
	rules := make([]natengine.Peer, len(peers))
	for i := range peers {
		mtu := m.of(peers[i].ID)
		peers[i].Rules.MTU, peers[i].Rules.MSS = uint16(mtu), mssFor(mtu)
		rules[i] = peers[i].Rules
	}
	return rules
}

// checkMTU says what is wrong with an MTU that is asked for, 0 for none: IPv6 has no link below
// 1280 octets, and Linux takes it away from a device that has less.
func checkMTU(mtu int, peers []fabric.GatewayPeer) error {
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

// mtusFor is what c says or, when it leaves it to us, what the kernel says about the way to every
// peer whose address is known: where it is, else where it is configured to be. That includes what
// routers on the way have said; the kernel remembers it for ten minutes. Either is lowered to what
// the path takes.
func (g *gateway) mtusFor(c Config, peers []fabric.GatewayPeer) mtus {
	m := sameMTU(c.MTU)
	if c.MTU == 0 {
		m = g.mtusOfWays(peers)
	}
	m.narrow = g.ends[0].checker.narrowPaths()
	return m
}

func (g *gateway) mtusOfWays(peers []fabric.GatewayPeer) mtus {
	ways, links, known := make([]underlay, len(peers)), make(map[int]int), byID(g.now.peers)
	for i, p := range peers {
		if i%32 == 31 { // a millisecond or so, which packets wait for where there is one processor
			time.Sleep(time.Millisecond)
		}
		ways[i] = underlay{id: p.ID, six: inner6(p)}
		at, _ := g.resolver.endpoint(p.ID)
		if was := known[p.ID]; was != nil {
			ways[i].last = was.way
			if e := was.session.stats.Endpoint; e.IsValid() {
				at = e // it may have roamed, or never have had a name
			}
		}
		if !at.IsValid() {
			continue
		}
		mtu, err := g.host.MTUTo(at.Addr(), links)
		if err != nil {
			g.log.Debug("no way to the peer", "peer", p.ID, "error", err)
			continue // no way to it: nothing to be too large for
		}
		ways[i].addr, ways[i].mtu = at.Addr(), mtu
	}
	ignore := slices.ContainsFunc(ways, func(w underlay) bool { return w.addr.Is4() && w.mtu != 0 && w.mtu < w.inner()+overhead4 })
	for _, e := range g.ends {
		if err := e.wire.IgnorePath(ignore); err != nil {
			g.log.Warn("path MTU", "ignored", ignore, "error", err)
		}
	}
	return autoMTUs(ways, g.now.mtu)
}
