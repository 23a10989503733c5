package gateway

import (
	"encoding/binary"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/cputime"
	"github.com/isthmus-net/isthmus/internal/metric"
	"github.com/isthmus-net/isthmus/natengine"
)

// crowdOf returns n peers, each with a /20 and a /24 as its networks here.
func crowdOf(n int) []fabric.Peer {
	peers := make([]fabric.Peer, n)
	for i := range peers {
		at := func(base string, bits, shift int) string {
			a := netip.MustParseAddr(base).As4()
			binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])+uint32(i)<<shift)
			return netip.PrefixFrom(netip.AddrFrom4(a), bits).String()
		}
		peers[i] = fabricPeer(1, fmt.Sprintf("%08x-0000-4000-8000-000000000000", i+1), fmt.Sprintf("peer-%d", i), at("11.0.0.0", 20, 12), at("100.64.0.0", 24, 8))
		peers[i].PublicKey = key(byte(1))
		binary.BigEndian.PutUint32(peers[i].PublicKey[4:], uint32(i))
		peers[i].Remote.Pod, peers[i].Remote.External = netip.MustParsePrefix("10.244.0.0/20"), netip.MustParsePrefix("10.245.0.0/24")
	}
	return peers
}

// BenchmarkScrape measures one response of /metrics, if a quarter of the peers have had drops.
func BenchmarkScrape(b *testing.B) {
	for _, n := range []int{10, 100, 1000, 4000} {
		b.Run(fmt.Sprintf("peers=%d", n), func(b *testing.B) {
			g := newTestLoop(b, crowdOf(n)...)
			for i, p := range g.now.peers {
				g.metrics.observeRTT(p.ID, 1e6)
				if i%4 == 0 {
					g.engine.Count(p.state, 0, 1)
					g.engine.Count(p.state, 1, 2)
				}
			}
			h := g.metricsHandler()
			b.ReportAllocs()
			var w *httptest.ResponseRecorder
			before := cputime.Used(b)
			for b.Loop() {
				w = httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
			}
			b.ReportMetric((cputime.Used(b)-before).Seconds()*1000/float64(b.N), "cpu-ms/op")
			b.ReportMetric(float64(w.Body.Len()), "octets")
			b.ReportMetric(float64(strings.Count(w.Body.String(), "\n")-2*strings.Count(w.Body.String(), "# TYPE")), "series")
		})
	}
}

// An idle peer has no series for events that have not happened, and none for an address family
// that it does not use.
func TestAScrapeOmitsSeriesThatAreAlwaysZero(t *testing.T) {
	g := newTestLoop(t, crowdOf(50)...)
	text := g.scrape(t)
	for _, absent := range []string{"isthmus_drops_total", "isthmus_peer_nat_session_events_total", "isthmus_peer_too_big_total",
		"isthmus_probe_rejected_total", `family="ipv6"`, "isthmus_peer_probe_rtt"} {
		if strings.Contains(text, absent) {
			t.Errorf("%s is there, though nothing of it has happened", absent)
		}
	}
	if n := strings.Count(text, `peer="00000007-`); n == 0 || n > 25 {
		t.Errorf("a peer at rest has %d series; want some, and at most 25", n)
	}
	g.engine.Count(g.now.peers[6].state, natengine.Inbound, natengine.Drops()[2])
	want := fmt.Sprintf(`isthmus_drops_total{direction="inbound",peer="00000007-0000-4000-8000-000000000000",reason=%q} 1`, natengine.Drops()[2])
	if text := g.scrape(t); !strings.Contains(text, want+"\n") || strings.Count(text, "isthmus_drops_total{") != 1 {
		t.Errorf("missing, or not alone: %s", want)
	}
}

// The series are written without the checks of a Prometheus registry, so the test makes these
// checks.
func TestAScrapePassesTheChecksOfARegistry(t *testing.T) {
	g := newTestLoop(t, crowdOf(50)...)
	for i, p := range g.now.peers {
		for d, reason := range natengine.Drops() {
			if (i+d)%3 == 0 {
				g.engine.Count(p.state, directions[d%2], reason)
			}
		}
	}
	scraped, err := (prometheus.Gatherers{g.metrics}).Gather()
	if err != nil {
		t.Error(err)
	}
	declared := make(map[string]string)
	for _, f := range slices.Concat(Families(), metric.Common.Families()) {
		declared[f.Name] = strings.Join(slices.Sorted(slices.Values(f.Labels)), " ")
	}
	seen := 0
	for _, f := range scraped {
		if !strings.HasPrefix(f.GetName(), metric.Prefix) {
			continue
		}
		seen++
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName())
			}
			if want, ok := declared[f.GetName()]; !ok || strings.Join(labels, " ") != want {
				t.Fatalf("%s has labels %v, declared are %q (%v)", f.GetName(), labels, want, ok)
			}
		}
	}
	if seen < 30 {
		t.Errorf("%d families; want most of %d", seen, len(declared))
	}
}

func TestGatherersRefuseAMetricNameUsedTwice(t *testing.T) {
	g := newTestLoop(t, crowdOf(1)...)
	if _, err := (Gatherers{g.metrics, g.metrics}).Gather(); err == nil {
		t.Error("two sources of the same families are one answer")
	}
}

// A scrape while peers are added and removed is consistent, and blocks nothing.
func TestScrapesAreConsistentWhilePeersChange(t *testing.T) {
	g := newTestLoop(t, crowdOf(40)...)
	stop := make(chan struct{})
	var group sync.WaitGroup
	for range 2 {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := (prometheus.Gatherers{g.metrics}).Gather(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range 20 {
		peers := decided(t, fabric.Intent{ClusterID: "11111111-0000-4000-8000-000000000000", Peers: crowdOf(20 + i)}).Peers
		// Change the peers as the control loop does in accept and put.
		survey := g.survey(Config{MTU: 1440, PrivateKey: g.now.config.PrivateKey}, peers, false)
		if err := g.setRules(&survey); err != nil {
			t.Error(err)
		}
		g.now.peers = survey.peers
		g.publish()
	}
	close(stop)
	group.Wait()
}
