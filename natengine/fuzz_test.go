package natengine

import (
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// fuzzRules are rule sets in which everything can happen: remapped or not, coinciding ranges, pods as endpoints, wide and
// single-address prefixes, both families.
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

// FuzzEngine feeds the engine a string of packets: rule set, then direction and length in front of each. Whatever they
// are, it must not panic; what it discards is untouched; what it forwards is of the same length and parses, goes to or
// comes from an address of the peer, shows our end only as the rules allow, has right checksums if it had them before,
// and where there is an ICMP error quotes our end as its header shows it.
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
	if trace.Action != got.Action || trace.Drop != got.Drop {
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
	if before.ValidChecksums() != v.ValidChecksums() {
		t.Fatalf("checksums were valid: %v, and are: %v\n%x\n%x", before.ValidChecksums(), v.ValidChecksums(), before.Bytes(), v.Bytes())
	}
	if before.TTL() != v.TTL() || before.Len() != v.Len() || before.Proto() != v.Proto() {
		t.Fatal("more changed than addresses and ports")
	}
	judgeForwarded(t, e, peers, dir, &v, got.Action)
}

// judgeForwarded checks what may leave, from the rules alone.
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
	if dir == Inbound && !allowed { // then there is a flow that one of ours began
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
