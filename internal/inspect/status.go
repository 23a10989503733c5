// Package inspect reads the state of a cluster and its peerings, for `isthmus status`,
// `diagnose` and `trace`. It changes nothing. Package health evaluates what inspect has read.
package inspect

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

// Status is the state of a cluster's peerings.
type Status struct {
	Cluster   v1alpha1.ClusterIdentity `json:"cluster"`
	Namespace string                   `json:"namespace"` // namespace of the installation
	Manager   health.Holder            `json:"manager"`   // the active manager
	Gateway   health.Holder            `json:"gateway"`   // the active gateway
	Gateways  []GatewayPod             `json:"gateways"`  // Pods that have the label of an active gateway; normally one
	Hops      []health.Hop             `json:"hops"`      // hops that all peerings share
	Peerings  []Row                    `json:"peerings"`  // sorted by name
	At        time.Time                `json:"at"`        // when the status was read, by the API server's clock
}

// A GatewayPod is the Pod of an active gateway.
type GatewayPod struct {
	Pod  string `json:"pod"`
	Node string `json:"node"`
	IP   string `json:"ip"`
}

// A Row is the state of one peering.
type Row struct {
	Name      string                   `json:"name"`
	Cluster   v1alpha1.ClusterIdentity `json:"cluster"`
	Ready     bool                     `json:"ready"`
	Status    metav1.ConditionStatus   `json:"status"`             // status of the condition Ready, or Unknown while no component updates the condition
	Reason    string                   `json:"reason"`             // reason of the condition Ready
	Problem   string                   `json:"problem,omitempty"`  // the first problem
	Problems  []string                 `json:"problems,omitempty"` // all problems, the first one first
	Deleting  bool                     `json:"deleting,omitempty"`
	Namespace string                   `json:"namespace"` // tenant namespace
	Local     isthmus.Networks         `json:"local"`     // our networks, and the networks that the peer sees instead
	Remote    isthmus.Networks         `json:"remote"`    // the peer's networks, and the networks that we see instead
	Endpoint  string                   `json:"endpoint,omitempty"`
	Latency   string                   `json:"latency,omitempty"`
	// PostQuantum is the state of the tunnel's preshared key. It is zero if the state is unknown.
	PostQuantum isthmus.PostQuantumStatus `json:"postQuantum,omitzero"`
	// Keys are the WireGuard keys that the current sessions use.
	Keys isthmus.KeysStatus `json:"keys,omitzero"`
	// Services counts the services that the peer exports to this cluster. It is nil if there are
	// none, or if the user may not read them.
	Services *ServiceCounts `json:"services,omitempty"`
	// IdentityUntil is the time at which our token at the peer expires. It is nil if there is no
	// token, or if the user may not read it.
	IdentityUntil *metav1.Time       `json:"identityUntil,omitempty"`
	Since         *metav1.Time       `json:"since,omitempty"` // since when Status holds, by the API server's clock; nil: unknown
	Conditions    []metav1.Condition `json:"conditions"`
}

// StatusOf reads the status of a cluster whose identity is known.
func StatusOf(ctx context.Context, c *cluster.Cluster) (s Status, err error) {
	s = Status{Cluster: c.Identity, Namespace: c.Namespace, Gateways: []GatewayPod{}, Peerings: []Row{}}
	var list isthmus.PeeringList
	if err := c.Client.List(ctx, &list); err != nil {
		return s, c.Explain("Peerings", err)
	}
	until := identitiesUntil(ctx, c, list.Items)
	if s.Hops, s.Manager, s.Gateway, err = clusterHops(ctx, c); err != nil {
		return s, err
	}
	s.At, _ = c.Now()
	health.DateByServer(list.Items, s.Manager, s.At)
	services, err := importedServices(ctx, c)
	if err != nil {
		return s, err
	}
	for i := range list.Items {
		row := rowOf(&list.Items[i])
		row.IdentityUntil = until[i]
		if row.Services = services[row.Namespace]; row.Services != nil {
			row.Problems = append(row.Problems, row.Services.problems()...)
			row.Problem = strings.Join(row.Problems[:min(1, len(row.Problems))], "")
		}
		s.Peerings = append(s.Peerings, row)
		health.UpdateGateway(s.Hops, &list.Items[i])
	}
	slices.SortFunc(s.Peerings, func(a, b Row) int { return cmp.Compare(a.Name, b.Name) })
	var pods corev1.PodList
	if err := c.Client.List(ctx, &pods, client.InNamespace(c.Namespace), client.MatchingLabels{v1alpha1.LabelGateway: v1alpha1.GatewayActive}); err != nil {
		return s, c.Explain("Pods in namespace "+c.Namespace, err)
	}
	for _, p := range pods.Items {
		s.Gateways = append(s.Gateways, GatewayPod{Pod: p.Name, Node: p.Spec.NodeName, IP: p.Status.PodIP})
	}
	s.markStale()
	return s, nil
}

// noGateway returns the reason why no gateway is active. It returns "" if a gateway is active, or
// if the cluster uses a gateway that is not from Isthmus, such as Liqo's.
func (s *Status) noGateway() string {
	for i := range s.Hops {
		if h := &s.Hops[i]; health.NoneActive(h) {
			return strings.TrimPrefix(h.Text, "no gateway is active: ")
		}
	}
	if s.Gateway.Name == "" && !s.Gateway.Absent {
		return s.Gateway.Problem
	}
	return ""
}

// markStale changes ready Peerings to Unknown if no manager or no gateway is active, because the
// status of these Peerings may be outdated.
func (s *Status) markStale() {
	why, reason := "", isthmus.ReasonUnknown
	if s.Manager.Name == "" && !s.Manager.Rolls {
		why = "no manager is active, so this may be outdated: " + s.Manager.Problem
	} else if none := s.noGateway(); none != "" {
		why, reason = "no gateway is active: "+none, isthmus.ReasonGatewaySilent // the manager will write the same reason
	}
	if why == "" {
		return
	}
	for i := range s.Peerings {
		if p := &s.Peerings[i]; p.Ready {
			p.Ready, p.Status, p.Reason, p.Latency, p.Since = false, metav1.ConditionUnknown, reason, "", nil
			p.Problem, p.Problems, p.PostQuantum = why, []string{why}, isthmus.PostQuantumStatus{}
		}
	}
}

func rowOf(p *isthmus.Peering) Row {
	s := Row{
		Name: p.Name, Cluster: p.Spec.Cluster, Ready: health.IsTrue(p, isthmus.ConditionReady), Status: metav1.ConditionUnknown, Reason: isthmus.ReasonUnknown,
		Deleting: !p.DeletionTimestamp.IsZero(), Namespace: p.Spec.TenantNamespace.Local, Local: p.Status.Local, Remote: p.Status.Remote,
		Endpoint: p.Status.Endpoint, Latency: p.Status.Latency, PostQuantum: p.Status.PostQuantum, Keys: p.Status.Keys, Conditions: p.Status.Conditions,
	}
	for _, c := range p.Status.Conditions {
		if c.Type == isthmus.ConditionReady {
			s.Status, s.Reason, s.Since = c.Status, c.Reason, &c.LastTransitionTime
		}
	}
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; s.Ready && c.Type != isthmus.ConditionReady && (c.Status == metav1.ConditionFalse || isthmus.Limited(c)) {
			s.Problems = append(s.Problems, health.Sentence(c))
		}
	}
	for _, c := range health.Problems(p) {
		s.Problems = append(s.Problems, health.Sentence(&c))
	}
	if len(s.Problems) > 0 {
		s.Problem = s.Problems[0]
	}
	return s
}

// keyText formats a key with its age. If lags is set, the text adds that the key is being rotated.
func keyText(key string, since *metav1.Time, now time.Time, lags bool) string {
	if key == "" {
		return ""
	}
	if key += " (" + ago(since, now) + ")"; lags {
		key += ", rotates"
	}
	return key
}

// Ready reports whether all peerings are ready, and no hop that they share in this cluster is
// broken. Without a peering it returns true, even if a hop is broken.
func (s Status) Ready() bool {
	if len(s.Peerings) == 0 {
		return true
	}
	return health.FirstBroken(s.Hops) == nil && !slices.ContainsFunc(s.Peerings, func(p Row) bool { return !p.Ready })
}

// mandate returns a text to append to the name of the active gateway: how long the gateway has been
// active, its epoch, and the reason why it became active.
func (s Status) mandate() string {
	text := ""
	if since := ago(s.Gateway.Since, s.At); since != "" {
		text += ", active for " + since
	}
	if s.Gateway.Epoch > 0 {
		text += fmt.Sprintf(", epoch %d", s.Gateway.Epoch)
	}
	if s.Gateway.Takeover != nil {
		text += ": " + safetext.Cut(s.Gateway.Takeover.String(), safetext.Message)
	}
	return text
}

// Print writes the status for people. It escapes text from outside this cluster's components.
func (s Status) Print(w io.Writer, wide bool) error {
	manager := safetext.Of(s.Manager.Name)
	if s.Manager.Name == "" {
		manager = "none: " + s.Manager.Problem
	}
	gateways := make([]string, 0, len(s.Gateways))
	if none := s.noGateway(); none != "" {
		gateways, s.Gateways = []string{"none: " + none}, nil // ignore labels of earlier gateways
	}
	for _, g := range s.Gateways {
		text := safetext.Of(g.Pod) + " on node " + safetext.OrDash(g.Node)
		if g.Pod == s.Gateway.Name {
			text += s.mandate()
		}
		gateways = append(gateways, text)
	}
	fmt.Fprintf(w, "cluster %s (%s)\nmanager %s\ngateway %s\n", safetext.Of(s.Cluster.ClusterName), safetext.Of(s.Cluster.ClusterID), manager,
		cmp.Or(strings.Join(gateways, ", "), "none is active"))
	for _, h := range s.Hops {
		if health.OfNodes(&h) || h.Name == health.HopClocks || h.Name == health.HopStandby || h.State == health.Broken && (h.Name == health.HopRights || h.Name == health.HopGateway && s.noGateway() == "") {
			fmt.Fprintf(w, "%s %s\n", h.Name, h.Text)
		}
	}
	fmt.Fprintln(w)
	if len(s.Peerings) == 0 {
		_, err := fmt.Fprintln(w, "no peerings")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	header := []string{"PEERING", "CLUSTER", "READY", "SINCE", "THEIR PODS HERE", "OUR PODS THERE", "ENDPOINT", "LATENCY", "REASON"}
	services := slices.ContainsFunc(s.Peerings, func(p Row) bool { return p.Services != nil })
	if services {
		header = append(header, "THEIR SERVICES HERE")
	}
	fmt.Fprintln(t, strings.Join(header, "\t"))
	for _, p := range s.Peerings {
		ready := "no"
		switch p.Status {
		case metav1.ConditionTrue:
			ready = "yes"
		case metav1.ConditionUnknown:
			ready = "unknown"
		}
		cells := []string{p.Name, p.Cluster.ClusterName, ready, ago(p.Since, s.At), p.Remote.PodCIDRSeen, p.Local.PodCIDRSeen, p.Endpoint, p.Latency, p.Reason}
		if services {
			cells = append(cells, p.Services.String())
		}
		printRow(t, cells...)
	}
	if wide { // a separate table, so that both tables fit on a screen
		fmt.Fprintln(t, "\nPEERING\tCLUSTER ID\tNAMESPACE\tTHEIR EXTERNAL HERE\tOUR EXTERNAL THERE\tIDENTITY UNTIL\tOUR KEY\tTHEIR KEY\tPOST-QUANTUM")
		for _, p := range s.Peerings {
			until := ""
			if p.IdentityUntil != nil {
				until = p.IdentityUntil.UTC().Format(time.RFC3339)
			}
			printRow(t, p.Name, p.Cluster.ClusterID, p.Namespace, p.Remote.ExternalCIDRSeen, p.Local.ExternalCIDRSeen, until,
				keyText(p.Keys.Ours, p.Keys.OursSince, s.At, p.Keys.Lags), keyText(p.Keys.Theirs, p.Keys.TheirsSince, s.At, false), strings.TrimSuffix(p.PostQuantum.Key+": "+p.PostQuantum.Why, ": "))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, p := range s.Peerings {
		for i, problem := range p.Problems {
			if i == 0 {
				fmt.Fprintf(w, "\n%s, cluster %s (%s):\n", safetext.Of(p.Name), safetext.Of(p.Cluster.ClusterName), safetext.Of(p.Cluster.ClusterID))
			}
			if _, err := fmt.Fprintf(w, "  %s\n", problem); err != nil {
				return err
			}
		}
	}
	return nil
}

func printRow(w io.Writer, cells ...string) {
	for i := range cells {
		cells[i] = safetext.OrDash(cells[i])
	}
	fmt.Fprintln(w, strings.Join(cells, "\t"))
}

// identitiesUntil returns, for each Peering, the time at which our identity at the peer
// expires.
func identitiesUntil(ctx context.Context, c *cluster.Cluster, peerings []isthmus.Peering) []*metav1.Time {
	all := make([]*metav1.Time, len(peerings))
	var group sync.WaitGroup
	slots := make(chan struct{}, concurrentRequests)
	for i := range peerings {
		slots <- struct{}{}
		group.Go(func() {
			if expiry, ok := identityExpiry(ctx, c, &peerings[i]); ok {
				all[i] = &metav1.Time{Time: expiry}
			}
			<-slots
		})
	}
	group.Wait()
	return all
}

// ago formats the time since an event.
func ago(since *metav1.Time, now time.Time) string {
	if since == nil || since.IsZero() || now.IsZero() {
		return ""
	}
	return duration.HumanDuration(max(0, now.Sub(since.Time)))
}
