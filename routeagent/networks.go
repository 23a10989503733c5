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

// Intervals at which the agent reads the networks that its node reaches without the tunnel, and
// reports them.
const (
	lookTogether   = 200 * time.Millisecond // after an event, because more events may follow
	lookInterval   = 30 * time.Second       // without an event: changes of DNS servers cause no events
	reportInterval = time.Hour              // even without a change, because the report may have been deleted
	maxReportPause = time.Minute            // the longest pause after a failure
	reportTimeout  = 30 * time.Second
	// reportSpread times the number of nodes is the maximum random delay of a report. If the
	// networks of all nodes change at the same time, the delay spreads their reports over time.
	reportSpread = 2 * time.Millisecond
	// lookGap is the minimum pause between two reads. The pause is also at least lookShare times as
	// long as the read, so that reads use at most a fiftieth of a CPU. With a million routes, a
	// read takes seconds.
	lookGap   = 2 * time.Second
	lookShare = 50
	// refusedSpread is reportSpread for ReportRefused. It is shorter, because a peering waits until
	// the last node has reported.
	refusedSpread = 300 * time.Microsecond
	refusedGap    = 100 * time.Millisecond // after ReportRefused
)

// reportResult is the result of the last attempt to report.
type reportResult struct {
	problems []fabric.Problem
	err      error // the reason why the manager has no current report
}

// A reporter sends the node's reports, and stores the last one.
type reporter struct {
	*agent
	last fabric.NodeNetworks
	node int64 // creation time of our Node at the last report
	at   time.Time
}

// reportNetworks reports the networks that the node reaches without the tunnel, until ctx ends. It
// writes only after changes and once per reportInterval, because there may be thousands of nodes.
func (a *agent) reportNetworks(ctx context.Context) {
	t := &reporter{agent: a}
	pause := lookGap // the pause after the next failure
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
		wait, problems, err := t.readAndReport(ctx)
		if ctx.Err() != nil {
			return
		}
		a.note(reportResult{problems, err})
		if err != nil {
			wait, pause = max(wait, pause), min(2*pause, maxReportPause)
			set(a.moved)
		} else {
			pause = lookGap
		}
		if !sleep(ctx, wait) {
			return
		}
	}
}

// readAndReport reads the node's networks, reports them if they have changed, and returns how long
// to wait before the next read.
func (t *reporter) readAndReport(ctx context.Context) (wait time.Duration, problems []fabric.Problem, err error) {
	own, nodes, created := t.ownCluster()
	if nodes == 0 {
		return 0, nil, nil // no intent was delivered yet
	}
	begin := time.Now()
	if state := t.current(); state.revision == 0 {
		return 0, nil, nil // there was no comparison yet, so the refused networks are unknown; the first comparison triggers another call
	}
	now, problems, err := t.gather(own)
	if o := t.lastOverlay(); o.Broken || o.Back.Broken {
		since, _ := o.fails()
		now.BrokenOverlay = fabric.BrokenOverlay{Gateway: o.Gateway, Since: since.UTC().Truncate(time.Second), Back: !o.Broken}
	}
	wait = max(lookGap, lookShare*time.Since(begin))
	if err != nil || now.Equal(t.last) && created == t.node && time.Since(t.at) < reportInterval {
		return wait, problems, err
	}
	if !sleep(ctx, rand.N(reportSpread*time.Duration(nodes))) {
		return wait, problems, nil
	}
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	now.Refused = t.current().refused
	if err := t.opts.ReportNetworks(ctx, now); err != nil {
		return wait, problems, err
	}
	t.mu.Lock()
	t.reported = true
	t.mu.Unlock()
	set(t.refusing) // ReportNetworks does not update Refused in an existing report
	t.log.Info("reported this node's networks", "networks", len(now.Networks), "resolvers", len(now.Resolvers), "overlayBroken", now.BrokenOverlay.Gateway.IsValid())
	t.last, t.node, t.at = now, created, time.Now()
	return wait, problems, nil
}

// reportRefused reports for which networks of peers the node refuses packets, until ctx ends. It
// has its own goroutine: peers wait for this report, and it must not wait until the node's networks
// are read.
func (a *agent) reportRefused(ctx context.Context) {
	pause := refusedGap
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.refusing:
		}
		_, nodes, _ := a.ownCluster()
		if !a.hasReported() {
			continue // the first report contains the refused networks, and sets refusing again
		}
		if !sleep(ctx, rand.N(refusedSpread*time.Duration(nodes+1))) {
			return
		}
		attempt, cancel := context.WithTimeout(ctx, reportTimeout)
		err := a.opts.ReportRefused(attempt, a.current().refused)
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

// ownCluster returns our own networks, the number of nodes, and the creation time of our Node.
func (a *agent) ownCluster() (own []netip.Prefix, nodes int, created int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.intent == nil {
		return nil, 0, 0
	}
	return a.intent.Own, len(a.intent.Nodes), madeAt(a.intent, a.opts.Node)
}

// nodes returns the addresses of the nodes that the agent knows.
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

// madeAt returns the creation time of a Node, or 0 if there is none of that name.
func madeAt(in *fabric.NodeIntent, name string) int64 {
	for _, n := range in.Nodes {
		if n.Name == name {
			return n.Created
		}
	}
	return 0
}

// gather reads the node's networks and all other fields of the report, except BrokenOverlay and
// Refused.
func (a *agent) gather(own []netip.Prefix) (fabric.NodeNetworks, []fabric.Problem, error) {
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
		a.setRoutes(n.Routes)
	}
	return n, problems, errors.Join(err, unknown, unread)
}

// setRoutes stores the node's routes via other hosts for the next comparison. If they have changed,
// it requests a comparison. If all gateways are Pods, it requests none, because these gateways read
// the routes from the report.
func (a *agent) setRoutes(routes []fabric.NodeRoute) {
	a.mu.Lock()
	changed := !slices.Equal(a.hops, routes)
	a.hops = routes
	slim := a.intent == nil || a.intent.OnlyPods
	a.mu.Unlock()
	if changed && !slim {
		a.notify()
	}
}

// resolversIn returns the DNS servers in a file of the format of resolv.conf(5). It returns none if
// there is no file.
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

// note stores the result for the status, and logs the differences from the previous result.
func (a *agent) note(now reportResult) {
	a.mu.Lock()
	before := a.lastResult
	a.lastResult = now
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

func (a *agent) lastReport() reportResult {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lastResult
}

// sleep waits for d. It returns false if ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
