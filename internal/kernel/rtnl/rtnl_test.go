package rtnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	nfnl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	. "github.com/isthmus-net/isthmus/internal/kernel" //nolint:revive // nearly every line uses the package
)

// A node is a network namespace of a test, with the Kernel of an owner.
type node struct {
	t *testing.T
	f *os.File
	k *Kernel
}

func open(t *testing.T, owner Owner) *node {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	f, err := NewNamespace()
	if err != nil {
		t.Skip(err)
	}
	n := &node{t: t, f: f}
	t.Cleanup(func() { f.Close() })
	if err := Do(f, func() (err error) { n.k, err = Open(owner, slog.New(slog.DiscardHandler)); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.k.Close)
	n.run("ip link set lo up") // without lo, the kernel accepts no address as a next hop
	return n
}

func (n *node) run(command string) string {
	n.t.Helper()
	var out []byte
	words := strings.Fields(command)
	err := Do(n.f, func() (err error) {
		out, err = exec.Command(words[0], words[1:]...).CombinedOutput()
		return err
	})
	if err != nil {
		n.t.Fatalf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

// apply calls Apply and returns the plan as commands.
func (n *node) apply(want State) string {
	n.t.Helper()
	var p Plan
	if err := Do(n.f, func() (err error) { p, err = n.k.Apply(want); return err }); err != nil {
		n.t.Fatal(err)
	}
	return p.Commands("INNER")
}

var (
	remote4, remote6 = netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("fd00:246::/48")
	via4, via6       = netip.MustParseAddr("169.254.100.1"), netip.MustParseAddr("fe80::a9fe:6401")
)

// fullState returns a state with an object of every kind that a gateway has, except sysctls.
func fullState() State {
	mac := [2]MAC{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	route := func(r Route) Route {
		r.Protocol = GatewayProtocol
		return r
	}
	return State{
		Devices: []Device{{Name: VethHost, Peer: VethGateway}},
		Links: []Link{{Name: VethHost, MAC: mac[0], MTU: 1400, Up: true},
			{In: Inner, Name: VethGateway, MAC: mac[1], MTU: 1400, Up: true}},
		Addresses: []Address{{In: Inner, Dev: VethGateway, Prefix: netip.PrefixFrom(via4, 32)},
			{In: Inner, Dev: VethGateway, Prefix: netip.MustParsePrefix("100::a9fe:6401/128")}},
		Neighbors: []Neighbor{{Dev: VethHost, Addr: via4, MAC: mac[1]}, {Dev: VethHost, Addr: via6, MAC: mac[1]}},
		Routes: []Route{
			route(Route{Prefix: netip.PrefixFrom(via4, 32), Dev: VethHost, Table: GatewayTable}),
			route(Route{Prefix: remote4, Via: via4, Dev: VethHost, Table: GatewayTable}),
			route(Route{Prefix: remote4, Type: Unreachable, Table: GatewayTable, Metric: UnreachableMetric}),
			route(Route{Prefix: remote6, Via: via6, Dev: VethHost, Table: GatewayTable, Metric: 1024}),
			route(Route{Prefix: remote6, Type: Unreachable, Table: GatewayTable, Metric: UnreachableMetric}),
		},
		Rules: []Rule{{Priority: GatewayRulePriority, Table: GatewayTable, Protocol: GatewayProtocol},
			{V6: true, Priority: GatewayRulePriority, Table: GatewayTable, Protocol: GatewayProtocol},
			{Priority: GatewayRulePriority, Iif: VethHost, From: remote4, To: netip.MustParsePrefix("10.0.0.0/9"), Table: MainTable, Protocol: GatewayProtocol}},
	}
}

func TestApplyIsIdempotentAndAnEmptyStateRemovesEverything(t *testing.T) {
	n := open(t, Gateway)
	before := n.run("ip route show table all") + n.run("ip -6 rule show") + n.run("ip rule show")
	if got, want := n.apply(fullState()), PlanFor(State{}, fullState()).Commands("INNER"); got != want {
		t.Errorf("did\n%s\nwant\n%s", got, want)
	}
	if got := n.apply(fullState()); got != "" {
		t.Errorf("the second time\n%s", got)
	}
	if got := n.apply(State{}); !strings.HasSuffix(got, "ip link del "+VethHost+"\n") {
		t.Errorf("took away\n%s", got)
	}
	if after := n.run("ip route show table all") + n.run("ip -6 rule show") + n.run("ip rule show"); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
}

// If only one end of the veth pair is right, Apply replaces both ends, even if the wrong end is
// another kind of device.
func TestApplyReplacesAVethPairWithOneWrongEnd(t *testing.T) {
	n := open(t, Gateway)
	want := fullState()
	for _, foreign := range []string{
		"ip link add " + VethHost + " type bridge",
		"ip link add " + VethHost + " type veth peer name foreign",
	} {
		n.run(foreign)
		if got := n.apply(want); !strings.HasPrefix(got, "ip link del "+VethHost+"\nip link add "+VethHost+" type veth") {
			t.Errorf("after %s\n%s", foreign, got)
		}
		if got := n.apply(want); got != "" {
			t.Errorf("after %s the second time\n%s", foreign, got)
		}
		n.apply(State{})
	}
	err := n.k.Inside(func() error {
		return exec.Command("ip", "link", "add", VethGateway, "type", "bridge").Run()
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := n.apply(want); !strings.HasPrefix(got, "nsenter --net=INNER ip link del "+VethGateway+"\nip link add "+VethHost) {
		t.Errorf("with a foreign inner end\n%s", got)
	}
}

// Apply repairs or removes every route with our protocol that was changed.
func TestApplyRepairsChangedRoutes(t *testing.T) {
	n := open(t, Gateway)
	n.apply(fullState())
	for _, change := range []string{
		"ip route replace blackhole 10.246.0.0/16 table 4200 proto 71",
		"ip route replace prohibit 10.246.0.0/16 table 4200 proto 71 metric 420000",
		"ip route replace 10.246.0.0/16 dev lo table 4200 proto 71",
		"ip route add blackhole 10.99.0.0/16 table 4200 proto 71",
		"ip -6 route add blackhole fd00:99::/48 table 4200 proto 71 metric 5",
		"ip route add 10.99.0.0/16 table 4200 proto 71 nexthop dev lo nexthop dev " + VethHost,
		"ip -6 route del fd00:246::/48 table 4200 metric 1024",
	} {
		n.run(change)
		if got := n.apply(fullState()); strings.Count(got, "\n") != 1 {
			t.Errorf("%s: did\n%s", change, got)
		}
		if got := n.apply(fullState()); got != "" {
			t.Errorf("%s: the second time\n%s", change, got)
		}
	}
	foreign := "ip route add 10.98.0.0/16 dev lo table 4200 proto 4"
	n.run(foreign)
	n.apply(State{})
	if s := n.run("ip route show table 4200"); !strings.Contains(s, "10.98.0.0/16") {
		t.Errorf("%s: gone: %s", foreign, s)
	}
}

// Apply makes a VXLAN device with or without outer checksums, as wanted. It replaces a device with
// the other setting.
func TestOuterPacketsHaveNoChecksum(t *testing.T) {
	n := open(t, RouteAgent)
	want := State{Devices: []Device{{Name: OverlayDevice, VXLAN: VXLAN{ID: OverlayID, Port: OverlayPort, Local: via4}}}}
	for range 2 {
		n.apply(want)
		if again := n.apply(want); again != "" {
			t.Errorf("the second time %q", again)
		}
		if got := n.run("ip -d link show " + OverlayDevice); !strings.Contains(got, " noudpcsum ") || !strings.Contains(got, "id 4200 local 169.254.100.1 ") || !strings.Contains(got, "dstport 4800 nolearning") {
			t.Errorf("there is %s", got)
		}
		n.run("ip link del " + OverlayDevice)
		n.run("ip link add " + OverlayDevice + " type vxlan id 4200 local 169.254.100.1 dstport 4800 nolearning udpcsum")
	}
}

// A setting of a device does not require a writable /proc/sys.
func TestSettingsOfADeviceAreSetByNetlink(t *testing.T) {
	n := open(t, RouteAgent)
	n.run("ip link add " + OverlayDevice + " type veth peer name other")
	n.k.index = map[Place]int{}
	for name, value := range map[string]string{"rp_filter": "2", "forwarding": "1", "send_redirects": "0"} {
		path := "net/ipv4/conf/" + OverlayDevice + "/" + name
		err := Do(n.f, func() error {
			if err := readOnlyProcSys(); err != nil {
				return err
			}
			return n.k.set(Setting{Path: path, Value: value})
		})
		if got := strings.TrimSpace(n.run("cat /proc/sys/" + path)); err != nil || got != value {
			t.Errorf("%s is %s, want %s: %v", path, got, value, err)
		}
	}
}

// A gateway on its node's network runs in an unprivileged container. Settings that netlink cannot
// write are still written in the gateway's namespace, and never in the node's.
func TestSettingsOfTheInnerNamespaceNeedNoWritableProcSys(t *testing.T) {
	n := open(t, Gateway)
	const path = "net/ipv4/conf/all/rp_filter"
	read := func() (value string, err error) {
		b, err := os.ReadFile("/proc/sys/" + path)
		return strings.TrimSpace(string(b)), err
	}
	for _, in := range []Namespace{Host, Inner} {
		for _, value := range []string{"1", "0", "2"} {
			f := n.f
			if in == Inner {
				f = n.k.inner
			}
			var before, after string
			var set error
			err := Do(f, func() (err error) {
				if err := readOnlyProcSys(); err != nil {
					return err
				}
				if before, err = read(); err != nil {
					return err
				}
				set = n.k.set(Setting{In: in, Path: path, Value: value})
				after, err = read()
				return err
			})
			switch {
			case err != nil:
				t.Fatal(err)
			case in == Inner && (set != nil || after != value):
				t.Errorf("%s is %s, want %s: %v", path, after, value, set)
			case in == Host && (!errors.Is(set, unix.EROFS) || after != before):
				t.Errorf("the node's %s is %s after %s: %v; want a refusal", path, after, before, set)
			}
		}
	}
}

// readOnlyProcSys mounts /proc/sys read-only for the calling thread, as in an unprivileged
// container.
func readOnlyProcSys() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return unix.Mount("none", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
}

func TestSecondProcessGetsAnErrorThatNamesTheLockHolder(t *testing.T) {
	n := open(t, RouteAgent)
	err := Do(n.f, func() error {
		k, err := Open(RouteAgent, n.k.log)
		if err == nil {
			k.Close()
		}
		return err
	})
	want := fmt.Sprintf("another isthmus route agent (process %d) runs in this network namespace", os.Getpid())
	if !errors.Is(err, ErrOther) || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// asNobody runs fn in a namespace, on a thread with the rights of an unprivileged user.
func asNobody(t *testing.T, namespace *os.File, fn func() error) error {
	t.Helper()
	return Do(namespace, func() error {
		for _, id := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} { // the system call changes only this thread
			if _, _, errno := unix.RawSyscall(id, 65534, 65534, 65534); errno != 0 {
				return errno
			}
		}
		return fn()
	})
}

// An unprivileged process cannot keep an agent from running by binding any socket name.
func TestAnUnprivilegedProcessCannotHoldTheLock(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	namespace, err := NewNamespace()
	if err != nil {
		t.Skip(err)
	}
	defer namespace.Close()
	err = asNobody(t, namespace, func() error {
		for _, name := range []string{"@isthmus.net/route-agent", "@" + RouteAgent.Lock} {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
		}
		c, err := nfnl.Dial(unix.NETLINK_NETFILTER, nil)
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		if err := ownTable(c, RouteAgent); !errors.Is(err, unix.EPERM) || errors.Is(err, ErrOther) {
			t.Errorf("the table of an unprivileged process: %v; want EPERM", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	open := func() (k *Kernel, err error) {
		err = Do(namespace, func() (err error) { k, err = Open(RouteAgent, slog.New(slog.DiscardHandler)); return err })
		return k, err
	}
	k, err := open()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := open(); !errors.Is(err, ErrOther) {
		t.Errorf("a second agent: %v", err)
	}
	k.Close()
	k, err = open()
	if err != nil {
		t.Fatalf("after the first has ended: %v", err)
	}
	k.Close()

	// On a kernel without tables that have an owner, the lock is an address. An unprivileged
	// process that has bound it is ignored.
	var log strings.Builder
	err = Do(namespace, func() error {
		l, err := lockAddress(RouteAgent, slog.New(slog.NewTextHandler(&log, nil)))
		if err == nil {
			err = l.Close()
		}
		return err
	})
	if want := fmt.Sprintf("process=%d user=65534", os.Getpid()); err != nil || !strings.Contains(log.String(), want) {
		t.Errorf("%v, log %q; want %q", err, log.String(), want)
	}
	err = Do(namespace, func() error {
		first, err := lockAddress(Gateway, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		defer first.Close()
		_, err = lockAddress(Gateway, slog.New(slog.DiscardHandler))
		return err
	})
	if want := fmt.Sprintf("another isthmus gateway (process %d) runs in this network namespace", os.Getpid()); !errors.Is(err, ErrOther) || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// If the kernel has no tables with an owner, a process that waits for another process logs the lock
// error only once.
func TestFollowLogsALockErrorOnce(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	namespace, err := NewNamespace()
	if err != nil {
		t.Skip(err)
	}
	defer namespace.Close()
	err = Do(namespace, func() error {
		first, err := lockAddress(RouteAgent, slog.New(slog.DiscardHandler))
		if err == nil {
			t.Cleanup(func() { first.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	err = asNobody(t, namespace, func() error { // an unprivileged process cannot make a table
		ctx, cancel := context.WithTimeout(t.Context(), 5*followInterval)
		defer cancel()
		_, err := Follow(ctx, RouteAgent, slog.New(slog.NewTextHandler(&log, nil)))
		return err
	})
	if n := strings.Count(log.String(), "nftables of Linux 5.12"); n != 1 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, said %d times:\n%s", err, n, &log)
	}
}

// The lock is an nftables table that belongs to our process. It survives a flush of the packet
// filter. A table of the same name that belongs to no process does not keep us from locking.
func TestTheLockSurvivesChangesOfThePacketFilter(t *testing.T) {
	n := open(t, RouteAgent)
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	n.run("nft flush ruleset")
	if got := n.run("nft list tables"); got != "table inet "+RouteAgent.Lock+"\n" {
		t.Errorf("after a flush: %q", got)
	}
	n.run("nft add table inet " + Gateway.Lock)
	var k *Kernel
	if err := Do(n.f, func() (err error) { k, err = Open(Gateway, n.k.log); return err }); err != nil {
		t.Fatal(err)
	}
	if got := n.run("nft list table inet " + Gateway.Lock); !strings.Contains(got, "flags owner") {
		t.Errorf("the table of a gateway: %s", got)
	}
	k.Close()
	if got := n.run("nft list tables"); got != "table inet "+RouteAgent.Lock+"\n" {
		t.Errorf("after the gateway's end: %q", got)
	}
}

// The tables that we make by netlink equal those that nft(8) makes from the printed command.
func TestFilterEqualsItsPrintedCommand(t *testing.T) {
	n := open(t, RouteAgent)
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	var nodes, own []netip.Addr
	for i := range 3000 {
		nodes = append(nodes, netip.AddrFrom4([4]byte{172, 30, byte(i >> 8), byte(i)}))
	}
	own = nodes[7:9]
	remote := []netip.Prefix{remote4, netip.MustParsePrefix("10.247.0.0/16"), netip.MustParsePrefix("10.247.8.0/24"), // networks that touch, and one inside another
		netip.MustParsePrefix("255.0.0.0/8"), netip.MustParsePrefix("10.9.1.2/32"), remote6}
	for family, all := range map[string][]State{
		"inet": {
			{Filters: []Filter{{}}},
			{Filters: []Filter{FilterFor(FilterSets{Nodes: nodes, Remote: remote, Own: own, Gateways: nodes[1:], Elsewhere: remote[:2], Pods: remote[1:4], Underlay: []string{"eth1"}, Bridges: []string{"weave"}})}},
			{Filters: []Filter{FilterFor(FilterSets{Nodes: nodes[:1], Remote: remote[:1]})}},
		},
		"bridge": {
			{Bridges: []Bridge{{}}},
			{Bridges: []Bridge{BridgeFor(nodes[:3], []string{"vxlan-6784", "vethwe-bridge"})}},
		},
		"ip": {
			{SourceNAT: []SourceNAT{{}}},
			{SourceNAT: []SourceNAT{SourceNATFor(SourceNATSets{Remote: remote, Pods: remote[1:4], Local: remote[2:3], Underlay: []string{"eth1", "eth0"}, Self: nodes[5]})}},
			{SourceNAT: []SourceNAT{SourceNATFor(SourceNATSets{Remote: remote, Self: nodes[6]})}},
		},
	} {
		for _, want := range all {
			command := n.apply(want)
			for line := range strings.Lines(command) { // skip the removal of tables of other families
				if strings.Contains(line, "; table "+family+" ") {
					command = line
				}
			}
			if again := n.apply(want); again != "" {
				t.Fatalf("the second time: %.300s", again)
			}
			have := n.run("nft -n list table " + family + " isthmus")
			script := filepath.Join(t.TempDir(), "filter.nft")
			text, _ := strings.CutPrefix(command, "nft '")
			if err := os.WriteFile(script, []byte(strings.TrimSuffix(text, "'\n")+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			n.run("nft -f " + script)
			theirs := n.run("nft -n list table " + family + " isthmus")
			stripped := regexp.MustCompile(` comment ".*"`).ReplaceAllString(have, "")
			if !sameLines(stripped, theirs) {
				t.Errorf("we made\n%.2000s\nnft makes\n%.2000s", stripped, theirs)
			}
			if got := n.apply(want); got == "" { // nft(8) adds no comments, so Apply must treat the table as foreign
				t.Error("a foreign table is taken for ours")
			}
		}
	}
	n.apply(State{})
	if left := n.run("nft list tables"); left != "table inet "+RouteAgent.Lock+"\n" {
		t.Errorf("left\n%s", left)
	}
}

// The kernel accepts the filter of a gateway's Pod in a cluster of 10,000 nodes, each with three
// source addresses, and with 4,096 peers. It also accepts a filter for a peer that has all
// addresses.
func TestFilterHoldsTheAddressesOfTheLargestCluster(t *testing.T) {
	n := open(t, RouteAgent)
	var nodes []netip.Addr
	var remote []netip.Prefix
	for i := range 30_000 {
		nodes = append(nodes, netip.AddrFrom4([4]byte{172, byte(16 + i>>16), byte(i >> 8), byte(i)}))
	}
	for i := range 8192 {
		remote = append(remote, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 5), byte(i << 3 & 255), 0}), 22))
	}
	f := FilterFor(FilterSets{Nodes: nodes, Remote: remote})
	for _, want := range []Filter{f, FilterFor(FilterSets{Nodes: nodes[1:], Remote: remote[:8000]}), {},
		FilterFor(FilterSets{Remote: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}})} {
		n.apply(State{Filters: []Filter{want}})
		if again := n.apply(State{Filters: []Filter{want}}); again != "" {
			t.Fatalf("the second time: %.300s", again)
		}
	}
}

// Elements of a set are queried one by one, so that a change of one element does not read thousands
// of unchanged elements.
func TestSetElementsAreQueriedOneByOne(t *testing.T) {
	n := open(t, RouteAgent)
	remote := []netip.Prefix{netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.247.0.0/16"), netip.MustParsePrefix("255.255.255.0/24")}
	n.apply(State{Filters: []Filter{FilterFor(FilterSets{Remote: remote, Nodes: []netip.Addr{netip.MustParseAddr("172.30.1.11")}})}})
	for _, tc := range []struct {
		set, addr  string
		end, there bool
	}{
		{"remote", "10.246.0.0", false, true},
		{"remote", "10.246.1.0", false, false}, // inside an element
		{"remote", "10.247.0.0", false, true},
		{"remote", "10.248.0.0", true, true},
		{"remote", "10.248.0.0", false, false},
		{"remote", "10.245.0.0", false, false},
		{"remote", "10.249.0.0", true, false},
		{"remote", "255.255.255.0", false, true},
		{"nodes", "172.30.1.11", false, true},
		{"nodes", "172.30.1.12", false, false},
	} {
		e := nftables.SetElement{Key: netip.MustParseAddr(tc.addr).AsSlice(), IntervalEnd: tc.end}
		if there, err := n.k.contains(filterTable, []element{{set: tc.set, SetElement: e}}); err != nil || there[0] != tc.there {
			t.Errorf("%+v: there %v, %v", tc, there, err)
		}
	}
	// Adjacent networks, as the IPAM allocates them.
	elements, err := elementsFor(FilterSet{Name: "remote", Interval: true}, []string{"10.246.0.0/16", "10.247.0.0/16"})
	if err != nil {
		t.Fatal(err)
	}
	absent := []nftables.SetElement{{Key: netip.MustParseAddr("10.99.0.0").AsSlice()}}
	for _, tc := range []struct {
		gone, added []nftables.SetElement
		want        bool
	}{{absent, elements, true}, {nil, absent, false}, {elements, nil, false}} {
		mismatched, err := n.k.mismatched(filterTable, elementsAfter("remote", tc.gone, tc.added))
		if got := len(mismatched) == 0; got != tc.want || err != nil {
			t.Errorf("%+v: %v, %v", tc, got, err)
		}
	}
}

// A foreign change of a table between our read and our write makes the transaction fail, without an
// additional read. Stale content is never written.
func TestTransactionFailsAfterAForeignChange(t *testing.T) {
	n := open(t, RouteAgent)
	of := func(networks ...netip.Prefix) State {
		return State{Filters: []Filter{FilterFor(FilterSets{Remote: networks})}}
	}
	n.apply(of(remote4))
	n.apply(of(remote4))
	next := netip.MustParsePrefix("10.9.0.0/24")
	for _, change := range []string{"nft add table inet other", "nft flush set inet isthmus remote", "nft delete table inet isthmus", "nft add table inet another; add table inet more"} {
		n.run(change)
		have, want := filterOf(of(remote4).Filters[0]), filterOf(of(remote4, next).Filters[0])
		if err := n.k.changeElements(have, want); !errors.Is(err, unix.ERESTART) {
			t.Errorf("%s: %v; want ERESTART", change, err)
		}
		for range 2 {
			n.apply(of(remote4, next))
			if got := n.run("nft list set inet isthmus remote"); !strings.Contains(got, "10.9.0.0/24") || !strings.Contains(got, remote4.String()) {
				t.Errorf("%s: there is %s", change, got)
			}
		}
		if before := n.k.tables.generation; before == 0 || before != n.k.generation() {
			t.Errorf("%s: known generation %d, kernel's generation %d", change, before, n.k.generation())
		}
		n.apply(of(remote4))
	}
}

// sameLines compares tables. It ignores the order of sets and chains, which nft lists in the order
// of their addition.
func sameLines(a, b string) bool {
	blocks := func(s string) []string {
		return slices.Sorted(slices.Values(strings.Split(s, "\n\n")))
	}
	strip := func(s string) string {
		s = regexp.MustCompile(`^table \w+ isthmus \{\n`).ReplaceAllString(s, "")
		return strings.TrimRight(s, "}\n\t ")
	}
	return slices.Equal(blocks(strip(a)), blocks(strip(b)))
}

// After any change of the sets, the kernel has the wanted elements, and the table has not been
// replaced, which would take the kernel long.
func TestFilterChangeOnlyChangesSetElements(t *testing.T) {
	n := open(t, RouteAgent)
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	some := func() (s FilterSets) {
		for range rng.IntN(40) {
			s.Nodes = append(s.Nodes, netip.AddrFrom4([4]byte{172, 30, 1, byte(rng.Uint32())}))
			s.Own = append(s.Own, netip.AddrFrom4([4]byte{172, 30, 2, byte(rng.Uint32())}))
			s.Underlay = append(s.Underlay, fmt.Sprintf("eth%d", rng.IntN(50)))
			// Adjacent networks, networks inside others, and networks at both ends of the address
			// space.
			s.Remote = append(s.Remote, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 246, byte(rng.IntN(4)), 0}), 22+rng.IntN(3)).Masked(),
				netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(rng.IntN(2) * 255), byte(rng.Uint32()), 0, 0}), 16),
				netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, byte(rng.IntN(4))}), 30+rng.IntN(3)).Masked(),
				netip.PrefixFrom(netip.AddrFrom16([16]byte{byte(rng.IntN(2) * 255), byte(rng.IntN(2) * 255)}), 16))
			s.Elsewhere = append(s.Elsewhere, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(rng.Uint32()), 0}), 24))
		}
		return s
	}
	handles := func() string {
		var all []string
		for line := range strings.Lines(n.run("nft -a list table inet isthmus")) {
			if strings.Contains(line, "chain ") || strings.Contains(line, "comment") {
				all = append(all, line)
			}
		}
		return strings.Join(all, "")
	}
	n.apply(State{Filters: []Filter{{}}})
	n.apply(State{Filters: []Filter{{}}}) // reads the tables
	before := handles()
	for i := range 60 {
		want := State{Filters: []Filter{FilterFor(some())}}
		n.apply(want)
		if i%2 == 0 {
			n.k.tables = tablesRead{} // forces a read from the kernel
		}
		if again := n.apply(want); again != "" {
			t.Fatalf("change %d: the second time: %.300s", i, again)
		}
	}
	if after := handles(); after != before || before == "" {
		t.Errorf("the table was made anew: %s, and was %s", after, before)
	}
	// A foreign change of a set is detected and repaired.
	n.run("nft flush set inet isthmus remote")
	want := State{Filters: []Filter{FilterFor(FilterSets{Nodes: []netip.Addr{via4}, Remote: []netip.Prefix{remote4}})}}
	n.apply(want)
	if again := n.apply(want); again != "" {
		t.Errorf("the second time: %s", again)
	}
}

func TestApplyRepairsAChangedFilter(t *testing.T) {
	n := open(t, RouteAgent)
	want := State{Filters: []Filter{FilterFor(FilterSets{Nodes: []netip.Addr{via4}, Remote: []netip.Prefix{remote4}, Own: []netip.Addr{via4}, Gateways: []netip.Addr{via4}})},
		SourceNAT: []SourceNAT{SourceNATFor(SourceNATSets{Local: []netip.Prefix{remote4}, Pods: []netip.Prefix{remote4}, Self: via4})},
		Bridges:   []Bridge{BridgeFor([]netip.Addr{via4}, []string{"vxlan-6784"})}}
	n.apply(want)
	for _, change := range []string{
		"nft delete table inet isthmus",
		"nft flush chain inet isthmus input",
		"nft flush table inet isthmus",
		"nft add rule inet isthmus forward accept",
		"nft insert rule inet isthmus remote accept",
		"nft add chain inet isthmus more",
		"nft add element inet isthmus nodes { 192.0.2.1 }",
		"nft flush set inet isthmus nodes",
		"nft flush set inet isthmus remote",
		"nft flush set inet isthmus remote16",
		"nft add element inet isthmus remote16 { 192.0.0.0 }",
		"nft add element inet isthmus remote { 192.0.2.0/24 }",
		"nft add element inet isthmus remote { 192.0.2.5-192.0.2.77 }",
		"nft add element inet isthmus own { 192.0.2.1 }",
		"nft delete table bridge isthmus",
		"nft flush chain bridge isthmus prerouting",
		"nft add element bridge isthmus uplinks { pod }",
		"nft flush set bridge isthmus gateways",
		"nft delete table ip isthmus",
		"nft flush chain ip isthmus postrouting",
		"nft flush chain ip isthmus topeers",
		"nft insert rule ip isthmus topeers masquerade",
		"nft insert rule ip isthmus topeers ct status dnat snat to 192.0.2.1",
		"nft add chain ip isthmus more",
		"nft flush set ip isthmus pods",
		"nft add element ip isthmus local { 192.0.2.0/24 }",
	} {
		n.run(change)
		if got := n.apply(want); strings.Count(got, "nft ") != 1 {
			t.Errorf("%s: did %q", change, got)
		}
		if got := n.apply(want); got != "" {
			t.Errorf("%s: the second time %q", change, got)
		}
		if !n.k.tables.complete() {
			t.Errorf("%s: the tables read are not kept, so each Apply reads them again", change)
		}
	}
	n.run("nft add table inet other")
	n.run("nft add chain inet other input")
	n.apply(State{})
	if left := n.run("nft list tables"); !strings.Contains(left, "table inet other\n") || strings.Contains(left, " isthmus\n") {
		t.Errorf("left\n%s", left)
	}
}

// In a chain that drops forwarded packets by default, our rules come after the owner's rules.
// Removing them restores the chain.
func TestAcceptIsLastInADroppingForwardChain(t *testing.T) {
	const in, out = "-A FORWARD -i isthmus+ -m comment --comment isthmus-route-agent -j ACCEPT\n", "-A FORWARD -o isthmus+ -m comment --comment isthmus-route-agent -j ACCEPT\n"
	want := State{Accepts: []Accept{{}}}
	for _, program := range []string{IptablesNFT, IptablesLegacy} {
		t.Run(program, func(t *testing.T) {
			n := open(t, RouteAgent)
			if _, err := exec.LookPath(program); err != nil {
				t.Skip(err)
			}
			iptables := func(args string) string { t.Helper(); return n.run(program + " -w " + args) }
			apply := func(want State) string {
				n.k.legacy = time.Time{} // no event reports these changes, so force a read
				return n.apply(want)
			}
			check := func(after, rules string, changes int) {
				t.Helper()
				if got := apply(want); strings.Count(got, "-i isthmus+") != changes {
					t.Errorf("after %s did %q", after, got)
				}
				if again := apply(want); again != "" {
					t.Errorf("after %s the second time did %q", after, again)
				}
				if got := iptables("-S FORWARD"); got != rules {
					t.Errorf("after %s there is\n%swant\n%s", after, got, rules)
				}
			}
			if got := apply(want); got != "" {
				t.Errorf("without iptables did %q", got)
			}
			iptables("-A FORWARD -s 10.0.0.1 -j DROP")
			check("a rule", "-P FORWARD ACCEPT\n-A FORWARD -s 10.0.0.1/32 -j DROP\n", 0)
			iptables("-P FORWARD DROP")
			check("a policy", "-P FORWARD DROP\n-A FORWARD -s 10.0.0.1/32 -j DROP\n"+in+out, 1)
			iptables("-A FORWARD -j REJECT")
			check("a rule behind", "-P FORWARD DROP\n-A FORWARD -s 10.0.0.1/32 -j DROP\n"+in+out+"-A FORWARD -j REJECT --reject-with icmp-port-unreachable\n", 0)
			iptables("-D FORWARD 2")
			check("one of ours is gone", "-P FORWARD DROP\n-A FORWARD -s 10.0.0.1/32 -j DROP\n"+in+out+"-A FORWARD -j REJECT --reject-with icmp-port-unreachable\n", 1)
			iptables("-F FORWARD")
			check("a flush", "-P FORWARD DROP\n"+in+out, 1)
			iptables("-P FORWARD ACCEPT")
			iptables("-I FORWARD -j DROP -m comment --comment all")
			check("a rule before", "-P FORWARD ACCEPT\n"+in+out+"-A FORWARD -m comment --comment all -j DROP\n", 1)
			n.run("sh " + script(t, program+"-save > $0.saved && "+program+"-restore -w < $0.saved"))
			check("a restart of iptables", "-P FORWARD ACCEPT\n"+in+out+"-A FORWARD -m comment --comment all -j DROP\n", 0)
			// Rules for outer packets of gateways that are Pods on our node.
			gateway := func(addr string) (rules string) {
				for _, protocol := range []string{"udp", "icmp"} {
					for _, field := range []string{"-d ", "-s "} {
						rules += "-A FORWARD " + field + addr + "/32 -p " + protocol + " -m comment --comment \"isthmus-route-agent:" + addr + "\" -j ACCEPT\n"
					}
				}
				return rules
			}
			between := func(addr, other, comment string) (rules string) {
				for _, ends := range [][2]string{{other, addr}, {addr, other}} {
					rules += "-A FORWARD -s " + ends[0] + "/32 -d " + ends[1] + "/32 -p tcp -m comment --comment \"isthmus-route-agent:" + comment + "\" -j ACCEPT\n"
				}
				return rules
			}
			two := "-P FORWARD ACCEPT\n" + in + out +
				gateway("10.244.1.5") + between("10.244.1.5", "10.244.1.9", "10.244.1.5") + between("10.244.1.5", "10.244.2.7", "10.244.1.5-10.244.2.7") +
				gateway("10.244.1.9") + between("10.244.1.9", "10.244.2.7", "10.244.1.9-10.244.2.7") + "-A FORWARD -m comment --comment all -j DROP\n"
			far := addrs("10.244.2.7")
			want = State{Accepts: []Accept{AcceptFor(addrs("10.244.1.9", "10.244.1.5"), far)}}
			check("two gateways", two, 1)
			iptables("-D FORWARD 4")
			check("one rule of a gateway is gone", two, 1)
			iptables("-D FORWARD 9")
			check("one rule between gateways is gone", two, 1)
			want = State{Accepts: []Accept{AcceptFor(addrs("10.244.1.9"), far)}}
			check("a gateway less", "-P FORWARD ACCEPT\n"+in+out+gateway("10.244.1.9")+between("10.244.1.9", "10.244.2.7", "10.244.1.9-10.244.2.7")+"-A FORWARD -m comment --comment all -j DROP\n", 1)
			want = State{Accepts: []Accept{AcceptFor(addrs("10.244.1.9"), nil)}}
			check("none elsewhere", "-P FORWARD ACCEPT\n"+in+out+gateway("10.244.1.9")+"-A FORWARD -m comment --comment all -j DROP\n", 1)
			want = State{Accepts: []Accept{AcceptFor(nil, far)}}
			check("no gateway", "-P FORWARD ACCEPT\n"+in+out+"-A FORWARD -m comment --comment all -j DROP\n", 1)
			apply(State{})
			if got, want := iptables("-S FORWARD"), "-P FORWARD ACCEPT\n-A FORWARD -m comment --comment all -j DROP\n"; got != want {
				t.Errorf("left\n%swant\n%s", got, want)
			}
			if got := apply(State{}); got != "" {
				t.Errorf("the second time took away %q", got)
			}
		})
	}
}

func addrs(all ...string) (list []netip.Addr) {
	for _, a := range all {
		list = append(list, netip.MustParseAddr(a))
	}
	return list
}

// In an nftables chain of any name, our rules come last, too. A chain of a table that a process
// owns is only reported.
func TestAcceptIsLastInEveryDroppingNftablesChain(t *testing.T) {
	n := open(t, RouteAgent)
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	list := func() string {
		return regexp.MustCompile(`counter packets \d+ bytes \d+`).ReplaceAllString(n.run("nft list table inet fw"), "counter")
	}
	const ours = "\t\tiifname \"isthmus*\" counter accept comment \"isthmus-route-agent\"\n\t\toifname \"isthmus*\" counter accept comment \"isthmus-route-agent\"\n"
	n.run("nft -f " + script(t, `table inet fw {
		chain early { type filter hook forward priority -50; policy drop; ip saddr 10.0.0.1 drop; ct state established accept; }
		chain late { type filter hook forward priority 50; ct state invalid drop; reject with icmpx type admin-prohibited; }
		chain open { type filter hook forward priority 60; ip saddr 10.0.0.1 drop; }
		chain in { type filter hook input priority 0; policy drop; }
	}
	table ip fw {
		chain f { type filter hook forward priority 0; policy drop; }
	}
`))
	before := list()
	want := State{Accepts: []Accept{{}}}
	if got := n.apply(want); strings.Count(got, "accept comment") != 6 {
		t.Errorf("did %s", got)
	}
	now := list()
	for _, part := range []string{"established accept\n" + ours + "\t}", "invalid drop\n" + ours + "\t\treject"} {
		if !strings.Contains(now, part) {
			t.Errorf("%q is missing in\n%s", part, now)
		}
	}
	if got := strings.ReplaceAll(now, ours, ""); got != before {
		t.Errorf("more than our rules has changed:\n%s\nwas\n%s", got, before)
	}
	if again := n.apply(want); again != "" {
		t.Errorf("the second time: %s", again)
	}
	n.run("nft flush chain ip fw f")
	if got := n.apply(want); strings.Count(got, "accept comment") != 2 {
		t.Errorf("after a flush did %s", got)
	}
	want = State{Accepts: []Accept{AcceptFor(addrs("10.244.1.5"), addrs("10.244.2.7"))}}
	n.apply(want)
	if again := n.apply(want); again != "" {
		t.Errorf("with a gateway, the second time: %s", again)
	}
	const gateway = "accept comment \"isthmus-route-agent\"\n\t\tip daddr 10.244.1.5 meta l4proto udp counter accept comment \"isthmus-route-agent:10.244.1.5\"\n\t\tip saddr 10.244.1.5 "
	const between = "ip saddr 10.244.2.7 ip daddr 10.244.1.5 meta l4proto tcp counter accept comment \"isthmus-route-agent:10.244.1.5-10.244.2.7\"\n"
	if now := list(); strings.Count(now, gateway) != 2 || strings.Count(now, between) != 2 {
		t.Errorf("with a gateway there is\n%s", now)
	}
	n.apply(State{})
	if got := list(); got != before {
		t.Errorf("left\n%s\nwas\n%s", got, before)
	}
}

// No other process may change a table that a process owns. A Limit names the chain and the remedy,
// within the length that a report permits.
func TestDroppingChainOwnedByAProcessIsReported(t *testing.T) {
	n := open(t, RouteAgent)
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	var in io.WriteCloser
	owner := exec.Command("nft", "-i")
	if err := Do(n.f, func() (err error) {
		if in, err = owner.StdinPipe(); err != nil {
			return err
		}
		return owner.Start()
	}); err != nil {
		t.Fatal(err)
	}
	end := sync.OnceFunc(func() { in.Close(); _ = owner.Wait() })
	t.Cleanup(end)
	if _, err := io.WriteString(in, "add table inet firewalld { flags owner; chain filter_FORWARD { type filter hook forward priority 10; policy drop; }; }\n"); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); !strings.Contains(n.run("nft list ruleset"), "filter_FORWARD"); {
		if time.Now().After(deadline) {
			t.Fatal("no table of a process: " + n.run("nft list ruleset"))
		}
	}
	n.apply(State{Accepts: []Accept{{}}})
	var got []Limit
	if err := Do(n.f, func() error { got = n.k.Limits(SourceNAT{}, true); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0].Reason != LimitUncertain || len(got[0].Message) > 512 || !strings.Contains(got[0].Message, "--zone=trusted --add-interface=isthmus.vxlan") {
		t.Errorf("reported %+v", got)
	}

	end() // the kernel removes the table without a new generation
	for strings.Contains(n.run("nft list tables"), "firewalld") {
		time.Sleep(10 * time.Millisecond)
	}
	n.apply(State{Accepts: []Accept{{}}}) // reads the tables again
	n.apply(State{Accepts: []Accept{{}}})
	if err := Do(n.f, func() error { got = n.k.Limits(SourceNAT{}, true); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 0 {
		t.Errorf("after its end: %+v", got)
	}
}

// Foreign chains, jumps, rules without targets and rules with matches of the connection state keep
// their order and their counters.
func TestForeignIptablesLegacyRulesStay(t *testing.T) {
	n := open(t, RouteAgent)
	if _, err := exec.LookPath("iptables-legacy-restore"); err != nil {
		t.Skip(err)
	}
	n.run("sh " + script(t, `iptables-legacy-restore -w -c <<END
*filter
:INPUT DROP [1:100]
:FORWARD DROP [2:200]
:OUTPUT ACCEPT [3:300]
:KUBE-FORWARD - [0:0]
:LAST - [0:0]
[4:400] -A INPUT -i lo -j ACCEPT
[5:500] -A INPUT -s 10.1.0.0/16
[6:600] -A FORWARD -j KUBE-FORWARD
[7:700] -A FORWARD -s 10.2.0.0/16
[8:800] -A OUTPUT -m comment --comment more -j LAST
[9:900] -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
[10:1000] -A KUBE-FORWARD -p tcp -m tcp --dport 80 -m limit --limit 5/min -g LAST
[11:1100] -A LAST -j RETURN
COMMIT
END`))
	n.run("sh " + script(t, `iptables-legacy-restore -w -c -n <<END
*filter
:KUBE-FORWARD2 - [0:0]
[12:1200] -A LAST -d 10.9.0.0/16 -j KUBE-FORWARD2
COMMIT
END`))
	saved := func() string {
		return regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(n.run("iptables-legacy-save -c"), "")
	}
	before := saved()
	apply := func(want State) { n.k.legacy = time.Time{}; n.apply(want) }
	done := func(want State) { // other programs on this machine may hold the lock for a while
		for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
			if apply(want); !n.k.Busy() || time.Now().After(end) {
				return
			}
		}
	}
	const in, out = "[0:0] -A FORWARD -i isthmus+ -m comment --comment isthmus-route-agent -j ACCEPT\n", "[0:0] -A FORWARD -o isthmus+ -m comment --comment isthmus-route-agent -j ACCEPT\n"
	const last = "[7:700] -A FORWARD -s 10.2.0.0/16\n"
	for range 3 {
		done(State{Accepts: []Accept{{}}})
		if got, want := saved(), strings.Replace(before, last, last+in+out, 1); got != want || want == before {
			t.Fatalf("there is\n%swant\n%s", got, want)
		}
		done(State{})
		if got := saved(); got != before {
			t.Fatalf("left\n%swant\n%s", got, before)
		}
	}
	// While another program holds the lock, nothing is read or written.
	f, err := os.Open(legacyLock)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	apply(State{Accepts: []Accept{{}}})
	if got := saved(); got != before || !n.k.Busy() {
		t.Errorf("without the lock (busy: %v) there is\n%s", n.k.Busy(), got)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	done(State{Accepts: []Accept{{}}})
	if got := saved(); got == before {
		t.Error("with the lock nothing is added")
	}
}

// A pod on the bridge of a gateway's Pod sends packets with a node's address, with all combinations
// of VLAN tags that arrive without a Bridge. With a Bridge, only packets from the uplink arrive,
// with and without br_netfilter.
func TestPodsOnABridgeCannotImpersonateANode(t *testing.T) {
	n := open(t, RouteAgent)
	gateway, other := netip.MustParseAddr("10.32.0.7"), netip.MustParseAddr("10.32.0.1")
	n.run("ip link add weave type bridge")
	n.run("ip link set weave up")
	ends := map[string]*os.File{}
	for _, name := range []string{"gw", "pod", "far"} {
		f, err := NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		ends[name] = f
		n.run("ip link add " + name + " type veth peer name e" + name)
		n.run("ip link set " + name + " master weave up")
		err = Do(n.f, func() error {
			l, err := netlink.LinkByName("e" + name)
			if err != nil {
				return err
			}
			return netlink.LinkSetNsFd(l, int(f.Fd()))
		})
		if err != nil {
			t.Fatal(err)
		}
		(&node{t: t, f: f}).run("ip link set e" + name + " up")
	}
	n.run("ip link add vethwe-bridge type veth peer name vethwe-datapath") // Weave's link to Open vSwitch
	n.run("ip link set vethwe-bridge master weave up")
	n.run("ip link add vxlan-6784 type vxlan id 7 dstport 6784")
	n.run("ip link set vxlan-6784 master weave up")
	if got, err := n.k.Uplinks("weave"); err != nil || !slices.Equal(slices.Sorted(slices.Values(got)), []string{"vethwe-bridge", "vxlan-6784"}) {
		t.Errorf("uplinks %v (%v)", got, err)
	}
	in := &node{t: t, f: ends["gw"]}
	in.run("ip addr add " + gateway.String() + "/12 dev egw")
	var arrived net.PacketConn
	if err := Do(ends["gw"], func() (err error) {
		arrived, err = net.ListenPacket("udp4", fmt.Sprintf("%v:%d", gateway, OverlayPort))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { arrived.Close() })
	hw := net.HardwareAddr{2, 0, 0, 0, 0, 7}
	in.run("ip link set egw address " + hw.String())
	frame := func(payload string, tags ...uint16) []byte {
		b := append(slices.Clone([]byte(hw)), 2, 0, 0, 0, 0, 9)
		for _, kind := range tags {
			b = binary.BigEndian.AppendUint16(b, kind)
			b = append(b, 0xe0, 0) // a priority, and VLAN ID 0
		}
		b = append(b, 8, 0)
		ip := []byte{0x45, 0, 0, byte(28 + len(payload)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
		ip = append(append(ip, other.AsSlice()...), gateway.AsSlice()...)
		sum := uint32(0)
		for i := 0; i < len(ip); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(ip[i:]))
		}
		binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
		b = append(b, ip...)
		b = binary.BigEndian.AppendUint16(b, 9999)
		b = binary.BigEndian.AppendUint16(b, OverlayPort)
		b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
		return append(append(b, 0, 0), payload...)
	}
	send := func(from string, b []byte) {
		t.Helper()
		err := Do(ends[from], func() error {
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			l, err := net.InterfaceByName("e" + from)
			if err != nil {
				return err
			}
			return unix.Sendto(fd, b, 0, &unix.SockaddrLinklayer{Ifindex: l.Index, Halen: 6})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	// next returns the payload of the next packet to arrive. Packets are delivered in order, so a
	// packet that was sent earlier has arrived already or never will.
	next := func() string {
		t.Helper()
		buf := make([]byte, 100)
		_ = arrived.SetReadDeadline(time.Now().Add(time.Minute))
		got, _, err := arrived.ReadFrom(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:got])
	}
	ways := [][]uint16{nil, {0x8100}, {0x8100, 0x8100}, {0x88a8, 0x8100}, {0x8100, 0x88a8}, {0x8100, 0x8100, 0x8100}}
	for _, call := range []string{"0", "1"} {
		if err := Do(n.f, func() error {
			return os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-iptables", []byte(call), 0)
		}); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		n.apply(State{})
		for _, tags := range ways {
			send("pod", frame("unguarded", tags...))
			if got := next(); got != "unguarded" {
				t.Errorf("%x: %q arrives", tags, got)
			}
		}
		filter := FilterFor(FilterSets{Gateways: []netip.Addr{gateway}, Bridges: []string{"weave"}, Underlay: []string{"eth0"}})
		n.run("ip addr replace 10.32.0.2/12 dev weave") // the return path
		n.apply(State{Filters: []Filter{filter}, Bridges: []Bridge{BridgeFor([]netip.Addr{gateway}, []string{"far"})}})
		if err := Do(n.f, func() error {
			if !n.k.Bridged() || !(&Kernel{owner: RouteAgent}).Bridged() {
				return errors.New("Bridged does not report the Bridge")
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		for _, tags := range ways {
			send("pod", frame("forged", tags...))
		}
		send("far", frame("of a node"))
		if got := next(); got != "of a node" {
			t.Errorf("with bridge-nf-call-iptables=%s %q arrives", call, got)
		}
		if got := n.dropped()["bridged_overlay_port"]; got != uint64(len(ways)) {
			t.Errorf("with bridge-nf-call-iptables=%s %d are counted as dropped, want %d", call, got, len(ways))
		}
	}
}

// While the kernel's state cannot be read, Bridged reports the Bridge of a previous process, not
// the wanted one.
func TestBridgedReportsThePreviousBridgeBeforeTheFirstRead(t *testing.T) {
	n := open(t, RouteAgent)
	bridges := []Bridge{BridgeFor([]netip.Addr{via4}, nil)}
	unreadable := State{Bridges: bridges, Links: []Link{{Name: strings.Repeat("x", 200)}}}
	bridged := func() bool {
		t.Helper()
		var is bool
		err := Do(n.f, func() error {
			if _, err := n.k.Apply(unreadable); !errors.Is(err, errUnread) {
				return fmt.Errorf("it could be read: %w", err)
			}
			is = n.k.Bridged()
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	if bridged() {
		t.Error("Bridged reports a Bridge that does not exist")
	}
	n.apply(State{Bridges: bridges})
	n.k.applied = false // as in a process that has just started
	if !bridged() {
		t.Error("Bridged does not report the existing Bridge")
	}
}

func (n *node) dropped() (all map[string]uint64) {
	n.t.Helper()
	if err := Do(n.f, func() (err error) { all, err = Dropped(); return err }); err != nil {
		n.t.Fatal(err)
	}
	return all
}

// Every rule that drops packets counts them, and every chain with such a rule has a reason.
func TestEachRuleThatDropsHasACounter(t *testing.T) {
	reasons := make(map[string]bool)
	for _, chain := range slices.Concat(FilterChains, PodFilterChains, BridgeChains, SourceNAT{Self: via4}.Chains()) {
		drops := false
		for _, rule := range chain.Rules {
			exprs := exprsOf(nftables.TableFamilyINet, rule)
			v, is := exprs[len(exprs)-1].(*expr.Verdict)
			if !is || v.Kind != expr.VerdictDrop {
				continue
			}
			drops = true
			if _, counts := exprs[len(exprs)-2].(*expr.Counter); !counts {
				t.Errorf("chain %s: %q does not count", chain.Name, rule)
			}
		}
		if drops != (chain.Drops != "") {
			t.Errorf("chain %s drops: %v, for the reason %q", chain.Name, drops, chain.Drops)
		}
		reasons[chain.Drops] = true
	}
	delete(reasons, "")
	for _, r := range DropReasons {
		if !reasons[r.Reason] {
			t.Errorf("%s: no rule drops for it", r.Reason)
		}
		delete(reasons, r.Reason)
	}
	if len(reasons) > 0 {
		t.Errorf("%v: not among DropReasons", reasons)
	}
}

// Dropped packets are counted by reason, and a change of the filter's sets does not reset the
// counters.
func TestFilterDropsAreCounted(t *testing.T) {
	t.Run("of a node", func(t *testing.T) { testWhatAFilterDropsIsCounted(t, RouteAgent, false) })
	t.Run("of a gateway's Pod", func(t *testing.T) { testWhatAFilterDropsIsCounted(t, GatewayPod, true) })
}

func testWhatAFilterDropsIsCounted(t *testing.T, owner Owner, pod bool) {
	n := open(t, owner)
	if got := n.dropped(); len(got) != 0 {
		t.Errorf("without a table %v", got)
	}
	n.run("ip link add eth0 type veth peer name eth1")
	n.run("ip addr add 172.30.1.11/24 dev eth0")
	n.run("ip link set eth0 up")
	n.run("ip link set eth1 up")
	n.run("ip route add default via 172.30.1.1")
	n.run("ip neigh add 172.30.1.1 lladdr 02:00:00:00:00:01 dev eth0")
	n.run("ip addr add fd00:30::11/64 dev eth0 nodad")
	n.run("ip -6 route add default via fd00:30::1")
	n.run("ip neigh add fd00:30::1 lladdr 02:00:00:00:00:01 dev eth0")
	n.apply(State{Filters: []Filter{FilterFor(FilterSets{Pod: pod, Remote: []netip.Prefix{remote4, remote6}})}})
	if got := n.dropped(); len(got) != 0 {
		t.Errorf("before there was any %v", got)
	}
	send := func(to string) {
		t.Helper()
		if err := Do(n.f, func() error {
			c, err := net.Dial("udp", to)
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("x"))
			if errors.Is(err, unix.EPERM) { // the kernel returns EPERM to the sender if the chain clear drops the packet
				err = nil
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	send("10.246.0.9:53")
	send("10.246.0.9:53")
	send("[fd00:246::9]:53")
	send("192.0.2.1:53") // not an address of a peer
	send("[fd00:99::9]:53")
	send(fmt.Sprintf("127.0.0.1:%d", OverlayPort))
	want := map[string]uint64{"in_the_clear": 3, "overlay_source": 1}
	if got := n.dropped(); !maps.Equal(got, want) {
		t.Errorf("%v; want %v", got, want)
	}
	for i := range 3 { // another program, such as kube-proxy, changes its own table
		n.run(fmt.Sprintf("nft add table ip other%d", i))
		n.apply(State{Filters: []Filter{FilterFor(FilterSets{Pod: pod, Remote: []netip.Prefix{remote4, remote6, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 250, byte(i), 0}), 24)}})}})
		if got := n.dropped(); !maps.Equal(got, want) {
			t.Errorf("after a change %v; want %v", got, want)
		}
	}
}

// The kernel tracks no connections with the filter of a gateway's Pod, but does with that of a
// node. A read never takes one filter for the other.
func TestTheKernelTracksNoConnectionsInAGatewaysPod(t *testing.T) {
	for _, pod := range []bool{false, true} {
		n := open(t, GatewayPod)
		sets := FilterSets{Remote: []netip.Prefix{remote4}}
		if pod {
			n.apply(State{Filters: []Filter{FilterFor(sets)}}) // the filter that an older gateway used
		}
		sets.Pod = pod
		want := State{Filters: []Filter{FilterFor(sets)}}
		if n.apply(want) == "" {
			t.Errorf("Pod %v: nothing was to be done", pod)
		}
		n.k.memory.filter.Store(true)
		if again := n.apply(want); again != "" {
			t.Errorf("Pod %v: applied twice: %s", pod, again)
		}
		n.run("ip link set lo up")
		if err := Do(n.f, func() error {
			c, err := net.Dial("udp", "127.0.0.1:53")
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("x"))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if tracked := strings.TrimSpace(n.run("cat /proc/sys/net/netfilter/nf_conntrack_count")) != "0"; tracked == pod {
			t.Errorf("Pod %v: tracks connections: %v", pod, tracked)
		}
	}
}

// The filter of a gateway's Pod refuses the same packets as a node's filter in its place, for the
// same reasons. Only the Pod's filter refuses a packet from the overlay whose source, but not
// destination, belongs to a peer: packets from peers reach a gateway through its TUNs.
func TestGatewayPodFilterRefusesLikeANodeFilter(t *testing.T) {
	for _, pod := range []bool{false, true} {
		n := open(t, GatewayPod)
		n.apply(State{Filters: []Filter{FilterFor(FilterSets{Pod: pod, Nodes: []netip.Addr{netip.MustParseAddr("172.30.1.11")}, Remote: []netip.Prefix{remote4}})}})
		devices := []string{"eth0", "isthmus.vxlan", "isthmus0"} // packets that far0 sends arrive at eth0
		n.router(devices...)
		n.run("ip addr add 10.244.0.254/32 dev eth0")
		n.run("ip route add default dev eth0")
		n.run("ip route add 10.246.0.0/16 dev isthmus0")
		n.run("ip route add 10.246.200.0/24 dev eth0") // a foreign route
		for _, packet := range []struct {
			dev, src, dst string
			port          uint16
			want          string // reason of the drop; empty: the packet passes
		}{
			{"isthmus.vxlan", "10.244.0.11", "10.246.0.9", 53, ""},
			{"isthmus0", "10.246.0.9", "10.244.0.11", 53, ""},
			{"isthmus0", "10.246.0.9", "10.246.1.1", 53, ""}, // from one peer to another peer's mapped endpoint
			{"eth0", "172.30.1.11", "10.244.0.254", OverlayPort, ""},
			{"isthmus.vxlan", "10.246.1.1", "10.246.0.9", 53, "overlay_stranger"},
			{"isthmus.vxlan", "10.246.1.1", "10.99.0.1", 53, map[bool]string{true: "overlay_stranger"}[pod]},
			{"isthmus.vxlan", "10.244.0.11", "10.99.0.1", 53, "overlay_stranger"},
			{"isthmus.vxlan", "10.244.0.11", "10.246.0.9", OverlayPort, "overlay_port"},
			{"isthmus0", "10.246.0.9", "10.244.0.11", OverlayPort, "overlay_port"},
			{"isthmus.vxlan", "10.244.0.11", "10.244.0.254", 53, "peer_to_node"},
			{"isthmus0", "10.246.0.9", "10.244.0.254", 53, "peer_to_node"},
			{"eth0", "172.30.1.99", "10.244.0.254", OverlayPort, "overlay_source"},
			{"eth0", "10.246.0.9", "10.244.0.11", 53, "forged_source"},
			{"isthmus.vxlan", "10.244.0.11", "10.246.200.1", 53, "in_the_clear"},
			{"isthmus0", "10.246.0.9", "10.246.200.1", 53, "in_the_clear"},
		} {
			got := n.dropReason(slices.Index(devices, packet.dev), packet.src, packet.dst, packet.port)
			if got != packet.want {
				t.Errorf("Pod %v: %+v: %q", pod, packet, got)
			}
		}
	}
}

// If a pod of ours forges a source that no pod has, its node forwards the packet to a peer only if
// the route to that source leads through the pod's device. Otherwise each such source would look
// like a separate host, and use up the gateway's NAPT ports.
func TestNodeFilterRefusesForgedSourcesThatNoPodHas(t *testing.T) {
	n := open(t, RouteAgent)
	n.apply(State{Filters: []Filter{FilterFor(FilterSets{Remote: []netip.Prefix{remote4}, Underlay: []string{"eth0"},
		Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, Elsewhere: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}})}})
	devices := []string{"eth0", "pod", "isthmus.vxlan"}
	n.router(devices...)
	n.run("ip route add default dev eth0")
	n.run("ip route add 10.246.0.0/16 dev isthmus.vxlan")
	n.run("ip route add 10.244.0.11 dev pod")
	n.run("ip route add 198.51.100.9 dev pod")
	for _, packet := range []struct{ dev, src, want string }{
		{"pod", "10.244.0.11", ""},
		{"pod", "203.0.113.77", "forged_source"},
		{"pod", "172.30.1.11", "forged_source"},
		{"pod", "10.244.1.9", "forged_source"}, // address of another node's pod
		{"pod", "198.51.100.9", ""},            // address of a container outside of Kubernetes
		{"eth0", "203.0.113.77", ""},
		{"eth0", "198.51.100.9", ""}, // other nodes are behind eth0, and have checked the source
	} {
		if got := n.dropReason(slices.Index(devices, packet.dev), packet.src, "10.246.0.9", 53); got != packet.want {
			t.Errorf("%+v: %q", packet, got)
		}
	}
}

// router makes veth pairs, whose near ends have the names in devices, and makes the node forward
// between them, without reverse path filtering. A frame that the far end of device i sends to
// 02:00:00:00:00:0i arrives at that device.
func (n *node) router(devices ...string) {
	n.t.Helper()
	values := map[string]string{"ip_forward": "1", "conf/all/rp_filter": "0"}
	for i, dev := range devices {
		n.run(fmt.Sprintf("ip link add %s address 02:00:00:00:00:0%d type veth peer name far%[2]d", dev, i))
		n.run("ip link set " + dev + " up")
		n.run(fmt.Sprintf("ip link set far%d up", i))
		values["conf/"+dev+"/rp_filter"] = "0"
	}
	for path, value := range values {
		if err := Do(n.f, func() error { return os.WriteFile("/proc/sys/net/ipv4/"+path, []byte(value), 0) }); err != nil {
			n.t.Fatal(err)
		}
	}
}

// dropReason injects a datagram and returns the reason for which the filter dropped it, or "" if it
// passed.
func (n *node) dropReason(i int, src, dst string, port uint16) string {
	n.t.Helper()
	dropped, passed := n.dropped(), n.passed()
	n.inject(i, netip.MustParseAddr(src), netip.MustParseAddr(dst), port)
	got := "nothing was seen"
	for deadline := time.Now().Add(time.Minute); got == "nothing was seen" && time.Now().Before(deadline); {
		if n.passed() != passed {
			got = ""
		}
		for reason, count := range n.dropped() { // check the drops in any case: a packet that is dropped on its way out was also counted as forwarded
			if count != dropped[reason] {
				got = reason
			}
		}
	}
	return got
}

// inject sends a datagram from the far end of device i, so that it arrives at that device.
func (n *node) inject(i int, src, dst netip.Addr, port uint16) {
	n.t.Helper()
	ip := slices.Concat([]byte{0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, unix.IPPROTO_UDP, 0, 0}, src.AsSlice(), dst.AsSlice())
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	frame := slices.Concat([]byte{2, 0, 0, 0, 0, byte(i), 2, 0, 0, 0, 0, 9, 8, 0}, ip, []byte{0x80, 0x80}, binary.BigEndian.AppendUint16(nil, port), []byte{0, 8, 0, 0})
	if err := Do(n.f, func() error {
		far, err := net.InterfaceByName(fmt.Sprintf("far%d", i))
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: far.Index})
	}); err != nil {
		n.t.Fatal(err)
	}
}

// passed returns how many packets were forwarded, or were received at a port on which nobody
// listens.
func (n *node) passed() (sum int) {
	n.t.Helper()
	var names []string
	for line := range strings.Lines(n.run("cat /proc/net/snmp")) {
		fields := strings.Fields(line)
		if len(names) != len(fields) || names[0] != fields[0] {
			names = fields
			continue
		}
		for i, name := range names {
			if name == "ForwDatagrams" || names[0] == "Udp:" && name == "NoPorts" {
				count, err := strconv.Atoi(fields[i])
				if err != nil {
					n.t.Fatal(err)
				}
				sum += count
			}
		}
	}
	return sum
}

// For networks of peers with any prefix lengths, and after any change of them: no packet for a peer
// leaves, and all others do.
func TestFilterDropsPeerTrafficForAnyPrefixLength(t *testing.T) {
	n := open(t, RouteAgent)
	n.run("ip link add eth0 type veth peer name eth1")
	n.run("ip addr add 172.30.1.11/24 dev eth0")
	n.run("ip link set eth0 up")
	n.run("ip link set eth1 up")
	n.run("ip route add default via 172.30.1.1")
	n.run("ip neigh add 172.30.1.1 lladdr 02:00:00:00:00:01 dev eth0")
	rng := rand.New(rand.NewPCG(14, 16))
	random := func(bits int) netip.Prefix { // within few networks of length 8, so that some results are adjacent
		p, _ := netip.AddrFrom4([4]byte{10 + byte(rng.IntN(4)), byte(rng.IntN(256)), byte(rng.IntN(256)), byte(rng.IntN(256))}).Prefix(bits)
		return p
	}
	last := func(p netip.Prefix) netip.Addr {
		b := p.Addr().As4()
		for bit := p.Bits(); bit < 32; bit++ {
			b[bit/8] |= 0x80 >> (bit % 8)
		}
		return netip.AddrFrom4(b)
	}
	var remote []netip.Prefix
	for range 15 {
		remote = slices.DeleteFunc(remote, func(netip.Prefix) bool { return rng.IntN(4) == 0 })
		for range 3 {
			remote = append(remote, random(11+rng.IntN(22)))
		}
		n.apply(State{Filters: []Filter{FilterFor(FilterSets{Remote: remote})}})
		var to []netip.Addr
		for _, p := range remote {
			to = append(to, p.Addr(), last(p), p.Addr().Prev(), last(p).Next())
		}
		for range 20 {
			to = append(to, random(32).Addr())
		}
		if err := Do(n.f, func() error {
			c, err := net.ListenUDP("udp4", nil)
			if err != nil {
				return err
			}
			defer c.Close()
			for _, addr := range to {
				_, err := c.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(addr, 53))
				if err != nil && !errors.Is(err, unix.EPERM) {
					return err
				}
				if of := slices.ContainsFunc(remote, func(p netip.Prefix) bool { return p.Contains(addr) }); of != (err != nil) {
					t.Errorf("%v, of a peer: %v; sending: %v", addr, of, err)
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func script(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// Another program removes our filter. Before its event is read, we change another table. Neither
// transaction may be taken for the other.
func TestAForeignTransactionDuringOursIsDetected(t *testing.T) {
	n := open(t, RouteAgent)
	var held atomic.Bool
	waits, goOn := make(chan struct{}, 100), make(chan struct{})
	if err := Do(n.f, func() error {
		return n.k.Events(t.Context(), func() {
			if held.Load() {
				waits <- struct{}{}
				<-goOn
			}
		})
	}); err != nil {
		t.Fatal(err)
	}
	defer close(goOn)
	want := State{Filters: []Filter{FilterFor(FilterSets{Remote: []netip.Prefix{remote4}})}, SourceNAT: []SourceNAT{SourceNATFor(SourceNATSets{Remote: []netip.Prefix{remote4}})}}
	n.apply(want)
	held.Store(true)
	n.run("nft add element inet isthmus own { 192.0.2.77 }")
	<-waits // the goroutine that reads events is blocked
	n.apply(want)
	n.run("nft delete table inet isthmus")
	want.SourceNAT = []SourceNAT{SourceNATFor(SourceNATSets{Remote: []netip.Prefix{remote4}, Pods: []netip.Prefix{netip.MustParsePrefix("10.99.0.0/16")}})}
	n.apply(want)
	if !n.k.Busy() {
		t.Error("Busy does not request another Apply")
	}
	n.apply(want)
	if got := n.run("nft list tables"); !strings.Contains(got, "inet isthmus\n") {
		t.Errorf("the filter is gone: %s", got)
	}
}

// Limits reports the obstacles that we cannot avoid, and only these.
func TestLimitsNameTheRuleThatBlocksTraffic(t *testing.T) {
	for _, program := range []string{"nft", "iptables-legacy"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	nat := SourceNATFor(SourceNATSets{Local: []netip.Prefix{netip.MustParsePrefix("10.64.1.0/24")}, Remote: []netip.Prefix{remote4}})
	for name, c := range map[string]struct {
		commands []string
		want     string // part of the only Limit; empty: there is no Limit
	}{
		"nothing":                                  {nil, ""},
		"masquerade at srcnat":                     {[]string{"nft add table ip cni", "nft add chain ip cni post { type nat hook postrouting priority 90 ; }", "nft add rule ip cni post masquerade"}, ""},
		"masquerade before our chain":              {[]string{"nft add table ip cni", "nft add chain ip cni post { type nat hook postrouting priority -10 ; }", "nft add rule ip cni post masquerade"}, "chain post of table ip cni has priority -10"},
		"an empty chain before ours":               {[]string{"nft add table ip cni", "nft add chain ip cni post { type nat hook postrouting priority -10 ; }"}, ""},
		"a forward chain with the policy drop":     {[]string{"nft add table inet fw", "nft add chain inet fw f { type filter hook forward priority 0 ; policy drop ; }"}, ""},
		"a forward chain that rejects":             {[]string{"nft add table inet fw", "nft add chain inet fw f { type filter hook forward priority 0 ; }", "nft add rule inet fw f reject with icmpx type admin-prohibited"}, ""},
		"a forward chain that accepts our devices": {[]string{"nft add table inet fw", "nft add chain inet fw f { type filter hook forward priority 0 ; policy drop ; }", "nft add rule inet fw f oifname isthmus.vxlan accept"}, ""},
		"iptables-nft":                             {[]string{"iptables-nft -P FORWARD DROP"}, ""},
		"legacy":                                   {[]string{"iptables-legacy -P FORWARD ACCEPT"}, ""},
		"legacy, policy":                           {[]string{"iptables-legacy -P FORWARD DROP"}, ""},
		"legacy, a drop in another chain":          {[]string{"iptables-legacy -N C", "iptables-legacy -A FORWARD -j C", "iptables-legacy -A C -j DROP"}, "iptables-legacy -A FORWARD -i isthmus+"},
		"legacy, established":                      {[]string{"iptables-legacy -P FORWARD DROP", "iptables-legacy -A FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT"}, ""},
		"legacy, Docker and flannel":               {[]string{"iptables-legacy -P FORWARD DROP", "iptables-legacy -N FLANNEL-FWD", "iptables-legacy -A FORWARD -m comment --comment flannel -j FLANNEL-FWD", "iptables-legacy -A FLANNEL-FWD -s 10.64.0.0/14 -j ACCEPT", "iptables-legacy -A FLANNEL-FWD -d 10.64.0.0/14 -j ACCEPT"}, ""},
		"legacy, only one direction accepted":      {[]string{"iptables-legacy -P FORWARD DROP", "iptables-legacy -N C", "iptables-legacy -A FORWARD -g C", "iptables-legacy -A C -s 10.64.0.0/14 -j ACCEPT", "iptables-legacy -A C -j DROP"}, "iptables-legacy"},
		"legacy, with the rules of the remedy":     {[]string{"iptables-legacy -P FORWARD DROP", "iptables-legacy -A FORWARD -i isthmus+ -j ACCEPT", "iptables-legacy -A FORWARD -o isthmus+ -j ACCEPT"}, ""},
		"legacy, other devices":                    {[]string{"iptables-legacy -A FORWARD ! -i cni0 -o eth0 -j ACCEPT", "iptables-legacy -A FORWARD -p tcp -j ACCEPT", "iptables-legacy -A FORWARD -j REJECT"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := open(t, RouteAgent)
			for _, command := range c.commands {
				n.run(strings.Replace(command, "legacy ", "legacy -w ", 1))
			}
			n.apply(State{SourceNAT: []SourceNAT{nat}, Accepts: []Accept{{}}})
			var got []Limit
			if err := Do(n.f, func() error { got = n.k.Limits(nat, true); return nil }); err != nil {
				t.Fatal(err)
			}
			if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.Contains(got[0].Message, c.want)) {
				t.Errorf("%+v, want %q", got, c.want)
			}
		})
	}
}
