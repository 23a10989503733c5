package routeagent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/fabric"
)

// grants are the networks of peers as an agent knows them. A network goes when no NetworkAllocation names
// it and one frees it with a higher revision than the last that named it. An object that is missing, edited
// or restored from a backup does not do that, and no peering has ended with it.
type grants struct {
	known    []fabric.Allocation // sorted: those named, and those that nobody has freed; the revision is the highest that named it
	networks []netip.Prefix      // of known
}

// unknownRevision is that of networks which an agent before us refused, and nobody knows since when: what
// frees one has to be newer than all that is there when we read for the first time.
const unknownRevision = 0

// hold adds networks that an agent before us refused.
func (g *grants) hold(networks []fabric.Allocation) {
	g.take(slices.Concat(g.known, networks))
}

func (g *grants) take(known []fabric.Allocation) {
	known = fabric.Latest(known)
	if slices.EqualFunc(known, g.networks, func(a fabric.Allocation, p netip.Prefix) bool { return a.Network == p }) {
		g.known = known
		return // the list stays the same one
	}
	g.known, g.networks = known, networksOf(known)
}

// read takes what the objects say, and returns a problem when they lack networks that were not freed.
func (g *grants) read(now fabric.Allocations) []fabric.Problem {
	all := slices.Clone(now.Named)
	var lacking []string
	for _, had := range g.known {
		if had.Revision == unknownRevision {
			had.Revision = now.Revision
		}
		if _, named := find(now.Named, had.Network); !named {
			if at, freed := find(now.Freed, had.Network); freed && now.Freed[at].Revision > had.Revision {
				continue
			}
			lacking = append(lacking, had.Network.String())
		}
		all = append(all, had)
	}
	g.take(all)
	if len(lacking) == 0 {
		return nil
	}
	some := strings.Join(lacking[:min(len(lacking), 4)], ", ")
	if more := len(lacking) - 4; more > 0 {
		some += fmt.Sprintf(" and %d more", more)
	}
	return []fabric.Problem{{Origin: fabric.Origin{Kind: "NetworkAllocation"}, Field: "spec.networks", Message: fmt.Sprintf(
		"no object names %s, and none has freed them: they stay as they are, and refused where there is no tunnel; want them named again, or in spec.freed with a revision of now in milliseconds", some)}}
}

// find looks for a network in a sorted list.
func find(list []fabric.Allocation, p netip.Prefix) (at int, found bool) {
	return slices.BinarySearchFunc(list, p, func(a fabric.Allocation, p netip.Prefix) int { return a.Network.Compare(p) })
}
