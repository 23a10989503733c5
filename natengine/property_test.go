package natengine_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// oddTimeouts are no multiples of ten seconds. Time in these tests advances by multiples of
// ten seconds, so the engine's coarse clock does not affect the results.
var oddTimeouts = natengine.Timeouts{
	UDP: 305 * time.Second, TCPEstablished: 7445 * time.Second, TCPTransitory: 245 * time.Second,
	ICMP: 65 * time.Second, Generic: 305 * time.Second, Fragment: 5 * time.Second,
}

// world is a random set of rules, together with addresses for packets.
type world struct {
	rng         *rand.Rand
	is4         bool
	peers       []natengine.Peer
	near, far   []netip.Addr // near are our addresses, far those of peers
	nearAtPeers []netip.Addr // our addresses as peers see them
}

func (w *world) prefix(bits int) netip.Prefix {
	b := make([]byte, 16)
	for i := range b {
		b[i] = byte(w.rng.Uint32())
	}
	a := netip.AddrFrom4([4]byte(b[:4]))
	if !w.is4 {
		b[0] = 0xfd
		a = netip.AddrFrom16([16]byte(b))
	}
	p, err := a.Prefix(bits)
	if err != nil {
		panic(err)
	}
	return p
}

func (w *world) in(p netip.Prefix) netip.Addr {
	random := w.prefix(p.Addr().BitLen()).Addr()
	switch a := moved(random, p); w.rng.IntN(8) {
	case 0:
		return p.Addr()
	case 1:
		if next := p.Addr().Next(); p.Contains(next) {
			return next
		}
		fallthrough
	default:
		return a
	}
}

// bits returns a random prefix length, sometimes a very short or long one.
func (w *world) bits() int {
	if w.is4 {
		return 1 + w.rng.IntN(32)
	}
	return 8 + w.rng.IntN(121)
}

func overlapsAny(p netip.Prefix, list []netip.Prefix) bool {
	for _, q := range list {
		if q.Overlaps(p) {
			return true
		}
	}
	return false
}

// newWorld generates random rules. The masks of the two sides differ, each side is remapped or
// not, and ranges coincide where docs/liqo-v0.md (section 7.5) allows it. There are a few
// mapped endpoints: one is the in-process endpoint, and some are pods.
func newWorld(rng *rand.Rand, self netip.Addr) *world {
	w := &world{rng: rng, is4: self.Is4()}
	pa := w.prefix(w.bits())
	w.near = append(w.near, self, pa.Addr())
	for range 4 {
		w.near = append(w.near, w.in(pa), w.prefix(self.BitLen()).Addr())
	}
	var remotes []netip.Prefix
	free := func(bits int) (netip.Prefix, bool) {
		for range 50 {
			if p := w.prefix(bits); !overlapsAny(p, remotes) {
				remotes = append(remotes, p)
				return p, true
			}
		}
		return netip.Prefix{}, false
	}
	for i := range 1 + rng.IntN(3) {
		p := natengine.Peer{ID: fmt.Sprint("peer", i), MSS: uint16(rng.IntN(2) * 1200)}
		pb, ok := free(w.bits())
		if !ok {
			continue
		}
		p.RemotePods = []netip.Prefix{pb}
		if xb, ok := free(w.bits()); ok {
			p.RemoteExternal = []netip.Prefix{xb}
			w.far = append(w.far, w.in(xb), w.in(xb))
		}
		to := pa
		switch rng.IntN(3) {
		case 0:
			to = w.prefix(pa.Bits())
		case 1:
			if pb.Bits() == pa.Bits() {
				to = pb // both use the same range
			}
		}
		p.Pods = []natengine.Remap{{From: pa, To: to}}
		w.far = append(w.far, w.in(pb), w.in(pb), w.in(pb), pb.Addr())
		w.nearAtPeers = append(w.nearAtPeers, to.Addr(), w.in(to), w.in(to), w.in(to), w.prefix(self.BitLen()).Addr())
		for range 20 {
			if xa := w.prefix(w.bits()); !xa.Overlaps(to) {
				p.External = []netip.Prefix{xa}
				break
			}
		}
		if len(p.External) == 1 {
			w.endpoints(&p, self, pa)
		}
		w.peers = append(w.peers, p)
	}
	return w
}

func (w *world) endpoints(p *natengine.Peer, self netip.Addr, pa netip.Prefix) {
	xa := p.External[0]
	taken := map[netip.Addr]bool{}
	real := []netip.Addr{self, w.in(pa), w.prefix(self.BitLen()).Addr(), w.far[w.rng.IntN(len(w.far))]}
	for _, a := range real {
		seen := w.in(xa)
		if taken[seen] || a != self && offLimits(a) {
			continue
		}
		taken[seen] = true
		p.Endpoints = append(p.Endpoints, natengine.Endpoint{Real: a, Seen: seen})
		w.near = append(w.near, a)
		w.nearAtPeers = append(w.nearAtPeers, seen, w.in(xa))
	}
}

func pick[T any](rng *rand.Rand, list []T) T { return list[rng.IntN(len(list))] }

// body returns a random payload. There are few ports, so that packets match flows and ports
// conflict.
func (w *world) body() packettest.Body {
	ports := []uint16{0, 53, 80, 1023, 1024, 40000, 40001, 65535}
	src, dst := pick(w.rng, ports), pick(w.rng, ports)
	switch w.rng.IntN(12) {
	case 0, 1, 2:
		return packettest.UDP{SrcPort: src, DstPort: dst, Data: []byte("datagram")}
	case 3:
		return packettest.UDP{SrcPort: src, DstPort: dst, NoChecksum: w.is4, Data: []byte("x")}
	case 4, 5, 6, 7:
		flags := []uint8{packettest.SYN, packettest.SYN | packettest.ACK, packettest.ACK, packettest.ACK, packettest.ACK,
			packettest.ACK | packettest.PSH, packettest.FIN | packettest.ACK, packettest.RST, packettest.RST | packettest.ACK, 0}
		return packettest.TCP{SrcPort: src, DstPort: dst, Flags: pick(w.rng, flags), Data: []byte("stream")}
	case 8, 9:
		return packettest.Echo{ID: src, Seq: 1, Reply: w.rng.IntN(3) == 0, Data: []byte("ping")}
	case 10:
		return packettest.Raw{Proto: 47, Data: []byte("tunnelled")}
	default:
		return packettest.Raw{Proto: 132, Data: []byte("sctp with ports that NAT leaves alone")}
	}
}

// header returns an IP header with fields that NAT must not change: traffic class and, in
// IPv6, flow label and extension headers.
func (w *world) header(src, dst netip.Addr) packettest.IP {
	h := packettest.IP{Src: src, Dst: dst, TOS: uint8(w.rng.Uint32())}
	if w.is4 {
		return h
	}
	h.FlowLabel = w.rng.Uint32() & 0xfffff
	if w.rng.IntN(4) > 0 {
		return h
	}
	for _, e := range []packettest.Extension{
		{Kind: 0, Data: []byte{1, 4, 0, 0, 0, 0}},           // hop-by-hop options: padding
		{Kind: 60, Data: []byte{1, 12, 13: 0}},              // destination options: padding
		{Kind: 43, Data: []byte{4, 0, 5: 0}},                // routing header with no segments left
		{Kind: 44, Data: []byte{0, 0, 1, 2, 3, 4}},          // an atomic fragment
		{Kind: 51, Data: []byte{0, 0, 0, 0, 1, 2, 21: 255}}, // authentication
		{Kind: 60, Data: []byte{1, 4, 0, 0, 0, 0}},
	} {
		if w.rng.IntN(3) == 0 {
			h.Extensions = append(h.Extensions, e)
		}
	}
	return h
}

// about returns an ICMP error that quotes a random part of a forwarded packet.
func (w *world) about(quote []byte, src, dst netip.Addr) []byte {
	header := 20
	kinds := []uint8{3, 3, 3, 11, 12, 4, 5}
	if !w.is4 {
		header, kinds = 40, []uint8{1, 2, 3, 4}
	}
	cut := len(quote)
	switch w.rng.IntN(4) {
	case 0:
		cut = min(cut, header+8)
	case 1:
		cut = min(cut, header+w.rng.IntN(8))
	}
	return packettest.Build(w.header(src, dst), packettest.ICMPError{Type: pick(w.rng, kinds), Code: 1, Quote: quote[:cut]})
}

// converse sends n random packets in both directions through e and compares each result with
// the reference.
func (w *world) converse(t *testing.T, e *natengine.Engine, r *reference, n int) map[string]int {
	seen := map[string]int{}
	var sent [2][]packettest.Packet // forwarded packets by direction
	var raw [2][][]byte
	now := time.Duration(0)
	for i := range n {
		if w.rng.IntN(20) == 0 {
			now += time.Duration(w.rng.IntN(12)) * 10 * time.Second
			e.Sweep(now)
			r.sweep(now)
		}
		dir := natengine.Direction(w.rng.IntN(2))
		src, dst := pick(w.rng, w.near), pick(w.rng, w.far)
		if dir == natengine.Inbound {
			src, dst = dst, pick(w.rng, w.nearAtPeers)
		}
		var in []byte
		switch kind := w.rng.IntN(6); {
		case kind == 0 && len(sent[1-dir]) > 0: // an error about a packet of the other direction
			j := w.rng.IntN(len(sent[1-dir]))
			q := sent[1-dir][j]
			if w.rng.IntN(2) == 0 {
				src = q.Dst
			}
			in = w.about(raw[1-dir][j], src, q.Src)
		case kind <= 3 && len(sent[1-dir]) > 0: // a reply
			q := pick(w.rng, sent[1-dir])
			body := w.body()
			switch b := body.(type) {
			case packettest.UDP:
				b.SrcPort, b.DstPort = q.DstPort, q.SrcPort
				body = b
			case packettest.TCP:
				b.SrcPort, b.DstPort = q.DstPort, q.SrcPort
				body = b
			case packettest.Echo:
				b.ID, b.Reply = q.ICMPID, true
				body = b
			}
			in = packettest.Build(w.header(q.Dst, q.Src), body)
		default:
			in = packettest.Build(w.header(src, dst), w.body())
		}
		out := append([]byte(nil), in...)
		var v packet.View
		if err := v.Parse(out, packet.ChecksumComplete); err != nil {
			t.Fatalf("parse %x: %v", in, err)
		}
		trace := e.Trace(&v, dir, now)
		var verdict natengine.Verdict
		if dir == natengine.Outbound {
			verdict = e.Outbound(&v, now)
		} else {
			verdict = e.Inbound(&v, now)
		}
		if err := r.judge(dir, in, out, verdict, now); err != nil {
			t.Fatalf("packet %d at %v, %v: %v\nin  %x\nout %x\n%v\nrules %+v", i, now, dir, err, in, out, trace, w.peers)
		}
		if trace.Action != verdict.Action || trace.Drop != verdict.Drop {
			t.Fatalf("packet %d: trace says\n%vengine %v/%v", i, trace, verdict.Action, verdict.Drop)
		}
		seen[fmt.Sprint(dir, " ", verdict.Action, " ", verdict.Drop)]++
		if verdict.Action != natengine.Discard {
			p := packettest.MustDecode(out)
			if !isError(p) {
				sent[dir] = append(sent[dir], p)
				raw[dir] = append(raw[dir], out)
			}
		}
	}
	return seen
}

// Engine and reference get the same random rules and random packets and must agree. The rules
// include all four combinations of remapping, masks that differ between the two sides, coinciding
// ranges and both families.
func TestEngineAgreesWithReference(t *testing.T) {
	for _, self := range []netip.Addr{netip.MustParseAddr("169.254.0.1"), netip.MustParseAddr("fd00::1")} {
		t.Run(map[bool]string{true: "IPv4", false: "IPv6"}[self.Is4()], func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 2))
			seen := map[string]int{}
			worlds := 150
			if testing.Short() {
				worlds = 30
			}
			for range worlds {
				w := newWorld(rng, self)
				if len(w.peers) == 0 || len(w.far) == 0 {
					continue
				}
				c := natengine.Config{Timeouts: oddTimeouts}
				if self.Is6() {
					c.Self6 = self
				}
				e := natengine.New(c)
				if err := e.SetPeers(w.peers); err != nil {
					t.Fatalf("%v\n%+v", err, w.peers)
				}
				r := &reference{self: []netip.Addr{self}, timeouts: oddTimeouts, peers: w.peers}
				for what, n := range w.converse(t, e, r, 400) {
					seen[what] += n
				}
			}
			t.Log(seen)
			for _, what := range []string{
				"outbound forward none", "inbound forward none", "inbound deliver none", "outbound discard icmp_error", "inbound discard icmp_error",
				"inbound discard no_flow", "inbound discard no_mapping", "inbound discard destination", "inbound discard flow_clash", "outbound discard protocol",
			} {
				if seen[what] == 0 {
					t.Errorf("the conversations never resulted in %q", what)
				}
			}
		})
	}
}
