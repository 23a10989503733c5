package exchange

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// endHolds lets the hold of released networks expire.
func (a *answering) endHolds() {
	a.T.Helper()
	_, err := a.store.Update(a.Ctx, func(b ipam.State) (ipam.State, error) {
		next, _ := b.Age(time.Now().Add(fabric.ReleaseHold+time.Second), func(string) bool { return true })
		if len(next.Changed(b)) == 0 {
			return b, errors.New("nothing is held")
		}
		return next, nil
	})
	a.OK(err)
}

// A peer vanished while no manager ran, because somebody removed finalizers or deleted CRDs. Its
// networks are released after a day, with an Event, and are free after another day.
func TestNetworksOfAVanishedPeerAreReleasedAfterADay(t *testing.T) {
	a := newAnswering(t)
	remaining := a.partner("there", 2)
	leftID := a.Describe("gone").Cluster.ClusterID
	for i, id := range []string{leftID, remaining.Cluster.ClusterID} {
		_, err := a.store.Update(a.Ctx, func(b ipam.State) (ipam.State, error) {
			b, _, err := b.Allocate(ipam.Request{ID: id, Pod: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(150 + i), 0, 0}), 16),
				External: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(160 + i), 0, 0}), 20)})
			return b, err
		})
		a.OK(err)
	}
	now := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	a.store.WithClock(func(context.Context) (time.Time, error) { return now, nil })
	r := &Releases{Cache: a.mgr.GetCache(), Peers: peers.Peers{Reader: a.mgr.GetCache(), Self: a.Self.ClusterID}, Store: a.store, Events: a.events, Log: slog.New(slog.DiscardHandler)}
	a.Until("the cache has the Peering", func() bool {
		named, err := r.namedIDs(a.Ctx)
		a.OK(err)
		return named[remaining.Cluster.ClusterID]
	})
	a.OK(r.sweep(a.Ctx))
	now = now.Add(ipam.UnusedGrace - time.Second)
	a.OK(r.sweep(a.Ctx))
	if _, has := a.store.State().AllocationOf(leftID); !has {
		t.Error("released early")
	}
	now = now.Add(time.Second)
	a.OK(r.sweep(a.Ctx))
	if at := a.store.State().ReleasedAt(leftID); !at.Equal(now) || len(a.store.State().NetworksOf(leftID)) != 2 {
		t.Errorf("released at %v, nodes refuse %v", at, a.store.State().NetworksOf(leftID))
	}
	select {
	case e := <-a.events.Events:
		for _, want := range []string{reasonReleased, leftID, "10.150.0.0/16", "2026-11-27T12:00:00Z"} {
			if !strings.Contains(e, want) {
				t.Errorf("the Event %q lacks %s", e, want)
			}
		}
	default:
		t.Error("no Event")
	}
	now = now.Add(fabric.ReleaseHold)
	a.OK(r.sweep(a.Ctx))
	if n := a.store.State().NetworksOf(leftID); len(n) > 0 {
		t.Errorf("after another day nodes refuse %v", n)
	}
	if _, has := a.store.State().AllocationOf(remaining.Cluster.ClusterID); !has {
		t.Error("a peer with a Peering is released")
	}
}
