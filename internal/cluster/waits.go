package cluster

import (
	"errors"
	"time"
)

// PollInterval is how often a waiting command polls. Polling survives a restart of the API
// server. A watch would have to be opened again.
const PollInterval = 100 * time.Millisecond

// ErrNotReady is returned when a peering was set up or removed, but did not reach the desired
// state in time.
var ErrNotReady = errors.New("timed out")

// ErrNoPeering is returned for a name that matches neither a Peering nor remains of a deleted one.
var ErrNoPeering = errors.New("no such peering")

// Patience is how long a step may take before the command reports the reason for waiting.
const Patience = time.Second
