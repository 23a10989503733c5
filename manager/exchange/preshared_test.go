package exchange

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/manager/peers"
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

// A peer that finds the Secret full is told all else, and is looked at again without an error.
func TestAFullSecretKeepsNothingElseFromAPeer(t *testing.T) {
	config := func() v1alpha1.BackendConfig {
		return v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: base64.StdEncoding.EncodeToString(noise.NewKey().PublicKey().Bytes())}
	}
	ours, theirs := config(), config()
	offered, _, err := StepOf(postquantum.State{}, "b", theirs, "a", ours)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(theirs, offered.Words())
	k := &KeyStore{states: map[string][]byte{"other": make([]byte, maxPreshared+1)}, version: "1"}
	api := interceptor.NewClient(nil, interceptor.Funcs{
		List: func(_ context.Context, _ client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			list.(*v1alpha1.NetworkConfigList).Items = []v1alpha1.NetworkConfig{{Spec: v1alpha1.NetworkConfigSpec{BackendConfig: theirs}}}
			return nil
		},
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return apierrors.NewNotFound(schema.GroupResource{}, "")
		},
	})
	r := &NetworkConfigReconciler{Client: api, Peers: peers.Peers{Self: "a"}, Keys: k}
	peer := peers.Peer{IdentitySecret: "identity"}
	peer.Cluster.ClusterID = "b"
	spec := v1alpha1.NetworkConfigSpec{BackendConfig: ours}
	if err := r.agree(t.Context(), peer, nil, &spec); err != nil || len(spec.BackendConfig) != 1 {
		t.Errorf("%v; published: %v", err, spec.BackendConfig)
	}
	waiting := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	defer waiting.ShutDown()
	if err := r.again.Source().Start(t.Context(), waiting); err != nil || waiting.Len() != 1 {
		t.Errorf("%v; %d requests wait, want 1", err, waiting.Len())
	}
	clear(k.states)
	k.states["b"] = []byte("{}")
	spec.BackendConfig = ours
	k.Client = interceptor.NewClient(nil, interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return nil
		},
	})
	if err := r.agree(t.Context(), peer, nil, &spec); err != nil || len(spec.BackendConfig) < 2 {
		t.Errorf("with room: %v; published: %v", err, spec.BackendConfig)
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
