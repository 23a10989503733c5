package peering

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// pinOf returns annotations that distinguish a cluster from another one with the same ID and name.
func pinOf(c *cluster.Cluster) (map[string]string, error) {
	ca, err := authorityOf(c)
	if err != nil {
		return nil, err
	}
	return map[string]string{isthmus.AnnotationPeerUID: c.UID, isthmus.AnnotationPeerAuthority: fingerprint(ca)}, nil
}

// fingerprint hashes the set of certificates in a PEM file. The order of the certificates and
// the text between them do not matter.
func fingerprint(ca []byte) string {
	var sums []string
	for block, rest := pem.Decode(ca); block != nil; block, rest = pem.Decode(rest) {
		sum := sha256.Sum256(block.Bytes)
		sums = append(sums, string(sum[:]))
	}
	if len(sums) == 0 {
		return "system"
	}
	slices.Sort(sums)
	sum := sha256.Sum256([]byte(strings.Join(slices.Compact(sums), "")))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// checkPin returns an error if the peer is not the pinned cluster, unless replace is set. A Peering
// that a person wrote has no pin, and accepts any cluster. If only the certificate authority
// differs, the peer is still the pinned cluster if it has the identity that we issued to it.
func (s *side) checkPin(ctx context.Context, replace bool) error {
	pin, err := pinOf(s.peer.Cluster)
	if err != nil {
		return err
	}
	s.pinned = pin
	if !s.exists {
		s.peering.Annotations = pin
		return nil
	}
	var wrong []string
	for _, what := range []struct{ annotation, differs string }{
		{isthmus.AnnotationPeerUID, "its namespace kube-system has the UID %s, not %s"},
		{isthmus.AnnotationPeerAuthority, "its API server has the certificate authority %s, not %s"},
	} {
		if had := s.peering.Annotations[what.annotation]; had != "" && had != pin[what.annotation] {
			wrong = append(wrong, fmt.Sprintf(what.differs, pin[what.annotation], safetext.Of(had)))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	if s.another = replace; replace {
		return nil
	}
	if s.peering.Annotations[isthmus.AnnotationPeerUID] == pin[isthmus.AnnotationPeerUID] {
		if ok, err := s.peer.holdsItsIdentity(ctx); err != nil || ok {
			return err
		}
		wrong = append(wrong, "it has no valid identity at this cluster, which would prove that only its authority changed")
	}
	return fmt.Errorf("%s: context %s is a cluster with the name and ID %s (%s), but Peering %s was created with another cluster of that name and ID: %s. "+
		"The Peering and the rights of the old cluster stay in force. "+
		"If the cluster was recreated, or its certificate authority changed, --replace revokes the rights of the old one and joins this one",
		s.Cluster, s.peer.Context, safetext.Of(s.peer.Identity.ClusterName), safetext.Of(s.peer.Identity.ClusterID), s.peering.Name, strings.Join(wrong, "; "))
}

// holdsItsIdentity reports whether s has a token that its peer accepts. The token proves that s is
// the cluster to which the peer issued it.
func (s *side) holdsItsIdentity(ctx context.Context) (bool, error) {
	var secret corev1.Secret
	err := s.Client.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: s.secret}, &secret)
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return false, nil
	}
	if err != nil {
		return false, s.Explain("Secret "+s.namespace+"/"+s.secret, err)
	}
	token := tokenIn(secret.Data[isthmus.SecretKubeconfig])
	if token == "" {
		return false, nil
	}
	wrong, err := s.peer.tokenProblem(ctx, token)
	if apierrors.IsNotFound(err) { // the ServiceAccount was deleted
		return false, nil
	}
	return err == nil && wrong == "", err
}

// tokenIn returns the token in a kubeconfig's current context, or "" if it has none.
func tokenIn(kubeconfig []byte) string {
	config, err := clientcmd.Load(kubeconfig)
	if err != nil || config.Contexts[config.CurrentContext] == nil {
		return ""
	}
	if user := config.AuthInfos[config.Contexts[config.CurrentContext].AuthInfo]; user != nil {
		return user.Token
	}
	return ""
}

// revokeAnother revokes all tokens of the previous peer. It also does so if there is no Peering,
// because then nothing shows to which cluster the tokens were issued.
func (s *side) revokeAnother(ctx context.Context) (string, error) {
	if s.exists && !s.another {
		return "", nil
	}
	err := s.Client.Delete(ctx, &corev1.ServiceAccount{ObjectMeta: s.inTenant(peerAccount)})
	if apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", s.Explain("delete ServiceAccount "+s.namespace+"/"+peerAccount, err)
	}
	return fmt.Sprintf("%s: the rights of the previous %s are revoked", s.Cluster, s.peer.Cluster), nil
}

// setPin records the identity of the peer's cluster in the Peering.
func (s *side) setPin(ctx context.Context) (string, error) {
	have := maps.Clone(s.peering.Annotations)
	maps.DeleteFunc(have, func(name, _ string) bool { _, ok := s.pinned[name]; return !ok })
	if maps.Equal(have, s.pinned) {
		return "", nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": s.pinned}})
	if err != nil {
		return "", err
	}
	err = s.Client.Patch(ctx, s.peering, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(cluster.FieldManager))
	if err != nil {
		return "", s.Explain("annotate Peering "+s.peering.Name, err)
	}
	return fmt.Sprintf("%s: Peering %s is for the cluster whose kube-system has the UID %s", s.Cluster, s.peering.Name, s.peer.UID), nil
}
