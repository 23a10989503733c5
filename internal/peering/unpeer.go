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
	// Name is the name of the Peering in the first cluster, or of the peer. It may be empty if
	// the second cluster is given.
	Name string
	// Force does not wait for the peer, and leaves our objects there. If no manager runs, the
	// command removes the manager's objects itself.
	Force bool
	// Timeout is the maximum time to wait.
	Timeout time.Duration
	// Report is called with a line for each change and for each reason to wait.
	Report func(line string)

	Uninstalls bool // the caller is `isthmus uninstall`, which cleans the nodes after Unpeer
}

// Unpeer ends the peering of two clusters. If remote is nil, it ends the peering only in the first
// cluster. It revokes the peer's rights and deletes the Peerings. The managers remove the
// finalizers of the Peerings once all their objects are gone. Then Unpeer removes the other objects
// that Peer created. With two clusters, a peering that no longer exists is no error. With one
// cluster, a name without a Peering gives ErrNoPeering.
//
// For 24 hours after the teardown, every node refuses packets for the peer's networks, and no other
// cluster gets these networks (fabric.ReleaseHold).
//
// With one cluster, with Force, and for an in-band peering, the peer loses all its rights here
// before any other step, even if a later step fails. Otherwise each manager keeps only the rights
// to delete its own objects at the other side.
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
		if err := f.revokeRights(ctx, o, remote == nil || o.Force || carried); err != nil {
			return err
		}
	}
	for _, f := range sides {
		if err := f.deletePeering(ctx, o); err != nil {
			return err
		}
	}
	for _, step := range []func(*teardown) (string, error){
		func(f *teardown) (string, error) { return f.waitPeeringDeleted(ctx, o) },
		func(f *teardown) (string, error) { return f.removeRest(ctx) },
		func(f *teardown) (string, error) { return f.waitNamespaceDeleted(ctx) },
	} {
		if err := repeatUntilDone(ctx, sides, o, step); err != nil {
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

// errWaiting has the reason why a step has to wait.
type errWaiting struct{ what string }

func (e *errWaiting) Error() string { return e.what }

// repeatUntilDone repeats a step on each side until the step is done. Whenever the reason for
// waiting changes, it reports the reason.
func repeatUntilDone(ctx context.Context, sides []*teardown, o UnpeerOptions, step func(*teardown) (string, error)) error {
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
			case ctx.Err() != nil: // keep the last reason for waiting
				waiting = append(waiting, errors.New(cmp.Or(f.waitsFor, f.String()+": "+err.Error())))
			case errors.As(err, &wait) || errors.Is(err, cluster.ErrUnreachable): // the API server may become reachable again
				if f.waitsFor = err.Error(); wait != nil {
					f.waitsFor = f.String() + ": " + wait.what
				}
				waiting = append(waiting, errors.New(f.waitsFor))
				if f.reported != f.waitsFor && time.Since(begun) > cluster.Patience {
					f.reported = f.waitsFor
					o.Report(f.reported)
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
