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
	"path/filepath"
	"strings"
	"sync"

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

	binary string
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
	if err := f.up(ctx, o); err != nil {
		return nil, errors.Join(err, f.Down())
	}
	return f, nil
}

func newFleet(l *lab.Lab, o Options) *Fleet {
	f := &Fleet{Set: NewSet[*Cluster](l), binary: o.Binary}
	for _, c := range l.Clusters {
		f.Clusters = append(f.Clusters, &Cluster{
			ControlPlane: ControlPlane{Cluster: c}, binary: o.Binary, ipamAllow: o.IPAMAllow, votes: o.Votes, dir: filepath.Join(l.Dir, "kube-"+c.Name), processes: map[string]*process{},
		})
	}
	return f
}

func (f *Fleet) up(ctx context.Context, o Options) error {
	if err := f.sniff(); err != nil {
		return err
	}
	if err := f.Each(func(c *Cluster) error { return c.startServer(ctx, o.Kube, o.Audit) }); err != nil {
		return err
	}
	fmt.Fprintf(o.Progress, "%d control planes run\n", len(f.Clusters))
	if err := f.WriteKubeconfig(); err != nil {
		return err
	}
	return f.Each(func(c *Cluster) error {
		args := []string{"install", "--without-workloads", "--request-timeout", "1m", "--context", c.Name, "--cluster-name", c.Name, "--cluster-id", c.ID}
		if c.services = o.Services; c.services {
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
		if o.Network != nil {
			if err := o.Network(ctx, c); err != nil {
				return err
			}
		}
		if err := c.startComponents(ctx); err != nil {
			return err
		}
		fmt.Fprintf(o.Progress, "cluster %s: installed, %d nodes and %d pods described, components run\n", c.Name, len(c.Nodes), len(c.Pods))
		return nil
	})
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
	cmd := f.Command(ctx, f.binary, args...)
	cmd.Stdout, cmd.Stderr = out, out
	return cmd.Run()
}
