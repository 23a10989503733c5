package fleet

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// The gateways of these three clusters have three, two and one tunnels. Between two clusters, the
// smaller number is in use.
func TestPeersUseTheSmallerNumberOfTunnels(t *testing.T) {
	several := func(n int, spec lab.ClusterSpec) lab.ClusterSpec {
		spec.Tunnels = n
		return spec
	}
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{
		several(3, inPods(clusterSpec("10.244.0.0/16", 3))), several(2, clusterSpec("10.244.128.0/18", 2)), several(1, clusterSpec("172.20.0.0/22", 2)),
	}})
	a, b, c := f.Clusters[0], f.Clusters[1], f.Clusters[2]
	peer(t, f, a, b)
	peer(t, f, a, c)
	peer(t, f, b, c)

	t.Run("TunnelEndpointsHaveAllTunnelsOfThePeer", func(t *testing.T) {
		for _, of := range f.Clusters {
			var secret corev1.Secret
			must(t, of.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: "wireguard-pubkey"}, &secret))
			private, err := fabric.ParseKey(string(secret.Data["privateKey"]))
			must(t, err)
			var further []fabric.TunnelEnd
			for i, key := range fabric.PublicKeys(private, of.Tunnels)[1:] {
				further = append(further, fabric.TunnelEnd{PublicKey: key, Port: 5872 + uint16(i)})
			}
			for _, at := range f.Clusters {
				if at == of {
					continue
				}
				config := endpointOf(t, at, of).Spec.BackendConfig
				if got, want := config[v1alpha1.ConfigTunnels], fabric.FormatTunnels(further); got != want {
					t.Errorf("%s knows of %s: %q, want %q", at, of, got, want)
				}
				if _, there := config[v1alpha1.ConfigTunnels]; there && of.Tunnels == 1 {
					t.Errorf("%s is told of %s what a Liqo would not tell: %v", at, of, config)
				}
			}
		}
	})
	withC := "" // the tunnels in use between a and c
	used := func(t *testing.T) {
		t.Helper()
		for _, tc := range []struct {
			at, of *fleet.Cluster
			want   string
		}{{a, b, "1"}, {b, a, "1"}, {a, c, withC}, {c, a, withC}, {b, c, ""}, {c, b, ""}} {
			eventually(t, fmt.Sprintf("tunnels [%s] from %s to %s", tc.want, tc.at, tc.of), func() error {
				got, err := tunnelsInUse(t, tc.at, tc.of)
				if err == nil && got != tc.want {
					err = fmt.Errorf("in use are [%s]", got)
				}
				return err
			})
		}
	}
	all := func(t *testing.T) {
		t.Helper()
		for _, at := range f.Clusters {
			for _, of := range f.Clusters {
				if at != of {
					podsToPods(t, at, of)
				}
			}
		}
	}
	t.Run("SmallerNumberOfTunnelsIsUsed", used)
	t.Run("PodsReachPodsOnAllNodes", all)
	t.Run("LargePacketsAndStreamsArriveComplete", func(t *testing.T) { largePackets(t, a, b); largePackets(t, c, a) })
	t.Run("NextActiveGatewayUsesAllTunnels", func(t *testing.T) {
		during := startTraffic(t, a, b)
		was := active(t, a)
		must(t, a.Stop(fleet.Gateway(was)))
		eventually(t, "another gateway", func() error {
			now, err := a.ActiveGateway(t.Context())
			if err == nil && now == was {
				err = fmt.Errorf("it is still %d", now)
			}
			return err
		})
		must(t, a.Start(t.Context(), fleet.Gateway(was)))
		used(t)
		all(t)
		during.end(t)
	})
	// First restart the gateways one after the other, as an update of the Deployment does, then
	// change the Service. Revert in the opposite order.
	t.Run("NumberOfTunnelsChangesDuringTraffic", func(t *testing.T) {
		isthmus(t, f, "unpeer", "--context", "b", "--remote-context", "c") // otherwise their number of tunnels would change, too
		during := startTraffic(t, a, c)
		restart := func(n int) {
			c.SetTunnels(n)
			now := active(t, c)
			for _, i := range []int{1 - now, now} {
				must(t, c.Stop(fleet.Gateway(i)))
				must(t, c.Start(t.Context(), fleet.Gateway(i)))
				active(t, c)
			}
		}
		service := func(n string) {
			isthmus(t, f, "install", "--without-workloads", "--context", "c", "--gateway-service", "NodePort", "--tunnels", n)
		}
		published := func(n int) {
			eventually(t, fmt.Sprintf("%d tunnels of c", n), func() error {
				further, _ := fabric.ParseTunnels(endpointOf(t, a, c).Spec.BackendConfig[v1alpha1.ConfigTunnels])
				if got := 1 + len(further); got != n {
					return fmt.Errorf("a knows of %d", got)
				}
				return nil
			})
		}
		restart(3)
		published(1)
		used(t)
		service("2")
		published(2)
		withC = "1"
		used(t)
		podsToPods(t, a, c)
		service("1")
		published(1)
		withC = ""
		begin := time.Now()
		used(t)
		t.Logf("both sides have given the tunnel up %.1f s after it was taken back", time.Since(begin).Seconds())
		restart(1)
		podsToPods(t, c, a)
		during.end(t)
	})
}

// endpointOf returns a cluster's TunnelEndpoint for another cluster.
func endpointOf(t *testing.T, at, of *fleet.Cluster) *v1alpha1.TunnelEndpoint {
	t.Helper()
	var list v1alpha1.TunnelEndpointList
	must(t, at.Client.List(t.Context(), &list, client.MatchingLabels{v1alpha1.LabelClusterID: of.ID}))
	if len(list.Items) != 1 {
		t.Fatalf("%s has %d TunnelEndpoints for %s", at, len(list.Items), of)
	}
	return &list.Items[0]
}

// tunnelsInUse returns the numbers of the additional tunnels through which a cluster's gateway
// sends to another cluster.
func tunnelsInUse(t *testing.T, at, of *fleet.Cluster) (string, error) {
	t.Helper()
	text, err := at.Metrics(t.Context())
	if err != nil {
		return "", err
	}
	var used []string
	for i := 1; i < fabric.MaxTunnels; i++ {
		up, err := lab.SumMetric(text, "isthmus_peer_tunnel_up", []string{`peer="` + of.ID + `"`, fmt.Sprintf(`tunnel="%d"`, i)})
		if err != nil {
			return "", err
		}
		if up == 1 {
			used = append(used, fmt.Sprint(i))
		}
	}
	return strings.Join(used, " "), nil
}
