package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/released"
)

// kinds lists all kinds of objects that a peering may create or change.
var kinds = []schema.GroupVersionKind{
	{Version: "v1", Kind: "Namespace"}, {Version: "v1", Kind: "Secret"}, {Version: "v1", Kind: "ConfigMap"}, {Version: "v1", Kind: "Service"},
	{Version: "v1", Kind: "ServiceAccount"}, {Version: "v1", Kind: "Pod"}, {Version: "v1", Kind: "Node"}, {Version: "v1", Kind: "ResourceQuota"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "Role"}, {Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "RoleBinding"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRole"}, {Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRoleBinding"},
	{Group: "certificates.k8s.io", Version: "v1", Kind: "CertificateSigningRequest"},
	{Group: "net.liqo.io", Version: "v1alpha1", Kind: "NetworkConfig"}, {Group: "net.liqo.io", Version: "v1alpha1", Kind: "TunnelEndpoint"},
	{Group: "net.liqo.io", Version: "v1alpha1", Kind: "NatMapping"}, {Group: "net.liqo.io", Version: "v1alpha1", Kind: "IpamStorage"},
	{Group: "isthmus.net", Version: "v1alpha1", Kind: "Peering"}, {Group: "isthmus.net", Version: "v1alpha1", Kind: "NodeNetworks"},
}

// objects returns the resource versions of all objects of these kinds, by kind and name.
func objects(ctx context.Context, c *fleet.Cluster) (map[string]string, error) {
	all := map[string]string{}
	for _, kind := range kinds {
		var list metav1.PartialObjectMetadataList
		list.SetGroupVersionKind(kind)
		if err := c.Client.List(ctx, &list); err != nil {
			return nil, fmt.Errorf("cluster %s: %s: %w", c, kind.Kind, err)
		}
		for _, o := range list.Items {
			all[kind.Kind+" "+o.Namespace+"/"+o.Name] = o.ResourceVersion
		}
	}
	return all, nil
}

// kernel returns a node's links, rules, routes, permanent neighbors and forwarding entries, one
// per line.
func kernel(h *lab.Host) (lines []string, err error) {
	err = h.Do(func() error {
		add := func(format string, args ...any) { lines = append(lines, h.Name+": "+fmt.Sprintf(format, args...)) }
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		names := map[int]string{}
		for _, l := range links {
			names[l.Attrs().Index] = l.Attrs().Name
			add("link %s %s", l.Type(), l.Attrs().Name)
			addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
			if err != nil {
				return err
			}
			for _, a := range addrs {
				add("address %v of %s", a.IPNet, l.Attrs().Name)
			}
		}
		rules, err := netlink.RuleList(netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		for _, r := range rules {
			add("rule %v protocol %d", r, r.Protocol)
		}
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return err
		}
		for _, r := range routes {
			add("route %v type %d via %v dev %s table %d metric %d protocol %d", r.Dst, r.Type, r.Gw, names[r.LinkIndex], r.Table, r.Priority, r.Protocol)
		}
		for _, family := range []int{netlink.FAMILY_V4, unix.AF_BRIDGE} {
			neighbors, err := netlink.NeighList(0, family)
			if err != nil {
				return err
			}
			for _, n := range neighbors {
				if n.State&netlink.NUD_PERMANENT != 0 {
					add("neighbour %v %v dev %s, family %d", n.IP, n.HardwareAddr, names[n.LinkIndex], family)
				}
			}
		}
		return nil
	})
	slices.Sort(lines)
	return lines, err
}

// inventory returns the complete state of a cluster: objects, networks allocated for peers, and
// its nodes' kernel objects.
func inventory(ctx context.Context, c *fleet.Cluster) ([]string, error) {
	named, err := objects(ctx, c)
	if err != nil {
		return nil, err
	}
	lines := slices.Sorted(maps.Keys(named))
	var storages v1alpha1.IpamStorageList
	if err := c.Client.List(ctx, &storages); err != nil {
		return nil, err
	}
	for _, s := range storages.Items {
		lines = append(lines, fmt.Sprintf("networks: %+v", s.Spec))
	}
	for _, n := range c.Nodes {
		of, err := kernel(n.Host)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", n, err)
		}
		lines = append(lines, of...)
	}
	return lines, nil
}

// firstInventory returns the inventory of a cluster after its components have completed their
// start. Before that, even a ready component may change objects; for example, a new leader writes
// its networks.
func firstInventory(t *testing.T, c *fleet.Cluster) []string {
	t.Helper()
	var has []string
	eventually(t, fmt.Sprintf("a cluster %s at rest", c), func() error {
		before := has
		var err error
		if has, err = inventory(t.Context(), c); err != nil {
			return err
		}
		if !slices.ContainsFunc(has, func(l string) bool { return strings.HasPrefix(l, "networks: ") }) {
			return errors.New("no IpamStorage")
		}
		for _, l := range has {
			namespace, ok := strings.CutPrefix(l, "Namespace /")
			if account := "ServiceAccount " + namespace + "/default"; ok && !slices.Contains(has, account) { // a controller creates the account later
				return errors.New("no " + account)
			}
		}
		if !slices.Equal(before, has) {
			time.Sleep(time.Second)
			return errors.New("it changes")
		}
		return nil
	})
	return has
}

// waitInventory waits until a cluster has the same inventory as before.
func waitInventory(t *testing.T, c *fleet.Cluster, had []string) {
	t.Helper()
	eventually(t, fmt.Sprintf("what cluster %s had", c), func() error {
		has, err := inventory(t.Context(), c)
		if err != nil {
			return err
		}
		var differences []string
		for _, l := range has {
			if !slices.Contains(had, l) {
				differences = append(differences, "+ "+l)
			}
		}
		for _, l := range had {
			if !slices.Contains(has, l) {
				differences = append(differences, "- "+l)
			}
		}
		if len(differences) > 0 {
			return fmt.Errorf("\n%s", strings.Join(differences, "\n"))
		}
		return nil
	})
}

// endHolds frees the networks of removed peers at once, by the documented edit of the IPAM state.
// Without it, nodes hold them for a day.
func endHolds(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	eventually(t, "an IPAM state of cluster "+c.Name+" without networks that are held", func() error {
		return released.EndHolds(t.Context(), c.Client)
	})
}

// writes returns the numbers of write requests to the API server of a cluster, successful or not,
// by their metric labels. It ignores Leases, which are renewed all the time.
func writes(ctx context.Context, c *fleet.Cluster) (map[string]float64, error) {
	config, err := c.Server.Config()
	if err != nil {
		return nil, err
	}
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	defer web.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, config.Host+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := web.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	counts := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		series, ok := strings.CutPrefix(line, "apiserver_request_total{")
		if !ok || strings.Contains(series, `resource="leases"`) {
			continue
		}
		for _, verb := range []string{"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"} {
			if strings.Contains(series, `verb="`+verb+`"`) {
				labels, value, _ := strings.Cut(series, "} ")
				var n float64
				if _, err := fmt.Sscan(value, &n); err != nil {
					return nil, fmt.Errorf("%s: %w", line, err)
				}
				counts[labels] = n
			}
		}
	}
	return counts, nil
}

// addPod adds a second address to a pod and describes it to the cluster as a new pod. The address
// is at the end of the PodCIDR, outside of all nodes' networks. A CNI with its own IPAM may choose
// such an address.
func addPod(t *testing.T, c *fleet.Cluster, on *lab.Pod) *lab.Pod {
	t.Helper()
	host := c.PodCIDR.Masked().Addr().As4()
	for i := range 4 { // 55 below the last address of the PodCIDR
		host[i] |= byte(0xff >> max(0, min(8, c.PodCIDR.Bits()-8*i)))
	}
	host[3] -= 55
	p := &lab.Pod{Host: on.Host, Addr: netip.AddrFrom4(host), Node: on.Node}
	for _, n := range c.Nodes {
		if n.PodCIDR.Contains(p.Addr) {
			t.Fatalf("%v is of the network of %s, and would not be believed of another node", p.Addr, n)
		}
	}
	must(t, on.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(link, &netlink.Addr{IPNet: netlink.NewIPNet(p.Addr.AsSlice())})
	}))
	must(t, on.Node.Do(func() error {
		routes, err := netlink.RouteGet(on.Addr.AsSlice())
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: routes[0].LinkIndex, Dst: netlink.NewIPNet(p.Addr.AsSlice()), Scope: netlink.SCOPE_LINK})
	}))
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "new"},
		Spec: corev1.PodSpec{NodeName: on.Node.Name, AutomountServiceAccountToken: new(bool),
			Containers: []corev1.Container{{Name: "main", Image: "none"}}},
	}
	must(t, c.Client.Create(t.Context(), pod))
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, HostIP: on.Node.Addr.String(), PodIP: p.Addr.String(), PodIPs: []corev1.PodIP{{IP: p.Addr.String()}}}
	must(t, c.Client.Status().Update(t.Context(), pod))
	return p
}
