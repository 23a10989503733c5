package tun

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

const mtu = 1420

// wire joins a TUN to a TCP/IP stack in memory that reads and writes superpackets. It counts
// the packets.
type wire struct {
	host                     *memlink.Host
	superIn, superOut        atomic.Int64 // superpackets from the kernel and to the kernel
	hdrLenWrong, badHeader   atomic.Int64
	writeErrors, singlesFrom atomic.Int64
}

func connect(t *testing.T, d *Device, addrs ...netip.Addr) *wire {
	t.Helper()
	link := memlink.NewLink("host", mtu)
	host, err := memlink.NewHost(link, memlink.HostOptions{Addrs: addrs, TSO: true})
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{host: host}
	var wg sync.WaitGroup
	wg.Go(func() { w.fromKernel(d, link) })
	wg.Go(func() { w.toKernel(d, link) })
	t.Cleanup(func() {
		d.Close()
		link.Close()
		host.Close()
		wg.Wait()
	})
	return w
}

func (w *wire) fromKernel(d *Device, link *memlink.Link) {
	p := make([]byte, packet.VirtioHeaderLen+65535)
	var v packet.View
	for {
		n, err := d.Read(p, true)
		if err != nil {
			return
		}
		var h packet.VirtioHeader
		if err := h.Decode(p[:n]); err != nil {
			w.badHeader.Add(1)
			continue
		}
		if err := v.Parse(p[packet.VirtioHeaderLen:n], h.ChecksumState()); err != nil {
			continue // for example multicast of the kernel itself
		}
		size, err := h.Validate(&v)
		if err != nil {
			w.badHeader.Add(1)
			continue
		}
		if size > 0 {
			w.superIn.Add(1)
			if int(h.HdrLen) != v.PayloadOffset() {
				w.hdrLenWrong.Add(1)
			}
			if v.PayloadOffset()+size > mtu {
				w.badHeader.Add(1)
			}
		} else {
			w.singlesFrom.Add(1)
		}
		link.Write([][]byte{p[:n]})
	}
}

// toKernel writes each packet as several buffers, as the gateway writes runs.
func (w *wire) toKernel(d *Device, link *memlink.Link) {
	p := make([]byte, packet.VirtioHeaderLen+65535)
	for {
		n, err := link.Read(p, true)
		if err != nil {
			return
		}
		if p[1] != 0 {
			w.superOut.Add(1)
		}
		pieces := [][]byte{p[:packet.VirtioHeaderLen]}
		for rest := p[packet.VirtioHeaderLen:n]; len(rest) > 0; {
			piece := rest[:min(len(rest), 1300)]
			pieces, rest = append(pieces, piece), rest[len(piece):]
		}
		if err := d.Write(pieces); err != nil && !errors.Is(err, os.ErrClosed) {
			w.writeErrors.Add(1)
		}
	}
}

// exchange sends size octets in each direction over a connection between the kernel in ns and
// the stack in memory. It compares hashes of the data.
func exchange(t *testing.T, ns *namespace, w *wire, server netip.AddrPort, size int) {
	t.Helper()
	l, err := w.host.ListenTCP(server)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	rng := rand.NewChaCha8([32]byte{1})
	up, down := make([]byte, size), make([]byte, size)
	rng.Read(up)
	rng.Read(down)

	serverGot := make(chan [32]byte, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			serverGot <- [32]byte{}
			return
		}
		go c.Write(down)
		h := sha256.New()
		io.CopyN(h, c, int64(size))
		serverGot <- [32]byte(h.Sum(nil))
		c.Read(make([]byte, 1)) // until the client has finished
		c.Close()
	}()

	var c net.Conn
	ns.do(t, func() (err error) {
		c, err = net.DialTimeout("tcp", server.String(), time.Minute)
		return err
	})
	defer c.Close()
	c.SetDeadline(time.Now().Add(3 * time.Minute))
	sent := make(chan error, 1)
	go func() { _, err := c.Write(up); sent <- err }()
	h := sha256.New()
	if _, err := io.CopyN(h, c, int64(size)); err != nil {
		t.Fatalf("receive: %v", err)
	}
	if err := <-sent; err != nil {
		t.Fatalf("send: %v", err)
	}
	if [32]byte(h.Sum(nil)) != sha256.Sum256(down) {
		t.Error("the data that the kernel received differs")
	}
	if <-serverGot != sha256.Sum256(up) {
		t.Error("the data that the kernel sent differs")
	}
	if n := w.badHeader.Load(); n != 0 {
		t.Errorf("%d packets from the kernel with a virtio header that does not validate", n)
	}
	if n := w.writeErrors.Load(); n != 0 {
		t.Errorf("the kernel refused %d packets", n)
	}
	if n := w.host.BadHeaders(); n != 0 {
		t.Errorf("%d packets from the kernel damaged", n)
	}
}

func TestKernelSendsAndReceivesSuperpackets(t *testing.T) {
	for _, tc := range []struct{ name, kernel, host string }{
		{"IPv4", "10.9.0.1/24", "10.9.0.2"},
		{"IPv6", "fd00:9::1/64", "fd00:9::2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ns := newNamespace(t)
			d := ns.open(t, "tuntest0", mtu, Options{})
			if o := d.Offloads(); !o.Checksum || !o.TSO4 || !o.TSO6 {
				t.Fatalf("offloads %+v: want checksum and TSO", o)
			}
			ns.do(t, func() error { return setUp("tuntest0", tc.kernel) })
			host := netip.MustParseAddr(tc.host)
			w := connect(t, d, host)
			exchange(t, ns, w, netip.AddrPortFrom(host, 80), 8<<20)
			if w.superIn.Load() == 0 || w.superOut.Load() == 0 {
				t.Errorf("superpackets from the kernel %d, to it %d: want both", w.superIn.Load(), w.superOut.Load())
			}
			t.Logf("superpackets from the kernel %d, to it %d; hdr_len is not the header's length in %d",
				w.superIn.Load(), w.superOut.Load(), w.hdrLenWrong.Load())
		})
	}
}

// The TUN of a gateway receives forwarded traffic: the superpacket was made for a veth in
// another namespace.
func TestForwardedSuperpacketsArriveWhole(t *testing.T) {
	pod, gw := newNamespace(t), newNamespace(t)
	veth(t, pod, gw, "10.8.0.2/24", "10.8.0.1/24")
	d := gw.open(t, "tuntest0", mtu, Options{})
	gw.do(t, func() error {
		// This file belongs to the namespace of the thread that opens it.
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		return setUp("tuntest0", "10.9.0.1/24")
	})
	pod.do(t, func() error { return routeVia("10.9.0.0/24", "10.8.0.1") })
	host := netip.MustParseAddr("10.9.0.2")
	w := connect(t, d, host)
	exchange(t, pod, w, netip.AddrPortFrom(host, 80), 8<<20)
	if w.superIn.Load() == 0 || w.superOut.Load() == 0 {
		t.Errorf("superpackets from the kernel %d, to it %d: want both", w.superIn.Load(), w.superOut.Load())
	}
	t.Logf("superpackets from the kernel %d, to it %d; hdr_len is not the header's length in %d",
		w.superIn.Load(), w.superOut.Load(), w.hdrLenWrong.Load())
}

// The engine delivers a datagram that arrived in fragments as one packet, larger than any MTU.
// The kernel must accept it and fragment it for the next link.
func TestKernelFragmentsADatagramAboveTheMTU(t *testing.T) {
	pod, gw := newNamespace(t), newNamespace(t)
	veth(t, pod, gw, "10.8.0.2/24", "10.8.0.1/24")
	d := gw.open(t, "tuntest0", mtu, Options{})
	t.Cleanup(func() { d.Close() })
	gw.do(t, func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		return setUp("tuntest0", "10.9.0.1/24")
	})
	pod.do(t, func() error { return routeVia("10.9.0.0/24", "10.8.0.1") })
	var c *net.UDPConn
	pod.do(t, func() (err error) {
		c, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 4000})
		return err
	})
	defer c.Close()
	for _, size := range []int{5000, 65535 - 28} {
		data := make([]byte, size)
		rand.NewChaCha8([32]byte{byte(size)}).Read(data)
		b := packettest.Build(packettest.IP{Src: netip.MustParseAddr("10.9.0.2"), Dst: netip.MustParseAddr("10.8.0.2")}, packettest.UDP{SrcPort: 1, DstPort: 4000, Data: data})
		if err := d.Write([][]byte{make([]byte, packet.VirtioHeaderLen), b}); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 1<<16)
		c.SetReadDeadline(time.Now().Add(time.Minute))
		if n, err := c.Read(got); err != nil || !bytes.Equal(got[:n], data) {
			t.Fatalf("%d of %d octets, %v", n, size, err)
		}
	}
}

// switchOffloadsOff makes the kernel pass each packet singly and complete, like a kernel that
// refuses all offloads.
func switchOffloadsOff(t testing.TB, d *Device) {
	t.Helper()
	var err error
	failed := d.raw.Control(func(fd uintptr) { err = unix.IoctlSetInt(int(fd), unix.TUNSETOFFLOAD, 0) })
	if err := errors.Join(failed, err); err != nil {
		t.Fatal(err)
	}
}

func TestReadReturnsSinglePacketsWithoutOffloads(t *testing.T) {
	ns := newNamespace(t)
	d := ns.open(t, "tuntest0", mtu, Options{})
	switchOffloadsOff(t, d)
	ns.do(t, func() error { return setUp("tuntest0", "10.9.0.1/24") })
	host := netip.MustParseAddr("10.9.0.2")
	w := connect(t, d, host)
	exchange(t, ns, w, netip.AddrPortFrom(host, 80), 1<<20)
	if w.superIn.Load() != 0 || w.singlesFrom.Load() == 0 {
		t.Errorf("from the kernel %d superpackets and %d single ones: want single ones only", w.superIn.Load(), w.singlesFrom.Load())
	}
}

func TestUSOIsEnabledOnlyOnRequest(t *testing.T) {
	ns := newNamespace(t)
	if o := ns.open(t, "tuntest0", mtu, Options{}).Offloads(); o.USO4 || o.USO6 {
		t.Errorf("offloads %+v by default: want no USO", o)
	}
	o := ns.open(t, "tuntest1", mtu, Options{USO: true}).Offloads()
	if !o.TSO4 || !o.TSO6 {
		t.Errorf("offloads %+v: a kernel without USO must still give TSO", o)
	}
	t.Logf("USO: %v", o.USO4)
}

func TestUSOIsUsedOnlyOnTestedKernels(t *testing.T) {
	for release, want := range map[string]bool{
		"6.18.44-generic": true, "6.18": true, "6.18.0-rc3": true, "6.19.1": true, "7.0.0": true, "10.2": true,
		"6.17.13": false, "6.2.0-1": false, "5.19": false, "4.18.0-553.el8_10.x86_64": false, "6": false, "": false, "next": false,
	} {
		if trustsUSO(release) != want {
			t.Errorf("%q: %v", release, !want)
		}
	}
}

// With USO, Read must return the datagrams of one UDP_SEGMENT as one packet. A UDP superpacket
// that is written must be received as separate datagrams. Without USO the kernel must segment.
func TestUDPSuperpacketsPassInBothDirections(t *testing.T) {
	for _, uso := range []bool{true, false} {
		t.Run(fmt.Sprintf("USO %v", uso), func(t *testing.T) {
			ns := newNamespace(t)
			d := ns.open(t, "tuntest0", mtu, Options{USO: uso})
			if uso && !d.Offloads().USO4 {
				t.Skip("this kernel has no USO (Linux 6.2 and later)")
			}
			var c net.PacketConn
			ns.do(t, func() (err error) {
				if err := setUp("tuntest0", "10.9.0.1/24"); err != nil {
					return err
				}
				c, err = net.ListenPacket("udp4", "10.9.0.1:7000")
				return err
			})
			defer c.Close()
			raw, err := c.(*net.UDPConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, 1000) })
			if err != nil {
				t.Fatal(err)
			}
			sent := make([]byte, 4500)
			rand.NewChaCha8([32]byte{}).Read(sent)
			if _, err := c.WriteTo(sent, &net.UDPAddr{IP: net.IPv4(10, 9, 0, 2), Port: 8000}); err != nil {
				t.Fatal(err)
			}
			var payload []byte
			p := make([]byte, packet.VirtioHeaderLen+65535)
			packets := 0
			for len(payload) < len(sent) {
				n, err := d.Read(p, true)
				if err != nil {
					t.Fatal(err)
				}
				var h packet.VirtioHeader
				var v packet.View
				if err := h.Decode(p[:n]); err != nil {
					t.Fatal(err)
				}
				if err := v.Parse(p[packet.VirtioHeaderLen:n], h.ChecksumState()); err != nil || v.Proto() != packet.UDP || v.DstPort() != 8000 {
					continue
				}
				size, err := h.Validate(&v)
				if want := map[bool]int{true: 1000, false: 0}[uso]; err != nil || size != want {
					t.Fatalf("GSO size %d, %v: want %d", size, err, want)
				}
				packets++
				payload = append(payload, v.Bytes()[v.PayloadOffset():]...)
				src, dst, from, to := v.Src(), v.Dst(), v.SrcPort(), v.DstPort()
				v.SetSrc(dst)
				v.SetDst(src)
				v.SetSrcPort(to)
				v.SetDstPort(from)
				if err := d.Write([][]byte{p[:packet.VirtioHeaderLen], v.Bytes()}); err != nil {
					t.Fatal(err)
				}
			}
			if want := map[bool]int{true: 1, false: 5}[uso]; packets != want {
				t.Errorf("%d packets from the kernel: want %d", packets, want)
			}
			c.SetReadDeadline(time.Now().Add(time.Minute))
			for rest := sent; len(rest) > 0; {
				n, _, err := c.ReadFrom(p)
				if err != nil {
					t.Fatal(err)
				}
				if want := rest[:min(1000, len(rest))]; string(p[:n]) != string(want) {
					t.Fatalf("a datagram of %d octets that differs from the %d sent", n, len(want))
				}
				rest = rest[n:]
			}
		})
	}
}

// echoRequest returns a virtio header and an echo request that the kernel of 10.9.0.1 answers.
func echoRequest() []byte {
	p := []byte{
		0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // virtio header without flags
		0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1,
		8, 0, 0, 0, 0, 7, 0, 1,
	}
	put := func(at int, sum uint16) { p[at], p[at+1] = byte(sum>>8), byte(sum) }
	put(20, packet.Checksum(p[10:30], 0))
	put(32, packet.Checksum(p[30:], 0))
	return p
}

func TestReadAndWriteDoNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool allocate")
	}
	ns := newNamespace(t)
	d := ns.open(t, "tuntest0", mtu, Options{})
	ns.do(t, func() error { return setUp("tuntest0", "10.9.0.1/24") })
	request := echoRequest()
	bufs := [][]byte{request[:10], request[10:30], request[30:]}
	p := make([]byte, packet.VirtioHeaderLen+65535)
	answers := 0
	readAll := func() {
		for {
			if _, err := d.Read(p, false); errors.Is(err, datapath.ErrAgain) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			answers++
		}
	}
	allocs := testing.AllocsPerRun(500, func() {
		if err := d.Write(bufs); err != nil {
			t.Fatal(err)
		}
		readAll()
	})
	for end := time.Now().Add(time.Minute); answers < 100 && time.Now().Before(end); readAll() {
		time.Sleep(time.Millisecond) // gives the kernel time to answer
	}
	if allocs != 0 {
		t.Errorf("%v allocations per write, read and empty read: want 0", allocs)
	}
	if answers < 100 {
		t.Errorf("the kernel answered %d of 500 pings", answers)
	}
}

func TestWakeEndsABlockedRead(t *testing.T) {
	d := newNamespace(t).open(t, "tuntest0", mtu, Options{})
	woken := make(chan error)
	go func() { _, err := d.Read(make([]byte, 2000), true); woken <- err }()
	time.Sleep(20 * time.Millisecond)
	d.Wake()
	if err := within(t, woken); !errors.Is(err, datapath.ErrWoken) {
		t.Errorf("%v: want ErrWoken", err)
	}
}

func TestEarlierWakesEndOnlyTheNextWaitingRead(t *testing.T) {
	d := newNamespace(t).open(t, "tuntest0", mtu, Options{})
	p := make([]byte, 2000)
	d.Wake()
	d.Wake()
	if _, err := d.Read(p, false); !errors.Is(err, datapath.ErrAgain) {
		t.Errorf("read without waiting: %v: want ErrAgain, the wake-up is not for it", err)
	}
	if _, err := d.Read(p, true); !errors.Is(err, datapath.ErrWoken) {
		t.Errorf("first waiting read: %v: want ErrWoken", err)
	}
	again := make(chan error)
	go func() { _, err := d.Read(p, true); again <- err }()
	select {
	case err := <-again:
		t.Errorf("second waiting read: %v: want it to wait", err)
	case <-time.After(30 * time.Millisecond):
		d.Close()
		<-again
	}
}

// A wake-up must not hide packets, and a packet must not consume a wake-up.
func TestWakeLosesNoPacket(t *testing.T) {
	ns := newNamespace(t)
	d := ns.open(t, "tuntest0", mtu, Options{})
	ns.do(t, func() error { return setUp("tuntest0", "10.9.0.1/24") })
	p := make([]byte, 2000)
	for { // skip the kernel's own first packets
		if _, err := d.Read(p, false); err != nil {
			break
		}
	}
	d.Wake()
	if err := d.Write([][]byte{echoRequest()}); err != nil {
		t.Fatal(err)
	}
	got, woken := 0, 0
	done := make(chan error)
	go func() {
		for got == 0 || woken == 0 {
			n, err := d.Read(p, true)
			switch {
			case errors.Is(err, datapath.ErrWoken):
				woken++
			case err != nil:
				done <- err
				return
			case n == len(echoRequest()) && p[10]>>4 == 4: // the kernel sometimes sends other packets, over IPv6
				got++
			}
		}
		done <- nil
	}()
	if err := within(t, done); err != nil {
		t.Fatal(err)
	}
	if got != 1 || woken != 1 {
		t.Errorf("%d answers, %d wake-ups: want one of each", got, woken)
	}
}

// The test publishes work before each Wake. A reader that looks for work only after ErrWoken
// must find all of it, in any interleaving.
func TestNoWakeUpIsLost(t *testing.T) {
	d := newNamespace(t).open(t, "tuntest0", mtu, Options{})
	const producers, each = 4, 5_000
	var published atomic.Int64
	for range producers {
		go func() {
			for i := range each {
				published.Add(1)
				d.Wake()
				if i%64 == 0 {
					time.Sleep(time.Microsecond) // lets the reader block
				}
			}
		}()
	}
	done := make(chan error)
	go func() {
		p := make([]byte, 2000)
		for {
			if _, err := d.Read(p, true); err != nil && !errors.Is(err, datapath.ErrWoken) {
				done <- err
				return
			}
			if published.Load() == producers*each {
				done <- nil
				return
			}
		}
	}()
	if err := within(t, done); err != nil {
		t.Error(err)
	}
}

func TestCloseEndsReadAndWrite(t *testing.T) {
	d := newNamespace(t).open(t, "tuntest0", mtu, Options{})
	p := make([]byte, 2000)
	ended := make(chan error)
	go func() { _, err := d.Read(p, true); ended <- err }()
	time.Sleep(20 * time.Millisecond)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := within(t, ended); !errors.Is(err, os.ErrClosed) {
		t.Errorf("blocked read: %v: want os.ErrClosed", err)
	}
	for _, wait := range []bool{true, false} {
		if _, err := d.Read(p, wait); !errors.Is(err, os.ErrClosed) {
			t.Errorf("read, wait %v: %v: want os.ErrClosed", wait, err)
		}
	}
	if err := d.Write([][]byte{echoRequest()}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("write: %v: want os.ErrClosed", err)
	}
	if got := d.MTU(); got != 0 {
		t.Errorf("MTU %d after Close: want 0", got)
	}
	d.Wake()
	if err := d.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestReadEndsWhenTheInterfaceIsDeleted(t *testing.T) {
	ns := newNamespace(t)
	d := ns.open(t, "tuntest0", mtu, Options{})
	ended := make(chan error)
	go func() { _, err := d.Read(make([]byte, 2000), true); ended <- err }()
	time.Sleep(20 * time.Millisecond)
	ns.do(t, func() error {
		l, err := netlink.LinkByName("tuntest0")
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	})
	if err := within(t, ended); err == nil || errors.Is(err, datapath.ErrAgain) || errors.Is(err, datapath.ErrWoken) {
		t.Errorf("%v: want the end of the link", err)
	}
	if err := d.Write([][]byte{echoRequest()}); err == nil {
		t.Error("write to a deleted interface succeeded")
	}
}

func TestWriteReportsErrorsOfTheKernel(t *testing.T) {
	ns := newNamespace(t)
	d := ns.open(t, "tuntest0", mtu, Options{})
	if err := d.Write([][]byte{echoRequest()}); !errors.Is(err, unix.EIO) {
		t.Errorf("interface down: %v: want EIO", err)
	}
	ns.do(t, func() error { return setUp("tuntest0", "10.9.0.1/24") })
	bad := echoRequest()
	bad[1] = 77 // GSO type
	if err := d.Write([][]byte{bad}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("unknown GSO type: %v: want EINVAL", err)
	}
	if err := d.Write(nil); !errors.Is(err, unix.EINVAL) {
		t.Errorf("nothing: %v: want EINVAL", err)
	}
	many := make([][]byte, maxIOVecs+1)
	for i := range many {
		many[i] = []byte{0}
	}
	if err := d.Write(many); !errors.Is(err, unix.EINVAL) {
		t.Errorf("%d pieces: %v: want EINVAL", len(many), err)
	}
	if err := d.Write([][]byte{echoRequest(), nil}); err != nil {
		t.Errorf("a good packet with an empty piece: %v", err)
	}
}

func TestMTUIsReadInTheNamespaceOfTheTUN(t *testing.T) {
	d := newNamespace(t).open(t, "tuntest0", 1380, Options{})
	if got := d.MTU(); got != 1380 { // from a thread outside the namespace
		t.Errorf("MTU %d: want 1380", got)
	}
	if err := d.SetMTU(1300); err != nil {
		t.Error(err)
	}
	if got := d.MTU(); got != 1300 {
		t.Errorf("MTU %d: want 1300", got)
	}
	for _, bad := range []int{-1, 10, 70_000} {
		if err := d.SetMTU(bad); !errors.Is(err, unix.EINVAL) {
			t.Errorf("MTU %d: %v: want EINVAL", bad, err)
		}
	}
}

func TestKernelChoosesTheNumberInAnInterfaceName(t *testing.T) {
	d := newNamespace(t).open(t, "tunx%d", mtu, Options{})
	if d.Name() != "tunx0" {
		t.Errorf("name %q: want tunx0", d.Name())
	}
}

func TestOpenReportsTheMissingRequirement(t *testing.T) {
	ns := newNamespace(t)
	first := ns.open(t, "tuntest0", mtu, Options{})
	for _, tc := range []struct {
		name    string
		prepare func() error // runs on a thread that ends afterwards
		open    string
		want    error
	}{
		{"no device", func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			return unix.Mount("tmpfs", "/dev/net", "tmpfs", 0, "")
		}, "tuntest1", ErrNoTUN},
		{"device not permitted", func() error {
			info, err := os.Stat(clonePath)
			if err != nil {
				return err
			}
			if info.Mode().Perm()&0o002 != 0 {
				return errSkip
			}
			_, err = unix.SetfsuidRetUid(65534)
			return err
		}, "tuntest1", ErrOpenDenied},
		{"no CAP_NET_ADMIN", func() error {
			hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var data [2]unix.CapUserData
			if err := unix.Capget(&hdr, &data[0]); err != nil {
				return err
			}
			data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
			return unix.Capset(&hdr, &data[0])
		}, "tuntest1", ErrNetAdmin},
		{"name taken", func() error { return nil }, first.Name(), unix.EBUSY},
		{"name too long", func() error { return nil }, "abcdefghijklmnop", unix.EINVAL},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var err error
			var d *Device
			done := make(chan struct{})
			nsFile := make(chan *os.File, 1)
			ns.do(t, func() error { f, err := os.Open(ns.path); nsFile <- f; return err })
			f := <-nsFile
			defer f.Close()
			go func() {
				defer close(done)
				runtime.LockOSThread() // never unlocked, because the thread's state has changed
				if err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
					err = fmt.Errorf("setns: %w", err)
					return
				}
				if err = tc.prepare(); err != nil {
					err = fmt.Errorf("prepare: %w", err)
					return
				}
				d, err = Open(tc.open, mtu, Options{})
			}()
			<-done
			if errors.Is(err, errSkip) {
				t.Skip("everybody may open " + clonePath + " here")
			}
			if d != nil {
				d.Close()
			}
			if !errors.Is(err, tc.want) {
				t.Errorf("%v: want %v", err, tc.want)
			}
			t.Log(err)
		})
	}
}

var errSkip = errors.New("skip")

// within waits up to a minute for a value from c.
func within(t *testing.T, c <-chan error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	select {
	case err := <-c:
		return err
	case <-ctx.Done():
		buf := make([]byte, 1<<16)
		t.Fatalf("timeout\n%s", buf[:runtime.Stack(buf, true)])
		return nil
	}
}
