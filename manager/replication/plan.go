package replication

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/netconfig"
)

// A step is one request of a plan.
type step uint8

const (
	hold    step = iota // set our finalizer on the original, before a copy exists
	create              // create the copy
	update              // update the copy, if a field differs
	answer              // copy the status of the copy into the original
	remove              // remove a copy
	release             // check that the copy no longer exists, then remove our finalizer from the original
)

func (s step) String() string {
	return [...]string{"hold", "create", "update", "answer", "remove", "release"}[s]
}

// An action is a step, with the name of the copy.
type action struct {
	step step
	name string
}

// replicated reports whether the original should have a copy at the peer. Originals without the
// replication label, and originals for other clusters, should not.
func replicated(original *v1alpha1.NetworkConfig, peer string) bool {
	return original != nil && original.DeletionTimestamp.IsZero() &&
		original.Labels[v1alpha1.LabelReplication] == "true" && original.Labels[v1alpha1.LabelRemoteID] == peer
}

// leaving reports whether the original is being deleted and waits for the deletion of its copy.
func leaving(original *v1alpha1.NetworkConfig) bool {
	return original != nil && !original.DeletionTimestamp.IsZero() && slices.Contains(original.Finalizers, v1alpha1.FinalizerReplicator)
}

// plan returns the actions that first make the copies match the original, and then copy the status
// of the copy into the original. It removes copies without an original. original may be nil.
//
// In band, a copy that is being deleted counts as gone: the peer closes the tunnel once the copy is
// deleted, so a later check would be impossible.
func plan(peer Target, original *v1alpha1.NetworkConfig, copies map[string]*v1alpha1.NetworkConfig) (actions []action) {
	wanted := ""
	if replicated(original, peer.ID) {
		wanted = original.Name
	}
	for _, name := range slices.Sorted(maps.Keys(copies)) {
		if name != wanted && copies[name].DeletionTimestamp.IsZero() {
			actions = append(actions, action{remove, name})
		}
	}
	if leaving(original) {
		if c := copies[original.Name]; c == nil || peer.InBand && !c.DeletionTimestamp.IsZero() {
			return append(actions, action{release, original.Name})
		}
	}
	if wanted == "" {
		return actions
	}
	if !slices.Contains(original.Finalizers, v1alpha1.FinalizerReplicator) {
		actions = append(actions, action{hold, wanted})
	}
	switch c := copies[wanted]; {
	case c == nil:
		actions = append(actions, action{create, wanted})
	case !c.DeletionTimestamp.IsZero(): // the copy is recreated once the deleted one is gone
	case stale(c, original):
		actions = append(actions, action{remove, wanted}) // the copy is recreated once the deleted one is gone
	default:
		if !equality.Semantic.DeepEqual(c.Spec, original.Spec) || c.Labels[v1alpha1.LabelReplication] != "false" {
			actions = append(actions, action{update, wanted})
		}
		if is, ok := netconfig.AnswerTo(original, c); ok && !equality.Semantic.DeepEqual(is, original.Status) {
			actions = append(actions, action{answer, wanted})
		}
	}
	return actions
}

// stale reports whether Liqo has answered the copy for our previous networks. Liqo does not record
// the networks that it has answered, so the answer could be mistaken for an answer to the new
// networks. Such a copy is replaced, and the status of the new copy answers the new networks.
func stale(c, original *v1alpha1.NetworkConfig) bool {
	return c.Status.Processed && !netconfig.SameNetworks(c, original) && meta.FindStatusCondition(c.Status.Conditions, v1alpha1.ConditionAccepted) == nil
}

// A view has the inputs of the condition Published.
type view struct {
	peer     Target
	server   string // the peer's API server; "" without an identity
	original *v1alpha1.NetworkConfig
	copies   map[string]*v1alpha1.NetworkConfig
	listed   bool // whether a list of our copies at this server has ever succeeded; copies may be out of date
}

// published returns the condition Published: whether the last known copy equals the original.
func (v view) published() Condition {
	where := fmt.Sprintf("NetworkConfig %s in namespace %s at %s", v.peer.Cluster.UniqueName(), v.peer.RemoteNamespace, v.server)
	no := func(format string, args ...any) Condition {
		return Condition{metav1.ConditionFalse, isthmus.ReasonPublishing, fmt.Sprintf(format, args...)}
	}
	name := v.peer.Cluster.UniqueName()
	c := v.copies[name]
	switch {
	case v.server == "":
		return Condition{metav1.ConditionUnknown, isthmus.ReasonPublishing, "no usable identity at the peer"}
	case leaving(v.original) && c == nil && v.listed:
		return no("%s was deleted", where)
	case leaving(v.original) && c != nil && len(c.Finalizers) > 0 && !c.DeletionTimestamp.IsZero():
		return no("waiting for the deletion of %s: the peer must remove its finalizers %s", where, quote(strings.Join(c.Finalizers, ", ")))
	case leaving(v.original):
		return no("waiting for the deletion of %s", where)
	case !v.listed:
		return Condition{metav1.ConditionUnknown, isthmus.ReasonPublishing, "our copy at the peer was not read yet"}
	case !replicated(v.original, v.peer.ID):
		return no("this cluster has no NetworkConfig %s for the peer in namespace %s", name, v.peer.LocalNamespace)
	case c == nil:
		return no("%s does not exist yet", where)
	case !c.DeletionTimestamp.IsZero():
		return no("%s is being deleted by the peer; it is recreated afterwards", where)
	case !equality.Semantic.DeepEqual(c.Spec, v.original.Spec):
		return no("%s is not up to date yet", where)
	}
	return Condition{metav1.ConditionTrue, isthmus.ReasonUpToDate, where}
}
