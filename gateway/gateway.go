// Package gateway applies a fabric.Gateway on Linux: the network namespace with the TUN, the
// routes to it, WireGuard, the NAT rules and the connection check. It also serves metrics and a
// status page.
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
// A gateway in a Pod needs no second namespace. The cluster's overlay ends in the Pod's
// namespace, beside the TUN (fabric.GatewayPodFor), and nodes deliver the packets to pods.
//
// One goroutine, the control loop, owns the configuration and applies it. A change of one peer
// does not affect the others. An event from the kernel, a name server or a peer only wakes the
// loop, which then compares the desired state with the actual state again.
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
	// compareDelay is the time during which the loop collects the netlink events that one change
	// causes. It is short, so that a deleted route is restored well within a second.
	compareDelay = 100 * time.Millisecond
	// compareInterval is the time between comparisons without an event, in case an event was lost.
	compareInterval = 10 * time.Second

	// sessionFirst is the time that a new peer has for its first handshake. If it has no session by
	// then, packets for the peer are dropped instead of queued.
	sessionFirst = 30 * time.Second
)

// Run runs a gateway: it applies the Configs of o.Source in the network namespace of the process
// until ctx ends. At the end it removes its kernel objects, except the unreachable routes for its
// peers' networks. Without these routes, packets for peers would leave in the clear. Clear removes
// the routes.
//
// Run returns an error if it cannot start, for example because the first Config is invalid, or if
// its TUN disappears. If a later Config is invalid, Run logs that, reports it in status and
// metrics, and keeps the last valid one in force.
//
// Run needs CAP_NET_ADMIN and /dev/net/tun. In the host's network it also needs CAP_SYS_ADMIN, to
// create the namespace. Only one gateway can run in a network namespace.
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

// Clear removes the unreachable routes that an ended gateway left in the network namespace of the
// process. These routes keep packets for its peers from leaving in the clear. So call Clear only
// when uninstalling, or if something else, such as a route agent, refuses these packets. Clear does
// not touch the objects of a running gateway. podNetwork is Options.PodNetwork.
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

// A gateway is a running gateway, without the state of the control loop.
type gateway struct {
	log     *slog.Logger
	version string
	started time.Time
	ready   func() error            // Options.Ready; nil: always ready
	mandate func() *isthmus.Mandate // Options.Mandate; may be nil

	host *rtnl.Kernel
	// mtuTo returns the MTU of the host's route to an address. links caches the MTU of each link.
	mtuTo   func(addr netip.Addr, links map[int]int) (int, error)
	engine  *natengine.Engine
	tunnels []*tunnelEnd // our end of each tunnel; at least one

	podNetwork bool // Options.PodNetwork
	udpOffload bool // UDP superpackets cross the TUN
	resolver   *resolver
	metrics    *metrics
	drops      dropTimes
	servers    *httpserve.Servers
	capturing  atomic.Pointer[capture.Capture] // nil: no capture is running
	flows      *flowLog                        // nil: no flow log
	keeper     *flowsync.Keeper                // nil: flows are not copied
	inBand     *inBand                         // nil: managers do not use the tunnels

	yielding sync.Once
	relayed  atomic.Uint64 // number of packets relayed since yield

	wake      chan struct{} // a message makes the loop compare
	remeasure atomic.Bool   // the next comparison also queries the kernel's route to every peer
	done      chan struct{} // closed at the end; ends sweep and the flow log
	wg        sync.WaitGroup

	published atomic.Pointer[current] // stored by the loop, read by any goroutine
}

// open does everything that can fail before the first packet. When it returns, nothing has changed
// outside the process and its unnamed namespace.
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
		o.Log.Warn("a NAT setting may cause problems", "warning", w)
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
	undo = append(undo, g.closeTunnels)
	if err := g.openTunnels(o, max(c.Tunnels, 1), mtu); err != nil {
		return nil, err
	}
	if o.InBand != nil {
		g.inBand = newInBand(*o.InBand, g.tunnels[0], o.Log)
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

// sweep deletes expired flows once a second. It has a goroutine of its own, because a full table
// takes a while.
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
			g.engine.SweepInSteps(g.tunnels[0].Now(), func() { time.Sleep(time.Millisecond) })
		}
	}
}
