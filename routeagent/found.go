package routeagent

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/diff"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

// If there are more than manyPaths destinations of outer packets, their paths are not probed after
// each event, but only every limitsInterval.
const manyPaths = 100

// pathCache caches the paths of outer packets.
type pathCache struct {
	at           time.Time
	own          netip.Addr
	outer, nodes []netip.Addr
	devices      []string
	mtu          int

	gateways         []fabric.GatewayPod
	bridges, uplinks []string
}

// underlay returns the devices of the underlay, and the smallest MTU on the paths of outer packets.
// The devices are the one with the node's address, and those through which the node reaches other
// nodes. If no path is known, underlay returns the MTU of the device with the node's address.
// Otherwise this MTU is not used: a CNI may have its own overlay with a smaller MTU, and the
// address may be on lo. If refresh is false and the addresses have not changed, underlay returns
// the cached result.
func (l *loop) underlay(own netip.Addr, in fabric.NodeIntent, refresh bool) ([]string, int, error) {
	outer, nodes := in.Carriers()
	w := &l.paths
	many := len(outer) > manyPaths && time.Since(w.at) < limitsInterval
	if same := w.own == own && slices.Equal(w.outer, outer) && slices.Equal(w.nodes, nodes); same && (!refresh || many) {
		return w.devices, w.mtu, nil
	}
	device, mtu, err := l.kernel.DeviceOf(own)
	devices, least := []string{device}, 0
	mtus, names := make(map[int]int), make(map[int]string)
	for _, to := range outer {
		if mtu, unknown := l.kernel.MTUTo(to, mtus); unknown == nil && (least == 0 || mtu < least) {
			least = mtu
		}
	}
	for _, to := range nodes {
		if name, unknown := l.kernel.DeviceTo(to, names); unknown == nil && !slices.Contains(devices, name) {
			devices = append(devices, name)
		}
	}
	w.at, w.own, w.outer, w.nodes, w.devices, w.mtu = time.Now(), own, outer, nodes, devices, cmp.Or(least, mtu)
	if err != nil {
		w.own = netip.Addr{} // makes the next call probe again
	}
	return w.devices, w.mtu, err
}

// bridges returns the bridges through which our node reaches gateways' Pods on any node. It also
// returns the ports of these bridges that lead to other nodes. If refresh is false and the gateways
// have not changed, it returns the cached result.
func (l *loop) bridges(in fabric.NodeIntent, refresh bool) (names, uplinks []string) {
	w, gateways := &l.paths, in.Senders()
	if !refresh && slices.Equal(w.gateways, gateways) {
		return w.bridges, w.uplinks
	}
	for _, g := range gateways {
		name, kind, err := l.kernel.KindTo(g.Addr)
		if err != nil || kind != "bridge" || slices.Contains(names, name) {
			continue
		}
		names = append(names, name)
		if ports, err := l.kernel.Uplinks(name); err == nil {
			uplinks = append(uplinks, ports...)
		}
	}
	w.gateways, w.bridges, w.uplinks = gateways, names, uplinks
	return names, uplinks
}

// refuseNew adds the routes and rules that refuse packets for new networks, before the rest of the
// state is applied. Pods may already send packets to these networks, and applying the packet filter
// alone takes 10 ms.
func (l *loop) refuseNew(refused []netip.Prefix) (added []netip.Prefix, changes kernel.Plan, err error) {
	added, _, _ = diff.Of(l.refused, refused, func(p netip.Prefix) netip.Prefix { return p })
	if len(added) > 0 {
		changes, err = l.kernel.Add(fabric.RefusingState(added))
	}
	if err == nil {
		l.refused = refused
	}
	return added, changes, err
}

// forwards returns an error if the node does not forward packets at all. The agent does not change
// this setting, because it belongs to the owner of the node or to the CNI.
func forwards() error {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	if err != nil {
		return err
	}
	if v := string(bytes.TrimSpace(b)); v != "1" {
		return fmt.Errorf("net.ipv4.ip_forward is %s: the node does not forward packets of pods; want 1", v)
	}
	return nil
}

// manyNetworks is the number of networks of peers that one call of findDiverted looks up.
// Successive calls go through all networks.
const manyNetworks = 16

// findDiverted searches for a network of a peer for which a foreign rule or route diverts packets
// from our routes, and reports the first one. Our packet filter drops these packets. Unless refresh
// is true, it checks only the networks in added.
func (l *loop) findDiverted(self string, refresh bool, added []netip.Prefix) []fabric.Problem {
	refused := func(p netip.Prefix) (int, bool) {
		return slices.BinarySearchFunc(l.decided.refused, p, netip.Prefix.Compare)
	}
	if _, found := refused(l.diverted); refresh || !found {
		l.diverted = netip.Prefix{}
	}
	names := make(map[int]string)
	diverts := func(p netip.Prefix) bool {
		if p.Addr().Is4() && p.Bits() <= 30 {
			name, err := l.kernel.DeviceTo(p.Addr().Next(), names)
			if err == nil && name != "lo" && !strings.HasPrefix(name, kernel.TunPrefix) { // on an error, the kernel refuses packets to this network
				l.diverted, l.divertedTo = p, name
			}
		}
		return l.diverted.IsValid()
	}
	if refresh { // continue where the previous call stopped
		first, _ := refused(l.nextLookup)
		for i := range min(manyNetworks, len(l.decided.refused)) {
			p := l.decided.refused[(first+i)%len(l.decided.refused)]
			if l.nextLookup = p; diverts(p) {
				break
			}
			l.nextLookup = l.decided.refused[(first+i+1)%len(l.decided.refused)]
		}
	} else if !l.diverted.IsValid() {
		for _, p := range added[:min(manyNetworks, len(added))] {
			if diverts(p) {
				break
			}
		}
	}
	if !l.diverted.IsValid() {
		return nil
	}
	return []fabric.Problem{{Origin: fabric.Origin{Kind: "Node", Name: self}, Message: fmt.Sprintf(
		"packets for %v, a network of a peer, are routed to device %s and dropped, because a routing rule of another program precedes that of Isthmus (ip rule); give that rule a priority above %d, or exclude networks of peers from it",
		l.diverted, l.divertedTo, kernel.RefuseRulePriority)}}
}

// nowhere is an address to which only the default route should lead (TEST-NET-1, RFC 5737).
var nowhere = netip.AddrFrom4([4]byte{192, 0, 2, 1})

// reach caches whether other nodes can reach a gateway's Pod on this node.
type reach struct {
	remotePod netip.Addr // see NodeIntent.RemotePodAddr
	bridged   bool
	limits    []kernel.Limit
}

// limits returns the restrictions that rules of other programs cause. Without peers, there are no
// restrictions. The result is cached. limits computes it again if refresh is true, if an input has
// changed, or if the address of a pod of another node is unknown.
func (l *loop) limits(node kernel.State, in fabric.NodeIntent, refresh bool) []kernel.Limit {
	if len(node.SourceNAT) == 0 || node.SourceNAT[0].Remote == "" {
		l.reach = reach{}
		return nil
	}
	remotePod := in.RemotePodAddr()
	if refresh = refresh || l.reach.remotePod != remotePod || l.reach.bridged != in.Bridged || !remotePod.IsValid(); refresh {
		l.reach = reach{remotePod, in.Bridged, l.outOfReach(remotePod, in)}
	}
	return append(l.kernel.Limits(node.SourceNAT[0], refresh), l.reach.limits...)
}

// withFiles updates the Limits about the node's snapshot and the node's vote. Faults of these do
// not stop traffic: the node needs the snapshot only to boot without an API server, and a gateway
// needs only the votes of a majority of nodes.
func (l *loop) withFiles(limits []kernel.Limit, unsaved error) []kernel.Limit {
	limits = slices.DeleteFunc(slices.Clone(limits), func(l kernel.Limit) bool {
		return l.Reason == kernel.LimitSnapshot || l.Reason == kernel.LimitVote
	})
	if unsaved != nil {
		limits = append(limits, kernel.Limit{Reason: kernel.LimitSnapshot, Message: fmt.Sprintf(
			"%v; until this is repaired, the node does not refuse the networks of peers between a reboot and the first answer of the API server", unsaved)})
	}
	if l.opts.Voter == nil {
		return limits
	}
	if err := l.opts.Voter.Err(); err != nil {
		limits = append(limits, kernel.Limit{Reason: kernel.LimitVote, Message: fmt.Sprintf(
			"%v; until this is repaired, this node does not vote, and a gateway needs its majority of votes from the other nodes", err)})
	}
	return limits
}

// outOfReach returns a Limit if other nodes cannot reach gateways' Pods on this node. remotePod is
// an address that only a pod of another node can have.
func (l *loop) outOfReach(remotePod netip.Addr, in fabric.NodeIntent) []kernel.Limit {
	if !remotePod.IsValid() {
		return nil
	}
	name, kind, err := l.kernel.KindTo(remotePod)
	if out, _, unknown := l.kernel.KindTo(nowhere); unknown == nil && out == name {
		return nil // only the default route matches, so no pod has the address
	}
	if uplinks, unknown := l.kernel.Uplinks(name); kind == "bridge" && unknown == nil && len(uplinks) > 0 && (in.Bridged || !slices.Contains(in.Bridges, name)) {
		return nil
	}
	if err != nil || kind != "veth" && kind != "bridge" || slices.Contains(in.UnderlayDevices, name) {
		return nil
	}
	return []kernel.Limit{{Reason: kernel.LimitGateway, Message: fmt.Sprintf(
		"device %s leads to pods of other nodes, but is a %s like the devices of pods, so the packet filter cannot distinguish other nodes from pods: while the gateway's Pod runs on this node, other nodes do not reach it; want gateways with --host-network", name, kind)}}
}
