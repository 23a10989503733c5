package bind

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
)

// end is a Bind and the goroutines that receive from it.
type end struct {
	*Bind
	port uint16
	got  chan datagram
	done chan error
}

type datagram struct {
	b  []byte
	ep conn.Endpoint
}

func newEnd(t *testing.T) *end {
	t.Helper()
	e := &end{Bind: New(), got: make(chan datagram, 4096), done: make(chan error, 2)}
	fns, port, err := e.Listen(0)
	e.run(t, port, err, len(fns), func(i int) error {
		var b Batch
		for {
			if err := fns[i](&b, true); err != nil {
				return err
			}
			for !b.Empty() {
				m, from := b.Next()
				e.got <- datagram{bytes.Clone(m), from}
				copy(m, bytes.Repeat([]byte{0xee}, len(m))) // overwriting one message must not affect the others
			}
			b.Reset()
		}
	})
	return e
}

func (e *end) run(t *testing.T, port uint16, err error, n int, pump func(i int) error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	e.port = port
	for i := range n {
		go func() { e.done <- pump(i) }()
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		for range n {
			if err := <-e.done; !errors.Is(err, net.ErrClosed) {
				t.Errorf("receiving ended with %v, want net.ErrClosed", err)
			}
		}
	})
}

func (e *end) next(t *testing.T) datagram {
	t.Helper()
	select {
	case d := <-e.got:
		return d
	case <-time.After(time.Minute):
		t.Fatal("no datagram within a minute")
		return datagram{}
	}
}

func (e *end) at(t *testing.T, addr string) conn.Endpoint {
	t.Helper()
	return New().Endpoint(netip.AddrPortFrom(netip.MustParseAddr(addr), e.port))
}

// onOneProcessor keeps the rest of a test on one processor. On the loopback interface, a
// datagram from another processor may overtake the previous one.
func onOneProcessor(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked, so the thread ends with the test
	var may, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if may.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
}

func TestDatagramsArriveUnchanged(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "::1"} {
		for _, gso := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/gso=%v", addr, gso), func(t *testing.T) {
				a, b := newEnd(t), newEnd(t)
				if a.v6 == nil && addr == "::1" {
					t.Skip("this machine has no IPv6")
				}
				onOneProcessor(t)
				to := b.at(t, addr).(*endpoint)
				if !gso {
					to.refuse()
				}
				rng := rand.New(rand.NewPCG(1, 2))
				for range 50 {
					batch := randBatch(rng)
					if err := a.Send(batch, to); err != nil {
						t.Fatal(err)
					}
					for i, want := range batch {
						got := b.next(t)
						if !bytes.Equal(got.b, want) {
							t.Fatalf("datagram %d of %d: %d octets, want %d", i, len(batch), len(got.b), len(want))
						}
						if got.ep.DstIP() != netip.MustParseAddr(addr) || got.ep.DstToString() != netip.AddrPortFrom(netip.MustParseAddr(addr), a.port).String() {
							t.Fatalf("came from %s, want port %d of %s", got.ep.DstToString(), a.port, addr)
						}
					}
				}
			})
		}
	}
}

// randBatch returns a batch like those of a device: runs of one size with a shorter last
// datagram, single small packets, and sometimes more datagrams than one sendmsg accepts.
func randBatch(rng *rand.Rand) [][]byte {
	var batch [][]byte
	for n := 1 + rng.IntN(conn.IdealBatchSize); len(batch) < n; {
		size := []int{32, 80, 148, 1452, 8952}[rng.IntN(5)]
		for run := 1 + rng.IntN(70); run > 0 && len(batch) < n; run-- {
			b := make([]byte, size)
			if run == 1 {
				b = b[:1+rng.IntN(size)]
			}
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			batch = append(batch, b)
		}
	}
	return batch
}

func TestRepliesUseTheRequestedAddressAsSource(t *testing.T) {
	a, b := newEnd(t), newEnd(t)
	if err := a.Send([][]byte{{1}}, b.at(t, "127.0.0.77")); err != nil {
		t.Fatal(err)
	}
	received := b.next(t)
	if got := received.ep.SrcIP(); got != netip.MustParseAddr("127.0.0.77") {
		t.Fatalf("local address %v, want 127.0.0.77", got)
	}
	if err := b.Send([][]byte{{2}}, received.ep); err != nil {
		t.Fatal(err)
	}
	if got := a.next(t).ep.DstIP(); got != netip.MustParseAddr("127.0.0.77") {
		t.Fatalf("the reply came from %v, want 127.0.0.77", got)
	}
	received.ep.ClearSrc()
	if err := b.Send([][]byte{{3}}, received.ep); err != nil {
		t.Fatal(err)
	}
	if got := a.next(t).ep.DstIP(); got != netip.MustParseAddr("127.0.0.1") {
		t.Fatalf("after ClearSrc the reply came from %v, want the kernel's choice 127.0.0.1", got)
	}
}

func TestSendStopsUsingARemovedLocalAddress(t *testing.T) {
	a, b := newEnd(t), newEnd(t)
	to := newEndpoint(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), b.port), netip.MustParseAddr("192.0.2.1"))
	if err := a.Send([][]byte{{1}, {2}}, to); err != nil {
		t.Fatal(err)
	}
	if b.next(t); to.SrcIP().IsValid() {
		t.Fatalf("still pinned to %v", to.SrcIP())
	}
}

// Sending a datagram that is too large for UDP must fail. Others may fail only if they are in the
// same sendmsg. All the rest must arrive.
func TestASendErrorCountsTheUnsentDatagrams(t *testing.T) {
	const large = 1<<16 - 1
	a, b := newEnd(t), newEnd(t)
	to := b.at(t, "127.0.0.1")
	for _, tc := range []struct {
		sizes  []int
		unsent int
	}{
		{[]int{100, large, 100}, 1},
		{[]int{large, large, 7}, 2},
		{[]int{100, 100, 100, large, 50, 50, large}, 2},
	} {
		var batch [][]byte
		arrive := 0
		for _, size := range tc.sizes {
			if batch = append(batch, make([]byte, size)); size < large {
				arrive++
			}
		}
		err := a.Send(batch, to)
		if got := Unsent(err, len(batch)); got != tc.unsent || !errors.Is(err, unix.EMSGSIZE) {
			t.Errorf("%v: %d did not leave, %v; want %d and %v", tc.sizes, got, err, tc.unsent, unix.EMSGSIZE)
		}
		for range arrive {
			b.next(t)
		}
	}
	if got := Unsent(net.ErrClosed, 3); got != 3 {
		t.Errorf("of 3 datagrams to a closed socket %d did not leave", got)
	}
}

// Send must call the gate right before each system call. While the gate is shut, nothing may
// leave, even if the same Send has already sent datagrams.
func TestSendStopsWhenTheGateCloses(t *testing.T) {
	onOneProcessor(t)
	var calls, open int // calls of the gate, and the number of them that find it open
	a, b := &Bind{Gate: func() bool { calls++; return calls <= open }}, newEnd(t)
	if _, _, err := a.Listen(0); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	full := 0 // number of calls that find the socket's buffer full
	a.v4.senders.New = func() any {
		m := newSender(a.Gate)
		try := m.try
		m.try = func(fd uintptr) {
			if full--; full >= 0 {
				m.errno = unix.EAGAIN
				return
			}
			try(fd)
		}
		return m
	}
	sizes := []int{100, 100, 100, 200, 200, 300} // three calls with UDP_SEGMENT
	for _, c := range []struct {
		what             string
		segments         bool
		open, full, sent int
	}{
		{"shut", true, 0, 0, 0},
		{"it shuts after the first call", true, 1, 0, 3},
		{"it shuts after the second call", true, 2, 0, 5},
		{"open", true, 3, 0, 6},
		{"it shuts while the socket is full", true, 0, 1, 0},
		{"one by one: shut", false, 0, 0, 0},
		{"one by one: it shuts after the first datagram", false, 1, 0, 1},
	} {
		to := b.at(t, "127.0.0.1").(*endpoint)
		if !c.segments {
			to.refuse()
		}
		var batch [][]byte
		for i, size := range sizes {
			batch = append(batch, bytes.Repeat([]byte{byte(i + 1)}, size))
		}
		calls, open, full = 0, c.open, c.full
		err := a.Send(batch, to)
		if c.sent == len(batch) {
			if err != nil {
				t.Errorf("%s: %v", c.what, err)
			}
		} else if n := Unsent(err, -1); n != len(batch)-c.sent || !errors.Is(err, ErrShut) {
			t.Errorf("%s: %d were not sent, %v; want %d and %v", c.what, n, err, len(batch)-c.sent, ErrShut)
		}
		calls, open, full = 0, 1, 0
		if err := a.Send([][]byte{{0}}, to); err != nil {
			t.Fatal(err)
		}
		sent := 0
		for ; b.next(t).b[0] != 0; sent++ {
		}
		if sent != c.sent {
			t.Errorf("%s: %d datagrams arrived, want %d", c.what, sent, c.sent)
		}
	}
}

func TestDatagramsOfOneAddressShareAnEndpoint(t *testing.T) {
	a, b := newEnd(t), newEnd(t)
	to := b.at(t, "127.0.0.1")
	var first conn.Endpoint
	for range 3 {
		if err := a.Send([][]byte{{1}}, to); err != nil {
			t.Fatal(err)
		}
		ep := b.next(t).ep
		if first == nil {
			first = ep
		}
		if ep != first {
			t.Fatal("a second endpoint for the same remote and local address")
		}
	}
	first.ClearSrc()
	if err := a.Send([][]byte{{1}}, to); err != nil {
		t.Fatal(err)
	}
	if ep := b.next(t).ep; ep == first || !ep.SrcIP().IsValid() {
		t.Fatal("a datagram after ClearSrc must bring the local address back, in a new endpoint")
	}
}

// A flood of empty datagrams must not delay messages that have already arrived, and the empty
// datagrams must be counted.
func TestFloodOfEmptyDatagramsIsReceivedInBoundedBatches(t *testing.T) {
	onOneProcessor(t)
	a := New()
	receive, port, err := a.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	c, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(port)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const empty = 2*maxReceive + 5
	for i := range empty + 1 {
		if _, err := c.Write(make([]byte, i/empty)); err != nil {
			t.Fatal(err)
		}
	}
	for n := 0; n <= empty; {
		var b Batch
		if err := receive[0](&b, true); err != nil {
			t.Fatal(err)
		}
		most := n + maxReceive
		for ; !b.Empty(); n++ {
			if m, from := b.Next(); len(m) != n/empty || from.DstIP() != netip.MustParseAddr("127.0.0.1") {
				t.Fatalf("message %d has %d octets and is from %v", n, len(m), from.DstIP())
			}
		}
		if n > most {
			t.Errorf("%d messages at once, want %d at most", n+maxReceive-most, maxReceive)
		}
	}
}

func TestListenTwiceAndOccupiedPortAreErrors(t *testing.T) {
	a := newEnd(t)
	if _, _, err := a.Listen(0); !errors.Is(err, conn.ErrBindAlreadyOpen) {
		t.Errorf("second Open: %v", err)
	}
	if _, _, err := New().Listen(a.port); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("occupied port: %v", err)
	}
}

func TestSendWithoutSocketIsAnError(t *testing.T) {
	a := newEnd(t)
	ep := a.at(t, "127.0.0.1")
	if err := New().Send([][]byte{{1}}, ep); !errors.Is(err, unix.EAFNOSUPPORT) {
		t.Errorf("closed Bind: %v", err)
	}
	if err := a.Send([][]byte{{1}}, &conn.StdNetEndpoint{}); !errors.Is(err, conn.ErrWrongEndpointType) {
		t.Errorf("foreign endpoint: %v", err)
	}
}

// One goroutine sends and receives, so that only these calls are counted.
func TestSendAndReceiveDoNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool allocate")
	}
	a, b := New(), New()
	if _, _, err := a.Listen(0); err != nil {
		t.Fatal(err)
	}
	fns, port, err := b.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(a.Close(), b.Close()) })
	to := newEndpoint(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port), netip.Addr{})
	batch := make([][]byte, 40)
	for i := range batch {
		batch[i] = make([]byte, 1452)
	}
	var in Batch
	allocs := testing.AllocsPerRun(100, func() {
		if err := a.Send(batch, to); err != nil {
			t.Fatal(err)
		}
		for n := 0; n < len(batch); {
			if err := fns[0](&in, true); err != nil {
				t.Fatal(err)
			}
			for ; !in.Empty(); n++ {
				in.Next()
			}
			in.Reset()
		}
	})
	if allocs > 0 {
		t.Errorf("%v allocations for a batch, want 0", allocs)
	}
}

// Empty datagrams must be received as messages, so that they can be counted, and must not
// delay the delivery of earlier messages.
func TestEmptyDatagramsAreReceived(t *testing.T) {
	e := newEnd(t)
	c, err := net.Dial("udp", fmt.Sprintf("127.0.0.1:%d", e.port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, m := range []string{"", "first", "", "", "second"} {
		if _, err := c.Write([]byte(m)); err != nil {
			t.Fatal(err)
		}
		if d := e.next(t); string(d.b) != m {
			t.Errorf("received %q: want %q", d.b, m)
		}
	}
}

// IgnorePath must also apply to sockets that are opened later.
func TestPathMTUDiscoveryCanBeIgnored(t *testing.T) {
	b := New()
	t.Cleanup(func() { _ = b.Close() })
	for _, ignore := range []bool{true, false, true} {
		if err := b.IgnorePath(ignore); err != nil {
			t.Fatal(err)
		}
		want := unix.IP_PMTUDISC_WANT
		if ignore {
			want = unix.IP_PMTUDISC_OMIT
		}
		for range 2 {
			if _, _, err := b.Listen(0); err != nil && !errors.Is(err, conn.ErrBindAlreadyOpen) {
				t.Fatal(err)
			}
			got, err := -1, error(nil)
			control := b.v4.raw.Control(func(fd uintptr) { got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER) })
			if err = errors.Join(control, err); err != nil || ignore && got != want || !ignore && got == unix.IP_PMTUDISC_OMIT {
				t.Errorf("ignored %v: IP_MTU_DISCOVER is %d, %v; want %d", ignore, got, err, want)
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := b.Listen(0); err != nil {
			t.Fatal(err)
		}
	}
}

// A route without checksum offload, or with IPsec, refuses UDP_SEGMENT with EIO. Segmentation
// must stop only for that endpoint, and must be tried again later.
func TestSegmentationIsPausedOnlyForTheRefusedEndpoint(t *testing.T) {
	a, b := newEnd(t), newEnd(t)
	poor, rich := b.at(t, "127.0.0.1").(*endpoint), b.at(t, "127.0.0.2").(*endpoint)
	var segmented, refused int
	a.v4.senders.New = func() any {
		m := newSender(nil)
		try := m.try
		m.try = func(fd uintptr) {
			if m.header.Iovlen > 1 {
				if m.header.Name == &poor.name[0] {
					refused++
					m.errno = unix.EIO
					return
				}
				segmented++
			}
			try(fd)
		}
		return m
	}
	send := func(to *endpoint) {
		t.Helper()
		batch := [][]byte{make([]byte, 100), make([]byte, 100), make([]byte, 100), make([]byte, 10)}
		if err := a.Send(batch, to); err != nil {
			t.Fatal(err)
		}
		for range batch {
			b.next(t)
		}
	}
	for range 3 {
		send(poor)
		send(rich)
	}
	if refused != 1 || segmented != 3 || a.SegmentationRefused() != 1 {
		t.Errorf("%d calls refused, %d counted, and %d segmented for the other endpoint: want 1, 1 and 3", refused, a.SegmentationRefused(), segmented)
	}
	before := poor.refused.Load().Add(-segmentAgain)
	poor.refused.Store(&before)
	send(poor)
	if refused != 2 || a.SegmentationRefused() != 2 {
		t.Errorf("%d calls refused, %d counted after %v: want a second one", refused, a.SegmentationRefused(), segmentAgain)
	}
}

// Datagrams that a full socket drops must be counted when the next one arrives.
func TestDatagramsWithoutBufferSpaceAreCounted(t *testing.T) {
	b := New()
	receive, port, err := b.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.v4.conn.SetReadBuffer(1 << 16); err != nil {
		t.Fatal(err)
	}
	c, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(port)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const n = 1000
	for range n {
		if _, err := c.Write(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	var got, lost int
	var in Batch
	drain := func() {
		for in.More = true; in.More; {
			in.Reset()
			if err := receive[0](&in, false); err != nil {
				t.Fatal(err)
			}
			lost += int(in.Lost)
			for ; !in.Empty(); got++ {
				in.Next()
			}
		}
	}
	drain()
	if _, err := c.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	drain()
	if got == n+1 || got+lost != n+1 {
		t.Errorf("%d arrived and %d were counted as lost of %d", got, lost, n+1)
	}
	if drain(); lost != n+1-got {
		t.Error("counted twice")
	}
}
