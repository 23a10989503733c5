package manager

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	runtimemanager "sigs.k8s.io/controller-runtime/pkg/manager"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/replication"
	"github.com/isthmus-net/isthmus/manager/services"
)

// servicesLacking says what a manager with --services needs.
const servicesLacking = "the API server does not serve ServiceExports, ServiceImports (multicluster.x-k8s.io/v1beta1) and PeerServices, or this manager may not read them; want `isthmus install --services`"

// canShare reports whether the kinds of shared services are there, and we may list them.
func canShare(ctx context.Context, direct client.Reader) (bool, error) {
	for _, list := range []client.ObjectList{&mcs.ServiceExportList{}, &mcs.ServiceImportList{}, &isthmus.PeerServicesList{}} {
		if can, err := canList(ctx, direct, list); !can || err != nil {
			return false, err
		}
	}
	return true, nil
}

// shareServices makes what shares Services, if that is wanted and possible.
func (l *leader) shareServices(own FactsReader, replicator *replication.Replicator, peering *PeeringReconciler) (*services.Controller, error) {
	if !l.Options.Services {
		return nil, nil //nolint:nilnil // it is off
	}
	if !l.shared {
		peering.ServicesLacking = servicesLacking
		return nil, nil //nolint:nilnil // the statuses of Peerings say why
	}
	forPeerings, forServices := make(chan event.GenericEvent), make(chan event.GenericEvent)
	changed := peering.PeerChanged
	peering.PeerChanged = forPeerings
	c, err := services.New(services.Options{
		Config: l.config, Client: l.client, Cache: l.mgr.GetCache(), Self: l.Cluster, Namespace: l.Namespace,
		Peerings: l.peers.peerings,
		Pods: func(ctx context.Context) (netip.Prefix, error) {
			facts, err := own.Facts(ctx)
			return facts.PodCIDR, err
		},
		Replicator: replicator, PeerChanged: forServices, Log: l.Log,
	})
	if err != nil {
		return nil, err
	}
	peering.Services = c
	if err := l.mgr.Add(runtimemanager.RunnableFunc(func(ctx context.Context) error {
		forward(ctx, changed, forPeerings, forServices)
		return nil
	})); err != nil {
		return nil, err
	}
	return c, c.SetupWithManager(l.mgr)
}

// forward hands each event to all receivers, until ctx is done.
func forward(ctx context.Context, from <-chan event.GenericEvent, to ...chan<- event.GenericEvent) {
	for {
		select {
		case e := <-from:
			for _, receiver := range to {
				select {
				case receiver <- e:
				case <-ctx.Done():
					return
				}
			}
		case <-ctx.Done():
			return
		}
	}
}

// peerings returns the Peerings that count. They are not to be changed.
func (p Peers) peerings(ctx context.Context) (all []*isthmus.Peering, err error) {
	peers, err := p.List(ctx)
	for _, peer := range peers {
		if peering, ok := peer.Owner.(*isthmus.Peering); ok {
			all = append(all, peering)
		}
	}
	return all, err
}

// servicesState is what the condition ServicesShared is made from.
type servicesState struct {
	on      bool
	lacking string // why no services are shared
	looked  bool   // at the peer's API server
	counted bool   // each of the peer's services was looked at
	sharing replication.Sharing
	imports services.Imports
	left    bool // of a Peering that is deleted: PeerServices of ours are at the peer
}

func (r *PeeringReconciler) gatherServices(ctx context.Context, s *peeringState) {
	s.services = servicesState{on: r.Services != nil || r.ServicesLacking != "", lacking: r.ServicesLacking}
	if r.Services == nil {
		return
	}
	id := s.peering.Spec.Cluster.ClusterID
	s.services.sharing, s.services.looked = r.Services.Sharing(id)
	s.services.imports, s.services.counted = r.Services.Imports(id), r.Services.Looked(ctx, id, s.peering.Spec.TenantNamespace.Local)
	// A peer that does not answer is waited for only where something of ours was seen; the NetworkConfig is
	// waited for anyway.
	s.services.left = s.services.looked && !s.services.sharing.Withdrawn
}

// servicesVerdict decides the condition ServicesShared; nil: there is none.
func servicesVerdict(s peeringState) *verdict {
	spec, is := s.peering.Spec.Services, s.services
	if !is.on || len(spec.Export)+len(spec.Import) == 0 || s.conflict != "" || !s.peering.DeletionTimestamp.IsZero() {
		return nil
	}
	v := func(v verdict) *verdict { return &v }
	c := is.sharing.Condition
	switch {
	case is.lacking != "":
		return v(no(isthmus.ReasonLocalSetup, "%s", is.lacking))
	case len(spec.Export) > 0 && !is.looked, !is.counted:
		if before := told(s.peering, isthmus.ConditionServicesShared); before != unknown {
			return &before
		}
		return v(no(isthmus.ReasonSharing, "the peer and its services were not looked at yet"))
	case len(spec.Export) > 0 && c.Status == metav1.ConditionFalse:
		return v(no(c.Reason, "%s", c.Message))
	}
	text := fmt.Sprintf("%d services of the peer are served here", is.imports.Served)
	if c.Status == metav1.ConditionTrue {
		text += "; " + c.Message
	}
	var refused []string
	if n := is.imports.Refused; n > 0 {
		refused = append(refused, fmt.Sprintf("%d services of the peer are not served here as it exports them: see the status of PeerServices in namespace %s", n, s.peering.Spec.TenantNamespace.Local))
	}
	if n := len(is.sharing.Refused); n > 0 {
		refused = append(refused, fmt.Sprintf("the peer does not serve %d of our services as we export them: see the conditions of their ServiceExports", n))
	}
	if foreign := is.imports.Foreign; len(foreign) > 0 {
		refused = append(refused, "another implementation has "+strings.Join(foreign, ", "))
	}
	if len(refused) > 0 {
		return v(yes(isthmus.ReasonPartlyRefused, text+"; "+strings.Join(refused, "; ")))
	}
	return v(yes(isthmus.ReasonShared, text))
}
