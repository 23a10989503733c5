package bind

import (
	"fmt"
	"net/netip"
	"testing"
)

// BenchmarkLoopback sends batches of datagrams to another socket of this machine and receives
// them in the same goroutine. One operation is one datagram. A batch of 1 shows the cost of
// single datagrams.
func BenchmarkLoopback(b *testing.B) {
	for _, size := range []int{96, 1452} {
		for _, batch := range []int{1, 45} {
			b.Run(fmt.Sprintf("size=%d/batch=%d", size, batch), func(b *testing.B) {
				from, to := New(), New()
				_, _, err := from.Listen(0)
				if err != nil {
					b.Fatal(err)
				}
				defer from.Close()
				receive, port, err := to.Listen(0)
				if err != nil {
					b.Fatal(err)
				}
				defer to.Close()
				ep := from.Endpoint(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port))
				out := make([][]byte, batch)
				for i := range out {
					out[i] = make([]byte, size)
				}
				var in Batch
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
						if err := receive[0](&in, true); err != nil {
							b.Fatal(err)
						}
						for ; !in.Empty(); got++ {
							in.Next()
						}
						in.Reset()
					}
				}
			})
		}
	}
}
