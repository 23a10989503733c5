// Package overlay probes whether packets reach the other end of a cluster's overlay.
//
// It works like traceroute(8). It sends an empty datagram between random ports through the overlay,
// and the kernel at the other end answers with an ICMP error. The answer comes through the
// underlay, so the probe tests one direction. A second datagram, the control, goes through the
// underlay. If the control gets no answer either, the probe shows nothing about the overlay,
// because the other end may be down or may never answer. The rate limits of the kernel at the other
// end (icmp_ratelimit, icmp_msgs_per_sec) apply to both answers alike. An attacker who exhausts
// these limits can hide the state of the overlay, but cannot make a working overlay look broken. To
// make a broken overlay look intact, a pod would have to forge an answer and guess the random
// ports, which answers quote.
//
// The receive counter of the overlay device shows whether packets come back through the overlay. If
// none come back while pods send, the caller sends datagrams with a TTL that expires at the peer's
// gateway. Every answer to these datagrams comes through the overlay, like the answers to pods.
package overlay

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Interval is the approximate time between probes. RetryInterval is the pause after a datagram
	// without an answer.
	Interval      = 30 * time.Second
	RetryInterval = 5 * time.Second

	patience = 2 * time.Second
	misses   = 4 // number of consecutive lost datagrams, each with an answered control, after which the overlay counts as broken
)

// State is the state of the path to one other end of the overlay. It is not safe for concurrent
// use.
type State struct {
	Broken   bool      `json:"broken"`            // packets arrive through the underlay, but not through the overlay
	Since    time.Time `json:"since,omitzero"`    // when the first of the lost datagrams was sent
	Answered time.Time `json:"answered,omitzero"` // when the last answered datagram was sent; zero: none yet

	missed int
	first  time.Time // when the first of the missed datagrams was sent
}

// Take records the result of one round. began is the time at which the round began. answered is
// true if the datagram was answered. control is true if the control was answered, or if other
// evidence shows that the datagram should have been answered.
func (s *State) Take(began time.Time, answered, control bool) {
	switch {
	case answered:
		s.missed, s.Broken, s.Since, s.Answered = 0, false, time.Time{}, began
	case !control: // without an answer to the control, the round shows nothing
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

// Doubted reports whether the overlay counts as broken, or the last round got no answer through the
// overlay.
func (s *State) Doubted() bool { return s.missed > 0 || s.Broken }

// A Datagram is a datagram that the other end is expected to answer.
type Datagram struct {
	To  netip.Addr // IPv4
	TTL int        // 0: the system's default
	By  int        // index of the device from which answers must come; 0: any
}

// An Answer is the other end's answer to a datagram.
type Answer int

const (
	NoAnswer Answer = iota
	Ended           // the other end has no route for the datagram
	Expired         // the other end has a route, but the TTL expired
)

// Round sends one datagram through the overlay and one through the underlay. It returns the answer
// to the first, and whether the second was answered. If byOverlay has a TTL, the datagram is
// expected to expire on its path, or to be refused for lack of a route.
func Round(ctx context.Context, byOverlay, byUnderlay Datagram) (answer Answer, control bool) {
	done := make(chan Answer, 1)
	go func() { done <- byUnderlay.Send(ctx) }()
	return byOverlay.Send(ctx), <-done != NoAnswer
}

// ICMP types, RFC 792.
const unreachable, timeExceeded = 3, 11

// Send sends the datagram between two random ports, neither of which is in the range of NodePorts,
// and waits for an ICMP error about it.
func (d Datagram) Send(ctx context.Context) Answer {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(d.To, uint16(33434+rand.N(30000)))))
	if err != nil {
		return NoAnswer
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return NoAnswer
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVERR, 1)
		if d.TTL != 0 {
			failed = errors.Join(failed, unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, d.TTL))
		}
		failed = errors.Join(failed, unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1))
	})
	if err != nil || failed != nil {
		return NoAnswer
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if _, err := c.Write(nil); err != nil {
		return NoAnswer // the datagram was not sent, so this shows nothing about the path
	}
	found := NoAnswer
	err = raw.Read(func(fd uintptr) bool { // an error in the queue makes the socket readable
		oob := make([]byte, 512)
		_, n, _, _, err := unix.Recvmsg(int(fd), make([]byte, 64), oob, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err != nil {
			return !errors.Is(err, unix.EAGAIN)
		}
		found = d.answerIn(oob[:n])
		return found != NoAnswer // false: continue to wait, because the answer came from another device
	})
	if err != nil {
		return NoAnswer
	}
	return found
}

// answerIn reads the control messages of an ICMP error. The kernel looks up the route before it
// checks the TTL, so an end without a route returns "unreachable". That answer, too, shows that the
// datagram has reached the end. If our own node has no route, connect fails.
func (d Datagram) answerIn(oob []byte) Answer {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return NoAnswer
	}
	by, answer := 0, NoAnswer
	for _, m := range messages {
		switch {
		case m.Header.Level != unix.IPPROTO_IP:
		case m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			by = int(binary.NativeEndian.Uint32(m.Data)) // ipi_ifindex
		case m.Header.Type == unix.IP_RECVERR && len(m.Data) >= 16 && m.Data[4] == unix.SO_EE_ORIGIN_ICMP: // struct sock_extended_err: ee_errno 4, ee_origin, ee_type, ee_code
			switch icmpType := m.Data[5]; {
			case icmpType == unreachable:
				answer = Ended
			case icmpType == timeExceeded && d.TTL != 0:
				answer = Expired
			}
		}
	}
	if d.By != 0 && d.By != by {
		return NoAnswer
	}
	return answer
}
