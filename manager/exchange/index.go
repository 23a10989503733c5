package exchange

import (
	"context"
	"encoding/base64"
	"errors"
	"net/netip"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// Names of the cache indexes for the exchange of NetworkConfigs.
const (
	indexOrigin    = "originID"  // NetworkConfigs of peers, by cluster ID of the sender
	indexReceiver  = "remoteID"  // NetworkConfigs of ours, by cluster ID of the receiver
	indexPublicKey = "publicKey" // TunnelEndpoints and NetworkConfigs of peers, by each public key of the peer's gateway
	// indexGatewayIn has TunnelEndpoints by every network that contains their gateway's address, so
	// that one look-up finds all gateways in a network.
	indexGatewayIn = "gatewayIn"
	indexMappedFor = "mappedFor" // NatMappings, by cluster ID of the peer
)

// AddIndexes adds the indexes of this package to the cache.
func AddIndexes(indexer client.FieldIndexer) error {
	ctx := context.Background() // IndexField does not block
	return errors.Join(
		indexer.IndexField(ctx, &v1alpha1.NetworkConfig{}, indexOrigin, func(o client.Object) []string {
			return valueOf(o, v1alpha1.LabelOriginID)
		}),
		indexer.IndexField(ctx, &v1alpha1.NetworkConfig{}, indexReceiver, func(o client.Object) []string {
			if o.GetLabels()[v1alpha1.LabelReplication] != "true" {
				return nil
			}
			return valueOf(o, v1alpha1.LabelRemoteID)
		}),
		indexer.IndexField(ctx, &v1alpha1.TunnelEndpoint{}, indexPublicKey, func(o client.Object) []string {
			return publicKeysOf(o.(*v1alpha1.TunnelEndpoint).Spec.BackendConfig)
		}),
		indexer.IndexField(ctx, &v1alpha1.NetworkConfig{}, indexPublicKey, func(o client.Object) []string {
			if valueOf(o, v1alpha1.LabelOriginID) == nil {
				return nil
			}
			return publicKeysOf(o.(*v1alpha1.NetworkConfig).Spec.BackendConfig)
		}),
		indexer.IndexField(ctx, &v1alpha1.TunnelEndpoint{}, indexGatewayIn, func(o client.Object) []string {
			return networksAround(o.(*v1alpha1.TunnelEndpoint).Spec.EndpointIP)
		}),
		indexer.IndexField(ctx, &v1alpha1.NatMapping{}, indexMappedFor, func(o client.Object) []string {
			return slices.Compact(append(valueOf(o, v1alpha1.LabelClusterID), o.(*v1alpha1.NatMapping).Spec.ClusterID))
		}),
	)
}

// publicKeysOf returns the public keys of all tunnels in config, as text.
func publicKeysOf(config v1alpha1.BackendConfig) []string {
	keys := []string{config[v1alpha1.ConfigPublicKey]}
	further, _ := fabric.ParseTunnels(config[v1alpha1.ConfigTunnels]) // an invalid list has no keys, because no gateway accepts it
	for _, t := range further {
		keys = append(keys, keyText(t.PublicKey))
	}
	return keys
}

func keyText(key [32]byte) string { return base64.StdEncoding.EncodeToString(key[:]) }

func valueOf(o client.Object, label string) []string {
	if value, ok := o.GetLabels()[label]; ok {
		return []string{value}
	}
	return nil
}

// networksAround returns each prefix that contains the address and could be an allocated network.
// It returns none for a DNS name.
func networksAround(endpoint string) (all []string) {
	addr, err := netip.ParseAddr(endpoint)
	if err != nil {
		return nil
	}
	for bits := 8; bits <= addr.BitLen()-2; bits++ {
		all = append(all, netip.PrefixFrom(addr, bits).Masked().String())
	}
	return all
}
