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
	"github.com/isthmus-net/isthmus/internal/owncluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// detect finds the values of the cluster that the chart needs and that were not set, and reports their
// sources. It refuses a cluster without IPv4 pods, and a newly chosen PodCIDR that contains nothing of the
// cluster. Of its results, Install remembers the PodCIDR.
func detect(ctx context.Context, c *Cluster, chosen chart.Values, o InstallOptions) (chart.Values, error) {
	var nodes corev1.NodeList
	if err := c.Client.List(ctx, &nodes); err != nil {
		return nil, c.Explain("Nodes", err)
	}
	pods, six, err := podAddresses(ctx, c)
	if err != nil {
		return nil, err
	}
	ofNodes := nodeNetworks(nodes.Items)
	six = six || anyIPv6(nodes.Items)
	if six && len(pods) == 0 && len(ofNodes) == 0 {
		return nil, fmt.Errorf("%s: its pods have addresses of IPv6 alone, and Isthmus joins pods by IPv4: nothing is changed", c)
	}
	found := chart.Values{}
	said, _ := chart.Get(chosen, "networks", "podCIDR").(string)
	switch chosenNow := chart.Get(o.Values, "networks", "podCIDR"); {
	case said == "":
		p, source, err := podCIDR(ctx, c, nodes.Items, pods)
		if err != nil {
			return nil, err
		}
		o.Report(fmt.Sprintf("%s: PodCIDR %v, from %s", c, p, source))
		chart.Set(found, p.String(), "networks", "podCIDR")
	case chosenNow != nil && !o.Force:
		if wrong := nothingIn(said, ofNodes, pods); wrong != "" {
			return nil, fmt.Errorf("%s: %s: correct --pod-cidr, or take it all the same by --force", c, wrong)
		}
	}
	if six {
		o.Report(fmt.Sprintf("%s: its pods have addresses of IPv4 and IPv6: those of IPv4 are joined", c))
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
		case float64(have) >= usually: // the other node may be away for a while
			chart.Set(found, float64(have), "gateway", "replicas")
		case schedulable(nodes.Items) == 1:
			o.Report(fmt.Sprintf("%s: one gateway, since one node takes Pods and each gateway runs on a node of its own", c))
			chart.Set(found, 1.0, "gateway", "replicas")
		}
	}
	return found, nil
}

// gatewayReplicas returns how many gateways there are to be by now.
func gatewayReplicas(ctx context.Context, c *Cluster) (int32, error) {
	var d appsv1.Deployment
	key := client.ObjectKey{Namespace: c.Namespace, Name: deploy.GatewayServiceAccount} // the Deployment has the same name
	if err := c.Client.Get(ctx, key, &d); err != nil {
		return 0, c.Explain("Deployment "+key.String(), client.IgnoreNotFound(err))
	}
	return *d.Spec.Replicas, nil
}

// An address is that of a Pod that runs in the pods' network.
type address struct {
	pod  string
	addr netip.Addr
}

// podAddresses returns the IPv4 addresses of all Pods, and whether any Pod has an IPv6 address. Without
// permission to read them there are none.
func podAddresses(ctx context.Context, c *Cluster) (all []address, six bool, err error) {
	for next, more := "", true; more; more = next != "" {
		var pods corev1.PodList
		err := c.Client.List(ctx, &pods, client.MatchingFields{"status.phase": string(corev1.PodRunning)}, client.Limit(500), client.Continue(next))
		if err != nil {
			return nil, false, c.Explain("Pods", ignoreAbsent(err))
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
				if six = six || err == nil && a.Is6(); err == nil && a.Is4() && (len(all) == 0 || all[len(all)-1] != one) {
					all = append(all, one)
				}
			}
		}
	}
	return all, six, nil
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

// nothingIn returns a sentence if the nodes have podCIDRs, none of them overlaps the PodCIDR, and no Pod
// is in it; otherwise it is empty. A CNI that allocates addresses by itself does not use the podCIDRs of
// nodes.
func nothingIn(podCIDR string, ofNodes []netip.Prefix, pods []address) string {
	p, err := netip.ParsePrefix(podCIDR)
	if err != nil || len(ofNodes) == 0 || slices.ContainsFunc(ofNodes, p.Overlaps) ||
		slices.ContainsFunc(pods, func(a address) bool { return p.Contains(a.addr) }) {
		return ""
	}
	return fmt.Sprintf("PodCIDR %v: no Pod has an address in it, and every node's podCIDR lies outside, such as %v", p, ofNodes[0])
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

// serviceNetwork reports the network of the Services and the cluster's DNS. The manager reads a ServiceCIDR by
// itself. Where the API server does not serve that kind (before Kubernetes 1.33), services returns the
// network from another source, or an error if no source has it.
func serviceNetwork(ctx context.Context, c *Cluster, chosen chart.Values, nodes []corev1.Node, report func(string)) (network string, err error) {
	if said, _ := chart.Get(chosen, "networks", "serviceCIDR").(string); said != "" {
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
			return "", fmt.Errorf("%s: want --set networks.serviceCIDR=NETWORK, that of the Services, since nothing in the cluster says it: "+
				"it has no ServiceCIDRs (Kubernetes 1.33 and later), and neither kubeadm's ConfigMap nor the flags of an API server can be seen", c)
		}
		report(fmt.Sprintf("%s: Services in %s, from %s", c, network, source))
	}
	var dns corev1.Service
	if err := c.Client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "kube-dns"}, &dns); err == nil {
		report(fmt.Sprintf("%s: DNS at %s, from Service kube-system/kube-dns", c, safetext.Of(dns.Spec.ClusterIP)))
	}
	return network, nil
}

// servicesElsewhere returns the IPv4 network of the Services and its source; both are empty if no source
// has one.
func servicesElsewhere(ctx context.Context, c *Cluster, nodes []corev1.Node) (network, source string, err error) {
	text, err := configMap(ctx, c, metav1.NamespaceSystem, "kubeadm-config", "ClusterConfiguration")
	var cluster struct {
		Networking struct {
			ServiceSubnet string `json:"serviceSubnet"`
		} `json:"networking"`
	}
	ofKubeadm, err := read(text, err, &cluster, func() string { return cluster.Networking.ServiceSubnet })
	if err != nil {
		return "", "", err
	}
	ofServers, err := componentFlag(ctx, c, "kube-apiserver", "service-cluster-ip-range")
	if err != nil {
		return "", "", err
	}
	for _, one := range []struct{ source, text string }{
		{"ConfigMap kube-system/kubeadm-config (networking.serviceSubnet)", ofKubeadm},
		{"flags of the API server (--service-cluster-ip-range)", ofServers},
		{"k3s (its nodes' arguments, or its default)", k3s(nodes, "--service-cidr", "10.43.0.0/16")},
	} {
		if p, ok := around(ofIPv4(one.text)); ok {
			return p.String(), one.source, nil
		}
	}
	return "", "", nil
}

// componentFlag returns a flag of a control plane component that runs as Pods; empty if it is not visible.
func componentFlag(ctx context.Context, c *Cluster, component, name string) (string, error) {
	var pods corev1.PodList
	err := c.Client.List(ctx, &pods, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{"component": component})
	return owncluster.Flag(pods.Items, name), ignoreAbsent(err)
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
		if err := c.Client.List(ctx, &pools); err != nil {
			return "", ignoreAbsent(err)
		}
		return calicoNetworks(pools.Items), nil
	}},
	{"ConfigMap kube-system/cilium-config (cluster-pool-ipv4-cidr)", true, func(ctx context.Context, c *Cluster) (string, error) {
		ipam, err := configMap(ctx, c, metav1.NamespaceSystem, "cilium-config", "ipam")
		if err != nil || ipam != "cluster-pool" {
			return "", err
		}
		return configMap(ctx, c, metav1.NamespaceSystem, "cilium-config", "cluster-pool-ipv4-cidr")
	}},
	{"ConfigMap kube-flannel/kube-flannel-cfg (net-conf.json)", false, func(ctx context.Context, c *Cluster) (string, error) {
		text, err := configMap(ctx, c, "kube-flannel", "kube-flannel-cfg", "net-conf.json")
		var flannel struct{ Network string }
		return read(text, err, &flannel, func() string { return flannel.Network })
	}},
	{"ConfigMap kube-system/kubeadm-config (networking.podSubnet)", false, func(ctx context.Context, c *Cluster) (string, error) {
		text, err := configMap(ctx, c, metav1.NamespaceSystem, "kubeadm-config", "ClusterConfiguration")
		var cluster struct {
			Networking struct {
				PodSubnet string `json:"podSubnet"`
			} `json:"networking"`
		}
		return read(text, err, &cluster, func() string { return cluster.Networking.PodSubnet })
	}},
	{"flags of the controller manager (--cluster-cidr)", false, func(ctx context.Context, c *Cluster) (string, error) {
		return componentFlag(ctx, c, "kube-controller-manager", "cluster-cidr")
	}},
	{"ConfigMap kube-system/kube-proxy (clusterCIDR)", false, func(ctx context.Context, c *Cluster) (string, error) {
		text, err := configMap(ctx, c, metav1.NamespaceSystem, "kube-proxy", "config.conf")
		var proxy struct {
			ClusterCIDR string `json:"clusterCIDR"`
		}
		return read(text, err, &proxy, func() string { return proxy.ClusterCIDR })
	}},
	{"k3s (its nodes' arguments, or its default)", false, func(ctx context.Context, c *Cluster) (string, error) {
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
		uses, limited := spec["allowedUses"].([]any) // else for workloads and tunnels
		if disabled, _ := spec["disabled"].(bool); !disabled && (!limited || slices.Contains(uses, any("Workload"))) {
			cidr, _ := spec["cidr"].(string)
			all = append(all, cidr)
		}
	}
	return strings.Join(all, ",")
}

// k3s returns the value of a flag that k3s or RKE2 records on its servers' Nodes, else usual, the default
// of both; empty if the nodes belong to neither.
func k3s(nodes []corev1.Node, flag, usual string) string {
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
			if arg == flag && n+1 < len(args) {
				return args[n+1]
			}
			if value, ok := strings.CutPrefix(arg, flag+"="); ok {
				return value
			}
		}
	}
	if is {
		return usual
	}
	return ""
}

// podCIDR asks one source after the other. What one says is believed only if the networks that the
// nodes have of it lie inside, and the Pods that run.
func podCIDR(ctx context.Context, c *Cluster, nodes []corev1.Node, pods []address) (netip.Prefix, string, error) {
	return podCIDRFrom(ctx, c, podSources, nodes, pods)
}

func podCIDRFrom(ctx context.Context, c *Cluster, sources []podSource, nodes []corev1.Node, pods []address) (netip.Prefix, string, error) {
	var outside []string
	var several []netip.Prefix // of a CNI, each of which has to lie inside
	ofNodes := nodeNetworks(nodes)
	for _, source := range sources {
		text, err := source.read(ctx, c)
		if err != nil {
			return netip.Prefix{}, "", c.Explain(source.what, err)
		}
		all := ofIPv4(text)
		p, ok := around(all)
		if !ok {
			if source.own && len(all) > 0 { // no Pod need have used them all yet
				several = append(several, all...)
				outside = append(outside, fmt.Sprintf("%s have several, %s", source.what, safetext.Of(text)))
			}
			continue
		}
		if i := slices.IndexFunc(several, func(n netip.Prefix) bool { return !holds(p, n) }); i >= 0 {
			outside = append(outside, fmt.Sprintf("%s say %v, and %v lies outside", source.what, p, several[i]))
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

// ofIPv4 returns the IPv4 networks in a list.
func ofIPv4(text string) (all []netip.Prefix) {
	for one := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' || r == ' ' }) {
		if p, err := netip.ParsePrefix(one); err == nil && p.Addr().Is4() {
			all = append(all, p.Masked())
		}
	}
	return all
}

// around returns the network that contains all others; false if there is none, so that a person must
// choose.
func around(all []netip.Prefix) (netip.Prefix, bool) {
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
func configMap(ctx context.Context, c *Cluster, namespace, name, key string) (string, error) {
	var m corev1.ConfigMap
	err := c.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &m)
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
func rolledOut(ctx context.Context, c *Cluster, objects []*unstructured.Unstructured, o InstallOptions, state string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Wait, ErrNotReady)
	defer cancel()
	for _, u := range objects {
		told := ""
		for {
			wait, warning, err := waitsFor(ctx, c, u)
			switch {
			case ctx.Err() != nil && !errors.Is(context.Cause(ctx), ErrNotReady):
				return fmt.Errorf("interrupted: %s; the same command waits again", state)
			case ctx.Err() != nil:
				if told == "" {
					told = fmt.Sprintf("%s: %s", c, Describe(u))
				}
				return fmt.Errorf("%w: the components do not run within %v; %s; the same command waits again\n%s", ErrNotReady, o.Wait, state, told)
			case errors.Is(err, ErrUnreachable): // it may come back
				wait = safetext.Of(err.Error())
			case err != nil:
				return err
			}
			if wait == "" {
				if warning != "" {
					o.Report(fmt.Sprintf("%s: warning: %s: %s", c, Describe(u), warning))
				}
				break
			}
			if now := fmt.Sprintf("%s: waiting for %s: %s", c, Describe(u), wait); now != told {
				told = now
				o.Report(told)
			}
			select {
			case <-ctx.Done():
			case <-time.After(pollInterval):
			}
		}
		if told != "" {
			o.Report(fmt.Sprintf("%s: %s runs", c, Describe(u)))
		}
	}
	return nil
}

// waitsFor says what a Deployment or DaemonSet lacks, "" when nothing, as of what is no such. Of a
// Deployment one Pod does the work: others for which no node has room are worth a warning.
func waitsFor(ctx context.Context, c *Cluster, u *unstructured.Unstructured) (wait, warning string, err error) {
	var selector *metav1.LabelSelector
	var want, updated, available int32
	var seen, one bool
	why := ""
	switch u.GetKind() {
	case "Deployment":
		var d appsv1.Deployment
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(u), &d); err != nil {
			return "", "", c.Explain(Describe(u), err)
		}
		selector, want, updated, available = d.Spec.Selector, *d.Spec.Replicas, d.Status.UpdatedReplicas, d.Status.AvailableReplicas
		seen, one = d.Status.ObservedGeneration >= d.Generation && d.Status.Replicas == want, true
		for _, condition := range d.Status.Conditions {
			if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
				why = safetext.Of(condition.Message) // such as a quota or an admission that lets no Pod be made
			}
		}
	case "DaemonSet":
		var d appsv1.DaemonSet
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(u), &d); err != nil {
			return "", "", c.Explain(Describe(u), err)
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
	pending, unscheduled := whyNot(ctx, c, u.GetNamespace(), selector)
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
func whyNot(ctx context.Context, c *Cluster, namespace string, selector *metav1.LabelSelector) (why string, unscheduled int32) {
	var pods corev1.PodList
	if err := c.Client.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabels(selector.MatchLabels)); err != nil {
		return "", 0 // it is but an explanation
	}
	leaving := false
	for i := range pods.Items {
		p := &pods.Items[i]
		leaving = leaving || p.DeletionTimestamp != nil
		problem := ""
		for _, s := range p.Status.ContainerStatuses {
			if w := s.State.Waiting; w != nil && w.Reason != "ContainerCreating" {
				problem = fmt.Sprintf("Pod %s on %s: %s: %s", p.Name, p.Spec.NodeName, safetext.Of(w.Reason), safetext.Of(w.Message))
			} else if last := s.LastTerminationState.Terminated; last != nil && !s.Ready {
				problem = fmt.Sprintf("Pod %s on %s ended with %d: %s", p.Name, p.Spec.NodeName, last.ExitCode, safetext.Of(last.Message))
			}
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
				problem = fmt.Sprintf("Pod %s: %s", p.Name, safetext.Of(condition.Message))
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
