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

// keys returns the WireGuard keys of the sessions with the peer, as the gateway reports them.
// previous is the previous status. Without a session, the key of the last session stays. So a peer
// that has already used the next key does not count as lagging while it is disconnected.
func (s *peeringState) keys(previous isthmus.KeysStatus, now metav1.Time) isthmus.KeysStatus {
	if s.endpoint == nil {
		return isthmus.KeysStatus{}
	}
	own := shortKey(s.endpoint.Status.Connection.PeerConfiguration[v1alpha1.ConfigOwnKey])
	k := isthmus.KeysStatus{Ours: cmp.Or(own, previous.Ours), Theirs: shortKey(s.endpoint.Spec.BackendConfig[v1alpha1.ConfigPublicKey])}
	if s.original != nil && k.Ours != shortKey(s.original.Spec.BackendConfig[v1alpha1.ConfigPublicKey]) {
		k.Lags = k.Ours != "" || s.rotates || previous.Lags // a peer that never had a session lags once a rotation begins
	}
	since := func(current, before string, stored *metav1.Time) *metav1.Time {
		switch {
		case current == "":
			return nil
		case current == before && stored != nil:
			return stored
		}
		return &now
	}
	k.OursSince, k.TheirsSince = since(k.Ours, previous.Ours, previous.OursSince), since(k.Theirs, previous.Theirs, previous.TheirsSince)
	return k
}

// missedKey reports whether the peer missed a rotation of our key. Such a peer has no tunnel until
// it gets the present key.
func (s *peeringState) missedKey() bool {
	c := s.endpoint.Status.Connection
	return !s.rotates && c.Status != v1alpha1.Connected && c.PeerConfiguration[v1alpha1.ConfigOwnKey] == "" &&
		s.keys(s.peering.Status.Keys, metav1.Time{}).Lags
}

// rotates reports whether our gateway's key rotates and peers get the next key.
func rotates(f facts.Facts) bool {
	return f.Keys.Next != ([32]byte{}) && f.PublicKey == fabric.PublicKeys(f.Keys.Next, 1)[0]
}

// shortKey returns a short form of a public key for people. It returns "" if text is not a key.
func shortKey(text string) string {
	key, err := fabric.ParseKey(text)
	if err != nil {
		return ""
	}
	return keyring.Fingerprint(key)
}
