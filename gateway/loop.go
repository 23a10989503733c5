package gateway

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

// A loop is the control loop: it applies configurations to a gateway. Only one goroutine uses it.
type loop struct {
	*gateway
	now      current
	acting   bool // this gateway is active: Options.Begin is nil or closed
	adopted  bool
	located  locatedAddrs
	objects  kernel.State      // the last desired objects on the gateway's host
	delivery fabric.PodDecider // used only if podNetwork
}

// current is the configuration in force and the result of applying it.
type current struct {
	config      Config
	peers       []peer
	mtu         int              // of the tunnel, in octets
	generation  int              // number of applied configurations
	reloaded    time.Time        // when the last configuration was applied
	configErr   error            // reason why the newest configuration was rejected; nil if it is in force
	applyErr    error            // errors of applying the configuration; nil: all of it is applied
	undelivered []fabric.Problem // nodes and networks that a gateway in a Pod cannot reach
	ready       bool
}

// publish makes a copy of l.now available to other goroutines, which read it with gateway.current.
func (l *loop) publish() {
	now := l.now
	l.published.Store(&now)
}

// close ends the gateway and removes its kernel objects: first the routes to it, then the sockets
// and TUNs. Unreachable routes stay, so that no packet for a peer leaves in the clear.
func (l *loop) close() error {
	close(l.done)
	if l.keeper != nil {
		l.keeper.Deactivate()
	}
	l.endCapture()
	l.servers.Close()
	var err error
	if l.now.generation > 0 { // otherwise keep the objects of the previous gateway
		_, err = l.host.Apply(l.remainingObjects())
	}
	l.resolver.close()
	l.wg.Wait()
	if l.inBand != nil {
		l.inBand.server.Close()
	}
	l.closeTunnels()
	l.host.Close()
	l.log.Info("gateway stopped")
	return err
}

// remainingObjects returns the kernel objects that stay when the gateway ends.
func (l *loop) remainingObjects() kernel.State {
	if l.podNetwork {
		return fabric.GatewayPodLeft(l.now.wantedPeers())
	}
	return fabric.GatewayHostLeft(l.now.wantedPeers())
}

// adopt takes over the flows of the previous gateway. Further calls do nothing.
func (l *loop) adopt() {
	if l.keeper == nil || l.adopted {
		return
	}
	l.adopted = true
	if n := l.keeper.Activate(running{l.engine, l.tunnels}); n > 0 {
		l.log.Info("took over the flows of the previous active gateway", "flows", n)
	}
}

// applyFirst applies the first configuration. Unlike later ones, it must apply completely.
func (l *loop) applyFirst(c Config) error {
	if err := l.accept(c); err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	return l.now.applyErr // not retried: at the start the cause is, for example, a missing privilege
}

// begin makes the gateway active: it opens the sockets and applies the configuration as the first
// one. A standby was prepared before, and packets already wait in its TUNs. Its TUNs are read
// last, once flows and peers are in place.
func (l *loop) begin(c Config) error {
	prepared := l.now.generation > 0
	if l.acting = true; prepared {
		l.adopt()
	} else if err := l.startTunnels(c); err != nil {
		return err
	}
	newer := l.now.configErr // reason why a configuration newer than c was rejected; nil if none was rejected
	l.now.peers, l.now.generation = nil, 0
	if err := l.applyFirst(c); err != nil {
		return err
	}
	if prepared {
		if err := l.startTunnels(c); err != nil {
			return err
		}
	}
	l.now.ready, l.now.configErr = true, newer
	l.publish()
	l.log.Info("gateway ready", "peers", len(l.now.peers), "mtu", l.now.mtu, "listenPort", c.ListenPort, "namespace", l.host.Path())
	return nil
}

// run applies the first configuration, then handles updates and events until ctx ends.
func (l *loop) run(ctx context.Context, c Config, updates <-chan update, o Options) error {
	start, begin := l.begin, o.Begin
	if begin != nil {
		select {
		case <-begin:
			begin = nil
		default:
			start = l.applyFirst
		}
	}
	if err := start(c); err != nil {
		return err
	}
	events, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	err := l.host.Events(events, func() { l.remeasure.Store(true); l.compareSoon() })
	if err != nil {
		return err
	}
	beside := func() {
		if o.Beside != nil {
			group.Go(func() { o.Beside(events, Running{l.gateway}) })
		}
	}
	if l.acting {
		beside()
	}

	ended := l.watchTunnels()
	second := time.NewTicker(time.Second)
	defer second.Stop()
	var (
		compare  <-chan time.Time // fires compareDelay after the first event; nil: no event waits
		compared = time.Now()
	)
	for {
		select {
		case <-ctx.Done():
			if l.podNetwork && l.acting {
				l.drain()
			}
			l.log.Info("gateway stopping")
			return nil
		case name := <-ended:
			return fmt.Errorf("the TUN %s is gone", name)
		case u := <-updates:
			l.update(u)
		case <-l.wake:
			if compare == nil {
				compare = time.After(compareDelay)
			}
		case <-compare:
			compare = nil
			l.reapply(l.remeasure.Swap(false))
		case <-begin:
			if begin = nil; ctx.Err() != nil {
				continue
			}
			if err := l.begin(l.now.config); err != nil {
				return err
			}
			beside()
		case now := <-second.C:
			if l.acting {
				l.tick(now)
			} else {
				l.discard()
			}
			if now.Sub(compared) > compareInterval || l.now.applyErr != nil {
				compared = now
				l.reapply(true)
			}
		}
	}
}

// tick updates the state of the peers' sessions. It runs once a second.
func (l *loop) tick(now time.Time) {
	stats := make([]map[[32]byte]datapath.Stats, len(l.tunnels))
	for i, e := range l.tunnels {
		stats[i] = e.Stats()
	}
	peers := slices.Clone(l.now.peers)
	changed := false
	for i := range peers {
		p, was := &peers[i], &l.now.peers[i]
		p.updateSessions(stats, now)
		down := p.down()
		if down != was.down() {
			if down {
				l.log.Warn("no WireGuard session with the peer: dropping its packets", "peer", p.ID)
			} else {
				l.log.Info("WireGuard session with the peer restored", "peer", p.ID)
			}
		}
		if p.state != nil {
			p.state.SetDown(down)
		}
		l.resolver.setHeard(p.ID, now.Sub(p.lastHeard()) < silence)
		// A peer that roamed and then fell silent may have returned to its configured endpoint.
		at, _ := l.resolver.endpoint(p.ID)
		for i, s := range p.sessions {
			theirs, _ := theirEnd(p.GatewayPeer, i)
			if at.IsValid() && now.Sub(s.heard) >= silence && now.Sub(s.asserted) > lookupRetry && s.stats.Endpoint != netip.AddrPortFrom(at.Addr(), theirs.Port) {
				l.tunnels[i].Forget(theirs.PublicKey)
				s.asserted, p.forgotten, changed = now, true, true
			}
		}
		if p.session.stats.Endpoint.Addr() != was.session.stats.Endpoint.Addr() {
			changed = true // the route to the new address may have another MTU
			if was.session.stats.Endpoint.IsValid() {
				l.tunnels[0].checker.OtherPath(p.ID)
			}
		}
		changed = changed || p.inUse != l.workingTunnels(p.ID, now)
	}
	l.rekey(peers, now)
	l.now.peers = peers
	l.publish()
	if changed {
		l.compareSoon()
	}
	l.drops.poll(l.engine, now)
	l.resolver.tick(now)
	l.reach(stats, now)
}
