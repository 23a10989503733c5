package tun

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// namespace is a network namespace for one test. One thread runs in it.
type namespace struct {
	calls chan func()
	path  string // path of the namespace, valid while the thread lives
}

// newNamespace makes a network namespace whose loopback interface is up. It skips the test if
// the process lacks the permission. The namespace ends with the test.
func newNamespace(t testing.TB) *namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace and a TUN interface")
	}
	if _, err := os.Stat(clonePath); err != nil {
		t.Skipf("needs a TUN driver: %v", err)
	}
	ns := &namespace{calls: make(chan func())}
	ready, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		ns.path = fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		if ready <- err; err != nil {
			return
		}
		for f := range ns.calls {
			f()
		}
	}()
	if err := <-ready; err != nil {
		<-ended
		t.Skipf("needs the right to make a network namespace: %v", err)
	}
	t.Cleanup(func() { close(ns.calls); <-ended })
	ns.do(t, func() error { return setUp("lo") })
	return ns
}

// do runs f on the namespace's thread.
func (ns *namespace) do(t testing.TB, f func() error) {
	t.Helper()
	done := make(chan error)
	ns.calls <- func() { done <- f() }
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// open makes a TUN in the namespace and closes it at the end of the test.
func (ns *namespace) open(t testing.TB, name string, mtu int, o Options) *Device {
	t.Helper()
	var d *Device
	ns.do(t, func() (err error) { d, err = Open(name, mtu, o); return err })
	t.Cleanup(func() { d.Close() })
	return d
}

// veth joins two namespaces by a pair of interfaces, each with an address.
func veth(t testing.TB, a, b *namespace, addrA, addrB string) {
	t.Helper()
	var peer *os.File
	b.do(t, func() (err error) { peer, err = os.Open(b.path); return err })
	defer peer.Close()
	a.do(t, func() error {
		v := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1", PeerNamespace: netlink.NsFd(int(peer.Fd()))}
		if err := netlink.LinkAdd(v); err != nil {
			return fmt.Errorf("veth: %w", err)
		}
		return setUp("v0", addrA)
	})
	b.do(t, func() error { return setUp("v1", addrB) })
}

// setUp adds addresses to an interface of the calling thread's namespace and brings it up.
func setUp(name string, addrs ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	for _, s := range addrs {
		a, err := netlink.ParseAddr(s)
		if err != nil {
			return err
		}
		a.Flags |= unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("address %s: %w", s, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("link %s up: %w", name, err)
	}
	return nil
}

// routeVia adds a route in the calling thread's namespace.
func routeVia(dst, via string) error {
	_, prefix, err := net.ParseCIDR(dst)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{Dst: prefix, Gw: net.ParseIP(via)})
}
