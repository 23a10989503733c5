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

// NodeReporter returns a function that writes what a node reaches without us into the NodeNetworks
// of its name, which goes when the Node does. It asks for no more than the rights to list Nodes and
// to create and patch NodeNetworks, and does not wait for an API server that is away.
func NodeReporter(config *rest.Config, namespace, node string) (func(context.Context, fabric.NodeNetworks) error, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, isthmus.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	api, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("way to the API server: %w", err)
	}
	return func(ctx context.Context, n fabric.NodeNetworks) error {
		err := writeReport(ctx, api, namespace, node, n)
		if meta.IsNoMatchError(err) {
			err = fmt.Errorf("the API server does not know NodeNetworks; install the CRDs (`isthmus install`): %w", err)
		}
		if err != nil {
			return fmt.Errorf("NodeNetworks %s/%s: %w", namespace, node, err)
		}
		return nil
	}, nil
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
	// A patch names each list, so that an empty one takes away what is there.
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"ownerReferences": report.OwnerReferences},
		"spec":     map[string]any{"networks": append([]string{}, report.Spec.Networks...), "resolvers": append([]string{}, report.Spec.Resolvers...)},
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
