package peering

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

func TestUnpeerLeavesNothingAndCanBeRepeated(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "part")
	must(t, peerUp(t, p))
	p.Reported()
	must(t, peerDown(t, p))
	reported := p.Reported()
	t.Log("\n" + reported)
	clustertest.Contains(t, reported, "part-a: Peering part-b-", "part-b: the manager's objects are gone", "part-a: rights and identity removed, namespace liqo-tenant-part-b-",
		"is gone", "part-a and part-b are no longer peered")
	if left := objectVersions(t, p); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	must(t, peerDown(t, p))
	if reported := p.Reported(); reported != "nothing to do: part-a and part-b are not peered, and nothing is left of a peering" {
		t.Errorf("the second time it says %q", reported)
	}
	must(t, peerUp(t, p)) // peering again works at once
}

func TestUnpeerReportsItsProgressAndKeepsRightsUntilDone(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "hold")
	must(t, peerUp(t, p))
	p.Reported()
	p.Managers[0].Keep("hold-b does not answer:\x1b[2J its copy of NetworkConfig x is still there")
	ctx := clustertest.NewDeadline(t)
	up := sync.OnceFunc(func() { close(ctx.Up) })
	err := Unpeer(ctx, p.A, p.B, UnpeerOptions{Timeout: clustertest.Patient, Report: func(line string) {
		p.Report(line)
		if strings.Contains(line, "its copy") {
			time.AfterFunc(time.Second, up) // long enough for a second report of the same reason
		}
	}})
	if !errors.Is(err, cluster.ErrNotReady) {
		t.Fatal(err)
	}
	clustertest.Contains(t, err.Error(), "not un-peered within 2m0s", `hold-a: hold-b does not answer:\u001b[2J its copy`)
	if reported := p.Reported(); strings.Count(reported, "its copy") != 1 {
		t.Errorf("said once, please:\n%s", reported)
	}
	// The manager of a needs its identity at b only to delete its objects there, and keeps no
	// other rights.
	there := p.A.Identity.TenantNamespace()
	peer, err := clustertest.AsPeer(t.Context(), p.A, p.B.Identity.TenantNamespace())
	must(t, err)
	must(t, peer.List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(there)))
	copied := networkConfig(p.B, p.A)
	if err := peer.Create(t.Context(), copied.DeepCopy()); !apierrors.IsForbidden(err) {
		t.Errorf("one that parts creates: %v", err)
	}
	must(t, p.B.Client.Create(t.Context(), copied))
	if err := peer.Patch(t.Context(), copied.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/x"]}}`))); !apierrors.IsForbidden(err) {
		t.Errorf("one that parts writes: %v", err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: there, Name: peerAccount}}
	if err := peer.SubResource("token").Create(t.Context(), account, &authenticationv1.TokenRequest{}); !apierrors.IsForbidden(err) {
		t.Errorf("one that parts gets a new token: %v", err)
	}
	must(t, peer.Delete(t.Context(), copied))
	p.Managers[0].Keep("")
	must(t, peerDown(t, p))
	if left := objectVersions(t, p); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestForcedUnpeerListsLeftoversAtThePeer(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "force")
	must(t, peerUp(t, p))
	p.Reported()
	p.Managers[0].Keep("force-b is away")
	must(t, Unpeer(t.Context(), p.A, nil, UnpeerOptions{Name: "force-b", Force: true, Timeout: clustertest.Patient, Report: p.Report}))
	clustertest.Contains(t, p.Reported(), "force-a: not waiting for force-b; our objects may remain at force-b, "+p.B.Server+": NetworkConfig force-b-",
		" in namespace "+p.A.Identity.TenantNamespace(), "force-a is no longer peered with force-b")
	if !clustertest.Deleted(t, p.A, &corev1.Namespace{}, p.B.Identity.TenantNamespace()) || clustertest.Deleted(t, p.B, &corev1.Namespace{}, p.A.Identity.TenantNamespace()) {
		t.Error("want the namespace of a gone, and that of b untouched")
	}
	// The other side is torn down later, alone, by the name of its Peering.
	must(t, Unpeer(t.Context(), p.B, nil, UnpeerOptions{Name: p.A.Identity.UniqueName(), Timeout: clustertest.Patient, Report: p.Report}))
	if left := objectVersions(t, p); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// networkConfig returns the copy that the cluster from publishes at the cluster receiver.
func networkConfig(receiver, from *cluster.Cluster) *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: from.Identity.TenantNamespace(), Name: receiver.Identity.UniqueName(), Labels: map[string]string{
			v1alpha1.LabelReplication: "false", v1alpha1.LabelReplicated: "true",
			v1alpha1.LabelOriginID: from.Identity.ClusterID, v1alpha1.LabelRemoteID: receiver.Identity.ClusterID}},
		Spec: v1alpha1.NetworkConfigSpec{RemoteCluster: receiver.Identity, PodCIDR: "10.60.0.0/20", ExternalCIDR: "10.61.0.0/20", EndpointIP: "192.0.2.2",
			BackendType: v1alpha1.BackendWireGuard, BackendConfig: v1alpha1.BackendConfig{"port": "5871", "publicKey": "3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08="}},
	}
}

func TestForcedUnpeerRevokesThePeerFirst(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "first")
	must(t, peerUp(t, p))
	p.Reported()
	here := p.B.Identity.TenantNamespace()
	peer, err := clustertest.AsPeer(t.Context(), p.B, p.A.Identity.TenantNamespace())
	must(t, err)
	must(t, peer.List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(here)))

	// No manager removes the finalizers, so the command cannot finish.
	must(t, p.A.Client.Patch(t.Context(), New(p.B.Identity.UniqueName(), p.B.Identity, "", ""),
		client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["isthmus.net/peering","example.com/for-ever"]}}`))))
	p.Managers[0].Pause()
	ctx := clustertest.NewDeadline(t)
	up := sync.OnceFunc(func() { close(ctx.Up) })
	err = Unpeer(ctx, p.A, nil, UnpeerOptions{Name: "first-b", Force: true, Timeout: clustertest.Patient, Report: func(line string) {
		if p.Report(line); strings.Contains(line, "waiting for the manager") {
			up()
		}
	}})
	if !errors.Is(err, cluster.ErrNotReady) {
		t.Fatal(err)
	}
	clustertest.Contains(t, p.Reported(), "first-a: the rights of first-b here are revoked\nfirst-a: not waiting for first-b;")
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) { // the change takes a moment to become effective
		err := peer.List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(here))
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatalf("the peer's identity still works: %v", err)
		}
	}
	must(t, p.A.Client.Patch(t.Context(), New(p.B.Identity.UniqueName(), p.B.Identity, "", ""),
		client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))))
}

// Unpeer with Force must work without a manager, so that nobody has to remove finalizers by hand.
func TestForcedUnpeerNeedsNoManager(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "alone")
	must(t, peerUp(t, p))
	p.Reported()
	p.Managers[0].Pause()
	p.Managers[0].Release(t)
	ns := p.B.Identity.TenantNamespace()
	must(t, p.A.Client.Patch(t.Context(), New(p.B.Identity.UniqueName(), p.B.Identity, "", ""),
		client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["isthmus.net/peering"]}}`))))
	ours := networkConfig(p.A, p.B)
	ours.Finalizers = []string{v1alpha1.FinalizerReplicator, v1alpha1.FinalizerTunnelEndpointCreator}
	must(t, p.A.Client.Create(t.Context(), ours))
	err := Unpeer(t.Context(), p.A, nil, UnpeerOptions{Name: "alone-b", Force: true, Timeout: clustertest.Patient, Report: p.Report})
	reported := p.Reported()
	if err != nil || strings.Count(reported, "no manager is active") != 1 {
		t.Fatalf("%v\n%s", err, reported)
	}
	if !clustertest.Deleted(t, p.A, &isthmus.Peering{}, p.B.Identity.UniqueName()) || !clustertest.Deleted(t, p.A, &corev1.Namespace{}, ns) {
		t.Errorf("Peering or namespace are still there\n%s", reported)
	}
}

func TestUnpeerDoesNotWaitForFinalizersOfThePeer(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "cling")
	must(t, peerUp(t, p))
	kept := networkConfig(p.A, p.B)
	kept.Finalizers = []string{"example.com/for-ever"}
	must(t, p.A.Client.Create(t.Context(), kept))
	must(t, Unpeer(t.Context(), p.A, nil, UnpeerOptions{Name: "cling-b", Force: true, Timeout: clustertest.Patient, Report: p.Report}))
	if !clustertest.Deleted(t, p.A, &corev1.Namespace{}, p.B.Identity.TenantNamespace()) {
		t.Error("the namespace has stayed")
	}
}

func TestUnpeerOfAnUnknownPeerIsAnError(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "nobody")
	err := Unpeer(t.Context(), p.A, nil, UnpeerOptions{Name: "nosuch", Timeout: clustertest.Patient, Report: p.Report})
	if !errors.Is(err, cluster.ErrNoPeering) || !strings.Contains(err.Error(), "nobody-a: no such peering: no Peering and no peer is called nosuch") {
		t.Errorf("%v; said %q", err, p.Reported())
	}
}

func TestUnpeerFinishesAnInterruptedRun(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "again")
	must(t, peerUp(t, p))
	p.Reported()
	// An earlier run has ended after the Peering was deleted.
	must(t, p.A.Client.Delete(t.Context(), &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: p.B.Identity.UniqueName()}}))
	for !clustertest.Deleted(t, p.A, &isthmus.Peering{}, p.B.Identity.UniqueName()) {
		time.Sleep(20 * time.Millisecond)
	}
	must(t, Unpeer(t.Context(), p.A, nil, UnpeerOptions{Name: "again-b", Timeout: clustertest.Patient, Report: p.Report}))
	clustertest.Contains(t, p.Reported(), "again-a: rights and identity removed, namespace")
	if !clustertest.Deleted(t, p.A, &corev1.Namespace{}, p.B.Identity.TenantNamespace()) {
		t.Error("the namespace of a is still there")
	}
}

func TestUnpeerKeepsAForeignNamespace(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "own")
	name := p.B.Identity.TenantNamespace()
	must(t, p.A.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	must(t, peerUp(t, p))
	must(t, peerUp(t, p)) // peering again does not make the namespace ours
	must(t, p.A.Client.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "theirs"}}))
	p.Reported()
	must(t, peerDown(t, p))
	clustertest.Contains(t, p.Reported(), "own-a: rights and identity removed; namespace "+name+" stays, because `isthmus peer` did not create it")
	if left := objectVersions(t, p); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	must(t, p.A.Client.Get(t.Context(), client.ObjectKey{Namespace: name, Name: "theirs"}, &corev1.Secret{}))
}
