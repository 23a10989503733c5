package replication

import (
	"encoding/pem"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// If Liqo peers in band, its proxy (liqo-proxy) is in front of its API server. The proxy accepts
// CONNECT for any name and connects to that API server. The identity has the proxy's address in the
// tunnel.
func TestLiqoIsReachedThroughItsProxy(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"apiVersion":"net.liqo.io/v1alpha1","kind":"NetworkConfig","metadata":{"name":"a"}}`)
	}))
	defer server.Close()
	target := ""
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		target = r.Method + " " + r.Host
		to, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Error(err)
			return
		}
		// A client may send data as soon as it has the response, and the HTTP server would read the first
		// octet. So the response is written after the connection has been hijacked.
		from, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			to.Close()
			return
		}
		_, _ = io.WriteString(from, "HTTP/1.1 200 OK\r\n\r\n")
		go func() {
			_, _ = io.Copy(to, from)
			to.Close()
		}()
		_, _ = io.Copy(from, to)
		from.Close()
	}))
	defer proxy.Close()

	_, cert, key := selfSigned(t, time.Now().Add(time.Hour))
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	id, err := identityFrom(&corev1.Secret{Data: map[string][]byte{
		liqoServer: []byte("https://example.com:6443"), liqoCA: ca, liqoCert: cert, liqoKey: key, liqoProxy: []byte(proxy.URL),
	}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLink(&pool{}, id, "tenant")
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	found, err := l.get(t.Context(), "a")
	if err != nil || found.Name != "a" {
		t.Errorf("found %q, %v", found.Name, err)
	}
	if target != "CONNECT example.com:6443" {
		t.Errorf("the proxy was asked for %q", target)
	}
}
