package exchange

import (
	"context"
	"net/netip"
	"testing"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/peers"
)

func TestProofIsMadeAgainOnlyWhenAKeyChanges(t *testing.T) {
	ours, next, theirs := keyring.New(), keyring.New(), keyring.New()
	var copied v1alpha1.NetworkConfig
	publish := func(key [32]byte) {
		copied.Spec.BackendConfig = v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: keyText(key)}
	}
	publish(fabric.PublicKeys(theirs, 1)[0])
	api := interceptor.NewClient(nil, interceptor.Funcs{List: func(_ context.Context, _ client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
		if configs, ok := list.(*v1alpha1.NetworkConfigList); ok {
			configs.Items = []v1alpha1.NetworkConfig{copied}
		}
		return nil
	}})
	r := &NetworkConfigReconciler{Client: api, Peers: peers.Peers{Reader: api, Self: "a"}}
	peer := peers.Peer{Cluster: v1alpha1.ClusterIdentity{ClusterID: "b"}}
	facts := facts.Facts{PublicKey: fabric.PublicKeys(ours, 1)[0], Keys: keyring.Ring{Private: ours}}
	prove := func(tunnels string) string {
		t.Helper()
		spec := v1alpha1.NetworkConfigSpec{BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigTunnels: tunnels}}
		if err := r.prove(t.Context(), peer, facts, &spec); err != nil {
			t.Fatal(err)
		}
		return spec.BackendConfig[v1alpha1.ConfigKeyProof]
	}
	keep := func() { // replaces the cached proof by the text "kept"
		p, _ := r.proofs.Load("b")
		r.proofs.Store("b", proof{p.(proof).inputs, "kept"})
	}
	first := keyring.Prove(ours, 1, "a", "b", fabric.PublicKeys(theirs, 1)[0])
	if got := prove(""); got != first {
		t.Fatalf("%q, want %q", got, first)
	}
	keep()
	facts.Nodes = append(facts.Nodes, netip.MustParseAddr("172.30.0.9"))
	if got := prove(""); got != "kept" {
		t.Errorf("another Node makes a proof: %q", got)
	}
	further := fabric.FormatTunnels([]fabric.TunnelEnd{{Port: 5872, PublicKey: fabric.PublicKeys(ours, 2)[1]}})
	if got := prove(further); got != keyring.Prove(ours, 2, "a", "b", fabric.PublicKeys(theirs, 1)[0]) {
		t.Errorf("a further tunnel: %q", got)
	}
	keep()
	publish(fabric.PublicKeys(next, 1)[0])
	if got := prove(""); got != keyring.Prove(ours, 1, "a", "b", fabric.PublicKeys(next, 1)[0]) {
		t.Errorf("another key of the peer: %q", got)
	}
	keep()
	facts.Keys.Next, facts.PublicKey = next, fabric.PublicKeys(next, 1)[0]
	if got := prove(""); got != keyring.Prove(next, 1, "a", "b", fabric.PublicKeys(next, 1)[0]) {
		t.Errorf("our next key: %q", got)
	}
	if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "b"}}); err != nil {
		t.Fatal(err)
	}
	if _, ok := r.proofs.Load("b"); ok {
		t.Error("the proof for a peer that has left is kept")
	}
}
