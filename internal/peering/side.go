package peering

import (
	"strconv"

	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

const (
	// peerAccount is the name of the ServiceAccount that the peer uses, in a tenant namespace. Its
	// Role and RoleBinding have the same name. Admission policies recognise the account by this
	// name.
	peerAccount = "isthmus-peer"
	// managerRole is the name of the Role and RoleBinding, in a tenant namespace, that let our
	// manager read its identity at the peer and renew it.
	managerRole = "isthmus-manager-identity"
	// peerPrecedence puts the FlowSchema of a peer before the FlowSchemas for all
	// ServiceAccounts (900 and 9000).
	peerPrecedence = 850
)

// A side is one cluster of a peering. It has the parameters of the objects to create in this
// cluster.
type side struct {
	*cluster.Cluster
	peer      *side
	namespace string            // the tenant namespace in this cluster
	secret    string            // name of the Secret with our identity at the peer, in the tenant namespace
	peering   *isthmus.Peering  // the existing Peering, or the one to create
	exists    bool              // whether the Peering exists
	pinned    map[string]string // annotations that identify the peer's cluster
	another   bool              // the peer is another cluster than the pinned one
	claims    Claims            // a person's choices about the peer's claim
	shares    bool              // this cluster shares services: `isthmus install --services`
	inBand    bool              // the managers of both sides use the tunnel
	inBandCA  []byte            // with inBand: the certificates, in PEM, with which the peer's Pods verify their API server
	carried   bool              // with inBand: the peer has a copy of our NetworkConfig that requests in-band
	uncarried error             // error of the last carry
	services  []string          // namespaces whose services a person chose to share with the peer; nil: no change
}

// New returns a new Peering with a cluster. local and remote are the tenant namespaces here and at
// the peer.
func New(name string, peer v1alpha1.ClusterIdentity, local, remote string) *isthmus.Peering {
	return &isthmus.Peering{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: ours()},
		Spec: isthmus.PeeringSpec{
			Cluster:            peer,
			TenantNamespace:    isthmus.TenantNamespace{Local: local, Remote: remote},
			IdentitySecretName: isthmus.DefaultIdentitySecret,
		},
	}
}

func ours() map[string]string { return map[string]string{cluster.LabelManagedBy: cluster.ManagedBy} }

// tenantNamespace returns the namespace of the peering, with Liqo's labels.
func (s *side) tenantNamespace() *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace, Labels: map[string]string{
		v1alpha1.LabelTenantClusterID: s.peer.Identity.ClusterID,
		v1alpha1.LabelTenantNamespace: "true",
	}}}
}

// rights returns the objects with the rights in the tenant namespace: those of the peer, and those
// of our manager to its identity at the peer.
func (s *side) rights() []client.Object { return append(s.peerRights(), s.managerRights()...) }

// peerRights returns the objects with the peer's rights. RBAC restricts updates to the name of the
// peer's copy, which is our unique name. So the peer cannot change our original in the same
// namespace.
func (s *side) peerRights() []client.Object {
	services := s.serviceRules("get", "update", "delete")
	if s.shares {
		services = append(services, rbacv1.PolicyRule{APIGroups: []string{isthmus.GroupVersion.Group}, Resources: []string{"peerservices"}, Verbs: []string{"create"}})
	}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: s.inTenant(peerAccount), AutomountServiceAccountToken: new(bool)},
		s.peerRole(append(append(s.copyRules("get", "update", "delete"), services...), rbacv1.PolicyRule{
			// RBAC cannot restrict the name of an object to create.
			APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"networkconfigs"}, Verbs: []string{"create"},
		}, rbacv1.PolicyRule{
			// Lets the peer renew its token before the token expires.
			APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, ResourceNames: []string{peerAccount}, Verbs: []string{"create"},
		}, rbacv1.PolicyRule{
			// Lets the peer follow changes of our API server's certificate authority.
			APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{isthmus.ConfigMapRootCA}, Verbs: []string{"get"},
		})),
		&rbacv1.RoleBinding{ObjectMeta: s.inTenant(peerAccount), RoleRef: roleRef(peerAccount),
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: s.namespace, Name: peerAccount}}},
		s.flowSchema(),
	}
}

// flowSchema assigns all requests of the peer to the priority level of peers, which has few
// seats.
func (s *side) flowSchema() *flowcontrolv1.FlowSchema {
	all := []string{"*"}
	return &flowcontrolv1.FlowSchema{
		ObjectMeta: metav1.ObjectMeta{Name: s.namespace, Labels: ours()},
		Spec: flowcontrolv1.FlowSchemaSpec{
			PriorityLevelConfiguration: flowcontrolv1.PriorityLevelConfigurationReference{Name: deploy.PeerPriority},
			MatchingPrecedence:         peerPrecedence,
			DistinguisherMethod:        &flowcontrolv1.FlowDistinguisherMethod{Type: flowcontrolv1.FlowDistinguisherMethodByUserType},
			Rules: []flowcontrolv1.PolicyRulesWithSubjects{{
				Subjects: []flowcontrolv1.Subject{{Kind: flowcontrolv1.SubjectKindServiceAccount,
					ServiceAccount: &flowcontrolv1.ServiceAccountSubject{Namespace: s.namespace, Name: peerAccount}}},
				ResourceRules:    []flowcontrolv1.ResourcePolicyRule{{Verbs: all, APIGroups: all, Resources: all, ClusterScope: true, Namespaces: all}},
				NonResourceRules: []flowcontrolv1.NonResourcePolicyRule{{Verbs: all, NonResourceURLs: all}},
			}},
		},
	}
}

// partingRole has the rights that the peer keeps while both sides tear down: to read and delete its
// objects. The peer cannot create or update them, so it cannot delay the teardown.
func (s *side) partingRole() *rbacv1.Role {
	return s.peerRole(append(s.copyRules("get", "delete"), s.serviceRules("get", "delete")...))
}

func (s *side) peerRole(rules []rbacv1.PolicyRule) *rbacv1.Role {
	return &rbacv1.Role{ObjectMeta: s.inTenant(peerAccount), Rules: rules}
}

// copyRules returns the rules that allow the given verbs for the peer's copy of its NetworkConfig.
// Lists and watches select by label, so RBAC cannot restrict them to the copy's name.
func (s *side) copyRules(verbs ...string) []rbacv1.PolicyRule {
	group, resource := []string{v1alpha1.GroupVersion.Group}, []string{"networkconfigs"}
	return []rbacv1.PolicyRule{
		{APIGroups: group, Resources: resource, Verbs: []string{"list", "watch"}},
		{APIGroups: group, Resources: resource, ResourceNames: []string{s.Identity.UniqueName()}, Verbs: verbs},
	}
}

// serviceRules returns the rules that allow the given verbs for the PeerServices with which the
// peer exports services to us. It returns none if this cluster does not share services.
func (s *side) serviceRules(verbs ...string) []rbacv1.PolicyRule {
	if !s.shares {
		return nil
	}
	group, resource := []string{isthmus.GroupVersion.Group}, []string{"peerservices"}
	names := make([]string, isthmus.PeerServicesShards)
	for i := range names {
		names[i] = isthmus.PeerServicesPrefix + strconv.Itoa(i)
	}
	return []rbacv1.PolicyRule{
		{APIGroups: group, Resources: resource, Verbs: []string{"list", "watch"}},
		{APIGroups: group, Resources: resource, ResourceNames: names, Verbs: verbs},
	}
}

// managerRights returns the objects with the rights of our manager.
func (s *side) managerRights() []client.Object {
	return []client.Object{
		&rbacv1.Role{ObjectMeta: s.inTenant(managerRole), Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{s.secret}, Verbs: []string{"list", "watch", "patch"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: s.inTenant(managerRole), RoleRef: roleRef(managerRole),
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: s.Namespace, Name: deploy.ManagerServiceAccount}}},
	}
}

// inTenant returns the metadata of one of our objects in the tenant namespace.
func (s *side) inTenant(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: s.namespace, Name: name, Labels: ours()}
}

func roleRef(name string) rbacv1.RoleRef {
	return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}
}
