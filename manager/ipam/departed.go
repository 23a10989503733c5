package ipam

import (
	"net/netip"
	"slices"
)

// maxDeparted is the maximum number of departed peers whose networks are remembered. The peer that
// left first is dropped first.
const maxDeparted = 256

// A departed records the networks that a peer had here when it left. A Liqo peer keeps the first
// answer that it gets. So a returning peer needs the same networks again. Other peers get these
// networks only if no other network is free.
type departed struct {
	ID       string
	Pod, Ext netip.Prefix
}

// remember records the networks of a peer that leaves. It appends to a new slice, because published
// slices never change.
func (b *State) remember(id string, g Allocation) {
	if !g.Pod.IsValid() {
		return
	}
	b.forget(id)
	if len(b.departed) >= maxDeparted {
		b.forget(b.departed[0].ID)
	}
	b.departed = append(slices.Clone(b.departed), departed{id, g.Pod, g.External})
}

// forget removes the record of the peer's former networks.
func (b *State) forget(id string) {
	for i, f := range b.departed {
		if f.ID == id {
			b.departed = slices.Delete(slices.Clone(b.departed), i, i+1)
			return
		}
	}
}

// PreviousOf returns the networks that a peer had here when it left. It returns false once the peer
// has come back.
func (b State) PreviousOf(id string) (Allocation, bool) {
	for _, f := range b.departed {
		if f.ID == id {
			return Allocation{f.Pod, f.Ext}, true
		}
	}
	return Allocation{}, false
}
