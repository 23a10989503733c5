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

// manyWays is how many ways of outer packets are looked at after events; of more it is done at intervals.
const manyWays = 100

// ways is what was found out of an intent's.
type ways struct {
	at           time.Time
	own          netip.Addr
	outer, nodes []netip.Addr
	devices      []string
	mtu          int

	gateways         []fabric.GatewayPod
	bridges, uplinks []string
}

// underlay are the device with the node's address and those by which it reaches other nodes, and the
// least MTU of the ways that outer packets take: a CNI may have an overlay of its own, and the node's
// address may be on lo. Where no way is known it is that of the device. Without look it is as it was.
func (a *agent) underlay(own netip.Addr, in fabric.NodeIntent, look bool) ([]string, int, error) {
	outer, nodes := in.Carriers()
	w := &a.ways
	many := len(outer) > manyWays && time.Since(w.at) < limitsInterval
	if same := w.own == own && slices.Equal(w.outer, outer) && slices.Equal(w.nodes, nodes); same && (!look || many) {
		return w.devices, w.mtu, nil
	}
	device, mtu, err := a.kernel.DeviceOf(own)
	devices, least := []string{device}, 0
	mtus, names := make(map[int]int), make(map[int]string)
	for _, to := range outer {
		if mtu, unknown := a.kernel.MTUTo(to, mtus); unknown == nil && (least == 0 || mtu < least) {
			least = mtu
		}
	}
	for _, to := range nodes {
		if name, unknown := a.kernel.DeviceTo(to, names); unknown == nil && !slices.Contains(devices, name) {
			devices = append(devices, name)
		}
	}
	w.at, w.own, w.outer, w.nodes, w.devices, w.mtu = time.Now(), own, outer, nodes, devices, cmp.Or(least, mtu)
	if err != nil {
		w.own = netip.Addr{} // it is asked again
	}
	return w.devices, w.mtu, err
}

// bridges are those by which gateways' Pods are reached, here or on another node, and the ports of these
// that lead to other nodes. Without look they are as they were.
func (a *agent) bridges(in fabric.NodeIntent, look bool) (names, uplinks []string) {
	w, gateways := &a.ways, in.Ways()
	if !look && slices.Equal(w.gateways, gateways) {
		return w.bridges, w.uplinks
	}
	for _, g := range gateways {
		name, kind, err := a.kernel.KindTo(g.Addr)
		if err != nil || kind != "bridge" || slices.Contains(names, name) {
			continue
		}
		names = append(names, name)
		if ports, err := a.kernel.Uplinks(name); err == nil {
			uplinks = append(uplinks, ports...)
		}
	}
	w.gateways, w.bridges, w.uplinks = gateways, names, uplinks
	return names, uplinks
}

// refuseNew refuses networks that are new before anything else is done: the packet filter alone
// takes ten milliseconds, and pods may know the networks already.
func (a *agent) refuseNew(refused []netip.Prefix) (news []netip.Prefix, changes kernel.Plan, err error) {
	news, _, _ = diff.Of(a.refused, refused, func(p netip.Prefix) netip.Prefix { return p })
	if len(news) > 0 {
		changes, err = a.kernel.Add(fabric.RefusingState(news))
	}
	if err == nil {
		a.refused = refused
	}
	return news, changes, err
}

// forwards says what is wrong when the node does not forward packets at all. That is the owner's to
// change, or the CNI's.
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

// manyNetworks is how many networks of peers are looked up at a time: with those that follow all of
// them, in turn.
const manyNetworks = 16

// ledElsewhere names a network of a peer whose packets a foreign rule or route keeps from our routes. Our
// packet filter drops what goes there. Without look it looks at those that are new.
func (a *agent) ledElsewhere(self string, look bool, news []netip.Prefix) []fabric.Problem {
	refused := func(p netip.Prefix) (int, bool) {
		return slices.BinarySearchFunc(a.decided.refused, p, netip.Prefix.Compare)
	}
	if _, is := refused(a.led); look || !is {
		a.led = netip.Prefix{}
	}
	names := make(map[int]string)
	led := func(p netip.Prefix) bool {
		if p.Addr().Is4() && p.Bits() <= 30 {
			name, err := a.kernel.DeviceTo(p.Addr().Next(), names)
			if err == nil && name != "lo" && !strings.HasPrefix(name, kernel.TunPrefix) { // an error: it is refused
				a.led, a.ledBy = p, name
			}
		}
		return a.led.IsValid()
	}
	if look { // from the one that comes after those of the last time, or was found then
		first, _ := refused(a.looksAt)
		for i := range min(manyNetworks, len(a.decided.refused)) {
			p := a.decided.refused[(first+i)%len(a.decided.refused)]
			if a.looksAt = p; led(p) {
				break
			}
			a.looksAt = a.decided.refused[(first+i+1)%len(a.decided.refused)]
		}
	} else if !a.led.IsValid() {
		for _, p := range news[:min(manyNetworks, len(news))] {
			if led(p) {
				break
			}
		}
	}
	if !a.led.IsValid() {
		return nil
	}
	return []fabric.Problem{{Origin: fabric.Origin{Kind: "Node", Name: self}, Message: fmt.Sprintf(
		"packets for %v, a network of a peer, are led elsewhere, by %s, and dropped: a rule of others comes before ours (ip rule); want it after priority %d, or not for networks of peers",
		a.led, a.ledBy, kernel.RefuseRulePriority)}}
}

// nowhere is an address that only the default route leads to (TEST-NET-1, RFC 5737).
var nowhere = netip.AddrFrom4([4]byte{192, 0, 2, 1})

// reach is whether other nodes reach a gateway's Pod here, as far as that was found out.
type reach struct {
	elsewhere netip.Addr // from this address
	bridged   bool
	limits    []kernel.Limit
}

// limits are what foreign rules keep from working, while there are peers. Without look these are as
// they were.
func (a *agent) limits(node kernel.State, in fabric.NodeIntent, look bool) []kernel.Limit {
	if len(node.SourceNAT) == 0 || node.SourceNAT[0].Remote == "" {
		a.reach = reach{}
		return nil
	}
	elsewhere := in.Elsewhere()
	if look = look || a.reach.elsewhere != elsewhere || a.reach.bridged != in.Bridged || !elsewhere.IsValid(); look {
		a.reach = reach{elsewhere, in.Bridged, a.outOfReach(elsewhere, in)}
	}
	return append(a.kernel.Limits(node.SourceNAT[0], look), a.reach.limits...)
}

// withFiles replaces the Limits of what the node keeps in files. All traffic passes without these: the snapshot is for a boot at
// which the API server does not answer, and a gateway needs the votes of most nodes, not of all.
func (a *agent) withFiles(limits []kernel.Limit, unsaved error) []kernel.Limit {
	limits = slices.DeleteFunc(slices.Clone(limits), func(l kernel.Limit) bool {
		return l.Reason == kernel.LimitSnapshot || l.Reason == kernel.LimitVote
	})
	if unsaved != nil {
		limits = append(limits, kernel.Limit{Reason: kernel.LimitSnapshot, Message: fmt.Sprintf(
			"%v; until that is mended, this node refuses the networks of peers after a reboot only from the moment the API server answers", unsaved)})
	}
	if a.opts.Voter == nil {
		return limits
	}
	if err := a.opts.Voter.Err(); err != nil {
		limits = append(limits, kernel.Limit{Reason: kernel.LimitVote, Message: fmt.Sprintf(
			"%v; until that is mended, a gateway needs a majority of the other nodes' votes", err)})
	}
	return limits
}

// outOfReach is the Limit that other nodes do not reach a gateway's Pod here, if that is so, from an
// address elsewhere.
func (a *agent) outOfReach(elsewhere netip.Addr, in fabric.NodeIntent) []kernel.Limit {
	if !elsewhere.IsValid() {
		return nil
	}
	name, kind, err := a.kernel.KindTo(elsewhere)
	if out, _, unknown := a.kernel.KindTo(nowhere); unknown == nil && out == name {
		return nil // by the default route: nobody has the address
	}
	if uplinks, unknown := a.kernel.Uplinks(name); kind == "bridge" && unknown == nil && len(uplinks) > 0 && (in.Bridged || !slices.Contains(in.Bridges, name)) {
		return nil
	}
	if err != nil || kind != "veth" && kind != "bridge" || slices.Contains(in.UnderlayDevices, name) {
		return nil
	}
	return []kernel.Limit{{Reason: kernel.LimitGateway, Message: fmt.Sprintf(
		"pods of other nodes are reached by %s, a %s as devices of pods are, so that our packet filter cannot tell other nodes from pods: while the gateway's Pod runs here, other nodes do not reach it; want gateways with --host-network", name, kind)}}
}
