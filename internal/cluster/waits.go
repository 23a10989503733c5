package cluster

import (
	"errors"
	"time"
)

// PollInterval is how often a waiting command looks. Looking survives what a watch would have to be
// repaired after: an API server that restarts.
const PollInterval = 100 * time.Millisecond

// ErrNotReady says that a peering was set up, or taken down, and what that leads to did not come
// true in time.
var ErrNotReady = errors.New("not in time")

// ErrNoPeering says that a name is neither that of a Peering nor of anything that one left.
var ErrNoPeering = errors.New("no such peering")

// Patience is how long a step may take before the command reports what it waits for.
const Patience = time.Second
