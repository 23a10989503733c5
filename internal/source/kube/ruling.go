package kube

import "time"

// Times of the protocol by which gateways ask each other who holds the Lease.
const (
	questionInterval = 250 * time.Millisecond

	// If a gateway answers a standby's question that it holds the Lease, the standby does not take
	// the Lease for deferFor after it sent the question. deferFor is less than
	// leaseDuration-retryPeriod, so that it does not delay a takeover from a dead gateway.
	deferFor = 4 * time.Second

	// renewForHolderAfter is how long a holder may answer questions but fail to renew the Lease,
	// before a standby renews it in the holder's name. It is short enough that no reader takes the
	// Lease for expired.
	renewForHolderAfter = 2 * retryPeriod

	// The active gateway stops sending at least stopEarly before a standby may take over. This
	// allows for late timers on a busy machine, and for the time that the data plane needs to stop.
	stopEarly = time.Second
)

// A leaseState is the last known state of the Lease, from the view of one gateway.
type leaseState struct {
	holds      bool  // this gateway is the holder according to its last read, write or snapshot
	confirmed  bool  // this gateway is the holder, and its last renewal is too recent for a takeover
	transition int32 // transitions of the Lease as last read or written; each takeover adds one
	// silent is true for a holder that sends nothing to peers until other gateways, including
	// the receiver of this state, have answered.
	silent bool
}

// An account is the last answer of another gateway, as its receiver keeps it.
type account struct {
	leaseState
	pod string
	age time.Duration // time since the question was sent
	// defers is how long after that question the other gateway promises not to take the Lease. If
	// it is 0, the other gateway may take the Lease at any time.
	defers time.Duration
	mute   time.Duration // how long all answers of the other gateway have had the flag silent
	// promised is the remaining time of this gateway's promise to the other gateway not to take the
	// Lease. If it is 0 or less, there is no promise.
	promised time.Duration
}

// fresh reports whether a is recent enough to rely on.
func (a account) fresh() bool { return a.age < deferFor }

// A view has all inputs of decide, which decides whether a gateway may send to peers and
// whether it may take the Lease.
type view struct {
	leaseState
	reads  bool          // the API server answers
	free   bool          // the Lease as last read has no holder or does not exist
	wait   time.Duration // time until the Lease expires; 0: it has expired
	others []account     // gateways that have answered at least once
}

// A ruling is the result of decide.
type ruling struct {
	maySend bool // the gateway may send to peers

	// The next three fields are for a holder that must not send.
	lost       bool   // another gateway holds the Lease now
	successor  string // the Pod of that gateway; empty: unknown
	unanswered string // the Pod of a gateway that does not answer and may have taken the Lease

	// wait is how long this gateway must not write the Lease. At 0, it may write.
	wait time.Duration
	// deferring is true if the holder of the Lease answers and sends.
	deferring bool
}

// decide applies the rules that let only one gateway at a time send to peers:
//
//   - The holder sends while its last renewal is recent (confirmed). After that, it needs from every
//     other gateway a recent answer with a promise not to take the Lease. A gateway that never had
//     an answer from another gateway needs no promises.
//   - The holder gives way to a gateway whose answer proves a later takeover. Once its own last
//     renewal is no longer recent, it also gives way to another holder, if that holder's last renewal
//     is recent or both know the same number of takeovers.
//   - A standby takes a Lease that is free, or that has expired while no gateway answers as its
//     holder. It waits only for a limited time for a holder that answers but is silent. Such a
//     holder may itself be waiting for a gateway that was deleted, because it cannot read the API
//     server.
//
// This is safe because a holder stops sending before a promise ends. A standby states in each
// answer for how much longer it promises not to take the Lease. The holder counts that time, less
// stopEarly, from when it sent its question. It sent the question before the standby made the
// answer, so the clocks of the two need not agree. A holder reports that it is silent only to a
// gateway whose promise it needs.
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
			return ruling{unanswered: o.pod}
		}
	}
	return ruling{maySend: true}
}

// defersTo reports whether this gateway, which does not hold the Lease, must not take the Lease
// because the other gateway o holds it. It ignores an answer that is older than the last takeover
// in v. It also ignores a holder that has been silent for deferFor, if this gateway can read the
// API server. If this gateway cannot read it either, the silent holder counts, because it can
// continue only if this gateway promises not to take the Lease.
func (v view) defersTo(o account) bool {
	mute := v.reads && o.silent && o.mute >= deferFor
	return !v.holds && o.holds && o.fresh() && o.transition >= v.transition && !mute
}
