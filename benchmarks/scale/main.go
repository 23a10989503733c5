// Command scale says how many peers find networks, when all clusters have the same PodCIDR, and what
// the books of so many cost.
//
//	go run ./benchmarks/scale
//	go run ./benchmarks/scale -pools 10.0.0.0/8,11.0.0.0/8 -lengths 16
//
// It asks the IPAM of the manager until it refuses, first with an ExternalCIDR as long as the PodCIDR,
// which is Liqo's choice, then with the one that the IPAM chooses by itself. It needs no root.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/manager/ipam"
)

func main() {
	log.SetFlags(0)
	lengths := flag.String("lengths", "14,16,18,20", "lengths of the PodCIDR")
	pools := flag.String("pools", "", "pools (default: those of the manager)")
	flag.Parse()
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
	fmt.Println("| PodCIDR | ExternalCIDR | peers | refused because | ms for the last 100 | octets of the books |")
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

// fill asks for one peer after the other, all like ourselves, and prints a line.
func fill(pod netip.Prefix, pools []netip.Prefix, asLong bool) error {
	c := ipam.Config{PodCIDR: pod, ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"), Pools: pools}
	if asLong {
		free := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 128, 0, 0}), pod.Bits())
		c.ExternalCIDR = free
	}
	b, conflicts := ipam.Book{}.Configure(c)
	if len(conflicts) > 0 {
		return fmt.Errorf("%v: %v", pod, conflicts)
	}
	external := b.Own().ExternalCIDR
	var last [100]time.Time
	for n := 0; ; n++ {
		last[n%len(last)] = time.Now()
		id := fmt.Sprintf("%08x-0000-4000-8000-000000000000", n)
		next, got, err := b.Grant(ipam.Request{ID: id, Pod: pod, External: external})
		if err != nil {
			text, wrong := json.Marshal(b.Spec())
			if wrong != nil {
				return wrong
			}
			why, _, _ := strings.Cut(err.Error(), ",")
			if strings.Contains(err.Error(), "is free in the pools") {
				why = "the pools are used up"
			}
			since := last[(n+1)%len(last)] // the oldest
			if n < len(last) {
				since = last[0]
			}
			fmt.Printf("| %v | %v | %d | %s | %.0f | %d |\n", pod, external, n, why, float64(time.Since(since).Microseconds())/1000, len(text))
			return nil
		}
		b = next.Answered(id, got.Pod, got.External)
	}
}
