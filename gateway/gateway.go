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
// One goroutine owns the configuration and applies it (see run). A change of one peer does not
// affect the others. An event of the kernel, a name server or a peer only wakes that goroutine,
// which then compares again.
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

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/gateway/datapath"
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
		err = g.run(ctx, u.config, updates, o)
		return errors.Join(err, g.close())
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
	ready   func() error // Options.Ready; nil: always ready

	host   *rtnl.Kernel
	mtuTo  func(addr netip.Addr, links map[int]int) (int, error) // of the host
	engine *natengine.Engine
	ends   []*tunnelEnd // one for each tunnel; the first always exists

	podNetwork bool              // Options.PodNetwork
	delivery   fabric.PodDecider // used by run only, if podNetwork
	udpOffload bool              // UDP superpackets cross the TUN
	resolver   *resolver
	metrics    *metrics
	drops      dropTimes
	servers    *httpserve.Servers
	capturing  atomic.Pointer[capture.Capture] // nil: none
	flows      *flowLog                        // nil: none
	keeper     *flowsync.Keeper                // nil: none
	inBand     *inBand                         // nil: none
	acting     bool                            // Options.Begin is closed; used by run's goroutine only
	adopted    bool

	yielding sync.Once
	relayed  atomic.Uint64 // packets relayed since yield

	wake chan struct{} // something may have changed: compare
	ways atomic.Bool   // also ask the kernel for the route to every peer
	done chan struct{} // ends sweep
	wg   sync.WaitGroup

	located located      // used by run's goroutine only, as objects
	objects kernel.State // the last wanted objects on the gateway's host

	mu  sync.RWMutex // guards now, which only run's goroutine writes
	now current
}

// current is the configuration in force and its results.
type current struct {
	config      Config
	peers       []peer
	mtu         int              // of the tunnel, octets
	generation  int              // number of applied configurations
	reloaded    time.Time        // when the last one was applied
	configErr   error            // why the newest configuration is not in force
	applyErr    error            // what of the configuration could not be applied
	undelivered []fabric.Problem // nodes and networks that a gateway in a Pod cannot reach
	ready       bool
}

// open does everything that can fail before the first packet. When it returns, nothing outside the
// process and its unnamed namespace has changed.
func open(o Options, c Config) (_ *gateway, err error) {
	g := &gateway{log: o.Log, version: o.Version, started: time.Now(), ready: o.Ready, keeper: o.Flows, podNetwork: o.PodNetwork,
		wake: make(chan struct{}, 1), done: make(chan struct{})}
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

// close ends the gateway and removes its objects: first the routes to it, then the handlers of the
// packets. Unreachable routes stay.
func (g *gateway) close() error {
	close(g.done)
	if g.keeper != nil {
		g.keeper.Deactivate()
	}
	g.endCapture()
	g.servers.Close()
	var err error
	if g.now.generation > 0 { // otherwise keep the objects of the previous gateway
		_, err = g.host.Apply(g.left())
	}
	g.resolver.close()
	g.wg.Wait()
	if g.inBand != nil {
		g.inBand.server.Close()
	}
	g.closeEnds()
	g.host.Close()
	g.log.Info("gateway stopped")
	return err
}

// left returns the kernel objects that stay when the gateway ends.
func (g *gateway) left() kernel.State {
	if g.podNetwork {
		return fabric.GatewayPodLeft(g.now.wanted())
	}
	return fabric.GatewayHostLeft(g.now.wanted())
}

// compareSoon wakes run. It never blocks.
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

// adopt takes over the flows of the previous gateway, once.
func (g *gateway) adopt() {
	if g.keeper == nil || g.adopted {
		return
	}
	g.adopted = true
	if n := g.keeper.Activate(running{g.engine, g.ends}); n > 0 {
		g.log.Info("took over the flows of the former active gateway", "flows", n)
	}
}

// first waits for the first configuration.
func (g *gateway) first(c Config) error {
	if err := g.accept(c); err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	return g.now.applyErr // at the start this is a missing privilege or the like
}

// begin opens the sockets and applies the configuration as the first one. If it was prepared,
// packets already wait in the TUNs. They are read last, once there are flows and peers.
func (g *gateway) begin(c Config) error {
	prepared := g.now.generation > 0
	if g.acting = true; prepared {
		g.adopt()
	} else if err := g.startEnds(c); err != nil {
		return err
	}
	newer := g.now.configErr // why the newest configuration is not c
	g.mu.Lock()
	g.now.peers, g.now.generation = nil, 0
	g.mu.Unlock()
	if err := g.first(c); err != nil {
		return err
	}
	if prepared {
		if err := g.startEnds(c); err != nil {
			return err
		}
	}
	g.mu.Lock()
	g.now.ready, g.now.configErr = true, newer
	g.mu.Unlock()
	g.log.Info("gateway ready", "peers", len(g.now.peers), "mtu", g.now.mtu, "listenPort", c.ListenPort, "namespace", g.host.Path())
	return nil
}

// run applies the first configuration, then the updates.
func (g *gateway) run(ctx context.Context, c Config, updates <-chan update, o Options) error {
	start, begin := g.begin, o.Begin
	if begin != nil {
		select {
		case <-begin:
			begin = nil
		default:
			start = g.first
		}
	}
	if err := start(c); err != nil {
		return err
	}
	events, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	err := g.host.Events(events, func() { g.ways.Store(true); g.compareSoon() })
	if err != nil {
		return err
	}
	beside := func() {
		if o.Beside != nil {
			group.Go(func() { o.Beside(events, Running{g}) })
		}
	}
	if g.acting {
		beside()
	}

	gone := g.watchEnds()
	second := time.NewTicker(time.Second)
	defer second.Stop()
	var (
		compare  <-chan time.Time // runs while events are collected
		compared = time.Now()
	)
	for {
		select {
		case <-ctx.Done():
			if g.podNetwork && g.acting {
				g.drain()
			}
			g.log.Info("gateway stopping")
			return nil
		case name := <-gone:
			return fmt.Errorf("the TUN %s is gone", name)
		case u := <-updates:
			g.update(u)
		case <-g.wake:
			if compare == nil {
				compare = time.After(compareDelay)
			}
		case <-compare:
			compare = nil
			g.reapply(g.ways.Swap(false))
		case <-begin:
			if begin = nil; ctx.Err() != nil {
				continue
			}
			if err := g.begin(g.now.config); err != nil {
				return err
			}
			beside()
		case now := <-second.C:
			if g.acting {
				g.tick(now)
			} else {
				g.discard()
			}
			if now.Sub(compared) > compareInterval || g.now.applyErr != nil {
				compared = now
				g.reapply(true)
			}
		}
	}
}

// tick checks the sessions, once a second.
func (g *gateway) tick(now time.Time) {
	stats := make([]map[[32]byte]datapath.Stats, len(g.ends))
	for i, e := range g.ends {
		stats[i] = e.Stats()
	}
	peers := slices.Clone(g.now.peers)
	changed := false
	for i := range peers {
		p, was := &peers[i], &g.now.peers[i]
		p.look(stats, now)
		down := p.down()
		if down != was.down() {
			if down {
				g.log.Warn("no WireGuard session with the peer: dropping its packets", "peer", p.ID)
			} else {
				g.log.Info("WireGuard session with the peer restored", "peer", p.ID)
			}
		}
		if p.state != nil {
			p.state.SetDown(down)
		}
		g.resolver.heard(p.ID, now.Sub(p.heard()) < silence)
		// A peer that fell silent after it had roamed may be back at its configured endpoint.
		at, _ := g.resolver.endpoint(p.ID)
		for i, s := range p.sessions {
			theirs, _ := theirEnd(p.GatewayPeer, i)
			if at.IsValid() && now.Sub(s.heard) >= silence && now.Sub(s.asserted) > lookupRetry && s.stats.Endpoint != netip.AddrPortFrom(at.Addr(), theirs.Port) {
				g.ends[i].Forget(theirs.PublicKey)
				s.asserted, p.forgotten, changed = now, true, true
			}
		}
		if p.session.stats.Endpoint.Addr() != was.session.stats.Endpoint.Addr() {
			changed = true // the route to it may have another MTU
			if was.session.stats.Endpoint.IsValid() {
				g.ends[0].checker.OtherPath(p.ID)
			}
		}
		changed = changed || p.inUse != g.working(p.ID, now)
	}
	g.mu.Lock()
	g.now.peers = peers
	g.mu.Unlock()
	if changed {
		g.compareSoon()
	}
	g.drops.look(g.engine, now)
	g.resolver.tick(now)
	g.reach(stats, now)
	g.rekey(peers, now)
}
