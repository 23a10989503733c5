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
	// peerAccount is, in a tenant namespace, the ServiceAccount that the peer uses, its Role and
	// RoleBinding. Admission policies know it by this name.
	peerAccount = "isthmus-peer"
	// managerRole is, in a tenant namespace, the Role and RoleBinding by which our manager reads
	// its identity at the peer.
	managerRole = "isthmus-manager-identity"
	// peerPrecedence puts the FlowSchema of a peer before those of all ServiceAccounts, 900 and 9000.
	peerPrecedence = 850
)

// A side is one cluster of a peering, and the desired objects there.
type side struct {
	*cluster.Cluster
	peer      *side
	namespace string            // the tenant namespace here
	secret    string            // of our identity at the peer, in it
	peering   *isthmus.Peering  // desired, or existing
	exists    bool              // the Peering is there already
	pinned    map[string]string // annotations that say which cluster the peer is
	another   bool              // than the one that the Peering was made with
	claims    Claims            // what a person chose about those of the peer
	shares    bool              // services may be shared with peers here: `isthmus install --services`
	inBand    bool              // our manager and the peer's go through the tunnel
	inBandCA  []byte            // of the peer's API server, in PEM, as it is known in its own cluster; with inBand
	carried   bool              // the peer has our NetworkConfig, with inBand
	uncarried error             // why the exchange could not be carried, the last time
	services  []string          // namespaces whose services a person chose to share with the peer; nil: no change
}

// New is the Peering that a cluster gets where it has none.
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

// tenantNamespace is the namespace of the peering, as Liqo labels it.
func (s *side) tenantNamespace() *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace, Labels: map[string]string{
		v1alpha1.LabelTenantClusterID: s.peer.Identity.ClusterID,
		v1alpha1.LabelTenantNamespace: "true",
	}}}
}

// rights are the objects by which the peer may use its NetworkConfig here and nothing else, and our
// manager read its identity at the peer and nothing else.
func (s *side) rights() []client.Object { return append(s.peerRights(), s.managerRights()...) }

// peerRights are the peer's. RBAC knows the name of what is to be written: the peer's copy, which
// has our unique name. Our original beside it is out of reach.
func (s *side) peerRights() []client.Object {
	services := s.serviceRules("get", "update", "delete")
	if s.shares {
		services = append(services, rbacv1.PolicyRule{APIGroups: []string{isthmus.GroupVersion.Group}, Resources: []string{"peerservices"}, Verbs: []string{"create"}})
	}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: s.inTenant(peerAccount), AutomountServiceAccountToken: new(bool)},
		s.peerRole(append(append(s.copyRules("get", "update", "delete"), services...), rbacv1.PolicyRule{
			// A name cannot be demanded of what is not there yet.
			APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"networkconfigs"}, Verbs: []string{"create"},
		}, rbacv1.PolicyRule{
			// So that the peer can renew its token before it expires.
			APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, ResourceNames: []string{peerAccount}, Verbs: []string{"create"},
		}, rbacv1.PolicyRule{
			// So that it can follow the authority of our API server.
			APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{isthmus.ConfigMapRootCA}, Verbs: []string{"get"},
		})),
		&rbacv1.RoleBinding{ObjectMeta: s.inTenant(peerAccount), RoleRef: roleRef(peerAccount),
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: s.namespace, Name: peerAccount}}},
		s.flowSchema(),
	}
}

// flowSchema gives whatever the peer asks for the few seats of peers.
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

// partingRole is what the peer may still do while both sides part: see its copy, and delete it. It
// can write nothing, so it can hold up nothing either.
func (s *side) partingRole() *rbacv1.Role {
	return s.peerRole(append(s.copyRules("get", "delete"), s.serviceRules("get", "delete")...))
}

func (s *side) peerRole(rules []rbacv1.PolicyRule) *rbacv1.Role {
	return &rbacv1.Role{ObjectMeta: s.inTenant(peerAccount), Rules: rules}
}

// copyRules allow the given verbs for the peer's copy. Lists and watches select by label, so they
// are not bound to its name.
func (s *side) copyRules(verbs ...string) []rbacv1.PolicyRule {
	group, resource := []string{v1alpha1.GroupVersion.Group}, []string{"networkconfigs"}
	return []rbacv1.PolicyRule{
		{APIGroups: group, Resources: resource, Verbs: []string{"list", "watch"}},
		{APIGroups: group, Resources: resource, ResourceNames: []string{s.Identity.UniqueName()}, Verbs: verbs},
	}
}

// serviceRules allow the given verbs for the services that the peer exports to us, where we share services.
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

// managerRights are our manager's.
func (s *side) managerRights() []client.Object {
	return []client.Object{
		&rbacv1.Role{ObjectMeta: s.inTenant(managerRole), Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{s.secret}, Verbs: []string{"list", "watch", "patch"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: s.inTenant(managerRole), RoleRef: roleRef(managerRole),
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: s.Namespace, Name: deploy.ManagerServiceAccount}}},
	}
}

// inTenant is the metadata of an object of ours in the tenant namespace.
func (s *side) inTenant(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: s.namespace, Name: name, Labels: ours()}
}

func roleRef(name string) rbacv1.RoleRef {
	return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}
}
