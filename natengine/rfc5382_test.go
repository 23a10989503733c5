package natengine_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

const (
	syn, synAck, ack = packettest.SYN, packettest.SYN | packettest.ACK, packettest.ACK
	finAck, rst      = packettest.FIN | packettest.ACK, packettest.RST

	established, transitory = 2*time.Hour + 4*time.Minute, 4 * time.Minute // RFC 5382, REQ-5
)

func TestRFC5382_REQ1_MappingIsEndpointIndependent(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(segment(node1+":4000", theirPod+":80", syn))
	first := b.connect(node2+":4000", theirPod+":80")
	for _, to := range []string{theirPod + ":81", theirOther + ":80", "10.72.8.9:443"} {
		want(t, b.connect(node2+":4000", to), first)
	}
}

// A step is one segment of a connection: its direction, "out" or "in", and its flags.
type step struct {
	dir   string
	flags uint8
}

func TestRFC5382_REQ2_EveryValidSequenceOfSegmentsPasses(t *testing.T) {
	open := []step{{"out", syn}, {"in", synAck}, {"out", ack}}
	steps := func(more ...step) []step { return append(slices.Clone(open), more...) }
	sequences := map[string][]step{
		"close by us":                 steps(step{"out", finAck}, step{"in", ack}, step{"in", finAck}, step{"out", ack}),
		"close by the peer":           steps(step{"in", finAck}, step{"out", ack}, step{"out", finAck}, step{"in", ack}),
		"simultaneous close":          steps(step{"out", finAck}, step{"in", finAck}, step{"out", ack}, step{"in", ack}),
		"half-closed, data continues": steps(step{"out", finAck}, step{"in", ack}, step{"in", ack | packettest.PSH}, step{"out", ack}, step{"in", finAck}),
		"retransmissions":             {{"out", syn}, {"out", syn}, {"in", synAck}, {"in", synAck}, {"out", ack}, {"out", finAck}, {"out", finAck}, {"in", finAck}, {"in", finAck}, {"out", ack}, {"out", ack}},
		"refused":                     {{"out", syn}, {"in", rst | ack}},
		"reset by us":                 steps(step{"out", rst}),
		"reset, and a late segment":   steps(step{"in", rst}, step{"in", ack}, step{"out", ack}),
		"reopened":                    steps(step{"out", finAck}, step{"in", finAck}, step{"out", ack}, step{"out", syn}, step{"in", synAck}, step{"out", ack}),
		"ECN, urgent data":            {{"out", syn | packettest.ECE | packettest.CWR}, {"in", synAck | packettest.ECE}, {"out", ack | packettest.URG}, {"out", ack | packettest.CWR}},
		"begun in mid-connection":     {{"out", ack}, {"in", ack}, {"out", ack | packettest.PSH}},
	}
	for name, sequence := range sequences {
		t.Run("begun here/"+name, func(t *testing.T) {
			b := newBox(t, natengine.Config{})
			b.out(segment(node2+":4000", theirPod+":80", syn)) // so that the port must change
			seen := ""
			for _, s := range sequence {
				if s.dir == "out" {
					seen = source(b.out(segment(node1+":4000", theirPod+":80", s.flags, 'x')))
				} else {
					want(t, destination(b.in(segment(theirPod+":80", seen, s.flags, 'x'))), node1+":4000")
				}
			}
		})
		t.Run("begun by the peer/"+name, func(t *testing.T) {
			b := newBox(t, natengine.Config{})
			for _, s := range sequence { // the same sequence with the sides exchanged
				if s.dir == "out" {
					want(t, destination(b.in(segment(theirPod+":4000", ourEndpoint+":80", s.flags, 'x'))), "192.168.7.7:80")
				} else {
					want(t, source(b.out(segment("192.168.7.7:80", theirPod+":4000", s.flags, 'x'))), ourEndpoint+":80")
				}
			}
		})
	}
}

func TestRFC5382_REQ2a_SimultaneousOpenSucceeds(t *testing.T) {
	checkLasts(t, natengine.Config{}, established, func(b *box) []byte {
		seen := source(b.out(segment(node1+":4000", theirPod+":80", syn)))
		want(t, destination(b.in(segment(theirPod+":80", seen, syn))), node1+":4000")
		b.out(segment(node1+":4000", theirPod+":80", synAck))
		b.in(segment(theirPod+":80", seen, synAck))
		return segment(theirPod+":80", seen, ack)
	})
}

// The behaviour is stricter than the RFC recommends; docs/nat.md explains the reason.
func TestRFC5382_REQ3_FilteringIsAddressAndPortDependent(t *testing.T) {
	b := newBox(t, natengine.Config{})
	seen := b.connect(node1+":4000", theirPod+":80")
	for _, flags := range []uint8{syn, synAck, ack, rst} {
		b.refuse(natengine.Inbound, segment(theirPod+":81", seen, flags), natengine.DropNoFlow)
		b.refuse(natengine.Inbound, segment(theirOther+":80", seen, flags), natengine.DropNoFlow)
	}
}

// The drop must be silent, so that a simultaneous open can still succeed. Here our SYN follows, and
// then the peer sends its SYN again.
func TestRFC5382_REQ4_UnsolicitedSYNIsDroppedSilently(t *testing.T) {
	b := newBox(t, natengine.Config{})
	for range 6 {
		b.refuse(natengine.Inbound, segment(theirPod+":80", natAddress+":4000", syn), natengine.DropNoFlow)
		b.wait(time.Second)
	}
	want(t, source(b.out(segment(node1+":4000", theirPod+":80", syn))), natAddress+":4000")
	want(t, destination(b.in(segment(theirPod+":80", natAddress+":4000", syn))), node1+":4000")
}

func TestRFC5382_REQ5_EstablishedLastsTwoHoursFourMinutes(t *testing.T) {
	checkLasts(t, natengine.Config{}, established, func(b *box) []byte {
		return segment(theirPod+":80", b.connect(node1+":4000", theirPod+":80"), ack)
	})
}

func TestRFC5382_REQ5_TransitoryLastsFourMinutes(t *testing.T) {
	for name, more := range map[string]func(b *box, seen string){
		"half-open":                  nil,
		"answered, not acknowledged": func(b *box, seen string) { b.in(segment(theirPod+":80", seen, synAck)) },
		"closed": func(b *box, seen string) {
			b.connect(node1+":4000", theirPod+":80")
			b.out(segment(node1+":4000", theirPod+":80", finAck))
			b.in(segment(theirPod+":80", seen, finAck))
		},
	} {
		t.Run(name, func(t *testing.T) {
			checkLasts(t, natengine.Config{}, transitory, func(b *box) []byte {
				seen := source(b.out(segment(node1+":4000", theirPod+":80", syn)))
				if more != nil {
					more(b, seen)
				}
				return segment(theirPod+":80", seen, synAck)
			})
		})
	}
}

func TestRFC5382_REQ5a_TimeoutsAreConfigurable(t *testing.T) {
	c := natengine.Config{Timeouts: natengine.Timeouts{TCPEstablished: 3 * time.Hour, TCPTransitory: 5 * time.Minute}}
	checkLasts(t, c, 3*time.Hour, func(b *box) []byte {
		return segment(theirPod+":80", b.connect(node1+":4000", theirPod+":80"), ack)
	})
	checkLasts(t, c, 5*time.Minute, func(b *box) []byte {
		return segment(theirPod+":80", source(b.out(segment(node1+":4000", theirPod+":80", syn))), synAck)
	})
}

func TestRFC5382_REQ6_PayloadsAreNotInspected(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.connect(node2+":4000", theirPod+":21")
	b.connect(node1+":4000", theirPod+":21")
	data := []byte("PORT 192,168,1,1,15,160\r\n")
	if p := b.out(segment(node1+":4000", theirPod+":21", ack, data...)); !slices.Equal(p.Data, data) {
		t.Errorf("the data became %q", p.Data)
	}
	b.refuse(natengine.Inbound, segment(theirPod+":20", natAddress+":4000", syn), natengine.DropNoFlow)
}

func TestRFC5382_REQ7_NoPortIsOverloaded(t *testing.T) {
	b := newBox(t, natengine.Config{})
	owner := map[string]string{}
	for host := range 250 {
		from := fmt.Sprintf("192.168.1.%d:4000", host)
		seen := b.connect(from, fmt.Sprintf("10.71.128.%d:80", host))
		if other := owner[seen]; other != "" {
			t.Fatalf("%s is %s and %s", seen, other, from)
		}
		owner[seen] = from
	}
}

// See REQ-9 of RFC 4787.
func TestRFC5382_REQ8_HairpinIsRefused(t *testing.T) {
	b := newBox(t, natengine.Config{})
	seen := b.connect(node1+":4000", theirPod+":80")
	for _, to := range []string{"10.61.1.2:80", ourEndpoint + ":80", seen} {
		b.refuse(natengine.Outbound, segment("10.244.1.1:9", to, syn), natengine.DropNoPeer)
		b.refuse(natengine.Outbound, segment(node2+":9", to, syn), natengine.DropNoPeer)
	}
}

func TestRFC5382_REQ9_DestinationUnreachableIsTranslated(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.connect(node2+":4000", theirPod+":80")
	seen := b.connect(node1+":4000", theirPod+":80")
	for code := range uint8(16) {
		for _, size := range []int{28, 40} { // 8 octets of the TCP header, or all of it
			p := b.in(about(theirPod, natAddress, 3, code, segment(seen, theirPod+":80", ack)[:size]))
			q, err := packettest.DecodeQuote(p.Data)
			if err != nil || p.Type != 3 || p.Code != code {
				t.Errorf("code %d: type %d, code %d, %v", code, p.Type, p.Code, err)
			}
			want(t, p.Dst.String(), node1)
			if size == 40 {
				want(t, source(q), node1+":4000")
			}
		}
	}
}

func TestRFC5382_REQ10_ICMPErrorsEndNoConnection(t *testing.T) {
	checkLasts(t, natengine.Config{}, established, func(b *box) []byte {
		seen := b.connect(node1+":4000", theirPod+":80")
		for kind := range 256 {
			for code := range 16 {
				quote := append(make([]byte, 4), segment(seen, theirPod+":80", ack)...)
				_, _ = b.judge(natengine.Inbound, icmp(theirPod, natAddress, uint8(kind), uint8(code), quote...))
				quote = append(make([]byte, 4), segment(theirPod+":80", node1+":4000", ack)...)
				_, _ = b.judge(natengine.Outbound, icmp("192.168.9.9", theirPod, uint8(kind), uint8(code), quote...))
			}
		}
		return segment(theirPod+":80", seen, ack)
	})
}
