package routeagent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

func (a *agent) loop(ctx context.Context, failed <-chan error) error {
	timer := time.NewTimer(compareInterval)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			a.log.Info("route agent stopped; its routes and rules stay (--cleanup removes them)")
			return nil
		case err := <-failed:
			return fmt.Errorf("source: %w", err)
		case <-a.wake:
		case <-timer.C:
		}
		select {
		case <-a.urgent: // the comparison below covers it
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

// decided caches what was read from an intent and decided for it. It stays valid until the intent
// changes, or what the agent finds out about its node.
type decided struct {
	revision int
	intent   fabric.NodeIntent // without what the agent finds out about its node
	refused  []netip.Prefix    // all networks of peers
	held     []fabric.Problem  // of reading them

	from     *fabric.NodeIntent // the complete intent that was decided last; nil: none yet
	node     kernel.State
	problems []fabric.Problem
}

// read prepares an intent, unless it has that revision already.
func (a *agent) read(in fabric.NodeIntent, revision int) {
	if a.decided.revision == revision {
		return
	}
	in.Self = a.opts.Node
	was := a.decided
	held := a.allocations.read(in.Allocations)
	in.Allocated = a.allocations.networks
	a.decided = decided{revision: revision, intent: in, refused: was.refused, held: held}
	if was.revision == 0 || len(in.Tunnels)+len(was.intent.Tunnels) > 0 || !slices.Equal(in.Allocated, was.intent.Allocated) {
		a.decided.refused = in.Refused()
	}
}

// decide computes the state of our node, unless nothing has changed since the last time. in is the
// complete intent, with what the agent has found out about its node.
func (a *agent) decide(in fabric.NodeIntent) {
	d := &a.decided
	if d.from != nil && slices.Equal(d.from.Routes, in.Routes) && d.from.UnderlayMTU == in.UnderlayMTU && d.from.Bridged == in.Bridged && slices.Equal(d.from.UnderlayDevices, in.UnderlayDevices) &&
		slices.Equal(d.from.Bridges, in.Bridges) && slices.Equal(d.from.Uplinks, in.Uplinks) {
		return
	}
	d.from = &in
	d.node, d.problems = a.decider.NodeFor(in)
}

// compare makes the kernel's state what it should be now. It returns false if some of that failed.
func (a *agent) compare() bool {
	a.mu.Lock()
	revision, broken, before, hops := a.revision, a.broken, a.state, a.hops
	var in fabric.NodeIntent
	if a.intent != nil {
		in = *a.intent
	}
	a.mu.Unlock()
	if revision == 0 {
		return true // the state in the kernel stays
	}

	now := state{revision: revision, node: before.node, refused: before.refused, applied: before.applied, limits: before.limits}
	// A new intent alone is no reason to probe again. Foreign routes change without an event that
	// we watch.
	look := a.events.Swap(false) || time.Since(a.looked) > limitsInterval || before.err != nil
	if look {
		a.looked = time.Now()
	}
	a.read(in, revision)
	in = a.decided.intent
	self := slices.IndexFunc(in.Nodes, func(n fabric.ClusterNode) bool { return n.Name == in.Self })
	var changes kernel.Plan
	if self < 0 {
		// The Node is being recreated, or --node-name is wrong: no reason to cut off what works.
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
			if len(news) > 0 { // before peers rely on it: the node may boot without an API server
				_ = a.save(a.decided.refused) // tried again below
			}
			now.refused = in.Version
			a.say(now.refused) // early, because peers wait for this and not for the rest
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
			a.notify() // the packet filter depends on it
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
		set(a.moved) // the node's report contains it, and the first report waits for this
	}
	return now.err == nil && unsaved == nil
}

// tellReady reports problems that persist for two checks, until ctx ends.
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
			a.log.Warn("cannot report the problem on the Node; retrying", "error", err)
		}
		unwritten = err != nil
	}
}

// say has tellRefused report what the node refuses, if that has changed.
func (a *agent) say(refused int64) {
	a.mu.Lock()
	news := a.state.refused != refused
	a.state.refused = refused
	a.mu.Unlock()
	if news {
		set(a.refusing)
	}
}
