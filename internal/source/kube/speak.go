package kube

import "time"

// Timing of what gateways ask each other.
const (
	questionInterval = 250 * time.Millisecond

	// deferFor is how long a standby leaves the Lease alone after it asked a gateway which answered that it
	// holds the Lease. It is less than leaseDuration-retryPeriod, so that it delays no takeover from a
	// gateway that has died.
	deferFor = 4 * time.Second

	// vouchAfter is how long a holder that answers may not have renewed the Lease when a standby renews it
	// in its name: before anybody takes the Lease for given up.
	vouchAfter = 2 * retryPeriod

	// stopEarly is how much earlier than a standby may take over an active gateway falls silent: timers are
	// late on a busy machine, and the data plane needs a moment to end.
	stopEarly = time.Second
)

// A claim is what a gateway knows of the Lease.
type claim struct {
	holds      bool  // it is the holder by what it last read, wrote or remembers
	confirmed  bool  // it is the holder, and its last renewal is too young for anybody to have taken over
	transition int32 // of the Lease as last read or written; each takeover adds one
	// silent: it is the holder, and speaks to nobody until others have answered, of which the gateway that is told this is
	// one.
	silent bool
}

// An account is the last answer of another gateway.
type account struct {
	claim
	pod string
	age time.Duration // since the question was sent that it answered
	// defers is how long after that question it leaves the Lease to the gateway that asked; 0: it may take
	// the Lease at any time.
	defers time.Duration
	mute   time.Duration // that its answers have said that it is silent
	// promised is how long from now this gateway has said that it leaves the Lease to it; 0 or less: it has not.
	promised time.Duration
}

// fresh reports whether a may still be true.
func (a account) fresh() bool { return a.age < deferFor }

// A view is all by which a gateway decides whether it may speak to peers, and whether it may take the
// Lease.
type view struct {
	claim
	reads  bool          // the API server answers
	free   bool          // the Lease, as last read, names nobody, or is not there
	wait   time.Duration // that the Lease still protects the holder which it names; 0: it has expired
	others []account     // of the gateways that have answered at least once
}

// A ruling is what follows from a view.
type ruling struct {
	speak bool // to peers

	// Of a gateway that holds the Lease and may not speak.
	lost      bool   // the Lease is another gateway's by now,
	successor string // whose Pod this is; empty: not known
	unheard   string // the Pod of a gateway that does not answer, and may have taken the Lease

	// wait is how long to leave the Lease alone; 0: write it.
	wait time.Duration
	// deferring says that the holder of the Lease answers, and speaks.
	deferring bool
}

// decide applies the rules by which one gateway speaks to peers at a time:
//
//   - The holder speaks while its last renewal is young (confirmed). After that it needs every other gateway
//     to have answered lately that it leaves the Lease alone. A gateway that never had another one goes on
//     alone.
//   - The holder gives way to a gateway that knows of a later takeover, or that holds the Lease beside it and
//     can reach the API server.
//   - A standby takes a Lease that is free, or that has expired while nobody answers to be its holder. It does not wait
//     for ever for a holder that answers and does not speak: that one may wait for a gateway that is gone for good,
//     whose successor it cannot read of.
//
// What makes this safe is that the standby which answers "I leave the Lease alone" means a time after a question
// of its own, and the holder counts the same time from before that question was answered, less stopEarly.
// No two clocks are compared. What a standby has promised it keeps. A holder speaks for no longer than that: it says that it is
// silent only to a gateway whose promise it needs.
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

// defersTo reports whether a gateway that does not hold the Lease leaves it to another one. An answer from before a
// takeover that v knows of is no claim. Nor is that of a holder which is silent for long, where this gateway could do better: it reads the
// API server. Two that cannot, and have lost sight of each other, need the promise to go on.
func (v view) defersTo(o account) bool {
	mute := v.reads && o.silent && o.mute >= deferFor
	return !v.holds && o.holds && o.fresh() && o.transition >= v.transition && !mute
}
