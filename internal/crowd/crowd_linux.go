package kube

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

// crowdMost is how many datagrams are refused in questionInterval until the kernel drops what comes from elsewhere than
// the addresses of other gateways. Anybody may send to the port. To read and refuse a datagram takes 4 µs of a CPU
// that packets need, and those that wait in the socket leave no room for those of gateways.
const crowdMost = 50

// crowd keeps strangers out of a socket while there are too many. The zero value does nothing. open and close may be called
// concurrently.
type crowd struct {
	socket  syscall.RawConn
	refused atomic.Int32 // since open
	dropped uint32       // by the kernel, as last seen
}

func newCrowd(conn net.PacketConn) *crowd {
	c := new(crowd)
	if s, ok := conn.(syscall.Conn); ok {
		c.socket, _ = s.SyscallConn() // an error says that it is closed
	}
	return c
}

// refuse notes a refused datagram. Those of the gateways alone are let in until open if there were too many.
func (c *crowd) refuse(gateways func() map[netip.Addr]bool) error {
	if c.socket == nil || c.refused.Add(1) != crowdMost {
		return nil
	}
	return c.only(slices.Collect(maps.Keys(gateways())))
}

// only has the kernel drop what does not come from these addresses.
func (c *crowd) only(from []netip.Addr) error {
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

// open lets everybody in again. It returns how many datagrams the kernel has dropped since the last time.
func (c *crowd) open() (dropped uint32) {
	if c.socket == nil {
		return 0
	}
	crowded := c.refused.Swap(0) >= crowdMost
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
