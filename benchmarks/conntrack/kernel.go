package main

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// kernel measures forwarding under an nftables ruleset and subtracts forwarding without one.
func kernel(rules string) func(flows int) (figures, error) {
	return func(flows int) (f figures, err error) {
		plain, err := newRouter("")
		if err != nil {
			return f, err
		}
		f.without = perPacket(flows, plain.write)
		if err := plain.close(); err != nil {
			return f, err
		}
		r, err := newRouter(rules)
		if err != nil {
			return f, err
		}
		before, err := slabs()
		if err != nil {
			return f, err
		}
		f.fresh = perPacket(flows, r.write)
		after, err := slabs()
		if err != nil {
			return f, err
		}
		// A slab cache that has grown by one object per flow contains conntrack's entries or their
		// extensions.
		for name, now := range after {
			if was := before[name]; now.objects-was.objects > flows*9/10 {
				f.octets += float64((now.objects-was.objects)*now.size) / float64(flows)
			}
		}
		f.known = perPacket(flows, r.write)
		if n, err := count(); err != nil || n != flows {
			return f, fmt.Errorf("%d entries, want %d (%w)", n, flows, err)
		}
		return f, r.close()
	}
}

// A router is a network namespace that forwards from one TUN to another. The calling thread stays
// in the namespace until close.
type router struct {
	home, ns netns.NsHandle
	in, out  int
	err      error // first write error
}

func newRouter(rules string) (*router, error) {
	r := &router{}
	var err error
	if r.home, err = netns.Get(); err != nil {
		return nil, err
	}
	if r.ns, err = netns.New(); err != nil {
		return nil, err
	}
	if r.in, err = tun("in", "10.1.255.1/16"); err != nil {
		return nil, fmt.Errorf("TUN in: %w", err)
	}
	if r.out, err = tun("out", "10.2.255.1/16"); err != nil {
		return nil, fmt.Errorf("TUN out: %w", err)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return nil, err
	}
	if rules != "" {
		nft := exec.Command("nft", "-f", "-")
		nft.Stdin = strings.NewReader(rules)
		if out, err := nft.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("nft: %w\n%s", err, out)
		}
		// With the default timeout, entries would expire during the measurement.
		if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", []byte("600"), 0); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func tun(name, addr string) (fd int, err error) {
	if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return 0, err
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return 0, os.NewSyscallError("TUNSETIFF", err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return 0, err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return 0, err
	}
	network := netip.MustParsePrefix(addr)
	a, err := netlink.ParseAddr(network.String())
	if err != nil {
		return 0, err
	}
	return fd, netlink.AddrAdd(link, a)
}

// write passes a packet to the kernel. It uses a raw system call, so that the Go scheduler does
// not run between two packets.
func (r *router) write(b []byte) {
	_, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(r.in), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	if e != 0 && r.err == nil {
		r.err = os.NewSyscallError("write", e)
	}
}

// close leaves the namespace and waits until the kernel has freed its objects.
func (r *router) close() error {
	unix.Close(r.in)
	unix.Close(r.out)
	if err := netns.Set(r.home); err != nil {
		return err
	}
	r.ns.Close()
	r.home.Close()
	for last, deadline := 0, time.Now().Add(20*time.Second); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		s, err := slabs()
		if err != nil {
			return err
		}
		n := s["nf_conntrack"].objects
		if n == last {
			break
		}
		last = n
	}
	return r.err
}

// count returns the number of conntrack entries in the thread's namespace.
func count() (int, error) {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

type slab struct{ objects, size int }

// slabs returns the number of used objects in each slab cache, and their size with padding.
func slabs() (map[string]slab, error) {
	file, err := os.Open("/proc/slabinfo")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	all := map[string]slab{}
	for s := bufio.NewScanner(file); s.Scan(); {
		var name string
		var active, total, size int
		if n, _ := fmt.Sscan(s.Text(), &name, &active, &total, &size); n == 4 {
			all[name] = slab{active, size}
		}
	}
	return all, nil
}
