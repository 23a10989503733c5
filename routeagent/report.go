package routeagent

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// reportedOf returns the problems and limits in a state that belong in the node's report: those of
// this node, not those of objects that all nodes read.
func reportedOf(node string, s state) []kernel.Limit {
	all := slices.Clone(s.limits)
	for _, p := range s.problems {
		if p.Origin.Kind == "Node" && p.Origin.Name == node || p.Origin.Kind == "Pod" {
			all = append(all, kernel.Limit{Reason: kernel.LimitRefused, Message: p.Error()})
		}
	}
	return all
}

// report logs and counts the result of a comparison. It does not log unchanged results again.
func (a *agent) report(before, now state, changes kernel.Plan) {
	drift := before.revision == now.revision && before.err == nil
	for _, o := range changes {
		if drift {
			a.log.Warn("repaired a kernel object", "command", o.Command(""))
		} else if a.log.Enabled(context.Background(), slog.LevelDebug) { // checked here, because formatting a filter with all networks takes long
			a.log.Debug("changed a kernel object", "command", o.Command(""))
		}
	}
	if drift {
		a.metrics.repaired.Add(float64(len(changes)))
	} else if len(changes) > 0 {
		a.log.Info("kernel objects changed", "changes", len(changes), "rules", len(now.node.Rules), "routes", len(now.node.Routes))
	}
	if now.err != nil {
		a.metrics.errors.Inc()
		if before.err == nil || before.err.Error() != now.err.Error() {
			a.log.Error("cannot apply the node's configuration; retrying", "error", now.err)
		}
	} else if before.err != nil {
		a.log.Info("the node's configuration is applied again")
	}
	for _, l := range now.limits {
		if !slices.Contains(before.limits, l) {
			a.log.Warn("a function is limited on this node", "reason", l.Reason, "message", l.Message)
		}
	}
	for _, l := range before.limits {
		if !slices.Contains(now.limits, l) {
			a.log.Info("a function is no longer limited on this node", "reason", l.Reason, "message", l.Message)
		}
	}
	for _, p := range now.problems {
		if !slices.Contains(before.problems, p) {
			a.log.Warn("ignored an invalid object", "problem", p.Error())
		}
	}
	for _, p := range before.problems {
		if !slices.Contains(now.problems, p) {
			a.log.Info("an invalid object was corrected or deleted", "problem", p.Error())
		}
	}
}

func (a *agent) lastOverlay() OverlayStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.overlay
}

func (a *agent) current() state {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state
}

// reportReady reports problems that persist for two checks, until ctx ends.
func (a *agent) reportReady(ctx context.Context) {
	tick := time.NewTicker(retryInterval)
	defer tick.Stop()
	failing, unwritten := 0, false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		wrong := ""
		if err := a.ready(); err == nil {
			failing = 0
		} else if wrong, failing = err.Error(), failing+1; failing == 1 {
			continue
		}
		err := a.opts.ReportReady(ctx, wrong)
		if err != nil && !unwritten && ctx.Err() == nil {
			a.log.Warn("cannot report the problem on the Node; retrying", "error", err)
		}
		unwritten = err != nil
	}
}

// setRefused requests a report by reportRefused if the refused networks have changed.
func (a *agent) setRefused(refused int64) {
	a.mu.Lock()
	changed := a.state.refused != refused
	a.state.refused = refused
	a.mu.Unlock()
	if changed {
		set(a.refusing)
	}
}
