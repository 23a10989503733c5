package prometheus

import (
	"flag"
	"math"
	"os"
	"slices"
	"testing"
)

const (
	dashboardFile = "../../deploy/monitoring/dashboard.json"
	pictureFile   = "../../docs/dashboard.svg"
	// recordingFile has what TestRecord in test/fleet scraped: `make record`.
	recordingFile = "testdata/fleet.gz"
)

var update = flag.Bool("update", false, "write docs/dashboard.svg")

// chosen are the variables of the dashboard as they are at first, with one cluster of the recording.
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
	metrics := known(t)
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

// Each query returns something of what a fleet said during a takeover, faults and traffic, for each
// of two clusters that one Prometheus asks, and the names in its legend are not empty.
func TestEachPanelShowsWhatAFleetSaid(t *testing.T) {
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

// quiet are the panels for which nothing happened in a cluster.
var quiet = map[string][]string{"b": {"Packets that are too big"}}

// The picture in the documents is the dashboard as it is, with what a fleet said.
func TestPictureOfTheDashboard(t *testing.T) {
	d, r := open(t)
	got, err := r.Draw(t.Context(), d, chosen)
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(pictureFile, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(pictureFile)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is another one: go test -C test/prometheus -run Picture -update", pictureFile)
	}
}
