package peering

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// Claims are a person's choices about the networks that the peer advertises. The zero value
// changes nothing.
type Claims struct {
	// Allowed are networks to add to spec.claims.allowed.
	Allowed []netip.Prefix
	// AlwaysRemap is the value for spec.claims.alwaysRemap. If it is nil, the field does not
	// change.
	AlwaysRemap *bool
	// Consent is the claim to which the person agrees, or nil.
	Consent *Claim
}

// A Claim is the pair of networks that a peer advertises in its NetworkConfig.
type Claim struct{ Pod, External netip.Prefix }

// String returns the claim in the format of --consent.
func (c Claim) String() string { return c.Pod.String() + "," + c.External.String() }

// ParseClaim parses the result of String.
func ParseClaim(text string) (Claim, error) {
	pod, external, _ := strings.Cut(text, ",")
	p, err := ParseNetwork(pod)
	if err != nil {
		return Claim{}, err
	}
	x, err := ParseNetwork(external)
	return Claim{p, x}, err
}

// ParseNetwork parses a network, and rejects one with host bits.
func ParseNetwork(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || p != p.Masked() {
		return netip.Prefix{}, fmt.Errorf("%s is not a network; want one such as 10.48.0.0/14", safetext.Of(text))
	}
	return p, nil
}

func (c Claims) none() bool { return len(c.Allowed) == 0 && c.AlwaysRemap == nil && c.Consent == nil }

// Review applies a person's choices about the claim of one peer. Then it reports which networks
// this cluster uses in place of the networks that the peer advertises. name is the name of the
// Peering or of the peer. The error is errConsent if the claim waits for consent.
func Review(ctx context.Context, c *cluster.Cluster, name string, o PeerOptions) (*isthmus.Peering, error) {
	if err := c.Identify(ctx); err != nil {
		return nil, err
	}
	p, err := peeringNamed(ctx, c, name)
	if err != nil {
		return nil, err
	}
	s := &side{Cluster: c, peer: &side{Cluster: &cluster.Cluster{Identity: p.Spec.Cluster}}, namespace: p.Spec.TenantNamespace.Local, peering: p, exists: true, claims: o.Claims}
	if err := s.checkConsent(ctx); err != nil {
		return nil, err
	}
	changes, err := s.setClaims(ctx)
	if err != nil {
		return nil, err
	}
	if changes != "" {
		o.Report(changes)
	}
	if changes != "" && o.Timeout > 0 {
		w := &waiter{sides: []*side{s}, goal: isthmus.ConditionPeerConfig, report: o.Report, quiet: true}
		if err := w.wait(ctx, o.Timeout); err != nil {
			return s.peering, interrupted(ctx, err)
		}
	}
	s.show(o.Report)
	return s.peering, s.consentError(ctx)
}

// peeringNamed returns the Peering with this name, or the Peering for the cluster with this
// name or ID.
func peeringNamed(ctx context.Context, c *cluster.Cluster, name string) (found *isthmus.Peering, err error) {
	var list isthmus.PeeringList
	if err := c.Client.List(ctx, &list); err != nil {
		return nil, c.Explain("Peerings", err)
	}
	for i := range list.Items {
		p := &list.Items[i]
		if p.Name != name && p.Spec.Cluster.ClusterName != name && p.Spec.Cluster.ClusterID != name {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%s: the name matches the Peerings %s and %s; use the name of one Peering", c, found.Name, p.Name)
		}
		found = p
	}
	if found == nil {
		return nil, fmt.Errorf("%s: %w: no Peering and no peer is called %s; `isthmus status` shows the names", c, cluster.ErrNoPeering, safetext.Of(name))
	}
	return found, nil
}

// claimed returns the networks in the peer's current NetworkConfig, or nil if there is none.
func (s *side) claimed(ctx context.Context) (*Claim, error) {
	var list v1alpha1.NetworkConfigList
	if err := s.Client.List(ctx, &list, client.InNamespace(s.namespace), client.MatchingLabels{v1alpha1.LabelOriginID: s.peer.Identity.ClusterID}); err != nil {
		return nil, s.Explain("NetworkConfigs in "+s.namespace, err)
	}
	list.Items = slices.DeleteFunc(list.Items, func(nc v1alpha1.NetworkConfig) bool { return !nc.DeletionTimestamp.IsZero() })
	switch len(list.Items) {
	case 0:
		return nil, nil
	case 1:
	default:
		return nil, fmt.Errorf("%s: %s has more than one NetworkConfig in namespace %s: delete all but one", s.Cluster, s.peer.Cluster, s.namespace)
	}
	nc := &list.Items[0]
	claim, err := ParseClaim(nc.Spec.PodCIDR + "," + nc.Spec.ExternalCIDR)
	if err != nil {
		return nil, fmt.Errorf("%s: NetworkConfig %s/%s: %w", s.Cluster, nc.Namespace, nc.Name, err)
	}
	return &claim, nil
}

// checkConsent returns an error if the person agreed to a claim that is not the peer's current one,
// because then the person has not seen the current claim.
func (s *side) checkConsent(ctx context.Context) error {
	want := s.claims.Consent
	if want == nil {
		return nil
	}
	if !s.exists {
		return fmt.Errorf("%s: there is no Peering with %s yet, so there are no networks to agree to", s.Cluster, s.peer.Cluster)
	}
	have, err := s.claimed(ctx)
	switch {
	case err != nil:
		return err
	case have == nil:
		return fmt.Errorf("%s: %s has no NetworkConfig in namespace %s, so there are no networks to agree to", s.Cluster, s.peer.Cluster, s.namespace)
	case *have != *want:
		return fmt.Errorf("%s: --consent names %v, but %s now advertises %v; nothing was agreed to; `isthmus peer %s` shows the new networks and their effect",
			s.Cluster, *want, s.peer.Cluster, *have, s.peering.Name)
	}
	return nil
}

// applyTo returns have with the changes that c, a person's choices, requires. It also returns the
// changed fields, with their new values.
func (c Claims) applyTo(have isthmus.Claims) (isthmus.Claims, map[string]any) {
	changed := map[string]any{}
	for _, p := range c.Allowed {
		if !slices.Contains(have.Allowed, p.String()) {
			have.Allowed = append(slices.Clone(have.Allowed), p.String())
			changed["allowed"] = have.Allowed
		}
	}
	if c.AlwaysRemap != nil && *c.AlwaysRemap != have.AlwaysRemap {
		have.AlwaysRemap = *c.AlwaysRemap
		changed["alwaysRemap"] = have.AlwaysRemap
	}
	if c.Consent != nil {
		want := isthmus.Consent{PodCIDR: c.Consent.Pod.String(), ExternalCIDR: c.Consent.External.String()}
		if have.Consent == nil || *have.Consent != want {
			have.Consent = &want
			changed["consent"] = want
		}
	}
	return have, changed
}

// setClaims writes the person's choices into an existing Peering, unless the Peering already has
// them.
func (s *side) setClaims(ctx context.Context) (string, error) {
	if !s.exists || s.claims.none() {
		return "", nil
	}
	var changed map[string]any
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := s.Client.Get(ctx, client.ObjectKeyFromObject(s.peering), s.peering); err != nil {
			return err
		}
		if _, changed = s.claims.applyTo(s.peering.Spec.Claims); len(changed) == 0 {
			return nil
		}
		patch, err := json.Marshal(map[string]any{
			// The patch replaces the whole list, so it must fail if the Peering has changed
			// since it was read.
			"metadata": map[string]any{"resourceVersion": s.peering.ResourceVersion},
			"spec":     map[string]any{"claims": changed},
		})
		if err != nil {
			return err
		}
		return s.Client.Patch(ctx, s.peering, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(cluster.FieldManager))
	})
	if err != nil {
		return "", s.Explain("spec.claims of Peering "+s.peering.Name, err)
	}
	var changes []string
	for _, field := range []string{"allowed", "alwaysRemap", "consent"} {
		if value, ok := changed[field]; ok {
			text, err := json.Marshal(value)
			if err != nil {
				return "", err
			}
			changes = append(changes, fmt.Sprintf("spec.claims.%s is %s", field, text))
		}
	}
	if len(changes) == 0 {
		return "", nil
	}
	return fmt.Sprintf("%s: Peering %s: %s", s.Cluster, s.peering.Name, strings.Join(changes, ", ")), nil
}

// show reports which networks s uses in place of its peer's advertised networks, and the reason.
func (s *side) show(report func(string)) {
	n := s.peering.Status.Remote
	for _, network := range []struct{ what, own, here, why string }{
		{"podCIDR", n.PodCIDR, n.PodCIDRSeen, n.PodCIDRWhy}, {"externalCIDR", n.ExternalCIDR, n.ExternalCIDRSeen, n.ExternalCIDRWhy},
	} {
		if network.own == "" || network.here == "" {
			continue
		}
		as := "as " + safetext.Of(network.here)
		if network.here == network.own {
			as = "unchanged"
		}
		line := fmt.Sprintf("%s: uses the %s of %s, %s, %s", s.Cluster, network.what, s.peer.Cluster, safetext.Of(network.own), as)
		if network.why != "" {
			line += ": " + safetext.Of(network.why)
		}
		report(line)
	}
}

// errConsent is returned when the peer's claim needs a person's consent.
var errConsent = errors.New("consent is needed")

// consentError returns errConsent with the manager's message if the Peering of s waits for a person
// to agree to the current claim.
func (s *side) consentError(ctx context.Context) error {
	c := meta.FindStatusCondition(s.peering.Status.Conditions, isthmus.ConditionPeerConfig)
	if c == nil || c.Reason != v1alpha1.ReasonConsent {
		return nil
	}
	if given := s.peering.Spec.Claims.Consent; given != nil {
		have, err := s.claimed(ctx)
		if err != nil {
			return err
		}
		if have != nil && given.PodCIDR == have.Pod.String() && given.ExternalCIDR == have.External.String() {
			return nil // the person agreed to this claim, but the manager has not processed that yet
		}
	}
	return fmt.Errorf("%s: %w (add --context %s to the command): %s", s.Cluster, errConsent, s.Context, safetext.Cut(c.Message, safetext.Message))
}

// remapped reports whether the networks in the status of a Peering comply with
// spec.claims.alwaysRemap. An override takes precedence over alwaysRemap.
func remapped(p *isthmus.Peering) bool {
	n, o := p.Status.Remote, p.Spec.Overrides
	return !p.Spec.Claims.AlwaysRemap || (o.PodCIDR != nil || n.PodCIDR != n.PodCIDRSeen) && (o.ExternalCIDR != nil || n.ExternalCIDR != n.ExternalCIDRSeen)
}
