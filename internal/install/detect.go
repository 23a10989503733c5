package install

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/owncluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// detect finds the values that the chart needs and nobody has set, and reports their sources. It
// returns an error for a cluster without IPv4 pods. It also returns an error if o.Values set a
// PodCIDR that contains no node and no Pod. Run stores only the PodCIDR of the results.
func detect(ctx context.Context, c *cluster.Cluster, chosen chart.Values, o Options) (chart.Values, error) {
	var nodes corev1.NodeList
	if err := c.Client.List(ctx, &nodes); err != nil {
		return nil, c.Explain("Nodes", err)
	}
	pods, hasIPv6, err := podAddresses(ctx, c)
	if err != nil {
		return nil, err
	}
	nodeCIDRs := nodeNetworks(nodes.Items)
	hasIPv6 = hasIPv6 || anyIPv6(nodes.Items)
	if hasIPv6 && len(pods) == 0 && len(nodeCIDRs) == 0 {
		return nil, fmt.Errorf("%s: its pods have only IPv6 addresses, but Isthmus joins pods by IPv4; nothing was changed", c)
	}
	found := chart.Values{}
	configured, _ := chart.Get(chosen, "networks", "podCIDR").(string)
	switch chosenNow := chart.Get(o.Values, "networks", "podCIDR"); {
	case configured == "":
		p, source, err := podCIDR(ctx, c, nodes.Items, pods)
		if err != nil {
			return nil, err
		}
		o.Report(fmt.Sprintf("%s: PodCIDR %v, from %s", c, p, source))
		chart.Set(found, p.String(), "networks", "podCIDR")
	case chosenNow != nil && !o.Force:
		if wrong := nothingIn(configured, nodeCIDRs, pods); wrong != "" {
			return nil, fmt.Errorf("%s: %s; correct --pod-cidr, or use it anyway with --force", c, wrong)
		}
	}
	if hasIPv6 {
		o.Report(fmt.Sprintf("%s: its pods have IPv4 and IPv6 addresses; only IPv4 is joined", c))
	}
	services, err := serviceNetwork(ctx, c, chosen, nodes.Items, o.Report)
	if err != nil {
		return nil, err
	}
	if services != "" {
		chart.Set(found, services, "networks", "serviceCIDR")
	}
	if chart.Get(chosen, "gateway", "replicas") == nil {
		have, err := gatewayReplicas(ctx, c)
		if err != nil {
			return nil, err
		}
		usual, err := chart.Defaults()
		if err != nil {
			return nil, err
		}
		usually, _ := chart.Get(usual, "gateway", "replicas").(float64)
		switch {
		case float64(have) >= usually: // keep the number of replicas, because the second node may be down only for now
			chart.Set(found, float64(have), "gateway", "replicas")
		case schedulable(nodes.Items) == 1:
			o.Report(fmt.Sprintf("%s: one gateway, because only one node is schedulable, and each gateway needs its own node", c))
			chart.Set(found, 1.0, "gateway", "replicas")
		}
	}
	return found, nil
}

// gatewayReplicas returns the number of replicas in the Deployment of gateways.
func gatewayReplicas(ctx context.Context, c *cluster.Cluster) (int32, error) {
	var d appsv1.Deployment
	key := client.ObjectKey{Namespace: c.Namespace, Name: deploy.GatewayServiceAccount} // the Deployment has this name, too
	if err := c.Client.Get(ctx, key, &d); err != nil {
		return 0, c.Explain("Deployment "+key.String(), client.IgnoreNotFound(err))
	}
	return *d.Spec.Replicas, nil
}

// An address is the address of a running Pod in the pod network.
type address struct {
	pod  string
	addr netip.Addr
}

// podAddresses returns the IPv4 addresses of all Pods. hasIPv6 reports whether any Pod has an IPv6
// address. Without permission to read Pods it returns none.
func podAddresses(ctx context.Context, c *cluster.Cluster) (all []address, hasIPv6 bool, err error) {
	for next, more := "", true; more; more = next != "" {
		var pods corev1.PodList
		err := c.Client.List(ctx, &pods, client.MatchingFields{"status.phase": string(corev1.PodRunning)}, client.Limit(500), client.Continue(next))
		if err != nil {
			return nil, false, c.Explain("Pods", kubeerr.IgnoreUnknown(err))
		}
		next = pods.Continue
		for i := range pods.Items {
			p := &pods.Items[i]
			if p.Spec.HostNetwork {
				continue
			}
			for _, ip := range append([]corev1.PodIP{{IP: p.Status.PodIP}}, p.Status.PodIPs...) {
				a, err := netip.ParseAddr(ip.IP)
				one := address{p.Namespace + "/" + p.Name, a}
				if hasIPv6 = hasIPv6 || err == nil && a.Is6(); err == nil && a.Is4() && (len(all) == 0 || all[len(all)-1] != one) {
					all = append(all, one)
				}
			}
		}
	}
	return all, hasIPv6, nil
}

// anyIPv6 reports whether a node has an IPv6 podCIDR.
func anyIPv6(nodes []corev1.Node) bool {
	return slices.ContainsFunc(nodes, func(n corev1.Node) bool {
		return slices.ContainsFunc(append([]string{n.Spec.PodCIDR}, n.Spec.PodCIDRs...), func(text string) bool {
			p, err := netip.ParsePrefix(text)
			return err == nil && p.Addr().Is6()
		})
	})
}

// nothingIn returns a warning if podCIDR overlaps no node's podCIDR and contains no Pod's address.
// Otherwise it returns "", also if no node has a podCIDR. The podCIDRs of nodes alone prove
// nothing, because a CNI that allocates addresses by itself does not use them.
func nothingIn(podCIDR string, nodeCIDRs []netip.Prefix, pods []address) string {
	p, err := netip.ParsePrefix(podCIDR)
	if err != nil || len(nodeCIDRs) == 0 || slices.ContainsFunc(nodeCIDRs, p.Overlaps) ||
		slices.ContainsFunc(pods, func(a address) bool { return p.Contains(a.addr) }) {
		return ""
	}
	return fmt.Sprintf("PodCIDR %v: no Pod has an address in it, and every node's podCIDR lies outside, such as %v", p, nodeCIDRs[0])
}

// schedulable returns the number of nodes that accept Pods without tolerations.
func schedulable(nodes []corev1.Node) (n int) {
	for i := range nodes {
		if !nodes[i].Spec.Unschedulable && !slices.ContainsFunc(nodes[i].Spec.Taints, func(t corev1.Taint) bool {
			return t.Effect != corev1.TaintEffectPreferNoSchedule && !strings.HasPrefix(t.Key, "node.kubernetes.io/") // taints with this prefix are temporary
		}) {
			n++
		}
	}
	return n
}

// serviceNetwork reports the network of the Services and the address of the cluster's DNS. If there
// is a ServiceCIDR, it returns "", because the manager itself reads a ServiceCIDR. If the API
// server does not serve that kind (before Kubernetes 1.33), it returns the network from another
// source, or an error if no source has it.
func serviceNetwork(ctx context.Context, c *cluster.Cluster, chosen chart.Values, nodes []corev1.Node, report func(string)) (network string, err error) {
	if configured, _ := chart.Get(chosen, "networks", "serviceCIDR").(string); configured != "" {
		return "", nil
	}
	var cidr networkingv1.ServiceCIDR
	err = c.Client.Get(ctx, client.ObjectKey{Name: "kubernetes"}, &cidr)
	switch {
	case err == nil:
		report(fmt.Sprintf("%s: Services in %s, from ServiceCIDR kubernetes", c, strings.Join(cidr.Spec.CIDRs, ", ")))
	case meta.IsNoMatchError(err):
		var source string
		if network, source, err = servicesElsewhere(ctx, c, nodes); err != nil {
			return "", err
		}
		if network == "" {
			return "", fmt.Errorf("%s: cannot detect the network of the Services: the cluster has no ServiceCIDRs (Kubernetes 1.33 and later), "+
				"and neither kubeadm's ConfigMap nor the flags of an API server can be read; want --set networks.serviceCIDR=NETWORK", c)
		}
		report(fmt.Sprintf("%s: Services in %s, from %s", c, network, source))
	}
	var dns corev1.Service
	if err := c.Client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "kube-dns"}, &dns); err == nil {
		report(fmt.Sprintf("%s: DNS at %s, from Service kube-system/kube-dns", c, safetext.Of(dns.Spec.ClusterIP)))
	}
	return network, nil
}

// servicesElsewhere returns the IPv4 network of the Services, and the source from which it was
// read. Both are empty if no source has it.
func servicesElsewhere(ctx context.Context, c *cluster.Cluster, nodes []corev1.Node) (network, source string, err error) {
	text, err := configMap(ctx, c, metav1.NamespaceSystem, "kubeadm-config", "ClusterConfiguration")
	var cluster struct {
		Networking struct {
			ServiceSubnet string `json:"serviceSubnet"`
		} `json:"networking"`
	}
	fromKubeadm, err := read(text, err, &cluster, func() string { return cluster.Networking.ServiceSubnet })
	if err != nil {
		return "", "", err
	}
	fromServers, err := componentFlag(ctx, c, "kube-apiserver", "service-cluster-ip-range")
	if err != nil {
		return "", "", err
	}
	for _, one := range []struct{ source, text string }{
		{"ConfigMap kube-system/kubeadm-config (networking.serviceSubnet)", fromKubeadm},
		{"flags of the API server (--service-cluster-ip-range)", fromServers},
		{"k3s (its nodes' arguments, or its default)", k3s(nodes, "--service-cidr", "10.43.0.0/16")},
	} {
		if p, ok := enclosing(ipv4Networks(one.text)); ok {
			return p.String(), one.source, nil
		}
	}
	return "", "", nil
}

// componentFlag returns the value of a flag of a control plane component that runs in Pods. It
// returns "" if the API server has no such Pod, or if the user may not read it.
func componentFlag(ctx context.Context, c *cluster.Cluster, component, name string) (string, error) {
	var pods corev1.PodList
	err := c.Client.List(ctx, &pods, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{"component": component})
	return owncluster.Flag(pods.Items, name), kubeerr.IgnoreUnknown(err)
}
