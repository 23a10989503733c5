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
	"strings"
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
//     restart (see remember). While it cannot renew the Lease it asks the other gateways, and is
//     silent where one does not answer (see decide).
//   - A standby does not take an expired Lease while its holder answers, and speaks. It renews the Lease in the
//     holder's name when the holder does not, so that readers know that a gateway is active.
//   - Time without contact to the API server does not count: a standby cannot tell an active
//     replica that died from one that could not reach the API server either, and gives it another
//     leaseDuration to show itself.
//
// client-go's elector differs in each of these: it gives up when it could not renew for a
// while, and the first to find the API server back takes over. It also looks at the Lease only
// every two to four seconds; this one is told of changes, and takes over as soon as the Lease has
// expired. The Lease itself means the same to both.
//
// Of the holder it is said that it is active when it may also speak to peers.
type election struct {
	leases   coordination.LeaseInterface
	web      *http.Client // of leases alone
	identity string
	id       gatewayID // of identity
	log      *slog.Logger
	changed  signal        // what holder or active returns
	met      func()        // another gateway has answered for the first time; may be nil
	look     signal        // something happened to the Lease
	voted    signal        // something happened to the votes
	votes    *ballot       // nil: the Lease alone decides
	cached   func() string // its holder by the watch, which may be late

	// Of run alone.
	lease   *coordinationv1.Lease // as last read or written; nil: unknown, or there is none
	version string                // that was seen first at seen
	vouched time.Time             // when the Lease was last renewed in its holder's name
	written time.Time             // when this replica last wrote the Lease

	mu           sync.Mutex
	name         string      // in the Lease when it was last seen, or who has the votes; not emptied when it is freed
	transition   int32       // of that Lease, or the epoch of the votes
	list         voting.List // of that Lease
	switching    bool        // it is not known whether the Lease or votes decide: a request is under way, or was lost
	switchedFrom string      // version of the Lease before that request
	lacking      bool        // the holder has no majority of votes
	hears        bool        // a majority of the voters has answered lately
	heardAt      time.Time   // when hears was last true; zero: never
	may          bool        // this replica can become active
	renewed      time.Time   // when the last renewal of this replica was sent that succeeded
	seen         time.Time   // since when the Lease is as it is, in contact with the API server
	last         time.Time   // contact with the API server
	away         bool
	taking       bool   // a request is under way, or was lost, that makes this replica the holder
	speaking     bool   // the holder may speak
	unheard      string // the Pod for which the holder may not; empty: it may
	others       map[gatewayID]*other
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
	e := electionWith(leases.Leases(namespace), identity, cached, log)
	e.web = web
	return e, nil
}

func electionWith(leases coordination.LeaseInterface, identity string, cached func() string, log *slog.Logger) *election {
	return &election{leases: leases, identity: identity, id: idOf(identity), cached: cached, log: log, changed: newSignal(), look: newSignal(), voted: newSignal(), others: make(map[gatewayID]*other)}
}

// run takes part until ctx ends.
func (e *election) run(ctx context.Context) {
	counted := newSignal()
	if e.votes != nil { // a request to the API server must not hold up a mandate
		var group sync.WaitGroup
		defer group.Wait()
		group.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-e.voted:
					e.judge(time.Now())
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
			case <-e.look:
				if e.holds() && e.cached() == e.identity && !e.mute() {
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
	if e.lease == nil || !e.holds() || e.mute() {
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
		want := e.stepVotes(now)
		if want == nil {
			return retryPeriod
		}
		return e.put(ctx, want, now)
	}
	wait, vouch := e.begin(now)
	if wait > 0 {
		if vouch && now.Sub(e.vouched) >= retryPeriod {
			e.vouch(ctx, now)
		}
		return min(wait, retryPeriod)
	}
	want := take(e.lease, e.identity, now)
	if l := listOf(want); len(l.Voters) > 0 { // this replica does not ask for votes
		withList(want, voting.List{Version: l.Version + 1})
	}
	if e.lease == nil {
		*want.Spec.LeaseTransitions += e.lastTransition() // of one that was deleted: numbers only grow
	}
	if e.votes != nil && holderOf(e.lease) == e.identity && e.confirmed(now) {
		withList(want, e.votes.try(e.newestList(), now))
	}
	return e.put(ctx, want, now)
}

// put writes the Lease, and says when to do the next step.
func (e *election) put(ctx context.Context, want *coordinationv1.Lease, now time.Time) time.Duration {
	if len(listOf(want).Voters) > 0 != e.byVotes() {
		e.log.Info("election of the active gateway switches between Lease and votes", "voters", slices.Sorted(maps.Keys(listOf(want).Voters)))
		e.mu.Lock()
		e.switching, e.switchedFrom = true, e.version
		e.judgeLocked(now)
		e.mu.Unlock()
	}
	lease, err := e.write(ctx, want)
	if !e.reached(err) || err != nil { // in case of a conflict another replica was faster
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

// counted reports whether votes that have changed ask for a step.
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

// begin says how long to leave the Lease alone. When that is 0 and this replica is not the holder, it promises
// nothing any more until it has read what became of its request. vouch says that the holder answers, but does not
// renew the Lease.
func (e *election) begin(now time.Time) (wait time.Duration, vouch bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.viewLocked(now)
	v.free, v.wait = holderOf(e.lease) == "", standDown(e.lease, e.identity, e.seen, now)
	r := decide(v)
	e.taking = e.taking || r.wait <= 0 && !v.holds
	return r.wait, r.deferring && now.Sub(e.seen) >= vouchAfter
}

// vouch renews the Lease in the name of its holder. It does not count as a sign of the holder: a holder that stops
// answering is followed as soon as it would have been without this.
func (e *election) vouch(ctx context.Context, now time.Time) {
	e.vouched = now
	lease := e.lease.DeepCopy()
	at := metav1.NewMicroTime(now)
	lease.Spec.RenewTime = &at
	if lease, err := e.write(ctx, lease); e.reached(err) && err == nil {
		e.lease, e.version = lease, lease.ResourceVersion
	}
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
	if len(listOf(lease).Voters) > 0 { // nodes vote, and its holder may be one that they voted for
		return max(0, seen.Add(goneMost).Sub(now))
	}
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
	e.mu.Lock()
	defer e.mu.Unlock()
	if version != e.version || e.seen.IsZero() {
		e.version, e.seen = version, now
	}
	e.taking = false
	e.switching = e.switching && version == e.switchedFrom // the request may still arrive
	// One that was deleted gives nobody the right to go by the Lease, and versions only grow.
	if l := listOf(lease); lease != nil && (l.Version >= e.list.Version || len(l.Voters) > 0 || len(e.list.Voters) > 0) {
		e.list = l
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
	// Votes may be newer. A replica that has started again knows the number of the last takeover, and nobody's name.
	if e.byVotesLocked() && (transition < e.transition || transition == e.transition && e.name != "") {
		e.judgeLocked(now)
		return
	}
	if transition > 0 {
		e.transition = transition
	}
	if holder := holderOf(lease); holder != "" && holder != e.name {
		e.log.Info("active gateway changed", "pod", holder, "former", e.name)
		e.name = holder
		e.changed.set()
	}
	e.judgeLocked(now)
}

// viewLocked is what this replica knows; e.mu is held. The Lease's data about other replicas is left to begin.
func (e *election) viewLocked(now time.Time) view {
	v := view{claim: claim{holds: e.name == e.identity, transition: e.transition}, reads: e.readsLocked()}
	v.confirmed = v.holds && !e.renewed.IsZero() && now.Sub(e.renewed) < leaseDuration-stopEarly
	for _, o := range e.others {
		if o.answered && !o.leaving {
			v.others = append(v.others, o.account(now))
		}
	}
	slices.SortFunc(v.others, func(a, b account) int { return cmp.Compare(a.pod, b.pod) })
	return v
}

// readsLocked reports whether the API server has answered when it was last asked; e.mu is held.
func (e *election) readsLocked() bool { return !e.away && !e.last.IsZero() }

// judge decides anew whether this replica may speak: time alone can end that.
func (e *election) judge(now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.judgeLocked(now)
}

func (e *election) judgeLocked(now time.Time) {
	v := e.viewLocked(now)
	if e.votes != nil {
		e.votes.See(uint64(e.transition))
		votes := e.byVotesLocked()
		e.votes.Allow(e.may && (votes || e.switching || v.confirmed && e.votes.wanted), v.confirmed && !votes, votes || e.switching)
		if votes && !e.switching {
			e.judgeVotesLocked(now)
			return
		}
	}
	r := decide(v)
	if r.lost {
		e.log.Warn("another gateway answers that it has taken over", "pod", r.successor)
		e.name = r.successor
		e.look.set()    // read the Lease, if that is possible
		e.changed.set() // also where it did not speak before
	}
	e.unheard = r.unheard
	if r.speak == e.speaking {
		return
	}
	switch e.speaking = r.speak; {
	case r.unheard != "":
		e.log.Warn("stopped sending: cannot renew the Lease, and another gateway that may be active does not answer", "pod", r.unheard)
	case r.speak:
		e.log.Info("this gateway may send to peers")
	}
	e.changed.set()
}

// lastTransition is how often the Lease has been taken over, as far as this replica knows.
func (e *election) lastTransition() int32 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.transition
}

// reached notes whether the API server answered: with an error about the Lease it did, too.
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
		e.seen = now
	}
	e.last = now
	if e.away {
		e.away = false
		e.log.Info("the Lease is readable and writable again")
	}
	return true
}

// active reports whether this replica is active: it believes that it holds the Lease, and it may
// send to peers.
func (e *election) active() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.name == e.identity && e.speaking
}

// holds reports whether this replica was named in the Lease when it was last seen.
func (e *election) holds() bool { return e.holder() == e.identity }

// silence says why the holder may not speak; empty: it may, or is not the holder.
func (e *election) silence() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.name != e.identity:
		return ""
	case e.lacking:
		return fmt.Sprintf("silent: this gateway has no majority of the %d nodes that vote, %s; they have to answer at UDP port %d", len(e.list.Voters), strings.Join(slices.Sorted(maps.Keys(e.list.Voters)), ", "), voting.Port)
	case e.unheard == "":
		return ""
	}
	return fmt.Sprintf("silent: this gateway cannot renew the Lease %s, and Pod %s, which may have taken over, does not answer at UDP port %d", isthmus.LeaseGateway, e.unheard, QuestionPort)
}

// deafMost is how long a standby may hear too few voters before it is not ready: a beat may be late, and an agent restarts.
const deafMost = 3 * time.Second

// cannotTakeOver says why this standby would get no mandate, or nil.
func (e *election) cannotTakeOver(now time.Time) error {
	if e.votes == nil {
		return nil
	}
	v := e.votes.View()
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.byVotesLocked() || e.name == e.identity || e.hearsLocked(v) || now.Sub(e.heardAt) < deafMost {
		return nil
	}
	silent := maps.Clone(e.list.Voters)
	for _, name := range v.Heard {
		delete(silent, name)
	}
	return fmt.Errorf("this standby cannot take over: of the %d nodes that vote, %s do not answer it at UDP port %d, and it needs the votes of %d",
		len(e.list.Voters), strings.Join(slices.Sorted(maps.Keys(silent)), ", "), voting.Port, len(e.list.Voters)/2+1)
}

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

// carryOn makes this replica the holder by what it remembers, until it reads or hears of another one. To
// be called before run. Gateways that had answered in its earlier life have to answer again before it
// speaks.
func (e *election) carryOn(known acquaintance) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.name, e.away = e.identity, true
	e.transition = max(e.transition, known.Transition)
	e.changed.set()
	e.judgeLocked(time.Now())
}

// superseded reports whether another gateway has answered that this one, which held the Lease when it knew what is
// known, does not hold it any more.
func (e *election) superseded(known acquaintance, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.viewLocked(now)
	v.holds, v.transition = true, max(v.transition, known.Transition)
	return decide(v).lost
}

// recall notes the gateways that had answered in an earlier life of this one.
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

// stand says whether this replica can become active.
func (e *election) stand(may bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.may = may
	e.judgeLocked(time.Now())
}

// close is the last use of the election.
func (e *election) close() { utilnet.CloseIdleConnectionsFor(e.web.Transport) }

// release frees the Lease if this replica holds it, so that a standby need not wait. To be called
// when run has returned.
func (e *election) release() error {
	if e.byVotes() {
		e.votes.Release()
	}
	e.stand(false)
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
