package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// Timing of the election, Liqo's but for the renew deadline, which there is none of.
const (
	leaseDuration = 7 * time.Second
	retryPeriod   = 2 * time.Second
	leaseTimeout  = 2500 * time.Millisecond // of one request

	// contactGap is a time without an answer that cannot come from slowness.
	contactGap = retryPeriod + leaseTimeout + time.Second/2
)

// election decides which replica is active, by what is written in the Lease alone:
//
//   - This replica becomes active when it has written its name into the Lease, because nobody's was
//     there or the Lease had not changed for leaseDuration.
//   - It stays active, with or without an API server, until it reads another name, also over a
//     restart (see remember).
//   - Time without contact to the API server does not count: a standby cannot tell an active
//     replica that died from one that could not reach the API server either, and gives it another
//     leaseDuration to show itself.
//
// client-go's elector differs in each of the three: it gives up when it could not renew for a
// while, and the first to find the API server back takes over. It also looks at the Lease only
// every two to four seconds; this one is told of changes, and takes over as soon as the Lease has
// expired. The Lease itself means the same to both.
//
// A replica that alone is cut off from the API server is active beside its successor until it is
// back. That does less harm than the reverse, a data plane that stops with the API server: peers
// answer whoever spoke last.
type election struct {
	leases   coordination.LeaseInterface
	web      *http.Client // of leases alone
	identity string
	log      *slog.Logger
	changed  signal        // what holder returns
	look     signal        // something happened to the Lease
	cached   func() string // its holder by the watch, which may be late

	// Of run alone.
	lease   *coordinationv1.Lease // as last read or written; nil: unknown, or there is none
	version string                // that was seen first at ...
	seen    time.Time

	mu   sync.Mutex
	name string    // in the Lease when it was last seen; not emptied when it is freed
	last time.Time // contact with the API server
	away bool
}

func newElection(config *rest.Config, namespace, identity string, cached func() string, log *slog.Logger) (*election, error) {
	config = rest.CopyConfig(config)
	config.Timeout = leaseTimeout
	config.QPS, config.Burst = 5, 10 // of its own, so that no other request can delay it
	// A connection of its own, which ends with a request that got no answer. One of HTTP/2 would
	// stay, and after an outage of the network every request would wait for TCP's next
	// retransmission on it, which gets as rare as once in two minutes.
	config.NextProtos = []string{"http/1.1"}
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	leases, err := coordination.NewForConfigAndClient(config, web)
	if err != nil {
		return nil, err
	}
	return &election{leases: leases.Leases(namespace), web: web, identity: identity, cached: cached, log: log, changed: newSignal(), look: newSignal()}, nil
}

// run takes part until ctx ends.
func (e *election) run(ctx context.Context) {
	for {
		next := time.After(e.step(ctx))
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return
			case <-next:
				waiting = false
			case <-e.look:
				if e.active() && e.cached() == e.identity {
					continue // its own doing
				}
				e.lease, waiting = nil, false // read it
			}
		}
	}
}

// step reads the Lease, writes it if this replica is to be or to stay its holder, and says when to
// do so again at the latest.
func (e *election) step(ctx context.Context) time.Duration {
	if e.lease == nil || !e.active() {
		lease, err := e.leases.Get(ctx, isthmus.LeaseGateway, metav1.GetOptions{})
		if !e.reached(err) {
			return retryPeriod
		}
		if apierrors.IsNotFound(err) {
			lease = nil
		}
		e.observe(lease, time.Now())
	}
	now := time.Now()
	if wait := standDown(e.lease, e.identity, e.seen, now); wait > 0 {
		return min(wait, retryPeriod)
	}
	lease, err := e.write(ctx, take(e.lease, e.identity, now))
	if !e.reached(err) || err != nil { // in case of a conflict another replica was faster
		e.lease = nil
		return retryPeriod / 10
	}
	e.observe(lease, now)
	return retryPeriod
}

func (e *election) write(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	if lease.ResourceVersion == "" {
		return e.leases.Create(ctx, lease, metav1.CreateOptions{})
	}
	return e.leases.Update(ctx, lease, metav1.UpdateOptions{})
}

// standDown says how long a replica has to leave the Lease alone; 0: write it now. seen is when it
// was first seen as it is, in contact with the API server.
func standDown(lease *coordinationv1.Lease, identity string, seen, now time.Time) time.Duration {
	if holder := holderOf(lease); holder == "" || holder == identity {
		return 0
	}
	duration := leaseDuration
	if s := lease.Spec.LeaseDurationSeconds; s != nil && *s > 0 {
		duration = time.Duration(*s) * time.Second
	}
	return max(0, seen.Add(duration).Sub(now))
}

// take returns the Lease with this replica as its holder.
func take(lease *coordinationv1.Lease, identity string, now time.Time) *coordinationv1.Lease {
	at, seconds := metav1.NewMicroTime(now), int32(leaseDuration/time.Second)
	if lease == nil {
		lease = new(coordinationv1.Lease)
		lease.Name = isthmus.LeaseGateway
	} else {
		lease = lease.DeepCopy()
	}
	if holderOf(lease) != identity {
		transitions := int32(1)
		if t := lease.Spec.LeaseTransitions; t != nil {
			transitions += *t
		}
		lease.Spec.AcquireTime, lease.Spec.LeaseTransitions = &at, &transitions
	}
	lease.Spec.HolderIdentity, lease.Spec.LeaseDurationSeconds, lease.Spec.RenewTime = &identity, &seconds, &at
	return lease
}

func holderOf(lease *coordinationv1.Lease) string {
	if lease == nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// observe notes what the Lease says.
func (e *election) observe(lease *coordinationv1.Lease, now time.Time) {
	e.lease = lease
	version := ""
	if lease != nil {
		version = lease.ResourceVersion
	}
	if version != e.version || e.seen.IsZero() {
		e.version, e.seen = version, now
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	holder := holderOf(lease)
	if holder == "" || holder == e.name {
		return
	}
	e.log.Info("active gateway", "pod", holder, "before", e.name)
	e.name = holder
	e.changed.set()
}

// reached notes whether the API server answered: with an error about the Lease it did, too.
func (e *election) reached(err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
		if !e.away && !errors.Is(err, context.Canceled) {
			e.away = true
			e.log.Warn("Lease not reached; the active gateway stays the same", "error", err)
		}
		return false
	}
	if now.Sub(e.last) > contactGap {
		e.seen = now
	}
	e.last = now
	if e.away {
		e.away = false
		e.log.Info("the Lease can be read and written again")
	}
	return true
}

// active reports whether this replica is the active one.
func (e *election) active() bool { return e.holder() == e.identity }

// holder is the name that was last seen in the Lease.
func (e *election) holder() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.name
}

// lastContact is when the Lease was last read or written.
func (e *election) lastContact() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last
}

// ask reads the Lease without taking part. A refusal is an answer, too: the API server is there,
// and somebody may have wanted it.
func (e *election) ask(ctx context.Context) (holder string, refused bool, err error) {
	lease, err := e.leases.Get(ctx, isthmus.LeaseGateway, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return "", false, nil
	case apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err):
		return "", true, nil
	case err != nil:
		return "", false, err
	}
	return holderOf(lease), false, nil
}

// carryOn makes this replica the active one by what it remembers, until it reads another name. To
// be called before run.
func (e *election) carryOn() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.name, e.away = e.identity, true
	e.changed.set()
}

// close is the last use of the election.
func (e *election) close() { utilnet.CloseIdleConnectionsFor(e.web.Transport) }

// release frees the Lease if this replica holds it, so that a standby need not wait. To be called
// when run has returned.
func (e *election) release() error {
	ctx, cancel := context.WithTimeout(context.Background(), leaseTimeout)
	defer cancel()
	lease, err := e.leases.Get(ctx, isthmus.LeaseGateway, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err == nil && holderOf(lease) == e.identity {
		nobody := ""
		lease.Spec.HolderIdentity = &nobody
		_, err = e.write(ctx, lease)
	}
	if err != nil {
		return fmt.Errorf("the Lease %s: %w", isthmus.LeaseGateway, err)
	}
	return nil
}
