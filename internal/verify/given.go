package verify

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// idleTimeout is how long the container in a given Pod waits for a request before it ends.
// Kubernetes cannot delete an ephemeral container or give it a deadline.
const idleTimeout = 10 * time.Minute

// CheckPods returns an error for names that are not NAMESPACE/NAME, and for duplicates.
func CheckPods(given []string) error {
	for i, text := range given {
		namespace, name, _ := strings.Cut(text, "/")
		if validation.IsDNS1123Label(namespace) != nil || validation.IsDNS1123Subdomain(name) != nil {
			return fmt.Errorf("%q: want NAMESPACE/NAME of a Pod", text)
		}
		if slices.Contains(given[:i], text) {
			return fmt.Errorf("%s is given twice", text)
		}
	}
	return nil
}

// borrow adds a container to each given Pod, and waits until all added containers accept requests.
// The Pods' own containers are not disturbed.
func (s *site) borrow(ctx context.Context) error {
	if s.image == "" {
		if _, err := s.gateway(ctx); err != nil {
			return err
		}
	}
	for _, text := range s.given {
		namespace, name, _ := strings.Cut(text, "/")
		if err := s.join(ctx, client.ObjectKey{Namespace: namespace, Name: name}); err != nil {
			return fmt.Errorf("%s: Pod %s: %w", s, text, err)
		}
	}
	return s.waitForAll(ctx)
}

// join adds a container to a Pod.
func (s *site) join(ctx context.Context, key client.ObjectKey) error {
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		var p corev1.Pod
		if err := s.Client.Get(ctx, key, &p); err != nil {
			return err
		}
		if p.Status.Phase != corev1.PodRunning || !p.DeletionTimestamp.IsZero() {
			return fmt.Errorf("it is not running: %s %s", p.Status.Phase, state(&p))
		}
		m := &member{
			End:       End{Cluster: s.String(), Network: podNetwork, Pod: key.String(), Node: p.Spec.NodeName},
			namespace: key.Namespace, name: key.Name, container: "isthmus-verify-" + s.run,
		}
		if p.Spec.HostNetwork {
			m.Network = hostNetwork
		}
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, s.guest(m))
		if err := s.Client.SubResource("ephemeralcontainers").Update(ctx, &p); err != nil {
			return err
		}
		s.pods = append(s.pods, m)
		return nil
	})
}

// guest returns the container to add. It complies with the strictest Pod security standard
// (restricted).
func (s *site) guest(m *member) corev1.EphemeralContainer {
	no, yes, nobody := false, true, int64(65532)
	return corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name: m.container, Image: s.image, Args: append(s.args(m.Network), "--idle="+idleTimeout.String()),
		SecurityContext: &corev1.SecurityContext{
			RunAsUser: &nobody, RunAsNonRoot: &yes, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
			Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
	}}
}

// part ends the added containers, and waits until they have ended.
func (s *site) part(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleaningTime)
	defer cancel()
	var group sync.WaitGroup
	errs := make([]error, len(s.pods))
	for i, m := range s.pods {
		group.Go(func() {
			if err := m.end(ctx, s.Client); err != nil {
				errs[i] = fmt.Errorf("%s: container %s in Pod %s: %w; the container ends by itself after %v", s, m.container, m.Pod, err, idleTimeout)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// end ends the member's container, and waits until it has ended.
func (m *member) end(ctx context.Context, c client.Client) error {
	last := errors.New("its state is unknown")
	_ = wait.PollUntilContextCancel(ctx, 500*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var p corev1.Pod
		if last = client.IgnoreNotFound(c.Get(ctx, client.ObjectKey{Namespace: m.namespace, Name: m.name}, &p)); last != nil {
			return false, nil //nolint:nilerr // try again
		}
		if p.Name == "" || p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
			return true, nil
		}
		if c := m.status(&p); c != nil && c.State.Terminated != nil {
			return true, nil
		}
		last = errors.New("it has not ended")
		if m.http != nil {
			_ = m.request(ctx, http.MethodPost, "/end", nil, nil) // ignore the error: the next iteration checks whether the container has ended
		}
		return false, nil
	})
	return last
}

// status returns the status of the member's container, or nil if there is none yet.
func (m *member) status(p *corev1.Pod) *corev1.ContainerStatus {
	all := p.Status.ContainerStatuses
	if m.container != "" {
		all = p.Status.EphemeralContainerStatuses
	}
	for i := range all {
		if m.container == "" || all[i].Name == m.container {
			return &all[i]
		}
	}
	return nil
}
