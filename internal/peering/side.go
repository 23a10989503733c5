package peering

import (
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
)

const (
	// peerAccount is, in a tenant namespace, the ServiceAccount that the peer
	// uses, its Role, RoleBinding and ResourceQuota.
	peerAccount = "isthmus-peer"
	// managerRole is, in a tenant namespace, the Role and RoleBinding by which
	// our manager reads its identity at the peer.
	managerRole = "isthmus-manager-identity"
	// labelManagedBy marks what we made: nothing else is deleted.
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "isthmus"
	// maxNetworkConfigs is how many NetworkConfigs a tenant namespace may hold:
	// ours, the peer's copy, and some room for an exchange of either.
	maxNetworkConfigs = 4
)

// A side is one cluster of a peering, and what there is to be in it.
type side struct {
	*Cluster
	peer      *side
	namespace string           // the tenant namespace here
	secret    string           // of our identity at the peer, in it
	peering   *isthmus.Peering // what there is to be, or is
	exists    bool             // the Peering is there already
}

// newPeering is the Peering that a cluster gets where it has none.
func newPeering(name string, peer v1alpha1.ClusterIdentity, local, remote string) *isthmus.Peering {
	return &isthmus.Peering{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: ours()},
		Spec: isthmus.PeeringSpec{
			Cluster:            peer,
			TenantNamespace:    isthmus.TenantNamespace{Local: local, Remote: remote},
			IdentitySecretName: isthmus.DefaultIdentitySecret,
		},
	}
}

func ours() map[string]string { return map[string]string{labelManagedBy: managedBy} }

// tenantNamespace is the namespace of the peering, as Liqo labels it.
func (s *side) tenantNamespace() *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace, Labels: map[string]string{
		v1alpha1.LabelTenantClusterID: s.peer.Identity.ClusterID,
		v1alpha1.LabelTenantNamespace: "true",
	}}}
}

// rights are the objects by which the peer may use its NetworkConfigs here and
// nothing else, and our manager read its identity at the peer and nothing else.
func (s *side) rights() []client.Object {
	object := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: s.namespace, Name: name, Labels: ours()}
	}
	role := func(name string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}
	}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: object(peerAccount), AutomountServiceAccountToken: new(bool)},
		&rbacv1.Role{ObjectMeta: object(peerAccount), Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"networkconfigs"},
				Verbs: []string{"get", "list", "watch", "create", "update", "patch", "delete"}},
			// So that the peer can renew its token before it expires.
			{APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, ResourceNames: []string{peerAccount}, Verbs: []string{"create"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: object(peerAccount), RoleRef: role(peerAccount),
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: s.namespace, Name: peerAccount}}},
		&rbacv1.Role{ObjectMeta: object(managerRole), Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{s.secret}, Verbs: []string{"get", "list", "watch", "patch"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: object(managerRole), RoleRef: role(managerRole),
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: s.Namespace, Name: deploy.ManagerServiceAccount}}},
	}
}

// quota keeps the peer from filling our etcd.
func (s *side) quota() *corev1.ResourceQuota {
	return &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: peerAccount, Labels: ours()},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			"count/networkconfigs." + corev1.ResourceName(v1alpha1.GroupVersion.Group): *resource.NewQuantity(maxNetworkConfigs, resource.DecimalSI),
		}},
	}
}
