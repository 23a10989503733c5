package manager

import (
	"context"
	"net/netip"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// Facts are what this cluster knows about itself. A zero field is not known yet; Missing and
// NoEndpoint say why.
type Facts struct {
	Cluster      v1alpha1.ClusterIdentity
	PodCIDR      netip.Prefix
	ServiceCIDR  netip.Prefix
	MoreServices []netip.Prefix // addresses of Services outside of ServiceCIDR, sorted
	ExternalCIDR netip.Prefix
	Nodes        []netip.Addr   // addresses of the nodes, sorted
	APIServers   []netip.Addr   // addresses behind the Service of the API server, sorted
	Reached      []ipam.Reached // what nodes reach without us, as they report it
	Endpoint     string         // where peers reach our gateway: IP address or DNS name
	Port         uint16         // UDP
	PublicKey    [32]byte       // WireGuard
	Keys         keyring.Ring   // the private ones, the current and the next; nothing else of the ring
	// Tunnels are those of the gateway besides the first, which Port and PublicKey are: as many as
	// it has keys for and its Service has ports for.
	Tunnels []fabric.TunnelEnd

	// Awaiting is true while nodes have not reported what they reach, for the first seconds of a
	// manager: nobody who has no networks here yet gets any.
	Awaiting bool
	// Ignored are reports that are not believed, or not all of them.
	Ignored []fabric.Problem

	// Missing has a sentence for each thing without which no NetworkConfig can be published, such
	// as `Secret isthmus-system/wireguard-pubkey: not there yet; the gateway makes it`.
	Missing []string
	// NoEndpoint is such a sentence about Endpoint or Port, which a Peering may override; empty
	// when both are known.
	NoEndpoint string
	// FewerTunnels is such a sentence about the first key without a port, or the first key that is
	// none; empty when all that the gateway has are in Tunnels.
	FewerTunnels string
}

// A FactsReader knows the Facts.
type FactsReader interface {
	Facts(ctx context.Context) (Facts, error)
}
