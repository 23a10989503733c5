package packet_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

const benchData = 1368 // data of a TCP segment with timestamps in a tunnel of MTU 1420

var timestamps = []byte{1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2}

func benchTCP(v6 bool, flow int, seq uint32, id uint16, flags uint8, data int) []byte {
	return packettest.Build(header(v6, flow, id), packettest.TCP{
		SrcPort: 40000, DstPort: 5201, Seq: seq, Ack: 77, Flags: flags, Window: 501, Options: timestamps, Data: randomBytes(data, uint64(seq)),
	})
}

func header(v6 bool, flow int, id uint16) packettest.IP {
	if v6 {
		return packettest.IP{Src: addr(fmt.Sprintf("fd00:1::%x", flow+1)), Dst: addr("fd00:2::1")}
	}
	return packettest.IP{Src: addr(fmt.Sprintf("10.1.%d.%d", flow/200, flow%200+1)), Dst: addr("10.2.0.1"), ID: id, DF: true}
}

func randomBytes(n int, seed uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func BenchmarkChecksum(b *testing.B) {
	for _, n := range []int{20, 64, 1420, 65515} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			data := randomBytes(n, 1)
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for b.Loop() {
				packet.Checksum(data, 0)
			}
		})
	}
}

func BenchmarkParse(b *testing.B) {
	src, dst := addr("10.1.0.1"), addr("10.2.0.1")
	cases := []struct {
		name string
		b    []byte
	}{
		{"TCP4", benchTCP(false, 0, 1, 1, packettest.ACK, benchData)},
		{"TCP6", benchTCP(true, 0, 1, 1, packettest.ACK, benchData)},
		{"UDP4", packettest.Build(packettest.IP{Src: src, Dst: dst}, packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 64)})},
		{"ICMP4", packettest.Build(packettest.IP{Src: src, Dst: dst}, packettest.Echo{ID: 1})},
		{"Fragment4", packettest.Fragments(packettest.Build(packettest.IP{Src: src, Dst: dst}, packettest.UDP{Data: make([]byte, 64)}), 32, 1)[1]},
		{"Extensions6", packettest.Build(packettest.IP{Src: addr("fd00::1"), Dst: addr("fd00::2"), Extensions: []packettest.Extension{{Kind: 0}, {Kind: 60}}},
			packettest.UDP{SrcPort: 1, DstPort: 2})},
	}
	for _, c := range cases {
		b.Run(c.name, func(b *testing.B) {
			var v packet.View
			b.ReportAllocs()
			for b.Loop() {
				if err := v.Parse(c.b, packet.ChecksumComplete); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRemap measures a 1:1 prefix map of the source on a parsed view, which is the whole
// rewriting of a pod's packet.
func BenchmarkRemap(b *testing.B) {
	for _, state := range []packet.ChecksumState{packet.ChecksumComplete, packet.ChecksumPartial} {
		b.Run(fmt.Sprintf("TCP4/state%d", state), func(b *testing.B) {
			p := benchTCP(false, 0, 1, 1, packettest.ACK, benchData)
			var v packet.View
			if err := v.Parse(p, state); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			net := uint32(10<<24 | 3<<16)
			for b.Loop() {
				v.SetSrc4(net | v.Src4()&0xffff)
				net ^= 1 << 18
			}
		})
		b.Run(fmt.Sprintf("ParseTCP4/state%d", state), func(b *testing.B) {
			p := benchTCP(false, 0, 1, 1, packettest.ACK, benchData)
			var v packet.View
			b.ReportAllocs()
			net := uint32(10<<24 | 3<<16)
			for b.Loop() {
				if err := v.Parse(p, state); err != nil {
					b.Fatal(err)
				}
				v.SetSrc4(net | v.Src4()&0xffff)
				net ^= 1 << 18
			}
		})
		b.Run(fmt.Sprintf("TCP6/state%d", state), func(b *testing.B) {
			p := benchTCP(true, 0, 1, 1, packettest.ACK, benchData)
			var v packet.View
			if err := v.Parse(p, state); err != nil {
				b.Fatal(err)
			}
			x, y := addr("fd01::1"), addr("fd02::2")
			b.ReportAllocs()
			for b.Loop() {
				v.SetSrc(x)
				x, y = y, x
			}
		})
	}
}

// BenchmarkNAPT measures rewriting the source address and source port.
func BenchmarkNAPT(b *testing.B) {
	p := benchTCP(false, 0, 1, 1, packettest.ACK, benchData)
	var v packet.View
	if err := v.Parse(p, packet.ChecksumComplete); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	a := uint32(0x0a030000)
	for b.Loop() {
		v.SetSrc4(a)
		v.SetSrcPort(uint16(a))
		a++
	}
}

func BenchmarkQuote(b *testing.B) {
	inner := packettest.Build(packettest.IP{Src: addr("10.1.0.1"), Dst: addr("10.2.0.1")}, packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 520)})
	p := packettest.Build(packettest.IP{Src: addr("10.9.0.1"), Dst: addr("10.1.0.1")}, packettest.ICMPError{Type: 3, Code: 4, Quote: inner})
	var v packet.View
	if err := v.Parse(p, packet.ChecksumComplete); err != nil {
		b.Fatal(err)
	}
	x, y := addr("10.1.0.1"), addr("10.3.0.1")
	b.ReportAllocs()
	for b.Loop() {
		var q packet.Quote
		if err := v.Quote(&q); err != nil {
			b.Fatal(err)
		}
		q.SetSrc(y)
		v.SetDst(y)
		x, y = y, x
	}
}

func BenchmarkSegment(b *testing.B) {
	for _, v6 := range []bool{false, true} {
		b.Run(fmt.Sprintf("v6=%t", v6), func(b *testing.B) {
			const segments = 46
			super := packettest.Partial(benchTCP(v6, 0, 1, 1, packettest.ACK|packettest.PSH, benchData*segments))
			var v packet.View
			if err := v.Parse(super, packet.ChecksumPartial); err != nil {
				b.Fatal(err)
			}
			var s packet.Segmenter
			b.SetBytes(int64(len(super)))
			b.ReportAllocs()
			for b.Loop() {
				if err := s.Reset(&v, benchData); err != nil {
					b.Fatal(err)
				}
				for s.Remaining() > 0 {
					s.Next()
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*segments), "ns/segment")
		})
	}
}

// BenchmarkCoalesce measures a batch of 128 packets for several orders of arrival. In one case
// the packets have no data and cannot be joined.
func BenchmarkCoalesce(b *testing.B) {
	const batch = 128
	for _, c := range []struct {
		name  string
		v6    bool
		flows int
		burst int // consecutive packets of one flow
		data  int
	}{
		{"OneFlow", false, 1, batch, benchData},
		{"OneFlow6", true, 1, batch, benchData},
		{"EightFlowsMixed", false, 8, 1, benchData},
		{"EightFlowsInRuns", false, 8, 16, benchData},
		{"EveryPacketItsOwnFlow", false, batch, 1, benchData},
		{"PureAcks", false, 8, 1, 0},
	} {
		b.Run(c.name, func(b *testing.B) {
			packets := make([][]byte, 0, batch)
			sent := make([]int, c.flows)
			for i := range batch {
				flow := i / c.burst % c.flows
				packets = append(packets, benchTCP(c.v6, flow, uint32(1+sent[flow]*c.data), uint16(sent[flow]), packettest.ACK, c.data))
				sent[flow]++
			}
			heads := make([][]byte, batch) // coalescing changes the headers of first packets, so they are restored before each iteration
			for i, p := range packets {
				heads[i] = append([]byte(nil), p[:min(len(p), 72)]...)
			}
			var co packet.Coalescer
			runs := 0
			b.SetBytes(int64(batch * len(packets[0])))
			b.ReportAllocs()
			for b.Loop() {
				for i, p := range packets {
					copy(p, heads[i])
				}
				co.Reset()
				for _, p := range packets {
					if err := co.Add(p); err != nil {
						b.Fatal(err)
					}
				}
				runs = len(co.Runs())
			}
			b.ReportMetric(float64(runs), "runs")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*batch), "ns/segment")
		})
	}
}
