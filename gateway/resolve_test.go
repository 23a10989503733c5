package gateway

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/internal/cputime"
)

// names is a simulated name server.
type names struct {
	mu      sync.Mutex
	answer  []netip.Addr
	err     error
	queries int
	changes int
}

func (n *names) lookup(context.Context, string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.queries++
	return n.answer, n.err
}

func (n *names) set(err error, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.answer, n.err = nil, err
	for _, a := range addrs {
		n.answer = append(n.answer, netip.MustParseAddr(a))
	}
}

func named1(endpoint string) []*fabric.GatewayPeer {
	return []*fabric.GatewayPeer{{ID: "b", Endpoint: endpoint, Port: 5871, AllowedIPs: [2]netip.Prefix{
		netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.247.0.0/16")}}}
}

// set1 sets the peers, with a Site that contains only the peers' own networks.
func (r *resolver) set1(peers []*fabric.GatewayPeer) { r.set(peers, siteOf(peers)) }

func (r *resolver) refused(id string) bool {
	peers := []peer{{GatewayPeer: &fabric.GatewayPeer{ID: id}}}
	r.locate(peers)
	return peers[0].refused
}

func siteOf(peers []*fabric.GatewayPeer) (site fabric.Site) {
	for _, p := range peers {
		for _, n := range p.AllowedIPs {
			site.Networks = append(site.Networks, fabric.SiteNetwork{Prefix: n, What: "which is reached through the tunnel itself"})
		}
	}
	return site
}

// resolving runs a test with a resolver, a name server and a simulated clock. step lets seconds
// pass. endpoint returns the resolver's result.
func resolving(t *testing.T, test func(r *resolver, n *names, step func(seconds int), endpoint func() string)) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{}
		r := newResolver(n.lookup, func() { n.mu.Lock(); n.changes++; n.mu.Unlock() }, quiet)
		defer r.close()
		test(r, n, func(seconds int) {
			for range seconds {
				r.tick(time.Now())
				synctest.Wait()
				time.Sleep(time.Second)
			}
		}, func() string {
			ap, _ := r.endpoint("b")
			return ap.String()
		})
	})
}

func TestPeerBehindAServiceRelayHasAHiddenAddress(t *testing.T) {
	resolving(t, func(r *resolver, _ *names, _ func(int), _ func() string) {
		node := netip.MustParseAddrPort("10.244.1.1:8531")
		r.set(named1("192.0.2.1"), fabric.Site{Relays: map[netip.Addr]bool{node.Addr(): true}})
		g := &gateway{resolver: r}
		if !g.hidden(node) || g.hidden(netip.MustParseAddrPort("192.0.2.1:5871")) || g.hidden(netip.AddrPort{}) {
			t.Error("want only an address of the relay to be hidden")
		}
	})
}

func TestALiteralEndpointIsNeverLookedUp(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), endpoint func() string) {
		r.set1(named1("192.0.2.1"))
		r.setHeard("b", false)
		step(100)
		if endpoint() != "192.0.2.1:5871" || n.queries != 0 {
			t.Errorf("%s, asked %d times", endpoint(), n.queries)
		}
	})
}

func TestResolverPrefersIPv4AndKeepsItsAnswer(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), endpoint func() string) {
		n.set(nil, "2001:db8::1", "192.0.2.2", "192.0.2.1")
		r.set1(named1("gw.example"))
		if endpoint() != "invalid AddrPort" {
			t.Errorf("before the answer: %s", endpoint())
		}
		step(1)
		if endpoint() != "192.0.2.2:5871" || n.changes != 1 {
			t.Errorf("%s after %d changes", endpoint(), n.changes)
		}
		n.set(nil, "192.0.2.1", "192.0.2.2")
		r.setHeard("b", false)
		step(30)
		if endpoint() != "192.0.2.2:5871" || n.changes != 1 {
			t.Errorf("%s after %d changes, although the old answer is among the new", endpoint(), n.changes)
		}
		// First the peer gets another port, then another name.
		moved := named1("gw.example")
		moved[0].Port = 9999
		r.set1(moved)
		if endpoint() != "192.0.2.2:9999" {
			t.Errorf("other port: %s", endpoint())
		}
		r.set1(named1("other.example"))
		if endpoint() != "invalid AddrPort" {
			t.Errorf("other name: %s", endpoint())
		}
	})
}

func TestNewDNSAnswerIsUsedOnlyWhenThePeerIsSilent(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), endpoint func() string) {
		n.set(nil, "192.0.2.1")
		r.set1(named1("gw.example"))
		r.setHeard("b", true)
		step(2)
		n.set(nil, "192.0.2.9")
		step(130)
		if endpoint() != "192.0.2.1:5871" {
			t.Errorf("moved to %s although the peer is heard", endpoint())
		}
		if n.queries > 4 {
			t.Errorf("asked %d times in two minutes", n.queries)
		}
		r.setHeard("b", false)
		step(1)
		if endpoint() != "192.0.2.9:5871" || n.changes != 2 {
			t.Errorf("%s after %d changes", endpoint(), n.changes)
		}
		// If the name changes while the peer is silent, the new address is used soon.
		n.set(nil, "192.0.2.10")
		r.setHeard("b", false)
		step(11)
		if endpoint() != "192.0.2.10:5871" {
			t.Errorf("%s 11 s later", endpoint())
		}
	})
}

func TestFailedLookupKeepsTheAddressAndIsRepeated(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), endpoint func() string) {
		n.set(errors.New("server misbehaving"))
		r.set1(named1("gw.example"))
		step(25)
		if _, err := r.endpoint("b"); err == nil || !strings.Contains(err.Error(), "resolving gw.example: server misbehaving") {
			t.Errorf("%v", err)
		}
		if n.queries != 3 {
			t.Errorf("asked %d times in 25 s", n.queries)
		}
		n.set(nil, "192.0.2.1")
		step(10)
		n.set(errors.New("server misbehaving"))
		r.setHeard("b", false)
		step(30)
		if endpoint() != "192.0.2.1:5871" {
			t.Errorf("forgot the answer: %s", endpoint())
		}
	})
}

// ourSite is the Site of a cluster with two nodes, an API server, and the gateway's own host.
var ourSite = fabric.Site{Networks: []fabric.SiteNetwork{
	{Prefix: netip.MustParsePrefix("10.244.0.0/18"), What: "our PodCIDR"},
	{Prefix: netip.MustParsePrefix("10.96.0.0/12"), What: "our ServiceCIDR"},
	{Prefix: netip.MustParsePrefix("10.246.0.0/16"), What: "which is reached through the tunnel itself"},
	{Prefix: netip.MustParsePrefix("fd00:244::/56"), What: "our PodCIDR"},
}}.With([]netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8:7::7")}, "a node of ours").
	With([]netip.Addr{netip.MustParseAddr("198.51.100.9")}, "an API server of ours").
	With([]netip.Addr{netip.MustParseAddr("::ffff:192.0.2.77")}, "an address of the gateway's own host")

// refusals maps an address to a part of the reason why no peer's gateway can have that address;
// empty: it can.
var refusals = map[string]string{
	"192.0.2.1": "", "10.0.0.1": "", "100.64.1.1": "", "2001:db8::1": "", "fd00::1": "", "64:ff9b::c000:201": "", "2002:c000:201::1": "",

	"0.0.0.0": "0.0.0.0/8", "0.1.2.3": "0.0.0.0/8", "127.0.0.1": "loopback", "127.9.9.9": "loopback", "169.254.169.254": "link-local", "169.254.0.1": "link-local",
	"224.0.0.1": "multicast", "239.1.1.1": "multicast", "240.0.0.1": "240.0.0.0/4", "255.255.255.255": "broadcast",
	"::": "::/8", "::1": "::/8", "fe80::1": "link-local", "febf::1": "link-local", "ff02::1": "multicast", "100::1": "discard",
	"::7f00:1": "::/8", "64:ff9b:1::7f00:1": "::/8", "::ffff:0:7f00:1": "::/8",
	"64:ff9b::7f00:1": "contains the IPv4 address 127.0.0.1 (NAT64, RFC 6052): 127.0.0.1 is in 127.0.0.0/8", "64:ff9b::a9fe:a9fe": "contains the IPv4 address 169.254.169.254",
	"2002:7f00:1::1": "contains the IPv4 address 127.0.0.1 (6to4, RFC 3056)", "2002:a9fe:a9fe::1": "contains the IPv4 address 169.254.169.254", "2002:e000:1::": "contains the IPv4 address 224.0.0.1",
	"2001:0:c000:201::80ff:fffe": "contains the IPv4 address 127.0.0.1 (Teredo, RFC 4380)",

	"fd00:ec2::254": "Amazon", "fd20:ce::254": "Google", "100.100.100.200": "Alibaba", "168.63.129.16": "Azure", "192.0.0.192": "Oracle",

	"10.244.3.4": "inside 10.244.0.0/18, our PodCIDR", "10.96.0.1": "inside 10.96.0.0/12, our ServiceCIDR", "fd00:244:0:12::1": "our PodCIDR",
	"10.246.0.1": "inside 10.246.0.0/16, which is reached through the tunnel itself", "198.51.100.7": "a node of ours", "2001:db8:7::7": "a node of ours",
	"198.51.100.9": "an API server of ours", "192.0.2.77": "an address of the gateway's own host",
	"64:ff9b::af4:304": "contains the IPv4 address 10.244.3.4", "2002:c633:6409::": "contains the IPv4 address 198.51.100.9 (6to4, RFC 3056): 198.51.100.9 is an API server of ours",
}

func TestLiteralEndpointsAndDNSAnswersPassTheSameChecks(t *testing.T) {
	for text, why := range refusals {
		resolving(t, func(r *resolver, n *names, step func(int), _ func() string) {
			n.set(nil, text)
			r.set([]*fabric.GatewayPeer{{ID: "literal", Endpoint: text, Port: 1}, {ID: "name", Endpoint: "gw.example", Port: 1}}, ourSite)
			step(1)
			for _, id := range []string{"literal", "name"} {
				at, err := r.endpoint(id)
				switch {
				case why == "" && (err != nil || at.Addr() != netip.MustParseAddr(text)):
					t.Errorf("%s as a %s: %v, %v", text, id, at, err)
				case why != "" && (err == nil || !strings.Contains(err.Error(), why) || at.IsValid()):
					t.Errorf("%s as a %s: %v, %v; want %q", text, id, at, err, why)
				}
			}
		})
	}
	// An IPv4-mapped IPv6 address is handled as the IPv4 address.
	resolving(t, func(r *resolver, n *names, step func(int), _ func() string) {
		n.set(nil, "::ffff:127.0.0.1", "::ffff:198.51.100.7", "fe80::1%eth0")
		r.set([]*fabric.GatewayPeer{{ID: "name", Endpoint: "gw.example", Port: 1}}, ourSite)
		step(1)
		if at, err := r.endpoint("name"); err == nil || at.IsValid() {
			t.Errorf("mapped: %v, %v", at, err)
		}
		n.set(nil, "::ffff:127.0.0.1", "::ffff:192.0.2.1")
		step(11)
		if at, err := r.endpoint("name"); err != nil || at.String() != "192.0.2.1:1" {
			t.Errorf("mapped: %v, %v", at, err)
		}
	})
}

func TestChooseNeverReturnsARefusedAddress(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var pool []netip.Addr
	for text := range refusals {
		pool = append(pool, netip.MustParseAddr(text))
	}
	slices.SortFunc(pool, netip.Addr.Compare)
	one := func() netip.Addr {
		a := pool[rng.IntN(len(pool))]
		if b := a.As16(); rng.IntN(2) == 0 { // change a random part of the address
			other := pool[rng.IntN(len(pool))].As16()
			copy(b[rng.IntN(16):], other[:rng.IntN(16)])
			a = netip.AddrFrom16(b)
		}
		return a
	}
	for range 20_000 {
		var answers []netip.Addr
		for range rng.IntN(5) {
			answers = append(answers, one())
		}
		current := one()
		got, err := choose(answers, current, ourSite.Index())
		fine := slices.ContainsFunc(answers, func(a netip.Addr) bool { return ourSite.CheckEndpoint(a) == "" })
		switch {
		case got.IsValid() && ourSite.CheckEndpoint(got) != "":
			t.Fatalf("%v, in use %v: %v, although %s", answers, current, got, ourSite.CheckEndpoint(got))
		case got.IsValid() == (err != nil), got.IsValid() != fine:
			t.Fatalf("%v, in use %v: %v, %v", answers, current, got, err)
		}
	}
}

// A name first resolves to a gateway's address, and later to an internal one: DNS rebinding.
func TestDNSRebindingIsRefused(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), endpoint func() string) {
		n.set(nil, "192.0.2.1")
		r.set(named1("gw.example"), ourSite)
		step(1)
		for _, answer := range []string{"127.0.0.1", "169.254.169.254", "10.96.0.1", "198.51.100.9", "64:ff9b::7f00:1"} {
			n.set(nil, answer)
			r.setHeard("b", false) // a silent peer's name is looked up soon, and an allowed answer is used
			step(70)
			_, err := r.endpoint("b")
			if endpoint() != "192.0.2.1:5871" || err == nil || !strings.Contains(err.Error(), "resolving gw.example: "+answer) || r.refused("b") {
				t.Errorf("%s: %s, %v", answer, endpoint(), err)
			}
		}
		n.set(nil, "127.0.0.1", "192.0.2.2")
		step(11)
		if _, err := r.endpoint("b"); endpoint() != "192.0.2.2:5871" || err != nil {
			t.Errorf("the one of two that is fine: %s, %v", endpoint(), err)
		}
	})
}

func TestAnEndpointAddressIsDroppedWhenItBecomesOurs(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), _ func() string) {
		peers := append(named1("gw.example"), &fabric.GatewayPeer{ID: "c", Endpoint: "192.0.2.1", Port: 1})
		n.set(nil, "192.0.2.1")
		r.set(peers, ourSite)
		r.setHeard("b", true)
		step(2)
		ours := ourSite.With([]netip.Addr{netip.MustParseAddr("192.0.2.1")}, "a node of ours")
		r.set(peers, ours)
		for _, id := range []string{"b", "c"} {
			if at, err := r.endpoint(id); at.IsValid() || err == nil || !strings.Contains(err.Error(), "192.0.2.1 is a node of ours") || !r.refused(id) {
				t.Errorf("%s: %v, %v, refused %v", id, at, err, r.refused(id))
			}
		}
		before := n.queries
		n.set(nil, "192.0.2.3")
		step(2) // the name is looked up again at once
		if at, err := r.endpoint("b"); at.String() != "192.0.2.3:5871" || err != nil || r.refused("b") || n.queries == before {
			t.Errorf("afterwards: %v, %v", at, err)
		}
		r.set(peers, ourSite)
		if at, err := r.endpoint("c"); at.String() != "192.0.2.1:1" || err != nil || r.refused("c") {
			t.Errorf("the node is gone: %v, %v", at, err)
		}
	})
}

func TestAPeerIsDownWithoutASession(t *testing.T) {
	begin := time.Unix(1_700_000_000, 0)
	s := session{since: begin}
	at := func(seconds int, stats datapath.Stats) bool {
		s = s.updatedFrom(stats, begin.Add(time.Duration(seconds)*time.Second))
		return s.down
	}
	handshake := datapath.Stats{Handshake: begin.Add(40 * time.Second), Received: 148}
	for _, tc := range []struct {
		seconds int
		stats   datapath.Stats
		down    bool
	}{
		{1, datapath.Stats{}, false}, // the first packets wait for the handshake
		{29, datapath.Stats{}, false},
		{31, datapath.Stats{}, true},
		{41, handshake, false},
		{40 + 194, handshake, false},
		{40 + 196, handshake, true},
	} {
		if got := at(tc.seconds, tc.stats); got != tc.down {
			t.Errorf("after %d s: down %v", tc.seconds, got)
		}
	}
	if heard := begin.Add(41 * time.Second); !s.heard.Equal(heard) {
		t.Errorf("heard at %v, want %v", s.heard, heard)
	}
}

// The gateway checks the source of a message if it differs from that of the previous message. Any
// sender can cause such checks, so their cost must not depend on the number of peers.
func TestSourceLookupDoesNotScanAllPeers(t *testing.T) {
	var peers []*fabric.GatewayPeer
	for _, p := range crowdOf(1000) {
		peers = append(peers, &fabric.GatewayPeer{ID: p.ID, Endpoint: "198.51.100.1", Port: 5871, AllowedIPs: [2]netip.Prefix{p.Remote.PodSeen, p.Remote.ExternalSeen}})
	}
	r := newResolver(nil, func() {}, quiet)
	defer r.close()
	r.set1(peers)
	for addr, may := range map[netip.Addr]bool{
		netip.MustParseAddr("203.0.113.9"):     true,
		netip.MustParseAddr("198.51.100.1"):    true,
		peers[500].AllowedIPs[1].Addr().Next(): false,
	} {
		if got := r.allowed(addr); got != may {
			t.Errorf("%v: %v, want %v", addr, got, may)
		}
		if allocated := testing.AllocsPerRun(100, func() { r.allowed(addr) }); may && allocated > 0 {
			t.Errorf("%v: %v allocations, want none", addr, allocated)
		}
	}
}

// BenchmarkSourceCheck measures the check of a message's source, for messages of many peers in
// turn.
func BenchmarkSourceCheck(b *testing.B) {
	for _, n := range []int{10, 1000, 4000} {
		b.Run(fmt.Sprintf("peers=%d", n), func(b *testing.B) {
			var peers []*fabric.GatewayPeer
			for _, p := range crowdOf(n) {
				peers = append(peers, &fabric.GatewayPeer{ID: p.ID, Endpoint: "198.51.100.1", Port: 5871, AllowedIPs: [2]netip.Prefix{p.Remote.PodSeen, p.Remote.ExternalSeen}})
			}
			r := newResolver(nil, func() {}, quiet)
			defer r.close()
			r.set1(peers)
			addr := netip.MustParseAddr("203.0.113.9")
			before := cputime.Used(b)
			for b.Loop() {
				if !r.allowed(addr) {
					b.Fatal("refused")
				}
			}
			b.ReportMetric(float64((cputime.Used(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
}
