package datapath_test

import (
	"sync/atomic"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/internal/cputime"
)

// outShapes returns links by the name of an outbound traffic pattern. A link repeats its packets,
// and pauses (ErrAgain) after a fixed number of them.
func outShapes() map[string]*scriptLink {
	shapes := map[string]*scriptLink{}
	add := func(name string, burst int, packets ...[]byte) {
		l := newScript(packets...)
		l.repeat, l.burst = true, burst
		shapes[name] = l
	}
	add("superpacket", 1, super4(at(podA, 4000), at(podB, 80), 1000, 1380, random(45*1380)))
	add("small", 128, plain(udp4(at(podA, 4000), at(podB, 80), random(36))))
	add("small-napt", 128, plain(udp4(at(nodeA, 4000), at(podB, 80), random(36))))
	add("small-alone", 1, plain(udp4(at(podA, 4000), at(podB, 80), random(36))))
	add("large", 128, plain(udp4(at(podA, 4000), at(podB, 80), random(1380))))
	return shapes
}

// inBatch is a decrypted batch that can be passed to Write again and again.
type inBatch struct {
	bufs, headers [][]byte // headers is a copy of the octets that Write changes
	octets        int
}

func newInBatch(packets ...[]byte) *inBatch {
	b := &inBatch{bufs: behindOffset(packets...)}
	for _, p := range packets {
		b.headers = append(b.headers, append([]byte(nil), p[:min(len(p), 40)]...))
		b.octets += len(p)
	}
	return b
}

func (b *inBatch) restore() {
	for i, h := range b.headers {
		copy(b.bufs[i][offset:], h)
	}
}

// inShapes returns inbound batches by name.
func inShapes() map[string]*inBatch {
	run, _ := segments(45, 1380)
	var interleaved, small [][]byte
	for i := range 64 {
		for flow := range 2 {
			interleaved = append(interleaved, tcp4(at(podB, 80), at(podASee, uint16(4000+flow)), uint32(i*1380), header.TCPFlagAck, random(1380)))
		}
	}
	for i := range 128 {
		small = append(small, udp4(at(podB, uint16(i%8)), at(podASee, 4000), random(36)))
	}
	return map[string]*inBatch{
		"run":         newInBatch(run...),
		"interleaved": newInBatch(interleaved...),
		"small":       newInBatch(small...),
		"small-alone": newInBatch(small[0]),
	}
}

func TestReadDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool allocate")
	}
	for name, link := range outShapes() {
		t.Run(name, func(t *testing.T) {
			d := newDevice(t, link, newEngine(t), datapath.Options{})
			b := newBuffers(128, 2048)
			packets := 0
			if n := testing.AllocsPerRun(1000, func() { packets += read(t, d, b) }); n != 0 {
				t.Errorf("%v allocations per Read: want 0", n)
			}
			if packets < 1000 {
				t.Errorf("%d packets", packets)
			}
		})
	}
}

func TestWriteDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool allocate")
	}
	for name, batch := range inShapes() {
		t.Run(name, func(t *testing.T) {
			link := newScript()
			link.discard = true
			d := newDevice(t, link, newEngine(t), datapath.Options{})
			if n := testing.AllocsPerRun(1000, func() {
				batch.restore()
				if _, err := d.Write(batch.bufs, offset); err != nil {
					t.Fatal(err)
				}
			}); n != 0 {
				t.Errorf("%v allocations per Write: want 0", n)
			}
		})
	}
}

func BenchmarkDeviceRead(b *testing.B) {
	for name, link := range outShapes() {
		b.Run(name, func(b *testing.B) {
			d := newDevice(b, link, newEngine(b), datapath.Options{})
			bufs := newBuffers(128, 65535)
			packets, octets := 0, 0
			b.ReportAllocs()
			before := cputime.Used(b)
			for b.Loop() {
				n := read(b, d, bufs)
				packets += n
				for _, size := range bufs.sizes[:n] {
					octets += size
				}
			}
			b.SetBytes(int64(octets / b.N))
			b.ReportMetric(float64((cputime.Used(b)-before).Nanoseconds())/float64(packets), "cpu-ns/packet")
		})
	}
}

func BenchmarkDeviceWrite(b *testing.B) {
	for name, batch := range inShapes() {
		b.Run(name, func(b *testing.B) {
			link := newScript()
			link.discard = true
			d := newDevice(b, link, newEngine(b), datapath.Options{})
			b.SetBytes(int64(batch.octets))
			b.ReportAllocs()
			before := cputime.Used(b)
			for b.Loop() {
				batch.restore()
				d.Write(batch.bufs, offset)
			}
			b.ReportMetric(float64((cputime.Used(b)-before).Nanoseconds())/float64(b.N*len(batch.bufs)), "cpu-ns/packet")
		})
	}
}

// BenchmarkGateways measures the whole path from the link of one cluster to that of the other,
// including encryption and decryption, but without the kernel and the hosts' TCP.
func BenchmarkGateways(b *testing.B) {
	network := &memlink.Network{}
	from, to := startGateways(b, network, plans[0], datapath.Options{})
	var received atomic.Int64
	arrived := make(chan struct{}, 1)
	to.link.OnReceive(func(bufs [][]byte) error {
		n := -10
		for _, p := range bufs {
			n += len(p)
		}
		received.Add(int64(n))
		select {
		case arrived <- struct{}{}:
		default:
		}
		return nil
	})
	pod, remote := from.pod, to.seenAddr(to.pod)
	for _, tc := range []struct {
		name    string
		window  int // packets in flight
		packet  []byte
		segment int // segments in the tunnel per superpacket
	}{
		{"superpacket", 8, super4(at(pod, 4000), at(remote, 80), 1000, 1380, random(45*1380)), 45},
		{"small", 256, plain(udp4(at(pod, 4000), at(remote, 80), random(36))), 1},
		{"small-alone", 1, plain(udp4(at(pod, 4000), at(remote, 80), random(36))), 1},
	} {
		b.Run(tc.name, func(b *testing.B) {
			// The receiver may join segments into runs of any length, so the benchmark counts
			// octets and not packets.
			size := int64(len(tc.packet) - 10)
			if from.link.Inject(tc.packet) {
				time.Sleep(200 * time.Millisecond) // time for the handshake
			}
			received.Store(0)
			b.SetBytes(size)
			sent, before := int64(0), cputime.Used(b)
			wait := func(inFlight int64) {
				for sent*size-received.Load() > inFlight*size {
					select {
					case <-arrived:
					case <-time.After(time.Second):
						b.Fatalf("lost: %s", lossReport(network, from, to))
					}
				}
			}
			for b.Loop() {
				wait(int64(tc.window) - 1)
				if !from.link.Inject(tc.packet) {
					b.Fatal("queue full")
				}
				sent++
			}
			wait(0)
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*tc.segment), "ns/packet")
			b.ReportMetric(float64(received.Load()-sent*size)/40/float64(b.N)+1, "runs/op")
			b.ReportMetric(float64((cputime.Used(b)-before).Nanoseconds())/float64(b.N*tc.segment), "cpu-ns/packet")
		})
	}
}
