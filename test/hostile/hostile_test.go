// Package hostile floods a real gateway, over real sockets, with messages that a peer or a stranger
// can send. During the flood, an honest peer has a TCP stream and pings:
//
//	b: pod ── isthmus gateway ══ underlay ══ isthmus gateway ── pod :a
//	c: a socket, with the key of a peer ═══╝
package hostile

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/internal/testbin"
)

var must = expect.NoError

const (
	// patience is the time limit for expected events, on a machine that may be busy.
	patience = time.Minute

	wireGuardPort = 5871
	checkPort     = 12345
	streamPort    = 9
	streamRate    = 4 << 20 // octets a second; the machine can carry it during a flood

	floodRate  = 3000 // messages a second
	floodTime  = time.Second
	atMostTime = 300 * time.Millisecond // duration of a flood at the maximum rate

	pingEvery = 50 * time.Millisecond
	pingWait  = 10 * time.Second // a ping normally takes less than a second
)

var (
	podsOfA = netip.MustParsePrefix("10.40.0.0/16")
	podsOfB = netip.MustParsePrefix("10.50.32.0/20")
	podsOfC = netip.MustParsePrefix("10.60.0.0/18")
)

// overflow lists the reasons under which the gateway counts the handshake messages of a flood. The
// gateway refuses messages within its budgets, and drops all others unread.
var overflow = []string{"handshake_queue", "handshake_key", "handshake_refused"}

// A flood is a kind of messages that a test sends.
type flood struct {
	name   string
	reason string // the label reason under which isthmus_drops_total counts each message; empty: the gateway may count it only under the reasons in overflow
	next   func() []byte
}

func TestAHostilePeerDoesNotAffectAnHonestOne(t *testing.T) {
	s := newSite(t)
	quiet := s.pingDuring(t, "quiet", func() { time.Sleep(2 * floodTime) })
	for _, f := range s.floods(t) {
		t.Run(f.name, func(t *testing.T) {
			p := s.flood(t, f, floodRate, floodTime)
			// A stall loses nearly all pings. A machine that is busy with other tests may lose a
			// single ping, and has less throughput, so the test only logs the throughput.
			if p.lost > p.pings/4 {
				t.Errorf("%d of %d pings lost", p.lost, p.pings)
			}
			t.Logf("the honest peer keeps %.0f %% of its throughput; %d of %d pings lost, worst %v", 100*p.rate()/quiet.rate(), p.lost, p.pings, p.worst)
			p = s.flood(t, f, 0, atMostTime)
			t.Logf("as many as fit: %.0f %% of the throughput, %d of %d pings lost, worst %v", 100*p.rate()/quiet.rate(), p.lost, p.pings, p.worst)
		})
	}
	if p := s.pingDuring(t, "quiet again", func() { time.Sleep(floodTime) }); p.lost > p.pings/4 {
		t.Errorf("%d of %d pings lost after the floods", p.lost, p.pings)
	}
}

type site struct {
	*lab.Lab
	a, b, c *lab.Cluster
	public  *ecdh.PublicKey  // public key of a's gateway
	own     *ecdh.PrivateKey // private key of c
	socket  net.Conn         // of c, connected to a's gateway
	session *noise.Session   // of c
	honest  recorder
	stream  atomic.Int64 // received octets of the honest peer's stream
}

func newSite(t *testing.T) *site {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	binary, err := testbin.Isthmus(t.TempDir())
	must(t, err)
	l, err := lab.Up(t.Context(), lab.Spec{Name: lab.UniqueName("hostile"), Clusters: []lab.ClusterSpec{
		{Name: "a", PodCIDR: podsOfA}, {Name: "b", PodCIDR: podsOfB}, {Name: "c", PodCIDR: podsOfC},
	}})
	must(t, err)
	t.Cleanup(func() { must(t, l.Down()) })
	s := &site{Lab: l, a: l.Cluster("a"), b: l.Cluster("b"), c: l.Cluster("c")}
	must(t, l.Join(s.b, s.a, lab.JoinOptions{AtA: lab.View{Pod: podsOfA}, AtB: lab.View{Pod: podsOfB}}))
	must(t, l.Join(s.c, s.a, lab.JoinOptions{AtA: lab.View{Pod: podsOfA}, AtB: lab.View{Pod: podsOfC}}))
	s.public, s.own = keyOf(t, s.a).PublicKey(), keyOf(t, s.c)
	s.honest.listen(t, s.a.Gateway(), s.b.Gateway().Addr)
	must(t, errors.Join(l.StartGateway(t.Context(), s.a, binary), l.StartGateway(t.Context(), s.b, binary)))

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		if _, err = s.b.Pods[0].PingWith(ctx, s.a.Pods[0].Addr, lab.PingOptions{}); err == nil || ctx.Err() != nil {
			break
		}
	}
	must(t, err)
	s.sniff(t)
	s.startStream(t)
	port := ":" + strconv.Itoa(wireGuardPort)
	must(t, s.c.Gateway().Do(func() (err error) {
		d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.c.Gateway().Addr, wireGuardPort))}
		s.socket, err = d.DialContext(t.Context(), "udp4", s.a.Gateway().Addr.String()+port)
		return err
	}))
	t.Cleanup(func() { s.socket.Close() })
	s.session, err = noise.Connect(s.socket, s.own, s.public, [32]byte{})
	must(t, err)
	return s
}

// sniff makes the test fail if a node of the honest clusters sends a packet for a peer in the
// clear.
func (s *site) sniff(t *testing.T) {
	sniffer, err := s.Sniff(nil)
	must(t, err)
	t.Cleanup(func() {
		must(t, sniffer.Close())
		t.Log(sniffer.Report())
	})
	for _, at := range []*lab.Cluster{s.a, s.b} {
		var w lab.Watched
		for _, of := range s.Clusters {
			if v, joined := s.View(at, of); joined {
				w.Networks = append(w.Networks, v.Pod, v.External)
			}
		}
		sniffer.Watch(at, w)
	}
}

func keyOf(t *testing.T, c *lab.Cluster) *ecdh.PrivateKey {
	text, err := os.ReadFile(filepath.Join(c.ConfigDir, "private.key"))
	must(t, err)
	raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
	must(t, err)
	key, err := ecdh.X25519().NewPrivateKey(raw)
	must(t, err)
	return key
}

// startStream starts a TCP stream from b to a, which ends with the test.
func (s *site) startStream(t *testing.T) {
	port := ":" + strconv.Itoa(streamPort)
	l, err := s.a.Pods[0].Listen("tcp4", port)
	must(t, err)
	c, err := s.b.Pods[0].Dial(t.Context(), "tcp4", s.a.Pods[0].Addr.String()+port)
	must(t, err)
	raw, err := c.(*net.TCPConn).SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, streamRate)
	}))
	must(t, err)
	server, err := l.Accept()
	must(t, err)
	var running sync.WaitGroup
	running.Go(func() {
		for b := make([]byte, 64<<10); err == nil; {
			_, err = c.Write(b)
		}
	})
	running.Go(func() { io.Copy(counter{&s.stream}, server) })
	t.Cleanup(func() {
		c.Close()
		server.Close()
		l.Close()
		running.Wait()
	})
}

type counter struct{ n *atomic.Int64 }

func (c counter) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	return len(b), nil
}

// --- messages to send

func (s *site) floods(t *testing.T) []flood {
	honest, ours := s.b.Pods[0].Addr, s.c.Pods[0].Addr
	inner := func(src netip.Addr, change func([]byte)) func() []byte {
		b := datagram(netip.AddrPortFrom(src, 4000), netip.AddrPortFrom(s.a.Pods[0].Addr, 4001), strings.Repeat("x", 36))
		change(b)
		return func() []byte { return s.session.Seal(b) }
	}
	length := func(m, from, to int) func() []byte { // the function returns messages of type m; their lengths cycle through from..to octets
		n := from
		return func() []byte {
			b := make([]byte, n)
			rand.Read(b)
			binary.LittleEndian.PutUint32(b, uint32(m))
			if n++; n > to {
				n = from
			}
			return b
		}
	}
	initiations := s.initiations(s.own)
	strangers := s.initiations(noise.NewKey())
	kind := 0
	return []flood{
		{"source of the honest peer", "source", inner(honest, func([]byte) {})},
		{"source that belongs to no peer", "source", inner(netip.MustParseAddr("192.0.2.77"), func([]byte) {})},
		{"wrong version", "malformed", inner(ours, func(b []byte) { b[0] = 0x55 })},
		{"wrong length", "malformed", inner(ours, func(b []byte) { b[2] = 0xff })},
		{"short data messages", "tunnel_short", length(noise.DataType, 4, noise.HeaderLen+noise.TagLen-1)},
		{"unknown types", "tunnel_type", func() []byte {
			kind++
			return length(5+kind*7, 4+kind%200, 4+kind%200)()
		}},
		{"empty datagrams", "tunnel_type", func() []byte { return nil }},
		{"handshakes of a wrong length", "tunnel_type", length(noise.InitiationType, 20, noise.InitiationLen-1)},
		{"replays of the honest peer's", "tunnel_replay", func() []byte { return s.honest.message(t) }},
		{"forged for the honest peer's session", "tunnel_forged", func() []byte {
			b := append(noise.DataHeader(s.honest.index(t), 1<<40), make([]byte, 64)...)
			rand.Read(b[noise.HeaderLen:])
			return b
		}},
		{"indices of nobody", "tunnel_session", func() []byte {
			b := append(noise.DataHeader(0, 0), make([]byte, 64)...)
			rand.Read(b[4:])
			return b
		}},
		{"connection checks of a pod", "local_source", func() []byte {
			text := fmt.Sprintf(`{"clusterID":%q,"msgType":"PING","timeStamp":%q}`, s.a.ID, time.Now().Format(time.RFC3339Nano))
			return s.session.Seal(datagram(netip.AddrPortFrom(ours, checkPort), netip.AddrPortFrom(s.a.ExternalCIDR.Addr().Next(), checkPort), text))
		}},
		{"initiations of a stranger", "", func() []byte { return strangers() }},
		{"initiations with a wrong mac", "", func() []byte {
			b := bytes.Clone(strangers())
			rand.Read(b[noise.InitiationLen-32:])
			return b
		}},
		{"responses and cookies to nobody", "", func() []byte {
			kind++
			size := []int{noise.ResponseLen, noise.CookieLen}[kind%2]
			return length([]int{noise.ResponseType, noise.CookieType}[kind%2], size, size)()
		}},
		{"initiations of the hostile peer", "", func() []byte { return initiations() }},
	}
}

// initiations returns a function that returns valid initiations, each later than the previous
// one. After some number it starts again with the first.
func (s *site) initiations(own *ecdh.PrivateKey) func() []byte {
	all := make([][]byte, floodRate)
	var once sync.Once
	n := -1
	return func() []byte {
		once.Do(func() {
			at := time.Now()
			for i := range all {
				all[i], _ = noise.Initiate(own, s.public, at.Add(time.Duration(i)*time.Second/floodRate))
			}
		})
		n++
		return all[n%len(all)]
	}
}

// datagram returns an IPv4 packet with a UDP datagram without checksum.
func datagram(src, dst netip.AddrPort, payload string) []byte {
	b := make([]byte, 20+8, 20+8+len(payload))
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(b[2:], uint16(cap(b)))
	copy(b[12:], src.Addr().AsSlice())
	copy(b[16:], dst.Addr().AsSlice())
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum+sum>>16))
	binary.BigEndian.PutUint16(b[20:], src.Port())
	binary.BigEndian.PutUint16(b[22:], dst.Port())
	binary.BigEndian.PutUint16(b[24:], uint16(cap(b)-20))
	return append(b, payload...)
}

// A recorder keeps data messages that arrive at a gateway from a peer, like a tap on the wire.
type recorder struct {
	mu     sync.Mutex
	recent [][]byte
	n      int
}

func (r *recorder) listen(t *testing.T, at *lab.Node, from netip.Addr) {
	fd := -1
	must(t, at.Do(func() (err error) {
		proto := uint16(unix.ETH_P_IP)
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(proto<<8|proto>>8))
		return err
	}))
	must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		defer unix.Close(fd)
		for buf := make([]byte, 65536); ; {
			select {
			case <-done:
				return
			default:
			}
			n, _, err := unix.Recvfrom(fd, buf, 0)
			const headers = 20 + 8
			// Skip datagrams that the kernel has joined, because the recorder does not know the
			// length of each.
			if err != nil || n < headers+noise.HeaderLen+noise.TagLen || n > 1500 || buf[9] != unix.IPPROTO_UDP ||
				!bytes.Equal(buf[12:16], from.AsSlice()) || buf[headers] != noise.DataType ||
				bytes.Contains(buf[headers+8:n], buf[headers:headers+8]) { // the start of a message occurs again, so datagrams were joined
				continue
			}
			r.mu.Lock()
			if m := bytes.Clone(buf[headers:n]); len(r.recent) < 256 {
				r.recent = append(r.recent, m)
			} else {
				r.recent[r.n%len(r.recent)] = m
			}
			r.n++
			r.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		close(done)
		<-ended
	})
}

// message returns a message that was received some time ago.
func (r *recorder) message(t *testing.T) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.recent) == 0 {
		t.Fatal("no message of the honest peer was seen")
	}
	return r.recent[(r.n+1)%len(r.recent)]
}

// index returns the receiver index of the peer's session.
func (r *recorder) index(t *testing.T) uint32 { return binary.LittleEndian.Uint32(r.message(t)[4:]) }

// --- results

// A phase holds the measurements of the honest peer during a flood.
type phase struct {
	octets      int64
	took        time.Duration
	pings, lost int
	worst       time.Duration
}

func (p phase) rate() float64 { return float64(p.octets) / p.took.Seconds() }

// pingDuring sends pings while f runs, and waits for the last answer.
func (s *site) pingDuring(t *testing.T, name string, f func()) phase {
	ctx, cancel := context.WithCancel(t.Context())
	var (
		mu      sync.Mutex
		p       phase
		pings   sync.WaitGroup
		running sync.WaitGroup
	)
	begin, before := time.Now(), s.stream.Load()
	running.Go(func() {
		for tick := time.NewTicker(pingEvery); ; {
			pings.Go(func() {
				rtt, err := s.b.Pods[0].PingWith(t.Context(), s.a.Pods[0].Addr, lab.PingOptions{Wait: pingWait})
				mu.Lock()
				defer mu.Unlock()
				if p.pings++; err != nil {
					p.lost++
					t.Logf("%s: %v after: %v", name, time.Since(begin), err)
				}
				p.worst = max(p.worst, rtt)
			})
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
		}
	})
	f()
	p.took, p.octets = time.Since(begin), s.stream.Load()-before
	cancel()
	running.Wait()
	pings.Wait()
	return p
}

// flood sends messages of a kind: rate a second or, with 0, as fast as possible. The gateway must
// count each message under the reason of its kind or as receive_queue, and none under another
// reason.
func (s *site) flood(t *testing.T, f flood, rate int, d time.Duration) phase {
	f.next() // the first call may take long
	before, lostBefore := s.drops(t), s.kernelDrops(t)
	sent := 0
	p := s.pingDuring(t, f.name, func() {
		begin := time.Now()
		for now := begin; now.Sub(begin) < d; now = time.Now() {
			due := sent + 64
			if rate > 0 {
				due = int(now.Sub(begin).Seconds() * float64(rate))
			}
			for ; sent < due; sent++ {
				if _, err := s.socket.Write(f.next()); err != nil {
					t.Errorf("message %d: %v", sent, err)
					return
				}
			}
			if rate > 0 {
				time.Sleep(time.Millisecond)
			}
		}
	})
	lost := func() int { return s.kernelDrops(t) - lostBefore }
	t.Logf("%d messages at %d a second, %d lost in the kernel", sent, int(float64(sent)/d.Seconds()), lost())
	if f.reason == "" {
		sent = 0
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		least := sent - lost()
		counted, others := 0, ""
		for reason, n := range s.drops(t) {
			switch n -= before[reason]; {
			case reason == f.reason, reason == "receive_queue":
				counted += n
			case reason == "socket_buffer": // lost() counts these packets too; the gateway may count them late
			case n != 0 && (f.reason != "" || !slices.Contains(overflow, reason)):
				others += fmt.Sprintf(" %s: %d", reason, n)
			}
		}
		if others != "" || counted > sent {
			t.Errorf("of %d messages %d are counted as %s, and others as%s", sent, counted, f.reason, others)
			return p
		}
		if counted >= least {
			return p
		}
		if time.Now().After(deadline) {
			t.Errorf("%d of %d messages are counted as %s, and the kernel lost %d", counted, sent, f.reason, sent-least)
			return p
		}
	}
}

// drops returns the numbers of inbound packets that a's gateway has dropped, by reason.
func (s *site) drops(t *testing.T) map[string]int {
	text, err := s.Metrics(t.Context(), s.a)
	must(t, err)
	all := make(map[string]int)
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "isthmus_drops_total{") || !strings.Contains(line, `direction="inbound"`) {
			continue
		}
		_, rest, _ := strings.Cut(line, `reason="`)
		reason, rest, _ := strings.Cut(rest, `"`)
		_, value, _ := strings.Cut(rest, " ")
		n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		must(t, err)
		all[reason] += int(n)
	}
	return all
}

// kernelDrops returns the number of packets that the kernel lost between c and a's gateway: at
// the devices on the path, and at the socket.
func (s *site) kernelDrops(t *testing.T) (n int) {
	number := func(s string) int {
		n, err := strconv.Atoi(s)
		must(t, err)
		return n
	}
	for _, h := range []*lab.Host{s.c.Gateway().Host, s.Underlay, s.a.Gateway().Host} {
		var devices, sockets []byte
		must(t, h.Do(func() (err error) {
			if devices, err = os.ReadFile("/proc/thread-self/net/dev"); err != nil {
				return err
			}
			sockets, err = os.ReadFile("/proc/thread-self/net/udp")
			return err
		}))
		for line := range strings.Lines(string(devices)) {
			if _, values, ok := strings.Cut(line, ":"); ok {
				fields := strings.Fields(values) // octets, packets, errors, drops and more: 8 of received packets, then the same of sent ones
				n += number(fields[3]) + number(fields[11])
			}
		}
		for line := range strings.Lines(string(sockets)) {
			if fields := strings.Fields(line); h == s.a.Gateway().Host && strings.HasSuffix(fields[1], fmt.Sprintf(":%04X", wireGuardPort)) {
				n += number(fields[len(fields)-1])
			}
		}
	}
	return n
}
