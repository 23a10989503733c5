package replication

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/netconfig"
)

var answered = v1alpha1.NetworkConfigStatus{
	Processed: true, PodCIDRNAT: "10.61.0.0/16", ExternalCIDRNAT: v1alpha1.None,
	Conditions: []metav1.Condition{{
		Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAnswered, Message: "fine",
		LastTransitionTime: metav1.NewTime(time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)),
	}},
}

// established returns a pair whose original is published and answered.
func established(t *testing.T, identity func(*pair) map[string][]byte) *pair {
	t.Helper()
	p := newPair(t)
	p.identify(identity(p))
	p.create(home, p.original())
	p.start()
	p.awaitUpToDate()
	p.answer(answered)
	p.eventually(func() string { return p.unanswered(answered) })
	return p
}

func (p *pair) unanswered(want v1alpha1.NetworkConfigStatus) string {
	if got := p.here().Status; got.Processed != want.Processed || got.PodCIDRNAT != want.PodCIDRNAT ||
		got.ExternalCIDRNAT != want.ExternalCIDRNAT || len(got.Conditions) != len(want.Conditions) {
		return fmt.Sprintf("status here: %+v", got)
	}
	return ""
}

func (p *pair) outdated() string {
	a, b := p.here(), p.atPeer()
	if a == nil || b == nil || a.Spec.EndpointIP != b.Spec.EndpointIP || a.Spec.PodCIDR != b.Spec.PodCIDR {
		return fmt.Sprintf("copy is not the original:\n%+v\n%+v", a, b)
	}
	return ""
}

func move(to string) func(*v1alpha1.NetworkConfig) {
	return func(o *v1alpha1.NetworkConfig) { o.Spec.EndpointIP = to }
}

func TestReplicatorCopiesSpecAndStatusLikeLiqo(t *testing.T) {
	for name, identity := range map[string]func(*pair) map[string][]byte{
		"token": (*pair).byToken, "certificate": (*pair).byCert, "Liqo's Secret": (*pair).byLiqo,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := established(t, identity)
			here, atPeer := p.here(), p.atPeer()
			wantLabels := map[string]string{
				v1alpha1.LabelReplication: "false", v1alpha1.LabelReplicated: "true", v1alpha1.LabelOriginID: p.own,
				v1alpha1.LabelRemoteID: p.peer.ID,
			}
			if !maps.Equal(atPeer.Labels, wantLabels) || len(atPeer.Annotations)+len(atPeer.OwnerReferences)+len(atPeer.Finalizers) != 0 {
				t.Errorf("metadata of the copy: %+v", atPeer.ObjectMeta)
			}
			if !slices.Contains(here.Finalizers, v1alpha1.FinalizerReplicator) {
				t.Errorf("finalizers of the original: %v", here.Finalizers)
			}
			if got := here.Status.Conditions[0]; !got.LastTransitionTime.Equal(&answered.Conditions[0].LastTransitionTime) || got.Message != "fine" {
				t.Errorf("condition came back as %+v", got)
			}

			p.change(home, p.here, func(o *v1alpha1.NetworkConfig) { o.Labels["team"], o.Spec.EndpointIP = "red", "198.51.100.8" })
			p.eventually(p.outdated)
			p.change(away, p.atPeer, func(o *v1alpha1.NetworkConfig) {
				o.Spec.EndpointIP, o.Spec.BackendConfig["more"] = "203.0.113.99", "x"
				o.Labels["team"], o.Annotations = "green", map[string]string{"theirs": "stays"}
			})
			p.eventually(func() string {
				if p.atPeer().Spec.BackendConfig["more"] != "" {
					return "an edit of the spec at the peer was not undone"
				}
				return p.outdated()
			})
			if atPeer := p.atPeer(); atPeer.Labels["team"] != "green" || atPeer.Annotations["theirs"] != "stays" {
				t.Errorf("labels and annotations of the peer's tools do not stay: %+v", atPeer.ObjectMeta)
			}

			p.answer(v1alpha1.NetworkConfigStatus{}) // the peer removes its answer
			p.eventually(func() string { return p.unanswered(v1alpha1.NetworkConfigStatus{}) })
			if s, _ := p.r.State(p.peer.ID); s.Answered != (Condition{}) || s.Published.Status != metav1.ConditionTrue {
				t.Errorf("state %+v", s)
			}
		})
	}
}

// Liqo does not record the networks that it has answered, and keeps its answers. So only the answer
// of a copy that never had other networks is used.
func TestLiqosAnswerToPreviousNetworksIsIgnored(t *testing.T) {
	p := established(t, (*pair).byToken)
	liqos := v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: v1alpha1.None, ExternalCIDRNAT: v1alpha1.None}
	p.answer(liqos)
	p.eventually(func() string { return p.unanswered(liqos) })
	p.change(away, p.atPeer, func(o *v1alpha1.NetworkConfig) { o.Finalizers = []string{v1alpha1.FinalizerTunnelEndpointCreator} })
	before := p.atPeer().UID

	p.change(home, p.here, func(o *v1alpha1.NetworkConfig) { o.Spec.PodCIDR = "10.200.0.0/16" })
	p.eventually(func() string {
		if atPeer := p.atPeer(); atPeer.UID != before || atPeer.DeletionTimestamp.IsZero() {
			return "the copy is not deleted"
		}
		return ""
	})
	if atPeer := p.atPeer(); atPeer.Spec.PodCIDR != "10.244.0.0/16" {
		t.Errorf("an answered copy got other networks: %+v", atPeer.Spec)
	}
	p.change(away, p.atPeer, func(o *v1alpha1.NetworkConfig) { o.Finalizers = nil }) // Liqo's manager removes its finalizer
	p.eventually(func() string { return p.unanswered(v1alpha1.NetworkConfigStatus{}) })
	if atPeer := p.atPeer(); atPeer == nil || atPeer.UID == before || atPeer.Spec.PodCIDR != "10.200.0.0/16" {
		t.Fatalf("the new copy: %+v", atPeer)
	}
	liqos.PodCIDRNAT = "10.244.0.0/16" // Liqo gave this answer before
	p.answer(liqos)
	p.eventually(func() string { return p.unanswered(liqos) })
	p.awaitUpToDate()
}

func TestDeletedCopyIsRecreated(t *testing.T) {
	t.Parallel()
	p := established(t, (*pair).byToken)
	p.change(away, p.atPeer, func(o *v1alpha1.NetworkConfig) { o.Finalizers = []string{v1alpha1.FinalizerTunnelEndpointCreator} })
	old := p.atPeer()
	p.must(away.admin.Delete(t.Context(), old))
	p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonPublishing, "being deleted by the peer")
	p.change(away, p.atPeer, func(o *v1alpha1.NetworkConfig) { o.Finalizers = nil })
	p.eventually(func() string {
		if c := p.atPeer(); c == nil || c.UID == old.UID {
			return "no new copy"
		}
		return p.unanswered(v1alpha1.NetworkConfigStatus{}) // the status of the new copy is empty
	})
	p.awaitUpToDate()
}

func TestOriginalStaysUntilItsCopyIsDeleted(t *testing.T) {
	t.Parallel()
	p := established(t, (*pair).byToken)
	p.change(away, p.atPeer, func(o *v1alpha1.NetworkConfig) { o.Finalizers = []string{v1alpha1.FinalizerTunnelEndpointCreator} })
	p.must(home.admin.Delete(t.Context(), p.here()))
	p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonPublishing, "waiting for the deletion", p.peer.RemoteNamespace, v1alpha1.FinalizerTunnelEndpointCreator)
	time.Sleep(300 * time.Millisecond)
	if p.here() == nil {
		t.Fatal("the original is gone before its copy")
	}
	p.change(away, p.atPeer, func(o *v1alpha1.NetworkConfig) { o.Finalizers = nil })
	p.eventually(func() string {
		if p.here() != nil || p.atPeer() != nil {
			return "original or copy is still there"
		}
		return ""
	})
	p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonPublishing, "no NetworkConfig")

	p.create(home, p.original()) // creates the original again
	p.awaitUpToDate()
}

func TestForeignNetworkConfigsAtThePeerAreNotChanged(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.identify(p.byToken())
	strange := p.original()
	strange.Labels[v1alpha1.LabelRemoteID] = "another"
	p.create(home, strange)
	copyNamed := func(name, origin string) *v1alpha1.NetworkConfig {
		c := netconfig.CopyOf(p.original(), origin, p.peer.RemoteNamespace)
		c.Name = name
		return c
	}
	foreign, orphan := copyNamed("foreign", "somebody"), copyNamed("orphan", p.own)
	p.create(away, foreign, orphan)
	p.start()
	p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonPublishing, "no NetworkConfig")
	p.eventually(func() string {
		if err := away.admin.Get(t.Context(), client.ObjectKeyFromObject(orphan), orphan); !apierrors.IsNotFound(err) {
			return fmt.Sprint("a copy without original is still there: ", err)
		}
		return ""
	})
	if p.atPeer() != nil || len(p.here().Finalizers) > 0 {
		t.Error("an original for another cluster was replicated, or held")
	}
	if err := away.admin.Get(t.Context(), client.ObjectKeyFromObject(foreign), foreign); err != nil {
		t.Error("the copy of another origin: ", err)
	}
	p.change(home, p.here, func(o *v1alpha1.NetworkConfig) { o.Labels[v1alpha1.LabelRemoteID] = p.peer.ID })
	p.awaitUpToDate()
}

func TestCopiesWithoutAnOriginalAreDeleted(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.identify(p.byToken())
	for i := range 3*maxListed + 5 {
		c := netconfig.CopyOf(p.original(), p.own, p.peer.RemoteNamespace)
		c.Name = fmt.Sprintf("orphan-%d", i)
		p.create(away, c)
	}
	p.create(home, p.original())
	p.start()
	p.awaitUpToDate()
	p.eventually(func() string {
		var list v1alpha1.NetworkConfigList
		p.must(away.admin.List(t.Context(), &list, client.InNamespace(p.peer.RemoteNamespace)))
		if len(list.Items) != 1 {
			return fmt.Sprintf("%d objects are left", len(list.Items))
		}
		return ""
	})
}

func TestInvalidIdentitySecretIsReported(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.create(home, p.original())
	p.start()
	where := p.peer.LocalNamespace + "/" + p.peer.IdentitySecret
	p.awaitState(isthmus.ReasonSecretMissing, isthmus.ReasonPublishing, where)
	p.identify(map[string][]byte{"other": []byte("x")})
	p.awaitState(isthmus.ReasonSecretInvalid, isthmus.ReasonPublishing, where, "neither the key kubeconfig nor")
	p.identify(withKubeconfig(kubeconfig(away.URL(), away.CA(), &clientcmdapi.AuthInfo{
		Exec: &clientcmdapi.ExecConfig{APIVersion: "client.authentication.k8s.io/v1", Command: "/bin/false", InteractiveMode: "Never"},
	})))
	p.awaitState(isthmus.ReasonSecretInvalid, isthmus.ReasonPublishing, "exec", "must not run programs")
	p.identify(withKubeconfig(kubeconfig(away.URL(), away.CA(), &clientcmdapi.AuthInfo{Token: "no.such.token"})))
	p.awaitState(isthmus.ReasonUnauthorized, isthmus.ReasonPublishing, away.URL(), "Unauthorized", "isthmus peer")
	p.identify(withKubeconfig(kubeconfig(away.URL(), home.CA(), &clientcmdapi.AuthInfo{Token: p.token()})))
	p.awaitState(isthmus.ReasonUnreachable, isthmus.ReasonPublishing, "certificate")
	p.identify(withKubeconfig(kubeconfig("https://"+kubetest.Address(1), away.CA(), &clientcmdapi.AuthInfo{Token: p.token()})))
	p.awaitState(isthmus.ReasonUnreachable, isthmus.ReasonPublishing, "connection refused")
	if len(p.here().Finalizers) > 0 {
		t.Error("the original is held although nothing was ever published")
	}

	p.identify(p.byToken())
	p.awaitUpToDate()
	p.must(home.admin.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: p.peer.LocalNamespace, Name: p.peer.IdentitySecret}}))
	p.awaitState(isthmus.ReasonSecretMissing, isthmus.ReasonPublishing, "not found")
}

func TestEachRefusalByThePeersAPIServerHasItsReason(t *testing.T) {
	t.Parallel()
	t.Run("revoked", func(t *testing.T) {
		t.Parallel()
		p := established(t, (*pair).byToken)
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: p.peer.RemoteNamespace, Name: "peer"}}
		p.must(away.admin.Delete(t.Context(), account))
		// The copy was up to date when it was last seen, so Published stays True. The identity is not
		// accepted.
		p.awaitState(isthmus.ReasonUnauthorized, isthmus.ReasonUpToDate, "isthmus peer")
		p.change(home, p.here, move("198.51.100.8"))
		p.awaitState(isthmus.ReasonUnauthorized, isthmus.ReasonPublishing, "not up to date")
		account.ResourceVersion = ""
		p.create(away, account)
		p.identify(p.byToken())
		p.eventually(p.outdated)
		p.awaitUpToDate()
	})
	t.Run("no permission", func(t *testing.T) {
		t.Parallel()
		p := established(t, (*pair).byCert)
		right := binding(p.peer.RemoteNamespace, "peer")
		p.must(away.admin.Get(t.Context(), client.ObjectKeyFromObject(right), right))
		p.must(away.admin.Delete(t.Context(), right))
		p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonForbidden, "cannot")
		right.ResourceVersion = ""
		p.create(away, right)
		p.awaitUpToDate()
	})
	t.Run("quota", func(t *testing.T) {
		t.Parallel()
		p := newPair(t)
		p.identify(p.byToken())
		quota := &corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Namespace: p.peer.RemoteNamespace, Name: "none"},
			Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/networkconfigs.net.liqo.io": resource.MustParse("0")}},
		}
		p.create(away, quota)
		p.eventually(func() string {
			p.must(away.admin.Get(t.Context(), client.ObjectKeyFromObject(quota), quota))
			if quota.Status.Hard == nil {
				return "quota is not in force"
			}
			return ""
		})
		p.create(home, p.original())
		p.start()
		p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonForbidden, "quota: none")
		p.must(away.admin.Delete(t.Context(), quota))
		p.awaitUpToDate()
	})
	t.Run("namespace deleted", func(t *testing.T) {
		t.Parallel()
		p := newPair(t)
		p.user = "system:admin"
		cert, key, err := away.ClientCert(p.user, "system:masters") // permissions that do not depend on the namespace
		p.must(err)
		p.identify(withKubeconfig(kubeconfig(away.URL(), away.CA(), &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key})))
		p.create(home, p.original())
		p.start()
		p.awaitUpToDate()
		p.must(away.admin.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.peer.RemoteNamespace}}))
		p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonNamespaceGone, p.peer.RemoteNamespace)
		p.eventually(func() string {
			s, _ := p.r.State(p.peer.ID)
			if !strings.Contains(s.Published.Message, "not found") {
				return "the namespace is not quite gone"
			}
			return ""
		})
		p.must(home.admin.Delete(t.Context(), p.here())) // no copy exists, so the deletion does not have to wait
		p.eventually(func() string {
			if p.here() != nil {
				return "the original is still there"
			}
			return ""
		})
	})
	t.Run("foreign object with the name of the copy", func(t *testing.T) {
		t.Parallel()
		p := newPair(t)
		p.identify(p.byToken())
		obstacle := netconfig.CopyOf(p.original(), p.own, p.peer.RemoteNamespace)
		obstacle.Labels = map[string]string{v1alpha1.LabelReplication: "true"}
		p.create(away, obstacle)
		p.create(home, p.original())
		p.start()
		p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonRefusedByPeer, "already exists", "delete it there")
		p.must(away.admin.Delete(t.Context(), obstacle))
		p.awaitUpToDate()
	})
}

func TestOnlyKnownFieldsOfAnAnswerAreCopied(t *testing.T) {
	p := established(t, (*pair).byToken)
	long := answered
	long.PodCIDRNAT = "10.62.0.0/16"
	long.Conditions = nil
	for i := range 10 {
		c := answered.Conditions[0]
		c.Type, c.Message = fmt.Sprintf("Example%d", i), strings.Repeat("x", 32<<10)
		long.Conditions = append(long.Conditions, c)
	}
	accepted := answered.Conditions[0]
	accepted.Message = strings.Repeat("y", netconfig.MaxAnswer-4) + strings.Repeat("ä", 10_000) // shortening may split the last character
	long.Conditions = append(long.Conditions, accepted)
	p.answer(long)
	p.eventually(func() string {
		if got := p.here().Status; got.PodCIDRNAT != long.PodCIDRNAT {
			return fmt.Sprintf("%.200v", got)
		}
		return ""
	})
	got := p.here().Status
	if len(got.Conditions) != 1 || got.Conditions[0].Type != v1alpha1.ConditionAccepted {
		t.Fatalf("%d conditions are taken over", len(got.Conditions))
	}
	if m := got.Conditions[0].Message; len(m) > netconfig.MaxAnswer || !strings.HasSuffix(m, "y...") {
		t.Errorf("%d octets of its message, with the end %q", len(m), m[max(0, len(m)-8):])
	}
	before := writes(t, home)
	time.Sleep(2 * time.Second) // a worker that always saw a difference would write fourteen times
	if n := writes(t, home) - before; n > 2 {
		t.Errorf("%d writes at rest", n)
	}
}

func TestInvalidAnswerIsRefusedWithTheNameOfItsField(t *testing.T) {
	p := established(t, (*pair).byToken)
	for field, bad := range map[string]v1alpha1.NetworkConfigStatus{
		"podCIDRNAT":      {Processed: true, PodCIDRNAT: "10.61.0.1/16", ExternalCIDRNAT: v1alpha1.None},
		"externalCIDRNAT": {Processed: true, PodCIDRNAT: "10.61.0.0/16", ExternalCIDRNAT: "127.0.0.0/8"},
		"conditions":      {Processed: true, PodCIDRNAT: v1alpha1.None, ExternalCIDRNAT: v1alpha1.None, Conditions: []metav1.Condition{{Type: v1alpha1.ConditionAccepted}}},
		"Too long":        {Processed: true, PodCIDRNAT: strings.Repeat("1", 1<<20), ExternalCIDRNAT: v1alpha1.None},
	} {
		before := writes(t, home)
		p.answer(bad)
		p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonUpToDate, field)
		if s, _ := p.r.State(p.peer.ID); s.Answered.Status != metav1.ConditionFalse || s.Answered.Reason != isthmus.ReasonInvalid ||
			len(s.Answered.Message) > 1000 {
			t.Errorf("%s: %+v", field, s.Answered)
		}
		if wrong := p.unanswered(answered); wrong != "" {
			t.Errorf("%s: the last good answer is gone: %s", field, wrong)
		}
		time.Sleep(2 * time.Second) // a worker without a pause would write fourteen times
		if n := writes(t, home) - before; n > 6 {
			t.Errorf("%s: %d writes for one bad answer", field, n)
		}
		p.change(home, p.here, move(fmt.Sprintf("198.51.100.%d", len(field)))) // the change is published nevertheless
		p.eventually(p.outdated)
	}
	p.answer(answered)
	p.eventually(func() string {
		if s, _ := p.r.State(p.peer.ID); s.Answered != (Condition{}) {
			return "the refusal stays"
		}
		return p.unanswered(answered)
	})
}

func TestNewIdentityReplacesAllConnections(t *testing.T) {
	t.Parallel()
	p := established(t, (*pair).byToken)
	for i, identity := range []func(*pair) map[string][]byte{(*pair).byCert, (*pair).byLiqo, (*pair).byToken, (*pair).byCert} {
		data := identity(p)
		p.change(home, p.here, move(fmt.Sprintf("198.51.100.%d", 20+i)))
		p.identify(data)
		p.answer(v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: fmt.Sprintf("10.%d.0.0/16", 70+i), ExternalCIDRNAT: v1alpha1.None})
		want := p.atPeer().Status
		p.eventually(p.outdated)
		p.eventually(func() string { return p.unanswered(want) })
		p.awaitUpToDate()
		p.eventually(func() string {
			p.r.pool.mu.Lock()
			defer p.r.pool.mu.Unlock()
			if n := len(p.r.pool.users); n != 1 {
				return fmt.Sprintf("%d endpoints are in use", n)
			}
			for e := range p.r.pool.users {
				if _, cert := data[liqoCert]; cert && e.cert != string(data[liqoCert]) {
					return "the connection is the old identity's"
				}
			}
			return ""
		})
	}
}

func TestTokenIsRenewedAfterATenthOfItsLife(t *testing.T) {
	t.Parallel()
	p := established(t, (*pair).byToken)
	secret := func() *corev1.Secret {
		var s corev1.Secret
		p.must(home.admin.Get(t.Context(), client.ObjectKey{Namespace: p.peer.LocalNamespace, Name: p.peer.IdentitySecret}, &s))
		return &s
	}
	first := secret()
	old, _ := readToken(tokenOf(t, first))
	at := func(age time.Duration) { p.ahead.Store(int64(time.Until(old.expires.Add(age - 10*time.Minute)))) } // the token lasts ten minutes
	at(50 * time.Second)
	p.change(home, p.here, move("198.51.100.8"))
	p.eventually(p.outdated)
	if got := secret(); got.ResourceVersion != first.ResourceVersion {
		t.Error("renewed before a tenth was over")
	}

	// Without permission to renew, the old token stays in use, and the State has its expiry.
	permission := role(p.peer.RemoteNamespace, "peer", rule("net.liqo.io", "networkconfigs", "get list watch create update patch delete"))
	p.must(away.admin.Update(t.Context(), permission))
	p.eventually(func() string { // the API server's authorizer applies the change with a delay
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: "system:serviceaccount:" + p.peer.RemoteNamespace + ":peer",
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: p.peer.RemoteNamespace, Verb: "create", Resource: "serviceaccounts", Subresource: "token", Name: "peer"},
		}}
		p.must(away.admin.Create(t.Context(), review))
		if review.Status.Allowed {
			return "the right is still there"
		}
		return ""
	})
	at(9*time.Minute + 30*time.Second)
	p.change(home, p.here, move("198.51.100.9"))
	p.eventually(p.outdated)
	p.awaitState(isthmus.ReasonNotRenewed, isthmus.ReasonUpToDate, "its token expires "+old.expires.Format(time.RFC3339), "serviceaccounts/token")

	permission.ResourceVersion = ""
	permission.Rules = append(permission.Rules, rule("", "serviceaccounts/token", "create", "peer"))
	p.must(away.admin.Update(t.Context(), permission))
	p.eventually(func() string { // the next try is after a tenth of the remaining life
		if secret().ResourceVersion == first.ResourceVersion {
			return "the token is still the old one"
		}
		return ""
	})
	fresh, ok := readToken(tokenOf(t, secret()))
	if !ok || !fresh.expires.After(old.expires.Add(time.Hour)) || fresh.account != "peer" || !slices.Equal(fresh.audiences, old.audiences) {
		t.Errorf("renewed %+v to %+v", old, fresh)
	}
	if !bytes.Contains(secret().Data[isthmus.SecretKubeconfig], []byte("namespace: kept")) {
		t.Error("the rest of the kubeconfig was not kept")
	}
	p.awaitUpToDate()
	p.eventually(func() string {
		if s, _ := p.r.State(p.peer.ID); strings.Contains(s.Identity.Message, "expires") {
			return "still warns"
		}
		return ""
	})
	p.change(home, p.here, move("198.51.100.10"))
	p.eventually(p.outdated)
}

func tokenOf(t *testing.T, s *corev1.Secret) string {
	t.Helper()
	config, err := clientcmd.Load(s.Data[isthmus.SecretKubeconfig])
	if err != nil {
		t.Fatal(err)
	}
	return config.AuthInfos["us"].Token
}

func TestUnreachablePeerDelaysOnlyItsOwnNetworkConfig(t *testing.T) {
	t.Parallel()
	p := established(t, (*pair).byToken)
	other := p.peer // another peer, without a problem
	other.ID, other.Cluster.ClusterID, other.LocalNamespace = other.ID+"-b", other.ID+"-b", other.LocalNamespace+"-b"

	p.identify(withKubeconfig(kubeconfig("https://"+kubetest.Address(1), away.CA(), &clientcmdapi.AuthInfo{Token: p.token()})))
	p.awaitState(isthmus.ReasonUnreachable, isthmus.ReasonPublishing)
	p.must(home.admin.Delete(t.Context(), p.here()))
	p.awaitState(isthmus.ReasonUnreachable, isthmus.ReasonPublishing, "waiting for the deletion")
	before := p.news()
	time.Sleep(2 * time.Second)
	if p.here() == nil {
		t.Fatal("the original went although nobody has seen its copy go")
	}
	if n := p.news() - before; n > 0 {
		t.Errorf("the state changed %d times though nothing did", n)
	}

	p.change(home, p.here, func(o *v1alpha1.NetworkConfig) { o.Finalizers = nil }) // somebody forces the deletion
	p.r.Set([]Target{other})
	p.eventually(func() string {
		if _, known := p.r.State(p.peer.ID); known || p.here() != nil {
			return "the peer is still known"
		}
		return ""
	})
	if p.atPeer() == nil {
		t.Error("the copy at the peer should have stayed behind")
	}
	p.identify(p.byToken())
	p.create(home, p.original())
	p.r.Set([]Target{p.peer, other}) // the peer is in the list again
	p.awaitUpToDate()
}

func TestNoChangeIsLostWhileAnAPIServerIsFrozen(t *testing.T) {
	p := established(t, (*pair).byToken)
	freeze := quick.request + 3*time.Second
	if s := os.Getenv("ISTHMUS_FREEZE"); s != "" {
		freeze, _ = time.ParseDuration(s)
	}
	t.Cleanup(func() { _, _ = away.Thaw(), home.Thaw() })
	p.must(away.freeze(t.Context()))
	thaw := time.After(freeze)
	p.change(home, p.here, move("198.51.100.8"))
	p.awaitState(isthmus.ReasonUnreachable, isthmus.ReasonPublishing)
	<-thaw
	p.must(away.Thaw())
	p.eventually(p.outdated)
	p.awaitUpToDate()

	before := p.news()
	p.must(home.freeze(t.Context()))
	later := answered
	later.PodCIDRNAT = "10.99.0.0/16"
	p.answer(later)
	time.Sleep(freeze)
	p.must(home.Thaw())
	p.eventually(func() string { return p.unanswered(later) })
	p.change(home, p.here, move("198.51.100.9"))
	p.eventually(p.outdated)
	p.awaitUpToDate()
	if n := p.news() - before; n > 2 { // not up to date, then up to date
		t.Errorf("the state changed %d times while our own API server was away", n)
	}
}

func TestNoChangeIsLostWhenAnAPIServerRestarts(t *testing.T) {
	p := established(t, (*pair).byToken)
	for i, c := range []cluster{away, home} {
		p.must(c.RestartAPIServer(t.Context()))
		p.change(home, p.here, move(fmt.Sprintf("198.51.100.%d", 30+i)))
		p.eventually(p.outdated)
		later := answered
		later.PodCIDRNAT = fmt.Sprintf("10.%d.0.0/16", 80+i)
		p.answer(later)
		p.eventually(func() string { return p.unanswered(later) })
		p.awaitUpToDate()
	}
}

func TestRestartedReplicatorContinuesFromAnyStep(t *testing.T) {
	t.Parallel()
	p := established(t, (*pair).byToken)
	restart := func(meanwhile func()) {
		p.stop()
		meanwhile()
		p.prepare(p.r.opts.Config)
		p.start()
	}
	restart(func() { p.change(home, p.here, move("198.51.100.40")) })
	p.eventually(p.outdated)
	restart(func() { p.must(away.admin.Delete(t.Context(), p.atPeer())) })
	p.awaitUpToDate()
	p.eventually(p.outdated)
	restart(func() { p.must(home.admin.Delete(t.Context(), p.here())) })
	p.eventually(func() string {
		if p.here() != nil || p.atPeer() != nil {
			return "original or copy is still there"
		}
		return ""
	})
}

func TestIdleReplicatorWritesNothing(t *testing.T) {
	p := established(t, (*pair).byToken)
	p.awaitUpToDate()
	p.eventually(func() string {
		before := p.news()
		if wrote := p.writesWithin(6 * time.Second); wrote != "" { // this long, two watches end
			return wrote
		}
		if n := p.news() - before; n > 0 {
			return fmt.Sprintf("the state changed %d times", n)
		}
		return ""
	})
}

// writesWithin returns the writes on both sides during a time, as text; "": none.
func (p *pair) writesWithin(while time.Duration) (wrote string) {
	sides := map[string]cluster{"home": home, "the peer": away}
	before := make(map[string]map[string]int)
	for name, c := range sides {
		before[name] = requests(p.t, c)
	}
	time.Sleep(while)
	for name, c := range sides {
		for labels, n := range requests(p.t, c) {
			if n > before[name][labels] {
				wrote += fmt.Sprintf("with nothing to do, %d writes at %s: %s\n", n-before[name][labels], name, labels)
			}
		}
	}
	return wrote
}

var requestTotal = regexp.MustCompile(`(?m)^apiserver_request_total\{([^}]*)\} (\S+)$`)

// writes returns the total number of writing requests.
func writes(t *testing.T, c cluster) (n int) {
	t.Helper()
	for _, request := range requests(t, c) {
		n += request
	}
	return n
}

// requests returns the numbers of writing requests for NetworkConfigs, Secrets and ServiceAccounts
// that an API server has received, by the labels of its metric.
func requests(t *testing.T, c cluster) map[string]int {
	t.Helper()
	all := make(map[string]int)
	core, err := v1.NewForConfig(c.config)
	if err != nil {
		t.Fatal(err)
	}
	text, err := core.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range requestTotal.FindAllSubmatch(text, -1) {
		labels := string(m[1])
		if !strings.Contains(labels, `resource="networkconfigs"`) && !strings.Contains(labels, `resource="secrets"`) &&
			!strings.Contains(labels, `resource="serviceaccounts"`) {
			continue
		}
		if strings.Contains(labels, `verb="GET"`) || strings.Contains(labels, `verb="LIST"`) || strings.Contains(labels, `verb="WATCH"`) {
			continue
		}
		v, err := strconv.ParseFloat(string(m[2]), 64)
		if err != nil {
			t.Fatal(err)
		}
		all[labels] += int(v)
	}
	return all
}

// With ISTHMUS_PEERS=500, this takes a minute and prints the figures for 500 peers.
func TestGoroutinesPerPeerAreBounded(t *testing.T) {
	p := newPair(t)
	number := 20
	if s := os.Getenv("ISTHMUS_PEERS"); s != "" {
		number, _ = strconv.Atoi(s)
	}
	q := &pair{t: t, own: p.own, peer: Target{LocalNamespace: metav1.NamespaceAll}}
	q.prepare(home.config)
	q.r.pace = defaultPace
	p.r, p.stop = q.r, func() { q.stop() }
	p.create(home, p.original())
	identity := p.byCert()
	var peers []Target
	for i := range number {
		c := &pair{t: t, own: p.own, peer: p.peer}
		c.peer.ID = fmt.Sprintf("%s-%d", p.peer.ID, i)
		c.peer.Cluster.ClusterID, c.peer.LocalNamespace = c.peer.ID, fmt.Sprintf("%s-%d", p.peer.LocalNamespace, i)
		p.create(home, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.peer.LocalNamespace}}, c.original(),
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.peer.LocalNamespace, Name: c.peer.IdentitySecret}, Data: identity})
		peers = append(peers, c.peer)
	}
	q.r.Set(nil)
	q.start()
	p.must(q.r.opts.Cache.Get(t.Context(), client.ObjectKeyFromObject(p.original()), &v1alpha1.NetworkConfig{}))
	memory, goroutines := used()
	began := time.Now()
	q.r.Set(peers)
	p.eventually(func() string {
		for _, peer := range peers {
			if s, _ := q.r.State(peer.ID); s.Published.Reason != isthmus.ReasonUpToDate {
				return fmt.Sprintf("%s: %+v", peer.ID, s)
			}
		}
		return ""
	})
	took := time.Since(began)
	var after uint64
	var each float64
	p.eventually(func() string { // while workers connect, there are more goroutines
		var more int
		after, more = used()
		if each = float64(more-goroutines) / float64(number); number >= 20 && each > 12 {
			return fmt.Sprintf("%.1f goroutines for each peer", each)
		}
		return ""
	})
	t.Logf("%d peers: up to date after %v, %.1f goroutines and %d KiB each", number, took, each, (after-memory)/uint64(number)/1024)
	p.eventually(func() string { return p.writesWithin(2 * time.Second) })
	q.r.Set(nil)
	p.eventually(func() string {
		if _, now := used(); now > goroutines+20 {
			return fmt.Sprintf("%d goroutines, %d before", now, goroutines)
		}
		return ""
	})
}

// used returns the memory of heap and stacks, and the number of goroutines.
func used() (memory uint64, goroutines int) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse, runtime.NumGoroutine()
}
