package routeagent

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// A loop brings the kernel to the state that an intent demands. Only one goroutine may use it.
type loop struct {
	opts              Options
	log               *slog.Logger
	kernel            *rtnl.Kernel
	onRefused         func(refused int64) // called when the node refuses packets for all networks that NetworkAllocations named up to this resourceVersion
	requestComparison func()

	last        state       // of the last comparison
	probed      time.Time   // when routes and foreign rules were last probed
	paths       pathCache   // result of the last probe
	reach       reach       // result of the last probe
	allocations allocations // networks of peers
	decider     fabric.Decider
	decided     decided
	refused     []netip.Prefix // networks for which the last comparison refused packets
	nextLookup  netip.Prefix   // where findDiverted continues
	diverted    netip.Prefix   // the network that findDiverted found; zero: none
	divertedTo  string         // device to which packets for that network go
	saved       *snapshot      // the snapshot on disk; nil: there is no valid one
}

// wanted holds the newest intent, and values that belong to it.
type wanted struct {
	intent   *fabric.NodeIntent // nil: not delivered yet
	revision int                // of intent, from 1
	broken   []fabric.Problem   // problems of the API objects of the intent
	hops     []fabric.NodeRoute // routes of the node via other hosts
}

// state is the result of a comparison.
type state struct {
	revision int // revision of the applied intent; 0: none yet
	node     kernel.State
	refused  int64 // the node refuses packets for all networks that NetworkAllocations named up to this resourceVersion; 0: unknown
	problems []fabric.Problem
	limits   []kernel.Limit
	err      error
	applied  time.Time // time at which err was last nil
}

// decided caches the state that was computed for an intent, and the values on which the state
// depends. The cache is valid until the intent changes, or the agent finds a change on its node.
type decided struct {
	revision int
	intent   fabric.NodeIntent // without the values that the agent itself finds on its node
	refused  []netip.Prefix    // networks of all peers; the node refuses packets for them outside the tunnel
	held     []fabric.Problem  // problems of the NetworkAllocations

	from     *fabric.NodeIntent // complete intent for which the state was last computed; nil: none yet
	node     kernel.State
	problems []fabric.Problem
}

// read takes the allocations and refused networks from an intent. It does nothing if this revision
// of the intent has been read already.
func (l *loop) read(in fabric.NodeIntent, revision int) {
	if l.decided.revision == revision {
		return
	}
	in.Self = l.opts.Node
	was := l.decided
	held := l.allocations.read(in.Allocations)
	in.Allocated = l.allocations.networks
	l.decided = decided{revision: revision, intent: in, refused: was.refused, held: held}
	if was.revision == 0 || len(in.Tunnels)+len(was.intent.Tunnels) > 0 || !slices.Equal(in.Allocated, was.intent.Allocated) {
		l.decided.refused = in.Refused()
	}
}

// decide computes the state of our node, unless nothing has changed since the last call. in is the
// complete intent, including the values that the agent itself finds on its node.
func (l *loop) decide(in fabric.NodeIntent) {
	d := &l.decided
	if d.from != nil && slices.Equal(d.from.Routes, in.Routes) && d.from.UnderlayMTU == in.UnderlayMTU && d.from.Bridged == in.Bridged && slices.Equal(d.from.UnderlayDevices, in.UnderlayDevices) &&
		slices.Equal(d.from.Bridges, in.Bridges) && slices.Equal(d.from.Uplinks, in.Uplinks) {
		return
	}
	d.from = &in
	d.node, d.problems = l.decider.NodeFor(in)
}

// compare brings the kernel to the desired state, and returns the changes. events is true if the
// kernel has reported events since the last comparison. ok is false if a part of the comparison
// failed.
func (l *loop) compare(want wanted, events bool) (changes kernel.Plan, ok bool) {
	before := l.last
	now := state{revision: want.revision, node: before.node, refused: before.refused, applied: before.applied, limits: before.limits}
	// A new intent alone does not require a probe. Changes of some foreign routes and rules cause
	// no event, so probe also from time to time.
	refresh := events || time.Since(l.probed) > limitsInterval || before.err != nil
	if refresh {
		l.probed = time.Now()
	}
	l.read(*want.intent, want.revision)
	in := l.decided.intent
	self := slices.IndexFunc(in.Nodes, func(n fabric.ClusterNode) bool { return n.Name == in.Self })
	if self < 0 {
		// Our Node is missing: it is being recreated, or --node-name is wrong. In both cases, the
		// existing routes must stay.
		refusing, _ := fabric.NodeFor(in)
		changes, _ = l.kernel.Add(refusing)
		now.err = fmt.Errorf("no Node is called %q; want the name of the Node on which the agent runs", in.Self)
	} else {
		var unknownMTU, err error
		if addr := in.Nodes[self].Underlay(); addr.IsValid() {
			in.UnderlayDevices, in.UnderlayMTU, unknownMTU = l.underlay(addr, in, refresh)
		}
		in.Routes = want.hops
		in.Bridges, in.Uplinks = l.bridges(in, refresh)
		in.Bridged = l.kernel.Bridged()
		l.decide(in)
		now.node, now.problems = l.decided.node, slices.Clone(l.decided.problems)
		added, first, failed := l.refuseNew(l.decided.refused)
		if failed == nil {
			if len(added) > 0 { // save the networks before peers use them, because the node may reboot without an API server
				_ = l.save(l.decided.refused) // if this fails, the code below tries again
			}
			now.refused = in.Version
			l.onRefused(now.refused) // before the rest is applied, because peers wait only for this report
		}
		changes, err = l.kernel.Apply(now.node)
		changes, err = append(first, changes...), errors.Join(failed, err)
		if errors.Is(err, rtnl.ErrFilter) { // without the filter, the overlay would accept packets from anybody
			now.node = now.node.Closed()
			closing, failed := l.kernel.Apply(now.node)
			changes, err = append(changes, closing...), errors.Join(fmt.Errorf("no traffic of peers is carried: %w", err), failed)
		}
		now.problems = append(now.problems, l.findDiverted(in.Self, refresh, added)...)
		if len(in.Bridges) > 0 && l.kernel.Bridged() != in.Bridged {
			l.requestComparison() // the packet filter depends on the Bridge
		}
		now.err = errors.Join(err, unknownMTU, forwards())
		accepted := slices.ContainsFunc(changes, func(o kernel.Op) bool { _, isAccept := o.Object.(kernel.Accept); return isAccept })
		now.limits = l.limits(now.node, in, refresh || accepted)
	}
	unsaved := l.save(l.decided.refused)
	now.limits = l.withFiles(now.limits, unsaved)
	now.problems = fabric.SortProblems(append(append(now.problems, want.broken...), l.decided.held...))
	if now.err == nil {
		now.applied = time.Now()
	}
	l.last = now
	return changes, now.err == nil && unsaved == nil
}
