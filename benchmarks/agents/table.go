package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

// figures is the content of a results file: the machine and commit of the run, and one column for
// each size.
type figures struct {
	where string
	all   []*result
}

// text prints the table, with a row for each figure that any size has.
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

// rows returns the names of all rows. A row's place follows from the first size that has the row.
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

// value returns a printed figure, or the empty string if this size lacks it.
func (r *result) value(what string) string {
	if i := slices.IndexFunc(r.rows, func(row row) bool { return row.what == what }); i >= 0 {
		return r.rows[i].value
	}
	return ""
}

// readFigures parses a file that text has printed. A missing file yields no figures.
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
				return f, fmt.Errorf("%s: %q: want a table that this program has written (%w)", name, cell, err)
			}
			s.pods /= s.nodes
			f.all = append(f.all, &result{size: s})
		}
	}
	return f, nil
}

// unfinished reads the figures of an interrupted run. It ignores figures of another commit.
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

// commit extracts the commit from a line of measure.Where. It drops "-dirty", because the results
// file itself may be the only uncommitted change.
func commit(where string) string {
	_, rest, _ := strings.Cut(where, "commit ")
	name, _, _ := strings.Cut(rest, ",")
	return strings.TrimSuffix(name, "-dirty")
}
