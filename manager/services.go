package manager

import (
	"context"
	"net/netip"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	runtimemanager "sigs.k8s.io/controller-runtime/pkg/manager"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/peerings"
	"github.com/isthmus-net/isthmus/manager/replication"
	"github.com/isthmus-net/isthmus/manager/services"
)

// servicesLacking is the message if a precondition of --services is missing.
const servicesLacking = "the API server does not serve ServiceExports, ServiceImports (multicluster.x-k8s.io/v1beta1) and PeerServices, or this manager may not read them; want `isthmus install --services`"

// canShare reports whether the kinds for shared services are served and this manager may list them.
func canShare(ctx context.Context, direct client.Reader) (bool, error) {
	for _, list := range []client.ObjectList{&mcs.ServiceExportList{}, &mcs.ServiceImportList{}, &isthmus.PeerServicesList{}} {
		if can, err := canList(ctx, direct, list); !can || err != nil {
			return false, err
		}
	}
	return true, nil
}

// shareServices sets up the sharing of Services, if it is enabled and possible.
func (l *leader) shareServices(own facts.Reader, replicator *replication.Replicator, peering *peerings.Reconciler) (*services.Controller, error) {
	if !l.Options.Services {
		return nil, nil //nolint:nilnil // sharing is off
	}
	if !l.shared {
		peering.ServicesLacking = servicesLacking
		return nil, nil //nolint:nilnil // the statuses of Peerings have the reason
	}
	forPeerings, forServices := make(chan event.GenericEvent), make(chan event.GenericEvent)
	changed := peering.PeerChanged
	peering.PeerChanged = forPeerings
	c, err := services.New(services.Options{
		Config: l.config, Client: l.client, Cache: l.mgr.GetCache(), Self: l.Cluster, Namespace: l.Namespace,
		Peerings: l.peers.Peerings,
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

// forward sends each event to all receivers, until ctx is done.
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
