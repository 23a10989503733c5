package kube

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// GatewayOf computes the configuration of a cluster's gateway from the current API objects, without
// access to the gateway. leftOut has the problems of invalid objects. It reads TunnelEndpoints,
// NatMappings, Nodes, NetworkAllocations and the addresses of the API servers. host is the URL of
// one API server.
func GatewayOf(ctx context.Context, reader client.Reader, host string, cluster v1alpha1.ClusterIdentity) (gw fabric.Gateway, leftOut []fabric.Problem, err error) {
	var nodes corev1.NodeList
	if err := reader.List(ctx, &nodes); err != nil {
		return gw, nil, fmt.Errorf("list %T: %w", &nodes, err)
	}
	var addrs []netip.Addr
	for i := range nodes.Items {
		addrs = append(addrs, nodeAddrs(&nodes.Items[i])...)
	}
	site, err := siteOf(ctx, reader, host, nodesSite(addrs))
	if err != nil {
		return gw, nil, err
	}
	var endpoints v1alpha1.TunnelEndpointList
	var mappings v1alpha1.NatMappingList
	for _, list := range []client.ObjectList{&endpoints, &mappings} {
		if err := reader.List(ctx, list); err != nil {
			return gw, nil, fmt.Errorf("list %T: %w", list, err)
		}
	}
	gw, leftOut = gatewayFor(cluster, [32]byte{}, site, endpoints.Items, mappings.Items) // the rules do not depend on the key
	return gw, leftOut, nil
}
