package differential

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
)

// randomRounds is the number of rounds per plan. With it, every combination of protocol, size and
// options occurs with every pair of masks, and all rounds take a few seconds.
const randomRounds = 150

// Each round has its own random generator, so -run with the plan and the number repeats a
// failing round.
func TestEngineEqualsKernelOnRandomPackets(t *testing.T) {
	for i, p := range plans {
		t.Run(p.name, func(t *testing.T) {
			x := newExchange(t, p, statefulRules)
			for round := range randomRounds {
				rng := rand.New(rand.NewPCG(uint64(i), uint64(round)))
				ok := t.Run(fmt.Sprint(round), func(t *testing.T) {
					run := x.in(t)
					run.sendRandom(rng)
				})
				if !ok && !testing.Verbose() {
					t.Fatal("the other rounds of this plan would say the same")
				}
			}
		})
	}
}

// sendRandom sends one packet. Sometimes a reply or an ICMP error follows.
func (x *exchange) sendRandom(rng *rand.Rand) {
	from := side(rng.IntN(2))
	src, dst := x.pods(from, 1+rng.IntN(1<<20))
	port := x.freshPort()
	data := make([]byte, []int{0, 1, 2, 7, rng.IntN(1400), rng.IntN(1400), rng.IntN(6000)}[rng.IntN(7)])
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	h := header{tos: byte(rng.Uint32()), ttl: byte(3 + rng.IntN(253)), id: uint16(1 + rng.IntN(65535))}
	if len(data) <= 1400 {
		h.flags = []uint16{0, flagDF}[rng.IntN(2)]
		h.options = [][]byte{nil, nil, nil, {1, 1, 1, 0}, {148, 4, 0, 0}, {158, 8, 9, 9, 9, 9, 9, 9}}[rng.IntN(6)]
	}

	var b []byte
	switch rng.IntN(6) {
	case 0, 1:
		s := udp(src, dst, port, uint16(1+rng.IntN(65535)), data)
		if rng.IntN(6) == 0 {
			s[6], s[7] = 0, 0
		}
		b = ip(h, src, dst, protoUDP, s)
	case 2, 3:
		// Flags of segments that may begin a connection in conntrack, which also accepts
		// segments in mid-connection.
		flags := []uint8{syn, syn | 0xc0, ack, ack | psh}[rng.IntN(4)]
		options := [][]byte{nil, {2, 4, 0x05, 0xb4}, {1, 3, 3, 7, 4, 2, 1, 1}}[rng.IntN(3)]
		b = ip(h, src, dst, protoTCP, tcp(src, dst, port, uint16(1+rng.IntN(65535)), rng.Uint32(), rng.Uint32(), flags, options, data))
	case 4:
		b = ip(h, src, dst, protoICMP, icmp(echoRequest, 0, uint32(port)<<16|rng.Uint32N(1<<16), data))
	case 5:
		proto := []uint8{protoTest, 254, 50, 89, 4}[rng.IntN(5)]
		b = ip(h, src, dst, proto, append(binary.BigEndian.AppendUint32(nil, rng.Uint32()), data...))
	}

	packets := [][]byte{b}
	if len(b) > 1500 || len(data) > 16 && h.flags == 0 && h.options == nil && rng.IntN(4) == 0 {
		packets = randomFragments(rng, b)
	}
	got := x.send(from, packets...)
	arrived, _ := reassemble(got)
	if proto := b[9]; (proto == protoUDP || proto == protoICMP) && rng.IntN(2) == 0 {
		x.send(from.other(), answer(arrived, data[:min(len(data), 1400)]))
	}
	if len(packets) == 1 && rng.IntN(2) == 0 {
		kind, rest := []uint8{unreachable, timeExceeded, parameterProblem}[rng.IntN(3)], uint32(0)
		if kind == parameterProblem {
			rest = rng.Uint32N(256) << 24 // the pointer; the other octets are unused or a length (RFC 4884)
		}
		quote := 8 + rng.IntN(len(segment(arrived))+1)
		if most := 1500 - 28 - headerLen(arrived); quote > most {
			quote = most
		}
		if b[9] == protoTCP && (quote == 18 || quote == 19) { // see TestEngineUpdatesAQuotedTCPChecksumIfPresent
			quote = 17
		}
		if len(segment(arrived)) >= 8 { // conntrack requires a quote of this length
			x.send(from.other(), icmpAbout(arrived, destination(arrived), kind, byte(rng.IntN(2)), rest, quote))
		}
	}
}

// randomFragments cuts a datagram at random offsets, into fragments of at most 1440 octets,
// and shuffles them.
func randomFragments(rng *rand.Rand, b []byte) [][]byte {
	size := len(segment(b))
	var cuts []int
	for at := 0; ; {
		at += 8 * (5 + rng.IntN(176)) // the first fragment contains the transport header with options
		if at >= size {
			break
		}
		cuts = append(cuts, at)
	}
	f := fragment(b, cuts...)
	rng.Shuffle(len(f), func(i, j int) { f[i], f[j] = f[j], f[i] })
	return f
}
