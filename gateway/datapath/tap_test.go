package datapath_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// record is a packet of a pcapng file.
type record struct {
	place, comment string
	outbound       bool
	data           []byte
	length         int
}

func (r record) src() netip.Addr {
	if r.data[0]>>4 == 6 {
		return netip.AddrFrom16([16]byte(r.data[8:24]))
	}
	return netip.AddrFrom4([4]byte(r.data[12:16]))
}

func (r record) dst() netip.Addr {
	if r.data[0]>>4 == 6 {
		return netip.AddrFrom16([16]byte(r.data[24:40]))
	}
	return netip.AddrFrom4([4]byte(r.data[16:20]))
}

func (r record) String() string {
	direction := "in"
	if r.outbound {
		direction = "out"
	}
	return fmt.Sprintf("%s %s %s>%s %d/%d %q", r.place, direction, r.src(), r.dst(), len(r.data), r.length, r.comment)
}

// pcapngOptions parses a list of pcapng options.
func pcapngOptions(b []byte) map[uint16]string {
	all := make(map[uint16]string)
	for len(b) >= 4 {
		code, n := binary.LittleEndian.Uint16(b), int(binary.LittleEndian.Uint16(b[2:]))
		if code == 0 {
			break
		}
		all[code] = string(b[4 : 4+n])
		b = b[4+(n+3)&^3:]
	}
	return all
}

// records parses a pcapng file. It fails the test if the file is invalid.
func records(t testing.TB, file []byte) (all []record, ifdrop uint64) {
	t.Helper()
	le := binary.LittleEndian
	var interfaces []string
	for len(file) > 0 {
		kind, size := le.Uint32(file), le.Uint32(file[4:])
		if size%4 != 0 || int(size) > len(file) || le.Uint32(file[size-4:]) != size {
			t.Fatalf("a block of type %x says that it has %d octets, of %d", kind, size, len(file))
		}
		body := file[8 : size-4]
		switch kind {
		case 0x0a0d0d0a:
		case 1:
			interfaces = append(interfaces, pcapngOptions(body[8:])[2])
		case 6:
			n := int(le.Uint32(body[12:]))
			o := pcapngOptions(body[20+(n+3)&^3:])
			all = append(all, record{interfaces[le.Uint32(body)], o[1], o[2][0] == 2, body[20 : 20+n], int(le.Uint32(body[16:]))})
		case 5:
			ifdrop += le.Uint64([]byte(pcapngOptions(body[12:])[5]))
		default:
			t.Fatalf("a block of type %x", kind)
		}
		file = file[size:]
	}
	return all, ifdrop
}

// A recorder records a capture of a tunnel.
type recorder struct {
	*capture.Capture
	tunnel *datapath.Tunnel
	file   bytes.Buffer
	done   chan error
}

func startRecorder(s *side, o capture.Options) *recorder {
	r := &recorder{Capture: capture.New(o, "test", map[string]string{"b": "beta"}), tunnel: s.tunnel, done: make(chan error, 1)}
	s.tunnel.SetCapture(r.Capture)
	go func() { r.done <- r.WriteTo(context.Background(), &r.file, func() error { return nil }) }()
	return r
}

func (r *recorder) stop(t testing.TB) []byte {
	t.Helper()
	r.tunnel.SetCapture(nil)
	r.End("test")
	if err := <-r.done; err != nil {
		t.Fatal(err)
	}
	return r.file.Bytes()
}

// scene is two gateways that have a session; the channels receive the packets that arrive at each
// side.
type scene struct {
	a, b       *side
	atA, atB   chan []byte
	secret     []byte
	remote     netip.Addr // b's pod, as a sees it
	seenRemote netip.Addr // a's pod, as b sees it
}

func newScene(t testing.TB, p plan) *scene {
	t.Helper()
	network := &memlink.Network{}
	a, b := startGateways(t, network, p, datapath.Options{})
	s := &scene{a: a, b: b, atA: make(chan []byte, 1000), atB: make(chan []byte, 1000), secret: []byte("what a pod says to another"), remote: b.seenAddr(b.pod2), seenRemote: a.seenAddr(a.pod)}
	collect := func(to chan []byte) func([][]byte) error {
		return func(bufs [][]byte) error {
			select {
			case to <- bytes.Join(bufs, nil):
			default:
			}
			return nil
		}
	}
	a.link.OnReceive(collect(s.atA))
	b.link.OnReceive(collect(s.atB))
	s.send(t, s.a, s.atB, s.datagram(a.pod, s.remote))
	return s
}

func (s *scene) datagram(from, to netip.Addr) []byte {
	return plain(packettest.Build(packettest.IP{Src: from, Dst: to}, packettest.UDP{SrcPort: 4000, DstPort: 5300, Data: s.secret}))
}

// send makes a side send a packet, and waits until it arrives in the channel received.
func (s *scene) send(t testing.TB, from *side, received chan []byte, p []byte) {
	t.Helper()
	if !from.link.Inject(p) {
		t.Fatal("the link's queue is full")
	}
	arrived(t, received)
}

func arrived(t testing.TB, received chan []byte) []byte {
	t.Helper()
	select {
	case p := <-received:
		return p
	case <-time.After(20 * time.Second):
		t.Fatal("a packet did not arrive")
		return nil
	}
}

// settle waits until the outbound goroutine and the other side have handled everything sent
// before. The other side may deliver a superpacket in any number of pieces.
func (s *scene) settle(t testing.TB) {
	t.Helper()
	if !s.a.link.Inject(s.datagram(s.a.node, s.b.seenAddr(s.b.external))) {
		t.Fatal("the link's queue is full")
	}
	for !bytes.Contains(arrived(t, s.atB), s.secret) {
	}
}

func TestCaptureShowsAPacketAtEachPointWithItsVerdict(t *testing.T) {
	for _, p := range plans {
		t.Run(p.name, func(t *testing.T) {
			s := newScene(t, p)
			a := s.a
			r := startRecorder(a, capture.DefaultOptions())
			s.send(t, a, s.atB, s.datagram(a.pod, s.remote))
			s.send(t, s.b, s.atA, s.datagram(s.b.pod2, s.seenRemote))
			s.send(t, a, s.atB, s.datagram(a.node, s.remote))
			nowhere := netip.MustParseAddr("10.99.0.1")
			if a.pod.Is6() {
				nowhere = netip.MustParseAddr("fd00:99::1")
			}
			if !a.link.Inject(s.datagram(a.pod, nowhere)) {
				t.Fatal("full")
			}
			s.settle(t)
			file := r.stop(t)
			if bytes.Contains(file, s.secret) {
				t.Error("the file contains payload of a pod")
			}
			all, missed := records(t, file)
			if missed != 0 {
				t.Errorf("%d were missed", missed)
			}
			natted := a.seenAddr(a.node)
			headers := 28
			if a.pod.Is6() {
				headers = 48
			}
			wan := [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
			for _, want := range []struct {
				place    string
				outbound bool
				src, dst netip.Addr
				comment  []string
			}{
				{"before-nat", true, a.pod, s.remote, []string{"peer beta", "prefix map " + p.pods[0] + " -> " + p.podsSeen[0], "source ", " becomes "}},
				{"after-nat", true, s.seenRemote, s.remote, []string{"prefix map", "becomes "}},
				{"tunnel", true, s.seenRemote, s.remote, []string{"to peer beta"}},
				{"underlay", true, netip.IPv4Unspecified(), wan[1], []string{"peer beta; data, session", "counter"}},
				{"underlay", false, wan[1], netip.IPv4Unspecified(), []string{"peer beta; data"}},
				{"tunnel", false, s.remote, s.seenRemote, []string{"from peer beta"}},
				{"before-nat", false, s.remote, s.seenRemote, []string{"prefix map " + p.podsSeen[0] + " -> " + p.pods[0], "destination "}},
				{"after-nat", false, s.remote, a.pod, []string{"destination "}},
				{"before-nat", true, a.node, s.remote, []string{"NAPT " + a.node.String() + " -> " + natted.String()}},
				{"after-nat", true, natted, s.remote, []string{"NAPT"}},
				{"before-nat", true, a.pod, nowhere, []string{"no peer; dropped: no_peer: no peer has this address"}},
			} {
				found := false
				for _, r := range all {
					src := r.src()
					if r.place == "underlay" && r.outbound {
						src = want.src // a Bind in memory knows no local address
					}
					dst := r.dst()
					if r.place == "underlay" && !r.outbound {
						dst = want.dst
					}
					if r.place != want.place || r.outbound != want.outbound || src != want.src || dst != want.dst {
						continue
					}
					fine := true
					for _, part := range want.comment {
						fine = fine && strings.Contains(r.comment, part)
					}
					if fine && r.place != "underlay" && (len(r.data) != headers || r.length != headers+len(s.secret)) {
						t.Errorf("%v: want %d octets of %d", r, headers, headers+len(s.secret))
					}
					if fine && r.place == "underlay" && (len(r.data) != 20+8+32 || !bytes.Equal(r.data[44:], make([]byte, 16))) {
						t.Errorf("%v: want headers and zeros", r)
					}
					found = found || fine
				}
				if !found {
					t.Errorf("no packet at %s, outbound %v, %s > %s with %q in\n%v", want.place, want.outbound, want.src, want.dst, want.comment, lines(all))
				}
			}
			for _, r := range all {
				if r.place == "after-nat" && r.dst() == nowhere {
					t.Errorf("a packet that was dropped is shown after NAT: %v", r)
				}
			}
		})
	}
}

func lines(all []record) string {
	var b strings.Builder
	for _, r := range all {
		fmt.Fprintln(&b, r)
	}
	return b.String()
}

func TestCaptureContainsOnlySelectedPackets(t *testing.T) {
	s := newScene(t, plans[0])
	a := s.a
	nowhere := netip.MustParseAddr("10.99.0.1")
	ends := func(x, y netip.AddrPort) func(*capture.Options) {
		return func(o *capture.Options) { o.Ends = [2]netip.AddrPort{x, y} }
	}
	for _, tc := range []struct {
		name string
		set  func(*capture.Options)
		want map[string]int // number of packets, by place and direction
	}{
		{"everything but other pods", ends(at(a.pod, 0), netip.AddrPort{}), map[string]int{
			"before-nat out": 2, "after-nat out": 1, "tunnel out": 1, "underlay out": 1, "underlay in": 1, "tunnel in": 1, "before-nat in": 1, "after-nat in": 1}},
		{"as the peer sees the pod", ends(netip.AddrPort{}, at(s.seenRemote, 0)), map[string]int{
			"before-nat out": 1, "after-nat out": 1, "tunnel out": 1, "underlay out": 1, "underlay in": 1, "tunnel in": 1, "before-nat in": 1, "after-nat in": 1}},
		{"both ends, reversed, and a port", ends(at(s.remote, 5300), at(a.pod, 4000)), map[string]int{
			"before-nat out": 1, "after-nat out": 1, "tunnel out": 1, "underlay out": 1}},
		{"one place, one direction", func(o *capture.Options) {
			ends(at(a.pod, 0), netip.AddrPort{})(o)
			o.Places, o.Directions = []capture.Place{capture.AfterNAT}, []natengine.Direction{natengine.Inbound}
		}, map[string]int{"after-nat in": 1}},
		{"dropped", func(o *capture.Options) { o.Dropped = true }, map[string]int{"before-nat out": 1}},
		{"dropped for this reason", func(o *capture.Options) { o.Drops = []natengine.Drop{natengine.DropNoPeer} }, map[string]int{"before-nat out": 1}},
		{"dropped for another reason", func(o *capture.Options) { o.Drops = []natengine.Drop{natengine.DropSource} }, map[string]int{}},
		{"another protocol", func(o *capture.Options) { o.Proto = 6 }, map[string]int{}},
		{"another peer", func(o *capture.Options) { o.Peer = "c" }, map[string]int{}},
		{"of the peer, to a port", func(o *capture.Options) {
			o.Peer = "b"
			ends(at(a.pod, 0), netip.AddrPort{})(o)
		}, map[string]int{"before-nat out": 1, "after-nat out": 1, "tunnel out": 1, "underlay out": 1, "underlay in": 1, "tunnel in": 1, "before-nat in": 1, "after-nat in": 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := capture.DefaultOptions()
			tc.set(&o)
			r := startRecorder(a, o)
			s.send(t, a, s.atB, s.datagram(a.pod, s.remote))
			s.send(t, s.b, s.atA, s.datagram(s.b.pod2, s.seenRemote))
			if !a.link.Inject(s.datagram(a.pod, nowhere)) {
				t.Fatal("full")
			}
			s.settle(t)
			all, _ := records(t, r.stop(t))
			got := make(map[string]int)
			for _, r := range all {
				direction := " in"
				if r.outbound {
					direction = " out"
				}
				got[r.place+direction]++
			}
			if fmt.Sprint(got) != fmt.Sprint(tc.want) {
				t.Errorf("got %v, want %v\n%s", got, tc.want, lines(all))
			}
		})
	}
}

func TestCaptureKeepsPayloadOnlyIfRequested(t *testing.T) {
	s := newScene(t, plans[0])
	o := capture.DefaultOptions()
	o.Snap = 1500
	r := startRecorder(s.a, o)
	s.send(t, s.a, s.atB, s.datagram(s.a.pod, s.remote))
	s.settle(t)
	all, _ := records(t, r.stop(t))
	for _, r := range all {
		if has := bytes.Contains(r.data, s.secret); has == (r.place == "underlay") {
			t.Errorf("%v: the payload is there: %v", r, has)
		}
	}
}

// A superpacket is one packet outside the tunnel and 45 packets inside. At the receiver it is one
// packet again.
func TestCaptureShowsASuperpacketAndItsSegments(t *testing.T) {
	// While other tests keep the machine busy, the capture may miss records, which it reports.
	for try := 1; !superpacketIsCaptured(t); try++ {
		if try == 20 {
			t.Fatal("each recorder was too slow")
		}
	}
}

// superpacketIsCaptured returns false if the capture has missed records, because then the test
// proves nothing.
func superpacketIsCaptured(t *testing.T) bool {
	s := newScene(t, plans[0])
	o := capture.DefaultOptions()
	o.Proto = 6
	out, in := startRecorder(s.a, o), startRecorder(s.b, o)
	s.send(t, s.a, s.atB, super4(at(s.a.pod, 4000), at(s.remote, 80), 1000, 1380, random(45*1380)))
	s.settle(t)
	sent, missedThere := records(t, out.stop(t))
	received, missed := records(t, in.stop(t))
	if missed+missedThere > 0 {
		return false
	}
	counts := make(map[string]int)
	for _, r := range sent {
		counts[r.place]++
		if r.place == "before-nat" && (r.length != 40+45*1380 || !strings.Contains(r.comment, "superpacket of 45 segments")) {
			t.Errorf("%v", r)
		}
	}
	if counts["before-nat"] != 1 || counts["after-nat"] != 1 || counts["tunnel"] != 45 || counts["underlay"] != 45 {
		t.Errorf("sender: %v", counts)
	}
	octets := 0
	for _, r := range received {
		if r.place == "after-nat" {
			octets += r.length - 40
		}
	}
	if octets != 45*1380 {
		t.Errorf("receiver: %d octets after NAT\n%s", octets, lines(received))
	}
	return true
}

// If nobody reads the capture, the data path continues, and missed packets are counted.
func TestASlowCaptureReaderLosesOnlyItsOwnPackets(t *testing.T) {
	s := newScene(t, plans[0])
	o := capture.DefaultOptions()
	o.Snap = capture.MaxSnap
	c := capture.New(o, "test", nil)
	s.a.tunnel.SetCapture(c)
	big := super4(at(s.a.pod, 4000), at(s.remote, 80), 1000, 1380, random(45*1380))
	for range 30 { // 1.8 MB of packets, captured again after NAT and in the tunnel
		s.send(t, s.a, s.atB, big)
	}
	s.settle(t)
	before := c.Summary()
	if before.Missed == 0 || before.Packets == 0 {
		t.Fatalf("%+v: want some of both", before)
	}
	var file bytes.Buffer
	done := make(chan error, 1)
	go func() { done <- c.WriteTo(context.Background(), &file, func() error { return nil }) }()
	s.settle(t)
	c.End("test")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if _, missed := records(t, file.Bytes()); missed != c.Summary().Missed {
		t.Errorf("the file says that %d are missing, the summary %d", missed, c.Summary().Missed)
	}
}

func TestTsharkReadsACapture(t *testing.T) {
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		t.Skip("tshark is not installed ('sudo make deps' does it)")
	}
	s := newScene(t, plans[0])
	r := startRecorder(s.a, capture.DefaultOptions())
	s.a.tunnel.Handshake(s.a.peer.Key) // captures a handshake, unless the last one is too recent
	s.send(t, s.a, s.atB, s.datagram(s.a.pod, s.remote))
	s.send(t, s.a, s.atB, s.datagram(s.a.node, s.remote))
	if !s.a.link.Inject(s.datagram(s.a.pod, netip.MustParseAddr("10.99.0.1"))) {
		t.Fatal("full")
	}
	s.settle(t)
	name := filepath.Join(t.TempDir(), "a.pcapng")
	if err := os.WriteFile(name, r.stop(t), 0o600); err != nil {
		t.Fatal(err)
	}
	fields := func(filter string, names ...string) string {
		args := []string{"-n", "-r", name, "-Y", filter, "-T", "fields", "-E", "separator=|"}
		for _, n := range names {
			args = append(args, "-e", n)
		}
		cmd := exec.CommandContext(t.Context(), tshark, args...)
		cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("tshark: %v\n%s", err, &stderr)
		}
		return string(out)
	}
	node, natted := s.a.node.String(), s.a.seenAddr(s.a.node).String()
	for _, tc := range []struct{ filter, want string }{
		{"frame.interface_name == \"before-nat\" && ip.src == " + node, "before-nat|0x00000002|" + node + "|5300|peer beta; NAPT " + node + " -> " + natted},
		{"frame.interface_name == \"after-nat\" && udp.dstport == 5300 && ip.src == " + natted, "after-nat|0x00000002|" + natted + "|5300|peer beta; NAPT"},
		{"frame.interface_name == \"tunnel\" && ip.src == " + natted, "tunnel|0x00000002|" + natted + "|5300|to peer beta"},
		{"frame.comment contains \"no_peer\"", "before-nat|0x00000002|" + s.a.pod.String() + "|5300|no peer; dropped: no_peer"},
	} {
		if got := fields(tc.filter, "frame.interface_name", "frame.packet_flags_direction", "ip.src", "udp.dstport", "frame.comment"); !strings.HasPrefix(got, tc.want) {
			t.Errorf("%s:\n got %q\nwant %q", tc.filter, got, tc.want)
		}
	}
	if got := fields("wg.type == 4 && frame.interface_name == \"underlay\"", "ip.dst", "wg.receiver", "wg.counter"); !strings.Contains(got, "192.0.2.2|0x") {
		t.Errorf("WireGuard data: %q", got)
	}
	if got := fields("_ws.malformed", "frame.number"); got != "" {
		t.Errorf("malformed: %q", got)
	}
}
