package exchange

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/peers"
)

const (
	// maxPreshared is the size of the Secret, in octets, up to which new peers are accepted. A peer
	// needs about 2,000, and the rest is room for changes of existing peers.
	maxPreshared = corev1.MaxSecretSize * 4 / 5

	// presharedCheck is how often the Secret is read again, since somebody may have deleted it.
	presharedCheck = time.Minute
)

// errPresharedFull means that the Secret has no room for another peer.
var errPresharedFull = errors.New("the Secret " + postquantum.SecretName + " is full: it holds the keys of about 400 peers")

// A peer may begin exchangesAtOnce exchanges at once, and then one per exchangePause. Each exchange
// replaces the whole Secret in etcd, and a peer may publish another key all the time.
const (
	exchangePause   = 30 * time.Second
	exchangesAtOnce = 4
)

// A KeyStore keeps the State of the exchange of preshared keys with each peer in one Secret. The
// leading manager writes it, and gateways read it. Its methods may be called concurrently, but for
// one peer by one goroutine at a time.
type KeyStore struct {
	Client    client.Client // with a field owner
	Direct    client.Reader // not cached
	Namespace string
	Peers     peers.Peers
	Log       *slog.Logger

	writing sync.Mutex // held while the Secret is read or written

	mu      sync.Mutex
	next    *keyBatch         // states of the next write
	states  map[string][]byte // as stored; nil: not read yet
	version string            // of the Secret
	err     error             // of the last write or read
	begun   map[string]*rate.Limiter
}

// A keyBatch is one write for all peers that waited for the previous write. Each write replaces the
// whole Secret in etcd, and thousands of peers may come at the same time.
type keyBatch struct {
	states map[string][]byte // by cluster ID; nil inside: the peer is gone
	done   bool
	err    error
}

// Start implements manager.Runnable. It recreates a deleted Secret, and removes the exchanges of
// former peers from it.
func (k *KeyStore) Start(ctx context.Context) error {
	tick := time.NewTicker(presharedCheck)
	defer tick.Stop()
	for {
		k.check(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (k *KeyStore) check(ctx context.Context) {
	k.writing.Lock()
	err := k.read(ctx)
	k.writing.Unlock()
	if err != nil {
		k.Log.Warn("cannot read the preshared keys", "error", err)
		return
	}
	k.mu.Lock()
	ids := slices.Collect(maps.Keys(k.states))
	k.mu.Unlock()
	for _, id := range ids {
		if _, err := k.Peers.ByID(ctx, id); errors.Is(err, peers.ErrNoPeer) {
			err = k.put(ctx, id, nil)
			if err != nil {
				k.Log.Warn("cannot erase the preshared key of a former peer", "peer", id, "error", err)
			}
		}
	}
}

// State returns the stored state of a peer; zero if there is none.
func (k *KeyStore) State(ctx context.Context, id string) (state postquantum.State, err error) {
	data, err := k.stored(ctx, id)
	if err != nil || len(data) == 0 {
		return state, err
	}
	if err := json.Unmarshal(data, &state); err != nil {
		return postquantum.State{}, nil //nolint:nilerr // somebody has edited it; the exchange begins anew
	}
	return state, nil
}

func (k *KeyStore) stored(ctx context.Context, id string) ([]byte, error) {
	k.mu.Lock()
	states := k.states
	k.mu.Unlock()
	if states == nil {
		k.writing.Lock()
		err := k.read(ctx)
		k.writing.Unlock()
		if err != nil {
			return nil, err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.states[id], nil
}

// Put stores the state of a peer if it differs.
func (k *KeyStore) Put(ctx context.Context, id string, state postquantum.State) error {
	data, err := json.Marshal(state)
	if err != nil {
		return err
	}
	have, err := k.stored(ctx, id)
	if err != nil || bytes.Equal(have, data) {
		return err
	}
	return k.put(ctx, id, data)
}

// Forget erases the state of a peer that is gone. k may be nil.
func (k *KeyStore) Forget(ctx context.Context, id string) error {
	if k == nil {
		return nil
	}
	if have, err := k.stored(ctx, id); err != nil || have == nil {
		return err
	}
	return k.put(ctx, id, nil)
}

// MayBegin reports whether a peer may have a new exchange now, and counts it.
func (k *KeyStore) MayBegin(id string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.begun == nil {
		k.begun = make(map[string]*rate.Limiter)
	}
	if k.begun[id] == nil {
		k.begun[id] = rate.NewLimiter(rate.Every(exchangePause), exchangesAtOnce)
	}
	return k.begun[id].Allow()
}

// Problem returns why the state of a peer is not stored, or nil if it is.
func (k *KeyStore) Problem(id string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err == nil && k.states != nil && k.states[id] == nil && k.full() {
		return errPresharedFull
	}
	return k.err
}

// full reports whether there is no room for one more peer. With k.mu.
func (k *KeyStore) full() bool {
	size := 0
	for _, data := range k.states {
		size += len(data)
	}
	return size > maxPreshared
}

func (k *KeyStore) put(ctx context.Context, id string, data []byte) error {
	k.mu.Lock()
	if data == nil {
		delete(k.begun, id)
	} else if k.states[id] == nil && k.full() {
		k.mu.Unlock()
		return errPresharedFull
	}
	if k.next == nil {
		k.next = &keyBatch{states: make(map[string][]byte)}
	}
	batch := k.next
	batch.states[id] = data
	k.mu.Unlock()
	k.writing.Lock()
	defer k.writing.Unlock()
	if !batch.done { // otherwise another goroutine has written it
		k.mu.Lock()
		k.next = nil
		k.mu.Unlock()
		batch.done, batch.err = true, k.note(k.write(ctx, batch.states))
	}
	return batch.err
}

// note names the Secret in an error, and remembers it.
func (k *KeyStore) note(err error) error {
	if err != nil {
		err = fmt.Errorf("the Secret %s/%s: %w", k.Namespace, postquantum.SecretName, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.err = err
	return err
}

// read reads the Secret, and makes it if it is not there. With k.writing.
func (k *KeyStore) read(ctx context.Context) error {
	var secret corev1.Secret
	err := k.Direct.Get(ctx, types.NamespacedName{Namespace: k.Namespace, Name: postquantum.SecretName}, &secret)
	if apierrors.IsNotFound(err) {
		return k.note(k.create(ctx))
	}
	if err = k.note(err); err == nil {
		k.take(&secret)
	}
	return err
}

// create makes the Secret, with the states from before somebody deleted it. It applies the Secret
// server-side, because RBAC can restrict that to one name, which it cannot for a create.
func (k *KeyStore) create(ctx context.Context) error {
	k.mu.Lock()
	states := k.states
	k.mu.Unlock()
	secret := &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Namespace: k.Namespace, Name: postquantum.SecretName, Labels: map[string]string{"app.kubernetes.io/managed-by": "isthmus"}},
		Type:       corev1.SecretTypeOpaque,
		Data:       states,
	}
	data, err := json.Marshal(secret)
	if err != nil {
		return err
	}
	err = k.Client.Patch(ctx, secret, client.RawPatch(types.ApplyPatchType, data))
	if err == nil {
		k.take(secret)
		k.Log.Info("created the Secret for preshared keys", "secret", postquantum.SecretName, "peers", len(states))
	}
	return err
}

// take adopts the states in the stored Secret.
func (k *KeyStore) take(secret *corev1.Secret) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.states, k.version = secret.Data, secret.ResourceVersion; k.states == nil {
		k.states = make(map[string][]byte)
	}
}

// write stores states. With k.writing. A conflict means that another manager leads or that somebody
// has edited the Secret: then the states may have been computed from outdated ones.
func (k *KeyStore) write(ctx context.Context, states map[string][]byte) error {
	k.mu.Lock()
	version := k.version
	k.mu.Unlock()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": version}, "data": states})
	if err != nil {
		return err
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: k.Namespace, Name: postquantum.SecretName}}
	err = k.Client.Patch(ctx, secret, client.RawPatch(types.MergePatchType, patch))
	if err == nil {
		k.take(secret)
		return nil
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		err = errors.Join(err, k.read(ctx))
	}
	return err
}

// agree takes the next step of the exchange with a peer, stores the new state, and puts into spec
// what the peer needs to know of it. If it cannot store the state, it keeps the published values in
// spec: a Secret that is full or cannot be written must not hold back the rest of spec.
func (r *NetworkConfigReconciler) agree(ctx context.Context, peer peers.Peer, current *v1alpha1.NetworkConfig, spec *v1alpha1.NetworkConfigSpec) error {
	if r.Keys == nil || !peer.Replicated() {
		return nil
	}
	words, err := r.step(ctx, peer, spec)
	if err != nil && current != nil {
		words = postquantum.WordsIn(current.Spec.BackendConfig)
	}
	maps.Copy(spec.BackendConfig, words)
	if errors.Is(err, errPresharedFull) {
		// The status of the Peering says so. Room appears when another peer leaves.
		r.again.Add(controllers.RequestFor(peer.Cluster.ClusterID), presharedCheck)
		return nil
	}
	return err
}

func (r *NetworkConfigReconciler) step(ctx context.Context, peer peers.Peer, spec *v1alpha1.NetworkConfigSpec) (postquantum.Words, error) {
	id := peer.Cluster.ClusterID
	state, err := r.Keys.State(ctx, id)
	if err != nil {
		return nil, err
	}
	copies, err := CopiesOf(ctx, r.Client, peer.LocalNamespace, id)
	if err != nil {
		return nil, err
	}
	if len(copies) != 1 || !alive(copies[0]) {
		return state.Words(), nil
	}
	was := state
	state, _, err = StepOf(state, r.Peers.Self, spec.BackendConfig, id, copies[0].Spec.BackendConfig)
	if err != nil {
		return nil, err
	}
	if state.ID != was.ID && !r.Keys.MayBegin(id) {
		r.again.Add(controllers.RequestFor(id), exchangePause)
		return was.Words(), nil
	}
	te, err := controllers.Found(ctx, r.Client, types.NamespacedName{Namespace: peer.LocalNamespace, Name: peer.Cluster.UniqueName()}, new(v1alpha1.TunnelEndpoint))
	if err != nil {
		return nil, err
	}
	if use := state.Use.ID; use != "" && PresharedIn(te) == use {
		state = state.Settled()
	}
	if err := r.Keys.Put(ctx, id, state); err != nil {
		return nil, err // a state that is not stored must not be published
	}
	return state.Words(), nil
}

// StepOf computes the next step of the exchange from the values that both sides publish.
func StepOf(state postquantum.State, self string, ours v1alpha1.BackendConfig, id string, theirs v1alpha1.BackendConfig) (postquantum.State, postquantum.Progress, error) {
	return state.Step(identityOf(self, ours), identityOf(id, theirs), postquantum.WordsIn(theirs))
}

// identityOf returns the ID and keys to which an exchange is bound: a side that changes a key
// begins a new exchange.
func identityOf(id string, config v1alpha1.BackendConfig) postquantum.Identity {
	identity := postquantum.Identity{ClusterID: id}
	for _, text := range publicKeysOf(config) {
		// An invalid key counts as the zero key, which no gateway accepts.
		key, _ := fabric.ParseKey(text)
		identity.Keys = append(identity.Keys, key)
	}
	return identity
}
