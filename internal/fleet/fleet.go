// Package fleet creates a lab whose clusters have real control planes. Each cluster has its own
// etcd, kube-apiserver and kube-controller-manager. Its manager, gateways and route agents run as
// processes with the permissions of their ServiceAccounts.
//
//	underlay ─┬─ a-control   etcd, kube-apiserver, kube-controller-manager, isthmus manager
//	          ├─ a-node1     isthmus gateway, isthmus route-agent, pods
//	          ├─ a-node2     isthmus gateway (standby), isthmus route-agent, pods
//	          └─ the same for b, c, ...
//
// Kubelets do not run: nodes and pods are the lab's namespaces, and the fleet creates the Node
// and Pod objects that describe them. There is no kube-proxy, so the gateway's Service publishes
// the node's own port.
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

// Options configure Up.
type Options struct {
	Spec     lab.Spec  // its clusters get a control plane and, by default, two nodes
	Binary   string    // path of the isthmus program
	Kube     string    // the folder that kubetest.Build returned
	Progress io.Writer // a line for each step; nil: none
	Audit    bool      // API servers write audit logs, see Cluster.AuditLog
	// IPAMAllow is the value of the managers' flag --ipam-allow, and may be empty. It lists
	// networks of nodes. Virtual kubelets may map addresses in these networks.
	IPAMAllow string
	// Services makes the clusters share Services with peers.
	Services bool
	// Votes makes the nodes of a cluster elect its active gateway by votes. It has no effect on
	// gateways on the host network.
	Votes bool
	// Prepare is called for the lab before any program runs in it. It creates the pod network of
	// Bare clusters, and may replace networks and addresses of Nodes and Pods.
	Prepare func(context.Context, *lab.Lab) error
	// Network is called for each cluster after its Node objects exist, and before its components
	// run. It starts a program that creates the pod network from the objects in the API server.
	Network func(context.Context, *Cluster) error
}

// A Fleet is the clusters of one lab.
type Fleet struct {
	Set[*Cluster]
	Sniffer *lab.Sniffer // watches the underlay as long as the Fleet exists; Down returns the leaks

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

// Up creates the lab and starts the control planes. In each cluster it creates the objects of
// `isthmus install` and starts the components. It returns when all are ready. A failed Up leaves
// nothing behind.
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
	if o.Prepare != nil {
		if err := o.Prepare(ctx, l); err != nil {
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

// install installs Isthmus in a cluster with a running API server, and starts its components.
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

// Replace rebuilds a cluster on the same machines. The cluster keeps its name and networks, but it
// gets a new cluster ID, certificate authority and API server, without any of the old objects.
// Replace also removes the kernel objects of Isthmus from the nodes, as a reboot does.
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

// Down ends everything and removes the lab. It returns an error if, since Up, a node has sent a
// packet for a peer in the clear.
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
// Kubeconfig. It returns the combined standard output and standard error.
func (f *Fleet) Isthmus(ctx context.Context, args ...string) (string, error) {
	var out strings.Builder
	err := f.IsthmusTo(ctx, &out, args...)
	return out.String(), err
}

// IsthmusTo runs the program like Isthmus, but writes the output while the program runs.
func (f *Fleet) IsthmusTo(ctx context.Context, out io.Writer, args ...string) error {
	cmd := f.Command(ctx, f.options.Binary, args...)
	cmd.Stdout, cmd.Stderr = out, out
	return cmd.Run()
}
