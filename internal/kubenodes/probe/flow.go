package probe

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"
)

const (
	interval = 10 * time.Millisecond  // between packets of a Flow
	silence  = 100 * time.Millisecond // minimum length of a reported pause; a slow machine does not lose ten packets in a row, so a pause has another cause
)

// A Flow is traffic to a Server while a test injects faults. Every 10 ms it sends a UDP datagram,
// and the Server answers with one of the same size. On a TCP connection, the Server sends an octet
// every 10 ms. The Flow reports losses and pauses.
type Flow struct {
	end  context.CancelFunc
	done sync.WaitGroup

	mu       sync.Mutex
	sent     int
	answered int
	last     time.Time     // time of the last UDP answer
	pause    time.Duration // longest pause between two UDP answers
	pauses   []Pause       // pauses longer than silence
	tcpLast  time.Time
	tcpPause time.Duration
	broken   int // TCP connections that broke
}

// A FlowReport is the result of a Flow so far.
type FlowReport struct {
	Sent     int     `json:"sent"`     // number of UDP packets sent
	Answered int     `json:"answered"` // number of UDP packets answered
	Pause    float64 `json:"pause"`    // longest time between two UDP answers, or since the last one, in seconds
	TCPPause float64 `json:"tcpPause"` // longest time between two octets of the connection, in seconds
	Broken   int     `json:"broken"`   // number of TCP connections that broke
	Pauses   []Pause `json:"pauses"`   // UDP pauses of at least a tenth of a second
}

// A Pause is a period without UDP answers.
type Pause struct {
	Begin   time.Time `json:"begin"` // the last answer before the pause
	Seconds float64   `json:"seconds"`
}

// NewFlow starts a Flow with datagrams of size octets.
func NewFlow(to netip.AddrPort, size int) *Flow {
	ctx, end := context.WithCancel(context.Background())
	now := time.Now()
	f := &Flow{end: end, last: now, tcpLast: now}
	f.done.Go(func() { f.udp(ctx, to, size) })
	f.done.Go(func() { f.tcp(ctx, to) })
	return f
}

// Stop stops the Flow.
func (f *Flow) Stop() {
	f.end()
	f.done.Wait()
}

// Report returns the result so far.
func (f *Flow) Report() FlowReport {
	f.mu.Lock()
	defer f.mu.Unlock()
	pauses := f.pauses[:len(f.pauses):len(f.pauses)]
	if now := time.Since(f.last); now > silence {
		pauses = append(pauses, Pause{f.last, now.Seconds()})
	}
	return FlowReport{f.sent, f.answered, max(f.pause, time.Since(f.last)).Seconds(), max(f.tcpPause, time.Since(f.tcpLast)).Seconds(), f.broken, pauses}
}

func (f *Flow) udp(ctx context.Context, to netip.AddrPort, size int) {
	c, err := net.Dial("udp4", to.String())
	if err != nil {
		return // without an answer, the report shows one long pause
	}
	defer c.Close()
	f.done.Go(func() {
		b := make([]byte, 2048)
		for {
			_, err := c.Read(b)
			if ctx.Err() != nil {
				return
			}
			if err != nil { // an ICMP error: later datagrams may still be answered
				time.Sleep(time.Millisecond)
				continue
			}
			f.mu.Lock()
			f.answered++
			now := time.Now()
			pause := now.Sub(f.last)
			f.pause = max(f.pause, pause)
			if pause > silence {
				f.pauses = append(f.pauses, Pause{f.last, pause.Seconds()})
			}
			f.last = now
			f.mu.Unlock()
		}
	})
	datagram := make([]byte, size)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f.mu.Lock()
			f.sent++
			f.mu.Unlock()
			_, _ = c.Write(datagram) // a failed write counts as a packet without an answer
		}
	}
}

// tcp reads a stream of octets, and opens a new connection when one breaks.
func (f *Flow) tcp(ctx context.Context, to netip.AddrPort) {
	for ctx.Err() == nil {
		if opened := f.read(ctx, to); opened && ctx.Err() == nil {
			f.mu.Lock()
			f.broken++
			f.mu.Unlock()
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (f *Flow) read(ctx context.Context, to netip.AddrPort) (opened bool) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%v/stream", to), http.NoBody)
	if err != nil {
		return false
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	b := make([]byte, 1)
	for {
		if _, err := io.ReadFull(resp.Body, b); err != nil {
			return true
		}
		f.mu.Lock()
		now := time.Now()
		f.tcpPause = max(f.tcpPause, now.Sub(f.tcpLast))
		f.tcpLast = now
		f.mu.Unlock()
	}
}

// stream is the server's side: it sends an octet every interval.
func stream(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	w.Header().Set("Content-Type", "application/octet-stream")
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
			if _, err := io.WriteString(w, strconv.Itoa(i%10)); err != nil || control.Flush() != nil {
				return
			}
		}
	}
}
