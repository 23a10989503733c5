package manager

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

func TestKeysOfAPeering(t *testing.T) {
	text := func(n byte) v1alpha1.ConfigValue { return v1alpha1.ConfigValue(keyring.Text(testKey(n))) }
	first, second := metav1.NewTime(time.Unix(1000, 0)), metav1.NewTime(time.Unix(2000, 0))
	s := peeringState{}
	if got := s.keys(isthmus.KeysStatus{Ours: "x"}, first); got != (isthmus.KeysStatus{}) {
		t.Errorf("without a tunnel: %+v", got)
	}
	s.endpoint, s.original = new(v1alpha1.TunnelEndpoint), new(v1alpha1.NetworkConfig)
	s.endpoint.Spec.BackendConfig = v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: text(2)}
	s.original.Spec.BackendConfig = v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: text(1)}
	k := s.keys(isthmus.KeysStatus{}, first)
	if k.Ours != "" || k.Lags || k.OursSince != nil || k.Theirs != keyring.Fingerprint(testKey(2)) {
		t.Errorf("without a session: %+v", k)
	}
	s.endpoint.Status.Connection.PeerConfiguration = v1alpha1.PeerConfiguration{v1alpha1.ConfigOwnKey: text(1)}
	k = s.keys(k, second)
	if k.Ours != keyring.Fingerprint(testKey(1)) || k.Lags || !k.OursSince.Equal(&second) || !k.TheirsSince.Equal(&first) {
		t.Errorf("with a session: %+v", k)
	}
	s.original.Spec.BackendConfig[v1alpha1.ConfigPublicKey] = text(3)
	if k = s.keys(k, first); !k.Lags || !k.OursSince.Equal(&second) {
		t.Errorf("while it rotates: %+v", k)
	}
}
