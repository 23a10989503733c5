package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway"
)

const (
	listenPort     = 5871
	metricsAddress = "127.0.0.1:5872"
)

// A command is a line of input for the gateway process.
type command struct {
	Peers   int    // number of peers to configure
	Moved   int    // number of peers, from the first, that use their second port
	Profile string // if not empty, write a CPU profile to this file instead
	Seconds int
}

// appliedLine is the line that the gateway process prints when it has applied a configuration.
const appliedLine = "in force"

// printing is a log handler that prints a line for each applied configuration, and errors.
type printing struct{ slog.Handler }

func (h printing) Handle(ctx context.Context, r slog.Record) error {
	switch {
	case r.Message == "configuration in force":
		fmt.Println(appliedLine)
	case r.Level >= slog.LevelError:
		return h.Handler.Handle(ctx, r)
	}
	return nil
}

func (h printing) WithAttrs(a []slog.Attr) slog.Handler { return printing{h.Handler.WithAttrs(a)} }

// beGateway is the gateway process. It runs the real gateway, but reads its configuration from
// standard input instead of API objects. As in a cluster, something reads its status once a second.
func beGateway() error {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2)) // as cmd/isthmus does
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var key gateway.Key
	copy(key[:], keyOf(-1).Bytes())
	source := func(ctx context.Context, deliver func(gateway.Config, error)) {
		lines := bufio.NewScanner(os.Stdin)
		var decider fabric.GatewayDecider
		peers := make([]fabric.Peer, 0, maxPeers)
		for ctx.Err() == nil && lines.Scan() {
			var c command
			if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
				deliver(gateway.Config{}, err)
				continue
			}
			if c.Profile != "" {
				go profile(c)
				continue
			}
			peers = peers[:0]
			for i := range c.Peers {
				peers = append(peers, known[i][min(1, max(0, c.Moved-i))])
			}
			gw, problems := decider.GatewayFor(fabric.Intent{ClusterID: "11111111-0000-4000-8000-000000000000", ClusterName: "home", Peers: peers})
			deliver(gateway.Config{Gateway: gw, Refused: problems, PrivateKey: key, ListenPort: listenPort, MetricsAddress: metricsAddress}, nil)
		}
		<-ctx.Done()
	}
	for i := range known {
		known[i] = [2]fabric.Peer{peerOf(i, false), peerOf(i, true)}
	}
	return gateway.Run(ctx, gateway.Options{
		Source: source,
		Log:    slog.New(printing{slog.NewTextHandler(os.Stderr, nil)}),
		Beside: func(ctx context.Context, r gateway.Running) {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for ctx.Err() == nil {
				select {
				case <-ctx.Done():
				case <-tick.C:
					_ = r.Status()
				}
			}
		},
	})
}

// known holds all peers, with their first and their second port.
var known [maxPeers][2]fabric.Peer

func profile(c command) {
	f, err := os.Create(c.Profile)
	if err == nil {
		err = pprof.StartCPUProfile(f)
	}
	if err != nil {
		slog.Error("no profile", "error", err)
		return
	}
	time.Sleep(time.Duration(c.Seconds) * time.Second)
	pprof.StopCPUProfile()
	_ = f.Close()
	heap, err := os.Create(filepath.Join(filepath.Dir(c.Profile), filepath.Base(c.Profile)+".heap"))
	if err != nil {
		slog.Error("no profile", "error", err)
		return
	}
	_ = pprof.WriteHeapProfile(heap)
	_ = heap.Close()
}

// A process is the parent's handle of the gateway process.
type process struct {
	stdin  io.WriteCloser
	forced chan struct{} // gets a value when the gateway has applied a configuration
	pid    int
	end    func()
}

// apply sends a configuration and waits until it is applied.
func (p *process) apply(ctx context.Context, c command) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if _, err := p.stdin.Write(append(b, '\n')); err != nil {
		return err
	}
	if c.Profile != "" {
		return nil
	}
	select {
	case <-p.forced:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
