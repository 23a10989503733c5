package inband

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/leaktest"
	"github.com/isthmus-net/isthmus/internal/pinned"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var (
	source  = netip.MustParseAddr("10.71.0.0")
	gateway = netip.MustParseAddr("10.72.0.1")
	secret  = [32]byte{1, 2, 3}
	agreed  = []Peer{{ID: "b", Source: source, Gateway: gateway}}
)

// world is a gateway, with an echo server in place of each API server.
type world struct {
	*Server
	addr    string       // address of the port for managers
	key     atomic.Value // [32]byte: the gateways' private key
	down    atomic.Bool  // the tunnel does not work
	refuses atomic.Bool  // the peer's gateway refuses connections
	dialed  atomic.Value // last address dialed in the tunnel
}

func newWorld(t *testing.T) *world {
	t.Helper()
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { echo.Close() })
	go func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	dial := func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", echo.Addr().String())
	}
	w := &world{}
	w.key.Store(secret)
	w.Server = NewServer(Options{
		Listen: func() (net.Listener, error) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err == nil {
				w.addr = l.Addr().String()
			}
			return l, err
		},
		Key: func() [32]byte { return w.key.Load().([32]byte) },
		Dial: func(ctx context.Context, to netip.Addr) (net.Conn, error) {
			if w.dialed.Store(to); w.refuses.Load() {
				return nil, errors.New("connection refused")
			}
			return dial(ctx)
		},
		API:       dial,
		Connected: func(string) bool { return !w.down.Load() },
		Log:       slog.New(slog.DiscardHandler),
	})
	t.Cleanup(w.Close)
	return w
}

// manager connects as Dial does, but to the port of the test.
func (w *world) manager(private [32]byte, peer string) (net.Conn, error) {
	config, err := pinned.Config(private, purpose)
	if err != nil {
		return nil, err
	}
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: time.Minute}, "tcp", w.addr, config)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	connected, err := connect(c, peer)
	if err != nil {
		c.Close()
	}
	return connected, err
}

// checkEcho checks that a connection returns the octets sent through it.
func checkEcho(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	sent, got := bytes.Repeat([]byte("api"), 10_000), make([]byte, 30_000)
	go func() { _, _ = c.Write(sent) }()
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("not what was sent: %v", err)
	}
}

// waitForEnd waits for the end of a connection, for less time than the idle timeout.
func waitForEnd(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(Idle / 2))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection goes on: %v", err)
	}
}

func TestManagerReachesAPeerWithInBandControl(t *testing.T) {
	w := newWorld(t)
	w.Set(agreed)
	c, err := w.manager(secret, "b")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	checkEcho(t, c)
	if w.dialed.Load() != gateway {
		t.Errorf("dialed %v, want %v", w.dialed.Load(), gateway)
	}
	if all, _ := w.Stats(); len(all) != 1 || all[0].Ours != 1 || all[0].Received < 30_000 || all[0].Sent < 30_000 {
		t.Errorf("counted %+v", all)
	}
	w.Set(nil) // the peer no longer agrees to in-band control
	waitForEnd(t, c)
	if c, err := net.Dial("tcp", w.addr); err == nil {
		c.Close()
		t.Error("the port is still open")
	}
}

// Somebody who has stolen the gateways' key may have an open connection. It must end with the
// key.
func TestConnectionIsClosedWhenTheGatewaysChangeTheirKey(t *testing.T) {
	w := newWorld(t)
	w.Set(agreed)
	c, err := w.manager(secret, "b")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	w.Set(agreed) // the key has not changed
	checkEcho(t, c)
	next := [32]byte{4, 5, 6}
	w.key.Store(next)
	w.Set(agreed)
	waitForEnd(t, c)
	if c, err := w.manager(secret, "b"); err == nil {
		c.Close()
		t.Error("the former key was accepted")
	}
	if c, err = w.manager(next, "b"); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	checkEcho(t, c)
}

func TestAManagerGetsTheReasonForARefusedConnection(t *testing.T) {
	w := newWorld(t)
	w.Set(agreed)
	for _, c := range []struct {
		name, peer, want string
		set              func()
	}{
		{"another peer", "c", "the Peerings of both clusters need spec.inBand", func() {}},
		{"no tunnel", "b", "tunnel to the peer is down", func() { w.down.Store(true) }},
		{"the peer has not agreed", "b", "spec.inBand", func() { w.down.Store(false); w.refuses.Store(true) }},
	} {
		c.set()
		_, err := w.manager(secret, c.peer)
		if refused := (*RefusedError)(nil); !errors.As(err, &refused) || !strings.Contains(refused.Reason, c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	all, _ := w.Stats()
	if all[0].Refused["tunnel"] != 1 || all[0].Refused["peer"] != 1 {
		t.Errorf("counted %v", all[0].Refused)
	}
}

func TestManagerPortRefusesClientsWithoutTheKey(t *testing.T) {
	w := newWorld(t)
	w.Set(agreed)
	refused := func() uint64 {
		_, n := w.Stats()
		return n
	}
	if _, err := w.manager([32]byte{9}, "b"); err == nil {
		t.Error("another key was taken")
	}
	for _, text := range []string{"CONNECT b:6443 HTTP/1.1\r\nHost: b:6443\r\n\r\n", strings.Repeat("x", 10_000)} {
		c, err := net.Dial("tcp", w.addr)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, text)
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		answer, _ := io.ReadAll(c)
		c.Close()
		if strings.Contains(string(answer), "HTTP/1.1") {
			t.Errorf("answered %q", answer)
		}
	}
	for end := time.Now().Add(time.Minute); refused() < 3; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d are counted", refused())
		}
	}
	w.key.Store([32]byte{}) // the gateway does not know its key yet
	if _, err := w.manager([32]byte{}, "b"); err == nil {
		t.Error("a key that everybody knows was taken")
	}
	if all, _ := w.Stats(); w.dialed.Load() != nil || all[0].Ours != 0 {
		t.Error("a stranger got through")
	}
}

func TestConnectionsOfAPeerToTheAPIServerAreLimited(t *testing.T) {
	w := newWorld(t)
	w.Set(append(agreed, Peer{ID: "c", Source: netip.MustParseAddr("10.73.0.0"), Gateway: netip.MustParseAddr("10.74.0.1")}))
	refused := 0
	take := func(from netip.Addr) net.Conn {
		ours, theirs := net.Pipe()
		done := make(chan bool, 1)
		go w.Take(from, func() (net.Conn, error) { done <- true; return theirs, nil }, func() { theirs.Close(); done <- false })
		if !<-done {
			refused++
			return nil
		}
		t.Cleanup(func() { ours.Close() })
		return ours
	}
	for range Connections {
		if c := take(source); c == nil {
			t.Fatal("refused")
		} else {
			checkEcho(t, c)
		}
	}
	if take(source) != nil || take(netip.MustParseAddr("10.71.0.7")) != nil {
		t.Error("one too many, or one from elsewhere, was taken")
	}
	if c := take(netip.MustParseAddr("10.73.0.0")); c == nil {
		t.Error("one peer shut another one out")
	} else {
		checkEcho(t, c)
	}
	all, _ := w.Stats()
	for _, p := range all {
		if p.Peer == "b" && (p.Theirs != Connections || p.Refused["connections"] != 1) {
			t.Errorf("counted %+v", p)
		}
	}
}

func TestConnectionsOfARemovedPeerAreClosed(t *testing.T) {
	w := newWorld(t)
	w.Set(agreed)
	ours, theirs := net.Pipe()
	defer ours.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Take(source, func() (net.Conn, error) { return theirs, nil }, func() { theirs.Close() })
	}()
	checkEcho(t, ours)
	w.Set(nil)
	waitForEnd(t, ours)
	<-done
}

// While a peering ends, the peer's manager has no access to our API server. Our manager still
// has objects to delete at the peer.
func TestLeavingPeerCannotReachOurAPIServer(t *testing.T) {
	w := newWorld(t)
	w.Set([]Peer{{ID: "b", Source: source, Gateway: gateway, Leaving: true}})
	refused := false
	w.Take(source, func() (net.Conn, error) { return nil, errors.New("taken") }, func() { refused = true })
	if !refused {
		t.Error("the peer's manager is let through")
	}
	c, err := w.manager(secret, "b")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	checkEcho(t, c)
}

func TestPeerBandwidthIsLimited(t *testing.T) {
	w := newWorld(t)
	w.Set(agreed)
	c, err := w.manager(secret, "b")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const size = Burst + Rate
	go func() { _, _ = c.Write(make([]byte, size)) }()
	begin := time.Now()
	_ = c.SetDeadline(begin.Add(time.Minute))
	if _, err := io.CopyN(io.Discard, c, size); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < 900*time.Millisecond {
		t.Errorf("%d octets took %v", size, took)
	}
}

// Each connection occupies a port of the gateway for a minute.
func TestPeerConnectionRateIsLimited(t *testing.T) {
	w := newWorld(t)
	w.Set(agreed)
	taken := 0
	for range 10 * OpeningBurst {
		ours, theirs := net.Pipe()
		ours.Close()
		w.Take(source, func() (net.Conn, error) { taken++; return theirs, nil }, func() { theirs.Close() })
	}
	if taken < OpeningBurst || taken > 2*OpeningBurst {
		t.Errorf("%d connections at once", taken)
	}
}

// slowConn is a connection in the tunnel whose Close waits for the peer.
type slowConn struct {
	net.Conn
	closed chan struct{}
}

func (f slowConn) Close() error {
	f.Conn.Close()
	<-f.closed
	return nil
}

func TestConnectionIsCountedUntilBothSidesClose(t *testing.T) {
	w := newWorld(t)
	w.Set(agreed)
	ours, theirs := net.Pipe()
	ours.Close()
	f, done := slowConn{theirs, make(chan struct{})}, make(chan struct{})
	go func() {
		defer close(done)
		w.Take(source, func() (net.Conn, error) { return f, nil }, func() {})
	}()
	select {
	case <-done:
		t.Error("does not count any more")
	case <-time.After(100 * time.Millisecond):
	}
	close(f.closed)
	<-done
	if all, _ := w.Stats(); all[0].Theirs != 0 {
		t.Errorf("counted %+v", all)
	}
}

// failingListener is a listener whose first Accept fails.
type failingListener struct {
	net.Listener
	failed atomic.Bool
}

func (f *failingListener) Accept() (net.Conn, error) {
	if f.failed.CompareAndSwap(false, true) {
		return nil, errors.New("too many open files")
	}
	return f.Listener.Accept()
}

func TestTheManagerPortSurvivesAnAcceptError(t *testing.T) {
	w := newWorld(t)
	listen := w.o.Listen
	w.o.Listen = func() (net.Listener, error) {
		l, err := listen()
		return &failingListener{Listener: l}, err
	}
	w.Set(agreed)
	c, err := w.manager(secret, "b")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestOneAddressCannotBlockTheManagerPort(t *testing.T) {
	var p pendingConns
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for range maxPending {
		p.take(a)
	}
	if !p.take(b) {
		t.Error("kept out")
	}
	p.free(a)
	if !p.take(a) || p.take(a) {
		t.Error("another number of places than are free")
	}
}
