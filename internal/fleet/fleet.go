// Package fleet makes a lab whose clusters are real to their control planes: each has an etcd, a
// kube-apiserver and a kube-controller-manager of its own, and runs manager, gateways and route
// agents as processes with the rights of their ServiceAccounts.
//
//	underlay ─┬─ a-control   etcd, kube-apiserver, kube-controller-manager, isthmus manager
//	          ├─ a-node1     isthmus gateway, isthmus route-agent, pods
//	          ├─ a-node2     isthmus gateway (standby), isthmus route-agent, pods
//	          └─ the same for b, c, ...
//
// What is missing is the kubelet: nodes and pods are the lab's namespaces, and the fleet writes the
// Node and Pod objects that describe them. There is no kube-proxy, so the gateway's Service
// publishes the node's own port.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// Options of Up.
type Options struct {
	Spec     lab.Spec  // its clusters get a control plane and, unless they say otherwise, two nodes
	Binary   string    // the isthmus program
	Kube     string    // the folder that kubetest.Build returned
	Progress io.Writer // a line for each step; nil: none
	Audit    bool      // API servers write audit logs, see Cluster.AuditLog
	// IPAMAllow is the networks of nodes whose addresses virtual kubelets may map, for the
	// managers' flag --ipam-allow; empty: none.
	IPAMAllow string
	// Services makes the clusters share Services with peers.
	Services bool
	// Votes lets the nodes of a cluster decide which of its gateways is active, if these have
	// networks of their own.
	Votes bool
	// Dress is called for the lab before anything runs in it. It makes the pods' networks of
	// clusters that are Bare, and may replace networks and addresses of Nodes and Pods.
	Dress func(context.Context, *lab.Lab) error
	// Network is called for each cluster after its Nodes are described, and before components run.
	// It starts a program that makes the pods' network from the objects in the API server.
	Network func(context.Context, *Cluster) error
}

// A Fleet is the clusters of one lab.
type Fleet struct {
	Set[*Cluster]
	Sniffer *lab.Sniffer // watches the underlay while the Fleet exists: Down returns the leaks

	options Options
}

// A Cluster is one cluster with its control plane.
type Cluster struct {
	ControlPlane

	remotes   remotes
	dir       string
	binary    string
	ipamAllow string
	services  bool
	votes     bool
	mu        sync.Mutex
	processes map[string]*process
}

// Up makes the lab, starts the control planes, and in each cluster installs the objects of `isthmus
// install` and starts the components. It returns when all are ready. A failed Up leaves nothing
// behind.
func Up(ctx context.Context, o Options) (*Fleet, error) {
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	for i := range o.Spec.Clusters {
		c := &o.Spec.Clusters[i]
		c.Control = true
		if c.Nodes == 0 {
			c.Nodes = 2
		}
	}
	l, err := lab.Up(ctx, o.Spec)
	if err != nil {
		return nil, err
	}
	f := newFleet(l, o)
	if o.Dress != nil {
		if err := o.Dress(ctx, l); err != nil {
			return nil, errors.Join(err, f.Down())
		}
	}
	if err := f.up(ctx); err != nil {
		return nil, errors.Join(err, f.Down())
	}
	return f, nil
}

func newFleet(l *lab.Lab, o Options) *Fleet {
	f := &Fleet{Set: NewSet[*Cluster](l), options: o}
	for _, c := range l.Clusters {
		f.Clusters = append(f.Clusters, &Cluster{
			ControlPlane: ControlPlane{Cluster: c}, binary: o.Binary, ipamAllow: o.IPAMAllow, votes: o.Votes, dir: filepath.Join(l.Dir, "kube-"+c.Name), processes: map[string]*process{},
		})
	}
	return f
}

func (f *Fleet) up(ctx context.Context) error {
	if err := f.sniff(); err != nil {
		return err
	}
	if err := f.Each(func(c *Cluster) error { return c.startServer(ctx, f.options.Kube, f.options.Audit) }); err != nil {
		return err
	}
	fmt.Fprintf(f.options.Progress, "%d control planes run\n", len(f.Clusters))
	if err := f.WriteKubeconfig(); err != nil {
		return err
	}
	return f.Each(func(c *Cluster) error { return f.install(ctx, c) })
}

// install installs Isthmus in a cluster whose API server runs, and starts its components.
func (f *Fleet) install(ctx context.Context, c *Cluster) error {
	args := []string{"install", "--without-workloads", "--request-timeout", "1m", "--context", c.Name, "--cluster-name", c.Name, "--cluster-id", c.ID}
	if c.services = f.options.Services; c.services {
		args = append(args, "--services")
	}
	out, err := f.Isthmus(ctx, args...)
	if err != nil {
		return fmt.Errorf("isthmus install: %w\n%s", err, out)
	}
	if err := c.follow(ctx, f.Sniffer); err != nil {
		return err
	}
	if err := c.describe(ctx); err != nil {
		return err
	}
	if f.options.Network != nil {
		if err := f.options.Network(ctx, c); err != nil {
			return err
		}
	}
	if err := c.startComponents(ctx); err != nil {
		return err
	}
	fmt.Fprintf(f.options.Progress, "cluster %s: installed, %d nodes and %d pods described, components run\n", c.Name, len(c.Nodes), len(c.Pods))
	return nil
}

// Replace builds a cluster anew on the same machines: name and networks stay, but it gets another
// cluster ID, certificate authority and API server, without any object of the former one. It
// removes the former one's objects from the nodes' kernels, as a reboot does.
func (f *Fleet) Replace(ctx context.Context, c *Cluster) error {
	err := c.stopAll()
	c.remotes.stop()
	for _, n := range c.Nodes {
		for _, component := range []string{"route-agent", "gateway"} {
			if out, failed := n.Command(ctx, c.binary, component, "--cleanup").CombinedOutput(); failed != nil {
				err = errors.Join(err, fmt.Errorf("%s: isthmus %s --cleanup: %w\n%s", n, component, failed, out))
			}
		}
	}
	if err = errors.Join(err, c.Server.Stop(), os.RemoveAll(c.dir)); err != nil {
		return err
	}
	c.ID = string(uuid.NewUUID())
	if err := c.restartServer(ctx, f.options); err != nil {
		return err
	}
	if err := f.WriteKubeconfig(); err != nil {
		return err
	}
	return f.install(ctx, c)
}

// Down ends everything and removes the lab. It returns an error if any node has sent packets for a
// peer in the clear, at any time since Up.
func (f *Fleet) Down() error {
	err := f.Each((*Cluster).stopAll)
	err = errors.Join(err, f.stopSniffing())
	err = errors.Join(err, f.Each(func(c *Cluster) error {
		if c.Server == nil {
			return nil
		}
		return c.Server.Stop()
	}))
	return errors.Join(err, f.Lab.Down())
}

// Isthmus runs the program in the underlay, where it can reach all API servers, with the Fleet's
// Kubeconfig. It returns the output, both streams together.
func (f *Fleet) Isthmus(ctx context.Context, args ...string) (string, error) {
	var out strings.Builder
	err := f.IsthmusTo(ctx, &out, args...)
	return out.String(), err
}

// IsthmusTo is Isthmus, but writes the output as it comes.
func (f *Fleet) IsthmusTo(ctx context.Context, out io.Writer, args ...string) error {
	cmd := f.Command(ctx, f.options.Binary, args...)
	cmd.Stdout, cmd.Stderr = out, out
	return cmd.Run()
}
