package datapath

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
)

// Signs are observations of a tunnel that may explain why a peer has no session. A zero time means
// never. Anybody who can forge the peer's address can cause OtherKey, Refused and Earlier. So Signs
// are only for explanations, and no decision depends on them.
type Signs struct {
	// OtherKey is the time of the last handshake from the peer's address that was made for another
	// public key than ours: its mac1 is wrong (section 5.4.4 of the WireGuard paper).
	OtherKey time.Time
	// Refused is the time of the last handshake from the peer's address that was made for our key
	// but got no answer. Either its public key belongs to no peer, or its timestamp is not newer
	// than that of an earlier handshake.
	Refused time.Time
	// Earlier is the time of the last data message from the peer's address under a session that we
	// do not have. Such a session was made before the peer was added to this tunnel, or before the
	// peer's key changed.
	Earlier time.Time
	// RelayedOtherKey and RelayedRefused are OtherKey and Refused for handshakes that come from
	// relays (see SetRelays). They are the same for all peers, because messages of any sender can
	// come from a relay.
	RelayedOtherKey, RelayedRefused time.Time
	// Answered is the time when we last answered a handshake of the peer.
	Answered time.Time
	// Unsent is the kernel's last error when a message for the peer was sent. UnsentAt is its time.
	Unsent   error
	UnsentAt time.Time
}

// If we have not answered a handshake after refusedAfter, it counts as refused. It is long because
// the device has several workers, and the machine may be busy.
const refusedAfter = 2 * time.Second

// searchPause is the minimum time between two searches for the peer at an address. With a
// thousand peers a search takes some ten microseconds.
const searchPause = 10 * time.Millisecond

// addrSigns records when unexplained messages came from one configured address. Peers with the same
// address share an addrSigns. Messages from all relays share one more (Tunnel.relayed).
type addrSigns struct {
	mu       sync.Mutex
	otherKey time.Time
	index    uint32    // sender index of the last handshake for our key
	arrived  time.Time // when that handshake arrived; zero: it was answered
	refused  time.Time // when a handshake was last refused
	earlier  time.Time // when data of a session that we do not have last arrived
}

// signs returns when unexplained messages of each kind last came from the address. The result for a
// nil p is empty.
func (p *addrSigns) signs(now time.Time) (s Signs) {
	if p == nil {
		return s
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settle(now)
	return Signs{OtherKey: p.otherKey, Refused: p.refused, Earlier: p.earlier}
}

// If the last handshake has waited too long for an answer, settle records that it was refused. The
// caller holds mu.
func (p *addrSigns) settle(now time.Time) {
	if !p.arrived.IsZero() && now.Sub(p.arrived) > refusedAfter {
		p.refused = p.arrived
	}
}

// signsAt returns the addrSigns for a source address. It returns nil if no peer is configured at
// that address and it is not a relay's.
func (t *Tunnel) signsAt(addr netip.Addr) *addrSigns {
	if p := t.peers.Load().byAddr[addr.Unmap()]; p != nil {
		return p
	}
	if relays := t.relays.Load(); relays != nil && (*relays)(addr) {
		return &t.relayed
	}
	return nil
}

// recordHandshake records a handshake message before the device processes it. ours is true if the
// message was made for our key. If no peer is at its source address, recordHandshake costs one
// lookup.
func (t *Tunnel) recordHandshake(m []byte, from conn.Endpoint, ours bool) {
	if m[0] != device.MessageInitiationType {
		return
	}
	p := t.signsAt(from.DstIP())
	if p == nil {
		return
	}
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !ours {
		p.otherKey = now
		return
	}
	p.settle(now)
	p.index, p.arrived = binary.LittleEndian.Uint32(m[4:]), now
}

// unknownSession handles data of an unknown session. If the data comes from a peer's address, the
// peer may have dropped our session and use one with another gateway of ours. Anybody can forge
// such data (see OnUnknownSession).
func (t *Tunnel) unknownSession(from conn.Endpoint, now time.Time) {
	addr := from.DstIP().Unmap()
	table := t.peers.Load()
	if p := table.byAddr[addr]; p != nil {
		p.mu.Lock()
		p.earlier = now
		p.mu.Unlock()
	} else if t.locations.atAddr(addr) == 0 {
		return
	}
	at := t.stamp(now)
	if last := t.searched.Load(); at-last < int64(searchPause) && last != 0 || !t.searched.CompareAndSwap(last, at) {
		return
	}
	for dev, p := range table.byDevice {
		if sameEndpoint(endpointOf(dev), from) {
			p.checkSession(now)
			return
		}
	}
}

// checkSession starts a handshake if there is no session with the peer. Otherwise it requests a
// test of the session, at most once in RekeyTimeout.
func (p *peer) checkSession(now time.Time) {
	at := p.t.stamp(now)
	if p.sendingKeypair(now) == nil {
		p.requestHandshake(at)
		return
	}
	f := p.t.onUnknownSession.Load()
	if last := p.checkRequested.Load(); f == nil || last != 0 && at-last < int64(device.RekeyTimeout) {
		return
	}
	p.checkRequested.Store(at)
	(*f)(p.key)
}

// recordAnswer records that the device answers the handshake with this index. The answer is a
// response or, under load, a cookie.
func (t *Tunnel) recordAnswer(index uint32, to conn.Endpoint) {
	p := t.signsAt(to.DstIP())
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.index != index {
		return
	}
	p.arrived = time.Time{}
	// If the message came from a relay, an answer to one peer explains nothing about another peer.
	if p != &t.relayed {
		p.refused, p.otherKey = time.Time{}, time.Time{}
	}
}

// signsByAddr returns an addrSigns for each configured address in addrs. It reuses those in old.
func signsByAddr(addrs map[*peer]netip.Addr, old map[netip.Addr]*addrSigns) map[netip.Addr]*addrSigns {
	all := make(map[netip.Addr]*addrSigns, len(addrs))
	for _, addr := range addrs {
		if !addr.IsValid() || all[addr] != nil {
			continue
		}
		if all[addr] = old[addr]; all[addr] == nil {
			all[addr] = new(addrSigns)
		}
	}
	return all
}

// sendFailure is the error that the kernel returned when a message was sent, and its time.
type sendFailure struct {
	err error
	at  time.Time
}

// recordFailure records the error of sending messages to a peer. It replaces an error only after a
// second, so that a flood of failing messages costs little.
func (p *peer) recordFailure(err error, now time.Time) {
	if was := p.unsent.Load(); was == nil || now.Sub(was.at) > time.Second {
		p.unsent.Store(&sendFailure{err, now})
	}
}

// signs returns the signs of a peer. It omits signs that a later session has made obsolete.
func (p *peer) signs(table *peerTable, now time.Time) Signs {
	s := table.byAddr[table.addrs[p]].signs(now)
	relayed := p.t.relayed.signs(now)
	s.RelayedOtherKey, s.RelayedRefused = relayed.OtherKey, relayed.Refused
	session := table.latestPeer(p, now).session(now)
	if !session.Before(s.Refused) && !session.Before(s.OtherKey) {
		s.Refused, s.OtherKey = time.Time{}, time.Time{}
	}
	if !session.Before(s.Earlier) {
		s.Earlier = time.Time{}
	}
	if !session.Before(s.RelayedRefused) && !session.Before(s.RelayedOtherKey) {
		s.RelayedRefused, s.RelayedOtherKey = time.Time{}, time.Time{}
	}
	s.Answered = p.t.timeOf(p.answered.Load(), now)
	if u := p.unsent.Load(); u != nil {
		s.Unsent, s.UnsentAt = u.err, u.at
	}
	return s
}

// Signs returns the observations that may explain why a peer has no session.
func (t *Tunnel) Signs(state *natengine.PeerState) Signs {
	table := t.peers.Load()
	p := table.byState[state]
	if p == nil {
		return Signs{}
	}
	return p.signs(table, time.Now())
}
