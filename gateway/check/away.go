package check

import (
	"cmp"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// A peer without a session counts as away. Only a handshake shows that the peer has returned.
// wireguard-go would start one every five seconds for each peer that is away. With a thousand such
// peers this takes 3 % of a core and delays packets. So each of these peers gets one handshake at
// first. Afterwards all of them together get a few a second (slowRate). A peer that returns also
// starts a handshake itself, which is answered at once.
//
// If only some handshakes are answered, the others may have been lost: on a busy machine, the queue
// of handshakes overflows, or wireguard-go is under load and demands cookies. So while some
// handshakes are answered, unanswered ones are repeated at a higher rate (fastRate).
const (
	// SessionGone is the age of the last handshake at which its session counts as gone. WireGuard
	// refuses a session after 180 s (REJECT_AFTER_TIME), and starts to renew it after 120 s.
	SessionGone = 195 * time.Second

	awayAfter         = 2 * time.Second // a new peer without a session counts as away after this time
	fastRate          = 250             // handshakes per second with peers to which none was started before; more would delay packets
	slowRate          = 20              // handshakes per second with all other peers that are away
	handshakePatience = 3 * time.Second // maximum wait for an answer; must be shorter than the 5 s after which wireguard-go repeats a handshake
	handshakesLost    = 8               // use fastRate if at most this many handshakes fail for each answered one
	handshakesOver    = 8               // seconds over which answers are averaged
)

// Sessions records which peers have a WireGuard session. stats holds the statistics by public key.
// Call it once a second. It returns two lists of public keys. The caller must start a handshake
// with each peer in starts, and must stop wireguard-go from repeating handshakes with each peer in
// stops. stops is empty if few peers are away.
func (m *Monitor) Sessions(stats map[[32]byte]datapath.Stats, now time.Time) (starts, stops [][32]byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var away []*peerState
	answered, lost := 0.0, 0.0
	for _, p := range m.peers {
		s := stats[p.Key]
		switch never := s.Handshake.IsZero(); {
		case !never && now.Sub(s.Handshake) <= SessionGone:
			if p.away {
				p.away, p.back = false, true
				m.wakeSender()
			}
			if p.waits {
				p.waits = false
				answered++
			}
			continue
		case p.away:
		case !never:
			p.away, p.tried, p.rests = true, now, false // wireguard-go still repeats the last handshake
		case now.Sub(p.begun) <= awayAfter:
			continue
		default:
			p.away, p.tried, p.rests = true, p.begun, false // its first PING started a handshake
		}
		if s.Endpoint.IsValid() {
			away = append(away, p)
		}
	}
	for _, p := range away {
		if p.waits && now.Sub(p.tried) >= handshakePatience {
			p.waits = false
			lost++
		}
	}
	m.answers.answered += (answered - m.answers.answered) / handshakesOver
	m.answers.lost += (lost - m.answers.lost) / handshakesOver
	again := slowRate
	if a := m.answers; a.answered*handshakesOver > 1 && a.lost <= handshakesLost*a.answered {
		again = fastRate
	}
	pause := max(device.RekeyTimeout, time.Duration(len(away))*time.Second/time.Duration(again))
	slices.SortFunc(away, func(a, b *peerState) int { return cmp.Or(a.tried.Compare(b.tried), cmp.Compare(a.ID, b.ID)) })
	first := fastRate
	for _, p := range away { // the sort puts peers that were never tried first
		left, due := &again, now.Sub(p.tried) >= pause
		if p.tried.IsZero() {
			left, due = &first, true
		}
		switch {
		case due && *left > 0:
			if *left--; left == &first {
				again = min(again, max(first, slowRate))
			}
			p.tried, p.rests, p.waits = now, false, true
			starts = append(starts, p.Key)
		case now.Sub(p.tried) >= handshakePatience && pause > device.RekeyTimeout && !p.rests && !p.tried.IsZero():
			p.rests = true
			stops = append(stops, p.Key)
		}
	}
	return starts, stops
}

// A peer that still has our session must answer within testPatience plus the round trip.
const testPatience = 300 * time.Millisecond

// TestSession makes the Monitor test whether a peer still has our session. Call it when the peer
// sends messages of a session that this gateway does not have. It never blocks: if many peers are
// reported at once, it ignores some.
func (m *Monitor) TestSession(key [32]byte) {
	select {
	case m.suspects <- key:
	default:
	}
}

// testSession pings a peer reported by TestSession, and starts a handshake if no answer comes.
// Without testSession, WireGuard would start a handshake only after 15 seconds.
func (m *Monitor) testSession(key [32]byte) {
	m.mu.Lock()
	var p *peerState
	for _, q := range m.peers {
		if q.Key == key {
			p = q
		}
	}
	m.mu.Unlock()
	if p == nil {
		return
	}
	m.ping([]*peerState{p})
	m.mu.Lock()
	sent, wait := p.sent[(p.n-1)%window].at, testPatience+p.result.RTT
	m.mu.Unlock()
	m.wg.Go(func() {
		select {
		case <-m.done:
			return
		case <-time.After(wait):
		}
		m.mu.Lock()
		answered := !p.newest.Before(sent)
		m.mu.Unlock()
		if !answered {
			m.o.Log.Info("peer uses another WireGuard session; starting a handshake", "peer", p.ID)
			m.o.Handshake(key)
		}
	})
}
