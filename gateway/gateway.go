// Package gateway applies a fabric.Gateway on Linux: the namespace with the TUN, the routes to it,
// WireGuard, the NAT rules and the connection check, with metrics and a status page.
//
//	Source ─ Config, with fabric.Gateway ─► engine rules   (natengine, swapped at once)
//	                                    ├─► WireGuard      (tunnels.go, datapath)
//	                                    ├─► check          (gateway/check, PING and PONG)
//	                                    └─► kernel objects (fabric.GatewayHostFor; internal/kernel)
//
//	host's namespace                              gateway's namespace (unnamed)
//	  rule 420 ──► table 4200 ─ isthmus.host ════ isthmus.gw ─ forwarding ─ isthmus0 (TUN)
//	  UDP socket of WireGuard ◄───────────── process ─────────────────────────┘
//
// In a Pod's network there is no second namespace: the overlay of the cluster ends beside the TUN
// (fabric.GatewayPodFor), and nodes deliver.
//
// A loop owns the configuration and applies it. A change of one peer does not affect the others. An
// event of the kernel, a name server or a peer only wakes the loop, which then compares again.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/gateway/flowsync"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/natengine"
)

// Timing of the control loop.
const (
	// compareDelay collects the netlink events of one change; with it a deleted route is back well
	// within a second.
	compareDelay = 100 * time.Millisecond
	// compareInterval is the interval of the comparison that makes up for lost events.
	compareInterval = 10 * time.Second

	// sessionFirst is how long a new peer may take for its first handshake before its packets are
	// dropped rather than queued.
	sessionFirst = 30 * time.Second
)

// Run runs a gateway: it applies the Configs of o.Source in the network namespace of the process
// until ctx ends. Then it removes its kernel objects, except the unreachable routes for its peers'
// networks: without these, packets for peers would leave in the clear. Clear removes them. Run returns
// an error if it cannot start, for example because the first Config is invalid, or if its TUN disappears. A later
// invalid Config is logged and reported in status and metrics, and the last good one stays in
// force.
//
// Run needs CAP_NET_ADMIN, /dev/net/tun and, unless it has a Pod's network, CAP_SYS_ADMIN (for the
// namespace). There can be one gateway in a network namespace.
func Run(ctx context.Context, o Options) error {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	ctx, cancel := context.WithCancel(ctx)
	var source sync.WaitGroup
	defer source.Wait()
	defer cancel()
	updates := make(chan update)
	source.Go(func() {
		o.Source(ctx, func(c Config, err error) {
			select {
			case updates <- update{c, err}:
			case <-ctx.Done():
			}
		})
	})

	select {
	case <-ctx.Done():
		return nil
	case u := <-updates:
		if u.err != nil {
			return fmt.Errorf("configuration: %w", u.err)
		}
		g, err := open(o, u.config)
		if err != nil {
			return err
		}
		l := &loop{gateway: g}
		err = l.run(ctx, u.config, updates, o)
		return errors.Join(err, l.close())
	}
}

// Clear removes the unreachable routes that a gateway left in the network namespace of the process.
// They keep packets for its peers from leaving in the clear. Clear is for a process that does not
// become a gateway, on a node whose route agent refuses such packets, and for the end of an
// installation. It does not touch objects of a running gateway. podNetwork is as in Options.
func Clear(podNetwork bool, log *slog.Logger) error {
	h, err := rtnl.Open(ownerOf(podNetwork), log)
	switch {
	case errors.Is(err, rtnl.ErrOther):
		return nil
	case err != nil:
		return err
	}
	defer h.Close()
	_, err = h.Apply(kernel.State{})
	return err
}

func ownerOf(podNetwork bool) kernel.Owner {
	if podNetwork {
		return kernel.GatewayPod
	}
	return kernel.Gateway
}

// gateway is a running gateway.
type gateway struct {
	log     *slog.Logger
	version string
	started time.Time
	ready   func() error            // Options.Ready; nil: always ready
	mandate func() *isthmus.Mandate // Options.Mandate; may be nil

	host   *rtnl.Kernel
	mtuTo  func(addr netip.Addr, links map[int]int) (int, error) // of the host
	engine *natengine.Engine
	ends   []*tunnelEnd // one for each tunnel; the first always exists

	podNetwork bool // Options.PodNetwork
	udpOffload bool // UDP superpackets cross the TUN
	resolver   *resolver
	metrics    *metrics
	drops      dropTimes
	servers    *httpserve.Servers
	capturing  atomic.Pointer[capture.Capture] // nil: none
	flows      *flowLog                        // nil: none
	keeper     *flowsync.Keeper                // nil: none
	inBand     *inBand                         // nil: none

	yielding sync.Once
	relayed  atomic.Uint64 // packets relayed since yield

	wake chan struct{} // something may have changed: compare
	ways atomic.Bool   // also ask the kernel for the route to every peer
	done chan struct{} // ends sweep
	wg   sync.WaitGroup

	published atomic.Pointer[current] // by the loop
}

// open does everything that can fail before the first packet. When it returns, nothing outside the
// process and its unnamed namespace has changed.
func open(o Options, c Config) (_ *gateway, err error) {
	g := &gateway{log: o.Log, version: o.Version, started: time.Now(), ready: o.Ready, mandate: o.Mandate, keeper: o.Flows, podNetwork: o.PodNetwork,
		wake: make(chan struct{}, 1), done: make(chan struct{})}
	g.published.Store(new(current))
	var undo []func()
	defer func() {
		if err != nil {
			for _, f := range slices.Backward(undo) {
				f()
			}
		}
	}()

	if g.host, err = rtnl.Open(ownerOf(o.PodNetwork), o.Log); err != nil {
		return nil, err
	}
	g.mtuTo = g.host.MTUTo
	undo = append(undo, g.host.Close)
	mtu := c.MTU
	if mtu == 0 {
		mtu = defaultMTU
	}
	for _, w := range c.NAT.Warnings() {
		o.Log.Warn("check the limits of NAT", "warning", w)
	}
	g.engine = natengine.New(engineConfig(c))
	g.metrics = newMetrics(g)
	if c.FlowLog.File != "" {
		if g.flows, err = openFlowLog(c.FlowLog, o.Owner, o.Log); err != nil {
			return nil, err
		}
		undo = append(undo, func() { g.flows.file.Close() })
		g.engine.Observe(g.flows.observe, c.FlowLog.Sample)
	}
	undo = append(undo, g.closeEnds)
	if err := g.openEnds(o, max(c.Tunnels, 1), mtu); err != nil {
		return nil, err
	}
	if o.InBand != nil {
		g.inBand = newInBand(*o.InBand, g.ends[0], o.Log)
		undo = append(undo, g.inBand.server.Close)
	}
	g.resolver = newResolver(lookupHost, g.compareSoon, o.Log)
	undo = append(undo, g.resolver.close)
	if err := g.listen(c); err != nil {
		return nil, err
	}
	undo = append(undo, g.servers.Close)

	g.servers.Serve()
	g.wg.Go(g.sweep)
	if g.flows != nil {
		g.wg.Go(func() { g.flows.run(g.done) })
	}
	return g, nil
}

func lookupHost(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// compareSoon wakes the loop. It never blocks.
func (g *gateway) compareSoon() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// sweep expires flows, off the control loop, because a full table takes a while.
func (g *gateway) sweep() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var memory collector
	for {
		select {
		case <-g.done:
			return
		case <-tick.C:
			memory.adjust()
			g.engine.SweepInSteps(g.ends[0].Now(), func() { time.Sleep(time.Millisecond) })
		}
	}
}
