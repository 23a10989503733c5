package fabric

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// AllocationName returns the name of a cluster's NetworkAllocation: the cluster ID, or its hash if
// the ID is no valid object name. The hash is longer than any ID, so it cannot equal the ID of
// another cluster.
func AllocationName(clusterID string) string {
	if isObjectName(clusterID) {
		return clusterID
	}
	sum := sha256.Sum256([]byte(clusterID))
	return hex.EncodeToString(sum[:])
}

// isObjectName reports whether a cluster ID is an RFC 1123 subdomain, which an object name must be.
func isObjectName(clusterID string) bool {
	return !slices.ContainsFunc(strings.Split(clusterID, "."), func(label string) bool {
		other := func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' }
		return label == "" || strings.HasPrefix(label, "-") || strings.HasSuffix(label, "-") || strings.ContainsFunc(label, other)
	})
}

// An Allocation is one entry of spec.networks or spec.freed in a NetworkAllocation.
type Allocation struct {
	Object   string       `json:"object,omitempty"` // name of the NetworkAllocation
	Network  netip.Prefix `json:"network"`
	Revision int64        `json:"revision"`
}

// Allocations is the combined content of all NetworkAllocations. Named has the entries of
// spec.networks, and Freed those of spec.freed. Both lists are sorted by network, then by object.
// For each object, a list has a network only once, with its highest revision.
type Allocations struct {
	Named, Freed []Allocation
	// Revision is the highest revision of all entries in Named and Freed; 0 if there are none.
	Revision int64
	// Version is the highest resourceVersion at which an object first named its current networks; 0
	// if there are no objects.
	Version int64
	// Own holds the known networks of our own pods and Services. OwnPods holds only the networks of
	// our pods.
	Own, OwnPods []netip.Prefix
}

// revisionAhead is the maximum time by which a revision may be ahead of our clock. The bound allows
// for differences between clocks.
const revisionAhead = 24 * time.Hour

// Revision returns the revision n, or 0 if n is negative or more than revisionAhead after now. A
// revision is at least the time of the change, in milliseconds since 1970. A revision from the far
// future is ignored, because it would exceed all later revisions.
func Revision(n int64, now time.Time) int64 {
	if n < 0 || n > now.Add(revisionAhead).UnixMilli() {
		return 0
	}
	return n
}

// Version parses a resourceVersion; it returns 0 if text is no number. The resourceVersions of one
// kind are increasing numbers: Kubernetes guarantees that since 1.35, and etcd always did.
func Version(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// NamedSince returns the resourceVersion at which a NetworkAllocation first named its current
// networks. If spec records none for this UID and revision, it returns the object's current
// resourceVersion. The result never exceeds the current resourceVersion, even after a restore of
// etcd.
func NamedSince(uid, resourceVersion string, spec *isthmus.NetworkAllocationSpec) int64 {
	now, since := Version(resourceVersion), spec.NetworksSince
	if since == nil || since.UID != uid || since.Revision != spec.Revision {
		return now
	}
	return min(since.ResourceVersion, now)
}

// AllocationsFrom reads all NetworkAllocations, in any order. It skips and reports invalid
// networks.
func AllocationsFrom(all []isthmus.NetworkAllocation, now time.Time) (a Allocations, problems []Problem) {
	for i := range all {
		spec := &all[i].Spec
		r := report{origin: Origin{Kind: "NetworkAllocation", Name: all[i].Name}}
		revision := Revision(spec.Revision, now)
		a.Revision, a.Version = max(a.Revision, revision), max(a.Version, NamedSince(string(all[i].UID), all[i].ResourceVersion, spec))
		for _, text := range spec.Networks {
			if p := r.parseAllocated("spec.networks", text); p.IsValid() {
				a.Named = append(a.Named, Allocation{all[i].Name, p, revision})
			}
		}
		for _, f := range spec.Freed {
			if p := r.parseAllocated("spec.freed", f.Network); p.IsValid() {
				a.Freed = append(a.Freed, Allocation{all[i].Name, p, Revision(f.Revision, now)})
				a.Revision = max(a.Revision, Revision(f.Revision, now))
			}
		}
		problems = append(problems, r.problems...)
	}
	own := OwnIn(all, now)
	if p, err := netip.ParsePrefix(own.PodCIDR); err == nil {
		a.Own, a.OwnPods = append(a.Own, p.Masked()), append(a.OwnPods, p.Masked())
	}
	if p, err := netip.ParsePrefix(own.ServiceCIDR); err == nil {
		a.Own = append(a.Own, p.Masked())
	}
	a.Named, a.Freed = Latest(a.Named), Latest(a.Freed)
	return a, problems
}

// OwnIn returns the networks of our own cluster. After a change of our cluster ID, several objects
// may have spec.own; the object with the highest revision counts.
func OwnIn(all []isthmus.NetworkAllocation, now time.Time) (own isthmus.OwnNetworks) {
	latest := int64(-1)
	for i := range all {
		if spec := &all[i].Spec; spec.Own != nil && Revision(spec.Revision, now) > latest {
			own, latest = *spec.Own, Revision(spec.Revision, now)
		}
	}
	return own
}

// parseAllocated parses a network. If the network is invalid, it reports a problem and returns the
// zero Prefix.
func (r *report) parseAllocated(field, text string) netip.Prefix {
	p, err := netip.ParsePrefix(text)
	if err != nil || p.Bits() == 0 {
		r.add(field, "%s is not a network; want CIDR notation", quote(text))
		return netip.Prefix{}
	}
	return p.Masked()
}

// Latest sorts a list by network and object, in place. For each pair of network and object it keeps
// only the entry with the highest revision.
func Latest(list []Allocation) []Allocation {
	slices.SortFunc(list, func(a, b Allocation) int { return cmp.Or(a.Compare(b), cmp.Compare(b.Revision, a.Revision)) })
	return slices.CompactFunc(list, func(a, b Allocation) bool { return a.Compare(b) == 0 })
}

// Compare orders allocations by network, then by object. It ignores revisions.
func (a Allocation) Compare(b Allocation) int {
	return cmp.Or(a.Network.Compare(b.Network), strings.Compare(a.Object, b.Object))
}
