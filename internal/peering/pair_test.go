package peering

import (
	"fmt"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/internal/expect"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"maps"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

var must = expect.NoError

func peerUp(t *testing.T, p *clustertest.Pair) error {
	t.Helper()
	_, err := Peer(t.Context(), p.A, p.B, PeerOptions{Timeout: clustertest.Patient, Report: p.Report})
	return err
}

func peerDown(t *testing.T, p *clustertest.Pair) error {
	t.Helper()
	return Unpeer(t.Context(), p.A, p.B, UnpeerOptions{Timeout: clustertest.Patient, Report: p.Report})
}

// objectVersions returns the UID and resourceVersion of each object of a peering, on both sides.
func objectVersions(t *testing.T, p *clustertest.Pair) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, c := range []*cluster.Cluster{p.A, p.B} {
		peer := p.A
		if c == p.A {
			peer = p.B
		}
		s := &side{Cluster: c, peer: &side{Cluster: peer}, namespace: peer.Identity.TenantNamespace(), secret: isthmus.DefaultIdentitySecret}
		secret := &corev1.Secret{}
		secret.Namespace, secret.Name = s.namespace, s.secret
		peering := New(peer.Identity.UniqueName(), peer.Identity, "", "")
		for _, o := range append(s.rights(), s.tenantNamespace(), secret, peering) {
			key := fmt.Sprintf("%s: %T %s", c, o, o.GetName())
			err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o)
			if client.IgnoreNotFound(err) != nil {
				t.Fatal(err)
			}
			if err == nil {
				all[key] = string(o.GetUID()) + " " + o.GetResourceVersion()
			}
			if _, ok := o.(*flowcontrolv1.FlowSchema); ok && err == nil {
				all[key] = string(o.GetUID()) // ignore its version, because the API server writes its status
			}
		}
	}
	return all
}

func diff(a, b map[string]string) (changed []string) {
	for _, k := range slices.Sorted(maps.Keys(a)) {
		if a[k] != b[k] {
			changed = append(changed, k)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[k]; !ok {
			changed = append(changed, k)
		}
	}
	return changed
}
