// Package overlay finds out whether packets arrive at the other end of the overlay of a cluster.
//
// It is done as traceroute(8) does it: an empty datagram between random ports that the other end's
// kernel answers with an ICMP error. The answer comes by the underlay, so that this is about one
// direction. Another datagram takes the underlay there, too; it is the control: an end that is away, or
// answers nobody, says nothing of the overlay. Both answers are subject to the same rate limits of the
// other kernel (icmp_ratelimit, icmp_msgs_per_sec), so that who exhausts these hides the state of the
// overlay but cannot make it look broken; and both quote random ports, which a pod would have to
// guess to make it look whole.
package overlay

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Interval is how often to look, about; Again is for after a datagram without an answer.
	Interval = 30 * time.Second
	Again    = 5 * time.Second

	patience = 2 * time.Second
	misses   = 4 // in a row, with the control answered each time, until the overlay counts as broken
)

// State is what is known of the way to one other end. It is not for concurrent use.
type State struct {
	Broken   bool      `json:"broken"`            // packets do not arrive by the overlay, but do by the underlay
	Since    time.Time `json:"since,omitzero"`    // of the first of the datagrams that say so
	Answered time.Time `json:"answered,omitzero"` // when one was last answered; zero: none yet

	missed int
	first  time.Time // when the first of these was sent
}

// Take takes the outcome of one round: which of the two datagrams were answered.
func (s *State) Take(began time.Time, answered, control bool) {
	switch {
	case answered:
		s.missed, s.Broken, s.Since, s.Answered = 0, false, time.Time{}, began
	case !control: // nothing is known
		s.missed = 0
	default:
		if s.missed++; s.missed == 1 {
			s.first = began
		}
		if s.missed == misses {
			s.Broken, s.Since = true, s.first
		}
	}
}

// A Datagram is one that the other end is to answer.
type Datagram struct {
	To  netip.Addr // IPv4
	TTL int        // 0: that of the system
}

// Round sends a datagram by the overlay and one by the underlay, and says which were answered. With
// a TTL the first one is to end on the way, or where there is no way on.
func Round(ctx context.Context, byOverlay, byUnderlay Datagram) (answered, control bool) {
	done := make(chan bool, 1)
	go func() { done <- byUnderlay.answered(ctx) }()
	return byOverlay.answered(ctx), <-done
}

// ICMP types, RFC 792.
const unreachable, timeExceeded = 3, 11

// answered sends it from one random port to another, none of which is a NodePort of a Service, and
// waits for an ICMP error about it.
func (d Datagram) answered(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(d.To, uint16(33434+rand.N(30000)))))
	if err != nil {
		return false
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVERR, 1)
		if d.TTL != 0 {
			failed = errors.Join(failed, unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, d.TTL))
		}
	})
	if err != nil || failed != nil {
		return false
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if _, err := c.Write(nil); err != nil {
		return false // nothing is known of the way behind
	}
	found := false
	err = raw.Read(func(fd uintptr) bool { // an error in the queue makes the socket readable
		oob := make([]byte, 512)
		_, n, _, _, err := unix.Recvmsg(int(fd), make([]byte, 64), oob, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err != nil {
			return !errors.Is(err, unix.EAGAIN)
		}
		// Routes come before the TTL: an end that has no way to the address says so instead, and was
		// reached as well. Our own node's lack of a route ends in connect.
		found = isICMP(oob[:n], unreachable) || d.TTL != 0 && isICMP(oob[:n], timeExceeded)
		return true
	})
	return err == nil && found
}

// isICMP says whether control messages have an ICMP error of a type.
func isICMP(oob []byte, icmpType int) bool {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return false
	}
	for _, m := range messages {
		// struct sock_extended_err: ee_errno 4, ee_origin, ee_type, ee_code
		if m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_RECVERR && len(m.Data) >= 16 &&
			m.Data[4] == unix.SO_EE_ORIGIN_ICMP && int(m.Data[5]) == icmpType {
			return true
		}
	}
	return false
}
