package install

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// This file has the checks and reads that precede all writes. The checks find reasons to refuse an
// installation. The reads determine the values of an installation that has not stored any.

// olderValues returns the values of an installation that has not stored them, because it is old or
// was made with kubectl. It reads them from the objects. It returns nil if there is no
// installation. With the default values instead, the address that peers use might change.
func olderValues(ctx context.Context, c *cluster.Cluster, o Options) (chart.Values, error) {
	var account corev1.ServiceAccount
	key := client.ObjectKey{Namespace: c.Namespace, Name: deploy.ManagerServiceAccount}
	if err := c.Client.Get(ctx, key, &account); err != nil {
		return nil, c.Explain("ServiceAccount "+key.String(), client.IgnoreNotFound(err))
	}
	values, workloads := chart.Values{}, false
	for kind, names := range map[string][]string{
		"Deployment": {deploy.ManagerServiceAccount, deploy.GatewayServiceAccount}, "DaemonSet": {deploy.RouteAgentServiceAccount},
	} {
		for _, name := range names { // workloads have the same names as their ServiceAccounts
			u, err := c.Get(ctx, appsv1.SchemeGroupVersion.WithKind(kind), c.Namespace, name)
			if err != nil {
				return nil, err
			}
			if workloads = workloads || u != nil; u != nil && name == deploy.GatewayServiceAccount && onHostNetwork(u) {
				chart.Set(values, true, "gateway", "hostNetwork")
			}
		}
	}
	chart.Set(values, workloads, "workloads")
	var s corev1.Service
	key.Name = deploy.GatewayServiceAccount // the Service has this name, too
	if err := c.Client.Get(ctx, key, &s); apierrors.IsNotFound(err) {
		chart.Set(values, "", "gateway", "service", "type")
		return values, nil
	} else if err != nil {
		return nil, c.Explain("Service "+key.String(), err)
	}
	chart.Set(values, string(s.Spec.Type), "gateway", "service", "type")
	if policy := s.Spec.ExternalTrafficPolicy; policy != "" {
		chart.Set(values, string(policy), "gateway", "service", "externalTrafficPolicy")
	}
	if class := s.Spec.LoadBalancerClass; class != nil {
		chart.Set(values, *class, "gateway", "service", "loadBalancerClass")
	}
	if chart.Get(o.Values, "gateway", "port") != nil || chart.Get(o.Values, "gateway", "service", "type") != nil {
		return values, nil // the person has chosen this value
	}
	port, ok := consecutivePorts(s.Spec.Ports)
	if !ok {
		return nil, fmt.Errorf("%s: Service %s: its ports are not consecutive UDP ports with the same target ports; set --gateway-port and --tunnels, "+
			"or keep the Service unchanged with --gateway-service none", c, key)
	}
	chart.Set(values, float64(port), "gateway", "port")
	chart.Set(values, float64(len(s.Spec.Ports)), "gateway", "tunnels")
	o.Report(fmt.Sprintf("%s: Service %s stays %s with %d UDP ports from %d up, because the installation has not stored its values", c, key, s.Spec.Type, len(s.Spec.Ports), port))
	return values, nil
}

func onHostNetwork(deployment *unstructured.Unstructured) bool {
	on, _, _ := unstructured.NestedBool(deployment.Object, "spec", "template", "spec", "hostNetwork")
	return on
}

// consecutivePorts returns the first port of our Service. ok reports whether the ports are
// consecutive.
func consecutivePorts(ports []corev1.ServicePort) (first int32, ok bool) {
	for i, p := range ports {
		if i == 0 {
			first = p.Port
		}
		if p.Port != first+int32(i) || p.Protocol != corev1.ProtocolUDP || p.TargetPort.IntVal != p.Port && p.TargetPort.IntVal != 0 {
			return 0, false
		}
	}
	return first, len(ports) > 0
}

// NotElsewhere returns an error if there is an installation in another namespace. The new
// ClusterRoleBindings would have the same names, so the other installation would lose its rights.
// An installation whose ServiceAccount was deleted does not count.
func NotElsewhere(ctx context.Context, c *cluster.Cluster) error {
	var binding rbacv1.ClusterRoleBinding
	if err := c.Client.Get(ctx, client.ObjectKey{Name: deploy.ManagerServiceAccount}, &binding); err != nil {
		return c.Explain("ClusterRoleBinding "+deploy.ManagerServiceAccount, client.IgnoreNotFound(err))
	}
	for _, s := range binding.Subjects {
		if s.Kind != rbacv1.ServiceAccountKind || s.Namespace == c.Namespace {
			continue
		}
		key := client.ObjectKey{Namespace: s.Namespace, Name: s.Name}
		err := c.Client.Get(ctx, key, &corev1.ServiceAccount{})
		if err == nil {
			return fmt.Errorf("%s: Isthmus is already installed in namespace %s (ClusterRoleBinding %s), and a cluster can have only one installation; "+
				"use --namespace %s, or uninstall that one first", c, safetext.Of(s.Namespace), binding.Name, safetext.Of(s.Namespace))
		}
		if !apierrors.IsNotFound(err) {
			return c.Explain("ServiceAccount "+key.String(), err)
		}
	}
	return nil
}

// checkConflicts returns an error about an existing object if Run cannot replace it, or if Isthmus
// must not run beside it.
func checkConflicts(ctx context.Context, c *cluster.Cluster, objects []*unstructured.Unstructured) error {
	workloads := false
	for _, u := range objects {
		switch u.GetKind() {
		case "Deployment", "DaemonSet":
			workloads = true
			have, err := c.Get(ctx, u.GroupVersionKind(), u.GetNamespace(), u.GetName())
			if err != nil {
				return err
			}
			if have == nil {
				continue
			}
			want, _, _ := unstructured.NestedMap(u.Object, "spec", "selector")
			if selector, _, _ := unstructured.NestedMap(have.Object, "spec", "selector"); !reflect.DeepEqual(selector, want) {
				return fmt.Errorf("%s: %s: the immutable spec.selector is %v instead of %v, so Isthmus did not install it; delete it first, or run the components yourself (--without-workloads)",
					c, cluster.Describe(u), selector, want)
			}
		case "Service":
			if u.GetLabels()[v1alpha1.LabelGateway] == "" {
				continue
			}
			var services corev1.ServiceList
			if err := c.Client.List(ctx, &services, client.InNamespace(c.Namespace), client.MatchingLabels{v1alpha1.LabelGateway: "true"}); err != nil {
				return c.Explain("Services in "+c.Namespace, err)
			}
			for i := range services.Items {
				if name := services.Items[i].Name; name != u.GetName() {
					return fmt.Errorf("%s: Service %s/%s already has the label %s, and peers get no address if Service %s has it too; keep the first with --gateway-service none, or delete it",
						c, c.Namespace, name, v1alpha1.LabelGateway, u.GetName())
				}
			}
		}
	}
	if !workloads {
		return nil
	}
	var deployments appsv1.DeploymentList
	var daemonSets appsv1.DaemonSetList
	for _, list := range []client.ObjectList{&deployments, &daemonSets} {
		if err := c.Client.List(ctx, list, client.InNamespace(c.Namespace)); err != nil {
			return c.Explain("workloads in "+c.Namespace, err)
		}
	}
	accounts := []string{deploy.ManagerServiceAccount, deploy.GatewayServiceAccount, deploy.RouteAgentServiceAccount}
	another := func(kind, name, account string) error {
		if !slices.Contains(accounts, account) || name == account {
			return nil
		}
		return fmt.Errorf("%s: %s %s/%s already runs with ServiceAccount %s, so this component would run twice; delete it first, or run the components yourself (--without-workloads)",
			c, kind, c.Namespace, name, account)
	}
	for i := range deployments.Items {
		if err := another("Deployment", deployments.Items[i].Name, deployments.Items[i].Spec.Template.Spec.ServiceAccountName); err != nil {
			return err
		}
	}
	for i := range daemonSets.Items {
		if err := another("DaemonSet", daemonSets.Items[i].Name, daemonSets.Items[i].Spec.Template.Spec.ServiceAccountName); err != nil {
			return err
		}
	}
	return nil
}

// agentsFirst delays the change that moves the gateways from the host network into Pods, until each
// node has the new agent. Older agents forward no packet to a gateway's Pod.
func agentsFirst(ctx context.Context, c *cluster.Cluster, object *unstructured.Unstructured, objects []*unstructured.Unstructured, o Options) error {
	if object.GetKind() != "Deployment" || object.GetName() != deploy.GatewayServiceAccount || o.Wait == 0 || onHostNetwork(object) {
		return nil
	}
	have, err := c.Get(ctx, object.GroupVersionKind(), object.GetNamespace(), object.GetName())
	if err != nil || have == nil || !onHostNetwork(have) {
		return err
	}
	agents := slices.DeleteFunc(slices.Clone(objects), func(u *unstructured.Unstructured) bool { return u.GetKind() != "DaemonSet" })
	return waitRolledOut(ctx, c, agents, o, "the gateways stay on the host network until each node has the new route agent (--timeout 0 does not wait)")
}

// keepLiqo returns an error if the cluster has Liqo, and the chart would replace Liqo's
// definitions.
func keepLiqo(c *cluster.Cluster, chosen chart.Values) error {
	if chart.Get(chosen, "crds", "liqo") == false || chart.Get(chosen, "crds", "install") == false {
		return nil
	}
	if liqo, err := c.IsLiqo(); err != nil || !liqo {
		return err
	}
	return fmt.Errorf("%s: %w: it has Liqo's kind %s and no Peerings, and the CRDs of Isthmus would replace Liqo's; nothing was changed. "+
		"docs/liqo.md shows how to join a cluster with a Liqo cluster. If Liqo's own networking is off, --set crds.liqo=false installs Isthmus beside it", c, cluster.ErrLiqo, cluster.ForeignClusters)
}
