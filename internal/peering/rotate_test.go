package peering

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

// An unreadable key can be replaced, but not rotated. The final report describes the new key.
func TestUnreadableKeyCanBeReplacedButNotRotated(t *testing.T) {
	for name, data := range map[string]map[string][]byte{
		"nothing":                nil,
		"a key that is none":     {keyring.FieldPrivate: []byte("x"), keyring.FieldNext: []byte("y")},
		"a key that is a key":    {keyring.FieldPrivate: keyring.Text(keyring.New())},
		"a public key by itself": {keyring.FieldPublic: keyring.Text(keyring.New())},
	} {
		var written *corev1.Secret
		c := clusterWith(data, &written)
		if _, _, unreadable := keyring.Read(data); unreadable != nil {
			if err := RotateKey(t.Context(), c, RotateOptions{}); err == nil || written != nil {
				t.Errorf("%s: it rotates: %v", name, err)
			}
		}
		var reported []string
		err := RotateKey(t.Context(), c, RotateOptions{Now: true, Report: func(line string) { reported = append(reported, line) }})
		if err != nil || written == nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		ring, wrong, err := keyring.Read(written.Data)
		if err != nil || wrong != nil || string(written.Data[keyring.FieldPrivate]) == string(data[keyring.FieldPrivate]) {
			t.Errorf("%s: %v, %v", name, err, wrong)
		}
		if all := strings.Join(reported, "\n"); !strings.Contains(all, shortKey(ring.Private)) || !strings.Contains(all, "accepts the old key until it reads the new one") {
			t.Errorf("%s: %s", name, all)
		}
	}
}

// A rotation can be aborted until a peer may have the next key.
func TestRotationCanBeAbortedBeforeItsPublication(t *testing.T) {
	private, next, now := keyring.New(), keyring.New(), time.Now()
	first := keyring.Replace(map[string][]byte{}, private, now)
	begun := keyring.Begin(first, next, now)
	taken := keyring.Take(first, keyring.Ring{Private: private}, next, now)
	replaced := keyring.Begin(taken, keyring.New(), now)
	ring, _, err := keyring.Read(begun)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		data map[string][]byte
		want string // part of the error; empty: the rotation is aborted
		last bool   // the offered key is not used again
	}{
		"begun":                {begun, "", false},
		"told":                 {keyring.Publish(begun, ring, 1, now), "no longer accept the current one", false},
		"not one":              {first, "no rotation", false},
		"offered":              {taken, "", true},
		"begun after an offer": {replaced, "", false},
	} {
		var written *corev1.Secret
		reported := ""
		err := RotateKey(t.Context(), clusterWith(tc.data, &written), RotateOptions{Abort: true, Report: func(line string) { reported += line }})
		switch {
		case tc.want != "":
			if err == nil || !strings.Contains(err.Error(), tc.want) || written != nil {
				t.Errorf("%s: %v", name, err)
			}
		case err != nil || written == nil:
			t.Errorf("%s: %v", name, err)
		default:
			if ring, wrong, err := keyring.Read(written.Data); err != nil || wrong != nil || ring.Private != private || ring.Next != ([32]byte{}) {
				t.Errorf("%s: %v, %v", name, err, wrong)
			}
			if strings.Contains(reported, keyring.OfferName) != tc.last || strings.Contains(reported, "gateway.rotateKeys") == tc.last {
				t.Errorf("%s: %s", name, reported)
			}
		}
	}
}

// clusterWith returns a cluster whose Secret of keys has this data. A write stores the new
// Secret in written.
func clusterWith(data map[string][]byte, written **corev1.Secret) *cluster.Cluster {
	return cluster.Of(interceptor.NewClient(nil, interceptor.Funcs{
		Get: func(_ context.Context, _ client.WithWatch, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
			o.SetNamespace(key.Namespace)
			o.SetName(key.Name)
			o.(*corev1.Secret).Data = data
			return nil
		},
		Patch: func(_ context.Context, _ client.WithWatch, o client.Object, _ client.Patch, _ ...client.PatchOption) error {
			*written = o.(*corev1.Secret)
			return nil
		},
	}), "isthmus-system")
}
