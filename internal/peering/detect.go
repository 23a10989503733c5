package peering

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/internal/chart"
)

// detect finds out what the chart needs to know of the cluster and nobody has said, and reports
// what it took from where. Values that it returns are not remembered: next time it looks again.
func (c *Cluster) detect(ctx context.Context, chosen chart.Values, report func(string)) (chart.Values, error) {
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return nil, c.explain("Nodes", err)
	}
	found := chart.Values{}
	if said, _ := chart.Get(chosen, "networks", "podCIDR").(string); said == "" {
		p, source, err := c.podCIDR(ctx, nodes.Items)
		if err != nil {
			return nil, err
		}
		report(fmt.Sprintf("%s: PodCIDR %v, from %s", c, p, source))
		chart.Set(found, p.String(), "networks", "podCIDR")
	}
	if said, _ := chart.Get(chosen, "networks", "serviceCIDR").(string); said == "" {
		c.reportServices(ctx, report)
	}
	if chart.Get(chosen, "gateway", "replicas") == nil {
		if n := schedulable(nodes.Items); n == 1 {
			report(fmt.Sprintf("%s: one gateway, since one node takes Pods and each gateway runs on a node of its own", c))
			chart.Set(found, 1.0, "gateway", "replicas")
		}
	}
	return found, nil
}

// schedulable counts the nodes that take Pods without tolerations.
func schedulable(nodes []corev1.Node) (n int) {
	for i := range nodes {
		if !nodes[i].Spec.Unschedulable && !slices.ContainsFunc(nodes[i].Spec.Taints, func(t corev1.Taint) bool {
			return t.Effect != corev1.TaintEffectPreferNoSchedule && !strings.HasPrefix(t.Key, "node.kubernetes.io/") // of a while
		}) {
			n++
		}
	}
	return n
}

// reportServices says of which network the Services are, and where the DNS of the cluster is: the
// manager finds out the same by itself. What is not there is not worth an error.
func (c *Cluster) reportServices(ctx context.Context, report func(string)) {
	var cidr networkingv1.ServiceCIDR
	if err := c.client.Get(ctx, client.ObjectKey{Name: "kubernetes"}, &cidr); err == nil {
		report(fmt.Sprintf("%s: Services in %s, from ServiceCIDR kubernetes", c, strings.Join(cidr.Spec.CIDRs, ", ")))
	}
	var dns corev1.Service
	if err := c.client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "kube-dns"}, &dns); err == nil {
		report(fmt.Sprintf("%s: DNS at %s, from Service kube-system/kube-dns", c, Printable(dns.Spec.ClusterIP)))
	}
}

// A podSource is one place that says what the network of all pods is: none is no error.
type podSource struct {
	what string
	read func(context.Context, *Cluster) (networks string, err error)
}

var podSources = []podSource{
	{"ConfigMap kube-system/kubeadm-config (networking.podSubnet)", func(ctx context.Context, c *Cluster) (string, error) {
		text, err := c.configMap(ctx, metav1.NamespaceSystem, "kubeadm-config", "ClusterConfiguration")
		var cluster struct {
			Networking struct {
				PodSubnet string `json:"podSubnet"`
			} `json:"networking"`
		}
		return read(text, err, &cluster, func() string { return cluster.Networking.PodSubnet })
	}},
	{"IPPools of Calico", func(ctx context.Context, c *Cluster) (string, error) {
		var pools unstructured.UnstructuredList
		pools.SetGroupVersionKind(schema.GroupVersionKind{Group: "crd.projectcalico.org", Version: "v1", Kind: "IPPoolList"})
		if err := c.client.List(ctx, &pools); err != nil {
			return "", ignoreAbsent(err)
		}
		var all []string
		for i := range pools.Items {
			spec, _, _ := unstructured.NestedMap(pools.Items[i].Object, "spec")
			if disabled, _ := spec["disabled"].(bool); !disabled {
				cidr, _ := spec["cidr"].(string)
				all = append(all, cidr)
			}
		}
		return strings.Join(all, ","), nil
	}},
	{"ConfigMap kube-system/cilium-config (cluster-pool-ipv4-cidr)", func(ctx context.Context, c *Cluster) (string, error) {
		ipam, err := c.configMap(ctx, metav1.NamespaceSystem, "cilium-config", "ipam")
		if err != nil || ipam != "cluster-pool" {
			return "", err
		}
		return c.configMap(ctx, metav1.NamespaceSystem, "cilium-config", "cluster-pool-ipv4-cidr")
	}},
	{"ConfigMap kube-flannel/kube-flannel-cfg (net-conf.json)", func(ctx context.Context, c *Cluster) (string, error) {
		text, err := c.configMap(ctx, "kube-flannel", "kube-flannel-cfg", "net-conf.json")
		var flannel struct{ Network string }
		return read(text, err, &flannel, func() string { return flannel.Network })
	}},
	{"flags of the controller manager (--cluster-cidr)", func(ctx context.Context, c *Cluster) (string, error) {
		var pods corev1.PodList
		if err := c.client.List(ctx, &pods, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{"component": "kube-controller-manager"}); err != nil {
			return "", ignoreAbsent(err)
		}
		for i := range pods.Items {
			for _, container := range pods.Items[i].Spec.Containers {
				for _, arg := range append(slices.Clone(container.Command), container.Args...) {
					if cidr, ok := strings.CutPrefix(arg, "--cluster-cidr="); ok {
						return cidr, nil
					}
				}
			}
		}
		return "", nil
	}},
	{"ConfigMap kube-system/kube-proxy (clusterCIDR)", func(ctx context.Context, c *Cluster) (string, error) {
		text, err := c.configMap(ctx, metav1.NamespaceSystem, "kube-proxy", "config.conf")
		var proxy struct {
			ClusterCIDR string `json:"clusterCIDR"`
		}
		return read(text, err, &proxy, func() string { return proxy.ClusterCIDR })
	}},
	{"k3s (its nodes' arguments, or its default)", func(ctx context.Context, c *Cluster) (string, error) {
		var nodes corev1.NodeList
		if err := c.client.List(ctx, &nodes); err != nil {
			return "", err
		}
		return k3s(nodes.Items), nil
	}},
}

// k3s returns the --cluster-cidr that k3s or RKE2 notes on its servers' Nodes, else the default of
// both; nothing when the nodes are not theirs.
func k3s(nodes []corev1.Node) string {
	is := false
	for i := range nodes {
		text := nodes[i].Annotations["k3s.io/node-args"] + nodes[i].Annotations["rke2.io/node-args"]
		if text == "" {
			continue
		}
		is = true
		var args []string
		if json.Unmarshal([]byte(text), &args) != nil {
			continue
		}
		for n, arg := range args {
			if arg == "--cluster-cidr" && n+1 < len(args) {
				return args[n+1]
			}
			if cidr, ok := strings.CutPrefix(arg, "--cluster-cidr="); ok {
				return cidr
			}
		}
	}
	if is {
		return "10.42.0.0/16"
	}
	return ""
}

// podCIDR asks one source after the other. What one says is believed only if the networks that the
// nodes have of it lie inside.
func (c *Cluster) podCIDR(ctx context.Context, nodes []corev1.Node) (netip.Prefix, string, error) {
	var outside []string
	ofNodes := nodeNetworks(nodes)
	for _, source := range podSources {
		text, err := source.read(ctx, c)
		if err != nil {
			return netip.Prefix{}, "", c.explain(source.what, err)
		}
		p, ok := onlyIPv4(text)
		if !ok {
			continue
		}
		if i := slices.IndexFunc(ofNodes, func(n netip.Prefix) bool { return !holds(p, n) }); i >= 0 {
			outside = append(outside, fmt.Sprintf("%s say %v, yet a node has %v", source.what, p, ofNodes[i]))
			continue
		}
		return p, source.what, nil
	}
	hint := "Nodes have no podCIDR"
	if len(ofNodes) > 0 {
		hint = fmt.Sprintf("a node has %v of it, so perhaps it is %v", ofNodes[0], cover(ofNodes))
	}
	return netip.Prefix{}, "", fmt.Errorf("%s: want --pod-cidr, the network of all pods, since nothing in the cluster says it: %s",
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

// onlyIPv4 returns the one network of IPv4 in a list; several would need a choice.
func onlyIPv4(text string) (found netip.Prefix, ok bool) {
	for one := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' || r == ' ' }) {
		if p, err := netip.ParsePrefix(one); err == nil && p.Addr().Is4() {
			if ok {
				return netip.Prefix{}, false
			}
			found, ok = p.Masked(), true
		}
	}
	return found, ok
}

func holds(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// cover is the smallest network that holds all, and not smaller than a /16.
func cover(all []netip.Prefix) netip.Prefix {
	for bits := 16; ; bits-- {
		p := netip.PrefixFrom(all[0].Addr(), bits).Masked()
		if bits == 0 || !slices.ContainsFunc(all, func(n netip.Prefix) bool { return !holds(p, n) }) {
			return p
		}
	}
}

// configMap returns one key of a ConfigMap, empty when there is none.
func (c *Cluster) configMap(ctx context.Context, namespace, name, key string) (string, error) {
	var m corev1.ConfigMap
	err := c.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &m)
	return m.Data[key], ignoreAbsent(err)
}

// ignoreAbsent takes what is not there, is no kind of this cluster's, or may not be read, for what
// says nothing.
func ignoreAbsent(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || meta.IsNoMatchError(err) {
		return nil
	}
	return err
}

// read parses a text, and takes one that cannot be parsed for one that says nothing.
func read(text string, err error, into any, get func() string) (string, error) {
	if err != nil || text == "" || yaml.Unmarshal([]byte(text), into) != nil {
		return "", err
	}
	return get(), nil
}

// rolledOut waits until the components run as they were applied, and tells what it waits for
// whenever that changes.
func (c *Cluster) rolledOut(ctx context.Context, objects []*unstructured.Unstructured, o InstallOptions) error {
	for _, u := range objects {
		told := ""
		for {
			wait, err := c.waitsFor(ctx, u)
			switch {
			case ctx.Err() != nil && !errors.Is(context.Cause(ctx), ErrNotReady):
				return errors.New("interrupted: all is applied, and the same command waits again")
			case ctx.Err() != nil:
				if told == "" {
					told = fmt.Sprintf("%s: %s", c, describe(u))
				}
				return fmt.Errorf("%w: the components do not run within %v; all is applied, and the same command waits again\n%s", ErrNotReady, o.Wait, told)
			case errors.Is(err, ErrUnreachable): // it may come back
				wait = Printable(err.Error())
			case err != nil:
				return err
			}
			if wait == "" {
				break
			}
			if now := fmt.Sprintf("%s: waiting for %s: %s", c, describe(u), wait); now != told {
				told = now
				o.Report(told)
			}
			select {
			case <-ctx.Done():
			case <-time.After(pollInterval):
			}
		}
		if told != "" {
			o.Report(fmt.Sprintf("%s: %s runs", c, describe(u)))
		}
	}
	return nil
}

// waitsFor says what a Deployment or DaemonSet lacks, "" when nothing, as of what is no such.
func (c *Cluster) waitsFor(ctx context.Context, u *unstructured.Unstructured) (string, error) {
	var selector *metav1.LabelSelector
	var want, updated, available int32
	var seen bool
	switch u.GetKind() {
	case "Deployment":
		var d appsv1.Deployment
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(u), &d); err != nil {
			return "", c.explain(describe(u), err)
		}
		selector, want, updated, available = d.Spec.Selector, *d.Spec.Replicas, d.Status.UpdatedReplicas, d.Status.AvailableReplicas
		seen = d.Status.ObservedGeneration >= d.Generation && d.Status.Replicas == want
	case "DaemonSet":
		var d appsv1.DaemonSet
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(u), &d); err != nil {
			return "", c.explain(describe(u), err)
		}
		selector, want, updated, available = d.Spec.Selector, d.Status.DesiredNumberScheduled, d.Status.UpdatedNumberScheduled, d.Status.NumberAvailable
		seen = d.Status.ObservedGeneration >= d.Generation
	default:
		return "", nil
	}
	if seen && updated == want && available == want {
		return "", nil
	}
	text := fmt.Sprintf("%d of %d ready", min(updated, available), want)
	if why := c.whyNot(ctx, u.GetNamespace(), selector); why != "" {
		text += "; " + why
	}
	return text, nil
}

// whyNot says of the first Pod that is not ready what is wrong with it.
func (c *Cluster) whyNot(ctx context.Context, namespace string, selector *metav1.LabelSelector) string {
	var pods corev1.PodList
	if err := c.client.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabels(selector.MatchLabels)); err != nil {
		return "" // it is but an explanation
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		for _, s := range p.Status.ContainerStatuses {
			if w := s.State.Waiting; w != nil && w.Reason != "ContainerCreating" {
				return fmt.Sprintf("Pod %s on %s: %s: %s", p.Name, p.Spec.NodeName, Printable(w.Reason), Printable(w.Message))
			}
			if last := s.LastTerminationState.Terminated; last != nil && !s.Ready {
				return fmt.Sprintf("Pod %s on %s ended with %d: %s", p.Name, p.Spec.NodeName, last.ExitCode, Printable(last.Message))
			}
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
				return fmt.Sprintf("Pod %s: %s", p.Name, Printable(condition.Message))
			}
		}
	}
	return ""
}
