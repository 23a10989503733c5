package mandate

import "slices"

// A List is the nodes that vote, sorted by name.
type List struct {
	Version uint64
	Voters  []ID
}

// follows reports whether l may replace previous: the version of l is the next one, and the lists
// differ by one voter.
func (l List) follows(previous List) bool {
	if l.Version != previous.Version+1 {
		return false
	}
	differ := 0
	for _, pair := range [][2][]ID{{l.Voters, previous.Voters}, {previous.Voters, l.Voters}} {
		for _, id := range pair[0] {
			if !slices.Contains(pair[1], id) {
				differ++
			}
		}
	}
	return differ <= 1
}

func (l List) equal(m List) bool { return l.Version == m.Version && slices.Equal(l.Voters, m.Voters) }

// majority returns the number of votes that decide.
func (l List) majority() int { return len(l.Voters)/2 + 1 }

// A vote is the state of one voter as its answers show it.
type vote struct {
	voter       ID
	heard       Time   // time at which the last answered ask was sent
	incarnation uint64 // incarnation of the voter in that answer; 0: it never answered
	until       Time   // end of the time in which the vote counts; 0: it does not count
	free        Time   // time by our clock from which another gateway could get the vote
	promise     Promise
}

// A Gateway is one candidate for a mandate. It is not safe for concurrent use.
type Gateway struct {
	id     ID
	timing Timing
	nonce  uint64
	list   List   // list by which votes are counted
	next   *List  // list that this gateway has proposed; nil: none
	epoch  uint64 // epoch that this gateway claims; 0: it claims none
	seen   uint64 // highest epoch that this gateway has claimed or that was passed to See
	since  Time   // when it began to claim epoch
	rest   Time   // it claims no epoch before this time
	pauses uint64 // number of calls of pause
	votes  []vote // votes of all voters in list and next, sorted
}

// NewGateway returns a gateway that claims no epoch. The nonce must be random and differ
// between processes.
func NewGateway(id ID, timing Timing, nonce uint64, list List) *Gateway {
	g := &Gateway{id: id, timing: timing, nonce: nonce, list: list}
	g.arrange()
	return g
}

// arrange keeps the votes of the voters in both lists, and drops all others.
func (g *Gateway) arrange() {
	all := slices.Clone(g.list.Voters)
	if g.next != nil {
		all = append(all, g.next.Voters...)
		slices.Sort(all)
		all = slices.Compact(all)
	}
	before := g.votes
	g.votes = make([]vote, len(all))
	for i, id := range all {
		g.votes[i].voter = id
		if old := slices.IndexFunc(before, func(v vote) bool { return v.voter == id }); old >= 0 {
			g.votes[i] = before[old]
		}
	}
}

// Learn passes the list in the Lease to the gateway. If the gateway neither uses nor proposes that
// list, another gateway has written it, so the mandate ends.
func (g *Gateway) Learn(list List, now Time) {
	if list.equal(g.list) || g.next != nil && list.equal(*g.next) {
		return
	}
	g.list, g.next = list, nil
	g.withdraw(now)
	g.arrange()
}

// Propose begins to change the list. The caller has already written the new list into the
// Lease. Propose does nothing and returns false if the gateway has no mandate, if another
// change is in progress, or if the new list does not follow the current one.
func (g *Gateway) Propose(list List, now Time) bool {
	if !g.Holds(now) || g.next != nil || !list.follows(g.list) {
		return false
	}
	g.next = &list
	g.arrange()
	return true
}

// Until returns the time at which the mandate ends. From then on the gateway sends nothing to
// peers. The caller compares Until with the clock just before each system call that sends.
func (g *Gateway) Until() Time {
	if g.epoch == 0 {
		return 0
	}
	all := make([]Time, 0, len(g.list.Voters))
	for _, v := range g.votes {
		if slices.Contains(g.list.Voters, v.voter) {
			all = append(all, v.until)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)-g.list.majority()]
}

// Holds reports whether the gateway has a mandate.
func (g *Gateway) Holds(now Time) bool { return now < g.Until() }

// Epoch returns the epoch of the mandate or of the claim, or 0 if the gateway claims no epoch.
func (g *Gateway) Epoch() uint64 { return g.epoch }

// Heard returns the voters that have answered within Timing.Bound, sorted. A list with a
// version below newest cannot get a majority.
func (g *Gateway) Heard(now Time) (voters []ID, newest uint64) {
	for _, v := range g.votes {
		if v.incarnation != 0 && now < v.heard+g.timing.Bound {
			voters = append(voters, v.voter)
		}
	}
	return voters, g.majorityValue(func(v *vote) uint64 { return v.promise.List })
}

// Elected returns the gateway to which a majority has promised the same epoch, according to the
// answers that this gateway received. It returns "" if there is no such gateway.
func (g *Gateway) Elected() (holder ID, epoch uint64) {
	for _, v := range g.votes {
		n := 0
		for _, w := range g.votes {
			if w.promise.Holder == v.promise.Holder && w.promise.Epoch == v.promise.Epoch && slices.Contains(g.list.Voters, w.voter) {
				n++
			}
		}
		if v.promise.Epoch > epoch && n >= g.list.majority() {
			holder, epoch = v.promise.Holder, v.promise.Epoch
		}
	}
	return holder, epoch
}

// List returns the list by which the gateway counts votes.
func (g *Gateway) List() List { return g.list }

// Pending reports whether there is a proposed list that does not count yet.
func (g *Gateway) Pending() bool { return g.next != nil }

// Claim makes the gateway ask for votes from the next Tick on.
func (g *Gateway) Claim(now Time) {
	g.epoch, g.since = min(max(g.seen, g.promised())+1, MaxNumber), now
	g.seen = g.epoch // a released epoch must not be used again
}

// majorityValue returns the smallest value that a majority of the list's voters do not exceed. A
// single voter cannot raise the result.
func (g *Gateway) majorityValue(value func(*vote) uint64) uint64 {
	var all []uint64
	for i := range g.votes {
		if slices.Contains(g.list.Voters, g.votes[i].voter) {
			all = append(all, value(&g.votes[i]))
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[g.list.majority()-1]
}

// promised returns the epoch that a claim must exceed to get a majority.
func (g *Gateway) promised() uint64 {
	return g.majorityValue(func(v *vote) uint64 { return v.promise.Epoch })
}

// withdraw ends the claim and the mandate. rest is the earliest time of the next claim.
func (g *Gateway) withdraw(rest Time) {
	g.epoch, g.rest = 0, rest
	for i := range g.votes {
		g.votes[i].until = 0
	}
}

// See records that an epoch was in use.
func (g *Gateway) See(epoch uint64) { g.seen = max(g.seen, epoch) }

// Tick must be called once per beat. It returns the ask for each voter; the asks differ only in
// Ask.Heard. mayClaim permits the gateway to claim an epoch as soon as it could get a majority.
// hasLease means that the gateway has a mandate by the Lease. If a mandate has ended for lack of
// answers, Tick returns asks that release the voters. A voter may have granted its vote although
// its answers were lost, and may receive the release.
func (g *Gateway) Tick(now Time, mayClaim, hasLease bool) map[ID]Ask {
	switch {
	case mayClaim && g.Could(now):
		g.Claim(now)
	case g.epoch != 0 && !mayClaim:
		g.withdraw(now)
	case g.epoch != 0 && !g.Holds(now) && (g.epoch < g.promised() || now >= g.since+2*g.timing.Bound):
		all := g.asks(Release, now, hasLease)
		g.withdraw(now + g.pause())
		return all
	case g.epoch != 0 && g.epoch < max(g.seen, g.promised()): // another candidate has some votes
		g.seen = min(max(g.seen, g.promised())+1, MaxNumber)
		g.epoch = g.seen
	}
	kind := Probe
	if g.epoch != 0 {
		kind = Claim
	}
	return g.asks(kind, now, hasLease)
}

func (g *Gateway) asks(kind Kind, now Time, hasLease bool) map[ID]Ask {
	all := make(map[ID]Ask, len(g.votes))
	list := g.list.Version
	if g.next != nil {
		list = g.next.Version
	}
	for _, v := range g.votes {
		all[v.voter] = Ask{Kind: kind, From: g.id, Epoch: g.epoch, List: list, Sent: now, Nonce: g.nonce, Heard: v.incarnation,
			Holds: hasLease || g.Holds(now)}
	}
	return all
}

// pause returns a random time of 1 to 8 beats, so that two gateways do not split the votes for
// ever.
func (g *Gateway) pause() Time {
	g.pauses++
	h := (g.nonce + g.pauses) * 0x9e3779b97f4a7c15 // Fibonacci hashing
	return g.timing.Beat * Time(1+h>>61)
}

// Could reports whether the gateway claims no epoch and could get a majority now.
func (g *Gateway) Could(now Time) bool {
	if g.epoch != 0 || now < g.rest {
		return false
	}
	free := 0
	for _, v := range g.votes {
		if v.incarnation != 0 && now >= v.free && now < v.heard+g.timing.Bound && slices.Contains(g.list.Voters, v.voter) {
			free++
		}
	}
	return len(g.list.Voters) > 0 && free >= g.list.majority()
}

// Release ends the mandate and returns the message for each voter. The gateway then claims no
// epoch for a while, so that another gateway can get the votes.
func (g *Gateway) Release(now Time) map[ID]Ask {
	all := g.asks(Release, now, false)
	g.withdraw(now + 2*g.timing.Bound)
	return all
}

// Receive processes an answer.
func (g *Gateway) Receive(a Answer, now Time) {
	i := slices.IndexFunc(g.votes, func(v vote) bool { return v.voter == a.From })
	if i < 0 || a.Nonce != g.nonce || a.Sent > now || a.Promise.Epoch > MaxNumber || a.Promise.List > MaxNumber {
		return
	}
	v := &g.votes[i]
	if v.incarnation != 0 && (a.Sent < v.heard || a.Sent == v.heard && !a.Ended && (a.Granted || a.Incarnation != v.incarnation)) {
		// Ignore answers to earlier asks, and repeated answers to the last ask. Two further answers
		// to the last ask count: a final one, and a refusal by the same incarnation.
		return
	}
	if a.Incarnation != v.incarnation { // a new voter runs on that node, so the previous voter's final answer no longer extends the vote
		v.until = min(v.until, a.Sent+g.timing.Mandate)
	}
	v.heard, v.incarnation, v.promise, v.free = a.Sent, a.Incarnation, a.Promise, now+a.Free
	if a.Granted && a.Promise.Epoch == g.epoch {
		if v.until = a.Sent + g.timing.Mandate; a.Ended {
			v.until = a.Sent + g.timing.EndedMandate
		}
	}
	g.advance()
}

// advance makes the next list count once a majority of the current list has stored its version.
func (g *Gateway) advance() {
	if g.next == nil {
		return
	}
	stored := 0
	for _, v := range g.votes {
		if slices.Contains(g.list.Voters, v.voter) && v.promise.List >= g.next.Version && v.until > 0 {
			stored++
		}
	}
	if stored >= g.list.majority() {
		g.list, g.next = *g.next, nil
		g.arrange()
	}
}
