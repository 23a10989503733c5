package main

import "github.com/isthmus-net/isthmus/benchmarks/internal/chart"

// panels are the rows of a table that are drawn.
var panels = []string{
	"at start: CPU, s",
	"at start: read of the API server, KiB",
	"at rest: CPU, of a core",
	"resident memory, MiB",
	"a pod here comes: CPU, ms",
	"a pod's link here comes: CPU, ms",
	"a peer's latency changes: CPU, ms",
	"a peer is granted networks: CPU, ms",
	"a peer is granted networks: octets read",
	"the gateway moves: CPU, ms",
	"the gateway moves: octets read",
}

// plot draws how the figures of two tables grow.
func plot(before, after figures) string {
	was, is := before.chart(), after.chart()
	var drawn []chart.Panel
	for _, row := range panels {
		drawn = append(drawn, chart.Panel{Title: row, Lines: []chart.Line{{Table: was, Colour: chart.Before}, {Table: is, Colour: chart.Now}}})
	}
	return chart.Draw("number of peers (across) and what an agent spends (up)", drawn)
}

func (f figures) chart() chart.Table {
	t := chart.Table{Rows: make(map[string][]float64, len(panels))}
	for _, r := range f.all {
		t.Peers = append(t.Peers, float64(r.peers))
		for _, row := range panels {
			t.Rows[row] = append(t.Rows[row], r.number(row))
		}
	}
	return t
}
