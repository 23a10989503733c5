package check

import (
	"bytes"
	"encoding/json"
	"iter"
	"net/netip"
	"slices"
	"time"
)

// message is the JSON object of a PING or PONG. The order of the fields is Liqo's.
type message struct {
	ClusterID string `json:"clusterID"` // the pinged cluster; a PONG repeats it
	MsgType   string `json:"msgType"`
	Timestamp string `json:"timeStamp"` // when the PING was sent, by the sender's clock: RFC 3339 with nanoseconds; a PONG repeats it
}

// A rejection is the reason why a message was ignored. The strings are the values of a metric's
// label.
type rejection uint8

const (
	rejectOversize  rejection = iota // longer than MaxMessage
	rejectMalformed                  // not the expected JSON object
	rejectType                       // neither PING nor PONG
	rejectSource                     // from an address that does not belong to the peer
	rejectPeer                       // a PONG for an unknown cluster
	rejectTimestamp                  // a PONG for a PING that was not sent, or was already answered
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

// message handles one message. Invalid messages are ignored and counted.
func (m *Monitor) message(b []byte, from netip.AddrPort) {
	if len(b) > MaxMessage {
		m.reject(rejectOversize)
		return
	}
	var msg message
	// Ignore unknown fields, as Liqo does.
	if bytes.Count(b, []byte{':'}) > maxColons || json.Unmarshal(b, &msg) != nil {
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
		m.acceptPong(msg, stamp, from)
	default:
		m.reject(rejectType)
	}
}

// answer answers a PING with a PONG that repeats its content. It does not check the cluster ID
// and the time, which matter only to the sender. The PONG is no longer than the PING and returns
// to the same peer, so it cannot amplify traffic.
func (m *Monitor) answer(msg message, from netip.AddrPort) {
	msg.MsgType = "PONG"
	text, err := json.Marshal(msg)
	if err != nil || len(text) > MaxMessage { // re-encoding may have lengthened JSON escapes
		m.reject(rejectOversize)
		return
	}
	m.mu.Lock()
	p := m.bySource[from.Addr()]
	if p != nil {
		p.result.Asked = time.Now()
		if p.away {
			p.back, p.away = true, false // the PING arrived, so there is a session
			m.wakeSender()
		}
	}
	m.mu.Unlock()
	if p == nil {
		m.reject(rejectSource)
		return
	}
	m.answered.Add(1)
	_ = m.port.Send(text, from, 0) // ignore the error: the peer counts the missing answer as loss
}

// acceptPong handles a PONG. It accepts only a PONG that comes from the pinged address and repeats
// the time of one of our own PINGs to the nanosecond. So a peer can neither answer for another peer
// nor forge a round-trip time. That time is measured from our own record of the PING, so steps of
// the wall clock do not matter.
func (m *Monitor) acceptPong(msg message, stamp time.Time, from netip.AddrPort) {
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
			// Probes of the path MTU are PINGs, too, so their answers also show that the peer is alive.
			p.result.Answered = now
		}
		m.mu.Unlock()
		if !ofPath {
			m.reject(rejectTimestamp)
		}
		return
	}
	p.sent[i].answered = true
	sent := p.sent[i].at
	// The answer to a newer PING came first. This one is late, not lost.
	if sent.Before(p.newest) {
		m.mu.Unlock()
		return
	}
	rtt := now.Sub(sent)
	p.newest, p.result.Answered, p.result.RTT = sent, now, rtt
	if p.result.State != Connected {
		m.enter(p, Connected, now)
	}
	m.mu.Unlock()
	if m.o.RTT != nil {
		m.o.RTT(msg.ClusterID, rtt)
	}
}

func (m *Monitor) reject(r rejection) { m.rejected[r].Add(1) }

// Rejected yields the number of ignored messages for each reason.
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
