package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/owncluster"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// writeTimeout bounds one request that writes.
const writeTimeout = 5 * time.Second

// GatewayOptions say which replica of the gateway this is. All but Node, Cluster, Tunnels, Log and
// StateDirectory are required.
type GatewayOptions struct {
	Config    *rest.Config
	Namespace string     // of the installation: key Secret, Lease, Service and Pods are there
	Pod       string     // name of this replica's Pod, and its identity in the election
	PodIP     netip.Addr // its address; that of its node, where it has the node's network
	// Node is the Node of a replica that has a network of its own, in which the overlay ends. Empty:
	// it has its node's.
	Node string
	// Cluster is ours. Without an ID it is found out: from the ConfigMap in Namespace that Liqo and
	// `isthmus install` write, else the ID is the UID of the namespace kube-system.
	Cluster v1alpha1.ClusterIdentity
	Tunnels int          // that this replica has; 0 means 1
	Log     *slog.Logger // nil: slog.Default()
	// Votes says that nodes are to decide which replica is active. It takes route agents on three nodes, and gateways with a
	// network of their own.
	Votes bool
	// StateDirectory has what this replica carries on with when it was the active one, starts again
	// and the API server does not answer. The private key is among it. Empty: it waits.
	StateDirectory string
	// RotateKeys is the age at which the key is rotated; 0: at none. RotationPatience is how long a rotation waits for
	// peers; 0: for ever.
	RotateKeys, RotationPatience time.Duration
}

// A Gateway is one replica of the gateway as the API server knows it. Its methods may be called
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
	leaving  chan struct{} // closed when another replica is to take over
	writing  sync.Mutex    // held by Write
	places   places

	mu       sync.Mutex
	shared   [32]byte  // the key by which gateways of the installation know each other; zero: not known yet
	started  *election // nil until Run
	election *election // the same, nil until the first Snapshot
	wait     error     // why there is no Snapshot of the API server's yet
	wish     wish
	wished   chan struct{} // closed when wish is replaced
	keyTries time.Time     // when the Secret may be made again
	logged   string        // problems that were logged

	asked     asked // refresh's alone, as the next two
	preshared presharedKeys
	decider   fabric.GatewayDecider

	// What refresh alone uses, about data.tunnels of the Secret; see tellTunnels.
	told      [32]byte  // the private key for which it is or was what we want
	tellAgain time.Time // when it may be written again
	tellErr   error     // of the last attempt

	listen func() (net.PacketConn, error) // for questions of other gateways

	candidate *voting.Candidate // nil: this replica has its node's network, and the Lease alone decides
}

// A Snapshot is what the objects ask of the gateway, complete.
type Snapshot struct {
	Gateway    fabric.Gateway
	Problems   []fabric.Problem // of the objects that were left out: one that is broken concerns no other
	Keys       keyring.Ring
	PodNetwork fabric.PodNetwork       // where a replica delivers that has a network of its own
	Preshared  map[string]PresharedKey // by cluster ID; never modified
}

// wish is the last Snapshot, and whether it is what is wanted now.
type wish struct {
	snapshot   Snapshot
	err        error // why snapshot is an old one
	valid      bool
	remembered error // it is of the state directory, since when and why; nil: of the API server
}

// NewGateway connects to nothing yet.
func NewGateway(o GatewayOptions) (*Gateway, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	o.Tunnels = max(o.Tunnels, 1)
	g := &Gateway{o: o, log: o.Log, look: newSignal(), prepared: make(chan struct{}), leaving: make(chan struct{}), wished: make(chan struct{}), wait: errors.New("starting")}
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

// Run watches, takes part in the election, and calls serve, which prepares, and acts when begin is closed: then this
// replica is the active one. The context of serve ends when it is not any more, and serve is called again. A replica
// that has its node's network prepares nothing: serve is called when it becomes the active one. Before that, when another
// replica is seen to be active, standby is called once, to clear what an earlier life of this one may have
// left. Run returns when ctx ends, or when serve or standby fails, the Lease released. When ctx ends
// and another replica is ready, serve goes on until that one has taken over, for no longer than
// handOverMost.
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
		e.votes = &ballot{Candidate: g.candidate, wanted: g.o.Votes, key: func() { g.tellKey(ctx) }}
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
		return nil // it is not wanted any more
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
		questioners.Wait() // what it answers from now on would not be true
		close(g.leaving)
		g.writing.Lock() // what it has begun could name this one after the successor has named itself
		defer g.writing.Unlock()
		if err := e.release(); err != nil {
			g.log.Warn("Lease not released; a standby waits until it expires", "error", err)
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

// handOverMost is how long a replica that ends waits for another one to take over: a standby that sees
// no change of the Lease reads it every retryPeriod.
const (
	handOverMost = 4 * time.Second
	handOverLook = 10 * time.Millisecond
)

// handOver returns when another replica has taken over what this one carries, or when there is nobody
// to wait for. Until then this one goes on to carry it.
func (g *Gateway) handOver(ended <-chan struct{}) {
	for begin := time.Now(); time.Since(begin) < handOverMost; {
		next, waiting := g.successor()
		if next != "" {
			g.log.Info("another gateway has taken over", "pod", next, "after", time.Since(begin).Round(time.Millisecond).String())
		}
		if next != "" || !waiting {
			return
		}
		select {
		case <-ended:
			return
		case <-time.After(handOverLook):
		}
	}
}

// successor is the Pod of another gateway that holds the Lease and to which the Service leads the nodes: what the Service alone
// names may be the gateway before this one, when it could not be written since, or anything. Without one, waiting
// says whether there is a gateway that could become it. Gateways that have their nodes' networks do not
// wait: the nodes ask the TunnelEndpoints where these are.
func (g *Gateway) successor() (pod string, waiting bool) {
	if g.o.Node == "" || !g.reading.Load() {
		return "", false
	}
	ctx := context.Background() // these are in memory
	var pods corev1.PodList
	var services corev1.ServiceList
	if g.objects.List(ctx, &pods, client.InNamespace(g.o.Namespace), client.MatchingLabels(podLabels)) != nil || g.objects.List(ctx, &services) != nil {
		return "", false
	}
	holder := g.holder(ctx)
	for _, p := range pods.Items {
		if p.Name == g.o.Pod || !p.DeletionTimestamp.IsZero() {
			continue
		}
		waiting = waiting || p.Status.Phase == corev1.PodRunning // a container that has died is seen late; it costs a while of waiting
		for _, s := range services.Items {
			if p.Name == holder && p.Status.PodIP != "" && s.Annotations[isthmus.AnnotationGateways] == p.Status.PodIP {
				return p.Name, true
			}
		}
	}
	return "", waiting
}

// holder is who has the Lease by the watch, which may be late; empty: nobody, or not known, as before everything
// has been read once.
func (g *Gateway) holder(ctx context.Context) string {
	if !g.reading.Load() { // then objects may not be there, and is being written
		return ""
	}
	var lease coordinationv1.Lease
	if g.objects.Get(ctx, client.ObjectKey{Namespace: g.o.Namespace, Name: isthmus.LeaseGateway}, &lease) != nil {
		return ""
	}
	return holderOf(&lease)
}

// questioner returns the questioner of e, and the stored state of the other gateways.
func (g *Gateway) questioner(e *election) (*questioner, acquaintance) {
	q := &questioner{election: e, listen: g.listen, log: g.log,
		refused: func(why string, n uint32) { g.metrics.refused.WithLabelValues(why).Add(float64(n)) },
		private: func() [32]byte {
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.wish.snapshot.Keys.Gateways
		}}
	if g.o.StateDirectory == "" {
		return q, acquaintance{}
	}
	before, known, err := rememberOthers(g.o.StateDirectory)
	if err != nil {
		g.log.Error("nothing is known of other gateways until the API server answers", "directory", g.o.StateDirectory, "error", err)
	}
	q.before = before
	e.recall(known)
	return q, known
}

// meet lets e follow the Pods of the other gateways.
func (g *Gateway) meet(e *election) toolscache.ResourceEventHandler {
	set := func(o any) {
		p, ok := o.(*corev1.Pod)
		if !ok || !isGateway(p, g.o.Namespace) || p.Name == g.o.Pod {
			return
		}
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			e.unsee(p.Name)
			return
		}
		addr, _ := netip.ParseAddr(p.Status.PodIP) // invalid: it has none yet
		e.see(p.Name, addr, !p.DeletionTimestamp.IsZero())
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    set,
		UpdateFunc: func(_, after any) { set(after) },
		DeleteFunc: func(o any) {
			if gone, missed := o.(toolscache.DeletedFinalStateUnknown); missed {
				o = gone.Obj
			}
			if p, ok := o.(*corev1.Pod); ok && isGateway(p, g.o.Namespace) {
				e.unsee(p.Name)
			}
		},
	}
}

// MaySend reports whether this replica may send to peers now. It is asked right before it does.
func (g *Gateway) MaySend() bool { return g.candidate == nil || g.candidate.Gate.Open() }

// remember returns what the state directory says to carry on with, if it says anything.
func (g *Gateway) remember() *remembered {
	if g.o.StateDirectory == "" {
		return nil
	}
	known, err := remember(g.o, time.Now())
	if err != nil {
		g.log.Error("snapshot not used; waiting for the API server", "directory", g.o.StateDirectory, "error", err)
		g.keeper.tell(err)
	}
	return known
}

// carryOnMisses is how many times in a row, a second apart, the Lease could not be read when a
// replica carries on by what it remembers: while it was away another one may have taken over, and
// one lost packet is no outage.
const carryOnMisses = 2

// await returns when everything has been read, or when this replica carries on with what is known
// since it cannot be told of a successor.
func (g *Gateway) await(ctx context.Context, e *election, known *remembered, others acquaintance) error {
	for misses := 0; known != nil; {
		holder, refused, err := e.ask(ctx)
		switch {
		case err != nil:
			misses++
		case !refused && holder != g.o.Pod:
			g.log.Info("the snapshot is of no use: another replica has been active since", "pod", holder)
			known = nil
			continue
		default:
			misses = 0
		}
		if misses == carryOnMisses && ctx.Err() == nil {
			if e.superseded(others, time.Now()) {
				g.log.Info("the snapshot is of no use: another gateway answers that it has taken over")
				known = nil
				continue
			}
			g.carryOn(e, known, others)
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-g.prepared:
			return nil
		case <-time.After(time.Second):
		}
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-g.prepared:
		return nil
	}
}

// carryOn makes this replica the active one with what is known.
func (g *Gateway) carryOn(e *election, known *remembered, others acquaintance) {
	why := known.from(time.Now())
	g.log.Warn("active again without having been told", "peers", len(known.snapshot.Gateway.Peers), "reason", why)
	g.keeper.adopt(known)
	e.carryOn(others)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.wish.valid { // else the API server has answered just now
		g.wishLocked(wish{snapshot: known.snapshot, err: why, valid: true, remembered: why})
	}
}

// follow serves until ctx ends.
func (g *Gateway) follow(ctx context.Context, e *election, serve func(context.Context, <-chan struct{}) error, standby func() error) error {
	cleared := g.o.Node != "" // what there was has been adopted, and serve removes it
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
		case <-g.leaving: // there is nothing to prepare for
			<-ctx.Done()
		default:
		}
	}
	return nil
}

// serve has the gateway prepare, act while this replica is active, and end.
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
			g.metrics.takeovers.Inc()
			g.keeper.changed.set()
		case acts && !active:
			if !e.holds() {
				g.log.Warn("another replica is active: this one is a standby again")
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

// prepare returns when there is a Snapshot of the API server's that can be used, and the Lease is
// watched. What it starts ends with ctx.
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
	if err := g.watchPreshared(ctx, group, waiting); err != nil {
		return err
	}
	e.onlySeen()
	if g.o.Node != "" {
		g.watchReports(ctx, group)
	}
	var cluster v1alpha1.ClusterIdentity
	err = retry(ctx, waiting, func() (err error) {
		cluster, err = g.identity(ctx)
		return err
	})
	if err != nil {
		return err
	}
	g.look.set()
	group.Go(func() { g.look.coalesce(ctx, nil, func() { g.refresh(ctx, cluster) }) })
	err = retry(ctx, waiting, func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		switch {
		case g.wish.valid && g.wish.remembered == nil:
			return nil
		case g.wish.err != nil:
			return g.wish.err
		}
		return errors.New("the first look at the objects")
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
	peers := len(g.wish.snapshot.Gateway.Peers)
	g.mu.Unlock()
	g.log.Info("objects read", "cluster", cluster.ClusterID, "name", cluster.ClusterName, "peers", peers)
	return nil
}

// restConfig is for watches: few and long requests.
func (g *Gateway) restConfig() *rest.Config {
	config := rest.CopyConfig(g.o.Config)
	config.QPS = -1
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &patient{next, &g.reading} })
	return config
}

// patient repeats a request while there is no connection to the API server. The reflectors of
// client-go would try ever more rarely, up to a minute apart, which spares an API server that
// thousands of nodes watch; the few gateways can be there as soon as it is back.
type patient struct {
	next http.RoundTripper
	on   *atomic.Bool // until then an error is reported at once
}

// RoundTrip implements http.RoundTripper.
func (p *patient) RoundTrip(r *http.Request) (*http.Response, error) {
	for {
		response, err := p.next.RoundTrip(r)
		if err == nil || r.Body != nil || !p.on.Load() {
			return response, err
		}
		select {
		case <-r.Context().Done():
			return nil, err
		case <-time.After(time.Second):
		}
	}
}

// kinds are what is watched.
func (g *Gateway) kinds() map[client.Object]cache.ByObject {
	here := map[string]cache.Config{g.o.Namespace: {}}
	kinds := map[client.Object]cache.ByObject{
		&v1alpha1.TunnelEndpoint{}:   {},
		&v1alpha1.NatMapping{}:       {},
		&isthmus.NetworkAllocation{}: {Transform: slimOwn},
		&corev1.Node{}:               {Transform: slimNode},
		&discoveryv1.EndpointSlice{}: {Namespaces: map[string]cache.Config{
			metav1.NamespaceDefault: {FieldSelector: fields.OneTermEqualSelector("metadata.name", "kubernetes")}}},
		&corev1.Secret{}:        {Namespaces: named(g.o.Namespace, keyring.SecretName)}, // see presharedKeys for the only other one
		&coordinationv1.Lease{}: {Namespaces: named(g.o.Namespace, isthmus.LeaseGateway)},
		&corev1.Pod{}:           g.pods(here),
		&corev1.Service{}:       {Namespaces: here, Label: labels.SelectorFromSet(serviceLabels)},
	}
	if g.o.Node != "" {
		kinds[&isthmus.NodeNetworks{}] = cache.ByObject{Namespaces: here, Transform: slimReport}
	}
	return kinds
}

// named is one object.
func named(namespace, name string) map[string]cache.Config {
	return map[string]cache.Config{namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", name)}}
}

// pods are those of the gateway; a replica that delivers by itself has to know where all are.
func (g *Gateway) pods(here map[string]cache.Config) cache.ByObject {
	if g.o.Node == "" {
		return cache.ByObject{Namespaces: here, Label: labels.SelectorFromSet(podLabels)}
	}
	all := reachablePods()
	all.Transform = func(o any) (any, error) {
		if p, ok := o.(*corev1.Pod); ok && isGateway(p, g.o.Namespace) {
			return o, nil // it is written, too
		}
		return slimPod(o)
	}
	return all
}

// Owner says whose an address of the cluster is, by the Pods and Nodes that a gateway in a Pod follows
// to deliver. One on the host's network delivers nothing and knows nobody. It may be called concurrently.
func (g *Gateway) Owner(addr netip.Addr) fabric.Owner { return g.places.owner(addr) }

// podNetwork is where a replica delivers that has a network of its own.
func (g *Gateway) podNetwork() (n fabric.PodNetwork, err error) {
	if g.o.Node == "" {
		return n, nil
	}
	n = g.places.network(g.o.PodIP)
	for _, node := range n.Nodes {
		if node.Name == n.Node && slices.Contains(node.Addrs, n.Pod) {
			return n, fmt.Errorf("POD_IP %v is an address of Node %s: the Pod has hostNetwork; want --host-network, or hostNetwork: false", n.Pod, node.Name)
		}
	}
	return n, nil
}

// watchReports watches what agents say of their nodes, and returns when that was read once or is not
// to be had for now: a Role of an older version does not allow it, and few clusters need it.
func (g *Gateway) watchReports(ctx context.Context, group *sync.WaitGroup) {
	settled := make(chan struct{})
	settle := sync.OnceFunc(func() { close(settled) })
	group.Go(func() {
		defer settle()
		// It only gives up with ctx; the cache logs what is wrong.
		_ = g.objects.watchBy(ctx, g.places.handler(g.look.set), func(error) { settle() }, &isthmus.NodeNetworks{})
	})
	<-settled
}

// waiter returns a function that says what is being waited for, in the log whenever it is something
// else and twice a minute.
func (g *Gateway) waiter() func(error) {
	var said time.Time
	var last string
	return func(err error) {
		if err == nil {
			return
		}
		g.mu.Lock()
		g.wait = kubeerr.Plain("the API server", err)
		g.mu.Unlock()
		if text := err.Error(); text != last || time.Since(said) > 30*time.Second {
			last, said = text, time.Now()
			g.log.Warn("waiting for the API server", "error", err)
		}
	}
}

// identity finds out who we are. With an ID the gateway is not in need of the API server: the name
// is for people.
func (g *Gateway) identity(ctx context.Context) (v1alpha1.ClusterIdentity, error) {
	if g.o.Cluster.ClusterID != "" {
		return g.o.Cluster, nil // the command line has checked it
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return owncluster.Identify(ctx, g.client, g.o.Namespace, g.o.Cluster)
}

// refresh gathers what the objects say, decides and publishes. Where Nodes or Pods are others, as they are all
// the time in a large cluster, it does not read again what peers ask for.
func (g *Gateway) refresh(ctx context.Context, cluster v1alpha1.ClusterIdentity) {
	g.mu.Lock()
	inUse := g.wish.snapshot.Keys
	g.mu.Unlock()
	ring, mismatch, err := g.key(ctx, inUse)
	site, unknown := g.site(ctx)
	network, unreachable := g.podNetwork()
	if err = errors.Join(err, unknown, unreachable, g.ask(ctx, cluster, ring)); err != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		next := g.wish
		next.err = errors.Join(next.remembered, err)
		g.wishLocked(next)
		return
	}
	problems := slices.Concat(mismatch, g.asked.problems, g.keeper.problems())
	if g.o.StateDirectory != "" {
		saved := g.asked.saved
		saved.places.Site, saved.places.PodNetwork = site, network
		g.keeper.put(saved, ring)
	}
	if g.candidate != nil {
		nodes := make(map[string]netip.Addr)
		for _, n := range network.Nodes {
			if addr := n.Underlay(); addr.IsValid() {
				nodes[n.Name] = addr
			}
		}
		g.candidate.SetNodes(nodes)
	}
	g.publish(Snapshot{Gateway: g.asked.at(site), Problems: problems, Keys: ring, PodNetwork: network, Preshared: g.asked.preshared})
}

// ask reads what peers ask for, if that may be something else than before.
func (g *Gateway) ask(ctx context.Context, cluster v1alpha1.ClusterIdentity, ring keyring.Ring) error {
	private := ring.Private
	keys := g.preshared.read(ctx, g.o.Namespace)
	if !g.asking.Swap(false) && private == g.asked.private && maps.Equal(keys, g.asked.secret) {
		return nil
	}
	var endpoints v1alpha1.TunnelEndpointList
	var mappings v1alpha1.NatMappingList
	err := errors.Join(g.objects.List(ctx, &endpoints, client.UnsafeDisableDeepCopy), g.objects.List(ctx, &mappings, client.UnsafeDisableDeepCopy))
	if err != nil {
		g.asking.Store(true)
		return err
	}
	usable, preshared, lacking := demand(endpoints.Items, keys)
	g.asked = askedFor(&g.decider, cluster, private, usable, mappings.Items)
	g.asked.secret, g.asked.preshared, g.asked.problems = keys, preshared, fabric.SortProblems(append(g.asked.problems, lacking...))
	if g.o.StateDirectory != "" {
		g.asked.saved = savedFrom(cluster, private, endpoints.Items, mappings.Items)
		g.asked.saved.preshared = keys
	}
	return nil
}

// key reads the keys, or sees to it that there is one. The problems are of keys that can be used
// all the same.
func (g *Gateway) key(ctx context.Context, inUse keyring.Ring) (keyring.Ring, []fabric.Problem, error) {
	var secret corev1.Secret
	err := g.objects.Get(ctx, client.ObjectKey{Namespace: g.o.Namespace, Name: keyring.SecretName}, &secret)
	switch {
	case err == nil:
		ring, problems, err := keyFrom(&secret)
		if err != nil {
			return ring, problems, err
		}
		return ring, append(problems, g.tellTunnels(ctx, &secret, ring.Private)...), nil
	case !apierrors.IsNotFound(err):
		return inUse, nil, err
	}
	missing := fmt.Errorf("the Secret %s/%s: not there", g.o.Namespace, keyring.SecretName)
	if now := time.Now(); now.After(g.keyTries) {
		g.keyTries = now.Add(time.Second)
		time.AfterFunc(time.Second, g.look.set) // whether or not this succeeds
		if err := g.createKey(ctx, inUse); err != nil {
			missing = err
		}
	}
	if inUse.Private != ([32]byte{}) {
		return inUse, nil, nil // nothing is worse for the peers yet
	}
	return inUse, nil, missing
}

// asked is what the objects of peers ask for, wherever our own cluster is.
type asked struct {
	private  [32]byte
	gateway  fabric.Gateway // for a cluster that is nowhere
	problems []fabric.Problem
	saved    savedObjects // without places

	secret, preshared map[string]PresharedKey // as the Secret has them, and as handshakes may use them

	ours, networks []fabric.SiteNetwork // of the last site, and with those of peers
}

// gatewayFor has it decided what the objects ask for. What is wrong is left out; each problem names
// the object and the field.
func gatewayFor(cluster v1alpha1.ClusterIdentity, private [32]byte, site fabric.Site, endpoints []v1alpha1.TunnelEndpoint, mappings []v1alpha1.NatMapping) (fabric.Gateway, []fabric.Problem) {
	a := askedFor(new(fabric.GatewayDecider), cluster, private, endpoints, mappings)
	return a.at(site), a.problems
}

// askedFor decides with d, for which what stays the same costs a comparison.
func askedFor(d *fabric.GatewayDecider, cluster v1alpha1.ClusterIdentity, private [32]byte, endpoints []v1alpha1.TunnelEndpoint, mappings []v1alpha1.NatMapping) asked {
	keys := fabric.PublicKeys(private, fabric.MaxTunnels)
	in := fabric.Intent{ClusterID: cluster.ClusterID, ClusterName: cluster.ClusterName, PublicKey: keys[0], FurtherKeys: keys[1:]}
	var peers []fabric.Peer
	var sets []fabric.MappingSet
	var problems []fabric.Problem
	for i := range endpoints {
		te := &endpoints[i]
		if !te.DeletionTimestamp.IsZero() {
			continue // somebody's finalizer holds it; we are done with it
		}
		peer, wrong := fabric.PeerFrom(te, originOf(te))
		problems = append(problems, wrong...)
		if len(wrong) == 0 {
			peers = append(peers, peer)
		}
	}
	for i := range mappings {
		nm := &mappings[i]
		if !nm.DeletionTimestamp.IsZero() {
			continue
		}
		origin := fabric.Origin{Kind: "NatMapping", Name: nm.Name}
		id, found, wrong := fabric.MappingsFrom(nm, origin)
		problems = append(problems, wrong...)
		if id != "" {
			sets = append(sets, fabric.MappingSet{ID: id, Mappings: found, Origin: origin})
		}
	}
	var wrong []fabric.Problem
	in.Peers, in.Waiting, wrong = fabric.Attach(peers, sets)
	problems = append(problems, wrong...)
	gw, wrong := d.GatewayFor(in)
	return asked{private: private, gateway: gw, problems: fabric.SortProblems(append(problems, wrong...))}
}

// at is the gateway of a cluster that is at site, to which peers add networks and nothing else.
func (a *asked) at(site fabric.Site) fabric.Gateway {
	if a.networks == nil || !slices.Equal(site.Networks, a.ours) { // else the same list again, which is soon compared
		a.ours, a.networks = site.Networks, slices.Concat(site.Networks, a.gateway.Site.Networks)
	}
	gw := a.gateway
	gw.Site = fabric.Site{Networks: a.networks, Addrs: site.Addrs, Relays: site.Relays}
	return gw
}

func originOf(te *v1alpha1.TunnelEndpoint) fabric.Origin {
	return fabric.Origin{Kind: "TunnelEndpoint", Namespace: te.Namespace, Name: te.Name}
}

// publish makes a Snapshot of the API server's the wish.
func (g *Gateway) publish(s Snapshot) {
	texts := make([]string, len(s.Problems))
	for i, p := range s.Problems {
		texts[i] = p.Error()
	}
	if all := strings.Join(texts, "\n"); all != g.logged { // only refresh calls this
		g.logged = all
		for _, p := range s.Problems {
			g.log.Warn("left out", "object", p.Origin.String(), "field", p.Field, "problem", p.Message)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.wishLocked(wish{snapshot: s, valid: true})
}

// wishLocked replaces the wish; g.mu is held.
func (g *Gateway) wishLocked(next wish) {
	g.wish = next
	if next.valid {
		g.shared = next.snapshot.Keys.Gateways
	}
	close(g.wished)
	g.wished = make(chan struct{})
}

// Snapshots calls deliver with the present Snapshot and with each that differs from the one before,
// until ctx ends. An error says why the Snapshot before it is not what is wanted now; it stays in
// force.
func (g *Gateway) Snapshots(ctx context.Context, deliver func(Snapshot, error)) {
	var last wish
	for {
		g.mu.Lock()
		w, wished := g.wish, g.wished
		g.mu.Unlock()
		repaired := last.err != nil && w.err == nil
		if w.valid && (repaired || !last.valid || !reflect.DeepEqual(w.snapshot, last.snapshot)) {
			deliver(w.snapshot, nil)
		}
		if w.valid && w.err != nil && (last.err == nil || last.err.Error() != w.err.Error()) {
			deliver(w.snapshot, w.err)
		}
		if w.valid {
			last = w
		}
		select {
		case <-ctx.Done():
			return
		case <-wished:
		}
	}
}

// Ready returns why this replica cannot become or be active, or nil. A replica that carries on from its
// snapshot is not ready, because it learns of no change. Neither is a holder of the Lease that may not
// speak.
func (g *Gateway) Ready() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var why []string
	if g.election != nil {
		if silence := g.election.silence(); silence != "" {
			why = append(why, silence)
		}
	}
	if g.wait == nil {
		if len(why) > 0 {
			return errors.New(why[0])
		}
		return nil
	}
	for _, err := range []error{g.wish.remembered, g.wait, g.keeper.problem()} {
		if err != nil {
			why = append(why, err.Error())
		}
	}
	return errors.New(strings.Join(why, "; "))
}

// SharedKey is keyring.Ring.Gateways; zero: it is not known yet. A replica that restarts knows it by its state
// directory, before the API server answers.
func (g *Gateway) SharedKey() [32]byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shared
}

// DialAPIServer connects to the API server that this gateway reads from.
func (g *Gateway) DialAPIServer(ctx context.Context) (net.Conn, error) {
	server, _, err := rest.DefaultServerUrlFor(g.o.Config)
	if err != nil {
		return nil, err
	}
	return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(server.Hostname(), cmp.Or(server.Port(), "443")))
}

// Others are the addresses of the other gateways of the installation; true: of the active one.
func (g *Gateway) Others() map[netip.Addr]bool {
	g.mu.Lock()
	e := g.started
	g.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.neighbours()
}

// Active returns the name of the active replica's Pod, empty while it is not known, and whether
// this is it.
func (g *Gateway) Active() (pod string, self bool) {
	g.mu.Lock()
	e := g.election
	g.mu.Unlock()
	if e == nil {
		return "", false
	}
	return e.holder(), e.active()
}
