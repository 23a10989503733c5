// Package routeagent applies the result of fabric.NodeFor on one node of a cluster: the VXLAN
// device between the nodes, and the routes and rules by which packets of pods reach the gateway and
// answers return on the same path.
//
//	Nodes, Pods, TunnelEndpoints ─► fabric.NodeIntent ─ fabric.NodeFor ─► kernel.State ─ rtnl ─► kernel
//	                                                                         netlink events ─┘ (compare again)
//
// The kernel holds the only record of the applied state. So an agent that follows a killed one
// finds everything in place and changes nothing.
package routeagent

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/diff"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// How often the agent compares.
const (
	compareGap    = 100 * time.Millisecond // at least between two comparisons: events come in bursts
	retryInterval = time.Second            // after a failure
	busyInterval  = 100 * time.Millisecond // while others change iptables-legacy, or nftables
	// limitsInterval is how long rules of others are not read again, of which nobody tells.
	limitsInterval = 9 * time.Second
)

// compareInterval is how long it does not compare without any event. Only tests change it.
var compareInterval = 10 * time.Second

// A Source delivers the complete intent, and what is wrong with the objects it was read from: once
// when everything is known for the first time, and again after every change. Self and UnderlayMTU
// are filled in by the agent. It returns when ctx ends, or with an error when it cannot go on. It
// does not call deliver twice at a time, and delivers nothing rather than less than it knew before.
type Source func(ctx context.Context, deliver func(fabric.NodeIntent, []fabric.Problem)) error

// Options of Run.
type Options struct {
	Node           string // name of the Node on which the agent runs
	Source         Source
	Log            *slog.Logger
	Version        string
	MetricsAddress string // TCP host:port of /metrics, /healthz and /readyz; empty: none
	StatusAddress  string // TCP host:port of /status; empty: none
	StateDirectory string // of the snapshot; empty: none is kept
	// Tell stores for the manager which networks the node reaches without the tunnel. It may be
	// nil, and is never called concurrently.
	Tell func(context.Context, fabric.NodeNetworks) error
	// TellRefused stores the resourceVersion of the NetworkAllocations up to which the node refuses
	// packets, in addition to what Tell stores. It may be nil, and is never called concurrently.
	TellRefused func(context.Context, int64) error
	// TellReady stores for people why the node is not ready; "" means that it is. It may be nil. It
	// is called once a second, and never concurrently.
	TellReady func(ctx context.Context, problem string) error
	Voter     Voter  // nil: the node does not vote on which gateway is active
	Resolvers string // path of the node's resolv.conf(5)
	// MetricsSecure guards /metrics, and all of MetricsAddress is TLS then; nil: anybody may read.
	MetricsSecure *httpserve.Secure
	Pod           string // UID of the agent's Pod, by which Started finds it; empty: none
}

// A Voter gives the node's vote on which gateway is active.
type Voter interface {
	Run(ctx context.Context)
	Err() error // why the node does not vote although it should; nil: it does. It may be called while Run runs, as the next.
	// Refused is how many datagrams were read and refused, and how many the kernel dropped because too many came.
	Refused() (read, unread uint64)
}

// Run applies the source's state to the network namespace of the process until ctx ends, and then
// returns nil. It leaves the kernel's objects in place, so that no packet for a remote network
// bypasses the tunnel while no agent runs; Cleanup removes them. Until the source delivers for the
// first time, the objects of the previous agent stay in force, and networks in the snapshot are
// refused; after a reboot there is only the snapshot. If the source fails, Run returns its error.
//
// While another agent runs in the namespace, Run only follows the source, and takes over as soon as
// that agent ends, so an upgrade leaves no node without an agent. Until then it neither changes the
// kernel nor listens at an address.
func Run(ctx context.Context, o Options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a := &agent{opts: o, log: o.Log, wake: make(chan struct{}, 1), moved: make(chan struct{}, 1), refusing: make(chan struct{}, 1), urgent: make(chan struct{}, 1)}
	a.metrics = newMetrics(a)
	starting, err := a.tellStarted()
	if err != nil {
		return err
	}
	defer starting.Close()
	if err := rtnl.MayChange(); err != nil {
		return err
	}

	failed := make(chan error, 1)
	var source sync.WaitGroup
	defer source.Wait()
	defer cancel()
	watch := func() {
		source.Go(func() {
			if err := o.Source(ctx, a.deliver); err != nil && ctx.Err() == nil {
				failed <- err
			}
		})
	}
	k, err := rtnl.Open(kernel.RouteAgent, o.Log)
	follows := errors.Is(err, rtnl.ErrOther)
	if follows {
		o.Log.Info("following the agent that runs here", "agent", err)
		watch()
		k, err = a.follow(ctx, failed, func(ctx context.Context) (*rtnl.Kernel, error) { return rtnl.Follow(ctx, kernel.RouteAgent, a.log) })
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer k.Close()
	defer source.Wait() // it may use the kernel
	defer cancel()
	a.kernel = k
	if err := a.restore(k.Refused); err != nil {
		return err
	}
	servers, err := a.listen()
	if err != nil {
		return err
	}
	defer servers.Close()
	if err := k.Events(ctx, a.happened); err != nil {
		return err
	}
	a.has.Store(true)
	if o.Tell != nil {
		if err := k.WatchNetworks(ctx, func() { set(a.moved) }); err != nil {
			return err
		}
		source.Go(func() { a.tell(ctx) })
	}
	if o.TellRefused != nil {
		source.Go(func() { a.tellRefused(ctx) })
	}
	if o.TellReady != nil {
		source.Go(func() { a.tellReady(ctx) })
	}
	source.Go(func() { a.probeOverlay(ctx) })
	if o.Voter != nil {
		source.Go(func() { o.Voter.Run(ctx) })
	}
	if !follows {
		watch()
	}
	return a.loop(ctx, failed)
}

// follow waits, in open, until the agent that runs here has ended. An error of the source that open
// no longer heeds stays in failed, which has room for one, for the loop.
func (a *agent) follow(ctx context.Context, failed chan error, open func(context.Context) (*rtnl.Kernel, error)) (*rtnl.Kernel, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	var group sync.WaitGroup
	defer group.Wait()
	defer close(done)
	group.Go(func() {
		select {
		case err := <-failed:
			failed <- err
			cancel(fmt.Errorf("source: %w", err))
		case <-done:
			cancel(nil)
		}
	})
	k, err := open(ctx)
	if err != nil && ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err == nil {
		a.log.Info("the agent before has ended")
	}
	return k, err
}

// agent is one run. Only loop touches the kernel.
type agent struct {
	opts    Options
	log     *slog.Logger
	kernel  *rtnl.Kernel
	metrics *metrics
	wake    chan struct{} // compare again
	moved   chan struct{} // what the node reaches without us may have changed
	urgent  chan struct{} // and do not wait: networks or gateways of peers are others

	refusing chan struct{} // what the node refuses may have to be told
	has      atomic.Bool   // the kernel, which no other agent has

	mu       sync.Mutex
	intent   *fabric.NodeIntent // nil: not delivered yet
	broken   []fabric.Problem   // of reading intent
	revision int                // of intent, from 1
	state    state
	told     told
	overlay  OverlayStatus
	hops     []fabric.NodeRoute // routes of the node by other hosts
	reported bool               // there is a report of this node

	events  atomic.Bool    // something may have changed around us
	looked  time.Time      // when it was last looked what is around us; the loop's alone
	ways    ways           // the last that were found; the loop's alone
	reach   reach          // the last that was found; the loop's alone
	grants  grants         // what peers have; the loop's alone
	decider fabric.Decider // the loop's alone
	decided decided        // the loop's alone
	refused []netip.Prefix // what the last comparison refused; the loop's alone
	looksAt netip.Prefix   // where ledElsewhere goes on; the loop's alone
	led     netip.Prefix   // what it found, zero: none; the loop's alone
	ledBy   string         // the device of that
	saved   *snapshot      // nil: there is none that is good. The loop's alone
}

// state is the outcome of the last comparison.
type state struct {
	revision int // of the intent compared with; 0: none yet
	node     kernel.State
	refused  int64 // up to this resourceVersion of the NetworkAllocations; 0: not known
	problems []fabric.Problem
	limits   []kernel.Limit
	err      error
	applied  time.Time // when err was last nil
}

func (a *agent) deliver(in fabric.NodeIntent, broken []fabric.Problem) {
	a.mu.Lock()
	before := a.intent
	urgent := before == nil || !slices.Equal(before.Named, in.Named) || !slices.Equal(before.Freed, in.Freed) || before.Gateway != in.Gateway ||
		!reflect.DeepEqual(before.Tunnels, in.Tunnels) || !slices.Equal(before.Gateways, in.Gateways)
	moved := before == nil || !slices.Equal(before.Own, in.Own) || madeAt(before, a.opts.Node) != madeAt(&in, a.opts.Node) ||
		!slices.Equal(before.PodNetworks(), in.PodNetworks())
	a.intent, a.broken = &in, broken
	a.revision++
	a.mu.Unlock()
	if urgent {
		set(a.urgent)
	}
	a.notify()
	if moved {
		set(a.moved)
	}
}

// notify says "compare again".
func (a *agent) notify() { set(a.wake) }

// happened is notify for events of the kernel.
func (a *agent) happened() {
	a.events.Store(true)
	a.notify()
}

func set(signal chan<- struct{}) {
	select {
	case signal <- struct{}{}:
	default: // it is set
	}
}

func (a *agent) loop(ctx context.Context, failed <-chan error) error {
	timer := time.NewTimer(compareInterval)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			a.log.Info("route agent ended; what it made stays, see --cleanup")
			return nil
		case err := <-failed:
			return fmt.Errorf("source: %w", err)
		case <-a.wake:
		case <-timer.C:
		}
		select {
		case <-a.urgent: // it is being done
		default:
		}
		switch {
		case !a.compare():
			timer.Reset(retryInterval)
		case a.kernel.Busy():
			timer.Reset(busyInterval)
		default:
			timer.Reset(compareInterval)
		}
		select {
		case <-ctx.Done():
		case <-a.urgent:
			a.notify()
		case <-time.After(compareGap):
		}
	}
}

// decided is what was read of an intent, and decided for it. It is the same until the intent is another, or
// what the node says of itself.
type decided struct {
	revision int
	intent   fabric.NodeIntent // without what only the node itself can say
	refused  []netip.Prefix    // all networks of peers
	held     []fabric.Problem  // of reading them

	from     *fabric.NodeIntent // with that, as it was decided; nil: it was not yet
	node     kernel.State
	problems []fabric.Problem
}

// read takes an intent, unless it was read before.
func (a *agent) read(in fabric.NodeIntent, revision int) {
	if a.decided.revision == revision {
		return
	}
	in.Self = a.opts.Node
	was := a.decided
	held := a.grants.read(in.Allocations)
	in.Granted = a.grants.networks
	a.decided = decided{revision: revision, intent: in, refused: was.refused, held: held}
	if was.revision == 0 || len(in.Tunnels)+len(was.intent.Tunnels) > 0 || !slices.Equal(in.Granted, was.intent.Granted) {
		a.decided.refused = in.Refused()
	}
}

// decide decides what our node has to be, unless it was decided from the same before: in is the intent
// with what the node itself says.
func (a *agent) decide(in fabric.NodeIntent) {
	d := &a.decided
	if d.from != nil && slices.Equal(d.from.Routes, in.Routes) && d.from.UnderlayMTU == in.UnderlayMTU && d.from.Bridged == in.Bridged && slices.Equal(d.from.UnderlayDevices, in.UnderlayDevices) &&
		slices.Equal(d.from.Bridges, in.Bridges) && slices.Equal(d.from.Uplinks, in.Uplinks) {
		return
	}
	d.from = &in
	d.node, d.problems = a.decider.NodeFor(in)
}

// compare makes the kernel's state what it should be now; false means that some of it failed.
func (a *agent) compare() bool {
	a.mu.Lock()
	revision, broken, before, hops := a.revision, a.broken, a.state, a.hops
	var in fabric.NodeIntent
	if a.intent != nil {
		in = *a.intent
	}
	a.mu.Unlock()
	if revision == 0 {
		return true // what is there stays
	}

	now := state{revision: revision, node: before.node, refused: before.refused, applied: before.applied, limits: before.limits}
	// What is around us an intent does not change. Of routes of others no event is heeded.
	look := a.events.Swap(false) || time.Since(a.looked) > limitsInterval || before.err != nil
	if look {
		a.looked = time.Now()
	}
	a.read(in, revision)
	in = a.decided.intent
	self := slices.IndexFunc(in.Nodes, func(n fabric.ClusterNode) bool { return n.Name == in.Self })
	var changes kernel.Plan
	if self < 0 {
		// The Node is made anew, or --node-name is wrong: no reason to cut off what works.
		refusing, _ := fabric.NodeFor(in)
		changes, _ = a.kernel.Add(refusing)
		now.err = fmt.Errorf("no Node is called %q; want the name of the one on which the agent runs", in.Self)
	} else {
		var unknownMTU, err error
		if addr := in.Nodes[self].Underlay(); addr.IsValid() {
			in.UnderlayDevices, in.UnderlayMTU, unknownMTU = a.underlay(addr, in, look)
		}
		in.Routes = hops
		in.Bridges, in.Uplinks = a.bridges(in, look)
		in.Bridged = a.kernel.Bridged()
		a.decide(in)
		now.node, now.problems = a.decided.node, slices.Clone(a.decided.problems)
		news, first, failed := a.refuseNew(a.decided.refused)
		if failed == nil {
			if len(news) > 0 { // before anybody relies on it: the node may boot without an API server
				_ = a.save(a.decided.refused) // it is tried again below
			}
			now.refused = in.Version
			a.say(now.refused) // before the rest, for which nobody has to wait
		}
		changes, err = a.kernel.Apply(now.node)
		changes, err = append(first, changes...), errors.Join(failed, err)
		if errors.Is(err, rtnl.ErrFilter) { // without it the overlay would take packets from anybody
			now.node = now.node.Closed()
			closing, failed := a.kernel.Apply(now.node)
			changes, err = append(changes, closing...), errors.Join(fmt.Errorf("nothing is carried for peers: %w", err), failed)
		}
		now.problems = append(now.problems, a.ledElsewhere(in.Self, look, news)...)
		if len(in.Bridges) > 0 && a.kernel.Bridged() != in.Bridged {
			a.notify() // the packet filter may go by it now, or may no longer
		}
		now.err = errors.Join(err, unknownMTU, forwards())
		accepted := slices.ContainsFunc(changes, func(o kernel.Op) bool { _, is := o.Object.(kernel.Accept); return is })
		now.limits = a.limits(now.node, in, look || accepted)
	}
	unsaved := a.save(a.decided.refused)
	now.limits = a.withFiles(now.limits, unsaved)
	now.problems = fabric.SortProblems(append(append(now.problems, broken...), a.decided.held...))
	if now.err == nil {
		now.applied = time.Now()
	}
	a.report(before, now, changes)
	a.mu.Lock()
	a.state = now
	a.mu.Unlock()
	if before.revision == 0 || !slices.Equal(reportedOf(a.opts.Node, before), reportedOf(a.opts.Node, now)) {
		set(a.moved) // the first report waits for it
	}
	return now.err == nil && unsaved == nil
}

// tellReady tells people of what lasts longer than it takes to be mended.
func (a *agent) tellReady(ctx context.Context) {
	tick := time.NewTicker(retryInterval)
	defer tick.Stop()
	failing, unwritten := 0, false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		wrong := ""
		if err := a.ready(); err == nil {
			failing = 0
		} else if wrong, failing = err.Error(), failing+1; failing == 1 {
			continue
		}
		err := a.opts.TellReady(ctx, wrong)
		if err != nil && !unwritten && ctx.Err() == nil {
			a.log.Warn("nobody is told what is wrong, trying again", "error", err)
		}
		unwritten = err != nil
	}
}

// say has the manager told what the node refuses, if that is news.
func (a *agent) say(refused int64) {
	a.mu.Lock()
	news := a.state.refused != refused
	a.state.refused = refused
	a.mu.Unlock()
	if news {
		set(a.refusing)
	}
}

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

// ledElsewhere names a network of a peer that something of others leads away from our routes. Our
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

// limits are what rules of others keep from working, while there are peers. Without look these are as
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

// reportedOf is what others have to know of a state: what is wrong with the node, not with objects that
// all nodes read.
func reportedOf(node string, s state) []kernel.Limit {
	all := slices.Clone(s.limits)
	for _, p := range s.problems {
		if p.Origin.Kind == "Node" && p.Origin.Name == node || p.Origin.Kind == "Pod" {
			all = append(all, kernel.Limit{Reason: kernel.LimitRefused, Message: p.Error()})
		}
	}
	return all
}

// report logs and counts what a comparison brought, and says nothing twice.
func (a *agent) report(before, now state, changes kernel.Plan) {
	drift := before.revision == now.revision && before.err == nil
	for _, o := range changes {
		if drift {
			a.log.Warn("repaired", "command", o.Command(""))
		} else if a.log.Enabled(context.Background(), slog.LevelDebug) { // the text of a filter has all networks
			a.log.Debug("changed", "command", o.Command(""))
		}
	}
	if drift {
		a.metrics.repaired.Add(float64(len(changes)))
	} else if len(changes) > 0 {
		a.log.Info("node changed", "changes", len(changes), "rules", len(now.node.Rules), "routes", len(now.node.Routes))
	}
	if now.err != nil {
		a.metrics.errors.Inc()
		if before.err == nil || before.err.Error() != now.err.Error() {
			a.log.Error("the node is not as it should be, trying again", "error", now.err)
		}
	} else if before.err != nil {
		a.log.Info("the node is as it should be again")
	}
	for _, l := range now.limits {
		if !slices.Contains(before.limits, l) {
			a.log.Warn("less works on this node than on others", "reason", l.Reason, "message", l.Message)
		}
	}
	for _, l := range before.limits {
		if !slices.Contains(now.limits, l) {
			a.log.Info("works again", "reason", l.Reason, "message", l.Message)
		}
	}
	for _, p := range now.problems {
		if !slices.Contains(before.problems, p) {
			a.log.Warn("refused", "problem", p.Error())
		}
	}
	for _, p := range before.problems {
		if !slices.Contains(now.problems, p) {
			a.log.Info("no longer refused", "problem", p.Error())
		}
	}
}

func (a *agent) lastOverlay() OverlayStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.overlay
}

func (a *agent) current() state {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state
}
