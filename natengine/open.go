package natengine

import "github.com/isthmus-net/isthmus/packet"

// open adds a flow that a packet of direction dir begins: k is its tuple and other what our end becomes. It returns the
// flow, which another packet may have opened in the meantime.
func (e *Engine) open(r *rule, kind flowKind, dir Direction, k *key, other addr, now tick, tr *Trace) (match, Drop) {
	t := &r.peer.flows
	t.mu.Lock()
	defer t.mu.Unlock()
	local, mapped := k.near, other
	if kind == endpointFlow {
		local, mapped = other, k.near
	}
	if current := r.peer.rule; current != r && (current == nil || !current.permits(kind, local, mapped, k.remote)) {
		return match{}, DropNoFlow // the rules have just changed
	}
	var first match
	over := int64(0) // flows that only a trace leaves there
	if f, ok := t.find(dir, k); ok {
		if !f.expired(&e.lifetimes, now) {
			tr.known(&f)
			return f, DropNone
		}
		first, over = f, t.expire(&f, tr)
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
					return match{}, DropFlowClash
				}
				return match{}, DropProtocol
			}
			if f.entry != first.entry {
				over += t.expire(&f, tr)
			}
		}
	}
	full := t.live.Load()-over >= r.peer.quota.Load() || e.total.Load()-over >= int64(e.config.MaxFlows)
	if tr != nil {
		return t.preview(kind, k, other, class, full, tr)
	}
	var mapping uint32
	mappedPort := port
	if kind == naptFlow && class != noPorts {
		var ok bool
		if mapping, mappedPort, ok = t.napt.hold(local, port, class); !ok {
			return match{}, DropPortsExhausted
		}
	}
	if full && !t.evict() {
		if mapping != 0 {
			t.napt.release(mapping)
		}
		return match{}, DropFlowTableFull
	}
	word := uint64(port)<<nearShift[Outbound] | uint64(mappedPort)<<nearShift[Inbound] |
		uint64(remotePort)<<remoteShift | uint64(proto)<<protoShift | stateLive
	if kind == endpointFlow {
		word |= stateEndpoint
	}
	f := t.insert(local, mapped, k.remote, word, mapping, now)
	f.other = other
	return f, DropNone
}

// expire removes a flow that is in the way though its time is over, and returns how many it had to leave: 1 for a trace.
func (t *flowTable) expire(f *match, tr *Trace) int64 {
	if tr != nil {
		return 1
	}
	t.remove(f.index)
	t.expired.Add(1)
	return 0
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
