// Package behaviour tests the NAT with an independent program: coturn's turnutils_natdiscovery,
// which determines the kind of a NAT by RFC 5780. Coturn's server has the two addresses and two
// ports that the RFC requires. The real gateways are between client and server.
//
//	a-pod1  10.244.0.11 ┐                                                     ┌ turnserver in b-pod1
//	a-onprem, a-node2   ┴ a-node1 ═ isthmus gateway ══ isthmus gateway ═ b-node1 ┘ 10.50.32.11 and .77, ports 3478 and 3479
//	c-pod1   10.60.0.11 ─ c-node1 ═ isthmus gateway ══════╝
//
// The server sends its second address to the client in the body of a message, which no NAT
// translates. So that the client can use that address, neither a nor c remaps b. b sees a's pods as
// 10.246.0.0/16, and c's pods without remapping.
//
// The client uses only UDP. For TCP, tcp_test.go lets two kernels open a connection
// simultaneously.
package behaviour

import (
	"context"
	"flag"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/lab"
)

var long = flag.Bool("long", false, "also wait for the end of a UDP mapping, five minutes")

// Conclusions of the client, as it prints them.
const (
	noNAT                      = "No NAT"
	mappingEndpointIndependent = "NAT with Endpoint Independent Mapping"
	filteringNone              = "NAT with Endpoint Independent Filtering"
	filteringByAddressAndPort  = "NAT with Address and Port Dependent Filtering"
)

func TestRFC5780ProbesFindTheExpectedBehaviour(t *testing.T) {
	needCoturn(t)
	s := newSite(t)
	s.serve(t, s.Cluster("b").Pods[0])
	natIP := podsAatB.Addr()
	podSeen := lab.Move(s.Cluster("a").Pods[0].Addr, s.Cluster("a").PodCIDR, podsAatB)
	var checks []check
	for i, c := range []client{
		{"pod", "a-pod1", podSeen, mappingEndpointIndependent, filteringNone, false},
		{"pod of a cluster that is not remapped", "c-pod1", s.Cluster("c").Pods[0].Addr, noNAT, filteringNone, true},
		{"node with the gateway", "a-node1", natIP, mappingEndpointIndependent, filteringByAddressAndPort, false},
		{"node without a gateway", "a-node2", natIP, mappingEndpointIndependent, filteringByAddressAndPort, false},
		{"server outside the cluster", "a-onprem", natIP, mappingEndpointIndependent, filteringByAddressAndPort, false},
	} {
		checks = append(checks, s.startDiscoveries(t.Context(), c, uint16(40000+100*i))...)
	}
	for _, c := range checks {
		t.Run(c.name, c.run)
	}

	// RFC 4787, REQ-3: no overloading. Both hosts use the same port, so only one of them may keep
	// it.
	t.Run("two nodes with one port have different mappings", func(t *testing.T) {
		var seen []netip.AddrPort
		for _, from := range []string{"a-node1", "a-node2"} {
			r, _, err := s.discoverAgain(t.Context(), from, 39999, 0, 0, "-m")
			must(t, err)
			if !r.concludes(mappingEndpointIndependent) || len(r.seen) != 2 || r.seen[0].Addr() != natIP || r.seen[0].Port() < 1024 {
				t.Fatalf("%s is seen as %v\n%s", from, r.seen, r.text)
			}
			seen = append(seen, r.seen[0])
		}
		if seen[0].Port() != 39999 || seen[1].Port() == 39999 {
			t.Errorf("seen as %v, want port 39999 for the first alone", seen)
		}
	})
	// The gateway must count each packet that filtering drops, under the drop's reason.
	t.Run("filtered packets are counted", func(t *testing.T) {
		n, err := s.Metric(t.Context(), s.Cluster("a"), "isthmus_drops_total", `direction="inbound"`, `reason="no_flow"`)
		if must(t, err); n < 6 { // three clients, and for each at least two filtered answers: from another port and from another address
			t.Errorf("%v packets were counted as no_flow", n)
		}
	})
}

// A client is a host, together with the conclusions that it should reach.
type client struct {
	name, host      string
	seen            netip.Addr // its address, as the server sees it
	mapping, filter string
	hairpin         bool // whether it can reach itself under that address
}

type check struct {
	name string
	run  func(t *testing.T)
}

// startDiscoveries starts all discoveries of client c concurrently. Each uses a separate port above
// minPort. It returns functions that check the conclusions.
func (s *site) startDiscoveries(ctx context.Context, c client, minPort uint16) (checks []check) {
	discover := func(name string, missed int, judge func(t *testing.T, r *report, local netip.AddrPort), flags ...string) {
		minPort++
		port := minPort
		var r *report
		var err error
		done := make(chan struct{})
		go func() {
			r, port, err = s.discoverAgain(ctx, c.host, port, 10, missed, flags...)
			close(done)
		}()
		checks = append(checks, check{c.name + ": " + name, func(t *testing.T) {
			<-done
			must(t, err)
			if judge(t, r, netip.AddrPortFrom(c.seen, port)); t.Failed() {
				t.Log(r.text)
			}
		}})
	}
	lifetime := func(name string, seconds int, alive bool) {
		// After a pause the client sends a request from a second socket, and asks for the answer at
		// the mapping of the first socket (RFC 5780, section 4.6).
		missed := 0
		if seconds > 60 {
			missed = -1
		}
		discover(name, missed, func(t *testing.T, r *report, _ netip.AddrPort) {
			if got := len(r.seen) == 2; got != alive {
				t.Errorf("alive after %d s: %v, want %v", seconds, got, alive)
			}
		}, "-t", "-T", strconv.Itoa(seconds))
	}
	mapping := func(t *testing.T, r *report, want netip.AddrPort) {
		if !r.concludes(c.mapping) {
			t.Errorf("want the conclusion %q", c.mapping)
		}
		// Port preservation (RFC 4787, section 4.2.1): no other host has this port.
		if !slices.Equal(r.seen, []netip.AddrPort{want, want}) {
			t.Errorf("seen as %v, want twice %v", r.seen, want)
		}
	}
	discover("mapping", 0, mapping, "-m")
	discover("mapping of fragmented datagrams", 0, mapping, "-m", "-P")
	missed := 0
	if c.filter == filteringByAddressAndPort {
		missed = 2 // the answers from the other address and from the other port
	}
	discover("filtering", missed, func(t *testing.T, r *report, _ netip.AddrPort) {
		if !r.concludes(c.filter) {
			t.Errorf("want the conclusion %q", c.filter)
		}
	}, "-f")
	// The address under which b sees a host of a is valid only in b. In a there is no route to it.
	if missed = 2; c.hairpin {
		missed = 0
	}
	discover("hairpinning", missed, func(t *testing.T, r *report, _ netip.AddrPort) {
		if got := strings.Contains(r.text, "successful hairpinning"); got != c.hairpin || len(r.seen) != 1 {
			t.Errorf("%v, want %v", got, c.hairpin)
		}
	}, "-H")
	lifetime("lifetime", 3, true)
	if *long && c.filter == filteringByAddressAndPort {
		lifetime("lifetime just below 300 s", 290, true)
		lifetime("lifetime just above 300 s", 310, false)
	}
	return checks
}
