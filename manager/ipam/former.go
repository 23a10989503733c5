package ipam

import (
	"net/netip"
	"slices"
)

// MaxFormer is how many peers that have left are remembered, the latest ones.
const MaxFormer = 256

// A former is what a peer had here when it left. A Liqo keeps the first answer that it gets, so the
// peer has it again when it comes back, and others get something else while there is anything else.
type former struct {
	ID       string
	Pod, Ext netip.Prefix
}

// remember notes what a peer had. In formers, which nobody changes, the latest is the last.
func (b *State) remember(id string, g Grant) {
	if !g.Pod.IsValid() {
		return
	}
	b.forget(id)
	if len(b.formers) >= MaxFormer {
		b.forget(b.formers[0].ID)
	}
	b.formers = append(slices.Clone(b.formers), former{id, g.Pod, g.External})
}

// forget takes the note away.
func (b *State) forget(id string) {
	for i, f := range b.formers {
		if f.ID == id {
			b.formers = slices.Delete(slices.Clone(b.formers), i, i+1)
			return
		}
	}
}

// FormerOf returns what a peer had here when it left, while it is away.
func (b State) FormerOf(id string) (Grant, bool) {
	for _, f := range b.formers {
		if f.ID == id {
			return Grant{f.Pod, f.Ext}, true
		}
	}
	return Grant{}, false
}
