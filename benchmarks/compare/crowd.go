package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/source/file"
)

// A crowd is the additional load of a gateway beside the measured peer.
type crowd struct {
	peers int // additional peers, configured but unreachable
	flows int // NAPT flows to the measured peer
}

// configure adds the peers of a crowd to the node's configuration and raises its flow limit. undo
// removes the peers and restores the limit.
func (c crowd) configure(n *node) (undo func() error, err error) {
	gateway, objects := filepath.Join(n.cluster.ConfigDir, "gateway.yaml"), filepath.Join(n.cluster.ConfigDir, "crowd.yaml")
	was, err := os.ReadFile(gateway)
	if err != nil {
		return nil, err
	}
	room := fmt.Sprintf("maxFlows: %d\nmaxFlowsPerPeer: %[1]d\nmaxFlowsPerHost: %[1]d\n", 2*c.flows)
	var text bytes.Buffer
	for i := range c.peers {
		var key [32]byte
		_, _ = rand.Read(key[:]) // never fails
		key[31] &= 0x7f          // a public key is below 2^255
		id := fmt.Sprintf("00000000-0000-4000-8000-%012d", i)
		document, err := yaml.Marshal(v1alpha1.TunnelEndpoint{
			TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "TunnelEndpoint"},
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("away-%d", i), Namespace: fmt.Sprintf("liqo-tenant-away-%d", i), Labels: map[string]string{v1alpha1.LabelClusterID: id}},
			Spec: v1alpha1.TunnelEndpointSpec{
				ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: id, ClusterName: fmt.Sprintf("away-%d", i)},
				LocalPodCIDR:    n.cluster.PodCIDR.String(), LocalNATPodCIDR: v1alpha1.None,
				LocalExternalCIDR: n.cluster.ExternalCIDR.String(), LocalNATExternalCIDR: v1alpha1.None,
				RemotePodCIDR: fmt.Sprintf("11.%d.%d.0/24", i>>8, i&0xff), RemoteNATPodCIDR: v1alpha1.None,
				RemoteExternalCIDR: fmt.Sprintf("12.%d.%d.0/24", i>>8, i&0xff), RemoteNATExternalCIDR: v1alpha1.None,
				EndpointIP: fmt.Sprintf("203.0.113.%d", 1+i%250), BackendType: v1alpha1.BackendWireGuard,
				BackendConfig: map[string]string{v1alpha1.ConfigPublicKey: base64.StdEncoding.EncodeToString(key[:]), v1alpha1.ConfigPort: "5871"},
			},
		})
		if err != nil {
			return nil, err
		}
		text.WriteString("---\n")
		text.Write(document)
	}
	undo = func() error { return errors.Join(os.WriteFile(gateway, was, 0o644), os.Remove(objects)) }
	return undo, errors.Join(os.WriteFile(objects, text.Bytes(), 0o644), os.WriteFile(gateway, append(was, room...), 0o644))
}

// open opens the flows of a crowd. It sends datagrams from the node itself, not from a pod, to
// unused addresses of the peer.
func (c crowd) open(ctx context.Context, b *bench, from *node, to netip.Prefix) error {
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return from.host.Dial(ctx, network, address)
	}}}
	defer client.CloseIdleConnections()
	for range 10 {
		if err := b.run(ctx, from.host, "", b.self, "load", "flows", to.String(), fmt.Sprint(c.flows)); err != nil {
			return err
		}
		r, err := client.Get("http://" + file.DefaultStatusAddress + "/status")
		if err != nil {
			return err
		}
		var s struct {
			Sessions struct{ Flows int }
		}
		err = json.NewDecoder(r.Body).Decode(&s)
		r.Body.Close()
		if err != nil {
			return err
		}
		if s.Sessions.Flows >= c.flows {
			return nil
		}
	}
	return fmt.Errorf("the gateway does not reach %d flows", c.flows)
}

// openFlows opens n flows with one datagram each, to addresses of a network, at about 100,000 per
// second.
func openFlows(network netip.Prefix, n int) error {
	const ports = 64
	var conns [ports]*net.UDPConn
	for i := range conns {
		c, err := net.ListenUDP("udp4", &net.UDPAddr{Port: 20000 + i})
		if err != nil {
			return err
		}
		defer c.Close()
		conns[i] = c
	}
	addr := network.Addr()
	for i := range n {
		if i%ports == 0 {
			if addr = addr.Next(); !network.Contains(addr) {
				return fmt.Errorf("%v has not enough addresses for %d flows", network, n)
			}
		}
		if _, err := conns[i%ports].WriteToUDPAddrPort([]byte{0}, netip.AddrPortFrom(addr, 9)); err != nil {
			return err
		}
		if i%1000 == 0 {
			time.Sleep(8 * time.Millisecond)
		}
	}
	return nil
}
