package kube

import (
	"context"
	"net/netip"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

// counted counts the patches of the status.
type counted struct {
	client.Client
	patches int
}

func (c *counted) Status() client.SubResourceWriter {
	return &countedStatus{c.Client.Status(), c}
}

type countedStatus struct {
	client.SubResourceWriter
	c *counted
}

func (s *countedStatus) Patch(ctx context.Context, o client.Object, p client.Patch, opts ...client.SubResourcePatchOption) error {
	s.c.patches++
	return s.SubResourceWriter.Patch(ctx, o, p, opts...)
}

// With Liqo's CRD, the API server drops the conditions. The gateway must update the other fields of
// the status, even after a write that changed nothing, and write nothing while its state is
// unchanged.
func TestStatusIsUpdatedEvenIfTheCRDDropsConditions(t *testing.T) {
	s := newAPIServer(t)
	crds, err := kubetest.LiqoCRDs()
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range crds {
		crd := new(apiextensionsv1.CustomResourceDefinition)
		if err := yaml.UnmarshalStrict(text, crd); err != nil {
			t.Fatal(err)
		}
		s.create(t, crd)
	}
	within(t, "the kinds are served", func() error { return s.client.List(t.Context(), &v1alpha1.TunnelEndpointList{}) })
	te := endpoint(1)
	s.namespace(t, te.Namespace)
	within(t, "the TunnelEndpoint is made", func() error { return client.IgnoreAlreadyExists(s.client.Create(t.Context(), &te)) })

	node := netip.MustParseAddr("172.30.1.11")
	report := Report{Interface: "isthmus.host", Index: 7, NextHop: netip.MustParseAddr("169.254.100.1")}
	peer := PeerReport{ID: "id-1", Endpoint: netip.MustParseAddrPort("192.0.2.9:5871"), PublicKey: "key",
		AllowedIPs: [2]netip.Prefix{netip.MustParsePrefix("10.101.0.0/20"), netip.MustParsePrefix("10.101.128.0/22")}}
	api := &counted{Client: s.client}
	var w *writer
	restart := func() {
		g, err := NewGateway(GatewayOptions{Config: s.config, Namespace: te.Namespace, Pod: "p", Cluster: self})
		if err != nil {
			t.Fatal(err)
		}
		g.client = api
		w = &writer{Gateway: g, memory: make(map[types.UID]*memory)}
	}
	now := time.Now()
	round := func() v1alpha1.Connection {
		t.Helper()
		have := new(v1alpha1.TunnelEndpoint)
		if err := s.client.Get(t.Context(), client.ObjectKeyFromObject(&te), have); err != nil {
			t.Fatal(err)
		}
		w.writeStatus(t.Context(), have, statusFor(have, node, report, peer, now), now)
		if err := s.client.Get(t.Context(), client.ObjectKeyFromObject(&te), have); err != nil {
			t.Fatal(err)
		}
		return have.Status.Connection
	}
	for _, step := range []struct {
		name    string
		restart bool
		status  v1alpha1.ConnectionStatus
		reason  string
		writes  int // expected in five rounds
	}{
		{"first", true, v1alpha1.Connecting, v1alpha1.CauseConnecting, 1},
		{"connected", false, v1alpha1.Connected, v1alpha1.CauseConnected, 1},
		{"another gateway, which does not know that conditions are dropped", true, v1alpha1.Connected, v1alpha1.CauseConnected, 1},
		{"lost, when its only write has changed nothing", false, v1alpha1.ConnectionError, v1alpha1.CausePeerSilent, 1},
		{"another reason, in the condition alone", false, v1alpha1.ConnectionError, v1alpha1.CauseNoAnswer, 0},
		{"connected again", false, v1alpha1.Connected, v1alpha1.CauseConnected, 1},
	} {
		if step.restart {
			restart()
		}
		peer.Status, peer.Reason, peer.Message, peer.RTT = step.status, step.reason, "in a sentence", 0
		if step.status == v1alpha1.Connected {
			peer.RTT = 7 * time.Millisecond
		}
		now, api.patches = now.Add(time.Minute), 0
		for range 5 {
			if got := round(); got.Status != step.status {
				t.Fatalf("%s: the object says %q; want %q", step.name, got.Status, step.status)
			}
			now = now.Add(time.Second)
		}
		if api.patches != step.writes {
			t.Errorf("%s: %d writes; want %d", step.name, api.patches, step.writes)
		}
	}
}
