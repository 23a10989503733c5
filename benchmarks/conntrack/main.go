// Command conntrack measures the flow table of the engine beside the kernel's conntrack on this
// machine: what a new flow costs, what a packet of a known flow costs, and how many octets a flow
// takes.
//
//	go run ./benchmarks/conntrack -flows 200000 -rounds 7
//
// Both get the same UDP packets, one at a time, on one thread, behind one NAPT address: 50 hosts
// with 1,000 ports each, which speak to as many destinations as it takes. The kernel gets them by
// write(2) on a TUN in a network namespace, forwards them through nftables and loses them in a
// second TUN that nobody reads; all of it happens inside the write. What a packet costs there
// without conntrack is subtracted, and for the engine what it takes to make and parse a packet.
//
// Rounds are interleaved; figures are medians with the smallest and the largest. It needs root and
// nft. More entries than net.netfilter.nf_conntrack_max would need that setting of the whole
// machine; nothing of it is changed here.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

func main() {
	log.SetFlags(0)
	flows := flag.Int("flows", 200_000, "flows, at most net.netfilter.nf_conntrack_max")
	rounds := flag.Int("rounds", 7, "rounds")
	flag.Parse()
	if os.Geteuid() != 0 {
		log.Fatal("needs root to make network namespaces")
	}
	// Everything runs on one thread and one CPU. The thread is never unlocked, because it will have
	// been in many namespaces.
	runtime.LockOSThread()
	var cpus unix.CPUSet
	cpus.Set(0)
	if err := unix.SchedSetaffinity(0, &cpus); err != nil {
		log.Fatal(os.NewSyscallError("sched_setaffinity", err))
	}
	runs := map[string][]figures{}
	for round := range *rounds {
		for _, s := range subjects {
			f, err := s.measure(*flows)
			if err != nil {
				log.Fatalf("%s: %v", s.name, err)
			}
			runs[s.name] = append(runs[s.name], f)
			log.Printf("round %d: %-24s %4.0f ns without, %4.0f ns new, %4.0f ns known, %3.0f octets", round+1, s.name, f.without, f.fresh, f.known, f.octets)
		}
	}
	fmt.Print(table(runs, *flows))
}

// figures are ns per packet, without a flow table, of new flows and of known ones, and octets per
// flow.
type figures struct{ without, fresh, known, octets float64 }

// A subject is one flow table.
type subject struct {
	name    string
	measure func(flows int) (figures, error)
}

var subjects = []subject{
	{"kernel, conntrack", kernel("table ip x { chain c { type filter hook forward priority filter; ct state new accept; }; }")},
	{"kernel, masquerade", kernel("table ip x { chain c { type nat hook postrouting priority srcnat; masquerade; }; }")},
	{"engine, NAPT", engine},
}

// table is Markdown.
func table(runs map[string][]figures, flows int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| %d UDP flows | new flow, ns | new flows per second, millions | known flow, ns | octets per flow |\n|---|---|---|---|---|\n", flows)
	for _, s := range subjects {
		spread := func(of func(figures) float64) string {
			var all []float64
			for _, f := range runs[s.name] {
				all = append(all, of(f))
			}
			return measure.Spread(all)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", s.name,
			spread(func(f figures) float64 { return f.fresh - f.without }),
			spread(func(f figures) float64 { return 1e3 / (f.fresh - f.without) }),
			spread(func(f figures) float64 { return f.known - f.without }),
			spread(func(f figures) float64 { return f.octets }))
	}
	return b.String()
}

// perPacket is the CPU time that handle takes for each of n packets, in ns, in an order that is not
// that of the ports.
func perPacket(n int, handle func(b []byte)) float64 {
	stride := n*5/8 | 1 // with n it has no common divisor, so that every packet comes once
	for gcd(stride, n) != 1 {
		stride += 2
	}
	var p packets
	start, i := threadTime(), 0
	for range n {
		handle(p.make(i))
		if i += stride; i >= n {
			i -= n
		}
	}
	return float64(threadTime()-start) / float64(n)
}

// threadTime is the CPU time of this thread: what others do on the machine meanwhile costs caches,
// but is not counted.
func threadTime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		log.Fatal(os.NewSyscallError("clock_gettime", err))
	}
	return t.Nano()
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

const (
	hosts     = 50
	ports     = 1000 // of each host
	firstPort = 2000
)

// packets makes the i-th packet in a buffer that the next one overwrites.
type packets struct{ b [46]byte }

func (p *packets) make(i int) []byte {
	inside, destination := i%(hosts*ports), i/(hosts*ports)
	host, port := inside%hosts, firstPort+inside/hosts
	p.b = [46]byte{
		0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0, // no UDP checksum: nobody has to compute one
		10, 1, 0, byte(1 + host), 10, 2, byte(destination >> 8), byte(1 + destination),
		// Each host has ports of its own, so that each keeps its own.
		byte((port + host*ports) >> 8), byte(port + host*ports), 0, 53, 0, 26,
	}
	var sum uint32
	for at := 0; at < 20; at += 2 {
		sum += uint32(p.b[at])<<8 | uint32(p.b[at+1])
	}
	sum = sum&0xffff + sum>>16
	sum = ^(sum&0xffff + sum>>16)
	p.b[10], p.b[11] = byte(sum>>8), byte(sum)
	return p.b[:]
}
