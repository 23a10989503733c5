package datapath_test

import (
	"crypto/cipher"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/crypto/chacha20poly1305"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/internal/cputime"
)

// BenchmarkTunnels measures how well several tunnels run in parallel. Each goroutine runs one
// tunnel from end to end, with a cipher of its own, and all of them share the two engines. One
// operation carries a superpacket. Run it with -cpu 1,2,...: if nothing were shared, the time per
// operation would be that of one processor divided by their number. The sub-benchmark "cipher"
// shares nothing, and so shows what the machine can do.
func BenchmarkTunnels(b *testing.B) {
	for _, tc := range []struct {
		name string
		way  func(lane *tunnelLane)
	}{
		{"cipher", (*tunnelLane).cipher},
		{"prefix", (*tunnelLane).superpacket},
		{"napt", (*tunnelLane).superpacket},
	} {
		b.Run(tc.name, func(b *testing.B) {
			from, to := startGateways(b, &memlink.Network{}, plans[0], datapath.Options{})
			host := from.pod
			if tc.name == "napt" {
				host = from.node
			}
			var lanes atomic.Uint32
			b.SetBytes(45 * 1380)
			b.SetParallelism(1)
			before := cputime.Used(b)
			b.RunParallel(func(pb *testing.PB) {
				port := uint16(4000 + lanes.Add(1))
				out := newScript(super4(at(host, port), at(to.seenAddr(to.pod), 80), 1000, 1380, random(45*1380)))
				out.repeat, out.burst = true, 1
				in := newScript()
				in.discard = true
				key := random(chacha20poly1305.KeySize)
				aead, err := chacha20poly1305.New(key)
				if err != nil {
					panic(err)
				}
				l := &tunnelLane{
					out: datapath.New(out, bind.New(), from.engine, nil, datapath.Options{}), in: datapath.New(in, bind.New(), to.engine, nil, datapath.Options{}),
					aead: aead, bufs: newBuffers(128, 2048),
				}
				for pb.Next() {
					tc.way(l)
				}
			})
			b.ReportMetric(float64((cputime.Used(b)-before).Nanoseconds())/float64(b.N*45), "cpu-ns/packet")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())*float64(runtime.GOMAXPROCS(0))/float64(b.N*45), "ns/packet/processor")
		})
	}
}

// tunnelLane is one tunnel from end to end, without sockets.
type tunnelLane struct {
	out, in *datapath.Tunnel
	aead    cipher.AEAD
	nonce   [chacha20poly1305.NonceSize]byte
	bufs    *buffers
}

func (l *tunnelLane) superpacket() {
	n, err := l.out.Read(l.bufs.bufs, l.bufs.sizes, offset)
	if n != 45 || err != nil {
		panic(err)
	}
	l.sealAndOpen(n)
	batch := make([][]byte, n)
	for i := range batch {
		batch[i] = l.bufs.bufs[i][:offset+l.bufs.sizes[i]]
	}
	if _, err := l.in.Write(batch, offset); err != nil {
		panic(err)
	}
}

func (l *tunnelLane) cipher() {
	for i := range 45 {
		l.bufs.sizes[i] = 1420
	}
	l.sealAndOpen(45)
}

func (l *tunnelLane) sealAndOpen(n int) {
	for i := range n {
		p := l.bufs.packet(i)
		sealed := l.aead.Seal(p[:0], l.nonce[:], p, nil)
		if _, err := l.aead.Open(p[:0], l.nonce[:], sealed, nil); err != nil {
			panic(err)
		}
	}
}
