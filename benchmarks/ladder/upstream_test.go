package main

import (
	"fmt"
	"testing"

	"golang.zx2c4.com/wireguard/conn"
)

// BenchmarkUpstreamLoopback is gateway/bind's BenchmarkLoopback with wireguard-go's own sockets.
// The difference of these benchmarks is the gain by our sockets.
func BenchmarkUpstreamLoopback(b *testing.B) {
	for _, size := range []int{96, 1452} {
		for _, batch := range []int{1, 45} {
			b.Run(fmt.Sprintf("size=%d/batch=%d", size, batch), func(b *testing.B) {
				from, to := conn.NewStdNetBind(), conn.NewStdNetBind()
				if _, _, err := from.Open(0); err != nil {
					b.Fatal(err)
				}
				defer from.Close()
				receive, port, err := to.Open(0)
				if err != nil {
					b.Fatal(err)
				}
				defer to.Close()
				ep, err := from.ParseEndpoint(fmt.Sprintf("127.0.0.1:%d", port))
				if err != nil {
					b.Fatal(err)
				}
				const scratch = 65535 // wireguard-go puts a superpacket into one buffer in both directions
				out, in := make([][]byte, batch), make([][]byte, conn.IdealBatchSize)
				for i := range out {
					out[i] = make([]byte, size, scratch)
				}
				for i := range in {
					in[i] = make([]byte, scratch)
				}
				sizes, eps := make([]int, len(in)), make([]conn.Endpoint, len(in))
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for n := 0; b.Loop(); n++ {
					if n%batch != 0 {
						continue
					}
					for i := range out {
						out[i] = out[i][:size]
					}
					if err := from.Send(out, ep); err != nil {
						b.Fatal(err)
					}
					for got := 0; got < batch; {
						n, err := receive[0](in, sizes, eps)
						if err != nil {
							b.Fatal(err)
						}
						got += n
					}
				}
			})
		}
	}
}
