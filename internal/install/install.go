// Package install puts Isthmus into a cluster: it finds out what the cluster is like, renders the chart,
// applies it, and waits until the components run. A second run changes nothing, or repairs what is missing.
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
	// Identity is who the cluster is to be. An empty ClusterID is the one it has already, or the
	// UID of the namespace kube-system; an empty ClusterName the one it has already.
	Identity v1alpha1.ClusterIdentity
	// Values are those of the chart that a person chose. They are remembered in the cluster, so
	// that whoever installs again need not choose again. Without workloads, the gateway's Service is
	// made only where they ask for it.
	Values chart.Values
	// Forget leaves out what was chosen before.
	Forget bool
	// Force accepts a PodCIDR in Values that contains nothing of the cluster.
	Force bool
	// Version is the tag of the image where Values say nothing of it.
	Version string
	// ConfigureDNS adds the zone of services to the Corefile of CoreDNS, or takes it back; nil changes nothing.
	ConfigureDNS *bool
	// Wait is how long to wait until the components run; 0: do not wait.
	Wait time.Duration
	// Report gets a line for each object, each thing that was found out and each step of the wait.
	Report func(line string)
}

// Where Install remembers the values that a person chose.
const (
	ConfigMap = "isthmus-install"
	keyValues = "values.yaml"
)

// annotationSchema, on a custom resource definition, is a number that grows with each change of it.
const annotationSchema = "isthmus.net/schema"

// Run renders the chart of Isthmus and applies it: the custom resource definitions, the
// namespace, the rights of the components, the identity of the cluster, and the components. The
// identity is for ever: another one than there is already is refused, before anything is written.
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
		if p := chart.Get(found, "networks", "podCIDR"); p != nil { // peers know it from now on
			keep = chart.Merge(chosen, chart.Values{"networks": chart.Values{"podCIDR": p}})
		}
	case withWorkloads(o.Values): // it was said some other time
		o.Report(fmt.Sprintf("%s: without the components, as before; --without-workloads=false makes them", c))
	}
	objects, err := chart.Objects(o.chart(c.Namespace, c.Identity, have == nil || where == cluster.IdentityConfigMap, chosen, found))
	if err != nil {
		return fmt.Errorf("%s: %w", c, err)
	}
	if err := inTheWay(ctx, c, objects); err != nil {
		return err
	}
	services, err := planServices(ctx, c, chosen, o)
	if err != nil {
		return err
	}
	held, err := untilNoneGoes(ctx, c, append(services.applied(), objects...), withWorkloads(chosen))
	if err != nil {
		return err
	}
	if err := defineServices(ctx, c, services, o.Report); err != nil {
		return err
	}
	for _, object := range objects {
		// New values are remembered once they are applied, because the API server may refuse them. But a
		// first installation that is interrupted must not look like one without workloads.
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
	if err := established(ctx, c, objects); err != nil {
		return err
	}
	if err := nameServices(ctx, c, services, o.Report); err != nil {
		return err
	}
	if o.Wait > 0 {
		if err := rolledOut(ctx, c, objects, o, "all is applied"); err != nil {
			return err
		}
	}
	if services == nil {
		if err := UnnameServices(ctx, c, false, o.Report); err != nil {
			return err
		}
	}
	return prune(ctx, c, o, chosen, found, objects) // no component that is wanted uses it
}

// prune deletes what an installation before this one made for parts that may be left out, and now are.
// An object of the same name that somebody else made stays, such as a NetworkPolicy applied by hand, and
// so does one that a person may not see: most clusters have nothing of the kind, so that is no error.
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
		o.Report(fmt.Sprintf("%s: you may not get what would be deleted if an installation before had made it: %s", c, strings.Join(unseen, ", ")))
	}
	return nil
}

// appliedByUs reports whether apply has written an object; others may have, too.
func appliedByUs(u *unstructured.Unstructured) bool {
	return slices.ContainsFunc(u.GetManagedFields(), func(f metav1.ManagedFieldsEntry) bool {
		return f.Manager == cluster.FieldManager && f.Operation == metav1.ManagedFieldsOperationApply
	})
}

// WithEveryPart renders the chart with all parts on that may be left out: twice, since the NetworkPolicies
// are others where the IPAM has a port.
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

// Manifests returns as text what Install would apply in a cluster of which nothing is known.
func (o Options) Manifests(namespace string) (string, error) {
	text, err := chart.Manifests(o.chart(namespace, o.Identity, true, o.Values, nil))
	if err != nil || !WithServices(o.Values) {
		return text, err
	}
	more, err := servicesManifests()
	return more + text, err
}

// chart says what to render: what was chosen goes before what was found, and that before what is
// usual. own says that the identity's ConfigMap is ours.
func (o Options) chart(namespace string, who v1alpha1.ClusterIdentity, own bool, chosen, found chart.Values) chart.Options {
	usual := chart.Values{"namespace": chart.Values{"create": true}, "cluster": chart.Values{"configMap": own}}
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

// valuesBefore returns the values that were chosen in earlier installations and stay in force, and whether the
// cluster remembers any.
func valuesBefore(ctx context.Context, c *cluster.Cluster, o Options) (before chart.Values, known bool, err error) {
	if o.Forget {
		return nil, false, nil
	}
	if before, err = Remembered(ctx, c); err != nil || before != nil {
		return before, true, err
	}
	before, err = valuesOfOlder(ctx, c, o)
	return before, false, err
}

// Remembered returns what was chosen before; nil when nothing says it.
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
	if agents, is := values["routeAgent"].(chart.Values); is { // on how many nodes an upgrade works had this name
		if most, was := agents["maxUnavailable"]; was {
			agents["maxSurge"] = cmp.Or(agents["maxSurge"], most)
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

// NotByHelm keeps two from writing the same objects by turns; command is Helm's for what is wanted.
func NotByHelm(ctx context.Context, c *cluster.Cluster, command string) error {
	release, err := HelmRelease(ctx, c)
	if err != nil || release == "" {
		return err
	}
	return fmt.Errorf("%s: namespace %s has the Helm release %s: run `helm %s %s` instead, since Helm would not know what is changed here",
		c, c.Namespace, safetext.Of(release), command, safetext.Of(release))
}

// HelmRelease is the name of the Helm release that the installation is; empty: it is none.
func HelmRelease(ctx context.Context, c *cluster.Cluster) (string, error) {
	for _, o := range []client.Object{&appsv1.Deployment{}, &corev1.ServiceAccount{}} {
		o.SetNamespace(c.Namespace)
		o.SetName(deploy.ManagerServiceAccount) // the Deployment has the same name
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

// applyManifest applies an object of the chart. A custom resource definition that a newer release
// has written stays: fields that this one does not know would be lost from every object.
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
	if there, err := strconv.Atoi(have.GetAnnotations()[annotationSchema]); err == nil && there > ours {
		return cluster.Outcome(fmt.Sprintf("is of a newer release (schema %d, here %d) and stays", there, ours)), nil
	}
	return c.Apply(ctx, u)
}

// chooseIdentity returns the identity of the cluster: the present one (nil: none yet), or the wanted one, with
// the UID of kube-system as its default ID. A wanted identity that differs from the present one is an error.
func chooseIdentity(have *v1alpha1.ClusterIdentity, want v1alpha1.ClusterIdentity, uid string) (v1alpha1.ClusterIdentity, error) {
	if have != nil {
		want = v1alpha1.ClusterIdentity{ClusterID: cmp.Or(want.ClusterID, have.ClusterID), ClusterName: cmp.Or(want.ClusterName, have.ClusterName)}
		if want != *have {
			return want, fmt.Errorf("it is %s (%s) already, not %s (%s): peers know it by that, so un-peer and delete its ConfigMap first",
				safetext.Of(have.ClusterName), safetext.Of(have.ClusterID), safetext.Of(want.ClusterName), safetext.Of(want.ClusterID))
		}
	}
	if want.ClusterName == "" {
		return want, errors.New("want --cluster-name, which its peers will call it")
	}
	want.ClusterID = cmp.Or(want.ClusterID, uid)
	return want, cluster.CheckIdentity(want)
}

// established waits until the API server serves the custom resources, which the next steps need.
// The condition is not enough: the API server sets it before it serves the kind, under load by
// seconds.
func established(ctx context.Context, c *cluster.Cluster, manifests []*unstructured.Unstructured) error {
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

// servesKind reports whether the kind of a custom resource definition is served. An answer that it may
// not be listed is one of somebody who knows it.
func servesKind(ctx context.Context, c *cluster.Cluster, crd *unstructured.Unstructured) bool {
	for _, kind := range served(crd) {
		var list unstructured.UnstructuredList
		list.SetGroupVersionKind(kind)
		if err := c.Client.List(ctx, &list, client.Limit(1)); err != nil && !apierrors.IsForbidden(err) {
			return false
		}
	}
	return true
}

// served are the kinds of lists of the versions of a custom resource definition that are to be served.
func served(crd *unstructured.Unstructured) (lists []schema.GroupVersionKind) {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, v := range versions {
		version, _ := v.(map[string]any)
		if is, _ := version["served"].(bool); is {
			name, _ := version["name"].(string)
			lists = append(lists, schema.GroupVersionKind{Group: group, Version: name, Kind: kind + "List"})
		}
	}
	return lists
}

func isEstablished(crd *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(crd.Object, "status", "conditions") // absent at first
	return slices.ContainsFunc(conditions, func(c any) bool {
		condition, ok := c.(map[string]any)
		return ok && condition["type"] == "Established" && condition["status"] == "True"
	})
}

// DefinitionKind is that of custom resource definitions.
var DefinitionKind = schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"}

// MadeByUs reports whether we make or have made a namespace: nil, there is none yet. Only such a one is marked, and
// deleted.
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
