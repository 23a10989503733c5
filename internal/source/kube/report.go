package kube

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// A NodeReporter writes the NodeNetworks object of its node. Kubernetes deletes the object with the
// Node. A NodeReporter only needs the permissions to list Nodes and to create and patch
// NodeNetworks. Its methods do not wait for an unreachable API server, and may be called
// concurrently.
type NodeReporter struct {
	api             client.Client
	namespace, node string
}

// NewNodeReporter returns the NodeReporter of a node. namespace is the installation's
// namespace.
func NewNodeReporter(config *rest.Config, namespace, node string) (*NodeReporter, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, isthmus.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	api, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("path to the API server: %w", err)
	}
	return &NodeReporter{api, namespace, node}, nil
}

// WriteNetworks writes the networks that the node reaches without Isthmus. It writes the refused
// version only when it creates the report, because WriteRefused may have written a newer version.
func (r *NodeReporter) WriteNetworks(ctx context.Context, n fabric.NodeNetworks) error {
	return r.named(writeReport(ctx, r.api, r.namespace, r.node, n))
}

// WriteRefused writes version into an existing report. The node refuses networks of
// NetworkAllocations whose resourceVersion is at most version. 0 removes the field.
func (r *NodeReporter) WriteRefused(ctx context.Context, version int64) error {
	spec := map[string]any{"refusedResourceVersion": version}
	if version == 0 {
		spec["refusedResourceVersion"] = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"managedFields": []any{map[string]any{}}}, "spec": spec}) // one empty entry removes all managedFields
	if err != nil {
		return err
	}
	report := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: r.node}} // keeps the response short: thousands of nodes send this patch for each allocation
	report.SetGroupVersionKind(isthmus.GroupVersion.WithKind("NodeNetworks"))
	return r.named(r.api.Patch(ctx, report, client.RawPatch(types.MergePatchType, patch)))
}

func (r *NodeReporter) named(err error) error {
	switch {
	case meta.IsNoMatchError(err):
		err = fmt.Errorf("the API server does not serve NodeNetworks; install the CRDs (`isthmus install`): %w", err)
	case apierrors.IsInvalid(err):
		err = fmt.Errorf("the installed CRD of NodeNetworks rejects the report; install the CRDs of this version, which an upgrade with crds.install=false leaves out: %w", err)
	}
	if err != nil {
		return fmt.Errorf("NodeNetworks %s/%s: %w", r.namespace, r.node, err)
	}
	return nil
}

func writeReport(ctx context.Context, api client.Client, namespace, node string, n fabric.NodeNetworks) error {
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	if err := api.List(ctx, nodes, client.MatchingFields{"metadata.name": node}); err != nil {
		return fmt.Errorf("its Node: %w", err)
	}
	if len(nodes.Items) != 1 {
		return fmt.Errorf("no Node is called %q", node)
	}
	report := &isthmus.NodeNetworks{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: node, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "Node", Name: node, UID: nodes.Items[0].UID},
		}},
		Spec: n.Spec(),
	}
	// The patch contains every field, so that an empty field removes the old value.
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"ownerReferences": report.OwnerReferences},
		"spec": map[string]any{"networks": append([]string{}, report.Spec.Networks...), "resolvers": append([]string{}, report.Spec.Resolvers...),
			"overlaySources": append([]string{}, report.Spec.OverlaySources...),
			"routes":         append([]isthmus.NodeRoute{}, report.Spec.Routes...),
			"problems":       append([]isthmus.NodeProblem{}, report.Spec.Problems...),
			"brokenOverlay":  report.Spec.BrokenOverlay},
	})
	if err != nil {
		return err
	}
	err = api.Patch(ctx, report.DeepCopy(), client.RawPatch(types.MergePatchType, patch))
	if apierrors.IsNotFound(err) {
		return api.Create(ctx, report)
	}
	return err
}
