package peering

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
)

// InstallOptions are the choices of an installation.
type InstallOptions struct {
	// Identity is who the cluster is to be. An empty ClusterID is the one it has already, or the
	// UID of the namespace kube-system; an empty ClusterName the one it has already.
	Identity v1alpha1.ClusterIdentity
	// Service is the type of the gateway's Service: NodePort, LoadBalancer, or empty for none,
	// where somebody else makes it.
	Service corev1.ServiceType
	// Port is the UDP port of the gateway. It and those that follow, for a gateway of several
	// Tunnels, are the Service's.
	Port    int32
	Tunnels int // 0 means 1
	// MetricsAuth gives the components the rights that --metrics-secure needs.
	MetricsAuth bool
	// Report gets a line for each object.
	Report func(line string)
}

// Install applies the custom resource definitions, the namespace, the rights of the components and
// the identity of the cluster. The identity is for ever: another one than there is already is
// refused, before anything is written.
func (c *Cluster) Install(ctx context.Context, o InstallOptions) error {
	if err := c.readUID(ctx); err != nil {
		return err
	}
	have, err := c.identity(ctx)
	if err != nil {
		return err
	}
	if c.Identity, err = chooseIdentity(have, o.Identity, c.uid); err != nil {
		return fmt.Errorf("%s: %w", c, err)
	}
	files, err := manifests(deploy.Files, c.Namespace)
	if err != nil {
		return err
	}
	if o.MetricsAuth {
		more, err := manifests(deploy.Optional, c.Namespace)
		if err != nil {
			return err
		}
		files = append(files, more...)
	}
	objects := make([]client.Object, 0, len(files)+2)
	for _, m := range files {
		objects = append(objects, m)
	}
	objects = append(objects, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: identityConfigMap, Labels: map[string]string{labelName: identityLabelValue}},
		Data:       map[string]string{keyClusterID: c.Identity.ClusterID, keyClusterName: c.Identity.ClusterName},
	})
	if have != nil { // perhaps it is Liqo's own, under another name
		objects = objects[:len(objects)-1]
	}
	if o.Service != "" {
		objects = append(objects, gatewayService(c.Namespace, o))
	}
	for _, object := range objects {
		outcome, err := c.apply(ctx, object)
		if err != nil {
			return err
		}
		u, err := c.unstructured(object)
		if err != nil {
			return err
		}
		o.Report(fmt.Sprintf("%s: %s %s", c, describe(u), outcome))
	}
	return c.established(ctx, files)
}

// chooseIdentity says who the cluster is from what it is now (nil: nobody yet), what is wished, and
// the UID of kube-system.
func chooseIdentity(have *v1alpha1.ClusterIdentity, wish v1alpha1.ClusterIdentity, uid string) (v1alpha1.ClusterIdentity, error) {
	if have != nil {
		wish = v1alpha1.ClusterIdentity{ClusterID: cmp.Or(wish.ClusterID, have.ClusterID), ClusterName: cmp.Or(wish.ClusterName, have.ClusterName)}
		if wish != *have {
			return wish, fmt.Errorf("it is %s (%s) already, not %s (%s): peers know it by that, so un-peer and delete its ConfigMap first",
				Printable(have.ClusterName), Printable(have.ClusterID), Printable(wish.ClusterName), Printable(wish.ClusterID))
		}
	}
	if wish.ClusterName == "" {
		return wish, errors.New("want --cluster-name, which its peers will call it")
	}
	wish.ClusterID = cmp.Or(wish.ClusterID, uid)
	return wish, checkIdentity(wish)
}

// manifests reads all manifests, in an order in which they can be applied, and moves them into the
// given namespace.
func manifests(files fs.FS, namespace string) ([]*unstructured.Unstructured, error) {
	names, err := fs.Glob(files, "*/*.yaml")
	if err != nil {
		return nil, err
	}
	var all []*unstructured.Unstructured
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
		for {
			u := &unstructured.Unstructured{}
			if err := decoder.Decode(u); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			if err := moveTo(u, namespace); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			all = append(all, u)
		}
	}
	slices.SortStableFunc(all, func(a, b *unstructured.Unstructured) int { return cmp.Compare(rank(a), rank(b)) })
	return all, nil
}

func rank(u *unstructured.Unstructured) int {
	switch u.GetKind() {
	case "Namespace":
		return 0
	case "CustomResourceDefinition":
		return 1
	}
	return 2
}

// moveTo puts the namespace in wherever the manifest says deploy.Namespace.
func moveTo(u *unstructured.Unstructured, namespace string) error {
	if u.GetNamespace() == deploy.Namespace {
		u.SetNamespace(namespace)
	}
	if u.GetKind() == "Namespace" {
		u.SetName(namespace)
	}
	subjects, found, err := unstructured.NestedSlice(u.Object, "subjects")
	if err != nil || !found {
		return err
	}
	for _, s := range subjects {
		if s, ok := s.(map[string]any); ok && s["namespace"] == deploy.Namespace {
			s["namespace"] = namespace
		}
	}
	return unstructured.SetNestedSlice(u.Object, subjects, "subjects")
}

func gatewayService(namespace string, o InstallOptions) *corev1.Service {
	var ports []corev1.ServicePort
	for i := range max(o.Tunnels, 1) {
		port := o.Port + int32(i)
		ports = append(ports, corev1.ServicePort{
			Name: v1alpha1.TunnelPortName(i), Protocol: corev1.ProtocolUDP, Port: port, TargetPort: intstr.FromInt32(port)})
	}
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "isthmus-gateway", Labels: map[string]string{v1alpha1.LabelGateway: "true"}},
		Spec: corev1.ServiceSpec{
			Type:     o.Service,
			Selector: map[string]string{v1alpha1.LabelGateway: v1alpha1.GatewayActive},
			Ports:    ports,
			// The label says which one is active. One that carries on while the API server is away
			// is not ready, and its peers have to reach it when the API server is back.
			PublishNotReadyAddresses: true,
		},
	}
}

// established waits until the custom resources are served, so that whoever comes next finds them.
// The condition is not enough: the API server sets it before it serves the kind, under load by
// seconds.
func (c *Cluster) established(ctx context.Context, manifests []*unstructured.Unstructured) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, m := range manifests {
		if m.GetKind() != "CustomResourceDefinition" {
			continue
		}
		for {
			u := &unstructured.Unstructured{}
			u.SetGroupVersionKind(m.GroupVersionKind())
			if err := c.client.Get(ctx, client.ObjectKeyFromObject(m), u); err != nil {
				return c.explain(describe(m), err)
			}
			if isEstablished(u) && c.serves(ctx, u) {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s: %s: the API server does not serve it: %w", c, describe(m), ctx.Err())
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

// serves reports whether the kind of a custom resource definition is served. An answer that it may
// not be listed is one of somebody who knows it.
func (c *Cluster) serves(ctx context.Context, crd *unstructured.Unstructured) bool {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, v := range versions {
		version, _ := v.(map[string]any)
		if served, _ := version["served"].(bool); !served {
			continue
		}
		name, _ := version["name"].(string)
		var list unstructured.UnstructuredList
		list.SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: name, Kind: kind + "List"})
		if err := c.client.List(ctx, &list, client.Limit(1)); err != nil && !apierrors.IsForbidden(err) {
			return false
		}
	}
	return true
}

func isEstablished(crd *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(crd.Object, "status", "conditions") // absent at first
	return slices.ContainsFunc(conditions, func(c any) bool {
		condition, ok := c.(map[string]any)
		return ok && condition["type"] == "Established" && condition["status"] == "True"
	})
}
