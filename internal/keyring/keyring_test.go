package keyring_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

var start = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)

func secretOf(private [32]byte) map[string][]byte {
	return map[string][]byte{
		keyring.FieldPrivate: keyring.Text(private), keyring.FieldPublic: keyring.Text(fabric.PublicKeys(private, 1)[0]),
		keyring.FieldTunnels: []byte(keyring.Tunnels(private, 3)),
	}
}

func read(t *testing.T, data map[string][]byte) keyring.Ring {
	t.Helper()
	r, wrong, err := keyring.Read(data)
	if err != nil || wrong != nil {
		t.Fatal(err, wrong)
	}
	return r
}

func TestRotationStepDependsOnSecretAndObservations(t *testing.T) {
	private, next := keyring.New(), keyring.New()
	first := secretOf(private)
	begun := keyring.Begin(first, next, start)
	published := keyring.Publish(begun, read(t, begun), 3, start)
	late := keyring.Publish(begun, read(t, begun), 3, start.Add(100*time.Hour))
	stamped := func(text string) map[string][]byte {
		data := maps.Clone(published)
		data[keyring.FieldPublished] = []byte(text)
		return data
	}
	promoted := keyring.Promote(published, read(t, published), start)
	aged := keyring.Replace(first, private, start)
	for _, tc := range []struct {
		name string
		data map[string][]byte
		seen keyring.Seen
		want keyring.Step
	}{
		{"no rotation", first, keyring.Seen{Now: start}, keyring.Nothing},
		{"a key of unknown age", first, keyring.Seen{Now: start, Age: time.Hour}, keyring.Nothing},
		{"a young key", aged, keyring.Seen{Now: start.Add(59 * time.Minute), Age: time.Hour}, keyring.Nothing},
		{"an old key", aged, keyring.Seen{Now: start.Add(time.Hour), Age: time.Hour}, keyring.Start},
		{"an old key, but age does not matter", aged, keyring.Seen{Now: start.Add(1e6 * time.Hour)}, keyring.Nothing},
		{"the gateway does not answer yet", begun, keyring.Seen{Now: start}, keyring.Nothing},
		{"it does", begun, keyring.Seen{Now: start, Answering: true, Lagging: 2}, keyring.Announce},
		{"it does, without any peer", begun, keyring.Seen{Now: start, Answering: true, Moved: time.Hour}, keyring.Announce},
		{"a peer lags", published, keyring.Seen{Now: start, Answering: true, Lagging: 1, Patience: time.Hour}, keyring.Nothing},
		{"all have just moved", published, keyring.Seen{Now: start, Answering: true, Moved: time.Second}, keyring.Nothing},
		{"all have moved", published, keyring.Seen{Now: start, Answering: true, Moved: keyring.Settled}, keyring.Finish},
		{"another gateway does not answer yet", published, keyring.Seen{Now: start, Moved: time.Hour}, keyring.Nothing},
		{"patience ends", published, keyring.Seen{Now: start.Add(time.Hour), Answering: true, Lagging: 1, Patience: time.Hour}, keyring.Finish},
		{"there is no patience to end", published, keyring.Seen{Now: start.Add(1e6 * time.Hour), Answering: true, Lagging: 1}, keyring.Nothing},
		{"patience begins when peers may be told", late, keyring.Seen{Now: start.Add(101*time.Hour - time.Second), Answering: true, Lagging: 1, Patience: time.Hour}, keyring.Nothing},
		{"and ends after that", late, keyring.Seen{Now: start.Add(101 * time.Hour), Answering: true, Lagging: 1, Patience: time.Hour}, keyring.Finish},
		{"it does not end while nobody has moved", published, keyring.Seen{Now: start.Add(1e6 * time.Hour), Answering: true, Lagging: 2, PeersUnaware: true, Patience: time.Hour}, keyring.Nothing},
		{"when that was cannot be read", stamped("x"), keyring.Seen{Now: start.Add(1e6 * time.Hour), Answering: true, Lagging: 1, Patience: time.Hour}, keyring.Announce},
		{"it is in the future", stamped("2036-11-28T12:00:00Z"), keyring.Seen{Now: start, Answering: true, Lagging: 1, Patience: time.Hour}, keyring.Announce},
		{"another key is offered", aged, keyring.Seen{Now: start, Offered: next}, keyring.Accept},
		{"our own is offered", aged, keyring.Seen{Now: start, Offered: private}, keyring.Accept},
		{"it was taken before", keyring.Take(aged, read(t, aged), private, start), keyring.Seen{Now: start, Offered: private}, keyring.Nothing},
		{"it was taken and replaced", keyring.Replace(keyring.Take(aged, read(t, aged), private, start), next, start), keyring.Seen{Now: start, Offered: private}, keyring.Nothing},
		{"an old key, but another one maintains keys", keyring.Take(aged, read(t, aged), private, start), keyring.Seen{Now: start.Add(time.Hour), Age: time.Hour, Offered: private}, keyring.Nothing},
		{"the Secret of the offer was not found just now", keyring.Take(aged, read(t, aged), private, start), keyring.Seen{Now: start.Add(time.Hour), Age: time.Hour, Absent: keyring.OfferTimeout - 1}, keyring.Nothing},
		{"it has been gone for long", keyring.Take(aged, read(t, aged), private, start), keyring.Seen{Now: start.Add(time.Hour), Age: time.Hour, Absent: keyring.OfferTimeout}, keyring.Start},
		{"it has been gone for long, and the key is young", keyring.Take(aged, read(t, aged), private, start), keyring.Seen{Now: start.Add(time.Minute), Age: time.Hour, Absent: keyring.OfferTimeout}, keyring.Nothing},
		{"another key is offered during a rotation", begun, keyring.Seen{Now: start, Offered: keyring.New()}, keyring.Nothing},
		{"it is over", promoted, keyring.Seen{Now: start}, keyring.Nothing},
	} {
		if got := read(t, tc.data).Step(tc.seen); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestRotationKeepsTheSharedKeyOfTheGateways(t *testing.T) {
	private, next, after := keyring.New(), keyring.New(), keyring.New()
	first := secretOf(private)
	begun := keyring.Begin(first, next, start)
	r := read(t, begun)
	if r.Private != private || r.Next != next || r.Published || r.Gateways != private || !r.NextSince.Equal(start) {
		t.Error("begun:", r.Private == private, r.Next == next, r.Published)
	}
	published := keyring.Publish(begun, r, 3, start)
	if r = read(t, published); !r.Published || string(published[keyring.FieldNextTunnels]) != keyring.Tunnels(next, 3) {
		t.Error("published:", r.Published)
	}
	promoted := keyring.Promote(published, r, start)
	r = read(t, promoted)
	if r.Private != next || r.Next != ([32]byte{}) || r.Gateways != private || !r.Since.Equal(start) || string(promoted[keyring.FieldTunnels]) != keyring.Tunnels(next, 3) {
		t.Error("promoted:", r.Private == next, r.Gateways == private, r.Since)
	}
	again := keyring.Promote(keyring.Begin(promoted, after, start), read(t, keyring.Begin(promoted, after, start)), start)
	if r = read(t, again); r.Private != after || r.Gateways != private {
		t.Error("a second rotation changes what gateways share")
	}
	replaced := keyring.Replace(keyring.Begin(again, next, start), private, start)
	if r = read(t, replaced); r.Private != private || r.Gateways != private || r.Next != ([32]byte{}) {
		t.Error("a key that is replaced leaves something of before")
	}
	for name, value := range replaced {
		for _, key := range [][32]byte{next, after} {
			if strings.Contains(string(value), string(keyring.Text(key))) {
				t.Errorf("data.%s still has a former key", name)
			}
		}
	}
	if len(first) != 3 {
		t.Error("what was given is modified")
	}
}

func TestOfferedKeyBecomesTheNextKey(t *testing.T) {
	private, offered := keyring.New(), keyring.New()
	first := secretOf(private)
	taken := keyring.Take(first, read(t, first), offered, start)
	if r := read(t, taken); r.Private != private || r.Next != offered || r.Offered != fabric.PublicKeys(offered, 1)[0] {
		t.Errorf("taken: %v %v", r.Next == offered, r.Offered)
	}
	if r := read(t, keyring.Promote(taken, read(t, taken), start)); r.Private != offered || r.Offered != fabric.PublicKeys(offered, 1)[0] {
		t.Errorf("promoted: %v %v", r.Private == offered, r.Offered)
	}
	if r := read(t, keyring.Take(first, read(t, first), private, start)); r.Next != ([32]byte{}) || r.Offered != fabric.PublicKeys(private, 1)[0] {
		t.Error("our own key as the next one")
	}
}

func TestKeyAgeIgnoresTheTimestampOfTheNextKey(t *testing.T) {
	for _, text := range []string{"x", "2036-11-28T12:00:00Z"} {
		data := keyring.Begin(secretOf(keyring.New()), keyring.New(), start)
		data[keyring.FieldNextSince] = []byte(text)
		if r := read(t, keyring.Promote(data, read(t, data), start)); !r.Since.Equal(start) {
			t.Errorf("nextSince %s: the key is of %v", text, r.Since)
		}
	}
}

func TestInvalidKeyFieldsAreReportedAndLeftOut(t *testing.T) {
	private := keyring.New()
	data := secretOf(private)
	data[keyring.FieldNext], data[keyring.FieldGateways] = []byte("x"), []byte("y")
	r, wrong, err := keyring.Read(data)
	if err != nil || r.Private != private || r.Next != ([32]byte{}) || r.Gateways != private {
		t.Error(err)
	}
	for _, field := range []string{keyring.FieldNext, keyring.FieldGateways} {
		if wrong == nil || !strings.Contains(wrong.Error(), field) {
			t.Errorf("%v does not name %s", wrong, field)
		}
	}
	delete(data, keyring.FieldPrivate)
	if _, _, err := keyring.Read(data); err == nil {
		t.Error("no private key, and no error")
	}
}

func TestOnlyKeysThatGatewaysAcceptArePublished(t *testing.T) {
	begun := keyring.Begin(secretOf(keyring.New()), keyring.New(), start)
	published := keyring.Publish(begun, read(t, begun), 3, start)
	with := func(field string, value []byte) map[string][]byte {
		data := maps.Clone(published)
		if data[field] = value; value == nil {
			delete(data, field)
		}
		return data
	}
	for name, tc := range map[string]struct {
		data map[string][]byte
		want string
	}{
		"a key that is made":                {begun, keyring.FieldPublic},
		"one that gateways answer to":       {published, keyring.FieldNextPublic},
		"a public key alone":                {with(keyring.FieldNext, nil), keyring.FieldPublic},
		"a private key that is none":        {with(keyring.FieldNext, []byte("x")), keyring.FieldPublic},
		"a private key of another one":      {with(keyring.FieldNext, keyring.Text(keyring.New())), keyring.FieldPublic},
		"a public key of another one":       {with(keyring.FieldNextPublic, keyring.Text(keyring.New())), keyring.FieldPublic},
		"a current key that cannot be read": {with(keyring.FieldPrivate, []byte("x")), keyring.FieldPublic},
	} {
		if got, _ := keyring.Public(tc.data); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
	_, wrong, err := keyring.Read(with(keyring.FieldNext, nil))
	for _, field := range []string{keyring.FieldNextPublic, keyring.FieldNextTunnels, keyring.FieldNextSince, keyring.FieldPublished} {
		if err != nil || wrong == nil || !strings.Contains(wrong.Error(), "data."+field+" ") {
			t.Errorf("%v, %v: does not name %s", err, wrong, field)
		}
	}
}

func TestKeyRingIsNotPrinted(t *testing.T) {
	r := keyring.Ring{Private: keyring.New(), Next: keyring.New()}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{fmt.Sprint(r), fmt.Sprintf("%+v %#v", r, r), string(text)} {
		for _, key := range [][32]byte{r.Private, r.Next} {
			if strings.Contains(s, string(keyring.Text(key))) || strings.Contains(s, fmt.Sprint(key[0], " ", key[1])) {
				t.Errorf("%.80s", s)
			}
		}
	}
}

// A model is a cluster with two gateways and a manager, and a peer. They act one at a time,
// possibly on outdated data.
type model struct {
	secret    map[string][]byte
	gateways  [2]gatewayModel
	published [32]byte // last published by the manager
	peer      [32]byte // last read by the peer
	now       time.Time
	moved     time.Time // since when the active gateway has seen the peer use the next key
	log       string
}

// A gatewayModel is a gateway process with the Secret as it last read it.
type gatewayModel struct {
	ring   keyring.Ring
	active bool
}

func (g *gatewayModel) answers(key [32]byte) bool { return key == g.ring.Private || key == g.ring.Next }

func newModel(t *testing.T) *model {
	t.Helper()
	m := &model{secret: secretOf(keyring.New()), now: start, moved: start}
	first := read(t, m.secret)
	m.published, m.peer = first.Private, first.Private
	m.gateways = [2]gatewayModel{{ring: first, active: true}, {ring: first}}
	return m
}

// begin models `rotate-key`.
func (m *model) begin(t *testing.T) {
	t.Helper()
	if read(t, m.secret).Next == ([32]byte{}) {
		m.secret, m.log = keyring.Begin(m.secret, keyring.New(), m.now), m.log+" begin"
	}
}

func (m *model) reads(t *testing.T, i int) {
	t.Helper()
	m.gateways[i].ring = read(t, m.secret)
}

// writeStep makes the active gateway take the next step. If the gateway has not read the newest
// Secret, the API server rejects the write.
func (m *model) writeStep(t *testing.T) {
	t.Helper()
	for i := range m.gateways {
		g := &m.gateways[i]
		if !g.active || g.ring != read(t, m.secret) {
			continue
		}
		seen := keyring.Seen{Now: m.now, Answering: g.answers(g.ring.Next)}
		if m.peer != g.ring.Next {
			seen.Lagging, m.moved = 1, m.now
		}
		seen.Moved = m.now.Sub(m.moved)
		switch s := g.ring.Step(seen); s {
		case keyring.Announce:
			m.secret, m.log = keyring.Publish(m.secret, g.ring, 3, m.now), fmt.Sprint(m.log, " announce", i)
		case keyring.Finish:
			m.secret, m.log = keyring.Promote(m.secret, g.ring, m.now), fmt.Sprint(m.log, " finish", i)
		}
	}
}

// publish makes the manager publish the current key. The peer reads it later, in movePeer.
func (m *model) publish(t *testing.T) {
	t.Helper()
	if r := read(t, m.secret); r.Published {
		m.published = r.Next
	} else {
		m.published = r.Private
	}
}

func (m *model) movePeer() {
	if m.peer != m.published {
		m.peer, m.log = m.published, m.log+" move"
	}
}

// failover makes the other gateway the active one, after that gateway has read the Secret.
func (m *model) failover(t *testing.T) {
	t.Helper()
	for i := range m.gateways {
		if g := &m.gateways[i]; !g.active {
			g.ring = read(t, m.secret)
		}
		m.gateways[i].active = !m.gateways[i].active
	}
	m.moved, m.log = m.now, m.log+" failover"
}

// restart models a crash of the active gateway. The restarted gateway reads the Secret before it
// responds to peers again.
func (m *model) restart(t *testing.T) {
	t.Helper()
	for i := range m.gateways {
		if m.gateways[i].active {
			m.gateways[i].ring = read(t, m.secret)
		}
	}
	m.moved, m.log = m.now, m.log+" restart"
}

// checkAnswered fails the test if the active gateway does not respond to the key that the peer has.
func (m *model) checkAnswered(t *testing.T) {
	t.Helper()
	for i := range m.gateways {
		if m.gateways[i].active && !m.gateways[i].answers(m.peer) {
			t.Fatalf("gateway %d does not answer to the key that the peer has:%s", i, m.log)
		}
	}
}

// settle lets all act until nothing is left to do. It fails the test if the rotation is not
// finished then.
func (m *model) settle(t *testing.T, first keyring.Ring) {
	t.Helper()
	for range 40 {
		m.now = m.now.Add(time.Second)
		m.writeStep(t)
		m.reads(t, 0)
		m.reads(t, 1)
		m.checkAnswered(t)
		m.publish(t)
		m.movePeer()
		m.checkAnswered(t)
	}
	r := read(t, m.secret)
	if r.Next != ([32]byte{}) || m.peer != r.Private || r.Gateways != first.Gateways {
		t.Fatalf("not over:%s", m.log)
	}
}

// TestRotationsAlwaysConverge runs random rotations. Gateways and the manager read late, write
// late, write from outdated data (which the API server rejects), crash, and take over from each
// other. At every moment, the active gateway must respond to the key that the peer has. At the
// end the rotation must be finished.
func TestRotationsAlwaysConverge(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(28, seed))
		m := newModel(t)
		first := read(t, m.secret)
		m.log = fmt.Sprintf(" (seed %d)", seed)
		for range 200 {
			m.now = m.now.Add(time.Second)
			switch event := rng.IntN(9); event {
			case 0:
				if strings.Count(m.log, "begin") < 3 {
					m.begin(t)
				}
			case 1, 2:
				m.reads(t, event-1)
			case 3, 4:
				m.writeStep(t)
			case 5:
				m.publish(t)
			case 6:
				m.movePeer()
			case 7:
				m.failover(t)
			case 8:
				m.restart(t)
			}
			m.checkAnswered(t)
		}
		m.settle(t, first)
	}
}

// TestEveryStepOfARotationSurvivesEveryFault injects each fault after each step. The rotation
// must finish every time.
func TestEveryStepOfARotationSurvivesEveryFault(t *testing.T) {
	type event struct {
		name string
		do   func(*testing.T, *model)
	}
	later := func(d time.Duration) func(*testing.T, *model) {
		return func(_ *testing.T, m *model) { m.now = m.now.Add(d) }
	}
	steps := []event{
		{"nothing has begun", func(*testing.T, *model) {}},
		{"the next key is in the Secret", func(t *testing.T, m *model) { m.begin(t) }},
		{"the standby responds to it", func(t *testing.T, m *model) { m.reads(t, 1) }},
		{"the active gateway responds to it", func(t *testing.T, m *model) { m.reads(t, 0) }},
		{"it is announced", func(t *testing.T, m *model) { m.writeStep(t) }},
		{"the gateways have read the announcement", func(t *testing.T, m *model) { m.reads(t, 0); m.reads(t, 1) }},
		{"the manager has published it", func(t *testing.T, m *model) { m.publish(t) }},
		{"the peer uses it", func(_ *testing.T, m *model) { m.movePeer() }},
		{"the gateway has seen the peer use it", func(t *testing.T, m *model) { m.writeStep(t) }},
		{"all peers have used it for long enough", later(keyring.Settled)},
		{"the next key is the current one", func(t *testing.T, m *model) { m.writeStep(t) }},
		{"the active gateway has dropped the former key", func(t *testing.T, m *model) { m.reads(t, 0) }},
		{"the manager publishes the current key", func(t *testing.T, m *model) { m.publish(t) }},
	}
	faults := []event{
		{"the active gateway restarts", func(t *testing.T, m *model) { m.restart(t) }},
		{"the standby takes over", func(t *testing.T, m *model) { m.failover(t) }},
		{"the standby takes over and hands back", func(t *testing.T, m *model) { m.failover(t); m.failover(t) }},
		{"the manager restarts, and publishes what it reads", func(t *testing.T, m *model) { m.publish(t) }},
		{"the API server is unavailable for an hour", later(time.Hour)},
		{"the active gateway repeats its write", func(t *testing.T, m *model) { m.writeStep(t); m.writeStep(t) }},
		{"somebody runs rotate-key again", func(t *testing.T, m *model) { m.begin(t) }},
	}
	for n := range steps {
		for _, fault := range faults {
			t.Run(steps[n].name+"/"+fault.name, func(t *testing.T) {
				m := newModel(t)
				first := read(t, m.secret)
				for _, step := range steps[:n+1] {
					step.do(t, m)
					m.checkAnswered(t)
				}
				fault.do(t, m)
				m.checkAnswered(t)
				m.settle(t, first)
			})
		}
	}
}
