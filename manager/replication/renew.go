package replication

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A renewal is the state of renewing the token of an identity.
type renewal struct {
	token   serviceToken // zero: there is no token to renew
	next    time.Time    // time of the next check, by the real clock; zero: now
	tried   bool         // whether a renewal was tried
	refusal string       // the reason why the last renewal failed, or ""
}

func newRenewal(token string) (r renewal) {
	if t, ok := readToken(token); ok {
		r.token = t
	}
	return r
}

func (r renewal) warning() string {
	if r.refusal == "" {
		return ""
	}
	return fmt.Sprintf("; its token expires %s and is not renewed: %s", r.token.expires.Format(time.RFC3339), r.refusal)
}

// renew requests a new token once a tenth of the token's life is over, and writes it into the
// Secret. The worker then reads the new token like any other change of the Secret. A failure only
// changes the State, because the old token stays valid until it expires.
func (w *worker) renew(ctx context.Context) {
	n := &w.renewal
	if n.token.expires.IsZero() {
		return
	}
	now := w.r.opts.Now()
	if early := n.token.renewal().Sub(now); early > 0 {
		n.next = time.Now().Add(early)
		return
	}
	if n.tried && time.Now().Before(n.next) {
		return
	}
	n.tried = true
	// The next attempt follows after a tenth of the remaining life, so there are many attempts
	// before the token expires.
	n.next = time.Now().Add(max(w.r.pace.renew, n.token.expires.Sub(now)/10))
	if err := w.renewToken(ctx); err != nil {
		n.refusal = cmp.Or(err.Error(), "unknown")
		w.log.Warn("cannot renew the peer's token", "account", n.token.namespace+"/"+n.token.account, "expires", n.token.expires, "error", err)
		return
	}
	w.log.Info("renewed the peer's token", "account", n.token.namespace+"/"+n.token.account)
	n.refusal = ""
}

// maxToken bounds a token, in octets, because we store it in a Secret. Tokens of API servers have
// one or two KiB.
const maxToken = 16 << 10

func (w *worker) renewToken(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*w.r.pace.request)
	defer cancel()
	old := w.renewal.token
	token, err := w.link.newToken(ctx, old)
	if err != nil {
		_, text := diagnose(err)
		return fmt.Errorf("%s %s; it must allow this cluster to create serviceaccounts/token for %s", w.link, text, old.account)
	}
	if len(token) > maxToken {
		return fmt.Errorf("%s returned a token of %d octets; want at most %d", w.link, len(token), maxToken)
	}
	fresh, ok := readToken(token)
	if !ok || !fresh.expires.After(old.expires) || fresh.account != old.account || fresh.namespace != old.namespace ||
		!slices.Equal(fresh.audiences, old.audiences) {
		return fmt.Errorf("%s returned a token that is not later than the current one, or for another account or audience", w.link)
	}
	kubeconfig, err := withToken(w.secret.Data[isthmus.SecretKubeconfig], w.link.user, token)
	if err != nil {
		return err
	}
	return w.replaceKubeconfig(ctx, kubeconfig)
}

// replaceKubeconfig writes the Secret, unless somebody has changed it in the meantime.
func (w *worker) replaceKubeconfig(ctx context.Context, kubeconfig []byte) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]string{"resourceVersion": w.secret.ResourceVersion},
		"data":     map[string][]byte{isthmus.SecretKubeconfig: kubeconfig},
	})
	if err != nil {
		return err
	}
	written, err := w.r.secrets.Secrets(w.peer.LocalNamespace).Patch(ctx, w.peer.IdentitySecret, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("write the identity into Secret %s/%s: %w", w.peer.LocalNamespace, w.peer.IdentitySecret, err)
	}
	w.secret = written
	return nil
}
