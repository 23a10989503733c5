package httpserve

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// serve runs a server on a free port of all loopback addresses. It answers "ok", and blocks
// requests for /slow until the test ends.
func serve(t *testing.T) (port string) {
	t.Helper()
	s, release := New(slog.New(slog.DiscardHandler)), make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	mux.HandleFunc("/slow", func(w http.ResponseWriter, _ *http.Request) { <-release; fmt.Fprint(w, "ok") })
	addr, err := s.Listen("test", "0.0.0.0:0", mux)
	if err != nil {
		t.Fatal(err)
	}
	s.Serve()
	t.Cleanup(s.Close)
	t.Cleanup(func() { close(release) })
	_, port, err = net.SplitHostPort(addr.String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// client is a connection from one of the loopback addresses to the server.
type client struct {
	net.Conn
	t *testing.T
	r *bufio.Reader
}

func dial(t *testing.T, from, port string) *client {
	t.Helper()
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp4", "127.0.0.1:"+port)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return &client{c, t, bufio.NewReader(c)}
}

func (c *client) send(text string) {
	if _, err := io.WriteString(c, text); err != nil {
		c.t.Log(err) // the server may have closed the connection
	}
}

// answer returns the status line of the response, or the error.
func (c *client) answer() string {
	res, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return err.Error()
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return err.Error()
	}
	return res.Status
}

const get = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"

func TestIdleConnectionsDoNotBlockOtherClients(t *testing.T) {
	for name, hold := range map[string]string{"nothing is sent": "", "the first octet": "G", "half a header": "GET / HTTP/1.1\r\nHost: x\r\nA: ", "idle after an answer": get} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			port := serve(t)
			scraper := dial(t, "127.0.0.2", port)
			scraper.send(get)
			if got := scraper.answer(); got != "200 OK" {
				t.Fatal(got)
			}
			working := dial(t, "127.0.0.3", port)
			working.send("GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
			var held []*client
			for i := range 2 * maxConnections {
				c := dial(t, fmt.Sprintf("127.0.1.%d", i%16), port) // from sixteen addresses
				c.send(hold)
				if hold == get {
					c.answer()
				}
				held = append(held, c)
			}
			// The server must accept a new connection, and keep a connection that was idle before
			// the other connections were opened.
			fresh := dial(t, "127.0.0.4", port)
			fresh.send(get)
			if got := fresh.answer(); got != "200 OK" {
				t.Errorf("a new client gets %q", got)
			}
			scraper.send(get)
			if got := scraper.answer(); got != "200 OK" {
				t.Errorf("a client with one connection lost it: %q", got)
			}
			if got := held[0].answer(); !strings.Contains(got, "EOF") && !strings.Contains(got, "reset") {
				t.Errorf("the oldest of many is open: %q", got)
			}
		})
	}
}

func TestSlowAndOversizedRequestsAreRejected(t *testing.T) {
	port := serve(t)
	slow := dial(t, "127.0.0.2", port)
	slow.send("GET / HTTP/1.1\r\nHost: x\r\n")
	long := dial(t, "127.0.0.3", port)
	long.send("GET / HTTP/1.1\r\nHost: x\r\nA: " + strings.Repeat("a", 64<<10) + "\r\n\r\n")
	if got := long.answer(); !strings.HasPrefix(got, "431 ") && !strings.Contains(got, "reset") {
		t.Errorf("64 KiB of header: %q", got)
	}
	if got := slow.answer(); !strings.Contains(got, "EOF") { // the header timeout is five seconds
		t.Errorf("half a header: %q", got)
	}
}
