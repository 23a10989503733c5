package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// sniff starts to watch the underlay. The Sniffer has no networks at first; follow adds those of
// each cluster.
func (f *Fleet) sniff() (err error) {
	f.Sniffer, err = f.Lab.Sniff(func(c *lab.Cluster) {
		// While the API server does not answer, the last known networks stay in use.
		_ = f.Cluster(c.Name).learn(context.Background())
	})
	return err
}

// stopSniffing ends the watch and returns an error that lists the leaks. Call it after the
// components have ended, because their shutdown must not leak either. Call it before the API
// servers end, because stopSniffing queries them once more.
func (f *Fleet) stopSniffing() error {
	if f.Sniffer == nil {
		return nil
	}
	err := f.Sniffer.Close()
	for _, c := range f.Clusters {
		c.remotes.stop()
	}
	return err
}

// remotes are the networks of a cluster's peers that the sniffer watches. A network is in remotes
// from its allocation until un-peering has removed the allocation from the IPAM state.
type remotes struct {
	report func(lab.Watched)
	end    context.CancelFunc
	done   sync.WaitGroup

	// mu is also held during a query of the API server, so that an older response cannot replace a
	// newer one.
	mu       sync.Mutex
	networks map[string][]netip.Prefix // by cluster ID of the peer
}

func (r *remotes) stop() {
	if r.end != nil {
		r.end()
		r.done.Wait()
	}
}

// follow reports the networks of the cluster's peers to the sniffer, now and after each change.
// It returns after the first report. While the API server does not answer, the last known
// networks stay in use.
func (c *Cluster) follow(ctx context.Context, s *lab.Sniffer) error {
	c.remotes.report = func(w lab.Watched) { s.Watch(c.Cluster, w) }
	var last error
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		last = c.learn(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("networks of peers: %w", last)
	}
	// The caller's context ends when the cluster has started. The new context ends in stop.
	ctx, c.remotes.end = context.WithCancel(context.Background())
	c.remotes.done.Go(func() {
		for ctx.Err() == nil {
			c.learnChanges(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	return nil
}

// learnChanges calls learn after each change, until ctx ends or a watch ends.
func (c *Cluster) learnChanges(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	storages, err := c.Client.Watch(ctx, &v1alpha1.IpamStorageList{})
	if err != nil {
		return
	}
	defer storages.Stop()
	peerings, err := c.Client.Watch(ctx, &isthmus.PeeringList{})
	if err != nil {
		return
	}
	defer peerings.Stop()
	for more := true; more; {
		if c.learn(ctx) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case _, more = <-storages.ResultChan():
		case _, more = <-peerings.ResultChan():
		}
	}
}

// learn reads the networks of peers from the API server and reports them to the sniffer.
func (c *Cluster) learn(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r := &c.remotes
	r.mu.Lock()
	defer r.mu.Unlock()
	var storages v1alpha1.IpamStorageList
	var peerings isthmus.PeeringList
	for _, list := range []client.ObjectList{&storages, &peerings} {
		if err := c.Client.List(ctx, list); err != nil {
			return err
		}
	}
	r.networks = remember(r.networks, storages.Items, peerings.Items)
	var w lab.Watched
	for _, networks := range r.networks {
		w.Networks = append(w.Networks, networks...)
	}
	for i := range storages.Items {
		for endpoint := range storages.Items[i].Spec.EndpointMappings {
			if addr, err := netip.ParseAddr(endpoint); err == nil {
				w.Endpoints = append(w.Endpoints, addr)
			}
		}
	}
	r.report(w)
	return nil
}

// remember returns the networks of peers, by cluster ID, according to the IPAM state. Without an
// IpamStorage it returns known unchanged. If a peer is no longer in the IPAM state, it keeps its
// networks unless its Peering is deleted or being deleted.
func remember(known map[string][]netip.Prefix, storages []v1alpha1.IpamStorage, peerings []isthmus.Peering) map[string][]netip.Prefix {
	if len(storages) == 0 {
		return known
	}
	now := map[string][]netip.Prefix{}
	for i := range storages {
		for id, subnets := range storages[i].Spec.ClusterSubnets {
			for _, text := range []string{subnets.RemotePodCIDR, subnets.RemoteExternalCIDR} {
				if network, err := netip.ParsePrefix(text); err == nil { // empty until the network is known
					now[id] = append(now[id], network)
				}
			}
		}
	}
	for i := range peerings {
		id := peerings[i].Spec.Cluster.ClusterID
		if had, named := known[id], now[id]; named == nil && had != nil && peerings[i].DeletionTimestamp.IsZero() {
			now[id] = had
		}
	}
	return now
}
