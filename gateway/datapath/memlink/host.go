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

// A Host is the network behind a Link. It is one TCP/IP stack that owns several addresses, of
// pods and nodes alike. Like the kernel, it sends TCP superpackets with partial checksums, and
// validates packets.
type Host struct {
	Stack *stack.Stack
	ep    *hostEndpoint
	link  *Link
}

const hostNIC = 1

// HostOptions are the options of NewHost.
type HostOptions struct {
	Addrs []netip.Addr
	TSO   bool // send TCP superpackets with partial checksums
	MTU   int  // MTU of the pods' interfaces, not less than the link's MTU; 0: equal to the link's MTU
}

// NewHost returns a Host whose stack is attached to the link. Close detaches it.
func NewHost(link *Link, o HostOptions) (*Host, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	h := &Host{Stack: s, link: link, ep: &hostEndpoint{link: link, tso: o.TSO}}
	h.ep.mtu.Store(uint32(link.MTU()))
	if o.MTU != 0 {
		h.ep.mtu.Store(uint32(o.MTU))
	}
	sack := tcpip.TCPSACKEnabled(true)
	if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack); err != nil {
		return nil, fmt.Errorf("SACK: %s", err)
	}
	if err := s.CreateNIC(hostNIC, h.ep); err != nil {
		return nil, fmt.Errorf("NIC: %s", err)
	}
	for _, a := range o.Addrs {
		pa := tcpip.ProtocolAddress{Protocol: protocolOf(a), AddressWithPrefix: tcpip.AddrFromSlice(a.AsSlice()).WithPrefix()}
		if err := s.AddProtocolAddress(hostNIC, pa, stack.AddressProperties{}); err != nil {
			return nil, fmt.Errorf("address %s: %s", a, err)
		}
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: hostNIC},
		{Destination: header.IPv6EmptySubnet, NIC: hostNIC},
	})
	link.OnReceive(h.Receive)
	return h, nil
}

// Receive handles packets from the gateway. A test that inspects packets passes to Link.OnReceive a
// function that calls Receive.
func (h *Host) Receive(bufs [][]byte) error { return h.ep.receive(bufs) }

// Close closes the stack. The link stays open.
func (h *Host) Close() {
	h.link.OnReceive(func([][]byte) error { return nil })
	h.Stack.Destroy()
}

// Superpackets returns the numbers of superpackets sent and received.
func (h *Host) Superpackets() (sent, received uint64) {
	return h.ep.superOut.Load(), h.ep.superIn.Load()
}

// BadHeaders returns the number of packets from the gateway that a kernel would have refused.
func (h *Host) BadHeaders() uint64 { return h.ep.bad.Load() }

// TooBig returns the number of packets that were larger than the link's MTU. They are lost
// without the ICMP error that a kernel would send.
func (h *Host) TooBig() uint64 { return h.ep.tooBig.Load() }

// BadChecksums returns the number of packets from the gateway in which the stack found a wrong
// checksum.
func (h *Host) BadChecksums() uint64 {
	s := h.Stack.Stats()
	return s.TCP.ChecksumErrors.Value() + s.UDP.ChecksumErrors.Value() + s.IP.MalformedPacketsReceived.Value()
}

// SetMTU changes the MTU of the pods' interfaces.
func (h *Host) SetMTU(mtu int) { h.ep.mtu.Store(uint32(mtu)) }

// ListenTCP listens on an address of the host.
func (h *Host) ListenTCP(at netip.AddrPort) (net.Listener, error) {
	return gonet.ListenTCP(h.Stack, fullAddress(at), protocolOf(at.Addr()))
}

// DialTCP connects from an address of the host.
func (h *Host) DialTCP(ctx context.Context, from netip.Addr, to netip.AddrPort) (net.Conn, error) {
	return gonet.DialTCPWithBind(ctx, h.Stack, fullAddress(netip.AddrPortFrom(from, 0)), fullAddress(to), protocolOf(from))
}

// ListenUDP opens a UDP socket on an address of the host. With noChecksum, it sends datagrams
// with UDP checksum 0 (IPv4 only).
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

// Ping sends ICMP echo requests with the given payload until one is answered. It checks the
// answer and returns the round-trip time.
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
	defer func() { _ = c.Close() }() // cannot fail
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
		if err := c.SetReadDeadline(start.Add(time.Second / 2)); err != nil {
			return 0, err
		}
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

// Constants of include/uapi/linux/virtio_net.h.
const (
	flagNeedsChecksum = 1
	gsoTCPv4          = 1
	gsoTCPv6          = 4
	gsoUDPL4          = 5
)

// A hostEndpoint connects the stack to the link.
type hostEndpoint struct {
	link       *Link
	tso        bool
	mtu        atomic.Uint32 // the stack's MTU; at least the link's MTU
	dispatcher atomic.Pointer[stack.NetworkDispatcher]

	superOut, superIn, bad, tooBig atomic.Uint64
}

// WritePackets sends packets from the stack, each with a virtio header.
func (e *hostEndpoint) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	for _, pkt := range pkts.AsSlice() {
		var hdr packet.VirtioHeader
		gso := pkt.GSOOptions
		if gso.Type == stack.GSOTCPv4 || gso.Type == stack.GSOTCPv6 {
			hdr.Flags = flagNeedsChecksum
			hdr.CsumStart, hdr.CsumOffset = gso.L3HdrLen, gso.CsumOffset
			if pkt.Data().Size() > int(gso.MSS) {
				if hdr.GSOType = gsoTCPv4; gso.Type == stack.GSOTCPv6 {
					hdr.GSOType = gsoTCPv6
				}
				hdr.GSOSize = gso.MSS
				// For forwarded packets the kernel may also set HdrLen to the length of the whole
				// packet.
				hdr.HdrLen = uint16(pkt.Size())
				e.superOut.Add(1)
			}
		}
		if size := pkt.Size(); hdr.GSOType == 0 && size > e.link.MTU() ||
			hdr.GSOType != 0 && pkt.HeaderSize()+int(hdr.GSOSize) > e.link.MTU() {
			e.tooBig.Add(1)
			continue
		}
		var head [packet.VirtioHeaderLen]byte
		hdr.Encode(head[:])
		e.link.Inject(append([][]byte{head[:]}, pkt.AsSlices()...)...)
	}
	return pkts.Len(), nil
}

// receive validates the virtio header, completes the checksum and passes the packet to the stack.
// The stack verifies the checksum, which proves that the partial checksum was right.
func (e *hostEndpoint) receive(bufs [][]byte) error {
	var b []byte
	for _, part := range bufs {
		b = append(b, part...)
	}
	if err := e.check(b); err != nil {
		e.bad.Add(1)
		return err
	}
	udpSize := 0
	if b[1] == gsoUDPL4 {
		udpSize = int(binary.LittleEndian.Uint16(b[4:]))
	}
	for _, p := range splitUDP(b[packet.VirtioHeaderLen:], udpSize) {
		e.deliver(p)
	}
	return nil
}

// splitUDP splits a UDP superpacket into its datagrams, because gVisor accepts only TCP
// superpackets.
func splitUDP(p []byte, size int) [][]byte {
	if size == 0 {
		return [][]byte{p}
	}
	headers := 40
	if p[0]>>4 == 4 {
		headers = int(p[0]&15) * 4
	}
	var out [][]byte
	for payload := p[headers+8:]; len(payload) > 0; {
		n := min(size, len(payload))
		d := append(append([]byte(nil), p[:headers+8]...), payload[:n]...)
		payload = payload[n:]
		binary.BigEndian.PutUint16(d[headers+4:], uint16(8+n))
		binary.BigEndian.PutUint16(d[headers+6:], 0)
		src, dst := tcpip.AddrFromSlice(d[8:24]), tcpip.AddrFromSlice(d[24:40])
		if d[0]>>4 == 4 {
			h := header.IPv4(d)
			h.SetTotalLength(uint16(len(d)))
			h.SetChecksum(0)
			h.SetChecksum(^h.CalculateChecksum())
			src, dst = h.SourceAddress(), h.DestinationAddress()
		} else {
			header.IPv6(d).SetPayloadLength(uint16(8 + n))
		}
		sum := header.PseudoHeaderChecksum(udp.ProtocolNumber, src, dst, uint16(8+n))
		sum = ^checksum.Checksum(d[headers:], sum)
		if sum == 0 {
			sum = 0xffff
		}
		binary.BigEndian.PutUint16(d[headers+6:], sum)
		out = append(out, d)
	}
	return out
}

func (e *hostEndpoint) deliver(b []byte) {
	proto := ipv4.ProtocolNumber
	if b[0]>>4 == 6 {
		proto = ipv6.ProtocolNumber
	}
	d := e.dispatcher.Load()
	if d == nil || *d == nil {
		return
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	(*d).DeliverNetworkPacket(proto, pkt)
	pkt.DecRef()
}

// check validates a packet like virtio_net_hdr_to_skb (include/linux/virtio_net.h), and checks the
// IP lengths. It completes the checksum of a superpacket. It is an independent reference: it shares
// only the layout of the header with package packet.
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
		switch {
		case flags&flagNeedsChecksum == 0:
			return fmt.Errorf("superpacket without NEEDS_CSUM")
		case gsoType == gsoUDPL4, gsoType == gsoTCPv4 && v4, gsoType == gsoTCPv6 && !v4:
		default:
			return fmt.Errorf("GSO type %d", gsoType)
		}
		if gsoSize == 0 || hdrLen <= start || len(p) <= hdrLen || len(p)-hdrLen <= gsoSize {
			return fmt.Errorf("GSO size %d, header %d, packet %d", gsoSize, hdrLen, len(p))
		}
		if hdrLen+gsoSize > e.link.MTU() {
			return fmt.Errorf("GSO size %d with header %d above MTU %d", gsoSize, hdrLen, e.link.MTU())
		}
	} else if len(p) > e.link.MTU() && (!v4 || p[6]&0x40 != 0) { // a kernel would fragment other packets
		return fmt.Errorf("packet of %d octets above MTU %d", len(p), e.link.MTU())
	}
	if flags&flagNeedsChecksum != 0 {
		if start < 20 || start+offset+2 > len(p) {
			return fmt.Errorf("checksum field at %d+%d in a packet of %d octets", start, offset, len(p))
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
