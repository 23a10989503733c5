package rtnl

import (
	"errors"
	"maps"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// The kernel's counters include a packet with a wrong header checksum, a fragment without the rest
// of its packet, and a packet without a route.
func TestIPDropsAreCounted(t *testing.T) {
	f, err := NewNamespace()
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	inside := func(fn func() error) {
		t.Helper()
		if err := Do(f, fn); err != nil {
			t.Fatal(err)
		}
	}
	dropped := func() (all map[string]uint64) {
		inside(func() (err error) { all, err = DroppedByIP(); return err })
		return all
	}
	inside(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ipfrag_time", []byte("1"), 0); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		r, err := unix.NewIfreq("lo")
		if err != nil {
			return err
		}
		r.SetUint16(unix.IFF_UP)
		return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
	})
	loopback := [4]byte{127, 0, 0, 1}
	datagram := []byte{0x45, 0, 0, 28, 0, 7, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1, 0x80, 0x80, 0x80, 0x80, 0, 8, 0, 0}
	// send sends a packet from a raw socket, for which the kernel completes the header, or from a
	// packet socket.
	send := func(b []byte, family, proto int, to func() unix.Sockaddr) {
		inside(func() error {
			fd, err := unix.Socket(family, map[int]int{unix.AF_INET: unix.SOCK_RAW, unix.AF_PACKET: unix.SOCK_DGRAM}[family]|unix.SOCK_CLOEXEC, proto)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Sendto(fd, b, 0, to())
		})
	}
	raw := func(b []byte) {
		send(b, unix.AF_INET, unix.IPPROTO_RAW, func() unix.Sockaddr { return &unix.SockaddrInet4{Addr: loopback} })
	}
	for _, tc := range []struct {
		reason string
		send   func()
	}{
		{"", func() { raw(datagram) }},
		{"header", func() { // its header checksum is 0
			send(datagram, unix.AF_PACKET, 0, func() unix.Sockaddr {
				lo, err := net.InterfaceByName("lo")
				if err != nil {
					t.Fatal(err)
				}
				return &unix.SockaddrLinklayer{Ifindex: lo.Index, Protocol: 8} // IPv4, in network order
			})
		}},
		{"reassembly", func() { raw(append([]byte{0x45, 0, 0, 28, 0, 8, 0x20}, datagram[7:]...)) }},
		{"no_route", func() {
			inside(func() error {
				if _, err := net.Dial("udp", "192.0.2.1:9"); err == nil {
					t.Error("there is a route")
				}
				return nil
			})
		}},
	} {
		want := dropped()
		if tc.reason != "" {
			want[tc.reason]++
		}
		tc.send()
		got := dropped()
		for end := time.Now().Add(5 * time.Second); !maps.Equal(got, want) && time.Now().Before(end); got = dropped() {
			time.Sleep(10 * time.Millisecond)
		}
		if !maps.Equal(got, want) {
			t.Errorf("%q: counted %v, want %v", tc.reason, got, want)
		}
	}
}

// Packets that arrive while the TUN's queue is full are counted. The test does not read from the
// TUN.
func TestTUNDropsAreCounted(t *testing.T) {
	f, err := NewNamespace()
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	if err := Do(f, func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Skip(err)
		}
		defer unix.Close(fd)
		r, err := unix.NewIfreq("isthmus0")
		if err != nil {
			return err
		}
		r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, r); err != nil {
			return err
		}
		s, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		r.SetUint16(unix.IFF_UP)
		if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r); err != nil {
			return err
		}
		device, err := net.InterfaceByName("isthmus0")
		if err != nil {
			return err
		}
		const sent, queue = 800, 500 // TUN_READQ_SIZE (drivers/net/tun.c)
		for range sent {
			err := unix.Sendto(s, make([]byte, 28), 0, &unix.SockaddrLinklayer{Ifindex: device.Index, Protocol: 8})
			if err != nil && !errors.Is(err, unix.ENOBUFS) {
				return err
			}
		}
		dropped, err := DroppedByIP()
		if n := dropped["device"]; n < sent-queue {
			t.Errorf("%d of %d are counted, and the queue holds %d", n, sent, queue)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

func TestDropCountersAreParsed(t *testing.T) {
	got := make(map[string]uint64)
	addSNMP(got, "Ip: Forwarding InHdrErrors ReasmFails\nIp: 1 2 3\nIcmp: InMsgs InHdrErrors\nIcmp: 7 9\n")
	addSNMP6(got, "Ip6ReasmFails                   \t4\nIcmp6InMsgs\t8\nIp6InTruncatedPkts\t5\n")
	addDevices(got, "Inter-|   Receive |  Transmit\n face |bytes packets\n    lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"+
		"isthmus0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\nisthmus.vxlan:1 2 3 4 5 6 7 8 9 10 11 30 13 14 15 16\n")
	if want := map[string]uint64{"Forwarding": 1, "InHdrErrors": 2, "ReasmFails": 7, "InTruncatedPkts": 5, kernel.DeviceDrops: 42}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	all := make(map[string]uint64)
	v4, err := os.ReadFile("/proc/self/net/snmp")
	if err != nil {
		t.Skip(err)
	}
	v6, _ := os.ReadFile("/proc/self/net/snmp6")
	addSNMP(all, string(v4))
	addSNMP6(all, string(v6))
	for _, d := range kernel.IPDrops {
		for _, name := range d.Counters {
			if _, is := all[name]; !is && len(v6) > 0 && name != kernel.DeviceDrops {
				t.Errorf("%s: the kernel has no counter %s", d.Reason, name)
			}
		}
	}
}
