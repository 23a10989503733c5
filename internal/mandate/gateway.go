package mandate

import "slices"

// A List is the nodes that vote. Its voters are sorted.
type List struct {
	Version uint64
	Voters  []ID
}

// follows reports whether a list may come after another one: they differ by one voter.
func (l List) follows(before List) bool {
	if l.Version != before.Version+1 {
		return false
	}
	differ := 0
	for _, pair := range [][2][]ID{{l.Voters, before.Voters}, {before.Voters, l.Voters}} {
		for _, id := range pair[0] {
			if !slices.Contains(pair[1], id) {
				differ++
			}
		}
	}
	return differ <= 1
}

// majority is how many voters decide.
func (l List) majority() int { return len(l.Voters)/2 + 1 }

// A vote is what a gateway knows of a voter.
type vote struct {
	voter       ID
	heard       Time   // when the ask was sent that it last answered
	incarnation uint64 // of the voter then; 0: it never answered
	until       Time   // the vote counts before; 0: it does not
	free        Time   // another gateway could get the vote from then on, by our clock
	list        uint64 // version that it has stored
}

// A Gateway is one candidate. One goroutine uses it.
type Gateway struct {
	id     ID
	timing Timing
	nonce  uint64
	list   List   // by which it counts
	next   *List  // that it proposes; nil: none
	epoch  uint64 // that it claims; 0: it claims nothing
	seen   uint64 // the highest epoch that it has heard of
	since  Time   // when it began to claim
	rest   Time   // it does not claim before
	pauses uint64 // of pause
	votes  []vote // of all voters of list and next, sorted
}

// NewGateway returns a gateway that claims nothing. The nonce is random and differs in each life of the process.
func NewGateway(id ID, timing Timing, nonce uint64, list List) *Gateway {
	g := &Gateway{id: id, timing: timing, nonce: nonce, list: list}
	g.arrange()
	return g
}

// arrange keeps votes of the voters of both lists.
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

// Learn tells the gateway the list of the Lease. Older ones change nothing, and a holder knows better.
func (g *Gateway) Learn(list List, now Time) {
	if list.Version > g.list.Version && !g.Holds(now) {
		g.list, g.next = list, nil
		g.stand(now)
		g.arrange()
	}
}

// Propose begins a change of the list, which the caller has written into the Lease. It reports false, and does
// nothing, where the gateway has no mandate, another change is under way, or the list does not follow the
// present one.
func (g *Gateway) Propose(list List, now Time) bool {
	if !g.Holds(now) || g.next != nil || !list.follows(g.list) {
		return false
	}
	g.next = &list
	g.arrange()
	return true
}

// Until is when the mandate ends; the gateway sends nothing to peers from then on. The caller compares it with the
// clock right before each system call that sends.
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

// Epoch is the epoch of the mandate, or of the claim; 0: the gateway claims nothing.
func (g *Gateway) Epoch() uint64 { return g.epoch }

// List is the list by which the gateway counts.
func (g *Gateway) List() List { return g.list }

// Claim begins to ask for votes.
func (g *Gateway) Claim(now Time) {
	g.epoch, g.since = g.seen+1, now
	g.seen = g.epoch // an epoch that was released is not used again
}

// stand ends the claim and the mandate.
func (g *Gateway) stand(rest Time) {
	g.epoch, g.rest = 0, rest
	for i := range g.votes {
		g.votes[i].until = 0
	}
}

// Tick is called once a beat. It returns the same ask for each voter, but for Ask.Heard.
func (g *Gateway) Tick(now Time) map[ID]Ask {
	switch {
	case g.epoch == 0 && now >= g.rest && g.majorityFree(now):
		g.Claim(now)
	case g.epoch != 0 && !g.Holds(now) && (g.epoch < g.seen || now >= g.since+2*g.timing.Bound):
		g.stand(now + g.pause())
	case g.epoch != 0 && g.epoch < g.seen: // another candidate has got some votes
		g.seen++
		g.epoch = g.seen
	}
	kind := Probe
	if g.epoch != 0 {
		kind = Claim
	}
	return g.asks(kind, now)
}

func (g *Gateway) asks(kind Kind, now Time) map[ID]Ask {
	all := make(map[ID]Ask, len(g.votes))
	list := g.list.Version
	if g.next != nil {
		list = g.next.Version
	}
	for _, v := range g.votes {
		all[v.voter] = Ask{Kind: kind, From: g.id, Epoch: g.epoch, List: list, Sent: now, Nonce: g.nonce, Heard: v.incarnation}
	}
	return all
}

// pause is 1 to 8 beats, by chance: two gateways that split the votes do not split them for ever.
func (g *Gateway) pause() Time {
	g.pauses++
	h := (g.nonce + g.pauses) * 0x9e3779b97f4a7c15 // Fibonacci hashing
	return g.timing.Beat * Time(1+h>>61)
}

func (g *Gateway) majorityFree(now Time) bool {
	free := 0
	for _, v := range g.votes {
		if v.incarnation != 0 && now >= v.free && now < v.heard+g.timing.Bound && slices.Contains(g.list.Voters, v.voter) {
			free++
		}
	}
	return len(g.list.Voters) > 0 && free >= g.list.majority()
}

// Release ends the mandate and returns what tells the voters. The gateway rests, so that another one can follow.
func (g *Gateway) Release(now Time) map[ID]Ask {
	all := g.asks(Release, now)
	g.stand(now + 2*g.timing.Bound)
	return all
}

// Receive takes an answer.
func (g *Gateway) Receive(a Answer, now Time) {
	i := slices.IndexFunc(g.votes, func(v vote) bool { return v.voter == a.From })
	if i < 0 || a.Nonce != g.nonce || a.Sent > now {
		return
	}
	v := &g.votes[i]
	g.seen = max(g.seen, a.Promise.Epoch)
	if v.incarnation != 0 && (a.Sent < v.heard || a.Sent == v.heard && !a.Farewell) {
		return // overtaken by a later one
	}
	v.heard, v.incarnation, v.list, v.free, v.until = a.Sent, a.Incarnation, a.Promise.List, now+a.Free, 0
	if a.Granted && g.epoch != 0 && a.Sent >= g.since {
		if v.until = a.Sent + g.timing.Mandate; a.Farewell {
			v.until = a.Sent + g.timing.FarewellMandate
		}
	}
	g.advance()
}

// advance counts by the next list once a majority of the present one has stored it.
func (g *Gateway) advance() {
	if g.next == nil {
		return
	}
	stored := 0
	for _, v := range g.votes {
		if slices.Contains(g.list.Voters, v.voter) && v.list >= g.next.Version && v.until > 0 {
			stored++
		}
	}
	if stored >= g.list.majority() {
		g.list, g.next = *g.next, nil
		g.arrange()
	}
}
