package peering

import (
	"cmp"
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

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/chart"
)

// detect finds out what the chart needs to know of the cluster and nobody has said, and reports
// what it took from where. Of what it returns, Install remembers the PodCIDR.
func (c *Cluster) detect(ctx context.Context, chosen chart.Values, report func(string)) (chart.Values, error) {
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return nil, c.explain("Nodes", err)
	}
	found := chart.Values{}
	if said, _ := chart.Get(chosen, "networks", "podCIDR").(string); said == "" {
		pods, err := c.addresses(ctx)
		if err != nil {
			return nil, err
		}
		p, source, err := c.podCIDR(ctx, nodes.Items, pods)
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
		have, err := c.gateways(ctx)
		if err != nil {
			return nil, err
		}
		usual, err := chart.Defaults()
		if err != nil {
			return nil, err
		}
		usually, _ := chart.Get(usual, "gateway", "replicas").(float64)
		switch {
		case float64(have) >= usually: // the other node may be away for a while
			chart.Set(found, float64(have), "gateway", "replicas")
		case schedulable(nodes.Items) == 1:
			report(fmt.Sprintf("%s: one gateway, since one node takes Pods and each gateway runs on a node of its own", c))
			chart.Set(found, 1.0, "gateway", "replicas")
		}
	}
	return found, nil
}

// gateways returns how many gateways there are to be by now.
func (c *Cluster) gateways(ctx context.Context) (int32, error) {
	var d appsv1.Deployment
	key := client.ObjectKey{Namespace: c.Namespace, Name: deploy.GatewayServiceAccount} // the Deployment has the same name
	if err := c.client.Get(ctx, key, &d); err != nil {
		return 0, c.explain("Deployment "+key.String(), client.IgnoreNotFound(err))
	}
	return *d.Spec.Replicas, nil
}

// An address is that of a Pod that runs in the pods' network.
type address struct {
	pod  string
	addr netip.Addr
}

// addresses returns those of IPv4, of all Pods. Where they may not be read, there are none.
func (c *Cluster) addresses(ctx context.Context) (all []address, err error) {
	for next, more := "", true; more; more = next != "" {
		var pods corev1.PodList
		err := c.client.List(ctx, &pods, client.MatchingFields{"status.phase": string(corev1.PodRunning)}, client.Limit(500), client.Continue(next))
		if err != nil {
			return nil, c.explain("Pods", ignoreAbsent(err))
		}
		next = pods.Continue
		for i := range pods.Items {
			p := &pods.Items[i]
			if a, err := netip.ParseAddr(p.Status.PodIP); err == nil && a.Is4() && !p.Spec.HostNetwork {
				all = append(all, address{p.Namespace + "/" + p.Name, a})
			}
		}
	}
	return all, nil
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
	// own says that the CNI gives Pods their addresses by itself, whatever network their Node has.
	own  bool
	read func(context.Context, *Cluster) (networks string, err error)
}

// podSources begins with the CNIs: what the cluster was made with need not be what they use.
var podSources = []podSource{
	{"IPPools of Calico", true, func(ctx context.Context, c *Cluster) (string, error) {
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
	{"ConfigMap kube-system/cilium-config (cluster-pool-ipv4-cidr)", true, func(ctx context.Context, c *Cluster) (string, error) {
		ipam, err := c.configMap(ctx, metav1.NamespaceSystem, "cilium-config", "ipam")
		if err != nil || ipam != "cluster-pool" {
			return "", err
		}
		return c.configMap(ctx, metav1.NamespaceSystem, "cilium-config", "cluster-pool-ipv4-cidr")
	}},
	{"ConfigMap kube-flannel/kube-flannel-cfg (net-conf.json)", false, func(ctx context.Context, c *Cluster) (string, error) {
		text, err := c.configMap(ctx, "kube-flannel", "kube-flannel-cfg", "net-conf.json")
		var flannel struct{ Network string }
		return read(text, err, &flannel, func() string { return flannel.Network })
	}},
	{"ConfigMap kube-system/kubeadm-config (networking.podSubnet)", false, func(ctx context.Context, c *Cluster) (string, error) {
		text, err := c.configMap(ctx, metav1.NamespaceSystem, "kubeadm-config", "ClusterConfiguration")
		var cluster struct {
			Networking struct {
				PodSubnet string `json:"podSubnet"`
			} `json:"networking"`
		}
		return read(text, err, &cluster, func() string { return cluster.Networking.PodSubnet })
	}},
	{"flags of the controller manager (--cluster-cidr)", false, func(ctx context.Context, c *Cluster) (string, error) {
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
	{"ConfigMap kube-system/kube-proxy (clusterCIDR)", false, func(ctx context.Context, c *Cluster) (string, error) {
		text, err := c.configMap(ctx, metav1.NamespaceSystem, "kube-proxy", "config.conf")
		var proxy struct {
			ClusterCIDR string `json:"clusterCIDR"`
		}
		return read(text, err, &proxy, func() string { return proxy.ClusterCIDR })
	}},
	{"k3s (its nodes' arguments, or its default)", false, func(ctx context.Context, c *Cluster) (string, error) {
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
// nodes have of it lie inside, and the Pods that run.
func (c *Cluster) podCIDR(ctx context.Context, nodes []corev1.Node, pods []address) (netip.Prefix, string, error) {
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
		if i := slices.IndexFunc(pods, func(a address) bool { return !p.Contains(a.addr) }); i >= 0 {
			outside = append(outside, fmt.Sprintf("%s say %v, yet Pod %s has %v", source.what, p, pods[i].pod, pods[i].addr))
			continue
		}
		if i := slices.IndexFunc(ofNodes, func(n netip.Prefix) bool { return !source.own && !holds(p, n) }); i >= 0 {
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
// whenever that changes; state says how the installation is meanwhile.
func (c *Cluster) rolledOut(ctx context.Context, objects []*unstructured.Unstructured, o InstallOptions, state string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Wait, ErrNotReady)
	defer cancel()
	for _, u := range objects {
		told := ""
		for {
			wait, warning, err := c.waitsFor(ctx, u)
			switch {
			case ctx.Err() != nil && !errors.Is(context.Cause(ctx), ErrNotReady):
				return fmt.Errorf("interrupted: %s; the same command waits again", state)
			case ctx.Err() != nil:
				if told == "" {
					told = fmt.Sprintf("%s: %s", c, describe(u))
				}
				return fmt.Errorf("%w: the components do not run within %v; %s; the same command waits again\n%s", ErrNotReady, o.Wait, state, told)
			case errors.Is(err, ErrUnreachable): // it may come back
				wait = Printable(err.Error())
			case err != nil:
				return err
			}
			if wait == "" {
				if warning != "" {
					o.Report(fmt.Sprintf("%s: warning: %s: %s", c, describe(u), warning))
				}
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

// waitsFor says what a Deployment or DaemonSet lacks, "" when nothing, as of what is no such. Of a
// Deployment one Pod does the work: others for which no node has room are worth a warning.
func (c *Cluster) waitsFor(ctx context.Context, u *unstructured.Unstructured) (wait, warning string, err error) {
	var selector *metav1.LabelSelector
	var want, updated, available int32
	var seen, one bool
	why := ""
	switch u.GetKind() {
	case "Deployment":
		var d appsv1.Deployment
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(u), &d); err != nil {
			return "", "", c.explain(describe(u), err)
		}
		selector, want, updated, available = d.Spec.Selector, *d.Spec.Replicas, d.Status.UpdatedReplicas, d.Status.AvailableReplicas
		seen, one = d.Status.ObservedGeneration >= d.Generation && d.Status.Replicas == want, true
		for _, condition := range d.Status.Conditions {
			if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
				why = Printable(condition.Message) // such as a quota or an admission that lets no Pod be made
			}
		}
	case "DaemonSet":
		var d appsv1.DaemonSet
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(u), &d); err != nil {
			return "", "", c.explain(describe(u), err)
		}
		selector, want, updated, available = d.Spec.Selector, d.Status.DesiredNumberScheduled, d.Status.UpdatedNumberScheduled, d.Status.NumberAvailable
		seen = d.Status.ObservedGeneration >= d.Generation
	default:
		return "", "", nil
	}
	if seen && updated == want && available == want {
		return "", "", nil
	}
	text := fmt.Sprintf("%d of %d ready", min(updated, available), want)
	pending, unscheduled := c.whyNot(ctx, u.GetNamespace(), selector)
	if one && seen && updated == want && available > 0 && available+unscheduled == want {
		return "", text + "; " + pending, nil
	}
	if why = cmp.Or(pending, why); why != "" {
		text += "; " + why
	}
	return text, "", nil
}

// whyNot says of the first Pod that is not ready what is wrong with it, and of how many there is no
// more to say than that no node has room; none when one is about to leave its node.
func (c *Cluster) whyNot(ctx context.Context, namespace string, selector *metav1.LabelSelector) (why string, unscheduled int32) {
	var pods corev1.PodList
	if err := c.client.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabels(selector.MatchLabels)); err != nil {
		return "", 0 // it is but an explanation
	}
	leaving := false
	for i := range pods.Items {
		p := &pods.Items[i]
		leaving = leaving || p.DeletionTimestamp != nil
		problem := ""
		for _, s := range p.Status.ContainerStatuses {
			if w := s.State.Waiting; w != nil && w.Reason != "ContainerCreating" {
				problem = fmt.Sprintf("Pod %s on %s: %s: %s", p.Name, p.Spec.NodeName, Printable(w.Reason), Printable(w.Message))
			} else if last := s.LastTerminationState.Terminated; last != nil && !s.Ready {
				problem = fmt.Sprintf("Pod %s on %s ended with %d: %s", p.Name, p.Spec.NodeName, last.ExitCode, Printable(last.Message))
			}
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
				problem = fmt.Sprintf("Pod %s: %s", p.Name, Printable(condition.Message))
				unscheduled++
			}
		}
		why = cmp.Or(why, problem)
	}
	if leaving {
		unscheduled = 0
	}
	return why, unscheduled
}
