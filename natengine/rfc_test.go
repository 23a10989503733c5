package natengine_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// The tests named TestRFC... use the engine as a black box: they send packets, check the packets
// that leave, and advance the clock by hand. docs/nat.md lists them by requirement, and
// internal/archtest checks that the list is complete.
//
//	our pods        10.244.0.0/16, for the peer 10.61.0.0/16, so that 10.61.0.0 is the NAPT address
//	                fd00:a::/64, for the peer fd00:61::/64
//	our endpoint    192.168.7.7, for the peer 10.62.4.9 out of 10.62.4.0/22
//	the peer        pods 10.71.128.0/18 and fd00:71::/56, external 10.72.8.0/24
const (
	node1, node2 = "192.168.1.1", "192.168.1.2"
	natAddress   = "10.61.0.0"
	ourEndpoint  = "10.62.4.9"
	theirPod     = "10.71.128.5"
	theirOther   = "10.71.191.6"
)

type box struct {
	testing.TB
	e   *natengine.Engine
	now time.Duration
}

func newBox(t testing.TB, c natengine.Config) *box {
	t.Helper()
	prefix := netip.MustParsePrefix
	b := &box{TB: t, e: natengine.New(c)}
	err := b.e.SetPeers([]natengine.Peer{{
		ID: "b", RemotePods: []netip.Prefix{prefix("10.71.128.0/18"), prefix("fd00:71::/56")}, RemoteExternal: []netip.Prefix{prefix("10.72.8.0/24")},
		Pods: []natengine.Remap{
			{From: prefix("10.244.0.0/16"), To: prefix("10.61.0.0/16")},
			{From: prefix("fd00:a::/64"), To: prefix("fd00:61::/64")},
		},
		External:  []netip.Prefix{prefix("10.62.4.0/22")},
		Endpoints: []natengine.Endpoint{{Real: netip.MustParseAddr("192.168.7.7"), Seen: netip.MustParseAddr(ourEndpoint)}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *box) wait(d time.Duration) { b.now += d }

// judge gives the engine a copy of a packet and returns the resulting packet and the verdict.
func (b *box) judge(dir natengine.Direction, raw []byte) ([]byte, natengine.Verdict) {
	b.Helper()
	var v packet.View
	if err := v.Parse(slices.Clone(raw), packet.ChecksumComplete); err != nil {
		b.Fatalf("parse %x: %v", raw, err)
	}
	if dir == natengine.Outbound {
		verdict := b.e.Outbound(&v, b.now)
		return v.Bytes(), verdict
	}
	verdict := b.e.Inbound(&v, b.now)
	return v.Bytes(), verdict
}

// out sends a packet to the tunnel, which must pass, verifies its checksums and returns the packet
// that leaves. in does the same for a packet from the tunnel.
func (b *box) out(raw []byte) packettest.Packet { b.Helper(); return b.pass(natengine.Outbound, raw) }
func (b *box) in(raw []byte) packettest.Packet  { b.Helper(); return b.pass(natengine.Inbound, raw) }

func (b *box) pass(dir natengine.Direction, raw []byte) packettest.Packet {
	b.Helper()
	got, v := b.judge(dir, raw)
	if v.Action != natengine.Forward {
		b.Fatalf("%v after %v: %v, %v: %v", dir, b.now, v.Action, v.Drop, line(packettest.MustDecode(raw)))
	}
	packettest.Check(b, got, packettest.ValidChecksums())
	return packettest.MustDecode(got)
}

// refuse sends a packet that must not pass. It must stay unchanged, no other packet may leave,
// and the drop must be counted once under its reason.
func (b *box) refuse(dir natengine.Direction, raw []byte, want natengine.Drop) {
	b.Helper()
	before := b.dropped(dir, want)
	got, v := b.judge(dir, raw)
	if v.Action != natengine.Discard || v.Drop != want || len(v.Released()) > 0 {
		b.Fatalf("%v after %v: %v, %v, want %v: %v", dir, b.now, v.Action, v.Drop, want, line(packettest.MustDecode(raw)))
	}
	if !slices.Equal(got, raw) {
		b.Errorf("a refused packet was changed")
	}
	if n := b.dropped(dir, want) - before; n != 1 {
		b.Errorf("%v was counted %d times", want, n)
	}
}

func (b *box) dropped(dir natengine.Direction, d natengine.Drop) uint64 {
	return b.e.Stats().NoPeerDrops[dir][d] + b.e.Peers()[0].Drops(dir, d)
}

func (b *box) stats() natengine.PeerStats { return b.e.Stats().Peers[0] }

func datagram(from, to string, data ...byte) []byte {
	f, t := netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)
	return packettest.Build(packettest.IP{Src: f.Addr(), Dst: t.Addr()}, packettest.UDP{SrcPort: f.Port(), DstPort: t.Port(), Data: data})
}

func segment(from, to string, flags uint8, data ...byte) []byte {
	f, t := netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)
	return packettest.Build(packettest.IP{Src: f.Addr(), Dst: t.Addr()},
		packettest.TCP{SrcPort: f.Port(), DstPort: t.Port(), Flags: flags, Data: data})
}

func ping(from, to string, id uint16) []byte { return echo(from, to, id, false) }
func pong(from, to string, id uint16) []byte { return echo(from, to, id, true) }

func echo(from, to string, id uint16, reply bool) []byte {
	return packettest.Build(packettest.IP{Src: netip.MustParseAddr(from), Dst: netip.MustParseAddr(to)}, packettest.Echo{ID: id, Reply: reply})
}

// icmp returns an IPv4 ICMP message of any type, with a correct checksum.
func icmp(from, to string, kind, code uint8, body ...byte) []byte {
	m := append([]byte{kind, code, 0, 0}, body...)
	sum := packettest.InternetChecksum(m)
	m[2], m[3] = byte(sum>>8), byte(sum)
	return packettest.Build(packettest.IP{Src: netip.MustParseAddr(from), Dst: netip.MustParseAddr(to)}, packettest.Raw{Proto: 1, Data: m})
}

// query returns a message of ICMP or ICMPv6 of any type. id is at the offset of a query's
// identifier.
func query(from, to string, kind uint8, id uint16) []byte {
	return packettest.Build(packettest.IP{Src: netip.MustParseAddr(from), Dst: netip.MustParseAddr(to)},
		packettest.ICMPError{Type: kind, Rest: uint32(id)<<16 | 1, Quote: make([]byte, 24)})
}

// about returns an ICMP error that quotes a packet. Callers usually quote the first 28 octets.
func about(from, to string, kind, code uint8, quote []byte) []byte {
	return packettest.Build(packettest.IP{Src: netip.MustParseAddr(from), Dst: netip.MustParseAddr(to)},
		packettest.ICMPError{Type: kind, Code: code, Quote: quote})
}

// connect opens a TCP connection from our side and returns our end as the peer sees it.
func (b *box) connect(from, to string) string {
	b.Helper()
	seen := source(b.out(segment(from, to, packettest.SYN)))
	b.in(segment(to, seen, packettest.SYN|packettest.ACK))
	b.out(segment(from, to, packettest.ACK))
	return seen
}

// source returns the source of a packet with its port, or with the identifier of an ICMP query.
// destination returns the destination in the same form.
func source(p packettest.Packet) string {
	return netip.AddrPortFrom(p.Src, max(p.SrcPort, p.ICMPID)).String()
}

func destination(p packettest.Packet) string {
	return netip.AddrPortFrom(p.Dst, max(p.DstPort, p.ICMPID)).String()
}

func line(p packettest.Packet) string {
	return fmt.Sprintf("%s > %s protocol %d, type %d, flags %#x", source(p), destination(p), p.Proto, p.Type, p.Flags)
}

// want checks that an end of a packet has the expected value.
func want(t testing.TB, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// checkLasts checks that a conversation stays open for duration d. open starts it and returns a
// packet of the peer, which must pass after d but not a second later.
func checkLasts(t *testing.T, c natengine.Config, d time.Duration, open func(b *box) (answer []byte)) {
	t.Helper()
	b := newBox(t, c)
	answer := open(b)
	b.wait(d)
	b.e.Sweep(b.now)
	b.in(answer)

	b = newBox(t, c)
	answer = open(b)
	b.wait(d + time.Second)
	b.refuse(natengine.Inbound, answer, natengine.DropNoFlow)
	b.e.Sweep(b.now)
	if n := b.stats().Flows; n != 0 {
		t.Errorf("%d flows %v after the last packet", n, d+time.Second)
	}
}

// outFragments sends fragments and reassembles the datagram that leaves. It returns that datagram's
// source and payload.
func (b *box) outFragments(fragments [][]byte) (src netip.Addr, transport []byte) {
	b.Helper()
	var left []packettest.Packet
	take := func(raw []byte) {
		packettest.Check(b, raw, packettest.ValidChecksums())
		left = append(left, packettest.MustDecode(raw))
	}
	for _, f := range fragments {
		got, v := b.judge(natengine.Outbound, f)
		switch v.Action {
		case natengine.Forward:
			take(got)
			for _, r := range v.Released() {
				take(r)
			}
		case natengine.Hold:
		default:
			b.Fatalf("a fragment: %v", v.Drop)
		}
	}
	slices.SortFunc(left, func(p, q packettest.Packet) int { return p.FragmentOffset - q.FragmentOffset })
	for _, p := range left {
		if p.FragmentOffset != len(transport) || src.IsValid() && p.Src != src {
			b.Fatalf("fragment at %d from %v after %d octets from %v", p.FragmentOffset, p.Src, len(transport), src)
		}
		src = p.Src
		transport = append(transport, p.Transport...)
	}
	return src, transport
}
