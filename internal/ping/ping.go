// Package ping sends ICMP echo requests. The callers open the sockets, so that they can choose the
// network namespace.
package ping

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// TokenSize is the number of octets that identify a request: the first octets of its data, which
// are random.
const TokenSize = 16

// An Error is an ICMP error for a packet that could not be delivered.
type Error struct {
	From netip.Addr // source of the error
	Type int        // RFC 792: 3 unreachable, 11 time exceeded, ...; RFC 4443: 1 unreachable, 2 too big, 3 time exceeded, ...
	Code int
}

func (e *Error) Error() string {
	var kind icmp.Type = ipv4.ICMPType(e.Type)
	if e.From.Is6() {
		kind = ipv6.ICMPType(e.Type)
	}
	return fmt.Sprintf("%v answers ICMP %v, code %d", e.From, kind, e.Code)
}

// A timeoutError is the net.Error for a request without an answer.
type timeoutError time.Duration

func (e timeoutError) Error() string {
	return fmt.Sprintf("no answer within %v", time.Duration(e).Round(time.Millisecond))
}
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return true }

// family holds the differences between IPv4 and IPv6.
type family struct {
	network, any   string // network and address to open a raw socket
	protocol       int
	request, reply icmp.Type
}

func familyOf(addr netip.Addr) family {
	if addr.Is6() {
		return family{"ip6:ipv6-icmp", "::", 58, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply}
	}
	return family{"ip4:icmp", "0.0.0.0", 1, ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply}
}

// Raw returns the network and address with which net.ListenPacket opens a raw socket for pings to
// dst. Such a socket also receives ICMP errors.
func Raw(dst netip.Addr) (network, address string) {
	f := familyOf(dst)
	return f.network, f.any
}

// Echo sends one request with size octets of data, at least TokenSize, and waits for the answer
// until ctx ends. conn is a raw socket, or a datagram socket of package icmp. If an ICMP error for
// the request arrives, Echo returns it as *Error. data is the data of the request.
func Echo(ctx context.Context, conn net.PacketConn, dst netip.Addr, size int) (data []byte, rtt time.Duration, err error) {
	f := familyOf(dst)
	data = make([]byte, max(size, TokenSize))
	rand.Read(data)
	id := int(binary.BigEndian.Uint16(data))
	const seq = 1
	packet, err := (&icmp.Message{Type: f.request, Body: &icmp.Echo{ID: id, Seq: seq, Data: data}}).Marshal(nil) // the kernel adds the checksum of ICMPv6
	if err != nil {
		return nil, 0, err
	}
	to := net.Addr(&net.IPAddr{IP: dst.AsSlice()})
	if _, datagrams := conn.LocalAddr().(*net.UDPAddr); datagrams {
		to = &net.UDPAddr{IP: dst.AsSlice()}
	}
	start := time.Now()
	if _, err := conn.WriteTo(packet, to); err != nil {
		return nil, 0, err
	}
	deadline, _ := ctx.Deadline()
	if err := conn.SetReadDeadline(deadline); err != nil {
		return nil, 0, err
	}
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			_ = conn.SetReadDeadline(time.Unix(1, 0)) // fails only after conn is closed
		}
	})
	defer stop()
	buf := make([]byte, 65536)
	for late := false; ; {
		n, from, err := conn.ReadFrom(buf)
		switch {
		case errors.Is(ctx.Err(), context.Canceled):
			return nil, 0, ctx.Err()
		case isTimeout(err) && !late: // the answer may have arrived in time while this goroutine did not run: read once more
			late = true
			if err := conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err == nil {
				continue
			}
		}
		if isTimeout(err) {
			return nil, 0, timeoutError(time.Since(start))
		}
		if err != nil {
			return nil, 0, err
		}
		arrived := time.Now()
		message, err := icmp.ParseMessage(f.protocol, buf[:n])
		if err != nil {
			continue
		}
		var quote []byte
		switch body := message.Body.(type) {
		case *icmp.Echo: // compare the data instead of the identifier, which a datagram socket replaces
			if message.Type == f.reply && body.Seq == seq && bytes.Equal(body.Data, data) && from.String() == to.String() {
				return data, arrived.Sub(start), nil
			}
		case *icmp.DstUnreach:
			quote = body.Data
		case *icmp.TimeExceeded:
			quote = body.Data
		case *icmp.PacketTooBig:
			quote = body.Data
		}
		if quotes(quote, dst, id, seq) {
			sender, _ := netip.ParseAddr(from.String())
			return nil, 0, &Error{sender.Unmap(), int(buf[0]), message.Code}
		}
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// quotes reports whether the packet in an ICMP error is our echo request.
func quotes(packet []byte, dst netip.Addr, id, seq int) bool {
	var header []byte
	switch {
	case dst.Is6():
		if len(packet) < 48 || packet[6] != 58 || netip.AddrFrom16([16]byte(packet[24:40])) != dst || packet[40] != 128 {
			return false
		}
		header = packet[40:]
	case len(packet) < 20 || packet[9] != 1 || netip.AddrFrom4([4]byte(packet[16:20])) != dst:
		return false
	default:
		length := int(packet[0]&0x0f) * 4
		if length < 20 || len(packet) < length+8 || packet[length] != 8 {
			return false
		}
		header = packet[length:]
	}
	return int(binary.BigEndian.Uint16(header[4:])) == id && int(binary.BigEndian.Uint16(header[6:])) == seq
}
