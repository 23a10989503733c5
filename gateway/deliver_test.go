package gateway

import (
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
)

// A new node is one more place to which pods' packets are delivered, and its address cannot be
// that of a peer's gateway. Neither changes the rules of peers, so these must not be rebuilt.
func TestANewNodeDoesNotRebuildPeerRules(t *testing.T) {
	at := func(addr string) Config {
		c := Config{Gateway: fabric.Gateway{ClusterID: "us", Peers: []*fabric.GatewayPeer{{ID: "them"}}}, ListenPort: 5871}
		c.Gateway.Site = fabric.Site{}.WithRelays([]netip.Addr{netip.MustParseAddr(addr)}, "a node of ours")
		c.PodNetwork.Nodes = []fabric.ClusterNode{{Name: "n", Addrs: []netip.Addr{netip.MustParseAddr(addr)}}}
		return c
	}
	now := at("192.0.2.1")
	if !at("192.0.2.2").samePeers(now) {
		t.Error("another node is taken for another peer")
	}
	for what, change := range map[string]func(*Config){
		"another cluster ID": func(c *Config) { c.Gateway.ClusterID = "them" },
		"another key":        func(c *Config) { c.PrivateKey[0]++ },
		"another port":       func(c *Config) { c.ListenPort++ },
		"another endpoint":   func(c *Config) { c.Gateway.Peers[0].Port++ },
		"one peer less":      func(c *Config) { c.Gateway.Peers = nil },
	} {
		c := at("192.0.2.3")
		if change(&c); c.samePeers(now) {
			t.Errorf("%s is taken for another node", what)
		}
	}
}
