package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
)

// Labels of the Secret that gateways create. Package keyring defines the Secret's data.
const (
	keyLabelValue = "wireguard"
	// labelManagedBy marks a Secret that we created. `isthmus uninstall` keeps Secrets without this
	// label, because a Liqo in the same namespace may have created them.
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "isthmus"
)

// keyFrom parses the keys. A wrong public key in the Secret is only a problem, and not an error:
// peers that already have the right key stay connected.
func keyFrom(secret *corev1.Secret) (ring keyring.Ring, problems []fabric.Problem, err error) {
	origin := fabric.Origin{Kind: "Secret", Namespace: secret.Namespace, Name: secret.Name}
	private, err := keyring.Key(secret.Data, keyring.FieldPrivate)
	if err != nil {
		return ring, nil, fabric.Problem{Origin: origin, Field: "data." + keyring.FieldPrivate, Message: err.Error()}
	}
	ring, wrong, err := keyring.Read(secret.Data)
	if err != nil {
		return ring, nil, err
	}
	if wrong != nil {
		problems = append(problems, fabric.Problem{Origin: origin, Field: "data", Message: wrong.Error()})
	}
	public, err := keyring.Key(secret.Data, keyring.FieldPublic)
	if err == nil && !bytes.Equal(public[:], publicKey(private)) {
		err = errors.New("does not belong to data." + keyring.FieldPrivate)
	}
	if err != nil {
		problems = append(problems, fabric.Problem{Origin: origin, Field: "data." + keyring.FieldPublic, Message: err.Error() +
			"; want the public key of data." + keyring.FieldPrivate + ": delete the Secret; the gateway recreates it with the private key in use"})
	}
	if ring.Since.IsZero() {
		ring.Since = secret.CreationTimestamp.UTC()
	}
	return ring, problems, nil
}

func publicKey(private [32]byte) []byte {
	return fabric.PublicKeys(private, 1)[0][:]
}

// keySecret returns a Secret with the keys in ring, or with a new key if ring is empty.
func keySecret(namespace string, ring keyring.Ring, tunnels int, now time.Time) *corev1.Secret {
	data := make(map[string][]byte)
	if ring.Private == ([32]byte{}) {
		data = keyring.Replace(data, keyring.New(), now)
	} else {
		data[keyring.FieldPrivate], data[keyring.FieldPublic] = keyring.Text(ring.Private), keyring.Text(fabric.PublicKeys(ring.Private, 1)[0])
	}
	if ring.Gateways != ring.Private {
		data[keyring.FieldGateways] = keyring.Text(ring.Gateways)
	}
	if ring.Offered != ([32]byte{}) {
		data[keyring.FieldOffered] = keyring.Text(ring.Offered)
	}
	if ring.Next != ([32]byte{}) { // some peers may have only the next key
		data = keyring.Begin(data, ring.Next, now)
	}
	if r, _, err := keyring.Read(data); err == nil {
		if further := keyring.Tunnels(r.Private, tunnels); further != "" {
			data[keyring.FieldTunnels] = []byte(further)
		}
	}
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: keyring.SecretName,
			Labels: map[string]string{v1alpha1.LabelKey: keyLabelValue, labelManagedBy: managedBy},
		},
		Data: data,
	}
}

// createKey creates the Secret. If keys are in use, it stores these keys, so that the loss of the
// Secret breaks no connection. If several replicas try, one succeeds, and the others then read its
// Secret.
func (g *Gateway) createKey(ctx context.Context, inUse keyring.Ring) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	secret := keySecret(g.o.Namespace, inUse, g.o.Tunnels, time.Now())
	err := g.client.Create(ctx, secret)
	switch {
	case apierrors.IsAlreadyExists(err):
		return nil
	case err != nil:
		return fmt.Errorf("the Secret %s: %w", client.ObjectKeyFromObject(secret), kubeerr.Plain("the API server", err))
	}
	g.log.Info("created the key Secret", "secret", keyring.SecretName, "newKey", inUse.Private == [32]byte{})
	return nil
}

// tunnelsRetryInterval is the delay after which a failed write of the Secret is repeated.
const tunnelsRetryInterval = 10 * time.Second

// syncTunnels writes the public keys of this replica's tunnels into data.tunnels, once for each
// private key. While an administrator changes the number of tunnels, replicas have different
// numbers. Each replica writes its own number when it starts, so the newest replica prevails. If
// the value does not belong to the private key, any replica corrects it at any time. syncTunnels
// returns a problem if the write fails.
func (r *refresher) syncTunnels(ctx context.Context, secret *corev1.Secret, private [32]byte) []fabric.Problem {
	have, want := string(secret.Data[keyring.FieldTunnels]), keyring.Tunnels(private, r.o.Tunnels)
	switch {
	case have == want:
		r.writtenKey, r.tunnelsErr = private, nil
		return nil
	case r.writtenKey == private && (have == "" || strings.HasPrefix(keyring.Tunnels(private, fabric.MaxTunnels)+",", have+",")):
		return nil
	}
	if now := time.Now(); now.After(r.tunnelsRetry) {
		r.tunnelsErr = r.writeTunnels(ctx, secret, want)
		switch {
		case apierrors.IsConflict(r.tunnelsErr) || apierrors.IsNotFound(r.tunnelsErr):
			r.tunnelsErr = nil // the cache is stale; its update triggers this function again
		case r.tunnelsErr != nil:
			r.tunnelsRetry = now.Add(tunnelsRetryInterval)
			time.AfterFunc(tunnelsRetryInterval, r.look.set)
		default:
			r.writtenKey = private
			r.log.Info("wrote the tunnels into the key Secret", "secret", keyring.SecretName, "tunnels", r.o.Tunnels)
		}
	}
	if r.tunnelsErr == nil {
		return nil
	}
	return []fabric.Problem{{Origin: fabric.Origin{Kind: "Secret", Namespace: secret.Namespace, Name: secret.Name}, Field: "data." + keyring.FieldTunnels,
		Message: fmt.Sprintf("lacks the public keys of %d additional tunnels, so peers cannot use these tunnels; the public keys cannot be written: %v", r.o.Tunnels-1, kubeerr.Plain("the API server", r.tunnelsErr))}}
}

func (g *Gateway) writeTunnels(ctx context.Context, secret *corev1.Secret, tunnels string) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	with := secret.DeepCopy()
	if with.Data[keyring.FieldTunnels] = []byte(tunnels); tunnels == "" {
		delete(with.Data, keyring.FieldTunnels)
	}
	return g.client.Patch(ctx, with, client.MergeFromWithOptions(secret, client.MergeFromWithOptimisticLock{}))
}

// key reads the keys, or creates the Secret if it is missing. It may return problems together
// with usable keys.
func (r *refresher) key(ctx context.Context, inUse keyring.Ring) (keyring.Ring, []fabric.Problem, error) {
	var secret corev1.Secret
	err := r.objects.Get(ctx, client.ObjectKey{Namespace: r.o.Namespace, Name: keyring.SecretName}, &secret)
	switch {
	case err == nil:
		ring, problems, err := keyFrom(&secret)
		if err != nil {
			return ring, problems, err
		}
		return ring, append(problems, r.syncTunnels(ctx, &secret, ring.Private)...), nil
	case !apierrors.IsNotFound(err):
		return inUse, nil, err
	}
	missing := fmt.Errorf("the Secret %s/%s does not exist", r.o.Namespace, keyring.SecretName)
	if now := time.Now(); now.After(r.keyTries) {
		r.keyTries = now.Add(time.Second)
		time.AfterFunc(time.Second, r.look.set) // then check again, whether or not createKey succeeds
		if err := r.createKey(ctx, inUse); err != nil {
			missing = err
		}
	}
	if inUse.Private != ([32]byte{}) {
		return inUse, nil, nil // the gateway continues with these keys, so peers do not notice that the Secret is missing
	}
	return inUse, nil, missing
}
