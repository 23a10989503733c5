package replication

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A front is a proxy for the peer's API server. It has a certificate of its own, whose authority
// can be rotated, and its own ConfigMap kube-root-ca.crt. In the real ConfigMap, the peer's
// controllers would undo edits.
type front struct {
	*httptest.Server
	published   atomic.Pointer[string]
	certificate atomic.Pointer[tls.Certificate]
}

func newFront(t *testing.T, by *authority) *front {
	t.Helper()
	f := new(front)
	f.show(t, by)
	f.publish(by.pem)
	target, err := url.Parse(away.URL())
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(away.CA())
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}},
		FlushInterval: -1,
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	f.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/configmaps/"+isthmus.ConfigMapRootCA) {
			_ = json.NewEncoder(w).Encode(corev1.ConfigMap{Data: map[string]string{"ca.crt": *f.published.Load()}})
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	// StartTLS would present its own certificate to clients without a server name.
	f.Listener = tls.NewListener(f.Listener, &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return f.certificate.Load(), nil }})
	f.Config.ErrorLog = log.New(io.Discard, "", 0)
	f.Start()
	f.URL = "https://" + f.Listener.Addr().String()
	t.Cleanup(func() {
		f.CloseClientConnections()
		f.Close()
		proxy.Transport.(*http.Transport).CloseIdleConnections()
	})
	return f
}

func (f *front) publish(text string) { f.published.Store(&text) }

// show makes the front present a certificate of another authority on new connections.
func (f *front) show(t *testing.T, by *authority) {
	t.Helper()
	f.certificate.Store(by.serve(t))
	if f.Server != nil {
		f.CloseClientConnections()
	}
}

// An authority is a certificate authority.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pem  string
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	a := &authority{cert: &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}}
	a.key, a.cert = a.sign(t, a.cert, a.cert, nil)
	a.pem = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}))
	return a
}

func (a *authority) sign(t *testing.T, what, by *x509.Certificate, signer *ecdsa.PrivateKey) (*ecdsa.PrivateKey, *x509.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if signer == nil {
		signer = key
	}
	der, err := x509.CreateCertificate(rand.Reader, what, by, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return key, cert
}

func (a *authority) serve(t *testing.T) *tls.Certificate {
	t.Helper()
	key, cert := a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: a.cert.NotBefore, NotAfter: a.cert.NotAfter, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, a.cert, a.key)
	return &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
}

// Kubernetes publishes the old and the new authority together, then changes the server's
// certificate, and then publishes the new authority alone.
func TestRotatedCertificateAuthorityOfThePeerIsAdopted(t *testing.T) {
	t.Parallel()
	first, second, stranger := newAuthority(t, "first"), newAuthority(t, "second"), newAuthority(t, "stranger")
	const often = 200 * time.Millisecond
	var f *front
	p := established(t, func(p *pair) map[string][]byte {
		p.r.pace.authority = often
		f = newFront(t, first)
		return withKubeconfig(kubeconfig(f.URL, []byte(first.pem), &clientcmdapi.AuthInfo{Token: p.token()}))
	})
	storedAuthority := func() string {
		var s corev1.Secret
		p.must(home.admin.Get(t.Context(), client.ObjectKey{Namespace: p.peer.LocalNamespace, Name: p.peer.IdentitySecret}, &s))
		config, err := clientcmd.Load(s.Data[isthmus.SecretKubeconfig])
		p.must(err)
		return string(config.Clusters["bravo"].CertificateAuthorityData)
	}
	await := func(want string) {
		t.Helper()
		p.eventually(func() string {
			if storedAuthority() != want {
				return "the Secret has another authority"
			}
			return ""
		})
	}
	works := func(ip string) {
		t.Helper()
		p.change(home, p.here, move(ip))
		p.eventually(p.outdated)
	}

	// None of these texts is a list of authorities that verifies the server.
	for _, wrong := range []string{stranger.pem, "", "no PEM", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})),
		first.pem + string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: []byte("x")})), strings.Repeat(second.pem, maxCertificates+1) + first.pem,
		first.pem + strings.Repeat("#", maxAuthority)} {
		f.publish(wrong)
		time.Sleep(5 * often)
		if storedAuthority() != first.pem {
			t.Fatalf("believed %.80q", wrong)
		}
	}
	works("198.51.100.21")

	f.publish(first.pem + second.pem)
	await(first.pem + second.pem)
	f.show(t, second)
	works("198.51.100.22")
	f.publish(second.pem)
	await(second.pem)
	works("198.51.100.23")

	// A new authority is ignored if the authority in the Secret does not verify the connection.
	f.publish(stranger.pem)
	f.show(t, stranger)
	p.awaitState(isthmus.ReasonUnreachable, isthmus.ReasonUpToDate, "does not verify", "run isthmus peer again")
	time.Sleep(5 * often)
	if storedAuthority() != second.pem {
		t.Error("an authority was followed over an unverified connection")
	}
}
