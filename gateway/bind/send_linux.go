package bind

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// gsoSpace is the size of UDP_SEGMENT as a control message on a 64-bit machine.
const gsoSpace = 24

// sender is the scratch memory of one Send. It comes from a pool, because Send may be called
// concurrently.
type sender struct {
	header  unix.Msghdr
	iovecs  [maxSegments]unix.Iovec
	control [pktinfoSpace + gsoSpace]byte
	errno   unix.Errno
	gate    func() bool // may be nil
	shut    bool        // whether gate returned false at the last call
	try     func(fd uintptr)
	wait    func(fd uintptr) bool
}

func newSender(gate func() bool) *sender {
	m := &sender{gate: gate}
	m.header.Iov = &m.iovecs[0]
	m.try = func(fd uintptr) { m.sendmsg(fd) }
	m.wait = func(fd uintptr) bool {
		m.sendmsg(fd)
		return m.errno != unix.EAGAIN
	}
	return m
}

// sendmsg sends the message of m.header, or sets shut if gate returns false. It uses a raw system
// call, because the socket does not block.
func (m *sender) sendmsg(fd uintptr) {
	for {
		if m.shut = m.gate != nil && !m.gate(); m.shut {
			m.errno = 0
			return
		}
		_, _, m.errno = unix.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&m.header)), unix.MSG_NOSIGNAL)
		if m.errno != unix.EINTR {
			return
		}
	}
}

// A SendError reports that some of the datagrams of one Send were not sent. Datagrams before
// and after these were sent.
type SendError struct {
	Unsent int
	Err    error
}

func (e *SendError) Error() string { return fmt.Sprintf("%d datagrams not sent: %v", e.Unsent, e.Err) }

// Unwrap returns the kernel's errors.
func (e *SendError) Unwrap() error { return e.Err }

// Unsent returns how many of the n datagrams of a Send were not sent, given the error of that Send.
// An error other than SendError concerns all n.
func Unsent(err error, n int) int {
	if e := (*SendError)(nil); errors.As(err, &e) {
		return e.Unsent
	}
	return n
}

// send sends datagrams to e, in order and with as few calls as possible. It continues after an
// error and returns a SendError.
func (s *socket) send(bufs [][]byte, e *endpoint) error {
	m := s.senders.Get().(*sender)
	defer s.senders.Put(m)
	m.header.Name, m.header.Namelen = &e.name[0], e.nameLen
	var errs error
	unsent := 0
	segments := e.segments()
	for len(bufs) > 0 {
		n := 1
		if segments {
			n = sameSize(bufs)
		}
		err := s.sendOne(m, bufs[:n], e)
		if n > 1 && errors.Is(err, unix.EIO) { // route without checksum offload, or with IPsec, see udp(7)
			segments = false
			e.refuse()
			s.refused.Add(1)
		}
		if n > 1 && refusesGSO(err) {
			for i := range bufs[:n] {
				if err := s.sendOne(m, bufs[i:i+1], e); err != nil {
					errs, unsent = errors.Join(errs, err), unsent+1
				}
			}
		} else if err != nil {
			errs, unsent = errors.Join(errs, err), unsent+n
		}
		bufs = bufs[n:]
	}
	clear(m.iovecs[:]) // the pool must not keep packets alive
	m.header.Name = nil
	if errs != nil {
		return &SendError{unsent, errs}
	}
	return nil
}

// sameSize returns the number of datagrams at the start of bufs that fit one call. They have
// the same size, except that the last may be shorter.
func sameSize(bufs [][]byte) int {
	size := len(bufs[0])
	total := size
	n := 1
	for n < len(bufs) && n < maxSegments {
		next := len(bufs[n])
		if next > size || next == 0 || total+next > maxPayload {
			break
		}
		total += next
		n++
		if next < size {
			break
		}
	}
	return n
}

// refusesGSO reports whether, after this error, the datagrams should be sent one by one. EIO means
// that the device cannot segment. EINVAL and EMSGSIZE mean that a segment exceeds the path MTU. The
// kernel can fragment such a datagram if it is sent alone (__ip_append_data in
// net/ipv4/ip_output.c).
func refusesGSO(err error) bool {
	return errors.Is(err, unix.EIO) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE)
}

// sendOne sends datagrams with one call. If the kernel refuses the source address of e, it
// retries without that address.
func (s *socket) sendOne(m *sender, bufs [][]byte, e *endpoint) error {
	for i, b := range bufs {
		m.iovecs[i].Base = unsafe.SliceData(b)
		m.iovecs[i].SetLen(len(b))
	}
	m.header.SetIovlen(len(bufs))
	pinned := e.infoLen > 0 && !e.cleared.Load()
	err := s.sendFrom(m, bufs, e, pinned)
	if pinned && refusesSource(err) && s.sendFrom(m, bufs, e, false) == nil {
		e.ClearSrc()
		return nil
	}
	return err
}

// refusesSource reports whether err may mean that the host has lost the source address, or the
// route from that address to the peer (ip_route_output_key_hash_rcu in net/ipv4/route.c).
func refusesSource(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EADDRNOTAVAIL)
}

// sendFrom makes one sendmsg call of m, with or without the source address of e.
func (s *socket) sendFrom(m *sender, bufs [][]byte, e *endpoint, source bool) error {
	control := 0
	if source {
		control = copy(m.control[:], e.info[:e.infoLen])
	}
	if len(bufs) > 1 {
		size := uint16(len(bufs[0]))
		control += putControl(m.control[control:], unix.IPPROTO_UDP, unix.UDP_SEGMENT, asBytes(&size))
	}
	m.header.Control = nil
	if control > 0 {
		m.header.Control = &m.control[0]
	}
	m.header.SetControllen(control)
	// Use Control, because RawConn.Write holds a lock for the whole call, and several goroutines
	// send.
	err := s.raw.Control(m.try)
	if err == nil && m.errno == unix.EAGAIN {
		err = s.raw.Write(m.wait)
	}
	if m.shut {
		return ErrShut
	}
	if err == nil && m.errno != 0 {
		return m.errno
	}
	return err
}
