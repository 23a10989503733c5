package peering

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
)

// HopState is what was found out about a hop.
type HopState string

const (
	Works   HopState = "works"
	Broken  HopState = "broken"
	Waits   HopState = "waits"   // for a hop before it, which is broken
	Unknown HopState = "unknown" // nobody has said, or nobody may be asked
	// Limited: it works, and less than it should. Nothing after it waits for it.
	Limited HopState = "limited"
)

// A Hop is one thing that has to work so that packets go both ways. `isthmus status` and `isthmus
// diagnose` judge by the same hops.
type Hop struct {
	Cluster string   `json:"cluster"`
	Peering string   `json:"peering,omitempty"` // empty: of the cluster, for all peerings
	Name    string   `json:"hop"`
	State   HopState `json:"state"`
	Reason  string   `json:"reason,omitempty"` // of the condition that says so
	// Text is what was seen, and what to do where it is broken.
	Text string `json:"text"`
	// Source is who says so, and Since is since when, if that is known.
	Source string       `json:"source"`
	Since  *metav1.Time `json:"since,omitempty"`

	// followsGateway: what is broken is the way to the gateway and nothing else, which is no wonder
	// where none is at work.
	followsGateway bool
}

// noneAtWork reports whether a hop of the gateway says that none is at work.
func noneAtWork(h *Hop) bool {
	return h.Name == hopGateway && (h.State == Broken || h.State == Waits) && !slices.Contains([]string{reasonSeveralActive, reasonNoneMarked, reasonServices}, h.Reason)
}

// withoutGateway has the hops wait that are broken because no gateway is at work.
func withoutGateway(hops []Hop) {
	for i := range hops {
		if h := &hops[i]; h.followsGateway && h.State == Broken {
			h.State, h.Text = Waits, "the gateway is not reached, as none is at work"
		}
	}
}

// Names of the hops of a cluster; those of a peering are the types of its conditions.
const (
	hopManager = "manager"
	hopGateway = "gateway"
	hopStandby = "standby" // only where there should be one, and none could take over
	hopNodes   = "nodes"   // only where one is not ready
	hopAgents  = "route agents"
	hopKernels = "node problems" // only where an agent says that something is not as it should be
	hopRights  = "rights"        // of the ServiceAccounts of the three
)

// accounts are the ServiceAccounts of the components that hops are about.
var accounts = map[string]string{
	hopManager: deploy.ManagerServiceAccount, hopGateway: deploy.GatewayServiceAccount, hopAgents: deploy.RouteAgentServiceAccount,
}

// clusterHops are those that all peerings of a cluster need.
func clusterHops(ctx context.Context, c *Cluster) (hops []Hop, manager, gateway Holder, err error) {
	if manager, err = c.holderOf(ctx, managerLease, true); err != nil {
		return nil, manager, gateway, err
	}
	if gateway, err = c.holderOf(ctx, isthmus.LeaseGateway, true); err != nil {
		return nil, manager, gateway, err
	}
	now, _ := c.now()
	found, unlisted := c.components(ctx, now)
	mayNot := forbidden(unlisted)
	if unlisted != nil && !mayNot {
		return nil, manager, gateway, c.explain("Pods in "+c.Namespace, unlisted)
	}
	manager.outlive(found.pods, c.leaseName(managerLease), false)
	gateway.outlive(found.pods, c.leaseName(isthmus.LeaseGateway), len(found.gateways()) > 0)
	hops = []Hop{
		leaseHop(c.String(), hopManager, c.leaseName(managerLease), manager, "start `isthmus manager`, or see why its Pods do not run, or cannot reach the API server"),
		leaseHop(c.String(), hopGateway, c.leaseName(isthmus.LeaseGateway), gateway, "see why the gateways' Pods do not run, or cannot reach the API server"),
	}
	if hops[0].State == Broken {
		if text := c.managersRoll(ctx, now); text != "" {
			manager.Problem, manager.rolls = text+": "+manager.Problem, true
			hops[0].State, hops[0].Text, hops[0].Source = Limited, "no manager is at work for the moment: "+manager.Problem, "Deployments in "+c.Namespace
		}
	}
	if mayNot {
		return append(hops, Hop{Cluster: c.String(), Name: hopAgents, State: Unknown, Source: "Pods in " + c.Namespace,
			Text: "you may not list Pods in " + c.Namespace}), manager, gateway, nil
	}
	found.judgeGateway(&hops[1], gateway, now)
	wanted := c.gatewaysWanted(ctx)
	if wanted == 0 && noneAtWork(&hops[1]) {
		hops[1].Text, hops[1].Source = "no gateway is at work, because its Deployment wants no Pods; scale it: kubectl -n "+c.Namespace+" scale deployment -l app.kubernetes.io/name=gateway --replicas=2", "Deployments in "+c.Namespace
	}
	if text := found.noStandby(gateway.Name, wanted); text != "" && !noneAtWork(&hops[1]) {
		hops = append(hops, Hop{Cluster: c.String(), Name: hopStandby, State: Limited, Reason: reasonNoStandby, Source: "Pods in " + c.Namespace, Text: text})
	}
	nodes, err := c.nodeHops(ctx, found)
	if err != nil {
		return nil, manager, gateway, err
	}
	if hops = append(hops, nodes...); noneAtWork(&hops[1]) {
		withoutGateway(hops)
	}
	if clocks, differ := c.clockHop(ctx, manager, gateway); differ {
		hops = append(hops, clocks)
	}
	rights, lacking, err := c.rightsHop(ctx)
	if err != nil || rights == nil {
		return hops, manager, gateway, err
	}
	found.excuseRights(rights, hops, lacking, cli.ImageTag())
	for i := range hops {
		if h := &hops[i]; h.State == Broken && slices.Contains(lacking, accounts[h.Name]) {
			h.State = Waits // for its rights
		}
	}
	return append([]Hop{*rights}, hops...), manager, gateway, nil
}

// leaseHop judges a component by the Lease that it renews.
func leaseHop(cluster, name, lease string, h Holder, remedy string) Hop {
	hop := Hop{Cluster: cluster, Name: name, State: Works, Source: lease, Since: h.since}
	switch {
	case h.Name != "":
		hop.Text = Printable(h.Name) + " is at work"
	case h.absent && name == hopGateway: // it is configured by files, or not ours
		hop.State, hop.Text = Unknown, h.Problem+", so that no gateway of this cluster was ever elected; "+remedy
	default:
		hop.State, hop.Text = Broken, "no "+name+" is at work: "+h.Problem+"; "+remedy
		if name == hopGateway { // the word that the manager has for it, which knows it earlier
			hop.Reason = isthmus.ReasonGatewaySilent
		}
	}
	return hop
}

// heed takes over from a Peering what the manager knows of the gateways: it looks at their Lease
// every few seconds and by one clock, and knows earlier that nobody renews it.
func heed(own []Hop, p *isthmus.Peering) {
	c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionConnected)
	if c == nil || c.Reason != isthmus.ReasonGatewaySilent {
		return
	}
	for i := range own {
		if h := &own[i]; h.Name == hopManager && h.State == Broken {
			return // then it is a memory
		}
	}
	for i := range own {
		if h := &own[i]; h.Name == hopGateway && h.State == Works {
			h.State, h.Reason, h.Text, h.Since = Broken, Printable(c.Reason), printable(c.Message, maxMessage), &c.LastTransitionTime
			h.Source = "condition Connected of Peering " + p.Name
			withoutGateway(own)
		}
	}
}

// nodeHops look for a route agent on every node that takes one, as the kubelets report. A node that is not
// ready is a hop of its own. Its kubelet may have lost the API server while its pods are reached, so nothing
// is called broken.
func (c *Cluster) nodeHops(ctx context.Context, found components) ([]Hop, error) {
	source := "Nodes, Pods in " + c.Namespace
	var nodes corev1.NodeList
	var sets appsv1.DaemonSetList
	switch err := c.client.List(ctx, &nodes); {
	case forbidden(err):
		return []Hop{{Cluster: c.String(), Name: hopAgents, Source: source, State: Unknown, Text: "you may not list Nodes"}}, nil
	case err != nil:
		return nil, c.explain("Nodes", err)
	}
	if err := c.client.List(ctx, &sets, client.InNamespace(c.Namespace)); err != nil && !forbidden(err) {
		return nil, c.explain("DaemonSets in "+c.Namespace, err)
	}
	hops := agentHops(c.String(), source, found, agentsOf(nodes.Items, found, sets.Items))
	if limited, is := c.kernelHop(ctx, nodes.Items); is {
		hops = append(hops, limited)
	}
	return hops, nil
}

// agentHops are a hop of the nodes, where some are not ready, and one of the agents.
func agentHops(cluster, source string, found components, a agents) (hops []Hop) {
	hop := Hop{Cluster: cluster, Name: hopAgents, Source: source}
	if len(a.unready) > 0 {
		hops = append(hops, Hop{Cluster: cluster, Name: hopNodes, State: Limited, Source: "Nodes",
			Text: fmt.Sprintf("%d of %d nodes are not ready, so whether their pods are reached is not known: %s; see `kubectl describe node`",
				len(a.unready), a.nodes+len(a.unready), firstFew(a.unready, "; "))})
	}
	hop.State, hop.Text = Works, fmt.Sprintf("on all %d nodes", a.nodes)
	switch {
	case a.lacking > 0:
		hop.followsGateway = a.lacking == a.unreached
		hop.State, hop.Text = Broken, fmt.Sprintf("pods on %d of %d nodes are not joined: %s", a.lacking, a.nodes, firstFew(a.missing, "; "))
	case len(a.versions) == 1:
		hop.Text += ", " + a.versions[0]
	}
	if several := found.versions(); several != "" {
		hop.Text += "; the components are of several versions, which is for an upgrade: " + several
	}
	if len(a.unwanted) > 0 {
		hop.Text += "; the DaemonSet wants none on " + firstFew(a.unwanted, ", ")
	}
	return append(hops, hop)
}

// kernelHop is what route agents say that their nodes lack, as far as these are there; false: nothing.
// What drops packets is broken, the rest is limited.
func (c *Cluster) kernelHop(ctx context.Context, nodes []corev1.Node) (Hop, bool) {
	hop := Hop{Cluster: c.String(), Name: hopKernels, State: Limited, Source: "NodeNetworks in " + c.Namespace}
	var reports isthmus.NodeNetworksList
	if err := c.client.List(ctx, &reports, client.InNamespace(c.Namespace)); err != nil {
		if meta.IsNoMatchError(err) {
			return hop, false // of an older version, whose agents say nothing
		}
		hop.State, hop.Text = Unknown, "NodeNetworks cannot be read: "+Printable(kubeerr.Plain("the API server", err).Error())
		return hop, true
	}
	hop.State, hop.Text = judgeKernels(reports.Items, nodes)
	return hop, hop.Text != ""
}

func judgeKernels(reports []isthmus.NodeNetworks, nodes []corev1.Node) (HopState, string) {
	on := make(map[isthmus.NodeProblem][]string)
	for i := range reports {
		r := &reports[i]
		if !slices.ContainsFunc(nodes, func(n corev1.Node) bool { return n.Name == r.Name }) {
			continue
		}
		for _, p := range r.Spec.Problems {
			on[p] = append(on[p], Printable(r.Name))
		}
	}
	for i := range nodes {
		if sharedGateway(&nodes[i]) {
			on[pastTheNode] = append(on[pastTheNode], Printable(nodes[i].Name))
		}
	}
	problems := slices.SortedFunc(maps.Keys(on), func(a, b isthmus.NodeProblem) int {
		return cmp.Or(cmp.Compare(severity(a), severity(b)), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Message, b.Message))
	})
	var texts []string
	for _, p := range problems {
		slices.Sort(on[p])
		texts = append(texts, fmt.Sprintf("%s on %s: %s", Printable(p.Reason), firstFew(on[p], ", "), printable(p.Message, maxMessage)))
	}
	state := Limited
	if len(problems) > 0 && severity(problems[0]) == 0 {
		state = Broken
	}
	return state, firstFew(texts, "; ")
}

// pastTheNode is what no agent sees: the packets never come to its kernel.
var pastTheNode = isthmus.NodeProblem{Reason: "PodsPassBy", Message: "OVN-Kubernetes has shared gateways: what pods send to peers passes the node's kernel by and leaves in the clear; " +
	"want local gateways (`--gateway-mode local`, on OpenShift `gatewayConfig.routingViaHost: true`)"}

// sharedGateway reports whether OVN-Kubernetes says of a node that its pods leave by br-ex.
func sharedGateway(n *corev1.Node) bool {
	var networks map[string]struct {
		Mode string `json:"mode"`
	}
	err := json.Unmarshal([]byte(n.Annotations["k8s.ovn.org/l3-gateway-config"]), &networks)
	return err == nil && networks["default"].Mode == "shared"
}

// severity is 0 for a problem of a node that keeps packets from arriving, and more for others.
func severity(p isthmus.NodeProblem) int {
	if p.Reason == kernel.LimitForwarding || p.Reason == kernel.LimitGateway || p == pastTheNode {
		return 0
	}
	return 1
}

// firstFew joins some of what may be much.
func firstFew(all []string, between string) string {
	const few = 5
	text := strings.Join(all[:min(len(all), few)], between)
	if len(all) > few {
		text += fmt.Sprintf("%sand %d more", between, len(all)-few)
	}
	return text
}

// agents is what is known of the route agents of a cluster.
type agents struct {
	nodes     int      // that are ready and take an agent
	lacking   int      // those of them that have none at work
	unreached int      // those that do not reach the gateway through the overlay
	missing   []string // which these are, and why
	unready   []string // nodes, and why
	unwanted  []string // nodes without an agent on which the DaemonSet wants none
	versions  []string // images
}

// virtual are labels of Nodes that no route agent runs on: there is no kernel of theirs to make
// routes in.
var virtual = map[string]string{
	"liqo.io/type":                   "virtual-node", // it stands for another cluster
	"type":                           "virtual-kubelet",
	"eks.amazonaws.com/compute-type": "fargate",
}

// takesAgents reports whether a route agent can run on a node.
func takesAgents(n *corev1.Node) bool {
	if os, told := n.Labels[corev1.LabelOSStable]; told && os != string(corev1.Linux) {
		return false
	}
	for label, value := range virtual {
		if n.Labels[label] == value {
			return false
		}
	}
	return true
}

// stillWanted is how many more nodes the DaemonSets of the agents want a Pod on; false where none
// tells.
func stillWanted(sets []appsv1.DaemonSet) (more int, told bool) {
	for i := range sets {
		s := &sets[i]
		if s.Spec.Template.Spec.ServiceAccountName != deploy.RouteAgentServiceAccount {
			continue
		}
		if s.Status.ObservedGeneration != s.Generation || s.Status.DesiredNumberScheduled == 0 { // nobody has counted, or it is in vain
			return 0, false
		}
		more, told = more+max(0, int(s.Status.DesiredNumberScheduled-s.Status.CurrentNumberScheduled)), true
	}
	return more, told
}

// agentsOf looks for the agent of each node. Whether a node without one is to have one, the
// DaemonSet knows, which chooses by labels and taints; without it all are.
func agentsOf(nodes []corev1.Node, found components, sets []appsv1.DaemonSet) (a agents) {
	on := make(map[string]*corev1.Pod)
	images := make(map[string]bool)
	for i := range found.pods {
		p := &found.pods[i]
		if p.Spec.ServiceAccountName != deploy.RouteAgentServiceAccount || p.Spec.NodeName == "" {
			continue
		}
		if other := on[p.Spec.NodeName]; other == nil || podProblem(other) != "" { // an old one may end beside a new one
			on[p.Spec.NodeName] = p
		}
		for _, container := range p.Spec.Containers {
			images[Printable(container.Image)] = true
		}
	}
	more, told := stillWanted(sets)
	var without []string // names of nodes
	for i := range nodes {
		n := &nodes[i]
		if !takesAgents(n) {
			continue
		}
		name := Printable(n.Name)
		p, why := on[n.Name], notReady(n)
		switch {
		case why != "" && (p != nil || !told):
			a.unready = append(a.unready, fmt.Sprintf("Node %s: %s", name, why))
		case p == nil && why == "":
			without = append(without, name)
		case p != nil:
			a.nodes++
			problem := found.problem(p)
			if o := found.broken[n.Name]; o != nil {
				a.unreached++
				says := "says that the gateway at %s is not reached through the overlay since %s, but is by the underlay: let UDP 4800 pass between nodes"
				if o.Back {
					says = "says that nothing comes from the gateway at %s through the overlay since %s, though pods send, and packets to it arrive: let UDP 4800 pass between nodes, in both directions"
				}
				problem = strings.TrimPrefix(problem+", and ", ", and ") + fmt.Sprintf(says, Printable(o.Gateway), Printable(o.Since))
			}
			if problem != "" {
				a.missing = append(a.missing, fmt.Sprintf("Node %s: Pod %s %s", name, Printable(p.Name), problem))
			}
		}
	}
	a.lacking = len(a.missing)
	const remedy = "no Pod of ServiceAccount " + deploy.RouteAgentServiceAccount + ": see the DaemonSet, and the node's taints"
	switch {
	case !told || more >= len(without): // all
		for _, name := range without {
			a.missing = append(a.missing, "Node "+name+" has "+remedy)
		}
		a.nodes, a.lacking = a.nodes+len(without), a.lacking+len(without)
	case more > 0:
		a.missing = append(a.missing, fmt.Sprintf("%d of the Nodes %s have %s", more, firstFew(without, ", "), remedy))
		a.nodes, a.lacking = a.nodes+more, a.lacking+more
	default:
		a.unwanted = without
	}
	a.versions = slices.Sorted(maps.Keys(images))
	return a
}

func notReady(n *corev1.Node) string {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return Printable(cmp.Or(c.Message, c.Reason, "is not ready"))
		}
	}
	return ""
}

// podProblem says why a Pod is not at work. One of which no kubelet has said anything but that it
// runs is.
func podProblem(p *corev1.Pod) string {
	if !p.DeletionTimestamp.IsZero() {
		return "is being deleted"
	}
	if p.Status.Phase != corev1.PodRunning {
		return "is " + Printable(string(p.Status.Phase)) + pendingFor(p)
	}
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil {
			why := "waits: " + Printable(w.Reason)
			if last := s.LastTerminationState.Terminated; last != nil { // the chart has the end of the log there
				lines := strings.Split(strings.TrimSpace(last.Message), "\n")
				why += fmt.Sprintf(", and ended with code %d: %s", last.ExitCode, printable(lines[len(lines)-1], maxMessage))
			} else if w.Message != "" {
				why += ": " + printable(w.Message, maxMessage)
			}
			return why
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status != corev1.ConditionTrue {
			return "is not ready: " + Printable(cmp.Or(c.Message, c.Reason))
		}
	}
	return ""
}

// pendingFor returns, after a colon, why a Pod does not run; empty: unknown.
func pendingFor(p *corev1.Pod) string {
	why := func(reason, message string) string {
		if reason == "" {
			return ""
		}
		if reason = ": " + Printable(reason); message != "" {
			reason += ": " + printable(message, maxMessage)
		}
		return reason
	}
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil {
			return why(w.Reason, w.Message)
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			return why(c.Reason, c.Message)
		}
	}
	return why(p.Status.Reason, p.Status.Message)
}

// gatewaysWanted returns how many Pods of the gateway the Deployments want; -1: unknown.
func (c *Cluster) gatewaysWanted(ctx context.Context) int {
	var deployments appsv1.DeploymentList // a help: who may not read it sees the Pods
	if c.client.List(ctx, &deployments, client.InNamespace(c.Namespace), client.MatchingLabels{"app.kubernetes.io/name": "gateway"}) != nil || len(deployments.Items) == 0 {
		return -1
	}
	n := 0
	for i := range deployments.Items {
		n += int(ptr.Deref(deployments.Items[i].Spec.Replicas, 1))
	}
	return n
}

// rolloutStep is how long after a step of a rollout another manager may still be taking over: the Lease of one
// that was killed lasts 15 seconds.
const rolloutStep = 30 * time.Second

// managersRoll says that the Deployment of the managers is being rolled out, or was just before, and a manager
// is available to take over; empty: no, or it is not known.
func (c *Cluster) managersRoll(ctx context.Context, now time.Time) string {
	var deployments appsv1.DeploymentList // a help, as in gatewaysWanted
	if c.client.List(ctx, &deployments, client.InNamespace(c.Namespace), client.MatchingLabels{"app.kubernetes.io/name": "manager"}) != nil {
		return ""
	}
	return rolls(deployments.Items, now)
}

func rolls(deployments []appsv1.Deployment, now time.Time) string {
	for i := range deployments {
		d := &deployments[i]
		for _, p := range d.Status.Conditions {
			// Its controller dates the condition at each Pod that comes or goes in a rollout, and not for one that
			// crashes later.
			if p.Type == appsv1.DeploymentProgressing && p.Status == corev1.ConditionTrue && now.Sub(p.LastUpdateTime.Time) < rolloutStep && d.Status.AvailableReplicas > 0 {
				return fmt.Sprintf("another one takes over, since Deployment %s is being rolled out and %d of its Pods are available", Printable(d.Name), d.Status.AvailableReplicas)
			}
		}
	}
	return ""
}

// stepNames are the conditions of a Peering as hops.
var stepNames = map[string]string{
	isthmus.ConditionIdentity: "identity", isthmus.ConditionPublished: "publishing", isthmus.ConditionAnswered: "answer",
	isthmus.ConditionPeerConfig: "peer's networks", isthmus.ConditionTunnelEndpoint: "agreement", isthmus.ConditionConnected: "tunnel",
	isthmus.ConditionReady: "peering",
}

// followsWithdrawal are the reasons of a tunnel that a peer has taken down because it has no
// NetworkConfig of ours any more.
var followsWithdrawal = []string{v1alpha1.CausePeerSilent, v1alpha1.CauseNoAnswer}

// peeringHops are those of one Peering, by its conditions. before are the cluster's: where the
// manager is gone, what a condition says is a memory, and where no gateway is at work, what that of
// the tunnel says.
func peeringHops(cluster string, p *isthmus.Peering, before []Hop) (hops []Hop) {
	var manager, gateway *Hop
	for i := range before {
		switch {
		case before[i].Name == hopManager && before[i].State == Broken:
			manager = &before[i]
		case before[i].Name == hopGateway && before[i].State == Broken:
			gateway = &before[i]
		}
	}
	broken, refused, left := false, false, false
	for _, step := range append(slices.Clone(steps), isthmus.ConditionReady) {
		hop := Hop{Cluster: cluster, Peering: p.Name, Name: stepNames[step], State: Works, Source: "condition " + step + " of Peering " + p.Name}
		condition := meta.FindStatusCondition(p.Status.Conditions, step)
		if condition == nil || max(condition.ObservedGeneration, p.Status.ObservedGeneration) < p.Generation {
			hop.State, hop.Text = Unknown, "the manager has not looked at it yet"
			if manager != nil {
				hop.State = Waits
			}
		} else {
			hop.Reason, hop.Text, hop.Since = Printable(condition.Reason), printable(condition.Message, maxMessage), &condition.LastTransitionTime
			switch {
			case manager != nil:
				hop.State, hop.Text = Unknown, "nobody keeps it up to date; it was: "+hop.Reason+": "+hop.Text
			case gateway != nil && (step == isthmus.ConditionConnected || step == isthmus.ConditionReady):
				hop.State, hop.Text = Waits, "no gateway is at work, so that nobody knows"
			case isthmus.Limited(condition):
				if hop.State = Limited; step == isthmus.ConditionReady { // it repeats what is said already
					continue
				}
			case condition.Status == metav1.ConditionTrue:
			case step == isthmus.ConditionReady && broken: // it repeats what is said already
				continue
			case condition.Status == metav1.ConditionUnknown || broken && slices.Contains(isthmus.WaitReasons, condition.Reason):
				hop.State = Waits
				if !broken {
					hop.State = Unknown
				}
			case refused && step == isthmus.ConditionConnected && slices.Contains(followsWithdrawal, condition.Reason):
				hop.State = Waits
			case left && condition.Reason == isthmus.ReasonPeerWithdrew: // the same in other words
				hop.State = Waits
			default:
				hop.State, broken = Broken, true
				left = left || condition.Reason == v1alpha1.ReasonNotPeered
				refused = refused || step == isthmus.ConditionPublished
			}
		}
		hops = append(hops, hop)
	}
	return hops
}

// FirstBroken is the first hop that is broken, nil for none: the one to act on. Where several say
// something of the tunnels between two clusters, it is the one that knows most. What is broken on
// some nodes only comes last, and so do names: they break nothing else.
func FirstBroken(hops []Hop) *Hop {
	var first *Hop
	for i := range hops {
		h := &hops[i]
		if h.State != Broken {
			continue
		}
		if first == nil || comesLast(first) && !comesLast(h) ||
			first.Name == h.Name && h.Name == stepNames[isthmus.ConditionConnected] && telling(h.Reason) > telling(first.Reason) {
			first = h
		}
	}
	return first
}

// ofNodes reports whether a hop is about nodes one by one.
func ofNodes(h *Hop) bool { return h.Name == hopNodes || h.Name == hopAgents || h.Name == hopKernels }

func comesLast(h *Hop) bool { return ofNodes(h) || h.Name == hopNames }

// telling is how much a reason of the tunnel says about what to mend: whoever hears nothing knows
// least.
func telling(reason string) int {
	return slices.Index([]string{
		isthmus.ReasonLost, v1alpha1.CauseNoAnswer, v1alpha1.CausePeerSilent, v1alpha1.CauseProbeUnanswered, v1alpha1.CauseAnswersLost,
		v1alpha1.CauseRangesDisagree, v1alpha1.CauseWrongKey, v1alpha1.CauseSendError, v1alpha1.CauseEndpointName, v1alpha1.CauseNotApplied, v1alpha1.CausePathMTU,
	}, reason)
}

// identityExpiry says until when the identity of a Peering at the peer is good, as its token says;
// false where that is not known, or not to be read.
func (c *Cluster) identityExpiry(ctx context.Context, p *isthmus.Peering) (time.Time, bool) {
	var secret corev1.Secret
	if err := c.client.Get(ctx, client.ObjectKey{Namespace: p.Spec.TenantNamespace.Local, Name: p.Spec.IdentitySecretName}, &secret); err != nil {
		return time.Time{}, false
	}
	config, err := clientcmd.Load(secret.Data[isthmus.SecretKubeconfig])
	if err != nil {
		return time.Time{}, false
	}
	for _, user := range config.AuthInfos {
		if at, ok := tokenExpiry(user.Token); ok {
			return at, true
		}
	}
	return time.Time{}, false
}

// tokenExpiry reads what a JSON Web Token says of its end (RFC 7519, section 4.1.4). Its signature
// is the API server's business.
func tokenExpiry(token string) (time.Time, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, false
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}, false
	}
	var claims struct {
		Expires int64 `json:"exp"`
	}
	if json.Unmarshal(text, &claims) != nil || claims.Expires <= 0 {
		return time.Time{}, false
	}
	return time.Unix(claims.Expires, 0).UTC(), true
}

// forbidden reports whether an error is about the rights of whoever asks, as far as it is one.
func forbidden(err error) bool {
	if err == nil {
		return false
	}
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return !slices.ContainsFunc(j.Unwrap(), func(e error) bool { return !forbidden(e) })
	}
	return apierrors.IsForbidden(err)
}
