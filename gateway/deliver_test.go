package gateway

import (
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
)

// A node that comes is another place to deliver to, and one where no peer's gateway is: the rules of peers
// are not made anew.
func TestANodeThatComesIsNoNewConfiguration(t *testing.T) {
	at := func(addr string) Config {
		c := Config{Gateway: fabric.Gateway{ClusterID: "us"}, ListenPort: 5871}
		c.Gateway.Site = fabric.Site{}.WithRelays([]netip.Addr{netip.MustParseAddr(addr)}, "a node of ours")
		c.PodNetwork.Nodes = []fabric.ClusterNode{{Name: "n", Addrs: []netip.Addr{netip.MustParseAddr(addr)}}}
		return c
	}
	g := &gateway{}
	g.now.config = at("192.0.2.1")
	if !g.deliversElsewhere(at("192.0.2.2")) || g.now.config.Gateway.Site.CheckEndpoint(netip.MustParseAddr("192.0.2.2")) == "" || g.now.config.PodNetwork.Nodes[0].Addrs[0] != netip.MustParseAddr("192.0.2.2") {
		t.Errorf("another node: %+v", g.now.config)
	}
	for what, change := range map[string]func(*Config){
		"another peer": func(c *Config) { c.Gateway.ClusterID = "them" },
		"another key":  func(c *Config) { c.PrivateKey[0]++ },
		"another port": func(c *Config) { c.ListenPort++ },
	} {
		c := at("192.0.2.3")
		if change(&c); g.deliversElsewhere(c) {
			t.Errorf("%s is taken for another node", what)
		}
	}
}
