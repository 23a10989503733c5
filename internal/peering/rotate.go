package peering

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// RotateOptions are the choices of RotateKey.
type RotateOptions struct {
	// Now replaces the key at once, without waiting for peers, so that a stolen key becomes
	// useless.
	Now bool
	// Abort drops the next key. It fails once a peer may have the next key.
	Abort bool
	// Wait is how long to wait for the end of the rotation. With 0, the command does not wait.
	Wait   time.Duration
	Report func(string) // called with a line for each change
}

// rotateLook is how often RotateKey reads the state while it waits.
const rotateLook = time.Second

// errRotating is returned when the rotation has not finished in time.
var errRotating = errors.New("the rotation is not complete")

// RotateKey starts a rotation of the WireGuard key of a cluster, unless one is in progress, and
// reports its progress.
func RotateKey(ctx context.Context, c *cluster.Cluster, o RotateOptions) error {
	secret, ring, err := readKeys(ctx, c)
	if secret == nil || err != nil && !o.Now { // with Now, even an unreadable key can be replaced
		return err
	}
	if o.Abort {
		return abortRotation(ctx, c, secret, ring, o.Report)
	}
	now, known := c.Now()
	if !known {
		now = time.Now()
	}
	want := secret.DeepCopy()
	switch {
	case o.Now:
		want.Data = keyring.Replace(secret.Data, keyring.New(), now)
	case ring.Next == ([32]byte{}):
		want.Data = keyring.Begin(secret.Data, keyring.New(), now)
	}
	if o.Now || ring.Next == ([32]byte{}) {
		if err := writeKeys(ctx, c, secret, want); err != nil {
			return err
		}
		if ring, _, err = keyring.Read(want.Data); err != nil {
			return err
		}
	}
	if o.Now {
		o.Report(fmt.Sprintf("the key is replaced: %s; peers are out of reach until they have the new key; a gateway accepts the old key until it reads the new one from the API server", shortKey(ring.Private)))
		return nil
	}
	startRing := ring
	reported := ""
	for until := time.Now().Add(o.Wait); ; {
		text, over, err := rotation(ctx, c, startRing, ring, now)
		if err != nil {
			return err
		}
		if text != reported {
			o.Report(text)
			reported = text
		}
		switch {
		case over || o.Wait == 0:
			return nil
		case time.Now().After(until):
			return errRotating
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(rotateLook):
		}
		if _, ring, err = readKeys(ctx, c); err != nil {
			return err
		}
	}
}

// abortRotation drops the next key. It returns an error once a peer may have the next key, because
// a peer that uses the next key no longer accepts the current one.
func abortRotation(ctx context.Context, c *cluster.Cluster, secret *corev1.Secret, ring keyring.Ring, report func(string)) error {
	switch {
	case ring.Next == ([32]byte{}):
		return fmt.Errorf("%s: no rotation of the key is in progress", c)
	case ring.Published:
		return fmt.Errorf("%s: peers already have the new key %s, and those that use it no longer accept the current one; wait until the rotation ends, then begin another one if needed", c, shortKey(ring.Next))
	}
	want := secret.DeepCopy()
	want.Data = keyring.Abandon(secret.Data)
	if err := writeKeys(ctx, c, secret, want); err != nil {
		return err
	}
	text := fmt.Sprintf("the rotation is aborted: the key stays %s, and no peer got %s", shortKey(ring.Private), shortKey(ring.Next))
	if fabric.PublicKeys(ring.Next, 1)[0] == ring.Offered {
		text += fmt.Sprintf("; gateways do not use that key again; to rotate to another key, put it into Secret %s", keyring.OfferName)
	} else {
		text += "; if the age of the key began the rotation, the gateway begins another one within seconds; to prevent that, set the chart's value gateway.rotateKeys to 0s first"
	}
	report(text)
	return nil
}

// writeKeys writes the Secret with the keys, unless it has changed since it was read.
func writeKeys(ctx context.Context, c *cluster.Cluster, have, want *corev1.Secret) error {
	if err := c.Client.Patch(ctx, want, client.MergeFromWithOptions(have, client.MergeFromWithOptimisticLock{})); err != nil {
		return c.Explain("Secret "+client.ObjectKeyFromObject(have).String(), err)
	}
	return nil
}

// rotation returns the progress of a rotation. startRing holds the keys when the rotation started,
// and ring holds the current keys.
func rotation(ctx context.Context, c *cluster.Cluster, startRing, ring keyring.Ring, now time.Time) (text string, over bool, err error) {
	if ring.Private == startRing.Next {
		return fmt.Sprintf("the key is rotated: %s", shortKey(ring.Private)), true, nil
	}
	if ring.Next != startRing.Next {
		return "another new key has replaced the one of this rotation", true, nil
	}
	since := ""
	if begun := ring.NextSince; !begun.IsZero() && now.Sub(begun) > time.Minute {
		since = ", begun " + begun.UTC().Format(time.RFC3339)
	}
	head := fmt.Sprintf("the key %s rotates to %s%s", shortKey(ring.Private), shortKey(ring.Next), since)
	if !ring.Published {
		return head + ": waiting for the gateway to accept the new key", false, nil
	}
	moved, lagging, err := movedTo(ctx, c, fabric.PublicKeys(ring.Next, 1)[0])
	if err != nil {
		return "", false, err
	}
	text = fmt.Sprintf("%s: %d of %d peers use the new key", head, moved, moved+len(lagging))
	if len(lagging) > 0 {
		text += "; waiting for " + strings.Join(lagging, ", ")
	}
	return text, false, nil
}

// movedTo returns the number of peers whose session uses public, one of our public keys. It also
// returns the names of the other peers.
func movedTo(ctx context.Context, c *cluster.Cluster, public [32]byte) (moved int, lagging []string, err error) {
	var endpoints v1alpha1.TunnelEndpointList
	if err := c.Client.List(ctx, &endpoints); err != nil {
		return 0, nil, c.Explain("TunnelEndpoints", err)
	}
	for i := range endpoints.Items {
		te := &endpoints.Items[i]
		switch {
		case !te.DeletionTimestamp.IsZero():
		case te.Status.Connection.PeerConfiguration[v1alpha1.ConfigOwnKey] == string(keyring.Text(public)):
			moved++
		default:
			lagging = append(lagging, safetext.Of(te.Spec.ClusterIdentity.ClusterName))
		}
	}
	slices.Sort(lagging)
	return moved, lagging, nil
}

// readKeys reads the Secret with the WireGuard keys. It returns the Secret even if the keys in
// it are unreadable.
func readKeys(ctx context.Context, c *cluster.Cluster) (*corev1.Secret, keyring.Ring, error) {
	var secret corev1.Secret
	name := types.NamespacedName{Namespace: c.Namespace, Name: keyring.SecretName}
	err := c.Client.Get(ctx, name, &secret)
	switch {
	case apierrors.IsNotFound(err):
		return nil, keyring.Ring{}, fmt.Errorf("%s: Secret %s not found; the gateway creates it when it starts", c, name)
	case err != nil:
		return nil, keyring.Ring{}, c.Explain("Secret "+name.String(), err)
	}
	ring, _, err := keyring.Read(secret.Data)
	if err != nil {
		return &secret, ring, fmt.Errorf("%s: Secret %s: %w", c, name, err)
	}
	return &secret, ring, nil
}

func shortKey(private [32]byte) string {
	return keyring.Fingerprint(fabric.PublicKeys(private, 1)[0])
}
