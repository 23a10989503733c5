package fleet

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// kubeletInterval is how often a kubelet asks, and probeTimeout is for how long.
const (
	kubeletInterval = time.Second
	probeTimeout    = 2 * time.Second
)

// Kubelets ask all gateways and route agents whether they are ready, and write what they say into
// their Pods, until ctx ends. As with real ones, the Pod does not say why one is not ready.
func (c *Cluster) Kubelets(ctx context.Context) {
	for {
		for i := range c.Nodes {
			c.probe(ctx, Agent(i), Agent(i))
			if i < gateways {
				c.probe(ctx, Gateway(i), gatewayPod(i))
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(kubeletInterval):
		}
	}
}

// probe does so once; whatever fails is tried again at the next time.
func (c *Cluster) probe(ctx context.Context, component, name string) {
	ready := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: "ContainersNotReady", Message: "containers with unready status: [main]"}
	if p := c.processes[component]; c.Running(component) {
		asking, cancel := context.WithTimeout(ctx, probeTimeout)
		if _, err := p.host.Get(asking, p.ready); err == nil {
			ready = corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue}
		}
		cancel()
	}
	asking, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var pod corev1.Pod
	if c.Client.Get(asking, client.ObjectKey{Namespace: Namespace, Name: name}, &pod) != nil {
		return
	}
	for i, old := range pod.Status.Conditions {
		if old.Type != ready.Type {
			continue
		}
		if old.Status == ready.Status {
			return
		}
		pod.Status.Conditions[i] = ready
		_ = c.Client.Status().Update(asking, &pod)
		return
	}
	pod.Status.Conditions = append(pod.Status.Conditions, ready)
	_ = c.Client.Status().Update(asking, &pod)
}
