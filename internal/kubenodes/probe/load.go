package probe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	loadInterval = 5 * time.Millisecond // between two requests of a Load
	loadPatience = time.Second          // timeout for the name, the connection and the response together
)

// The range of source ports of a Load. At 200 requests a second, a Load uses each port once in four
// minutes. If it used a port again within two minutes, connection tracking could send the new
// connection to the endpoint of an earlier, unanswered connection from that port.
const (
	firstPort = 10_000
	lastPort  = 60_999
)

// A Load is a client of a Service. 200 times a second it resolves the name, connects, and
// requests the name of the server.
type Load struct {
	end  context.CancelFunc
	done sync.WaitGroup

	name string // host name of the Service
	port uint16
	next uint16 // source port; 0: the kernel chooses

	mu      sync.Mutex
	seconds []LoadSecond // in order
}

// A LoadSecond summarizes the completed requests that a Load started within one second.
type LoadSecond struct {
	Begin    time.Time      `json:"begin"`
	Answered map[string]int `json:"answered,omitempty"` // number of answers by server name
	Failed   []LoadFailure  `json:"failed,omitempty"`
}

// A LoadFailure is one request without an answer.
type LoadFailure struct {
	Begin time.Time     `json:"begin"`
	Took  time.Duration `json:"took"`
	Error string        `json:"error"`
}

// NewLoad starts to send requests to the Servers of a Service. If kernelPorts is set, the kernel
// chooses the source ports, as for most clients, and may use a port again after a minute.
func NewLoad(name string, port uint16, kernelPorts bool) *Load {
	ctx, end := context.WithCancel(context.Background())
	l := &Load{end: end, name: name, port: port, next: firstPort}
	if kernelPorts {
		l.next = 0
	}
	l.done.Go(func() { l.run(ctx) })
	return l
}

// Stop stops the Load.
func (l *Load) Stop() {
	l.end()
	l.done.Wait()
}

// Since returns the seconds that started at begin or later, and the second that contains begin.
func (l *Load) Since(begin time.Time) (all []LoadSecond) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.seconds {
		if s.Begin.Before(begin.Truncate(time.Second)) {
			continue
		}
		answered := make(map[string]int, len(s.Answered))
		for server, n := range s.Answered {
			answered[server] = n
		}
		all = append(all, LoadSecond{s.Begin, answered, s.Failed[:len(s.Failed):len(s.Failed)]})
	}
	return all
}

func (l *Load) run(ctx context.Context) {
	tick := time.NewTicker(loadInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			port := l.next
			if port != 0 {
				if l.next++; l.next > lastPort {
					l.next = firstPort
				}
			}
			l.done.Go(func() { l.send(ctx, port) })
		}
	}
}

func (l *Load) send(ctx context.Context, from uint16) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, loadPatience)
	defer cancel()
	server, err := l.request(ctx, from)
	if errors.Is(err, syscall.EADDRINUSE) || errors.Is(ctx.Err(), context.Canceled) {
		return // no request was sent, or the Load was stopped
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	second := begin.Truncate(time.Second)
	i, found := slices.BinarySearchFunc(l.seconds, second, func(s LoadSecond, t time.Time) int { return s.Begin.Compare(t) })
	if !found { // a later second may already have an entry, because requests may end out of order
		l.seconds = slices.Insert(l.seconds, i, LoadSecond{Begin: second, Answered: make(map[string]int)})
	}
	if err != nil {
		l.seconds[i].Failed = append(l.seconds[i].Failed, LoadFailure{begin, time.Since(begin), err.Error()})
		return
	}
	l.seconds[i].Answered[server]++
}

func (l *Load) request(ctx context.Context, from uint16) (server string, err error) {
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", l.name)
	if err != nil {
		return "", fmt.Errorf("name: %w", plain(err))
	}
	d := net.Dialer{LocalAddr: &net.TCPAddr{Port: int(from)}}
	c, err := d.DialContext(ctx, "tcp4", netip.AddrPortFrom(addrs[0].Unmap(), l.port).String())
	if err != nil {
		return "", fmt.Errorf("connection: %w", plain(err))
	}
	defer c.Close()
	if end, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(end); err != nil {
			return "", err
		}
	}
	// The server closes the connection of an HTTP/1.0 client first, so the server's socket enters
	// TIME_WAIT, and the client can use its port again.
	if _, err := io.WriteString(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return "", fmt.Errorf("request: %w", plain(err))
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return "", fmt.Errorf("answer: %w", plain(err))
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", fmt.Errorf("answer: %w", plain(err))
	}
	server, ok := strings.CutPrefix(strings.TrimSpace(string(text)), greeting)
	if !ok {
		return "", fmt.Errorf("answer: %s: %q", resp.Status, text)
	}
	return server, nil
}

// plain removes the addresses from a network error, so that equal errors can be counted.
func plain(err error) error {
	if op := new(net.OpError); errors.As(err, &op) {
		return op.Err
	}
	return err
}
