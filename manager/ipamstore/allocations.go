package ipamstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// maxNetworks bounds two lists of a NetworkAllocation: its networks, and its freed networks. The
// schema has the same bound.
const maxNetworks = 32

// An allocation is the content of one NetworkAllocation as last read or written.
type allocation struct {
	uid      types.UID
	version  string
	since    int64 // the first version with the present networks, or a later one if that version was not seen
	spec     isthmus.NetworkAllocationSpec
	known    int64    // the object's revision when we first read it or last wrote it
	overflow []string // removed networks that the object has no room to list; the next write frees them
	pending  bool     // the object is written, but the IpamStorage is not yet; other managers adopt the object only afterwards
}

// sinceWith returns the first known version of the object that had the same networks as current,
// which is the object as just read or written. A node that has reported that version does not need
// to report a later one.
func (a allocation) sinceWith(current *isthmus.NetworkAllocation) int64 {
	same := a.uid == current.UID && a.spec.Revision == current.Spec.Revision && slices.Equal(a.spec.Networks, current.Spec.Networks)
	if !same || a.since > fabric.Version(current.ResourceVersion) {
		return fabric.NamedSince(string(current.UID), current.ResourceVersion, &current.Spec)
	}
	return a.since
}

// readAllocations reads all NetworkAllocations.
func (s *Store) readAllocations(ctx context.Context) error {
	var list isthmus.NetworkAllocationList
	if err := s.reader.List(ctx, &list); err != nil {
		return fmt.Errorf("list NetworkAllocations: %w", err)
	}
	before := s.allocations
	s.allocations, s.allocated = make(map[string]allocation), false
	now := time.Now()
	for i := range list.Items {
		o := &list.Items[i]
		was := before[o.Name]
		// An unknown version with our own session is a write of ours whose response was lost.
		pending := was.pending && was.version == o.ResourceVersion || was.version != o.ResourceVersion && o.Spec.Session == s.read
		s.allocations[o.Name] = allocation{o.UID, o.ResourceVersion, was.sinceWith(o), o.Spec, cmp.Or(was.known, o.Spec.Revision), was.overflow, pending}
		s.revision = max(s.revision, fabric.Revision(o.Spec.Revision, now))
		for _, f := range o.Spec.Freed {
			s.revision = max(s.revision, fabric.Revision(f.Revision, now))
		}
	}
	return nil
}

// sameAllocations reports whether all NetworkAllocations are as last read or written.
func (s *Store) sameAllocations(ctx context.Context) (bool, error) {
	var list isthmus.NetworkAllocationList
	if err := s.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return false, fmt.Errorf("list NetworkAllocations: %w", err)
	}
	same := len(list.Items) == len(s.allocations)
	for i := range list.Items {
		same = same && list.Items[i].ResourceVersion == s.allocations[list.Items[i].Name].version
	}
	return same, nil
}

// unallocated returns the NetworkAllocations that may differ from the State, as a map from object
// name to cluster ID. An object whose name does not fit its cluster ID has the cluster ID "" in the
// map.
func (s *Store) unallocated(state ipam.State) map[string]string {
	names := make(map[string]string)
	if !s.allocated {
		for name, a := range s.allocations {
			if names[name] = a.spec.ClusterID; fabric.AllocationName(a.spec.ClusterID) != name {
				names[name] = ""
			}
		}
	}
	ids := state.Changed(s.State())
	if !s.allocated {
		ids = state.Clusters()
	}
	for _, id := range append(ids, s.self) {
		if id != "" {
			names[fabric.AllocationName(id)] = id
		}
	}
	return names
}

// allocate writes the State of some clusters into their NetworkAllocations. clusters maps object
// names to cluster IDs. If addOnly is true, allocate only adds networks.
//
// Networks are added before the write of the IpamStorage and freed after it, so that agents never
// lack a network of the IpamStorage. allocate continues after an error, and returns all errors. The
// API server answers Conflict, NotFound or AlreadyExists if an object is not as last read.
func (s *Store) allocate(ctx context.Context, state ipam.State, clusters map[string]string, addOnly bool) error {
	var failed []error
	now := isthmus.UTCTimeOf(time.Now())
	for _, name := range slices.Sorted(maps.Keys(clusters)) {
		have, exists := s.allocations[name]
		want := s.allocationOf(state, clusters[name])
		removed := without(slices.Concat(have.spec.Networks, have.overflow), want.Networks)
		onlyFreed := addOnly && len(removed) > 0 && len(want.Networks) == len(want.Held) && want.Seen == nil && len(without(want.Networks, have.spec.Networks)) == 0
		if exists && onlyFreed || !exists && len(want.Networks) == 0 && want.Own == nil && want.Seen == nil {
			continue
		}
		var overflow []string
		if addOnly { // if there is too little room, networks of the State take precedence
			place := max(0, min(len(removed), maxNetworks-len(want.Networks)))
			for _, n := range removed[:place] {
				want.Networks = append(want.Networks, n)
				want.Held = append(want.Held, isthmus.HeldNetwork{Network: n, ReleasedAt: now})
			}
			overflow, removed = removed[place:], nil
		}
		if want.ClusterID == "" {
			want.ClusterID = have.spec.ClusterID
		}
		if err := s.writeAllocation(ctx, name, want, removed, overflow); err != nil {
			failed = append(failed, fmt.Errorf("NetworkAllocation %s: %w", name, err))
		}
	}
	return errors.Join(failed...)
}

// without returns the elements of list that are not in other.
func without(list, other []string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(n string) bool { return slices.Contains(other, n) })
}

// allocationOf returns the NetworkAllocation of a cluster that follows from a State, without
// revisions.
func (s *Store) allocationOf(state ipam.State, id string) isthmus.NetworkAllocationSpec {
	if id == "" {
		return isthmus.NetworkAllocationSpec{}
	}
	if id == s.self {
		own := state.Own().Networks()
		return isthmus.NetworkAllocationSpec{ClusterID: id, Own: &own}
	}
	return state.Allocation(id)
}

// writeAllocation writes an object unless it is up to date. It frees the networks in removed. The
// next write of the object frees those in overflow.
func (s *Store) writeAllocation(ctx context.Context, name string, want isthmus.NetworkAllocationSpec, removed, overflow []string) error {
	was, exists := s.allocations[name]
	have, now := was.spec, time.Now()
	want.Revision, want.Session = have.Revision, have.Session
	want.Freed = slices.DeleteFunc(slices.Clone(have.Freed), func(f isthmus.FreedNetwork) bool {
		return fabric.Revision(f.Revision, now) == 0 || slices.Contains(removed, f.Network)
	})
	counts := fabric.Revision(have.Revision, now) > 0 && have.Session <= s.session && (have.Session > 0 || len(want.Networks) == 0)
	counts = counts && (!was.pending || have.Session == s.session) // other managers do not adopt a pending object of an earlier session
	counts = counts && fabric.NamedSince(string(was.uid), was.version, &have) == was.since
	want.NetworksSince = have.NetworksSince
	if exists && len(removed) == 0 && counts && equality.Semantic.DeepEqual(have, want) {
		return nil
	}
	want.Session = s.session
	if len(removed) > 0 || !slices.Equal(have.Networks, want.Networks) || len(have.Freed) != len(want.Freed) || fabric.Revision(have.Revision, now) == 0 ||
		!equality.Semantic.DeepEqual(have.Own, want.Own) {
		s.revision = nextRevision(s.revision, now)
		want.Revision = s.revision
	}
	if want.NetworksSince = nil; was.since > 0 && slices.Equal(have.Networks, want.Networks) {
		want.NetworksSince = &isthmus.NetworksSince{ResourceVersion: was.since, Revision: want.Revision, UID: string(was.uid)}
	}
	for _, n := range removed {
		want.Freed = append(want.Freed, isthmus.FreedNetwork{Network: n, Revision: want.Revision})
	}
	want.Freed = want.Freed[max(len(want.Freed)-maxNetworks, 0):]
	object := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: want}
	var err error
	if exists {
		patch := patchOf(was.version, mergePatch(fields(have), fields(want)))
		err = s.client.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch))
	} else {
		err = s.client.Create(ctx, object)
	}
	if err != nil {
		return err
	}
	s.allocations[name] = allocation{object.UID, object.ResourceVersion, was.sinceWith(object), want, want.Revision, overflow, true}
	return nil
}

// nextRevision returns a revision higher than all previous ones, including those that a restored
// backup lacks. If the clock was set back, a revision from the future does not count.
func nextRevision(last int64, now time.Time) int64 {
	return max(fabric.Revision(last, now)+1, now.UnixMilli())
}

// adopt returns the State with the entries that other managers wrote in sessions later than
// session, which is ours. It returns nil if there are no such entries. The parameter before has the
// NetworkAllocations as we last read them.
func (s *Store) adopt(state ipam.State, session int64, before map[string]allocation) *ipam.State {
	theirs := make(map[string]isthmus.NetworkAllocationSpec)
	own := state.Own()
	for name, a := range s.allocations {
		id := a.spec.ClusterID
		if a.version == before[name].version || a.spec.Session <= session || a.spec.Session > s.session || fabric.AllocationName(id) != name {
			continue
		}
		if id == s.self && a.spec.Own != nil {
			if c, err := ipam.ConfigFrom(a.spec.Own); err == nil {
				c.Nodes, c.Reached, c.Services = own.Nodes, own.Reached, own.Services // the object does not store these fields
				own = c
			}
		} else if lost := s.lacks(a.spec, state.NetworksOf(id), before[name].spec.Revision); len(lost) > 0 {
			s.log.Error("another client has removed networks in use from the NetworkAllocation; restoring it; to free networks, use isthmus unpeer",
				"name", name, "networks", lost)
			continue
		}
		theirs[id] = a.spec
	}
	if len(theirs) == 0 {
		return nil
	}
	var all []isthmus.NetworkAllocationSpec
	for _, id := range state.Clusters() {
		if _, newer := theirs[id]; !newer {
			spec := state.Allocation(id)
			spec.Revision = before[fabric.AllocationName(id)].spec.Revision
			all = append(all, spec)
		}
	}
	next := s.stateOf(own, append(latestFirst(theirs), all...))
	return &next
}

// lacks returns the networks in had that are lost in spec: spec neither lists them nor frees them
// with a revision higher than the given one.
func (s *Store) lacks(spec isthmus.NetworkAllocationSpec, had []netip.Prefix, revision int64) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(had), func(p netip.Prefix) bool {
		return slices.Contains(spec.Networks, p.String()) || slices.ContainsFunc(spec.Freed, func(f isthmus.FreedNetwork) bool {
			return f.Network == p.String() && f.Revision > revision
		})
	})
}

// latestFirst returns entries that other managers wrote, the latest first.
func latestFirst(all map[string]isthmus.NetworkAllocationSpec) []isthmus.NetworkAllocationSpec {
	return slices.SortedFunc(maps.Values(all), func(x, y isthmus.NetworkAllocationSpec) int {
		return cmp.Or(cmp.Compare(y.Session, x.Session), cmp.Compare(y.Revision, x.Revision), cmp.Compare(x.ClusterID, y.ClusterID))
	})
}

// stateOf returns the State stored in NetworkAllocations. If two entries contradict each other, the
// first one in the list wins.
func (s *Store) stateOf(own ipam.Config, all []isthmus.NetworkAllocationSpec) ipam.State {
	state, wrong := ipam.FromAllocations(own, slices.DeleteFunc(all, func(spec isthmus.NetworkAllocationSpec) bool { return spec.ClusterID == s.self }))
	for _, err := range wrong {
		s.log.Error("NetworkAllocation is invalid; writing it again", "error", err)
	}
	return state
}

// freedManually ends the holds of networks that somebody freed in a NetworkAllocation, with a
// revision higher than the last one that we know. Networks in use stay.
func (s *Store) freedManually(state ipam.State) ipam.State {
	if s.allocated {
		return state // no object has changed
	}
	now := time.Now()
	next, ended := state.EndHolds(func(id string, p netip.Prefix) bool {
		a := s.allocations[fabric.AllocationName(id)]
		return !slices.Contains(a.spec.Networks, p.String()) && slices.ContainsFunc(a.spec.Freed, func(f isthmus.FreedNetwork) bool {
			return f.Network == p.String() && fabric.Revision(f.Revision, now) > a.known
		})
	})
	if len(ended) > 0 {
		s.log.Warn("released networks are no longer held, because another client freed them in the NetworkAllocation", "networks", ended)
	}
	return next
}

// stale reports whether an error means that an object differs from the version last read or
// written.
func stale(err error) bool {
	var all interface{ Unwrap() []error }
	if errors.As(err, &all) {
		return slices.ContainsFunc(all.Unwrap(), stale)
	}
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err)
}
