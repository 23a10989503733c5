package natengine

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet/packettest"
)

// events returns a list to which the engine's flow events are added as text.
func events(e *Engine, sample int) *[]string {
	var all []string
	e.Observe(func(ev FlowEvent) {
		peer := "-"
		if ev.Peer != nil {
			peer = ev.Peer.ID()
		}
		text := fmt.Sprintf("%v %s %s %d %v %v %v", ev.Change, peer, ev.Kind, ev.Proto, ev.Local, ev.Mapped, ev.Remote)
		switch ev.Change {
		case FlowClosed:
			text += fmt.Sprintf(" %v %v", ev.End, ev.Lasted.Round(time.Second))
		case FlowRefused:
			text += fmt.Sprintf(" %v %v", ev.Direction, ev.Drop)
		}
		all = append(all, text)
	}, sample)
	return &all
}

func TestFlowEventsCoverOpenCloseAndRefusal(t *testing.T) {
	b := peerB()
	b.MSS = 1380
	e := newEngine(t, Config{MaxFlowsPerHost: 2}, b)
	reported := events(e, 1)
	want := func(what string, lines ...string) {
		t.Helper()
		if !slices.Equal(*reported, lines) {
			t.Errorf("%s: reported\n%s\nwant\n%s", what, strings.Join(*reported, "\n"), strings.Join(lines, "\n"))
		}
		*reported = nil
	}
	id := b.ID
	out(t, e, udp("192.168.1.1:5000", "10.71.0.5:53"), at(0))
	out(t, e, udp("192.168.1.1:5000", "10.71.0.5:53"), at(1))
	in(t, e, udp("10.71.0.5:53", "10.246.0.0:5000"), at(7))
	want("a NAPT flow", "opened "+id+" napt 17 192.168.1.1:5000 10.246.0.0:5000 10.71.0.5:53")
	in(t, e, udp("10.71.0.5:1", "10.247.0.9:80"), at(8))
	want("a flow to an endpoint", "opened "+id+" endpoint 17 192.168.7.7:80 10.247.0.9:80 10.71.0.5:1")
	refused(t, e, Inbound, udp("10.71.0.5:1", "10.246.0.0:9"), at(8), DropNoFlow)
	refused(t, e, Outbound, udp("192.168.1.1:5", "203.0.113.1:53"), at(8), DropNoPeer)
	want("refused", "refused "+id+"  17 10.246.0.0:9 invalid AddrPort 10.71.0.5:1 inbound no_flow",
		"refused -  17 192.168.1.1:5 invalid AddrPort 203.0.113.1:53 outbound no_peer")
	out(t, e, udp("10.244.1.1:5", "10.71.0.5:53"), at(9))
	want("a datagram of a pod")
	out(t, e, tcp("10.244.1.1:5", "10.71.0.5:80", packettest.SYN), at(9))
	in(t, e, tcp("10.71.0.5:80", "10.246.1.1:5", packettest.SYN|packettest.ACK), at(9))
	out(t, e, tcp("10.244.1.1:5", "10.71.0.5:80", packettest.ACK), at(9))
	in(t, e, tcp("10.71.0.5:4", "10.246.1.1:80", packettest.SYN), at(9))
	want("connections of a pod", "opened "+id+" pod 6 10.244.1.1:5 10.246.1.1:5 10.71.0.5:80", "opened "+id+" pod 6 10.244.1.1:80 10.246.1.1:80 10.71.0.5:4")
	e.Sweep(duration(int32(at(1000))))
	slices.Sort(*reported)
	want("the end", "closed "+id+" endpoint 17 192.168.7.7:80 10.247.0.9:80 10.71.0.5:1 expired 0s",
		"closed "+id+" napt 17 192.168.1.1:5000 10.246.0.0:5000 10.71.0.5:53 expired 7s")
	out(t, e, udp("192.168.1.1:5000", "10.71.0.5:53"), at(1000))
	if err := e.SetPeers(nil); err != nil {
		t.Fatal(err)
	}
	want("rules are gone", "opened "+id+" napt 17 192.168.1.1:5000 10.246.0.0:5000 10.71.0.5:53",
		"closed "+id+" napt 17 192.168.1.1:5000 10.246.0.0:5000 10.71.0.5:53 purged 0s")
	e.Observe(nil, 1)
	refused(t, e, Outbound, udp("192.168.1.1:5", "203.0.113.1:53"), at(8), DropNoPeer)
	want("nobody is told any more")
}

// The flows that were reported as opened, but not as closed, must be the flows that are open. A
// sample must contain both the opening and the closing of a flow, or neither.
func TestFlowEventsMatchTheOpenFlows(t *testing.T) {
	for _, sample := range []int{1, 7} {
		rng := rand.New(rand.NewPCG(1, uint64(sample)))
		e := newEngine(t, Config{MaxFlows: 40, MaxFlowsPerHost: 15}, peerB(), peerC())
		type flow struct {
			peer, kind            string
			proto                 uint8
			local, mapped, remote netip.AddrPort
		}
		open, opened := make(map[flow]bool), 0
		e.Observe(func(ev FlowEvent) {
			if ev.Change == FlowRefused {
				return
			}
			f := flow{ev.Peer.ID(), ev.Kind, ev.Proto, ev.Local, ev.Mapped, ev.Remote}
			if open[f] == (ev.Change == FlowOpened) {
				t.Errorf("%v of %+v, which is open: %v", ev.Change, f, open[f])
			}
			if delete(open, f); ev.Change == FlowOpened {
				open[f] = true
				opened++
			}
		}, sample)
		now := 0
		for range 3000 {
			now += rng.IntN(10)
			remote := []string{"10.71.0.5", "10.73.0.5"}[rng.IntN(2)]
			src, dst := fmt.Sprintf("192.168.1.%d:%d", 1+rng.IntN(5), 1+rng.IntN(50)), fmt.Sprintf("%s:%d", remote, 1+rng.IntN(3))
			if rng.IntN(2) == 0 {
				send(t, e, Outbound, tcp(src, dst, packettest.SYN), at(now))
			} else {
				send(t, e, Outbound, udp(src, dst), at(now))
			}
			if rng.IntN(20) == 0 {
				e.Sweep(duration(int32(at(now))))
			}
		}
		if have := e.Stats().Flows; sample == 1 && len(open) != have || opened == 0 || have == 0 {
			t.Errorf("sample %d: %d of %d are open, the table has %d", sample, len(open), opened, have)
		}
		if created := e.Stats().Peers[0].Created + e.Stats().Peers[1].Created; sample > 1 && (opened*2*sample < int(created) || opened*sample > 2*int(created)) {
			t.Errorf("sample %d: %d of %d flows were reported", sample, opened, created)
		}
		e.checkTables(t)
	}
}

func TestFlowEventsDoNotAllocate(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	b := udp("192.168.1.1:5", "203.0.113.1:53")
	once := func() { send(t, e, Outbound, b, at(1)) }
	unobserved := testing.AllocsPerRun(100, once)
	var last FlowEvent
	e.Observe(func(ev FlowEvent) { last = ev }, 1)
	if observed := testing.AllocsPerRun(100, once); observed != unobserved {
		t.Errorf("%v allocations with an observer, %v without", observed, unobserved)
	}
	if last.Drop != DropNoPeer {
		t.Errorf("%+v", last)
	}
}
