package check

import (
	"bytes"
	"encoding/json"
	"iter"
	"net/netip"
	"slices"
	"time"
)

// message is the JSON object, its fields in Liqo's order.
type message struct {
	ClusterID string `json:"clusterID"` // in a PING: the cluster that is pinged; in a PONG: the same
	MsgType   string `json:"msgType"`
	Timestamp string `json:"timeStamp"` // RFC 3339 with nanoseconds, of the PING, by the pinger's clock
}

// rejection is the reason why a message of the check was ignored. The list is closed; the strings
// are values of the metric's label.
type rejection uint8

const (
	rejectOversize  rejection = iota // longer than MaxMessage
	rejectMalformed                  // not the JSON object it should be
	rejectType                       // neither PING nor PONG
	rejectSource                     // from an address that is not that peer's
	rejectPeer                       // a PONG about a cluster that is no peer
	rejectTimestamp                  // a PONG to no PING of ours, or to an answered one
	numRejections
)

var reasons = [numRejections]string{"oversize", "malformed", "type", "source", "unknown_peer", "timestamp"}

func (m *Monitor) receive() {
	for {
		b, from, err := m.port.Receive()
		if err != nil {
			return
		}
		m.message(b, from)
	}
}

// message handles one message. An invalid message is only counted.
func (m *Monitor) message(b []byte, from netip.AddrPort) {
	if len(b) > MaxMessage {
		m.reject(rejectOversize)
		return
	}
	var msg message
	if bytes.Count(b, []byte{':'}) > maxColons || json.Unmarshal(b, &msg) != nil { // like Liqo, ignore unknown fields
		m.reject(rejectMalformed)
		return
	}
	stamp, err := time.Parse(time.RFC3339Nano, msg.Timestamp)
	if err != nil {
		m.reject(rejectMalformed)
		return
	}
	switch msg.MsgType {
	case "PING":
		m.answer(msg, from)
	case "PONG":
		m.take(msg, stamp, from)
	default:
		m.reject(rejectType)
	}
}

// answer returns the object as a PONG. It does not check the cluster ID and the time, which only
// the pinger uses. An answer is no longer than the PING and goes to the same peer, so it cannot
// amplify.
func (m *Monitor) answer(msg message, from netip.AddrPort) {
	msg.MsgType = "PONG"
	text, err := json.Marshal(msg)
	if err != nil || len(text) > MaxMessage { // the JSON escapes may be longer
		m.reject(rejectOversize)
		return
	}
	m.mu.Lock()
	p := m.at[from.Addr()]
	if p != nil {
		p.result.Asked = time.Now()
		if p.away {
			p.back, p.away = true, false // there is a session
			m.look()
		}
	}
	m.mu.Unlock()
	if p == nil {
		m.reject(rejectSource)
		return
	}
	m.answered.Add(1)
	_ = m.port.Send(text, from, 0) // a lost answer counts as missing at the peer
}

// take handles a PONG. It accepts only one that comes from the pinged address and repeats the time
// of one of our own PINGs to the nanosecond. So a peer can neither speak for another peer nor
// invent a round trip. The round trip is measured by our own record of that PING, so steps of the
// wall clock do not matter.
func (m *Monitor) take(msg message, stamp time.Time, from netip.AddrPort) {
	now := time.Now()
	m.mu.Lock()
	p := m.peers[msg.ClusterID]
	if p == nil {
		m.mu.Unlock()
		m.reject(rejectPeer)
		return
	}
	if from != p.Probe {
		m.mu.Unlock()
		m.reject(rejectSource)
		return
	}
	i := slices.IndexFunc(p.sent[:min(p.n, window)], func(s probe) bool { return s.at.Equal(stamp) && !s.answered })
	if i < 0 {
		ofPath := p.path.answer(stamp)
		if ofPath {
			// probes of the path MTU are PINGs, too, and show as well that the peer lives
			p.result.Answered = now
		}
		m.mu.Unlock()
		if !ofPath {
			m.reject(rejectTimestamp)
		}
		return
	}
	p.sent[i].answered = true
	at := p.sent[i].at
	if at.Before(p.newest) { // a newer answer came first: this one is late, not lost
		m.mu.Unlock()
		return
	}
	rtt := now.Sub(at)
	p.newest, p.result.Answered, p.result.RTT = at, now, rtt
	if p.result.State != Connected {
		m.enter(p, Connected, now)
	}
	m.mu.Unlock()
	if m.o.RTT != nil {
		m.o.RTT(msg.ClusterID, rtt)
	}
}

func (m *Monitor) reject(r rejection) { m.rejected[r].Add(1) }

// Rejected returns the number of ignored messages for each reason.
func (m *Monitor) Rejected() iter.Seq2[string, uint64] {
	return func(yield func(string, uint64) bool) {
		for r := range m.rejected {
			if !yield(reasons[r], m.rejected[r].Load()) {
				return
			}
		}
	}
}

// Answered returns the number of answered PINGs.
func (m *Monitor) Answered() uint64 { return m.answered.Load() }
