package differential

import (
	"bytes"
	"net/netip"
	"testing"
)

func TestEngineEqualsKernelNETMAP(t *testing.T) {
	for _, p := range plans {
		t.Run(p.name, func(t *testing.T) {
			x := newExchange(t, p, statefulRules)
			for _, c := range conversations {
				t.Run(c.name, func(t *testing.T) {
					for _, from := range []side{A, B} {
						run := x.in(t)
						c.run(run, from)
					}
				})
			}
		})
	}
}

// conversations are the exchanges that the tests run on every plan, twice each: once begun by A and
// once by B.
var conversations = []struct {
	name string
	run  func(x *exchange, from side)
}{
	{"UDP and its answer", func(x *exchange, from side) {
		src, dst := x.pods(from, 5)
		port := x.freshPort()
		got := x.send(from, ip(header{}, src, dst, protoUDP, udp(src, dst, port, 53, []byte("question"))))
		x.send(from.other(), answer(got[0], []byte("answer")))
	}},
	{"UDP of every length up to 64", func(x *exchange, from side) {
		src, dst := x.pods(from, 6)
		port := x.freshPort()
		for n := range 65 {
			x.send(from, ip(header{id: uint16(n + 1)}, src, dst, protoUDP, udp(src, dst, port, 9, bytes.Repeat([]byte{0xa5}, n))))
		}
	}},
	{"UDP without a checksum", func(x *exchange, from side) {
		src, dst := x.pods(from, 7)
		s := udp(src, dst, x.freshPort(), 53, []byte("no checksum"))
		s[6], s[7] = 0, 0
		got := x.send(from, ip(header{}, src, dst, protoUDP, s))
		if sum := segment(got[0])[6:8]; sum[0]|sum[1] != 0 {
			x.Errorf("arrived with checksum % x", sum)
		}
	}},
	{"UDP whose checksum is 0xffff somewhere on the way, and ICMP errors about it", func(x *exchange, from side) {
		src, dst := x.pods(from, 8)
		seenSrc, ownDst := x.plan.podSeen(from, 8), x.plan.pod(from.other(), 8)
		for _, at := range [][2]netip.Addr{{src, dst}, {seenSrc, dst}, {seenSrc, ownDst}} {
			// The first two octets of the data are chosen so that the checksum at the other side
			// becomes zero, which is sent as 0xffff (RFC 768).
			port, data := x.freshPort(), []byte{0, 0, 1, 2, 3, 4}
			rest := udp(at[0], at[1], port, 7, data)
			copy(data, rest[6:8])
			if there := udp(at[0], at[1], port, 7, data); there[6] != 0xff || there[7] != 0xff {
				x.Fatalf("the checksum between %v is % x", at, there[6:8])
			}
			x.errorsAbout(from, ip(header{}, src, dst, protoUDP, udp(src, dst, port, 7, data)))
		}
	}},
	{"a whole TCP conversation", func(x *exchange, from side) { x.tcpConversation(from, false) }},
	{"TCP ended by RST", func(x *exchange, from side) { x.tcpConversation(from, true) }},
	{"TCP SYN with options", func(x *exchange, from side) {
		src, dst := x.pods(from, 9)
		options := []byte{2, 4, 0x05, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7}
		x.send(from, ip(header{flags: flagDF}, src, dst, protoTCP, tcp(src, dst, x.freshPort(), 80, 1000, 0, syn, options, nil)))
	}},
	{"ICMP echo both ways", func(x *exchange, from side) {
		src, dst := x.pods(from, 10)
		for seq := range uint32(3) {
			id := uint32(x.freshPort()) << 16
			got := x.send(from, ip(header{}, src, dst, protoICMP, icmp(echoRequest, 0, id|seq, []byte("abcdefghijk"))))
			x.send(from.other(), answer(got[0], []byte("abcdefghijk")))
		}
	}},
	{"an unknown protocol and its answer", func(x *exchange, from side) {
		src, dst := x.pods(from, 11)
		got := x.send(from, ip(header{}, src, dst, protoTest, []byte("whatever this may be")))
		x.send(from.other(), answer(got[0], []byte("and back")))
	}},
	{"a protocol without any octet of payload", func(x *exchange, from side) {
		src, dst := x.pods(from, 12)
		x.send(from, ip(header{}, src, dst, protoTest, nil))
	}},
	{"SCTP, whose CRC does not cover addresses", func(x *exchange, from side) {
		src, dst := x.pods(from, 13)
		init := []byte{1, 0, 0, 20, 0, 0, 0, 9, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 5}
		x.send(from, ip(header{}, src, dst, protoSCTP, sctp(x.freshPort(), 36412, 0, init)))
	}},
	{"DF, type of service and identification do not change", func(x *exchange, from side) {
		src, dst := x.pods(from, 14)
		for i, h := range []header{{flags: flagDF}, {tos: 0xb9}, {id: 0xffff, ttl: 3}, {ttl: 255}, {flags: 0x8000}} {
			got := x.send(from, ip(h, src, dst, protoUDP, udp(src, dst, x.freshPort(), 99, make([]byte, i))))
			if got[0][1] != h.tos || fragmentWord(got[0]) != h.flags {
				x.Errorf("header %+v arrived as % x", h, got[0][:20])
			}
		}
	}},
	{"IPv4 options do not change", func(x *exchange, from side) {
		src, dst := x.pods(from, 15)
		for _, options := range [][]byte{
			{1, 1, 1, 1},
			{148, 4, 0, 0},                        // router alert
			{1, 158, 6, 1, 2, 3, 4, 1},            // an experimental option
			bytes.Repeat([]byte{1}, 40),           // the longest possible header
			append([]byte{0}, make([]byte, 7)...), // end of options, then padding
		} {
			port := x.freshPort()
			x.send(from, ip(header{options: options}, src, dst, protoUDP, udp(src, dst, port, 99, []byte("after options"))))
			x.send(from, ip(header{options: options}, src, dst, protoTCP, tcp(src, dst, port, 99, 1, 0, syn, nil, nil)))
		}
	}},
	{"a full packet of 1500 octets", func(x *exchange, from side) {
		src, dst := x.pods(from, 16)
		x.send(from, ip(header{flags: flagDF}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 99, make([]byte, 1472))))
	}},
	{"ICMP errors about UDP", func(x *exchange, from side) {
		src, dst := x.pods(from, 17)
		port := x.freshPort()
		x.errorsAbout(from, ip(header{}, src, dst, protoUDP, udp(src, dst, port, 53, []byte("nobody listens here"))))
	}},
	{"ICMP errors about UDP without a checksum", func(x *exchange, from side) {
		src, dst := x.pods(from, 18)
		s := udp(src, dst, x.freshPort(), 53, []byte("nobody listens here"))
		s[6], s[7] = 0, 0
		x.errorsAbout(from, ip(header{}, src, dst, protoUDP, s))
	}},
	{"ICMP errors about TCP", func(x *exchange, from side) {
		src, dst := x.pods(from, 19)
		x.errorsAbout(from, ip(header{flags: flagDF}, src, dst, protoTCP, tcp(src, dst, x.freshPort(), 443, 77, 0, syn, []byte{2, 4, 5, 0xb4}, nil)))
	}},
	{"ICMP errors about an echo request", func(x *exchange, from side) {
		src, dst := x.pods(from, 20)
		x.errorsAbout(from, ip(header{}, src, dst, protoICMP, icmp(echoRequest, 0, uint32(x.freshPort())<<16|1, []byte("are you there"))))
	}},
	{"ICMP errors about an unknown protocol", func(x *exchange, from side) {
		src, dst := x.pods(from, 21)
		x.errorsAbout(from, ip(header{}, src, dst, protoTest, []byte("nobody speaks this protocol")))
	}},
	{"ICMP errors about a packet with options", func(x *exchange, from side) {
		src, dst := x.pods(from, 22)
		x.errorsAbout(from, ip(header{options: []byte{1, 1, 1, 148, 4, 0, 0, 1}}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, []byte("options in the quote"))))
	}},
	{"ICMP errors with extensions", func(x *exchange, from side) {
		src, dst := x.pods(from, 32)
		got := x.send(from, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 33434, bytes.Repeat([]byte{0x40}, 300))))[0]
		// RFC 4884: 32 words of quote are followed by the extension structure with an MPLS label
		// stack (RFC 4950), as in an error that a router sends during a traceroute.
		structure := []byte{0x20, 0, 0, 0, 0, 8, 1, 1, 0x00, 0x01, 0x01, 0xff}
		sum := internetSum(structure)
		structure[2], structure[3] = byte(sum>>8), byte(sum)
		message := icmp(timeExceeded, 0, 32<<16, append(bytes.Clone(got[:128]), structure...))
		back := x.send(from.other(), ip(header{}, destination(got), source(got), protoICMP, message))[0]
		if !bytes.HasSuffix(back, structure) {
			x.Errorf("the extension arrived as % x", back[len(back)-len(structure):])
		}
	}},
	{"ICMP errors about the answer", func(x *exchange, from side) {
		src, dst := x.pods(from, 23)
		got := x.send(from, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, []byte("question"))))
		x.errorsAbout(from.other(), answer(got[0], []byte("an answer that nobody wants any more")))
	}},
	{"ICMP error about a first fragment", func(x *exchange, from side) {
		for _, d := range x.datagrams(from, 31) {
			first := x.send(from, fragment(d, 1000, 2000)...)[0]
			x.send(from.other(), icmpAbout(first, destination(first), timeExceeded, 1, 0, 8))
		}
	}},
	{"fragments in order", func(x *exchange, from side) {
		for _, d := range x.datagrams(from, 24) {
			x.send(from, fragment(d, 1000, 2000)...)
		}
	}},
	{"fragments out of order", func(x *exchange, from side) {
		for _, d := range x.datagrams(from, 25) {
			f := fragment(d, 24, 1200, 1208, 2400)
			x.send(from, f[3], f[0], f[4], f[2], f[1])
		}
	}},
	{"fragments, the first one last", func(x *exchange, from side) {
		for _, d := range x.datagrams(from, 26) {
			f := fragment(d, 1400, 2800)
			x.send(from, f[2], f[1], f[0])
		}
	}},
	{"fragments and their answer in fragments", func(x *exchange, from side) {
		for _, d := range x.datagrams(from, 27) {
			got, ok := reassemble(x.send(from, fragment(d, 1000, 2000)...))
			if !ok {
				x.Fatal("the datagram that arrived is not whole")
			}
			if got[9] != protoTCP { // the conversations above include TCP replies
				x.send(from.other(), fragment(answer(got, make([]byte, 2000)), 800, 1600)...)
			}
		}
	}},
	{"a mapped endpoint and its replies", func(x *exchange, from side) {
		src, dst := x.plan.pod(from, 28), x.plan.mapped(from.other())
		port := x.freshPort()
		for _, b := range [][]byte{
			ip(header{}, src, dst, protoUDP, udp(src, dst, port, 53, []byte("question"))),
			ip(header{}, src, dst, protoICMP, icmp(echoRequest, 0, uint32(port)<<16, []byte("ping"))),
		} {
			got := x.send(from, b)
			if destination(got[0]) != x.plan.endpoint(from.other()) {
				x.Errorf("arrived at %v, not at the endpoint", destination(got[0]))
			}
			x.send(from.other(), answer(got[0], []byte("answer")))
		}
		x.tcpBetween(from, src, dst, false)
		x.errorsAbout(from, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, []byte("closed"))))
	}},
	{"a mapped endpoint receives fragments", func(x *exchange, from side) {
		src, dst := x.plan.pod(from, 29), x.plan.mapped(from.other())
		d := ip(header{id: x.freshPort()}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, make([]byte, 3000)))
		f := fragment(d, 1000, 2000)
		got, _ := reassemble(x.send(from, f...))
		x.send(from.other(), fragment(answer(got, make([]byte, 1600)), 800)...)
	}},
}

// answer returns the receiver's reply to packet b.
func answer(b, data []byte) []byte {
	src, dst := destination(b), source(b)
	s := segment(b)
	port := func(at int) uint16 { return uint16(s[at])<<8 | uint16(s[at+1]) }
	var reply []byte
	switch b[9] {
	case protoUDP:
		reply = udp(src, dst, port(2), port(0), data)
	case protoICMP:
		reply = icmp(echoReply, 0, uint32(port(4))<<16|uint32(port(6)), data)
	default:
		reply = data
	}
	return ip(header{id: 0x4321}, src, dst, b[9], reply)
}

// datagrams returns datagrams of each kind that must be sent in fragments. n selects the pods.
func (x *exchange) datagrams(from side, n int) [][]byte {
	src, dst := x.pods(from, n)
	long := make([]byte, 3333)
	for i := range long {
		long[i] = byte(i * 7)
	}
	without := udp(src, dst, x.freshPort(), 99, long)
	without[6], without[7] = 0, 0
	segments := []struct {
		proto   uint8
		segment []byte
	}{
		{protoUDP, udp(src, dst, x.freshPort(), 99, long)},
		{protoUDP, without},
		{protoICMP, icmp(echoRequest, 0, uint32(x.freshPort())<<16, long)},
		{protoTCP, tcp(src, dst, x.freshPort(), 99, 5, 0, syn, nil, long)},
		{protoTest, long},
	}
	var all [][]byte
	for _, s := range segments {
		all = append(all, ip(header{id: x.freshPort()}, src, dst, s.proto, s.segment))
	}
	return all
}

// tcpConversation sends every kind of segment: SYN, SYN ACK, data in both directions, and FIN
// from both sides or RST.
func (x *exchange) tcpConversation(from side, reset bool) {
	x.Helper()
	src, dst := x.pods(from, 30)
	x.tcpBetween(from, src, dst, reset)
}

func (x *exchange) tcpBetween(client side, src, dst netip.Addr, reset bool) {
	x.Helper()
	server, port := client.other(), x.freshPort()
	say := func(seq, ackno uint32, flags uint8, data string) []byte {
		return x.send(client, ip(header{flags: flagDF}, src, dst, protoTCP, tcp(src, dst, port, 80, seq, ackno, flags, nil, []byte(data))))[0]
	}
	got := say(100, 0, syn, "")
	me, you := destination(got), source(got)
	reply := func(seq, ackno uint32, flags uint8, data string) {
		x.send(server, ip(header{flags: flagDF}, me, you, protoTCP, tcp(me, you, 80, sourcePort(got), seq, ackno, flags, nil, []byte(data))))
	}
	reply(500, 101, syn|ack, "")
	say(101, 501, ack, "")
	say(101, 501, psh|ack, "GET / HTTP/1.1\r\n\r\n")
	reply(501, 119, ack, "")
	reply(501, 119, psh|ack, "HTTP/1.1 204 No Content\r\n\r\n")
	if reset {
		say(119, 528, rst|ack, "")
		return
	}
	say(119, 528, fin|ack, "")
	reply(528, 120, fin|ack, "")
	say(120, 529, ack, "")
}

// errorsAbout sends a packet and then every ICMP error that its receiver might send about it. The
// error quotes the whole packet, or its header and at least eight octets of payload, because
// conntrack ignores an error that quotes less.
func (x *exchange) errorsAbout(from side, b []byte) {
	x.Helper()
	got := x.send(from, b)[0]
	me := destination(got)
	for _, quote := range []int{8, 12, 17, -1} {
		for _, e := range []struct {
			kind, code uint8
			rest       uint32
		}{
			{unreachable, 3, 0}, {unreachable, 13, 0}, {unreachable, fragmentationNeeded, 1280}, {timeExceeded, 0, 0}, {timeExceeded, 1, 0}, {parameterProblem, 0, 20 << 24}, {4, 0, 0},
		} {
			back := x.send(from.other(), icmpAbout(got, me, e.kind, e.code, e.rest, quote))[0]
			// The sender must see its own packet in the quote. Only the values that were translated
			// on the path may differ.
			inner := segment(back)[8:]
			if source(inner) != source(b) || destination(inner) != destination(b) {
				x.Errorf("error %d/%d quotes %v -> %v, sent was %v -> %v", e.kind, e.code, source(inner), destination(inner), source(b), destination(b))
			}
			if n := min(len(inner), len(b)); quote < 0 && !bytes.Equal(inner[:n], b[:n]) {
				x.Errorf("error %d/%d quotes\n% x, sent was\n% x", e.kind, e.code, inner, b)
			}
		}
	}
}
