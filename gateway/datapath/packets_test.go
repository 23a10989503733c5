package datapath_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/internal/leaktest"
	"github.com/isthmus-net/isthmus/packet"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// The packets of these tests are built and checked with gVisor's header package, which is
// independent of our code.

var (
	podA    = netip.MustParseAddr("10.244.1.2")
	podB    = netip.MustParseAddr("10.71.3.4") // a pod of the peer, as we see it
	podASee = netip.MustParseAddr("10.71.1.2") // podA as the peer sees it
	nodeA   = netip.MustParseAddr("172.16.0.9")
)

// virtio returns the packet p preceded by a virtio-net header.
func virtio(flags, gsoType uint8, hdrLen, gsoSize, start, offset int, p []byte) []byte {
	b := make([]byte, packet.VirtioHeaderLen, packet.VirtioHeaderLen+len(p))
	b[0], b[1] = flags, gsoType
	for i, v := range []int{hdrLen, gsoSize, start, offset} {
		binary.LittleEndian.PutUint16(b[2+2*i:], uint16(v))
	}
	return append(b, p...)
}

// plain returns a packet without offloads, as the TUN delivers it.
func plain(p []byte) []byte { return virtio(0, 0, 0, 0, 0, 0, p) }

func addrOf(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

// ip4 returns an IPv4 packet with DF.
func ip4(src, dst netip.Addr, proto tcpip.TransportProtocolNumber, id uint16, payload []byte) []byte {
	b := make([]byte, header.IPv4MinimumSize, header.IPv4MinimumSize+len(payload))
	h := header.IPv4(b)
	h.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(b) + len(payload)), ID: id, TTL: 64, Protocol: uint8(proto),
		Flags: header.IPv4FlagDontFragment, SrcAddr: addrOf(src), DstAddr: addrOf(dst),
	})
	h.SetChecksum(^h.CalculateChecksum())
	return append(b, payload...)
}

// tcp4 returns a TCP packet with a complete checksum.
func tcp4(src, dst netip.AddrPort, seq uint32, flags header.TCPFlags, payload []byte) []byte {
	b := make([]byte, header.TCPMinimumSize, header.TCPMinimumSize+len(payload))
	h := header.TCP(b)
	h.Encode(&header.TCPFields{
		SrcPort: src.Port(), DstPort: dst.Port(), SeqNum: seq, AckNum: 7,
		DataOffset: header.TCPMinimumSize, Flags: flags, WindowSize: 1000,
	})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, addrOf(src.Addr()), addrOf(dst.Addr()), uint16(len(b)+len(payload)))
	sum = checksum.Checksum(payload, sum)
	h.SetChecksum(^h.CalculateChecksum(sum))
	return ip4(src.Addr(), dst.Addr(), header.TCPProtocolNumber, 0, append(b, payload...))
}

// super4 returns a TCP superpacket as the kernel delivers it: with a partial checksum, and with
// an hdr_len that covers more than the headers.
func super4(src, dst netip.AddrPort, seq uint32, mss int, payload []byte) []byte {
	b := tcp4(src, dst, seq, header.TCPFlagAck|header.TCPFlagPsh, payload)
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, addrOf(src.Addr()), addrOf(dst.Addr()), uint16(len(b)-20))
	header.TCP(b[20:]).SetChecksum(sum)
	return virtio(1, 1, min(len(b), 1400), mss, 20, 16, b)
}

// udp4 returns a UDP packet with a complete checksum.
func udp4(src, dst netip.AddrPort, payload []byte) []byte {
	return ip4(src.Addr(), dst.Addr(), header.UDPProtocolNumber, 9, udpPart(src, dst, payload))
}

func udpPart(src, dst netip.AddrPort, payload []byte) []byte {
	b := make([]byte, header.UDPMinimumSize, header.UDPMinimumSize+len(payload))
	h := header.UDP(b)
	h.Encode(&header.UDPFields{SrcPort: src.Port(), DstPort: dst.Port(), Length: uint16(len(b) + len(payload))})
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, addrOf(src.Addr()), addrOf(dst.Addr()), uint16(len(b)+len(payload)))
	sum = checksum.Checksum(payload, sum)
	h.SetChecksum(^h.CalculateChecksum(sum))
	return append(b, payload...)
}

// echo4 returns an ICMP echo request.
func echo4(src, dst netip.Addr, id, seq uint16) []byte {
	b := make([]byte, header.ICMPv4MinimumSize+16)
	h := header.ICMPv4(b)
	h.SetType(header.ICMPv4Echo)
	h.SetIdent(id)
	h.SetSequence(seq)
	h.SetChecksum(header.ICMPv4Checksum(h, 0))
	return ip4(src, dst, header.ICMPv4ProtocolNumber, seq, b)
}

// fragments cuts an IPv4 packet into fragments with size octets of payload, a multiple of 8.
func fragments(p []byte, size int) [][]byte {
	var out [][]byte
	for at := 20; at < len(p); at += size {
		end := min(at+size, len(p))
		f := append(append([]byte(nil), p[:20]...), p[at:end]...)
		h := header.IPv4(f)
		h.SetTotalLength(uint16(len(f)))
		flags := uint8(0)
		if end < len(p) {
			flags = header.IPv4FlagMoreFragments
		}
		h.SetFlagsFragmentOffset(flags, uint16(at-20))
		h.SetChecksum(0)
		h.SetChecksum(^h.CalculateChecksum())
		out = append(out, f)
	}
	return out
}

// checkPacket fails the test unless p is one complete IPv4 packet with valid checksums and the
// given addresses.
func checkPacket(t testing.TB, p []byte, src, dst netip.Addr) {
	t.Helper()
	h := header.IPv4(p)
	if !h.IsValid(len(p)) || int(h.TotalLength()) != len(p) {
		t.Fatalf("not a whole IPv4 packet: % x", p[:min(len(p), 40)])
	}
	if !h.IsChecksumValid() {
		t.Errorf("IP header checksum is wrong")
	}
	if h.SourceAddress() != addrOf(src) || h.DestinationAddress() != addrOf(dst) {
		t.Errorf("%v -> %v: want %v -> %v", h.SourceAddress(), h.DestinationAddress(), src, dst)
	}
	if h.FragmentOffset() != 0 || h.More() {
		return
	}
	sum := header.PseudoHeaderChecksum(h.TransportProtocol(), h.SourceAddress(), h.DestinationAddress(), h.PayloadLength())
	switch h.TransportProtocol() {
	case header.UDPProtocolNumber:
		if header.UDP(h.Payload()).Checksum() == 0 {
			return
		}
	case header.ICMPv4ProtocolNumber:
		sum = 0
	}
	if checksum.Checksum(h.Payload(), sum) != 0xffff {
		t.Errorf("transport checksum is wrong")
	}
}

// scriptLink is a Link that delivers the packets of a script. It keeps or counts the packets
// written to it.
type scriptLink struct {
	mu      sync.Mutex
	packets [][]byte
	next    int
	repeat  bool // repeat the script for ever
	burst   int  // if repeat is set, ErrAgain follows after this number of packets
	given   int

	written   [][]byte
	discard   bool
	fail      error
	refuseUDP bool // refuse UDP superpackets, like a kernel without USO
	refused   int
	wakeups   chan struct{}
	closeOnce sync.Once
	closed    chan struct{}
}

func newScript(packets ...[]byte) *scriptLink {
	return &scriptLink{packets: packets, wakeups: make(chan struct{}, 1), closed: make(chan struct{})}
}

func (l *scriptLink) Read(p []byte, mayBlock bool) (int, error) {
	if l.repeat {
		if !mayBlock && l.given >= l.burst {
			l.given = 0
			return 0, datapath.ErrAgain
		}
		l.given++
		if l.next++; l.next == len(l.packets) {
			l.next = 0
		}
		return copy(p, l.packets[l.next]), nil
	}
	l.mu.Lock()
	if l.next < len(l.packets) {
		l.next++
		defer l.mu.Unlock()
		return copy(p, l.packets[l.next-1]), nil
	}
	l.mu.Unlock()
	select {
	case <-l.closed:
		return 0, os.ErrClosed
	default:
	}
	if !mayBlock {
		return 0, datapath.ErrAgain
	}
	select {
	case <-l.closed:
		return 0, os.ErrClosed
	case <-l.wakeups:
		return 0, datapath.ErrWoken
	}
}

// add appends packets to the script. No Read may be waiting.
func (l *scriptLink) add(packets ...[]byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.packets = append(l.packets, packets...)
}

func (l *scriptLink) Wake() {
	select {
	case l.wakeups <- struct{}{}:
	default:
	}
}

func (l *scriptLink) Write(bufs [][]byte) error {
	if l.discard {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail != nil {
		return l.fail
	}
	var b []byte
	for _, part := range bufs {
		b = append(b, part...)
	}
	if l.refuseUDP && b[1]&0x7f == 5 { // VIRTIO_NET_HDR_GSO_UDP_L4
		l.refused++
		return syscall.EINVAL
	}
	l.written = append(l.written, b)
	return nil
}

func (l *scriptLink) Name() string { return "script" }
func (l *scriptLink) MTU() int     { return 1420 }
func (l *scriptLink) Close() error { l.closeOnce.Do(func() { close(l.closed) }); return nil }

// buffers are like those that wireguard-go passes to Read.
type buffers struct {
	bufs  [][]byte
	sizes []int
}

const offset = 16 // device.MessageTransportHeaderSize

func newBuffers(n, size int) *buffers {
	b := &buffers{sizes: make([]int, n)}
	for range n {
		b.bufs = append(b.bufs, make([]byte, size))
	}
	return b
}

func (b *buffers) packet(i int) []byte { return b.bufs[i][offset : offset+b.sizes[i]] }

// behindOffset returns packets in buffers like those that wireguard-go passes to Write.
func behindOffset(packets ...[]byte) [][]byte {
	var out [][]byte
	for _, p := range packets {
		out = append(out, append(make([]byte, offset, offset+len(p)), p...))
	}
	return out
}

func udpAddr(s string) *net.UDPAddr { return net.UDPAddrFromAddrPort(netip.MustParseAddrPort(s)) }
