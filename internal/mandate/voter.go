package mandate

import "time"

// A Time is a reading of one host's clock. It has no meaning on another host. A gateway's clock is monotonic;
// a voter's also runs while the host sleeps (CLOCK_BOOTTIME).
type Time = time.Duration

// An ID names a gateway or a voter.
type ID string

// Timing holds the durations of the protocol. All gateways and voters of a cluster use the same.
type Timing struct {
	Beat            time.Duration // between two asks of a gateway
	Bound           time.Duration // how long a voter stays bound to the holder that it answered
	Mandate         time.Duration // how long an answered ask counts, from when it was sent; less than Bound
	Farewell        time.Duration // how long a voter that ended in order stays bound
	FarewellMandate time.Duration // how long such a vote counts, from when the last ask was sent; less than Farewell
}

// Usual is the Timing outside of tests. The difference between what binds and what counts allows for clocks
// that differ by a fifth.
var Usual = Timing{Beat: 150 * time.Millisecond, Bound: 900 * time.Millisecond, Mandate: 700 * time.Millisecond,
	Farewell: 30 * time.Second, FarewellMandate: 23 * time.Second}

// A Promise is what a voter stores. The zero Promise is to nobody.
type Promise struct {
	Epoch  uint64 `json:"epoch"`
	Holder ID     `json:"holder"`
	List   uint64 `json:"list"` // version
	// Until is the end of a farewell, by the voter's clock; 0: the voter did not end in order.
	Until Time `json:"until,omitempty"`
}

// A Kind is what a gateway wants of a voter.
type Kind uint8

// Kinds of asks.
const (
	Probe   Kind = iota // tell what you promised; changes nothing
	Claim               // vote for me
	Release             // you are free
)

// An Ask is a message of a gateway to a voter.
type Ask struct {
	Kind  Kind
	From  ID
	Epoch uint64
	List  uint64
	// Sent is when the gateway sent it, and Nonce tells answers of its earlier lives: both are returned.
	Sent  Time
	Nonce uint64
	// Heard is the incarnation of the voter that the gateway last got an answer of; 0: none.
	Heard uint64
}

// An Answer is a message of a voter to a gateway.
type Answer struct {
	From        ID
	Granted     bool // the voter is bound to the gateway
	Farewell    bool // and stays so for Timing.Farewell, without further answers
	Promise     Promise
	Free        time.Duration // until another gateway can get the vote; 0: now
	Sent        Time          // of the Ask
	Nonce       uint64        // of the Ask
	Incarnation uint64        // of the voter
}

// A Voter is the vote of one node. One goroutine uses it.
type Voter struct {
	id          ID
	timing      Timing
	incarnation uint64
	promise     Promise
	silent      Time // answers nobody before
	bound       Time // no other gateway gets the vote before
	farewell    Time // nor before this, until the holder has heard of this incarnation; 0: that is over
	released    bool // the epoch of the promise is over
	last        Ask  // that the holder got the vote by; its zero value: none in this life
}

// NewVoter starts a voter with what is stored on its node; nil: nothing, as after a reboot. Then list is the
// version of the list as just read from the Lease. The incarnation differs from those of all earlier voters of the
// node, and is not 0.
func NewVoter(id ID, timing Timing, incarnation uint64, stored *Promise, list uint64, now Time) *Voter {
	v := &Voter{id: id, timing: timing, incarnation: incarnation}
	if stored == nil {
		v.silent, v.promise.List = now+timing.Farewell, list
		return v
	}
	v.promise, v.bound, v.farewell = *stored, now+timing.Bound, stored.Until
	v.promise.Until = 0
	return v
}

// Stored is what the caller stores.
func (v *Voter) Stored() Promise {
	p := v.promise
	p.Until = v.farewell
	return p
}

// Receive answers an ask; ok is false where there is no answer. If store says so, the caller stores Stored before it
// sends the answer.
func (v *Voter) Receive(a Ask, now Time) (answer Answer, store, ok bool) {
	if now < v.silent {
		return Answer{}, false, false
	}
	own := a.From == v.promise.Holder
	switch {
	case a.Kind == Release && own && a.Epoch == v.promise.Epoch && a.Nonce == v.last.Nonce:
		v.released, v.bound, v.farewell = true, now, 0
	case a.Kind == Claim && a.List >= v.promise.List && v.grants(a, own, now):
		answer.Granted = true
		promise := Promise{Epoch: a.Epoch, Holder: a.From, List: a.List}
		store = promise != v.promise
		v.promise, v.released, v.bound, v.last = promise, false, now+v.timing.Bound, a
		if a.Heard == v.incarnation {
			v.farewell = 0
		}
	}
	answer.From, answer.Promise, answer.Sent, answer.Nonce, answer.Incarnation = v.id, v.promise, a.Sent, a.Nonce, v.incarnation
	answer.Free = max(0, max(v.bound, v.farewell)-now)
	return answer, store, true
}

// grants reports whether a claim gets the vote, as far as epochs and time are concerned.
func (v *Voter) grants(a Ask, own bool, now Time) bool {
	if a.Epoch == v.promise.Epoch {
		return own && !v.released
	}
	return a.Epoch > v.promise.Epoch && (own || now >= max(v.bound, v.farewell))
}

// End is the last use of a voter that ends in order. ok is false where its vote is nobody's; otherwise the caller
// stores the promise and then sends the answer to its holder.
func (v *Voter) End(now Time) (promise Promise, answer Answer, ok bool) {
	if v.released || v.last.From == "" || now >= v.bound {
		return Promise{}, Answer{}, false
	}
	promise = v.promise
	promise.Until = max(v.farewell, now+v.timing.Farewell)
	return promise, Answer{From: v.id, Granted: true, Farewell: true, Promise: v.promise, Free: promise.Until - now,
		Sent: v.last.Sent, Nonce: v.last.Nonce, Incarnation: v.incarnation}, true
}
