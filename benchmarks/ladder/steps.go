package main

import (
	"regexp"
	"strings"
)

// A source says where a step's figure is in the benchmark output, and how to convert it to the cost
// of one packet. Benchmarks count per superpacket, per segment, per datagram or per bit.
type source struct {
	pkg    string  // the package's folder in the module
	bench  string  // name as `go test` prints it, without "Benchmark"
	unit   string  // of the figure: nanoseconds, or CPU seconds per gigabit
	share  float64 // one packet's share of the figure
	allocs float64 // one packet's share of allocs/op
}

// absent reports whether no benchmark measures the step with this kind of packet.
func (s source) absent() bool { return s.bench == "" }

// A step is a row of the table.
type step struct {
	name, what string
	aside      bool   // for comparison only: the data path does not do this step, because it handles packets in batches
	super      source // one of the 45 segments of a TCP superpacket: 1,420 octets, of which 1,368 or 1,380 are payload
	single     source // a packet of 64 octets that is not part of a superpacket
}

const segments = 45 // per superpacket in these benchmarks

// perSuper returns the source of a cost that occurs once per superpacket of any length.
func perSuper(pkg, bench string) source {
	return source{pkg, bench, "ns/op", 1. / segments, 1. / segments}
}

// perPacket returns the source of a figure that is already per packet. n is the number of packets
// in one operation of the benchmark.
func perPacket(pkg, bench, unit string, n float64) source { return source{pkg, bench, unit, 1, 1 / n} }

// steps are the rows of the ladder. A step's figure includes other steps only if its text mentions
// them. A packet needs either the remap step or the NAPT step.
var steps = []step{
	{name: "parse", what: "prove all lengths, find the ports",
		super: perSuper("packet", "Parse/TCP4"), single: perPacket("packet", "Parse/UDP4", "ns/op", 1)},
	{name: "remap", what: "rules, filter, 1:1 rewrite, counters",
		super: perSuper("natengine", "PrefixMap/outbound/tcp/peers=1"), single: perPacket("natengine", "PrefixMap/outbound/udp/peers=1", "ns/op", 1)},
	{name: "NAPT", what: "or: find the flow among 1,000, rewrite",
		super: perSuper("natengine", "NAPTHit/batch=128/flows=1000"), single: perPacket("natengine", "NAPTHit/batch=128/flows=1000", "ns/op", 1)},
	{name: "segment", what: "cut a superpacket: headers, copy, checksum",
		super: perPacket("packet", "Segment/v6=false", "ns/segment", 46)},
	{name: "coalesce", what: "verify, find runs; single: find none",
		super: perPacket("packet", "Coalesce/OneFlow", "ns/segment", 128), single: perPacket("packet", "Coalesce/PureAcks", "ns/segment", 128)},
	{name: "way out", what: "parse, remap, segment, as the gateway does",
		super: perPacket("gateway/datapath", "DeviceRead/superpacket", "cpu-ns/packet", segments), single: perPacket("gateway/datapath", "DeviceRead/small", "cpu-ns/packet", 64)},
	{name: "way in", what: "coalesce, parse, remap, as the gateway does",
		super: perPacket("gateway/datapath", "DeviceWrite/run", "cpu-ns/packet", segments), single: perPacket("gateway/datapath", "DeviceWrite/small", "cpu-ns/packet", 128)},
	{name: "seal", what: "ChaCha20-Poly1305",
		super: perPacket("gateway/datapath", "Cipher/seal/1420", "ns/op", 1), single: perPacket("gateway/datapath", "Cipher/seal/64", "ns/op", 1)},
	{name: "open", what: "ChaCha20-Poly1305",
		super: perPacket("gateway/datapath", "Cipher/open/1420", "ns/op", 1), single: perPacket("gateway/datapath", "Cipher/open/64", "ns/op", 1)},
	{name: "loopback UDP", what: "send and receive, batches of 45",
		super: perPacket("gateway/bind", "Loopback/size=1452/batch=45", "ns/op", 1), single: perPacket("gateway/bind", "Loopback/size=96/batch=45", "ns/op", 1)},
	{name: "wireguard-go's sockets", what: "the same without gateway/bind", aside: true,
		super: perPacket("benchmarks/ladder", "UpstreamLoopback/size=1452/batch=45", "ns/op", 1), single: perPacket("benchmarks/ladder", "UpstreamLoopback/size=96/batch=45", "ns/op", 1)},
	{name: "loopback UDP, alone", what: "one at a time", aside: true,
		super: perPacket("gateway/bind", "Loopback/size=1452/batch=1", "ns/op", 1), single: perPacket("gateway/bind", "Loopback/size=96/batch=1", "ns/op", 1)},
	{name: "in memory, alone", what: "two gateways, one packet at a time", aside: true,
		single: perPacket("gateway/datapath", "Gateways/small-alone", "cpu-ns/packet", 1)},
	{name: "in memory", what: "two gateways without a kernel: keys, nonces, windows and timers too",
		super:  perPacket("gateway/datapath", "Gateways/superpacket", "cpu-ns/packet", segments),
		single: perPacket("gateway/datapath", "Gateways/small", "cpu-ns/packet", 1)},
	{name: "real TUN", what: "two gateways on real TUNs, TCP of both kernels included, sockets not",
		super: source{"gateway/tun", "KernelsThroughTwoGateways", "cpu-s/Gbit", 1380 * 8, 1380. / (1 << 20)}},
}

// packages returns the package folders of all steps, in their order.
func packages() (all []string) {
	seen := map[string]bool{}
	for _, s := range steps {
		for _, from := range []source{s.super, s.single} {
			if !from.absent() && !seen[from.pkg] {
				seen[from.pkg] = true
				all = append(all, from.pkg)
			}
		}
	}
	return all
}

// pattern returns the value of -test.bench that selects exactly those benchmarks of a package that
// the steps need.
func pattern(pkg string) string {
	var all []string
	seen := map[string]bool{}
	for _, s := range steps {
		for _, from := range []source{s.super, s.single} {
			if from.absent() || from.pkg != pkg || seen[from.bench] {
				continue
			}
			seen[from.bench] = true
			parts := strings.Split("Benchmark"+from.bench, "/")
			for i, p := range parts {
				parts[i] = "^" + regexp.QuoteMeta(p) + "$"
			}
			all = append(all, strings.Join(parts, "/"))
		}
	}
	return strings.Join(all, "|")
}
