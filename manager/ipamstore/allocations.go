package ipamstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// maxNetworks is how many networks a NetworkAllocation names at most, and frees at most, by its schema.
const maxNetworks = 32

// An allocation is one NetworkAllocation, as it was read or written last.
type allocation struct {
	version string
	spec    isthmus.NetworkAllocationSpec
	cut     []string // networks that it named, and for which there was no place any more; to be freed
}

// readAllocations reads them all.
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
		s.allocations[o.Name] = allocation{o.ResourceVersion, o.Spec, before[o.Name].cut}
		s.revision = max(s.revision, fabric.Revision(o.Spec.Revision, now))
		for _, f := range o.Spec.Freed {
			s.revision = max(s.revision, fabric.Revision(f.Revision, now))
		}
	}
	return nil
}

// sameAllocations reports whether they are as they were read or written last.
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

// unallocated are the clusters by the names of those NetworkAllocations that may not say what a Book does.
// An object with another name than its cluster's is nobody's, and of the cluster "".
func (s *Store) unallocated(book ipam.Book) map[string]string {
	names := make(map[string]string)
	if !s.allocated {
		for name, a := range s.allocations {
			if names[name] = a.spec.ClusterID; fabric.AllocationName(a.spec.ClusterID) != name {
				names[name] = ""
			}
		}
	}
	ids := book.Changed(s.Book())
	if !s.allocated {
		ids = book.Peers()
	}
	for _, id := range append(ids, s.self) {
		if id != "" {
			names[fabric.AllocationName(id)] = id
		}
	}
	return names
}

// allocate makes NetworkAllocations say what the Book does of some clusters, by the names of the objects.
// With more it only adds networks: that comes before the IpamStorage, and what is freed after it, so that no
// agent misses a network of the Book at any moment. It goes on after an error, and returns all of them: the
// API server answers Conflict, NotFound or AlreadyExists when an object is not as it was read last.
func (s *Store) allocate(ctx context.Context, book ipam.Book, clusters map[string]string, more bool) error {
	var failed []error
	for _, name := range slices.Sorted(maps.Keys(clusters)) {
		have, exists := s.allocations[name]
		want := s.allocationOf(book, clusters[name])
		gone := without(slices.Concat(have.spec.Networks, have.cut), want.Networks)
		if exists && more && len(without(want.Networks, have.spec.Networks)) == 0 && sameOwn(have.spec.Own, want.Own) ||
			!exists && len(want.Networks) == 0 && want.Own == nil {
			continue
		}
		var cut []string
		if more { // those of the Book have a place
			want.Networks = append(want.Networks, gone...)
			place := min(len(want.Networks), maxNetworks)
			want.Networks, cut, gone = want.Networks[:place], want.Networks[place:], nil
		}
		if want.ClusterID == "" {
			want.ClusterID = have.spec.ClusterID
		}
		if err := s.writeAllocation(ctx, name, want, gone, cut); err != nil {
			failed = append(failed, fmt.Errorf("NetworkAllocation %s: %w", name, err))
		}
	}
	return errors.Join(failed...)
}

// without returns those of a list that another one has not.
func without(list, other []string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(n string) bool { return slices.Contains(other, n) })
}

// allocationOf is what a Book says of a cluster, but for revisions.
func (s *Store) allocationOf(book ipam.Book, id string) isthmus.NetworkAllocationSpec {
	want := isthmus.NetworkAllocationSpec{ClusterID: id}
	if id != "" && id == s.self {
		own := book.Own()
		want.Own = &isthmus.OwnNetworks{PodCIDR: text(own.PodCIDR), ServiceCIDR: text(own.ServiceCIDR), ExternalCIDR: text(own.ExternalCIDR)}
		return want
	}
	for _, p := range book.NetworksOf(id) {
		want.Networks = append(want.Networks, p.String())
	}
	switch _, has := book.GrantOf(id); {
	case len(want.Networks) == 0:
		want.Phase = isthmus.AllocationFreed
	case !has || !book.ReleasedAt(id).IsZero():
		want.Phase = isthmus.AllocationReleased
	default:
		want.Phase = isthmus.AllocationAllocated
	}
	return want
}

func text(p netip.Prefix) string {
	if !p.IsValid() {
		return ""
	}
	return p.String()
}

func sameOwn(a, b *isthmus.OwnNetworks) bool { return a == b || a != nil && b != nil && *a == *b }

// writeAllocation writes an object, unless it says that already, and frees networks that it named. Those of
// cut it frees the next time.
func (s *Store) writeAllocation(ctx context.Context, name string, want isthmus.NetworkAllocationSpec, gone, cut []string) error {
	was, exists := s.allocations[name]
	have, now := was.spec, time.Now()
	want.Revision = have.Revision
	want.Freed = slices.DeleteFunc(slices.Clone(have.Freed), func(f isthmus.FreedNetwork) bool {
		return fabric.Revision(f.Revision, now) == 0 || slices.Contains(gone, f.Network)
	})
	news := len(gone) > 0 || !slices.Equal(have.Networks, want.Networks) || len(have.Freed) != len(want.Freed) || !sameOwn(have.Own, want.Own) || fabric.Revision(have.Revision, now) == 0
	if exists && !news && have.Phase == want.Phase && have.ClusterID == want.ClusterID {
		return nil
	}
	if news {
		s.revision = nextRevision(s.revision, now)
		want.Revision = s.revision
	}
	for _, n := range gone {
		want.Freed = append(want.Freed, isthmus.FreedNetwork{Network: n, Revision: want.Revision})
	}
	want.Freed = want.Freed[max(len(want.Freed)-maxNetworks, 0):]
	object := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: want}
	if !exists {
		if err := s.client.Create(ctx, object); err != nil {
			return err
		}
	} else {
		spec := map[string]any{"clusterID": want.ClusterID, "revision": want.Revision, "phase": want.Phase,
			"networks": append([]string{}, want.Networks...), "freed": append([]isthmus.FreedNetwork{}, want.Freed...), "own": nil}
		if want.Own != nil {
			own := map[string]any{"podCIDR": nil, "serviceCIDR": nil, "externalCIDR": nil}
			for field, text := range map[string]string{"podCIDR": want.Own.PodCIDR, "serviceCIDR": want.Own.ServiceCIDR, "externalCIDR": want.Own.ExternalCIDR} {
				if text != "" {
					own[field] = text
				}
			}
			spec["own"] = own
		}
		if want.Phase == "" {
			spec["phase"] = nil
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"resourceVersion": was.version, "managedFields": []any{map[string]any{}}}, // as in patchOf
			"spec":     spec,
		})
		if err != nil {
			return err
		}
		if err := s.client.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch)); err != nil {
			return err
		}
	}
	s.allocations[name] = allocation{object.ResourceVersion, want, cut}
	return nil
}

// nextRevision is higher than those before, also than those that a restored backup has forgotten. One before
// that does not count any more, because the clock was set back, is none.
func nextRevision(last int64, now time.Time) int64 {
	return max(fabric.Revision(last, now)+1, now.UnixMilli())
}

// takenBack reports whether all networks that peers had in one Book and have not in another were freed by
// the NetworkAllocations, since these were read as before: another manager has written both. Otherwise
// somebody has edited the IpamStorage.
func (s *Store) takenBack(had, has ipam.Book, before map[string]allocation) bool {
	for _, id := range has.Changed(had) {
		name, is := fabric.AllocationName(id), has.NetworksOf(id)
		now := s.allocations[name].spec
		for _, p := range had.NetworksOf(id) {
			freed := slices.ContainsFunc(now.Freed, func(f isthmus.FreedNetwork) bool {
				return f.Network == p.String() && f.Revision > before[name].spec.Revision
			})
			if !slices.Contains(is, p) && (!freed || slices.Contains(now.Networks, p.String())) {
				return false
			}
		}
	}
	return true
}

// freedByHand ends the holds of networks that somebody has freed in a NetworkAllocation since these were read
// as before: with a revision higher than that of the object was. A network that a peer has stays.
func (s *Store) freedByHand(book ipam.Book, before map[string]allocation) ipam.Book {
	now := time.Now()
	next, ended := book.EndHolds(func(id string, p netip.Prefix) bool {
		name := fabric.AllocationName(id)
		spec := s.allocations[name].spec
		return !slices.Contains(spec.Networks, p.String()) && slices.ContainsFunc(spec.Freed, func(f isthmus.FreedNetwork) bool {
			return f.Network == p.String() && fabric.Revision(f.Revision, now) > before[name].spec.Revision
		})
	})
	if len(ended) > 0 {
		s.log.Warn("released networks are held no longer, since somebody has freed them in their NetworkAllocation", "networks", ended)
	}
	return next
}

// stale reports whether an object is not what was read or written last.
func stale(err error) bool {
	var all interface{ Unwrap() []error }
	if errors.As(err, &all) {
		return slices.ContainsFunc(all.Unwrap(), stale)
	}
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err)
}
