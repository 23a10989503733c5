package manager

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

var (
	descPeering = prometheus.NewDesc("isthmus_manager_peering_ready",
		"1 if the Peering is Ready, else 0; reason is that of the condition.", []string{"peering", "peer", "reason"}, nil)
	descAddresses = prometheus.NewDesc("isthmus_ipam_addresses",
		"Addresses of a pool from which networks are given to peers, used and free; what is ours counts as used.", []string{"pool", "state"}, nil)
	descLeft = prometheus.NewDesc("isthmus_ipam_peers_left",
		"Peers with networks as long as ours that still get networks out of the pools; 0 while ours are not known.", nil, nil)
	descExpired = prometheus.NewDesc("isthmus_ipam_mappings_expired_total",
		"Mappings that ended because the Pod, node, Service or peer behind them was gone.", nil, nil)
	descLate = prometheus.NewDesc("isthmus_manager_nodes_not_refusing",
		"Nodes that did not say in time that they refuse what was granted to peers, and have said nothing new since.", nil, nil)
)

// collector reads the manager's own series from where they are when somebody asks, so that those of
// a peer vanish with it.
type collector struct {
	peers   client.Reader
	store   interface{ Book() ipam.Book }
	expired *atomic.Uint64
	late    *lateNodes
}

// lateNodes is the Warden of the manager that leads.
type lateNodes = atomic.Pointer[Warden]

// Describe says which series there may be.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	out <- descPeering
	out <- descAddresses
	out <- descLeft
	out <- descExpired
	out <- descLate
}

// Collect sends the series.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var list isthmus.PeeringList
	if err := c.peers.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		out <- prometheus.NewInvalidMetric(descPeering, err)
	}
	for i := range list.Items {
		p, ready, reason := &list.Items[i], 0.0, isthmus.ReasonUnknown
		if c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady); c != nil {
			reason = c.Reason
			if c.Status == "True" {
				ready = 1
			}
		}
		out <- prometheus.MustNewConstMetric(descPeering, prometheus.GaugeValue, ready, p.Name, p.Spec.Cluster.ClusterID, reason)
	}
	out <- prometheus.MustNewConstMetric(descExpired, prometheus.CounterValue, float64(c.expired.Load()))
	if w := c.late.Load(); w != nil {
		out <- prometheus.MustNewConstMetric(descLate, prometheus.GaugeValue, float64(w.Late()))
	}
	book := c.store.Book()
	out <- prometheus.MustNewConstMetric(descLeft, prometheus.GaugeValue, book.Left())
	for _, u := range book.Usage() {
		out <- prometheus.MustNewConstMetric(descAddresses, prometheus.GaugeValue, u.Used, u.Pool.String(), "used")
		out <- prometheus.MustNewConstMetric(descAddresses, prometheus.GaugeValue, u.Free, u.Pool.String(), "free")
	}
}
