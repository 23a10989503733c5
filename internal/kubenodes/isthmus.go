package kubenodes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Namespace is the namespace of Isthmus in each cluster.
const Namespace = fleet.Namespace

// Image is the name of the image of Isthmus on the nodes.
const Image = "isthmus.test/isthmus:1"

// ImageOf writes an image of the isthmus program for Options.Images. It returns the path of the
// archive.
func ImageOf(program, archive string) (path string, err error) {
	return ImageAs(program, Image, archive)
}

// ImageAs is ImageOf with a different image name. The file of the program must be called isthmus.
func ImageAs(program, name, archive string) (path string, err error) {
	return archive, writeImage(archive, name, "65532:65532", program)
}

// Install runs `isthmus install` with additional arguments for all clusters, and waits until all
// Pods are ready.
func (s *Set) Install(ctx context.Context, program string, more ...string) error {
	return s.Each(func(c *Cluster) error {
		args := []string{"install", "--context", c.Name, "--cluster-name", c.Name, "--cluster-id", c.ID, "--image", Image,
			"--pod-cidr", c.PodCIDR.String(), "--timeout", patience.String()}
		if c.options.HostNetwork {
			args = append(args, "--host-network")
		}
		args = append(args, more...)
		if out, err := s.Command(ctx, program, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("isthmus install: %w\n%s\n%s", err, out, c.Explain())
		}
		return c.WaitRolledOut(ctx)
	})
}

// Apply creates or updates the objects in a YAML text.
func (c *Cluster) Apply(ctx context.Context, yaml string) error {
	decoder := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(yaml), 4096)
	for {
		u := &unstructured.Unstructured{}
		if err := decoder.Decode(u); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		err := c.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner("kubenodes"), client.ForceOwnership)
		if err != nil {
			return fmt.Errorf("%s %s: %w", u.GetKind(), u.GetName(), err)
		}
	}
}

// WaitRolledOut waits until the rollouts of the installation's Deployments and DaemonSets are
// complete: all Pods have the newest template and are ready.
func (c *Cluster) WaitRolledOut(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	last := errors.New("nothing is deployed")
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		last = c.rolledOut(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", last, c.Explain())
	}
	return nil
}

func (c *Cluster) rolledOut(ctx context.Context) error {
	var deployments appsv1.DeploymentList
	var daemons appsv1.DaemonSetList
	for _, list := range []client.ObjectList{&deployments, &daemons} {
		if err := c.Client.List(ctx, list, client.InNamespace(Namespace)); err != nil {
			return err
		}
	}
	if len(deployments.Items) == 0 || len(daemons.Items) == 0 {
		return errors.New("nothing is deployed")
	}
	for _, d := range deployments.Items {
		want := *d.Spec.Replicas
		if s := d.Status; s.ObservedGeneration < d.Generation || s.UpdatedReplicas != want || s.ReadyReplicas != want || s.Replicas != want {
			return fmt.Errorf("deployment %s: %d of %d replicas are ready, %d are of the newest revision", d.Name, s.ReadyReplicas, want, s.UpdatedReplicas)
		}
	}
	for _, d := range daemons.Items {
		if s := d.Status; s.ObservedGeneration < d.Generation || s.DesiredNumberScheduled != int32(len(c.Nodes)) ||
			s.NumberReady != s.DesiredNumberScheduled || s.UpdatedNumberScheduled != s.DesiredNumberScheduled {
			return fmt.Errorf("daemon set %s: ready on %d of %d nodes, of the newest revision on %d", d.Name, s.NumberReady, len(c.Nodes), s.UpdatedNumberScheduled)
		}
	}
	return nil
}

// Peer runs `isthmus peer` with additional arguments for two clusters, and waits until both report
// that they are ready.
func (s *Set) Peer(ctx context.Context, program string, a, b *Cluster, more ...string) error {
	args := append([]string{"peer", "--context", a.Name, "--remote-context", b.Name}, more...)
	if out, err := s.Command(ctx, program, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("isthmus peer: %w\n%s\n%s\n%s", err, out, a.Explain(), b.Explain())
	}
	return errors.Join(a.WaitReady(ctx, b), b.WaitReady(ctx, a))
}

// WaitReady waits until the Peering of c with another cluster is Ready.
func (c *Cluster) WaitReady(ctx context.Context, peer *Cluster) error {
	if err := c.ControlPlane.WaitReady(ctx, peer, patience); err != nil {
		return fmt.Errorf("%w\n%s", err, c.Explain())
	}
	return nil
}

// ActiveGateway returns the Pod of the active gateway. It waits until exactly one Pod has the label
// of an active gateway.
func (c *Cluster) ActiveGateway(ctx context.Context) (*corev1.Pod, error) {
	return c.ActivePod(ctx, patience)
}

// NodeOf returns the node with that name.
func (c *Cluster) NodeOf(name string) (*Node, error) {
	for _, n := range c.Nodes {
		if n.Name == name {
			return n, nil
		}
	}
	return nil, fmt.Errorf("cluster %s has no node %q", c.Name, name)
}

// Watch makes the sniffer detect packets in the clear, to or from the networks that c has allocated
// for the peers.
func (c *Cluster) Watch(ctx context.Context, s *lab.Sniffer, peers ...*Cluster) error {
	w := lab.Watched{Overlay: c.PodCIDR}
	for _, p := range peers {
		pods, external, err := c.Networks(ctx, p)
		if err != nil {
			return err
		}
		w.Networks = append(w.Networks, pods, external)
	}
	s.Watch(c.Cluster, w)
	return nil
}

// Follow records changes of the installation's Pods and of the gateway's Service. The returned
// function ends the recording and returns it, with a time on each line.
func (c *Cluster) Follow(ctx context.Context) (output func() string) {
	ctx, end := context.WithCancel(ctx)
	var all strings.Builder
	done := make(chan struct{})
	go func() {
		defer close(done)
		last := map[string]string{}
		for ctx.Err() == nil {
			now := map[string]string{}
			var pods corev1.PodList
			var services corev1.ServiceList
			if c.Client.List(ctx, &pods, client.InNamespace(Namespace)) == nil && c.Client.List(ctx, &services, client.InNamespace(Namespace)) == nil {
				for _, p := range pods.Items {
					ready := false
					for _, s := range p.Status.ContainerStatuses {
						ready = s.Ready
					}
					now[p.Name] = fmt.Sprintf("%s on %s: %s %s, ready %v, deleted %v, %s", p.Name, p.Spec.NodeName, p.Status.Phase, p.Status.PodIP, ready, p.DeletionTimestamp != nil, p.Labels[v1alpha1.LabelGateway])
				}
				for _, s := range services.Items {
					if a := s.Annotations[isthmus.AnnotationGateways]; a != "" {
						now[s.Name] = "Service leads to " + a
					}
				}
				for k, v := range now {
					if last[k] != v {
						fmt.Fprintf(&all, "%s %s\n", time.Now().Format("05.000"), v)
					}
				}
				for k := range last {
					if now[k] == "" {
						fmt.Fprintf(&all, "%s %s is gone\n", time.Now().Format("05.000"), k)
					}
				}
				last = now
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
	return func() string {
		end()
		<-done
		return all.String()
	}
}

// Explain describes the installation's Pods, for the error of a wait that failed.
func (c *Cluster) Explain() string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var b bytes.Buffer
	var pods corev1.PodList
	if err := c.Client.List(ctx, &pods); err != nil {
		return fmt.Sprintf("cluster %s: %v", c.Name, err)
	}
	for _, p := range pods.Items {
		fmt.Fprintf(&b, "%s: pod %s/%s on %s: %s %s\n", c.Name, p.Namespace, p.Name, p.Spec.NodeName, p.Status.Phase, p.Status.Message)
		for _, s := range p.Status.ContainerStatuses {
			fmt.Fprintf(&b, "  %s: ready %v, %d restarts, %s\n", s.Name, s.Ready, s.RestartCount, strings.TrimSpace(s.State.String()))
		}
		if p.Namespace == Namespace {
			b.WriteString(c.logOf(&p))
		}
	}
	var events corev1.EventList
	if err := c.Client.List(ctx, &events); err == nil {
		for _, e := range events.Items {
			if e.Type == corev1.EventTypeWarning {
				fmt.Fprintf(&b, "%s: event: %s %s: %s\n", c.Name, e.InvolvedObject.Name, e.Reason, e.Message)
			}
		}
	}
	return b.String()
}

// logOf returns the last lines of a pod's containers. It reads the node's disk, so it does not
// need the kubelet.
func (c *Cluster) logOf(p *corev1.Pod) string {
	n, err := c.NodeOf(p.Spec.NodeName)
	if err != nil {
		return ""
	}
	files, err := filepath.Glob(filepath.Join(n.root(), "var/log/pods", p.Namespace+"_"+p.Name+"_*", "*", "*.log"))
	if err != nil {
		return ""
	}
	var b strings.Builder
	for _, f := range files {
		fmt.Fprintf(&b, "  %s\n%s\n", filepath.Base(filepath.Dir(f)), tail(f, 8))
	}
	return b.String()
}
