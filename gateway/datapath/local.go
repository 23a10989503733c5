package datapath

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const (
	// localQueueLen is the maximum number of packets that wait in one queue of a localLink. If a
	// queue is full, a new packet is dropped and counted as DropLocalQueue.
	localQueueLen = 256

	localNIC = 1
)

// Local is the gateway's own endpoint in the tunnel. A TCP/IP stack inside the process answers
// ICMP echo requests. Messages between gateways (Liqo's connection check on UDP port 12345)
// bypass that stack and go to a Port. Local has no address in the kernel, so the kernel's
// addresses, routes and firewall do not affect it. It receives the packets with verdict Deliver;
// the packets that it sends pass the engine like those of a pod.
//
// Safe for concurrent use.
type Local struct {
	stack   *stack.Stack
	link    *localLink
	addrs   [2]netip.Addr // IPv4, IPv6; zero: none
	port    atomic.Pointer[Port]
	streams atomic.Pointer[Streams]
	out     turns // packets that the Port sends, by destination
	closed  atomic.Bool

	// deliver holds this mutex, so that an increase of the stack's error counters belongs to one
	// packet.
	delivering sync.Mutex
}

// NewLocal returns an endpoint with an IPv4 address (Liqo's 169.254.0.1), an IPv6 address, or
// both; the zero Addr means none. mtu is in octets. Larger packets are sent as fragments.
func NewLocal(addr4, addr6 netip.Addr, mtu int) (*Local, error) {
	if addr4.IsValid() && !addr4.Is4() || addr6.IsValid() && !addr6.Is6() || !addr4.IsValid() && !addr6.IsValid() {
		return nil, fmt.Errorf("in-process endpoint: addresses %v, %v: want an IPv4 address, then an IPv6 address", addr4, addr6)
	}
	l := &Local{
		stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{udp.NewProtocol},
		}),
		link:  newLocalLink(uint32(mtu)),
		addrs: [2]netip.Addr{addr4, addr6},
	}
	// The stack's own limit applies to all peers together, so a single peer could exhaust it.
	// Instead, each peer has a limit of its own (peer.others).
	l.stack.SetICMPLimit(rate.Inf)
	if err := configure(l.stack, l.link, l.addrs); err != nil {
		l.Close()
		return nil, fmt.Errorf("in-process endpoint: %w", err)
	}
	return l, nil
}

// configure sets a stack's addresses, and adds routes that send everything to its link.
func configure(s *stack.Stack, link *localLink, addrs [2]netip.Addr) error {
	if err := s.CreateNIC(localNIC, link); err != nil {
		return fmt.Errorf("interface: %s", err)
	}
	var routes []tcpip.Route
	for _, a := range []struct {
		addr     netip.Addr
		protocol tcpip.NetworkProtocolNumber
		all      tcpip.Subnet
	}{
		{addrs[0], ipv4.ProtocolNumber, header.IPv4EmptySubnet},
		{addrs[1], ipv6.ProtocolNumber, header.IPv6EmptySubnet},
	} {
		if !a.addr.IsValid() {
			continue
		}
		own := tcpip.ProtocolAddress{Protocol: a.protocol, AddressWithPrefix: tcpip.AddrFromSlice(a.addr.AsSlice()).WithPrefix()}
		if err := s.AddProtocolAddress(localNIC, own, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("address %s: %s", a.addr, err)
		}
		routes = append(routes, tcpip.Route{Destination: a.all, NIC: localNIC})
	}
	s.SetRouteTable(routes)
	return nil
}

// udp returns a complete IP packet with a UDP datagram from the endpoint.
func (l *Local) udp(payload []byte, from uint16, to netip.AddrPort) ([]byte, error) {
	headers, src := header.IPv4MinimumSize, l.addrs[0]
	if to.Addr().Is6() {
		headers, src = header.IPv6MinimumSize, l.addrs[1]
	}
	size := header.UDPMinimumSize + len(payload)
	if !to.IsValid() || to.Addr().Is4In6() || !src.IsValid() || headers+size > 0xffff {
		return nil, fmt.Errorf("in-process endpoint: cannot send a datagram of %d octets to %v", len(payload), to)
	}
	b := make([]byte, headers+size)
	ours, theirs := tcpip.AddrFromSlice(src.AsSlice()), tcpip.AddrFromSlice(to.Addr().AsSlice())
	if src.Is4() {
		ip := header.IPv4(b)
		ip.Encode(&header.IPv4Fields{TotalLength: uint16(len(b)), Flags: header.IPv4FlagDontFragment, TTL: ipv4.DefaultTTL,
			Protocol: uint8(udp.ProtocolNumber), SrcAddr: ours, DstAddr: theirs})
		ip.SetChecksum(^ip.CalculateChecksum())
	} else {
		header.IPv6(b).Encode(&header.IPv6Fields{PayloadLength: uint16(size), TransportProtocol: udp.ProtocolNumber, HopLimit: ipv6.DefaultTTL,
			SrcAddr: ours, DstAddr: theirs})
	}
	u := header.UDP(b[headers:])
	u.Encode(&header.UDPFields{SrcPort: from, DstPort: to.Port(), Length: uint16(size)})
	copy(u.Payload(), payload)
	sum := header.PseudoHeaderChecksum(udp.ProtocolNumber, ours, theirs, uint16(size))
	if sum = ^u.CalculateChecksum(checksum.Checksum(payload, sum)); sum == 0 {
		sum = 0xffff // zero would mean "no checksum"
	}
	u.SetChecksum(sum)
	return b, nil
}

// SetMTU sets the size in octets above which packets are sent as fragments.
func (l *Local) SetMTU(mtu int) {
	l.link.SetMTU(uint32(mtu))
	if s := l.streams.Load(); s != nil {
		s.link.SetMTU(uint32(mtu))
	}
}

// Close closes the endpoint and its port. Further calls do nothing.
func (l *Local) Close() {
	if l.closed.Swap(true) {
		return
	}
	if port := l.port.Load(); port != nil {
		port.Close()
	}
	if s := l.streams.Load(); s != nil {
		s.close()
	}
	l.link.wake.Store(nil)
	l.stack.Destroy()
	l.link.Endpoint.Close()
}

// attach sets two functions: wake is called after a packet was queued, and overflow after a packet
// was dropped because its queue was full.
func (l *Local) attach(wake, overflow func()) {
	l.link.overflow.Store(&overflow)
	l.link.wake.Store(&wake)
}

// next copies to p the next packet that the endpoint sends. n is its length, or 0 if there is none.
// size is the length to which the packet must be padded, or 0. Packets of the Port have priority,
// because they are few, and peers count as connected only if these packets arrive.
func (l *Local) next(p []byte) (n, size int) {
	// This runs once per batch, so each pop costs only one atomic load if its queue is empty.
	if d, ok := l.out.pop(); ok {
		return copy(p, d.b), d.size
	}
	if n := l.link.next(p); n > 0 {
		return n, 0
	}
	if s := l.streams.Load(); s != nil {
		return s.link.next(p), 0
	}
	return 0, 0
}

// hasPadded reports whether the next packet must be padded.
func (l *Local) hasPadded() bool { return l.out.peek().size > 0 }

// deliver passes one complete packet to the stack, which copies it, and reports whether the stack
// accepted it. Answers (ICMP echo) may be queued before deliver returns. from is the peer that
// sent the packet, or nil.
func (l *Local) deliver(from *peer, b []byte) bool {
	protocol := ipv4.ProtocolNumber
	if b[0]>>4 == 6 {
		protocol = ipv6.ProtocolNumber
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	l.delivering.Lock()
	defer l.delivering.Unlock()
	before := l.refused()
	l.link.answers.Store(from)
	defer l.link.answers.Store(nil)
	l.link.InjectInbound(protocol, pkt)
	pkt.DecRef()
	return l.refused() == before
}

// refused returns the number of packets that the stack has refused, for example because of
// malformed IP options or an ICMP message that is too short.
func (l *Local) refused() uint64 {
	s := l.stack.Stats()
	return s.IP.MalformedPacketsReceived.Value() + s.ICMP.V4.PacketsReceived.Invalid.Value() + s.ICMP.V6.PacketsReceived.Invalid.Value()
}

// A localLink is the link of a TCP/IP stack. An answer that the stack sends during deliver waits in
// a queue of the peer that is answered. Any other packet waits in a queue of its destination. So a
// peer that makes the stack send many packets does not use the queues of other peers. Streams never
// call deliver, so all segments of a connection wait in one queue, in order. The embedded
// channel.Endpoint has a queue as well, which is not used.
type localLink struct {
	*channel.Endpoint
	out            turns
	answers        atomic.Pointer[peer] // the peer whose packet deliver handles; nil: none
	wake, overflow atomic.Pointer[func()]
}

func newLocalLink(mtu uint32) *localLink {
	return &localLink{Endpoint: channel.New(0, mtu, ""), out: turns{perParty: localQueueLen}}
}

// next copies to p the next packet that the stack sends. It returns the packet's length, or 0 if
// there is none.
func (l *localLink) next(p []byte) int {
	d, _ := l.out.pop()
	return copy(p, d.b)
}

// WritePackets queues the packets that fit and counts the others.
func (l *localLink) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	queued := 0
	for _, pkt := range pkts.AsSlice() {
		view := pkt.ToView()
		b := view.ToSlice()
		view.Release()
		if l.out.push(datagram{at: netip.AddrPortFrom(destination(b), 0), requester: l.answers.Load(), b: b}) {
			queued++
		} else {
			l.call(&l.overflow)
		}
	}
	if queued > 0 {
		l.call(&l.wake)
	}
	return queued, nil
}

// destination returns the destination address of a packet from the stack.
func destination(b []byte) netip.Addr {
	if b[0]>>4 == 4 {
		return netip.AddrFrom4([4]byte(b[16:20]))
	}
	return netip.AddrFrom16([16]byte(b[24:40]))
}

func (l *localLink) call(f *atomic.Pointer[func()]) {
	if f := f.Load(); f != nil {
		(*f)()
	}
}
