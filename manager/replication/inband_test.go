package replication

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/inband"
)

func TestIdentityMustMatchTheInBandSetting(t *testing.T) {
	kubeconfig := func(server string) identity {
		return identity{endpoint: endpoint{server: server, proxy: "http://proxy:1"}, token: "t", user: "isthmus-peer"}
	}
	liqo := identity{endpoint: endpoint{server: "https://198.51.100.7:6443", cert: "c", key: "k"}}
	for _, c := range []struct {
		name   string
		id     identity
		peer   Target
		wrong  error
		inBand string
	}{
		{"through the tunnel", kubeconfig(isthmus.InBandServer), Target{ID: "b", InBand: true}, nil, "b"},
		{"an older one through the tunnel", kubeconfig("https://198.51.100.7:6443"), Target{ID: "b", InBand: true}, nil, "b"},
		{"directly", kubeconfig("https://198.51.100.7:6443"), Target{ID: "b"}, nil, ""},
		{"what would be our own API server", kubeconfig(isthmus.InBandServer), Target{ID: "b"}, errOutOfBand, ""},
		{"a Liqo's", liqo, Target{ID: "b", InBand: true}, errInBand, ""},
	} {
		err := c.id.checkInBand(c.peer)
		if !errors.Is(err, c.wrong) || c.id.inBand != c.inBand {
			t.Errorf("%s: by %q, %v", c.name, c.id.inBand, err)
		}
		if c.inBand != "" && c.id.proxy != "" {
			t.Errorf("%s: by a proxy too", c.name)
		}
	}
}

// Options.InBand makes the connections through the tunnel. If it fails, the condition has its
// error.
func TestInBandConnectionsUseOnlyTheTunnel(t *testing.T) {
	dialled := ""
	p := pool{inBand: func(_ context.Context, peer string) (net.Conn, error) {
		dialled = peer
		return nil, &inband.RefusedError{Reason: "the tunnel to the peer is down"}
	}}
	id := identity{endpoint: endpoint{server: isthmus.InBandServer, inBand: "b"}, token: "t", user: "isthmus-peer"}
	l, err := newLink(&p, id, "tenant")
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	_, err = l.get(t.Context(), "a")
	c := failure(id.String(), err)
	if dialled != "b" || c.Reason != isthmus.ReasonUnreachable ||
		!strings.HasPrefix(c.Message, "the peer's API server, through the tunnel, is unreachable: the tunnel to the peer is down; ") {
		t.Errorf("asked for %q; %+v", dialled, c)
	}
}

// The peer closes the tunnel as soon as our copy is being deleted. The response to the deletion, or
// an event of the watch, may be the last message that gets through.
func TestInBandUnpeeringDoesNotWaitForADeletedCopy(t *testing.T) {
	for _, c := range []struct {
		name   string
		inBand bool
		copied []edit
		want   []action
	}{
		{"in band", true, []edit{received, claimed, dying}, []action{{release, "n"}}},
		{"directly", false, []edit{received, claimed, dying}, nil},
		{"in band, not deleted yet", true, []edit{received, claimed}, []action{{remove, "n"}}},
	} {
		got := plan(Target{ID: "b", InBand: c.inBand}, config("n", held, dying), byName([]*v1alpha1.NetworkConfig{config("n", c.copied...)}))
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
