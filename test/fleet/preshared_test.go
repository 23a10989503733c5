package fleet

import (
	"fmt"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// preshared waits until the gateways of two clusters say that all their sessions with each other have the preshared
// key of the same exchange, another one than before.
func preshared(t *testing.T, a, b *fleet.Cluster, before string) (exchange string) {
	t.Helper()
	eventually(t, "a preshared key", func() error {
		one, other := endpointOf(t, a, b).Status.Connection.PeerConfiguration[v1alpha1.ConfigPreshared], endpointOf(t, b, a).Status.Connection.PeerConfiguration[v1alpha1.ConfigPreshared]
		if one == "" || one != other || one == before {
			return fmt.Errorf("%s has %q and %s has %q; before it was %q", a, one, b, other, before)
		}
		exchange = one
		return nil
	})
	return exchange
}

// TestPresharedKeys has two clusters with several tunnels agree on a preshared key.
func TestPresharedKeys(t *testing.T) {
	tunnels := func(n int, spec lab.ClusterSpec) lab.ClusterSpec {
		spec.Tunnels = n
		return spec
	}
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{tunnels(2, inPods(clusterSpec("10.244.0.0/16", 2))), tunnels(2, clusterSpec("10.244.128.0/18", 2))}})
	a, b := f.Clusters[0], f.Clusters[1]
	begin := time.Now()
	peer(t, f, a, b)
	first := preshared(t, a, b, "")
	t.Logf("a preshared key after %.1f s", time.Since(begin).Seconds())
	from, to := remotePod(t, a), remotePod(t, b)
	at := seen(t, a, b, to.Addr)

	t.Run("a new exchange costs no packet", func(t *testing.T) {
		traffic := talk(t, from, to, at)
		var secret corev1.Secret
		must(t, a.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: "isthmus-psk"}, &secret))
		secret.Data = nil
		must(t, a.Client.Update(t.Context(), &secret))
		must(t, a.Kill(fleet.Manager))
		must(t, a.Start(t.Context(), fleet.Manager))
		next := preshared(t, a, b, first)
		traffic.endWithoutLoss(t)
		first = next
	})
}
