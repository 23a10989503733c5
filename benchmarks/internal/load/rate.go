package load

import (
	"math"
	"net"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// losslessRate searches as in RFC 2544, section 26.1: it makes trials at a steady rate, and bisects
// between a rate that passed and one that failed. The rate of a flood would depend on the division
// of the CPU between sender, gateways and receiver.

const (
	arriving = 0.995 // fraction that must arrive for a trial to pass
	firstPPS = 10_000
	mostPPS  = 2_000_000
	halvings = 4 // bisection steps between a passing rate and twice that rate; an uncertainty of 4.4 % remains
)

// losslessRate finds the highest rate for datagrams of size octets, with trials of duration d.
func losslessRate(addr string, size int, d time.Duration) (Result, error) {
	c, err := net.Dial("udp4", net.JoinHostPort(addr, strconv.Itoa(udpPort)))
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = c.Close() }()
	out := newMessages(64, size)
	start := time.Now()
	pps, err := highestRate(func(pps float64) (bool, error) {
		for range 2 { // retry once: a single failure may be a hiccup of the machine
			if passed, err := trial(c.(*net.UDPConn), out, pps, d); passed || err != nil {
				return passed, err
			}
		}
		return false, nil
	})
	return Result{Rate: pps, Seconds: time.Since(start).Seconds()}, err
}

// highestRate returns the highest rate that passes. It doubles the rate until a trial fails, then
// bisects. It returns zero if not even firstPPS / 2^halvings passes.
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

// trial sends at a steady rate, a batch every millisecond, and reports whether the datagrams
// arrived. The query for the count follows the last datagram on the same path. If the answer
// takes longer than a tenth of the trial, a queue has grown, and a longer trial would have lost
// packets.
func trial(c *net.UDPConn, out *messages, pps float64, d time.Duration) (bool, error) {
	if _, _, err := readSink(c); err != nil { // resets the counters, and waits until the last trial's queues are empty
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
			if err != nil { // buffer full, or an ICMP error for an earlier datagram; the trial fails, because it has sent too little
				break sending
			}
			sent += n
		}
		time.Sleep(time.Millisecond)
	}
	begin := time.Now()
	packets, _, err := readSink(c)
	return time.Since(begin) < d/10 && float64(sent) >= 0.98*pps*d.Seconds() && float64(packets) >= arriving*float64(sent), err
}
