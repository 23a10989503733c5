// Package flowsync copies the NAT flows of the active gateway to the others, so that connections
// survive when another one becomes active.
//
//	active ── TLS over TCP ──► standby      all flows, then each change
//	standby ─────────────────► a gateway that has just started and has no flows: its copy
//	active, as it ends ──────► standby      packets that nodes still send to it
//
// All gateways of an installation share the WireGuard private key. Both ends of a connection prove
// that they have a key derived from it. When the private key is replaced, connections end and are
// made again with the next key; copies stay.
package flowsync

import (
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// Bounds of a copy.
const (
	// MaxFlows bounds the flows of a copy. Further ones are left out and counted.
	MaxFlows = 1 << 20
	// keepFor is how long a copy stays valid without updates: as long as most flows live without a
	// packet.
	keepFor = 5 * time.Minute
	// adoptMost is how long a new active gateway waits until it has adopted its copy: a million
	// flows take seconds.
	adoptMost = 250 * time.Millisecond
	// listMost is how long a standby waits, from its start, for the flows of the active gateway before
	// it is ready. A gateway that cannot send them must not block an update.
	listMost = 10 * time.Second
)

// Flows are the flows of a running gateway. A natengine.Engine implements most of it.
type Flows interface {
	EachFlow(f func(peer string, flow natengine.Flow), between func() bool)
	Follow(f func(peer string, flow natengine.Flow, ended bool)) (stop func())
	Adopt(peer string, flow natengine.Flow) (opened bool, drop natengine.Drop)
	// Bring sends a packet, virtio header first, as if the link of a tunnel had delivered it. It does not keep p.
	Bring(tunnel int, p []byte)
}

// A table holds flows, by peer and identity.
type table struct {
	flows map[string]map[natengine.Flow]uint8
	n     int
}

func (t *table) put(peer string, f natengine.Flow) (ok bool) {
	id, state := f.Identity()
	of := t.flows[peer]
	if _, known := of[id]; !known {
		if t.n >= MaxFlows {
			return false
		}
		if of == nil {
			if t.flows == nil {
				t.flows = make(map[string]map[natengine.Flow]uint8)
			}
			of = make(map[natengine.Flow]uint8)
			t.flows[peer] = of
		}
		t.n++
	}
	of[id] = state
	return true
}

func (t *table) remove(peer string, f natengine.Flow) {
	id, _ := f.Identity()
	of := t.flows[peer]
	if _, known := of[id]; !known {
		return
	}
	delete(of, id)
	t.n--
	if len(of) == 0 {
		delete(t.flows, peer)
	}
}

// A Keeper holds the flows of one gateway. While the gateway is a standby, they are a copy of the
// active gateway's flows. While it is active, they are its own. Methods may be called concurrently.
type Keeper struct {
	mu      sync.Mutex
	running Flows // nil: this gateway is not the active one
	changes int   // how often running was set or cleared
	copy    table
	fresh   *table    // of a connection that is still sending its list of all flows; nil: none
	began   time.Time // when the Keeper was made
	listed  bool      // copy has been complete
	heard   time.Time // when copy was last complete; at first, when the Keeper was made
	counts  Counts

	followers map[*queue]bool // queues of the connections that send each change
	adopted   bool            // running has adopted the copied flows, or has stopped waiting
	held      held
}

// NewKeeper has no flows.
func NewKeeper() *Keeper {
	now := time.Now()
	return &Keeper{began: now, heard: now, followers: make(map[*queue]bool)}
}

// Ready returns an error while this gateway has not received the flows of the active one, for at
// most listMost from its start. An update ends the active gateway once a standby is ready.
func (k *Keeper) Ready() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.running != nil || k.listed || time.Since(k.began) >= listMost {
		return nil
	}
	return errors.New("this standby has not received the NAT flows of the active gateway yet")
}

// Listed reports whether this gateway has received all flows of an active one.
func (k *Keeper) Listed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.listed
}

// Counts counts received flows and relayed packets.
type Counts struct {
	Adopted uint64                    // when this gateway became active, or later
	Refused map[natengine.Drop]uint64 // not adopted, by reason
	Omitted uint64                    // not copied, because of MaxFlows

	Relayed   uint64 // packets of the previous gateway that this one gave to its tunnels
	Unrelayed uint64 // packets of the previous gateway that were dropped: too many, too old, or incomplete
	Unsent    uint64 // packets that this gateway relayed, and dropped: a connection had no room, or ended
}

// Activate makes this gateway the active one. flows becomes its own and adopts the copied flows,
// established ones first. Activate returns the number of adopted flows when all are adopted, or
// after adoptMost; the rest then follows in the background. Flows that open connections still
// deliver are adopted, too.
func (k *Keeper) Activate(flows Flows) (adopted int) {
	k.mu.Lock()
	before := k.counts.Adopted
	k.running = flows
	k.changes++
	changes := k.changes
	k.expire(time.Now())
	all := []table{k.copy}
	if k.fresh != nil {
		all = append(all, *k.fresh)
		*k.fresh = table{}
	}
	k.copy, k.fresh = table{}, nil
	k.mu.Unlock()
	done := make(chan struct{})
	go func() { // ends after the last flow, or with Deactivate
		defer close(done)
		for _, established := range []bool{true, false} {
			for _, t := range all {
				if !k.adoptAll(t, established, changes) {
					return
				}
			}
		}
	}()
	select {
	case <-done:
	case <-time.After(adoptMost):
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.changes == changes {
		k.adopted = true
		k.bringHeld()
	}
	return int(k.counts.Adopted - before)
}

// adoptAll adopts the flows of a table that are established, or those that are not. It returns
// false if the gateway was deactivated meanwhile.
func (k *Keeper) adoptAll(t table, established bool, changes int) bool {
	for peer, of := range t.flows {
		for id, state := range of {
			f := id.In(state)
			if f.Established() != established {
				continue
			}
			k.mu.Lock()
			over := k.changes != changes
			if !over {
				k.adopt(peer, f)
			}
			k.mu.Unlock()
			if over {
				return false
			}
		}
	}
	return true
}

// Deactivate makes this gateway a standby.
func (k *Keeper) Deactivate() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.running, k.adopted = nil, false
	k.changes++
	k.heard = time.Now()
}

// adopt lets the running gateway adopt a flow. The caller holds mu.
func (k *Keeper) adopt(peer string, f natengine.Flow) {
	switch opened, drop := k.running.Adopt(peer, f); {
	case opened:
		k.counts.Adopted++
	case drop == natengine.DropNone: // a packet has opened the flow already, or the flow came twice
	default:
		if k.counts.Refused == nil {
			k.counts.Refused = make(map[natengine.Drop]uint64)
		}
		k.counts.Refused[drop]++
	}
}

// expire drops a copy that is too old. The caller holds mu.
func (k *Keeper) expire(now time.Time) {
	if now.Sub(k.heard) > keepFor {
		k.copy = table{}
	}
}

// A State describes a Keeper, for status and metrics.
type State struct {
	Active bool
	Copied int           // flows in the copy
	Age    time.Duration // since the copy was last complete, or since the start; 0 while active
	Counts Counts
}

// State returns the present State.
func (k *Keeper) State() State {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := State{Active: k.running != nil, Copied: k.copy.n, Counts: k.counts}
	if !s.Active {
		s.Age = time.Since(k.heard)
	}
	s.Counts.Refused = make(map[natengine.Drop]uint64, len(k.counts.Refused))
	for drop, n := range k.counts.Refused {
		s.Counts.Refused[drop] = n
	}
	return s
}

// A receiver takes the flows of one connection.
type receiver struct {
	k       *Keeper
	from    netip.Addr // the other end
	changes int        // Keeper.changes when the list began
	active  bool       // the other end is the active gateway
	table   table
	age     time.Duration
	begun   bool   // the other end has begun to send
	all     bool   // the list of all flows is complete
	parcel  []byte // the packet at hand, which may have several frames
	// The list is all that is wanted. Packets come by another connection, if the other end is the
	// active gateway.
	once bool
}

// begin handles the first frame of a list of all flows.
func (r *receiver) begin(active bool, age time.Duration) {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	r.changes, r.active, r.age, r.all, r.table = r.k.changes, active, age, false, table{}
	if r.k.running == nil && active {
		r.k.fresh = &r.table
		if !r.once && r.from != r.k.held.from { // the other end is active instead, and has the packets, too
			r.k.held = held{from: r.from}
		}
	}
	r.begun = true
}

// flow handles a flow that exists, or has ended.
func (r *receiver) flow(peer string, f natengine.Flow, ended bool) {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	switch {
	case r.k.running != nil:
		if !ended { // an ended flow expires here by itself
			r.k.adopt(peer, f)
		}
	case ended:
		r.into().remove(peer, f)
	case !r.into().put(peer, f):
		r.k.counts.Omitted++
	}
}

// into returns the table for the connection's flows. The caller holds mu.
func (r *receiver) into() *table {
	if r.all {
		return &r.k.copy
	}
	return &r.table
}

// end handles the last frame of a list. The list replaces the copy, unless it is only a standby's
// copy and this Keeper has one.
func (r *receiver) end() {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	now := time.Now()
	r.k.expire(now)
	if r.k.running == nil && (r.active || r.k.copy.n == 0 && r.table.n > 0) {
		r.k.copy, r.k.heard = r.table, now.Add(-r.age)
		r.k.listed = r.k.listed || r.active
	}
	r.all = true
	if r.k.fresh == &r.table {
		r.k.fresh = nil
	}
	r.table = table{}
}

// beat notes that the other end has sent everything it has.
func (r *receiver) beat() {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	if r.all && r.active && r.k.running == nil {
		r.k.heard = time.Now()
	}
}

// over reports whether this gateway has been active meanwhile and is a standby again. Flows
// received in that time are in no copy, so it needs a new list.
func (r *receiver) over() bool {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	return r.k.running == nil && r.k.changes != r.changes
}

// close ends the connection.
func (r *receiver) close() {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	if r.k.fresh == &r.table {
		r.k.fresh = nil
	}
}
