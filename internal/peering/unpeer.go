package peering

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

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
)

// UnpeerOptions are the choices of Unpeer.
type UnpeerOptions struct {
	// Name is the Peering or the peer's name in the first cluster; empty where the second cluster
	// is given.
	Name string
	// Force does not wait for the peer, and leaves our objects there. If no manager runs, it takes down
	// the manager's objects itself.
	Force bool
	// Timeout bounds the wait.
	Timeout time.Duration
	// Report gets a line for each thing done or waited for.
	Report func(line string)

	uninstalls bool // nodes are cleaned next
}

// A farewell is what there is to be removed from one cluster.
type farewell struct {
	*Cluster
	peer      v1alpha1.ClusterIdentity
	peering   string // its name; empty: gone already
	namespace string // the tenant namespace; empty: not found
	secret    string // the identity at the peer, in it
	remains   string // what stays at the peer when it is not waited for
	waitsFor  string // as last seen, with the cluster
	told      string // as last reported
	abandoned bool   // nobody is at work that takes the Peering down, and that is reported
}

// ErrNoPeering says that a name is neither that of a Peering nor of anything that one left.
var ErrNoPeering = errors.New("no such peering")

// Unpeer parts two clusters, or one from the other where remote is nil: first the peer's rights;
// then the Peerings, whose finalizers the managers remove when all that they made is gone; then
// what else Peer had set up. Between two clusters what is gone already is no error; a name that
// means nothing is ErrNoPeering.
//
// The networks of the peer stay refused on every node, and are allocated to no other cluster, for 24
// hours after that (fabric.ReleaseHold).
//
// Where the peer is not spoken to, or not waited for, nothing of its rights is left before anything
// else happens, whatever becomes of the rest. Where both sides part, each manager needs its own at
// the other to take its NetworkConfig away, and keeps just that.
func Unpeer(ctx context.Context, local, remote *Cluster, o UnpeerOptions) error {
	sides, err := findFarewells(ctx, local, remote, o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, ErrNotReady)
	defer cancel()
	nothing := true
	for _, f := range sides {
		nothing = nothing && f.peering == "" && f.namespace == ""
	}
	if nothing && remote == nil {
		return fmt.Errorf("%s: %w: no Peering is called %s or for a cluster of that name, and no namespace is left of one; `isthmus status` shows the names",
			local, ErrNoPeering, Printable(o.Name))
	}
	if nothing {
		o.Report(fmt.Sprintf("nothing to do: %s and %s are not peered, and nothing is left of a peering", local, remote))
		return nil
	}
	for _, f := range sides {
		if err := f.disarm(ctx, o, remote == nil || o.Force); err != nil {
			return err
		}
	}
	for _, f := range sides {
		if err := f.deletePeering(ctx, o); err != nil {
			return err
		}
	}
	for _, step := range []func(*farewell) (string, error){
		func(f *farewell) (string, error) { return f.peeringGone(ctx, o) },
		func(f *farewell) (string, error) { return f.removeRest(ctx) },
		func(f *farewell) (string, error) { return f.namespaceGone(ctx) },
	} {
		if err := until(ctx, sides, o, step); err != nil {
			return err
		}
	}
	held := "; nodes refuse the peer's networks for 24 hours more"
	if o.uninstalls {
		held = ""
	}
	if len(sides) == 2 {
		o.Report(fmt.Sprintf("%s and %s are not peered any more%s", sides[0].Cluster, sides[1].Cluster, held))
	} else {
		o.Report(fmt.Sprintf("%s is not peered with %s any more%s", sides[0].Cluster, Printable(sides[0].peer.ClusterName), held))
	}
	return nil
}

// findFarewells finds out what is meant and what is left of it.
func findFarewells(ctx context.Context, local, remote *Cluster, o UnpeerOptions) ([]*farewell, error) {
	if remote == nil {
		if local.Identity.ClusterID == "" { // Uninstall goes on where nothing says it any more
			if err := local.Identify(ctx); err != nil {
				return nil, err
			}
		}
		f, err := local.farewellTo(ctx, func(p *isthmus.Peering) bool { return p.Name == o.Name || p.Spec.Cluster.ClusterName == o.Name },
			func(n *corev1.Namespace) bool {
				return strings.TrimPrefix(n.Name, tenantPrefix) == o.Name || cutHash(n.Name) == tenantPrefix+o.Name
			})
		if err != nil {
			return nil, err
		}
		if f.peer.ClusterName == "" {
			f.peer.ClusterName = o.Name
		}
		return []*farewell{f}, nil
	}
	a, b := &side{Cluster: local}, &side{Cluster: remote}
	if err := both(a, b, func(s *side) error { return s.Identify(ctx) }); err != nil {
		return nil, err
	}
	if err := distinct(local, remote); err != nil {
		return nil, err
	}
	var found []*farewell
	for _, pair := range [][2]*Cluster{{local, remote}, {remote, local}} {
		peer := pair[1].Identity
		f, err := pair[0].farewellTo(ctx, func(p *isthmus.Peering) bool { return p.Spec.Cluster.ClusterID == peer.ClusterID },
			func(n *corev1.Namespace) bool { return n.Labels[v1alpha1.LabelTenantClusterID] == peer.ClusterID })
		if err != nil {
			return nil, err
		}
		if o.Name != "" && pair[0] == local && f.peering != "" && o.Name != f.peering && o.Name != peer.ClusterName {
			return nil, fmt.Errorf("%s: the Peering with %s is %s, not %s", local, remote, f.peering, Printable(o.Name))
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

// farewellTo finds the Peering that is meant, or, where that is gone already, the tenant namespace
// that a run before this one left.
func (c *Cluster) farewellTo(ctx context.Context, is func(*isthmus.Peering) bool, left func(*corev1.Namespace) bool) (*farewell, error) {
	f := &farewell{Cluster: c, secret: isthmus.DefaultIdentitySecret}
	var list isthmus.PeeringList
	if err := c.client.List(ctx, &list); err != nil {
		return nil, c.explain("Peerings", err)
	}
	for i := range list.Items {
		p := &list.Items[i]
		if !is(p) {
			continue
		}
		if f.peering != "" {
			return nil, fmt.Errorf("%s: both Peerings %s and %s are meant: say which one", c, f.peering, p.Name)
		}
		f.peering, f.peer, f.namespace, f.secret = p.Name, p.Spec.Cluster, p.Spec.TenantNamespace.Local, p.Spec.IdentitySecretName
		f.remains = c.remainsOf(ctx, p)
	}
	if f.peering != "" {
		return f, nil
	}
	var namespaces corev1.NamespaceList
	if err := c.client.List(ctx, &namespaces, client.MatchingLabels{v1alpha1.LabelTenantNamespace: "true", labelManagedBy: managedBy}); err != nil {
		return nil, c.explain("Namespaces", err)
	}
	for i := range namespaces.Items {
		if left(&namespaces.Items[i]) {
			if f.namespace != "" {
				return nil, fmt.Errorf("%s: both namespaces %s and %s are meant: say which one", c, f.namespace, namespaces.Items[i].Name)
			}
			f.namespace = namespaces.Items[i].Name
		}
	}
	return f, nil
}

// remainsOf names what the peer keeps of us when nobody waits for it.
func (c *Cluster) remainsOf(ctx context.Context, p *isthmus.Peering) string {
	server := "its API server"
	var secret corev1.Secret
	key := client.ObjectKey{Namespace: p.Spec.TenantNamespace.Local, Name: p.Spec.IdentitySecretName}
	if err := c.client.Get(ctx, key, &secret); err == nil { // without it the name of the server is all that is lacking
		if config, err := clientcmd.Load(secret.Data[isthmus.SecretKubeconfig]); err == nil && config.Contexts[config.CurrentContext] != nil {
			if cluster := config.Clusters[config.Contexts[config.CurrentContext].Cluster]; cluster != nil {
				server = Printable(cluster.Server)
			}
		}
	}
	return fmt.Sprintf("at %s, %s: NetworkConfig %s in namespace %s, its Peering, and what else is in that namespace",
		Printable(p.Spec.Cluster.ClusterName), server, p.Spec.Cluster.UniqueName(), p.Spec.TenantNamespace.Remote)
}

// side is the farewell as Peer sees the cluster.
func (f *farewell) side() *side {
	return &side{Cluster: f.Cluster, peer: &side{Cluster: &Cluster{Identity: f.peer}}, namespace: f.namespace, secret: f.secret}
}

// disarm takes the peer's rights away: all of them, or but those to withdraw.
func (f *farewell) disarm(ctx context.Context, o UnpeerOptions, all bool) error {
	if f.namespace == "" {
		return nil
	}
	s := f.side()
	if !all {
		var role rbacv1.Role
		err := f.client.Get(ctx, client.ObjectKey{Namespace: f.namespace, Name: peerAccount}, &role)
		if apierrors.IsNotFound(err) || err == nil && role.Labels[labelManagedBy] != managedBy {
			return nil
		}
		if err == nil {
			s.shares = slices.ContainsFunc(role.Rules, func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "peerservices") })
			_, err = s.apply(ctx, s.partingRole())
		}
		return f.explain("Role "+f.namespace+"/"+peerAccount, err)
	}
	revoked, err := f.deleteOurs(ctx, s.peerRights()...)
	if err != nil {
		return err
	}
	if revoked {
		o.Report(fmt.Sprintf("%s: the rights of %s here are revoked", f.Cluster, Printable(f.peer.ClusterName)))
	}
	return nil
}

func (f *farewell) deletePeering(ctx context.Context, o UnpeerOptions) error {
	if f.peering == "" {
		return nil
	}
	p := &isthmus.Peering{}
	p.Name = f.peering
	if o.Force {
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, isthmus.AnnotationForce)
		err := f.client.Patch(ctx, p.DeepCopy(), client.RawPatch(types.MergePatchType, patch), client.FieldOwner(fieldManager))
		if client.IgnoreNotFound(err) != nil {
			return f.explain("annotate Peering "+f.peering, err)
		}
		o.Report(fmt.Sprintf("%s: does not wait for %s. What may stay %s", f.Cluster, Printable(f.peer.ClusterName), f.remains))
	}
	if err := f.client.Delete(ctx, p); client.IgnoreNotFound(err) != nil {
		return f.explain("delete Peering "+f.peering, err)
	}
	o.Report(fmt.Sprintf("%s: Peering %s deleted", f.Cluster, f.peering))
	return nil
}

// errWaiting says what a step waits for.
type errWaiting struct{ what string }

func (e *errWaiting) Error() string { return e.what }

// patience is how long a step may take before a person is told what it waits for.
const patience = time.Second

// until repeats a step on each side until it is done, and tells what it waits for whenever that
// changes.
func until(ctx context.Context, sides []*farewell, o UnpeerOptions, step func(*farewell) (string, error)) error {
	done := make([]bool, len(sides))
	for begun := time.Now(); ; {
		var waiting []error
		for i, f := range sides {
			if done[i] {
				continue
			}
			report, err := step(f)
			wait := (*errWaiting)(nil)
			switch {
			case err == nil:
				done[i] = true
				if report != "" {
					o.Report(f.String() + ": " + report)
				}
			case ctx.Err() != nil: // what it waits for has been seen before
				waiting = append(waiting, errors.New(cmp.Or(f.waitsFor, f.String()+": "+err.Error())))
			case errors.As(err, &wait) || errors.Is(err, ErrUnreachable): // it may come back
				if f.waitsFor = err.Error(); wait != nil {
					f.waitsFor = f.String() + ": " + wait.what
				}
				waiting = append(waiting, errors.New(f.waitsFor))
				if f.told != f.waitsFor && time.Since(begun) > patience {
					f.told = f.waitsFor
					o.Report(f.told)
				}
			default:
				return err
			}
		}
		if len(waiting) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			if !errors.Is(context.Cause(ctx), ErrNotReady) {
				return errors.New("interrupted: the same command goes on where this one ended")
			}
			hint := ""
			if !o.Force {
				hint = "; with --force nobody waits for the other cluster"
			}
			return fmt.Errorf("%w: not un-peered within %v%s\n%w", ErrNotReady, o.Timeout, hint, errors.Join(waiting...))
		case <-time.After(pollInterval):
		}
	}
}

// peeringGone waits until the manager has taken down its objects. With Force, and without a running
// manager, it takes them down itself. The networks of the peer stay allocated and refused until the next
// manager finds that no object names the peer, and releases them.
func (f *farewell) peeringGone(ctx context.Context, o UnpeerOptions) (string, error) {
	if f.peering == "" {
		return "", nil
	}
	var p isthmus.Peering
	err := f.client.Get(ctx, client.ObjectKey{Name: f.peering}, &p)
	if apierrors.IsNotFound(err) {
		return "what the manager had made is gone", nil
	}
	if err != nil {
		return "", f.explain("Peering "+f.peering, err)
	}
	if o.Force {
		manager, err := f.holderOf(ctx, managerLease, false)
		if err != nil {
			return "", err
		}
		if manager.Name == "" && !f.abandoned {
			f.abandoned = true
			o.Report(fmt.Sprintf("%s: no manager is at work (%s), so what it made is taken down without one", f.Cluster, manager.Problem))
		}
		if manager.Name == "" {
			if err := f.takeDown(ctx, &p); err != nil {
				return "", err
			}
		}
	}
	what := "waiting for the manager, which removes the finalizers " + strings.Join(p.Finalizers, ", ")
	if c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady); c != nil && c.Reason == isthmus.ReasonUnpeering {
		what = Printable(c.Message)
	}
	return "", &errWaiting{what}
}

// takeDown does the manager's work without the peer. It deletes the TunnelEndpoint and NetworkConfigs of a
// Peering that is being deleted, and removes the finalizers that keep them and the Peering. Foreign
// finalizers stay on the Peering.
func (f *farewell) takeDown(ctx context.Context, p *isthmus.Peering) error {
	for _, kind := range []string{"TunnelEndpoint", "NetworkConfig"} {
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
		if err := f.client.DeleteAllOf(ctx, o, client.InNamespace(f.namespace)); client.IgnoreNotFound(err) != nil && !meta.IsNoMatchError(err) {
			return f.explain("delete "+kind+"s in "+f.namespace, err)
		}
	}
	finalizers := p.Finalizers
	p.Finalizers = nil // abandon removes all
	if err := f.abandon(ctx, p); err != nil {
		return err
	}
	p.Finalizers = finalizers
	before := p.DeepCopy()
	if !controllerutil.RemoveFinalizer(p, isthmus.FinalizerPeering) {
		return nil
	}
	err := f.client.Patch(ctx, p, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(fieldManager))
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) { // the next look tries again
		return f.explain("finalizer of Peering "+p.Name, err)
	}
	return nil
}

// removeRest removes what Peer had set up: the tenant namespace, where Peer made it, else what Peer
// put into it.
func (f *farewell) removeRest(ctx context.Context) (string, error) {
	if f.namespace == "" {
		return "", nil
	}
	var n corev1.Namespace
	err := f.client.Get(ctx, client.ObjectKey{Name: f.namespace}, &n)
	if apierrors.IsNotFound(err) {
		f.namespace = ""
		return "", nil
	}
	if err != nil {
		return "", f.explain("Namespace "+f.namespace, err)
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
		removed = "no rights and no identity of `isthmus peer` were left"
	}
	if err := f.freeNetworkConfigs(ctx); err != nil {
		return "", err
	}
	if n.Labels[labelManagedBy] != managedBy {
		f.namespace = ""
		return fmt.Sprintf("%s; namespace %s stays, since `isthmus peer` did not make it", removed, n.Name), nil
	}
	if err := f.client.Delete(ctx, &n, client.Preconditions{UID: &n.UID}); client.IgnoreNotFound(err) != nil {
		return "", f.explain("delete Namespace "+n.Name, err)
	}
	return removed + ", namespace " + n.Name + " deleted", nil
}

// freeNetworkConfigs removes all finalizers of what NetworkConfigs are left, once the Peering is
// gone: nobody is waited for any more, and a peer may have put some there that it never removes.
func (f *farewell) freeNetworkConfigs(ctx context.Context) error {
	var list v1alpha1.NetworkConfigList
	if err := f.client.List(ctx, &list, client.InNamespace(f.namespace)); err != nil {
		return f.explain("NetworkConfigs in "+f.namespace, err)
	}
	for i := range list.Items {
		nc := &list.Items[i]
		if len(nc.Finalizers) == 0 {
			continue
		}
		err := f.client.Patch(ctx, nc, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)), client.FieldOwner(fieldManager))
		if client.IgnoreNotFound(err) != nil {
			return f.explain("finalizers of NetworkConfig "+nc.Namespace+"/"+nc.Name, err)
		}
	}
	return nil
}

// deleteOurs deletes those of the objects that carry our label, and reports whether there were any.
func (f *farewell) deleteOurs(ctx context.Context, objects ...client.Object) (did bool, err error) {
	for _, o := range objects {
		u, err := f.unstructured(o)
		if err != nil {
			return did, err
		}
		err = f.client.Get(ctx, client.ObjectKeyFromObject(o), o)
		if apierrors.IsNotFound(err) || err == nil && o.GetLabels()[labelManagedBy] != managedBy {
			continue
		}
		if err != nil {
			return did, f.explain(describe(u), err)
		}
		if err := f.client.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
			return did, f.explain("delete "+describe(u), err)
		}
		did = true
	}
	return did, nil
}

// namespaceGone waits until the namespace is gone, so that the same two clusters can be peered
// again at once.
func (f *farewell) namespaceGone(ctx context.Context) (string, error) {
	if f.namespace == "" {
		return "", nil
	}
	var n corev1.Namespace
	err := f.client.Get(ctx, client.ObjectKey{Name: f.namespace}, &n)
	if apierrors.IsNotFound(err) {
		return "namespace " + f.namespace + " is gone", nil
	}
	if err != nil {
		return "", f.explain("Namespace "+f.namespace, err)
	}
	what := "waiting until namespace " + f.namespace + " is gone"
	for _, c := range n.Status.Conditions {
		if c.Status == corev1.ConditionTrue && (c.Type == corev1.NamespaceContentRemaining || c.Type == corev1.NamespaceFinalizersRemaining) {
			what += ": " + Printable(c.Message)
		}
	}
	return "", &errWaiting{what}
}
