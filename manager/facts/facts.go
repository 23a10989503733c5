// Package facts determines a cluster's own networks, its gateway's endpoint and keys, and the
// networks that its nodes reach without the gateway. It writes these networks into the IPAM state.
// The manager runs its Keeper. All other packages only read the Facts.
package facts

import (
	"context"
	"net/netip"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// Facts describe this cluster. A zero field is not known yet; Missing and NoEndpoint have the
// reasons.
type Facts struct {
	Cluster      v1alpha1.ClusterIdentity
	PodCIDR      netip.Prefix
	ServiceCIDR  netip.Prefix
	MoreServices []netip.Prefix // networks of ServiceCIDR objects, without addresses in ServiceCIDR; sorted
	ExternalCIDR netip.Prefix
	Nodes        []netip.Addr   // addresses of the nodes, sorted
	APIServers   []netip.Addr   // addresses behind the Service of the API server, sorted
	Reached      []ipam.Reached // networks that nodes reach without us, as their agents report
	Endpoint     string         // IP address or DNS name at which peers reach our gateway
	Port         uint16         // UDP
	PublicKey    [32]byte       // WireGuard
	Keys         keyring.Ring   // only the current and the next private key of the ring
	// Tunnels are the gateway's tunnels after the first one, which Port and PublicKey describe.
	// Only tunnels with both a key and a Service port are listed.
	Tunnels []fabric.TunnelEnd

	// Awaiting is true during the first seconds of a manager, while some nodes have not reported the
	// networks that they reach. Meanwhile new peers get no networks.
	Awaiting bool
	// Ignored lists nodes' reports that are ignored in whole or in part.
	Ignored []fabric.Problem

	// Missing has a sentence for each fact that is missing before a NetworkConfig can be published,
	// such as `Secret isthmus-system/wireguard-pubkey: not found; the gateway creates it`.
	Missing []string
	// NoEndpoint is a sentence about a missing Endpoint or Port. It is empty if both are known. It
	// is not in Missing, because a Peering may override Endpoint and Port.
	NoEndpoint string
	// FewerTunnels is a sentence about the first further tunnel that lacks a valid key or a port.
	// It is empty if Tunnels has all of the gateway's further tunnels.
	FewerTunnels string
}

// A Reader returns the Facts.
type Reader interface {
	Facts(ctx context.Context) (Facts, error)
}
