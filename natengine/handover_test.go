package natengine_test

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// A flowCopy is the knowledge of a follower: flows by peer and identity.
type flowCopy map[string]map[natengine.Flow]natengine.Flow

func (c flowCopy) report(peer string, f natengine.Flow, ended bool) {
	if c[peer] == nil {
		c[peer] = map[natengine.Flow]natengine.Flow{}
	}
	if id, state := f.Identity(); ended {
		delete(c[peer], id)
	} else {
		c[peer][id] = id.In(state)
	}
}

// summaries counts the flows of an engine by the fields that determine the translation of the next
// packet.
func summaries(e *natengine.Engine) map[string]int {
	all := map[string]int{}
	for _, f := range e.Flows(1 << 20) {
		all[fmt.Sprint(identityOf(f), f.Query, f.Kind, f.State == "established")]++
	}
	return all
}

// Random traffic passes through an engine. Another engine that adopts its flows must have the
// same flows and treat the next packet of each in the same way.
func TestAdoptedFlowsContinueInAnotherEngine(t *testing.T) {
	adopted, established := 0, 0
	for round := range 60 {
		rng := rand.New(rand.NewPCG(26, uint64(round)))
		config := natengine.Config{Timeouts: oddTimeouts, RandomPorts: round%2 == 0, Self6: netip.MustParseAddr("fd00::1")}
		if round%5 == 4 {
			config.MaxFlows, config.MaxFlowsPerHost = 40, 6
		}
		rules := modelPeers(command{cmdRules, 16})
		e := natengine.New(config)
		if err := e.SetPeers(rules); err != nil {
			t.Fatal(err)
		}
		m, now, have := newModel(0), time.Duration(0), flowCopy{}
		commands := randomCommands(rng, 2000)
		begin := rng.IntN(len(commands) / 2)
		for i, c := range commands {
			if i == begin {
				defer e.Follow(have.report)()
				e.EachFlow(func(peer string, f natengine.Flow) { have.report(peer, f, false) }, func() bool { return true })
			}
			switch {
			case c[0] >= cmdSend:
				burst(e, m, c, now)
			case c[0] == cmdSweep:
				e.Sweep(now)
			case c[0] == cmdRules && i < begin:
				if peers := modelPeers(c); e.SetPeers(peers) == nil {
					rules = peers
				}
			default:
				now += time.Duration(c[1]) * time.Second / 4
			}
		}
		e.Sweep(now)

		other := natengine.New(config)
		if err := other.SetPeers(rules); err != nil {
			t.Fatal(err)
		}
		for peer, flows := range have {
			for _, f := range slices.SortedFunc(maps.Values(flows), func(a, b natengine.Flow) int {
				return bytes.Compare(b.Append(nil), a.Append(nil)) // not the order in which they were opened
			}) {
				f = natengine.FlowFrom(f.Append(nil))
				if opened, drop := other.Adopt(peer, f, now); !opened || drop != natengine.DropNone {
					t.Errorf("round %d: a flow of %s is not adopted: %v", round, peer, drop)
				}
				if opened, drop := other.Adopt(peer, f, now); opened || drop != natengine.DropNone {
					t.Errorf("round %d: a flow of %s is adopted twice: %v, %v", round, peer, opened, drop)
				}
				adopted++
			}
		}
		other.Sweep(now)
		if got, want := summaries(other), summaries(e); !maps.Equal(got, want) {
			for _, both := range []map[string]int{got, want} {
				maps.DeleteFunc(both, func(f string, n int) bool { return got[f] == want[f] })
			}
			t.Fatalf("round %d: adopted %v, want %v", round, got, want)
		}
		for _, f := range e.Flows(1 << 20) {
			if f.State == "established" {
				established++
			}
			for _, b := range next(f) {
				if got, want := through(other, f, b, now), through(e, f, b, now); got != want {
					t.Errorf("round %d: the next packet of %v becomes %s, want %s", round, identityOf(f), got, want)
				}
			}
		}
		var r recorder
		other.CheckTables(&r)
		if len(r.failed) > 0 {
			t.Errorf("round %d: %s", round, strings.Join(r.failed, "\n"))
		}
	}
	if t.Logf("%d flows adopted, %d established", adopted, established); adopted < 1000 || established < 100 {
		t.Error("too few to tell")
	}
}

// next returns a next packet of the flow for each direction. It returns none for an ICMP query.
func next(f natengine.FlowInfo) (both [2][]byte) {
	for dir, ends := range [2][2]netip.AddrPort{{f.Local, f.Remote}, {f.Remote, f.Mapped}} {
		var body packettest.Body
		switch src, dst := ends[0].Port(), ends[1].Port(); f.Proto {
		case packet.TCP:
			body = packettest.TCP{SrcPort: src, DstPort: dst, Flags: packettest.ACK}
		case packet.UDP:
			body = packettest.UDP{SrcPort: src, DstPort: dst}
		default:
			continue
		}
		both[dir] = packettest.Build(packettest.IP{Src: ends[0].Addr(), Dst: ends[1].Addr()}, body)
	}
	return both
}

// through sends a packet through the engine and returns the result as text. The packet is
// outbound if its source is our end.
func through(e *natengine.Engine, f natengine.FlowInfo, b []byte, now time.Duration) string {
	if b == nil {
		return ""
	}
	var v packet.View
	if err := v.Parse(slices.Clone(b), packet.ChecksumComplete); err != nil {
		return err.Error()
	}
	verdict := e.Inbound
	if packettest.MustDecode(b).Src == f.Local.Addr() && packettest.MustDecode(b).Dst == f.Remote.Addr() {
		verdict = e.Outbound
	}
	got := verdict(&v, now)
	return fmt.Sprintf("%v %v %x", got.Action, got.Drop, v.Bytes())
}

func TestAdoptRefusesImpossibleFlows(t *testing.T) {
	config := natengine.Config{MaxFlows: 10}
	engine := func(peers ...natengine.Peer) *natengine.Engine {
		e := natengine.New(config)
		if err := e.SetPeers(peers); err != nil {
			t.Fatal(err)
		}
		return e
	}
	peer := natengine.Peer{ID: "b", RemotePods: []netip.Prefix{netip.MustParsePrefix("10.71.0.0/16")},
		Pods: []natengine.Remap{remapOf("10.244.0.0/16", "10.246.0.0/16")}}
	e := engine(peer)
	var flow natengine.Flow
	defer e.Follow(func(_ string, f natengine.Flow, _ bool) { flow = f })()
	open := func(e *natengine.Engine, host, remote string) {
		var v packet.View
		b := packettest.Build(packettest.IP{Src: netip.MustParseAddr(host), Dst: netip.MustParseAddr(remote)}, packettest.UDP{SrcPort: 5000, DstPort: 53})
		if err := v.Parse(b, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		if verdict := e.Outbound(&v, 0); verdict.Action != natengine.Forward {
			t.Fatal(verdict.Drop)
		}
	}
	open(e, "192.168.1.1", "10.71.0.5")
	there, full, clash, taken, elsewhere := engine(peer), engine(peer), engine(peer), engine(peer), peer
	open(there, "192.168.1.1", "10.71.0.5")
	for i := range 9 {
		open(there, fmt.Sprintf("192.168.2.%d", i), "10.71.0.6")
	}
	for i := range 10 {
		open(full, fmt.Sprintf("192.168.2.%d", i), "10.71.0.6")
	}
	open(clash, "192.168.2.1", "10.71.0.6") // this flow keeps its port, so the adopted flow's port is occupied
	open(clash, "192.168.1.1", "10.71.0.5")
	open(taken, "192.168.2.1", "10.71.0.6")
	elsewhere.Pods = []natengine.Remap{remapOf("10.244.0.0/16", "10.248.0.0/16")}
	config.MaxFlowsPerHost = 1
	quota := engine(peer)
	open(quota, "192.168.1.1", "10.71.0.6")
	broken := flow.Append(nil)
	broken[16+15] ^= 1 // changes the mapped address
	for _, c := range []struct {
		what string
		e    *natengine.Engine
		peer string
		flow natengine.Flow
		want natengine.Drop
	}{
		{"no such peer", engine(peer), "c", flow, natengine.DropNoPeer},
		{"another network", engine(elsewhere), "b", flow, natengine.DropNoFlow},
		{"another address", engine(peer), "b", natengine.FlowFrom(broken), natengine.DropNoFlow},
		{"no room", full, "b", flow, natengine.DropFlowTableFull},
		{"another host has the port", taken, "b", flow, natengine.DropPortsExhausted},
		{"the host is at its quota", quota, "b", flow, natengine.DropHostQuota},
		{"the flow exists with another port", clash, "b", flow, natengine.DropFlowClash},
		{"the flow exists and the table is full", there, "b", flow, natengine.DropNone},
		{"a valid flow", engine(peer), "b", flow, natengine.DropNone},
	} {
		before := c.e.Stats().Flows
		opened, got := c.e.Adopt(c.peer, c.flow, 0)
		if got != c.want {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
		if n := c.e.Stats().Flows - before; n != map[bool]int{true: 1}[c.e != there && c.want == natengine.DropNone] || opened != (n == 1) {
			t.Errorf("%s: %d flows more, adopted: %v", c.what, n, opened)
		}
		c.e.CheckTables(t)
	}
}

// The input is decoded as a flow. For any octets, the tables must stay consistent, and an
// adopted flow must be reported to followers unchanged.
func FuzzAdopt(f *testing.F) {
	rules := modelPeers(command{cmdRules, 16})
	e := natengine.New(natengine.Config{})
	if err := e.SetPeers(rules); err != nil {
		f.Fatal(err)
	}
	m := newModel(0)
	for _, c := range randomCommands(rand.New(rand.NewPCG(1, 1)), 300) {
		if c[0] >= cmdSend {
			burst(e, m, c, 0)
		}
	}
	e.EachFlow(func(peer string, flow natengine.Flow) {
		f.Add(slices.IndexFunc(rules, func(p natengine.Peer) bool { return p.ID == peer }), flow.Append(nil))
	}, func() bool { return true })
	f.Fuzz(func(t *testing.T, peer int, b []byte) {
		if peer < 0 || peer >= len(rules) {
			return
		}
		e := natengine.New(natengine.Config{})
		if err := e.SetPeers(rules); err != nil {
			t.Fatal(err)
		}
		var reported []byte
		defer e.Follow(func(_ string, flow natengine.Flow, _ bool) { reported = flow.Append(reported) })()
		var want []byte
		for ; len(b) >= natengine.FlowSize; b = b[natengine.FlowSize:] {
			if opened, _ := e.Adopt(rules[peer].ID, natengine.FlowFrom(b), 0); opened {
				want = append(want, b[:natengine.FlowSize]...)
			}
		}
		if !bytes.Equal(reported, want) {
			t.Errorf("reported %x, want %x", reported, want)
		}
		e.CheckTables(t)
		e.Sweep(3 * time.Hour)
		if n := e.Stats().Flows; n != 0 {
			t.Errorf("%d flows are left", n)
		}
	})
}
