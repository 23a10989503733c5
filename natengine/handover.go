package natengine

import (
	"encoding/binary"
	"slices"
	"time"
)

// A Flow is a copy of a flow. Another engine of the same version can adopt it (Engine.Adopt). A
// Flow is comparable.
type Flow struct {
	local, mapped, remote addr
	word                  uint64 // like entry.word, but the only state bits are those of stateOfFlow
}

// FlowSize is the number of octets that Flow.Append appends.
const FlowSize = 56

// stateOfFlow are the state bits that a Flow keeps.
const stateOfFlow = stateEndpoint | stateTCP

// Identity returns f without its state bits, and the state bits. Two Flows with the same identity
// are copies of one flow at different times.
func (f Flow) Identity() (id Flow, state uint8) {
	id, state = f, uint8(f.word&stateTCP)
	id.word &^= stateTCP
	return id, state
}

// In returns the flow that has identity f and the given state.
func (f Flow) In(state uint8) Flow {
	f.word |= uint64(state) & stateTCP
	return f
}

// Established reports whether packets were seen in both directions and the flow has not closed
// since.
func (f Flow) Established() bool { return !halfOpen(f.word) }

// Append appends the encoded flow to b.
func (f Flow) Append(b []byte) []byte {
	for _, word := range [...]uint64{f.local.hi, f.local.lo, f.mapped.hi, f.mapped.lo, f.remote.hi, f.remote.lo, f.word} {
		b = binary.BigEndian.AppendUint64(b, word)
	}
	return b
}

// FlowFrom decodes a flow that Append encoded. b must have at least FlowSize octets.
func FlowFrom(b []byte) Flow {
	word := func(i int) uint64 { return binary.BigEndian.Uint64(b[8*i:]) }
	return Flow{addr{word(0), word(1)}, addr{word(2), word(3)}, addr{word(4), word(5)}, word(6)}
}

// valid reports whether the fields of f are consistent, so that an engine could have such a flow.
func (f Flow) valid() bool {
	family := f.local.family()
	if f.mapped.family() != family || f.remote.family() != family || f.word&0xff&^stateOfFlow != 0 {
		return false
	}
	local, mapped, remote := uint16(f.word>>nearShift[Outbound]), uint16(f.word>>nearShift[Inbound]), uint16(f.word>>remoteShift)
	switch class := classOf(protoOf(f.word), f.local.is4()); {
	case class == noPorts:
		return local == 0 && mapped == 0 && remote == 0
	case kindOf(f.word) == endpointFlow:
		return local == mapped
	default:
		return mapped != 0 || class == icmpIDs
	}
}

// export returns the Flow of a live entry. The caller holds mu.
func (e *entry) export() Flow {
	out, in := e.keyAt(Outbound), e.keyAt(Inbound)
	return Flow{out.near, in.near, out.remote, e.word.Load() &^ (stateLive | stateQueued)}
}

// A follower receives changes of flows; see Engine.Follow.
type follower struct {
	f func(peer string, flow Flow, ended bool)
}

// Follow makes the engine call f for every flow that opens or ends from now on. If a flow becomes
// established or its connection closes, the engine calls f at the next Sweep. The calls for one
// flow are in order. f is called on the packet path with locks held, so it must neither block nor
// call the engine. stop ends the calls, but does not wait for a call in progress.
func (e *Engine) Follow(f func(peer string, flow Flow, ended bool)) (stop func()) {
	own := &follower{f}
	e.changeFollowers(func(all []*follower) []*follower { return append(all, own) })
	return func() {
		e.changeFollowers(func(all []*follower) []*follower {
			return slices.DeleteFunc(all, func(other *follower) bool { return other == own })
		})
	}
}

func (e *Engine) changeFollowers(change func([]*follower) []*follower) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []*follower
	if p := e.events.followers.Load(); p != nil {
		all = slices.Clone(*p)
	}
	all = change(all)
	e.events.followers.Store(&all)
}

// follow reports flow i to the followers. The caller holds mu.
func (t *flowTable) follow(i uint32, ended bool) {
	followers := t.events.followers.Load()
	if followers == nil || len(*followers) == 0 {
		return
	}
	flow := t.entry(i).export()
	for _, f := range *followers {
		f.f(t.peer.id, flow, ended)
	}
}

// EachFlow calls f with every flow. f is called with locks held. For one flow, these calls and the
// calls of followers are in order. After at most 256 flows, EachFlow calls pause, without holding a
// lock. It ends when pause returns false.
func (e *Engine) EachFlow(f func(peer string, flow Flow), pause func() bool) {
	for _, p := range e.Peers() {
		t := &p.flows
		slab := t.slab.Load()
		if slab == nil {
			continue
		}
		for at, c := range *slab {
			t.mu.Lock()
			for i := range c.entries {
				en := &c.entries[i]
				if word := en.word.Load(); word&stateLive != 0 {
					t.requeue(uint32(at<<chunkBits|i), word) // otherwise followers would miss the flow's next change
					f(p.id, en.export())
				}
			}
			t.mu.Unlock()
			if !pause() {
				return
			}
		}
	}
}

// Adopt takes over a flow of another engine, with its state, as if its last packet had just
// arrived. If Adopt returns DropNone, the engine has the flow; opened is false if the engine had
// the flow before. Any other Drop is the reason why Adopt refused the flow: the rules do not permit
// it, another flow has one of its tuples or its port, or there is no room. Adopt changes and evicts
// no existing flow.
func (e *Engine) Adopt(peer string, f Flow, now time.Duration) (opened bool, drop Drop) {
	p := e.Peer(peer)
	if p == nil {
		return false, DropNoPeer
	}
	if !f.valid() {
		return false, DropNoFlow
	}
	t := &p.flows
	t.mu.Lock()
	defer t.mu.Unlock()
	kind := kindOf(f.word)
	if p.rule == nil || !p.rule.permits(kind, protoOf(f.word), f.local, f.mapped, f.remote) {
		return false, DropNoFlow
	}
	id, _ := f.Identity()
	for dir, near := range [directions]addr{Outbound: f.local, Inbound: f.mapped} {
		k := key{near, f.remote, f.word & matchMask[dir]}
		if other, taken := t.find(Direction(dir), &k); taken {
			if same, _ := other.export().Identity(); same == id {
				return false, DropNone
			}
			return false, DropFlowClash
		}
	}
	defer e.total.Add(-1)
	if e.reserve(p, false) != roomFree || t.live.Load() >= p.quota.Load() {
		return false, DropFlowTableFull
	}
	owner := f.local
	if kind == endpointFlow {
		owner = f.remote
	}
	hosts := &t.hosts[kind]
	h := hosts.hold(owner)
	if hosts.at(h).flows > hosts.quota {
		hosts.release(h, owner)
		return false, DropHostQuota
	}
	class := classOf(protoOf(f.word), f.local.is4())
	if kind == naptFlow && class != noPorts && !t.napt.holdAt(h, uint16(f.word>>nearShift[Outbound]), class, f.local.family(), uint16(f.word>>nearShift[Inbound])) {
		hosts.release(h, owner)
		return false, DropPortsExhausted
	}
	e.total.Add(1)
	t.insert(f.local, f.mapped, f.remote, f.word|stateLive, h, tickOf(now))
	return true, DropNone
}
