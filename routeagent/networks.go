package routeagent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// How often the agent looks what its node reaches without us, and tells it.
const (
	lookTogether = 200 * time.Millisecond // after an event, for those that come with it
	lookInterval = 30 * time.Second       // without any event: changes of DNS servers cause none
	tellInterval = time.Hour              // somebody may have deleted what was told
	tellPatience = time.Minute            // the longest pause after a failure
	tellTimeout  = 30 * time.Second
	// tellSpread is for each node of the cluster: a change of all nodes at once, such as an address
	// of a Service, does not come to the API server at once.
	tellSpread = 2 * time.Millisecond
	// lookGap is between two looks. Where there are a million routes a look takes seconds: it is
	// multiplied by lookShare, so that no more than that part of a processor is spent.
	lookGap   = 2 * time.Second
	lookShare = 50
	// refusedSpread is tellSpread for what the nodes refuse: peers wait for the last of them.
	refusedSpread = 300 * time.Microsecond
	refusedGap    = 100 * time.Millisecond // after one was told
)

// told is the outcome of the last look.
type told struct {
	problems []fabric.Problem
	err      error // why the manager does not know
}

// A teller remembers what the manager was told last.
type teller struct {
	*agent
	last fabric.NodeNetworks
	node int64 // when our Node was made
	at   time.Time
}

// tell keeps the manager informed of what the node reaches without us, until ctx ends. It writes
// when that changes, and hardly ever else: there may be five thousand nodes.
func (a *agent) tell(ctx context.Context) {
	t := &teller{agent: a}
	pause := lookGap // after a failure
	timer := time.NewTimer(lookInterval)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.moved:
			if !sleep(ctx, lookTogether) {
				return
			}
		case <-timer.C:
		}
		timer.Reset(lookInterval)
		wait, problems, err := t.once(ctx)
		if ctx.Err() != nil {
			return
		}
		a.note(told{problems, err})
		if err != nil {
			wait, pause = max(wait, pause), min(2*pause, tellPatience)
			set(a.moved)
		} else {
			pause = lookGap
		}
		if !sleep(ctx, wait) {
			return
		}
	}
}

// once looks, tells what has changed, and says how long not to look again.
func (t *teller) once(ctx context.Context) (wait time.Duration, problems []fabric.Problem, err error) {
	own, nodes, created := t.ourselves()
	if nodes == 0 {
		return 0, nil, nil // nothing is known of the cluster yet
	}
	begin := time.Now()
	if state := t.current(); state.revision == 0 {
		return 0, nil, nil // it is not known what the node refuses; comparing brings us back
	}
	now, problems, err := t.look(own)
	if o := t.lastOverlay(); o.Broken || o.Back.Broken {
		since, _ := o.fails()
		now.BrokenOverlay = fabric.BrokenOverlay{Gateway: o.Gateway, Since: since.UTC().Truncate(time.Second), Back: !o.Broken}
	}
	wait = max(lookGap, lookShare*time.Since(begin))
	if err != nil || now.Equal(t.last) && created == t.node && time.Since(t.at) < tellInterval {
		return wait, problems, err
	}
	if !sleep(ctx, rand.N(tellSpread*time.Duration(nodes))) {
		return wait, problems, nil
	}
	ctx, cancel := context.WithTimeout(ctx, tellTimeout)
	defer cancel()
	now.Refused = t.current().refused
	if err := t.opts.Tell(ctx, now); err != nil {
		return wait, problems, err
	}
	t.mu.Lock()
	t.reported = true
	t.mu.Unlock()
	set(t.refusing) // a report that was there says what was refused before
	t.log.Info("reported this node's networks", "networks", len(now.Networks), "resolvers", len(now.Resolvers), "overlayBroken", now.BrokenOverlay.Gateway.IsValid())
	t.last, t.node, t.at = now, created, time.Now()
	return wait, problems, nil
}

// tellRefused keeps the manager informed of which networks of peers the node refuses, until ctx
// ends. It has a goroutine of its own, since peers wait for it, and looks at networks may take long.
func (a *agent) tellRefused(ctx context.Context) {
	pause := refusedGap
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.refusing:
		}
		_, nodes, _ := a.ourselves()
		if !a.hasReported() {
			continue // the first report says it, and brings us back
		}
		if !sleep(ctx, rand.N(refusedSpread*time.Duration(nodes+1))) {
			return
		}
		attempt, cancel := context.WithTimeout(ctx, tellTimeout)
		err := a.opts.TellRefused(attempt, a.current().refused)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			if pause == refusedGap {
				a.log.Warn("cannot report which networks this node refuses; retrying", "error", err)
			}
			pause = min(2*pause, lookGap)
			set(a.refusing)
		} else {
			pause = refusedGap
		}
		if !sleep(ctx, pause) {
			return
		}
	}
}

func (a *agent) hasReported() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reported
}

// ourselves returns our own networks, how many nodes there are, and when ours
// was made.
func (a *agent) ourselves() (own []netip.Prefix, nodes int, created int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.intent == nil {
		return nil, 0, 0
	}
	return a.intent.Own, len(a.intent.Nodes), madeAt(a.intent, a.opts.Node)
}

// nodes are the addresses of the nodes that the agent knows.
func (a *agent) nodes() (all []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.intent == nil {
		return nil
	}
	for _, n := range a.intent.Nodes {
		all = append(all, n.Addrs...)
	}
	return all
}

func (a *agent) pods() []netip.Prefix {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.intent == nil {
		return nil
	}
	return a.intent.PodNetworks()
}

// madeAt is when the Node of a name was made; 0: there is none.
func madeAt(in *fabric.NodeIntent, name string) int64 {
	for _, n := range in.Nodes {
		if n.Name == name {
			return n.Created
		}
	}
	return 0
}

// look reads what the node reaches without us.
func (a *agent) look(own []netip.Prefix) (fabric.NodeNetworks, []fabric.Problem, error) {
	have, err := rtnl.Networks()
	if err != nil {
		return fabric.NodeNetworks{}, nil, fmt.Errorf("networks of the node: %w", err)
	}
	resolvers, err := resolversIn(a.opts.Resolvers)
	n, problems := fabric.NodeNetworksOf(a.opts.Node, have, own, resolvers)
	n.Problems = reportedOf(a.opts.Node, a.current())
	addrs, unknown := rtnl.Addresses()
	n.Sources = fabric.OverlaySourcesOf(addrs, a.pods())
	routes, unread := rtnl.Routes()
	n.Routes = fabric.NodeRoutesOf(routes, own, a.nodes())
	if unread == nil {
		a.lead(n.Routes)
	}
	return n, problems, errors.Join(err, unknown, unread)
}

// lead has the node be as its routes by other hosts say. A gateway that is a Pod reads them in the report.
func (a *agent) lead(routes []fabric.NodeRoute) {
	a.mu.Lock()
	news := !slices.Equal(a.hops, routes)
	a.hops = routes
	slim := a.intent == nil || a.intent.OnlyPods
	a.mu.Unlock()
	if news && !slim {
		a.notify()
	}
}

// resolversIn returns the DNS servers of a file as in resolv.conf(5); none if there is no file.
func resolversIn(path string) (all []netip.Addr, err error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("DNS servers: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if words := strings.Fields(lines.Text()); len(words) > 1 && words[0] == "nameserver" {
			if addr, err := netip.ParseAddr(words[1]); err == nil {
				all = append(all, addr.Unmap().WithZone(""))
			}
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("DNS servers: %s: %w", path, err)
	}
	return all, nil
}

// note keeps the outcome for the status, and logs what is new.
func (a *agent) note(now told) {
	a.mu.Lock()
	before := a.told
	a.told = now
	a.mu.Unlock()
	if now.err != nil && (before.err == nil || before.err.Error() != now.err.Error()) {
		a.log.Error("cannot report this node's networks; retrying", "error", now.err)
	}
	for _, p := range now.problems {
		if !slices.Contains(before.problems, p) {
			a.log.Warn("left a network out of this node's report", "problem", p.Error())
		}
	}
}

func (a *agent) lastTold() told {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.told
}

// sleep reports whether ctx has not ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
