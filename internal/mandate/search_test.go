package mandate

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// coarse is a Timing with few units. A vote counts one unit less than it binds.
var coarse = Timing{Beat: 1, Bound: 2, Mandate: 1, EndedBound: 4, EndedMandate: 3}

// slot holds the one message in transit between a gateway and a voter. A newer message replaces
// it, so the older one is lost. The message may be delivered late, never, or several times.
type slot struct {
	what   byte // 0: nothing, 1: ask, 2: answer
	ask    Ask
	answer Answer
}

// limits bound the events in one history, except messages and the passage of time. A raise is a
// repeated claim with a higher epoch, after another gateway has claimed one. Two gateways could
// raise their claims for ever.
type limits struct {
	claims, raises, kills, ends, reboots, restarts, releases, proposals int

	held bool // the first gateway starts with a mandate from all voters
}

// A world is the state of a small system. All hosts have the same clock, but each host may take
// arbitrarily long to act.
type world struct {
	now      Time
	gateways []Gateway
	voters   []Voter
	slots    [][]slot // by gateway, then by voter
	released [][]slot // only for releases, which may overtake asks and be overtaken
	beaten   []bool   // which gateways have asked at the current time
	left     limits
	lists    []List // lists that may be in the Lease
	oldest   Time   // maximum age of a message
	trail    *step

	latest uint64 // highest epoch of a mandate so far
	by     ID     // gateway that had the mandate with epoch latest
	bug    *bug   // nil: the rules are intact

	amnesia bool // nodes may lose their promises
}

// A bug is a set of functions that make gateways or voters break one rule. Each may be nil.
type bug struct {
	rule     string
	large    bool   // finding the bug takes long
	where    string // name of the system that shows the bug
	timing   func(*Timing)
	asked    func(v *Voter, a *Ask, now Time)            // called before a voter gets an ask
	heard    func(g *Gateway, v *vote, a Answer)         // called before a gateway gets an answer
	took     func(g *Gateway, v *vote, a Answer, t Time) // called after a gateway got an answer
	started  func(v *Voter, stored *Promise)             // called when a voter starts
	freed    func(g *Gateway, was Gateway)               // called after a release
	proposes func(g *Gateway, l List)                    // replaces Propose
}

// A step is the last event before a world, linked to earlier steps.
type step struct {
	what   string // format with %[1]s for the gateway and %[2]s for the voter
	i, j   int
	before *step
}

func newWorld(gateways, voters int, left limits, lists []List, b *bug) *world {
	timing := coarse
	if b != nil && b.timing != nil {
		b.timing(&timing)
	}
	w := &world{now: 100, left: left, lists: lists, bug: b, amnesia: left.reboots > 0, oldest: timing.Bound + 1}
	if left.ends == 0 {
		timing.EndedBound, timing.EndedMandate = 2, 1 // without final answers, shorter times suffice and the search is faster
	} else {
		w.oldest = timing.EndedBound + 1
	}
	for i := range voters {
		w.voters = append(w.voters, *NewVoter(voterID(i), timing, 1, &Promise{}, 0))
	}
	for i := range gateways {
		w.gateways = append(w.gateways, *NewGateway(ID(rune('a'+i)), timing, uint64(i+1), lists[0]))
		w.gateways[i].seen = uint64(i) // lets the second gateway win at once
		for j := range w.gateways[i].votes {
			w.gateways[i].votes[j].incarnation = 1 // each gateway knows the voters from an earlier answer
		}
		w.slots, w.released = append(w.slots, make([]slot, voters)), append(w.released, make([]slot, voters))
	}
	w.beaten = make([]bool, gateways)
	if left.held {
		w.gateways[0].Claim(w.now)
		w.beat(0)
		w.beaten[0] = true
		w.violation()
	}
	return w
}

// beat makes a gateway ask, and delivers the answers of all voters at once.
func (w *world) beat(i int) {
	g := &w.gateways[i]
	for id, a := range g.Tick(w.now, true, false) {
		j := slices.IndexFunc(w.voters, func(v Voter) bool { return v.id == id })
		answer := w.voters[j].Receive(a, w.now)
		g.Receive(answer, w.now)
	}
}

func voterID(i int) ID { return ID(rune('1' + i)) }

func (w *world) clone(what string, i, j int) *world {
	c := *w
	c.gateways, c.voters, c.beaten = slices.Clone(w.gateways), slices.Clone(w.voters), slices.Clone(w.beaten)
	for i := range c.gateways {
		c.gateways[i].votes = slices.Clone(c.gateways[i].votes)
	}
	c.slots, c.released = make([][]slot, len(w.slots)), make([][]slot, len(w.slots))
	for i := range c.slots {
		c.slots[i], c.released[i] = slices.Clone(w.slots[i]), slices.Clone(w.released[i])
	}
	c.trail = &step{what, i, j, w.trail}
	return &c
}

// key appends to b a key that is equal for worlds with the same possible futures. Times are
// relative to now, and state that can no longer have an effect is left out. The time of an
// event is left out once no message is that old.
func (w *world) key(b []byte) []byte {
	ahead := func(t Time) { b = append(b, byte(max(t-w.now, 0))) }
	back := func(t Time) { b = append(b, byte(min(w.now-t, w.oldest))) }
	number := func(n uint64) { b = binary.AppendUvarint(b, n) }
	flag := func(f bool) {
		if b = append(b, 0); f {
			b[len(b)-1] = 1
		}
	}
	promise := func(p Promise) {
		number(p.Epoch)
		b = append(b, p.Holder...)
		number(p.List)
		b = append(b, 255)
	}
	for i := range w.gateways {
		g := &w.gateways[i]
		number(g.list.Version)
		flag(g.next != nil)
		if w.idle(i) {
			b = append(b, 255)
			continue
		}
		number(g.epoch)
		number(g.seen)
		number(g.nonce)
		if g.epoch != 0 {
			ahead(g.since + 2*g.timing.Bound)
		}
		flag(w.beaten[i])
	}
	number(w.latest)
	b = append(b, w.by...)
	columns := make([]string, len(w.voters)) // one for each voter; their order does not matter while all of them vote
	for j := range w.voters {
		begin := len(b)
		if len(w.lists) > 1 {
			number(uint64(j))
		}
		v := &w.voters[j]
		for i := range w.gateways {
			r, m := &w.released[i][j], w.slots[i][j]
			var heard Time
			asks := false // a voter never returns to a list
			for _, known := range w.gateways[i].votes {
				if known.voter != v.id || w.idle(i) {
					continue
				}
				asks, heard = true, known.heard
				number(known.incarnation)
				ahead(known.until)
				flag(known.until > 0)
				number(known.promise.Epoch)
				number(known.promise.List)
			}
			if a := m.answer; m.what == 2 && (!asks || a.Nonce != w.gateways[i].nonce || a.Sent < heard ||
				a.Sent == heard && a.Granted && !a.Ended) {
				m = slot{} // the gateway would ignore this answer
			}
			if r.ask.Epoch < v.promise.Epoch && !w.amnesia {
				r = new(slot) // the voter would ignore this release, because its epochs only grow
			}
			if b = append(b, r.what, m.what); r.what == 1 {
				number(r.ask.Epoch)
				number(r.ask.Nonce)
				back(r.ask.Sent)
			}
			switch m.what { // the time matters only relative to the last message that arrived
			case 1:
				b = append(b, byte(m.ask.Kind), byte(1+cmp.Compare(m.ask.Sent, heard)))
				number(m.ask.Epoch)
				number(m.ask.List)
				back(m.ask.Sent)
				number(m.ask.Nonce)
				number(m.ask.Heard)
				flag(m.ask.Holds)
				flag(v.newer(m.ask))
			case 2:
				b = append(b, byte(1+cmp.Compare(m.answer.Sent, heard)))
				flag(m.answer.Granted)
				flag(m.answer.Ended)
				promise(m.answer.Promise)
				back(m.answer.Sent)
				number(m.answer.Nonce)
				number(m.answer.Incarnation)
			}
		}
		number(v.incarnation)
		promise(v.promise)
		ahead(v.bound)
		ahead(v.inheritedBound)
		flag(v.inheritedBound != 0)
		flag(v.released)
		flag(v.empty)
		number(v.last.Nonce)
		if w.left.ends > 0 { // a final answer repeats the answer to the last ask
			back(v.last.Sent)
		}
		columns[j] = string(b[begin:])
		b = b[:begin]
	}
	if len(w.lists) == 1 {
		slices.Sort(columns)
	}
	for _, c := range columns {
		b = append(append(b, c...), 254)
	}
	for _, n := range []int{w.left.claims, w.left.raises, w.left.kills, w.left.ends, w.left.reboots, w.left.restarts, w.left.releases, w.left.proposals, len(w.lists)} {
		b = append(b, byte(n))
	}
	return b
}

// idle reports whether a gateway will not act any more. Its messages may still be in transit.
func (w *world) idle(i int) bool { return w.gateways[i].epoch == 0 && w.left.claims == 0 }

// next calls yield with each world that may follow in one step.
func (w *world) next(yield func(*world)) {
	c := w.clone("time passes", 0, 0)
	c.now++
	clear(c.beaten)
	for i := range c.slots {
		for j := range c.slots[i] {
			if s := &c.slots[i][j]; s.what == 1 && c.now-s.ask.Sent >= w.oldest || s.what == 2 && c.now-s.answer.Sent >= w.oldest {
				*s = slot{}
			}
			if s := &c.released[i][j]; s.what == 1 && c.now-s.ask.Sent >= w.oldest {
				*s = slot{}
			}
		}
	}
	yield(c)
	for i := range w.gateways {
		w.gatewayActs(i, yield)
		for j := range w.voters {
			w.delivers(i, j, yield)
		}
	}
	for j := range w.voters {
		w.voterActs(j, yield)
	}
}

func (w *world) gatewayActs(i int, yield func(*world)) {
	g := &w.gateways[i]
	send := func(c *world, all map[ID]Ask) {
		for j := range c.voters {
			if a, ok := all[voterID(j)]; ok && a.Kind == Release {
				c.released[i][j] = slot{what: 1, ask: a}
			} else if ok {
				c.slots[i][j] = slot{what: 1, ask: a}
			}
		}
		yield(c)
	}
	if g.epoch == 0 && w.left.claims > 0 {
		c := w.clone("%[1]s claims", i, 0)
		c.left.claims--
		c.gateways[i].Claim(c.now)
		yield(c)
	}
	if g.epoch != 0 && !w.beaten[i] {
		c := w.clone("%[1]s asks", i, 0)
		c.beaten[i] = true
		all := c.gateways[i].Tick(c.now, true, false)
		if c.gateways[i].epoch > g.epoch {
			c.left.raises--
		}
		if c.left.raises >= 0 {
			send(c, all)
		}
	}
	if g.epoch != 0 && w.left.releases > 0 {
		c := w.clone("%[1]s releases", i, 0)
		c.left.releases--
		was := c.gateways[i]
		was.votes = slices.Clone(was.votes)
		all := c.gateways[i].Release(c.now)
		if w.bug != nil && w.bug.freed != nil {
			w.bug.freed(&c.gateways[i], was)
		}
		send(c, all)
	}
	if w.left.restarts > 0 {
		c := w.clone("%[1]s restarts", i, 0)
		c.left.restarts--
		c.gateways[i] = *NewGateway(g.id, g.timing, g.nonce+10, g.list)
		for j := range c.gateways[i].votes {
			c.gateways[i].votes[j].incarnation = g.votes[j].incarnation // NewGateway does not know it; a real gateway learns it from an answer
		}
		yield(c)
	}
	if w.left.proposals > 0 && g.Holds(w.now) && g.next == nil && g.list.Version+1 < uint64(len(w.lists)) {
		c := w.clone("%[1]s proposes the next list", i, 0)
		c.left.proposals--
		if w.bug != nil && w.bug.proposes != nil {
			w.bug.proposes(&c.gateways[i], w.lists[g.list.Version+1])
			yield(c)
		} else if c.gateways[i].Propose(w.lists[g.list.Version+1], w.now) {
			yield(c)
		}
	}
	if newest := g.list.Version + 1; newest < uint64(len(w.lists)) && w.proposed(newest) && !g.Holds(w.now) && g.next == nil {
		c := w.clone("%[1]s learns the next list", i, 0)
		c.gateways[i].Learn(w.lists[newest], c.now)
		yield(c)
	}
}

// proposed reports whether the Lease has a list of this version or a newer one.
func (w *world) proposed(version uint64) bool {
	for i := range w.gateways {
		if g := &w.gateways[i]; g.list.Version >= version || g.next != nil && g.next.Version >= version {
			return true
		}
	}
	return false
}

func (w *world) delivers(i, j int, yield func(*world)) {
	if r := &w.released[i][j]; r.what == 1 { // the release may be delivered again
		c := w.clone("%[2]s gets the release of %[1]s", i, j)
		ask := r.ask
		if w.bug != nil && w.bug.asked != nil {
			w.bug.asked(&c.voters[j], &ask, c.now)
		}
		c.voters[j].Receive(ask, c.now)
		yield(c)
	}
	s := &w.slots[i][j]
	switch s.what {
	case 1:
		c := w.clone("%[2]s gets the ask of %[1]s", i, j)
		ask := s.ask
		if w.bug != nil && w.bug.asked != nil {
			w.bug.asked(&c.voters[j], &ask, c.now)
		}
		answer := c.voters[j].Receive(ask, c.now)
		again := c.clone("the answer of %[2]s to %[1]s is lost", i, j)
		yield(again)
		c.slots[i][j] = slot{what: 2, answer: answer}
		yield(c)
	case 2:
		c := w.clone("%[1]s gets the answer of %[2]s", i, j)
		g := &c.gateways[i]
		at := slices.IndexFunc(g.votes, func(v vote) bool { return v.voter == s.answer.From })
		if at < 0 {
			return
		}
		if w.bug != nil && w.bug.heard != nil {
			w.bug.heard(g, &g.votes[at], s.answer)
		}
		g.Receive(s.answer, c.now)
		if w.bug != nil && w.bug.took != nil && at < len(g.votes) {
			w.bug.took(g, &g.votes[at], s.answer, c.now)
		}
		again := c.clone("the answer of %[2]s to %[1]s may come again", i, j)
		yield(again)
		c.slots[i][j] = slot{}
		yield(c)
	}
}

func (w *world) voterActs(j int, yield func(*world)) {
	v := &w.voters[j]
	again := func(c *world, stored *Promise) {
		c.voters[j] = *NewVoter(v.id, v.timing, v.incarnation+1, stored, c.now)
		if w.bug != nil && w.bug.started != nil {
			w.bug.started(&c.voters[j], stored)
		}
		yield(c)
	}
	if w.left.kills > 0 {
		c := w.clone("%[2]s is killed and starts", 0, j)
		c.left.kills--
		stored := v.Stored()
		again(c, &stored)
	}
	if w.left.reboots > 0 {
		c := w.clone("the node of %[2]s loses its disk", 0, j)
		c.left.reboots--
		again(c, nil)
	}
	if w.left.ends > 0 {
		c := w.clone("%[2]s ends and starts", 0, j)
		c.left.ends--
		if promise, answer, ok := c.voters[j].End(c.now); ok {
			lost := c.clone("the final answer of %[2]s is lost", 0, j)
			again(lost, &promise)
			for i := range c.gateways {
				if c.gateways[i].id == promise.Holder && c.now-answer.Sent < w.oldest {
					c.slots[i][j] = slot{what: 2, answer: answer}
				}
			}
			again(c, &promise)
		}
	}
}

// violation describes how the state violates the specification; empty: it does not.
func (w *world) violation() string {
	var holders []string
	for i := range w.gateways {
		if w.gateways[i].Holds(w.now) {
			holders = append(holders, string(w.gateways[i].id))
		}
	}
	if len(holders) > 1 {
		return "a mandate each for " + strings.Join(holders, " and ")
	}
	for i := range w.gateways {
		g := &w.gateways[i]
		switch { // epochs are not ordered if a voter may lose its promise
		case !g.Holds(w.now) || w.amnesia:
		case g.epoch < w.latest && g.id != w.by, g.epoch == w.latest && g.id != w.by:
			return fmt.Sprintf("%s has a mandate of epoch %d after %s had one of epoch %d", g.id, g.epoch, w.by, w.latest)
		case g.epoch > w.latest:
			w.latest, w.by = g.epoch, g.id
		}
	}
	return ""
}

// futures returns the keys of all different worlds that may follow in one step.
func (w *world) futures() map[string]bool {
	all := make(map[string]bool)
	w.next(func(n *world) {
		n.violation()
		all[string(n.key(nil))] = true
	})
	delete(all, string(w.key(nil)))
	return all
}

func (w *world) history() string {
	var all []string
	for s := w.trail; s != nil; s = s.before {
		all = append(all, strings.TrimSpace(fmt.Sprintf(s.what+"%.0[1]s%.0[2]s", string(rune('a'+s.i)), voterID(s.j))))
	}
	slices.Reverse(all)
	return strings.Join(all, "\n\t")
}

// search visits each world that can follow from first once. It returns the first world with a
// violation, or nil, and the number of worlds seen. It stops after limit worlds; 0 means no limit.
func search(first *world, limit int) (*world, int) {
	seed := maphash.MakeSeed()
	seen := make(map[uint64]struct{})
	queue := []*world{first}
	var b []byte
	var found *world
	for len(queue) > 0 && found == nil && (limit == 0 || len(seen) < limit) {
		w := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		w.next(func(n *world) {
			violation := n.violation()
			b = n.key(b[:0])
			h := maphash.Bytes(seed, b)
			if _, ok := seen[h]; ok {
				return
			}
			seen[h] = struct{}{}
			if violation != "" && found == nil {
				found = n
			}
			queue = append(queue, n)
		})
	}
	return found, len(seen)
}

func list(version uint64, n ...int) List {
	l := List{Version: version}
	for _, i := range n {
		l.Voters = append(l.Voters, voterID(i))
	}
	return l
}
