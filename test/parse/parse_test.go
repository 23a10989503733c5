package parse

import (
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// Names of the differences. There are differences because gopacket is a dissector, which decodes as
// much as it can, while package packet decides which packets may pass.
const (
	// gopacket accepts these packets, package packet refuses them.
	truncated     = "packet shorter than its length field"
	lengthZero    = "IPv4 total length 0"
	sourceRoute   = "source route"
	headerOrder   = "hop-by-hop options that are not first"
	headerCount   = "more than eight extension headers"
	twoFragments  = "two fragment headers"
	jumbogram     = "jumbogram"
	fragmentRange = "fragment that is empty, no multiple of 8 or beyond 65,535"
	emptyFirst    = "first fragment without data"
	tinyFirst     = "first fragment that ends inside a transport header gopacket does not know"
	overTCP       = "fragment that begins inside the TCP header"
	udpLength     = "UDP length 0 or beyond the packet"
	shortICMPv6   = "ICMPv6 of less than 8 octets"
	coverage      = "checksum coverage of UDP-Lite or DCCP that cannot be"

	// gopacket refuses these packets, package packet accepts them.
	options   = "IPv6 options that do not add up, or a jumbo option"
	noPayload = "IPv6 without payload"
)

var (
	a4, b4 = netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("10.71.0.5")
	a6, b6 = netip.MustParseAddr("fd44::5"), netip.MustParseAddr("fd71::5")
)

type difference struct {
	name, why string
	error     packet.Error // error of package packet; 0 if it accepts the packet
	packet    []byte
}

// differences lists each difference with its reason and an example packet.
var differences = []difference{
	{truncated, "a packet is whole or it is not forwarded; gopacket marks it and reads what is there",
		packet.ErrTruncated, packettest.Build(packettest.IP{Src: a4, Dst: b4}, packettest.TCP{Data: make([]byte, 9)})[:48]},
	{lengthZero, "gopacket takes it for a superpacket of a capture; ours come with a virtio-net header and a length",
		packet.ErrTotalLength, set(udp4(), 2, 0, 0)},
	{sourceRoute, "the destination in the header is not the last one (RFC 5095, RFC 7126)",
		packet.ErrSourceRoute, packettest.Build(packettest.IP{Src: a4, Dst: b4, Options: []byte{131, 7, 4, 10, 0, 0, 1}}, packettest.UDP{})},
	{sourceRoute, "the same in a routing header",
		packet.ErrSourceRoute, with6(packettest.Extension{Kind: 43, Data: []byte{0, 1, 0, 0, 0, 0}})},
	{headerOrder, "RFC 8200, section 4.1: directly behind the IPv6 header",
		packet.ErrExtensionHeader, with6(packettest.Extension{Kind: 60}, packettest.Extension{Kind: 0, Data: []byte{1, 4, 0, 0, 0, 0}})},
	{headerCount, "the walk is bounded; RFC 8200 has six places",
		packet.ErrExtensionHeader, with6(slices.Repeat([]packettest.Extension{{Kind: 60, Data: []byte{1, 4, 0, 0, 0, 0}}}, 9)...)},
	{twoFragments, "the inner offset would hide behind the outer one",
		packet.ErrExtensionHeader, with6(packettest.Extension{Kind: 44}, packettest.Extension{Kind: 44})},
	{jumbogram, "RFC 2675: no link of ours is so large",
		packet.ErrExtensionHeader, jumbo()},
	{fragmentRange, "RFC 791, RFC 8200, section 4.5: no reassembly can come of it",
		packet.ErrFragmentRange, set(packettest.Build(packettest.IP{Src: a4, Dst: b4}, packettest.Raw{Proto: 17, Data: make([]byte, 20)}), 6, 0x20, 9)},
	{emptyFirst, "it has no transport header",
		packet.ErrTinyFragment, set(packettest.Build(packettest.IP{Src: a4, Dst: b4}, packettest.Raw{Proto: 50}), 6, 0x20, 0)},
	{tinyFirst, "RFC 1858, RFC 7112; where gopacket knows the header (TCP, UDP, ICMP) it refuses too",
		packet.ErrTinyFragment, packettest.Build(packettest.IP{Src: a6, Dst: b6, Extensions: []packettest.Extension{{Kind: 44, Data: []byte{0, 1}}}},
			packettest.Raw{Proto: 51, Data: []byte{33, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}})},
	{overTCP, "RFC 3128: it would overwrite flags that a filter has judged",
		packet.ErrTinyFragment, set(packettest.Build(packettest.IP{Src: a4, Dst: b4}, packettest.Raw{Proto: 6, Data: make([]byte, 20)}), 6, 0, 1)},
	{udpLength, "0 is a jumbogram (RFC 2675), more than there is a lie",
		packet.ErrTransportHeader, set(udp4(), 24, 1, 0)},
	{shortICMPv6, "every message has four octets behind type, code and checksum (RFC 4443); gopacket reads them with what follows",
		packet.ErrTransportHeader, packettest.Build(packettest.IP{Src: a6, Dst: b6}, packettest.Raw{Proto: 58, Data: make([]byte, 4)})},
	{coverage, "the checksum is to be kept right, so what it covers must be known (RFC 3828, RFC 4340)",
		packet.ErrTransportHeader, packettest.Build(packettest.IP{Src: a4, Dst: b4}, packettest.Raw{Proto: 136, Data: []byte{0, 1, 0, 2, 0, 7, 0, 0}})},
	{options, "options are for hosts; we step over the header by its length, gopacket parses them",
		0, with6(packettest.Extension{Kind: 60, Data: []byte{5, 200, 0, 0, 0, 0}})},
	{options, "an error of the sender that its receiver may answer (RFC 2675, section 3)",
		0, with6(packettest.Extension{Kind: 0, Data: []byte{0xc2, 4, 0, 1, 0, 0}})},
	{noPayload, "legal and useless (RFC 8200, section 4.7); gopacket wants a jumbogram then",
		0, packettest.Build(packettest.IP{Src: a6, Dst: b6}, packettest.Raw{Proto: 59})},
}

func udp4() []byte {
	return packettest.Build(packettest.IP{Src: a4, Dst: b4}, packettest.UDP{SrcPort: 4000, DstPort: 9000, Data: make([]byte, 12)})
}

func with6(extensions ...packettest.Extension) []byte {
	return packettest.Build(packettest.IP{Src: a6, Dst: b6, Extensions: extensions}, packettest.UDP{SrcPort: 4000, DstPort: 9000})
}

func set(b []byte, at int, octets ...byte) []byte {
	copy(b[at:], octets)
	return b
}

func jumbo() []byte {
	h := packettest.IP{Src: a6, Dst: b6, Extensions: []packettest.Extension{{Kind: 0, Data: []byte{0xc2, 4, 0, 1, 0, 16}}}}
	b := packettest.Build(h, packettest.Raw{Proto: 17, Data: make([]byte, 8)})
	return set(append(b, make([]byte, 70000)...), 4, 0, 0)
}

func TestEachDifferenceHasAnExample(t *testing.T) {
	for _, d := range differences {
		t.Run(d.name, func(t *testing.T) {
			p, err := read(d.packet), parse(d.packet)
			if p.err != nil {
				t.Errorf("gopacket: %v", p.err)
			}
			strict, lenient := []string{d.name}, []string(nil)
			if d.error == 0 {
				strict, lenient = lenient, strict
			}
			if d.error != 0 && !errors.Is(err, d.error) || d.error == 0 && err != nil {
				t.Errorf("we say %v, want %v: %s", err, d.error, d.why)
			}
			if !slices.Equal(p.strict, strict) || !slices.Equal(p.lenient, lenient) {
				t.Errorf("strict about %q, lenient about %q", p.strict, p.lenient)
			}
			compare(t, d.packet)
		})
	}
}

func parse(b []byte) error {
	var v packet.View
	return v.Parse(slices.Clone(b), packet.ChecksumComplete)
}

// ours returns the facts that package packet reports.
func ours(v *packet.View) facts {
	f := facts{
		Length: v.Len(), TTL: int(v.TTL()), Src: v.Src(), Dst: v.Dst(), Proto: v.Proto(),
		Transport: v.TransportOffset(), Payload: v.PayloadOffset(), SrcPort: v.SrcPort(), DstPort: v.DstPort(),
		TCPFlags: v.TCPFlags(), Type: v.ICMPType(), Query: v.ICMPID(), FragmentLen: v.FragmentLen(),
	}
	f.Offset, f.More, f.ID, f.Fragment = v.Fragment()
	return f
}

// compare decodes b with both parsers. If only one of them accepts b, it returns the names of
// the differences, otherwise nil.
func compare(t testing.TB, b []byte) (why []string) {
	t.Helper()
	var v packet.View
	err := v.Parse(slices.Clone(b), packet.ChecksumComplete)
	p := read(b)
	if refused := p.err != nil || len(p.strict) > 0; refused != (err != nil) {
		t.Fatalf("we say %v, gopacket %v; strict about %q, lenient about %q\n%s", err, p.err, p.strict, p.lenient, hex.Dump(head(b)))
	}
	if p.err != nil {
		return nil
	}
	if err != nil {
		known := func(d difference) bool { return d.name == p.strict[0] && errors.Is(err, d.error) }
		if len(p.strict) == 1 && len(p.lenient) == 0 && !slices.ContainsFunc(differences, known) {
			t.Fatalf("%s: we say %v\n%s", p.strict[0], err, hex.Dump(head(b)))
		}
		return p.strict
	}
	got := ours(&v)
	if !p.Fragment { // the identification of a whole packet is ignored
		got.ID, p.ID = 0, 0
	}
	if got != p.facts {
		t.Fatalf("we say    %+v\ngopacket   %+v\n%s", got, p.facts, hex.Dump(head(b)))
	}
	return p.lenient
}

func head(b []byte) []byte { return b[:min(len(b), 160)] }

// count counts the outcomes of compare over many packets.
type count map[string]int

func (c count) compare(t testing.TB, b []byte) {
	t.Helper()
	for _, why := range compare(t, b) {
		c[why]++
	}
	if parse(b) == nil {
		c["both"]++
	}
	c["all"]++
}

func TestParsersAgreeOnGeneratedAndMutatedPackets(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 5))
	seen := count{}
	n := 150_000
	if testing.Short() {
		n = 20_000
	}
	for range n {
		b := generate(rng)
		seen.compare(t, b)
		for range 3 {
			b = mutate(rng, b)
			seen.compare(t, b)
		}
	}
	t.Log(seen)
	if seen["both"] < seen["all"]/4 {
		t.Errorf("only %d of %d were read by both", seen["both"], seen["all"])
	}
	for _, d := range differences {
		if seen[d.name] == 0 && d.name != jumbogram { // a jumbogram needs 64 KiB
			t.Errorf("never occurred: %s", d.name)
		}
	}
}

func TestParsersAgreeOnRandomOctets(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 5))
	seen := count{}
	for range 200_000 {
		b := random(rng, rng.IntN(100))
		if len(b) > 5 {
			b[0] = []byte{0x45, 0x46, 0x60, b[0]}[rng.IntN(4)]
			if rng.IntN(4) > 0 { // almost correct lengths
				n := len(b) - rng.IntN(3)
				at := 2
				if b[0]>>4 == 6 {
					at, n = 4, n-40
				}
				b[at], b[at+1] = byte(n>>8), byte(n)
			}
		}
		seen.compare(t, b)
	}
	t.Log(seen)
}

// The packets come from natengine/testdata/hostile.txt.
func TestParsersAgreeOnHostilePackets(t *testing.T) {
	text, err := os.ReadFile("../../natengine/testdata/hostile.txt")
	if err != nil {
		t.Fatal(err)
	}
	seen := count{}
	for _, b := range packetsOf(string(text)) {
		seen.compare(t, b)
	}
	t.Log(seen)
	if seen["all"] < 300 {
		t.Errorf("only %d packets", seen["all"])
	}
}

// packetsOf returns the packets in the table, whose lines are indented by two tabs. It skips
// long packets, which the table does not contain in full.
func packetsOf(text string) (packets [][]byte) {
	var b []byte
	whole := true
	for line := range strings.SplitSeq(text, "\n") {
		octets, ok := strings.CutPrefix(line, "\t\t")
		if !ok {
			if len(b) > 0 && whole {
				packets = append(packets, b)
			}
			b, whole = nil, true
			continue
		}
		if strings.HasPrefix(octets, "...") {
			whole = false
			continue
		}
		o, err := hex.DecodeString(strings.ReplaceAll(octets, " ", ""))
		if err != nil {
			whole = false
		}
		b = append(b, o...)
	}
	return packets
}

func FuzzParse(f *testing.F) {
	for _, d := range differences {
		f.Add(d.packet)
	}
	rng := rand.New(rand.NewPCG(3, 5))
	for range 50 {
		f.Add(generate(rng))
	}
	f.Fuzz(func(t *testing.T, b []byte) { compare(t, b) })
}
