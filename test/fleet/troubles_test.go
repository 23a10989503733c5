package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/vishvananda/netlink"

	isthmusv1 "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	own "github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/routeagent"
)

// troubleSite is the pair of clusters in which faults are caused.
type troubleSite struct {
	*fleet.Fleet
	a, b         *fleet.Cluster
	saved        client.Object // object that a fault has removed, for its repair
	node         int           // index of the node with the fault, in cluster a
	stopActivity func()        // ends the background activity of the current fault
}

// selectFarNode selects a node of cluster a without the active gateway. After that, farNode returns
// this node until the next call.
func (s *troubleSite) selectFarNode(t *testing.T) *lab.Node {
	t.Helper()
	s.node = 1 - active(t, s.a)
	return s.a.Nodes[s.node]
}

// waitAnswers waits until the agent of a node reports that the peer has answered its probes.
func waitAnswers(t *testing.T, n *lab.Node) {
	t.Helper()
	eventually(t, "an answer through the overlay to "+n.Name, func() error {
		text, err := n.Get(t.Context(), "http://127.0.0.1:5875/status")
		var s routeagent.Status
		if err == nil {
			err = json.Unmarshal([]byte(text), &s)
		}
		if err == nil && (s.Overlay == nil || s.Overlay.Back.Answered.IsZero()) {
			err = fmt.Errorf("overlay %+v", s.Overlay)
		}
		return err
	})
}

// farNode returns the node that selectFarNode has selected last.
func (s *troubleSite) farNode() *lab.Node { return s.a.Nodes[s.node] }

// talk makes a pod send echo requests, whether they are answered or not. stopActivity ends them.
func (s *troubleSite) talk(t *testing.T, from *lab.Pod, to netip.Addr) {
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	s.stopActivity = func() { stop(); <-done }
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			_, _ = from.PingWith(ctx, to, lab.PingOptions{Wait: time.Second})
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}()
}

// slow makes an API server stall most of the time. stopActivity ends that.
func (s *troubleSite) slow(t *testing.T, c *fleet.Cluster) {
	stop, done := make(chan struct{}), make(chan struct{})
	s.stopActivity = func() { close(stop); <-done }
	go func() {
		defer close(done)
		for {
			for _, step := range []struct {
				do   func() error
				wait time.Duration
			}{{c.Server.Freeze, 800 * time.Millisecond}, {c.Server.Thaw, 200 * time.Millisecond}} {
				if err := step.do(); err != nil {
					t.Error(err)
					return
				}
				select {
				case <-stop:
					if err := c.Server.Thaw(); err != nil {
						t.Error(err)
					}
					return
				case <-time.After(step.wait):
				}
			}
		}
	}()
}

// dropLarge makes the underlay drop large packets silently. If from is nil, this affects packets of
// all gateways, otherwise packets of that node.
func dropLarge(t *testing.T, s *troubleSite, from *lab.Node, size int) {
	t.Helper()
	of := ""
	if from != nil {
		of = "ip saddr " + from.Addr.String() + " "
	}
	filter(t, s.Lab.Underlay, fmt.Sprintf("add chain ip fault on { type filter hook forward priority 0; }; add rule ip fault on %sip length > %d udp dport 5871 drop", of, size))
}

// restartBroken restarts a component behind a shell command that breaks it; see SetPrelude.
func restartBroken(t *testing.T, c *fleet.Cluster, name, how string) {
	t.Helper()
	must(t, c.Kill(name))
	c.SetPrelude(name, how)
	must(t, c.Launch(name))
}

// restartIntact restarts a component without such a command.
func restartIntact(t *testing.T, c *fleet.Cluster, name string) {
	t.Helper()
	must(t, c.Kill(name))
	c.SetPrelude(name, "")
	must(t, c.Start(t.Context(), name))
}

// fullDisk returns a command that replaces a component's state directory by a full file system.
func fullDisk(c *fleet.Cluster, name string) string {
	dir := c.StateDirectory(name)
	return fmt.Sprintf("mount -t tmpfs -o size=4096 none %s; dd if=/dev/zero of=%s/full bs=4096 count=1 2>/dev/null", dir, dir)
}

// addresses sets the InternalIP that a kubelet reports for a node.
func addresses(t *testing.T, c *fleet.Cluster, n *lab.Node, addr string) {
	t.Helper()
	eventually(t, "another address of a Node", func() error {
		var node corev1.Node
		if err := c.Client.Get(t.Context(), client.ObjectKey{Name: n.Name}, &node); err != nil {
			return err
		}
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr}}
		return c.Client.Status().Update(t.Context(), &node)
	})
}

// otherAddress returns an unused address in the node's own network.
func otherAddress(n *lab.Node) netip.Addr {
	b := n.Addr.As4()
	b[3] += 100
	return netip.AddrFrom4(b)
}

// A trouble is a fault of a whole cluster, with the expected output of `isthmus diagnose` in
// cluster a.
type trouble struct {
	fault string // name in docs/troubleshooting.md
	// alone is the only broken hop that diagnose finds with access to cluster a only, as
	// CLUSTER/HOP or CLUSTER/HOP REASON. both is the hop that it finds with access to both sides.
	// An empty value means that no hop is broken.
	alone, both string
	says        string // text of the broken hop, in addition to its reason
	unasked     bool   // a's API server does not respond
	deaf        bool   // b's API server does not respond
	ready       bool   // packets pass, so the peering stays READY
	short       bool   // tested even without -long
	fresh       bool   // restart the gateways first, because they cache a small path MTU and would not report it again for ten minutes
	breaks      func(t *testing.T, s *troubleSite)
	heals       func(t *testing.T, s *troubleSite)
}

// removeObject removes an object and saves it for giveBack.
func (s *troubleSite) removeObject(t *testing.T, c *fleet.Cluster, o client.Object) {
	t.Helper()
	must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o))
	s.saved = o.DeepCopyObject().(client.Object)
	must(t, c.Client.Delete(t.Context(), o))
}

func (s *troubleSite) giveBack(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	o := s.saved
	o.SetResourceVersion("")
	o.SetUID("")
	must(t, c.Client.Create(t.Context(), o))
}

// change changes an object. It retries after conflicts.
func change[O client.Object](t *testing.T, c *fleet.Cluster, o O, how func(O)) {
	t.Helper()
	eventually(t, "a change of "+o.GetName(), func() error {
		if err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			return err
		}
		how(o)
		return c.Client.Update(t.Context(), o)
	})
}

// tenant returns the tenant namespace in a cluster for its peering with another cluster.
func tenant(t *testing.T, at, with *fleet.Cluster) string {
	t.Helper()
	p, err := at.Peering(t.Context(), with)
	must(t, err)
	return p.Spec.TenantNamespace.Local
}

func killAll(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	for i := range c.Nodes {
		must(t, c.Kill(fleet.Gateway(i)))
	}
}

func startAll(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	for i := range c.Nodes {
		if !c.Running(fleet.Gateway(i)) {
			must(t, c.Start(t.Context(), fleet.Gateway(i)))
		}
	}
}

// hinderAll restarts all gateways of a cluster with a shell command that breaks them. It does not
// wait until they are ready, because a broken gateway may exit, and then a kubelet would restart
// it.
func hinderAll(t *testing.T, c *fleet.Cluster, how string) {
	t.Helper()
	killAll(t, c)
	for i := range c.Nodes {
		c.SetPrelude(fleet.Gateway(i), how)
		must(t, c.Launch(fleet.Gateway(i)))
	}
}

func unhinderAll(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	killAll(t, c)
	for i := range c.Nodes {
		c.SetPrelude(fleet.Gateway(i), "")
	}
	startAll(t, c)
}

// inPeersNetwork returns an address of b's pods as a sees it, with prefix length 24.
func inPeersNetwork(t *testing.T, a, b *fleet.Cluster) *netlink.Addr {
	t.Helper()
	addr := seen(t, a, b, b.Pods[0].Addr)
	parsed, err := netlink.ParseAddr(addr.String() + "/24")
	must(t, err)
	return parsed
}

// peersNetwork returns the network of the address that inPeersNetwork returns.
func peersNetwork(t *testing.T, s *troubleSite) netip.Prefix {
	t.Helper()
	return netip.PrefixFrom(seen(t, s.a, s.b, s.b.Pods[0].Addr), 24).Masked()
}

func onLoopback(t *testing.T, n *lab.Node, do func(link netlink.Link) error) {
	t.Helper()
	must(t, n.Do(func() error {
		link, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return do(link)
	}))
}

// ipCommand runs ip(8) on a host.
func ipCommand(t *testing.T, h *lab.Host, args ...string) {
	t.Helper()
	if out, err := h.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v on %s: %v\n%s", args, h, err, out)
	}
}

// setting writes a file below /proc/sys on a host.
func setting(t *testing.T, h *lab.Host, path, value string) {
	t.Helper()
	must(t, h.Do(func() error { return os.WriteFile("/proc/sys/"+path, []byte(value), 0) }))
}

func identitySecret(t *testing.T, s *troubleSite) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: tenant(t, s.a, s.b), Name: isthmusv1.DefaultIdentitySecret}}
}

func object(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}

// setDates changes the dates in the identity's token: it was issued some time ago, and is valid for
// some further time.
func setDates(t *testing.T, s *troubleSite, o *corev1.Secret, issued, left time.Duration) {
	t.Helper()
	config, err := clientcmd.Load(o.Data[isthmusv1.SecretKubeconfig])
	must(t, err)
	for _, user := range config.AuthInfos {
		user.Token, err = s.b.Server.DatedToken(user.Token, time.Now().Add(-issued).Unix(), time.Now().Add(left).Unix())
		must(t, err)
	}
	o.Data[isthmusv1.SecretKubeconfig], err = clientcmd.Write(*config)
	must(t, err)
}

// peerAgain runs `isthmus peer` again, which repairs some faults.
func peerAgain(t *testing.T, s *troubleSite) {
	isthmus(t, s.Fleet, "peer", "--context", s.a.Name, "--remote-context", s.b.Name)
}

func gatewayService() *corev1.Service {
	return &corev1.Service{ObjectMeta: object(fleet.Namespace, "isthmus-gateway")}
}

// gatewayNode returns the node of the active gateway.
func gatewayNode(t *testing.T, c *fleet.Cluster) *lab.Node { return c.Nodes[active(t, c)] }

var troubles = []trouble{
	{
		fault: "the Secret with the identity at the peer is gone", alone: "a/identity SecretMissing", both: "a/identity SecretMissing", short: true,
		breaks: func(t *testing.T, s *troubleSite) { s.removeObject(t, s.a, identitySecret(t, s)) },
		heals:  func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "the Secret with the identity has invalid content", alone: "a/identity SecretInvalid", both: "a/identity SecretInvalid",
		breaks: func(t *testing.T, s *troubleSite) {
			change(t, s.a, identitySecret(t, s), func(o *corev1.Secret) {
				s.saved = o.DeepCopy()
				o.Data = map[string][]byte{isthmusv1.SecretKubeconfig: []byte("clusters: nonsense")}
			})
		},
		heals: func(t *testing.T, s *troubleSite) {
			change(t, s.a, identitySecret(t, s), func(o *corev1.Secret) { o.Data = s.saved.(*corev1.Secret).Data })
		},
	},
	{
		fault: "the identity leads to an address without an API server", alone: "a/identity Unreachable", both: "a/identity Unreachable", ready: true,
		breaks: func(t *testing.T, s *troubleSite) {
			change(t, s.a, identitySecret(t, s), func(o *corev1.Secret) {
				s.saved = o.DeepCopy()
				text := string(o.Data[isthmusv1.SecretKubeconfig])
				host := strings.TrimPrefix(s.b.Server.URL(), "https://")
				o.Data[isthmusv1.SecretKubeconfig] = []byte(strings.ReplaceAll(text, host, strings.Split(host, ":")[0]+":1"))
			})
		},
		heals: func(t *testing.T, s *troubleSite) {
			change(t, s.a, identitySecret(t, s), func(o *corev1.Secret) { o.Data = s.saved.(*corev1.Secret).Data })
		},
	},
	{
		fault: "the identity's token has expired", alone: "a/identity Unauthorized", both: "a/identity Unauthorized", says: "the token expired",
		breaks: func(t *testing.T, s *troubleSite) {
			change(t, s.a, identitySecret(t, s), func(o *corev1.Secret) {
				s.saved = o.DeepCopy()
				setDates(t, s, o, 2*time.Hour, -time.Hour)
			})
		},
		heals: func(t *testing.T, s *troubleSite) {
			change(t, s.a, identitySecret(t, s), func(o *corev1.Secret) { o.Data = s.saved.(*corev1.Secret).Data })
		},
	},
	{
		fault: "the Secret with the identity is immutable, and its token is about to expire", says: "is not renewed",
		breaks: func(t *testing.T, s *troubleSite) {
			change(t, s.a, identitySecret(t, s), func(o *corev1.Secret) {
				setDates(t, s, o, 50*time.Minute, 10*time.Minute)
				o.Immutable = new(true)
			})
		},
		heals: func(t *testing.T, s *troubleSite) {
			s.removeObject(t, s.a, identitySecret(t, s))
			s.saved.(*corev1.Secret).Immutable = nil
			s.giveBack(t, s.a)
		},
	},
	{
		fault: "the clock of a node is a quarter of an hour behind", says: "that of Node a-node2 is 1", // 15m0s or 14m59s, because the API server records whole seconds
		breaks: func(t *testing.T, s *troubleSite) { // the kubelet's renewals of the Node's Lease show its clock
			lease := &coordinationv1.Lease{ObjectMeta: object(corev1.NamespaceNodeLease, s.a.Nodes[1].Name),
				Spec: coordinationv1.LeaseSpec{HolderIdentity: &s.a.Nodes[1].Name, RenewTime: &metav1.MicroTime{Time: time.Now().Add(-15 * time.Minute)}}}
			must(t, s.a.Client.Create(t.Context(), lease))
		},
		heals: func(t *testing.T, s *troubleSite) {
			must(t, s.a.Client.Delete(t.Context(), &coordinationv1.Lease{ObjectMeta: object(corev1.NamespaceNodeLease, s.a.Nodes[1].Name)}))
		},
	},
	{
		fault: "the podCIDR of a Node without a route agent is a network of the peer", alone: "a/peering Overlap", both: "a/peering Overlap", says: "a-stray",
		breaks: func(t *testing.T, s *troubleSite) {
			pods := peersNetwork(t, s).String()
			stray := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a-stray", Labels: map[string]string{"type": "virtual-kubelet"}},
				Spec: corev1.NodeSpec{PodCIDR: pods, PodCIDRs: []string{pods}},
				Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: otherAddress(s.a.Nodes[1]).String()}},
					Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
			must(t, s.a.Client.Create(t.Context(), stray))
		},
		heals: func(t *testing.T, s *troubleSite) {
			must(t, s.a.Client.Delete(t.Context(), &corev1.Node{ObjectMeta: object("", "a-stray")}))
		},
	},
	{
		fault: "a route agent's Pod lacks CAP_NET_ADMIN", alone: "a/route agents", both: "a/route agents", says: "CAP_NET_ADMIN",
		breaks: func(t *testing.T, s *troubleSite) {
			s.selectFarNode(t)
			restartBroken(t, s.a, fleet.Agent(s.node), `set -- setpriv --bounding-set=-net_admin "$@"`)
		},
		heals: func(t *testing.T, s *troubleSite) { restartIntact(t, s.a, fleet.Agent(s.node)) },
	},
	{
		fault: "the peer revoked this cluster's rights", alone: "a/publishing Forbidden", both: "a/publishing Forbidden",
		breaks: func(t *testing.T, s *troubleSite) {
			must(t, s.b.Client.Delete(t.Context(), &rbacv1.RoleBinding{ObjectMeta: object(tenant(t, s.b, s.a), "isthmus-peer")}))
		},
		heals: peerAgain,
	},
	{
		fault: "the peer deleted the ServiceAccount of this cluster's identity", alone: "a/identity Unauthorized", both: "a/identity Unauthorized",
		breaks: func(t *testing.T, s *troubleSite) {
			var list corev1.ServiceAccountList
			must(t, s.b.Client.List(t.Context(), &list, client.InNamespace(tenant(t, s.b, s.a))))
			for i := range list.Items {
				if o := &list.Items[i]; o.Name != "default" {
					must(t, s.b.Client.Delete(t.Context(), o))
				}
			}
		},
		heals: peerAgain,
	},
	{
		fault: "a quota at the peer admits no NetworkConfig", alone: "a/publishing Forbidden", both: "a/publishing Forbidden", says: "quota",
		breaks: func(t *testing.T, s *troubleSite) {
			namespace := tenant(t, s.b, s.a)
			quota := &corev1.ResourceQuota{ObjectMeta: object(namespace, "none"),
				Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/networkconfigs.net.liqo.io": resource.MustParse("0")}}}
			must(t, s.b.Client.Create(t.Context(), quota))
			eventually(t, "a quota that is counted", func() error {
				must(t, s.b.Client.Get(t.Context(), client.ObjectKeyFromObject(quota), quota))
				if len(quota.Status.Hard) == 0 {
					return fmt.Errorf("nobody has counted")
				}
				return nil
			})
			var list v1alpha1.NetworkConfigList
			must(t, s.b.Client.List(t.Context(), &list, client.InNamespace(namespace)))
			for i := range list.Items {
				if o := &list.Items[i]; o.Spec.RemoteCluster.ClusterID == s.b.ID {
					must(t, s.b.Client.Delete(t.Context(), o))
				}
			}
		},
		heals: func(t *testing.T, s *troubleSite) {
			must(t, s.b.Client.Delete(t.Context(), &corev1.ResourceQuota{ObjectMeta: object(tenant(t, s.b, s.a), "none")}))
		},
	},
	{
		fault: "the peer's API server does not answer", alone: "a/identity Unreachable", deaf: true, ready: true, short: true,
		breaks: func(t *testing.T, s *troubleSite) { must(t, s.b.Server.Freeze()) },
		heals:  func(t *testing.T, s *troubleSite) { must(t, s.b.Server.Thaw()) },
	},
	{
		fault: "this cluster's own API server does not answer", unasked: true,
		breaks: func(t *testing.T, s *troubleSite) { must(t, s.a.Server.Freeze()) },
		heals:  func(t *testing.T, s *troubleSite) { must(t, s.a.Server.Thaw()) },
	},
	{
		fault: "the manager of this cluster does not run", alone: "a/manager", both: "a/manager",
		breaks: func(t *testing.T, s *troubleSite) { must(t, s.a.Kill(fleet.Manager)) },
		heals:  func(t *testing.T, s *troubleSite) { must(t, s.a.Start(t.Context(), fleet.Manager)) },
	},
	{
		fault: "the manager of the peer does not run", both: "b/manager",
		breaks: func(t *testing.T, s *troubleSite) { must(t, s.b.Kill(fleet.Manager)) },
		heals:  func(t *testing.T, s *troubleSite) { must(t, s.b.Start(t.Context(), fleet.Manager)) },
	},
	{
		fault: "the manager has lost its rights", alone: "a/rights RightsMissing", both: "a/rights RightsMissing", says: "isthmus-manager is not allowed to",
		breaks: func(t *testing.T, s *troubleSite) {
			s.removeObject(t, s.a, &rbacv1.ClusterRoleBinding{ObjectMeta: object("", "isthmus-manager")})
		},
		heals: func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "the gateway has lost its rights", alone: "a/rights RightsMissing", both: "a/rights RightsMissing", says: "isthmus-gateway is not allowed to",
		breaks: func(t *testing.T, s *troubleSite) {
			s.removeObject(t, s.a, &rbacv1.RoleBinding{ObjectMeta: object(fleet.Namespace, "isthmus-gateway")})
		},
		heals: func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "the route agents have lost their rights", alone: "a/rights RightsMissing", both: "a/rights RightsMissing", says: "isthmus-route-agent is not allowed to",
		breaks: func(t *testing.T, s *troubleSite) {
			s.removeObject(t, s.a, &rbacv1.ClusterRoleBinding{ObjectMeta: object("", "isthmus-route-agent")})
		},
		heals: func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "no gateway of this cluster runs", alone: "a/gateway GatewaySilent", both: "a/gateway GatewaySilent", short: true,
		breaks: func(t *testing.T, s *troubleSite) { killAll(t, s.a) },
		heals:  func(t *testing.T, s *troubleSite) { startAll(t, s.a) },
	},
	{
		fault: "the gateways' Deployment was scaled to 0", alone: "a/gateway GatewaySilent", both: "a/gateway GatewaySilent", says: "its Deployment has 0 replicas",
		breaks: func(t *testing.T, s *troubleSite) {
			wantGateways(t, s.a, 0)
			for i := range s.a.Nodes {
				must(t, s.a.DeleteGateway(t.Context(), i))
			}
		},
		heals: func(t *testing.T, s *troubleSite) {
			wantGateways(t, s.a, -1)
			for i := range s.a.Nodes {
				must(t, s.a.AddGateway(t.Context(), i))
			}
		},
	},
	{
		fault: "the standby's Pod is Pending", says: "Unschedulable: 0/2 nodes are available",
		breaks: func(t *testing.T, s *troubleSite) {
			noStandby(t, s, func(p *corev1.PodStatus) {
				p.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/2 nodes are available: 1 node(s) were unschedulable"}}
			})
		},
		heals: standbyAgain,
	},
	{
		fault: "the standby's image cannot be pulled", says: "ErrImagePull: not found",
		breaks: func(t *testing.T, s *troubleSite) {
			noStandby(t, s, func(p *corev1.PodStatus) {
				p.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "not found"}}}}
			})
		},
		heals: standbyAgain,
	},
	{
		fault: "no gateway of the peer runs", alone: "a/tunnel PeerSilent", both: "b/gateway GatewaySilent", short: true,
		breaks: func(t *testing.T, s *troubleSite) { killAll(t, s.b) },
		heals:  func(t *testing.T, s *troubleSite) { startAll(t, s.b) },
	},
	{
		fault: "no gateway runs, and the clock of the last one was an hour ahead", alone: "a/gateway GatewaySilent", both: "a/gateway GatewaySilent",
		breaks: func(t *testing.T, s *troubleSite) {
			killAll(t, s.a)
			change(t, s.a, &coordinationv1.Lease{ObjectMeta: object(fleet.Namespace, isthmusv1.LeaseGateway)}, func(l *coordinationv1.Lease) {
				l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now().Add(time.Hour)}
			})
		},
		heals: func(t *testing.T, s *troubleSite) { startAll(t, s.a) },
	},
	{
		fault: "no gateway runs, and their Lease is gone", alone: "a/gateway", both: "a/gateway", says: "not found",
		breaks: func(t *testing.T, s *troubleSite) {
			killAll(t, s.a)
			must(t, s.a.Client.Delete(t.Context(), &coordinationv1.Lease{ObjectMeta: object(fleet.Namespace, isthmusv1.LeaseGateway)}))
		},
		heals: func(t *testing.T, s *troubleSite) { startAll(t, s.a) },
	},
	{
		fault: "the nodes have no /dev/net/tun", alone: "a/gateway GatewaySilent", both: "a/gateway GatewaySilent", says: "/dev/net/tun",
		breaks: func(t *testing.T, s *troubleSite) { hinderAll(t, s.a, "mount -t tmpfs none /dev/net") },
		heals:  func(t *testing.T, s *troubleSite) { unhinderAll(t, s.a) },
	},
	{
		fault: "the gateways' Pods lack CAP_NET_ADMIN", alone: "a/gateway GatewaySilent", both: "a/gateway GatewaySilent", says: "NET_ADMIN",
		breaks: func(t *testing.T, s *troubleSite) {
			hinderAll(t, s.a, `set -- setpriv --bounding-set=-net_admin "$@"`)
		},
		heals: func(t *testing.T, s *troubleSite) { unhinderAll(t, s.a) },
	},
	{
		fault: "two Pods are marked as the active gateway", alone: "a/gateway SeveralActive", both: "a/gateway SeveralActive",
		breaks: func(t *testing.T, s *troubleSite) {
			must(t, s.a.Client.Create(t.Context(), &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: "impostor", Labels: map[string]string{v1alpha1.LabelGateway: v1alpha1.GatewayActive}},
				Spec:       corev1.PodSpec{AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{{Name: "main", Image: "isthmus"}}},
			}))
		},
		heals: func(t *testing.T, s *troubleSite) {
			must(t, s.a.Client.Delete(t.Context(), &corev1.Pod{ObjectMeta: object(fleet.Namespace, "impostor")}, client.GracePeriodSeconds(0)))
		},
	},
	{
		fault: "the gateway's Service is gone", alone: "a/gateway ServiceMissing", both: "a/gateway ServiceMissing",
		breaks: func(t *testing.T, s *troubleSite) { s.removeObject(t, s.a, gatewayService()) },
		heals:  func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "a route agent does not run", alone: "a/route agents", both: "a/route agents", short: true,
		breaks: func(t *testing.T, s *troubleSite) { must(t, s.a.Kill(fleet.Agent(1))) },
		heals:  func(t *testing.T, s *troubleSite) { must(t, s.a.Start(t.Context(), fleet.Agent(1))) },
	},
	{
		fault: "forwarding is off on a node", alone: "a/route agents", both: "a/route agents", says: "net.ipv4.ip_forward is 0", short: true,
		breaks: func(t *testing.T, s *troubleSite) { setting(t, s.a.Nodes[1].Host, "net/ipv4/ip_forward", "0") },
		heals:  func(t *testing.T, s *troubleSite) { setting(t, s.a.Nodes[1].Host, "net/ipv4/ip_forward", "1") },
	},
	{
		fault: "another program's VXLAN uses the overlay's port on a node", alone: "a/route agents", both: "a/route agents", says: own.OverlayDevice,
		breaks: func(t *testing.T, s *troubleSite) {
			n := s.a.Nodes[1].Host
			must(t, s.a.Kill(fleet.Agent(1)))
			ipCommand(t, n, "link", "del", own.OverlayDevice)
			ipCommand(t, n, "link", "add", "foreign", "type", "vxlan", "external", "dstport", fmt.Sprint(own.OverlayPort))
			ipCommand(t, n, "link", "set", "foreign", "up")
			must(t, s.a.Launch(fleet.Agent(1)))
		},
		heals: func(t *testing.T, s *troubleSite) { ipCommand(t, s.a.Nodes[1].Host, "link", "del", "foreign") },
	},
	{
		fault: "a node is not ready", says: "peers may not reach their pods",
		breaks: func(t *testing.T, s *troubleSite) { nodeReady(t, s.a, corev1.ConditionFalse) },
		heals:  func(t *testing.T, s *troubleSite) { nodeReady(t, s.a, corev1.ConditionTrue) },
	},
	{
		fault: "a node got an address in a network of the peer", alone: "a/peering Overlap", both: "a/peering Overlap", short: true,
		breaks: func(t *testing.T, s *troubleSite) {
			addr := inPeersNetwork(t, s.a, s.b)
			onLoopback(t, s.a.Nodes[1], func(l netlink.Link) error { return netlink.AddrAdd(l, addr) })
		},
		heals: func(t *testing.T, s *troubleSite) {
			addr := inPeersNetwork(t, s.a, s.b)
			onLoopback(t, s.a.Nodes[1], func(l netlink.Link) error { return netlink.AddrDel(l, addr) })
		},
	},
	{
		fault: "another Peering is for the same cluster", alone: "a/peering Conflict", both: "a/peering Conflict",
		breaks: func(t *testing.T, s *troubleSite) {
			p, err := s.a.Peering(t.Context(), s.b)
			must(t, err)
			must(t, s.a.Client.Create(t.Context(), &isthmusv1.Peering{ObjectMeta: metav1.ObjectMeta{Name: "twin"}, Spec: p.Spec}))
		},
		heals: func(t *testing.T, s *troubleSite) {
			must(t, s.a.Client.Delete(t.Context(), &isthmusv1.Peering{ObjectMeta: metav1.ObjectMeta{Name: "twin"}}))
		},
	},
	{
		fault: "the packet filter of the gateway's node refuses to send to the peer", alone: "a/tunnel SendError", both: "a/tunnel SendError",
		breaks: func(t *testing.T, s *troubleSite) {
			filter(t, gatewayNode(t, s.a).Host, "add chain ip fault out { type filter hook output priority 0; }; add rule ip fault out udp dport 5871 drop")
		},
		heals: func(t *testing.T, s *troubleSite) { filter(t, gatewayNode(t, s.a).Host, "") },
	},
	{
		fault: "the gateway's node has no route to the peer", alone: "a/tunnel SendError", both: "a/tunnel SendError", says: "route",
		breaks: func(t *testing.T, s *troubleSite) {
			ipCommand(t, gatewayNode(t, s.a).Host, "route", "add", "unreachable", gatewayNode(t, s.b).Addr.String())
		},
		heals: func(t *testing.T, s *troubleSite) {
			ipCommand(t, gatewayNode(t, s.a).Host, "route", "del", "unreachable", gatewayNode(t, s.b).Addr.String())
		},
	},
	{
		fault: "a firewall in front of the peer drops UDP from here", alone: "a/tunnel AnswersLost", both: "a/tunnel AnswersLost",
		breaks: func(t *testing.T, s *troubleSite) {
			filter(t, gatewayNode(t, s.b).Host, "add chain ip fault in { type filter hook input priority 0; }; add rule ip fault in udp dport 5871 drop")
		},
		heals: func(t *testing.T, s *troubleSite) { filter(t, gatewayNode(t, s.b).Host, "") },
	},
	{
		fault: "UDP is dropped on the way, in both directions", alone: "a/tunnel PeerSilent", both: "a/tunnel PeerSilent",
		breaks: func(t *testing.T, s *troubleSite) {
			filter(t, s.Lab.Underlay, "add chain ip fault on { type filter hook forward priority 0; }; add rule ip fault on udp dport 5871 drop")
		},
		heals: func(t *testing.T, s *troubleSite) { filter(t, s.Lab.Underlay, "") },
	},
	{
		fault: "the peer publishes a name that does not resolve, but can connect to our gateway",
		breaks: func(t *testing.T, s *troubleSite) {
			change(t, s.b, gatewayService(), func(o *corev1.Service) {
				o.Annotations[v1alpha1.AnnotationOverrideAddress] = "gw.nowhere.invalid"
			})
		},
		heals: func(t *testing.T, s *troubleSite) {
			change(t, s.b, gatewayService(), func(o *corev1.Service) { delete(o.Annotations, v1alpha1.AnnotationOverrideAddress) })
		},
	},
	{
		fault: "the peer deleted its Peering", alone: "a/answer NotPeered", both: "b/peering",
		breaks: func(t *testing.T, s *troubleSite) {
			p, err := s.b.Peering(t.Context(), s.a)
			must(t, err)
			must(t, s.b.Client.Delete(t.Context(), p))
		},
		heals: peerAgain,
	},
	{
		fault: "the tenant namespace of the peering was deleted", alone: "a/peering LocalSetup", both: "a/peering LocalSetup", says: "tenant namespace",
		breaks: func(t *testing.T, s *troubleSite) {
			s.saved = &corev1.Namespace{ObjectMeta: object("", tenant(t, s.a, s.b))}
			must(t, s.a.Client.Delete(t.Context(), s.saved))
		},
		heals: func(t *testing.T, s *troubleSite) { waitDeleted(t, s.a, s.saved); peerAgain(t, s) },
	},
	{
		fault: "the peer's tenant namespace was deleted", alone: "a/identity Unauthorized", both: "b/peering LocalSetup",
		breaks: func(t *testing.T, s *troubleSite) {
			s.saved = &corev1.Namespace{ObjectMeta: object("", tenant(t, s.b, s.a))}
			must(t, s.b.Client.Delete(t.Context(), s.saved))
		},
		heals: func(t *testing.T, s *troubleSite) { waitDeleted(t, s.b, s.saved); peerAgain(t, s) },
	},
	{
		fault: "the route agents are of another version", says: "have different versions",
		breaks: func(t *testing.T, s *troubleSite) { image(t, s.a, "isthmus:before") },
		heals:  func(t *testing.T, s *troubleSite) { image(t, s.a, "isthmus") },
	},
	{
		fault:  "the reverse path filter of a node's underlay is strict",
		breaks: func(t *testing.T, s *troubleSite) { setting(t, s.a.Nodes[1].Host, "net/ipv4/conf/eth0/rp_filter", "1") },
		heals:  func(t *testing.T, s *troubleSite) { setting(t, s.a.Nodes[1].Host, "net/ipv4/conf/eth0/rp_filter", "0") },
	},
	{
		fault: "the Secret with the gateway's key was deleted",
		breaks: func(t *testing.T, s *troubleSite) {
			must(t, s.a.Client.Delete(t.Context(), &corev1.Secret{ObjectMeta: object(fleet.Namespace, "wireguard-pubkey")}))
		},
		heals: func(*testing.T, *troubleSite) {},
	},
	{
		fault: "the NatMappings were deleted",
		breaks: func(t *testing.T, s *troubleSite) {
			must(t, s.a.Client.DeleteAllOf(t.Context(), &v1alpha1.NatMapping{}))
		},
		heals: func(*testing.T, *troubleSite) {},
	},
	{
		fault: "the overlay's device was deleted on a node",
		breaks: func(t *testing.T, s *troubleSite) {
			ipCommand(t, s.a.Nodes[1].Host, "link", "del", own.OverlayDevice)
		},
		heals: func(*testing.T, *troubleSite) {},
	},
	{
		fault: "a path drops large packets from here to the peer, without an ICMP error", says: "drops larger packets",
		breaks: func(t *testing.T, s *troubleSite) { dropLarge(t, s, gatewayNode(t, s.a), 1300) },
		heals:  func(t *testing.T, s *troubleSite) { filter(t, s.Lab.Underlay, "") },
	},
	{
		fault: "a path drops large packets in both directions, without an ICMP error", says: "drops larger packets", fresh: true,
		breaks: func(t *testing.T, s *troubleSite) { dropLarge(t, s, nil, 1300) },
		heals:  func(t *testing.T, s *troubleSite) { filter(t, s.Lab.Underlay, "") },
	},
	{
		fault: "a path drops even packets of the minimum size", alone: "a/tunnel PathMTU", both: "a/tunnel PathMTU", fresh: true,
		breaks: func(t *testing.T, s *troubleSite) { dropLarge(t, s, gatewayNode(t, s.a), 600) },
		heals:  func(t *testing.T, s *troubleSite) { filter(t, s.Lab.Underlay, "") },
	},
	{
		fault: "a packet filter on a node drops all forwarded packets",
		breaks: func(t *testing.T, s *troubleSite) {
			filter(t, s.selectFarNode(t).Host, "add chain ip fault on { type filter hook forward priority 0; policy drop; }")
		},
		heals: func(t *testing.T, s *troubleSite) { filter(t, s.farNode().Host, "") },
	},
	{
		fault: "the policy of a node's chain FORWARD is DROP",
		breaks: func(t *testing.T, s *troubleSite) {
			nft(t, s.selectFarNode(t).Host, "add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }")
		},
		heals: func(t *testing.T, s *troubleSite) { nft(t, s.farNode().Host, "delete table ip filter") },
	},
	{
		fault: "a CNI masquerades pods at the usual hook priority, srcnat",
		breaks: func(t *testing.T, s *troubleSite) {
			filter(t, s.selectFarNode(t).Host, "add chain ip fault on { type nat hook postrouting priority 100; }; add rule ip fault on masquerade")
		},
		heals: func(t *testing.T, s *troubleSite) { filter(t, s.farNode().Host, "") },
	},
	{
		fault: "another program masquerades pods at an earlier hook priority than Isthmus's exemption", says: "PodsMasqueraded",
		breaks: func(t *testing.T, s *troubleSite) {
			filter(t, s.selectFarNode(t).Host, "add chain ip fault on { type nat hook postrouting priority -20; }; add rule ip fault on oifname != isthmus.vxlan masquerade")
		},
		heals: func(t *testing.T, s *troubleSite) { filter(t, s.farNode().Host, "") },
	},
	{
		fault:  "somebody flushed the packet filter of a node",
		breaks: func(t *testing.T, s *troubleSite) { nft(t, s.selectFarNode(t).Host, "flush ruleset") },
		heals:  func(*testing.T, *troubleSite) {},
	},
	{
		fault: "somebody deleted the policy rules of a node",
		breaks: func(t *testing.T, s *troubleSite) {
			ipCommand(t, s.selectFarNode(t).Host, "rule", "flush", "protocol", "71")
		},
		heals: func(*testing.T, *troubleSite) {},
	},
	{
		fault: "a firewall on a node drops the overlay's UDP port towards the gateway", alone: "a/route agents", both: "a/route agents", says: "allow UDP 4800",
		breaks: func(t *testing.T, s *troubleSite) {
			filter(t, s.selectFarNode(t).Host, "add chain ip fault on { type filter hook output priority 0; }; add rule ip fault on udp dport 4800 drop")
		},
		heals: func(t *testing.T, s *troubleSite) { filter(t, s.farNode().Host, "") },
	},
	{
		fault: "a firewall on a node drops the overlay's UDP port from the gateway", alone: "a/route agents", both: "a/route agents", says: "allow UDP 4800",
		breaks: func(t *testing.T, s *troubleSite) {
			n := s.selectFarNode(t)
			waitAnswers(t, n)
			s.talk(t, podOn(t, s.a, s.node), seen(t, s.a, s.b, s.b.Pods[0].Addr)) // without traffic the fault has no effect
			filter(t, n.Host, "add chain ip fault on { type filter hook input priority 0; }; add rule ip fault on udp dport 4800 drop")
		},
		heals: func(t *testing.T, s *troubleSite) { filter(t, s.farNode().Host, ""); s.stopActivity() },
	},
	{
		fault: "a node got a route into a network of the peer", alone: "a/peering Overlap", both: "a/peering Overlap",
		breaks: func(t *testing.T, s *troubleSite) {
			ipCommand(t, s.selectFarNode(t).Host, "route", "add", "blackhole", peersNetwork(t, s).String())
		},
		heals: func(t *testing.T, s *troubleSite) {
			ipCommand(t, s.farNode().Host, "route", "del", "blackhole", peersNetwork(t, s).String())
		},
	},
	{
		fault: "a Node object has an address that its machine does not have", alone: "a/route agents", both: "a/route agents",
		breaks: func(t *testing.T, s *troubleSite) {
			n := s.selectFarNode(t)
			addresses(t, s.a, n, otherAddress(n).String())
		},
		heals: func(t *testing.T, s *troubleSite) { addresses(t, s.a, s.farNode(), s.farNode().Addr.String()) },
	},
	{
		fault: "a node's address changed",
		breaks: func(t *testing.T, s *troubleSite) {
			n := s.selectFarNode(t)
			ipCommand(t, n.Host, "addr", "add", otherAddress(n).String()+"/24", "dev", "eth0")
			addresses(t, s.a, n, otherAddress(n).String())
		},
		heals: func(t *testing.T, s *troubleSite) {
			addresses(t, s.a, s.farNode(), s.farNode().Addr.String())
			ipCommand(t, s.farNode().Host, "addr", "del", otherAddress(s.farNode()).String()+"/24", "dev", "eth0")
		},
	},
	{
		fault: "the MTU of a node's link was lowered to 1280",
		breaks: func(t *testing.T, s *troubleSite) {
			ipCommand(t, s.selectFarNode(t).Host, "link", "set", "eth0", "mtu", "1280")
		},
		heals: func(t *testing.T, s *troubleSite) {
			ipCommand(t, s.farNode().Host, "link", "set", "eth0", "mtu", "1500")
		},
	},
	{
		fault: "the active gateway is frozen (SIGSTOP), and another takes over",
		breaks: func(t *testing.T, s *troubleSite) {
			s.node = active(t, s.a)
			must(t, s.a.Pause(fleet.Gateway(s.node)))
			eventually(t, "another gateway", func() error {
				if at, err := s.a.ActiveGateway(t.Context()); err != nil || at == s.node {
					return fmt.Errorf("%d is, %w", at, err)
				}
				return nil
			})
		},
		heals: func(t *testing.T, s *troubleSite) { must(t, s.a.Resume(fleet.Gateway(s.node))) },
	},
	{
		fault: "all gateways are frozen (SIGSTOP)", alone: "a/gateway GatewaySilent", both: "a/gateway GatewaySilent",
		breaks: func(t *testing.T, s *troubleSite) {
			for i := range s.a.Nodes {
				must(t, s.a.Pause(fleet.Gateway(i)))
			}
		},
		heals: func(t *testing.T, s *troubleSite) {
			for i := range s.a.Nodes {
				must(t, s.a.Resume(fleet.Gateway(i)))
			}
		},
	},
	{
		fault: "a route agent is frozen (SIGSTOP)", alone: "a/route agents", both: "a/route agents",
		breaks: func(t *testing.T, s *troubleSite) { s.selectFarNode(t); must(t, s.a.Pause(fleet.Agent(s.node))) },
		heals:  func(t *testing.T, s *troubleSite) { must(t, s.a.Resume(fleet.Agent(s.node))) },
	},
	{
		fault: "the manager is frozen (SIGSTOP)", alone: "a/manager", both: "a/manager",
		breaks: func(t *testing.T, s *troubleSite) { must(t, s.a.Pause(fleet.Manager)) },
		heals:  func(t *testing.T, s *troubleSite) { must(t, s.a.Resume(fleet.Manager)) },
	},
	{
		fault: "the disk of a node is full, and its route agent starts again", says: "SnapshotNotKept",
		breaks: func(t *testing.T, s *troubleSite) {
			s.selectFarNode(t)
			restartBroken(t, s.a, fleet.Agent(s.node), fullDisk(s.a, fleet.Agent(s.node)))
		},
		heals: func(t *testing.T, s *troubleSite) { restartIntact(t, s.a, fleet.Agent(s.node)) },
	},
	{
		fault: "the state directory of a route agent is read-only, and it starts again", says: "read-only file system",
		breaks: func(t *testing.T, s *troubleSite) {
			s.selectFarNode(t)
			restartBroken(t, s.a, fleet.Agent(s.node), "mount -t tmpfs -o ro none "+s.a.StateDirectory(fleet.Agent(s.node)))
		},
		heals: func(t *testing.T, s *troubleSite) { restartIntact(t, s.a, fleet.Agent(s.node)) },
	},
	{
		fault:  "this cluster's own API server is slow",
		breaks: func(t *testing.T, s *troubleSite) { s.slow(t, s.a) },
		heals:  func(_ *testing.T, s *troubleSite) { s.stopActivity() },
	},
	{
		fault:  "the peer's API server is slow",
		breaks: func(t *testing.T, s *troubleSite) { s.slow(t, s.b) },
		heals:  func(_ *testing.T, s *troubleSite) { s.stopActivity() },
	},
	{
		fault: "the peer publishes a wrong port, but can connect to our gateway",
		breaks: func(t *testing.T, s *troubleSite) {
			change(t, s.b, gatewayService(), func(o *corev1.Service) {
				s.saved = o.DeepCopy()
				o.Annotations[v1alpha1.AnnotationOverridePort] = "45871"
			})
		},
		heals: func(t *testing.T, s *troubleSite) {
			change(t, s.b, gatewayService(), func(o *corev1.Service) { o.Annotations = s.saved.GetAnnotations() })
		},
	},
	{
		fault: "the gateways are of another version than the rest", says: "have different versions",
		breaks: func(t *testing.T, s *troubleSite) {
			for i := range s.a.Nodes {
				podImage(t, s.a, fleet.Gateway(i), "isthmus:before")
			}
		},
		heals: func(t *testing.T, s *troubleSite) {
			for i := range s.a.Nodes {
				podImage(t, s.a, fleet.Gateway(i), "isthmus")
			}
		},
	},
}

// nodeReady sets the condition Ready of the last node, as its kubelet would.
func nodeReady(t *testing.T, c *fleet.Cluster, is corev1.ConditionStatus) {
	t.Helper()
	var node corev1.Node
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Name: c.Nodes[len(c.Nodes)-1].Name}, &node))
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: is, Message: "the container runtime is down"}}
	must(t, c.Client.Status().Update(t.Context(), &node))
}

// image sets the image of the last route agent's Pod.
func image(t *testing.T, c *fleet.Cluster, name string) {
	t.Helper()
	podImage(t, c, fleet.Agent(len(c.Nodes)-1), name)
}

func podImage(t *testing.T, c *fleet.Cluster, pod, name string) {
	t.Helper()
	change(t, c, &corev1.Pod{ObjectMeta: object(fleet.Namespace, pod)}, func(p *corev1.Pod) { p.Spec.Containers[0].Image = name })
}
