package fabric

import "time"

// ReleaseHold is the time for which a released network is held: every node refuses packets for it,
// and no other cluster gets it.
const ReleaseHold = 24 * time.Hour
