// Package flowsync copies the NAT flows of the active gateway to the standby gateways, so that
// connections survive when another gateway becomes active.
//
//	active ── TLS over TCP ──► standby      all flows, then each change
//	standby ─────────────────► a gateway that has just started and has no flows: its copy
//	active, as it ends ──────► standby      packets that nodes still send to it
//
// All gateways of an installation share the WireGuard private key. Both ends of a connection prove
// that they have a key derived from the private key. When the private key is replaced, gateways
// reconnect with the next key and keep their copies.
package flowsync

import (
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// Bounds of a copy of the flows.
const (
	// MaxFlows is the maximum number of flows in a copy. Further flows are left out and counted.
	MaxFlows = 1 << 20
	// keepFor is the time for which a copy stays valid without updates. Most flows expire after the
	// same time without a packet.
	keepFor = 5 * time.Minute
	// A new active gateway waits until it has adopted its copy, but at most for adoptMost, because
	// adopting a million flows takes seconds.
	adoptMost = 250 * time.Millisecond
	// A standby is unready until it has the flows of the active gateway, but at most for listMost
	// after its start. Otherwise an active gateway that cannot send its flows would block an update
	// of the Deployment.
	listMost = 10 * time.Second
)

// Flows is the interface to the flows of a running gateway. A natengine.Engine implements most of
// it.
type Flows interface {
	EachFlow(f func(peer string, flow natengine.Flow), between func() bool)
	Follow(f func(peer string, flow natengine.Flow, ended bool)) (stop func())
	Adopt(peer string, flow natengine.Flow) (opened bool, drop natengine.Drop)
	// Inject sends a packet to its peer, as if the link of a tunnel had delivered the packet. p
	// starts with the virtio header, and is not kept.
	Inject(tunnel int, p []byte)
}

// A table holds the flows of each peer. It maps the identity of a flow to its state.
type table struct {
	flows map[string]map[natengine.Flow]uint8
	n     int
}

func (t *table) put(peer string, f natengine.Flow) (ok bool) {
	id, state := f.Identity()
	flows := t.flows[peer]
	if _, known := flows[id]; !known {
		if t.n >= MaxFlows {
			return false
		}
		if flows == nil {
			if t.flows == nil {
				t.flows = make(map[string]map[natengine.Flow]uint8)
			}
			flows = make(map[natengine.Flow]uint8)
			t.flows[peer] = flows
		}
		t.n++
	}
	flows[id] = state
	return true
}

func (t *table) remove(peer string, f natengine.Flow) {
	id, _ := f.Identity()
	flows := t.flows[peer]
	if _, known := flows[id]; !known {
		return
	}
	delete(flows, id)
	t.n--
	if len(flows) == 0 {
		delete(t.flows, peer)
	}
}

// A Keeper holds the flows of one gateway. While the gateway is a standby, they are a copy of the
// active gateway's flows. While it is active, they are its own. Methods may be called concurrently.
type Keeper struct {
	mu      sync.Mutex
	running Flows // flows of this gateway while it is active; nil while it is a standby
	changes int   // number of calls of Activate and Deactivate
	copy    table
	fresh   *table    // table of the connection whose list of all flows is not complete yet; nil: none
	began   time.Time // when the Keeper was made
	listed  bool      // a complete copy has been received from the active gateway
	heard   time.Time // when copy was last up to date; at first, when the Keeper was made
	counts  Counts

	followers map[*queue]bool // queues of the connections on which each change is sent
	adopted   bool            // the copied flows are adopted, or adoptMost has passed
	held      heldPackets
}

// NewKeeper returns the Keeper of a standby, without flows.
func NewKeeper() *Keeper {
	now := time.Now()
	return &Keeper{began: now, heard: now, followers: make(map[*queue]bool)}
}

// Ready returns an error until this gateway has received the flows of the active one, but at most
// for listMost after its start. Because of the error, an update of the Deployment does not end the
// active gateway before a standby has its flows.
func (k *Keeper) Ready() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.running != nil || k.listed || time.Since(k.began) >= listMost {
		return nil
	}
	return errors.New("this standby has not received the NAT flows of the active gateway yet")
}

// hasList reports whether this gateway has received all flows of an active one.
func (k *Keeper) hasList() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.listed
}

// Counts are the numbers of received flows and relayed packets.
type Counts struct {
	Adopted uint64                    // flows adopted when this gateway became active, or later
	Refused map[natengine.Drop]uint64 // flows that could not be adopted, by reason
	Omitted uint64                    // flows left out of the copy because of MaxFlows

	Relayed   uint64 // packets relayed by the previous gateway that this one passed to its tunnels
	Unrelayed uint64 // packets relayed by the previous gateway that this one dropped: too many, too old, or incomplete
	Unsent    uint64 // packets that this gateway should have relayed but dropped, because a connection had no room or ended
}

// Activate makes this gateway the active one. flows are the flows of its engine. Activate adds the
// copied flows to the engine, established ones first. Flows that arrive later on open connections
// are added as well. Activate returns the number of adopted flows when all copied ones are adopted,
// or after adoptMost. In the second case, adoption continues in the background.
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
	go func() { // ends after the last flow, or after Deactivate
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
		k.injectHeld()
	}
	return int(k.counts.Adopted - before)
}

// adoptAll adopts the established flows of a table if established is true, and otherwise the other
// flows. It returns false if the gateway was deactivated meanwhile.
func (k *Keeper) adoptAll(t table, established bool, changes int) bool {
	for peer, flows := range t.flows {
		for id, state := range flows {
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

// adopt adds a flow to those of the running gateway. The caller holds mu.
func (k *Keeper) adopt(peer string, f natengine.Flow) {
	switch opened, drop := k.running.Adopt(peer, f); {
	case opened:
		k.counts.Adopted++
	// A packet has already opened the flow, or the flow arrived twice.
	case drop == natengine.DropNone:
	default:
		if k.counts.Refused == nil {
			k.counts.Refused = make(map[natengine.Drop]uint64)
		}
		k.counts.Refused[drop]++
	}
}

// expire deletes a copy that is too old. The caller holds mu.
func (k *Keeper) expire(now time.Time) {
	if now.Sub(k.heard) > keepFor {
		k.copy = table{}
	}
}

// A State is a snapshot of a Keeper, for status and metrics.
type State struct {
	Active bool
	Copied int           // number of flows in the copy
	Age    time.Duration // time since the copy was last up to date, or since the start; 0 while active
	Counts Counts
}

// State returns the current State.
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

// A receiver handles the flows and packets that arrive on one connection.
type receiver struct {
	k       *Keeper
	from    netip.Addr // address of the other end
	changes int        // Keeper.changes when the list began
	active  bool       // the other end is the active gateway
	table   table
	age     time.Duration
	begun   bool   // the first list has begun
	all     bool   // the list of all flows is complete
	parcel  []byte // the packet being received, which may consist of several frames
	// listOnly is set if the connection is needed only for its list of all flows. If the other end
	// is the active gateway, another connection receives its packets.
	listOnly bool
}

// begin handles the first frame of a list of all flows. age is the age of the other end's copy.
func (r *receiver) begin(active bool, age time.Duration) {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	r.changes, r.active, r.age, r.all, r.table = r.k.changes, active, age, false, table{}
	if r.k.running == nil && active {
		r.k.fresh = &r.table
		// Another gateway has become active, so the packets held for the previous one are obsolete.
		if !r.listOnly && r.from != r.k.held.from {
			r.k.held = heldPackets{from: r.from}
		}
	}
	r.begun = true
}

// flow handles a flow of a list, a changed flow, or an ended flow.
func (r *receiver) flow(peer string, f natengine.Flow, ended bool) {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	switch {
	case r.k.running != nil:
		if !ended { // no need to end the flow here: it expires in the engine
			r.k.adopt(peer, f)
		}
	case ended:
		r.target().remove(peer, f)
	case !r.target().put(peer, f):
		r.k.counts.Omitted++
	}
}

// target returns the table that receives the flows of the connection. Until the list is complete,
// that is the table of the receiver; afterwards it is the copy. The caller holds mu.
func (r *receiver) target() *table {
	if r.all {
		return &r.k.copy
	}
	return &r.table
}

// end handles the last frame of a list. A list from the active gateway replaces the copy. A list
// from a standby is used only if this Keeper has no copy.
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

// beat records that everything that the other end had to send has arrived.
func (r *receiver) beat() {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	if r.all && r.active && r.k.running == nil {
		r.k.heard = time.Now()
	}
}

// missedFlows reports whether this gateway became active and then a standby again since the list
// began. The copy lacks the flows that were received while the gateway was active, so the receiver
// needs a new list.
func (r *receiver) missedFlows() bool {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	return r.k.running == nil && r.k.changes != r.changes
}

// close handles the end of the connection.
func (r *receiver) close() {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	if r.k.fresh == &r.table {
		r.k.fresh = nil
	}
}
