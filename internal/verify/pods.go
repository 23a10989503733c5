package verify

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/podport"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

const (
	// label marks the Pods of all runs. Its value identifies the run.
	label = "isthmus.net/verify"
	// echoPort is the port at which Pods in the pod network echo.
	echoPort = 7468
	// lifetime is the time after which Pods end by themselves. It matters if this program was
	// killed and could not delete them.
	lifetime = 24 * time.Hour
	// startTime is the time that Pods may take to run. The image may have to be pulled.
	startTime = 3 * time.Minute
	// cleaningTime is the time that deleting the Pods may take.
	cleaningTime = 30 * time.Second
)

// A site is one cluster with the Pods of this run in it.
type site struct {
	*cluster.Cluster
	run      string
	image    string
	secrets  []corev1.LocalObjectReference
	given    []string // Pods to use instead of creating some, each NAMESPACE/NAME
	networks agreed   // this cluster's networks as the other cluster uses them
	control  uint16   // port at which the Pods accept requests
	pods     []*member
}

// A member is a Pod of the run with the connection for its requests.
type member struct {
	End
	namespace, name string
	container       string // name of the added container in a given Pod; empty: the Pod has only one container
	http            *http.Client
}

func newSite(c *cluster.Cluster, run, image string, given []string) *site {
	// The port is random, because Pods in the host network share the ports of their node.
	return &site{Cluster: c, run: run, image: image, given: given, control: uint16(20000 + rand.N(10000))}
}

// make creates the Pods and waits until they accept requests.
func (s *site) make(ctx context.Context) error {
	if len(s.given) > 0 {
		return s.borrow(ctx)
	}
	locations, err := s.locations(ctx)
	if err != nil {
		return err
	}
	for _, p := range locations {
		for _, network := range []string{podNetwork, hostNetwork} {
			pod := s.pod(p.node, p.place, network)
			if err := s.Client.Create(ctx, pod); err != nil {
				return fmt.Errorf("%s: Pod %s: %w", s, pod.Name, err)
			}
			s.pods = append(s.pods, &member{End: End{Cluster: s.String(), Network: network, Place: p.place, Node: p.node}, namespace: s.Namespace, name: pod.Name})
		}
	}
	return s.waitForAll(ctx)
}

func (s *site) waitForAll(ctx context.Context) error {
	var group sync.WaitGroup
	errs := make([]error, len(s.pods))
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for i, m := range s.pods {
		group.Go(func() { errs[i] = s.wait(ctx, m) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// A place is a node for Pods of the run.
type place struct{ place, node string }

// gateway returns the Pod of the active gateway, from which the new Pods take image and
// settings.
func (s *site) gateway(ctx context.Context) (*corev1.Pod, error) {
	var gateways corev1.PodList
	if err := s.Client.List(ctx, &gateways, client.InNamespace(s.Namespace), client.MatchingLabels{v1alpha1.LabelGateway: v1alpha1.GatewayActive}); err != nil {
		return nil, fmt.Errorf("%s: Pods in %s: %w", s, s.Namespace, err)
	}
	if len(gateways.Items) == 0 {
		return nil, fmt.Errorf("%s: no gateway is active in %s; `isthmus diagnose` shows why", s, s.Namespace)
	}
	g := &gateways.Items[0]
	s.secrets = g.Spec.ImagePullSecrets
	if s.image == "" {
		s.image = g.Spec.Containers[0].Image
	}
	return g, nil
}

// locations returns the node of the active gateway, and another node if there is one.
func (s *site) locations(ctx context.Context) ([]place, error) {
	g, err := s.gateway(ctx)
	if err != nil {
		return nil, err
	}
	var nodes corev1.NodeList
	if err := s.Client.List(ctx, &nodes); err != nil {
		return nil, fmt.Errorf("%s: Nodes: %w", s, err)
	}
	all := []place{{gatewayNode, g.Spec.NodeName}}
	slices.SortFunc(nodes.Items, func(a, b corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	for i := range nodes.Items {
		if n := &nodes.Items[i]; n.Name != g.Spec.NodeName && takesPods(n) {
			return append(all, place{other, n.Name}), nil
		}
	}
	return all, nil
}

func takesPods(n *corev1.Node) bool {
	if n.Spec.Unschedulable || n.Labels[corev1.LabelOSStable] == "windows" || n.Labels["type"] == "virtual-kubelet" || n.Labels["liqo.io/type"] == "virtual-node" {
		return false
	}
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func (s *site) args(network string) []string {
	args := []string{"probe", fmt.Sprintf("--control=%d", s.control)}
	if network == podNetwork {
		args = append(args, fmt.Sprintf("--echo=%d", echoPort))
	}
	return args
}

// pod returns a Pod that runs Serve, in the namespace of the installation, where Pods may use
// raw sockets and the host network.
func (s *site) pod(node, place, network string) *corev1.Pod {
	no, root, life, grace := false, int64(0), int64(lifetime.Seconds()), int64(1)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: strings.Join([]string{"isthmus-verify", s.run, place, network}, "-"),
			Labels: map[string]string{label: s.run, "app.kubernetes.io/name": "verify"},
		},
		Spec: corev1.PodSpec{
			NodeName: node, HostNetwork: network == hostNetwork, DNSPolicy: corev1.DNSClusterFirstWithHostNet, RestartPolicy: corev1.RestartPolicyNever,
			ActiveDeadlineSeconds: &life, TerminationGracePeriodSeconds: &grace, AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
			ImagePullSecrets: s.secrets,
			Tolerations:      []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			SecurityContext:  &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{
				Name: "probe", Image: s.image, Args: s.args(network),
				SecurityContext: &corev1.SecurityContext{
					// Run as root: another user's process would not get the container's
					// capabilities, which are not ambient.
					RunAsUser: &root, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: new(true),
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_RAW"}}, // pings need NET_RAW
				},
			}},
		},
	}
}

// wait waits until a Pod runs. If the Pod does not get to run, the error contains the reason.
func (s *site) wait(ctx context.Context, m *member) error {
	last := errors.New("its state is unknown")
	err := wait.PollUntilContextCancel(ctx, 500*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var p corev1.Pod
		if last = s.Client.Get(ctx, client.ObjectKey{Namespace: m.namespace, Name: m.name}, &p); last != nil {
			return false, nil //nolint:nilerr // continue to wait; at the timeout, this error is reported
		}
		if p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
			return false, fmt.Errorf("it has ended: %s", state(&p))
		}
		c := m.status(&p)
		if c != nil && c.State.Terminated != nil {
			return false, fmt.Errorf("container %s has ended: %s", c.Name, stateOf(*c))
		}
		addr, err := netip.ParseAddr(p.Status.PodIP)
		if c != nil && c.State.Running == nil {
			last = fmt.Errorf("container %s: %s", c.Name, stateOf(*c))
			return false, nil
		}
		if p.Status.Phase != corev1.PodRunning || err != nil || c == nil {
			last = fmt.Errorf("it is %s: %s", p.Status.Phase, state(&p))
			return false, nil //nolint:nilerr // the Pod has no address yet: continue to wait
		}
		m.Addr = addr
		if m.http == nil {
			if m.http, err = podport.Client(s.Config, m.namespace, m.name, s.control); err != nil {
				return false, err
			}
		}
		last = m.request(ctx, http.MethodGet, "/ready", nil, nil)
		return last == nil, nil
	})
	if ctx.Err() != nil {
		err = waitError(ctx, last)
	}
	if err == nil && m.Network == podNetwork {
		m.Seen, err = s.networks.localAddr(m.Addr)
	}
	if err != nil {
		return fmt.Errorf("%s: Pod %s on node %s: %w", s, m.name, m.Node, err)
	}
	return nil
}

// waitError returns the error of a wait whose ctx has ended. last is the latest error of the
// condition. After a timeout, waitError returns last. After an interrupt, it returns a stoppedError
// with last.
func waitError(ctx context.Context, last error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return &stoppedError{last}
	}
	return last
}

// stoppedError is context.Canceled together with the latest error of the condition of a wait.
// Package cli adds "interrupted".
type stoppedError struct{ last error }

func (e *stoppedError) Error() string   { return "stopped waiting: " + e.last.Error() }
func (e *stoppedError) Unwrap() []error { return []error{context.Canceled, e.last} }

// state returns the state of a Pod's container as the kubelet reports it.
func state(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if text := stateOf(c); text != "" {
			return text
		}
	}
	if text := strings.TrimSpace(p.Status.Reason + " " + p.Status.Message); text != "" {
		return safetext.Of(text)
	}
	return "the kubelet of its node has not reported a reason"
}

// stateOf returns the state of a container, or "" if it runs.
func stateOf(c corev1.ContainerStatus) string {
	if w := c.State.Waiting; w != nil {
		return safetext.Of(w.Reason + " " + w.Message)
	}
	if t := c.State.Terminated; t != nil {
		return safetext.Of(fmt.Sprintf("%s %s, exit code %d", t.Reason, t.Message, t.ExitCode))
	}
	return ""
}

func (m *member) request(ctx context.Context, method, path string, in, out any) error {
	body := io.Reader(http.NoBody)
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path, body)
	if err != nil {
		return err
	}
	answer, err := m.http.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, 16<<20))
	switch {
	case err != nil:
		return err
	case answer.StatusCode != http.StatusOK:
		return fmt.Errorf("%s: %s", answer.Status, safetext.Of(string(text)))
	case out == nil:
		return nil
	}
	return json.Unmarshal(text, out)
}

// remove deletes the Pods of this run, and Pods of other runs if the Pods have ended.
func (s *site) remove(ctx context.Context) error {
	if len(s.given) > 0 {
		return s.part(ctx)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleaningTime)
	defer cancel()
	var left corev1.PodList
	var err error
	_ = wait.PollUntilContextCancel(ctx, 200*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		if err = s.Client.List(ctx, &left, client.InNamespace(s.Namespace), client.HasLabels{label}); err != nil {
			return false, nil //nolint:nilerr // try again
		}
		mine := 0
		for i := range left.Items {
			p := &left.Items[i]
			ended := p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
			if p.Labels[label] != s.run && !ended {
				continue
			}
			mine++
			if p.DeletionTimestamp.IsZero() {
				if failed := s.Client.Delete(ctx, p); failed != nil && !apierrors.IsNotFound(failed) {
					err = failed
				}
			}
		}
		return mine == 0, nil
	})
	if err == nil && ctx.Err() != nil {
		err = fmt.Errorf("they have not ended within %v", cleaningTime)
	}
	if err != nil {
		return fmt.Errorf("%s: Pods with the label %s=%s in namespace %s are left: %w", s, label, s.run, s.Namespace, err)
	}
	return nil
}
