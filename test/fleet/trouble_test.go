package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

var update = flag.Bool("update", false, "write the tables of docs/troubleshooting.md, with what this run saw")

// diagnosis is the output of `isthmus diagnose -o json`.
type diagnosis struct {
	Broken *hop
	Hops   []hop
}

type hop struct{ Cluster, Hop, State, Reason, Text string }

func (h hop) String() string { return strings.TrimSpace(h.Cluster + "/" + h.Hop + " " + h.Reason) }

// diagnose runs `isthmus diagnose` in cluster a, with access to b if both is true. broken lists the
// broken hops, and begins with the one to repair first. text is the text of that hop, or of all
// hops if none is broken.
func diagnose(ctx context.Context, f *fleet.Fleet, a, b *fleet.Cluster, both bool) (broken []string, text string, err error) {
	args := []string{"diagnose", "--context", a.Name, "-o", "json"}
	if both {
		args = append(args, "--remote-context", b.Name)
	} else {
		args = append(args, b.Name)
	}
	out, failed := f.Isthmus(ctx, args...)
	var d diagnosis
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		return nil, "", fmt.Errorf("isthmus %v: %w (%w)\n%s", args, failed, err, out)
	}
	for _, h := range d.Hops {
		text += h.Text + "\n"
		if h.State == "broken" {
			broken = append(broken, h.String())
		}
	}
	if d.Broken == nil != (len(broken) == 0) {
		return nil, "", fmt.Errorf("broken is %v of %v", d.Broken, broken)
	}
	if d.Broken != nil { // the hop to repair first need not be the first on the path
		i := slices.Index(broken, d.Broken.String())
		broken[0], broken[i], text = broken[i], broken[0], d.Broken.Text
	}
	if failed == nil != (len(broken) == 0) && !slices.ContainsFunc(d.Hops, func(h hop) bool { return h.State == "unknown" || h.State == "waits" }) {
		return nil, "", fmt.Errorf("exit code 0 is %v, broken are %v", failed == nil, broken)
	}
	return broken, text, nil
}

// A witness records the reports of a fault in one run, all from cluster a.
type witness struct {
	Status  string  // the line of the peering in `isthmus status`
	Trace   string  // the hop at which `isthmus trace` reports that a pod's packet ends
	Metrics string  // metrics that report a fault
	Event   string  // the Events of type Warning since the fault began
	Seconds int     // seconds until diagnose gave the expected results
	Healed  int     // seconds after the repair until no hop was broken
	Load    float64 // one-minute load average of the machine when the fault was named
}

// witnessed is the file with the results of the run that docs/troubleshooting.md shows.
const witnessed = "testdata/troubles.json"

// telling matches metrics with values that report a fault.
var telling = regexp.MustCompile(`(?m)^(isthmus_peer_reason\{.*reason="(\w+)".*\} 1|isthmus_manager_peering_ready\{.*reason="(\w+)".*\} 0|isthmus_route_agent_ready 0|isthmus_route_agent_overlay_up\{.*\} 0|isthmus_route_agent_problems [1-9]\d*|isthmus_gateway_standbys 0)$`)

// tellingMetrics returns the metrics of a cluster's components that report a fault.
func tellingMetrics(ctx context.Context, c *fleet.Cluster) string {
	type target struct {
		name string
		host *lab.Host
		port int
	}
	all := []target{{"manager", c.Control.Host, 5876}}
	for i := range c.Nodes {
		all = append(all, target{"gateways", c.GatewayHost(i), 5872}, target{"route agent", c.Nodes[i].Host, 5874})
	}
	found := map[string]bool{}
	answers := map[string]bool{}
	for _, t := range all {
		asking, cancel := context.WithTimeout(ctx, 2*time.Second)
		text, err := t.host.Get(asking, fmt.Sprintf("http://127.0.0.1:%d/metrics", t.port))
		cancel()
		if answers[t.name] = answers[t.name] || err == nil; err != nil && t.name != "gateways" {
			found["no answer of a "+t.name] = true
		}
		for _, m := range telling.FindAllStringSubmatch(text, -1) {
			name, _, _ := strings.Cut(m[1], "{")
			name, _, _ = strings.Cut(name, " ")
			if reason := m[2] + m[3]; reason != "" {
				name += " " + reason
			}
			found[name] = true
		}
	}
	if !answers["gateways"] {
		found["no answer of the gateways"] = true
	}
	return strings.Join(slices.Sorted(maps.Keys(found)), ", ")
}

// warnings returns the Events of type Warning that occurred since a time, each as KIND REASON.
func warnings(ctx context.Context, c *fleet.Cluster, since time.Time) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var list corev1.EventList
	if err := c.Client.List(ctx, &list); err != nil {
		return ""
	}
	said := map[string]bool{}
	for _, e := range list.Items {
		at := e.EventTime.Time // in microseconds; Isthmus writes no Events that have only a lastTimestamp
		if e.Series != nil && e.Series.LastObservedTime.After(at) {
			at = e.Series.LastObservedTime.Time
		}
		if e.Type == corev1.EventTypeWarning && !at.Before(since.Truncate(time.Microsecond)) && strings.HasPrefix(e.ReportingController, "isthmus") {
			said[e.InvolvedObject.Kind+" "+e.Reason] = true
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(said)), ", ")
}

// peeringStatus returns the line of the first peering in `isthmus status`, and whether it is
// fine.
func peeringStatus(ctx context.Context, f *fleet.Fleet, c *fleet.Cluster) (said string, fine bool) {
	out, err := f.Isthmus(ctx, "status", "--context", c.Name, "-o", "json")
	var s struct {
		Peerings []struct{ Status, Reason string }
		Hops     []hop
	}
	if json.Unmarshal([]byte(out), &s) != nil || len(s.Peerings) == 0 {
		code := -1
		if exit := (interface{ ExitCode() int })(nil); errors.As(err, &exit) {
			code = exit.ExitCode()
		}
		return fmt.Sprintf("exit code %d", code), false
	}
	first := s.Peerings[max(0, slices.IndexFunc(s.Peerings, func(p struct{ Status, Reason string }) bool { return p.Status != "True" }))]
	said = map[string]string{"True": "yes", "False": "no", "Unknown": "unknown"}[first.Status]
	if first.Reason != "Unknown" {
		said += " " + first.Reason
	}
	for _, h := range s.Hops {
		if h.State == "broken" {
			said += ", " + h.Hop
		}
	}
	return said, err == nil
}

// traceOf returns the place where a packet from a pod of one cluster to a pod of the other ends.
func traceOf(ctx context.Context, s *troubleSite, from, to string) string {
	out, _ := s.Isthmus(ctx, "trace", "--context", s.a.Name, from, to, "icmp", "--direction", "out", "-o", "json")
	var ways []struct{ Verdict string }
	if json.Unmarshal([]byte(out), &ways) != nil || len(ways) == 0 {
		return "exit code 2"
	}
	where, _, _ := strings.Cut(ways[0].Verdict, ": ")
	where, _, _ = strings.Cut(where, "; ") // after "; ", the output reports that it did not check the path in the other cluster
	if rest := strings.SplitN(ways[0].Verdict, ": ", 3); where == "the peer is down" && len(rest) == 3 {
		where += ": " + rest[1]
	}
	return where
}

// For each fault, diagnose must name this fault and nothing else, with access to one side and to
// both. After the repair it must report nothing. It must not report harmless changes, after which
// pods still reach each other.
func TestDiagnoseNamesEachFault(t *testing.T) {
	hosts.Need(t, "nft", "setpriv")
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 2), clusterSpec("10.244.0.0/16", 2)}})
	s := &troubleSite{Fleet: f, a: f.Clusters[0], b: f.Clusters[1]}
	a, b := s.a, s.b
	peer(t, f, a, b)
	kubelets, stop := context.WithCancel(t.Context())
	defer stop()
	for _, c := range f.Clusters {
		go c.Kubelets(kubelets)
	}
	to := seen(t, a, b, b.Pods[len(b.Pods)-1].Addr)
	senders := []*lab.Pod{podOn(t, a, 0), podOn(t, a, 1)}
	fine := func(t *testing.T) {
		t.Helper()
		eventually(t, "a peering in which everything works", func() error {
			out, err := f.Isthmus(t.Context(), "diagnose", "--context", a.Name, "--remote-context", b.Name)
			if err != nil {
				return fmt.Errorf("%w\n%s", err, out)
			}
			if said, fine := peeringStatus(t.Context(), f, a); !fine {
				return fmt.Errorf("isthmus status: %s", said)
			}
			for _, from := range senders {
				if _, err := from.Ping(t.Context(), to); err != nil {
					return fmt.Errorf("%s: %w", from, err)
				}
			}
			return nil
		})
	}
	fine(t)
	checkTrace(t, s)
	saw := map[string]witness{}
	if text, err := os.ReadFile(witnessed); err == nil {
		must(t, json.Unmarshal(text, &saw))
	}
	for i := range troubles {
		tr := &troubles[i]
		if !tr.short && !*long {
			continue
		}
		ok := t.Run(strings.ReplaceAll(tr.fault, " ", "_"), func(t *testing.T) {
			s.node = 0
			if tr.fresh {
				for _, c := range []*fleet.Cluster{a, b} {
					for i := range 2 {
						must(t, c.Stop(fleet.Gateway(i)))
						must(t, c.Start(t.Context(), fleet.Gateway(i)))
					}
				}
				fine(t)
			}
			begin := time.Now()
			tr.breaks(t, s)
			waitForDiagnosis(t, s, tr, fine)
			w := witness{Seconds: int(time.Since(begin).Seconds()), Load: load(t)}
			if !tr.unasked {
				w.Event = warnings(t.Context(), a, begin)
				// An agent writes the Event a second after it becomes unready. For the document,
				// wait longer, because the manager reports only after it has watched the Lease for
				// ten seconds.
				wait := 5 * time.Second
				if *update {
					wait = 15 * time.Second
				}
				for deadline := time.Now().Add(wait); w.Event == "" && tr.alone != "" && time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
					w.Event = warnings(t.Context(), a, begin)
				}
				w.Metrics = tellingMetrics(t.Context(), a)
			}
			var well bool
			if w.Status, well = peeringStatus(t.Context(), f, a); well != (tr.ready || tr.alone == "" && !tr.unasked) {
				t.Errorf("isthmus status is fine: %v; %s", well, w.Status)
			}
			w.Trace = traceOf(t.Context(), s, senders[s.node].Addr.String(), to.String()) // from the node with the fault
			mending := time.Now()
			tr.heals(t, s)
			fine(t)
			if tr.alone == "" && tr.says != "" {
				waitForSilence(t, s, tr)
			}
			w.Healed = int(time.Since(mending).Seconds())
			if !t.Failed() {
				saw[tr.fault] = w
				if *update { // write after each fault, because a run may cover only some of the faults, or end early
					text, err := json.MarshalIndent(saw, "", "  ")
					must(t, err)
					must(t, os.WriteFile(witnessed, append(text, '\n'), 0o644))
				}
			}
			t.Logf("%+v", w)
		})
		if !ok {
			if t.Context().Err() != nil || !*observe {
				return
			}
			tr.heals(t, s)
			fine(t)
		}
	}
}

// load returns the one-minute load average of the machine.
func load(t *testing.T) float64 {
	t.Helper()
	text, err := os.ReadFile("/proc/loadavg")
	must(t, err)
	mean, _, _ := strings.Cut(string(text), " ")
	n, err := strconv.ParseFloat(mean, 64)
	must(t, err)
	return n
}

// checkTrace checks the output of `isthmus trace` for a packet between two pods and its answer,
// without a fault: with access to one side, to both, and by names.
func checkTrace(t *testing.T, s *troubleSite) {
	t.Helper()
	from, to := s.a.Pods[0], s.b.Pods[len(s.b.Pods)-1]
	there := seen(t, s.a, s.b, to.Addr)
	back := seen(t, s.b, s.a, from.Addr) // the pod's address at b
	// This Service exists only in the other cluster.
	of := metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "there"}
	must(t, s.b.Client.Create(t.Context(), &corev1.Service{ObjectMeta: of, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "web", Port: 80}}}}))
	of.Labels = map[string]string{discoveryv1.LabelServiceName: of.Name}
	must(t, s.b.Client.Create(t.Context(), &discoveryv1.EndpointSlice{ObjectMeta: of, AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{to.Addr.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}}},
		Ports:     []discoveryv1.EndpointPort{{Name: ptr.To("web"), Port: ptr.To[int32](8080)}}}))
	for _, c := range []struct {
		args []string
		says []string
	}{
		{[]string{from.Addr.String(), there.String()}, []string{"Pod default/" + from.Name, "source " + from.Addr.String(), "becomes " + back.String(), "not checked; --remote-context", "it leaves for " + s.b.Name + ";", "the answer arrives"}},
		{[]string{"default/" + from.Name, "default/" + to.Name + ":80", "--remote-context", s.b.Name},
			[]string{there.String() + ":80", "becomes " + to.Addr.String() + ":80", "Node " + to.Node.Name + ": its route agent is ready", "tcp answer", "it arrives", "the answer arrives"}},
		{[]string{"default/" + from.Name, "svc/there:80", "--remote-context", s.b.Name}, []string{there.String() + ":8080", "becomes " + to.Addr.String() + ":8080", "it arrives"}},
		{[]string{s.a.Nodes[0].Addr.String(), there.String(), "icmp", "--remote-context", s.b.Name}, []string{"no Pod of this cluster has the address", "it arrives", "belongs to the same NAT flow"}},
	} {
		out, err := s.Isthmus(t.Context(), append([]string{"trace", "--context", s.a.Name}, c.args...)...)
		if err != nil {
			t.Errorf("isthmus trace %v: %v\n%s", c.args, err, out)
		}
		for _, want := range c.says {
			if !strings.Contains(out, want) {
				t.Errorf("isthmus trace %v does not say %q:\n%s", c.args, want, out)
			}
		}
	}
	vacant := seen(t, s.a, s.b, vacantAddr(s.b))
	for want, args := range map[string][]string{
		"no running Pod has":               {from.Addr.String(), vacant.String(), "--remote-context", s.b.Name},
		"no peer has 192.0.2.1":            {from.Addr.String(), "192.0.2.1"},
		"Pod default/nobody: not found":    {"default/nobody", there.String()},
		"has no port 81":                   {from.Addr.String(), "svc/kubernetes:81"},
		"Service default/there: not found": {from.Addr.String(), "svc/there:80"},
	} {
		out, err := s.Isthmus(t.Context(), append([]string{"trace", "--context", s.a.Name}, args...)...)
		if exit := (interface{ ExitCode() int })(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(out, want) {
			t.Errorf("isthmus trace %v: %v, and not %q:\n%s", args, err, want, out)
		}
	}
}

// vacantAddr returns an unused address in a node's part of the PodCIDR.
func vacantAddr(c *fleet.Cluster) netip.Addr {
	b := c.Nodes[1].PodCIDR.Addr().As4()
	b[3] += 200
	return netip.AddrFrom4(b)
}

var observe = flag.Bool("observe", false, "go on with the next fault after one that is not named rightly")

// waitForDiagnosis waits until diagnose names a fault as expected, and nothing else.
func waitForDiagnosis(t *testing.T, s *troubleSite, tr *trouble, fine func(*testing.T)) {
	t.Helper()
	is := func(both bool, hop string) {
		t.Helper()
		var want []string
		if hop != "" {
			want = []string{hop}
		}
		eventually(t, fmt.Sprintf("%v alone is broken", want), func() error {
			broken, says, err := diagnose(t.Context(), s.Fleet, s.a, s.b, both)
			switch {
			case err != nil:
				return err
			case !slices.Equal(broken, want):
				return fmt.Errorf("broken: %v: %s", broken, says)
			case !strings.Contains(says, tr.says):
				return fmt.Errorf("%v is broken, and %q is not said: %s", broken, tr.says, says)
			}
			return nil
		})
	}
	switch {
	case tr.unasked:
		eventually(t, "exit code 2", func() error {
			said, _ := peeringStatus(t.Context(), s.Fleet, s.a)
			if said != "exit code 2" {
				return fmt.Errorf("%s", said)
			}
			return nil
		})
		return
	case tr.alone == "" && tr.both == "":
		fine(t)
	}
	is(false, tr.alone)
	if !tr.deaf {
		is(true, tr.both)
		return
	}
	out, err := s.Isthmus(t.Context(), "diagnose", "--context", s.a.Name, "--remote-context", s.b.Name)
	if exit := (interface{ ExitCode() int })(nil); !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(out, "identity") {
		t.Errorf("isthmus diagnose with a peer that does not answer: %v; want exit code 2 and this side's hops\n%s", err, out)
	}
}

// waitForSilence waits until diagnose no longer mentions a harmless fault.
func waitForSilence(t *testing.T, s *troubleSite, tr *trouble) {
	t.Helper()
	eventually(t, "the end of "+tr.says, func() error {
		if _, says, err := diagnose(t.Context(), s.Fleet, s.a, s.b, false); err != nil || strings.Contains(says, tr.says) {
			return fmt.Errorf("%w: %s", err, says)
		}
		return nil
	})
}

// The tables in docs/troubleshooting.md are generated from these tests.
func TestTroubleshootingDocumentListsTestedFaults(t *testing.T) {
	const file = "../../docs/troubleshooting.md"
	text, err := os.ReadFile(file)
	must(t, err)
	want := string(text)
	reported, silent := troubleRows(t)
	moments, uneventful := meanwhileRows(t)
	for _, table := range []struct {
		name string
		rows [][]string
		rest string
	}{{"causes", causeRows(), ""}, {"troubles", reported, silent + loads(t)}, {"meanwhile", moments, uneventful}} {
		begin, end := "<!-- "+table.name+": written by go test ./fleet -run Document -update -->\n", "<!-- end -->"
		head, rest, ok1 := strings.Cut(want, begin)
		_, tail, ok2 := strings.Cut(rest, end)
		if !ok1 || !ok2 {
			t.Fatalf("%s has no place for %s", file, table.name)
		}
		var b strings.Builder
		for i, row := range table.rows {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
			if i == 0 {
				fmt.Fprintf(&b, "|%s\n", strings.Repeat(" --- |", len(row)))
			}
		}
		want = head + begin + b.String() + table.rest + end + tail
	}
	if want == string(text) {
		return
	}
	if !*update {
		t.Errorf("%s is not what the tests say: go test ./fleet -run Document -update in test/ writes it", file)
		return
	}
	must(t, os.WriteFile(file, []byte(want), 0o644))
}

// loads returns a sentence with the machine's load during the measured times.
func loads(t *testing.T) string {
	saw := map[string]witness{}
	text, err := os.ReadFile(witnessed)
	must(t, err)
	must(t, json.Unmarshal(text, &saw))
	var all []float64
	for _, tr := range troubles {
		if w := saw[tr.fault]; w.Load > 0 {
			all = append(all, w.Load)
		}
	}
	slices.Sort(all)
	said := fmt.Sprintf("\nThe load average of the test machine was %.1f to %.1f, with a median of %.1f", all[0], all[len(all)-1], all[len(all)/2])
	if missing := len(troubles) - len(all); missing > 0 {
		said += fmt.Sprintf("; for %d faults it was not recorded", missing)
	}
	return said + ".\n"
}

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

func causeRows() [][]string {
	rows := [][]string{{"what is wrong", "reason at this gateway", "reason at the peer's gateway"}}
	for _, c := range causes {
		rows = append(rows, []string{c.fault, code(c.here), code(c.there)})
	}
	return rows
}

// troubleRows returns the rows of the table of faults, and a list of the faults that break no hop
// and show in no other report.
func troubleRows(t *testing.T) (rows [][]string, silent string) {
	saw := map[string]witness{}
	text, err := os.ReadFile(witnessed)
	must(t, err)
	must(t, json.Unmarshal(text, &saw))
	var harmless []string
	rows = [][]string{{"what is wrong", "`isthmus diagnose` in a", "of a and b", "`isthmus status` in a", "`isthmus trace` of a pod's packet", "metrics", "Events", "seconds until diagnosed", "seconds until healed"}}
	for _, tr := range troubles {
		w, ok := saw[tr.fault]
		if !ok {
			t.Errorf("%s: never made with -update", tr.fault)
		}
		alone, both := code(tr.alone), code(tr.both)
		switch {
		case tr.unasked:
			alone, both = "exit code 2", "exit code 2"
		case tr.deaf:
			both = "exit code 2"
		case tr.alone == "" && tr.both == "":
			alone, both = "works", "works"
		case tr.alone == "":
			alone = "works"
		}
		if alone == "works" && both == "works" && w.Status == "yes Connected" && w.Trace == "it leaves for b" && w.Metrics+w.Event == "" {
			harmless = append(harmless, tr.fault)
			continue
		}
		rows = append(rows, []string{tr.fault, alone, both, w.Status, w.Trace, otherMetrics(w.Metrics, w.Status), w.Event, strconv.Itoa(w.Seconds), strconv.Itoa(w.Healed)})
	}
	return rows, "\nThese faults break no hop, because Isthmus tolerates or repairs them. `diagnose` mentions some:\n\n" + list(harmless)
}

// otherMetrics removes isthmus_manager_peering_ready from a cell if it repeats the reason of a
// peering that is not ready.
func otherMetrics(metrics, status string) string {
	reason, down := strings.CutPrefix(status, "no ")
	if !down {
		return metrics
	}
	return strings.TrimPrefix(strings.TrimPrefix(metrics, "isthmus_manager_peering_ready "+reason), ", ")
}

// list returns a Markdown list.
func list(items []string) string { return "- " + strings.Join(items, "\n- ") + "\n" }
