package load

import (
	"math"
	"net"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// The highest rate at which nothing is lost, in the manner of RFC 2544, section 26.1: trials at a
// steady rate, and a bisection between one that passed and one that did not. A flood on one machine
// rather shows which process gets the CPU.

const (
	arriving = 0.995 // of what was sent, for a trial to pass
	firstPPS = 10_000
	mostPPS  = 2_000_000
	halvings = 4 // of the factor of two between a pass and a failure: 4.4 % are left
)

// losslessRate finds the rate of datagrams of size octets, with trials of duration d.
func losslessRate(addr string, size int, d time.Duration) (Result, error) {
	c, err := net.Dial("udp4", net.JoinHostPort(addr, strconv.Itoa(udpPort)))
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = c.Close() }()
	out := newMessages(64, size)
	start := time.Now()
	pps, err := highestRate(func(pps float64) (bool, error) {
		for range 2 { // one hiccup of the machine is no limit
			if passed, err := trial(c.(*net.UDPConn), out, pps, d); passed || err != nil {
				return passed, err
			}
		}
		return false, nil
	})
	return Result{Rate: pps, Seconds: time.Since(start).Seconds()}, err
}

// highestRate is the highest rate that passes: doubled until one does not, then bisected in
// between. It is zero when not even firstPPS over 2^halvings passes.
func highestRate(passes func(pps float64) (bool, error)) (float64, error) {
	low, high := 0., float64(firstPPS)
	for high <= mostPPS {
		ok, err := passes(high)
		if err != nil {
			return 0, err
		}
		if !ok {
			break
		}
		low, high = high, 2*high
	}
	for range halvings {
		middle := math.Sqrt(low * high)
		if low == 0 {
			middle = high / 2
		}
		ok, err := passes(middle)
		if err != nil {
			return 0, err
		}
		if ok {
			low = middle
		} else {
			high = middle
		}
	}
	return low, nil
}

// trial sends at a steady rate, a batch every millisecond, and says whether it arrived. The
// question how much has arrived follows the last datagram on the same path. When the answer takes
// longer than a tenth of the trial, a queue has grown, and a longer trial would have lost what did
// not fit into it.
func trial(c *net.UDPConn, out *messages, pps float64, d time.Duration) (bool, error) {
	if _, _, err := askSink(c); err != nil { // empties the counters, and waits until the last trial's queues are empty
		return false, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return false, err
	}
	sent, start := 0, time.Now()
sending:
	for elapsed := time.Duration(0); elapsed < d; elapsed = time.Since(start) {
		for due := int(pps * elapsed.Seconds()); sent < due; {
			batch := messages{headers: out.headers[:min(len(out.headers), due-sent)]}
			n, err := batch.transfer(raw.Write, unix.SYS_SENDMMSG)
			if err != nil { // no room for it, or an ICMP error about an earlier one: too little is sent
				break sending
			}
			sent += n
		}
		time.Sleep(time.Millisecond)
	}
	asked := time.Now()
	packets, _, err := askSink(c)
	return time.Since(asked) < d/10 && float64(sent) >= 0.98*pps*d.Seconds() && float64(packets) >= arriving*float64(sent), err
}
