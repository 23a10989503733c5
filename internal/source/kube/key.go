package kube

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
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
	"github.com/isthmus-net/isthmus/internal/kubeerr"
)

// The Secret with the WireGuard key that all replicas share, as Liqo has it (docs/liqo-v0.md,
// section 6.1): both values are base64 text, as wg(8) prints keys.
const (
	KeySecret     = "wireguard-pubkey"
	keyPrivate    = "privateKey"
	keyPublic     = "publicKey"
	keyTunnels    = "tunnels" // the public keys of tunnels 1, 2 and so on, separated by commas; Liqo has no such field
	keyLabelValue = "wireguard"
	// labelManagedBy is on the Secret when we have made it: `isthmus uninstall` deletes no other one, such
	// as that of a Liqo in the same namespace.
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "isthmus"
)

// keyFrom reads the private key. A wrong public key is only reported: peers are told what no
// gateway has, but those that know better go on.
func keyFrom(secret *corev1.Secret) (private [32]byte, problems []fabric.Problem, err error) {
	origin := fabric.Origin{Kind: "Secret", Namespace: secret.Namespace, Name: secret.Name}
	private, err = parseKey(secret.Data, keyPrivate)
	if err != nil {
		return private, nil, fabric.Problem{Origin: origin, Field: "data." + keyPrivate, Message: err.Error()}
	}
	public, err := parseKey(secret.Data, keyPublic)
	if err == nil && !bytes.Equal(public[:], publicKey(private)) {
		err = errors.New("does not belong to data." + keyPrivate)
	}
	if err != nil {
		problems = []fabric.Problem{{Origin: origin, Field: "data." + keyPublic, Message: err.Error() +
			"; want the public key of data." + keyPrivate + ": delete the Secret, and the gateway makes it anew with the private key in use"}}
	}
	return private, problems, nil
}

func parseKey(data map[string][]byte, field string) ([32]byte, error) {
	text, ok := data[field]
	if !ok {
		return [32]byte{}, errors.New("is absent; want a WireGuard key, 32 bytes in 44 base64 characters")
	}
	return fabric.ParseKey(string(text))
}

func publicKey(private [32]byte) []byte {
	return fabric.PublicKeys(private, 1)[0][:]
}

// tunnelKeys is what data.tunnels holds for n tunnels; empty: it is absent.
func tunnelKeys(private [32]byte, n int) string {
	var texts []string
	for _, key := range fabric.PublicKeys(private, n)[1:] {
		texts = append(texts, base64.StdEncoding.EncodeToString(key[:]))
	}
	return strings.Join(texts, ",")
}

func newKey() (private [32]byte) {
	rand.Read(private[:]) // it ends the program rather than fail
	private[0] &= 248     // RFC 7748, section 5, as wg(8) does before it prints
	private[31] = private[31]&127 | 64
	return private
}

func keySecret(namespace string, private [32]byte, tunnels int) *corev1.Secret {
	text := func(key []byte) []byte { return []byte(base64.StdEncoding.EncodeToString(key)) }
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: KeySecret,
			Labels: map[string]string{v1alpha1.LabelKey: keyLabelValue, labelManagedBy: managedBy},
		},
		Data: map[string][]byte{keyPrivate: text(private[:]), keyPublic: text(publicKey(private))},
	}
	if further := tunnelKeys(private, tunnels); further != "" {
		secret.Data[keyTunnels] = []byte(further)
	}
	return secret
}

// createKey makes the Secret, with the key in use where there is one, so that its loss costs no
// connection. Of several replicas one succeeds; the others will read what it made.
func (g *Gateway) createKey(ctx context.Context, inUse [32]byte) error {
	private := inUse
	if private == ([32]byte{}) {
		private = newKey()
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	secret := keySecret(g.o.Namespace, private, g.o.Tunnels)
	err := g.client.Create(ctx, secret)
	switch {
	case apierrors.IsAlreadyExists(err):
		return nil
	case err != nil:
		return fmt.Errorf("the Secret %s: %w", client.ObjectKeyFromObject(secret), kubeerr.Plain("the API server", err))
	}
	g.log.Info("key Secret made", "secret", KeySecret, "newKey", inUse == [32]byte{})
	return nil
}

// tellInterval is how long after a failure the Secret is written again.
const tellInterval = 10 * time.Second

// tellTunnels makes data.tunnels true for this replica, once for each private key. Replicas of
// another number of tunnels, as there are while one is being changed, each say theirs when they
// start, and the last one is right. What is no number of tunnels of this key is corrected at any
// time. The problem is that it cannot be.
func (g *Gateway) tellTunnels(ctx context.Context, secret *corev1.Secret, private [32]byte) []fabric.Problem {
	have, want := string(secret.Data[keyTunnels]), tunnelKeys(private, g.o.Tunnels)
	switch {
	case have == want:
		g.told, g.tellErr = private, nil
		return nil
	case g.told == private && (have == "" || strings.HasPrefix(tunnelKeys(private, fabric.MaxTunnels)+",", have+",")):
		return nil
	}
	if now := time.Now(); now.After(g.tellAgain) {
		g.tellErr = g.writeTunnels(ctx, secret, want)
		switch {
		case apierrors.IsConflict(g.tellErr) || apierrors.IsNotFound(g.tellErr):
			g.tellErr = nil // the cache is behind, and what it misses brings us here again
		case g.tellErr != nil:
			g.tellAgain = now.Add(tellInterval)
			time.AfterFunc(tellInterval, g.look.set)
		default:
			g.told = private
			g.log.Info("key Secret tells of our tunnels", "secret", KeySecret, "tunnels", g.o.Tunnels)
		}
	}
	if g.tellErr == nil {
		return nil
	}
	return []fabric.Problem{{Origin: fabric.Origin{Kind: "Secret", Namespace: secret.Namespace, Name: secret.Name}, Field: "data." + keyTunnels,
		Message: fmt.Sprintf("does not hold the public keys of our %d further tunnels, of which peers will not be told, and writing them: %v", g.o.Tunnels-1, kubeerr.Plain("the API server", g.tellErr))}}
}

func (g *Gateway) writeTunnels(ctx context.Context, secret *corev1.Secret, tunnels string) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	with := secret.DeepCopy()
	if with.Data[keyTunnels] = []byte(tunnels); tunnels == "" {
		delete(with.Data, keyTunnels)
	}
	return g.client.Patch(ctx, with, client.MergeFromWithOptions(secret, client.MergeFromWithOptimisticLock{}))
}
