package ipamrpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"
)

const (
	// maxConnections bounds the connections, maxPerAddress those from one address: an idle one
	// costs some 25 KiB.
	maxConnections = 256
	maxPerAddress  = 16
	// perSecond and burst bound the requests of one caller. A virtual kubelet that starts asks for
	// all its endpoints.
	perSecond = 100
	burst     = 1000
	// maxCallers bounds the callers that are remembered, maxClaims what one of them may have
	// mapped.
	maxCallers = 1024
	maxClaims  = 4096
)

// TLS returns what a server needs that knows callers by their certificates: its own certificate and
// key, and the authority of theirs, all of them files in PEM. They are read again for each
// connection, so that renewed ones count at once.
func TLS(cert, key, clientCA string) (*tls.Config, error) {
	load := func() (*tls.Config, error) {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w", cert, key, err)
		}
		text, err := os.ReadFile(clientCA)
		if err != nil {
			return nil, err
		}
		c := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"},
			ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: x509.NewCertPool()}
		if !c.ClientCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s: no certificate in PEM", clientCA)
		}
		return c, nil
	}
	c, err := load()
	if err != nil {
		return nil, err
	}
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return load() }
	return c, nil
}

// callerOf returns who asks: the subject of its certificate or, without TLS, its address.
func callerOf(ctx context.Context) string {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return ""
	}
	if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.VerifiedChains) > 0 {
		return "certificate " + info.State.VerifiedChains[0][0].Subject.String()
	}
	return "address " + hostOf(p.Addr).String()
}

func hostOf(a net.Addr) netip.Addr {
	if a, err := netip.ParseAddrPort(a.String()); err == nil {
		return a.Addr().Unmap()
	}
	return netip.Addr{}
}

// A mapping is an endpoint as one cluster has it.
type mapping struct {
	cluster string
	ip      netip.Addr
}

// callers remembers who asked for which mapping, as long as the process lives. Its methods may be
// called concurrently.
type callers struct {
	mu       sync.Mutex
	known    map[string]*caller
	mappings map[mapping]*claimed
}

type caller struct {
	limiter *rate.Limiter
	has     map[mapping]struct{}
}

// claimed is a mapping that somebody has, or that is being decided.
type claimed struct {
	turn  chan struct{} // one element: whose turn it is
	users int           // of turn
	by    map[string]struct{}
}

func newCallers() *callers {
	return &callers{known: make(map[string]*caller), mappings: make(map[mapping]*claimed)}
}

// admit counts a request of a caller. It is an error when there are too many of them, or of
// callers.
func (c *callers) admit(name string, now time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	who := c.known[name]
	if who == nil {
		if len(c.known) >= maxCallers {
			for other, o := range c.known { // those who have nothing and were silent are as good as new
				if len(o.has) == 0 && o.limiter.TokensAt(now) >= burst {
					delete(c.known, other)
				}
			}
		}
		if len(c.known) >= maxCallers {
			return fmt.Errorf("the IPAM has %d callers already", maxCallers)
		}
		who = c.of(name)
	}
	if !who.limiter.AllowN(now, 1) {
		return fmt.Errorf("too many requests: want at most %d a second", perSecond)
	}
	return nil
}

// of returns what is known of a caller, which may be nothing.
func (c *callers) of(name string) *caller {
	who := c.known[name]
	if who == nil {
		who = &caller{limiter: rate.NewLimiter(perSecond, burst), has: make(map[mapping]struct{})}
		c.known[name] = who
	}
	return who
}

// lock waits until nobody else decides about a mapping.
func (c *callers) lock(ctx context.Context, m mapping) (unlock func(), err error) {
	c.mu.Lock()
	at := c.mappings[m]
	if at == nil {
		at = &claimed{turn: make(chan struct{}, 1), by: make(map[string]struct{})}
		at.turn <- struct{}{}
		c.mappings[m] = at
	}
	at.users++
	c.mu.Unlock()
	leave := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if at.users--; at.users == 0 && len(at.by) == 0 {
			delete(c.mappings, m)
		}
	}
	select {
	case <-at.turn:
		return func() { at.turn <- struct{}{}; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}

// mayClaim refuses another mapping to a caller that has too many. What is not mapped any more, as
// when its peer has left, does not count.
func (c *callers) mayClaim(name string, m mapping, mapped func(string, netip.Addr) bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	who := c.of(name)
	if _, has := who.has[m]; has || len(who.has) < maxClaims {
		return nil
	}
	for old := range who.has {
		if !mapped(old.cluster, old.ip) {
			c.drop(name, old)
		}
	}
	if len(who.has) >= maxClaims {
		return fmt.Errorf("this caller has %d endpoints mapped already; want it to unmap some", maxClaims)
	}
	return nil
}

// claim notes that the caller has a mapping. The caller has to have its lock, here and below.
func (c *callers) claim(name string, m mapping) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mappings[m].by[name], c.of(name).has[m] = struct{}{}, struct{}{}
}

// claims reports whether the caller has a mapping, and whether others have it.
func (c *callers) claims(name string, m mapping) (mine, others bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	by := c.mappings[m].by
	_, mine = by[name]
	return mine, len(by) > 1 || len(by) == 1 && !mine
}

// disclaim is the opposite of claim.
func (c *callers) disclaim(name string, m mapping) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(name, m)
}

func (c *callers) drop(name string, m mapping) {
	delete(c.of(name).has, m)
	if at := c.mappings[m]; at != nil {
		if delete(at.by, name); len(at.by) == 0 && at.users == 0 {
			delete(c.mappings, m)
		}
	}
}

// A gate is a listener that closes what is too much, instead of letting it wait: whoever holds
// connections open would keep others waiting for ever.
type gate struct {
	net.Listener

	mu    sync.Mutex
	total int
	from  map[netip.Addr]int
}

func newGate(l net.Listener) *gate { return &gate{Listener: l, from: make(map[netip.Addr]int)} }

func (g *gate) Accept() (net.Conn, error) {
	for {
		conn, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		host := hostOf(conn.RemoteAddr())
		g.mu.Lock()
		full := g.total >= maxConnections || g.from[host] >= maxPerAddress
		if !full {
			g.total++
			g.from[host]++
		}
		g.mu.Unlock()
		if !full {
			return &passed{Conn: conn, leave: sync.OnceFunc(func() { g.left(host) })}, nil
		}
		_ = conn.Close() // of somebody whom nobody answers
	}
}

func (g *gate) left(host netip.Addr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.total--
	if g.from[host]--; g.from[host] == 0 {
		delete(g.from, host)
	}
}

// passed is a connection that the gate counts until it is closed.
type passed struct {
	net.Conn
	leave func()
}

func (p *passed) Close() error {
	p.leave()
	return p.Conn.Close()
}
