package memlink

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/isthmus-net/isthmus/packet"
)

// Host is what lies behind a Link: one TCP/IP stack that owns several addresses,
// pods and nodes alike. It offloads as the kernel does (TCP superpackets with
// partial checksums) and checks what it is given as the kernel does.
type Host struct {
	Stack *stack.Stack
	ep    *hostEndpoint
	link  *Link
}

const hostNIC = 1

// NewHost attaches a stack with the given addresses to the link. tso switches
// superpackets on. Close ends it.
func NewHost(link *Link, tso bool, addrs ...netip.Addr) (*Host, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	h := &Host{Stack: s, link: link, ep: &hostEndpoint{link: link, tso: tso}}
	h.ep.mtu.Store(uint32(link.MTU()))
	sack := tcpip.TCPSACKEnabled(true)
	if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack); err != nil {
		return nil, fmt.Errorf("SACK: %s", err)
	}
	if err := s.CreateNIC(hostNIC, h.ep); err != nil {
		return nil, fmt.Errorf("NIC: %s", err)
	}
	for _, a := range addrs {
		pa := tcpip.ProtocolAddress{Protocol: protocolOf(a), AddressWithPrefix: tcpip.AddrFromSlice(a.AsSlice()).WithPrefix()}
		if err := s.AddProtocolAddress(hostNIC, pa, stack.AddressProperties{}); err != nil {
			return nil, fmt.Errorf("address %s: %s", a, err)
		}
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: hostNIC},
		{Destination: header.IPv6EmptySubnet, NIC: hostNIC},
	})
	link.OnReceive(h.ep.receive)
	return h, nil
}

// Close ends the stack; the link stays open.
func (h *Host) Close() {
	h.link.OnReceive(func([][]byte) error { return nil })
	h.Stack.Destroy()
}

// Superpackets counts the superpackets sent and received; BadHeaders the packets
// from the gateway that a kernel would have refused or that were damaged.
func (h *Host) Superpackets() (sent, received uint64) {
	return h.ep.superOut.Load(), h.ep.superIn.Load()
}
func (h *Host) BadHeaders() uint64 { return h.ep.bad.Load() }

// SetMTU changes the MTU of the stack's interface.
func (h *Host) SetMTU(mtu int) { h.ep.mtu.Store(uint32(mtu)) }

// ListenTCP listens on one of the host's addresses.
func (h *Host) ListenTCP(at netip.AddrPort) (net.Listener, error) {
	return gonet.ListenTCP(h.Stack, fullAddress(at), protocolOf(at.Addr()))
}

// DialTCP connects from one of the host's addresses.
func (h *Host) DialTCP(ctx context.Context, from netip.Addr, to netip.AddrPort) (net.Conn, error) {
	return gonet.DialTCPWithBind(ctx, h.Stack, fullAddress(netip.AddrPortFrom(from, 0)), fullAddress(to), protocolOf(from))
}

// ListenUDP opens a socket on one of the host's addresses. noChecksum makes it
// send with UDP checksum 0 (IPv4 only).
func (h *Host) ListenUDP(at netip.AddrPort, noChecksum bool) (net.PacketConn, error) {
	var wq waiter.Queue
	ep, err := h.Stack.NewEndpoint(udp.ProtocolNumber, protocolOf(at.Addr()), &wq)
	if err != nil {
		return nil, fmt.Errorf("UDP endpoint: %s", err)
	}
	ep.SocketOptions().SetNoChecksum(noChecksum)
	if err := ep.Bind(fullAddress(at)); err != nil {
		ep.Close()
		return nil, fmt.Errorf("bind %s: %s", at, err)
	}
	return gonet.NewUDPConn(&wq, ep), nil
}

// Ping sends ICMP echo requests with the given payload until one is answered,
// and checks the answer.
func (h *Host) Ping(ctx context.Context, from, to netip.Addr, payload []byte) (time.Duration, error) {
	var wq waiter.Queue
	proto, request, reply := icmp.ProtocolNumber4, byte(header.ICMPv4Echo), byte(header.ICMPv4EchoReply)
	if to.Is6() {
		proto, request, reply = icmp.ProtocolNumber6, byte(header.ICMPv6EchoRequest), byte(header.ICMPv6EchoReply)
	}
	ep, err := h.Stack.NewEndpoint(proto, protocolOf(to), &wq)
	if err != nil {
		return 0, fmt.Errorf("ICMP endpoint: %s", err)
	}
	if err := ep.Bind(fullAddress(netip.AddrPortFrom(from, 0))); err != nil {
		ep.Close()
		return 0, fmt.Errorf("bind %s: %s", from, err)
	}
	if err := ep.Connect(fullAddress(netip.AddrPortFrom(to, 0))); err != nil {
		ep.Close()
		return 0, fmt.Errorf("connect %s: %s", to, err)
	}
	c := gonet.NewUDPConn(&wq, ep)
	defer c.Close()
	msg := make([]byte, 8+len(payload))
	msg[0] = request
	binary.BigEndian.PutUint16(msg[6:], 1)
	copy(msg[8:], payload)
	answer := make([]byte, len(msg)+1)
	for {
		start := time.Now()
		if _, err := c.Write(msg); err != nil {
			return 0, err
		}
		c.SetReadDeadline(start.Add(time.Second / 2))
		n, err := c.Read(answer)
		switch {
		case err == nil && n == len(msg) && answer[0] == reply && string(answer[8:n]) == string(payload):
			return time.Since(start), nil
		case err == nil:
			return 0, fmt.Errorf("ping %s: answer %x", to, answer[:n])
		case ctx.Err() != nil:
			return 0, fmt.Errorf("ping %s: %w", to, err)
		}
	}
}

func protocolOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return ipv4.ProtocolNumber
	}
	return ipv6.ProtocolNumber
}

func fullAddress(ap netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: hostNIC, Addr: tcpip.AddrFromSlice(ap.Addr().AsSlice()), Port: ap.Port()}
}

// hostEndpoint is the stack's side of the link.
type hostEndpoint struct {
	link       *Link
	tso        bool
	mtu        atomic.Uint32
	dispatcher atomic.Pointer[stack.NetworkDispatcher]

	superOut, superIn, bad atomic.Uint64
}

// WritePackets sends with a virtio header what the stack has made.
func (e *hostEndpoint) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	for _, pkt := range pkts.AsSlice() {
		var hdr packet.VirtioHeader
		gso := pkt.GSOOptions
		if gso.Type == stack.GSOTCPv4 || gso.Type == stack.GSOTCPv6 {
			hdr.Flags = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
			hdr.CsumStart, hdr.CsumOffset = gso.L3HdrLen, gso.CsumOffset
			if pkt.Data().Size() > int(gso.MSS) {
				if hdr.GSOType = 1; gso.Type == stack.GSOTCPv6 { // VIRTIO_NET_HDR_GSO_TCPV4
					hdr.GSOType = 4 // VIRTIO_NET_HDR_GSO_TCPV6
				}
				hdr.GSOSize = gso.MSS
				hdr.HdrLen = uint16(pkt.Size()) // as the kernel may fill it in on a forwarding path
				e.superOut.Add(1)
			}
		}
		var head [packet.VirtioHeaderLen]byte
		hdr.Encode(head[:])
		e.link.Inject(append([][]byte{head[:]}, pkt.AsSlices()...)...)
	}
	return pkts.Len(), nil
}

// receive checks the virtio header, finishes the checksum and hands the packet
// to the stack, which verifies it: so the partial checksum is proved to be right.
func (e *hostEndpoint) receive(bufs [][]byte) error {
	var b []byte
	for _, part := range bufs {
		b = append(b, part...)
	}
	if err := e.check(b); err != nil {
		e.bad.Add(1)
		return err
	}
	b = b[packet.VirtioHeaderLen:]
	proto := ipv4.ProtocolNumber
	if b[0]>>4 == 6 {
		proto = ipv6.ProtocolNumber
	}
	d := e.dispatcher.Load()
	if d == nil || *d == nil {
		return nil
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	(*d).DeliverNetworkPacket(proto, pkt)
	pkt.DecRef()
	return nil
}

// check is a plain reading of virtio_net_hdr_to_skb (include/linux/virtio_net.h)
// and of the IP length checks; it shares nothing with package packet but the
// header's layout. A superpacket leaves with its checksum completed.
func (e *hostEndpoint) check(b []byte) error {
	if len(b) < packet.VirtioHeaderLen+20 {
		return fmt.Errorf("packet of %d octets", len(b))
	}
	flags, gsoType := b[0], b[1]
	le := binary.LittleEndian
	hdrLen, gsoSize, start, offset := int(le.Uint16(b[2:])), int(le.Uint16(b[4:])), int(le.Uint16(b[6:])), int(le.Uint16(b[8:]))
	p := b[packet.VirtioHeaderLen:]
	v4 := p[0]>>4 == 4
	length := 40 + int(binary.BigEndian.Uint16(p[4:]))
	if v4 {
		length = int(binary.BigEndian.Uint16(p[2:]))
	}
	if length != len(p) {
		return fmt.Errorf("IP length %d in a packet of %d octets", length, len(p))
	}
	if gsoType != 0 {
		e.superIn.Add(1)
		want := map[bool]byte{true: 1, false: 4}[v4]
		switch {
		case flags&1 == 0:
			return fmt.Errorf("superpacket without NEEDS_CSUM")
		case gsoType == 5 && gsoSize > 0: // VIRTIO_NET_HDR_GSO_UDP_L4
		case gsoType != want:
			return fmt.Errorf("GSO type %d", gsoType)
		}
		if gsoSize == 0 || hdrLen <= start || len(p) <= hdrLen || len(p)-hdrLen <= gsoSize {
			return fmt.Errorf("GSO size %d, header %d, packet %d", gsoSize, hdrLen, len(p))
		}
		if hdrLen+gsoSize > int(e.mtu.Load()) {
			return fmt.Errorf("GSO size %d with header %d above MTU %d", gsoSize, hdrLen, e.mtu.Load())
		}
	} else if len(p) > int(e.mtu.Load()) {
		return fmt.Errorf("packet of %d octets above MTU %d", len(p), e.mtu.Load())
	}
	if flags&1 != 0 {
		if start < 20 || start+offset+2 > len(p) {
			return fmt.Errorf("checksum at %d+%d of %d octets", start, offset, len(p))
		}
		sum := ^checksum.Checksum(p[start:], 0)
		binary.BigEndian.PutUint16(p[start+offset:], sum)
	}
	return nil
}

func (e *hostEndpoint) MTU() uint32                                  { return e.mtu.Load() }
func (e *hostEndpoint) SetMTU(mtu uint32)                            { e.mtu.Store(mtu) }
func (e *hostEndpoint) MaxHeaderLength() uint16                      { return 0 }
func (e *hostEndpoint) LinkAddress() tcpip.LinkAddress               { return "" }
func (e *hostEndpoint) SetLinkAddress(tcpip.LinkAddress)             {}
func (e *hostEndpoint) Capabilities() stack.LinkEndpointCapabilities { return 0 }
func (e *hostEndpoint) Attach(d stack.NetworkDispatcher)             { e.dispatcher.Store(&d) }
func (e *hostEndpoint) IsAttached() bool                             { d := e.dispatcher.Load(); return d != nil && *d != nil }
func (e *hostEndpoint) Wait()                                        {}
func (e *hostEndpoint) ARPHardwareType() header.ARPHardwareType      { return header.ARPHardwareNone }
func (e *hostEndpoint) AddHeader(*stack.PacketBuffer)                {}
func (e *hostEndpoint) ParseHeader(*stack.PacketBuffer) bool         { return true }
func (e *hostEndpoint) Close()                                       {}
func (e *hostEndpoint) SetOnCloseAction(func())                      {}
func (e *hostEndpoint) GSOMaxSize() uint32                           { return 65535 - 60 - 60 }
func (e *hostEndpoint) SupportedGSO() stack.SupportedGSO {
	if e.tso {
		return stack.HostGSOSupported
	}
	return stack.GSONotSupported
}

var (
	_ stack.LinkEndpoint = (*hostEndpoint)(nil)
	_ stack.GSOEndpoint  = (*hostEndpoint)(nil)
)
