package gather

import (
	"context"
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// objectKind is a kind of objects to read. If where is everywhere, the kind is cluster-scoped, or
// is read in all namespaces.
type objectKind struct {
	version, kind string
	where         place
	prefix        string // prefix of the objects' names; empty: all objects
}

type place int

const (
	everywhere place = iota
	inInstallation
	inTenants
	inBoth
)

var kinds = []objectKind{
	{"isthmus.net/v1alpha1", "Peering", everywhere, ""},
	{"isthmus.net/v1alpha1", "NodeNetworks", everywhere, ""},
	{"isthmus.net/v1alpha1", "NetworkAllocation", everywhere, ""},
	{"net.liqo.io/v1alpha1", "NetworkConfig", everywhere, ""},
	{"net.liqo.io/v1alpha1", "TunnelEndpoint", everywhere, ""},
	{"net.liqo.io/v1alpha1", "NatMapping", everywhere, ""},
	{"net.liqo.io/v1alpha1", "IpamStorage", everywhere, ""},
	{"v1", "Node", everywhere, ""},
	{"v1", "Pod", inInstallation, ""},
	{"v1", "Service", inInstallation, ""},
	{"v1", "ConfigMap", inInstallation, ""},
	{"v1", "ServiceAccount", inBoth, ""},
	{"v1", "Event", inBoth, ""},
	{"v1", "ResourceQuota", inTenants, ""},
	{"discovery.k8s.io/v1", "EndpointSlice", inInstallation, ""},
	{"apps/v1", "Deployment", inInstallation, ""},
	{"apps/v1", "DaemonSet", inInstallation, ""},
	{"coordination.k8s.io/v1", "Lease", inInstallation, ""},
	{"networking.k8s.io/v1", "NetworkPolicy", inInstallation, ""},
	{"rbac.authorization.k8s.io/v1", "Role", inBoth, ""},
	{"rbac.authorization.k8s.io/v1", "RoleBinding", inBoth, ""},
	{"rbac.authorization.k8s.io/v1", "ClusterRole", everywhere, "isthmus"},
	{"rbac.authorization.k8s.io/v1", "ClusterRoleBinding", everywhere, "isthmus"},
	{"admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", everywhere, "isthmus"},
	{"admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", everywhere, "isthmus"},
	{"flowcontrol.apiserver.k8s.io/v1", "PriorityLevelConfiguration", everywhere, "isthmus"},
}

// objects reads the objects, and makes a file for each kind and namespace.
func (g *gathering) objects(ctx context.Context, tenants []string) {
	for _, k := range kinds {
		var namespaces []string
		switch k.where {
		case everywhere:
			namespaces = []string{""}
		case inInstallation:
			namespaces = []string{g.cluster.Namespace}
		case inTenants:
			namespaces = tenants
		case inBoth:
			namespaces = append([]string{g.cluster.Namespace}, tenants...)
		}
		for _, namespace := range namespaces {
			what := strings.TrimSuffix(k.kind+" in "+namespace, " in ")
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(schema.FromAPIVersionAndKind(k.version, k.kind+"List"))
			if err := g.cluster.Client.List(ctx, list, client.InNamespace(namespace)); err != nil {
				g.miss(what, err)
				continue
			}
			var kept []any
			for i := range list.Items {
				u := &list.Items[i]
				if !strings.HasPrefix(u.GetName(), k.prefix) {
					continue
				}
				g.clean(u)
				kept = append(kept, u.Object)
			}
			if len(kept) > 0 {
				g.yaml(path.Join("objects", namespace, strings.ToLower(k.kind)+".yaml"), kept)
			}
		}
	}
}

// clean removes metadata that is of no use in a bug report, and registers public keys with the
// redactor.
func (g *gathering) clean(u *unstructured.Unstructured) {
	u.SetManagedFields(nil)
	annotations := u.GetAnnotations()
	delete(annotations, corev1.LastAppliedConfigAnnotation)
	u.SetAnnotations(annotations)
	var walk func(any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, inner := range v {
				text, ok := inner.(string)
				switch {
				case ok && (name == "publicKey" || name == "ownPublicKey" || name == "nextPublicKey"):
					g.redact.Public(text)
				case ok && name == "tunnels": // PORT:PUBLICKEY, separated by commas
					for one := range strings.SplitSeq(text, ",") {
						_, key, _ := strings.Cut(one, ":")
						g.redact.Public(key)
					}
				}
				walk(inner)
			}
		case []any:
			for _, inner := range v {
				walk(inner)
			}
		}
	}
	walk(u.Object)
}

func (g *gathering) yaml(name string, v any) {
	text, err := yaml.Marshal(v)
	if err != nil {
		g.miss(name, err)
		return
	}
	g.put(name, text)
}
