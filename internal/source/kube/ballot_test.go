package kube

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// From any list to any other list, each step changes one voter.
func TestVoterListChangesByOneVoterAtATime(t *testing.T) {
	random := rand.New(rand.NewPCG(26, 11))
	some := func(version byte) map[string]netip.Addr {
		all := make(map[string]netip.Addr)
		for i := range 12 {
			if random.IntN(2) == 0 {
				all[fmt.Sprint("n", i)] = netip.AddrFrom4([4]byte{10, version, 0, byte(i)})
			}
		}
		return all
	}
	for range 1000 {
		have := voting.List{Version: uint64(random.IntN(100)), Voters: some(byte(random.IntN(2)))}
		want := voters(some(0), have.Voters, nil)
		if want == nil {
			continue
		}
		if n := len(want); n%2 == 0 || n < minVoters || n > maxVoters {
			t.Fatalf("%d voters", n)
		}
		for steps := 0; ; steps++ {
			next := step(have, want)
			if next.Version == have.Version {
				break
			}
			differ := 0
			for name := range next.Voters {
				if _, ok := have.Voters[name]; !ok {
					differ++
				}
			}
			for name := range have.Voters {
				if _, ok := next.Voters[name]; !ok {
					differ++
				}
			}
			if differ > 1 || next.Version != have.Version+1 || steps > 40 {
				t.Fatalf("step %d from %v to %v, want %v", steps, have, next, want)
			}
			have = next
		}
		if !maps.Equal(have.Voters, want) {
			t.Fatalf("the steps end with %v; want %v", have.Voters, want)
		}
	}
}

func TestVotersAreKeptWhileTheirNodesExist(t *testing.T) {
	nodes := make(map[string]netip.Addr)
	for i := range 20 {
		nodes[fmt.Sprint("n", i)] = netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
	}
	before := voters(nodes, nil, nil)
	if len(before) != maxVoters {
		t.Fatalf("%d voters", len(before))
	}
	var removed string
	for removed = range before {
		break
	}
	delete(nodes, removed)
	for i := range 100 {
		nodes[fmt.Sprint("later", i)] = netip.AddrFrom4([4]byte{10, 1, 0, byte(i)})
	}
	after := voters(nodes, before, nil)
	for name := range before {
		if _, ok := after[name]; ok != (name != removed) {
			t.Errorf("%s votes: %v", name, ok)
		}
	}
	for n, want := range []int{0, 0, 0, 3, 3, 5, 5, 7, 7, 9, 9} {
		some := make(map[string]netip.Addr)
		for i := range n {
			some[fmt.Sprint("n", i)] = netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
		}
		if got := len(voters(some, nil, nil)); got != want {
			t.Errorf("%d of %d nodes vote; want %d", got, n, want)
		}
	}
}

// Two nodes must never decide alone. So if the third voter is silent for maxSilence, the Lease
// decides again, even if the voter's Node still exists.
func TestALongSilentVoterIsRemoved(t *testing.T) {
	nodes := map[string]netip.Addr{"a": netip.MustParseAddr("10.0.0.1"), "b": netip.MustParseAddr("10.0.0.2"), "c": netip.MustParseAddr("10.0.0.3")}
	answering := func() map[string]netip.Addr {
		all := maps.Clone(nodes)
		delete(all, "c")
		return all
	}
	b, begin := new(ballot), time.Now()
	for _, tc := range []struct {
		after time.Duration
		want  int
	}{{0, 3}, {maxSilence - time.Second, 3}, {maxSilence, 2}} {
		if got := len(b.useful(answering(), nodes, nodes, begin.Add(tc.after))); got != tc.want {
			t.Errorf("after %v %d nodes may vote, want %d", tc.after, got, tc.want)
		}
	}
	if got := len(b.useful(maps.Clone(nodes), nodes, nodes, begin.Add(maxSilence))); got != 3 {
		t.Errorf("it answers again, and %d nodes may vote", got)
	}
}

func TestUnreadableVoterListIsIgnored(t *testing.T) {
	for _, text := range []string{"", "{", "[]", `{"version":-1}`, `{"version":1,"voters":{"n1":"here"}}`} {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{isthmus.AnnotationVoters: text}}}
		if l := listOf(lease); l.Version != 0 || len(l.Voters) > 0 {
			t.Errorf("%s: %v", text, l)
		}
	}
	l := voting.List{Version: 7, Voters: map[string]netip.Addr{"n1": netip.MustParseAddr("10.0.0.1")}}
	var lease coordinationv1.Lease
	if withList(&lease, l); listOf(&lease).Version != 7 || !maps.Equal(listOf(&lease).Voters, l.Voters) {
		t.Errorf("%v comes back as %v", l, listOf(&lease))
	}
}

// fakeVoter is a voter that has heard of a holder.
type fakeVoter struct{ holder voting.Holder }

func (fakeVoter) Set(ed25519.PublicKey)      {}
func (fakeVoter) At(netip.Addr)              {}
func (fakeVoter) Expect(map[netip.Addr]bool) {}
func (h fakeVoter) Holder() voting.Holder    { return h.holder }

// A node follows the newer of two gateways: the gateway that the Service names, or the gateway
// that reported to the node that it has the votes.
func TestNodeUsesTheNewerOfTwoGateways(t *testing.T) {
	key := voting.KeyOf([32]byte{1}).Public().(ed25519.PublicKey)
	gateways := []fabric.GatewayPod{
		{Addr: netip.MustParseAddr("10.244.0.9"), Host: netip.MustParseAddr("172.30.1.11")},
		{Addr: netip.MustParseAddr("10.244.1.9"), Host: netip.MustParseAddr("172.30.1.12")},
	}
	service := func(mark string) []corev1.Service {
		return []corev1.Service{{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			isthmus.AnnotationGateways: "10.244.0.9", v1alpha1.AnnotationGatewayNodeIP: "172.30.1.11", isthmus.AnnotationVotes: mark}}}}
	}
	for _, tc := range []struct {
		name   string
		mark   string
		holder voting.Holder
		want   string
	}{
		{"no votes", "", voting.Holder{Epoch: 9, Addr: gateways[1].Addr}, "10.244.0.9"},
		{"nobody said anything", votesMark{Epoch: 5, Key: key, Voting: true}.String(), voting.Holder{}, "10.244.0.9"},
		{"a newer holder", votesMark{Epoch: 5, Key: key, Voting: true}.String(), voting.Holder{Epoch: 6, Addr: gateways[1].Addr}, "10.244.1.9"},
		{"the Lease decides", votesMark{Epoch: 5, Key: key}.String(), voting.Holder{Epoch: 6, Addr: gateways[1].Addr}, "10.244.0.9"},
		{"the same epoch", votesMark{Epoch: 5, Key: key, Voting: true}.String(), voting.Holder{Epoch: 5, Addr: gateways[1].Addr}, "10.244.0.9"},
		{"an older holder", votesMark{Epoch: 5, Key: key, Voting: true}.String(), voting.Holder{Epoch: 4, Addr: gateways[1].Addr}, "10.244.0.9"},
		{"no Pod of ours", votesMark{Epoch: 5, Key: key, Voting: true}.String(), voting.Holder{Epoch: 6, Addr: netip.MustParseAddr("10.244.2.9")}, "10.244.0.9"},
		{"a mark that nobody can read", `{"epoch":5,"key":"AAAA"}`, voting.Holder{Epoch: 6, Addr: gateways[1].Addr}, "10.244.0.9"},
	} {
		w := &nodeWatch{voter: fakeVoter{tc.holder}}
		if got := w.active(service(tc.mark), gateways); got.String() != tc.want {
			t.Errorf("%s: it follows %v; want %s", tc.name, got, tc.want)
		}
	}
	if mark := (votesMark{Epoch: 1<<31 - 1, Key: key, Voting: true}).String(); len(mark) > 256 || !strings.Contains(mark, `"epoch"`) {
		t.Errorf("%d octets, more than the policy allows: %s", len(mark), mark)
	}
}

// A standby that restarts after a takeover remembers the number of the takeover, but not the
// name of the gateway that took over.
func TestRestartedStandbyLearnsTheActiveGateway(t *testing.T) {
	list := voting.List{Version: 3, Voters: map[string]netip.Addr{"a": netip.MustParseAddr("192.0.2.1")}}
	holder, transitions := "you", int32(11)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseTransitions: &transitions}}
	withList(lease, list)
	candidate := voting.NewCandidate("me", netip.Addr{}, func() [32]byte { return [32]byte{} }, quiet)
	e := &election{identity: "me", log: quiet, changed: newSignal(), leaseChanged: newSignal(), votes: &ballot{Candidate: candidate}}
	e.recall(acquaintance{Transition: transitions, List: list})
	e.reached(nil)
	e.observe(lease, time.Now())
	if e.name != holder {
		t.Errorf("the active gateway is %q; want %q", e.name, holder)
	}
}

// A standby is ready only while enough voters answer it to take over. It reports the silent
// voters.
func TestAStandbyThatHearsTooFewVotersIsNotReady(t *testing.T) {
	list := voting.List{Version: 3, Voters: map[string]netip.Addr{"a": netip.MustParseAddr("192.0.2.1"), "b": netip.MustParseAddr("192.0.2.2"), "c": netip.MustParseAddr("192.0.2.3")}}
	candidate := voting.NewCandidate("me", netip.Addr{}, func() [32]byte { return [32]byte{} }, quiet)
	e := &election{identity: "me", name: "you", list: list, log: quiet, changed: newSignal(), votes: &ballot{Candidate: candidate}}
	now := time.Now()
	if err := e.cannotTakeOver(now); err == nil || !strings.Contains(err.Error(), "of the 3 nodes that vote, a, b, c do not answer it at UDP port 4801, and it needs the votes of 2") {
		t.Errorf("a standby that never heard a voter says %v", err)
	}
	e.hasMajority = true // a majority has answered until now
	e.reevaluate(now)
	if err := e.cannotTakeOver(now.Add(unansweredGrace - 1)); err != nil {
		t.Errorf("shortly after it heard them it says %v", err)
	}
	if e.cannotTakeOver(now.Add(unansweredGrace)) == nil {
		t.Error("it heard them too long ago, and is ready")
	}
	for enough, answering := range map[bool]voting.View{false: {Heard: []string{"b", "stranger"}}, true: {Heard: []string{"b", "c"}}} {
		if got := e.hasMajorityLocked(answering); got != enough {
			t.Errorf("with answers of %v it hears enough: %v", answering.Heard, got)
		}
	}
	e.name = "me"
	if err := e.cannotTakeOver(now.Add(time.Hour)); err != nil {
		t.Errorf("the active gateway says %v", err)
	}
	e.name, e.list = "you", voting.List{}
	if err := e.cannotTakeOver(now.Add(time.Hour)); err != nil {
		t.Errorf("where the Lease decides it says %v", err)
	}
}

// A node votes while it has an agent's Pod, or had one less than maxAgentAbsence ago. So replacing
// the Pod costs no vote.
func TestANodeWithoutAnAgentDoesNotVote(t *testing.T) {
	candidate := voting.NewCandidate("me", netip.Addr{}, func() [32]byte { return [32]byte{} }, quiet)
	nodes := make(map[string]netip.Addr)
	for i, name := range []string{"a", "b", "c", "d"} {
		nodes[name] = netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
	}
	candidate.SetNodes(nodes)
	var agents *map[string]bool
	b := &ballot{Candidate: candidate, agents: func() *map[string]bool { return agents }}
	begin := time.Now()
	for _, tc := range []struct {
		name   string
		after  time.Duration
		agents []string
		want   string
	}{
		{"agents are no Pods", 0, nil, "a b c d"},
		{"one node has none", 0, []string{"a", "b", "c"}, "a b c"},
		{"an agent is replaced", time.Minute, []string{"a", "b", "c"}, "a b c"},
		{"an agent is replaced", time.Minute + maxAgentAbsence - 1, []string{"a", "b"}, "a b c"},
		{"an agent is gone", time.Minute + maxAgentAbsence, []string{"a", "b"}, "a b"},
		{"an agent has come", time.Minute + maxAgentAbsence, []string{"a", "b", "d"}, "a b d"},
	} {
		if tc.agents != nil {
			agents = &map[string]bool{}
			for _, name := range tc.agents {
				(*agents)[name] = true
			}
		}
		if got := strings.Join(slices.Sorted(maps.Keys(b.electable(begin.Add(tc.after)))), " "); got != tc.want {
			t.Errorf("%s: %s may vote; want %s", tc.name, got, tc.want)
		}
	}
}

// The cache must keep the fields of a Pod that identify route agents and their nodes.
func TestNodesWithAgentsAreKnownByTheirPods(t *testing.T) {
	pod := func(namespace, name, node string, labels map[string]string) *corev1.Pod {
		slim, err := slimPod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels}, Spec: corev1.PodSpec{NodeName: node, HostNetwork: true}})
		if err != nil {
			t.Fatal(err)
		}
		return slim.(*corev1.Pod)
	}
	agent := map[string]string{"app.kubernetes.io/name": "route-agent", "pod-template-generation": "1"}
	var p locations
	if _, ok := p.withAgents("isthmus-system"); ok {
		t.Error("agents are Pods, although there is none")
	}
	pending := pod("isthmus-system", "1", "", agent)
	if p.set(nil, pending) || !p.set(pending, pod("isthmus-system", "1", "n1", agent)) {
		t.Error("an agent is news when it has a node")
	}
	p.set(nil, pod("isthmus-system", "2", "n1", agent)) // a second Pod on n1, which replaces the first
	p.set(nil, pod("isthmus-system", "3", "n2", map[string]string{"app.kubernetes.io/name": "manager"}))
	p.set(nil, pod("default", "1", "n3", agent))
	check := func(want ...string) {
		t.Helper()
		nodes, ok := p.withAgents("isthmus-system")
		if got := slices.Sorted(maps.Keys(nodes)); !slices.Equal(got, want) || ok != (len(want) > 0) {
			t.Errorf("agents on %v; want %v", got, want)
		}
	}
	check("n1")
	if !p.set(pod("isthmus-system", "1", "n1", agent), nil) {
		t.Error("an agent that goes is no news")
	}
	check("n1")
	p.set(pod("isthmus-system", "2", "n1", agent), nil)
	check()
}

// noLease is an API server without a Lease. It calls read at each attempt to read the Lease.
type noLease struct {
	coordination.LeaseInterface
	read func()
}

func (l noLease) Get(context.Context, string, metav1.GetOptions) (*coordinationv1.Lease, error) {
	l.read()
	return nil, apierrors.NewNotFound(leaseResource, isthmus.LeaseGateway)
}

// Nodes follow the next gateway as soon as it has the votes. If the first gateway still sent to
// peers then, two gateways would send.
func TestAGatewayYieldsBeforeItReleasesTheVotes(t *testing.T) {
	for _, tc := range []struct {
		voters int
		want   string
	}{{0, "Lease"}, {3, "yield votes Lease"}} {
		var events []string
		event := func(name string) func() { return func() { events = append(events, name) } }
		e := electionWith(noLease{read: event("Lease")}, "me", nil, quiet)
		candidate := voting.NewCandidate("me", netip.Addr{}, func() [32]byte { return [32]byte{1} }, quiet)
		candidate.Listen = func() (net.PacketConn, error) { // opened to announce the release to the voters
			event("votes")()
			return nil, errors.New("no network")
		}
		e.votes, e.list.Voters = &ballot{Candidate: candidate}, make(map[string]netip.Addr)
		for i := range tc.voters {
			e.list.Voters[fmt.Sprint("n", i)] = netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
		}
		g := &Gateway{o: GatewayOptions{Yield: event("yield")}}
		if err := g.release(e); err != nil {
			t.Error(err)
		}
		if got := strings.Join(events, " "); got != tc.want {
			t.Errorf("with %d voters: %s; want %s", tc.voters, got, tc.want)
		}
	}
}

// A standby may give its list a newer version only if its list differs from the nodes' list by
// at most one voter. An older list may share no voter with the list that elects the active
// gateway.
func TestStandbyAdvancesTheVoterListByOneVoterOnly(t *testing.T) {
	all := make(map[string]netip.Addr)
	for i, name := range []string{"a", "b", "c"} {
		all[name] = netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
	}
	list := voting.List{Version: 3, Voters: all}
	answering := []string{"a", "b"}
	for _, tc := range []struct {
		name, holder string
		view         voting.View
		want         uint64 // version of the list that the standby writes; 0: none
		log          string
	}{
		{"the nodes have the list", "", voting.View{Heard: answering, Newest: 3}, 0, ""},
		{"they have an older one", "", voting.View{Heard: answering, Newest: 2}, 0, ""},
		{"the next one, nobody holds the Lease", "", voting.View{Heard: answering, Newest: 4}, 4, ""},
		{"the next one, this standby holds it", "me", voting.View{Heard: answering, Newest: 4}, 4, ""},
		{"the next one, another gateway holds it", "you", voting.View{Heard: answering, Newest: 4}, 0, ""},
		{"two steps, nobody holds the Lease", "", voting.View{Heard: answering, Newest: 5}, 0, `{"version":6}`},
		{"two steps, this standby holds it", "me", voting.View{Heard: answering, Newest: 5}, 0, `{"version":6}`},
		{"many steps", "", voting.View{Heard: answering, Newest: 70}, 0, `{"version":71}`},
		{"many steps, another gateway holds it", "you", voting.View{Heard: answering, Newest: 70}, 0, ""},
	} {
		var log strings.Builder
		candidate := voting.NewCandidate("me", netip.Addr{}, func() [32]byte { return [32]byte{} }, quiet)
		candidate.SetNodes(all)
		e := electionWith(nil, "me", nil, slog.New(slog.NewJSONHandler(&log, nil)))
		e.votes, e.list = &ballot{Candidate: candidate, key: func() {}}, list
		now := time.Now()
		holder := tc.holder
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder}}
		withList(lease, list)
		e.lease, e.firstSeen = lease, now
		for range 2 {
			got := listOf(e.stepVotes(tc.view, now))
			if got.Version != tc.want || tc.want != 0 && !maps.Equal(got.Voters, all) {
				t.Errorf("%s: it writes %v; want version %d", tc.name, got, tc.want)
			}
		}
		if n := strings.Count(log.String(), "\n"); (n == 1) != (tc.log != "") || n > 1 || !strings.Contains(strings.ReplaceAll(log.String(), `\`, ""), tc.log) {
			t.Errorf("%s: it logs %q; want once %q", tc.name, log.String(), tc.log)
		}
	}
}

// If the Lease was restored from an old copy or lost its annotation, a gateway that knows the
// newer list keeps that list. The holder of the votes writes the newer list into the Lease
// again.
func TestVotersAreKeptIfTheLeaseLosesItsAnnotation(t *testing.T) {
	voters := map[string]netip.Addr{"a": netip.MustParseAddr("192.0.2.1"), "b": netip.MustParseAddr("192.0.2.2"), "c": netip.MustParseAddr("192.0.2.3")}
	fewer := map[string]netip.Addr{"a": voters["a"]}
	for _, tc := range []struct {
		name              string
		known, read, want voting.List
	}{
		{"no annotation", voting.List{Version: 5, Voters: voters}, voting.List{}, voting.List{Version: 5, Voters: voters}},
		{"an older list", voting.List{Version: 5, Voters: voters}, voting.List{Version: 4, Voters: fewer}, voting.List{Version: 5, Voters: voters}},
		{"an older end of the votes", voting.List{Version: 5, Voters: voters}, voting.List{Version: 4}, voting.List{Version: 5, Voters: voters}},
		{"the end of the votes", voting.List{Version: 5, Voters: voters}, voting.List{Version: 6}, voting.List{Version: 6}},
		{"a newer list", voting.List{Version: 5, Voters: voters}, voting.List{Version: 7, Voters: fewer}, voting.List{Version: 7, Voters: fewer}},
		{"no annotation while the Lease decides", voting.List{Version: 5}, voting.List{}, voting.List{Version: 5}},
		{"a new beginning", voting.List{Version: 5}, voting.List{Version: 1, Voters: voters}, voting.List{Version: 1, Voters: voters}},
	} {
		candidate := voting.NewCandidate("me", netip.Addr{}, func() [32]byte { return [32]byte{} }, quiet)
		candidate.SetNodes(voters)
		e := electionWith(nil, "me", nil, quiet)
		e.votes, e.list = &ballot{Candidate: candidate, wanted: true, key: func() {}, agents: func() *map[string]bool { return nil }}, tc.known
		holder := "me"
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder}}
		withList(lease, tc.read)
		now := time.Now()
		e.observe(lease, now)
		if e.list.Version != tc.want.Version || !maps.Equal(e.list.Voters, tc.want.Voters) {
			t.Errorf("%s: it counts by %v; want %v", tc.name, e.list, tc.want)
		}
		if !e.byVotes() {
			continue
		}
		written := listOf(e.stepVotes(voting.View{Holds: true, Epoch: 9, List: tc.want.Version, Heard: []string{"a", "b", "c"}}, now))
		if written.Version < tc.want.Version || len(written.Voters) == 0 {
			t.Errorf("%s: the holder of the votes writes %v", tc.name, written)
		}
	}
}

// threeVoters has three voting nodes, at addresses that no other test uses, and the election of
// one gateway, for which the nodes have begun to vote.
type threeVoters struct {
	t        *testing.T
	addrOf   func(last byte) netip.Addr
	nodes    map[string]netip.Addr
	private  [32]byte
	run      func(func(context.Context))
	election *election
	world    *world
}

func newThreeVoters(t *testing.T, subnet byte) *threeVoters {
	s := &threeVoters{t: t, nodes: make(map[string]netip.Addr), private: [32]byte{1},
		addrOf: func(last byte) netip.Addr { return netip.AddrFrom4([4]byte{127, 49, subnet, last}) }}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { stop(); running.Wait() })
	s.run = func(f func(context.Context)) { running.Go(func() { f(ctx) }) }
	for i, name := range []string{"a", "b", "c"} {
		s.nodes[name] = s.addrOf(byte(i + 1))
		v := &voting.Voter{Node: name, Directory: t.TempDir(), Log: quiet}
		v.Set(voting.KeyOf(s.private).Public().(ed25519.PublicKey))
		v.At(s.nodes[name])
		s.run(v.Run)
	}
	s.world = &world{t: t, rng: rand.New(rand.NewPCG(1, 2)), now: links{api: [2]bool{true, true}}, calm: true}
	for i := range s.world.gw {
		s.world.gw[i] = &simGateway{w: s.world, i: i}
	}
	s.election = electionWith(&simLeases{g: s.world.gw[0]}, "me", func() string { return "" }, quiet)
	s.election.votes = &ballot{Candidate: s.candidate("me", s.addrOf(101)), wanted: true,
		key: func() {}, agents: func() *map[string]bool { return nil }}
	s.election.setEligible(true)
	s.until("nodes vote", func() bool {
		s.step()
		return s.election.byVotes()
	})
	return s
}

func (s *threeVoters) candidate(pod string, addr netip.Addr) *voting.Candidate {
	c := voting.NewCandidate(pod, addr, func() [32]byte { return s.private }, quiet)
	c.SetNodes(s.nodes)
	s.run(c.Run)
	return c
}

// startWithList starts another gateway that knows the list l and tries to become active.
func (s *threeVoters) startWithList(l voting.List) *voting.Candidate {
	c := s.candidate("late", s.addrOf(102))
	c.Learn(l, false)
	c.Allow(true, false, true)
	return c
}

func (s *threeVoters) step() {
	s.election.step(s.t.Context())
	s.election.reevaluate(time.Now())
}

func (s *threeVoters) until(what string, done func() bool) {
	s.t.Helper()
	for begin := time.Now(); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > 30*time.Second {
			s.t.Fatalf("%s: not within 30 s", what)
		}
	}
}

// When votes are switched off, the Lease decides only after a majority of the nodes has stored
// that they elect no gateway. So another gateway that has missed the change and requests votes
// with the former list gets no majority.
func TestLeaseDecidesOnlyAfterNodesElectNoGateway(t *testing.T) {
	s := newThreeVoters(t, 0)
	e, previous := s.election, s.election.newestList()
	e.votes.wanted = false
	s.until("the Lease decides", func() bool {
		s.step()
		return !e.byVotes()
	})
	if !e.active() {
		t.Error("the gateway that switches is no longer active")
	}
	if l := listOf(s.world.lease); l.Version <= previous.Version || len(l.Voters) > 0 {
		t.Errorf("after the list %v the Lease has %v", previous, l)
	}

	late := s.startWithList(previous)
	s.until("the gateway that has missed it claims votes", func() bool { return late.View().Epoch != 0 })
	s.until("its claim ends", func() bool {
		if late.Gate.Open() {
			t.Fatal("nodes have elected it, while the Lease names another one")
		}
		return late.View().Epoch == 0
	})
}

// If a Node is missing for a moment, for example while it is replaced, the gateway begins to
// switch votes off. Once the Node is back, the Lease must have a list with which nodes elect
// the next gateway.
func TestNodesElectAgainAfterAMissingNodeReturns(t *testing.T) {
	s := newThreeVoters(t, 1)
	e, previous := s.election, s.election.newestList()
	two := maps.Clone(s.nodes)
	delete(two, "c")
	e.votes.SetNodes(two)
	s.step()
	s.until("nodes have stored another version", func() bool { return e.votes.View().List > previous.Version })
	e.votes.SetNodes(s.nodes)
	s.step()
	l := listOf(s.world.lease)
	if !e.active() || !maps.Equal(l.Voters, previous.Voters) {
		t.Fatalf("active: %v; after the list %v the Lease has %v", e.active(), previous, l)
	}

	late := s.startWithList(l)
	e.votes.Release()
	s.until("nodes elect another gateway", func() bool { return late.View().Holds })
}

// A pending fence may already use the version of the next list, so no other list may be
// proposed.
func TestNoVoterListIsProposedWhileAFenceIsPending(t *testing.T) {
	s := newThreeVoters(t, 2)
	moved := maps.Clone(s.nodes)
	moved["a"] = s.addrOf(50)
	s.election.votes.SetNodes(moved)
	for _, pending := range []bool{true, false} {
		v := s.election.votes.View()
		v.Pending = pending
		lease := s.election.stepVotes(v, time.Now())
		if changes := lease != nil && listOf(lease).Version != v.List; changes == pending {
			t.Errorf("pending: %v; the list changes: %v", pending, changes)
		}
	}
}

// A gateway that fell silent and becomes active again reports the reason for that, and not the
// reason of its first election.
func TestGatewayReportsWhyItBecameActiveAgain(t *testing.T) {
	e := electionWith(new(storedLease), "me", nil, quiet)
	e.votes = &ballot{}
	e.list = voting.List{Version: 1, Voters: map[string]netip.Addr{"a": {}, "b": {}, "c": {}}}
	e.name, e.transition = "you", 1
	begin := time.Now()
	for i, step := range []struct {
		view  voting.View
		sends bool
		want  isthmus.Takeover
	}{
		{voting.View{Holds: true, Epoch: 2, Released: true}, true, isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverReleased, Previous: "you"}},
		{voting.View{Holds: true, Epoch: 3, Released: true}, true, isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverReleased, Previous: "you"}}, // elected again without having been inactive
		{voting.View{}, false, isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverReleased, Previous: "you"}},
		{voting.View{Holds: true, Epoch: 4, Released: true}, true, isthmus.Takeover{Pod: "me", Reason: isthmus.TakeoverNotHeard, Previous: "me"}},
	} {
		e.sending = e.sending && step.view.Holds
		e.reevaluateVotesLocked(step.view, begin.Add(time.Duration(i)*time.Second))
		if m, active := e.mandate(); active != step.sends || m.Takeover != step.want {
			t.Errorf("step %d: active: %v, %+v; want %v, %+v", i, active, m.Takeover, step.sends, step.want)
		}
	}
	if m, _ := e.mandate(); m.Epoch != 4 || !m.Since.Equal(begin.Add(3*time.Second)) {
		t.Errorf("epoch %d, since %v", m.Epoch, m.Since)
	}
}
