package peering

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
)

// eventsOfLate is how old an Event of a Pod may be that is shown as the reason why it is not ready:
// components repeat theirs every ten minutes.
const eventsOfLate = 12 * time.Minute

// components is what the API server knows of the Pods of an installation.
type components struct {
	pods     []corev1.Pod
	services []string                          // by which peers reach the gateway; nil: they may not be listed
	events   map[string]string                 // the latest warning of each Pod, by its name
	broken   map[string]*isthmus.BrokenOverlay // what route agents say of their overlays, by node
	refuses  map[string]string                 // what they say that drops packets of pods, by node
}

// components lists them. Rights that are missing are an error; those to read Events are not needed.
func (c *Cluster) components(ctx context.Context, now time.Time) (found components, err error) {
	var pods corev1.PodList
	if err := c.client.List(ctx, &pods, client.InNamespace(c.Namespace)); err != nil {
		return found, err
	}
	found.pods = pods.Items
	var services corev1.ServiceList
	if c.client.List(ctx, &services, client.InNamespace(c.Namespace), client.MatchingLabels{v1alpha1.LabelGateway: "true"}) == nil {
		found.services = []string{}
		for i := range services.Items {
			found.services = append(found.services, Printable(services.Items[i].Name))
		}
	}
	found.broken, found.refuses = make(map[string]*isthmus.BrokenOverlay), make(map[string]string)
	var reports isthmus.NodeNetworksList // a help: who may not read it sees the agents' Pods
	_ = c.client.List(ctx, &reports, client.InNamespace(c.Namespace))
	connected := sync.OnceValue(func() bool { return c.anyConnected(ctx, now) })
	for i := range reports.Items {
		r := &reports.Items[i]
		if o := r.Spec.BrokenOverlay; o != nil && (!o.Back || connected()) {
			found.broken[r.Name] = o
		}
		for _, p := range r.Spec.Problems {
			if severity(p) == 0 {
				found.refuses[r.Name] = Printable(p.Reason) + ": " + printable(p.Message, maxMessage)
			}
		}
	}
	var warnings, over corev1.EventList // they only say more
	about := client.MatchingFields{"type": corev1.EventTypeWarning, "involvedObject.kind": "Pod"}
	if c.client.List(ctx, &warnings, client.InNamespace(c.Namespace), about) == nil {
		about = client.MatchingFields{"type": corev1.EventTypeNormal, "reason": isthmus.EventApplied, "involvedObject.kind": "Pod"}
		if c.client.List(ctx, &over, client.InNamespace(c.Namespace), about) == nil {
			found.events = lastWarnings(warnings.Items, over.Items, found.pods, now)
		}
	}
	return found, nil
}

// readyLag is how much later a kubelet may see that a Pod is not ready than the Pod has said why.
const readyLag = 2 * time.Minute

// unrelated are reasons of Events that say nothing about why a Pod is not ready.
var unrelated = []string{"MissingClusterDNS", "DNSConfigForming"}

// lastWarnings returns the latest current warning about each Pod: not an old one, not one from before the Pod
// was ready, and not one that its reporter has taken back. A warning of our own components comes before those
// of a kubelet, which only repeat that the Pod is not ready. The API server, whose clock now is, knows how old
// an Event is; their order is by the clock of the Pod's node, where all of them are written.
func lastWarnings(warnings, over []corev1.Event, pods []corev1.Pod, now time.Time) map[string]string {
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
	for i := range over {
		e := &over[i]
		by := reporter{e.InvolvedObject.Name, e.ReportingController}
		if at := eventTime(e); at.After(mended[by]) {
			mended[by] = at
		}
	}
	said, latest, own := make(map[string]string), make(map[string]time.Time), make(map[string]bool)
	for i := range warnings {
		e := &warnings[i]
		pod, at := e.InvolvedObject.Name, eventTime(e)
		if now.Sub(writtenAt(e)) >= eventsOfLate || at.Before(after[pod]) || !at.After(mended[reporter{pod, e.ReportingController}]) || slices.Contains(unrelated, e.Reason) {
			continue
		}
		ours := strings.HasPrefix(e.ReportingController, isthmus.GroupVersion.Group+"/")
		if own[pod] && !ours || own[pod] == ours && !at.After(latest[pod]) {
			continue
		}
		latest[pod], own[pod], said[pod] = at, ours, fmt.Sprintf("%s: %s", Printable(e.Reason), printable(strings.TrimSpace(e.Message), maxMessage))
	}
	return said
}

// agentsLag is how long an agent may take until it sees that packets come back to its node again.
const agentsLag = 20 * time.Second

// anyConnected reports whether packets have gone both ways between this cluster and some peer for agentsLag.
// Otherwise an outage between the clusters explains why none came back to a node.
func (c *Cluster) anyConnected(ctx context.Context, now time.Time) bool {
	var list isthmus.PeeringList
	return c.client.List(ctx, &list) == nil && slices.ContainsFunc(list.Items, func(p isthmus.Peering) bool { return connectedBefore(&p, now.Add(-agentsLag)) })
}

func connectedBefore(p *isthmus.Peering, at time.Time) bool {
	c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionConnected)
	return c != nil && c.Status == metav1.ConditionTrue && c.LastTransitionTime.Time.Before(at)
}

// eventTime is when an Event was last observed.
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

// problem says why a Pod is not at work, and what it says of that itself; empty: it is.
func (f components) problem(p *corev1.Pod) string {
	why := podProblem(p)
	if event := f.events[p.Name]; why != "" && event != "" {
		why += "; its last Event: " + event
	}
	return why
}

// gateways are the Pods of the gateway, sorted by name.
func (f components) gateways() (all []*corev1.Pod) {
	for i := range f.pods {
		if p := &f.pods[i]; p.Labels["app.kubernetes.io/name"] == "gateway" || p.Spec.ServiceAccountName == deploy.GatewayServiceAccount {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// Reasons of the hop of the gateway that say that one is at work all the same.
const (
	reasonSeveralActive = "SeveralActive"
	reasonNoneMarked    = "NoneMarked"
	reasonServices      = "ServiceMissing"
)

// markedFor is how long a gateway holds the Lease at least until it has marked its Pod.
const markedFor = 15 * time.Second

// judgeGateway adds to a hop of the Lease what the Pods of the gateway say.
func (f components) judgeGateway(hop *Hop, h Holder, now time.Time) {
	gateways := f.gateways()
	if hop.State != Works {
		if hop.State == Unknown && len(gateways) > 0 { // there are some, and ours
			hop.State = Broken
		}
		var pods []string
		for _, p := range gateways {
			if why := f.problem(p); why != "" {
				pods = append(pods, fmt.Sprintf("Pod %s %s", Printable(p.Name), why))
			}
		}
		if len(pods) > 0 {
			hop.Text += ": " + firstFew(pods, "; ")
		}
		if hop.State == Broken && len(gateways) == 0 {
			hop.Text += ": there are none in the namespace"
		}
		return
	}
	var marked []string
	for i := range f.pods {
		if p := &f.pods[i]; p.Labels[v1alpha1.LabelGateway] == v1alpha1.GatewayActive {
			marked = append(marked, Printable(p.Name))
		}
	}
	slices.Sort(marked)
	settled := h.since != nil && now.Sub(h.since.Time) > markedFor
	switch {
	case f.services != nil && len(f.services) != 1:
		hop.State, hop.Reason, hop.Since = Broken, reasonServices, nil
		hop.Text = fmt.Sprintf("there are %d Services with the label %s=true (%s), by one of which peers reach the gateway: peers that are connected stay so until their gateway or ours moves; `isthmus install` makes it again, and whatever is more has to be deleted",
			len(f.services), v1alpha1.LabelGateway, strings.Join(f.services, ", "))
		hop.Source = "Services"
	case len(marked) > 1:
		hop.State, hop.Reason = Broken, reasonSeveralActive
		hop.Text = fmt.Sprintf("the Service leads peers to %d Pods, %s, because all have the label %s=%s; only %s holds the Lease: see who set the label, and delete the other Pods or their label",
			len(marked), strings.Join(marked, ", "), v1alpha1.LabelGateway, v1alpha1.GatewayActive, Printable(h.Name))
		hop.Source, hop.Since = "labels of Pods", nil
	case len(marked) == 0 && settled && len(f.pods) > 0:
		hop.State, hop.Reason = Broken, reasonNoneMarked
		hop.Text = fmt.Sprintf("the Service leads peers to no Pod, because none has the label %s=%s, though %s holds the Lease: it may lack the right to patch its Pod, see the hop rights and its log",
			v1alpha1.LabelGateway, v1alpha1.GatewayActive, Printable(h.Name))
		hop.Source, hop.Since = "labels of Pods", nil
	}
}

// reasonNoStandby is the reason of the hop standby.
const reasonNoStandby = "NoStandby"

// noStandby returns why no Pod of the gateway can take over from the active one; empty: one can, or only
// one gateway is wanted. wanted is the number of wanted Pods; -1: unknown, and the existing Pods are
// wanted.
func (f components) noStandby(active string, wanted int) string {
	gateways := f.gateways()
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
		pods = append(pods, fmt.Sprintf("Pod %s %s", Printable(p.Name), why))
	}
	why := firstFew(pods, "; ")
	if len(pods) == 0 {
		why = fmt.Sprintf("%d Pods are wanted, and there is no other one; see `kubectl describe` of the gateway's Deployment and its ReplicaSets", wanted)
	}
	return fmt.Sprintf("there is none: if Pod %s or its node ends, no pod reaches any peer until another gateway starts: %s", Printable(active), why)
}

// versions are the images of the components, each with how many Pods have it, where there is more
// than one; empty: all have the same.
func (f components) versions() string {
	images := make(map[string]map[string]int)
	for i := range f.pods {
		p := &f.pods[i]
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
			image := Printable(container.Image)
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
		var of []string
		for _, component := range slices.Sorted(maps.Keys(images[image])) {
			of = append(of, fmt.Sprintf("%d %s", images[image][component], component))
		}
		all = append(all, fmt.Sprintf("%s (%s)", image, strings.Join(of, ", ")))
	}
	return strings.Join(all, ", ")
}

// labelVersion says on the Pods of an installation which version they are.
const labelVersion = "app.kubernetes.io/version"

// otherVersion is that of a component which is not of the version given; empty where no Pod of one
// says so.
func (f components) otherVersion(version string) string {
	for i := range f.pods {
		p := &f.pods[i]
		if at := p.Labels[labelVersion]; at != "" && at != version && slices.Contains(slices.Collect(maps.Values(accounts)), p.Spec.ServiceAccountName) {
			return Printable(at)
		}
	}
	return ""
}
