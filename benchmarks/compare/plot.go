package main

import (
	"fmt"
	"html"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

// Sizes of the plot in pixels.
const (
	plotLabel    = 210 // space left of the bars
	plotWidth    = 420 // length of the longest bar
	plotBar      = 13
	plotFigure   = 26 // height of a figure's heading
	plotMaxRatio = 4  // bars are cut off at this ratio
)

// plot draws the ratios to the baseline as SVG: a group of bars for each figure. The bar is the
// median, and a line shows the spread.
func plot(all []sample, names []string, where string) []byte {
	names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == baseline || n == "veth" || n == "vxlan" })
	var b strings.Builder
	y := 50
	for _, f := range figures {
		better := "less is better"
		if f.largerIsBetter {
			better = "more is better"
		}
		y += plotFigure
		fmt.Fprintf(&b, "<text x=\"10\" y=\"%d\" class=\"f\">%s</text><text x=\"%d\" y=\"%d\" class=\"b\">%s</text>\n",
			y, html.EscapeString(f.name), plotLabel+plotWidth+60, y, better)
		y += 6
		for _, n := range names {
			r := ratios(all, n, f)
			if r == nil {
				continue
			}
			class := "other"
			if strings.HasPrefix(n, "isthmus") {
				class = "own"
			}
			fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" class=\"n\">%s</text>", plotLabel-8, y+plotBar-3, html.EscapeString(n))
			fmt.Fprintf(&b, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" class=\"%s\"/>", plotLabel, y, plotX(measure.Median(r)), plotBar-2, class)
			fmt.Fprintf(&b, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>",
				plotLabel+plotX(slices.Min(r)), plotLabel+plotX(slices.Max(r)), float64(y)+plotBar/2-0.5, float64(y)+plotBar/2-0.5)
			fmt.Fprintf(&b, "<text x=\"%.1f\" y=\"%d\" class=\"v\">%.2fx</text>\n", plotLabel+max(plotX(measure.Median(r)), plotX(slices.Max(r)))+6, y+plotBar-3, measure.Median(r))
			y += plotBar
		}
	}
	one := plotLabel + plotX(1)
	return fmt.Appendf(nil, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">
<style>.f{font-weight:bold;font-size:12px}.n,.b{text-anchor:end;fill:#555}.b{font-size:10px}.v{fill:#333}.own{fill:#1f6f8b}.other{fill:#b9c4cc}line{stroke:#222;stroke-width:1}.one{stroke:#c0392b;stroke-dasharray:3 3}</style>
<rect width="100%%" height="100%%" fill="#fff"/>
<text x="10" y="20" font-size="14">Ratio to %s, median and spread</text>
<text x="10" y="36" fill="#777" font-size="9">%s</text>
<line x1="%.1f" x2="%.1f" y1="48" y2="%d" class="one"/>
%s</svg>
`, plotLabel+plotWidth+80, y+20, html.EscapeString(baseline), html.EscapeString(where), one, one, y+6, b.String())
}

// plotX returns the length of the bar for a ratio.
func plotX(ratio float64) float64 { return min(ratio, plotMaxRatio) / plotMaxRatio * plotWidth }
