// Package metric declares Prometheus metrics with their labels. Tests compare docs/metrics.md,
// alerts and dashboards with these declarations.
package metric

import (
	"runtime"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Prefix is the common prefix of the names of all Isthmus metrics.
const Prefix = "isthmus_"

// A Family is one declared metric.
type Family struct {
	Name   string // including Prefix
	Help   string // one sentence
	Type   dto.MetricType
	Labels []string // names of the labels of its series
	desc   *prometheus.Desc
}

// A Catalogue has the families that a package declares. The package's variables fill it at
// initialization. Afterwards it is read-only.
type Catalogue struct{ families []*Family }

// Gauge declares a gauge. Here and below, name does not include Prefix.
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

// Families returns all declared families, sorted by name.
func (c *Catalogue) Families() []*Family {
	return slices.SortedFunc(slices.Values(c.families), func(a, b *Family) int { return strings.Compare(a.Name, b.Name) })
}

// Describe sends the descriptors of all families, to implement prometheus.Collector.
func (c *Catalogue) Describe(out chan<- *prometheus.Desc) {
	for _, f := range c.families {
		out <- f.desc
	}
}

// Sample returns one series of a gauge or a counter. values are the values of the labels, in the
// order of Labels.
func (f *Family) Sample(v float64, values ...string) prometheus.Metric {
	kind := prometheus.GaugeValue
	if f.Type == dto.MetricType_COUNTER {
		kind = prometheus.CounterValue
	}
	return prometheus.MustNewConstMetric(f.desc, kind, v, values...)
}

// Failed returns an invalid metric. It makes gathering the metrics return err.
func (f *Family) Failed(err error) prometheus.Metric { return prometheus.NewInvalidMetric(f.desc, err) }

// Options returns the options of a counter whose value the Prometheus client library keeps.
func (f *Family) Options() prometheus.CounterOpts {
	return prometheus.CounterOpts{Name: f.Name, Help: f.Help}
}

// Common contains the families that every component exports.
var Common Catalogue

var build = Common.Gauge("build_info", "Always 1; the labels have the versions of Isthmus and Go.", "version", "goversion")

// Build returns a collector of isthmus_build_info.
func Build(version string) prometheus.Collector { return buildInfo(version) }

type buildInfo string

func (buildInfo) Describe(out chan<- *prometheus.Desc) { Common.Describe(out) }

func (b buildInfo) Collect(out chan<- prometheus.Metric) {
	out <- build.Sample(1, string(b), runtime.Version())
}
