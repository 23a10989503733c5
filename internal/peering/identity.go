package peering

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// tokenLife is the requested lifetime of an identity. Some API servers shorten it. The manager
// renews the identity in time.
const tokenLife = 90 * 24 * time.Hour

// giveIdentity makes sure that s has a working identity at its peer. It returns a report of the
// change, or "" if the present identity works.
func (s *side) giveIdentity(ctx context.Context) (report string, err error) {
	have, wrong, err := s.identityProblem(ctx)
	if err != nil {
		return "", err
	}
	if wrong == "" {
		return s.peer.allowAudiences(ctx, have)
	}
	token := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(tokenLife / time.Second))}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: s.peer.namespace, Name: peerAccount}}
	if err := s.peer.Client.SubResource("token").Create(ctx, account, token); err != nil {
		return "", s.peer.Explain("token of ServiceAccount "+s.peer.namespace+"/"+peerAccount, err)
	}
	if _, err := s.peer.allowAudiences(ctx, token.Status.Token); err != nil {
		return "", err
	}
	kubeconfig, err := s.identityWith(token.Status.Token)
	if err != nil {
		return "", err
	}
	if _, err := s.Apply(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: s.secret, Labels: ours()},
		Data:       map[string][]byte{isthmus.SecretKubeconfig: kubeconfig},
	}); err != nil {
		return "", err
	}
	until := token.Status.ExpirationTimestamp.Time
	return fmt.Sprintf("%s: got a new identity at %s, valid until %s (%s), because %s", s.Cluster, s.peer.Cluster, until.UTC().Format(time.DateOnly), life(time.Until(until)), wrong), nil
}

// life formats a duration in days or hours.
func life(d time.Duration) string {
	if d < 48*time.Hour {
		return fmt.Sprintf("%.0f h", d.Hours())
	}
	return fmt.Sprintf("%.0f days", math.Round(d.Hours()/24))
}

// allowAudiences lets the peer of s request further tokens, but only with the audiences of this
// token. These are the audiences of the API server.
func (s *side) allowAudiences(ctx context.Context, token string) (string, error) {
	want := strings.Join(claimsOf(token).Audiences, ",")
	var namespace corev1.Namespace
	if err := s.Client.Get(ctx, client.ObjectKey{Name: s.namespace}, &namespace); err != nil {
		return "", s.Explain("Namespace "+s.namespace, err)
	}
	if namespace.Annotations[isthmus.AnnotationTokenAudiences] == want {
		return "", nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{isthmus.AnnotationTokenAudiences: want}}})
	if err != nil {
		return "", err
	}
	if err := s.Client.Patch(ctx, &namespace, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(cluster.FieldManager)); err != nil {
		return "", s.Explain("annotate Namespace "+s.namespace, err)
	}
	return fmt.Sprintf("%s: %s may renew its token for %s", s.Cluster, s.peer.Cluster, safetext.Of(want)), nil
}

// identityProblem returns the token of s, and the reason why s needs a new identity, or "" if s
// needs none. It verifies the token by a request to the peer's API server.
func (s *side) identityProblem(ctx context.Context) (token, wrong string, err error) {
	var secret corev1.Secret
	err = s.Client.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: s.secret}, &secret)
	if apierrors.IsNotFound(err) {
		return "", "it had none", nil
	}
	if err != nil {
		return "", "", s.Explain("Secret "+s.namespace+"/"+s.secret, err)
	}
	have, err := clientcmd.Load(secret.Data[isthmus.SecretKubeconfig])
	if err != nil {
		return "", "the old one could not be read: " + safetext.Of(err.Error()), nil
	}
	if have.Contexts[have.CurrentContext] == nil {
		return "", "the old one could not be read: it has no current context", nil
	}
	in := have.Contexts[have.CurrentContext]
	user := have.AuthInfos[in.AuthInfo]
	if user == nil || user.Token == "" {
		return "", "the old one had no token", nil
	}
	want, err := s.identityWith(user.Token)
	if err != nil {
		return "", "", err
	}
	if wanted, err := clientcmd.Load(want); err != nil {
		return "", "", err
	} else if !sameCluster(have.Clusters[in.Cluster], wanted.Clusters[wanted.Contexts[wanted.CurrentContext].Cluster]) {
		return "", "the old one was for another server, proxy or certificate authority", nil
	}
	wrong, err = s.peer.tokenProblem(ctx, user.Token)
	return user.Token, wrong, err
}

func sameCluster(a, b *clientcmdapi.Cluster) bool {
	return a != nil && b != nil && a.Server == b.Server && a.TLSServerName == b.TLSServerName && a.ProxyURL == b.ProxyURL &&
		string(a.CertificateAuthorityData) == string(b.CertificateAuthorityData)
}

// claims are the claims in a ServiceAccount token (RFC 7519).
type claims struct {
	Audiences  audiences `json:"aud"`
	Kubernetes struct {
		ServiceAccount struct {
			UID string `json:"uid"`
		} `json:"serviceaccount"`
	} `json:"kubernetes.io"`
}

// audiences are one string or a list of strings in JSON (RFC 7519, section 4.1.3).
type audiences []string

func (a *audiences) UnmarshalJSON(text []byte) error {
	var one string
	if json.Unmarshal(text, &one) == nil {
		*a = audiences{one}
		return nil
	}
	return json.Unmarshal(text, (*[]string)(a))
}

// claimsOf decodes the claims of a token. Missing claims are empty. It does not verify the
// token.
func claimsOf(token string) (c claims) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return claims{}
	}
	if text, err := base64.RawURLEncoding.DecodeString(parts[1]); err != nil || json.Unmarshal(text, &c) != nil {
		return claims{}
	}
	return c
}

// tokenProblem returns the reason why the API server of s does not accept a token of peerAccount,
// or "" if it does. Besides a request with the token, it compares the ServiceAccount's UID, because
// the API server accepts a token for some seconds after its ServiceAccount was deleted.
func (s *side) tokenProblem(ctx context.Context, token string) (string, error) {
	var account corev1.ServiceAccount
	if err := s.Client.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: peerAccount}, &account); err != nil {
		return "", s.Explain("ServiceAccount "+s.namespace+"/"+peerAccount, err)
	}
	if claimsOf(token).Kubernetes.ServiceAccount.UID != string(account.UID) {
		return "the old one was revoked", nil
	}
	config := rest.AnonymousClientConfig(s.Config)
	config.BearerToken = token
	bearer, err := client.New(config, client.Options{Scheme: s.Client.Scheme(), Mapper: s.Client.RESTMapper()})
	if err != nil {
		return "", fmt.Errorf("%s: %w", s.Cluster, err)
	}
	err = bearer.Create(ctx, &authenticationv1.SelfSubjectReview{})
	switch {
	case apierrors.IsUnauthorized(err):
		return "the old one was revoked or had expired", nil
	case apierrors.IsForbidden(err): // the token is valid, but its account may not create a SelfSubjectReview
		return "", nil
	case err != nil:
		return "", s.Explain("check of the new identity", err)
	}
	return "", nil
}

// kubeconfigFor returns a kubeconfig for the peer's manager: the URL and certificate authority
// of the API server, its proxy, and a token.
func kubeconfigFor(c *cluster.Cluster, token, namespace string) ([]byte, error) {
	if c.Config.Insecure {
		return nil, fmt.Errorf("%s: the kubeconfig has insecure-skip-tls-verify, but the peer would send a token there; want a certificate authority", c)
	}
	ca, err := authorityOf(c)
	if err != nil {
		return nil, err
	}
	server := &clientcmdapi.Cluster{Server: c.Server, CertificateAuthorityData: ca, TLSServerName: c.Config.ServerName}
	switch proxy, err := proxyOf(c); {
	case err != nil:
		return nil, fmt.Errorf("%s: proxy-url: %w", c, err)
	case proxy != nil:
		server.ProxyURL = proxy.String()
	}
	return kubeconfigWith(c, server, token, namespace)
}

func kubeconfigWith(c *cluster.Cluster, server *clientcmdapi.Cluster, token, namespace string) ([]byte, error) {
	name := c.Identity.ClusterName
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = server
	config.AuthInfos[peerAccount] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: peerAccount, Namespace: namespace}
	config.CurrentContext = name
	return clientcmd.Write(*config)
}

// authorityOf returns the certificate authorities of the kubeconfig in PEM. It returns "" if the
// kubeconfig uses those of the system.
func authorityOf(c *cluster.Cluster) ([]byte, error) {
	ca := c.Config.CAData
	if len(ca) == 0 && c.Config.CAFile != "" {
		var err error
		if ca, err = os.ReadFile(c.Config.CAFile); err != nil {
			return nil, fmt.Errorf("%s: certificate authority: %w", c, err)
		}
	}
	return ca, nil
}
