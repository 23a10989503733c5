package routeagent

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/cputime"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// BenchmarkChange measures the CPU time that the process and the kernel need for a change of the
// intent. Run it in its own network namespace:
//
//	unshare -n go test ./routeagent -run '^$' -bench Change -benchtime 30x
func BenchmarkChange(b *testing.B) {
	if links, err := net.Interfaces(); err != nil || len(links) != 1 {
		b.Skip("needs a network namespace with nothing in it (unshare -n)")
	}
	for _, command := range []string{"ip link set lo up", "ip link add eth0 type bridge", "ip addr add 172.30.0.1/16 dev eth0", "ip link set eth0 up", "ip route add default dev eth0",
		"sysctl -qw net.ipv4.ip_forward=1"} {
		words := strings.Fields(command)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			b.Skipf("%s: %s", command, out)
		}
	}
	for _, peers := range []int{10, 1000} {
		log := slog.New(slog.DiscardHandler)
		k, err := rtnl.Open(kernel.RouteAgent, log)
		if err != nil {
			b.Skip(err)
		}
		a := newAgent(Options{Node: "n0", StateDirectory: b.TempDir(), Log: log})
		l := a.newLoop(k)
		ctx, cancel := context.WithCancel(b.Context())
		if err := k.Events(ctx, a.handleEvent); err != nil {
			b.Fatal(err)
		}
		in := fabric.NodeIntent{Nodes: []fabric.ClusterNode{{Name: "n0", Addrs: []netip.Addr{netip.MustParseAddr("172.30.0.1")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/24")}}},
			OnlyPods: true, Trusted: true, Allocations: fabric.Allocations{OwnPods: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/11")}}}
		for i := range byte(2) {
			in.Gateways = append(in.Gateways, fabric.GatewayPod{Addr: netip.AddrFrom4([4]byte{10, 128, i + 1, 252}), Host: netip.AddrFrom4([4]byte{172, 30, 0, 2 + i})})
		}
		in.Gateway = in.Gateways[0].Addr
		var few []netip.Prefix
		for _, first := range []byte{11, 100} {
			for i := range peers {
				few = append(few, netip.PrefixFrom(netip.AddrFrom4([4]byte{first, byte(64 + i>>4), byte(i & 15 << 4), 0}), 20))
			}
		}
		more := []netip.Prefix{netip.MustParsePrefix("11.127.240.0/20"), netip.MustParsePrefix("100.127.240.0/20")}
		compare := func(change func()) {
			change()
			a.deliver(in, nil)
			if !a.compare(l) {
				b.Fatal(l.last.err)
			}
		}
		nothing := func() {}
		grant := func() { allocate(&in, slices.Concat(few, more)...) }
		release := func() { allocate(&in, few...) }
		move := func() {
			in.Gateway = in.Gateways[slices.IndexFunc(in.Gateways, func(g fabric.GatewayPod) bool { return g.Addr != in.Gateway })].Addr
		}
		compare(release)
		for _, c := range []struct {
			what           string
			before, change []func()
		}{{"granted", []func(){release}, []func(){grant}}, {"goes", []func(){grant}, []func(){release}}, {"moves", nil, []func(){move}}, {"nothing", nil, []func(){nothing}}} {
			b.Run(fmt.Sprintf("%s/%d", c.what, peers), func(b *testing.B) {
				var spent time.Duration
				for b.Loop() {
					for _, f := range c.before {
						compare(f)
					}
					began := cputime.Used(b)
					for _, f := range c.change {
						compare(f)
					}
					time.Sleep(5 * time.Millisecond) // time for the events of the previous change
					spent += cputime.Used(b) - began
				}
				b.ReportMetric(spent.Seconds()*1000/float64(b.N), "cpu-ms/op")
			})
		}
		cancel()
		if _, err := k.Apply(kernel.State{}); err != nil {
			b.Fatal(err)
		}
		k.Close()
	}
}
