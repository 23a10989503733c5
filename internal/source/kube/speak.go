package kube

import "time"

// Timing of the questions between gateways.
const (
	questionInterval = 250 * time.Millisecond

	// deferFor is how long a standby leaves the Lease alone, counted from its question to a gateway that
	// answered "I hold the Lease". It is less than leaseDuration-retryPeriod, so that a takeover from a
	// dead gateway is not delayed.
	deferFor = 4 * time.Second

	// vouchAfter is how long a holder that answers may fail to renew the Lease before a standby renews it
	// in its name. The standby renews before any reader considers the Lease abandoned.
	vouchAfter = 2 * retryPeriod

	// stopEarly is the margin by which an active gateway stops before a standby may take over: timers are
	// late on a busy machine, and the data plane needs a moment to stop.
	stopEarly = time.Second
)

// A claim is the state of the Lease as one gateway knows it.
type claim struct {
	holds      bool  // it last read, wrote or remembered itself as the holder
	confirmed  bool  // it is the holder, and its last renewal is so recent that no other can have taken over
	transition int32 // of the Lease as last read or written; each takeover adds one
}

// An account is the last answer of another gateway.
type account struct {
	claim
	pod string
	age time.Duration // since its question was sent
	// defers is how long after that question the other gateway leaves the Lease to the one that asked; 0:
	// it may take the Lease at any time.
	defers time.Duration
}

// fresh reports whether the answer is recent enough to rely on.
func (a account) fresh() bool { return a.age < deferFor }

// A view is the input of decide.
type view struct {
	claim
	free   bool          // the Lease, as last read, has no holder or does not exist
	wait   time.Duration // until the Lease expires; 0: expired
	others []account     // gateways that have answered at least once
}

// A ruling is the result of decide.
type ruling struct {
	speak bool // to peers

	// Set for a gateway that holds the Lease and may not speak.
	lost      bool   // another gateway holds the Lease
	successor string // the Pod of that gateway; empty: unknown
	unheard   string // the Pod of a gateway that does not answer, and may have taken the Lease

	// wait is how long to leave the Lease alone; 0: write it.
	wait time.Duration
	// deferring: the holder of the Lease answers.
	deferring bool
}

// decide applies the rules that let only one gateway speak to peers at a time:
//
//   - The holder speaks while its last renewal is recent (confirmed). After that, every other gateway must
//     have answered recently that it leaves the Lease alone. A gateway that never had another one needs no answer.
//   - The holder stops if another gateway knows of a later takeover, or also holds the Lease and reaches the
//     API server.
//   - A standby takes a Lease that is free. It takes an expired Lease if no gateway answers as its holder.
//
// This is safe without comparing two clocks. A standby that answers "I leave the Lease alone" promises a
// time that starts at its own question. The holder counts the same time, less stopEarly, from before that
// question was answered.
func decide(v view) ruling {
	if !v.holds {
		r := ruling{wait: v.wait}
		for _, o := range v.others {
			if v.defersTo(o) && !v.free {
				r.wait, r.deferring = max(r.wait, deferFor-o.age), true
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

// defersTo reports whether a gateway without the Lease leaves it to o. An answer that is older than a
// takeover known to v does not count.
func (v view) defersTo(o account) bool {
	return !v.holds && o.holds && o.fresh() && o.transition >= v.transition
}
