package gateway

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/isthmus-net/isthmus/internal/metric"
)

// families is the catalogue of the gateway's metrics.
var families metric.Catalogue

// Families returns the metrics of a running gateway, sorted by name.
func Families() []*metric.Family { return families.Families() }

// A family is one metric of the gateway, with all its series.
//
// With a thousand peers a scrape has tens of thousands of series. A prometheus.Collector
// processes each of them several times: it hashes the Desc, checks and sorts the labels, and
// compares the series with all others. The gateway builds the encoder's protobuf messages
// directly instead, and all series of a peer share their labels.
type family = metric.Family

func gauge(name, help string, labels ...string) *family { return families.Gauge(name, help, labels...) }

func counter(name, help string, labels ...string) *family {
	return families.Counter(name, help, labels...)
}

// labels are the labels of a series, sorted by name. Several series may share them, so they are
// immutable.
type labels []*dto.LabelPair

// labelled returns labels made from alternating names and values.
func labelled(pairs ...string) labels { return labels(nil).with(pairs...) }

// with returns a copy of l with further labels, given as alternating names and values.
func (l labels) with(pairs ...string) labels {
	all := append(make(labels, 0, len(l)+len(pairs)/2), l...)
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, &dto.LabelPair{Name: &pairs[i], Value: &pairs[i+1]})
	}
	slices.SortFunc(all, func(a, b *dto.LabelPair) int { return cmp.Compare(a.GetName(), b.GetName()) })
	return all
}

// A scrape builds the series for one scrape request.
type scrape struct {
	families map[*family]*dto.MetricFamily

	// Structs that were allocated in advance and are not used yet. Each new series takes its
	// structs from these slices.
	metrics  []dto.Metric
	gauges   []dto.Gauge
	counters []dto.Counter
	values   []float64
}

// scrapeChunk is the number of series that share one allocation.
const scrapeChunk = 512

// next removes the first of the unused elements in rest, and returns a pointer to it. If none is
// left, it allocates scrapeChunk new ones.
func next[T any](rest *[]T) *T {
	if len(*rest) == 0 {
		*rest = make([]T, scrapeChunk)
	}
	p := &(*rest)[0]
	*rest = (*rest)[1:]
	return p
}

// add adds a series with the value v. Its labels must be unique in the family.
func (s *scrape) add(f *family, v float64, l labels) {
	all := s.families[f]
	if all == nil {
		all = &dto.MetricFamily{Name: &f.Name, Help: &f.Help, Type: &f.Type}
		s.families[f] = all
	}
	m, value := next(&s.metrics), next(&s.values)
	m.Label, *value = l, v
	if f.Type == dto.MetricType_COUNTER {
		m.Counter = next(&s.counters)
		m.Counter.Value = value
	} else {
		m.Gauge = next(&s.gauges)
		m.Gauge.Value = value
	}
	all.Metric = append(all.Metric, m)
}

// count adds a series for a counter, but only if n is not 0: most of these counters are 0 for
// most peers.
func (s *scrape) count(f *family, n uint64, l labels, more ...string) {
	if n > 0 {
		s.add(f, float64(n), l.with(more...))
	}
}

// Gatherers joins the metrics of several gatherers, which must have no metric name in common.
// Unlike prometheus.Gatherers it does not compare each series with all others.
type Gatherers []prometheus.Gatherer

// Gather implements prometheus.Gatherer.
func (g Gatherers) Gather() (all []*dto.MetricFamily, err error) {
	for _, each := range g {
		families, failed := each.Gather()
		all, err = append(all, families...), errors.Join(err, failed)
	}
	slices.SortFunc(all, func(a, b *dto.MetricFamily) int { return cmp.Compare(a.GetName(), b.GetName()) })
	for i := 1; i < len(all); i++ {
		if all[i].GetName() == all[i-1].GetName() {
			return nil, fmt.Errorf("metric %s has two sources; want one", all[i].GetName())
		}
	}
	return all, err
}
