package fabric

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// GrantedIn returns the networks that the IPAM state allocates to peers. Only the manager writes it,
// unlike what peers write about themselves. It contains a network from before its publication until the
// end of the hold after its release. An annotation has the networks that a peer has replaced.
func GrantedIn(books *v1alpha1.IpamStorage) ([]netip.Prefix, []Problem) {
	var granted []netip.Prefix
	r := report{origin: Origin{Kind: "IpamStorage", Name: books.Name}}
	for _, id := range slices.Sorted(maps.Keys(books.Spec.ClusterSubnets)) {
		subnets := books.Spec.ClusterSubnets[id]
		for _, f := range []struct{ name, text string }{{"remotePodCIDR", subnets.RemotePodCIDR}, {"remoteExternalCIDR", subnets.RemoteExternalCIDR}} {
			if f.text == "" {
				continue // not known yet
			}
			p, err := netip.ParsePrefix(f.text)
			if err != nil || p.Bits() == 0 {
				r.add("spec.clusterSubnets."+id+"."+f.name, "%s is no network; want CIDR notation", quote(f.text))
				continue
			}
			granted = append(granted, p.Masked())
		}
	}
	released, err := ReleasedFrom(books.Annotations)
	if err != nil {
		r.add("metadata.annotations", "%s cannot be read: %v", isthmus.AnnotationReleased, err)
	}
	return append(granted, released.replacedIn()...), r.problems
}

// editionAhead is how far ahead of the clock an edition may be, for clocks that differ.
const editionAhead = 24 * time.Hour

// EditionOf returns the edition of the books of the IPAM with these annotations, 0 if they have none
// that counts at that time.
func EditionOf(annotations map[string]string, now time.Time) int64 {
	n, err := strconv.ParseInt(annotations[isthmus.AnnotationEdition], 10, 64)
	if err != nil {
		return 0
	}
	return Edition(n, now)
}

// Edition returns an edition that was read, or 0 when it does not count. The manager's are times in
// milliseconds, or little above; one far ahead of the clock is somebody's slip or malice, and no later
// edition would be above it for as long.
func Edition(n int64, now time.Time) int64 {
	if n < 0 || n > now.Add(editionAhead).UnixMilli() {
		return 0
	}
	return n
}

// OwnIn returns the networks of our own pods and Services in the books of the IPAM, and those of
// the pods alone.
func OwnIn(books *v1alpha1.IpamStorage) (own, pods []netip.Prefix) {
	if p, err := netip.ParsePrefix(books.Spec.PodCIDR); err == nil {
		own, pods = append(own, p.Masked()), append(pods, p.Masked())
	}
	if p, err := netip.ParsePrefix(books.Spec.ServiceCIDR); err == nil {
		own = append(own, p.Masked())
	}
	return own, pods
}
