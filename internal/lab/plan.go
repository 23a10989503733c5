package lab

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"regexp"
	"slices"

	"github.com/isthmus-net/isthmus/fabric"
)

// Fixed networks and addresses. All labs use the same, because each lab has its own namespaces.
var (
	underlayNetwork = netip.MustParsePrefix("172.30.0.0/16")     // cluster n uses 172.30.n.0/24
	onPremNetwork   = netip.MustParsePrefix("192.168.77.0/24")   // behind node 1 of every cluster
	onPremGateway   = netip.MustParseAddr("192.168.77.1")        // address of node 1 in onPremNetwork
	onPremServer    = netip.MustParseAddr("192.168.77.10")       // address of the server in onPremNetwork
	serviceNetwork  = netip.MustParsePrefix("10.96.0.0/12")      // kubeadm's ServiceCIDR: never allocated to a peer
	defaultPodCIDR  = netip.MustParsePrefix("10.244.0.0/16")     // kubeadm's and kind's PodCIDR
	linkLocal       = netip.MustParsePrefix("169.254.0.0/16")    // the gateway's own addresses
	loopback        = netip.MustParsePrefix("127.0.0.0/8")       // never a network of pods
	multicast       = netip.MustParsePrefix("224.0.0.0/3")       // never a network of pods, either
	labName         = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`) // no dot, because a dot separates the parts of a namespace's name
	clusterName     = regexp.MustCompile(`^[a-z][a-z0-9]*$`)
)

const (
	firstHostNumber = 10 // host n of a network has the network's address + 10 + n, if there is room
	maxLabName      = 32
	maxClusterName  = 7 // "<cluster>-node99" must fit into the 15 bytes of an interface name
	maxNodes        = 99
	maxClusters     = 99
	minMTU          = 576
	maxMTU          = 65535
)

// RPFilter is the reverse path filter of all nodes, pods and servers of a lab
// (net.ipv4.conf.*.rp_filter, RFC 3704).
type RPFilter string

// Values of RPFilter. The zero value means loose.
const (
	RPFilterOff    RPFilter = "off"    // the kernel's own default
	RPFilterLoose  RPFilter = "loose"  // systemd's default since 240: Debian, Ubuntu, Fedora
	RPFilterStrict RPFilter = "strict" // RHEL and its relatives
)

func (f RPFilter) sysctl() (string, error) {
	switch f {
	case RPFilterOff:
		return "0", nil
	case RPFilterStrict:
		return "1", nil
	case RPFilterLoose, "":
		return "2", nil
	}
	return "", fmt.Errorf("rp_filter %q: want %s, %s or %s", f, RPFilterOff, RPFilterLoose, RPFilterStrict)
}

// A Spec describes a lab. The zero values of its fields, except Clusters, mean the defaults.
type Spec struct {
	// Name is the unique name of the lab: up to 32 lower-case letters, digits and dashes. Default
	// "lab".
	Name string `json:"name"`
	// MTU of the underlay in octets, 576 to 65535. It applies to all links, including those of pods.
	// Default 1500.
	MTU int `json:"mtu,omitempty"`
	// Tunnels is the number of tunnels between the gateways of two clusters, 1 to 16. If the
	// clusters have different numbers, the smaller applies. Default 1.
	Tunnels int `json:"tunnels,omitempty"`
	// RPFilter applies to every host except the underlay. Default loose.
	RPFilter RPFilter `json:"rpFilter,omitempty"`
	// Clusters has 1 to 99 elements.
	Clusters []ClusterSpec `json:"clusters"`
}

// A ClusterSpec describes one cluster of a Spec.
type ClusterSpec struct {
	// Name is up to 7 lower-case letters and digits, unique in the lab. Default "a", "b", ...
	Name string `json:"name"`
	// ID is the cluster's ID. Default: a UUID derived from Name.
	ID string `json:"id,omitempty"`
	// PodCIDR may equal that of other clusters. Default 10.244.0.0/16.
	PodCIDR netip.Prefix `json:"podCIDR"`
	// ExternalCIDR must not overlap PodCIDR. Default: the choice of Liqo's IPAM, with PodCIDR's
	// length.
	ExternalCIDR netip.Prefix `json:"externalCIDR"`
	// Nodes is the number of nodes, 1 to 99. Default 1.
	Nodes int `json:"nodes,omitempty"`
	// PodsPerNode is the number of pods on each node. 0 means the default 2; a negative number means
	// none.
	PodsPerNode int `json:"podsPerNode,omitempty"`
	// Tunnels is the number of tunnels of the cluster's gateway. Default: Spec.Tunnels.
	Tunnels int `json:"tunnels,omitempty"`
	// GatewayPods is the number of nodes, counted from the first, that get a pod for a gateway.
	// Default: 0, which means that gateways use their node's network.
	GatewayPods int `json:"gatewayPods,omitempty"`
	// Control adds a host for the cluster's control plane.
	Control bool `json:"control,omitempty"`
	// Bare leaves the pod network to the caller. Pods are namespaces without a device, nodes have
	// no routes to pods, and no node masquerades. The PodCIDR may then be in the cluster's part of
	// the underlay.
	Bare bool `json:"bare,omitempty"`
}

// Clusters returns n default clusters, called "a", "b" and so on. It returns none if n is negative.
func Clusters(n int) []ClusterSpec { return make([]ClusterSpec, max(0, n)) }

// Check returns an error that names every mistake in a spec.
func (s Spec) Check() error {
	_, err := s.withDefaults()
	return err
}

// withDefaults returns a copy of the spec with default values. The error names every mistake in the
// spec.
func (s Spec) withDefaults() (Spec, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if s.Name == "" {
		s.Name = "lab"
	}
	if len(s.Name) > maxLabName || !labName.MatchString(s.Name) {
		bad("lab name %q: want up to %d lower-case letters, digits and dashes", s.Name, maxLabName)
	}
	if s.MTU == 0 {
		s.MTU = 1500
	}
	if s.MTU < minMTU || s.MTU > maxMTU {
		bad("mtu %d: want %d to %d", s.MTU, minMTU, maxMTU)
	}
	s.Tunnels = cmp.Or(s.Tunnels, 1)
	if s.RPFilter == "" {
		s.RPFilter = RPFilterLoose
	}
	if _, err := s.RPFilter.sysctl(); err != nil {
		errs = append(errs, err)
	}
	if n := len(s.Clusters); n < 1 || n > maxClusters {
		bad("%d clusters: want 1 to %d", n, maxClusters)
	}
	s.Clusters = slices.Clone(s.Clusters)
	names := map[string]bool{}
	for i := range s.Clusters {
		c := &s.Clusters[i]
		if c.Name == "" {
			c.Name = defaultClusterName(i)
		}
		if len(c.Name) > maxClusterName || !clusterName.MatchString(c.Name) {
			bad("cluster name %q: want a letter and up to %d letters and digits, lower case", c.Name, maxClusterName-1)
		}
		if names[c.Name] {
			bad("two clusters have the name %q", c.Name)
		}
		names[c.Name] = true
		c.Tunnels = cmp.Or(c.Tunnels, s.Tunnels)
		if err := c.complete(); err != nil {
			bad("cluster %s: %w", c.Name, err)
		}
	}
	return s, errors.Join(errs...)
}

func (c *ClusterSpec) complete() error {
	if c.ID == "" {
		c.ID = clusterID(c.Name)
	}
	if !c.PodCIDR.IsValid() {
		c.PodCIDR = defaultPodCIDR
	}
	if c.Nodes == 0 {
		c.Nodes = 1
	}
	if c.Nodes < 1 || c.Nodes > maxNodes {
		return fmt.Errorf("%d nodes: want 1 to %d", c.Nodes, maxNodes)
	}
	if c.Tunnels < 1 || c.Tunnels > fabric.MaxTunnels {
		return fmt.Errorf("%d tunnels: want 1 to %d", c.Tunnels, fabric.MaxTunnels)
	}
	if c.PodsPerNode == 0 {
		c.PodsPerNode = 2
	}
	if c.GatewayPods < 0 || c.GatewayPods > c.Nodes {
		return fmt.Errorf("%d pods for gateways: want 0 to %d, the number of nodes", c.GatewayPods, c.Nodes)
	}
	if !c.Bare || !contains(underlayNetwork, c.PodCIDR) {
		if err := checkNetwork("PodCIDR", c.PodCIDR); err != nil {
			return err
		}
	}
	if err := checkRoom(c.PodCIDR, c.Nodes, c.PodsPerNode+min(c.GatewayPods, 1)); err != nil {
		return err
	}
	if !c.ExternalCIDR.IsValid() {
		x, err := allocate(reservedNetworks(c.PodCIDR), c.PodCIDR.Bits())
		if err != nil {
			return fmt.Errorf("ExternalCIDR: %w", err)
		}
		c.ExternalCIDR = x
	}
	if err := checkNetwork("ExternalCIDR", c.ExternalCIDR); err != nil {
		return err
	}
	if c.ExternalCIDR.Overlaps(c.PodCIDR) {
		return fmt.Errorf("ExternalCIDR %v overlaps PodCIDR %v", c.ExternalCIDR, c.PodCIDR)
	}
	return nil
}

func checkNetwork(what string, p netip.Prefix) error {
	switch {
	case !p.Addr().Is4():
		return fmt.Errorf("%s %v: a lab is IPv4 only", what, p)
	case p != p.Masked():
		return fmt.Errorf("%s %v has host bits set; want %v", what, p, p.Masked())
	}
	for _, other := range []netip.Prefix{underlayNetwork, onPremNetwork, linkLocal, loopback, multicast} {
		if p.Overlaps(other) {
			return fmt.Errorf("%s %v overlaps %v, which the lab needs itself", what, p, other)
		}
	}
	return nil
}

func contains(p, part netip.Prefix) bool { return p.Bits() <= part.Bits() && p.Contains(part.Addr()) }

// sliceBits returns the prefix length of a node's part of the PodCIDR: 24 as in
// kube-controller-manager, or longer if the PodCIDR is too small for that.
func sliceBits(podCIDR netip.Prefix, nodes int) int {
	return max(24, podCIDR.Bits()+bits.Len(uint(nodes-1)))
}

func checkRoom(podCIDR netip.Prefix, nodes, pods int) error {
	length := sliceBits(podCIDR, nodes)
	// Pods cannot have the network address, the node's address and the last address.
	if length > 30 || pods > 1<<(32-length)-3 {
		return fmt.Errorf("PodCIDR %v has no room for %d nodes with %d pods each", podCIDR, nodes, pods)
	}
	return nil
}

// nodeSlice returns the part of the PodCIDR that belongs to node i, counted from 0.
func nodeSlice(podCIDR netip.Prefix, nodes, i int) netip.Prefix {
	length := sliceBits(podCIDR, nodes)
	return netip.PrefixFrom(offset(podCIDR.Addr(), i<<(32-length)), length)
}

// podAddr returns the address of pod j, counted from 0, in a node's part of the PodCIDR. The first
// host address in that part belongs to the node.
func podAddr(slice netip.Prefix, pods, j int) netip.Addr {
	if 1+firstHostNumber+pods < 1<<(32-slice.Bits()) {
		return offset(slice.Addr(), firstHostNumber+1+j)
	}
	return offset(slice.Addr(), 2+j)
}

// gatewayAddr returns the address of a gateway's pod: the last host address in its node's part of
// the PodCIDR.
func gatewayAddr(slice netip.Prefix) netip.Addr {
	return offset(slice.Addr(), 1<<(32-slice.Bits())-2)
}

// offset returns the IPv4 address n after addr.
func offset(addr netip.Addr, n int) netip.Addr {
	b := addr.As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(n)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// Move replaces the network part of addr, which is in the network from, by the network to. Both
// networks have the same length.
func Move(addr netip.Addr, from, to netip.Prefix) netip.Addr {
	a, f := addr.As4(), from.Addr().As4()
	n := 0
	for i := range a {
		n = n<<8 | int(a[i]^f[i])
	}
	return offset(to.Addr(), n)
}

func defaultClusterName(i int) string {
	if i < 26 {
		return string(rune('a' + i))
	}
	return fmt.Sprintf("c%d", i+1)
}

// clusterID derives a UUID (in the form of version 4) from a cluster's name, so that labs with the
// same Spec have the same files.
func clusterID(name string) string {
	h := sha256.Sum256([]byte("isthmus lab cluster " + name))
	h[6] = h[6]&0x0f | 0x40
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}
