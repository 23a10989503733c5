package httpserve

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// writePair writes a new certificate and key with the file names of a mounted Secret. It returns
// the certificate.
func writePair(t *testing.T, dir string, notAfter time.Time) []byte {
	t.Helper()
	pair, err := selfSigned(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalECPrivateKey(pair.PrivateKey.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: pair.Certificate[0]}, keyFile: {Type: "EC PRIVATE KEY", Bytes: key}} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, notAfter, notAfter); err != nil {
			t.Fatal(err)
		}
	}
	return pair.Certificate[0]
}

func TestSecureServersAuthorizeProtectedPaths(t *testing.T) {
	dir, begin := t.TempDir(), time.Unix(1_700_000_000, 0)
	if _, err := TLS(dir); err == nil || !strings.Contains(err.Error(), "certificate in "+dir) {
		t.Errorf("no files: %v", err)
	}
	first := writePair(t, dir, begin)
	config, err := TLS(dir)
	if err != nil {
		t.Fatal(err)
	}
	secure := &Secure{TLS: config, Guard: func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") == "" {
				http.Error(w, "who are you", http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, r)
		})
	}}
	mux := http.NewServeMux()
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.Handle("/metrics", secure.Guarded(ok))
	mux.Handle("/healthz", (*Secure)(nil).Guarded(ok))
	s := New(slog.New(slog.DiscardHandler))
	addr, err := s.ListenPrivate("metrics", "127.0.0.1:0", secure, mux)
	if err != nil {
		t.Fatal(err)
	}
	s.Serve()
	defer s.Close()
	request := func(path, authorization string) (code int, certificate []byte) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+addr.String()+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", authorization)
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // the test compares the certificate itself
		res, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		return res.StatusCode, res.TLS.PeerCertificates[0].Raw
	}
	for _, tc := range []struct {
		path, authorization string
		code                int
	}{{"/metrics", "", 401}, {"/metrics", "Bearer x", 200}, {"/healthz", "", 200}} {
		if code, cert := request(tc.path, tc.authorization); code != tc.code || !bytes.Equal(cert, first) {
			t.Errorf("%s with %q: %d; our certificate: %v", tc.path, tc.authorization, code, bytes.Equal(cert, first))
		}
	}
	if res, err := http.Get("http://" + addr.String() + "/metrics"); err != nil {
		t.Error(err)
	} else if res.Body.Close(); res.StatusCode != http.StatusBadRequest {
		t.Errorf("without TLS: %s", res.Status)
	}

	// A renewed certificate is loaded. An invalid file leaves the last certificate in use.
	second := writePair(t, dir, begin.Add(time.Second))
	if _, cert := request("/healthz", ""); !bytes.Equal(cert, second) {
		t.Error("the renewed certificate is not used")
	}
	if err := os.WriteFile(filepath.Join(dir, certFile), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, cert := request("/healthz", ""); !bytes.Equal(cert, second) {
		t.Error("the last good certificate is not used")
	}
}

func TestTLSCreatesCertificateWithoutADirectory(t *testing.T) {
	config, err := TLS("")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(config.Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := cert.VerifyHostname("localhost"); err != nil {
		t.Error(err)
	}
	if err := cert.VerifyHostname("127.0.0.1"); err != nil {
		t.Error(err)
	}
	if left := time.Until(cert.NotAfter); left < 9*365*24*time.Hour {
		t.Errorf("it ends in %v", left)
	}
}

func TestPublicAddressWithoutTLSCausesAWarning(t *testing.T) {
	for address, warns := range map[string]bool{"127.0.0.1:0": false, "[::1]:0": false, "0.0.0.0:0": true, ":0": true, "": false} {
		var log bytes.Buffer
		s := New(slog.New(slog.NewTextHandler(&log, nil)))
		if _, err := s.ListenPrivate("metrics", address, nil, http.NotFoundHandler()); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(log.String(), "this address has no access control"); got != warns {
			t.Errorf("%q: %q", address, log.String())
		}
		s.Close()
	}
}
