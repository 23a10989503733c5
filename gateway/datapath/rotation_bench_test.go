package datapath

import (
	"crypto/ecdh"
	"testing"

	"github.com/isthmus-net/isthmus/internal/cputime"
	"github.com/isthmus-net/isthmus/internal/noise"
)

// BenchmarkRotation measures the two steps of a rotation of our key with 1,000 peers: answering
// to the next key, and ending the previous one. BenchmarkPresharedKey measures the handshakes that
// a rotation causes. Run it with -benchtime=5x. It reports processor time, because other work on
// the machine increases the elapsed time.
func BenchmarkRotation(b *testing.B) {
	tunnel, own, _ := benchTunnel(b, PresharedKeys{Key: [32]byte{1}}, 1000)
	current := [32]byte(own.Bytes())
	next := make([]*ecdh.PrivateKey, b.N)
	for i := range next {
		next[i] = noise.NewKey()
	}
	b.ResetTimer()
	defer reportProcessorTime(b)()
	for i := range next {
		key := [32]byte(next[i].Bytes())
		if err := tunnel.SetKeys(current, key); err != nil {
			b.Fatal(err)
		}
		if err := tunnel.SetKeys(key, [32]byte{}); err != nil {
			b.Fatal(err)
		}
		current = key
	}
}

// reportProcessorTime starts measuring the processor time of this process. The function that it
// returns reports the result.
func reportProcessorTime(b *testing.B) func() {
	b.Helper()
	begin := cputime.Used(b)
	return func() { b.ReportMetric(float64((cputime.Used(b)-begin).Microseconds())/float64(b.N), "cpu-us/op") }
}
