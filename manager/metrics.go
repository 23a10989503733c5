package manager

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/metric"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/exchange"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/replication"
	"github.com/isthmus-net/isthmus/manager/services"
)

var families metric.Catalogue

// Families returns the manager's own metrics, by name.
func Families() []*metric.Family {
	all := append(families.Families(), controllers.Families()...)
	slices.SortFunc(all, func(a, b *metric.Family) int { return strings.Compare(a.Name, b.Name) })
	return all
}

var (
	familyPeering   = families.Gauge("manager_peering_ready", "1 if the Peering is Ready, else 0; reason is that of the condition.", "peering", "peer", "reason")
	familyQuantum   = families.Gauge("manager_peering_post_quantum", "1 if all sessions with the peer have a preshared key by ML-KEM-768, else 0; required is true if spec.postQuantum is Required. No series while this is unknown.", "peering", "peer", "required")
	familyExpiry    = families.Gauge("manager_identity_expiry_timestamp_seconds", "When the identity at the peer expires. Only of the active manager; no series if it does not expire.", "peer")
	familyRenewal   = families.Gauge("manager_identity_renewal_timestamp_seconds", "When the manager begins to renew the token of the identity at the peer: after a tenth of its lifetime. No series for a certificate.", "peer")
	familyAddresses = families.Gauge("ipam_addresses", "Addresses of a pool for peers' networks, used and free; our own networks count as used.", "pool", "state")
	familyLeft      = families.Gauge("ipam_peers_left", "Number of additional peers for which the pools have room, if their networks are as large as this cluster's; 0 while these are unknown.")
	familyExpired   = families.Counter("ipam_mappings_expired_total", "Mappings that ended because the Pod, node, Service or peer behind them was gone.")
	familyShared    = families.Gauge("services_exported", "Services of this cluster with a valid ServiceExport. Only of the active manager, with --services.")
	familyImported  = families.Gauge("services_imported", "Services of a peer that this cluster serves.", "peer")
	familyEndpoints = families.Gauge("services_imported_endpoints", "Endpoints of the imported services of a peer.", "peer")
	familyRefused   = families.Gauge("services_refused", "Services that are refused in whole or in part; by: this cluster or the peer.", "peer", "by")
	familyBehind    = families.Gauge("services_behind_seconds", "How long the peer has lacked the current version of exported services; 0: it has them.", "peer")
	familyLate      = families.Gauge("manager_nodes_not_refusing", "Nodes that may send packets for peers outside the tunnel: they did not confirm new networks in time, and have reported nothing since. Only of the active manager.")
)

// collector reads the manager's own series from their sources at each scrape, so that the series of
// a peer vanish when the peer leaves.
type collector struct {
	peers   client.Reader
	store   interface{ State() ipam.State }
	expired *atomic.Uint64
	leading *atomic.Pointer[leading] // a nil pointer: another manager leads
}

// leading has the sources that only a leading manager has.
type leading struct {
	gate       *exchange.RefusalGate
	replicator *replication.Replicator
	services   *services.Controller // nil: services are not shared
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	families.Describe(out)
	controllers.Reconciled.Describe(out)
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var list isthmus.PeeringList
	if err := c.peers.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		out <- familyPeering.Failed(err)
	}
	for i := range list.Items {
		p, ready, reason := &list.Items[i], 0.0, isthmus.ReasonUnknown
		if c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady); c != nil {
			reason = c.Reason
			if c.Status == "True" {
				ready = 1
			}
		}
		out <- familyPeering.Sample(ready, p.Name, p.Spec.Cluster.ClusterID, reason)
		required := strconv.FormatBool(p.Spec.PostQuantum == isthmus.PostQuantumRequired)
		switch p.Status.PostQuantum.Key {
		case isthmus.KeyMLKEM:
			out <- familyQuantum.Sample(1, p.Name, p.Spec.Cluster.ClusterID, required)
		case isthmus.KeyNone:
			out <- familyQuantum.Sample(0, p.Name, p.Spec.Cluster.ClusterID, required)
		}
	}
	out <- familyExpired.Sample(float64(c.expired.Load()))
	if l := c.leading.Load(); l != nil {
		out <- familyLate.Sample(float64(l.gate.Late()))
		for peer, life := range l.replicator.Lives() {
			out <- familyExpiry.Sample(float64(life.Expires.Unix()), peer)
			if !life.Renewal.IsZero() {
				out <- familyRenewal.Sample(float64(life.Renewal.Unix()), peer)
			}
		}
	}
	if l := c.leading.Load(); l != nil && l.services != nil {
		out <- familyShared.Sample(float64(l.services.Exports()))
		for i := range list.Items {
			id := list.Items[i].Spec.Cluster.ClusterID
			imports := l.services.Imports(id)
			sharing, _ := l.replicator.Sharing(id)
			out <- familyImported.Sample(float64(imports.Served), id)
			out <- familyEndpoints.Sample(float64(imports.Endpoints), id)
			out <- familyRefused.Sample(float64(imports.Refused), id, "us")
			out <- familyRefused.Sample(float64(len(sharing.Refused)), id, "peer")
			behind := 0.0
			if !sharing.Behind.IsZero() {
				behind = time.Since(sharing.Behind).Seconds()
			}
			out <- familyBehind.Sample(behind, id)
		}
	}
	controllers.Reconciled.Collect(out)
	state := c.store.State()
	out <- familyLeft.Sample(state.Left())
	for _, u := range state.Usage() {
		out <- familyAddresses.Sample(u.Used, u.Pool.String(), "used")
		out <- familyAddresses.Sample(u.Free, u.Pool.String(), "free")
	}
}
