package hosts

import (
	"context"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Sockets that are created in a namespace stay there, whichever thread uses them later. They are
// closed at the end of the test.

// ListenUDP opens a UDP socket.
func (h *Host) ListenUDP(addr netip.AddrPort) *net.UDPConn {
	h.t.Helper()
	var c *net.UDPConn
	h.must(h.Do(func() (err error) {
		c, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(addr))
		return err
	}), "listen on UDP "+addr.String())
	h.t.Cleanup(func() { c.Close() })
	return c
}

// ListenTCP opens a TCP listener.
func (h *Host) ListenTCP(addr netip.AddrPort) *net.TCPListener {
	h.t.Helper()
	var l *net.TCPListener
	h.must(h.Do(func() (err error) {
		l, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(addr))
		return err
	}), "listen on TCP "+addr.String())
	h.t.Cleanup(func() { l.Close() })
	return l
}

// ListenICMP opens a raw socket for ICMP. Received packets have no IP header.
func (h *Host) ListenICMP(addr netip.Addr) net.PacketConn {
	h.t.Helper()
	var c net.PacketConn
	h.must(h.Do(func() (err error) {
		c, err = net.ListenPacket("ip4:icmp", addr.String())
		return err
	}), "ICMP socket at "+addr.String())
	h.t.Cleanup(func() { c.Close() })
	return c
}

// DialTCP connects with a timeout of a minute. src is the source address; the zero value means
// any.
func (h *Host) DialTCP(src netip.Addr, dst netip.AddrPort) (c *net.TCPConn, err error) {
	d := net.Dialer{Timeout: time.Minute}
	if src.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(src, 0))
	}
	err = h.Do(func() error {
		conn, err := d.DialContext(context.Background(), "tcp4", dst.String())
		if err == nil {
			c = conn.(*net.TCPConn)
		}
		return err
	})
	return c, err
}

// ListenTransparent opens a UDP socket for sending only. Its source address need not belong to
// the namespace.
func (h *Host) ListenTransparent(t testing.TB, src netip.Addr) *net.UDPConn {
	t.Helper()
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if cerr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
		}); cerr != nil {
			return cerr
		}
		return err
	}}
	var c net.PacketConn
	err := h.Do(func() (err error) {
		c, err = lc.ListenPacket(context.Background(), "udp4", netip.AddrPortFrom(src, 0).String())
		return err
	})
	if err != nil {
		t.Fatalf("%s: UDP from %v: %v", h.Name, src, err)
	}
	return c.(*net.UDPConn)
}
