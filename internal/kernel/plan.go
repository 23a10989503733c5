package kernel

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/internal/diff"
)

// An Op is one change of the kernel's state.
type Op struct {
	Remove bool
	Object Object
}

// Command prints the change as a command that an operator could type. inner is the path of the
// Inner namespace for nsenter(1).
func (o Op) Command(inner string) string { return o.Object.command(o.Remove, inner) }

// A Plan is a list of changes in the order of execution.
type Plan []Op

// Commands prints one command per line.
func (p Plan) Commands(inner string) string {
	var b strings.Builder
	for _, o := range p {
		b.WriteString(o.Command(inner) + "\n")
	}
	return b.String()
}

// AdditionsFor is PlanFor without removals. It does not add a rule that already exists at another
// priority. An older version of the program, which used other priorities, has added that rule. A
// second refusing rule could come before the other rules of the older version, and refuse packets
// that these rules route.
func AdditionsFor(have, want State) Plan {
	wanted := make(map[netip.Prefix]struct{}, len(want.Routes))
	for _, r := range want.Routes {
		wanted[r.Prefix] = struct{}{}
	}
	all := have.Routes
	have.Routes = nil
	for _, r := range all { // skip the other routes, of which there may be thousands
		if _, found := wanted[r.Prefix]; found {
			have.Routes = append(have.Routes, r)
		}
	}
	return slices.DeleteFunc(PlanFor(have, want), func(o Op) bool {
		added, isRule := o.Object.(Rule)
		return o.Remove || isRule && slices.ContainsFunc(have.Rules, func(r Rule) bool {
			added.Priority = r.Priority
			return r == added
		})
	})
}

// With returns the state that results from a plan. ok is false if the plan does anything but add
// routes and rules. The routes of s must be sorted by Route.Compare.
func (s State) With(added Plan) (now State, ok bool) {
	now = s
	var routes []Route
	for _, o := range added {
		switch v := o.Object.(type) {
		case Route:
			routes = append(routes, v)
		case Rule:
			now.Rules = append(slices.Clone(now.Rules), v)
		default:
			return s, false
		}
		if o.Remove {
			return s, false
		}
	}
	if len(routes) == 0 {
		return now, true
	}
	slices.SortFunc(routes, Route.Compare)
	before := s.Routes
	if !slices.IsSortedFunc(before, Route.Compare) {
		before = slices.SortedFunc(slices.Values(before), Route.Compare)
	}
	now.Routes = make([]Route, 0, len(before)+len(routes))
	for _, r := range before {
		order := 1
		for len(routes) > 0 {
			if order = routes[0].Compare(r); order >= 0 {
				break
			}
			now.Routes, routes = append(now.Routes, routes[0]), routes[1:]
		}
		if len(routes) == 0 || order > 0 { // no added route has replaced r
			now.Routes = append(now.Routes, r)
		}
	}
	now.Routes = append(now.Routes, routes...)
	return now, true
}

// Compare orders routes by table, network and metric. In the kernel, a new route replaces an
// existing route with the same table, network and metric.
func (r Route) Compare(other Route) int {
	return cmp.Or(cmp.Compare(r.Table, other.Table), r.Prefix.Compare(other.Prefix), cmp.Compare(r.Metric, other.Metric), cmp.Compare(r.In, other.In))
}

// key returns the route without the properties that can be replaced.
func (r Route) key() Route {
	return Route{In: r.In, Prefix: r.Prefix, Table: r.Table, Metric: r.Metric}
}

// PlanFor returns the changes that turn the State have into the State want. The filter comes first,
// so that the overlay never exists without it. Devices come next, because other objects depend on
// them; a device is brought up after its settings. Then come the other additions, and finally the
// removals in reverse order: a moment with two routes is harmless, a moment without a route is an
// outage. A device is removed earlier only if it cannot be changed into the wanted device, or is
// one end of a veth pair. The objects on a device disappear with the device.
func PlanFor(have, want State) Plan {
	var adds, removes Plan
	planKind(&adds, &removes, have.Bridges, want.Bridges, func(Bridge) bool { return true })
	planKind(&adds, &removes, have.Filters, want.Filters, func(Filter) bool { return true })
	planKind(&adds, &removes, have.SourceNAT, want.SourceNAT, func(SourceNAT) bool { return true })
	planKind(&adds, &removes, have.Accepts, want.Accepts, Accept.InChain)
	for _, d := range have.Devices {
		switch {
		case slices.Contains(want.Devices, d):
			continue
		case slices.ContainsFunc(want.Devices, d.conflictsWith):
			adds = append(adds, Op{true, d})
		default:
			removes = append(removes, Op{true, d})
		}
		have = have.afterRemovalOf(d)
	}
	planKind(&adds, nil, have.Devices, want.Devices, func(d Device) Device { return d })
	planKind(&adds, nil, have.Settings, want.Settings, func(s Setting) Setting { s.Value = ""; return s })
	planKind(&adds, nil, have.Links, want.Links, func(l Link) Place { return Place{l.In, l.Name} })
	planKind(&adds, &removes, have.Addresses, want.Addresses, func(a Address) Address { return a })
	planKind(&adds, &removes, have.FDB, want.FDB, func(f FDBEntry) FDBEntry { f.Dst = netip.Addr{}; return f })
	planKind(&adds, &removes, have.Neighbors, want.Neighbors, func(n Neighbor) Neighbor { n.MAC = MAC{}; return n })
	planKind(&adds, &removes, have.Routes, want.Routes, Route.key)
	planKind(&adds, &removes, have.Rules, want.Rules, func(r Rule) Rule { return r })
	slices.Reverse(removes)
	return append(adds, removes...)
}

// planKind appends the changes of one kind of object to the plans adds and removes. removes is nil
// for a kind that cannot be removed separately. If an object exists with other properties, adding
// it again replaces it. key returns an object without the properties that can be replaced.
func planKind[K comparable, V interface {
	comparable
	Object
}](adds, removes *Plan, have, want []V, key func(V) K) {
	added, replaced, removed := diff.Of(have, want, key)
	for _, v := range append(added, replaced...) {
		*adds = append(*adds, Op{false, v})
	}
	if removes != nil {
		for _, v := range removed {
			*removes = append(*removes, Op{true, v})
		}
	}
}

// conflictsWith reports whether d must be removed before the device want can be made.
func (d Device) conflictsWith(want Device) bool {
	return d.In == want.In && d.Name == want.Name || d.In == Inner && d.Name == want.Peer
}

// afterRemovalOf returns s after the removal of a device, which also removes the objects on it.
func (s State) afterRemovalOf(d Device) State {
	removed := func(in Namespace, dev string) bool {
		return in == d.In && dev == d.Name || in == Inner && dev == d.Peer && dev != ""
	}
	return State{
		Bridges: s.Bridges, Filters: s.Filters, SourceNAT: s.SourceNAT, Accepts: s.Accepts,
		Devices: dropped(s.Devices, func(other Device) bool { return removed(other.In, other.Name) }),
		Settings: dropped(s.Settings, func(s Setting) bool {
			return slices.ContainsFunc(strings.Split(s.Path, "/"), func(dev string) bool { return removed(s.In, dev) })
		}),
		Links:     dropped(s.Links, func(l Link) bool { return removed(l.In, l.Name) }),
		Addresses: dropped(s.Addresses, func(a Address) bool { return removed(a.In, a.Dev) }),
		FDB:       dropped(s.FDB, func(f FDBEntry) bool { return removed(f.In, f.Dev) }),
		Neighbors: dropped(s.Neighbors, func(n Neighbor) bool { return removed(n.In, n.Dev) }),
		Routes:    dropped(s.Routes, func(r Route) bool { return removed(r.In, r.Dev) }),
		Rules:     s.Rules,
	}
}

func dropped[T any](list []T, match func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(list), match)
}
