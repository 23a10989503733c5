package gateway

import (
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// reach finds, in the statistics of each tunnel, the peers that are away, and starts handshakes
// with them.
func (g *gateway) reach(stats []map[[32]byte]datapath.Stats, now time.Time) {
	for i, e := range g.tunnels {
		if starts, stops := e.checker.Sessions(stats[i], now); len(starts)+len(stops) > 0 {
			g.wg.Go(func() { e.reach(starts, stops, g.done) })
		}
	}
}

const (
	// rekeyTime is the time for which handshakes with a new preshared key are tried. It is long
	// enough, because the peer receives the key within seconds.
	rekeyTime = 30 * time.Second
	// rekeysPerSecond is the maximum number of handshakes with new preshared keys in a second. More
	// handshakes would delay packets.
	rekeysPerSecond = 250
)

// rekey starts handshakes with peers whose sessions are older than their preshared key. Otherwise
// these sessions would carry packets for two more minutes.
func (g *gateway) rekey(peers []peer, now time.Time) {
	try, left := make([][][32]byte, len(g.tunnels)), rekeysPerSecond
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
	for i, e := range g.tunnels {
		if keys := try[i]; len(keys) > 0 {
			g.wg.Go(func() { e.reach(keys, nil, g.done) })
		}
	}
}

// reach starts a handshake with each peer whose public key is in starts, and stops the attempts to
// reach each peer whose public key is in stops. It spreads the calls over most of a second, so that
// packets do not wait for many handshakes at once.
func (e *tunnelEnd) reach(starts, stops [][32]byte, done <-chan struct{}) {
	pause := time.NewTicker(900 * time.Millisecond / time.Duration(len(starts)+len(stops)))
	defer pause.Stop()
	for i, key := range slices.Concat(starts, stops) {
		if i < len(starts) {
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
