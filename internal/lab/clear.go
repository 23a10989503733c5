package lab

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	own "github.com/isthmus-net/isthmus/internal/kernel"
)

// Watched describes the packets that the nodes of a cluster must not send into the underlay in
// the clear: those with a source or a destination in one of the networks.
type Watched struct {
	// Networks are the peers' networks, as the cluster sees them.
	Networks []netip.Prefix
	// Endpoints are addresses outside the pods that are mapped for peers. A packet from a peer to
	// an endpoint leaves the gateway without a tunnel. It is no leak, even if it crosses the
	// underlay.
	Endpoints []netip.Addr
	// Overlay is the cluster's pod network if gateways are pods, and otherwise zero. Any of its
	// addresses may be an endpoint of the overlay, because gateway pods are created and deleted.
	Overlay netip.Prefix
}

// A watch has the data to check the frames that the nodes of one cluster send. It is immutable.
type watch struct {
	Watched
	first, last netip.Addr   // underlay addresses of the nodes, which are consecutive
	others      []netip.Addr // other endpoints of the overlay: gateway pods, and addresses that the nodes got later
}

// watchFor returns a watch. added are addresses that nodes got after the start of the lab.
func watchFor(c *Cluster, what Watched, added []netip.Addr) *watch {
	w := &watch{Watched: what, first: c.Nodes[0].Addr, last: c.Nodes[len(c.Nodes)-1].Addr, others: slices.Clone(added)}
	for _, p := range c.GatewayPods {
		w.others = append(w.others, p.Addr)
	}
	return w
}

// leak reports whether a frame contains, in the clear, a packet from or to a watched network. It
// returns that network and a description of the packet. A packet inside the overlay is no leak if
// the overlay packet is between nodes or gateway pods of the cluster.
func (w *watch) leak(frame []byte) (network netip.Prefix, packet string, leaks bool) {
	outer, ok := parseFrame(frame)
	if !ok {
		return netip.Prefix{}, "", false
	}
	if network, leaks = w.shows(outer); leaks {
		return network, outer.String(), true
	}
	const vxlan = 8 + 8 // length of the UDP and VXLAN headers
	if outer.protocol != unix.IPPROTO_UDP || len(outer.payload) < vxlan || outer.port(2) != own.OverlayPort || w.mayCarry(outer.src) && w.mayCarry(outer.dst) {
		return netip.Prefix{}, "", false
	}
	inner, ok := parseFrame(outer.payload[vxlan:])
	if !ok {
		return netip.Prefix{}, "", false
	}
	network, leaks = w.shows(inner)
	return network, fmt.Sprintf("%v, with %v inside", outer, inner), leaks
}

func (w *watch) shows(h ipHeader) (netip.Prefix, bool) {
	for _, n := range w.Networks {
		if n.Contains(h.dst) || n.Contains(h.src) && !slices.Contains(w.Endpoints, h.dst) {
			return n, true
		}
	}
	return netip.Prefix{}, false
}

func (w *watch) isNode(a netip.Addr) bool { return w.first.Compare(a) <= 0 && a.Compare(w.last) <= 0 }

// mayCarry reports whether an address is an endpoint of the overlay.
func (w *watch) mayCarry(a netip.Addr) bool {
	return w.isNode(a) || slices.Contains(w.others, a) || w.Overlay.Contains(a)
}

// Offsets in a frame with an IPv4 header, for the filter.
const (
	etherType  = 12
	etherSize  = 14
	ipv4Frag   = etherSize + 6
	ipv4Proto  = etherSize + 9
	ipv4Source = etherSize + 12
	ipv4Dest   = etherSize + 16

	fragOffset = 0x1fff // mask for the 16 bits at ipv4Frag: the result is 0 only in the first fragment
	snapLength = 192    // number of octets to capture of a frame, enough for two headers with all options
)

// filter returns a BPF program for the kernel. It accepts every frame that may be a leak, and few
// other frames, so that throughput does not suffer.
func (w *watch) filter() []bpf.Instruction {
	pass, drop := bpf.RetConstant{Val: snapLength}, bpf.RetConstant{}
	if len(w.Networks) == 0 {
		return []bpf.Instruction{drop}
	}
	p := []bpf.Instruction{
		bpf.LoadAbsolute{Off: etherType, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_IPV6, SkipFalse: 1},
		pass,
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_IP, SkipTrue: 1},
		drop,
	}
	for _, offset := range []uint32{ipv4Source, ipv4Dest} {
		for _, n := range w.Networks {
			if !n.Addr().Is4() {
				continue
			}
			p = append(p,
				bpf.LoadAbsolute{Off: offset, Size: 4},
				bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: ^uint32(0) << (32 - n.Bits())},
				bpf.JumpIf{Cond: bpf.JumpEqual, Val: number(n.Masked().Addr()), SkipFalse: 1},
				pass)
		}
	}
	p = append(p,
		bpf.LoadAbsolute{Off: ipv4Proto, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipTrue: 1},
		drop,
		bpf.LoadAbsolute{Off: ipv4Frag, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: fragOffset, SkipFalse: 1},
		drop,
		bpf.LoadMemShift{Off: etherSize},
		bpf.LoadIndirect{Off: etherSize + 2, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: own.OverlayPort, SkipTrue: 1},
		drop)
	for _, offset := range []uint32{ipv4Source, ipv4Dest} {
		p = append(p, bpf.LoadAbsolute{Off: offset, Size: 4})
		for i, o := range w.others { // if an allowed endpoint's address is at this offset, continue with the next offset
			p = append(p, bpf.JumpIf{Cond: bpf.JumpEqual, Val: number(o), SkipTrue: uint8(len(w.others) - 1 - i + 4)})
		}
		p = append(p,
			bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: number(w.first), SkipTrue: 1},
			pass,
			bpf.JumpIf{Cond: bpf.JumpLessOrEqual, Val: number(w.last), SkipTrue: 1},
			pass)
	}
	return append(p, drop)
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

// ipHeader has the fields of a packet that are needed to find and describe a leak.
type ipHeader struct {
	src, dst netip.Addr
	protocol uint8
	length   int    // length of the packet in octets
	payload  []byte // the captured part; nil in all fragments except the first
}

// parseFrame parses the IP header of an Ethernet frame, which may be truncated.
func parseFrame(frame []byte) (h ipHeader, ok bool) {
	if len(frame) < etherSize {
		return h, false
	}
	ip := frame[etherSize:]
	switch kind := binary.BigEndian.Uint16(frame[etherType:]); {
	case kind == unix.ETH_P_IP && len(ip) >= 20:
		h = ipHeader{netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:])), ip[9], int(binary.BigEndian.Uint16(ip[2:])), nil}
		if n := int(ip[0]&0x0f) * 4; binary.BigEndian.Uint16(ip[6:])&fragOffset == 0 && 20 <= n && n < len(ip) {
			h.payload = ip[n:]
		}
	case kind == unix.ETH_P_IPV6 && len(ip) >= 40:
		h = ipHeader{netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:])), ip[6], 40 + int(binary.BigEndian.Uint16(ip[4:])), ip[40:]}
	default:
		return h, false
	}
	return h, true
}

// port returns the 16-bit field at an offset of the transport header, or 0 if there is none.
func (h ipHeader) port(offset int) uint16 {
	if len(h.payload) < offset+2 || h.protocol != unix.IPPROTO_UDP && h.protocol != unix.IPPROTO_TCP {
		return 0
	}
	return binary.BigEndian.Uint16(h.payload[offset:])
}

func (h ipHeader) String() string {
	name, known := map[uint8]string{
		unix.IPPROTO_ICMP: "ICMP", unix.IPPROTO_TCP: "TCP", unix.IPPROTO_UDP: "UDP", unix.IPPROTO_ICMPV6: "ICMPv6",
	}[h.protocol]
	if !known {
		name = fmt.Sprintf("IP protocol %d", h.protocol)
	}
	src, dst := h.src.String(), h.dst.String()
	if from, to := h.port(0), h.port(2); from != 0 || to != 0 {
		src, dst = netip.AddrPortFrom(h.src, from).String(), netip.AddrPortFrom(h.dst, to).String()
	}
	return fmt.Sprintf("%s %s -> %s, %d octets", name, src, dst, h.length)
}
