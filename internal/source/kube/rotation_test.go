package kube

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

func TestPeersAreUnawareOfAKeyIfAllConnectedPeersLag(t *testing.T) {
	peer := func(id string, status v1alpha1.ConnectionStatus) PeerReport {
		return PeerReport{ID: id, Status: status}
	}
	for name, tc := range map[string]struct {
		peers   []PeerReport
		lagging []string
		want    bool
	}{
		"there is no peer":                    {nil, nil, false},
		"all lag":                             {[]PeerReport{peer("a", v1alpha1.Connected), peer("b", v1alpha1.Connected)}, []string{"a", "b"}, true},
		"one has moved":                       {[]PeerReport{peer("a", v1alpha1.Connected), peer("b", v1alpha1.Connected)}, []string{"a"}, false},
		"one who is away has not moved":       {[]PeerReport{peer("a", v1alpha1.Connected), peer("b", v1alpha1.Connecting)}, []string{"a"}, true},
		"all who lag are away":                {[]PeerReport{peer("a", v1alpha1.Connecting)}, []string{"a"}, false},
		"one who lags is away, one has moved": {[]PeerReport{peer("a", v1alpha1.Connecting), peer("b", v1alpha1.Connected)}, []string{"a"}, false},
	} {
		if got := peersUnaware(Report{Peers: tc.peers}, tc.lagging); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// An administrator who offers a key must learn that the gateway may not read it. An API server
// that cannot be reached is not logged here.
func TestForbiddenReadOfAnOfferedKeyIsLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, keyring.OfferName, errors.New("no rights"))
	for _, tc := range []struct {
		err    error
		logged int
	}{{forbidden, 1}, {errors.New("connection refused"), 0}} {
		log.Reset()
		w := &writer{Gateway: &Gateway{log: slog.New(slog.NewTextHandler(&log, nil)), client: interceptor.NewClient(nil, interceptor.Funcs{
			Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
				return tc.err
			},
		})}}
		now := time.Now()
		for i := range 3 {
			if key, _ := w.offered(t.Context(), now.Add(time.Duration(i)*offerInterval)); key != ([32]byte{}) {
				t.Errorf("%v: a key", tc.err)
			}
		}
		if logged := strings.Count(log.String(), keyring.OfferName); (logged > 0) != (tc.logged > 0) || strings.Count(log.String(), "\n") != tc.logged {
			t.Errorf("%v: log: %s", tc.err, log.String())
		}
	}
}

// Rotation by age resumes after the Secret with the offered key was deleted, but a single
// failed read does not count as deletion.
func TestOfferedKeyCountsAsMissingOnlyAfterRepeatedReads(t *testing.T) {
	absent := apierrors.NewNotFound(schema.GroupResource{Resource: "secrets"}, keyring.OfferName)
	var err error
	offered := keyring.New()
	w := &writer{Gateway: &Gateway{log: slog.New(slog.DiscardHandler), client: interceptor.NewClient(nil, interceptor.Funcs{
		Get: func(_ context.Context, _ client.WithWatch, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
			o.(*corev1.Secret).Data = map[string][]byte{keyring.FieldPrivate: keyring.Text(offered)}
			return err
		},
	})}}
	now := time.Now()
	for i, tc := range []struct {
		err  error
		want time.Duration
	}{
		{nil, 0}, {absent, 0}, {absent, offerInterval}, {absent, 2 * offerInterval}, {nil, 0}, {absent, 0}, {absent, offerInterval},
		{apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, keyring.OfferName, errors.New("no rights")), 0}, {absent, 0}, {absent, offerInterval},
		{errors.New("connection refused"), 0}, {absent, 0},
	} {
		err = tc.err
		if _, absence := w.offered(t.Context(), now.Add(time.Duration(i)*offerInterval)); absence != tc.want {
			t.Errorf("read %d, %v: gone for %v, want %v", i, err, absence, tc.want)
		}
	}
}
