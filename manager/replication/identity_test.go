package replication

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"maps"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

func selfSigned(t testing.TB, until time.Time) (cert *x509.Certificate, certPEM, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "us"}, NotBefore: until.Add(-time.Hour), NotAfter: until}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

func TestIdentityWithFilesOrCommandsIsRejected(t *testing.T) {
	_, cert, key := selfSigned(t, time.Now().Add(time.Hour))
	_, _, otherKey := selfSigned(t, time.Now().Add(time.Hour))
	const server = "https://198.51.100.7:6443/"
	user := func(edit func(*clientcmdapi.AuthInfo)) map[string][]byte {
		info := &clientcmdapi.AuthInfo{Token: "secret-token"}
		edit(info)
		return withKubeconfig(kubeconfig(server, cert, info))
	}
	whole := func(edit func(*clientcmdapi.Config)) map[string][]byte {
		c, err := clientcmd.Load(kubeconfig(server, cert, &clientcmdapi.AuthInfo{Token: "secret-token"}))
		if err != nil {
			t.Fatal(err)
		}
		edit(c)
		b, err := clientcmd.Write(*c)
		if err != nil {
			t.Fatal(err)
		}
		return withKubeconfig(b)
	}
	bravo := func(edit func(*clientcmdapi.Cluster)) map[string][]byte {
		return whole(func(c *clientcmdapi.Config) { edit(c.Clusters["bravo"]) })
	}
	liqo := func(changes map[string]string) map[string][]byte {
		m := map[string][]byte{liqoServer: []byte(server), liqoCA: cert, liqoCert: cert, liqoKey: key}
		for k, v := range changes {
			m[k] = []byte(v)
		}
		return m
	}
	for name, tc := range map[string]struct {
		data map[string][]byte
		want string // part of the expected error; "": no error
	}{
		"token":             {user(func(*clientcmdapi.AuthInfo) {}), ""},
		"certificate":       {user(func(u *clientcmdapi.AuthInfo) { u.Token, u.ClientCertificateData, u.ClientKeyData = "", cert, key }), ""},
		"Liqo's":            {liqo(nil), ""},
		"Liqo's without CA": {liqo(map[string]string{liqoCA: ""}), ""},
		"Liqo's with proxy": {liqo(map[string]string{liqoProxy: "http://10.0.0.1:8118"}), ""},
		"proxy":             {bravo(func(c *clientcmdapi.Cluster) { c.ProxyURL = "socks5://10.0.0.1:1080" }), ""},
		"a path":            {bravo(func(c *clientcmdapi.Cluster) { c.Server = "https://rancher.example/k8s/clusters/c-1" }), ""},

		"empty":         {nil, "neither the key kubeconfig"},
		"not YAML":      {withKubeconfig([]byte("{{{")), "kubeconfig: not a kubeconfig"},
		"other YAML":    {withKubeconfig([]byte("a: b")), "current-context"},
		"exec":          {user(func(u *clientcmdapi.AuthInfo) { u.Exec = &clientcmdapi.ExecConfig{Command: "sh"} }), `user "us": exec: refused`},
		"auth provider": {user(func(u *clientcmdapi.AuthInfo) { u.AuthProvider = &clientcmdapi.AuthProviderConfig{Name: "oidc"} }), "auth-provider: refused"},
		"token file":    {user(func(u *clientcmdapi.AuthInfo) { u.TokenFile = "/var/run/secrets/token" }), "tokenFile: refused"},
		"cert file":     {user(func(u *clientcmdapi.AuthInfo) { u.ClientCertificate = "/etc/cert" }), "client-certificate: refused"},
		"key file":      {user(func(u *clientcmdapi.AuthInfo) { u.ClientKey = "/etc/key" }), "client-key: refused"},
		"CA file":       {bravo(func(c *clientcmdapi.Cluster) { c.CertificateAuthority = "/etc/passwd" }), "certificate-authority: refused"},
		"password":      {user(func(u *clientcmdapi.AuthInfo) { u.Username, u.Password = "a", "secret-b" }), "username: refused"},
		"impersonation": {user(func(u *clientcmdapi.AuthInfo) { u.Impersonate = "admin" }), "as: refused"},
		"no user":       {whole(func(c *clientcmdapi.Config) { c.Contexts["peer"].AuthInfo = "x" }), `user "x" of context "peer" is missing`},
		"no cluster":    {whole(func(c *clientcmdapi.Config) { c.Contexts["peer"].Cluster = "x" }), `cluster "x" of context "peer" is missing`},
		"no context":    {whole(func(c *clientcmdapi.Config) { c.CurrentContext = "" }), "current-context"},
		"no credential": {user(func(u *clientcmdapi.AuthInfo) { u.Token = "" }), "neither a token nor a client certificate"},
		"odd token":     {user(func(u *clientcmdapi.AuthInfo) { u.Token = "secret-token\r\nX-Evil: 1" }), "token: has characters"},
		"plain http":    {bravo(func(c *clientcmdapi.Cluster) { c.Server = "http://198.51.100.7" }), "server: want"},
		"no host":       {bravo(func(c *clientcmdapi.Cluster) { c.Server = "https://" }), "server: want"},
		"bad proxy":     {bravo(func(c *clientcmdapi.Cluster) { c.ProxyURL = "file:///etc/passwd" }), "proxy: want"},
		"bad CA":        {bravo(func(c *clientcmdapi.Cluster) { c.CertificateAuthorityData = []byte("x") }), "CA: no certificate"},
		"CA unused":     {bravo(func(c *clientcmdapi.Cluster) { c.InsecureSkipTLSVerify = true }), "insecure-skip-tls-verify: refused"},
		"unverified": {bravo(func(c *clientcmdapi.Cluster) { c.InsecureSkipTLSVerify, c.CertificateAuthorityData = true, nil }),
			"insecure-skip-tls-verify: refused"},
		"another key": {liqo(map[string]string{liqoKey: string(otherKey)}), "client certificate and key"},
		"no key":      {liqo(map[string]string{liqoKey: ""}), "both are needed"},
		"EKS":         {map[string][]byte{liqoServer: []byte(server), "awsRegion": []byte("x")}, "EKS"},
	} {
		id, err := identityFrom(&corev1.Secret{Data: tc.data})
		switch {
		case tc.want == "" && (err != nil || strings.HasSuffix(id.server, "/")):
			t.Errorf("%s: %+v, %v", name, id.server, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || id != identity{}):
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		case err != nil && strings.Contains(err.Error(), "secret-"):
			t.Errorf("%s: the error tells secrets: %v", name, err)
		}
	}
}

func jwt(claims string) string {
	b := base64.RawURLEncoding.EncodeToString
	return b([]byte(`{"alg":"none"}`)) + "." + b([]byte(claims)) + ".c2ln"
}

func TestReadTokenAcceptsOnlyExpiringServiceAccountTokens(t *testing.T) {
	const account = `"kubernetes.io":{"namespace":"n","serviceaccount":{"name":"a","uid":"u"}}`
	full := `{"aud":["x","y"],"iat":1000,"exp":4000,"kubernetes.io":{"namespace":"n","serviceaccount":{"name":"a"},"secret":{"name":"s","uid":"v"}}}`
	got, ok := readToken(jwt(full))
	if !ok || got.account != "a" || got.namespace != "n" || got.secret != "s" || got.secretUID != "v" ||
		!slices.Equal(got.audiences, []string{"x", "y"}) || !got.renewal().Equal(time.Unix(1300, 0)) {
		t.Errorf("%+v, %v", got, ok)
	}
	if got, ok := readToken(jwt(`{"aud":"x","iat":1,"exp":2,` + account + `}`)); !ok || !slices.Equal(got.audiences, []string{"x"}) {
		t.Errorf("one audience: %+v, %v", got, ok)
	}
	for name, token := range map[string]string{
		"nothing": "", "no JWT": "abc", "not base64": "a.%.c", "not JSON": jwt("x"), "for ever": jwt(`{"iat":1,` + account + `}`),
		"no account": jwt(`{"iat":1,"exp":2}`), "backwards": jwt(`{"iat":5,"exp":2,` + account + `}`), "exp is text": jwt(`{"iat":1,"exp":"2",` + account + `}`),
	} {
		if got, ok := readToken(token); ok {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got, ok := readToken(jwt(`{"iat":1,"exp":9223372036854775807,` + account + `}`)); ok && got.renewal().Before(time.Unix(1<<32, 0)) {
		t.Errorf("an absurd life is to be renewed at %v", got.renewal())
	}
}

// Large clouds cap the life of tokens at a day or two. Other API servers grant the requested life.
func TestExpiredTokenMessageMentionsACapOnlyForCappedTokens(t *testing.T) {
	issued := time.Date(2026, 11, 27, 18, 0, 0, 0, time.UTC)
	for life, want := range map[time.Duration]string{
		24 * time.Hour: "the token expired 2026-11-28T18:00:00Z: the peer's API server limits tokens to 24h, and this manager did not reach it in that time to renew it",
		tokenLife:      "the token expired 2027-02-25T18:00:00Z",
	} {
		if got := (serviceToken{issued: issued, expires: issued.Add(life)}).expired(); got != want {
			t.Errorf("%v: %q, want %q", life, got, want)
		}
	}
}

func TestWithTokenKeepsOtherFields(t *testing.T) {
	before, err := clientcmd.Load(kubeconfig("https://b", []byte("ca"), &clientcmdapi.AuthInfo{Token: "old"}))
	if err != nil {
		t.Fatal(err)
	}
	before.AuthInfos["other"] = &clientcmdapi.AuthInfo{Token: "other"}
	text, err := clientcmd.Write(*before)
	if err != nil {
		t.Fatal(err)
	}
	changed, err := withToken(text, "us", "new")
	if err != nil {
		t.Fatal(err)
	}
	after, err := clientcmd.Load(changed)
	if err != nil {
		t.Fatal(err)
	}
	if after.AuthInfos["us"].Token != "new" || after.AuthInfos["other"].Token != "other" || after.CurrentContext != "peer" ||
		string(after.Clusters["bravo"].CertificateAuthorityData) != "ca" || !slices.Equal(slices.Sorted(maps.Keys(after.Contexts)), []string{"peer"}) {
		t.Errorf("%s", changed)
	}
}

func FuzzIdentity(f *testing.F) {
	f.Add(kubeconfig("https://b", nil, &clientcmdapi.AuthInfo{Token: "a.b.c"}), "https://b", "x")
	f.Add(kubeconfig("https://b", nil, &clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{Command: "sh"}}), "", "")
	f.Add([]byte(nil), "https://b", jwt(`{"iat":1,"exp":2}`))
	f.Fuzz(func(t *testing.T, kube []byte, server, token string) {
		id, err := identityFrom(&corev1.Secret{Data: map[string][]byte{
			isthmus.SecretKubeconfig: kube, liqoServer: []byte(server), liqoCert: []byte(token), liqoKey: []byte(token),
		}})
		if err == nil {
			if _, err := id.tlsConfig(); err != nil || !strings.HasPrefix(id.server, "https://") || id.token == "" && id.cert == "" {
				t.Errorf("%+v, %v", id, err)
			}
		}
		if r, ok := readToken(token); ok && (!r.renewal().Before(r.expires) || r.renewal().Before(r.issued)) && r.expires.Sub(r.issued) > 3 {
			t.Errorf("%+v", r)
		}
	})
}

func TestIdentityExpiresWithItsTokenOrCertificate(t *testing.T) {
	at := func(seconds int64) time.Time { return time.Unix(seconds, 0).UTC() }
	token := jwt(`{"iat":1700000000,"exp":1900000000,"kubernetes.io":{"namespace":"n","serviceaccount":{"name":"a"}}}`)
	certificate := func(until int64) endpoint {
		_, cert, key := selfSigned(t, at(until))
		return endpoint{cert: string(cert), key: string(key)}
	}
	for name, tc := range map[string]struct {
		id   identity
		want time.Time
	}{
		"nothing":             {},
		"a token":             {identity{token: token}, at(1900000000)},
		"a certificate":       {identity{endpoint: certificate(1800000000)}, at(1800000000)},
		"whichever is first":  {identity{endpoint: certificate(1950000000), token: token}, at(1900000000)},
		"and the other way":   {identity{endpoint: certificate(1850000000), token: token}, at(1850000000)},
		"what is no token":    {identity{token: "x.y.z"}, time.Time{}},
		"a certificate alone": {identity{endpoint: endpoint{cert: certificate(1800000000).cert}}, time.Time{}},
	} {
		got := tc.id.life()
		if !got.Expires.Equal(tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
		if renewed := got.Expires.Equal(at(1900000000)); renewed == got.Renewal.IsZero() {
			t.Errorf("%s: is renewed at %v", name, got.Renewal)
		}
	}
}
