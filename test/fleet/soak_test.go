package fleet

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

var (
	soak       = flag.Duration("soak", 0, "let TestSoak run for so long")
	soakUpdate = flag.Bool("soak-update", false, "write docs/soak.md and docs/soak.svg")
)

// soakRound is the length of one round of churn.
const soakRound = time.Minute

// TestSoak runs two clusters for hours while a third cluster is peered and un-peered, gateways
// and pods are replaced, and flows are opened and closed. The resources of the components must
// not grow.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		t.Skip("takes hours: make soak runs it")
	}
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 2)), clusterSpec("10.244.128.0/18", 2), clusterSpec("10.20.0.0/17", 1)}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)
	from, to := remotePod(t, a), remotePod(t, b)
	at := seen(t, a, b, to.Addr)
	var h history
	var total loss
	defer func() { t.Logf("%v; %d rounds\n%s", total, len(h.at), h.table()) }() // print the results even after a failure
	begin := time.Now()
	for n := 0; time.Since(begin) < *soak; n++ {
		l := echoes(t, from, to, at, 1, soakRound, soakRound, func() { churn(t, f, n, to, at) })
		total.sent, total.lost = total.sent+l.sent, total.lost+l.lost
		s, err := takeSample(t.Context(), a, b)
		must(t, err)
		h.add(time.Since(begin), s)
		t.Logf("%v: %v", time.Since(begin).Round(time.Second), l)
		if t.Failed() {
			break
		}
	}
	for _, grown := range h.grown() {
		t.Error(grown)
	}
	if *soakUpdate && !t.Failed() {
		must(t, os.WriteFile("../../docs/soak.md", []byte(h.page(total)), 0o644))
		must(t, os.WriteFile("../../docs/soak.svg", h.plot(), 0o644))
	}
}

// churn makes the changes of one round. It replaces the active gateway of the first cluster,
// peers and un-peers the third cluster with one of the others, creates and deletes twenty Pods,
// and opens and closes a hundred connections of a node.
func churn(t *testing.T, f *fleet.Fleet, n int, to *lab.Pod, at netip.Addr) {
	a, b, visitor := f.Clusters[0], f.Clusters[1], f.Clusters[2]
	host := []*fleet.Cluster{a, b}[n%2]
	gateway := fleet.Gateway(active(t, a))
	must(t, a.Stop(gateway))
	must(t, a.Start(t.Context(), gateway))

	peer(t, f, visitor, host)
	pod := podOn(t, host, 0)
	_, err := firstPing(t.Context(), visitor.Pods[0].Host, func() (netip.Addr, error) { return visitor.Seen(t.Context(), host, pod.Addr) })
	must(t, err)
	isthmus(t, f, "unpeer", "--context", visitor.Name, "--remote-context", host.Name)

	rollPods(t, b)
	connect(t, a.Nodes[n%2].Host, to, at)
}

// rollPods creates twenty Pods on the first node of a cluster, and deletes them again.
func rollPods(t *testing.T, c *fleet.Cluster) {
	addr := podOn(t, c, 0).Addr
	var pods []*corev1.Pod
	for i := range 20 {
		addr = addr.Next()
		pod := &corev1.Pod{ObjectMeta: object(metav1.NamespaceDefault, fmt.Sprintf("rolled-%d", i)), Spec: corev1.PodSpec{
			NodeName: c.Nodes[0].Name, AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{{Name: "main", Image: "x"}}}}
		must(t, c.Client.Create(t.Context(), pod))
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: addr.String(), PodIPs: []corev1.PodIP{{IP: addr.String()}}}
		must(t, c.Client.Status().Update(t.Context(), pod))
		pods = append(pods, pod)
	}
	for _, pod := range pods {
		must(t, c.Client.Delete(t.Context(), pod, client.GracePeriodSeconds(0))) // there is no kubelet to confirm the deletion
	}
}

// connect opens a hundred connections from a node to a pod of the peer, one after the other. Each
// creates a NAPT flow.
func connect(t *testing.T, from *lab.Host, to *lab.Pod, at netip.Addr) {
	l, err := to.Listen("tcp4", to.Addr.String()+":0")
	must(t, err)
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	where := netip.AddrPortFrom(at, uint16(l.Addr().(*net.TCPAddr).Port)).String()
	for range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		conn, err := from.Dial(ctx, "tcp4", where)
		cancel()
		must(t, err)
		conn.Close()
	}
}

// A sample holds the values of all series at one time, by the name of the series.
type sample map[string]float64

// held lists the metrics of a process in a sample. A series has the value of a metric divided by
// per, in the given unit.
var held = []struct {
	metric, unit string
	per          float64
}{
	{"process_resident_memory_bytes", "memory, MiB", 1 << 20},
	{"go_goroutines", "goroutines", 1},
	{"process_open_fds", "descriptors", 1},
}

// takeSample reads the metrics of the components that are not replaced in a round.
func takeSample(ctx context.Context, a, b *fleet.Cluster) (sample, error) {
	s := sample{}
	for _, c := range []*fleet.Cluster{a, b} {
		for _, name := range c.Components() {
			role, _, _ := strings.Cut(name, "-")
			if c == a && role == "gateway" {
				continue
			}
			text, err := c.Scrape(ctx, name)
			if err != nil {
				return nil, err
			}
			for _, m := range held {
				v, err := lab.SumMetric(text, m.metric, nil)
				if err != nil {
					return nil, err
				}
				s[fmt.Sprintf("%s of %s, %s", name, c, m.unit)] = v / m.per
			}
		}
		for _, of := range append(slices.Clone(kinds), schema.GroupVersionKind{Group: "isthmus.net", Version: "v1alpha1", Kind: "NetworkAllocation"}) {
			var list metav1.PartialObjectMetadataList
			list.SetGroupVersionKind(of)
			if err := c.Client.List(ctx, &list); err != nil {
				return nil, err
			}
			s[fmt.Sprintf("objects of %s", c)] += float64(len(list.Items))
		}
	}
	flows, err := b.Metric(ctx, "isthmus_nat_sessions")
	if err != nil {
		return nil, err
	}
	s[fmt.Sprintf("NAT flows of the active gateway of %s", b)] = flows
	return s, nil
}

// A history is a sequence of samples.
type history struct {
	at      []time.Duration
	samples []sample
}

func (h *history) add(at time.Duration, s sample) {
	h.at, h.samples = append(h.at, at), append(h.samples, s)
}

func (h *history) names() (names []string) {
	if len(h.samples) == 0 {
		return nil
	}
	for name := range h.samples[0] {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (h *history) series(name string) (all []float64) {
	for _, s := range h.samples {
		all = append(all, s[name])
	}
	return all
}

// quarters returns the medians of the second and of the last quarter of a series. The first
// quarter is ignored, because caches fill then.
func (h *history) quarters(name string) (second, last float64) {
	all := h.series(name)
	q := len(all) / 4
	return median(all[q : 2*q]), median(all[len(all)-q:])
}

func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(all))[len(all)/2]
}

// soakLeast is the minimum number of samples for a result.
const soakLeast = 16

// grown returns the series whose last quarter exceeds the second by more than 10 % plus 5.
func (h *history) grown() (all []string) {
	if len(h.samples) < soakLeast {
		return []string{fmt.Sprintf("%d samples say nothing: %d are needed", len(h.samples), soakLeast)}
	}
	for _, name := range h.names() {
		if second, last := h.quarters(name); last > second*1.1+5 {
			all = append(all, fmt.Sprintf("%s: it grows: %.0f in the second quarter, %.0f in the last", name, second, last))
		}
	}
	return all
}

func (h *history) table() string {
	var b strings.Builder
	b.WriteString("| series | second quarter | last quarter | most |\n|---|---|---|---|\n")
	for _, name := range h.names() {
		second, last := h.quarters(name)
		fmt.Fprintf(&b, "| %s | %.0f | %.0f | %.0f |\n", name, second, last, slices.Max(h.series(name)))
	}
	return b.String()
}

func (h *history) page(total loss) string {
	took := strings.TrimSuffix(h.at[len(h.at)-1].Round(time.Minute).String(), "0s")
	return fmt.Sprintf(`# Soak test: what grows in %v of churn

For operators who ask whether a component leaks. Two peered clusters, a and b, carry 1,000 UDP
datagrams a second and a TCP connection of 6.5 Mbit/s each way. In each of %d rounds of a minute,
the active gateway of a is replaced, a third cluster peers with a or b and un-peers, twenty Pods
come and go, and a node opens a hundred connections to a pod of the peer.

The test fails if a TCP connection breaks, a packet for a peer is in the clear, or a series grows:
its median in the last quarter exceeds that in the second quarter by more than a tenth and by more
than five.

    make soak SOAK=%v

%s, %s. %v.

![each series, relative to its median in the second quarter](soak.svg)

%s`, took, len(h.at), took,
		time.Now().Format(time.DateOnly), runtime.Version(), total, h.table())
}

// plot draws each series, relative to its median in the second quarter, as SVG: a panel for each
// unit.
func (h *history) plot() []byte {
	const width, height, left, gap = 640, 120, 40, 34
	panels := []string{"memory, MiB", "goroutines", "descriptors", "objects", "NAT flows"}
	var b strings.Builder
	end := h.at[len(h.at)-1].Seconds()
	for i, panel := range panels {
		top := gap + i*(height+gap)
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" font-weight=\"bold\">%s</text>\n", left, top-6, panel)
		for _, ratio := range []float64{0, 1, 2} {
			y := float64(top) + height*(1-ratio/2)
			fmt.Fprintf(&b, "<text x=\"%d\" y=\"%.0f\">%.0f</text><path d=\"M%d %.0fh%d\" stroke=\"#ccc\"/>\n", left-16, y+4, ratio, left, y, width)
		}
		for _, name := range h.names() {
			second, _ := h.quarters(name)
			if !strings.Contains(name, panel) || second == 0 {
				continue
			}
			var points []string
			for k, v := range h.series(name) {
				points = append(points, fmt.Sprintf("%.1f,%.1f", left+width*h.at[k].Seconds()/end, float64(top)+height*(1-min(v/second, 2)/2)))
			}
			fmt.Fprintf(&b, "<polyline points=\"%s\"><title>%s</title></polyline>\n", strings.Join(points, " "), name)
		}
	}
	return fmt.Appendf(nil, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">
<style>polyline{fill:none;stroke:#1f6f8b;stroke-opacity:.6}</style><rect width="100%%" height="100%%" fill="#fff"/>
%s<text x="%d" y="%d">%v</text></svg>
`, left+width+60, gap+len(panels)*(height+gap)+10, b.String(), left+width-30, gap+len(panels)*(height+gap), h.at[len(h.at)-1].Round(time.Minute))
}

// The test of the soak itself: it must detect growth, but must ignore a cache that fills during the
// first quarter.
func TestSoakDetectsGrowth(t *testing.T) {
	of := func(value func(i int) float64) (h history) {
		for i := range 40 {
			h.add(time.Duration(i)*time.Minute, sample{"x": value(i)})
		}
		return h
	}
	for name, c := range map[string]struct {
		value func(i int) float64
		grows bool
	}{
		"flat":           {func(int) float64 { return 50 }, false},
		"one each round": {func(i int) float64 { return 50 + float64(i) }, true},
		"fills early":    {func(i int) float64 { return 10 * float64(min(i, 9)) }, false},
		"few":            {func(i int) float64 { return float64(i / 10) }, false},
	} {
		h := of(c.value)
		if got := h.grown(); (len(got) > 0) != c.grows {
			t.Errorf("%s: %v", name, got)
		}
	}
}
