package services

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// condition writes the conditions of the ServiceExport.
func (c *Controller) condition(ctx context.Context, g gathered, merged Merged) error {
	want := g.export.DeepCopy()
	for _, condition := range c.conditions(ctx, g, merged) {
		condition.ObservedGeneration = want.Generation
		meta.SetStatusCondition(&want.Status.Conditions, condition)
	}
	if equality.Semantic.DeepEqual(want.Status, g.export.Status) {
		return nil
	}
	err := c.Client.Status().Patch(ctx, want, client.MergeFromWithOptions(g.export, client.MergeFromWithOptimisticLock{}))
	return client.IgnoreNotFound(err)
}

func (c *Controller) conditions(ctx context.Context, g gathered, merged Merged) []metav1.Condition {
	if g.invalid != nil {
		return []metav1.Condition{
			conditionOf(mcs.ServiceExportConditionValid, metav1.ConditionFalse, g.invalid.Reason, g.invalid.Message),
			conditionOf(mcs.ServiceExportConditionReady, metav1.ConditionFalse, mcs.ServiceExportReasonFailed, "nothing is exported"),
			conditionOf(mcs.ServiceExportConditionConflict, metav1.ConditionFalse, mcs.ServiceExportReasonNoConflicts, ""),
		}
	}
	reasons, texts := make(map[string]bool), []string(nil)
	for _, conflict := range merged.Conflicts {
		reasons[string(conflict.Reason)] = true
		texts = append(texts, conflict.Message)
	}
	ready := c.readiness(ctx, g, reasons, &texts)
	conflict := conditionOf(mcs.ServiceExportConditionConflict, metav1.ConditionFalse, mcs.ServiceExportReasonNoConflicts, "")
	if len(reasons) > 0 {
		conflict = conditionOf(mcs.ServiceExportConditionConflict, metav1.ConditionTrue, mcs.ServiceExportConditionReason(joined(reasons)), fit(strings.Join(texts, "; "), maxMessage))
	}
	return []metav1.Condition{
		conditionOf(mcs.ServiceExportConditionValid, metav1.ConditionTrue, mcs.ServiceExportReasonValid, ""),
		ready, conflict,
	}
}

func joined(set map[string]bool) string {
	var all []string
	for s := range set {
		all = append(all, s)
	}
	slices.Sort(all)
	return strings.Join(all, ",")
}

// readiness computes the condition Ready from the state at the peers. If peers report conflicts, it
// adds them to its parameters conflicts and texts.
func (c *Controller) readiness(ctx context.Context, g gathered, conflicts map[string]bool, texts *[]string) metav1.Condition {
	var have, pending, failed []string
	for _, p := range g.peerings {
		if !p.DeletionTimestamp.IsZero() || !permits(p.Spec.Services.Export, g.key.Namespace) {
			continue
		}
		name, id := p.Spec.Cluster.ClusterName, p.Spec.Cluster.ClusterID
		sharing, checked := c.Sharing(id)
		refused := slices.IndexFunc(sharing.Refused, func(r isthmus.RefusedService) bool { return r.Namespace == g.key.Namespace && r.Name == g.key.Name })
		if refused >= 0 {
			r := sharing.Refused[refused]
			var differs, others []string
			for reason := range strings.SplitSeq(r.Reason, ",") {
				switch {
				case !slices.Contains(conflictReasons, reason): // a peer may write any reason
					others = append(others, reason)
				case !conflicts[reason]:
					differs, conflicts[reason] = append(differs, reason), true
				}
			}
			if len(differs) > 0 {
				*texts = append(*texts, fmt.Sprintf("cluster %s: %s: %s", name, strings.Join(differs, ","), r.Message))
			}
			if len(others) > 0 {
				failed = append(failed, fmt.Sprintf("cluster %s: %s: %s", name, strings.Join(others, ","), r.Message))
				continue
			}
		}
		switch {
		case c.board.omits(id, g.key):
			failed = append(failed, fmt.Sprintf("cluster %s: PeerServices %s has no room for it, because older exports fill it", name, ShardOf(g.key)))
		case !checked, sharing.Condition.Status == "", sharing.Condition.Reason == isthmus.ReasonSharing:
			pending = append(pending, name)
		case sharing.Condition.Status != metav1.ConditionTrue:
			failed = append(failed, fmt.Sprintf("cluster %s: %s", name, sharing.Condition.Message))
		default:
			have = append(have, name)
		}
	}
	left := ""
	if pods, err := c.Pods(ctx); err == nil && pods.IsValid() {
		theirs, out := forPeers(g.ownExport.Service, pods)
		if n := len(g.export.Spec.ExportedLabels) + len(g.export.Spec.ExportedAnnotations) - len(theirs.Labels) - len(theirs.Annotations); n > 0 {
			left += fmt.Sprintf("; %d labels and annotations are left out: too many, too long, reserved or invalid", n)
		}
		if out.NoPod > 0 {
			left += fmt.Sprintf("; %d endpoints are not pods and are not exported", out.NoPod)
		}
		if out.TooMany > 0 {
			left += fmt.Sprintf("; %d endpoints are more than the %d that a service can export", out.TooMany, isthmus.MaxExportedEndpoints)
		}
	}
	switch {
	case len(failed) > 0:
		return conditionOf(mcs.ServiceExportConditionReady, metav1.ConditionFalse, mcs.ServiceExportReasonFailed, fit(strings.Join(failed, "; ")+left, maxMessage))
	case len(pending) > 0:
		return conditionOf(mcs.ServiceExportConditionReady, metav1.ConditionFalse, mcs.ServiceExportReasonPending, fit("not yet exported to "+strings.Join(pending, ", ")+left, maxMessage))
	case len(have) == 0:
		return conditionOf(mcs.ServiceExportConditionReady, metav1.ConditionTrue, mcs.ServiceExportReasonReady, "no Peering exports this namespace; see `isthmus peer --services`"+left)
	}
	return conditionOf(mcs.ServiceExportConditionReady, metav1.ConditionTrue, mcs.ServiceExportReasonExported, fit("exported to "+strings.Join(have, ", ")+left, maxMessage))
}

// maxMessage bounds the message of a condition, and maxRefusal bounds the message of a refused
// service, in octets.
const maxMessage, maxRefusal = 4096, 512

// fit truncates a message to at most limit octets.
func fit(s string, limit int) string {
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "")
	}
	return s
}
