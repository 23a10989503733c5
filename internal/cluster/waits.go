package cluster

import (
	"errors"
	"time"
)

// PollInterval is how often a waiting command polls. Polling survives a restart of the API server,
// after which a watch would have to be repaired.
const PollInterval = 100 * time.Millisecond

// ErrNotReady is returned when a peering was set up or taken down, but did not reach its goal in
// time.
var ErrNotReady = errors.New("timed out")

// ErrNoPeering is returned for a name that belongs neither to a Peering nor to the remains of one.
var ErrNoPeering = errors.New("no such peering")

// Patience is how long a step may take before the command reports what it waits for.
const Patience = time.Second
