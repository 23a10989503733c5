package exchange

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

func isConflict(err error) bool { return apierrors.IsConflict(err) }

// The first expected answer was recorded from Liqo (docs/liqo-v0.md, section 5). The other cases
// have networks whose length differs from ours.
func TestOnlyOverlappingNetworksAreRemapped(t *testing.T) {
	a := newAnswering(t)
	a.partner("both", 2).claims("10.244.0.0/16", "10.245.0.0/16").untilAccepted("10.246.0.0/16 10.247.0.0/16")
	a.partner("pods", 3).claims("10.244.64.0/18", "100.64.0.0/20").untilAccepted("10.240.0.0/18 None")
	a.partner("external", 4).claims("100.65.0.0/17", "10.245.0.0/24").untilAccepted("None 10.240.64.0/24")
	a.partner("neither", 5).claims("10.64.0.0/14", "192.168.8.0/21").untilAccepted("None None")
}

func TestAnswersAreKeptAcrossClaimChangesAndRestarts(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/16", "10.245.0.0/16")
	p.untilAccepted("10.246.0.0/16 10.247.0.0/16")
	edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.PodCIDR, nc.Spec.EndpointIP = "10.200.0.0/16", "192.0.2.99" })
	p.untilAccepted("10.246.0.0/16 10.247.0.0/16") // the new network has the same length, so the answer stays
	edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.PodCIDR = "10.244.0.0/20" })
	p.untilAccepted("10.246.0.0/20 10.247.0.0/16")

	before := a.versions()
	a.Stop()
	a.start()
	a.Always("a restart writes nothing", func() bool { return maps.Equal(a.versions(), before) })
	a.partner("charlie", 3).claims("10.244.0.0/16", "10.245.0.0/16").untilAccepted("10.240.0.0/16 10.241.0.0/16")
}

// These networks pass the CRD's validation, but no peer can have them.
func TestRefusalsNameTheFieldWithTheInvalidNetwork(t *testing.T) {
	a := newAnswering(t)
	bravo := a.partner("bravo", 2).claims("10.244.0.0/16", "10.245.0.0/16").publish().answer("None", "None")
	bravo.joined()
	for i, c := range []struct {
		name   string
		change func(*v1alpha1.NetworkConfig)
		want   string
	}{
		{"our-key", func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(1) },
			"KeyConflict: spec.backend_config.publicKey: is the public key of the receiver itself; want that of the sender's gateway"},
		{"peers-key", func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(2) },
			"KeyConflict: spec.backend_config.publicKey: is the key of another peer of the receiver; want a different key for each cluster"},
		{"pod", func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "10.244.1.1" },
			"BadEndpoint: spec.endpointIP: 10.244.1.1 is inside 10.244.0.0/16, the receiver's PodCIDR; want an address outside"},
		{"service", func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "10.96.0.1" },
			"BadEndpoint: spec.endpointIP: 10.96.0.1 is inside 10.96.0.0/12, the receiver's ServiceCIDR; want an address outside"},
		{"node", func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "172.30.0.1" },
			"BadEndpoint: spec.endpointIP: 172.30.0.1 is a node of the receiver; want the address of the sender's gateway"},
		{"gateway", func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "198.51.100.1" },
			"BadEndpoint: spec.endpointIP: \"198.51.100.1:5871\" is the gateway of the receiver itself; want that of the sender"},
		{"tunnel", func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "10.246.7.7" },
			"BadEndpoint: spec.endpointIP: 10.246.7.7 is inside a network that the receiver reaches through a tunnel; want an address outside"},
		{"special", func(nc *v1alpha1.NetworkConfig) { nc.Spec.PodCIDR, nc.Spec.ExternalCIDR = "100::/64", "fd00::/64" },
			"Invalid: spec.podCIDR: 100::/64 overlaps 100::/64 (discard-only, RFC 6666); want a network that pods can have"},
		{"addressed", func(nc *v1alpha1.NetworkConfig) { nc.Spec.RemoteCluster.ClusterID = "another" },
			"Invalid: spec.cluster.clusterID: is \"another\"; want " + a.Self.ClusterID + ", the ID of the receiver"},
		{"origin", func(nc *v1alpha1.NetworkConfig) { nc.Labels[v1alpha1.LabelOriginID] = bravo.Cluster.ClusterID },
			"WrongOrigin: metadata.labels[liqo.io/originID]: is \"" + bravo.Cluster.ClusterID + "\", but namespace " + a.Prefix +
				"-tenant-origin is for cluster " + a.Prefix + ".origin"},
	} {
		p := a.partner(c.name, byte(10+i))
		nc := p.claim("10.244.64.0/18", "10.64.0.0/20")
		c.change(nc)
		a.Create(nc)
		p.untilAccepted(c.want)
		if p.allocated() || p.copied().Status.PodCIDRNAT != "" {
			t.Errorf("%s: refused, and yet it got networks: %+v", c.name, p.copied().Status)
		}
	}
	bravo.untilAccepted("10.246.0.0/16 10.247.0.0/16")
}

func TestOverlappingNetworksAreNotRefused(t *testing.T) {
	a := newAnswering(t)
	for i, pod := range []string{"10.96.0.0/12", "172.30.0.0/24", "10.244.0.0/16", "10.245.0.0/16"} {
		p := a.partner(fmt.Sprint("p", i), byte(20+i)).claims(pod, "192.168.0.0/24")
		a.Until("answered", func() bool { return p.copied().Status.Processed })
		for _, seen := range []string{p.copied().Status.PodCIDRNAT, p.copied().Status.ExternalCIDRNAT} {
			if seen == "None" {
				continue
			}
			if got := netip.MustParsePrefix(seen); got.Overlaps(netip.MustParsePrefix(pod)) {
				t.Errorf("%s is remapped to %s", pod, seen)
			}
		}
	}
}

func TestExhaustedPoolsAreAConditionUntilAPoolIsAdded(t *testing.T) {
	a := newAnswering(t)
	a.configure([]netip.Prefix{netip.MustParsePrefix("10.244.0.0/15")}, nil) // the only pool contains both of our networks
	p := a.partner("bravo", 2).claims("10.244.0.0/16", "10.64.0.0/20")
	p.untilAccepted("Exhausted: spec.podCIDR: 10.244.0.0/16 overlaps our PodCIDR, 10.244.0.0/16, and no /16 is free in the pools [10.244.0.0/15]; " +
		"want a network that overlaps nothing, or a larger pool")
	if p.allocated() {
		t.Error("half an allocation")
	}
	a.configure([]netip.Prefix{netip.MustParsePrefix("10.244.0.0/15"), netip.MustParsePrefix("172.16.0.0/12")}, nil)
	p.untilAccepted("172.16.0.0/16 None")
}

func TestRefusedPeerGetsNetworksWhenAnotherPeerLeaves(t *testing.T) {
	a := newAnswering(t)
	a.configure([]netip.Prefix{netip.MustParsePrefix("10.244.0.0/15"), netip.MustParsePrefix("172.16.0.0/16")}, nil)
	bravo := a.partner("bravo", 2).claims("10.244.0.0/16", "10.64.0.0/20")
	bravo.untilAccepted("172.16.0.0/16 None")
	charlie := a.partner("charlie", 3).claims("10.244.0.0/16", "10.65.0.0/20")
	a.Until("exhausted", func() bool { return strings.HasPrefix(accepted(charlie.copied()), "Exhausted: ") })
	a.OK(managertest.Client.Delete(a.Ctx, bravo.Peering))
	a.Until("it says until when", func() bool {
		return strings.Contains(accepted(charlie.copied()), "; 172.16.0.0/16 was released and is free at ")
	})
	a.endHolds()
	charlie.untilAccepted("172.16.0.0/16 None")
	bravo.untilAccepted("NotPeered: metadata.labels[liqo.io/originID]: the peering with cluster " + bravo.Cluster.ClusterID + " is being taken down here")
}

func TestOverridesAreAppliedOrRefused(t *testing.T) {
	a := newAnswering(t)
	bravo := a.partner("bravo", 2, func(p *isthmus.Peering) {
		p.Spec.Overrides.PodCIDR, p.Spec.Overrides.ExternalCIDR = ptr.To("10.9.0.0/18"), ptr.To("10.8.0.0/20")
	}).claims("10.64.0.0/18", "10.65.0.0/20")
	bravo.untilAccepted("10.9.0.0/18 10.8.0.0/20")
	charlie := a.partner("charlie", 3, func(p *isthmus.Peering) { p.Spec.Overrides.PodCIDR = ptr.To("10.9.0.0/16") }).claims("10.66.0.0/16", "10.67.0.0/20")
	a.Until("refused", func() bool {
		return strings.HasPrefix(accepted(charlie.copied()), "CIDRConflict: spec.overrides.podCIDR: 10.9.0.0/16 overlaps")
	})
	edit(a, bravo.Peering, func(p *isthmus.Peering) { p.Spec.Overrides = isthmus.Overrides{PodCIDR: ptr.To("10.10.0.0/18")} })
	bravo.untilAccepted("10.10.0.0/18 10.8.0.0/20")
	a.Until("it says until when", func() bool { return strings.Contains(accepted(charlie.copied()), " is held until ") })
	a.endHolds()
	charlie.untilAccepted("10.9.0.0/16 None")
}

// Public keys are public, so anybody can claim one. Such a claim must not take the key from its
// owner.
func TestClaimingAnotherPeersKeyIsRefused(t *testing.T) {
	a := newAnswering(t)
	older := a.partner("older", 2).claims("10.64.0.0/18", "10.65.0.0/20")
	older.untilAccepted("None None")
	owner := a.partner("owner", 3).claims("10.66.0.0/16", "10.67.0.0/16").publish().answer("None", "None")
	owner.joined()
	edit(a, older.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(3) })
	older.untilAccepted("KeyConflict: spec.backend_config.publicKey: is the key of another peer of the receiver; want a different key for each cluster (None None)")
	owner.untilAccepted("None None")
	// A key that its owner replaces or removes is free.
	edit(a, owner.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(4) })
	older.untilAccepted("None None")
	edit(a, owner.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["tunnels"] = "5872:" + managertest.KeyText(5) })
	a.Until("the TunnelEndpoint has the further key", func() bool { return owner.Endpoint().Spec.BackendConfig["tunnels"] != "" })
	edit(a, older.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(5) })
	older.untilAccepted("KeyConflict: spec.backend_config.publicKey: is the key of another peer of the receiver; want a different key for each cluster (None None)")
	edit(a, owner.copied(), func(nc *v1alpha1.NetworkConfig) { delete(nc.Spec.BackendConfig, "tunnels") })
	older.untilAccepted("None None")
	a.Until("the TunnelEndpoint has the new key", func() bool { return owner.Endpoint().Spec.BackendConfig["publicKey"] == managertest.KeyText(4) })
}

// A peer that joined earlier cannot take the key of another peer by listing it among its own
// tunnels. The owner's tunnel stays, and the claim of the earlier peer is refused.
func TestOlderPeerCannotTakeAKeyByListingItAmongItsTunnels(t *testing.T) {
	a := newAnswering(t)
	thief := a.partner("thief", 2).claims("10.64.0.0/18", "10.65.0.0/20").publish().answer("None", "None")
	before := thief.joined()
	owner := a.partner("owner", 3).claims("10.66.0.0/16", "10.67.0.0/16").publish().answer("None", "None")
	owned := owner.joined()
	edit(a, thief.copied(), func(nc *v1alpha1.NetworkConfig) {
		nc.Spec.BackendConfig["tunnels"] = "5872:" + managertest.KeyText(7) + ",5873:" + managertest.KeyText(3)
	})
	thief.untilAccepted("KeyConflict: spec.backend_config.tunnels: tunnel 2 has the key of another peer of the receiver; want different keys for each cluster (None None)")
	if after := thief.Endpoint(); after.ResourceVersion != before.ResourceVersion {
		t.Errorf("the thief's TunnelEndpoint has changed: %+v", after.Spec.BackendConfig)
	}
	owner.untilAccepted("None None")
	if after := owner.Endpoint(); after.ResourceVersion != owned.ResourceVersion {
		t.Errorf("the owner's TunnelEndpoint has changed: %+v", after.Spec.BackendConfig)
	}
	// The owner replaces the key, and the claim that was refused is accepted.
	edit(a, owner.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(4) })
	thief.untilAccepted("None None")
	a.Until("the TunnelEndpoint has the tunnels", func() bool { return thief.Endpoint().Spec.BackendConfig["tunnels"] != "" })
}

// An accepted claim holds its key before a TunnelEndpoint exists, even against an older peer and
// after a restart.
func TestAKeyBelongsToTheFirstAcceptedPeer(t *testing.T) {
	a := newAnswering(t)
	thief := a.partner("thief", 2).claims("10.64.0.0/18", "10.65.0.0/20")
	thief.untilAccepted("None None")
	owner := a.partner("owner", 3).claims("10.66.0.0/16", "10.67.0.0/16")
	owner.untilAccepted("None None")
	const refused = "KeyConflict: spec.backend_config.publicKey: is the key of another peer of the receiver; want a different key for each cluster (None None)"
	steal := func() {
		t.Helper()
		edit(a, thief.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(3) })
		thief.untilAccepted(refused)
		owner.untilAccepted("None None")
	}
	steal()
	a.Stop()
	a.start()
	edit(a, thief.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "192.0.2.77" }) // the edit causes another decision
	thief.untilAccepted(refused)
	// An edit of another field does not cost the owner its key.
	edit(a, owner.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "192.0.2.78" })
	a.Until("the owner is answered again", func() bool {
		nc := owner.copied()
		return nc.Generation > 1 && accepted(nc) == "None None"
	})
	thief.untilAccepted(refused)
	// The owner gives the key up, first by a new key and then by leaving. Each time the claim that was
	// refused is accepted.
	edit(a, owner.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(4) })
	thief.untilAccepted("None None")
	edit(a, thief.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(2) })
	thief.untilAccepted("None None")
	edit(a, owner.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["publicKey"] = managertest.KeyText(3) })
	owner.untilAccepted("None None")
	steal()
	a.OK(managertest.Client.Delete(a.Ctx, owner.Peering))
	thief.untilAccepted("None None")
}

// Anybody who learns a public key can claim it before its owner does. Only the owner can prove that
// it has the private key.
func TestKeyBelongsToThePeerThatProvesPossession(t *testing.T) {
	a := newAnswering(t)
	ours, next := keyring.New(), keyring.New()
	published, public := fabric.PublicKeys(ours, 1)[0], keyText(fabric.PublicKeys(next, 1)[0])
	a.facts.change(func(f *facts.Facts) { f.PublicKey, f.Keys.Private = published, ours })
	owner := a.partner("owner", 2).claims("10.64.0.0/18", "10.65.0.0/20").publish().answer("None", "None")
	owner.joined()
	thief := a.partner("thief", 3).claims("10.66.0.0/16", "10.67.0.0/16").publish().answer("None", "None")
	thief.joined()
	claim := func(p *partner, key, proof string) {
		edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) {
			nc.Spec.BackendConfig[v1alpha1.ConfigPublicKey] = key
			if nc.Spec.BackendConfig[v1alpha1.ConfigKeyProof] = proof; proof == "" {
				delete(nc.Spec.BackendConfig, v1alpha1.ConfigKeyProof)
			}
		})
	}
	proofOf := func(p *partner) string {
		return keyring.Prove(next, 1, p.Cluster.ClusterID, a.Self.ClusterID, published)
	}
	const refused = "KeyConflict: spec.backend_config.publicKey: is the key of another peer of the receiver; want a different key for each cluster (None None)"
	claim(thief, public, "")
	a.Until("the thief's tunnel has the key", func() bool { return thief.Endpoint().Spec.BackendConfig[v1alpha1.ConfigPublicKey] == public })
	claim(owner, public, "")
	owner.untilAccepted(refused)
	claim(owner, public, proofOf(thief)) // a proof that the thief has the key, not the owner
	owner.untilAccepted(refused)
	claim(owner, public, proofOf(owner))
	owner.untilAccepted("None None")
	thief.untilAccepted(refused)
	a.Until("the owner's tunnel has the key, and the thief has none", func() bool {
		return owner.Endpoint().Spec.BackendConfig[v1alpha1.ConfigPublicKey] == public && thief.Endpoint() == nil
	})
	claim(thief, public, proofOf(owner))
	thief.untilAccepted(refused)
	claim(thief, managertest.KeyText(3), "")
	thief.untilAccepted("None None")
	thief.joined()
	// Our own key rotates as well, and the owner does not know the new key yet.
	a.facts.change(func(f *facts.Facts) { f.Keys.Private, f.Keys.Next = keyring.New(), ours })
	claim(thief, public, "")
	thief.untilAccepted(refused)
	owner.untilAccepted("None None")
}

// A proof is made for our present key. After our key has rotated, a thief of the private key can
// prove possession before the owner does.
func TestOwnerKeepsAProvenKeyWhenOurKeyRotates(t *testing.T) {
	a := newAnswering(t)
	ours, next, theirs := keyring.New(), keyring.New(), keyring.New()
	public := keyText(fabric.PublicKeys(theirs, 1)[0])
	a.facts.change(func(f *facts.Facts) { f.PublicKey, f.Keys.Private = fabric.PublicKeys(ours, 1)[0], ours })
	claim := func(p *partner, receiver [32]byte) {
		edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) {
			nc.Spec.BackendConfig[v1alpha1.ConfigPublicKey] = public
			nc.Spec.BackendConfig[v1alpha1.ConfigKeyProof] = keyring.Prove(theirs, 1, p.Cluster.ClusterID, a.Self.ClusterID, fabric.PublicKeys(receiver, 1)[0])
		})
	}
	owner := a.partner("owner", 2).claims("10.64.0.0/18", "10.65.0.0/20").publish().answer("None", "None")
	owner.joined()
	claim(owner, ours)
	a.Until("the owner's proof is noted", func() bool { return owner.Endpoint().Annotations[isthmus.AnnotationKeyProved] == public })
	thief := a.partner("thief", 3).claims("10.66.0.0/16", "10.67.0.0/16").publish().answer("None", "None")
	thief.joined()
	a.facts.change(func(f *facts.Facts) { f.PublicKey, f.Keys.Private = fabric.PublicKeys(next, 1)[0], next })
	claim(thief, next)
	thief.untilAccepted("KeyConflict: spec.backend_config.publicKey: is the key of another peer of the receiver; want a different key for each cluster (None None)")
	a.Always("the owner has its tunnel", func() bool { return owner.Endpoint() != nil && accepted(owner.copied()) == "None None" })
	// The key is free for another peer once the owner has a new one.
	edit(a, owner.copied(), func(nc *v1alpha1.NetworkConfig) {
		nc.Spec.BackendConfig[v1alpha1.ConfigPublicKey] = managertest.KeyText(4)
	})
	thief.untilAccepted("None None")
	a.Until("what the owner proved is forgotten", func() bool { return owner.Endpoint().Annotations[isthmus.AnnotationKeyProved] == "" })
}

// A peer that proves possession of two keys gets each of them back, but only from a peer that has
// no proof for that key.
func TestPeerLosesOnlyKeysThatItDoesNotProve(t *testing.T) {
	a := newAnswering(t)
	ours, shared := keyring.New(), keyring.New()
	published, keys := fabric.PublicKeys(ours, 1)[0], fabric.PublicKeys(shared, 2)
	a.facts.change(func(f *facts.Facts) { f.PublicKey, f.Keys.Private = published, ours })
	claim := func(p *partner, proved int, keys ...[32]byte) {
		edit(a, p.copied(), func(nc *v1alpha1.NetworkConfig) {
			config := nc.Spec.BackendConfig
			if config[v1alpha1.ConfigPublicKey] = keyText(keys[0]); len(keys) > 1 {
				config[v1alpha1.ConfigTunnels] = fabric.FormatTunnels([]fabric.TunnelEnd{{Port: 5872, PublicKey: keys[1]}})
			}
			if proved > 0 {
				config[v1alpha1.ConfigKeyProof] = keyring.Prove(shared, proved, p.Cluster.ClusterID, a.Self.ClusterID, published)
			}
		})
	}
	owner := a.partner("owner", 2).claims("10.64.0.0/18", "10.65.0.0/20").publish().answer("None", "None")
	owner.joined()
	rival := a.partner("rival", 3).claims("10.66.0.0/16", "10.67.0.0/16").publish().answer("None", "None")
	rival.joined()
	thief := a.partner("thief", 4).claims("10.68.0.0/16", "10.69.0.0/16").publish().answer("None", "None")
	thief.joined()
	claim(rival, 1, keys[0])
	claim(thief, 0, keys[1])
	a.Until("rival and thief have a tunnel with a key each", func() bool {
		return rival.Endpoint().Annotations[isthmus.AnnotationKeyProved] == keyText(keys[0]) &&
			thief.Endpoint().Spec.BackendConfig[v1alpha1.ConfigPublicKey] == keyText(keys[1])
	})
	claim(owner, 2, keys...)
	a.Until("the thief has no tunnel", func() bool { return thief.Endpoint() == nil })
	a.Always("whoever proves a key keeps its tunnel", func() bool { return rival.Endpoint() != nil && owner.Endpoint() != nil })
}

// A refused claim does not hold its key. If two peers claim a key at the same time, exactly one
// gets it.
func TestRefusedClaimDoesNotReserveItsKey(t *testing.T) {
	a := newAnswering(t)
	refused := a.partner("refused", 2)
	nc := refused.claim("10.64.0.0/18", "10.65.0.0/20")
	nc.Spec.EndpointIP, nc.Spec.BackendConfig["publicKey"] = "10.244.1.1", managertest.KeyText(3)
	a.Create(nc)
	a.Until("it is refused, and older than the next", func() bool {
		nc := refused.copied()
		return strings.HasPrefix(accepted(nc), "BadEndpoint: ") && time.Now().Unix() > nc.CreationTimestamp.Unix()
	})
	a.partner("owner", 3).claims("10.66.0.0/16", "10.67.0.0/16").untilAccepted("None None")
	edit(a, refused.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "192.0.2.2" })
	refused.untilAccepted("KeyConflict: spec.backend_config.publicKey: is the key of another peer of the receiver; want a different key for each cluster")

	a.Stop()
	one, other := a.partner("one", 7), a.partner("other", 7)
	one.claims("10.68.0.0/18", "10.69.0.0/20")
	other.claims("10.70.0.0/18", "10.71.0.0/20")
	a.start() // the manager decides both claims at once
	decided := func() bool {
		x, y := accepted(one.copied()), accepted(other.copied())
		return x == "None None" && strings.HasPrefix(y, "KeyConflict: ") || y == "None None" && strings.HasPrefix(x, "KeyConflict: ")
	}
	a.Until("one of them has the key", decided)
	a.Always("that stays", decided)
}

func TestTwoNetworkConfigsOfOnePeerAreRefusedAsAmbiguous(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "100.65.0.0/20").publish().answer("None", "None")
	before := p.joined()
	second := p.claim("100.99.0.0/18", "100.98.0.0/20")
	second.Name = "second"
	a.Create(second)
	const message = "Ambiguous: there is more than one NetworkConfig of this cluster in namespace %s; want one"
	want := fmt.Sprintf(message, p.NS)
	p.untilAccepted(want + " (10.246.0.0/18 None)")
	a.Until("the second is refused, too", func() bool {
		a.OK(managertest.Client.Get(a.Ctx, client.ObjectKeyFromObject(second), second))
		return accepted(second) == want
	})
	if after := p.Endpoint(); after.ResourceVersion != before.ResourceVersion {
		t.Errorf("the TunnelEndpoint changed from %+v to %+v", before, after)
	}
	a.OK(managertest.Client.Delete(a.Ctx, second))
	p.untilAccepted("10.246.0.0/18 None")
}

func TestStatusForgedByThePeerIsCorrected(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.65.0.0/20")
	p.untilAccepted("10.246.0.0/18 None")
	editStatus(a, p.copied(), func(nc *v1alpha1.NetworkConfig) {
		nc.Status.PodCIDRNAT = "10.99.0.0/18"
		for i := range 15 {
			nc.Status.Conditions = append(nc.Status.Conditions, metav1.Condition{
				Type: fmt.Sprint("Forged", i), Status: metav1.ConditionTrue, Reason: "Forged", LastTransitionTime: metav1.Now()})
		}
	})
	p.untilAccepted("10.246.0.0/18 None")
	a.Until("the conditions are ours again", func() bool { return len(p.copied().Status.Conditions) == 1 })
}

func TestNetworkConfigWithoutAPeeringGetsNoNetworks(t *testing.T) {
	a := newAnswering(t)
	r := a.Describe("stranger") // the cluster has no Peering
	p := &partner{Remote: r, a: a, key: 9}
	a.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.NS}})
	p.claims("10.244.0.0/18", "10.65.0.0/20").untilAccepted("NotPeered: metadata.labels[liqo.io/originID]: no Peering here is for cluster " +
		r.Cluster.ClusterID + " and namespace " + r.NS)
	// An administrator creates the Peering.
	r.Peering.Finalizers = []string{isthmus.FinalizerPeering}
	a.Create(r.Peering)
	p.untilAccepted("10.246.0.0/18 None")
}

// If a peer fills its namespace with objects, only some of them get a condition, and other peers
// are still answered.
func TestConditionsAreBoundedInAFloodOfNetworkConfigs(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("flood", 2)
	other := a.partner("other", 3)
	a.Stop() // otherwise the manager could answer the first object before the others exist
	for i := range 60 {
		if i == 10 {
			a.start()
		}
		nc := p.claim("10.244.0.0/18", "10.65.0.0/20")
		nc.Name = fmt.Sprint("flood-", i)
		if i%2 == 0 {
			nc.Labels[v1alpha1.LabelOriginID] = fmt.Sprint("origin-", i)
		}
		a.Create(nc)
	}
	other.claims("10.244.0.0/18", "10.65.0.0/20").untilAccepted("10.246.0.0/18 None")
	answers := func() (ambiguous, all int) {
		var list v1alpha1.NetworkConfigList
		a.OK(managertest.Client.List(a.Ctx, &list, client.InNamespace(p.NS)))
		for i := range list.Items {
			switch text := accepted(&list.Items[i]); {
			case text == "no answer":
			case strings.HasPrefix(text, "Ambiguous: "):
				ambiguous++
				all++
			default:
				all++
			}
		}
		return ambiguous, all
	}
	a.Until("the oldest are refused", func() bool { ambiguous, _ := answers(); return ambiguous >= maxRefused })
	if ambiguous, all := answers(); all > 60-20 {
		t.Errorf("%d objects got a condition, %d of them since they are ambiguous", all, ambiguous)
	}
	if p.allocated() {
		t.Error("and got networks")
	}
}

func TestAllocatedNetworksContainNoGateway(t *testing.T) {
	a := newAnswering(t)
	bravo := a.partner("bravo", 2)
	nc := bravo.claim("100.64.0.0/18", "100.65.0.0/20")
	nc.Spec.EndpointIP = "10.246.0.9" // the peer's gateway has an address inside a pool
	a.Create(nc)
	bravo.publish().answer("None", "None").joined()
	a.Until("the cache has it", func() bool {
		var list v1alpha1.TunnelEndpointList
		a.OK(a.mgr.GetClient().List(a.Ctx, &list, client.InNamespace(bravo.NS)))
		return len(list.Items) == 1
	})
	a.partner("charlie", 3).claims("10.244.0.0/16", "10.245.0.0/16").untilAccepted("10.247.0.0/16 10.240.0.0/16")
	// A network also must not contain the gateway of its own peer.
	delta := a.partner("delta", 4)
	nc = delta.claim("10.244.0.0/17", "10.249.0.0/20")
	nc.Spec.EndpointIP = "10.249.0.7"
	a.Create(nc)
	a.Until("answered", func() bool { return delta.copied().Status.Processed })
	allocation, _ := a.store.State().AllocationOf(delta.Cluster.ClusterID)
	for _, p := range []netip.Prefix{allocation.Pod, allocation.External} {
		if p.Contains(netip.MustParseAddr("10.249.0.7")) || p.Contains(netip.MustParseAddr("10.246.0.9")) {
			t.Errorf("a gateway is inside %v", p)
		}
	}
	if nodes := a.store.State().Own().Nodes; len(nodes) != 1 {
		t.Errorf("gateways have become nodes: %v", nodes)
	}
}

func TestAnswersAreUpdatedWhenNodesChange(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.64.0.0/18", "10.65.0.0/20")
	p.untilAccepted("None None")
	a.facts.change(func(f *facts.Facts) { f.Nodes = append(f.Nodes, netip.MustParseAddr("192.0.2.2")) })
	p.untilAccepted("BadEndpoint: spec.endpointIP: 192.0.2.2 is a node of the receiver; want the address of the sender's gateway (None None)")
	a.facts.change(func(f *facts.Facts) { f.Nodes = f.Nodes[:1] })
	p.untilAccepted("None None")
}

func TestAnswersAreUpdatedWhenTheIPAMStateChanges(t *testing.T) {
	a := newAnswering(t)
	p := a.partner("bravo", 2).claims("10.244.0.0/18", "10.65.0.0/20")
	p.untilAccepted("10.246.0.0/18 None")
	_, err := a.store.Update(a.Ctx, func(b ipam.State) (ipam.State, error) { // as if somebody had edited the IPAM state
		b, _, err := b.Release(p.Cluster.ClusterID).Allocate(ipam.Request{ID: p.Cluster.ClusterID,
			Pod: netip.MustParsePrefix("10.244.0.0/18"), External: netip.MustParsePrefix("10.65.0.0/20"), WantPod: netip.MustParsePrefix("10.8.0.0/18")})
		return b, err
	})
	a.OK(err)
	p.untilAccepted("10.8.0.0/18 None")
}

func TestNewPeersWaitUntilAllNodesHaveReported(t *testing.T) {
	a := newAnswering(t)
	early := a.partner("early", 2).claims("10.50.0.0/18", "10.60.0.0/20")
	early.untilAccepted("None None")
	a.facts.change(func(f *facts.Facts) { f.Awaiting = true })
	late := a.partner("late", 3).claims("192.168.32.0/22", "10.62.0.0/20")
	edit(a, early.copied(), func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = "192.0.2.99" })
	early.untilAccepted("None None") // a peer that has networks is answered
	a.Always("it is not answered, and gets nothing", func() bool { return accepted(late.copied()) == "no answer" && !late.allocated() })
	a.facts.change(func(f *facts.Facts) { f.Awaiting = false })
	late.untilAccepted("None None")
}
