package health

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// IsTrue reports whether a condition is true for the current generation of the Peering.
func IsTrue(p *isthmus.Peering, t string) bool {
	c := meta.FindStatusCondition(p.Status.Conditions, t)
	return c != nil && c.Status == metav1.ConditionTrue && max(c.ObservedGeneration, p.Status.ObservedGeneration) >= p.Generation
}

// FirstProblem returns the first condition that is not true, in the order in which they become
// true. It returns nil if the Peering is ready.
func FirstProblem(p *isthmus.Peering) *metav1.Condition {
	if IsTrue(p, isthmus.ConditionReady) {
		return nil
	}
	unseen := &metav1.Condition{Type: isthmus.ConditionReady, Status: metav1.ConditionUnknown, Reason: isthmus.ReasonUnknown,
		Message: "the manager has not checked it yet"}
	ready := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady)
	if ready != nil && max(ready.ObservedGeneration, p.Status.ObservedGeneration) < p.Generation {
		unseen.Message = "the manager has not checked the newest version of the Peering yet"
		return unseen
	}
	for _, t := range append(Steps[:len(Steps):len(Steps)], isthmus.ConditionReady) {
		c := meta.FindStatusCondition(p.Status.Conditions, t)
		if c == nil || IsTrue(p, t) {
			continue
		}
		// An early condition may be unknown while Ready has a different reason: the Peering is being
		// deleted, or conflicts with another Peering. Otherwise Ready repeats the early condition.
		if c.Status == metav1.ConditionUnknown && ready != nil && ready.Status == metav1.ConditionFalse && !strings.HasPrefix(ready.Message, t+": ") {
			return ready
		}
		return c
	}
	return unseen
}

// Problems returns all conditions of a Peering that describe a fault, with FirstProblem first.
// Several conditions are possible, because each side may refuse the other.
func Problems(p *isthmus.Peering) (all []metav1.Condition) {
	first := FirstProblem(p)
	if first == nil {
		return nil
	}
	all = append(all, *first)
	if first.Type == isthmus.ConditionReady {
		return all
	}
	for _, t := range Steps {
		c := meta.FindStatusCondition(p.Status.Conditions, t)
		if c != nil && c.Type != first.Type && c.Status == metav1.ConditionFalse && !slices.Contains(isthmus.WaitReasons, c.Reason) {
			all = append(all, *c)
		}
	}
	return all
}

// Sentence formats a condition. It escapes the message, which may come from the peer.
func Sentence(c *metav1.Condition) string {
	text := fmt.Sprintf("%s is %s (%s)", safetext.Of(c.Type), c.Status, safetext.Of(c.Reason))
	if c.Message != "" {
		text += ": " + safetext.Cut(c.Message, safetext.Message)
	}
	return text
}
