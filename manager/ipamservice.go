package manager

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ipamLook is how often the manager that leads looks whether the IPAM's Service leads to it: one small
// request.
const ipamLook = 3 * time.Second

// An ipamService leads the IPAM's Service to us. The Service has no selector, and an EndpointSlice of
// its own name: a Service with one would name managers that do not lead, at which nobody answers.
type ipamService struct {
	client    client.Client
	reader    client.Reader // of the API server, no cache: there is no right to list
	namespace string
	name      string     // of Service and EndpointSlice
	addr      netip.Addr // ours
	log       *slog.Logger
}

// run keeps the Service ours until ctx ends. Then it leads to us until another manager writes itself: who
// calls meanwhile is told at once that nobody listens.
func (s *ipamService) run(ctx context.Context) error {
	said := ""
	tick := time.NewTicker(ipamLook)
	defer tick.Stop()
	for {
		text := ""
		if err := s.lead(ctx); err != nil && ctx.Err() == nil {
			text = err.Error()
		}
		if text != said && text != "" {
			s.log.Error("virtual kubelets may not reach the IPAM; trying again", "error", text)
		}
		said = text
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// lead writes the EndpointSlice, unless it is as it should be, or somebody else writes it meanwhile.
func (s *ipamService) lead(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ipamLook)
	defer cancel()
	have := &discoveryv1.EndpointSlice{}
	if err := s.reader.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: s.name}, have); err != nil {
		return fmt.Errorf("EndpointSlice of the IPAM's Service: %w", err)
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
	s.log.Info("the IPAM's Service leads here", "service", s.name, "address", s.addr)
	return nil
}
