// Command scale prints how many peers can get networks when all clusters have the same PodCIDR,
// and the cost of an IPAM state of that size.
//
//	go run ./benchmarks/scale
//	go run ./benchmarks/scale -pools 10.0.0.0/8,11.0.0.0/8 -lengths 16
//
// It allocates networks from the manager's IPAM until the IPAM refuses. It does so twice: with an
// ExternalCIDR of the PodCIDR's length, as Liqo chooses it, and with the ExternalCIDR that the IPAM
// chooses. With
//
//	go run ./benchmarks/scale -growth
//
// it prints the cost of one more allocation among many peers with the same PodCIDR. The table has
// the cost of the decision, and that of comparing and encoding the states. It needs no root.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

func main() {
	log.SetFlags(0)
	lengths := flag.String("lengths", "14,16,18,20", "lengths of the PodCIDR")
	pools := flag.String("pools", "", "pools (default: those of the manager)")
	growth := flag.Bool("growth", false, "measure allocations among 10 to 4,000 peers instead, and ignore -lengths and -pools")
	flag.Parse()
	if *growth {
		if err := grow(); err != nil {
			log.Fatal(err)
		}
		return
	}
	var all []netip.Prefix
	if *pools != "" {
		for text := range strings.SplitSeq(*pools, ",") {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				log.Fatal(err)
			}
			all = append(all, p)
		}
	}
	fmt.Println("| PodCIDR | ExternalCIDR | peers | refused because | ms of CPU for the last 100 | octets of the IPAM state |")
	fmt.Println("|---|---|---|---|---|---|")
	for text := range strings.SplitSeq(*lengths, ",") {
		bits, err := strconv.Atoi(text)
		if err != nil {
			log.Fatal(err)
		}
		pod, err := netip.MustParseAddr("10.244.0.0").Prefix(bits)
		if err != nil {
			log.Fatal(err)
		}
		for _, asLong := range []bool{true, false} {
			if err := fill(pod, all, asLong); err != nil {
				log.Fatal(err)
			}
		}
	}
}

// fill allocates networks for one peer after the other, and prints a line of results. All peers
// have this cluster's own PodCIDR.
func fill(pod netip.Prefix, pools []netip.Prefix, asLong bool) error {
	c := ipam.Config{PodCIDR: pod, ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"), Pools: pools}
	if asLong {
		free := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 128, 0, 0}), pod.Bits())
		c.ExternalCIDR = free
	}
	b, conflicts := ipam.State{}.Configure(c)
	if len(conflicts) > 0 {
		return fmt.Errorf("%v: %v", pod, conflicts)
	}
	external := b.Own().ExternalCIDR
	var last [100]time.Duration
	for n := 0; ; n++ {
		last[n%len(last)] = cpu()
		id := fmt.Sprintf("%08x-0000-4000-8000-000000000000", n)
		next, got, err := b.Allocate(ipam.Request{ID: id, Pod: pod, External: external})
		if err != nil {
			text, wrong := json.Marshal(b.Spec())
			if wrong != nil {
				return wrong
			}
			why, _, _ := strings.Cut(err.Error(), ",")
			if strings.Contains(err.Error(), "is free in the pools") {
				why = "the pools are used up"
			}
			since := last[(n+1)%len(last)] // CPU time at the oldest allocation in last
			if n < len(last) {
				since = last[0]
			}
			fmt.Printf("| %v | %v | %d | %s | %.0f | %d |\n", pod, external, n, why, (cpu()-since).Seconds()*1000, len(text))
			return nil
		}
		b = next.Answered(id, got.Pod, got.External)
	}
}

// growthCases lists the measured numbers of peers. Each has the PodCIDR of all clusters, and pools
// with room for that many peers. The PodCIDR is a /16 if the IPv4 address space has room for a /16
// for each peer.
var growthCases = []struct {
	peers int
	pod   string
	pools []string
}{
	{10, "10.244.0.0/16", nil},
	{100, "10.244.0.0/16", nil},
	{300, "10.244.0.0/16", nil},
	{1000, "10.244.0.0/16", []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "11.0.0.0/8", "21.0.0.0/8", "22.0.0.0/8", "26.0.0.0/8"}},
	{4000, "10.244.0.0/20", []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "11.0.0.0/8"}},
}

// extraPeers is the number of additional peers whose allocations are measured, one after the other.
const extraPeers = 5

// grow prints the cost of an allocation as the IPAM state grows.
func grow() error {
	rows := [][]string{{""}, {"PodCIDR of all"}, {"an allocation is decided: CPU, ms"}, {"the changed objects are found: CPU, ms"}, {"the IPAM state is written: CPU, ms"}, {"the IPAM state is read: CPU, ms"}, {"octets of the IPAM state"}}
	for _, g := range growthCases {
		pod := netip.MustParsePrefix(g.pod)
		var pools []netip.Prefix
		for _, text := range g.pools {
			pools = append(pools, netip.MustParsePrefix(text))
		}
		b, conflicts := ipam.State{}.Configure(ipam.Config{PodCIDR: pod, ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"), Pools: pools})
		if len(conflicts) > 0 {
			return fmt.Errorf("%v: %v", pod, conflicts)
		}
		external := b.Own().ExternalCIDR
		allocate := func(n int) (err error) {
			id := fmt.Sprintf("%08x-0000-4000-8000-000000000000", n)
			next, got, err := b.Allocate(ipam.Request{ID: id, Pod: pod, External: external})
			if err == nil {
				b = next.Answered(id, got.Pod, got.External)
			}
			return err
		}
		for n := range g.peers - extraPeers {
			if err := allocate(n); err != nil {
				return fmt.Errorf("%d peers: %w", n, err)
			}
		}
		was, begin := b, cpu()
		for n := range extraPeers {
			if err := allocate(g.peers - extraPeers + n); err != nil {
				return fmt.Errorf("%d peers: %w", g.peers, err)
			}
		}
		decided := cpu()
		for range extraPeers {
			ipam.Delta(was, b)
		}
		compared := cpu()
		spec := b.Spec()
		text, err := json.Marshal(spec)
		if err != nil {
			return err
		}
		written := cpu()
		if _, err := ipam.Read(&spec); err != nil {
			return err
		}
		read := cpu()
		ms := func(d time.Duration, n int) string {
			return strconv.FormatFloat(d.Seconds()*1000/float64(n), 'f', 2, 64)
		}
		for i, cell := range []string{fmt.Sprintf("%d peers", g.peers), "/" + strconv.Itoa(pod.Bits()), ms(decided-begin, extraPeers), ms(compared-decided, extraPeers), ms(written-compared, 1), ms(read-written, 1), strconv.Itoa(len(text))} {
			rows[i] = append(rows[i], cell)
		}
	}
	fmt.Printf("%s.\n\n", measure.Where())
	for i, row := range rows {
		fmt.Println("| " + strings.Join(row, " | ") + " |")
		if i == 0 {
			fmt.Println("|" + strings.Repeat("---|", len(row)))
		}
	}
	return nil
}

// cpu returns the CPU time of this process so far.
func cpu() time.Duration { return measure.CPU(os.Getpid()) }
