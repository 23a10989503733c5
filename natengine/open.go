package natengine

import (
	"slices"

	"github.com/isthmus-net/isthmus/packet"
)

// open adds a flow that a packet of direction dir begins: k is its tuple and other what our end becomes. It returns the
// flow, which another packet may have opened in the meantime.
func (e *Engine) open(r *rule, kind flowKind, dir Direction, k *key, other addr, now tick, tr *Trace) (match, Drop) {
	room := e.reserve(r.peer, tr != nil)
	f, opened, drop := e.openReserved(r, kind, dir, k, other, now, room, tr)
	if room == roomElsewhere && drop == DropFlowTableFull {
		if room = roomOwn; e.displace(r.peer, tr != nil) {
			room = roomFree
		}
		f, opened, drop = e.openReserved(r, kind, dir, k, other, now, room, tr)
	}
	if !opened && tr == nil {
		e.total.Add(-1)
	}
	return f, drop
}

// openReserved is open for a flow that total has been told of. opened is false when the flow is not new. Where the place
// has to come from elsewhere, it does all but make it and says DropFlowTableFull.
func (e *Engine) openReserved(r *rule, kind flowKind, dir Direction, k *key, other addr, now tick, room room, tr *Trace) (f match, opened bool, drop Drop) {
	t := &r.peer.flows
	t.mu.Lock()
	defer t.mu.Unlock()
	local, mapped, owner := k.near, other, k.near
	if kind == endpointFlow {
		local, mapped, owner = other, k.near, k.remote
	}
	if current := r.peer.rule; current != r && (current == nil || !current.permits(kind, local, mapped, k.remote)) {
		return f, false, DropNoFlow // the rules have just changed
	}
	var late []uint32 // flows that only a trace leaves there
	if f, ok := t.find(dir, k); ok {
		if !f.expired(&e.lifetimes, now) {
			tr.known(&f)
			return f, false, DropNone
		}
		room = roomFree // its own
		late = t.expire(&f, late, tr)
	}
	proto, port, remotePort := protoOf(k.word), k.nearPort(dir), k.remotePort()
	class := classOf(proto, k.near.is4())
	if kind == endpointFlow || class == noPorts {
		// The other tuple could be taken: by a flow that the endpoint itself began, or behind the NAPT address by
		// another host that uses the same protocol towards the same remote address.
		back := keyOf(1-dir, other, k.remote, proto, port, remotePort)
		if f, ok := t.find(1-dir, &back); ok {
			if !f.expired(&e.lifetimes, now) {
				if kind == endpointFlow {
					return match{}, false, DropFlowClash
				}
				return match{}, false, DropProtocol
			}
			room = roomFree
			late = t.expire(&f, late, tr)
		}
	}
	quota := r.peer.quota.Load()
	if tr != nil {
		f, drop = t.preview(kind, k, other, class, late, room, quota, tr)
		return f, false, drop
	}
	hosts := &t.hosts[kind]
	h := hosts.hold(owner)
	mappedPort := port
	hasPort := kind == naptFlow && class != noPorts
	if hasPort {
		var ok bool
		if mappedPort, ok = t.napt.hold(h, port, class, local.family()); !ok {
			hosts.release(h, owner)
			return match{}, false, DropPortsExhausted
		}
	}
	switch {
	case hosts.at(h).flows > hosts.quota:
		if !t.evict(hosts.at(h)) {
			drop = DropHostQuota
		}
	case room != roomFree || t.live.Load() >= quota:
		if room == roomElsewhere && t.live.Load() < quota || !t.evict(nil) {
			drop = DropFlowTableFull
		}
	}
	if drop != DropNone {
		if hasPort {
			t.napt.release(h, port, class, local.family())
		}
		hosts.release(h, owner)
		return match{}, false, drop
	}
	word := uint64(port)<<nearShift[Outbound] | uint64(mappedPort)<<nearShift[Inbound] |
		uint64(remotePort)<<remoteShift | uint64(proto)<<protoShift | stateLive
	if kind == endpointFlow {
		word |= stateEndpoint
	}
	f = t.insert(local, mapped, k.remote, word, h, now)
	f.other = other
	return f, true, DropNone
}

// expire removes a flow that is in the way though its time is over. A trace leaves it and notes it in late.
func (t *flowTable) expire(f *match, late []uint32, tr *Trace) []uint32 {
	if tr != nil {
		if slices.Contains(late, f.index) {
			return late // it is in the way with both tuples
		}
		return append(late, f.index)
	}
	t.remove(f.index)
	t.expired.Add(1)
	return nil
}

// begins tells whether a packet may open a flow: a TCP segment without RST (also in mid-connection, so that
// connections survive the loss of the table when their port can be kept), an ICMP request, anything of other protocols.
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
		if !isRequest(v) {
			return DropNoFlow
		}
	}
	return DropNone
}

// isRequest reports whether the packet is an ICMP query that asks: echo, timestamp, information, address mask.
func isRequest(v *packet.View) bool {
	if !v.IsICMPQuery() {
		return false
	}
	switch v.ICMPType() {
	case 8, 13, 15, 17:
		return v.Is4()
	case 128:
		return !v.Is4()
	}
	return false
}
