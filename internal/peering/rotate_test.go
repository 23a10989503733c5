package peering

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

// A key that cannot be read can be replaced, but does not rotate. What is said afterwards is what is known then.
func TestAKeyIsReplacedWhateverTheSecretHolds(t *testing.T) {
	for name, data := range map[string]map[string][]byte{
		"nothing":                nil,
		"a key that is none":     {keyring.FieldPrivate: []byte("x"), keyring.FieldNext: []byte("y")},
		"a key that is a key":    {keyring.FieldPrivate: keyring.Text(keyring.New())},
		"a public key by itself": {keyring.FieldPublic: keyring.Text(keyring.New())},
	} {
		var written *corev1.Secret
		c := cluster.Of(interceptor.NewClient(nil, interceptor.Funcs{
			Get: func(_ context.Context, _ client.WithWatch, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
				o.SetNamespace(key.Namespace)
				o.SetName(key.Name)
				o.(*corev1.Secret).Data = data
				return nil
			},
			Patch: func(_ context.Context, _ client.WithWatch, o client.Object, _ client.Patch, _ ...client.PatchOption) error {
				written = o.(*corev1.Secret)
				return nil
			},
		}), "isthmus-system")
		if _, _, unreadable := keyring.Read(data); unreadable != nil {
			if err := RotateKey(t.Context(), c, RotateOptions{}); err == nil || written != nil {
				t.Errorf("%s: it rotates: %v", name, err)
			}
		}
		var said []string
		err := RotateKey(t.Context(), c, RotateOptions{Now: true, Report: func(line string) { said = append(said, line) }})
		if err != nil || written == nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		ring, wrong, err := keyring.Read(written.Data)
		if err != nil || wrong != nil || string(written.Data[keyring.FieldPrivate]) == string(data[keyring.FieldPrivate]) {
			t.Errorf("%s: %v, %v", name, err, wrong)
		}
		if all := strings.Join(said, "\n"); !strings.Contains(all, shortKey(ring.Private)) || !strings.Contains(all, "gateways that have read it") {
			t.Errorf("%s: %s", name, all)
		}
	}
}
