package check

import (
	"cmp"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// Handshakes show whether a peer that is away has returned. wireguard-go would begin one every five
// seconds for each such peer. With a thousand of them this takes 3 % of a core and delays packets.
// So each peer gets one handshake at first, and then all such peers together get a few a second. A
// peer that returns begins a handshake itself, and is answered at once.
//
// If only some handshakes are answered, others may have been lost: on a busy machine, the queue of
// handshakes overflows, or wireguard-go asks for cookies because it believes itself under load. The
// lost ones are then begun again at the pace of the first ones, as long as some are answered.
const (
	// SessionGone is the age of the last handshake at which a session counts as gone. WireGuard
	// refuses it after 180 s (REJECT_AFTER_TIME), and has tried to make a new one since 120 s.
	SessionGone = 195 * time.Second

	awayAfter         = 2 * time.Second // without a session since its configuration
	mostPerSecond     = 250             // per second, never tried before; packets wait for more
	leastPerSecond    = 20              // handshakes with all other peers
	handshakePatience = 3 * time.Second // for an answer; after five seconds wireguard-go tries again by itself
	handshakesLost    = 8               // unanswered handshakes that are begun again, for each one that is answered
	handshakesOver    = 8               // answers are counted over about this many seconds
)

// Sessions records which peers have a WireGuard session. The caller calls it once a second. It
// returns the peers that now get a handshake, and those with which wireguard-go must begin none by
// itself. If few peers are away, wireguard-go may go on by itself.
func (m *Monitor) Sessions(stats map[[32]byte]datapath.Stats, now time.Time) (try, rest [][32]byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var away []*checked
	answered, lost := 0.0, 0.0
	for _, p := range m.peers {
		s := stats[p.Key]
		switch never := s.Handshake.IsZero(); {
		case !never && now.Sub(s.Handshake) <= SessionGone:
			if p.away {
				p.away, p.back = false, true
				m.look()
			}
			if p.waits {
				p.waits = false
				answered++
			}
			continue
		case p.away:
		case !never:
			p.away, p.tried, p.rests = true, now, false // wireguard-go tried until now
		case now.Sub(p.begun) <= awayAfter:
			continue
		default:
			p.away, p.tried, p.rests = true, p.begun, false // its first PING began the handshake
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
	again := leastPerSecond
	if a := m.answers; a.answered*handshakesOver > 1 && a.lost <= handshakesLost*a.answered {
		again = mostPerSecond
	}
	pause := max(device.RekeyTimeout, time.Duration(len(away))*time.Second/time.Duration(again))
	slices.SortFunc(away, func(a, b *checked) int { return cmp.Or(a.tried.Compare(b.tried), cmp.Compare(a.ID, b.ID)) })
	first := mostPerSecond
	for _, p := range away { // peers that were never tried come first
		left, due := &again, now.Sub(p.tried) >= pause
		if p.tried.IsZero() {
			left, due = &first, true
		}
		switch {
		case due && *left > 0:
			if *left--; left == &first {
				again = min(again, max(first, leastPerSecond))
			}
			p.tried, p.rests, p.waits = now, false, true
			try = append(try, p.Key)
		case now.Sub(p.tried) >= handshakePatience && pause > device.RekeyTimeout && !p.rests && !p.tried.IsZero():
			p.rests = true
			rest = append(rest, p.Key)
		}
	}
	return try, rest
}

// doubtPatience is added to the round trip: a peer that still has our session answers within both.
const doubtPatience = 300 * time.Millisecond

// Doubt notes that a peer sends under a session that we do not have. It does not block: if many
// peers do so at once, it ignores some.
func (m *Monitor) Doubt(key [32]byte) {
	select {
	case m.doubts <- key:
	default:
	}
}

// test pings a peer after Doubt, and begins a handshake if no answer comes. WireGuard alone would
// begin one after 15 seconds.
func (m *Monitor) test(key [32]byte) {
	m.mu.Lock()
	var p *checked
	for _, q := range m.peers {
		if q.Key == key {
			p = q
		}
	}
	m.mu.Unlock()
	if p == nil {
		return
	}
	m.ping([]*checked{p})
	m.mu.Lock()
	at, wait := p.sent[(p.n-1)%window].at, doubtPatience+p.result.RTT
	m.mu.Unlock()
	m.wg.Go(func() {
		select {
		case <-m.done:
			return
		case <-time.After(wait):
		}
		m.mu.Lock()
		answered := !p.newest.Before(at)
		m.mu.Unlock()
		if !answered {
			m.o.Log.Info("peer uses another WireGuard session; starting a handshake", "peer", p.ID)
			m.o.Handshake(key)
		}
	})
}
