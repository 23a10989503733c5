package rtnl

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/internal/cputime"
	. "github.com/isthmus-net/isthmus/internal/kernel" //nolint:revive // nearly every line uses the package
)

// BenchmarkAllocate measures how long the kernel takes to apply one additional network of a peer:
// in routes, and in the sets of both tables. The number of existing networks varies. CPU time is
// the relevant result.
func BenchmarkAllocate(b *testing.B) {
	for _, peers := range []int{10, 1000, 4096} {
		b.Run(fmt.Sprint(peers), func(b *testing.B) {
			f, err := NewNamespace()
			if err != nil {
				b.Skip(err)
			}
			defer f.Close()
			var k *Kernel
			if err := Do(f, func() (err error) { k, err = Open(RouteAgent, slog.New(slog.DiscardHandler)); return err }); err != nil {
				b.Skip(err)
			}
			defer k.Close()
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel() // before Close
			if err := k.Events(ctx, func() {}); err != nil {
				b.Fatal(err)
			}
			state := func(n int) (s State) {
				var remote []netip.Prefix
				for i := range n {
					remote = append(remote, netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 0}), 24),
						netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(64 + i>>8), byte(i), 0}), 24))
				}
				for _, p := range remote {
					s.Routes = append(s.Routes, Route{Prefix: p, Type: Unreachable, Table: RefuseTable, Metric: UnreachableMetric, Protocol: NodeProtocol})
				}
				s.Filters = []Filter{FilterFor(FilterSets{Remote: remote})}
				s.SourceNAT = []SourceNAT{SourceNATFor(SourceNATSets{Remote: remote, Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}})}
				return s
			}
			states := [2]State{state(peers), state(peers + 1)}
			apply := func(i int) {
				if _, err := k.Apply(states[i%2]); err != nil {
					b.Fatal(err)
				}
			}
			apply(0)
			apply(1)
			n, before := 0, cputime.Used(b)
			for b.Loop() {
				apply(n)
				n++
			}
			b.ReportMetric((cputime.Used(b)-before).Seconds()*1000/float64(b.N), "cpu-ms/op")
		})
	}
}
