package datapath

import (
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// Stats describes the tunnel to one peer.
type Stats struct {
	Endpoint  netip.AddrPort // source of the peer's last packet, or else as configured; zero: unknown
	Handshake time.Time      // when the current session was made, with a monotonic clock reading; zero: never
	Received  uint64         // octets of WireGuard messages from the peer; Sent: to the peer
	Sent      uint64
	// Preshared is true if the current session was made with the peer's PresharedKeys.Key.
	// PresharedID is the ID of that key.
	Preshared   bool
	PresharedID string
	// Own is our public key in the current session, or zero without a session.
	Own [32]byte
}

// Stats returns the Stats of all peers, by public key.
func (t *Tunnel) Stats() map[[32]byte]Stats {
	table, now := t.peers.Load(), time.Now()
	all := make(map[[32]byte]Stats, len(table.byState))
	for _, p := range table.byState {
		via := table.latestPeer(p, now)
		s := Stats{Handshake: via.session(now), Received: p.octetsReceived(), Sent: p.octetsSent()}
		for _, q := range table.siblings[p.state] {
			s.Received += q.octetsReceived()
			s.Sent += q.octetsSent()
		}
		if !s.Handshake.IsZero() {
			s.Own = via.identity.key()
		}
		s.PresharedID, s.Preshared = via.preshared.protects(peerKeypairs.ptr(via.dev).Current())
		if e := endpointOf(via.dev); e != nil {
			if at, ok := e.(interface{ AddrPort() netip.AddrPort }); ok {
				s.Endpoint = at.AddrPort()
			}
		}
		all[p.key] = s
	}
	return all
}

// traffic sums the packets of one batch, so that a batch updates the counters of each peer only
// once. Other goroutines read these counters.
type traffic struct {
	direction      natengine.Direction
	peer           *natengine.PeerState
	packets, bytes int
}

// add adds packets, and octets of IP packets in the tunnel.
func (t *traffic) add(peer *natengine.PeerState, packets, bytes int) {
	if peer != t.peer {
		t.flush()
		t.peer = peer
	}
	t.packets += packets
	t.bytes += bytes
}

func (t *traffic) flush() {
	if t.peer != nil {
		t.peer.CountTraffic(t.direction, t.packets, t.bytes)
	}
	t.peer, t.packets, t.bytes = nil, 0, 0
}
