package kubeerr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const server = "the API server"

func get(err error) error {
	return &url.Error{Op: "Get", URL: "https://10.96.0.1:443/api/v1/pods", Err: err}
}

func onSocket(err error) error {
	return get(&net.OpError{Op: "dial", Net: "tcp", Source: &net.TCPAddr{Port: 40000}, Err: os.NewSyscallError("connect", err)})
}

func TestRequestWithoutAResponseIsExplained(t *testing.T) {
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no rule"))
	for _, tc := range []struct {
		err  error
		want string
	}{
		{onSocket(syscall.ECONNREFUSED), "the API server does not answer: connection refused"},
		{fmt.Errorf("Node: not read yet: %w", onSocket(syscall.EHOSTUNREACH)), "Node: not read yet: the API server does not answer: no route to host"},
		{get(context.DeadlineExceeded), "the API server does not answer in time"},
		{get(errors.New("http2: client connection lost")), "the API server stopped answering: the connection was lost"},
		{get(io.ErrUnexpectedEOF), "the API server closes the connection"},
		{get(errors.New("http2: server sent GOAWAY and closed the connection; LastStreamID=7")), "the API server closes the connection"},
		{get(&net.DNSError{Err: "no such host", Name: "b.example", Server: "192.0.2.1:53"}), "the API server has a name that does not resolve: b.example: no such host"},
		{fmt.Errorf("NatMapping: %w", fmt.Errorf("failed to get restmapping: %w", fmt.Errorf("failed to get server groups: %w", onSocket(syscall.ECONNREFUSED)))),
			"NatMapping: the API server does not answer: connection refused"},
		{errors.Join(onSocket(syscall.ECONNREFUSED), errors.New("and more")), "the API server does not answer: connection refused\nand more"},
		// Responses and unknown errors keep their text.
		{forbidden, forbidden.Error()},
		{get(fmt.Errorf("getting credentials: exec: %w", &os.PathError{Op: "fork/exec", Path: "aws", Err: syscall.ENOENT})),
			`Get "https://10.96.0.1:443/api/v1/pods": getting credentials: exec: fork/exec aws: no such file or directory`},
		{errors.New("another matter"), "another matter"},
	} {
		got := Plain(server, tc.err)
		if got.Error() != tc.want || !errors.Is(got, tc.err) {
			t.Errorf("%v\n got %q\nwant %q", tc.err, got, tc.want)
		}
	}
	if err := Plain(server, nil); err != nil {
		t.Errorf("no error: %v", err)
	}
}

// The test uses the error that client-go really creates.
func TestBrokenWatchIsExplained(t *testing.T) {
	for name, tc := range map[string]struct {
		lost bool
		want string
	}{
		"the connection is lost": {true, "Pod: the API server stopped answering: the connection was lost"},
		"what comes is nonsense": {false, "Pod: the API server sends data that cannot be decoded: "},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"type":7}`)
		}))
		t.Cleanup(s.Close)
		config := &rest.Config{Host: s.URL}
		if tc.lost {
			config.Wrap(func(next http.RoundTripper) http.RoundTripper { return breakingTransport{next} })
		}
		pods, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		w, err := pods.CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Stop)
		e := <-w.ResultChan()
		if e.Type != watch.Error {
			t.Fatalf("%s: event %v", name, e)
		}
		err = apierrors.FromObject(e.Object)
		if got := Plain(server, fmt.Errorf("Pod: %w", err)).Error(); !strings.HasPrefix(got, tc.want) || strings.Contains(got, "unable to decode") || Answered(err) {
			t.Errorf("%s: %v\n got %q, an answer: %v\nwant %q", name, err, got, Answered(err), tc.want)
		}
	}
	if err := apierrors.NewInternalError(errors.New("etcd")); !Answered(err) {
		t.Error("an error of the server is no answer")
	}
}

// breakingTransport is a transport whose responses end like those of HTTP/2 when pings are not
// answered.
type breakingTransport struct{ next http.RoundTripper }

func (b breakingTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := b.next.RoundTrip(r)
	if err == nil {
		answer.Body.Close()
		answer.Body = io.NopCloser(lost{})
	}
	return answer, err
}

type lost struct{}

func (lost) Read([]byte) (int, error) { return 0, errors.New("http2: client connection lost") }
