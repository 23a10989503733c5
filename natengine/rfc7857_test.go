package natengine_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// The test follows figure 1. After each segment it checks the state that Flows returns and the time
// after which the flow ends.
func TestRFC7857_2_TCPSessionsFollowTheStateDiagram(t *testing.T) {
	for _, c := range []struct {
		name  string
		steps []step
		state string
		left  time.Duration
	}{
		{"V4 INIT", []step{{"out", syn}}, "half-open", transitory},
		{"ESTABLISHED", []step{{"out", syn}, {"in", synAck}, {"out", ack}}, "established", established},
		{"V4 FIN RCV", []step{{"out", syn}, {"in", synAck}, {"out", ack}, {"in", finAck}}, "established", established},
		{"V6 FIN RCV", []step{{"out", syn}, {"in", synAck}, {"out", ack}, {"out", finAck}}, "established", established},
		{"V4 FIN + V6 FIN RCV", []step{{"out", syn}, {"in", synAck}, {"out", ack}, {"in", finAck}, {"out", finAck}}, "closing", transitory},
		{"TRANS by our RST", []step{{"out", syn}, {"in", synAck}, {"out", ack}, {"out", rst}}, "closing", transitory},
		{"TRANS by the peer's RST", []step{{"out", syn}, {"in", synAck}, {"out", ack}, {"in", rst}}, "closing", transitory},
		{"V4 INIT after V4 FIN + V6 FIN RCV", []step{{"out", syn}, {"in", synAck}, {"out", ack}, {"in", finAck}, {"out", finAck}, {"out", syn}}, "half-open", transitory},
		{"ESTABLISHED, then a SYN", []step{{"out", syn}, {"in", synAck}, {"out", ack}, {"in", syn}}, "established", established},
		{"TRANS and back", []step{{"out", syn}, {"in", synAck}, {"out", ack}, {"in", rst}, {"out", ack}}, "established", established},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBox(t, natengine.Config{})
			b.refuse(natengine.Outbound, segment(node1+":4000", theirPod+":80", rst), natengine.DropNoFlow) // CLOSED: a RST opens no flow
			for _, s := range c.steps {
				if s.dir == "out" {
					b.out(segment(node1+":4000", theirPod+":80", s.flags))
				} else {
					b.in(segment(theirPod+":80", natAddress+":4000", s.flags))
				}
			}
			f := b.e.Flows(2)
			if len(f) != 1 || f[0].State != c.state || f[0].Left.Round(time.Second) != c.left {
				t.Errorf("%+v, want %s for %v", f, c.state, c.left)
			}
		})
	}
}

func TestRFC7857_2_1_OpeningAndClosingHaveSeparateTimeouts(t *testing.T) {
	c := natengine.Config{Timeouts: natengine.Timeouts{TCPTransitory: time.Minute, TCPClosing: 5 * time.Minute}}
	checkLasts(t, c, time.Minute, func(b *box) []byte {
		return segment(theirPod+":80", source(b.out(segment(node1+":4000", theirPod+":80", syn))), synAck)
	})
	checkLasts(t, c, 5*time.Minute, func(b *box) []byte {
		seen := b.connect(node1+":4000", theirPod+":80")
		b.out(segment(node1+":4000", theirPod+":80", finAck))
		b.in(segment(theirPod+":80", seen, finAck))
		return segment(theirPod+":80", seen, ack)
	})
	checkLasts(t, natengine.Config{}, transitory, func(b *box) []byte { // the default is four minutes
		return segment(theirPod+":80", source(b.out(segment(node1+":4000", theirPod+":80", syn))), synAck)
	})
}

func TestRFC7857_2_2_RSTIsTranslatedAndTheFlowWaitsFourMinutes(t *testing.T) {
	checkLasts(t, natengine.Config{}, transitory, func(b *box) []byte {
		seen := b.connect(node1+":4000", theirPod+":80")
		b.wait(time.Hour)
		want(t, destination(b.in(segment(theirPod+":80", seen, rst))), node1+":4000")
		b.wait(time.Minute)
		b.in(segment(theirPod+":80", seen, rst)) // more RSTs do not prolong the time
		b.wait(-time.Minute)
		return segment(theirPod+":80", seen, rst)
	})
}

// A segment within four minutes shows that the connection continues. The RST may have any
// sequence number, because the engine does not track sequence numbers.
func TestRFC7857_2_2_AForgedRSTDoesNotEndTheConnection(t *testing.T) {
	checkLasts(t, natengine.Config{}, established, func(b *box) []byte {
		seen := b.connect(node1+":4000", theirPod+":80")
		b.in(segment(theirPod+":80", seen, rst))
		b.wait(239 * time.Second)
		b.out(segment(node1+":4000", theirPod+":80", ack))
		return segment(theirPod+":80", seen, ack)
	})
}

// The RFC allows several hosts to share a port towards different destinations. The engine does not,
// because its mapping is endpoint-independent.
func TestRFC7857_3_PortsDoNotOverlap(t *testing.T) {
	b := newBox(t, natengine.Config{})
	first := source(b.out(datagram(node1+":4000", theirPod+":53")))
	if other := source(b.out(datagram(node2+":4000", theirOther+":54"))); other == first {
		t.Errorf("%s belongs to two hosts", other)
	}
}

// exhaust takes every UDP port at the NAPT address.
func exhaust(b *box) {
	b.Helper()
	for port := 1; port < 1<<16; port++ {
		seen := source(b.out(datagram(fmt.Sprintf("%s:%d", node1, port), theirPod+":53")))
		b.in(datagram(theirPod+":53", seen))
	}
}

func TestRFC7857_4_NewSessionsAreDroppedWhenPortsRunOut(t *testing.T) {
	b := newBox(t, natengine.Config{MaxFlowsPerHost: 1 << 16})
	exhaust(b)
	b.refuse(natengine.Outbound, datagram(node2+":4000", theirPod+":53"), natengine.DropPortsExhausted)
	b.out(datagram(node1+":4000", theirPod+":53")) // existing mappings continue
	b.out(datagram(node1+":4000", theirOther+":9"))
	want(t, source(b.out(segment(node2+":4000", theirPod+":80", syn))), natAddress+":4000") // TCP has its own ports
	b.wait(301 * time.Second)
	b.e.Sweep(b.now)
	b.out(datagram(node2+":4000", theirPod+":53")) // ports of expired flows are free again
}

func TestRFC7857_5_MappingsAreProtocolDependent(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(datagram(node1+":4000", theirPod+":53"))
	want(t, source(b.out(segment(node2+":4000", theirPod+":53", syn))), natAddress+":4000") // the UDP flow of another host does not occupy the TCP port
	if p := b.out(datagram(node2+":4000", theirPod+":53")); p.SrcPort == 4000 {
		t.Error("the mapping of TCP was used for UDP")
	}
}

func TestRFC7857_6_FilteringIsProtocolDependent(t *testing.T) {
	b := newBox(t, natengine.Config{})
	seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
	for _, flags := range []uint8{syn, synAck, ack} {
		b.refuse(natengine.Inbound, segment(theirPod+":53", seen, flags), natengine.DropNoFlow)
	}
}

func TestRFC7857_7_RefusedPacketsRefreshNoFlow(t *testing.T) {
	checkLasts(t, natengine.Config{}, 5*time.Minute, func(b *box) []byte {
		seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
		b.wait(time.Minute)
		b.refuse(natengine.Inbound, datagram(theirOther+":53", seen), natengine.DropNoFlow)
		b.refuse(natengine.Inbound, datagram(theirPod+":54", seen), natengine.DropNoFlow)
		b.wait(-time.Minute)
		return datagram(theirPod+":53", seen)
	})
}

func TestRFC7857_7_1_OutboundErrorsAndRSTsRefreshNoFlow(t *testing.T) {
	checkLasts(t, natengine.Config{}, 5*time.Minute, func(b *box) []byte {
		seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
		b.wait(time.Minute)
		b.out(about(node1, theirPod, 3, 3, datagram(theirPod+":53", node1+":4000")))
		b.wait(-time.Minute)
		return datagram(theirPod+":53", seen)
	})
	checkLasts(t, natengine.Config{}, transitory, func(b *box) []byte {
		seen := source(b.out(segment(node1+":4000", theirPod+":80", syn)))
		b.wait(time.Minute)
		b.out(segment(node1+":4000", theirPod+":80", rst))
		b.wait(-time.Minute)
		return segment(theirPod+":80", seen, synAck)
	})
}

// A mapping keeps its inside port if that is free. If not, its port must be random within the whole
// range (RFC 6056, section 4). With RandomPorts every port is random.
func TestRFC7857_9_ReplacementPortsAreRandom(t *testing.T) {
	for _, always := range []bool{false, true} {
		b := newBox(t, natengine.Config{RandomPorts: always})
		kept, neighbours, low, last := 0, 0, 0, uint16(0)
		for host := range 250 {
			p := b.out(datagram(fmt.Sprintf("192.168.1.%d:4000", host), theirPod+":53"))
			if p.SrcPort == 4000 {
				kept++
			}
			if d := int(p.SrcPort) - int(last); d >= -4 && d <= 4 {
				neighbours++
			}
			if p.SrcPort < 1<<15 {
				low++
			}
			last = p.SrcPort
		}
		if !always && kept != 1 || always && kept > 1 {
			t.Errorf("always %v: the port was kept %d times", always, kept)
		}
		if neighbours > 5 || low < 60 || low > 190 {
			t.Errorf("always %v: %d ports next to the one before, %d of 250 in the lower half", always, neighbours, low)
		}
	}
}

func TestRFC7857_11_AQueryMappingEndsWithItsLastSession(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(ping(node1, theirPod, 7))
	b.wait(40 * time.Second)
	b.out(ping(node1, theirOther, 7))
	b.wait(40 * time.Second) // the first session has expired
	b.e.Sweep(b.now)
	if p := b.out(ping(node2, theirOther, 7)); p.ICMPID == 7 {
		t.Error("the identifier was allocated although a session uses it")
	}
	want(t, destination(b.in(pong(theirOther, natAddress, 7))), node1+":7")
	b.wait(61 * time.Second)
	b.e.Sweep(b.now)
	if n := b.stats().Mappings; n != 0 {
		t.Errorf("%d mappings without a session", n)
	}
	want(t, source(b.out(ping("192.168.1.3", theirOther, 7))), natAddress+":7")
}

// Both fragments and whole packets must keep their identification. See docs/nat.md.
func TestRFC7857_10_IdentificationIsKept(t *testing.T) {
	b := newBox(t, natengine.Config{})
	for id := range uint32(5) {
		for _, f := range packettest.Fragments(datagram(node1+":4000", theirPod+":53", make([]byte, 200)...), 64, id*1000) {
			if p := b.out(f); p.FragmentID != id*1000 {
				t.Errorf("identification %d became %d", id*1000, p.FragmentID)
			}
		}
	}
}
