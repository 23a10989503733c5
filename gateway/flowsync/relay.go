package flowsync

import (
	"net/netip"
	"slices"
	"time"
)

// Bounds of the packets that an ending gateway relays.
const (
	relayMost = 4 << 20     // octets that wait for a connection, or for this gateway to become active
	relayFor  = time.Second // maximum time for which a packet waits
)

// A parcel is a relayed packet for a peer.
type parcel struct {
	tunnel int // number of the tunnel whose link delivered the packet
	p      []byte
	at     time.Time // when this gateway received the parcel; zero if this gateway is the one that relays it
}

// Relay sends a packet for a peer to all gateways that copy the flows of this one. The gateway that
// becomes active sends it on to the peer. p starts with the virtio header; Relay copies p and never
// blocks. It reports whether any gateway copies the flows. For each gateway to which the packet
// cannot be sent, Counts.Unsent increases.
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

// follow adds the queue of a connection to the queues to which Relay adds packets. end removes the
// queue and drops the packets that still wait in it.
func (k *Keeper) follow(q *queue) (end func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.followers[q] = true
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.followers, q)
		k.counts.Unsent += uint64(len(q.parcels)) // only Relay adds more, and Relay needs mu
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

// hurries reports whether a packet waits. If so, the queue is sent at once, without gathering
// more changes.
func (q *queue) hurries() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.parcels) > 0
}

// heldPackets holds relayed packets, oldest first, until this gateway is active and has adopted the
// flows.
type heldPackets struct {
	from   netip.Addr // the gateway that relayed the packets or, if there are none, the active gateway
	all    []parcel
	octets int
}

// expire drops the packets that are too old, and returns their number.
func (h *heldPackets) expire(now time.Time) (n int) {
	for n < len(h.all) && now.Sub(h.all[n].at) > relayFor {
		h.octets -= len(h.all[n].p)
		n++
	}
	if h.all = h.all[n:]; len(h.all) == 0 {
		// Release the array, which still refers to the packets.
		h.all = nil
	}
	return n
}

// receiveRelayed handles a packet that another gateway has relayed to this one.
func (k *Keeper) receiveRelayed(one parcel) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.adopted {
		k.counts.Relayed++
		k.running.Inject(one.tunnel, one.p)
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

// countLost counts a packet that did not arrive completely on this connection.
func (r *receiver) countLost() {
	if r.listOnly { // another connection receives the packet, too
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

// injectHeld passes the waiting packets to the running gateway. The caller holds mu.
func (k *Keeper) injectHeld() {
	k.counts.Unrelayed += uint64(k.held.expire(time.Now()))
	for _, one := range k.held.all {
		k.running.Inject(one.tunnel, one.p)
	}
	k.counts.Relayed += uint64(len(k.held.all))
	k.held = heldPackets{}
}
