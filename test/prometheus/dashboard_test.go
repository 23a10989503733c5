package prometheus

import (
	"math"
	"regexp"
	"slices"
	"testing"
)

const (
	dashboardFile = "../../deploy/monitoring/dashboard.json"
	// recordingFile contains the samples that TestRecordDashboardData in test/fleet scraped (`make
	// record`).
	recordingFile = "testdata/fleet.gz"
)

// inLegend matches the labels in the legend of a query.
var inLegend = regexp.MustCompile(`{{\s*(\w+)\s*}}`)

// chosen are the default values of the dashboard's variables, with one cluster of the recording.
var chosen = map[string]string{"cluster": "a", "namespace": ".*", "peer": ".*"}

func open(t *testing.T) (Dashboard, *Recording) {
	t.Helper()
	d, err := ReadDashboard(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(recordingFile, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return d, r
}

func TestPanelsUseMetricsAndLabelsThatExist(t *testing.T) {
	d, r := open(t)
	metrics := knownLabels(t)
	seen := 0
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			seen++
			check(t, p.Title, r.Fill(target.Expr, chosen), metrics)
		}
	}
	if seen < 30 {
		t.Errorf("%d expressions", seen)
	}
}

// The recording covers takeovers, faults and traffic of two clusters, which one Prometheus
// scrapes. For each cluster, each query must return data, and the labels in its legend must not
// be empty.
func TestEachPanelShowsFleetData(t *testing.T) {
	d, r := open(t)
	for _, cluster := range []string{"a", "b"} {
		of := map[string]string{"cluster": cluster, "namespace": ".*", "peer": ".*"}
		for _, p := range d.Panels {
			for _, target := range p.Targets {
				got, err := r.Over(t.Context(), r.Fill(target.Expr, of))
				if err != nil {
					t.Errorf("cluster %s, %s: %v\n%s", cluster, p.Title, err, target.Expr)
					continue
				}
				some := false
				for _, s := range got {
					for _, f := range s.Floats {
						some = some || !math.IsNaN(f.F)
					}
					for _, m := range inLegend.FindAllStringSubmatch(target.LegendFormat, -1) {
						if s.Metric.Get(m[1]) == "" {
							t.Errorf("%s: the legend names %s, which %s lacks", p.Title, m[1], s.Metric)
						}
					}
				}
				if !some && !slices.Contains(quiet[cluster], p.Title) {
					t.Errorf("cluster %s: %s shows nothing\n%s", cluster, p.Title, target.Expr)
				}
			}
		}
	}
}

// quiet lists the panels that have no data for a cluster, because the event did not occur.
var quiet = map[string][]string{"b": {"Packets that are too big"}}
