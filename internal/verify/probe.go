package verify

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/icmp"

	"github.com/isthmus-net/isthmus/internal/ping"
)

const (
	// maxSize is the maximum payload in octets. maxRequests is the maximum number of requests
	// that a Pod accepts at once.
	maxSize, maxRequests = 16 << 20, 1000
	// maxSenders is the number of requests that a Pod handles concurrently.
	maxSenders = 8
	// attempt is how long an attempt may take without receiving an octet. attempts is the number of
	// attempts. A transfer that makes progress may take longer, up to maxTransferTime.
	attempt, attempts = 3 * time.Second, 3
	maxTransferTime   = 20 * time.Second
	// largeSize is the size in octets from which a transfer may be slow on a busy machine.
	largeSize = 64 << 10
	// maxConnections is the number of clients that an echo serves concurrently.
	maxConnections = 64
)

// A Request makes one Pod send packets.
type Request struct {
	Protocol string `json:"protocol"`
	Host     string `json:"host"`           // address, or name that the sender resolves
	Port     uint16 `json:"port,omitempty"` // not set for ICMP
	Size     int    `json:"size"`
	Once     bool   `json:"once,omitempty"` // do not resend lost packets
}

// An Answer is the result of a Request.
type Answer struct {
	Error   string     `json:"error,omitempty"`
	Unable  string     `json:"unable,omitempty"` // reason why the Pod could not send
	Seconds float64    `json:"seconds"`          // duration of the attempt that was answered
	Tries   int        `json:"tries"`            // number of attempts
	SeenAs  netip.Addr `json:"seenAs,omitzero"`  // source address that the receiver saw; not set for ICMP
}

// Serve echoes TCP and UDP at the port echo, unless echo is 0. It accepts requests at the port
// control of the loopback address. It returns when ctx ends, when a request asks it to end, or when
// no request has come for the duration idle. If idle is 0, Serve never ends for lack of requests.
func Serve(ctx context.Context, echo, control uint16, idle time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	alive := afterIdle(idle, cancel)
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(control))))
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("POST /run", run)
	mux.HandleFunc("POST /end", func(http.ResponseWriter, *http.Request) { cancel() })
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		alive()
		mux.ServeHTTP(w, r)
	})
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	closers := []io.Closer{server}
	errs := make(chan error, 3)
	go func() { errs <- server.Serve(listener) }()
	if echo != 0 {
		addr := ":" + strconv.Itoa(int(echo))
		tcp, err := config.Listen(ctx, "tcp", addr)
		if err != nil {
			return errors.Join(err, server.Close())
		}
		udp, err := config.ListenPacket(ctx, "udp", addr)
		if err != nil {
			return errors.Join(err, server.Close(), tcp.Close())
		}
		closers = append(closers, tcp, udp)
		go func() { errs <- echoTCP(tcp) }()
		go func() { errs <- echoUDP(udp) }()
	}
	select {
	case <-ctx.Done():
		err = nil
	case err = <-errs:
	}
	for _, c := range closers {
		_ = c.Close() // closing ends the goroutine that reads
	}
	return err
}

// afterIdle calls end once the function that it returns has not been called for the duration idle.
// If idle is 0, it never calls end.
func afterIdle(idle time.Duration, end func()) (alive func()) {
	if idle <= 0 {
		return func() {}
	}
	timer := time.AfterFunc(idle, end)
	return func() { timer.Reset(idle) }
}

// A TCP question is a length in four octets, followed by that number of octets. Its answer has
// two parts of this form: an Answer in JSON, and the octets of the question.
func echoTCP(l net.Listener) error {
	slots := make(chan struct{}, maxConnections)
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			defer c.Close()
			_ = answerTCP(c) // ignore the error: the client tries again
		}()
	}
}

func answerTCP(c net.Conn) error {
	t := &transfer{Conn: c, end: time.Now().Add(maxTransferTime)} // by then, the client no longer waits
	payload, err := readPiece(t)
	if err != nil {
		return err
	}
	return errors.Join(writePiece(t, seenBy(c.RemoteAddr())), writePiece(t, payload))
}

// A transfer is a connection with two time limits. Each read and write must make progress within
// the duration attempt, and the whole transfer must finish by the time end.
type transfer struct {
	net.Conn
	end      time.Time
	received int // number of octets read
}

func (t *transfer) Read(b []byte) (n int, err error) {
	n, err = t.step(b, t.Conn.Read)
	t.received += n
	return n, err
}

func (t *transfer) Write(b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var moved int
		moved, err = t.step(b[n:min(len(b), n+16<<10)], t.Conn.Write)
		n += moved
	}
	return n, err
}

func (t *transfer) step(b []byte, do func([]byte) (int, error)) (n int, err error) {
	until := time.Now().Add(attempt)
	if until.After(t.end) {
		until = t.end
	}
	if err := t.SetDeadline(until); err != nil {
		return 0, err
	}
	return do(b)
}

func readPiece(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxSize {
		return nil, fmt.Errorf("%d octets are too many", n)
	}
	var b bytes.Buffer // grows with the received octets, because the announced length may be forged
	if _, err := io.CopyN(&b, r, int64(n)); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func writePiece(w io.Writer, b []byte) error {
	_, err := w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...))
	return err
}

// seenBy returns the Answer with the client's address.
func seenBy(from net.Addr) []byte {
	addr, _ := netip.ParseAddrPort(from.String())
	text, _ := json.Marshal(Answer{SeenAs: addr.Addr().Unmap()}) // cannot fail: addresses can be marshalled
	return text
}

// A UDP answer is as long as its question and begins with the same 16 octets, except for one bit.
// An Answer follows these octets, as far as it fits.
const cookie = 16

// question is a bit of the first octet that is set only in questions. An echo answers only
// questions, so two echoes cannot be made to answer each other for ever.
const question = 0x80

// answerRoom is the maximum size of an echo's Answer in JSON, with a SeenAs of 39 octets.
const answerRoom = 80

// echoUDP answers questions, except questions that seem to come from another echo.
func echoUDP(c net.PacketConn) error {
	own := portOf(c.LocalAddr())
	b := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return err
		}
		if n > cookie && b[0]&question != 0 && portOf(from) != own {
			b[0] &^= question
			clear(b[cookie:n])
			copy(b[cookie:n], seenBy(from))
			_, _ = c.WriteTo(b[:n], from) // ignore the error: the client tries again
		}
	}
}

func portOf(a net.Addr) uint16 {
	addr, _ := netip.ParseAddrPort(a.String())
	return addr.Port()
}

// run performs the Requests in the body of r, and responds with the Answers.
func run(w http.ResponseWriter, r *http.Request) {
	var requests []Request
	if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&requests); err != nil || len(requests) > maxRequests {
		http.Error(w, fmt.Sprintf("want at most %d requests in JSON: %v", maxRequests, err), http.StatusBadRequest)
		return
	}
	answers := make([]Answer, len(requests))
	var group sync.WaitGroup
	slots := make(chan struct{}, maxSenders)
	for i := range requests {
		slots <- struct{}{}
		group.Go(func() {
			answers[i] = Do(r.Context(), requests[i])
			<-slots
		})
	}
	group.Wait()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answers) // fails only if the client has closed the connection
}

// Do performs a request. It sends until an answer arrives, at most attempts times.
func Do(ctx context.Context, r Request) (a Answer) {
	send := map[string]func(context.Context, netip.AddrPort, int) (netip.Addr, error){TCP: overTCP, UDP: overUDP, ICMP: echo, Connect: dial}[r.Protocol]
	if send == nil || r.Size < 0 || r.Size > maxSize {
		return Answer{Error: fmt.Sprintf("protocol %q, %d octets: want %s, %s or %s, and at most %d octets", r.Protocol, r.Size, TCP, UDP, ICMP, maxSize)}
	}
	for a.Tries = 1; ; a.Tries++ {
		one, cancel := context.WithTimeout(ctx, attempt)
		to, err := r.resolve(one)
		start := time.Now()
		var from netip.Addr
		if err == nil {
			from, err = send(one, to, r.Size)
		}
		cancel()
		if err == nil {
			a.SeenAs, a.Seconds = from, time.Since(start).Seconds()
			return a
		}
		if errors.Is(err, errUnable) {
			a.Unable = err.Error()
			return a
		}
		if r.Once || a.Tries == attempts || ctx.Err() != nil {
			a.Error = err.Error()
			var slow slowError
			if !errors.As(err, &slow) && (errors.Is(err, context.DeadlineExceeded) || isTimeout(err)) {
				a.Error = fmt.Sprintf("no answer within %v", attempt)
			}
			return a
		}
	}
}

func (r Request) resolve(ctx context.Context) (to netip.AddrPort, err error) {
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", r.Host)
	if err != nil {
		return to, err
	}
	return netip.AddrPortFrom(addrs[0].Unmap(), r.Port), nil
}

// dial opens a connection and closes it.
func dial(ctx context.Context, to netip.AddrPort, _ int) (netip.Addr, error) {
	c, err := connect(ctx, "tcp", to)
	if err == nil {
		err = c.Close()
	}
	return netip.Addr{}, err
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func payload(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return b
}

// connect dials, and sets the deadline of ctx on the connection.
func connect(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, to.String())
	if err != nil {
		return nil, err
	}
	if end, ok := ctx.Deadline(); ok {
		err = c.SetDeadline(end)
	}
	return c, err
}

// A slowError reports a transfer that made progress but did not finish in time.
type slowError struct{ received, total int }

func (e slowError) Error() string {
	return fmt.Sprintf("too slow: about %d of %d octets came back; want further octets within %v, and all within %v", e.received, e.total, attempt, maxTransferTime)
}

func overTCP(ctx context.Context, to netip.AddrPort, size int) (from netip.Addr, err error) {
	conn, err := connect(ctx, "tcp", to)
	if err != nil {
		return from, err
	}
	defer conn.Close()
	return exchange(conn, size)
}

// exchange sends size octets and reads them back. It sets its own deadlines; see transfer.
func exchange(conn net.Conn, size int) (from netip.Addr, err error) {
	c := &transfer{Conn: conn, end: time.Now().Add(maxTransferTime)}
	defer func() {
		if c.received > 0 && isTimeout(err) {
			err = slowError{c.received, size}
		}
	}()
	sent := payload(size)
	if err := writePiece(c, sent); err != nil {
		return from, err
	}
	text, err := readPiece(c)
	if err != nil {
		return from, err
	}
	var seen Answer
	if err := json.Unmarshal(text, &seen); err != nil {
		return from, err
	}
	came, err := readPiece(c)
	if err == nil && !bytes.Equal(came, sent) {
		err = errors.New("the answer differs from the packet that was sent")
	}
	return seen.SeenAs, err
}

// overUDP performs a UDP request. Its connected socket ignores datagrams from other addresses.
func overUDP(ctx context.Context, to netip.AddrPort, size int) (from netip.Addr, err error) {
	c, err := connect(ctx, "udp", to)
	if err != nil {
		return from, err
	}
	defer c.Close()
	sent := payload(max(size, minSize[UDP]))
	sent[0] |= question
	if _, err := c.Write(sent); err != nil {
		return from, err
	}
	want := bytes.Clone(sent[:cookie])
	want[0] &^= question
	b := make([]byte, 64<<10)
	for {
		n, err := c.Read(b)
		if err != nil {
			return from, err
		}
		if n != len(sent) || !bytes.Equal(b[:cookie], want) {
			continue // answers an earlier attempt
		}
		var seen Answer
		if err := json.Unmarshal(bytes.TrimRight(b[cookie:n], "\x00"), &seen); err != nil {
			return from, err
		}
		return seen.SeenAs, nil
	}
}

// errUnable is returned if the Pod was not permitted to send.
var errUnable = errors.New("it may not send them: it has no CAP_NET_RAW, and its group is not in net.ipv4.ping_group_range, which the securityContext.sysctls of a Pod can set")

func echo(ctx context.Context, to netip.AddrPort, size int) (from netip.Addr, err error) {
	addr := to.Addr()
	network, all := ping.Raw(addr)
	c, err := icmp.ListenPacket(network, all)
	// If net.ipv4.ping_group_range permits it, a ping needs no raw socket.
	if errors.Is(err, os.ErrPermission) {
		c, err = icmp.ListenPacket(map[bool]string{false: "udp4", true: "udp6"}[addr.Is6()], all)
	}
	if errors.Is(err, os.ErrPermission) {
		return from, fmt.Errorf("%w: %w", errUnable, err)
	}
	if err != nil {
		return from, err
	}
	defer func() { _ = c.Close() }() // fails only if it is already closed
	_, _, err = ping.Echo(ctx, c, addr, max(size, minSize[ICMP]))
	// from is not valid, because the answer to a ping does not contain the source address that the
	// receiver saw.
	return from, err
}
