package datapath

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const (
	// LocalQueueLen bounds the packets that the in-process endpoint has sent and the reader has not
	// fetched yet. What comes on top is dropped and counted as DropLocalQueue: a flood of pings
	// costs the flooder answers, not us memory.
	LocalQueueLen = 256

	localNIC = 1
)

// Local is the gateway's own endpoint: a TCP/IP stack inside the process that answers ICMP echo and
// carries UDP sockets (Liqo's connection check on port 12345). It has no kernel address, so the
// kernel's addresses, routes and firewall cannot get in its way. Packets to it are those with
// verdict Deliver; packets from it pass the engine like any pod's.
//
// Safe for concurrent use.
type Local struct {
	stack  *stack.Stack
	link   *localLink
	has6   bool
	addrs  [2]netip.Addr // IPv4, IPv6; zero: none
	padded chan padded   // beside the stack's queue
	closed atomic.Bool
}

// padded is a packet that is to be sent in a WireGuard message for one of size octets.
type padded struct {
	packet []byte
	size   int
}

// NewLocal makes an endpoint with an IPv4 address (Liqo's 169.254.0.1), an IPv6 address, or both;
// the zero Addr means that there is none. mtu is in octets; larger packets leave it as fragments.
func NewLocal(addr4, addr6 netip.Addr, mtu int) (*Local, error) {
	if addr4.IsValid() && !addr4.Is4() || addr6.IsValid() && !addr6.Is6() || !addr4.IsValid() && !addr6.IsValid() {
		return nil, fmt.Errorf("in-process endpoint: addresses %v, %v: want IPv4, IPv6", addr4, addr6)
	}
	l := &Local{
		stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{udp.NewProtocol},
		}),
		link:   &localLink{Endpoint: channel.New(LocalQueueLen, uint32(mtu), "")},
		has6:   addr6.IsValid(),
		addrs:  [2]netip.Addr{addr4, addr6},
		padded: make(chan padded, LocalQueueLen),
	}
	if err := l.configure(addr4, addr6); err != nil {
		l.Close()
		return nil, fmt.Errorf("in-process endpoint: %w", err)
	}
	return l, nil
}

func (l *Local) configure(addr4, addr6 netip.Addr) error {
	if err := l.stack.CreateNIC(localNIC, l.link); err != nil {
		return fmt.Errorf("interface: %s", err)
	}
	var routes []tcpip.Route
	for _, a := range []struct {
		addr     netip.Addr
		protocol tcpip.NetworkProtocolNumber
		all      tcpip.Subnet
	}{
		{addr4, ipv4.ProtocolNumber, header.IPv4EmptySubnet},
		{addr6, ipv6.ProtocolNumber, header.IPv6EmptySubnet},
	} {
		if !a.addr.IsValid() {
			continue
		}
		own := tcpip.ProtocolAddress{Protocol: a.protocol, AddressWithPrefix: tcpip.AddrFromSlice(a.addr.AsSlice()).WithPrefix()}
		if err := l.stack.AddProtocolAddress(localNIC, own, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("address %s: %s", a.addr, err)
		}
		routes = append(routes, tcpip.Route{Destination: a.all, NIC: localNIC})
	}
	l.stack.SetRouteTable(routes)
	return nil
}

// ListenUDP opens a socket on the port (0: any) of all of the endpoint's addresses. Its addresses
// are *net.UDPAddr; IPv4 addresses are in four octets. After Close of the socket or of the endpoint
// its methods return net.ErrClosed.
func (l *Local) ListenUDP(port uint16) (net.PacketConn, error) {
	if l.closed.Load() {
		return nil, net.ErrClosed
	}
	network := ipv4.ProtocolNumber
	if l.has6 {
		network = ipv6.ProtocolNumber // without IPV6_V6ONLY, so IPv4 too
	}
	c, err := gonet.DialUDP(l.stack, &tcpip.FullAddress{NIC: localNIC, Port: port}, nil, network)
	if err != nil {
		return nil, fmt.Errorf("in-process endpoint: %w", err)
	}
	return &localConn{UDPConn: c}, nil
}

// SendPadded sends a UDP datagram from a port of the endpoint in a WireGuard message as long as that
// of a packet of size octets, which must not exceed the tunnel's MTU: what follows the packet is
// padding, which the receiver takes off by the length in the IP header (WireGuard paper, section
// 5.4.6). Without a session with the peer it waits for one like any packet. It does not keep
// payload.
func (l *Local) SendPadded(payload []byte, from uint16, to netip.AddrPort, size int) error {
	b, err := l.datagram(payload, from, to)
	if err != nil {
		return err
	}
	if l.closed.Load() {
		return net.ErrClosed
	}
	select {
	case l.padded <- padded{b, size}:
		l.link.called(&l.link.wake)
	default:
		l.link.called(&l.link.overflow)
	}
	return nil
}

// datagram is a whole packet of the endpoint.
func (l *Local) datagram(payload []byte, from uint16, to netip.AddrPort) ([]byte, error) {
	headers, src := header.IPv4MinimumSize, l.addrs[0]
	if to.Addr().Is6() {
		headers, src = header.IPv6MinimumSize, l.addrs[1]
	}
	size := header.UDPMinimumSize + len(payload)
	if !to.IsValid() || to.Addr().Is4In6() || !src.IsValid() || headers+size > 0xffff {
		return nil, fmt.Errorf("in-process endpoint: no datagram of %d octets to %v", len(payload), to)
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
		sum = 0xffff // zero would say that there is none
	}
	u.SetChecksum(sum)
	return b, nil
}

// SetMTU changes the size in octets above which packets leave as fragments.
func (l *Local) SetMTU(mtu int) { l.link.SetMTU(uint32(mtu)) }

// Close ends the endpoint and its sockets. Further calls do nothing.
func (l *Local) Close() {
	if l.closed.Swap(true) {
		return
	}
	l.link.wake.Store(nil)
	l.stack.Destroy()
	l.link.Endpoint.Close()
}

// attach sets what is called when the queue has got a packet, and when it had no place for one.
func (l *Local) attach(wake, overflow func()) {
	l.link.overflow.Store(&overflow)
	l.link.wake.Store(&wake)
}

// next copies the oldest packet of the endpoint into p and returns its length, 0 when there is none,
// and the size that it is to be padded to, 0 for none.
func (l *Local) next(p []byte) (n, size int) {
	if l.hasPadded() { // one load, as below: this is asked once per batch
		next := <-l.padded
		return copy(p, next.packet), next.size
	}
	if l.link.NumQueued() == 0 {
		return 0, 0
	}
	pkt := l.link.Read()
	if pkt == nil {
		return 0, 0
	}
	defer pkt.DecRef()
	view := pkt.ToView()
	defer view.Release()
	return copy(p, view.AsSlice()), 0
}

// hasPadded says whether the next packet is to be padded.
func (l *Local) hasPadded() bool { return len(l.padded) > 0 }

// deliver hands the endpoint one whole packet, which it copies. Answers (ICMP echo) may be in the
// queue before it returns.
func (l *Local) deliver(b []byte) {
	protocol := ipv4.ProtocolNumber
	if b[0]>>4 == 6 {
		protocol = ipv6.ProtocolNumber
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	l.link.InjectInbound(protocol, pkt)
	pkt.DecRef()
}

// localLink is the stack's side of the queue.
type localLink struct {
	*channel.Endpoint
	wake, overflow atomic.Pointer[func()]
}

// WritePackets queues what has a place and counts the rest.
func (l *localLink) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	n, err := l.Endpoint.WritePackets(pkts)
	if err == nil {
		for range pkts.Len() - n {
			l.called(&l.overflow)
		}
	}
	if n > 0 {
		l.called(&l.wake)
	}
	return n, err
}

// called calls what is set, if anything is.
func (l *localLink) called(f *atomic.Pointer[func()]) {
	if f := f.Load(); f != nil {
		(*f)()
	}
}

// localConn gives a netstack socket the addresses and the errors of package net.
type localConn struct {
	*gonet.UDPConn
	closed atomic.Bool
}

func (c *localConn) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := c.UDPConn.ReadFrom(b)
	if err != nil {
		return 0, nil, c.errorOf(err)
	}
	return n, from, nil
}

func (c *localConn) WriteTo(b []byte, to net.Addr) (int, error) {
	a, ok := to.(*net.UDPAddr)
	if !ok {
		return 0, &net.OpError{Op: "write", Net: "udp", Addr: to, Err: errors.New("not a UDP address")}
	}
	if ip4 := a.IP.To4(); ip4 != nil {
		a = &net.UDPAddr{IP: ip4, Port: a.Port}
	}
	n, err := c.UDPConn.WriteTo(b, a)
	return n, c.errorOf(err)
}

func (c *localConn) Close() error {
	if c.closed.Swap(true) {
		return net.ErrClosed
	}
	return c.UDPConn.Close()
}

// errorOf makes netstack's io.EOF of a closed socket the error that net has.
func (c *localConn) errorOf(err error) error {
	if err == nil {
		return nil
	}
	if c.closed.Load() || errors.Is(err, io.EOF) {
		return net.ErrClosed
	}
	return err
}
