package inspect

import (
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
)

// peeringWith returns a Peering with the given name and conditions. The function conditions
// documents the format of ready and others.
func peeringWith(name string, ready string, others ...string) *isthmus.Peering {
	return &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1}, Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: name}},
		Status: isthmus.PeeringStatus{Conditions: conditions(ready, others...)}}
}

func states(hops []health.Hop) string {
	var all []string
	for _, h := range hops {
		if h.State != health.Works {
			all = append(all, fmt.Sprintf("%s/%s=%s", h.Cluster, h.Name, h.State))
		}
	}
	return strings.Join(all, " ")
}

func TestOnlyTheFirstBrokenHopIsBlamed(t *testing.T) {
	own := func(c string, broken ...string) (hops []health.Hop) {
		for _, name := range []string{health.HopManager, health.HopGateway, health.HopNodes, health.HopAgents} {
			h := health.Hop{Cluster: c, Name: name, State: health.Works}
			if slices.Contains(broken, name) {
				h.State = health.Broken
			}
			hops = append(hops, h)
		}
		return hops
	}
	const alpha, bravo = "a", "b"
	lost := func(reason string) []string {
		return []string{"False(" + reason + ") Connected: x", "Connected=False(" + reason + ") x"}
	}
	side := func(c string, broken []string, ready string, others ...string) *health.Side {
		e := &health.Side{Cluster: c, Own: own(c, broken...)}
		if ready != "" {
			e.Peerings = [][]health.Hop{health.PeeringHops(c, peeringWith("p", ready, others...), e.Own)}
		}
		return e
	}
	for _, tc := range []struct {
		name  string
		a, b  *health.Side // b is nil if the other side was not queried
		first string       // the first broken hop: cluster/hop and reason
		all   string
	}{
		{"all is well", side(alpha, nil, "True"), side(bravo, nil, "True"), "", ""},
		{"a dead manager makes the rest a memory", side(alpha, []string{health.HopManager}, "True"), nil, "a/manager",
			"a/manager=broken a/identity=unknown a/publishing=unknown a/answer=unknown a/peer's networks=unknown a/agreement=unknown a/tunnel=unknown a/peering=unknown"},
		{"dead gateways make the tunnel wait", side(alpha, []string{health.HopGateway}, "Unknown(GatewaySilent) x", "Connected=Unknown(GatewaySilent) x"), nil, "a/gateway",
			"a/gateway=broken a/tunnel=waits a/peering=waits"},
		{"an agent that is missing is all that is wrong", side(alpha, []string{health.HopAgents}, "True"), nil, "a/route agents", "a/route agents=broken"},
		{"an agent that is missing beside a tunnel that is broken", side(alpha, []string{health.HopAgents, health.HopNodes}, lost(v1alpha1.CauseWrongKey)[0], lost(v1alpha1.CauseWrongKey)[1]), nil,
			"a/tunnel WrongKey", "a/nodes=broken a/route agents=broken a/tunnel=broken"},
		{"an agent that is missing on either side beside what only Ready knows", side(alpha, []string{health.HopAgents}, "False(Overlap) a node"), side(bravo, []string{health.HopAgents}, "True"),
			"a/peering Overlap", "a/route agents=broken b/route agents=broken a/peering=broken"},
		{"what waits for the first is not to blame", side(alpha, nil, "False(Unauthorized) IdentityReady: x", "IdentityReady=False(Unauthorized) x",
			"Published=False(Publishing) x", "Answered=False(WaitingForAnswer) x"), nil, "a/identity Unauthorized",
			"a/identity=broken a/publishing=waits a/answer=waits"},
		{"the other side's manager", side(alpha, nil, "False(WaitingForAnswer) Answered: x", "Answered=False(WaitingForAnswer) x", "TunnelEndpointReady=False(Waiting) x", "Connected=False(Waiting) x"),
			side(bravo, []string{health.HopManager}, "True"), "b/manager",
			"b/manager=broken b/identity=unknown b/publishing=unknown a/answer=waits b/answer=unknown b/peer's networks=unknown a/agreement=waits b/agreement=unknown a/tunnel=waits b/tunnel=unknown b/peering=unknown"},
		{"the other side's gateway", side(alpha, nil, lost(v1alpha1.CausePeerSilent)[0], lost(v1alpha1.CausePeerSilent)[1]),
			side(bravo, []string{health.HopGateway}, "Unknown(GatewaySilent) x", "Connected=Unknown(GatewaySilent) x"), "b/gateway", "b/gateway=broken a/tunnel=waits b/tunnel=waits b/peering=waits"},
		{"the side that knows more", side(alpha, nil, lost(v1alpha1.CauseNoAnswer)[0], lost(v1alpha1.CauseNoAnswer)[1]),
			side(bravo, nil, lost(v1alpha1.CauseAnswersLost)[0], lost(v1alpha1.CauseAnswersLost)[1]), "b/tunnel AnswersLost", "a/tunnel=waits b/tunnel=broken"},
		{"both sides know as much", side(alpha, nil, lost(v1alpha1.CauseNoAnswer)[0], lost(v1alpha1.CauseNoAnswer)[1]),
			side(bravo, nil, lost(v1alpha1.CauseNoAnswer)[0], lost(v1alpha1.CauseNoAnswer)[1]), "a/tunnel NoAnswer", "a/tunnel=broken b/tunnel=waits"},
		{"a gateway that has just been configured has no answer yet, which is nobody's fault", side(alpha, nil, "True"), side(bravo, nil, lost(isthmus.ReasonConnecting)[0], lost(isthmus.ReasonConnecting)[1]),
			"", "b/tunnel=unknown b/peering=unknown"},
		{"one side's tenant namespace was deleted", side(alpha, nil, "False(Unauthorized) IdentityReady: x", "IdentityReady=False(Unauthorized) x", "PeerConfigAccepted=False(PeerWithdrew) x"),
			side(bravo, nil, "False(LocalSetup) the namespace", "IdentityReady=False(SecretMissing) x", "PeerConfigAccepted=False(WaitingForPeer) x", "Connected=False(Waiting) x"), "b/peering LocalSetup",
			"a/identity=waits b/identity=waits a/peer's networks=waits b/peer's networks=waits b/tunnel=waits b/peering=broken"},
		{"only Ready knows", side(alpha, nil, "False(Overlap) a node"), nil, "a/peering Overlap", "a/peering=broken"},
		{"only one side has a Peering", side(alpha, nil, "False(WaitingForPeer) x", "PeerConfigAccepted=False(WaitingForPeer) x"), side(bravo, nil, ""), "b/peering",
			"b/peering=broken a/peer's networks=waits"},
	} {
		hops := tc.a.AllHops()
		if tc.b != nil {
			hops = health.Between(tc.a, tc.b)
		}
		first := ""
		if b := health.FirstBroken(hops); b != nil {
			first = strings.TrimSpace(fmt.Sprintf("%s/%s %s", b.Cluster, b.Name, b.Reason))
		}
		if first != tc.first || states(hops) != tc.all {
			t.Errorf("%s: first %q, want %q; all\n%s\nwant\n%s", tc.name, first, tc.first, states(hops), tc.all)
		}
	}
}

func TestGatewayThatTheManagerReportsSilentIsBroken(t *testing.T) {
	silent := peeringWith("p", "Unknown(GatewaySilent) x", "Connected=Unknown(GatewaySilent) no gateway is active")
	own := []health.Hop{{Cluster: "a", Name: health.HopManager, State: health.Works}, {Cluster: "a", Name: health.HopGateway, State: health.Works},
		{Cluster: "a", Name: health.HopAgents, State: health.Broken, FollowsGateway: true}, {Cluster: "a", Name: health.HopNodes, State: health.Broken}}
	health.UpdateGateway(own, peeringWith("q", "True"))
	if own[1].State != health.Works {
		t.Error("broken, though a gateway is at work")
	}
	own[0].State = health.Broken
	if health.UpdateGateway(own, silent); own[1].State != health.Works {
		t.Error("broken by what is a memory")
	}
	own[0].State = health.Works
	if health.UpdateGateway(own, silent); own[1].State != health.Broken || own[1].Reason != isthmus.ReasonGatewaySilent || own[1].Text != "no gateway is active" {
		t.Errorf("%+v", own[1])
	}
	if own[2].State != health.Waits || own[3].State != health.Broken {
		t.Errorf("agents that only lack the gateway: %s; want %s. Nodes: %s", own[2].State, health.Waits, own[3].State)
	}
}

func TestDiagnosisPrintsTheExpectedText(t *testing.T) {
	at := metav1.Time{Time: time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)}
	d := &health.Diagnosis{Hops: []health.Hop{{Cluster: "a", Name: health.HopManager, State: health.Works, Text: "m-1 is active", Since: &at},
		{Cluster: "a", Peering: "b-1a2b3c\x1b", Name: "tunnel", State: health.Broken, Reason: "WrongKey", Text: "another key", Since: &at}}, NotAsked: []string{"the other side"}}
	d.Broken = health.FirstBroken(d.Hops)
	var b strings.Builder
	must(t, d.Print(&b))
	const want = `a
  manager          works    m-1 is active
a, b-1a2b3c\u001b
  tunnel           broken   WrongKey: another key (broken since 2026-11-22T12:00:00Z)
not checked: the other side

broken: a: tunnel: WrongKey: another key
`
	if b.String() != want || d.Fine() {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	d.Hops[1].State, d.Broken = health.Unknown, nil
	must(t, d.Print(&b))
	clustertest.Contains(t, b.String(), "no broken hop was found; unknown: a: tunnel\n")
	b.Reset()
	if d.Hops[1].State = health.Works; !d.Fine() {
		t.Error("it is fine")
	}
	must(t, d.Print(&b))
	clustertest.Contains(t, b.String(), "all checked hops work\n")
}

func TestTokenExpiryIsReadFromTheToken(t *testing.T) {
	jwt := func(claims string) string { return "x." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".y" }
	if at, ok := tokenExpiry(jwt(`{"exp": 1795348800}`)); !ok || at.Unix() != 1795348800 {
		t.Errorf("%v, %v", at, ok)
	}
	for _, token := range []string{"", "opaque", jwt(`{}`), jwt(`{"exp": -1}`), jwt(`{"exp": "soon"}`), jwt(`x`), "a.%%%.b"} {
		if at, ok := tokenExpiry(token); ok {
			t.Errorf("%q: %v", token, at)
		}
	}
}

func TestJoinedErrorIsForbiddenOnlyIfEachPartIs(t *testing.T) {
	no := apierrors.NewForbidden(schema.GroupResource{}, "x", nil)
	for _, tc := range []struct {
		err  error
		want bool
	}{{nil, false}, {no, true}, {errors.Join(no, no), true}, {errors.Join(no, errors.New("x")), false}, {errors.New("x"), false}, {fmt.Errorf("x: %w", no), true}} {
		if got := kubeerr.Forbidden(tc.err); got != tc.want {
			t.Errorf("%v: %v", tc.err, got)
		}
	}
}

// This test runs the checks against an API server, where a test manager renews the Leases.
func TestDiagnoseQueriesBothSides(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "diagnose")
	for _, c := range []*cluster.Cluster{p.A, p.B} { // without installed RBAC objects, the components would lack their rights
		must(t, c.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:serviceaccounts:" + c.Namespace}}}))
	}
	d, err := Diagnose(t.Context(), p.A, p.B, "")
	must(t, err)
	if d.Broken == nil || d.Broken.Name != "peering" || !strings.Contains(d.Broken.Text, "there is no Peering with diagnose-b") {
		t.Errorf("before they are peered: %+v", d.Broken)
	}
	if now, known := p.A.Now(); !known || time.Since(now).Abs() > health.SecondsOff {
		t.Errorf("the API server's clock shows %v (known: %v), and is this machine's", now, known)
	}
	if _, err := Diagnose(t.Context(), p.A, nil, "nobody"); !errors.Is(err, cluster.ErrNoPeering) {
		t.Errorf("nobody: %v", err)
	}
	if _, err := Diagnose(t.Context(), p.A, p.B, "diagnose-b"); err != nil {
		t.Errorf("by the name that it calls itself: %v", err)
	}
	if _, err := Diagnose(t.Context(), p.A, p.B, "diagnose-c"); !errors.Is(err, ErrOtherPeer) || !strings.Contains(err.Error(), "there is no Peering with it here") {
		t.Errorf("another one, before they are peered: %v", err)
	}
	for name, with := range map[string]v1alpha1.ClusterIdentity{
		"diagnose-to-b": {ClusterID: p.B.Identity.ClusterID, ClusterName: "diagnose-oslo"},
		"diagnose-to-c": {ClusterID: "diagnose-C-0000", ClusterName: "diagnose-c"},
	} {
		must(t, p.A.Client.Create(t.Context(), &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: isthmus.PeeringSpec{Cluster: with, TenantNamespace: isthmus.TenantNamespace{Local: name, Remote: "x"}}}))
	}
	for _, name := range []string{"", "diagnose-to-b", "diagnose-oslo", "diagnose-b"} {
		d, err := Diagnose(t.Context(), p.A, p.B, name)
		must(t, err)
		if !slices.ContainsFunc(d.Hops, func(h health.Hop) bool { return h.Peering == "diagnose-to-b" }) ||
			slices.ContainsFunc(d.Hops, func(h health.Hop) bool { return h.Peering == "diagnose-to-c" }) || d.Broken == nil || d.Broken.Cluster != "diagnose-b" {
			t.Errorf("%q with the other side: broken %+v of %+v; want the Peering diagnose-to-b, and that the other side has none", name, d.Broken, d.Hops)
		}
	}
	for _, name := range []string{"diagnose-to-c", "diagnose-c", "nobody"} {
		if _, err := Diagnose(t.Context(), p.A, p.B, name); !errors.Is(err, ErrOtherPeer) || !strings.Contains(err.Error(), "its Peering here is diagnose-to-b") {
			t.Errorf("%s, which is not where the other side is: %v", name, err)
		}
	}
	if _, err := Diagnose(t.Context(), p.A, p.A, ""); err == nil || !strings.Contains(err.Error(), "the same cluster") {
		t.Errorf("itself: %v", err)
	}
}
