package fleet

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/vishvananda/netlink"

	isthmusv1 "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	own "github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// troubleSite is where troubles are made.
type troubleSite struct {
	*fleet.Fleet
	a, b  *fleet.Cluster
	saved client.Object // what a trouble took away, until it heals
}

// A trouble is a fault of a whole cluster, and what `isthmus diagnose` says of it in cluster a.
type trouble struct {
	fault string // as docs/troubleshooting.md calls it
	// alone is the one hop that a finds broken by itself, CLUSTER/HOP or CLUSTER/HOP REASON, and both is
	// what the two find out together; empty: nothing is broken.
	alone, both string
	says        string // of the hop, beside its reason
	unasked     bool   // a cannot be asked at all
	deaf        bool   // b cannot be asked at all
	short       bool   // it is among those that are made without -long
	breaks      func(t *testing.T, s *troubleSite)
	heals       func(t *testing.T, s *troubleSite)
}

// take removes an object and remembers it for giveBack.
func (s *troubleSite) take(t *testing.T, c *fleet.Cluster, o client.Object) {
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

// change changes an object, and remembers for giveBackAs what it was.
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

// tenant is the namespace of a cluster's peering with another.
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

// hinderAll lets the gateways of a cluster start again under a hindrance; a kubelet would start them
// again and again.
func hinderAll(t *testing.T, c *fleet.Cluster, how string) {
	t.Helper()
	killAll(t, c)
	for i := range c.Nodes {
		c.Hinder(fleet.Gateway(i), how)
		must(t, c.Launch(fleet.Gateway(i)))
	}
}

func unhinderAll(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	killAll(t, c)
	for i := range c.Nodes {
		c.Hinder(fleet.Gateway(i), "")
	}
	startAll(t, c)
}

// inPeersNetwork is an address in the network under which a sees b's pods, with a network of its
// own.
func inPeersNetwork(t *testing.T, a, b *fleet.Cluster) *netlink.Addr {
	t.Helper()
	addr := seen(t, a, b, b.Pods[0].Addr)
	parsed, err := netlink.ParseAddr(addr.String() + "/24")
	must(t, err)
	return parsed
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

// ipCommand runs ip(8) on a machine.
func ipCommand(t *testing.T, h *lab.Host, args ...string) {
	t.Helper()
	if out, err := h.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v on %s: %v\n%s", args, h, err, out)
	}
}

// setting writes below /proc/sys of a machine.
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

// peerAgain repairs what `isthmus peer` repairs.
func peerAgain(t *testing.T, s *troubleSite) {
	isthmus(t, s.Fleet, "peer", "--context", s.a.Name, "--remote-context", s.b.Name)
}

func gatewayService() *corev1.Service {
	return &corev1.Service{ObjectMeta: object(fleet.Namespace, "isthmus-gateway")}
}

// gatewayNode is the node of the active gateway.
func gatewayNode(t *testing.T, c *fleet.Cluster) *lab.Node { return c.Nodes[active(t, c)] }

var troubles = []trouble{
	{
		fault: "the Secret with the identity at the peer is gone", alone: "a/identity SecretMissing", both: "a/identity SecretMissing", short: true,
		breaks: func(t *testing.T, s *troubleSite) { s.take(t, s.a, identitySecret(t, s)) },
		heals:  func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "the Secret with the identity holds something else", alone: "a/identity SecretInvalid", both: "a/identity SecretInvalid",
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
		fault: "the identity leads to an address without an API server", alone: "a/identity Unreachable", both: "a/identity Unreachable",
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
		fault: "the peer revoked this cluster's rights", alone: "a/publishing Forbidden", both: "a/publishing Forbidden",
		breaks: func(t *testing.T, s *troubleSite) {
			must(t, s.b.Client.Delete(t.Context(), &rbacv1.RoleBinding{ObjectMeta: object(tenant(t, s.b, s.a), "isthmus-peer")}))
		},
		heals: peerAgain,
	},
	{
		fault: "the peer deleted the account that this cluster's identity is of", alone: "a/identity Unauthorized", both: "a/identity Unauthorized",
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
		fault: "the peer's API server does not answer", alone: "a/identity Unreachable", deaf: true,
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
		fault: "the manager has lost its rights", alone: "a/rights RightsMissing", both: "a/rights RightsMissing", says: "isthmus-manager may not",
		breaks: func(t *testing.T, s *troubleSite) {
			s.take(t, s.a, &rbacv1.ClusterRoleBinding{ObjectMeta: object("", "isthmus-manager")})
		},
		heals: func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "the gateway has lost its rights", alone: "a/rights RightsMissing", both: "a/rights RightsMissing", says: "isthmus-gateway may not",
		breaks: func(t *testing.T, s *troubleSite) {
			s.take(t, s.a, &rbacv1.RoleBinding{ObjectMeta: object(fleet.Namespace, "isthmus-gateway")})
		},
		heals: func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "the route agents have lost their rights", alone: "a/rights RightsMissing", both: "a/rights RightsMissing", says: "isthmus-route-agent may not",
		breaks: func(t *testing.T, s *troubleSite) {
			s.take(t, s.a, &rbacv1.ClusterRoleBinding{ObjectMeta: object("", "isthmus-route-agent")})
		},
		heals: func(t *testing.T, s *troubleSite) { s.giveBack(t, s.a) },
	},
	{
		fault: "no gateway of this cluster runs", alone: "a/gateway GatewaySilent", both: "a/gateway GatewaySilent", short: true,
		breaks: func(t *testing.T, s *troubleSite) { killAll(t, s.a) },
		heals:  func(t *testing.T, s *troubleSite) { startAll(t, s.a) },
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
		fault: "no gateway runs, and their Lease is gone", alone: "a/gateway", both: "a/gateway", says: "is not there",
		breaks: func(t *testing.T, s *troubleSite) {
			killAll(t, s.a)
			must(t, s.a.Client.Delete(t.Context(), &coordinationv1.Lease{ObjectMeta: object(fleet.Namespace, isthmusv1.LeaseGateway)}))
		},
		heals: func(t *testing.T, s *troubleSite) { startAll(t, s.a) },
	},
	{
		fault: "the nodes have no /dev/net/tun", alone: "a/gateway", both: "a/gateway", says: "/dev/net/tun",
		breaks: func(t *testing.T, s *troubleSite) { hinderAll(t, s.a, "mount -t tmpfs none /dev/net") },
		heals:  func(t *testing.T, s *troubleSite) { unhinderAll(t, s.a) },
	},
	{
		fault: "the gateways' Pods lack CAP_NET_ADMIN", alone: "a/gateway", both: "a/gateway", says: "NET_ADMIN",
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
		breaks: func(t *testing.T, s *troubleSite) { s.take(t, s.a, gatewayService()) },
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
		fault: "somebody else's VXLAN has the overlay's port on a node", alone: "a/route agents", both: "a/route agents", says: own.OverlayDevice,
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
		fault: "a node is not ready", alone: "a/nodes", both: "a/nodes",
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
		fault: "the peer publishes a name that does not resolve, and reaches us by ours",
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
		fault: "the route agents are of another version", says: "of several versions",
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
}

// nodeReady has a kubelet say whether the last node is ready.
func nodeReady(t *testing.T, c *fleet.Cluster, is corev1.ConditionStatus) {
	t.Helper()
	var node corev1.Node
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Name: c.Nodes[len(c.Nodes)-1].Name}, &node))
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: is, Message: "the container runtime is down"}}
	must(t, c.Client.Status().Update(t.Context(), &node))
}

// image gives the Pod of the last route agent an image.
func image(t *testing.T, c *fleet.Cluster, name string) {
	t.Helper()
	change(t, c, &corev1.Pod{ObjectMeta: object(fleet.Namespace, fleet.Agent(len(c.Nodes)-1))}, func(p *corev1.Pod) { p.Spec.Containers[0].Image = name })
}
