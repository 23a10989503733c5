package routeagent

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/diff"
)

// An object is one kernel object; fabric.Node has the kinds. It prints as the
// commands that make and remove it.
type object interface {
	Add() string
	Del() string
}

// An op is one change of the kernel's state.
type op struct {
	remove bool
	object object
}

func (o op) command() string {
	if o.remove {
		return o.object.Del()
	}
	return o.object.Add()
}

// A plan is a list of changes in the order in which to make them.
type plan []op

// String prints one command a line.
func (p plan) String() string {
	var b strings.Builder
	for _, o := range p {
		b.WriteString(o.command() + "\n")
	}
	return b.String()
}

// planFor compares. Additions come before removals, in the opposite order of
// each other: rules go first, since they lead to the rest. Only a device that
// cannot be changed to what is wanted is removed before.
func planFor(have, want fabric.Node) plan {
	var adds, removes plan
	if len(have.Devices) > 0 && len(want.Devices) > 0 && have.Devices[0] != want.Devices[0] {
		adds = append(adds, op{true, have.Devices[0]})
		have = withoutDevice(have)
	}
	planKind(&adds, &removes, have.Devices, want.Devices, func(fabric.Device) bool { return true })
	planKind(&adds, nil, have.Sysctls, want.Sysctls, func(s fabric.Sysctl) string { return s.Path })
	planKind(&adds, nil, have.Links, want.Links, func(fabric.Link) bool { return true })
	planKind(&adds, &removes, have.Addresses, want.Addresses, func(a fabric.Address) fabric.Address { return a })
	planKind(&adds, &removes, have.FDB, want.FDB, func(f fabric.FDBEntry) fabric.MAC { return f.MAC })
	planKind(&adds, &removes, have.Neighbors, want.Neighbors, func(n fabric.Neighbor) netip.Addr { return n.Addr })
	planKind(&adds, &removes, have.Routes, want.Routes, func(r fabric.Route) [3]any { return [3]any{r.Table, r.Prefix, r.Metric} })
	planKind(&adds, &removes, have.Rules, want.Rules, func(r fabric.Rule) fabric.Rule { return r })
	slices.Reverse(removes)
	return append(adds, removes...)
}

// planKind adds the changes of one kind; removes is nil for a kind that cannot
// be removed by itself. Adding an object that is there in another form replaces it.
func planKind[K comparable, V interface {
	comparable
	object
}](adds, removes *plan, have, want []V, key func(V) K) {
	added, replaced, removed := diff.Of(have, want, key)
	for _, v := range append(added, replaced...) {
		*adds = append(*adds, op{false, v})
	}
	if removes != nil {
		for _, v := range removed {
			*removes = append(*removes, op{true, v})
		}
	}
}

// withoutDevice is n after the kernel lost the device: what hung on it is gone too.
func withoutDevice(n fabric.Node) fabric.Node {
	routes := slices.DeleteFunc(slices.Clone(n.Routes), func(r fabric.Route) bool { return r.Kind == fabric.ViaOverlay || r.Kind == fabric.OnOverlay })
	return fabric.Node{Routes: routes, Rules: n.Rules}
}
