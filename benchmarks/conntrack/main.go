// Command conntrack compares the engine's flow table with the kernel's conntrack on this machine:
// the cost of a new flow, the cost of a packet of a known flow, and the octets per flow.
//
//	go run ./benchmarks/conntrack -flows 200000 -rounds 7
//
// Engine and kernel process the same UDP packets, one at a time on one thread, behind one NAPT
// address. The packets come from 50 hosts with 1,000 ports each, to as many destinations as the
// flows require. For the kernel, the program writes packets to a TUN in a network namespace. The
// kernel forwards them through nftables to a second TUN that nobody reads, all within the write
// call. The program subtracts the costs outside of the flow table: in the kernel, forwarding a
// packet without conntrack; in the engine, building and parsing a packet.
//
// Rounds are interleaved; figures are medians with minimum and maximum. The command needs root
// and nft. It does not change net.netfilter.nf_conntrack_max, which is a setting of the whole
// machine, so the number of flows must stay below it.
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
	// Everything runs on one thread and one CPU. The thread is never unlocked, because it has
	// entered other namespaces and must not be reused.
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

// figures are ns per packet without a flow table, of new flows and of known flows, and octets per
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

// table formats the results as Markdown.
func table(runs map[string][]figures, flows int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| %d UDP flows | new flow, ns | new flows per second, millions | known flow, ns | octets per flow |\n|---|---|---|---|---|\n", flows)
	for _, s := range subjects {
		spread := func(value func(figures) float64) string {
			var all []float64
			for _, f := range runs[s.name] {
				all = append(all, value(f))
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

// perPacket returns the CPU time of handle per packet, in ns. It sends n packets, one per flow, but
// not in the order of their ports.
func perPacket(n int, handle func(b []byte)) float64 {
	stride := n*5/8 | 1 // coprime with n, so that every packet occurs once
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

// threadTime returns the CPU time of this thread. Other load on the machine affects it only
// through the CPU caches.
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
	ports     = 1000 // per host
	firstPort = 2000
)

// packets builds the i-th packet in a buffer that the next call overwrites.
type packets struct{ b [46]byte }

func (p *packets) make(i int) []byte {
	inside, destination := i%(hosts*ports), i/(hosts*ports)
	host, port := inside%hosts, firstPort+inside/hosts
	p.b = [46]byte{
		0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0, // no UDP checksum, so that none is computed
		10, 1, 0, byte(1 + host), 10, 2, byte(destination >> 8), byte(1 + destination),
		// The ports of different hosts do not overlap, so that NAPT keeps them all.
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
