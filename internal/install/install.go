// Package install installs Isthmus in a cluster, for `isthmus install`. It detects the properties
// of the cluster, renders the chart, applies it, and waits until the components run. A second run
// restores missing or changed objects and otherwise changes nothing.
package install

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// Options are the choices of an installation.
type Options struct {
	// Identity is the desired identity of the cluster. An empty ClusterID means the existing ID, or
	// the UID of the namespace kube-system. An empty ClusterName means the existing name.
	Identity v1alpha1.ClusterIdentity
	// Values are the chart values that a person chose. The cluster stores them, so that a later run
	// uses them again. Without workloads, Run creates the gateway's Service only if Values request
	// it.
	Values chart.Values
	// Forget ignores the stored values and replaces them.
	Forget bool
	// Force accepts a PodCIDR in Values that contains no node and no Pod.
	Force bool
	// Version is the tag of the image, unless Values contain a tag.
	Version string
	// ConfigureDNS adds the zone of services to the Corefile of CoreDNS if it is true, and removes
	// the zone if it is false. If it is nil, the Corefile does not change.
	ConfigureDNS *bool
	// Wait is how long to wait until the components run. With 0, the command does not wait.
	Wait time.Duration
	// Report is called with a line for each object, each detected value and each reason to wait.
	Report func(line string)
}

// Name and key of the ConfigMap in which Run stores the values that a person chose.
const (
	ConfigMap = "isthmus-install"
	keyValues = "values.yaml"
)

// annotationSchema is an annotation of custom resource definitions. Its value is a number that
// grows with each change of the definition.
const annotationSchema = "isthmus.net/schema"

// Run renders the chart of Isthmus and applies it: the custom resource definitions, the
// namespace, the rights of the components, the identity of the cluster, and the components. The
// identity of a cluster never changes: if o requests another one, Run returns an error before
// it writes anything.
func Run(ctx context.Context, c *cluster.Cluster, o Options) error {
	if err := c.ReadUID(ctx); err != nil {
		return err
	}
	have, where, err := c.ReadIdentity(ctx)
	if err != nil {
		return err
	}
	if err := NotByHelm(ctx, c, "upgrade"); err != nil {
		return err
	}
	if err := NotElsewhere(ctx, c); err != nil {
		return err
	}
	before, known, err := valuesBefore(ctx, c, o)
	if err != nil {
		return err
	}
	chosen := chart.Merge(before, o.Values)
	if o.Identity.ClusterName == "" {
		o.Identity.ClusterName, _ = chart.Get(chosen, "cluster", "name").(string)
	}
	if o.Identity.ClusterID == "" {
		o.Identity.ClusterID, _ = chart.Get(chosen, "cluster", "id").(string)
	}
	if c.Identity, err = chooseIdentity(have, o.Identity, c.UID); err != nil {
		return fmt.Errorf("%s: %w", c, err)
	}
	if err := keepLiqo(c, chosen); err != nil {
		return err
	}
	var found chart.Values
	keep := chosen
	switch {
	case withWorkloads(chosen):
		if found, err = detect(ctx, c, chosen, o); err != nil {
			return err
		}
		if p := chart.Get(found, "networks", "podCIDR"); p != nil { // store the PodCIDR, because peers use it from now on
			keep = chart.Merge(chosen, chart.Values{"networks": chart.Values{"podCIDR": p}})
		}
	case withWorkloads(o.Values): // an earlier installation had no workloads
		o.Report(fmt.Sprintf("%s: installing without the components, as before; --without-workloads=false adds them", c))
	}
	objects, err := chart.Objects(o.chart(c.Namespace, c.Identity, have == nil || where == cluster.IdentityConfigMap, chosen, found))
	if err != nil {
		return fmt.Errorf("%s: %w", c, err)
	}
	if err := checkConflicts(ctx, c, objects); err != nil {
		return err
	}
	services, err := planServices(ctx, c, chosen, o)
	if err != nil {
		return err
	}
	held, err := untilNoneTerminates(ctx, c, append(services.applied(), objects...), withWorkloads(chosen))
	if err != nil {
		return err
	}
	if err := defineServices(ctx, c, services, o.Report); err != nil {
		return err
	}
	for _, object := range objects {
		// Run stores new values after it has applied them, because the API server may refuse them.
		// A first run stores the values of the older installation, even if there are none, before
		// it creates any workload. Otherwise, after an interruption, the next run would mistake the
		// cluster for an installation without workloads.
		if !known && object.GetKind() != "Namespace" {
			if err := remember(ctx, c, before); err != nil {
				return err
			}
			known = true
		}
		if err := agentsFirst(ctx, c, object, objects, o); err != nil {
			return err
		}
		if object.GetKind() == "Namespace" {
			have, err := c.Get(ctx, object.GroupVersionKind(), "", object.GetName())
			if err != nil {
				return err
			}
			if labels := object.GetLabels(); !MadeByUs(have) {
				delete(labels, cluster.LabelName)
				object.SetLabels(labels)
			}
		}
		outcome, err := applyManifest(ctx, c, object)
		if err != nil {
			return err
		}
		o.Report(fmt.Sprintf("%s: %s %s", c, cluster.Describe(object), outcome))
	}
	if err := remember(ctx, c, keep); err != nil {
		return err
	}
	if err := defineAgain(ctx, c, held, o); err != nil {
		return err
	}
	if err := waitEstablished(ctx, c, objects); err != nil {
		return err
	}
	if err := nameServices(ctx, c, services, o.Report); err != nil {
		return err
	}
	if o.Wait > 0 {
		if err := waitRolledOut(ctx, c, objects, o, "everything is applied"); err != nil {
			return err
		}
	}
	if services == nil {
		if err := UnnameServices(ctx, c, false, o.Report); err != nil {
			return err
		}
	}
	return prune(ctx, c, o, chosen, found, objects) // prune comes last, when no component uses these objects any more
}

// prune deletes objects of optional features that an earlier installation had on, and that are off
// now. It keeps objects that another client created under the same name, such as a NetworkPolicy
// applied by hand. If the user may not read some of the objects, prune skips these without an
// error, because they rarely exist.
func prune(ctx context.Context, c *cluster.Cluster, o Options, chosen, found chart.Values, objects []*unstructured.Unstructured) error {
	with, err := WithEveryPart(c, func(on chart.Values) chart.Options {
		return o.chart(c.Namespace, c.Identity, false, chart.Merge(chosen, on), found)
	})
	if err != nil {
		return err
	}
	var unseen []string
	for _, u := range with {
		if slices.ContainsFunc(objects, func(wanted *unstructured.Unstructured) bool { return cluster.Describe(wanted) == cluster.Describe(u) }) {
			continue
		}
		have, err := c.Get(ctx, u.GroupVersionKind(), u.GetNamespace(), u.GetName())
		switch {
		case kubeerr.Forbidden(err):
			unseen = append(unseen, cluster.Describe(u))
		case err != nil:
			return err
		case have != nil && have.GetDeletionTimestamp() == nil && appliedByUs(have):
			if err := DeleteObject(ctx, c, have, o.Report); err != nil {
				return err
			}
		}
	}
	if len(unseen) > 0 {
		o.Report(fmt.Sprintf("%s: cannot check whether an earlier installation left objects to delete; you are not allowed to get %s", c, strings.Join(unseen, ", ")))
	}
	return nil
}

// appliedByUs reports whether Apply has written an object. Other clients may have written it as
// well.
func appliedByUs(u *unstructured.Unstructured) bool {
	return slices.ContainsFunc(u.GetManagedFields(), func(f metav1.ManagedFieldsEntry) bool {
		return f.Manager == cluster.FieldManager && f.Operation == metav1.ManagedFieldsOperationApply
	})
}

// WithEveryPart renders the chart with all optional features on. It renders twice, because the
// NetworkPolicies depend on whether the IPAM has a port.
func WithEveryPart(c *cluster.Cluster, options func(on chart.Values) chart.Options) (all []*unstructured.Unstructured, err error) {
	enabled := chart.Values{"enabled": true}
	for _, port := range []float64{0, 6000} {
		some, err := chart.Objects(options(chart.Values{
			"ipam": chart.Values{"port": port}, "networkPolicy": enabled, "services": enabled,
			"metrics": chart.Values{"enabled": true, "podMonitor": enabled, "prometheusRule": enabled, "dashboard": enabled},
		}))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c, err)
		}
		for _, u := range some {
			if !slices.ContainsFunc(all, func(have *unstructured.Unstructured) bool { return cluster.Describe(have) == cluster.Describe(u) }) {
				all = append(all, u)
			}
		}
	}
	return all, nil
}

// Manifests returns the text of the objects that Run would apply, without reading the cluster.
func (o Options) Manifests(namespace string) (string, error) {
	text, err := chart.Manifests(o.chart(namespace, o.Identity, true, o.Values, nil))
	if err != nil || !WithServices(o.Values) {
		return text, err
	}
	more, err := servicesManifests()
	return more + text, err
}

// chart returns the input of the renderer. Chosen values take precedence over found values, and
// found values over defaults. If createConfigMap is set, the chart has the ConfigMap with the
// identity.
func (o Options) chart(namespace string, who v1alpha1.ClusterIdentity, createConfigMap bool, chosen, found chart.Values) chart.Options {
	usual := chart.Values{"namespace": chart.Values{"create": true}, "cluster": chart.Values{"configMap": createConfigMap}}
	if !withWorkloads(chosen) {
		chart.Set(usual, "", "gateway", "service", "type")
	}
	identity := chart.Values{}
	for key, value := range map[string]string{"name": who.ClusterName, "id": who.ClusterID} {
		if value != "" {
			identity[key] = value
		}
	}
	values := chart.Merge(chart.Merge(usual, found), chosen)
	return chart.Options{Namespace: namespace, AppVersion: o.Version, Values: chart.Merge(values, chart.Values{"cluster": identity})}
}

func withWorkloads(chosen chart.Values) bool { return chart.Get(chosen, "workloads") != false }

// valuesBefore returns the values of earlier installations, which still apply. known reports
// whether the cluster has stored any.
func valuesBefore(ctx context.Context, c *cluster.Cluster, o Options) (before chart.Values, known bool, err error) {
	if o.Forget {
		return nil, false, nil
	}
	if before, err = Remembered(ctx, c); err != nil || before != nil {
		return before, true, err
	}
	before, err = olderValues(ctx, c, o)
	return before, false, err
}

// Remembered returns the values that the cluster has stored, or nil if there are none.
func Remembered(ctx context.Context, c *cluster.Cluster) (chart.Values, error) {
	var m corev1.ConfigMap
	err := c.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: ConfigMap}, &m)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	what := "ConfigMap " + c.Namespace + "/" + ConfigMap
	if err != nil {
		return nil, c.Explain(what, err)
	}
	values, err := chart.ParseValues([]byte(m.Data[keyValues]))
	if err != nil {
		return nil, fmt.Errorf("%s: %s, %s: %w", c, what, keyValues, err)
	}
	// In an earlier version, maxSurge was called maxUnavailable.
	if agents, ok := values["routeAgent"].(chart.Values); ok {
		if value, exists := agents["maxUnavailable"]; exists {
			agents["maxSurge"] = cmp.Or(agents["maxSurge"], value)
			delete(agents, "maxUnavailable")
		}
	}
	return values, nil
}

func remember(ctx context.Context, c *cluster.Cluster, chosen chart.Values) error {
	if len(chosen) == 0 {
		chosen = chart.Values{}
	}
	text, err := yaml.Marshal(chosen)
	if err != nil {
		return err
	}
	_, err = c.Apply(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: ConfigMap, Labels: map[string]string{"app.kubernetes.io/part-of": "isthmus"}},
		Data:       map[string]string{keyValues: string(text)},
	})
	return err
}

// NotByHelm returns an error if Helm manages the installation, because two writers would
// overwrite each other's changes. command is the Helm command to use instead.
func NotByHelm(ctx context.Context, c *cluster.Cluster, command string) error {
	release, err := HelmRelease(ctx, c)
	if err != nil || release == "" {
		return err
	}
	return fmt.Errorf("%s: namespace %s has the Helm release %s, and Helm would not record the changes of this command; run `helm %s %s` instead",
		c, c.Namespace, safetext.Of(release), command, safetext.Of(release))
}

// HelmRelease returns the name of the Helm release to which the installation belongs, or "" if it
// belongs to none.
func HelmRelease(ctx context.Context, c *cluster.Cluster) (string, error) {
	for _, o := range []client.Object{&appsv1.Deployment{}, &corev1.ServiceAccount{}} {
		o.SetNamespace(c.Namespace)
		o.SetName(deploy.ManagerServiceAccount) // the Deployment has this name, too
		err := c.Client.Get(ctx, client.ObjectKeyFromObject(o), o)
		if client.IgnoreNotFound(err) != nil {
			return "", c.Explain(c.Namespace+"/"+o.GetName(), err)
		}
		if release := o.GetAnnotations()["meta.helm.sh/release-name"]; release != "" {
			return release, nil
		}
	}
	return "", nil
}

// applyManifest applies an object of the chart. It keeps a custom resource definition of a newer
// release. An older definition would lack some fields, and the API server would remove these fields
// from every object.
func applyManifest(ctx context.Context, c *cluster.Cluster, u *unstructured.Unstructured) (cluster.Outcome, error) {
	if u.GetKind() != "CustomResourceDefinition" {
		return c.Apply(ctx, u)
	}
	have := &unstructured.Unstructured{}
	have.SetGroupVersionKind(u.GroupVersionKind())
	if err := c.Client.Get(ctx, client.ObjectKeyFromObject(u), have); client.IgnoreNotFound(err) != nil {
		return "", c.Explain(cluster.Describe(u), err)
	}
	ours, err := strconv.Atoi(u.GetAnnotations()[annotationSchema])
	if err != nil {
		return "", fmt.Errorf("%s: annotation %s: %w", cluster.Describe(u), annotationSchema, err)
	}
	if stored, err := strconv.Atoi(have.GetAnnotations()[annotationSchema]); err == nil && stored > ours {
		return cluster.Outcome(fmt.Sprintf("belongs to a newer release (schema %d, not %d) and stays unchanged", stored, ours)), nil
	}
	return c.Apply(ctx, u)
}

// chooseIdentity returns the identity of the cluster: have or, if have is nil, want. If want has no
// ID, the ID is uid, the UID of kube-system. It returns an error if want differs from have or is
// not valid.
func chooseIdentity(have *v1alpha1.ClusterIdentity, want v1alpha1.ClusterIdentity, uid string) (v1alpha1.ClusterIdentity, error) {
	if have != nil {
		want = v1alpha1.ClusterIdentity{ClusterID: cmp.Or(want.ClusterID, have.ClusterID), ClusterName: cmp.Or(want.ClusterName, have.ClusterName)}
		if want != *have {
			return want, fmt.Errorf("this cluster is already installed as %s (%s), not %s (%s); to change its name or ID, un-peer all peers and delete the ConfigMap with its identity first",
				safetext.Of(have.ClusterName), safetext.Of(have.ClusterID), safetext.Of(want.ClusterName), safetext.Of(want.ClusterID))
		}
	}
	if want.ClusterName == "" {
		return want, errors.New("want --cluster-name, the name of this cluster at its peers")
	}
	want.ClusterID = cmp.Or(want.ClusterID, uid)
	return want, cluster.CheckIdentity(want)
}

// waitEstablished waits until the API server serves the custom resources, because the next steps
// need them. The condition Established is not sufficient: under load, the API server sets it
// seconds before it serves the kind.
func waitEstablished(ctx context.Context, c *cluster.Cluster, manifests []*unstructured.Unstructured) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, m := range manifests {
		if m.GetKind() != "CustomResourceDefinition" {
			continue
		}
		for {
			u := &unstructured.Unstructured{}
			u.SetGroupVersionKind(m.GroupVersionKind())
			if err := c.Client.Get(ctx, client.ObjectKeyFromObject(m), u); err != nil {
				return c.Explain(cluster.Describe(m), err)
			}
			if isEstablished(u) && servesKind(ctx, c, u) {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s: %s: the API server does not serve it: %w", c, cluster.Describe(m), ctx.Err())
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

// servesKind reports whether the API server serves the kind of a custom resource definition. An
// answer "forbidden" also proves that it does.
func servesKind(ctx context.Context, c *cluster.Cluster, crd *unstructured.Unstructured) bool {
	for _, kind := range servedKinds(crd) {
		var list unstructured.UnstructuredList
		list.SetGroupVersionKind(kind)
		if err := c.Client.List(ctx, &list, client.Limit(1)); err != nil && !apierrors.IsForbidden(err) {
			return false
		}
	}
	return true
}

// servedKinds returns the kinds of lists in all served versions of a custom resource definition.
func servedKinds(crd *unstructured.Unstructured) (lists []schema.GroupVersionKind) {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, v := range versions {
		version, _ := v.(map[string]any)
		if served, _ := version["served"].(bool); served {
			name, _ := version["name"].(string)
			lists = append(lists, schema.GroupVersionKind{Group: group, Version: name, Kind: kind + "List"})
		}
	}
	return lists
}

func isEstablished(crd *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(crd.Object, "status", "conditions") // there is no status at first
	return slices.ContainsFunc(conditions, func(c any) bool {
		condition, ok := c.(map[string]any)
		return ok && condition["type"] == "Established" && condition["status"] == "True"
	})
}

// DefinitionKind is the kind of custom resource definitions.
var DefinitionKind = schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"}

// MadeByUs reports whether Isthmus has created a namespace, which then has our label. If namespace
// is nil, it does not exist, and we will create it. `isthmus uninstall` deletes a namespace only if
// MadeByUs returns true.
func MadeByUs(namespace *unstructured.Unstructured) bool {
	return namespace == nil || namespace.GetLabels()[cluster.LabelName] == cluster.ManagedBy
}

// DeleteObject deletes an object and reports it.
func DeleteObject(ctx context.Context, c *cluster.Cluster, have *unstructured.Unstructured, report func(string)) error {
	if err := c.Client.Delete(ctx, have, client.PropagationPolicy(metav1.DeletePropagationBackground)); client.IgnoreNotFound(err) != nil {
		return c.Explain("delete "+cluster.Describe(have), err)
	}
	report(fmt.Sprintf("%s: %s deleted", c, cluster.Describe(have)))
	return nil
}
