package fleet

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

var update = flag.Bool("update", false, "write the tables of docs/troubleshooting.md")

// A trouble is a fault of a whole cluster, and what `isthmus diagnose` says of it in cluster a.
type trouble struct {
	fault  string // as docs/troubleshooting.md calls it
	alone  string // CLUSTER/HOP or CLUSTER/HOP REASON: what a finds out alone
	both   string // and what the two find out together; empty: the other cannot be asked
	took   int    // seconds until a said so, once, on two cores at a load of forty
	long   bool   // it takes most of a minute to be told from a slow machine
	breaks func(t *testing.T, a, b *fleet.Cluster)
	heals  func(t *testing.T, f *fleet.Fleet, a, b *fleet.Cluster)
}

// tenant is the namespace of a cluster's peering with another.
func tenant(t *testing.T, at, with *fleet.Cluster) string {
	t.Helper()
	p, err := at.Peering(t.Context(), with)
	must(t, err)
	return p.Spec.TenantNamespace.Local
}

func killAll(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	for i := range c.Nodes {
		must(t, c.Kill(fleet.Gateway(i)))
	}
}

func startAll(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	for i := range c.Nodes {
		must(t, c.Start(t.Context(), fleet.Gateway(i)))
	}
}

// agentReady has a kubelet say whether the route agent on the last node is ready.
func agentReady(t *testing.T, c *fleet.Cluster, is corev1.ConditionStatus) {
	t.Helper()
	var pod corev1.Pod
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: fleet.Agent(len(c.Nodes) - 1)}, &pod))
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: is, Message: "readiness probe failed"}}
	must(t, c.Client.Status().Update(t.Context(), &pod))
}

// inPeersNetwork is an address in the network under which a sees b's pods, with a network of its
// own.
func inPeersNetwork(t *testing.T, a, b *fleet.Cluster) *netlink.Addr {
	t.Helper()
	addr := seen(t, a, b, b.Pods[0].Addr)
	parsed, err := netlink.ParseAddr(addr.String() + "/24")
	must(t, err)
	return parsed
}

func onLoopback(t *testing.T, n *lab.Node, do func(link netlink.Link) error) {
	t.Helper()
	must(t, n.Do(func() error {
		link, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return do(link)
	}))
}

var lostIdentity *corev1.Secret // while it is missing

var troubles = []trouble{
	{
		fault: "the Secret with the identity at the peer is gone", alone: "a/identity SecretMissing", took: 1, both: "a/identity SecretMissing",
		breaks: func(t *testing.T, a, b *fleet.Cluster) {
			lostIdentity = new(corev1.Secret)
			must(t, a.Client.Get(t.Context(), client.ObjectKey{Namespace: tenant(t, a, b), Name: "isthmus-identity"}, lostIdentity))
			must(t, a.Client.Delete(t.Context(), lostIdentity.DeepCopy()))
		},
		heals: func(t *testing.T, _ *fleet.Fleet, a, _ *fleet.Cluster) {
			lostIdentity.ObjectMeta = metav1.ObjectMeta{Namespace: lostIdentity.Namespace, Name: lostIdentity.Name, Labels: lostIdentity.Labels}
			must(t, a.Client.Create(t.Context(), lostIdentity))
		},
	},
	{
		fault: "the peer revoked this cluster's rights", alone: "a/publishing Forbidden", took: 36, both: "a/publishing Forbidden", long: true,
		breaks: func(t *testing.T, a, b *fleet.Cluster) {
			must(t, b.Client.Delete(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: tenant(t, b, a), Name: "isthmus-peer"}}))
		},
		heals: func(t *testing.T, f *fleet.Fleet, a, b *fleet.Cluster) {
			isthmus(t, f, "peer", "--context", a.Name, "--remote-context", b.Name)
		},
	},
	{
		fault: "a route agent is not ready", alone: "a/route agents", took: 1, both: "a/route agents",
		breaks: func(t *testing.T, a, _ *fleet.Cluster) { agentReady(t, a, corev1.ConditionFalse) },
		heals:  func(t *testing.T, _ *fleet.Fleet, a, _ *fleet.Cluster) { agentReady(t, a, corev1.ConditionTrue) },
	},
	{
		fault: "a node got an address in a network of the peer", alone: "a/peering Overlap", took: 5, both: "a/peering Overlap",
		breaks: func(t *testing.T, a, b *fleet.Cluster) {
			addr := inPeersNetwork(t, a, b)
			onLoopback(t, a.Nodes[1], func(l netlink.Link) error { return netlink.AddrAdd(l, addr) })
		},
		heals: func(t *testing.T, _ *fleet.Fleet, a, b *fleet.Cluster) {
			addr := inPeersNetwork(t, a, b)
			onLoopback(t, a.Nodes[1], func(l netlink.Link) error { return netlink.AddrDel(l, addr) })
		},
	},
	{
		fault: "no gateway of the peer runs", alone: "a/tunnel PeerSilent", took: 11, both: "b/gateway GatewaySilent",
		breaks: func(t *testing.T, _, b *fleet.Cluster) { killAll(t, b) },
		heals:  func(t *testing.T, _ *fleet.Fleet, _, b *fleet.Cluster) { startAll(t, b) },
	},
	{
		fault: "no gateway of this cluster runs", alone: "a/gateway GatewaySilent", took: 20, both: "a/gateway GatewaySilent",
		breaks: func(t *testing.T, a, _ *fleet.Cluster) { killAll(t, a) },
		heals:  func(t *testing.T, _ *fleet.Fleet, a, _ *fleet.Cluster) { startAll(t, a) },
	},
	{
		fault: "the manager of this cluster does not run", alone: "a/manager", took: 44, both: "a/manager", long: true,
		breaks: func(t *testing.T, a, _ *fleet.Cluster) { must(t, a.Kill(fleet.Manager)) },
		heals: func(t *testing.T, _ *fleet.Fleet, a, _ *fleet.Cluster) {
			must(t, a.Start(t.Context(), fleet.Manager))
		},
	},
	{
		fault: "the peer's API server does not answer", alone: "a/identity Unreachable", took: 25, long: true,
		breaks: func(t *testing.T, _, b *fleet.Cluster) { must(t, b.Server.Freeze()) },
		heals:  func(t *testing.T, _ *fleet.Fleet, _, b *fleet.Cluster) { must(t, b.Server.Thaw()) },
	},
}

// diagnosis is what `isthmus diagnose -o json` prints.
type diagnosis struct {
	Broken *hop
	Hops   []hop
}

type hop struct{ Cluster, Hop, State, Reason, Text string }

func (h hop) String() string { return strings.TrimSpace(h.Cluster + "/" + h.Hop + " " + h.Reason) }

// diagnose runs the command in cluster a, and with both when that is wanted. It returns what is
// broken, the first one first.
func diagnose(t *testing.T, f *fleet.Fleet, a, b *fleet.Cluster, both bool) (broken []string, err error) {
	t.Helper()
	args := []string{"diagnose", "--context", a.Name, "-o", "json"}
	if both {
		args = append(args, "--remote-context", b.Name)
	} else {
		args = append(args, b.Name)
	}
	out, failed := f.Isthmus(t.Context(), args...)
	var d diagnosis
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		return nil, fmt.Errorf("isthmus %v: %w (%w)\n%s", args, failed, err, out)
	}
	for _, h := range d.Hops {
		if h.State == "broken" {
			broken = append(broken, h.String())
		}
	}
	if d.Broken == nil != (len(broken) == 0) {
		return nil, fmt.Errorf("broken is %v of %v", d.Broken, broken)
	}
	if d.Broken != nil { // the first to mend need not be the first on the way
		i := slices.Index(broken, d.Broken.String())
		broken[0], broken[i] = broken[i], broken[0]
	}
	if failed == nil != (len(broken) == 0) && !slices.ContainsFunc(d.Hops, func(h hop) bool { return h.State == "unknown" || h.State == "waits" }) {
		return nil, fmt.Errorf("exit code 0 is %v, broken are %v", failed == nil, broken)
	}
	return broken, nil
}

// What is broken is named from one side and from both, nothing else is blamed, and when it is mended
// nothing is.
func TestDiagnoseNamesWhatIsBroken(t *testing.T) {
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 2), clusterSpec("10.244.0.0/16", 2)}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)
	names := func(t *testing.T, both bool, want ...string) {
		t.Helper()
		eventually(t, fmt.Sprintf("%v alone is broken", want), func() error {
			broken, err := diagnose(t, f, a, b, both)
			if err == nil && !slices.Equal(broken, want) {
				err = fmt.Errorf("broken: %v", broken)
			}
			return err
		})
	}
	fine := func(t *testing.T) {
		t.Helper()
		eventually(t, "a peering in which everything works", func() error {
			out, err := f.Isthmus(t.Context(), "diagnose", "--context", a.Name, "--remote-context", b.Name)
			if err != nil {
				return fmt.Errorf("%w\n%s", err, out)
			}
			return nil
		})
	}
	fine(t)
	for _, tr := range troubles {
		if tr.long && !*long {
			continue
		}
		t.Run(strings.ReplaceAll(tr.fault, " ", "_"), func(t *testing.T) {
			begin := time.Now()
			tr.breaks(t, a, b)
			names(t, false, tr.alone)
			took := time.Since(begin)
			if tr.both != "" {
				names(t, true, tr.both)
			}
			if out, err := f.Isthmus(t.Context(), "status", "--context", a.Name); err == nil {
				t.Errorf("isthmus status has exit code 0:\n%s", out)
			}
			tr.heals(t, f, a, b)
			fine(t)
			t.Logf("%s: named after %.0f s", tr.alone, took.Seconds())
		})
		if t.Failed() {
			return
		}
	}
}

// The tables of the document are those of these tests.
func TestTheDocumentHasTheFaultsOfTheseTests(t *testing.T) {
	const file = "../../docs/troubleshooting.md"
	text, err := os.ReadFile(file)
	must(t, err)
	want := string(text)
	for _, table := range []struct {
		name string
		rows [][]string
	}{{"causes", causeRows()}, {"troubles", troubleRows()}} {
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
		want = head + begin + b.String() + end + tail
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

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

func causeRows() [][]string {
	rows := [][]string{{"what is wrong", "the gateway here says", "the gateway there says"}}
	for _, c := range causes {
		rows = append(rows, []string{c.fault, code(c.here), code(c.there)})
	}
	return rows
}

func troubleRows() [][]string {
	rows := [][]string{{"what is wrong", "`isthmus diagnose` in a", "`isthmus diagnose` of a and b", "seconds until a says so"}}
	for _, tr := range troubles {
		rows = append(rows, []string{tr.fault, code(tr.alone), code(tr.both), strconv.Itoa(tr.took)})
	}
	return rows
}
