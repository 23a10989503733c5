package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
)

// A GatewayDecider with any history computes the same as GatewayFor, and does not change earlier
// results.
func TestAGatewayDeciderEqualsGatewayFor(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	peers := make(map[int]Peer)
	own := pfx("10.244.0.0/16")
	random := func(i int) Peer {
		p := peer(t, fmt.Sprintf("%08x-0000-4000-8000-000000000000", i+1), nil)
		at := i
		if rng.IntN(50) == 0 { // the ID of another peer
			at = rng.IntN(10)
		}
		if i%3 == 2 { // IPv6, with local networks of its own
			p.Local = Networks{Pod: pfx(fmt.Sprintf("fd00:%d::/48", 1+rng.IntN(30)/29)), PodSeen: pfx("fd01:1::/48"), External: pfx("fd00:9::/48"), ExternalSeen: pfx("fd01:2::/48")}
			p.Remote = Networks{Pod: pfx("fd00:1::/48"), External: pfx("fd00:9::/48"), PodSeen: pfx(fmt.Sprintf("fd02:%d::/48", at)), ExternalSeen: pfx(fmt.Sprintf("fd03:%d::/48", at))}
			p.Endpoint, p.Port, p.PublicKey = []string{"2600::1", "192.0.2.1", "gw.example.com"}[rng.IntN(3)], 5871, keyOf(byte(100+at))
			p.Tunnels, p.Mappings, p.Created = nil, nil, int64(rng.IntN(3))
			return p
		}
		p.Local.Pod = own
		p.Remote.PodSeen = netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(at), byte(rng.IntN(2)) << 7, 0}), 16+rng.IntN(2)).Masked()
		p.Remote.Pod = netip.PrefixFrom(ip("10.244.0.0"), p.Remote.PodSeen.Bits())
		p.Remote.ExternalSeen = netip.PrefixFrom(netip.AddrFrom4([4]byte{12, byte(at), 0, 0}), 16)
		p.Endpoint, p.Port, p.PublicKey = fmt.Sprintf("192.0.2.%d", rng.IntN(4)), uint16(5871+rng.IntN(2)), keyOf(byte(100+at))
		p.Tunnels = nil
		if rng.IntN(3) == 0 {
			p.Tunnels = []TunnelEnd{{keyOf(byte(150 + i)), 5900}}
		}
		p.Mappings = nil
		for range rng.IntN(3) {
			p.Mappings = append(p.Mappings, Mapping{ip(fmt.Sprintf("10.9.9.%d", rng.IntN(3))), p.Local.ExternalSeen.Addr().Next().Next()})
		}
		switch rng.IntN(60) {
		case 0, 10, 11, 12:
			p.Port = 0 // invalid by itself
		case 1, 2, 3, 4:
			p.Endpoint = fmt.Sprintf("11.%d.0.1", rng.IntN(100))
		case 5:
			p.Local.External = pfx("10.243.0.0/16")
		}
		p.Created = int64(rng.IntN(3))
		return p
	}
	var d GatewayDecider
	in := Intent{ClusterID: idA, PublicKey: keyOf(1)}
	incremental, kept, kept6 := 0, 0, 0
	var last Gateway
	var lastText string
	for step := range 5000 {
		switch rng.IntN(20) {
		case 0:
			in.ClusterName = fmt.Sprint(rng.IntN(2))
		case 1:
			in.PublicKey = keyOf(byte(1 + rng.IntN(2)))
		case 2:
			in.Site = Site{Networks: []SiteNetwork{{Prefix: pfx(fmt.Sprintf("10.%d.0.0/16", rng.IntN(3))), What: "a network"}}}.With([]netip.Addr{ip(fmt.Sprintf("192.0.2.%d", 9+rng.IntN(2)))}, "a node")
		case 3:
			in.Waiting = []Waiting{{"w2", Origin{}}, {"w1", Origin{}}}[:rng.IntN(3)]
		case 4: // change our PodCIDR for all IPv4 peers at once
			own = []netip.Prefix{pfx("10.244.0.0/16"), pfx("10.200.0.0/16")}[rng.IntN(2)]
			for i, p := range peers {
				if p.Local.Pod.Addr().Is4() {
					p.Local.Pod = own
				}
				peers[i] = p
			}
		}
		for range rng.IntN(3) {
			if i := rng.IntN(10); rng.IntN(3) == 0 {
				delete(peers, i)
			} else {
				peers[i] = random(i)
			}
		}
		in.Peers = nil
		for _, p := range peers { // in random order
			in.Peers = append(in.Peers, p)
		}
		if rng.IntN(50) == 0 && len(in.Peers) > 0 {
			in.Peers = append(in.Peers, in.Peers[0])
		}
		gw, problems := d.GatewayFor(in)
		want, wantProblems := GatewayFor(in)
		if !reflect.DeepEqual(gw, want) || !slices.Equal(problems, wantProblems) {
			t.Fatalf("step %d: of %+v\n%v%v\n%v\nwant\n%v%v\n%v", step, in.Peers, gw, gw.Site, problems, want, want.Site, wantProblems)
		}
		if text := fmt.Sprint(last, last.Site); step > 0 && text != lastText {
			t.Fatalf("step %d: an earlier result was modified:\n%s\nwas\n%s", step, text, lastText)
		}
		last, lastText = gw, fmt.Sprint(gw, gw.Site)
		if d.peers != nil {
			incremental++
			kept += len(gw.Peers)
			for _, p := range gw.Peers {
				if p.AllowedIPs[0].Addr().Is6() {
					kept6++
				}
			}
		}
	}
	if kept < 10_000 || kept6 < 2000 || incremental < 1000 || incremental > 4800 {
		t.Errorf("%d of 5000 were decided one by one, with %d peers, %d of them with IPv6: too few or too many to say anything", incremental, kept, kept6)
	}
}

// equal detects a difference in each field of a Peer.
func TestPeersThatDifferInAnyFieldAreNotEqual(t *testing.T) {
	var p Peer
	for i := range reflect.TypeFor[Peer]().NumField() {
		q, field := p, reflect.TypeFor[Peer]().Field(i)
		v := reflect.ValueOf(&q).Elem().Field(i)
		if v.Kind() == reflect.Slice {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		} else {
			notZero(t, v)
		}
		if p.equal(&q) {
			t.Errorf("%s is not looked at", field.Name)
		}
	}
}

// notZero sets a value, or the first value inside it, to a nonzero value.
func notZero(t *testing.T, v reflect.Value) {
	t.Helper()
	switch {
	case v.Type() == reflect.TypeFor[netip.Prefix]():
		v.Set(reflect.ValueOf(pfx("10.0.0.0/8")))
	case v.Kind() == reflect.String:
		v.SetString("x")
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	case v.CanInt():
		v.SetInt(1)
	case v.CanUint():
		v.SetUint(1)
	case v.Kind() == reflect.Struct:
		notZero(t, v.Field(0))
	case v.Kind() == reflect.Array:
		notZero(t, v.Index(0))
	default:
		t.Fatalf("a field of type %v, which this test does not know", v.Type())
	}
}

// BenchmarkGatewayPeerMoves changes the endpoint of one peer among many, and alternately adds and
// removes another peer.
func BenchmarkGatewayPeerMoves(b *testing.B) {
	for _, n := range []int{1000, 4000} {
		in := Intent{ClusterID: idA}
		for i := range n + 1 {
			p := Peer{ID: fmt.Sprintf("%08x-0000-4000-8000-000000000000", i+1), Endpoint: fmt.Sprintf("198.18.%d.%d", i>>8, i&255), Port: 5871,
				Local: Networks{pfx("10.244.0.0/16"), pfx("10.246.0.0/16"), pfx("10.245.0.0/20"), pfx("10.247.0.0/20")},
				Remote: Networks{Pod: pfx("10.244.0.0/20"), External: pfx("10.245.0.0/24"), PodSeen: netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 4), byte(i << 4), 0}), 20),
					ExternalSeen: netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(64 + i>>8), byte(i), 0}), 24)}}
			p.PublicKey[0], p.PublicKey[1] = byte(i), byte(i>>8)+1
			in.Peers = append(in.Peers, p)
		}
		all := in.Peers
		in.Peers = all[:n]
		var d GatewayDecider
		decide := func() {
			if gw, problems := d.GatewayFor(in); len(gw.Peers) != len(in.Peers) || len(problems) > 0 {
				b.Fatal(len(gw.Peers), problems)
			}
		}
		b.Run(fmt.Sprintf("Endpoint/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				all[n/2].Port ^= 1
				decide()
			}
		})
		b.Run(fmt.Sprintf("ComesAndGoes/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				in.Peers = all
				decide()
				in.Peers = all[:n]
				decide()
			}
		})
		b.Run(fmt.Sprintf("AllAnew/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				GatewayFor(in)
			}
		})
	}
}
