// Package crowd protects a UDP socket that anybody can reach. While too many datagrams come from
// unexpected senders, it makes the kernel drop the datagrams of these senders.
package crowd

import (
	"encoding/binary"
	"errors"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// maxRefused is the maximum number of refused datagrams between two calls of Open. After that, the
// kernel drops datagrams from unexpected addresses. It takes 4 µs of CPU time to read and refuse a
// datagram. Refused datagrams also fill the socket's buffer, so that the kernel drops datagrams of
// expected senders.
const maxRefused = 50

// A Crowd limits the unexpected datagrams of one socket. The zero value does nothing. Open and
// Refuse may be called concurrently.
type Crowd struct {
	socket  syscall.RawConn
	refused atomic.Int32 // number of refused datagrams since the last call of Open
	dropped uint32       // the kernel's count of dropped datagrams at the last call of Open
}

// Of returns the Crowd of a socket.
func Of(conn net.PacketConn) *Crowd {
	c := new(Crowd)
	if s, ok := conn.(syscall.Conn); ok {
		c.socket, _ = s.SyscallConn() // an error means that the socket is closed
	}
	return c
}

// Refuse counts a refused datagram. After maxRefused, the socket accepts only datagrams from
// expected addresses until the next call of Open. It uses at most 64 of these addresses.
func (c *Crowd) Refuse(expected func() map[netip.Addr]bool) error {
	if c.socket == nil || c.refused.Add(1) != maxRefused {
		return nil
	}
	return c.restrict(slices.Collect(maps.Keys(expected())))
}

// restrict attaches a filter to the socket. The filter drops datagrams from all addresses except
// senders.
func (c *Crowd) restrict(senders []netip.Addr) error {
	program, err := bpf.Assemble(filterFor(senders))
	if err != nil {
		return err
	}
	code := make([]unix.SockFilter, len(program))
	for i, in := range program {
		code[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	filter := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	controlErr := c.socket.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter)
	})
	return errors.Join(controlErr, os.NewSyscallError("attach filter", err))
}

// Open makes the socket accept datagrams from everybody again, and returns how many datagrams the
// kernel has dropped since the last call. The caller must call it several times a second.
func (c *Crowd) Open() (dropped uint32) {
	if c.socket == nil {
		return 0
	}
	crowded := c.refused.Swap(0) >= maxRefused
	_ = c.socket.Control(func(fd uintptr) {
		if crowded {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // fails if there is no filter
		}
		var info [unix.SK_MEMINFO_VARS]uint32
		size := uint32(unsafe.Sizeof(info))
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_MEMINFO,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0); errno == 0 {
			drops := info[unix.SK_MEMINFO_DROPS]
			dropped, c.dropped = drops-c.dropped, drops // both counters wrap
		}
	})
	return dropped
}

// filterFor returns a filter that accepts only datagrams from the first 64 of the addresses.
func filterFor(all []netip.Addr) (program []bpf.Instruction) {
	const network = 0xfff00000 // SKF_NET_OFF: the offset of the IP header
	for _, addr := range all[:min(len(all), 64)] {
		b, offset := addr.Unmap().AsSlice(), uint32(network+12)
		if len(b) == 16 {
			offset = network + 8
		}
		for i := 0; i < len(b); i += 4 {
			program = append(program, bpf.LoadAbsolute{Off: offset + uint32(i), Size: 4},
				bpf.JumpIf{Cond: bpf.JumpEqual, Val: binary.BigEndian.Uint32(b[i:]), SkipFalse: uint8((len(b)-i)/2 - 1)})
		}
		program = append(program, bpf.RetConstant{Val: 0xffff})
	}
	return append(program, bpf.RetConstant{Val: 0})
}
