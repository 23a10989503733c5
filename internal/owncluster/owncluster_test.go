package owncluster

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestFlagReturnsTheValueOfTheFirstMatchingPod(t *testing.T) {
	pod := func(command, args []string) corev1.Pod {
		return corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Command: command, Args: args}}}}
	}
	pods := []corev1.Pod{
		{},
		pod([]string{"kube-apiserver", "--service-cluster-ip-range-x=1"}, nil),
		pod([]string{"kube-apiserver"}, []string{"--service-cluster-ip-range=10.96.0.0/12"}),
		pod([]string{"kube-apiserver", "--service-cluster-ip-range=10.97.0.0/16"}, nil),
	}
	if got := Flag(pods, "service-cluster-ip-range"); got != "10.96.0.0/12" {
		t.Errorf("got %q", got)
	}
	if got := Flag(pods, "cluster-cidr"); got != "" {
		t.Errorf("a flag that none has: %q", got)
	}
}
