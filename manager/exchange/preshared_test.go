package exchange

import (
	"context"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/internal/postquantum"
)

func TestAFullSecretKeepsNoPeerThatIsInItFromANewKey(t *testing.T) {
	writes := 0
	k := &KeyStore{states: make(map[string][]byte), version: "1", Client: interceptor.NewClient(nil, interceptor.Funcs{
		Patch: func(_ context.Context, _ client.WithWatch, o client.Object, _ client.Patch, _ ...client.PatchOption) error {
			writes++
			o.(*corev1.Secret).Data = map[string][]byte{"old": make([]byte, maxPreshared)}
			return nil
		},
	})}
	for i := range 1000 {
		k.states[fmt.Sprint("peer-", i)] = make([]byte, maxPreshared/999)
	}
	k.states["old"] = []byte("{}")
	if err := k.Put(t.Context(), "new", postquantum.State{ID: "x"}); !errors.Is(err, errPresharedFull) || writes != 0 {
		t.Errorf("a new peer: %v, %d writes", err, writes)
	}
	if err := k.Problem("new"); !errors.Is(err, errPresharedFull) {
		t.Errorf("what is told of the new peer: %v", err)
	}
	if err := errors.Join(k.Put(t.Context(), "old", postquantum.State{ID: "x"}), k.Problem("old")); err != nil || writes != 1 {
		t.Errorf("a peer that is in it: %v, %d writes", err, writes)
	}
}

func TestAPeerHasFewExchangesAtOnce(t *testing.T) {
	k := new(KeyStore)
	for n := range exchangesAtOnce + 1 {
		if got, want := k.MayBegin("busy"), n < exchangesAtOnce; got != want {
			t.Errorf("exchange %d: %v", n, got)
		}
	}
	if !k.MayBegin("other") {
		t.Error("another peer has to wait")
	}
}
