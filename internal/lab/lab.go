// Package lab creates Kubernetes-like clusters from network namespaces of one machine, for tests,
// the demo, benchmarks and experiments. It needs Linux and root, but no other program, no image and
// no Kubernetes.
//
//	                       ┌──────────── underlay (router) ───────────┐
//	                       │ br-a 172.30.1.1/24    br-b 172.30.2.1/24 │ ...
//	                       └──────┬──────────────────────────┬────────┘
//	                              │                          │
//	      cluster a      eth0 172.30.1.11           eth0 172.30.2.11     cluster b
//	                     ┌─ a-node1 ─┐              ┌─ b-node1 ─┐
//	a-onprem             │ gateway   │              │ gateway   │
//	192.168.77.10 ─ lan ─┤           │              │           ├─ ...
//	                     └─┬───────┬─┘              └─┬───────┬─┘
//	                     pod1    pod2               pod1    pod2
//	                 a-pod1        a-pod2       b-pod1        b-pod2
//	            10.244.0.11   10.244.0.12   10.244.0.11   10.244.0.12
//
// Every box and every pod is a namespace. The package creates everything through netlink inside
// these namespaces, so the machine's own devices, routes and firewall do not change. As with the
// ptp CNI plugin, a pod has a veth pair to its node, an address with length 32 and a default route
// through the node. A node forwards packets. It has a part of the PodCIDR, a default route to the
// underlay's router, and routes to the pods of the cluster's other nodes. The gateway runs on node
// 1. That node also routes to a server outside the cluster (on-prem). The cluster's pods use the
// server's address without translation. The router has routes only to the nodes' networks, so it
// drops a packet to a pod's address that a node sends without encapsulation.
//
// A lab belongs to the process that created it. After that process has ended in any way, the next
// Up of any process removes the lab, unless the lab was made persistent.
package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Errors that callers may distinguish.
var (
	ErrInUse    = errors.New("is up and in use by a live process")
	ErrExists   = errors.New("is up already")
	ErrNotFound = errors.New("is not up")
)

// A Lab is one underlay with its clusters. Its methods may be called concurrently. After Down the
// Lab must not be used.
type Lab struct {
	Name     string
	Spec     Spec // with default values
	Dir      string
	Underlay *Host
	Clusters []*Cluster

	mu       sync.Mutex
	state    state
	owner    *os.File // the locked file of the lab's owner; nil if Open returned the lab
	gateways map[*Cluster]*gateway
	servers  []func() error
}

// A Cluster is the nodes and pods of one cluster.
type Cluster struct {
	Name         string // also the name in the cluster's Kubernetes objects
	ID           string
	PodCIDR      netip.Prefix
	ExternalCIDR netip.Prefix
	Tunnels      int     // number of tunnels of its gateway
	Nodes        []*Node // the gateway runs on the first node
	Pods         []*Pod  // those of node 1 first
	GatewayPods  []*Pod  // pods for gateways, on the first nodes; see ClusterSpec
	OnPrem       *Server // a server outside the cluster, on a network of node 1
	Control      *Server // the machine for the control plane; nil unless ClusterSpec.Control
	ConfigDir    string  // the directory for "isthmus gateway --config"

	bare bool
}

// A Node is a node of a cluster.
type Node struct {
	*Host
	Addr    netip.Addr   // address in the underlay
	PodCIDR netip.Prefix // the node's part of the PodCIDR
}

// A Pod is a pod on a node.
type Pod struct {
	*Host
	Addr netip.Addr
	Node *Node
}

// A Server is a host of a cluster that is neither a node nor a pod.
type Server struct {
	*Host
	Addr netip.Addr
}

// Gateway returns the node on which the gateway runs.
func (c *Cluster) Gateway() *Node { return c.Nodes[0] }

// String returns the cluster's name.
func (c *Cluster) String() string { return c.Name }

// Each runs do for all clusters in parallel. An error names its cluster.
func Each[C fmt.Stringer](clusters []C, do func(C) error) error {
	errs := make([]error, len(clusters))
	var group sync.WaitGroup
	for i, c := range clusters {
		group.Go(func() {
			if err := do(c); err != nil {
				errs[i] = fmt.Errorf("cluster %v: %w", c, err)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// Cluster returns the cluster with that name, or nil.
func (l *Lab) Cluster(name string) *Cluster {
	for _, c := range l.Clusters {
		if c.Name == name {
			return c
		}
	}
	return nil
}

// Hosts returns all hosts: the underlay, then the nodes, pods, server and control plane of each
// cluster.
func (l *Lab) Hosts() []*Host {
	hosts := []*Host{l.Underlay}
	for _, c := range l.Clusters {
		for _, n := range c.Nodes {
			hosts = append(hosts, n.Host)
		}
		for _, p := range slices.Concat(c.Pods, c.GatewayPods) {
			hosts = append(hosts, p.Host)
		}
		hosts = append(hosts, c.OnPrem.Host)
		if c.Control != nil {
			hosts = append(hosts, c.Control.Host)
		}
	}
	return hosts
}

// Host returns the host with that name.
func (l *Lab) Host(name string) (*Host, error) {
	var known []string
	for _, h := range l.Hosts() {
		if h.Name == name {
			return h, nil
		}
		known = append(known, h.Name)
	}
	return nil, fmt.Errorf("lab %s has no host %q; it has %v", l.Name, name, known)
}

// UniqueName returns a unique name for a lab: no other process and no other call gets the same.
// The name starts with the given word.
func UniqueName(prefix string) string {
	return fmt.Sprintf("%s-%d-%d", prefix, os.Getpid(), uniqueNames.Add(1))
}

var uniqueNames atomic.Uint32

// Available returns the reason why labs cannot run on this machine, or nil if they can.
func Available() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root")
	}
	if err := onOwnThread(newNamespace); err != nil {
		return fmt.Errorf("network namespaces: %w", err)
	}
	return nil
}

// Up creates a lab. First it removes labs whose owner has ended. It starts no gateways: see Join
// and StartGateways. A failed Up leaves nothing behind.
func Up(ctx context.Context, spec Spec) (*Lab, error) {
	spec, err := spec.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := Available(); err != nil {
		return nil, err
	}
	l := fromState(state{Spec: spec, Boot: bootID(), Owner: os.Getpid()})
	err = locked(func() error {
		if err := sweep(); err != nil {
			return err
		}
		owner, err := acquire(spec.Name)
		if err != nil {
			return err
		}
		if s, err := readState(spec.Name); err == nil && s.Persistent { // sweep keeps persistent labs
			owner.Close()
			return fmt.Errorf("lab %q %w", spec.Name, ErrExists)
		}
		l.owner = owner
		return l.state.write()
	})
	if err != nil {
		return nil, err
	}
	if err := l.build(ctx); err != nil {
		return nil, errors.Join(err, l.Down())
	}
	return l, nil
}

// Open returns a lab that another process has created. The creation must be complete. The caller
// does not become the owner: the lab stays when the caller ends.
func Open(name string) (*Lab, error) {
	s, err := readState(name)
	if err != nil {
		return nil, err
	}
	if s.Boot != bootID() {
		return nil, fmt.Errorf("lab %q %w: it was made before the machine's last start", name, ErrNotFound)
	}
	return fromState(s), nil
}

// List returns the names of all labs of all users, sorted. It includes labs whose owner has
// ended, until they are swept.
func List() ([]string, error) { return names() }

// Persist keeps the lab after its owner has ended, until Down.
func (l *Lab) Persist() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Persistent = true
	return l.state.write()
}

// Down ends the gateways and all other processes inside the lab, and removes the lab. It is no
// error if the lab does not exist any more. If another live process owns the lab, Down changes
// nothing and returns ErrInUse.
func (l *Lab) Down() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.owner == nil {
		err := locked(func() (err error) {
			l.owner, err = acquire(l.Name)
			return err
		})
		if err != nil {
			return err
		}
	}
	errs := []error{l.stopServing()}
	// A process may take long to end, so wait without the lock that all labs share.
	if err := crowdOf(l.Name).end(3 * time.Second); err != nil {
		return fmt.Errorf("lab %s: %w", l.Name, err)
	}
	for _, g := range l.gateways {
		<-g.done
	}
	clear(l.gateways)
	errs = append(errs, locked(func() error {
		if err := destroy(l.Name); err != nil {
			return err
		}
		l.owner.Close()
		l.owner = nil
		return nil
	}))
	return errors.Join(errs...)
}

// Sweep removes all labs whose owner has ended, except persistent ones. It also removes
// persistent labs that were created before a reboot. Up calls it.
func Sweep() error { return locked(sweep) }

func sweep() error {
	all, err := names()
	if err != nil {
		return err
	}
	for _, name := range all {
		owner, lockErr := acquire(name)
		if errors.Is(lockErr, ErrInUse) {
			continue
		}
		if lockErr != nil {
			err = errors.Join(err, lockErr)
			continue
		}
		if s, readErr := readState(name); readErr != nil || !s.Persistent || s.Boot != bootID() {
			err = errors.Join(err, destroy(name))
		}
		owner.Close()
	}
	return err
}

// destroy removes a lab. The caller holds the lab's lock. destroy removes the directory last, so
// that the next sweep finds the remains of an interrupted removal.
func destroy(name string) error {
	errs := []error{crowdOf(name).end(time.Second)}
	for _, path := range namespacesOf(name) {
		errs = append(errs, removeNamespace(path))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("lab %s: %w", name, err)
	}
	return os.RemoveAll(dirOf(name))
}

// fromState computes hosts and addresses. It depends only on the state, so every process gets the
// same result.
func fromState(s state) *Lab {
	name := s.Spec.Name
	host := func(format string, args ...any) *Host { return &Host{Name: fmt.Sprintf(format, args...), lab: name} }
	l := &Lab{Name: name, Spec: s.Spec, Dir: dirOf(name), Underlay: host("underlay"), state: s, gateways: map[*Cluster]*gateway{}}
	for i, cs := range s.Spec.Clusters {
		c := &Cluster{
			Name: cs.Name, ID: cs.ID, PodCIDR: cs.PodCIDR, ExternalCIDR: cs.ExternalCIDR, Tunnels: max(cs.Tunnels, 1),
			OnPrem:    &Server{host("%s-onprem", cs.Name), onPremServer},
			ConfigDir: filepath.Join(dirOf(name), "config-"+cs.Name), bare: cs.Bare,
		}
		network := underlayOf(i)
		if cs.Control {
			c.Control = &Server{host("%s-control", cs.Name), offset(network.Addr(), firstHostNumber)}
		}
		for n := range cs.Nodes {
			node := &Node{host("%s-node%d", c.Name, n+1), offset(network.Addr(), firstHostNumber+1+n), nodeSlice(c.PodCIDR, cs.Nodes, n)}
			c.Nodes = append(c.Nodes, node)
			for p := range cs.PodsPerNode {
				addr := podAddr(node.PodCIDR, cs.PodsPerNode, p)
				c.Pods = append(c.Pods, &Pod{host("%s-pod%d", c.Name, len(c.Pods)+1), addr, node})
			}
			if n < cs.GatewayPods {
				c.GatewayPods = append(c.GatewayPods, &Pod{host("%s-gateway%d", c.Name, n+1), gatewayAddr(node.PodCIDR), node})
			}
		}
		l.Clusters = append(l.Clusters, c)
	}
	return l
}

// underlayOf returns the underlay's network of cluster i, counted from 0. Its first address is the
// router.
func underlayOf(i int) netip.Prefix {
	return netip.PrefixFrom(offset(underlayNetwork.Addr(), (i+1)<<8), 24)
}
