package kube

import "time"

// Timing of the questions between gateways.
const (
	questionInterval = 250 * time.Millisecond

	// deferFor is how long a standby leaves the Lease alone after it asked a gateway which answered
	// that it holds the Lease. It is less than leaseDuration-retryPeriod, so that it does not delay
	// a takeover from a dead gateway.
	deferFor = 4 * time.Second

	// vouchAfter is how long an answering holder may fail to renew the Lease before a standby
	// renews it in its name. It is short enough that nobody takes the Lease for expired.
	vouchAfter = 2 * retryPeriod

	// stopEarly is the margin by which an active gateway falls silent before a standby may take
	// over: timers are late on a busy machine, and the data plane needs a moment to stop.
	stopEarly = time.Second
)

// A claim is the state of the Lease as a gateway knows it.
type claim struct {
	holds      bool  // it is the holder according to its last read, write or snapshot
	confirmed  bool  // it is the holder, and its last renewal is too recent for a takeover
	transition int32 // transitions of the Lease as last read or written; each takeover adds one
	// silent is true for a holder that speaks to nobody until other gateways have answered,
	// including the receiver of this claim.
	silent bool
}

// An account is the last answer of another gateway.
type account struct {
	claim
	pod string
	age time.Duration // since its question was sent
	// defers is how long after that question it leaves the Lease to the gateway that asked; 0: it
	// may take the Lease at any time.
	defers time.Duration
	mute   time.Duration // for how long its answers have said that it is silent
	// promised is how much longer this gateway has promised to leave the Lease to it; 0 or less:
	// not at all.
	promised time.Duration
}

// fresh reports whether a is recent enough to be true.
func (a account) fresh() bool { return a.age < deferFor }

// A view has all inputs of the decision whether a gateway may speak to peers and whether it may
// take the Lease.
type view struct {
	claim
	reads  bool          // the API server answers
	free   bool          // the Lease as last read has no holder or does not exist
	wait   time.Duration // how much longer the Lease protects its holder; 0: it has expired
	others []account     // gateways that have answered at least once
}

// A ruling is the result of decide.
type ruling struct {
	speak bool // the gateway may speak to peers

	// The next three are for a holder that may not speak.
	lost      bool   // another gateway holds the Lease by now
	successor string // the Pod of that gateway; empty: unknown
	unheard   string // the Pod of a gateway that does not answer and may have taken the Lease

	// wait is how long to leave the Lease alone; 0: it may be written.
	wait time.Duration
	// deferring is true if the holder of the Lease answers and speaks.
	deferring bool
}

// decide applies the rules that let only one gateway at a time speak to peers:
//
//   - The holder speaks while its last renewal is recent (confirmed). After that, it needs recent
//     answers of all other gateways that they leave the Lease alone. A gateway that never had
//     another one goes on alone.
//   - The holder gives way to a gateway that knows of a later takeover, or that also holds the
//     Lease and can reach the API server.
//   - A standby takes a Lease that is free, or that has expired while no gateway answers as its
//     holder. It does not wait for ever for a holder that answers but is silent: that holder may
//     wait for a gateway that is gone for good, whose successor it cannot read of.
//
// This is safe because the standby's promise to leave the Lease alone counts from a question of its
// own. The holder counts the same time from a moment before that question was answered, less
// stopEarly. So no two clocks are compared. A standby keeps its promises, and a holder speaks no
// longer than they last. A holder reports that it is silent only to a gateway whose promise it
// needs.
func decide(v view) ruling {
	if !v.holds {
		r := ruling{wait: v.wait}
		for _, o := range v.others {
			if v.free {
				continue
			}
			r.wait = max(r.wait, o.promised)
			if v.defersTo(o) {
				r.wait, r.deferring = max(r.wait, deferFor-o.age), r.deferring || !o.silent
			}
		}
		return r
	}
	for _, o := range v.others {
		beside := o.holds && !v.confirmed && (o.confirmed || o.transition == v.transition)
		if o.fresh() && (o.transition > v.transition || beside) {
			r := ruling{lost: true}
			if o.holds {
				r.successor = o.pod
			}
			return r
		}
	}
	for _, o := range v.others {
		if !v.confirmed && o.age >= o.defers-stopEarly {
			return ruling{unheard: o.pod}
		}
	}
	return ruling{speak: true}
}

// defersTo reports whether a gateway that does not hold the Lease leaves it to another one. An
// answer from before a takeover that v knows of does not count. Neither does a holder that has been
// silent for long, if this gateway can read the API server and thus do better. Two gateways that
// cannot read it, and have lost sight of each other, can only continue with this promise.
func (v view) defersTo(o account) bool {
	mute := v.reads && o.silent && o.mute >= deferFor
	return !v.holds && o.holds && o.fresh() && o.transition >= v.transition && !mute
}
