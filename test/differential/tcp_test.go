package differential

import (
	"bytes"
	"math/rand/v2"
)

// A tcpTalk is the state of both ends of one TCP connection, as far as a NAT sees it in the
// segments. Sequence numbers are correct, because conntrack tracks them. No segment is lost,
// but the talk repeats and reorders some.
type tcpTalk struct {
	state tcpState
	next  [2]uint32 // next sequence number of client and server
	ended [2]bool   // whether the end has sent FIN
	acked [2]bool   // whether the other end has acknowledged that FIN
	last  [2]*tcpSegment
	opens int // number of new SYNs that the client has sent
}

type tcpState int

const (
	tcpClosed    tcpState = iota
	tcpSynSent            // the client has sent a SYN
	tcpSynSynced          // both have sent a SYN: a simultaneous open
	tcpSynSimult          // after tcpSynSynced, the client has answered
	tcpSynRecv            // the server has answered
	tcpOpen
	tcpOver // both FINs are acknowledged
	tcpReset
)

const (
	client = iota
	server
)

type tcpSegment struct {
	from     int
	seq, ack uint32
	flags    uint8
	options  []byte
	data     []byte
}

// say returns the next segment of one end. An acknowledgement covers all data that the other
// end has sent.
func (c *tcpTalk) say(from int, flags uint8, data []byte) *tcpSegment {
	s := &tcpSegment{from: from, seq: c.next[from], flags: flags, data: data}
	if flags&ack != 0 {
		s.ack = c.next[1-from]
		c.acked[1-from] = c.ended[1-from]
	}
	if flags&syn != 0 {
		s.options = []byte{2, 4, 0x05, 0xb4}
	}
	c.next[from] += uint32(len(data))
	if flags&(syn|fin) != 0 {
		c.next[from]++
	}
	c.ended[from] = c.ended[from] || flags&fin != 0
	if s.flags&rst == 0 {
		c.last[from] = s
	}
	return s
}

// step returns the next segments: usually one new segment, sometimes a repeated one, or two in
// the wrong order.
func (c *tcpTalk) step(rng *rand.Rand) []*tcpSegment {
	chance := func(percent int) bool { return rng.IntN(100) < percent }
	one := func(s *tcpSegment, next tcpState) []*tcpSegment {
		c.state = next
		return []*tcpSegment{s}
	}
	again := func(from int) []*tcpSegment {
		if c.last[from] == nil {
			return []*tcpSegment{c.say(from, ack, nil)}
		}
		return []*tcpSegment{c.last[from]}
	}
	switch c.state {
	case tcpClosed, tcpOver, tcpReset:
		if c.state == tcpOver && chance(30) { // as if the last acknowledgement had been lost
			return again(rng.IntN(2))
		}
		c.next = [2]uint32{c.next[client] + 1e6 + rng.Uint32N(1e6), rng.Uint32()}
		c.ended, c.acked, c.last, c.opens = [2]bool{}, [2]bool{}, [2]*tcpSegment{}, c.opens+1
		return one(c.say(client, syn, nil), tcpSynSent)
	case tcpSynSent:
		switch {
		case chance(20):
			return again(client)
		case chance(8):
			return one(c.say(server, rst|ack, nil), tcpReset) // as if no program listens on the port
		case c.opens == 1 && chance(10): // conntrack may still have the state of an earlier connection
			return one(c.say(server, syn, nil), tcpSynSynced)
		}
		return one(c.say(server, syn|ack, nil), tcpSynRecv)
	case tcpSynSynced:
		s := c.say(client, ack, nil)
		s.seq, s.flags, s.options = s.seq-1, syn|ack, c.last[server].options
		return one(s, tcpSynSimult)
	case tcpSynSimult:
		c.last[client] = nil // conntrack treats a repetition of this SYN ACK as invalid
		return one(c.say(server, ack, nil), tcpOpen)
	case tcpSynRecv:
		if chance(20) {
			return again(rng.IntN(2))
		}
		return one(c.say(client, ack, c.data(rng, 30)), tcpOpen)
	}
	from := rng.IntN(2)
	if c.acked == [2]bool{true, true} {
		return one(c.say(from, ack, nil), tcpOver)
	}
	switch {
	case chance(12):
		return again(from)
	case chance(3):
		return one(c.say(from, rst|ack, nil), tcpReset)
	case c.ended[from], chance(15):
		return []*tcpSegment{c.say(from, ack, nil)}
	case chance(10):
		return []*tcpSegment{c.say(from, fin|ack, c.data(rng, 30))}
	}
	s := []*tcpSegment{c.say(from, psh|ack, c.data(rng, 100))}
	if chance(8) {
		s = append(s, c.say(from, psh|ack, c.data(rng, 100)))
		s[0], s[1] = s[1], s[0]
	}
	return s
}

// data returns random data with a probability of percent, otherwise none. Sometimes the data does
// not fit into one packet.
func (c *tcpTalk) data(rng *rand.Rand, percent int) []byte {
	if rng.IntN(100) >= percent {
		return nil
	}
	n := 1 + []int{rng.IntN(20), rng.IntN(1400), rng.IntN(1400), rng.IntN(4000)}[rng.IntN(4)]
	return bytes.Repeat([]byte{byte(rng.Uint32())}, n)
}
