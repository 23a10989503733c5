package facts

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/owncluster"
)

// detected has the networks that were found in the cluster's own configuration. They never change
// during the life of a cluster, so they are read only once. services is unused if ServiceCIDRs are
// watched.
type detected struct{ pods, services []netip.Prefix }

// networks sets PodCIDR and ServiceCIDR from the AddressPlan, or otherwise from the cluster's
// configuration. It does not derive them from the podCIDRs of nodes: the smallest network around
// the podCIDRs may be too small for the next node, or too large.
func (k *Keeper) networks(ctx context.Context, f *Facts) error {
	if f.PodCIDR = k.Plan.PodCIDR; !f.PodCIDR.IsValid() {
		if err := k.readKubeadm(ctx); err != nil {
			return err
		}
		if len(k.detected.pods) == 0 {
			f.Missing = append(f.Missing, "PodCIDR: not found in ConfigMap kube-system/kubeadm-config; set --pod-cidr")
			return nil
		}
		f.PodCIDR = k.detected.pods[0]
	}
	services, err := k.serviceCIDRs(ctx)
	if err != nil {
		return err
	}
	if f.ServiceCIDR = k.Plan.ServiceCIDR; !f.ServiceCIDR.IsValid() {
		among := services
		if len(among) == 0 {
			if err := k.readServices(ctx); err != nil {
				return err
			}
			among = k.detected.services
		}
		i := slices.IndexFunc(among, func(p netip.Prefix) bool { return p.Addr().Is4() == f.PodCIDR.Addr().Is4() })
		if i < 0 {
			f.Missing = append(f.Missing, fmt.Sprintf("ServiceCIDR: %s have no network of the family of the PodCIDR, %v; set --service-cidr (value networks.serviceCIDR)",
				serviceSources, f.PodCIDR))
			return nil
		}
		f.ServiceCIDR = among[i]
	}
	f.MoreServices = outside(services, f.ServiceCIDR)
	if f.PodCIDR.Overlaps(f.ServiceCIDR) {
		f.Missing = append(f.Missing, fmt.Sprintf("PodCIDR %v overlaps ServiceCIDR %v; correct --pod-cidr or --service-cidr", f.PodCIDR, f.ServiceCIDR))
	}
	return nil
}

// serviceCIDRs returns the networks of all ServiceCIDRs. Those of the cluster's first ServiceCIDR,
// named kubernetes, come first. Other ServiceCIDRs may appear and disappear at any time. The result
// is empty if the kind is not served.
func (k *Keeper) serviceCIDRs(ctx context.Context) (all []netip.Prefix, err error) {
	if !k.ServiceCIDRs {
		return nil, nil
	}
	var list networkingv1.ServiceCIDRList
	if err := k.Cache.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("networks of the services: %w", err)
	}
	slices.SortFunc(list.Items, func(a, b networkingv1.ServiceCIDR) int {
		if first := "kubernetes"; a.Name == first || b.Name == first {
			return strings.Compare(strconv.FormatBool(a.Name != first), strconv.FormatBool(b.Name != first))
		}
		return strings.Compare(a.Name, b.Name)
	})
	for i := range list.Items {
		all = append(all, prefixes(list.Items[i].Spec.CIDRs)...)
	}
	return all, nil
}

// outside returns the parts of the given networks that are outside of inner, as sorted networks.
func outside(networks []netip.Prefix, inner netip.Prefix) (rest []netip.Prefix) {
	for _, p := range networks {
		if !p.Overlaps(inner) {
			rest = append(rest, p)
			continue
		}
		// inner is in one half of p. The other half is outside of inner, and the loop continues
		// with the half that contains inner.
		for bits := p.Bits() + 1; bits <= inner.Bits(); bits++ {
			half := inner.Addr().AsSlice()
			half[(bits-1)/8] ^= 0x80 >> ((bits - 1) % 8)
			addr, _ := netip.AddrFromSlice(half)
			rest = append(rest, netip.PrefixFrom(addr, bits).Masked())
		}
	}
	slices.SortFunc(rest, netip.Prefix.Compare)
	return slices.Compact(rest)
}

// checkPodCIDR adds a sentence to f.Missing if the PodCIDR contains neither a node's podCIDR nor a
// Pod. Pods are checked because some CNIs do not use the podCIDRs of nodes.
func (k *Keeper) checkPodCIDR(ctx context.Context, f *Facts, nodes []corev1.Node) error {
	network, node := strayNode(f.PodCIDR, nodes)
	if node == "" || k.podsIn == f.PodCIDR {
		return nil
	}
	for more, page := true, ""; more; more = page != "" {
		var pods corev1.PodList
		err := k.Direct.List(ctx, &pods, client.Limit(500), client.Continue(page), client.MatchingFields{"status.phase": string(corev1.PodRunning), "spec.hostNetwork": "false"})
		if kubeerr.IgnoreUnknown(err) != nil {
			return fmt.Errorf("addresses of Pods: %w", err)
		}
		in := apierrors.IsForbidden(err) || slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { // without permission to list Pods, the PodCIDR counts as correct
			addr, err := netip.ParseAddr(p.Status.PodIP)
			return err == nil && f.PodCIDR.Contains(addr)
		})
		if in {
			k.podsIn = f.PodCIDR
			return nil
		}
		page = pods.Continue
	}
	f.Missing = append(f.Missing, fmt.Sprintf("PodCIDR %v: no Pod has an address in it, and every node's podCIDR lies outside, such as %v of node %s; correct --pod-cidr (value networks.podCIDR)",
		f.PodCIDR, network, node))
	return nil
}

// strayNode returns the first node with a podCIDR of the PodCIDR's family, and that podCIDR. node
// is "" if a node's podCIDR overlaps the PodCIDR, or if no node has a podCIDR of that family.
func strayNode(podCIDR netip.Prefix, nodes []corev1.Node) (stray netip.Prefix, node string) {
	for i := range nodes {
		for _, text := range nodes[i].Spec.PodCIDRs {
			p, err := netip.ParsePrefix(text)
			switch {
			case err != nil || !podCIDR.IsValid() || p.Addr().Is4() != podCIDR.Addr().Is4():
			case p.Overlaps(podCIDR):
				return netip.Prefix{}, ""
			case node == "":
				stray, node = p, nodes[i].Name
			}
		}
	}
	return stray, node
}

// readKubeadm reads the networks of pods from kubeadm's configuration.
func (k *Keeper) readKubeadm(ctx context.Context) error {
	if len(k.detected.pods) > 0 {
		return nil
	}
	pods, _, err := k.kubeadm(ctx)
	k.detected.pods = pods
	return err
}

// kubeadm returns the networks in kubeadm's configuration, at most one of each family. It is not an
// error if the ConfigMap is missing, or if reading it is forbidden.
func (k *Keeper) kubeadm(ctx context.Context) (pods, services []netip.Prefix, err error) {
	var cm corev1.ConfigMap
	if err := k.Direct.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: "kubeadm-config"}, &cm); kubeerr.IgnoreUnknown(err) != nil {
		return nil, nil, fmt.Errorf("configuration of kubeadm: %w", err)
	}
	pods, services = kubeadmSubnets(cm.Data["ClusterConfiguration"])
	return pods, services, nil
}

// serviceSources names the sources of readServices, for messages.
const serviceSources = "ServiceCIDR kubernetes, ConfigMap kube-system/kubeadm-config and the flags of API servers"

// readServices reads the network of the Services if the kind ServiceCIDR is not served (Kubernetes
// 1.31 and 1.32). In those versions, only the cluster's configuration contains the network, and the
// manager cannot always read that configuration.
func (k *Keeper) readServices(ctx context.Context) error {
	if len(k.detected.services) > 0 {
		return nil
	}
	var cidr networkingv1.ServiceCIDR
	if err := k.Direct.Get(ctx, types.NamespacedName{Name: "kubernetes"}, &cidr); kubeerr.IgnoreUnknown(err) != nil {
		return fmt.Errorf("network of the services: %w", err)
	}
	if k.detected.services = prefixes(cidr.Spec.CIDRs); len(k.detected.services) > 0 {
		return nil
	}
	_, services, err := k.kubeadm(ctx)
	if err != nil {
		return err
	}
	if k.detected.services = services; len(services) > 0 {
		return nil
	}
	var servers corev1.PodList
	if err := k.Direct.List(ctx, &servers, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{"component": "kube-apiserver"}); kubeerr.IgnoreUnknown(err) != nil {
		return fmt.Errorf("flags of API servers: %w", err)
	}
	k.detected.services = prefixes(strings.Split(owncluster.Flag(servers.Items, "service-cluster-ip-range"), ","))
	return nil
}

// apiServers returns the addresses behind the Service kubernetes. It returns none if they are
// missing, or if reading them is forbidden.
func (k *Keeper) apiServers(ctx context.Context) ([]netip.Addr, error) {
	if now := time.Now(); now.Sub(k.serversRead) < apiServerInterval/2 { // other events may cause much more frequent calls
		return k.servers, nil
	}
	var slice discoveryv1.EndpointSlice
	err := k.Direct.Get(ctx, types.NamespacedName{Namespace: "default", Name: "kubernetes"}, &slice)
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
		return nil, fmt.Errorf("addresses of the API server: %w", err)
	}
	k.serversRead = time.Now()
	if err == nil {
		k.servers = addressesIn(slice)
	}
	return k.servers, nil
}

func addressesIn(slice discoveryv1.EndpointSlice) (all []netip.Addr) {
	for _, endpoint := range slice.Endpoints {
		for _, text := range endpoint.Addresses {
			if addr, err := netip.ParseAddr(text); err == nil {
				all = append(all, addr.Unmap())
			}
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// kubeadmSubnets returns networking.podSubnet and networking.serviceSubnet, one network per family,
// the primary one first.
func kubeadmSubnets(clusterConfiguration string) (pods, services []netip.Prefix) {
	var config struct {
		Networking struct {
			PodSubnet     string `json:"podSubnet"`
			ServiceSubnet string `json:"serviceSubnet"`
		} `json:"networking"`
	}
	if err := yaml.Unmarshal([]byte(clusterConfiguration), &config); err != nil {
		return nil, nil
	}
	return prefixes(strings.Split(config.Networking.PodSubnet, ",")), prefixes(strings.Split(config.Networking.ServiceSubnet, ","))
}

func prefixes(texts []string) (all []netip.Prefix) {
	for _, text := range texts {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return nil // a partial list would be misleading
		}
		all = append(all, p.Masked())
	}
	return all
}
