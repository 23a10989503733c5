// Package probe sends a packet or a connection and reports how the receiver saw it, for tests of
// real clusters. Server.Serve answers probes and Do sends one. The program testpod runs both inside
// pods. On nodes, a test calls Do itself.
package probe

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"

	"github.com/isthmus-net/isthmus/internal/ping"
)

// The protocols of a probe.
const (
	TCP  = "tcp"
	UDP  = "udp"
	ICMP = "icmp"
)

// A Request is a packet or connection to send.
type Request struct {
	Protocol string
	To       netip.Addr
	Port     uint16 // port of the server; unused for ICMP
	Size     int    // number of octets of the payload, in both directions

	// Dial replaces net.Dialer, for connections that start in another network namespace.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	Wait time.Duration // timeout of one attempt, default 3 s; UDP and ICMP are sent again until the context ends
}

// An Answer describes a request as the server received it.
type Answer struct {
	From   netip.Addr `json:"from"`   // source address
	Octets int        `json:"octets"` // number of received octets of the payload
	Server string     `json:"server"` // name of the server
	Token  string     `json:"token"`  // for a ping: its key in the response to /pings; otherwise empty
}

// Do sends the request repeatedly until it is answered or ctx ends.
func Do(ctx context.Context, r Request) (a Answer, err error) {
	if r.Wait == 0 {
		r.Wait = 3 * time.Second
	}
	for {
		attempt, cancel := context.WithTimeout(ctx, r.Wait)
		switch r.Protocol {
		case TCP:
			a, err = overTCP(attempt, r)
		case UDP:
			a, err = overUDP(attempt, r)
		case ICMP:
			a.Token, err = echo(attempt, r)
		default:
			err = fmt.Errorf("protocol %q: want %s, %s or %s", r.Protocol, TCP, UDP, ICMP)
		}
		cancel()
		if err == nil {
			return a, nil
		}
		select {
		case <-ctx.Done():
			return a, fmt.Errorf("%s to %v: %w", r.Protocol, r.To, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func overTCP(ctx context.Context, r Request) (a Answer, err error) {
	url := fmt.Sprintf("http://%v/echo", netip.AddrPortFrom(r.To, r.Port))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(make([]byte, r.Size)))
	if err != nil {
		return a, err
	}
	return a, get(&http.Transport{DisableKeepAlives: true, DialContext: r.Dial}, req, &a)
}

func get(transport http.RoundTripper, req *http.Request, into any) error {
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", req.URL, resp.Status, bytes.TrimSpace(b))
	}
	return json.Unmarshal(b, into)
}

// overUDP uses a connected socket, which ignores an answer from another address.
func overUDP(ctx context.Context, r Request) (a Answer, err error) {
	dial := r.Dial
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	c, err := dial(ctx, "udp4", netip.AddrPortFrom(r.To, r.Port).String())
	if err != nil {
		return a, err
	}
	defer c.Close()
	if end, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(end); err != nil {
			return a, err
		}
	}
	if _, err := c.Write(make([]byte, max(r.Size, 1))); err != nil {
		return a, err
	}
	b := make([]byte, 64<<10)
	n, err := c.Read(b)
	if err != nil {
		return a, err
	}
	return a, json.Unmarshal(bytes.TrimRight(b[:n], "\x00"), &a)
}

// echo sends a ping, which the receiver's kernel answers. The receiver's Server records the source
// of the ping.
func echo(ctx context.Context, r Request) (token string, err error) {
	c, err := icmp.ListenPacket(ping.Raw(r.To))
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }() // fails only if the connection is closed already
	data, _, err := ping.Echo(ctx, c, r.To, r.Size)
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(data[:ping.TokenSize]), nil
}

// A Server answers probes on one port of TCP and UDP, and records the sources of pings.
type Server struct {
	Name string

	mu    sync.Mutex
	pings map[string]string // source addresses by token
	flow  *Flow
	load  *Load
}

// greeting is the start of the response to GET /. The server's name follows.
const greeting = "hello from "

// Serve answers probes until ctx ends.
func (s *Server) Serve(ctx context.Context, port uint16) error {
	s.pings = map[string]string{}
	tcp, err := net.Listen("tcp4", fmt.Sprintf(":%d", port))
	if err != nil {
		return err
	}
	// Listen on the wildcard address, as most servers do.
	udp, err := net.ListenPacket("udp4", fmt.Sprintf(":%d", port))
	if err != nil {
		return err
	}
	raw, err := icmp.ListenPacket("ip4:icmp", "0.0.0.0")
	if err != nil {
		return err
	}
	errs := make(chan error, 3)
	go func() { errs <- s.udp(udp) }()
	go func() { errs <- s.icmp(raw) }()
	go func() { errs <- (&http.Server{Handler: s.handler(), ReadHeaderTimeout: time.Minute}).Serve(tcp) }()
	select {
	case <-ctx.Done():
		return errors.Join(tcp.Close(), udp.Close(), raw.Close())
	case err := <-errs:
		return err
	}
}

func (s *Server) udp(c net.PacketConn) error {
	b := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return err
		}
		addr, err := netip.ParseAddrPort(from.String())
		if err != nil {
			return err
		}
		answer, err := json.Marshal(Answer{From: addr.Addr(), Octets: n, Server: s.Name})
		if err != nil {
			return err
		}
		out := make([]byte, max(n, len(answer))) // as long as the request; the client removes the zeros
		copy(out, answer)
		_, _ = c.WriteTo(out, from) // if the answer is lost, the client repeats its request
	}
}

func (s *Server) icmp(c *icmp.PacketConn) error {
	b := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return err
		}
		m, err := icmp.ParseMessage(1, b[:n])
		if err != nil || m.Type != ipv4.ICMPTypeEcho {
			continue
		}
		if echo, ok := m.Body.(*icmp.Echo); ok && len(echo.Data) >= ping.TokenSize {
			s.mu.Lock()
			s.pings[hex.EncodeToString(echo.Data[:ping.TokenSize])] = from.String()
			s.mu.Unlock()
		}
	}
}

// relay connects to the address in the request. After the response header, it copies octets
// between that connection and the client.
func relay(w http.ResponseWriter, r *http.Request) {
	to, err := new(net.Dialer).DialContext(r.Context(), "tcp", r.FormValue("to"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer to.Close()
	caller, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer caller.Close()
	if _, err := io.WriteString(caller, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(to, buffered) // when one side has closed its connection, close the other connection
		to.Close()
	}()
	_, _ = io.Copy(caller, to)
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, "%s%s\n", greeting, s.Name) })
	mux.HandleFunc("POST /echo", func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		from, parse := netip.ParseAddrPort(r.RemoteAddr)
		reply(w, Answer{From: from.Addr(), Octets: int(n), Server: s.Name}, errors.Join(err, parse))
	})
	// The octets come from a random generator with a fixed seed, so the client can verify them.
	mux.HandleFunc("GET /octets", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.FormValue("n"), 10, 64)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		_, _ = io.CopyN(w, newOctets(), n) // an error means that the client closed the connection
	})
	mux.HandleFunc("GET /pings", func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		reply(w, s.pings, nil)
	})
	mux.HandleFunc("GET /probe", func(w http.ResponseWriter, r *http.Request) {
		request, err := parse(r.URL.Query())
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		a, err := Do(r.Context(), request)
		reply(w, a, err)
	})
	mux.HandleFunc("GET /connect", relay)
	mux.HandleFunc("GET /fetch", func(w http.ResponseWriter, r *http.Request) {
		t, err := fetch(r.Context(), r.FormValue("url"))
		reply(w, t, err)
	})
	mux.HandleFunc("GET /get", func(w http.ResponseWriter, r *http.Request) {
		req, err := http.NewRequestWithContext(r.Context(), http.MethodGet, r.FormValue("url"), http.NoBody)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		req.Close = true // a new connection each time, for which the Service may choose another endpoint
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer resp.Body.Close()
		w.WriteHeader(resp.StatusCode)
		_, _ = io.Copy(w, resp.Body) // the client detects missing data
	})
	mux.HandleFunc("POST /flow", func(w http.ResponseWriter, r *http.Request) {
		to, err := netip.ParseAddrPort(r.FormValue("to"))
		size, sizeErr := strconv.Atoi(cmp.Or(r.FormValue("size"), "64"))
		if err := errors.Join(err, sizeErr); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.flow != nil {
			s.flow.Stop()
		}
		s.flow = NewFlow(to, size)
	})
	mux.HandleFunc("GET /flow", func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.flow == nil {
			http.Error(w, "no flow", http.StatusNotFound)
			return
		}
		reply(w, s.flow.Report(), nil)
	})
	mux.HandleFunc("POST /load", func(w http.ResponseWriter, r *http.Request) {
		port, err := strconv.ParseUint(r.FormValue("port"), 10, 16)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.load != nil {
			s.load.Stop()
		}
		s.load = NewLoad(r.FormValue("name"), uint16(port), r.FormValue("ports") == "kernel")
	})
	mux.HandleFunc("GET /load", func(w http.ResponseWriter, r *http.Request) {
		since, err := time.Parse(time.RFC3339Nano, r.FormValue("since"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.load == nil {
			http.Error(w, "no load", http.StatusNotFound)
			return
		}
		reply(w, s.load.Since(since), nil)
	})
	mux.HandleFunc("GET /stream", stream)
	return mux
}

func reply(w http.ResponseWriter, v any, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // an error means that the client closed the connection
}

// Query returns the request in the form of parameters for /probe.
func (r Request) Query() string {
	return url.Values{"protocol": {r.Protocol}, "to": {r.To.String()}, "port": {strconv.Itoa(int(r.Port))}, "size": {strconv.Itoa(r.Size)}}.Encode()
}

func parse(v url.Values) (r Request, err error) {
	r.Protocol = v.Get("protocol")
	to, err := netip.ParseAddr(v.Get("to"))
	if err != nil {
		return r, err
	}
	port, err := strconv.ParseUint(v.Get("port"), 10, 16)
	if err != nil {
		return r, err
	}
	r.To, r.Port = to, uint16(port)
	r.Size, err = strconv.Atoi(v.Get("size"))
	return r, err
}

// A Transfer is the result of /fetch.
type Transfer struct {
	Octets  int64   `json:"octets"`
	Seconds float64 `json:"seconds"`
	SHA256  string  `json:"sha256"`
}

func fetch(ctx context.Context, url string) (t Transfer, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return t, err
	}
	start := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return t, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return t, fmt.Errorf("%s: %s", url, resp.Status)
	}
	h := sha256.New()
	t.Octets, err = io.Copy(h, resp.Body)
	t.Seconds, t.SHA256 = time.Since(start).Seconds(), hex.EncodeToString(h.Sum(nil))
	return t, err
}

// SHA256 is the hash of the first n octets of /octets.
func SHA256(n int64) (string, error) {
	h := sha256.New()
	_, err := io.CopyN(h, newOctets(), n)
	return hex.EncodeToString(h.Sum(nil)), err
}

func newOctets() io.Reader { return rand.NewChaCha8([32]byte{1}) }
