package packettest

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"testing"
)

// RFC 1071, section 3: the sum of 00 01 f2 03 f4 f5 f6 f7 is ddf2.
func TestInternetChecksumMatchesTheExampleOfRFC1071(t *testing.T) {
	if got := InternetChecksum([]byte{0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7}); got != ^uint16(0xddf2) {
		t.Errorf("got %#04x", got)
	}
	if got := InternetChecksum([]byte{0, 1, 0xf2, 3}, []byte{0xf4, 0xf5, 0xf6, 0xf7}); got != ^uint16(0xddf2) {
		t.Errorf("in two parts: got %#04x", got)
	}
}

// This header is a common textbook example of the IPv4 header checksum, b861.
func TestBuildMatchesTextbookHeader(t *testing.T) {
	want := "450000730000400040" + "11" + "b861" + "c0a80001" + "c0a800c7"
	got := Build(IP{Src: netip.MustParseAddr("192.168.0.1"), Dst: netip.MustParseAddr("192.168.0.199"), DF: true},
		UDP{SrcPort: 1234, DstPort: 53, Data: make([]byte, 0x73-28)})
	if hex.EncodeToString(got[:20]) != want {
		t.Errorf("got  %x\nwant %s", got[:20], want)
	}
	Check(t, got, ValidChecksums(), Ports(1234, 53), Proto(17), TTL(64))
}

func TestCheckersReportWrongPackets(t *testing.T) {
	a, b := netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")
	good := Build(IP{Src: a, Dst: b}, TCP{SrcPort: 1, DstPort: 2, Flags: ACK, Data: []byte("data")})
	if err := all(MustDecode(good), []Checker{ValidChecksums(), Src(a), Dst(b), Ports(1, 2), Flags(ACK), Data([]byte("data"))}); err != nil {
		t.Error(err)
	}
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 0x40
		p, err := Decode(bad)
		if err == nil && ValidChecksums()(p) == nil && i > 3 && i != 6 && i != 7 { // not covered: flow label, hop limit, next header
			t.Errorf("octet %d: not noticed", i)
		}
	}
	if PartialChecksum()(MustDecode(good)) == nil || PartialChecksum()(MustDecode(Partial(good))) != nil {
		t.Error("partial checksum misjudged")
	}
}

func TestFragmentsCarryTheWholeDatagram(t *testing.T) {
	for _, addrs := range [][2]string{{"10.0.0.1", "10.0.0.2"}, {"fd00::1", "fd00::2"}} {
		whole := Build(IP{Src: netip.MustParseAddr(addrs[0]), Dst: netip.MustParseAddr(addrs[1])}, UDP{Data: make([]byte, 100)})
		var data []byte
		for _, f := range Fragments(whole, 48, 77) {
			p := MustDecode(f)
			if p.FragmentOffset != len(data) || p.FragmentID != 77 || p.Proto != 17 {
				t.Errorf("%+v", p)
			}
			data = append(data, f[p.TransportOffset:]...)
			Check(t, f, ValidChecksums())
		}
		if !bytes.Equal(data, MustDecode(whole).Transport) {
			t.Error("data differs")
		}
	}
}
