package attacks

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	api "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
)

// An impostor is an HTTPS server on c's control plane host with its own certificate.
type impostor struct {
	url      string
	ca       []byte
	requests atomic.Int64
	tokens   atomic.Int64 // requests with a token
}

func (s *site) impostor(t *testing.T, handle http.HandlerFunc) *impostor {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "impostor"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{s.c.Control.Addr.AsSlice()}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	listener, err := s.c.Control.Listen("tcp4", netip.AddrPortFrom(s.c.Control.Addr, 0).String())
	must(t, err)
	i := &impostor{url: "https://" + listener.Addr().String(), ca: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i.requests.Add(1)
		if r.Header.Get("Authorization") != "" {
			i.tokens.Add(1)
		}
		handle(w, r)
	}), TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.ServeTLS(listener, "", "")
	}()
	t.Cleanup(func() { server.Close(); <-done })
	return i
}

// identitySecret changes the identity that cluster a uses at cluster c. It adds a function to
// s.restore that restores the former identity and waits until cluster a uses it again.
func (s *site) identitySecret(t *testing.T, change func(*clientcmdapi.Cluster)) {
	t.Helper()
	key := client.ObjectKey{Namespace: tenant(s.c), Name: api.DefaultIdentitySecret}
	var secret corev1.Secret
	must(t, s.a.Client.Get(t.Context(), key, &secret))
	was := secret.Data[api.SecretKubeconfig]
	write := func(text []byte) {
		t.Helper()
		eventually(t, "the Secret", func() error {
			var secret corev1.Secret
			if err := s.a.Client.Get(t.Context(), key, &secret); err != nil {
				return err
			}
			secret.Data[api.SecretKubeconfig] = text
			return s.a.Client.Update(t.Context(), &secret)
		})
	}
	config, err := clientcmd.Load(was)
	must(t, err)
	for _, c := range config.Clusters {
		change(c)
	}
	text, err := clientcmd.Write(*config)
	must(t, err)
	write(text)
	s.restore = append(s.restore, func(t *testing.T) {
		write(was)
		s.waitIdentity(t, metav1.ConditionTrue, "")
	})
}

// waitIdentity waits until the condition Identity of a's Peering with c has a status and message.
func (s *site) waitIdentity(t *testing.T, status metav1.ConditionStatus, contains string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s %s %s", api.ConditionIdentity, status, contains), func() error {
		p, err := s.a.Peering(t.Context(), s.c)
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(p.Status.Conditions, api.ConditionIdentity)
		if c == nil || c.Status != status || !strings.Contains(c.Message, contains) {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
}

// withSecret runs a row that changes the identity Secret, and restores the Secret afterwards.
func withSecret(run func(*testing.T, *site)) func(*testing.T, *site) {
	return func(t *testing.T, s *site) {
		s.restore = nil
		defer func() {
			for _, do := range s.restore {
				do(t)
			}
		}()
		run(t, s)
	}
}

func serverChapter() chapter {
	return chapter{title: "As a peer's API server, or on the path to it", attacks: []attack{
		{attacker: "a writer of an identity Secret, a host on the path", attempt: "insecure-skip-tls-verify in it",
			now: "refused: SecretInvalid, nothing is sent", run: withSecret(func(t *testing.T, s *site) {
				i := s.impostor(t, func(http.ResponseWriter, *http.Request) {})
				s.identitySecret(t, func(c *clientcmdapi.Cluster) {
					c.Server, c.InsecureSkipTLSVerify, c.CertificateAuthorityData = i.url, true, nil
				})
				s.waitIdentity(t, metav1.ConditionFalse, "insecure-skip-tls-verify")
				if n := i.requests.Load(); n > 0 {
					t.Errorf("%d requests, %d of them with the token", n, i.tokens.Load())
				}
			})},
		{attacker: "a host on the path", attempt: "answers in place of the peer's API server, with another certificate", now: "the token is not sent", run: withSecret(func(t *testing.T, s *site) {
			i := s.impostor(t, func(http.ResponseWriter, *http.Request) {})
			s.identitySecret(t, func(c *clientcmdapi.Cluster) { c.Server = i.url }) // the certificate authority does not change
			s.waitIdentity(t, metav1.ConditionFalse, "")
			if n := i.tokens.Load(); n > 0 {
				t.Errorf("%d requests with the token", n)
			}
		})},
		{attacker: "c's API server", attempt: "redirects a's manager to a server inside a", now: "not followed", run: withSecret(func(t *testing.T, s *site) {
			var led atomic.Int64
			stop, err := s.a.Control.Serve("127.0.0.1:8099", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { led.Add(1) }))
			must(t, err)
			defer stop()
			i := s.impostor(t, func(w http.ResponseWriter, r *http.Request) {
				http.Redirect(w, r, "http://127.0.0.1:8099"+r.URL.Path, http.StatusTemporaryRedirect)
			})
			s.identitySecret(t, func(c *clientcmdapi.Cluster) { c.Server, c.CertificateAuthorityData = i.url, i.ca })
			s.waitRequested(t, i)
			s.waitIdentity(t, metav1.ConditionFalse, "")
			if n := led.Load(); n > 0 {
				t.Errorf("%d requests were led away", n)
			}
		})},
		{attacker: "c's API server", attempt: "sends an endless answer", now: "cut off after 4 MiB; the manager continues", run: withSecret(func(t *testing.T, s *site) {
			var cut atomic.Int64
			i := s.impostor(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				chunk := []byte(strings.Repeat(" ", 1<<20))
				for range 256 {
					if _, err := w.Write(chunk); err != nil {
						cut.Add(1)
						return
					}
				}
			})
			s.identitySecret(t, func(c *clientcmdapi.Cluster) { c.Server, c.CertificateAuthorityData = i.url, i.ca })
			eventually(t, "an answer that is cut off", func() error {
				if cut.Load() == 0 {
					return fmt.Errorf("%w: %d requests", errNotYet, i.requests.Load())
				}
				return nil
			})
		})},
		{attacker: "c's API server", attempt: "answers that it sees the pods of a as 8.8.0.0/16", now: "accepted: c uses these addresses inside the tunnel, and no route here depends on them",
			run: answersWithTheInternet},
		{attacker: "c's API server", attempt: "answers with a refusal that contains terminal control characters", now: "printed escaped", run: terminalEscapes},
	}}
}

// waitRequested waits until a's manager has sent a request to the impostor.
func (s *site) waitRequested(t *testing.T, i *impostor) {
	t.Helper()
	eventually(t, "a request", func() error {
		if i.requests.Load() == 0 {
			return errNotYet
		}
		return nil
	})
}

func terminalEscapes(t *testing.T, s *site) {
	const evil = "\x1b]0;owned\x07\x1b[2J\rroot# "
	defer s.changeAnswer(t, func(nc *v1alpha1.NetworkConfig) {
		meta.SetStatusCondition(&nc.Status.Conditions, metav1.Condition{
			Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse, Reason: "Evil", Message: evil, ObservedGeneration: nc.Generation})
	})()
	var shown string
	eventually(t, "the refusal in `isthmus status`", func() error {
		out, _ := s.Isthmus(t.Context(), "status", "--context", "a", "-o", "wide") // the exit code reports a problem, which is expected
		if shown = out; !strings.Contains(out, "owned") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	if strings.ContainsAny(shown, "\x1b\x07\r") {
		t.Errorf("%q", shown)
	}
	log := s.a.Tail("manager", 200)
	if strings.ContainsAny(log, "\x1b\x07") {
		t.Error("the manager's log has escape sequences")
	}
}

// changeAnswer stops c's manager and changes c's answer to a's NetworkConfig. undo restores the
// answer.
func (s *site) changeAnswer(t *testing.T, change func(*v1alpha1.NetworkConfig)) (undo func()) {
	t.Helper()
	if s.c.Running(fleet.Manager) {
		s.stopManagerOfC(t)
	}
	key := client.ObjectKey{Namespace: tenant(s.a), Name: identity(s.c).UniqueName()} // the copy of a's NetworkConfig at c
	var was v1alpha1.NetworkConfig
	must(t, s.c.Client.Get(t.Context(), key, &was))
	write := func(change func(*v1alpha1.NetworkConfig)) {
		t.Helper()
		eventually(t, "c's answer", func() error {
			var nc v1alpha1.NetworkConfig
			if err := s.c.Client.Get(t.Context(), key, &nc); err != nil {
				return err
			}
			change(&nc)
			return s.c.Client.Status().Update(t.Context(), &nc)
		})
	}
	had := endpointOf(t, s.a, s.c).Spec
	write(change)
	return func() {
		write(func(nc *v1alpha1.NetworkConfig) { nc.Status = was.Status })
		s.waitReconnected(t, &claims{had: had})
		must(t, s.a.WaitReady(t.Context(), s.c, patience))
	}
}

func answersWithTheInternet(t *testing.T, s *site) {
	defer s.changeAnswer(t, func(nc *v1alpha1.NetworkConfig) { nc.Status.PodCIDRNAT = "8.8.0.0/16" })()
	eventually(t, "the answer", func() error {
		if got := endpointOf(t, s.a, s.c).Spec.LocalNATPodCIDR; got != "8.8.0.0/16" {
			return fmt.Errorf("%s", got)
		}
		return nil
	})
	time.Sleep(grace)
	if nodes := s.divertingNodes(t, netip.MustParseAddr("8.8.8.8")); nodes != nil {
		t.Errorf("8.8.8.8 is led to c by %v", nodes)
	}
	s.checkTraffic(t)
}
