package peering

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func TestUnpeerLeavesNothingAndCanBeRepeated(t *testing.T) {
	t.Parallel()
	p := newPair(t, "part")
	must(t, p.peer(t))
	p.said()
	must(t, p.unpeer(t))
	said := p.said()
	t.Log("\n" + said)
	contains(t, said, "part-a: Peering part-b-", "part-b: what the manager had made is gone", "part-a: rights and identity removed, namespace liqo-tenant-part-b-",
		"is gone", "part-a and part-b are not peered any more")
	if left := p.everything(t); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	must(t, p.unpeer(t))
	if said := p.said(); said != "nothing to do: there is no such peering" {
		t.Errorf("the second time it says %q", said)
	}
	must(t, p.peer(t)) // at once
}

func TestUnpeerSaysWhatItWaitsForAndKeepsTheRightsMeanwhile(t *testing.T) {
	t.Parallel()
	p := newPair(t, "hold")
	must(t, p.peer(t))
	p.said()
	p.managers[0].keep("hold-b does not answer:\x1b[2J its copy of NetworkConfig x is still there")
	ctx := newDeadline(t)
	up := sync.OnceFunc(func() { close(ctx.up) })
	err := Unpeer(ctx, p.a, p.b, UnpeerOptions{Timeout: patient, Report: func(line string) {
		p.report(line)
		if strings.Contains(line, "its copy") {
			time.AfterFunc(time.Second, up) // time enough to say it again
		}
	}})
	if !errors.Is(err, ErrNotReady) {
		t.Fatal(err)
	}
	contains(t, err.Error(), "not un-peered within 2m0s", `hold-a: hold-b does not answer:\u001b[2J its copy`)
	if said := p.said(); strings.Count(said, "its copy") != 1 {
		t.Errorf("said once, please:\n%s", said)
	}
	// The manager of a needs its identity at b, and b has nothing to do any more.
	peer, err := p.a.asPeer(t.Context(), p.b.Identity.TenantNamespace())
	must(t, err)
	must(t, peer.List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(p.a.Identity.TenantNamespace())))
	p.managers[0].keep("")
	must(t, p.unpeer(t))
	if left := p.everything(t); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestForcedUnpeerSaysWhatStaysAtThePeer(t *testing.T) {
	t.Parallel()
	p := newPair(t, "force")
	must(t, p.peer(t))
	p.said()
	p.managers[0].keep("force-b is away")
	must(t, Unpeer(t.Context(), p.a, nil, UnpeerOptions{Name: "force-b", Force: true, Timeout: patient, Report: p.report}))
	contains(t, p.said(), "force-a: does not wait for force-b. What may stay at force-b, "+p.b.server+": NetworkConfig force-b-",
		" in namespace "+p.a.Identity.TenantNamespace(), "force-a is not peered with force-b any more")
	if !gone(t, p.a, &corev1.Namespace{}, p.b.Identity.TenantNamespace()) || gone(t, p.b, &corev1.Namespace{}, p.a.Identity.TenantNamespace()) {
		t.Error("want the namespace of a gone, and that of b untouched")
	}
	// The other side follows later, alone, by the name of its Peering.
	must(t, Unpeer(t.Context(), p.b, nil, UnpeerOptions{Name: p.a.Identity.UniqueName(), Timeout: patient, Report: p.report}))
	if left := p.everything(t); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestUnpeerFinishesWhatWasInterrupted(t *testing.T) {
	t.Parallel()
	p := newPair(t, "again")
	must(t, p.peer(t))
	p.said()
	// As after a run that ended when the Peering was gone.
	must(t, p.a.client.Delete(t.Context(), &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: p.b.Identity.UniqueName()}}))
	for !gone(t, p.a, &isthmus.Peering{}, p.b.Identity.UniqueName()) {
		time.Sleep(20 * time.Millisecond)
	}
	must(t, Unpeer(t.Context(), p.a, nil, UnpeerOptions{Name: "again-b", Timeout: patient, Report: p.report}))
	contains(t, p.said(), "again-a: rights and identity removed, namespace")
	if !gone(t, p.a, &corev1.Namespace{}, p.b.Identity.TenantNamespace()) {
		t.Error("the namespace of a is still there")
	}
}

func TestUnpeerKeepsANamespaceThatItDidNotMake(t *testing.T) {
	t.Parallel()
	p := newPair(t, "own")
	name := p.b.Identity.TenantNamespace()
	must(t, p.a.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	must(t, p.peer(t))
	must(t, p.peer(t)) // does not make it ours
	must(t, p.a.client.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "theirs"}}))
	p.said()
	must(t, p.unpeer(t))
	contains(t, p.said(), "own-a: rights and identity removed; namespace "+name+" stays, since `isthmus peer` did not make it")
	if left := p.everything(t); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	must(t, p.a.client.Get(t.Context(), client.ObjectKey{Namespace: name, Name: "theirs"}, &corev1.Secret{}))
}
