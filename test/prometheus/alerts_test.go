package prometheus

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

const (
	alertsFile  = "../../deploy/monitoring/alerts.yaml"
	metricsFile = "../../docs/metrics.md"
)

func groups(t *testing.T) []rulefmt.RuleGroup {
	t.Helper()
	text, err := os.ReadFile(alertsFile)
	if err != nil {
		t.Fatal(err)
	}
	all, errs := rulefmt.Parse(text, false, model.UTF8Validation, promQL, slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Error(err)
	}
	if len(errs) > 0 || len(all.Groups) == 0 {
		t.Fatalf("%d groups", len(all.Groups))
	}
	return all.Groups
}

// healthy contains the series of a healthy cluster in the notation of promtool. The samples are a
// minute apart.
var healthy = map[string]string{
	`isthmus_peer_info{instance="gw",job="g",namespace="n",peer="p",name="oslo"}`:                                      "1x400",
	`isthmus_peer_up{instance="gw",job="g",namespace="n",peer="p"}`:                                                    "1x400",
	`isthmus_peer_probe_loss_ratio{instance="gw",job="g",namespace="n",peer="p"}`:                                      "0x400",
	`isthmus_peer_tunnel_up{instance="gw",job="g",namespace="n",peer="p",tunnel="1"}`:                                  "1x400",
	`isthmus_peer_path_mtu_bytes{instance="gw",job="g",namespace="n",peer="p"}`:                                        "1420x400",
	`isthmus_peer_expected_mtu_bytes{instance="gw",job="g",namespace="n",peer="p"}`:                                    "1420x400",
	`isthmus_drops_total{instance="gw",job="g",namespace="n",peer="p",direction="in",reason="ttl"}`:                    "0+6x400",
	`isthmus_drops_total{instance="gw",job="g",namespace="n",peer="",direction="in",reason="x"}`:                       "0+6000x400",
	`isthmus_drops_total{instance="gw",job="g",namespace="n",peer="",direction="in",reason="socket_buffer"}`:           "0+6x400",
	`isthmus_kernel_ip_drops_total{instance="gw",job="g",namespace="n",reason="device"}`:                               "0+6x400",
	`isthmus_nat_sessions{instance="gw",job="g",namespace="n"}`:                                                        "100x400",
	`isthmus_nat_sessions_limit{instance="gw",job="g",namespace="n"}`:                                                  "1000x400",
	`isthmus_peer_nat_sessions{instance="gw",job="g",namespace="n",peer="p"}`:                                          "100x400",
	`isthmus_peer_nat_sessions_limit{instance="gw",job="g",namespace="n",peer="p"}`:                                    "500x400",
	`isthmus_peer_nat_hosts_at_limit{instance="gw",job="g",namespace="n",peer="p"}`:                                    "0x400",
	`isthmus_peer_nat_ports{instance="gw",job="g",namespace="n",peer="p",protocol="udp",family="4"}`:                   "5000x400",
	`isthmus_nat_ports_limit{instance="gw",job="g",namespace="n",protocol="udp"}`:                                      "64512x400",
	`isthmus_config_last_reload_successful{instance="gw",job="g",namespace="n"}`:                                       "1x400",
	`isthmus_config_applied{instance="gw",job="g",namespace="n"}`:                                                      "1x400",
	`isthmus_gateway_active{instance="gw",job="g",namespace="n"}`:                                                      "1x400",
	`isthmus_gateway_active{instance="standby",job="g",namespace="n"}`:                                                 "0x400",
	`isthmus_gateway_standbys{instance="gw",job="g",namespace="n"}`:                                                    "1x400",
	`isthmus_gateway_voters{instance="gw",job="g",namespace="n"}`:                                                      "3x400",
	`isthmus_gateway_voters{instance="standby",job="g",namespace="n"}`:                                                 "3x400",
	`isthmus_gateway_voters_heard{instance="gw",job="g",namespace="n"}`:                                                "2x400",
	`isthmus_gateway_voters_heard{instance="standby",job="g",namespace="n"}`:                                           "2x400",
	`isthmus_gateway_key_age_seconds{instance="gw",job="g",namespace="n"}`:                                             "86400x400",
	`isthmus_gateway_key_rotation_age_seconds{instance="gw",job="g",namespace="n"}`:                                    "0x400",
	`isthmus_gateway_key_laggards{instance="gw",job="g",namespace="n"}`:                                                "0x400",
	`isthmus_gateway_source_ok{instance="gw",job="g",namespace="n"}`:                                                   "1x400",
	`isthmus_gateway_from_snapshot{instance="gw",job="g",namespace="n"}`:                                               "0x400",
	`isthmus_gateway_left_out_objects{instance="gw",job="g",namespace="n",kind="NatMapping"}`:                          "0x400",
	`isthmus_gateway_copied_flows_age_seconds{instance="standby",job="g",namespace="n",pod="standby"}`:                 "1x400",
	`isthmus_gateway_takeovers_total{instance="gw",job="g",namespace="n"}`:                                             "1x400",
	`isthmus_route_agent_ready{instance="node",job="a",namespace="n"}`:                                                 "1x400",
	`isthmus_route_agent_overlay_up{instance="node",job="a",namespace="n",gateway="192.0.2.1"}`:                        "1x400",
	`isthmus_route_agent_drift_repaired_total{instance="node",job="a",namespace="n"}`:                                  "3x400",
	`isthmus_manager_nodes_not_refusing{instance="m",job="m",namespace="n"}`:                                           "0x400",
	`isthmus_manager_peering_ready{instance="m",job="m",namespace="n",peering="oslo",peer="p",reason="Connected"}`:     "1x400",
	`isthmus_manager_peering_post_quantum{instance="m",job="m",namespace="n",peering="oslo",peer="p",required="true"}`: "1x400",
	`isthmus_manager_identity_expiry_timestamp_seconds{instance="m",job="m",namespace="n",peer="p"}`:                   "864000x400",
	`isthmus_manager_identity_renewal_timestamp_seconds{instance="m",job="m",namespace="n",peer="p"}`:                  "432000x400",
	`isthmus_services_behind_seconds{instance="m",job="m",namespace="n",peer="p"}`:                                     "0x400",
	`isthmus_ipam_peers_left{instance="m",job="m",namespace="n"}`:                                                      "200x400",
	`leader_election_master_status{instance="m",job="m",namespace="n",name="isthmus-manager"}`:                         "1x400",
	`leader_election_master_status{instance="m2",job="m",namespace="n",name="isthmus-manager"}`:                        "0x400",
	`controller_runtime_reconcile_errors_total{instance="m",job="m",namespace="n",controller="peering"}`:               "5x400",
	`isthmus_build_info{instance="gw",job="g",namespace="n",version="v1"}`:                                             "1x400",
	`isthmus_build_info{instance="m",job="m",namespace="n",version="v1"}`:                                              "1x400",
}

// Each element of faults changes series in minute 100, which must make an alert fire the given
// number of minutes later. An underscore ends a series. A series that is not in healthy is added.
var faults = []struct {
	alert   string
	after   int
	series  map[string]string // new samples by the beginning of the series' name
	summary string            // a part of the alert's summary
	beside  []string          // other alerts that the same fault makes fire
}{
	{alert: "IsthmusPeerDown", after: 2, series: map[string]string{`isthmus_peer_up`: "0"}, summary: "peer p"},
	{alert: "IsthmusPeerLossy", after: 5, series: map[string]string{`isthmus_peer_probe_loss_ratio`: "0.2"}, summary: "20%"},
	{alert: "IsthmusPathNarrow", after: 10, series: map[string]string{`isthmus_peer_path_mtu_bytes`: "1300"}, summary: "larger than 1300 octets"},
	{alert: "IsthmusTunnelDown", after: 10, series: map[string]string{`isthmus_peer_tunnel_up`: "0"}, summary: "Tunnel 1 to peer p"},
	{alert: "IsthmusPeeringNotReady", after: 10, series: map[string]string{
		`isthmus_manager_peering_ready{instance="m",job="m",namespace="n",peering="oslo",peer="p",reason="Connected"}`: "_",
		`isthmus_manager_peering_ready{instance="m",job="m",namespace="n",peering="oslo",peer="p",reason="NoAnswer"}`:  "0",
	}, summary: "oslo is not ready: NoAnswer"},
	{alert: "IsthmusPostQuantumMissing", after: 5, series: map[string]string{`isthmus_manager_peering_post_quantum`: "0"}, summary: "oslo requires a preshared key"},
	{alert: "IsthmusKeyRotationStuck", after: 5, series: map[string]string{
		`isthmus_gateway_key_rotation_age_seconds`: "90000", `isthmus_gateway_key_laggards`: "2"}, summary: "rotating for a day"},
	{alert: "IsthmusKeyOld", after: 60, series: map[string]string{`isthmus_gateway_key_age_seconds`: "34646400"}, summary: "is 401d"},
	{alert: "IsthmusDrops", after: 13, series: map[string]string{`isthmus_drops_total{instance="gw",job="g",namespace="n",peer="p"`: "+1200"}, summary: "ttl"},
	{alert: "IsthmusIdentityNotRenewed", after: 5, series: map[string]string{
		`isthmus_manager_identity_expiry`: "10000", `isthmus_manager_identity_renewal`: "1000"}, summary: "expires in"},
	{alert: "IsthmusIdentityNotRenewed", after: 9, series: map[string]string{ // an ended series counts for almost five more minutes
		`isthmus_manager_identity_expiry`: "500000", `isthmus_manager_identity_renewal`: "_"}, summary: "expires in"},
	{alert: "IsthmusNoActiveGateway", after: 1, series: map[string]string{`isthmus_gateway_active{instance="gw"`: "0"}, summary: "No gateway"},
	{alert: "IsthmusNoStandby", after: 10, series: map[string]string{`isthmus_gateway_standbys`: "0"}, summary: "No standby"},
	{alert: "IsthmusNoActiveGateway", after: 5, series: map[string]string{`isthmus_gateway_active`: "_"}, summary: "No gateway"}, // an ended series counts for almost five more minutes
	{alert: "IsthmusSeveralActiveGateways", after: 1, series: map[string]string{`isthmus_gateway_active{instance="standby"`: "1"}, summary: "2 gateways"},
	{alert: "IsthmusStandbyCannotTakeOver", after: 5, series: map[string]string{`isthmus_gateway_voters_heard{instance="standby"`: "1"}, summary: "gateway standby does not hear"},
	{alert: "IsthmusFlowsNotCopied", after: 5, series: map[string]string{`isthmus_gateway_copied_flows_age_seconds`: "90"}, summary: "NAT flows"},
	{alert: "IsthmusGatewayFlaps", after: 2, series: map[string]string{`isthmus_gateway_takeovers_total`: "+2"}, summary: "times within an hour"},
	{alert: "IsthmusConfigurationRefused", after: 5, series: map[string]string{`isthmus_config_last_reload_successful`: "0"}, summary: "newest configuration"},
	{alert: "IsthmusConfigurationRefused", after: 5, series: map[string]string{`isthmus_gateway_source_ok`: "0"}, summary: "newest configuration"},
	{alert: "IsthmusObjectsLeftOut", after: 5, series: map[string]string{`isthmus_gateway_left_out_objects`: "3"}, summary: "3 objects of kind NatMapping"},
	{alert: "IsthmusGatewayNotApplied", after: 5, series: map[string]string{`isthmus_config_applied`: "0"}, summary: "refuses a part"},
	{alert: "IsthmusGatewayWithoutAPIServer", after: 15, series: map[string]string{`isthmus_gateway_from_snapshot`: "1"}, summary: "last known configuration"},
	{alert: "IsthmusGatewayOverloaded", after: 13, series: map[string]string{
		`isthmus_drops_total{instance="gw",job="g",namespace="n",peer="",direction="in",reason="socket_buffer"}`: "+1200"}, summary: "Gateway gw is too slow"},
	{alert: "IsthmusGatewayOverloaded", after: 13, series: map[string]string{`isthmus_kernel_ip_drops_total{`: "+1200"}, summary: "dropped: device"},
	{alert: "IsthmusFlowsNearLimit", after: 10, series: map[string]string{`isthmus_nat_sessions{`: "900"}, summary: "90% of the NAT flows are in use"},
	{alert: "IsthmusFlowsNearLimit", after: 10, series: map[string]string{`isthmus_peer_nat_sessions{`: "450"}, summary: "90% of the NAT flows of peer p are in use"},
	{alert: "IsthmusHostsAtLimit", after: 10, series: map[string]string{`isthmus_peer_nat_hosts_at_limit`: "2"}, summary: "2 hosts"},
	{alert: "IsthmusPortsNearLimit", after: 10, series: map[string]string{`isthmus_peer_nat_ports`: "60000"}, summary: "93.01% of the udp ports towards peer p"},
	{alert: "IsthmusRouteAgentNotReady", after: 5, series: map[string]string{`isthmus_route_agent_ready`: "0"}, summary: "node"},
	{alert: "IsthmusOverlayBroken", after: 2, series: map[string]string{`isthmus_route_agent_ready`: "0", `isthmus_route_agent_overlay_up`: "0"}, summary: "192.0.2.1"},
	{alert: "IsthmusRoutesFoughtOver", after: 10, series: map[string]string{`isthmus_route_agent_drift_repaired_total`: "+1"}, summary: "node"},
	{alert: "IsthmusNodesNotRefusing", after: 10, series: map[string]string{`isthmus_manager_nodes_not_refusing`: "2"}, summary: "2 nodes"},
	{alert: "IsthmusNoManager", after: 5, series: map[string]string{`leader_election_master_status{instance="m",`: "0"}, summary: "No manager"},
	{alert: "IsthmusReconcileErrors", after: 17, series: map[string]string{`controller_runtime_reconcile_errors_total`: "+6"}, summary: "Controller peering"},
	{alert: "IsthmusServicesNotShared", after: 7, series: map[string]string{`isthmus_services_behind_seconds`: "+60"}, summary: "Peer p lacks services"},
	{alert: "IsthmusPoolsNearlyEmpty", after: 30, series: map[string]string{`isthmus_ipam_peers_left`: "3"}, summary: "3 more peers"},
	{alert: "IsthmusVersionsDiffer", after: 60, series: map[string]string{
		`isthmus_build_info{instance="gw"`: "_", `isthmus_build_info{instance="gw",job="g",namespace="n",version="v2"}`: "1"}, summary: "2 versions"},
}

const faultAt = 100

// world returns the series in healthy, with the changes of a fault, in the notation of promqltest.
func world(t *testing.T, fault map[string]string) string {
	t.Helper()
	series := maps.Clone(healthy)
	for begin, then := range fault {
		hit := false
		for name, before := range healthy {
			if !strings.HasPrefix(name, begin) {
				continue
			}
			hit = true
			first, _, _ := strings.Cut(before, "x")
			value, step, counts := strings.Cut(first, "+")
			switch {
			case strings.HasPrefix(then, "+"): // a counter that increases from then on
				reached := 0
				fmt.Sscan(value, &reached)
				if counts {
					var each int
					fmt.Sscan(step, &each)
					reached += each * faultAt
				}
				series[name] = fmt.Sprintf("%sx%d %d%sx300", first, faultAt-1, reached, then)
			default:
				series[name] = fmt.Sprintf("%sx%d %sx300", first, faultAt-1, then)
			}
		}
		if !hit {
			series[begin] = fmt.Sprintf("_x%d %sx300", faultAt, then)
		}
	}
	var b strings.Builder
	b.WriteString("load 1m\n")
	for _, name := range slices.Sorted(maps.Keys(series)) {
		fmt.Fprintf(&b, "  %s %s\n", name, series[name])
	}
	return b.String()
}

// A firing is an alert, the minute in which it started to fire, and its summary.
type firing struct {
	alert, summary string
	minute         int
}

// watch evaluates all alerts once a minute, and returns those that start to fire.
func watch(t *testing.T, text string, from, to int) (all []firing) {
	t.Helper()
	loader, err := promqltest.NewLazyLoader(text, promqltest.LazyLoaderOpts{EnableAtModifier: true, EnableNegativeOffset: true})
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	defer loader.Close()
	var alerts []*rules.AlertingRule
	for _, g := range groups(t) {
		for _, r := range g.Rules {
			expr, err := promQL.ParseExpr(r.Expr)
			if err != nil {
				t.Fatal(err)
			}
			alerts = append(alerts, rules.NewAlertingRule(r.Alert, expr, time.Duration(r.For), 0, labels.FromMap(r.Labels), labels.FromMap(r.Annotations),
				labels.EmptyLabels(), "", true, slog.New(slog.DiscardHandler)))
		}
	}
	query := rules.EngineQueryFunc(loader.QueryEngine(), loader.Queryable())
	seen := map[string]bool{}
	for minute := from; minute <= to; minute++ {
		at := time.Unix(int64(minute)*60, 0).UTC()
		loader.WithSamplesTill(at, func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		})
		for _, a := range alerts {
			if _, err := a.Eval(loader.Context(), 0, at, query, nil, 0); err != nil {
				t.Fatalf("%s: %v", a.Name(), err)
			}
			for _, active := range a.ActiveAlerts() {
				if active.State == rules.StateFiring && !seen[a.Name()] {
					seen[a.Name()] = true
					all = append(all, firing{a.Name(), active.Annotations.Get("summary"), minute})
				}
			}
		}
	}
	return all
}

func TestNoAlertFiresOnAHealthyFleet(t *testing.T) {
	for _, f := range watch(t, world(t, nil), 0, 200) {
		t.Errorf("%s fires in minute %d: %s", f.alert, f.minute, f.summary)
	}
}

func TestEachAlertFiresForItsFaultAndNoOther(t *testing.T) {
	tested := map[string]bool{}
	for _, fault := range faults {
		tested[fault.alert] = true
		got := watch(t, world(t, fault.series), faultAt-20, faultAt+90)
		own := slices.IndexFunc(got, func(f firing) bool { return f.alert == fault.alert })
		if own < 0 {
			t.Errorf("%s does not fire: %v", fault.alert, got)
			continue
		}
		if f := got[own]; f.minute-faultAt != fault.after || !strings.Contains(f.summary, fault.summary) || strings.Contains(f.summary, "error") {
			t.Errorf("%s fires after %d minutes, want %d: %q, want %q in it", fault.alert, f.minute-faultAt, fault.after, f.summary, fault.summary)
		}
		for _, f := range got {
			if f.alert != fault.alert && !slices.Contains(fault.beside, f.alert) {
				t.Errorf("%s fires too: %s", fault.alert, f.alert)
			}
		}
	}
	for _, g := range groups(t) {
		for _, r := range g.Rules {
			if !tested[r.Alert] {
				t.Errorf("nothing tests %s", r.Alert)
			}
		}
	}
}

// knownLabels returns the labels of all metrics, without the labels of the target. It reads
// docs/metrics.md, which is generated from the code.
func knownLabels(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(metricsFile)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{ // metrics of other packages that we use
		"leader_election_master_status":             {"name"},
		"controller_runtime_reconcile_errors_total": {"controller"},
		"process_cpu_seconds_total":                 nil,
		"process_resident_memory_bytes":             nil,
	}
	row := regexp.MustCompile("(?m)^\\| `(isthmus_[a-z_]+)` \\| (\\w+) \\| [^|]*\\| ([^|]*)\\|")
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		all[m[1]] = strings.Fields(strings.ReplaceAll(m[3], "`", " "))
	}
	if len(all) < 50 {
		t.Fatalf("%s: %d metrics", metricsFile, len(all))
	}
	return all
}

// ofTarget lists the labels that a scraper adds.
var ofTarget = []string{"cluster", "namespace", "job", "instance", "pod"}

// check reports an error if an expression uses metrics or labels that do not exist.
func check(t *testing.T, where, text string, metrics map[string][]string) {
	t.Helper()
	expr, err := promQL.ParseExpr(text)
	if err != nil {
		t.Errorf("%s: %v\n%s", where, err, text)
		return
	}
	labelsOf := map[string]bool{}
	for _, l := range ofTarget {
		labelsOf[l] = true
	}
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if s, ok := node.(*parser.VectorSelector); ok {
			has, ok := metrics[s.Name]
			if !ok {
				t.Errorf("%s: nothing serves %q", where, s.Name)
				return nil
			}
			for _, l := range has {
				labelsOf[l] = true
			}
			for _, m := range s.LabelMatchers {
				if m.Name != labels.MetricName && !slices.Contains(has, m.Name) && !slices.Contains(ofTarget, m.Name) {
					t.Errorf("%s: %s has no label %s", where, s.Name, m.Name)
				}
			}
		}
		return nil
	})
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		var used []string
		switch n := node.(type) {
		case *parser.AggregateExpr:
			used = n.Grouping
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				used = slices.Concat(n.VectorMatching.MatchingLabels, n.VectorMatching.Include)
			}
		}
		for _, l := range used {
			if !labelsOf[l] {
				t.Errorf("%s: none of its metrics has the label %s\n%s", where, l, text)
			}
		}
		return nil
	})
}

func TestAlertsUseMetricsAndLabelsThatExist(t *testing.T) {
	metrics := knownLabels(t)
	for _, g := range groups(t) {
		for _, r := range g.Rules {
			check(t, r.Alert, r.Expr, metrics)
		}
	}
	for name := range healthy {
		selector, err := promQL.ParseExpr(name)
		if err != nil {
			t.Fatal(err)
		}
		if s := selector.(*parser.VectorSelector).Name; metrics[s] == nil && !slices.Contains(slices.Collect(maps.Keys(metrics)), s) {
			t.Errorf("the tests use %s, which nothing serves", s)
		}
	}
}
