package cni

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"

	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/ping"
)

// port is the TCP and UDP port of all listeners, which answer a message with the source that they
// see.
const port = 8080

// A talk is a kind of exchange between two hosts.
type talk struct {
	name    string
	network string // "tcp4", "udp4" or "icmp"
	octets  int    // length of message and answer
	port    uint16
}

// wildcardPort is the port on which nodes answer by UDP from a socket without an address. The
// kernel chooses the source of the answer by its route.
const wildcardPort = port + 1

var toWildcard = talk{"UDP to a socket without an address", "udp4", 100, wildcardPort}

const stream = 40_000 // octets in each direction of TCP, so that segments are as long as the path permits

var talks = []talk{
	{"TCP", "tcp4", stream, port},
	{"UDP", "udp4", 100, port},
	{"UDP, 4,000 octets", "udp4", 4000, port}, // longer than any MTU in these tests, so there are fragments
	{"ICMP", "icmp", 56, 0},
}

// A listener answers on a host, and remembers the sources of pings.
type listener struct {
	host   *lab.Host
	closer []func() error
	group  sync.WaitGroup

	mu    sync.Mutex
	pings map[string]netip.Addr
}

// listen starts a listener. Its sockets listen only at addr. Most programs in pods listen at all
// addresses, but some listen only at their POD_IP.
func listen(h *lab.Host, addr netip.Addr) (*listener, error) {
	l := &listener{host: h, pings: map[string]netip.Addr{}}
	address := netip.AddrPortFrom(addr, port).String()
	tcp, err := h.Listen("tcp4", address)
	if err != nil {
		return nil, err
	}
	udp, err := h.ListenPacket("udp4", address)
	if err != nil {
		return nil, err
	}
	raw, err := h.ListenPacket("ip4:icmp", "0.0.0.0")
	if err != nil {
		return nil, err
	}
	wildcard, err := h.ListenPacket("udp4", fmt.Sprintf("0.0.0.0:%d", wildcardPort))
	if err != nil {
		return nil, err
	}
	l.closer = []func() error{tcp.Close, udp.Close, raw.Close, wildcard.Close}
	l.group.Go(func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			l.group.Go(func() {
				defer conn.Close()
				_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
				n, err := io.Copy(io.Discard, conn)
				if err != nil || n != stream {
					return
				}
				answer := make([]byte, stream)
				copy(answer, fmt.Sprintf("%s %v\n", h.Name, conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()))
				_, _ = conn.Write(answer)
			})
		}
	})
	for _, conn := range []net.PacketConn{udp, wildcard} {
		l.group.Go(func() { l.echo(conn) })
	}
	l.group.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := raw.ReadFrom(buf)
			if err != nil {
				return
			}
			m, err := icmp.ParseMessage(1, buf[:n])
			if err != nil || m.Type != ipv4.ICMPTypeEcho {
				continue
			}
			addr, _ := netip.AddrFromSlice(from.(*net.IPAddr).IP)
			l.mu.Lock()
			l.pings[string(m.Body.(*icmp.Echo).Data)] = addr.Unmap()
			l.mu.Unlock()
		}
	})
	return l, nil
}

// echo answers datagrams until the socket is closed.
func (l *listener) echo(conn net.PacketConn) {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		answer := make([]byte, max(n, 60)) // as long as the message, to test both directions
		copy(answer, fmt.Sprintf("%s %v\n", l.host.Name, from.(*net.UDPAddr).AddrPort().Addr().Unmap()))
		_, _ = conn.WriteTo(answer, from)
	}
}

func (l *listener) close() {
	for _, f := range l.closer {
		_ = f()
	}
	l.group.Wait()
}

// ask does one exchange, and returns the source that the listener saw. If from is valid, the socket
// is bound to it.
func ask(ctx context.Context, h *lab.Host, from netip.Addr, to netip.Addr, k talk, l *listener) (saw netip.Addr, err error) {
	local := netip.AddrPortFrom(from, 0)
	if !from.IsValid() {
		local = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	}
	deadline, _ := ctx.Deadline()
	if k.network == "icmp" {
		return l.ping(ctx, h, local.Addr(), to, k.octets)
	}
	var conn net.Conn
	err = h.Do(func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(local)}
		if k.network == "udp4" {
			d.LocalAddr = net.UDPAddrFromAddrPort(local)
		}
		conn, err = d.DialContext(ctx, k.network, netip.AddrPortFrom(to, k.port).String())
		return err
	})
	if err != nil {
		return saw, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(deadline)
	if _, err := conn.Write(make([]byte, k.octets)); err != nil {
		return saw, err
	}
	buf, n := make([]byte, 1<<16), 0
	if tcp, ok := conn.(*net.TCPConn); ok {
		if err = tcp.CloseWrite(); err == nil {
			n, err = io.ReadFull(conn, buf[:stream])
		}
	} else {
		n, err = conn.Read(buf)
	}
	if err != nil {
		return saw, err
	}
	if n != k.octets {
		return saw, fmt.Errorf("an answer of %d octets; want %d", n, k.octets)
	}
	line, _, _ := strings.Cut(string(buf[:n]), "\n")
	name, addr, _ := strings.Cut(line, " ")
	if name != l.host.Name {
		return saw, fmt.Errorf("%s answers; want %s", name, l.host.Name)
	}
	return netip.ParseAddr(addr)
}

// ping sends an echo request, which the listener recognises by its data.
func (l *listener) ping(ctx context.Context, h *lab.Host, from, to netip.Addr, octets int) (saw netip.Addr, err error) {
	conn, err := h.ListenPacket("ip4:icmp", from.String())
	if err != nil {
		return saw, err
	}
	defer conn.Close()
	data, _, err := ping.Echo(ctx, conn, to, octets)
	if err != nil {
		return saw, err
	}
	for ctx.Err() == nil { // the kernel answers at once, but the listener may read the request later
		l.mu.Lock()
		saw, ok := l.pings[string(data)]
		l.mu.Unlock()
		if ok {
			return saw, nil
		}
		time.Sleep(5 * time.Millisecond)
	}
	return saw, errors.New("an answer, but the listener saw no ping")
}

// patiently repeats ask until there is an answer, but not for longer than timeout.
func patiently(ctx context.Context, h *lab.Host, from, to netip.Addr, k talk, l *listener, timeout time.Duration) (saw netip.Addr, err error) {
	end := time.Now().Add(timeout)
	for {
		attempt, cancel := context.WithTimeout(ctx, min(3*time.Second, max(time.Until(end), 500*time.Millisecond)))
		saw, err = ask(attempt, h, from, to, k, l)
		cancel()
		if err == nil || time.Now().After(end) || ctx.Err() != nil {
			return saw, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}
