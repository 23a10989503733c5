package gateway

import (
	"bytes"
	"encoding/json"
	"iter"
	"net/netip"
	"slices"
	"time"
)

// rejection is the reason why a message of the check was ignored. The list is closed; the strings
// are values of the metric's label.
type rejection uint8

const (
	rejectOversize  rejection = iota // longer than checkMaxLen
	rejectMalformed                  // not the JSON object it should be
	rejectType                       // neither PING nor PONG
	rejectSource                     // from an address that is not that peer's
	rejectPeer                       // a PONG about a cluster that is no peer
	rejectTimestamp                  // a PONG to no PING of ours, or to an answered one
	numRejections
)

var reasons = [numRejections]string{"oversize", "malformed", "type", "source", "unknown_peer", "timestamp"}

func (c *checker) receive() {
	for {
		b, from, err := c.port.Receive()
		if err != nil {
			return
		}
		c.message(b, from)
	}
}

// message handles one message. An invalid message is only counted.
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

// answer returns the object as a PONG. It does not check the cluster ID and the time, which only
// the pinger uses. An answer is no longer than the PING and goes to the same peer, so it cannot
// amplify.
func (c *checker) answer(m checkMessage, from netip.AddrPort) {
	m.MsgType = "PONG"
	text, err := json.Marshal(m)
	if err != nil || len(text) > checkMaxLen { // the JSON escapes may be longer
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
	_ = c.port.Send(text, from, 0) // a lost answer counts as missing at the peer
}

// take handles a PONG. It accepts only one that comes from the pinged address and repeats the time
// of one of our own PINGs to the nanosecond. So a peer can neither speak for another peer nor
// invent a round trip. The round trip is measured by our own record of that PING, so steps of the
// wall clock do not matter.
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
			// probes of the path MTU are PINGs, too, and show as well that the peer lives
			p.result.Answered = now
		}
		c.mu.Unlock()
		if !ofPath {
			c.reject(rejectTimestamp)
		}
		return
	}
	p.sent[i].answered = true
	at := p.sent[i].at
	if at.Before(p.newest) { // a newer answer came first: this one is late, not lost
		c.mu.Unlock()
		return
	}
	rtt := now.Sub(at)
	p.newest, p.result.Answered, p.result.RTT = at, now, rtt
	if p.result.State != Connected {
		c.enter(p, Connected, now)
	}
	c.mu.Unlock()
	if c.o.RTT != nil {
		c.o.RTT(m.ClusterID, rtt)
	}
}

func (c *checker) reject(r rejection) { c.rejected[r].Add(1) }

// Rejected returns the number of ignored messages for each reason.
func (c *checker) Rejected() iter.Seq2[string, uint64] {
	return func(yield func(string, uint64) bool) {
		for r := range c.rejected {
			if !yield(reasons[r], c.rejected[r].Load()) {
				return
			}
		}
	}
}

// Answered returns the number of answered PINGs.
func (c *checker) Answered() uint64 { return c.answered.Load() }
