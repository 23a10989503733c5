// Package overlay finds out whether packets arrive at the other end of the overlay of a cluster.
//
// It is done as traceroute(8) does it: an empty datagram between random ports that the other end's
// kernel answers with an ICMP error. The answer comes by the underlay, so that this is about one
// direction. Another datagram takes the underlay there, too; it is the control: an end that is away, or
// answers nobody, says nothing of the overlay. Both answers are subject to the same rate limits of the
// other kernel (icmp_ratelimit, icmp_msgs_per_sec), so that who exhausts these hides the state of the
// overlay but cannot make it look broken; and both quote random ports, which a pod would have to
// guess to make it look whole.
//
// Whether packets come back through the overlay shows the counter of its device. Where nothing comes
// while pods send, datagrams are sent that live as far as the peer: whoever answers them, the answers
// come by the overlay, as those to pods do.
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

// Take takes the outcome of one round: whether the datagram was answered, and whether another was, or
// whatever else says that it should have been.
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

// Doubted reports whether the last round said that it is broken, or those before did and no other has.
func (s *State) Doubted() bool { return s.missed > 0 || s.Broken }

// A Datagram is one that the other end is to answer.
type Datagram struct {
	To  netip.Addr // IPv4
	TTL int        // 0: that of the system
	By  int        // index of the device by which answers come; 0: any
}

// An Answer is what the other end says of a datagram.
type Answer int

const (
	NoAnswer Answer = iota
	Ended           // it has no way on
	WayOn           // it has one, and the datagram did not live long enough
)

// Round sends a datagram by the overlay and one by the underlay, and says what was answered. With
// a TTL the first one is to end on the way, or where there is no way on.
func Round(ctx context.Context, byOverlay, byUnderlay Datagram) (answer Answer, control bool) {
	done := make(chan Answer, 1)
	go func() { done <- byUnderlay.Ask(ctx) }()
	return byOverlay.Ask(ctx), <-done != NoAnswer
}

// ICMP types, RFC 792.
const unreachable, timeExceeded = 3, 11

// Ask sends it from one random port to another, none of which is a NodePort of a Service, and
// waits for an ICMP error about it.
func (d Datagram) Ask(ctx context.Context) Answer {
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
		return NoAnswer // nothing is known of the way behind
	}
	found := NoAnswer
	err = raw.Read(func(fd uintptr) bool { // an error in the queue makes the socket readable
		oob := make([]byte, 512)
		_, n, _, _, err := unix.Recvmsg(int(fd), make([]byte, 64), oob, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err != nil {
			return !errors.Is(err, unix.EAGAIN)
		}
		found = d.answerIn(oob[:n])
		return found != NoAnswer // else one of another device
	})
	if err != nil {
		return NoAnswer
	}
	return found
}

// answerIn reads control messages that have an ICMP error. Routes come before the TTL: an end that has
// no way to the address says so instead, and was reached as well. Our own node's lack of a route ends in
// connect.
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
				answer = WayOn
			}
		}
	}
	if d.By != 0 && d.By != by {
		return NoAnswer
	}
	return answer
}
