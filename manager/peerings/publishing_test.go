package peerings

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

func TestPublishedNetworkConfigHasLiqosFormat(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	nc := p.UntilPublished()
	var service corev1.Service
	w.OK(w.API().Get(w.Ctx, types.NamespacedName{Namespace: w.System, Name: "isthmus-gateway"}, &service))
	if nc.Spec.PodCIDR != "10.244.0.0/16" || nc.Spec.EndpointIP != "192.0.2.1" || nc.Spec.RemoteCluster != p.Cluster ||
		netip.MustParsePrefix(nc.Spec.ExternalCIDR).Bits() != 16 || int32(atoi(nc.Spec.BackendConfig["port"])) != service.Spec.Ports[0].NodePort {
		t.Errorf("spec is %+v", nc.Spec)
	}
	for label, want := range map[string]string{"liqo.io/replication": "true", "liqo.io/remoteID": p.Cluster.ClusterID, "liqo.io/ownership": "netcfgCreator"} {
		if nc.Labels[label] != want {
			t.Errorf("label %s is %q, want %q", label, nc.Labels[label], want)
		}
	}
	if len(nc.Labels) != 3 || len(nc.OwnerReferences) != 1 || !metav1.IsControlledBy(nc, p.Peering) {
		t.Errorf("labels %v, owners %v", nc.Labels, nc.OwnerReferences)
	}
}

func TestAnEditedNetworkConfigIsRestored(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	right := p.UntilPublished()
	same := func() bool {
		nc := p.Original()
		return nc != nil && nc.DeletionTimestamp.IsZero() && nc.Spec.EndpointIP == right.Spec.EndpointIP && len(nc.Spec.BackendConfig) == 2 &&
			len(nc.Labels) == 3 && nc.Labels[v1alpha1.LabelRemoteID] == p.Cluster.ClusterID && nc.Labels[v1alpha1.LabelReplication] == "true" &&
			len(nc.OwnerReferences) == 1
	}
	edit := func(what, patch string) {
		t.Helper()
		w.OK(w.API().Patch(w.Ctx, p.Original(), client.RawPatch(types.MergePatchType, []byte(patch))))
		w.Until(what+" is put right", same)
	}
	edit("the endpoint", `{"spec":{"endpointIP":"203.0.113.66"}}`)
	edit("a key too many", `{"spec":{"backend_config":{"extra":"1"}}}`)
	edit("missing labels", `{"metadata":{"labels":{"liqo.io/replication":null,"liqo.io/remoteID":null}}}`)
	edit("the labels of a copy", `{"metadata":{"labels":{"liqo.io/replicated":"true","liqo.io/originID":"x"}}}`)
	edit("no owner", `{"metadata":{"ownerReferences":null}}`)

	w.OK(w.API().Delete(w.Ctx, p.Original()))
	w.Until("a deleted one is made anew", func() bool { nc := p.Original(); return nc != nil && nc.UID != right.UID && same() })

	second := p.Original().DeepCopy()
	second.ObjectMeta = metav1.ObjectMeta{Namespace: p.NS, Name: "aaa-first-in-the-alphabet", Labels: second.Labels}
	w.Create(second)
	w.Until("a second one is deleted", func() bool {
		nc, err := controllers.Found(w.Ctx, w.API(), client.ObjectKeyFromObject(second), new(v1alpha1.NetworkConfig))
		w.OK(err)
		return nc == nil
	})
	if !same() {
		t.Error("and the right one has stayed")
	}
}

// An answer counts only for the networks that it was given for. After a change of networks it is
// removed from our NetworkConfig, and until then readers ignore it.
func TestAnAnswerIsWithdrawnWhenNetworksChange(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	nc := p.Original()
	nc.Spec.PodCIDR = "10.200.0.0/16" // differs from our configured PodCIDR
	w.OK(w.API().Update(w.Ctx, nc))
	w.Until("our network is back, and the answer and its mark are gone", func() bool {
		nc := p.Original()
		return nc.Spec.PodCIDR == "10.244.0.0/16" && !nc.Status.Processed && nc.Status.PodCIDRNAT == "" && nc.Annotations[isthmus.AnnotationUnanswered] == ""
	})
	p.WaitForReason(isthmus.ConditionAnswered, isthmus.ReasonWaitingAnswer)
	p.WaitForReason(isthmus.ConditionTunnelEndpoint, isthmus.ReasonWaiting)

	// The annotation is also removed while our endpoint is unknown.
	w.OK(w.API().Delete(w.Ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: w.System, Name: "isthmus-gateway"}}))
	p.WaitForReason(isthmus.ConditionReady, isthmus.ReasonLocalSetup)
	nc = p.Original()
	nc.Annotations = map[string]string{isthmus.AnnotationUnanswered: "true"}
	w.OK(w.API().Update(w.Ctx, nc))
	w.Until("the mark is gone again", func() bool { return p.Original().Annotations[isthmus.AnnotationUnanswered] == "" })
}

func TestGatewayChangesArePublishedToAllPeersAtOnce(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	peers := []*remote{w.peer("b"), w.peer("c"), w.peer("d")}
	for _, p := range peers {
		p.UntilPublished()
	}
	var service corev1.Service
	name := types.NamespacedName{Namespace: w.System, Name: "isthmus-gateway"}
	for _, c := range []struct {
		what, patch string
		done        func(v1alpha1.NetworkConfigSpec) bool
	}{
		{"another active gateway", `{"metadata":{"annotations":{"net.liqo.io/gatewayNodeIP":"192.0.2.99"}}}`,
			func(s v1alpha1.NetworkConfigSpec) bool { return s.EndpointIP == "192.0.2.99" }},
		{"overrides", `{"metadata":{"annotations":{"liqo.io/override-address":"vpn.example.org","liqo.io/override-port":"443"}}}`,
			func(s v1alpha1.NetworkConfigSpec) bool {
				return s.EndpointIP == "vpn.example.org" && s.BackendConfig["port"] == "443"
			}},
	} {
		w.OK(w.API().Get(w.Ctx, name, &service))
		start := time.Now()
		w.OK(w.API().Patch(w.Ctx, &service, client.RawPatch(types.MergePatchType, []byte(c.patch))))
		for _, p := range peers {
			w.Until(c.what+" is published", func() bool { return c.done(p.Original().Spec) })
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("%s: published after %v", c.what, took)
		}
	}
	var secret corev1.Secret
	w.OK(w.API().Get(w.Ctx, types.NamespacedName{Namespace: w.System, Name: keyring.SecretName}, &secret))
	secret.Data["publicKey"] = []byte(managertest.AnotherKey)
	w.OK(w.API().Update(w.Ctx, &secret))
	for _, p := range peers {
		w.Until("another key is published", func() bool { return p.Original().Spec.BackendConfig["publicKey"] == managertest.AnotherKey })
	}

	// Only tunnels with both a key and a port are published, in whichever order these are added.
	secret.Data["tunnels"] = []byte(managertest.KeyText(21) + "," + managertest.KeyText(22))
	w.OK(w.API().Update(w.Ctx, &secret))
	w.Always("tunnels without ports are not published", func() bool { return len(peers[0].Original().Spec.BackendConfig) == 2 })
	w.OK(w.API().Get(w.Ctx, name, &service))
	w.OK(w.API().Patch(w.Ctx, &service, client.RawPatch(types.MergePatchType, []byte(
		`{"metadata":{"annotations":{"liqo.io/override-port":null}},"spec":{"ports":[`+
			`{"name":"wireguard","port":5871,"protocol":"UDP"},{"name":"wireguard-1","port":5872,"protocol":"UDP"}]}}`))))
	w.OK(w.API().Get(w.Ctx, name, &service))
	first := fmt.Sprintf("%d:%s", service.Spec.Ports[1].NodePort, managertest.KeyText(21))
	for _, p := range peers {
		w.Until("the tunnel is published", func() bool { return p.Original().Spec.BackendConfig["tunnels"] == first })
	}
	delete(secret.Data, "tunnels")
	w.OK(w.API().Update(w.Ctx, &secret))
	for _, p := range peers {
		w.Until("the tunnel is taken back", func() bool { return len(p.Original().Spec.BackendConfig) == 2 })
	}

	// With an invalid key, the published NetworkConfig stays unchanged.
	secret.Data["publicKey"] = []byte("not base64")
	w.OK(w.API().Update(w.Ctx, &secret))
	w.Until("the Peering says so", func() bool {
		return strings.Contains(peers[0].Message(isthmus.ConditionReady), "publicKey is not base64")
	})
	w.Always("the last good key stays", func() bool { return peers[0].Original().Spec.BackendConfig["publicKey"] == managertest.AnotherKey })
}

func TestPeerCannotSquatTheNameOfOurNetworkConfig(t *testing.T) {
	w := newWorld(t, false)
	p := w.describe("b")
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.NS}})
	squatter := p.Theirs()
	squatter.Name = p.Cluster.UniqueName()
	w.Create(squatter)
	w.Gateway("192.0.2.1")
	w.Create(p.Peering)
	w.Until("the Peering names it", func() bool {
		return strings.Contains(p.Message(isthmus.ConditionReady), "has the name of our NetworkConfig")
	})
	w.Always("it stays as it is", func() bool { return p.Original().Labels[v1alpha1.LabelOriginID] == p.Cluster.ClusterID })
	w.OK(w.API().Delete(w.Ctx, squatter))
	w.Until("ours comes when it is gone", func() bool { nc := p.Original(); return nc != nil && metav1.IsControlledBy(nc, p.Peering) })
}

func atoi(s string) (n int) {
	for _, c := range s {
		n = 10*n + int(c-'0')
	}
	return n
}
