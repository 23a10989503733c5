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
	// maxConnections bounds all connections. maxPerAddress bounds the connections from one address. An
	// idle connection costs some 25 KiB.
	maxConnections = 256
	maxPerAddress  = 16
	// perSecond and burst limit the requests of one caller. A virtual kubelet requests all its
	// endpoints when it starts.
	perSecond = 100
	burst     = 1000
	// maxCallers bounds the number of callers whose rate is tracked.
	// ipam.MaxMappingsPerCaller bounds the mappings of each caller.
	maxCallers = 1024
)

// TLS returns the configuration of a server that identifies callers by client certificates. cert,
// key and clientCA are PEM files with the server's own certificate and key, and with the callers'
// certificate authority. Each connection reads the files again, so that renewed files take effect
// at once.
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

// byAddress is the prefix of the name of a caller that is identified only by its address.
const byAddress = "address "

// callerOf returns the caller's name: the subject of its certificate or, without TLS, its address.
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

// callers limits the requests of each caller. Its methods may be called concurrently.
type callers struct {
	mu    sync.Mutex
	known map[string]*rate.Limiter
}

func newCallers() *callers { return &callers{known: make(map[string]*rate.Limiter)} }

// admit counts a request of a caller. It returns an error if the caller has sent too many requests,
// or if there are too many callers.
func (c *callers) admit(name string, now time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	limiter := c.known[name]
	if limiter == nil {
		if len(c.known) >= maxCallers { // a caller with a full bucket can be forgotten: a new bucket is full as well
			maps.DeleteFunc(c.known, func(_ string, l *rate.Limiter) bool { return l.TokensAt(now) >= burst })
		}
		if len(c.known) >= maxCallers {
			return fmt.Errorf("the IPAM already has %d callers, which is the limit", maxCallers)
		}
		limiter = rate.NewLimiter(perSecond, burst)
		c.known[name] = limiter
	}
	if !limiter.AllowN(now, 1) {
		return fmt.Errorf("too many requests: want at most %d a second", perSecond)
	}
	return nil
}

// A gate is a listener that closes excess connections. If excess connections had to wait, clients
// that hold connections open could block other clients for ever.
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
			return &countedConn{Conn: conn, leave: sync.OnceFunc(func() { g.left(host) })}, nil
		}
		_ = conn.Close() // nobody would answer the client
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

// A countedConn is a connection that the gate counts until it is closed.
type countedConn struct {
	net.Conn
	leave func()
}

func (p *countedConn) Close() error {
	p.leave()
	return p.Conn.Close()
}
