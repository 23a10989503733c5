// Package owncluster connects a component to the API server of its own cluster, and reads the
// identity of that cluster.
package owncluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// RESTConfig returns the configuration for the API server, from a kubeconfig file. If the path is
// empty, it uses the ServiceAccount of the Pod.
func RESTConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("this process does not run in a Pod (KUBERNETES_SERVICE_HOST is not set); want --kubeconfig FILE")
		}
		return config, err
	}
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	return config, nil
}

// Label of the ConfigMap with the identity of the cluster. Liqo or `isthmus install` creates
// it.
const (
	label      = "app.kubernetes.io/name"
	labelValue = "clusterid-configmap"
)

// ErrUnknown is returned when the API server has answered, but there is no identity.
var ErrUnknown = errors.New("the identity of this cluster is unknown")

// Identify returns the identity of this cluster. It reads empty fields of configured from the
// ConfigMap in the namespace of the installation. If the ConfigMap has no ID either, the ID is the
// UID of the namespace kube-system, which never changes. The name may stay empty.
func Identify(ctx context.Context, reader client.Reader, namespace string, configured v1alpha1.ClusterIdentity) (id v1alpha1.ClusterIdentity, err error) {
	id = configured
	if id.ClusterID == "" || id.ClusterName == "" {
		var list corev1.ConfigMapList
		if err := reader.List(ctx, &list, client.InNamespace(namespace), client.MatchingLabels{label: labelValue}); err != nil {
			return id, fmt.Errorf("ConfigMap with label %s=%s in %s: %w", label, labelValue, namespace, err)
		}
		if len(list.Items) > 1 {
			return id, fmt.Errorf("%w: namespace %s has %d ConfigMaps with label %s=%s; want one, or --cluster-id and --cluster-name",
				ErrUnknown, namespace, len(list.Items), label, labelValue)
		}
		for _, cm := range list.Items {
			if id.ClusterID == "" {
				id.ClusterID = cm.Data["CLUSTER_ID"]
			}
			if id.ClusterName == "" {
				id.ClusterName = cm.Data["CLUSTER_NAME"]
			}
		}
	}
	if id.ClusterID == "" {
		var ns corev1.Namespace
		if err := reader.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, &ns); err != nil {
			return id, fmt.Errorf("UID of namespace kube-system: %w", err)
		}
		id.ClusterID = string(ns.UID)
	}
	if wrong := fabric.CheckClusterID(id.ClusterID); wrong != "" {
		return id, fmt.Errorf("%w: cluster ID %s", ErrUnknown, wrong)
	}
	return id, nil
}

// Flag returns the value of the command-line flag --name=value of the first Pod that has this flag,
// or "" if no Pod has it. The static Pods of a control plane have their flags in this form.
func Flag(pods []corev1.Pod, name string) string {
	for i := range pods {
		for _, container := range pods[i].Spec.Containers {
			for _, arg := range slices.Concat(container.Command, container.Args) {
				if value, ok := strings.CutPrefix(arg, "--"+name+"="); ok {
					return value
				}
			}
		}
	}
	return ""
}
