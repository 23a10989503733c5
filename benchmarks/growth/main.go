// Command growth draws how what a gateway, a manager and the IPAM spend grows with the number of peers, from
// the tables that benchmarks/peers, benchmarks/manager and benchmarks/scale printed:
//
//	go run ./benchmarks/growth > docs/growth.svg
package main

import (
	"fmt"
	"log"

	"github.com/isthmus-net/isthmus/benchmarks/internal/chart"
)

// The files with the tables.
const (
	peersBefore = "benchmarks/peers/before.md"
	peersNow    = "benchmarks/peers/after.md"
	manager     = "benchmarks/manager/after.md"
	books       = "benchmarks/scale/growth.md"
)

// panels are what is drawn of each.
var panels = []struct {
	title, row string
	before     string // empty: no table
	now        string
}{
	{"gateway at rest: % of a core", "at rest: CPU, of a core", peersBefore, peersNow},
	{"gateway: resident memory, MiB", "resident memory, MiB", peersBefore, peersNow},
	{"gateway, a scrape: CPU, ms", "a scrape: CPU, ms", peersBefore, peersNow},
	{"gateway, a peer changes: CPU, ms", "a peer's endpoint changes: CPU, ms", peersBefore, peersNow},
	{"gateway, one comes and goes: CPU, ms", "a peer comes and goes: CPU, ms", peersBefore, peersNow},
	{"gateway, all come back: s", "all come back, nobody scrapes, s", peersBefore, peersNow},
	{"the same, a scrape each second: s", "all come back, a scrape each second, s", peersBefore, peersNow},
	{"manager at rest: % of a core", "at rest: CPU, of a core", "", manager},
	{"manager: resident memory, MiB", "at rest: resident memory, MiB", "", manager},
	{"manager, a peer changes: CPU, ms", "a peer's endpoint changes: CPU, ms", "", manager},
	{"manager starts again: CPU, s", "it starts again: CPU, s", "", manager},
	{"IPAM, a grant: CPU, ms", "a grant is decided: CPU, ms", "", books},
	{"IPAM: octets of the books", "octets of the books", "", books},
}

func main() {
	log.SetFlags(0)
	tables := make(map[string]chart.Table)
	for _, name := range []string{peersBefore, peersNow, manager, books} {
		t, err := chart.Read(name)
		if err != nil {
			log.Fatal(err)
		}
		tables[name] = t
	}
	var all []chart.Panel
	for _, p := range panels {
		panel := chart.Panel{Title: p.title, Row: p.row}
		if p.before != "" {
			panel.Lines = append(panel.Lines, chart.Line{Table: tables[p.before], Colour: chart.Before})
		}
		panel.Lines = append(panel.Lines, chart.Line{Table: tables[p.now], Colour: chart.Now})
		all = append(all, panel)
	}
	fmt.Print(chart.Draw("number of peers (across) and what is spent (up)", all))
}
