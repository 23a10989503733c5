package kube

import (
	"net/netip"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
)

// A holder without a majority of votes keeps running but sends nothing. The metrics must not
// count it as active beside the gateway that the nodes have elected.
func TestAHolderWithoutVotesIsNotCountedAsActive(t *testing.T) {
	g, err := NewGateway(GatewayOptions{Config: &rest.Config{Host: "https://192.0.2.1"}, Namespace: "n", Pod: "me", PodIP: netip.MustParseAddr("192.0.2.2"), Node: "a", Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	g.election = &election{identity: "me", name: "me", sending: true, log: quiet, changed: newSignal(), votes: &ballot{Candidate: g.candidate}}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(g.Collector())
	for _, c := range []struct {
		gated bool
		want  float64
	}{{true, 0}, {false, 1}} {
		g.candidate.Allow(true, false, c.gated)
		if _, self := g.Active(); !self {
			t.Fatal("it is not the active one; this test wants one that is silent")
		}
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, f := range families {
			if f.GetName() != "isthmus_gateway_active" {
				continue
			}
			found = true
			if got := f.GetMetric()[0].GetGauge().GetValue(); got != c.want {
				t.Errorf("only by votes: %v: isthmus_gateway_active is %v, want %v", c.gated, got, c.want)
			}
		}
		if !found {
			t.Error("no isthmus_gateway_active")
		}
	}
}
