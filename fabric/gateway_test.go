package fabric

import (
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/natengine"
)

// engineAccepts checks that the engine accepts the rules that GatewayFor returns.
func engineAccepts(t testing.TB, gw Gateway) {
	t.Helper()
	var rules []natengine.Peer
	for _, p := range gw.Peers {
		rules = append(rules, p.Rules)
	}
	engine := natengine.New(natengine.Config{Self4: GatewayAddr, Self6: GatewayAddr6})
	if err := engine.SetPeers(rules); err != nil {
		t.Errorf("the engine refuses\n%s%v", gw, err)
	}
}

func peer(t testing.TB, id string, change func(*Peer)) Peer {
	t.Helper()
	p, problems := PeerFrom(endpointB(), Origin{Kind: "TunnelEndpoint", Namespace: "tenant", Name: id[:1]})
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	p.ID, p.Name, p.PublicKey = id, id[:1], keyOf(id[0])
	p.Endpoint = fmt.Sprintf("192.0.2.%d", id[0])
	if change != nil {
		change(&p)
	}
	return p
}

func remotes(pod, external string) func(*Peer) {
	return func(p *Peer) { p.Remote.PodSeen, p.Remote.ExternalSeen = pfx(pod), pfx(external) }
}

func TestGatewayForPrintsTheExpectedPlan(t *testing.T) {
	b := peer(t, idB, func(p *Peer) {
		p.Mappings = []Mapping{{ip("172.30.0.9"), ip("10.247.0.3")}, {ip("10.244.3.3"), ip("10.247.0.2")}}
	})
	c := peer(t, idC, func(p *Peer) {
		remotes("10.248.0.0/16", "10.249.0.0/16")(p)
		p.Tunnels = []TunnelEnd{{keyOf(9), 5872}, {keyOf(8), 40000}}
		p.Local.PodSeen, p.Local.ExternalSeen = p.Local.Pod, p.Local.External
		p.Endpoint = "gw.example.com"
	})
	b.Created, c.Created = 2000, 1000 // the age decides which peer is kept, not the position
	gw, problems := GatewayFor(Intent{ClusterID: idA, PublicKey: keyOf(1), Peers: []Peer{c, b},
		Waiting: []Waiting{{"x", Origin{Kind: "NatMapping", Name: "x"}}}})
	wantTexts(t, problems)
	engineAccepts(t, gw)
	const want = `peer bbbbbbbb-2222-4222-8222-222222222222 (b)
  wg set peer YmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmI= endpoint 192.0.2.98:5871 allowed-ips 10.246.0.0/16,10.247.0.0/16
  route 10.246.0.0/16
  route 10.247.0.0/16
  out source 10.244.0.0/16 -> 10.246.0.0/16
  out source other -> 10.246.0.0 with ports
  in destination 10.246.0.0/16 -> 10.244.0.0/16
  in destination 10.247.0.1 -> 169.254.0.1
  in destination 10.247.0.2 -> 10.244.3.3
  in destination 10.247.0.3 -> 172.30.0.9
  in destination other of 10.247.0.0/16 drop
  probe 10.247.0.1:12345
peer cccccccc-3333-4333-8333-333333333333 (c)
  wg set peer Y2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2M= endpoint gw.example.com:5871 allowed-ips 10.248.0.0/16,10.249.0.0/16
  wg set peer CQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQk= endpoint gw.example.com:5872 tunnel 1
  wg set peer CAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg= endpoint gw.example.com:40000 tunnel 2
  route 10.248.0.0/16
  route 10.249.0.0/16
  out source 10.244.0.0/16 unchanged
  out source other -> 10.244.0.0 with ports
  in destination 10.244.0.0/16 unchanged
  in destination 10.245.0.1 -> 169.254.0.1
  in destination other of 10.245.0.0/16 drop
  probe 10.249.0.1:12345
waiting: NatMapping x has mappings for cluster "x", which is not a peer yet
`
	if got := gw.String(); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	if got, want := allowed(gw), []netip.Prefix{pfx("10.246.0.0/16"), pfx("10.247.0.0/16"), pfx("10.248.0.0/16"), pfx("10.249.0.0/16")}; !slices.Equal(got, want) {
		t.Errorf("allowed IPs are %v, want %v", got, want)
	}
	wantRules := natengine.Peer{
		ID:             idB,
		RemotePods:     []netip.Prefix{pfx("10.246.0.0/16")},
		RemoteExternal: []netip.Prefix{pfx("10.247.0.0/16")},
		Pods:           []natengine.Remap{{From: pfx("10.244.0.0/16"), To: pfx("10.246.0.0/16")}},
		External:       []netip.Prefix{pfx("10.247.0.0/16")},
		Endpoints: []natengine.Endpoint{
			{Real: GatewayAddr, Seen: ip("10.247.0.1")},
			{Real: ip("10.244.3.3"), Seen: ip("10.247.0.2")},
			{Real: ip("172.30.0.9"), Seen: ip("10.247.0.3")},
		},
		Gateway: ip("10.247.0.1"),
	}
	if got := gw.Peers[0].Rules; !reflect.DeepEqual(got, wantRules) {
		t.Errorf("rules %+v\nwant  %+v", got, wantRules)
	}
}

func TestGatewayForIPv6PeerHasTheGatewaysIPv6Address(t *testing.T) {
	p := peer(t, idB, func(p *Peer) {
		p.Local = Networks{pfx("fd00:1::/48"), pfx("fd00:2::/48"), pfx("fd00:3::/112"), pfx("fd00:3::/112")}
		p.Remote = Networks{pfx("fd00:1::/48"), pfx("fd00:4::/48"), pfx("fd00:5::/112"), pfx("fd00:5::/112")}
	})
	gw, problems := GatewayFor(Intent{Peers: []Peer{p}})
	wantTexts(t, problems)
	engineAccepts(t, gw)
	if got, want := gw.Peers[0].Rules.Endpoints, []natengine.Endpoint{{Real: GatewayAddr6, Seen: ip("fd00:3::1")}}; !slices.Equal(got, want) {
		t.Errorf("endpoints %v, want %v", got, want)
	}
}

// A TunnelEndpoint has networks of one address family, but a gateway may have peers of both
// families.
func TestGatewayForAcceptsPeersOfBothAddressFamilies(t *testing.T) {
	six := func(id, remote, own string) Peer {
		return peer(t, id, func(p *Peer) {
			p.Local = Networks{pfx(own), pfx("fd00:2::/48"), pfx("fd00:3::/112"), pfx("fd00:3::/112")}
			p.Remote = Networks{pfx("fd00:1::/48"), pfx(remote + ":1::/48"), pfx("fd00:5::/112"), pfx(remote + ":2::/112")}
		})
	}
	peers := []Peer{peer(t, idB, nil), six(idC, "fd04", "fd00:1::/48"), six("d", "fd05", "fd00:1::/48")}
	gw, problems := GatewayFor(Intent{ClusterID: idA, Peers: peers})
	wantTexts(t, problems)
	if len(gw.Peers) != 3 {
		t.Errorf("%v", gw)
	}
	engineAccepts(t, gw)

	peers[2] = six("d", "fd05", "fd00:9::/48") // c and d have different networks of ours, as during a change of our networks
	gw, problems = GatewayFor(Intent{ClusterID: idA, Peers: peers})
	wantTexts(t, problems)
	if len(gw.Peers) != 3 {
		t.Errorf("%v", gw)
	}
	engineAccepts(t, gw)
}

// A change of our own networks reaches one peer after the other, and some peers never. The
// gateway's state for a peer does not depend on our networks towards other peers.
func TestPeerStateIgnoresOurNetworksTowardsOtherPeers(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for range 500 {
		in := Intent{ClusterID: idA, PublicKey: keyOf(1)}
		for i := range 2 + rng.IntN(8) {
			own, external := netip.PrefixFrom(ip("10.244.0.0"), 15+rng.IntN(3)), netip.PrefixFrom(ip("10.0.0.0"), 15+rng.IntN(3))
			if rng.IntN(4) == 0 {
				own, external = external, own // swap pod network and external network
			}
			in.Peers = append(in.Peers, peer(t, fmt.Sprintf("%c-peer", 'b'+i), func(p *Peer) {
				p.Local = Networks{Pod: own, External: external, PodSeen: own, ExternalSeen: external}
				if rng.IntN(2) == 0 {
					p.Local.PodSeen = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 64, byte(i), 0}), own.Bits()).Masked()
				}
				remotes(fmt.Sprintf("11.%d.0.0/16", i), fmt.Sprintf("12.%d.0.0/16", i))(p)
				p.Mappings = []Mapping{{ip("10.9.9.9"), p.Local.ExternalSeen.Addr().Next().Next()}}
			}))
		}
		gw, problems := GatewayFor(in)
		wantTexts(t, problems)
		engineAccepts(t, gw)
		if len(gw.Peers) != len(in.Peers) {
			t.Fatalf("%d of %d peers are left", len(gw.Peers), len(in.Peers))
		}
		for i, p := range in.Peers { // sorted by ID
			alone := in
			alone.Peers = []Peer{p}
			want, _ := GatewayFor(alone)
			if !reflect.DeepEqual(gw.Peers[i], want.Peers[0]) {
				t.Fatalf("beside others\n%s\nalone\n%s", gw.Peers[i], want.Peers[0])
			}
			for _, own := range []netip.Prefix{p.Local.Pod, p.Local.External} {
				if gw.Site.CheckEndpoint(own.Addr().Next()) == "" {
					t.Fatalf("a gateway of a peer may be in %v, which is ours towards %s", own, p.ID)
				}
			}
		}
	}
}

func TestMappingsToMetadataServicesAreRefused(t *testing.T) {
	for text, is := range map[string]bool{
		"169.254.169.254": true, "fd00:ec2::254": true, "fd00:ec2:1::": true, "fd20:ce::254": true, "fe80::a9fe:a9fe%eth0": true,
		"fd00:ec1::254": false, "fd20:ce::255": false, "169.254.0.1": false, "100::a9fe:1": false, "192.0.2.1": false,
	} {
		if wrong := checkReal(ip(text)); (wrong != "") != is {
			t.Errorf("%s: %q", text, wrong)
		}
	}
}

// The networks that peers use for us may overlap anything, even the networks that we use for other
// peers (docs/liqo-v0.md, section 7.5).
func TestGatewayForAcceptsOverlappingNetworksSeenByPeers(t *testing.T) {
	b := peer(t, idB, nil)
	c := peer(t, idC, remotes("10.248.0.0/16", "10.249.0.0/16"))
	d := peer(t, "d", func(p *Peer) {
		remotes("10.250.0.0/16", "10.251.0.0/16")(p)
		p.Local.PodSeen, p.Local.ExternalSeen = pfx("10.248.0.0/16"), pfx("10.247.0.0/16") // Pb@A of c, Xb@A of b
	})
	gw, problems := GatewayFor(Intent{Peers: []Peer{b, c, d}})
	wantTexts(t, problems)
	if len(gw.Peers) != 3 {
		t.Errorf("%d peers, want 3", len(gw.Peers))
	}
	engineAccepts(t, gw)
}

func TestGatewayForRefusesConflictingPeers(t *testing.T) {
	apart := remotes("10.248.0.0/16", "10.249.0.0/16")
	for _, test := range []struct {
		name   string
		change func(*Peer) // changes c, whose networks do not overlap with those of the other peers before the change
		want   string
		kept   string // first letters of the accepted peers' IDs
	}{
		{"nothing", func(p *Peer) {}, "", "bc"},
		{"an invalid peer", func(p *Peer) { p.Port = 0 }, "TunnelEndpoint tenant/c: spec.backend_config.port: is 0; want a UDP port from 1 to 65535", "b"},
		{"zero key", func(p *Peer) { p.PublicKey = [32]byte{} }, "TunnelEndpoint tenant/c: spec.backend_config.publicKey: is all zero; want a WireGuard public key", "b"},
		{"absent network", func(p *Peer) { p.Remote.Pod = netip.Prefix{} }, "TunnelEndpoint tenant/c: spec.remotePodCIDR: is absent; want a CIDR such as 10.244.0.0/16", "b"},
		{"host bits", func(p *Peer) { p.Remote.PodSeen = pfx("10.248.0.1/16") }, `TunnelEndpoint tenant/c: spec.remoteNATPodCIDR: "10.248.0.1/16" has host bits set; want 10.248.0.0/16`, "b"},
		{"our own ID", func(p *Peer) { p.ID = idA }, `TunnelEndpoint tenant/c: spec.clusterIdentity.clusterID: "` + idA + `" is our own cluster ID; want the ID of the remote cluster`, "b"},
		{"another peer's ID", func(p *Peer) { p.ID = idB }, `TunnelEndpoint tenant/c: spec.clusterIdentity.clusterID: "` + idB + `" is also the cluster ID in TunnelEndpoint tenant/b; want one TunnelEndpoint for each cluster`, "b"},
		{"our own key", func(p *Peer) { p.PublicKey = keyOf(1) }, `TunnelEndpoint tenant/c: spec.backend_config.publicKey: is our own public key; want that of cluster "` + idC + `"`, "b"},
		{"another peer's key", func(p *Peer) { p.PublicKey = keyOf('b') }, `TunnelEndpoint tenant/c: spec.backend_config.publicKey: is also the key of cluster "` + idB + `" (TunnelEndpoint tenant/b); want a different key for each cluster`, "b"},
		{"a different PodCIDR of ours", func(p *Peer) { p.Local.Pod = pfx("10.243.0.0/16") }, "", "bc"},
		{"a different ExternalCIDR of ours", func(p *Peer) { p.Local.External = pfx("10.243.0.0/16") }, "", "bc"},
		{"a network of ours equal to another peer's", func(p *Peer) { p.Local.Pod = pfx("10.246.0.0/16") }, `TunnelEndpoint tenant/c: spec.localPodCIDR: 10.246.0.0/16 overlaps 10.246.0.0/16 of cluster "` + idB + `" (TunnelEndpoint tenant/b: spec.remoteNATPodCIDR); want a network that no peer has here`, "b"},
		{"the peer's network equals one of ours towards another peer", func(p *Peer) {
			p.Local.Pod, p.Remote.PodSeen = pfx("10.243.0.0/16"), pfx("10.244.0.0/16")
		}, `TunnelEndpoint tenant/c: spec.remotePodCIDR: 10.244.0.0/16 overlaps 10.244.0.0/16, which is our PodCIDR for cluster "` + idB + `" (TunnelEndpoint tenant/b); want networks that do not overlap`, "b"},
		{"overlapping PodCIDRs", func(p *Peer) { p.Remote.PodSeen = pfx("10.246.0.0/16") }, `TunnelEndpoint tenant/c: spec.remoteNATPodCIDR: 10.246.0.0/16 overlaps 10.246.0.0/16 of cluster "` + idB + `" (TunnelEndpoint tenant/b: spec.remoteNATPodCIDR); want a network that no other peer has here`, "b"},
		{"a PodCIDR that overlaps an ExternalCIDR", func(p *Peer) {
			p.Remote.Pod, p.Remote.PodSeen = pfx("10.247.9.0/24"), pfx("10.247.9.0/24")
		}, `TunnelEndpoint tenant/c: spec.remotePodCIDR: 10.247.9.0/24 overlaps 10.247.0.0/16 of cluster "` + idB + `" (TunnelEndpoint tenant/b: spec.remoteNATExternalCIDR); want a network that no other peer has here`, "b"},
		{"a network that contains another peer's", func(p *Peer) {
			p.Remote.External, p.Remote.ExternalSeen = pfx("10.0.0.0/15"), pfx("10.246.0.0/15")
		}, `TunnelEndpoint tenant/c: spec.remoteNATExternalCIDR: 10.246.0.0/15 overlaps 10.246.0.0/16 of cluster "` + idB + `" (TunnelEndpoint tenant/b: spec.remoteNATPodCIDR); want a network that no other peer has here`, "b"},
		{"endpoint inside another peer's network", func(p *Peer) { p.Endpoint = "10.247.3.3" }, `TunnelEndpoint tenant/c: spec.endpointIP: 10.247.3.3 is inside 10.247.0.0/16 of cluster "` + idB + `" (TunnelEndpoint tenant/b: spec.remoteNATExternalCIDR), which is reached through a tunnel; want an address outside`, "b"},
		{"network that contains another peer's endpoint", func(p *Peer) {
			p.Remote.Pod, p.Remote.PodSeen = pfx("192.0.2.0/24"), pfx("192.0.2.0/24")
			p.Endpoint = "198.51.100.1"
		}, `TunnelEndpoint tenant/c: spec.remotePodCIDR: 192.0.2.0/24 contains 192.0.2.98, the gateway of cluster "` + idB + `" (TunnelEndpoint tenant/b: spec.endpointIP); want a network without gateways of peers`, "b"},
		{"our own key for an additional tunnel", func(p *Peer) { p.Tunnels = []TunnelEnd{{keyOf(8), 5872}, {keyOf(1), 5873}} },
			`TunnelEndpoint tenant/c: spec.backend_config.tunnels: tunnel 2 has our own public key; want one of cluster "` + idC + `"`, "b"},
		{"the key of an additional tunnel of ours", func(p *Peer) { p.PublicKey = keyOf(10) }, `TunnelEndpoint tenant/c: spec.backend_config.publicKey: is our own public key; want that of cluster "` + idC + `"`, "b"},
		{"the key of an additional tunnel of ours for an additional tunnel", func(p *Peer) { p.Tunnels = []TunnelEnd{{keyOf(10), 5872}} },
			`TunnelEndpoint tenant/c: spec.backend_config.tunnels: tunnel 1 has our own public key; want one of cluster "` + idC + `"`, "b"},
		{"another peer's key for an additional tunnel", func(p *Peer) { p.Tunnels = []TunnelEnd{{keyOf('b'), 5872}} },
			`TunnelEndpoint tenant/c: spec.backend_config.tunnels: tunnel 1 has a key of cluster "` + idB + `" (TunnelEndpoint tenant/b); want different keys for each cluster`, "b"},
		{"the key of another peer's additional tunnel", func(p *Peer) { p.PublicKey = keyOf(20) }, `TunnelEndpoint tenant/c: spec.backend_config.publicKey: is also the key of cluster "` + idB + `" (TunnelEndpoint tenant/b); want a different key for each cluster`, "b"},
		{"keys of additional tunnels that another peer has", func(p *Peer) { p.Tunnels = []TunnelEnd{{keyOf(8), 5872}, {keyOf(20), 5873}} },
			`TunnelEndpoint tenant/c: spec.backend_config.tunnels: tunnel 2 has a key of cluster "` + idB + `" (TunnelEndpoint tenant/b); want different keys for each cluster`, "b"},
		{"invalid tunnels", func(p *Peer) { p.Tunnels = []TunnelEnd{{keyOf(8), 0}} },
			"TunnelEndpoint tenant/c: spec.backend_config.tunnels: tunnel 1 has port 0; want a UDP port from 1 to 65535", "b"},
		{"older than the conflicting peer", func(p *Peer) { p.PublicKey, p.Created = keyOf('b'), 1000 }, `TunnelEndpoint tenant/b: spec.backend_config.publicKey: is also the key of cluster "` + idC + `" (TunnelEndpoint tenant/c); want a different key for each cluster`, "c"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b, c := peer(t, idB, nil), peer(t, idC, apart)
			b.Created, c.Created = 2000, 3000
			b.Tunnels = []TunnelEnd{{keyOf(20), 5872}}
			test.change(&c)
			in := Intent{ClusterID: idA, PublicKey: keyOf(1), FurtherKeys: [][32]byte{keyOf(9), keyOf(10)}, Peers: []Peer{b, c}}
			for range 2 {
				gw, problems := GatewayFor(in)
				if test.want == "" {
					wantTexts(t, problems)
				} else {
					wantTexts(t, problems, test.want)
				}
				kept := ""
				for _, p := range gw.Peers {
					kept += p.ID[:1]
				}
				if kept != test.kept {
					t.Errorf("kept %q, want %q", kept, test.kept)
				}
				engineAccepts(t, gw)
				slices.Reverse(in.Peers)
			}
		})
	}
}

func TestGatewayForLeavesOutInvalidMappings(t *testing.T) {
	m := func(real, seen string) Mapping { return Mapping{ip(real), ip(seen)} }
	good := m("172.30.0.9", "10.247.0.9")
	const at = `NatMapping m: spec.clusterMappings["`
	for _, test := range []struct {
		name     string
		mappings []Mapping
		want     []string
	}{
		{"the gateway's own address at its usual place", []Mapping{m("169.254.0.1", "10.247.0.1")}, nil},
		{"one mapping twice", []Mapping{good}, nil},
		{"no address", []Mapping{{}}, []string{at + `invalid IP"]: has no address; want an endpoint and the address at which cluster "` + idB + `" sees it`}},
		{"the gateway's own address at another place", []Mapping{m("169.254.0.1", "10.247.0.7")},
			[]string{at + `169.254.0.1"]: 10.247.0.7 is not the address of the connection check of cluster "` + idB + `"; want 10.247.0.1, the first host of 10.247.0.0/16`}},
		{"an endpoint at the gateway's own address", []Mapping{m("172.30.0.1", "10.247.0.1")},
			[]string{at + `172.30.0.1"]: 10.247.0.1 is the gateway's own address, the first host of 10.247.0.0/16; want another address`}},
		{"outside Xa@B", []Mapping{m("172.30.0.1", "10.246.0.5")},
			[]string{at + `172.30.0.1"]: 10.246.0.5 is outside 10.247.0.0/16, our ExternalCIDR as cluster "` + idB + `" sees it (TunnelEndpoint tenant/b); want an address inside`}},
		{"an endpoint of another address family", []Mapping{m("fd00::1", "10.247.0.5")}, []string{at + `fd00::1"]: fd00::1 and 10.247.0.5 are of different families; want addresses of one family`}},
		{"loopback", []Mapping{m("127.0.0.1", "10.247.0.5")}, []string{at + `127.0.0.1"]: 127.0.0.1 is in 127.0.0.0/8 (loopback); want an address that is reachable from our pod network`}},
		{"two endpoints at one address", []Mapping{m("172.30.0.2", "10.247.0.5"), m("172.30.0.1", "10.247.0.5")},
			[]string{at + `172.30.0.1"]: 10.247.0.5 is mapped to 2 endpoints; want an address for each`, at + `172.30.0.2"]: 10.247.0.5 is mapped to 2 endpoints; want an address for each`}},
		{"one endpoint at two addresses", []Mapping{m("172.30.0.1", "10.247.0.6"), m("172.30.0.1", "10.247.0.5")},
			[]string{at + `172.30.0.1"]: has 2 addresses, one of them 10.247.0.5; want one address for each endpoint`, at + `172.30.0.1"]: has 2 addresses, one of them 10.247.0.6; want one address for each endpoint`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := peer(t, idB, func(p *Peer) {
				p.Mappings, p.MappingsOrigin = append([]Mapping{good}, test.mappings...), Origin{Kind: "NatMapping", Name: "m"}
			})
			gw, problems := GatewayFor(Intent{ClusterID: idA, Peers: []Peer{b}})
			wantTexts(t, problems, test.want...)
			want := []natengine.Endpoint{{Real: GatewayAddr, Seen: ip("10.247.0.1")}, {Real: good.Real, Seen: good.Seen}}
			if len(gw.Peers) != 1 || !slices.Equal(gw.Peers[0].Rules.Endpoints, want) {
				t.Errorf("%v\nwant one peer with endpoints %v", gw, want)
			}
			engineAccepts(t, gw)
		})
	}
}

// randIntent makes peers with values from a small space, so that conflicts of every kind are
// common.
func randIntent(rng *rand.Rand) Intent {
	network := func() netip.Prefix {
		bits := 14 + rng.IntN(4)
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(rng.IntN(64)), byte(rng.IntN(4) * 64), 0}), bits).Masked()
	}
	seen := func(p netip.Prefix) netip.Prefix {
		if rng.IntN(3) == 0 {
			return p
		}
		return netip.PrefixFrom(network().Addr(), p.Bits()).Masked()
	}
	own, external := pfx("10.244.0.0/16"), pfx("10.245.0.0/16")
	in := Intent{ClusterID: "id0", PublicKey: keyOf(1)}
	for range 1 + rng.IntN(12) {
		p := Peer{ID: fmt.Sprintf("id%d", rng.IntN(30)), Endpoint: "192.0.2.1", Port: uint16(rng.IntN(40)), PublicKey: keyOf(byte(1 + rng.IntN(60)))}
		for i := range rng.IntN(3) {
			p.Tunnels = append(p.Tunnels, TunnelEnd{keyOf(byte(1 + rng.IntN(60))), uint16(100 + i - rng.IntN(20)/19)})
		}
		p.Local = Networks{own, seen(own), external, seen(external)}
		if rng.IntN(10) == 0 {
			p.Local.External, p.Local.ExternalSeen = pfx("10.243.0.0/16"), pfx("10.243.0.0/16")
		}
		p.Remote = Networks{Pod: network(), External: network()}
		p.Remote.PodSeen, p.Remote.ExternalSeen = seen(p.Remote.Pod), seen(p.Remote.External)
		p.Created = int64(rng.IntN(3))
		p.Origin = Origin{Kind: "TunnelEndpoint", Name: fmt.Sprint(rng.IntN(5))}
		for range rng.IntN(4) {
			base := p.Local.ExternalSeen.Addr().As4()
			base[3] = byte(rng.IntN(4))
			p.Mappings = append(p.Mappings, Mapping{netip.AddrFrom4([4]byte{169, 254 - byte(rng.IntN(2)), 0, byte(rng.IntN(3))}), netip.AddrFrom4(base)})
		}
		in.Peers = append(in.Peers, p)
	}
	for i := range rng.IntN(3) {
		in.Waiting = append(in.Waiting, Waiting{fmt.Sprint("w", rng.IntN(3)), Origin{Name: fmt.Sprint(i)}})
	}
	return in
}

func TestGatewayForIsIndependentOfInputOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		in := randIntent(rng)
		before := fmt.Sprintf("%+v", in)
		gw, problems := GatewayFor(in)
		if after := fmt.Sprintf("%+v", in); after != before {
			t.Fatalf("the input was changed:\n%s\n%s", before, after)
		}
		shuffled := in
		shuffled.Peers, shuffled.Waiting = slices.Clone(in.Peers), slices.Clone(in.Waiting)
		for i := range shuffled.Peers {
			p := &shuffled.Peers[i]
			p.Mappings = slices.Clone(p.Mappings)
			rng.Shuffle(len(p.Mappings), func(i, j int) { p.Mappings[i], p.Mappings[j] = p.Mappings[j], p.Mappings[i] })
		}
		rng.Shuffle(len(shuffled.Peers), func(i, j int) {
			shuffled.Peers[i], shuffled.Peers[j] = shuffled.Peers[j], shuffled.Peers[i]
		})
		rng.Shuffle(len(shuffled.Waiting), func(i, j int) {
			shuffled.Waiting[i], shuffled.Waiting[j] = shuffled.Waiting[j], shuffled.Waiting[i]
		})
		gw2, problems2 := GatewayFor(shuffled)
		if !reflect.DeepEqual(gw, gw2) || !slices.Equal(problems, problems2) {
			t.Fatalf("order matters:\n%s%s\n\n%s%s", gw, strings.Join(texts(problems), "\n"), gw2, strings.Join(texts(problems2), "\n"))
		}
	}
}

// allowed returns the networks that the host must route to the gateway, sorted.
func allowed(g Gateway) (all []netip.Prefix) {
	for _, p := range g.Peers {
		all = append(all, p.AllowedIPs[:]...)
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return all
}

func TestGatewayForRefusesExactlyTheInvalidAndConflictingPeers(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var kept, refused int
	for range 3000 {
		in := randIntent(rng)
		gw, _ := GatewayFor(in)
		engineAccepts(t, gw)

		// Sound: no two networks overlap, and no ID and no key occurs twice.
		ids, keys, prefixes := map[string]bool{in.ClusterID: true}, map[[32]byte]bool{in.PublicKey: true}, allowed(gw)
		for _, p := range gw.Peers {
			if ids[p.ID] {
				t.Fatalf("peer %s: ID twice", p.ID)
			}
			ids[p.ID] = true
			for _, tunnel := range append([]TunnelEnd{{p.PublicKey, p.Port}}, p.Tunnels...) {
				if keys[tunnel.PublicKey] {
					t.Fatalf("peer %s: key twice", p.ID)
				}
				keys[tunnel.PublicKey] = true
			}
		}
		for i, p := range allowed(gw) {
			for _, q := range append(prefixes[:0:0], allowed(gw)[:i]...) {
				if p.Overlaps(q) {
					t.Fatalf("%v overlaps %v", p, q)
				}
			}
			for _, k := range gw.Peers {
				if p.Overlaps(k.Local.Pod) || p.Overlaps(k.Local.External) {
					t.Fatalf("%v overlaps a network of ours, as %s knows it", p, k.ID)
				}
			}
		}

		// The accepted peers do not conflict, so GatewayFor accepts all of them again.
		again := in
		again.Peers = nil
		for _, p := range in.Peers {
			if slices.ContainsFunc(gw.Peers, func(k *GatewayPeer) bool { return sameKept(k, p) }) {
				again.Peers = append(again.Peers, p)
			}
		}
		gw2, _ := GatewayFor(again)
		if !reflect.DeepEqual(gw, gw2) {
			t.Fatalf("GatewayFor of the accepted peers differs:\n%s\n%s", gw, gw2)
		}

		// Complete: each refused peer is invalid by itself, or conflicts with an accepted peer.
		for _, p := range in.Peers {
			if slices.ContainsFunc(gw.Peers, func(k *GatewayPeer) bool { return sameKept(k, p) }) {
				kept++
				continue
			}
			refused++
			alone, _ := GatewayFor(Intent{ClusterID: in.ClusterID, PublicKey: in.PublicKey, Peers: []Peer{p}})
			if len(alone.Peers) == 1 && !contradicts(p, gw) {
				t.Fatalf("refused for no reason: %+v\nbeside\n%s", p, gw)
			}
		}
	}
	if kept < 1000 || refused < 1000 {
		t.Errorf("%d kept, %d refused: the test sees too little of one", kept, refused)
	}
}

func sameKept(k *GatewayPeer, p Peer) bool {
	return k.ID == p.ID && k.Origin == p.Origin && k.PublicKey == p.PublicKey && slices.Equal(k.Tunnels, p.Tunnels) && k.Local == p.Local && k.Remote == p.Remote
}

// contradicts is a slow and obvious version of keeper.check.
func contradicts(p Peer, gw Gateway) bool {
	for _, k := range gw.Peers {
		for _, a := range append([]TunnelEnd{{p.PublicKey, 0}}, p.Tunnels...) {
			for _, b := range append([]TunnelEnd{{k.PublicKey, 0}}, k.Tunnels...) {
				if a.PublicKey == b.PublicKey {
					return true
				}
			}
		}
		if k.ID == p.ID {
			return true
		}
		for _, n := range []netip.Prefix{k.Local.Pod, k.Local.External} {
			if p.Remote.PodSeen.Overlaps(n) || p.Remote.ExternalSeen.Overlaps(n) {
				return true
			}
		}
		for _, n := range k.AllowedIPs {
			if n.Overlaps(p.Local.Pod) || n.Overlaps(p.Local.External) {
				return true
			}
		}
		for _, a := range []netip.Prefix{p.Remote.PodSeen, p.Remote.ExternalSeen} {
			for _, b := range k.AllowedIPs {
				if a.Overlaps(b) {
					return true
				}
			}
		}
	}
	return false
}

func TestSortProblemsRemovesDuplicates(t *testing.T) {
	p := Problem{Origin{}, "f", "m"}
	if got := SortProblems([]Problem{{Origin{}, "g", "m"}, p, p}); !slices.Equal(got, []Problem{p, {Origin{}, "g", "m"}}) {
		t.Errorf("got %v", got)
	}
}

// BenchmarkGatewayFor measures GatewayFor with 10,000 peers, which runs after each change of one
// peer.
func BenchmarkGatewayFor(b *testing.B) {
	var in Intent
	for i := range 10_000 {
		in.Peers = append(in.Peers, peer(b, fmt.Sprintf("id%d", i), func(p *Peer) {
			p.PublicKey = [32]byte{1, byte(i), byte(i >> 8)}
			p.Remote.Pod, p.Remote.External = pfx("10.0.0.0/24"), pfx("10.0.1.0/24")
			p.Remote.PodSeen = netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 0}), 24)
			p.Remote.ExternalSeen = netip.PrefixFrom(netip.AddrFrom4([4]byte{12, byte(i >> 8), byte(i), 0}), 24)
		}))
	}
	b.ReportAllocs()
	for b.Loop() {
		if gw, problems := GatewayFor(in); len(gw.Peers) != 10_000 {
			b.Fatal(len(gw.Peers), problems[0])
		}
	}
}

func FuzzPeerFrom(f *testing.F) {
	s := endpointB().Spec
	f.Add(s.ClusterIdentity.ClusterID, "bravo", "10.244.0.0/16", "10.246.0.0/16", "10.245.0.0/16", "10.247.0.0/16", "10.244.0.0/16", "None", "10.245.0.0/16", "", "gw.example", "5871", keyText(2), "172.30.0.1", "10.247.0.2")
	f.Add("b", "", "10.0.0.0/8", "None", "11.0.0.0/30", "None", "172.16.0.0/12", "12.0.0.0/12", "13.0.0.0/16", "None", "192.0.2.1", "1", keyText(9), "169.254.0.1", "11.0.0.1")
	f.Add("b", "", "fd00:1::/48", "fd00:2::/48", "fd00:3::/112", "None", "fd00:1::/48", "fd00:4::/48", "fd00:5::/126", "None", "2001:db8::1", "65535", keyText(9), "fd00::9", "fd00:3::9")
	f.Add("b", "\xff", "::ffff:10.0.0.0/112", "::/0", "255.255.255.252/30", "0.0.0.0/0", "fe80::/64", "ff00::/8", "1.2.3.4", "none", "fe80::1%a", "-1", "AAAA", "::ffff:1.2.3.4", "1")
	f.Fuzz(func(t *testing.T, id, name, lp, lpn, lx, lxn, rp, rpn, rx, rxn, endpoint, port, key, real, seen string) {
		te := &v1alpha1.TunnelEndpoint{Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: id, ClusterName: name},
			LocalPodCIDR:    lp, LocalNATPodCIDR: lpn, LocalExternalCIDR: lx, LocalNATExternalCIDR: lxn,
			RemotePodCIDR: rp, RemoteNATPodCIDR: rpn, RemoteExternalCIDR: rx, RemoteNATExternalCIDR: rxn,
			EndpointIP: endpoint, BackendType: "wireguard", BackendConfig: v1alpha1.BackendConfig{"port": port, "publicKey": key},
		}}
		p, problems := PeerFrom(te, originB)
		for _, problem := range problems {
			if text := problem.Error(); problem.Field == "" || len(text) > 1000 || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' }) {
				t.Errorf("problem %+q", text)
			}
		}
		if len(problems) > 0 {
			if !reflect.DeepEqual(p, Peer{}) {
				t.Errorf("refused, yet %+v", p)
			}
			return
		}
		// Reading the object and writing it again must preserve its values.
		nat := func(own, seen netip.Prefix) string {
			if own == seen {
				return "None"
			}
			return seen.String()
		}
		for _, n := range []struct {
			own, seen    netip.Prefix
			text, textOf string
		}{{p.Local.Pod, p.Local.PodSeen, lp, lpn}, {p.Local.External, p.Local.ExternalSeen, lx, lxn}, {p.Remote.Pod, p.Remote.PodSeen, rp, rpn}, {p.Remote.External, p.Remote.ExternalSeen, rx, rxn}} {
			if n.own.String() != n.text || nat(n.own, n.seen) != n.textOf && n.own.String() != n.textOf {
				t.Errorf("%v %v read from %q %q", n.own, n.seen, n.text, n.textOf)
			}
		}
		if base64.StdEncoding.EncodeToString(p.PublicKey[:]) != key || fmt.Sprint(p.Port) != port {
			t.Errorf("key or port differ: %+v", p)
		}
		_, mappings, _ := MappingsFrom(&v1alpha1.NatMapping{Spec: v1alpha1.NatMappingSpec{ClusterID: id, PodCIDR: rp,
			ExternalCIDR: p.Local.ExternalSeen.String(), ClusterMappings: v1alpha1.EndpointMap{real: seen}}}, originMapB)
		p.Mappings = mappings
		gw, problems := GatewayFor(Intent{ClusterID: "own", Peers: []Peer{p}})
		if id != "own" && len(gw.Peers) != 1 {
			t.Errorf("a sound peer is refused: %v", problems)
		}
		engineAccepts(t, gw)
	})
}
