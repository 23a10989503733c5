package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Namespace is the namespace of Isthmus in each cluster.
const Namespace = deploy.Namespace

// A ControlPlane is a cluster of a lab with an API server. It has the code that two types of
// cluster share: those whose nodes are namespaces (Cluster), and those with kubelets (package
// kubenodes).
type ControlPlane struct {
	*lab.Cluster
	Server *kubetest.Server
	Client client.WithWatch // a client with an administrator's rights that connects from inside the lab
	Config *rest.Config     // configuration of Client
}

// A Member is a cluster of a Set.
type Member interface {
	fmt.Stringer
	controlPlane() *ControlPlane
}

func (c *ControlPlane) controlPlane() *ControlPlane { return c }

// Serve starts the control plane on the cluster's control host.
func (c *ControlPlane) Serve(ctx context.Context, o kubetest.Options) (err error) {
	o.Name, o.Host, o.Starter, o.Dial = c.Control.Netns(), c.Control.Addr, c.Control.Start, c.Control.Dial
	if c.Server, err = kubetest.Start(ctx, o); err != nil {
		return err
	}
	if c.Config, err = c.Server.Config(); err != nil {
		return err
	}
	c.Client, err = c.Server.Client()
	return err
}

// errNoPeering means that a cluster has no Peering with the requested cluster.
var errNoPeering = errors.New("there is no Peering")

// Peering returns cluster c's Peering with another cluster. It returns an error if there is none.
func (c *ControlPlane) Peering(ctx context.Context, with Member) (*isthmus.Peering, error) {
	var list isthmus.PeeringList
	peer := with.controlPlane()
	err := c.Client.List(ctx, &list)
	for i := range list.Items {
		if list.Items[i].Spec.Cluster.ClusterID == peer.ID {
			return &list.Items[i], nil
		}
	}
	if err == nil {
		err = errNoPeering
	}
	return nil, fmt.Errorf("cluster %s with %s: %w", c.Name, peer.Name, err)
}

// WaitReady waits until cluster c's Peering with another cluster is Ready. The error names the
// missing condition.
func (c *ControlPlane) WaitReady(ctx context.Context, with Member, timeout time.Duration) error {
	last := errNoPeering
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		p, err := c.Peering(ctx, with)
		if err != nil {
			return false, nil //nolint:nilerr // no Peering yet, or no answer from the API server: continue to wait
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == isthmus.ConditionReady {
				last = fmt.Errorf("%s: %s", condition.Reason, condition.Message)
				return condition.Status == "True", nil
			}
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("cluster %s is not ready for %s after %v: %w", c.Name, with.controlPlane().Name, timeout, last)
	}
	return nil
}

// Networks returns the networks that c has allocated for a peer: for the peer's pods, and for its
// mapped endpoints.
func (c *ControlPlane) Networks(ctx context.Context, peer Member) (pods, external netip.Prefix, err error) {
	p, err := c.Peering(ctx, peer)
	if err != nil {
		return pods, external, err
	}
	if pods, err = netip.ParsePrefix(p.Status.Remote.PodCIDRSeen); err != nil {
		return pods, external, fmt.Errorf("cluster %s has not agreed with %s on networks yet", c.Name, peer.controlPlane().Name)
	}
	external, err = netip.ParsePrefix(p.Status.Remote.ExternalCIDRSeen)
	return pods, external, err
}

// Seen returns the address under which c reaches a pod of another cluster. addr is the address of
// the pod in its own cluster.
func (c *ControlPlane) Seen(ctx context.Context, member Member, addr netip.Addr) (netip.Addr, error) {
	peer := member.controlPlane()
	if peer == c {
		return addr, nil
	}
	seen, _, err := c.Networks(ctx, member)
	if !seen.IsValid() {
		return netip.Addr{}, err
	}
	return lab.Move(addr, peer.PodCIDR, seen), nil
}

// ActivePod returns the only gateway Pod that has the label of an active gateway. It waits for an
// election in progress. A gateway already carries traffic before it gets the label.
func (c *ControlPlane) ActivePod(ctx context.Context, timeout time.Duration) (pod *corev1.Pod, err error) {
	var last error
	err = wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		var pods corev1.PodList
		last = c.Client.List(ctx, &pods, client.InNamespace(Namespace), client.MatchingLabels{v1alpha1.LabelGateway: v1alpha1.GatewayActive})
		if last == nil && len(pods.Items) != 1 {
			last = fmt.Errorf("active gateways on [%s]; want exactly one", strings.Join(nodesOf(pods.Items), " "))
		}
		if last != nil {
			return false, nil //nolint:nilerr // continue to wait; a timeout reports this error
		}
		pod = &pods.Items[0]
		return true, nil
	})
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", c.Name, last)
	}
	return pod, nil
}

func nodesOf(pods []corev1.Pod) (names []string) {
	for _, p := range pods {
		names = append(names, p.Spec.NodeName)
	}
	return names
}

// A Set is the clusters of one lab.
type Set[C Member] struct {
	Lab      *lab.Lab
	Clusters []C
	// Kubeconfig is a file with an administrator's context for each cluster, named after the
	// cluster.
	Kubeconfig string
}

// NewSet returns the Set of a lab, without clusters.
func NewSet[C Member](l *lab.Lab) Set[C] {
	return Set[C]{Lab: l, Kubeconfig: filepath.Join(l.Dir, "kubeconfig")}
}

// Each calls do for all clusters concurrently.
func (s *Set[C]) Each(do func(C) error) error { return lab.Each(s.Clusters, do) }

// Cluster returns the cluster with that name, or nil.
func (s *Set[C]) Cluster(name string) (none C) {
	for _, c := range s.Clusters {
		if c.controlPlane().Name == name {
			return c
		}
	}
	return none
}

// Command prepares a program in the underlay, where it can reach all API servers. The program
// uses the Set's Kubeconfig.
func (s *Set[C]) Command(ctx context.Context, program string, args ...string) *lab.Cmd {
	cmd := s.Lab.Underlay.Command(ctx, program, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+s.Kubeconfig)
	return cmd
}

// WriteKubeconfig joins the clusters' kubeconfigs into one file with one context for each cluster.
func (s *Set[C]) WriteKubeconfig() error {
	all := clientcmdapi.NewConfig()
	for _, member := range s.Clusters {
		c := member.controlPlane()
		one, err := clientcmd.Load(c.Server.Kubeconfig())
		if err != nil {
			return fmt.Errorf("cluster %s: kubeconfig: %w", c.Name, err)
		}
		context := one.Contexts[one.CurrentContext]
		all.Clusters[c.Name] = one.Clusters[context.Cluster]
		all.AuthInfos[c.Name] = one.AuthInfos[context.AuthInfo]
		all.Contexts[c.Name] = &clientcmdapi.Context{Cluster: c.Name, AuthInfo: c.Name}
	}
	return clientcmd.WriteToFile(*all, s.Kubeconfig)
}
