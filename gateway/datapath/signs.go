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
// never. Any sender that can forge the peer's address can cause the first three, so they serve to
// explain and never to decide.
type Signs struct {
	// OtherKey is when a handshake last came from the peer's address that was made for another
	// public key than ours (its mac1 is wrong, section 5.4.4 of the WireGuard paper).
	OtherKey time.Time
	// Refused is when a handshake last came from there that was made for our key and that we did
	// not answer: its public key is no peer's, or its timestamp is not newer than that of one
	// before.
	Refused time.Time
	// Earlier is when a data message last came from there under a session that there is none of here:
	// one from before this tunnel knew the peer, or from before its key changed.
	Earlier time.Time
	// RelayedOtherKey and RelayedRefused are the same for handshakes that our Services relayed. All
	// peers share them, because any sender may use a relay.
	RelayedOtherKey, RelayedRefused time.Time
	// Answered is when we last answered a handshake of the peer.
	Answered time.Time
	// Unsent is why the kernel last refused a message for the peer, and UnsentAt when.
	Unsent   error
	UnsentAt time.Time
}

// refusedAfter is how long a handshake may wait for our answer until it counts as refused: the
// device has several workers, and a busy machine.
const refusedAfter = 2 * time.Second

// searchPause is the least time between two searches for the peer at a place. One takes some ten microseconds with a thousand
// peers.
const searchPause = 10 * time.Millisecond

// A place is an address that peers are configured at, with what came from there that no session
// explains. Peers behind one address share it, and all that come by way of a Service.
type place struct {
	mu       sync.Mutex
	otherKey time.Time
	index    uint32    // of the last handshake for our key
	came     time.Time // when that was; zero: it was answered
	refused  time.Time // when one came that was not
	earlier  time.Time // when data came under a session that there is none of
}

// signs is a copy of what is known of a place.
func (p *place) signs(now time.Time) (s Signs) {
	if p == nil {
		return s
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settle(now)
	return Signs{OtherKey: p.otherKey, Refused: p.refused, Earlier: p.earlier}
}

// settle gives up on the answer to the last handshake. With mu.
func (p *place) settle(now time.Time) {
	if !p.came.IsZero() && now.Sub(p.came) > refusedAfter {
		p.refused = p.came
	}
}

// placeAt is where messages come from that have that source; nil: where nothing is noted.
func (t *Tunnel) placeAt(addr netip.Addr) *place {
	if p := t.peers.Load().byAddr[addr.Unmap()]; p != nil {
		return p
	}
	if relays := t.relays.Load(); relays != nil && (*relays)(addr) {
		return &t.relayed
	}
	return nil
}

// came notes a handshake message that came from a place, before the device sees it; ours says that it
// was made for our key. Where no peer is it costs no more than to find that out.
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

// strange notes data under a session that there is none of. Where it comes from where a peer is, that peer may have
// forgotten our session, and sends under one that another gateway of ours made. Anybody can forge that: see SetDoubts.
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

// doubt has a handshake begun where there is no session, and else asks whether the peer still has it.
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
	if p != &t.relayed { // there, an answer to one peer explains nothing of another
		p.refused, p.otherKey = time.Time{}, time.Time{}
	}
}

// placesOf are the places where peers are configured to be. One that stays keeps what is known of it.
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

// unsent is a message that the kernel refused.
type unsent struct {
	err error
	at  time.Time
}

// fail notes why messages for a peer were not sent. Only what the kernel says first is kept for a
// second: a flood that cannot be sent costs no more.
func (p *peer) fail(err error, now time.Time) {
	if was := p.unsent.Load(); was == nil || now.Sub(was.at) > time.Second {
		p.unsent.Store(&unsent{err, now})
	}
}

// signs is what is known of a peer. A session explains whatever came before it.
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

// Signs are events of one peer's tunnel that may explain why it has no session.
func (t *Tunnel) Signs(state *natengine.PeerState) Signs {
	table := t.peers.Load()
	p := table.byState[state]
	if p == nil {
		return Signs{}
	}
	return p.signs(table, time.Now())
}
