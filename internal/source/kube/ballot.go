package kube

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/json"
	"fmt"
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
	// maxVoters and minVoters limit the number of nodes that vote. With two voters, the crash of
	// one node would end every majority, so no gateway could send.
	maxVoters = 9
	minVoters = 3

	// trialTimeout is how long a trial (see ballot.try) waits for the answers of all its voters.
	// After that, it replaces the silent voters.
	trialTimeout = 5 * time.Second

	// maxSilence is how long a voter may be silent before another node replaces it. It is longer
	// than a node takes to reboot.
	maxSilence = 5 * time.Minute

	// maxAgentAbsence is how long a node may be without a route agent's Pod and still vote. It is
	// longer than a DaemonSet takes to replace a Pod, and shorter than
	// mandate.Usual.EndedMandate.
	maxAgentAbsence = 10 * time.Second

	// maxVotersAbsence is how long the condition of ballot.absent must last before the Lease
	// decides again.
	maxVotersAbsence = 30 * time.Second
)

// listOf returns the list of voters in a Lease. If the list has no voters, the Lease and not the
// votes decides which replica is active.
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
		panic(err) // strings and addresses can be marshalled
	}
	if lease.Annotations == nil {
		lease.Annotations = make(map[string]string)
	}
	lease.Annotations[isthmus.AnnotationVoters] = string(b)
}

// votesMark is the value of AnnotationVotes, by which a gateway publishes whether the nodes vote,
// and the public key of the gateways' signatures.
type votesMark struct {
	Epoch  int32  `json:"epoch"`
	Key    []byte `json:"key"`
	Voting bool   `json:"voting"` // votes decide, not the Lease
	wanted bool   // votes decide or should decide; not part of the annotation
}

// String returns the text of the annotation.
func (m votesMark) String() string {
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // numbers and octets can be marshalled
	}
	return string(b)
}

// votesOf parses the result of String. For anything else it returns the zero votesMark.
func votesOf(annotation string) (m votesMark) {
	if json.Unmarshal([]byte(annotation), &m) != nil || len(m.Key) != ed25519.PublicKeySize {
		return votesMark{}
	}
	return m
}

// votes returns the value that the gateway writes into isthmus.AnnotationVotes of its Service.
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

// publishKey writes the public key of the gateways' signatures into the Service, if the Service has
// another key or none. Without that key, no node votes, so no gateway can become active.
func (g *Gateway) publishKey(ctx context.Context) {
	var services corev1.ServiceList
	if !g.reading.Load() || g.objects.List(ctx, &services) != nil || len(services.Items) != 1 {
		return
	}
	have, mark := &services.Items[0], g.votes()
	published := votesOf(have.Annotations[isthmus.AnnotationVotes])
	if mark.Key == nil || bytes.Equal(published.Key, mark.Key) {
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

// ballot is the part of an election that concerns votes. Only the goroutine of election.run may use
// its fields, except Candidate and wanted.
type ballot struct {
	*voting.Candidate
	wanted bool // the installation is configured to use votes

	trial  voting.List          // list of the trial; see try
	tried  time.Time            // when the trial began
	silent map[string]bool      // nodes that did not answer in the trial
	absent time.Time            // since when fewer than a majority of the voters have Nodes, and fewer than a majority answer; zero: this is not the case
	quiet  map[string]time.Time // silent voter → since when it has been silent
	key    func()               // calls Gateway.publishKey

	agents    func() *map[string]bool // returns the nodes with a route agent; nil: any node may have one
	agentSeen map[string]time.Time    // node → when it was last seen with an agent

	outdated string // last logged result of staleList
}

// voters chooses the nodes that vote: an odd number of at most maxVoters, or none if there are
// fewer than minVoters. It prefers nodes that voted before, and takes further nodes in a stable
// order. It never chooses an excluded node.
func voters(nodes, before map[string]netip.Addr, excluded map[string]bool) map[string]netip.Addr {
	var all []string
	for name := range nodes {
		if !excluded[name] {
			all = append(all, name)
		}
	}
	n := min(maxVoters, len(all)-(len(all)+1)%2) // an odd number: one more voter would not tolerate one more failure
	if n < minVoters {
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

// Two successive lists differ by exactly one voter. step returns a successor of the list have that
// is one change closer to the wanted voters. If have already contains exactly these voters, step
// returns have.
func step(have voting.List, want map[string]netip.Addr) voting.List {
	next := voting.List{Version: have.Version + 1, Voters: maps.Clone(have.Voters)}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if addr, ok := have.Voters[name]; ok && addr != want[name] {
			next.Voters[name] = want[name] // the node's address has changed
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

// byVotesLocked reports whether votes, and not the Lease, decide which replica is active, according
// to the last list that this replica has read. The caller holds e.mu.
func (e *election) byVotesLocked() bool { return e.votes != nil && len(e.list.Voters) > 0 }

func (e *election) byVotes() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.byVotesLocked()
}

// lacksMajority reports whether votes decide and this replica has no majority of votes.
func (e *election) lacksMajority() bool { return e.byVotes() && !e.votes.View().Holds }

// newestList returns the newest list of voters that this replica has read.
func (e *election) newestList() voting.List {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.list
}

// sinceSeen returns when the Lease was first seen in its present version.
func (e *election) sinceSeen() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.firstSeen
}

// voters returns the number of nodes that vote, and the number of those that have answered
// recently.
func (e *election) voters() (all, answering int) {
	e.mu.Lock()
	all = len(e.list.Voters)
	e.mu.Unlock()
	return all, len(e.votes.View().Heard)
}

// hasMajorityLocked reports whether a majority of the voters has answered recently. The caller
// holds e.mu.
func (e *election) hasMajorityLocked(v voting.View) bool {
	answering := 0
	for _, name := range v.Heard {
		if _, votes := e.list.Voters[name]; votes {
			answering++
		}
	}
	return answering > len(e.list.Voters)/2
}

// staleList explains why no gateway can get votes with list: it is two or more versions older than
// the list that the nodes have stored. It returns "" if list is recent enough. A gateway must not
// repair this by publishing the old voters under a newer version. Another gateway may be active by
// the votes of the nodes' list, and a majority of that list may include no voter of the old list.
func staleList(list voting.List, v voting.View) string {
	if v.Newest <= list.Version+1 {
		return ""
	}
	return fmt.Sprintf("the list of voters in the Lease %s has version %d, but the nodes have stored version %d; the Lease was probably restored from a backup; make sure that no gateway sends, then set the annotation %s of the Lease to {\"version\":%d}",
		isthmus.LeaseGateway, list.Version, v.Newest, isthmus.AnnotationVoters, v.Newest+1)
}

// reevaluateVotesLocked determines from the votes which replica is active. The caller holds e.mu.
func (e *election) reevaluateVotesLocked(v voting.View, now time.Time) {
	if has := e.hasMajorityLocked(v) && staleList(e.list, v) == ""; has || e.hasMajority {
		e.hasMajority, e.lastMajority = has, now
	}
	name, again := e.name, v.Holds && v.Epoch > uint64(e.transition) // again: this replica may have lost the votes and got them again, without another active gateway in between
	switch {
	case v.Holds:
		name, e.transition = e.identity, max(e.transition, int32(v.Epoch))
	case v.Holder != "" && (v.Since > uint64(e.transition) || v.Since == uint64(e.transition) && name == ""):
		name, e.transition = v.Holder, int32(v.Since)
	}
	e.unanswered = ""
	e.lacking = name == e.identity && !v.Holds
	if sending := name == e.identity && (v.Holds || e.sending); name != e.name || sending != e.sending {
		if name != e.name {
			e.log.Info("the nodes have elected the active gateway", "pod", name, "previous", e.name, "epoch", e.transition)
		}
		if name == e.identity && (name != e.name || again) {
			e.taken = takeover{e.elected(v.Released), now}
		}
		e.name, e.sending = name, sending
		e.changed.set()
	}
}

// stepVotes returns the Lease to write while votes decide, or nil if there is nothing to write. The
// Lease then only publishes which gateway is active and which nodes vote.
func (e *election) stepVotes(v voting.View, now time.Time) (want *coordinationv1.Lease) {
	b := e.votes
	e.mu.Lock()
	list, transition, taken := e.list, e.transition, e.taken
	e.mu.Unlock()
	if !v.Holds {
		nodes, present := b.Nodes(), 0
		for name := range list.Voters {
			if nodes[name].IsValid() {
				present++
			}
		}
		majority := len(list.Voters)/2 + 1
		switch absent := len(nodes) > 0 && present < majority && len(v.Heard) < majority; {
		case e.lease == nil || standDown(e.lease, e.identity, e.sinceSeen(), now) > 0: // there is no Lease, or another gateway has written it recently
			b.absent = time.Time{}
		case !absent && v.Newest > list.Version+1:
			b.absent = time.Time{}
			if why := staleList(list, v); why != b.outdated {
				b.outdated = why
				e.log.Warn("nodes elect no gateway: " + why)
			}
		case !absent && v.Newest == list.Version+1: // the nodes' list is one version newer than the list in the Lease, so the two lists differ by at most one voter
			want = e.lease.DeepCopy()
			withList(want, voting.List{Version: v.Newest, Voters: list.Voters})
		case !absent:
			b.absent = time.Time{}
			b.key()
		case b.absent.IsZero():
			b.absent = now
		case now.Sub(b.absent) >= maxVotersAbsence:
			e.log.Warn("most voting nodes no longer exist: the Lease decides which gateway is active", "voters", slices.Sorted(maps.Keys(list.Voters)))
			want = withHolder(e.lease, e.identity, now)
			e.newTakeover(now).mark(want)
			*want.Spec.LeaseTransitions = max(*want.Spec.LeaseTransitions, transition+1)
			withList(want, voting.List{Version: max(list.Version, v.Newest) + 1})
		}
		return want
	}
	next := list
	nodes := b.electable(now)
	useful := b.useful(b.Answering(), list.Voters, nodes, now)
	// If fewer than minVoters nodes can vote, return to the Lease: with two voters, the crash of
	// one would stop all gateways.
	switch off := !b.wanted || min(len(nodes), len(useful)) < minVoters; {
	case off && v.List == list.Version:
		b.Fence()
	case v.List > list.Version: // the fence is complete: a majority of voters has stored a list without voters
		next = voting.List{Version: v.List}
		if !off { // continue to vote, for example because a missing Node was replaced meanwhile
			next.Voters = list.Voters
		}
	case v.List == list.Version && !v.Pending: // while a fence is pending, it may already use the next version
		if chosen := voters(useful, list.Voters, nil); chosen != nil {
			next = step(list, chosen)
		}
	}
	if next.Version == list.Version && holderOf(e.lease) == e.identity && now.Sub(e.written) < retryPeriod {
		return nil
	}
	want = withHolder(e.lease, e.identity, now)
	t := want.Spec.LeaseTransitions
	older := t == nil || *t < transition
	if older {
		want.Spec.LeaseTransitions = &transition
	}
	if older || holderOf(e.lease) != e.identity {
		taken.mark(want)
	}
	withList(want, next)
	return want
}

// electable returns the nodes that may vote: those that have had a route agent within
// maxAgentAbsence. If route agents may run outside of Pods, all nodes may vote.
func (b *ballot) electable(now time.Time) map[string]netip.Addr {
	nodes, agents := b.Nodes(), b.agents()
	if agents == nil {
		return nodes
	}
	if b.agentSeen == nil {
		b.agentSeen = make(map[string]time.Time)
	}
	all := make(map[string]netip.Addr)
	for name, addr := range nodes {
		if (*agents)[name] {
			b.agentSeen[name] = now
		}
		if seen, had := b.agentSeen[name]; had && now.Sub(seen) < maxAgentAbsence {
			all[name] = addr
		}
	}
	maps.DeleteFunc(b.agentSeen, func(name string, _ time.Time) bool { return !nodes[name].IsValid() })
	return all
}

// useful returns the nodes that may vote from now on. It starts with the nodes that answer, and
// adds each voter of the list that has a Node and has been silent for less than maxSilence. It
// modifies and returns the map answering.
func (b *ballot) useful(answering, list, nodes map[string]netip.Addr, now time.Time) map[string]netip.Addr {
	if b.quiet == nil {
		b.quiet = make(map[string]time.Time)
	}
	for name := range list {
		if _, answers := answering[name]; answers {
			delete(b.quiet, name)
			continue
		}
		if b.quiet[name].IsZero() {
			b.quiet[name] = now
		}
		if addr, exists := nodes[name]; exists && now.Sub(b.quiet[name]) < maxSilence {
			answering[name] = addr
		}
	}
	return answering
}

// try makes a trial: while the Lease decides, its holder proposes voters and asks them for votes.
// Once all of them have voted for the holder, try returns their list. By writing that list into the
// Lease, the caller lets votes decide. Until then, try returns the zero List.
func (b *ballot) try(before voting.List, now time.Time) voting.List {
	if !b.wanted {
		return voting.List{}
	}
	v, nodes := b.View(), b.electable(now)
	if b.silent == nil {
		b.silent = make(map[string]bool)
	}
	if !b.tried.IsZero() && now.Sub(b.tried) >= trialTimeout && len(v.Heard) < len(b.trial.Voters) {
		for name := range b.trial.Voters {
			if !slices.Contains(v.Heard, name) {
				b.silent[name] = true
			}
		}
		if len(nodes)-len(b.silent) < minVoters {
			clear(b.silent) // start again with all nodes
		}
		b.tried = now
	}
	chosen := voters(nodes, b.trial.Voters, b.silent)
	if chosen == nil {
		b.trial, b.tried = voting.List{}, time.Time{}
		return voting.List{}
	}
	version := before.Version + 1
	if v.Newest > b.trial.Version { // the nodes rejected the trial's version: an earlier election, which the Lease no longer records, used higher versions
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
