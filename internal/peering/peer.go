// Package peering joins and separates two clusters, for `isthmus peer`, `unpeer`, `rotate-key`,
// `release-gateway` and `uninstall`. It manages namespaces, rights, identities and Peerings.
// The managers do the rest. It also rotates the key of a cluster, moves its active gateway, and
// reviews the networks that a peer advertises.
//
// Every operation can be repeated: a second run restores missing objects and otherwise changes
// nothing.
package peering

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

// PeerOptions are the choices of Peer.
type PeerOptions struct {
	// Name and RemoteName are names for new Peerings in the first and in the second cluster. The
	// default is the unique name of the peer.
	Name, RemoteName string
	// Replace accepts another cluster with the ID and name of the present peer, and revokes the
	// rights of the present peer.
	Replace bool
	// Claims are the choices of the first cluster about the claim of the second.
	Claims Claims
	// Services are the namespaces whose services both clusters export to each other; * means all.
	// If it is nil, spec.services does not change.
	Services []string
	// InBand reports whether the managers use the tunnel. If it is nil, spec.inBand does not
	// change.
	InBand *bool
	// Timeout is the maximum time to wait for traffic. With zero, the command does not wait.
	Timeout time.Duration
	// Report is called with a line for each change, and for each condition that becomes true.
	Report func(line string)
}

// Peer joins two clusters. On both sides it creates the tenant namespace, the peer's rights, our
// identity at the peer, and a Peering. Then it waits until traffic flows. It performs all checks
// before it writes anything. It reports which networks each side uses in place of the networks that
// the other side advertises. It returns the Peerings as it last read them.
func Peer(ctx context.Context, local, remote *cluster.Cluster, o PeerOptions) (peerings [2]*isthmus.Peering, err error) {
	started := time.Now()
	a, b := &side{Cluster: local, claims: o.Claims, services: o.Services}, &side{Cluster: remote, services: o.Services}
	a.peer, b.peer = b, a
	if o.Report != nil {
		var mu sync.Mutex // both sides call report
		report := o.Report
		o.Report = func(line string) {
			mu.Lock()
			defer mu.Unlock()
			report(line)
		}
	}
	err = forEachSide(a, b, func(s *side) error { return s.Identify(ctx) })
	if err == nil {
		err = check(ctx, a, b, o)
	}
	if err != nil {
		if errors.Is(ctx.Err(), context.Canceled) {
			err = errors.New("interrupted while checking the two clusters; nothing was changed")
		}
		return peerings, err
	}
	changed, err := setUp(ctx, a, b, o)
	if err != nil {
		return peerings, interrupted(ctx, err)
	}
	if o.Timeout > 0 {
		w := &waiter{sides: []*side{a, b}, goal: isthmus.ConditionReady, report: o.Report, quiet: !changed}
		err = w.wait(ctx, o.Timeout)
	}
	a.show(o.Report)
	b.show(o.Report)
	elapsed := time.Since(started)
	peerings = [2]*isthmus.Peering{a.peering, b.peering}
	switch {
	case err != nil:
		return peerings, interrupted(ctx, err)
	case !changed && o.Timeout > 0:
		o.Report(fmt.Sprintf("%s and %s are peered already, nothing changed", a.Cluster, b.Cluster))
	case !changed:
		o.Report("nothing changed")
	case o.Timeout > 0:
		o.Report(fmt.Sprintf("%s and %s are peered, after %.2f s", a.Cluster, b.Cluster, elapsed.Seconds()))
	}
	return peerings, nil
}

// interrupted replaces the error of an interrupted wait by an error that explains how to
// continue.
func interrupted(ctx context.Context, err error) error {
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return errors.New("interrupted; run the same command again to continue, or `isthmus unpeer` to undo it")
	}
	return err
}

// check returns an error if the clusters cannot be joined.
func check(ctx context.Context, a, b *side, o PeerOptions) error {
	if err := cluster.Distinct(a.Cluster, b.Cluster); err != nil {
		return err
	}
	names := map[*side]string{a: o.Name, b: o.RemoteName}
	if err := forEachSide(a, b, func(s *side) error { return s.findPeering(ctx, names[s]) }); err != nil {
		return err
	}
	for _, s := range []*side{a, b} {
		if s.inBand = s.peering.Spec.InBand; o.InBand != nil {
			s.inBand = *o.InBand
		}
		if s.inBand && o.InBand != nil && o.Timeout == 0 {
			return errors.New("--in-band needs a --timeout above 0, because this command carries the managers' objects until there is a tunnel")
		}
	}
	return forEachSide(a, b, func(s *side) error {
		if err := s.checkPeering(); err != nil {
			return err
		}
		if err := s.checkPin(ctx, o.Replace); err != nil {
			return err
		}
		if err := s.checkConsent(ctx); err != nil {
			return err
		}
		if err := s.checkPath(ctx, map[*side]string{a: "--server", b: "--remote-server"}[s]); err != nil {
			return err
		}
		if err := s.checkNamespace(ctx); err != nil {
			return err
		}
		if err := s.checkServices(ctx); err != nil {
			return err
		}
		if err := s.checkRights(ctx); err != nil {
			return err
		}
		if err := s.checkAdmission(ctx); err != nil || o.Timeout == 0 {
			return err
		}
		return s.checkManager(ctx, o)
	})
}

// setUp writes the missing objects. It revokes the rights of a former peer first. It writes the
// rights on both sides before the identities, so that each identity works at once. It writes
// the Peerings last, so that the managers find everything that they need.
func setUp(ctx context.Context, a, b *side, o PeerOptions) (changed bool, err error) {
	for _, step := range []func(*side) (string, error){
		func(s *side) (string, error) { return s.revokeAnother(ctx) },
		func(s *side) (string, error) { return s.setRights(ctx) },
		// Set spec.inBand before giveIdentity, or unset it after giveIdentity, so that the manager
		// can always use the identity. While spec.inBand is set, the manager can use an identity of
		// either kind. While it is unset, the manager can use only an identity for the path outside
		// the tunnel.
		func(s *side) (string, error) { return s.setInBand(ctx, true) },
		func(s *side) (string, error) { return s.giveIdentity(ctx) },
		func(s *side) (string, error) { return s.setInBand(ctx, false) },
		func(s *side) (string, error) { return s.setPeering(ctx) },
		func(s *side) (string, error) { return s.setClaims(ctx) },
		func(s *side) (string, error) { return s.setServices(ctx) },
	} {
		did, err := onBoth(a, b, o, step)
		changed = changed || did
		if err != nil {
			return changed, err
		}
	}
	return changed, nil
}

// onBoth performs a step on both sides and reports the results, first the result of a.
func onBoth(a, b *side, o PeerOptions, step func(*side) (string, error)) (changed bool, err error) {
	var reports [2]string
	err = forEachSide(a, b, func(s *side) (err error) {
		i := 0
		if s == b {
			i = 1
		}
		reports[i], err = step(s)
		return err
	})
	for _, r := range reports {
		if r != "" {
			o.Report(r)
			changed = true
		}
	}
	return changed, err
}

// setRights creates the tenant namespace and the rights in it.
func (s *side) setRights(ctx context.Context) (string, error) {
	namespace := s.tenantNamespace()
	var have corev1.Namespace
	if err := s.Client.Get(ctx, client.ObjectKeyFromObject(namespace), &have); err != nil && !apierrors.IsNotFound(err) {
		return "", s.Explain("Namespace "+s.namespace, err)
	} else if err != nil || have.Labels[cluster.LabelManagedBy] == cluster.ManagedBy {
		namespace.Labels[cluster.LabelManagedBy] = cluster.ManagedBy // a namespace that existed before gets no label, so that `isthmus unpeer` does not delete it
	}
	var done []string
	fresh := false
	for _, o := range append([]client.Object{namespace}, s.rights()...) {
		outcome, err := s.Apply(ctx, o)
		if err != nil {
			return "", err
		}
		if fresh = fresh || o == client.Object(namespace) && outcome == cluster.Created; outcome != cluster.Unchanged {
			u, err := s.Unstructured(o)
			if err != nil {
				return "", err
			}
			done = append(done, u.GetKind()+" "+u.GetName())
		}
	}
	switch {
	case fresh:
		return fmt.Sprintf("%s: namespace %s created, with the rights of %s in it", s.Cluster, s.namespace, s.peer.Cluster), nil
	case len(done) > 0:
		return fmt.Sprintf("%s: in namespace %s repaired for %s: %s", s.Cluster, s.namespace, s.peer.Cluster, strings.Join(done, ", ")), nil
	}
	return "", nil
}

// setPeering creates the Peering if there is none. To an existing Peering it adds the
// annotations that pin the peer.
func (s *side) setPeering(ctx context.Context) (string, error) {
	if s.exists {
		return s.setPin(ctx)
	}
	s.peering.Spec.InBand = s.inBand
	s.peering.Spec.Claims, _ = s.claims.applyTo(isthmus.Claims{})
	if s.services != nil {
		s.peering.Spec.Services = s.shared()
	}
	if _, err := s.Apply(ctx, s.peering); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s: Peering %s created", s.Cluster, s.peering.Name), nil
}

// A waiter polls the Peerings of one or both sides until the goal is true for each. It reports
// conditions that become true. It stops if a claim needs consent, because it does not wait for a
// person.
type waiter struct {
	sides  []*side
	goal   string // type of the condition to wait for
	report func(string)
	quiet  bool // do not report conditions that are true at first

	reported []map[string]bool
	trial    []error // errors of the last poll, by side
}

func (w *waiter) wait(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, cluster.ErrNotReady)
	defer cancel()
	w.trial = make([]error, len(w.sides))
	for range w.sides {
		w.reported = append(w.reported, map[string]bool{})
	}
	for first := true; ; first = false {
		reached := 0
		var awaited error
		for i, s := range w.sides {
			if s.inBand && !(s.carried && s.published(s.peering)) {
				s.uncarried = s.carry(ctx)
			}
			if w.poll(ctx, i, s, first && w.quiet) {
				reached++
			}
			if err := s.consentError(ctx); errors.Is(err, errConsent) {
				awaited = errors.Join(awaited, err)
			}
		}
		if reached == len(w.sides) || awaited != nil {
			return awaited
		}
		select {
		case <-ctx.Done():
			return w.missing(timeout)
		case <-time.After(cluster.PollInterval):
		}
	}
}

// poll reads one side's Peering and reports whether the goal is true for it.
func (w *waiter) poll(ctx context.Context, i int, s *side, quiet bool) bool {
	p := &isthmus.Peering{}
	if err := s.Client.Get(ctx, client.ObjectKeyFromObject(s.peering), p); err != nil {
		if ctx.Err() == nil {
			w.trial[i] = s.Explain("Peering "+s.peering.Name, err)
		}
		return false
	}
	w.trial[i], s.peering = nil, p
	for _, t := range health.Steps {
		if !health.IsTrue(p, t) {
			delete(w.reported[i], t) // report the condition again if it becomes true again
			continue
		}
		if !w.reported[i][t] && !quiet {
			w.report(progressLine(s, t))
		}
		w.reported[i][t] = true
	}
	return health.IsTrue(p, w.goal) && remapped(p) && (!s.inBand || s.carried && s.published(p))
}

// progressLine returns the line about a condition of side s that has become true.
func progressLine(s *side, t string) string {
	me, peer, status := s.Cluster, s.peer.Cluster, s.peering.Status
	switch t {
	case isthmus.ConditionIdentity:
		return fmt.Sprintf("%s: identity accepted by %s", me, peer)
	case isthmus.ConditionPublished:
		return fmt.Sprintf("%s: NetworkConfig published at %s", me, peer)
	case isthmus.ConditionAnswered:
		return fmt.Sprintf("%s sees %s's pods %s", peer, me, seen(status.Local))
	case isthmus.ConditionPeerConfig:
		return fmt.Sprintf("%s: NetworkConfig of %s accepted", me, peer)
	case isthmus.ConditionTunnelEndpoint:
		return fmt.Sprintf("%s: agreed, the gateway of %s is at %s", me, peer, safetext.OrDash(status.Endpoint))
	case isthmus.ConditionConnected:
		return fmt.Sprintf("%s: connected to %s%s", me, peer, latency(status.Latency))
	}
	return fmt.Sprintf("%s: %s", me, t)
}

func seen(n isthmus.Networks) string {
	if n.PodCIDR == n.PodCIDRSeen {
		return safetext.OrDash(n.PodCIDR) + " unchanged"
	}
	return safetext.OrDash(n.PodCIDR) + " as " + safetext.OrDash(n.PodCIDRSeen)
}

func latency(l string) string {
	if l == "" {
		return ""
	}
	return ", " + safetext.Of(l)
}

// missing returns an error with the conditions that are not true, by side.
func (w *waiter) missing(timeout time.Duration) error {
	errs := []error{fmt.Errorf("%w: condition %s is not True after %v", cluster.ErrNotReady, w.goal, timeout)}
	if w.goal == isthmus.ConditionReady {
		errs[0] = fmt.Errorf("%w: not peered within %v", cluster.ErrNotReady, timeout)
	}
	for i, s := range w.sides {
		c := health.FirstProblem(s.peering)
		if id := meta.FindStatusCondition(s.peering.Status.Conditions, isthmus.ConditionIdentity); c == nil && s.inBand && !s.published(s.peering) {
			c = id
		}
		switch {
		case w.trial[i] != nil:
			errs = append(errs, w.trial[i])
		case s.uncarried != nil:
			errs = append(errs, s.uncarried)
		case c != nil:
			errs = append(errs, fmt.Errorf("%s: %s", s.Cluster, health.Sentence(c)))
		case s.inBand && !s.carried:
			errs = append(errs, fmt.Errorf("%s: the NetworkConfig for %s does not have backend_config.inBand yet; check that the manager runs", s.Cluster, s.peer.Cluster))
		}
	}
	return errors.Join(errs...)
}
