package inband

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/isthmus-net/isthmus/internal/pinned"
)

// Limits for the connections of each peer, in each direction.
const (
	// Connections is the maximum number of connections of our manager to a peer, and of the
	// peer's manager to us. A manager has one or two.
	Connections = 16
	// Openings and OpeningBurst limit how fast a peer opens connections, because each connection
	// occupies a port of the gateway.
	Openings     = 2 // per second
	OpeningBurst = 16
	// Rate and Burst limit the octets in each direction.
	Rate  = 4 << 20 // per second
	Burst = 4 << 20
	// Idle is the time after which a connection without traffic in either direction is closed.
	// A manager sends an octet every 15 s. When a peer gets a new key, old connections may
	// count towards Connections for up to this time.
	Idle = 45 * time.Second

	// maxPending is the maximum number of connections to ManagerPort that have not sent a valid
	// request yet; maxPendingEach is the maximum from one address. Without these limits, any client
	// that can reach the port could keep the manager out.
	maxPending     = 64
	maxPendingEach = 8
	// listenAgain is the delay after an error of the listener.
	listenAgain = 100 * time.Millisecond
	// piece is the size of the copy buffer, in octets.
	piece = 16 << 10
)

// A Peer is a peer with in-band control.
type Peer struct {
	ID      string
	Source  netip.Addr // address from which the peer's gateway connects
	Gateway netip.Addr // address at which the peer's gateway accepts connections
	Leaving bool       // the peering is ending: only our manager may still connect
}

// Options are the options of a Server. All fields are required.
type Options struct {
	// Listen opens ManagerPort.
	Listen func() (net.Listener, error)
	// Key returns the gateways' private key.
	Key func() [32]byte
	// Dial connects to Port of a peer's gateway.
	Dial func(ctx context.Context, gateway netip.Addr) (net.Conn, error)
	// API connects to the API server of this cluster.
	API func(ctx context.Context) (net.Conn, error)
	// Connected reports whether the tunnel to a peer works.
	Connected func(peer string) bool
	Log       *slog.Logger
}

// A Server is the gateway's side. Its methods may be called concurrently, except Set and Close.
type Server struct {
	o       Options
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	refused atomic.Uint64 // number of refused connections to ManagerPort

	mu       sync.Mutex
	peers    map[string]*peer
	bySource map[netip.Addr]*peer
	listener net.Listener // nil: there are no peers, or listening failed
	failed   string       // error of listening, as logged; empty: none
	key      [32]byte     // the private key that managers must prove to have
	secure   *tls.Config  // made for key; nil: not made yet

	oursCtx context.Context // canceled to close the connections of managers that authenticated with key
	endOurs context.CancelFunc
}

type peer struct {
	Peer
	ctx    context.Context
	cancel context.CancelFunc

	theirCtx  context.Context // canceled to close the connections of the peer's manager
	endTheirs context.CancelFunc

	ours, theirs   atomic.Int64   // number of open connections, by the side whose manager opened them
	opening        *rate.Limiter  // limits how fast the peer opens connections
	warned         rate.Sometimes // limits warnings that our API server cannot be reached
	in, out        *rate.Limiter
	received, sent atomic.Uint64
	refused        [numReasons]atomic.Uint64
}

// A reason is a reason to refuse a connection, as a label of metrics.
type reason uint8

const (
	reasonConnections reason = iota // too many connections
	reasonAPI                       // the API server of this cluster cannot be reached
	reasonPeer                      // the peer's gateway refuses the connection
	reasonTunnel                    // the tunnel does not work
	numReasons
)

var reasons = [numReasons]string{"connections", "api_server", "peer", "tunnel"}

// NewServer returns a Server without peers.
func NewServer(o Options) *Server {
	s := &Server{o: o, peers: map[string]*peer{}, bySource: map[netip.Addr]*peer{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.oursCtx, s.endOurs = context.WithCancel(s.ctx)
	return s
}

// Close ends all connections.
func (s *Server) Close() {
	s.Set(nil)
	s.cancel()
	s.running.Wait()
}

// Set replaces the peers, and listens while there are any. It closes the connections of peers that
// were removed or have changed. It also closes the connections of managers that authenticated with
// a former key.
func (s *Server) Set(peers []Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rekey(s.o.Key()) // read the key under the lock, or a call that waited for the lock could restore a former key
	before := s.peers
	s.peers, s.bySource = make(map[string]*peer, len(peers)), make(map[netip.Addr]*peer, len(peers))
	for _, want := range peers {
		p := before[want.ID]
		if p == nil || p.Peer != want {
			was := p
			p = &peer{Peer: want, opening: rate.NewLimiter(Openings, OpeningBurst), warned: rate.Sometimes{Interval: time.Minute},
				in: rate.NewLimiter(Rate, Burst), out: rate.NewLimiter(Rate, Burst)}
			if was != nil && was.leavesAs(want) { // keep our manager's connections, by which it may be deleting its objects at the peer
				p.ctx, p.cancel = was.ctx, was.cancel
				was.endTheirs()
				delete(before, want.ID)
			} else {
				p.ctx, p.cancel = context.WithCancel(s.ctx)
			}
			p.theirCtx, p.endTheirs = context.WithCancel(p.ctx)
		}
		s.peers[p.ID], s.bySource[p.Source] = p, p
	}
	for id, p := range before {
		if s.peers[id] != p {
			p.cancel()
		}
	}
	s.listen(len(peers) > 0)
}

// listen opens or closes ManagerPort. The caller holds s.mu.
func (s *Server) listen(wanted bool) {
	switch {
	case !wanted && s.listener != nil:
		s.listener.Close()
		s.listener = nil
	case wanted && s.listener == nil:
		l, err := s.o.Listen()
		if err != nil {
			if s.failed != err.Error() {
				s.failed = err.Error()
				s.o.Log.Error("in-band control is off: the manager cannot reach peers through the tunnel", "error", err)
			}
			return
		}
		s.listener, s.failed = l, ""
		s.running.Go(func() { s.accept(l) })
	}
}

// accept handles managers until the listener is closed.
func (s *Server) accept(l net.Listener) {
	var pending pendingConns
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // for example a lack of file descriptors
			time.Sleep(listenAgain)
			continue
		}
		var from netip.Addr
		if addr, ok := c.RemoteAddr().(*net.TCPAddr); ok {
			from = addr.AddrPort().Addr().Unmap()
		}
		if !pending.take(from) {
			s.refused.Add(1)
			c.Close()
			continue
		}
		s.running.Go(func() {
			defer c.Close()
			ctx, id, secured, err := s.request(c)
			pending.free(from)
			if err != nil {
				s.refused.Add(1)
				s.o.Log.Debug("in-band: a request was refused", "from", c.RemoteAddr().String(), "error", err)
				return
			}
			s.serve(ctx, id, secured)
		})
	}
}

// pendingConns counts the connections that have not sent a valid request yet, by address.
type pendingConns struct {
	mu   sync.Mutex
	all  int
	each map[netip.Addr]int
}

func (p *pendingConns) take(from netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all == maxPending || p.each[from] == maxPendingEach {
		return false
	}
	if p.each == nil {
		p.each = make(map[netip.Addr]int)
	}
	p.all++
	p.each[from]++
	return true
}

func (p *pendingConns) free(from netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all--
	if p.each[from]--; p.each[from] == 0 {
		delete(p.each, from)
	}
}

// rekey sets the key, and closes the connections of managers that authenticated with another key.
// The caller holds s.mu.
func (s *Server) rekey(key [32]byte) {
	if s.key == key {
		return
	}
	s.endOurs()
	s.key, s.secure = key, nil
	s.oursCtx, s.endOurs = context.WithCancel(s.ctx)
}

// config returns the TLS configuration for our manager, and the context that is canceled to close
// its connections. It generates one certificate for each key, and not one for each connection.
func (s *Server) config() (context.Context, *tls.Config, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := s.o.Key()
	s.rekey(key)
	if s.secure == nil {
		config, err := pinned.Config(key, purpose)
		if err != nil {
			return nil, nil, err
		}
		s.secure = config
	}
	return s.oursCtx, s.secure, nil
}

// request performs the TLS handshake, in which the manager must prove the gateways' key, and
// reads the manager's request.
func (s *Server) request(c net.Conn) (ctx context.Context, id string, secured net.Conn, err error) {
	ctx, config, err := s.config()
	if err != nil {
		return nil, "", nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if err := c.SetDeadline(time.Now().Add(connectTime)); err != nil {
		return nil, "", nil, err
	}
	t := tls.Server(c, config)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, "", nil, err
	}
	if id, err = readRequest(t); err != nil {
		return nil, "", nil, err
	}
	return ctx, id, t, c.SetDeadline(time.Time{})
}

// serve connects our manager to a peer. It returns when the connection has ended.
func (s *Server) serve(ours context.Context, id string, c net.Conn) {
	s.mu.Lock()
	p := s.peers[id]
	s.mu.Unlock()
	if p == nil {
		_ = answer(c, "the Peerings of both clusters need spec.inBand, which Liqo does not support")
		return
	}
	if !p.take(&p.ours) {
		_ = answer(c, fmt.Sprintf("our manager already has %d connections to the peer", Connections))
		return
	}
	defer p.ours.Add(-1)
	if !s.o.Connected(id) {
		p.refused[reasonTunnel].Add(1)
		_ = answer(c, "the tunnel to the peer is down")
		return
	}
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	stop := context.AfterFunc(ours, cancel)
	defer stop()
	far, err := s.dial(ctx, p.Gateway)
	if err != nil {
		p.refused[reasonPeer].Add(1)
		s.o.Log.Debug("in-band: connect to the peer", "peer", id, "error", err)
		_ = answer(c, "the peer's gateway refuses our manager; set spec.inBand in the peer's Peering, too")
		return
	}
	if err := answer(c, ""); err != nil {
		far.Close()
		return
	}
	p.splice(ctx, far, c)
}

func (s *Server) dial(ctx context.Context, gateway netip.Addr) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	return s.o.Dial(ctx, gateway)
}

// Take connects the peer's gateway at the address from to the API server of this cluster. It calls
// exactly one of accept and refuse, and returns when the connection has ended.
func (s *Server) Take(from netip.Addr, accept func() (net.Conn, error), refuse func()) {
	s.mu.Lock()
	p := s.bySource[from]
	s.mu.Unlock()
	if p == nil || p.Leaving || !p.take(&p.theirs) {
		refuse()
		return
	}
	defer p.theirs.Add(-1)
	if !p.opening.Allow() {
		p.refused[reasonConnections].Add(1)
		refuse()
		return
	}
	far, err := accept()
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(p.theirCtx, connectTime)
	defer cancel()
	c, err := s.o.API(ctx)
	if err != nil {
		if p.theirCtx.Err() == nil { // the API server failed; the peer was not removed meanwhile
			p.refused[reasonAPI].Add(1)
			p.warned.Do(func() {
				s.o.Log.Warn("in-band control: peer cannot reach our API server", "peer", p.ID, "error", err)
			})
		}
		far.Close()
		return
	}
	p.splice(p.theirCtx, far, c)
}

// leavesAs reports whether want differs from the current Peer only in Leaving.
func (p *peer) leavesAs(want Peer) bool {
	was := p.Peer
	was.Leaving = true
	return was == want
}

// take counts one more connection in n, and returns false if there are too many.
func (p *peer) take(n *atomic.Int64) bool {
	if n.Add(1) <= Connections {
		return true
	}
	n.Add(-1)
	p.refused[reasonConnections].Add(1)
	return false
}

// splice copies between the peer (far) and a local connection (here) until either ends, and closes
// both. It returns only after far.Close has returned, so that the connection counts towards
// Connections until then.
func (p *peer) splice(ctx context.Context, far, here net.Conn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { here.Close(); far.Close() })
	defer stop()
	idle := time.AfterFunc(Idle, cancel)
	defer idle.Stop()
	var both sync.WaitGroup
	both.Go(func() {
		defer cancel()
		move(ctx, here, far, p.in, &p.received, idle)
		// Reset the connection. Otherwise the local port would stay in use for a minute
		// (TIME_WAIT), unless the API server closed the connection first.
		if c, ok := here.(*net.TCPConn); ok && ctx.Err() == nil {
			_ = c.SetLinger(0)
		}
	})
	both.Go(func() {
		defer cancel()
		move(ctx, far, here, p.out, &p.sent, idle)
	})
	both.Wait()
	here.Close()
	far.Close()
}

// move copies in one direction, at a limited rate.
func move(ctx context.Context, to io.Writer, from io.Reader, limit *rate.Limiter, count *atomic.Uint64, idle *time.Timer) {
	b := make([]byte, piece)
	for {
		n, err := from.Read(b)
		if n > 0 {
			idle.Reset(Idle)
			if limit.WaitN(ctx, n) != nil {
				return
			}
			count.Add(uint64(n))
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// Stats are the counters of one peer.
type Stats struct {
	Peer           string
	Ours, Theirs   int64             // open connections, by the side whose manager opened them
	Received, Sent uint64            // octets received from the peer and sent to it
	Refused        map[string]uint64 // refused connections, by reason
}

// Stats returns the counters of each peer, and the number of refused connections to
// ManagerPort.
func (s *Server) Stats() (all []Stats, strangers uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.peers {
		one := Stats{Peer: p.ID, Ours: p.ours.Load(), Theirs: p.theirs.Load(), Received: p.received.Load(), Sent: p.sent.Load(), Refused: map[string]uint64{}}
		for i := range p.refused {
			one.Refused[reasons[i]] = p.refused[i].Load()
		}
		all = append(all, one)
	}
	return all, s.refused.Load()
}
