package inline

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/crypto/curve25519"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/conn/bindtest"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

// trialTimeout is for a machine that is very busy; a trial takes milliseconds.
const trialTimeout = 10 * time.Second

// Try sets up a session between two devices in memory and sends packets both ways, through the devices and inline. It is
// the last check before this package is trusted: with fields that have kept name and type and have changed their meaning,
// no packet would arrive.
func Try() error {
	ends, err := newTrialEnds(bindtest.NewChannelBinds(), func(int, natengine.Drop) {})
	defer closeTrialEnds(ends)
	if err != nil {
		return fmt.Errorf("trial session: %w", err)
	}
	timeout := time.After(trialTimeout)
	var marker byte
	var inline [2]bool
	for !inline[0] || !inline[1] { // the first packets of each direction go through the devices
		for from, to := range [2]int{1, 0} {
			marker++
			want := trialPacket(ends[from].addr, ends[to].addr, marker)
			ends[from].out <- want
			select {
			case got := <-ends[to].in:
				if !bytes.Equal(got.packet, want) {
					return fmt.Errorf("trial session: %x arrived as %x", want, got.packet)
				}
				inline[from] = inline[from] || got.inline
			case <-timeout:
				return errors.New("trial session: a packet did not arrive")
			}
		}
		if marker > 32 {
			return errors.New("trial session: all packets went through the devices")
		}
	}
	return nil
}

// trialEnd is one end of a session in memory.
type trialEnd struct {
	*trialPath
	addr      netip.Addr
	private   [32]byte
	public    [32]byte
	transport *Transport
	device    *device.Device
}

// newTrialEnds makes two ends that know each other, over the binds of package bindtest or what is around them. count is
// told which of them has dropped something. The ends have to be closed after an error too.
func newTrialEnds(binds [2]conn.Bind, count func(end int, d natengine.Drop)) (ends [2]*trialEnd, err error) {
	for i := range ends {
		e := &trialEnd{trialPath: newTrialPath(), addr: netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)})}
		_, _ = rand.Read(e.private[:]) // never fails
		public, err := curve25519.X25519(e.private[:], curve25519.Basepoint)
		if err != nil {
			return ends, err
		}
		e.public, ends[i] = [32]byte(public), e
	}
	for i, e := range ends {
		other := ends[1-i]
		e.transport, err = New(e.trialPath, binds[i], func(_ *natengine.PeerState, _ natengine.Direction, d natengine.Drop) { count(i, d) })
		if err != nil {
			return ends, err
		}
		e.device = device.NewDevice(e.transport.TUN(), e.transport.Bind(), device.NewLogger(device.LogLevelSilent, ""))
		e.transport.Attach(e.device)
		err = e.device.IpcSet(fmt.Sprintf("private_key=%x\npublic_key=%x\nendpoint=127.0.0.1:%d\nallowed_ip=%v/32\n", e.private, other.public, i+1, other.addr))
		if err == nil {
			err = e.device.Up()
		}
		if err != nil {
			return ends, err
		}
		e.transport.SetPeers([]Peer{{e.peer, other.public}})
	}
	return ends, nil
}

func closeTrialEnds(ends [2]*trialEnd) {
	for _, e := range ends {
		if e != nil && e.device != nil {
			e.device.Close()
		}
	}
}

// trialPacket is a whole IPv4 packet of 21 octets.
func trialPacket(src, dst netip.Addr, marker byte) []byte {
	p := make([]byte, 21)
	p[0], p[3], p[8], p[9], p[20] = 0x45, 21, 64, 253, marker // protocol 253: for experiments (RFC 3692)
	copy(p[12:], src.AsSlice())
	copy(p[16:], dst.AsSlice())
	return p
}

// trialPath is one end of a trial session.
type trialPath struct {
	peer   *natengine.PeerState
	out    chan []byte
	in     chan trialArrival
	closed chan struct{}
	events chan tun.Event
}

type trialArrival struct {
	packet []byte
	inline bool
}

var _ Path = (*trialPath)(nil)

func newTrialPath() *trialPath {
	return &trialPath{
		peer: new(natengine.PeerState), out: make(chan []byte), in: make(chan trialArrival, 1024),
		closed: make(chan struct{}), events: make(chan tun.Event),
	}
}

func (p *trialPath) ReadEach(_ int, to datapath.Taker) error {
	select {
	case b := <-p.out:
		to.Take(p.peer, b)
		return nil
	case <-p.closed:
		return os.ErrClosed
	}
}

func (p *trialPath) Read([][]byte, []int, int) (int, error) { return 0, errors.ErrUnsupported }

func (p *trialPath) WriteFrom(_ *natengine.PeerState, bufs [][]byte, offset int) (int, error) {
	return p.arrive(bufs, offset, true)
}

func (p *trialPath) Write(bufs [][]byte, offset int) (int, error) {
	return p.arrive(bufs, offset, false)
}

func (p *trialPath) arrive(bufs [][]byte, offset int, inline bool) (int, error) {
	for _, b := range bufs {
		p.in <- trialArrival{bytes.Clone(b[offset:]), inline}
	}
	return len(bufs), nil
}

func (p *trialPath) MTU() (int, error)        { return 1420, nil }
func (p *trialPath) Name() (string, error)    { return "trial", nil }
func (p *trialPath) File() *os.File           { return nil }
func (p *trialPath) Events() <-chan tun.Event { return p.events }
func (p *trialPath) BatchSize() int           { return 1 }

func (p *trialPath) Close() error {
	close(p.closed)
	close(p.events)
	return nil
}
