package routeagent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/diff"
)

// grants are the networks of peers as an agent knows them. A network goes when the manager takes it
// back, which books of a higher edition say that lack it. Books that lack it otherwise were edited,
// emptied, deleted or restored by somebody, and no peering has ended with that.
type grants struct {
	networks []netip.Prefix // sorted; named and those that nobody has taken back
	named    []netip.Prefix // by the books that were read last
	edition  int64          // the highest that was read; 0: those who write books have none
}

// unknownEdition is that of networks which an agent before us refused: the first books that we read
// may be of any age.
const unknownEdition = -1

// hold adds networks that an agent before us refused. With unknownEdition the books have to be of a
// higher edition than the first that are read.
func (g *grants) hold(networks []netip.Prefix, edition int64) {
	g.networks, g.edition = join(g.networks, networks), edition
	if g.named == nil {
		g.named = g.networks
	}
}

// read takes what the books name, nil when there are none, and returns a problem when they lack
// networks that were not taken back.
func (g *grants) read(named []netip.Prefix, edition int64) []fabric.Problem {
	if named == nil {
		return nil // the books are away, and with them no peering has ended
	}
	before, now := g.networks, g.named
	if now == nil || !slices.Equal(named, now) {
		now = join(named)
	}
	lacks, _, _ := diff.Of(now, before, func(p netip.Prefix) netip.Prefix { return p })
	g.named, g.networks = now, now
	older := edition == 0 && g.edition <= 0 // the books of an older manager, or Liqo's, count as they are
	kept := !older && (g.edition == unknownEdition || edition <= g.edition)
	g.edition = max(g.edition, edition)
	if !kept || len(lacks) == 0 {
		return nil
	}
	g.networks = join(now, lacks)
	var lacking []string
	for _, p := range lacks {
		lacking = append(lacking, p.String())
	}
	some := strings.Join(lacking[:min(len(lacking), 4)], ", ")
	if more := len(lacking) - 4; more > 0 {
		some += fmt.Sprintf(" and %d more", more)
	}
	return []fabric.Problem{{Origin: fabric.Origin{Kind: "IpamStorage"}, Field: "spec.clusterSubnets", Message: fmt.Sprintf(
		"lacks %s, which the manager has not taken back: they stay as they are, and refused where there is no tunnel; want them there, or an annotation %s higher than %d", some, isthmus.AnnotationEdition, g.edition)}}
}

// join returns all networks, sorted. What it returns may be what it got, and is not to be changed.
func join(lists ...[]netip.Prefix) []netip.Prefix {
	if len(lists) == 1 && fabric.InOrder(lists[0]) {
		return lists[0]
	}
	all := slices.Concat(lists...)
	for i := range all {
		all[i] = all[i].Masked()
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}
