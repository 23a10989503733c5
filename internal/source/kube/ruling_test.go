package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"

	"github.com/isthmus-net/isthmus/internal/keyring"
)

func TestDecideReturnsWhetherAGatewayMaySend(t *testing.T) {
	holder := func(confirmed bool, others ...account) view {
		return view{leaseState: leaseState{holds: true, confirmed: confirmed, transition: 5}, others: others}
	}
	standby := func(wait time.Duration, others ...account) view {
		return view{leaseState: leaseState{transition: 5}, wait: wait, others: others}
	}
	other := func(holds, confirmed bool, transition int32, age, defers time.Duration) account {
		return account{leaseState: leaseState{holds: holds, confirmed: confirmed, transition: transition}, pod: "b", age: age, defers: defers}
	}
	silent := func(mute, promised time.Duration) account {
		return account{leaseState: leaseState{holds: true, transition: 5, silent: true}, pod: "b", age: time.Second, mute: mute, promised: promised}
	}
	const ms, s = time.Millisecond, time.Second
	for _, tc := range []struct {
		name string
		view view
		want ruling
	}{
		{"the holder renews the Lease", holder(true), ruling{maySend: true}},
		{"... though the standby is silent", holder(true, other(false, false, 5, time.Hour, 0)), ruling{maySend: true}},
		{"... and another one remembers an older Lease", holder(true, other(true, false, 4, 0, 0)), ruling{maySend: true}},
		{"the holder renews nothing, and never had a standby", holder(false), ruling{maySend: true}},
		{"... but its standby defers", holder(false, other(false, false, 5, 100*ms, 3900*ms)), ruling{maySend: true}},
		{"... whose promise ends", holder(false, other(false, false, 5, 2900*ms, 3900*ms)), ruling{unanswered: "b"}},
		{"... and its standby answers that it may take the Lease", holder(false, other(false, false, 5, 0, 0)), ruling{unanswered: "b"}},
		{"... and one of two standbys is silent", holder(false, other(false, false, 5, 0, 4*s), other(false, false, 5, time.Hour, 4*s)), ruling{unanswered: "b"}},
		{"another one has taken over", holder(false, other(true, true, 6, 0, 0)), ruling{lost: true, successor: "b"}},
		{"... which the holder has not read yet", holder(true, other(true, true, 6, 0, 0)), ruling{lost: true, successor: "b"}},
		{"... as a third one knows", holder(false, other(false, false, 6, 0, 0)), ruling{lost: true}},
		{"... by an answer of long ago", holder(true, other(true, true, 6, 5*s, 0)), ruling{maySend: true}},
		{"the Lease was deleted, and another one can write it", holder(false, other(true, true, 1, 0, 0)), ruling{lost: true, successor: "b"}},
		{"... but not this one's", holder(true, other(true, false, 1, 0, 0)), ruling{maySend: true}},

		{"the Lease is another's", standby(5 * s), ruling{wait: 5 * s}},
		{"... which answers", standby(5*s, other(true, true, 5, 0, 0)), ruling{wait: 5 * s, deferring: true}},
		{"it has expired", standby(0), ruling{}},
		{"... but its holder answers", standby(0, other(true, false, 5, s, 0)), ruling{wait: 3 * s, deferring: true}},
		{"... did so too long ago", standby(0, other(true, false, 5, 4*s, 0)), ruling{}},
		{"... or is of before a takeover", standby(0, other(true, false, 4, s, 0)), ruling{}},
		{"... answers that it is silent", view{leaseState: leaseState{transition: 5}, reads: true, others: []account{silent(3*s, 2*s)}}, ruling{wait: 3 * s}},
		{"... for long", view{leaseState: leaseState{transition: 5}, reads: true, others: []account{silent(4*s, 2*s)}}, ruling{wait: 2 * s}},
		{"... and was promised nothing", view{leaseState: leaseState{transition: 5}, reads: true, others: []account{silent(4*s, -s)}}, ruling{}},
		{"... and the API server does not answer", standby(0, silent(time.Hour, 2*s)), ruling{wait: 3 * s}},
		{"... has just been promised the Lease, and does not hold it any more", standby(0, account{promised: 2 * s}), ruling{wait: 2 * s}},
		{"... another standby answers", standby(0, other(false, false, 5, s, 0)), ruling{}},
		{"the Lease was freed by its holder", view{leaseState: leaseState{transition: 5}, free: true, others: []account{other(true, true, 5, 0, 0)}}, ruling{}},
	} {
		if got := decide(tc.view); got != tc.want {
			t.Errorf("%s: %+v, want %+v", tc.name, got, tc.want)
		}
	}
}

func TestOnlyAnswersToOurQuestionsAreTrusted(t *testing.T) {
	key := questionKey(keyring.New())
	a := electionWith(nil, "a", nil, quiet)
	b := electionWith(nil, "b", nil, quiet)
	a.addListed("b", netip.MustParseAddr("10.0.0.2"), false)
	b.addListed("a", netip.MustParseAddr("10.0.0.1"), false)
	now := time.Now()
	nextQuestion := func() message {
		q := a.questions(now)
		if len(q) != 1 {
			t.Fatalf("%d questions", len(q))
		}
		return message{kind: kindQuestion, nonce: q[0].nonce, from: a.id, to: q[0].id}
	}
	question := nextQuestion()
	answer := b.answer(question, now)
	sealed := answer.seal(key)
	if len(sealed) != len(question.seal(key)) {
		t.Error("an answer is longer than its question")
	}
	if m, refused := openMessage(sealed, key); m != answer || refused != "" {
		t.Errorf("opened %+v, %s; want %+v", m, refused, answer)
	}
	for i := range sealed { // the tag covers every octet
		sealed[i] ^= 1
		if _, refused := openMessage(sealed, key); refused == "" {
			t.Errorf("believed with octet %d changed", i)
		}
		sealed[i] ^= 1
	}
	if _, refused := openMessage(sealed, questionKey(keyring.New())); refused != refusedTag {
		t.Errorf("another key: %q", refused)
	}
	for _, b := range [][]byte{nil, sealed[:len(sealed)-1], append(sealed[:len(sealed):len(sealed)], 0)} {
		if _, refused := openMessage(b, key); refused != refusedForm {
			t.Errorf("%d octets: %q", len(b), refused)
		}
	}
	if _, ok := a.standbys(now); !ok {
		t.Error("the other one is not known")
	}
	stranger := answer
	stranger.from = idOf("c")
	unasked := answer
	unasked.nonce[0] ^= 1
	for i, tc := range []struct {
		m    message
		want bool
	}{{stranger, false}, {unasked, false}, {answer, true}, {answer, false}} {
		if got := a.handleAnswer(tc.m, now); got != tc.want {
			t.Errorf("answer %d: %v", i, got)
		}
	}
	if n, _ := a.standbys(now); n != 1 {
		t.Errorf("%d standbys", n)
	}
	late := b.answer(nextQuestion(), now)
	now = now.Add(deferFor)
	a.questions(now)
	if a.handleAnswer(late, now) {
		t.Error("an answer is believed for ever")
	}
	if n, ok := a.standbys(now); n != 0 || !ok {
		t.Errorf("%d standbys, %v, after a silence", n, ok)
	}
}

// world simulates an API server, two gateways and the connections between them, in the time of
// a synctest bubble.
type world struct {
	t     *testing.T
	rng   *rand.Rand
	key   [32]byte
	mu    sync.Mutex
	now   links
	lease *coordinationv1.Lease // the stored Lease
	rv    int
	gw    [2]*simGateway
	hung  bool // a request over a cut connection gets no answer; otherwise it is refused
	calm  bool // no request is slow, and no datagram or answer is lost
}

// links are the connections that work.
type links struct {
	api [2]bool // whether each gateway reaches the API server
	to  [2]bool // whether each gateway receives from the other one
}

func (l links) String() string {
	var b strings.Builder
	for i := range 2 {
		fmt.Fprintf(&b, "%c: api %v, hears %v; ", 'a'+i, l.api[i], l.to[i])
	}
	return b.String()
}

func (l links) joined() bool { return l.to[0] && l.to[1] }

type simGateway struct {
	w     *world
	i     int
	life  int          // number of earlier Pods of this gateway; written with w.mu held
	known acquaintance // content of the gateway's state directory
	held  bool         // the gateway was the holder when it last stopped
	waits bool         // the gateway waits for the API server before it takes part
	join  func()       // makes the gateway take part
	stop  func()

	mu    sync.Mutex
	e     *election // nil: the process does not run
	inbox chan datagram
}

type datagram struct {
	from net.Addr
	b    []byte
}

func (g *simGateway) pod() string {
	return string(rune('a'+g.i)) + strings.Repeat("'", g.life)
}

func (g *simGateway) addr() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(g.life), byte(g.i + 1)}), QuestionPort)
}

// list makes the gateway read the Pods.
func (g *simGateway) list() {
	other := g.w.gw[1-g.i]
	g.e.mu.Lock()
	for id, o := range g.e.others {
		if o.listed && o.pod != other.pod() {
			delete(g.e.others, id)
		}
	}
	g.e.mu.Unlock()
	g.e.addListed(other.pod(), other.addr().Addr(), false)
}

// knows reports whether the gateway asks the other gateway and no others.
func (g *simGateway) knows() bool {
	g.e.mu.Lock()
	defer g.e.mu.Unlock()
	return len(g.e.others) == 1 && g.e.others[idOf(g.w.gw[1-g.i].pod())] != nil
}

// start starts the process. Without an API server a standby waits, and the last holder
// continues with its saved state.
func (g *simGateway) start() {
	g.w.mu.Lock()
	api := g.w.now.api[g.i]
	g.w.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	cached := func() string {
		g.w.mu.Lock()
		defer g.w.mu.Unlock()
		return holderOf(g.w.lease)
	}
	e := electionWith(&simLeases{g: g}, g.pod(), cached, quiet)
	known := g.known
	e.recall(known)
	g.e, g.inbox = e, make(chan datagram, 100)
	if api {
		g.list()
		e.dropUnlisted()
	}
	conn := &simConn{g: g, addr: net.UDPAddrFromAddrPort(g.addr()), inbox: g.inbox, closed: make(chan struct{})}
	q := &questioner{election: e, private: func() [32]byte { return g.w.key }, refused: func(string, uint32) {}, log: quiet,
		listen: func() (net.PacketConn, error) { return conn, nil }}
	ctx, cancel := context.WithCancel(g.w.t.Context())
	var running sync.WaitGroup
	running.Go(func() { q.run(ctx) })
	g.join, g.waits = func() { running.Go(func() { e.run(ctx) }) }, false
	switch {
	case api:
		g.join()
	case g.held:
		running.Go(func() {
			select {
			case <-ctx.Done():
				return
			case <-time.After(2 * time.Second): // await waits as long
			}
			if !e.superseded(known, time.Now()) {
				e.resume(known)
			}
			e.run(ctx)
		})
	default:
		g.waits = true
	}
	g.stop = func() {
		cancel()
		running.Wait()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.known, g.held = e.acquaintance(), e.holds()
		g.e = nil
	}
}

// unsure reports whether a request that makes this gateway the holder is pending or was lost.
func (e *election) unsure() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.taking
}

func (g *simGateway) sends() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.e != nil && g.e.active()
}

type simLeases struct {
	coordination.LeaseInterface
	g *simGateway
}

var leaseResource = schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}

// lockIfReachable returns nil, with w.mu held, if the gateway reaches the API server. Otherwise it
// returns an error without w.mu held.
func (l *simLeases) lockIfReachable() error {
	w := l.g.w
	w.mu.Lock()
	delay := time.Duration(w.rng.IntN(30)) * time.Millisecond
	if w.rng.IntN(10) == 0 && !w.calm { // a slow request
		delay = time.Duration(w.rng.Int64N(int64(leaseTimeout)))
	}
	w.mu.Unlock()
	time.Sleep(delay)
	w.mu.Lock()
	if w.now.api[l.g.i] {
		return nil
	}
	hung := w.hung
	w.mu.Unlock()
	if hung {
		time.Sleep(leaseTimeout)
	}
	return errors.New("no way to the API server")
}

func (l *simLeases) Get(context.Context, string, metav1.GetOptions) (*coordinationv1.Lease, error) {
	if err := l.lockIfReachable(); err != nil {
		return nil, err
	}
	defer l.g.w.mu.Unlock()
	if l.g.w.lease == nil {
		return nil, apierrors.NewNotFound(leaseResource, "isthmus-gateway")
	}
	return l.g.w.lease.DeepCopy(), nil
}

func (l *simLeases) Create(_ context.Context, lease *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error) {
	if err := l.lockIfReachable(); err != nil {
		return nil, err
	}
	if l.g.w.lease != nil {
		l.g.w.mu.Unlock()
		return nil, apierrors.NewAlreadyExists(leaseResource, lease.Name)
	}
	return l.store(lease)
}

func (l *simLeases) Update(_ context.Context, lease *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	if err := l.lockIfReachable(); err != nil {
		return nil, err
	}
	if l.g.w.lease == nil || l.g.w.lease.ResourceVersion != lease.ResourceVersion {
		l.g.w.mu.Unlock()
		return nil, apierrors.NewConflict(leaseResource, lease.Name, errors.New("changed"))
	}
	return l.store(lease)
}

// store stores a Lease and notifies the gateways that watch it. The caller holds w.mu, and
// store releases it. Sometimes the response is lost.
func (l *simLeases) store(lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	w := l.g.w
	w.rv++
	w.lease = lease.DeepCopy()
	w.lease.ResourceVersion = fmt.Sprint(w.rv)
	result, lost, now := w.lease.DeepCopy(), w.rng.IntN(20) == 0 && !w.calm, w.now
	w.mu.Unlock()
	for i, g := range w.gw {
		if g.mu.Lock(); g.e != nil && now.api[i] {
			g.e.leaseChanged.set()
		}
		g.mu.Unlock()
	}
	if lost {
		return nil, errors.New("the connection ended")
	}
	return result, nil
}

// simConn is the socket of a gateway.
type simConn struct {
	net.PacketConn
	g      *simGateway
	addr   net.Addr
	inbox  chan datagram
	once   sync.Once
	closed chan struct{}
}

func (c *simConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

func (c *simConn) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case <-c.closed:
		return 0, nil, net.ErrClosed
	case m := <-c.inbox:
		return copy(b, m.b), m.from, nil
	}
}

func (c *simConn) WriteTo(b []byte, to net.Addr) (int, error) {
	w, peer := c.g.w, c.g.w.gw[1-c.g.i]
	w.mu.Lock()
	defer w.mu.Unlock()
	at := to.(*net.UDPAddr).AddrPort()
	if a := at.Addr().As4(); at.Port() != QuestionPort || int(a[3]) != peer.i+1 || int(a[2]) > peer.life {
		w.t.Errorf("sent to %v", to)
	}
	copies := []int{0, 1, 1, 1, 1, 1, 1, 1, 1, 2}[w.rng.IntN(10)] // lost, delivered, or duplicated
	if w.calm {
		copies = 1
	}
	if !w.now.to[peer.i] || at != peer.addr() {
		copies = 0
	}
	for range copies {
		delay := time.Duration(w.rng.IntN(100)) * time.Millisecond
		time.AfterFunc(delay, func() {
			peer.mu.Lock()
			defer peer.mu.Unlock()
			if peer.e != nil {
				select {
				case peer.inbox <- datagram{c.addr, append([]byte(nil), b...)}:
				default:
				}
			}
		})
	}
	return len(b), nil
}

// phase is a period with the same state of processes and connections.
type phase struct {
	links
	lasts   time.Duration
	hung    bool
	restart [2]bool // whose process restarts at the beginning
	replace [2]bool // whose Pod is replaced at the beginning
	dead    [2]bool // whose process does not run
}

func (p phase) String() string {
	return fmt.Sprintf("%v hung %v, restarted %v, replaced %v, dead %v, %v", p.links, p.hung, p.restart, p.replace, p.dead, p.lasts)
}

// settleTime is the maximum time from a change until some gateway sends to peers again: the time in
// which the Lease and then a promise expire, and two attempts to reach the API server.
const settleTime = leaseDuration + deferFor + 2*(retryPeriod+leaseTimeout)

// play runs the phases. Every 50 ms it checks that at most one gateway may send to peers, and
// that no gateway that could send is silent for long.
func play(t *testing.T, seed uint64, phases []phase) {
	const look = 50 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 1)), key: keyring.New()}
		all := links{[2]bool{true, true}, [2]bool{true, true}}
		for i := range w.gw {
			w.gw[i] = &simGateway{w: w, i: i}
		}
		defer func() {
			for _, g := range w.gw {
				if g.e != nil {
					g.stop()
				}
			}
			time.Sleep(time.Second) // let pending requests end
		}()
		phases = append([]phase{{links: all, lasts: 30 * time.Second}}, phases...)
		phases = append(phases, phase{links: all, lasts: 30 * time.Second})
		failed := func(n int, after time.Duration, why string) {
			var text strings.Builder
			for i, p := range phases[:n+1] {
				fmt.Fprintf(&text, "\n%d: %v", i, p)
			}
			t.Fatalf("seed %d, phase %d, after %v: %s%s", seed, n, after, why, text.String())
		}
		for n, p := range phases {
			w.mu.Lock()
			w.now, w.hung = p.links, p.hung
			w.mu.Unlock()
			for i, g := range w.gw {
				if g.e != nil && (p.restart[i] || p.replace[i] || p.dead[i]) {
					g.stop()
				}
				if p.replace[i] {
					w.mu.Lock()
					g.life++
					w.mu.Unlock()
					g.known, g.held = acquaintance{}, false
				}
			}
			for i, g := range w.gw {
				if g.e == nil && !p.dead[i] {
					g.start()
					continue
				}
				if g.e != nil && p.api[i] {
					g.list()
				}
				if g.e != nil && g.waits && p.api[i] {
					g.waits = false
					g.join()
				}
			}
			holders := 0
			for _, g := range w.gw {
				if g.e != nil && g.e.holds() {
					holders++
				}
				if g.e != nil && g.e.unsure() { // without an API server, neither gateway knows whether its request has made it the holder
					holders = len(w.gw) + 1
				}
			}
			silent := time.Duration(0)
			for after := time.Duration(0); after < p.lasts; after += look {
				time.Sleep(look)
				a, b := w.gw[0].sends(), w.gw[1].sends()
				if a && b {
					failed(n, after, "two gateways send")
				}
				can := p.joined() && w.gw[0].e != nil && w.gw[1].e != nil && holders == 1 && w.gw[0].knows() && w.gw[1].knows() // each gateway asks the other
				for i, g := range w.gw {
					can = can || g.e != nil && p.api[i]
				}
				if silent += look; a || b {
					silent = 0
				}
				if silent > settleTime && can {
					failed(n, after, "nobody sends")
				}
			}
		}
	})
}

// allLinks returns all states of the connections between two gateways and an API server.
func allLinks() (all []links) {
	for n := range 16 {
		all = append(all, links{[2]bool{n&1 != 0, n&2 != 0}, [2]bool{n&4 != 0, n&8 != 0}})
	}
	return all
}

func TestExactlyOneGatewaySendsIfAnyCan(t *testing.T) {
	for i, l := range allLinks() { // starting from a working state, with each kind of failure
		for _, hung := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v hung %v", l, hung), func(t *testing.T) {
				play(t, uint64(i), []phase{{links: l, lasts: 40 * time.Second, hung: hung}})
			})
		}
	}
	states := allLinks()
	for seed := range uint64(25) {
		t.Run(fmt.Sprint("random ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 2))
			var phases []phase
			for range 6 {
				phases = append(phases, phase{links: states[rng.IntN(len(states))], hung: rng.IntN(2) == 0,
					lasts: time.Duration(rng.IntN(30000)) * time.Millisecond})
			}
			play(t, seed, phases)
		})
	}
}

// A restarted gateway has forgotten its own promises, and the promises made to it.
func TestAtMostOneGatewaySendsAcrossRestarts(t *testing.T) {
	states := allLinks()
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			var phases []phase
			for range 6 {
				p := phase{links: states[rng.IntN(len(states))], hung: rng.IntN(2) == 0, lasts: time.Duration(rng.IntN(30000)) * time.Millisecond}
				if i := rng.IntN(4); i < 2 {
					p.restart[i] = true
				} else if rng.IntN(2) == 0 {
					p.dead[i-2] = true
				}
				p.to = [2]bool{true, true}
				phases = append(phases, p)
			}
			play(t, seed, phases)
		})
	}
}

// Without an API server, a gateway does not know whether a Pod that it asks was deleted or has
// taken over, and does not know a new Pod in its place. The new Pod may be able to read the API
// server, and learns from answers that the holder of the Lease is silent.
func TestAtMostOneGatewaySendsWhilePodsAreReplaced(t *testing.T) {
	joined := [2]bool{true, true}
	for i := range 2 { // either gateway may be the holder
		var cut [2]bool
		cut[1-i] = true
		replace := cut
		without := links{cut, joined}
		for name, phases := range map[string][]phase{
			"as the API server goes": {{links: without, replace: replace, lasts: 40 * time.Second}},
			"later":                  {{links: without, lasts: 15 * time.Second}, {links: without, replace: replace, lasts: 40 * time.Second}},
			"twice": {{links: without, lasts: 15 * time.Second}, {links: without, replace: replace, lasts: 5 * time.Second},
				{links: without, replace: replace, lasts: 40 * time.Second}},
			"and cut off": {{links: without, replace: replace, lasts: 6 * time.Second}, {links: links{api: cut}, lasts: 10 * time.Second}, {links: without, lasts: 20 * time.Second}},
		} {
			t.Run(fmt.Sprintf("%c, %s", 'a'+1-i, name), func(t *testing.T) { play(t, uint64(i), phases) })
		}
	}
	states := allLinks()
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("random ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 4))
			var phases []phase
			for range 6 {
				p := phase{links: states[rng.IntN(len(states))], hung: rng.IntN(2) == 0, lasts: time.Duration(rng.IntN(40000)) * time.Millisecond}
				if i := rng.IntN(3); i < 2 { // gateways that never exchanged messages do not wait for each other
					p.replace[i], p.api[i], p.to = true, true, joined
					p.lasts += 10 * time.Second
				}
				phases = append(phases, p)
			}
			play(t, seed, phases)
		})
	}
}

// A gateway that is not listed yet counts only after it has answered a question. Until then the
// holder does not report its silence to that gateway. Afterwards that gateway may act on the
// silence, because the holder sends nothing without that gateway's promise.
func TestUnlistedGatewayCountsOnlyAfterItAnswers(t *testing.T) {
	now := time.Now()
	known := acquaintance{Transition: 3, Others: map[string]netip.Addr{"b": netip.MustParseAddr("10.0.0.2")}}
	a := electionWith(nil, "a", nil, quiet)
	a.recall(known)
	a.resume(known)
	c, at := idOf("c"), netip.MustParseAddr("10.0.0.3")
	openQuestion := func() (n nonce, ok bool) {
		for _, q := range a.questions(now) {
			if q.id == c && q.addr == at {
				return q.nonce, true
			}
		}
		return n, false
	}
	silent := func() bool { return a.answer(message{kind: kindQuestion, from: c, to: a.id}, now).state.silent }
	promise := func() {
		t.Helper()
		n, ok := openQuestion()
		if !ok || !a.handleAnswer(message{kind: kindAnswer, state: leaseState{transition: 3}, defers: deferFor, nonce: n, from: c, to: a.id}, now) {
			t.Fatal("it is not asked")
		}
	}

	a.recordQuestion(c, at, now)
	if _, ok := openQuestion(); !ok || silent() {
		t.Errorf("asked: %v, silent: %v", ok, silent())
	}
	if n, _ := a.standbys(now); n != 0 || len(a.acquaintance().Others) != 1 {
		t.Error("it counts before it has answered")
	}
	if now = now.Add(deferFor); len(a.questions(now)) != 1 {
		t.Error("one that neither asks nor answers is asked for ever")
	}
	a.recordQuestion(c, at, now)
	promise()
	if !silent() {
		t.Error("it is not told that the holder is silent, which needs its promise")
	}
	a.recordQuestion(c, netip.MustParseAddr("192.0.2.1"), now)
	promise() // the question still goes to the first address

	again := electionWith(nil, "a", nil, quiet)
	again.recall(a.acquaintance())
	if o := again.others[c]; o == nil || o.addr != at {
		t.Errorf("not remembered: %+v", a.acquaintance())
	}
	a.addListed("c", at, false)
	if a.others[c].pod != "c" || len(a.others) != 2 {
		t.Errorf("the API server lists it as another one: %v", a.acquaintance())
	}
	a.removeListed("b")
	if promise(); !a.active() || silent() {
		t.Error("it is silent although everybody defers to it")
	}

	again.away, again.last = false, now // the API server answers, and its list is empty
	for range maxMissed + 1 {
		again.questions(now)
	}
	if len(again.others) > 0 {
		t.Errorf("kept for ever: %v", again.acquaintance())
	}
}

// The manager and others read from the Lease that a gateway is active. A standby that renews
// the Lease for the holder must not delay its own takeover.
func TestAStandbyRenewsTheLeaseOfAHolderThatAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, rng: rand.New(rand.NewPCG(1, 1)), key: keyring.New(), calm: true, now: links{[2]bool{true, true}, [2]bool{true, true}}}
		for i := range w.gw {
			w.gw[i] = &simGateway{w: w, i: i}
		}
		a, b := w.gw[0], w.gw[1]
		a.start()
		time.Sleep(10 * time.Second)
		b.start()
		time.Sleep(10 * time.Second)
		cut := func(l links) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.now = l
		}
		cut(links{[2]bool{false, true}, [2]bool{true, true}})
		for range 60 {
			time.Sleep(time.Second)
			w.mu.Lock()
			lease := w.lease.DeepCopy()
			w.mu.Unlock()
			if age := time.Since(lease.Spec.RenewTime.Time); holderOf(lease) != "a" || age > leaseDuration {
				t.Fatalf("the Lease is that of %s, renewed %v ago", holderOf(lease), age)
			}
		}
		if !a.sends() || b.sends() {
			t.Errorf("a sends: %v, b: %v", a.sends(), b.sends())
		}
		if why := a.e.silence(); why != "" {
			t.Error(why)
		}
		cut(links{[2]bool{false, true}, [2]bool{}})
		time.Sleep(deferFor - stopEarly + questionInterval)
		if a.sends() || !strings.Contains(a.e.silence(), "Pod b, which may have taken over, does not answer") {
			t.Errorf("it sends although nobody answers; %q", a.e.silence())
		}
		time.Sleep(stopEarly + leaseTimeout)
		if !b.sends() {
			t.Error("the standby has not taken over when its holder stopped answering")
		}
		cut(links{[2]bool{false, true}, [2]bool{true, true}})
		time.Sleep(time.Second)
		if a.e.holder() != "b" || a.e.silence() != "" {
			t.Errorf("it has not heard of its successor: %q, %q", a.e.holder(), a.e.silence())
		}
		a.stop()
		b.stop()
		time.Sleep(time.Second)
	})
}

// A gateway that restarts without an API server asks the gateways that it knew before it sends.
func TestRestartedGatewayAsksOthersBeforeItSends(t *testing.T) {
	known := acquaintance{Transition: 3, Others: map[string]netip.Addr{"b": netip.MustParseAddr("10.0.0.2")}}
	now := time.Now()
	start := func(state leaseState, defers time.Duration) *election {
		e := electionWith(nil, "a", nil, quiet)
		e.recall(known)
		e.resume(known)
		if e.active() || e.silence() == "" {
			t.Errorf("it sends before it has asked; %q", e.silence())
		}
		q := e.questions(now)
		if len(q) != 1 || q[0].addr != known.Others["b"] {
			t.Fatalf("it asks %+v", q)
		}
		e.handleAnswer(message{kind: kindAnswer, state: state, defers: defers, nonce: q[0].nonce, from: idOf("b"), to: e.id}, now)
		return e
	}
	if e := start(leaseState{transition: 3}, deferFor); !e.active() {
		t.Errorf("the standby defers, and it is silent: %s", e.silence())
	}
	if e := start(leaseState{transition: 4, holds: true, confirmed: true}, 0); e.active() || e.holder() != "b" {
		t.Errorf("another one has taken over: active %v, holder %q", e.active(), e.holder())
	}
	alone := electionWith(nil, "a", nil, quiet)
	alone.recall(acquaintance{Transition: 3})
	alone.resume(acquaintance{Transition: 3})
	if !alone.active() {
		t.Error("a gateway that never had another one waits for it")
	}
}

// From the moment at which a standby sends a request for the Lease until it knows the result,
// it promises nothing to the holder.
func TestStandbyPromisesNothingWhileItTakesTheLease(t *testing.T) {
	now := time.Now()
	lease := func(version string) *coordinationv1.Lease {
		l := withHolder(nil, "a", now)
		l.ResourceVersion = version
		return l
	}
	b := electionWith(nil, "b", nil, quiet)
	b.addListed("a", netip.MustParseAddr("10.0.0.1"), false)
	b.observe(lease("1"), now)
	defers := func() time.Duration {
		return b.answer(message{kind: kindQuestion, from: idOf("a"), to: b.id}, now).defers
	}
	if d := defers(); d != 0 {
		t.Errorf("defers %v to a gateway that it has not heard", d)
	}
	b.handleAnswer(message{kind: kindAnswer, state: leaseState{holds: true, transition: 1}, nonce: b.questions(now)[0].nonce, from: idOf("a"), to: b.id}, now)
	now = now.Add(time.Second)
	if d := defers(); d != deferFor-time.Second {
		t.Errorf("defers %v after a second, want %v", d, deferFor-time.Second)
	}
	now = now.Add(leaseDuration)
	b.handleAnswer(message{kind: kindAnswer, state: leaseState{holds: true, transition: 1}, nonce: b.questions(now)[0].nonce, from: idOf("a"), to: b.id}, now)
	if wait, renewForHolder := b.begin(now); wait != deferFor || !renewForHolder || defers() != deferFor {
		t.Errorf("the holder answers: wait %v, renew for it %v, defers %v", wait, renewForHolder, defers())
	}
	now = now.Add(deferFor)
	if wait, _ := b.begin(now); wait != 0 {
		t.Errorf("the holder is silent: wait %v", wait)
	}
	b.handleAnswer(message{kind: kindAnswer, state: leaseState{holds: true, transition: 1}, nonce: b.questions(now)[0].nonce, from: idOf("a"), to: b.id}, now)
	if d := defers(); d != 0 {
		t.Errorf("defers %v while its request may be under way", d)
	}
	if b.observe(lease("2"), now); defers() != deferFor {
		t.Errorf("defers %v although the Lease is another's", defers())
	}
}

// Without an API server, the election of a restarted gateway begins before the gateway has a cache
// of objects.
func TestLeaseHasNoKnownHolderBeforeItIsWatched(t *testing.T) {
	g := &Gateway{o: GatewayOptions{Namespace: "isthmus", Pod: "a"}}
	if holder := g.holder(t.Context()); holder != "" {
		t.Errorf("the holder is %q", holder)
	}
}

// A restarted gateway that is silent and learns that it lost the election removes the state that
// its earlier process left.
func TestSilentGatewayCleansUpAfterItLostTheElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Gateway{log: quiet, keeper: newKeeper(GatewayOptions{}, func() {})}
		e := electionWith(nil, "a", nil, quiet)
		known := acquaintance{Transition: 3, Others: map[string]netip.Addr{"b": netip.MustParseAddr("10.0.0.2")}}
		e.recall(known)
		e.resume(known)
		ctx, cancel := context.WithCancel(t.Context())
		serve := func(context.Context, <-chan struct{}) error { return errors.New("it serves") }
		cleared := false
		ended := make(chan error)
		go func() {
			ended <- g.follow(ctx, e, serve, func() error {
				cleared = true
				return nil
			})
		}()
		synctest.Wait()
		if cleared {
			t.Error("it clears what it may still need")
		}
		now := time.Now()
		e.handleAnswer(message{kind: kindAnswer, state: leaseState{transition: 4, holds: true}, nonce: e.questions(now)[0].nonce, from: idOf("b"), to: e.id}, now)
		synctest.Wait()
		if !cleared {
			t.Error("nothing is cleared although another one has taken over")
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
