// Package crowd keeps strangers out of a UDP socket that anybody may send to, while there are too many of them.
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

// most is how many datagrams are refused between two calls of Open until the kernel drops what does not come from
// expected addresses. To read and refuse a datagram takes 4 µs of a CPU that packets need, and those that wait in the
// socket leave no room for those of expected senders.
const most = 50

// A Crowd is that of one socket. The zero value does nothing. Open and Refuse may be called concurrently.
type Crowd struct {
	socket  syscall.RawConn
	refused atomic.Int32 // since Open
	dropped uint32       // by the kernel, as last seen
}

// Of is the Crowd of a socket.
func Of(conn net.PacketConn) *Crowd {
	c := new(Crowd)
	if s, ok := conn.(syscall.Conn); ok {
		c.socket, _ = s.SyscallConn() // an error says that it is closed
	}
	return c
}

// Refuse notes a refused datagram. If there were too many, only what comes from expected addresses, 64 at most, is let in
// until Open.
func (c *Crowd) Refuse(expected func() map[netip.Addr]bool) error {
	if c.socket == nil || c.refused.Add(1) != most {
		return nil
	}
	return c.only(slices.Collect(maps.Keys(expected())))
}

// only has the kernel drop what does not come from these addresses.
func (c *Crowd) only(from []netip.Addr) error {
	program, err := bpf.Assemble(onlyFrom(from))
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

// Open lets everybody in again. It is called every quarter of a second, say, and returns how many datagrams the kernel has dropped since the last time.
func (c *Crowd) Open() (dropped uint32) {
	if c.socket == nil {
		return 0
	}
	crowded := c.refused.Swap(0) >= most
	_ = c.socket.Control(func(fd uintptr) {
		if crowded {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // fails where there is none
		}
		var info [unix.SK_MEMINFO_VARS]uint32
		size := uint32(unsafe.Sizeof(info))
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_MEMINFO,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0); errno == 0 {
			drops := info[unix.SK_MEMINFO_DROPS]
			dropped, c.dropped = drops-c.dropped, drops // both wrap
		}
	})
	return dropped
}

// onlyFrom accepts what comes from these addresses.
func onlyFrom(all []netip.Addr) (program []bpf.Instruction) {
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
