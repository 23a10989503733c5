package manager

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/manager/ipam"
)

const (
	// expiryInterval is how often mapped endpoints are looked for, expiryGrace how long one is away
	// before its mappings end: a Pod or node that is made anew under its old address keeps them.
	expiryInterval = 5 * time.Minute
	expiryGrace    = time.Hour
	// For each look-up the API server goes through all Pods in its memory, which takes it some 2 µs
	// each. Our own are lookupsPerSecond after the first lookupBurst, those of callers (all together)
	// askedPerSecond after the first askedBurst.
	lookupsPerSecond, lookupBurst = 1, 20
	askedPerSecond, askedBurst    = 10, 100
)

// An expiry ends mappings of endpoints that are gone, so that a peer does not reach what gets their
// address next.
//
// The manager does not watch Pods and Services. When an endpoint is mapped it asks what has the
// address, and the IPAM state records that. It asks again now and then for what the state records. An endpoint of
// which nobody knew what it was, such as a machine outside of the cluster, stays until it is
// unmapped.
type expiry struct {
	// Reader reads from the API server directly, because a cache would watch all Pods and Services.
	Reader client.Reader
	Store  expiryStore
	Log    *slog.Logger

	asked   *rate.Limiter            // look-ups of callers
	expired atomic.Uint64            // mappings
	since   map[netip.Addr]time.Time // when an endpoint was found to be gone; run's alone
}

// An expiryStore is the part of ipamstore.Store that an expiry uses.
type expiryStore interface {
	State() ipam.State
	Update(context.Context, func(ipam.State) (ipam.State, error)) (ipam.State, error)
}

func newExpiry(reader client.Reader, store expiryStore, log *slog.Logger) *expiry {
	return &expiry{Reader: reader, Store: store, Log: log, asked: rate.NewLimiter(askedPerSecond, askedBurst), since: make(map[netip.Addr]time.Time)}
}

// run looks now and then, until ctx ends.
func (x *expiry) run(ctx context.Context) error {
	tick := time.NewTicker(expiryInterval)
	defer tick.Stop()
	for {
		if err := x.look(ctx, time.Now()); err != nil && ctx.Err() == nil {
			x.Log.Warn("cannot look up mapped endpoints; no mapping expires meanwhile", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// look ends the mappings of what has been gone for the grace period, and at once those of addresses
// that are something else now. It goes on after an error and returns the first one.
func (x *expiry) look(ctx context.Context, now time.Time) (first error) {
	known := x.Store.State().Known()
	maps.DeleteFunc(x.since, func(ip netip.Addr, _ time.Time) bool {
		_, mapped := slices.BinarySearchFunc(known, ip, func(e ipam.Endpoint, ip netip.Addr) int { return e.IP.Compare(ip) })
		return !mapped
	})
	pace := rate.NewLimiter(lookupsPerSecond, lookupBurst)
	for _, e := range known {
		if err := x.lookFor(ctx, e, now, pace); first == nil {
			first = err
		}
	}
	return first
}

func (x *expiry) lookFor(ctx context.Context, e ipam.Endpoint, now time.Time, pace *rate.Limiter) error {
	what, err := x.find(ctx, e.IP, pace)
	if err != nil {
		return err
	}
	if what == e.What {
		delete(x.since, e.IP)
		return nil
	}
	gone, before := x.since[e.IP]
	if !before {
		gone = now
		x.since[e.IP] = now
	}
	if what != "" || now.Sub(gone) >= expiryGrace {
		return x.end(ctx, e, what)
	}
	if !before {
		x.Log.Info("mapped endpoint is gone; its mappings expire unless it returns", "endpoint", e.IP, "was", e.What, "peers", e.For, "in", expiryGrace)
	}
	return nil
}

// end ends the mappings of one endpoint.
func (x *expiry) end(ctx context.Context, e ipam.Endpoint, is string) error {
	before := x.Store.State()
	after, err := x.Store.Update(ctx, func(b ipam.State) (ipam.State, error) {
		before = b
		return b.Expire(e), nil
	})
	if err != nil {
		return fmt.Errorf("end the mappings of endpoint %v: %w", e.IP, err)
	}
	for _, id := range e.For {
		if before.Mapped(id, e.IP) && !after.Mapped(id, e.IP) {
			x.expired.Add(1)
			x.Log.Warn("mapping expired, because its endpoint is gone", "endpoint", e.IP, "was", e.What, "is", is, "peer", id, "askedFor", before.AskedFor(id, e.IP))
		}
	}
	return nil
}

// what is find at the pace for callers. It may be called concurrently.
func (x *expiry) what(ctx context.Context, ip netip.Addr) (string, error) {
	return x.find(ctx, ip, x.asked)
}

// find returns the present owner of an address: a node, a Service, a peer or a Pod, or "" if neither the IPAM state
// nor the API server knows one. It asks the API server at the given pace.
func (x *expiry) find(ctx context.Context, ip netip.Addr, pace *rate.Limiter) (string, error) {
	b := x.Store.State()
	if b.IsNode(ip) {
		return "node", nil
	}
	if b.ServicesAt(ip).IsValid() {
		return x.first(ctx, pace, "service", "Service", fields.OneTermEqualSelector("spec.clusterIP", ip.String()))
	}
	if id, _ := b.PeerAt(ip); id != "" {
		return "peer " + id, nil
	}
	// Pods that have ended have released their address, and Pods with hostNetwork have none of their own.
	return x.first(ctx, pace, "pod", "Pod", fields.AndSelectors(
		fields.OneTermEqualSelector("status.podIP", ip.String()),
		fields.OneTermEqualSelector("spec.hostNetwork", "false"),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed))))
}

// first returns the given word if there is an object that the selector finds.
func (x *expiry) first(ctx context.Context, pace *rate.Limiter, word, kind string, selector fields.Selector) (string, error) {
	if err := pace.Wait(ctx); err != nil {
		return "", err
	}
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind + "List"))
	// Version 0 is what the API server has in its memory; another one would make some of them read
	// all objects from etcd.
	err := x.Reader.List(ctx, &list, &client.ListOptions{FieldSelector: selector, Raw: &metav1.ListOptions{ResourceVersion: "0"}})
	if err != nil {
		return "", fmt.Errorf("look for a %s by %v: %w", kind, selector, err)
	}
	if len(list.Items) == 0 {
		return "", nil
	}
	return word, nil
}
