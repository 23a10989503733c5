package prometheus

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

// scraped are all the metrics that there are, of one gateway with two peers, with the labels that
// each has. Gauges have the given value, counters run.
func scraped(t *testing.T, value int) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("load 1m\n")
	metrics := known(t)
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		samples := fmt.Sprintf("%dx60", value)
		if strings.HasSuffix(name, "_total") {
			samples = "0+60x60"
		}
		if strings.HasSuffix(name, "_info") {
			samples = "1x60"
		}
		peers := []string{""}
		if slices.Contains(metrics[name], "peer") {
			peers = []string{"p", "q"}
		}
		for _, peer := range peers {
			series := name + `{namespace="n",job="j",instance="i"`
			for _, l := range metrics[name] {
				of := map[string]string{"peer": peer, "name": "of-" + peer}[l]
				if l == "name" && peer == "" {
					of = "isthmus-manager" // leader_election_master_status
				}
				if of == "" {
					of = "used" // of the pools; others do not care
				}
				series += fmt.Sprintf(`,%s=%q`, l, of)
			}
			fmt.Fprintf(&b, "  %s} %s\n", series, samples)
		}
	}
	return b.String()
}

// Each panel shows something, where all metrics are there: while all is well, or when it is not.
func TestEachPanelShowsSomething(t *testing.T) {
	shown := map[string]int{}
	for _, value := range []int{0, 1} {
		loader, err := promqltest.NewLazyLoader(scraped(t, value), promqltest.LazyLoaderOpts{EnableAtModifier: true, EnableNegativeOffset: true})
		if err != nil {
			t.Fatal(err)
		}
		defer loader.Close()
		at := time.Unix(1800, 0).UTC()
		loader.WithSamplesTill(at, func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		})
		query := rules.EngineQueryFunc(loader.QueryEngine(), loader.Queryable())
		for _, p := range panels(t) {
			for i, target := range p.Targets {
				vector, err := query(loader.Context(), filled(target.Expr), at)
				if err != nil {
					t.Errorf("%s: %v\n%s", p.Title, err, target.Expr)
				}
				shown[fmt.Sprintf("%s %d", p.Title, i)] += len(vector)
				for _, sample := range vector {
					for label := range strings.SplitSeq(target.LegendFormat, "{{") {
						if name, _, ok := strings.Cut(label, "}}"); ok && sample.Metric.Get(name) == "" {
							t.Errorf("%s: the legend names %s, which %s lacks", p.Title, name, sample.Metric)
						}
					}
				}
			}
		}
	}
	for panel, n := range shown {
		if n == 0 {
			t.Errorf("%s shows nothing", panel)
		}
	}
}
