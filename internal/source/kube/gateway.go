package kube

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// writeTimeout is the timeout of one write request.
const writeTimeout = 5 * time.Second

// GatewayOptions identify and configure one replica of the gateway. All fields are required
// except Node, Cluster, Tunnels, Log, Votes, StateDirectory, RotateKeys, RotationPatience and
// Yield.
type GatewayOptions struct {
	Config    *rest.Config
	Namespace string     // namespace of the installation, with the key Secret, Lease, Service and Pods
	Pod       string     // name of this replica's Pod
	PodIP     netip.Addr // address of the Pod; a Pod in the host network has the address of its node
	// Node is the name of this replica's Node if the replica has its own network namespace, which
	// then contains the gateway's end of the overlay. It is empty if the replica uses the host
	// network.
	Node string
	// Cluster is the identity of our cluster. If Cluster has no ID, the identity comes from the
	// ConfigMap that Liqo or `isthmus install` writes into Namespace. If there is no such
	// ConfigMap, the ID is the UID of the namespace kube-system.
	Cluster v1alpha1.ClusterIdentity
	Tunnels int          // number of tunnels of this replica; 0 means 1
	Log     *slog.Logger // nil: slog.Default()
	// Votes makes nodes vote on which replica is active. It requires route agents on at least three
	// nodes, and gateways with their own network namespace.
	Votes bool
	// StateDirectory is the directory that keeps state, including the private key, across restarts.
	// A replica that was active can restart with that state while the API server does not answer.
	// If StateDirectory is empty, a replica waits for the API server.
	StateDirectory string
	// RotateKeys is the maximum age of the private key. With 0, the key is never rotated.
	// RotationPatience is how long a rotation waits for peers. With 0, it waits without limit.
	RotateKeys, RotationPatience time.Duration
	// Yield, unless nil, is called just before this replica releases its votes. After Yield
	// returns, the replica must not forward packets from nodes to peers.
	Yield func()
}

// A Gateway is the Kubernetes side of one replica of the gateway. Its methods may be called
// concurrently.
type Gateway struct {
	o              GatewayOptions
	log            *slog.Logger
	client         client.Client // uncached, with its own rate limit
	objects        *objects
	look           signal
	metrics        *gatewayMetrics
	reading        atomic.Bool // all watched objects have been read once
	keeper         *keeper
	objectsChanged atomic.Bool // TunnelEndpoints or NatMappings have changed since they were listed

	prepared  chan struct{} // closed when all watched objects have been read once
	leaving   chan struct{} // closed when this replica should hand over to another
	writing   sync.Mutex    // held while Write runs
	locations locations

	mu       sync.Mutex
	shared   [32]byte  // key with which the gateways of the installation authenticate each other; zero: unknown
	started  *election // nil until Run
	election *election // same as started, but nil until the first Snapshot
	wait     error     // reason why there is no Snapshot from the API server yet
	desired  desired
	replaced chan struct{} // closed when desired is replaced

	listen func() (net.PacketConn, error) // opens the socket on which other gateways send questions

	// agents has the nodes with a route agent's Pod. It is nil if there are no such Pods; then
	// agents may run outside of Pods.
	agents atomic.Pointer[map[string]bool]
	// candidate is nil if this replica uses the host network. Then only the Lease decides.
	candidate *voting.Candidate
}

// NewGateway returns a Gateway that has not connected to anything yet.
func NewGateway(o GatewayOptions) (*Gateway, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	o.Tunnels = max(o.Tunnels, 1)
	g := &Gateway{o: o, log: o.Log, look: newSignal(), prepared: make(chan struct{}), leaving: make(chan struct{}), replaced: make(chan struct{}), wait: errors.New("starting")}
	g.keeper = newKeeper(o, g.look.set)
	g.listen = func() (net.PacketConn, error) { return listenAt(o.PodIP) }
	g.locations.known.Self = o.Node
	if o.Node != "" {
		g.candidate = voting.NewCandidate(o.Pod, o.PodIP, g.SharedKey, o.Log)
	}
	g.metrics = newGatewayMetrics(g)
	config := rest.CopyConfig(o.Config)
	config.QPS, config.Burst = 100, 100 // limit of writes: enough for changes of 500 peers within seconds, without overloading the API server
	var err error
	if g.client, err = client.New(config, client.Options{Scheme: newScheme()}); err != nil {
		return nil, err
	}
	return g, nil
}

// Run watches the objects, takes part in the election, and calls serve. The function serve prepares
// the gateway, waits until the channel begin is closed, and then runs the gateway. Run closes begin
// when this replica becomes active. When the replica is no longer active, Run ends the context of
// serve and calls serve again. A host-network replica prepares nothing, so Run calls serve only
// when the replica becomes active. While another replica is active, Run instead calls standby once,
// to remove state that an earlier process of this replica may have left. Run returns when ctx ends,
// or when serve or standby fails, and releases the Lease. If another replica is ready when ctx
// ends, serve continues until that replica has taken over, but at most for handOverTimeout.
//
// While the API server cannot be reached for the first Snapshot, Run waits. Ready and the log
// report the reason. A replica that was active shortly before, according to its state
// directory, starts with its saved state instead.
func (g *Gateway) Run(ctx context.Context, serve func(ctx context.Context, begin <-chan struct{}) error, standby func() error) error {
	wanted := ctx
	ctx, cancel := context.WithCancel(context.WithoutCancel(wanted))
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	e, err := newElection(g.o.Config, g.o.Namespace, g.o.Pod, func() string { return g.holder(ctx) }, g.log)
	if err != nil {
		return err
	}
	defer e.close()
	e.met = g.keeper.changed.set
	if g.candidate != nil {
		e.votes = &ballot{Candidate: g.candidate, wanted: g.o.Votes, key: func() { g.publishKey(ctx) }, agents: g.agents.Load}
		g.candidate.Change = e.voted.set
		group.Go(func() { g.candidate.Run(ctx) })
	}
	known := g.remember()
	g.mu.Lock()
	g.started = e
	if known != nil {
		g.shared = known.snapshot.Keys.Gateways
	}
	g.mu.Unlock()
	questionCtx, stopQuestions := context.WithCancel(ctx)
	var questioners sync.WaitGroup
	q, others := g.questioner(e)
	questioners.Go(func() { q.run(questionCtx) })
	defer questioners.Wait()
	defer stopQuestions()
	group.Go(func() {
		if g.prepare(ctx, &group, e) == nil {
			close(g.prepared)
		}
	})
	if err := g.await(wanted, e, known, others); err != nil {
		return nil // await fails only if ctx ends
	}
	g.mu.Lock()
	g.election = e
	g.mu.Unlock()
	e.setEligible(true)

	electing, leave := context.WithCancel(ctx)
	var elector sync.WaitGroup
	elector.Go(func() { e.run(electing) })
	elector.Go(func() { g.keeper.run(electing, e) })
	release := sync.OnceFunc(func() {
		leave()
		stopQuestions()
		elector.Wait()
		questioners.Wait() // stop answering first: after the release, answers to other gateways would be wrong
		close(g.leaving)
		// Wait for a write in progress: it could name this replica after the successor has
		// named itself.
		g.writing.Lock()
		defer g.writing.Unlock()
		if err := g.release(e); err != nil {
			g.log.Warn("cannot release the Lease; a standby waits until it expires", "error", err)
			return
		}
		g.keeper.forget()
	})
	ended := make(chan struct{})
	group.Go(func() {
		select {
		case <-ended:
			return
		case <-wanted.Done():
		}
		active := e.active()
		release()
		if active {
			g.handOver(ended)
		}
		cancel()
	})
	err = g.follow(ctx, e, serve, standby)
	close(ended)
	release()
	return err
}

// release gives up the votes and the Lease. It calls Yield first, because nodes switch to another
// replica as soon as that replica has the votes.
func (g *Gateway) release(e *election) error {
	if e.byVotes() && g.o.Yield != nil {
		g.o.Yield()
	}
	return e.release()
}

// CannotTakeOver returns the reason why this standby could not become active if the active replica
// ended, or nil.
func (g *Gateway) CannotTakeOver() error {
	g.mu.Lock()
	e := g.election
	g.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.cannotTakeOver(time.Now())
}

// MaySend reports whether this replica may send to peers now. The caller checks it just before each
// send.
func (g *Gateway) MaySend() bool { return g.candidate == nil || g.candidate.Gate.Open() }

// follow calls serve and standby as the election requires, until ctx ends.
func (g *Gateway) follow(ctx context.Context, e *election, serve func(context.Context, <-chan struct{}) error, standby func() error) error {
	cleared := false // standby or serve has handled the state of an earlier process
	for ctx.Err() == nil {
		if g.o.Node == "" && !e.active() {
			g.keeper.changed.set()
			if !cleared && !e.holds() && e.holder() != "" {
				if err := standby(); err != nil {
					return err
				}
				cleared = true
			}
			select {
			case <-ctx.Done():
			case <-e.changed:
			}
			continue
		}
		cleared = true
		if err := g.serve(ctx, e, serve); err != nil {
			return err
		}
		select {
		case <-g.leaving: // this replica is ending and need not prepare again
			<-ctx.Done()
		default:
		}
	}
	return nil
}

// serve calls the callback serve once, closes begin when this replica becomes active, and ends
// the callback's context when the replica is no longer active.
func (g *Gateway) serve(ctx context.Context, e *election, serve func(context.Context, <-chan struct{}) error) error {
	serving, stop := context.WithCancel(ctx)
	defer stop()
	begin, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- serve(serving, begin) }()
	for acts := false; ; {
		switch active := e.active(); {
		case active && !acts:
			acts = true
			close(begin)
			m, _ := e.mandate()
			g.metrics.takeovers.WithLabelValues(cmp.Or(m.Reason, "Unknown")).Inc()
			g.keeper.changed.set()
		case acts && !active:
			if !e.holds() {
				g.log.Warn("another replica is active; this one is a standby")
			}
			stop()
			return <-done
		case !active:
			g.keeper.changed.set()
		}
		select {
		case err := <-done:
			if err == nil && ctx.Err() == nil {
				err = errors.New("the gateway ended by itself")
			}
			return err
		case <-e.changed:
		}
	}
}

// prepare returns once there is a valid Snapshot from the API server and the Lease is watched. All
// goroutines that it starts end with ctx.
func (g *Gateway) prepare(ctx context.Context, group *sync.WaitGroup, e *election) error {
	waiting := g.waiter()
	err := retry(ctx, waiting, func() (err error) {
		g.objects, err = newObjects(g.restConfig(), g.kinds(), g.log)
		return err
	})
	if err != nil {
		return err
	}
	group.Go(func() { _ = g.objects.Start(ctx) }) // Start ends only with ctx
	objectsChanged := func() {
		g.objectsChanged.Store(true)
		g.look.set()
	}
	err = errors.Join(
		g.objects.watch(ctx, g.look.set, waiting, &corev1.Secret{}, &corev1.Service{}, &isthmus.NetworkAllocation{}, &discoveryv1.EndpointSlice{}),
		g.objects.watch(ctx, objectsChanged, waiting, &v1alpha1.NatMapping{}, &v1alpha1.TunnelEndpoint{}),
		g.objects.watchBy(ctx, g.locations.handler(g.look.set), waiting, &corev1.Node{}))
	if err != nil {
		return err
	}
	if g.o.Node == "" {
		err = g.objects.watch(ctx, g.look.set, waiting, &corev1.Pod{})
	} else {
		err = g.objects.watchBy(ctx, g.locations.handler(g.look.set), waiting, &corev1.Pod{})
	}
	if err != nil {
		return err
	}
	if err := g.objects.watchBy(ctx, g.podHandler(e), waiting, &corev1.Pod{}); err != nil {
		return err
	}
	preshared, err := g.watchPreshared(ctx, group, waiting)
	if err != nil {
		return err
	}
	e.dropUnlisted()
	if g.o.Node != "" {
		g.watchReports(ctx, group)
	}
	r := &refresher{Gateway: g, preshared: preshared}
	err = retry(ctx, waiting, func() (err error) {
		r.cluster, err = g.identity(ctx)
		return err
	})
	if err != nil {
		return err
	}
	g.look.set()
	group.Go(func() { g.look.coalesce(ctx, nil, func() { r.refresh(ctx) }) })
	err = retry(ctx, waiting, func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		switch {
		case g.desired.valid && g.desired.remembered == nil:
			return nil
		case g.desired.err != nil:
			return g.desired.err
		}
		return errors.New("first read of the objects")
	})
	if err != nil {
		return err
	}
	if err := g.objects.watch(ctx, e.leaseChanged.set, waiting, &coordinationv1.Lease{}); err != nil {
		return err
	}
	g.reading.Store(true)
	g.mu.Lock()
	g.wait = nil
	peers := len(g.desired.snapshot.Gateway.Peers)
	g.mu.Unlock()
	g.log.Info("objects read", "cluster", r.cluster.ClusterID, "name", r.cluster.ClusterName, "peers", peers)
	return nil
}

// Ready returns the reason why this replica cannot be active or take over, or nil. A replica that
// runs from its saved state is not ready, because it learns of no changes. A holder of the Lease is
// not ready while it must not send to peers. A standby is not ready while too few voters answer it.
func (g *Gateway) Ready() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var why []string
	if g.election != nil {
		if silence := g.election.silence(); silence != "" {
			why = append(why, silence)
		}
		if err := g.election.cannotTakeOver(time.Now()); err != nil {
			why = append(why, err.Error())
		}
	}
	if g.wait == nil {
		if len(why) > 0 {
			return errors.New(why[0])
		}
		return nil
	}
	for _, err := range []error{g.desired.remembered, g.wait, g.keeper.problem()} {
		if err != nil {
			why = append(why, err.Error())
		}
	}
	return errors.New(strings.Join(why, "; "))
}
