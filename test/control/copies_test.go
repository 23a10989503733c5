package control

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A manager where an older version has installed CRDs and rights works without GrantedNetworks, says so,
// and has them as soon as they are there.
func TestAManagerWorksWithoutGrantedNetworksAndSaysSo(t *testing.T) {
	sites := newSites(t, "10.244.0.0/16", "10.243.0.0/17")
	a, b := sites[0], sites[1]
	definition := &unstructured.Unstructured{}
	definition.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	definition.SetName("grantednetworks.isthmus.net")
	if err := a.client.Delete(t.Context(), definition); err != nil {
		t.Fatal(err)
	}
	a.eventually("no GrantedNetworks", func() (string, bool) {
		err := a.client.Get(t.Context(), client.ObjectKeyFromObject(definition), definition)
		return fmt.Sprint(err), client.IgnoreNotFound(err) == nil && err != nil
	})
	b.change(&rbacv1.ClusterRole{}, client.ObjectKey{Name: "isthmus-manager"}, false, func(o client.Object) {
		role := o.(*rbacv1.ClusterRole)
		role.Rules = slices.DeleteFunc(role.Rules, func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "grantednetworks") })
	})
	for _, s := range sites {
		s.startManager()
		s.eventually("a word about it", func() (string, bool) {
			text, err := os.ReadFile(s.log())
			return fmt.Sprintf("%s%v", text, err), strings.Contains(string(text), "route agents read the IPAM's books in their place")
		})
	}
	peer(t, a, b)
	copies := func(s *site) (n int) {
		var list isthmus.GrantedNetworksList
		if err := s.client.List(t.Context(), &list); err != nil {
			return 0
		}
		for i := range list.Items {
			n += len(list.Items[i].Spec.Peers)
		}
		return n
	}
	if n := copies(b); n != 0 {
		t.Errorf("b has copies of %d peers that nobody could write", n)
	}
	for _, s := range sites {
		if out, err := s.isthmus("install", "--without-workloads", "--kubeconfig", s.kubeconfig, "--cluster-name", s.name, "--cluster-id", s.id); err != nil {
			t.Fatalf("isthmus install: %v\n%s", err, out)
		}
	}
	for _, s := range sites {
		s.eventually("the copy of the books of "+s.name, func() (string, bool) { n := copies(s); return fmt.Sprint(n), n == 1 })
	}
	unpeer(t, a, b)
}
