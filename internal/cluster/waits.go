package cluster

import (
	"errors"
	"time"
)

// PollInterval is how often a waiting command polls. Polling continues after a restart of the API
// server, whereas a watch would have to be opened again.
const PollInterval = 100 * time.Millisecond

// ErrNotReady is returned when the objects of a peering were written or deleted, but the peering
// did not reach the desired state in time.
var ErrNotReady = errors.New("timed out")

// ErrNoPeering is returned for a name if there is no such Peering, and nothing is left of a deleted
// one.
var ErrNoPeering = errors.New("no such peering")

// Patience is how long a step may take before the command reports the reason for waiting.
const Patience = time.Second
