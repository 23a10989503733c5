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
