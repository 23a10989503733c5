package routeagent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/fabric"
)

// allocations are the networks of peers for which an agent refuses packets. A network stays in the
// list until each NetworkAllocation that has named it has freed it with a higher revision. If an
// object is deleted, edited or restored from a backup, its networks stay, because this does not
// show that a peering has ended.
type allocations struct {
	// known has the networks that objects have named and not freed since. Each network has the
	// highest revision in which it was named. The list is sorted.
	known    []fabric.Allocation
	networks []netip.Prefix // the networks in known
}

// If a previous agent refused a network, and no snapshot has the object that named it, the network
// has the revision unknownRevision. The method read replaces this by the highest revision in the
// current objects. From then on, any object can free the network with a higher revision.
const unknownRevision = 0

// hold adds networks for which a previous agent refused packets.
func (g *allocations) hold(all []fabric.Allocation) { g.take(slices.Concat(g.known, all)) }

func (g *allocations) take(known []fabric.Allocation) {
	g.known = fabric.Latest(known)
	if networks := networksOf(g.known); !slices.Equal(networks, g.networks) {
		g.networks = networks // assigned only after a change, because callers detect changes by the address of the slice
	}
}

// read applies the NetworkAllocations. It returns a Problem if known contains networks that these
// objects neither name nor free.
func (g *allocations) read(now fabric.Allocations) []fabric.Problem {
	all := slices.Clone(now.Named)
	var lacking []string
	for _, had := range g.known {
		if had.Object == "" && had.Revision == unknownRevision {
			had.Revision = now.Revision
		}
		if _, named := slices.BinarySearchFunc(now.Named, had, fabric.Allocation.Compare); !named && freed(had, now.Freed) {
			continue
		}
		all = append(all, had)
		if named := startingAt(now.Named, had.Network); len(named) > 0 && named[0].Network == had.Network {
			continue
		}
		if had.Object == "" {
			had.Object = "any"
		}
		lacking = append(lacking, fmt.Sprintf("%v (%s)", had.Network, had.Object))
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
		"%s: the named object no longer has these networks, and has not freed them, so the node still refuses them outside of the tunnel; restore them, or add them to spec.freed of that object, with the current time in milliseconds as revision", some)}}
}

// freed reports whether list has an entry for allocation.Network whose revision is higher than
// allocation.Revision. If allocation has an Object, only entries of the same Object count.
func freed(allocation fabric.Allocation, list []fabric.Allocation) bool {
	for _, f := range startingAt(list, allocation.Network) {
		if f.Network != allocation.Network {
			break
		}
		if (allocation.Object == "" || f.Object == allocation.Object) && f.Revision > allocation.Revision {
			return true
		}
	}
	return false
}

// startingAt returns the entries of a sorted list from network p on.
func startingAt(list []fabric.Allocation, p netip.Prefix) []fabric.Allocation {
	at, _ := slices.BinarySearchFunc(list, p, func(a fabric.Allocation, p netip.Prefix) int { return a.Network.Compare(p) })
	return list[at:]
}
