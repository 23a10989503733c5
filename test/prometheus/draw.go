package prometheus

import (
	"context"
	"fmt"
	"html"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
)

// Measures of the picture, in pixels: of Grafana's grid of 24 columns, and of letters of 11 pixels.
const (
	column, row, gap = 52, 34, 4
	letter, line     = 5.9, 14
)

var palette = []string{"#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#96d98d", "#ffb357", "#ff7383", "#c4162a", "#e0b400"}

var colours = map[string]string{"green": "#56a64b", "red": "#d63649", "orange": "#ff780a", "yellow": "#e0b400", "text": "#ccccdc"}

// A picture is a page of SVG.
type picture struct{ b strings.Builder }

func (p *picture) addf(format string, args ...any) { fmt.Fprintf(&p.b, format+"\n", args...) }

func (p *picture) text(x, y float64, class, anchor, text string) {
	p.addf(`<text x="%.0f" y="%.0f" class="%s" text-anchor="%s">%s</text>`, x, y, class, anchor, html.EscapeString(text))
}

// A curve is one series of a panel, with a value for each scrape; NaN: none.
type curve struct {
	name   string
	values []float64
	base   []float64 // what it is stacked on
}

// Draw draws a dashboard with what is chosen in it, as Grafana lays it out at the end of the
// recording. It knows only what our dashboard uses; the rest is an error.
func (r *Recording) Draw(ctx context.Context, d Dashboard, chosen map[string]string) (string, error) {
	p := &picture{}
	bottom := 0
	for _, panel := range d.Panels {
		bottom = max(bottom, panel.GridPos.Y+panel.GridPos.H)
	}
	p.addf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="Inter,Helvetica,Arial,sans-serif" font-size="11">`, 24*column+gap, bottom*row+gap)
	p.addf(`<style>path{fill:none}.grid{stroke:#262a31}text{fill:#ccccdc}.axis{fill:#9fa3ab;font-size:10px}.title{font-weight:600;font-size:12px}.none{fill:#7b8087}.head{fill:#6e9fff;font-weight:600}.row{font-size:15px;font-weight:600}.stat{fill:#fff;font-size:34px;font-weight:600}</style>`)
	p.addf(`<rect width="100%%" height="100%%" fill="#111217"/>`)
	for _, panel := range d.Panels {
		if err := r.draw(ctx, p, panel, chosen); err != nil {
			return "", fmt.Errorf("%s: %w", panel.Title, err)
		}
	}
	p.addf(`</svg>`)
	return p.b.String(), nil
}

func (r *Recording) draw(ctx context.Context, p *picture, panel Panel, chosen map[string]string) error {
	g := panel.GridPos
	x, y, w, h := float64(g.X*column+gap), float64(g.Y*row+gap), float64(g.W*column-gap), float64(g.H*row-gap)
	if panel.Type == "row" {
		p.text(x+4, y+20, "row", "start", "⌄ "+panel.Title)
		return nil
	}
	p.addf(`<g><rect x="%.0f" y="%.0f" width="%.0f" height="%.0f" rx="2" fill="#181b1f" stroke="#2c3038"/>`, x, y, w, h)
	defer p.addf(`</g>`)
	if panel.Type != "stat" {
		p.text(x+8, y+17, "title", "start", panel.Title)
	}
	switch panel.Type {
	case "stat":
		return r.stat(ctx, p, panel, chosen, x, y, w, h)
	case "table":
		return r.table(ctx, p, panel, chosen, x, y, w)
	case "timeseries":
		return r.timeseries(ctx, p, panel, chosen, x, y, w, h)
	}
	return fmt.Errorf("nobody draws a %q", panel.Type)
}

func (r *Recording) stat(ctx context.Context, p *picture, panel Panel, chosen map[string]string, x, y, w, h float64) error {
	got, err := r.At(ctx, r.Fill(panel.Targets[0].Expr, chosen), r.End)
	if err != nil {
		return err
	}
	of := panel.FieldConfig.Defaults
	shown, value, colour := of.NoValue, 0.0, "#181b1f"
	if len(got) > 1 {
		return fmt.Errorf("%d values", len(got))
	}
	if len(got) == 1 {
		value = got[0].F
		shown, err = format(of.Unit, value)
	}
	if shown == "" {
		shown = "No data"
	} else {
		for _, s := range of.Thresholds.Steps {
			if s.Value == nil || value >= *s.Value {
				colour = colours[s.Color]
			}
		}
	}
	p.addf(`<rect x="%.0f" y="%.0f" width="%.0f" height="%.0f" rx="2" fill="%s"/>`, x, y, w, h, colour)
	p.text(x+8, y+17, "title", "start", panel.Title)
	p.text(x+w/2, y+h/2+20, "stat", "middle", shown)
	return err
}

func (r *Recording) table(ctx context.Context, p *picture, panel Panel, chosen map[string]string, x, y, w float64) error {
	got, err := r.At(ctx, r.Fill(panel.Targets[0].Expr, chosen), r.End)
	if err != nil {
		return err
	}
	if len(got) == 0 {
		p.text(x+w/2, y+80, "none", "middle", "No data")
		return nil
	}
	excluded, renamed := map[string]bool{}, map[string]string{}
	for _, t := range panel.Transformations {
		if t.ID != "organize" {
			return fmt.Errorf("nobody transforms by %q", t.ID)
		}
		excluded, renamed = t.Options.ExcludeByName, t.Options.RenameByName
	}
	var rows [][]string
	for _, s := range got {
		var cells, heads []string
		add := func(name, value string) {
			if excluded[name] {
				return
			}
			if as := renamed[name]; as != "" {
				name = as
			}
			heads, cells = append(heads, name), append(cells, value)
		}
		add("Time", "")
		s.Metric.Range(func(l labels.Label) { add(l.Name, l.Value) })
		add("Value", number(s.F))
		if rows == nil {
			rows = append(rows, heads)
		}
		rows = append(rows, cells)
	}
	slices.SortFunc(rows[1:], slices.Compare[[]string])
	widths := make([]float64, len(rows[0]))
	for _, cells := range rows {
		for i, c := range cells {
			widths[i] = max(widths[i], float64(len(c))*letter+18)
		}
	}
	for i, cells := range rows {
		class, at, left := "", y+40+float64(i)*20, x+8
		if i == 0 {
			class = "head"
		}
		p.addf(`<path class="grid" d="M%.0f %.0fh%.0f"/>`, x, at+6, w)
		for j, c := range cells {
			p.text(left, at, class, "start", c)
			left += widths[j]
		}
	}
	return nil
}

var inLegend = regexp.MustCompile(`{{\s*(\w+)\s*}}`)

// curves evaluates the queries of a panel.
func (r *Recording) curves(ctx context.Context, panel Panel, chosen map[string]string) (all []curve, err error) {
	downwards := map[string]bool{}
	for _, o := range panel.FieldConfig.Overrides {
		for _, property := range o.Properties {
			if o.Matcher.ID != "byFrameRefID" || property.ID != "custom.transform" || property.Value != "negative-Y" {
				return nil, fmt.Errorf("nobody draws %s of %s", property.ID, o.Matcher.ID)
			}
			downwards[o.Matcher.Options] = true
		}
	}
	n := int(r.End.Sub(r.Begin)/r.Step) + 1
	for _, target := range panel.Targets {
		got, err := r.Over(ctx, r.Fill(target.Expr, chosen))
		if err != nil {
			return nil, err
		}
		slices.SortFunc(got, func(a, b promql.Series) int { return labels.Compare(a.Metric, b.Metric) })
		for _, s := range got {
			c := curve{values: slices.Repeat([]float64{math.NaN()}, n)}
			c.name = inLegend.ReplaceAllStringFunc(target.LegendFormat, func(m string) string { return s.Metric.Get(inLegend.FindStringSubmatch(m)[1]) })
			for _, f := range s.Floats {
				i := int(time.UnixMilli(f.T).Sub(r.Begin) / r.Step)
				if c.values[i] = f.F; downwards[target.RefID] {
					c.values[i] = -f.F
				}
			}
			all = append(all, c)
		}
	}
	if panel.FieldConfig.Defaults.Custom.Stacking.Mode == "normal" {
		stack(all, n)
	}
	return all, nil
}

// stack puts each curve on those before it.
func stack(all []curve, n int) {
	sum := make([]float64, n)
	for i := range all {
		all[i].base = slices.Clone(sum)
		for j, v := range all[i].values {
			if !math.IsNaN(v) {
				sum[j] += v
				all[i].values[j] = sum[j]
			}
		}
	}
}

func (r *Recording) timeseries(ctx context.Context, p *picture, panel Panel, chosen map[string]string, x, y, w, h float64) error {
	all, err := r.curves(ctx, panel, chosen)
	if err != nil {
		return err
	}
	least, most, some := math.Inf(1), math.Inf(-1), false
	for _, c := range all {
		for _, v := range c.values {
			if !math.IsNaN(v) {
				least, most, some = min(least, v), max(most, v), true
			}
		}
		for _, v := range c.base {
			least = min(least, v)
		}
	}
	if !some {
		p.text(x+w/2, y+h/2, "none", "middle", "No data")
		return nil
	}
	of := panel.FieldConfig.Defaults
	if of.Min != nil {
		least = *of.Min
	}
	if of.Max != nil {
		most = *of.Max
	}
	ticks := scale(least, most, of.Unit)
	if of.Min == nil {
		least = min(least, ticks[0])
	}
	if of.Max == nil {
		most = max(most, ticks[len(ticks)-1])
	}
	names := legend(all, w-24)
	left, right, top, bottom := x+62, x+w-12, y+28, y+h-float64(line*len(names))-26
	atX := func(i int) float64 {
		return left + (right-left)*float64(i)*r.Step.Seconds()/r.End.Sub(r.Begin).Seconds()
	}
	atY := func(v float64) float64 {
		return bottom - (bottom-top)*(min(max(v, least), most)-least)/(most-least)
	}
	for _, v := range ticks {
		if v < least || v > most {
			continue
		}
		text, err := format(of.Unit, v)
		if err != nil {
			return err
		}
		p.addf(`<path class="grid" d="M%.0f %.0fH%.0f"/>`, left, atY(v), right)
		p.text(left-5, atY(v)+3.5, "axis", "end", text)
	}
	for at := time.Duration(0); at <= r.End.Sub(r.Begin); at += time.Minute {
		i := int(at / r.Step)
		p.addf(`<path class="grid" d="M%.0f %.0fV%.0f"/>`, atX(i), top, bottom)
		p.text(atX(i), bottom+13, "axis", "middle", fmt.Sprintf("%d min", int(at.Minutes())))
	}
	for i, c := range all {
		r.line(p, c, palette[i%len(palette)], of.Custom.FillOpacity, of.Custom.LineInterpolation == "stepAfter", atX, atY, least)
	}
	for i, names := range names {
		at, above := x+12, y+h-float64(line*(len(legend(all, w-24))-i))+4
		for _, j := range names {
			p.addf(`<rect x="%.0f" y="%.0f" width="10" height="3" fill="%s"/>`, at, above-5, palette[j%len(palette)])
			p.text(at+14, above, "", "start", all[j].name)
			at += width(all[j].name)
		}
	}
	return nil
}

// line draws a curve, with gaps where it has no value.
func (r *Recording) line(p *picture, c curve, colour string, opacity float64, steps bool, atX func(int) float64, atY func(float64) float64, least float64) {
	for i := 0; i < len(c.values); {
		if math.IsNaN(c.values[i]) {
			i++
			continue
		}
		end := i
		for end < len(c.values) && !math.IsNaN(c.values[end]) {
			end++
		}
		var d strings.Builder
		for j := i; j < end; j++ {
			switch {
			case j > i && j < end-1 && c.values[j] == c.values[j-1] && c.values[j] == c.values[j+1]: // on a straight line
			case j == i:
				fmt.Fprintf(&d, "M%.0f %.1f", atX(j), atY(c.values[j]))
			case steps:
				fmt.Fprintf(&d, "H%.0fV%.1f", atX(j), atY(c.values[j]))
			default:
				fmt.Fprintf(&d, "L%.0f %.1f", atX(j), atY(c.values[j]))
			}
		}
		if end == i+1 { // a point
			fmt.Fprintf(&d, "h1")
		}
		p.addf(`<path d="%s" stroke="%s"/>`, d.String(), colour)
		if opacity > 0 {
			for j := end - 1; j >= i; j-- {
				under := max(0, least)
				if c.base != nil {
					under = c.base[j]
				}
				if j == end-1 || j == i || c.base != nil && (c.base[j] != c.base[j-1] || c.base[j] != c.base[j+1]) {
					fmt.Fprintf(&d, "L%.0f %.1f", atX(j), atY(under))
				}
			}
			p.addf(`<path d="%sz" style="fill:%s;fill-opacity:%.2g"/>`, d.String(), colour, opacity/100)
		}
		i = end
	}
}

func width(name string) float64 { return float64(len(name))*letter + 30 }

// legend breaks the names of curves into lines of a width: numbers of curves.
func legend(all []curve, most float64) (lines [][]int) {
	room := 0.0
	for i, c := range all {
		if room -= width(c.name); room < 0 || i == 0 {
			lines = append(lines, nil)
			room = most - width(c.name)
		}
		lines[len(lines)-1] = append(lines[len(lines)-1], i)
	}
	return lines
}

// scale returns values for an axis, about five, that are round in their unit.
func scale(least, most float64, unit string) (ticks []float64) {
	if most <= least {
		least, most = least-0.5, most+0.5
		if least < 0 && most > 0 && unit != "short" {
			least, most = 0, 1
		}
	}
	base := 10.0
	if unit == "bytes" {
		base = 2
	}
	rough := (most - least) / 4
	step := math.Pow(base, math.Floor(math.Log(rough)/math.Log(base)))
	if base == 10 {
		for _, m := range []float64{1, 2, 5, 10} {
			if m*step >= rough {
				step *= m
				break
			}
		}
	} else if step < rough {
		step *= 2
	}
	for v := math.Floor(least/step) * step; ; v += step {
		if ticks = append(ticks, v); v >= most {
			return ticks
		}
	}
}

func number(v float64) string {
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// A measure is how Grafana writes a value that is at least so much.
type measure struct {
	least  float64
	suffix string
}

var units = map[string][]measure{
	"short":       {{1e6, " Mil"}, {1e3, " K"}, {0, ""}},
	"bps":         {{1e9, " Gb/s"}, {1e6, " Mb/s"}, {1e3, " kb/s"}, {0, " b/s"}},
	"pps":         {{1e6, " Mp/s"}, {1e3, " kp/s"}, {0, " p/s"}},
	"ops":         {{1e3, "K ops/s"}, {0, " ops/s"}},
	"bytes":       {{1 << 30, " GiB"}, {1 << 20, " MiB"}, {1 << 10, " KiB"}, {0, " B"}},
	"s":           {{86400, " days"}, {3600, " hours"}, {60, " min"}, {1, " s"}, {1e-3, " ms"}, {0, " µs"}},
	"percentunit": {{0, "%"}},
	"none":        {{0, ""}},
}

// format writes a value with its unit.
func format(unit string, v float64) (string, error) {
	of, known := units[unit]
	if !known {
		return "", fmt.Errorf("nobody writes the unit %q; want one of %s", unit, strings.Join(slices.Sorted(maps.Keys(units)), ", "))
	}
	if unit == "percentunit" {
		v *= 100
	}
	for _, m := range of {
		if math.Abs(v) < m.least {
			continue
		}
		by := m.least
		if by == 0 {
			if by = 1; unit == "s" {
				by = 1e-6
			}
		}
		if v == 0 && unit == "s" {
			return "0 s", nil
		}
		return number(math.Round(v/by*100)/100) + m.suffix, nil
	}
	return number(v), nil
}
