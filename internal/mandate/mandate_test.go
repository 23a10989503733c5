package mandate

import (
	"flag"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// With -whole, the tests search large systems completely, which takes minutes to hours. The flag
// -most limits the number of worlds.
var (
	whole     = flag.Bool("whole", false, "search all systems to the end")
	wholeMost = flag.Int("most", 0, "with -whole, the worlds of a large system that are searched; 0: all")
)

// A system is a configuration to search. faults limits how often each fault occurs in one history.
type system struct {
	voters int
	faults limits
	lists  []List
	large  bool
}

var systems = map[string]system{
	"one voter":                         {1, limits{claims: 2, raises: 1}, []List{list(0, 0)}, false},
	"a voter is killed":                 {1, limits{claims: 2, raises: 1, kills: 1}, []List{list(0, 0)}, true},
	"a voter ends":                      {1, limits{claims: 2, raises: 1, ends: 1}, []List{list(0, 0)}, true},
	"a voter ends and is killed":        {1, limits{claims: 2, raises: 1, ends: 1, kills: 1}, []List{list(0, 0)}, true},
	"a promise is lost":                 {1, limits{claims: 2, raises: 1, reboots: 1}, []List{list(0, 0)}, false},
	"of three promises one is lost":     {3, limits{claims: 2, raises: 1, reboots: 1}, []List{list(0, 0, 1, 2)}, true},
	"a voter ends, its promise is lost": {1, limits{claims: 2, raises: 1, ends: 1, reboots: 1}, []List{list(0, 0)}, true},
	"a gateway restarts":                {1, limits{claims: 2, raises: 1, restarts: 1}, []List{list(0, 0)}, true},
	"a gateway releases":                {1, limits{claims: 3, raises: 1, releases: 1}, []List{list(0, 0)}, true},
	"two voters":                        {2, limits{claims: 2, raises: 1}, []List{list(0, 0, 1)}, true},
	"three voters":                      {3, limits{claims: 2, raises: 1}, []List{list(0, 0, 1, 2)}, true},
	"another voter, in two steps":       {2, limits{claims: 2, raises: 1, proposals: 2}, []List{list(0, 0), list(1, 0, 1), list(2, 1)}, true},
	"two voters fewer":                  {3, limits{claims: 2, raises: 1, proposals: 2}, []List{list(0, 0, 1, 2), list(1, 0, 1), list(2, 1)}, true},
	"another voter at once":             {2, limits{claims: 2, raises: 1, proposals: 1}, []List{list(0, 0), list(1, 1)}, true},
	"with a mandate, a voter ends":      {1, limits{held: true, claims: 1, ends: 1}, []List{list(0, 0)}, true},
	"with a mandate, two voters fewer":  {3, limits{held: true, claims: 1, proposals: 2}, []List{list(0, 0, 1, 2), list(1, 0, 1), list(2, 1)}, true},
}

const (
	worldLimit = 30_000    // maximum number of worlds of a large system without -whole
	found      = 4_000_000 // maximum number of worlds within which a bug must be found
)

func TestNoTwoGatewaysHaveAMandate(t *testing.T) {
	for name, s := range systems {
		t.Run(name, func(t *testing.T) {
			bound := 0
			switch {
			case s.large && *whole:
				bound = *wholeMost
			case s.large:
				bound = worldLimit
			}
			begin := time.Now()
			w, n := search(newWorld(2, s.voters, s.faults, s.lists, nil), bound)
			t.Logf("%s: %d worlds in %v", name, n, time.Since(begin).Round(time.Millisecond))
			if w != nil {
				t.Errorf("%s:\n\t%s", w.violation(), w.history())
			}
		})
	}
}

// The search visits only one of the worlds with equal keys. That is correct only if worlds with
// equal keys have successors with equal keys.
func TestStatesWithEqualKeysHaveEqualSuccessors(t *testing.T) {
	for name, s := range systems {
		t.Run(name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(26, 28))
			seen, compared := make(map[string]*world), 0
			for range 150 {
				w := newWorld(2, s.voters, s.faults, s.lists, nil)
				for range 2 + random.IntN(40) {
					var all []*world
					w.next(func(n *world) { all = append(all, n) })
					w = all[random.IntN(len(all))]
					w.violation()
					key := string(w.key(nil))
					switch first := seen[key]; {
					case first == nil:
						seen[key] = w
					case !maps.Equal(first.futures(), w.futures()):
						t.Fatalf("two worlds of one key differ in their futures:\n\t%s\nand\n\t%s", first.history(), w.history())
					default:
						compared++
					}
				}
			}
			if compared < 100 {
				t.Errorf("%d comparisons", compared)
			}
		})
	}
}

var bugs = []bug{
	{rule: "2: a voter is not bound by its answers", where: "one voter", asked: func(v *Voter, _ *Ask, _ Time) { v.bound = 0 }},
	{rule: "4: an answer counts as long as it binds", where: "one voter", timing: func(t *Timing) { t.Mandate = t.Bound + 1 }},
	{rule: "4: an answer counts from when it comes", where: "one voter", took: func(g *Gateway, v *vote, a Answer, now Time) {
		if a.Granted && g.epoch != 0 {
			v.until = now + g.timing.Mandate
		}
	}},
	{rule: "3: a lower epoch gets the vote", where: "one voter", asked: func(v *Voter, a *Ask, now Time) {
		if now >= v.bound && a.Kind == Claim {
			v.promise.Epoch = a.Epoch - 1
		}
	}},
	{rule: "2: a voter that starts is not bound", where: "a voter is killed", started: func(v *Voter, _ *Promise) { v.bound = 0 }},
	{rule: "1: nothing is stored", where: "a voter is killed", started: func(v *Voter, _ *Promise) { *v = *NewVoter(v.id, v.timing, v.incarnation, &Promise{}, 0) }},
	{rule: "6: a final answer is not stored", large: true, where: "a voter ends", started: func(v *Voter, _ *Promise) { v.inheritedBound = 0 }},
	{rule: "6: a final answer is forgotten at the next change", large: true, where: "a voter ends and is killed", asked: func(v *Voter, _ *Ask, _ Time) { v.inheritedBound = 0 }},
	{rule: "6: a final answer counts as long when the next voter has answered", large: true, where: "a voter ends", heard: func(g *Gateway, v *vote, a Answer) { v.incarnation = a.Incarnation }},
	{rule: "6: a final answer is not stored, in mid-mandate", where: "with a mandate, a voter ends", started: func(v *Voter, _ *Promise) { v.inheritedBound = 0 }},
	{rule: "6: a final answer ends with any ask", where: "with a mandate, a voter ends", asked: func(v *Voter, _ *Ask, _ Time) { v.inheritedBound = 0 }},
	{rule: "6: a final answer counts as long when the next voter has answered, in mid-mandate", where: "with a mandate, a voter ends", timing: func(t *Timing) { t.EndedBound, t.EndedMandate = 6, 5 },
		heard: func(g *Gateway, v *vote, a Answer) { v.incarnation = a.Incarnation }},
	{rule: "7: a voter without a promise votes for anybody", where: "a promise is lost", asked: func(v *Voter, a *Ask, _ Time) { a.Holds = a.Holds || v.empty }},
	{rule: "5: a mandate lives on after a release", where: "a gateway releases", freed: func(g *Gateway, was Gateway) { *g = was }},
	{rule: "5: answers from before a release count", large: true, where: "a gateway releases", took: func(g *Gateway, v *vote, a Answer, _ Time) {
		if a.Granted && g.epoch != 0 {
			v.until = max(v.until, a.Sent+g.timing.Mandate)
		}
	}},
	{rule: "5: a released epoch is used again", large: true, where: "a gateway releases", freed: func(g *Gateway, was Gateway) { g.seen = was.epoch - 1 }},
	{rule: "8: lists differ by two voters", where: "another voter at once", proposes: func(g *Gateway, l List) {
		g.next = &l
		g.arrange()
	}},
	{rule: "8: the next list counts at once", where: "with a mandate, two voters fewer", proposes: func(g *Gateway, l List) {
		g.list = l
		g.arrange()
	}},
}

func TestSearchFindsTwoMandatesIfAnyRuleIsBroken(t *testing.T) {
	for _, b := range bugs {
		if b.large && !*whole { // takes more than a million worlds
			continue
		}
		t.Run(b.rule, func(t *testing.T) {
			s := systems[b.where]
			w, n := search(newWorld(2, s.voters, s.faults, s.lists, &b), found)
			if w == nil {
				t.Fatalf("%s: not found in %d worlds", b.rule, n)
			}
			t.Logf("after %d worlds: %s:\n\t%s", n, w.violation(), w.history())
		})
	}
}

// A pair is one voter and one gateway. The test delivers their messages.
type pair struct {
	t *testing.T
	v *Voter
	g *Gateway
}

func newPair(t *testing.T) *pair {
	t.Helper()
	p := &pair{t, NewVoter("1", Usual, 1, &Promise{}, 0), NewGateway("a", Usual, 1, list(0, 0))}
	p.meet(0)
	return p
}

// meet lets the gateway learn the incarnation of the voter.
func (p *pair) meet(now Time) {
	p.t.Helper()
	answer := p.v.Receive(p.g.Tick(now, false, false)["1"], now)
	p.g.Receive(answer, now)
}

// exchange returns the gateway's ask and the voter's answer to it. The caller delivers the answer.
func (p *pair) exchange(now Time) (Ask, Answer) {
	p.t.Helper()
	a := p.g.Tick(now, true, false)["1"]
	answer := p.v.Receive(a, now)
	return a, answer
}

// isFree reports whether another gateway would get the vote now.
func (p *pair) isFree(now Time) bool {
	v := *p.v
	answer := v.Receive(Ask{Kind: Claim, From: "b", Epoch: 100, Sent: now, Nonce: 9, Heard: v.incarnation}, now)
	return answer.Granted
}

func TestFinalAnswerAppliesUntilTheHolderKnowsTheNextVoter(t *testing.T) {
	p := newPair(t)
	p.g.Claim(1 * time.Second)
	_, answer := p.exchange(1 * time.Second)
	p.g.Receive(answer, 1*time.Second)
	promise, final, ok := p.v.End(1100 * time.Millisecond)
	if !ok {
		t.Fatal("no final answer")
	}
	p.g.Receive(final, 1100*time.Millisecond)
	if got := p.g.Until(); got != 1*time.Second+Usual.EndedMandate {
		t.Errorf("the final answer counts until %v", got)
	}
	p.v = NewVoter("1", Usual, 2, &promise, 2*time.Second)
	_, lost := p.exchange(3 * time.Second)
	if p.isFree(5 * time.Second) {
		t.Error("an ask that names the voter before ends the final answer")
	}
	if p.g.Receive(lost, 3100*time.Millisecond); p.g.Until() != 3*time.Second+Usual.Mandate {
		t.Errorf("the ordinary vote counts until %v", p.g.Until())
	}
	_, answer = p.exchange(3200 * time.Millisecond)
	p.g.Receive(answer, 3200*time.Millisecond)
	if p.g.Receive(final, 3300*time.Millisecond); p.g.Until() != 3200*time.Millisecond+Usual.Mandate {
		t.Errorf("a late final answer counts until %v", p.g.Until())
	}
	if end := 3200*time.Millisecond + Usual.Bound; p.isFree(end-1) || !p.isFree(end) {
		t.Error("want the vote free when the last answer binds no more")
	}
}

func TestReleaseByAnEarlierGatewayProcessIsIgnored(t *testing.T) {
	p := newPair(t)
	const now = time.Second
	p.g.Claim(now)
	late := p.g.Release(now)["1"] // no voter has received the claim
	p.g = NewGateway("a", Usual, 2, list(0, 0))
	p.meet(now - 1)
	p.g.Claim(now)
	_, answer := p.exchange(now)
	p.g.Receive(answer, now)
	p.v.Receive(late, now)
	if !p.g.Holds(now) || p.isFree(now) {
		t.Error("the voter is free while the gateway counts on it")
	}
	release := p.g.Release(now)["1"]
	if p.g.Holds(now) {
		t.Error("a mandate after the release")
	}
	if p.v.Receive(release, now); !p.isFree(now) {
		t.Error("the voter is bound after the release")
	}
}

// After two changes of the list, a majority of the first list may not know the last one.
func TestGatewayWithAnOldVoterListGetsNoMandate(t *testing.T) {
	lists := []List{list(0, 0, 1, 2), list(1, 0, 1), list(2, 1)}
	voters := make(map[ID]*Voter)
	for _, id := range lists[0].Voters {
		voters[id] = NewVoter(id, Usual, 1, &Promise{}, 0)
	}
	beat := func(g *Gateway, now Time) {
		for id, a := range g.Tick(now, true, false) {
			answer := voters[id].Receive(a, now)
			g.Receive(answer, now)
		}
	}
	a, now := NewGateway("a", Usual, 1, lists[0]), time.Second
	beat(a, now-1)
	a.Claim(now)
	beat(a, now)
	if a.Propose(lists[2], now) {
		t.Error("a list was skipped")
	}
	for _, l := range lists[1:] {
		if !a.Propose(l, now) || a.Propose(l, now) {
			t.Fatalf("proposing list %d", l.Version)
		}
		if a.List().Version == l.Version {
			t.Errorf("list %d counts before anybody has stored it", l.Version)
		}
		now += Usual.Beat
		if beat(a, now); a.List().Version != l.Version || !a.Holds(now) {
			t.Fatalf("list %d counts", a.List().Version)
		}
	}
	for end := now + 2*Usual.Bound; now < end; now += Usual.Beat { // long enough that voters 0 and 2 are no longer bound
		beat(a, now)
	}
	b := NewGateway("b", Usual, 2, lists[0])
	b.seen = 10
	beat(b, now-1)
	b.Claim(now)
	if beat(b, now); b.Holds(now) || !a.Holds(now) {
		t.Error("a majority of a list that is over")
	}
	b.Learn(lists[2], now)
	now += Usual.Bound
	b.Claim(now)
	if beat(b, now); !b.Holds(now) || a.Holds(now) {
		t.Error("the newest list elects nobody")
	}
}

// After any history, one gateway gets a mandate and keeps it, once all messages arrive.
func TestOneGatewayEventuallyGetsAMandate(t *testing.T) {
	random := rand.New(rand.NewPCG(26, 11))
	for round := range 200 {
		s := systems[[]string{"one voter", "a voter ends", "of three promises one is lost", "a gateway releases", "two voters", "three voters"}[round%6]]
		w := newWorld(2, s.voters, s.faults, s.lists, &bug{timing: func(t *Timing) { *t = Timing{Beat: 1, Bound: 6, Mandate: 4, EndedBound: 20, EndedMandate: 15} }})
		for range random.IntN(40) {
			var all []*world
			w.next(func(n *world) { all = append(all, n) })
			w = all[random.IntN(len(all))]
		}
		for step := range 400 {
			w.now++
			holding := 0
			for i := range w.gateways {
				w.beat(i)
			}
			for i := range w.gateways {
				if w.gateways[i].Holds(w.now) {
					holding++
				}
			}
			if holding > 1 || step > 300 && holding != 1 {
				t.Fatalf("round %d, %d steps after the last loss: %d mandates; before:\n\t%s", round, step, holding, w.history())
			}
		}
	}
}

func TestGatewayAcceptsALaterRefusalOfTheSameRequest(t *testing.T) {
	p := newPair(t)
	holder := Ask{Kind: Claim, From: "b", Epoch: 100, Sent: 1, Nonce: 9, Heard: p.v.incarnation}
	if !p.v.Receive(holder, time.Second).Granted {
		t.Fatal("the other gateway has no vote")
	}
	probe := p.g.Tick(time.Second, false, false)["1"]
	p.g.Receive(p.v.Receive(probe, time.Second), time.Second)
	if p.g.Could(1100 * time.Millisecond) {
		t.Error("the vote is free although its holder has it")
	}
	holder.Kind = Release
	p.v.Receive(holder, 1050*time.Millisecond)
	if p.g.Receive(p.v.Receive(probe, 1050*time.Millisecond), 1060*time.Millisecond); !p.g.Could(1100 * time.Millisecond) {
		t.Error("the gateway does not know that the vote is free")
	}
}

// If the vote counted, a late final answer of the earlier voter would count again, although it no
// longer binds the node.
func TestLateVoteByTheNextVoterIsIgnored(t *testing.T) {
	p := newPair(t)
	p.g.Claim(1 * time.Second)
	claim := p.g.asks(Claim, 1*time.Second, false)["1"]
	p.g.Receive(p.v.Receive(claim, 1*time.Second), 1*time.Second)
	promise, _, _ := p.v.End(1100 * time.Millisecond)
	p.v = NewVoter("1", Usual, 2, &promise, 1200*time.Millisecond)
	p.g.Receive(p.v.Receive(claim, 1300*time.Millisecond), 1300*time.Millisecond)
	if heard := p.g.asks(Claim, 1400*time.Millisecond, false)["1"].Heard; heard != 1 {
		t.Errorf("the gateway has heard of incarnation %d", heard)
	}
}

func TestAnEndedMandateReleasesReachableVoters(t *testing.T) {
	voters, l := make(map[ID]*Voter), list(0, 0, 1, 2)
	for _, id := range l.Voters {
		voters[id] = NewVoter(id, Usual, 1, &Promise{}, 0)
	}
	g, now, deaf := NewGateway("a", Usual, 1, l), Time(0), false
	for ; now < 10*time.Second; now += Usual.Beat {
		for id, a := range g.Tick(now, true, false) {
			if answer := voters[id].Receive(a, now); !deaf || id == l.Voters[0] {
				g.Receive(answer, now)
			}
		}
		if deaf && !g.Holds(now) {
			break
		}
		deaf = now > 5*time.Second
	}
	for _, id := range l.Voters {
		v := *voters[id]
		if !v.Receive(Ask{Kind: Claim, From: "b", Epoch: 100, Sent: now, Nonce: 9, Heard: 1}, now).Granted {
			t.Errorf("voter %s is bound %v after the gateway went deaf", id, now-5*time.Second)
		}
	}
}

func TestVoterGrantsItsVoteOnlyToValidRequests(t *testing.T) {
	stored := Promise{Epoch: 5, Holder: "a", List: 3}
	last := Ask{Kind: Claim, From: "a", Epoch: 5, List: 3, Sent: time.Second, Nonce: 1, Heard: 7}
	for _, tc := range []struct {
		name   string
		change func(*Ask)
		at     time.Duration // time since the voter answered the ask in the variable last
		want   bool
	}{
		{"a newer ask", func(a *Ask) { a.Sent++ }, 1, true},
		{"the same ask", func(*Ask) {}, 1, false},
		{"an earlier one", func(a *Ask) { a.Sent-- }, 1, false},
		{"a lower epoch of the holder", func(a *Ask) { a.Sent++; a.Epoch = 4 }, 1, false},
		{"an older list", func(a *Ask) { a.Sent++; a.List = 2 }, 1, false},
		{"a newer list", func(a *Ask) { a.Sent++; a.List = 4 }, 1, true},
		{"an earlier voter's incarnation", func(a *Ask) { a.Sent++; a.Heard = 6 }, 1, false},
		{"no incarnation", func(a *Ask) { a.Sent++; a.Heard = 0 }, 1, false},
		{"another gateway", func(a *Ask) { a.From, a.Nonce, a.Epoch = "b", 2, 6 }, Usual.Bound - 1, false},
		{"another gateway, later", func(a *Ask) { a.From, a.Nonce, a.Epoch = "b", 2, 6 }, Usual.Bound, true},
		{"another gateway, later, with the same epoch", func(a *Ask) { a.From, a.Nonce = "b", 2 }, Usual.Bound, false},
		{"another gateway, later, with a lower epoch", func(a *Ask) { a.From, a.Nonce, a.Epoch = "b", 2, 4 }, Usual.Bound, false},
		{"another gateway, later, with an older list", func(a *Ask) { a.From, a.Nonce, a.Epoch, a.List = "b", 2, 6, 2 }, Usual.Bound, false},
	} {
		v, now := NewVoter("1", Usual, 7, &stored, 0), 2*time.Second
		if !v.Receive(last, now).Granted {
			t.Fatal("the holder has no vote")
		}
		ask := last
		tc.change(&ask)
		if got := v.Receive(ask, now+tc.at).Granted; got != tc.want {
			t.Errorf("%s gets the vote: %v", tc.name, got)
		}
	}
}

// The gateway counts votes by its proposed list once two of the three voters of the current
// list have stored the proposed list's version.
func TestNextVoterListAppliesOnceAMajorityHasStoredIt(t *testing.T) {
	before, next, now := list(1, 0, 1, 2), list(2, 0, 1, 2, 3), time.Second
	g, voters := NewGateway("a", Usual, 1, before), make(map[ID]*Voter)
	for _, id := range next.Voters {
		voters[id] = NewVoter(id, Usual, 1, &Promise{}, 0)
	}
	answers := func(ids ...ID) {
		for id, a := range g.Tick(now, true, false) {
			if slices.Contains(ids, id) {
				answer := voters[id].Receive(a, now)
				g.Receive(answer, now)
			}
		}
		now++
	}
	answers(before.Voters...)
	g.Claim(now)
	all := g.Tick(now, true, false)
	late := voters["3"].Receive(all["3"], now) // the voter has stored the current list, and its answer arrives later
	for _, id := range before.Voters[:2] {
		answer := voters[id].Receive(all[id], now)
		g.Receive(answer, now)
	}
	now++
	if !g.Holds(now) || !g.Propose(next, now) {
		t.Fatal("no mandate, or no proposal")
	}
	for _, step := range []struct {
		name string
		do   func()
		want uint64
	}{
		{"nobody has answered", func() {}, 1},
		{"an answer by the present list", func() { g.Receive(late, now) }, 1},
		{"one of the present voters", func() { answers("1") }, 1},
		{"the same one again", func() { answers("1") }, 1},
		{"the new voter", func() { answers("4") }, 1},
		{"the new voter again, which knows the gateway now", func() { answers("4") }, 1},
		{"a second one of the present voters", func() { answers("3") }, 2},
	} {
		if step.do(); g.List().Version != step.want || !g.Holds(now) {
			t.Errorf("%s: it counts by list %d, want %d; it holds: %v", step.name, g.List().Version, step.want, g.Holds(now))
		}
	}
	if voters["2"].Stored().List != 1 {
		t.Error("the third voter knows the next list")
	}
}

// Another gateway has written the foreign list, so that gateway has a mandate or will get one.
func TestVoterListOfAnotherGatewayEndsTheMandate(t *testing.T) {
	for _, tc := range []struct {
		name            string
		proposes, reads List
		want            bool
	}{
		{"its own", List{}, list(0, 0), true},
		{"its own next one", list(1, 0, 1), list(1, 0, 1), true},
		{"a newer one", List{}, list(1, 0, 1), false},
		{"a newer one of the same voters", List{}, list(3, 0), false},
		{"another one of the same version", List{}, list(0, 1), false},
		{"another next one", list(1, 0, 1), list(1, 0, 2), false},
		{"the end of votes", List{}, List{Version: 1}, false},
	} {
		p, now := newPair(t), time.Second
		p.g.Claim(now)
		_, answer := p.exchange(now)
		p.g.Receive(answer, now)
		if tc.proposes.Voters != nil && !p.g.Propose(tc.proposes, now) {
			t.Fatal("no proposal")
		}
		p.g.Learn(tc.reads, now)
		if got := p.g.Holds(now); got != tc.want || (p.g.Epoch() != 0) != tc.want || p.g.Until() > now != tc.want {
			t.Errorf("%s: it holds: %v, epoch %d; want %v", tc.name, got, p.g.Epoch(), tc.want)
		}
	}
}
