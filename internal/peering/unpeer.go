package peering

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// UnpeerOptions are the choices of Unpeer.
type UnpeerOptions struct {
	// Name is that of the Peering, or of the peer, in the first cluster. Empty if the second
	// cluster is given.
	Name string
	// Force does not wait for the peer, and leaves our objects there. If no manager runs, it takes
	// down the manager's objects itself.
	Force bool
	// Timeout bounds the wait.
	Timeout time.Duration
	// Report gets a line for each thing done or waited for.
	Report func(line string)

	Uninstalls bool // the next step cleans the nodes
}

// Unpeer parts two clusters, or one from its peer if remote is nil. It revokes the peer's rights,
// deletes the Peerings, whose finalizers the managers remove when all their objects are gone, and
// then removes the rest that Peer created. With two clusters, a peering that is already gone is no
// error. A name without a Peering is ErrNoPeering.
//
// The networks of the peer stay refused on every node, and are allocated to no other cluster, for
// 24 hours after that (fabric.ReleaseHold).
//
// If the peer is not contacted or not waited for, it loses all its rights here before anything else
// happens, even if a later step fails. If both sides part, each manager keeps only the rights at
// the other side that it needs to delete its NetworkConfig.
func Unpeer(ctx context.Context, local, remote *cluster.Cluster, o UnpeerOptions) error {
	sides, err := findTeardowns(ctx, local, remote, o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, cluster.ErrNotReady)
	defer cancel()
	nothing := true
	for _, f := range sides {
		nothing = nothing && f.peering == "" && f.namespace == ""
	}
	if nothing && remote == nil {
		return fmt.Errorf("%s: %w: no Peering and no peer is called %s, and no namespace of such a peering is left; `isthmus status` shows the names",
			local, cluster.ErrNoPeering, safetext.Of(o.Name))
	}
	if nothing {
		o.Report(fmt.Sprintf("nothing to do: %s and %s are not peered, and nothing is left of a peering", local, remote))
		return nil
	}
	carried := remote != nil && !o.Force && slices.ContainsFunc(sides, func(f *teardown) bool { return f.inBand })
	for _, f := range sides {
		f.carried = carried
		if err := f.disarm(ctx, o, remote == nil || o.Force || carried); err != nil {
			return err
		}
	}
	for _, f := range sides {
		if err := f.deletePeering(ctx, o); err != nil {
			return err
		}
	}
	for _, step := range []func(*teardown) (string, error){
		func(f *teardown) (string, error) { return f.peeringGone(ctx, o) },
		func(f *teardown) (string, error) { return f.removeRest(ctx) },
		func(f *teardown) (string, error) { return f.namespaceGone(ctx) },
	} {
		if err := until(ctx, sides, o, step); err != nil {
			return err
		}
	}
	held := "; nodes refuse the peer's networks for another 24 hours"
	if o.Uninstalls {
		held = ""
	}
	if len(sides) == 2 {
		o.Report(fmt.Sprintf("%s and %s are no longer peered%s", sides[0].Cluster, sides[1].Cluster, held))
	} else {
		o.Report(fmt.Sprintf("%s is no longer peered with %s%s", sides[0].Cluster, safetext.Of(sides[0].peer.ClusterName), held))
	}
	return nil
}

// errWaiting is what a step waits for.
type errWaiting struct{ what string }

func (e *errWaiting) Error() string { return e.what }

// until repeats a step on each side until it is done, and reports what it waits for whenever that
// changes.
func until(ctx context.Context, sides []*teardown, o UnpeerOptions, step func(*teardown) (string, error)) error {
	done := make([]bool, len(sides))
	for begun := time.Now(); ; {
		var waiting []error
		for i, f := range sides {
			if done[i] {
				continue
			}
			report, err := step(f)
			wait := (*errWaiting)(nil)
			switch {
			case err == nil:
				done[i] = true
				if report != "" {
					o.Report(f.String() + ": " + report)
				}
			case ctx.Err() != nil: // report what it last waited for
				waiting = append(waiting, errors.New(cmp.Or(f.waitsFor, f.String()+": "+err.Error())))
			case errors.As(err, &wait) || errors.Is(err, cluster.ErrUnreachable): // the API server may come back
				if f.waitsFor = err.Error(); wait != nil {
					f.waitsFor = f.String() + ": " + wait.what
				}
				waiting = append(waiting, errors.New(f.waitsFor))
				if f.told != f.waitsFor && time.Since(begun) > cluster.Patience {
					f.told = f.waitsFor
					o.Report(f.told)
				}
			default:
				return err
			}
		}
		if len(waiting) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			if !errors.Is(context.Cause(ctx), cluster.ErrNotReady) {
				return errors.New("interrupted; run the same command again to continue")
			}
			hint := ""
			if !o.Force {
				hint = "; --force does not wait for the other cluster"
			}
			return fmt.Errorf("%w: not un-peered within %v%s\n%w", cluster.ErrNotReady, o.Timeout, hint, errors.Join(waiting...))
		case <-time.After(cluster.PollInterval):
		}
	}
}
