package health

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// AgentHops returns a hop for the agents, and before it a hop for the nodes if some nodes are not
// ready.
func AgentHops(cluster, source string, found Components, a Agents) (hops []Hop) {
	hop := Hop{Cluster: cluster, Name: HopAgents, Source: source}
	if len(a.Unready) > 0 {
		hops = append(hops, Hop{Cluster: cluster, Name: HopNodes, State: Limited, Source: "Nodes",
			Text: fmt.Sprintf("%d of %d nodes are not ready, so peers may not reach their pods: %s; see `kubectl describe node`",
				len(a.Unready), a.Nodes+len(a.Unready), safetext.FirstFew(a.Unready, "; "))})
	}
	hop.State, hop.Text = Works, fmt.Sprintf("on all %d nodes", a.Nodes)
	switch {
	case a.Nodes == 0 && len(a.Unready) > 0:
		hop.State, hop.Text = Unknown, "no node that should have an agent is ready"
	case a.lacking > 0:
		hop.FollowsGateway = a.lacking == a.Unreached
		hop.State, hop.Text = Broken, fmt.Sprintf("pods on %d of %d nodes do not reach peers: %s", a.lacking, a.Nodes, safetext.FirstFew(a.Missing, "; "))
	case len(a.versions) == 1:
		hop.Text += ", " + a.versions[0]
	}
	if several := found.versions(); several != "" {
		hop.Text += "; the components have different versions, as they do during an upgrade: " + several
	}
	if len(a.unwanted) > 0 {
		hop.Text += "; the DaemonSet schedules none on " + safetext.FirstFew(a.unwanted, ", ")
	}
	return append(hops, hop)
}

// CheckKernels summarizes the problems that route agents report for existing nodes. The text is
// empty if there are none. The state is Broken if a problem drops packets, else Limited.
func CheckKernels(reports []isthmus.NodeNetworks, nodes []corev1.Node) (HopState, string) {
	on := make(map[isthmus.NodeProblem][]string)
	for i := range reports {
		r := &reports[i]
		if !slices.ContainsFunc(nodes, func(n corev1.Node) bool { return n.Name == r.Name }) {
			continue
		}
		for _, p := range r.Spec.Problems {
			on[p] = append(on[p], safetext.Of(r.Name))
		}
	}
	for i := range nodes {
		if sharedGateway(&nodes[i]) {
			on[pastTheNode] = append(on[pastTheNode], safetext.Of(nodes[i].Name))
		}
	}
	problems := slices.SortedFunc(maps.Keys(on), func(a, b isthmus.NodeProblem) int {
		return cmp.Or(cmp.Compare(Severity(a), Severity(b)), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Message, b.Message))
	})
	var texts []string
	for _, p := range problems {
		slices.Sort(on[p])
		texts = append(texts, fmt.Sprintf("%s on %s: %s", safetext.Of(p.Reason), safetext.FirstFew(on[p], ", "), safetext.Cut(p.Message, safetext.Message)))
	}
	state := Limited
	if len(problems) > 0 && Severity(problems[0]) == 0 {
		state = Broken
	}
	return state, safetext.FirstFew(texts, "; ")
}

// pastTheNode is the problem of nodes where packets from pods bypass the node's kernel. No agent
// can detect it.
var pastTheNode = isthmus.NodeProblem{Reason: "PodsPassBy", Message: "OVN-Kubernetes uses shared gateways: packets from pods to peers bypass the node's kernel and leave in the clear; " +
	"want local gateways (`--gateway-mode local`, on OpenShift `gatewayConfig.routingViaHost: true`)"}

// sharedGateway reports whether packets of a node's pods leave through br-ex, according to
// OVN-Kubernetes' annotation of the node.
func sharedGateway(n *corev1.Node) bool {
	var networks map[string]struct {
		Mode string `json:"mode"`
	}
	err := json.Unmarshal([]byte(n.Annotations["k8s.ovn.org/l3-gateway-config"]), &networks)
	return err == nil && networks["default"].Mode == "shared"
}

// Severity returns 0 for a node problem that prevents packets from arriving, and 1 for any other
// problem.
func Severity(p isthmus.NodeProblem) int {
	if p.Reason == kernel.LimitForwarding || p.Reason == kernel.LimitGateway || p == pastTheNode {
		return 0
	}
	return 1
}

// Agents is the state of the route agents of a cluster.
type Agents struct {
	Nodes     int      // number of ready nodes that have an agent or should have one
	lacking   int      // number of ready nodes without a working agent
	Unreached int      // number of Nodes whose agent runs but is not ready, perhaps because it cannot reach the gateway
	Missing   []string // descriptions of the nodes that lacking counts, including those that Unreached counts
	Unready   []string // descriptions of the nodes that are not ready
	unwanted  []string // names of nodes that have no agent because the DaemonSet wants none there
	versions  []string // images of the agents
}

// virtual are labels of Nodes without a kernel of their own. Such a Node runs no route agent.
var virtual = map[string]string{
	"liqo.io/type":                   "virtual-node", // represents another cluster
	"type":                           "virtual-kubelet",
	"eks.amazonaws.com/compute-type": "fargate",
}

// takesAgents reports whether a route agent can run on a node.
func takesAgents(n *corev1.Node) bool {
	if os, known := n.Labels[corev1.LabelOSStable]; known && os != string(corev1.Linux) {
		return false
	}
	for label, value := range virtual {
		if n.Labels[label] == value {
			return false
		}
	}
	return true
}

// stillWanted returns the number of Pods that the agents' DaemonSets want in addition to the
// existing ones. known is false if no DaemonSet reports that number.
func stillWanted(sets []appsv1.DaemonSet) (more int, known bool) {
	for i := range sets {
		s := &sets[i]
		if s.Spec.Template.Spec.ServiceAccountName != deploy.RouteAgentServiceAccount {
			continue
		}
		if s.Status.ObservedGeneration != s.Generation || s.Status.DesiredNumberScheduled == 0 { // not evaluated yet, or no node matches
			return 0, false
		}
		more, known = more+max(0, int(s.Status.DesiredNumberScheduled-s.Status.CurrentNumberScheduled)), true
	}
	return more, known
}

// AgentsOf finds the agent of each node. Labels and taints determine on which nodes the DaemonSet
// wants an agent. If the status of the DaemonSet is unknown, every node should have an agent.
func AgentsOf(nodes []corev1.Node, found Components, sets []appsv1.DaemonSet) (a Agents) {
	on := make(map[string]*corev1.Pod)
	images := make(map[string]bool)
	for i := range found.Pods {
		p := &found.Pods[i]
		if p.Spec.ServiceAccountName != deploy.RouteAgentServiceAccount || p.Spec.NodeName == "" {
			continue
		}
		if other := on[p.Spec.NodeName]; other == nil || PodProblem(other) != "" { // prefer a working Pod: a former Pod may not have ended yet
			on[p.Spec.NodeName] = p
		}
		for _, container := range p.Spec.Containers {
			images[safetext.Of(container.Image)] = true
		}
	}
	more, known := stillWanted(sets)
	var without []string // names of nodes without an agent
	for i := range nodes {
		n := &nodes[i]
		if !takesAgents(n) {
			continue
		}
		name := safetext.Of(n.Name)
		p, why := on[n.Name], notReady(n)
		switch {
		case why != "" && (p != nil || !known):
			a.Unready = append(a.Unready, fmt.Sprintf("Node %s: %s", name, why))
		case p == nil && why == "":
			without = append(without, name)
		case p != nil:
			a.Nodes++
			problem := found.problem(p)
			if o := found.Broken[n.Name]; o != nil {
				format := "reports that it reaches the gateway at %s over the underlay, but not over the overlay (noticed at %s); allow UDP %d between nodes"
				if o.Back {
					format = "reports that its packets reach the gateway at %s over the overlay, but no packets come back (noticed at %s); allow UDP %d between nodes, in both directions"
				}
				problem = strings.TrimPrefix(problem+", and ", ", and ") + fmt.Sprintf(format, safetext.Of(o.Gateway), safetext.Of(o.Since), kernel.OverlayPort)
			}
			if problem != "" {
				if stopped(p) == "" && !ended(p) {
					a.Unreached++
				}
				a.Missing = append(a.Missing, fmt.Sprintf("Node %s: Pod %s %s", name, safetext.Of(p.Name), problem))
			}
		}
	}
	a.lacking = len(a.Missing)
	const remedy = "no Pod of ServiceAccount " + deploy.RouteAgentServiceAccount + "; check the DaemonSet and the node's taints"
	switch {
	case !known || more >= len(without): // every node in without should have an agent
		for _, name := range without {
			a.Missing = append(a.Missing, "Node "+name+" has "+remedy)
		}
		a.Nodes, a.lacking = a.Nodes+len(without), a.lacking+len(without)
	case more > 0:
		a.Missing = append(a.Missing, fmt.Sprintf("%d of the Nodes %s have %s", more, safetext.FirstFew(without, ", "), remedy))
		a.Nodes, a.lacking = a.Nodes+more, a.lacking+more
	default:
		a.unwanted = without
	}
	a.versions = slices.Sorted(maps.Keys(images))
	return a
}

func notReady(n *corev1.Node) string {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return safetext.Of(cmp.Or(c.Message, c.Reason, "is not ready"))
		}
	}
	return ""
}
