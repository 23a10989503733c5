package install

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// A podSource is an object or a flag from which the network of all pods may be read. A source
// without the network is not an error.
type podSource struct {
	what string
	// own means that the CNI allocates Pod addresses itself, regardless of the Node's podCIDR.
	own  bool
	read func(context.Context, *cluster.Cluster) (networks string, err error)
}

// podSources begins with the CNIs, because a CNI may use another network than the cluster was
// created with.
var podSources = []podSource{
	{"IPPools of Calico", true, func(ctx context.Context, c *cluster.Cluster) (string, error) {
		var pools unstructured.UnstructuredList
		pools.SetGroupVersionKind(schema.GroupVersionKind{Group: "crd.projectcalico.org", Version: "v1", Kind: "IPPoolList"})
		if err := c.Client.List(ctx, &pools); err != nil {
			return "", kubeerr.IgnoreUnknown(err)
		}
		return calicoNetworks(pools.Items), nil
	}},
	{"ConfigMap kube-system/cilium-config (cluster-pool-ipv4-cidr)", true, func(ctx context.Context, c *cluster.Cluster) (string, error) {
		ipam, err := configMap(ctx, c, metav1.NamespaceSystem, "cilium-config", "ipam")
		if err != nil || ipam != "cluster-pool" {
			return "", err
		}
		return configMap(ctx, c, metav1.NamespaceSystem, "cilium-config", "cluster-pool-ipv4-cidr")
	}},
	{"ConfigMap kube-flannel/kube-flannel-cfg (net-conf.json)", false, func(ctx context.Context, c *cluster.Cluster) (string, error) {
		text, err := configMap(ctx, c, "kube-flannel", "kube-flannel-cfg", "net-conf.json")
		var flannel struct{ Network string }
		return read(text, err, &flannel, func() string { return flannel.Network })
	}},
	{"ConfigMap kube-system/kubeadm-config (networking.podSubnet)", false, func(ctx context.Context, c *cluster.Cluster) (string, error) {
		text, err := configMap(ctx, c, metav1.NamespaceSystem, "kubeadm-config", "ClusterConfiguration")
		var cluster struct {
			Networking struct {
				PodSubnet string `json:"podSubnet"`
			} `json:"networking"`
		}
		return read(text, err, &cluster, func() string { return cluster.Networking.PodSubnet })
	}},
	{"flags of the controller manager (--cluster-cidr)", false, func(ctx context.Context, c *cluster.Cluster) (string, error) {
		return componentFlag(ctx, c, "kube-controller-manager", "cluster-cidr")
	}},
	{"ConfigMap kube-system/kube-proxy (clusterCIDR)", false, func(ctx context.Context, c *cluster.Cluster) (string, error) {
		text, err := configMap(ctx, c, metav1.NamespaceSystem, "kube-proxy", "config.conf")
		var proxy struct {
			ClusterCIDR string `json:"clusterCIDR"`
		}
		return read(text, err, &proxy, func() string { return proxy.ClusterCIDR })
	}},
	{"k3s (its nodes' arguments, or its default)", false, func(ctx context.Context, c *cluster.Cluster) (string, error) {
		var nodes corev1.NodeList
		if err := c.Client.List(ctx, &nodes); err != nil {
			return "", err
		}
		return k3s(nodes.Items, "--cluster-cidr", "10.42.0.0/16"), nil
	}},
}

// calicoNetworks returns the networks of the IPPools from which Pods get addresses.
func calicoNetworks(pools []unstructured.Unstructured) string {
	var all []string
	for i := range pools {
		spec, _, _ := unstructured.NestedMap(pools[i].Object, "spec")
		uses, limited := spec["allowedUses"].([]any) // without allowedUses, the pool is for workloads and tunnels
		if disabled, _ := spec["disabled"].(bool); !disabled && (!limited || slices.Contains(uses, any("Workload"))) {
			cidr, _ := spec["cidr"].(string)
			all = append(all, cidr)
		}
	}
	return strings.Join(all, ",")
}

// k3s returns the value of a flag that k3s or RKE2 records in the Nodes of its servers. If the flag
// is not set, it returns fallback, the default of both distributions. If no node belongs to k3s or
// RKE2, it returns "".
func k3s(nodes []corev1.Node, flag, fallback string) string {
	found := false
	for i := range nodes {
		text := nodes[i].Annotations["k3s.io/node-args"] + nodes[i].Annotations["rke2.io/node-args"]
		if text == "" {
			continue
		}
		found = true
		var args []string
		if json.Unmarshal([]byte(text), &args) != nil {
			continue
		}
		for n, arg := range args {
			if arg == flag && n+1 < len(args) {
				return args[n+1]
			}
			if value, ok := strings.CutPrefix(arg, flag+"="); ok {
				return value
			}
		}
	}
	if found {
		return fallback
	}
	return ""
}

// podCIDR tries one source after the other. It accepts a network only if the network contains the
// addresses of all running Pods. The network must also contain the podCIDRs of all Nodes, unless
// the CNI ignores them.
func podCIDR(ctx context.Context, c *cluster.Cluster, nodes []corev1.Node, pods []address) (netip.Prefix, string, error) {
	return podCIDRFrom(ctx, c, podSources, nodes, pods)
}

func podCIDRFrom(ctx context.Context, c *cluster.Cluster, sources []podSource, nodes []corev1.Node, pods []address) (netip.Prefix, string, error) {
	var outside []string
	var several []netip.Prefix // networks of a CNI, if it has more than one; the result must contain all of them
	nodeCIDRs := nodeNetworks(nodes)
	for _, source := range sources {
		text, err := source.read(ctx, c)
		if err != nil {
			return netip.Prefix{}, "", c.Explain(source.what, err)
		}
		all := ipv4Networks(text)
		p, ok := enclosing(all)
		if !ok {
			if source.own && len(all) > 0 { // now the Pods may use only some of these networks, but later all
				several = append(several, all...)
				outside = append(outside, fmt.Sprintf("%s: more than one network, %s", source.what, safetext.Of(text)))
			}
			continue
		}
		if i := slices.IndexFunc(several, func(n netip.Prefix) bool { return !holds(p, n) }); i >= 0 {
			outside = append(outside, fmt.Sprintf("%s: %v does not contain %v", source.what, p, several[i]))
			continue
		}
		if i := slices.IndexFunc(pods, func(a address) bool { return !p.Contains(a.addr) }); i >= 0 {
			outside = append(outside, fmt.Sprintf("%s: %v does not contain %v of Pod %s", source.what, p, pods[i].addr, pods[i].pod))
			continue
		}
		if i := slices.IndexFunc(nodeCIDRs, func(n netip.Prefix) bool { return !source.own && !holds(p, n) }); i >= 0 {
			outside = append(outside, fmt.Sprintf("%s: %v does not contain %v of a node", source.what, p, nodeCIDRs[i]))
			continue
		}
		return p, source.what, nil
	}
	hint := "Nodes have no podCIDR"
	if len(nodeCIDRs) > 0 {
		hint = fmt.Sprintf("a node has the podCIDR %v, so the network of all pods may be %v", nodeCIDRs[0], cover(nodeCIDRs))
	}
	return netip.Prefix{}, "", fmt.Errorf("%s: cannot detect the network of all pods: %s; repeat with --pod-cidr NETWORK",
		c, strings.Join(append([]string{hint}, outside...), "; "))
}

func nodeNetworks(nodes []corev1.Node) (all []netip.Prefix) {
	for i := range nodes {
		for _, text := range append([]string{nodes[i].Spec.PodCIDR}, nodes[i].Spec.PodCIDRs...) {
			if p, err := netip.ParsePrefix(text); err == nil && p.Addr().Is4() && !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all
}

// ipv4Networks returns the IPv4 networks in a list.
func ipv4Networks(text string) (all []netip.Prefix) {
	for one := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' || r == ' ' }) {
		if p, err := netip.ParsePrefix(one); err == nil && p.Addr().Is4() {
			all = append(all, p.Masked())
		}
	}
	return all
}

// enclosing returns the network that contains all other networks in the list. It returns false if
// there is none.
func enclosing(all []netip.Prefix) (netip.Prefix, bool) {
	i := slices.IndexFunc(all, func(p netip.Prefix) bool {
		return !slices.ContainsFunc(all, func(n netip.Prefix) bool { return !holds(p, n) })
	})
	if i < 0 {
		return netip.Prefix{}, false
	}
	return all[i], true
}

func holds(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// cover returns the smallest network that contains all given networks and is at least a /16.
func cover(all []netip.Prefix) netip.Prefix {
	for bits := 16; ; bits-- {
		p := netip.PrefixFrom(all[0].Addr(), bits).Masked()
		if bits == 0 || !slices.ContainsFunc(all, func(n netip.Prefix) bool { return !holds(p, n) }) {
			return p
		}
	}
}

// configMap returns the value of one key of a ConfigMap, or "" if the ConfigMap or the key does not
// exist.
func configMap(ctx context.Context, c *cluster.Cluster, namespace, name, key string) (string, error) {
	var m corev1.ConfigMap
	err := c.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &m)
	return m.Data[key], kubeerr.IgnoreUnknown(err)
}

// read parses text as YAML into target, which is a pointer. Then it returns the result of get, or
// "" if the text cannot be parsed.
func read(text string, err error, target any, get func() string) (string, error) {
	if err != nil || text == "" || yaml.Unmarshal([]byte(text), target) != nil {
		return "", err
	}
	return get(), nil
}
