package kube

import (
	"context"
	"errors"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

// Rotation is the progress of a key rotation in the active gateway.
type Rotation struct {
	Next    [32]byte // the next private key, to which the gateway responds already; zero: no rotation
	Lagging []string // sorted IDs of peers without a session that uses the next key
}

// rotate takes the next step of a rotation. Package keyring decides from the Secret which step
// is next.
func (w *writer) rotate(ctx context.Context, r Report) {
	w.mu.Lock()
	desired := w.desired
	w.mu.Unlock()
	ring := desired.snapshot.Keys
	if !desired.valid || desired.err != nil || desired.remembered != nil { // the current content of the Secret is unknown
		return
	}
	now := time.Now()
	lagging := lagging(desired.snapshot, r)
	if ring.Next == ([32]byte{}) || r.Rotation.Next != ring.Next || len(lagging) > 0 || w.nextKey != ring.Next {
		w.lagEnded, w.nextKey = now, ring.Next
	}
	w.metrics.rotation.Store(&rotationState{ring, lagging})
	offered, absence := w.offered(ctx, now)
	step := ring.Step(keyring.Seen{Now: now, Answering: r.Rotation.Next == ring.Next, Offered: offered, Absent: absence, Lagging: len(lagging), Moved: now.Sub(w.lagEnded), PeersUnaware: peersUnaware(r, lagging),
		Age: w.o.RotateKeys, Patience: w.o.RotationPatience})
	if step == keyring.Nothing {
		return
	}
	have := new(corev1.Secret)
	if err := w.objects.Get(ctx, client.ObjectKey{Namespace: w.o.Namespace, Name: keyring.SecretName}, have); err != nil {
		return // the next round tries again
	}
	if current, _, err := keyFrom(have); err != nil || current != ring || !w.due(have, now) {
		return // the Secret has changed since
	}
	want := have.DeepCopy()
	switch step {
	case keyring.Start:
		want.Data = keyring.Begin(have.Data, keyring.New(), now)
	case keyring.Accept:
		want.Data = keyring.Take(have.Data, ring, offered, now)
	case keyring.Announce:
		want.Data = keyring.Publish(have.Data, ring, w.o.Tunnels, now)
	case keyring.Finish:
		want.Data = keyring.Promote(have.Data, ring, now)
	}
	if w.patch(ctx, "Secret", have, want, false) {
		w.log.Info("key rotation advanced", "step", string(step), "lagging", lagging)
	}
}

// offerInterval is how often the Secret with an offered key is read. Few installations have
// that Secret, so it is not watched.
const offerInterval = 10 * time.Second

// offer is the result of reading the Secret with an offered key.
type offer struct {
	key        [32]byte  // zero: no key is offered
	absent     time.Time // when reads began to find no Secret; zero: the last read found the Secret or failed
	next       time.Time
	lastLogged string // last logged problem
}

// offered returns the private key in a Secret that another program maintains. absence is how long
// that Secret has been missing. It is 0 if the Secret exists, or if the last read failed. key is
// zero if the Secret is missing or contains no key.
func (w *writer) offered(ctx context.Context, now time.Time) (key [32]byte, absence time.Duration) {
	if !now.Before(w.offer.next) {
		w.readOffer(ctx, now)
	}
	if !w.offer.absent.IsZero() {
		absence = now.Sub(w.offer.absent)
	}
	return w.offer.key, absence
}

func (w *writer) readOffer(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	var secret corev1.Secret
	wrong := ""
	err := w.client.Get(ctx, client.ObjectKey{Namespace: w.o.Namespace, Name: keyring.OfferName}, &secret)
	absent := w.offer.absent
	w.offer.absent = time.Time{}
	if err == nil {
		w.offer.key, err = keyring.Key(secret.Data, keyring.FieldPrivate)
		if err == nil && w.offer.key == ([32]byte{}) {
			err = errors.New("is zero; want a WireGuard private key")
		}
		if err != nil {
			w.offer.key, wrong = [32]byte{}, "data."+keyring.FieldPrivate+" "+err.Error()
		}
	} else if apierrors.IsNotFound(err) {
		w.offer.key = [32]byte{}
		if w.offer.absent = absent; absent.IsZero() {
			w.offer.absent = now
		}
	} else if apierrors.IsForbidden(err) { // after other errors keep the last result, because the API server may be unavailable
		wrong = err.Error()
	}
	if w.offer.next = now.Add(offerInterval); wrong != "" && wrong != w.offer.lastLogged {
		w.log.Warn("cannot use the offered private key", "secret", keyring.OfferName, "problem", wrong)
	}
	w.offer.lastLogged = wrong
}

// due reports whether the Secret may be written now.
func (w *writer) due(o client.Object, now time.Time) bool { return w.memoryOf(o).due(o, now) }

// lagging returns the IDs of the peers that have no session with the next key according to the
// gateway's report. A peer that is missing from the report lags, too.
func lagging(s Snapshot, r Report) []string {
	if s.Keys.Next == ([32]byte{}) {
		return nil
	}
	all := slices.Clone(r.Rotation.Lagging)
	known := make(map[string]bool, len(r.Peers))
	for _, p := range r.Peers {
		known[p.ID] = true
	}
	for _, p := range s.Gateway.Peers {
		if !known[p.ID] {
			all = append(all, p.ID)
		}
	}
	slices.Sort(all)
	return all
}

// peersUnaware reports whether some peer is connected and all connected peers lag.
func peersUnaware(r Report, lagging []string) bool {
	connected := 0
	for _, p := range r.Peers {
		switch {
		case p.Status != v1alpha1.Connected:
		case !slices.Contains(lagging, p.ID):
			return false
		default:
			connected++
		}
	}
	return connected > 0
}

// rotationState is the state of a rotation for the metrics.
type rotationState struct {
	ring    keyring.Ring
	lagging []string
}
