package ipam

import (
	"fmt"
	"net/netip"
	"testing"
)

// large is a Book with 1,000 identical peers and 1,000 endpoints.
func large(b *testing.B) Book {
	b.Helper()
	book, _ := Book{}.Configure(Config{PodCIDR: pfx("10.244.0.0/20"), ServiceCIDR: pfx("10.96.0.0/16")})
	for i := range 1000 {
		id := fmt.Sprint("peer-", i)
		book, _, _ = book.Grant(claim(id, "10.244.0.0/20", "10.245.0.0/22"))
		book = book.Answered(id, book.own.PodCIDR, book.own.ExternalCIDR)
		book, _, _ = book.MapEndpoint(id, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}))
	}
	if n := len(book.Peers()); n != 1000 {
		b.Fatal(n)
	}
	return book
}

func BenchmarkWithAThousandPeers(b *testing.B) {
	book := large(b)
	ask := claim("one-more", "10.244.0.0/20", "10.245.0.0/20")
	next := book.Release("peer-7")
	for name, f := range map[string]func(){
		"Grant":       func() { book.Grant(ask) },
		"GrantAgain":  func() { book.Grant(claim("peer-7", "10.244.0.0/20", "10.245.0.0/22")) },
		"MapEndpoint": func() { book.MapEndpoint("peer-7", netip.AddrFrom4([4]byte{203, 0, 113, 1})) },
		"Release":     func() { book.Release("peer-7") },
		"Spec":        func() { book.Spec() },
		"Changed":     func() { book.Changed(book) },
		"NatMapping":  func() { book.NatMapping("peer-7") },
		"Configure":   func() { book.Configure(Config{PodCIDR: book.own.PodCIDR}) },
		"SameConfig":  func() { book.Configure(book.own) },
		"DeltaOfOne":  func() { Delta(book, next) },
		"ReadSpec":    func() { spec := book.Spec(); Read(&spec) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
		})
	}
}
