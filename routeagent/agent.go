// Package routeagent applies the result of fabric.NodeFor on one node of a cluster: the VXLAN
// device between the nodes, and the routes and rules that send packets of pods to the gateway and
// replies back on the same path. It also reports to the manager which networks the node reaches
// without the tunnel, and for which networks of peers the node refuses packets.
//
//	Nodes, Pods, TunnelEndpoints, NetworkAllocations ─► fabric.NodeIntent
//	fabric.NodeIntent ─ fabric.NodeFor ─► kernel.State ─ rtnl ─► kernel
//	                                         netlink events ─┘ (compare again)
//
// An agent owns the kernel objects of kernel.RouteAgent in its network namespace. Only one agent at
// a time is active in a namespace. The applied state is recorded only in the kernel. So if an agent
// is killed, the next one finds all objects in place and changes nothing.
package routeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// Intervals at which the agent compares the kernel's state with the desired state.
const (
	compareGap    = 100 * time.Millisecond // minimum time between two comparisons, because the kernel reports events in bursts
	retryInterval = time.Second            // after a failure
	busyInterval  = 100 * time.Millisecond // while other programs change iptables-legacy or nftables
	// limitsInterval is the time between reads of foreign rules. Changes of these rules cause no
	// events.
	limitsInterval = 9 * time.Second
)

// compareInterval is the time between comparisons if there are no events. Only tests change it.
var compareInterval = 10 * time.Second

// A Source reads API objects, and calls deliver with the complete intent and with the problems of
// these objects. The first call comes when all objects have been read, and another call after every
// change. An intent is never incomplete, and calls of deliver never overlap. The agent itself sets
// Self, Allocated, and the fields that only an agent on the node can determine. A Source returns
// when ctx ends, or with an error when it cannot continue.
type Source func(ctx context.Context, deliver func(fabric.NodeIntent, []fabric.Problem)) error

// Options are the options of Run.
type Options struct {
	Node           string // name of the Node on which the agent runs
	Source         Source
	Log            *slog.Logger
	Version        string
	MetricsAddress string // TCP host:port of /metrics, /healthz and /readyz; empty: not served
	StatusAddress  string // TCP host:port of /status; empty: not served
	StateDirectory string // directory of the snapshot; empty: the agent keeps no snapshot
	// ReportNetworks stores a report for the manager: the networks that the node reaches without
	// the tunnel. It may be nil. It is never called concurrently.
	ReportNetworks func(context.Context, fabric.NodeNetworks) error
	// ReportRefused adds a resourceVersion to the report that ReportNetworks stored: the node
	// refuses packets for all networks in NetworkAllocations up to this version. It may be nil. It
	// is never called concurrently.
	ReportRefused func(context.Context, int64) error
	// ReportReady publishes the reason why the node is not ready, for users; "" means that it is
	// ready. It may be nil. It is called once a second, and never concurrently.
	ReportReady func(ctx context.Context, problem string) error
	Voter       Voter  // nil: the node does not vote on which gateway is active
	Resolvers   string // path of the node's resolv.conf(5)
	// MetricsSecure protects /metrics, and switches MetricsAddress to TLS. If it is nil, any client
	// may read the metrics.
	MetricsSecure *httpserve.Secure
	Pod           string // UID of the agent's Pod, with which Started finds the agent; empty: none
}

// A Voter casts the node's vote on which gateway is active.
type Voter interface {
	Run(ctx context.Context)
	// Err returns the reason why the node cannot vote. It is nil if the node votes, or need not
	// vote. Err and Refused may be called while Run runs.
	Err() error
	// Refused returns how many datagrams the voter has read and refused, and how many the kernel
	// has dropped unread because there were too many.
	Refused() (read, unread uint64)
}

// Run applies the source's state to the network namespace of the process until ctx ends, and then
// returns nil. When Run returns, the kernel objects stay in place, so that no packet for a remote
// network bypasses the tunnel while no agent runs; Cleanup removes the objects. At the start, the
// objects of the previous agent stay in force until the source delivers for the first time. After a
// reboot there are no such objects, so Run also refuses packets for the networks in the snapshot.
// If the source fails, Run returns the error of the source.
//
// While another agent runs in the namespace, Run only reads from the source: it neither changes the
// kernel nor listens at an address. Run takes over as soon as the other agent ends, so there is
// always an agent during an upgrade.
func Run(ctx context.Context, o Options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a := newAgent(o)
	starting, err := a.serveStarted()
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
		o.Log.Info("waiting for the running agent to stop", "agent", err)
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
	defer source.Wait() // before k.Close, because the goroutines in source use k
	defer cancel()
	l := a.newLoop(k)
	if err := l.restore(k.Refused); err != nil {
		return err
	}
	a.state = l.last
	servers, err := a.listen()
	if err != nil {
		return err
	}
	defer servers.Close()
	if err := k.Events(ctx, a.handleEvent); err != nil {
		return err
	}
	a.manages.Store(true)
	if o.ReportNetworks != nil {
		if err := k.WatchNetworks(ctx, func() { set(a.moved) }); err != nil {
			return err
		}
		source.Go(func() { a.reportNetworks(ctx) })
	}
	if o.ReportRefused != nil {
		source.Go(func() { a.reportRefused(ctx) })
	}
	if o.ReportReady != nil {
		source.Go(func() { a.reportReady(ctx) })
	}
	source.Go(func() { a.probeOverlay(ctx) })
	if o.Voter != nil {
		source.Go(func() { o.Voter.Run(ctx) })
	}
	if !follows {
		watch()
	}
	return a.run(ctx, l, failed)
}

// follow calls open, which waits until the agent that already runs in the namespace has ended. If
// the source fails, follow cancels open and returns the source's error. It also puts the error back
// into the buffered channel failed. So the caller gets the error even if open succeeds at the same
// moment.
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
		a.log.Info("the previous agent has stopped")
	}
	return k, err
}

// agent is the state of one call of Run. It passes intents to a loop, and reports the results.
type agent struct {
	opts    Options
	log     *slog.Logger
	metrics *metrics

	wake     chan struct{} // requests a comparison
	urgent   chan struct{} // requests a comparison without compareGap: networks or gateways of peers have changed
	moved    chan struct{} // the content of the node's report may have changed
	refusing chan struct{} // the content of ReportRefused may have changed
	manages  atomic.Bool   // this agent manages the kernel's objects, and no other agent does
	events   atomic.Bool   // the kernel has reported changes

	mu sync.Mutex // guards the fields below
	wanted
	state      state // result of the last comparison
	lastResult reportResult
	overlay    OverlayStatus
	reported   bool // ReportNetworks has stored a report of this node
}

func newAgent(o Options) *agent {
	signal := func() chan struct{} { return make(chan struct{}, 1) }
	a := &agent{opts: o, log: o.Log, wake: signal(), urgent: signal(), moved: signal(), refusing: signal()}
	a.metrics = newMetrics(a)
	return a
}

// newLoop returns the loop that applies the agent's intents.
func (a *agent) newLoop(k *rtnl.Kernel) *loop {
	return &loop{opts: a.opts, log: a.log, kernel: k, onRefused: a.setRefused, requestComparison: a.notify}
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

func (a *agent) notify() { set(a.wake) }

// handleEvent handles an event of the kernel. It requests a comparison that also probes the paths
// again.
func (a *agent) handleEvent() {
	a.events.Store(true)
	a.notify()
}

func set(signal chan<- struct{}) {
	select {
	case signal <- struct{}{}:
	default: // already set
	}
}

// run makes comparisons until ctx ends or the source fails.
func (a *agent) run(ctx context.Context, l *loop, failed <-chan error) error {
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
		case <-a.urgent: // the comparison below also handles this request
		default:
		}
		switch {
		case !a.compare(l):
			timer.Reset(retryInterval)
		case l.kernel.Busy():
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

// compare makes one comparison. Without an intent it changes nothing. It returns false if a part of
// the comparison failed.
func (a *agent) compare(l *loop) bool {
	a.mu.Lock()
	want := a.wanted
	a.mu.Unlock()
	if want.intent == nil {
		return true
	}
	before := l.last
	changes, ok := l.compare(want, a.events.Swap(false))
	now := l.last
	a.report(before, now, changes)
	a.mu.Lock()
	a.state = now
	a.mu.Unlock()
	if before.revision == 0 || !slices.Equal(reportedOf(a.opts.Node, before), reportedOf(a.opts.Node, now)) {
		set(a.moved) // the report contains this result; the first report waits for it
	}
	return ok
}
