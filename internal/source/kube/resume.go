package kube

import (
	"context"
	"time"
)

// remember returns the snapshot in the state directory, or nil if there is no valid snapshot.
func (g *Gateway) remember() *remembered {
	if g.o.StateDirectory == "" {
		return nil
	}
	known, err := remember(g.o, time.Now())
	if err != nil {
		g.log.Error("snapshot not used; waiting for the API server", "directory", g.o.StateDirectory, "error", err)
		g.keeper.setError(err)
	}
	return known
}

// resumeMisses is how many reads of the Lease in a row, a second apart, must fail before a
// restarted replica uses its snapshot. After a single failed read, the API server may still be
// available, and another replica may have taken over during the restart.
const resumeMisses = 2

// await returns once all watched objects have been read. If it cannot read the Lease but there is a
// saved snapshot (known is not nil), it makes this replica active with that snapshot, and returns.
func (g *Gateway) await(ctx context.Context, e *election, known *remembered, others acquaintance) error {
	for misses := 0; known != nil; {
		holder, refused, err := e.readHolder(ctx)
		switch {
		case err != nil:
			misses++
		case !refused && holder != g.o.Pod:
			g.log.Info("snapshot not used: another replica is active", "pod", holder)
			known = nil
			continue
		default:
			misses = 0
		}
		if misses == resumeMisses && ctx.Err() == nil {
			if e.superseded(others, time.Now()) {
				g.log.Info("snapshot not used: another gateway answers that it is active")
				known = nil
				continue
			}
			g.resume(e, known, others)
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-g.prepared:
			return nil
		case <-time.After(time.Second):
		}
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-g.prepared:
		return nil
	}
}

// resume makes this replica the active one, with the state that it saved before the restart.
func (g *Gateway) resume(e *election, known *remembered, others acquaintance) {
	why := known.reason(time.Now())
	g.log.Warn("active again from the snapshot, without the API server", "peers", len(known.snapshot.Gateway.Peers), "reason", why)
	g.keeper.adopt(known)
	e.resume(others)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.desired.valid { // if it is valid already, the API server has just answered
		g.setDesired(desired{snapshot: known.snapshot, err: why, valid: true, remembered: why})
	}
}
