package main

import "github.com/isthmus-net/isthmus/benchmarks/internal/chart"

// rows are those of a table that are drawn.
var rows = []string{
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
func plot(before, after string) (string, error) {
	was, err := chart.Read(before)
	if err != nil {
		return "", err
	}
	is, err := chart.Read(after)
	if err != nil {
		return "", err
	}
	var panels []chart.Panel
	for _, row := range rows {
		panels = append(panels, chart.Panel{Title: row, Lines: []chart.Line{{Table: was, Colour: chart.Before}, {Table: is, Colour: chart.Now}}})
	}
	return chart.Draw("number of peers (across) and what an agent spends (up)", panels), nil
}
