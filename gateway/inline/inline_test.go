package inline

import (
	"bytes"
	"crypto/cipher"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/conn/bindtest"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/internal/leaktest"
	"github.com/isthmus-net/isthmus/natengine"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestTheReviewedVersionIsTheOneOfTheModule(t *testing.T) {
	text, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if want := "\t" + wireguardModule + " " + wireguardVersion + "\n"; !strings.Contains(string(text), want) || strings.Contains(string(text), wireguardModule+" =>") {
		t.Errorf("go.mod does not have %q, which was reviewed: read what changed in its device package, then change wireguardVersion", want)
	}
}

func TestAnotherLayoutIsRefusedByName(t *testing.T) {
	dev, peer := reflect.TypeFor[device.Device](), reflect.TypeFor[device.Peer]()
	entry := reflect.TypeFor[device.IndexTableEntry]()
	for name, c := range map[string]struct {
		keypair reflect.Type
		want    string
	}{
		"a field has gone": {reflect.TypeFor[struct {
			send, receive cipher.AEAD
			created       time.Time
			remoteIndex   uint32
		}](), "has no field sendNonce"},
		"a field has another type": {reflect.TypeFor[struct {
			sendNonce     uint64
			send, receive cipher.AEAD
			created       time.Time
			remoteIndex   uint32
		}](), "sendNonce is of type uint64, want atomic.Uint64"},
		"a field has moved into another struct": {reflect.TypeFor[struct {
			sendNonce     atomic.Uint64
			send, receive cipher.AEAD
			device.Keypair
		}](), "has no field created"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := layoutOf(dev, peer, c.keypair, entry); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v: want %q in it", err, c.want)
			}
		})
	}
}

func TestATrialSessionWorks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if err := Try(); err != nil {
			t.Fatal(err)
		}
	})
}

// pair is two ends of a session in memory, a and b.
type pair struct{ ends [2]*end }

type end struct {
	*trialEnd
	tap *tap

	mu    sync.Mutex
	drops map[natengine.Drop]int
}

func (e *end) dropped(d natengine.Drop) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.drops[d]
}

// tap sees every message that an end sends.
type tap struct {
	conn.Bind
	mu       sync.Mutex
	messages [][]byte
	target   conn.Endpoint
	quiet    bool // keeps nothing and sends whole batches
}

func (t *tap) Send(bufs [][]byte, ep conn.Endpoint) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.target = ep
	if t.quiet {
		return t.Bind.Send(bufs, ep)
	}
	for _, b := range bufs {
		t.messages = append(t.messages, bytes.Clone(b))
		if err := t.Bind.Send([][]byte{b}, ep); err != nil {
			return err
		}
	}
	return nil
}

// again sends a message as it is.
func (t *tap) again(tb testing.TB, m []byte) {
	tb.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.Bind.Send([][]byte{m}, t.target); err != nil {
		tb.Fatal(err)
	}
}

// data are the data messages sent so far, without keepalives.
func (t *tap) data() (all [][]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.messages {
		if isData(m) && len(m) > device.MessageKeepaliveSize {
			all = append(all, m)
		}
	}
	return all
}

func newPair(t testing.TB) *pair {
	t.Helper()
	p := &pair{}
	binds := bindtest.NewChannelBinds()
	for i := range p.ends {
		p.ends[i] = &end{drops: map[natengine.Drop]int{}, tap: &tap{Bind: binds[i]}}
		binds[i] = p.ends[i].tap
	}
	ends, err := newTrialEnds(binds, func(i int, d natengine.Drop) {
		e := p.ends[i]
		e.mu.Lock()
		defer e.mu.Unlock()
		e.drops[d]++
	})
	t.Cleanup(func() { closeTrialEnds(ends) })
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range ends {
		p.ends[i].trialEnd = e
	}
	return p
}

// inBubble runs a test whose time passes when everybody waits, so that neither the timers of WireGuard nor the patience of
// the transport depend on the machine.
func inBubble(t *testing.T, test func(t *testing.T, p *pair)) {
	synctest.Test(t, func(t *testing.T) { test(t, newPair(t)) })
}

func set(t testing.TB, d *device.Device, config string) {
	t.Helper()
	if err := d.IpcSet(config); err != nil {
		t.Fatal(err)
	}
}

// packet is a whole IPv4 packet of the given size with a number in it.
func (p *pair) packet(from int, number uint32, size int) []byte {
	b := make([]byte, size)
	b[0], b[8], b[9] = 0x45, 64, 253
	binary.BigEndian.PutUint16(b[2:], uint16(size))
	copy(b[12:], p.ends[from].addr.AsSlice())
	copy(b[16:], p.ends[1-from].addr.AsSlice())
	binary.BigEndian.PutUint32(b[20:], number)
	return b
}

// send sends a packet and returns it as it arrives at the other end.
func (p *pair) send(t testing.TB, from int, packet []byte) trialArrival {
	t.Helper()
	p.ends[from].out <- packet
	got := p.arrival(t, 1-from)
	if !bytes.Equal(got.packet, packet) {
		t.Fatalf("sent     %x\nreceived %x", packet, got.packet)
	}
	return got
}

func (p *pair) arrival(t testing.TB, at int) trialArrival {
	t.Helper()
	select {
	case got := <-p.ends[at].in:
		return got
	case <-time.After(10 * time.Second):
		t.Fatal("nothing arrived")
		panic("unreachable")
	}
}

// warm sends packets until both directions are inline.
func (p *pair) warm(t testing.TB) {
	t.Helper()
	for from := range p.ends {
		for n := 0; !p.send(t, from, p.packet(from, 0, 60)).inline; n++ {
			if n > 20 {
				t.Fatal("the session never takes the short way")
			}
		}
	}
}

func TestPacketsOfEverySizeArriveAsTheyWereSent(t *testing.T) {
	inBubble(t, packetsOfEverySizeArriveAsTheyWereSent)
}

func packetsOfEverySizeArriveAsTheyWereSent(t *testing.T, p *pair) {
	p.warm(t)
	for size := 24; size <= 1420; size += 11 {
		p.send(t, size%2, p.packet(size%2, uint32(size), size))
	}
	p.send(t, 0, p.packet(0, 1, 1420))
	for _, m := range p.ends[0].tap.data() {
		if len(m) > headerLen+1424+tagLen || (len(m)-headerLen-tagLen)%16 != 0 && len(m) != headerLen+1420+tagLen {
			t.Errorf("a message of %d octets: want the packet padded to 16, but not beyond the MTU", len(m))
		}
	}
}

// What takes the short way and what goes through the device draw from one counter.
func TestNoNonceIsUsedTwice(t *testing.T) { inBubble(t, noNonceIsUsedTwice) }

func noNonceIsUsedTwice(t *testing.T, p *pair) {
	p.warm(t)
	peer := p.ends[0].device.LookupPeer(p.ends[1].public)
	for n := range 400 {
		p.send(t, 0, p.packet(0, uint32(n), 60))
		if n%7 == 0 {
			peer.SendKeepalive() // the device's own
		}
		if n%50 == 0 {
			time.Sleep(sampleInterval / 4)
		}
	}
	synctest.Wait() // the device's keepalives
	type nonce struct {
		index   uint32
		counter uint64
	}
	seen := map[nonce]bool{}
	p.ends[0].tap.mu.Lock()
	defer p.ends[0].tap.mu.Unlock()
	for _, m := range p.ends[0].tap.messages {
		if n := (nonce{receiverOf(m), counterOf(m)}); isData(m) {
			if seen[n] {
				t.Fatalf("%+v twice", n)
			}
			seen[n] = true
		}
	}
	if len(seen) < 450 {
		t.Fatalf("only %d messages", len(seen))
	}
}

// Whichever way a message went first, and whichever way its copy would go, the copy is refused.
func TestAReplayedMessageIsRefused(t *testing.T) { inBubble(t, aReplayedMessageIsRefused) }

func aReplayedMessageIsRefused(t *testing.T, p *pair) {
	p.warm(t)
	for n := range 100 {
		p.send(t, 0, p.packet(0, uint32(n), 60))
	}
	recorded := p.ends[0].tap.data()
	for range 3 { // the third time the copies come when a batch is due for the device
		for _, m := range recorded {
			p.ends[0].tap.again(t, m)
		}
		p.send(t, 0, p.packet(0, 1000, 60)) // after them, so they have been looked at
		time.Sleep(sampleInterval / 2)
	}
	select {
	case got := <-p.ends[1].in:
		t.Fatalf("a copy was accepted: %x", got.packet)
	default:
	}
	if got, want := p.ends[1].dropped(natengine.DropTunnelReplay), 3*len(recorded); got != want {
		t.Errorf("%d messages counted as replayed, want %d", got, want)
	}
}

// A forged message is refused, and does not move the window past messages that are still to come.
func TestAForgedMessageIsRefusedAndMovesNoWindow(t *testing.T) {
	inBubble(t, aForgedMessageIsRefusedAndMovesNoWindow)
}

func aForgedMessageIsRefusedAndMovesNoWindow(t *testing.T, p *pair) {
	p.warm(t)
	good := p.ends[0].tap.data()
	for i := range 4 {
		forged := bytes.Clone(good[len(good)-1])
		binary.LittleEndian.PutUint64(forged[8:], counterOf(forged)+1_000_000)
		p.ends[0].tap.again(t, forged)
		p.send(t, 0, p.packet(0, uint32(i), 60))
		time.Sleep(sampleInterval / 3) // some of them come when a batch is due for the device
	}
	if got := p.ends[1].dropped(natengine.DropTunnelForged); got != 4 {
		t.Errorf("%d messages counted as forged, want 4", got)
	}
}

// Packets change between the two ways once a second, and arrive in the order in which they were sent.
func TestOrderIsKeptAcrossBothWays(t *testing.T) { inBubble(t, orderIsKeptAcrossBothWays) }

func orderIsKeptAcrossBothWays(t *testing.T, p *pair) {
	const packets = 30_000
	go func() {
		for n := range uint32(packets) {
			select {
			case p.ends[0].out <- p.packet(0, n, 60):
			case <-p.ends[0].closed: // the test has failed
				return
			}
			if n%100 == 0 {
				select {
				case <-time.After(sampleInterval / 3):
				case <-p.ends[0].closed:
				}
			}
		}
	}()
	ways := map[bool]int{}
	for n := range uint32(packets) {
		got := p.arrival(t, 1)
		ways[got.inline]++
		if number := binary.BigEndian.Uint32(got.packet[20:]); number != n {
			t.Fatalf("packet %d came in the place of %d", number, n)
		}
	}
	if ways[true] < packets*9/10 || ways[false] < 2 {
		t.Errorf("%d packets inline, %d through the device", ways[true], ways[false])
	}
}

// The device renews its keys while packets flow; none is lost or overtaken.
func TestARekeyLosesNothing(t *testing.T) { inBubble(t, aRekeyLosesNothing) }

func aRekeyLosesNothing(t *testing.T, p *pair) {
	p.warm(t)
	for round := range 5 {
		time.Sleep(50 * time.Millisecond) // handshakes are told apart by their time, in steps of 16 ms
		before := receiverOf(last(p.ends[0].tap.data()))
		peer := p.ends[0].device.LookupPeer(p.ends[1].public)
		peer.ExpireCurrentKeypairs()
		for n := range uint32(200) {
			p.send(t, 0, p.packet(0, n, 100))
			p.send(t, 1, p.packet(1, n, 100))
		}
		if after := receiverOf(last(p.ends[0].tap.data())); after == before {
			t.Fatalf("round %d: no new session", round)
		}
	}
}

func last(m [][]byte) []byte { return m[len(m)-1] }

// A peer that is removed takes its session along; packets for it are not sealed with what is left of it.
func TestARemovedPeerGetsNothing(t *testing.T) { inBubble(t, aRemovedPeerGetsNothing) }

func aRemovedPeerGetsNothing(t *testing.T, p *pair) {
	p.warm(t)
	set(t, p.ends[0].device, fmt.Sprintf("public_key=%s\nremove=true\n", hex.EncodeToString(p.ends[1].public[:])))
	sent := len(p.ends[0].tap.data())
	for n := range uint32(3) {
		p.ends[0].out <- p.packet(0, n, 60)
	}
	p.ends[0].transport.SetPeers([]Peer{{p.ends[0].peer, p.ends[1].public}})
	p.ends[0].out <- p.packet(0, 4, 60)
	synctest.Wait()
	p.ends[0].transport.Sweep()
	if got := len(p.ends[0].tap.data()); got != sent {
		t.Errorf("%d messages for a peer that is gone", got-sent)
	}
	sessions := 0
	p.ends[0].transport.sessions.Range(func(any, any) bool { sessions++; return true })
	if sessions != 0 {
		t.Errorf("%d sessions are left", sessions)
	}
}

// The device learns from the short way where a peer is, and counts what came.
func TestTheDeviceKnowsWhatCameTheShortWay(t *testing.T) {
	inBubble(t, theDeviceKnowsWhatCameTheShortWay)
}

func theDeviceKnowsWhatCameTheShortWay(t *testing.T, p *pair) {
	p.warm(t)
	before := ipc(t, p.ends[1].device, "rx_bytes")
	for n := range uint32(50) {
		p.send(t, 0, p.packet(0, n, 64))
	}
	if after := ipc(t, p.ends[1].device, "rx_bytes"); after < before+50*96 {
		t.Errorf("rx_bytes went from %d to %d", before, after)
	}
	if tx := ipc(t, p.ends[0].device, "tx_bytes"); tx < 50*96 {
		t.Errorf("tx_bytes is %d", tx)
	}
}

func ipc(t *testing.T, d *device.Device, name string) (n int) {
	t.Helper()
	text, err := d.IpcGet()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(text, name+"=")
	if _, err := fmt.Sscan(rest, &n); !ok || err != nil {
		t.Fatalf("no %s: %v", name, err)
	}
	return n
}

// A message of a kind that nobody knows goes to the device, which refuses it. Data of no session is counted.
func TestNonsenseIsRefused(t *testing.T) { inBubble(t, nonsenseIsRefused) }

func nonsenseIsRefused(t *testing.T, p *pair) {
	p.warm(t)
	good := last(p.ends[0].tap.data())
	for _, m := range [][]byte{{}, {4}, good[:12], make([]byte, 32), bytes.Repeat([]byte{0xff}, 200), append(bytes.Clone(good[:4]), make([]byte, 60)...)} {
		p.ends[0].tap.again(t, m)
	}
	p.send(t, 0, p.packet(0, 1, 60))
	if n := p.ends[1].dropped(natengine.DropTunnelSession); n != 1 {
		t.Errorf("%d messages of no session were counted, want 1", n)
	}
}
