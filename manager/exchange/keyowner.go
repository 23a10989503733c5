package exchange

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// takenKeys returns the keys of a claim that another peer has: not who says so first, because
// public keys are public, but who proves to have the private key. Where nobody does, or both, it is
// whose tunnel has it, or else whose claim was accepted with it. A peer that lists among its own
// what is another's already is the one that is refused. Only when two tunnels have a key, by an edit
// or from before, it is the older one's, as in fabric.GatewayFor.
func (j Judge) takenKeys(ctx context.Context, peer peers.Peer, nc *v1alpha1.NetworkConfig, claim fabric.Claim) (taken [][32]byte, err error) {
	for _, key := range claim.Keys() {
		another, err := j.taken(ctx, peer, nc, keyText(key))
		if err != nil {
			return nil, err
		}
		if another {
			taken = append(taken, key)
		}
	}
	return taken, nil
}

func (j Judge) taken(ctx context.Context, peer peers.Peer, nc *v1alpha1.NetworkConfig, key string) (bool, error) {
	provers, err := j.provers(ctx, key)
	if err != nil || len(provers) > 0 && !slices.Contains(provers, nc.Namespace) {
		return err == nil, err
	}
	tunnels, err := j.tunnelsWith(ctx, key)
	if err != nil {
		return false, err
	}
	if len(tunnels) > 0 { // one of a peer that proves nothing stays until reclaim deletes it, so that no gateway sees the key twice
		first := slices.MinFunc(tunnels, func(a, b v1alpha1.TunnelEndpoint) int { return controllers.CompareAge(&a, &b) })
		return first.Namespace != peer.LocalNamespace, nil
	}
	return j.acceptedBefore(ctx, nc, key, provers)
}

// tunnelsWith are the TunnelEndpoints with a key. One that is being deleted is no gateway's any more.
func (j Judge) tunnelsWith(ctx context.Context, key string) ([]v1alpha1.TunnelEndpoint, error) {
	var list v1alpha1.TunnelEndpointList
	if err := j.Reader.List(ctx, &list, client.MatchingFields{indexPublicKey: key}); err != nil {
		return nil, fmt.Errorf("TunnelEndpoints with the same key: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(te v1alpha1.TunnelEndpoint) bool { return !te.DeletionTimestamp.IsZero() }), nil
}

// provers are the namespaces of the peers that prove to have a key that more than one claims; none: nobody does, or nobody
// disputes it.
func (j Judge) provers(ctx context.Context, key string) (all []string, err error) {
	var list v1alpha1.NetworkConfigList
	if err := j.Reader.List(ctx, &list, client.MatchingFields{indexPublicKey: key}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("NetworkConfigs with the same key: %w", err)
	}
	var namespaces []string
	for i := range list.Items {
		namespaces = append(namespaces, list.Items[i].Namespace)
	}
	slices.Sort(namespaces)
	if namespaces = slices.Compact(namespaces); len(namespaces) < 2 {
		return nil, nil
	}
	for _, namespace := range namespaces {
		switch proved, err := j.proved(ctx, namespace, key); {
		case err != nil:
			return nil, err
		case proved:
			all = append(all, namespace)
		}
	}
	return all, nil
}

// proved reports whether the peer with a tenant namespace claims a key and proves that it has the private one, or did when
// it got its tunnel with it.
func (j Judge) proved(ctx context.Context, namespace, key string) (bool, error) {
	peer, err := j.Peers.ByNamespace(ctx, namespace)
	if errors.Is(err, peers.ErrNoPeer) || err == nil && peer.Leaving && !peer.Draining {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	copies, err := CopiesOf(ctx, j.Reader, namespace, peer.Cluster.ClusterID)
	if err != nil {
		return false, err
	}
	copies = slices.DeleteFunc(copies, func(nc v1alpha1.NetworkConfig) bool { return !alive(nc) })
	if len(copies) != 1 || !slices.Contains(publicKeysOf(copies[0].Spec.BackendConfig), key) {
		return false, nil
	}
	tunnels, err := j.tunnelsWith(ctx, key)
	if err != nil || slices.ContainsFunc(tunnels, func(te v1alpha1.TunnelEndpoint) bool { return te.Namespace == namespace && remembers(&te, key) }) {
		return err == nil, err
	}
	facts, err := j.Facts.Facts(ctx)
	return err == nil && proves(copies[0].Spec.BackendConfig, facts.Keys, j.Peers.Self, peer.Cluster.ClusterID), err
}

// proves reports whether what a peer publishes shows that it has the private keys of its tunnels. It may know our current
// or our next key.
func proves(config v1alpha1.BackendConfig, ours keyring.Ring, self, peer string) bool {
	var keys [][32]byte
	for _, text := range publicKeysOf(config) {
		key, err := fabric.ParseKey(text)
		if err != nil {
			return false
		}
		keys = append(keys, key)
	}
	return slices.ContainsFunc([][32]byte{ours.Private, ours.Next}, func(private [32]byte) bool {
		return private != ([32]byte{}) && keyring.Proves(config[v1alpha1.ConfigKeyProof], private, self, peer, keys)
	})
}

// remember notes on a TunnelEndpoint which of its keys its peer proves to have. What is noted stays for as long as the peer
// has the key: a thief of it can prove it sooner than its owner when our key has rotated.
func remember(te *v1alpha1.TunnelEndpoint, proves bool) {
	keys := slices.DeleteFunc(publicKeysOf(te.Spec.BackendConfig), func(key string) bool { return !proves && !remembers(te, key) })
	if delete(te.Annotations, isthmus.AnnotationKeyProved); len(keys) > 0 {
		metav1.SetMetaDataAnnotation(&te.ObjectMeta, isthmus.AnnotationKeyProved, strings.Join(keys, " "))
	}
}

func remembers(te *v1alpha1.TunnelEndpoint, key string) bool {
	return slices.Contains(strings.Fields(te.Annotations[isthmus.AnnotationKeyProved]), key)
}

// prove adds to what a peer is told that we have the private keys. Until the peer has told us its public key there is no proof.
func (r *NetworkConfigReconciler) prove(ctx context.Context, peer peers.Peer, facts facts.Facts, spec *v1alpha1.NetworkConfigSpec) error {
	copies, err := CopiesOf(ctx, r.Client, peer.LocalNamespace, peer.Cluster.ClusterID)
	if err != nil || len(copies) != 1 {
		return err
	}
	theirs, err := fabric.ParseKey(copies[0].Spec.BackendConfig[v1alpha1.ConfigPublicKey])
	if err != nil {
		return nil //nolint:nilerr // a condition says so
	}
	of := proofOf{facts.Keys, facts.PublicKey, theirs, len(publicKeysOf(spec.BackendConfig))}
	last, _ := r.proofs.Load(peer.Cluster.ClusterID)
	p, _ := last.(proof)
	if p.of != of {
		p = proof{of, of.prove(r.Peers.Self, peer.Cluster.ClusterID)}
		r.proofs.Store(peer.Cluster.ClusterID, p)
	}
	if p.text != "" {
		spec.BackendConfig[v1alpha1.ConfigKeyProof] = p.text
	}
	return nil
}

// A proof for a peer is kept, because it takes X25519 twice for each tunnel, and each change of a Node asks for it again.
type proof struct {
	of   proofOf
	text string // empty: there is none
}

// A proofOf is all that a proof for a peer depends on.
type proofOf struct {
	keys           keyring.Ring
	public, theirs [32]byte
	tunnels        int
}

func (of proofOf) prove(self, peer string) string {
	for _, private := range [][32]byte{of.keys.Private, of.keys.Next} {
		if private != ([32]byte{}) && fabric.PublicKeys(private, 1)[0] == of.public {
			return keyring.Prove(private, of.tunnels, self, peer, of.theirs)
		}
	}
	return ""
}

// reclaim deletes the TunnelEndpoints of other peers with a key that this one proves to have, and the other does not. Who
// listed the key first, before its owner told us of it, has no tunnel by it anyway.
func (r *tunnelEndpointReconciler) reclaim(ctx context.Context, peer peers.Peer, copied *v1alpha1.NetworkConfig) error {
	j := Judge{Reader: r.Client, Peers: r.Peers, Facts: r.Facts, Store: r.Store}
	for _, key := range publicKeysOf(copied.Spec.BackendConfig) {
		tunnels, err := j.tunnelsWith(ctx, key)
		if err != nil {
			return err
		}
		for i := range tunnels {
			te := &tunnels[i]
			if te.Namespace == peer.LocalNamespace {
				continue
			}
			theirs, err := j.proved(ctx, te.Namespace, key)
			if err != nil {
				return err
			}
			ours, err := j.proved(ctx, peer.LocalNamespace, key)
			if err != nil {
				return err
			}
			if theirs || !ours {
				continue
			}
			if err := client.IgnoreNotFound(r.Client.Delete(ctx, te, client.Preconditions{UID: &te.UID, ResourceVersion: &te.ResourceVersion})); err != nil {
				return fmt.Errorf("TunnelEndpoint %s/%s: %w", te.Namespace, te.Name, err)
			}
			r.Log.Warn("TunnelEndpoint deleted, because another peer has proved that it owns the key", "peer", te.Spec.ClusterIdentity.ClusterID,
				"owner", peer.Cluster.ClusterID, "namespace", te.Namespace, "name", te.Name)
		}
	}
	return nil
}

// acceptedBefore reports whether the claim of another peer was accepted with a key that nobody has a
// tunnel for, before the given one was. The conditions in the NetworkConfigs say so, which a restart
// finds again. Of two that were accepted at once the older one counts. Where somebody proves to have the
// key, all others do not count.
func (j Judge) acceptedBefore(ctx context.Context, nc *v1alpha1.NetworkConfig, key string, provers []string) (bool, error) {
	var list v1alpha1.NetworkConfigList
	if err := j.Reader.List(ctx, &list, client.MatchingFields{indexPublicKey: key}, client.UnsafeDisableDeepCopy); err != nil {
		return false, fmt.Errorf("NetworkConfigs with the same key: %w", err)
	}
	mine := standing(nc)
	for i := range list.Items {
		other := &list.Items[i]
		theirs := standing(other)
		if len(provers) > 0 && !slices.Contains(provers, other.Namespace) {
			continue
		}
		if other.Namespace == nc.Namespace || theirs == 0 || theirs < mine || theirs == mine && controllers.CompareAge(other, nc) > 0 {
			continue
		}
		_, stranger, err := sender(ctx, j.Peers, other.Namespace, other.Labels[v1alpha1.LabelOriginID])
		if err != nil || stranger == nil {
			return err == nil, err
		}
	}
	return false, nil
}

// KeyOwner says which other peer has a key of a NetworkConfig; "" when none has. The peer that asks
// is not told: its condition says that somebody has it.
func KeyOwner(ctx context.Context, reader client.Reader, nc *v1alpha1.NetworkConfig) (string, error) {
	var list v1alpha1.TunnelEndpointList
	if err := reader.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return "", fmt.Errorf("TunnelEndpoints: %w", err)
	}
	keys := publicKeysOf(nc.Spec.BackendConfig)
	var first *v1alpha1.TunnelEndpoint
	for i := range list.Items {
		te := &list.Items[i]
		if te.Namespace == nc.Namespace || first != nil && controllers.CompareAge(first, te) < 0 {
			continue
		}
		if slices.ContainsFunc(publicKeysOf(te.Spec.BackendConfig), func(key string) bool { return slices.Contains(keys, key) }) {
			first = te
		}
	}
	if first == nil {
		return "", nil
	}
	id := first.Spec.ClusterIdentity
	return fmt.Sprintf("%s (%s) has it, by TunnelEndpoint %s/%s", id.ClusterName, id.ClusterID, first.Namespace, first.Name), nil
}

// standing is 2 for a copy whose present content we accepted, 1 for a copy whose earlier content we
// accepted, and 0 for all others. A copy that is edited to list the key of another peer thereby ranks
// behind that peer. Where the API server stores no conditions, an answered copy is only known to have been
// accepted once.
func standing(nc *v1alpha1.NetworkConfig) int {
	accepted := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted)
	switch {
	case alive(*nc) && accepted == nil && nc.Status.Processed:
		return 1
	case !alive(*nc) || accepted == nil || accepted.Status != metav1.ConditionTrue:
		return 0
	case accepted.ObservedGeneration != nc.Generation:
		return 1
	}
	return 2
}
