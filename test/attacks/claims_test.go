package attacks

import (
	"encoding/base64"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/noise"
)

type spec = v1alpha1.NetworkConfigSpec

// claims is the state before an attack on c's NetworkConfig.
type claims struct {
	client client.Client
	good   spec
	had    v1alpha1.TunnelEndpointSpec // a's TunnelEndpoint for c
}

// configOfC returns c's NetworkConfig at cluster a.
func (s *site) configOfC(t *testing.T, c client.Client) *v1alpha1.NetworkConfig {
	t.Helper()
	nc := &v1alpha1.NetworkConfig{}
	must(t, c.Get(t.Context(), client.ObjectKey{Namespace: tenant(s.c), Name: identity(s.a).UniqueName()}, nc))
	return nc
}

// edit changes c's NetworkConfig at cluster a. It repeats the change after conflicts, because a's
// manager writes finalizers and status.
func (s *site) edit(t *testing.T, c client.Client, change func(*v1alpha1.NetworkConfig)) error {
	t.Helper()
	for {
		nc := s.configOfC(t, c)
		change(nc)
		if err := c.Update(t.Context(), nc); !apierrors.IsConflict(err) {
			return err
		}
	}
}

// waitChecked waits until cluster a has checked the current generation of c's NetworkConfig, and
// returns the condition Accepted.
func (s *site) waitChecked(t *testing.T, c client.Client) (accepted metav1.Condition) {
	t.Helper()
	eventually(t, "a verdict", func() error {
		nc := s.configOfC(t, c)
		condition := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted)
		if condition == nil || condition.ObservedGeneration != nc.Generation {
			return fmt.Errorf("generation %d: %+v", nc.Generation, condition)
		}
		accepted = *condition
		return nil
	})
	return accepted
}

// stopManagerOfC stops c's manager, which would otherwise revert the attacker's changes to its
// NetworkConfig.
func (s *site) stopManagerOfC(t *testing.T) *claims {
	t.Helper()
	must(t, s.c.Stop(fleet.Manager))
	f := &claims{client: clientFor(t, configAs(t, s.c, s.a), s.c.Client), had: endpointOf(t, s.a, s.c).Spec}
	f.good = s.configOfC(t, f.client).Spec
	s.after(func(t *testing.T) {
		if err := s.c.Start(t.Context(), fleet.Manager); err != nil {
			t.Error(err)
		}
		if err := s.a.WaitReady(t.Context(), s.c, patience); err != nil {
			t.Error(err)
		}
	})
	return f
}

// claim writes a changed NetworkConfig and checks that cluster a refuses it for the given reason.
// If reason is empty, the API server must reject the NetworkConfig. claim also checks that no
// TunnelEndpoint or allocation of cluster a changes. Then it restores the honest NetworkConfig.
func (s *site) claim(t *testing.T, f *claims, reason string, change func(*spec)) {
	t.Helper()
	b, allocations := endpointOf(t, s.a, s.b), s.allocations(t)
	err := s.edit(t, f.client, func(nc *v1alpha1.NetworkConfig) { change(&nc.Spec) })
	switch {
	case reason == "":
		if !apierrors.IsInvalid(err) {
			t.Errorf("the API server says %v; want Invalid", err)
		}
		return
	case err != nil:
		t.Fatal(err)
	}
	if got := s.waitChecked(t, f.client); got.Status != metav1.ConditionFalse || got.Reason != reason {
		t.Errorf("%s %s: %s; want a refusal for %s", got.Status, got.Reason, got.Message, reason)
	}
	if now := endpointOf(t, s.a, s.b); now.Generation != b.Generation || now.UID != b.UID {
		t.Errorf("the TunnelEndpoint of b is %+v; it was %+v", now.Spec, b.Spec)
	}
	if now := endpointOf(t, s.a, s.c).Spec; fmt.Sprint(now) != fmt.Sprint(f.had) {
		t.Errorf("the TunnelEndpoint of c is %+v; it was %+v", now, f.had)
	}
	if now := s.allocations(t); now != allocations {
		t.Errorf("the IPAM state says %s; it said %s", now, allocations)
	}
	s.restoreConfig(t, f)
}

// restoreConfig restores c's honest NetworkConfig and checks that cluster a accepts it.
func (s *site) restoreConfig(t *testing.T, f *claims) {
	t.Helper()
	must(t, s.edit(t, f.client, func(nc *v1alpha1.NetworkConfig) { f.good.DeepCopyInto(&nc.Spec) }))
	if got := s.waitChecked(t, f.client); got.Status != metav1.ConditionTrue {
		t.Errorf("what c claimed first is %s: %s", got.Reason, got.Message)
	}
}

// allocations returns the networks of a's peers in the IPAM state, as text.
func (s *site) allocations(t *testing.T) string {
	t.Helper()
	var list v1alpha1.IpamStorageList
	must(t, s.a.Client.List(t.Context(), &list))
	if len(list.Items) != 1 {
		t.Fatalf("%d IpamStorages", len(list.Items))
	}
	return fmt.Sprintf("%+v", list.Items[0].Spec.ClusterSubnets)
}

// divertingNodes returns the nodes of cluster a that route an address to a peer.
func (s *site) divertingNodes(t *testing.T, addr netip.Addr) (nodes []string) {
	t.Helper()
	for _, n := range s.a.Nodes {
		must(t, n.Do(func() error {
			routes, err := netlink.RouteGet(addr.AsSlice())
			if err != nil || len(routes) == 0 {
				return nil //nolint:nilerr // an unreachable address is not routed to a peer
			}
			link, err := net.InterfaceByIndex(routes[0].LinkIndex)
			if err == nil && strings.HasPrefix(link.Name, "isthmus") {
				nodes = append(nodes, n.Name)
			}
			return err
		}))
	}
	return nodes
}

// pods returns a change that advertises another PodCIDR.
func pods(network string) func(*spec) { return func(n *spec) { n.PodCIDR = network } }

func endpoint(host string) func(*spec) { return func(n *spec) { n.EndpointIP = host } }

func claimChapter() chapter {
	f := &claims{}
	claim := func(attempt, now, reason, addr string, change func(*testing.T, *site) func(*spec)) attack {
		return attack{attacker: "c, accepted", attempt: attempt, now: now, run: func(t *testing.T, s *site) {
			s.claim(t, f, reason, change(t, s))
			if addr != "" {
				if nodes := s.divertingNodes(t, netip.MustParseAddr(addr)); nodes != nil {
					t.Errorf("%s is led to a peer by %v", addr, nodes)
				}
			}
		}}
	}
	always := func(change func(*spec)) func(*testing.T, *site) func(*spec) {
		return func(*testing.T, *site) func(*spec) { return change }
	}
	const consent, waits = v1alpha1.ReasonConsent, "ConsentNeeded; the former networks stay"
	const invalid, wrong, key = v1alpha1.ReasonInvalid, v1alpha1.ReasonEndpoint, v1alpha1.ReasonKeyConflict
	return chapter{title: "What a peer advertises", prepare: func(t *testing.T, s *site) { *f = *s.stopManagerOfC(t) }, attacks: []attack{
		claim("advertises 8.8.8.0/24", waits, consent, "8.8.8.8", always(pods("8.8.8.0/24"))),
		claim("advertises a's on-prem network", waits, consent, "192.168.77.10", always(pods("192.168.77.0/24"))),
		claim("advertises a's on-link network", waits, consent, "172.30.1.10", always(pods("172.30.1.0/24"))),
		claim("advertises a's Services", waits, consent, "10.96.0.1", always(pods("10.96.0.0/16"))),
		claim("advertises the pods of a", waits, consent, "", always(pods("10.244.0.0/24"))),
		claim("advertises the network that b has at a", waits, consent, "", func(t *testing.T, s *site) func(*spec) {
			return pods(endpointOf(t, s.a, s.b).Spec.RemoteNATPodCIDR)
		}),
		claim("advertises a wider network, 172.20.0.0/16", waits, consent, "172.20.99.1", always(pods("172.20.0.0/16"))),
		claim("advertises ExternalCIDR 9.9.9.0/24", waits, consent, "9.9.9.9", always(func(n *spec) { n.ExternalCIDR = "9.9.9.0/24" })),
		claim("advertises the metadata service, 169.254.169.254/32", "the API server refuses it", "", "169.254.169.254",
			always(pods("169.254.169.254/32"))),
		claim("advertises everything, 0.0.0.0/0", "the API server refuses it", "", "1.1.1.1", always(pods("0.0.0.0/0"))),
		{attacker: "c, accepted", attempt: "deletes its NetworkConfig and recreates it with other networks, as a new peer would",
			now: waits + ", because allocations last until un-peering ends", run: func(t *testing.T, s *site) { s.deleteAndClaim(t, f) }},
		{attacker: "c, accepted", attempt: "deletes its NetworkConfig while pods of a talk to it",
			now: "nodes refuse the packets", run: func(t *testing.T, s *site) { s.deleteUnderTraffic(t, f) }},
		claim("a NetworkConfig addressed to b", "refused: Invalid", invalid, "", func(_ *testing.T, s *site) func(*spec) {
			return func(n *spec) { n.RemoteCluster = identity(s.b) }
		}),
		claim("its gateway is at a's gateway", "refused: BadEndpoint", wrong, "", func(_ *testing.T, s *site) func(*spec) {
			return endpoint(s.a.Nodes[s.gateway].Addr.String())
		}),
		claim("its gateway is at another node of a", "refused: BadEndpoint", wrong, "", func(_ *testing.T, s *site) func(*spec) {
			return endpoint(s.a.Nodes[s.victimNode()].Addr.String())
		}),
		claim("its gateway is at a's API server", "refused: BadEndpoint", wrong, "", func(_ *testing.T, s *site) func(*spec) {
			return endpoint(s.a.Control.Addr.String())
		}),
		claim("its gateway is at a Service of a", "refused: BadEndpoint", wrong, "", always(endpoint("10.96.0.1"))),
		claim("its gateway is at a pod of a", "refused: BadEndpoint", wrong, "", always(endpoint("10.244.1.11"))),
		claim("its gateway is at an address of b's network at a", "refused: BadEndpoint", wrong, "", func(t *testing.T, s *site) func(*spec) {
			return endpoint(s.seen(t, s.a, s.b, s.podOfB().Addr).String())
		}),
		claim("its gateway is at 127.0.0.1", "the API server refuses it", "", "", always(endpoint("127.0.0.1"))),
		claim("its gateway is at 255.255.255.255", "the API server refuses it", "", "", always(endpoint("255.255.255.255"))),
		claim("its gateway is at 169.254.169.254", "the API server refuses it", "", "", always(endpoint("169.254.169.254"))),
		claim("its gateway is at localhost", "the API server refuses it", "", "", always(endpoint("localhost"))),
		claim("its gateway is at 168.63.129.16, Azure's metadata service", "refused: Invalid", invalid, "",
			always(endpoint("168.63.129.16"))),
		{attacker: "c, accepted", attempt: "its gateway is at b's gateway", now: "accepted: b drops messages for another key, so only c loses its connection",
			run: func(t *testing.T, s *site) { s.atGatewayOfB(t, f) }},
		{attacker: "c, accepted", attempt: "changes address, port and key of its gateway as fast as the API server accepts it",
			now: "a follows, and traffic with b loses nothing", run: func(t *testing.T, s *site) { s.restless(t, f) }},
		claim("lists b's public key among its tunnels", "KeyConflict on c's NetworkConfig; b keeps its key", key, "", func(t *testing.T, s *site) func(*spec) {
			_, public := keysOf(t, s.b)
			return func(n *spec) { n.BackendConfig[v1alpha1.ConfigTunnels] = "5872:" + public }
		}),
		claim("has b's public key as its own", "KeyConflict on c's NetworkConfig", key, "", func(t *testing.T, s *site) func(*spec) {
			_, public := keysOf(t, s.b)
			return func(n *spec) { n.BackendConfig[v1alpha1.ConfigPublicKey] = public }
		}),
		claim("has a's public key as its own", "KeyConflict on c's NetworkConfig", key, "", func(t *testing.T, s *site) func(*spec) {
			_, public := keysOf(t, s.a)
			return func(n *spec) { n.BackendConfig[v1alpha1.ConfigPublicKey] = public }
		}),
		claim("a public key of low order, which keeps nothing secret", "refused: Invalid", invalid, "", always(func(n *spec) {
			n.BackendConfig[v1alpha1.ConfigPublicKey] = base64.StdEncoding.EncodeToString(append([]byte{1}, make([]byte, 31)...))
		})),
	}}
}

func (s *site) deleteAndClaim(t *testing.T, f *claims) {
	t.Helper()
	nc := s.configOfC(t, f.client)
	must(t, f.client.Delete(t.Context(), nc))
	again := &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Namespace: nc.Namespace, Name: nc.Name, Labels: nc.Labels}, Spec: *f.good.DeepCopy()}
	again.Spec.PodCIDR, again.Spec.ExternalCIDR = "172.21.0.0/16", "172.22.0.0/16"
	eventually(t, "the new NetworkConfig", func() error { return f.client.Create(t.Context(), again.DeepCopy()) }) // fails until the old object has no finalizers
	if got := s.waitChecked(t, f.client); got.Reason != v1alpha1.ReasonConsent {
		t.Errorf("%s %s: %s", got.Status, got.Reason, got.Message)
	}
	if nodes := s.divertingNodes(t, netip.MustParseAddr("172.21.0.1")); nodes != nil {
		t.Errorf("led to c by %v", nodes)
	}
	s.restoreConfig(t, f)
	s.waitReconnected(t, f)
}

// waitReconnected waits until cluster a has its former TunnelEndpoint for cluster c again, and pods
// of cluster a reach cluster c.
func (s *site) waitReconnected(t *testing.T, f *claims) {
	t.Helper()
	eventually(t, "the TunnelEndpoint of c as it was", func() error {
		var list v1alpha1.TunnelEndpointList
		if err := s.a.Client.List(t.Context(), &list, client.MatchingLabels{v1alpha1.LabelClusterID: s.c.ID}); err != nil {
			return err
		}
		if len(list.Items) != 1 || fmt.Sprint(list.Items[0].Spec) != fmt.Sprint(f.had) {
			return fmt.Errorf("%+v", list.Items)
		}
		return nil
	})
	s.reachesC(t)
}

func (s *site) reachesC(t *testing.T) {
	t.Helper()
	addr := s.seen(t, s.a, s.c, s.podOfC().Addr)
	eventually(t, "pods of c", func() error {
		_, err := s.podOfA(s.other).PingWith(t.Context(), addr, lab.PingOptions{Wait: time.Second})
		return err
	})
}

func (s *site) deleteUnderTraffic(t *testing.T, f *claims) {
	t.Helper()
	s.reachesC(t)
	networks := []netip.Prefix{netip.MustParsePrefix("172.20.0.0/22"), external(t, s.a, s.c)}
	k := newTap(t, s.Lab.Underlay, inNetworks(networks...))
	addr := s.seen(t, s.a, s.c, s.podOfC().Addr)
	nc := s.configOfC(t, f.client)
	must(t, f.client.Delete(t.Context(), nc))
	refused := 0
	for begin := time.Now(); refused < 20; {
		_, err := s.podOfA(s.other).PingWith(t.Context(), addr, lab.PingOptions{Wait: 50 * time.Millisecond})
		if err != nil {
			refused++
		}
		if time.Since(begin) > patience {
			t.Fatal("pods of a go on to reach c")
		}
	}
	if n := len(k.packets()); n > 0 {
		t.Errorf("%d packets in the clear: %x", n, k.packets()[0])
	}
	again := &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Namespace: nc.Namespace, Name: nc.Name, Labels: nc.Labels}, Spec: f.good}
	eventually(t, "the new NetworkConfig", func() error { return f.client.Create(t.Context(), again.DeepCopy()) })
	s.waitReconnected(t, f)
}

func (s *site) restless(t *testing.T, f *claims) {
	t.Helper()
	n := 0
	for begin := time.Now(); time.Since(begin) < 2*time.Second; n++ {
		key := base64.StdEncoding.EncodeToString(noise.NewKey().PublicKey().Bytes())
		must(t, s.edit(t, f.client, func(nc *v1alpha1.NetworkConfig) {
			nc.Spec.EndpointIP = fmt.Sprintf("198.51.100.%d", 1+n%250)
			nc.Spec.BackendConfig[v1alpha1.ConfigPort] = fmt.Sprint(1024 + n)
			nc.Spec.BackendConfig[v1alpha1.ConfigPublicKey] = key
		}))
	}
	t.Logf("%d changes", n)
	s.checkTraffic(t)
	s.restoreConfig(t, f)
	s.waitReconnected(t, f)
}

func (s *site) atGatewayOfB(t *testing.T, f *claims) {
	t.Helper()
	b := endpointOf(t, s.a, s.b)
	addr := s.gatewayOfB(t).String()
	must(t, s.edit(t, f.client, func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = addr }))
	if got := s.waitChecked(t, f.client); !slices.Contains([]string{v1alpha1.ReasonAnswered, v1alpha1.ReasonEndpoint}, got.Reason) {
		t.Errorf("%s %s: %s", got.Status, got.Reason, got.Message)
	}
	s.checkTraffic(t)
	if now := endpointOf(t, s.a, s.b); now.Generation != b.Generation || fmt.Sprint(now.Status.Connection.PeerConfiguration) != fmt.Sprint(b.Status.Connection.PeerConfiguration) {
		t.Errorf("b was %+v, and is %+v", b, now)
	}
	s.restoreConfig(t, f)
	s.waitReconnected(t, f)
}
