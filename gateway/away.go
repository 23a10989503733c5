package gateway

import (
	"cmp"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// A peer that is away is looked for by handshakes alone. wireguard-go would begin one every five
// seconds for each, which with a thousand away is 3 % of a core and delays packets; so all together
// get a few a second, after a first one each. Who comes back begins one himself, and is answered at
// once in any case.
//
// Where some are answered, others may have got lost: on a machine that has no time left, the queue of
// handshakes runs full, or wireguard-go thinks itself under load and asks who answers for a cookie.
// Then they are begun again as fast as the first ones, as long as some are answered.
const (
	awayAfter         = 2 * time.Second // without a session since it was configured
	mostPerSecond     = 250             // handshakes, so that packets do not wait for them; with peers that were never tried at once
	leastPerSecond    = 20              // with all others
	handshakePatience = 3 * time.Second // for an answer; after five seconds wireguard-go tries again by itself
	handshakesLost    = 8               // for each that is answered, and as many are begun all the same
	handshakesOver    = 8               // seconds over which they are counted, about
)

// sessions takes notice of which peers have a WireGuard session; call it once a second. It says
// with which of the others a handshake is to be begun now, and on behalf of which wireguard-go
// shall do nothing more by itself. With few of them away it may.
func (c *checker) sessions(stats map[[32]byte]datapath.Stats, now time.Time) (try, rest [][32]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var away []*checked
	answered, lost := 0.0, 0.0
	for _, p := range c.peers {
		s := stats[p.key]
		switch never := s.Handshake.IsZero(); {
		case !never && now.Sub(s.Handshake) <= sessionGone:
			if p.away {
				p.away, p.back = false, true
				c.look()
			}
			if p.waits {
				p.waits = false
				answered++
			}
			continue
		case p.away:
		case !never:
			p.away, p.tried, p.rests = true, now, false // wireguard-go has tried until now
		case now.Sub(p.begun) <= awayAfter:
			continue
		default:
			p.away, p.tried, p.rests = true, p.begun, false // by its first PING
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
	c.answers.answered += (answered - c.answers.answered) / handshakesOver
	c.answers.lost += (lost - c.answers.lost) / handshakesOver
	again := leastPerSecond
	if a := c.answers; a.answered*handshakesOver > 1 && a.lost <= handshakesLost*a.answered {
		again = mostPerSecond
	}
	pause := max(device.RekeyTimeout, time.Duration(len(away))*time.Second/time.Duration(again))
	slices.SortFunc(away, func(a, b *checked) int { return cmp.Or(a.tried.Compare(b.tried), cmp.Compare(a.id, b.id)) })
	first := mostPerSecond
	for _, p := range away { // those that were never tried come first
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
			try = append(try, p.key)
		case now.Sub(p.tried) >= handshakePatience && pause > device.RekeyTimeout && !p.rests && !p.tried.IsZero():
			p.rests = true
			rest = append(rest, p.key)
		}
	}
	return try, rest
}

// doubtPatience is how much longer than a round trip a peer has for the answer that says that it still has our session.
const doubtPatience = 300 * time.Millisecond

// doubt is told that a peer sends under a session that is not ours. It does not wait: where many are in doubt, some stay so.
func (c *checker) doubt(key [32]byte) {
	select {
	case c.doubts <- key:
	default:
	}
}

// test pings a peer of which there is a doubt, and begins a handshake when there is no answer. Without it, WireGuard begins one
// after 15 seconds.
func (c *checker) test(key [32]byte) {
	c.mu.Lock()
	var p *checked
	for _, q := range c.peers {
		if q.key == key {
			p = q
		}
	}
	c.mu.Unlock()
	if p == nil {
		return
	}
	c.ping([]*checked{p})
	c.mu.Lock()
	at, wait := p.sent[(p.n-1)%checkWindow].at, doubtPatience+p.result.RTT
	c.mu.Unlock()
	c.wg.Go(func() {
		select {
		case <-c.done:
			return
		case <-time.After(wait):
		}
		c.mu.Lock()
		answered := !p.newest.Before(at)
		c.mu.Unlock()
		if !answered {
			c.log.Info("peer uses another WireGuard session; starting a handshake", "peer", p.id)
			c.handshake(key)
		}
	})
}

// reach looks for the peers that are away, in every tunnel, by the stats of each.
func (g *gateway) reach(stats []map[[32]byte]datapath.Stats, now time.Time) {
	for i, e := range g.ends {
		if try, rest := e.checker.sessions(stats[i], now); len(try)+len(rest) > 0 {
			g.wg.Go(func() { e.reach(try, rest, g.done) })
		}
	}
}

// rekeyTime is how long a new preshared key is tried. Its peer has it within seconds.
const rekeyTime = 30 * time.Second

// rekey begins handshakes with peers whose sessions were made before they got a preshared key. Without it
// these sessions would carry packets for two minutes more.
func (g *gateway) rekey(peers []peer, now time.Time) {
	try, left := make([][][32]byte, len(g.ends)), mostPerSecond
	for i := range peers {
		p := &peers[i]
		if p.preshared.Key == [32]byte{} || now.Sub(p.keyed) > rekeyTime || now.Sub(p.rekeyed) < device.RekeyTimeout || left <= 0 {
			continue
		}
		for tunnel, s := range p.sessions {
			if theirs, ok := theirEnd(p.GatewayPeer, tunnel); ok && tunnel < len(try) && !s.stats.Preshared && !s.stats.Handshake.IsZero() {
				try[tunnel] = append(try[tunnel], theirs.PublicKey)
				p.rekeyed = now
				left--
			}
		}
	}
	for i, e := range g.ends {
		if keys := try[i]; len(keys) > 0 {
			g.wg.Go(func() { e.reach(keys, nil, g.done) })
		}
	}
}

// reach begins handshakes with some peers and ends the attempts with others. It takes its time,
// most of a second, so that packets do not wait for so many handshakes.
func (e *tunnelEnd) reach(try, rest [][32]byte, done <-chan struct{}) {
	pause := time.NewTicker(900 * time.Millisecond / time.Duration(len(try)+len(rest)))
	defer pause.Stop()
	for i, key := range slices.Concat(try, rest) {
		if i < len(try) {
			e.Handshake(key)
		} else {
			e.Rest(key)
		}
		select {
		case <-done:
			return
		case <-pause.C:
		}
	}
}
