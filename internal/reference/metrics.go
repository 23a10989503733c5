package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/flowsync"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/metric"
	"github.com/isthmus-net/isthmus/internal/source/kube"
	"github.com/isthmus-net/isthmus/manager"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/routeagent"
)

// metrics generates docs/metrics.md.
func metrics(string) (string, error) {
	var b strings.Builder
	b.WriteString("# Metrics\n\n")
	fmt.Fprintf(&b, generated, "the families that the components declare")
	b.WriteString(`All components serve Prometheus metrics at ` + "`/metrics`" + `, by default at a loopback address: the manager on port 5876, the gateway on
5872, the route agent on 5874. [security.md](security.md) describes who may read them. The chart has PodMonitors
(` + "`metrics.podMonitor`" + `), alerts (` + "`metrics.prometheusRule`" + `) and a Grafana dashboard (` + "`metrics.dashboard`" + `).

- A counter of drops, events or results has no series before the first one, and a timestamp none before its event.
- A metric of a peer exists while the peer is configured. The label ` + "`peer`" + ` is the cluster ID; ` + "`isthmus_peer_info`" + ` has its name.
- "Receive" and "inbound" mean from the tunnel, "transmit" and "outbound" towards it.
- There is no CPU time by peer, because peers share goroutines. The dashboard divides the gateway's ` + "`process_cpu_seconds_total`" + ` by packets.

`)
	for _, c := range []struct {
		title, about string
		families     []*metric.Family
	}{
		{"All components", "All components also have the metrics of the Go runtime (`go_*`) and of the process (`process_*`).", metric.Common.Families()},
		{"Gateway", "Of the active gateway, and of one that is configured by files.", gateway.Families()},
		{"Gateway in a cluster", "Of active and standby gateways.", slices.Concat(kube.Families(), flowsync.Families())},
		{"Route agent", "", routeagent.Families()},
		{"Manager", "The manager also has the metrics of controller-runtime (`controller_runtime_*`, `workqueue_*`, `rest_client_*`, `leader_election_*`).", manager.Families()},
	} {
		fmt.Fprintf(&b, "## %s\n\n", c.title)
		if c.about != "" {
			fmt.Fprintf(&b, "%s\n\n", c.about)
		}
		b.WriteString("| metric | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n")
		for _, f := range c.families {
			labels := ""
			if len(f.Labels) > 0 {
				labels = "`" + strings.Join(f.Labels, "` `") + "`"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", f.Name, strings.ToLower(f.Type.String()), unit(f.Name), labels, f.Help)
		}
		b.WriteByte('\n')
	}
	b.WriteString("## Reasons of isthmus_drops_total\n\nThe in-process endpoint is the gateway itself as a destination in the tunnel: it answers the connection check,\n" +
		"and carries the connections between managers and API servers (spec.inBand).\n\n| reason | meaning |\n| --- | --- |\n")
	for _, r := range natengine.Drops() {
		fmt.Fprintf(&b, "| `%s` | %s |\n", r, r.Explain())
	}
	b.WriteString("\n## Reasons of isthmus_filter_drops_total\n\nDrops of the nftables tables `inet isthmus` and `bridge isthmus`; `nft list ruleset` shows a counter in each rule. The kernel\n" +
		"does not count packets that a route refuses (`unreachable`); their sender gets an error.\n\n| reason | meaning |\n| --- | --- |\n")
	for _, r := range kernel.DropReasons {
		fmt.Fprintf(&b, "| `%s` | %s |\n", r.Reason, r.Explain)
	}
	b.WriteString("\n## Reasons of isthmus_kernel_ip_drops_total\n\nThe kernel's own counters, of IPv4 and IPv6 together.\n\n| reason | meaning | in /proc/net/snmp or dev |\n| --- | --- | --- |\n")
	for _, r := range kernel.IPDrops {
		fmt.Fprintf(&b, "| `%s` | %s | `%s` |\n", r.Reason, r.Explain, strings.Join(r.Counters, "` `"))
	}
	return b.String(), nil
}

// unit returns the unit that a metric's name contains by the conventions of Prometheus.
func unit(name string) string {
	name = strings.TrimSuffix(name, "_total")
	for _, u := range []struct{ suffix, text string }{
		{"_timestamp_seconds", "Unix time"}, {"_seconds", "seconds"}, {"_bytes", "octets"}, {"_bytes_limit", "octets"}, {"_ratio", "0 to 1"}, {"_per_second_limit", "1/s"},
	} {
		if strings.HasSuffix(name, u.suffix) {
			return u.text
		}
	}
	return ""
}
