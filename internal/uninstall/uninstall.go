// Package uninstall removes Isthmus from a cluster, for `isthmus uninstall`: the peerings, the
// workloads, the state that the workloads left in the kernels of nodes, the objects, and the
// definitions. A repeated run continues where the last one ended.
package uninstall

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/install"
	"github.com/isthmus-net/isthmus/internal/peering"
	"github.com/isthmus-net/isthmus/internal/postquantum"
)

// Options are the choices of Run.
type Options struct {
	// Force waits neither for peers nor for unreachable nodes, and reports what remains there.
	Force bool
	// KeepDefinitions keeps the custom resource definitions, and with them the IPAM state.
	KeepDefinitions bool
	// BeforeHelm leaves the objects of a Helm release to Helm, which deletes them next. It still
	// removes the workloads, because running workloads would restore the state that is removed from
	// the nodes.
	BeforeHelm bool
	// Image is the image of the Pods that clean the nodes, for a cluster whose DaemonSet was
	// deleted already.
	Image string
	// Timeout is the maximum time to wait.
	Timeout time.Duration
	// Report is called with a line for each change and for each reason to wait.
	Report func(line string)
}

// uninstallConfigMap stores how to clean the nodes, so that another run can continue an interrupted
// one. Run creates it before it deletes the workloads, and deletes it at the end.
const (
	uninstallConfigMap = "isthmus-uninstall"
	keyCleaning        = "cleaning.json"
)

// keysSecret is the Secret with the gateways' key.
const keysSecret = "wireguard-pubkey"

// Run removes an installation in an order that leaves nothing behind: the peerings, the workloads,
// their state in the kernels of nodes, objects and definitions, and the namespace. Each node
// refuses packets for the peers' networks until its kernel is clean. Each step searches for the
// remaining objects, so the same command continues an interrupted run. It also works if objects
// were deleted before in another order.
func Run(ctx context.Context, c *cluster.Cluster, o Options) error {
	if err := c.ReadUID(ctx); err != nil {
		return err
	}
	if have, _, err := c.ReadIdentity(ctx); err != nil {
		return err
	} else if have != nil {
		c.Identity = *have
	} else {
		c.Identity.ClusterID = c.UID
	}
	byHelm := install.NotByHelm(ctx, c, "uninstall")
	if o.BeforeHelm {
		byHelm = helmUninstalls(ctx, c)
	}
	if byHelm != nil {
		return byHelm
	}
	if err := install.NotElsewhere(ctx, c); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, cluster.ErrNotReady)
	defer cancel()
	objects, err := everyObject(ctx, c)
	if err != nil {
		return err
	}
	installed, err := anyOf(ctx, c, objects)
	if err != nil {
		return err
	}
	if !installed {
		o.Report(fmt.Sprintf("%s: nothing to do: Isthmus is not installed", c))
		return nil
	}
	how, err := howToClean(ctx, c, o)
	if err != nil {
		return err
	}
	o.Report(fmt.Sprintf("%s: uninstalling Isthmus: once a node is clean, its packets for the networks of peers follow the default route, also for networks that were released within the last 24 hours", c))
	if err := unpeerAll(ctx, c, o); err != nil {
		return err
	}
	if err := removeWorkloads(ctx, c, o, objects); err != nil {
		return err
	}
	if how != nil {
		if err := cleanNodes(ctx, c, *how, o); err != nil {
			return err
		}
	}
	if o.BeforeHelm {
		if err := removeInstalled(ctx, c, o); err != nil {
			return err
		}
		o.Report(fmt.Sprintf("%s: Helm deletes the rest", c))
		return nil
	}
	if err := removeObjects(ctx, c, o, objects); err != nil {
		return err
	}
	o.Report(fmt.Sprintf("%s: Isthmus is uninstalled", c))
	return nil
}

// everyObject returns all objects that `isthmus install` may have created, with any options, except
// the namespace.
func everyObject(ctx context.Context, c *cluster.Cluster) ([]*unstructured.Unstructured, error) {
	chosen, err := install.Remembered(ctx, c)
	if err != nil {
		return nil, err
	}
	anyway := chart.Values{ // the other values do not matter, and may even be invalid now
		"cluster": chart.Values{"name": cmp.Or(c.Identity.ClusterName, "x"), "configMap": true}, "workloads": true,
		"gateway": chart.Values{"service": chart.Values{"type": "NodePort"}},
	}
	if definitions := chosen["crds"]; definitions != nil {
		anyway["crds"] = definitions
	}
	return install.WithEveryPart(c, func(on chart.Values) chart.Options {
		return chart.Options{Namespace: c.Namespace, Values: chart.Merge(anyway, on)}
	})
}

func anyOf(ctx context.Context, c *cluster.Cluster, objects []*unstructured.Unstructured) (bool, error) {
	installed, err := installedObjects(ctx, c)
	if err != nil {
		return false, err
	}
	for _, u := range slices.Concat(objects, installed) {
		if have, err := c.Get(ctx, u.GroupVersionKind(), u.GetNamespace(), u.GetName()); err != nil || have != nil {
			return have != nil, err
		}
	}
	return false, nil
}

// installedObjects returns the objects that are in no manifest: those that `isthmus install`,
// `isthmus uninstall` and the components create. It includes a Secret with keys only if our gateway
// created it, because Liqo's Secret with a key has the same name.
func installedObjects(ctx context.Context, c *cluster.Cluster) (all []*unstructured.Unstructured, err error) {
	for _, o := range []struct{ version, kind, name string }{
		{"v1", "ConfigMap", install.ConfigMap}, {"v1", "ConfigMap", uninstallConfigMap},
		{coordinationv1.SchemeGroupVersion.String(), "Lease", cluster.ManagerLease}, {coordinationv1.SchemeGroupVersion.String(), "Lease", deploy.GatewayServiceAccount},
	} {
		u := &unstructured.Unstructured{}
		u.SetAPIVersion(o.version)
		u.SetKind(o.kind)
		u.SetNamespace(c.Namespace)
		u.SetName(o.name)
		all = append(all, u)
	}
	for _, name := range []string{keysSecret, postquantum.SecretName} {
		secret, err := c.Get(ctx, corev1.SchemeGroupVersion.WithKind("Secret"), c.Namespace, name)
		if err != nil {
			return all, err
		}
		if secret != nil && secret.GetLabels()[cluster.LabelManagedBy] == cluster.ManagedBy {
			all = append(all, secret)
		}
	}
	return all, nil
}

func removeInstalled(ctx context.Context, c *cluster.Cluster, o Options) error {
	installed, err := installedObjects(ctx, c)
	if err != nil {
		return err
	}
	for _, u := range installed {
		if err := removeObject(ctx, c, u, o); err != nil {
			return err
		}
	}
	return nil
}

// helmUninstalls returns an error unless Helm is deleting a release in the namespace. Helm records
// the deletion in the release before it runs the hooks (Helm 3.22 and 4.3,
// pkg/action/uninstall.go). If somebody renders the chart and applies it without Helm, the hook
// becomes an ordinary Job, which must not uninstall anything.
func helmUninstalls(ctx context.Context, c *cluster.Cluster) error {
	for _, list := range []client.ObjectList{&corev1.SecretList{}, &corev1.ConfigMapList{}} { // Helm stores releases in objects of one of these kinds
		err := c.Client.List(ctx, list, client.InNamespace(c.Namespace), client.MatchingLabels{"owner": "helm", "status": "uninstalling"})
		if err != nil {
			return c.Explain("releases of Helm in "+c.Namespace, err)
		}
		if meta.LenList(list) > 0 {
			return nil
		}
	}
	return fmt.Errorf("%s: Helm is not uninstalling a release in namespace %s: --before-helm is for the chart's hook; nothing was changed", c, c.Namespace)
}

// unpeerAll separates the cluster from all its peers. If no manager is active, it removes the
// manager's finalizers itself, and our objects at the peers stay there.
func unpeerAll(ctx context.Context, c *cluster.Cluster, o Options) error {
	var list isthmus.PeeringList
	if err := c.Client.List(ctx, &list); meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return c.Explain("Peerings", err)
	}
	if len(list.Items) == 0 {
		return nil
	}
	manager, err := activeManager(ctx, c, o)
	if err != nil {
		return err
	}
	for i := range list.Items {
		p := &list.Items[i]
		if manager.Name == "" {
			o.Report(fmt.Sprintf("%s: no manager is active (%s), so our objects remain %s", c, manager.Problem, peering.RemainsOf(ctx, c, p)))
			if err := peering.Abandon(ctx, c, p); err != nil {
				return err
			}
		}
		err := peering.Unpeer(ctx, c, nil, peering.UnpeerOptions{Name: p.Name, Force: o.Force || manager.Name == "", Timeout: o.Timeout, Report: o.Report, Uninstalls: true})
		if err != nil && !errors.Is(err, cluster.ErrNoPeering) {
			return err
		}
	}
	return nil
}

// managerWait is the time that a manager may take to start, or to take over from another
// manager.
const managerWait = 30 * time.Second

// activeManager returns the holder of the managers' Lease. If the Deployment of managers
// exists, it waits for a holder, because only a manager removes our objects from peers.
func activeManager(ctx context.Context, c *cluster.Cluster, o Options) (h health.Holder, err error) {
	key := client.ObjectKey{Namespace: c.Namespace, Name: deploy.ManagerServiceAccount} // the Deployment has this name, too
	until := time.Now().Add(managerWait)
	err = repeatUntilDone(ctx, c, o, func() (string, error) {
		var err error
		if h, err = cluster.HolderOf(ctx, c, cluster.ManagerLease, false); err != nil || h.Name != "" {
			return "", err
		}
		var managers appsv1.Deployment
		err = c.Client.Get(ctx, key, &managers)
		if apierrors.IsNotFound(err) || managers.DeletionTimestamp != nil || managers.Status.Replicas == 0 || o.Force || time.Now().After(until) {
			return "", nil
		}
		return "waiting for a manager: " + h.Problem, c.Explain("Deployment "+key.String(), err)
	})
	return h, err
}

// removeWorkloads deletes the workloads and waits until their Pods are gone, because a running
// agent would restore the cleaned state.
func removeWorkloads(ctx context.Context, c *cluster.Cluster, o Options, objects []*unstructured.Unstructured) error {
	for _, u := range objects {
		if u.GetKind() == "Deployment" || u.GetKind() == "DaemonSet" {
			if err := removeObject(ctx, c, u, o); err != nil {
				return err
			}
		}
	}
	return repeatUntilDone(ctx, c, o, func() (string, error) {
		var pods corev1.PodList
		if err := c.Client.List(ctx, &pods, client.InNamespace(c.Namespace), client.MatchingLabels{"app.kubernetes.io/part-of": "isthmus"}); err != nil {
			return "", c.Explain("Pods in "+c.Namespace, err)
		}
		for i := range pods.Items {
			p := &pods.Items[i]
			if _, cleaner := p.Labels[labelCleans]; cleaner || metav1.GetControllerOf(p) == nil {
				continue
			}
			if o.Force && p.DeletionTimestamp != nil && !nodeReady(ctx, c, p.Spec.NodeName) {
				continue // the Pod's node has no running kubelet that could end the Pod
			}
			return fmt.Sprintf("waiting until Pod %s on %s has ended", p.Name, p.Spec.NodeName), nil
		}
		return "", nil
	})
}

// removeObjects deletes the remaining objects: rights, policies, definitions and the namespace.
func removeObjects(ctx context.Context, c *cluster.Cluster, o Options, objects []*unstructured.Unstructured) error {
	liqo, err := c.Get(ctx, install.DefinitionKind, "", "foreignclusters.discovery.liqo.io")
	if err != nil {
		return err
	}
	var definitions []*unstructured.Unstructured
	for _, u := range objects {
		switch {
		case u.GetKind() != "CustomResourceDefinition":
			if err := removeObject(ctx, c, u, o); err != nil {
				return err
			}
		case o.KeepDefinitions:
		case liqo != nil && strings.HasSuffix(u.GetName(), "."+v1alpha1.GroupVersion.Group):
			o.Report(fmt.Sprintf("%s: %s stays, because Liqo is installed", c, cluster.Describe(u)))
		default:
			definitions = append(definitions, u)
		}
	}
	for _, u := range definitions {
		if err := removeObject(ctx, c, u, o); err != nil {
			return err
		}
	}
	if err := repeatUntilDone(ctx, c, o, func() (string, error) {
		for _, u := range definitions {
			have, err := c.Get(ctx, install.DefinitionKind, "", u.GetName())
			if err != nil {
				return "", err
			}
			if have != nil {
				return "waiting until " + cluster.Describe(u) + " and its objects are gone", install.Hurry(ctx, c, have)
			}
		}
		return "", nil
	}); err != nil {
		return err
	}
	if err := install.UnnameServices(ctx, c, o.KeepDefinitions, o.Report); err != nil {
		return err
	}
	if err := removeInstalled(ctx, c, o); err != nil {
		return err
	}
	namespace, err := c.Get(ctx, corev1.SchemeGroupVersion.WithKind("Namespace"), "", c.Namespace)
	if err != nil || namespace == nil {
		return err
	}
	if !install.MadeByUs(namespace) {
		o.Report(fmt.Sprintf("%s: namespace %s stays, because `isthmus install` did not create it", c, c.Namespace))
		secret, err := c.Get(ctx, corev1.SchemeGroupVersion.WithKind("Secret"), c.Namespace, keysSecret)
		if err == nil && secret != nil && secret.GetDeletionTimestamp() == nil {
			o.Report(fmt.Sprintf("%s: Secret %s/%s stays, because it lacks the label %s=%s: it belongs to Liqo; delete it if Liqo does not run here",
				c, c.Namespace, keysSecret, cluster.LabelManagedBy, cluster.ManagedBy))
		}
		return err
	}
	var pods corev1.PodList // find foreign Pods, which must not be deleted with the namespace
	if err := c.Client.List(ctx, &pods, client.InNamespace(c.Namespace)); err != nil {
		return c.Explain("Pods in "+c.Namespace, err)
	}
	for i := range pods.Items {
		if p := &pods.Items[i]; p.DeletionTimestamp == nil && p.Labels[labelCleans] == "" {
			o.Report(fmt.Sprintf("%s: namespace %s stays, because Pod %s in it does not belong to Isthmus", c, c.Namespace, safetext.Of(p.Name)))
			return nil
		}
	}
	if err := removeObject(ctx, c, namespace, o); err != nil {
		return err
	}
	return repeatUntilDone(ctx, c, o, func() (string, error) {
		have, err := c.Get(ctx, namespace.GroupVersionKind(), "", c.Namespace)
		if err != nil || have == nil {
			return "", err
		}
		return "waiting until namespace " + c.Namespace + " is gone", nil
	})
}

// removeObject deletes an object and reports it. A missing object is no error.
func removeObject(ctx context.Context, c *cluster.Cluster, u *unstructured.Unstructured, o Options) error {
	have, err := c.Get(ctx, u.GroupVersionKind(), u.GetNamespace(), u.GetName())
	if err != nil || have == nil || have.GetDeletionTimestamp() != nil {
		return err
	}
	return install.DeleteObject(ctx, c, have, o.Report)
}

// repeatUntilDone repeats a step until the step returns no reason to wait. It reports the reason
// whenever it changes.
func repeatUntilDone(ctx context.Context, c *cluster.Cluster, o Options, step func() (waitsFor string, err error)) error {
	reported := ""
	for begun := time.Now(); ; {
		wait, err := step()
		switch {
		case ctx.Err() != nil && !errors.Is(context.Cause(ctx), cluster.ErrNotReady):
			return errors.New("interrupted; run the same command again to continue")
		case ctx.Err() != nil:
			return fmt.Errorf("%w: not uninstalled within %v; run the same command again to continue, with --force if peers or nodes are unreachable\n%s: %s", cluster.ErrNotReady, o.Timeout, c, reported)
		case errors.Is(err, cluster.ErrUnreachable): // the API server may become reachable again
			wait = safetext.Of(err.Error())
		case err != nil:
			return err
		}
		if wait == "" {
			return nil
		}
		if wait != reported && (reported != "" || time.Since(begun) > cluster.Patience) {
			o.Report(fmt.Sprintf("%s: %s", c, wait))
			reported = wait
		}
		select {
		case <-ctx.Done():
			reported = wait
		case <-time.After(cluster.PollInterval):
		}
	}
}
