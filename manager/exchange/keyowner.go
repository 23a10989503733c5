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

// takenKeys returns the keys of a claim that belong to another peer. Anybody can list a public key,
// so listing a key first proves little. These rules, in this order, decide to which peer a key
// belongs:
//
//  1. If peers prove possession of the private key, the key belongs to one of them.
//  2. If a TunnelEndpoint has the key, the key belongs to the peer of the TunnelEndpoint. If two
//     have it, because of an edit by hand, the older one counts, as in fabric.GatewayFor.
//  3. Otherwise the key belongs to the peer whose claim with the key was accepted first.
func (v Validator) takenKeys(ctx context.Context, peer peers.Peer, nc *v1alpha1.NetworkConfig, claim fabric.Claim) (taken [][32]byte, err error) {
	for _, key := range claim.Keys() {
		another, err := v.taken(ctx, peer, nc, keyText(key))
		if err != nil {
			return nil, err
		}
		if another {
			taken = append(taken, key)
		}
	}
	return taken, nil
}

func (v Validator) taken(ctx context.Context, peer peers.Peer, nc *v1alpha1.NetworkConfig, key string) (bool, error) {
	provers, err := v.provers(ctx, key)
	if err != nil || len(provers) > 0 && !slices.Contains(provers, nc.Namespace) {
		return err == nil, err
	}
	tunnels, err := v.tunnelsWith(ctx, key)
	if err != nil {
		return false, err
	}
	// The TunnelEndpoint of a peer without a proof counts until reclaim has deleted it, so that no
	// gateway gets the same key for two peers.
	if len(tunnels) > 0 {
		first := slices.MinFunc(tunnels, func(a, b v1alpha1.TunnelEndpoint) int { return controllers.CompareAge(&a, &b) })
		return first.Namespace != peer.LocalNamespace, nil
	}
	return v.acceptedBefore(ctx, nc, key, provers)
}

// tunnelsWith returns the TunnelEndpoints with a key, except those that are being deleted.
func (v Validator) tunnelsWith(ctx context.Context, key string) ([]v1alpha1.TunnelEndpoint, error) {
	var list v1alpha1.TunnelEndpointList
	if err := v.Reader.List(ctx, &list, client.MatchingFields{indexPublicKey: key}); err != nil {
		return nil, fmt.Errorf("TunnelEndpoints with the same key: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(te v1alpha1.TunnelEndpoint) bool { return !te.DeletionTimestamp.IsZero() }), nil
}

// provers returns the namespaces of the peers that prove possession of a key. It returns none if
// only one peer claims the key.
func (v Validator) provers(ctx context.Context, key string) (all []string, err error) {
	var list v1alpha1.NetworkConfigList
	if err := v.Reader.List(ctx, &list, client.MatchingFields{indexPublicKey: key}, client.UnsafeDisableDeepCopy); err != nil {
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
		switch proved, err := v.proved(ctx, namespace, key); {
		case err != nil:
			return nil, err
		case proved:
			all = append(all, namespace)
		}
	}
	return all, nil
}

// proved reports whether the peer of a tenant namespace claims a key and proves possession of the
// private key, either now or when its TunnelEndpoint got the key.
func (v Validator) proved(ctx context.Context, namespace, key string) (bool, error) {
	peer, err := v.Peers.ByNamespace(ctx, namespace)
	if errors.Is(err, peers.ErrNoPeer) || err == nil && peer.Leaving && !peer.Draining {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	copies, err := CopiesOf(ctx, v.Reader, namespace, peer.Cluster.ClusterID)
	if err != nil {
		return false, err
	}
	copies = slices.DeleteFunc(copies, func(nc v1alpha1.NetworkConfig) bool { return !alive(nc) })
	if len(copies) != 1 || !slices.Contains(publicKeysOf(copies[0].Spec.BackendConfig), key) {
		return false, nil
	}
	tunnels, err := v.tunnelsWith(ctx, key)
	if err != nil || slices.ContainsFunc(tunnels, func(te v1alpha1.TunnelEndpoint) bool { return te.Namespace == namespace && remembers(&te, key) }) {
		return err == nil, err
	}
	facts, err := v.Facts.Facts(ctx)
	return err == nil && proves(copies[0].Spec.BackendConfig, facts.Keys, v.Peers.Self, peer.Cluster.ClusterID), err
}

// proves reports whether config proves possession of the private keys of all its tunnels. The proof
// may be made for our current key or for our next key.
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

// remember records on a TunnelEndpoint the keys whose possession the peer has proved. A record
// lasts as long as the TunnelEndpoint has the key. A proof is made for our key, so it is invalid
// after a rotation of our key. Without records, anybody who has stolen the peer's private key could
// then take the key over, by sending a new proof before the peer does.
func remember(te *v1alpha1.TunnelEndpoint, proves bool) {
	keys := slices.DeleteFunc(publicKeysOf(te.Spec.BackendConfig), func(key string) bool { return !proves && !remembers(te, key) })
	if delete(te.Annotations, isthmus.AnnotationKeyProved); len(keys) > 0 {
		metav1.SetMetaDataAnnotation(&te.ObjectMeta, isthmus.AnnotationKeyProved, strings.Join(keys, " "))
	}
}

func remembers(te *v1alpha1.TunnelEndpoint, key string) bool {
	return slices.Contains(strings.Fields(te.Annotations[isthmus.AnnotationKeyProved]), key)
}

// prove adds our proof of possession to the spec for a peer. The proof needs the peer's public key;
// without one, prove adds nothing.
func (r *NetworkConfigReconciler) prove(ctx context.Context, peer peers.Peer, facts facts.Facts, spec *v1alpha1.NetworkConfigSpec) error {
	copies, err := CopiesOf(ctx, r.Client, peer.LocalNamespace, peer.Cluster.ClusterID)
	if err != nil || len(copies) != 1 {
		return err
	}
	theirs, err := fabric.ParseKey(copies[0].Spec.BackendConfig[v1alpha1.ConfigPublicKey])
	if err != nil {
		return nil //nolint:nilerr // a condition reports the invalid key
	}
	inputs := proofInputs{facts.Keys, facts.PublicKey, theirs, len(publicKeysOf(spec.BackendConfig))}
	last, _ := r.proofs.Load(peer.Cluster.ClusterID)
	p, _ := last.(proof)
	if p.inputs != inputs {
		p = proof{inputs, inputs.prove(r.Peers.Self, peer.Cluster.ClusterID)}
		r.proofs.Store(peer.Cluster.ClusterID, p)
	}
	if p.text != "" {
		spec.BackendConfig[v1alpha1.ConfigKeyProof] = p.text
	}
	return nil
}

// A proof is cached for each peer, because making one takes two X25519 operations for each tunnel,
// and every change of the Facts, such as a new Node, reconciles all peers.
type proof struct {
	inputs proofInputs
	text   string // empty: there is no proof
}

// A proofInputs has all inputs of a peer's proof except the peer's cluster ID.
type proofInputs struct {
	keys           keyring.Ring
	public, theirs [32]byte
	tunnels        int
}

func (in proofInputs) prove(self, peer string) string {
	for _, private := range [][32]byte{in.keys.Private, in.keys.Next} {
		if private != ([32]byte{}) && fabric.PublicKeys(private, 1)[0] == in.public {
			return keyring.Prove(private, in.tunnels, self, peer, in.theirs)
		}
	}
	return ""
}

// reclaim gives a peer the keys whose possession it proves. If another peer's TunnelEndpoint has
// such a key, and that peer does not prove possession as well, reclaim deletes the TunnelEndpoint.
// So a peer cannot keep a foreign key by listing the key before its owner does.
func (r *tunnelEndpointReconciler) reclaim(ctx context.Context, peer peers.Peer, copied *v1alpha1.NetworkConfig) error {
	v := Validator{Reader: r.Client, Peers: r.Peers, Facts: r.Facts, Store: r.Store}
	for _, key := range publicKeysOf(copied.Spec.BackendConfig) {
		tunnels, err := v.tunnelsWith(ctx, key)
		if err != nil {
			return err
		}
		for i := range tunnels {
			te := &tunnels[i]
			if te.Namespace == peer.LocalNamespace {
				continue
			}
			theirs, err := v.proved(ctx, te.Namespace, key)
			if err != nil {
				return err
			}
			ours, err := v.proved(ctx, peer.LocalNamespace, key)
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

// acceptedBefore reports whether another peer's claim with the key was accepted before the claim in
// nc. The caller has checked that no TunnelEndpoint has the key. acceptedBefore reads the
// conditions of the NetworkConfigs, which survive a restart. If both claims were accepted, the
// older object wins. If provers is not empty, only claims in these namespaces count.
func (v Validator) acceptedBefore(ctx context.Context, nc *v1alpha1.NetworkConfig, key string, provers []string) (bool, error) {
	var list v1alpha1.NetworkConfigList
	if err := v.Reader.List(ctx, &list, client.MatchingFields{indexPublicKey: key}, client.UnsafeDisableDeepCopy); err != nil {
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
		_, stranger, err := sender(ctx, v.Peers, other.Namespace, other.Labels[v1alpha1.LabelOriginID])
		if err != nil || stranger == nil {
			return err == nil, err
		}
	}
	return false, nil
}

// KeyOwner returns the name of another peer that has a key of nc, or "". The name is for
// administrators of this cluster only: the condition that the claimant reads does not contain it.
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
	return fmt.Sprintf("%s (%s) has this key, in TunnelEndpoint %s/%s", id.ClusterName, id.ClusterID, first.Namespace, first.Name), nil
}

// standing ranks a copy: 2 if we accepted its present content, 1 if we accepted earlier content, 0
// otherwise. So a copy that was edited to list another peer's key ranks behind that peer's copy. If
// the API server drops conditions, an answered copy ranks 1.
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
