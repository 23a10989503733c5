package voting

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/mandate"
)

// An electorate is a set of voting nodes, at loopback addresses that no other test uses.
type electorate struct {
	t     *testing.T
	list  List
	votes map[string]*Voter
	stop  map[string]func()
}

var private = [32]byte{1}

func newElectorate(t *testing.T, third byte, n int) *electorate {
	t.Helper()
	e := &electorate{t, List{Version: 1, Voters: make(map[string]netip.Addr)}, make(map[string]*Voter), make(map[string]func())}
	for i := range n {
		name := fmt.Sprintf("n%d", i+1)
		e.list.Voters[name] = netip.AddrFrom4([4]byte{127, 48, third, byte(i + 1)})
		e.start(name, t.TempDir())
	}
	return e
}

func (e *electorate) start(name, directory string) {
	e.t.Helper()
	v := &Voter{Node: name, Directory: directory, Log: slog.New(slog.NewTextHandler(e.t.Output(), nil))}
	v.Set(KeyOf(private).Public().(ed25519.PublicKey))
	v.At(e.list.Voters[name])
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { v.Run(ctx) })
	stop := sync.OnceFunc(func() { cancel(); group.Wait() })
	e.votes[name], e.stop[name] = v, stop
	e.t.Cleanup(stop)
}

// candidate starts a candidate at an address of its own. Until there is a mandate by votes,
// voters without a promise vote only for a gateway with a mandate by the Lease (lease).
func (e *electorate) candidate(pod string, last byte, lease bool) (c *Candidate, kill func()) {
	e.t.Helper()
	return e.stranger(pod, last, lease, private)
}

func (e *electorate) stranger(pod string, last byte, lease bool, private [32]byte) (c *Candidate, kill func()) {
	e.t.Helper()
	addr := e.list.Voters["n1"].As4()
	addr[3] = last
	c = NewCandidate(pod, netip.AddrFrom4(addr), func() [32]byte { return private }, slog.New(slog.NewTextHandler(e.t.Output(), nil)))
	c.Learn(e.list, false)
	c.SetNodes(e.list.Voters)
	c.Allow(true, lease, true)
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { c.Run(ctx) })
	kill = sync.OnceFunc(func() { cancel(); group.Wait() })
	e.t.Cleanup(kill)
	return c, kill
}

// within waits for a condition that a busy machine may delay. It returns the time that this
// took.
func within(t *testing.T, what string, ok func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	for !ok() {
		if time.Since(begin) > 30*time.Second {
			t.Fatalf("%s: not within 30 s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(begin)
}

func TestNodesVoteForOneGatewayAtATime(t *testing.T) {
	e := newElectorate(t, 1, 3)
	first, kill := e.candidate("gateway-1", 101, true)
	within(t, "the first mandate", first.Gate.Open)
	first.Allow(true, false, true)
	second, _ := e.candidate("gateway-2", 102, false)
	within(t, "the second to hear of the first", func() bool { return second.View().Holder == "gateway-1" })
	for range 100 {
		if first.Gate.Open() && second.Gate.Open() {
			t.Fatal("two gates are open")
		}
		time.Sleep(10 * time.Millisecond)
	}
	kill()
	t.Logf("the second has the mandate after %v", within(t, "the second mandate", second.Gate.Open))
	if first.Gate.Open() {
		t.Error("two gates are open")
	}
	within(t, "the nodes to follow", func() bool {
		for _, v := range e.votes {
			if v.Holder().Pod != "gateway-2" {
				return false
			}
		}
		return true
	})
	third, _ := e.candidate("gateway-3", 103, false)
	second.Release()
	t.Logf("the third has the mandate after %v", within(t, "the third mandate", third.Gate.Open))
}

func TestGatewayKeepsItsMandateWhileVotersAreReplaced(t *testing.T) {
	e := newElectorate(t, 2, 3)
	c, _ := e.candidate("gateway-1", 101, true)
	within(t, "a mandate", c.Gate.Open)
	for name, v := range e.votes {
		e.stop[name]()
		if !c.Gate.Open() {
			t.Fatal("an agent that ends silences the gateway")
		}
		e.start(name, v.Directory)
	}
	end := time.Now().Add(2 * time.Second)
	for time.Now().Before(end) {
		if !c.Gate.Open() {
			t.Fatal("agents that were replaced silence the gateway")
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestOnlyGatewaysWithTheKeyGetVotes(t *testing.T) {
	e := newElectorate(t, 3, 1)
	v := e.votes["n1"]
	within(t, "the voter", func() bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return v.changed != nil
	})
	stranger, _ := e.stranger("stranger", 101, true, [32]byte{2})
	conn, err := net.Dial("udp", netip.AddrPortFrom(e.list.Voters["n1"], Port).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 1000 {
		_, _ = conn.Write([]byte("IVQ\x01 and more"))
	}
	time.Sleep(time.Second)
	if stranger.Gate.Open() || v.Holder() != (Holder{}) {
		t.Errorf("a stranger has a mandate; the node follows %v", v.Holder())
	}
	c, _ := e.candidate("gateway-1", 102, true)
	within(t, "a mandate", c.Gate.Open)
}

// Datagrams from unknown addresses are dropped unread.
func TestVoterDoesNotReadAFloodFromUnknownAddresses(t *testing.T) {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	v := &Voter{Node: "n1", Directory: t.TempDir(), Listen: func(netip.Addr) (net.PacketConn, error) { return conn, nil },
		Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	v.At(netip.MustParseAddr("127.0.0.1"))
	v.Set(KeyOf([32]byte{1}).Public().(ed25519.PublicKey))
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { v.Run(ctx) })
	defer running.Wait()
	defer stop()
	stranger, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 9)}, conn.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	sent := uint64(0)
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Microsecond) {
		for range 20 {
			if _, err := stranger.Write([]byte("IVQ\x01 and more")); err == nil {
				sent++
			}
		}
	}
	within(t, "all to be counted", func() bool { read, unread := v.Refused(); return read+unread == sent })
	if read, _ := v.Refused(); read > sent/4 {
		t.Errorf("%d of %d datagrams of a stranger were read", read, sent)
	}
}

// A gateway that waits for the vote is notified of the release at once. It need not send another
// ask first.
func TestWaitingGatewayIsNotifiedOfARelease(t *testing.T) {
	key := KeyOf(private)
	v := &Voter{Node: "n1", Directory: t.TempDir(), Log: slog.New(slog.DiscardHandler)}
	v.Set(key.Public().(ed25519.PublicKey))
	if err := v.start(); err != nil {
		t.Fatal(err)
	}
	gateway := func(pod string) *net.UDPAddr { return &net.UDPAddr{IP: net.IPv4(127, 0, 0, pod[0]), Port: 1} }
	incarnation := uint64(0)
	say := func(kind mandate.Kind, pod string, sent mandate.Time, holds bool) (answers map[string]answer) {
		answers = make(map[string]answer)
		a := mandate.Ask{Kind: kind, From: mandate.ID(pod), Epoch: 1, Sent: sent, Nonce: uint64(pod[0]), Heard: incarnation, Holds: holds}
		v.receive(ask{a, cookie{pod[0]}, netip.AddrFrom4([4]byte{127, 0, 0, pod[0]})}.seal(key), gateway(pod), func(b []byte, to net.Addr) {
			got, ok := openAnswer(b)
			if !ok {
				t.Fatalf("%x is no answer", b)
			}
			answers[to.String()] = got
			incarnation = got.Incarnation
		})
		return answers
	}
	a, b := gateway("a").String(), gateway("b").String()
	say(mandate.Probe, "a", 1, true)
	if got := say(mandate.Claim, "a", 2, true); !got[a].Granted {
		t.Fatalf("the claim is not granted: %v", got)
	}
	if got := say(mandate.Probe, "b", 3, false); len(got) != 1 || got[b].Free == 0 {
		t.Fatalf("a waiting gateway is answered %v", got)
	}
	if got := say(mandate.Release, "a", 4, false); len(got) != 2 || got[b].Free != 0 || got[b].Sent != 3 || got[b].cookie != (cookie{'b'}) {
		t.Errorf("a release is answered %v", got)
	}
	if got := say(mandate.Release, "a", 5, false); len(got) != 1 {
		t.Errorf("the second release is answered %v", got)
	}
}

// A voter must never send a promise that the next voter on the node would not find.
func TestAVoterSendsOnlyStoredPromises(t *testing.T) {
	key, directory := KeyOf(private), filepath.Join(t.TempDir(), "state")
	v := &Voter{Node: "n1", Directory: directory, Log: slog.New(slog.DiscardHandler)}
	v.Set(key.Public().(ed25519.PublicKey))
	if err := v.start(); err != nil {
		t.Fatal(err)
	}
	incarnation := uint64(0)
	say := func(kind mandate.Kind, list uint64, sent mandate.Time) (got *mandate.Promise) {
		a := mandate.Ask{Kind: kind, From: "a", Epoch: 1, List: list, Sent: sent, Nonce: 1, Heard: incarnation, Holds: true}
		v.receive(ask{a, cookie{1}, netip.MustParseAddr("127.0.0.1")}.seal(key), &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}, func(b []byte, _ net.Addr) {
			r, ok := openAnswer(b)
			if !ok {
				t.Fatalf("%x is no answer", b)
			}
			got, incarnation = &r.Promise, r.Incarnation
		})
		return got
	}
	say(mandate.Probe, 1, 1)
	if got := say(mandate.Claim, 1, 2); got == nil || got.List != 1 {
		t.Fatalf("the first claim is answered with %v", got)
	}
	away := directory + " away"
	if err := os.Rename(directory, away); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(directory, nil, 0o600); err != nil { // a file in place of the directory makes writing fail
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		kind mandate.Kind
		sent mandate.Time
	}{{"a claim", mandate.Claim, 3}, {"its copy", mandate.Claim, 3}, {"a probe", mandate.Probe, 4}} {
		if got := say(tc.kind, 2, tc.sent); got != nil {
			t.Errorf("%s is answered with %v, which is not stored", tc.name, *got)
		}
		if v.Err() == nil {
			t.Errorf("%s: the node does not report that it cannot vote", tc.name)
		}
	}
	if err := errors.Join(os.Remove(directory), os.Rename(away, directory)); err != nil {
		t.Fatal(err)
	}
	if got := say(mandate.Probe, 2, 5); got == nil || got.List != 2 || v.Err() != nil {
		t.Errorf("when it can store again, a probe is answered with %v, %v", got, v.Err())
	}
	next := &Voter{Node: "n1", Directory: directory, Log: v.Log}
	if err := next.start(); err != nil || next.stored.Promise.List != 2 {
		t.Errorf("the next voter has the promise %v, %v", next.stored.Promise, err)
	}
}

func TestNodeThatCannotVoteReportsWhy(t *testing.T) {
	e := newElectorate(t, 4, 1)
	v := e.votes["n1"]
	c, _ := e.candidate("gateway-1", 101, true)
	within(t, "a mandate", c.Gate.Open)
	if err := v.Err(); err != nil {
		t.Errorf("a node that votes says %v", err)
	}
	e.stop["n1"]()
	if err := os.WriteFile(filepath.Join(v.Directory, promiseName), []byte("no promise"), 0o600); err != nil {
		t.Fatal(err)
	}
	e.start("n1", v.Directory)
	v = e.votes["n1"]
	within(t, "a reason", func() bool { return v.Err() != nil })
	v.Set(nil)
	if err := v.Err(); err != nil {
		t.Errorf("where nodes do not vote it says %v", err)
	}
}

// A gateway that gets a majority announces it at once, not with its next beat, because nodes
// follow the gateway only from then on.
func TestGatewayAnnouncesItsMajorityBeforeTheNextBeat(t *testing.T) {
	v := &Voter{Node: "n1", Directory: t.TempDir(), Log: slog.New(slog.DiscardHandler)}
	key, at := KeyOf(private), &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: Port}
	v.Set(key.Public().(ed25519.PublicKey))
	if err := v.start(); err != nil {
		t.Fatal(err)
	}
	before := mandate.Ask{Kind: mandate.Claim, From: "gateway-0", Epoch: 1, Nonce: 1, Holds: true}
	before.Heard, before.Sent = v.machine.Receive(mandate.Ask{From: "gateway-0"}, now()).Incarnation, 1
	if !v.machine.Receive(before, now()).Granted {
		t.Fatal("the gateway before has no vote")
	}
	before.Kind = mandate.Release
	v.machine.Receive(before, now())
	c := NewCandidate("gateway-1", netip.MustParseAddr("127.0.0.2"), func() [32]byte { return private }, slog.New(slog.DiscardHandler))
	c.Learn(List{Version: 1, Voters: map[string]netip.Addr{"n1": netip.MustParseAddr("127.0.0.1")}}, false)
	c.Allow(true, false, true)
	beats := 0
	for len(c.soon) > 0 || beats == 0 { // Run does the same
		if beats > 0 {
			<-c.soon
		}
		if beats++; beats > 10 {
			t.Fatal("it does not stop to speak")
		}
		for _, m := range c.messages(clock(), key) {
			v.receive(m.text, at, func(b []byte, _ net.Addr) {
				if a, ok := openAnswer(b); ok {
					c.receive(a, at)
				}
			})
		}
	}
	if h := v.Holder(); !c.Gate.Open() || h.Pod != "gateway-1" || h.Epoch != c.View().Epoch {
		t.Errorf("after %d beats without a pause the node follows %+v; gate open: %v, %+v", beats, h, c.Gate.Open(), c.View())
	}
}
