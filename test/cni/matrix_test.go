package cni

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// The kinds of sources that a receiver may see.
const (
	asPod     = "pod"     // the pod's address as the receiver's cluster sees it, translated one to one
	asNetwork = "network" // the first address of the sender's PodCIDR as the receiver sees it; NAPT gives it to all senders that are not pods
	asNode    = "receiver's node"
	noAnswer  = "no answer"
)

// The columns of the table, by sender and receiver.
const (
	podToPod     = "pod → pod"
	nodeToPod    = "node → pod"
	podToMapped  = "pod → mapped"
	nodeToMapped = "node → mapped"
	podToService = "pod → Service"
	nodeService  = "node → Service"
)

// A cell is one exchange between a sender and a receiver, with the expected and the seen source.
type cell struct {
	column, name string
	from         *lab.Host
	bind         netip.Addr // zero: the kernel chooses
	to           netip.Addr
	talk         talk
	listener     *listener
	want         string
	// The source addresses that the results asPod, asNetwork and asNode mean in this cell.
	pod, network, node netip.Addr

	saw string
	err error
}

// placed is a host with its address. name describes its location.
type placed struct {
	name string
	host *lab.Host
	addr netip.Addr
}

// matrix runs all exchanges from cluster i to the other cluster, and returns the cells with the
// sources that were seen.
func (w *world) matrix(t *testing.T, i int) []*cell {
	t.Helper()
	from, to := w.sides[i], w.sides[1-i]
	where := []string{"gateway's node", "other node"}
	var pods, receivers, mapped []placed
	var cells []*cell
	for j := range where {
		pods = append(pods, placed{"pod on " + where[j], from.Pods[2*j].Host, from.Pods[2*j].Addr})
		if to.PodCIDR.Contains(to.Pods[2*j].Addr) { // only then do peers reach the pod
			receivers = append(receivers, placed{"pod on " + where[j], to.Pods[2*j].Host, to.Pods[2*j].Addr})
		} else {
			mapped = append(mapped, placed{"pod on " + where[j] + " as mapped endpoint", to.Pods[2*j].Host, to.Pods[2*j].Addr})
		}
		mapped = append(mapped, placed{where[j] + " as mapped endpoint", to.Nodes[j].Host, to.Nodes[j].Addr})
	}
	pods = append(pods, placed{"last pod on " + where[1], from.Pods[3].Host, from.Pods[3].Addr})
	mapped = append(mapped, placed{outside, to.OnPrem.Host, to.OnPrem.Addr})

	seen := func(at, of *fleet.Cluster, a netip.Addr) (s netip.Addr) {
		t.Helper()
		eventually(t, "networks agreed upon", func() (err error) { s, err = at.Seen(t.Context(), of, a); return err })
		return s
	}
	network := seen(to, from, from.PodCIDR.Addr())
	// A sender is a host that sends, with the columns of its cells.
	type sender struct {
		placed

		bind    netip.Addr
		columns [3]string // to a pod, to a mapped endpoint, to a Service
		want    string
	}
	var senders []sender
	for _, p := range pods {
		want := asPod
		if !from.PodCIDR.Contains(p.addr) {
			want = asNetwork
		}
		senders = append(senders, sender{p, netip.Addr{}, [3]string{podToPod, podToMapped, podToService}, want})
	}
	for j, n := range from.Nodes {
		c := [3]string{nodeToPod, nodeToMapped, nodeService}
		senders = append(senders,
			sender{placed{"host-network pod on " + where[j], n.Host, n.Addr}, n.Addr, c, asNetwork},
			sender{placed{where[j], n.Host, n.Addr}, netip.Addr{}, c, asNetwork})
	}
	endpoints := make([]netip.Addr, len(mapped))
	for j, m := range mapped {
		eventually(t, "a mapped endpoint", func() (err error) {
			endpoints[j], err = to.MapEndpoint(t.Context(), m.addr, from)
			return err
		})
	}
	behind := receivers[len(receivers)-1]
	withdraw, err := remoteEndpoint(t.Context(), from.Cluster, w.plans[i].filter, seen(from, to, behind.addr))
	must(t, err)
	defer func() { must(t, withdraw()) }()
	for _, s := range senders {
		add := func(column int, r placed, at netip.Addr, k talk) {
			cells = append(cells, &cell{column: s.columns[column], name: fmt.Sprintf("%s to %s", s.name, r.name), from: s.host, bind: s.bind, to: at,
				talk: k, listener: w.listeners[r.host], want: s.want, network: network, pod: pod(s.addr, from, network), node: to.Nodes[0].Addr})
			if c := cells[len(cells)-1]; r.name == outside {
				c.want = w.plans[1-i].sourceOutside(s.want)
			}
		}
		for j, m := range mapped {
			if m.name != outside {
				add(1, m, endpoints[j], toWildcard)
			}
		}
		for _, k := range talks {
			for _, r := range receivers {
				add(0, r, seen(from, to, r.addr), k)
			}
			for j, m := range mapped {
				add(1, m, endpoints[j], k)
			}
			if k.network != "icmp" {
				add(2, placed{"a Service with the pod on " + where[1], behind.host, behind.addr}, remoteService, k)
			}
		}
	}
	var group sync.WaitGroup
	slots := make(chan struct{}, 16)
	for _, c := range cells {
		group.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			saw, err := patiently(t.Context(), c.from, c.bind, c.to, c.talk, c.listener, cellPatience)
			switch c.err = err; {
			case err != nil:
				c.saw = noAnswer
			case saw == c.network:
				c.saw = asNetwork
			case saw == c.pod:
				c.saw = asPod
			case saw == c.node, saw == behindNode:
				c.saw = asNode
			default:
				c.saw = saw.String()
			}
		})
	}
	group.Wait()
	return cells
}

// checkReportsNodes checks that the agents report exactly the nodes that have pods with addresses
// outside of the PodCIDR.
func (w *world) checkReportsNodes(t *testing.T, i int) {
	t.Helper()
	c := w.sides[i]
	for _, n := range c.Nodes {
		strangers := slices.ContainsFunc(podsOn(c.Cluster, n), func(p *lab.Pod) bool { return !c.PodCIDR.Contains(p.Addr) })
		eventually(t, "what is said of "+n.Name, func() error {
			var report isthmus.NodeNetworks
			if err := c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: n.Name}, &report); err != nil {
				return err
			}
			said := slices.ContainsFunc(report.Spec.Problems, func(p isthmus.NodeProblem) bool {
				return strings.Contains(p.Message, "has pods outside "+c.PodCIDR.String())
			})
			if said != strangers {
				return fmt.Errorf("pods outside of the PodCIDR: %t, reported problems: %+v", strangers, report.Spec.Problems)
			}
			return nil
		})
	}
}

// cellPatience is the maximum time for which the test repeats an exchange, because a busy machine
// may lose packets. A cell that expects no answer takes all of that time.
const cellPatience = 30 * time.Second

// sourceOutside returns the source of a peer's packets as a server outside of the cluster sees it.
func (p plan) sourceOutside(sender string) string {
	if p.shape.translates {
		return asNode
	}
	return sender
}

// behindNode is the address of node 1 in the network of the outside server (internal/lab).
var behindNode = netip.MustParseAddr("192.168.77.1")

// outside is the name of the endpoint outside of both clusters. It is behind node 1, where the
// gateway is.
const outside = "server outside of the cluster"

// pod returns the address of a pod as another cluster sees it. first is the first address of the
// pod's PodCIDR, also as that other cluster sees it.
func pod(a netip.Addr, of *fleet.Cluster, first netip.Addr) netip.Addr {
	if !of.PodCIDR.Contains(a) {
		return netip.Addr{}
	}
	return lab.Move(a, of.PodCIDR, netip.PrefixFrom(first, of.PodCIDR.Bits()))
}

// judge reports the cells whose result is not the expected one. It groups them by result.
func judge(t *testing.T, p plan, cells []*cell) {
	t.Helper()
	wrong := map[string][]string{}
	for _, c := range cells {
		if c.saw != c.want {
			what := fmt.Sprintf("%s: %s, want %s", c.column, c.saw, c.want)
			wrong[what] = append(wrong[what], fmt.Sprintf("%s, %s (%v)", c.name, c.talk.name, c.err))
		}
	}
	for _, what := range slices.Sorted(maps.Keys(wrong)) {
		t.Errorf("from %v: %s, in %d cells:\n\t%s", p, what, len(wrong[what]), strings.Join(wrong[what], "\n\t"))
	}
}
