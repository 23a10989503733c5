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
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/queue"
)

// maxPreshared is the number of peers for which the Secret has room, even if all their states have
// the maximum size.
const maxPreshared = corev1.MaxSecretSize / postquantum.MaxStored

// errPresharedFull means that the Secret has no room for another peer.
var errPresharedFull = fmt.Errorf("the Secret %s is full: it holds the keys of %d peers", postquantum.SecretName, maxPreshared)

// A peer may publish new keys all the time, and each exchange replaces the whole Secret in etcd. So
// a peer may begin exchangesAtOnce exchanges at once, and then one per exchangePause.
const (
	exchangePause   = 30 * time.Second
	exchangesAtOnce = 4
)

// Each write replaces the whole Secret in etcd. So the first writesAtOnce writes follow at once.
// After them, the changes of all peers are collected, and written once per writePause. One exchange
// takes three writes.
const (
	writePause   = time.Second
	writesAtOnce = 4
)

// presharedCheck is the interval at which the Secret is read again, because somebody may have
// deleted it.
const presharedCheck = time.Minute

// checkSecret and writeSecret are the requests of the KeyStore's controller.
var (
	checkSecret = controllers.RequestFor("check")
	writeSecret = controllers.RequestFor("write")
)

// A KeyStore stores the state of the key exchange with each peer in one Secret. The manager that
// leads writes the Secret, and gateways read it. The KeyStore is a controller that writes the
// changes of all peers together, so that its callers do not wait for the API server. Its methods
// may be called concurrently.
type KeyStore struct {
	Client    client.Client // sets a field owner, which server-side apply requires
	Direct    client.Reader // not cached
	Namespace string
	Peers     peers.Peers
	Log       *slog.Logger

	work    queue.Queue // requests checkSecret and writeSecret
	again   queue.Queue // queue of the NetworkConfigReconciler; gets the peers whose exchange can continue
	reading sync.Mutex  // held while the Secret is read or written

	mu     sync.Mutex
	stored map[string]storedState // by cluster ID; nil: the Secret was not read yet
	due    map[string]storedState // changes for the next write, by cluster ID; an entry without data deletes the stored state
	secret string                 // resourceVersion of the Secret as last read or written
	err    error                  // the error of the last read or write
	writes *rate.Limiter
	begun  map[string]*rate.Limiter
}

// A storedState is the state of an exchange, and its JSON.
type storedState struct {
	state postquantum.State
	data  []byte
}

// SetupWithManager makes mgr call Reconcile, once this manager leads.
func (k *KeyStore) SetupWithManager(mgr ctrl.Manager) error {
	k.work.Add(checkSecret, 0)
	return ctrl.NewControllerManagedBy(mgr).Named("presharedkeys").WatchesRawSource(k.work.Source()).
		Complete(controllers.Noted("presharedkeys", k))
}

// Reconcile writes the changes that are due. For checkSecret, it recreates a deleted Secret, and
// removes former peers from the Secret.
func (k *KeyStore) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	if request != writeSecret {
		if err := k.check(ctx); err != nil {
			return ctrl.Result{}, err
		}
		return ctrl.Result{RequeueAfter: presharedCheck}, nil
	}
	if pace := k.pace(); pace == nil {
		return ctrl.Result{}, nil // an earlier write stored all changes
	} else if err := pace.Wait(ctx); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, k.write(ctx)
}

func (k *KeyStore) check(ctx context.Context) error {
	if err := k.read(ctx); err != nil {
		return err
	}
	k.mu.Lock()
	ids := slices.Collect(maps.Keys(k.stored))
	k.mu.Unlock()
	for _, id := range ids {
		if _, err := k.Peers.ByID(ctx, id); errors.Is(err, peers.ErrNoPeer) {
			k.mu.Lock()
			k.put(id, storedState{})
			k.mu.Unlock()
		}
	}
	return nil
}

// pace returns the limiter of writes, or nil if no change is due.
func (k *KeyStore) pace() *rate.Limiter {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.due) == 0 {
		return nil
	}
	if k.writes == nil {
		k.writes = rate.NewLimiter(rate.Every(writePause), writesAtOnce)
	}
	return k.writes
}

// State returns the stored state of the exchange with a peer, or the zero State.
func (k *KeyStore) State(ctx context.Context, id string) (postquantum.State, error) {
	if err := k.known(ctx); err != nil {
		return postquantum.State{}, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.stored[id].state, nil
}

// known reads the Secret unless it was read before.
func (k *KeyStore) known(ctx context.Context) error {
	k.mu.Lock()
	known := k.stored != nil
	k.mu.Unlock()
	if known {
		return nil
	}
	return k.read(ctx)
}

// Waits reports whether a new state of a peer waits for a write. The peer's exchange continues
// after the write.
func (k *KeyStore) Waits(id string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, waits := k.due[id]
	return waits
}

// Put schedules a write of the state of a peer. If that state is already stored, it only returns
// true.
func (k *KeyStore) Put(ctx context.Context, id string, state postquantum.State) (stored bool, err error) {
	data, err := json.Marshal(state)
	if err != nil {
		return false, err
	}
	if err := k.known(ctx); err != nil {
		return false, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if have := k.stored[id].data; bytes.Equal(have, data) {
		return true, nil
	} else if have == nil && k.full() {
		return false, errPresharedFull
	}
	k.put(id, storedState{state, data})
	return false, nil
}

// Forget erases the state of a peer that has left. k may be nil.
func (k *KeyStore) Forget(ctx context.Context, id string) error {
	if k == nil {
		return nil
	}
	if err := k.known(ctx); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.begun, id)
	delete(k.due, id)
	if k.stored[id].data != nil {
		k.put(id, storedState{})
	}
	return nil
}

// put schedules a write of a peer's state. The caller holds k.mu.
func (k *KeyStore) put(id string, state storedState) {
	if k.due == nil {
		k.due = make(map[string]storedState)
	}
	k.due[id] = state
	k.work.Add(writeSecret, 0)
}

// mayBegin reports whether a peer may begin an exchange now. If so, it counts that exchange.
func (k *KeyStore) mayBegin(id string) bool {
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

// Problem returns the reason why the state of a peer cannot be stored, or nil.
func (k *KeyStore) Problem(id string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, waits := k.due[id]; k.err == nil && k.stored != nil && k.stored[id].data == nil && !waits && k.full() {
		return errPresharedFull
	}
	return k.err
}

// full reports whether there is no room for another peer. The caller holds k.mu.
func (k *KeyStore) full() bool {
	n := len(k.stored)
	for id := range k.due {
		if _, stored := k.stored[id]; !stored {
			n++
		}
	}
	return n >= maxPreshared
}

// note adds the name of the Secret to an error, and keeps the error for Problem.
func (k *KeyStore) note(err error) error {
	if err != nil {
		err = fmt.Errorf("the Secret %s/%s: %w", k.Namespace, postquantum.SecretName, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.err = err
	return err
}

// read reads the Secret, or creates it if it does not exist.
func (k *KeyStore) read(ctx context.Context) error {
	k.reading.Lock()
	defer k.reading.Unlock()
	return k.readLocked(ctx)
}

func (k *KeyStore) readLocked(ctx context.Context) error {
	var secret corev1.Secret
	err := k.Direct.Get(ctx, types.NamespacedName{Namespace: k.Namespace, Name: postquantum.SecretName}, &secret)
	if apierrors.IsNotFound(err) {
		return k.note(k.create(ctx))
	}
	if err = k.note(err); err == nil {
		k.adopt(&secret)
	}
	return err
}

// create creates the Secret, with the states that it had before somebody deleted it. It uses
// server-side apply, because RBAC can restrict a patch, but not a create, to one name.
func (k *KeyStore) create(ctx context.Context) error {
	states := make(map[string][]byte)
	k.mu.Lock()
	for id, s := range k.stored {
		states[id] = s.data
	}
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
		k.adopt(secret)
		k.Log.Info("created the Secret for preshared keys", "secret", postquantum.SecretName, "peers", len(states))
	}
	return err
}

// adopt replaces k.stored by the content of the Secret, and drops obsolete changes. A change is
// obsolete if the Secret already has the new state, or if somebody has replaced the state from
// which the change was made. If a peer's change is dropped, adopt queues the peer, so that the
// exchange with it continues.
func (k *KeyStore) adopt(secret *corev1.Secret) {
	k.mu.Lock()
	defer k.mu.Unlock()
	stored := make(map[string]storedState, len(secret.Data))
	for id, data := range secret.Data {
		s := storedState{data: data}
		switch {
		case bytes.Equal(data, k.stored[id].data):
			s = k.stored[id]
		case bytes.Equal(data, k.due[id].data):
			s = k.due[id]
		case json.Unmarshal(data, &s.state) != nil:
			s.state = postquantum.State{} // somebody has edited the state; the exchange begins again
		}
		stored[id] = s
	}
	for id, s := range k.due {
		if data := stored[id].data; bytes.Equal(data, s.data) || !bytes.Equal(data, k.stored[id].data) {
			delete(k.due, id)
			k.again.Add(controllers.RequestFor(id), 0)
		}
	}
	k.stored, k.secret = stored, secret.ResourceVersion
}

// write writes all changes that are due. A conflict means that another manager leads, or that
// somebody has edited the Secret.
func (k *KeyStore) write(ctx context.Context) error {
	k.reading.Lock()
	defer k.reading.Unlock()
	states := make(map[string][]byte)
	k.mu.Lock()
	for id, s := range k.due {
		states[id] = s.data
	}
	version := k.secret
	k.mu.Unlock()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": version}, "data": states})
	if err != nil {
		return err
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: k.Namespace, Name: postquantum.SecretName}}
	if err = k.note(k.Client.Patch(ctx, secret, client.RawPatch(types.MergePatchType, patch))); err == nil {
		k.adopt(secret)
	} else if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		err = errors.Join(err, k.readLocked(ctx))
	}
	return err
}

// agree advances the key exchange with a peer, schedules a write of the new state, and puts our
// part of the exchange into spec. Until the state is stored, spec keeps the part that is already
// published. So the peer gets the rest of spec even if the Secret cannot be written.
func (r *NetworkConfigReconciler) agree(ctx context.Context, peer peers.Peer, current *v1alpha1.NetworkConfig, spec *v1alpha1.NetworkConfigSpec) error {
	if r.Keys == nil || !peer.Replicated() {
		return nil
	}
	var published postquantum.Fields
	if current != nil {
		published = postquantum.FieldsIn(current.Spec.BackendConfig)
	}
	fields, err := r.step(ctx, peer, published, spec)
	maps.Copy(spec.BackendConfig, fields)
	if errors.Is(err, errPresharedFull) {
		// The status of the Peering reports that the Secret is full. The next try is later, because
		// there may be room once another peer has left.
		r.Keys.again.Add(controllers.RequestFor(peer.Cluster.ClusterID), presharedCheck)
		return nil
	}
	return err
}

// step returns our fields of the exchange, to be published. Until a new state is stored, these are
// the fields that are already published.
func (r *NetworkConfigReconciler) step(ctx context.Context, peer peers.Peer, published postquantum.Fields, spec *v1alpha1.NetworkConfigSpec) (postquantum.Fields, error) {
	id := peer.Cluster.ClusterID
	if r.Keys.Waits(id) {
		return published, nil
	}
	was, err := r.Keys.State(ctx, id) // the latest state, because only this reconciler stores states of this peer
	if err != nil {
		return published, err
	}
	copies, err := CopiesOf(ctx, r.Client, peer.LocalNamespace, id)
	if err != nil || len(copies) != 1 || !alive(copies[0]) {
		return published, err
	}
	state, _, err := StepOf(was, r.Peers.Self, spec.BackendConfig, id, copies[0].Spec.BackendConfig, published)
	if err != nil {
		return published, err
	}
	if state.ID != was.ID && !r.Keys.mayBegin(id) {
		r.Keys.again.Add(controllers.RequestFor(id), exchangePause)
		return published, nil
	}
	te, err := controllers.Found(ctx, r.Client, types.NamespacedName{Namespace: peer.LocalNamespace, Name: peer.Cluster.UniqueName()}, new(v1alpha1.TunnelEndpoint))
	if err != nil {
		return published, err
	}
	if use := state.Use.ID; use != "" && PresharedIn(te) == use {
		state = state.Settled()
	}
	if stored, err := r.Keys.Put(ctx, id, state); err != nil || !stored {
		return published, err
	}
	return state.Fields(), nil
}

// StepOf computes one step of the exchange from the fields that both sides publish. published has
// our own fields.
func StepOf(state postquantum.State, self string, ours v1alpha1.BackendConfig, id string, theirs v1alpha1.BackendConfig, published postquantum.Fields) (postquantum.State, postquantum.Progress, error) {
	return state.Step(identityOf(self, ours), identityOf(id, theirs), postquantum.FieldsIn(theirs), published)
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
