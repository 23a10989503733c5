package natengine

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// fuzzRules returns rule sets of both families, with and without remapping. Some have coinciding
// ranges, pods as endpoints, wide prefixes, or prefixes of one address.
func fuzzRules() [][]Peer {
	six := peerB()
	six.RemotePods = append(six.RemotePods, pfx("fd71::/64"))
	six.Pods = append(six.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
	six.External = append(six.External, pfx("fd47::/64"))
	six.Endpoints = append(six.Endpoints, Endpoint{ip("10.244.3.3"), ip("10.247.0.33")}, Endpoint{ip("fd01::7"), ip("fd47::7")})
	six.MSS = 1300
	twin := peerB()
	twin.RemotePods = pfxs("10.246.0.0/16")
	wide := Peer{ID: "b", RemotePods: pfxs("128.0.0.0/1"), Pods: []Remap{{pfx("0.0.0.0/1"), pfx("128.0.0.0/1")}}}
	single := Peer{ID: "b", RemotePods: pfxs("10.71.0.0/16"), Pods: []Remap{{pfx("10.244.1.1/32"), pfx("10.246.1.1/32")}}}
	return [][]Peer{{six, peerC()}, {twin, peerC()}, {wide}, {single}}
}

// FuzzEngine gives the engine a sequence of packets. The input is the number of a rule set,
// then for each packet the direction, the length and the octets. For any input, the engine
// must not panic. A discarded packet must be unchanged. A forwarded packet must have the same
// length, parse, and have an address of the peer as its remote end. It must show our end only
// as the rules allow, and its checksums must be correct if they were before. An ICMP error
// must quote our end as its outer header shows it.
func FuzzEngine(f *testing.F) {
	seed := func(rules byte, packets ...[]byte) {
		data := []byte{rules}
		for i, p := range packets {
			data = append(data, byte(i&1), byte(len(p)>>8), byte(len(p)))
			data = append(data, p...)
		}
		f.Add(data)
	}
	for rules := range byte(4) {
		seed(rules, udp("192.168.1.1:4000", "10.71.0.5:53"), udp("10.71.0.5:53", "10.246.0.0:4000"))
		seed(rules, udp("10.244.1.1:4000", "10.246.1.1:53"), fault("10.246.1.1", "10.246.1.1", udp("10.246.1.1:4000", "10.246.1.1:53"), 28))
		seed(rules, tcp("169.254.0.1:4000", "10.72.0.5:53", packettest.SYN), udp("10.71.0.5:53", "10.247.0.9:4000"), udp("192.168.7.7:4000", "10.71.0.5:53"))
		seed(rules, udp("[fd01::1]:4000", "[fd71::5]:53"), udp("[fd71::5]:53", "[fd46::]:4000"))
	}
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 1)
	seed(0, fragments[2][:200], fragments[0], fragments[1])
	rules := fuzzRules()
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) == 0 {
			return
		}
		peers := rules[int(data[0])%len(rules)]
		e := newEngine(t, Config{MaxFlows: 8, MaxFragmentSets: 4, MaxFragmentBytes: 4000, MaxFragmentsPerSet: 3}, peers...)
		now := time.Duration(0)
		for data = data[1:]; len(data) > 3; now += time.Second {
			dir := Direction(data[0] & 1)
			n := min(int(data[1])<<8|int(data[2]), len(data)-3)
			b := data[3 : 3+n]
			data = data[3+n:]
			judgeFuzzed(t, e, peers, dir, b, now)
			if len(b)%7 == 0 {
				e.Sweep(now)
			}
		}
		e.checkTables(t)
	})
}

func judgeFuzzed(t *testing.T, e *Engine, peers []Peer, dir Direction, b []byte, now time.Duration) {
	var v, before packet.View
	work := slices.Clone(b)
	if v.Parse(work, packet.ChecksumComplete) != nil {
		return
	}
	_ = before.Parse(slices.Clone(b), packet.ChecksumComplete)
	trace := e.Trace(&v, dir, now)
	verdict := e.Outbound
	if dir == Inbound {
		verdict = e.Inbound
	}
	got := verdict(&v, now)
	// For a fragmented datagram, a trace reports the stored decision. It does not check whether
	// the fragment is a duplicate or whether there is room.
	if !before.IsFragment() && (trace.Action != got.Action || trace.Drop != got.Drop) {
		t.Fatalf("trace says %v %v, engine %v %v", trace.Action, trace.Drop, got.Action, got.Drop)
	}
	for _, r := range got.Released() {
		var w packet.View
		if err := w.Parse(r, packet.ChecksumComplete); err != nil {
			t.Fatalf("released: %v", err)
		}
		judgeForwarded(t, e, peers, dir, &w, got.Action)
	}
	if got.Action == Discard || got.Action == Hold {
		if got.Action == Discard && got.Drop == DropNone || string(work) != string(b) {
			t.Fatalf("%v %v, changed: %v", got.Action, got.Drop, string(work) != string(b))
		}
		return
	}
	if dir == Inbound && before.IsFragment() { // v is now the whole datagram, or the first of its new fragments
		if v.IsFragment() != (len(got.Released()) > 0) || v.IsFragment() && (v.Is4() || v.Len() > 1280) {
			t.Fatalf("a fragment became %x", v.Bytes())
		}
		judgeForwarded(t, e, peers, dir, &v, got.Action)
		return
	}
	if before.ValidChecksums() != v.ValidChecksums() {
		t.Fatalf("checksums were valid: %v, and are: %v\n%x\n%x", before.ValidChecksums(), v.ValidChecksums(), before.Bytes(), v.Bytes())
	}
	if before.TTL() != v.TTL() || before.Len() != v.Len() || before.Proto() != v.Proto() {
		t.Fatal("more changed than addresses and ports")
	}
	judgeForwarded(t, e, peers, dir, &v, got.Action)
}

// judgeForwarded checks a forwarded packet, using only the rules.
func judgeForwarded(t *testing.T, e *Engine, peers []Peer, dir Direction, v *packet.View, action Action) {
	near, far := v.Src(), v.Dst()
	if dir == Inbound {
		near, far = far, near
	}
	i := slices.IndexFunc(peers, func(p Peer) bool {
		for _, net := range slices.Concat(p.RemotePods, p.RemoteExternal) {
			if net.Contains(far) {
				return true
			}
		}
		return false
	})
	if i < 0 {
		t.Fatalf("%v is no peer's", far)
	}
	p := peers[i]
	self := near == e.config.Self4
	if (action == Deliver) != (self && dir == Inbound) {
		t.Fatalf("%v for %v", action, near)
	}
	allowed := false
	for _, m := range p.Pods {
		if dir == Outbound {
			allowed = allowed || m.To.Contains(near)
		} else {
			allowed = allowed || m.From.Contains(near)
		}
	}
	for _, end := range p.Endpoints {
		allowed = allowed || dir == Outbound && near == end.Seen || dir == Inbound && near == end.Real
	}
	if dir == Inbound && !allowed { // without a rule for it, there must be a flow that one of our hosts opened
		allowed = slices.ContainsFunc(e.Flows(100), func(f FlowInfo) bool { return f.Peer == p.ID && f.Local.Addr() == near }) || v.LaterFragment()
	}
	if !allowed {
		t.Fatalf("%v shows %v to or from %v", dir, near, far)
	}
	if v.IsICMPError() {
		var q packet.Quote
		if err := v.Quote(&q); err != nil {
			t.Fatal(err)
		}
		if dir == Inbound && (q.Src() != near) || dir == Outbound && q.Src() != far {
			t.Fatalf("half rewritten: %v > %v quotes %v > %v", v.Src(), v.Dst(), q.Src(), q.Dst())
		}
	}
}

// FuzzSetPeers decodes rules from octets and sets them in an engine that already has rules. If the
// engine refuses the rules, nothing may change, and the error must name each peer at fault. If it
// accepts them, they must contain no contradiction and must map every remote network to its peer.
// The engine must not share memory with the caller's rules.
func FuzzSetPeers(f *testing.F) {
	for _, rules := range fuzzRules() {
		f.Add(encodeRules(rules))
		f.Add(encodeRules(append(slices.Clone(rules), rules[0])))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		peers := decodeRules(data)
		e := newEngine(t, Config{}, peerB())
		before := e.rules.Load()
		if err := e.SetPeers(peers); err != nil {
			for line := range strings.Lines(err.Error()) {
				named := slices.ContainsFunc(peers, func(p Peer) bool { return strings.HasPrefix(line, "peer "+p.ID+": ") })
				if !named && !strings.HasPrefix(line, "peer without ID") {
					t.Errorf("the error names no peer: %q", line)
				}
			}
			if e.rules.Load() != before || e.Peers()[0].rule != before.rules[0] {
				t.Error("refused, and changed something")
			}
			return
		}
		remotes := map[netip.Prefix]string{}
		for _, p := range peers {
			for _, net := range slices.Concat(p.RemotePods, p.RemoteExternal) {
				for other, id := range remotes {
					if other.Overlaps(net) {
						t.Fatalf("%v of %s overlaps %v of %s", net, p.ID, other, id)
					}
				}
				remotes[net] = p.ID
			}
			for _, m := range p.Pods {
				if m.From.Bits() != m.To.Bits() {
					t.Fatalf("%v was accepted", m)
				}
			}
		}
		for i := range peers { // the engine must have copied the rules
			clear(peers[i].RemotePods)
			clear(peers[i].RemoteExternal)
			clear(peers[i].Pods)
			clear(peers[i].External)
			clear(peers[i].Endpoints)
		}
		for net, id := range remotes {
			a := netip.AddrFrom4([4]byte{192, 168, 1, 1})
			if net.Addr().Is6() {
				a = netip.MustParseAddr("fd01::1")
			}
			var v packet.View
			parse(t, &v, packettest.Build(packettest.IP{Src: a, Dst: net.Addr()}, packettest.UDP{SrcPort: 4000, DstPort: 53}))
			if got := e.Outbound(&v, 0); got.Peer == nil || got.Peer.ID() != id {
				t.Fatalf("a packet to %v of %s went to %+v", net, id, got)
			}
		}
		for _, r := range e.rules.Load().rules {
			for _, m := range r.spec.Pods {
				if back, ok := m.Reverse().Map(m.To.Addr()); !ok || back != m.From.Addr() {
					t.Errorf("%v is not undone: %v", m, back)
				}
			}
		}
	})
}

// encodeRules encodes peers as octets for decodeRules. Lists are preceded by their length;
// addresses have 4 or 16 octets.
func encodeRules(peers []Peer) []byte {
	var b []byte
	list := func(n int) { b = append(b, byte(n)) }
	address := func(a netip.Addr) { b = append(append(b, byte(a.BitLen()/8)), a.AsSlice()...) }
	prefix := func(p netip.Prefix) {
		address(p.Addr())
		b = append(b, byte(p.Bits()))
	}
	prefixes := func(ps []netip.Prefix) {
		list(len(ps))
		for _, p := range ps {
			prefix(p)
		}
	}
	list(len(peers))
	for _, p := range peers {
		b = append(b, p.ID[0], byte(p.MSS>>8), byte(p.MSS))
		prefixes(p.RemotePods)
		prefixes(p.RemoteExternal)
		prefixes(p.External)
		list(len(p.Pods))
		for _, m := range p.Pods {
			prefix(m.From)
			prefix(m.To)
		}
		list(len(p.Endpoints))
		for _, end := range p.Endpoints {
			address(end.Real)
			address(end.Seen)
		}
	}
	return b
}

// decodeRules decodes any octets as peers. An address whose length is neither 4 nor 16 is
// invalid. A list has at most 7 elements.
func decodeRules(b []byte) (peers []Peer) {
	take := func(n int) []byte {
		out := make([]byte, n)
		b = b[copy(out, b):]
		return out
	}
	address := func() netip.Addr {
		a, _ := netip.AddrFromSlice(take(int(take(1)[0] % 32)))
		return a
	}
	prefix := func() netip.Prefix { a := address(); return netip.PrefixFrom(a, int(take(1)[0])) }
	list := func(add func()) {
		for range take(1)[0] % 8 {
			add()
		}
	}
	prefixes := func() (ps []netip.Prefix) {
		list(func() { ps = append(ps, prefix()) })
		return ps
	}
	list(func() {
		head := take(3)
		p := Peer{ID: string(head[:1]), MSS: uint16(head[1])<<8 | uint16(head[2])}
		if head[0] == 0 || head[0] == '\n' {
			p.ID = ""
		}
		p.RemotePods, p.RemoteExternal, p.External = prefixes(), prefixes(), prefixes()
		list(func() { p.Pods = append(p.Pods, Remap{prefix(), prefix()}) })
		list(func() { p.Endpoints = append(p.Endpoints, Endpoint{address(), address()}) })
		peers = append(peers, p)
	})
	return peers
}

// FuzzFragments sends pieces of datagrams through the fragment store. The pieces have any offset
// and length, may repeat or overlap, and may arrive after pauses. Forged pieces differ from the
// datagram in an octet, in a port or in the More bit.
//
// Outbound, each piece that leaves must have the same new source as the first fragment with its
// identification. Nothing else in the piece may change, and it must not cover the transport header
// of another piece. If no piece was forged and all octets left, the receiver must be able to
// reassemble the datagram with translated ports. Inbound, only complete datagrams may leave. If no
// piece was forged, they must equal the datagram that was sent.
func FuzzFragments(f *testing.F) {
	f.Add([]byte{0, 60}, []byte{0, 20, 0, 20, 20, 0, 40, 40, 0})
	f.Add([]byte{1, 60}, []byte{40, 40, 0, 20, 20, 0, 0, 20, 0})
	f.Add([]byte{2, 60}, []byte{20, 40, 0, 0, 20, 0, 0, 20, 0})
	f.Add([]byte{4, 60}, []byte{0, 20, 0, 10, 20, 1, 20, 20, 4, 40, 40, 0})
	f.Add([]byte{7, 60}, []byte{0, 20, 0, 0, 20, 2, 20, 20, 0, 1, 2, 0, 40, 40, 8})
	f.Add([]byte{11, 200}, []byte{0, 60, 0, 60, 60, 0, 120, 80, 0})
	f.Fuzz(func(t *testing.T, kind, list []byte) {
		if len(kind) < 2 {
			return
		}
		s := newPieces(kind[0], int(kind[1])*8)
		s.e = newEngine(t, Config{MaxFragmentSets: 2, MaxFragmentBytes: 8000, MaxFragmentsPerSet: 8}, fuzzRules()[0]...)
		s.open(t)
		for c := range slices.Chunk(list, 3) {
			if len(c) == 3 {
				s.send(t, int(c[0])*8, int(c[1])*8, c[2])
			}
		}
		s.judge(t)
		s.e.Sweep(s.now + time.Minute)
		if st := s.e.Stats(); st.Peers[0].FragmentBytes != 0 || st.Peers[0].FragmentSets != 0 {
			t.Errorf("the store keeps %+v", st.Peers[0])
		}
	})
}

// pieces is the state of FuzzFragments: a datagram that is sent in pieces, and the packets
// that left.
type pieces struct {
	e      *Engine
	dir    Direction
	whole  []byte // the datagram, from our host or to its mapped port
	now    time.Duration
	forged [2]bool // by identification: whether a piece that differs from the datagram was sent
	sent   []packettest.Packet
	left   []packettest.Packet
}

// newPieces makes a datagram with size octets after the IP header. Bit 0 of kind selects IPv6,
// bit 1 inbound, bit 2 TCP.
func newPieces(kind byte, size int) *pieces {
	s := &pieces{dir: Direction(kind >> 1 & 1)}
	local, remote := netip.MustParseAddrPort("192.168.1.1:4000"), netip.MustParseAddrPort("10.71.0.5:53")
	seen := netip.MustParseAddrPort("10.246.0.0:4000")
	h := packettest.IP{ID: 7}
	if kind&1 != 0 {
		local, remote = netip.MustParseAddrPort("[fd01::1]:4000"), netip.MustParseAddrPort("[fd71::5]:53")
		seen = netip.MustParseAddrPort("[fd46::]:4000")
		h.Extensions = []packettest.Extension{{Kind: 60}}[:kind>>3&1]
	} else if kind&8 != 0 {
		h.Options = []byte{148, 4, 0, 0}
	}
	src, dst := local, remote
	if s.dir == Inbound {
		src, dst = remote, seen
	}
	h.Src, h.Dst = src.Addr(), dst.Addr()
	data := make([]byte, max(size-20, 0))
	for i := range data {
		data[i] = byte(i*7 + i>>8)
	}
	if kind&4 != 0 {
		s.whole = packettest.Build(h, packettest.TCP{SrcPort: src.Port(), DstPort: dst.Port(), Flags: packettest.ACK, Data: data})
	} else {
		s.whole = packettest.Build(h, packettest.UDP{SrcPort: src.Port(), DstPort: dst.Port(), Data: data})
	}
	return s
}

// open opens the flow that an inbound datagram needs, and a flow of another host.
func (s *pieces) open(t *testing.T) {
	p := packettest.MustDecode(s.whole)
	for _, host := range []string{"192.168.1.1", "192.168.1.2", "fd01::1", "fd01::2"} {
		h := packettest.IP{Src: ip(host), Dst: ip("10.71.0.5")}
		if h.Src.Is6() {
			h.Dst = ip("fd71::5")
		}
		port := uint16(4000)
		if h.Src == ip("192.168.1.2") || h.Src == ip("fd01::2") {
			port = 4001
		}
		b := packettest.Build(h, packettest.UDP{SrcPort: port, DstPort: 53})
		if p.Proto == packet.TCP {
			b = packettest.Build(h, packettest.TCP{SrcPort: port, DstPort: 53, Flags: packettest.SYN})
		}
		out(t, s.e, b, 0)
	}
}

// send sends at most n octets of the datagram, starting at off. Each bit of the
// parameter changes alters the piece: bit 0 changes octets, bit 1 uses another port of ours, bit 2
// sends a second later, bit 3 uses another identification, bit 4 inverts the More bit.
func (s *pieces) send(t *testing.T, off, n int, changes byte) {
	p := packettest.MustDecode(s.whole)
	data := slices.Clone(s.whole[p.TransportOffset:])
	off = min(off, len(data)&^7)
	n = min(n, len(data)-off)
	id := changes >> 3 & 1
	if changes&1 != 0 && n > 0 {
		data[off+n/2-n/2%8] ^= 0x55
	}
	if changes&2 != 0 {
		data[2*s.dir+1] ^= 1 // port 4001
	}
	if changes&4 != 0 {
		s.now += time.Second
	}
	more := (off+n < len(data)) != (changes&16 != 0)
	s.forged[id] = s.forged[id] || changes&(1|2|16) != 0
	b := fragmentOf(s.whole, p, data[off:off+n], off, more, uint32(id)+1)
	var v packet.View
	if v.Parse(b, packet.ChecksumComplete) != nil {
		return
	}
	before := slices.Clone(b)
	s.sent = append(s.sent, packettest.MustDecode(before))
	joins := s.dir == Inbound && v.IsFragment()
	verdict := s.e.Outbound
	if s.dir == Inbound {
		verdict = s.e.Inbound
	}
	got := verdict(&v, s.now)
	switch {
	case got.Action == Forward && joins:
		s.checkArrived(t, slices.Concat([][]byte{v.Bytes()}, got.Released()), s.forged[id])
	case got.Action == Forward, got.Action == Deliver:
		for _, b := range slices.Concat([][]byte{v.Bytes()}, got.Released()) {
			packettest.Check(t, b, packettest.HeaderChecksum())
			s.left = append(s.left, packettest.MustDecode(b))
		}
	default:
		if len(got.Released()) > 0 || !bytes.Equal(b, before) {
			t.Fatalf("%v %v, and released %d", got.Action, got.Drop, len(got.Released()))
		}
	}
}

// checkArrived checks an inbound datagram that was forwarded, in one packet or in new fragments.
func (s *pieces) checkArrived(t *testing.T, packets [][]byte, forged bool) {
	var data []byte
	hosts := []netip.Addr{ip("192.168.1.1"), ip("192.168.1.2"), ip("fd01::1"), ip("fd01::2")}
	for i, b := range packets {
		p := packettest.MustDecode(b)
		if p.FragmentOffset != len(data) || p.More != (i < len(packets)-1) || p.More && (p.Src.Is4() || len(b) > 1280) {
			t.Fatalf("piece %d of %d: %+v", i, len(packets), p)
		}
		if packettest.Check(t, b, packettest.HeaderChecksum()); !slices.Contains(hosts, p.Dst) {
			t.Fatalf("the datagram went to %v", p.Dst)
		}
		if len(packets) > 1 {
			data = append(data, b[48:]...) // includes the extension headers in the fragmented part
		} else {
			data = p.Transport
		}
	}
	whole := packettest.MustDecode(s.whole)
	want, sum := slices.Clone(s.whole[whole.TransportOffset:]), 6
	if whole.Proto == packet.TCP {
		sum = 16
	}
	if forged || len(want) < sum+2 {
		return
	}
	if data = slices.Clone(data[max(0, len(data)-len(want)):]); len(data) < len(want) {
		t.Fatalf("%d octets arrived, want %d", len(data), len(want))
	}
	clear(data[sum : sum+2])
	clear(want[sum : sum+2])
	if !bytes.Equal(data, want) { // the datagram must have reached the host to whose port it was sent
		t.Fatalf("%x\narrived for\n%x", data, want)
	}
}

// fragmentOf returns a fragment that has the IP header of a packet and one piece of its data.
func fragmentOf(whole []byte, p packettest.Packet, piece []byte, off int, more bool, id uint32) []byte {
	b := slices.Clone(whole[:p.TransportOffset])
	word := uint16(off)
	if p.Src.Is4() {
		if word /= 8; more {
			word |= 0x2000
		}
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)+len(piece)))
		binary.BigEndian.PutUint16(b[4:], uint16(id))
		binary.BigEndian.PutUint16(b[6:], word)
		binary.BigEndian.PutUint16(b[10:], 0)
		binary.BigEndian.PutUint16(b[10:], packettest.InternetChecksum(b))
		return append(b, piece...)
	}
	if more {
		word |= 1
	}
	if len(b) > 40 {
		b[40] = 44
	} else {
		b[6] = 44
	}
	b = append(b, p.Proto, 0, byte(word>>8), byte(word))
	b = binary.BigEndian.AppendUint32(b, id)
	b = append(b, piece...)
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-40))
	return b
}

// nearEnd returns our end of a packet that left.
func (s *pieces) nearEnd(p packettest.Packet) netip.Addr {
	if s.dir == Inbound {
		return p.Dst
	}
	return p.Src
}

// judge checks all packets that left.
func (s *pieces) judge(t *testing.T) {
	whole := packettest.MustDecode(s.whole)
	ends := map[uint32]map[netip.Addr]bool{1: {}, 2: {}}
	for _, p := range s.left {
		if p.FragmentOffset == 0 {
			ends[p.FragmentID][s.nearEnd(p)] = true
		}
	}
	for _, p := range s.left {
		whole4 := !p.More && p.FragmentOffset == 0 // a whole packet, not a fragment
		if whole4 {
			continue
		}
		if s.nearEnd(p) == s.nearEnd(whole) || !ends[p.FragmentID][s.nearEnd(p)] {
			t.Fatalf("a fragment at %d left with %v, first fragments with %v", p.FragmentOffset, s.nearEnd(p), ends[p.FragmentID])
		}
		if p.FragmentOffset > 0 && whole.Proto == packet.TCP && p.FragmentOffset < 20 {
			t.Fatalf("a fragment at %d lies in the TCP header", p.FragmentOffset)
		}
		if !slices.ContainsFunc(s.sent, func(sent packettest.Packet) bool { return isTranslation(sent, p) }) {
			t.Fatalf("no fragment that was sent can have become %+v", p)
		}
	}
	for id, forged := range s.forged {
		if !forged {
			s.reassemble(t, uint32(id)+1)
		}
	}
}

// isTranslation reports whether p may be the translation of the fragment f. Only ports and checksum
// may differ.
func isTranslation(f, p packettest.Packet) bool {
	if f.FragmentID != p.FragmentID || f.FragmentOffset != p.FragmentOffset || f.More != p.More || len(f.Transport) != len(p.Transport) ||
		f.TTL != p.TTL {
		return false
	}
	a, b := slices.Clone(f.Transport), slices.Clone(p.Transport)
	if p.FragmentOffset == 0 {
		sum := 6
		if p.Proto == packet.TCP {
			sum = 16
		}
		for _, x := range [][]byte{a, b} {
			if len(x) >= sum+2 {
				clear(x[sum : sum+2])
			}
			clear(x[:4])
		}
	}
	return bytes.Equal(a, b)
}

// reassemble acts as the receiver. If all octets of a datagram have arrived, they must equal
// the datagram that was sent, with a correct checksum.
func (s *pieces) reassemble(t *testing.T, id uint32) {
	whole := packettest.MustDecode(s.whole)
	data := make([]byte, len(s.whole)-whole.TransportOffset)
	there := make([]bool, len(data))
	last := false
	var first packettest.Packet
	for _, p := range s.left {
		if p.FragmentID != id || !p.More && p.FragmentOffset == 0 {
			continue
		}
		if p.FragmentOffset == 0 {
			first = p
		}
		last = last || !p.More
		copy(data[p.FragmentOffset:], p.Transport)
		for i := range p.Transport {
			there[p.FragmentOffset+i] = true
		}
	}
	if !last || slices.Contains(there, false) {
		return
	}
	length := binary.BigEndian.AppendUint32(nil, uint32(len(data)))
	pseudo := slices.Concat(first.Src.AsSlice(), first.Dst.AsSlice(), length, []byte{0, 0, 0, first.Proto})
	if sum := packettest.InternetChecksum(pseudo, data); sum != 0 {
		t.Fatalf("the receiver finds the checksum off by %#x", sum)
	}
	header := len(whole.Transport) - len(whole.Data)
	if !bytes.Equal(data[header:], whole.Data) {
		t.Fatal("the receiver finds other octets")
	}
	far, end := [2]int{2, 0}[s.dir], [2]int{0, 2}[s.dir]
	if !bytes.Equal(data[far:far+2], s.whole[whole.TransportOffset+far:][:2]) || binary.BigEndian.Uint16(data[end:]) != 4000 {
		t.Fatalf("ports % x", data[:4])
	}
}
