package ipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

const (
	// UnusedGrace is the time after which a peer's networks are released if no object of a peering
	// names the peer.
	UnusedGrace = 24 * time.Hour
	// maxReplaced bounds the held networks in State.replaced, for all peers together.
	// maxReplacedPerPeer bounds those of one peer.
	maxReplaced, maxReplacedPerPeer = 512, 8
	// maxHeldPerPeer bounds the networks held for one peer besides its two present networks,
	// because one NetworkAllocation lists all of them.
	maxHeldPerPeer = 30
)

// A replaced is a held network: its peer got another network in its place.
type replaced struct {
	id       string
	network  netip.Prefix
	released time.Time
}

func (r replaced) compare(other replaced) int {
	return cmp.Or(r.released.Compare(other.released), cmp.Compare(r.id, other.id), r.network.Compare(other.network))
}

// Part releases the networks of a peer that leaves, and holds them: nodes refuse them and no other
// peer gets them. It forgets the peer's answer and unmaps its endpoints. Networks that Yield would
// return are not held. Part does nothing for a peer that has already left.
func (b State) Part(id string, now time.Time) State {
	p := b.peers[id]
	switch {
	case p == nil || !p.released.IsZero():
		return b
	case !p.Pod.IsValid():
		return b.Release(id)
	}
	b = b.unmapAll(p).withPeer(id, &account{Allocation: p.Allocation, released: stored(now)})
	if b.conflictsWithOwn(p.Pod) || b.conflictsWithOwn(p.External) {
		b, _ = b.Yield()
	}
	return b
}

// Yield ends the hold of each network that overlaps something of this cluster: one of our networks,
// a reserved one, a node or an API server. Nodes that kept refusing such a network would cut off
// our own hosts. Yield returns the networks whose hold ended. If there are none, the State is
// unchanged.
//
// Networks that nodes merely reach do not count: they are not our own, and may even belong to a
// former peer. If only one network of a former peer overlaps, the other network is treated as in
// EndHolds.
func (b State) Yield() (next State, ended []netip.Prefix) {
	return b.EndHolds(func(_ string, p netip.Prefix) bool { return b.conflictsWithOwn(p) })
}

// EndHolds ends the hold of each network for which match returns true, and returns those networks.
// If match selects only one of the two networks of a former peer, the other one stays held. If
// there is no room to hold it alone, both stay held.
func (b State) EndHolds(match func(id string, p netip.Prefix) bool) (next State, ended []netip.Prefix) {
	next = b
	next.replaced = nil
	for _, r := range b.replaced {
		if match(r.id, r.network) {
			ended = append(ended, r.network)
		} else {
			next.replaced = append(next.replaced, r)
		}
	}
	if len(ended) == 0 {
		next.replaced = b.replaced
	}
	for _, id := range b.Peers() {
		p := b.peers[id]
		if p.released.IsZero() {
			continue
		}
		pod, external := match(id, p.Pod), match(id, p.External)
		rest := Allocation{} // the network that stays held
		switch {
		case !pod && !external, pod != external && len(next.replaced) >= maxReplaced:
			continue
		case pod && external:
			ended = append(ended, p.Pod, p.External)
		case pod:
			ended, rest.External = append(ended, p.Pod), p.External
		default:
			ended, rest.Pod = append(ended, p.External), p.Pod
		}
		next = next.Release(id)
		next.holdReplaced(id, Allocation{}, rest, p.released)
	}
	return next, ended
}

// conflictsWithOwn reports whether p overlaps something of this cluster, as Yield defines it.
func (b *State) conflictsWithOwn(p netip.Prefix) bool {
	if b.overlapsOwn(p) || slices.ContainsFunc(b.own.Reserved, p.Overlaps) {
		return true
	}
	i, _ := slices.BinarySearchFunc(b.own.Nodes, p.Addr(), netip.Addr.Compare)
	return i < len(b.own.Nodes) && p.Contains(b.own.Nodes[i])
}

// stored rounds a time to the resolution of stored objects.
func stored(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

// holdReplaced holds the networks of the peer that are in previous but not in current. These holds
// begin at the time released. If that time is zero, the networks are not held. Holds of networks in
// current end.
func (b *State) holdReplaced(id string, current, previous Allocation, released time.Time) {
	again := func(p netip.Prefix) bool { return contains(current.Pod, p) || contains(current.External, p) }
	var kept []replaced
	for _, r := range b.replaced {
		if r.id != id || !again(r.network) {
			kept = append(kept, r)
		}
	}
	for _, p := range []netip.Prefix{previous.Pod, previous.External} {
		if p.IsValid() && !released.IsZero() && !again(p) {
			kept = append(kept, replaced{id, p, stored(released)})
		}
	}
	slices.SortFunc(kept, replaced.compare)
	if !slices.Equal(kept, b.replaced) {
		b.replaced = slices.Compact(kept)
	}
}

// Regain is for networks of a peer that nodes refuse but that the State lacks. It holds them, as if
// the peer had released them now. If the peer is unknown, it gets the first two networks again when
// it returns. The result unheld has the networks that cannot be held, because they are in use or
// there is no room.
func (b State) Regain(id string, networks []netip.Prefix, now time.Time) (next State, unheld []netip.Prefix) {
	next = b
	if b.peers[id] == nil && len(networks) > 1 {
		pod, external := networks[0], networks[1]
		if with, _, err := b.Allocate(Request{ID: id, Pod: pod, External: external, WantPod: pod, WantExternal: external}); err == nil {
			next, networks = with.Part(id, now), networks[2:]
		}
	}
	for _, p := range networks {
		if fabric.CheckClusterID(id) != "" || fabric.CheckNetwork(p) != "" || next.full(id) || next.conflictsWithOwn(p) || next.overlapsAnother(id, p) {
			unheld = append(unheld, p)
			continue
		}
		g := Allocation{}
		if had := next.peers[id]; had != nil {
			g = had.Allocation
		}
		next.holdReplaced(id, g, Allocation{Pod: p}, now)
	}
	return next, unheld
}

// full reports whether no further network can be held for the peer.
func (b *State) full(id string) bool {
	count := 0
	for _, r := range b.replaced {
		if r.id == id {
			count++
		}
	}
	return count >= maxHeldPerPeer || len(b.replaced) >= maxReplaced
}

// overlapsAnother reports whether p overlaps a present or held network of a peer other than id.
func (b *State) overlapsAnother(id string, p netip.Prefix) bool {
	for other, a := range b.peers {
		if other != id && (a.Pod.Overlaps(p) || a.External.Overlaps(p)) {
			return true
		}
	}
	return slices.ContainsFunc(b.replaced, func(r replaced) bool { return r.id != id && r.network.Overlaps(p) })
}

// tooManyHeld returns a refusal if a change makes the State hold more networks for the peer than
// before, and more than the bounds allow.
func (b *State) tooManyHeld(id string, before []replaced) *fabric.Refusal {
	others := func(r replaced) bool { return r.id != id }
	ofPeer := slices.DeleteFunc(slices.Clone(b.replaced), others)
	full := b.replaced // sorted by time: the first one becomes free first
	switch grown := len(b.replaced) > len(before); {
	case grown && len(ofPeer) > maxReplacedPerPeer:
		full = ofPeer
	case !grown || len(b.replaced) <= maxReplaced:
		return nil
	}
	return refuse(v1alpha1.ReasonExhausted, "", "too many networks were replaced within %v, and each stays held that long; keep the current networks, or change them after %s",
		fabric.ReleaseHold, until(full[0].released))
}

// NetworksOf returns the two networks of the peer, which are held if the peer has left, and its
// replaced networks that are still held. Nodes refuse packets to these networks that would not go
// through a tunnel.
func (b State) NetworksOf(id string) (all []netip.Prefix) {
	if p := b.peers[id]; p != nil && p.Pod.IsValid() {
		all = append(all, p.Pod, p.External)
	}
	for _, r := range b.replaced {
		if r.id == id && !slices.Contains(all, r.network) {
			all = append(all, r.network)
		}
	}
	return all
}

// ReleasedAt returns the time when the peer left. It returns zero if the peer has not left, or if
// its networks are no longer held.
func (b State) ReleasedAt(id string) time.Time {
	if p := b.peers[id]; p != nil {
		return p.released
	}
	return time.Time{}
}

// Age updates the State to the time now. It ends expired holds, and those that Yield would end. It
// releases each peer that no object has named for UnusedGrace, and returns the IDs of those peers.
// The function named reports whether some object names a peer.
//
// A recorded time in the future was written by a wrong clock, and counts as now.
func (b State) Age(now time.Time, named func(id string) bool) (next State, abandoned []string) {
	now = stored(now)
	next = b
	for _, id := range b.Peers() {
		p := *b.peers[id]
		switch {
		case p.released.After(now):
			p.released = now
		case !p.released.IsZero():
			if now.Sub(p.released) >= fabric.ReleaseHold {
				next = next.Release(id)
			}
			continue
		case named(id):
			p.unused = time.Time{}
		case p.unused.IsZero() || p.unused.After(now):
			p.unused = now
		case now.Sub(p.unused) >= UnusedGrace:
			next, abandoned = next.Part(id, now), append(abandoned, id)
			continue
		}
		if was := b.peers[id]; p.released != was.released || p.unused != was.unused {
			next = next.withPeer(id, &p)
		}
	}
	over := func(r replaced) bool { return now.Sub(r.released) >= fabric.ReleaseHold }
	if slices.ContainsFunc(b.replaced, over) {
		next.replaced = slices.DeleteFunc(slices.Clone(b.replaced), over)
	}
	for i, r := range next.replaced {
		if r.released.After(now) {
			next.replaced = slices.Clone(next.replaced)
			next.replaced[i].released = now
		}
	}
	next, _ = next.Yield()
	return next, abandoned
}

// heldObstacle describes a network that is held for a peer.
func heldObstacle(id string, network netip.Prefix, released time.Time) obstacle {
	return obstacle{name: "a network that is held until " + until(released) + ", because it was released by ",
		owner: "peer " + id, anonymous: "another peer", prefix: network}
}

func until(released time.Time) string { return released.Add(fabric.ReleaseHold).Format(time.RFC3339) }

// freeSoon returns a clause for a message. It names the held network that fits the claim and
// becomes free first. It returns "" if there is none.
func (b *State) freeSoon(claim netip.Prefix) string {
	var first replaced
	held, now := 0, b.replaced
	for id, p := range b.peers {
		if !p.released.IsZero() {
			now = append(now[:len(now):len(now)], replaced{id, p.Pod, p.released}, replaced{id, p.External, p.released})
		}
	}
	for _, r := range now {
		inPool := slices.ContainsFunc(b.own.Pools, func(pool netip.Prefix) bool { return contains(pool, r.network) })
		if !inPool || r.network.Addr().BitLen() != claim.Addr().BitLen() || r.network.Bits() > claim.Bits() {
			continue
		}
		if held++; held == 1 || cmp.Or(r.released.Compare(first.released), r.network.Compare(first.network)) < 0 {
			first = r
		}
	}
	if held == 0 {
		return ""
	}
	text := fmt.Sprintf("; %v was released and is free at %s", first.network, until(first.released))
	if held > 1 {
		text += fmt.Sprintf(", %d more later", held-1)
	}
	return text
}
