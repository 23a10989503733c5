package attacks

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// A header holds the fields of an IPv4 header other than addresses and protocol.
type header struct {
	id       uint16
	fragment uint16 // flags and offset as one word, as in the packet
	options  []byte // length: a multiple of four octets
}

// ipv4 returns an IPv4 packet.
func ipv4(src, dst netip.Addr, protocol byte, h header, payload []byte) []byte {
	be, length := binary.BigEndian, 20+len(h.options)
	b := make([]byte, 20, length+len(payload))
	b[0], b[8], b[9] = 0x40|byte(length/4), 64, protocol
	be.PutUint16(b[2:], uint16(length+len(payload)))
	be.PutUint16(b[4:], h.id)
	be.PutUint16(b[6:], h.fragment)
	copy(b[12:], src.AsSlice())
	copy(b[16:], dst.AsSlice())
	b = append(b, h.options...)
	be.PutUint16(b[10:], checksum(b))
	return append(b, payload...)
}

func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	sum = sum>>16 + sum&0xffff
	return ^uint16(sum + sum>>16)
}

// udp returns a UDP datagram without a checksum.
func udp(from, to uint16, payload []byte) []byte {
	be := binary.BigEndian
	b := be.AppendUint16(be.AppendUint16(nil, from), to)
	return append(be.AppendUint16(be.AppendUint16(b, uint16(8+len(payload))), 0), payload...)
}

func datagram(src, dst netip.AddrPort, payload string) []byte {
	return ipv4(src.Addr(), dst.Addr(), unix.IPPROTO_UDP, header{}, udp(src.Port(), dst.Port(), []byte(payload)))
}

// icmp returns an ICMP message. rest is the second word of its header.
func icmp(kind, code byte, rest uint32, body []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{kind, code, 0, 0}, rest)
	b = append(b, body...)
	binary.BigEndian.PutUint16(b[2:], checksum(b))
	return b
}

// vxlan returns the payload of an overlay datagram: a VXLAN header and a frame with a UDP
// datagram from src to dst.
func vxlan(to kernel.MAC, src, dst netip.Addr, payload string) []byte {
	return overlayFrame(to, unix.ETH_P_IP, datagram(netip.AddrPortFrom(src, 9), netip.AddrPortFrom(dst, victimPort), payload))
}

func overlayFrame(to kernel.MAC, protocol uint16, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, kernel.OverlayID<<8) // flag: the VNI is valid
	b = append(b, to[:]...)
	b = binary.BigEndian.AppendUint16(append(b, 0x66, 1, 2, 3, 4, 5), protocol)
	return append(b, payload...)
}

// sendRaw sends a complete IPv4 packet from a host, using the host's routes.
func sendRaw(from *lab.Host, packet []byte) error {
	return from.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: [4]byte(packet[16:20])})
	})
}

// sendUDP sends a datagram with the host's own source address.
func sendUDP(from *lab.Host, to netip.AddrPort, payload []byte) error {
	conn, err := from.ListenPacket("udp4", "0.0.0.0:0")
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.WriteTo(payload, net.UDPAddrFromAddrPort(to))
	return err
}

// refusedLocally reports whether the kernel of the sending host refused to send the packet. Such a
// refusal stops an attack too.
func refusedLocally(err error) bool {
	for _, e := range []error{unix.EPERM, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ECONNREFUSED, unix.EACCES, unix.EINVAL} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// A victim is a socket that records the received packets.
type victim struct {
	conn net.PacketConn
	mu   sync.Mutex
	got  [][]byte
}

func listen(t *testing.T, at *lab.Host, addr netip.AddrPort) *victim {
	t.Helper()
	return listenOn(t, at, "udp4", addr.String())
}

// listenOn opens a victim's socket until the test ends. Packets from a raw socket have no IP
// header.
func listenOn(t *testing.T, at *lab.Host, network, address string) *victim {
	t.Helper()
	conn, err := at.ListenPacket(network, address)
	must(t, err)
	v := &victim{conn: conn}
	var done sync.WaitGroup
	t.Cleanup(func() { conn.Close(); done.Wait() })
	done.Go(func() {
		for buf := make([]byte, 1<<16); ; {
			n, _, err := conn.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			v.mu.Lock()
			v.got = append(v.got, bytes.Clone(buf[:n]))
			v.mu.Unlock()
		}
	})
	return v
}

// hasReceived reports whether a payload that contains the text has arrived.
func (v *victim) hasReceived(what string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, b := range v.got {
		if bytes.Contains(b, []byte(what)) {
			return true
		}
	}
	return false
}

const (
	victimPort = 4444
	tries      = 3 // per attack, in case a packet is lost by chance
	// grace is the maximum time until a sent packet arrives. A successful attack needs far less.
	grace = 200 * time.Millisecond
)

// checkStopped checks that no packet of send, marked by marker, arrives.
func (v *victim) checkStopped(t *testing.T, marker string, send func() error) {
	t.Helper()
	for range tries {
		if err := send(); err != nil && !refusedLocally(err) {
			t.Fatal(err)
		}
	}
	time.Sleep(grace)
	if v.hasReceived(marker) {
		t.Errorf("%q arrives", marker)
	}
}

// checkArrives checks that a packet of send, marked by marker, arrives. It is for legitimate
// packets of the same kind as those of checkStopped.
func (v *victim) checkArrives(t *testing.T, marker string, send func() error) {
	t.Helper()
	eventually(t, marker, func() error {
		if err := send(); err != nil {
			return err
		}
		time.Sleep(grace / 10)
		if !v.hasReceived(marker) {
			return errors.New("nothing arrives")
		}
		return nil
	})
}

// A tap captures IPv4 packets on all devices of a host in both directions.
type tap struct {
	fd   int
	stop chan struct{}
	done chan struct{}

	mu   sync.Mutex
	seen [][]byte
}

const maxSeen = 4096

// newTap captures the packets that match accepts, until the end of the test or subtest.
func newTap(t *testing.T, at *lab.Host, match func(ip []byte) bool) *tap {
	t.Helper()
	k := &tap{fd: -1, stop: make(chan struct{}), done: make(chan struct{})}
	must(t, at.Do(func() (err error) {
		k.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(binary.NativeEndian.Uint16([]byte{0, 3}))) // ETH_P_ALL
		return err
	}))
	must(t, unix.SetsockoptTimeval(k.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}))
	go func() {
		defer close(k.done)
		defer unix.Close(k.fd)
		for buf := make([]byte, 1<<16); ; {
			select {
			case <-k.stop:
				return
			default:
			}
			n, _, err := unix.Recvfrom(k.fd, buf, 0)
			if err != nil || n < 20 || buf[0]>>4 != 4 || !match(buf[:n]) {
				continue
			}
			k.mu.Lock()
			if len(k.seen) < maxSeen {
				k.seen = append(k.seen, bytes.Clone(buf[:n]))
			}
			k.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		close(k.stop)
		<-k.done
	})
	return k
}

func (k *tap) packets() [][]byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.seen[:len(k.seen):len(k.seen)]
}

// inNetworks returns a match function for packets with an address in one of the networks. It checks
// only the outer header of VXLAN and WireGuard packets.
func inNetworks(networks ...netip.Prefix) func([]byte) bool {
	return func(ip []byte) bool {
		for _, n := range networks {
			if n.Contains(netip.AddrFrom4([4]byte(ip[12:16]))) || n.Contains(netip.AddrFrom4([4]byte(ip[16:20]))) {
				return true
			}
		}
		return false
	}
}
