// Package metric declares Prometheus metrics: each with its labels, so that docs/metrics.md, alerts
// and dashboards can be checked against what the components serve.
package metric

import (
	"runtime"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Prefix begins the name of every metric of ours.
const Prefix = "isthmus_"

// A Family is one metric as it is declared.
type Family struct {
	Name   string // with Prefix
	Help   string // one sentence
	Type   dto.MetricType
	Labels []string // that its series have
	desc   *prometheus.Desc
}

// A Catalogue has the families that a package declares. Package variables fill it, so that no family
// is declared without being in it; afterwards it is only read.
type Catalogue struct{ families []*Family }

// Gauge declares a gauge, whose name goes without Prefix.
func (c *Catalogue) Gauge(name, help string, labels ...string) *Family {
	return c.declare(name, help, dto.MetricType_GAUGE, labels)
}

// Counter declares a counter.
func (c *Catalogue) Counter(name, help string, labels ...string) *Family {
	return c.declare(name, help, dto.MetricType_COUNTER, labels)
}

// Histogram declares a histogram.
func (c *Catalogue) Histogram(name, help string, labels ...string) *Family {
	return c.declare(name, help, dto.MetricType_HISTOGRAM, labels)
}

func (c *Catalogue) declare(name, help string, kind dto.MetricType, labels []string) *Family {
	name = Prefix + name
	f := &Family{name, help, kind, labels, prometheus.NewDesc(name, help, labels, nil)}
	c.families = append(c.families, f)
	return f
}

// Families are all that were declared, by name.
func (c *Catalogue) Families() []*Family {
	return slices.SortedFunc(slices.Values(c.families), func(a, b *Family) int { return strings.Compare(a.Name, b.Name) })
}

// Describe implements that part of prometheus.Collector for a collector of all the families.
func (c *Catalogue) Describe(out chan<- *prometheus.Desc) {
	for _, f := range c.families {
		out <- f.desc
	}
}

// Sample is one series of a gauge or a counter; values are those of its labels, in their order.
func (f *Family) Sample(v float64, values ...string) prometheus.Metric {
	kind := prometheus.GaugeValue
	if f.Type == dto.MetricType_COUNTER {
		kind = prometheus.CounterValue
	}
	return prometheus.MustNewConstMetric(f.desc, kind, v, values...)
}

// Failed tells a scraper that the family could not be read.
func (f *Family) Failed(err error) prometheus.Metric { return prometheus.NewInvalidMetric(f.desc, err) }

// Options are those of a counter that the client library keeps.
func (f *Family) Options() prometheus.CounterOpts {
	return prometheus.CounterOpts{Name: f.Name, Help: f.Help}
}

// Common has what every component serves.
var Common Catalogue

var build = Common.Gauge("build_info", "Always 1; the labels have the versions of Isthmus and Go.", "version", "goversion")

// Build collects isthmus_build_info.
func Build(version string) prometheus.Collector { return buildInfo(version) }

type buildInfo string

func (buildInfo) Describe(out chan<- *prometheus.Desc) { Common.Describe(out) }

func (b buildInfo) Collect(out chan<- prometheus.Metric) {
	out <- build.Sample(1, string(b), runtime.Version())
}
