package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A Sniffer watches the packets that the nodes of a lab send into the underlay:
//
//	node's eth0 ──► port of the underlay ──► bridge ──► other nodes of the cluster, router
//	                   │ tap
//	                   └─► filter in the kernel ─► reader: leak?
//
// Every node's port has a tap: a packet socket that receives each packet of the node once. A packet
// for a peer can leave a node only through eth0. The node's other devices lead to its own pods, to
// the server outside the cluster, into the overlay and into the gateway. Control planes are not
// watched, because they forward no packets for peers.
//
// Its methods may be called concurrently.
type Sniffer struct {
	refresh       func(*Cluster)
	kernel        *kernel             // namespace of the underlay
	nodes         map[string]*Cluster // by name of the node; its port has the same name
	done          chan struct{}       // closed when there are no more link notifications
	running       sync.WaitGroup
	readersAtWork atomic.Int32 // readers that process a frame now

	mu             sync.Mutex
	watches        map[*Cluster]*watch
	addedAddrs     map[*Cluster][]netip.Addr // addresses that nodes got after the start of the lab, even if they have lost them again
	taps           map[string]*tap           // by name of the port
	removedPackets uint64                    // packets of removed ports
	report         Report
	errs           []error // errors that made the Sniffer miss packets
	closed         bool
	closing        sync.Once
}

// A tap is a packet socket on one port.
type tap struct {
	cluster *Cluster
	port    string
	index   int
	before  uint64 // number of packets that the port had received when the tap was opened
	packets uint64 // number of packets since then, at the last call of count
	file    *os.File
	socket  syscall.RawConn
	done    chan struct{} // closed when the reader has processed all frames
}

// A Report is the result of a Sniffer.
type Report struct {
	// Packets counts the packets that nodes have sent. A superpacket counts once. The last packets
	// of a removed port may be missing.
	Packets uint64
	Leaked  int    // number of packets in the clear
	Leaks   []Leak // the first hundred leaks
	Excused int    // number of leaks that Excuse has removed; Leaked does not include them
}

// A Leak is a packet that a node sent in the clear.
type Leak struct {
	At      time.Time // time at which the Sniffer processed the packet
	Node    string
	Network netip.Prefix // the peer's network
	Packet  string       // addresses, protocol, ports, length
}

func (l Leak) String() string {
	return fmt.Sprintf("%s %s, which must not show %v: %s", l.At.Format("15:04:05.000000"), l.Node, l.Network, l.Packet)
}

const maxLeaks = 100

func (r Report) String() string {
	text := fmt.Sprintf("underlay watched: %d packets, %d of them in the clear", r.Packets, r.Leaked)
	if r.Excused > 0 {
		text += fmt.Sprintf(", and %d more that docs/security.md lists as remaining risks", r.Excused)
	}
	return text
}

// err returns an error that lists the leaks, or nil if there were none.
func (r Report) err() error {
	if r.Leaked == 0 {
		return nil
	}
	var text strings.Builder
	for _, l := range r.Leaks {
		fmt.Fprintf(&text, "\n\t%v", l)
	}
	return fmt.Errorf("%v; want none:%s", r, text.String())
}

// Sniff starts to watch the underlay. Until Watch specifies networks, no packet counts as a leak.
// The nodes may process the removal of a peer before the caller of Watch does, and then a packet
// may look like a leak without being one. Therefore, if refresh is not nil, the Sniffer calls
// refresh for each packet that looks like a leak, and then checks the packet again. refresh should
// call Watch with the current networks, and may block. The caller must close the Sniffer before the
// lab.
func (l *Lab) Sniff(refresh func(*Cluster)) (*Sniffer, error) {
	s := &Sniffer{refresh: refresh, nodes: map[string]*Cluster{}, watches: map[*Cluster]*watch{}, addedAddrs: map[*Cluster][]netip.Addr{}, taps: map[string]*tap{}, done: make(chan struct{})}
	for _, c := range l.Clusters {
		s.watches[c] = watchFor(c, Watched{}, nil)
		for _, n := range c.Nodes {
			s.nodes[n.Name] = c
		}
	}
	var err error
	if s.kernel, err = openKernel(l.Underlay); err != nil {
		return nil, err
	}
	news := make(chan netlink.LinkUpdate)
	options := netlink.LinkSubscribeOptions{Namespace: &s.kernel.ns, ErrorCallback: func(err error) { s.fail("notifications about devices", err) }}
	if err := netlink.LinkSubscribeWithOptions(news, s.done, options); err != nil {
		s.kernel.close()
		return nil, fmt.Errorf("sniffer: notifications about devices: %w", err)
	}
	s.running.Go(func() { s.follow(news) })
	for name := range s.nodes {
		link, err := s.kernel.nl.LinkByName(name)
		if err == nil {
			err = s.tap(link)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("sniffer: %w", err), s.Close())
		}
	}
	return s, nil
}

// Watch replaces the description of the packets that the nodes of a cluster must not send. If that
// fails, Close returns the error.
func (s *Sniffer) Watch(c *Cluster, what Watched) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watch(c, what)
}

// watch implements Watch. The caller holds s.mu.
func (s *Sniffer) watch(c *Cluster, what Watched) {
	s.watches[c] = watchFor(c, what, s.addedAddrs[c])
	for _, t := range s.taps {
		if t.cluster != c {
			continue
		}
		if err := t.attach(s.watches[c]); err != nil && !s.closed {
			s.errs = append(s.errs, fmt.Errorf("sniffer: %s: watch %v: %w", t.port, what.Networks, err))
		}
	}
}

// Report returns the result so far.
func (s *Sniffer) Report() Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count()
	return s.report
}

// settle waits until all packets sent so far have been processed, but at most a minute.
func (s *Sniffer) settle() {
	for quiet, deadline := 0, time.Now().Add(time.Minute); quiet < 3 && time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if quiet++; s.readersAtWork.Load() > 0 || s.waiting() {
			quiet = 0
		}
	}
}

// waiting reports whether a tap has frames that its reader has not read yet.
func (s *Sniffer) waiting() (found bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.taps {
		_ = t.socket.Control(func(fd uintptr) { // fails if the tap is closed, and then there are no frames
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			found = found || err == nil && n > 0
		})
	}
	return found
}

// Take returns the leaks so far and removes them from the report. It is for tests that cause leaks
// on purpose.
func (s *Sniffer) Take() []Leak {
	s.settle()
	s.mu.Lock()
	defer s.mu.Unlock()
	leaks := s.report.Leaks
	s.report.Leaks, s.report.Leaked = nil, 0
	return leaks
}

// Excuse removes from the report each leak for which isKnown returns true. It counts these leaks as
// Excused and returns them.
func (s *Sniffer) Excuse(isKnown func(Leak) bool) (excused []Leak) {
	s.settle()
	s.mu.Lock()
	defer s.mu.Unlock()
	var others []Leak
	for _, l := range s.report.Leaks {
		if isKnown(l) {
			excused = append(excused, l)
		} else {
			others = append(others, l)
		}
	}
	s.report.Leaks = others
	s.report.Leaked -= len(excused)
	s.report.Excused += len(excused)
	return excused
}

// Close stops the Sniffer after all packets sent so far have been processed. The error contains the
// leaks, and all errors that made the Sniffer miss packets. A second call returns the same error.
func (s *Sniffer) Close() error {
	s.closing.Do(func() {
		s.mu.Lock()
		s.count()
		s.closed = true
		s.mu.Unlock()
		close(s.done)
		for _, t := range s.taps {
			s.end(t)
		}
		s.running.Wait()
		s.kernel.close()
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(append([]error{s.report.err()}, s.errs...)...)
}

// fail records an error that makes the Sniffer miss packets.
func (s *Sniffer) fail(what string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && !s.closed {
		s.errs = append(s.errs, fmt.Errorf("sniffer: %s: %w", what, err))
	}
}

// count updates the packet counters. The caller holds s.mu.
func (s *Sniffer) count() {
	if s.closed {
		return
	}
	n := s.removedPackets
	for name, t := range s.taps {
		link, err := s.kernel.nl.LinkByName(name)
		if err == nil && link.Attrs().Index == t.index { // otherwise the port is being removed; a notification will follow
			t.packets = received(link) - t.before
		}
		n += t.packets
	}
	s.report.Packets = n
}

func received(link netlink.Link) uint64 {
	if st := link.Attrs().Statistics; st != nil {
		return st.RxPackets
	}
	return 0
}

// follow opens taps on new ports, such as those of a recreated node, and closes taps of removed
// ports.
func (s *Sniffer) follow(news <-chan netlink.LinkUpdate) {
	for u := range news {
		name := u.Attrs().Name
		switch {
		// A notification of the bridge family is only about a port's membership in the bridge.
		case s.nodes[name] == nil || u.Family == unix.AF_BRIDGE:
		case u.Header.Type == unix.RTM_DELLINK:
			s.untap(name, u.Attrs().Index)
		default:
			s.fail("a new port", s.tap(u.Link))
		}
	}
}

// tap opens a tap on a port that has no tap.
func (s *Sniffer) tap(link netlink.Link) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	name, index := link.Attrs().Name, link.Attrs().Index
	if old := s.taps[name]; s.closed || old != nil && old.index == index {
		return nil
	}
	t := &tap{cluster: s.nodes[name], port: name, index: index, before: received(link), done: make(chan struct{})}
	if err := t.open(s.kernel.host, s.watches[t.cluster]); err != nil {
		return err
	}
	s.taps[name] = t
	s.running.Go(func() { s.read(t) })
	return nil
}

// untap closes the tap of a removed port.
func (s *Sniffer) untap(name string, index int) {
	s.mu.Lock()
	t := s.taps[name]
	if s.closed || t == nil || t.index != index {
		s.mu.Unlock()
		return
	}
	delete(s.taps, name)
	s.removedPackets += t.packets // a veth pair loses its counters when it is removed
	s.mu.Unlock()
	s.end(t)
}

// end closes a tap after its reader has processed all frames received so far.
func (s *Sniffer) end(t *tap) {
	_ = t.file.SetReadDeadline(time.Unix(1, 0)) // fails only if the file is closed
	<-t.done
	t.file.Close()
}

// read processes the frames of a tap until the tap is closed.
func (s *Sniffer) read(t *tap) {
	defer close(t.done)
	buf := make([]byte, snapLength)
	for {
		n, err := t.file.Read(buf)
		if errors.Is(err, unix.ENETDOWN) { // the port is down, and may come up again
			continue
		}
		if err != nil {
			break
		}
		s.checkFrame(t, buf[:n])
	}
	_ = t.socket.Control(func(fd uintptr) { // cannot fail, because the file is closed later
		for {
			n, err := unix.Read(int(fd), buf)
			if errors.Is(err, unix.ENETDOWN) || errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				break
			}
			s.checkFrame(t, buf[:n])
		}
		st, err := unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS)
		s.mu.Lock()
		defer s.mu.Unlock()
		if err != nil {
			s.errs = append(s.errs, fmt.Errorf("sniffer: %s: number of missed packets: %w", t.port, err))
		} else if st.Drops > 0 {
			s.errs = append(s.errs, fmt.Errorf("sniffer: %s: %d packets were lost before they could be checked, and may have been in the clear", t.port, st.Drops))
		}
	})
}

// checkFrame checks one frame, and records a leak if it finds one.
func (s *Sniffer) checkFrame(t *tap, frame []byte) {
	s.readersAtWork.Add(1)
	defer s.readersAtWork.Add(-1)
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _, leaks := s.watches[t.cluster].leak(frame)
	if leaks && s.report.Leaked < maxLeaks { // in a flood of leaks, confirm only the first ones
		s.mu.Unlock()
		s.findNodes(t.cluster)
		if s.refresh != nil {
			s.refresh(t.cluster)
		}
		s.mu.Lock()
	}
	network, packet, leaks := s.watches[t.cluster].leak(frame)
	if !leaks {
		return
	}
	if s.report.Leaked++; s.report.Leaked <= maxLeaks {
		s.report.Leaks = append(s.report.Leaks, Leak{now, t.port, network, packet})
	}
}

// findNodes reads the current underlay addresses of a cluster's nodes from their kernels. A new
// address counts as an endpoint of the overlay from then on, even after the node has lost it,
// because packets with that address may still be in flight.
func (s *Sniffer) findNodes(c *Cluster) {
	var have []netip.Addr
	for _, n := range c.Nodes {
		have = append(have, uplinkAddrs(n.Host)...)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.watches[c]
	known := len(s.addedAddrs[c])
	for _, a := range have {
		if !w.isNode(a) && !slices.Contains(s.addedAddrs[c], a) {
			s.addedAddrs[c] = append(s.addedAddrs[c], a)
		}
	}
	if len(s.addedAddrs[c]) > known {
		s.watch(c, w.Watched)
	}
}

// uplinkAddrs returns the IPv4 addresses of a host's uplink, or none if the host no longer
// exists.
func uplinkAddrs(h *Host) (all []netip.Addr) {
	k, err := openKernel(h)
	if err != nil {
		return nil
	}
	defer k.close()
	link, err := k.nl.LinkByName(uplink)
	if err != nil {
		return nil
	}
	addrs, err := k.nl.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return nil
	}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP.To4()); ok {
			all = append(all, addr)
		}
	}
	return all
}

// open creates the tap's socket, which receives no frame before its filter is attached.
func (t *tap) open(underlay *Host, w *watch) error {
	fd := -1
	err := underlay.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return os.NewSyscallError("packet socket", err)
	})
	if err != nil {
		return err
	}
	t.file = os.NewFile(uintptr(fd), "tap of "+t.port)
	if t.socket, err = t.file.SyscallConn(); err == nil {
		err = t.attach(w)
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1)
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	}
	if err == nil {
		all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: t.index})
	}
	if err != nil {
		t.file.Close()
		return fmt.Errorf("tap on %s: %w", t.port, err)
	}
	return nil
}

// attach replaces the socket's filter by that of w.
func (t *tap) attach(w *watch) error {
	program, err := bpf.Assemble(w.filter())
	if err != nil {
		return err
	}
	code := make([]unix.SockFilter, len(program))
	for i, in := range program {
		code[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	filter := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	controlErr := t.socket.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter)
	})
	return errors.Join(controlErr, os.NewSyscallError("attach filter", err))
}
