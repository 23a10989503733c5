package differential

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// A kernel is the reference: two gateways with nftables rules between two raw sockets.
type kernel struct {
	pods [2]*hosts.Raw // at the pods' ends of the lan links
	wire [2]*hosts.Raw // at each gateway's wan device, to receive packets from the other gateway
}

// patience is the maximum time to wait for a packet. Packets usually arrive within microseconds. On
// a busy machine, a kernel thread handles them, and that thread must wait for a processor.
const patience = 30 * time.Second

// hopsToWire and hopsToPod are the numbers by which the kernel has decremented a packet's TTL, in
// the tunnel and at the receiving pod.
const (
	hopsToWire = 1
	hopsToPod  = 2
)

// newKernel builds the namespaces. rules returns the nftables ruleset of one gateway.
func newKernel(t *testing.T, p plan, rules func(plan, side) string) *kernel {
	hosts.Need(t, "nft")
	k := &kernel{}
	var pods, gateways [2]*hosts.Host
	for _, s := range []side{A, B} {
		pods[s], gateways[s] = hosts.New(t, "pod"+s.String()), hosts.New(t, "gw"+s.String())
		hosts.Veth(gateways[s], "lan", pods[s], "eth0", 1500)
	}
	hosts.Veth(gateways[A], "wan", gateways[B], "wan", 1500)
	mac := func(h *hosts.Host, dev string) net.HardwareAddr { return h.Link(dev).Attrs().HardwareAddr }
	for _, s := range []side{A, B} {
		g := gateways[s]
		// The next hops do not exist, but permanent neighbour entries have their MAC addresses. So
		// there is no ARP, and no gateway needs an address of its own.
		lan, wan := netip.MustParseAddr("169.254.77.1"), netip.MustParseAddr("169.254.77.2")
		g.Route(netip.MustParsePrefix("0.0.0.0/0"), lan, "lan")
		g.Neighbour(lan, mac(pods[s], "eth0"), "lan")
		for _, remote := range []netip.Prefix{p.podsSeen[s.other()], p.extSeen[s.other()]} {
			g.Route(remote, wan, "wan")
		}
		g.Neighbour(wan, mac(gateways[s.other()], "wan"), "wan")
		g.Run(rules(p, s), "nft", "-f", "-")
		remember(g)
		k.pods[s] = pods[s].Raw("eth0", mac(g, "lan"))
		k.wire[s] = g.Raw("wan", nil)
	}
	return k
}

// remember raises the timeouts of conntrack, so that it forgets no flow while the test is
// delayed on a busy machine.
func remember(g *hosts.Host) {
	for _, timeout := range []string{
		"udp_timeout", "udp_timeout_stream", "icmp_timeout", "icmpv6_timeout", "generic_timeout", "tcp_timeout_close", "tcp_timeout_close_wait",
		"tcp_timeout_fin_wait", "tcp_timeout_last_ack", "tcp_timeout_max_retrans", "tcp_timeout_syn_recv", "tcp_timeout_syn_sent",
		"tcp_timeout_time_wait", "tcp_timeout_unacknowledged",
	} {
		g.Sysctl("netfilter/nf_conntrack_"+timeout, "3600")
	}
}

// statefulRules returns the rules of docs/liqo-v0.md, section 7.3: NETMAP and SNAT by conntrack.
func statefulRules(p plan, s side) string {
	r := s.other()
	var post, pre []string
	remote := fmt.Sprintf("{ %s, %s }", p.podsSeen[r], p.extSeen[r])
	if p.pods[s] != p.podsSeen[s] {
		post = append(post, fmt.Sprintf(`oifname "wan" ip daddr %s ip saddr %s snat ip prefix to ip saddr map { %[2]s : %[3]s }`, remote, p.pods[s], p.podsSeen[s]))
		pre = append(pre, fmt.Sprintf(`iifname "wan" ip saddr %s ip daddr %s dnat ip prefix to ip daddr map { %[2]s : %[3]s }`, p.podsSeen[r], p.podsSeen[s], p.pods[s]))
	}
	post = append(post, fmt.Sprintf(`oifname "wan" ip daddr %s ip saddr != %s snat to %s`, remote, p.pods[s], p.natIP(s)))
	pre = append(pre, fmt.Sprintf(`iifname "wan" ip saddr %s ip daddr %s dnat to %s`, p.podsSeen[r], p.mapped(s), p.endpoint(s)))
	return ruleset(
		chain{"nat hook postrouting priority srcnat", post},
		chain{"nat hook prerouting priority dstnat", pre},
		chain{"filter hook forward priority filter", []string{
			fmt.Sprintf(`iifname "wan" ip saddr %s ip daddr %s drop`, p.podsSeen[r], p.extSeen[s]),
		}})
}

// statelessRules returns rules that perform only the prefix maps, without conntrack and
// therefore without reassembly.
func statelessRules(p plan, s side) string {
	r := s.other()
	set := func(field string, from, to netip.Prefix) string {
		host := ^number(netip.PrefixFrom(address(0xffffffff), from.Bits()).Masked().Addr())
		return fmt.Sprintf("ip %[1]s %[2]s ip %[1]s set ip %[1]s & %[3]s | %[4]s", field, from, address(host), to.Addr())
	}
	if p.pods[s] == p.podsSeen[s] {
		return ruleset()
	}
	return ruleset(
		chain{"filter hook postrouting priority srcnat", []string{
			fmt.Sprintf(`oifname "wan" ip daddr %s %s`, p.podsSeen[r], set("saddr", p.pods[s], p.podsSeen[s])),
		}},
		chain{"filter hook prerouting priority raw", []string{
			fmt.Sprintf(`iifname "wan" ip saddr %s %s`, p.podsSeen[r], set("daddr", p.podsSeen[s], p.pods[s])),
		}})
}

type chain struct {
	hook  string
	rules []string
}

func ruleset(chains ...chain) string {
	var b strings.Builder
	b.WriteString("table ip oracle {\n")
	for i, c := range chains {
		fmt.Fprintf(&b, "  chain c%d {\n    type %s; policy accept;\n    %s\n  }\n", i, c.hook, strings.Join(c.rules, "\n    "))
	}
	b.WriteString("}\n")
	return b.String()
}

// send injects packets in order at the pod of one side. It returns the packets in the tunnel
// and those at the other pod, once both form whole datagrams. If no more packets arrive, it
// returns those that have arrived.
func (k *kernel) send(t *testing.T, from side, packets ...[]byte) (wire, out [][]byte) {
	t.Helper()
	return k.sendFor(t, patience, from, packets...)
}

// drops is send for packets that the kernel should drop. It returns the packets that arrived
// nevertheless.
func (k *kernel) drops(t *testing.T, from side, packets ...[]byte) (out [][]byte) {
	t.Helper()
	_, out = k.sendFor(t, 250*time.Millisecond, from, packets...)
	return out
}

func (k *kernel) sendFor(t *testing.T, wait time.Duration, from side, packets ...[]byte) (wire, out [][]byte) {
	t.Helper()
	to := from.other()
	k.wire[to].Drain(t)
	k.pods[to].Drain(t)
	for _, b := range packets {
		k.pods[from].Send(t, b)
	}
	wire, out = collect(t, k.wire[to], wait), collect(t, k.pods[to], wait)
	if more := receive(t, k.pods[to], 0); more != nil {
		t.Errorf("the kernel sent one packet more than there are: %x", more)
	}
	return wire, out
}

// injectRefused injects a packet that the kernel should drop, and then the packet after, which it
// should forward. Waiting for the second packet is faster than waiting for a timeout. injectRefused
// returns the packets that arrived before the second one.
func (k *kernel) injectRefused(t *testing.T, from side, b, after []byte) (through [][]byte) {
	t.Helper()
	to := k.pods[from.other()]
	to.Drain(t)
	k.pods[from].Send(t, b)
	k.pods[from].Send(t, after)
	for {
		got := to.Receive(t, patience)
		switch {
		case got == nil:
			t.Fatalf("the second packet was lost: % x", after)
		case bytes.Equal(got[4:6], after[4:6]):
			return through
		}
		through = append(through, got)
	}
}

// collect receives packets until they form whole datagrams.
func collect(t *testing.T, r *hosts.Raw, wait time.Duration) (packets [][]byte) {
	for {
		b := receive(t, r, wait)
		if b == nil {
			return packets
		}
		packets = append(packets, b)
		if _, whole := reassemble(packets); whole {
			return packets
		}
	}
}

// receive returns the next packet that is not multicast of the kernel itself.
func receive(t *testing.T, r *hosts.Raw, wait time.Duration) []byte {
	for {
		if b := r.Receive(t, wait); b == nil || !isV6(b) || !destination(b).IsMulticast() {
			return b
		}
	}
}
