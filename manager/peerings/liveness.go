package peerings

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

const (
	livenessInterval = 2 * time.Second
	// livenessTimeout is the time for which the Lease may stay unchanged. It is longer than a
	// takeover by a standby, which may acquire the Lease after 7 s. It is also longer than three
	// renewals of which a slow API server answers only the third. The first two take 4.5 s each,
	// including the pause after them. The third takes 2 s.
	livenessTimeout = 12 * time.Second
	// releasedTimeout is the time for which a Lease may have no holder. A standby acquires it within 2
	// s. Without a standby, the gateway acquires it as soon as its Pod runs again.
	releasedTimeout = 6 * time.Second
	// clockSkew is the tolerated difference between the clocks of two machines.
	clockSkew = 30 * time.Second
)

// A Liveness tracks whether a gateway is active, by the Lease that the active gateway renews.
// Without an active gateway, the connection status of a TunnelEndpoint is outdated. A Liveness
// measures the age of a renewal by its own clock, from the time when it first saw the renewal,
// because the gateway's clock may differ. Its methods may be called concurrently.
type Liveness struct {
	Reader    client.Reader // reads from the API server itself
	Namespace string        // namespace of the Lease
	Log       *slog.Logger

	changed chan event.GenericEvent

	mu      sync.Mutex
	wasRead bool
	unread  string // the error of the last read of the Lease, or ""
	lease   coordinationv1.LeaseSpec
	since   time.Time // when the Lease was first seen with its present content; zero: not seen
	missing time.Time // since when a Lease that existed before is missing; zero: it exists
	silent  string
}

// NewLiveness returns a Liveness that assumes an active gateway until it has read the Lease.
func NewLiveness(reader client.Reader, namespace string, log *slog.Logger) *Liveness {
	return &Liveness{Reader: reader, Namespace: namespace, Log: log, changed: make(chan event.GenericEvent, 1)}
}

// Changed gets a value whenever the result of Silent changes.
func (p *Liveness) Changed() <-chan event.GenericEvent { return p.changed }

// Silent returns a sentence with the last active gateway and its last renewal if no gateway is
// active. It returns "" while a gateway is active. It also returns "" if the Lease has never
// existed: then the gateway is configured by files, or is not ours.
func (p *Liveness) Silent() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silent
}

// Start reads the Lease regularly until ctx ends.
func (p *Liveness) Start(ctx context.Context) error {
	tick := time.NewTicker(livenessInterval)
	defer tick.Stop()
	for {
		p.checkLease(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (p *Liveness) checkLease(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, livenessInterval)
	defer cancel()
	var lease coordinationv1.Lease
	err := p.Reader.Get(ctx, types.NamespacedName{Namespace: p.Namespace, Name: isthmus.LeaseGateway}, &lease)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.logUnread(err)
	switch now := time.Now(); {
	case apierrors.IsNotFound(err) && !p.wasRead:
		p.since = time.Time{}
		p.setSilent("")
	case apierrors.IsNotFound(err): // somebody deleted the Lease; an active gateway creates it again
		if p.since = (time.Time{}); p.missing.IsZero() {
			p.missing = now
		} else if now.Sub(p.missing) >= livenessTimeout {
			p.setSilent(fmt.Sprintf("no gateway is active: Lease %s/%s was deleted and not recreated; check that the gateway Pods run and reach the API server", p.Namespace, isthmus.LeaseGateway))
		}
		return
	case err != nil: // while this manager cannot read the Lease, the gateway probably cannot renew the Lease
		p.since = time.Time{}
	case p.since.IsZero():
		p.lease, p.since = lease.Spec, now
		// A restarted manager must not report Ready if the previous manager had detected that no
		// gateway was active.
		if r := lease.Spec.RenewTime; !p.wasRead && r != nil && now.Sub(r.Time) >= livenessTimeout+clockSkew {
			p.setSilent(p.sentence())
		}
		p.wasRead = true
		p.missing = time.Time{}
	case !p.lease.RenewTime.Equal(lease.Spec.RenewTime) || ptr.Deref(p.lease.HolderIdentity, "") != ptr.Deref(lease.Spec.HolderIdentity, ""):
		p.lease, p.since = lease.Spec, now
		p.setSilent("")
	case now.Sub(p.since) >= livenessTimeout, ptr.Deref(p.lease.HolderIdentity, "") == "" && now.Sub(p.since) >= releasedTimeout:
		p.setSilent(p.sentence())
	}
}

// logUnread logs once the reason why liveness is unknown, for example RBAC rules of an older
// version.
func (p *Liveness) logUnread(err error) {
	unread := ""
	if err != nil && !apierrors.IsNotFound(err) {
		unread = err.Error()
	}
	if unread != p.unread && unread != "" {
		p.Log.Warn("cannot read the gateway's Lease, so gateway liveness is unknown; check the manager's RBAC (isthmus install) and the API server",
			"lease", p.Namespace+"/"+isthmus.LeaseGateway, "error", unread)
	}
	p.unread = unread
}

// sentence returns the problem and the remedy.
func (p *Liveness) sentence() string {
	last := "has no holder"
	if holder := ptr.Deref(p.lease.HolderIdentity, ""); holder != "" {
		last = "was last held by " + plain(holder)
	}
	if p.lease.RenewTime != nil {
		last += fmt.Sprintf(" and renewed at %s", p.lease.RenewTime.UTC().Format(time.RFC3339))
	}
	return fmt.Sprintf("no gateway is active: Lease %s/%s %s; check that the gateway Pods run and reach the API server", p.Namespace, isthmus.LeaseGateway, last)
}

// setSilent sets the sentence that Silent returns. If the sentence is new, setSilent notifies the
// reader of Changed.
func (p *Liveness) setSilent(sentence string) {
	if sentence == p.silent {
		return
	}
	if p.silent = sentence; sentence != "" {
		p.Log.Warn(sentence)
	} else {
		p.Log.Info("a gateway is active again")
	}
	select {
	case p.changed <- event.GenericEvent{}:
	default: // the channel holds a value that nobody has read yet, so it covers this change
	}
}
