package voting

import (
	"crypto/ed25519"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/isthmus-net/isthmus/internal/cputime"
	"github.com/isthmus-net/isthmus/internal/mandate"
)

// BenchmarkIdleBeat measures one beat in a cluster of 100 nodes with nine voters: the work of
// the active gateway, of one standby, and of all voters. A beat takes place every
// mandate.Usual.Beat.
func BenchmarkIdleBeat(b *testing.B) {
	key := KeyOf(private)
	nodes := make(map[string]netip.Addr)
	voters, list := make(map[netip.Addr]*Voter), List{Version: 1, Voters: make(map[string]netip.Addr)}
	for i := range 100 {
		name, addr := fmt.Sprintf("worker-%d.example.org", i), netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
		nodes[name] = addr
		v := &Voter{Node: name, Directory: b.TempDir(), Log: slog.New(slog.DiscardHandler)}
		v.Set(key.Public().(ed25519.PublicKey))
		if err := v.start(); err != nil {
			b.Fatal(err)
		}
		v.known, v.expected, v.strange = rate.NewLimiter(rate.Inf, 0), rate.NewLimiter(rate.Inf, 0), rate.NewLimiter(rate.Inf, 0)
		if voters[addr] = v; i < 9 {
			list.Voters[name] = addr
		}
	}
	var gateways []*Candidate
	for i := range 2 {
		c := NewCandidate(fmt.Sprintf("isthmus-gateway-6c5b7d9f4-%05d", i), netip.AddrFrom4([4]byte{10, 244, 0, byte(i + 1)}),
			func() [32]byte { return private }, slog.New(slog.DiscardHandler))
		c.Learn(list, false)
		c.SetNodes(nodes)
		c.Allow(i == 0, i == 0, true)
		gateways = append(gateways, c)
	}
	var voting time.Duration // CPU time of the voters
	beat := func() (datagrams, octets int) {
		for _, c := range gateways {
			at := &net.UDPAddr{IP: c.Addr.AsSlice(), Port: 1}
			for _, m := range c.messages(clock(), key) {
				datagrams, octets = datagrams+1, octets+len(m.text)
				var answers [][]byte
				began := cputime.Used(b)
				voters[m.to].receive(m.text, at, func(text []byte, _ net.Addr) { answers = append(answers, text) })
				voting += cputime.Used(b) - began
				for _, text := range answers {
					datagrams, octets = datagrams+1, octets+len(text)
					if a, ok := openAnswer(text); ok {
						c.receive(a, &net.UDPAddr{IP: m.to.AsSlice(), Port: Port})
					}
				}
			}
		}
		return datagrams, octets
	}
	for range 2 * maxNotices { // until all nodes have got the notice and answered
		beat()
	}
	if !gateways[0].Gate.Open() || gateways[1].Gate.Open() {
		b.Fatalf("mandates: %+v, %+v", gateways[0].View(), gateways[1].View())
	}
	datagrams, octets, began := 0, 0, cputime.Used(b)
	voting = 0
	for b.Loop() {
		n, size := beat()
		datagrams, octets = datagrams+n, octets+size
	}
	perSecond := float64(mandate.Usual.Beat.Nanoseconds()) / 1e9 * float64(b.N)
	b.ReportMetric(float64(datagrams)/perSecond, "datagrams/s")
	b.ReportMetric(float64(octets)/perSecond, "octets/s")
	b.ReportMetric((cputime.Used(b)-began).Seconds()*100/perSecond, "%CPU")
	b.ReportMetric(voting.Seconds()*100/perSecond/float64(len(list.Voters)), "%CPU/voter")
}
