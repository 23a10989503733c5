package gateway

import "net/netip"

const (
	// What WireGuard and the outer headers add to a packet: message header and
	// tag 32, UDP 8, and 20 for IPv4 or 40 for IPv6. WireGuard's padding to 16
	// octets never goes beyond the MTU.
	overhead4 = 60
	overhead6 = 80

	// defaultMTU is for a gateway that knows no way to any peer yet: Ethernet.
	defaultMTU = 1500 - overhead4
	// minAutoMTU is what every IPv4 host has to accept (RFC 791); minAutoMTU6 is
	// what IPv6 asks of a link (RFC 8200, section 5). On a smaller underlay the
	// outer packets are fragmented, which costs most of the throughput.
	minAutoMTU  = 576
	minAutoMTU6 = 1280
	// maxAutoMTU is for jumbo frames. More is found on loopback and on virtual
	// links only, whose size says nothing about the path behind them.
	maxAutoMTU = 9000 - overhead4
)

// underlay is the way to one peer.
type underlay struct {
	addr netip.Addr
	mtu  int
}

// tunnelMTU is the largest packet, in octets, that fits into one outer packet on
// the way to every peer. six says that IPv6 goes through the tunnel.
func tunnelMTU(paths []underlay, six bool) int {
	mtu := maxAutoMTU
	for _, p := range paths {
		overhead := overhead4
		if p.addr.Is6() {
			overhead = overhead6
		}
		mtu = min(mtu, p.mtu-overhead)
	}
	if len(paths) == 0 {
		return defaultMTU
	}
	if six {
		return max(mtu, minAutoMTU6)
	}
	return max(mtu, minAutoMTU)
}

// mssFor is the TCP segment size for IPv4 that fits the MTU: 20 octets of IP
// header, 20 of TCP header. The engine takes 20 more off for IPv6.
func mssFor(mtu int) uint16 { return uint16(mtu - 40) }
