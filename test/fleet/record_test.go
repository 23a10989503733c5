package fleet

import (
	"bytes"
	"compress/gzip"
	"context"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/fleet"
	own "github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

var record = flag.String("record", "", "file to write what a scraper gets from a fleet, for the tests of the dashboard; six minutes")

// scrapeInterval is the interval between the samples of the recording.
const scrapeInterval = 5 * time.Second

// A recording holds samples of metrics, as a scraper receives them.
type recording struct {
	begin   time.Time
	scrapes int
	series  map[string][]string
}

// recorded matches the metrics that alerts and the dashboard may use.
var recorded = regexp.MustCompile(`^((?:isthmus_\w+|process_cpu_seconds_total|process_resident_memory_bytes|leader_election_master_status|controller_runtime_reconcile_errors_total))(?:\{(.*)\})? (\S+)$`)

// scrape reads all components of a cluster concurrently. A component that does not respond has no
// samples, and its metric up is 0.
func (r *recording) scrape(ctx context.Context, c *fleet.Cluster) {
	type answer struct {
		name, text string
		err        error
	}
	names := c.Components()
	answers := make(chan answer, len(names))
	for _, name := range names {
		go func() {
			ctx, cancel := context.WithTimeout(ctx, scrapeInterval/2)
			defer cancel()
			text, err := c.Scrape(ctx, name)
			answers <- answer{name, text, err}
		}()
	}
	for range names {
		a := <-answers
		job, _, _ := strings.Cut(a.name, "-")
		target := fmt.Sprintf(`cluster=%q,namespace=%q,job="isthmus-%s",instance=%q,pod="isthmus-%s"`, c.Name, fleet.Namespace, job, a.name, a.name)
		if a.err != nil {
			r.sample("up{"+target+"}", "0")
			continue
		}
		r.sample("up{"+target+"}", "1")
		for line := range strings.SplitSeq(a.text, "\n") {
			if m := recorded.FindStringSubmatch(line); m != nil {
				r.sample(m[1]+"{"+strings.TrimSuffix(target+","+m[2], ",")+"}", m[3])
			}
		}
	}
}

func (r *recording) sample(series, value string) {
	r.series[series] = append(r.padded(series), value)
}

// padded returns the samples of a series up to now, with a mark for each missing sample.
func (r *recording) padded(series string) []string {
	all := r.series[series]
	return append(all, slices.Repeat([]string{"_"}, r.scrapes-len(all))...)
}

// write writes the recording in the notation of promtool: the time of the first sample, then one
// line for each series.
func (r *recording) write(file string) error {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return err
	}
	fmt.Fprintf(z, "%d %v\n", r.begin.Unix(), scrapeInterval)
	for _, name := range slices.Sorted(maps.Keys(r.series)) {
		fmt.Fprint(z, name)
		all := r.padded(name)
		for i := 0; i < len(all); {
			n := 1
			for i+n < len(all) && all[i+n] == all[i] {
				n++
			}
			switch {
			case n == 1:
				fmt.Fprintf(z, " %s", all[i])
			case all[i] == "_":
				fmt.Fprintf(z, " _x%d", n)
			default:
				fmt.Fprintf(z, " %sx%d", all[i], n-1)
			}
			i += n
		}
		fmt.Fprintln(z)
	}
	if err := z.Close(); err != nil {
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o644)
}

// TestRecordDashboardData runs a cluster with two peers for some minutes, with traffic and a
// sequence of faults, and writes the recording. It asserts nothing: the tests of the dashboard use
// the recording.
func TestRecordDashboardData(t *testing.T) {
	if *record == "" {
		t.Skip("takes six minutes: `make record` (-record FILE) runs it")
	}
	f := up(t, lab.Spec{Tunnels: 2, Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 2)), inPods(clusterSpec("10.244.128.0/18", 2)), inPods(clusterSpec("172.20.0.0/22", 2)),
	}})
	a, b, c := f.Clusters[0], f.Clusters[1], f.Clusters[2]
	r := &recording{begin: time.Now(), series: map[string][]string{}}
	const wireGuard = "udp dport 5871-5879"
	block := func(h *lab.Host, what string) {
		filter(t, h, "add chain ip fault in { type filter hook input priority 0; }; add rule ip fault in "+what+" drop")
	}
	var killed int
	steps := []struct {
		after time.Duration
		what  string
		do    func()
	}{
		{10 * time.Second, "peer b", func() { peer(t, f, a, b) }},
		{20 * time.Second, "peer c", func() { peer(t, f, a, c) }},
		{30 * time.Second, "traffic", func() {
			from, to := remotePod(t, a), remotePod(t, b)
			talk(t, from, to, seen(t, a, b, to.Addr))
			from, to = podOn(t, a, 0), podOn(t, c, 0)
			at := seen(t, a, c, to.Addr)
			talk(t, from, to, at)
			go visitor(t.Context(), a.Nodes[0].Host, at) // traffic with NAPT
			for _, pair := range [][2]*fleet.Cluster{{a, b}, {b, a}} {
				go knocker(t.Context(), podOn(t, pair[0], 0).Host, statusOf(t, pair[0], pair[1]).Remote.ExternalCIDRSeen)
			}
		}},
		{100 * time.Second, "kill the active gateway", func() { killed = active(t, a); must(t, a.Kill(fleet.Gateway(killed))) }},
		{125 * time.Second, "start it again", func() { must(t, a.Start(t.Context(), fleet.Gateway(killed))) }},
		{150 * time.Second, "large packets to c vanish", func() { block(c.GatewayHost(active(t, c)), wireGuard+" meta length gt 1380") }},
		{230 * time.Second, "they do not", func() { filter(t, c.GatewayHost(active(t, c)), "") }},
		{240 * time.Second, "somebody removes a rule of the agent", func() {
			ip(t, a.Nodes[1].Host, "rule del priority %d", own.NodeRulePriority)
		}},
		{250 * time.Second, "kill the manager", func() { must(t, a.Kill(fleet.Manager)) }},
		{270 * time.Second, "start it again", func() { must(t, a.Start(t.Context(), fleet.Manager)) }},
		{300 * time.Second, "a firewall in front of b", func() { block(b.GatewayHost(active(t, b)), wireGuard) }},
		{360 * time.Second, "the end", func() {}},
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(scrapeInterval)
		defer tick.Stop()
		for ctx.Err() == nil {
			for _, of := range []*fleet.Cluster{a, b} {
				r.scrape(t.Context(), of) // a complete last scrape, even after the end of the traffic
			}
			r.scrapes++
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	}()
	for _, s := range steps {
		select {
		case <-t.Context().Done():
		case <-time.After(time.Until(r.begin.Add(s.after))):
		}
		t.Logf("%3.0f s: %s", time.Since(r.begin).Seconds(), s.what)
		s.do()
	}
	stop()
	<-done
	must(t, r.write(*record))
	t.Logf("%d scrapes of %d series", r.scrapes, len(r.series))
}

// visitor fetches a page of 100 kB ten times a second, each time in a new connection.
func visitor(ctx context.Context, from *lab.Host, at netip.Addr) {
	for ctx.Err() == nil {
		_, _ = from.Download(ctx, at, 100_000, 3*time.Second) // continues through faults
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// knocker pings an unused address of the peer.
func knocker(ctx context.Context, from *lab.Host, network string) {
	n, err := netip.ParsePrefix(network)
	if err != nil {
		return
	}
	at := n.Addr()
	for range 99 {
		at = at.Next()
	}
	for ctx.Err() == nil {
		_, _ = from.PingWith(ctx, at, lab.PingOptions{Wait: 200 * time.Millisecond}) // nobody answers
	}
}
