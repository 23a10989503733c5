package ipamrpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
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
	// maxCallers bounds the callers that are remembered. What one of them may have mapped is
	// ipam.MaxAsked.
	maxCallers = 1024
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

// byAddress begins the name of a caller of whom only the address is known.
const byAddress = "address "

// callerOf returns who asks: the subject of its certificate or, without TLS, its address.
func callerOf(ctx context.Context) string {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return ""
	}
	if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.VerifiedChains) > 0 {
		return "certificate " + info.State.VerifiedChains[0][0].Subject.String()
	}
	return byAddress + hostOf(p.Addr).String()
}

func hostOf(a net.Addr) netip.Addr {
	if a, err := netip.ParseAddrPort(a.String()); err == nil {
		return a.Addr().Unmap()
	}
	return netip.Addr{}
}

// callers bounds the requests of each caller. Its methods may be called concurrently.
type callers struct {
	mu    sync.Mutex
	known map[string]*rate.Limiter
}

func newCallers() *callers { return &callers{known: make(map[string]*rate.Limiter)} }

// admit counts a request of a caller. It is an error when there are too many of them, or of
// callers.
func (c *callers) admit(name string, now time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	limiter := c.known[name]
	if limiter == nil {
		if len(c.known) >= maxCallers { // those who were silent are as good as new
			maps.DeleteFunc(c.known, func(_ string, l *rate.Limiter) bool { return l.TokensAt(now) >= burst })
		}
		if len(c.known) >= maxCallers {
			return fmt.Errorf("the IPAM has %d callers already", maxCallers)
		}
		limiter = rate.NewLimiter(perSecond, burst)
		c.known[name] = limiter
	}
	if !limiter.AllowN(now, 1) {
		return fmt.Errorf("too many requests: want at most %d a second", perSecond)
	}
	return nil
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
