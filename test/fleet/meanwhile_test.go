package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	isthmusv1 "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// watched lists faults of TestDiagnoseNamesEachFault whose reports TestReportsAgreeWithTraffic
// checks while they last. acceptable lists additional reports, as CLUSTER/HOP REASON. They are no
// errors until diagnose has evidence for the right one.
var watched = []struct {
	fault      string
	acceptable []string
	lasts      time.Duration // duration of the fault; 0: half a minute
}{
	{fault: "the policy of a node's chain FORWARD is DROP"},
	{fault: "UDP is dropped on the way, in both directions", acceptable: []string{"a/tunnel ProbeUnanswered", "b/tunnel ProbeUnanswered", "b/tunnel PeerSilent", "a/tunnel AnswersLost", "b/tunnel AnswersLost"},
		lasts: 70 * time.Second}, // long enough that agents notice the outage; they must not report a fault of the overlay
	{fault: "a firewall in front of the peer drops UDP from here", acceptable: []string{"a/tunnel ProbeUnanswered", "b/tunnel ProbeUnanswered", "b/tunnel PeerSilent", "a/tunnel PeerSilent"}},
	{fault: "a path drops even packets of the minimum size", acceptable: []string{"a/tunnel ProbeUnanswered", "b/tunnel ProbeUnanswered", "b/tunnel PathMTU"}},
	{fault: "the peer's API server does not answer"},
	{fault: "a node is not ready"},
	{fault: "a node's address changed"},
	{fault: "the disk of a node is full, and its route agent starts again"},
	{fault: "the active gateway is frozen (SIGSTOP), and another takes over", acceptable: []string{"a/tunnel ProbeUnanswered", "b/tunnel ProbeUnanswered", "b/tunnel PeerSilent", "a/gateway GatewaySilent"}},
	{fault: "the tenant namespace of the peering was deleted"},
	{fault: "the peer's tenant namespace was deleted"},
	{fault: "the gateways' Deployment was scaled to 0"},
	{fault: "the standby's Pod is Pending"},
	{fault: "the standby's image cannot be pulled"},
	{fault: "the state directory of a route agent is read-only, and it starts again"},
}

// sawMeanwhile is the file with the results of the run that docs/troubleshooting.md shows.
const sawMeanwhile = "testdata/meanwhile.json"

// A moment holds the reports at one time after a fault began or was repaired.
type moment struct {
	After    string   // for example "2 s" or "mended, 2 s"
	Traffic  bool     // a pod of cluster a reaches a pod of cluster b
	Status   string   // the line of the peering in `isthmus status` of cluster a
	Kubectl  string   // condition Ready of a's Peering
	Diagnose []string // the broken hops according to `isthmus diagnose` with access to both sides
	Metrics  string
}

// Reports must agree with the traffic. If a fault should not stop traffic, the Peering must be ready
// while pods reach each other. While a fault lasts, the reports may name only this fault, and after
// its repair none.
func TestReportsAgreeWithTraffic(t *testing.T) {
	if !*long {
		t.Skip("it takes ten minutes: -long")
	}
	hosts.Need(t, "nft", "setpriv")
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 2), clusterSpec("10.244.0.0/16", 2)}})
	s := &troubleSite{Fleet: f, a: f.Clusters[0], b: f.Clusters[1]}
	peer(t, f, s.a, s.b)
	kubelets, stop := context.WithCancel(t.Context())
	defer stop()
	for _, c := range f.Clusters {
		go c.Kubelets(kubelets)
	}
	to := seen(t, s.a, s.b, s.b.Pods[len(s.b.Pods)-1].Addr)
	well := func(t *testing.T) {
		t.Helper()
		eventually(t, "a peering in which everything works", func() error {
			if out, err := f.Isthmus(t.Context(), "diagnose", "--context", s.a.Name, "--remote-context", s.b.Name); err != nil {
				return fmt.Errorf("%w\n%s", err, out)
			}
			_, err := podOn(t, s.a, 0).Ping(t.Context(), to)
			return err
		})
	}
	well(t)
	all := sawBefore(t) // keep earlier results: a run may cover only some of the faults
	for _, w := range watched {
		at := slices.IndexFunc(troubles, func(tr trouble) bool { return tr.fault == w.fault })
		if at < 0 {
			t.Fatalf("no fault is called %q", w.fault)
		}
		tr := &troubles[at]
		t.Run(strings.ReplaceAll(tr.fault, " ", "_"), func(t *testing.T) {
			s.node = 0
			said := s.recordMoments(t, tr, to, w.lasts)
			well(t)
			for _, m := range said {
				t.Logf("%+v", m)
				m.judge(t, tr, w.acceptable)
			}
			all[tr.fault] = said
		})
	}
	if *update && !t.Failed() {
		text, err := json.MarshalIndent(all, "", "  ")
		must(t, err)
		must(t, os.WriteFile(sawMeanwhile, append(text, '\n'), 0o644))
	}
}

// recordMoments causes a fault, collects reports, repairs the fault after half a minute or more,
// and collects reports again.
func (s *troubleSite) recordMoments(t *testing.T, tr *trouble, to netip.Addr, lasts time.Duration) (said []moment) {
	ask := func(after string, at time.Time) {
		time.Sleep(time.Until(at))
		m := moment{After: after}
		_, err := podOn(t, s.a, s.node).PingWith(t.Context(), to, lab.PingOptions{Wait: time.Second})
		m.Traffic = err == nil
		m.Status, _ = peeringStatus(t.Context(), s.Fleet, s.a)
		m.Kubectl = s.readyColumn(t)
		if m.Diagnose, _, err = diagnose(t.Context(), s.Fleet, s.a, s.b, true); err != nil {
			m.Diagnose, _, _ = diagnose(t.Context(), s.Fleet, s.a, s.b, false) // b does not respond
		}
		m.Metrics = tellingMetrics(t.Context(), s.a)
		said = append(said, m)
	}
	tr.breaks(t, s)
	begin := time.Now()
	for _, n := range []int{2, 10, 30} {
		ask(fmt.Sprintf("%d s", n), begin.Add(time.Duration(n)*time.Second))
	}
	time.Sleep(time.Until(begin.Add(lasts)))
	tr.heals(t, s)
	begin = time.Now()
	for _, n := range []int{2, 10} {
		ask(fmt.Sprintf("mended, %d s", n), begin.Add(time.Duration(n)*time.Second))
	}
	return said
}

// readyColumn returns the column READY of `kubectl get peerings` in cluster a.
func (s *troubleSite) readyColumn(t *testing.T) string {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	p, err := s.a.Peering(ctx, s.b)
	if err != nil {
		return "no answer"
	}
	c := meta.FindStatusCondition(p.Status.Conditions, isthmusv1.ConditionReady)
	if c == nil {
		return "nothing"
	}
	return fmt.Sprintf("%s %s", c.Status, c.Reason)
}

func (m moment) judge(t *testing.T, tr *trouble, acceptable []string) {
	t.Helper()
	harmless := tr.ready || tr.alone == ""
	if harmless && m.Traffic && (!strings.HasPrefix(m.Status, "yes") || !strings.HasPrefix(m.Kubectl, "True")) {
		t.Errorf("after %s: traffic passes, and status says %q, kubectl %q", m.After, m.Status, m.Kubectl)
	}
	for _, hop := range m.Diagnose {
		if hop != tr.alone && hop != tr.both && !slices.Contains(acceptable, hop) {
			t.Errorf("after %s: %s is blamed", m.After, hop)
		}
	}
	if m.After == "30 s" && tr.both != "" && !tr.deaf && !slices.Contains(m.Diagnose, tr.both) {
		t.Errorf("after %s: %v are named, want %s", m.After, m.Diagnose, tr.both)
	}
}

// sawBefore returns the moments in sawMeanwhile by fault.
func sawBefore(t *testing.T) map[string][]moment {
	t.Helper()
	saw := map[string][]moment{}
	text, err := os.ReadFile(sawMeanwhile)
	must(t, err)
	must(t, json.Unmarshal(text, &saw))
	return saw
}

// meanwhileRows returns the rows of the table in docs/troubleshooting.md: for each fault, the
// moments at which something changed. It leaves out a moment 2 s after the fault or the repair at
// which all is well. Faults without a row are in the list uneventful.
func meanwhileRows(t *testing.T) (rows [][]string, uneventful string) {
	saw := sawBefore(t)
	rows = [][]string{{"what is wrong", "after", "packets pass", "`isthmus status` in a", "`kubectl get peerings` in a", "`isthmus diagnose` of a and b", "metrics"}}
	well := []string{"yes", "yes Connected", "True Connected", "works", ""}
	var without []string
	for _, w := range watched {
		if len(saw[w.fault]) == 0 {
			t.Errorf("%s: never made with -update", w.fault)
		}
		fault, last := w.fault, []string(nil)
		for _, m := range saw[w.fault] {
			passes, broken := "no", "works"
			if m.Traffic {
				passes = "yes"
			}
			if len(m.Diagnose) > 0 {
				broken = code(strings.Join(m.Diagnose, ", "))
			}
			cells := []string{passes, m.Status, m.Kubectl, broken, otherMetrics(m.Metrics, m.Status)}
			soon := m.After == "2 s" || m.After == "mended, 2 s"
			if !slices.Equal(cells, last) && !(soon && slices.Equal(cells, well)) {
				rows = append(rows, append([]string{fault, m.After}, cells...))
				fault = ""
			}
			last = cells
		}
		if fault != "" {
			without = append(without, fault)
		}
	}
	return rows, "\nNo column shows these faults, and packets pass:\n\n" + list(without)
}
