package peering

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// A teardown is the progress of removing a peering from one cluster.
type teardown struct {
	*cluster.Cluster
	peer      v1alpha1.ClusterIdentity
	peering   string // name of the Peering; empty if it is already deleted
	namespace string // tenant namespace; empty if none was found
	secret    string // name of the Secret with our identity at the peer, in the tenant namespace
	remains   string // description of our objects that stay at the peer if nobody waits
	waitsFor  string // last reason for waiting, with the cluster's name
	reported  string // last reported text
	inBand    bool   // spec.inBand
	carried   bool   // the peering was in-band, so the managers lose the tunnel: this command removes both managers' objects at the peer
	abandoned bool   // the lack of a manager has been reported
}

// findTeardowns finds the peering that o names, or its remains, in one or both clusters.
func findTeardowns(ctx context.Context, local, remote *cluster.Cluster, o UnpeerOptions) ([]*teardown, error) {
	if remote == nil {
		if local.Identity.ClusterID == "" { // Uninstall continues without an identity
			if err := local.Identify(ctx); err != nil {
				return nil, err
			}
		}
		f, err := teardownOf(ctx, local, func(p *isthmus.Peering) bool { return p.Name == o.Name || p.Spec.Cluster.ClusterName == o.Name },
			func(n *corev1.Namespace) bool {
				return strings.TrimPrefix(n.Name, tenantPrefix) == o.Name || cutHash(n.Name) == tenantPrefix+o.Name
			})
		if err != nil {
			return nil, err
		}
		if f.peer.ClusterName == "" {
			f.peer.ClusterName = o.Name
		}
		return []*teardown{f}, nil
	}
	a, b := &side{Cluster: local}, &side{Cluster: remote}
	if err := forEachSide(a, b, func(s *side) error { return s.Identify(ctx) }); err != nil {
		return nil, err
	}
	if err := cluster.Distinct(local, remote); err != nil {
		return nil, err
	}
	var found []*teardown
	for _, pair := range [][2]*cluster.Cluster{{local, remote}, {remote, local}} {
		peer := pair[1].Identity
		f, err := teardownOf(ctx, pair[0], func(p *isthmus.Peering) bool { return p.Spec.Cluster.ClusterID == peer.ClusterID },
			func(n *corev1.Namespace) bool { return n.Labels[v1alpha1.LabelTenantClusterID] == peer.ClusterID })
		if err != nil {
			return nil, err
		}
		if o.Name != "" && pair[0] == local && f.peering != "" && o.Name != f.peering && o.Name != peer.ClusterName {
			return nil, fmt.Errorf("%s: the Peering with %s is %s, not %s", local, remote, f.peering, safetext.Of(o.Name))
		}
		f.peer = peer
		found = append(found, f)
	}
	return found, nil
}

const tenantPrefix = "liqo-tenant-"

// cutHash removes the hexadecimal digits that make a cluster's name unique.
func cutHash(name string) string {
	if i := strings.LastIndexByte(name, '-'); i >= 0 {
		return name[:i]
	}
	return name
}

// teardownOf finds the Peering for which match returns true. If there is none, because an earlier
// run deleted it, teardownOf finds the tenant namespace for which matchNamespace returns true.
func teardownOf(ctx context.Context, c *cluster.Cluster, match func(*isthmus.Peering) bool, matchNamespace func(*corev1.Namespace) bool) (*teardown, error) {
	f := &teardown{Cluster: c, secret: isthmus.DefaultIdentitySecret}
	var list isthmus.PeeringList
	if err := c.Client.List(ctx, &list); err != nil {
		return nil, c.Explain("Peerings", err)
	}
	for i := range list.Items {
		p := &list.Items[i]
		if !match(p) {
			continue
		}
		if f.peering != "" {
			return nil, fmt.Errorf("%s: the name matches the Peerings %s and %s; use the name of one Peering", c, f.peering, p.Name)
		}
		f.peering, f.peer, f.namespace, f.secret = p.Name, p.Spec.Cluster, p.Spec.TenantNamespace.Local, p.Spec.IdentitySecretName
		f.remains, f.inBand = RemainsOf(ctx, c, p), p.Spec.InBand
	}
	if f.peering != "" {
		return f, nil
	}
	var namespaces corev1.NamespaceList
	if err := c.Client.List(ctx, &namespaces, client.MatchingLabels{v1alpha1.LabelTenantNamespace: "true", cluster.LabelManagedBy: cluster.ManagedBy}); err != nil {
		return nil, c.Explain("Namespaces", err)
	}
	for i := range namespaces.Items {
		if matchNamespace(&namespaces.Items[i]) {
			if f.namespace != "" {
				return nil, fmt.Errorf("%s: the name matches the namespaces %s and %s; use one of these names without liqo-tenant-", c, f.namespace, namespaces.Items[i].Name)
			}
			f.namespace = namespaces.Items[i].Name
		}
	}
	return f, nil
}

// RemainsOf describes our objects at the peer that stay there if nobody waits for their deletion.
func RemainsOf(ctx context.Context, c *cluster.Cluster, p *isthmus.Peering) string {
	server := "its API server"
	var secret corev1.Secret
	key := client.ObjectKey{Namespace: p.Spec.TenantNamespace.Local, Name: p.Spec.IdentitySecretName}
	if err := c.Client.Get(ctx, key, &secret); err == nil { // an error is ignored: without the Secret, only the server's name is missing
		if config, err := clientcmd.Load(secret.Data[isthmus.SecretKubeconfig]); err == nil && config.Contexts[config.CurrentContext] != nil {
			if cluster := config.Clusters[config.Contexts[config.CurrentContext].Cluster]; cluster != nil {
				server = safetext.Of(cluster.Server)
			}
		}
	}
	return fmt.Sprintf("at %s, %s: NetworkConfig %s in namespace %s, its Peering, and the other objects in that namespace",
		safetext.Of(p.Spec.Cluster.ClusterName), server, p.Spec.Cluster.UniqueName(), p.Spec.TenantNamespace.Remote)
}

// side returns the cluster in the form that the functions of Peer accept.
func (f *teardown) side() *side {
	return &side{Cluster: f.Cluster, peer: &side{Cluster: &cluster.Cluster{Identity: f.peer}}, namespace: f.namespace, secret: f.secret}
}

// revokeRights revokes the peer's rights. Unless all is true, the peer keeps the rights to delete
// its own objects here.
func (f *teardown) revokeRights(ctx context.Context, o UnpeerOptions, all bool) error {
	if f.namespace == "" {
		return nil
	}
	s := f.side()
	if !all {
		var role rbacv1.Role
		err := f.Client.Get(ctx, client.ObjectKey{Namespace: f.namespace, Name: peerAccount}, &role)
		if apierrors.IsNotFound(err) || err == nil && role.Labels[cluster.LabelManagedBy] != cluster.ManagedBy {
			return nil
		}
		if err == nil {
			s.shares = slices.ContainsFunc(role.Rules, func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "peerservices") })
			_, err = s.Apply(ctx, s.partingRole())
		}
		return f.Explain("Role "+f.namespace+"/"+peerAccount, err)
	}
	revoked, err := f.deleteOurs(ctx, s.peerRights()...)
	if err != nil {
		return err
	}
	if revoked {
		o.Report(fmt.Sprintf("%s: the rights of %s here are revoked", f.Cluster, safetext.Of(f.peer.ClusterName)))
	}
	return nil
}

func (f *teardown) deletePeering(ctx context.Context, o UnpeerOptions) error {
	if f.peering == "" {
		return nil
	}
	p := &isthmus.Peering{}
	p.Name = f.peering
	if o.Force || f.carried {
		value := "true"
		if f.carried {
			value = isthmus.ForceCarried
		}
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, isthmus.AnnotationForce, value)
		err := f.Client.Patch(ctx, p.DeepCopy(), client.RawPatch(types.MergePatchType, patch), client.FieldOwner(cluster.FieldManager))
		if client.IgnoreNotFound(err) != nil {
			return f.Explain("annotate Peering "+f.peering, err)
		}
	}
	if o.Force {
		o.Report(fmt.Sprintf("%s: not waiting for %s; our objects may remain %s", f.Cluster, safetext.Of(f.peer.ClusterName), f.remains))
	}
	if err := f.Client.Delete(ctx, p); client.IgnoreNotFound(err) != nil {
		return f.Explain("delete Peering "+f.peering, err)
	}
	o.Report(fmt.Sprintf("%s: Peering %s deleted", f.Cluster, f.peering))
	return nil
}

// waitPeeringDeleted waits until the manager has removed its objects. If no manager is active and
// o.Force is set, waitPeeringDeleted removes these objects itself. In that case the networks of the
// peer stay allocated, and nodes refuse packets for them, until the next manager releases them
// because no object names the peer.
func (f *teardown) waitPeeringDeleted(ctx context.Context, o UnpeerOptions) (string, error) {
	if f.peering == "" {
		return "", nil
	}
	var p isthmus.Peering
	err := f.Client.Get(ctx, client.ObjectKey{Name: f.peering}, &p)
	if apierrors.IsNotFound(err) {
		return "the manager's objects are gone", nil
	}
	if err != nil {
		return "", f.Explain("Peering "+f.peering, err)
	}
	if o.Force {
		manager, err := cluster.HolderOf(ctx, f.Cluster, cluster.ManagerLease, false)
		if err != nil {
			return "", err
		}
		if manager.Name == "" && !f.abandoned {
			f.abandoned = true
			o.Report(fmt.Sprintf("%s: no manager is active (%s), so this command removes the manager's objects", f.Cluster, manager.Problem))
		}
		if manager.Name == "" {
			if err := f.takeDown(ctx, &p); err != nil {
				return "", err
			}
		}
	}
	what := "waiting for the manager, which removes the finalizers " + strings.Join(p.Finalizers, ", ")
	if c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady); c != nil && c.Reason == isthmus.ReasonUnpeering {
		what = safetext.Of(c.Message)
	}
	return "", &errWaiting{what}
}

// takeDown performs the manager's work for a Peering that is being deleted, without contacting the
// peer. It deletes the TunnelEndpoint and NetworkConfigs, and removes their finalizers. From the
// Peering it removes only our finalizer.
func (f *teardown) takeDown(ctx context.Context, p *isthmus.Peering) error {
	for _, kind := range []string{"TunnelEndpoint", "NetworkConfig"} {
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
		if err := f.Client.DeleteAllOf(ctx, o, client.InNamespace(f.namespace)); client.IgnoreNotFound(err) != nil && !meta.IsNoMatchError(err) {
			return f.Explain("delete "+kind+"s in "+f.namespace, err)
		}
	}
	finalizers := p.Finalizers
	p.Finalizers = nil // keeps Abandon from removing finalizers of the Peering
	if err := Abandon(ctx, f.Cluster, p); err != nil {
		return err
	}
	p.Finalizers = finalizers
	before := p.DeepCopy()
	if !controllerutil.RemoveFinalizer(p, isthmus.FinalizerPeering) {
		return nil
	}
	err := f.Client.Patch(ctx, p, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(cluster.FieldManager))
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) { // after a conflict, the next attempt repeats the patch
		return f.Explain("finalizer of Peering "+p.Name, err)
	}
	return nil
}

// removeRest removes the objects that Peer created: the tenant namespace or, if the namespace
// existed before, only the objects in it.
func (f *teardown) removeRest(ctx context.Context) (string, error) {
	if f.namespace == "" {
		return "", nil
	}
	var n corev1.Namespace
	err := f.Client.Get(ctx, client.ObjectKey{Name: f.namespace}, &n)
	if apierrors.IsNotFound(err) {
		f.namespace = ""
		return "", nil
	}
	if err != nil {
		return "", f.Explain("Namespace "+f.namespace, err)
	}
	secret := &corev1.Secret{}
	secret.Namespace, secret.Name = f.namespace, f.secret
	s := f.side()
	did, err := f.deleteOurs(ctx, append(s.rights(), secret)...)
	if err != nil {
		return "", err
	}
	removed := "rights and identity removed"
	if !did {
		removed = "there were no rights and no identity of `isthmus peer` to remove"
	}
	if err := f.freeNetworkConfigs(ctx); err != nil {
		return "", err
	}
	if f.carried {
		if err := f.deleteCopies(ctx); err != nil {
			return "", err
		}
	}
	if n.Labels[cluster.LabelManagedBy] != cluster.ManagedBy {
		f.namespace = ""
		return fmt.Sprintf("%s; namespace %s stays, because `isthmus peer` did not create it", removed, n.Name), nil
	}
	if err := f.Client.Delete(ctx, &n, client.Preconditions{UID: &n.UID}); client.IgnoreNotFound(err) != nil {
		return "", f.Explain("delete Namespace "+n.Name, err)
	}
	return removed + ", namespace " + n.Name + " deleted", nil
}

// freeNetworkConfigs removes all finalizers from the NetworkConfigs that remain after the
// Peering was deleted. A peer may have added a finalizer that it never removes.
func (f *teardown) freeNetworkConfigs(ctx context.Context) error {
	var list v1alpha1.NetworkConfigList
	if err := f.Client.List(ctx, &list, client.InNamespace(f.namespace)); err != nil {
		return f.Explain("NetworkConfigs in "+f.namespace, err)
	}
	for i := range list.Items {
		nc := &list.Items[i]
		if len(nc.Finalizers) == 0 {
			continue
		}
		err := f.Client.Patch(ctx, nc, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)), client.FieldOwner(cluster.FieldManager))
		if client.IgnoreNotFound(err) != nil {
			return f.Explain("finalizers of NetworkConfig "+nc.Namespace+"/"+nc.Name, err)
		}
	}
	return nil
}

// deleteCopies deletes the objects that the peer's manager has here.
func (f *teardown) deleteCopies(ctx context.Context) error {
	for _, o := range []client.Object{&v1alpha1.NetworkConfig{}, &isthmus.PeerServices{}} {
		if err := f.Client.DeleteAllOf(ctx, o, client.InNamespace(f.namespace)); client.IgnoreNotFound(err) != nil && !meta.IsNoMatchError(err) {
			return f.Explain("delete the peer's objects in "+f.namespace, err)
		}
	}
	return nil
}

// deleteOurs deletes the given objects that have our label. It reports whether there were any.
func (f *teardown) deleteOurs(ctx context.Context, objects ...client.Object) (did bool, err error) {
	for _, o := range objects {
		u, err := f.Unstructured(o)
		if err != nil {
			return did, err
		}
		err = f.Client.Get(ctx, client.ObjectKeyFromObject(o), o)
		if apierrors.IsNotFound(err) || err == nil && o.GetLabels()[cluster.LabelManagedBy] != cluster.ManagedBy {
			continue
		}
		if err != nil {
			return did, f.Explain(cluster.Describe(u), err)
		}
		if err := f.Client.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
			return did, f.Explain("delete "+cluster.Describe(u), err)
		}
		did = true
	}
	return did, nil
}

// waitNamespaceDeleted waits until the namespace is gone, so that the same two clusters can be
// peered again immediately.
func (f *teardown) waitNamespaceDeleted(ctx context.Context) (string, error) {
	if f.namespace == "" {
		return "", nil
	}
	var n corev1.Namespace
	err := f.Client.Get(ctx, client.ObjectKey{Name: f.namespace}, &n)
	if apierrors.IsNotFound(err) {
		return "namespace " + f.namespace + " is gone", nil
	}
	if err != nil {
		return "", f.Explain("Namespace "+f.namespace, err)
	}
	what := "waiting until namespace " + f.namespace + " is gone"
	for _, c := range n.Status.Conditions {
		if c.Status == corev1.ConditionTrue && (c.Type == corev1.NamespaceContentRemaining || c.Type == corev1.NamespaceFinalizersRemaining) {
			what += ": " + safetext.Of(c.Message)
		}
	}
	return "", &errWaiting{what}
}

// Abandon removes all finalizers of a Peering and of Liqo's objects in its tenant namespace.
func Abandon(ctx context.Context, c *cluster.Cluster, p *isthmus.Peering) error {
	free := func(u client.Object, what string) error {
		if len(u.GetFinalizers()) == 0 {
			return nil
		}
		err := c.Client.Patch(ctx, u, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)), client.FieldOwner(cluster.FieldManager))
		if client.IgnoreNotFound(err) != nil {
			return c.Explain("finalizers of "+what, err)
		}
		return nil
	}
	for _, kind := range []string{"NetworkConfig", "TunnelEndpoint", "NatMapping"} {
		var list unstructured.UnstructuredList
		list.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind + "List"))
		if err := c.Client.List(ctx, &list, client.InNamespace(p.Spec.TenantNamespace.Local)); meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			continue
		} else if err != nil {
			return c.Explain(kind+"s in "+p.Spec.TenantNamespace.Local, err)
		}
		for i := range list.Items {
			if err := free(&list.Items[i], cluster.Describe(&list.Items[i])); err != nil {
				return err
			}
		}
	}
	return free(p, "Peering "+p.Name)
}
