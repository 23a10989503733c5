// Package chart reads tables that benchmark programs print, and draws how their figures grow with the
// number of peers.
package chart

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
)

// A Table has figures by the names of its rows, each as many as there are numbers of peers. A cell without
// a number is NaN.
type Table struct {
	Peers []float64
	Rows  map[string][]float64
}

var peersIn = regexp.MustCompile(`([\d,]+) peers`)

// Read reads the first table of a file whose head names numbers of peers.
func Read(name string) (Table, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return Table{}, err
	}
	t := parse(string(b))
	if len(t.Peers) == 0 {
		return t, fmt.Errorf("%s: want a table whose head names numbers of peers", name)
	}
	return t, nil
}

func parse(text string) Table {
	t := Table{Rows: make(map[string][]float64)}
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || len(cells) < 2 || strings.HasPrefix(line, "|---") {
			continue
		}
		name := strings.TrimSpace(cells[0])
		if name == "" && len(t.Peers) == 0 {
			for _, cell := range cells[1:] {
				if m := peersIn.FindStringSubmatch(cell); m != nil {
					t.Peers = append(t.Peers, number(m[1]))
				}
			}
		}
		if name == "" || len(cells) != len(t.Peers)+1 {
			continue
		}
		for _, cell := range cells[1:] {
			t.Rows[name] = append(t.Rows[name], number(strings.TrimSuffix(strings.TrimSpace(cell), " %")))
		}
	}
	return t
}

// number reads a cell; what follows ± is its error.
func number(text string) float64 {
	text, _, _ = strings.Cut(text, " ±")
	v, err := strconv.ParseFloat(strings.ReplaceAll(text, ",", ""), 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

// A Panel is one drawing: how a row grows in some tables.
type Panel struct {
	Title string
	Row   string // its name in the tables; empty: Title
	Lines []Line
}

// A Line is a row of one table.
type Line struct {
	Table  Table
	Colour string
}

// Colours of what was before and of what is now.
const (
	Before = "#c33"
	Now    = "#27a"
)

// least is drawn for what is less, zero too: the axes are logarithmic.
const least = 0.01

// Draw makes an SVG of panels under a line of text. Both axes are logarithmic.
func Draw(head string, panels []Panel) string {
	const width, height, across = 250, 170, 4
	const w, h = width - 60.0, height - 60.0
	var b strings.Builder
	rows := (len(panels) + across - 1) / across
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="10">`+"\n", across*width, rows*height+20)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	fmt.Fprintf(&b, `<text x="10" y="14">%s; both axes are logarithmic; <tspan fill="%s">before</tspan>, <tspan fill="%s">now</tspan></text>`+"\n", escape(head), Before, Now)
	for i, p := range panels {
		x0, y0 := float64(i%across*width+40), float64(i/across*height+40)
		xs, ys := newAxis(), newAxis()
		for _, l := range p.Lines {
			for j, v := range l.Table.Rows[p.row()] {
				if !math.IsNaN(v) {
					xs.take(l.Table.Peers[j])
					ys.take(v)
				}
			}
		}
		fmt.Fprintf(&b, `<text x="%.0f" y="%.0f" font-weight="bold">%s</text>`+"\n", x0-30, y0-8, escape(p.Title))
		fmt.Fprintf(&b, `<path d="M%.0f %.0f v%.0f h%.0f" fill="none" stroke="#888"/>`+"\n", x0, y0, h, w)
		lo, hi := math.Floor(math.Log10(ys.low)), math.Ceil(math.Log10(ys.high*1.0001))
		y := func(v float64) float64 { return y0 + h - (math.Log10(max(v, least))-lo)/max(hi-lo, 1)*h }
		left, right := math.Log10(xs.low), math.Log10(xs.high)
		x := func(v float64) float64 { return x0 + 8 + (math.Log10(v)-left)/max(right-left, 0.1)*(w-18) }
		for e := lo; e <= hi; e++ {
			v := math.Pow(10, e)
			fmt.Fprintf(&b, `<text x="%.0f" y="%.0f" text-anchor="end">%s</text><path d="M%.0f %.1f h%.0f" stroke="#eee"/>`+"\n", x0-3, y(v)+3, short(v), x0, y(v), w)
		}
		marked := make(map[float64]bool)
		for _, l := range p.Lines {
			points := ""
			for j, v := range l.Table.Rows[p.row()] {
				if math.IsNaN(v) {
					continue
				}
				at := l.Table.Peers[j]
				points += fmt.Sprintf("%.1f,%.1f ", x(at), y(v))
				fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="2" fill="%s"/>`, x(at), y(v), l.Colour)
				if !marked[at] {
					marked[at] = true
					fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`, x(at), y0+h+11, short(at))
				}
			}
			fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/>`+"\n", strings.TrimSpace(points), l.Colour)
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func (p Panel) row() string {
	if p.Row != "" {
		return p.Row
	}
	return p.Title
}

type axis struct{ low, high float64 }

func newAxis() *axis { return &axis{math.Inf(1), math.Inf(-1)} }

func (a *axis) take(v float64) { a.low, a.high = min(a.low, max(v, least)), max(a.high, max(v, least)) }

func escape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;").Replace(s)
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
