//go:build !race

package gateway

import (
	"bytes"
	"cmp"
	"crypto/ecdh"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/ipv4"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// TestOneHostilePeerBarelyAffectsAnHonestPeer measures in real time how much a hostile peer affects
// an honest one. The victim is a gateway with thousands of peers. The victim, an honest peer and a
// hostile peer are real tunnels over UDP sockets of this machine, in one process. The process gets
// 80 % of a processor, because CPU time is scarce on a small node:
//
//	pods (memory) ── victim ══ 127.0.0.1 ══ honest peer ── pods: echo, new flows, stream, PINGs
//	                   ╠═══════════════════ hostile peer, or a host that has no key
//	                   ╚═══════════════════ the crowd: all other peers, in another process
//
// Each row of the result compares an attack with a quiet time right before it. A row that fails
// is repeated up to twice. A row is skipped if the process gets less than half of a processor, or
// if even the quiet time is bad. So a busy machine makes no row fail.
//
// go test ./gateway -run OneHostilePeer -v prints the table of docs/fairness.md; -long has 4,000
// peers and takes longer.
func TestOneHostilePeerBarelyAffectsAnHonestPeer(t *testing.T) {
	if peers, err := strconv.Atoi(os.Getenv(crowdChild)); err == nil {
		runCrowd(t, peers)
		return
	}
	if os.Getenv(fairnessChild) == "" {
		if testing.Short() {
			t.Skip("it takes half a minute of real time")
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOneHostilePeerBarelyAffectsAnHonestPeer$", "-test.v", fmt.Sprintf("-long=%v", *long))
		cmd.Env = append(os.Environ(), fairnessChild+"=1", "GOMAXPROCS=1")
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		limit := startLimited(t, cmd)
		err := cmd.Wait()
		t.Logf("%s\nit had %s", out.String(), limit)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "--- SKIP") {
			t.Skip("this machine is too busy to judge all rows")
		}
		return
	}
	newFairness(t).run()
}

const fairnessChild = "ISTHMUS_FAIRNESS_CHILD"

const (
	fairPort  = 4000 // port of the pods; new flows use other ports
	honestID  = 1
	hostileID = 2
	backID    = 3 // an honest peer that restarts

	// mostTimes limits the duration of the test: no row is repeated once the test has taken as long
	// as mostTimes attacks.
	mostTimes = 22

	// writeTime simulates the time for writing one run of packets to a TUN and forwarding it, on a
	// node with a slow CPU. The links of this test are in memory and take no time.
	writeTime = 15 * time.Microsecond

	echoEvery   = 10 * time.Millisecond
	flowEvery   = 50 * time.Millisecond
	streamEvery = 5 * time.Millisecond
	streamBurst = 5 // packets of streamLen octets at once: 1.4 MB/s, a fraction of the victim's capacity
	streamLen   = 1380
)

var (
	victimPods     = netip.MustParsePrefix("10.71.0.0/16") // as peers see these pods
	victimExternal = netip.MustParsePrefix("10.90.0.0/24")
	victimPod      = netip.MustParseAddr("10.71.0.9")
	victimMapped   = netip.MustParseAddr("10.90.0.9") // mapped address of a host that is no pod; each flow to it has state
)

// nthPods returns the remapped PodCIDR of a peer as the victim sees it.
func nthPods(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(n >> 4), byte(n << 4)}), 20)
}

// nthExternal returns the ExternalCIDR of a peer as the victim sees it.
func nthExternal(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64 + byte(n>>8), byte(n)}), 24)
}

func nthKey(n int) (private, public [32]byte) {
	private = key(byte(n))
	private[0] &= 248
	binary.BigEndian.PutUint32(private[8:], uint32(n))
	k, _ := ecdh.X25519().NewPrivateKey(private[:])
	return private, [32]byte(k.PublicKey().Bytes())
}

// fairWire remembers the last data message that was sent, which an observer on the underlay could
// read. While it records, it keeps messages instead of sending them.
type fairWire struct {
	*bind.Bind
	mu       sync.Mutex
	seen     [64]byte
	records  bool
	recorded [][]byte
}

func (w *fairWire) Send(bufs [][]byte, to conn.Endpoint) error {
	if m := bufs[0]; m[0] == device.MessageTransportType {
		w.mu.Lock()
		defer w.mu.Unlock()
		copy(w.seen[:], m)
		if w.records {
			for _, m := range bufs {
				w.recorded = append(w.recorded, bytes.Clone(m))
			}
			return nil
		}
	}
	return w.Bind.Send(bufs, to)
}

// record starts or stops recording, and returns the messages recorded since the last call.
func (w *fairWire) record(on bool) [][]byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.records = on
	recorded := w.recorded
	w.recorded = nil
	return recorded
}

// junk returns a data message of the last session seen, which cannot be decrypted.
func (w *fairWire) junk() []byte {
	m := make([]byte, 96)
	w.mu.Lock()
	defer w.mu.Unlock()
	copy(m, w.seen[:16])
	binary.LittleEndian.PutUint64(m[8:], 1<<40)
	return m
}

// fairEnd is one gateway of the test.
type fairEnd struct {
	*datapath.Tunnel
	engine  *natengine.Engine
	link    *memlink.Link
	wire    *fairWire
	checker *check.Monitor
	public  [32]byte
}

// check starts the connection check of a gateway with the given peers.
func (e *fairEnd) check(t *testing.T, local *datapath.Local, peers []check.Peer) {
	port, err := local.Listen(fabric.ProbePort, check.MaxMessage+1)
	if err != nil {
		t.Fatal(err)
	}
	e.checker = check.Start(port, check.Options{Log: quiet})
	e.checker.Set(peers)
	t.Cleanup(e.checker.Close)
}

// reach starts handshakes with peers without a session every second, as a gateway does.
func (e *fairEnd) reach(t *testing.T) {
	end, done := &tunnelEnd{Tunnel: e.Tunnel, checker: e.checker}, make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for tick := time.NewTicker(time.Second); ; {
			select {
			case <-done:
				return
			case now := <-tick.C:
				if try, rest := e.checker.Sessions(end.Stats(), now); len(try)+len(rest) > 0 {
					group.Go(func() { end.reach(try, rest, done) })
				}
			}
		}
	})
	t.Cleanup(func() {
		close(done)
		group.Wait()
	})
}

func (f *fairness) open(n int, rules []natengine.Peer, port uint16) (*fairEnd, *datapath.Local) {
	private, public := nthKey(n)
	e := &fairEnd{
		engine: natengine.New(natengine.Config{Self4: fabric.GatewayAddr, Self6: fabric.GatewayAddr6, MaxFlowsPerPeer: 1 << 16, MaxFlowsPerHost: 1 << 16}),
		link:   memlink.NewLink("mem", 1420), wire: &fairWire{Bind: bind.New()}, public: public,
	}
	local, err := datapath.NewLocal(fabric.GatewayAddr, fabric.GatewayAddr6, 1420)
	if err != nil {
		f.t.Fatal(err)
	}
	e.Tunnel = datapath.New(e.link, e.wire, e.engine, local, datapath.Options{})
	f.t.Cleanup(func() { _ = e.Close() })
	if err := e.engine.SetPeers(rules); err != nil {
		f.t.Fatal(err)
	}
	if err := e.Up(private, port); err != nil {
		f.t.Fatal(err)
	}
	return e, local
}

// peer starts a gateway whose only peer is the victim.
func (f *fairness) peer(n int, port uint16) (*fairEnd, *datapath.Local) {
	e, local := f.open(n, []natengine.Peer{{
		ID: "victim", RemotePods: []netip.Prefix{victimPods}, RemoteExternal: []netip.Prefix{victimExternal},
		Pods:      []natengine.Remap{{From: nthPods(n), To: nthPods(n)}},
		External:  []netip.Prefix{nthExternal(n)},
		Endpoints: []natengine.Endpoint{{Real: fabric.GatewayAddr, Seen: fabric.FirstHost(nthExternal(n))}},
	}}, port)
	if err := e.SetPeers([]datapath.Peer{{State: e.engine.Peers()[0], Key: f.victim.public, Endpoint: f.at, Gateway: [2]netip.Addr{victimPods.Addr(), fabric.FirstHost(victimExternal)}}}); err != nil {
		f.t.Fatal(err)
	}
	return e, local
}

// fairness is the state of the test.
type fairness struct {
	t                       *testing.T
	peers                   int
	quiet, time             time.Duration // durations of the quiet time and of the attack in a row
	victim, honest, hostile *fairEnd
	crowd                   int            // number of all other peers (startCrowd)
	at                      netip.AddrPort // address and port of the victim
	states                  map[string]*natengine.PeerState

	passedBefore uint64 // value of passed when the attack began

	mu     sync.Mutex
	sent   map[uint64]time.Time // when each unanswered echo or new flow was sent, by number
	rtts   [2][]time.Duration   // round trips: of echoes, of new flows
	next   uint64
	octets atomic.Int64 // octets of the stream that the victim has received
	rows   []string
}

func newFairness(t *testing.T) *fairness {
	f := &fairness{t: t, peers: 1000, sent: make(map[uint64]time.Time), states: make(map[string]*natengine.PeerState),
		quiet: 1200 * time.Millisecond, time: 2 * time.Second}
	if *long {
		f.peers, f.quiet, f.time = 4000, 2*time.Second, 5*time.Second
	}
	var rules []natengine.Peer
	for n := range f.peers {
		rules = append(rules, natengine.Peer{
			ID: fmt.Sprint(n), RemotePods: []netip.Prefix{nthPods(n)}, RemoteExternal: []netip.Prefix{nthExternal(n)},
			Pods:      []natengine.Remap{{From: victimPods, To: victimPods}},
			External:  []netip.Prefix{victimExternal},
			Endpoints: []natengine.Endpoint{{Real: fabric.GatewayAddr, Seen: fabric.FirstHost(victimExternal)}, {Real: netip.MustParseAddr("172.16.0.9"), Seen: victimMapped}},
		})
	}
	var local, honestLocal *datapath.Local
	f.victim, local = f.open(0xffff, rules, 0)
	f.at = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), f.victim.Port())
	f.victim.link.OnReceive(f.answer)
	f.honest, honestLocal = f.peer(honestID, 0)
	f.honest.link.OnReceive(f.receiveAnswers)
	f.hostile, _ = f.peer(hostileID, 0)
	back, _ := f.peer(backID, 0)
	crowdPort, meet := startCrowd(t, f.peers)
	f.crowd = f.peers - crowdFirst
	ports := map[int]uint16{honestID: f.honest.Port(), hostileID: f.hostile.Port(), backID: back.Port()}
	_ = back.Close()
	var peers []datapath.Peer
	var checks []check.Peer
	for _, state := range f.victim.engine.Peers() {
		var n int
		_, _ = fmt.Sscan(state.ID(), &n)
		f.states[state.ID()] = state
		_, public := nthKey(n)
		p := datapath.Peer{State: state, Key: public, Gateway: [2]netip.Addr{nthPods(n).Addr(), fabric.FirstHost(nthExternal(n))}}
		if port := ports[n]; port != 0 {
			p.Endpoint = netip.AddrPortFrom(f.at.Addr(), port)
		} else if n >= crowdFirst {
			p.Endpoint = netip.AddrPortFrom(crowdAddr(n), crowdPort)
		}
		peers = append(peers, p)
		checks = append(checks, check.Peer{ID: state.ID(), Probe: netip.AddrPortFrom(fabric.FirstHost(nthExternal(n)), fabric.ProbePort),
			Allowed: [2]netip.Prefix{nthPods(n), nthExternal(n)}, Key: public, Endpoint: p.Endpoint.Addr().String(), Port: p.Endpoint.Port()})
	}
	if err := f.victim.SetPeers(peers); err != nil {
		t.Fatal(err)
	}
	meet(f.at)
	f.victim.check(t, local, checks)
	f.victim.reach(t)
	f.honest.check(t, honestLocal, []check.Peer{{ID: "victim", Probe: netip.AddrPortFrom(fabric.FirstHost(victimExternal), fabric.ProbePort),
		Allowed: [2]netip.Prefix{victimPods, victimExternal}, Key: f.victim.public, Endpoint: "127.0.0.1", Port: f.at.Port()}})
	return f
}

// answer acts as the victim's pods: it consumes the stream and returns every other packet to its
// sender.
func (f *fairness) answer(bufs [][]byte) error {
	for begin := time.Now(); time.Since(begin) < writeTime; {
	}
	b := slices.Concat(bufs[1:]...)
	if len(b) > 1000 {
		f.octets.Add(int64(len(b)))
		return nil
	}
	if binary.BigEndian.Uint64(b[28:]) == 0 { // a packet of the flood
		return nil
	}
	src, dst := [4]byte(b[12:16]), [4]byte(b[16:20])
	copy(b[12:], dst[:])
	copy(b[16:], src[:])
	sport, dport := [2]byte(b[20:22]), [2]byte(b[22:24])
	copy(b[20:], dport[:])
	copy(b[22:], sport[:])
	f.victim.link.Inject(make([]byte, packet.VirtioHeaderLen), b)
	return nil
}

// receiveAnswers acts as the honest peer's pods: it records the answers.
func (f *fairness) receiveAnswers(bufs [][]byte) error {
	n := binary.BigEndian.Uint64(bufs[1][28:])
	f.mu.Lock()
	defer f.mu.Unlock()
	if at, ok := f.sent[n]; ok {
		delete(f.sent, n)
		f.rtts[n&1] = append(f.rtts[n&1], time.Since(at))
	}
	return nil
}

// fairPacket returns a datagram from a peer's pod to one of the victim's, with a number. The last
// bit of the number is 1 for a new flow.
func fairPacket(peer int, to netip.Addr, port uint16, number uint64, size int) []byte {
	data := make([]byte, size)
	binary.BigEndian.PutUint64(data, number)
	return packettest.Build(packettest.IP{Src: nthPods(peer).Addr().Next().Next(), Dst: to},
		packettest.UDP{SrcPort: port, DstPort: fairPort, NoChecksum: true, Data: data})
}

func inject(e *fairEnd, b []byte) bool { return e.link.Inject(make([]byte, packet.VirtioHeaderLen), b) }

// measurement holds measurements of the honest peer.
type measurement struct {
	median, worst [2]time.Duration // round trips: of known flows, of new flows
	lost          [2]float64       // lost shares, 0 to 1: of known flows, of new flows
	offered       float64          // share of the stream that the peer managed to send
	check         [2]check.Result  // of the honest peer about the victim, and of the victim about the honest peer
	crowd         int              // peers of the crowd that answer the victim's check
	got           float64          // share of the wanted processor time that the process got
}

// measure measures the honest peer for the time d.
func (f *fairness) measure(d time.Duration) (r measurement) {
	f.mu.Lock()
	clear(f.sent)
	f.rtts = [2][]time.Duration{}
	f.mu.Unlock()
	var asked [2]int
	f.octets.Store(0)
	before := schedstat()
	stream := fairPacket(honestID, victimPod, fairPort, 2, streamLen-28)
	begin := time.Now()
	var echo, flow, burst time.Time
	bursts := 0
	ask := func(kind uint64, to netip.Addr, port uint16) {
		f.mu.Lock()
		f.next++
		n := f.next<<1 | kind
		f.sent[n] = time.Now()
		f.mu.Unlock()
		asked[kind]++
		inject(f.honest, fairPacket(honestID, to, port, n, 36))
	}
	for now := begin; now.Sub(begin) < d; now = time.Now() {
		if now.Sub(echo) >= echoEvery {
			echo = now
			ask(0, victimPod, fairPort)
		}
		if now.Sub(flow) >= flowEvery {
			flow = now
			ask(1, victimMapped, uint16(10_000+f.next%50_000))
		}
		if now.Sub(burst) >= streamEvery {
			burst = now
			bursts++
			for range streamBurst {
				inject(f.honest, stream)
			}
		}
		time.Sleep(time.Millisecond)
	}
	r.got = cpuShare(before, schedstat())
	octets := float64(f.octets.Load())
	if bursts > 0 {
		r.offered = octets / float64(bursts*streamBurst*streamLen)
	}
	// Wait for late answers.
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		f.mu.Lock()
		left := len(f.sent)
		f.mu.Unlock()
		if left == 0 {
			break
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for kind := range r.median {
		all := f.rtts[kind]
		slices.Sort(all)
		if len(all) > 0 {
			r.median[kind], r.worst[kind] = all[len(all)/2], all[len(all)-1]
		}
		r.lost[kind] = 1 - float64(len(all))/float64(max(1, asked[kind]))
	}
	r.check = [2]check.Result{f.honest.checker.Observe("victim"), f.victim.checker.Observe(fmt.Sprint(honestID))}
	r.crowd = f.connected()
	return r
}

// connected returns the number of peers of the crowd that answer the victim's connection check.
func (f *fairness) connected() (n int) {
	for k := crowdFirst; k < f.peers; k++ {
		if f.victim.checker.Observe(fmt.Sprint(k)).State == check.Connected {
			n++
		}
	}
	return n
}

// schedstat returns, for each thread of this process, the time that it has run, and the time that
// it was runnable but did not run.
func schedstat() map[string][2]time.Duration {
	all := make(map[string][2]time.Duration)
	tasks, _ := filepath.Glob("/proc/self/task/*/schedstat")
	for _, name := range tasks {
		b, _ := os.ReadFile(name)
		var ran, waited time.Duration
		_, _ = fmt.Sscan(string(b), &ran, &waited)
		all[name] = [2]time.Duration{ran, waited}
	}
	return all
}

// cpuShare returns the share of the wanted processor time that the process got. Only one thread of
// the process runs at a time, so cpuShare compares the longest waiting time of a thread with the
// total running time.
func cpuShare(before, after map[string][2]time.Duration) float64 {
	var ran, waited time.Duration
	for name, now := range after {
		ran += now[0] - before[name][0]
		waited = max(waited, now[1]-before[name][1])
	}
	return float64(ran) / float64(max(1, ran+waited))
}

// bad returns the reason why the quiet time r cannot be compared with an attack, or "" if it
// can. crowd is the size of the crowd.
func (r *measurement) bad(crowd int) string {
	switch {
	case r.lost[0] > 0.02 || r.lost[1] > 0.05 || r.offered < 0.95:
		return fmt.Sprintf("even in quiet %.0f %% of echoes and %.0f %% of new flows were lost, and %.0f %% of the stream arrived", 100*r.lost[0], 100*r.lost[1], 100*r.offered)
	case r.median[0] > 20*time.Millisecond || r.worst[0] > 200*time.Millisecond:
		return fmt.Sprintf("even in quiet a round trip took %v, %v at worst", r.median[0], r.worst[0])
	case r.check[0].State != check.Connected || r.check[1].State != check.Connected:
		return "the connection check was not answered before the attack"
	case r.crowd < crowd*9/10:
		return fmt.Sprintf("%d of the %d peers of the crowd are connected", r.crowd, crowd)
	}
	return ""
}

// harms returns the harms that an attack did to the honest peer, compared with the quiet time
// before it.
func (r *measurement) harms(quiet *measurement) (list []string) {
	for kind, name := range []string{"echoes", "new flows"} {
		if most := 10*quiet.median[kind] + 60*time.Millisecond; r.median[kind] > most {
			list = append(list, fmt.Sprintf("%s take %v: want %v at most", name, r.median[kind], most))
		}
		if most := 5*quiet.worst[kind] + time.Second; r.worst[kind] > most {
			list = append(list, fmt.Sprintf("%s take %v at worst: want %v at most", name, r.worst[kind], most))
		}
		if most := quiet.lost[kind] + 0.05; r.lost[kind] > most {
			list = append(list, fmt.Sprintf("%.0f %% of %s are lost", 100*r.lost[kind], name))
		}
	}
	if r.offered < 0.8*quiet.offered {
		list = append(list, fmt.Sprintf("%.0f %% of the stream arrive", 100*r.offered))
	}
	if r.crowd < quiet.crowd*99/100 {
		list = append(list, fmt.Sprintf("%d other peers are connected, %d before", r.crowd, quiet.crowd))
	}
	for i, who := range []string{"the honest peer", "the victim"} {
		if c := r.check[i]; c.State != check.Connected || c.Loss > quiet.check[i].Loss+0.1 {
			list = append(list, fmt.Sprintf("the check of %s says %s, %.0f %% lost", who, c.State, 100*c.Loss))
		}
	}
	return list
}

// An attack is a row of the test: messages that are sent to the victim.
type attack struct {
	name string
	rate int // messages per second
	// prepare returns a function that sends n messages and reports how many of them were sent.
	prepare func(f *fairness) (send func(n int) int)
	// handled returns the number of messages of the attack that the victim has delivered or counted
	// as dropped.
	handled func(f *fairness) uint64
}

// sendPaced calls send a thousand times a second, each time with the number of messages that are
// due.
func sendPaced(stop <-chan struct{}, perSecond int, send func(n int) int) (sent int) {
	for begin, due := time.Now(), 0; ; time.Sleep(time.Millisecond) {
		select {
		case <-stop:
			return sent
		default:
		}
		n := min(int(time.Since(begin).Seconds()*float64(perSecond))-due, perSecond/50) // after a long delay, skip messages
		due = int(time.Since(begin).Seconds() * float64(perSecond))
		if n > 0 {
			sent += send(n)
		}
	}
}

// batches returns a function that sends messages of one size, made by next, in batches as large
// as the kernel accepts.
func batches(w *bind.Bind, to netip.AddrPort, next func(n int) [][]byte) func(n int) int {
	at := w.Endpoint(to)
	return func(n int) (sent int) {
		for sent < n {
			part := next(min(64, n-sent))
			if len(part) == 0 {
				break
			}
			if err := w.Send(part, at); err != nil {
				return sent + len(part) - bind.Unsent(err, len(part))
			}
			sent += len(part)
		}
		return sent
	}
}

// repeat returns a function that returns the same message n times.
func repeat(m []byte) func(n int) [][]byte {
	batch := slices.Repeat([][]byte{m}, 64)
	return func(n int) [][]byte { return batch[:n] }
}

// sealed returns at least n encrypted messages of the hostile peer, each with the packet b.
// Afterwards the wire of the hostile peer still records instead of sending. Otherwise the peer
// could send a keepalive with a later counter, and then all these messages would count as replays.
func (f *fairness) sealed(b []byte, n int) (all [][]byte) {
	for f.hostile.wire.record(true); len(all) < n; all = append(all, f.hostile.wire.record(true)...) {
		for range 400 {
			inject(f.hostile, b)
		}
		time.Sleep(time.Millisecond)
	}
	return append(all, f.hostile.wire.record(true)...)
}

// podsFlood floods the victim with small packets from a pod of the hostile peer.
func (f *fairness) podsFlood() func(n int) int {
	return f.flood(fairPacket(hostileID, victimPod, fairPort, 0, 36), podsRate)
}

// flood returns a function that sends the packet b of the hostile peer again and again. Enough
// messages for the rate are encrypted in advance, so that only sending takes time.
func (f *fairness) flood(b []byte, rate int) func(n int) int {
	all := f.sealed(b, rate*int(f.time/time.Second))
	return batches(f.hostile.wire.Bind, f.at, func(n int) [][]byte {
		n = min(n, len(all))
		part := all[:n]
		all = all[n:]
		return part
	})
}

// stranger returns a function that sends messages, made by next, from a socket with the address
// src.
func (f *fairness) stranger(src netip.Addr, next func() []byte) func(n int) int {
	c, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(src, 0)), net.UDPAddrFromAddrPort(f.at))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	return func(n int) (sent int) {
		for range n {
			if _, err := c.Write(next()); err == nil {
				sent++
			}
		}
		return sent
	}
}

// charged returns the number of packets that the victim has counted for peer n: delivered ones if
// delivered is set, and those dropped for the given reasons.
func (f *fairness) charged(n int, delivered bool, reasons ...natengine.Drop) (sum uint64) {
	state := f.states[fmt.Sprint(n)]
	if delivered {
		sum, _ = state.Traffic(natengine.Inbound)
	}
	for _, reason := range reasons {
		sum += state.Drops(natengine.Inbound, reason)
	}
	return sum
}

func (f *fairness) nobodys(reason natengine.Drop) uint64 {
	return f.victim.engine.NoPeerDrops(natengine.Inbound, reason)
}

// podsRate is the number of packets per second of the flood: more than the victim can write.
const podsRate = 100_000

// pingsRate is the number of PINGs per second of the flood: four times the rate at which the checks
// of 4,000 peers failed when all peers shared one queue.
const pingsRate = 20_000

func (f *fairness) ofPods() uint64 {
	return f.charged(hostileID, true, natengine.DropReceiveQueue, natengine.DropTunnelForged)
}

// passed returns the number of packets from the hostile peer that the victim has delivered, to
// its pods or to its own address.
func (f *fairness) passed() uint64 {
	return f.charged(hostileID, true) - f.charged(hostileID, false, natengine.DropLocalSource, natengine.DropLocalRate)
}

func (f *fairness) ofHandshakes() uint64 {
	return f.nobodys(natengine.DropHandshakeQueue) + f.nobodys(natengine.DropHandshakeRefused)
}

var attacks = []attack{
	{"a pod of the hostile peer sends 100,000 small packets a second", podsRate, (*fairness).podsFlood, (*fairness).ofPods},
	{"in addition, its gateway sends 100,000 messages that cannot be decrypted", 2 * podsRate, func(f *fairness) func(n int) int {
		pods, gateway := f.podsFlood(), batches(f.hostile.wire.Bind, f.at, repeat(f.hostile.wire.junk()))
		return func(n int) int { return pods(n/2) + gateway(n/2) }
	}, (*fairness).ofPods},
	{"in addition, a host on the underlay sends 100,000 with the index of the honest peer", 2 * podsRate, func(f *fairness) func(n int) int {
		elsewhere := bind.New()
		if _, _, err := elsewhere.Listen(0); err != nil {
			f.t.Fatal(err)
		}
		f.t.Cleanup(func() { _ = elsewhere.Close() })
		pods, host := f.podsFlood(), batches(elsewhere, f.at, repeat(f.honest.wire.junk()))
		return func(n int) int { return pods(n/2) + host(n/2) }
	}, func(f *fairness) uint64 {
		return f.ofPods() + f.nobodys(natengine.DropReceiveQueue) + f.charged(honestID, false, natengine.DropTunnelForged)
	}},
	{"a pod of the hostile peer sends 20,000 PINGs a second to the gateway's own address", pingsRate, func(f *fairness) func(n int) int {
		return f.pings(nthPods(hostileID).Addr().Next().Next())
	}, func(f *fairness) uint64 {
		return f.charged(hostileID, false, natengine.DropReceiveQueue, natengine.DropTunnelForged, natengine.DropLocalSource)
	}},
	{"the hostile peer's gateway itself sends them", pingsRate, func(f *fairness) func(n int) int {
		f.passedBefore = f.passed()
		return f.pings(nthPods(hostileID).Addr())
	}, func(f *fairness) uint64 {
		// The rate limit lets at most this many PINGs pass. If more pass, those count as not
		// handled, so the row fails.
		rate := uint64(datapath.MessageBurst + datapath.MessageRate*int(2*f.time/time.Second))
		return f.charged(hostileID, false, natengine.DropReceiveQueue, natengine.DropTunnelForged, natengine.DropLocalRate) + min(f.passed()-f.passedBefore, rate)
	}},
	{"a host on the underlay sends 10,000 initiations a second", 10_000, func(f *fairness) func(n int) int {
		return f.stranger(netip.AddrFrom4([4]byte{127, 0, 0, 66}), f.initiations())
	}, (*fairness).ofHandshakes},
	{"a peer that roams through 2,000 addresses sends 10,000 initiations a second", 10_500, (*fairness).roaming, func(f *fairness) uint64 {
		return f.ofPods() + f.nobodys(natengine.DropReceiveQueue) + f.ofHandshakes()
	}},
	{"a host sends 10,000 initiations a second through the relay that the peers use, too", 10_000, func(f *fairness) func(n int) int {
		f.victim.SetRelays(func(addr netip.Addr) bool { return addr == f.at.Addr() }) // the honest and the hostile peer send from this address, too
		return f.stranger(f.at.Addr(), f.initiations())
	}, (*fairness).ofHandshakes},
}

// byInitiations is the number of attacks that send initiations. They are the last ones in
// attacks.
const byInitiations = 3

// prepare prepares an attack. It first removes the relays that a previous attack has set.
func (f *fairness) prepare(a *attack) (send func(n int) int) {
	f.victim.SetRelays(func(netip.Addr) bool { return false })
	return a.prepare(f)
}

// pings returns a function that sends PINGs of the hostile peer from an address.
func (f *fairness) pings(from netip.Addr) func(n int) int {
	text := fmt.Appendf(nil, `{"clusterID":"asker","msgType":"PING","timeStamp":%q}`, time.Now().UTC().Format(time.RFC3339Nano))
	return f.flood(packettest.Build(packettest.IP{Src: from, Dst: fabric.FirstHost(victimExternal)},
		packettest.UDP{SrcPort: fabric.ProbePort, DstPort: fabric.ProbePort, NoChecksum: true, Data: text}), pingsRate)
}

// roaming returns a function that makes the hostile peer roam: at each address it sends a data
// packet, so that the victim learns the address, and then 20 initiations.
func (f *fairness) roaming() func(n int) int {
	socket, err := net.ListenUDP("udp4", nil)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = socket.Close() })
	const each = 21
	c, initiation, packets := ipv4.NewPacketConn(socket), f.initiations(), f.sealed(fairPacket(hostileID, victimPod, fairPort, 0, 36), 4000)
	i := 0
	return func(n int) (sent int) {
		for range n {
			m, at := initiation(), i/each
			if i%each == 0 {
				m = packets[at%len(packets)]
			}
			from := netip.AddrFrom4([4]byte{127, 65, byte(at % 2000 >> 8), byte(at % 2000)})
			if _, err := c.WriteTo(m, &ipv4.ControlMessage{Src: from.AsSlice()}, net.UDPAddrFromAddrPort(f.at)); err == nil {
				sent++
			}
			i++
		}
		return sent
	}
}

// initiations returns a function that makes initiations with a valid mac1.
func (f *fairness) initiations() func() []byte {
	var g device.CookieGenerator
	g.Init(f.victim.public)
	all := make([][]byte, 1000)
	for i := range all {
		m := make([]byte, device.MessageInitiationSize)
		m[0] = device.MessageInitiationType
		binary.LittleEndian.PutUint32(m[4:], uint32(i))
		binary.LittleEndian.PutUint32(m[8:], uint32(i)+1)
		g.AddMacs(m)
		all[i] = m
	}
	n := 0
	return func() []byte { n++; return all[n%len(all)] }
}

func (f *fairness) run() {
	t := f.t
	inject(f.hostile, fairPacket(hostileID, victimPod, fairPort, 0, 36)) // makes a session
	for end := time.Now().Add(10 * f.time); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if f.honest.checker.Observe("victim").State == check.Connected && f.victim.checker.Observe(fmt.Sprint(honestID)).State == check.Connected && f.connected() == f.crowd {
			break
		}
	}
	t.Logf("%d of %d peers of the crowd are connected", f.connected(), f.crowd)
	busy, start := "", time.Now()
	judge := func(name string, try func() (failed []string, busy string)) {
		const tries = 3
		var was string
		var failed []string
		for range tries {
			var b string
			if failed, b = try(); b == "" && len(failed) == 0 {
				return
			}
			t.Logf("%s: %s; %s", name, strings.Join(failed, "; "), b)
			if was = cmp.Or(was, b); time.Since(start) > mostTimes*f.time {
				was = cmp.Or(was, "there is no time to try it again")
				break
			}
			time.Sleep(time.Second)
		}
		if was != "" {
			busy = name + ": " + was
			return
		}
		t.Errorf("%s: %s", name, strings.Join(failed, "; "))
	}
	f.rows = append(f.rows, "| attack | messages | echo: median, worst, lost | new flow: median, worst, lost | stream | check | counted |", "|---|---|---|---|---|---|---|")
	for _, a := range attacks {
		judge(a.name, func() ([]string, string) { return f.attack(&a) })
	}
	for _, a := range attacks[len(attacks)-byInitiations:] {
		judge("an honest peer starts again while "+a.name, func() ([]string, string) { return f.restart(&a) })
	}
	t.Logf("%d peers, GOMAXPROCS=1\n\n%s\n", f.peers, strings.Join(f.rows, "\n"))
	if busy != "" && !t.Failed() {
		t.Skip(busy)
	}
}

// attack measures one row. It returns the failures, and the reason why the machine was too busy,
// if it was.
func (f *fairness) attack(a *attack) (failed []string, busy string) {
	send := f.prepare(a)
	quiet := f.measure(f.quiet)
	if busy = quiet.bad(f.crowd); busy != "" {
		return nil, busy
	}
	before, full := a.handled(f), f.nobodys(natengine.DropSocketBuffer)
	stop, done := make(chan struct{}), make(chan int)
	go func() { done <- sendPaced(stop, a.rate, send) }()
	r := f.measure(f.time)
	close(stop)
	sent := <-done
	failed = r.harms(&quiet)
	// Wait until the queues are empty, because only then are all messages counted. The kernel
	// reports drops of the socket only with the next message, and counts up to 64 datagrams that it
	// has joined as one.
	var missing, limit int
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		inject(f.honest, fairPacket(honestID, victimPod, fairPort, 2, 36))
		missing, limit = sent-int(a.handled(f)-before), int(f.nobodys(natengine.DropSocketBuffer)-full)*64
		if missing <= limit {
			break
		}
	}
	if missing < 0 || missing > limit {
		failed = append(failed, fmt.Sprintf("%d of %d messages are counted nowhere, %d were lost in the socket at most", missing, sent, limit))
	}
	f.rows = append(f.rows, fmt.Sprintf("| nothing | | %s | %.0f %% | %s, %d of %d | |", quiet.times(), 100*quiet.offered, quiet.check[0].State, quiet.crowd, f.crowd),
		fmt.Sprintf("| %s | %d | %s | %.0f %% | %s, %d of %d | %.0f %% |", a.name, sent, r.times(), 100*r.offered, r.check[0].State, r.crowd, f.crowd, 100*float64(sent-max(0, missing-limit))/float64(max(1, sent))))
	if len(failed) > 0 && r.got < 0.5 {
		return failed, fmt.Sprintf("the process got %.0f %% of the processor time that it could have used", 100*r.got)
	}
	return failed, ""
}

func (r *measurement) times() string {
	var cells []string
	for kind := range r.median {
		cells = append(cells, fmt.Sprintf("%.1f ms, %.0f ms, %.1f %%", r.median[kind].Seconds()*1000, r.worst[kind].Seconds()*1000, 100*r.lost[kind]))
	}
	return strings.Join(cells, " | ")
}

// restart measures how soon a restarted peer is connected again during an attack.
func (f *fairness) restart(a *attack) (failed []string, busy string) {
	time.Sleep(100 * time.Millisecond) // a device accepts one initiation of a peer in 20 ms
	quiet := f.reconnectTime()
	if quiet > time.Second {
		return nil, fmt.Sprintf("even in quiet a peer is back after %v", quiet)
	}
	stop, done := make(chan struct{}), make(chan int)
	send := f.prepare(a)
	go func() { done <- sendPaced(stop, a.rate, send) }()
	time.Sleep(500 * time.Millisecond)
	took := f.reconnectTime()
	close(stop)
	sent := <-done
	f.rows = append(f.rows, fmt.Sprintf("| a peer starts again while %s | %d | back after %v, quiet %v | | | | |", a.name, sent, took.Round(time.Millisecond), quiet.Round(time.Millisecond)))
	if most := 5*quiet + 1500*time.Millisecond; took > most {
		failed = append(failed, fmt.Sprintf("it is back after %v: want %v at most", took, most))
	}
	return failed, ""
}

// reconnectTime returns the time from the start of a peer to its first answer.
func (f *fairness) reconnectTime() time.Duration {
	port := f.backPort()
	begin := time.Now()
	e, _ := f.peer(backID, port)
	defer func() { _ = e.Close() }()
	arrived := make(chan struct{}, 1)
	e.link.OnReceive(func([][]byte) error {
		select {
		case arrived <- struct{}{}:
		default:
		}
		return nil
	})
	inject(e, fairPacket(backID, victimPod, fairPort, 2, 36))
	select {
	case <-arrived:
	case <-time.After(20 * time.Second):
	}
	return time.Since(begin)
}

// backPort returns the UDP port at which the victim expects the restarting peer.
func (f *fairness) backPort() uint16 {
	_, public := nthKey(backID)
	return f.victim.Stats()[public].Endpoint.Port()
}
