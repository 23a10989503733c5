// Package gateway makes a fabric.Gateway true on Linux: the namespace with the
// TUN, the routes that lead there, WireGuard, the NAT rules and the connection
// check, with metrics and a status for people.
//
//	Source ─ Config ─► GatewayFor ─► engine rules   (natengine, swapped at once)
//	                             ├─► WireGuard      (wireguard.go, difference by IpcSet)
//	                             ├─► check          (check.go, PING and PONG)
//	                             └─► kernel objects (host.go: want, diff; host_linux.go: apply)
//
//	host's namespace                              gateway's namespace (unnamed)
//	  rule 4200 ─► table 4200 ─ isthmus.host ════ isthmus.gw ─ forwarding ─ isthmus0 (TUN)
//	  UDP socket of WireGuard ◄───────────── process ─────────────────────────┘
//
// One goroutine owns the configuration and applies it (see run). A change of one
// peer touches nothing of the others. What the kernel, a name server or a peer
// does by itself only wakes that goroutine, which compares again.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/natengine"
)

// Config is a complete wish. A later one replaces it.
type Config struct {
	Intent     fabric.Intent
	PrivateKey Key
	ListenPort uint16 // UDP, WireGuard
	MTU        int    // of the tunnel in octets; 0: derived from the ways to the peers

	// The rest is read once, when the gateway starts.
	Tunnels        int              // at most this many to one peer, on ports from ListenPort upwards; 0 means 1
	MetricsAddress string           // TCP address of /metrics, /healthz and /readyz; empty: none
	StatusAddress  string           // TCP address of /status and /trace; empty: none
	NAT            natengine.Config // bounds and timeouts; the addresses in it are the gateway's to set
}

// Key is a WireGuard private key. It does not print itself.
type Key [32]byte

// String hides the key.
func (Key) String() string { return "(private key)" }

// GoString hides the key from %#v.
func (Key) GoString() string { return "(private key)" }

// Source delivers the first Config and every later change, or the reason why
// what is there now is none, one call at a time. It returns when ctx ends.
type Source func(ctx context.Context, deliver func(Config, error))

// Options of Run. Source is required.
type Options struct {
	Source  Source
	Log     *slog.Logger // nil: slog.Default()
	Version string       // for metrics and status

	Transport Transport // empty: TransportInline
	// UDPOffload lets UDP superpackets cross the TUN, both ways: those of senders that use UDP_SEGMENT, and towards the
	// hosts datagrams of one flow that came together (Linux 6.2 and later; without it nothing happens). See tun.TrustsUSO.
	UDPOffload bool

	// Beside, if any, runs as long as the gateway does: from when the first Config
	// is in force until its context ends, which is before anything is taken down.
	Beside func(ctx context.Context, r Running)
}

// Running is a gateway that runs. Its methods may be called concurrently, until
// Options.Beside has returned.
type Running struct{ g *gateway }

// Status describes the gateway, without its flows.
func (r Running) Status() (Status, error) { return r.g.status(0) }

// StatusHandler answers /status and /trace, as on Config.StatusAddress.
func (r Running) StatusHandler() http.Handler { return r.g.statusHandler() }

// Gatherer has the gateway's metrics.
func (r Running) Gatherer() prometheus.Gatherer { return r.g.metrics.registry }

// Timing of the control loop.
const (
	// compareDelay collects the netlink events of one change; with it a deleted
	// route is back well within a second.
	compareDelay = 100 * time.Millisecond
	// compareInterval is for events that were lost.
	compareInterval = 10 * time.Second

	// sessionGone: WireGuard refuses a session older than 180 s
	// (REJECT_AFTER_TIME) and has tried a new one since 120 s.
	sessionGone = 195 * time.Second
	// sessionFirst is how long a new peer may take for its first handshake
	// before its packets are dropped rather than queued.
	sessionFirst = 30 * time.Second
)

// Run is a gateway: it makes true what o.Source delivers, in the network
// namespace of the process, until ctx ends, and then removes everything that it
// made. It returns an error when it could not start, the first Config being
// unusable included, or when its TUN is gone. A later Config that is unusable is
// logged and shown in status and metrics while the last good one stays in force.
//
// Run needs CAP_NET_ADMIN, CAP_SYS_ADMIN (for the namespace) and /dev/net/tun.
// There can be one gateway in a network namespace.
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
		err = g.run(ctx, w.config, wishes, o.Beside)
		return errors.Join(err, g.close())
	}
}

// Clear removes what a gateway that was killed left in the network namespace of
// the process: routes that lead nowhere, which keep the traffic of its peers from
// leaving in the clear, but also from any other way to them. It is for a process
// that does not become a gateway itself. What a gateway that lives has made stays.
func Clear(log *slog.Logger) error {
	h, err := openHost(log)
	switch {
	case errors.Is(err, errOther):
		return nil
	case err != nil:
		return err
	}
	defer h.release()
	return h.clear()
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

	host   *host
	engine *natengine.Engine
	ends   []*tunnelEnd // of the tunnels; the first is always there

	udpOffload bool // UDP superpackets cross the TUN
	resolver   *resolver
	metrics    *metrics
	servers    []*server

	wake chan struct{} // something may differ now: compare
	done chan struct{} // ends sweep
	wg   sync.WaitGroup

	mu  sync.RWMutex // guards what follows; written by run's goroutine alone
	now current
}

// current is what is in force and what is known about it.
type current struct {
	config     Config
	gateway    fabric.Gateway
	mtu        mtus
	generation int       // configurations applied
	reloaded   time.Time // last of them
	configErr  error     // why the newest configuration is not in force
	applyErr   error     // what of the configuration could not be made true
	ready      bool
	sessions   map[string]*session
	inUse      map[string]tunnelSet // further tunnels, by peer
}

// session is what a peer's WireGuard session looks like from outside. It is
// never modified after it is published in current.
type session struct {
	key      [32]byte
	since    time.Time // configured
	rx       uint64
	rxAt     time.Time // when rx last grew
	down     bool
	asserted time.Time      // when its endpoint was last set again
	endpoint netip.AddrPort // where it is; zero: not known
}

// open makes everything that can fail before the first packet. Nothing outside
// the process and its unnamed namespace has changed when it returns.
func open(o Options, c Config) (_ *gateway, err error) {
	g := &gateway{log: o.Log, version: o.Version, started: time.Now(),
		wake: make(chan struct{}, 1), done: make(chan struct{})}
	g.now.sessions = make(map[string]*session)
	var undo []func()
	defer func() {
		if err != nil {
			for _, f := range slices.Backward(undo) {
				f()
			}
		}
	}()

	if g.host, err = openHost(o.Log); err != nil {
		return nil, err
	}
	undo = append(undo, g.host.release)
	mtu := c.MTU
	if mtu == 0 {
		mtu = defaultMTU
	}
	for _, w := range c.NAT.Warnings() {
		o.Log.Warn("bounds of NAT", "warning", w)
	}
	g.engine = natengine.New(engineConfig(c))
	g.metrics = newMetrics(g)
	undo = append(undo, g.closeEnds)
	if err := g.openEnds(o, max(c.Tunnels, 1), mtu); err != nil {
		return nil, err
	}
	if err := g.startEnds(c); err != nil {
		return nil, err
	}
	g.resolver = newResolver(lookupHost, g.compareSoon, o.Log)
	undo = append(undo, g.resolver.close)
	if err := g.listen(c); err != nil {
		return nil, err
	}
	undo = append(undo, g.closeServers)

	g.serve()
	g.wg.Go(g.sweep)
	return g, nil
}

func lookupHost(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// close ends the gateway and removes what it made: first what leads packets
// here, then what would have handled them.
func (g *gateway) close() error {
	close(g.done)
	g.closeServers()
	err := g.host.clear()
	g.resolver.close()
	g.wg.Wait()
	g.closeEnds()
	g.host.release()
	g.log.Info("gateway stopped")
	return err
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
			g.engine.SweepInSteps(g.ends[0].path.Now(), func() { time.Sleep(time.Millisecond) })
			for _, e := range g.ends {
				if e.inline != nil {
					e.inline.Sweep()
				}
			}
		}
	}
}

// run applies the first configuration and then whatever comes.
func (g *gateway) run(ctx context.Context, c Config, wishes <-chan wish, beside func(context.Context, Running)) error {
	if err := g.accept(c); err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	if err := g.now.applyErr; err != nil {
		return err // at the start this is a missing privilege or the like
	}
	events, stop := context.WithCancel(ctx)
	defer stop()
	if err := g.host.events(events, g.compareSoon); err != nil {
		return err
	}
	g.mu.Lock()
	g.now.ready = true
	g.mu.Unlock()
	g.log.Info("gateway ready", "peers", len(g.now.gateway.Peers), "mtu", g.now.mtu.tunnel,
		"listenPort", c.ListenPort, "namespace", g.host.namespacePath())
	if beside != nil {
		var group sync.WaitGroup
		defer group.Wait()
		defer stop()
		group.Go(func() { beside(events, Running{g}) })
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
			g.log.Info("gateway stopping")
			return nil
		case name := <-gone:
			return fmt.Errorf("the TUN %s is gone", name)
		case w := <-wishes:
			g.wish(w)
			compared = time.Now()
		case <-g.wake:
			if compare == nil {
				compare = time.After(compareDelay)
			}
		case <-compare:
			compare, compared = nil, time.Now()
			g.reapply()
		case now := <-second.C:
			g.tick(now)
			if now.Sub(compared) > compareInterval || g.now.applyErr != nil {
				compared = now
				g.reapply()
			}
		}
	}
}

// wish takes a new configuration, or the reason why there is none.
func (g *gateway) wish(w wish) {
	err := w.err
	if err == nil {
		if reflect.DeepEqual(w.config, g.now.config) && g.now.configErr == nil {
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

// accept checks a configuration as a whole and puts it into force. An error
// means that nothing has changed; what could not be made true is in applyErr.
func (g *gateway) accept(c Config) error {
	gw, problems := fabric.GatewayFor(c.Intent, 0)
	if len(problems) > 0 {
		errs := make([]error, len(problems))
		for i, p := range problems {
			errs[i] = p
		}
		return errors.Join(errs...)
	}
	if err := checkMTU(c.MTU, gw.Peers); err != nil {
		return err
	}
	gw.Peers = g.cutTunnels(gw.Peers)
	g.resolver.set(gw.Peers)
	mtu := g.mtusFor(c, gw.Peers)
	if err := g.engine.SetPeers(rulesFor(gw.Peers, mtu)); err != nil {
		g.resolver.set(g.now.gateway.Peers)
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
		} {
			if f.changed {
				g.log.Warn("takes effect at the next start only", "field", f.name)
			}
		}
	}
	g.mu.Lock()
	g.now.config, g.now.configErr = c, nil
	g.mu.Unlock()
	g.put(gw, mtu)
	g.mu.Lock()
	g.now.generation++ // only now: who waits for it finds what it says
	g.now.reloaded = time.Now()
	g.mu.Unlock()
	g.log.Info("configuration in force", "generation", g.now.generation, "peers", len(gw.Peers))
	return nil
}

// reapply makes the configuration in force true again, whatever changed around it.
func (g *gateway) reapply() {
	gw := g.now.gateway
	mtu := g.mtusFor(g.now.config, gw.Peers)
	if !mtu.equal(g.now.mtu) {
		gw.Peers = slices.Clone(gw.Peers) // others read the old ones
		if err := g.engine.SetPeers(rulesFor(gw.Peers, mtu)); err != nil {
			g.log.Error("rules for another MTU", "mtu", mtu.tunnel, "error", err) // they differ in MTU and MSS alone
			return
		}
	}
	g.put(gw, mtu)
}

// put makes everything but the engine's rules true, which are swapped already.
// It goes on after a failure; what failed is tried again every second.
func (g *gateway) put(gw fabric.Gateway, mtu mtus) {
	c, was := g.now.config, g.now.mtu
	sessions := make(map[string]*session, len(gw.Peers))
	for _, p := range gw.Peers {
		if sessions[p.ID] = g.now.sessions[p.ID]; sessions[p.ID] == nil || sessions[p.ID].key != p.PublicKey {
			sessions[p.ID] = &session{key: p.PublicKey, since: time.Now()}
		}
	}
	for _, p := range gw.Peers {
		if from, known := was.peers[p.ID]; known && from != mtu.of(p.ID) {
			g.log.Info("MTU towards a peer changed", "peer", p.ID, "from", from, "to", mtu.of(p.ID))
		}
	}
	if mtu.tunnel != was.tunnel {
		if was.tunnel != 0 {
			g.log.Info("tunnel MTU changed", "from", was.tunnel, "to", mtu.tunnel)
		}
		for _, e := range g.ends {
			e.path.SetMTU(mtu.tunnel)
		}
	}
	errs := g.applyEnds(c, gw.Peers)
	inUse := g.working()
	changes, err := g.host.apply(wantHost(remotes(gw.Peers, inUse), mtu.tunnel, len(g.ends)))
	if err != nil {
		errs = append(errs, err)
	}
	if len(changes) > 0 {
		g.log.Info("kernel objects set", "changes", len(changes))
		g.log.Debug("kernel objects set", "commands", changes.Commands(g.host.namespacePath()))
		g.metrics.repairs.Add(float64(len(changes)))
	}

	failed := errors.Join(errs...)
	if failed != nil && (g.now.applyErr == nil || g.now.applyErr.Error() != failed.Error()) {
		for _, e := range unjoin(failed) {
			g.log.Error("not applied, trying again", "error", e)
		}
	}
	g.mu.Lock()
	g.now.gateway, g.now.mtu, g.now.sessions, g.now.inUse, g.now.applyErr = gw, mtu, sessions, inUse, failed
	g.mu.Unlock()
	g.metrics.keep(gw.Peers)
}

// tick looks after the sessions, once a second.
func (g *gateway) tick(now time.Time) {
	stats, err := g.ends[0].stats()
	if err != nil {
		g.log.Error("peers not read", "error", err)
		return
	}
	states := make(map[string]*natengine.PeerState)
	for _, p := range g.engine.Peers() {
		states[p.ID()] = p
	}
	sessions := make(map[string]*session, len(g.now.sessions))
	changed := false
	for _, p := range g.now.gateway.Peers {
		s, was := stats[p.PublicKey], g.now.sessions[p.ID]
		next := was.after(s, now)
		if next.down != was.down {
			if next.down {
				g.log.Warn("no session with peer, dropping its packets", "peer", p.ID)
			} else {
				g.log.Info("session with peer is back", "peer", p.ID)
			}
		}
		if state := states[p.ID]; state != nil {
			state.SetDown(next.down)
		}
		heard := now.Sub(next.rxAt) < silence
		g.resolver.heard(p.ID, heard)
		// A peer that went silent where it roamed to may be back where it is
		// configured.
		if at, _ := g.resolver.endpoint(p.ID); !heard && at.IsValid() && s.endpoint != at && now.Sub(next.asserted) > lookupRetry {
			for i, e := range g.ends {
				if theirs, ok := theirEnd(p, i); ok {
					e.forget(theirs.PublicKey)
				}
			}
			next.asserted, changed = now, true
		}
		if next.endpoint.Addr() != was.endpoint.Addr() {
			changed = true // the way to it may have another MTU
		}
		sessions[p.ID] = &next
	}
	g.mu.Lock()
	g.now.sessions = sessions
	g.mu.Unlock()
	if changed || !maps.Equal(g.now.inUse, g.working()) {
		g.compareSoon()
	}
	g.resolver.tick(now)
	g.reach(stats, now)
}

// after is the session a moment later.
func (s session) after(stats wgStats, now time.Time) session {
	s.endpoint = stats.endpoint
	if stats.rx != s.rx {
		s.rx, s.rxAt = stats.rx, now
	}
	if stats.handshake.IsZero() {
		s.down = now.Sub(s.since) > sessionFirst
	} else {
		s.down = now.Sub(stats.handshake) > sessionGone
	}
	return s
}
