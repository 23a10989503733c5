package kube

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/postquantum"

	"github.com/isthmus-net/isthmus/internal/keyring"
)

// A peer that requires a preshared key is left out until its key exists. Handshakes with that peer
// always need the key.
func TestAPeerIsLeftOutWithoutItsRequiredKey(t *testing.T) {
	one, previous := postquantum.Secret{1}, postquantum.Secret{2}
	for _, tc := range []struct {
		name     string
		required bool
		have     PresharedKey
		usable   bool
		want     PresharedKey
	}{
		{"none, and none needed", false, PresharedKey{}, true, PresharedKey{}},
		{"none, and one needed", true, PresharedKey{}, false, PresharedKey{}},
		{"the peer has just stopped to take part", true, PresharedKey{Previous: previous, Changing: true}, false, PresharedKey{Previous: previous, Changing: true}},
		{"the first one", false, PresharedKey{ID: "1", Key: one, Changing: true}, true, PresharedKey{ID: "1", Key: one, Changing: true}},
		{"the first one, and one needed", true, PresharedKey{ID: "1", Key: one, Changing: true}, true, PresharedKey{ID: "1", Key: one}},
		{"a second one", true, PresharedKey{ID: "2", Key: one, Previous: previous, Changing: true}, true, PresharedKey{ID: "2", Key: one, Previous: previous, Changing: true}},
	} {
		te := endpoint(1)
		if tc.required {
			te.Annotations = map[string]string{isthmus.AnnotationPostQuantum: string(isthmus.PostQuantumRequired)}
		}
		id := te.Spec.ClusterIdentity.ClusterID
		keys := map[string]PresharedKey{id: tc.have}
		usable, used, problems := requirePreshared([]v1alpha1.TunnelEndpoint{te}, keys)
		if (len(usable) == 1) != tc.usable || (len(problems) == 0) != tc.usable || used[id] != tc.want || keys[id] != tc.have {
			t.Errorf("%s: %d usable, problems %v, or other keys", tc.name, len(usable), problems)
		}
	}
}

// A gateway that restarts without an API server still has the preshared keys, and the peers
// that require them.
func TestPresharedKeysSurviveARestart(t *testing.T) {
	o := GatewayOptions{Namespace: "home", Pod: "pod-1", StateDirectory: filepath.Join(t.TempDir(), "state"), Log: quiet}
	with, without := endpoint(1), endpoint(2)
	for _, te := range []*v1alpha1.TunnelEndpoint{&with, &without} {
		te.Annotations = map[string]string{isthmus.AnnotationPostQuantum: string(isthmus.PostQuantumRequired), "else": "x"}
	}
	private, id := keyring.New(), with.Spec.ClusterIdentity.ClusterID
	keys := map[string]PresharedKey{id: {ID: "of today", Key: postquantum.Secret{1, 2, 3}}}
	k := newKeeper(o, func() {})
	keep := func() {
		t.Helper()
		want := savedFrom(self, private, []v1alpha1.TunnelEndpoint{with, without}, nil)
		want.locations.Site, want.preshared = site, keys
		k.put(want, ringOf(private))
		k.round("pod-1", noon, noon)
		known, err := remember(o, noon)
		if err != nil || known == nil || !reflect.DeepEqual(known.snapshot.Preshared, keys) || len(known.snapshot.Gateway.Peers) != 1 || len(known.snapshot.Problems) != 1 {
			t.Fatalf("%+v, %v; want one peer with its key, and a problem", known, err)
		}
	}
	keep()
	keys = map[string]PresharedKey{id: {ID: "of tomorrow", Key: postquantum.Secret{4}, Previous: postquantum.Secret{1, 2, 3}, Changing: true}}
	keep() // only the keys have changed
}

func TestAPresharedKeyIsNotPrinted(t *testing.T) {
	key := PresharedKey{ID: "1", Key: postquantum.Secret{201, 202}, Previous: postquantum.Secret{203}, Changing: true}
	s := Snapshot{Preshared: map[string]PresharedKey{"a": key}}
	var b strings.Builder
	slog.New(slog.NewJSONHandler(&b, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{} // the digits of the time could look like a part of the key
		}
		return a
	}})).Info("x", "key", key)
	fmt.Fprintf(&b, "%v %+v %#v %v %+v", key, key, key, s, s)
	if strings.Contains(b.String(), "201") || strings.Contains(b.String(), "yco") || strings.Contains(b.String(), "c9ca") {
		t.Error(b.String())
	}
}
