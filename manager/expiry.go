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
	// expiryInterval is the interval between two look-ups of all mapped endpoints. expiryGrace is
	// the time for which an endpoint must be gone before its mappings end. A Pod or node that is
	// recreated with its old address within that time keeps its mappings.
	expiryInterval = 5 * time.Minute
	expiryGrace    = time.Hour
	// For each look-up the API server scans all Pods in its memory, which takes some 2 µs per Pod.
	// lookupsPerSecond and lookupBurst limit the regular look-ups. callerLookupsPerSecond and
	// callerLookupBurst limit the look-ups for all callers of the IPAM service together.
	lookupsPerSecond, lookupBurst             = 1, 20
	callerLookupsPerSecond, callerLookupBurst = 10, 100
)

// An expiry ends the mappings of endpoints that are gone. Otherwise a peer would reach the next
// owner of such an endpoint's address.
//
// The manager does not watch Pods and Services. When an endpoint is mapped, expiry looks up the
// object that owns the address, and the IPAM state records the kind of that object. Later, expiry
// looks up the recorded endpoints at intervals. An endpoint of unknown kind, such as a machine
// outside of the cluster, stays until it is unmapped.
type expiry struct {
	// Reader reads from the API server directly, because a cache would watch all Pods and Services.
	Reader client.Reader
	Store  expiryStore
	Log    *slog.Logger

	callerLookups *rate.Limiter            // limits the look-ups for callers of the IPAM service
	expired       atomic.Uint64            // number of expired mappings
	since         map[netip.Addr]time.Time // when each missing endpoint was first found to be gone; only run uses it
}

// An expiryStore is the part of ipamstore.Store that an expiry uses.
type expiryStore interface {
	State() ipam.State
	Update(context.Context, func(ipam.State) (ipam.State, error)) (ipam.State, error)
}

func newExpiry(reader client.Reader, store expiryStore, log *slog.Logger) *expiry {
	return &expiry{Reader: reader, Store: store, Log: log, callerLookups: rate.NewLimiter(callerLookupsPerSecond, callerLookupBurst), since: make(map[netip.Addr]time.Time)}
}

// run looks up all endpoints at intervals, until ctx ends.
func (x *expiry) run(ctx context.Context) error {
	tick := time.NewTicker(expiryInterval)
	defer tick.Stop()
	for {
		if err := x.sweep(ctx, time.Now()); err != nil && ctx.Err() == nil {
			x.Log.Warn("cannot look up mapped endpoints; no mapping expires meanwhile", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// sweep ends the mappings of endpoints that have been gone for expiryGrace. If the owner of an
// address has changed, it ends the mappings at once. It continues after an error and returns the
// first error.
func (x *expiry) sweep(ctx context.Context, now time.Time) (first error) {
	known := x.Store.State().Known()
	maps.DeleteFunc(x.since, func(ip netip.Addr, _ time.Time) bool {
		_, mapped := slices.BinarySearchFunc(known, ip, func(e ipam.Endpoint, ip netip.Addr) int { return e.IP.Compare(ip) })
		return !mapped
	})
	pace := rate.NewLimiter(lookupsPerSecond, lookupBurst)
	for _, e := range known {
		if err := x.checkEndpoint(ctx, e, now, pace); first == nil {
			first = err
		}
	}
	return first
}

func (x *expiry) checkEndpoint(ctx context.Context, e ipam.Endpoint, now time.Time, pace *rate.Limiter) error {
	what, err := x.find(ctx, e.IP, pace)
	if err != nil {
		return err
	}
	if what == e.Kind {
		delete(x.since, e.IP)
		return nil
	}
	missing, before := x.since[e.IP]
	if !before {
		missing = now
		x.since[e.IP] = now
	}
	if what != "" || now.Sub(missing) >= expiryGrace {
		return x.end(ctx, e, what)
	}
	if !before {
		x.Log.Info("mapped endpoint is gone; its mappings expire unless it returns", "endpoint", e.IP, "was", e.Kind, "peers", e.For, "in", expiryGrace)
	}
	return nil
}

// end ends the mappings of one endpoint. owner is the kind of object that has the address now, or
// "" if no object has it.
func (x *expiry) end(ctx context.Context, e ipam.Endpoint, owner string) error {
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
			x.Log.Warn("mapping expired, because its endpoint is gone", "endpoint", e.IP, "was", e.Kind, "is", owner, "peer", id, "requesters", before.Requesters(id, e.IP))
		}
	}
	return nil
}

// ownerKind calls find with the limit for callers of the IPAM service. It may be called
// concurrently.
func (x *expiry) ownerKind(ctx context.Context, ip netip.Addr) (string, error) {
	return x.find(ctx, ip, x.callerLookups)
}

// find returns the kind of an address's present owner: a node, a Service, a peer or a Pod. It
// returns "" if it finds no owner in the IPAM state or at the API server. pace limits requests to
// the API server.
func (x *expiry) find(ctx context.Context, ip netip.Addr, pace *rate.Limiter) (string, error) {
	b := x.Store.State()
	if b.IsNode(ip) {
		return "node", nil
	}
	if b.ServicesAt(ip).IsValid() {
		return x.ownerIf(ctx, pace, "service", "Service", fields.OneTermEqualSelector("spec.clusterIP", ip.String()))
	}
	if id, _ := b.PeerAt(ip); id != "" {
		return "peer " + id, nil
	}
	// Pods that have ended have released their address. Pods with hostNetwork have the node's address.
	return x.ownerIf(ctx, pace, "pod", "Pod", fields.AndSelectors(
		fields.OneTermEqualSelector("status.podIP", ip.String()),
		fields.OneTermEqualSelector("spec.hostNetwork", "false"),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed))))
}

// ownerIf returns owner if an object of the kind matches the selector; otherwise "".
func (x *expiry) ownerIf(ctx context.Context, pace *rate.Limiter, owner, kind string, selector fields.Selector) (string, error) {
	if err := pace.Wait(ctx); err != nil {
		return "", err
	}
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind + "List"))
	// The API server answers requests for version 0 from its memory. For any other version, some API
	// servers would read all objects from etcd.
	err := x.Reader.List(ctx, &list, &client.ListOptions{FieldSelector: selector, Raw: &metav1.ListOptions{ResourceVersion: "0"}})
	if err != nil {
		return "", fmt.Errorf("find a %s by %v: %w", kind, selector, err)
	}
	if len(list.Items) == 0 {
		return "", nil
	}
	return owner, nil
}
