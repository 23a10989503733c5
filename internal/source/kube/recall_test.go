package kube

import (
	"log/slog"
	"net/netip"
	"reflect"
	"testing"
	"testing/synctest"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/voting"
)

func TestAnAgentThatStartsWithoutAnAPIServerFollowsTheVotes(t *testing.T) {
	first, second := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	known := fabric.NodeIntent{OnlyPods: true, Trusted: true, Gateway: first,
		Nodes:       []fabric.ClusterNode{{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("172.16.0.1")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}}},
		Gateways:    []fabric.GatewayPod{{Addr: first, Host: netip.MustParseAddr("172.16.0.1")}, {Addr: second, Host: netip.MustParseAddr("172.16.0.2")}},
		Allocations: fabric.Allocations{Named: []fabric.Allocation{{Object: "b", Network: netip.MustParsePrefix("10.71.0.0/16"), Revision: 7}}, Revision: 7}}
	moved := known
	moved.Gateway = second
	for _, tc := range []struct {
		name   string
		epoch  uint64 // epoch in the saved intent
		holder voting.Holder
		want   *fabric.NodeIntent
	}{
		{"another gateway elected since", 3, voting.Holder{Epoch: 4, Addr: second}, &moved},
		{"the same gateway", 3, voting.Holder{Epoch: 3, Addr: first}, nil},
		{"an older holder", 3, voting.Holder{Epoch: 2, Addr: second}, nil},
		{"a holder that is not a gateway's Pod", 3, voting.Holder{Epoch: 4, Addr: netip.MustParseAddr("10.0.0.3")}, nil},
		{"an intent saved while nodes did not vote", 0, voting.Holder{Epoch: 4, Addr: second}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			directory := t.TempDir()
			before := &nodeWatch{directory: directory, epoch: 1}
			before.remember(known) // saved at a time when nodes voted
			before.epoch = tc.epoch
			before.remember(known)
			synctest.Test(t, func(t *testing.T) {
				w := &nodeWatch{directory: directory, voter: fakeVoter{tc.holder}, caches: &caches{log: slog.New(slog.DiscardHandler)}}
				var got *fabric.NodeIntent
				elected := newSignal()
				stop := w.recall(t.Context(), elected, func(in fabric.NodeIntent, _ []fabric.Problem) { got = &in })
				elected.set()
				synctest.Wait()
				stop()
				if !reflect.DeepEqual(got, tc.want) {
					t.Errorf("delivered %+v; want %+v", got, tc.want)
				}
			})
		})
	}
}
