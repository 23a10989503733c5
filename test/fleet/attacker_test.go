package fleet

import (
	"bytes"
	"crypto/ecdh"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// A correspondence is a session with the active gateway of a cluster, as captured on the
// underlay. The attacker of the test knows all classical private keys, but not the preshared key.
type correspondence struct {
	attacker noise.Attacker // has the captured handshake
	capture  [][]byte       // data messages of both directions that contain the text
	text     string
}

// opened returns the number of captured messages that a quantum attacker can decrypt.
func (c *correspondence) opened() (n int, certain bool) {
	keys, certain := c.attacker.Keys()
	for _, m := range c.capture {
		if inner, err := keys.Open(m); err == nil && bytes.Contains(inner, []byte(c.text)) {
			n++
		}
	}
	return n, certain
}

// correspond kills b's gateways and opens a session with a's active gateway in their place, because
// a real gateway does not reveal its ephemeral keys. With the given preshared key, it exchanges
// data with a pod of cluster a and captures the packets.
func correspond(t *testing.T, a, b *fleet.Cluster, preshared [32]byte) *correspondence {
	t.Helper()
	was, pod := active(t, b), a.Pods[0]
	src, dst := seen(t, a, b, b.Pods[0].Addr), seen(t, b, a, pod.Addr)
	node, peer := b.Nodes[was], endpointOf(t, b, a).Status.Connection.PeerConfiguration
	near := netip.AddrPortFrom(node.Addr, 5871)
	far, err := netip.ParseAddrPort(net.JoinHostPort(peer[v1alpha1.ConfigEndpointIP], peer[v1alpha1.ConfigPort]))
	must(t, err)
	for _, i := range []int{1 - was, was} {
		must(t, b.Kill(fleet.Gateway(i)))
	}
	static := func(c *fleet.Cluster) *ecdh.PrivateKey {
		private := ringOf(t, c).Private
		key, err := ecdh.X25519().NewPrivateKey(private[:])
		must(t, err)
		return key
	}
	own, theirs := static(b), static(a)

	tap := tapOn(t, node.Do)
	var socket net.Conn
	must(t, node.Do(func() (err error) {
		d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(near)}
		socket, err = d.DialContext(t.Context(), "udp4", far.String())
		return err
	}))
	defer socket.Close()
	// receive calls accept for each message until accept returns nil.
	receive := func(accept func([]byte) error) error {
		must(t, socket.SetReadDeadline(time.Now().Add(time.Second)))
		last := errors.New("no message")
		for b := make([]byte, 65536); ; {
			n, err := socket.Read(b)
			if err != nil {
				return errors.Join(err, last)
			}
			if last = accept(b[:n]); last == nil {
				return nil
			}
		}
	}
	var initiation []byte
	var h *noise.Handshake
	var session *noise.Session
	eventually(t, "a session with "+a.Name, func() error {
		initiation, h = noise.Initiate(own, theirs.PublicKey(), time.Now())
		h.Preshared = preshared
		if _, err := socket.Write(initiation); err != nil {
			return err
		}
		return receive(func(m []byte) (err error) {
			session, err = h.Finish(m)
			return err
		})
	})

	echo, err := pod.ListenPacket("udp4", netip.AddrPortFrom(pod.Addr, 0).String())
	must(t, err)
	defer echo.Close()
	go func() {
		for b := make([]byte, 1500); ; {
			n, who, err := echo.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = echo.WriteTo(b[:n], who)
		}
	}()
	c := &correspondence{text: strings.Repeat("attack at dawn. ", 20)}
	port, size, echoes := uint16(echo.LocalAddr().(*net.UDPAddr).Port), 0, 0
	sent := uint16(0)
	eventually(t, "ten echoes", func() error { // repeat, because echoes through the second tunnel do not arrive here
		m := session.SealPadded(packettest.Build(packettest.IP{Src: src, Dst: dst, TTL: 64},
			packettest.UDP{SrcPort: 5000 + sent%1000, DstPort: port, Data: []byte(c.text)}))
		sent, size = sent+1, len(m)
		if _, err := socket.Write(m); err != nil {
			return err
		}
		err := receive(func(m []byte) error {
			if m[0] != noise.DataType {
				return errors.New("no data")
			}
			inner, err := session.Open(m)
			if err == nil && !bytes.Contains(inner, []byte(c.text)) {
				err = errors.New("something else")
			}
			return err
		})
		if err == nil {
			echoes++
		}
		if echoes < 10 {
			err = fmt.Errorf("%d of %d; %w", echoes, sent, err)
		} else {
			err = nil
		}
		return err
	})

	index := initiation[4:8]
	c.attacker = noise.Attacker{InitiatorKey: own, EphemeralKey: h.Ephemeral(), ResponderKey: theirs}
	all := tap.between(t, near, far)
	for _, m := range all {
		switch {
		case m[0] == noise.InitiationType && bytes.Equal(m[4:8], index):
			c.attacker.Initiation = m
		case m[0] == noise.ResponseType && bytes.Equal(m[8:12], index):
			c.attacker.Response = m
		}
	}
	if c.attacker.Initiation == nil || c.attacker.Response == nil {
		t.Fatalf("the handshake is not among %d captured messages", len(all))
	}
	var out, in int
	for _, m := range all {
		if m[0] != noise.DataType || len(m) != size { // messages of other sizes do not contain the text
			continue
		}
		switch {
		case bytes.Equal(m[4:8], c.attacker.Response[4:8]):
			out++
		case bytes.Equal(m[4:8], index):
			in++
		default:
			continue
		}
		c.capture = append(c.capture, m)
	}
	if out != int(sent) || in < echoes {
		t.Fatalf("%d messages and %d answers captured: want %d and %d", out, in, sent, echoes)
	}
	return c
}

// A tap captures the packets that a host sends and receives. They stay in the socket's buffer
// until between reads them, so a tap is suitable only for little traffic.
type tap int

// tapOn opens a tap on a host, in which do runs functions.
func tapOn(t *testing.T, do func(func() error) error) tap {
	t.Helper()
	fd := -1
	must(t, do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.ETH_P_ALL<<8)
		return err
	}))
	t.Cleanup(func() { _ = unix.Close(fd) })
	must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20))
	return tap(fd)
}

// between returns the payloads of the captured UDP datagrams between two addresses.
func (fd tap) between(t *testing.T, a, b netip.AddrPort) (payloads [][]byte) {
	t.Helper()
	const headers = 20 + 8
	for buf := make([]byte, 65536); ; {
		n, _, err := unix.Recvfrom(int(fd), buf, 0)
		if errors.Is(err, unix.EAGAIN) {
			return payloads
		} else if errors.Is(err, unix.EINTR) {
			continue
		}
		must(t, err)
		if n <= headers+12 || buf[0] != 0x45 || buf[9] != unix.IPPROTO_UDP {
			continue
		}
		word := func(at int) uint16 { return uint16(buf[at])<<8 | uint16(buf[at+1]) }
		end := func(addr, port int) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(buf[addr:])), word(port))
		}
		src, dst := end(12, 20), end(16, 22)
		if length := headers - 8 + int(word(24)); (src == a && dst == b || src == b && dst == a) && length <= n {
			payloads = append(payloads, bytes.Clone(buf[headers:length]))
		}
	}
}
