package demo

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// A narrator prints the progress of a demo for the reader.
type narrator struct {
	Options
	ctx   context.Context
	steps int // number of steps so far
}

// A step of the demo has a title and a function that verifies the step's result.
type step struct {
	title string
	do    func() error
}

// play runs the steps in order until one fails.
func (n *narrator) play(steps []step) error {
	for _, step := range steps {
		n.steps++
		n.heading(fmt.Sprintf("%d. %s", n.steps, step.title))
		if err := step.do(); err != nil {
			if n.ctx.Err() != nil {
				return ErrInterrupted
			}
			return fmt.Errorf("step %d, %q: %w", n.steps, step.title, err)
		}
	}
	return nil
}

func (n *narrator) heading(text string) {
	if n.Color {
		text = "\x1b[1m" + text + "\x1b[0m"
	}
	fmt.Fprintf(n.Out, "\n%s\n", text)
}

func (n *narrator) printf(format string, args ...any) { fmt.Fprintf(n.Out, format+"\n", args...) }

func (n *narrator) ok(format string, args ...any) {
	mark := "ok"
	if n.Color {
		mark = "\x1b[32mok\x1b[0m"
	}
	fmt.Fprintf(n.Out, "  "+mark+" "+format+"\n", args...)
}

func since(t time.Time) time.Duration { return time.Since(t).Round(10 * time.Millisecond) }

// indent returns a writer that indents each line by two blanks.
func indent(w io.Writer) io.Writer { return &indenter{w: w} }

type indenter struct {
	w      io.Writer
	inLine bool
}

func (i *indenter) Write(p []byte) (int, error) {
	var out []byte
	for _, b := range p {
		if !i.inLine && b != '\n' {
			out = append(out, "  "...)
		}
		out = append(out, b)
		i.inLine = b != '\n'
	}
	if _, err := i.w.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}

// talk pings the address dst and fetches a page from it. It verifies that the page comes from
// server, and that the client's address is src as server sees it.
func (n *narrator) talk(from, server *lab.Host, dst, src netip.Addr) error {
	rtt, err := from.Ping(n.ctx, dst)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(n.ctx, time.Minute)
	defer cancel()
	got, err := from.Get(ctx, fmt.Sprintf("http://%v/", dst))
	if err != nil {
		return err
	}
	got = strings.TrimSpace(got)
	if want := fmt.Sprintf("%s sees %v", server, src); got != want {
		return fmt.Errorf("http://%v from %s: %q; want %q", dst, from, got, want)
	}
	n.ok("%-7s -> %-8s at %-12v ping %5.2f ms   HTTP: %q", from, server, dst, float64(rtt.Microseconds())/1000, got)
	return nil
}

// pingEvery is the interval of pings. A ping that gets no answer within pingWait is lost.
const (
	pingEvery = 50 * time.Millisecond
	pingWait  = 200 * time.Millisecond
)

// pings sends consecutive pings from one host to an address and records the results.
type pings struct {
	cancel context.CancelFunc
	ended  sync.WaitGroup

	mu       sync.Mutex
	sent     int
	answered int
	inRow    int // number of answered pings since the last loss
	last     time.Time
	pause    time.Duration // longest time between two answers
}

// count starts to send pings. On a terminal, the reader sees the count.
func (n *narrator) count(ctx context.Context, from *lab.Pod, to netip.Addr) *pings {
	p := &pings{last: time.Now()}
	ctx, p.cancel = context.WithCancel(ctx)
	p.ended.Go(func() {
		tick := time.NewTicker(pingEvery)
		defer tick.Stop()
		for ctx.Err() == nil {
			_, err := from.PingWith(ctx, to, lab.PingOptions{Wait: pingWait})
			if ctx.Err() != nil {
				break
			}
			p.note(err == nil)
			if n.Color {
				p.mu.Lock()
				fmt.Fprintf(n.Out, "\r  %d sent, %d answered, last answer %4.1f s ago ", p.sent, p.answered, time.Since(p.last).Seconds())
				p.mu.Unlock()
			}
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
		if n.Color {
			fmt.Fprint(n.Out, "\r\x1b[K")
		}
	})
	return p
}

func (p *pings) note(answered bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent++
	if !answered {
		p.inRow = 0
		return
	}
	p.answered++
	p.inRow++
	now := time.Now()
	p.pause = max(p.pause, now.Sub(p.last))
	p.last = now
}

// waitUntil waits until cond returns true. It calls cond with p.mu held.
func (p *pings) waitUntil(ctx context.Context, cond func() bool) error {
	for {
		p.mu.Lock()
		done, sent, answered := cond(), p.sent, p.answered
		p.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d pings sent, %d answered: %w", sent, answered, ctx.Err())
		case <-time.After(pingEvery):
		}
	}
}

// stop stops the pings. It returns the numbers of sent and lost pings, and the longest pause.
func (p *pings) stop() (sent, lost int, pause time.Duration) {
	p.cancel()
	p.ended.Wait()
	return p.sent, p.sent - p.answered, p.pause
}
