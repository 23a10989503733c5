package flowsync

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// Packets that an ending gateway relays wait for the next gateway. They arrive in order and
// complete, regardless of their size.
func TestRelayedPacketsReachTheNextGateway(t *testing.T) {
	p := newPlace()
	p.set(one, true, 1)
	p.set(two, false, 1)
	before, after, a, b := newRunning(t, "10.246.0.0/16"), newRunning(t, "10.246.0.0/16"), NewKeeper(), NewKeeper()
	a.Activate(before)
	if a.Relay(0, []byte("nobody")) {
		t.Error("Relay returned true without a follower")
	}
	_, die := p.start(t, a, one)
	defer die()
	_, end := p.start(t, b, two)
	defer end()
	before.open(t, 0)
	eventually(t, "copy", func() bool { return b.State().Copied == 2 })
	rng := rand.NewChaCha8([32]byte{1})
	var want []parcel
	relay := func(n, size int) {
		for i := range n {
			one := parcel{tunnel: i % 3, p: make([]byte, size)}
			_, _ = rng.Read(one.p)
			if want = append(want, one); !a.Relay(one.tunnel, one.p) {
				t.Fatal("there is no room for a packet")
			}
		}
	}
	relay(20, 60)
	relay(3, maxParcel)
	relay(1, maxFrame-2)
	relay(1, maxFrame-1)
	held := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.held.all)
	}
	eventually(t, "packets that wait", func() bool { return held() == len(want) })
	b.mu.Lock()
	for i := range b.held.all { // keep the packets from expiring on a busy machine
		b.held.all[i].at = time.Now()
	}
	b.mu.Unlock()
	b.Activate(after)
	relay(20, 1500)
	for i, w := range want {
		if got := <-after.injected; got.tunnel != w.tunnel || !bytes.Equal(got.p, w.p) {
			t.Fatalf("packet %d is another one, of %d octets; want %d", i, len(got.p), len(w.p))
		}
	}
	if c := b.State().Counts; c.Relayed != uint64(len(want)) || c.Unrelayed != 0 {
		t.Errorf("counts %+v", c)
	}
}

// If a gateway has two connections to the active one, it accepts packets only from the connection
// that stays open after the list of flows.
func TestOneTimeRequestAcceptsNoPackets(t *testing.T) {
	for name, listOnly := range map[string]bool{"follows": false, "asks": true} {
		var b bytes.Buffer
		w := writer{bufio.NewWriter(&b)}
		w.begin(true, 0)
		w.parcel(parcel{p: []byte{1, 2, 3}})
		if err := w.w.Flush(); err != nil {
			t.Fatal(err)
		}
		k := NewKeeper()
		r := receiver{k: k, listOnly: listOnly}
		if err := r.receive(&b, func() {}); !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if got := len(k.held.all); got != map[bool]int{false: 1, true: 0}[listOnly] {
			t.Errorf("%s: %d packets", name, got)
		}
	}
}

// A gatedList delays the first list of all flows until the test allows that list. It does not delay
// later lists.
type gatedList struct {
	running
	listed atomic.Bool   // the first list has begun
	begun  chan struct{} // closed when the first list begins
	may    chan struct{}
}

func (g *gatedList) EachFlow(f func(peer string, flow natengine.Flow), between func() bool) {
	if !g.listed.Swap(true) {
		close(g.begun)
		<-g.may
	}
	g.running.EachFlow(f, between)
}

// A starting standby requests the flows of all gateways. As soon as it knows which gateway is
// active, it opens a second connection to that one, for the changes. For a while, packets arrive on
// both connections.
func TestStandbyAcceptsEachPacketOnceFromTwoConnections(t *testing.T) {
	before := &gatedList{running: newRunning(t, "10.246.0.0/16"), begun: make(chan struct{}), may: make(chan struct{})}
	after, a, b := newRunning(t, "10.246.0.0/16"), NewKeeper(), NewKeeper()
	a.Activate(before)
	before.open(t, 0)
	connect := func(listOnly bool) {
		near, far := net.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.send(ctx, &slowConn{Conn: far}) }()
		go func() { // receives as Link.copyFrom does
			r := receiver{k: b, listOnly: listOnly}
			_ = r.receive(near, func() {})
			r.close()
			cancel()
			near.Close()
		}()
		t.Cleanup(func() {
			near.Close()
			<-done
		})
	}
	connect(true)
	<-before.begun
	connect(false)
	followers := func() int {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.followers)
	}
	eventually(t, "a copy, which only the connection that follows has sent", func() bool { return b.State().Copied == 2 })
	if n := followers(); n != 2 {
		t.Fatalf("%d connections; want one that asks and one that follows", n)
	}
	b.Activate(after)
	n := 0
	relay := func() {
		for range 100 {
			if !a.Relay(0, []byte{byte(n)}) {
				t.Fatal("there is no room for a packet")
			}
			n++
		}
	}
	relay()
	close(before.may)
	eventually(t, "the end of the connection that asked", func() bool { return followers() == 1 })
	relay()
	for i := range n {
		if got := <-after.injected; got.p[0] != byte(i) {
			t.Fatalf("packet %d arrives as number %d", got.p[0], i)
		}
	}
	if c := b.State().Counts; c.Relayed != uint64(n) || c.Unrelayed != 0 {
		t.Errorf("counts %+v; want %d packets, each once", c, n)
	}
}

// While packets wait for this gateway to become active, their total size and their waiting time are
// limited.
func TestWaitingRelayedPacketsAreBounded(t *testing.T) {
	k := NewKeeper()
	p := make([]byte, 60000)
	const fit = relayMost / 60000
	now := time.Now()
	for range fit + 2 {
		k.receiveRelayed(parcel{p: p, at: now})
	}
	if c := k.State().Counts; len(k.held.all) != fit || c.Unrelayed != 2 {
		t.Errorf("%d packets wait and %d are dropped; want %d and 2", len(k.held.all), c.Unrelayed, fit)
	}
	k.held.all[fit-1].at = now.Add(relayFor)
	k.receiveRelayed(parcel{p: p, at: now.Add(relayFor + 1)})
	if c := k.State().Counts; len(k.held.all) != 2 || k.held.octets != 2*len(p) || c.Unrelayed != fit+1 {
		t.Errorf("%d packets wait and %d are dropped; want 2 and %d", len(k.held.all), c.Unrelayed, fit+1)
	}
	for i := range k.held.all {
		k.held.all[i].at = now.Add(-2 * relayFor)
	}
	r := newRunning(t, "10.246.0.0/16")
	k.Activate(r)
	if c := k.State().Counts; len(r.injected) != 0 || c.Unrelayed != fit+3 {
		t.Errorf("%d packets are sent that are too old, and %d are dropped; want 0 and %d", len(r.injected), c.Unrelayed, fit+3)
	}
}

// If another gateway becomes active, it gets the packets as well, so this one drops them. A second
// connection to the gateway that relayed the packets does not mean that another gateway is active.
func TestStandbyDropsWaitingPacketsWhenAnotherGatewayIsActive(t *testing.T) {
	k := NewKeeper()
	first, second := netip.MustParseAddr("10.244.1.254"), netip.MustParseAddr("10.244.2.254")
	(&receiver{k: k, from: first}).begin(true, 0)
	k.receiveRelayed(parcel{p: []byte{1}, at: time.Now()})
	waiting := func(what string, want int) {
		t.Helper()
		if n := len(k.held.all); n != want || k.State().Counts.Unrelayed != 0 {
			t.Errorf("%s: %d packets wait and %d are dropped; want %d and none", what, n, k.State().Counts.Unrelayed, want)
		}
	}
	standby, asked, next := receiver{k: k, from: second}, receiver{k: k, from: second, listOnly: true}, receiver{k: k, from: second}
	standby.begin(false, 0)
	waiting("a standby sends its copy", 1)
	asked.begin(true, 0)
	waiting("a gateway that was only asked is active", 1)
	(&receiver{k: k, from: first}).begin(true, 0)
	waiting("the gateway that relayed it is followed by another connection", 1)
	next.begin(true, 0)
	waiting("another gateway is active", 0)
	k.receiveRelayed(parcel{p: []byte{1}, at: time.Now()})
	next.begin(true, 0)
	waiting("it begins its list anew, as it ends", 1)
}

// Each packet that a connection does not get is counted, even if another connection gets it.
func TestUnsentPacketsAreCounted(t *testing.T) {
	k := NewKeeper()
	p := make([]byte, 60000)
	const fit = relayMost / 60000
	slow, other := &queue{wake: make(chan struct{}, 1)}, &queue{wake: make(chan struct{}, 1)}
	end := k.follow(slow)
	unsent := uint64(0)
	check := func(what string, more uint64) {
		t.Helper()
		if unsent += more; k.State().Counts.Unsent != unsent {
			t.Errorf("%s: %d packets are counted, want %d", what, k.State().Counts.Unsent, unsent)
		}
	}
	relay := func() {
		if !k.Relay(0, p) {
			t.Error("Relay returned false")
		}
	}
	for range fit + 2 {
		relay()
	}
	check("a full queue", 2)
	endOther := k.follow(other)
	relay()
	check("a full queue beside one with room", 1)
	if _, parcels, err := slow.take(nil); len(parcels) != fit || err != nil {
		t.Errorf("%d packets wait, %v; want %d", len(parcels), err, fit)
	}
	relay()
	check("room again", 0)
	slow.lost = true
	if _, parcels, err := slow.take(nil); len(parcels) > 0 || !errors.Is(err, errLost) {
		t.Errorf("%d packets and %v of a connection that begins its list anew", len(parcels), err)
	}
	end()
	check("a connection that begins its list anew", 1)
	if _, parcels, _ := other.take(nil); len(parcels) != 2 {
		t.Errorf("%d packets for the other connection, want 2", len(parcels))
	}
	endOther()
	check("a connection that has sent all", 0)
	if k.Relay(0, p) {
		t.Error("Relay returned true without a follower")
	}
	check("no connection left; the caller counts the packet", 0)
}

// A failingConn is a connection whose Write waits until the test releases it, and then fails.
type failingConn struct {
	slowConn
	fails atomic.Bool
}

func (f *failingConn) Write(b []byte) (int, error) {
	if !f.fails.Load() {
		return f.Conn.Write(b)
	}
	f.may.Lock()
	defer f.may.Unlock()
	return 0, errors.New("it fails")
}

// Packets that were written to the buffer are counted, too, if the connection ends before they
// were sent.
func TestPacketsOfAFailedConnectionAreCounted(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	conn := &failingConn{slowConn: slowConn{Conn: far}}
	e, a, b := newRunning(t, "10.246.0.0/16"), NewKeeper(), NewKeeper()
	a.Activate(e)
	done := make(chan error, 1)
	go func() { done <- a.send(t.Context(), conn) }()
	go func() {
		r := receiver{k: b}
		_ = r.receive(near, func() {})
	}()
	e.open(t, 0)
	eventually(t, "a copy", func() bool { return b.State().Copied == 2 })
	if !a.Relay(0, []byte{1}) {
		t.Fatal("Relay returned false")
	}
	eventually(t, "a packet that has arrived", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.held.all) == 1
	})
	conn.may.Lock()
	conn.fails.Store(true)
	for range 3 {
		if !a.Relay(0, []byte{1}) {
			t.Fatal("Relay returned false")
		}
		time.Sleep(10 * gather) // the first packet is written before the second one is added
	}
	conn.may.Unlock()
	if err := <-done; err == nil {
		t.Error("a connection that fails has ended without an error")
	}
	if n := a.State().Counts.Unsent; n != 3 {
		t.Errorf("%d packets are counted, want 3", n)
	}
}

// A packet is counted as lost if only a part of it arrives, if the stream is invalid, or if this
// gateway no longer needs packets.
func TestTruncatedPacketsAreCounted(t *testing.T) {
	long := make([]byte, maxFrame)
	for _, c := range []struct {
		what     string
		listOnly bool
		write    func(w writer)
		cut      int  // number of octets missing at the end
		moved    bool // this gateway became active and is a standby again
		lost     uint64
	}{
		{"whole", false, func(w writer) { w.parcel(parcel{p: long}) }, 0, false, 0},
		{"the last octet is missing", false, func(w writer) { w.parcel(parcel{p: []byte{1, 2, 3}}) }, 1, false, 1},
		{"the second frame is missing", false, func(w writer) { w.frame(framePacket, []byte{continues}, long[:100]) }, 0, false, 1},
		{"the second frame is cut off", false, func(w writer) { w.parcel(parcel{p: long}) }, 1, false, 1},
		{"it comes by another connection", true, func(w writer) { w.parcel(parcel{p: long}) }, 1, false, 0},
		{"too long", false, func(w writer) {
			for range maxParcel/100 + 1 {
				w.frame(framePacket, []byte{continues}, long[:100])
			}
		}, 0, false, 1},
		{"this gateway was active meanwhile", false, func(w writer) { w.parcel(parcel{p: []byte{1, 2, 3}}) }, 0, true, 1},
		{"this gateway was active meanwhile, and a flow comes", false, func(w writer) { w.frame(frameEnd) }, 0, true, 0},
	} {
		var b bytes.Buffer
		w := writer{bufio.NewWriter(&b)}
		w.begin(true, 0)
		c.write(w)
		if err := w.w.Flush(); err != nil {
			t.Fatal(err)
		}
		b.Truncate(b.Len() - c.cut)
		k := NewKeeper()
		r := receiver{k: k, listOnly: c.listOnly}
		err := r.receive(&b, func() {
			if c.moved {
				k.Activate(newRunning(t, "10.246.0.0/16"))
				k.Deactivate()
			}
		})
		if n := k.State().Counts.Unrelayed; err == nil || n != c.lost {
			t.Errorf("%s: %d packets are counted, want %d; %v", c.what, n, c.lost, err)
		}
	}
}

// A gateway that does not become active drops waiting packets after a while, even if no further
// packets arrive.
func TestOldRelayedPacketsAreDropped(t *testing.T) {
	p, k := newPlace(), NewKeeper()
	k.receiveRelayed(parcel{p: make([]byte, 1000), at: time.Now()})
	_, end := p.start(t, k, one)
	defer end()
	eventually(t, "a packet that is dropped", func() bool { return k.State().Counts.Unrelayed == 1 })
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held.all != nil || k.held.octets != 0 {
		t.Errorf("%d packets of %d octets wait", len(k.held.all), k.held.octets)
	}
}
