package control

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/manager/exchange"
)

// An agreement is a peer's state of its key exchange with us: our public key and the preshared
// keys.
type agreement struct {
	mu    sync.Mutex // held while a change is handled
	key   string     // our public key
	state postquantum.State
}

// rotate makes peers agree with us on preshared keys, and gives our cluster a new key as a gateway
// does. It waits until all peers have that key and new preshared keys, and prints the cost.
func (w *world) rotate(peers []*remote, idle float64) {
	w.t.Helper()
	all, byNamespace := make(map[*remote]*agreement), make(map[string]*remote)
	for _, r := range peers {
		all[r], byNamespace[r.namespace] = new(agreement), r
	}
	go each(w.t.Context(), w.away.client, &v1alpha1.NetworkConfigList{}, func(o client.Object) {
		nc := o.(*v1alpha1.NetworkConfig)
		if r := byNamespace[nc.Namespace]; r != nil && nc.Labels[v1alpha1.LabelOriginID] == w.home.id {
			go func() {
				if err := w.agree(r, all[r], nc); err != nil && w.t.Context().Err() == nil {
					w.t.Errorf("%s: %v", r.ClusterName, err)
				}
			}()
		}
	})
	used := func() map[*remote]string {
		ids := make(map[*remote]string)
		for r, a := range all {
			a.mu.Lock()
			if id := a.state.Use.ID; id != "" {
				ids[r] = id
			}
			a.mu.Unlock()
		}
		return ids
	}
	w.home.within(5*time.Minute, "preshared keys", func() (string, bool) { n := len(used()); return fmt.Sprint(n), n >= len(peers) })
	w.settle()
	former := used()

	var secret corev1.Secret
	w.home.get(types.NamespacedName{Namespace: installed, Name: keyring.SecretName}, &secret)
	change := func(data map[string][]byte) keyring.Ring {
		secret.Data = data
		if err := w.home.client.Update(w.t.Context(), &secret); err != nil {
			w.t.Fatal(err)
		}
		ring, _, err := keyring.Read(secret.Data)
		if err != nil {
			w.t.Fatal(err)
		}
		return ring
	}
	ring := change(keyring.Begin(secret.Data, keyring.New(), time.Now()))
	w.settle()
	w.audits.next()
	before, server, began := w.home.cpu(), w.home.apiServerCPU(), time.Now()
	change(keyring.Publish(secret.Data, ring, 1, began))
	next := string(secret.Data[keyring.FieldNextPublic])
	until := func(what string, n int, done func(*remote, *agreement) bool) time.Duration {
		w.home.within(5*time.Minute, what, func() (string, bool) {
			count := 0
			for r, a := range all {
				a.mu.Lock()
				if done(r, a) {
					count++
				}
				a.mu.Unlock()
			}
			return fmt.Sprintf("%d of %d", count, n), count >= n
		})
		return time.Since(began)
	}
	messages := until("our next key at all peers", len(peers), func(_ *remote, a *agreement) bool { return a.key == next })
	renewed := until("new preshared keys", len(former), func(r *remote, a *agreement) bool {
		return former[r] != "" && a.state.Use.ID != former[r] && a.state.Pending == nil
	})
	w.settle()
	change(keyring.Promote(secret.Data, ring, time.Now()))
	w.settle()
	cost, asked := (w.home.cpu()-before).Seconds()-idle*time.Since(began).Seconds(), w.audits.next()
	var keys corev1.Secret
	w.home.get(types.NamespacedName{Namespace: installed, Name: postquantum.SecretName}, &keys)
	size := 0
	for _, state := range keys.Data {
		size += len(state)
	}
	w.figure("our key rotates: CPU, s", "%.2f", cost)
	w.figure("our key rotates: CPU of the API server, s", "%.1f", (w.home.apiServerCPU() - server).Seconds())
	w.figure("our key rotates: all peers have the next key after, s", "%.1f", messages.Seconds())
	w.figure("our key rotates: peers with a preshared key; all renewed after, s", "%s", fmt.Sprintf("%d; %.1f", len(former), renewed.Seconds()))
	w.figure("our key rotates: writes for each", "%.1f", float64(asked.writes())/float64(len(peers)))
	w.figure("our key rotates: writes of preshared keys; KiB in each", "%s", fmt.Sprintf("%d; %d", asked["home patch secrets"], size>>10))
	w.t.Logf("our key rotates: %s", asked.dividedBy(len(peers)))
}

// agree handles our NetworkConfig at a peer, as the peer's manager would. Here it reports sessions
// with a new preshared key, as our gateway would.
func (w *world) agree(r *remote, a *agreement, ours *v1alpha1.NetworkConfig) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	// Read again, because a newer version may have been handled already.
	if err := w.away.client.Get(w.t.Context(), client.ObjectKeyFromObject(ours), ours); err != nil {
		return err
	}
	a.key = ours.Spec.BackendConfig[v1alpha1.ConfigPublicKey]
	state, _, err := exchange.StepOf(a.state, r.ClusterID, r.spec.BackendConfig, w.home.id, ours.Spec.BackendConfig, postquantum.FieldsIn(r.spec.BackendConfig))
	if err != nil || (state.ID == a.state.ID && state.Use.ID == a.state.Use.ID) {
		return err
	}
	merge := func(o client.Object, patch map[string]any) error {
		data, err := json.Marshal(patch)
		if err != nil {
			return err
		}
		if _, is := patch["status"]; is {
			return w.home.client.Status().Patch(w.t.Context(), o, client.RawPatch(types.MergePatchType, data))
		}
		return w.home.client.Patch(w.t.Context(), o, client.RawPatch(types.MergePatchType, data))
	}
	used := a.state.Use.ID
	a.state = state
	err = merge(r.networkConfig(), map[string]any{"spec": map[string]any{"backend_config": state.Fields()}})
	if id := state.Use.ID; err == nil && id != used {
		te := &v1alpha1.TunnelEndpoint{}
		te.Namespace, te.Name = r.TenantNamespace(), r.UniqueName()
		err = merge(te, map[string]any{"status": map[string]any{"connection": map[string]any{
			"peerConfiguration": map[string]string{v1alpha1.ConfigPreshared: id},
		}}})
	}
	return err
}
