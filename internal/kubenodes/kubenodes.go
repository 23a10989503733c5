// Package kubenodes creates real Kubernetes clusters on one machine. Each cluster has an etcd, a
// kube-apiserver, a controller manager and a scheduler. Each node has its own containerd, kubelet,
// kube-proxy and bridge CNI plugin. The package needs Linux, root, Debian's containerd, runc and
// containernetworking-plugins (`make deps-nodes`), and the programs of kubetest.BuildNodes.
//
//	underlay ─┬─ a-control   etcd, kube-apiserver, kube-controller-manager, kube-scheduler
//	          ├─ a-node1     containerd, kubelet, kube-proxy; cni0 ─ pods
//	          ├─ a-node2     the same
//	          └─ the same for b, ...
//
// Package lab creates the hosts, links and addresses. So its Sniffer can watch the underlay, and
// after a process was killed, the next Up removes the remains of its lab. A node has its own
// network, mount, PID, UTS, IPC and cgroup namespaces, so the kubelet and other node programs
// change nothing on the machine.
//
// Pods have addresses in their node's part of the PodCIDR. The underlay has no routes to pods, so
// the node masquerades packets that leave the cluster's PodCIDR. NodeOptions.Masquerade selects the
// destinations.
package kubenodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// ProxyMode is the mode in which kube-proxy implements Services.
type ProxyMode string

// The supported modes. The mode IPVS does not work in these nodes.
const (
	IPTables ProxyMode = "iptables"
	NFTables ProxyMode = "nftables"
)

// Masquerade selects the destinations outside of the PodCIDR for which the CNI masquerades
// packets of pods.
type Masquerade string

// The values of a Masquerade.
const (
	MasqueradeAll    Masquerade = "all"    // all destinations, as with kindnet, flannel, and Calico's natOutgoing
	MasqueradePublic Masquerade = "public" // all destinations except 10.0.0.0/8, as with ip-masq-agent
)

// NodeOptions are the options of all nodes of a cluster.
type NodeOptions struct {
	Proxy      ProxyMode  // default IPTables
	Masquerade Masquerade // default MasqueradeAll

	// HostNetwork runs the gateways of Isthmus in the network of their nodes.
	HostNetwork bool

	// UpperHalf gives pods addresses in the upper half of their node's part of the PodCIDR. A test
	// can use it if two clusters have the same PodCIDR. Then their pods have different addresses,
	// as long as the nodes of the other cluster start fewer than 126 pods each.
	UpperHalf bool
}

// Options configure Up.
type Options struct {
	// Spec has the clusters. They get a control plane and, by default, two nodes, but no pods of
	// package lab.
	Spec     lab.Spec
	Nodes    map[string]NodeOptions // by cluster name
	Kube     string                 // the folder that kubetest.BuildNodes returned
	Images   []string               // archives to load on every node, in addition to those of this package
	DNS      string                 // archive returned by CoreDNS; empty: pods resolve no names
	Progress io.Writer              // a line for each step; nil: none
}

// A Set is the clusters of one lab.
type Set struct {
	fleet.Set[*Cluster]

	options Options
	dir     string // state of the nodes, on disk
}

// A Cluster is one cluster with its control plane and nodes.
type Cluster struct {
	fleet.ControlPlane
	Nodes []*Node

	set     *Set
	options NodeOptions
}

// Proxy returns the mode in which the cluster's kube-proxy implements Services.
func (c *Cluster) Proxy() ProxyMode { return c.options.Proxy }

// nodePrograms maps the programs that a node needs to the Debian packages that contain them.
var nodePrograms = map[string]string{
	"containerd": "containerd", "ctr": "containerd", "runc": "runc", "iptables": "iptables", "nft": "nftables",
	"unshare": "util-linux", "mount": "mount", "sh": "dash",
}

// pluginsDir is the folder of Debian's CNI plugins.
const pluginsDir = "/usr/lib/cni"

// Available returns the reason why nodes cannot run on this machine, or nil if they can.
func Available() error {
	if err := lab.Available(); err != nil {
		return err
	}
	for _, name := range slices.Sorted(keys(nodePrograms)) {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("%s is not installed ('make deps-nodes' installs Debian's package %s)", name, nodePrograms[name])
		}
	}
	for _, plugin := range []string{"bridge", "host-local", "portmap", "loopback"} {
		if _, err := os.Stat(filepath.Join(pluginsDir, plugin)); err != nil {
			return fmt.Errorf("no CNI plugin %s in %s ('make deps-nodes' installs Debian's package containernetworking-plugins)", plugin, pluginsDir)
		}
	}
	_, err := hierarchies()
	return err
}

func keys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// Up creates the clusters and returns when all nodes are ready. A failed Up leaves nothing behind.
// First, Up removes the remains of clusters whose process was killed.
func Up(ctx context.Context, o Options) (*Set, error) {
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if err := Available(); err != nil {
		return nil, err
	}
	for i := range o.Spec.Clusters {
		c := &o.Spec.Clusters[i]
		c.Control, c.PodsPerNode = true, -1
		if c.Nodes == 0 {
			c.Nodes = 2
		}
	}
	l, err := lab.Up(ctx, o.Spec) // also removes remains of killed processes
	if err != nil {
		return nil, err
	}
	s := &Set{Set: fleet.NewSet[*Cluster](l), options: o, dir: filepath.Join(root, l.Name)}
	err = sweep()
	if err == nil {
		err = s.up(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Down())
	}
	return s, nil
}

// root has a folder for each lab with nodes. It is on disk, because it contains unpacked images.
var root = filepath.Join(os.TempDir(), "isthmus-nodes")

// sweep removes the folders and control groups of labs that no longer exist.
func sweep() error {
	labs, err := lab.List()
	if err != nil {
		return err
	}
	var errs []error
	dirs, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, d := range dirs {
		if !slices.Contains(labs, d.Name()) {
			errs = append(errs, os.RemoveAll(filepath.Join(root, d.Name())))
		}
	}
	groups, err := groupNames()
	if err != nil {
		return err
	}
	for _, g := range groups {
		name, _, _ := strings.Cut(strings.TrimPrefix(g, groupPrefix), ".")
		if !slices.Contains(labs, name) {
			errs = append(errs, removeGroups(g))
		}
	}
	return errors.Join(errs...)
}

func (s *Set) up(ctx context.Context) error {
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	image, err := s.testImage()
	if err != nil {
		return err
	}
	s.options.Images = append([]string{image}, s.options.Images...)
	if s.options.DNS != "" {
		s.options.Images = append(s.options.Images, s.options.DNS)
	}
	for _, c := range s.Lab.Clusters {
		cluster := &Cluster{ControlPlane: fleet.ControlPlane{Cluster: c}, set: s, options: s.options.Nodes[c.Name]}
		cluster.options.Proxy = cmp.Or(cluster.options.Proxy, IPTables)
		cluster.options.Masquerade = cmp.Or(cluster.options.Masquerade, MasqueradeAll)
		for _, n := range c.Nodes {
			cluster.Nodes = append(cluster.Nodes, &Node{Node: n, cluster: cluster, dir: filepath.Join(s.dir, n.Name)})
		}
		s.Clusters = append(s.Clusters, cluster)
	}
	err = s.Each(func(c *Cluster) error {
		if err := c.Serve(ctx, kubetest.Options{Dir: s.options.Kube, Nodes: true, ServiceCIDR: serviceCIDR}); err != nil {
			return err
		}
		fmt.Fprintf(s.options.Progress, "cluster %s: API server is ready\n", c.Name)
		if err := c.startNodes(ctx); err != nil || s.options.DNS == "" {
			return err
		}
		return c.startDNS(ctx)
	})
	if err != nil {
		return err
	}
	return s.WriteKubeconfig()
}

// Down ends everything and removes the lab.
func (s *Set) Down() error {
	errs := []error{s.Each(func(c *Cluster) (err error) {
		for _, n := range c.Nodes {
			err = errors.Join(err, n.kill())
		}
		if c.Server != nil {
			err = errors.Join(err, c.Server.Stop())
		}
		return err
	}), s.Lab.Down()}
	for _, c := range s.Clusters {
		for _, n := range c.Nodes {
			errs = append(errs, removeGroups(n.group()))
		}
	}
	errs = append(errs, os.RemoveAll(s.dir))
	if entries, err := os.ReadDir(root); err == nil && len(entries) == 0 {
		_ = os.Remove(root) // a leftover empty directory is harmless
	}
	return errors.Join(errs...)
}

func (c *Cluster) startNodes(ctx context.Context) error {
	errs := make([]error, len(c.Nodes))
	var group sync.WaitGroup
	for i, n := range c.Nodes {
		group.Go(func() {
			if err := n.begin(ctx); err != nil {
				errs[i] = fmt.Errorf("node %s: %w", n.Name, err)
				return
			}
			fmt.Fprintf(c.set.options.Progress, "cluster %s: node %s is ready\n", c.Name, n.Name)
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

func isReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
