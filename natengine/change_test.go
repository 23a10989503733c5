package natengine

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
)

// Peers are added, changed and removed at random. An engine that applied each change must give
// the same verdicts as a new engine with all peers. No table may change after it is published.
func TestEngineAfterChangesEqualsANewEngineWithAllPeers(t *testing.T) {
	rng := rand.New(rand.NewPCG(14, 1))
	network := func() netip.Prefix {
		if rng.IntN(6) == 0 {
			a := netip.AddrFrom16([16]byte{0xfd, 0, 0, byte(rng.IntN(8)), 15: byte(rng.IntN(2))})
			return netip.PrefixFrom(a, []int{28, 32, 64, 80, 127, 128}[rng.IntN(6)]).Masked()
		}
		a := netip.AddrFrom4([4]byte{byte(11 + rng.IntN(3)), byte(rng.IntN(8)), byte(rng.IntN(8)), byte(rng.IntN(8))})
		return netip.PrefixFrom(a, []int{9, 15, 16, 17, 20, 24, 25, 31, 32}[rng.IntN(9)]).Masked()
	}
	random := func(id string) Peer {
		p := peerB()
		p.ID, p.MSS, p.MTU = id, uint16(1300+rng.IntN(2)), uint16(1400+rng.IntN(2))
		p.RemotePods, p.RemoteExternal = nil, nil
		for range rng.IntN(3) {
			p.RemotePods = append(p.RemotePods, network())
		}
		if rng.IntN(3) == 0 {
			p.RemoteExternal = append(p.RemoteExternal, network())
		}
		return p
	}
	var addrs []netip.Addr // first and last addresses of networks, and their neighbours
	ask := func(p Peer) {
		for _, net := range slices.Concat(p.RemotePods, p.RemoteExternal) {
			first := net.Addr()
			addrs = append(addrs, first, first.Prev(), first.Next())
		}
		if len(addrs) > 300 {
			addrs = addrs[len(addrs)-300:]
		}
	}
	type answer struct {
		id      string
		out, in map4
		out6    map6
		mss     uint16
		pods    bool
		guarded bool
		spec    Peer
	}
	answers := func(table *ruleTable) (all []answer) {
		for _, a := range addrs {
			var says answer
			if r := table.remote(a); r != nil {
				says = answer{r.peer.id, r.out, r.in, r.out6, r.mss, r.pods, r.guarded, r.rule.spec}
			}
			all = append(all, says)
		}
		return all
	}
	e, now := New(Config{}), make(map[string]Peer)
	refused, taken := 0, 0
	for step := range 3000 {
		next := make(map[string]Peer)
		for id, p := range now {
			next[id] = p
		}
		var changed []Peer
		var removed []string
		for range 1 + rng.IntN(3) {
			id := fmt.Sprint("peer", rng.IntN(12))
			if slices.Contains(removed, id) || slices.ContainsFunc(changed, func(p Peer) bool { return p.ID == id }) {
				continue
			}
			old, found := now[id]
			switch rng.IntN(5) {
			case 0:
				removed = append(removed, id)
				delete(next, id)
				continue
			case 1: // only networks that do not exist, or all networks of a peer that is removed
				if other := fmt.Sprint("peer", rng.IntN(12)); found && other != id && !slices.Contains(removed, other) && !slices.ContainsFunc(changed, func(p Peer) bool { return p.ID == other }) {
					old.RemotePods, old.RemoteExternal = now[other].RemotePods, now[other].RemoteExternal
					removed = append(removed, other)
					delete(next, other)
				}
				old.ID, old.MSS = id, 1200
				next[id] = old
			default:
				next[id] = random(id)
			}
			ask(next[id])
			changed = append(changed, next[id])
		}
		before := e.rules.Load()
		was := answers(before)
		err := e.Change(changed, removed)
		reference := New(Config{})
		var all []Peer
		for _, p := range next {
			all = append(all, p)
		}
		if wrong := reference.SetPeers(all); (wrong == nil) != (err == nil) {
			t.Fatalf("step %d: %v, and of all at once %v", step, err, wrong)
		}
		if !reflect.DeepEqual(answers(before), was) {
			t.Fatalf("step %d: a table has changed that was published", step)
		}
		if err != nil {
			refused++
			if e.rules.Load() != before {
				t.Fatalf("step %d: refused, and changed something", step)
			}
			continue
		}
		taken++
		now = next
		table := e.rules.Load()
		if got, want := answers(table), answers(reference.rules.Load()); !reflect.DeepEqual(got, want) {
			t.Fatalf("step %d:\n%+v\nwant\n%+v", step, got, want)
		}
		got, want := e.Stats(), reference.Stats()
		for i := range got.Peers {
			got.Peers[i].Bytes, want.Peers[i].Bytes = 0, 0
		}
		got.Bytes, want.Bytes = 0, 0
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("step %d:\n%+v\nwant\n%+v", step, got, want)
		}
		if len(e.peers) != len(table.rules) || table.taken.Size() != reference.rules.Load().taken.Size() {
			t.Fatalf("step %d: %d peers of %d, %d networks", step, len(e.peers), len(table.rules), table.taken.Size())
		}
		for _, r := range table.rules {
			if e.peers[r.spec.ID] != r.peer || r.peer.rule != r {
				t.Fatalf("step %d: %s has another rule", step, r.spec.ID)
			}
		}
	}
	if refused < 100 || taken < 100 {
		t.Errorf("%d changes were refused and %d accepted: too few for a test", refused, taken)
	}
}

// Hosts on the underlay can change the path MTU of a peer at any time. Such a change must not cost
// a flow or a fragment.
func TestMTUChangeKeepsFlowsAndFragments(t *testing.T) {
	p := peer46()
	p.MSS, p.MTU = 1360, 1400
	e := newEngine(t, Config{}, p)
	_, outbound := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	_, waiting := datagram("192.168.1.1:4001", "10.71.0.5:53", 78)
	_, inbound := datagram("10.71.0.5:4000", "10.246.1.1:53", 77)
	left, _ := sendAll(t, e, Outbound, outbound, []int{0}, 0)
	sendAll(t, e, Outbound, waiting, []int{2}, 0)
	sendAll(t, e, Inbound, inbound, []int{0, 2}, 0)
	before := e.Stats().Peers[0]

	p.MSS, p.MTU = 1240, 1280
	if e.Peers()[0].setRule(newRule(p, e.Peers()[0], e.self)) {
		t.Error("flows are looked at")
	}
	if err := e.Change([]Peer{p}, nil); err != nil {
		t.Fatal(err)
	}
	if s := e.Stats().Peers[0]; s.Flows != 1 || s.Purged != 0 || s.FragmentSets != before.FragmentSets || s.FragmentBytes != before.FragmentBytes {
		t.Errorf("before %+v\nafter %+v", before, s)
	}
	more, held := sendAll(t, e, Outbound, outbound, []int{2, 1}, 0)
	if reassembled(t, append(left, more...)); held != 0 {
		t.Errorf("%d fragments wait again", held)
	}
	left, _ = sendAll(t, e, Outbound, waiting, []int{0, 1}, 0)
	reassembled(t, left)
	left, _ = sendAll(t, e, Inbound, inbound, []int{1}, 0)
	reassembled(t, left)
}

// Between the steps the lock must be free, so that every peer, including the changed one, can open
// flows.
func TestRuleChangeEndsFlowsInSteps(t *testing.T) {
	const flows = 5 * chunkSize
	e := newEngine(t, Config{MaxFlows: 2 * flows, MaxFlowsPerPeer: 2 * flows, MaxFlowsPerHost: 2 * flows}, peerB(), peerC())
	for i := range flows {
		in(t, e, udp(fmt.Sprintf("10.71.0.5:%d", 1000+i), "10.247.0.9:80"), 0)
	}
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0) // permitted by both rules
	b := e.Peers()[0]
	changed := peerB()
	changed.Endpoints = changed.Endpoints[:1]
	r := newRule(changed, b, e.self)
	if !b.setRule(r) {
		t.Fatal("no flow is looked at")
	}
	steps, last := 0, int64(flows)
	b.flows.purge(r, func() {
		steps++
		if !b.flows.mu.TryLock() {
			t.Fatal("the lock is held between two steps")
		}
		b.flows.mu.Unlock()
		if live := b.flows.live.Load(); last-live > purgeStep {
			t.Errorf("%d flows ended in one step", last-live)
		}
		out(t, e, udp(fmt.Sprintf("192.168.1.2:%d", 5000+steps), "10.71.0.5:53"), 0)
		out(t, e, udp(fmt.Sprintf("192.168.1.2:%d", 5000+steps), "10.73.0.5:53"), 0)
		last = b.flows.live.Load()
	})
	if s := e.Stats().Peers; steps < flows/purgeStep || s[0].Flows != 1+steps || s[1].Flows != steps || s[0].Purged != flows {
		t.Errorf("%d steps: %+v", steps, s)
	}
	e.checkTables(t)
}

// BenchmarkChange changes one of many peers, and adds and removes one.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{10, 100, 1000, 4000} {
		var peers []Peer
		for i := range n + 1 {
			p := peerB()
			p.ID, p.MSS = fmt.Sprintf("peer%05d", i), 1400
			p.RemotePods = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 4), byte(i << 4), 0}), 20)}
			p.RemoteExternal = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(64 + i>>8), byte(i), 0}), 24)}
			peers = append(peers, p)
		}
		e := New(Config{})
		if err := e.SetPeers(peers[:n]); err != nil {
			b.Fatal(err)
		}
		try := func(err error) {
			if err != nil {
				b.Fatal(err)
			}
		}
		b.Run(fmt.Sprintf("MSS/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				peers[n/2].MSS ^= 16
				try(e.Change(peers[n/2:n/2+1], nil))
			}
		})
		b.Run(fmt.Sprintf("ComesAndGoes/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				try(e.Change(peers[n:], nil))
				try(e.Change(nil, []string{peers[n].ID}))
			}
		})
		b.Run(fmt.Sprintf("AllAgain/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				try(e.SetPeers(peers[:n]))
			}
		})
	}
}
