package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/flowsync"
)

// A standby that has just started is not ready until it has the flows of the active gateway. An
// active gateway does not wait for flows.
func TestAStandbyIsNotReadyBeforeItHasTheFlows(t *testing.T) {
	f := &front{flows: flowsync.NewKeeper()}
	for _, c := range []struct {
		what, pod     string
		self, running bool
		err           error
		ready         bool
		text          string
	}{
		{"a standby", "gateway-1", false, false, nil, false, "has not received the NAT flows"},
		{"a standby that could not take over", "gateway-1", false, false, errors.New("why"), false, "why"},
		{"no gateway is active", "", false, false, nil, false, "no gateway is active"},
		{"it becomes active", "gateway-2", true, false, nil, false, "becoming active"},
		{"active", "gateway-2", true, true, nil, true, "ok, active"},
	} {
		if text, ready := f.readiness(c.pod, c.self, c.running, c.err); ready != c.ready || !strings.Contains(text, c.text) {
			t.Errorf("%s: %q, ready: %v; want %q and %v", c.what, text, ready, c.text, c.ready)
		}
	}
	f.flows.Activate(struct{ flowsync.Flows }{}) // from now on the replica is active and waits for no flows
	if text, ready := f.readiness("gateway-1", false, false, nil); !ready || text != "ok, standby for gateway-1" {
		t.Errorf("with the flows: %q, ready: %v", text, ready)
	}
}
