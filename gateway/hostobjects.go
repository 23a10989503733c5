package gateway

import (
	"errors"
	"net"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// located has the last arguments of locate, and their results.
type located struct {
	site, all fabric.Site
	own       []netip.Addr
}

// locate tells the resolver at which addresses peers may be: not at an address of the gateway's
// host. Those addresses change without a new configuration.
func (g *gateway) locate(peers []*fabric.GatewayPeer, site fabric.Site) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		g.log.Warn("cannot read the addresses of this host", "error", err)
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

// put applies everything except the engine's rules, which are already in force. It goes on after an
// error. Failed parts are tried again every second.
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
	// without the filter, the overlay would accept packets from anybody
	if errors.Is(err, rtnl.ErrFilter) {
		if _, err := g.host.Apply(g.left()); err != nil {
			errs = append(errs, err)
		}
	}
	for _, p := range undelivered {
		if !slices.Contains(g.now.undelivered, p) {
			g.log.Warn("packets cannot be delivered", "problem", p.Error())
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
			g.log.Error("cannot apply the configuration; retrying", "error", e)
		}
	}
	g.mu.Lock()
	g.now.peers, g.now.mtu, g.now.applyErr, g.now.undelivered = s.peers, s.tunnel, failed, undelivered
	g.mu.Unlock()
}

// fewNodes nodes are enough to find the MTU of a Pod's routes, which is the same for all nodes.
// Some CNIs set it on the routes, and not on the Pod's device.
const fewNodes = 16

// objectsFor returns the kernel objects for the peers.
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
