package peering

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/internal/safetext"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

// forEachSide calls do for two sides concurrently. It returns the errors of both sides, because a
// person wants to see all errors at once.
func forEachSide(a, b *side, do func(*side) error) error {
	var errs [2]error
	var group sync.WaitGroup
	group.Go(func() { errs[0] = do(a) })
	group.Go(func() { errs[1] = do(b) })
	group.Wait()
	return errors.Join(errs[:]...)
}

// reachable returns an error if the URL of the API server, or of its proxy, works only on this
// machine. It accepts every URL that a person has chosen. flag is the name of the flag that sets
// the URL, for the error.
func reachable(c *cluster.Cluster, flag string) error {
	if c.ServerChosen {
		return nil
	}
	const want = "want %s, a URL at which the manager of the other cluster reaches it"
	u, err := url.Parse(c.Server)
	if err != nil {
		return fmt.Errorf("%s: API server: %w", c, err)
	}
	if thisMachine(u) {
		return fmt.Errorf("%s: the kubeconfig has the API server at %s, an address that only this machine reaches; "+want, c, u.Host, flag)
	}
	switch proxy, err := proxyOf(c); {
	case err != nil:
		return fmt.Errorf("%s: proxy-url: %w", c, err)
	case proxy == nil:
	case thisMachine(proxy):
		return fmt.Errorf("%s: the kubeconfig has a proxy at %s (proxy-url), an address that only this machine reaches; "+want, c, proxy.Host, flag)
	case proxy.User != nil:
		return fmt.Errorf("%s: the proxy-url of the kubeconfig has a user or password, which the other cluster would get: "+want, c, flag)
	}
	return nil
}

// thisMachine reports whether a URL leads each client to the client's own machine. Loopback
// addresses do, and so do unspecified addresses, such as 0.0.0.0 in a kubeconfig of k3d.
func thisMachine(u *url.URL) bool {
	addr, err := netip.ParseAddr(u.Hostname())
	return err == nil && (addr.Unmap().IsLoopback() || addr.Unmap().IsUnspecified()) || u.Hostname() == "localhost"
}

// proxyOf returns the proxy-url of the kubeconfig, or nil if there is none. It also returns nil if
// a person chose the URL at which the other cluster's manager reaches the API server.
func proxyOf(c *cluster.Cluster) (*url.URL, error) {
	if c.ServerChosen || c.Config.Proxy == nil {
		return nil, nil //nolint:nilnil // there is none
	}
	return c.Config.Proxy(&http.Request{URL: &url.URL{Scheme: "https"}}) // the result does not depend on the request
}

// findPeering reads the Peering of s with its peer. If there is none, it prepares one with the
// given name or, if name is empty, with the peer's unique name.
func (s *side) findPeering(ctx context.Context, name string) error {
	var list isthmus.PeeringList
	if err := s.Client.List(ctx, &list); err != nil {
		return s.Explain("Peerings", err)
	}
	identity := s.peer.Identity
	if name == "" {
		name = identity.UniqueName()
	}
	s.peering = New(name, identity, identity.TenantNamespace(), s.Identity.TenantNamespace())
	for i := range list.Items {
		p := &list.Items[i]
		switch {
		case p.Spec.Cluster.ClusterID == identity.ClusterID && s.exists:
			return fmt.Errorf("%s: Peerings %s and %s are for the same cluster %s: delete one", s.Cluster, s.peering.Name, p.Name, s.peer.Cluster)
		case p.Spec.Cluster.ClusterID == identity.ClusterID:
			s.peering, s.exists = p, true
		case p.Name == name:
			return fmt.Errorf("%s: Peering %s is for the cluster %s (%s): choose another name", s.Cluster, p.Name,
				safetext.Of(p.Spec.Cluster.ClusterName), safetext.Of(p.Spec.Cluster.ClusterID))
		}
	}
	s.namespace, s.secret = s.peering.Spec.TenantNamespace.Local, s.peering.Spec.IdentitySecretName
	return nil
}

// checkPeering returns an error if the existing Peering is being deleted, or does not match the
// peer's identity or namespace. A Peering that a person wrote by hand may not match.
func (s *side) checkPeering() error {
	p := s.peering
	switch {
	case !p.DeletionTimestamp.IsZero():
		return fmt.Errorf("%s: Peering %s is being deleted; wait until it is gone, or run `isthmus unpeer`", s.Cluster, p.Name)
	case p.Spec.Cluster != s.peer.Identity:
		return fmt.Errorf("%s: Peering %s: spec.cluster.clusterName is %s, but the peer's name is %s; un-peer first", s.Cluster, p.Name,
			safetext.Of(p.Spec.Cluster.ClusterName), safetext.Of(s.peer.Identity.ClusterName))
	case p.Spec.TenantNamespace.Remote != s.peer.namespace:
		return fmt.Errorf("%s: Peering %s: spec.tenantNamespace.remote is %s, but the namespace at %s is %s; un-peer first", s.Cluster, p.Name,
			p.Spec.TenantNamespace.Remote, s.peer.Cluster, s.peer.namespace)
	}
	return nil
}

// checkNamespace returns an error if the tenant namespace belongs to another cluster or is
// being deleted.
func (s *side) checkNamespace(ctx context.Context) error {
	var n corev1.Namespace
	if err := s.Client.Get(ctx, client.ObjectKey{Name: s.namespace}, &n); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return s.Explain("Namespace "+s.namespace, err)
	}
	if !n.DeletionTimestamp.IsZero() {
		return fmt.Errorf("%s: Namespace %s is still being deleted: try again when it is gone", s.Cluster, s.namespace)
	}
	if id, ok := n.Labels[v1alpha1.LabelTenantClusterID]; ok && id != s.peer.Identity.ClusterID {
		return fmt.Errorf("%s: Namespace %s belongs to the cluster %s (label %s), not to %s", s.Cluster, s.namespace,
			safetext.Of(id), v1alpha1.LabelTenantClusterID, safetext.Of(s.peer.Identity.ClusterID))
	}
	return nil
}

// checkAdmission returns an error if the cluster lacks the admission policies that limit the
// objects of a peer.
func (s *side) checkAdmission(ctx context.Context) error {
	for _, name := range []string{deploy.PeerObjectsPolicy, deploy.PeerTokensPolicy} {
		for _, o := range []client.Object{&admissionv1.ValidatingAdmissionPolicy{}, &admissionv1.ValidatingAdmissionPolicyBinding{}} {
			o.SetName(name)
			if err := s.checkExists(ctx, o); err != nil {
				return err
			}
		}
	}
	level := &flowcontrolv1.PriorityLevelConfiguration{}
	level.Name = deploy.PeerPriority
	return s.checkExists(ctx, level)
}

// checkExists returns an error with the remedy if o does not exist.
func (s *side) checkExists(ctx context.Context, o client.Object) error {
	u, err := s.Unstructured(o)
	if err != nil {
		return err
	}
	err = s.Client.Get(ctx, client.ObjectKeyFromObject(o), o)
	if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
		return fmt.Errorf("%s: %s not found; it limits what peers may write; run `isthmus install --context %s`", s.Cluster, cluster.Describe(u), s.Context)
	}
	return s.Explain(cluster.Describe(u), err)
}

func (s *side) checkManager(ctx context.Context, o PeerOptions) error {
	deadline := time.Now().Add(o.Timeout)
	for reported := false; ; reported = true {
		h, err := cluster.HolderOf(ctx, s.Cluster, cluster.ManagerLease, false)
		switch {
		case err != nil || h.Name != "":
			return err
		case time.Now().After(deadline):
			return fmt.Errorf("%s: no manager is active: %s; start `isthmus manager`, or use --timeout 0 to set up without waiting for one", s.Cluster, h.Problem)
		case !reported:
			o.Report(fmt.Sprintf("%s: waiting for a manager: %s", s.Cluster, h.Problem))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(cluster.PollInterval):
		}
	}
}

// checkRights asks the API server whether the person may perform all later steps. RBAC lets nobody
// grant rights that they do not have, so checkRights also asks about the peer's rights.
func (s *side) checkRights(ctx context.Context) error {
	var wanted []authorizationv1.ResourceAttributes
	want := func(namespace, group, resource string, verbs ...string) {
		resource, sub, _ := strings.Cut(resource, "/")
		for _, verb := range verbs {
			wanted = append(wanted, authorizationv1.ResourceAttributes{Namespace: namespace, Group: group, Resource: resource, Subresource: sub, Verb: verb})
		}
	}
	want("", "", "namespaces", "get", "create", "patch")
	want("", isthmus.GroupVersion.Group, "peerings", "get", "create", "patch")
	want(s.namespace, "", "serviceaccounts", "create", "patch", "delete")
	want(s.namespace, "", "serviceaccounts/token", "create")
	want(s.namespace, "", "secrets", "get", "list", "watch", "create", "patch")
	want(s.namespace, "", "configmaps", "get")
	want("", flowcontrolv1.GroupName, "flowschemas", "create", "patch")
	want("", admissionv1.GroupName, "validatingadmissionpolicies", "get")
	want(s.namespace, rbacv1.GroupName, "roles", "create", "patch")
	want(s.namespace, rbacv1.GroupName, "rolebindings", "create", "patch")
	want(s.namespace, v1alpha1.GroupVersion.Group, "networkconfigs", "get", "list", "watch", "create", "update", "delete")
	if s.shares {
		want(s.namespace, isthmus.GroupVersion.Group, "peerservices", "get", "list", "watch", "create", "update", "delete")
	}

	denied := make([]string, len(wanted))
	errs := make([]error, len(wanted))
	var group sync.WaitGroup
	for i := range wanted {
		group.Go(func() {
			review := authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &wanted[i]}}
			if errs[i] = s.Client.Create(ctx, &review); errs[i] == nil && !review.Status.Allowed {
				denied[i] = wanted[i].Verb + " " + wanted[i].Resource
				if wanted[i].Subresource != "" {
					denied[i] += "/" + wanted[i].Subresource
				}
			}
		})
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return s.Explain("review of your rights", err)
		}
	}
	var missing []string
	for _, d := range denied {
		if d != "" {
			missing = append(missing, d)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s: you are not allowed to %s (namespaced objects in %s)", s.Cluster, strings.Join(missing, ", "), s.namespace)
	}
	return nil
}
