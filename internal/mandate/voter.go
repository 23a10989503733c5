package mandate

import "time"

// A Time is a reading of one host's clock. It has no meaning on another host. A gateway's clock is
// monotonic. A voter's clock also advances while the host sleeps (CLOCK_BOOTTIME).
type Time = time.Duration

// An ID identifies a gateway or a voter.
type ID string

// Timing holds the durations of the protocol. All gateways and voters of a cluster must use
// equal values.
type Timing struct {
	Beat         time.Duration // interval between the asks of a gateway
	Bound        time.Duration // how long a voter stays bound to its holder after an answer
	Mandate      time.Duration // how long an answered ask counts after it was sent; less than Bound
	EndedBound   time.Duration // after an orderly end of a voter: how long its vote binds the next voter on the node, from that voter's start
	EndedMandate time.Duration // after such an end: how long the gateway counts the vote after it sent the last granted ask; less than EndedBound
}

// Usual is the Timing of real clusters. The difference between Bound and Mandate allows for
// clocks whose rates differ by a fifth.
var Usual = Timing{Beat: 150 * time.Millisecond, Bound: 900 * time.Millisecond, Mandate: 700 * time.Millisecond,
	EndedBound: 30 * time.Second, EndedMandate: 23 * time.Second}

// MaxNumber is the highest valid epoch and the highest valid version of a list. Messages with
// higher values are ignored.
const MaxNumber = 1<<31 - 2

// A Promise is the state that a voter stores. The zero Promise has no holder.
type Promise struct {
	Epoch  uint64 `json:"epoch"`
	Holder ID     `json:"holder"`
	List   uint64 `json:"list"` // version of the list
	// Ended records that the voter ended in an orderly way. The next voter on the node then
	// stays bound for Timing.EndedBound.
	Ended bool `json:"ended,omitempty"`
}

// A Kind is the purpose of an ask.
type Kind uint8

// Kinds of asks.
const (
	Probe   Kind = iota // requests the promise; changes nothing
	Claim               // requests the vote
	Release             // frees the voter
)

// An Ask is a message from a gateway to a voter.
type Ask struct {
	Kind  Kind
	From  ID
	Epoch uint64
	List  uint64
	// Sent is the time at which the gateway sent the ask. Nonce identifies the gateway's
	// process. The answer repeats both.
	Sent  Time
	Nonce uint64
	// Heard is the voter's incarnation in its last answer to the gateway, or 0 if it has not
	// answered yet.
	Heard uint64
	// Holds reports that the gateway has a mandate: by votes, or by the Lease while the Lease
	// decides.
	Holds bool
}

// An Answer is a message from a voter to a gateway.
type Answer struct {
	From        ID
	Granted     bool // the voter is bound to the gateway
	Ended       bool // the voter has ended but stays bound for Timing.EndedBound without further asks
	Promise     Promise
	Free        time.Duration // time until the asking gateway can get the vote; 0: now
	Sent        Time          // copied from the Ask
	Nonce       uint64        // copied from the Ask
	Incarnation uint64        // incarnation of the voter
}

// A Voter is the vote of one node. It is not safe for concurrent use.
type Voter struct {
	id             ID
	timing         Timing
	incarnation    uint64
	promise        Promise
	empty          bool // there is no promise; until inheritedBound, vote only for a gateway with a mandate
	bound          Time // until this time, only the holder of the promise gets the vote
	inheritedBound Time // like bound, for a vote that an earlier voter on this node may have given; 0: none. A vote or a release clears it.
	released       bool // the holder has released the epoch of the promise
	last           Ask  // the ask that last got the vote; zero: none since the start
}

// NewVoter starts a voter with the promise stored on its node, or with nil if none is stored. The
// incarnation must be random, not 0, and different from those of all earlier voters on the node. An
// ask that names it proves that the gateway has received an answer from this voter.
func NewVoter(id ID, timing Timing, incarnation uint64, stored *Promise, now Time) *Voter {
	v := &Voter{id: id, timing: timing, incarnation: incarnation}
	if v.empty = stored == nil; v.empty {
		v.inheritedBound = now + timing.EndedBound // longer than any gateway counts a vote of an earlier voter
		return v
	}
	v.promise, v.bound = *stored, now+timing.Bound
	v.promise.Ended = false
	if stored.Ended {
		v.inheritedBound = now + timing.EndedBound
	}
	return v
}

// Knows reports whether an ask names this voter's incarnation.
func (v *Voter) Knows(a Ask) bool { return a.Heard == v.incarnation }

// Stored returns the promise that the caller must store.
func (v *Voter) Stored() Promise {
	p := v.promise
	p.Ended = v.inheritedBound != 0
	return p
}

// Receive answers an ask. The caller must store the result of Stored before it sends the answer,
// whether or not the answer grants the vote.
func (v *Voter) Receive(a Ask, now Time) (answer Answer) {
	own := a.From == v.promise.Holder
	switch {
	case a.Kind == Release && own && a.Epoch == v.promise.Epoch && a.Nonce == v.last.Nonce:
		v.released, v.bound, v.inheritedBound = true, now, 0
	case a.Epoch > MaxNumber || a.List > MaxNumber:
	case a.Kind == Claim && a.Heard == v.incarnation && v.newer(a) && a.List >= v.promise.List && v.permits(a, own, now):
		answer.Granted = true
		v.promise = Promise{Epoch: a.Epoch, Holder: a.From, List: a.List}
		v.empty, v.released, v.bound, v.inheritedBound, v.last = false, false, now+v.timing.Bound, 0, a
	}
	answer.From, answer.Promise, answer.Sent, answer.Nonce, answer.Incarnation = v.id, v.promise, a.Sent, a.Nonce, v.incarnation
	if a.From != v.promise.Holder && !(v.empty && a.Holds) {
		answer.Free = max(0, max(v.bound, v.inheritedBound)-now)
	}
	return answer
}

// newer reports whether an ask is newer than the last one that got the vote.
func (v *Voter) newer(a Ask) bool { return a.Nonce != v.last.Nonce || a.Sent > v.last.Sent }

// permits reports whether the epoch and the time permit a vote for a claim. fromHolder reports
// whether the claim is from the current holder.
func (v *Voter) permits(a Ask, fromHolder bool, now Time) bool {
	switch {
	case v.empty:
		return a.Holds || now >= v.inheritedBound
	case a.Epoch == v.promise.Epoch:
		return fromHolder && !v.released
	}
	return a.Epoch > v.promise.Epoch && (fromHolder || now >= max(v.bound, v.inheritedBound))
}

// End ends a voter in an orderly way; no other method may be called afterwards. If ok is true, the
// caller stores the promise and then sends the answer to the promise's holder. ok is false if no
// gateway has the vote.
func (v *Voter) End(now Time) (promise Promise, answer Answer, ok bool) {
	if v.released || v.last.From == "" || now >= v.bound {
		return Promise{}, Answer{}, false
	}
	promise = v.promise
	promise.Ended = true
	return promise, Answer{From: v.id, Granted: true, Ended: true, Promise: v.promise,
		Sent: v.last.Sent, Nonce: v.last.Nonce, Incarnation: v.incarnation}, true
}
