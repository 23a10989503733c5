package lab

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// The ports of every gateway of a lab. All gateways use the same ports, because each has its own
// namespace.
const (
	wireGuardPort = 5871
	metricsPort   = 5872
	statusPort    = 5873
)

const keyFile = "private.key"

// tunnelAddr is the address of Liqo's tunnel. For the connection check, the first host address of
// the ExternalCIDR is mapped to it.
var tunnelAddr = netip.MustParseAddr("169.254.0.1")

// A View has the networks that one cluster uses for the PodCIDR and the ExternalCIDR of another.
type View struct {
	Pod      netip.Prefix `json:"pod"`
	External netip.Prefix `json:"external"`
}

// JoinOptions choose the networks that the clusters of a Join use for each other. For a zero
// Prefix, Join chooses a network as Liqo's IPAM does. The peer's real network means no remapping,
// Liqo's "None". Join checks only the length, so that a test can use networks that a gateway must
// reject.
type JoinOptions struct {
	AtA View // the networks that a uses for b
	AtB View // the networks that b uses for a
}

// Join makes two clusters peers. It chooses the networks that each uses for the other. It writes a
// TunnelEndpoint and a NatMapping into the ConfigDir of each, and also gateway.yaml and a private
// key if they are missing. Nodes without a gateway get routes to the peer through node 1. If the
// clusters are already joined, the new result replaces the previous one.
func (l *Lab) Join(a, b *Cluster, o JoinOptions) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	j := join{A: a.Name, B: b.Name}
	l.state.Joins = slices.DeleteFunc(l.state.Joins, func(old join) bool { return old.isOf(a, b) })
	var err error
	if j.AtA, err = l.completeView(a, b, o.AtA); err == nil {
		j.AtB, err = l.completeView(b, a, o.AtB)
	}
	if err == nil {
		l.state.Joins = append(l.state.Joins, j)
		err = errors.Join(l.state.write(), l.writePeer(a, b), l.writePeer(b, a), l.routePeer(a, j.AtA), l.routePeer(b, j.AtB))
	}
	if err != nil {
		return fmt.Errorf("join %s and %s: %w", a.Name, b.Name, err)
	}
	return nil
}

// JoinAll joins each pair of clusters, with Liqo's choice of networks.
func (l *Lab) JoinAll() error {
	for i, a := range l.Clusters {
		for _, b := range l.Clusters[i+1:] {
			if err := l.Join(a, b, JoinOptions{}); err != nil {
				return err
			}
		}
	}
	return nil
}

// Unjoin removes the files that Join wrote into the two ConfigDirs.
func (l *Lab) Unjoin(a, b *Cluster) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Joins = slices.DeleteFunc(l.state.Joins, func(j join) bool { return j.isOf(a, b) })
	errs := []error{l.state.write()}
	for _, file := range []string{PeerFile(a, b), PeerFile(b, a)} {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// PeerFile returns the path of the file with local's objects about peer, in local.ConfigDir.
func PeerFile(local, peer *Cluster) string {
	return filepath.Join(local.ConfigDir, "peer-"+peer.Name+".yaml")
}

func (j join) isOf(a, b *Cluster) bool {
	return j.A == a.Name && j.B == b.Name || j.A == b.Name && j.B == a.Name
}

// Map makes an endpoint outside the pods of c, such as its OnPrem server, reachable from the
// present peers of c. It allocates an address of c's ExternalCIDR and writes the mapping into the
// files of these peers. Each peer reaches the endpoint at another address, in its own network for
// the ExternalCIDR: see Seen. Peers that join later do not get the mapping.
func (l *Lab) Map(c *Cluster, endpoint netip.Addr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.mapped(c, endpoint); !ok {
		external := c.ExternalCIDR.Addr().Next() // the first host address is mapped to tunnelAddr
		for _, m := range l.state.Mappings {
			if m.Cluster == c.Name {
				external = m.External
			}
		}
		external = external.Next()
		if !c.ExternalCIDR.Contains(external.Next()) { // the last address is not usable for a host
			return fmt.Errorf("cluster %s: ExternalCIDR %v is full", c.Name, c.ExternalCIDR)
		}
		l.state.Mappings = append(l.state.Mappings, mapping{c.Name, endpoint, external})
	}
	errs := []error{l.state.write()}
	for _, peer := range l.Clusters {
		if _, ok := l.view(peer, c); ok {
			errs = append(errs, l.writePeer(c, peer))
		}
	}
	return errors.Join(errs...)
}

func (l *Lab) mapped(c *Cluster, endpoint netip.Addr) (netip.Addr, bool) {
	for _, m := range l.state.Mappings {
		if m.Cluster == c.Name && m.Real == endpoint {
			return m.External, true
		}
	}
	return netip.Addr{}, false
}

// View returns the networks that the cluster local uses for the cluster peer. It returns false if
// the two are not joined.
func (l *Lab) View(local, peer *Cluster) (View, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.view(local, peer)
}

func (l *Lab) view(local, peer *Cluster) (View, bool) {
	for _, j := range l.state.Joins {
		switch {
		case j.A == local.Name && j.B == peer.Name:
			return j.AtA, true
		case j.B == local.Name && j.A == peer.Name:
			return j.AtB, true
		}
	}
	return View{}, false
}

// Seen returns the address at which pods of the cluster local reach addr, which belongs to a pod or
// a mapped endpoint of the cluster peer. If local and peer are the same cluster, or if addr belongs
// to a node of any cluster, Seen returns addr.
func (l *Lab) Seen(local, peer *Cluster, addr netip.Addr) (netip.Addr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if local == peer || underlayNetwork.Contains(addr) {
		return addr, nil
	}
	view, ok := l.view(local, peer)
	if !ok {
		return netip.Addr{}, fmt.Errorf("clusters %s and %s are not joined", local.Name, peer.Name)
	}
	if peer.PodCIDR.Contains(addr) {
		return Move(addr, peer.PodCIDR, view.Pod), nil
	}
	external, ok := l.mapped(peer, addr)
	if !ok {
		return netip.Addr{}, fmt.Errorf("%v is neither in the PodCIDR of cluster %s nor mapped", addr, peer.Name)
	}
	return Move(external, peer.ExternalCIDR, view.External), nil
}

// completeView completes want, the networks that the cluster local shall use for the cluster peer.
// It chooses missing networks as Liqo does, first that for the PodCIDR.
func (l *Lab) completeView(local, peer *Cluster, want View) (View, error) {
	taken := reservedNetworks(local.PodCIDR, local.ExternalCIDR)
	for _, c := range l.Clusters {
		if v, ok := l.view(local, c); ok {
			taken = append(taken, v.Pod, v.External)
		}
	}
	choose := func(what string, wanted, network netip.Prefix) (netip.Prefix, error) {
		if !wanted.IsValid() {
			chosen, err := remap(taken, network)
			if err != nil {
				return chosen, fmt.Errorf("network of cluster %s for the peer's %s %v: %w", local.Name, what, network, err)
			}
			taken = append(taken, chosen)
			return chosen, nil
		}
		if wanted.Bits() != network.Bits() || !wanted.Addr().Is4() || wanted != wanted.Masked() {
			return wanted, fmt.Errorf("%s cannot see the peer's %s %v under %v: want a network of the same length", local.Name, what, network, wanted)
		}
		taken = append(taken, wanted)
		return wanted, nil
	}
	var v View
	var err error
	if v.Pod, err = choose("PodCIDR", want.Pod, peer.PodCIDR); err != nil {
		return v, err
	}
	v.External, err = choose("ExternalCIDR", want.External, peer.ExternalCIDR)
	return v, err
}

// writePeer writes the file with local's objects about peer, in local.ConfigDir.
func (l *Lab) writePeer(local, peer *Cluster) error {
	peerView, _ := l.view(local, peer)
	ownView, _ := l.view(peer, local)
	if err := ensureGatewayFile(local); err != nil {
		return err
	}
	backend, err := backendConfig(peer)
	if err != nil {
		return err
	}
	meta := metav1.ObjectMeta{Name: uniqueName(peer), Labels: map[string]string{v1alpha1.LabelClusterID: peer.ID}}
	tunnel := v1alpha1.TunnelEndpoint{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "TunnelEndpoint"},
		ObjectMeta: meta,
		Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity:       v1alpha1.ClusterIdentity{ClusterID: peer.ID, ClusterName: peer.Name},
			LocalPodCIDR:          local.PodCIDR.String(),
			LocalNATPodCIDR:       remapped(local.PodCIDR, ownView.Pod),
			LocalExternalCIDR:     local.ExternalCIDR.String(),
			LocalNATExternalCIDR:  remapped(local.ExternalCIDR, ownView.External),
			RemotePodCIDR:         peer.PodCIDR.String(),
			RemoteNATPodCIDR:      remapped(peer.PodCIDR, peerView.Pod),
			RemoteExternalCIDR:    peer.ExternalCIDR.String(),
			RemoteNATExternalCIDR: remapped(peer.ExternalCIDR, peerView.External),
			EndpointIP:            peer.Gateway().Addr.String(),
			BackendType:           v1alpha1.BackendWireGuard,
			BackendConfig:         backend,
		},
	}
	tunnel.Namespace = "liqo-tenant-" + uniqueName(peer)
	mappings := map[string]string{tunnelAddr.String(): Move(local.ExternalCIDR.Addr().Next(), local.ExternalCIDR, ownView.External).String()}
	for _, m := range l.state.Mappings {
		if m.Cluster == local.Name {
			mappings[m.Real.String()] = Move(m.External, local.ExternalCIDR, ownView.External).String()
		}
	}
	nat := v1alpha1.NatMapping{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "NatMapping"},
		ObjectMeta: metav1.ObjectMeta{Name: "natmapping-" + peer.Name, Labels: map[string]string{v1alpha1.LabelClusterID: peer.ID, v1alpha1.LabelNatMapping: "true"}},
		Spec: v1alpha1.NatMappingSpec{
			ClusterID:       peer.ID,
			PodCIDR:         peerView.Pod.String(),
			ExternalCIDR:    ownView.External.String(),
			ClusterMappings: mappings,
		},
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "# Cluster %s's side of its peering with %s.\n", local.Name, peer.Name)
	for i, object := range []any{tunnel, nat} {
		document, err := yaml.Marshal(object)
		if err != nil {
			return err
		}
		if i > 0 {
			text.WriteString("---\n")
		}
		text.Write(document)
	}
	return writeFile(PeerFile(local, peer), text.Bytes(), 0o644)
}

// remapped returns seen, a cluster's network for a peer's network, in Liqo's notation: "None" if
// the two are equal.
func remapped(network, seen netip.Prefix) string {
	if seen == network {
		return v1alpha1.None
	}
	return seen.String()
}

// uniqueName returns Liqo's name for objects about a cluster.
func uniqueName(c *Cluster) string {
	hash := sha256.Sum256([]byte(c.ID))
	return fmt.Sprintf("%s-%x", c.Name, hash[:3])
}

// ensureGatewayFile writes gateway.yaml and the private key if they are missing.
func ensureGatewayFile(c *Cluster) error {
	if _, err := ensureKey(c); err != nil {
		return err
	}
	path := filepath.Join(c.ConfigDir, "gateway.yaml")
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	text := fmt.Appendf(nil, `apiVersion: isthmus.net/v1alpha1
kind: Gateway
clusterID: %s
clusterName: %s
privateKeyFile: %s
listenPort: %d
mtu: auto
metricsAddress: "127.0.0.1:%d"
statusAddress: "127.0.0.1:%d"
`, c.ID, c.Name, keyFile, wireGuardPort, metricsPort, statusPort)
	if c.Tunnels > 1 {
		text = fmt.Appendf(text, "tunnels: %d\n", c.Tunnels)
	}
	return writeFile(path, text, 0o644)
}

// ensureKey returns the cluster's private key. It creates a missing key.
func ensureKey(c *Cluster) ([32]byte, error) {
	path := filepath.Join(c.ConfigDir, keyFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key := make([]byte, 32)
		rand.Read(key)
		key[0] &= 248 // clamp as "wg genkey" does (RFC 7748, section 5); X25519 clamps as well
		key[31] = key[31]&127 | 64
		text = []byte(base64.StdEncoding.EncodeToString(key) + "\n")
		err = writeFile(path, text, 0o600)
	}
	if err != nil {
		return [32]byte{}, err
	}
	key, err := fabric.ParseKey(strings.TrimSpace(string(text)))
	if err != nil {
		return key, fmt.Errorf("%s %w", path, err)
	}
	return key, nil
}

// backendConfig returns the data that a cluster publishes to peers about its gateway.
func backendConfig(c *Cluster) (v1alpha1.BackendConfig, error) {
	private, err := ensureKey(c)
	if err != nil {
		return nil, err
	}
	keys := fabric.PublicKeys(private, c.Tunnels)
	config := v1alpha1.BackendConfig{
		v1alpha1.ConfigPublicKey: base64.StdEncoding.EncodeToString(keys[0][:]),
		v1alpha1.ConfigPort:      strconv.Itoa(wireGuardPort),
	}
	var further []fabric.TunnelEnd
	for i, key := range keys[1:] {
		further = append(further, fabric.TunnelEnd{PublicKey: key, Port: wireGuardPort + 1 + uint16(i)})
	}
	if further != nil {
		config[v1alpha1.ConfigTunnels] = fabric.FormatTunnels(further)
	}
	return config, nil
}

// routePeer adds routes to a peer's networks on the nodes without a gateway. The routes lead
// through the node with the gateway. Replies need no further routes, because each node has routes
// to all pods of its cluster.
func (l *Lab) routePeer(c *Cluster, v View) error {
	var errs []error
	for _, n := range c.Nodes[1:] {
		node, err := openKernel(n.Host)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, network := range []netip.Prefix{v.Pod, v.External} {
			errs = append(errs, node.route(network, c.Gateway().Addr, "eth0"))
		}
		node.close()
	}
	return errors.Join(errs...)
}
