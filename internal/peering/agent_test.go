package peering

import (
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

// agentOn returns a client with the token of a route agent's Pod on a node.
func agentOn(t *testing.T, c *cluster.Cluster, node string) (client.Client, *corev1.Node) {
	t.Helper()
	return podOn(t, c, node, deploy.RouteAgentServiceAccount)
}

// podOn creates a node and a component's Pod on it. It returns a client with a token that is
// bound to the Pod.
func podOn(t *testing.T, c *cluster.Cluster, node, account string) (client.Client, *corev1.Node) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: "pod-on-" + node}, Spec: corev1.PodSpec{
		NodeName: node, HostNetwork: true, ServiceAccountName: account, Containers: []corev1.Container{{Name: "main", Image: "isthmus:1"}}}}
	for _, o := range []client.Object{n, pod} {
		must(t, c.Client.Create(t.Context(), o))
		t.Cleanup(func() { _ = c.Client.Delete(t.Context(), o) })
	}
	token := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}}}
	must(t, c.Client.SubResource("token").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: account}}, token))
	config := rest.AnonymousClientConfig(c.Config)
	config.BearerToken = token.Status.Token
	by, err := client.New(config, client.Options{Scheme: c.Client.Scheme(), Mapper: c.Client.RESTMapper()})
	must(t, err)
	return by, n
}

func TestAnAgentMayOnlyReportItsOwnNode(t *testing.T) {
	t.Parallel()
	const home = deploy.Namespace
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B})
	agent, node := agentOn(t, c, "reports-n1")
	other, otherNode := agentOn(t, c, "reports-n2")
	loose, err := client.New(accountConfig(t, c, home, deploy.RouteAgentServiceAccount), client.Options{Scheme: c.Client.Scheme(), Mapper: c.Client.RESTMapper()})
	must(t, err)
	report := func(n *corev1.Node, change ...func(*isthmus.NodeNetworks)) *isthmus.NodeNetworks {
		r := &isthmus.NodeNetworks{
			ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: n.Name,
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}},
			Spec: isthmus.NodeNetworksSpec{Networks: []string{"192.0.2.0/25", "fd00:5::/48"}, Resolvers: []string{"192.0.2.53"}},
		}
		for _, f := range change {
			f(r)
		}
		return r
	}
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) { // new policies and permissions take a moment to become effective
		good := agent.Create(t.Context(), report(node), client.DryRunAll)
		bad := agent.Create(t.Context(), report(otherNode), client.DryRunAll)
		if good == nil && apierrors.IsForbidden(bad) {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatalf("its own: %v; another one's: %v", good, bad)
		}
	}
	// The normal work of an agent is allowed.
	mine, theirs := report(node), report(otherNode)
	must(t, agent.Create(t.Context(), mine))
	must(t, other.Create(t.Context(), theirs))
	patch := func(by client.Client, o *isthmus.NodeNetworks, text string) error {
		return by.Patch(t.Context(), o.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(text)))
	}
	must(t, patch(agent, mine, `{"spec":{"networks":["192.0.2.0/25"],"resolvers":[]}}`))

	for name, try := range map[string]struct {
		err     error
		invalid bool
	}{
		"another node's":                 {err: patch(agent, theirs, `{"spec":{"networks":[]}}`)},
		"a node that there is not":       {err: agent.Create(t.Context(), report(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "x", UID: "x"}}), client.DryRunAll)},
		"a token that is bound to none":  {err: patch(loose, mine, `{"spec":{"networks":[]}}`)},
		"an owner that is not its Node":  {err: patch(agent, mine, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"reports-n1","uid":"x"}]}}`)},
		"no owner":                       {err: patch(agent, mine, `{"metadata":{"ownerReferences":null}}`)},
		"a finalizer":                    {err: patch(agent, mine, `{"metadata":{"finalizers":["example.com/x"]}}`)},
		"a label":                        {err: patch(agent, mine, `{"metadata":{"labels":{"a":"b"}}}`)},
		"an annotation":                  {err: patch(agent, mine, `{"metadata":{"annotations":{"a":"b"}}}`)},
		"its own gone":                   {err: agent.Delete(t.Context(), mine.DeepCopy())},
		"another one's read":             {err: agent.Get(t.Context(), client.ObjectKeyFromObject(theirs), &isthmus.NodeNetworks{})},
		"in another namespace":           {err: agent.Create(t.Context(), report(node, func(r *isthmus.NodeNetworks) { r.Namespace = "default" }), client.DryRunAll)},
		"too many networks":              {err: patch(agent, mine, `{"spec":{"networks":[`+repeated(`"10.0.0.0/8"`, 513)+`]}}`), invalid: true},
		"too many servers":               {err: patch(agent, mine, `{"spec":{"resolvers":[`+repeated(`"192.0.2.53"`, 17)+`]}}`), invalid: true},
		"a network that is none":         {err: patch(agent, mine, `{"spec":{"networks":["everything"]}}`), invalid: true},
		"a network with host bits":       {err: patch(agent, mine, `{"spec":{"networks":["192.0.2.7/25"]}}`), invalid: true},
		"a server that is no IP address": {err: patch(agent, mine, `{"spec":{"resolvers":["dns.example.com"]}}`), invalid: true},
	} {
		if try.invalid && !apierrors.IsInvalid(try.err) || !try.invalid && !apierrors.IsForbidden(try.err) {
			t.Errorf("%s: %v", name, try.err)
		}
	}
	must(t, patch(agent, mine, `{"spec":{"networks":[`+repeated(`"10.0.0.0/8"`, 512)+`]}}`))
}

// An attacker with the token of an agent or a gateway cannot report anything in the name of another
// Pod.
func TestAgentsAndGatewaysMayOnlyReportTheirOwnPod(t *testing.T) {
	t.Parallel()
	const home = deploy.Namespace
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B})
	_, _ = podOn(t, c, "tells-other", deploy.ManagerServiceAccount)
	for _, account := range []string{deploy.RouteAgentServiceAccount, deploy.GatewayServiceAccount} {
		own := "pod-on-tells-" + account
		bound, _ := podOn(t, c, "tells-"+account, account)
		loose, err := client.New(accountConfig(t, c, home, account), client.Options{Scheme: c.Client.Scheme(), Mapper: c.Client.RESTMapper()})
		must(t, err)
		about := func(by client.Client, kind, namespace, name string) error {
			return by.Create(t.Context(), &eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: home, GenerateName: "tells-"}, EventTime: metav1.NowMicro(),
				ReportingController: "isthmus.net/x", ReportingInstance: "x", Action: "Run", Type: corev1.EventTypeWarning, Reason: "NotApplied", Note: "x",
				Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: kind, Namespace: namespace, Name: name}}, client.DryRunAll)
		}
		for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
			good, bad := about(bound, "Pod", home, own), about(bound, "Pod", home, "pod-on-tells-other")
			if good == nil && apierrors.IsForbidden(bad) {
				break
			}
			if time.Since(begin) > clustertest.Patient {
				t.Fatalf("%s: its own: %v; another one's: %v", account, good, bad)
			}
		}
		for name, err := range map[string]error{
			"its node":                       about(bound, "Node", home, own),
			"a Pod of another namespace":     about(bound, "Pod", "default", own),
			"an object of the name of a Pod": about(bound, "Secret", home, own),
			"a token that is bound to none":  about(loose, "Pod", home, own),
		} {
			if !apierrors.IsForbidden(err) {
				t.Errorf("%s: %s: %v", account, name, err)
			}
		}
	}
}

// repeated returns n copies of element, separated by commas, for use in a JSON list.
func repeated(element string, n int) string {
	return strings.TrimSuffix(strings.Repeat(element+",", n), ",")
}
