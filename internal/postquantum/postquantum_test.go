package postquantum_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/internal/redact"
)

// side is one side of an exchange as its manager keeps it: the stored State, and the
// publication.
type side struct {
	id        postquantum.Identity
	stored    postquantum.State
	published postquantum.Fields
}

func newSide(id string, key byte) *side {
	return &side{id: postquantum.Identity{ClusterID: id, Keys: [][32]byte{{key}}}}
}

// step does what a manager does: it stores the next State, and publishes if publish is true.
func (s *side) step(t *testing.T, peer *side, received postquantum.Fields, publish bool) postquantum.Progress {
	t.Helper()
	next, progress, err := s.stored.Step(s.id, peer.id, received, s.published)
	if err != nil {
		t.Fatal(err)
	}
	s.stored = next
	if publish {
		s.published = next.Fields()
	}
	return progress
}

// restart reads the State as a restarted manager does, from the stored JSON.
func (s *side) restart(t *testing.T) {
	t.Helper()
	text, err := json.Marshal(s.stored)
	if err != nil {
		t.Fatal(err)
	}
	if s.stored = (postquantum.State{}); json.Unmarshal(text, &s.stored) != nil || len(text) > postquantum.MaxStored {
		t.Errorf("%d octets are stored, want %d at most", len(text), postquantum.MaxStored)
	}
}

// agree makes both sides step until they use the same key.
func agree(t *testing.T, a, b *side) {
	t.Helper()
	for range 8 {
		pa := a.step(t, b, b.published, true)
		pb := b.step(t, a, a.published, true)
		if pa == postquantum.Agreed && pb == postquantum.Agreed && a.stored.Use == b.stored.Use && a.stored.Use.ID != "" {
			return
		}
	}
	t.Fatal("the two sides do not agree")
}

// meet reports whether the gateways of both sides can make a handshake: they have a preshared
// key in common, or both accept none.
func meet(a, b *side) bool {
	for _, k := range []postquantum.Key{a.stored.Use, a.stored.Previous} {
		if k == b.stored.Use || k == b.stored.Previous {
			return true
		}
	}
	return false
}

func TestKeyExchangeTakesThreeMessages(t *testing.T) {
	a, b := newSide("a", 1), newSide("b", 2)
	want := []postquantum.Progress{postquantum.NotOffers, postquantum.Waiting, postquantum.Agreed, postquantum.Agreed}
	for i, s := range []*side{a, b, a, b} {
		other := map[*side]*side{a: b, b: a}[s]
		if got := s.step(t, other, other.published, true); got != want[i] {
			t.Errorf("step %d: %s, want %s", i, got, want[i])
		}
		octets := 0
		for name, value := range s.published {
			if octets += len(name) + len(value); len(value) > 1024 {
				t.Errorf("%s has %d characters: a CRD takes 1,024", name, len(value))
			}
		}
		if len(s.published) > 5 {
			t.Errorf("%d words: want five, for a CRD takes 16 keys", len(s.published))
		}
		t.Logf("step %d publishes %d characters", i, octets)
	}
	if a.stored.Use != b.stored.Use || a.stored.Use == (postquantum.Key{}) {
		t.Error("the keys differ")
	}
	if a.stored.Seed != nil || b.stored.Seed != nil || b.stored.Pending != nil {
		t.Error("what made the key is still there")
	}
}

func TestAKeyIsUsedOnlyAfterThePeerConfirmsIt(t *testing.T) {
	a, b := newSide("a", 1), newSide("b", 2)
	a.step(t, b, nil, true)
	b.step(t, a, a.published, true)
	if b.stored.Use != (postquantum.Key{}) {
		t.Error("the answering side uses a key that nobody has confirmed")
	}
}

// The reader of a changed publication gets no new key, reports the right reason, and keeps the
// previous key. Once the unchanged publication returns, the sides agree on a new key.
func TestAlteredMessagesMakeNoKey(t *testing.T) {
	flip := func(name string) func(w, _, _ postquantum.Fields) {
		return func(w, _, _ postquantum.Fields) {
			at := 100
			if at >= len(w[name]) {
				at = 3
			}
			b := []byte(w[name])
			if b[at] = 'A'; w[name][at] == 'A' {
				b[at] = 'B'
			}
			w[name] = string(b)
		}
	}
	cases := []struct {
		name string
		to   string // ID of the side that reads the changed publication
		do   func(w, old, third postquantum.Fields)
		want postquantum.Progress
	}{
		{"answer altered", "a", flip("kem0"), postquantum.Altered},
		{"second half of the answer altered", "a", flip("kem1"), postquantum.Altered},
		{"tag of the answer altered", "a", flip("kemTag"), postquantum.Altered},
		{"key in use altered", "a", flip("kemUse"), postquantum.Altered},
		{"answer to another key", "a", flip("kemFor"), postquantum.Other},
		{"answer too short", "a", func(w, _, _ postquantum.Fields) { w["kem0"] = w["kem0"][4:] }, postquantum.Malformed},
		{"answer too long", "a", func(w, _, _ postquantum.Fields) { w["kem0"] += "AAAA" }, postquantum.Malformed},
		{"not base64", "a", func(w, _, _ postquantum.Fields) { w["kem1"] = "?" + w["kem1"][1:] }, postquantum.Malformed},
		{"no tag", "a", func(w, _, _ postquantum.Fields) { delete(w, "kemTag") }, postquantum.Malformed},
		{"answer replayed", "a", func(w, old, _ postquantum.Fields) { clear(w); maps.Copy(w, old) }, postquantum.Other},
		{"answer of a third peer", "a", func(w, _, third postquantum.Fields) { clear(w); maps.Copy(w, third) }, postquantum.Other},
		{"answer of a third peer for this key", "a", func(w, _, third postquantum.Fields) { w["kem0"], w["kem1"] = third["kem0"], third["kem1"] }, postquantum.Altered},
		{"our own key", "a", func(w, _, _ postquantum.Fields) { w["kem0"] = strings.Repeat("A", 790); w["kem1"] = w["kem0"] }, postquantum.Malformed},
		{"tag of the key altered", "b", flip("kemTag"), postquantum.Altered},
		{"tag of the answer in place of the tag of the key", "b", func(w, _, third postquantum.Fields) { w["kemTag"] = third["kemTag"] }, postquantum.Altered},
		{"key altered", "b", flip("kem1"), postquantum.Altered},
		{"key with an invalid coefficient", "b", func(w, _, _ postquantum.Fields) { w["kem0"] = strings.Repeat("/", len(w["kem0"])) }, postquantum.Malformed},
		{"key too short", "b", func(w, _, _ postquantum.Fields) { w["kem1"] = w["kem1"][:len(w["kem1"])-4] }, postquantum.Malformed},
		{"key replayed", "b", func(w, old, _ postquantum.Fields) { clear(w); maps.Copy(w, old) }, postquantum.Altered},
		{"key of a third peer", "b", func(w, _, third postquantum.Fields) { clear(w); maps.Copy(w, third) }, postquantum.Altered},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a, b := newSide("a", 1), newSide("b", 2)
			agree(t, a, b)
			old := map[string]postquantum.Fields{"a": b.published, "b": a.published}[c.to]
			third, fourth := newSide("a", 7), newSide("b", 8)
			agree(t, third, fourth)
			strange := map[string]postquantum.Fields{"a": fourth.published, "b": third.published}[c.to]
			before := a.stored.Use

			a.id.Keys = [][32]byte{{9}} // another identity starts a new exchange
			a.step(t, b, b.published, true)
			b.step(t, a, a.published, true)
			reader, writer := a, b
			if c.to == "b" {
				a.step(t, b, b.published, true)
				reader, writer = b, a
			}
			bad := maps.Clone(writer.published)
			c.do(bad, old, strange)
			if got := reader.step(t, writer, bad, true); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
			if reader.stored.Use != before || !meet(a, b) {
				t.Error("the earlier key is not in use any more")
			}
			agree(t, a, b)
			if a.stored.Use == before {
				t.Error("there is no new key")
			}
		})
	}
}

// Managers stop before or after they publish, and read outdated publications, while the
// WireGuard keys change. At each moment the two gateways can make a handshake. In the end both
// sides use the same new key.
func TestExchangeConvergesAfterACrashAtAnyStep(t *testing.T) {
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(28, seed))
		sides := [2]*side{newSide("a", 1), newSide("b", 2)}
		var seen [2]postquantum.Fields // each side's last copy of the other's publication
		ops := ""
		for range 40 {
			i := rng.IntN(2)
			s, other := sides[i], sides[1-i]
			switch op := rng.IntN(8); op {
			case 0, 1:
				s.step(t, other, seen[i], true)
				ops += fmt.Sprintf(" %d:step", i)
			case 2:
				s.step(t, other, seen[i], false)
				if ops += fmt.Sprintf(" %d:crash", i); rng.IntN(2) == 0 {
					s.restart(t) // the manager stops before it publishes
				}
			case 3, 4, 5:
				seen[i] = other.published
				ops += fmt.Sprintf(" %d:see", i)
			case 6:
				s.restart(t)
				ops += fmt.Sprintf(" %d:start", i)
			case 7:
				if rng.IntN(3) == 0 {
					s.id.Keys = [][32]byte{{byte(rng.IntN(256))}}
					ops += fmt.Sprintf(" %d:key", i)
				}
			}
			if !meet(sides[0], sides[1]) {
				t.Fatalf("seed %d: no key in common after%s", seed, ops)
			}
		}
		agree(t, sides[0], sides[1])
	}
}

// The message is not stored. At every step of an exchange, a restarted manager must be able to
// read it from its own publication.
func TestKeyAndAnswerAreReadFromThePublication(t *testing.T) {
	a, b := newSide("a", 1), newSide("b", 2)
	for _, s := range []*side{a, b, a, b, a, b} {
		other := map[*side]*side{a: b, b: a}[s]
		s.step(t, other, other.published, true)
		id, published := s.stored.ID, s.published
		s.restart(t)
		if s.stored.Message != nil {
			t.Error("the message is stored")
		}
		if s.step(t, other, other.published, true); s.stored.ID != id || !maps.Equal(s.published, published) {
			t.Errorf("%s publishes something else after a restart", s.id.ClusterID)
		}
	}
	if a.stored.Use != b.stored.Use || a.stored.Use == (postquantum.Key{}) {
		t.Error("the keys differ")
	}
}

// If the publication does not match the stored State, the exchange starts again and the key in
// use stays. The same holds for a State of an earlier version, which has no hash.
func TestExchangeStartsAgainWithoutItsPublication(t *testing.T) {
	for name, spoil := range map[string]func(s, third *side){
		"nothing":         func(s, _ *side) { s.published = nil },
		"altered":         func(s, _ *side) { s.published["kem1"] = "AAAA" + s.published["kem1"][4:] },
		"of a third peer": func(s, third *side) { s.published = third.published },
		"older format":    func(s, _ *side) { s.stored.Sum = nil },
	} {
		for i := range 2 {
			for steps := 1; steps <= 4; steps++ {
				sides := [2]*side{newSide("a", 1), newSide("b", 2)}
				a, b := sides[0], sides[1]
				agree(t, a, b)
				before := a.stored.Use
				third, fourth := newSide("a", 7), newSide("b", 8)
				agree(t, third, fourth)
				a.id.Keys = [][32]byte{{9}}
				for step := range steps {
					sides[step%2].step(t, sides[1-step%2], sides[1-step%2].published, true)
				}
				s, other := sides[i], sides[1-i]
				id, use, seeded := s.stored.ID, s.stored.Use, s.stored.Seed != nil // the key can be derived from a seed, so it needs no publication
				s.restart(t)
				spoil(s, []*side{third, fourth}[i])
				s.step(t, other, other.published, true)
				if !seeded && (s.stored.Use != use || i == 0 && s.stored.ID == id) || !meet(a, b) {
					t.Errorf("%s, %s after %d steps: the exchange goes on, or the key in use has changed", name, s.id.ClusterID, steps)
				}
				if agree(t, a, b); a.stored.Use == before {
					t.Errorf("%s, %s after %d steps: there is no new key", name, s.id.ClusterID, steps)
				}
			}
		}
	}
}

// If one side has lost its Secret, the sides agree on another key.
func TestALostSecretIsReplaced(t *testing.T) {
	for i := range 2 {
		sides := [2]*side{newSide("a", 1), newSide("b", 2)}
		agree(t, sides[0], sides[1])
		before := sides[0].stored.Use
		sides[i].stored = postquantum.State{}
		agree(t, sides[0], sides[1])
		if sides[0].stored.Use == before {
			t.Errorf("side %d: the lost key is in use again", i)
		}
	}
}

// A peer that leaves the exchange, for example an older Isthmus, is used without a preshared
// key.
func TestPeerThatLeavesTheKeyExchangeNeedsNoKey(t *testing.T) {
	for i := range 2 {
		sides := [2]*side{newSide("a", 1), newSide("b", 2)}
		agree(t, sides[0], sides[1])
		if got := sides[i].step(t, sides[1-i], nil, true); got != postquantum.NotOffers {
			t.Errorf("side %d: %s, want %s", i, got, postquantum.NotOffers)
		}
		if sides[i].stored.Use != (postquantum.Key{}) {
			t.Errorf("side %d still uses the key", i)
		}
		agree(t, sides[0], sides[1])
	}
}

func TestAStateIsStoredAndNotPrinted(t *testing.T) {
	a, b := newSide("a", 1), newSide("b", 2)
	agree(t, a, b)
	stored, err := json.Marshal(a.stored)
	if err != nil {
		t.Fatal(err)
	}
	var again postquantum.State
	if err := json.Unmarshal(stored, &again); err != nil || again.Use != a.stored.Use {
		t.Errorf("what was stored is not what is read: %v", err)
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "%v %+v %#v %s %v %#v", a.stored, a.stored, a.stored, a.stored, a.stored.Use, a.stored.Use)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("state", "state", a.stored, "key", a.stored.Use)
	slog.New(slog.NewTextHandler(&out, nil)).Info("state", "state", a.stored, "key", a.stored.Use)
	secret := a.stored.Use.Secret
	if s := out.String(); strings.Contains(s, fmt.Sprint(secret[0])+" ") && strings.Contains(s, fmt.Sprint(secret[1])) || strings.Count(s, "(secret)") != 10 {
		t.Errorf("a state is printed: %s", s)
	}
}

// A State that was written can be read, and package redact recognizes all its secret fields.
func TestAStateRoundTrips(t *testing.T) {
	a, b := newSide("a", 1), newSide("b", 2)
	check := func() {
		t.Helper()
		for _, s := range []*side{a, b} {
			text, err := json.Marshal(s.stored)
			if err != nil {
				t.Fatal(err)
			}
			var read postquantum.State
			want := s.stored
			want.Message = nil
			if err := json.Unmarshal(text, &read); err != nil || !reflect.DeepEqual(read, want) {
				t.Errorf("%s is not read as it was written: %v", s.id.ClusterID, err)
			}
			secrets, out := s.stored.Secrets(), string(new(redact.Redactor).Text(text))
			if len(secrets) == 0 {
				t.Errorf("%s has no secrets", s.id.ClusterID)
			}
			for _, secret := range secrets {
				if in := base64.StdEncoding.EncodeToString(secret); !strings.Contains(string(text), in) || strings.Contains(out, in) {
					t.Errorf("%s: a secret is not stored, or stays in what was redacted", s.id.ClusterID)
				}
			}
		}
	}
	for range 2 { // the second exchange also has former keys
		a.step(t, b, b.published, true) // a now has a seed
		b.step(t, a, a.published, true) // b now has a pending key
		check()
		agree(t, a, b)
		check()
		for _, s := range []*side{a, b} {
			if !s.stored.Changing() || s.stored.Settled().Changing() {
				t.Errorf("%s: want a change until there is a session", s.id.ClusterID)
			}
		}
		a.id.Keys[0][0]++
	}
}
