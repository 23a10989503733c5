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

// locatedAddrs holds the addresses that the last call of locate used. While these addresses stay
// the same, locate need not build the Site again.
type locatedAddrs struct {
	site, all fabric.Site
	own       []netip.Addr
}

// locate passes the peers to the resolver, with a fabric.Site that also refuses the addresses of
// the gateway's own host as addresses of peers. The host's addresses may change without a new
// configuration.
func (l *loop) locate(peers []*fabric.GatewayPeer, site fabric.Site) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		l.log.Warn("cannot read the addresses of this host", "error", err)
	}
	addrs := make([]netip.Addr, 0, len(own))
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			addrs = append(addrs, p.Addr())
		}
	}
	if was := &l.located; was.own == nil || !slices.Equal(addrs, was.own) || !site.Equal(was.site) {
		l.located = locatedAddrs{site, site.WithRelays(addrs, "an address of the gateway's own host"), addrs}
	}
	if !l.resolver.set(peers, l.located.all) {
		return
	}
	for _, e := range l.tunnels {
		e.SetSources(l.resolver.allowed)
		e.SetRelays(l.resolver.relaysFrom)
	}
}

// put applies everything of a survey except the engine's rules, which are already in force. It
// continues after an error; the loop tries failed parts again every second.
func (l *loop) put(s *survey) {
	if was := l.now.mtu; s.tunnel != was {
		if was != 0 {
			l.log.Info("tunnel MTU changed", "from", was, "to", s.tunnel)
		}
		for _, e := range l.tunnels {
			e.SetMTU(s.tunnel)
		}
	}
	var errs []error
	if l.acting {
		errs = append(l.moveTunnels(l.now.config.ListenPort), l.applyTunnels(l.now.config, s)...)
		errs = append(errs, l.inBand.set(s.peers))
	}
	objects, undelivered, err := l.objectsFor(s)
	if err != nil {
		errs = append(errs, err)
	}
	changes, err := l.host.Apply(objects)
	if err != nil {
		errs = append(errs, err)
	}
	if l.host.Busy() {
		l.compareSoon()
	}
	// Without its packet filter, the overlay would accept packets from anybody. So remove the
	// overlay.
	if errors.Is(err, rtnl.ErrFilter) {
		if _, err := l.host.Apply(l.remainingObjects()); err != nil {
			errs = append(errs, err)
		}
	}
	for _, p := range undelivered {
		if !slices.Contains(l.now.undelivered, p) {
			l.log.Warn("packets cannot be delivered", "problem", p.Error())
		}
	}
	if len(changes) > 0 {
		l.log.Info("kernel objects set", "changes", len(changes))
		l.log.Debug("kernel objects set", "commands", changes.Commands(l.host.Path()))
		l.metrics.repairs.Add(float64(len(changes)))
	}

	failed := errors.Join(errs...)
	if failed != nil && (l.now.applyErr == nil || l.now.applyErr.Error() != failed.Error()) {
		for _, e := range unjoin(failed) {
			l.log.Error("cannot apply the configuration; retrying", "error", e)
		}
	}
	l.now.peers, l.now.mtu, l.now.applyErr, l.now.undelivered = s.peers, s.tunnel, failed, undelivered
	l.publish()
}

// fewNodes is the number of nodes whose routes are queried for their MTU. Some CNIs set the MTU on
// a Pod's routes instead of its device. A few routes are enough, because the MTU is the same for
// all nodes.
const fewNodes = 16

// objectsFor returns the desired kernel objects for the peers, and the nodes and networks that a
// gateway in a Pod cannot reach.
func (l *loop) objectsFor(s *survey) (kernel.State, []fabric.Problem, error) {
	if !l.podNetwork && !s.routed {
		return l.objects, nil, nil
	}
	want, inUse := make([]*fabric.GatewayPeer, len(s.peers)), make(map[string]fabric.TunnelSet)
	for i := range s.peers {
		p := &s.peers[i]
		if want[i] = p.GatewayPeer; p.inUse != 0 {
			inUse[p.ID] = p.inUse
		}
	}
	if !l.podNetwork {
		l.objects = fabric.GatewayHostFor(want, inUse, s.tunnel, len(l.tunnels))
		return l.objects, nil, nil
	}
	in := l.now.config.PodNetwork
	_, underlay, err := l.host.DeviceOf(in.Pod)
	links := make(map[int]int)
	for _, n := range in.Nodes[:min(len(in.Nodes), fewNodes)] {
		if least, unknown := l.host.MTUTo(n.Underlay(), links); unknown == nil && err == nil {
			underlay = min(underlay, least)
		}
	}
	state, undelivered := l.delivery.GatewayPodFor(want, inUse, s.tunnel, len(l.tunnels), underlay, in)
	return state, undelivered, err
}
