// Package lab makes Kubernetes-like clusters out of network namespaces of one machine, for tests,
// the demo, benchmarks and experiments. It needs Linux and root, but no program, no image and no
// Kubernetes.
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
// Every box and every pod is a namespace. Everything is made through netlink inside these
// namespaces, so the machine's own devices, routes and firewall do not change. Pods have a veth
// pair to their node, an address with length 32 and a default route through the node, as the ptp
// CNI plugin makes them. Nodes forward, have a part of the PodCIDR each, a default route to the
// underlay's router and routes to the pods of the cluster's other nodes. Node 1 is where the
// gateway runs; behind it is a server that is not in the cluster, which pods of the cluster reach
// by its address. The router knows the nodes' networks only: a packet with the address of a pod
// that leaves a node unencapsulated is lost.
//
// A lab belongs to the process that made it. After that process has ended in any way, the next Up
// of any process removes the lab, unless it was declared persistent.
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

// Errors that a caller may want to distinguish.
var (
	ErrInUse    = errors.New("is up and in use by a live process")
	ErrExists   = errors.New("is up already")
	ErrNotFound = errors.New("is not up")
)

// A Lab is one underlay with its clusters. Its methods may be used from several goroutines; Down
// ends its use.
type Lab struct {
	Name     string
	Spec     Spec // complete: with default values
	Dir      string
	Underlay *Host
	Clusters []*Cluster

	mu       sync.Mutex
	state    state
	owner    *os.File // the held lock; nil in a lab that was opened
	gateways map[*Cluster]*gateway
	servers  []func() error
}

// A Cluster is the nodes and pods of one cluster.
type Cluster struct {
	Name         string // also the cluster's name in its objects
	ID           string
	PodCIDR      netip.Prefix
	ExternalCIDR netip.Prefix
	Tunnels      int     // of its gateway
	Nodes        []*Node // the gateway runs on the first
	Pods         []*Pod  // those of node 1 first
	GatewayPods  []*Pod  // for gateways, on the first nodes; see ClusterSpec
	OnPrem       *Server // a server outside the cluster, on a network of node 1
	Control      *Server // the machine for the control plane; nil unless ClusterSpec.Control
	ConfigDir    string  // the directory for "isthmus gateway --config"

	bare bool
}

// A Node is a machine of a cluster.
type Node struct {
	*Host
	Addr    netip.Addr   // in the underlay
	PodCIDR netip.Prefix // the node's part
}

// A Pod is on a node.
type Pod struct {
	*Host
	Addr netip.Addr
	Node *Node
}

// A Server is a machine that is not in the cluster.
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

// Hosts returns all hosts: the underlay, then per cluster its nodes, pods, server and control
// plane.
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

// UniqueName returns a name for a lab that no other process and no other call uses. It begins with
// the given word.
func UniqueName(word string) string {
	return fmt.Sprintf("%s-%d-%d", word, os.Getpid(), uniqueNames.Add(1))
}

var uniqueNames atomic.Uint32

// Available returns why labs cannot be made here, or nil if they can.
func Available() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root")
	}
	if err := onOwnThread(newNamespace); err != nil {
		return fmt.Errorf("network namespaces: %w", err)
	}
	return nil
}

// Up makes a lab, after it has removed those whose owner died. It starts no gateways: see Join and
// StartGateways. A failed Up leaves nothing behind.
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
		owner, err := claim(spec.Name)
		if err != nil {
			return err
		}
		if s, err := readState(spec.Name); err == nil && s.Persistent { // sweep has left it
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

// Open returns a lab that another process has made. Do not open a lab that its owner may still be
// making. The caller does not become its owner: the lab stays when the caller ends.
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

// List returns the names of all labs, sorted, of all users. Dead ones are included until they
// are swept.
func List() ([]string, error) { return names() }

// Persist lets the lab outlive its owner, until Down.
func (l *Lab) Persist() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Persistent = true
	return l.state.write()
}

// Down ends the gateways and all other processes inside the lab, and removes the lab. A lab that is
// already gone is no error. A lab that another live process owns stays; the error is ErrInUse.
func (l *Lab) Down() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.owner == nil {
		err := locked(func() (err error) {
			l.owner, err = claim(l.Name)
			return err
		})
		if err != nil {
			return err
		}
	}
	errs := []error{l.stopServing()}
	// Not under the lock that all labs share, because a process may take long to end.
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

// Sweep removes all labs whose owner has died, except persistent ones, and persistent ones from
// before a reboot. Up calls it.
func Sweep() error { return locked(sweep) }

func sweep() error {
	all, err := names()
	if err != nil {
		return err
	}
	for _, name := range all {
		owner, claimErr := claim(name)
		if errors.Is(claimErr, ErrInUse) {
			continue
		}
		if claimErr != nil {
			err = errors.Join(err, claimErr)
			continue
		}
		if s, readErr := readState(name); readErr != nil || !s.Persistent || s.Boot != bootID() {
			err = errors.Join(err, destroy(name))
		}
		owner.Close()
	}
	return err
}

// destroy removes everything of a lab whose lock the caller holds. The directory goes last, so that
// an interrupted destroy is found again.
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

// fromState computes hosts and addresses. It depends only on the state, so every process sees the
// same lab.
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
