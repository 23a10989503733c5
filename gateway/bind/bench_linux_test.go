package bind

import (
	"fmt"
	"testing"

	"golang.zx2c4.com/wireguard/conn"
)

// BenchmarkLoopback sends batches of datagrams to another socket of this machine and receives them, by one goroutine that
// does nothing else. One operation is one datagram; single is a batch of one.
func BenchmarkLoopback(b *testing.B) {
	for _, size := range []int{96, 1452} {
		for _, batch := range []int{1, 45} {
			b.Run(fmt.Sprintf("size=%d/batch=%d", size, batch), func(b *testing.B) {
				from, to := New(), New()
				_, _, err := from.Open(0)
				if err != nil {
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
				out := make([][]byte, batch)
				for i := range out {
					out[i] = make([]byte, size)
				}
				in, sizes, eps := make([][]byte, conn.IdealBatchSize), make([]int, conn.IdealBatchSize), make([]conn.Endpoint, conn.IdealBatchSize)
				for i := range in {
					in[i] = make([]byte, 2048)
				}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for n := 0; b.Loop(); n++ {
					if n%batch != 0 {
						continue
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
