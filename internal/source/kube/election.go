package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// Timing of the election. The values are Liqo's, but there is no renew deadline.
const (
	leaseDuration = 7 * time.Second
	retryPeriod   = 2 * time.Second
	leaseTimeout  = 2500 * time.Millisecond // timeout of one request

	// After contactGap without a response, slow requests cannot be the reason: the API server was
	// unreachable.
	contactGap = retryPeriod + leaseTimeout + time.Second/2
)

// election elects the active replica by the Lease alone, unless nodes vote (see ballot):
//
//   - A replica becomes active by writing its name into the Lease, if the Lease has no holder or
//     has not changed for leaseDuration.
//   - It stays active until it reads another name in the Lease, even without an API server and
//     across a restart (see remember). While it cannot renew the Lease, it asks the other gateways
//     about their state. If one of them does not answer, it stops sending to peers (see decide).
//   - A standby does not take an expired Lease while the Lease's holder answers and sends to peers.
//     If the holder does not renew the Lease, the standby renews it in the holder's name, so that
//     the Lease shows that a gateway is active.
//   - A standby measures the age of the Lease only while it can reach the API server. After an
//     outage of the API server, the active replica has another leaseDuration to renew the Lease,
//     because it may have lost the API server, too.
//
// client-go's elector differs in each of these points. Its holder gives up if it cannot renew the
// Lease for a while, and then the first replica that reaches the API server takes over. It also
// reads the Lease only every two to four seconds. This election watches the Lease, and takes over
// as soon as the Lease has expired. The fields of the Lease have the same meaning for both
// electors.
//
// A replica counts as active if it is the holder and may send to peers.
type election struct {
	leases       coordination.LeaseInterface
	web          *http.Client // HTTP client of leases only
	identity     string
	id           gatewayID // hash of identity
	log          *slog.Logger
	changed      signal        // the result of holder or active has changed
	met          func()        // called when another gateway answers for the first time; may be nil
	leaseChanged signal        // the Lease has changed
	voted        signal        // the votes have changed
	votes        *ballot       // nil: nodes never vote
	cached       func() string // returns the holder of the Lease from the cache of Gateway, which may be stale

	// Only the goroutine of run uses the next four fields.
	lease            *coordinationv1.Lease // as last read or written; nil: unknown, or no Lease exists
	version          string                // resourceVersion of the Lease to which firstSeen belongs
	renewedForHolder time.Time             // when this replica last renewed the Lease in its holder's name
	written          time.Time             // when this replica last wrote the Lease

	mu           sync.Mutex
	name         string      // last holder seen in the Lease, or elected by votes; kept when the Lease is freed
	transition   int32       // transitions of the Lease, or epoch of the votes
	taken        takeover    // why and when this replica last became active
	list         voting.List // list of voters in the Lease
	switching    bool        // a request to switch between Lease and votes is pending or was lost, so it is unknown which of the two decides
	switchedFrom string      // resourceVersion of the Lease before that request
	lacking      bool        // this replica is the holder but lacks a majority of votes
	hasMajority  bool        // a majority of the voters has answered recently
	lastMajority time.Time   // when hasMajority was last true; zero: never
	eligible     bool        // this replica may become active
	renewed      time.Time   // when the last successful renewal by this replica was sent
	firstSeen    time.Time   // the later of two times: when this replica first read the present version of the Lease, and its first contact after the last outage of the API server
	last         time.Time   // last contact with the API server
	away         bool
	taking       bool   // a request that makes this replica the holder is pending or was lost
	sending      bool   // this replica may send to peers if it is the holder
	unanswered   string // the Pod whose missing answer prevents this replica from sending; empty: none
	others       map[gatewayID]*otherGateway
}

func newElection(config *rest.Config, namespace, identity string, cached func() string, log *slog.Logger) (*election, error) {
	config = rest.CopyConfig(config)
	config.Timeout = leaseTimeout
	config.QPS, config.Burst = 5, 10 // a separate limit, so that other requests cannot delay requests for the Lease
	// HTTP/1.1 closes a connection after a request without a response. An HTTP/2 connection would
	// stay open. After a network outage, every request on it would wait for TCP's next
	// retransmission, up to two minutes.
	config.NextProtos = []string{"http/1.1"}
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	leases, err := coordination.NewForConfigAndClient(config, web)
	if err != nil {
		return nil, err
	}
	e := electionWith(leases.Leases(namespace), identity, cached, log)
	e.web = web
	return e, nil
}

func electionWith(leases coordination.LeaseInterface, identity string, cached func() string, log *slog.Logger) *election {
	return &election{leases: leases, identity: identity, id: idOf(identity), cached: cached, log: log, changed: newSignal(), leaseChanged: newSignal(), voted: newSignal(), others: make(map[gatewayID]*otherGateway)}
}

// run takes part in the election until ctx ends.
func (e *election) run(ctx context.Context) {
	counted := newSignal()
	if e.votes != nil { // decide again at once, even while a request to the API server is pending
		var group sync.WaitGroup
		defer group.Wait()
		group.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-e.voted:
					e.reevaluate(time.Now())
					counted.set()
				}
			}
		})
	}
	for {
		next := time.After(e.step(ctx))
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return
			case <-next:
				waiting = false
			case <-counted:
				waiting = !e.counted(time.Now())
			case <-e.leaseChanged:
				if e.holds() && e.cached() == e.identity && !e.lacksMajority() {
					continue // this replica's own write caused the change
				}
				e.lease, waiting = nil, false // forces a read of the Lease
			}
		}
	}
}

// step reads the Lease, and writes it if this replica is the holder or should become the
// holder. It returns the maximum delay until the next step.
func (e *election) step(ctx context.Context) time.Duration {
	if e.lease == nil || !e.holds() || e.lacksMajority() {
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
	if e.byVotes() {
		want := e.stepVotes(e.votes.View(), now)
		if want == nil {
			return retryPeriod
		}
		return e.put(ctx, want, now)
	}
	wait, renewForHolder := e.begin(now)
	if wait > 0 {
		if renewForHolder && now.Sub(e.renewedForHolder) >= retryPeriod {
			e.renewForHolder(ctx, now)
		}
		return min(wait, retryPeriod)
	}
	want := withHolder(e.lease, e.identity, now)
	if holderOf(e.lease) != e.identity {
		e.newTakeover(now).mark(want)
	}
	if l := listOf(want); len(l.Voters) > 0 { // this replica does not support votes
		withList(want, voting.List{Version: l.Version + 1})
	}
	if e.lease == nil {
		*want.Spec.LeaseTransitions += e.lastTransition() // the Lease was deleted, but transitions must only grow
	}
	if e.votes != nil && holderOf(e.lease) == e.identity && e.confirmed(now) {
		withList(want, e.votes.try(e.newestList(), now))
	}
	return e.put(ctx, want, now)
}

// put writes the Lease. It returns the delay until the next step.
func (e *election) put(ctx context.Context, want *coordinationv1.Lease, now time.Time) time.Duration {
	if len(listOf(want).Voters) > 0 != e.byVotes() {
		e.log.Info("election of the active gateway switches between Lease and votes", "voters", slices.Sorted(maps.Keys(listOf(want).Voters)))
		e.mu.Lock()
		e.switching, e.switchedFrom = true, e.version
		e.reevaluateLocked(now)
		e.mu.Unlock()
	}
	lease, err := e.write(ctx, want)
	if !e.reached(err) || err != nil { // a conflict means that another replica was faster
		e.lease = nil
		return retryPeriod / 10
	}
	e.mu.Lock()
	e.renewed = now
	e.mu.Unlock()
	e.written = now
	e.observe(lease, now)
	return retryPeriod
}

// counted reports whether step must be called at once, because of a change of the votes.
func (e *election) counted(now time.Time) bool {
	v := e.votes.View()
	if e.byVotes() {
		return v.Holds && e.cached() != e.identity && now.Sub(e.written) >= retryPeriod/10
	}
	return v.Holds && len(v.Heard) == len(e.votes.trial.Voters) && now.Sub(e.written) >= retryPeriod/10
}

func (e *election) confirmed(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.viewLocked(now).confirmed
}

// begin returns how long this replica must not write the Lease. If wait is 0 and this replica is
// not the holder, it requests the Lease next. Until it has the result, it makes no further promises
// to other gateways. renewForHolder is true if the holder answers but does not renew the Lease.
func (e *election) begin(now time.Time) (wait time.Duration, renewForHolder bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.viewLocked(now)
	v.free, v.wait = holderOf(e.lease) == "", standDown(e.lease, e.identity, e.firstSeen, now)
	r := decide(v)
	e.taking = e.taking || r.wait <= 0 && !v.holds
	return r.wait, r.deferring && now.Sub(e.firstSeen) >= renewForHolderAfter
}

// renewForHolder renews the Lease in the name of its holder. The renewal does not count as a sign
// of life of the holder, so it delays no takeover.
func (e *election) renewForHolder(ctx context.Context, now time.Time) {
	e.renewedForHolder = now
	lease := e.lease.DeepCopy()
	renewed := metav1.NewMicroTime(now)
	lease.Spec.RenewTime = &renewed
	if lease, err := e.write(ctx, lease); e.reached(err) && err == nil {
		e.lease, e.version = lease, lease.ResourceVersion
	}
}

// observe evaluates a Lease that was just read or written.
func (e *election) observe(lease *coordinationv1.Lease, now time.Time) {
	e.lease = lease
	version := ""
	if lease != nil {
		version = lease.ResourceVersion
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if version != e.version || e.firstSeen.IsZero() {
		e.version, e.firstSeen = version, now
	}
	e.taking = false
	e.switching = e.switching && version == e.switchedFrom // while the Lease is unchanged, that request may still arrive
	// Versions of the list only grow. If the Lease was deleted, lacks the annotation or was restored
	// from an old copy, votes still decide, and the holder writes the list again. If the Lease
	// decides, a list with voters counts in any version, because versions may start anew after the
	// Lease was deleted.
	if l := listOf(lease); lease != nil && (l.Version >= e.list.Version || len(l.Voters) > 0 && len(e.list.Voters) == 0) {
		e.list = l
	}
	if holderOf(lease) == e.identity && (!e.byVotesLocked() || e.taken.Reason == "") {
		e.taken = takeoverOf(lease)
	}
	if e.votes != nil {
		if e.byVotesLocked() {
			e.votes.Learn(e.list, holderOf(lease) == e.identity)
		}
		if e.met != nil {
			e.met()
		}
	}
	transition := int32(0)
	if lease != nil && lease.Spec.LeaseTransitions != nil {
		transition = *lease.Spec.LeaseTransitions
	}
	// Votes may be newer than the Lease. But the state that a replica saves has the number of the
	// last takeover without the name of the new holder. So after a restart, the replica reads the
	// name from the Lease.
	if e.byVotesLocked() && (transition < e.transition || transition == e.transition && e.name != "") {
		e.reevaluateLocked(now)
		return
	}
	if transition > 0 {
		e.transition = transition
	}
	if holder := holderOf(lease); holder != "" && holder != e.name {
		e.log.Info("active gateway changed", "pod", holder, "previous", e.name)
		e.name = holder
		e.changed.set()
	}
	e.reevaluateLocked(now)
}

// viewLocked returns a view without its fields free and wait, which begin sets. The caller holds
// e.mu.
func (e *election) viewLocked(now time.Time) view {
	v := view{leaseState: leaseState{holds: e.name == e.identity, transition: e.transition}, reads: e.readsLocked()}
	v.confirmed = v.holds && !e.renewed.IsZero() && now.Sub(e.renewed) < leaseDuration-stopEarly
	for _, o := range e.others {
		if o.answered && !o.leaving {
			v.others = append(v.others, o.account(now))
		}
	}
	slices.SortFunc(v.others, func(a, b account) int { return cmp.Compare(a.pod, b.pod) })
	return v
}

// readsLocked reports whether the API server answered the last request. The caller holds e.mu.
func (e *election) readsLocked() bool { return !e.away && !e.last.IsZero() }

// reevaluate updates whether this replica may send to peers. Call it regularly, because that
// permission can end without any event.
func (e *election) reevaluate(now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reevaluateLocked(now)
}

func (e *election) reevaluateLocked(now time.Time) {
	v := e.viewLocked(now)
	if e.votes != nil {
		e.votes.See(uint64(e.transition))
		votes := e.byVotesLocked()
		e.votes.Allow(e.eligible && (votes || e.switching || v.confirmed && e.votes.wanted), v.confirmed && !votes, votes || e.switching)
		if votes && !e.switching {
			e.reevaluateVotesLocked(e.votes.View(), now)
			return
		}
	}
	r := decide(v)
	if r.lost {
		e.log.Warn("another gateway answers that it has taken over", "pod", r.successor)
		e.name = r.successor
		e.leaseChanged.set() // read the Lease if possible
		e.changed.set()      // even if this replica was not sending before
	}
	e.unanswered = r.unanswered
	if r.maySend == e.sending {
		return
	}
	switch e.sending = r.maySend; {
	case r.unanswered != "":
		e.log.Warn("stopped sending: cannot renew the Lease, and another gateway that may be active does not answer", "pod", r.unanswered)
	case r.maySend:
		e.log.Info("this gateway may send to peers")
	}
	e.changed.set()
}

// lastTransition returns the last known number of takeovers of the Lease.
func (e *election) lastTransition() int32 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.transition
}

// reached reports whether the API server answered a request that returned err, and records the time
// of the answer. NotFound, Conflict and AlreadyExists count as answers.
func (e *election) reached(err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
		if !e.away && !errors.Is(err, context.Canceled) {
			e.away = true
			e.log.Warn("cannot read or write the Lease", "error", err)
		}
		return false
	}
	if now.Sub(e.last) > contactGap {
		e.firstSeen = now
	}
	e.last = now
	if e.away {
		e.away = false
		e.log.Info("the Lease is readable and writable again")
	}
	return true
}

// active reports whether this replica is active: it is the last known holder, and may send to
// peers.
func (e *election) active() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.name == e.identity && e.sending
}

// holds reports whether this replica is the last known holder.
func (e *election) holds() bool { return e.holder() == e.identity }

// holder returns the last known holder.
func (e *election) holder() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.name
}

// lastContact returns when the API server last answered a request for the Lease.
func (e *election) lastContact() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last
}

// readHolder reads the Lease without taking part in the election. refused is true if the API server
// answers but forbids reading, which may be intended.
func (e *election) readHolder(ctx context.Context) (holder string, refused bool, err error) {
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

// resume makes this replica the holder, as it was when it saved its snapshot, until it learns of
// another holder. Call resume before run. This replica does not send to peers until all gateways
// that answered before the restart have answered again.
func (e *election) resume(known acquaintance) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.name, e.away = e.identity, true
	e.taken = takeover{Takeover: isthmus.Takeover{Pod: e.identity, Reason: isthmus.TakeoverResumed, Previous: e.identity}, since: time.Now()}
	e.transition = max(e.transition, known.Transition)
	e.changed.set()
	e.reevaluateLocked(time.Now())
}

// superseded reports whether an answer of another gateway shows that this replica no longer holds
// the Lease. known is the state that this replica saved while it held the Lease.
func (e *election) superseded(known acquaintance, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.viewLocked(now)
	v.holds, v.transition = true, max(v.transition, known.Transition)
	return decide(v).lost
}

// recall restores the gateways that answered before this process restarted.
func (e *election) recall(known acquaintance) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.transition = max(e.transition, known.Transition)
	if e.list = known.List; e.byVotesLocked() {
		e.votes.Learn(e.list, false)
	}
	for pod, addr := range known.Others {
		o := e.otherLocked(pod)
		o.answered = true
		if !o.addr.IsValid() {
			o.addr = addr
		}
	}
}

// setEligible sets whether this replica may become active.
func (e *election) setEligible(eligible bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.eligible = eligible
	e.reevaluateLocked(time.Now())
}

// close closes the connections. Nothing else may be called after it.
func (e *election) close() { utilnet.CloseIdleConnectionsFor(e.web.Transport) }

// release frees the Lease if this replica holds it, so that a standby need not wait. Call it after
// run has returned.
func (e *election) release() error {
	if e.byVotes() {
		e.votes.Release()
	}
	e.setEligible(false)
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
