package manager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/inband"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

// dialInBand connects to the API server of a peer through the active gateway. The gateway's Service
// names the active gateway.
func (l *leader) dialInBand(ctx context.Context, peer string) (net.Conn, error) {
	refuse := func(format string, args ...any) error {
		return &inband.RefusedError{Reason: fmt.Sprintf(format, args...)}
	}
	cache := l.mgr.GetCache()
	var secret corev1.Secret
	name := types.NamespacedName{Namespace: l.Namespace, Name: keyring.SecretName}
	if err := cache.Get(ctx, name, &secret); err != nil {
		return nil, refuse("cannot read the key of our gateway: %v", err)
	}
	ring, _, err := keyring.Read(secret.Data)
	if err != nil {
		return nil, refuse("cannot read the key of our gateway in Secret %s", name)
	}
	var services corev1.ServiceList
	if err := cache.List(ctx, &services, client.InNamespace(l.Namespace)); err != nil {
		return nil, refuse("cannot read the Service of our gateway: %v", err)
	}
	var failed []error
	for _, addr := range gatewayAddrs(services.Items) {
		c, err := inband.Dial(ctx, addr, ring.Gateways, peer)
		if refused := (*inband.RefusedError)(nil); err == nil || errors.As(err, &refused) {
			return c, err
		}
		failed = append(failed, err)
	}
	if failed == nil {
		return nil, refuse("the Service of our gateway does not name the active gateway")
	}
	return nil, refuse("our gateway does not answer: %v", failed[0])
}

// gatewayAddrs returns the addresses of the active gateway: the address of its Pod, or the address
// of its node if it uses the host network.
func gatewayAddrs(services []corev1.Service) (addrs []netip.Addr) {
	for i := range services {
		for _, name := range []string{isthmus.AnnotationGateways, v1alpha1.AnnotationGatewayNodeIP} {
			for text := range strings.SplitSeq(services[i].Annotations[name], ",") {
				if addr, err := netip.ParseAddr(text); err == nil {
					addrs = append(addrs, addr)
				}
			}
		}
	}
	return addrs
}
