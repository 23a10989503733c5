package peerings

import (
	"cmp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/facts"
)

// keys are the WireGuard keys of the sessions with the peer, as the gateway reports them. was is the status before. Without
// a session it has that of the last one, so that a peer which had moved to the next key does not lag when it is away.
func (s *peeringState) keys(was isthmus.KeysStatus, now metav1.Time) isthmus.KeysStatus {
	if s.endpoint == nil {
		return isthmus.KeysStatus{}
	}
	own := shortKey(s.endpoint.Status.Connection.PeerConfiguration[v1alpha1.ConfigOwnKey])
	k := isthmus.KeysStatus{Ours: cmp.Or(own, was.Ours), Theirs: shortKey(s.endpoint.Spec.BackendConfig[v1alpha1.ConfigPublicKey])}
	if s.original != nil && k.Ours != shortKey(s.original.Spec.BackendConfig[v1alpha1.ConfigPublicKey]) {
		k.Lags = k.Ours != "" || s.rotates || was.Lags // a peer without any session lags from a rotation on
	}
	since := func(is, before string, at *metav1.Time) *metav1.Time {
		switch {
		case is == "":
			return nil
		case is == before && at != nil:
			return at
		}
		return &now
	}
	k.OursSince, k.TheirsSince = since(k.Ours, was.Ours, was.OursSince), since(k.Theirs, was.Theirs, was.TheirsSince)
	return k
}

// missedKey reports whether our key has rotated without the peer, which has no tunnel until it knows the present one.
func (s *peeringState) missedKey() bool {
	c := s.endpoint.Status.Connection
	return !s.rotates && c.Status != v1alpha1.Connected && c.PeerConfiguration[v1alpha1.ConfigOwnKey] == "" &&
		s.keys(s.peering.Status.Keys, metav1.Time{}).Lags
}

// rotates reports whether peers get the next key of our gateway.
func rotates(f facts.Facts) bool {
	return f.Keys.Next != ([32]byte{}) && f.PublicKey == fabric.PublicKeys(f.Keys.Next, 1)[0]
}

// shortKey is a public key for people; empty: it is none.
func shortKey(text string) string {
	key, err := fabric.ParseKey(text)
	if err != nil {
		return ""
	}
	return keyring.Fingerprint(key)
}
