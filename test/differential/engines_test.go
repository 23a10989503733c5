package differential

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// engines is the translator under test: one engine per gateway, each of which has the other
// cluster as its only peer.
type engines struct {
	engines [2]*natengine.Engine
	now     time.Duration
}

func newEngines(t *testing.T, p plan) *engines {
	return enginesOf(t, p.pods, p.podsSeen, p.extSeen, p.endpoint, p.mapped)
}

// enginesOf makes the engines of both sides. ext is the ExternalCIDR as the other side sees
// it.
func enginesOf(t *testing.T, pods, podsSeen, ext [2]netip.Prefix, endpoint, mapped func(side) netip.Addr) *engines {
	e := &engines{}
	for _, s := range []side{A, B} {
		r := s.other()
		e.engines[s] = natengine.New(natengine.Config{})
		err := e.engines[s].SetPeers([]natengine.Peer{{
			ID:             r.String(),
			RemotePods:     []netip.Prefix{podsSeen[r]},
			RemoteExternal: []netip.Prefix{ext[r]},
			Pods:           []natengine.Remap{{From: pods[s], To: podsSeen[s]}},
			External:       []netip.Prefix{ext[s]},
			Endpoints:      []natengine.Endpoint{{Real: endpoint(s), Seen: mapped(s)}},
		}})
		if err != nil {
			t.Fatalf("engine of %v: %v", s, err)
		}
	}
	return e
}

// outcome is the result of sending packets through both engines. drops are the reasons of the
// drops, in order.
type outcome struct {
	wire, out [][]byte
	drops     []natengine.Drop
}

// send sends complete packets from the pods of one side to those of the other.
func (e *engines) send(t *testing.T, from side, packets ...[]byte) (o outcome) {
	t.Helper()
	for _, b := range packets {
		wire := e.cross(t, from, natengine.Outbound, packet.ChecksumComplete, b, &o)
		o.wire = append(o.wire, wire...)
		for _, w := range wire {
			o.out = append(o.out, e.cross(t, from.other(), natengine.Inbound, packet.ChecksumComplete, w, &o)...)
		}
	}
	return o
}

// sendPartial is send for one packet with a partial checksum, as a TUN delivers it. It completes
// the checksum before the packet enters the tunnel, as the gateway does.
func (e *engines) sendPartial(t *testing.T, from side, b []byte) (o outcome) {
	t.Helper()
	for _, w := range e.cross(t, from, natengine.Outbound, packet.ChecksumPartial, b, &o) {
		o.wire = append(o.wire, w)
		o.out = append(o.out, e.cross(t, from.other(), natengine.Inbound, packet.ChecksumComplete, w, &o)...)
	}
	return o
}

// cross passes one packet through one engine and returns the packets that come out. Besides the
// translated packet these may be fragments that waited for it, or the datagram that it completed.
// cross does not change b.
func (e *engines) cross(t *testing.T, at side, dir natengine.Direction, sum packet.ChecksumState, b []byte, o *outcome) [][]byte {
	t.Helper()
	e.now += time.Millisecond
	b = slices.Clone(b)
	var v packet.View
	if err := v.Parse(b, sum); err != nil {
		t.Fatalf("gateway %v, %v: %v: % x", at, dir, err, b)
	}
	var verdict natengine.Verdict
	if dir == natengine.Outbound {
		verdict = e.engines[at].Outbound(&v, e.now)
	} else {
		verdict = e.engines[at].Inbound(&v, e.now)
	}
	switch verdict.Action {
	case natengine.Forward:
		if v.Checksum() == packet.ChecksumPartial {
			v.CompleteChecksum()
		}
		return append([][]byte{v.Bytes()}, verdict.Released()...)
	case natengine.Discard:
		o.drops = append(o.drops, verdict.Drop)
	case natengine.Deliver:
		t.Errorf("gateway %v, %v: delivered to an endpoint that the plan does not have: % x", at, dir, b)
	case natengine.Hold: // the fragment will leave later, as Released or as part of its datagram
	}
	return nil
}
