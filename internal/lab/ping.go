package lab

import (
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

// An ICMPError is the answer to a packet that could not be delivered.
type ICMPError struct {
	From netip.Addr // who says so
	Type int        // RFC 792: 3 unreachable, 11 time exceeded, ...; RFC 4443: 1 unreachable, 2 too big, 3 time exceeded, ...
	Code int
}

func (e *ICMPError) Error() string {
	var kind icmp.Type = ipv4.ICMPType(e.Type)
	if e.From.Is6() {
		kind = ipv6.ICMPType(e.Type)
	}
	return fmt.Sprintf("%v answers ICMP %v, code %d", e.From, kind, e.Code)
}

// PingOptions are what PingWith can vary. The zero value is an ordinary ping.
type PingOptions struct {
	Source netip.Addr    // bound source; zero: the kernel chooses
	Size   int           // octets of data after the ICMP header, up to 65507; default 56
	TTL    int           // default: the kernel's, 64
	Wait   time.Duration // for the answer; default 1 s
}

// Ping sends ICMP echo requests from the host until one is answered, a second apart, and returns
// that one's round trip time. It gives up when ctx is done or, without a deadline, after 5
// requests. Whoever wants exactly one request uses PingWith.
func (h *Host) Ping(ctx context.Context, dst netip.Addr) (time.Duration, error) {
	var last error
	for range 5 {
		rtt, err := h.PingWith(ctx, dst, PingOptions{})
		if err == nil {
			return rtt, nil
		}
		if last = err; ctx.Err() != nil {
			break
		}
		var refused *ICMPError
		if errors.As(err, &refused) { // came at once: keep the pace
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
	return 0, last
}

// PingWith sends one ICMP echo request and waits for its answer. An ICMP error about it is an
// *ICMPError.
func (h *Host) PingWith(ctx context.Context, dst netip.Addr, o PingOptions) (rtt time.Duration, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("ping %v from %s: %w", dst, h.Name, err)
		}
	}()
	if o.Size == 0 {
		o.Size = 56
	}
	if o.Wait == 0 {
		o.Wait = time.Second
	}
	network, source, protocol := "ip4:icmp", "0.0.0.0", 1
	if dst.Is6() {
		network, source, protocol = "ip6:ipv6-icmp", "::", 58
	}
	if o.Source.IsValid() {
		source = o.Source.String()
	}
	// A raw socket, because it also gets the ICMP errors. It gets those of everybody, so each call
	// has its own number.
	conn, err := h.ListenPacket(network, source)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if o.TTL > 0 {
		if dst.Is6() {
			err = ipv6.NewPacketConn(conn).SetHopLimit(o.TTL)
		} else {
			err = ipv4.NewPacketConn(conn).SetTTL(o.TTL)
		}
		if err != nil {
			return 0, err
		}
	}
	var number [4]byte
	rand.Read(number[:])
	id, seq := int(binary.BigEndian.Uint16(number[:])), int(binary.BigEndian.Uint16(number[2:]))
	request := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: id, Seq: seq, Data: make([]byte, o.Size)}}
	if dst.Is6() {
		request.Type = ipv6.ICMPTypeEchoRequest // the kernel adds the checksum
	}
	packet, err := request.Marshal(nil)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if _, err := conn.WriteTo(packet, &net.IPAddr{IP: dst.AsSlice()}); err != nil {
		return 0, err
	}
	deadline := start.Add(o.Wait)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := conn.SetReadDeadline(deadline); err != nil {
		return 0, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) }) // fails when we are done
	defer stop()
	buf := make([]byte, 65536)
	for late := false; ; {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			if ctx.Err() != nil {
				return 0, ctx.Err()
			}
			if isTimeout(err) && !late { // an answer that came in time may lie there while we were not scheduled
				late = true
				if err := conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err == nil {
					continue
				}
			}
			if isTimeout(err) {
				return 0, fmt.Errorf("no answer within %v", time.Since(start).Round(time.Millisecond))
			}
			return 0, err
		}
		arrived := time.Now()
		message, err := icmp.ParseMessage(protocol, buf[:n])
		if err != nil {
			continue
		}
		sender, _ := netip.AddrFromSlice(from.(*net.IPAddr).IP)
		sender = sender.Unmap()
		var quote []byte
		switch body := message.Body.(type) {
		case *icmp.Echo:
			reply := message.Type == ipv4.ICMPTypeEchoReply || message.Type == ipv6.ICMPTypeEchoReply
			if reply && body.ID == id && body.Seq == seq && sender == dst {
				return arrived.Sub(start), nil
			}
		case *icmp.DstUnreach:
			quote = body.Data
		case *icmp.TimeExceeded:
			quote = body.Data
		case *icmp.PacketTooBig:
			quote = body.Data
		}
		if quotes(quote, dst, id, seq) {
			return 0, &ICMPError{sender, int(buf[0]), message.Code}
		}
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// quotes tells whether the packet that an ICMP error quotes is our echo request.
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
