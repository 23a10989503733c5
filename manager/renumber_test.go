package manager

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

// connectToLiqo returns a connect function for a server with Liqo's CRDs of net.liqo.io.
func connectToLiqo(t *testing.T) func(context.Context, *kubetest.Server) (*rest.Config, client.Client, error) {
	dir := t.TempDir()
	return func(ctx context.Context, server *kubetest.Server) (*rest.Config, client.Client, error) {
		ours, err := filepath.Glob("../deploy/crds/isthmus.net_*.yaml")
		liqos, errLiqo := kubetest.LiqoCRDs()
		if err := errors.Join(err, errLiqo); err != nil {
			return nil, nil, err
		}
		for _, file := range ours {
			text, err := os.ReadFile(file)
			if err != nil {
				return nil, nil, err
			}
			liqos = append(liqos, text)
		}
		for i, text := range liqos {
			if err := os.WriteFile(filepath.Join(dir, string(rune('a'+i))+".yaml"), text, 0o600); err != nil {
				return nil, nil, err
			}
		}
		return managertest.ConnectWith(ctx, server, dir)
	}
}

// ready waits until both sides are Ready.
func ready(sides ...*side) {
	for _, s := range sides {
		s.T.Helper()
		s.peer.WaitForReason(isthmus.ConditionTunnelEndpoint, isthmus.ReasonAgreed)
		s.connected()
	}
	for _, s := range sides {
		s.peer.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConnected)
	}
}

// renumber restarts the manager of a side with another PodCIDR. The other side's manager may be
// stopped.
func (s *side) renumber(pods string) {
	s.T.Helper()
	s.stop()
	s.pods = pods
	s.manage()
	s.Until("the other network is published here", func() bool { return s.peer.Original().Spec.PodCIDR == pods })
}

// claims returns the copy of the other side's NetworkConfig.
func (s *side) claims(other *side) *v1alpha1.NetworkConfig {
	s.T.Helper()
	nc := new(v1alpha1.NetworkConfig)
	s.OK(s.API().Get(s.Ctx, client.ObjectKey{Namespace: s.peer.NS, Name: s.Self.UniqueName()}, nc))
	return nc
}

// While the peer's manager is stopped, its answer to our previous networks does not count for our
// present networks.
func TestAnswerToOurPreviousNetworksIsIgnored(t *testing.T) {
	a, b := twoSides(t)
	ready(a, b)
	before := a.peer.Endpoint().Spec
	b.stop()
	a.renumber("10.210.0.0/17")
	a.Until("the peer's API server has it", func() bool { return b.claims(a).Spec.PodCIDR == a.pods })
	a.peer.WaitForReason(isthmus.ConditionAnswered, isthmus.ReasonWaitingAnswer)
	a.peer.WaitForReason(isthmus.ConditionTunnelEndpoint, isthmus.ReasonWaiting)
	a.Always("the TunnelEndpoint is what both sides have agreed upon", func() bool {
		is := a.peer.Endpoint().Spec
		return is.LocalPodCIDR == before.LocalPodCIDR && is.LocalNATPodCIDR == before.LocalNATPodCIDR && !a.peer.HasReason(isthmus.ConditionAnswered, isthmus.ReasonAnswered)
	})
	b.manage()
	agreed(a, b)
	ready(a, b)
	part(a, b)
}

// Liqo's CRDs have no conditions. A Peering still becomes ready, also after a change of networks,
// and then nothing is written any more.
func TestPeeringBecomesReadyWithLiqosCRDs(t *testing.T) {
	a, b := twoSidesWith(t, connectToLiqo(t))
	ready(a, b)
	before := waitIdle(a, b)
	a.Always("nothing is written at rest", func() bool { return a.versions()+b.versions() == before })
	a.renumber("10.210.0.0/17")
	agreed(a, b)
	ready(a, b)
	part(a, b)
}

// part ends the peering, so that the next test starts with an empty IPAM state.
func part(sides ...*side) {
	for _, s := range sides {
		s.T.Helper()
		s.peer.Delete()
	}
	for _, s := range sides {
		s.Until("the Peering is gone", s.peer.Deleted)
	}
}

// agreed waits until the TunnelEndpoints of both sides have the PodCIDR of s.
func agreed(s, other *side) {
	s.T.Helper()
	seen := func(own, nat string) string {
		if nat == v1alpha1.None {
			return own
		}
		return nat
	}
	s.Until("both sides use the other network", func() bool {
		here, there := s.peer.Endpoint(), other.peer.Endpoint()
		return here != nil && there != nil && here.Spec.LocalPodCIDR == s.pods && there.Spec.RemotePodCIDR == s.pods &&
			seen(s.pods, here.Spec.LocalNATPodCIDR) == seen(s.pods, there.Spec.RemoteNATPodCIDR)
	})
}
