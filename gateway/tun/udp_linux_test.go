package tun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// end is one of two clusters: a kernel with a TUN, and the engine of its gateway.
type end struct {
	*namespace
	tun    *Device
	engine *natengine.Engine
	conn   *net.UDPConn
	at     netip.AddrPort // address of conn, as the other end sees it

	from, to, damaged atomic.Int64 // superpackets from the kernel and to it; packets that are neither one datagram nor a superpacket
}

// newEnd makes an end whose kernel has the address addr. pods is the network of its pods, and seen
// is that network as the other end sees it. remote is the network of the other end as this end sees
// it.
func newEnd(t *testing.T, addr, pods, seen, remote string) *end {
	t.Helper()
	e := &end{namespace: newNamespace(t), engine: natengine.New(natengine.Config{})}
	m := natengine.Remap{From: netip.MustParsePrefix(pods), To: netip.MustParsePrefix(seen)}
	far := netip.MustParsePrefix(remote)
	if err := e.engine.SetPeers([]natengine.Peer{{ID: "other", RemotePods: []netip.Prefix{far}, Pods: []natengine.Remap{m}}}); err != nil {
		t.Fatal(err)
	}
	e.tun = e.open(t, "tuntest0", mtu, Options{USO: true})
	if o := e.tun.Offloads(); !o.USO4 || !o.USO6 {
		t.Skip("this kernel has no USO (Linux 6.2 and later)")
	}
	local := netip.MustParseAddr(addr)
	e.do(t, func() error {
		if err := setUp("tuntest0", netip.PrefixFrom(local, local.BitLen()).String()); err != nil {
			return err
		}
		link, err := netlink.LinkByName("tuntest0")
		if err != nil {
			return err
		}
		dst := &net.IPNet{IP: far.Addr().AsSlice(), Mask: net.CIDRMask(far.Bits(), far.Addr().BitLen())}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Scope: netlink.SCOPE_LINK}); err != nil {
			return fmt.Errorf("route to %v: %w", far, err)
		}
		// An IPv6 address becomes usable only some time after it was added.
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			routes, err := netlink.RouteGet(local.AsSlice())
			if err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%v is not local: %v, %w", local, routes, err)
			}
		}
		e.conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 7000)))
		return err
	})
	t.Cleanup(func() { e.conn.Close() })
	e.option(t, unix.UDP_GRO, 1)
	shown, _ := m.Map(local)
	e.at = netip.AddrPortFrom(shown, 7000)
	return e
}

func (e *end) option(t *testing.T, name, value int) {
	t.Helper()
	raw, err := e.conn.SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, name, value) }), err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// carry does the work of both gateways for packets of e's kernel. It translates a superpacket,
// cuts it into segments as in the tunnel, joins these, translates the result and writes it as
// one packet. It returns when either TUN is closed.
func (e *end) carry(to *end) {
	var v packet.View
	var cut packet.Segmenter
	join := packet.Coalescer{UDP: true}
	p := make([]byte, packet.VirtioHeaderLen+65535)
	for {
		n, err := e.tun.Read(p, true)
		if err != nil {
			return
		}
		var h packet.VirtioHeader
		if h.Decode(p[:n]) != nil || v.Parse(p[packet.VirtioHeaderLen:n], h.ChecksumState()) != nil {
			e.damaged.Add(1)
			continue
		}
		size, err := h.Validate(&v)
		if err != nil {
			e.damaged.Add(1)
			continue
		}
		if e.engine.Outbound(&v, 0).Action != natengine.Forward {
			continue // messages of the kernel to its routers
		}
		var segments [][]byte
		if size == 0 {
			v.CompleteChecksum()
			segments = append(segments, v.Bytes())
		} else if cut.Reset(&v, size) == nil {
			e.from.Add(1)
			for cut.Remaining() > 0 {
				segments = append(segments, bytes.Clone(cut.Next()))
			}
		}
		for _, b := range segments {
			if join.Add(b) != nil {
				e.damaged.Add(1)
			}
		}
		for _, run := range join.Runs() {
			if to.engine.Inbound(&run.View, 0).Action != natengine.Forward {
				e.damaged.Add(1)
				continue
			}
			if run.Segments > 1 {
				to.to.Add(1)
			}
			header := make([]byte, packet.VirtioHeaderLen)
			run.Header.Encode(header)
			if to.tun.Write(append([][]byte{header, run.View.Bytes()}, run.Tail...)) != nil {
				return
			}
		}
		join.Reset()
	}
}

// receive reads datagrams of size octets until it has read the octets of sent. It returns the
// number of messages with more than one datagram.
func (e *end) receive(t *testing.T, sent []byte, size int) (joined int) {
	t.Helper()
	p, oob := make([]byte, 65535), make([]byte, 128)
	for rest := sent; len(rest) > 0; {
		e.conn.SetReadDeadline(time.Now().Add(time.Minute))
		n, c, _, _, err := e.conn.ReadMsgUDPAddrPort(p, oob)
		if err != nil {
			t.Fatalf("%d of %d octets arrived: %v", len(sent)-len(rest), len(sent), err)
		}
		each := n
		controls, err := unix.ParseSocketControlMessage(oob[:c])
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range controls {
			if m.Header.Level == unix.SOL_UDP && m.Header.Type == unix.UDP_GRO {
				each = int(binary.NativeEndian.Uint32(m.Data))
			}
		}
		if want := min(size, len(rest)); each != want || n > len(rest) || !bytes.Equal(p[:n], rest[:n]) {
			t.Fatalf("%d octets in datagrams of %d, the first of %d: want datagrams of %d as they were sent", n, each, len(sent)-len(rest), want)
		}
		if n > each {
			joined++
		}
		rest = rest[n:]
	}
	return joined
}

// A program sends with UDP_SEGMENT. The datagrams must leave its kernel as one superpacket, be
// translated, segmented, joined and translated again, and enter the other kernel as one
// superpacket. There a program must receive exactly the same datagrams by UDP_GRO, in few messages.
// Both clusters use the same addresses.
func TestUDPSuperpacketsPassBetweenTwoKernels(t *testing.T) {
	for name, c := range map[string]struct{ addrA, podsA, seenA, addrB, podsB, seenB string }{
		"IPv4": {"10.8.0.5", "10.8.0.0/24", "10.61.7.0/24", "10.8.0.9", "10.8.0.0/20", "10.72.16.0/20"},
		"IPv6": {"fd08::5", "fd08::/64", "fd61:7::/64", "fd08::9", "fd08::/56", "fd72::/56"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newEnd(t, c.addrA, c.podsA, c.seenA, c.seenB)
			b := newEnd(t, c.addrB, c.podsB, c.seenB, c.seenA)
			var wg sync.WaitGroup
			wg.Go(func() { a.carry(b) })
			wg.Go(func() { b.carry(a) })
			defer wg.Wait()
			defer b.tun.Close()
			defer a.tun.Close()
			rng := rand.New(rand.NewPCG(8, 9))
			stream := rand.NewChaCha8([32]byte{8})
			const rounds = 200
			joined := [2]int{}
			for range rounds {
				// The kernel accepts 64 or 128 segments at once, each up to the MTU (see
				// maxUDPSegments in packet).
				size := 1 + rng.IntN(mtu-48)
				sent := make([]byte, min(size*(2+rng.IntN(62)), 65000)-rng.IntN(size))
				stream.Read(sent)
				for i, way := range [2][2]*end{{a, b}, {b, a}} {
					way[0].option(t, unix.UDP_SEGMENT, size)
					if _, err := way[0].conn.WriteToUDPAddrPort(sent, way[1].at); err != nil {
						t.Fatalf("%d octets in datagrams of %d: %v", len(sent), size, err)
					}
					joined[i] += way[1].receive(t, sent, size)
				}
			}
			for i, e := range [2]*end{a, b} {
				if e.from.Load() < rounds*9/10 || e.to.Load() < rounds*9/10 || joined[i] < rounds*9/10 {
					t.Errorf("of %d superpackets %d left their kernel as such, %d were written, %d read: want nearly all",
						rounds, e.from.Load(), e.to.Load(), joined[i])
				}
				if n := e.damaged.Load(); n != 0 {
					t.Errorf("%d packets from the kernel, or their segments, are malformed", n)
				}
			}
		})
	}
}
