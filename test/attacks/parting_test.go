package attacks

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

func partingChapter() chapter {
	return chapter{title: "Impostors, and peers that do not leave", attacks: []attack{
		{attacker: "a cluster that copies b's ID and name", attempt: "is peered by `isthmus peer`",
			now: "refused: the Peering records the UID of kube-system and the CA", run: twinOfB},
		{attacker: "c's identity at a, and c", attempt: "finalizers on a's NetworkConfig and on its own copy, then `isthmus unpeer --force`",
			now: "`unpeer` removes the rights first, then foreign finalizers, then the namespace", run: unpeerByForce},
		{attacker: "c, un-peered", attempt: "keeps using its identity and its tunnel", now: "Unauthorized; the gateway no longer knows its key", run: afterUnpeering},
	}}
}

// twinOfB sets up a fourth cluster on the underlay's router, with the identity of b.
func twinOfB(t *testing.T, s *site) {
	addr := netip.MustParseAddr("172.30.3.1") // the router's address in c's network
	server, err := kubetest.Start(t.Context(), kubetest.Options{Name: "twin", Dir: kube, Host: addr, APIPort: 6444, Controllers: true,
		Starter: s.Lab.Underlay.Start, Dial: s.Lab.Underlay.Dial})
	must(t, err)
	t.Cleanup(func() { must(t, server.Stop()) })
	all, err := clientcmd.LoadFromFile(s.Kubeconfig)
	must(t, err)
	was, err := os.ReadFile(s.Kubeconfig)
	must(t, err)
	t.Cleanup(func() { must(t, os.WriteFile(s.Kubeconfig, was, 0o600)) })
	one, err := clientcmd.Load(server.Kubeconfig())
	must(t, err)
	for name, c := range one.Clusters {
		all.Clusters["twin-"+name] = c
	}
	for name, u := range one.AuthInfos {
		all.AuthInfos["twin-"+name] = u
	}
	context := one.Contexts[one.CurrentContext].DeepCopy()
	context.Cluster, context.AuthInfo = "twin-"+context.Cluster, "twin-"+context.AuthInfo
	all.Contexts["twin"] = context
	must(t, clientcmd.WriteToFile(*all, s.Kubeconfig))
	s.isthmus(t, "install", "--without-workloads", "--context", "twin", "--cluster-name", s.b.Name, "--cluster-id", s.b.ID)

	secret := func() string {
		var secret corev1.Secret
		must(t, s.a.Client.Get(t.Context(), client.ObjectKey{Namespace: tenant(s.b), Name: "isthmus-identity"}, &secret))
		return secret.ResourceVersion
	}
	before := secret()
	out, err := s.Isthmus(t.Context(), "peer", "--context", "a", "--remote-context", "twin", "--timeout", "0")
	if err == nil || !strings.Contains(out, "was created with another cluster") {
		t.Errorf("%v\n%s", err, out)
	}
	if after := secret(); after != before {
		t.Error("a's identity at b was replaced")
	}
	must(t, clientFor(t, configAs(t, s.b, s.a), s.b.Client).List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(tenant(s.b))))
}

func unpeerByForce(t *testing.T, s *site) {
	c := clientFor(t, configAs(t, s.c, s.a), s.c.Client)
	s.identityOfC = c
	must(t, s.c.Stop("manager")) // c does not cooperate
	// The finalizers simulate a peer that can still add finalizers, although an earlier row shows
	// that no peer can.
	for _, name := range []string{identity(s.a).UniqueName(), identity(s.c).UniqueName()} {
		eventually(t, "a finalizer", func() error {
			var nc v1alpha1.NetworkConfig
			if err := s.a.Client.Get(t.Context(), client.ObjectKey{Namespace: tenant(s.c), Name: name}, &nc); err != nil {
				return err
			}
			nc.Finalizers = append(nc.Finalizers, "example.com/for-ever")
			return s.a.Client.Update(t.Context(), &nc)
		})
	}
	s.isthmus(t, "unpeer", "--context", "a", "c", "--force", "--timeout", patience.String())
	var namespace corev1.Namespace
	if err := s.a.Client.Get(t.Context(), client.ObjectKey{Name: tenant(s.c)}, &namespace); !apierrors.IsNotFound(err) {
		t.Errorf("the tenant namespace is still there: %v", err)
	}
}

func afterUnpeering(t *testing.T, s *site) {
	begin := time.Now()
	eventually(t, "the end of c's identity", func() error { // API servers cache tokens for 10 s
		err := s.identityOfC.List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(tenant(s.c)))
		if !apierrors.IsUnauthorized(err) && !apierrors.IsForbidden(err) {
			return fmt.Errorf("it lists: %w", err)
		}
		return nil
	})
	t.Logf("c's identity was forbidden everything after %.1f s", time.Since(begin).Seconds())
	eventually(t, "a gateway without c", func() error {
		text, err := s.a.Metrics(t.Context())
		if err == nil && strings.Contains(text, `peer="`+s.c.ID+`"`) {
			err = fmt.Errorf("it knows c")
		}
		return err
	})
}
