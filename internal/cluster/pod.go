package cluster

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// PodReady reports whether a Pod is ready, according to its kubelet.
func PodReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
