package kubeauth

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authentication "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

var must = expect.NoError

// world is an API server on which the optional rights can be installed.
type world struct {
	t      *testing.T
	server *kubetest.Server
	config *rest.Config // authenticates as an administrator
	client *kubernetes.Clientset
}

func newWorld(t *testing.T) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	dir, err := kubetest.Build(t.Context(), os.Stderr)
	must(t, err)
	w := &world{t: t}
	w.server, err = kubetest.Start(t.Context(), kubetest.Options{Name: "kubeauth", Dir: dir})
	must(t, err)
	t.Cleanup(func() { _ = w.server.Stop() })
	w.config, err = w.server.Config()
	must(t, err)
	w.client, err = kubernetes.NewForConfig(w.config)
	must(t, err)
	_, err = w.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: deploy.Namespace}}, metav1.CreateOptions{})
	must(t, err)
	return w
}

// install applies deploy/optional/metrics-auth.yaml.
func (w *world) install() {
	w.t.Helper()
	text, err := deploy.Optional.ReadFile("optional/metrics-auth.yaml")
	must(w.t, err)
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var role rbacv1.ClusterRole
		var binding rbacv1.ClusterRoleBinding
		if strings.Contains(document, "kind: ClusterRoleBinding") {
			must(w.t, yaml.UnmarshalStrict([]byte(document), &binding))
			_, err = w.client.RbacV1().ClusterRoleBindings().Create(w.t.Context(), &binding, metav1.CreateOptions{})
		} else {
			must(w.t, yaml.UnmarshalStrict([]byte(document), &role))
			_, err = w.client.RbacV1().ClusterRoles().Create(w.t.Context(), &role, metav1.CreateOptions{})
		}
		must(w.t, err)
	}
}

// token creates a ServiceAccount and returns a token for it.
func (w *world) token(account string) string {
	w.t.Helper()
	accounts := w.client.CoreV1().ServiceAccounts(deploy.Namespace)
	_, err := accounts.Create(w.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
	must(w.t, err)
	token, err := accounts.CreateToken(w.t.Context(), account, &authentication.TokenRequest{}, metav1.CreateOptions{})
	must(w.t, err)
	return token.Status.Token
}

// allowMetrics permits an account to read metrics.
func (w *world) allowMetrics(account string) {
	w.t.Helper()
	_, err := w.client.RbacV1().ClusterRoleBindings().Create(w.t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "isthmus-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: deploy.Namespace, Name: account}},
	}, metav1.CreateOptions{})
	must(w.t, err)
}

// reviewCounter counts the TokenReviews that a Reviewer requests.
type reviewCounter struct {
	next  http.RoundTripper
	count *atomic.Int64
}

func (c reviewCounter) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasSuffix(r.URL.Path, "/tokenreviews") {
		c.count.Add(1)
	}
	return c.next.RoundTrip(r)
}

// guarded is a Reviewer with a component's rights and a clock of its own, in front of a handler
// that returns "secrets".
type guarded struct {
	t       *testing.T
	handler http.Handler
	reviews atomic.Int64
	log     bytes.Buffer

	mu  sync.Mutex
	now time.Time
}

func (w *world) guard(token string) *guarded {
	w.t.Helper()
	g := &guarded{t: w.t, now: time.Now()}
	config := rest.AnonymousClientConfig(w.config)
	config.BearerToken = token
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return reviewCounter{next, &g.reviews} })
	r, err := New(config, slog.New(slog.NewTextHandler(&g.log, nil)))
	must(w.t, err)
	r.now = func() time.Time { g.mu.Lock(); defer g.mu.Unlock(); return g.now }
	g.handler = r.Guard(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "secrets") }))
	return g
}

func (g *guarded) later(d time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.now = g.now.Add(d)
}

// request returns the status code and the body. Only a response with code 200 may contain
// "secrets".
func (g *guarded) request(authorization string) (int, string) {
	g.t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(context.Background(), http.MethodGet, "/metrics", http.NoBody)
	if authorization != "" {
		r.Header.Set("Authorization", authorization)
	}
	g.handler.ServeHTTP(w, r)
	if text := w.Body.String(); (w.Code == http.StatusOK) != (text == "secrets") {
		g.t.Errorf("%d: %q", w.Code, text)
	}
	return w.Code, w.Body.String()
}

// waitForCode waits until the API server's authorizer has seen a change, so that requests return
// the status code want.
func (g *guarded) waitForCode(authorization string, want int) {
	g.t.Helper()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		code, text := g.request(authorization)
		if code == want {
			return
		}
		if time.Since(begin) > time.Minute {
			g.t.Fatalf("%d %q, want %d", code, text, want)
		}
		g.later(2 * remembered)
	}
}

func TestMetricsRequireAuthorizationByTheAPIServer(t *testing.T) {
	w := newWorld(t)
	g := w.guard(w.token(deploy.GatewayServiceAccount))
	stranger, scraper := "Bearer "+w.token("stranger"), "Bearer "+w.token("scraper")

	// Without the right to create reviews, every request is refused, and the log names the
	// missing right.
	if code, text := g.request(scraper); code != http.StatusServiceUnavailable || !strings.Contains(text, "cannot check the token at the API server") {
		t.Errorf("%d %q", code, text)
	}
	if log := g.log.String(); !strings.Contains(log, "TokenReview") || !strings.Contains(log, "isthmus install --metrics-auth") {
		t.Errorf("log: %s", log)
	}
	w.install()
	w.allowMetrics("scraper")
	g.waitForCode(scraper, http.StatusOK)

	for _, tc := range []struct {
		authorization string
		code          int
		text          string
	}{
		{"", http.StatusUnauthorized, "want a bearer token"},
		{"Bearer", http.StatusUnauthorized, "want a bearer token"},
		{"Bearer  ", http.StatusUnauthorized, "want a bearer token"},
		{"Basic YTpi", http.StatusUnauthorized, "want a bearer token"},
		{"Bearer wrong", http.StatusUnauthorized, "does not accept this token"},
		{scraper + "x", http.StatusUnauthorized, "does not accept this token"},
		{stranger, http.StatusForbidden, `user "system:serviceaccount:isthmus-system:stranger" may not get /metrics`},
		{scraper, http.StatusOK, ""},
		{"bearer" + strings.TrimPrefix(scraper, "Bearer"), http.StatusOK, ""},
	} {
		if code, text := g.request(tc.authorization); code != tc.code || !strings.Contains(text, tc.text) {
			t.Errorf("%.20q: %d %q, want %d %q", tc.authorization, code, text, tc.code, tc.text)
		}
	}

	// A decision is valid for a minute, even if the right is granted or revoked in that time.
	before := g.reviews.Load()
	for range 100 {
		g.request(scraper)
		g.request(stranger)
		g.request("Bearer wrong")
	}
	if more := g.reviews.Load() - before; more != 0 {
		t.Errorf("asked %d times more for what is known", more)
	}
	w.allowMetrics("stranger")
	must(t, w.client.RbacV1().ClusterRoleBindings().Delete(t.Context(), "scraper", metav1.DeleteOptions{}))
	g.waitForCode(stranger, http.StatusOK)
	g.waitForCode(scraper, http.StatusForbidden)
}

func TestWrongTokensCauseFewTokenReviews(t *testing.T) {
	w := newWorld(t)
	w.install()
	g := w.guard(w.token(deploy.RouteAgentServiceAccount))
	scraper := "Bearer " + w.token("scraper")
	w.allowMetrics("scraper")
	g.waitForCode(scraper, http.StatusOK)

	flood := func() (refused, tooMany int64) {
		var codes [600]atomic.Int64
		var group sync.WaitGroup
		for i := range 32 {
			group.Go(func() {
				for k := range 64 {
					code, _ := g.request(fmt.Sprintf("Bearer wrong-%d-%d", i, k))
					codes[code].Add(1)
				}
			})
		}
		group.Wait()
		return codes[http.StatusUnauthorized].Load(), codes[http.StatusTooManyRequests].Load()
	}
	g.later(time.Hour) // all remembered decisions have expired, and the limit is fully available
	before := g.reviews.Load()
	refused, tooMany := flood()
	if more := g.reviews.Load() - before; more != burst || refused != burst || tooMany != 32*64-burst {
		t.Errorf("%d reviews, want %d; %d refused, %d told to come back", more, burst, refused, tooMany)
	}
	// The flood does not lock out a client that was allowed before, although the API server
	// must be asked again.
	if code, text := g.request(scraper); code != http.StatusOK {
		t.Errorf("the scraper gets %d %q", code, text)
	}
	if more := g.reviews.Load() - before; more != burst+1 {
		t.Errorf("%d reviews", more)
	}
	g.later(2 * time.Second)
	before = g.reviews.Load()
	flood()
	if more := g.reviews.Load() - before; more != 2*perSecond {
		t.Errorf("%d reviews two seconds later, want %d", more, 2*perSecond)
	}
}

func TestWithoutAnAPIServerAccessIsDenied(t *testing.T) {
	w := newWorld(t)
	w.install()
	g := w.guard(w.token(deploy.ManagerServiceAccount))
	scraper := "Bearer " + w.token("scraper")
	w.allowMetrics("scraper")
	g.waitForCode(scraper, http.StatusOK)
	must(t, w.server.Freeze())
	if code, _ := g.request(scraper); code != http.StatusOK {
		t.Errorf("within the minute: %d", code)
	}
	g.later(2 * remembered)
	if code, text := g.request(scraper); code != http.StatusServiceUnavailable || !strings.Contains(text, "cannot check the token at the API server") {
		t.Errorf("frozen: %d %q", code, text)
	}
	if log := g.log.String(); !strings.Contains(log, "check that the API server answers") {
		t.Errorf("log: %s", log)
	}
	must(t, w.server.Thaw())
	g.waitForCode(scraper, http.StatusOK)
	must(t, w.server.Stop())
	g.later(2 * remembered)
	if code, text := g.request(scraper); code != http.StatusServiceUnavailable {
		t.Errorf("gone: %d %q", code, text)
	}
}

func TestDecisionCacheIsBounded(t *testing.T) {
	all, begin := make(map[key]decision), time.Unix(1_700_000_000, 0)
	for i := range 100 {
		keep(all, key{byte(i)}, decision{code: i, until: begin.Add(time.Duration(i) * time.Second)}, 10)
	}
	for i := range 100 {
		if _, ok := all[key{byte(i)}]; ok != (i >= 90) {
			t.Errorf("%d: remembered is %v", i, ok)
		}
	}
}
