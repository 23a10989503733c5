package manager

import (
	"context"
	"fmt"
	"slices"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/manager/peers"
)

func hasForeignClusters(kinds *discovery.DiscoveryClient) (bool, error) {
	list, err := kinds.ServerResourcesForGroupVersion(peers.ForeignClusterVersion.String())
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("kinds of %s: %w", peers.ForeignClusterVersion, err)
	}
	for _, r := range list.APIResources {
		if r.Kind == "ForeignCluster" {
			return true, nil
		}
	}
	return false, nil
}

// optionalKinds are the optional kinds that a cluster serves.
type optionalKinds struct {
	foreignClusters bool // the kind of Liqo's control plane
	serviceCIDRs    bool // served since Kubernetes 1.33, and this manager may list them
	sharedServices  bool // the kinds for Options.Services are served and may be listed; false if the option is off
}

func servedKinds(ctx context.Context, kinds *discovery.DiscoveryClient, direct client.Reader, services bool) (p optionalKinds, err error) {
	if p.foreignClusters, err = hasForeignClusters(kinds); err != nil {
		return p, err
	}
	if p.serviceCIDRs, err = canList(ctx, direct, &networkingv1.ServiceCIDRList{}); err != nil || !services {
		return p, err
	}
	p.sharedServices, err = canShare(ctx, direct)
	return p, err
}

// canList reports whether a kind is served and this manager may list its objects.
func canList(ctx context.Context, direct client.Reader, list client.ObjectList) (bool, error) {
	err := direct.List(ctx, list, client.Limit(1))
	return err == nil, kubeerr.IgnoreUnknown(err)
}

// absenceChecks is the number of consecutive checks in which a kind must be missing before it
// counts as removed. An API server that starts or lags behind does not serve custom resources for a
// moment. If ForeignClusters counted as removed during that moment, the manager would take down the
// tunnels of all their peers.
const absenceChecks = 4

// checkAbsence is called when the API server does not serve ForeignClusters. It returns an error if
// a TunnelEndpoint belongs to a ForeignCluster, and the caller checks again. n is the number of the
// check; from absenceChecks on, checkAbsence returns nil.
func checkAbsence(ctx context.Context, direct client.Reader, n int) error {
	if n >= absenceChecks {
		return nil
	}
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("TunnelEndpointList"))
	if err := direct.List(ctx, &list); err != nil {
		return fmt.Errorf("TunnelEndpoints: %w", installFirst(err))
	}
	for i := range list.Items {
		if slices.ContainsFunc(list.Items[i].OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "ForeignCluster" }) {
			return fmt.Errorf("the API server does not serve ForeignClusters, though TunnelEndpoint %s/%s belongs to one; check %d of %d",
				list.Items[i].Namespace, list.Items[i].Name, n, absenceChecks)
		}
	}
	return nil
}

// watchKinds calls the function changed when kinds appear or disappear: Liqo may be installed,
// removed or upgraded later.
func watchKinds(ctx context.Context, detect func(context.Context) (optionalKinds, error), had optionalKinds, interval time.Duration, changed func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	missing := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		has, err := detect(ctx)
		switch {
		case err != nil:
		case has == had:
			missing = 0
		default:
			if missing++; had.lost(has) && missing < absenceChecks {
				continue
			}
			changed()
			return
		}
	}
}

// lost reports whether current lacks a kind that p has.
func (p optionalKinds) lost(current optionalKinds) bool {
	return p.foreignClusters && !current.foreignClusters || p.serviceCIDRs && !current.serviceCIDRs || p.sharedServices && !current.sharedServices
}
