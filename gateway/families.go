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

// families are the metrics of the gateway.
var families metric.Catalogue

// Families are the metrics of a running gateway, by name.
func Families() []*metric.Family { return families.Families() }

// A family is one metric of the gateway.
//
// With a thousand peers a scrape has tens of thousands of series. A prometheus.Collector pays for
// each of them several times: a Desc's hash, labels that are checked and sorted, and a comparison
// with every other series. Here the series are written as the messages that the encoder takes, and
// those of one peer share their labels.
type family = metric.Family

func gauge(name, help string, labels ...string) *family { return families.Gauge(name, help, labels...) }

func counter(name, help string, labels ...string) *family {
	return families.Counter(name, help, labels...)
}

// labels are the labels of a series, sorted by name. Series may share them, so nobody changes them.
type labels []*dto.LabelPair

// labelled makes labels from alternating names and values.
func labelled(pairs ...string) labels { return labels(nil).with(pairs...) }

// with returns the labels with others added.
func (l labels) with(pairs ...string) labels {
	all := append(make(labels, 0, len(l)+len(pairs)/2), l...)
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, &dto.LabelPair{Name: &pairs[i], Value: &pairs[i+1]})
	}
	slices.SortFunc(all, func(a, b *dto.LabelPair) int { return cmp.Compare(a.GetName(), b.GetName()) })
	return all
}

// A scrape collects the series for one request.
type scrape struct {
	families map[*family]*dto.MetricFamily

	// Rests of larger allocations, so that a series needs no allocation of its own.
	metrics  []dto.Metric
	gauges   []dto.Gauge
	counters []dto.Counter
	values   []float64
}

// scrapeChunk is how many series share a piece of memory.
const scrapeChunk = 512

// next returns one element of an allocation, and makes a new allocation when that is used up.
func next[T any](rest *[]T) *T {
	if len(*rest) == 0 {
		*rest = make([]T, scrapeChunk)
	}
	p := &(*rest)[0]
	*rest = (*rest)[1:]
	return p
}

// add adds one series. Its labels must be unique in the family.
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

// count adds a series of a counter that is 0 for most peers, unless it is 0.
func (s *scrape) count(f *family, n uint64, l labels, more ...string) {
	if n > 0 {
		s.add(f, float64(n), l.with(more...))
	}
}

// Gatherers joins the families of several gatherers, which must have no name in common. Unlike
// prometheus.Gatherers it does not compare each series with all others.
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
			return nil, fmt.Errorf("metric %s comes from two sources", all[i].GetName())
		}
	}
	return all, err
}
