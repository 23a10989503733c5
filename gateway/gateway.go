// Package gateway applies a fabric.Gateway on Linux: the namespace with the TUN, the routes to it,
// WireGuard, the NAT rules and the connection check, with metrics and a status page.
//
//	Source ─ Config, with fabric.Gateway ─► engine rules   (natengine, swapped at once)
//	                                    ├─► WireGuard      (tunnels.go, datapath)
//	                                    ├─► check          (check.go, PING and PONG)
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
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/flowsync"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/natengine"
)

// Config is a complete wish. A later one replaces it.
type Config struct {
	Gateway    fabric.Gateway   // as fabric.GatewayFor decided; never modified
	Refused    []fabric.Problem // what was left out of it, to show
	PrivateKey Key
	NextKey    Key    // to which the gateway answers, too, while its key rotates; zero: there is none
	ListenPort uint16 // UDP, WireGuard
	MTU        int    // of the tunnel in octets; 0: derived from the ways to the peers
	// PodNetwork is where a gateway delivers that has its Pod's network (Options.PodNetwork).
	PodNetwork fabric.PodNetwork
	// Preshared are the preshared keys of peers by cluster ID, for all tunnels to each. Never modified.
	Preshared map[string]datapath.PresharedKeys

	// The rest is read once, when the gateway starts.
	Tunnels        int    // at most this many to one peer, on ports from ListenPort upwards; 0 means 1
	MetricsAddress string // TCP address of /metrics, /healthz and /readyz; empty: none
	StatusAddress  string // TCP address of /status and /trace; empty: none
	FlowLog        FlowLog
	NAT            natengine.Config // bounds and timeouts; the addresses in it are the gateway's to set
}

// Key is a WireGuard private key. It does not print itself.
type Key [32]byte

// String hides the key.
func (Key) String() string { return "(private key)" }

// GoString hides the key from %#v.
func (Key) GoString() string { return "(private key)" }

// Source delivers the first Config and every later change, or the reason why what is there now is
// none, one call at a time. It returns when ctx ends.
type Source func(ctx context.Context, deliver func(Config, error))

// Options of Run. Source is required.
type Options struct {
	Source  Source
	Log     *slog.Logger // nil: slog.Default()
	Version string       // for metrics and status

	// UDPOffload lets UDP superpackets cross the TUN, both ways: those of senders that use
	// UDP_SEGMENT, and towards the hosts datagrams of one flow that came together (Linux 6.2 and
	// later; without it nothing happens). See tun.TrustsUSO.
	UDPOffload bool

	// PodNetwork says that the network namespace of the process is the gateway's own, a Pod's, and
	// that the overlay of the cluster ends in it. Else it is that of the host, and the gateway makes
	// one of its own.
	PodNetwork bool

	// Ready, if any, says why the status must not call the gateway ready though it works, such as
	// that its Source remembers what it delivers. It may be called concurrently.
	Ready func() error

	// Owner, if any, says for the flow log whose an address of this cluster is. It may be called
	// concurrently.
	Owner func(netip.Addr) fabric.Owner

	// Calls, if not nil, is closed when this gateway may call its peers by itself. A handshake moves what
	// a peer sends from the gateway before to this one, so that it is of use when the nodes have moved.
	// What they send until then is called for at once, and peers that call are answered.
	Calls <-chan struct{}

	// Gate, if any, is asked right before each system call that sends to a peer; while it returns false, nothing is sent. It
	// is called concurrently.
	Gate func() bool

	// Begin, if not nil, is closed when this gateway becomes active. Until then it prepares the
	// slow parts: the TUNs, the rules and the kernel's objects. It has no UDP port and no key of a
	// peer, and uses neither Flows nor Beside.
	Begin <-chan struct{}

	// Flows, if not nil, has flows that another gateway had before, which this one adopts before it handles
	// the first packet. It is told the flows of this one.
	Flows *flowsync.Keeper

	// InBand, if not nil, lets managers use the tunnel to the peers that agreed to it.
	InBand *InBand

	// Beside, if any, runs as long as the gateway acts: from when the first Config is in force
	// until its context ends, which is before anything is taken down.
	Beside func(ctx context.Context, r Running)
}

// Running is a gateway that runs. Its methods may be called concurrently, until Options.Beside has
// returned.
type Running struct{ g *gateway }

// Status describes the gateway, without its flows.
func (r Running) Status() Status { return r.g.status(0) }

// Ready says why the gateway carries nothing, or nil.
func (r Running) Ready() error { return r.g.unready() }

// StatusHandler answers /status and /trace, as on Config.StatusAddress.
func (r Running) StatusHandler() http.Handler { return r.g.statusHandler() }

// CaptureHandler answers /capture, as at CaptureSocket. The gateway's end ends its answer.
func (r Running) CaptureHandler() http.Handler { return r.g.captureHandler() }

// Gatherer has the gateway's metrics.
func (r Running) Gatherer() prometheus.Gatherer { return r.g.metrics }

// Timing of the control loop.
const (
	// compareDelay collects the netlink events of one change; with it a deleted route is back well
	// within a second.
	compareDelay = 100 * time.Millisecond
	// compareInterval is for events that were lost.
	compareInterval = 10 * time.Second

	// sessionGone: WireGuard refuses a session older than 180 s (REJECT_AFTER_TIME) and has tried a
	// new one since 120 s.
	sessionGone = 195 * time.Second
	// sessionFirst is how long a new peer may take for its first handshake before its packets are
	// dropped rather than queued.
	sessionFirst = 30 * time.Second
)

// Run runs a gateway: it applies the Configs of o.Source in the network namespace of the process
// until ctx ends. Then it removes its kernel objects, except the routes that refuse packets for its
// peers, which would otherwise leave in the clear; Clear removes these. It returns an error if it
// cannot start, for example because the first Config is invalid, or if its TUN disappears. A later
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
	wishes := make(chan wish)
	source.Go(func() {
		o.Source(ctx, func(c Config, err error) {
			select {
			case wishes <- wish{c, err}:
			case <-ctx.Done():
			}
		})
	})

	select {
	case <-ctx.Done():
		return nil
	case w := <-wishes:
		if w.err != nil {
			return fmt.Errorf("configuration: %w", w.err)
		}
		g, err := open(o, w.config)
		if err != nil {
			return err
		}
		err = g.run(ctx, w.config, wishes, o)
		return errors.Join(err, g.close())
	}
}

// Clear removes the refusing routes that a gateway left in the network namespace of the process.
// They keep packets for its peers from leaving in the clear. It is for a process that does not
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

type wish struct {
	config Config
	err    error
}

// gateway is a running gateway.
type gateway struct {
	log     *slog.Logger
	version string
	started time.Time
	ready   func() error // Options.Ready; nil: always

	host   *rtnl.Kernel
	mtuTo  func(addr netip.Addr, links map[int]int) (int, error) // host's
	engine *natengine.Engine
	ends   []*tunnelEnd // of the tunnels; the first is always there

	podNetwork bool              // Options.PodNetwork
	delivery   fabric.PodDecider // run alone; what it needs where podNetwork is
	udpOffload bool              // UDP superpackets cross the TUN
	resolver   *resolver
	metrics    *metrics
	drops      dropTimes
	servers    *httpserve.Servers
	capturing  atomic.Pointer[capture.Capture] // nil: none
	flows      *flowLog                        // nil: none
	keeper     *flowsync.Keeper                // nil: none
	inBand     *inBand                         // nil: none
	acting     bool                            // run's goroutine's, as adopted: Options.Begin is closed
	adopted    bool

	wake chan struct{} // something may differ now: compare
	ways atomic.Bool   // and ask the kernel for the way to every peer
	done chan struct{} // ends sweep
	wg   sync.WaitGroup

	located located      // run's goroutine's, as the next
	objects kernel.State // on the gateway's host, as they were last wanted

	mu  sync.RWMutex // guards what follows; written by run's goroutine alone
	now current
}

// current is what is in force and what is known about it.
type current struct {
	config      Config
	peers       []peer
	mtu         int              // of the tunnel, octets
	generation  int              // configurations applied
	reloaded    time.Time        // last of them
	configErr   error            // why the newest configuration is not in force
	applyErr    error            // what of the configuration could not be made true
	undelivered []fabric.Problem // of nodes and networks that the gateway in a Pod does not reach
	ready       bool
}

// open makes everything that can fail before the first packet. Nothing outside the process and its
// unnamed namespace has changed when it returns.
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
		o.Log.Warn("bounds of NAT", "warning", w)
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
	if o.Calls != nil {
		for _, e := range g.ends {
			e.checker.hold(o.Calls)
		}
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

// close ends the gateway and removes what it made: first what leads packets here, then what would
// have handled them. What refuses packets stays.
func (g *gateway) close() error {
	close(g.done)
	if g.keeper != nil {
		g.keeper.Deactivate()
	}
	g.endCapture()
	g.servers.Close()
	var err error
	if g.now.generation > 0 { // else what a gateway before it left stays
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

// left is what stays when the gateway ends.
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

// adopt takes over the flows of the gateway before, once.
func (g *gateway) adopt() {
	if g.keeper == nil || g.adopted {
		return
	}
	g.adopted = true
	if n := g.keeper.Activate(running{g.engine, g.ends[0].Now}); n > 0 {
		g.log.Info("flows of the gateway before adopted", "flows", n)
	}
}

// first takes the first configuration.
func (g *gateway) first(c Config) error {
	if err := g.accept(c); err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	return g.now.applyErr // at the start this is a missing privilege or the like
}

// begin opens the sockets and takes the configuration as if it were the first. Where it was prepared, packets already wait in
// the TUNs: they are read last, when there are flows and peers.
func (g *gateway) begin(c Config) error {
	prepared := g.now.generation > 0
	if g.acting = true; prepared {
		g.adopt()
	} else if err := g.startEnds(c); err != nil {
		return err
	}
	newer := g.now.configErr // why c is not the newest one
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

// run applies the first configuration and then whatever comes.
func (g *gateway) run(ctx context.Context, c Config, wishes <-chan wish, o Options) error {
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
		case w := <-wishes:
			g.wish(w)
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

// How long a gateway in a Pod goes on at its end.
const (
	drainMost  = 3 * time.Second        // whatever comes
	drainQuiet = 250 * time.Millisecond // when neither nodes nor peers have sent anything for so long: they have followed another gateway
	drainLook  = 50 * time.Millisecond
)

// drain carries on until nodes and peers have followed another gateway, or send nothing anyway.
func (g *gateway) drain() {
	begin := time.Now()
	sent, since := uint64(0), begin
	for time.Since(begin) < drainMost && time.Since(since) < drainQuiet {
		now := uint64(0)
		for _, p := range g.engine.Peers() {
			out, _ := p.Traffic(natengine.Outbound)
			in, _ := p.Traffic(natengine.Inbound)
			now += out + in
		}
		if now != sent {
			sent, since = now, time.Now()
		}
		time.Sleep(drainLook)
	}
}

// wish takes a new configuration, or the reason why there is none.
func (g *gateway) wish(w wish) {
	err := w.err
	if err == nil {
		if g.now.configErr == nil && w.config.samePeers(g.now.config) {
			if reflect.DeepEqual(w.config.PodNetwork, g.now.config.PodNetwork) && w.config.Gateway.Site.Equal(g.now.config.Gateway.Site) {
				return
			}
			g.mu.Lock() // only nodes and pods are others, and where no peer's gateway can be: rules and peers stay as they are
			g.now.config = w.config
			g.mu.Unlock()
			g.reapply(false)
			return
		}
		err = g.accept(w.config)
	}
	if err == nil {
		return
	}
	g.mu.Lock()
	again := g.now.configErr != nil && g.now.configErr.Error() == err.Error()
	g.now.configErr = err
	g.mu.Unlock()
	if again {
		return
	}
	for _, e := range unjoin(err) {
		g.log.Error("configuration not usable, the last good one stays in force", errorAttrs(e)...)
	}
}

// samePeers reports whether both say the same but for where a gateway in a Pod delivers, and where no
// peer's gateway can be.
func (c Config) samePeers(other Config) bool {
	if !slices.EqualFunc(c.Gateway.Peers, other.Gateway.Peers, samePeer) {
		return false
	}
	c.Gateway.Peers, c.Gateway.Site, c.PodNetwork = nil, fabric.Site{}, fabric.PodNetwork{}
	other.Gateway.Peers, other.Gateway.Site, other.PodNetwork = nil, fabric.Site{}, fabric.PodNetwork{}
	return reflect.DeepEqual(c, other)
}

// unjoin takes errors.Join apart.
func unjoin(err error) []error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		var all []error
		for _, e := range j.Unwrap() {
			all = append(all, unjoin(e)...)
		}
		return all
	}
	return []error{err}
}

// errorAttrs spells a problem out for the log.
func errorAttrs(err error) []any {
	attrs := []any{"error", err}
	if p := (fabric.Problem{}); errors.As(err, &p) {
		attrs = append(attrs, "file", p.Origin.File, "object", fabric.Origin{Kind: p.Origin.Kind, Namespace: p.Origin.Namespace, Name: p.Origin.Name}.String(), "field", p.Field)
	}
	return attrs
}

// accept puts a configuration into force, as a whole. An error means that nothing has changed; what
// could not be made true is in applyErr.
func (g *gateway) accept(c Config) error {
	gw := c.Gateway
	if err := checkMTU(c.MTU, gw.Peers); err != nil {
		return err
	}
	want := g.cutTunnels(gw.Peers, g.now.peers)
	g.locate(want, gw.Site)
	survey := g.survey(c, want, false)
	if err := g.setRules(&survey); err != nil {
		g.locate(g.now.wanted(), g.now.config.Gateway.Site)
		return err
	}
	if g.now.generation > 0 {
		old := g.now.config
		for _, f := range []struct {
			name    string
			changed bool
		}{
			{"bounds and timeouts of NAT", c.NAT != old.NAT},
			{"tunnels", c.Tunnels != old.Tunnels},
			{"metricsAddress", c.MetricsAddress != old.MetricsAddress},
			{"statusAddress", c.StatusAddress != old.StatusAddress},
			{"flowLog", c.FlowLog != old.FlowLog},
		} {
			if f.changed {
				g.log.Warn("takes effect at the next start only", "field", f.name)
			}
		}
	}
	g.mu.Lock()
	g.now.config, g.now.configErr = c, nil
	g.mu.Unlock()
	if g.flows != nil {
		g.flows.name(gw.Peers)
	}
	if g.acting { // the rules are there, and no packet is read yet
		g.adopt()
	}
	g.put(&survey)
	g.mu.Lock()
	g.now.generation++ // only now: who waits for it finds what it says
	g.now.reloaded = time.Now()
	g.mu.Unlock()
	g.log.Info("configuration in force", "generation", g.now.generation, "peers", len(gw.Peers))
	return nil
}

// reapply makes the configuration in force true again, whatever changed around it; ways says that ways to
// peers may be others. After a failure it is all of it.
func (g *gateway) reapply(ways bool) {
	peers := g.now.wanted()
	g.locate(peers, g.now.config.Gateway.Site)
	survey := g.survey(g.now.config, peers, ways)
	if err := g.setRules(&survey); err != nil {
		if ways { // what was found out about them is lost
			g.ways.Store(true)
		}
		g.log.Error("rules for another MTU", "mtu", survey.tunnel, "error", err) // they differ in MTU and MSS alone
		return
	}
	g.put(&survey)
}

// located is what locate was told last, and made of it.
type located struct {
	site, all fabric.Site
	own       []netip.Addr
}

// locate tells the resolver where peers may be. No peer is at an address of the host, which changes
// without a new configuration.
func (g *gateway) locate(peers []*fabric.GatewayPeer, site fabric.Site) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		g.log.Warn("addresses of this host", "error", err)
	}
	addrs := make([]netip.Addr, 0, len(own))
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			addrs = append(addrs, p.Addr())
		}
	}
	if l := &g.located; l.own == nil || !slices.Equal(addrs, l.own) || !site.Equal(l.site) {
		g.located = located{site, site.WithRelays(addrs, "an address of the gateway's own host"), addrs}
	}
	if !g.resolver.set(peers, g.located.all) {
		return
	}
	for _, e := range g.ends {
		e.SetSources(g.resolver.mayCome)
		e.SetRelays(g.resolver.relaysFrom)
	}
}

// put makes everything but the engine's rules true, which are swapped already. It goes on after a
// failure; what failed is tried again every second.
func (g *gateway) put(s *survey) {
	if was := g.now.mtu; s.tunnel != was {
		if was != 0 {
			g.log.Info("tunnel MTU changed", "from", was, "to", s.tunnel)
		}
		for _, e := range g.ends {
			e.SetMTU(s.tunnel)
		}
	}
	var errs []error
	if g.acting {
		errs = append(g.moveEnds(g.now.config.ListenPort), g.applyEnds(g.now.config, s)...)
		errs = append(errs, g.inBand.set(s.peers))
	}
	objects, undelivered, err := g.objectsFor(s)
	if err != nil {
		errs = append(errs, err)
	}
	changes, err := g.host.Apply(objects)
	if err != nil {
		errs = append(errs, err)
	}
	if g.host.Busy() {
		g.compareSoon()
	}
	if errors.Is(err, rtnl.ErrFilter) { // without it the overlay would take packets from anybody
		if _, err := g.host.Apply(g.left()); err != nil {
			errs = append(errs, err)
		}
	}
	for _, p := range undelivered {
		if !slices.Contains(g.now.undelivered, p) {
			g.log.Warn("not reached", "problem", p.Error())
		}
	}
	if len(changes) > 0 {
		g.log.Info("kernel objects set", "changes", len(changes))
		g.log.Debug("kernel objects set", "commands", changes.Commands(g.host.Path()))
		g.metrics.repairs.Add(float64(len(changes)))
	}

	failed := errors.Join(errs...)
	if failed != nil && (g.now.applyErr == nil || g.now.applyErr.Error() != failed.Error()) {
		for _, e := range unjoin(failed) {
			g.log.Error("not applied, trying again", "error", e)
		}
	}
	g.mu.Lock()
	g.now.peers, g.now.mtu, g.now.applyErr, g.now.undelivered = s.peers, s.tunnel, failed, undelivered
	g.mu.Unlock()
}

// fewNodes are enough to see what MTU the routes of a Pod have: some CNIs set it there, and not on the
// Pod's device. They are the same for all.
const fewNodes = 16

// objectsFor are the kernel's objects for the peers.
func (g *gateway) objectsFor(s *survey) (kernel.State, []fabric.Problem, error) {
	if !g.podNetwork && !s.routed {
		return g.objects, nil, nil
	}
	want, inUse := make([]*fabric.GatewayPeer, len(s.peers)), make(map[string]fabric.TunnelSet)
	for i := range s.peers {
		p := &s.peers[i]
		if want[i] = p.GatewayPeer; p.inUse != 0 {
			inUse[p.ID] = p.inUse
		}
	}
	if !g.podNetwork {
		g.objects = fabric.GatewayHostFor(want, inUse, s.tunnel, len(g.ends))
		return g.objects, nil, nil
	}
	in := g.now.config.PodNetwork
	_, underlay, err := g.host.DeviceOf(in.Pod)
	links := make(map[int]int)
	for _, n := range in.Nodes[:min(len(in.Nodes), fewNodes)] {
		if least, unknown := g.host.MTUTo(n.Underlay(), links); unknown == nil && err == nil {
			underlay = min(underlay, least)
		}
	}
	state, undelivered := g.delivery.GatewayPodFor(want, inUse, s.tunnel, len(g.ends), underlay, in)
	return state, undelivered, err
}

// tick looks after the sessions, once a second.
func (g *gateway) tick(now time.Time) {
	stats := make([]map[[32]byte]datapath.Stats, len(g.ends))
	for i, e := range g.ends {
		stats[i] = e.Stats()
	}
	working := g.working(now)
	peers := slices.Clone(g.now.peers)
	changed := false
	for i := range peers {
		p, was := &peers[i], &g.now.peers[i]
		p.look(stats, now)
		down := p.down()
		if down != was.down() {
			if down {
				g.log.Warn("no session with peer, dropping its packets", "peer", p.ID)
			} else {
				g.log.Info("session with peer is back", "peer", p.ID)
			}
		}
		if p.state != nil {
			p.state.SetDown(down)
		}
		g.resolver.heard(p.ID, now.Sub(p.heard()) < silence)
		// A peer that went silent where it roamed to, in one tunnel, may be back where it is configured.
		at, _ := g.resolver.endpoint(p.ID)
		for i, s := range p.sessions {
			theirs, _ := theirEnd(p.GatewayPeer, i)
			if at.IsValid() && now.Sub(s.heard) >= silence && now.Sub(s.asserted) > lookupRetry && s.stats.Endpoint != netip.AddrPortFrom(at.Addr(), theirs.Port) {
				g.ends[i].Forget(theirs.PublicKey)
				s.asserted, p.forgotten, changed = now, true, true
			}
		}
		if p.session.stats.Endpoint.Addr() != was.session.stats.Endpoint.Addr() {
			changed = true // the way to it may have another MTU
			if was.session.stats.Endpoint.IsValid() {
				g.ends[0].checker.otherPath(p.ID)
			}
		}
		changed = changed || p.inUse != working[p.ID]
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
