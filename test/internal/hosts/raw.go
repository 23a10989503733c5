package hosts

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A Raw sends and receives complete IP packets on one device. It bypasses the namespace's IP
// stack: addresses, sockets and routes of the namespace have no influence.
type Raw struct {
	h     *Host
	fd    int
	index int
	mac   net.HardwareAddr // address of the remote device, to which packets are sent
}

// Raw opens dev. dstMAC is the destination MAC address of sent packets; nil on a device without MAC
// addresses. The socket receives only packets that arrive at dev. Use Tap to see also packets that
// leave it.
func (h *Host) Raw(dev string, dstMAC net.HardwareAddr) *Raw {
	h.t.Helper()
	return h.open(dev, dstMAC, ethIP)
}

// Raw6 is Raw for IPv6 packets.
func (h *Host) Raw6(dev string, dstMAC net.HardwareAddr) *Raw {
	h.t.Helper()
	return h.open(dev, dstMAC, ethIPv6)
}

// Tap opens dev for capturing in both directions.
func (h *Host) Tap(dev string) *Raw {
	h.t.Helper()
	return h.open(dev, nil, htons(unix.ETH_P_ALL))
}

func (h *Host) open(dev string, dstMAC net.HardwareAddr, proto uint16) *Raw {
	h.t.Helper()
	r := &Raw{h: h, index: h.Link(dev).Attrs().Index, mac: dstMAC}
	h.must(h.Do(func() (err error) {
		if r.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(proto)); err != nil {
			return os.NewSyscallError("socket", err)
		}
		// Receive discards packets that arrived from other devices before the bind.
		return os.NewSyscallError("bind", unix.Bind(r.fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: r.index}))
	}), "packet socket on "+dev)
	h.t.Cleanup(func() { unix.Close(r.fd) })
	r.Drain(h.t)
	return r
}

// Send sends one IP packet.
func (r *Raw) Send(t testing.TB, b []byte) {
	t.Helper()
	proto := ethIP
	if b[0]>>4 == 6 {
		proto = ethIPv6
	}
	to := &unix.SockaddrLinklayer{Protocol: proto, Ifindex: r.index, Halen: uint8(len(r.mac))}
	copy(to.Addr[:], r.mac)
	if err := unix.Sendto(r.fd, b, 0, to); err != nil {
		t.Fatalf("%s: send %d octets: %v", r.h.Name, len(b), err)
	}
}

// Receive returns the next packet, or nil if none arrives before the timeout.
func (r *Raw) Receive(t testing.TB, timeout time.Duration) []byte {
	t.Helper()
	buf := make([]byte, 1<<16)
	for deadline := time.Now().Add(timeout); ; {
		n, _, err := unix.Recvfrom(r.fd, buf, unix.MSG_DONTWAIT)
		switch {
		case err == nil:
			return buf[:n:n]
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
			t.Fatalf("%s: receive: %v", r.h.Name, err)
		}
		left := time.Until(deadline)
		if left <= 0 {
			return nil
		}
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(r.fd), Events: unix.POLLIN}}, int(left/time.Millisecond)+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatalf("%s: poll: %v", r.h.Name, err)
		}
	}
}

// Drain discards the packets that have arrived so dstMAC.
func (r *Raw) Drain(t testing.TB) {
	t.Helper()
	for r.Receive(t, 0) != nil {
	}
}
