package ipam

import (
	"fmt"
	"net/netip"
	"testing"
)

// large returns a State with 1,000 peers, all with the same claim, and 1,000 endpoints.
func large(b *testing.B) State {
	b.Helper()
	state, _ := State{}.Configure(Config{PodCIDR: pfx("10.244.0.0/20"), ServiceCIDR: pfx("10.96.0.0/16")})
	for i := range 1000 {
		id := fmt.Sprint("peer-", i)
		state, _, _ = state.Allocate(claim(id, "10.244.0.0/20", "10.245.0.0/22"))
		state = state.Answered(id, state.own.PodCIDR, state.own.ExternalCIDR)
		state, _, _ = state.MapEndpoint(id, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}))
	}
	if n := len(state.Peers()); n != 1000 {
		b.Fatal(n)
	}
	return state
}

func BenchmarkWithAThousandPeers(b *testing.B) {
	state := large(b)
	request := claim("one-more", "10.244.0.0/20", "10.245.0.0/20")
	next := state.Release("peer-7")
	for name, f := range map[string]func(){
		"Allocate":      func() { state.Allocate(request) },
		"AllocateAgain": func() { state.Allocate(claim("peer-7", "10.244.0.0/20", "10.245.0.0/22")) },
		"MapEndpoint":   func() { state.MapEndpoint("peer-7", netip.AddrFrom4([4]byte{203, 0, 113, 1})) },
		"Release":       func() { state.Release("peer-7") },
		"Spec":          func() { state.Spec() },
		"Changed":       func() { state.Changed(state) },
		"NatMapping":    func() { state.NatMapping("peer-7") },
		"Configure":     func() { state.Configure(Config{PodCIDR: state.own.PodCIDR}) },
		"SameConfig":    func() { state.Configure(state.own) },
		"DeltaOfOne":    func() { Delta(state, next) },
		"ReadSpec":      func() { spec := state.Spec(); Read(&spec) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
		})
	}
}
