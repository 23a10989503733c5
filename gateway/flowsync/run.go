package flowsync

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/isthmus-net/isthmus/internal/pinned"
)

// Port is the TCP port on which gateways copy flows from each other.
const Port = 5870

// purpose is the HKDF label of the key with which gateways authenticate each other.
const purpose = "isthmus gateway flows"

// Timing of connections.
const (
	checkInterval    = 250 * time.Millisecond // interval between checks of the list of other gateways
	retryPause       = time.Second            // pause after a connection has ended or failed
	listenAgain      = 5 * time.Second
	handshakeTimeout = 3 * time.Second
	readTimeout      = 5 * beatInterval
	awaitMost        = time.Second
)

// Bounds of incoming connections. Clients without the key must not use up the connections that
// gateways need. The addresses of gateways come from the API server.
const (
	strangersMost = 8  // connections from addresses that belong to no gateway
	strangersRate = 10 // such connections accepted per second; few, because a TLS handshake takes CPU time that packets need
	strangersOnce = 16 // burst of such connections
	addressMost   = 2  // connections from one address
)

// Options are the options of a Link. All are required. The functions may be called concurrently.
type Options struct {
	Listen func() (net.Listener, error)
	Dial   func(ctx context.Context, to netip.Addr) (net.Conn, error)
	Key    func() [32]byte // returns the WireGuard private key; zero: not known yet
	// Others returns the addresses of the other gateways of the installation. The value is true for
	// the active one.
	Others func() map[netip.Addr]bool
	Log    *slog.Logger
}

// A Link connects the Keeper of one gateway with the Keepers of the other gateways.
type Link struct {
	k *Keeper
	o Options

	settled chan struct{} // closed when each standby gateway that was known at the start has sent its flows, or the connection to it has failed

	mu         sync.Mutex
	config     *tls.Config // nil: the key is not known yet
	expired    context.Context
	expire     context.CancelFunc // ends the connections that use config
	incoming   map[netip.Addr]int // number of connections from each address
	strangers  *rate.Limiter      // limits connections from addresses that belong to no gateway
	lastLogged string             // last logged error
}

// NewLink returns a Link, which Run starts.
func NewLink(k *Keeper, o Options) *Link {
	return &Link{k: k, o: o, settled: make(chan struct{}), incoming: make(map[netip.Addr]int), strangers: rate.NewLimiter(strangersRate, strangersOnce)}
}

// Await waits until the standby gateways that were known at the start have sent their flows, but
// for at most a second. The reason is that an active gateway that restarts has lost its flows, but
// a standby may have a copy of them. If this gateway has already received all flows of the active
// gateway, Await does not wait for the others, because a gateway that has ended would never answer.
func (l *Link) Await(ctx context.Context) {
	if l.k.hasList() {
		return
	}
	select {
	case <-l.settled:
	case <-time.After(awaitMost):
	case <-ctx.Done():
	}
}

// Run sends flows to the other gateways and receives theirs, until ctx ends.
func (l *Link) Run(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group.Go(func() { l.listen(ctx, &group) })

	var private [32]byte
	first := true
	contacted := make(map[netip.Addr]bool)
	var following netip.Addr // the active gateway, from which changes are received
	var unfollow context.CancelFunc = func() {}
	ended := make(chan netip.Addr)
	next := make(map[netip.Addr]time.Time)
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	for {
		if p := l.o.Key(); p != private && p != ([32]byte{}) {
			private = p
			l.change(ctx, p)
		}
		if private != ([32]byte{}) {
			var copying sync.WaitGroup
			for addr, active := range l.o.Others() {
				switch {
				case active && !l.k.State().Active && following != addr && !time.Now().Before(next[addr]):
					unfollow()
					var follow context.Context
					follow, unfollow = context.WithCancel(ctx)
					following, contacted[addr] = addr, true
					group.Go(func() {
						l.copyFrom(follow, addr, false)
						select {
						case ended <- addr:
						case <-ctx.Done():
						}
					})
				case !contacted[addr]:
					contacted[addr] = true
					copying.Add(1)
					group.Go(func() {
						defer copying.Done()
						l.copyFrom(ctx, addr, true)
					})
				}
			}
			if first {
				first = false
				group.Go(func() {
					copying.Wait()
					close(l.settled)
				})
			}
		}
		select {
		case <-ctx.Done():
			unfollow()
			return
		case addr := <-ended:
			if next[addr] = time.Now().Add(retryPause); addr == following {
				following = netip.Addr{}
			}
		case now := <-tick.C:
			l.k.expireHeld(now)
		}
	}
}

// change sets the key for new connections, and ends the connections made with the former key.
func (l *Link) change(ctx context.Context, private [32]byte) {
	c, err := pinned.Config(private, purpose)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.expire != nil {
		l.expire()
	}
	if err != nil {
		l.o.Log.Error("gateways do not copy flows from each other", "error", err)
		return
	}
	l.config = c
	l.expired, l.expire = context.WithCancel(ctx)
}

// tlsConfig returns the TLS configuration for new connections, and a context that ends when they
// must end.
func (l *Link) tlsConfig() (*tls.Config, context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.config, l.expired
}

// copyFrom connects to another gateway and receives its flows, until the connection ends. If
// listOnly is true, copyFrom ends the connection after the list of all flows. Otherwise the
// connection to an active gateway stays open for the changes.
func (l *Link) copyFrom(ctx context.Context, addr netip.Addr, listOnly bool) {
	config, expired := l.tlsConfig()
	dialing, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	conn, err := l.o.Dial(dialing, addr)
	if err == nil {
		defer conn.Close()
		defer context.AfterFunc(ctx, func() { conn.Close() })()
		defer context.AfterFunc(expired, func() { conn.Close() })()
		secure := tls.Client(conn, config)
		if err = secure.HandshakeContext(dialing); err == nil {
			r := receiver{k: l.k, from: addr, listOnly: listOnly}
			extend := func() { _ = conn.SetReadDeadline(time.Now().Add(readTimeout)) }
			extend()
			err = r.receive(secure, extend)
			r.close()
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	l.logFailure(ctx, addr, err)
}

// logFailure logs the reason why the flows of another gateway are not copied, unless that was the
// last logged error.
func (l *Link) logFailure(ctx context.Context, addr netip.Addr, err error) {
	if ctx.Err() != nil {
		return
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if text != l.lastLogged && err != nil {
		l.o.Log.Info("cannot copy the flows of the other gateway; retrying", "gateway", addr, "error", err)
	}
	l.lastLogged = text
}

// listen accepts connections until ctx ends. If the port is not available, it tries again.
func (l *Link) listen(ctx context.Context, group *sync.WaitGroup) {
	logged := false
	for ctx.Err() == nil {
		listener, err := l.o.Listen()
		if err == nil {
			logged = false
			stop := context.AfterFunc(ctx, func() { listener.Close() })
			err = l.accept(ctx, listener, group)
			stop()
			listener.Close()
		}
		if !logged && ctx.Err() == nil {
			logged = true
			l.o.Log.Warn("cannot offer flows to other gateways: connections may break at a takeover", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(listenAgain):
		}
	}
}

// accept serves connections until the listener fails.
func (l *Link) accept(ctx context.Context, listener net.Listener, group *sync.WaitGroup) error {
	for failures := 0; ; {
		conn, err := listener.Accept()
		if err != nil {
			if failures++; failures > 100 || errors.Is(err, net.ErrClosed) {
				return err
			}
			time.Sleep(checkInterval) // accept may keep failing for a while, for example if no file descriptor is free
			continue
		}
		failures = 0
		addr := netip.Addr{}
		if at, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
			addr = at.AddrPort().Addr().Unmap()
		}
		if !l.enter(addr) {
			conn.Close()
			continue
		}
		group.Go(func() {
			defer l.exit(addr)
			defer conn.Close()
			l.serve(ctx, conn)
		})
	}
}

// enter counts a new connection and returns true, or returns false if there are too many.
func (l *Link) enter(addr netip.Addr) bool {
	gateways := l.o.Others()
	_, known := gateways[addr]
	l.mu.Lock()
	defer l.mu.Unlock()
	strangers := 0
	for other, n := range l.incoming {
		if _, listed := gateways[other]; !listed {
			strangers += n
		}
	}
	if l.incoming[addr] >= addressMost || !known && (strangers >= strangersMost || !l.strangers.Allow()) {
		return false
	}
	l.incoming[addr]++
	return true
}

func (l *Link) exit(addr netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.incoming[addr]--; l.incoming[addr] == 0 {
		delete(l.incoming, addr)
	}
}

// serve sends the flows to another gateway, once that gateway has proved that it has the key.
func (l *Link) serve(ctx context.Context, conn net.Conn) {
	config, expired := l.tlsConfig()
	if config == nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(expired, cancel)()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	secure := tls.Server(conn, config)
	shaking, done := context.WithTimeout(ctx, handshakeTimeout)
	defer done()
	if err := secure.HandshakeContext(shaking); err != nil {
		l.o.Log.Debug("refused a connection that is not from a gateway", "from", conn.RemoteAddr(), "error", err)
		return
	}
	go func() { // ends when the connection ends
		// The other end sends nothing, so Read returns only when that end closes the connection.
		_, _ = secure.Read(make([]byte, 1))
		cancel()
	}()
	if err := l.k.send(ctx, secure); err != nil && ctx.Err() == nil {
		l.o.Log.Info("stopped copying flows to the other gateway", "to", conn.RemoteAddr(), "error", err)
	}
}
