package natengine

import (
	"slices"

	"github.com/isthmus-net/isthmus/packet"
)

// opening is the state of opening one flow.
type opening struct {
	*translation
	kind          flowKind
	class         portClass
	k             *key // key of the packet that begins the flow
	other         addr // address that replaces our end
	local, mapped addr // our two addresses of the flow
	owner         addr // the host whose quota counts the flow
	room          room
}

// open adds the flow that the packet begins. k is the packet's tuple, and other is the address that
// replaces our end. If another packet has opened the flow in the meantime, open returns that flow.
func (c *translation) open(kind flowKind, k *key, other addr) (match, Drop) {
	o := opening{
		translation: c, kind: kind, class: classOf(protoOf(k.word), k.near.is4()), k: k, other: other, local: k.near, mapped: other, owner: k.near,
	}
	if kind == endpointFlow {
		o.local, o.mapped, o.owner = other, k.near, k.remote
	}
	e, peer := c.e, c.r.peer
	o.room = e.reserve(peer, c.tr != nil)
	f, opened, drop := o.enter()
	if o.room == roomElsewhere && drop == DropFlowTableFull {
		if o.room = roomOwn; e.displace(peer, c.tr != nil) {
			o.room = roomFree
		}
		f, opened, drop = o.enter()
	}
	if !opened && c.tr == nil {
		e.total.Add(-1)
	}
	return f, drop
}

// enter adds the flow to the table; Engine.total already counts the flow. opened is false if the
// table already had the flow. If only the eviction of another peer's flow can make room, enter
// undoes its changes and returns DropFlowTableFull.
func (o *opening) enter() (f match, opened bool, drop Drop) {
	r, t := o.r.rule, &o.r.peer.flows
	t.mu.Lock()
	defer t.mu.Unlock()
	if current := r.peer.rule; current != r && (current == nil || !current.permits(o.kind, protoOf(o.k.word), o.local, o.mapped, o.far)) {
		return f, false, DropNoFlow // the rules have just changed and now forbid the flow
	}
	room := o.room
	var stale []uint32 // expired flows that have a tuple of the new flow; a trace leaves them in the table
	if f, ok := t.find(o.dir, o.k); ok {
		if !f.expired(&o.e.lifetimes, o.now) {
			o.tr.known(&f)
			return f, false, DropNone
		}
		room = roomFree // the new flow takes the place of the expired one
		stale = o.expire(&f, stale)
	}
	port := o.k.nearPort(o.dir)
	if o.kind == endpointFlow || o.class == noPorts {
		// Another flow may already have the tuple of the new flow's replies. If the new flow goes
		// to a mapped endpoint, the other flow may be one that the endpoint itself began. If the
		// new flow is a NAPT flow without ports, another host may use the same protocol towards the
		// same remote address.
		back := keyOf(1-o.dir, o.other, o.far, protoOf(o.k.word), port, o.k.remotePort())
		if f, ok := t.find(1-o.dir, &back); ok {
			if !f.expired(&o.e.lifetimes, o.now) {
				if o.kind == endpointFlow {
					return match{}, false, DropFlowClash
				}
				return match{}, false, DropProtocol
			}
			room = roomFree
			stale = o.expire(&f, stale)
		}
	}
	quota := r.peer.quota.Load()
	if o.tr != nil {
		f, drop = o.preview(t, room, quota, stale)
		return f, false, drop
	}
	hosts := &t.hosts[o.kind]
	h := hosts.hold(o.owner)
	family, mappedPort := o.local.family(), port
	hasPort := o.kind == naptFlow && o.class != noPorts
	// Each eviction also frees an entry for the new flow. A host at its quota first loses a flow of
	// its own, so that it does not take a port from other hosts.
	evicted := false
	if hosts.at(h).flows > hosts.quota {
		if evicted = t.evict(hosts.at(h)); !evicted {
			hosts.release(h, o.owner)
			return match{}, false, DropHostQuota
		}
	}
	if hasPort {
		var ok bool
		mappedPort, ok = t.napt.hold(h, port, o.class, family)
		for n := 0; n < evictSteps && !ok && t.evictPort(o.class, family, port); n++ { // flows may share a port, so try again
			evicted = true
			mappedPort, ok = t.napt.hold(h, port, o.class, family)
		}
		if !ok {
			hosts.release(h, o.owner)
			return match{}, false, DropPortsExhausted
		}
	}
	if !evicted && (room != roomFree || t.live.Load() >= quota) && (room == roomElsewhere && t.live.Load() < quota || !t.evict(nil)) {
		if hasPort {
			t.napt.release(h, port, o.class, family)
		}
		hosts.release(h, o.owner)
		return match{}, false, DropFlowTableFull
	}
	word := uint64(port)<<nearShift[Outbound] | uint64(mappedPort)<<nearShift[Inbound] | o.k.word&farMask | stateLive
	if o.kind == endpointFlow {
		word |= stateEndpoint
	}
	f = t.insert(o.local, o.mapped, o.far, word, h, o.now)
	t.report(f.index, FlowOpened, o.dir, 0)
	f.other = o.other
	return f, true, DropNone
}

// expire removes an expired flow that has a tuple of the new flow. For a trace, it leaves the flow
// in the table and only appends it to stale.
func (o *opening) expire(f *match, stale []uint32) []uint32 {
	if o.tr == nil {
		t := &o.r.peer.flows
		t.remove(f.index, FlowExpired)
		t.expired.Add(1)
		return nil
	}
	if slices.Contains(stale, f.index) {
		return stale // the expired flow has both tuples of the new flow
	}
	return append(stale, f.index)
}

// begins returns DropNone for a packet that may open a flow: a TCP segment without RST, an ICMP
// request, or any packet of another protocol. A TCP segment need not be a SYN. So if a gateway
// loses its flows, a connection can continue if it gets the same port again. For packets of a
// mapped endpoint, flowOut has a further condition.
func begins(v *packet.View) Drop {
	switch classOf(v.Proto(), v.Is4()) {
	case tcpPorts:
		if v.TCPFlags()&packet.TCPRst != 0 {
			return DropNoFlow
		}
	case icmpIDs:
		if !v.IsICMPQuery() {
			return DropProtocol
		}
		if _, isRequest := query(v.ICMPType()); !isRequest {
			return DropNoFlow
		}
	}
	return DropNone
}
