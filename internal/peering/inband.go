package peering

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/netconfig"
)

// checkPath returns an error if the peer's manager cannot reach the API server of s. A manager that
// uses the tunnel (in-band) always can. If the manager of s uses the tunnel, checkPath also reads
// inBandCA, the certificates with which the manager of s verifies the peer's API server.
func (s *side) checkPath(ctx context.Context, flag string) error {
	if s.inBand {
		var err error
		if s.inBandCA, err = ownAuthority(ctx, s.peer.Cluster); err != nil {
			return err
		}
	}
	if s.peer.inBand {
		return nil
	}
	if _, err := kubeconfigFor(s.Cluster, "", ""); err != nil {
		return err
	}
	return reachable(s.Cluster, flag)
}

// ownAuthority returns the certificates, in PEM, with which the Pods of a cluster verify their API
// server.
func ownAuthority(ctx context.Context, c *cluster.Cluster) ([]byte, error) {
	published := &corev1.ConfigMap{}
	name := client.ObjectKey{Namespace: c.Namespace, Name: isthmus.ConfigMapRootCA}
	switch err := c.Client.Get(ctx, name, published); {
	case apierrors.IsNotFound(err): // the controller that publishes the ConfigMap is switched off
		return authorityOf(c)
	case err != nil:
		return nil, c.Explain("ConfigMap "+name.String(), err)
	}
	ca := published.Data["ca.crt"]
	if ca == "" { // without these certificates, the manager would accept any server that has a certificate of the system's authorities
		return nil, fmt.Errorf("ConfigMap %s of %s has no ca.crt", name, c)
	}
	return []byte(ca), nil
}

// identityWith returns the kubeconfig, with this token, that our manager uses for the peer's API
// server.
func (s *side) identityWith(token string) ([]byte, error) {
	if !s.inBand {
		return kubeconfigFor(s.peer.Cluster, token, s.peer.namespace)
	}
	return kubeconfigWith(s.peer.Cluster, &clientcmdapi.Cluster{Server: isthmus.InBandServer, CertificateAuthorityData: s.inBandCA}, token, s.peer.namespace)
}

// setInBand sets spec.inBand of an existing Peering to value. It does nothing if the Peering
// already has the value, or if s.inBand, the desired value, is another one.
func (s *side) setInBand(ctx context.Context, value bool) (string, error) {
	if !s.exists || s.inBand != value || s.peering.Spec.InBand == value {
		return "", nil
	}
	patch := fmt.Appendf(nil, `{"spec":{"inBand":%t}}`, value)
	if err := s.Client.Patch(ctx, s.peering, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(cluster.FieldManager)); err != nil {
		return "", s.Explain("spec.inBand of Peering "+s.peering.Name, err)
	}
	if value {
		return fmt.Sprintf("%s: its manager and that of %s use the tunnel", s.Cluster, s.peer.Cluster), nil
	}
	return fmt.Sprintf("%s: its manager and that of %s no longer use the tunnel", s.Cluster, s.peer.Cluster), nil
}

// published reports whether our manager has reached the peer's API server and published our
// NetworkConfig there. The condition Ready does not imply that: it only means that traffic flows.
func (s *side) published(p *isthmus.Peering) bool {
	return health.IsTrue(p, isthmus.ConditionIdentity) && health.IsTrue(p, isthmus.ConditionPublished)
}

// carry does the work of our manager until there is a tunnel: it copies our NetworkConfig to the
// peer, and the peer's answer back. It sets s.carried once the peer's copy requests in-band. Before
// that, the conditions may still describe the path outside the tunnel.
func (s *side) carry(ctx context.Context) error {
	original := &v1alpha1.NetworkConfig{}
	name := client.ObjectKey{Namespace: s.namespace, Name: s.peer.Identity.UniqueName()}
	if err := s.Client.Get(ctx, name, original); apierrors.IsNotFound(err) || err == nil && !original.DeletionTimestamp.IsZero() {
		return nil // the manager creates the NetworkConfig
	} else if err != nil {
		return s.Explain("NetworkConfig "+name.String(), err)
	}
	want, have := netconfig.CopyOf(original, s.Identity.ClusterID, s.peer.namespace), &v1alpha1.NetworkConfig{}
	what := "NetworkConfig " + want.Namespace + "/" + want.Name
	switch err := s.peer.Client.Get(ctx, client.ObjectKeyFromObject(want), have); {
	case apierrors.IsNotFound(err):
		return s.peer.Explain(what, s.peer.Client.Create(ctx, want, client.FieldOwner(cluster.FieldManager)))
	case err != nil:
		return s.peer.Explain(what, err)
	case !have.DeletionTimestamp.IsZero():
		return nil
	case !equality.Semantic.DeepEqual(have.Spec, want.Spec):
		have.Spec = want.Spec
		if err := s.peer.Client.Update(ctx, have, client.FieldOwner(cluster.FieldManager)); !apierrors.IsConflict(err) {
			return s.peer.Explain(what, err)
		}
		return nil
	}
	s.carried = want.Spec.BackendConfig[v1alpha1.ConfigInBand] == "true"
	answer, answered := netconfig.AnswerTo(original, have)
	if !answered || equality.Semantic.DeepEqual(answer, original.Status) {
		return nil
	}
	before := original.DeepCopy()
	original.Status = answer
	err := s.Client.Status().Patch(ctx, original, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(cluster.FieldManager))
	if apierrors.IsConflict(err) {
		return nil
	}
	return s.Explain("status of NetworkConfig "+name.String(), err)
}
