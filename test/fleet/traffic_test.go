package fleet

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
)

const (
	pingInterval   = 50 * time.Millisecond
	pingWait       = 3 * time.Second // a ping without an answer in this time counts as lost
	streamInterval = 20 * time.Millisecond
	streamChunk    = 16 << 10 // octets each streamInterval: 6.5 Mbit/s
)

// A traffic sends a ping twenty times a second, and data on a TCP connection whose other side
// echoes it. Both run between the same two pods during a fault.
type traffic struct {
	name   string
	stop   context.CancelFunc
	giveUp context.CancelFunc // cancels pings that are still waiting
	done   sync.WaitGroup
	stream net.Conn
	chunk  int // octets each streamInterval

	mu    sync.Mutex
	pings []echo

	sent, returned int64
	stall          time.Duration // longest time without an echoed octet
	out, back      hash.Hash
	err            error
}

// An echo is one echo request with its result.
type echo struct {
	at  time.Time
	err error
}

// talk starts a traffic from one pod to another. addr is the destination's address in the first
// pod's cluster.
func talk(t *testing.T, from, to *lab.Pod, addr netip.Addr) *traffic {
	t.Helper()
	r, ctx, pings := stream(t, from, to, addr, streamChunk)
	r.done.Go(func() { r.ping(pings, ctx, from.Host, addr) })
	return r
}

// stream starts only the TCP connection of a traffic, with chunk octets each streamInterval. ctx
// and pings are the contexts for the method ping.
func stream(t *testing.T, from, to *lab.Pod, at netip.Addr, chunk int) (r *traffic, ctx, pings context.Context) {
	t.Helper()
	listener, err := to.Listen("tcp4", to.Addr.String()+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	port := uint16(listener.Addr().(*net.TCPAddr).Port)
	accepted := make(chan net.Conn, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			close(accepted)
			return
		}
		accepted <- conn
	}()
	dialing, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := from.Dial(dialing, "tcp4", netip.AddrPortFrom(at, port).String())
	if err != nil {
		t.Fatalf("%s -> %s: %v", from, to, err)
	}
	far, ok := <-accepted
	if !ok {
		t.Fatalf("%s did not accept", to)
	}
	ctx, stop := context.WithCancel(t.Context())
	pings, giveUp := context.WithCancel(t.Context())
	r = &traffic{name: fmt.Sprintf("%s -> %s", from, to), stop: stop, giveUp: giveUp, stream: conn, chunk: chunk, out: sha256.New(), back: sha256.New()}
	t.Cleanup(func() { stop(); giveUp(); conn.Close(); far.Close() })
	r.done.Go(func() {
		defer far.Close()
		_, _ = io.Copy(far, far) // the sending side detects missing data
	})
	r.done.Go(func() { r.send(ctx) })
	r.done.Go(r.receive)
	return r, ctx, pings
}

func (r *traffic) send(ctx context.Context) {
	var seed [32]byte
	source := rand.NewChaCha8(seed)
	chunk := make([]byte, r.chunk)
	tick := time.NewTicker(streamInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			_ = r.stream.(*net.TCPConn).CloseWrite()
			return
		case <-tick.C:
		}
		_, _ = source.Read(chunk) // the random source never fails
		n, err := r.stream.Write(chunk)
		r.out.Write(chunk[:n])
		r.sent += int64(n)
		if err != nil {
			r.mu.Lock()
			r.err = fmt.Errorf("send: %w", err)
			r.mu.Unlock()
			return
		}
	}
}

func (r *traffic) receive() {
	buf := make([]byte, 256<<10)
	last := time.Now()
	for {
		n, err := r.stream.Read(buf)
		r.stall = max(r.stall, time.Since(last))
		last = time.Now()
		r.back.Write(buf[:n])
		r.returned += int64(n)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			r.mu.Lock()
			r.err = fmt.Errorf("receive: %w", err)
			r.mu.Unlock()
			return
		}
	}
}

// ping sends pings until ctx ends. Pings without an answer at that time may be answered until pings
// ends.
func (r *traffic) ping(pings, ctx context.Context, from *lab.Host, to netip.Addr) {
	var group sync.WaitGroup
	defer group.Wait()
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		group.Go(func() {
			at := time.Now()
			_, err := from.PingWith(pings, to, lab.PingOptions{Wait: patience})
			r.mu.Lock()
			defer r.mu.Unlock()
			r.pings = append(r.pings, echo{at, err})
		})
	}
}

// An outcome is the result of a traffic.
type outcome struct {
	pings, lost int
	outage      time.Duration // from the first lost ping to the last one
	octets      int64         // octets sent, and echoed completely
	stall       time.Duration
}

func (o outcome) String() string {
	return fmt.Sprintf("%d of %d pings lost (%.1f s from the first to the last of them), TCP: %.1f MB there and back, longest stall %.2f s",
		o.lost, o.pings, o.outage.Seconds(), float64(o.octets)/1e6, o.stall.Seconds())
}

// end ends the traffic. It fails the test unless TCP has delivered every octet in both
// directions.
func (r *traffic) end(t *testing.T) outcome {
	t.Helper()
	return r.endAfter(t, pingWait)
}

// endAfter is end with a different timeout for the last answers.
func (r *traffic) endAfter(t *testing.T, wait time.Duration) outcome {
	t.Helper()
	r.stop()
	defer time.AfterFunc(wait, r.giveUp).Stop()
	_ = r.stream.SetDeadline(time.Now().Add(patience))
	r.done.Wait()
	r.stream.Close()
	if r.err != nil {
		t.Errorf("%s: TCP after %d octets: %v", r.name, r.sent, r.err)
	} else if r.sent == 0 || r.returned != r.sent || [32]byte(r.back.Sum(nil)) != [32]byte(r.out.Sum(nil)) {
		t.Errorf("%s: TCP: %d octets sent, %d returned, or others", r.name, r.sent, r.returned)
	}
	o := outcome{pings: len(r.pings), octets: r.sent, stall: r.stall}
	var first, last time.Time
	for _, p := range r.pings {
		if p.err == nil {
			continue
		}
		if o.lost++; o.lost == 1 || p.at.Before(first) {
			first = p.at
		}
		if p.at.After(last) {
			last = p.at
		}
	}
	o.outage = last.Sub(first)
	t.Logf("%s: %v", r.name, o)
	return o
}

// endWithoutLoss is end for faults that must not affect traffic. Answers may be late, because the
// machine is busy.
func (r *traffic) endWithoutLoss(t *testing.T) {
	t.Helper()
	if o := r.endAfter(t, patience); o.lost > 0 {
		t.Errorf("%s: %d of %d pings lost within %v; want none", r.name, o.lost, o.pings, o.outage)
	}
}
