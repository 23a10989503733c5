package replication

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

func TestDiagnoseReturnsReasonAndTextForEachError(t *testing.T) {
	configs := schema.GroupResource{Group: "net.liqo.io", Resource: "networkconfigs"}
	overNetwork := func(port int, err error) error { // wraps the error as package net/http does, with one of our ports
		return &url.Error{Op: "Get", URL: fmt.Sprint("https://b/", port), Err: &net.OpError{
			Op: "read", Net: "tcp", Source: &net.TCPAddr{Port: port}, Err: os.NewSyscallError("read", err),
		}}
	}
	cert, _, _ := selfSigned(t, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	_, expired := cert.Verify(x509.VerifyOptions{Roots: x509.NewCertPool(), CurrentTime: time.Now()})
	terminating := apierrors.NewForbidden(configs, "n", fmt.Errorf("it is being terminated"))
	terminating.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
	lostWatch := apierrors.FromObject(apierrors.NewClientErrorReporter(http.StatusInternalServerError, "GET", "ClientWatchDecoding").
		AsObject(errors.New("unable to decode an event from the watch stream: http2: client connection lost")))
	for name, tc := range map[string]struct {
		err          error
		reason, text string
	}{
		"401":               {apierrors.NewUnauthorized("Unauthorized"), isthmus.ReasonUnauthorized, "Unauthorized"},
		"403":               {apierrors.NewForbidden(configs, "n", fmt.Errorf("cannot create")), isthmus.ReasonForbidden, "cannot create"},
		"quota":             {apierrors.NewForbidden(configs, "n", fmt.Errorf("exceeded quota: q")), isthmus.ReasonForbidden, "exceeded quota"},
		"terminating":       {terminating, isthmus.ReasonNamespaceGone, "being terminated"},
		"namespace gone":    {apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "t"), isthmus.ReasonNamespaceGone, `namespaces "t" not found`},
		"no CRD":            {apierrors.NewGenericServerResponse(404, "get", configs, "", "404 page not found", 0, true), isthmus.ReasonRefusedByPeer, "could not find"},
		"invalid":           {apierrors.NewInvalid(schema.GroupKind{Kind: "NetworkConfig"}, "n", nil), isthmus.ReasonRefusedByPeer, "invalid"},
		"in the way":        {apierrors.NewAlreadyExists(configs, "n"), isthmus.ReasonRefusedByPeer, "already exists"},
		"too large":         {apierrors.NewRequestEntityTooLargeError("limit"), isthmus.ReasonRefusedByPeer, "too large"},
		"throttled":         {apierrors.NewTooManyRequests("slow down", 1), isthmus.ReasonUnreachable, "slow down"},
		"500":               {apierrors.NewInternalError(fmt.Errorf("etcd")), isthmus.ReasonUnreachable, "etcd"},
		"redirect":          {apierrors.NewGenericServerResponse(302, "get", configs, "", "", 0, false), isthmus.ReasonUnreachable, "says: "},
		"refused":           {overNetwork(1, syscall.ECONNREFUSED), isthmus.ReasonUnreachable, "connection refused"},
		"reset":             {overNetwork(1, syscall.ECONNRESET), isthmus.ReasonUnreachable, "connection reset"},
		"timeout":           {overNetwork(1, context.DeadlineExceeded), isthmus.ReasonUnreachable, "in time"},
		"no such name":      {overNetwork(1, &net.DNSError{Err: "no such host", Name: "b.example", Server: "192.0.2.1:53"}), isthmus.ReasonUnreachable, "b.example: no such host"},
		"closed":            {overNetwork(1, io.ErrUnexpectedEOF), isthmus.ReasonUnreachable, "closes the connection"},
		"expired":           {&tls.CertificateVerificationError{Err: expired}, isthmus.ReasonUnreachable, "only from 2026-01-02T02:04:05Z to 2026-01-02T03:04:05Z"},
		"another CA":        {&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, isthmus.ReasonUnreachable, "CA in the Secret"},
		"a lost watch":      {lostWatch, isthmus.ReasonUnreachable, "stopped answering: the connection was lost"},
		"something else":    {overNetwork(1, fmt.Errorf("novel")), isthmus.ReasonUnreachable, "novel"},
		"too much":          {overNetwork(1, errAnswerTooLong), isthmus.ReasonUnreachable, "4 MiB"},
		"a state as answer": {apierrors.NewUnauthorized(strings.Repeat("lorem\nipsum\x00\u202e ", 1<<16)), isthmus.ReasonUnauthorized, "lorem ipsum lorem"},
	} {
		reason, text := diagnose(tc.err)
		if reason != tc.reason || !strings.Contains(text, tc.text) {
			t.Errorf("%s: %s, %s", name, reason, text)
		}
		c := failure("https://b", tc.err)
		if len(c.Message) > 4*maxQuote || !utf8.ValidString(c.Message) || strings.ContainsAny(c.Message, "\n\x00\u202e") {
			t.Errorf("%s: message %.100q", name, c.Message)
		}
	}
	for _, err := range []error{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, overNetwork(1, &tls.CertificateVerificationError{Err: expired})} {
		if c := failure("https://b", err); !strings.HasSuffix(c.Message, "; if its CA has changed, run isthmus peer again with a kubeconfig that has the new CA; otherwise, the connection may be intercepted") {
			t.Errorf("a wrong certificate: %s", c.Message)
		}
	}
	for _, err := range []error{syscall.ECONNRESET, context.DeadlineExceeded, io.EOF} {
		if _, a := diagnose(overNetwork(1, err)); a != cause(overNetwork(2, err)) {
			t.Errorf("the text depends on our port: %s", a)
		}
	}
}

func TestDiagnoseSortsTheCausesOfAnInvalidObject(t *testing.T) {
	faults := field.ErrorList{
		field.Invalid(field.NewPath("spec", "podCIDR"), "x", "no prefix"),
		field.Required(field.NewPath("spec", "endpointIP"), ""),
		field.Invalid(field.NewPath("spec", "externalCIDR"), "y", "no prefix"),
	}
	kind := schema.GroupKind{Group: "net.liqo.io", Kind: "NetworkConfig"}
	_, a := diagnose(apierrors.NewInvalid(kind, "n", faults))
	slices.Reverse(faults)
	_, b := diagnose(apierrors.NewInvalid(kind, "n", faults))
	if a != b || !strings.Contains(a, `NetworkConfig "n" is invalid: spec.endpointIP: Required value, spec.externalCIDR: Invalid value: "y"`) {
		t.Errorf("%s\n%s", a, b)
	}
}

// hostile returns a link to an API server that answers with the given handler.
func hostile(t *testing.T, answer http.HandlerFunc) *link {
	t.Helper()
	s := httptest.NewUnstartedServer(answer)
	s.EnableHTTP2 = true
	s.Config.ErrorLog = nil
	s.StartTLS()
	t.Cleanup(s.Close)
	p, ca := &pool{}, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
	l, err := newLink(p, identity{endpoint: endpoint{server: s.URL, ca: ca}, token: "secret-token"}, "n")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	return l
}

func TestResponsesOfAHostileAPIServerAreBounded(t *testing.T) {
	within := func(request time.Duration, l *link) (update change) {
		p := quick
		p.request = request
		c, _ := p.list(t.Context(), l.feed("own", "peer"))
		return c
	}
	list := func(l *link) change { return within(time.Minute, l) }
	endless := func(w http.ResponseWriter, start string) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, start)
		for block := strings.Repeat("x", 1<<16); ; {
			if _, err := io.WriteString(w, block); err != nil {
				return
			}
		}
	}

	t.Run("endless list", func(t *testing.T) {
		c := list(hostile(t, func(w http.ResponseWriter, _ *http.Request) { endless(w, `{"kind":"`) }))
		if _, text := diagnose(c.err); !strings.Contains(text, "4 MiB") {
			t.Error(c.err)
		}
	})
	t.Run("endless event", func(t *testing.T) {
		l := hostile(t, func(w http.ResponseWriter, _ *http.Request) { endless(w, `{"type":"`) })
		b, version := &backoff{}, "1"
		if quick.watchOnce(t.Context(), l.feed("own", "peer"), &version, b, func(change) {}) {
			t.Error("the next watch would follow at once")
		}
	})
	t.Run("more objects than the limit", func(t *testing.T) {
		c := list(hostile(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"kind":"NetworkConfigList","apiVersion":"net.liqo.io/v1alpha1","items":[{}`+strings.Repeat(",{}", 5000)+`]}`)
		}))
		if c.err != nil || len(c.all) != maxListed {
			t.Errorf("%d objects, %v", len(c.all), c.err)
		}
	})
	t.Run("redirect", func(t *testing.T) {
		var stolen atomic.Bool
		thief := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { stolen.Store(true) }))
		defer thief.Close()
		c := list(hostile(t, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, thief.URL, http.StatusTemporaryRedirect)
		}))
		if reason, _ := diagnose(c.err); c.err == nil || reason != isthmus.ReasonUnreachable || stolen.Load() {
			t.Errorf("%v, followed: %v", c.err, stolen.Load())
		}
	})
	t.Run("no response", func(t *testing.T) {
		began := time.Now()
		c := within(time.Second, hostile(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
		if _, text := diagnose(c.err); !strings.Contains(text, "in time") || time.Since(began) > 30*time.Second {
			t.Errorf("%v after %v", c.err, time.Since(began))
		}
	})
	t.Run("retry after an hour", func(t *testing.T) {
		began := time.Now()
		c := list(hostile(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(http.StatusTooManyRequests)
		}))
		if reason, _ := diagnose(c.err); reason != isthmus.ReasonUnreachable || time.Since(began) > 30*time.Second {
			t.Errorf("%v after %v", c.err, time.Since(began))
		}
	})
	t.Run("invalid response", func(t *testing.T) {
		for _, text := range []string{"", "null", "[]", `{"kind":"Pod","apiVersion":"v1"}`, `{"items":7}`, "\x00\xff"} {
			l := hostile(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, text)
			})
			list(l)
			b, version := &backoff{}, "1"
			quick.watchOnce(t.Context(), l.feed("own", "peer"), &version, b, func(change) {})
		}
	})
}
