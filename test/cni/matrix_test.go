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

// What a receiver may see of who asks.
const (
	asPod     = "pod"     // the pod's address as the receiver's cluster sees it, one to one
	asNetwork = "network" // the first address of the sender's PodCIDR as seen there: everything that is no pod
	asNode    = "receiver's node"
	noAnswer  = "no answer"
)

// The columns of the table: who asks whom.
const (
	podToPod     = "pod → pod"
	nodeToPod    = "node → pod"
	podToMapped  = "pod → mapped"
	nodeToMapped = "node → mapped"
	podToService = "pod → Service"
	nodeService  = "node → Service"
)

// A cell is one question with all that belongs to it.
type cell struct {
	column, name string
	from         *lab.Host
	bind         netip.Addr // zero: the kernel chooses
	to           netip.Addr
	talk         talk
	listener     *listener
	want         string
	// What is asPod, asNetwork and asNode here.
	pod, network, node netip.Addr

	saw string
	err error
}

// placed is a host and where it is.
type placed struct {
	name string
	host *lab.Host
	addr netip.Addr
}

// matrix asks all questions from one cluster to another one and returns the cells with what was seen.
func (w *world) matrix(t *testing.T, i int) []*cell {
	t.Helper()
	from, to := w.sides[i], w.sides[1-i]
	where := []string{"gateway's node", "other node"}
	var pods, receivers, mapped []placed
	var cells []*cell
	for j := range where {
		pods = append(pods, placed{"pod on " + where[j], from.Pods[2*j].Host, from.Pods[2*j].Addr})
		if to.PodCIDR.Contains(to.Pods[2*j].Addr) { // else peers do not reach it
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
	// Each sender of from, with the column that it belongs to.
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
				c.want = w.plans[1-i].shows(s.want)
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

// named wants each node to be named whose pods have addresses outside of the PodCIDR, and no other.
func (w *world) named(t *testing.T, i int) {
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
				return fmt.Errorf("pods outside of the PodCIDR: %t, and said: %+v", strangers, report.Spec.Problems)
			}
			return nil
		})
	}
}

// cellPatience is how long a question is asked again. It is for machines that are busy, and passes in
// full for each cell without an answer.
const cellPatience = 30 * time.Second

// shows is what a server outside of the cluster sees of a peer. A policy that accepts pods alone has no
// rule for it: it is by those of Isthmus that it is reached.
func (p plan) shows(sender string) string {
	if p.shape.translates {
		return asNode
	}
	return sender
}

// behindNode is node 1's address in the network of that server (internal/lab).
var behindNode = netip.MustParseAddr("192.168.77.1")

// outside is the endpoint that is in no cluster: behind node 1, where the gateway is.
const outside = "server outside of the cluster"

// pod is an address of a cluster's PodCIDR, of which the first is known, as another cluster sees it.
func pod(a netip.Addr, of *fleet.Cluster, first netip.Addr) netip.Addr {
	if !of.PodCIDR.Contains(a) {
		return netip.Addr{}
	}
	return lab.Move(a, of.PodCIDR, netip.PrefixFrom(first, of.PodCIDR.Bits()))
}

// judge fails the test for each cell that is not as wanted, those with one reason together.
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
