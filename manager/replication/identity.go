package replication

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// An endpoint is an API server and our TLS configuration for it. Peers with the same endpoint share
// connections.
type endpoint struct {
	server     string // https URL, without a slash at the end
	serverName string // name that the server's certificate must have; empty: the host of server
	proxy      string // URL of the proxy; empty: from the environment
	ca         string // certificate authority in PEM; empty: the system's authorities
	cert, key  string // PEM; both empty: authentication by token
	inBand     string // cluster ID of the peer at the other end of the tunnel; empty: no tunnel is used
}

// String returns the API server's name for messages.
func (e endpoint) String() string {
	if e.inBand != "" {
		return "the peer's API server, through the tunnel,"
	}
	return e.server
}

// An identity has all data that are needed to access the peer's API server.
type identity struct {
	endpoint
	token string
	user  string // user of the kubeconfig that the token belongs to
}

// Keys of Liqo's identity Secret.
const (
	liqoServer = "apiServerUrl"
	liqoCA     = "apiServerCa"
	liqoCert   = "certificate"
	liqoKey    = "private-key"
	liqoProxy  = "proxyURL"
)

// identityFrom parses an identity Secret, which has a kubeconfig or Liqo's certificate. It rejects
// fields that would make this process run a program or read a file. The error names the key or
// field of the Secret.
func identityFrom(s *corev1.Secret) (id identity, err error) {
	switch {
	case len(s.Data[isthmus.SecretKubeconfig]) > 0:
		if id, err = fromKubeconfig(s.Data[isthmus.SecretKubeconfig]); err != nil {
			return identity{}, fmt.Errorf("%s: %w", isthmus.SecretKubeconfig, err)
		}
	case len(s.Data[liqoServer]) > 0:
		id.endpoint = endpoint{
			server: string(s.Data[liqoServer]), ca: string(s.Data[liqoCA]), proxy: string(s.Data[liqoProxy]),
			cert: string(s.Data[liqoCert]), key: string(s.Data[liqoKey]),
		}
		if id.cert == "" || id.key == "" {
			return identity{}, fmt.Errorf("%s and %s: both are needed; Liqo's identities for EKS are not supported", liqoCert, liqoKey)
		}
	default:
		return identity{}, fmt.Errorf("has neither the key %s nor the keys %s, %s and %s", isthmus.SecretKubeconfig, liqoServer, liqoCert, liqoKey)
	}
	if err := id.complete(); err != nil {
		return identity{}, err
	}
	return id, nil
}

// errInBand and errOutOfBand mean that an identity does not fit spec.inBand.
var (
	errInBand    = errors.New("comes from Liqo, but spec.inBand needs Isthmus in both clusters; remove spec.inBand from the Peering")
	errOutOfBand = errors.New("uses the tunnel, but the Peering does not have spec.inBand")
)

// checkInBand checks that the identity fits spec.inBand of the Peering. In band, it makes the
// identity use the tunnel.
func (id *identity) checkInBand(p Target) error {
	switch {
	case p.InBand && id.user == "":
		return errInBand
	case p.InBand:
		id.inBand, id.proxy = p.ID, ""
	case id.server == isthmus.InBandServer: // without the tunnel, this URL is our own API server
		return errOutOfBand
	}
	return nil
}

// fromKubeconfig parses the current context of a kubeconfig.
func fromKubeconfig(b []byte) (identity, error) {
	config, err := clientcmd.Load(b)
	if err != nil {
		return identity{}, errors.New("not a kubeconfig") // the parser's error may quote keys
	}
	context := config.Contexts[config.CurrentContext]
	if context == nil {
		return identity{}, fmt.Errorf("current-context %q is not among the contexts", config.CurrentContext)
	}
	cluster, user := config.Clusters[context.Cluster], config.AuthInfos[context.AuthInfo]
	switch {
	case cluster == nil:
		return identity{}, fmt.Errorf("cluster %q of context %q is missing", context.Cluster, config.CurrentContext)
	case user == nil:
		return identity{}, fmt.Errorf("user %q of context %q is missing", context.AuthInfo, config.CurrentContext)
	case user.Exec != nil:
		return identity{}, refused(context.AuthInfo, "exec", "a Secret must not run programs")
	case user.AuthProvider != nil:
		return identity{}, refused(context.AuthInfo, "auth-provider", "a Secret must not run programs")
	case user.TokenFile != "":
		return identity{}, refused(context.AuthInfo, "tokenFile", "a Secret must not read files; use token")
	case user.ClientCertificate != "":
		return identity{}, refused(context.AuthInfo, "client-certificate", "a Secret must not read files; use client-certificate-data")
	case user.ClientKey != "":
		return identity{}, refused(context.AuthInfo, "client-key", "a Secret must not read files; use client-key-data")
	case user.Username != "" || user.Password != "":
		return identity{}, refused(context.AuthInfo, "username", "API servers do not take passwords; use a token or a client certificate")
	case user.Impersonate != "" || user.ImpersonateUID != "" || len(user.ImpersonateGroups)+len(user.ImpersonateUserExtra) > 0:
		return identity{}, refused(context.AuthInfo, "as", "impersonation is not supported")
	case cluster.InsecureSkipTLSVerify:
		return identity{}, fmt.Errorf("cluster %q: insecure-skip-tls-verify: refused: an interceptor of the connection would get the token; use certificate-authority-data",
			context.Cluster)
	case cluster.CertificateAuthority != "":
		return identity{}, fmt.Errorf("cluster %q: certificate-authority: refused: a Secret must not read files; use certificate-authority-data",
			context.Cluster)
	}
	return identity{
		endpoint: endpoint{
			server: cluster.Server, serverName: cluster.TLSServerName, proxy: cluster.ProxyURL,
			ca: string(cluster.CertificateAuthorityData), cert: string(user.ClientCertificateData), key: string(user.ClientKeyData),
		},
		token: user.Token, user: context.AuthInfo,
	}, nil
}

func refused(user, field, why string) error {
	return fmt.Errorf("user %q: %s: refused: %s", user, field, why)
}

// complete validates an identity and normalises it, so that equal identities compare equal.
func (id *identity) complete() error {
	u, err := url.Parse(id.server)
	switch {
	case err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("server: want an address such as https://198.51.100.7:6443, found %q", id.server)
	case id.token == "" && id.cert == "":
		return errors.New("has neither a token nor a client certificate")
	case strings.ContainsFunc(id.token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return errors.New("token: has characters that are invalid in a token")
	}
	id.server = strings.TrimRight(id.server, "/")
	if id.proxy != "" {
		p, err := url.Parse(id.proxy)
		if err != nil || p.Host == "" || !slices.Contains([]string{"http", "https", "socks5", "socks5h"}, p.Scheme) {
			return errors.New("proxy: want an http, https or socks5 URL")
		}
	}
	_, err = id.tlsConfig()
	return err
}

// tlsConfig returns the TLS configuration. Its errors quote no keys or certificates.
func (e endpoint) tlsConfig() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: e.serverName}
	if e.ca != "" {
		if c.RootCAs = x509.NewCertPool(); !c.RootCAs.AppendCertsFromPEM([]byte(e.ca)) {
			return nil, errors.New("CA: no certificate in PEM")
		}
	}
	if e.cert != "" || e.key != "" {
		pair, err := tls.X509KeyPair([]byte(e.cert), []byte(e.key))
		if err != nil {
			return nil, fmt.Errorf("client certificate and key: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// life returns the times in the token and the certificate, or the zero value if they have none.
func (id identity) life() (l Life) {
	if t, ok := readToken(id.token); ok {
		l = Life{t.expires, t.renewal()}
	}
	if pair, err := tls.X509KeyPair([]byte(id.cert), []byte(id.key)); err == nil && pair.Leaf != nil &&
		(l.Expires.IsZero() || pair.Leaf.NotAfter.Before(l.Expires)) {
		l = Life{Expires: pair.Leaf.NotAfter.UTC()}
	}
	return l
}

// withToken returns the kubeconfig with another token for the user.
func withToken(kubeconfig []byte, user, token string) ([]byte, error) {
	config, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, errors.New("not a kubeconfig")
	}
	info := cmp.Or(config.AuthInfos[user], clientcmdapi.NewAuthInfo())
	info.Token = token
	config.AuthInfos[user] = info
	return clientcmd.Write(*config)
}

// A serviceToken has the claims of a ServiceAccount token. They are not verified, because they only
// determine when to request a new token, and for which account.
type serviceToken struct {
	issued, expires    time.Time
	namespace, account string
	audiences          []string
	secret, secretUID  string // the Secret that the token is bound to, if any: the token becomes invalid with that Secret
}

// readToken parses a token. It returns false if the token does not belong to a ServiceAccount or
// does not expire.
func readToken(token string) (serviceToken, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return serviceToken{}, false
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return serviceToken{}, false
	}
	var claims struct {
		Issued     int64           `json:"iat"`
		Expires    int64           `json:"exp"`
		Audience   json.RawMessage `json:"aud"`
		Kubernetes struct {
			Namespace string `json:"namespace"`
			Account   struct {
				Name string `json:"name"`
			} `json:"serviceaccount"`
			Secret struct {
				Name string `json:"name"`
				UID  string `json:"uid"`
			} `json:"secret"`
		} `json:"kubernetes.io"`
	}
	if err := json.Unmarshal(payload, &claims); err != nil {
		return serviceToken{}, false
	}
	k := claims.Kubernetes
	const forEver = 253402300800 // the year 10000
	if k.Namespace == "" || k.Account.Name == "" || claims.Issued <= 0 || claims.Expires <= claims.Issued || claims.Expires >= forEver {
		return serviceToken{}, false
	}
	t := serviceToken{
		issued: time.Unix(claims.Issued, 0).UTC(), expires: time.Unix(claims.Expires, 0).UTC(),
		namespace: k.Namespace, account: k.Account.Name, secret: k.Secret.Name, secretUID: k.Secret.UID,
	}
	var one string
	if json.Unmarshal(claims.Audience, &one) == nil && one != "" { // RFC 7519, section 4.1.3: one string or a list
		t.audiences = []string{one}
	} else {
		_ = json.Unmarshal(claims.Audience, &t.audiences) // if absent, the token is for the API server itself
	}
	return t, true
}

// renewal returns the time at which a tenth of the token's life is over. Because tokens are renewed
// so early, a cluster may be switched off for up to nine tenths of a token's life.
func (t serviceToken) renewal() time.Time { return t.issued.Add(t.expires.Sub(t.issued) / 10) }

// expired describes a token that has expired. If an API server caps the life of tokens, a cluster
// that was switched off over a weekend may be unable to renew its token in time.
func (t serviceToken) expired() string {
	text := "the token expired " + t.expires.Format(time.RFC3339)
	if life := t.expires.Sub(t.issued); life < tokenLife {
		text += fmt.Sprintf(": the peer's API server limits tokens to %s, and this manager did not reach it in that time to renew it", duration.HumanDuration(life))
	}
	return text
}
