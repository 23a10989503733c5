package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

// figures is a file of results: where they were measured, and a column for each size.
type figures struct {
	where string
	all   []*result
}

// text has a row for each figure of any size.
func (f figures) text() string {
	var b strings.Builder
	b.WriteString(f.where + "\n\n| |")
	for _, r := range f.all {
		fmt.Fprintf(&b, " %s |", r.size)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(f.all)) + "\n")
	for _, what := range f.rows() {
		b.WriteString("| " + what + " |")
		for _, r := range f.all {
			b.WriteString(" " + r.value(what) + " |")
		}
		b.WriteString("\n")
	}
	return b.String()
}

func (s size) String() string {
	return fmt.Sprintf("%d nodes, %d pods, %d peers", s.nodes, s.nodes*s.pods, s.peers)
}

// rows are what there are figures of, in the order of the first size.
func (f figures) rows() (all []string) {
	for _, r := range f.all {
		for _, row := range r.rows {
			if !slices.Contains(all, row.what) {
				all = append(all, row.what)
			}
		}
	}
	return all
}

// value is a figure as it is printed; empty: there is none.
func (r *result) value(what string) string {
	if at := slices.IndexFunc(r.rows, func(row row) bool { return row.what == what }); at >= 0 {
		return r.rows[at].value
	}
	return ""
}

// number is a figure; 0: there is none.
func (r *result) number(what string) float64 {
	v, _ := strconv.ParseFloat(strings.TrimSuffix(r.value(what), " %"), 64)
	return v
}

// readFigures reads what text has printed; a file that is not there has none.
func readFigures(name string) (f figures, err error) {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err != nil {
		return f, err
	}
	lines := strings.Split(string(b), "\n")
	f.where = lines[0]
	for _, line := range lines[1:] {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|---") {
			continue
		}
		for i, cell := range cells[1:] {
			cell = strings.TrimSpace(cell)
			if what := strings.TrimSpace(cells[0]); what != "" && i < len(f.all) {
				f.all[i].rows = append(f.all[i].rows, row{what, cell})
				continue
			}
			var s size
			if n, err := fmt.Sscanf(cell, "%d nodes, %d pods, %d peers", &s.nodes, &s.pods, &s.peers); n != 3 || s.nodes == 0 {
				return f, fmt.Errorf("%s: %q: want a table as this program writes it (%w)", name, cell, err)
			}
			s.pods /= s.nodes
			f.all = append(f.all, &result{size: s})
		}
	}
	return f, nil
}

// unfinished reads figures that are to be completed. Those of another commit count for nothing.
func unfinished(name, role string) (figures, error) {
	now := figures{where: measure.Where() + "; CPU seconds of the process " + role + "."}
	if name == "" {
		return now, nil
	}
	was, err := readFigures(name)
	if err != nil || commit(was.where) != commit(now.where) {
		return now, err
	}
	return was, nil
}

// commit is that of a line of measure.Where. The file itself may be all that is not committed.
func commit(where string) string {
	_, rest, _ := strings.Cut(where, "commit ")
	name, _, _ := strings.Cut(rest, ",")
	return strings.TrimSuffix(name, "-dirty")
}

// Files of the figures on the page, and where they are on it.
const (
	beforeFile = "benchmarks/agents/before.md"
	afterFile  = "benchmarks/agents/after.md"
	pageFile   = "docs/scale.md"
	plotFile   = "docs/scale.svg"
)

// page writes the figures of both files into the page in a directory, and draws them.
func page(dir string) error {
	var both [2]figures
	for i, name := range []string{beforeFile, afterFile} {
		var err error
		if both[i], err = readFigures(filepath.Join(dir, name)); err != nil {
			return err
		}
		if len(both[i].all) == 0 {
			return fmt.Errorf("%s: there are no figures", name)
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, pageFile))
	if err != nil {
		return err
	}
	text := string(b)
	for name, part := range map[string]string{"agents": sideBySide(both[0], both[1]), "5000 agents": multiplied(both[0], both[1])} {
		begin, end := "<!-- "+name+": go run ./benchmarks/agents -docs . -->\n", "<!-- end of "+name+" -->"
		head, rest, found := strings.Cut(text, begin)
		_, tail, closed := strings.Cut(rest, end)
		if !found || !closed {
			return fmt.Errorf("%s: want a line %q and one %q", pageFile, strings.TrimSpace(begin), end)
		}
		text = head + begin + part + end + tail
	}
	if err := os.WriteFile(filepath.Join(dir, pageFile), []byte(text), 0o644); err != nil {
		return err
	}
	svg, err := plot(filepath.Join(dir, beforeFile), filepath.Join(dir, afterFile))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, plotFile), []byte(svg), 0o644)
}

// sideBySide has two columns for each size that is in both. Rows of nothing but zeros are left out.
func sideBySide(before, after figures) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Before: %s  \nNow: %s\n\n| |", before.where, after.where)
	var pairs [][2]*result
	for _, now := range after.all {
		if at := slices.IndexFunc(before.all, func(r *result) bool { return r.size == now.size }); at >= 0 {
			pairs = append(pairs, [2]*result{before.all[at], now})
			fmt.Fprintf(&b, " %d peers, before | now |", now.peers)
		}
	}
	b.WriteString("\n|---|" + strings.Repeat("---|---|", len(pairs)) + "\n| nodes; pods |")
	for _, p := range pairs {
		fmt.Fprintf(&b, " %d; %d | |", p[1].nodes, p[1].nodes*p[1].pods)
	}
	b.WriteString("\n")
	for _, what := range after.rows() {
		line, nothing := "| "+what+" |", true
		for _, p := range pairs {
			was, is := p[0].value(what), p[1].value(what)
			nothing = nothing && strings.Trim(was+is, "0. %") == ""
			line += " " + was + " | **" + is + "** |"
		}
		if !nothing {
			b.WriteString(line + "\n")
		}
	}
	return b.String()
}

// multiplied is what 5,000 agents cost, by the largest size.
func multiplied(before, after figures) string {
	const agents = 5000
	was, is := before.all[len(before.all)-1], after.all[len(after.all)-1]
	var b strings.Builder
	fmt.Fprintf(&b, "| %d peers | before | now |\n|---|---|---|\n", is.peers)
	for _, l := range []struct {
		text, what string
		factor     float64
		unit       string
	}{
		{"read when all start", "at start: read of the API server, KiB", 1024 * agents / 1e9, "GB"},
		{"watches", "watches", agents, ""},
		{"requests when all start, without watches", "at start: other requests", agents, ""},
		{"read at rest, a second", "at rest: octets a second of the API server", agents / 1e3, "KB"},
		{"requests at rest, a second", "at rest: requests a minute", agents / 60.0, ""},
		{"read at a gateway's move", "the gateway moves: octets read", agents / 1e6, "MB"},
		{"read when a peer's latency changes", "a peer's latency changes: octets read", agents / 1e6, "MB"},
		{"read when a peer is granted networks", "a peer is granted networks: octets read", agents / 1e6, "MB"},
		{"read when an endpoint is mapped", "an endpoint is mapped for a peer: octets read", agents / 1e6, "MB"},
		{"CPU of all agents at a gateway's move", "the gateway moves: CPU, ms", agents / 1e3, "s"},
		{"CPU of all agents when a peer is granted networks", "a peer is granted networks: CPU, ms", agents / 1e3, "s"},
		{"cores of all agents at rest", "at rest: CPU, of a core", agents / 100.0, ""},
	} {
		show := func(r *result) string {
			v := strconv.FormatFloat(l.factor*r.number(l.what), 'f', 1, 64)
			return strings.TrimSpace(strings.TrimSuffix(v, ".0") + " " + l.unit)
		}
		fmt.Fprintf(&b, "| %s | %s | **%s** |\n", l.text, show(was), show(is))
	}
	return b.String()
}
