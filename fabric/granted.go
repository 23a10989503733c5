package fabric

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// shares is in how many GrantedNetworks the peers are at most. Another number would move peers from
// one to another, which agents would see as networks that come and go.
const shares = 64

// ShareOf is the name of the GrantedNetworks that a peer is in.
func ShareOf(clusterID string) string {
	h := fnv.New32a()
	h.Write([]byte(clusterID))
	return fmt.Sprintf("peers-%02d", h.Sum32()%shares)
}

// BooksDigest is what the books of the IPAM say of the copy that agents read in their place, in the
// annotation isthmus.net/granted. Both are written by the manager, in one step with the books
// themselves; one that knows nothing of it leaves it behind the generation of the books.
type BooksDigest struct {
	Generation  int64  `json:"generation"` // of the IpamStorage
	Granted     string `json:"granted"`    // GrantsID of what all GrantedNetworks have together
	PodCIDR     string `json:"podCIDR,omitempty"`
	ServiceCIDR string `json:"serviceCIDR,omitempty"`
}

// Annotation returns the digest as it is stored.
func (d BooksDigest) Annotation() string {
	b, err := json.Marshal(d)
	if err != nil {
		panic(err) // texts and a number
	}
	return string(b)
}

// BooksDigestFrom reads it; false: there is none that makes sense.
func BooksDigestFrom(annotation string) (d BooksDigest, ok bool) {
	err := json.Unmarshal([]byte(annotation), &d)
	return d, err == nil && d.Generation > 0 && d.Granted != ""
}

// Own are the networks of our own pods and Services, as OwnIn has them.
func (d BooksDigest) Own() (own, pods []netip.Prefix) {
	return OwnIn(&v1alpha1.IpamStorage{Spec: v1alpha1.IpamStorageSpec{PodCIDR: d.PodCIDR, ServiceCIDR: d.ServiceCIDR}})
}

// GrantedInShares returns the networks that the copy gives to peers. It means something together with
// a BooksDigest that names them alone.
func GrantedInShares(all []isthmus.GrantedNetworks) (granted []netip.Prefix, problems []Problem) {
	for i := range all {
		r := report{origin: Origin{Kind: "GrantedNetworks", Name: all[i].Name}}
		for _, id := range slices.Sorted(maps.Keys(all[i].Spec.Peers)) {
			for _, text := range all[i].Spec.Peers[id] {
				p, err := netip.ParsePrefix(text)
				if err != nil || p.Bits() == 0 {
					r.add("spec.peers."+id, "%s is no network; want CIDR notation", quote(text))
					continue
				}
				granted = append(granted, p.Masked())
			}
		}
		problems = append(problems, r.problems...)
	}
	return granted, problems
}

// Shares reads GrantedNetworks one time after the other, and of these only what has changed since: of a
// grant one of 64. The zero value is ready. One goroutine uses it.
type Shares struct {
	read  map[string]share // by name
	named []netip.Prefix   // what all have together, sorted, each as often as it is named
	once  []netip.Prefix
	id    string // GrantsID of these
}

type share struct {
	version  string // of an object that does not change; empty: not known
	granted  []netip.Prefix
	problems []Problem
}

// Read returns what GrantedInShares does, sorted and without what is there twice, and its GrantsID. The
// list is the same one until it is another, and is not to be changed.
func (s *Shares) Read(all []isthmus.GrantedNetworks) (granted []netip.Prefix, id string, problems []Problem) {
	now := make(map[string]share, len(all))
	var gone, come []netip.Prefix
	for i := range all {
		g := &all[i]
		is, version := s.read[g.Name], ""
		if g.ResourceVersion != "" {
			version = string(g.UID) + " " + g.ResourceVersion
		}
		if version == "" || is.version != version {
			gone = append(gone, is.granted...)
			is.version = version
			is.granted, is.problems = GrantedInShares(all[i : i+1])
			come = append(come, is.granted...)
		}
		now[g.Name] = is
		problems = append(problems, is.problems...)
	}
	for name, was := range s.read {
		if _, there := now[name]; !there {
			gone = append(gone, was.granted...)
		}
	}
	s.read = now
	if s.once == nil || len(gone)+len(come) > 0 {
		s.named = exchanged(s.named, gone, come)
		s.once = slices.Compact(append([]netip.Prefix{}, s.named...))
		s.id = GrantsID(s.once)
	}
	return s.once, s.id, problems
}

// exchanged returns a sorted list without what has gone, all of which is in it, and with what has come. It
// sorts both.
func exchanged(sorted, gone, come []netip.Prefix) []netip.Prefix {
	slices.SortFunc(gone, netip.Prefix.Compare)
	slices.SortFunc(come, netip.Prefix.Compare)
	all := make([]netip.Prefix, 0, len(sorted)-len(gone)+len(come))
	for _, p := range sorted {
		for len(come) > 0 && come[0].Compare(p) < 0 {
			all, come = append(all, come[0]), come[1:]
		}
		if len(gone) > 0 && gone[0] == p {
			gone = gone[1:]
			continue
		}
		all = append(all, p)
	}
	return append(all, come...)
}
