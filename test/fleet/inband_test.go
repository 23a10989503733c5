package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	api "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// The control planes of these two clusters can reach each other only through the tunnel.
func TestControlPlanesWorkThroughTheTunnel(t *testing.T) {
	f := upWith(t, fleet.Options{Services: true, Spec: lab.Spec{Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 2)), clusterSpec("10.244.128.0/18", 2),
	}}})
	a, b := f.Clusters[0], f.Clusters[1]
	wall(t, a, b)
	wall(t, b, a)
	managerReachesPods(t, a)
	inBand := func(t *testing.T) {
		t.Helper()
		isthmus(t, f, "peer", "--in-band", "--services", "default", "--request-timeout", "1m", "--timeout", patience.String(), "--context", a.Name, "--remote-context", b.Name)
		waitReady(t, a, b)
	}

	inBand(t)
	t.Run("BothManagersUseTheTunnel", func(t *testing.T) {
		for _, c := range f.Clusters {
			for _, side := range []string{"ours", "theirs"} {
				eventually(t, "a connection in cluster "+c.Name, func() error {
					n, err := c.Metric(t.Context(), "isthmus_peer_in_band_connections", `side="`+side+`"`)
					if err == nil && n == 0 {
						err = errors.New("there is none")
					}
					return err
				})
			}
		}
	})
	t.Run("OthersCannotUseTheTunnel", func(t *testing.T) { checkInBandClosed(t, a, b) })
	t.Run("ServicesAreSharedThroughTheTunnel", func(t *testing.T) {
		exportShop(t, b)
		waitListed(t, a, map[string]bool{b.Name: true}, b)
		fetchFromAll(t, a, b)
	})
	changesInBand(t, f, inBand)
	partsInBand(t, f, inBand)
}

// changesInBand changes keys and addresses. Each change must reach the peer through the tunnel.
// Otherwise a condition must name the command that repairs the peering.
func changesInBand(t *testing.T, f *fleet.Fleet, inBand func(*testing.T)) {
	a, b := f.Clusters[0], f.Clusters[1]
	t.Run("KeyRotationIsAnnouncedThroughTheTunnel", func(t *testing.T) {
		from, to := remotePod(t, a), remotePod(t, b)
		traffic := talk(t, from, to, seen(t, a, b, to.Addr))
		for _, c := range f.Clusters {
			rotate(t, f, c)
		}
		traffic.endWithoutLoss(t)
		waitReady(t, a, b)
	})
	t.Run("ImmediateKeyReplacementRequiresThePeerCommand", func(t *testing.T) {
		isthmus(t, f, "rotate-key", "--context", a.Name, "--now")
		public := string(keyring.Text(fabric.PublicKeys(ringOf(t, a).Private, 1)[0]))
		eventually(t, "the command at a, or the new key at b", func() error {
			if endpointOf(t, b, a).Spec.BackendConfig[v1alpha1.ConfigPublicKey] == public {
				return nil // the manager announced the key before the gateway replaced it
			}
			return saysTunnelDown(t, a, b, "our NetworkConfig has changed")
		})
		inBand(t)
	})
	t.Run("FailoverIsAnnouncedThroughTheTunnel", func(t *testing.T) {
		failOver(t, a)
		waitForAddress(t, a, b)
		waitReady(t, a, b)
	})
	t.Run("AddressChangeIsAnnouncedThroughTheTunnel", func(t *testing.T) {
		var service corev1.Service
		must(t, b.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: "isthmus-gateway"}, &service))
		before := service.DeepCopy()
		service.Annotations[v1alpha1.AnnotationOverrideAddress] = "192.0.2.99" // b's gateway starts the handshake, so the wrong address does no harm
		must(t, b.Client.Patch(t.Context(), &service, client.MergeFrom(before)))
		eventually(t, "the address at a", func() error { return endpointIs(t, a, b, "192.0.2.99") })
		before = service.DeepCopy()
		delete(service.Annotations, v1alpha1.AnnotationOverrideAddress)
		must(t, b.Client.Patch(t.Context(), &service, client.MergeFrom(before)))
		waitForAddress(t, b, a)
		waitReady(t, a, b)
	})
	t.Run("ConditionNamesTheCommandIfBothSidesFailOver", func(t *testing.T) {
		startGateways(t, a)
		was := [2]int{active(t, a), active(t, b)}
		must(t, a.Kill(fleet.Gateway(was[0])))
		must(t, b.Kill(fleet.Gateway(was[1])))
		for _, pair := range [][2]*fleet.Cluster{{a, b}, {b, a}} {
			waitTunnelDown(t, pair[0], pair[1], "our NetworkConfig has changed")
		}
		inBand(t)
		startGateways(t, a)
		startGateways(t, b)
	})
}

// partsInBand ends the peering in three ways: by one side, by both at once, and by one command
// for both.
func partsInBand(t *testing.T, f *fleet.Fleet, inBand func(*testing.T)) {
	a, b := f.Clusters[0], f.Clusters[1]
	t.Run("OneSideUnpeers", func(t *testing.T) {
		isthmus(t, f, "unpeer", "--context", a.Name, b.Name)
		eventually(t, "a has deleted its NetworkConfig at b", func() error {
			return requireGone(t, b, v1alpha1.LabelOriginID, a.ID)
		})
		waitTunnelDown(t, b, a, "the peer has un-peered")
		waitListed(t, a, map[string]bool{}, b)
		isthmus(t, f, "unpeer", "--timeout", patience.String(), "--context", b.Name, a.Name)
	})
	t.Run("BothPeeringsAreDeletedAtOnce", func(t *testing.T) {
		inBand(t)
		for _, pair := range [][2]*fleet.Cluster{{a, b}, {b, a}} {
			p, err := pair[0].Peering(t.Context(), pair[1])
			must(t, err)
			must(t, pair[0].Client.Delete(t.Context(), p))
		}
		for _, c := range f.Clusters {
			eventually(t, "no Peering in cluster "+c.Name, func() error {
				var list api.PeeringList
				err := c.Client.List(t.Context(), &list)
				if err == nil && len(list.Items) > 0 {
					ready := meta.FindStatusCondition(list.Items[0].Status.Conditions, api.ConditionReady)
					err = fmt.Errorf("%s: %+v", list.Items[0].Name, ready)
				}
				return err
			})
			for _, label := range []string{v1alpha1.LabelReplicated, v1alpha1.LabelReplication} {
				eventually(t, "nothing is left", func() error { return requireGone(t, c, label, "true") })
			}
		}
	})
	t.Run("OneCommandUnpeersBothSides", func(t *testing.T) {
		inBand(t)
		isthmus(t, f, "unpeer", "--context", a.Name, "--remote-context", b.Name)
		for _, c := range f.Clusters {
			must(t, requireGone(t, c, v1alpha1.LabelReplicated, "true"))
		}
	})
}

// wall blocks packets between the control plane of a cluster and all hosts of another cluster.
func wall(t *testing.T, c, other *fleet.Cluster) {
	t.Helper()
	addrs := []netip.Addr{other.Control.Addr}
	for _, n := range other.Nodes {
		addrs = append(addrs, n.Addr)
	}
	for _, addr := range addrs {
		must(t, c.Control.Do(func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: netlink.NewIPNet(addr.AsSlice()), Type: unix.RTN_BLACKHOLE})
		}))
	}
}

// managerReachesPods adds routes from the manager's host to the gateways' Pods. A real manager is
// a Pod and needs none.
func managerReachesPods(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	for _, n := range c.Nodes {
		ipCommand(t, c.Control.Host, "route", "add", n.PodCIDR.String(), "via", n.Addr.String())
	}
}

// waitTunnelDown waits until the Peering reports, with the given reason, that the administrator
// must run `isthmus peer --in-band`.
func waitTunnelDown(t *testing.T, at, of *fleet.Cluster, why string) {
	t.Helper()
	eventually(t, "a reason at "+at.Name, func() error { return saysTunnelDown(t, at, of, why) })
}

func saysTunnelDown(t *testing.T, at, of *fleet.Cluster, why string) error {
	p, err := at.Peering(t.Context(), of)
	if err != nil {
		return err
	}
	c := meta.FindStatusCondition(p.Status.Conditions, api.ConditionIdentity)
	if c == nil || c.Reason != api.ReasonTunnelDown || !strings.Contains(c.Message, "isthmus peer --in-band") || !strings.Contains(c.Message, why) {
		return fmt.Errorf("%+v", c)
	}
	return nil
}

// failOver kills the active gateway and waits until another one is active.
func failOver(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	was := active(t, c)
	must(t, c.Kill(fleet.Gateway(was)))
	eventually(t, "another active gateway of "+c.Name, func() error {
		i, err := c.ActiveGateway(t.Context())
		if err == nil && i == was {
			err = errors.New("it is the one that was killed")
		}
		return err
	})
}

// checkInBandClosed checks that pods and nodes of cluster a cannot connect to b's in-band port
// through the tunnel, or use the port of a's gateway for a's manager.
func checkInBandClosed(t *testing.T, a, b *fleet.Cluster) {
	p, err := a.Peering(t.Context(), b)
	must(t, err)
	external, err := netip.ParsePrefix(p.Status.Remote.ExternalCIDRSeen)
	must(t, err)
	at := netip.AddrPortFrom(external.Addr().Next(), 6443).String()
	pod, node := podOn(t, a, 0), a.Nodes[1]
	for _, from := range []*lab.Host{pod.Host, node.Host} {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		if c, err := from.Dial(ctx, "tcp", at); err == nil {
			c.Close()
			t.Errorf("%s has connected to %s", from, at)
		}
		cancel()
	}
	for _, drop := range []struct {
		c         *fleet.Cluster
		direction string
	}{{b, "inbound"}, {a, "outbound"}} { // the packets from the pod, and those from the node
		if n, err := drop.c.Metric(t.Context(), "isthmus_drops_total", `reason="local_source"`, `direction="`+drop.direction+`"`); err != nil || n == 0 {
			t.Errorf("%s of cluster %s: %v packets dropped, %v", drop.direction, drop.c.Name, n, err)
		}
	}
	manager := netip.AddrPortFrom(a.GatewayAddr(active(t, a)), 5879).String()
	c, err := pod.Dial(t.Context(), "tcp", manager)
	if err != nil {
		return // the connection is refused, which is fine
	}
	defer c.Close()
	_, _ = fmt.Fprintf(c, "CONNECT %[1]s:6443 HTTP/1.1\r\nHost: %[1]s:6443\r\n\r\n", b.ID)
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	got := make([]byte, 64)
	if n, _ := c.Read(got); strings.Contains(string(got[:n]), "HTTP") {
		t.Errorf("a stranger was answered: %q", got[:n])
	}
}

// waitForAddress waits until b uses the current address of a's gateway.
func waitForAddress(t *testing.T, a, b *fleet.Cluster) {
	t.Helper()
	eventually(t, "the address of the active gateway of "+a.Name+" at "+b.Name, func() error {
		i, err := a.ActiveGateway(t.Context())
		if err != nil {
			return err
		}
		return endpointIs(t, b, a, a.Nodes[i].Addr.String())
	})
}

func endpointIs(t *testing.T, at, of *fleet.Cluster, want string) error {
	p, err := at.Peering(t.Context(), of)
	if err == nil && !strings.HasPrefix(p.Status.Endpoint, want+":") {
		err = fmt.Errorf("it is %s, want %s", p.Status.Endpoint, want)
	}
	return err
}

// startGateways starts the gateways that are not running.
func startGateways(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	for i := range 2 {
		if name := fleet.Gateway(i); !c.Running(name) {
			must(t, c.Start(t.Context(), name))
		}
	}
}

// requireGone returns an error if a NetworkConfig with the label exists.
func requireGone(t *testing.T, c *fleet.Cluster, label, value string) error {
	var list v1alpha1.NetworkConfigList
	err := c.Client.List(t.Context(), &list, client.MatchingLabels{label: value})
	if err == nil && len(list.Items) > 0 {
		err = fmt.Errorf("cluster %s has NetworkConfig %s/%s", c.Name, list.Items[0].Namespace, list.Items[0].Name)
	}
	return err
}
