package flowsync

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/internal/metric"
)

var families metric.Catalogue

// Families returns the metrics of a Keeper, sorted by name.
func Families() []*metric.Family { return families.Families() }

var (
	familyCopied  = families.Gauge("gateway_copied_flows", "NAT flows of the active gateway that this standby has copied; 0 at the active one.")
	familyAge     = families.Gauge("gateway_copied_flows_age_seconds", "Time since the copy of a standby was last known to be complete; at most a second while it receives all changes. The active gateway has no series.")
	familyAdopted = families.Counter("gateway_adopted_flows_total", "NAT flows of the previous gateway that this gateway continues.")
	familyRefused = families.Counter("gateway_unadopted_flows_total", "NAT flows of the previous gateway that this gateway cannot continue, by reason. Their connections may break.", "reason")
	familyOmitted = families.Counter("gateway_uncopied_flows_total", "NAT flows of the active gateway that a standby did not copy, because its copy was full.")
	familyRelayed = families.Counter("gateway_relayed_packets_total", "Packets for peers that a stopping gateway relays to the next one, by result: taken (the next gateway sent it into its tunnel), dropped (the next gateway got too many, or it was too old or incomplete) or unsent (the connection between the gateways had no room, or ended). A superpacket counts once.", "result")
)

// Describe implements prometheus.Collector.
func (k *Keeper) Describe(out chan<- *prometheus.Desc) { families.Describe(out) }

// Collect implements prometheus.Collector.
func (k *Keeper) Collect(out chan<- prometheus.Metric) {
	s := k.State()
	out <- familyCopied.Sample(float64(s.Copied))
	if !s.Active {
		out <- familyAge.Sample(s.Age.Seconds())
	}
	out <- familyAdopted.Sample(float64(s.Counts.Adopted))
	for reason, n := range s.Counts.Refused {
		out <- familyRefused.Sample(float64(n), reason.String())
	}
	out <- familyOmitted.Sample(float64(s.Counts.Omitted))
	out <- familyRelayed.Sample(float64(s.Counts.Relayed), "taken")
	out <- familyRelayed.Sample(float64(s.Counts.Unrelayed), "dropped")
	out <- familyRelayed.Sample(float64(s.Counts.Unsent), "unsent")
}
