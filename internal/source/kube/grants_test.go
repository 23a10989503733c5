package kube_test

import (
	"context"
	"log/slog"
	"net/netip"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

// An agent reads all NetworkAllocations in one list, with the permissions of its Role. Deleting
// an object releases no network.
func TestAnAgentReadsTheNetworkAllocations(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server, err := kubetest.Start(ctx, kubetest.Options{Name: "grants"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	s := &agentServer{t: t, ctx: ctx, server: server, got: make(chan delivery, 1000), done: make(chan error, 1)}
	s.admin, err = server.Client()
	s.must(err)
	s.must(s.admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: deploy.Namespace}}))
	for _, file := range []string{"rbac/route-agent.yaml", "crds/net.liqo.io_tunnelendpoints.yaml", "crds/isthmus.net_networkallocations.yaml"} {
		s.install(file)
	}
	for _, list := range []client.ObjectList{&isthmus.NetworkAllocationList{}, &v1alpha1.TunnelEndpointList{}} {
		for deadline := time.Now().Add(time.Minute); s.admin.List(ctx, list) != nil; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%T is not served", list)
			}
		}
	}
	account := "system:serviceaccount:" + deploy.Namespace + ":" + deploy.RouteAgentServiceAccount
	cert, key, err := server.ClientCert(account, "system:serviceaccounts")
	s.must(err)
	config := &rest.Config{Host: server.URL(), TLSClientConfig: rest.TLSClientConfig{CAData: server.CA(), CertData: cert, KeyData: key}}
	go func() {
		s.done <- kube.WatchNode(ctx, config, deploy.Namespace, "n1", nil, slog.New(slog.NewTextHandler(t.Output(), nil)), func(in fabric.NodeIntent, problems []fabric.Problem) {
			s.got <- delivery{in, problems}
		})
	}()
	s.until(func(d delivery) bool { return d.intent.Revision == 0 })

	allocation := func(id string, revision int64, networks ...string) *isthmus.NetworkAllocation {
		return &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: id}, Spec: isthmus.NetworkAllocationSpec{ClusterID: id, Revision: revision, Networks: networks}}
	}
	named := func(what string, revision int64, networks ...string) {
		t.Helper()
		d := s.until(func(d delivery) bool { return d.intent.Revision == revision && len(d.intent.Named) == len(networks) })
		for i, n := range d.intent.Named {
			if n.Network != netip.MustParsePrefix(networks[i]) || len(d.problems) > 0 {
				t.Errorf("%s: %v; want %v (%v)", what, d.intent.Named, networks, d.problems)
			}
		}
	}
	us := allocation("us", 1)
	us.Spec.Own = &isthmus.OwnNetworks{PodCIDR: "10.64.0.0/14", ServiceCIDR: "10.96.0.0/12"}
	s.must(s.admin.Create(ctx, us))
	s.until(func(d delivery) bool {
		return len(d.intent.OwnPods) == 1 && len(d.intent.Own) == 2 && d.intent.Revision == 1
	})
	a, b := allocation("a", 2, "10.10.0.0/16", "10.110.0.0/20"), allocation("b", 3, "10.11.0.0/16", "10.111.0.0/20")
	s.must(s.admin.Create(ctx, a))
	named("the first peer", 2, "10.10.0.0/16", "10.110.0.0/20")
	s.must(s.admin.Create(ctx, b))
	named("another", 3, "10.10.0.0/16", "10.11.0.0/16", "10.110.0.0/20", "10.111.0.0/20")
	b.Spec.ReleasedAt = time.Now().UTC().Format(time.RFC3339)
	s.must(s.admin.Update(ctx, b))
	s.until(func(d delivery) bool { // version that the agent reports to the manager
		return strconv.FormatInt(d.intent.Version, 10) == b.ResourceVersion && len(d.intent.Named) == 4
	})
	b.Spec.Revision, b.Spec.Networks, b.Spec.Freed = 4, nil, []isthmus.FreedNetwork{{Network: "10.11.0.0/16", Revision: 4}, {Network: "10.111.0.0/20", Revision: 4}}
	s.must(s.admin.Update(ctx, b))
	if d := s.until(func(d delivery) bool { return d.intent.Revision == 4 && len(d.intent.Named) == 2 }); len(d.intent.Freed) != 2 || d.intent.Freed[0].Revision != 4 {
		t.Errorf("they are freed: %+v", d.intent.Freed)
	}
	s.must(s.admin.Delete(ctx, us))
	s.must(s.admin.Delete(ctx, a))
	if d := s.until(func(d delivery) bool { return len(d.intent.Named) == 0 }); len(d.intent.Freed) != 2 || len(d.intent.OwnPods) != 1 || len(d.intent.Own) != 2 {
		t.Errorf("objects were deleted: freed are %v, our own %v", d.intent.Freed, d.intent.Own)
	}
	cancel()
	if err := <-s.done; err != nil {
		t.Error(err)
	}
}
