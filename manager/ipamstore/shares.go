package ipamstore

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// A share is one GrantedNetworks, as it was read or written last.
type share struct {
	version string
	peers   map[string]isthmus.PeerNetworks
}

// readShares reads them all.
func (s *Store) readShares(ctx context.Context) error {
	if s.alone {
		s.shares, s.copied = nil, true
		return nil
	}
	var list isthmus.GrantedNetworksList
	if err := s.reader.List(ctx, &list); err != nil {
		return fmt.Errorf("list GrantedNetworks: %w", err)
	}
	s.shares, s.copied = make(map[string]share), false
	for i := range list.Items {
		o := &list.Items[i]
		s.shares[o.Name] = share{o.ResourceVersion, o.Spec.Peers}
	}
	return nil
}

// sharesSame reports whether the shares are those that were read or written last.
func (s *Store) sharesSame(ctx context.Context) (bool, error) {
	if s.alone {
		return true, nil
	}
	var list isthmus.GrantedNetworksList
	if err := s.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return false, fmt.Errorf("list GrantedNetworks: %w", err)
	}
	same := len(list.Items) == len(s.shares)
	for i := range list.Items {
		same = same && list.Items[i].ResourceVersion == s.shares[list.Items[i].Name].version
	}
	return same, nil
}

// sharedPeers are those whose entries in the shares may not be what a Book says.
func (s *Store) sharedPeers(book ipam.Book) []string {
	if s.copied {
		return book.Changed(s.Book())
	}
	ids := book.Peers()
	for _, share := range s.shares {
		ids = slices.AppendSeq(ids, maps.Keys(share.peers))
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// networksOf are those of a peer, as its share has them.
func networksOf(book ipam.Book, id string) (all isthmus.PeerNetworks) {
	for _, p := range book.NetworksOf(id) {
		all = append(all, p.String())
	}
	return all
}

// maxNetworks is how many networks of a peer a share may have by its schema.
const maxNetworks = 16

// share makes the shares say what the Book does of some peers. With more, it only adds: that comes
// before the books, and what is taken away after them, so that no agent misses a network of the books
// at any moment. The API server answers Conflict, NotFound or AlreadyExists when a share is not as it
// was read last.
func (s *Store) share(ctx context.Context, book ipam.Book, ids []string, more bool) error {
	if s.alone {
		return nil
	}
	changes := make(map[string]map[string]isthmus.PeerNetworks) // by share
	for _, id := range ids {
		name := fabric.ShareOf(id)
		have, want := s.shares[name].peers[id], networksOf(book, id)
		if more && (s.copied || s.named(book, id)) {
			kept := slices.DeleteFunc(slices.Clone(have), func(n string) bool { return slices.Contains(want, n) })
			want = slices.Concat(want, kept)
			want = want[:min(len(want), maxNetworks)] // nobody but us writes as many
		}
		if slices.Equal(have, want) {
			continue
		}
		if changes[name] == nil {
			changes[name] = make(map[string]isthmus.PeerNetworks)
		}
		changes[name][id] = want // nil: none
	}
	// A peer whose share this is not is nobody's: another manager never wrote that.
	if !s.copied {
		for name, share := range s.shares {
			for id := range share.peers {
				if fabric.ShareOf(id) == name {
					continue
				}
				if changes[name] == nil {
					changes[name] = make(map[string]isthmus.PeerNetworks)
				}
				changes[name][id] = nil
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		if err := s.writeShare(ctx, name, changes[name]); err != nil {
			return fmt.Errorf("GrantedNetworks %s: %w", name, err)
		}
	}
	return nil
}

// named reports whether books name a peer: those to be written, ours, or those that are there. What
// nobody names is somebody's who may write a share, and would fill it.
func (s *Store) named(book ipam.Book, id string) bool {
	will, is := len(book.NetworksOf(id)) > 0, len(s.Book().NetworksOf(id)) > 0
	there := false
	if s.object != nil {
		_, there = s.object.Spec.ClusterSubnets[id]
	}
	return will || is || there
}

func (s *Store) writeShare(ctx context.Context, name string, changes map[string]isthmus.PeerNetworks) error {
	was, exists := s.shares[name]
	now := share{peers: maps.Clone(was.peers)}
	if now.peers == nil {
		now.peers = make(map[string]isthmus.PeerNetworks)
	}
	for id, networks := range changes {
		if now.peers[id] = networks; networks == nil {
			delete(now.peers, id)
		}
	}
	object := &isthmus.GrantedNetworks{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: isthmus.GrantedNetworksSpec{Peers: now.peers}}
	if !exists {
		if err := s.client.Create(ctx, object); err != nil {
			return err
		}
	} else {
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"resourceVersion": was.version, "managedFields": []any{map[string]any{}}}, // as in patchOf
			"spec":     map[string]any{"peers": changes},
		})
		if err != nil {
			return err
		}
		if err := s.client.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch)); err != nil {
			return err
		}
	}
	now.version = object.ResourceVersion
	s.shares[name] = now
	return nil
}

// digest is what the books say of the shares, but for the generation.
func digestOf(book ipam.Book) fabric.BooksDigest {
	var networks []netip.Prefix
	for _, id := range book.Peers() {
		networks = append(networks, book.NetworksOf(id)...)
	}
	own, d := book.Own(), fabric.BooksDigest{Granted: fabric.GrantsID(networks)}
	if own.PodCIDR.IsValid() {
		d.PodCIDR = own.PodCIDR.String()
	}
	if own.ServiceCIDR.IsValid() {
		d.ServiceCIDR = own.ServiceCIDR.String()
	}
	return d
}

// stale reports whether an object is not what was read or written last.
func stale(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err)
}
