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

// A PresharedKey is the key for handshakes with one peer; see datapath.PresharedKeys. The zero
// value means that there is no key.
type PresharedKey struct {
	ID       string             `json:"id,omitempty"` // ID of the exchange that made Key
	Key      postquantum.Secret `json:"presharedKey,omitzero"`
	Previous postquantum.Secret `json:"previousPresharedKey,omitzero"`
	Changing bool               `json:"changing,omitempty"`
}

// LogValue hides the keys from loggers that print JSON.
func (PresharedKey) LogValue() slog.Value { return slog.StringValue("(preshared key)") }

// presharedKeys watches the Secret with the preshared keys. It has its own cache, because a
// cache can select only one Secret by name.
type presharedKeys struct {
	objects *objects
	synced  atomic.Bool             // the Secret has been read once; reading the cache earlier would block
	version string                  // version of the Secret from which keys was read
	keys    map[string]PresharedKey // cluster ID → key; never modified
}

// watchPreshared returns once the Secret has been read, because the first handshake may already
// need a preshared key. It does not wait if an older Role forbids reading: then the manager has an
// older Role, too, and negotiates no keys.
func (g *Gateway) watchPreshared(ctx context.Context, group *sync.WaitGroup, waiting func(error)) (*presharedKeys, error) {
	p := &presharedKeys{}
	kinds := map[client.Object]cache.ByObject{&corev1.Secret{}: {Namespaces: named(g.o.Namespace, postquantum.SecretName)}}
	err := retry(ctx, waiting, func() (err error) {
		p.objects, err = newObjects(g.restConfig(), kinds, g.log)
		return err
	})
	if err != nil {
		return nil, err
	}
	group.Go(func() { _ = p.objects.Start(ctx) }) // Start ends only with ctx
	settled := make(chan struct{})
	settle := sync.OnceFunc(func() { close(settled) })
	group.Go(func() {
		defer settle()
		err := p.objects.watch(ctx, g.look.set, func(err error) { // watch fails only if ctx ends
			if apierrors.IsForbidden(err) {
				settle()
			} else {
				waiting(err)
			}
		}, &corev1.Secret{})
		p.synced.Store(err == nil)
		g.look.set()
	})
	<-settled
	return p, ctx.Err()
}

// read returns the keys. If the Secret is deleted, the last keys stay in force until the
// manager recreates it.
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
			continue // the manager negotiates a new key
		}
		keys[id] = PresharedKey{ID: s.Use.ID, Key: s.Use.Secret, Previous: s.Previous.Secret, Changing: s.Changing()}
	}
	p.version, p.keys = secret.ResourceVersion, keys
	return keys
}

// requirePreshared returns the TunnelEndpoints without those that require a preshared key but have
// none in keys. For each remaining TunnelEndpoint that requires a key, it forbids handshakes
// without the key.
func requirePreshared(endpoints []v1alpha1.TunnelEndpoint, keys map[string]PresharedKey) ([]v1alpha1.TunnelEndpoint, map[string]PresharedKey, []fabric.Problem) {
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
		if key.Changing && key.Previous == (postquantum.Secret{}) {
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
