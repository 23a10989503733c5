package gateway

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"slices"
	"time"
)

// rejection is why a message of the check was ignored. The list is closed; the strings are the
// metrics label.
type rejection uint8

const (
	rejectOversize  rejection = iota // longer than checkMaxLen
	rejectMalformed                  // not the JSON object it should be
	rejectType                       // neither PING nor PONG
	rejectSource                     // from an address that is not that peer's
	rejectPeer                       // a PONG about a cluster that is no peer
	rejectTimestamp                  // a PONG to no PING of ours, or to one that is answered
	numRejections
)

var rejections = [numRejections]string{"oversize", "malformed", "type", "source", "unknown_peer", "timestamp"}

func (c *checker) receive() {
	for {
		b, from, err := c.port.Receive()
		if err != nil {
			return
		}
		c.message(b, from)
	}
}

// message handles one message. Every invalid message is counted and has no other effect.
func (c *checker) message(b []byte, from netip.AddrPort) {
	if len(b) > checkMaxLen {
		c.reject(rejectOversize)
		return
	}
	var m checkMessage
	if bytes.Count(b, []byte{':'}) > checkMaxColons || json.Unmarshal(b, &m) != nil { // like Liqo, ignore unknown fields
		c.reject(rejectMalformed)
		return
	}
	stamp, err := time.Parse(time.RFC3339Nano, m.Timestamp)
	if err != nil {
		c.reject(rejectMalformed)
		return
	}
	switch m.MsgType {
	case "PING":
		c.answer(m, from)
	case "PONG":
		c.take(m, stamp, from)
	default:
		c.reject(rejectType)
	}
}

// answer sends the same object back, now a PONG. Neither the cluster ID nor the time is looked at:
// they are the pinger's own business. An answer is no longer than its question and goes to the peer
// that asked, so nothing can be amplified.
func (c *checker) answer(m checkMessage, from netip.AddrPort) {
	m.MsgType = "PONG"
	text, err := json.Marshal(m)
	if err != nil || len(text) > checkMaxLen { // escapes may grow
		c.reject(rejectOversize)
		return
	}
	c.mu.Lock()
	p := c.at[from.Addr()]
	if p != nil {
		p.result.Asked = time.Now()
		if p.away {
			p.back, p.away = true, false // there is a session
			c.look()
		}
	}
	c.mu.Unlock()
	if p == nil {
		c.reject(rejectSource)
		return
	}
	c.answered.Add(1)
	_ = c.port.Send(text, from, 0) // as above
}

// take takes a PONG. It is believed only if it comes from the address that was pinged and repeats
// the time of one of our own PINGs to the nanosecond: a peer cannot speak for another, nor for the
// past or the future. The round trip is taken from our own record of that PING, so that a step of
// the clock or a made-up time does not matter.
func (c *checker) take(m checkMessage, stamp time.Time, from netip.AddrPort) {
	now := time.Now()
	c.mu.Lock()
	p := c.peers[m.ClusterID]
	if p == nil {
		c.mu.Unlock()
		c.reject(rejectPeer)
		return
	}
	if from != p.probe {
		c.mu.Unlock()
		c.reject(rejectSource)
		return
	}
	i := slices.IndexFunc(p.sent[:min(p.n, checkWindow)], func(s probe) bool { return s.at.Equal(stamp) && !s.answered })
	if i < 0 {
		ofPath := p.path.answer(stamp)
		if ofPath {
			p.result.Answered = now // the path's probes are PINGs, too, and say as well that the peer is there
		}
		c.mu.Unlock()
		if !ofPath {
			c.reject(rejectTimestamp)
		}
		return
	}
	p.sent[i].answered = true
	at := p.sent[i].at
	if at.Before(p.newest) { // overtaken by a newer one: not lost, but old news
		c.mu.Unlock()
		return
	}
	rtt := now.Sub(at)
	p.newest, p.result.Answered, p.result.RTT = at, now, rtt
	if p.result.State != Connected {
		c.enter(p, Connected, now)
	}
	c.mu.Unlock()
	c.rtt(m.ClusterID, rtt)
}

func (c *checker) reject(r rejection) { c.rejected[r].Add(1) }
