package kube

import (
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/postquantum"
)

// A PresharedKey is what handshakes with a peer may use; see datapath.PresharedKeys. The zero value is none.
type PresharedKey struct {
	ID       string             `json:"id,omitempty"` // of the exchange that made Key
	Key      postquantum.Secret `json:"presharedKey,omitzero"`
	Former   postquantum.Secret `json:"formerPresharedKey,omitzero"`
	Changing bool               `json:"changing,omitempty"`
}

// LogValue hides the keys from loggers that print JSON.
func (PresharedKey) LogValue() slog.Value { return slog.StringValue("(preshared key)") }

// presharedKeys follow the Secret with the preshared keys. It is not among the other objects because a
// cache watches one Secret by name.
type presharedKeys struct {
	objects *objects
	synced  atomic.Bool             // the Secret was read once; until then a look at the cache would wait
	version string                  // of the Secret that keys are of
	keys    map[string]PresharedKey // by cluster ID; never modified
}

// watchPreshared returns when the Secret was read once: before that no handshake may begin, since the peer may
// accept the present key alone. A Role of an older version does not allow to read it; the manager has the same
// Role's version, and agrees on no keys then.
func (g *Gateway) watchPreshared(ctx context.Context, group *sync.WaitGroup, waiting func(error)) error {
	kinds := map[client.Object]cache.ByObject{&corev1.Secret{}: {Namespaces: named(g.o.Namespace, postquantum.SecretName)}}
	err := retry(ctx, waiting, func() (err error) {
		g.preshared.objects, err = newObjects(g.restConfig(), kinds, g.log)
		return err
	})
	if err != nil {
		return err
	}
	group.Go(func() { _ = g.preshared.objects.Start(ctx) }) // it only ends with ctx
	settled := make(chan struct{})
	settle := sync.OnceFunc(func() { close(settled) })
	group.Go(func() {
		defer settle()
		err := g.preshared.objects.watch(ctx, g.look.set, func(err error) { // it only gives up with ctx
			if apierrors.IsForbidden(err) {
				settle()
			} else {
				waiting(err)
			}
		}, &corev1.Secret{})
		g.preshared.synced.Store(err == nil)
		g.look.set()
	})
	<-settled
	return ctx.Err()
}

// read returns the keys. What was read before stays in force when somebody deletes the Secret: the manager makes
// it anew.
func (p *presharedKeys) read(ctx context.Context, namespace string) map[string]PresharedKey {
	var secret corev1.Secret
	if !p.synced.Load() {
		return p.keys
	}
	if err := p.objects.Get(ctx, client.ObjectKey{Namespace: namespace, Name: postquantum.SecretName}, &secret); err != nil || secret.ResourceVersion == p.version {
		return p.keys
	}
	keys := make(map[string]PresharedKey, len(secret.Data))
	for id, data := range secret.Data {
		var s postquantum.State
		if json.Unmarshal(data, &s) != nil {
			continue // the manager begins anew
		}
		keys[id] = PresharedKey{ID: s.Use.ID, Key: s.Use.Secret, Former: s.Former.Secret, Changing: s.Changing()}
	}
	p.version, p.keys = secret.ResourceVersion, keys
	return keys
}

// demand leaves out the TunnelEndpoints that want a preshared key and have none, and lets those with one
// accept no handshake without.
func demand(endpoints []v1alpha1.TunnelEndpoint, keys map[string]PresharedKey) ([]v1alpha1.TunnelEndpoint, map[string]PresharedKey, []fabric.Problem) {
	var problems []fabric.Problem
	adjusted := false
	usable := slices.DeleteFunc(slices.Clone(endpoints), func(te v1alpha1.TunnelEndpoint) bool {
		if te.Annotations[isthmus.AnnotationPostQuantum] != string(isthmus.PostQuantumRequired) || !te.DeletionTimestamp.IsZero() {
			return false
		}
		id := te.Spec.ClusterIdentity.ClusterID
		key := keys[id]
		if key.ID == "" {
			problems = append(problems, fabric.Problem{Origin: originOf(&te), Field: "metadata.annotations[" + isthmus.AnnotationPostQuantum + "]",
				Message: "is Required, and there is no preshared key for this peer; the tunnel stays down without one"})
			return true
		}
		if key.Changing && key.Former == (postquantum.Secret{}) {
			if !adjusted {
				keys, adjusted = maps.Clone(keys), true
			}
			key.Changing = false
			keys[id] = key
		}
		return false
	})
	return usable, keys, problems
}
