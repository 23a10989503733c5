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
// never. Anybody who can forge the peer's address can cause the first three. So Signs explain, and
// nothing is decided by them.
type Signs struct {
	// OtherKey is when a handshake from the peer's address was last made for another public key
	// than ours (its mac1 is wrong, section 5.4.4 of the WireGuard paper).
	OtherKey time.Time
	// Refused is when a handshake from that address was last made for our key and got no answer:
	// its public key is no peer's, or its timestamp is not newer than that of an earlier one.
	Refused time.Time
	// Earlier is when a data message last came from that address under a session that we do not
	// have: one from before this tunnel knew the peer, or from before its key changed.
	Earlier time.Time
	// RelayedOtherKey and RelayedRefused are the same for handshakes through the relays of our
	// Services. All peers share them, because any sender may use a relay.
	RelayedOtherKey, RelayedRefused time.Time
	// Answered is when we last answered a handshake of the peer.
	Answered time.Time
	// Unsent is why the kernel last refused a message for the peer, and UnsentAt when.
	Unsent   error
	UnsentAt time.Time
}

// refusedAfter is how long a handshake may wait for our answer until it counts as refused. The
// device has several workers, and the machine may be busy.
const refusedAfter = 2 * time.Second

// searchPause is the least time between two searches for the peer at an address. A search takes
// some ten microseconds with a thousand peers.
const searchPause = 10 * time.Millisecond

// A place is the configured address of one or several peers, with the unexplained messages from
// there. Peers behind one address share it. All messages through a Service share another one.
type place struct {
	mu       sync.Mutex
	otherKey time.Time
	index    uint32    // of the last handshake for our key
	came     time.Time // time of that handshake; zero: it was answered
	refused  time.Time // when a handshake was last refused
	earlier  time.Time // when data last came under a session that we do not have
}

// signs is a copy of the signs of a place.
func (p *place) signs(now time.Time) (s Signs) {
	if p == nil {
		return s
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settle(now)
	return Signs{OtherKey: p.otherKey, Refused: p.refused, Earlier: p.earlier}
}

// settle records an old unanswered handshake as refused. The caller holds mu.
func (p *place) settle(now time.Time) {
	if !p.came.IsZero() && now.Sub(p.came) > refusedAfter {
		p.refused = p.came
	}
}

// placeAt returns the place of a source address; nil: no signs are recorded for it.
func (t *Tunnel) placeAt(addr netip.Addr) *place {
	if p := t.peers.Load().byAddr[addr.Unmap()]; p != nil {
		return p
	}
	if relays := t.relays.Load(); relays != nil && (*relays)(addr) {
		return &t.relayed
	}
	return nil
}

// came notes a handshake message from a place, before the device sees it. ours says that it was
// made for our key. For an address without peers it costs one lookup.
func (t *Tunnel) came(m []byte, from conn.Endpoint, ours bool) {
	if m[0] != device.MessageInitiationType {
		return
	}
	p := t.placeAt(from.DstIP())
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
	p.index, p.came = binary.LittleEndian.Uint32(m[4:]), now
}

// strange notes data of an unknown session. If it comes from the address of a peer, that peer may
// have dropped our session and use one with another gateway of ours. Anybody can forge such data:
// see SetDoubts.
func (t *Tunnel) strange(from conn.Endpoint, now time.Time) {
	addr := from.DstIP().Unmap()
	table := t.peers.Load()
	if p := table.byAddr[addr]; p != nil {
		p.mu.Lock()
		p.earlier = now
		p.mu.Unlock()
	} else if t.heard.at(addr) == 0 {
		return
	}
	at := t.at(now)
	if last := t.searched.Load(); at-last < int64(searchPause) && last != 0 || !t.searched.CompareAndSwap(last, at) {
		return
	}
	for dev, p := range table.byDevice {
		if samePlace(endpointOf(dev), from) {
			p.doubt(now)
			return
		}
	}
}

// doubt begins a handshake with a peer that has no session, and otherwise has the session tested.
func (p *peer) doubt(now time.Time) {
	at := p.t.at(now)
	if p.sending(now) == nil {
		p.ask(at)
		return
	}
	f := p.t.doubts.Load()
	if last := p.doubted.Load(); f == nil || last != 0 && at-last < int64(device.RekeyTimeout) {
		return
	}
	p.doubted.Store(at)
	(*f)(p.key)
}

// answered notes that the device answers a handshake of a place: by a response or, under load, by a
// cookie.
func (t *Tunnel) answered(index uint32, to conn.Endpoint) {
	p := t.placeAt(to.DstIP())
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.index != index {
		return
	}
	p.came = time.Time{}
	if p != &t.relayed { // an answer to one peer behind a relay explains nothing about another
		p.refused, p.otherKey = time.Time{}, time.Time{}
	}
}

// placesOf returns the places of the configured addresses. An address that stays keeps its signs.
func placesOf(at map[*peer]netip.Addr, old map[netip.Addr]*place) map[netip.Addr]*place {
	all := make(map[netip.Addr]*place, len(at))
	for _, addr := range at {
		if !addr.IsValid() || all[addr] != nil {
			continue
		}
		if all[addr] = old[addr]; all[addr] == nil {
			all[addr] = new(place)
		}
	}
	return all
}

// unsent is a send error of the kernel, and its time.
type unsent struct {
	err error
	at  time.Time
}

// fail notes why messages for a peer were not sent. It keeps the first error for a second, so that
// a flood of failing messages costs no more.
func (p *peer) fail(err error, now time.Time) {
	if was := p.unsent.Load(); was == nil || now.Sub(was.at) > time.Second {
		p.unsent.Store(&unsent{err, now})
	}
}

// signs returns the signs of a peer. A session explains everything before it.
func (p *peer) signs(table *peerTable, now time.Time) Signs {
	s := table.byAddr[table.at[p]].signs(now)
	relayed := p.t.relayed.signs(now)
	s.RelayedOtherKey, s.RelayedRefused = relayed.OtherKey, relayed.Refused
	session := table.latest(p, now).session(now)
	if !session.Before(s.Refused) && !session.Before(s.OtherKey) {
		s.Refused, s.OtherKey = time.Time{}, time.Time{}
	}
	if !session.Before(s.Earlier) {
		s.Earlier = time.Time{}
	}
	if !session.Before(s.RelayedRefused) && !session.Before(s.RelayedOtherKey) {
		s.RelayedRefused, s.RelayedOtherKey = time.Time{}, time.Time{}
	}
	s.Answered = p.t.when(p.answered.Load(), now)
	if u := p.unsent.Load(); u != nil {
		s.Unsent, s.UnsentAt = u.err, u.at
	}
	return s
}

// Signs returns the events that may explain why a peer has no session.
func (t *Tunnel) Signs(state *natengine.PeerState) Signs {
	table := t.peers.Load()
	p := table.byState[state]
	if p == nil {
		return Signs{}
	}
	return p.signs(table, time.Now())
}
