package natengine

import (
	"bytes"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// tooBig sends b outbound, then calls TooBig for it and returns the result.
func tooBig(t testing.TB, e *Engine, b []byte, mtu int, now time.Duration) ([]byte, Action) {
	t.Helper()
	var v packet.View
	parse(t, &v, bytes.Clone(b))
	if verdict := e.Outbound(&v, now); verdict.Action != Forward {
		t.Fatal(verdict.Drop)
	}
	before := bytes.Clone(v.Bytes())
	answer, action := e.TooBig(&v, mtu, make([]byte, packet.MaxTooBig), now)
	if !bytes.Equal(before, v.Bytes()) {
		t.Error("the packet changed")
	}
	return answer, action
}

// Every sender must get the error at its own address, and the error must quote the packet that it
// sent, untranslated. The source of the error must be the packet's destination.
func TestTooBigQuotesTheSendersOwnPacket(t *testing.T) {
	p := peerB()
	p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
	p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
	data := make([]byte, 1400)
	for _, c := range []struct {
		name   string
		before func(t *testing.T, e *Engine)
		b      []byte
		want   Action
	}{
		{"pod, TCP", nil, packettest.Build(packettest.IP{Src: ip("10.244.1.1"), Dst: ip("10.71.0.5"), DF: true},
			packettest.TCP{SrcPort: 4000, DstPort: 80, Flags: packettest.ACK, Data: data}), Forward},
		{"pod, UDP", nil, udp("10.244.1.1:4000", "10.71.0.5:80", data...), Forward},
		{"pod, echo", nil, packettest.Build(packettest.IP{Src: ip("10.244.1.1"), Dst: ip("10.71.0.5"), DF: true}, packettest.Echo{ID: 7, Data: data}), Forward},
		{"pod, other protocol", nil, packettest.Build(packettest.IP{Src: ip("10.244.1.1"), Dst: ip("10.71.0.5")}, packettest.Raw{Proto: 47, Data: data}), Forward},
		{"pod to an external address", nil, udp("10.244.1.1:4000", "10.72.0.9:80", data...), Forward},
		{"node", nil, udp("192.168.1.1:4000", "10.71.0.5:80", data...), Forward},
		{"node whose port is in use", func(t *testing.T, e *Engine) { out(t, e, udp("192.168.1.2:4000", "10.71.0.9:80"), 0) },
			udp("192.168.1.1:4000", "10.71.0.5:80", data...), Forward},
		{"node, echo", nil, packettest.Build(packettest.IP{Src: ip("192.168.1.1"), Dst: ip("10.71.0.5"), DF: true}, packettest.Echo{ID: 7, Data: data}), Forward},
		{"node, with options", nil, packettest.Build(packettest.IP{Src: ip("192.168.1.1"), Dst: ip("10.71.0.5"), Options: []byte{148, 4, 0, 0}},
			packettest.UDP{SrcPort: 4000, DstPort: 80, Data: data}), Forward},
		{"mapped endpoint", func(t *testing.T, e *Engine) { in(t, e, udp("10.71.0.5:80", "10.247.0.9:4000"), 0) },
			udp("192.168.7.7:4000", "10.71.0.5:80", data...), Forward},
		{"the gateway itself", nil, udp("169.254.0.1:12345", "10.72.0.1:12345", data...), Deliver},
		{"first fragment", nil, packettest.Fragments(udp("192.168.1.1:4000", "10.71.0.5:80", data...), 1200, 9)[0], Forward},
		{"pod, IPv6", nil, udp("[fd44::1]:4000", "[fd71::5]:80", data...), Forward},
		{"node, IPv6", nil, udp("[fd01::1]:4000", "[fd71::5]:80", data...), Forward},
		{"pod, IPv6, later fragment", nil, packettest.Fragments(udp("[fd44::1]:4000", "[fd71::5]:80", data...), 1200, 9)[1], Forward},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(t, Config{}, p)
			if c.before != nil {
				c.before(t, e)
			}
			flows := e.Stats().Flows
			sent := packettest.MustDecode(c.b)
			answer, action := tooBig(t, e, c.b, 1328, 0)
			if action != c.want {
				t.Fatalf("%v, want %v", action, c.want)
			}
			kind, code := uint8(3), uint8(4)
			if sent.Src.Is6() {
				kind, code = 2, 0
			}
			packettest.Check(t, answer, packettest.ValidChecksums(), packettest.Src(sent.Dst), packettest.Dst(sent.Src), packettest.ICMPType(kind, code))
			p := packettest.MustDecode(answer)
			if !bytes.HasPrefix(c.b, p.Data) || len(p.Data) < 60 {
				t.Errorf("quotes %d octets\n%x\nof\n%x", len(p.Data), p.Data[:60], c.b[:60])
			}
			if mtu := int(p.Transport[6])<<8 | int(p.Transport[7]); mtu != 1328 {
				t.Errorf("next-hop MTU %d", mtu)
			}
			s := e.Stats()
			if s.Peers[0].ErrorsSent != 1 || s.Flows > flows+1 {
				t.Errorf("%+v", s.Peers[0])
			}
			for _, d := range Drops() { // the caller must count the packet
				if n := e.Peers()[0].Drops(Outbound, d) + e.Peers()[0].Drops(Inbound, d); n != 0 {
					t.Errorf("%d times %v", n, d)
				}
			}
		})
	}
}

func TestTooBigIsNotSentForICMPErrorsAndLaterFragments(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	data := make([]byte, 1400)
	fault := packettest.Build(packettest.IP{Src: ip("10.244.1.1"), Dst: ip("10.71.0.5")},
		packettest.ICMPError{Type: 3, Code: 1, Quote: udp("10.71.0.5:80", "10.244.1.1:4000", data...)})
	for name, b := range map[string][]byte{
		"ICMP error":     fault,
		"later fragment": packettest.Fragments(udp("10.244.1.1:4000", "10.71.0.5:80", data...), 1200, 9)[1],
	} {
		if answer, action := tooBig(t, e, b, 100, 0); action != Discard || answer != nil {
			t.Errorf("%s: %v", name, action)
		}
	}
	if s := e.Stats().Peers[0]; s.ErrorsSent != 0 || s.ErrorsLimited != 0 {
		t.Errorf("%+v", s)
	}
}

// Behind the NAPT address the sender of a later fragment is unknown. TooBig must return no error
// and count nothing.
func TestTooBigIsNotSentForUnknownSendersBehindNAPT(t *testing.T) {
	p := peerB()
	p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
	p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
	e := newEngine(t, Config{}, p)
	pieces := packettest.Fragments(udp("[fd01::1]:4000", "[fd71::5]:80", make([]byte, 1400)...), 1200, 9)
	if _, action := tooBig(t, e, pieces[0], 1280, 0); action != Forward {
		t.Errorf("first fragment: %v", action)
	}
	if _, action := tooBig(t, e, pieces[1], 1280, 0); action != Discard {
		t.Errorf("later fragment: %v", action)
	}
	for _, d := range Drops() {
		if n := e.Peers()[0].Drops(Outbound, d) + e.Peers()[0].Drops(Inbound, d); n != 0 {
			t.Errorf("%d times %v", n, d)
		}
	}
}

// RFC 1812, section 4.3.2.8; RFC 4443, section 2.4f. A flood of one peer must not suppress the
// errors about another.
func TestTooBigErrorsAreRateLimitedForEachPeer(t *testing.T) {
	e := newEngine(t, Config{MaxErrorsPerSecond: 10}, peerB(), peerC())
	b, c := udp("10.244.1.1:4000", "10.71.0.5:80"), udp("10.244.1.1:4000", "10.73.0.5:80")
	errorsSent := func(b []byte, n int, now time.Duration) (sent int) {
		for range n {
			if _, action := tooBig(t, e, b, 100, now); action == Forward {
				sent++
			}
		}
		return sent
	}
	if n := errorsSent(b, 500, time.Minute); n != errorBurst {
		t.Errorf("%d errors at once, want %d", n, errorBurst)
	}
	if n := errorsSent(b, 50, time.Minute+2*time.Second); n != 20 {
		t.Errorf("%d errors two seconds later, want 20", n)
	}
	if n := errorsSent(c, 50, time.Minute); n != 50 {
		t.Errorf("%d errors for another peer, want 50", n)
	}
	if n := errorsSent(b, 500, time.Hour); n != errorBurst {
		t.Errorf("%d errors after an hour, want %d", n, errorBurst)
	}
	if s := e.Stats().Peers[0]; s.ErrorsSent != 2*errorBurst+20 || s.ErrorsLimited != 1050-s.ErrorsSent {
		t.Errorf("told %d, silent %d", s.ErrorsSent, s.ErrorsLimited)
	}
}

func TestEachPeerHasTheMTUOfItsRules(t *testing.T) {
	p, q := peerB(), peerC()
	p.MTU, q.MTU = 1328, 0
	e := newEngine(t, Config{}, p, q)
	if s := e.Stats().Peers; s[0].MTU != 1328 || s[1].MTU != 0 || e.Peers()[0].MTU() != 1328 {
		t.Errorf("%+v", s)
	}
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:80"), 0)
	p.MTU = 1200
	if err := e.SetPeers([]Peer{p, q}); err != nil {
		t.Fatal(err)
	}
	if s := e.Stats().Peers[0]; s.MTU != 1200 || s.Flows != 1 {
		t.Errorf("%+v", s)
	}
	six := p
	p.MTU = 67
	six.MTU, six.RemotePods = 1279, pfxs("fd71::/64")
	for _, bad := range []Peer{p, six} {
		if err := e.SetPeers([]Peer{bad, q}); err == nil || e.Peers()[0].MTU() != 1200 {
			t.Errorf("%v, MTU %d", err, e.Peers()[0].MTU())
		}
	}
}
