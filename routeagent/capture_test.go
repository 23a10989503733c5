package routeagent

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// capture counts packets with a remote address on a node's underlay device. bare counts all such
// packets outside VXLAN, leaving counts only the packets outside VXLAN with a remote destination,
// and inner counts the packets inside VXLAN.
type capture struct {
	file                 *os.File
	done                 chan struct{}
	bare, leaving, inner atomic.Int64
}

func newCapture(t *testing.T, n *lab.Node) *capture {
	t.Helper()
	c := &capture{done: make(chan struct{})}
	err := n.Do(func() error {
		all := binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL)
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(binary.NativeEndian.Uint16(all)))
		if err != nil {
			return err
		}
		c.file = os.NewFile(uintptr(fd), "capture")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	index := 0
	if err := n.Do(func() error {
		i, err := net.InterfaceByName("eth0")
		if err == nil {
			index = i.Index
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(int(c.file.Fd()), &unix.SockaddrLinklayer{Protocol: binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL)), Ifindex: index}); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(c.done)
		buf := make([]byte, 1<<16)
		for {
			k, err := c.file.Read(buf)
			if err != nil {
				return
			}
			c.count(buf[:k])
		}
	}()
	t.Cleanup(c.stop)
	return c
}

func (c *capture) stop() {
	c.file.Close()
	<-c.done
}

func (c *capture) count(frame []byte) {
	ip, ok := ipv4(frame)
	if !ok {
		return
	}
	if remote(ip) {
		c.bare.Add(1)
	}
	if isRemote([4]byte(ip[16:20])) {
		c.leaving.Add(1)
	}
	const udp, headers = 20, 20 + 8 + 8 // without IP options
	if ip[9] == unix.IPPROTO_UDP && len(ip) > headers && binary.BigEndian.Uint16(ip[udp+2:]) == kernel.OverlayPort {
		if inside, ok := ipv4(ip[headers:]); ok && remote(inside) {
			c.inner.Add(1)
		}
	}
}

func ipv4(frame []byte) ([]byte, bool) {
	return frame[min(14, len(frame)):], len(frame) >= 14+20 && binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_IP
}

func remote(ip []byte) bool {
	return isRemote([4]byte(ip[12:16])) || isRemote([4]byte(ip[16:20]))
}

func isRemote(a [4]byte) bool {
	addr := netip.AddrFrom4(a)
	return remotePods.Contains(addr) || remoteExternal.Contains(addr)
}
