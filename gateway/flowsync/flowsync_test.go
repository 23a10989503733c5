package flowsync

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/cputime"
	"github.com/isthmus-net/isthmus/internal/pinned"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// A running is the engine of a running gateway.
type running struct {
	*natengine.Engine
	now      func() time.Duration
	injected chan parcel
}

func (r running) Adopt(peer string, f natengine.Flow) (opened bool, drop natengine.Drop) {
	return r.Engine.Adopt(peer, f, r.now())
}

func (r running) Inject(tunnel int, p []byte) {
	r.injected <- parcel{tunnel: tunnel, p: slices.Clone(p)}
}

func newRunning(t testing.TB, pods string) running {
	e := natengine.New(natengine.Config{})
	err := e.SetPeers([]natengine.Peer{{ID: "b", RemotePods: []netip.Prefix{netip.MustParsePrefix("10.71.0.0/16")},
		Pods: []natengine.Remap{{From: netip.MustParsePrefix("10.244.0.0/16"), To: netip.MustParsePrefix(pods)}}}})
	if err != nil {
		t.Fatal(err)
	}
	return running{e, func() time.Duration { return 0 }, make(chan parcel, 1<<16)}
}

// open opens the nth flow of a node, whose source port NAPT must change.
func (r running) open(t testing.TB, n int) {
	t.Helper()
	for _, node := range []string{"192.168.1.1", "192.168.1.2"} {
		r.openFrom(t, node, n)
	}
}

func (r running) openFrom(t testing.TB, node string, n int) {
	t.Helper()
	var v packet.View
	b := packettest.Build(packettest.IP{Src: netip.MustParseAddr(node), Dst: netip.MustParseAddr("10.71.0.5")},
		packettest.UDP{SrcPort: uint16(10000 + n), DstPort: 53})
	if err := v.Parse(b, packet.ChecksumComplete); err != nil {
		t.Fatal(err)
	}
	if verdict := r.Outbound(&v, 0); verdict.Action != natengine.Forward {
		t.Fatal(verdict.Drop)
	}
}

func (r running) flows() []string {
	var all []string
	for _, f := range r.Flows(1 << 20) {
		all = append(all, fmt.Sprint(f.Local, f.Mapped, f.Remote))
	}
	slices.Sort(all)
	return all
}

// A place is the network of a test, in which gateways reach each other.
type place struct {
	mu   sync.Mutex
	at   map[netip.Addr]net.Listener
	role map[netip.Addr]bool // whether the gateway is the active one according to the API server
	key  map[netip.Addr][32]byte
}

func newPlace() *place {
	return &place{at: map[netip.Addr]net.Listener{}, role: map[netip.Addr]bool{}, key: map[netip.Addr][32]byte{}}
}

func (p *place) set(addr netip.Addr, active bool, key byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.role[addr], p.key[addr] = active, [32]byte{key}
}

// start starts the Link of a gateway. stop simulates the gateway's end.
func (p *place) start(t *testing.T, k *Keeper, own netip.Addr) (l *Link, stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	l = NewLink(k, Options{
		Listen: func() (net.Listener, error) {
			listener, err := net.Listen("tcp4", "127.0.0.1:0")
			p.mu.Lock()
			p.at[own] = listener
			p.mu.Unlock()
			return listener, err
		},
		Dial: func(ctx context.Context, to netip.Addr) (net.Conn, error) {
			p.mu.Lock()
			listener := p.at[to]
			p.mu.Unlock()
			if to == vanishedAddr {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			if listener == nil {
				return nil, errors.New("not there")
			}
			return new(net.Dialer).DialContext(ctx, "tcp4", listener.Addr().String())
		},
		Key: func() [32]byte {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.key[own]
		},
		Others: func() map[netip.Addr]bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			others := maps.Clone(p.role)
			delete(others, own)
			return others
		},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.Run(ctx)
	}()
	return l, func() {
		cancel()
		<-done
	}
}

var one, two = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")

// vanishedAddr is the address of a gateway that has ended: it does not answer.
var vanishedAddr = netip.MustParseAddr("10.0.0.3")

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 30 s", what)
		}
	}
}

func TestFlowsSurviveFailoversAndRestarts(t *testing.T) {
	p := newPlace()
	p.set(one, true, 1)
	p.set(two, false, 1)
	first, a, b := newRunning(t, "10.246.0.0/16"), NewKeeper(), NewKeeper()
	first.open(t, 0)
	a.Activate(first)
	_, die := p.start(t, a, one)
	_, end := p.start(t, b, two)
	defer end()
	copied := func(n int) { eventually(t, fmt.Sprint(n, " flows"), func() bool { return b.State().Copied == n }) }
	copied(2)
	for n := range 50 {
		first.open(t, n)
	}
	copied(100)
	first.Sweep(time.Hour)
	copied(0)
	for n := range 50 {
		first.open(t, n)
	}
	copied(100)
	want := first.flows()

	// The active gateway restarts and stays active. The standby still has its flows.
	die()
	second, a := newRunning(t, "10.246.0.0/16"), NewKeeper()
	link, die := p.start(t, a, one)
	link.Await(t.Context()) // its time limit may be too short on a busy machine
	eventually(t, "the copy of a copy", func() bool { return a.State().Copied == 100 })
	a.Activate(second)
	eventually(t, "the same flows after a restart", func() bool { return reflect.DeepEqual(second.flows(), want) })
	second.open(t, 77)
	copied(102)
	want = second.flows()

	// The active gateway ends, and the other one becomes active.
	die()
	p.set(one, false, 1)
	p.set(two, true, 1)
	third := newRunning(t, "10.246.0.0/16")
	b.Activate(third)
	eventually(t, "the same flows after a takeover", func() bool { return reflect.DeepEqual(third.flows(), want) })
	eventually(t, "the count of them", func() bool { return b.State().Counts.Adopted == 102 })
	if s := b.State(); s.Copied != 0 || !s.Active || s.Counts.Adopted != 102 {
		t.Errorf("state %+v", s)
	}
	// A new standby copies the flows, even after a change of the key.
	a = NewKeeper()
	_, die = p.start(t, a, one)
	defer die()
	eventually(t, "the next standby's copy", func() bool { return a.State().Copied == 102 })
	p.set(one, false, 2)
	p.set(two, true, 2)
	third.open(t, 88)
	eventually(t, "copy with another key", func() bool { return a.State().Copied == 104 })
	third.Sweep(2 * time.Hour)
	eventually(t, "copy with another key is followed", func() bool { return a.State().Copied == 0 })
}

// In a planned move, the previous gateway still opens flows while the next gateway is already
// active. The next gateway adopts these flows, too.
func TestLateFlowsOfThePreviousGatewayAreAdopted(t *testing.T) {
	p := newPlace()
	p.set(one, true, 1)
	p.set(two, false, 1)
	before, after, a, b := newRunning(t, "10.246.0.0/16"), newRunning(t, "10.246.0.0/16"), NewKeeper(), NewKeeper()
	a.Activate(before)
	_, die := p.start(t, a, one)
	defer die()
	_, end := p.start(t, b, two)
	defer end()
	before.open(t, 0)
	eventually(t, "copy", func() bool { return b.State().Copied == 2 })
	b.Activate(after)
	before.open(t, 1)
	eventually(t, "late flows", func() bool { return reflect.DeepEqual(after.flows(), before.flows()) })
	// The peer may have got other networks in the meantime.
	c := NewKeeper()
	r := receiver{k: c}
	r.begin(true, 0)
	before.EachFlow(func(peer string, f natengine.Flow) { r.flow(peer, f, false) }, func() bool { return true })
	r.end()
	c.Activate(newRunning(t, "10.250.0.0/16"))
	eventually(t, "four refusals", func() bool { return c.State().Counts.Refused[natengine.DropNoFlow] == 4 })
	if n := c.State().Counts.Adopted; n != 0 {
		t.Errorf("%d flows were adopted that no rule permits", n)
	}
}

// Each received flow is adopted, exists already, or is counted with the reason why it was
// refused.
func TestAFlowThatIsNotAdoptedIsCounted(t *testing.T) {
	before, after := newRunning(t, "10.246.0.0/16"), newRunning(t, "10.246.0.0/16")
	for n := range 3 {
		before.open(t, n)
	}
	after.openFrom(t, "192.168.1.1", 0) // the same flow
	after.openFrom(t, "192.168.1.2", 1) // it uses the NAPT port that 192.168.1.1 uses in the first engine, so both flows clash
	k := NewKeeper()
	k.Activate(after)
	r := receiver{k: k}
	r.begin(true, 0)
	for range 2 { // flows are sent again when their state changes
		before.EachFlow(func(peer string, f natengine.Flow) { r.flow(peer, f, false) }, func() bool { return true })
	}
	want := map[natengine.Drop]uint64{natengine.DropFlowClash: 4} // two flows, twice
	if c := k.State().Counts; c.Adopted != 3 || !maps.Equal(c.Refused, want) {
		t.Errorf("%d flows are adopted, refused: %v; want 3 and %v", c.Adopted, c.Refused, want)
	}
}

func TestFlowsAreSentOnlyToHoldersOfTheKey(t *testing.T) {
	p := newPlace()
	p.set(one, true, 1)
	p.set(two, false, 2)
	a, b, e := NewKeeper(), NewKeeper(), newRunning(t, "10.246.0.0/16")
	e.open(t, 0)
	a.Activate(e)
	_, die := p.start(t, a, one)
	defer die()
	_, end := p.start(t, b, two)
	defer end()
	var listener net.Listener
	eventually(t, "the listener", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		listener = p.at[one]
		return listener != nil
	})
	// Connections of strangers do not take the place of a gateway, regardless of their data. In
	// this test all of them have the same address.
	var open []net.Conn
	for i := range 2 * addressMost {
		conn, err := net.Dial("tcp4", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		open = append(open, conn)
		fmt.Fprintf(conn, "GET /%d HTTP/1.0\r\n\r\n", i)
	}
	for _, conn := range open {
		if b, err := io.ReadAll(conn); err == nil && len(b) > 7 { // longer than a TLS alert
			t.Errorf("a stranger received %q", b)
		}
	}
	time.Sleep(2 * checkInterval)
	if n := b.State().Copied; n != 0 {
		t.Errorf("a gateway with another key has %d flows", n)
	}
	p.set(two, false, 1)
	eventually(t, "copy", func() bool { return b.State().Copied == 2 })
}

// A starting standby does not know yet which gateway is active. Await waits until it has the
// active gateway's flows. The connection to that gateway stays open, and Await must not wait for
// its end.
func TestAwaitReturnsWhileTheActiveGatewayRuns(t *testing.T) {
	p := newPlace()
	p.set(one, false, 1)
	p.set(two, false, 1)
	running, a, b := newRunning(t, "10.246.0.0/16"), NewKeeper(), NewKeeper()
	running.open(t, 0)
	a.Activate(running)
	_, stop := p.start(t, a, one)
	defer stop()
	eventually(t, "a listener", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.at[one] != nil
	})
	link, end := p.start(t, b, two)
	defer end()
	eventually(t, "all that there is to wait for", func() bool {
		select {
		case <-link.settled:
			return true
		default:
			return false
		}
	})
	if n := b.State().Copied; n != 2 {
		t.Errorf("it has %d flows then; want 2", n)
	}
}

func TestAStandbyWithAllFlowsDoesNotAwaitAVanishedGateway(t *testing.T) {
	p := newPlace()
	p.set(one, true, 1)
	p.set(vanishedAddr, false, 1)
	p.set(two, false, 1)
	running, a, b := newRunning(t, "10.246.0.0/16"), NewKeeper(), NewKeeper()
	running.open(t, 0)
	a.Activate(running)
	_, stop := p.start(t, a, one)
	defer stop()
	for range 10 { // the machine may stop the test for a second now and then
		link, end := p.start(t, b, two)
		eventually(t, "the flows of the active gateway", func() bool { return b.State().Copied == 2 })
		begin := time.Now()
		link.Await(t.Context())
		took := time.Since(begin)
		end()
		if took < awaitMost {
			return
		}
	}
	t.Error("it waits each time")
}

func TestConnectionsOfStrangersAreLimited(t *testing.T) {
	l := NewLink(NewKeeper(), Options{Others: func() map[netip.Addr]bool { return map[netip.Addr]bool{one: false} }})
	for i := range strangersMost {
		if !l.enter(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})) {
			t.Fatalf("stranger %d is refused", i)
		}
	}
	if l.enter(two) {
		t.Error("one stranger too many")
	}
	for i := range addressMost {
		if !l.enter(one) {
			t.Errorf("connection %d of a gateway is refused", i)
		}
	}
	if l.enter(one) {
		t.Error("one connection of an address too many")
	}
	l.exit(netip.AddrFrom4([4]byte{192, 0, 2, 0}))
	if !l.enter(two) {
		t.Error("a connection is refused though there is room")
	}
}

func TestHandshakesOfStrangersAreBounded(t *testing.T) {
	l := NewLink(NewKeeper(), Options{Others: func() map[netip.Addr]bool { return map[netip.Addr]bool{one: false} }})
	begin, n := time.Now(), 0
	for range 10_000 {
		if l.enter(two) {
			l.exit(two)
			n++
		}
	}
	if most := strangersOnce + int(time.Since(begin).Seconds()+1)*strangersRate; n < strangersOnce || n > most {
		t.Errorf("%d connections of a stranger, want %d to %d", n, strangersOnce, most)
	}
	if !l.enter(one) {
		t.Error("connections of strangers use up the room of a gateway")
	}
}

// Flows received while this gateway is active are in no copy. So a list that began before must
// not continue as a copy afterwards.
func TestAStandbyThatWasActiveNeedsANewFlowList(t *testing.T) {
	k, flows := NewKeeper(), randomFlows(t)
	near, far := net.Pipe()
	defer near.Close()
	ended, frames := make(chan error, 1), make(chan struct{}, 10)
	go func() {
		r := receiver{k: k}
		ended <- r.receive(near, func() { frames <- struct{}{} })
		r.close()
	}()
	w := writer{bufio.NewWriter(far)}
	tell := func(n int) {
		if err := w.w.Flush(); err != nil {
			t.Fatal(err)
		}
		for range n {
			<-frames
		}
	}
	w.begin(true, 0)
	w.records([]record{{"b", flows[0], false}})
	w.frame(frameEnd)
	tell(3)
	k.Activate(newRunning(t, "10.246.0.0/16"))
	w.records([]record{{"b", flows[1], false}})
	tell(1)
	k.Deactivate()
	w.records([]record{{"b", flows[2], false}})
	tell(0)
	far.Close()
	if err := <-ended; err == nil || k.State().Copied != 0 {
		t.Errorf("the stream ended with %v, and %d flows are taken for a copy", err, k.State().Copied)
	}
}

// slowConn is a connection whose other end reads only when it is allowed to.
type slowConn struct {
	net.Conn
	may sync.Mutex
}

func (s *slowConn) Write(b []byte) (int, error) {
	s.may.Lock()
	defer s.may.Unlock()
	return s.Conn.Write(b)
}

// SetWriteDeadline does nothing: on a busy machine a write of the test may take longer than the
// deadline.
func (s *slowConn) SetWriteDeadline(time.Time) error { return nil }

func TestTooSlowStandbyGetsTheWholeListAgain(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	conn := &slowConn{Conn: far}
	e, a, b := newRunning(t, "10.246.0.0/16"), NewKeeper(), NewKeeper()
	a.Activate(e)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.send(ctx, conn) }()
	lists := 0
	go func() {
		r := receiver{k: b}
		_ = r.receive(near, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			if r.active && !r.all && r.table.n == 0 && r.k.fresh == &r.table {
				lists++
			}
		})
	}()
	e.open(t, 0)
	eventually(t, "the first flows", func() bool { return b.State().Copied == 2 })
	conn.may.Lock()
	for n := 0; n < queueMost+1000; n += 100 {
		e.Sweep(time.Duration(n) * time.Hour)
		for i := range 50 {
			e.open(t, 1+i)
		}
	}
	conn.may.Unlock()
	eventually(t, "the same flows", func() bool { return b.State().Copied == e.Stats().Flows })
	if lists < 2 {
		t.Errorf("%d lists of all flows were sent, want another one", lists)
	}
	cancel()
	far.Close()
	<-done
}

// randomFlows returns the flows of an engine.
func randomFlows(t testing.TB) (flows []natengine.Flow) {
	e := newRunning(t, "10.246.0.0/16")
	for n := range 200 {
		e.open(t, n)
	}
	e.EachFlow(func(_ string, f natengine.Flow) { flows = append(flows, f) }, func() bool { return true })
	return flows
}

// The receiver of a stream ends up with the sender's flows, regardless of the order in which flows
// are opened and ended.
func TestReceiverGetsTheFlowsOfTheSender(t *testing.T) {
	flows := randomFlows(t)
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var b bytes.Buffer
		w := writer{bufio.NewWriter(&b)}
		want := map[string]map[natengine.Flow]bool{}
		n := 0
		w.begin(true, 0)
		at := rng.IntN(20)
		for i := range 20 {
			var all []record
			for range rng.IntN(2000) {
				r := record{fmt.Sprint("peer", rng.IntN(3)), flows[rng.IntN(len(flows))], rng.IntN(2) == 0}
				all = append(all, r)
				if want[r.peer] == nil {
					want[r.peer] = map[natengine.Flow]bool{}
				}
				want[r.peer][r.flow] = !r.ended
			}
			w.records(all)
			if i == at {
				w.frame(frameEnd)
			}
			w.frame(frameBeat)
		}
		w.w.Flush()
		k := NewKeeper()
		r := receiver{k: k}
		if err := r.receive(&b, func() {}); !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		for peer, byFlow := range want {
			for f, open := range byFlow {
				id, _ := f.Identity()
				if _, has := k.copy.flows[peer][id]; has != open {
					t.Fatalf("seed %d: a flow of %s: %v, want %v", seed, peer, has, open)
				}
				if open {
					n++
				}
			}
		}
		if k.State().Copied != n {
			t.Errorf("seed %d: %d flows, want %d", seed, k.State().Copied, n)
		}
	}
}

func TestAKeeperReplacesItsFlowsOnlyWithThoseOfTheActiveGateway(t *testing.T) {
	flows := randomFlows(t)
	k := NewKeeper()
	tell := func(active bool, age time.Duration, n int) int {
		r := receiver{k: k}
		r.begin(active, age)
		for _, f := range flows[:n] {
			r.flow("b", f, false)
		}
		r.end()
		return k.State().Copied
	}
	if n := tell(false, time.Minute, 3); n != 3 {
		t.Errorf("%d flows of a standby, want 3: there was no copy", n)
	}
	if age := k.State().Age; age < time.Minute {
		t.Errorf("the copy is %v old, want the age that it had", age)
	}
	if n := tell(false, 0, 5); n != 3 {
		t.Errorf("%d flows of a standby, want the 3 that are there", n)
	}
	if n := tell(true, 0, 5); n != 5 {
		t.Errorf("%d flows of the active gateway, want 5", n)
	}
	k.heard = time.Now().Add(-keepFor - time.Second)
	if n := k.Activate(newRunning(t, "10.246.0.0/16")); n != 0 {
		t.Errorf("%d flows of a copy that is too old", n)
	}
}

// A standby is ready when it has all flows of the active gateway, or after the maximum wait.
func TestStandbyIsReadyOnceItHasAllFlows(t *testing.T) {
	list := func(k *Keeper, active bool) (end func()) {
		r := receiver{k: k}
		r.begin(active, 0)
		for _, f := range randomFlows(t)[:3] {
			r.flow("b", f, false)
		}
		return r.end
	}
	k := NewKeeper()
	ready := func(what string, want bool) {
		t.Helper()
		if err := k.Ready(); want != (err == nil) {
			t.Errorf("%s: %v; want ready: %v", what, err, want)
		}
	}
	ready("at the start", false)
	list(k, false)()
	ready("with the copy of a standby", false)
	end := list(k, true)
	ready("before the end of the list", false)
	end()
	ready("with the list of the active gateway", true)

	k = NewKeeper()
	k.Activate(newRunning(t, "10.246.0.0/16"))
	ready("active", true)

	k = NewKeeper()
	k.began = k.began.Add(time.Second - listMost)
	ready("just before it has waited long enough", false)
	k.began = k.began.Add(-time.Second)
	ready("then", true)
}

// Regardless of the octets that it reads, receive returns an error and leaves a consistent copy.
func FuzzReceive(f *testing.F) {
	flows := randomFlows(f)
	var b bytes.Buffer
	w := writer{bufio.NewWriter(&b)}
	w.begin(true, time.Second)
	w.records([]record{{"b", flows[0], false}, {"b", flows[1], false}, {"c", flows[0], false}, {"b", flows[0], true}})
	w.frame(frameEnd)
	w.frame(frameBeat)
	w.parcel(parcel{tunnel: 1, p: make([]byte, maxParcel)})
	w.parcel(parcel{p: []byte{1, 2, 3}})
	w.begin(false, 0)
	w.frame(frameEnd)
	w.w.Flush()
	f.Add(b.Bytes())
	f.Add([]byte{0, 1, frameBeat})
	f.Fuzz(func(t *testing.T, b []byte) {
		k := NewKeeper()
		r := receiver{k: k}
		if err := r.receive(bytes.NewReader(b), func() {}); err == nil {
			t.Error("the stream has ended without an error")
		}
		r.close()
		n := 0
		for peer, byFlow := range k.copy.flows {
			if len(byFlow) == 0 {
				t.Errorf("peer %q has no flow", peer)
			}
			n += len(byFlow)
		}
		if n != k.State().Copied || k.fresh != nil {
			t.Errorf("%d flows, counted %d; a list is under way: %v", n, k.State().Copied, k.fresh != nil)
		}
		octets := 0
		for _, one := range k.held.all {
			octets += len(one.p)
		}
		if octets != k.held.octets || octets > relayMost {
			t.Errorf("packets of %d octets wait, counted %d", octets, k.held.octets)
		}
	})
}

// BenchmarkFlows measures the cost of a flow for the process that opens and ends it. With a
// standby in the same process, it includes both ends of the copy.
func BenchmarkFlows(b *testing.B) {
	for _, copied := range []bool{false, true} {
		b.Run(map[bool]string{false: "nobody copies", true: "a standby copies"}[copied], func(b *testing.B) {
			e, k, standby := newRunning(b, "10.246.0.0/16"), NewKeeper(), NewKeeper()
			k.Activate(e)
			if copied {
				c, err := pinned.Config([32]byte{1}, purpose)
				if err != nil {
					b.Fatal(err)
				}
				l, err := tls.Listen("tcp", "127.0.0.1:0", c)
				if err != nil {
					b.Fatal(err)
				}
				defer l.Close()
				go func() {
					if conn, err := l.Accept(); err == nil {
						_ = k.send(b.Context(), conn)
					}
				}()
				conn, err := tls.Dial("tcp", l.Addr().String(), c)
				if err != nil {
					b.Fatal(err)
				}
				defer conn.Close()
				r := receiver{k: standby}
				go func() { _ = r.receive(conn, func() {}) }()
			}
			packets := make([][]byte, 2000)
			for i := range packets {
				packets[i] = packettest.Build(packettest.IP{Src: netip.MustParseAddr("192.168.1.1"), Dst: netip.MustParseAddr("10.71.0.5")},
					packettest.UDP{SrcPort: uint16(10000 + i), DstPort: 53})
			}
			before := cputime.Used(b)
			b.ResetTimer()
			var v packet.View
			buf := make([]byte, 100)
			for n := range b.N {
				if n%len(packets) == 0 { // limits the rate to 10,000 flows a second
					e.Sweep(time.Duration(n) * time.Hour)
					time.Sleep(time.Duration(len(packets)) * 100 * time.Microsecond)
				}
				p := buf[:copy(buf, packets[n%len(packets)])]
				if err := v.Parse(p, packet.ChecksumComplete); err != nil {
					b.Fatal(err)
				}
				e.Outbound(&v, time.Duration(n/len(packets)*len(packets))*time.Hour)
			}
			b.StopTimer()
			b.ReportMetric(float64((cputime.Used(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/flow")
		})
	}
}
