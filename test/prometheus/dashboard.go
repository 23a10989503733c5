// Package prometheus tests our alerts and our dashboard with Prometheus's own parser, engine,
// database and rules. The dashboard's queries run over a recording of a fleet.
package prometheus

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/tsdb"
)

var promQL = parser.NewParser(parser.Options{})

// A Dashboard has the fields of a Grafana dashboard that the tests read.
type Dashboard struct {
	Panels []struct {
		Title   string
		Targets []struct{ Expr, LegendFormat string }
	}
}

// ReadDashboard reads the file of a dashboard.
func ReadDashboard(name string) (d Dashboard, err error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return d, err
	}
	return d, json.Unmarshal(text, &d)
}

// A Recording holds the samples that a scraper got from a fleet, in Prometheus's own database.
type Recording struct {
	Begin, End time.Time
	Step       time.Duration // interval of the scrapes
	db         *tsdb.DB
	engine     *promql.Engine
}

// Open loads a file that test/fleet has recorded into a database in dir.
func Open(name, dir string) (*Recording, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // errors do not matter: the file was only read
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<20)
	var begin int64
	var step string
	if lines.Scan(); lines.Err() == nil {
		_, err = fmt.Sscan(lines.Text(), &begin, &step)
	}
	r := &Recording{Begin: time.Unix(begin, 0)}
	if err == nil {
		r.Step, err = time.ParseDuration(step)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: first line: %w", name, err)
	}
	if r.db, err = tsdb.Open(dir, slog.New(slog.DiscardHandler), nil, tsdb.DefaultOptions(), nil); err != nil {
		return nil, err
	}
	r.engine = promql.NewEngine(promql.EngineOpts{
		Logger: slog.New(slog.DiscardHandler), MaxSamples: 10_000_000, Timeout: time.Minute,
		EnableAtModifier: true, EnableNegativeOffset: true, Parser: promQL,
	})
	into := r.db.Appender(context.Background())
	for lines.Scan() {
		if err := r.add(lines.Text(), func(series labels.Labels, at time.Time, v float64) error {
			_, err := into.Append(0, series, at.UnixMilli(), v)
			return err
		}); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return r, into.Commit()
}

// add adds a line of the recording. When a series ends, it adds Prometheus's stale marker.
// Otherwise the series would seem to continue for five minutes.
func (r *Recording) add(line string, sample func(labels.Labels, time.Time, float64) error) error {
	series, values, err := promQL.ParseSeriesDesc(line)
	if err != nil {
		return err
	}
	before := false
	for i, v := range values {
		at := r.Begin.Add(time.Duration(i) * r.Step)
		if at.After(r.End) {
			r.End = at
		}
		switch {
		case !v.Omitted:
			err = sample(series, at, v.Value)
		case before:
			err = sample(series, at, math.Float64frombits(value.StaleNaN))
		}
		if err != nil {
			return err
		}
		before = !v.Omitted
	}
	return nil
}

// Close closes the database.
func (r *Recording) Close() error { return r.db.Close() }

// Fill replaces the dashboard's variables in a query by the chosen values. The window of rates is
// the value that Grafana computes from the scrape interval.
func (r *Recording) Fill(expr string, chosen map[string]string) string {
	pairs := []string{"$__rate_interval", model.Duration(4 * r.Step).String()}
	for name, as := range chosen {
		pairs = append(pairs, "$"+name, as)
	}
	return strings.NewReplacer(pairs...).Replace(expr)
}

// Over evaluates a query at the time of each scrape.
func (r *Recording) Over(ctx context.Context, query string) (promql.Matrix, error) {
	q, err := r.engine.NewRangeQuery(ctx, r.db, nil, query, r.Begin, r.End, r.Step)
	if err != nil {
		return nil, err
	}
	defer q.Close()
	m, err := q.Exec(ctx).Matrix()
	all := make(promql.Matrix, len(m)) // copy the points, which the engine reuses after Close
	for i, s := range m {
		s.Floats = append([]promql.FPoint(nil), s.Floats...)
		all[i] = s
	}
	return all, err
}
