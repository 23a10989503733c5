package flowsync

import (
	"net/netip"
	"slices"
	"time"
)

// Bounds of the packets that an ending gateway relays.
const (
	relayMost = 4 << 20     // octets that wait for one connection, or until this gateway is active
	relayFor  = time.Second // longest wait of a packet for that
)

// A parcel is a packet for a peer, virtio header first.
type parcel struct {
	tunnel int // tunnel whose link delivered the packet
	p      []byte
	at     time.Time // when this gateway received the packet; zero at the gateway that relays
}

// Relay sends a packet for a peer, virtio header first, to the gateways that copy the flows of this
// one. The one that becomes active sends it to the peer. Relay copies p, does not block, and reports
// whether there is such a gateway. It counts each that does not get the packet.
func (k *Keeper) Relay(tunnel int, p []byte) bool {
	one := parcel{tunnel: tunnel, p: slices.Clone(p)}
	k.mu.Lock()
	defer k.mu.Unlock()
	for q := range k.followers {
		if !q.addParcel(one) {
			k.counts.Unsent++
		}
	}
	return len(k.followers) > 0
}

// follow gives a connection the packets of Relay, until the caller calls the result. Those that
// still wait then are dropped.
func (k *Keeper) follow(q *queue) (end func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.followers[q] = true
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.followers, q)
		k.counts.Unsent += uint64(len(q.parcels)) // only Relay adds some
	}
}

func (q *queue) addParcel(one parcel) bool {
	q.mu.Lock()
	full := q.octets+len(one.p) > relayMost
	if !full {
		q.parcels = append(q.parcels, one)
		q.octets += len(one.p)
	}
	q.mu.Unlock()
	q.wakeUp()
	return !full
}

// hurries reports whether a packet waits, which must not be delayed to gather more.
func (q *queue) hurries() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.parcels) > 0
}

// held are relayed packets, oldest first. They wait until this gateway is active and has adopted
// the flows.
type held struct {
	from   netip.Addr // the gateway that relayed them, or that this one follows and that may relay some
	all    []parcel
	octets int
}

// expire drops packets that are too old and returns their number.
func (h *held) expire(now time.Time) (n int) {
	for n < len(h.all) && now.Sub(h.all[n].at) > relayFor {
		h.octets -= len(h.all[n].p)
		n++
	}
	if h.all = h.all[n:]; len(h.all) == 0 {
		h.all = nil // its array would keep the packets
	}
	return n
}

// brought handles a packet that another gateway has relayed.
func (k *Keeper) brought(one parcel) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.adopted {
		k.counts.Relayed++
		k.running.Bring(one.tunnel, one.p)
		return
	}
	k.counts.Unrelayed += uint64(k.held.expire(one.at))
	if k.held.octets+len(one.p) > relayMost {
		k.counts.Unrelayed++
		return
	}
	k.held.all = append(k.held.all, one)
	k.held.octets += len(one.p)
}

// lose counts a packet that this connection has not received whole.
func (r *receiver) lose() {
	if r.once { // it comes by another connection
		return
	}
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	r.k.counts.Unrelayed++
}

// expireHeld drops the packets that have waited too long for this gateway to become active.
func (k *Keeper) expireHeld(now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.counts.Unrelayed += uint64(k.held.expire(now))
}

// bringHeld gives the waiting packets to the running gateway. The caller holds mu.
func (k *Keeper) bringHeld() {
	k.counts.Unrelayed += uint64(k.held.expire(time.Now()))
	for _, one := range k.held.all {
		k.running.Bring(one.tunnel, one.p)
	}
	k.counts.Relayed += uint64(len(k.held.all))
	k.held = held{}
}
