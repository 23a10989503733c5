package inspect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

// Diagnose checks, hop by hop, the path from a cluster to a peer. name is the name of the peer or
// its Peering; if it is empty, Diagnose checks the paths to all peers. remote is the peer's
// cluster, or nil if it cannot be queried. The error is ErrOtherPeer if name and remote are two
// different clusters. If querying remote fails, Diagnose returns the diagnosis of this side and an
// error.
func Diagnose(ctx context.Context, local, remote *cluster.Cluster, name string) (*health.Diagnosis, error) {
	if err := local.Identify(ctx); err != nil {
		return nil, err
	}
	meant := func(p *isthmus.Peering) bool { return name == "" || hasName(p, name) }
	var queryErr error // error from a query of the other side
	if remote != nil {
		if queryErr = remote.Identify(ctx); queryErr != nil {
			remote = nil
		}
	}
	if remote != nil {
		if err := cluster.Distinct(local, remote); err != nil {
			return nil, err
		}
		meant = func(p *isthmus.Peering) bool { return p.Spec.Cluster.ClusterID == remote.Identity.ClusterID }
	}
	here, err := examine(ctx, local, meant)
	if err != nil {
		return nil, err
	}
	d := &health.Diagnosis{At: time.Now()}
	if remote == nil {
		if len(here.Peerings) == 0 && name != "" && queryErr != nil { // only the other cluster may have the name, and it could not be queried
			return nil, queryErr
		}
		if len(here.Peerings) == 0 && name != "" {
			return nil, fmt.Errorf("%s: %w: no Peering and no peer is called %s; `isthmus status` shows the names", local, cluster.ErrNoPeering, safetext.Of(name))
		}
		d.Hops, d.NotAsked = here.AllHops(), here.NotAsked
		if queryErr == nil {
			d.NotAsked = append(slices.Clone(d.NotAsked), "the other side; --remote-context checks it too")
		}
	} else {
		if err := sameAs(here, name, remote); err != nil {
			return nil, err
		}
		var peer *health.Side
		peer, queryErr = examine(ctx, remote, func(p *isthmus.Peering) bool { return p.Spec.Cluster.ClusterID == local.Identity.ClusterID })
		if queryErr == nil {
			d.Hops, d.NotAsked = health.Between(here, peer), slices.Concat(here.NotAsked, peer.NotAsked)
		} else {
			d.Hops, d.NotAsked = here.AllHops(), here.NotAsked
		}
	}
	d.Broken = health.FirstBroken(d.Hops)
	return d, queryErr
}

// ErrOtherPeer is returned when the given name and the given other cluster are two different peers.
var ErrOtherPeer = errors.New("another peer")

// hasName reports whether a Peering, or its peer, has this name.
func hasName(p *isthmus.Peering, name string) bool {
	return p.Name == name || p.Spec.Cluster.ClusterName == name
}

// sameAs returns an error if name is not a name of the remote cluster.
func sameAs(e *health.Side, name string, remote *cluster.Cluster) error {
	if name == "" || name == remote.Identity.ClusterName || slices.ContainsFunc(e.Found, func(p *isthmus.Peering) bool { return hasName(p, name) }) {
		return nil
	}
	with := "there is no Peering with it here"
	if len(e.Found) > 0 {
		with = "its Peering here is " + safetext.Of(e.Found[0].Name)
	}
	return fmt.Errorf("%s: %s is %w than %s, which is cluster %s (%s): %s", e.Cluster, safetext.Of(name), ErrOtherPeer, remote,
		safetext.Of(remote.Identity.ClusterName), safetext.Of(remote.Identity.ClusterID), with)
}

func examine(ctx context.Context, c *cluster.Cluster, meant func(*isthmus.Peering) bool) (*health.Side, error) {
	e := &health.Side{Cluster: c.String()}
	var list isthmus.PeeringList
	if err := c.Client.List(ctx, &list); err != nil {
		return nil, c.Explain("Peerings", err)
	}
	var manager health.Holder
	var err error
	if e.Own, manager, _, err = clusterHops(ctx, c); err != nil {
		return nil, err
	}
	now, _ := c.Now()
	health.DateByServer(list.Items, manager, now)
	for i := range list.Items {
		health.UpdateGateway(e.Own, &list.Items[i])
	}
	if !slices.ContainsFunc(e.Own, func(h health.Hop) bool { return h.Name == health.HopRights }) {
		e.NotAsked = append(e.NotAsked, fmt.Sprintf("%s: the rights of the components; you are not allowed to create SubjectAccessReviews", c))
	}
	services := sharesServices(ctx, c)
	var counts map[string]*ServiceCounts
	if services {
		names, notAsked, err := namesHop(ctx, c)
		if err != nil {
			return nil, err
		}
		if e.Own = append(e.Own, names); notAsked != "" {
			e.NotAsked = append(e.NotAsked, notAsked)
		}
		if counts, err = importedServices(ctx, c); err != nil {
			return nil, err
		}
	}
	for i := range list.Items {
		p := &list.Items[i]
		if !meant(p) {
			continue
		}
		hops := health.PeeringHops(c.String(), p, e.Own)
		if expiry, ok := identityExpiry(ctx, c, p); ok && hops[0].State == health.Works {
			hops[0].Text += "; its token is valid until " + expiry.Format(time.RFC3339)
		}
		if services {
			hops = append(hops, servicesHop(c, p, counts))
		}
		e.Peerings, e.Found = append(e.Peerings, hops), append(e.Found, p)
	}
	return e, nil
}
