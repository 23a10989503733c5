package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// Lease is the name of the Lease whose holder is the active gateway.
const Lease = "isthmus-gateway"

// Timing of the election, Liqo's. A replica that died is replaced after
// leaseDuration and at most two (jittered) retryPeriods.
const (
	leaseDuration = 7 * time.Second
	renewDeadline = 5 * time.Second
	retryPeriod   = 2 * time.Second
	leaseTimeout  = renewDeadline / 2 // of one request
)

// election decides which replica is active. It is client-go's, seen through a
// witness of everything that is read from or written to the Lease, and the
// witness alone is believed:
//
//   - This replica becomes active when it has written its name into the Lease.
//   - It stays active, with or without an API server, until it reads another
//     name there. client-go's elector gives up when it could not renew for
//     renewDeadline; it is simply started again.
//   - After a time without an API server a standby waits for another
//     leaseDuration before it takes the Lease: it cannot tell an active replica
//     that died from one that could not reach the API server either.
//
// A replica that alone is cut off from the API server is thus active beside its
// successor until it is back. That does less harm than the reverse, a data plane
// that stops with the API server: peers answer whoever spoke last.
type election struct {
	lock     *witness
	log      *slog.Logger
	changed  signal // what holder returns
	released signal // the Lease is free: do not wait for the next retry
}

func newElection(config *rest.Config, namespace, identity string, log *slog.Logger) (*election, error) {
	config = rest.CopyConfig(config)
	config.Timeout = leaseTimeout
	config.QPS, config.Burst = 5, 10 // of its own, so that no other request can delay it
	leases, err := coordination.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	e := &election{log: log, changed: newSignal(), released: newSignal()}
	e.lock = &witness{
		Interface: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: namespace, Name: Lease},
			Client:     leases,
			LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
		},
		log: log, changed: e.changed, now: time.Now,
	}
	return e, nil
}

// run takes part until ctx ends.
func (e *election) run(ctx context.Context) {
	silent := klog.NewContext(ctx, logr.Discard()) // the witness logs, once
	for ctx.Err() == nil {
		elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: e.lock, LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: retryPeriod, Name: Lease,
			Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}},
		})
		if err != nil {
			panic(err) // the constants above contradict each other
		}
		attempt, cancel := context.WithCancel(silent)
		done := make(chan struct{})
		go func() { elector.Run(attempt); close(done) }()
	wait:
		for {
			select {
			case <-done:
				break wait
			case <-e.released:
				if e.lock.holder() == e.lock.Identity() {
					continue
				}
				cancel() // and begin again, which looks at once
			}
		}
		cancel()
	}
}

// active reports whether this replica is the active one.
func (e *election) active() bool { return e.lock.holder() == e.lock.Identity() }

// release frees the Lease if this replica holds it, so that a standby need not
// wait. To be called when run has returned.
func (e *election) release() error {
	ctx, cancel := context.WithTimeout(context.Background(), leaseTimeout)
	defer cancel()
	record, _, err := e.lock.Interface.Get(ctx)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("Lease %s: %w", e.lock.Describe(), err)
	case record.HolderIdentity != e.lock.Identity():
		return nil
	}
	now := metav1.Now()
	err = e.lock.Interface.Update(ctx, resourcelock.LeaderElectionRecord{
		LeaseDurationSeconds: 1, AcquireTime: now, RenewTime: now, LeaderTransitions: record.LeaderTransitions,
	})
	if err != nil {
		return fmt.Errorf("Lease %s: %w", e.lock.Describe(), err)
	}
	return nil
}

// errSettling keeps the elector from taking a Lease that looks expired.
var errSettling = errors.New("the API server was away: the active gateway gets time to renew its Lease")

// A witness stands between the elector and the Lease.
type witness struct {
	resourcelock.Interface
	log     *slog.Logger
	changed signal
	now     func() time.Time

	mu    sync.Mutex
	name  string    // in the Lease when it was last seen; not emptied when it is freed
	since time.Time // end of the last gap in the contact with the API server; zero: there was none
	last  time.Time // contact
	away  bool
}

// Get implements resourcelock.Interface.
func (w *witness) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := w.Interface.Get(ctx)
	switch {
	case apierrors.IsNotFound(err):
		w.contact()
		return nil, nil, err
	case err != nil:
		w.noContact(err)
		return nil, nil, err
	}
	since := w.contact()
	w.saw(record.HolderIdentity)
	if holder := record.HolderIdentity; holder != "" && holder != w.Identity() && w.now().Sub(since) < leaseDuration {
		return nil, nil, errSettling
	}
	return record, raw, nil
}

// Create implements resourcelock.Interface.
func (w *witness) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return w.wrote(w.Interface.Create(ctx, record), record)
}

// Update implements resourcelock.Interface.
func (w *witness) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return w.wrote(w.Interface.Update(ctx, record), record)
}

func (w *witness) wrote(err error, record resourcelock.LeaderElectionRecord) error {
	switch {
	case err == nil:
		w.contact()
		w.saw(record.HolderIdentity)
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
		w.contact() // another replica was faster
	default:
		w.noContact(err)
	}
	return err
}

func (w *witness) holder() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.name
}

func (w *witness) lastContact() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last
}

func (w *witness) saw(holder string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if holder == "" || holder == w.name {
		return
	}
	w.log.Info("active gateway", "pod", holder, "before", w.name)
	w.name = holder
	w.changed.set()
}

// contact returns when the last gap ended.
func (w *witness) contact() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.now()
	if !w.last.IsZero() && now.Sub(w.last) > renewDeadline {
		w.since = now
	}
	if w.last = now; w.away {
		w.away = false
		w.log.Info("the Lease can be read and written again")
	}
	return w.since
}

func (w *witness) noContact(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.away && !errors.Is(err, context.Canceled) {
		w.away = true
		w.log.Warn("Lease not reached; the active gateway stays the same", "error", err)
	}
}
