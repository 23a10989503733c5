// Package hosts creates network namespaces for the tests of this module, joined by veth pairs,
// with raw packet sockets at their edges. The namespaces are unnamed, so the kernel removes them
// with the test process, however it ends.
//
// The package shares no code with Isthmus, not even with internal/lab, because tests use it to
// check Isthmus.
package hosts

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A Host is one network namespace with a netlink handle inside. It is closed at the end of the
// test.
type Host struct {
	Name string

	t  testing.TB
	ns netns.NsHandle
	nl *netlink.Handle
}

// Need skips the test unless it runs as root and all commands are installed.
func Need(t testing.TB, commands ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	for _, c := range commands {
		if _, err := exec.LookPath(c); err != nil {
			t.Skipf("needs the command %s: 'make deps' installs it", c)
		}
	}
}

// New creates a namespace that forwards IPv4 without restrictions (no reverse path filter, no
// redirects). IPv6 is off, so that only the test sends packets in the namespace.
func New(t testing.TB, name string) *Host {
	t.Helper()
	h := &Host{Name: name, t: t}
	err := onThread(func() (err error) {
		if h.ns, err = netns.New(); err != nil {
			return err
		}
		h.nl, err = netlink.NewHandle()
		return err
	})
	if err != nil {
		t.Fatalf("namespace %s: %v", name, err)
	}
	t.Cleanup(func() {
		h.nl.Close()
		h.ns.Close()
	})
	for key, value := range map[string]string{
		"ipv4/ip_forward":                  "1",
		"ipv4/conf/all/rp_filter":          "0",
		"ipv4/conf/default/rp_filter":      "0",
		"ipv4/conf/all/send_redirects":     "0",
		"ipv4/conf/default/send_redirects": "0",
		"ipv6/conf/all/disable_ipv6":       "1",
		"ipv6/conf/default/disable_ipv6":   "1",
	} {
		h.Sysctl(key, value)
	}
	h.must(h.nl.LinkSetUp(h.Link("lo")), "lo up")
	return h
}

// IPv6 enables IPv6 and its forwarding for devices that are created later. The devices get no
// link-local address, so the only packets they send are multicast membership reports.
func (h *Host) IPv6() {
	h.t.Helper()
	for _, s := range []struct{ key, value string }{
		{"ipv6/conf/default/addr_gen_mode", "1"},
		{"ipv6/conf/default/accept_dad", "0"},
		{"ipv6/conf/default/disable_ipv6", "0"},
		{"ipv6/conf/all/disable_ipv6", "0"},
		{"ipv6/conf/all/forwarding", "1"},
	} {
		h.Sysctl(s.key, s.value)
	}
}

// Do runs f in the namespace, on a thread that runs nothing else meanwhile. f must not call
// t.Fatal.
func (h *Host) Do(f func() error) error {
	return onThread(func() error {
		if err := netns.Set(h.ns); err != nil {
			return err
		}
		return f()
	})
}

// onThread runs f on a locked thread and puts the thread back into its namespace afterwards.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		before, err := netns.Get()
		if err != nil {
			done <- err
			return
		}
		defer before.Close()
		err = f()
		if back := netns.Set(before); back == nil {
			runtime.UnlockOSThread() // otherwise the thread would end with this goroutine
		}
		done <- err
	}()
	return <-done
}

// Sysctl writes /proc/sys/net/KEY in the namespace.
func (h *Host) Sysctl(key, value string) {
	h.t.Helper()
	h.must(h.Do(func() error {
		return os.WriteFile(filepath.Join("/proc/sys/net", key), []byte(value), 0)
	}), "sysctl "+key)
}

// Run runs a command in the namespace with the given standard input and returns its output.
func (h *Host) Run(stdin, name string, args ...string) string {
	h.t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var out []byte
	err := h.Do(func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	})
	h.must(err, fmt.Sprintf("%s\n%s%s", cmd, stdin, out))
	return string(out)
}

// Start starts a command in the namespace. The caller must wait for the command.
func (h *Host) Start(cmd *exec.Cmd) {
	h.t.Helper()
	h.must(h.Do(cmd.Start), cmd.String())
}

// Veth joins two hosts by a pair of devices.
func Veth(a *Host, nameA string, b *Host, nameB string, mtu int) {
	a.t.Helper()
	a.must(a.nl.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: nameA, MTU: mtu}, PeerName: nameB, PeerNamespace: netlink.NsFd(b.ns),
	}), "veth "+nameA)
	a.must(a.nl.LinkSetUp(a.Link(nameA)), nameA+" up")
	b.must(b.nl.LinkSetMTU(b.Link(nameB), mtu), nameB+" mtu")
	b.must(b.nl.LinkSetUp(b.Link(nameB)), nameB+" up")
}

// Link returns the current state of a device.
func (h *Host) Link(dev string) netlink.Link {
	h.t.Helper()
	link, err := h.nl.LinkByName(dev)
	h.must(err, dev)
	return link
}

// SetUp brings a device up.
func (h *Host) SetUp(dev string) {
	h.t.Helper()
	h.must(h.nl.LinkSetUp(h.Link(dev)), dev+" up")
}

// Addr adds an address.
func (h *Host) Addr(dev string, addr netip.Prefix) {
	h.t.Helper()
	h.must(h.nl.AddrAdd(h.Link(dev), &netlink.Addr{IPNet: ipNet(addr)}), "address "+addr.String())
}

// Route adds a route through dev. via is an on-link next hop; the zero value means none.
func (h *Host) Route(to netip.Prefix, via netip.Addr, dev string) {
	h.t.Helper()
	route := &netlink.Route{Dst: ipNet(to.Masked()), LinkIndex: h.Link(dev).Attrs().Index, Scope: netlink.SCOPE_LINK}
	if via.IsValid() {
		route.Gw, route.Scope, route.Flags = via.AsSlice(), netlink.SCOPE_UNIVERSE, int(netlink.FLAG_ONLINK)
	}
	h.must(h.nl.RouteAdd(route), "route "+to.String())
}

// Neighbour adds a permanent neighbor entry, so that no host has to answer ARP requests for the
// address.
func (h *Host) Neighbour(addr netip.Addr, mac net.HardwareAddr, dev string) {
	h.t.Helper()
	h.must(h.nl.NeighSet(&netlink.Neigh{
		LinkIndex: h.Link(dev).Attrs().Index, State: netlink.NUD_PERMANENT, IP: addr.AsSlice(), HardwareAddr: mac,
	}), "neighbour "+addr.String())
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func (h *Host) must(err error, what string) {
	h.t.Helper()
	if err != nil {
		h.t.Fatalf("%s: %s: %v", h.Name, what, err)
	}
}

var ethIP, ethIPv6 = htons(unix.ETH_P_IP), htons(unix.ETH_P_IPV6)

func htons(v uint16) uint16 { return v<<8 | v>>8 }
