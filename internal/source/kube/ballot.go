package kube

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/voting"
)

const (
	// votersMost and votersLeast bound how many nodes vote. With two, one that crashes would silence the gateways.
	votersMost  = 9
	votersLeast = 3

	// trialMost is how long all voters of a list have to answer before it is tried without those that do not.
	trialMost = 5 * time.Second

	// quietMost is how long a voter does not answer until another node gets its vote: longer than a node takes to boot.
	quietMost = 5 * time.Minute

	// agentGone is how long a node may be without the Pod of an agent and votes: longer than a DaemonSet takes to replace one,
	// and shorter than mandate.Usual.FarewellMandate.
	agentGone = 10 * time.Second

	// goneMost is how long a majority of the voters' Nodes do not exist until the Lease decides again.
	goneMost = 30 * time.Second
)

// listOf is the list in a Lease. Without voters the Lease decides.
func listOf(lease *coordinationv1.Lease) (l voting.List) {
	if lease == nil {
		return l
	}
	if err := json.Unmarshal([]byte(lease.Annotations[isthmus.AnnotationVoters]), &l); err != nil {
		return voting.List{}
	}
	return l
}

// withList writes a list into a Lease.
func withList(lease *coordinationv1.Lease, l voting.List) {
	if l.Version == 0 {
		return
	}
	b, err := json.Marshal(l)
	if err != nil {
		panic(err) // strings and addresses
	}
	if lease.Annotations == nil {
		lease.Annotations = make(map[string]string)
	}
	lease.Annotations[isthmus.AnnotationVoters] = string(b)
}

// votesMark is AnnotationVotes.
type votesMark struct {
	Epoch  int32  `json:"epoch"`
	Key    []byte `json:"key"`
	Voting bool   `json:"voting"` // votes decide, not the Lease
	wanted bool   // or are to
}

// String is the annotation.
func (m votesMark) String() string {
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // numbers and octets
	}
	return string(b)
}

// votesOf reads what String returned. Anything else is nobody's vote.
func votesOf(annotation string) (m votesMark) {
	if json.Unmarshal([]byte(annotation), &m) != nil || len(m.Key) != ed25519.PublicKeySize {
		return votesMark{}
	}
	return m
}

// votes is what nodes have to know to vote.
func (g *Gateway) votes() votesMark {
	g.mu.Lock()
	e, shared := g.election, g.shared
	g.mu.Unlock()
	if e == nil || e.votes == nil {
		return votesMark{}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return votesMark{e.transition, voting.KeyOf(shared).Public().(ed25519.PublicKey), e.byVotesLocked(), e.votes.wanted || e.byVotesLocked()}
}

// tellKey writes the key into the Service where it has another one: without it no node votes, and no gateway can become active.
func (g *Gateway) tellKey(ctx context.Context) {
	var services corev1.ServiceList
	if !g.reading.Load() || g.objects.List(ctx, &services) != nil || len(services.Items) != 1 {
		return
	}
	have, mark := &services.Items[0], g.votes()
	told := votesOf(have.Annotations[isthmus.AnnotationVotes])
	if mark.Key == nil || bytes.Equal(told.Key, mark.Key) {
		return
	}
	want := have.DeepCopy()
	if want.Annotations == nil {
		want.Annotations = make(map[string]string)
	}
	want.Annotations[isthmus.AnnotationVotes] = mark.String()
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if err := g.client.Patch(ctx, want, client.MergeFromWithOptions(have, client.MergeFromWithOptimisticLock{})); err != nil {
		g.log.Warn("cannot publish the key with which gateways sign requests for votes", "error", err)
	}
}

// ballot is the part of an election that concerns votes. Of the election's run alone, but for what nodes and the list of
// the election say.
type ballot struct {
	*voting.Candidate
	wanted bool // the installation wants votes

	trial  voting.List          // that the holder of the Lease tries
	tried  time.Time            // since when
	silent map[string]bool      // nodes that did not answer in a trial
	gone   time.Time            // since when a majority of the voters' Nodes do not exist; zero: they do
	quiet  map[string]time.Time // since when a voter does not answer
	key    func()               // tells nodes the key by which gateways sign, where the Service has another one

	agents func() *map[string]bool // the nodes with a route agent; nil: all may have one
	manned map[string]time.Time    // when a node was last seen with one
}

// voters chooses who votes: those of before as long as there are such nodes, then others in an order that does not change.
func voters(nodes, before map[string]netip.Addr, without map[string]bool) map[string]netip.Addr {
	var all []string
	for name := range nodes {
		if !without[name] {
			all = append(all, name)
		}
	}
	n := min(votersMost, len(all)-(len(all)+1)%2) // an odd number
	if n < votersLeast {
		return nil
	}
	slices.SortFunc(all, func(a, b string) int {
		_, hadA := before[a]
		_, hadB := before[b]
		if hadA != hadB {
			if hadA {
				return -1
			}
			return 1
		}
		x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
		return cmp.Or(slices.Compare(x[:], y[:]), cmp.Compare(a, b))
	})
	chosen := make(map[string]netip.Addr)
	for _, name := range all[:n] {
		chosen[name] = nodes[name]
	}
	return chosen
}

// step is the list that is one voter nearer to want; the same one where there is nothing to change.
func step(have voting.List, want map[string]netip.Addr) voting.List {
	next := voting.List{Version: have.Version + 1, Voters: maps.Clone(have.Voters)}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if at, ok := have.Voters[name]; ok && at != want[name] {
			next.Voters[name] = want[name] // the same node elsewhere
			return next
		}
	}
	var more, fewer []string
	for name := range want {
		if _, ok := have.Voters[name]; !ok {
			more = append(more, name)
		}
	}
	for name := range have.Voters {
		if _, ok := want[name]; !ok {
			fewer = append(fewer, name)
		}
	}
	slices.Sort(more)
	slices.Sort(fewer)
	switch {
	case len(more) > 0 && (len(fewer) == 0 || len(have.Voters) <= len(want)):
		next.Voters[more[0]] = want[more[0]]
	case len(fewer) > 0:
		delete(next.Voters, fewer[0])
	default:
		return have
	}
	return next
}

// byVotesLocked reports whether votes decide, as far as is known; e.mu is held.
func (e *election) byVotesLocked() bool { return e.votes != nil && len(e.list.Voters) > 0 }

func (e *election) byVotes() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.byVotesLocked()
}

// mute reports whether votes decide, and this replica has none.
func (e *election) mute() bool { return e.byVotes() && !e.votes.View().Holds }

// newestList is the newest one that this replica has read.
func (e *election) newestList() voting.List {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.list
}

// sinceSeen is since when the Lease is as it is.
func (e *election) sinceSeen() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.seen
}

// voters is how many nodes vote, and how many of them have answered lately.
func (e *election) voters() (all, heard int) {
	e.mu.Lock()
	all = len(e.list.Voters)
	e.mu.Unlock()
	return all, len(e.votes.View().Heard)
}

// hearsLocked reports whether a majority of the voters has answered lately; e.mu is held.
func (e *election) hearsLocked(v voting.View) bool {
	heard := 0
	for _, name := range v.Heard {
		if _, votes := e.list.Voters[name]; votes {
			heard++
		}
	}
	return heard > len(e.list.Voters)/2
}

// judgeVotesLocked decides who is active where votes do; e.mu is held.
func (e *election) judgeVotesLocked(now time.Time) {
	v := e.votes.View()
	if hears := e.hearsLocked(v); hears || e.hears {
		e.hears, e.heardAt = hears, now
	}
	name := e.name
	switch {
	case v.Holds:
		name, e.transition = e.identity, max(e.transition, int32(v.Epoch))
	case v.Holder != "" && (v.Since > uint64(e.transition) || v.Since == uint64(e.transition) && name == ""):
		name, e.transition = v.Holder, int32(v.Since)
	}
	e.unheard = ""
	e.lacking = name == e.identity && !v.Holds
	if speaking := name == e.identity && (v.Holds || e.speaking); name != e.name || speaking != e.speaking {
		if name != e.name {
			e.log.Info("the nodes have elected the active gateway", "pod", name, "former", e.name, "epoch", e.transition)
		}
		e.name, e.speaking = name, speaking
		e.changed.set()
	}
}

// stepVotes is step where votes decide: the Lease says to others who is active, and which nodes vote.
func (e *election) stepVotes(now time.Time) (want *coordinationv1.Lease) {
	v, b := e.votes.View(), e.votes
	e.mu.Lock()
	list, transition := e.list, e.transition
	e.mu.Unlock()
	if !v.Holds {
		nodes, there := b.Nodes(), 0
		for name := range list.Voters {
			if nodes[name].IsValid() {
				there++
			}
		}
		majority := len(list.Voters)/2 + 1
		switch gone := len(nodes) > 0 && there < majority && len(v.Heard) < majority; {
		case e.lease == nil || standDown(e.lease, e.identity, e.sinceSeen(), now) > 0: // somebody is at work
			b.gone = time.Time{}
		case !gone && v.Newest > list.Version: // the Lease is older than what nodes have stored
			want = e.lease.DeepCopy()
			withList(want, voting.List{Version: v.Newest, Voters: list.Voters})
		case !gone:
			b.gone = time.Time{}
			b.key()
		case b.gone.IsZero():
			b.gone = now
		case now.Sub(b.gone) >= goneMost:
			e.log.Warn("most voting nodes no longer exist: the Lease decides which gateway is active", "voters", slices.Sorted(maps.Keys(list.Voters)))
			want = take(e.lease, e.identity, now)
			*want.Spec.LeaseTransitions = max(*want.Spec.LeaseTransitions, transition+1)
			withList(want, voting.List{Version: max(list.Version, v.Newest) + 1})
		}
		return want
	}
	next := list
	nodes := b.electable(now)
	useful := b.useful(b.Answering(), list.Voters, nodes, now)
	// Where one of three is away for long, the next one that crashes would silence the gateways.
	switch off := !b.wanted || min(len(nodes), len(useful)) < votersLeast; {
	case off && v.List == list.Version:
		b.Fence()
	case off && v.List > list.Version:
		next = voting.List{Version: v.List}
	case v.List == list.Version:
		if chosen := voters(useful, list.Voters, nil); chosen != nil {
			next = step(list, chosen)
		}
	}
	if next.Version == list.Version && holderOf(e.lease) == e.identity && now.Sub(e.written) < retryPeriod {
		return nil
	}
	want = take(e.lease, e.identity, now)
	if t := want.Spec.LeaseTransitions; t == nil || *t < transition {
		want.Spec.LeaseTransitions = &transition
	}
	withList(want, next)
	return want
}

// electable are the nodes that may vote: those with an agent.
func (b *ballot) electable(now time.Time) map[string]netip.Addr {
	nodes, agents := b.Nodes(), b.agents()
	if agents == nil {
		return nodes
	}
	if b.manned == nil {
		b.manned = make(map[string]time.Time)
	}
	all := make(map[string]netip.Addr)
	for name, addr := range nodes {
		if (*agents)[name] {
			b.manned[name] = now
		}
		if at, had := b.manned[name]; had && now.Sub(at) < agentGone {
			all[name] = addr
		}
	}
	maps.DeleteFunc(b.manned, func(name string, _ time.Time) bool { return !nodes[name].IsValid() })
	return all
}

// useful adds to the nodes that answer the voters that have not answered for less than quietMost: these may vote from
// now on. One that does not answer is as bad as a vote against the holder.
func (b *ballot) useful(all, list, nodes map[string]netip.Addr, now time.Time) map[string]netip.Addr {
	if b.quiet == nil {
		b.quiet = make(map[string]time.Time)
	}
	for name := range list {
		if _, answers := all[name]; answers {
			delete(b.quiet, name)
			continue
		}
		if b.quiet[name].IsZero() {
			b.quiet[name] = now
		}
		if addr, there := nodes[name]; there && now.Sub(b.quiet[name]) < quietMost {
			all[name] = addr
		}
	}
	return all
}

// try lets the holder of the Lease ask nodes for their votes, before votes decide. It returns the list to write once all of
// them have given theirs; the zero List: not yet.
func (b *ballot) try(before voting.List, now time.Time) voting.List {
	if !b.wanted {
		return voting.List{}
	}
	v, nodes := b.View(), b.electable(now)
	if b.silent == nil {
		b.silent = make(map[string]bool)
	}
	if !b.tried.IsZero() && now.Sub(b.tried) >= trialMost && len(v.Heard) < len(b.trial.Voters) {
		for name := range b.trial.Voters {
			if !slices.Contains(v.Heard, name) {
				b.silent[name] = true
			}
		}
		if len(nodes)-len(b.silent) < votersLeast {
			clear(b.silent) // from the beginning
		}
		b.tried = now
	}
	chosen := voters(nodes, b.trial.Voters, b.silent)
	if chosen == nil {
		b.trial, b.tried = voting.List{}, time.Time{}
		return voting.List{}
	}
	version := before.Version + 1
	if v.Newest > b.trial.Version { // refused: an election that nobody remembers got further
		version = max(version, v.Newest+1)
	}
	if !maps.Equal(chosen, b.trial.Voters) || b.trial.Version < version {
		b.trial, b.tried = voting.List{Version: version, Voters: chosen}, now
		b.Learn(b.trial, false)
	}
	if v.Holds && v.List == b.trial.Version && len(v.Heard) == len(chosen) {
		return b.trial
	}
	return voting.List{}
}
