package natengine

import (
	"cmp"
	"math/bits"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

func TestImportsOnlyPacketAndPrefixTable(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Skip(err)
	}
	for dep := range strings.FieldsSeq(string(out)) {
		if !strings.HasPrefix(dep, "github.com/gaissmai/bart") && !strings.HasPrefix(dep, "github.com/isthmus-net/isthmus/packet") &&
			!strings.HasPrefix(dep, "github.com/isthmus-net/isthmus/natengine") {
			t.Errorf("natengine must stay kernel-free, yet it imports %s", dep)
		}
	}
}

func TestEveryDropReasonHasAUniqueLabel(t *testing.T) {
	seen := map[string]bool{}
	for _, d := range Drops() {
		if l := d.String(); l == "" || seen[l] || strings.ToLower(l) != l || strings.Contains(l, " ") || d.Explain() == "" {
			t.Errorf("drop %d: label %q, %q", d, l, d.Explain())
		}
		seen[d.String()] = true
	}
}

func TestRemapReverseUndoesMap(t *testing.T) {
	r := Remap{pfx("10.244.0.0/16"), pfx("10.246.0.0/16")}
	a, ok := r.Map(ip("10.244.1.2"))
	if !ok || a != ip("10.246.1.2") {
		t.Error(a, ok)
	}
	if back, ok := r.Reverse().Map(a); !ok || back != ip("10.244.1.2") {
		t.Error(back, ok)
	}
	for _, bad := range []Remap{r, {pfx("10.0.0.0/8"), pfx("10.246.0.0/16")}, {}} {
		if a, ok := bad.Map(ip("10.1.0.0")); ok {
			t.Errorf("%v maps to %v", bad, a)
		}
	}
}

func TestSetPeersRefusesContradictions(t *testing.T) {
	for _, c := range []struct {
		want   string
		change func(b, c *Peer)
	}{
		{"peer c: remote network 10.71.128.0/17 overlaps 10.71.0.0/16 of peer b", func(b, c *Peer) { c.RemotePods = pfxs("10.71.128.0/17") }},
		{"peer b: remote network 10.71.0.0/16 overlaps", func(b, c *Peer) { b.RemoteExternal = b.RemotePods }},
		{"peer b: pods: 10.244.0.0/16 -> 10.246.0.0/17 has masks of different length", func(b, c *Peer) { b.Pods[0].To = pfx("10.246.0.0/17") }},
		{"peer b: pods: 10.244.0.0/16 -> fd00::/16 mixes address families", func(b, c *Peer) { b.Pods[0].To = pfx("fd00::/16") }},
		{"peer b: pods: 10.250.0.0/16 -> 10.251.0.0/16 is the second remap of its address family", func(b, c *Peer) {
			b.Pods = append(b.Pods, Remap{pfx("10.250.0.0/16"), pfx("10.251.0.0/16")})
		}},
		{"peer b: remote pods: 10.71.0.1/16 has host bits set", func(b, c *Peer) { b.RemotePods = pfxs("10.71.0.1/16") }},
		{"peer b: external: 0.0.0.0/0 contains all addresses", func(b, c *Peer) { b.External = pfxs("0.0.0.0/0") }},
		{"peer b: external: invalid prefix", func(b, c *Peer) { b.External = make([]netip.Prefix, 1) }},
		{"peer b: remote pods: ::/64 contains IPv4-mapped addresses", func(b, c *Peer) { b.RemotePods = pfxs("::/64") }},
		{"peer b: external: 10.246.128.0/17 overlaps the pods as the peer sees them", func(b, c *Peer) { b.External = pfxs("10.246.128.0/17") }},
		{"peer b: endpoint 10.247.0.9 -> 192.168.7.8: 192.168.7.7 is already the address of another endpoint", func(b, c *Peer) {
			b.Endpoints = append(b.Endpoints, Endpoint{ip("192.168.7.8"), ip("10.247.0.9")})
		}},
		{"peer b: endpoint 10.99.0.9 -> 192.168.7.7: 10.99.0.9 is not in the external networks", func(b, c *Peer) { b.Endpoints[1].Seen = ip("10.99.0.9") }},
		{"169.254.169.254 is not an address that a peer may reach", func(b, c *Peer) { b.Endpoints[1].Real = ip("169.254.169.254") }},
		{"127.0.0.1 is not an address that a peer may reach", func(b, c *Peer) { b.Endpoints[1].Real = ip("127.0.0.1") }},
		{"mixes address families", func(b, c *Peer) { b.Endpoints[1].Real = ip("fd00::1") }},
		{"an address is missing", func(b, c *Peer) { b.Endpoints[1].Real = netip.Addr{} }},
		{"peer b: appears twice", func(b, c *Peer) { c.ID = "b" }},
		{"peer without ID", func(b, c *Peer) { c.ID = "" }},
		{"peer b: MSS 20 is too small", func(b, c *Peer) { b.MSS = 20 }},
		{"need more than 32768 nodes of the lookup table", func(b, c *Peer) { // two for each network
			for i := range 1<<14 + 1 {
				c.RemotePods = append(c.RemotePods, netip.PrefixFrom(netip.AddrFrom4([4]byte{20 + byte(i>>8), byte(i), 0, 0}), 25))
			}
		}},
	} {
		e := newEngine(t, Config{}, peerB())
		b, other := peerB(), peerC()
		c.change(&b, &other)
		err := e.SetPeers([]Peer{b, other})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want %q", err, c.want)
		}
		if src, _ := out(t, e, udp("10.244.1.1:1", "10.71.0.5:2"), 0); len(e.Peers()) != 1 || src != port("10.246.1.1:1") {
			t.Errorf("%q: the old rules are gone", c.want)
		}
	}
}

func TestRulesAreKeyedByPeerAndDirection(t *testing.T) { // docs/liqo-v0.md, section 7.5
	b, c := peerB(), peerC() // both see us under the same range
	b.RemotePods = pfxs("10.246.0.0/16")
	c.RemotePods = pfxs("10.247.0.0/16") // our ExternalCIDR, as c sees it, is also the range of c's pods
	e := newEngine(t, Config{}, b, c)
	src, dst := out(t, e, udp("10.244.1.1:1", "10.246.1.1:1"), 0)
	wantEnd(t, src, "10.246.1.1:1")
	wantEnd(t, dst, "10.246.1.1:1")
	_, dst = in(t, e, udp("10.246.1.1:1", "10.246.1.1:1"), 0)
	wantEnd(t, dst, "10.244.1.1:1")
	_, dst = in(t, e, udp("10.247.1.1:1", "10.247.0.9:1"), 0)
	wantEnd(t, dst, "192.168.7.7:1")
}

// A peer must reach only our pods and mapped endpoints, and only at the addresses under which it
// sees them.
func TestPacketsThatNoRulePermitsAreRefused(t *testing.T) {
	e := newEngine(t, Config{}, peerB(), peerC())
	for _, c := range []struct {
		dir      Direction
		src, dst string
		want     Drop
	}{
		{Inbound, "10.99.0.1:1", "10.246.1.1:2", DropNoPeer},
		{Inbound, "10.71.0.5:1", "10.244.1.1:2", DropDestination}, // our pod by its local address
		{Inbound, "10.71.0.5:1", "192.168.1.1:2", DropDestination},
		{Inbound, "10.71.0.5:1", "192.168.7.7:2", DropDestination}, // a mapped endpoint by its local address
		{Inbound, "10.71.0.5:1", "10.96.0.1:443", DropDestination},
		{Inbound, "10.71.0.5:1", "169.254.0.1:12345", DropDestination},
		{Inbound, "10.71.0.5:1", "169.254.169.254:80", DropDestination},
		{Inbound, "10.71.0.5:1", "127.0.0.1:2", DropDestination},
		{Inbound, "10.71.0.5:1", "224.0.0.1:2", DropDestination},
		{Inbound, "10.71.0.5:1", "255.255.255.255:2", DropDestination},
		{Inbound, "10.71.0.5:1", "10.73.0.5:2", DropDestination}, // to another peer
		{Inbound, "10.71.0.5:1", "10.246.0.0:2", DropNoFlow},
		{Inbound, "10.71.0.5:1", "10.247.0.2:2", DropNoMapping},
		{Inbound, "10.72.0.5:1", "10.247.0.9:2", DropNoFlow},
		{Outbound, "10.244.1.1:1", "10.99.0.1:2", DropNoPeer},
		{Outbound, "10.244.1.1:1", "10.246.1.1:2", DropNoPeer}, // our own range as the peer sees it: hairpinning is refused
		{Outbound, "127.0.0.1:1", "10.71.0.5:2", DropSource},
		{Outbound, "0.0.0.0:1", "10.71.0.5:2", DropSource},
		{Outbound, "224.0.0.5:1", "10.71.0.5:2", DropSource},
		{Outbound, "255.255.255.255:1", "10.71.0.5:2", DropSource},
	} {
		t.Run(c.dir.String()+" "+c.src+" "+c.dst, func(t *testing.T) { refused(t, e, c.dir, udp(c.src, c.dst), 0, c.want) })
	}
	for _, c := range []struct {
		dir      Direction
		src, dst string
	}{
		{Inbound, "10.72.0.5:1", "10.246.1.1:2"},  // from the peer's external network to a pod
		{Outbound, "240.30.0.1:1", "10.71.0.5:2"}, // overlay address of a node
		{Outbound, "169.254.100.1:1", "10.71.0.5:2"},
		{Outbound, "10.73.0.5:1", "10.71.0.5:2"}, // transit between two peers
		{Outbound, "10.244.0.0:1", "10.71.0.5:2"},
	} {
		pass(t, e, c.dir, udp(c.src, c.dst), 0)
	}
}

// 10.0.0.0/8 contains no special-purpose address, but 0.0.0.0/1 contains several networks of such
// addresses.
func TestSpecialAddressesInsideAWidePrefixAreRefused(t *testing.T) {
	p := Peer{ID: "b", RemotePods: pfxs("128.0.0.0/1"), Pods: []Remap{{pfx("0.0.0.0/1"), pfx("128.0.0.0/1")}}}
	e := newEngine(t, Config{}, p)
	out(t, e, udp("1.2.3.4:1", "129.2.3.4:2"), 0)
	refused(t, e, Outbound, udp("127.2.3.4:1", "129.2.3.4:2"), 0, DropSource)
	refused(t, e, Outbound, udp("1.2.3.4:1", "224.0.0.1:2"), 0, DropDestination)
	refused(t, e, Outbound, udp("1.2.3.4:1", "169.254.169.254:2"), 0, DropDestination)
	in(t, e, udp("129.2.3.4:1", "129.2.3.4:2"), 0)
	refused(t, e, Inbound, udp("224.0.0.1:1", "129.2.3.4:2"), 0, DropSource)
	refused(t, e, Inbound, udp("129.2.3.4:1", "255.0.0.1:2"), 0, DropDestination)
}

func TestPrefixMapNeverReachesTheInProcessEndpoint(t *testing.T) {
	p := peerB()
	p.Endpoints = []Endpoint{{ip("10.244.0.77"), ip("10.247.0.1")}}
	e := newEngine(t, Config{Self4: ip("10.244.0.77")}, p)
	refused(t, e, Inbound, udp("10.71.0.5:1", "10.246.0.77:2"), 0, DropDestination)
	in(t, e, udp("10.71.0.5:1", "10.246.0.78:2"), 0)
	if _, v := send(t, e, Inbound, udp("10.71.0.5:1", "10.247.0.1:2"), 0); v.Action != Deliver {
		t.Error(v.Action, v.Drop)
	}
	src, _ := out(t, e, udp("10.244.0.77:3", "10.71.0.5:1"), 0)
	wantEnd(t, src, "10.246.0.0:3")
	b := fault("10.71.0.1", "10.246.0.77", udp("10.246.0.77:2", "10.71.0.5:1"), 28)
	refused(t, e, Inbound, b, 0, DropDestination)
}

func TestPodAddressCanAlsoBeTheNAPTAddress(t *testing.T) {
	p := Peer{ID: "b", RemotePods: pfxs("10.71.0.0/16"), Pods: []Remap{{pfx("10.244.1.1/32"), pfx("10.246.1.1/32")}}}
	e := newEngine(t, Config{}, p)
	src, _ := out(t, e, udp("10.244.1.1:1", "10.71.0.5:2"), 0)
	wantEnd(t, src, "10.246.1.1:1")
	_, dst := in(t, e, udp("10.71.0.5:2", "10.246.1.1:1"), 0)
	wantEnd(t, dst, "10.244.1.1:1")
	out(t, e, udp("192.168.1.1:7", "10.71.0.5:2"), 0)
	_, dst = in(t, e, udp("10.71.0.5:2", "10.246.1.1:7"), 0)
	wantEnd(t, dst, "192.168.1.1:7")
	refused(t, e, Outbound, udp("10.244.1.1:7", "10.71.0.5:2"), 0, DropFlowClash)
}

func TestMSSIsClampedInBothDirections(t *testing.T) {
	p := peerB()
	p.MSS = 1300
	p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
	p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
	e := newEngine(t, Config{}, p)
	for _, c := range []struct {
		dir      Direction
		src, dst string
		want     byte
	}{
		{Outbound, "10.244.1.1", "10.71.0.5", 1300 - 1280}, {Inbound, "10.71.0.5", "10.246.1.1", 1300 - 1280}, // prefix map
		{Outbound, "192.168.1.1", "10.71.0.5", 1300 - 1280}, {Inbound, "10.71.0.5", "10.247.0.9", 1300 - 1280}, // flows
		{Outbound, "fd44::1", "fd71::5", 0}, {Inbound, "fd71::5", "fd46::1", 0},
	} {
		for _, flags := range []uint8{packettest.SYN, packettest.SYN | packettest.ACK} {
			b := packettest.Build(packettest.IP{Src: ip(c.src), Dst: ip(c.dst)}, packettest.TCP{SrcPort: 1, DstPort: 2, Flags: flags, Options: []byte{2, 4, 1460 >> 8, 1460 & 255}})
			got, v := send(t, e, c.dir, b, 0)
			if v.Action != Forward {
				t.Fatal(v.Drop)
			}
			packettest.Check(t, got, packettest.ValidChecksums())
			if o := packettest.MustDecode(got).TCPOptions; o[2] != 1280>>8 || o[3] != c.want {
				t.Errorf("%v %s: MSS %d", c.dir, c.src, int(o[2])<<8+int(o[3]))
			}
		}
	}
}

// A superpacket from the TUN has the sum of the pseudo-header in its checksum field. After NAT the
// field must have the sum of the new pseudo-header.
func TestPartialChecksumsStayPartial(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, tcp("192.168.9.9:4000", "10.71.0.5:80", packettest.SYN), 0) // occupies the port, so that the next flow gets another one
	for _, src := range []string{"10.244.1.1:4000", "192.168.1.1:4000"} {
		var v packet.View
		if err := v.Parse(packettest.Partial(tcp(src, "10.71.0.5:80", packettest.ACK)), packet.ChecksumPartial); err != nil {
			t.Fatal(err)
		}
		if verdict := e.Outbound(&v, 0); verdict.Action != Forward {
			t.Fatal(verdict.Drop)
		}
		packettest.Check(t, v.Bytes(), packettest.PartialChecksum())
	}
}

func TestTraceChangesNothing(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 2}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	in(t, e, udp("10.71.0.5:5", "10.247.0.9:80"), 0)
	_, fragments := datagram("192.168.1.1:9", "10.71.0.5:53", 1)
	before := e.Stats()
	for _, c := range []struct {
		dir  Direction
		b    []byte
		want []string
	}{
		{Outbound, udp("10.244.1.1:1", "10.71.0.5:2"), []string{"peer      b", "prefix map 10.244.0.0/16 -> 10.246.0.0/16", "forward   udp 10.246.1.1:1 > 10.71.0.5:2"}},
		{Inbound, udp("10.71.0.5:2", "10.246.1.1:1"), []string{"prefix map 10.246.0.0/16 -> 10.244.0.0/16", "forward   udp 10.71.0.5:2 > 10.244.1.1:1"}},
		{Outbound, udp("192.168.1.1:4000", "10.71.0.5:53"), []string{"NAPT 192.168.1.1 -> 10.246.0.0", "flow      known", "forward   udp 10.246.0.0:4000 > "}},
		{Outbound, udp("192.168.1.9:4001", "10.71.0.5:53"), []string{"NAPT 192.168.1.9 -> 10.246.0.0", "flow      new", "forward   udp 10.246.0.0:4001 > "}},
		{Outbound, udp("192.168.7.7:80", "10.71.0.5:5"), []string{"endpoint 10.247.0.9 -> 192.168.7.7", "flow      known", "forward   udp 10.247.0.9:80 > "}},
		{Inbound, udp("10.71.0.5:6", "10.247.0.1:80"), []string{"endpoint 10.247.0.1 -> 169.254.0.1", "flow      new", "deliver   udp 10.71.0.5:6 > 169.254.0.1:80"}},
		{Inbound, udp("10.71.0.5:6", "10.247.0.5:80"), []string{"drop      no_mapping: nothing is mapped"}},
		{Inbound, udp("10.9.9.9:6", "10.247.0.5:80"), []string{"drop      no_peer: no peer has this address"}},
		{Outbound, fragments[1], []string{"hold      a fragment that waits"}},
		{Inbound, fault("10.71.0.1", "10.246.0.0", udp("10.246.0.0:4000", "10.71.0.5:53"), 28), []string{"flow      known", "icmp 10.71.0.1 > 192.168.1.1"}},
	} {
		var v packet.View
		parse(t, &v, slices.Clone(c.b))
		s := e.Trace(&v, c.dir, 0).String()
		for _, want := range c.want {
			if !strings.Contains(s, want) {
				t.Errorf("trace lacks %q:\n%s", want, s)
			}
		}
		if string(v.Bytes()) != string(c.b) {
			t.Error("the packet was changed")
		}
	}
	now := e.Stats()
	if now.Flows != before.Flows || now.Bytes != before.Bytes || now.Peers[0].Mappings != before.Peers[0].Mappings || now.Peers[0].Evicted != 0 {
		t.Errorf("before %+v\nafter %+v", before, now)
	}
	for _, d := range Drops() {
		for dir := range directions {
			if n := e.Peers()[0].Drops(dir, d) + now.NoPeerDrops[dir][d]; n != 0 {
				t.Errorf("%v %v counted", dir, d)
			}
		}
	}
}

func TestFlowsReturnsEveryOpenFlow(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	in(t, e, tcp("10.71.0.5:5", "10.247.0.9:80", packettest.SYN), 0)
	established(t, e, "192.168.1.2:1", "10.71.0.5:80", 0)
	in(t, e, tcp("10.71.0.5:80", "10.246.0.0:1", packettest.RST), 0)
	e.Sweep(10 * time.Second)
	flows := e.Flows(10)
	for i := range flows {
		if d := flows[i].Idle - 10*time.Second; d < -time.Second || d > time.Second || flows[i].Left <= 0 {
			t.Errorf("idle %v, left %v", flows[i].Idle, flows[i].Left)
		}
		flows[i].Idle, flows[i].Left = 0, 0
	}
	want := []FlowInfo{
		{Peer: "b", Kind: "napt", Proto: 17, Local: port("192.168.1.1:4000"), Mapped: port("10.246.0.0:4000"), Remote: port("10.71.0.5:53"), State: "half-open"},
		{Peer: "b", Kind: "endpoint", Proto: 6, Local: port("192.168.7.7:80"), Mapped: port("10.247.0.9:80"), Remote: port("10.71.0.5:5"), State: "half-open"},
		{Peer: "b", Kind: "napt", Proto: 6, Local: port("192.168.1.2:1"), Mapped: port("10.246.0.0:1"), Remote: port("10.71.0.5:80"), State: "closing"},
	}
	if !slices.Equal(flows, want) {
		t.Errorf("got  %+v\nwant %+v", flows, want)
	}
	if n := len(e.Flows(2)); n != 2 {
		t.Errorf("%d flows with a limit of two", n)
	}
}

func TestPeerStateAndCountersSurviveRuleChanges(t *testing.T) {
	e := newEngine(t, Config{}, peerB(), peerC())
	b := e.Peers()[0]
	b.CountTraffic(Outbound, 3, 300)
	b.SetDown(true)
	e.Count(b, Inbound, DropTUNWrite)
	e.Count(nil, Outbound, DropMalformed)
	changed := peerB()
	changed.MSS = 1000
	if err := e.SetPeers([]Peer{changed}); err != nil {
		t.Fatal(err)
	}
	if e.Peers()[0] != b || b.ID() != "b" || !b.Down() || b.Drops(Inbound, DropTUNWrite) != 1 || e.Stats().NoPeerDrops[Outbound][DropMalformed] != 1 {
		t.Error("the state of the peer was lost")
	}
	if p, o := b.Traffic(Outbound); p != 3 || o != 300 {
		t.Error(p, o)
	}
	if p, _ := b.Traffic(Inbound); p != 0 {
		t.Error(p)
	}
}

// A packet of a known flow must not allocate memory. A packet that opens a flow may do so only when
// a table grows.
func TestForwardingAndOpeningFlowsDoNotAllocate(t *testing.T) {
	p := peerB()
	p.MSS = 1300
	e := newEngine(t, Config{}, p)
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	check := func(name string, dir Direction, b []byte, prepare func(i int, v *packet.View)) {
		work := slices.Clone(b)
		var v packet.View
		parse(t, &v, work)
		i := 0
		n := testing.AllocsPerRun(1000, func() {
			copy(work, b)
			prepare(i, &v)
			i++
			if dir == Outbound {
				e.Outbound(&v, 0)
			} else {
				e.Inbound(&v, 0)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
	same := func(int, *packet.View) {}
	check("prefix map out", Outbound, udp("10.244.1.1:1", "10.71.0.5:2"), same)
	check("prefix map in", Inbound, udp("10.71.0.5:2", "10.246.1.1:1"), same)
	check("prefix map SYN", Outbound, tcp("10.244.1.1:1", "10.71.0.5:2", packettest.SYN), same)
	check("NAPT hit out", Outbound, udp("192.168.1.1:4000", "10.71.0.5:53"), same)
	check("NAPT hit in", Inbound, udp("10.71.0.5:53", "10.246.0.0:4000"), same)
	check("NAPT insert", Outbound, udp("192.168.1.1:4000", "10.71.0.5:53"), func(i int, v *packet.View) { v.SetDstPort(uint16(i)) })
	check("NAPT insert, new port", Outbound, udp("192.168.1.1:4000", "10.71.0.5:53"), func(i int, v *packet.View) { v.SetSrcPort(uint16(5000 + i)) })
	check("endpoint insert", Inbound, udp("10.71.0.5:53", "10.247.0.9:80"), func(i int, v *packet.View) { v.SetSrcPort(uint16(5000 + i)) })
	check("drop", Inbound, udp("10.71.0.5:53", "10.246.0.0:9"), same)
	check("no peer", Inbound, udp("10.99.0.5:53", "10.246.0.0:9"), same)
	check("ICMP error", Inbound, fault("10.71.0.1", "10.246.0.0", udp("10.246.0.0:4000", "10.71.0.5:53"), 28), same)
}

// This test is for the race detector: packets in both directions, rule changes, sweeps and
// statistics run concurrently. A packet that passes must be translated by the old or the new
// rules, and its checksums must be correct.
func TestConcurrentPacketsRuleChangesAndSweepsStayConsistent(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 300}, peerB(), peerC())
	var done, wg sync.WaitGroup
	stop := make(chan struct{})
	work := func(f func(i int)) {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
					f(i)
				}
			}
		})
	}
	changed := peerB()
	changed.Pods[0].To = pfx("10.248.0.0/16")
	changed.Endpoints[1].Real = ip("192.168.7.8")
	nats := []netip.Addr{ip("10.246.0.0"), ip("10.248.0.0")}
	hosts := []netip.Addr{ip("192.168.7.7"), ip("192.168.7.8")}
	for g := range 2 {
		done.Go(func() {
			tmpl := udp("192.168.1.1:4000", "10.71.0.5:53")
			var v packet.View
			for i := range 20_000 {
				b := slices.Clone(tmpl)
				parse(t, &v, b)
				v.SetSrcPort(uint16(i % 500))
				v.SetSrc4(0xc0a80100 + uint32(g))
				if e.Outbound(&v, time.Duration(i)*time.Millisecond).Action != Forward {
					continue
				}
				if !slices.Contains(nats, v.Src()) || !v.ValidChecksums() {
					t.Errorf("left as %v", v.Src())
				}
				at := netip.AddrPortFrom(v.Src(), v.SrcPort()).String()
				parse(t, &v, udp("10.71.0.5:53", at))
				if e.Inbound(&v, 0).Action == Forward && (v.Dst() != ip("192.168.1.0") && v.Dst() != ip("192.168.1.1") || !v.ValidChecksums()) {
					t.Errorf("came back to %v", v.Dst())
				}
			}
		})
	}
	done.Go(func() {
		tmpl := udp("10.71.0.5:4000", "10.247.0.9:53")
		_, fragments := datagram("192.168.1.9:4000", "10.71.0.5:53", 1)
		var v packet.View
		for i := range 20_000 {
			parse(t, &v, slices.Clone(tmpl))
			v.SetSrcPort(uint16(i % 1000))
			if e.Inbound(&v, 0).Action == Forward && !slices.Contains(hosts, v.Dst()) {
				t.Errorf("went to %v", v.Dst())
			}
			if i%10 == 0 {
				parse(t, &v, slices.Clone(fragments[i/10%3]))
				e.Outbound(&v, 0)
			}
		}
	})
	work(func(i int) {
		peers := [][]Peer{{peerB(), peerC()}, {changed}, {peerC(), changed}}
		if err := e.SetPeers(peers[i%3]); err != nil {
			t.Error(err)
		}
		time.Sleep(200 * time.Microsecond)
	})
	work(func(i int) { e.Sweep(time.Duration(i) * 10 * time.Millisecond); time.Sleep(100 * time.Microsecond) })
	work(func(int) { e.Stats(); e.Flows(100); time.Sleep(100 * time.Microsecond) })
	work(func(int) {
		var v packet.View
		parse(t, &v, udp("192.168.1.77:4000", "10.71.0.5:53"))
		e.Trace(&v, Outbound, 0)
		time.Sleep(100 * time.Microsecond)
	})
	done.Wait()
	close(stop)
	wg.Wait()
	e.checkTables(t)
	if s := e.Stats(); s.Flows > 300+2 {
		t.Errorf("%d flows", s.Flows)
	}
	if err := e.SetPeers(nil); err != nil {
		t.Fatal(err)
	}
	if n := e.total.Load(); n != 0 {
		t.Errorf("%d flows without a peer", n)
	}
}

// checkTables checks the consistency of all tables: each flow must be in both indexes, each mapping
// must be counted correctly, and the tables must contain nothing else.
func (e *Engine) checkTables(t testing.TB) {
	t.Helper()
	total := 0
	for _, p := range e.Peers() {
		f := &p.flows
		live := 0
		queued := f.checkQueues(t)
		refs := map[mapping]int{}
		flows := [2]map[uint32]uint32{{}, {}} // number of flows by host
		f.each(func(i uint32, en *entry, word uint64) {
			live++
			for dir := range directions {
				k := en.keyAt(dir)
				if m, ok := f.find(dir, &k); !ok || m.index != i {
					t.Errorf("flow %d cannot be found %v", i, dir)
				}
			}
			kind, h := kindOf(word), f.side(i).host
			flows[kind][h]++
			out, in := en.keyAt(Outbound), en.keyAt(Inbound)
			owner := out.near
			if kind == endpointFlow {
				owner = out.remote
			}
			if f.hosts[kind].addr(h) != owner || f.hosts[kind].find(owner) != h {
				t.Errorf("flow %d of %v has host %+v", i, owner.netip(), f.hosts[kind].at(h))
			}
			if class := classOf(protoOf(word), owner.is4()); kind == naptFlow && class != noPorts {
				m := mapping{host: h, port: out.nearPort(Outbound), use: uint32(class)}
				refs[m]++
				if n := f.napt.find(h, m.port, class); n == 0 || f.napt.mappings.at(n).mapped != in.nearPort(Inbound) {
					t.Errorf("flow %d has mapping %d", i, n)
				}
			}
			// Only a TCP flow may be half-open and not yet queued: after a close or a reopening,
			// the next sweep queues it.
			if queued[i] != (word&stateQueued != 0) || halfOpen(word) && !queued[i] && protoOf(word) != packet.TCP {
				t.Errorf("flow %d is half-open: %v, in the queues: %v, marked so: %v", i, halfOpen(word), queued[i], word&stateQueued != 0)
			}
			delete(queued, i)
		})
		if live != int(f.live.Load()) || len(refs) != f.napt.live || len(queued) != 0 {
			t.Errorf("%d flows and %d mappings, counted %d and %d; %d dead ones in the queues", live, len(refs), f.live.Load(), f.napt.live, len(queued))
		}
		ports := 0
		for m, n := range refs {
			if got := f.napt.mappings.at(f.napt.find(m.host, m.port, m.class())); int(got.use/oneFlow) != n {
				t.Errorf("mapping %+v has %d flows", got, n)
			}
		}
		for family := range f.napt.ports {
			for _, set := range f.napt.ports[family] {
				if set == nil {
					continue
				}
				bitsSet := 0
				for _, w := range set.taken {
					bitsSet += bits.OnesCount64(w)
				}
				if ports += bitsSet; set.inUse() != bitsSet {
					t.Errorf("%d ports in use, counted %d", bitsSet, set.inUse())
				}
			}
		}
		if ports != f.napt.live {
			t.Errorf("%d ports for %d mappings", ports, f.napt.live)
		}
		for kind := range f.hosts {
			hosts, full := &f.hosts[kind], 0
			for h, n := range flows[kind] {
				if hosts.at(h).flows != n {
					t.Errorf("host %+v has %d flows", hosts.at(h), n)
				}
				if n >= hosts.quota {
					full++
				}
			}
			if hosts.live != len(flows[kind]) || hosts.full != full {
				t.Errorf("%d hosts, %d at their quota; counted %d and %d", len(flows[kind]), full, hosts.live, hosts.full)
			}
		}
		for dir := range f.index {
			n := 0
			for i := range f.index[dir].filling {
				s := &f.index[dir].filling[i]
				n += s.live
				if list := f.index[dir].slots[i].Load(); list != nil {
					filled := 0
					for j := range list.list {
						if list.list[j] != 0 {
							filled++
						}
					}
					if filled != s.filled {
						t.Errorf("shard %d has %d filled slots, counted %d", i, filled, s.filled)
					}
				}
			}
			if n != live {
				t.Errorf("index %d has %d slots for %d flows", dir, n, live)
			}
		}
		total += live
	}
	if total != int(e.total.Load()) {
		t.Errorf("%d flows, counted %d", total, e.total.Load())
	}
}

// checkQueues returns the flows in the peer's queues. It checks that the queues of the peer's hosts
// contain the same flows in the same order.
func (t *flowTable) checkQueues(tb testing.TB) map[uint32]bool {
	tb.Helper()
	walk := func(head uint32, which int) (list []uint32) {
		for at := head; at != 0; at = t.link(at-1, which).next {
			if list = append(list, at-1); len(list) > int(t.used) {
				tb.Fatal("a queue is circular")
			}
		}
		return list
	}
	queued := map[uint32]bool{}
	byHost := [2]map[uint32][]uint32{{}, {}}
	var waiting []uint32
	for n := range t.waiting {
		list := walk(t.waiting[n].head, queueOfPeer)
		for at, i := range list {
			if e := t.entry(i); t.queueFor(e, e.word.Load()) != &t.waiting[n] || at > 0 && *t.order(i) <= *t.order(list[at-1]) {
				tb.Errorf("flow %d is in queue %d, or out of order", i, n)
			}
		}
		waiting = append(waiting, list...)
	}
	slices.SortFunc(waiting, func(i, j uint32) int { return cmp.Compare(*t.order(i), *t.order(j)) })
	for _, i := range waiting {
		queued[i] = true
		kind, h := kindOf(t.entry(i).word.Load()), t.side(i).host
		byHost[kind][h] = append(byHost[kind][h], i)
	}
	for kind := range t.hosts {
		for n := range t.hosts[kind].hosts.used {
			h := t.hosts[kind].at(n + 1)
			want := byHost[kind][n+1]
			list := walk(h.head, queueOfHost)
			if len(list) != int(h.flows) || len(list) < len(want) || !slices.Equal(list[:len(want)], want) {
				tb.Errorf("host %d has %v in its list and counts %d, want %v in front", n+1, list, h.flows, want)
			}
			switch {
			case len(list) == 0:
			case t.link(list[0], queueOfHost).prev != list[len(list)-1]+1:
				tb.Errorf("host %d does not know its last flow", n+1)
			case len(want) == 0 && h.queued != 0 || len(want) > 0 && h.queued != want[len(want)-1]+1:
				tb.Errorf("host %d has %d as its last that waits, want that of %v", n+1, h.queued, want)
			}
		}
	}
	return queued
}

// A slot contains only 32 bits of the hash, so a lookup must compare the tuple.
func TestLookupComparesTheWholeTuple(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	entry := e.Peers()[0].flows.entry(0)
	for dir := range directions {
		right := entry.keyAt(dir)
		if m := (match{entry: entry}); !m.read(dir, &right) {
			t.Errorf("%v: %+v is not found", dir, right)
		}
		for i, change := range []func(k *key){
			func(k *key) { k.near.hi ^= 1 }, func(k *key) { k.near.lo ^= 1 }, func(k *key) { k.remote.hi ^= 1 }, func(k *key) { k.remote.lo ^= 1 },
			func(k *key) { k.word ^= 1 << nearShift[dir] }, func(k *key) { k.word ^= 1 << remoteShift }, func(k *key) { k.word ^= 1 << protoShift },
		} {
			wrong := right
			change(&wrong)
			if m := (match{entry: entry}); m.read(dir, &wrong) {
				t.Errorf("%v: change %d does not matter", dir, i)
			}
		}
		entry.seq.Add(1)
		if m := (match{entry: entry}); m.read(dir, &right) {
			t.Errorf("%v: an entry that is being written is found", dir)
		}
		entry.seq.Add(1)
	}
}

// TestTableStaysConsistentUnderRandomFlows opens, expires and evicts flows at random for a while.
func TestTableStaysConsistentUnderRandomFlows(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 5000, MaxFlowsPerHost: 5000}, peerB())
	var v packet.View
	tmpl := udp("192.168.1.1:4000", "10.71.0.5:53")
	for i := range 200_000 {
		parse(t, &v, slices.Clone(tmpl))
		x := uint32(i) * 2654435761
		v.SetSrcPort(uint16(x>>8)%2000 + 1)
		v.SetDstPort(uint16(x >> 20))
		now := time.Duration(i) * 20 * time.Millisecond // the bound is reached after 100 s
		if i >= 100_000 {
			now += time.Duration(i-100_000) * 100 * time.Millisecond // slower, so that flows expire before the bound is reached
		}
		e.Outbound(&v, now)
		if i%1000 == 0 {
			e.Sweep(now)
		}
	}
	e.checkTables(t)
	s := e.Stats().Peers[0]
	if s.Evicted == 0 || s.Expired == 0 || s.Flows > 5000 {
		t.Errorf("%+v", s)
	}
}
