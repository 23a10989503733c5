package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// isthmus is our gateway in a user's configuration: a process and a network namespace for each
// node, with NAT, default deny, counters and connection checks. args are added to its command
// line.
func isthmus(c crowd, args ...string) starter {
	return func(ctx context.Context, b *bench) (*running, error) { return b.isthmus(ctx, b.binary, c, args) }
}

// otherBuild parses the option that adds a second build of isthmus to the comparison: NAME=PATH,
// optionally followed by arguments for its gateway, separated by commas.
func otherBuild(text string) (peer, error) {
	name, rest, ok := strings.Cut(text, "=")
	if !ok || name == "" || rest == "" {
		return peer{}, fmt.Errorf("%q; want NAME=PATH[,ARGUMENT...]", text)
	}
	parts := strings.Split(rest, ",")
	return peer{"isthmus " + name, "", func(ctx context.Context, b *bench) (*running, error) {
		return b.isthmus(ctx, parts[0], crowd{}, parts[1:])
	}}, nil
}

// isthmusTunnels is isthmus with several tunnels between the two clusters.
func isthmusTunnels(tunnels int, args ...string) starter {
	return func(ctx context.Context, b *bench) (*running, error) {
		if err := b.setTunnels(tunnels); err != nil {
			return nil, err
		}
		r, err := b.isthmus(ctx, b.binary, crowd{}, args)
		r.cleanup = append([]func() error{func() error { return b.setTunnels(1) }}, r.cleanup...) // runs last
		if err != nil {
			return r, err
		}
		return r, b.waitTunnels(ctx, tunnels)
	}
}

// waitTunnels waits until both gateways distribute the flows over all tunnels.
func (b *bench) waitTunnels(ctx context.Context, tunnels int) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for _, n := range b.nodes {
		for {
			up, err := b.lab.Metric(ctx, n.cluster, "isthmus_peer_tunnel_up")
			if err == nil && int(up) == tunnels {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("gateway of %s has %v tunnels in use, %w; want %d", n.cluster, up, err, tunnels)
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}

// setTunnels sets the number of tunnels, which takes effect at the next Join.
func (b *bench) setTunnels(tunnels int) error {
	var errs []error
	for _, n := range b.nodes {
		n.cluster.Tunnels = tunnels
		if err := os.Remove(filepath.Join(n.cluster.ConfigDir, "gateway.yaml")); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err) // Join writes the file again
		}
	}
	return errors.Join(errs...)
}

func (b *bench) isthmus(ctx context.Context, binary string, c crowd, args []string) (*running, error) {
	a, z := b.nodes[0], b.nodes[1]
	r := &running{target: z.seenPod()}
	o := lab.JoinOptions{
		AtA: lab.View{Pod: z.seen, External: z.cluster.ExternalCIDR},
		AtB: lab.View{Pod: a.seen, External: a.cluster.ExternalCIDR},
	}
	if err := b.lab.Join(a.cluster, z.cluster, o); err != nil {
		return r, err
	}
	// The lab stops the gateways, because it waits for them and checks their exit status.
	r.cleanup = append(r.cleanup, func() error {
		r.gateways = nil
		errs := []error{b.lab.StopGateways(), b.lab.Unjoin(a.cluster, z.cluster)}
		for _, n := range b.nodes { // a stopped gateway leaves routes that block its peers' networks; later peers of the table need these networks
			errs = append(errs, b.run(context.WithoutCancel(ctx), n.host, "", binary, "gateway", "--cleanup"))
		}
		return errors.Join(errs...)
	})
	if c != (crowd{}) {
		for _, n := range b.nodes {
			undo, err := c.configure(n)
			if err != nil {
				return r, err
			}
			r.cleanup = append([]func() error{undo}, r.cleanup...) // runs last
		}
	}
	if err := b.lab.StartGateways(ctx, binary, args...); err != nil {
		return r, err
	}
	for _, n := range b.nodes {
		pid, ok := b.lab.GatewayProcess(n.cluster)
		if !ok {
			return r, fmt.Errorf("gateway of %s has ended", n.cluster)
		}
		p, err := os.FindProcess(pid)
		if err != nil {
			return r, err
		}
		r.gateways = append(r.gateways, p)
	}
	if c.flows > 0 {
		if err := b.waitReady(ctx, r); err != nil {
			return r, err
		}
		return r, c.open(ctx, b, a, z.seen)
	}
	return r, nil
}
