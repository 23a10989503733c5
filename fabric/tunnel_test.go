package fabric

import (
	"bytes"
	"crypto/ecdh"
	"encoding/base64"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func TestTunnelKeysAreDistinctAndDerivedFromTheFirst(t *testing.T) {
	private := keyOf(7)
	seen := map[[32]byte]int{}
	for i := range MaxTunnels {
		key := TunnelKey(private, i)
		if other, twice := seen[key]; twice {
			t.Errorf("tunnels %d and %d have the same key", other, i)
		}
		seen[key] = i
		if i > 0 && (key[0]&7 != 0 || key[31]&0xc0 != 0x40) {
			t.Errorf("the key of tunnel %d is not clamped: %x", i, key)
		}
		if again := TunnelKey(private, i); again != key {
			t.Errorf("the key of tunnel %d is another each time", i)
		}
		if other := TunnelKey(keyOf(8), i); other == key {
			t.Errorf("two secrets have the same key for tunnel %d", i)
		}
	}
	if TunnelKey(private, 0) != private {
		t.Error("tunnel 0 has another key than the gateway")
	}
	for i, public := range PublicKeys(private, 3) {
		key := TunnelKey(private, i)
		want, err := ecdh.X25519().NewPrivateKey(key[:])
		if err != nil || !bytes.Equal(public[:], want.PublicKey().Bytes()) {
			t.Errorf("public key %d is %x, want %x, %v", i, public, want.PublicKey().Bytes(), err)
		}
	}
}

// A gateway must keep its keys after an upgrade, because its peers know them.
func TestTunnelKeyNeverChanges(t *testing.T) {
	key := TunnelKey(keyOf(7), 1)
	if got, want := base64.StdEncoding.EncodeToString(key[:]), "QLNqozBClVl6wdD2YHRyLE/2NiTEM1zdb4V7q5MkWVs="; got != want {
		t.Errorf("the key of tunnel 1 is %s, want %s", got, want)
	}
}

func randomTunnels(rng *rand.Rand, n int) []TunnelEnd {
	var further []TunnelEnd
	for i := range n {
		t := TunnelEnd{Port: uint16(1 + i*1000 + rng.IntN(1000))}
		for j := range t.PublicKey {
			t.PublicKey[j] = byte(rng.Uint32())
		}
		further = append(further, t)
	}
	return further
}

func TestFormattedTunnelsParseToTheSameTunnels(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		want := randomTunnels(rng, 1+rng.IntN(MaxTunnels-1))
		text := FormatTunnels(want)
		if len(text) > 1024 {
			t.Fatalf("%d tunnels need %d octets, which a ConfigValue has not", len(want), len(text))
		}
		if got, err := ParseTunnels(text); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%q reads as %v, %v; want %v", text, got, err, want)
		}
	}
	if got := FormatTunnels(nil); got != "" {
		t.Errorf("no tunnels are written as %q", got)
	}
	const golden = "5872:AwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwM=,40000:BAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQ="
	if got := FormatTunnels([]TunnelEnd{{keyOf(3), 5872}, {keyOf(4), 40000}}); got != golden {
		t.Errorf("written as %s, want %s", got, golden)
	}
}

func TestPeersWithInvalidTunnelsAreRefused(t *testing.T) {
	entry := func(port int, key byte) string { return strconv.Itoa(port) + ":" + keyText(key) }
	var fifteen, sixteen []string
	for i := range 16 {
		sixteen = append(sixteen, entry(6000+i, byte(10+i)))
	}
	fifteen = sixteen[:15]
	const keyWant = "want 32 bytes in 44 base64 characters"
	const formWant = "; want PORT:PUBLICKEY, separated by commas"
	const portWant = "; want a UDP port from 1 to 65535"
	for _, test := range []struct {
		value string
		want  []string
	}{
		{strings.Join(fifteen, ","), nil},
		{strings.Join(sixteen, ","), []string{"has 16 tunnels besides the first; want at most 15"}},
		{strings.Repeat(",", 1<<20), []string{"has 1048577 tunnels besides the first; want at most 15"}},
		{"", []string{"is empty" + formWant + ", or remove the field"}},
		{",", []string{`tunnel 1 is ""` + formWant}},
		{entry(5872, 3) + ",", []string{`tunnel 2 is ""` + formWant}},
		{entry(5872, 3) + ", " + entry(5873, 4), []string{`tunnel 2 has port " 5873"` + portWant}},
		{keyText(3), []string{`tunnel 1 is "` + keyText(3) + `"` + formWant}},
		{"5872:" + entry(5873, 3), []string{"tunnel 1 has a key that is not base64; " + keyWant}},
		{"\x1b[2J", []string{`tunnel 1 is "\x1b[2J"` + formWant}},
		{entry(0, 3), []string{`tunnel 1 has port "0"` + portWant}},
		{entry(65536, 3), []string{`tunnel 1 has port "65536"` + portWant}},
		{"05872:" + keyText(3), []string{`tunnel 1 has port "05872"` + portWant}},
		{entry(5872, 0), []string{"tunnel 1 has a key that is all zero; want a key"}},
		{"5872:", []string{"tunnel 1 has a key that has 0 bytes; " + keyWant}},
		{entry(5872, 3) + ",5873:" + keyText(4)[:40], []string{"tunnel 2 has a key that has 30 bytes; " + keyWant}},
		{entry(5872, 3) + "\n", []string{"tunnel 1 has a key that is not base64; " + keyWant}},
		{entry(5871, 3), []string{"tunnel 1 has port 5871, which tunnel 0 has; want a different port for each tunnel"}},
		{entry(5872, 2), []string{"tunnel 1 has the public key of tunnel 0; want a different key for each tunnel"}},
		{entry(5872, 3) + "," + entry(5873, 4) + "," + entry(5872, 3), []string{
			"tunnel 3 has port 5872, which tunnel 1 has; want a different port for each tunnel",
			"tunnel 3 has the public key of tunnel 1; want a different key for each tunnel",
		}},
	} {
		te := endpointB()
		te.Spec.BackendConfig[v1alpha1.ConfigTunnels] = test.value
		peer, problems := PeerFrom(te, Origin{})
		var want []string
		for _, w := range test.want {
			want = append(want, "spec.backend_config.tunnels: "+w)
		}
		wantTexts(t, problems, want...)
		if want != nil != reflect.DeepEqual(peer, Peer{}) {
			t.Errorf("%.100q was read as %+v", test.value, peer)
		}
		if want == nil && FormatTunnels(peer.Tunnels) != test.value {
			t.Errorf("%.100q was read as %v", test.value, peer.Tunnels)
		}
	}
}

// A peer that was not parsed from text is checked in the same way.
func TestGatewayForRefusesInvalidTunnels(t *testing.T) {
	for _, test := range []struct {
		tunnels []TunnelEnd
		want    string
	}{
		{[]TunnelEnd{{keyOf(3), 0}}, "tunnel 1 has port 0; want a UDP port from 1 to 65535"},
		{[]TunnelEnd{{keyOf(3), 9}, {Port: 10}}, "tunnel 2 has a key that is all zero; want a WireGuard public key"},
		{make([]TunnelEnd, 16), "has 16 tunnels besides the first; want at most 15"},
	} {
		p := peer(t, idB, func(p *Peer) { p.Tunnels = test.tunnels })
		gw, problems := GatewayFor(Intent{ClusterID: idA, PublicKey: keyOf(1), Peers: []Peer{p}})
		wantTexts(t, problems, "TunnelEndpoint tenant/b: spec.backend_config.tunnels: "+test.want)
		if len(gw.Peers) != 0 {
			t.Errorf("kept\n%s", gw)
		}
	}
}

func FuzzParseTunnels(f *testing.F) {
	f.Add("5872:" + keyText(3))
	f.Add("5872:" + keyText(3) + ",65535:" + keyText(4))
	f.Add("0:" + keyText(0) + ",")
	f.Add(strings.Repeat("1:"+keyText(1)+",", 16))
	f.Fuzz(func(t *testing.T, text string) {
		further, err := ParseTunnels(text)
		if err != nil {
			if message := err.Error(); further != nil || len(message) > 500 || strings.ContainsFunc(message, func(r rune) bool { return r < ' ' }) {
				t.Errorf("%v, %+q", further, message)
			}
			return
		}
		if n := len(further); n == 0 || n >= MaxTunnels {
			t.Errorf("%d tunnels", n)
		}
		for _, end := range further {
			if end.Port == 0 || end.PublicKey == ([32]byte{}) {
				t.Errorf("%q holds %v", text, end)
			}
		}
		if again := FormatTunnels(further); again != text {
			t.Errorf("%q parses to tunnels that are formatted as %q", text, again)
		}
	})
}
