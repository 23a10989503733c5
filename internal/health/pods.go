package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// Components is the state of the Pods of an installation, as read from the API server.
type Components struct {
	Pods     []corev1.Pod
	Services []string                          // names of the Services by which peers reach the gateway; nil if listing them is forbidden
	Events   map[string]string                 // Pod → its latest warning
	Broken   map[string]*isthmus.BrokenOverlay // node → its agent's report of a broken overlay
	Refuses  map[string]string                 // node → the problem that makes the node drop packets of pods
}

// maxEventAge is the maximum age of an Event that is shown as the reason why a Pod is not
// ready. Components repeat their Events every ten minutes.
const maxEventAge = 12 * time.Minute

// readyLag is the maximum time from a Pod's own Event until the kubelet notices that the Pod is not
// ready.
const readyLag = 2 * time.Minute

// unrelated are reasons of Events that cannot explain why a Pod is not ready.
var unrelated = []string{"MissingClusterDNS", "DNSConfigForming"}

// LastWarnings returns the latest warning about each Pod that still applies. It skips warnings that
// are older than maxEventAge, and warnings that a later Event in revocations revokes. It also skips
// warnings from more than readyLag before the last change of the Pod's condition Ready. A warning
// of our own components takes precedence over a warning of the kubelet, which would only repeat
// that the Pod is not ready. The age of an Event is the difference to now, a time of the API
// server's clock. The times of all Events of one Pod come from the clock of its node, so they can
// be compared.
func LastWarnings(warnings, revocations []corev1.Event, pods []corev1.Pod, now time.Time) map[string]string {
	after := make(map[string]time.Time)
	for i := range pods {
		for _, c := range pods[i].Status.Conditions {
			if c.Type == corev1.PodReady && !c.LastTransitionTime.IsZero() {
				after[pods[i].Name] = c.LastTransitionTime.Add(-readyLag)
			}
		}
	}
	type reporter struct{ pod, name string }
	mended := make(map[reporter]time.Time)
	for i := range revocations {
		e := &revocations[i]
		by := reporter{e.InvolvedObject.Name, e.ReportingController}
		if seen := eventTime(e); seen.After(mended[by]) {
			mended[by] = seen
		}
	}
	texts, latest, own := make(map[string]string), make(map[string]time.Time), make(map[string]bool)
	for i := range warnings {
		e := &warnings[i]
		pod, seen := e.InvolvedObject.Name, eventTime(e)
		if now.Sub(writeTime(e)) >= maxEventAge || seen.Before(after[pod]) || !seen.After(mended[reporter{pod, e.ReportingController}]) || slices.Contains(unrelated, e.Reason) {
			continue
		}
		ours := strings.HasPrefix(e.ReportingController, isthmus.GroupVersion.Group+"/")
		if own[pod] && !ours || own[pod] == ours && !seen.After(latest[pod]) {
			continue
		}
		latest[pod], own[pod], texts[pod] = seen, ours, fmt.Sprintf("%s: %s", safetext.Of(e.Reason), safetext.Cut(strings.TrimSpace(e.Message), safetext.Message))
	}
	return texts
}

// AgentsLag is the maximum time until an agent notices that packets return to its node again, or
// that a gateway is active again.
const AgentsLag = 20 * time.Second

// ConnectedBefore reports whether the tunnel of a Peering is up, and came up before the time t.
func ConnectedBefore(p *isthmus.Peering, t time.Time) bool {
	c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionConnected)
	return c != nil && c.Status == metav1.ConditionTrue && c.LastTransitionTime.Time.Before(t)
}

// eventTime returns the time at which an Event was last observed.
func eventTime(e *corev1.Event) time.Time {
	at := e.EventTime.Time
	for _, t := range []time.Time{e.LastTimestamp.Time, e.FirstTimestamp.Time} {
		if t.After(at) {
			at = t
		}
	}
	if e.Series != nil && e.Series.LastObservedTime.After(at) {
		at = e.Series.LastObservedTime.Time
	}
	return at
}

// problem returns the reason why a Pod does not work, with the message of its last Event, or "" if
// the Pod works.
func (f Components) problem(p *corev1.Pod) string {
	why := PodProblem(p)
	if event := f.Events[p.Name]; why != "" && event != "" {
		why += "; its last Event: " + event
	}
	return why
}

// problems returns, after a colon, the problems of these Pods, or "" if all of them work.
func (f Components) problems(pods []*corev1.Pod) string {
	var all []string
	for _, p := range pods {
		if why := f.problem(p); why != "" {
			all = append(all, fmt.Sprintf("Pod %s %s", safetext.Of(p.Name), why))
		}
	}
	if len(all) == 0 {
		return ""
	}
	return ": " + safetext.FirstFew(all, "; ")
}

// ExplainManager adds the problems of the manager's Pods to HopManager, if no manager is active.
func (f Components) ExplainManager(hop *Hop) {
	if hop.State != Broken {
		return
	}
	var managers []*corev1.Pod
	for i := range f.Pods {
		if p := &f.Pods[i]; p.Spec.ServiceAccountName == deploy.ManagerServiceAccount {
			managers = append(managers, p)
		}
	}
	slices.SortFunc(managers, byName)
	hop.Text += f.problems(managers)
}

func byName(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) }

// Gateways returns the gateway Pods, sorted by name.
func (f Components) Gateways() (all []*corev1.Pod) {
	for i := range f.Pods {
		if p := &f.Pods[i]; p.Labels["app.kubernetes.io/name"] == "gateway" || p.Spec.ServiceAccountName == deploy.GatewayServiceAccount {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, byName)
	return all
}

// Reasons for which the gateway's hop is broken although a gateway is active.
const (
	reasonSeveralActive = "SeveralActive"
	reasonNoneMarked    = "NoneMarked"
	reasonServices      = "ServiceMissing"
)

// markedFor is how long a gateway may hold the Lease before its Pod must have the label.
const markedFor = 15 * time.Second

// CheckGateway adds the state of the gateway's Pods to the hop of its Lease.
func (f Components) CheckGateway(hop *Hop, h Holder, now time.Time) {
	gateways := f.Gateways()
	if hop.State != Works {
		if hop.State == Unknown && len(gateways) > 0 { // there are gateway Pods, so the gateway belongs to this installation
			hop.State = Broken
		}
		hop.Text += f.problems(gateways)
		if hop.State == Broken && len(gateways) == 0 {
			hop.Text += ": there are no gateway Pods in the namespace"
		}
		return
	}
	var marked []string
	for i := range f.Pods {
		if p := &f.Pods[i]; p.Labels[v1alpha1.LabelGateway] == v1alpha1.GatewayActive {
			marked = append(marked, safetext.Of(p.Name))
		}
	}
	slices.Sort(marked)
	settled := h.Since != nil && now.Sub(h.Since.Time) > markedFor
	switch {
	case f.Services != nil && len(f.Services) != 1:
		hop.State, hop.Reason, hop.Since = Broken, reasonServices, nil
		hop.Text = fmt.Sprintf("%d Services have the label %s=true (%s), but there must be exactly one, through which peers reach the gateway: connected peers stay connected until their gateway or ours moves; `isthmus install` restores a missing Service; delete additional ones",
			len(f.Services), v1alpha1.LabelGateway, strings.Join(f.Services, ", "))
		hop.Source = "Services"
	case len(marked) > 1:
		hop.State, hop.Reason = Broken, reasonSeveralActive
		hop.Text = fmt.Sprintf("the Service sends peers to %d Pods, %s, because all have the label %s=%s, but only %s holds the Lease; find out who set the label, and delete the other Pods or their label",
			len(marked), strings.Join(marked, ", "), v1alpha1.LabelGateway, v1alpha1.GatewayActive, safetext.Of(h.Name))
		hop.Source, hop.Since = "labels of Pods", nil
	case len(marked) == 0 && settled && len(f.Pods) > 0:
		hop.State, hop.Reason = Broken, reasonNoneMarked
		hop.Text = fmt.Sprintf("the Service sends peers to no Pod, because none has the label %s=%s, although %s holds the Lease; that gateway may lack the right to patch its Pod: see the hop rights and its log",
			v1alpha1.LabelGateway, v1alpha1.GatewayActive, safetext.Of(h.Name))
		hop.Source, hop.Since = "labels of Pods", nil
	}
}

// ReasonNoStandby is the reason of the hop standby.
const ReasonNoStandby = "NoStandby"

// NoStandby returns the reason why no gateway Pod can take over from the active one. It returns ""
// if a Pod can take over, or if only one gateway is wanted. wanted is the number of wanted Pods. If
// wanted is -1, the number is unknown, and NoStandby uses the number of existing Pods.
func (f Components) NoStandby(active string, wanted int) string {
	gateways := f.Gateways()
	if wanted < 0 {
		wanted = len(gateways)
	}
	if wanted < 2 {
		return ""
	}
	var pods []string
	for _, p := range gateways {
		if p.Name == active {
			continue
		}
		why := f.problem(p)
		if why == "" {
			return ""
		}
		pods = append(pods, fmt.Sprintf("Pod %s %s", safetext.Of(p.Name), why))
	}
	why := safetext.FirstFew(pods, "; ")
	if len(pods) == 0 {
		why = fmt.Sprintf("the Deployment wants %d Pods, but there is no second one; see `kubectl describe` of the gateway's Deployment and its ReplicaSets", wanted)
	}
	return fmt.Sprintf("no standby can take over: if Pod %s or its node fails, no pod reaches any peer until another gateway starts: %s", safetext.Of(active), why)
}

// versions lists the images of the components with the number of Pods of each. It returns "" if
// all Pods have the same image.
func (f Components) versions() string {
	images := make(map[string]map[string]int)
	for i := range f.Pods {
		p := &f.Pods[i]
		var component string
		switch p.Spec.ServiceAccountName {
		case deploy.ManagerServiceAccount:
			component = "manager"
		case deploy.GatewayServiceAccount:
			component = "gateway"
		case deploy.RouteAgentServiceAccount:
			component = "route agent"
		default:
			if p.Labels["app.kubernetes.io/name"] != "gateway" {
				continue
			}
			component = "gateway"
		}
		for _, container := range p.Spec.Containers {
			image := safetext.Of(container.Image)
			if images[image] == nil {
				images[image] = make(map[string]int)
			}
			images[image][component]++
		}
	}
	if len(images) < 2 {
		return ""
	}
	var all []string
	for _, image := range slices.Sorted(maps.Keys(images)) {
		var counts []string
		for _, component := range slices.Sorted(maps.Keys(images[image])) {
			counts = append(counts, fmt.Sprintf("%d %s", images[image][component], component))
		}
		all = append(all, fmt.Sprintf("%s (%s)", image, strings.Join(counts, ", ")))
	}
	return strings.Join(all, ", ")
}

// labelVersion is the label with the version on the Pods of an installation.
const labelVersion = "app.kubernetes.io/version"

// otherVersion returns the version of a component if it differs from the given version, or "" if
// all components have that version.
func (f Components) otherVersion(version string) string {
	for i := range f.Pods {
		p := &f.Pods[i]
		if other := p.Labels[labelVersion]; other != "" && other != version && slices.Contains(slices.Collect(maps.Values(Accounts)), p.Spec.ServiceAccountName) {
			return safetext.Of(other)
		}
	}
	return ""
}

// Accounts are the ServiceAccounts of the components, by hop.
var Accounts = map[string]string{
	HopManager: deploy.ManagerServiceAccount, HopGateway: deploy.GatewayServiceAccount, HopAgents: deploy.RouteAgentServiceAccount,
}

// PodProblem returns the reason why a Pod does not work, or "" if it works. A running Pod without
// further status counts as working.
func PodProblem(p *corev1.Pod) string {
	if why := stopped(p); why != "" {
		return why
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status != corev1.ConditionTrue {
			if text := cmp.Or(c.Message, c.Reason); text != "" { // the node controller writes neither
				return "is not ready: " + safetext.Of(text)
			}
			return "is not ready"
		}
	}
	return ""
}

// stopped returns the reason why a Pod does not run, or "" if it runs. A Pod that runs may still be
// unready.
func stopped(p *corev1.Pod) string {
	if !p.DeletionTimestamp.IsZero() {
		return "is being deleted"
	}
	if p.Status.Phase != corev1.PodRunning {
		return "is " + safetext.Of(string(p.Status.Phase)) + pendingFor(p)
	}
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil {
			why := "waits: " + safetext.Of(w.Reason)
			// The chart makes the end of the log the termination message.
			if last := s.LastTerminationState.Terminated; last != nil {
				lines := strings.Split(strings.TrimSpace(last.Message), "\n")
				why += fmt.Sprintf(", after exit code %d: %s", last.ExitCode, safetext.Cut(lines[len(lines)-1], safetext.Message))
			} else if w.Message != "" {
				why += ": " + safetext.Cut(w.Message, safetext.Message)
			}
			return why
		}
	}
	return ""
}

// pendingFor returns a colon and the reason why a Pod does not run yet, or "" if the reason is
// unknown.
func pendingFor(p *corev1.Pod) string {
	why := func(reason, message string) string {
		if reason == "" {
			return ""
		}
		if reason = ": " + safetext.Of(reason); message != "" {
			reason += ": " + safetext.Cut(message, safetext.Message)
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

// rolloutStep is how long after a step of a rollout another manager may still be taking over.
// The Lease of a killed manager stays valid for 15 seconds.
const rolloutStep = 30 * time.Second

// Rolls returns a sentence if a rollout of a Deployment is in progress or has just ended, and one
// of the Deployment's Pods is available to take over. Otherwise it returns "".
func Rolls(deployments []appsv1.Deployment, now time.Time) string {
	for i := range deployments {
		d := &deployments[i]
		for _, p := range d.Status.Conditions {
			// During a rollout, the controller updates the condition for each Pod that it
			// creates or deletes. It does not do so for a Pod that crashes later.
			if p.Type == appsv1.DeploymentProgressing && p.Status == corev1.ConditionTrue && now.Sub(p.LastUpdateTime.Time) < rolloutStep && d.Status.AvailableReplicas > 0 {
				return fmt.Sprintf("another one is taking over: Deployment %s is being rolled out, and %d of its Pods are available", safetext.Of(d.Name), d.Status.AvailableReplicas)
			}
		}
	}
	return ""
}

// ExcuseRights excuses missing rights if the installed version differs from this program's version,
// because the installed components may not use these rights. It does not excuse them if a component
// that lacks a right is broken.
func (f Components) ExcuseRights(rights *Hop, hops []Hop, lacking []string, program string) {
	other := f.otherVersion(program)
	if rights.State != Broken || other == "" || slices.ContainsFunc(hops, func(h Hop) bool { return h.State == Broken && slices.Contains(lacking, Accounts[h.Name]) }) {
		return
	}
	rights.State = Limited
	rights.Text = fmt.Sprintf("the installed version, %s, may not need the rights that this program, %s, checks: %s", other, program, rights.Text)
}
