package rtnl

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "github.com/isthmus-net/isthmus/internal/kernel" //nolint:revive // nearly every line uses the package
)

// refusals returns refusing routes for n networks, and the rule for their table.
func refusals(n int) (s State) {
	for i := range n {
		s.Routes = append(s.Routes, Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 64, byte(i), 0}), 24), Type: Unreachable, Table: RefuseTable,
			Metric: UnreachableMetric, Protocol: NodeProtocol})
	}
	s.Rules = []Rule{{Priority: RefuseRulePriority, Table: RefuseTable, Protocol: NodeProtocol}}
	return s
}

// Events of our own changes, and of pods' links, routes and addresses, cause no comparison. Events
// of foreign changes to our objects do.
func TestEventsOfOwnChangesAndOfPodsAreIgnored(t *testing.T) {
	n := open(t, RouteAgent)
	var events *os.File
	if err := Do(n.f, func() (err error) { events, err = subscribe(unix.NETLINK_ROUTE, groups...); return err }); err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	// seen reads the events up to that of a marker route, which it adds, and returns the combined
	// result of concerns.
	buf, number := make([]byte, 1<<16), 0
	seen := func() (stale, wakes bool) {
		t.Helper()
		number++
		mark := []byte{10, 250, byte(number), 0}
		n.run("ip route add blackhole " + netip.AddrFrom4([4]byte(mark)).String() + "/24 proto 4")
		_ = events.SetReadDeadline(time.Now().Add(time.Minute))
		for {
			size, err := events.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			s, w := n.k.concerns(Host, buf[:size])
			stale, wakes = stale || s, wakes || w
			if strings.Contains(string(buf[:size]), string(mark)) {
				return stale, wakes
			}
		}
	}
	n.run("ip link add under type bridge")
	n.run("ip addr add 172.30.0.1/16 dev under")
	n.run("ip link set under up")
	if _, _, err := n.k.DeviceOf(netip.MustParseAddr("172.30.0.1")); err != nil {
		t.Fatal(err)
	}
	seen()
	n.apply(refusals(3))
	n.apply(refusals(5))
	n.apply(refusals(2))
	if stale, wakes := seen(); stale || wakes {
		t.Errorf("our own changes: stale %v, wakes %v", stale, wakes)
	}
	overlay := refusals(2)
	overlay.Devices = []Device{{Name: OverlayDevice, VXLAN: VXLAN{ID: OverlayID, Port: OverlayPort}}}
	overlay.Links = []Link{{Name: OverlayDevice, MAC: MAC{0x66, 1}, MTU: 1400, Up: true}}
	// Package fabric makes this setting, too. Without it, the kernel would give the device a
	// link-local address, and send an event a second or more later, when duplicate address
	// detection ends.
	overlay.Settings = []Setting{{Path: "net/ipv6/conf/" + OverlayDevice + "/addr_gen_mode", Value: "1"}}
	gateway := func(mac byte, at string) State {
		s := overlay
		s.FDB = []FDBEntry{{Dev: OverlayDevice, MAC: MAC{0x66, mac}, Dst: netip.MustParseAddr(at)}}
		s.Neighbors = []Neighbor{{Dev: OverlayDevice, Addr: netip.MustParseAddr("192.0.0.8"), MAC: MAC{0x66, mac}}}
		return s
	}
	n.apply(gateway(2, "10.244.2.254"))
	seen() // skip the events of making a device
	for _, s := range []State{gateway(3, "10.244.3.254"), gateway(3, "10.244.4.254"), overlay, gateway(2, "10.244.2.254")} {
		n.apply(s)
		if stale, wakes := seen(); stale || wakes {
			t.Errorf("our own changes of neighbours: stale %v, wakes %v", stale, wakes)
		}
	}
	for _, c := range []struct {
		command      string
		stale, wakes bool
	}{
		{"bridge fdb replace 66:02:00:00:00:00 dev isthmus.vxlan dst 10.244.9.9 self permanent", true, true},
		{"bridge fdb replace 66:02:00:00:00:00 dev isthmus.vxlan dst 10.244.2.254 self permanent", false, false}, // the entry has this value already
		{"bridge fdb del 66:02:00:00:00:00 dev isthmus.vxlan self", true, true},
		{"ip neigh replace 192.0.0.8 lladdr 66:09:00:00:00:00 dev isthmus.vxlan nud permanent", true, true},
		{"ip neigh del 192.0.0.8 dev isthmus.vxlan", true, true},
		{"ip link add pod type veth peer name podp", false, false},
		{"ip link set pod up", false, false},
		{"ip link set podp up", false, false},
		{"ip route add 10.244.0.7/32 dev pod", false, false},
		{"ip route add 10.244.0.8/32 dev pod table 1000", false, true},
		{"ip neigh add 10.244.0.7 lladdr 02:00:00:00:00:01 dev pod nud permanent", false, false},
		{"ip link del pod", false, false},
		{"ip link set under mtu 1400", true, true},
		{"ip addr add 172.31.0.1/16 dev under", true, true},
		{"ip addr del 172.31.0.1/16 dev under", true, true},
		{"ip route del unreachable 10.64.0.0/24 table 4202 metric 420000", true, true},
		{"ip route replace blackhole 10.64.1.0/24 table 4202 metric 420000 proto 4", true, true},
		{"ip rule del priority 422", true, true},
		{"ip link del isthmus.vxlan", true, true},
	} {
		n.run(c.command)
		if stale, wakes := seen(); stale != c.stale || wakes != c.wakes {
			t.Errorf("%s: stale %v, wakes %v; want %v, %v", c.command, stale, wakes, c.stale, c.wakes)
		}
	}
}

// Events of our own changes to our tables cause no comparison. Events of foreign changes to our
// tables do, even between two changes of ours.
func TestEventsOfOwnTablesAreIgnored(t *testing.T) {
	n := open(t, RouteAgent)
	var events *os.File
	if err := Do(n.f, func() (err error) {
		events, err = subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	buf := make([]byte, 1<<16)
	concerned := func() (concerns bool) { // reads the events up to those of a table of the test
		t.Helper()
		n.run("nft add table ip seen")
		n.run("nft delete table ip seen")
		_ = events.SetReadDeadline(time.Now().Add(time.Minute))
		for marks := 0; marks < 2; {
			size, err := events.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(buf[:size]), "seen\x00") {
				marks += strings.Count(string(buf[:size]), "seen\x00")
				continue
			}
			concerns = concerns || n.k.concernsFilter(buf[:size])
		}
		return concerns
	}
	state := func(networks ...string) State {
		var remote []netip.Prefix
		for _, text := range networks {
			remote = append(remote, netip.MustParsePrefix(text))
		}
		return State{Filters: []Filter{FilterFor(FilterSets{Remote: remote})}, SourceNAT: []SourceNAT{SourceNATFor(SourceNATSets{Remote: remote})}}
	}
	n.apply(state("11.1.0.0/16"))
	concerned() // skip the events of making the tables
	n.apply(state("11.1.0.0/16", "11.2.0.0/16"))
	n.apply(state("11.2.0.0/16"))
	if concerned() {
		t.Error("changes of our own elements are not ignored")
	}
	for _, command := range []string{"nft add element inet isthmus remote { 11.9.0.0/16 }", "nft delete element inet isthmus remote { 11.9.0.0/16 }", "nft flush chain inet isthmus leaving"} {
		n.run(command)
		if !concerned() {
			t.Errorf("%s: the event is ignored", command)
		}
	}
	n.apply(state("11.2.0.0/16"))
	concerned()
	n.apply(state("11.2.0.0/16", "11.3.0.0/16"))
	n.run("nft delete element inet isthmus remote { 11.2.0.0/16 }")
	n.apply(state("11.3.0.0/16"))
	if !concerned() {
		t.Error("a foreign change between two of ours is ignored")
	}
	if n.run("nft delete table inet isthmus"); !concerned() {
		t.Error("the removal of our table is ignored")
	}
}

// After any foreign change, the kernel has the wanted objects in the end, although Apply uses its
// copy of them.
func TestForeignChangesAreRepairedAlthoughReadsAreCached(t *testing.T) {
	n := open(t, RouteAgent)
	notified := make(chan struct{}, 1)
	if err := Do(n.f, func() error {
		return n.k.Events(t.Context(), func() {
			select {
			case notified <- struct{}{}:
			default:
			}
		})
	}); err != nil {
		t.Fatal(err)
	}
	want := refusals(20)
	n.apply(want)
	if n.apply(want); n.k.memory.state == nil || n.k.memory.stale.Load() {
		t.Fatal("nothing is remembered")
	}
	more := refusals(21)
	if did := n.apply(more); strings.Count(did, "\n") != 1 || n.k.memory.stale.Load() {
		t.Errorf("for one network more did\n%s(stale: %v)", did, n.k.memory.stale.Load())
	}
	for _, change := range []string{"ip route flush table 4202", "ip rule del priority 422", "ip route replace blackhole 10.64.1.0/24 table 4202 metric 420000 proto 4",
		"ip route add blackhole 10.99.0.0/16 table 4202 proto 72"} {
		for range len(notified) {
			<-notified
		}
		n.run(change)
		select {
		case <-notified:
		case <-time.After(time.Minute):
			t.Fatalf("%s: notify was not called", change)
		}
		for range 3 { // a flush causes many events
			n.apply(more)
		}
		n.k.memory.state = nil // read the kernel's objects
		if did := n.apply(more); did != "" && change != "ip route flush table 4202" {
			t.Errorf("%s: not mended: %s", change, did)
		}
	}
	rest := slices.Clone(more.Routes)
	if err := Do(n.f, func() error {
		s, err := n.k.readObjects(more)
		if !slices.Equal(s.Routes, rest) {
			t.Errorf("in the end there are %d routes; want %d", len(s.Routes), len(rest))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
