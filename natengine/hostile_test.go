package natengine

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

var update = flag.Bool("update", false, "write the octets in testdata/hostile.txt anew; verdicts are written by hand")

const hostileFile = "testdata/hostile.txt"

// The packets and the expected results are in testdata/hostile.txt. The start of that file
// describes its format.
func TestHostilePacketsGetTheExpectedVerdicts(t *testing.T) {
	text, err := os.ReadFile(hostileFile)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	table := hostileTable{t: t}
	for n, line := range strings.Split(strings.TrimSuffix(string(text), "\n"), "\n") {
		table.line = n + 1
		if strings.HasPrefix(line, "\t\t") { // a line of octets, which read generates again
			continue
		}
		fmt.Fprintln(&out, line)
		out.WriteString(table.read(line))
	}
	if *update {
		if err := os.WriteFile(hostileFile, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if out.String() != string(text) {
		got, want := strings.Split(out.String(), "\n"), strings.Split(string(text), "\n")
		for i := range got {
			if i >= len(want) || got[i] != want[i] {
				t.Fatalf("%s:%d: octets differ\n%s\nwant\n%s", hostileFile, i+1, got[i], want[min(i, len(want)-1)])
			}
		}
		t.Fatal("the file has lines after the generated octets")
	}
	if table.cases < 100 {
		t.Errorf("only %d cases", table.cases)
	}
}

// hostileTable is the state of reading the file: the engine of the current case and the
// results of the last send line.
type hostileTable struct {
	t       *testing.T
	line    int
	cases   int
	name    string
	engine  *Engine
	now     tick
	results map[string]int // number of packets of the last send line by result; a sweep sends one packet per length
	left    [][]byte
}

// read executes a line and returns the lines of octets to write below it.
func (h *hostileTable) read(line string) string {
	word, rest, _ := strings.Cut(line, "\t")
	switch rest = strings.TrimSpace(rest); word {
	case "case":
		h.cases++
		h.name = rest
		h.engine = newEngine(h.t, Config{}, peer46(), peerC())
		h.now = 0
	case "wait":
		seconds, err := strconv.Atoi(rest)
		if err != nil {
			h.t.Fatalf("%s:%d: %v", hostileFile, h.line, err)
		}
		h.now += at(seconds)
		h.engine.Sweep(duration(int32(h.now)))
	case "out", "in":
		dir := Outbound
		if word == "in" {
			dir = Inbound
		}
		packets, err := build(rest)
		if err != nil {
			h.t.Fatalf("%s:%d: %v", hostileFile, h.line, err)
		}
		h.results, h.left = map[string]int{}, nil
		for _, b := range packets {
			h.results[h.process(dir, b)]++
		}
		if len(packets) == 1 {
			return octets(packets[0])
		}
	case "want":
		if len(h.results) != 1 || h.results[rest] == 0 {
			h.t.Errorf("%s:%d: %s: %v, want %s", hostileFile, h.line, h.name, h.results, rest)
		}
		var s string
		for _, b := range h.left {
			s += octets(b)
		}
		return s
	case "", "#", "##", "why":
	default:
		if !strings.HasPrefix(line, "#") {
			h.t.Fatalf("%s:%d: unknown word %q", hostileFile, h.line, word)
		}
	}
	return ""
}

// process sends one packet and returns the result as text. It also checks the properties that
// hold for every packet.
func (h *hostileTable) process(dir Direction, in []byte) string {
	b := bytes.Clone(in)
	var v packet.View
	if err := v.Parse(b, packet.ChecksumComplete); err != nil {
		d := DropMalformed // as gateway/datapath counts it
		if errors.Is(err, packet.ErrTinyFragment) || errors.Is(err, packet.ErrFragmentRange) {
			d = DropFragment
		}
		return fmt.Sprintf("drop %v (%v)", d, err)
	}
	process := h.engine.Outbound
	if dir == Inbound {
		process = h.engine.Inbound
	}
	verdict := process(&v, duration(int32(h.now)))
	switch verdict.Action {
	case Discard, Hold:
		if !bytes.Equal(b, in) {
			h.t.Errorf("%s:%d: %s: the packet was changed, although it is not forwarded", hostileFile, h.line, h.name)
		}
		if verdict.Action == Discard {
			return "drop " + verdict.Drop.String()
		}
		return "hold"
	}
	h.left = append([][]byte{v.Bytes()}, verdict.Released()...)
	if p, err := packettest.Decode(in[:min(v.Len(), len(in))]); err == nil && valid(p) {
		for _, b := range h.left {
			packettest.Check(h.t, b, packettest.ValidChecksums())
		}
	}
	if n := len(verdict.Released()); n > 0 {
		return fmt.Sprintf("%v, and %d held", verdict.Action, n)
	}
	return verdict.Action.String()
}

func valid(p packettest.Packet) (ok bool) {
	defer func() { ok = recover() == nil && ok }() // the reference panics on lengths that it does not expect
	return packettest.ValidChecksums()(p) == nil
}

// octets returns a packet in hex, in words of four digits. A long packet is shown by its
// beginning, its length and a hash.
func octets(b []byte) string {
	const line, lines = 32, 4
	var s strings.Builder
	for at := 0; at < len(b) && at < line*lines; at += line {
		s.WriteString("\t\t")
		for i := at; i < min(at+line, len(b)); i += 4 {
			if i > at {
				s.WriteByte(' ')
			}
			s.WriteString(hex.EncodeToString(b[i:min(i+4, len(b))]))
		}
		s.WriteByte('\n')
	}
	if len(b) > line*lines {
		h := fnv.New32a()
		h.Write(b)
		fmt.Fprintf(&s, "\t\t... %d octets, FNV-1a %08x\n", len(b), h.Sum32())
	}
	return s.String()
}

// build returns the packet or packets that a line describes.
func build(text string) (packets [][]byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%s: %v", text, r)
		}
	}()
	b := builder{words: strings.Fields(text)}
	packets = b.packet()
	if len(b.words) > 0 {
		panic("left over: " + b.words[0])
	}
	return packets, nil
}

// builder parses a description word by word. It panics with an error, which build returns.
type builder struct{ words []string }

func (b *builder) next() string {
	w := b.words[0]
	b.words = b.words[1:]
	return w
}

func (b *builder) peek() string {
	if len(b.words) == 0 {
		return ""
	}
	return b.words[0]
}

func (b *builder) number() int {
	n, err := strconv.ParseInt(b.next(), 0, 64)
	if err != nil {
		panic(err)
	}
	return int(n)
}

// count returns the number that follows in the description, or n if no number follows.
func (b *builder) count(n int) int {
	if w := b.peek(); w != "" && w[0] >= '0' && w[0] <= '9' {
		return b.number()
	}
	return n
}

func (b *builder) octets(w string) []byte {
	o, err := hex.DecodeString(w)
	if err != nil {
		panic(err)
	}
	return o
}

func filler(n int) []byte {
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i * 7)
	}
	return data
}

// packet parses one packet: addresses, header fields, body, changes. A packet in brackets is
// quoted in an ICMP error.
func (b *builder) packet() [][]byte {
	if b.peek() == "hex" {
		b.next()
		return [][]byte{b.octets(b.next())}
	}
	h := packettest.IP{Src: netip.MustParseAddr(b.next())}
	if w := b.next(); w != ">" {
		panic("no > but " + w)
	}
	h.Dst = netip.MustParseAddr(b.next())
	b.fields(&h)
	packets := [][]byte{packettest.Build(h, b.body())}
	for b.peek() == "|" {
		b.next()
		packets = b.change(packets)
	}
	return packets
}

func (b *builder) fields(h *packettest.IP) {
	for {
		name, value, _ := strings.Cut(b.peek(), "=")
		number := func() int {
			n, err := strconv.ParseInt(value, 0, 64)
			if err != nil {
				panic(err)
			}
			return int(n)
		}
		switch name {
		case "ttl":
			h.TTL = uint8(number())
		case "id":
			h.ID = uint16(number())
		case "df":
			h.DF = true
		case "options":
			h.Options = b.octets(value)
		case "extension":
			kind, data, _ := strings.Cut(value, ":")
			k, err := strconv.Atoi(kind)
			if err != nil {
				panic(err)
			}
			h.Extensions = append(h.Extensions, packettest.Extension{Kind: uint8(k), Data: b.octets(data)})
		default:
			return
		}
		b.next()
	}
}

func (b *builder) body() packettest.Body {
	switch kind := b.next(); kind {
	case "udp":
		return packettest.UDP{SrcPort: uint16(b.number()), DstPort: uint16(b.number()), Data: filler(b.count(4))}
	case "tcp":
		s := packettest.TCP{SrcPort: uint16(b.number()), DstPort: uint16(b.number()), Window: 512}
		for _, letter := range b.next() {
			if letter != '-' {
				s.Flags |= 1 << strings.IndexRune("FSRPAUEC", letter)
			}
		}
		if name, value, _ := strings.Cut(b.peek(), "="); name == "options" {
			b.next()
			s.Options = b.octets(value)
		}
		s.Data = filler(b.count(0))
		return s
	case "echo", "reply":
		return packettest.Echo{Reply: kind == "reply", ID: uint16(b.number()), Data: filler(b.count(4))}
	case "icmp":
		e := packettest.ICMPError{Type: uint8(b.number()), Code: uint8(b.number()), Rest: uint32(b.count(0))}
		if b.peek() == "[" {
			b.next()
			e.Quote = b.packet()[0]
			if w := b.next(); w != "]" {
				panic("no ] but " + w)
			}
		}
		if name, value, _ := strings.Cut(b.peek(), "="); name == "extension" {
			b.next()
			e.Extension = b.octets(value)
		}
		return e
	case "proto":
		return packettest.Raw{Proto: uint8(b.number()), Data: filler(b.count(16))}
	default:
		panic("no body " + kind)
	}
}

// change applies one change to each packet. The change "cut" with a range makes one packet of
// each length in the range.
func (b *builder) change(packets [][]byte) [][]byte {
	p := packets[0]
	switch kind := b.next(); kind {
	case "cut":
		from, to, sweep := strings.Cut(b.next(), "-")
		first, err := strconv.Atoi(from)
		if err != nil {
			panic(err)
		}
		last := first
		if sweep {
			if last, err = strconv.Atoi(to); err != nil {
				panic(err)
			}
		}
		packets = nil
		for n := first; n <= last; n++ {
			packets = append(packets, bytes.Clone(p[:n]))
		}
	case "shorten": // cut, and correct the length in the header
		b.words = append([]string{"cut"}, b.words...)
		packets = b.change(packets)
		for _, p := range packets {
			if p[0]>>4 == 4 {
				binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
				sumHeader(p)
			} else {
				binary.BigEndian.PutUint16(p[4:], uint16(len(p)-40))
			}
		}
	case "set":
		at, o := b.number(), b.octets(b.next())
		copy(p[at:at+len(o)], o)
	case "sum":
		sumHeader(p)
	case "pad":
		packets[0] = append(p, filler(b.number())...)
	case "fragment":
		off, size := b.number(), b.number()
		more := b.peek() == "more"
		if more {
			b.next()
		}
		packets[0] = pieceOf(p, off, size, more, uint32(b.count(77)))
	default:
		panic("no change " + kind)
	}
	return packets
}

func sumHeader(p []byte) {
	n := int(p[0]&15) * 4
	p[10], p[11] = 0, 0
	binary.BigEndian.PutUint16(p[10:], packettest.InternetChecksum(p[:n]))
}

// pieceOf returns a fragment with octets [off, off+size) of the part after the IP header,
// which includes IPv6 extension headers. Octets beyond the end are zero.
func pieceOf(whole []byte, off, size int, more bool, id uint32) []byte {
	at, word := 40, uint16(0)
	v4 := whole[0]>>4 == 4
	if v4 {
		at = int(whole[0]&15) * 4
	}
	data := make([]byte, size)
	if body := whole[at:]; off < len(body) {
		copy(data, body[off:])
	}
	f := bytes.Clone(whole[:at])
	if v4 {
		if more {
			word = 1 << 13
		}
		binary.BigEndian.PutUint16(f[2:], uint16(at+size))
		binary.BigEndian.PutUint16(f[4:], uint16(id))
		binary.BigEndian.PutUint16(f[6:], word|uint16(off/8))
		sumHeader(f)
		return append(f, data...)
	}
	if more {
		word = 1
	}
	binary.BigEndian.PutUint16(f[4:], uint16(8+size))
	f = append(f, f[6], 0)
	f[6] = 44
	f = binary.BigEndian.AppendUint16(f, uint16(off)|word)
	f = binary.BigEndian.AppendUint32(f, id)
	return append(f, data...)
}
