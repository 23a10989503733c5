// Package kubeauth serves HTTP requests only to clients that the API server authenticates and
// authorizes. It has the same effect as controller-runtime's filter
// WithAuthenticationAndAuthorization, without the dependencies of k8s.io/apiserver.
//
//	Authorization: Bearer TOKEN ─ TokenReview ─► user, groups ─ SubjectAccessReview ─► may get /metrics
//
// While the API server does not answer, requests are refused. A decision is cached for a minute, so
// a revoked token may still work during that minute.
package kubeauth

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"
)

const (
	remembered = time.Minute // how long a Reviewer remembers a decision of the API server
	// maxAllowed and maxDenied are the maximum numbers of remembered decisions. They are separate,
	// so that the denials of a flood of wrong tokens do not displace permissions.
	maxAllowed = 256
	maxDenied  = 1024
	// perSecond and burst limit the requests to the API server about tokens that were not allowed
	// before. So a flood of wrong tokens does not become a flood of these requests.
	perSecond = 5
	burst     = 20
	// patience is the time within which the API server must answer both reviews.
	patience = 5 * time.Second
	// logInterval is the minimum interval between two log messages about an API server that does
	// not answer.
	logInterval = 30 * time.Second
)

// A Reviewer authorizes requests by TokenReviews and SubjectAccessReviews at the API server. Its
// methods may be called concurrently.
type Reviewer struct {
	tokens authenticationclient.TokenReviewInterface
	access authorizationclient.SubjectAccessReviewInterface
	log    *slog.Logger
	limit  *rate.Limiter
	now    func() time.Time

	mu              sync.Mutex
	allowed, denied map[key]decision
	pending         map[key]*question
	lastLogged      time.Time
}

// key is the SHA-256 of method, path and token, so that no token is stored.
type key [sha256.Size]byte

// decision is the API server's decision about a key.
type decision struct {
	code  int // HTTP status; 200: permitted
	why   string
	until time.Time // end of the decision's validity
}

// question is a review in progress. Other requests with the same key wait for its decision.
type question struct {
	done     chan struct{}
	decision decision // may be read once done is closed
}

// New returns a Reviewer that authenticates to the API server with config. It does not connect
// yet.
func New(config *rest.Config, log *slog.Logger) (*Reviewer, error) {
	config = rest.CopyConfig(config)
	config.QPS = -1 // the Reviewer has its own limit
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	tokens, err := authenticationclient.NewForConfigAndClient(config, client)
	if err != nil {
		return nil, err
	}
	access, err := authorizationclient.NewForConfigAndClient(config, client)
	if err != nil {
		return nil, err
	}
	return &Reviewer{
		tokens: tokens.TokenReviews(), access: access.SubjectAccessReviews(), log: log,
		limit: rate.NewLimiter(perSecond, burst), now: time.Now,
		allowed: make(map[key]decision), denied: make(map[key]decision), pending: make(map[key]*question),
	}, nil
}

// Guard returns a handler that passes a request to h if its token permits the method and path.
func (r *Reviewer) Guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		v := r.decide(req)
		switch v.code {
		case http.StatusOK:
			h.ServeHTTP(w, req)
			return
		case http.StatusUnauthorized:
			w.Header().Set("WWW-Authenticate", "Bearer")
		case http.StatusTooManyRequests, http.StatusServiceUnavailable:
			w.Header().Set("Retry-After", "1")
		}
		http.Error(w, v.why, v.code)
	})
}

// decide returns a remembered decision, waits for a review in progress, or requests a review from
// the API server.
func (r *Reviewer) decide(req *http.Request) decision {
	scheme, token, _ := strings.Cut(req.Header.Get("Authorization"), " ")
	if token = strings.TrimSpace(token); !strings.EqualFold(scheme, "Bearer") || token == "" {
		return decision{code: http.StatusUnauthorized, why: "want a bearer token of this cluster"}
	}
	verb, path := strings.ToLower(req.Method), req.URL.Path
	k := key(sha256.Sum256([]byte(verb + " " + path + " " + token)))

	r.mu.Lock()
	now := r.now()
	before, known := r.allowed[k]
	if !known {
		before = r.denied[k]
	}
	if now.Before(before.until) {
		r.mu.Unlock()
		return before
	}
	q := r.pending[k]
	if q != nil {
		r.mu.Unlock()
		select {
		case <-q.done:
			return q.decision
		case <-req.Context().Done():
			return decision{code: http.StatusServiceUnavailable, why: "the client ended the request before the API server answered"}
		}
	}
	// A token that was allowed before is exempt, so that its client still has access during a
	// flood.
	if !known && !r.limit.AllowN(now, 1) {
		r.mu.Unlock()
		return decision{code: http.StatusTooManyRequests, why: "too many unknown tokens; try again"}
	}
	q = &question{done: make(chan struct{})}
	r.pending[k] = q
	r.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(req.Context()), patience) // other requests may wait for the decision, so the end of this request does not cancel the review
	defer cancel()
	q.decision = r.review(ctx, token, verb, path)
	r.mu.Lock()
	delete(r.pending, k)
	q.decision.until = r.now().Add(remembered)
	r.remember(k, q.decision)
	r.mu.Unlock()
	close(q.done)
	return q.decision
}

// remember stores a decision of the API server. It does not store that the API server was
// unavailable.
func (r *Reviewer) remember(k key, v decision) {
	switch v.code {
	case http.StatusOK:
		delete(r.denied, k)
		keep(r.allowed, k, v, maxAllowed)
	case http.StatusUnauthorized, http.StatusForbidden:
		delete(r.allowed, k)
		keep(r.denied, k, v, maxDenied)
	}
}

// keep adds a decision to decisions. If decisions already has limit elements, it replaces the
// oldest one.
func keep(decisions map[key]decision, k key, v decision, limit int) {
	if _, exists := decisions[k]; !exists && len(decisions) >= limit {
		var oldest key
		var until time.Time
		for other, o := range decisions {
			if until.IsZero() || o.until.Before(until) {
				oldest, until = other, o.until
			}
		}
		delete(decisions, oldest)
	}
	decisions[k] = v
}

// review requests two decisions from the API server: to which user the token belongs, and whether
// that user may get the path.
func (r *Reviewer) review(ctx context.Context, token, verb, path string) decision {
	who, err := r.tokens.Create(ctx, &authentication.TokenReview{Spec: authentication.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return r.unavailable("TokenReview", err)
	}
	if !who.Status.Authenticated {
		return decision{code: http.StatusUnauthorized, why: "the API server does not accept this token; want one of this cluster"}
	}
	user := who.Status.User
	extra := make(map[string]authorization.ExtraValue, len(user.Extra))
	for name, values := range user.Extra {
		extra[name] = authorization.ExtraValue(values)
	}
	may, err := r.access.Create(ctx, &authorization.SubjectAccessReview{Spec: authorization.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		NonResourceAttributes: &authorization.NonResourceAttributes{Path: path, Verb: verb},
	}}, metav1.CreateOptions{})
	if err != nil {
		return r.unavailable("SubjectAccessReview", err)
	}
	if !may.Status.Allowed {
		return decision{code: http.StatusForbidden, why: fmt.Sprintf("user %q may not %s %s; want a ClusterRole with nonResourceURLs, such as isthmus-metrics-reader",
			user.Username, verb, path)}
	}
	return decision{code: http.StatusOK}
}

// unavailable returns the decision to refuse a request because the API server has not answered. It
// writes the reason only into the log, because the client is not authenticated.
func (r *Reviewer) unavailable(kind string, err error) decision {
	r.mu.Lock()
	mayLog := r.now().Sub(r.lastLogged) > logInterval
	if mayLog {
		r.lastLogged = r.now()
	}
	r.mu.Unlock()
	if mayLog {
		want := "check that the API server answers"
		if apierrors.IsForbidden(err) {
			want = "run `isthmus install --metrics-auth`, which gives the rights"
		}
		r.log.Warn("cannot authorize requests for metrics; refusing them", "kind", kind, "error", err, "remedy", want)
	}
	return decision{code: http.StatusServiceUnavailable, why: "refused: cannot check the token at the API server; the log has the reason"}
}
