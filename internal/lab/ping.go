package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/isthmus-net/isthmus/internal/ping"
)

// PingOptions configure PingWith. The zero value is an ordinary ping.
type PingOptions struct {
	Source netip.Addr    // source address; zero: the kernel chooses
	Size   int           // octets of data after the ICMP header, 16 to 65507; default 56
	TTL    int           // default: the kernel's default, 64
	Wait   time.Duration // timeout for the answer; default 1 s
}

// Ping sends ICMP echo requests from the host, one per second, until one is answered. It returns
// that request's round trip time. It gives up when ctx ends or, without a deadline, after 5
// requests. To send exactly one request, use PingWith.
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
		var refused *ping.Error
		if errors.As(err, &refused) { // the request failed before its timeout, so wait for the rest of the interval
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
	return 0, last
}

// PingWith sends one ICMP echo request and waits for its answer. If an ICMP error for the request
// arrives, PingWith returns it as *ping.Error.
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
	network, source := ping.Raw(dst)
	if o.Source.IsValid() {
		source = o.Source.String()
	}
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
	ctx, cancel := context.WithTimeout(ctx, o.Wait)
	defer cancel()
	_, rtt, err = ping.Echo(ctx, conn, dst, o.Size)
	return rtt, err
}
