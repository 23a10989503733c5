package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// TestRefusalMessagesNameTheCauseOnBothSides makes b advertise networks, keys and endpoints that a
// refuses, one after the other. It records the messages on both sides: those of `isthmus status`,
// the column REASON of `kubectl get peerings`, and those of `isthmus peer`, with which an
// administrator can consent to a new network of b. testdata/refusals.txt has all messages.
func TestRefusalMessagesNameTheCauseOnBothSides(t *testing.T) {
	t.Parallel()
	sites := newSites(t, "10.244.0.0/16", "10.244.64.0/18")
	a, b := sites[0], sites[1]
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
	if err := a.client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.51.100.10"}}
	if err := a.client.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	a.startManager()
	b.startManager()
	x := &messages{a: a, b: b}
	x.run("the clusters are peered", 0, "peer", "--remote-kubeconfig", b.kubeconfig)
	x.reason(isthmus.ReasonConnected, isthmus.ReasonConnected)
	honest(t, a) // adds c, another peer of a

	for _, part := range []struct {
		name string
		run  func(*testing.T, *messages)
	}{
		{"a key that c has", testKeyTaken},
		{"an endpoint that is a node of a", testEndpointRefused},
		{"a claim that takes something new", testConsent},
		{"a person wants all of b remapped", testAlwaysRemap},
		{"a claim for which no pool has room", testPoolsExhausted},
		{"an identity without a certificate authority", testIdentityRefused},
		{"another cluster with the ID and name of b", testPinMismatch},
	} {
		t.Run(part.name, func(t *testing.T) {
			reportTo(t, a, b)
			x.scenario = part.name
			part.run(t, x)
		})
		if t.Failed() {
			return
		}
	}
	goldenTable(t, "testdata/refusals.txt", slices.Concat([]string{"# what is wrong | who says it | what"}, x.lines))
}

// messages collects messages for administrators.
type messages struct {
	a, b     *site
	scenario string
	lines    []string
}

var changing = []struct {
	of *regexp.Regexp
	is string
}{
	{regexp.MustCompile(`https://[0-9.]+:[0-9]+`), "https://SERVER"},
	{regexp.MustCompile(`sha256:[0-9a-f]{64}`), "sha256:HASH"},
	{regexp.MustCompile(`the UID [0-9a-f-]{36}`), "the UID OF-B"},
	{regexp.MustCompile(`--context [^)\s]+`), "--context CONTEXT"},
}

// add records a line without the values that differ between runs. It checks that a line is a single
// message that fits into an Event.
func (x *messages) add(who, line string) {
	x.a.t.Helper()
	for _, c := range changing {
		line = c.of.ReplaceAllString(line, c.is)
	}
	if len(line) > 1024 {
		x.a.t.Errorf("%d octets: %s", len(line), line)
	}
	x.lines = append(x.lines, fmt.Sprintf("%s | %s | %s", x.scenario, who, line))
}

// run runs a command at a. It records the errors, and the lines about advertised networks, of its
// output under scenario.
func (x *messages) run(scenario string, code int, args ...string) string {
	x.a.t.Helper()
	x.scenario = scenario
	out, err := x.a.isthmus(append(args, "--kubeconfig", x.a.kubeconfig)...)
	got := 0
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		got = exit.ExitCode()
	}
	if got != code {
		x.a.t.Errorf("%v: exit code %d, want %d\n%s", args, got, code, out)
	}
	for line := range strings.Lines(out) {
		line = strings.TrimSuffix(line, "\n")
		if strings.Contains(line, " uses the ") || strings.Contains(line, "spec.claims.") || strings.HasPrefix(line, "isthmus: ") {
			x.add("isthmus "+args[0], line)
		}
	}
	return out
}

// status records the lines of `isthmus status` about the peering of a and b, on both sides.
func (x *messages) status(reasonA, reasonB string) {
	x.a.t.Helper()
	x.a.waitCondition(x.b, isthmus.ConditionReady, metav1.ConditionFalse, reasonA)
	status := metav1.ConditionFalse
	if reasonB == isthmus.ReasonConnected {
		status = metav1.ConditionTrue
	}
	x.b.waitCondition(x.a, isthmus.ConditionReady, status, reasonB)
	for _, s := range []*site{x.a, x.b} {
		out, _ := s.isthmus("status", "--kubeconfig", s.kubeconfig)
		block := false
		for line := range strings.Lines(out) {
			line = strings.TrimSuffix(line, "\n")
			if !strings.HasPrefix(line, "  ") {
				other := x.a
				if s == x.a {
					other = x.b
				}
				block = strings.HasSuffix(line, fmt.Sprintf(", cluster %s (%s):", other.name, other.id))
				continue
			}
			if block {
				x.add("isthmus status at "+s.name, strings.TrimSpace(line))
			}
		}
	}
	x.reason(reasonA, reasonB)
}

// reason checks the column REASON of `kubectl get peerings`.
func (x *messages) reason(reasonA, reasonB string) {
	x.a.t.Helper()
	for s, want := range map[*site]string{x.a: reasonA, x.b: reasonB} {
		other := x.a
		if s == x.a {
			other = x.b
		}
		s.eventually("REASON "+want, func() (string, bool) { got := s.column("Reason", other); return got, got == want })
	}
}

// column returns a cell of `kubectl get peerings`, as the API server formats it.
func (s *site) column(name string, other *site) string {
	s.t.Helper()
	c, err := rest.HTTPClientFor(s.config)
	if err != nil {
		s.t.Fatal(err)
	}
	defer c.CloseIdleConnections()
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.config.Host+"/apis/isthmus.net/v1alpha1/peerings", nil)
	if err != nil {
		s.t.Fatal(err)
	}
	request.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	response, err := c.Do(request)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	var table metav1.Table
	if err := json.NewDecoder(response.Body).Decode(&table); err != nil {
		return err.Error()
	}
	at := slices.IndexFunc(table.ColumnDefinitions, func(d metav1.TableColumnDefinition) bool { return d.Name == name })
	for _, row := range table.Rows {
		if at >= 0 && row.Cells[0] == other.cluster().UniqueName() {
			return fmt.Sprint(row.Cells[at])
		}
	}
	return "no such cell"
}

// change edits an object.
func (s *site) change(o client.Object, key types.NamespacedName, status bool, change func(client.Object)) {
	s.t.Helper()
	if err := s.edit(o, key, status, change); err != nil {
		s.t.Fatal(err)
	}
}

func (x *messages) joined() {
	x.a.t.Helper()
	x.a.waitReady(x.b)
	x.b.waitReady(x.a)
	x.a.eventually("both sides say the same of their networks", func() (string, bool) {
		a, b := x.a.peering(x.b).Status, x.b.peering(x.a).Status
		same := func(own, others isthmus.Networks) bool {
			return own.PodCIDR == others.PodCIDR && own.PodCIDRSeen == others.PodCIDRSeen &&
				own.ExternalCIDR == others.ExternalCIDR && own.ExternalCIDRSeen == others.ExternalCIDRSeen
		}
		return fmt.Sprintf("a: %+v, %+v\nb: %+v, %+v", a.Local, a.Remote, b.Local, b.Remote), same(a.Local, b.Remote) && same(b.Local, a.Remote)
	})
}

func testKeyTaken(_ *testing.T, x *messages) {
	name := types.NamespacedName{Namespace: installed, Name: "wireguard-pubkey"}
	var own []byte
	x.b.change(&corev1.Secret{}, name, false, func(o client.Object) {
		secret := o.(*corev1.Secret)
		own = secret.Data["publicKey"]
		secret.Data["publicKey"] = []byte(liqoKey)
	})
	x.status(v1alpha1.ReasonKeyConflict, v1alpha1.ReasonKeyConflict)
	x.b.change(&corev1.Secret{}, name, false, func(o client.Object) { o.(*corev1.Secret).Data["publicKey"] = own })
	x.joined()
}

func testEndpointRefused(_ *testing.T, x *messages) {
	at := func(address string) {
		x.b.change(&corev1.Service{}, types.NamespacedName{Namespace: installed, Name: "isthmus-gateway"}, true, func(o client.Object) {
			o.(*corev1.Service).Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
		})
	}
	at("198.51.100.10")
	x.status(v1alpha1.ReasonEndpoint, v1alpha1.ReasonEndpoint)
	at("203.0.113.2")
	x.joined()
}

// Consent must apply only to the networks that the administrator has seen. A repeated `isthmus
// peer` must not give consent, and the command must refuse a consent to other networks.
func testConsent(t *testing.T, x *messages) {
	before := x.a.tunnelEndpoint(x.b)
	x.b.reconfigure("10.32.0.0/13")
	x.status(v1alpha1.ReasonConsent, v1alpha1.ReasonConsent)
	out := x.run(x.scenario, 1, "peer", "b")
	x.run(x.scenario, 1, "peer", "--remote-kubeconfig", x.b.kubeconfig)
	x.run(x.scenario, 1, "peer", "b", "--consent", "10.32.0.0/14,"+before.Spec.RemoteExternalCIDR)
	if p := x.a.peering(x.b); p.Spec.Claims.Consent != nil || x.a.tunnelEndpoint(x.b).ResourceVersion != before.ResourceVersion {
		t.Fatalf("nobody has agreed: %+v", p.Spec.Claims.Consent)
	}
	command := regexp.MustCompile(`to agree: isthmus (peer \S+ --consent \S+)`).FindStringSubmatch(out)
	if command == nil {
		t.Fatalf("no command in\n%s", out)
	}
	x.run(x.scenario, 0, strings.Fields(command[1])...)
	x.joined()
	if te := x.a.tunnelEndpoint(x.b); te.Spec.RemotePodCIDR != "10.32.0.0/13" {
		t.Errorf("the TunnelEndpoint has %s", te.Spec.RemotePodCIDR)
	}
	x.run(x.scenario, 0, strings.Fields(command[1])...) // the same consent again changes nothing
}

func testPoolsExhausted(_ *testing.T, x *messages) {
	x.a.reconfigure("10.244.0.0/16", "--pools", "10.244.0.0/15")
	x.joined()
	x.b.reconfigure("11.0.0.0/12")
	x.status(v1alpha1.ReasonExhausted, v1alpha1.ReasonExhausted)
	x.b.reconfigure("10.32.0.0/13")
	x.joined()
	x.a.reconfigure("10.244.0.0/16")
	x.joined()
}

func testAlwaysRemap(t *testing.T, x *messages) {
	x.run(x.scenario, 0, "peer", "b", "--always-remap", "--allow-claim", "203.0.112.0/20")
	x.joined()
	p := x.a.peering(x.b)
	if n := p.Status.Remote; n.PodCIDR == n.PodCIDRSeen || !p.Spec.Claims.AlwaysRemap || !slices.Equal(p.Spec.Claims.Allowed, []string{"203.0.112.0/20"}) {
		t.Errorf("%+v, %+v", n, p.Spec.Claims)
	}
}

func testIdentityRefused(_ *testing.T, x *messages) {
	name := types.NamespacedName{Namespace: x.a.tenant(x.b), Name: isthmus.DefaultIdentitySecret}
	x.a.change(&corev1.Secret{}, name, false, func(o client.Object) {
		secret := o.(*corev1.Secret)
		text := regexp.MustCompile(`certificate-authority-data: .*`).ReplaceAll(secret.Data[isthmus.SecretKubeconfig], []byte("insecure-skip-tls-verify: true"))
		secret.Data[isthmus.SecretKubeconfig] = text
	})
	x.status(isthmus.ReasonSecretInvalid, isthmus.ReasonConnected)
	x.run(x.scenario, 0, "peer", "--remote-kubeconfig", x.b.kubeconfig)
	x.joined()
}

func testPinMismatch(t *testing.T, x *messages) {
	p := x.a.peering(x.b)
	was := p.Annotations[isthmus.AnnotationPeerUID]
	pin := func(uid string) {
		x.a.change(&isthmus.Peering{}, types.NamespacedName{Name: p.Name}, false, func(o client.Object) {
			o.SetAnnotations(map[string]string{isthmus.AnnotationPeerUID: uid})
		})
	}
	pin("that-of-another")
	x.run(x.scenario, 1, "peer", "--remote-kubeconfig", x.b.kubeconfig)
	if c := meta.FindStatusCondition(x.a.peering(x.b).Status.Conditions, isthmus.ConditionReady); c.Status != metav1.ConditionTrue {
		t.Errorf("the refusal changed something: %+v", c)
	}
	pin(was)
}
