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
	// overhead4 and overhead6 are the octets that encapsulation adds to a packet: 32 for
	// WireGuard's header and tag, 8 for UDP, and 20 for IPv4 or 40 for IPv6.
	overhead4 = 60
	overhead6 = 80

	// WireGuard pads a packet to a multiple of padding, but never beyond the MTU of the device. If
	// a peer has a smaller MTU than the device, that MTU must be a multiple of padding, or a padded
	// packet would exceed it.
	padding = 16

	// defaultMTU assumes Ethernet. It is used for a path whose MTU is not known.
	defaultMTU = 1500 - overhead4
	// A packet of minAutoMTU octets fits into 1280 octets with either outer header. minAutoMTU6 is
	// the minimum that IPv6 requires of a link (RFC 8200, section 5). Both are multiples of
	// padding. A smaller path MTU is mostly a forged ICMP error. If it is real, routers fragment
	// the outer packets (see bind.IgnorePath).
	minAutoMTU  = 1280 - overhead6
	minAutoMTU6 = 1280
	// maxAutoMTU allows for jumbo frames. Only loopback and virtual links have a larger MTU, which
	// is not the MTU of the path behind them.
	maxAutoMTU = 9000 - overhead4
)

// An underlay is the network path to one peer, outside the tunnel.
type underlay struct {
	addr netip.Addr
	mtu  int  // MTU of the path, in octets; 0: unknown
	last int  // the tunnel MTU that was last derived from this path, in octets; 0: none yet
	ipv6 bool // the tunnel carries IPv6
}

// leastMTU returns the size of the largest packet that every path to the peer should carry.
func leastMTU(p *fabric.GatewayPeer) int {
	if inner6(p) {
		return minAutoMTU6
	}
	return minAutoMTU
}

// inner6 reports whether the tunnel to a peer carries IPv6.
func inner6(p *fabric.GatewayPeer) bool {
	return p.AllowedIPs[0].Addr().Is6() || p.AllowedIPs[1].Addr().Is6()
}

// autoMTUs derives MTUs from the paths to the peers. pathMTUs has, for each path, the size of the
// largest packet that fits into one outer packet. tunnel is the MTU of the device: the largest of
// these sizes, or previous if no path is known. If the MTU of a path is no longer known, the path
// keeps its last value. If it was never known, the path counts as Ethernet.
func autoMTUs(paths []underlay, previous int) (tunnel int, pathMTUs []int) {
	pathMTUs = make([]int, len(paths))
	for i := range paths {
		tunnel = max(tunnel, paths[i].innerMTU())
	}
	tunnel = cmp.Or(tunnel, previous, defaultMTU)
	for i := range paths {
		mtu := min(cmp.Or(paths[i].innerMTU(), defaultMTU), tunnel)
		if mtu < tunnel {
			mtu -= mtu % padding
		}
		pathMTUs[i] = mtu
	}
	return tunnel, pathMTUs
}

// innerMTU returns the size of the largest packet that fits into one outer packet on this path, or
// 0 if its MTU was never known.
func (w *underlay) innerMTU() int {
	if w.mtu == 0 {
		return w.last
	}
	least := minAutoMTU
	if w.ipv6 {
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

// mssFor returns the TCP segment size for IPv4 that fits the MTU: it subtracts 20 octets of IP
// header and 20 of TCP header. The engine subtracts 20 more for IPv6.
func mssFor(mtu int) uint16 { return uint16(mtu - 40) }

// rulesFor returns the engine's rules for a peer, with the given MTU towards it.
func rulesFor(p *fabric.GatewayPeer, mtu int) natengine.Peer {
	r := p.Rules
	r.MTU, r.MSS = uint16(mtu), mssFor(mtu)
	return r
}

// checkMTU returns an error if a configured MTU is invalid; 0 means that none is configured. IPv6
// needs at least 1280 octets, and Linux disables IPv6 on a device with less.
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

// measure determines the MTU of the tunnel and, in peers, the MTU towards each peer. If c sets no
// MTU, measure derives it from the kernel's path MTU to the peer's current address or, if the peer
// has none, to its configured one. The kernel's value includes reports by routers on the path. The
// kernel discards a report after ten minutes, and sends no event then. So if remeasure is true,
// measure queries the kernel for every peer. Otherwise it does so only for peers whose address has
// changed. A peer whose path silently drops packets of that size gets a smaller MTU
// (check.Monitor.NarrowPaths).
func (l *loop) measure(c Config, peers []peer, remeasure bool) (tunnel int) {
	if tunnel = c.MTU; tunnel != 0 {
		for i := range peers {
			peers[i].pathInner, peers[i].queried = tunnel, netip.Addr{}
		}
	} else {
		tunnel = l.measurePaths(peers, remeasure)
	}
	narrow := l.tunnels[0].checker.NarrowPaths()
	for i := range peers {
		p := &peers[i]
		p.mtu = p.pathInner
		if mtu, found := narrow[p.ID]; found {
			p.mtu = min(mtu, p.pathInner)
		}
	}
	return tunnel
}

func (l *loop) measurePaths(peers []peer, remeasure bool) (tunnel int) {
	paths, links, queried := make([]underlay, len(peers)), make(map[int]int), 0
	for i := range peers {
		p := &peers[i]
		at := p.at
		if e := p.session.stats.Endpoint; e.IsValid() {
			at = e // the peer may have roamed, or its name was never resolved
		}
		if addr := at.Addr(); addr.IsValid() && (remeasure || addr != p.queried) {
			if queried++; queried%32 == 0 { // about every millisecond, yield the CPU to the packet path
				time.Sleep(time.Millisecond)
			}
			mtu, err := l.mtuTo(addr, links)
			if err != nil {
				// The MTU stays the same without a route, so a debug message is enough.
				l.log.Debug("no route to the peer", "peer", p.ID, "error", err)
			}
			p.queried, p.kernel = addr, mtu
		} else if !addr.IsValid() {
			p.queried, p.kernel = netip.Addr{}, 0
		}
		paths[i] = underlay{addr: p.queried, mtu: p.kernel, last: p.pathInner, ipv6: inner6(p.GatewayPeer)}
	}
	ignore := slices.ContainsFunc(paths, func(w underlay) bool { return w.addr.Is4() && w.mtu != 0 && w.mtu < w.innerMTU()+overhead4 })
	for _, e := range l.tunnels {
		if err := e.wire.IgnorePath(ignore); err != nil {
			l.log.Warn("cannot change how the socket handles the path MTU", "ignored", ignore, "error", err)
		}
	}
	tunnel, each := autoMTUs(paths, l.now.mtu)
	for i := range peers {
		peers[i].pathInner = each[i]
	}
	return tunnel
}
