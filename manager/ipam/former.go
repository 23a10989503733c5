package ipam

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/fabric"
)

// MaxFormer is how many peers that have left are remembered, the latest ones. An annotation has
// room for them beside Notes.
const MaxFormer = 256

// A former is what a peer had here when it left. A Liqo keeps the first answer that it gets, so the
// peer has it again when it comes back, and others get something else while there is anything else.
type former struct {
	ID       string
	Pod, Ext netip.Prefix
}

// remember notes what a peer had. In formers, which nobody changes, the latest is the last.
func (b *Book) remember(id string, g Grant) {
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
func (b *Book) forget(id string) {
	for i, f := range b.formers {
		if f.ID == id {
			b.formers = slices.Delete(slices.Clone(b.formers), i, i+1)
			return
		}
	}
}

// FormerOf returns what a peer had here when it left, while it is away.
func (b Book) FormerOf(id string) (Grant, bool) {
	for _, f := range b.formers {
		if f.ID == id {
			return Grant{f.Pod, f.Ext}, true
		}
	}
	return Grant{}, false
}

// Formers returns as text what peers had that have left, for which Liqo's books have no place. It
// is empty when there is nothing to say.
func (b Book) Formers() string {
	if len(b.formers) == 0 {
		return ""
	}
	list := make([][3]string, len(b.formers))
	for i, f := range b.formers {
		list[i] = [3]string{f.ID, f.Pod.String(), f.Ext.String()}
	}
	text, err := json.Marshal(list)
	if err != nil {
		panic(err) // strings can be marshalled
	}
	return string(text)
}

// WithFormers returns the Book with what Formers said of it, without peers that are back.
func (b Book) WithFormers(text string) (Book, error) {
	if text == "" {
		return b, nil
	}
	var list [][3]string
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return b, err
	}
	next := b
	for i, f := range list {
		var both [2]netip.Prefix
		for k, value := range f[1:] {
			p, err := netip.ParsePrefix(value)
			if err != nil || fabric.CheckNetwork(p) != "" {
				return b, fmt.Errorf("entry %d: %s is no network of a peer; want one such as 10.246.0.0/16", i, quote(value))
			}
			both[k] = p
		}
		if wrong := fabric.CheckClusterID(f[0]); wrong != "" {
			return b, fmt.Errorf("entry %d: the cluster ID %s", i, wrong)
		}
		if _, back := b.GrantOf(f[0]); !back {
			next.remember(f[0], Grant{both[0], both[1]})
		}
	}
	return next, nil
}
