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

// writeTimeout bounds one request that writes.
const writeTimeout = 5 * time.Second

// GatewayOptions say which replica of the gateway this is. All but Node, Cluster, Tunnels, Log and
// StateDirectory are required.
type GatewayOptions struct {
	Config    *rest.Config
	Namespace string     // of the installation: key Secret, Lease, Service and Pods are there
	Pod       string     // its address, or its node's if it uses the host network
	PodIP     netip.Addr // its address; that of its node, where it has the node's network
	// Node is the Node of a replica with its own network namespace, in which the overlay ends.
	// Empty: it uses the host network.
	Node string
	// Cluster is ours. Without an ID, the identity comes from the ConfigMap in Namespace that Liqo
	// and `isthmus install` write, and the default ID is the UID of the namespace kube-system.
	Cluster v1alpha1.ClusterIdentity
	Tunnels int          // that this replica has; 0 means 1
	Log     *slog.Logger // nil: slog.Default()
	// Votes says that nodes vote on which replica is active. It requires route agents on three
	// nodes, and gateways with their own network namespace.
	Votes bool
	// StateDirectory has the state, including the private key, with which this replica carries on
	// if it was active, restarts, and the API server does not answer. Empty: it waits for the API
	// server.
	StateDirectory string
	// RotateKeys is the age at which the key is rotated; 0: never. RotationPatience is how long a
	// rotation waits for peers; 0: for ever.
	RotateKeys, RotationPatience time.Duration
	// Yield, if any, is called right before this replica releases the votes of the nodes. After it
	// returns, the replica sends no more packets of nodes to peers.
	Yield func()
}

// A Gateway is the Kubernetes side of one replica of the gateway. Its methods may be called
// concurrently.
type Gateway struct {
	o       GatewayOptions
	log     *slog.Logger
	client  client.Client // not cached, with its own limit
	objects *objects
	look    signal
	metrics *gatewayMetrics
	reading atomic.Bool // everything has been read once
	keeper  *keeper
	asking  atomic.Bool // TunnelEndpoints or NatMappings have changed since they were listed

	prepared chan struct{} // closed when everything has been read once
	leaving  chan struct{} // closed when another replica should take over
	writing  sync.Mutex    // held by Write
	places   places

	mu       sync.Mutex
	shared   [32]byte  // shared by the installation's gateways, to authenticate; zero: unknown
	started  *election // nil until Run
	election *election // like client; nil until the first Snapshot
	wait     error     // why there is no Snapshot from the API server yet
	desired  desired
	replaced chan struct{} // closed when desired is replaced

	listen func() (net.PacketConn, error) // for questions of other gateways

	// agents has the nodes with a route agent's Pod; nil: no agent is known to be a Pod.
	agents atomic.Pointer[map[string]bool]
	// candidate is nil if this replica uses the host network: then the Lease alone decides.
	candidate *voting.Candidate
}

// NewGateway connects to nothing yet.
func NewGateway(o GatewayOptions) (*Gateway, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	o.Tunnels = max(o.Tunnels, 1)
	g := &Gateway{o: o, log: o.Log, look: newSignal(), prepared: make(chan struct{}), leaving: make(chan struct{}), replaced: make(chan struct{}), wait: errors.New("starting")}
	g.keeper = newKeeper(o, g.look.set)
	g.listen = func() (net.PacketConn, error) { return listenAt(o.PodIP) }
	g.places.known.Self = o.Node
	if o.Node != "" {
		g.candidate = voting.NewCandidate(o.Pod, o.PodIP, g.SharedKey, o.Log)
	}
	g.metrics = newGatewayMetrics(g)
	config := rest.CopyConfig(o.Config)
	config.QPS, config.Burst = 100, 100 // of writes: 500 peers change within seconds, and the API server is not flooded
	var err error
	if g.client, err = client.New(config, client.Options{Scheme: newScheme()}); err != nil {
		return nil, err
	}
	return g, nil
}

// Run watches, takes part in the election, and calls serve. serve prepares, and acts once begin is
// closed, which is when this replica becomes active. The context of serve ends when the replica is
// no longer active; then Run calls serve again. A replica that has its node's network prepares
// nothing: serve is called when it becomes the active one. Before that, when another replica is
// seen to be active, standby is called once, to clear what an earlier life of this one may have
// left. Run returns when ctx ends, or when serve or standby fails, the Lease released. When ctx
// ends and another replica is ready, serve goes on until that one has taken over, for no longer
// than handOverMost.
//
// While the API server cannot be reached for the first Snapshot, Run waits: Ready and the log say
// for what. A replica that was the active one shortly before, by its state directory, carries on
// with what it knew.
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
		e.votes = &ballot{Candidate: g.candidate, wanted: g.o.Votes, key: func() { g.tellKey(ctx) }, agents: g.agents.Load}
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
	asking, silence := context.WithCancel(ctx)
	var questioners sync.WaitGroup
	q, others := g.questioner(e)
	questioners.Go(func() { q.run(asking) })
	defer questioners.Wait()
	defer silence()
	group.Go(func() {
		if g.prepare(ctx, &group, e) == nil {
			close(g.prepared)
		}
	})
	if err := g.await(wanted, e, known, others); err != nil {
		return nil // it is not needed any more
	}
	g.mu.Lock()
	g.election = e
	g.mu.Unlock()
	e.stand(true)

	electing, leave := context.WithCancel(ctx)
	var elector sync.WaitGroup
	elector.Go(func() { e.run(electing) })
	elector.Go(func() { g.keeper.run(electing, e) })
	release := sync.OnceFunc(func() {
		leave()
		silence()
		elector.Wait()
		questioners.Wait() // any later answer would be wrong
		close(g.leaving)
		// A write in progress could name this replica after the successor has named itself.
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

// release gives up the votes and the Lease. Nodes follow another replica as soon as that one has the
// votes, so this one yields first.
func (g *Gateway) release(e *election) error {
	if e.byVotes() && g.o.Yield != nil {
		g.o.Yield()
	}
	return e.release()
}

// CannotTakeOver returns why this replica, a standby, would not become active if the active one
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

// MaySend reports whether this replica may send to peers now. It is called right before each send.
func (g *Gateway) MaySend() bool { return g.candidate == nil || g.candidate.Gate.Open() }

// follow serves until ctx ends.
func (g *Gateway) follow(ctx context.Context, e *election, serve func(context.Context, <-chan struct{}) error, standby func() error) error {
	cleared := g.o.Node != "" // serve adopts and removes what an earlier replica has left
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
		case <-g.leaving: // there is no reason to prepare
			<-ctx.Done()
		default:
		}
	}
	return nil
}

// serve makes the gateway prepare, act while this replica is active, and end.
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

// prepare returns once there is a usable Snapshot from the API server, and the Lease is watched.
// Everything that it starts ends with ctx.
func (g *Gateway) prepare(ctx context.Context, group *sync.WaitGroup, e *election) error {
	waiting := g.waiter()
	err := retry(ctx, waiting, func() (err error) {
		g.objects, err = newObjects(g.restConfig(), g.kinds(), g.log)
		return err
	})
	if err != nil {
		return err
	}
	group.Go(func() { _ = g.objects.Start(ctx) }) // it only ends with ctx
	ask := func() {
		g.asking.Store(true)
		g.look.set()
	}
	err = errors.Join(
		g.objects.watch(ctx, g.look.set, waiting, &corev1.Secret{}, &corev1.Service{}, &isthmus.NetworkAllocation{}, &discoveryv1.EndpointSlice{}),
		g.objects.watch(ctx, ask, waiting, &v1alpha1.NatMapping{}, &v1alpha1.TunnelEndpoint{}),
		g.objects.watchBy(ctx, g.places.handler(g.look.set), waiting, &corev1.Node{}))
	if err != nil {
		return err
	}
	if g.o.Node == "" {
		err = g.objects.watch(ctx, g.look.set, waiting, &corev1.Pod{})
	} else {
		err = g.objects.watchBy(ctx, g.places.handler(g.look.set), waiting, &corev1.Pod{})
	}
	if err != nil {
		return err
	}
	if err := g.objects.watchBy(ctx, g.meet(e), waiting, &corev1.Pod{}); err != nil {
		return err
	}
	preshared, err := g.watchPreshared(ctx, group, waiting)
	if err != nil {
		return err
	}
	e.onlySeen()
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
	if err := g.objects.watch(ctx, e.look.set, waiting, &coordinationv1.Lease{}); err != nil {
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

// Ready returns why this replica cannot become or be active, or nil. A replica that carries on from its
// snapshot is not ready, because it learns of no change. Neither is a holder of the Lease that may not
// speak, nor a standby that hears too few voters.
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
