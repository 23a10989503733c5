package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

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

// plot draws how the figures of two tables grow with the number of peers, both axes logarithmic.
func plot(before, after figures) string {
	const width, height, across = 250, 170, 4
	var tables [2]map[string][]float64
	var peers [2][]float64
	for i, f := range []figures{before, after} {
		tables[i] = make(map[string][]float64)
		for _, r := range f.all {
			peers[i] = append(peers[i], float64(r.peers))
			for _, panel := range panels {
				tables[i][panel] = append(tables[i][panel], r.number(panel))
			}
		}
	}
	var b strings.Builder
	rows := (len(panels) + across - 1) / across
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="10">`+"\n", across*width, rows*height+20)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	fmt.Fprintf(&b, `<text x="10" y="14">number of peers (across) and what an agent spends (up), both logarithmic; <tspan fill="#c33">before</tspan>, <tspan fill="#27a">now</tspan></text>`+"\n")
	for i, panel := range panels {
		x0, y0 := float64(i%across*width+40), float64(i/across*height+40)
		const w, h = width - 60.0, height - 60.0
		low, high := math.Inf(1), math.Inf(-1)
		for t := range tables {
			for _, v := range tables[t][panel] {
				low, high = min(low, max(v, 0.01)), max(high, max(v, 0.01))
			}
		}
		lo, hi := math.Floor(math.Log10(low)), math.Ceil(math.Log10(high*1.0001))
		fmt.Fprintf(&b, `<text x="%.0f" y="%.0f" font-weight="bold">%s</text>`+"\n", x0-30, y0-8, strings.ReplaceAll(panel, "&", "&amp;"))
		fmt.Fprintf(&b, `<path d="M%.0f %.0f v%.0f h%.0f" fill="none" stroke="#888"/>`+"\n", x0, y0, h, w)
		y := func(v float64) float64 { return y0 + h - (math.Log10(max(v, 0.01))-lo)/max(hi-lo, 1)*h }
		for e := lo; e <= hi; e++ {
			v := math.Pow(10, e)
			fmt.Fprintf(&b, `<text x="%.0f" y="%.0f" text-anchor="end">%s</text><path d="M%.0f %.1f h%.0f" stroke="#eee"/>`+"\n", x0-3, y(v)+3, short(v), x0, y(v), w)
		}
		for t, colour := range []string{"#c33", "#27a"} {
			x := func(v float64) float64 { return x0 + (math.Log10(v)-1)/2.2*w }
			points := ""
			for j, v := range tables[t][panel] {
				points += fmt.Sprintf("%.1f,%.1f ", x(peers[t][j]), y(v))
				fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="2" fill="%s"/>`, x(peers[t][j]), y(v), colour)
				if t == 0 {
					fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="middle">%.0f</text>`, x(peers[t][j]), y0+h+11, peers[t][j])
				}
			}
			fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/>`+"\n", strings.TrimSpace(points), colour)
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func short(v float64) string {
	switch {
	case v >= 1e6:
		return strconv.FormatFloat(v/1e6, 'g', 3, 64) + "M"
	case v >= 1e3:
		return strconv.FormatFloat(v/1e3, 'g', 3, 64) + "k"
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}
