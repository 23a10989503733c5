// Package netconfig has the functions for the exchange of a NetworkConfig with a peer. We write a
// copy of our NetworkConfig to the peer's cluster, and the peer writes its answer into the copy's
// status. The manager's replication and package peering use these functions. The package has no
// state.
package netconfig

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// CopyOf returns the copy to create in the peer's cluster. It omits the labels and annotations that
// tools of this cluster set on the original. They have no meaning at the peer, and an Isthmus there
// refuses such labels.
func CopyOf(original *v1alpha1.NetworkConfig, own, namespace string) *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Name: original.Name, Namespace: namespace, Labels: map[string]string{
			v1alpha1.LabelReplication: "false",
			v1alpha1.LabelReplicated:  "true",
			v1alpha1.LabelOriginID:    own,
			v1alpha1.LabelRemoteID:    original.Labels[v1alpha1.LabelRemoteID],
		}},
		Spec: *original.Spec.DeepCopy(),
	}
}

// AnswerTo returns the answer in a copy's status. It returns false if the copy has no answer to the
// current version of the original.
func AnswerTo(original, c *v1alpha1.NetworkConfig) (v1alpha1.NetworkConfigStatus, bool) {
	return AnswerOf(c), answers(c, original)
}

// answers reports whether the status of the copy answers the current version of the original.
// Isthmus records which generation it has answered. Liqo does not, so for Liqo it is sufficient
// that the networks are the same: a copy that Liqo has answered never gets other networks (see
// stale in manager/replication).
func answers(c, original *v1alpha1.NetworkConfig) bool {
	if accepted := meta.FindStatusCondition(c.Status.Conditions, v1alpha1.ConditionAccepted); accepted != nil {
		return accepted.ObservedGeneration == c.Generation && equality.Semantic.DeepEqual(c.Spec, original.Spec)
	}
	return SameNetworks(c, original)
}

// SameNetworks reports whether two NetworkConfigs publish the same networks.
func SameNetworks(a, b *v1alpha1.NetworkConfig) bool {
	return a.Spec.PodCIDR == b.Spec.PodCIDR && a.Spec.ExternalCIDR == b.Spec.ExternalCIDR
}

// MaxAnswer is the maximum length, in octets, of the message in which a peer explains a refusal. It
// is long enough for one problem in each field of a NetworkConfig.
const MaxAnswer = 4096

// AnswerOf returns those fields of the copy's status that this cluster uses: the answer, and
// whether the peer accepts our NetworkConfig.
func AnswerOf(c *v1alpha1.NetworkConfig) v1alpha1.NetworkConfigStatus {
	answer := v1alpha1.NetworkConfigStatus{
		Processed: c.Status.Processed, PodCIDRNAT: c.Status.PodCIDRNAT, ExternalCIDRNAT: c.Status.ExternalCIDRNAT,
	}
	if accepted := meta.FindStatusCondition(c.Status.Conditions, v1alpha1.ConditionAccepted); accepted != nil {
		taken := *accepted
		if len(taken.Message) > MaxAnswer {
			taken.Message = strings.ToValidUTF8(taken.Message[:MaxAnswer-3], "") + "..."
		}
		answer.Conditions = []metav1.Condition{taken}
	}
	return answer
}
