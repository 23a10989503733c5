package exchange

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/queue"
)

// secretAPI is an API server whose only object is the Secret of preshared keys.
type secretAPI struct {
	data    map[string][]byte
	version int
	writes  []int // number of states in each write
	meet    error // if set, the error of each write
}

func (a *secretAPI) client() client.WithWatch {
	return interceptor.NewClient(nil, interceptor.Funcs{
		Get: func(_ context.Context, _ client.WithWatch, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
			secret, is := o.(*corev1.Secret)
			if !is || a.data == nil {
				return apierrors.NewNotFound(schema.GroupResource{}, "")
			}
			a.give(secret)
			return nil
		},
		Patch: func(_ context.Context, _ client.WithWatch, o client.Object, p client.Patch, _ ...client.PatchOption) error {
			var patch struct {
				Metadata struct {
					ResourceVersion string `json:"resourceVersion"`
				} `json:"metadata"`
				Data map[string][]byte `json:"data"`
			}
			text, err := p.Data(o)
			if err == nil {
				err = json.Unmarshal(text, &patch)
			}
			switch {
			case err != nil:
				return err
			case a.meet != nil:
				return a.meet
			case p.Type() == types.ApplyPatchType:
				a.data = make(map[string][]byte)
			case patch.Metadata.ResourceVersion != strconv.Itoa(a.version):
				return apierrors.NewConflict(schema.GroupResource{}, "", nil)
			}
			a.writes = append(a.writes, len(patch.Data))
			a.edit(patch.Data)
			a.give(o.(*corev1.Secret))
			return nil
		},
	})
}

func (a *secretAPI) edit(data map[string][]byte) {
	a.version++
	maps.Copy(a.data, data)
	maps.DeleteFunc(a.data, func(_ string, state []byte) bool { return state == nil })
}

func (a *secretAPI) give(secret *corev1.Secret) {
	secret.Data, secret.ResourceVersion = maps.Clone(a.data), strconv.Itoa(a.version)
}

// keyStore returns a KeyStore, and its API server that has a Secret with data.
func keyStore(data map[string][]byte) (*KeyStore, *secretAPI) {
	a := &secretAPI{data: data}
	return &KeyStore{Client: a.client(), Direct: a.client(), Log: slog.New(slog.DiscardHandler)}, a
}

// write reconciles k, as its controller does after a Put.
func write(t *testing.T, k *KeyStore) {
	t.Helper()
	if _, err := k.Reconcile(t.Context(), writeSecret); err != nil {
		t.Fatal(err)
	}
}

// dueExchanges returns the peers whose exchange the KeyStore has asked to continue since the last
// call.
func dueExchanges(t *testing.T, k *KeyStore) []string {
	t.Helper()
	var r requested
	if err := k.again.Source().Start(t.Context(), &r); err != nil {
		t.Fatal(err)
	}
	k.again = queue.Queue{}
	return slices.Sorted(slices.Values(r.ids))
}

type requested struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
	ids []string
}

func (r *requested) Add(request reconcile.Request) { r.ids = append(r.ids, request.Name) }

// Each write replaces all states in etcd. The first change is written at once, for any number of
// peers. Changes that arrive while a write waits are written together.
func TestKeyExchangeStatesOfAllPeersAreWrittenTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, api := keyStore(map[string][]byte{})
		const peers, steps = 1000, 3
		begin := time.Now()
		for step := range steps {
			for i := range peers {
				state := postquantum.State{ID: fmt.Sprint(step)}
				if stored, err := k.Put(t.Context(), fmt.Sprint("peer-", i), state); err != nil || stored {
					t.Fatalf("stored before it was written: %v, %v", stored, err)
				}
				if i == 0 {
					write(t, k)
				}
			}
			write(t, k)
			write(t, k) // another request of the controller arrived in the meantime
			if ids := dueExchanges(t, k); len(ids) != peers {
				t.Errorf("%d peers may go on, want %d", len(ids), peers)
			}
		}
		if want := []int{1, peers - 1, 1, peers - 1, 1, peers - 1}; !slices.Equal(api.writes, want) {
			t.Errorf("writes of %v states, want %v", api.writes, want)
		}
		if took, want := time.Since(begin), 2*writePause; took != want {
			t.Errorf("the writes took %v, want %v: %d at once", took, want, writesAtOnce)
		}
	})
}

// A state is only published after it is stored, so that our gateways read a new key before the peer
// learns of it. The exchange waits until then, because another step may produce another answer.
func TestKeyExchangeStateIsPublishedOnlyAfterItIsStored(t *testing.T) {
	k, api := keyStore(map[string][]byte{})
	agree := stepsOf(t, k)
	if published := agree(); len(published) != 0 {
		t.Errorf("published before it was stored: %v", published)
	}
	due := k.due["b"]
	if published := agree(); len(published) != 0 || !bytes.Equal(k.due["b"].data, due.data) {
		t.Errorf("another state is due, or published: %v", published)
	}
	api.meet = errors.New("the API server is away")
	if _, err := k.Reconcile(t.Context(), writeSecret); !errors.Is(err, api.meet) || !errors.Is(k.Problem("b"), api.meet) {
		t.Errorf("%v; the problem is %v", err, k.Problem("b"))
	}
	if published := agree(); len(published) != 0 {
		t.Errorf("published without being stored: %v", published)
	}
	api.meet = nil
	write(t, k)
	if ids := dueExchanges(t, k); !slices.Equal(ids, []string{"b"}) {
		t.Errorf("%v may go on, want b", ids)
	}
	if published := agree(); !maps.Equal(published, due.state.Fields()) || !bytes.Equal(api.data["b"], due.data) {
		t.Errorf("published: %v", published)
	}
}

// The exchange continues from a state that another manager or a person has written.
func TestConflictingWriteOverwritesNoKeyExchangeState(t *testing.T) {
	k, api := keyStore(map[string][]byte{"mine": []byte(`{"id":"1"}`), "theirs": []byte(`{"id":"1"}`), "erased": []byte(`{"id":"1"}`)})
	for _, id := range []string{"mine", "theirs", "erased", "new"} {
		if _, err := k.Put(t.Context(), id, postquantum.State{ID: "2"}); err != nil {
			t.Fatal(err)
		}
	}
	api.edit(map[string][]byte{"theirs": []byte(`{"id":"3"}`), "erased": nil})
	if _, err := k.Reconcile(t.Context(), writeSecret); !apierrors.IsConflict(err) {
		t.Errorf("%v, want a conflict", err)
	}
	if ids := dueExchanges(t, k); !slices.Equal(ids, []string{"erased", "theirs"}) {
		t.Errorf("%v take their step again", ids)
	}
	write(t, k)
	for id, want := range map[string]string{"mine": "2", "theirs": "3", "erased": "", "new": "2"} {
		if state, err := k.State(t.Context(), id); err != nil || state.ID != want || k.Waits(id) {
			t.Errorf("%s: %q, want %q; %v", id, state.ID, want, err)
		}
	}
}

// A deleted Secret is created again with the stored states, and then gets the changes that are due.
func TestDeletedSecretIsRecreatedWithTheStoredStates(t *testing.T) {
	k, api := keyStore(map[string][]byte{"stored": []byte(`{"id":"1"}`)})
	if _, err := k.Put(t.Context(), "due", postquantum.State{ID: "1"}); err != nil {
		t.Fatal(err)
	}
	api.data, api.version = nil, 7
	if _, err := k.Reconcile(t.Context(), writeSecret); !apierrors.IsConflict(err) {
		t.Errorf("%v, want a conflict", err)
	}
	if len(api.data) != 1 || api.data["stored"] == nil {
		t.Errorf("made again with %d states", len(api.data))
	}
	write(t, k)
	if len(api.data) != 2 {
		t.Errorf("%d states, want two", len(api.data))
	}
}

// Forget erases a stored state, and also a state that waits to be written.
func TestForgetErasesTheStateOfAPeer(t *testing.T) {
	k, api := keyStore(map[string][]byte{"stored": []byte(`{"id":"1"}`)})
	for _, id := range []string{"stored", "due"} {
		_, err := k.Put(t.Context(), id, postquantum.State{ID: "2"})
		if err = errors.Join(err, k.Forget(t.Context(), id)); err != nil {
			t.Fatal(err)
		}
	}
	write(t, k)
	if len(api.data) != 0 {
		t.Errorf("%d states are left", len(api.data))
	}
	if ids := dueExchanges(t, k); !slices.Equal(ids, []string{"stored"}) {
		t.Errorf("%v may go on", ids)
	}
	if err := (*KeyStore)(nil).Forget(t.Context(), "x"); err != nil {
		t.Error(err)
	}
}

// fullSecret returns as many states as the Secret has room for.
func fullSecret() map[string][]byte {
	data := make(map[string][]byte)
	for i := range maxPreshared {
		data[fmt.Sprint("peer-", i)] = []byte("{}")
	}
	return data
}

func TestFullSecretAcceptsNewKeysOfKnownPeers(t *testing.T) {
	data := fullSecret()
	data["old"] = data["peer-0"]
	delete(data, "peer-0")
	k, api := keyStore(data)
	if _, err := k.Put(t.Context(), "new", postquantum.State{ID: "x"}); !errors.Is(err, errPresharedFull) || k.Waits("new") {
		t.Errorf("a new peer: %v", err)
	}
	if err := k.Problem("new"); !errors.Is(err, errPresharedFull) {
		t.Errorf("the problem of the new peer: %v", err)
	}
	if _, err := k.Put(t.Context(), "old", postquantum.State{ID: "x"}); err != nil || !k.Waits("old") {
		t.Errorf("a peer that is in it: %v", err)
	}
	if write(t, k); k.Problem("old") != nil || !slices.Equal(api.writes, []int{1}) {
		t.Errorf("a peer that is in it: %v, writes of %v states", k.Problem("old"), api.writes)
	}
}

// stepsOf returns a function that advances the exchange of a with b and returns the fields to
// publish. b has offered nothing yet.
func stepsOf(t *testing.T, k *KeyStore) (agree func() postquantum.Fields) {
	t.Helper()
	config := func() v1alpha1.BackendConfig {
		return v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: base64.StdEncoding.EncodeToString(noise.NewKey().PublicKey().Bytes())}
	}
	ours, theirs := config(), config()
	api := interceptor.NewClient(k.Client.(client.WithWatch), interceptor.Funcs{
		List: func(_ context.Context, _ client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			list.(*v1alpha1.NetworkConfigList).Items = []v1alpha1.NetworkConfig{{Spec: v1alpha1.NetworkConfigSpec{BackendConfig: theirs}}}
			return nil
		},
	})
	r := &NetworkConfigReconciler{Client: api, Peers: peers.Peers{Self: "a"}, Keys: k}
	peer := peers.Peer{IdentitySecret: "identity"}
	peer.Cluster.ClusterID = "b"
	current := new(v1alpha1.NetworkConfig)
	return func() postquantum.Fields {
		t.Helper()
		spec := v1alpha1.NetworkConfigSpec{BackendConfig: maps.Clone(ours)}
		if err := r.agree(t.Context(), peer, current, &spec); err != nil {
			t.Fatal(err)
		}
		current.Spec = spec
		return postquantum.FieldsIn(spec.BackendConfig)
	}
}

// If the Secret is full, a new peer's NetworkConfig is published without a key. The KeyStore tries
// again later, without an error.
func TestFullSecretDoesNotBlockThePeering(t *testing.T) {
	k, _ := keyStore(fullSecret())
	agree := stepsOf(t, k)
	if published := agree(); len(published) != 0 {
		t.Errorf("published: %v", published)
	}
	if ids := dueExchanges(t, k); !slices.Equal(ids, []string{"b"}) {
		t.Errorf("%v is looked at again, want b", ids)
	}
	if err := k.Forget(t.Context(), "peer-0"); err != nil {
		t.Fatal(err)
	}
	write(t, k)
	agree()
	write(t, k)
	if published := agree(); len(published) == 0 {
		t.Error("with room, nothing is published")
	}
}

func TestKeyExchangesOfAPeerAreLimited(t *testing.T) {
	k := new(KeyStore)
	for n := range exchangesAtOnce + 1 {
		if got, want := k.mayBegin("busy"), n < exchangesAtOnce; got != want {
			t.Errorf("exchange %d: %v", n, got)
		}
	}
	if !k.mayBegin("other") {
		t.Error("another peer has to wait")
	}
}
