package manager

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ipamCheckInterval is the interval at which the leading manager checks that the IPAM's Service
// points to that manager. A check is one small request.
const ipamCheckInterval = 3 * time.Second

// ipamLogInterval is the time after which the same error is logged again.
const ipamLogInterval = time.Minute

// An ipamService points the IPAM's Service at the leading manager. The Service has no selector, but
// an EndpointSlice with the same name. A selector would also select standby managers, which do not
// serve the IPAM.
type ipamService struct {
	client    client.Client
	reader    client.Reader // reads from the API server itself, because a cache would need permission to list
	namespace string
	name      string     // name of the Service and the EndpointSlice
	addr      netip.Addr // address of this manager
	log       *slog.Logger
}

// run keeps the Service pointed at this manager until ctx ends. Then run marks the endpoint as not
// ready, because another Pod may soon have this manager's address.
func (s *ipamService) run(ctx context.Context) error {
	logged, loggedAt := "", time.Time{}
	tick := time.NewTicker(ipamCheckInterval)
	defer tick.Stop()
	for {
		text := ""
		if err := s.writeEndpoint(ctx); err != nil && ctx.Err() == nil {
			text = err.Error()
		}
		if text != "" && (text != logged || time.Since(loggedAt) > ipamLogInterval) {
			s.log.Error("cannot update the IPAM's Service; virtual kubelets may not reach it; retrying", "error", text)
			loggedAt = time.Now()
		}
		logged = text
		select {
		case <-ctx.Done():
			if err := s.leave(); err != nil {
				s.log.Warn("cannot clear the IPAM's Service; it may still point to this manager", "error", err)
			}
			return nil
		case <-tick.C:
		}
	}
}

// writeEndpoint writes the EndpointSlice, unless it is already correct or another writer changes it
// at the same time.
func (s *ipamService) writeEndpoint(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ipamCheckInterval)
	defer cancel()
	have := &discoveryv1.EndpointSlice{}
	if err := s.reader.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: s.name}, have); err != nil {
		if apierrors.IsNotFound(err) { // we have no permission to create an EndpointSlice
			return fmt.Errorf("EndpointSlice %s of the IPAM's Service is missing; apply the chart again", s.name)
		}
		return fmt.Errorf("EndpointSlice of the IPAM's Service: %w", err)
	}
	if have.Labels[discoveryv1.LabelServiceName] != s.name || len(have.Ports) == 0 {
		return fmt.Errorf("EndpointSlice %s of the IPAM's Service: want the label %s=%s and a port; apply the chart again", s.name, discoveryv1.LabelServiceName, s.name)
	}
	ready := func(e discoveryv1.Endpoint) bool { return ptr.Deref(e.Conditions.Ready, true) }
	if e := have.Endpoints; len(e) == 1 && len(e[0].Addresses) == 1 && e[0].Addresses[0] == s.addr.String() && ready(e[0]) {
		return nil
	}
	want := have.DeepCopy()
	want.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{s.addr.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}}}
	if err := s.client.Patch(ctx, want, client.MergeFromWithOptions(have, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("EndpointSlice of the IPAM's Service: %w", err)
	}
	s.log.Info("the IPAM's Service points to this manager", "service", s.name, "address", s.addr)
	return nil
}

// leave marks this manager as not ready if the EndpointSlice still names it.
func (s *ipamService) leave() error {
	ctx, cancel := context.WithTimeout(context.Background(), ipamCheckInterval)
	defer cancel()
	have := &discoveryv1.EndpointSlice{}
	if err := s.reader.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: s.name}, have); err != nil {
		return client.IgnoreNotFound(err)
	}
	if e := have.Endpoints; len(e) != 1 || len(e[0].Addresses) != 1 || e[0].Addresses[0] != s.addr.String() {
		return nil // another manager leads
	}
	want := have.DeepCopy()
	want.Endpoints[0].Conditions.Ready = ptr.To(false)
	return s.client.Patch(ctx, want, client.MergeFromWithOptions(have, client.MergeFromWithOptimisticLock{}))
}
