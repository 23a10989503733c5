package health

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

func TestLeaseThatIsNotRenewedHasNoHolder(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	held := func(by string, ago time.Duration) coordinationv1.LeaseSpec {
		return coordinationv1.LeaseSpec{HolderIdentity: &by, LeaseDurationSeconds: new(int32(15)), RenewTime: &metav1.MicroTime{Time: now.Add(-ago)}}
	}
	for _, tc := range []struct {
		lease   coordinationv1.LeaseSpec
		holder  string
		problem string
	}{
		{held("m", 10*time.Second), "m", ""},
		{held("m", 40*time.Second), "m", ""}, // the clocks of two machines may differ by this much
		{held("m", -time.Hour), "m", ""},
		{held("m", time.Minute), "", "L was last renewed by m at 2026-11-21T11:59:00Z"},
		{held("", time.Second), "", "L has no holder"},
		{coordinationv1.LeaseSpec{}, "", "L has no holder"},
	} {
		if got := HolderOf("L", &coordinationv1.Lease{Spec: tc.lease}, now, true); got.Name != tc.holder || got.Problem != tc.problem {
			t.Errorf("%v: %+v", tc, got)
		}
	}
	taken := func(l coordinationv1.LeaseSpec, ago time.Duration) *coordinationv1.Lease {
		at := metav1.NewTime(now.Add(-ago))
		lease := &coordinationv1.Lease{Spec: l}
		for field, t := range map[string]metav1.Time{"f:acquireTime": metav1.NewTime(now), "f:renewTime": at} {
			lease.ManagedFields = append(lease.ManagedFields, metav1.ManagedFieldsEntry{Time: &t, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"` + field + `":{}}}`)})
		}
		return lease
	}
	if got := HolderOf("L", taken(held("m", time.Hour), time.Second), now, true); got.Name != "m" || got.Ahead != time.Second-time.Hour {
		t.Errorf("a clock that is an hour behind: %+v", got)
	}
	if got := HolderOf("L", taken(held("m", -time.Hour), time.Minute), now, false); got.Name != "" || got.Problem != "L was last renewed by m at 2026-11-21T11:59:00Z" {
		t.Errorf("an old renewal of a clock that is an hour ahead: %+v", got)
	}
	for _, tc := range []struct {
		ago   time.Duration
		exact bool
		want  string
	}{{16 * time.Second, true, "m"}, {18 * time.Second, true, ""}, {18 * time.Second, false, "m"}} {
		if got := HolderOf("L", taken(held("m", tc.ago), tc.ago), now, tc.exact); got.Name != tc.want {
			t.Errorf("renewed %v ago, and the API server's time known is %v: held by %q, want %q", tc.ago, tc.exact, got.Name, tc.want)
		}
	}
	ahead := held("m", -time.Hour)
	ahead.AcquireTime = &metav1.MicroTime{Time: now.Add(59 * time.Minute)}
	if got := HolderOf("L", taken(ahead, 0), now, true); got.Since == nil || !got.Since.Equal(&metav1.Time{Time: now.Add(-time.Minute)}) {
		t.Errorf("acquired a minute ago by a clock that is an hour ahead: %v", got.Since)
	}
	transitions := int32(7)
	by := held("m", time.Second)
	by.LeaseTransitions = &transitions
	for _, pod := range []string{"m", "another"} { // a gateway of an older version does not replace the annotation of the former holder
		t7 := isthmus.Takeover{Pod: pod, Reason: isthmus.TakeoverReleased, Previous: "n"}
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{isthmus.AnnotationTakeover: t7.Annotation()}}, Spec: by}
		got := HolderOf("L", lease, now, true)
		if shown := got.Takeover != nil && *got.Takeover == t7; got.Epoch != 7 || shown != (pod == "m") || !shown && got.Takeover != nil {
			t.Errorf("with the takeover of %s: %+v", pod, got)
		}
	}
}

// A Lease stays valid for some seconds after the last container of its holder has ended.
func TestLeaseHolderWithATerminatedPodIsNotActive(t *testing.T) {
	pod := func(name string, phase corev1.PodPhase, containers ...corev1.ContainerState) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.PodStatus{Phase: phase}}
		for _, s := range containers {
			p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, corev1.ContainerStatus{State: s})
		}
		return p
	}
	runs := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	ended, waits := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137}}, corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
	for _, tc := range []struct {
		name   string
		holder string
		pods   []corev1.Pod
		hasPod bool
		want   string // the problem; empty: the holder stays
	}{
		{"it runs", "g1", []corev1.Pod{pod("g1", corev1.PodRunning, runs)}, true, ""},
		{"no kubelet has said anything", "g1", []corev1.Pod{pod("g1", corev1.PodRunning)}, true, ""},
		{"killed", "g1", []corev1.Pod{pod("g2", corev1.PodRunning, runs), pod("g1", corev1.PodRunning, ended)}, true, "L is held by g1, which has no running container"},
		{"it crashes again and again", "g1", []corev1.Pod{pod("g1", corev1.PodRunning, waits)}, true, "L is held by g1, which has no running container"},
		{"evicted", "g1", []corev1.Pod{pod("g1", corev1.PodFailed)}, true, "L is held by g1, which has no running container"},
		{"something runs beside it", "g1", []corev1.Pod{pod("g1", corev1.PodRunning, ended, runs)}, true, ""},
		{"gone", "g1", []corev1.Pod{pod("g2", corev1.PodRunning, runs)}, true, "L is held by g1, which no longer exists"},
		{"it needs no Pod", "m1_0f3a", []corev1.Pod{pod("g2", corev1.PodRunning, runs)}, false, ""},
		{"an elector of client-go", "m1_0f3a", []corev1.Pod{pod("m1", corev1.PodRunning, ended)}, false, "L is held by m1, which has no running container"},
		{"nobody", "", nil, true, "before"},
	} {
		h := Holder{Name: tc.holder}
		if h.Name == "" {
			h.Problem = "before"
		}
		if h.EndWithPod(tc.pods, "L", tc.hasPod); h.Problem != tc.want || (h.Name == "") != (tc.want != "") {
			t.Errorf("%s: %+v, want %q", tc.name, h, tc.want)
		}
	}
}
