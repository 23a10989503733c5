package replication

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/netconfig"
)

// A worker replicates to one peer. Only run uses the fields below done.
type worker struct {
	r      *Replicator
	peer   Target
	name   string // name of the original and the copy
	log    *slog.Logger
	cancel context.CancelFunc
	wake   chan struct{} // gets a value when the original has changed
	share  chan struct{} // gets a value when the exports have changed
	done   chan struct{}

	secret *corev1.Secret // the identity Secret; nil: it does not exist, or was not read yet
	link   *link          // nil: there is no usable identity
	unlink func()         // stops the sender of remote
	remote chan change    // changes at the peer; nil without a link
	pause  *backoff       // backoff of connections; only the sender of remote uses it while that sender runs
	tries  backoff        // backoff of failed steps
	retry  time.Time      // when to retry the failed steps; zero: no step failed

	copies map[string]*v1alpha1.NetworkConfig // our copies at the peer, by name
	listed bool                               // whether a list of our copies at this API server has ever succeeded; copies may be out of date
	up     bool                               // whether the last request succeeded

	// answer is the last answer that was written into the original. stored is the resulting status
	// at our API server. They differ if Liqo's CRD drops the condition.
	answer, stored v1alpha1.NetworkConfigStatus

	state   State
	renewal renewal
	life    Life // expiry and renewal times of the identity

	authority time.Time // when to read the peer's certificate authority again, by the real clock; zero: now
}

func newWorker(r *Replicator, p Target, cancel context.CancelFunc) *worker {
	return &worker{
		r: r, peer: p, name: p.Cluster.UniqueName(), log: r.opts.Log.With("peer", p.ID), cancel: cancel,
		wake: make(chan struct{}, 1), share: make(chan struct{}, 1), done: make(chan struct{}),
	}
}

// run replicates until ctx is done.
func (w *worker) run(ctx context.Context) {
	secrets := make(chan change)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		w.r.own.follow(ctx, w.secretFeed(), &backoff{}, deliver(ctx, secrets))
	}()
	defer func() {
		w.disconnect()
		<-finished
	}()

	// A peer may change its objects all the time, or undo our changes. This limits the rounds to
	// two a second.
	limiter := rate.NewLimiter(2, 10)
	dirty := false
	for {
		var wait <-chan time.Time
		if dirty {
			next := limiter.Reserve()
			delay := next.Delay()
			if delay == 0 {
				dirty = false
				w.sync(ctx)
				continue
			}
			next.Cancel()
			wait = time.After(delay)
		} else if at := w.due(); !at.IsZero() {
			wait = time.After(time.Until(at))
		}
		select {
		case <-ctx.Done():
			return
		case c := <-secrets:
			dirty = w.takeSecret(ctx, c) || dirty
		case c := <-w.remote:
			w.takeRemote(c)
			dirty = true
		case <-w.wake:
			dirty = true
		case <-wait:
			dirty = true
		}
	}
}

// pace returns the pace of requests to the peer. Through the tunnel, pauses are shorter. While the
// tunnel is down, attempts fail at once. When it is up again, an answer of the peer may be waiting.
func (w *worker) pace() pace {
	p := w.r.pace
	if w.peer.InBand {
		p.max = min(p.max, inBandPause)
	}
	return p
}

// inBandPause is the maximum pause between two attempts through the tunnel.
const inBandPause = 4 * time.Second

// deliver returns a function that sends changes to a channel until ctx is done.
func deliver(ctx context.Context, to chan<- change) func(change) {
	return func(c change) {
		select {
		case to <- c:
		case <-ctx.Done():
		}
	}
}

// due returns the next time at which there is work that no event triggers.
func (w *worker) due() time.Time {
	at := w.retry
	if !w.up {
		return at
	}
	for _, next := range []time.Time{w.renewal.next, w.authority} {
		if !next.IsZero() && (at.IsZero() || next.Before(at)) {
			at = next
		}
	}
	return at
}

// takeSecret makes a link from the Secret, and reports whether anything changed. While our own API
// server is unreachable, the last Secret stays in use.
func (w *worker) takeSecret(ctx context.Context, c change) bool {
	where := fmt.Sprintf("Secret %s/%s", w.peer.LocalNamespace, w.peer.IdentitySecret)
	without := func(reason, format string, args ...any) bool {
		w.secret, w.renewal, w.life = nil, renewal{}, Life{}
		w.disconnect()
		w.state.Identity = Condition{metav1.ConditionFalse, reason, fmt.Sprintf(format, args...)}
		return true
	}
	var secret *corev1.Secret
	switch {
	case apierrors.IsForbidden(c.err) && w.link == nil: // with a link, the Secret was readable before, and our API server may have just started
		return without(isthmus.ReasonSecretMissing, "%s: the manager is not allowed to read it: %s; run isthmus peer again", where, quote(c.err.Error()))
	case c.err != nil:
		w.log.Warn("cannot watch the peer's identity Secret", "secret", where, "error", c.err)
		return false
	case c.full && len(c.all) > 0:
		secret, _ = c.all[0].(*corev1.Secret)
	case !c.full && !c.deleted:
		secret, _ = c.object.(*corev1.Secret)
	}
	if secret == nil {
		return without(isthmus.ReasonSecretMissing, "%s: not found; run isthmus peer to create it", where)
	}
	id, err := identityFrom(secret)
	if err == nil {
		err = id.checkInBand(w.peer)
	}
	if errors.Is(err, errInBand) {
		return without(isthmus.ReasonSecretInvalid, "%s: %v", where, err)
	}
	if err != nil {
		return without(isthmus.ReasonSecretInvalid, "%s: %v; run isthmus peer again, which recreates it", where, err)
	}
	w.secret = secret
	if w.link != nil && w.link.identity == id {
		return false
	}
	w.renewal, w.life, w.authority = newRenewal(id.token), id.life(), time.Time{}
	w.tries.reset() // earlier failures concerned another identity
	if err := w.connect(ctx, id, 0, &backoff{}); err != nil {
		return without(isthmus.ReasonSecretInvalid, "%s: %v; run isthmus peer again, which recreates it", where, err)
	}
	return true
}

func (w *worker) keep(o client.Object) {
	c, ok := o.(*v1alpha1.NetworkConfig)
	if !ok || c.Name != w.name && len(w.copies) >= maxListed { // the map is full; the next list returns the copies that are left out here
		return
	}
	c.ManagedFields = nil
	w.copies[c.Name] = c
}

// accepted records that the API server accepted our identity.
func (w *worker) accepted() {
	w.state.Identity = Condition{metav1.ConditionTrue, isthmus.ReasonIdentityAccepted, w.link.String() + " accepts our identity"}
}

// blame assigns an error of the peer's API server to the condition that it concerns, which is
// Identity or Published.
func (w *worker) blame(err error) {
	c := failure(w.link.String(), err)
	switch {
	case !breaks(c.Reason):
		w.accepted()
		w.state.Published = c
	case c.Reason == isthmus.ReasonUnauthorized && w.renewal.token.expires.Before(w.r.opts.Now()) && !w.renewal.token.expires.IsZero():
		c.Message += "; " + w.renewal.token.expired()
		fallthrough
	default:
		w.state.Identity, w.state.Published = c, Condition{}
	}
}

// sync compares original and copies, carries out the plan, and reports the State.
func (w *worker) sync(ctx context.Context) {
	w.retry = time.Time{}
	original, err := w.original(ctx)
	if err != nil { // the cache does not have the kind NetworkConfig, or has stopped
		w.again(ctx, "read the original", err)
		return
	}
	w.state.Answered = Condition{}
	if w.up {
		w.renew(ctx)
		w.followAuthority(ctx)
		w.carryOut(ctx, original)
	}
	w.report(original)
}

// original returns the original from the cache, or nil.
func (w *worker) original(ctx context.Context) (*v1alpha1.NetworkConfig, error) {
	var o v1alpha1.NetworkConfig
	err := w.r.opts.Cache.Get(ctx, types.NamespacedName{Namespace: w.peer.LocalNamespace, Name: w.name}, &o)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return &o, err
}

// carryOut carries out the plan. It continues after a failed step, unless that step sets our
// finalizer on the original, or the connection or the identity has failed.
func (w *worker) carryOut(ctx context.Context, original *v1alpha1.NetworkConfig) {
	w.state.Published = Condition{} // failed steps are retried now, or are obsolete
	failed := false
	for _, a := range plan(w.peer, original, w.copies) {
		err := w.do(ctx, a, original)
		var remote *remoteError
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
		case errors.As(err, &remote):
			w.blame(remote.err)
			w.log.Debug("replication step failed", "step", a.step.String(), "object", a.name, "error", err)
			if reason, _ := diagnose(remote.err); breaks(reason) {
				w.reconnect(ctx)
				return
			}
			failed = true
		case a.step == answer && apierrors.IsInvalid(err):
			w.state.Answered = Condition{
				metav1.ConditionFalse, isthmus.ReasonInvalid,
				"the peer's answer is invalid: " + quote(err.Error()),
			}
		default:
			w.again(ctx, a.step.String(), err)
			if a.step == hold {
				return
			}
		}
	}
	switch {
	case failed && w.retry.IsZero():
		w.retry = time.Now().Add(w.tries.next(w.r.pace))
	case w.retry.IsZero():
		w.tries.reset()
	}
}

// again schedules another round after a failed request to our own API server. It logs the error
// unless it is a conflict, because conflicts are normal.
func (w *worker) again(ctx context.Context, what string, err error) {
	if ctx.Err() == nil && !apierrors.IsConflict(err) {
		w.log.Warn("cannot replicate to the peer; retrying", "step", what, "error", err)
	}
	w.retry = time.Now().Add(w.tries.next(w.r.pace))
}

// reconnect makes a new link to the peer after a pause.
func (w *worker) reconnect(ctx context.Context) {
	id := w.link.identity
	w.disconnect()
	if err := w.connect(ctx, id, w.pause.next(w.pace()), w.pause); err != nil {
		w.log.Error("cannot connect to the peer's API server", "error", err) // unexpected, because the same identity worked before
	}
}

// do carries out one action and records its result, so that the next comparison does not have to
// wait for an event.
func (w *worker) do(ctx context.Context, a action, original *v1alpha1.NetworkConfig) error {
	ctx, cancel := context.WithTimeout(ctx, w.r.pace.request)
	defer cancel()
	switch a.step {
	case hold:
		base := original.DeepCopy()
		controllerutil.AddFinalizer(original, v1alpha1.FinalizerReplicator)
		return w.r.opts.Client.Patch(ctx, original, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}))

	case create:
		want := netconfig.CopyOf(original, w.r.opts.ClusterID, w.peer.RemoteNamespace)
		made, err := w.link.create(ctx, want)
		if apierrors.IsAlreadyExists(err) {
			made, err = w.relabel(ctx, want, err)
		}
		if err != nil {
			return remotely(err)
		}
		w.keep(made)
		return nil

	case update:
		c := w.copies[a.name].DeepCopy()
		c.Spec = *original.Spec.DeepCopy()
		c.Labels[v1alpha1.LabelReplication] = "false" // all other labels of c are right, because they were used to find c
		made, err := w.link.update(ctx, c)
		switch {
		case apierrors.IsConflict(err), apierrors.IsNotFound(err): // the watch will bring the present object
			w.retry = time.Now().Add(w.tries.next(w.r.pace))
			return nil
		case err != nil:
			return remotely(err)
		}
		w.keep(made)
		return nil

	case answer:
		latest := netconfig.AnswerOf(w.copies[a.name])
		if equality.Semantic.DeepEqual(latest, w.answer) && equality.Semantic.DeepEqual(original.Status, w.stored) {
			return nil
		}
		base := original.DeepCopy()
		original.Status = latest
		// The patch has an optimistic lock, because the answer is only correct for the spec that was
		// read.
		err := w.r.opts.Client.Status().Patch(ctx, original, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}))
		if err == nil {
			w.answer, w.stored = latest, original.Status
		}
		return client.IgnoreNotFound(err)

	case remove:
		c := w.copies[a.name]
		err := w.link.delete(ctx, a.name, c.UID)
		switch {
		case apierrors.IsNotFound(err):
			delete(w.copies, a.name)
			return nil
		case apierrors.IsConflict(err): // somebody has recreated or changed the object
			w.retry = time.Now().Add(w.tries.next(w.r.pace))
			return nil
		case err == nil && w.peer.InBand && leaving(original) && original.Name == a.name:
			return w.removeFinalizer(ctx, original) // in band, the peer closes the tunnel once the copy is gone, so a later check would be impossible
		}
		return remotely(err)

	case release:
		if w.copies[a.name] != nil { // the copy is being deleted; see plan
			return w.removeFinalizer(ctx, original)
		}
		found, err := w.link.get(ctx, a.name)
		if err == nil && found.Labels[v1alpha1.LabelOriginID] == w.r.opts.ClusterID {
			w.keep(found) // the copy was just created, and the watch has not reported it yet
			w.retry = time.Now().Add(w.tries.next(w.r.pace))
			return nil
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return remotely(err)
		}
		return w.removeFinalizer(ctx, original)
	}
	return nil
}

// removeFinalizer removes our finalizer from the original.
func (w *worker) removeFinalizer(ctx context.Context, original *v1alpha1.NetworkConfig) error {
	base := original.DeepCopy()
	controllerutil.RemoveFinalizer(original, v1alpha1.FinalizerReplicator)
	err := w.r.opts.Client.Patch(ctx, original, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}))
	return client.IgnoreNotFound(err)
}

// relabel restores the labels and the spec of an object that has the name of the copy, so that the
// object is the copy again. It does not change an original of the peer, or an object that is being
// deleted. It deletes a stale object. In these cases there is no copy yet, and relabel returns
// exists, which is the error of the create request.
func (w *worker) relabel(ctx context.Context, want *v1alpha1.NetworkConfig, exists error) (*v1alpha1.NetworkConfig, error) {
	found, err := w.link.get(ctx, want.Name)
	if err != nil {
		return nil, err
	}
	_, received := found.Labels[v1alpha1.LabelOriginID]
	if found.Labels[v1alpha1.LabelReplication] == "true" && !received || !found.DeletionTimestamp.IsZero() {
		return nil, exists
	}
	if stale(found, want) { // recreated once it is gone
		return nil, cmp.Or(w.link.delete(ctx, found.Name, found.UID), exists)
	}
	if found.Labels == nil {
		found.Labels = make(map[string]string)
	}
	maps.Copy(found.Labels, want.Labels)
	found.Spec = want.Spec
	w.log.Warn("restored the labels of the copy at the peer", "object", want.Name)
	return w.link.update(ctx, found)
}

// report completes the State and reports it.
func (w *worker) report(original *v1alpha1.NetworkConfig) {
	s := w.state
	v := view{peer: w.peer, original: original, copies: w.copies, listed: w.listed}
	if w.link != nil {
		v.server = w.link.String()
	}
	if s.Identity.Status == "" {
		return // the worker has no information yet
	}
	if warning := w.renewal.warning(); warning != "" && s.Identity.Status == metav1.ConditionTrue {
		s.Identity.Reason = isthmus.ReasonNotRenewed
		s.Identity.Message += warning
	}
	s.Life = w.life
	if s.Published.Status == "" {
		s.Published = v.published()
	}
	before, changed := w.r.report(w, s)
	if !changed {
		return
	}
	if before.Identity != s.Identity {
		w.log.Info("identity changed", "status", s.Identity.Status, "reason", s.Identity.Reason, "message", s.Identity.Message)
	}
	if before.Published != s.Published {
		w.log.Info("publication changed", "status", s.Published.Status, "reason", s.Published.Reason, "message", s.Published.Message)
	}
	if before.Answered != s.Answered && s.Answered.Status != "" {
		w.log.Warn("the peer's answer changed", "reason", s.Answered.Reason, "message", s.Answered.Message)
	}
}
