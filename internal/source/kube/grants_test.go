package kube_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

// An agent goes by GrantedNetworks while the books say that these are a copy of them, and by the books
// where an older manager has written them. Whatever changes, in whichever order it comes, no network
// that stays granted is missing at any moment.
func TestAnAgentGoesByGrantedNetworksAsLongAsTheyAreWhatTheBooksSay(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server, err := kubetest.Start(ctx, kubetest.Options{Name: "grants"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	s := &agentServer{t: t, ctx: ctx, server: server, got: make(chan delivery, 1000), done: make(chan error, 1)}
	admin, err := clientcmd.RESTConfigFromKubeConfig(server.Kubeconfig())
	s.must(err)
	s.admin, err = client.New(admin, client.Options{Scheme: agentScheme(t)})
	s.must(err)
	s.must(s.admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: deploy.Namespace}}))
	for _, file := range []string{"rbac/route-agent.yaml", "crds/net.liqo.io_tunnelendpoints.yaml", "crds/net.liqo.io_ipamstorages.yaml", "crds/isthmus.net_grantednetworks.yaml"} {
		s.install(file)
	}
	for _, list := range []client.ObjectList{&v1alpha1.IpamStorageList{}, &isthmus.GrantedNetworksList{}, &v1alpha1.TunnelEndpointList{}} {
		for deadline := time.Now().Add(time.Minute); s.admin.List(ctx, list) != nil; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%T is not served", list)
			}
		}
	}

	networks := map[string][2]string{}
	all := func() (out []netip.Prefix) {
		for _, n := range networks {
			out = append(out, netip.MustParsePrefix(n[0]), netip.MustParsePrefix(n[1]))
		}
		slices.SortFunc(out, netip.Prefix.Compare)
		return out
	}
	books := &v1alpha1.IpamStorage{ObjectMeta: metav1.ObjectMeta{Name: "books"}, Spec: v1alpha1.IpamStorageSpec{
		Prefixes: map[string][]byte{}, Pools: []string{}, ReservedSubnets: []string{}, ClusterSubnets: map[string]v1alpha1.Subnets{}, PodCIDR: "10.64.0.0/14",
		EndpointMappings: map[string]v1alpha1.EndpointMapping{}, NatMappingsConfigured: map[string]v1alpha1.ConfiguredCluster{}}}
	s.must(s.admin.Create(ctx, books))
	writeBooks := func(attested bool) { // as one manager does, or one of before
		t.Helper()
		was, generation := books.Spec.ClusterSubnets, books.Generation
		books.Spec.ClusterSubnets = map[string]v1alpha1.Subnets{}
		for id, n := range networks {
			books.Spec.ClusterSubnets[id] = v1alpha1.Subnets{RemotePodCIDR: n[0], RemoteExternalCIDR: n[1]}
		}
		if !maps.Equal(was, books.Spec.ClusterSubnets) {
			generation++
		}
		if attested {
			books.Annotations = map[string]string{isthmus.AnnotationGranted: fabric.BooksDigest{
				Generation: generation, Granted: fabric.GrantsID(all()), PodCIDR: books.Spec.PodCIDR, ServiceCIDR: "10.96.0.0/12"}.Annotation()} // which the books lack: they are told apart by it
		}
		s.must(s.admin.Update(ctx, books))
	}
	writeShare := func(id string) {
		t.Helper()
		share := &isthmus.GrantedNetworks{ObjectMeta: metav1.ObjectMeta{Name: fabric.ShareOf(id)}}
		err := s.admin.Get(ctx, client.ObjectKeyFromObject(share), share)
		share.Spec.Peers = map[string]isthmus.PeerNetworks{}
		for other, n := range networks {
			if fabric.ShareOf(other) == share.Name {
				share.Spec.Peers[other] = n[:]
			}
		}
		if err != nil {
			s.must(s.admin.Create(ctx, share))
			return
		}
		s.must(s.admin.Update(ctx, share))
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
	var kept []netip.Prefix // granted before and after what is going on
	follow := func(what string, want []netip.Prefix) {
		t.Helper()
		d := s.until(func(d delivery) bool {
			for _, p := range kept {
				if !slices.Contains(d.intent.Granted, p) {
					t.Fatalf("%s: %v is granted all the time, and for a moment an agent has %v", what, p, d.intent.Granted)
				}
			}
			return slices.Equal(d.intent.Granted, want) && len(d.intent.Doubtful) == 0
		})
		if len(d.intent.OwnPods) != 1 || len(d.problems) > 0 {
			t.Errorf("%s: %+v", what, d)
		}
		kept = want
	}

	// The books of a manager of before, and then the first copy.
	networks["a"] = [2]string{"10.10.0.0/16", "10.110.0.0/20"}
	writeBooks(false)
	follow("an older manager", all())
	writeShare("a")
	writeBooks(true)
	byShares := func(d delivery) bool { return len(d.intent.Own) == 2 && len(d.intent.Doubtful) == 0 }
	s.until(byShares) // and the books are not watched any more

	// A grant, in the order of the manager and in the other one.
	networks["b"] = [2]string{"10.11.0.0/16", "10.111.0.0/20"}
	writeShare("b")
	doubtful := func(what string, want ...string) {
		t.Helper()
		d := s.until(func(d delivery) bool { return len(d.intent.Doubtful) == len(want) })
		for _, p := range want {
			if !slices.Contains(d.intent.Doubtful, netip.MustParsePrefix(p)) {
				t.Errorf("%s: %v; want %v", what, d.intent.Doubtful, want)
			}
		}
		if !slices.Equal(d.intent.Granted, kept) {
			t.Errorf("%s: granted %v; want %v", what, d.intent.Granted, kept)
		}
	}
	doubtful("a share came before the books", "10.11.0.0/16", "10.111.0.0/20")
	peer := networks["b"]
	delete(networks, "b") // the books never had it
	writeShare("b")
	doubtful("the share is as it was")
	networks["b"] = peer
	writeShare("b")
	doubtful("it came again", "10.11.0.0/16", "10.111.0.0/20")
	writeBooks(true)
	kept = all()
	s.until(func(d delivery) bool { return byShares(d) && slices.Equal(d.intent.Granted, kept) })
	networks["c"] = [2]string{"10.12.0.0/16", "10.112.0.0/20"}
	writeBooks(true)
	s.silence("the books came before the share, and are not read yet", 200*time.Millisecond)
	writeShare("c")
	follow("the share came, too", all())

	// An older manager takes over, with a copy that is not its: what it grants is known by the books,
	// and stays so until the copy has it. Then somebody withdraws.
	networks["d"] = [2]string{"10.13.0.0/16", "10.113.0.0/20"}
	writeBooks(false)
	follow("an older manager after a new one", all())
	networks["e"] = [2]string{"10.14.0.0/16", "10.114.0.0/20"}
	writeBooks(true) // a new manager, whose books are seen before its shares
	writeShare("d")
	writeShare("e")
	follow("a new manager after an older one", all())
	delete(networks, "b")
	kept = all()
	writeBooks(true)
	writeShare("b")
	follow("a peer has left", all())

	// Somebody deletes a share: what was granted stays, from the books.
	s.must(s.admin.Delete(ctx, &isthmus.GrantedNetworks{ObjectMeta: metav1.ObjectMeta{Name: fabric.ShareOf("a")}}))
	s.silence("a share was deleted", 3*time.Second)
	networks["f"] = [2]string{"10.15.0.0/16", "10.115.0.0/20"}
	writeBooks(false)
	follow("a share was deleted, and the books count", all())
	for id := range maps.Keys(networks) {
		writeShare(id)
	}
	writeBooks(true)

	// The books are gone, and what was granted before is the agent's to keep.
	s.must(s.admin.Delete(ctx, books))
	if d := s.until(func(d delivery) bool { return d.intent.Granted == nil }); len(d.problems) > 0 {
		t.Error(fmt.Sprint(d.problems))
	}
	cancel()
	if err := <-s.done; err != nil {
		t.Error(err)
	}
}

func agentScheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, v1alpha1.AddToScheme, isthmus.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return scheme
}
