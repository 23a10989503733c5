package fabric

import "time"

// ReleaseHold is how long a released network is held: every node refuses it, and no other cluster
// gets it.
const ReleaseHold = 24 * time.Hour
