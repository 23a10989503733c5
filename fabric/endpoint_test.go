package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

// A NetworkConfig whose endpoint CheckEndpoint refuses is refused for the same reason.
func TestClaimFromRefusesEndpointsThatNoGatewayCanHave(t *testing.T) {
	for text, why := range map[string]string{
		"240.0.0.9": "240.0.0.9 is in 240.0.0.0/4 (reserved, RFC 1112)", "100.100.100.200": "Alibaba", "fd00:ec2::254": "Amazon",
		"::1": "::/8", "64:ff9b::7f00:1": "64:ff9b::7f00:1 contains the IPv4 address 127.0.0.1 (NAT64, RFC 6052): 127.0.0.1 is in 127.0.0.0/8 (loopback)",
		"2002:a9fe:a9fe::": "contains the IPv4 address 169.254.169.254 (6to4, RFC 3056)", "::ffff:192.0.2.1": "want 192.0.2.1", "fe80::1%\x1b[2J": `"fe80::1%\x1b[2J" has an IPv6 zone`,
	} {
		nc := fromBravo()
		nc.Spec.EndpointIP = text
		_, problems := ClaimFrom(nc, Origin{})
		if all := strings.Join(texts(problems), "\n"); !strings.Contains(all, why) || !strings.HasPrefix(all, "spec.endpointIP: ") || !strings.Contains(all, "; want ") {
			t.Errorf("%s:\n%s\nwant %s", text, all, why)
		}
	}
	for _, text := range []string{"64:ff9b::c000:201", "2002:c000:201::1", "2001:db8::1", "100.64.0.1"} {
		nc := fromBravo()
		nc.Spec.EndpointIP = text
		if _, problems := ClaimFrom(nc, Origin{}); len(problems) > 0 {
			t.Errorf("%s: %v", text, problems)
		}
	}
}

// The gateway's Site has the networks of all its peers, and the Site of the source.
func TestGatewaySiteContainsNetworksOfPeersAndSource(t *testing.T) {
	in := Intent{ClusterID: idA, Peers: []Peer{peer(t, idB, nil)}, Site: Site{Networks: []SiteNetwork{{Prefix: pfx("10.96.0.0/12"), What: "our ServiceCIDR"}}}.With([]netip.Addr{ip("198.51.100.7")}, "a node of ours")}
	gw, problems := GatewayFor(in)
	wantTexts(t, problems)
	p := gw.Peers[0]
	for addr, why := range map[netip.Addr]string{
		ip("10.96.0.10"): "our ServiceCIDR", ip("198.51.100.7"): "a node of ours", p.Local.Pod.Addr(): "our PodCIDR", p.Local.External.Addr(): "our ExternalCIDR",
		p.AllowedIPs[0].Addr(): "which is reached through the tunnel itself", p.AllowedIPs[1].Addr(): "which is reached through the tunnel itself", ip("192.0.2.2"): "",
	} {
		if got := gw.Site.CheckEndpoint(addr); (got == "") != (why == "") || !strings.Contains(got, why) {
			t.Errorf("%v: %q, want %q", addr, got, why)
		}
	}
	if len(in.Site.Networks) != 1 {
		t.Error("the Intent was changed")
	}
}

// A SiteIndex returns the same texts as its Site, also for overlapping networks.
func TestASiteIndexEqualsItsSite(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	addr := func() netip.Addr {
		a := [4]byte{10, byte(rng.IntN(4)), byte(rng.IntN(4)), byte(rng.IntN(256))}
		switch rng.IntN(8) {
		case 0:
			return netip.AddrFrom16(netip.AddrFrom4(a).As16())
		case 1:
			return netip.AddrFrom16([16]byte{0, 0x64, 0xff, 0x9b, 12: a[0], a[1], a[2], a[3]})
		case 2:
			return netip.AddrFrom16([16]byte{0xfd, 15: a[3]})
		}
		return netip.AddrFrom4(a)
	}
	refused := 0
	for range 300 {
		var site, still Site
		for i := range rng.IntN(8) {
			a := addr().Unmap()
			p := netip.PrefixFrom(a, 8+rng.IntN(a.BitLen()-8)).Masked()
			n := SiteNetwork{Prefix: p, What: fmt.Sprintf("network %d", i), Relay: rng.IntN(4) == 0}
			if site.Networks = append(site.Networks, n); !n.Relay {
				still.Networks = append(still.Networks, n)
			}
		}
		site = site.With([]netip.Addr{addr(), addr()}, "an API server").WithRelays([]netip.Addr{addr()}, "a node")
		still.Addrs = site.Addrs
		index := site.Index()
		for range 50 {
			a := addr()
			want := site.CheckEndpoint(a)
			if got := index.CheckEndpoint(a); got != want {
				t.Fatalf("%v of %+v: %q, want %q", a, site, got, want)
			}
			if want != "" {
				refused++
			}
			may := site.Relays[a.Unmap()] || still.CheckEndpoint(a) == ""
			if got := index.CheckSource(a); (got == "") != may {
				t.Fatalf("%v of %+v as a source: %q", a, site, got)
			}
		}
	}
	if refused < 1000 {
		t.Errorf("%d addresses were refused; want more, else this tests nothing", refused)
	}
}

// Services relay messages of peers from addresses of nodes, including node addresses in pod
// networks.
func TestMessagesFromServiceRelaysAreAccepted(t *testing.T) {
	site := Site{Networks: []SiteNetwork{{Prefix: pfx("10.244.0.0/16"), What: "our PodCIDR", Relay: true}, {Prefix: pfx("10.96.0.0/12"), What: "our ServiceCIDR"}}}.
		With([]netip.Addr{ip("172.30.1.2"), ip("172.30.1.11")}, "an API server of ours").WithRelays([]netip.Addr{ip("172.30.1.11")}, "a node of ours")
	index := site.Index()
	for addr, may := range map[string]bool{
		"198.51.100.1": true, "172.30.1.11": true, "10.244.3.1": true, "::ffff:172.30.1.11": true,
		"172.30.1.2": false, "10.96.0.1": false, "127.0.0.1": false, "169.254.169.254": false, "64:ff9b::a60:1": false,
	} {
		if wrong := index.CheckSource(ip(addr)); (wrong == "") != may {
			t.Errorf("%s: %q", addr, wrong)
		}
		if got := index.RelaysFrom(ip(addr)); got != (may && addr != "198.51.100.1") {
			t.Errorf("%s: relayed from there: %v", addr, got)
		}
		if wrong := site.CheckEndpoint(ip(addr)); (wrong == "") != (addr == "198.51.100.1") {
			t.Errorf("%s as an endpoint: %q", addr, wrong)
		}
	}
}
