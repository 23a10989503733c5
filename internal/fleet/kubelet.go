package fleet

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// kubeletInterval is the interval of a kubelet's probes, and probeTimeout their timeout.
const (
	kubeletInterval = time.Second
	probeTimeout    = 2 * time.Second
)

// Kubelets imitates kubelets until ctx ends. It probes all gateways and route agents, and writes
// into the status of their Pods whether they run and are ready. As with real kubelets, the Pod does
// not contain the reason why a container is not ready.
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

// probe probes one component and updates its Pod. After an error, the next call tries again.
func (c *Cluster) probe(ctx context.Context, component, name string) {
	ready := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: "ContainersNotReady", Message: "containers with unready status: [main]"}
	container := corev1.ContainerStatus{Name: "main", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137}}}
	if p := c.processes[component]; c.Running(component) {
		container.State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
		probeCtx, cancel := context.WithTimeout(ctx, probeTimeout)
		if _, err := p.host.Get(probeCtx, p.ready); err == nil {
			ready = corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue}
			container.Ready = true
		}
		cancel()
	}
	probeCtx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var pod corev1.Pod
	if c.Client.Get(probeCtx, client.ObjectKey{Namespace: Namespace, Name: name}, &pod) != nil {
		return
	}
	before := pod.DeepCopy()
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{container}
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == ready.Type })
	switch {
	case i < 0:
		pod.Status.Conditions = append(pod.Status.Conditions, ready)
	case pod.Status.Conditions[i].Status != ready.Status:
		pod.Status.Conditions[i] = ready
	}
	if !equality.Semantic.DeepEqual(before.Status, pod.Status) {
		_ = c.Client.Status().Update(probeCtx, &pod)
	}
}
